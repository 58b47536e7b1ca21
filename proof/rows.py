"""An item of an index as bytes: its ID's hashes, then what is known of it.

A row ends with a checksum over its key and itself. Databases check some of their pages
and others not at all, and a flipped bit must not become a word about an object.
"""

import struct
from zlib import crc32

from proof.errors import IndexDamagedError
from proof.index import ItemEvidence, Stamp, StampedItem
from proof.item import HASHES_BYTES, EvidenceLevel, Item

# Flags of a row; the evidence's level is in the lowest two bits.
_LEVEL_MASK = 3
_DELETE_MARKER, _CONTENT, _PROPERTIES, _VERSIONED = 4, 8, 16, 32
# An ETag is most often the hexadecimal content, else some other bytes as hexadecimal.
_ETAG_IS_CONTENT, _ETAG_IS_HEX = 64, 128
# Flags, modified time in ms and size, each as two parts of 48 bits.
_HEAD = struct.Struct("<BHIHI")
_CHECK = struct.Struct("<I")
_READ_AT = struct.Struct("<q")
_LOW_BITS = 16
_LOW_MASK = (1 << _LOW_BITS) - 1
_NUMBER_MAX = 1 << 48
_LENGTH_MAX = 1 << 16


def encode_row(hashes: bytes, stamped: StampedItem) -> bytes:
    """The row of an item with these hashes (HASHES_BYTES).

    Times and sizes have 48 bits, texts at most 65,535 bytes: stores give less.
    """
    item, stamp, evidence = stamped.item, stamped.stamp, stamped.evidence
    flags, tail = int(evidence.level), []
    if item.is_delete_marker:
        flags |= _DELETE_MARKER
    if item.content is not None:
        flags |= _CONTENT
        tail.append(_counted(item.content))
    if item.properties:
        flags |= _PROPERTIES
        tail.append(_counted(item.properties))
    packed = _from_hex(stamp.etag)
    if packed is None:
        tail.append(_counted(stamp.etag.encode()))
    elif packed == item.content:
        flags |= _ETAG_IS_CONTENT
    else:
        flags |= _ETAG_IS_HEX
        tail.append(_counted(packed))
    if stamp.version:
        flags |= _VERSIONED
        tail.append(_counted(stamp.version.encode()))
    assert (evidence.level is EvidenceLevel.READ) == (evidence.read_at_s is not None)
    if evidence.read_at_s is not None:
        tail.append(_READ_AT.pack(evidence.read_at_s))
    modified, size = stamp.modified_ms, item.size_bytes
    assert 0 <= modified < _NUMBER_MAX
    assert 0 <= size < _NUMBER_MAX
    head = _HEAD.pack(
        flags, modified & _LOW_MASK, modified >> _LOW_BITS, size & _LOW_MASK, size >> _LOW_BITS
    )
    row = b"".join((hashes, head, *tail))
    return row + _CHECK.pack(crc32(row, _key_crc(item.key.encode(), item.version.encode())))


def checked_hashes(key: bytes, version: bytes, row: bytes) -> bytes:
    """The hashes of a row, after its checksum was checked.

    Raises:
        IndexDamagedError: the row is not the one that was written for this key.
    """
    end = len(row) - _CHECK.size
    if end < HASHES_BYTES + _HEAD.size or row[end:] != _CHECK.pack(
        crc32(row[:end], _key_crc(key, version))
    ):
        raise IndexDamagedError(
            f"the row of {key.decode(errors='replace')!r} in the index is damaged",
            hint="Rebuild the index from a listing of the bucket.",
        )
    return row[:HASHES_BYTES]


def decode_row(key: bytes, version: bytes, row: bytes) -> StampedItem:
    """The item in a row.

    Raises:
        IndexDamagedError: the row is not the one that was written for this key.
    """
    checked_hashes(key, version, row)
    flags, modified_low, modified_high, size_low, size_high = _HEAD.unpack_from(row, HASHES_BYTES)
    at = HASHES_BYTES + _HEAD.size
    content, properties, etag, stored_version = None, b"", "", ""
    if flags & _CONTENT:
        content, at = _counted_at(row, at)
    if flags & _PROPERTIES:
        properties, at = _counted_at(row, at)
    if flags & _ETAG_IS_CONTENT:
        etag = (content or b"").hex()
    else:
        packed, at = _counted_at(row, at)
        etag = packed.hex() if flags & _ETAG_IS_HEX else packed.decode()
    if flags & _VERSIONED:
        text, at = _counted_at(row, at)
        stored_version = text.decode()
    return StampedItem(
        Item(
            key=key.decode(),
            size_bytes=size_high << _LOW_BITS | size_low,
            content=content,
            properties=properties,
            version=version.decode(),
            is_delete_marker=bool(flags & _DELETE_MARKER),
        ),
        row_evidence(row),
        Stamp(stored_version, etag, modified_high << _LOW_BITS | modified_low),
    )


def row_evidence(row: bytes) -> ItemEvidence:
    """The evidence in a row whose checksum was checked."""
    level = EvidenceLevel(row[HASHES_BYTES] & _LEVEL_MASK)
    if level is not EvidenceLevel.READ:
        return ItemEvidence(level)
    return ItemEvidence(level, *_READ_AT.unpack_from(row, len(row) - _CHECK.size - _READ_AT.size))


def _key_crc(key: bytes, version: bytes) -> int:
    return crc32(version, crc32(key + b"\0"))


def _from_hex(text: str) -> bytes | None:
    """The bytes that are written as this text in hexadecimal, if any."""
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        return None
    # It also takes spaces and capitals.
    return packed if packed.hex() == text else None


def _counted(data: bytes) -> bytes:
    assert len(data) < _LENGTH_MAX
    short = len(data)
    return bytes((short,)) + data if short < 255 else b"\xff" + short.to_bytes(2, "little") + data


def _counted_at(row: bytes, at: int) -> tuple[bytes, int]:
    length, at = row[at], at + 1
    if length == 255:
        length, at = int.from_bytes(row[at : at + 2], "little"), at + 2
    return row[at : at + length], at + length
