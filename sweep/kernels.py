"""Compiled kernels that fold rows to runs and encode trees, without holding the GIL.

Importing this module compiles it or loads it from numba's cache. So it is imported only
on first use.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

from typing import TYPE_CHECKING

import numpy as np
from numba.core import types

from chunktable.page_kernels import BAD, RAW, SEGMENTS, fill, fill_flags
from chunktable.schema import BLOCK_ROW, CONTAINER_ROW
from merkle.intrinsics import ONES, crc32c_word, jit, store64, swap
from merkle.kernels import (
    TAG_1,
    TAG_2,
    TAG_2_MESSAGE,
    TAG_3,
    TAG_3_MESSAGE,
    TAG_4,
    put,
    put_byte,
    varint_bytes,
)
from sweep.fragments import (
    ENDS,
    FIRST,
    HALF,
    INNER,
    LAST,
    PRIME_1,
    PRIME_2,
    PRIME_3,
    SEED,
    Fragment,
    Inner,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sweep.fragments import Bools, Int64s

# Compiled code needs plain integers as constants.
_ENDS, _FIRST, _LAST, _INNER = ENDS, FIRST.start, LAST.start, INNER.start
_BLOCK_ID, _LOW, _HIGH, _CHECKSUM, _CHUNKS, _DELETED_ROWS, _BYTES, _CORRUPT, _UNVERIFIABLE, _MIX = (
    map(int, Fragment)
)
(
    _IN_CHECKSUM,
    _IN_FINGERPRINT,
    _IN_BLOCKS,
    _IN_DELETED,
    _IN_CHUNKS,
    _IN_BYTES,
    _IN_CORRUPT,
    _IN_UNVERIFIABLE,
) = map(int, Inner)

# The most bytes that a row adds to an encoded tree: the only row of its block, with
# tags, flags, lengths and all five numbers at their longest. A tree's own fields need
# less.
TREE_ROW_BYTES = 72
# Encoded chunk headers that are cached, by index in the block: the number of chunks in
# a full block with Ozone's defaults.
_KEPT = 64

_U64, _I64 = types.uint64, types.int64
_IN_WORDS = types.Array(types.int64, 1, "C", readonly=True)
_IN_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
_WORDS = types.Array(types.int64, 1, "C")
_FLAGS = types.Array(types.boolean, 1, "C")
_MATRIX = types.Array(types.int64, 2, "C")
_OUT = types.Array(types.uint8, 1, "C")
# The columns of rows: block ID, offset, length, checksum, match, deletion.
_COLUMNS = 6
# Rows that are decoded at a time: few enough to stay in the cache of a core.
_TILE_ROWS = 1 << 13


@jit(_U64(_U64, _U64))
def _mix_word(word: np.uint64, prime: np.uint64) -> np.uint64:
    word *= prime
    return word ^ (word >> HALF)


@jit(_U64(_I64, _I64, types.boolean, _I64))
def _block_mix(
    block_id: np.int64, checksum: np.int64, deleted: np.bool_, mix: np.int64
) -> np.uint64:
    word = _mix_word(np.uint64(block_id) ^ SEED, PRIME_2)
    word = _mix_word(word + np.uint64(checksum), PRIME_3)
    word = _mix_word(word ^ np.uint64(mix), PRIME_1)
    return _mix_word(word + np.uint64(deleted), PRIME_2)


@jit(
    types.UniTuple(_I64, 6)(_I64, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_FLAGS, _IN_FLAGS)
)
def _masks(
    rows: int,
    block_ids: "Int64s",
    offsets: "Int64s",
    lengths: "Int64s",
    checksums: "Int64s",
    matches: "Bools",
    deleted: "Bools",
) -> tuple[int, int, int, int, int, int]:
    """The mask for an index into each column: all bits, or 0 if the column has a single
    entry. Asserts that every column has one entry, or one per row.
    """
    for size in (
        block_ids.size,
        offsets.size,
        lengths.size,
        checksums.size,
        matches.size,
        deleted.size,
    ):
        assert size in (1, rows)
    return (
        -int(block_ids.size > 1),
        -int(offsets.size > 1),
        -int(lengths.size > 1),
        -int(checksums.size > 1),
        -int(matches.size > 1),
        -int(deleted.size > 1),
    )


@jit(
    types.void(
        _IN_WORDS,
        _I64,
        _IN_WORDS,
        _IN_WORDS,
        _IN_WORDS,
        _IN_WORDS,
        _IN_FLAGS,
        _IN_FLAGS,
        _FLAGS,
        _MATRIX,
    )
)
def fold_stretches(
    starts: "Int64s",
    rows: int,
    block_ids: "Int64s",
    offsets: "Int64s",
    lengths: "Int64s",
    checksums: "Int64s",
    matches: "Bools",
    deleted: "Bools",
    ordered: "Bools",
    numbers: "NDArray[np.int64]",
) -> None:
    """Fill `ordered` and `numbers` with the results of
    sweep.runs.library_fold_stretches. `numbers` has one row per run and must be zero.

    A column with a single entry is constant. Asserts that the columns' sizes agree.
    """
    block_mask, offset_mask, length_mask, checksum_mask, matches_mask, deleted_mask = _masks(
        rows, block_ids, offsets, lengths, checksums, matches, deleted
    )
    assert starts.size == ordered.size == numbers.shape[0]
    for run in range(starts.size):
        i = starts[run]
        end = starts[run + 1] if run + 1 < starts.size else rows
        assert 0 <= i < end <= rows
        out = numbers[run]
        ends = 0
        in_order = True
        register = ONES
        fingerprint = np.uint64(0)
        first = i
        before = np.int64(0)
        while i < end:
            block_id = block_ids[i & block_mask]
            in_order &= i == first or before < block_id
            before = block_id
            low = offsets[i & offset_mask]
            high = low
            begin = i
            gone = np.int64(0)
            total_bytes = np.int64(0)
            corrupt = np.int64(0)
            unverifiable = np.int64(0)
            mix = np.uint64(0)
            crc = crc32c_word(ONES, swap(np.uint64(block_id)))
            if low >= 0:
                high = np.int64(-1)
                while i < end and block_ids[i & block_mask] == block_id:
                    offset = offsets[i & offset_mask]
                    length = lengths[i & length_mask]
                    checksum = checksums[i & checksum_mask]
                    match = matches[i & matches_mask]
                    in_order &= offset > high
                    high = offset
                    crc = crc32c_word(crc, swap(np.uint64(checksum)))
                    gone += deleted[i & deleted_mask]
                    total_bytes += length
                    corrupt += not match
                    unverifiable += match & (checksum == 0)
                    word = _mix_word(np.uint64(offset) ^ SEED, PRIME_1)
                    word = _mix_word(word + np.uint64(length), PRIME_2)
                    word = _mix_word(word ^ np.uint64(checksum), PRIME_3)
                    mix += _mix_word(word + np.uint64(match), PRIME_1)
                    i += 1
                chunks = i - begin
                own = np.int64(crc ^ ONES)
            else:
                # The row of a block without chunks, or of a replica without blocks.
                chunks = 0
                gone += deleted[i & deleted_mask]
                unverifiable = np.int64(1)
                own = checksums[i & checksum_mask] if gone else np.int64(crc ^ ONES)
                i += 1
                if low == CONTAINER_ROW:
                    in_order &= i - first == 1 and i == end
                    break
                in_order &= low == BLOCK_ROW
                in_order &= i == end or block_ids[i & block_mask] != block_id
            if begin > first and i < end:
                register = crc32c_word(register, swap(np.uint64(own)))
                out[_INNER + _IN_BLOCKS] += 1
                if gone:
                    out[_INNER + _IN_DELETED] += 1
                    mix = np.uint64(0)
                else:
                    out[_INNER + _IN_CHUNKS] += chunks
                    out[_INNER + _IN_BYTES] += total_bytes
                    out[_INNER + _IN_CORRUPT] += corrupt
                    out[_INNER + _IN_UNVERIFIABLE] += unverifiable
                fingerprint ^= _block_mix(block_id, own, gone > 0, np.int64(mix))
                continue
            at = _FIRST if begin == first else _LAST
            ends += 1
            out[at + _BLOCK_ID] = block_id
            out[at + _LOW] = low
            out[at + _HIGH] = high
            out[at + _CHECKSUM] = own
            out[at + _CHUNKS] = chunks
            out[at + _DELETED_ROWS] = gone
            out[at + _BYTES] = total_bytes
            out[at + _CORRUPT] = corrupt
            out[at + _UNVERIFIABLE] = unverifiable
            out[at + _MIX] = np.int64(mix)
        out[_ENDS] = ends
        out[_INNER + _IN_CHECKSUM] = np.int64(register ^ ONES)
        out[_INNER + _IN_FINGERPRINT] = np.int64(fingerprint)
        ordered[run] = in_order


@jit(types.void(_MATRIX, _MATRIX))
def settle_runs(numbers: "NDArray[np.int64]", out: "NDArray[np.int64]") -> None:
    """Fill `out` with the results of sweep.runs.library_settle_numbers. `numbers` has
    one row per run, which is ordered.
    """
    assert out.shape[1] == numbers.shape[0]
    for run in range(numbers.shape[0]):
        held = numbers[run]
        checksum, fingerprint = np.uint64(0), np.uint64(held[_INNER + _IN_FINGERPRINT])
        blocks, gone = held[_INNER + _IN_BLOCKS], held[_INNER + _IN_DELETED]
        chunks, total_bytes = held[_INNER + _IN_CHUNKS], held[_INNER + _IN_BYTES]
        corrupt, unverifiable = held[_INNER + _IN_CORRUPT], held[_INNER + _IN_UNVERIFIABLE]
        for end in range(min(held[_ENDS], 2)):
            at = _LAST if end else _FIRST
            own, deleted = held[at + _CHECKSUM], held[at + _DELETED_ROWS] > 0
            # The checksums of the blocks before, with one more word behind them.
            checksum = crc32c_word(checksum, np.uint64(0))
            checksum ^= crc32c_word(ONES, swap(np.uint64(own))) ^ ONES
            mix = np.int64(0)
            blocks += 1
            if deleted:
                gone += 1
            else:
                mix = held[at + _MIX]
                chunks += held[at + _CHUNKS]
                total_bytes += held[at + _BYTES]
                corrupt += held[at + _CORRUPT]
                unverifiable += held[at + _UNVERIFIABLE]
            fingerprint ^= _block_mix(held[at + _BLOCK_ID], own, deleted, mix)
            if end == 0:
                for _ in range(held[_INNER + _IN_BLOCKS]):
                    checksum = crc32c_word(checksum, np.uint64(0))
                checksum ^= np.uint64(held[_INNER + _IN_CHECKSUM])
        out[_IN_CHECKSUM, run] = np.int64(checksum)
        out[_IN_FINGERPRINT, run] = np.int64(fingerprint)
        out[_IN_BLOCKS, run] = blocks
        out[_IN_DELETED, run] = gone
        out[_IN_CHUNKS, run] = chunks
        out[_IN_BYTES, run] = total_bytes
        out[_IN_CORRUPT, run] = corrupt
        out[_IN_UNVERIFIABLE, run] = unverifiable


@jit(
    types.boolean(
        _IN_WORDS,
        _I64,
        types.UniTuple(RAW, _COLUMNS),
        types.UniTuple(SEGMENTS, _COLUMNS),
        types.UniTuple(_IN_WORDS, _COLUMNS),
        types.UniTuple(_I64, _COLUMNS),
        _FLAGS,
        _MATRIX,
    )
)
def fold_encoded(
    starts: "Int64s",
    rows: int,
    raws: "tuple[NDArray[np.uint8], ...]",
    segments: "tuple[Int64s, ...]",
    values: "tuple[Int64s, ...]",
    sizes: tuple[int, ...],
    ordered: "Bools",
    numbers: "NDArray[np.int64]",
) -> bool:
    """Like `fold_stretches`, of columns as in chunktable.pages.EncodedColumn, which are
    decoded some runs at a time. Returns False if a page has an index that its
    dictionary has not.
    """
    runs = starts.size
    longest = 0
    for run in range(runs):
        end = starts[run + 1] if run + 1 < runs else rows
        longest = max(longest, end - starts[run])
    block_ids, offsets, lengths, checksums, matches, deleted = (
        np.empty(_TILE_ROWS + longest, np.int64),
        np.empty(_TILE_ROWS + longest, np.int64),
        np.empty(_TILE_ROWS + longest, np.int64),
        np.empty(_TILE_ROWS + longest, np.int64),
        np.empty(_TILE_ROWS + longest, np.bool_),
        np.empty(_TILE_ROWS + longest, np.bool_),
    )
    in_tile = np.empty(_TILE_ROWS + 1, np.int64)
    at_0 = at_1 = at_2 = at_3 = at_4 = at_5 = 0
    run = 0
    while run < runs:
        begin = starts[run]
        last = run
        while last < runs and starts[last] < begin + _TILE_ROWS:
            in_tile[last - run] = starts[last] - begin
            last += 1
        end = starts[last] if last < runs else rows
        count = end - begin
        at_0 = fill(raws[0], segments[0], values[0], sizes[0], at_0, begin, end, block_ids)
        at_1 = fill(raws[1], segments[1], values[1], sizes[1], at_1, begin, end, offsets)
        at_2 = fill(raws[2], segments[2], values[2], sizes[2], at_2, begin, end, lengths)
        at_3 = fill(raws[3], segments[3], values[3], sizes[3], at_3, begin, end, checksums)
        at_4 = fill_flags(raws[4], segments[4], values[4], at_4, begin, end, matches)
        at_5 = fill_flags(raws[5], segments[5], values[5], at_5, begin, end, deleted)
        if min(at_0, at_1, at_2, at_3) == BAD:
            return False
        fold_stretches(
            in_tile[: last - run],
            count,
            block_ids[:count],
            offsets[:count],
            lengths[:count],
            checksums[:count],
            matches[:count],
            deleted[:count],
            ordered[run:last],
            numbers[run:last],
        )
        run = last
    return True


@jit(
    types.void(
        _IN_WORDS,
        _IN_WORDS,
        _IN_WORDS,
        _I64,
        _IN_WORDS,
        _IN_WORDS,
        _IN_WORDS,
        _IN_WORDS,
        _IN_FLAGS,
        _IN_FLAGS,
        _WORDS,
        _WORDS,
        _OUT,
    )
)
def encode_trees(
    starts: "Int64s",
    ends: "Int64s",
    container_ids: "Int64s",
    rows: int,
    block_ids: "Int64s",
    offsets: "Int64s",
    lengths: "Int64s",
    checksums: "Int64s",
    matches: "Bools",
    deleted: "Bools",
    roots: "Int64s",
    bounds: "Int64s",
    out: "NDArray[np.uint8]",
) -> None:
    """Encode the trees of replicas, one after the other, into `out`. The rows
    `starts[i]:ends[i]` of replica i are complete and in order.

    Fills `roots` and `bounds`; tree i is `out[bounds[i]:bounds[i + 1]]`. `out` needs
    TREE_ROW_BYTES for each row and each replica. A column with a single entry is
    constant. Asserts that the columns' sizes agree.
    """
    block_mask, offset_mask, length_mask, checksum_mask, matches_mask, deleted_mask = _masks(
        rows, block_ids, offsets, lengths, checksums, matches, deleted
    )
    assert starts.size == ends.size == container_ids.size == roots.size == bounds.size - 1
    largest = 0
    total_rows = 0
    for replica in range(starts.size):
        assert 0 <= starts[replica] < ends[replica] <= rows
        largest = max(largest, ends[replica] - starts[replica])
        total_rows += ends[replica] - starts[replica]
    assert TREE_ROW_BYTES * (total_rows + starts.size) <= out.size
    # For each block: the end of its rows, its checksum, its encoded bytes, and whether
    # it is a tombstone.
    stops, own = np.empty(largest, np.int64), np.empty(largest, np.int64)
    bodies, gone = np.empty(largest, np.int64), np.empty(largest, np.bool_)
    # A chunk mostly has the offset and length of the chunk with the same index in the
    # block before, so their encoding is cached: at most 22 bytes, with room for whole
    # words.
    kept_offsets, kept_lengths = np.full(_KEPT, -1, np.int64), np.full(_KEPT, -1, np.int64)
    kept_bytes, kept = np.empty(_KEPT, np.int64), np.empty((_KEPT, 4), np.uint64)
    first_kept = np.uint64(kept.ctypes.data)
    begin = np.uint64(out.ctypes.data)
    at = begin
    for replica in range(starts.size):
        bounds[replica] = np.int64(at - begin)
        i, end = starts[replica], ends[replica]
        blocks = 0
        total = 0
        register = ONES
        while i < end:
            low = offsets[i & offset_mask]
            if low == CONTAINER_ROW:
                break
            block_id = block_ids[i & block_mask]
            is_gone = False
            body = 0
            crc = crc32c_word(ONES, swap(np.uint64(block_id)))
            if low >= 0:
                while i < end and block_ids[i & block_mask] == block_id:
                    offset, length = offsets[i & offset_mask], lengths[i & length_mask]
                    checksum = checksums[i & checksum_mask]
                    crc = crc32c_word(crc, swap(np.uint64(checksum)))
                    is_gone |= deleted[i & deleted_mask]
                    body += 7 + varint_bytes(offset) + varint_bytes(length) + varint_bytes(checksum)
                    i += 1
                sum_ = np.int64(crc ^ ONES)
            else:
                is_gone = deleted[i & deleted_mask]
                sum_ = checksums[i & checksum_mask] if is_gone else np.int64(crc ^ ONES)
                i += 1
            if is_gone:
                body = 0
            body += 4 + varint_bytes(block_id) + varint_bytes(sum_)
            total += 1 + varint_bytes(body) + body
            register = crc32c_word(register, swap(np.uint64(sum_)))
            stops[blocks], own[blocks], bodies[blocks], gone[blocks] = i, sum_, body, is_gone
            blocks += 1
        root = np.int64(register ^ ONES)
        roots[replica] = root
        at = put(at, TAG_1, container_ids[replica])
        at = put(at, TAG_2_MESSAGE, 1 + varint_bytes(root) + total)
        at = put(at, TAG_1, root)
        i = starts[replica]
        for block in range(blocks):
            at = put(at, TAG_2_MESSAGE, bodies[block])
            at = put(at, TAG_1, block_ids[i & block_mask])
            at = put(at, TAG_2, own[block])
            if offsets[i & offset_mask] >= 0 and not gone[block]:
                for row in range(i, stops[block]):
                    offset, length = offsets[row & offset_mask], lengths[row & length_mask]
                    checksum = checksums[row & checksum_mask]
                    place = row - i & _KEPT - 1
                    if offset != kept_offsets[place] or length != kept_lengths[place]:
                        written = first_kept + np.uint64(32 * place)
                        written_end = put(put(written, TAG_1, offset), TAG_2, length)
                        kept_offsets[place], kept_lengths[place] = offset, length
                        kept_bytes[place] = np.int64(written_end - written)
                    numbers = kept_bytes[place]
                    # At most 35 bytes, so its length takes one byte.
                    at = put_byte(at, TAG_3_MESSAGE, numbers + 3 + varint_bytes(checksum))
                    for word in range(3):
                        store64(at + np.uint64(8 * word), kept[place, word])
                    at += np.uint64(numbers)
                    at = put(at, TAG_3, checksum)
                    at = put_byte(at, TAG_4, int(matches[row & matches_mask]))
            at = put_byte(at, TAG_4, int(gone[block]))
            i = stops[block]
    bounds[starts.size] = np.int64(at - begin)
