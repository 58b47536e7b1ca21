"""Rows folded to runs in one compiled pass that holds no GIL.

Importing this module compiles it (or loads it from numba's cache), so only spark.runs imports it, on first use.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

from typing import TYPE_CHECKING

import numpy as np
from numba.core import types

from merkle.kernels import ONES, crc32c_word, jit, swap
from protos.chunk_table import BLOCK_ROW, CONTAINER_ROW
from spark.runs import ENDS, FIRST, HALF, INNER, LAST, PRIME_1, PRIME_2, PRIME_3, SEED, Fragment, Inner

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spark.runs import Bools, Int64s

# Compiled code takes plain numbers for constants.
_ENDS, _FIRST, _LAST, _INNER = ENDS, FIRST.start, LAST.start, INNER.start
_BLOCK_ID, _LOW, _HIGH, _CHECKSUM, _CHUNKS, _DELETED_ROWS, _BYTES, _CORRUPT, _UNVERIFIABLE, _MIX = map(int, Fragment)
_IN_CHECKSUM, _IN_FINGERPRINT, _IN_BLOCKS, _IN_DELETED, _IN_CHUNKS, _IN_BYTES, _IN_CORRUPT, _IN_UNVERIFIABLE = map(
    int, Inner
)

_U64, _I64 = types.uint64, types.int64
_IN_WORDS = types.Array(types.int64, 1, "C", readonly=True)
_IN_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
_WORDS = types.Array(types.int64, 1, "C")
_FLAGS = types.Array(types.boolean, 1, "C")
_MATRIX = types.Array(types.int64, 2, "C")


@jit(_U64(_U64, _U64))
def _stirred(word: np.uint64, prime: np.uint64) -> np.uint64:
    word *= prime
    return word ^ (word >> HALF)


@jit(_U64(_I64, _I64, types.boolean, _I64))
def _block_mix(block_id: np.int64, checksum: np.int64, deleted: np.bool_, mix: np.int64) -> np.uint64:
    word = _stirred(np.uint64(block_id) ^ SEED, PRIME_2)
    word = _stirred(word + np.uint64(checksum), PRIME_3)
    word = _stirred(word ^ np.uint64(mix), PRIME_1)
    return _stirred(word + np.uint64(deleted), PRIME_2)


@jit(types.void(_IN_WORDS, _I64, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_FLAGS, _IN_FLAGS, _FLAGS, _MATRIX))
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
    """Fill `ordered` and `numbers` (zeros before, a row a run) as spark.runs.library_fold_stretches gives them.

    A column of a single entry stands for one in which all rows are alike. Asserts that the columns fit each other.
    """
    for size in (block_ids.size, offsets.size, lengths.size, checksums.size, matches.size, deleted.size):
        assert size in (1, rows)
    # All bits, or none where there is only one entry to look at.
    block_mask, offset_mask = -int(block_ids.size > 1), -int(offsets.size > 1)
    length_mask, checksum_mask = -int(lengths.size > 1), -int(checksums.size > 1)
    matches_mask, deleted_mask = -int(matches.size > 1), -int(deleted.size > 1)
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
                    word = _stirred(np.uint64(offset) ^ SEED, PRIME_1)
                    word = _stirred(word + np.uint64(length), PRIME_2)
                    word = _stirred(word ^ np.uint64(checksum), PRIME_3)
                    mix += _stirred(word + np.uint64(match), PRIME_1)
                    i += 1
                chunks = i - begin
                own = np.int64(crc ^ ONES)
            else:
                # A row that stands for a whole block or replica stands alone.
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
