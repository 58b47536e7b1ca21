"""The rows that the last sweeps compared, kept so that the next one can tell what
changed in silence since.

A volume's rows lie in `<out>/chunks/<sweep id>/`. Those of tables stay where they are:
an agent keeps its files for the next export, and a sweep says where some are gone or
others by then. What it says of them in manifest and inventory is copied, for with each
export that is replaced even where no row changed.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.errors import ChunkTableError
from chunktable.schema import CHUNK_SCHEMA
from merkle.errors import ReconcileError
from runtime.disk import Disk
from runtime.errors import DiskError
from sweep.files import is_readable
from sweep.gather import Gatherer, Int64s
from sweep.inputs import export_events, is_unchanged, keep_export
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, Part
from sweep.output import SweepStore, SweepTable
from sweep.silent import SAME, silent_changes, silent_findings
from sweep.work import StoredTable, parts_of, ranges

# Sweeps whose rows are kept: the last one and that before.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class SilentChangeReport:
    """Silent changes, FINDING_SCHEMA, since `previous`, the newest sweep held against;
    notes say what was not.
    """

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
        folder, kept = self.folder(sweep_id), dict[str, str]()
        self._disk.make_folder(folder)
        for place in manifests:
            # Where the agent exported meanwhile, the next sweep says that it cannot be
            # read.
            with suppress(ChunkTableError):
                kept[place] = keep_export(place, folder, self._disk)
        held = [
            replace(part, manifest=kept.get(part.manifest or "", part.manifest)) for part in parts
        ]
        said = {
            "parts": [asdict(part) for part in held],
            "manifests": [kept.get(place, place) for place in manifests],
        }
        self._disk.replace(
            folder / "parts.json", json.dumps(said, default=lambda value: value.value).encode()
        )

    def recall(self, sweep_id: str) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """The parts and manifests that a sweep read.

        Raises:
            DiskError: nothing is known of it.
        """
        path = self.folder(sweep_id) / "parts.json"
        raw = self._disk.read(path)
        try:
            said = json.loads(raw)
            return parts_of(said["parts"]), tuple(said["manifests"])
        except (ValueError, TypeError, KeyError) as error:
            raise DiskError(f"{path} is damaged: {error!r}", path=str(path)) from error

    def last_seen(
        self, output: SweepStore, sweep_id: str
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """The last of the sweeps before `sweep_id` that each datanode was in, and notes
        on those that do not tell.
        """
        seen, notes = dict[str, str](), list[str]()
        for name in _earlier(output, sweep_id):
            try:
                seen |= dict.fromkeys(output.datanodes(name), name)
            except DiskError as error:
                notes.append(
                    f"which datanodes were in sweep {name} cannot be told: {error.message}"
                )
        return seen, tuple(notes)

    def look(
        self,
        output: SweepStore,
        sweep_id: str,
        gatherer: Gatherer,
        parts: Sequence[Part],
        manifests: Sequence[str],
        seen: Mapping[str, str],
    ) -> SilentChangeReport:
        """What changed in silence up to `sweep_id`, whose roots are written; `seen` is
        what `last_seen` says of it.

        Each replica is held against the last sweep that read it, of those whose rows
        are kept: it may have been skipped for a night.

        Raises:
            DiskError, ChunkTableError: what this sweep has read or written cannot be
                read.
        """
        now, notes = (
            StoredTable([output.path(SweepTable.ROOTS, sweep_id)], REPLICA_SCHEMA),
            list[str](),
        )
        names, before = _earlier(output, sweep_id)[-_KEPT:], dict[str, StoredTable]()
        for name in reversed(names):
            try:
                before[name] = StoredTable([output.path(SweepTable.ROOTS, name)], REPLICA_SCHEMA)
            except DiskError as error:
                notes.append(_untold(name, error))
        previous, changed = next(iter(before), None), {name: list[pa.Table]() for name in before}
        for wanted in ranges([now, *before.values()]) if before else ():
            left = now.read(wanted)
            for name, stored in list(before.items()):
                try:
                    theirs = stored.read(wanted)
                except DiskError as error:
                    notes.append(_untold(name, error))
                    del before[name]
                    continue
                theirs = theirs.filter(pc.is_valid(theirs["root"]))
                changed[name].append(silent_changes(theirs, left))
                left = left.join(theirs.select(list(SAME)), list(SAME), join_type="left anti")
        found = [FINDING_SCHEMA.empty_table()]
        for name, pieces in changed.items():
            if any(piece.num_rows for piece in pieces):
                since, said = self._since(
                    name, pa.concat_tables(pieces), gatherer, parts, manifests
                )
                found.append(since)
                notes += said
        for datanode in sorted(output.datanodes(sweep_id) & seen.keys()):
            if seen[datanode] not in names:
                notes.append(
                    f"silent changes of {datanode} cannot be told: it was last in sweep"
                    f" {seen[datanode]}, whose rows are no longer kept"
                )
        return SilentChangeReport(pa.concat_tables(found), tuple(notes), previous)

    def _since(
        self,
        previous: str,
        changed: pa.Table,
        gatherer: Gatherer,
        parts: Sequence[Part],
        manifests: Sequence[str],
    ) -> tuple[pa.Table, list[str]]:
        """The silent changes of these replicas (columns SAME) since `previous`,
        FINDING_SCHEMA, and notes.
        """
        found, notes = [FINDING_SCHEMA.empty_table()], list[str]()
        try:
            their_parts, their_manifests = self.recall(previous)
        except DiskError as error:
            return found[0], [_untold(previous, error)]
        told = export_events(manifests, their_manifests)
        notes += [
            f"silent changes since {previous} cannot be told of what {place} names: {reason}"
            for place, reason in told.errors.items()
        ]
        containers: Int64s = np.unique(changed["container_id"].to_numpy())
        kept = [part for part in their_parts if is_unchanged(part)]
        kept = [part for part in kept if part.manifest is None or is_readable(part, containers)]
        if len(kept) < len(their_parts):
            gone = len({part.location for part in their_parts} - {part.location for part in kept})
            notes.append(
                f"{gone} files that {previous} read are gone, changed or damaged: what they held is"
                " compared with nothing"
            )
        for ids, rows in gatherer.gathered(parts, containers, np.ones(len(containers), np.int64)):
            try:
                theirs = [
                    held for _, held in gatherer.gathered(kept, ids, np.ones(len(ids), np.int64))
                ]
            except ChunkTableError as error:
                notes.append(_untold(previous, error))
                break
            before_rows = pa.concat_tables([held.cast(CHUNK_SCHEMA) for held in theirs])
            before_rows = before_rows.join(changed, list(SAME), join_type="left semi").cast(
                CHUNK_SCHEMA
            )
            is_lost = pc.is_in(before_rows["datanode"], pa.array(sorted(told.lost), pa.string()))
            before_rows = before_rows.filter(pc.invert(is_lost))
            unheard = frozenset(rows["datanode"].unique().to_pylist()) - told.datanodes
            found.append(
                silent_findings(before_rows, rows.cast(CHUNK_SCHEMA), told.events, unheard=unheard)
            )
        return pa.concat_tables(found), notes

    def retain(self, sweeps: Sequence[str]) -> None:
        """Remove the rows of all but the last of these sweeps.

        Raises:
            DiskError: they cannot be removed.
        """
        kept = set(sweeps[-_KEPT:])
        for name in self._disk.names(self._folder):
            if name not in kept:
                self._disk.remove_folder(self._folder / name)


def _earlier(output: SweepStore, sweep_id: str) -> list[str]:
    return [name for name in output.sweeps() if name < sweep_id]


def _untold(sweep_id: str, error: ReconcileError) -> str:
    return f"silent changes since {sweep_id} cannot be told: {error.message}"
