"""Silent changes: a live chunk's checksum is another than in the sweep before, and the
agent did nothing to it.

Compared is a replica with itself, under equal `bcs_id` and `source`: a client that
wrote raises the one, and what a tree says need not be what the records or the data say.
A chunk that is damaged on disk and found by a scan is such a change too, and also
corrupt; one that changed together with its record is found by nothing else.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merkle.columns import TreeColumns
from merkle.tree import root_hex
from sweep.exact import ReplicaId, trees_of
from sweep.model import FINDING_SCHEMA, FindingKind, RootMethod

# Of one block, the starts of the stretches that an agent wrote, ascending, and the
# furthest end up to each.
_Written: TypeAlias = tuple[list[int], list[float]]
# By block; under None what concerns the whole container.
_Doings: TypeAlias = Mapping[int | None, _Written]

_REPLICA = ("container_id", "datanode", "volume")
# What a replica must have in common with itself to be compared.
SAME = (*_REPLICA, "bcs_id", "source")


def silent_changes(earlier_replicas: pa.Table, replicas: pa.Table) -> pa.Table:
    """The replicas (columns SAME) that are other than in the sweep before and might not
    be.

    Both tables are of REPLICA_SCHEMA. What changed, and by whom, only rows and events
    tell: see `silent_findings`.
    """
    names = [*SAME, "root", "fingerprint", "path"]
    both = replicas.select(names).join(
        earlier_replicas.select(names), list(SAME), join_type="inner", right_suffix="_before"
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
    return both.filter(differs).select(list(SAME))


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
        .join(_replicas_of(earlier_rows), list(SAME), join_type="inner")
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
    return rows.select(list(SAME)).group_by(list(SAME)).aggregate([])


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
