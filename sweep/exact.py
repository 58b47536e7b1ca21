"""Compute replicas and trees from rows in any order, by sorting them first.

Duplicate rows count once. If rows of a replica contradict each other or lack a value,
the replica gets a finding and no tree: its content is unknown, and a comparison treats
it neither as equal nor as lost.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.columns import TreeColumns, fold_blocks, fold_root
from merkle.tree import ContainerId
from sweep.fragments import Bools, Int64s, append_zero_words
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, FindingKind, RootMethod
from sweep.rows import TEXT, flags_of, integers_of
from sweep.runs import ATTRIBUTE_COLUMNS, KEY, fold_batches, ranks, replicas_of

_PLACE = (*KEY, "block_id", "chunk_offset")

# The columns in which duplicate rows must agree; `scanned_at` may differ.
_CONTENT = ("length", "checksum", "matches", "deleted")

# The single row of a replica without blocks, except for its REPLICA_COLUMNS.
EMPTY_ROW: dict[str, object] = {
    "block_id": 0,
    "chunk_offset": CONTAINER_ROW,
    "length": 0,
    "checksum": 0,
    "matches": True,
    "deleted": False,
}

# The single row of a replica without a tree.
_NO_TREE = EMPTY_ROW | {"source": "none"}

# Values for nulls in the row of a faulty replica. INVALID replicas are not compared.
_FAULTY_DEFAULTS = {
    "volume": "",
    "state": "INVALID",
    "bcs_id": 0,
    "replica_index": 0,
    "generation": 0,
}


# A row of a table.
Row: TypeAlias = dict[str, Any]


class ReplicaId(NamedTuple):
    """Which replica a tree belongs to."""

    container_id: ContainerId
    datanode: str
    volume: str


def exact_replicas(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The replicas (REPLICA_SCHEMA) and findings (FINDING_SCHEMA) of some containers,
    from all of their rows (CHUNK_SCHEMA, in any order).

    Equal to the replicas that ordered runs settle to. A replica with a finding has no
    root, and its source is "none".
    """
    ordered = sort_rows(rows)
    runs = fold_batches(ordered.rows.to_batches())
    assert all(runs["ordered"].to_pylist())
    replicas = replicas_of(runs, pa.array([RootMethod.EXACT.value] * runs.num_rows, pa.string()))
    return replicas, pa.Table.from_pylist(ordered.findings, FINDING_SCHEMA)


def trees_of(rows: pa.Table) -> Iterator[tuple[ReplicaId, TreeColumns]]:
    """The tree of each replica in these rows (CHUNK_SCHEMA, in any order), with all
    checksums computed.

    The root is None if the replica has no tree or its rows contradict each other.
    """
    ordered = sort_rows(rows)
    columns = {name: _key(ordered.rows, name) for name in ("block_id", "chunk_offset", *_CONTENT)}
    sources = ordered.rows.select([*KEY, "source"])
    for start, end in pairwise([*ordered.starts.tolist(), ordered.rows.num_rows]):
        first = sources.slice(start, 1).to_pylist()[0]
        identity = ReplicaId(first["container_id"], first["datanode"], first["volume"])
        piece = {name: column[start:end] for name, column in columns.items()}
        yield identity, _tree(identity.container_id, piece, is_known=first["source"] != "none")


@dataclass(frozen=True, slots=True)
class SortedRows:
    """Rows by container, datanode, volume, block and offset, without duplicates. A
    faulty replica has a single row and no tree.
    """

    rows: pa.Table
    # The index of each replica's first row.
    starts: Int64s
    findings: Sequence[dict[str, object]]


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: FindingKind
    detail: str
    rows: Bools


def sort_rows(rows: pa.Table) -> SortedRows:
    """Sort all rows (CHUNK_SCHEMA, in any order) of some replicas, and check them."""
    rows = rows.select(CHUNK_SCHEMA.names).combine_chunks()
    if not rows.num_rows:
        return SortedRows(rows, np.empty(0, np.int64), ())
    names = (*_PLACE, *_CONTENT, *ATTRIBUTE_COLUMNS)
    keys = np.array([_key(rows, name) for name in names])
    lacking = np.zeros(rows.num_rows, np.bool_)
    for name in names:
        if rows[name].null_count:
            lacking |= rows[name].is_null().to_numpy()
    order = _sort_order(keys, lacking, rows)
    rows, keys, lacking = rows.take(pa.array(order)), keys[:, order], lacking[order]
    begins = _changes(keys[: len(KEY)])
    starts = np.flatnonzero(begins)
    replica = np.cumsum(begins) - 1
    faults = _faults(
        dict(zip(names, keys, strict=True)),
        _text_is(rows, "source", "none"),
        lacking,
        starts,
        replica,
    )
    faulty = np.logical_or.reduceat(np.logical_or.reduce([fault.rows for fault in faults]), starts)
    findings = [finding for fault in faults for finding in _findings(fault, rows, replica)]
    keep = ~faulty[replica] | begins
    rows, spoiled = rows.filter(pa.array(keep)), pa.array(faulty[replica[keep]])
    if faulty.any():
        for name, value in _NO_TREE.items():
            rows = _set_column(
                rows, name, pc.if_else(spoiled, pa.scalar(value, rows[name].type), rows[name])
            )
        for name, value in _FAULTY_DEFAULTS.items():
            rows = _set_column(rows, name, rows[name].fill_null(pa.scalar(value, rows[name].type)))
        rows = rows.combine_chunks()
    return SortedRows(rows, np.flatnonzero(_changes(replica[keep][None])), findings)


def _sort_order(keys: Int64s, lacking: Bools, rows: pa.Table) -> Int64s:
    """The order of the rows, without duplicates; of equal rows the last scanned one
    stays.
    """
    order = np.lexsort(keys[: len(_PLACE)][::-1])
    again = ~_changes(keys[: len(_PLACE), order])
    if not again.any():
        return order
    # Sort by every column, so that the result does not depend on the input's order.
    shared = again | np.append(again[1:], False)
    hit = order[shared]
    hit = hit[np.lexsort((~_key(rows, "scanned_at")[hit], lacking[hit], *keys[::-1, hit]))]
    order[shared] = hit
    unlike = np.ones(len(order), np.bool_)
    unlike[shared] = _changes(np.vstack((keys[:, hit], lacking[hit])))
    return order[unlike]


def _faults(
    keys: dict[str, Int64s], without_tree: Bools, lacking: Bools, starts: Int64s, replica: Int64s
) -> list[_Fault]:
    """The possible faults of sorted rows without duplicates, with the rows that have
    each.
    """
    offsets, blocks = keys["chunk_offset"], keys["block_id"]
    sizes = np.diff(np.append(starts, len(replica)))[replica]
    follows = np.zeros(len(replica), np.bool_)
    follows[1:] = (replica[1:] == replica[:-1]) & (blocks[1:] == blocks[:-1])
    again, beside_own = follows.copy(), follows.copy()
    again[1:] &= offsets[1:] == offsets[:-1]
    beside_own[1:] &= offsets[:-1] == BLOCK_ROW
    contradict = FindingKind.ROWS_CONTRADICT
    return [
        _Fault(FindingKind.UNREADABLE, "a row lacks a value", lacking),
        _Fault(FindingKind.UNREADABLE, "a chunk's offset is negative", offsets < CONTAINER_ROW),
        _Fault(contradict, "two rows of the same block and offset differ", again),
        _Fault(contradict, "a block without chunks has chunks", beside_own & ~again),
        _Fault(
            contradict,
            "a replica without blocks has blocks",
            (offsets == CONTAINER_ROW) & (sizes > 1) & ~again,
        ),
        _Fault(
            contradict,
            "a replica without a tree has blocks",
            without_tree & (offsets != CONTAINER_ROW),
        ),
        *(
            _Fault(
                contradict,
                f"rows of one replica differ in {name}",
                keys[name] != keys[name][starts][replica],
            )
            for name in ATTRIBUTE_COLUMNS
        ),
    ]


def _findings(fault: _Fault, rows: pa.Table, replica: Int64s) -> Iterator[dict[str, object]]:
    """A finding for each replica that has the fault, at its first faulty row."""
    at = np.flatnonzero(fault.rows)
    _, first, counts = np.unique(replica[at], return_index=True, return_counts=True)
    places = rows.select(_PLACE).take(pa.array(at[first])).to_pylist()
    for row, count in zip(places, counts.tolist(), strict=True):
        where = f"{row['datanode']}/{row['volume']}" if row["volume"] else row["datanode"]
        yield {
            "kind": fault.kind.value,
            "container_id": row["container_id"],
            "block_id": row["block_id"],
            "chunk_offset": row["chunk_offset"],
            "lacking": [],
            "sources": [],
            "detail": f"{where}: {fault.detail} (rows: {count})",
        }


def _tree(container_id: ContainerId, columns: dict[str, Int64s], *, is_known: bool) -> TreeColumns:
    is_block = columns["chunk_offset"] != CONTAINER_ROW
    columns = {name: column[is_block] for name, column in columns.items()}
    tree = tree_of_rows(
        container_id,
        columns["block_id"],
        columns["chunk_offset"],
        columns["length"],
        columns["checksum"],
        columns["matches"].astype(np.bool_),
        columns["deleted"].astype(np.bool_),
    )
    return tree if is_known else replace(tree, data_checksum=None)


def tree_of_rows(
    container_id: ContainerId,
    block_ids: Int64s,
    offsets: Int64s,
    lengths: Int64s,
    checksums: Int64s,
    matches: Bools,
    deleted: Bools,
) -> TreeColumns:
    """The tree of one replica, from all of its rows in order; none if it has no
    blocks.
    """
    firsts = np.flatnonzero(_changes(block_ids[None]))
    block_deleted = np.logical_or.reduceat(deleted, firsts) if len(firsts) else deleted
    # Block rows have no chunk.
    is_chunk = offsets >= 0
    starts = np.append(0, np.cumsum(is_chunk))[np.append(firsts, len(block_ids))]
    folded = fold_blocks(block_ids[firsts], starts, checksums[is_chunk])
    own = ~is_chunk[firsts] & block_deleted
    block_checksums = np.where(own, checksums[firsts], folded)
    counts = np.where(block_deleted, 0, np.diff(starts))
    is_live = is_chunk & ~np.repeat(block_deleted, np.diff(np.append(firsts, len(block_ids))))
    return TreeColumns(
        container_id,
        fold_root(block_checksums),
        block_ids[firsts],
        block_checksums,
        block_deleted,
        np.append(0, np.cumsum(counts)),
        offsets[is_live],
        lengths[is_live],
        checksums[is_live],
        matches[is_live],
    )


def _changes(keys: Int64s) -> Bools:
    """Which columns of the matrix differ from the column before."""
    changes = np.ones(keys.shape[1], np.bool_)
    changes[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return changes


def _key(rows: pa.Table, name: str) -> Int64s:
    if name in TEXT:
        return ranks(rows[name])
    column = rows[name].combine_chunks()
    return (
        flags_of(column).astype(np.int64)
        if pa.types.is_boolean(column.type)
        else integers_of(column)
    )


def _text_is(rows: pa.Table, name: str, value: str) -> Bools:
    equal: Bools = pc.equal(rows[name].cast(pa.string()).fill_null(""), value).to_numpy()
    return equal


def _set_column(rows: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index(name), name, column)


# Rows sampled to split a container into even ranges.
_SAMPLES = 1 << 16

# The columns that add up over the ranges of a replica.
SUMS = ("blocks", "deleted_blocks", "chunks", "bytes", "corrupt", "unverifiable")


# Tables from other writers may lack values.
NULLABLE_ROWS = pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])


def block_ranges(rows: pa.Table, rows_max: int) -> Iterator[pa.Table]:
    """Split the rows of one container into ascending ranges of blocks, with about
    `rows_max` rows each.
    """
    # A row without a block ID is faulty in any range.
    batches = [
        (batch, batch["block_id"].fill_null(0).to_numpy())
        for batch in rows.to_batches()
        if batch.num_rows
    ]
    step = max(1, rows.num_rows // _SAMPLES)
    sample = np.sort(np.concatenate([ids[::step] for _, ids in batches]))
    count = -(-rows.num_rows // rows_max)
    edges = np.unique(sample[np.arange(1, count) * len(sample) // count]).tolist()
    spans = [(int(ids.min()), int(ids.max())) for _, ids in batches]
    for low, high in zip([None, *edges], [*edges, None], strict=True):
        found = []
        for (batch, ids), (least, greatest) in zip(batches, spans, strict=True):
            if (low is None or greatest >= low) and (high is None or least < high):
                inside = np.ones(len(ids), np.bool_)
                if low is not None:
                    inside &= ids >= low
                if high is not None:
                    inside &= ids < high
                found.append(batch.filter(pa.array(inside)))
        yield pa.Table.from_batches(found, rows.schema).unify_dictionaries()


def large_replicas(ranges: Iterable[pa.Table]) -> tuple[pa.Table, pa.Table]:
    """Like `exact_replicas`, for one container whose rows come in ranges of blocks."""
    pieces: dict[tuple[object, ...], list[Row]] = {}
    findings = list[pa.Table]()
    for rows in ranges:
        replicas, found = exact_replicas(rows)
        findings.append(found)
        for piece in replica_dicts(replicas):
            pieces.setdefault(replica_key(piece), []).append(piece)
    joined = [_join_pieces(pieces[key]) for key in sorted(pieces, key=str)]
    broken = [
        {
            "kind": FindingKind.ROWS_CONTRADICT.value,
            "container_id": row["container_id"],
            "lacking": [],
            "sources": [],
            "detail": f"{row['datanode']}/{row['volume']}: its rows contradict each other",
        }
        for row, key in zip(joined, sorted(pieces, key=str), strict=True)
        # If rows contradict each other within one range, there is a finding already.
        if row["root"] is None and all(piece["root"] is not None for piece in pieces[key])
    ]
    return pa.Table.from_pylist(joined, REPLICA_SCHEMA), pa.concat_tables(
        [*findings, pa.Table.from_pylist(broken, FINDING_SCHEMA)]
    )


def replica_dicts(replicas: pa.Table) -> list[Row]:
    """Replicas as rows, with times as integers: Python's datetime ends at the year
    9999.
    """
    at = replicas.schema.get_field_index("scanned_at")
    rows: list[Row] = replicas.set_column(
        at, "scanned_at", replicas["scanned_at"].cast(pa.int64())
    ).to_pylist()
    return rows


def replica_key(replica: Row) -> tuple[object, ...]:
    """The values of KEY in the row of a replica."""
    return tuple(replica[name] for name in KEY)


def _join_pieces(pieces: Sequence[Row]) -> Row:
    """One replica, from the results of its ranges."""
    if len(pieces) == 1:
        return pieces[0]
    agreed = all(piece[name] == pieces[0][name] for piece in pieces for name in ATTRIBUTE_COLUMNS)
    has_blocks = all(piece["blocks"] for piece in pieces)
    joined = pieces[0] | {"path": RootMethod.EXACT.value}
    if not agreed or not has_blocks or any(piece["root"] is None for piece in pieces):
        return joined | {"root": None, "source": "none", "fingerprint": 0} | dict.fromkeys(SUMS, 0)
    joined["root"] = join_roots(pieces)
    joined["fingerprint"] = int(np.bitwise_xor.reduce([piece["fingerprint"] for piece in pieces]))
    # Rows may claim any length: sums wrap as those of a replica that is read whole.
    joined |= {
        name: int(np.sum([piece[name] for piece in pieces], dtype=np.int64)) for name in SUMS
    }
    times = [piece["scanned_at"] for piece in pieces if piece["scanned_at"] is not None]
    joined["scanned_at"] = max(times, default=None)
    return joined


def join_roots(pieces: Sequence[Row]) -> int | None:
    """The root over consecutive ranges of blocks; None if a range has no root."""
    root = np.zeros(1, np.int64)
    for piece in pieces:
        if piece["root"] is None:
            return None
        words: Int64s = np.array([piece["blocks"]], np.int64)
        root = append_zero_words(root, words) ^ np.array([piece["root"]], np.int64)
    return int(root[0])
