"""Constants of the agents' protocol beyond the .proto file, and its bulk message.

`WindowPiece` is the only message that carries bulk data. It is encoded and decoded by
hand here, which saves a copy of every byte on each side. The bytes are an ordinary
protobuf message.
"""

from merkle.check import TreeRefusal
from repair.ports import Piece

SERVICE = "treefold.agent.v1.Agent"
# IDs in one request for records; the response has some hundred kilobytes.
RECORDS_PER_CALL_MAX = 1000
# Ranges in one request: every second 4 KiB window of a 256 MiB block.
RANGES_MAX = 32_768
# Bytes that one request may ask for; a chunk is at most half of it.
READ_BYTES_MAX = 64 << 20
# Data bytes in one message. Larger messages are no faster, and four of these in flight
# take little memory.
PIECE_BYTES_MAX = 1 << 20
# Other bytes of such a message: the offset, two tags and a length.
PIECE_HEAD_BYTES_MAX = 32
# The reason of a refusal after which a client requests the tree in pages.
TREE_TOO_LARGE = TreeRefusal.TOO_LARGE.value
_OFFSET_TAG, _DATA_TAG = 0x08, 0x12
_VARINT_BYTES_MAX = 10


def encode_piece(offset: int, data: bytes) -> bytes:
    """A serialised `WindowPiece`."""
    return b"".join(
        (bytes((_OFFSET_TAG,)), _varint(offset), bytes((_DATA_TAG,)), _varint(len(data)), data)
    )


def decode_piece(raw: bytes) -> Piece | None:
    """The piece as a view of the message; None if it has no data, another field order,
    or is malformed.
    """
    offset, position = 0, 0
    if raw[:1] == b"\x08":
        offset, position = _read_varint(raw, 1)
    if raw[position : position + 1] != b"\x12":
        return None
    length, position = _read_varint(raw, position + 1)
    if not length or length != len(raw) - position:
        return None
    return Piece(offset, memoryview(raw)[position:])


def _varint(value: int) -> bytes:
    assert value >= 0
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(raw: bytes, position: int) -> tuple[int, int]:
    """The number and the position after it. A malformed one ends at the end of `raw`,
    so that the caller's checks fail.
    """
    value = 0
    for i, byte in enumerate(raw[position : position + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, position + i + 1
    return 0, len(raw)
