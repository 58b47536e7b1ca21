"""Find silent changes by comparing the rows of a sweep with those of earlier sweeps.

A silent change is a live chunk whose checksum differs from an earlier sweep although no
agent wrote to it. A replica is compared with its own earlier state, if `bcs_id` and
`source` are equal: client writes raise `bcs_id`, and a tree may differ from the records
or the data. Damage found by a scan is both a silent change and corrupt. A chunk that
changed together with its recorded checksum is found only here.

The rows of volumes are kept in `<out>/chunks/<sweep id>/`. The rows of tables are not
copied, because an agent keeps its files until its next export; files that are gone or
replaced by then get a note. Manifests and inventories are copied, because every export
replaces them.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import accumulate
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.errors import ChunkTableError
from chunktable.files import AnyPath, Files
from chunktable.manifest import (
    FileKind,
    TableRefusal,
)
from chunktable.reader import read_events
from chunktable.schema import CHUNK_SCHEMA, EVENT_SCHEMA
from merkle.columns import TreeColumns
from merkle.errors import ReconcileError
from merkle.tree import root_hex
from protos.errors import unambiguous
from runtime.documents import parse_json
from runtime.errors import DiskError
from sweep.exact import ReplicaId, trees_of
from sweep.files import is_readable
from sweep.gather import Gatherer, Int64s
from sweep.inputs import is_unchanged, open_export
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, FindingKind, Part, RootMethod
from sweep.output import SweepStore, SweepTable
from sweep.pieces import StoredTable
from sweep.stages import ContainerStage
from sweep.work import parts_of

# Sweeps whose rows are kept: this one and the one before.
_KEPT = 2


@dataclass(frozen=True, slots=True)
class SilentChangeReport:
    """Silent changes (FINDING_SCHEMA), and notes on what could not be compared.
    `previous` is the newest sweep compared with.
    """

    findings: pa.Table
    notes: tuple[str, ...] = ()
    previous: str | None = None


class History:
    """The rows of earlier sweeps in one output folder."""

    def __init__(self, out: AnyPath, files: Files) -> None:
        self._folder = out / "chunks"
        self._files = files

    def folder(self, sweep_id: str) -> AnyPath:
        """The folder for the rows that a sweep copies from volumes."""
        return self._folder / sweep_id

    def save(self, sweep_id: str, parts: Sequence[Part], manifests: Sequence[str]) -> None:
        """Store which parts and manifests a sweep read.

        Raises:
            DiskError: they cannot be written.
        """
        folder, kept, used = self.folder(sweep_id), dict[str, str](), set[AnyPath]()
        self._files.make_folder(folder)
        for place in manifests:
            # If the agent exported meanwhile, the next sweep reports that it cannot be
            # read.
            with suppress(ChunkTableError):
                copies = folder / f"datanode={quote(open_export(place)[2].datanode, safe='')[:200]}"
                if copies in used:
                    # Another export of this datanode, with other volumes.
                    copies = copies.with_name(f"{copies.name}+{len(used)}")
                used.add(copies)
                kept[place] = _keep_export(place, copies, self._files)
        kept_parts = [
            replace(part, manifest=kept.get(part.manifest or "", part.manifest)) for part in parts
        ]
        raw = {
            "parts": [asdict(part) for part in kept_parts],
            "manifests": [kept.get(place, place) for place in manifests],
        }
        self._files.replace(
            folder / "parts.json", json.dumps(raw, default=lambda value: value.value).encode()
        )

    def load(self, sweep_id: str) -> tuple[tuple[Part, ...], tuple[str, ...]]:
        """The parts and manifests that a sweep read.

        Raises:
            DiskError: they are missing or damaged.
        """
        path = self.folder(sweep_id) / "parts.json"
        content = self._files.read(path)
        try:
            raw = parse_json(content)
            return parts_of(raw["parts"]), tuple(raw["manifests"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DiskError(f"{path} is damaged: {error!r}", path=str(path)) from error

    def last_seen(
        self, output: SweepStore, sweep_id: str
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        """The last sweep before `sweep_id` that included each datanode, by datanode,
        and notes on sweeps that cannot be read.
        """
        seen, notes = dict[str, str](), list[str]()
        for name in _earlier_sweeps(output, sweep_id):
            try:
                seen |= dict.fromkeys(output.datanodes(name), name)
            except DiskError as error:
                notes.append(f"the datanodes of sweep {name} are unknown: {error.message}")
        return seen, tuple(notes)

    def silent_changes_since(
        self,
        output: SweepStore,
        sweep_id: str,
        run: Callable[[ContainerStage, Mapping[str, StoredTable]], StoredTable],
        gatherer: Gatherer,
        parts: Sequence[Part],
        manifests: Sequence[str],
        seen: Mapping[str, str],
    ) -> SilentChangeReport:
        """The silent changes up to `sweep_id`, whose table `roots` is written; `seen`
        is the result of `last_seen`, and `run` returns the output of a stage for all
        containers.

        Each replica is compared with the last of the kept sweeps that read it, since a
        sweep may have skipped it.

        Raises:
            DiskError: a table of this sweep cannot be read.
            ChunkTableError: a part of this sweep cannot be read any more.
        """
        now, notes = output.stored(SweepTable.ROOTS, sweep_id, _COMPARED), list[str]()
        names, before = _earlier_sweeps(output, sweep_id)[-_KEPT:], dict[str, StoredTable]()
        for name in reversed(names):
            try:
                before[name] = output.stored(SweepTable.ROOTS, name, _COMPARED)
            except DiskError as error:
                notes.append(_unknown_since(name, error))
        previous, changed = next(iter(before), None), _CHANGED_SCHEMA.empty_table()
        while before:
            try:
                pieces = run(_ChangedStage(tuple(before)), {"now": now, **before}).tables()
                changed = pa.concat_tables([changed, *pieces])
                break
            except DiskError as error:
                # The error names the file; without its sweep the others still compare.
                broken = [name for name in before if f"sweep_id={name}" in error.message]
                if not broken:
                    raise
                notes.append(_unknown_since(broken[0], error))
                del before[broken[0]]
        found = [FINDING_SCHEMA.empty_table()]
        for name in before:
            theirs = changed.filter(pc.equal(changed["sweep_id"], name)).select(list(_SAME))
            if theirs.num_rows:
                since, more_notes = self._since(name, theirs, gatherer, parts, manifests)
                found.append(since)
                notes += more_notes
        for datanode in sorted(output.datanodes(sweep_id) & seen.keys()):
            if seen[datanode] not in names:
                notes.append(
                    f"silent changes of {datanode} are unknown: it was last in sweep"
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
            their_parts, their_manifests = self.load(previous)
        except DiskError as error:
            return found[0], [_unknown_since(previous, error)]
        events = agent_events(manifests, their_manifests)
        notes += [
            f"silent changes since {previous} are unknown for {place}: {reason}"
            for place, reason in events.errors.items()
        ]
        containers: Int64s = np.unique(changed["container_id"].to_numpy())
        kept = [part for part in their_parts if is_unchanged(part)]
        kept = [part for part in kept if part.manifest is None or is_readable(part, containers)]
        if len(kept) < len(their_parts):
            gone = len({part.location for part in their_parts} - {part.location for part in kept})
            notes.append(
                f"{gone} files that {previous} read are missing, changed or damaged: silent changes"
                " of their chunks are unknown"
            )
        for ids, rows in gatherer.gather(parts, containers, np.ones(len(containers), np.int64)):
            try:
                theirs = [
                    held for _, held in gatherer.gather(kept, ids, np.ones(len(ids), np.int64))
                ]
            except ChunkTableError as error:
                notes.append(_unknown_since(previous, error))
                break
            before_rows = pa.concat_tables([held.cast(CHUNK_SCHEMA) for held in theirs])
            before_rows = before_rows.join(changed, list(_SAME), join_type="left semi").cast(
                CHUNK_SCHEMA
            )
            is_lost = pc.is_in(before_rows["datanode"], pa.array(sorted(events.lost), pa.string()))
            before_rows = before_rows.filter(pc.invert(is_lost))
            without_events = frozenset(rows["datanode"].unique().to_pylist()) - events.datanodes
            found.append(
                silent_findings(
                    before_rows,
                    rows.cast(CHUNK_SCHEMA),
                    events.events,
                    without_events=without_events,
                )
            )
        return pa.concat_tables(found), notes

    def retain(self, sweeps: Sequence[str]) -> None:
        """Remove the rows of all but the last two of these sweeps.

        Raises:
            DiskError: they cannot be removed.
        """
        kept = set(sweeps[-_KEPT:])
        for name in self._files.names(self._folder):
            if name not in kept:
                self._files.remove_folder(self._folder / name)


# The UUID of a datanode, given whole.
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/|$)")


def whole_names(output: SweepStore, names: Sequence[str]) -> tuple[str, ...]:
    """The names with whole UUIDs: of a datanode, or DATANODE/VOLUME, the datanode may
    be given by the beginning of its UUID. A name that no kept sweep knows stays.

    Raises:
        AmbiguousIdError: several datanodes begin so.
    """
    if all(_UUID.match(name) or name.startswith("container=") for name in names):
        return tuple(names)
    known = set[str]()
    for sweep_id in output.sweeps():
        # A run says itself what it cannot read of earlier ones.
        with suppress(DiskError):
            known |= output.datanodes(sweep_id)
            for piece in output.pieces(SweepTable.UNSEEN, sweep_id, ["datanode"]):
                known.update(piece["datanode"].unique().to_pylist())
    return tuple(_whole_name(name, known) for name in names)


def _whole_name(name: str, known: AbstractSet[str]) -> str:
    datanode, slash, volume = name.partition("/")
    found = sorted(one for one in known if one.startswith(datanode))
    if not found or not datanode or datanode in known:
        return name
    return unambiguous(datanode, found, "datanodes") + slash + volume


def _earlier_sweeps(output: SweepStore, sweep_id: str) -> list[str]:
    return [name for name in output.sweeps() if name < sweep_id]


def _unknown_since(sweep_id: str, error: ReconcileError) -> str:
    return f"silent changes since {sweep_id} are unknown: {error.message}"


# The ranges of one block that an agent wrote: their starts, ascending, and for each the
# greatest end so far.
_WrittenRanges: TypeAlias = tuple[list[int], list[float]]

# By block ID; None stands for the whole container.
_AgentWrites: TypeAlias = Mapping[int | None, _WrittenRanges]

_REPLICA = ("container_id", "datanode", "volume")

# Two states of a replica are comparable if they agree in these columns.
_SAME = (*_REPLICA, "bcs_id", "source")

# The columns that show whether the tree of a replica changed.
_COMPARED = pa.schema(
    [REPLICA_SCHEMA.field(name) for name in (*_SAME, "root", "fingerprint", "path")]
)


# Replicas whose trees changed, and the earlier sweep that they are compared with.
_CHANGED_SCHEMA = pa.schema(
    [*(REPLICA_SCHEMA.field(name) for name in _SAME), pa.field("sweep_id", pa.string())]
)


@dataclass(frozen=True, slots=True)
class _ChangedStage:
    """Finds the replicas whose trees changed (sweep.stages.ContainerStage).

    Inputs: `now`, and one by the ID of each earlier sweep in `earlier`, newest first
    (REPLICA_SCHEMA). Output: `changed` (_CHANGED_SCHEMA).
    """

    earlier: tuple[str, ...]

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """See ContainerStage."""
        return {"changed": _CHANGED_SCHEMA}

    def __call__(self, tables: Mapping[str, pa.Table]) -> Mapping[str, pa.Table]:
        """See ContainerStage."""
        left, found = tables["now"], [_CHANGED_SCHEMA.empty_table()]
        for name in self.earlier:
            theirs = tables[name].filter(pc.is_valid(tables[name]["root"]))
            changed = silent_changes(theirs, left)
            whose = pa.repeat(pa.scalar(name), changed.num_rows)
            found.append(changed.append_column("sweep_id", whose).cast(_CHANGED_SCHEMA))
            left = left.join(theirs.select(list(_SAME)), list(_SAME), join_type="left anti")
        return {"changed": pa.concat_tables(found)}


def silent_changes(earlier_replicas: pa.Table, replicas: pa.Table) -> pa.Table:
    """The replicas (columns _SAME) whose trees differ between two tables of
    REPLICA_SCHEMA.

    Only rows and events show which chunks changed and why: see `silent_findings`.
    """
    names = _COMPARED.names
    both = replicas.select(names).join(
        earlier_replicas.select(names), list(_SAME), join_type="inner", right_suffix="_before"
    )
    is_sql, was_sql = (
        pc.equal(both[name], RootMethod.SQL.value) for name in ("path", "path_before")
    )
    # A fingerprint from SQL is not comparable with others (sweep.model). Then roots
    # alone decide, which miss one change in 2^32.
    is_same_fingerprint = pc.or_(
        pc.equal(both["fingerprint"], both["fingerprint_before"]), pc.xor(is_sql, was_sql)
    )
    # A null root yields null, which the filter drops: such replicas have no chunks.
    differs = pc.invert(pc.and_(pc.equal(both["root"], both["root_before"]), is_same_fingerprint))
    return both.filter(differs).select(list(_SAME))


def silent_findings(
    earlier_rows: pa.Table,
    rows: pa.Table,
    events: pa.Table,
    *,
    without_events: AbstractSet[str] = frozenset(),
) -> pa.Table:
    """A finding (FINDING_SCHEMA) for each chunk that changed silently.

    `earlier_rows` and `rows` (CHUNK_SCHEMA, in any order) are those of whole containers
    in the earlier sweep and in this one. `events` (EVENT_SCHEMA) are those between the
    two. The datanodes in `without_events` report no events; there, a chunk that did not
    match its record and now does counts as repaired. Replicas whose rows contradict
    each other are ignored.
    """
    comparable = (
        _replicas_of(rows)
        .join(_replicas_of(earlier_rows), list(_SAME), join_type="inner")
        .to_pylist()
    )
    wanted = {ReplicaId(*(row[name] for name in _REPLICA)) for row in comparable}
    agent_writes = _agent_writes(events)
    before = {identity: tree for identity, tree in trees_of(earlier_rows) if identity in wanted}
    held = Counter((row["container_id"], row["datanode"]) for row in _replicas_of(rows).to_pylist())
    found = list[Mapping[str, Any]]()
    for identity, tree in trees_of(rows):
        if identity not in before:
            continue
        container_id, datanode, volume = identity
        name = f"{datanode}/{volume}" if held[container_id, datanode] > 1 else datanode
        writes = agent_writes.get((datanode, container_id), {})
        for block_id, offset, length, was, now, matched, matches in _changed_chunks(
            before[identity], tree
        ):
            is_repair = datanode in without_events and matches and not matched
            if not (is_repair or _is_explained(writes, block_id, offset, length)):
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


def _changed_chunks(
    before: TreeColumns, now: TreeColumns
) -> Iterator[tuple[int, int, int, int, int, bool, bool]]:
    """The chunks that are live in both trees with different checksums: block ID,
    offset, the larger length, both checksums, and whether each matches its record.
    """
    sides = (before, now)
    blocks = np.concatenate(
        [np.repeat(tree.block_ids, np.diff(tree.chunk_starts)) for tree in sides]
    )
    offsets = np.concatenate([tree.chunk_offsets for tree in sides])
    lengths = np.concatenate([tree.chunk_lengths for tree in sides])
    checksums = np.concatenate([tree.chunk_checksums for tree in sides])
    # A chunk occurs at most once per tree; the earlier tree comes first.
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


def _agent_writes(events: pa.Table) -> Mapping[tuple[str, int], _AgentWrites]:
    """The writes of agents, by datanode and container."""
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


def _is_explained(writes: _AgentWrites, block_id: int, offset: int, length: int) -> bool:
    """Whether an agent wrote any byte of the chunk."""
    if None in writes:
        return True
    starts, ends = writes.get(block_id, ([], []))
    begun = bisect_left(starts, offset + max(length, 1))
    return begun > 0 and ends[begun - 1] > offset


@dataclass(frozen=True, slots=True)
class AgentEvents:
    """What agents did to their replicas between two sweeps."""

    # EVENT_SCHEMA.
    events: pa.Table
    # Datanodes whose agents report their repairs. An export made without an agent has
    # none.
    datanodes: frozenset[str]
    # Datanodes whose events cannot be read.
    lost: frozenset[str]
    # Why a manifest or its events cannot be read, by manifest.
    errors: Mapping[str, str]


def agent_events(manifests: Iterable[str], before: Iterable[str] | None = None) -> AgentEvents:
    """The events in these exports since the exports `before` were begun; all of them if
    it is None. An unreadable export affects only its own datanode.
    """
    begun, errors = dict[str, datetime](), dict[str, str]()
    for place in before or ():
        try:
            _, _, manifest = open_export(place)
        except ChunkTableError as error:
            errors[place] = error.message
            continue
        # Not `created_at`: an event during the export may be later than the row read.
        # Of several exports, the oldest: an event too many explains a change, one too
        # few makes a false alarm.
        begun[manifest.datanode] = min(
            begun.get(manifest.datanode, manifest.begun_at), manifest.begun_at
        )
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
    return AgentEvents(pa.concat_tables(found), frozenset(datanodes), frozenset(lost), errors)


def _keep_export(place: str, copies: AnyPath, files: Files) -> str:
    """Copy an export's manifest and inventory, which its agent removes with the export
    after next, to the folder `copies`. Returns the location of the copied manifest.

    Raises:
        ChunkTableError: they cannot be read any more.
        DiskError: the copies cannot be written.
    """
    filesystem, source, manifest = open_export(place)
    files.make_folder(copies)
    names = [file.name for file in manifest.of_kind(FileKind.CONTAINERS)]
    for name in (*names, manifest.name):
        try:
            with filesystem.open_input_stream(f"{source}/{name}", compression=None) as stream:
                raw = stream.read()
        except OSError as error:
            raise ChunkTableError(
                TableRefusal.UNREADABLE.value, f"{source}/{name} cannot be read: {error}"
            ) from error
        files.replace(copies / name, raw)
    return str(copies / manifest.name)
