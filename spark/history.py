"""The rows that the last sweeps compared, kept so that the next one can tell what changed in silence since.

A volume's rows lie in `<out>/chunks/<sweep id>/`. Those of tables stay where they are: an agent keeps its files for the
next export, and a sweep says where some are gone or others by then.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from merkle.errors import ChunkTableError, DiskError
from ozone.disk import Disk
from protos.chunk_table import CHUNK_SCHEMA
from spark.gather import Gatherer, Int64s
from spark.inputs import export_datanodes, export_events, is_unchanged
from spark.model import FINDING_SCHEMA, REPLICA_SCHEMA, Part
from spark.output import Output, Table
from spark.silent import silent_changes, silent_findings
from spark.work import Stored, parts_of, ranges

# Sweeps whose rows are kept: the last one and that before.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class Looked:
    """Silent changes, FINDING_SCHEMA, since the sweep `previous`; notes say what could not be compared."""

    findings: pa.Table
    notes: tuple[str, ...] = ()
    previous: str | None = None


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

    def look(
        self, output: Output, sweep_id: str, gatherer: Gatherer, parts: Sequence[Part], manifests: Sequence[str]
    ) -> Looked:
        """What changed in silence since the last complete sweep; `sweep_id`, whose roots are written, read `parts`.

        Raises:
            DiskError, ChunkTableError: what this sweep has read or written cannot be read.
        """
        earlier = [name for name in output.sweeps() if name < sweep_id]
        if not earlier:
            return Looked(FINDING_SCHEMA.empty_table())
        previous = earlier[-1]
        before, now = (Stored([output.path(Table.ROOTS, name)], REPLICA_SCHEMA) for name in (previous, sweep_id))
        pieces = [silent_changes(before.read(wanted), now.read(wanted)) for wanted in ranges([before, now])]
        changed: Int64s = np.concatenate(pieces)
        if not len(changed):
            return Looked(FINDING_SCHEMA.empty_table(), (), previous)
        notes = []
        try:
            their_parts, their_manifests = self.recall(previous)
            events, told = export_events(manifests, their_manifests), export_datanodes(manifests)
        except (DiskError, ChunkTableError) as error:
            note = f"silent changes since {previous} cannot be told: {error.message}"
            return Looked(FINDING_SCHEMA.empty_table(), (note,), previous)
        kept = [part for part in their_parts if is_unchanged(part)]
        if len(kept) < len(their_parts):
            gone = len({part.location for part in their_parts} - {part.location for part in kept})
            notes.append(
                f"{gone} files that {previous} read are gone or changed: what they held is compared with nothing"
            )
        found = [FINDING_SCHEMA.empty_table()]
        ones = np.ones(len(changed), np.int64)
        for ids, rows in gatherer.gathered(parts, changed, ones):
            theirs = [held for _, held in gatherer.gathered(kept, ids, np.ones(len(ids), np.int64))]
            before_rows = pa.concat_tables([held.cast(CHUNK_SCHEMA) for held in theirs])
            unheard = frozenset(rows["datanode"].unique().to_pylist()) - told
            found.append(silent_findings(before_rows, rows.cast(CHUNK_SCHEMA), events, unheard=unheard))
        return Looked(pa.concat_tables(found), tuple(notes), previous)

    def retain(self, sweeps: Sequence[str]) -> None:
        """Remove the rows of all but the last of these sweeps.

        Raises:
            DiskError: they cannot be removed.
        """
        kept = set(sweeps[-_KEPT:])
        for name in self._disk.names(self._folder):
            if name not in kept:
                self._disk.remove_folder(self._folder / name)
