"""Write all trees of a sweep, in the format of Ozone's tree files, as rows of a few
Parquet files.

If the rows of a replica are consecutive and in one part, its tree is encoded while they
are read, many trees per kernel call. The rows of other replicas are gathered and sorted
first. Trees larger than agents store are left out, which also bounds memory.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.files import AnyPath, Files
from chunktable.packed_trees import PACKED_TREE_BYTES_MAX, TREE_SCHEMA
from chunktable.schema import CONTAINER_ROW
from merkle.checksum import kernels_for
from merkle.columns import encode_columns
from merkle.tree import ContainerId
from runtime.disk import Disk
from sweep.exact import block_ranges, sort_rows, tree_of_rows
from sweep.files import open_rows
from sweep.fragments import Bools
from sweep.gather import Gatherer, Int64s
from sweep.model import Part
from sweep.output import TableWriter, write_atomically
from sweep.rows import TEXT, Rows, TextColumn, repeat, rows_of, take
from sweep.runs import ATTRIBUTE_COLUMNS, KEY, to_arrow

# The cost of a row for `kernels_for`: numpy and a library take 1 us, in which a library
# checksums 10 KB.
_ROW_BYTES = 10_000
# Bytes of trees collected before they are written.
_PIECE_BYTES = 16 << 20
# Holds one piece and the trees of one more batch.
_BUFFER_BYTES = 24 << 20
# A row adds at least 10 bytes to a tree, so a tree with more rows is always too large.
_REPLICA_ROWS_MAX = PACKED_TREE_BYTES_MAX // 10
# The integer columns that differ between rows of one replica.
_ROW_COLUMNS = ("block_id", "chunk_offset", "length", "checksum")
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class TreeJob:
    """The trees of one sweep that are not written yet."""

    # Where to write them.
    folder: AnyPath
    parts: Sequence[Part]
    # Those of `parts` that have complete, ordered replicas and are not packed yet.
    ordered: Sequence[Part]
    # The IDs of containers with a replica whose rows are unordered or in several parts,
    # ascending, and the approximate number of rows of each.
    others: Int64s
    rows: Int64s


@dataclass(frozen=True, slots=True)
class PackedTreeFile:
    """A file that was written, its number of trees, and the number of trees left out
    because they are too large.
    """

    name: str
    trees: int
    too_large: int


def part_file(part: Part) -> str:
    """The name of the file with the trees of a part's ordered replicas."""
    return f"{part.part_id}.parquet"


def pack_part(job: TreeJob, part: Part, gatherer: Gatherer, disk: Disk) -> PackedTreeFile:
    """Write the trees of a part's ordered replicas to a file.

    Raises:
        DiskError: the file cannot be written.
        ChunkTableError: the part cannot be read any more.
    """
    path, split = job.folder / part_file(part), _NONE
    while True:
        # The rows of a replica may ascend and still be split by rows of others. This
        # shows only at the end. It is so rare that the file is simply written again.
        with _open_packer(path, disk) as packer, open_rows(part) as (stretches, inventory):
            packer.leave_out(np.union1d(job.others, split), inventory)
            for rows in stretches:
                packer.add(rows)
            packer.end()
            more = packer.split_containers()
            if len(split) and not len(more):
                packer.leave_out(_NONE, None)
                for ids, held in gatherer.gather([part], split, np.ones(len(split), np.int64)):
                    _add_unsorted(packer, ids, held, gatherer.group_rows)
        if not len(more):
            return packer.result(path.name)
        split = np.union1d(split, more)


def pack_rows(
    job: TreeJob, number: int, container_ids: Int64s, rows: pa.Table, rows_max: int, disk: Disk
) -> PackedTreeFile:
    """Write the trees of some containers of `job.others` to a file. `rows` are all of
    their rows, of which at most `rows_max` are sorted at a time.

    Raises:
        DiskError: the file cannot be written.
    """
    path = job.folder / f"sorted-{number:06}.parquet"
    with _open_packer(path, disk) as packer:
        _add_unsorted(packer, container_ids, rows, rows_max)
    return packer.result(path.name)


class _Packer:
    """Encodes trees, collects them, and writes them in large pieces."""

    def __init__(self, writer: TableWriter) -> None:
        self._writer = writer
        self._others = _NONE
        self._held: Mapping[str, Int64s] | None = None
        # The rows so far of a replica that may continue, and their number.
        self._open: list[Rows] = []
        self._open_rows = 0
        self._waiting: list[pa.Table] = []
        self._waiting_bytes = 0
        # The buffer for encoded trees. It is reused, because allocating memory takes as
        # long as encoding.
        self._out = np.empty(0, np.uint8)
        self._used = 0
        self._keys: list[pa.Table] = []
        self._too_large = 0

    def leave_out(self, others: Int64s, inventory: pa.Table | None) -> None:
        """From now on, leave out these containers and all replicas that are not in the
        inventory.
        """
        self._others, self._held = others, None
        if inventory is not None:
            volumes, ids = (
                inventory["volume"].to_numpy(zero_copy_only=False),
                inventory["container_id"].to_numpy(),
            )
            self._held = {str(volume): ids[volumes == volume] for volume in np.unique(volumes)}

    def add(self, rows: Rows) -> None:
        """Add ordered rows. The last replica may continue in the next call."""
        starts = _replica_starts(rows)
        first = int(starts[1]) if len(starts) > 1 else rows.count
        if self._open and _key(self._open[0]) == _key(rows):
            self._continue_replica(_replica_piece(rows, 0, first))
        else:
            self.end()
            first = 0
        if first < rows.count:
            self.end()
            last = int(starts[-1])
            if first < last:
                self.encode(_slice(rows, first, last))
            self._continue_replica(_replica_piece(rows, last, rows.count))

    def end(self) -> None:
        """End the replica that was added last: no more of its rows follow."""
        if self._open_rows > _REPLICA_ROWS_MAX:
            self._too_large += int(self._is_wanted(self._open[0], np.zeros(1, np.int64))[0])
        elif self._open:
            self.encode(_join_pieces(self._open))
        self._open, self._open_rows = [], 0

    def encode(self, rows: Rows) -> None:
        """Encode the rows of complete replicas."""
        starts = _replica_starts(rows)
        ends = np.append(starts[1:], rows.count)
        scanned_at = rows.integers["scanned_at"]
        scanned_at = (
            np.maximum.reduceat(scanned_at, starts)
            if len(scanned_at) > 1
            else repeat(scanned_at, len(starts))
        )
        chosen = self._is_wanted(rows, starts)
        starts, ends, scanned_at = starts[chosen], ends[chosen], scanned_at[chosen]
        if not len(starts):
            return
        ids = take(rows.integers["container_id"], starts)
        roots, trees = self._encode(rows, starts, ends, ids)
        columns: dict[str, pa.Array] = {
            name: text.values.take(pa.array(take(text.codes, starts)))
            for name, text in rows.text.items()
        }
        columns |= {
            name: to_arrow(name, take(rows.integers[name], starts))
            for name in ("bcs_id", "replica_index")
        }
        columns |= {"container_id": pa.array(ids), "root": pa.array(roots), "tree": trees}
        columns["scanned_at"] = to_arrow("scanned_at", scanned_at)
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
        """Write the collected trees."""
        if self._waiting:
            self._writer.add(pa.concat_tables(self._waiting))
        self._waiting, self._waiting_bytes, self._used = [], 0, 0

    def split_containers(self) -> Int64s:
        """The containers with a replica whose rows were not consecutive so far,
        ascending.
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
        split: Int64s = np.unique(
            counted.filter(pc.greater(counted["count_all"], 1))["container_id"].to_numpy()
        )
        return split

    def count_too_large(self) -> None:
        """Count one more tree as too large."""
        self._too_large += 1

    def result(self, name: str) -> PackedTreeFile:
        """The result, once everything is written."""
        return PackedTreeFile(name, self._writer.rows, self._too_large)

    def _continue_replica(self, rows: Rows) -> None:
        self._open_rows += rows.count
        if self._open_rows > _REPLICA_ROWS_MAX:
            # Too large to write; one piece is kept, because its key is still needed.
            self._open = self._open[:1] or [rows]
        else:
            self._open.append(rows)

    def _encode(
        self, rows: Rows, starts: Int64s, ends: Int64s, container_ids: Int64s
    ) -> tuple[Int64s, pa.Array]:
        """The roots and encoded trees of replicas whose rows are complete and in order.
        The trees are valid until `flush`.
        """
        block_ids, offsets, lengths, checksums = (rows.integers[name] for name in _ROW_COLUMNS)
        matches, deleted = rows.flags["matches"], rows.flags["deleted"]
        if kernels_for(_ROW_BYTES * rows.count) is None:
            block_ids, offsets, lengths, checksums = (
                repeat(column, rows.count) for column in (block_ids, offsets, lengths, checksums)
            )
            matches, deleted = repeat(matches, rows.count), repeat(deleted, rows.count)
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
        ids = take(rows.integers["container_id"], starts)
        wanted: Bools = ~np.isin(ids, self._others)
        sources = rows.text["source"]
        wanted &= (sources.values.to_numpy(zero_copy_only=False) != "none")[
            take(sources.codes, starts)
        ]
        if self._held is not None:
            volumes = rows.text["volume"]
            codes, is_held = take(volumes.codes, starts), np.zeros(len(starts), np.bool_)
            for code in np.unique(codes):
                of_volume = codes == code
                is_held[of_volume] = np.isin(
                    ids[of_volume], self._held.get(volumes.values[int(code)].as_py(), _NONE)
                )
            wanted &= is_held
        return wanted


@contextmanager
def _open_packer(path: AnyPath, disk: Disk) -> Iterator[_Packer]:
    # No compression: half of a tree is checksums, which do not compress, and
    # compressing the rest would take a third of the time.
    with write_atomically(
        path, TREE_SCHEMA, Files(disk), compression="none", opaque="tree"
    ) as writer:
        packer = _Packer(writer)
        yield packer
        packer.flush()


def _add_unsorted(packer: _Packer, container_ids: Int64s, rows: pa.Table, rows_max: int) -> None:
    if len(container_ids) > 1 or rows.num_rows <= rows_max:
        for ordered in _sort(rows):
            packer.encode(ordered)
        return
    # Too many rows to sort at once: sort ranges of blocks, and join their replicas.
    pieces, counts = dict[tuple[object, ...], list[Rows]](), Counter[tuple[object, ...]]()
    for piece in block_ranges(rows, rows_max):
        for ordered in _sort(piece):
            starts = _replica_starts(ordered).tolist()
            for start, end in zip(starts, [*starts[1:], ordered.count], strict=True):
                one = _replica_piece(ordered, start, end)
                held = pieces.setdefault(_key(one), [])
                counts[_key(one)] += one.count
                if not held or counts[_key(one)] <= _REPLICA_ROWS_MAX:
                    held.append(one)
    for key, held in pieces.items():
        attributes = {tuple(_first(one, name) for name in ATTRIBUTE_COLUMNS) for one in held}
        is_empty = any(one.integers["chunk_offset"][0] == CONTAINER_ROW for one in held)
        if counts[key] > _REPLICA_ROWS_MAX:
            packer.count_too_large()
        # Ranges that contradict each other have no tree; sweep.exact reports them.
        elif len(attributes) == 1 and (len(held) == 1 or not is_empty):
            packer.encode(_join_pieces(held))


def _sort(rows: pa.Table) -> Iterator[Rows]:
    """The sorted rows, with a single row for each faulty replica; nothing if there are
    no rows.
    """
    if rows.num_rows:
        ordered = sort_rows(rows).rows.combine_chunks()
        yield rows_of(
            {name: ordered[name].chunk(0) for name in ordered.column_names}, ordered.num_rows
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
    """Like sweep.kernels.encode_trees, without kernels. Every column has one entry per
    row.
    """
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
    """The index of each replica's first row."""
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
            name: TextColumn(
                text.codes[start:end] if len(text.codes) > 1 else text.codes, text.values
            )
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


def _replica_piece(rows: Rows, start: int, end: int) -> Rows:
    """Some rows of one replica, with constant columns reduced to copies of a single
    entry, so that the batch can be freed.
    """
    piece = _slice(rows, start, end)
    integers = {
        name: column if name in _ROW_COLUMNS else column[:1].copy()
        for name, column in piece.integers.items()
    }
    integers["scanned_at"] = piece.integers["scanned_at"].max(keepdims=True)
    return replace(
        piece,
        text={
            name: TextColumn(text.codes[:1].copy(), text.values)
            for name, text in piece.text.items()
        },
        integers=integers,
    )


def _join_pieces(pieces: Sequence[Rows]) -> Rows:
    """One replica, from its pieces in order."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    integers = dict(first.integers)
    for name in _ROW_COLUMNS:
        integers[name] = np.concatenate(
            [repeat(piece.integers[name], piece.count) for piece in pieces]
        )
    integers["scanned_at"] = np.max([piece.integers["scanned_at"] for piece in pieces], axis=0)
    flags = {
        name: np.concatenate([repeat(piece.flags[name], piece.count) for piece in pieces])
        for name in first.flags
    }
    return Rows(sum(piece.count for piece in pieces), first.text, integers, flags)


def _key(rows: Rows) -> tuple[object, ...]:
    """The values of KEY in the first row."""
    return tuple(_first(rows, name) for name in KEY)


def _first(rows: Rows, name: str) -> object:
    if name in TEXT:
        text = rows.text[name]
        return text.values[int(text.codes[0])].as_py()
    return int(rows.integers[name][0])
