"""Runs: what the rows of a replica fold to, however they are cut into batches and
parts.

A run is a stretch of one replica's rows in order. Its first and its last block may go
on in another run, so both are kept as fragments; the blocks between them are folded to
one checksum, sums and a fingerprint. Two runs of a replica that follow each other join
to one, and joining is associative: CRC32C is affine (sweep.fragments), so that the
checksum of a whole follows from the checksums of its pieces. Each piece's checksum is
that which it would have if it were all there is: a fragment's that of a block with
these chunks alone, `inner_checksum` that of a container of these blocks.

What cannot be joined (rows out of order, twice at one place, of two states, without a
value) makes a run that is not `ordered`, and sends its container to the exact path
(sweep.exact). Nothing is ever folded wrongly in silence.

Chunks of a deleted block count nowhere: a tombstone has none. Whether a block is
deleted is known only when its last row was seen, so that fragments count the rows that
say so. Sums are modulo 2^64.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

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
    append_zero_words,
    block_mixes,
    chunk_mixes,
)
from sweep.model import REPLICA_SCHEMA, RootMethod

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


RUN_SCHEMA = pa.schema(
    [
        *(CHUNK_SCHEMA.field(name) for name in REPLICA_COLUMNS),
        pa.field("ordered", pa.bool_(), nullable=False),
        *(pa.field(name, pa.int64(), nullable=False) for name in NUMBERS),
    ]
)

# What identifies a replica, and what all its rows must agree in; they may have been
# read at different times.
KEY = ("container_id", "datanode", "volume")
AGREED = ("state", "bcs_id", "replica_index", "source", "generation")
TEXT = ("datanode", "volume", "state", "source")
_NEVER = int(np.iinfo(np.int64).min)

# What a row weighs when kernels are asked for: numpy takes some 100 ns, in which a
# library checksums 1 KB.
_ROW_BYTES = 1000
# Runs that wait to be joined: some 350 bytes each. Rows in no order at all make one a
# row.
_PENDING_MAX = 200_000


@dataclass(frozen=True, slots=True)
class SettledRuns:
    """What all runs of some containers come to."""

    # REPLICA_SCHEMA, by container, datanode and volume.
    replicas: pa.Table
    # Containers, ascending, of which no replica is in `replicas`: their rows have to be
    # sorted.
    exact: Int64s


@dataclass(frozen=True, slots=True)
class Text:
    """A column of text as places in a list of values."""

    codes: "NDArray[np.int32]"
    values: pa.Array


@dataclass(frozen=True, slots=True)
class Rows:
    """A stretch of at least one row of the chunk table, its columns by name; of one in
    which all rows are alike, one.

    `flags` are `matches` and `deleted`. Times are in milliseconds, null is the least
    int64.
    """

    count: int
    text: Mapping[str, Text]
    integers: Mapping[str, Int64s]
    flags: Mapping[str, Bools]
    # Rows that lack a value.
    unreadable: "Bools | None" = None


def fold_batches(batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """The runs (RUN_SCHEMA) of the rows in these batches of CHUNK_SCHEMA: one a replica
    unless its rows are scattered.

    Rows without datanode, volume or container ID belong to no replica: whoever reads
    them leaves them out.
    """
    return fold_rows(
        rows_of(dict(zip(batch.schema.names, batch.columns, strict=True)), batch.num_rows)
        for batch in batches
        if batch.num_rows
    )


def fold_rows(stretches: Iterable[Rows]) -> pa.Table:
    """The same of rows as arrays."""
    pending: list[pa.Table] = []
    count, left = 0, 0
    for rows in stretches:
        pending.append(_folded(rows))
        count += pending[-1].num_rows
        # Joining costs what it takes in, and there may be nothing to join: wait for as
        # much again as it left.
        if count > max(_PENDING_MAX, 2 * left):
            pending = [join(pa.concat_tables(pending))]
            count = left = pending[0].num_rows
    return join(pa.concat_tables(pending)) if pending else RUN_SCHEMA.empty_table()


def join(runs: pa.Table) -> pa.Table:
    """One run for each replica, by container, datanode and volume."""
    return _joined(runs)[0]


def settle(runs: pa.Table) -> SettledRuns:
    """The replicas of all containers whose runs (RUN_SCHEMA, in any order) are given
    completely.
    """
    joined, counts = _joined(runs.select(RUN_SCHEMA.names).cast(RUN_SCHEMA))
    containers = _int64s(joined["container_id"])
    exact = np.unique(containers[~joined["ordered"].to_numpy()])
    settled = ~np.isin(containers, exact)
    paths = np.where(counts[settled] > 1, RootMethod.FRAGMENTS.value, RootMethod.FILE_WISE.value)
    return SettledRuns(
        replicas_of(joined.filter(pa.array(settled)), pa.array(paths.tolist(), pa.string())), exact
    )


def replicas_of(runs: pa.Table, paths: pa.Array) -> pa.Table:
    """REPLICA_SCHEMA of ordered runs, each of which is all there is of its replica."""
    numbers = _numbers_of(runs)
    ends = numbers[ENDS]
    whole = _followed(_finished(numbers[FIRST], ends > 0), numbers[INNER])
    whole = _followed(whole, _finished(numbers[LAST], ends > 1))
    unknown = np.array([source == "none" for source in runs["source"].to_pylist()], np.bool_)
    columns = {name: runs[name] for name in REPLICA_COLUMNS}
    columns["root"] = pa.array(whole[Inner.CHECKSUM], mask=unknown)
    for field in Inner:
        columns[field.name.lower()] = pa.array(whole[field])
    columns["path"] = paths
    return pa.table([columns[name] for name in REPLICA_SCHEMA.names], REPLICA_SCHEMA)


def rows_of(columns: Mapping[str, pa.Array], count: int) -> Rows:
    """Columns of the types of CHUNK_SCHEMA as arrays; text may be dictionaries, and a
    single entry stands for all.
    """
    unreadable: Bools | None = None
    text, integers, flags = dict[str, Text](), dict[str, Int64s](), dict[str, Bools]()
    for name in CHUNK_SCHEMA.names:
        column = columns[name]
        if column.null_count and name != "scanned_at":
            lacking = full(column.is_null().to_numpy(zero_copy_only=False), count)
            unreadable = lacking if unreadable is None else unreadable | lacking
        if name in TEXT:
            text[name] = _text_of(column)
        elif pa.types.is_boolean(column.type):
            flags[name] = flags_of(column)
        else:
            integers[name] = integers_of(column)
    return Rows(count, text, integers, flags, unreadable)


def _text_of(column: pa.Array) -> Text:
    """A column of text, null as ""."""
    if column.null_count:
        column = column.cast(pa.string()).fill_null("")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    return Text(column.indices.to_numpy(), column.dictionary)


def integers_of(column: pa.Array) -> Int64s:
    """A column of integers, null as 0, or of times."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz="UTC")).view(pa.int64()).fill_null(_NEVER)
    elif column.null_count:
        column = column.fill_null(0)
    array: Int64s = column.to_numpy().astype(np.int64, copy=False)
    return array


def flags_of(column: pa.Array) -> Bools:
    """A column of booleans, null as False."""
    array: Bools = column.fill_null(False).to_numpy(zero_copy_only=False)
    return array


def fold_stretches(starts: Int64s, rows: Rows) -> tuple[Bools, Int64s]:
    """For each stretch of rows that begins at one of `starts`: whether it is in order,
    and the numbers of its run.

    Of a stretch that is not in order, the numbers mean nothing. Each number of all runs
    is one row of the array.
    """
    block_ids, offsets, lengths, checksums = (
        rows.integers[name] for name in ("block_id", "chunk_offset", "length", "checksum")
    )
    matches, deleted = rows.flags["matches"], rows.flags["deleted"]
    if kernels_for(_ROW_BYTES * rows.count) is None:
        block_ids, offsets, lengths, checksums = (
            full(column, rows.count) for column in (block_ids, offsets, lengths, checksums)
        )
        matches, deleted = full(matches, rows.count), full(deleted, rows.count)
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


def _folded(rows: Rows) -> pa.Table:
    """One run for each stretch of one replica's rows, also where such stretches follow
    each other.
    """
    starts = _changes(rows)
    ordered, numbers = fold_stretches(starts, rows)
    sources = rows.text["source"]
    is_none = sources.values.to_numpy(zero_copy_only=False) == "none"
    # A replica without a tree has no blocks.
    ordered &= ~is_none[entries(sources.codes, starts)] | (numbers[ENDS] == 0)
    if rows.unreadable is not None:
        ordered &= ~np.logical_or.reduceat(rows.unreadable, starts)
    columns: dict[str, pa.Array] = {
        name: pa.array(row) for name, row in zip(NUMBERS, numbers, strict=True)
    }
    columns["ordered"] = pa.array(ordered)
    for name, text in rows.text.items():
        columns[name] = text.values.take(pa.array(entries(text.codes, starts)))
    for name in REPLICA_COLUMNS:
        if name not in TEXT:
            columns[name] = arrow_of(name, entries(rows.integers[name], starts))
    return pa.table([columns[name] for name in RUN_SCHEMA.names], RUN_SCHEMA)


def _changes(rows: Rows) -> Int64s:
    """Where a row is not of the same replica as the row before."""
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


def entries(column: "NDArray[_Scalar]", places: Int64s) -> "NDArray[_Scalar]":
    """Those of some rows, of a column that has all or the one that all rows have."""
    return column[places] if len(column) > 1 else full(column, len(places))


def full(column: "NDArray[_Scalar]", count: int) -> "NDArray[_Scalar]":
    """With one entry a row."""
    return column if len(column) == count else np.repeat(column, count)


def arrow_of(name: str, column: Int64s) -> pa.Array:
    """A column of integers or times as REPLICA_SCHEMA has it."""
    if name == "scanned_at":
        return pa.array(column, pa.int64(), mask=column == _NEVER).view(
            CHUNK_SCHEMA.field(name).type
        )
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
    """The same by numpy, without kernels; every column has an entry a row."""
    is_chunk = offsets >= 0
    # A block's rows, as far as they stand together.
    first_row = np.zeros(len(offsets), np.bool_)
    first_row[starts] = True
    begins_run = first_row.copy()
    first_row[1:] |= block_ids[1:] != block_ids[:-1]
    disordered = offsets < CONTAINER_ROW
    # The row of a block, and that of a replica without blocks, stand alone.
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
    numbers[INNER] = _chained(fragments[:, is_inner], np.maximum(counts - 2, 0))
    return ordered, numbers


def _chained(fragments: Int64s, counts: Int64s) -> Int64s:
    """Whole blocks, `counts[i]` of them for run i, to what is known of them
    together.
    """
    each = _finished(fragments, np.ones(fragments.shape[1], np.bool_))
    # Of a block alone the checksum is that of a container; here the blocks' own are
    # folded in a row.
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


def _finished(fragments: Int64s, known: Bools) -> Int64s:
    """A fragment that is all of its block, as what is known of a row of blocks; nothing
    where not `known`.
    """
    deleted = fragments[Fragment.DELETED_ROWS] > 0
    live = np.where(deleted, 0, fragments)
    checksums = fragments[Fragment.CHECKSUM]
    out = np.empty((len(Inner), fragments.shape[1]), np.int64)
    out[Inner.CHECKSUM] = _word_checksums(checksums)
    out[Inner.FINGERPRINT] = block_mixes(
        fragments[Fragment.BLOCK_ID], checksums, deleted, live[Fragment.MIX]
    )
    out[Inner.BLOCKS] = 1
    out[Inner.DELETED_BLOCKS] = deleted
    out[Inner.CHUNKS] = live[Fragment.CHUNKS]
    out[Inner.BYTES] = live[Fragment.BYTES]
    out[Inner.CORRUPT] = live[Fragment.CORRUPT]
    out[Inner.UNVERIFIABLE] = live[Fragment.UNVERIFIABLE]
    return np.where(known, out, 0)


def _followed(left: Int64s, right: Int64s) -> Int64s:
    """What is known of the blocks on the left and those on the right."""
    out = left + right
    moved = append_zero_words(left[Inner.CHECKSUM], right[Inner.BLOCKS])
    out[Inner.CHECKSUM] = moved ^ right[Inner.CHECKSUM]
    out[Inner.FINGERPRINT] = left[Inner.FINGERPRINT] ^ right[Inner.FINGERPRINT]
    return out


def _continued(left: Int64s, right: Int64s) -> Int64s:
    """Two fragments of one block as one."""
    out = left + right
    out[Fragment.BLOCK_ID] = left[Fragment.BLOCK_ID]
    out[Fragment.LOW], out[Fragment.HIGH] = left[Fragment.LOW], right[Fragment.HIGH]
    # Both begin with the ID; the one in the middle is taken out.
    without_id = left[Fragment.CHECKSUM] ^ _word_checksums(left[Fragment.BLOCK_ID])
    out[Fragment.CHECKSUM] = (
        append_zero_words(without_id, right[Fragment.CHUNKS]) ^ right[Fragment.CHECKSUM]
    )
    return out


def _word_checksums(words: Int64s) -> Int64s:
    """The CRC32C of each word alone."""
    return fold_blocks(words, np.zeros(len(words) + 1, np.int64), np.empty(0, np.int64))


def _joined(runs: pa.Table) -> tuple[pa.Table, Int64s]:
    """One run for each replica, and how many it was made of."""
    runs = runs.combine_chunks()
    if not runs.num_rows:
        return runs, np.empty(0, np.int64)
    order, starts = _by_replica(runs)
    counts = np.diff(np.append(starts, len(order)))
    firsts = runs.take(pa.array(order[starts]))
    several = counts > 1
    if not several.any():
        return firsts, counts
    replica = np.repeat(np.arange(len(starts)), counts)
    in_order = _in_order(runs, order, starts, replica)
    numbers = _numbers_of(firsts)
    # What is not in order has no numbers that mean anything.
    numbers[:, several & ~in_order] = 0
    torn = several & in_order
    if torn.any():
        pieces = torn[replica]
        numbers[:, torn] = _reduced(
            _numbers_of(runs.take(pa.array(order[pieces]))), replica[pieces]
        )
    scanned = np.maximum.reduceat(integers_of(runs["scanned_at"].combine_chunks())[order], starts)
    columns = {name: firsts[name] for name in REPLICA_COLUMNS}
    columns |= {"scanned_at": arrow_of("scanned_at", scanned), "ordered": pa.array(in_order)}
    columns |= {name: pa.array(row) for name, row in zip(NUMBERS, numbers, strict=True)}
    return pa.table([columns[name] for name in RUN_SCHEMA.names], RUN_SCHEMA), counts


def _by_replica(runs: pa.Table) -> tuple[Int64s, Int64s]:
    """The runs' places by replica and place of the first row; where each replica begins
    among them.
    """
    keys = [_int64s(runs["container_id"]), ranks(runs["datanode"]), ranks(runs["volume"])]
    order = np.lexsort(
        (_int64s(runs["first_low"]), _int64s(runs["first_block_id"]), *reversed(keys))
    )
    changes = np.ones(len(order), np.bool_)
    changes[1:] = np.logical_or.reduce([key[order][1:] != key[order][:-1] for key in keys])
    return order, np.flatnonzero(changes)


def ranks(column: pa.ChunkedArray) -> Int64s:
    """Numbers that sort as the text does."""
    text = _text_of(column.combine_chunks())
    values = text.values.to_pylist()
    places = {value: place for place, value in enumerate(sorted(set(values)))}
    rank = np.array([places[value] for value in values], np.int64)
    taken: Int64s = rank[text.codes]
    return taken


def _in_order(runs: pa.Table, order: Int64s, starts: Int64s, replica: Int64s) -> Bools:
    """Whether each replica's runs, sorted, follow each other, and agree."""

    def sorted_by(name: str) -> Int64s:
        return _int64s(runs[name])[order]

    ends = sorted_by("ends")
    two = ends > 1
    last_block = np.where(two, sorted_by("last_block_id"), sorted_by("first_block_id"))
    low = np.where(two, sorted_by("last_low"), sorted_by("first_low"))
    high = np.where(two, sorted_by("last_high"), sorted_by("first_high"))
    next_block, next_low = sorted_by("first_block_id")[1:], sorted_by("first_low")[1:]
    # A replica without blocks has one row, and so has a block without chunks.
    fits = np.where(
        next_block == last_block[:-1],
        (low[:-1] >= 0) & (high[:-1] < next_low),
        last_block[:-1] < next_block,
    )
    fits &= (ends[:-1] > 0) & (ends[1:] > 0)
    spoiled = ~runs["ordered"].to_numpy()[order]
    spoiled[1:] |= (replica[1:] == replica[:-1]) & ~fits
    for name in AGREED:
        column = (ranks(runs[name]) if name in TEXT else _int64s(runs[name]))[order]
        spoiled |= column != column[starts][replica]
    return ~np.logical_or.reduceat(spoiled, starts)


def _reduced(numbers: Int64s, replica: Int64s) -> Int64s:
    """The numbers of runs that follow each other, joined to one run for each
    replica.
    """
    while True:
        starts = np.flatnonzero(np.append(True, replica[1:] != replica[:-1]))
        if len(starts) == len(replica):
            return numbers
        # Neighbours first: each round halves what is left of a replica.
        place = np.arange(len(replica)) - np.repeat(
            starts, np.diff(np.append(starts, len(replica)))
        )
        left = np.flatnonzero(place % 2 == 0)
        has_right = np.append(replica[1:] == replica[:-1], False)[left]
        pairs = left[has_right]
        joined = _pairs(numbers[:, pairs], numbers[:, pairs + 1])
        numbers, replica = numbers[:, left], replica[left]
        numbers[:, has_right] = joined


def _pairs(a: Int64s, b: Int64s) -> Int64s:
    """Each run of `a` joined with the one of `b` that follows it."""
    a_two, b_two = a[ENDS] > 1, b[ENDS] > 1
    tail, head = np.where(a_two, a[LAST], a[FIRST]), b[FIRST]
    same = tail[Fragment.BLOCK_ID] == head[Fragment.BLOCK_ID]
    whole = np.where(same, _continued(tail, head), tail)
    out = np.empty_like(a)
    out[ENDS] = np.where(same & ~a_two & ~b_two, 1, 2)
    out[FIRST] = np.where(a_two, a[FIRST], whole)
    out[LAST] = np.where(out[ENDS] > 1, np.where(b_two, b[LAST], np.where(same, whole, head)), 0)
    inner = _followed(a[INNER], _finished(whole, a_two & (~same | b_two)))
    inner = _followed(inner, _finished(head, ~same & b_two))
    out[INNER] = _followed(inner, b[INNER])
    return out


def _numbers_of(runs: pa.Table) -> Int64s:
    return np.array([_int64s(runs[name]) for name in NUMBERS], np.int64).reshape(len(NUMBERS), -1)


def _int64s(column: pa.ChunkedArray) -> Int64s:
    array: Int64s = column.to_numpy().astype(np.int64, copy=False)
    return array
