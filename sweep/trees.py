"""The trees themselves, as the bytes of Ozone's tree files, packed: a row a replica in
a few Parquet files.

Where the rows of a replica lie in one piece in one part, its tree is made while they
pass by, many trees in one call of a kernel; the others' rows are gathered and sorted
first. Trees larger than any agent stores are left out, which also bounds what is held
of a replica whose rows go on from batch to batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.packed_trees import PACKED_TREE_BYTES_MAX, TREE_SCHEMA
from chunktable.schema import CONTAINER_ROW
from merkle.checksum import kernels_for
from merkle.columns import encode_columns
from merkle.tree import ContainerId
from runtime.disk import Disk
from sweep.exact import arrange, block_ranges, tree_of_rows
from sweep.files import opened_rows
from sweep.fragments import Bools
from sweep.gather import Gatherer, Int64s
from sweep.model import Part
from sweep.output import TableWriter, written_whole
from sweep.runs import AGREED, KEY, TEXT, Rows, Text, arrow_of, entries, full, rows_of

# What a row weighs when kernels are asked for: numpy and a library take 1 us, in which
# a library checksums 10 KB.
_ROW_BYTES = 10_000
# Bytes of trees that wait to be written.
_PIECE_BYTES = 16 << 20
# Room for these, and for a batch at its longest.
_BUFFER_BYTES = 24 << 20
# The least that a row adds to a tree is 10 bytes: of more rows none is small enough.
_REPLICA_ROWS_MAX = PACKED_TREE_BYTES_MAX // 10
# What differs from row to row; all else is the replica's.
_OF_ROW = ("block_id", "chunk_offset", "length", "checksum")
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TreeJob:
    """All trees of one sweep: into which folder, and of what."""

    folder: Path
    parts: Sequence[Part]
    # Those of `parts` that have whole replicas in order, and were not packed yet.
    ordered: Sequence[Part]
    # Containers, ascending, whose replicas do not lie whole and in order in one part
    # each, and about their rows.
    others: Int64s
    rows: Int64s


@dataclass(frozen=True, slots=True)
class PackedTreeFile:
    """One file that was written, of how many trees; and how many were left out as too
    large.
    """

    name: str
    trees: int
    too_large: int


def part_file(part: Part) -> str:
    """The name of the file with the trees of a part's ordered replicas."""
    return f"{part.part_id}.parquet"


def pack_part(job: TreeJob, part: Part, gatherer: Gatherer, disk: Disk) -> PackedTreeFile:
    """Write the trees of a part's ordered replicas into a file.

    Raises:
        DiskError: the file cannot be written.
        ChunkTableError: the part cannot be read any more.
    """
    path, torn = job.folder / part_file(part), _NONE
    while True:
        # Rows of one replica may ascend and still have others between them. That shows
        # at the end, and is so rare that the file is then written once more.
        with _writing(path, disk) as packer, opened_rows(part) as (stretches, inventory):
            packer.leave_out(np.union1d(job.others, torn), inventory)
            for rows in stretches:
                packer.add(rows)
            packer.end()
            more = packer.torn()
            if len(torn) and not len(more):
                packer.leave_out(_NONE, None)
                for ids, held in gatherer.gathered([part], torn, np.ones(len(torn), np.int64)):
                    _add_unsorted(packer, ids, held, gatherer.group_rows)
        if not len(more):
            return packer.packed(path.name)
        torn = np.union1d(torn, more)


def pack_rows(
    job: TreeJob, number: int, container_ids: Int64s, rows: pa.Table, rows_max: int, disk: Disk
) -> PackedTreeFile:
    """Write the trees of some of the other containers, of which these are all rows;
    `rows_max` are sorted at a time.

    Raises:
        DiskError: the file cannot be written.
    """
    path = job.folder / f"sorted-{number:06}.parquet"
    with _writing(path, disk) as packer:
        _add_unsorted(packer, container_ids, rows, rows_max)
    return packer.packed(path.name)


class _Packer:
    """Collects trees and writes them; whole replicas wait until there are enough of
    them.
    """

    def __init__(self, writer: TableWriter) -> None:
        self._writer = writer
        self._others = _NONE
        self._held: Mapping[str, Int64s] | None = None
        # The rows so far of a replica that may go on, and how many of them there were.
        self._open: list[Rows] = []
        self._open_rows = 0
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        # Where trees are made, always in the same memory: to be given new memory takes
        # as long as making them.
        self._out = np.empty(0, np.uint8)
        self._used = 0
        self._keys: list[pa.Table] = []
        self._too_large = 0

    def leave_out(self, others: Int64s, inventory: pa.Table | None) -> None:
        """From now on leave out these containers, and what the inventory has not."""
        self._others, self._held = others, None
        if inventory is not None:
            volumes, ids = (
                inventory["volume"].to_numpy(zero_copy_only=False),
                inventory["container_id"].to_numpy(),
            )
            self._held = {str(volume): ids[volumes == volume] for volume in np.unique(volumes)}

    def add(self, rows: Rows) -> None:
        """Take in ordered rows; the last replica may go on in the next."""
        starts = _replica_starts(rows)
        first = int(starts[1]) if len(starts) > 1 else rows.count
        if self._open and _key(self._open[0]) == _key(rows):
            self._go_on(_of_one(rows, 0, first))
        else:
            self.end()
            first = 0
        if first < rows.count:
            self.end()
            last = int(starts[-1])
            if first < last:
                self.encode(_slice(rows, first, last))
            self._go_on(_of_one(rows, last, rows.count))

    def end(self) -> None:
        """No rows follow of the replica that was added last."""
        if self._open_rows > _REPLICA_ROWS_MAX:
            self._too_large += int(self._is_wanted(self._open[0], np.zeros(1, np.int64))[0])
        elif self._open:
            self.encode(_joined(self._open))
        self._open, self._open_rows = [], 0

    def encode(self, rows: Rows) -> None:
        """Take in the rows of whole replicas."""
        starts = _replica_starts(rows)
        ends = np.append(starts[1:], rows.count)
        scanned_at = rows.integers["scanned_at"]
        scanned_at = (
            np.maximum.reduceat(scanned_at, starts)
            if len(scanned_at) > 1
            else full(scanned_at, len(starts))
        )
        chosen = self._is_wanted(rows, starts)
        starts, ends, scanned_at = starts[chosen], ends[chosen], scanned_at[chosen]
        if not len(starts):
            return
        ids = entries(rows.integers["container_id"], starts)
        roots, trees = self._encoded(rows, starts, ends, ids)
        columns: dict[str, pa.Array] = {
            name: text.values.take(pa.array(entries(text.codes, starts)))
            for name, text in rows.text.items()
        }
        columns |= {
            name: arrow_of(name, entries(rows.integers[name], starts))
            for name in ("bcs_id", "replica_index")
        }
        columns |= {"container_id": pa.array(ids), "root": pa.array(roots), "tree": trees}
        columns["scanned_at"] = arrow_of("scanned_at", scanned_at)
        table = pa.table({name: columns[name] for name in TREE_SCHEMA.names})
        is_small = pc.less_equal(pc.binary_length(trees), PACKED_TREE_BYTES_MAX)
        if not pc.all(is_small).as_py():
            self._too_large += len(trees) - pc.sum(is_small).as_py()
            table = table.filter(is_small)
        self._keys.append(table.select(KEY))
        self._waiting.append(table)
        self._waiting_bytes += int(pc.sum(pc.binary_length(table["tree"])).as_py() or 0)
        if self._waiting_bytes >= _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._writer.add(pa.concat_tables(self._waiting))
        self._waiting, self._waiting_bytes, self._used = [], 0, 0

    def torn(self) -> Int64s:
        """Containers, ascending, of which a replica came in more than one piece so
        far.
        """
        if not self._keys:
            return _NONE
        keys = pa.concat_tables(self._keys)
        ids = np.sort(keys["container_id"].to_numpy())
        repeated = np.unique(ids[1:][ids[1:] == ids[:-1]])
        if not len(repeated):
            return _NONE
        keys = keys.filter(pc.is_in(keys["container_id"], value_set=pa.array(repeated)))
        counted = keys.group_by(list(KEY), use_threads=False).aggregate([([], "count_all")])
        torn: Int64s = np.unique(
            counted.filter(pc.greater(counted["count_all"], 1))["container_id"].to_numpy()
        )
        return torn

    def count_too_large(self) -> None:
        """One more was left out."""
        self._too_large += 1

    def packed(self, name: str) -> PackedTreeFile:
        """What was done, once all is written."""
        return PackedTreeFile(name, self._writer.rows, self._too_large)

    def _go_on(self, rows: Rows) -> None:
        self._open_rows += rows.count
        if self._open_rows > _REPLICA_ROWS_MAX:
            # It is only counted; its name is still asked for.
            self._open = self._open[:1] or [rows]
        else:
            self._open.append(rows)

    def _encoded(
        self, rows: Rows, starts: Int64s, ends: Int64s, container_ids: Int64s
    ) -> tuple[Int64s, pa.Array]:
        """Roots and trees of replicas whose rows are whole and in order; the trees'
        memory is free after `flush`.
        """
        block_ids, offsets, lengths, checksums = (rows.integers[name] for name in _OF_ROW)
        matches, deleted = rows.flags["matches"], rows.flags["deleted"]
        if kernels_for(_ROW_BYTES * rows.count) is None:
            block_ids, offsets, lengths, checksums = (
                full(column, rows.count) for column in (block_ids, offsets, lengths, checksums)
            )
            matches, deleted = full(matches, rows.count), full(deleted, rows.count)
            return library_encode_trees(
                starts,
                ends,
                container_ids,
                block_ids,
                offsets,
                lengths,
                checksums,
                matches,
                deleted,
            )
        from sweep import kernels

        size = kernels.TREE_ROW_BYTES * (int(np.sum(ends - starts)) + len(starts))
        if self._used + size > len(self._out):
            self.flush()
            if size > len(self._out):
                self._out = np.empty(max(size, _BUFFER_BYTES), np.uint8)
        out = self._out[self._used :]
        roots, bounds = np.empty(len(starts), np.int64), np.empty(len(starts) + 1, np.int64)
        columns = block_ids, offsets, lengths, checksums, matches, deleted
        kernels.encode_trees(starts, ends, container_ids, rows.count, *columns, roots, bounds, out)
        self._used += int(bounds[-1])
        buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(out)]
        return roots, pa.Array.from_buffers(pa.binary(), len(starts), buffers)

    def _is_wanted(self, rows: Rows, starts: Int64s) -> Bools:
        ids = entries(rows.integers["container_id"], starts)
        wanted: Bools = ~np.isin(ids, self._others)
        sources = rows.text["source"]
        wanted &= (sources.values.to_numpy(zero_copy_only=False) != "none")[
            entries(sources.codes, starts)
        ]
        if self._held is not None:
            volumes = rows.text["volume"]
            codes, is_held = entries(volumes.codes, starts), np.zeros(len(starts), np.bool_)
            for code in np.unique(codes):
                of_volume = codes == code
                is_held[of_volume] = np.isin(
                    ids[of_volume], self._held.get(volumes.values[int(code)].as_py(), _NONE)
                )
            wanted &= is_held
        return wanted


@contextmanager
def _writing(path: Path, disk: Disk) -> Iterator[_Packer]:
    # Half of a tree is checksums, which nothing makes smaller; the other half would
    # cost a third of all the work.
    with written_whole(path, TREE_SCHEMA, disk, compression="none", opaque="tree") as writer:
        packer = _Packer(writer)
        yield packer
        packer.flush()


def _add_unsorted(packer: _Packer, container_ids: Int64s, rows: pa.Table, rows_max: int) -> None:
    if len(container_ids) > 1 or rows.num_rows <= rows_max:
        for ordered in _arranged(rows):
            packer.encode(ordered)
        return
    # Too many rows to be sorted at a time: range by range of blocks, of which the
    # replicas are put together.
    pieces, counts = dict[tuple[object, ...], list[Rows]](), Counter[tuple[object, ...]]()
    for piece in block_ranges(rows, rows_max):
        for ordered in _arranged(piece):
            starts = _replica_starts(ordered).tolist()
            for start, end in zip(starts, [*starts[1:], ordered.count], strict=True):
                one = _of_one(ordered, start, end)
                held = pieces.setdefault(_key(one), [])
                counts[_key(one)] += one.count
                if not held or counts[_key(one)] <= _REPLICA_ROWS_MAX:
                    held.append(one)
    for key, held in pieces.items():
        said = {tuple(_first(one, name) for name in AGREED) for one in held}
        is_empty = any(one.integers["chunk_offset"][0] == CONTAINER_ROW for one in held)
        if counts[key] > _REPLICA_ROWS_MAX:
            packer.count_too_large()
        # Of ranges that contradict each other no tree is made; sweep.exact finds the
        # same.
        elif len(said) == 1 and (len(held) == 1 or not is_empty):
            packer.encode(_joined(held))


def _arranged(rows: pa.Table) -> Iterator[Rows]:
    """Sorted, without what contradicts itself; nothing of no rows."""
    if rows.num_rows:
        arranged = arrange(rows).rows.combine_chunks()
        yield rows_of(
            {name: arranged[name].chunk(0) for name in arranged.column_names}, arranged.num_rows
        )


def library_encode_trees(
    starts: Int64s,
    ends: Int64s,
    container_ids: Int64s,
    block_ids: Int64s,
    offsets: Int64s,
    lengths: Int64s,
    checksums: Int64s,
    matches: Bools,
    deleted: Bools,
) -> tuple[Int64s, pa.Array]:
    """The same without kernels; every column has an entry a row."""
    roots, trees = [], []
    for start, end, container_id in zip(
        starts.tolist(), ends.tolist(), container_ids.tolist(), strict=True
    ):
        rows = slice(start, start if offsets[start] == CONTAINER_ROW else end)
        tree = tree_of_rows(
            ContainerId(container_id),
            block_ids[rows],
            offsets[rows],
            lengths[rows],
            checksums[rows],
            matches[rows],
            deleted[rows],
        )
        roots.append(tree.data_checksum)
        trees.append(encode_columns(tree))
    return np.array(roots, np.int64), pa.array(trees, pa.binary())


def _replica_starts(rows: Rows) -> Int64s:
    """Where a row is not of the same replica as the row before."""
    changes = np.zeros(rows.count, np.bool_)
    changes[0] = True
    for column in (
        rows.integers["container_id"],
        rows.text["datanode"].codes,
        rows.text["volume"].codes,
    ):
        if len(column) > 1:
            changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def _slice(rows: Rows, start: int, end: int) -> Rows:
    return Rows(
        end - start,
        {
            name: Text(text.codes[start:end] if len(text.codes) > 1 else text.codes, text.values)
            for name, text in rows.text.items()
        },
        {
            name: column[start:end] if len(column) > 1 else column
            for name, column in rows.integers.items()
        },
        {
            name: column[start:end] if len(column) > 1 else column
            for name, column in rows.flags.items()
        },
    )


def _of_one(rows: Rows, start: int, end: int) -> Rows:
    """Rows of one replica, in whose other columns they are all alike; it may wait, and
    the batch need not.
    """
    piece = _slice(rows, start, end)
    integers = {
        name: column if name in _OF_ROW else column[:1].copy()
        for name, column in piece.integers.items()
    }
    integers["scanned_at"] = piece.integers["scanned_at"].max(keepdims=True)
    return replace(
        piece,
        text={name: Text(text.codes[:1].copy(), text.values) for name, text in piece.text.items()},
        integers=integers,
    )


def _joined(pieces: Sequence[Rows]) -> Rows:
    """One replica, of its pieces in order."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    integers = dict(first.integers)
    for name in _OF_ROW:
        integers[name] = np.concatenate(
            [full(piece.integers[name], piece.count) for piece in pieces]
        )
    integers["scanned_at"] = np.max([piece.integers["scanned_at"] for piece in pieces], axis=0)
    flags = {
        name: np.concatenate([full(piece.flags[name], piece.count) for piece in pieces])
        for name in first.flags
    }
    return Rows(sum(piece.count for piece in pieces), first.text, integers, flags)


def _key(rows: Rows) -> tuple[object, ...]:
    """Which replica the first row is of."""
    return tuple(_first(rows, name) for name in KEY)


def _first(rows: Rows, name: str) -> object:
    if name in TEXT:
        text = rows.text[name]
        return text.values[int(text.codes[0])].as_py()
    return int(rows.integers[name][0])
