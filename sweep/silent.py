"""Which replicas changed between two sweeps, and which of their chunks changed in
silence: pure functions, and a stage and a comparison made of them.

A silent change is a live chunk whose checksum differs although no agent wrote to it
(sweep.history).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.schema import CHUNK_SCHEMA
from merkle.columns import TreeColumns
from merkle.tree import root_hex
from sweep.exact import ReplicaId, Row, trees_of
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, FindingKind, RootMethod

# The ranges of one block that an agent wrote: their starts, ascending, and for each the
# greatest end so far.
_WrittenRanges: TypeAlias = tuple[list[int], list[float]]

# By block ID; None stands for the whole container.
_AgentWrites: TypeAlias = Mapping[int | None, _WrittenRanges]

_REPLICA = ("container_id", "datanode", "volume")

# Two states of a replica are comparable if they agree in these columns.
_SAME = (*_REPLICA, "bcs_id", "source")

# The columns that show whether the tree of a replica changed.
COMPARED = pa.schema(
    [
        REPLICA_SCHEMA.field(name)
        for name in (*_SAME, "root", "fingerprint", "path", "blocks", "chunks")
    ]
)


# Replicas whose trees changed, with the number of their rows, about, and the earlier
# sweep that they are compared with.
CHANGED_SCHEMA = pa.schema(
    [
        *(REPLICA_SCHEMA.field(name) for name in _SAME),
        pa.field("rows", pa.int64()),
        pa.field("sweep_id", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class SilentChanges:
    """Finds silent changes since the sweep `previous` (sweep.engine.Revisit), by the
    events since then (AgentEvents).
    """

    previous: str
    events: pa.Table
    datanodes: frozenset[str]
    lost: frozenset[str]

    def __call__(self, earlier: pa.Table, rows: pa.Table, changed: pa.Table) -> pa.Table:
        """See Revisit."""
        ours = changed.filter(pc.equal(changed["sweep_id"], self.previous)).select(list(_SAME))
        earlier = earlier.join(ours, list(_SAME), join_type="left semi").cast(CHUNK_SCHEMA)
        is_lost = pc.is_in(earlier["datanode"], pa.array(sorted(self.lost), pa.string()))
        earlier = earlier.filter(pc.invert(is_lost))
        without_events = frozenset(rows["datanode"].unique().to_pylist()) - self.datanodes
        return silent_findings(earlier, rows, self.events, without_events=without_events)


@dataclass(frozen=True, slots=True)
class ChangedStage:
    """Finds the replicas whose trees changed (sweep.stages.ContainerStage).

    Inputs: `now`, and one by the ID of each earlier sweep in `earlier`, newest first
    (REPLICA_SCHEMA). Output: `changed` (CHANGED_SCHEMA).
    """

    earlier: tuple[str, ...]

    @property
    def schemas(self) -> Mapping[str, pa.Schema]:
        """See ContainerStage."""
        return {"changed": CHANGED_SCHEMA}

    def __call__(self, tables: Mapping[str, pa.Table]) -> Mapping[str, pa.Table]:
        """See ContainerStage."""
        left, found = tables["now"], [CHANGED_SCHEMA.empty_table()]
        for name in self.earlier:
            theirs = tables[name].filter(pc.is_valid(tables[name]["root"]))
            changed = silent_changes(theirs, left)
            whose = pa.repeat(pa.scalar(name), changed.num_rows)
            found.append(changed.append_column("sweep_id", whose).cast(CHANGED_SCHEMA))
            left = left.join(theirs.select(list(_SAME)), list(_SAME), join_type="left anti")
        return {"changed": pa.concat_tables(found)}


def silent_changes(earlier_replicas: pa.Table, replicas: pa.Table) -> pa.Table:
    """The replicas whose trees differ between two tables of REPLICA_SCHEMA: columns
    _SAME, and about the number of `rows`.

    Only rows and events show which chunks changed and why: see `silent_findings`.
    """
    names = COMPARED.names
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
    rows = pc.add(both["blocks"], both["chunks"])
    return both.append_column("rows", rows).filter(differs).select([*_SAME, "rows"])


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
    found = list[Row]()
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
