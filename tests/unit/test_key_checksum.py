"""The CRC of a key is folded from what its client recorded, or it is said why not."""

import random
import zlib
from dataclasses import replace

import pytest

from merkle.checksum import ChecksumType
from merkle.object_checksum import Crc
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, ContainerId
from ozone.key_checksum import UnrecordedChecksumError, UnrecordedReason, key_crc
from ozone.manager_values import KeyBlock, KeyFacts

WINDOW = 16 << 10
BODY = random.Random(1).randbytes(5 * WINDOW + 77)
# Borders of blocks and chunks that are none of windows.
BLOCKS = [BODY[: 2 * WINDOW + 5], BODY[2 * WINDOW + 5 :]]


def record(number: int, body: bytes, kind: ChecksumType = ChecksumType.CRC32) -> BlockRecord:
    """A block with two chunks."""
    middle = WINDOW
    chunks = tuple(
        ChunkRecord(
            first,
            len(part),
            kind,
            WINDOW,
            tuple(
                zlib.crc32(part[at : at + WINDOW]).to_bytes(4, "big")
                for at in range(0, len(part), WINDOW)
            ),
        )
        for first, part in ((0, body[:middle]), (middle, body[middle:]))
    )
    return BlockRecord(ContainerId(1), BlockId(number), 1, chunks)


RECORDS = {number: record(number, body) for number, body in enumerate(BLOCKS)}
KEY = KeyFacts(
    "v",
    "b",
    "k",
    len(BODY),
    1,
    object_id=1,
    update_id=1,
    replication="RATIS/THREE",
    blocks=tuple(KeyBlock(1, number, len(body)) for number, body in enumerate(BLOCKS)),
)


def test_it_is_that_of_the_bytes_whatever_the_blocks() -> None:
    assert key_crc(KEY, lambda one: RECORDS[one.local_id]) == (Crc.CRC32, zlib.crc32(BODY))


@pytest.mark.parametrize(
    ("key", "records", "reason"),
    [
        (replace(KEY, is_encrypted=True), RECORDS, UnrecordedReason.ENCRYPTED),
        (replace(KEY, replication="EC/rs-3-2-1048576"), RECORDS, UnrecordedReason.ERASURE_CODED),
        (replace(KEY, size_bytes=1), RECORDS, UnrecordedReason.UNREADABLE),
        (KEY, {0: RECORDS[0]}, UnrecordedReason.UNREADABLE),
        (KEY, {0: RECORDS[1], 1: RECORDS[0]}, UnrecordedReason.UNREADABLE),
        (
            KEY,
            {0: record(0, BLOCKS[0], ChecksumType.SHA256), 1: RECORDS[1]},
            UnrecordedReason.NO_CRC,
        ),
        (
            KEY,
            {0: RECORDS[0], 1: record(1, BLOCKS[1], ChecksumType.CRC32C)},
            UnrecordedReason.MIXED,
        ),
    ],
    ids=["encrypted", "EC", "other size", "lost block", "swapped", "SHA-256", "mixed"],
)
def test_where_it_cannot_be_told_the_reason_is(
    key: KeyFacts, records: dict[int, BlockRecord], reason: UnrecordedReason
) -> None:
    with pytest.raises(UnrecordedChecksumError) as error:
        key_crc(key, lambda one: records.get(one.local_id))
    assert error.value.reason == reason.value
