"""Undo copies: what a repair is about to overwrite, kept outside the volume for a
while, within a budget.

A repair writes only what matches a recorded checksum, so that its copies are for the
case nobody thought of. They lie in the state folder as
`undo/<container>/<job>/<block>-<offset>-<length>`, each file the bytes that stood
there, and `<block>-<table>-<length>`, the row that stood in the database and that we
could not read.
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

# A job's name becomes a folder's.
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class UndoStore:
    """The undo copies of one volume. Thread-safe."""

    def __init__(self, folder: Path, disk: Disk, *, budget_bytes: int) -> None:
        """`folder` need not be there; what it holds from before counts against the
        budget.
        """
        self._folder = folder
        self._disk = disk
        self._budget_bytes = budget_bytes
        self._lock = Lock()
        # What one removal counts, another must not have removed meanwhile.
        self._removing = Lock()
        self._used_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    @property
    def used_bytes(self) -> int:
        """How many bytes of undo copies are kept."""
        return self._used_bytes

    def keep(
        self, container_id: ContainerId, job: str, block_id: BlockId, offset: int, data: bytes
    ) -> None:
        """Keep bytes, durably. A copy of the place from the same job stays: what stood
        there first counts.

        Raises:
            UndoBudgetError: they do not fit; nothing is kept, and nothing may be
                overwritten.
            DiskError: they could not be kept.
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
        """Keep a block's row of a table; raises as `keep` does."""
        self._keep(container_id, job, f"{block_id}-{table.value}-{len(row)}", row)

    def clean(self, *, older_than_s: float, now_s: float) -> int:
        """Remove the copies of jobs that wrote nothing for so long; returns the bytes
        freed.
        """
        freed = 0
        with self._removing:
            for job in sorted(self._folder.glob("*/*")):
                # A copy may be getting its name at this moment: that job is not old,
                # and its turn comes again.
                with contextlib.suppress(FileNotFoundError):
                    files = [path for path in job.iterdir() if path.is_file()]
                    newest_s = max(
                        (path.stat().st_mtime for path in files), default=job.stat().st_mtime
                    )
                    if newest_s < now_s - older_than_s:
                        freed += self._remove(job)
        return freed

    def forget(self, container_id: ContainerId) -> None:
        """Remove the copies of a container that was deleted."""
        with self._removing:
            self._remove(self._folder / str(container_id))

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
                        "Old copies go by age; raise the budget, or remove copies that are no"
                        " longer wanted."
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
