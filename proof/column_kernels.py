"""Compiled kernels over columns (`proof.columns`): parts of bytes put together, and
checksums of rows, without the GIL.

Importing this module compiles it or loads it from numba's cache.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

import sys
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np
from numba.core import types

from merkle.intrinsics import U64, copy_bytes, jit, load8, load64, swap

if TYPE_CHECKING:
    from numpy.typing import NDArray

if sys.byteorder != "little":
    raise ImportError("the kernels read words as this machine does not store them")

_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_PLACES = types.Array(types.int64, 1, "C", readonly=True)
_OUT_BYTES = types.Array(types.uint8, 1, "C")
_OUT_PLACES = types.Array(types.int64, 1, "C")
_WORDS = types.Array(types.uint64, 1, "C")
# Tables of a word: a byte by how many bytes follow it.
_TABLE_BYTES = 8
_BYTE, _8, _0 = np.uint64(255), np.uint64(8), np.uint64(0)
# A CRC-32's register before the first byte; the same bits are inverted at its end.
CRC_ONES = np.uint64(0xFFFF_FFFF)


def _tables() -> "NDArray[np.uint64]":
    """What a byte adds to a CRC-32, and what it adds once more bytes have followed
    (slicing by eight: Kounavis and Berry, 2005).
    """
    # zlib inverts what goes in and comes out: zeros alone are taken off.
    zero = crc32(b"\0")
    tables = [[crc32(bytes([n])) ^ zero for n in range(256)]]
    for _ in range(_TABLE_BYTES - 1):
        tables.append([one >> 8 ^ tables[0][one & 255] for one in tables[-1]])
    return np.array(tables, np.uint64).reshape(-1)


_TABLES = _tables()


@jit(types.Tuple((_OUT_BYTES, _OUT_PLACES))(_BYTES, _PLACES, _PLACES))
def gather(
    data: "NDArray[np.uint8]", starts: "NDArray[np.int64]", lengths: "NDArray[np.int64]"
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]"]:
    """The parts of `data` that begin at `starts`, joined, and where each ends.

    Raises:
        IndexError: a part is not inside.
    """
    ends, used = np.empty(len(starts), np.int64), 0
    for n in range(len(starts)):
        start, length = starts[n], lengths[n]
        if start < 0 or length < 0 or start + length > len(data):
            raise IndexError("a part is not inside its column")
        used += length
        ends[n] = used
    found = np.empty(used, np.uint8)
    source, to = U64(data.ctypes.data), U64(found.ctypes.data)
    for n in range(len(starts)):
        copy_bytes(to + U64(ends[n] - lengths[n]), source + U64(starts[n]), U64(lengths[n]))
    return found, ends


@jit(U64(U64, types.int64))
def _word(address: np.uint64, length: int) -> np.uint64:
    """The first eight of so many bytes, zeros after them, as a number."""
    if length >= _TABLE_BYTES:
        return swap(load64(address))
    word = U64(0)
    for n in range(length):
        word |= load8(address + U64(n)) << U64(56 - 8 * n)
    return word


@jit(_WORDS(_BYTES, _PLACES))
def first_words(data: "NDArray[np.uint8]", ends: "NDArray[np.int64]") -> "NDArray[np.uint64]":
    """Of each text the first eight bytes that are not the same in all, as numbers of
    the same order.
    """
    words, skipped, is_same = np.zeros(len(ends), np.uint64), 0, True
    while is_same and len(ends):
        start = 0
        for n in range(len(ends)):
            length = ends[n] - start - skipped
            words[n] = _word(U64(data.ctypes.data) + U64(start + skipped), length)
            is_same &= words[n] == words[0] and length >= _TABLE_BYTES
            start = ends[n]
        skipped += _TABLE_BYTES
    return words


@jit(U64(U64, U64))
def crc_of_byte(register: np.uint64, byte: np.uint64) -> np.uint64:
    """A CRC-32's register after one byte more."""
    further: np.uint64 = register >> _8 ^ _TABLES[np.int64((register ^ byte) & _BYTE)]
    return further


@jit(U64(U64, U64, types.int64))
def crc_of_bytes(register: np.uint64, address: np.uint64, length: int) -> np.uint64:
    """A CRC-32's register after so many bytes more."""
    at = 0
    while at + _TABLE_BYTES <= length:
        word = load64(address + U64(at)) ^ register
        register = U64(0)
        for n in range(_TABLE_BYTES):
            register ^= _TABLES[256 * (_TABLE_BYTES - 1 - n) + np.int64(word & _BYTE)]
            word >>= _8
        at += _TABLE_BYTES
    while at < length:
        register = crc_of_byte(register, load8(address + U64(at)))
        at += 1
    return register


@jit(_WORDS(_BYTES, _PLACES, _BYTES, _PLACES, _BYTES, _PLACES))
def row_checksums(
    keys: "NDArray[np.uint8]",
    key_ends: "NDArray[np.int64]",
    versions: "NDArray[np.uint8]",
    version_ends: "NDArray[np.int64]",
    rows: "NDArray[np.uint8]",
    row_ends: "NDArray[np.int64]",
) -> "NDArray[np.uint64]":
    """The CRC-32 of each key, a zero, its version and its row (`proof.rows`)."""
    assert len(key_ends) == len(version_ends) == len(row_ends)
    found = np.empty(len(row_ends), np.uint64)
    key_at, version_at, row_at = 0, 0, 0
    for n in range(len(row_ends)):
        register = crc_of_bytes(CRC_ONES, U64(keys.ctypes.data) + U64(key_at), key_ends[n] - key_at)
        register = crc_of_byte(register, _0)
        address = U64(versions.ctypes.data) + U64(version_at)
        register = crc_of_bytes(register, address, version_ends[n] - version_at)
        register = crc_of_bytes(register, U64(rows.ctypes.data) + U64(row_at), row_ends[n] - row_at)
        found[n] = register ^ CRC_ONES
        key_at, version_at, row_at = key_ends[n], version_ends[n], row_ends[n]
    return found


def _self_test() -> None:
    """Check a row that is longer than a word: a compiler bug would call it damaged.

    Raises:
        ImportError: a kernel is wrong.
    """
    data = bytes(range(100))
    whole, ends = np.frombuffer(data, np.uint8), np.array([100])
    parts, part_ends = gather(whole, np.array([40, 0]), np.array([60, 40]))
    checks = row_checksums(parts[:60], np.array([60]), parts[60:], np.array([40]), whole, ends)
    expected = crc32(data[40:] + b"\0" + data[:40] + data)
    if checks.tolist() != [expected] or part_ends.tolist() != [60, 100]:
        raise ImportError("the compiled kernels of columns are wrong")


_self_test()
