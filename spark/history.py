"""The rows that the last sweeps compared, kept so that the next one can tell what changed in silence since.

A volume's rows lie in `<out>/chunks/<sweep id>/`. Those of tables stay where they are: an agent keeps its files for the
next export, and a sweep says where some are gone or others by then.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ozone.disk import Disk
from spark.model import Part
from spark.work import parts_of

# Sweeps whose rows are kept: the last one and that before.
_KEPT = 2


class History:
    """The kept rows of one output folder."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._folder = out / "chunks"
        self._disk = disk

    def folder(self, sweep_id: str) -> Path:
        """Where a sweep's own rows lie."""
        return self._folder / sweep_id

    def remember(self, sweep_id: str, parts: Sequence[Part], manifests: Sequence[str]) -> None:
        """Note what a sweep read.

        Raises:
            DiskError: it cannot be written.
        """
        folder = self.folder(sweep_id)
        self._disk.make_folder(folder)
        said = {"parts": [asdict(part) for part in parts], "manifests": list(manifests)}
        self._disk.replace(folder / "parts.json", json.dumps(said, default=lambda value: value.value).encode())

    def recall(self, sweep_id: str) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """The parts and manifests that a sweep read.

        Raises:
            DiskError: nothing is known of it.
        """
        said = json.loads(self._disk.read(self.folder(sweep_id) / "parts.json"))
        return parts_of(said["parts"]), tuple(said["manifests"])

    def retain(self, sweeps: Sequence[str]) -> None:
        """Remove the rows of all but the last of these sweeps.

        Raises:
            DiskError: they cannot be removed.
        """
        kept = set(sweeps[-_KEPT:])
        for name in self._disk.names(self._folder):
            if name not in kept:
                self._disk.remove_folder(self._folder / name)
