"""The fields of a serialised message, read without parsing it.

A parsed message takes up to fifty times its bytes: two bytes are an empty message. So
what a peer sends is counted here before it is parsed.
"""

from collections.abc import Iterator

from google.protobuf.message import DecodeError

# A message below this becomes no more than some 50 MiB when parsed.
_SMALL_BYTES = 1 << 20
# No field has fewer: a tag, and a number or a length.
_FIELD_BYTES_MIN = 2


def raw_fields(raw: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """The fields of any message: tag, number, and of one with a length, which is its
    number, the bytes.

    Raises:
        DecodeError: it is no message.
    """
    at, end = 0, len(raw)
    while at < end:
        # Most tags are one byte.
        tag = raw[at]
        tag, at = (tag, at + 1) if tag < 0x80 else _varint(raw, at)
        length = 0
        match tag & 7:
            case 0:
                value, at = _varint(raw, at)
            case 1:
                value, length = 0, 8
            case 2:
                value, at = _varint(raw, at)
                length = value
            case 5:
                value, length = 0, 4
            case _:
                raise DecodeError("there is no such kind of field")
        if tag < 8 or at + length > end:
            raise DecodeError("a field has no number, or the message ends in it")
        yield tag, value, raw[at : at + length]
        at += length


def exceeds_count(raw: bytes, *path: int, count_max: int) -> bool:
    """Whether a serialised message, and those inside it along this path of field
    numbers, have more than `count_max` fields. A small message never has; more bytes
    that are not a message always have.
    """
    if len(raw) < max(_SMALL_BYTES, _FIELD_BYTES_MIN * count_max):
        return False
    try:
        return _count_left(memoryview(raw), path, count_max) < 0
    except DecodeError:
        return True


def _count_left(raw: memoryview, path: tuple[int, ...], left: int) -> int:
    """`left` less the number of fields; negative once there are more."""
    for tag, _, part in raw_fields(raw):
        left -= 1
        if left < 0:
            break
        if path and tag == path[0] << 3 | 2:
            left = _count_left(part, path[1:], left)
    return left


def _varint(raw: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(raw) and shift < 70:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise DecodeError("a number does not end")
