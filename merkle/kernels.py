"""Compiled checksum kernels: whole chunks and whole trees in one call without the GIL.

Importing this module compiles everything, or loads it from numba's cache. Only
merkle.checksum therefore imports it, on first use. Where the CPU cannot run the
kernels, the import fails with an ImportError that gives the reason.

A CRC is computed by folding. Carry-less multiplication shifts the bytes so far past the
bytes to come, 128 to 512 bits at a time, in several independent accumulators. This
keeps up with memory, while the crc32 instruction is bound by its latency, and it works
for both polynomials. crcmod computes the byte tables and the folding keys, which are
one bit shifted by zero bytes. The last bytes of a window use the tables, or the crc32
instruction if the polynomial has one. In a tree each word depends on the one before, so
there the instruction alone is fastest.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import crcmod
import numpy as np
from numba import config
from numba.core import types

from merkle.intrinsics import (
    ARM,
    CPU,
    LANES,
    ONES,
    STRIDE_BYTES,
    U64,
    X86,
    crc32c_word,
    fold_lane,
    fold_strides,
    jit,
    leading_zeros,
    load8,
    load64,
    store64,
    swap,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


# numba adds its options to this module at import, where mypy cannot see them.
if config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("numba's compiler is switched off (NUMBA_DISABLE_JIT)")
if sys.byteorder != "little" or not (X86 or ARM):
    raise ImportError(f"no carry-less multiplication and crc32 instructions on this CPU ({CPU})")


_CRC32_POLYNOMIAL, _CRC32C_POLYNOMIAL = 0x1_04C1_1DB7, 0x1_1EDC_6F41

ABOUT_WINDOWS = f"numba, carry-less multiplication, {128 * LANES} bits"
ABOUT_BLOCKS = "numba, crc32 instruction"


@dataclass(frozen=True)
class _Polynomial:
    """The constants of one CRC: shift keys, and tables for eight bytes at once."""

    keys: "NDArray[np.uint64]"
    tables: "NDArray[np.uint32]"


def _polynomial(poly: int) -> _Polynomial:
    table = np.array(crcmod.Crc(poly, initCrc=0, xorOut=0xFFFF_FFFF).table, np.uint32)
    tables = [table]
    while len(tables) < 8:
        tables.append((tables[-1] >> np.uint32(8)) ^ table[tables[-1] & np.uint32(0xFF)])

    def power(bits: int) -> int:
        # x^bits modulo the polynomial, bit-reversed, so that 1 is the top bit; times x,
        # as the carry-less product requires.
        register = 0x8000_0000
        for _ in range(bits // 8):
            register = (register >> 8) ^ int(table[register & 0xFF])
        return register << 1

    distances = (8 * STRIDE_BYTES, 128 * LANES, 128)
    keys = [power(bits + half) for bits in distances for half in (32, -32)]
    return _Polynomial(np.array(keys, np.uint64), np.array(tables))


_CRC32 = _polynomial(_CRC32_POLYNOMIAL)
_CRC32C = _polynomial(_CRC32C_POLYNOMIAL)


def crc32_windows(view: memoryview, bytes_per_checksum: int) -> bytes:
    """The CRC32s of all windows, four big-endian bytes each, joined; `view` is not
    empty.
    """
    return _all_windows(view, bytes_per_checksum, _CRC32)


def crc32c_windows(view: memoryview, bytes_per_checksum: int) -> bytes:
    """The CRC32Cs of all windows, in the same form."""
    return _all_windows(view, bytes_per_checksum, _CRC32C)


def crc32c_ranges(view: memoryview, starts: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """The CRC32C of every `view[starts[i]:starts[i + 1]]`; asserts that `starts` is
    ascending and inside `view`.
    """
    out = np.empty(starts.size - 1, np.int64)
    _ranges(_read_only(view), starts, _CRC32C.keys, _CRC32C.tables, True, out)
    return out


def blocks(
    block_ids: "NDArray[np.int64]",
    chunk_starts: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
) -> "NDArray[np.int64]":
    """The checksum of every block from its ID and its chunks' checksums; asserts that
    the lengths of the arrays agree.
    """
    out = np.empty(block_ids.size, np.int64)
    _blocks(block_ids, chunk_starts, chunk_checksums, out)
    return out


def encode_blocks(
    block_ids: "NDArray[np.int64]",
    block_checksums: "NDArray[np.int64]",
    block_deleted: "NDArray[np.bool_]",
    chunk_starts: "NDArray[np.int64]",
    chunk_offsets: "NDArray[np.int64]",
    chunk_lengths: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
    chunk_matches: "NDArray[np.bool_]",
) -> bytes:
    """The `blockMerkleTree` fields of a tree as Ozone writes them; asserts that the
    lengths of the columns agree.
    """
    # Enough for every tag, bool, length and varint at its longest, and for the bytes
    # that `put` overwrites after them.
    out = np.empty(40 * (block_ids.size + chunk_offsets.size), np.uint8)
    length_bytes = _encode(
        np.ascontiguousarray(block_ids, np.int64),
        np.ascontiguousarray(block_checksums, np.int64),
        np.ascontiguousarray(block_deleted, np.bool_),
        np.ascontiguousarray(chunk_starts, np.int64),
        np.ascontiguousarray(chunk_offsets, np.int64),
        np.ascontiguousarray(chunk_lengths, np.int64),
        np.ascontiguousarray(chunk_checksums, np.int64),
        np.ascontiguousarray(chunk_matches, np.bool_),
        out,
    )
    return out[:length_bytes].tobytes()


def _all_windows(view: memoryview, bytes_per_checksum: int, polynomial: _Polynomial) -> bytes:
    out = np.empty(-(-view.nbytes // bytes_per_checksum), np.uint32)
    _windows(
        _read_only(view),
        np.uint64(bytes_per_checksum),
        polynomial.keys,
        polynomial.tables,
        polynomial is _CRC32C,
        out,
    )
    return out.tobytes()


def _read_only(view: memoryview) -> "NDArray[np.uint8]":
    """The bytes as the array type that the kernels are compiled for."""
    data = np.frombuffer(view, np.uint8)
    data.flags.writeable = False
    return data


_BYTE = np.uint64(0xFF)
_0, _1, _2, _4, _6, _7, _8, _9, _16, _32, _49, _64 = map(
    np.uint64, (0, 1, 2, 4, 6, 7, 8, 9, 16, 32, 49, 64)
)
# Masks for the lower bits of a word, of its halves and of its quarters.
_28_BITS, _14_BITS, _7_BITS = map(np.uint64, (0xFFF_FFFF, 0x3FFF_0000_3FFF, 0x7F_007F_007F_007F))
_7F, _80, _CONTINUATION_BITS = np.uint64(0x7F), np.uint64(0x80), np.uint64(0x8080_8080_8080_8080)
# Tags of a tree file: fields 1 to 4; fields 2 and 3 also as messages.
TAG_1, TAG_2, TAG_2_MESSAGE, TAG_3, TAG_3_MESSAGE, TAG_4 = map(
    np.uint64, (0x08, 0x10, 0x12, 0x18, 0x1A, 0x20)
)
_STRIDE = np.uint64(STRIDE_BYTES)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_KEYS, _WORDS = types.Array(U64, 1, "C"), types.Array(types.int64, 1, "C")
# Input arrays may be read-only memory of another library.
_IN_WORDS, _IN_FLAGS = (
    types.Array(types.int64, 1, "C", readonly=True),
    types.Array(types.boolean, 1, "C", readonly=True),
)
_TABLES = types.Array(types.uint32, 2, "C")
_OUT = types.Array(types.uint8, 1, "C")


@jit(U64(U64, U64, _TABLES, types.boolean))
def _word(
    register: np.uint64, word: np.uint64, tables: "NDArray[np.uint32]", by_instruction: bool
) -> np.uint64:
    """Add eight bytes to a register."""
    if by_instruction:
        return crc32c_word(register, word)
    x = register ^ word
    y = _0
    for i in range(8):
        y ^= np.uint64(tables[7 - i, x & _BYTE])
        x >>= _8
    return y


@jit(U64(U64, U64, _KEYS, _TABLES, types.boolean))
def _crc(
    address: np.uint64,
    length_bytes: np.uint64,
    keys: "NDArray[np.uint64]",
    tables: "NDArray[np.uint32]",
    by_instruction: bool,
) -> np.uint64:
    """The CRC of the bytes at an address."""
    register = ONES
    if length_bytes >= _16:
        if length_bytes >= _STRIDE:
            strides = length_bytes // _STRIDE
            low, high = fold_strides(
                address, strides, keys[0], keys[1], keys[2], keys[3], keys[4], keys[5]
            )
            address += strides * _STRIDE
            length_bytes -= strides * _STRIDE
        else:
            low, high = load64(address) ^ ONES, load64(address + _8)
            address += _16
            length_bytes -= _16
        while length_bytes >= _16:
            low, high = fold_lane(
                low, high, load64(address), load64(address + _8), keys[4], keys[5]
            )
            address += _16
            length_bytes -= _16
        register = _word(_word(_0, low, tables, by_instruction), high, tables, by_instruction)
    if length_bytes >= _8:
        register = _word(register, load64(address), tables, by_instruction)
        address += _8
        length_bytes -= _8
    while length_bytes > _0:
        register = np.uint64(tables[0, (register ^ load8(address)) & _BYTE]) ^ (register >> _8)
        address += _1
        length_bytes -= _1
    return register ^ ONES


@jit(types.void(_BYTES, U64, _KEYS, _TABLES, types.boolean, types.Array(types.uint32, 1, "C")))
def _windows(
    data: "NDArray[np.uint8]",
    window_bytes: np.uint64,
    keys: "NDArray[np.uint64]",
    tables: "NDArray[np.uint32]",
    by_instruction: bool,
    out: "NDArray[np.uint32]",
) -> None:
    address, length_bytes = np.uint64(data.ctypes.data), np.uint64(data.size)
    for i in range(out.size):
        here = min(window_bytes, length_bytes)
        # Swapped so that the bytes of `out` are big-endian.
        out[i] = np.uint32(swap(_crc(address, here, keys, tables, by_instruction)) >> _32)
        address += here
        length_bytes -= here


@jit(types.void(_BYTES, _IN_WORDS, _KEYS, _TABLES, types.boolean, _WORDS))
def _ranges(
    data: "NDArray[np.uint8]",
    starts: "NDArray[np.int64]",
    keys: "NDArray[np.uint64]",
    tables: "NDArray[np.uint32]",
    by_instruction: bool,
    out: "NDArray[np.int64]",
) -> None:
    address = np.uint64(data.ctypes.data)
    for i in range(out.size):
        assert 0 <= starts[i] <= starts[i + 1] <= data.size
        here = np.uint64(starts[i])
        out[i] = np.int64(
            _crc(address + here, np.uint64(starts[i + 1]) - here, keys, tables, by_instruction)
        )


@jit(types.void(_IN_WORDS, _IN_WORDS, _IN_WORDS, _WORDS))
def _blocks(
    block_ids: "NDArray[np.int64]",
    chunk_starts: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
    out: "NDArray[np.int64]",
) -> None:
    assert chunk_starts.size == out.size + 1
    for i in range(out.size):
        assert 0 <= chunk_starts[i] <= chunk_starts[i + 1] <= chunk_checksums.size
        register = crc32c_word(ONES, swap(np.uint64(block_ids[i])))
        for j in range(chunk_starts[i], chunk_starts[i + 1]):
            register = crc32c_word(register, swap(np.uint64(chunk_checksums[j])))
        out[i] = np.int64(register ^ ONES)


@jit(types.int64(types.int64))
def varint_bytes(value: int | np.int64) -> int:
    """The length of a varint in bytes: a seventh of its significant bits, rounded up,
    which is (9 * bits + 64) / 64 up to 64 bits.
    """
    bits = _64 - leading_zeros(np.uint64(value) | _1)
    return int((bits * _9 + _64) >> _6)


@jit(U64(U64, U64, types.int64))
def put(address: np.uint64, tag: np.uint64, value: int | np.int64) -> np.uint64:
    """Write a tag and a varint to an address and return the address after them. Up to
    seven bytes after them are overwritten too.
    """
    word = np.uint64(value)
    if word >> _49 == _0:
        # Seven bytes at most: spread the bits to groups of seven, set the continuation
        # bit of all bytes but the last, and store them at once.
        spread = word & _28_BITS | (word & ~_28_BITS) << _4
        spread = spread & _14_BITS | (spread & ~_14_BITS) << _2
        spread = spread & _7_BITS | (spread & ~_7_BITS) << _1
        size = np.uint64(varint_bytes(value))
        spread |= _CONTINUATION_BITS & ((_1 << (_8 * (size - _1))) - _1)
        store64(address, spread << _8 | tag)
        return address + size + _1
    store64(address, tag)
    address += _1
    while word > _7F:
        store64(address, word & _7F | _80)
        word >>= _7
        address += _1
    store64(address, word)
    return address + _1


@jit(U64(U64, U64, types.int64))
def put_byte(address: np.uint64, tag: np.uint64, value: int | np.int64) -> np.uint64:
    """Like `put`, for a value below 128."""
    store64(address, np.uint64(value) << _8 | tag)
    return address + _2


@jit(
    types.int64(
        _IN_WORDS, _IN_WORDS, _IN_FLAGS, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_WORDS, _IN_FLAGS, _OUT
    )
)
def _encode(
    block_ids: "NDArray[np.int64]",
    block_checksums: "NDArray[np.int64]",
    block_deleted: "NDArray[np.bool_]",
    chunk_starts: "NDArray[np.int64]",
    chunk_offsets: "NDArray[np.int64]",
    chunk_lengths: "NDArray[np.int64]",
    chunk_checksums: "NDArray[np.int64]",
    chunk_matches: "NDArray[np.bool_]",
    out: "NDArray[np.uint8]",
) -> int:
    """Write all blocks to `out` and return the number of bytes."""
    chunks = chunk_offsets.size
    assert block_ids.size == block_checksums.size == block_deleted.size == chunk_starts.size - 1
    assert chunks == chunk_lengths.size == chunk_checksums.size == chunk_matches.size
    sizes = np.empty(chunks, np.int64)
    start = np.uint64(out.ctypes.data)
    at = start
    for i in range(block_ids.size):
        first, last = chunk_starts[i], chunk_starts[i + 1]
        assert 0 <= first <= last <= chunks
        body = 4 + varint_bytes(block_ids[i]) + varint_bytes(block_checksums[i])
        for j in range(first, last):
            numbers = varint_bytes(chunk_offsets[j]) + varint_bytes(chunk_lengths[j])
            sizes[j] = 5 + numbers + varint_bytes(chunk_checksums[j])
            # At most 35 bytes, so the length takes one byte, as does the tag.
            body += 2 + sizes[j]
        at = put(at, TAG_2_MESSAGE, body)
        at = put(at, TAG_1, block_ids[i])
        at = put(at, TAG_2, block_checksums[i])
        for j in range(first, last):
            at = put_byte(at, TAG_3_MESSAGE, sizes[j])
            at = put(at, TAG_1, chunk_offsets[j])
            at = put(at, TAG_2, chunk_lengths[j])
            at = put(at, TAG_3, chunk_checksums[j])
            at = put_byte(at, TAG_4, int(chunk_matches[j]))
        at = put_byte(at, TAG_4, int(block_deleted[i]))
    return int(at - start)


def _self_test() -> None:
    """Compare the kernels with crcmod once: a compiler bug would report good data as
    corrupt.

    Raises:
        ImportError: a kernel disagrees.
    """
    data = bytes(range(256)) * 5
    for start, length_bytes in ((0, 1280), (3, 1000), (1, 27), (5, 9)):
        window = memoryview(data)[start : start + length_bytes]
        for poly, kernel in (
            (_CRC32_POLYNOMIAL, crc32_windows),
            (_CRC32C_POLYNOMIAL, crc32c_windows),
        ):
            expected = crcmod.Crc(poly, initCrc=0, xorOut=0xFFFF_FFFF).new(bytes(window)).digest()
            if kernel(window, length_bytes) != expected:
                raise ImportError("the compiled CRC kernels disagree with crcmod")
    word, starts = np.array([0x0102_0304_0506_0708]), np.array([0, 1])
    expected = crcmod.Crc(_CRC32C_POLYNOMIAL, initCrc=0, xorOut=0xFFFF_FFFF).new(
        word.astype(">i8").tobytes() * 2
    )
    if blocks(word, starts, word)[0] != expected.crcValue:
        raise ImportError("the compiled block kernel disagrees with crcmod")


_self_test()
