"""The trees themselves, as the bytes of Ozone's tree files, packed: a row a replica in a few Parquet files.

A file for each tree would be as many files as there are replicas. Where the rows of a replica lie in order in one part,
its tree is made while they pass by; the others' rows are gathered and sorted first.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merkle.columns import TreeColumns, encode_columns, fold_blocks, fold_root
from merkle.tree import ContainerId
from ozone.disk import Disk
from protos.chunk_table import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from spark.exact import ReplicaId, trees_of
from spark.files import read_rows
from spark.gather import Gatherer, Int64s
from spark.model import Part
from spark.output import written_whole

TREE_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        pa.field("root", pa.int64(), nullable=False),
        # A serialised ContainerChecksumInfo.
        pa.field("tree", pa.binary(), nullable=False),
    ]
)
# Rows that are made into trees at a time, and bytes of trees that wait to be written.
_PIECE_ROWS = 1 << 19
_PIECE_BYTES = 64 << 20


def write_trees(
    folder: Path,
    parts: Sequence[Part],
    *,
    ordered: Int64s,
    others: Int64s,
    rows: Int64s,
    gatherer: Gatherer,
    disk: Disk,
    tell: Callable[[int], None],
) -> None:
    """Write the trees of all replicas that have one into files of TREE_SCHEMA in `folder`.

    Of the containers `ordered` each replica lies in order in one part; `others` have about so many `rows`. `tell` hears
    of rows.

    Raises:
        DiskError: a file cannot be written.
        ChunkTableError: a part cannot be read any more.
    """

    def write(part: Part) -> int:
        pieces = (tree for piece in _pieces(read_rows(part, ordered)) for tree in _ordered_trees(piece))
        _write(folder / f"{part.part_id}.parquet", pieces, disk)
        return part.rows

    for count in gatherer.each(parts, write):
        tell(count)
    if len(others):
        held = gatherer.gathered(parts, others, rows)
        _write(folder / "sorted.parquet", (tree for _, piece in held for tree in trees_of(piece)), disk)


def _write(path: Path, trees: Iterable[tuple[ReplicaId, TreeColumns]], disk: Disk) -> None:
    # Half of a tree is checksums, which nothing makes smaller.
    with written_whole(path, TREE_SCHEMA, disk, compression="lz4") as writer:
        waiting, size = list[tuple[object, ...]](), 0
        for replica, tree in trees:
            if tree.data_checksum is None:
                continue
            raw = encode_columns(tree)
            waiting.append((replica.datanode, replica.volume, replica.container_id, tree.data_checksum, raw))
            size += len(raw)
            if size >= _PIECE_BYTES:
                writer.add(_table(waiting))
                waiting, size = [], 0
        writer.add(_table(waiting))


def _table(rows: Sequence[tuple[object, ...]]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(TREE_SCHEMA)
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, TREE_SCHEMA, strict=True)], TREE_SCHEMA
    )


def _pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The rows in pieces of some size, each replica in one; a larger replica is a piece by itself."""
    waiting, count = list[pa.RecordBatch](), 0
    for batch in batches:
        starts = _replica_starts(batch)
        # A batch without a change of replica belongs to what waits, if that ends with the same.
        follows = bool(waiting) and _is_same_replica(waiting[-1], batch)
        cut = starts[-1] if len(starts) > 1 or not follows else 0
        if waiting and count + cut >= _PIECE_ROWS and (cut or not follows):
            yield pa.Table.from_batches([*waiting, batch.slice(0, cut)], CHUNK_SCHEMA)
            waiting, count = [], 0
            batch = batch.slice(cut)
        waiting.append(batch)
        count += batch.num_rows
    if waiting:
        yield pa.Table.from_batches(waiting, CHUNK_SCHEMA)


def _replica_starts(batch: pa.RecordBatch | pa.Table) -> Int64s:
    """Where a row is not of the same replica as the row before."""
    starts = [np.zeros(1, np.int64)]
    for name in ("container_id", "datanode", "volume"):
        column = batch[name]
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        starts.append(pc.run_end_encode(column).run_ends.to_numpy()[:-1].astype(np.int64))
    return np.unique(np.concatenate(starts))


def _is_same_replica(before: pa.RecordBatch, after: pa.RecordBatch) -> bool:
    last = before.num_rows - 1
    return all(before[name][last] == after[name][0] for name in ("container_id", "datanode", "volume"))


def _ordered_trees(rows: pa.Table) -> Iterator[tuple[ReplicaId, TreeColumns]]:
    """The trees of replicas whose rows are in order and whole."""
    if not rows.num_rows:
        return
    starts = _replica_starts(rows)
    heads = rows.select(["container_id", "datanode", "volume", "source"]).take(pa.array(starts)).to_pylist()
    ids, offsets, lengths, checksums = (
        rows[name].to_numpy() for name in ("block_id", "chunk_offset", "length", "checksum")
    )
    matches, deleted = (rows[name].to_numpy() for name in ("matches", "deleted"))
    # Blocks of all replicas in a row; a replica without blocks has none.
    begins = np.zeros(len(ids), np.bool_)
    begins[starts] = True
    begins[1:] |= ids[1:] != ids[:-1]
    begins &= offsets != CONTAINER_ROW
    firsts = np.flatnonzero(begins)
    block_of = np.cumsum(begins) - 1
    is_chunk = offsets >= 0
    chunks_before = np.concatenate(([0], np.cumsum(is_chunk)))
    ends = np.append(firsts[1:], len(ids))
    bounds = np.append(chunks_before[firsts], chunks_before[-1])
    folded = fold_blocks(ids[firsts], bounds, checksums[is_chunk])
    block_deleted = np.zeros(len(firsts), np.bool_)
    block_deleted[block_of[deleted & (offsets != CONTAINER_ROW)]] = True
    is_own = (offsets[firsts] == BLOCK_ROW) & block_deleted
    block_checksums = np.where(is_own, checksums[firsts], folded)
    is_live = is_chunk & ~block_deleted[np.maximum(block_of, 0)] if len(firsts) else is_chunk
    live_before = np.concatenate(([0], np.cumsum(is_live)))
    live_offsets, live_lengths, live_checksums, live_matches = (
        column[is_live] for column in (offsets, lengths, checksums, matches)
    )
    # Where each block's live chunks end, and each replica's blocks begin.
    chunk_ends = live_before[ends]
    block_bounds = np.searchsorted(firsts, np.append(starts, len(ids)))
    row_bounds = live_before[np.append(starts, len(ids))]
    for i, head in enumerate(heads):
        blocks = slice(block_bounds[i], block_bounds[i + 1])
        chunks = slice(row_bounds[i], row_bounds[i + 1])
        container_id = ContainerId(head["container_id"])
        tree = TreeColumns(
            container_id,
            None if head["source"] == "none" else fold_root(block_checksums[blocks]),
            ids[firsts[blocks]],
            block_checksums[blocks],
            block_deleted[blocks],
            np.append(0, chunk_ends[blocks] - row_bounds[i]),
            live_offsets[chunks],
            live_lengths[chunks],
            live_checksums[chunks],
            live_matches[chunks],
        )
        yield ReplicaId(container_id, head["datanode"], head["volume"]), tree
