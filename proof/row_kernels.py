"""Compiled kernels that make rows of an index of listed objects (proof.listed_rows), as
`proof.rows.encode_row` does one by one, without the GIL.

Importing this module compiles it or loads it from numba's cache.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

from typing import TYPE_CHECKING

import numpy as np
from numba.core import types

from merkle.intrinsics import U64, copy_bytes, jit, leading_zeros, load8, store64, swap
from proof.column_kernels import CRC_ONES, crc_of_byte, crc_of_bytes
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import HASHES_BYTES, EvidenceLevel, Item
from proof.rows import (
    ETAG_IS_CONTENT,
    ETAG_IS_HEX,
    LENGTH_MAX,
    LONG_LENGTH,
    MODIFIED_MAX,
    SIZE_MASK,
    VERSIONED,
    content_shape,
    encode_row,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MD5_BYTES = 16
_HEAD_BYTES, _SIZE_BYTES, _COUNT_BYTES, _CHECK_BYTES = 8, 8, 3, 4
# Of a row without its texts, and what a store of a word writes behind its end.
_ROW_BYTES = HASHES_BYTES + _HEAD_BYTES + _SIZE_BYTES + 2 * _COUNT_BYTES + _CHECK_BYTES
_WORD_BYTES = 8
_LISTED = np.uint64(EvidenceLevel.LISTED)
_RECORDED = np.uint64(EvidenceLevel.RECORDED | ETAG_IS_CONTENT)
_HEX, _VERSIONED = np.uint64(ETAG_IS_HEX), np.uint64(VERSIONED)
_NO_SHAPE, _MD5_SHAPE = (np.uint64(content_shape(length)) for length in (None, _MD5_BYTES))
_MODIFIED_MAX, _16, _0 = map(np.uint64, (MODIFIED_MAX, 16, 0))
_NO_DIGIT = np.uint8(255)
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_PLACES = types.Array(types.int64, 1, "C", readonly=True)
_FLAGS = types.Array(types.boolean, 1, "C", readonly=True)
_NUMBERS = types.Array(types.uint64, 1, "C", readonly=True)
_IDS = types.Array(types.uint64, 2, "C", readonly=True)
_OUT_BYTES = types.Array(types.uint8, 1, "C")
_OUT_PLACES, _OUT_FLAGS = types.Array(types.int64, 1, "C"), types.Array(types.boolean, 1, "C")


@jit(types.boolean(_OUT_BYTES, types.int64, U64, types.int64))
def _put_unhexed(out: "NDArray[np.uint8]", at: int, source: np.uint64, length: int) -> bool:
    """Write the bytes that are so many small hexadecimal digits; False if they are not,
    and some were written.
    """
    for n in range(length // 2):
        high = _DIGITS[load8(source + U64(2 * n))]
        low = _DIGITS[load8(source + U64(2 * n + 1))]
        if (high | low) == _NO_DIGIT:
            return False
        out[at + n] = high << 4 | low
    return length % 2 == 0


@jit(types.Tuple((_OUT_BYTES, _OUT_PLACES, _OUT_FLAGS))(_BYTES, _PLACES, _FLAGS))
def md5_contents(
    etags: "NDArray[np.uint8]", ends: "NDArray[np.int64]", is_wanted: "NDArray[np.bool_]"
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]", "NDArray[np.bool_]"]:
    """The MD5s that wanted ETags are, as a column of bytes that has none for others,
    and which these are.
    """
    assert len(ends) == len(is_wanted)
    found, found_ends = np.empty(_MD5_BYTES * len(ends), np.uint8), np.empty(len(ends), np.int64)
    is_md5, used, start = np.zeros(len(ends), np.bool_), 0, 0
    for n in range(len(ends)):
        end = ends[n]
        if is_wanted[n] and end - start == 2 * _MD5_BYTES:
            source = U64(etags.ctypes.data) + U64(start)
            is_md5[n] = _put_unhexed(found, used, source, end - start)
            used += _MD5_BYTES * is_md5[n]
        found_ends[n], start = used, end
    return found[:used], found_ends, is_md5


@jit(types.int64(_OUT_BYTES, types.int64, types.int64))
def _put_count(out: "NDArray[np.uint8]", at: int, length: int) -> int:
    """Write the length of a text; where that goes."""
    assert length < LENGTH_MAX
    if length < LONG_LENGTH:
        out[at] = length
        return at + 1
    out[at], out[at + 1], out[at + 2] = LONG_LENGTH, length & 255, length >> 8
    return at + _COUNT_BYTES


@jit(types.int64(_OUT_BYTES, types.int64, U64, types.int64))
def _put_text(out: "NDArray[np.uint8]", at: int, source: np.uint64, length: int) -> int:
    at = _put_count(out, at, length)
    copy_bytes(U64(out.ctypes.data) + U64(at), source, U64(length))
    return at + length


@jit(
    types.Tuple((_OUT_BYTES, _OUT_PLACES))(
        _BYTES, _PLACES, _IDS, _NUMBERS, _NUMBERS, _BYTES, _PLACES, _BYTES, _PLACES, _BYTES, _PLACES
    )
)
def listed_rows(
    keys: "NDArray[np.uint8]",
    key_ends: "NDArray[np.int64]",
    ids: "NDArray[np.uint64]",
    sizes: "NDArray[np.uint64]",
    modified: "NDArray[np.uint64]",
    etags: "NDArray[np.uint8]",
    etag_ends: "NDArray[np.int64]",
    versions: "NDArray[np.uint8]",
    version_ends: "NDArray[np.int64]",
    contents: "NDArray[np.uint8]",
    content_ends: "NDArray[np.int64]",
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]"]:
    """The rows of objects, with their checksums. What has a content is RECORDED, and
    its ETag is the content.
    """
    assert len(key_ends) == len(ids) == len(sizes) == len(modified) == len(etag_ends)
    assert len(key_ends) == len(version_ends) == len(content_ends)
    most = _ROW_BYTES * len(ids) + len(etags) + len(versions) + _WORD_BYTES
    out, ends = np.empty(most, np.uint8), np.empty(len(ids), np.int64)
    address = U64(out.ctypes.data)
    at, key_at, etag_at, version_at, content_at = 0, 0, 0, 0, 0
    for n in range(len(ids)):
        start = at
        size, width = sizes[n], 8 - int(np.int64(leading_zeros(sizes[n]))) // 8
        assert width <= SIZE_MASK
        assert modified[n] < _MODIFIED_MAX
        store64(address + U64(at), swap(ids[n, 0]))
        store64(address + U64(at + 8), swap(ids[n, 1]))
        head_at = at + HASHES_BYTES
        # The first two bytes are written once they are known.
        store64(address + U64(head_at), modified[n] << _16)
        at = head_at + _HEAD_BYTES
        store64(address + U64(at), size)
        at += width
        flags, shape = _LISTED, _NO_SHAPE | U64(width)
        etag, etag_bytes = U64(etags.ctypes.data) + U64(etag_at), etag_ends[n] - etag_at
        if content_ends[n] > content_at:
            flags, shape = _RECORDED, _MD5_SHAPE | U64(width)
            content = U64(contents.ctypes.data) + U64(content_at)
            copy_bytes(address + U64(at), content, U64(_MD5_BYTES))
            at += _MD5_BYTES
        else:
            text_at = _put_count(out, at, etag_bytes // 2)
            if _put_unhexed(out, text_at, etag, etag_bytes):
                flags |= _HEX
                at = text_at + etag_bytes // 2
            else:
                at = _put_text(out, at, etag, etag_bytes)
        if version_ends[n] > version_at:
            flags |= _VERSIONED
            source = U64(versions.ctypes.data) + U64(version_at)
            at = _put_text(out, at, source, version_ends[n] - version_at)
        out[head_at], out[head_at + 1] = flags, shape
        register = crc_of_bytes(CRC_ONES, U64(keys.ctypes.data) + U64(key_at), key_ends[n] - key_at)
        register = crc_of_byte(register, _0)
        register = crc_of_bytes(register, address + U64(start), at - start)
        store64(address + U64(at), register ^ CRC_ONES)
        at += _CHECK_BYTES
        ends[n], key_at, etag_at = at, key_ends[n], etag_ends[n]
        version_at, content_at = version_ends[n], content_ends[n]
    return out[:at], ends


def _self_test() -> None:
    """Make two rows: a compiler bug would call objects different, or rows damaged.

    Raises:
        ImportError: a kernel is wrong.
    """
    etags = [b"0123456789abcdef" * 2, b"0123456789abcdef" * 2 + b"-7"]
    joined, etag_ends = np.frombuffer(b"".join(etags), np.uint8), np.cumsum([*map(len, etags)])
    contents, content_ends, is_md5 = md5_contents(joined, etag_ends, np.array([True, True]))
    ids = np.array([[1 << 60, 7 << 32], [5, 9 << 60]], np.uint64)
    names, versions = np.frombuffer(b"key", np.uint8), np.frombuffer(b"v", np.uint8)
    numbers = np.array([1 << 40, 0], np.uint64)
    name_ends, version_ends = np.array([1, 3]), np.array([0, 1])
    columns = (numbers, numbers, joined, etag_ends, versions, version_ends)
    rows, ends = listed_rows(names, name_ends, ids, *columns, contents, content_ends)
    expected = b""
    for n, key in enumerate(("k", "ey")):
        content = bytes.fromhex(etags[0].decode()) if n == 0 else None
        level = EvidenceLevel.LISTED if content is None else EvidenceLevel.RECORDED
        size = int(numbers[n])
        stamp = Stamp("v" * n, etags[n].decode(), size)
        stamped = StampedItem(Item(key, size, content), ItemEvidence(level), stamp)
        expected += encode_row(ids[n].astype(">u8").tobytes()[:HASHES_BYTES], stamped)
    if is_md5.tolist() != [True, False] or rows.tobytes() != expected or ends[-1] != len(rows):
        raise ImportError("the compiled kernels of rows are wrong")


_self_test()
