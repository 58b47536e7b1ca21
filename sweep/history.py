"""Silent changes: the rows of the last sweeps are kept, and compared with those of now.

A silent change is a live chunk whose checksum differs from that of an earlier sweep
although no agent wrote to it. A replica is compared with itself, under equal `bcs_id`
and `source`: a client that wrote raises the one, and a tree need not say what records
or data say. Damage that a scan found is such a change too, and also corrupt. A chunk
that changed together with its record is found by nothing else.

A volume's rows lie in `<out>/chunks/<sweep id>/`. The rows of tables stay where they
are: an agent keeps its files for the next export, and a sweep names those that are gone
or replaced by then. Manifest and inventory are copied, because each export replaces
them even where no row changed.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.errors import ChunkTableError
from chunktable.manifest import (
    FileKind,
    TableRefusal,
)
from chunktable.reader import read_events
from chunktable.schema import CHUNK_SCHEMA, EVENT_SCHEMA
from merkle.columns import TreeColumns
from merkle.errors import ReconcileError
from merkle.tree import root_hex
from runtime.disk import Disk
from runtime.errors import DiskError
from sweep.exact import ReplicaId, trees_of
from sweep.files import is_readable
from sweep.gather import Gatherer, Int64s
from sweep.inputs import is_unchanged, open_export
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, FindingKind, Part, RootMethod
from sweep.output import SweepStore, SweepTable
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
                kept[place] = _keep_export(place, folder, self._disk)
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

    def silent_changes_since(
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
                left = left.join(theirs.select(list(_SAME)), list(_SAME), join_type="left anti")
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
        """The silent changes of these replicas (columns _SAME) since `previous`,
        FINDING_SCHEMA, and notes.
        """
        found, notes = [FINDING_SCHEMA.empty_table()], list[str]()
        try:
            their_parts, their_manifests = self.recall(previous)
        except DiskError as error:
            return found[0], [_untold(previous, error)]
        told = _export_events(manifests, their_manifests)
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
            before_rows = before_rows.join(changed, list(_SAME), join_type="left semi").cast(
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


# Of one block, the starts of the stretches that an agent wrote, ascending, and the
# furthest end up to each.
_Written: TypeAlias = tuple[list[int], list[float]]

# By block; under None what concerns the whole container.
_Doings: TypeAlias = Mapping[int | None, _Written]

_REPLICA = ("container_id", "datanode", "volume")

# What a replica must have in common with itself to be compared.
_SAME = (*_REPLICA, "bcs_id", "source")


def silent_changes(earlier_replicas: pa.Table, replicas: pa.Table) -> pa.Table:
    """The replicas (columns _SAME) that are other than in the sweep before and might
    not be.

    Both tables are of REPLICA_SCHEMA. What changed, and by whom, only rows and events
    tell: see `silent_findings`.
    """
    names = [*_SAME, "root", "fingerprint", "path"]
    both = replicas.select(names).join(
        earlier_replicas.select(names), list(_SAME), join_type="inner", right_suffix="_before"
    )
    is_sql, was_sql = (
        pc.equal(both[name], RootMethod.SQL.value) for name in ("path", "path_before")
    )
    # Fingerprints tell nothing across the path SQL (sweep.model); roots alone do, but
    # for one change in 2^32.
    same_print = pc.or_(
        pc.equal(both["fingerprint"], both["fingerprint_before"]), pc.xor(is_sql, was_sql)
    )
    # Null where there is no root: there are no chunks then.
    differs = pc.invert(pc.and_(pc.equal(both["root"], both["root_before"]), same_print))
    return both.filter(differs).select(list(_SAME))


def silent_findings(
    earlier_rows: pa.Table,
    rows: pa.Table,
    events: pa.Table,
    *,
    unheard: AbstractSet[str] = frozenset(),
) -> pa.Table:
    """A finding (FINDING_SCHEMA) for each chunk that changed silently.

    The rows (CHUNK_SCHEMA, in any order) are those of whole containers, of the earlier
    sweep and of this one; `events` (EVENT_SCHEMA) are those between the two tables. Of
    datanodes `unheard` nobody tells events: there a chunk that did not match its record
    and does now was repaired. Replicas whose rows contradict each other are passed
    over.
    """
    comparable = (
        _replicas_of(rows)
        .join(_replicas_of(earlier_rows), list(_SAME), join_type="inner")
        .to_pylist()
    )
    wanted = {ReplicaId(*(row[name] for name in _REPLICA)) for row in comparable}
    doings = _doings(events)
    before = {identity: tree for identity, tree in trees_of(earlier_rows) if identity in wanted}
    held = Counter((row["container_id"], row["datanode"]) for row in _replicas_of(rows).to_pylist())
    found = list[Mapping[str, Any]]()
    for identity, tree in trees_of(rows):
        if identity not in before:
            continue
        container_id, datanode, volume = identity
        name = f"{datanode}/{volume}" if held[container_id, datanode] > 1 else datanode
        done = doings.get((datanode, container_id), {})
        for block_id, offset, length, was, now, matched, matches in _changed(
            before[identity], tree
        ):
            is_mended = datanode in unheard and matches and not matched
            if not (is_mended or _is_explained(done, block_id, offset, length)):
                record = "matches its record" if matches else "does not match its record"
                found.append(
                    {
                        "kind": FindingKind.SILENT_CHANGE.value,
                        "container_id": container_id,
                        "block_id": block_id,
                        "chunk_offset": offset,
                        "lacking": [name],
                        "sources": [],
                        "detail": (
                            f"the checksum was {root_hex(was)} and is {root_hex(now)}, which"
                            f" {record}"
                        ),
                    }
                )
    return pa.Table.from_pylist(found, FINDING_SCHEMA)


def _replicas_of(rows: pa.Table) -> pa.Table:
    return rows.select(list(_SAME)).group_by(list(_SAME)).aggregate([])


def _changed(
    before: TreeColumns, now: TreeColumns
) -> Iterator[tuple[int, int, int, int, int, bool, bool]]:
    """Block, offset, the larger length, both checksums, and whether they match, of
    chunks that are live in both.
    """
    sides = (before, now)
    blocks = np.concatenate(
        [np.repeat(tree.block_ids, np.diff(tree.chunk_starts)) for tree in sides]
    )
    offsets = np.concatenate([tree.chunk_offsets for tree in sides])
    lengths = np.concatenate([tree.chunk_lengths for tree in sides])
    checksums = np.concatenate([tree.chunk_checksums for tree in sides])
    # Each place at most once a side, the earlier one in front.
    order = np.lexsort((offsets, blocks))
    a, b = order[:-1], order[1:]
    is_same = (blocks[a] == blocks[b]) & (offsets[a] == offsets[b]) & (checksums[a] != checksums[b])
    a, b = a[is_same], b[is_same]
    matched, matches = before.chunk_matches[a], now.chunk_matches[b - len(before.chunk_offsets)]
    columns = (
        blocks[a],
        offsets[a],
        np.maximum(lengths[a], lengths[b]),
        checksums[a],
        checksums[b],
        matched,
        matches,
    )
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _doings(events: pa.Table) -> Mapping[tuple[str, int], _Doings]:
    """What agents did, by datanode and container."""
    stretches: dict[tuple[str, int], dict[int | None, list[tuple[int, float]]]] = {}
    for event in events.to_pylist():
        start, end = event["chunk_offset"], float("inf")
        if start is None or event["kind"] == "delete":
            start = 0
        else:
            end = start + event["length"]
        of_container = stretches.setdefault((event["datanode"], event["container_id"]), {})
        of_container.setdefault(event["block_id"], []).append((start, end))
    return {
        place: {
            block_id: (
                [start for start, _ in sorted(found)],
                list(accumulate((end for _, end in sorted(found)), max)),
            )
            for block_id, found in of_container.items()
        }
        for place, of_container in stretches.items()
    }


def _is_explained(done: _Doings, block_id: int, offset: int, length: int) -> bool:
    """Whether an agent wrote any byte of the chunk."""
    if None in done:
        return True
    starts, ends = done.get(block_id, ([], []))
    begun = bisect_left(starts, offset + max(length, 1))
    return begun > 0 and ends[begun - 1] > offset


@dataclass(frozen=True, slots=True)
class _AgentEvents:
    """What agents did to their replicas between two sweeps."""

    # EVENT_SCHEMA.
    events: pa.Table
    # Datanodes whose agents tell of their repairs: where an export was made without an
    # agent nobody does.
    datanodes: frozenset[str]
    # Of which it is not known; and why, of each manifest that this is for.
    lost: frozenset[str]
    errors: Mapping[str, str]


def _export_events(manifests: Iterable[str], before: Iterable[str]) -> _AgentEvents:
    """What agents did to their replicas since they made the exports `before`; one that
    cannot be read costs its own.
    """
    begun, errors = dict[str, datetime](), dict[str, str]()
    for place in before:
        try:
            _, _, manifest = open_export(place)
        except ChunkTableError as error:
            errors[place] = error.message
            continue
        # While it was made, rows were read before some of its events.
        begun[manifest.datanode] = manifest.begun_at
    found, datanodes, lost = [EVENT_SCHEMA.empty_table()], set[str](), set[str]()
    for place in manifests:
        try:
            filesystem, folder, manifest = open_export(place)
        except ChunkTableError as error:
            errors[place] = error.message
            continue
        try:
            events = read_events(filesystem, folder, manifest)
        except ChunkTableError as error:
            errors[place] = error.message
            lost.add(manifest.datanode)
            continue
        if manifest.audit is not None:
            datanodes.add(manifest.datanode)
        since = begun.get(manifest.datanode)
        if since is not None:
            events = events.filter(
                pc.greater_equal(events["time"], pa.scalar(since, events["time"].type))
            )
        found.append(events)
    return _AgentEvents(pa.concat_tables(found), frozenset(datanodes), frozenset(lost), errors)


def _keep_export(place: str, folder: Path, disk: Disk) -> str:
    """Copy an export's manifest and inventory, which its agent removes with its second
    next export; the manifest there.

    Raises:
        ChunkTableError: they cannot be read any more.
        DiskError: the copies cannot be written.
    """
    filesystem, source, manifest = open_export(place)
    copies = folder / f"datanode={quote(manifest.datanode, safe='')[:200]}"
    disk.make_folder(copies)
    names = [file.name for file in manifest.of_kind(FileKind.CONTAINERS)]
    for name in (*names, manifest.name):
        try:
            with filesystem.open_input_stream(f"{source}/{name}", compression=None) as stream:
                raw = stream.read()
        except OSError as error:
            raise ChunkTableError(
                TableRefusal.UNREADABLE.value, f"{source}/{name} cannot be read: {error}"
            ) from error
        disk.replace(copies / name, raw)
    return str(copies / manifest.name)
