"""What both sides of the agents' own protocol agree on beyond the .proto file: sizes,
reasons, and how a piece of data is laid out.

A piece is the one message that carries bulk. It is put together and taken apart by
hand, which saves a copy of every byte on either side; the result is an ordinary
`WindowPiece`, and whoever parses it with protobuf sees the same.
"""

from merkle.check import TreeRefusal
from repair.ports import Piece

SERVICE = "treefold.agent.v1.Agent"
# IDs in one request for records: some hundred kilobytes of answer.
RECORDS_PER_CALL_MAX = 1000
# Ranges in one request: every second 4 KiB window of a 256 MiB block.
RANGES_MAX = 32_768
# Bytes that one request may ask for; a chunk is at most half of it.
READ_BYTES_MAX = 64 << 20
# Of data in one message: as fast as larger ones, and four in flight are little memory.
PIECE_BYTES_MAX = 1 << 20
# The offset, two tags and a length.
PIECE_HEAD_BYTES_MAX = 32
# The reason of a refusal that says: ask for pages.
TREE_TOO_LARGE = TreeRefusal.TOO_LARGE.value
_OFFSET_TAG, _DATA_TAG = 0x08, 0x12
_VARINT_BYTES_MAX = 10


def encode_piece(offset: int, data: bytes) -> bytes:
    """A serialised `WindowPiece`."""
    return b"".join(
        (bytes((_OFFSET_TAG,)), _varint(offset), bytes((_DATA_TAG,)), _varint(len(data)), data)
    )


def decode_piece(raw: bytes) -> Piece | None:
    """The piece as a view of the message; None where that is empty, laid out in another
    way, or broken.
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
    """The number and where it ends; a broken one ends where it begins, so that what
    follows does not fit.
    """
    value = 0
    for i, byte in enumerate(raw[position : position + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, position + i + 1
    return 0, len(raw)
