"""Number the starts of an agent, so that the controller can tell a late report of an
earlier start from one of this.

The number is the time of the start. A clock may be set back between two starts, so the
last number is stored, and the next is always higher.
"""

from contextlib import suppress
from pathlib import Path

from runtime.disk import Disk
from runtime.errors import DiskError

_FILE = "incarnation"
# More digits than any time in ms has; the controller reads no more than 19.
_DIGITS_MAX = 18


def next_incarnation(state_folder: Path, disk: Disk, now_ms: int) -> int:
    """The number of this start, stored in the agent's state folder; `now_ms` is the
    time in ms since the epoch.

    A number that cannot be read counts as none.

    Raises:
        DiskError: the number cannot be stored.
    """
    path, last = state_folder / _FILE, 0
    with suppress(DiskError, ValueError):
        text = disk.read(path)
        last = int(text) if len(text) <= _DIGITS_MAX else 0
    number = max(now_ms, last + 1)
    disk.replace(path, str(number).encode())
    return number
