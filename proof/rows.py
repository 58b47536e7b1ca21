"""An item of an index as bytes: its ID's hashes, then what is known of it.

A row ends with a checksum over its key and itself. Databases check some of their pages
and others not at all, and a flipped bit must not become a word about an object.
"""

import struct
from zlib import crc32

import numpy as np

from proof.columns import column_kernels, gathered
from proof.errors import IndexDamagedError
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import HASHES_BYTES, PROPERTIES_DIGEST_BYTES, EvidenceLevel, Item
from proof.item_columns import HAS_CONTENT, WAS_READ, FoundItems, ItemColumns
from proof.symbols import ids_from_hashes
from proof.tables import RowColumns

# Flags of a row: the evidence's level in the lowest two bits, then these.
_LEVEL_MASK, _DELETE_MARKER, VERSIONED = 3, 4, 8
# An ETag is most often the hexadecimal content, else some other bytes as hexadecimal.
ETAG_IS_CONTENT, ETAG_IS_HEX = 16, 32
_DAMAGED = 64
# The next byte: how many bytes the size has, whether there are properties, and the
# length of the content as a place in this list.
SIZE_MASK, _PROPERTIES, _CONTENT_SHIFT = 7, 8, 4
_CONTENT_BYTES = (None, 0, 4, 8, 16, 20, 32, 48, 64)
_CONTENT_LENGTHS = np.array([length or 0 for length in _CONTENT_BYTES], np.int64)
_HEAD = struct.Struct("<BBHI")
_CHECK = struct.Struct("<I")
# What the CRC-32 of bytes and of their own CRC-32 behind them always is.
_CRC_RESIDUE = 0x2144_DF1C
_READ_AT = struct.Struct("<q")
_ROW_BYTES_MIN = HASHES_BYTES + _HEAD.size + _CHECK.size
# The modified time has 48 bits, in ms.
_LOW_BITS = 16
_LOW_MASK = (1 << _LOW_BITS) - 1
MODIFIED_MAX = 1 << 48
LENGTH_MAX = 1 << 16
LONG_LENGTH = 255


def encode_row(hashes: bytes, stamped: StampedItem) -> bytes:
    """The row of an item with these hashes (HASHES_BYTES).

    Times have 48 bits, sizes 56, texts at most 65,535 bytes: stores give less.
    """
    item, stamp, evidence = stamped.item, stamped.stamp, stamped.evidence
    flags, size = int(evidence.level), item.size_bytes
    size_bytes = (size.bit_length() + 7) // 8
    assert size_bytes <= SIZE_MASK
    shape = size_bytes | content_shape(None if item.content is None else len(item.content))
    if item.properties:
        assert len(item.properties) == PROPERTIES_DIGEST_BYTES
        shape |= _PROPERTIES
    if item.is_delete_marker:
        flags |= _DELETE_MARKER
    if stamped.is_damaged:
        flags |= _DAMAGED
    tail = [size.to_bytes(size_bytes, "little"), item.content or b"", item.properties]
    packed = _from_hex(stamp.etag)
    if packed is None:
        tail.append(_counted(stamp.etag.encode()))
    elif packed == item.content:
        flags |= ETAG_IS_CONTENT
    else:
        flags |= ETAG_IS_HEX
        tail.append(_counted(packed))
    if stamp.version:
        flags |= VERSIONED
        tail.append(_counted(stamp.version.encode()))
    assert (evidence.level is EvidenceLevel.READ) == (evidence.read_at_s is not None)
    if evidence.read_at_s is not None:
        tail.append(_READ_AT.pack(evidence.read_at_s))
    assert 0 <= stamp.modified_ms < MODIFIED_MAX
    head = _HEAD.pack(flags, shape, stamp.modified_ms & _LOW_MASK, stamp.modified_ms >> _LOW_BITS)
    row = b"".join((hashes, head, *tail))
    return row + _CHECK.pack(crc32(row, _key_crc(item.key.encode(), item.version.encode())))


def content_shape(length_bytes: int | None) -> int:
    """How a row says that its content has so many bytes; None is no content."""
    return _CONTENT_BYTES.index(length_bytes) << _CONTENT_SHIFT


def checked_hashes(key: bytes, version: bytes, row: bytes) -> bytes:
    """The hashes of a row, after its checksum was checked.

    Raises:
        IndexDamagedError: the row is not the one that was written for this key.
    """
    if len(row) < _ROW_BYTES_MIN or crc32(row, _key_crc(key, version)) != _CRC_RESIDUE:
        raise _damaged(f"the row of {key.decode(errors='replace')!r} in the index is damaged")
    return row[:HASHES_BYTES]


def decode_row(key: bytes, version: bytes, row: bytes) -> StampedItem:
    """The item in a row.

    Raises:
        IndexDamagedError: the row is not the one that was written for this key.
    """
    checked_hashes(key, version, row)
    flags, shape, modified_low, modified_high = _HEAD.unpack_from(row, HASHES_BYTES)
    at = HASHES_BYTES + _HEAD.size
    size, at = int.from_bytes(row[at : (end := at + (shape & SIZE_MASK))], "little"), end
    content, length = None, _CONTENT_BYTES[shape >> _CONTENT_SHIFT]
    if length is not None:
        content, at = row[at : at + length], at + length
    end = at + PROPERTIES_DIGEST_BYTES * bool(shape & _PROPERTIES)
    properties, at = row[at:end], end
    if flags & ETAG_IS_CONTENT:
        etag = (content or b"").hex()
    else:
        packed, at = _counted_at(row, at)
        etag = packed.hex() if flags & ETAG_IS_HEX else packed.decode()
    stored_version = _counted_at(row, at)[0].decode() if flags & VERSIONED else ""
    is_marker = bool(flags & _DELETE_MARKER)
    return StampedItem(
        Item(key.decode(), size, content, properties, version.decode(), is_marker),
        row_evidence(row),
        Stamp(stored_version, etag, modified_high << _LOW_BITS | modified_low),
        bool(flags & _DAMAGED),
    )


def decode_rows(rows: RowColumns) -> FoundItems:
    """The items in many rows, without their stamps.

    Raises:
        IndexDamagedError: a row is not the one that was written for its key.
    """
    names, whole = rows.names, rows.rows
    lengths, kernels = whole.lengths, column_kernels()
    is_whole = False
    if kernels is not None:
        keys, versions = names.keys, names.versions
        checks = kernels.row_checksums(
            keys.data, keys.ends, versions.data, versions.ends, whole.data, whole.ends
        )
        is_whole = bool((checks == _CRC_RESIDUE).all() and (lengths >= _ROW_BYTES_MIN).all())
    if not is_whole:
        # The first that is damaged raises, by its name.
        for one in zip(names.keys.texts(), names.versions.texts(), whole.texts(), strict=True):
            checked_hashes(*one)
    starts = whole.ends - lengths
    hashes = whole.data[starts[:, np.newaxis] + np.arange(HASHES_BYTES)]
    held, shape = whole.data[starts + HASHES_BYTES], whole.data[starts + HASHES_BYTES + 1]
    at, width = starts + HASHES_BYTES + _HEAD.size, (shape & SIZE_MASK).astype(np.int64)
    sizes = np.zeros(len(rows), np.uint64)
    for place in range(SIZE_MASK):
        digits = whole.data[np.minimum(at + place, len(whole.data) - 1)].astype(np.uint64)
        sizes |= np.where(place < width, digits, np.uint64(0)) << np.uint64(8 * place)
    at = at + width
    lengths = _CONTENT_LENGTHS[shape >> _CONTENT_SHIFT]
    contents, at = gathered(whole.data, at, lengths), at + lengths
    lengths = np.where(shape & _PROPERTIES, PROPERTIES_DIGEST_BYTES, 0)
    read = (held & _LEVEL_MASK) == EvidenceLevel.READ
    times = whole.ends[read] - _CHECK.size - _READ_AT.size
    read_at = np.zeros(len(rows), np.uint64)
    read_at[read] = gathered(whole.data, times, np.full(len(times), 8)).data.view("<u8")
    flags = held & (_LEVEL_MASK | _DELETE_MARKER)
    flags |= np.where(shape >> _CONTENT_SHIFT, HAS_CONTENT, 0).astype(np.uint8)
    flags |= np.where(read, WAS_READ, 0).astype(np.uint8)
    properties = gathered(whole.data, at, lengths)
    items = ItemColumns(names, flags, sizes, contents, properties, read_at)
    return FoundItems(items, ids_from_hashes(hashes.tobytes()))


def row_evidence(row: bytes) -> ItemEvidence:
    """The evidence in a row whose checksum was checked."""
    level = EvidenceLevel(row[HASHES_BYTES] & _LEVEL_MASK)
    if level is not EvidenceLevel.READ:
        return ItemEvidence(level)
    return ItemEvidence(level, *_READ_AT.unpack_from(row, len(row) - _CHECK.size - _READ_AT.size))


def _key_crc(key: bytes, version: bytes) -> int:
    return crc32(key + b"\0" + version)


def _damaged(text: str) -> IndexDamagedError:
    return IndexDamagedError(text, hint="Rebuild the index from a listing of the bucket.")


def _from_hex(text: str) -> bytes | None:
    """The bytes that this text is, in small hexadecimal digits; None if it is not."""
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        return None
    # It also takes spaces and capitals.
    return packed if packed.hex() == text else None


def _counted(data: bytes) -> bytes:
    length = len(data)
    assert length < LENGTH_MAX
    if length < LONG_LENGTH:
        return bytes((length,)) + data
    return bytes((LONG_LENGTH,)) + length.to_bytes(2, "little") + data


def _counted_at(row: bytes, at: int) -> tuple[bytes, int]:
    length, at = row[at], at + 1
    if length == LONG_LENGTH:
        length, at = int.from_bytes(row[at : at + 2], "little"), at + 2
    return row[at : at + length], at + length
