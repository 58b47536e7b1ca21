"""The last sweep of a folder, for the page: sweep and controller meet in its files."""

from dataclasses import dataclass
from pathlib import Path

from merkle.errors import ReconcileError
from runtime.disk import Disk
from runtime.errors import DiskError
from sweep.output import Summary, SweepStore


@dataclass(frozen=True, slots=True)
class LastSweep:
    """The newest complete sweep; `fault` says why it is unknown, else it is empty."""

    summary: Summary | None
    fault: str = ""


class SweepFolder:
    """The sweeps that `treefold sweep run --out FOLDER` wrote."""

    def __init__(self, folder: Path) -> None:
        self._store = SweepStore(folder, Disk())

    def last(self) -> LastSweep:
        """The newest sweep, read anew."""
        try:
            found = self._store.sweeps()
            if not found:
                return LastSweep(None, f"there is no sweep in {self._store.folder}")
            return LastSweep(Summary.of(self._store.summary(found[-1])))
        except (ReconcileError, KeyError, TypeError, ValueError) as error:
            return LastSweep(None, f"the last sweep cannot be read: {error}")

    def report(self) -> bytes | None:
        """The report of the newest sweep; None without one."""
        found = self._store.sweeps()
        try:
            return self._store.access.read(self._store.report(found[-1])) if found else None
        except DiskError:
            return None
