"""Undo copies: what a repair overwrites, kept outside the volume within a budget.

A repair writes only bytes that match a recorded checksum; the copies are a safeguard
against unforeseen errors. In the folder `undo/<container>/<job>` of the state folder,
`<block>-<offset>-<length>` holds the overwritten bytes, and `<block>-<table>-<length>`
a database row that could not be parsed.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from merkle.tree import BlockId, ContainerId
from ozone.errors import UndoBudgetError
from ozone.rocks import OzoneTable
from runtime.disk import Disk, disk_error
from runtime.errors import DiskError

# Container IDs, and the names of jobs, are directory names.
_CONTAINER = re.compile(r"[1-9][0-9]*")
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


# A copy of bytes, and one of a row.
_BYTES = re.compile(r"([0-9]+)-([0-9]+)-([0-9]+)")
_ROW = re.compile(r"[0-9]+-[a-z_]+-[0-9]+")


@dataclass(frozen=True, slots=True)
class UndoCopy:
    """A copy of `length` bytes that a job overwrote at `offset` of a block's file."""

    block_id: BlockId
    offset: int
    length: int
    path: Path


class UndoStore:
    """The undo copies of one volume. Thread-safe."""

    def __init__(self, folder: Path, disk: Disk, *, budget_bytes: int) -> None:
        """`folder` need not exist; copies that it already has count against the
        budget.
        """
        self._folder = folder
        self._disk = disk
        self._budget_bytes = budget_bytes
        self._lock = Lock()
        # One removal at a time: two would subtract the same bytes twice.
        self._removing = Lock()
        self._used_bytes = _length_of(folder)

    @property
    def used_bytes(self) -> int:
        """The size of all undo copies."""
        return self._used_bytes

    def keep(
        self, container_id: ContainerId, job: str, block_id: BlockId, offset: int, data: bytes
    ) -> None:
        """Store a durable copy of the bytes at an offset of a block.

        If the job already has a copy of the range, that copy stays: it has the original
        content.

        Raises:
            UndoBudgetError: the bytes do not fit; nothing is stored, and the caller
                must not overwrite them.
            DiskError: the copy cannot be written.
        """
        self._keep(container_id, job, f"{block_id}-{offset}-{len(data)}", data)

    def keep_row(
        self,
        container_id: ContainerId,
        job: str,
        block_id: BlockId,
        table: OzoneTable,
        row: bytes,
    ) -> None:
        """Store a durable copy of a block's row in a table; raises as `keep` does."""
        self._keep(container_id, job, f"{block_id}-{table.value}-{len(row)}", row)

    def jobs(self, container_id: ContainerId) -> list[str]:
        """The jobs that have copies of a container.

        Raises:
            DiskError: the folder cannot be read.
        """
        folder = self._folder / str(container_id)
        if not self._disk.is_folder(folder):
            return []
        names = [name for name in self._disk.names(folder) if _JOB.fullmatch(name)]
        return [name for name in names if self._disk.is_folder(folder / name)]

    def copies(self, container_id: ContainerId, job: str) -> tuple[list[UndoCopy], int]:
        """The copies of bytes that a job overwrote, and how many rows it replaced.

        Raises:
            DiskError: the folder cannot be read.
        """
        assert _JOB.fullmatch(job), job
        folder = self._folder / str(container_id) / job
        if not self._disk.is_folder(folder):
            return [], 0
        names = self._disk.names(folder)
        found = [
            UndoCopy(BlockId(int(match[1])), int(match[2]), int(match[3]), folder / name)
            for name in names
            if (match := _BYTES.fullmatch(name))
        ]
        return found, sum(bool(_ROW.fullmatch(name)) for name in names)

    def read(self, copy: UndoCopy) -> bytes:
        """The bytes of a copy.

        Raises:
            DiskError: they cannot be read, or are not as many as the name says.
        """
        data = self._disk.read(copy.path)
        if len(data) != copy.length:
            raise DiskError(f"{copy.path} has {len(data)} bytes", path=str(copy.path))
        return data

    def clean(self, *, older_than_s: float, now_s: float) -> int:
        """Remove the copies of jobs whose newest copy is older than that; returns the
        bytes freed. What is not a folder of a job stays.

        Raises:
            DiskError: a folder cannot be read or removed; the others are done.
        """
        freed = 0
        failures: list[DiskError] = []
        with self._removing:
            for container in self._folders(self._folder, _CONTAINER, failures):
                for job in self._folders(container, _JOB, failures):
                    try:
                        newest_ns = self._newest_ns(job)
                        if newest_ns is not None and newest_ns / 1e9 < now_s - older_than_s:
                            freed += self._remove(job)
                    except DiskError as error:
                        failures.append(error)
        for failure in failures:
            # A copy may be renamed meanwhile: that job is not old, and the next call
            # visits it again.
            if not failure.facts.get("missing"):
                raise failure
        return freed

    def forget(self, container_id: ContainerId) -> None:
        """Remove all copies of a container durably, after its deletion."""
        with self._removing:
            self._remove(self._folder / str(container_id))
            if self._disk.is_folder(self._folder):
                self._disk.sync_folder(self._folder)

    def _keep(self, container_id: ContainerId, job: str, name: str, data: bytes) -> None:
        assert _JOB.fullmatch(job), job
        path = self._folder / str(container_id) / job / name
        with self._lock:
            if path.exists():
                return
            if self._used_bytes + len(data) > self._budget_bytes:
                raise UndoBudgetError(
                    f"undo copies of {len(data)} bytes do not fit the budget of"
                    f" {self._budget_bytes} bytes",
                    hint=(
                        "Copies expire by age. Raise the budget, or remove copies that are no"
                        " longer needed."
                    ),
                    container_id=container_id,
                    used_bytes=self._used_bytes,
                )
            self._used_bytes += len(data)
        try:
            self._disk.make_folder(path.parent)
            self._disk.replace(path, data)
        except DiskError:
            with self._lock:
                self._used_bytes -= len(data)
            raise

    def _folders(
        self, folder: Path, pattern: re.Pattern[str], failures: list[DiskError]
    ) -> list[Path]:
        """The folders with names that we give; a person may have left files beside
        them, or links that lead out of ours.
        """
        try:
            found = [folder / name for name in self._disk.names(folder) if pattern.fullmatch(name)]
            return [path for path in found if self._disk.is_folder(path) and not path.is_symlink()]
        except DiskError as error:
            failures.append(error)
            return []

    def _newest_ns(self, job: Path) -> int | None:
        times = [self._disk.modified_ns(job / name) for name in self._disk.names(job)]
        known = [time_ns for time_ns in times if time_ns is not None]
        return max(known, default=self._disk.modified_ns(job))

    def _remove(self, folder: Path) -> int:
        size = _length_of(folder)
        self._disk.remove_folder(folder)
        with self._lock:
            self._used_bytes -= size
        return size


def _length_of(folder: Path) -> int:
    """The bytes of all files in a folder and its folders; 0 if it does not exist."""

    def fail(error: OSError) -> None:
        # Removed at this moment.
        if not isinstance(error, FileNotFoundError):
            raise disk_error("list", folder, error) from error

    total = 0
    for parent, _, names in os.walk(folder, onerror=fail):
        for name in names:
            path = Path(parent) / name
            try:
                total += path.lstat().st_size
            except FileNotFoundError:
                continue
            except OSError as error:
                raise disk_error("stat", path, error) from error
    return total
