"""RocksDB's write batches, as the Ozone Manager's log has them.

A batch is the number of its first record (8 bytes, little-endian), the count of its
records (4 bytes), and the records: a tag, for most tags the number of the column
family, and texts with their lengths before them; numbers are varints of up to 32 bits.
A tag that is not known ends all knowledge of what follows, so the batch is refused.
"""

from dataclasses import dataclass
from enum import Enum

from ozone.errors import WriteBatchError

_HEADER_BYTES = 12
_VARINT_BYTES_MAX = 5
_NUMBER_MAX = (1 << 56) - 1


class RowOperation(Enum):
    """What a record does to a row."""

    PUT = "put"
    DELETE = "delete"
    OTHER = "other"
    """A merge, a deleted range, or another kind that an OM does not write to rows."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One record; `value` is empty where the operation has none."""

    operation: RowOperation
    family: int
    key: bytes
    value: bytes


@dataclass(frozen=True, slots=True)
class WriteBatch:
    """One batch, which took effect as a whole. `first` and `last` are the numbers of
    its records.
    """

    first: int
    last: int
    records: tuple[BatchRecord, ...]


@dataclass(frozen=True, slots=True)
class _Shape:
    operation: RowOperation
    has_family: bool
    texts: int
    is_counted: bool = True


# By tag; db/dbformat.h and db/write_batch.cc of RocksDB 7.7.
_SHAPES = {
    0x00: _Shape(RowOperation.DELETE, False, 1),
    0x01: _Shape(RowOperation.PUT, False, 2),
    0x02: _Shape(RowOperation.OTHER, False, 2),
    0x03: _Shape(RowOperation.OTHER, False, 1, is_counted=False),
    0x04: _Shape(RowOperation.DELETE, True, 1),
    0x05: _Shape(RowOperation.PUT, True, 2),
    0x06: _Shape(RowOperation.OTHER, True, 2),
    0x07: _Shape(RowOperation.DELETE, False, 1),
    0x08: _Shape(RowOperation.DELETE, True, 1),
    0x0D: _Shape(RowOperation.OTHER, False, 0, is_counted=False),
    0x0E: _Shape(RowOperation.OTHER, True, 2),
    0x0F: _Shape(RowOperation.OTHER, False, 2),
}


def parse_batch(data: bytes) -> WriteBatch:
    """The records of a batch.

    Raises:
        WriteBatchError: it ends inside a record, has a tag that is not known, or
            another count of records than it states.
    """
    if len(data) < _HEADER_BYTES:
        raise WriteBatchError(f"a write batch of {len(data)} bytes has no header")
    first = int.from_bytes(data[:8], "little")
    count = int.from_bytes(data[8:_HEADER_BYTES], "little")
    if first + count > _NUMBER_MAX:
        raise WriteBatchError(f"a write batch has the number {first}, beyond RocksDB's largest")
    records, counted, at = [], 0, _HEADER_BYTES
    while at < len(data):
        shape = _SHAPES.get(data[at])
        if shape is None:
            raise WriteBatchError(f"a write batch has the unknown tag {data[at]:#x} at {at}")
        at += 1
        family = 0
        if shape.has_family:
            family, at = _varint(data, at)
        texts = [b"", b""]
        for number in range(shape.texts):
            length, at = _varint(data, at)
            if length > len(data) - at:
                raise WriteBatchError(f"a write batch ends inside the text at {at}")
            texts[number] = data[at : at + length]
            at += length
        if shape.is_counted:
            counted += 1
            records.append(BatchRecord(shape.operation, family, texts[0], texts[1]))
    if counted != count:
        raise WriteBatchError(f"a write batch has {counted} records, and states {count}")
    return WriteBatch(first, first + max(count, 1) - 1, tuple(records))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for number in range(_VARINT_BYTES_MAX):
        if at + number >= len(data):
            raise WriteBatchError(f"a write batch ends inside the number at {at}")
        byte = data[at + number]
        value |= (byte & 127) << 7 * number
        if byte < 128:
            if value >> 32:
                break
            return value, at + number + 1
    raise WriteBatchError(f"the number at {at} of a write batch is too long")
