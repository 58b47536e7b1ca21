"""Fold the rows of replicas to runs, and join runs to replicas.

A run summarizes consecutive, ordered rows of one replica. Its first and last block may
continue in another run, so they are stored as fragments. The blocks between them are
folded to one checksum, sums and a fingerprint. Consecutive runs of a replica join to
one run, and joining is associative: CRC32C is affine (sweep.fragments), so the checksum
of the whole follows from those of the pieces. A fragment has the checksum of a block
with only these chunks; `inner_checksum` is that of a container with only these blocks.

Rows that are out of order, duplicate, contradictory or incomplete make a run whose
`ordered` is false. The rows of its container must then be sorted (sweep.exact).

Chunks of a deleted block are not counted. Whether a block is deleted is known only
after its last row, so fragments count the rows that are marked deleted. Sums are modulo
2^64.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.pages import NULL, PageError
from chunktable.schema import CHUNK_SCHEMA, CONTAINER_ROW, REPLICA_COLUMNS
from merkle.checksum import kernels_for
from merkle.columns import fold_blocks, fold_windows
from sweep.fragments import (
    ENDS,
    FIRST,
    INNER,
    LAST,
    NUMBERS,
    Bools,
    Fragment,
    Inner,
    Int64s,
    chunk_mixes,
    complete_blocks,
    join_consecutive,
    join_inner,
)
from sweep.model import REPLICA_SCHEMA, RootMethod
from sweep.rows import (
    ROW_COLUMNS,
    TEXT,
    EncodedRows,
    Rows,
    TextColumn,
    integers_of,
    repeat,
    rows_of,
    take,
    text_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


RUN_SCHEMA = pa.schema(
    [
        *(CHUNK_SCHEMA.field(name) for name in REPLICA_COLUMNS),
        pa.field("ordered", pa.bool_(), nullable=False),
        # Rows that were folded.
        pa.field("rows", pa.int64(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in NUMBERS),
    ]
)

# The columns that identify a replica, and the others that must be equal in all of its
# rows.
KEY = ("container_id", "datanode", "volume")
ATTRIBUTE_COLUMNS = ("state", "bcs_id", "replica_index", "source", "generation")
# The cost of a row for `kernels_for`: numpy takes about 100 ns, in which a library
# checksums 1 KB.
_ROW_BYTES = 1000
# Runs collected before they are joined, at about 350 bytes each. Unordered rows make
# one run each.
_PENDING_MAX = 200_000


@dataclass(frozen=True, slots=True)
class SettledRuns:
    """The replicas of some containers, joined from all of their runs."""

    # REPLICA_SCHEMA, by container, datanode and volume.
    replicas: pa.Table
    # The containers whose rows must be sorted, ascending. None of their replicas are in
    # `replicas`.
    exact: Int64s


def fold_batches(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """The runs (RUN_SCHEMA) of the rows in these batches (CHUNK_SCHEMA), one per
    replica.

    The caller must drop rows without datanode, volume or container ID.
    """
    pieces = run_pieces(
        rows_of(dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)
        for batch in batches
        if batch.num_rows
    )
    return join(pa.concat_tables([RUN_SCHEMA.empty_table(), *pieces]))


def run_pieces(stretches: Iterable[Rows | EncodedRows]) -> Iterator[pa.Table]:
    """The runs (RUN_SCHEMA) of these rows, some at a time, which bounds memory. A
    replica whose rows are consecutive has one run, in one of the pieces.
    """
    joiner = RunJoiner()
    for rows in stretches:
        yield from joiner.add(Stretches.of(rows).runs())
    yield from joiner.close()


class RunJoiner:
    """Joins the runs of consecutive rows, and returns some at a time (`run_pieces`)."""

    def __init__(self) -> None:
        self._pending: list[pa.Table] = []
        self._count = 0
        # Runs that the last join left.
        self._left = 0

    def add(self, runs: pa.Table) -> Iterator[pa.Table]:
        """Take in runs (RUN_SCHEMA) of the rows that follow."""
        if not runs.num_rows:
            return
        self._pending.append(runs)
        self._count += runs.num_rows
        # Joining costs time even if nothing joins. So wait until there are twice as
        # many runs as the last time left.
        if self._count > max(_PENDING_MAX, 2 * self._left):
            joined = join(pa.concat_tables(self._pending))
            if 2 * joined.num_rows > _PENDING_MAX:
                # The replica that was read last may continue.
                last = runs.slice(runs.num_rows - 1)
                continues = reduce(pc.and_, (pc.equal(joined[k], last[k][0]) for k in KEY))
                yield joined.filter(pc.invert(continues))
                joined = joined.filter(continues)
            self._pending, self._count, self._left = [joined], joined.num_rows, joined.num_rows

    def close(self) -> Iterator[pa.Table]:
        """The runs that are left."""
        if self._pending:
            yield join(pa.concat_tables(self._pending))


def join(runs: pa.Table) -> pa.Table:
    """One run per replica, sorted by container, datanode and volume."""
    return _join_with_counts(runs)[0]


def settle(runs: pa.Table) -> SettledRuns:
    """The replicas of some containers, from all of their runs (RUN_SCHEMA, in any
    order).
    """
    joined, counts = _join_with_counts(runs.select(RUN_SCHEMA.names).cast(RUN_SCHEMA))
    containers = _int64s(joined["container_id"])
    exact = np.unique(containers[~joined["ordered"].to_numpy()])
    settled = ~np.isin(containers, exact)
    paths = np.where(counts[settled] > 1, RootMethod.FRAGMENTS.value, RootMethod.FILE_WISE.value)
    return SettledRuns(
        replicas_of(joined.filter(pa.array(settled)), pa.array(paths.tolist(), pa.string())), exact
    )


def replicas_of(runs: pa.Table, paths: pa.Array) -> pa.Table:
    """The replicas (REPLICA_SCHEMA) of ordered runs, one run per replica. `paths` are
    values of RootMethod.
    """
    columns = {name: runs[name] for name in REPLICA_COLUMNS}
    return _replica_table(columns | {"path": paths}, _numbers_of(runs))


def _replica_table(columns: Mapping[str, pa.Array | pa.ChunkedArray], numbers: Int64s) -> pa.Table:
    """The replicas with these REPLICA_COLUMNS and paths, from the NUMBERS of one
    ordered run each.
    """
    unknown = pc.equal(columns["source"], "none").to_numpy(zero_copy_only=False)
    whole, found = settle_numbers(numbers), dict(columns)
    found["root"] = pa.array(whole[Inner.CHECKSUM], mask=unknown if unknown.any() else None)
    for field in Inner:
        found[field.name.lower()] = pa.array(whole[field])
    return pa.table([found[name] for name in REPLICA_SCHEMA.names], REPLICA_SCHEMA)


def settle_numbers(numbers: Int64s) -> Int64s:
    """The sums of whole replicas, a row for each of Inner and a column for each
    replica, from the NUMBERS of one ordered run each.
    """
    if kernels_for(_ROW_BYTES * numbers.shape[1]) is not None:
        from sweep import kernels

        whole = np.empty((len(Inner), numbers.shape[1]), np.int64)
        kernels.settle_runs(np.ascontiguousarray(numbers.T), whole)
        return whole
    return library_settle_numbers(numbers)


def library_settle_numbers(numbers: Int64s) -> Int64s:
    """Like `settle_numbers`, with numpy instead of kernels."""
    ends = numbers[ENDS]
    whole = join_inner(complete_blocks(numbers[FIRST], ends > 0), numbers[INNER])
    return join_inner(whole, complete_blocks(numbers[LAST], ends > 1))


def fold_stretches(starts: Int64s, rows: Rows) -> tuple[Bools, Int64s]:
    """Fold each stretch of rows, which begins at an index in `starts`, to a run.

    Returns whether each stretch is in order, and an array with a row for each of
    NUMBERS and a column for each run. The numbers of an unordered run are meaningless.
    """
    block_ids, offsets, lengths, checksums = (
        rows.integers[name] for name in ("block_id", "chunk_offset", "length", "checksum")
    )
    matches, deleted = rows.flags["matches"], rows.flags["deleted"]
    if kernels_for(_ROW_BYTES * rows.count) is None:
        block_ids, offsets, lengths, checksums = (
            repeat(column, rows.count) for column in (block_ids, offsets, lengths, checksums)
        )
        matches, deleted = repeat(matches, rows.count), repeat(deleted, rows.count)
        return library_fold_stretches(
            starts, block_ids, offsets, lengths, checksums, matches, deleted
        )
    from sweep import kernels

    ordered, numbers = (
        np.empty(len(starts), np.bool_),
        np.zeros((len(starts), len(NUMBERS)), np.int64),
    )
    columns = block_ids, offsets, lengths, checksums, matches, deleted
    kernels.fold_stretches(starts, rows.count, *columns, ordered, numbers)
    return ordered, numbers.T


@dataclass(frozen=True, slots=True)
class Stretches:
    """The runs of some rows, one for each stretch of rows of one replica.

    `text` and `integers` are its REPLICA_COLUMNS, `counts` its rows; `numbers` has a
    row for each of NUMBERS and a column for each stretch.
    """

    text: Mapping[str, TextColumn]
    integers: Mapping[str, Int64s]
    counts: Int64s
    # Whether the rows are in order; the numbers of others are meaningless.
    ordered: Bools
    numbers: Int64s

    @classmethod
    def of(cls, rows: Rows | EncodedRows) -> Self:
        """Fold the rows.

        Raises:
            PageError: a page of encoded rows is malformed.
        """
        text: Mapping[str, TextColumn]
        integers: Mapping[str, Int64s]
        if isinstance(rows, EncodedRows):
            starts, text, integers = rows.starts, rows.text, rows.integers
            ordered, numbers = _fold_encoded(rows)
        else:
            starts = _changes(rows)
            ordered, numbers = fold_stretches(starts, rows)
            if rows.unreadable is not None:
                ordered &= ~np.logical_or.reduceat(rows.unreadable, starts)
            text = {n: TextColumn(take(t.codes, starts), t.values) for n, t in rows.text.items()}
            integers = {n: take(rows.integers[n], starts) for n in REPLICA_COLUMNS if n not in TEXT}
        is_none = text["source"].values.to_numpy(zero_copy_only=False) == "none"
        # A replica without a tree has no blocks.
        ordered &= ~is_none[text["source"].codes] | (numbers[ENDS] == 0)
        return cls(text, integers, np.diff(starts, append=rows.count), ordered, numbers)

    def chosen(self, which: Bools) -> Self:
        """Only these stretches."""
        if which.all():
            return self
        return type(self)(
            {name: TextColumn(one.codes[which], one.values) for name, one in self.text.items()},
            {name: column[which] for name, column in self.integers.items()},
            self.counts[which],
            self.ordered[which],
            # Along the rows of the kernel's output, which are contiguous.
            self.numbers.T[which].T,
        )

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        """Those of all pieces, of which there is one or more."""
        text = dict[str, TextColumn]()
        for name in TEXT:
            places, codes = dict[str, int](), list["NDArray[np.int32]"]()
            for one in (piece.text[name] for piece in pieces):
                values = one.values.to_pylist()
                ours = [places.setdefault(value, len(places)) for value in values]
                codes.append(np.array(ours, np.int32)[one.codes])
            text[name] = TextColumn(np.concatenate(codes), pa.array(places, pa.string()))
        return cls(
            text,
            {
                name: np.concatenate([piece.integers[name] for piece in pieces])
                for name in pieces[0].integers
            },
            np.concatenate([piece.counts for piece in pieces]),
            np.concatenate([piece.ordered for piece in pieces]),
            np.concatenate([piece.numbers.T for piece in pieces]).T,
        )

    def runs(self) -> pa.Table:
        """The runs (RUN_SCHEMA)."""
        columns = self._identity() | _number_columns(self.numbers)
        columns |= {"ordered": pa.array(self.ordered), "rows": pa.array(self.counts)}
        return pa.table([columns[name] for name in RUN_SCHEMA.names], RUN_SCHEMA)

    def replicas(self) -> pa.Table:
        """The replicas (REPLICA_SCHEMA) of ordered stretches that are whole."""
        paths = pa.repeat(pa.scalar(RootMethod.FILE_WISE.value), len(self.counts))
        return _replica_table(self._identity() | {"path": paths}, self.numbers)

    def _identity(self) -> dict[str, pa.Array]:
        found = {name: to_arrow(name, column) for name, column in self.integers.items()}
        return found | {n: one.values.take(pa.array(one.codes)) for n, one in self.text.items()}


def _fold_encoded(rows: EncodedRows) -> tuple[Bools, Int64s]:
    """Like `fold_stretches`.

    Raises:
        PageError: a page is malformed.
    """
    from sweep import kernels

    columns = [rows.columns[name] for name in ROW_COLUMNS]
    runs = len(rows.starts)
    ordered, numbers = np.empty(runs, np.bool_), np.zeros((runs, len(NUMBERS)), np.int64)
    is_whole = kernels.fold_encoded(
        rows.starts,
        rows.count,
        tuple(column.raw for column in columns),
        tuple(column.segments for column in columns),
        tuple(column.values for column in columns),
        tuple(column.size for column in columns),
        ordered,
        numbers,
    )
    if not is_whole:
        raise PageError
    return ordered, numbers.T


def _changes(rows: Rows) -> Int64s:
    """The indexes of rows that differ from the row before in their REPLICA_COLUMNS,
    and 0.
    """
    changes = np.zeros(rows.count, np.bool_)
    changes[0] = True
    of_integers = (rows.integers[name] for name in REPLICA_COLUMNS if name not in TEXT)
    columns: list[NDArray[np.integer]] = [
        *(text.codes for text in rows.text.values()),
        *of_integers,
    ]
    for column in columns:
        if len(column) > 1:
            changes[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(changes)


def to_arrow(name: str, column: Int64s) -> pa.Array:
    """Convert integers or times to the type of the column in RUN_SCHEMA."""
    if name == "scanned_at":
        return pa.array(column, pa.int64(), mask=column == NULL).view(CHUNK_SCHEMA.field(name).type)
    return pa.array(column, RUN_SCHEMA.field(name).type)


def library_fold_stretches(
    starts: Int64s,
    block_ids: Int64s,
    offsets: Int64s,
    lengths: Int64s,
    checksums: Int64s,
    matches: Bools,
    deleted: Bools,
) -> tuple[Bools, Int64s]:
    """Like `fold_stretches`, with numpy instead of kernels. Every column has one entry
    per row.
    """
    is_chunk = offsets >= 0
    # Consecutive rows of one block make a fragment.
    first_row = np.zeros(len(offsets), np.bool_)
    first_row[starts] = True
    begins_run = first_row.copy()
    first_row[1:] |= block_ids[1:] != block_ids[:-1]
    disordered = offsets < CONTAINER_ROW
    # A block row and a container row must be the only row of their block or replica.
    follows = ~begins_run[1:]
    same_block = ~first_row[1:]
    disordered[1:] |= follows & (block_ids[1:] < block_ids[:-1])
    disordered[1:] |= same_block & ((offsets[1:] <= offsets[:-1]) | ~is_chunk[:-1])
    disordered[1:] |= follows & ((offsets[1:] == CONTAINER_ROW) | (offsets[:-1] == CONTAINER_ROW))
    ordered = ~np.logical_or.reduceat(disordered, starts)

    pieces = np.flatnonzero(first_row)
    fragments = np.empty((len(Fragment), len(pieces)), np.int64)
    fragments[Fragment.BLOCK_ID] = block_ids[pieces]
    fragments[Fragment.LOW] = offsets[pieces]
    fragments[Fragment.HIGH] = offsets[np.append(pieces[1:], len(offsets)) - 1]
    fragments[Fragment.CHUNKS] = np.add.reduceat(is_chunk, pieces, dtype=np.int64)
    chunks_before = np.concatenate(([0], np.cumsum(fragments[Fragment.CHUNKS])))
    folded = fold_blocks(block_ids[pieces], chunks_before, checksums[is_chunk])
    is_tombstone = ~is_chunk & deleted
    fragments[Fragment.CHECKSUM] = np.where(is_tombstone[pieces], checksums[pieces], folded)
    fragments[Fragment.DELETED_ROWS] = np.add.reduceat(deleted, pieces, dtype=np.int64)
    fragments[Fragment.BYTES] = np.add.reduceat(np.where(is_chunk, lengths, 0), pieces)
    fragments[Fragment.CORRUPT] = np.add.reduceat(is_chunk & ~matches, pieces, dtype=np.int64)
    fragments[Fragment.UNVERIFIABLE] = np.add.reduceat(
        ~is_chunk | (matches & (checksums == 0)), pieces, dtype=np.int64
    )
    mixes = np.where(is_chunk, chunk_mixes(offsets, lengths, checksums, matches), 0)
    fragments[Fragment.MIX] = np.add.reduceat(mixes, pieces)

    run_starts = np.searchsorted(pieces, starts)
    counts = np.diff(np.append(run_starts, len(pieces)))
    numbers = np.zeros((1 + 2 * len(Fragment) + len(Inner), len(starts)), np.int64)
    is_empty = offsets[starts] == CONTAINER_ROW
    numbers[ENDS] = np.where(is_empty, 0, np.minimum(counts, 2))
    numbers[FIRST] = np.where(is_empty, 0, fragments[:, run_starts])
    numbers[LAST] = np.where(numbers[ENDS] > 1, fragments[:, run_starts + counts - 1], 0)
    is_inner = np.ones(len(pieces), np.bool_)
    is_inner[run_starts] = False
    is_inner[run_starts + counts - 1] = False
    numbers[INNER] = _fold_complete_blocks(fragments[:, is_inner], np.maximum(counts - 2, 0))
    return ordered, numbers


def _fold_complete_blocks(fragments: Int64s, counts: Int64s) -> Int64s:
    """The Inner numbers of complete blocks, `counts[i]` of them for run i."""
    each = complete_blocks(fragments, np.ones(fragments.shape[1], np.bool_))
    # All fields add up except the checksum, which is folded from the blocks'.
    starts = np.concatenate(([0], np.cumsum(counts)))
    out = np.zeros((len(Inner), len(counts)), np.int64)
    some = counts > 0
    if some.any():
        at = starts[:-1][some]
        out[Inner.BLOCKS :, some] = np.add.reduceat(each[Inner.BLOCKS :], at, axis=1)
        out[Inner.FINGERPRINT, some] = np.bitwise_xor.reduceat(each[Inner.FINGERPRINT], at)
        out[Inner.CHECKSUM] = fold_windows(
            fragments[Fragment.CHECKSUM].astype(">i8").tobytes(), 8 * starts
        )
    return out


def _join_with_counts(runs: pa.Table) -> tuple[pa.Table, Int64s]:
    """One run per replica, and the number of runs that it was joined from."""
    runs = runs.combine_chunks()
    if not runs.num_rows:
        return runs, np.empty(0, np.int64)
    order, starts = _by_replica(runs)
    counts = np.diff(starts, append=len(order))
    firsts = order[starts]
    # Taking rows copies each column, so it is skipped where they are in order already.
    is_sorted = len(firsts) == len(order) and bool((np.diff(firsts) > 0).all())
    firsts = runs if is_sorted else runs.take(pa.array(firsts))
    several = counts > 1
    if not several.any():
        return firsts, counts
    replica = np.repeat(np.arange(len(starts)), counts)
    in_order = _in_order(runs, order, starts, replica)
    numbers = _numbers_of(firsts)
    # The numbers of unordered runs are meaningless.
    numbers[:, several & ~in_order] = 0
    is_joined = several & in_order
    if is_joined.any():
        pieces = is_joined[replica]
        numbers[:, is_joined] = join_consecutive(
            _numbers_of(runs.take(pa.array(order[pieces]))), replica[pieces]
        )
    scanned = np.maximum.reduceat(integers_of(runs["scanned_at"].combine_chunks())[order], starts)
    columns = {name: firsts[name] for name in REPLICA_COLUMNS}
    rows = np.add.reduceat(_int64s(runs["rows"])[order], starts)
    columns |= {"scanned_at": to_arrow("scanned_at", scanned), "ordered": pa.array(in_order)}
    columns["rows"] = pa.array(rows)
    columns |= _number_columns(numbers)
    return pa.table([columns[name] for name in RUN_SCHEMA.names], RUN_SCHEMA), counts


def _by_replica(runs: pa.Table) -> tuple[Int64s, Int64s]:
    """The order of the runs by replica and first row, and the index of each replica's
    first run in that order.
    """
    keys = [_int64s(runs["container_id"]), ranks(runs["datanode"]), ranks(runs["volume"])]
    order = np.lexsort(
        (_int64s(runs["first_low"]), _int64s(runs["first_block_id"]), *reversed(keys))
    )
    changes = np.ones(len(order), np.bool_)
    changes[1:] = np.logical_or.reduce([key[order][1:] != key[order][:-1] for key in keys])
    return order, np.flatnonzero(changes)


def ranks(column: pa.ChunkedArray) -> Int64s:
    """Integers that sort like the text."""
    text = text_of(column.combine_chunks())
    values = text.values.to_pylist()
    places = {value: place for place, value in enumerate(sorted(set(values)))}
    rank = np.array([places[value] for value in values], np.int64)
    taken: Int64s = rank[text.codes]
    return taken


def _in_order(runs: pa.Table, order: Int64s, starts: Int64s, replica: Int64s) -> Bools:
    """Whether the sorted runs of each replica are disjoint and agree in
    ATTRIBUTE_COLUMNS.
    """

    def sorted_by(name: str) -> Int64s:
        return _int64s(runs[name])[order]

    ends = sorted_by("ends")
    two = ends > 1
    last_block = np.where(two, sorted_by("last_block_id"), sorted_by("first_block_id"))
    low = np.where(two, sorted_by("last_low"), sorted_by("first_low"))
    high = np.where(two, sorted_by("last_high"), sorted_by("first_high"))
    next_block, next_low = sorted_by("first_block_id")[1:], sorted_by("first_low")[1:]
    # A replica without blocks has a single row, and so has a block without chunks.
    fits = np.where(
        next_block == last_block[:-1],
        (low[:-1] >= 0) & (high[:-1] < next_low),
        last_block[:-1] < next_block,
    )
    fits &= (ends[:-1] > 0) & (ends[1:] > 0)
    spoiled = ~runs["ordered"].to_numpy()[order]
    spoiled[1:] |= (replica[1:] == replica[:-1]) & ~fits
    for name in ATTRIBUTE_COLUMNS:
        column = (ranks(runs[name]) if name in TEXT else _int64s(runs[name]))[order]
        spoiled |= column != column[starts][replica]
    return ~np.logical_or.reduceat(spoiled, starts)


def _number_columns(numbers: Int64s) -> dict[str, pa.Array]:
    """The columns of a table of runs with these numbers, a row for each of NUMBERS."""
    count = numbers.shape[1]
    # One copy for all; pa.array would make one for each column, of strided rows.
    whole = pa.py_buffer(np.ascontiguousarray(numbers))
    return {
        name: pa.Array.from_buffers(
            pa.int64(), count, [None, whole.slice(8 * count * i, 8 * count)]
        )
        for i, name in enumerate(NUMBERS)
    }


def _numbers_of(runs: pa.Table) -> Int64s:
    return np.array([_int64s(runs[name]) for name in NUMBERS], np.int64).reshape(len(NUMBERS), -1)


def _int64s(column: pa.ChunkedArray) -> Int64s:
    array: Int64s = column.to_numpy().astype(np.int64, copy=False)
    return array
