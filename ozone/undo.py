"""Undo copies: what a repair overwrites, kept outside the volume within a budget.

A repair writes only bytes that match a recorded checksum; the copies are a safeguard
against unforeseen errors. In the folder `undo/<container>/<job>` of the state folder,
`<block>-<offset>-<length>` holds the overwritten bytes, and `<block>-<table>-<length>`
a database row that could not be parsed.
"""

import contextlib
import re
from pathlib import Path
from threading import Lock

from merkle.tree import BlockId, ContainerId
from ozone.errors import UndoBudgetError
from ozone.rocks import OzoneTable
from runtime.disk import Disk
from runtime.errors import DiskError

# The name of a job becomes a directory name.
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
        self._used_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

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

    def clean(self, *, older_than_s: float, now_s: float) -> int:
        """Remove the copies of jobs whose newest copy is older than that; returns the
        bytes freed.
        """
        freed = 0
        with self._removing:
            for job in sorted(self._folder.glob("*/*")):
                # A copy may be renamed at this moment: that job is not old, and the
                # next call visits it again.
                with contextlib.suppress(FileNotFoundError):
                    files = [path for path in job.iterdir() if path.is_file()]
                    newest_s = max(
                        (path.stat().st_mtime for path in files), default=job.stat().st_mtime
                    )
                    if newest_s < now_s - older_than_s:
                        freed += self._remove(job)
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

    def _remove(self, folder: Path) -> int:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        self._disk.remove_folder(folder)
        with self._lock:
            self._used_bytes -= size
        return size
