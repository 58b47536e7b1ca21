"""A folder that belongs to one process at a time.

The lock is a flock on the file `lock` in the folder. The system releases it when the
process ends, however it ends. The file stays, because its removal would let two others
lock two files of one name.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from runtime.disk import disk_error
from runtime.errors import BusyError

_FILE = "lock"
# The program's name, as the file has it, is part of an error message.
_NAME_BYTES_MAX = 64


class FolderLock:
    """Holds a folder from its creation until `release`."""

    def __init__(self, folder: Path, program: str, *, file: str = _FILE) -> None:
        """Lock an existing folder for this program, by a file of this name.

        Raises:
            BusyError: another process holds the folder; its ID is the fact `pid`.
            DiskError: the lock file cannot be opened.
        """
        path = folder / file
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise disk_error("lock", path, error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, program.encode(), 0)
        except BlockingIOError as error:
            holder, pid = _program_in(descriptor), lock_holder(descriptor)
            os.close(descriptor)
            raise BusyError(
                f"{folder} is in use by {holder}{f' (process {pid})' if pid else ''}",
                hint="Stop it, or wait for its end. Each process needs a state folder of its own.",
                path=str(folder),
                pid=pid,
            ) from error
        except OSError as error:
            os.close(descriptor)
            raise disk_error("lock", path, error) from error
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Release the folder; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def lock_holder(descriptor: int) -> int:
    """The process that holds a flock on an open file; 0 if the system reports none."""
    inode = os.fstat(descriptor).st_ino
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1:2] == ["FLOCK"] and fields[5].endswith(f":{inode}"):
                return max(int(fields[4]), 0)
    return 0


def _program_in(descriptor: int) -> str:
    name = os.pread(descriptor, _NAME_BYTES_MAX, 0).decode("ascii", "replace")
    return name if name.isprintable() and name else "another process"
