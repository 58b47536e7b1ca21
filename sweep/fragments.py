"""The fields of a run, and the arithmetic that joins runs: CRC32C as an affine map over
GF(2).

`Fragment` and `Inner` name the numbers of a run. The mixes make up its fingerprint; the
numpy fold and the compiled fold compute the same ones.

Let S append one zero byte to the 32-bit register, and let L8 be the register after the
eight bytes of a big-endian word, started from zero. Both are linear, and S is
invertible. A block of n chunks has the checksum

    S^8n (L8(id) ^ XOR over its chunks of G_r(c_r)) ^ A(n),   G_r = S^-8(r+1) L8,
    A(n): checksum of n + 1 zero words

where r is the rank of a chunk in its block. G_r does not depend on how many chunks
follow, so the XOR can be aggregated in any order. A map of k bytes is stored as k
tables of 256 entries; the image of a word is the XOR of one entry of each.
"""

from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from merkle.columns import fold_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

UInt32s: TypeAlias = "NDArray[np.uint32]"

# Reflected: the lowest bit of the register is the highest power.
_POLYNOMIAL = 0x82F6_3B78

_ONES = 0xFFFF_FFFF

_BITS = np.arange(32, dtype=np.uint32)


def image(tables: UInt32s, values: "NDArray[np.int64]") -> UInt32s:
    """The images of many words under a map with one table per byte; higher bytes are
    ignored.
    """
    words = values.view(np.uint64)
    out = np.zeros(len(words), np.uint32)
    for i, table in enumerate(tables):
        out ^= table[((words >> np.uint64(8 * i)) & np.uint64(0xFF)).astype(np.intp)]
    return out


def append_zero_words(
    checksums: "NDArray[np.int64]", counts: "NDArray[np.int64]"
) -> "NDArray[np.int64]":
    """S^8n of each 32-bit value with its own n: its contribution to a checksum when n
    more words follow.
    """
    assert not len(counts) or counts.min() >= 0
    out, left, power = checksums, counts, 0
    while left.any():
        odd = np.flatnonzero(left & 1)
        if len(odd):
            out = out.copy()
            out[odd] = image(_doubled_step(power), out[odd])
        left, power = left >> 1, power + 1
    return out


@cache
def rank_tables(ranks: int) -> UInt32s:
    """G_r for r below `ranks`, for 32-bit checksums; shape (ranks, 4, 256)."""
    columns, back = _WORD[:32], _inverse(_STEP)
    out = np.empty((ranks, 4, 256), np.uint32)
    for rank in range(ranks):
        columns = _apply(back, columns)
        out[rank] = _tables(columns)
    return out


@cache
def end_tables(chunks: int) -> tuple[UInt32s, UInt32s]:
    """S^8n, shape (chunks + 1, 4, 256), and A(n), shape (chunks + 1), for n from 0 to
    `chunks`.
    """
    columns, register = np.uint32(1) << _BITS, _apply(_STEP, np.array([_ONES], np.uint32))
    steps, constants = np.empty((chunks + 1, 4, 256), np.uint32), np.empty(chunks + 1, np.uint32)
    for count in range(chunks + 1):
        steps[count], constants[count] = _tables(columns), register[0] ^ np.uint32(_ONES)
        columns, register = _apply(_STEP, columns), _apply(_STEP, register)
    return steps, constants


@cache
def word_tables() -> UInt32s:
    """L8 of any int64, for block IDs and block checksums; shape (8, 256)."""
    return _tables(_WORD)


@cache
def step_tables() -> UInt32s:
    """S^8, which appends one zero word; shape (4, 256)."""
    return _tables(_STEP)


@cache
def _doubled_step(power: int) -> UInt32s:
    """S^(8 * 2^power)."""
    columns = _STEP
    for _ in range(power):
        columns = _apply(columns, columns)
    return _tables(columns)


def _register(data: bytes) -> int:
    """The register after these bytes, starting from zero."""
    register = 0
    for byte in data:
        register = _zero_byte(register ^ byte)
    return register


def _zero_byte(register: int) -> int:
    """S of one register."""
    for _ in range(8):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
    return register


def _apply(columns: UInt32s, values: UInt32s) -> UInt32s:
    """The images of values under the map whose column i is the image of bit i. If
    `values` are the columns of a map, the result is the composition.
    """
    bits = (values[:, None] >> _BITS) & np.uint32(1)
    images: UInt32s = np.bitwise_xor.reduce(bits * columns, axis=1)
    return images


def _inverse(columns: UInt32s) -> UInt32s:
    """The columns of the inverse map, by elimination over pairs of image and
    preimage.
    """
    pairs = [(int(image), 1 << bit) for bit, image in enumerate(columns)]
    for bit in range(32):
        at = next(i for i in range(bit, 32) if pairs[i][0] >> bit & 1)
        pairs[bit], pairs[at] = pairs[at], pairs[bit]
        pivot = pairs[bit]
        pairs = [
            (a ^ pivot[0], b ^ pivot[1]) if i != bit and a >> bit & 1 else (a, b)
            for i, (a, b) in enumerate(pairs)
        ]
    return np.array([before for _, before in pairs], np.uint32)


def _tables(columns: UInt32s) -> UInt32s:
    out = np.zeros((len(columns) // 8, 256), np.uint32)
    for i, column in enumerate(columns):
        table, bit = out[i // 8], 1 << i % 8
        table[bit : 2 * bit] = table[:bit] ^ column
    return out


# L8 and S^8; column i is the image of bit i.
_WORD = np.array([_register((1 << bit).to_bytes(8, "big")) for bit in range(64)], np.uint32)

_BYTE = np.array([_zero_byte(1 << bit) for bit in range(32)], np.uint32)

_STEP = _apply(
    _apply(_apply(_BYTE, _BYTE), _apply(_BYTE, _BYTE)),
    _apply(_apply(_BYTE, _BYTE), _apply(_BYTE, _BYTE)),
)

Int64s: TypeAlias = "NDArray[np.int64]"

Bools: TypeAlias = "NDArray[np.bool_]"


class Fragment(IntEnum):
    """Numbers of one block's rows in one run."""

    BLOCK_ID = 0
    # Least and greatest chunk offset; BLOCK_ROW if the block has no chunks.
    LOW = 1
    HIGH = 2
    CHECKSUM = 3
    # The remaining fields are sums.
    CHUNKS = 4
    DELETED_ROWS = 5
    BYTES = 6
    CORRUPT = 7
    UNVERIFIABLE = 8
    MIX = 9


class Inner(IntEnum):
    """Numbers of the complete blocks between the first and the last of a run."""

    CHECKSUM = 0
    # XOR of the blocks' mixes.
    FINGERPRINT = 1
    # The remaining fields are sums.
    BLOCKS = 2
    DELETED_BLOCKS = 3
    CHUNKS = 4
    BYTES = 5
    CORRUPT = 6
    UNVERIFIABLE = 7


# The layout of a run's numbers: the count of fragments, the first fragment, the last
# fragment, and the blocks between them. The count is 0 for a replica without blocks and
# 1 if the first fragment is the only one.
ENDS = 0

FIRST = slice(1, 1 + len(Fragment))

LAST = slice(FIRST.stop, FIRST.stop + len(Fragment))

INNER = slice(LAST.stop, LAST.stop + len(Inner))

NUMBERS = (
    "ends",
    *(f"first_{field.name.lower()}" for field in Fragment),
    *(f"last_{field.name.lower()}" for field in Fragment),
    *(f"inner_{field.name.lower()}" for field in Inner),
)

# Odd, so that multiplication modulo 2^64 is a bijection.
PRIME_1, PRIME_2, PRIME_3 = (
    np.uint64(odd) for odd in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
)

SEED = np.uint64(0xD6E8_FEB8_6659_FD93)

HALF = np.uint64(32)


def chunk_mixes(offsets: Int64s, lengths: Int64s, checksums: Int64s, matches: Bools) -> Int64s:
    """A 64-bit mix of each chunk. Chunks that differ in a single field have different
    mixes; the sum over a block identifies its chunks.
    """
    words = _mix(offsets.view(np.uint64) ^ SEED, PRIME_1)
    words = _mix(words + lengths.view(np.uint64), PRIME_2)
    words = _mix(words ^ checksums.view(np.uint64), PRIME_3)
    return _mix(words + matches.astype(np.uint64), PRIME_1).view(np.int64)


def _block_mixes(block_ids: Int64s, checksums: Int64s, deleted: Bools, mixes: Int64s) -> Int64s:
    """A 64-bit mix of each block, from the sum of its chunks' mixes (`mixes`). The XOR
    over all blocks is the replica's fingerprint.
    """
    words = _mix(block_ids.view(np.uint64) ^ SEED, PRIME_2)
    words = _mix(words + checksums.view(np.uint64), PRIME_3)
    words = _mix(words ^ mixes.view(np.uint64), PRIME_1)
    return _mix(words + deleted.astype(np.uint64), PRIME_2).view(np.int64)


def _mix(words: "NDArray[np.uint64]", prime: np.uint64) -> "NDArray[np.uint64]":
    words = words * prime
    return words ^ (words >> HALF)


def join_consecutive(numbers: Int64s, replica: Int64s) -> Int64s:
    """Join consecutive runs to one run per replica."""
    while True:
        starts = np.flatnonzero(np.append(True, replica[1:] != replica[:-1]))
        if len(starts) == len(replica):
            return numbers
        # Join neighbours: each round halves the number of runs of a replica.
        place = np.arange(len(replica)) - np.repeat(
            starts, np.diff(np.append(starts, len(replica)))
        )
        left = np.flatnonzero(place % 2 == 0)
        has_right = np.append(replica[1:] == replica[:-1], False)[left]
        pairs = left[has_right]
        joined = _join_pairs(numbers[:, pairs], numbers[:, pairs + 1])
        numbers, replica = numbers[:, left], replica[left]
        numbers[:, has_right] = joined


def _join_pairs(a: Int64s, b: Int64s) -> Int64s:
    """Join each run of `a` with the run of `b` that follows it."""
    a_two, b_two = a[ENDS] > 1, b[ENDS] > 1
    tail, head = np.where(a_two, a[LAST], a[FIRST]), b[FIRST]
    same = tail[Fragment.BLOCK_ID] == head[Fragment.BLOCK_ID]
    whole = np.where(same, _join_fragments(tail, head), tail)
    out = np.empty_like(a)
    out[ENDS] = np.where(same & ~a_two & ~b_two, 1, 2)
    out[FIRST] = np.where(a_two, a[FIRST], whole)
    out[LAST] = np.where(out[ENDS] > 1, np.where(b_two, b[LAST], np.where(same, whole, head)), 0)
    inner = join_inner(a[INNER], complete_blocks(whole, a_two & (~same | b_two)))
    inner = join_inner(inner, complete_blocks(head, ~same & b_two))
    out[INNER] = join_inner(inner, b[INNER])
    return out


def complete_blocks(fragments: Int64s, known: Bools) -> Int64s:
    """The Inner numbers of fragments that are complete blocks; zeros where not
    `known`.
    """
    deleted = fragments[Fragment.DELETED_ROWS] > 0
    live = np.where(deleted, 0, fragments)
    checksums = fragments[Fragment.CHECKSUM]
    out = np.empty((len(Inner), fragments.shape[1]), np.int64)
    out[Inner.CHECKSUM] = _word_checksums(checksums)
    out[Inner.FINGERPRINT] = _block_mixes(
        fragments[Fragment.BLOCK_ID], checksums, deleted, live[Fragment.MIX]
    )
    out[Inner.BLOCKS] = 1
    out[Inner.DELETED_BLOCKS] = deleted
    out[Inner.CHUNKS] = live[Fragment.CHUNKS]
    out[Inner.BYTES] = live[Fragment.BYTES]
    out[Inner.CORRUPT] = live[Fragment.CORRUPT]
    out[Inner.UNVERIFIABLE] = live[Fragment.UNVERIFIABLE]
    return np.where(known, out, 0)


def join_inner(left: Int64s, right: Int64s) -> Int64s:
    """The Inner numbers of the blocks on the left followed by those on the right."""
    out = left + right
    moved = append_zero_words(left[Inner.CHECKSUM], right[Inner.BLOCKS])
    out[Inner.CHECKSUM] = moved ^ right[Inner.CHECKSUM]
    out[Inner.FINGERPRINT] = left[Inner.FINGERPRINT] ^ right[Inner.FINGERPRINT]
    return out


def _join_fragments(left: Int64s, right: Int64s) -> Int64s:
    """Join two consecutive fragments of one block."""
    out = left + right
    out[Fragment.BLOCK_ID] = left[Fragment.BLOCK_ID]
    out[Fragment.LOW], out[Fragment.HIGH] = left[Fragment.LOW], right[Fragment.HIGH]
    # Both checksums begin with the block ID; remove the second one.
    without_id = left[Fragment.CHECKSUM] ^ _word_checksums(left[Fragment.BLOCK_ID])
    out[Fragment.CHECKSUM] = (
        append_zero_words(without_id, right[Fragment.CHUNKS]) ^ right[Fragment.CHECKSUM]
    )
    return out


def _word_checksums(words: Int64s) -> Int64s:
    """The CRC32C of each word alone."""
    return fold_blocks(words, np.zeros(len(words) + 1, np.int64), np.empty(0, np.int64))
