"""The bytes of named items in a message: columns, compressed but for what is random.

First the compressed part: flags, then the columns of numbers (sizes, the four lengths,
times of reading of those that were read), then keys, versions and properties, joined.
Content hashes follow as they are. Numbers of a column have all the same width, which
comes before them: the least that fits.
"""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from proof.columns import ByteColumn, NameColumns
from proof.item_columns import DELETE_MARKER, HAS_CONTENT, LEVEL_MASK, WAS_READ, ItemColumns
from runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Stores take 1,024.
_KEY_BYTES_MAX = 1 << 12
_HASH_BYTES_MAX = 64
_FLAGS_MAX = WAS_READ | HAS_CONTENT | DELETE_MARKER | LEVEL_MASK
_LENGTH_BYTES = 3
_WIDTHS = (0, 1, 2, 4, 8)
# Keys and lengths are as small by the fastest level as by others, to a twentieth.
_LEVEL = 1
# Deflate without a header and a checksum, which the transport has.
_RAW = -zlib.MAX_WBITS


def encode_items(items: ItemColumns) -> bytes:
    """The bytes of items."""
    names, read = items.names, (items.flags & WAS_READ) > 0
    parts = [items.flags.tobytes(), _encode_numbers(items.sizes)]
    parts += [
        _encode_numbers(column.lengths.astype(np.uint64))
        for column in (names.keys, names.versions, items.contents, items.properties)
    ]
    parts.append(_encode_numbers(items.read_at[read]))
    parts += [column.data.tobytes() for column in (names.keys, names.versions, items.properties)]
    folded = zlib.compress(b"".join(parts), _LEVEL, wbits=_RAW)
    return len(folded).to_bytes(_LENGTH_BYTES, "big") + folded + items.contents.data.tobytes()


def decode_items(data: bytes, count: int, *, unfolded_max: int) -> ItemColumns:
    """Read `encode_items` of so many items; the compressed part may unfold to
    `unfolded_max` bytes.

    Raises:
        RemoteProtocolError: these bytes are none.
    """
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "big")
    _expect(_LENGTH_BYTES <= end <= len(data), "its names are cut short")
    reader = _Columns(_unfolded(data[_LENGTH_BYTES:end], unfolded_max))
    flags = np.frombuffer(reader.raw(count), np.uint8)
    known, read = (flags & HAS_CONTENT) > 0, (flags & WAS_READ) > 0
    _expect(
        bool(((flags & LEVEL_MASK) > 0).all() and (flags <= _FLAGS_MAX).all()), "a level is unknown"
    )
    sizes = reader.numbers(count)
    keys, versions = (reader.ends(count, _KEY_BYTES_MAX) for _ in range(2))
    contents, properties = (reader.ends(count, _HASH_BYTES_MAX) for _ in range(2))
    read_at = np.zeros(count, np.uint64)
    read_at[read] = reader.numbers(int(read.sum()))
    names = NameColumns(reader.column(keys), reader.column(versions))
    found = ItemColumns(
        names,
        flags,
        sizes,
        _Columns(data[end:]).column(contents, is_last=True),
        reader.column(properties, is_last=True),
        read_at,
    )
    _expect(not found.contents.lengths[~known].any(), "a hash that is not known has bytes")
    _expect(names.keys.is_utf8 and names.versions.is_utf8, "a key is not UTF-8")
    return found


def encode_keys(names: Sequence[tuple[str, str]]) -> bytes:
    """The bytes of keys and versions: columns as of items, all compressed."""
    keys, versions = (ByteColumn.of([name[at].encode() for name in names]) for at in (0, 1))
    columns = (keys, versions)
    parts = [_encode_numbers(column.lengths.astype(np.uint64)) for column in columns]
    parts += [column.data.tobytes() for column in columns]
    return zlib.compress(b"".join(parts), _LEVEL, wbits=_RAW)


def decode_keys(data: bytes, count: int, *, unfolded_max: int) -> tuple[tuple[str, str], ...]:
    """Read `encode_keys` of so many names, which may unfold to `unfolded_max` bytes.

    Raises:
        RemoteProtocolError: these bytes are none.
    """
    reader = _Columns(_unfolded(data, unfolded_max))
    keys, versions = (reader.ends(count, _KEY_BYTES_MAX) for _ in range(2))
    names = NameColumns(reader.column(keys), reader.column(versions, is_last=True))
    _expect(names.keys.is_utf8 and names.versions.is_utf8, "a key is not UTF-8")
    return tuple(zip(*names.texts(), strict=True))


class _Columns:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def raw(self, length: int) -> bytes:
        _expect(length <= len(self._data) - self._at, "it is cut short")
        self._at += length
        return self._data[self._at - length : self._at]

    def numbers(self, count: int) -> "NDArray[np.uint64]":
        width = self.raw(1)[0]
        _expect(width in _WIDTHS, "a column has no such width")
        if not width:
            return np.zeros(count, np.uint64)
        values = np.frombuffer(self.raw(width * count), f"<u{width}").astype(np.uint64)
        _expect(width == _width(values), "a column is wider than it needs to be")
        return values

    def ends(self, count: int, most: int) -> "NDArray[np.int64]":
        """Where texts end whose lengths follow."""
        lengths = self.numbers(count)
        _expect(not len(lengths) or int(lengths.max()) <= most, "a text is too long")
        return np.cumsum(lengths, dtype=np.int64)

    def column(self, ends: "NDArray[np.int64]", *, is_last: bool = False) -> ByteColumn:
        data = self.raw(int(ends[-1]) if len(ends) else 0)
        _expect(not is_last or self._at == len(self._data), "bytes are left over")
        return ByteColumn(np.frombuffer(data, np.uint8), ends)


def _encode_numbers(values: "NDArray[np.uint64]") -> bytes:
    width = _width(values)
    return bytes([width]) + (values.astype(f"<u{width}").tobytes() if width else b"")


def _width(values: "NDArray[np.uint64]") -> int:
    """The least width that fits all."""
    most = int(values.max()) if len(values) else 0
    return next(width for width in _WIDTHS if most >> 8 * width == 0)


def _unfolded(data: bytes, most: int) -> bytes:
    unfolding = zlib.decompressobj(_RAW)
    try:
        whole = unfolding.decompress(data, most)
    except zlib.error as error:
        raise RemoteProtocolError("invalid message of a comparison: no compressed names") from error
    is_whole = unfolding.eof and not unfolding.unused_data and not unfolding.unconsumed_tail
    _expect(is_whole, "its names are cut short or too many")
    return whole


def _expect(holds: bool, reason: str) -> None:
    if not holds:
        raise RemoteProtocolError(f"invalid message of a comparison: {reason}", reason=reason)
