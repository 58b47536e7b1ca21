"""Rows of an index of listed objects, put together as arrays: what proof.row_kernels
does where those are not available, or are not worth loading.

Nearly all ETags are an MD5, or that of an upload in parts. Rows with one of these are
put together as arrays; the few others are encoded one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from proof.columns import ByteColumn
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import HASHES_BYTES, EvidenceLevel, Item
from proof.rows import ETAG_IS_CONTENT, ETAG_IS_HEX, VERSIONED, content_shape, encode_row
from proof.symbols import Ids, ids_to_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MD5_BYTES = 16
# Longer texts are encoded one by one: a row has one byte for their length, and arrays
# have room for the longest in each row.
_TEXT_MAX = 64
# Rows that are put together at once: bounds the memory.
_BLOCK_ROWS = 1 << 15
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def md5_contents(
    etags: "NDArray[np.uint8]", ends: "NDArray[np.int64]", is_wanted: "NDArray[np.bool_]"
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]", "NDArray[np.bool_]"]:
    """The MD5s that wanted ETags are, as a column of bytes that has none for others,
    and which these are.
    """
    packed, is_md5 = _md5s(ByteColumn(etags, ends))
    is_md5 &= is_wanted
    return packed[is_md5].reshape(-1), np.cumsum(is_md5) * _MD5_BYTES, is_md5


def listed_rows(
    keys: "NDArray[np.uint8]",
    key_ends: "NDArray[np.int64]",
    ids: Ids,
    sizes: "NDArray[np.uint64]",
    modified: "NDArray[np.uint64]",
    etags: "NDArray[np.uint8]",
    etag_ends: "NDArray[np.int64]",
    versions: "NDArray[np.uint8]",
    version_ends: "NDArray[np.int64]",
    _contents: "NDArray[np.uint8]",
    content_ends: "NDArray[np.int64]",
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]"]:
    """The rows of objects, with their checksums. What has a content is RECORDED, and
    its ETag is the content.
    """
    packed, is_md5 = _md5s(ByteColumn(etags, etag_ends))
    has_content = np.diff(content_ends, prepend=0) > 0
    columns = _Columns(
        ids=np.frombuffer(ids_to_bytes(ids), np.uint8).reshape(-1, ids.itemsize * 2),
        level=np.where(has_content, EvidenceLevel.RECORDED, EvidenceLevel.LISTED).astype(np.uint8),
        sizes=sizes,
        modified=modified,
        packed=packed,
        is_md5=is_md5,
        has_content=has_content,
        etags=ByteColumn(etags, etag_ends),
        versions=ByteColumn(versions, version_ends),
    )
    names = ByteColumn(keys, key_ends)
    rows = _joined([columns.rows(first, names) for first in range(0, len(names), _BLOCK_ROWS)])
    return rows.data, rows.ends


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """All that rows are made of. `packed` has an MD5 for each row, where `is_md5`."""

    ids: "NDArray[np.uint8]"
    level: "NDArray[np.uint8]"
    sizes: "NDArray[np.uint64]"
    modified: "NDArray[np.uint64]"
    packed: "NDArray[np.uint8]"
    is_md5: "NDArray[np.bool_]"
    has_content: "NDArray[np.bool_]"
    etags: ByteColumn
    versions: ByteColumn

    def rows(self, first: int, keys: ByteColumn) -> ByteColumn:
        """The rows of one block, with their checksums."""
        places = np.arange(first, min(first + _BLOCK_ROWS, len(keys)))
        keys, etags, versions = (one.taken(places) for one in (keys, self.etags, self.versions))
        is_md5, has_content = self.is_md5[places], self.has_content[places]
        etag_bytes, version_bytes = etags.lengths, versions.lengths
        is_short = (etag_bytes <= _TEXT_MAX) & (version_bytes <= _TEXT_MAX)
        is_plain = is_md5.copy()
        others = np.flatnonzero(~is_md5)
        is_plain[others] = _is_text(etags.taken(others))
        is_plain &= is_short
        parts = _Parts(len(places))
        parts.add(self.ids[places, :HASHES_BYTES])
        flags = self.level[places] | np.where(has_content, ETAG_IS_CONTENT, 0).astype(np.uint8)
        flags |= np.where(is_md5 & ~has_content, ETAG_IS_HEX, 0).astype(np.uint8)
        flags |= np.where(version_bytes > 0, VERSIONED, 0).astype(np.uint8)
        sizes = self.sizes[places].astype("<u8").view(np.uint8).reshape(-1, 8)
        widths = _significant(sizes)
        shape = widths | np.where(has_content, content_shape(_MD5_BYTES), content_shape(None))
        parts.add(flags[:, np.newaxis], shape.astype(np.uint8)[:, np.newaxis])
        modified = self.modified[places].astype("<u8").view(np.uint8).reshape(-1, 8)
        parts.add(modified[:, :6])
        parts.add_some(sizes, widths)
        # The content, which the ETag is; or the length of an ETag, and that.
        length = np.where(is_md5, _MD5_BYTES, etag_bytes).astype(np.uint8)
        parts.add_some(length[:, np.newaxis], np.where(has_content, 0, 1))
        parts.add_some(self.packed[places], np.where(is_md5, _MD5_BYTES, 0))
        parts.add_texts(etags, is_plain & ~is_md5)
        if version_bytes.any():
            counted = version_bytes.astype(np.uint8)[:, np.newaxis]
            parts.add_some(counted, np.where(version_bytes > 0, 1, 0))
            parts.add_texts(versions, is_plain)
        rows = _checked(keys, parts.column())
        others = np.flatnonzero(~is_plain)
        if not len(others):
            return rows
        texts = rows.texts()
        for at in others.tolist():
            texts[at] = self._row(first + at, keys.text(at))
        return ByteColumn.of(texts)

    def _row(self, at: int, key: bytes) -> bytes:
        content = self.packed[at].tobytes() if self.has_content[at] else None
        stamp = Stamp(
            self.versions.text(at).decode(), self.etags.text(at).decode(), int(self.modified[at])
        )
        item = Item(key.decode(), int(self.sizes[at]), content)
        stamped = StampedItem(item, ItemEvidence(EvidenceLevel(int(self.level[at]))), stamp)
        return encode_row(self.ids[at, :HASHES_BYTES].tobytes(), stamped)


class _Parts:
    """Rows of bytes that are put together from left to right."""

    def __init__(self, rows: int) -> None:
        self._lengths = np.zeros(rows, np.int64)
        self._data = list["NDArray[np.uint8]"]()
        self._masks = list["NDArray[np.bool_]"]()

    def add(self, *columns: "NDArray[np.uint8]") -> None:
        """Add bytes that every row has; shape (rows, bytes)."""
        for data in columns:
            self._lengths += data.shape[1]
            self._data.append(data)
            self._masks.append(np.ones(data.shape, np.bool_))

    def add_some(self, data: "NDArray[np.uint8]", lengths: "NDArray[np.int64]") -> None:
        """Add the first so many bytes of each row."""
        self._lengths += lengths
        self._data.append(data)
        self._masks.append(np.arange(data.shape[1]) < lengths[:, np.newaxis])

    def add_texts(self, texts: ByteColumn, is_added: "NDArray[np.bool_]") -> None:
        """Add the whole text to some rows."""
        lengths = np.where(is_added, texts.lengths, 0)
        self._lengths += lengths
        width = int(lengths.max(initial=0))
        mask = np.arange(width) < lengths[:, np.newaxis]
        data = np.zeros(mask.shape, np.uint8)
        data[mask] = texts.taken(np.flatnonzero(is_added)).data
        self._data.append(data)
        self._masks.append(mask)

    def column(self) -> ByteColumn:
        """What each row has."""
        data = np.hstack(self._data)[np.hstack(self._masks)]
        return ByteColumn(data, np.cumsum(self._lengths))


def _md5s(etags: ByteColumn) -> tuple["NDArray[np.uint8]", "NDArray[np.bool_]"]:
    """ETags of 32 hexadecimal digits as 16 bytes, and which have that form."""
    is_md5 = etags.lengths == 2 * _MD5_BYTES
    digits = _DIGITS[etags.taken(np.flatnonzero(is_md5)).data].reshape(-1, 2 * _MD5_BYTES)
    are_digits = (digits != _NO_DIGIT).all(1)
    packed = np.zeros((len(etags), _MD5_BYTES), np.uint8)
    packed[is_md5] = digits[:, ::2] << 4 | digits[:, 1::2] & 15
    is_md5[is_md5] = are_digits
    return packed, is_md5


def _is_text(etags: ByteColumn) -> "NDArray[np.bool_]":
    """Which have something else than hexadecimal digits, and are stored as they are."""
    others = np.cumsum(_DIGITS[etags.data] == _NO_DIGIT)
    counted = np.concatenate((np.zeros(1, np.int64), others))
    found: NDArray[np.bool_] = counted[etags.ends] > counted[etags.ends - etags.lengths]
    return found


def _significant(numbers: "NDArray[np.uint8]") -> "NDArray[np.int64]":
    """How many of the eight bytes of each number, least first, are needed for it."""
    places = np.where(numbers != 0, np.arange(1, 9), 0)
    found: NDArray[np.int64] = places.max(1)
    return found


def _checked(keys: ByteColumn, rows: ByteColumn) -> ByteColumn:
    """The rows with the checksum of key and row behind each (`proof.rows`)."""
    pairs = zip(keys.texts(), rows.texts(), strict=True)
    checks = np.array([crc32(row, crc32(key + b"\0")) for key, row in pairs], np.uint64)
    ends = rows.ends + 4 * np.arange(1, len(rows) + 1)
    data = np.empty(len(rows.data) + 4 * len(rows), np.uint8)
    is_row = np.ones(len(data), np.bool_)
    places = (ends - 4)[:, np.newaxis] + np.arange(4)
    is_row[places] = False
    data[places] = checks.astype("<u4").view(np.uint8).reshape(-1, 4)
    data[is_row] = rows.data
    return ByteColumn(data, ends)


def _joined(columns: Sequence[ByteColumn]) -> ByteColumn:
    """All of them, one behind the other."""
    if not columns:
        return ByteColumn.of([])
    starts = np.cumsum([0, *(len(one.data) for one in columns)])
    ends = [one.ends + start for one, start in zip(columns, starts, strict=False)]
    return ByteColumn(np.concatenate([one.data for one in columns]), np.concatenate(ends))
