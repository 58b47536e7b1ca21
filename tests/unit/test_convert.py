"""Messages become values only where they make sense, and values the bytes that Ozone
writes.
"""

from collections.abc import Callable

import pytest

from merkle.checksum import ChecksumType
from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.limits import BLOCK_BYTES_MAX, BLOCK_CHUNKS_MAX, CHUNK_BYTES_MAX, MESSAGE_BYTES_MAX
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from protos.convert import (
    container_id_of_tree,
    record_from_bytes,
    record_from_proto,
    record_to_bytes,
    tree_from_bytes,
)
from protos.ozone_datanode_pb2 import BlockData, ContainerChecksumInfo

# Block 7 of container 100: 20480 bytes, CRC32, windows of 16 KiB, as Ozone's Java code
# serialised it.
RECORD = bytes.fromhex(
    "0a0608641007182a1a0b0a045459504512034b455922250a09375f6368756e6b5f3110001880a0012a120802108080011a04e81722f0"
    "1a04a29120822880a001"
)
# A tree file with a live block, a tombstone and an empty block.
TREE = bytes.fromhex(
    "0864123a08f2dc98c00f121a0807109483f2b3091a0e08001080a0011887afb7be0820012000120a080810f38ff4b6092001"
    "120a080910c6d2e9a40f2000"
)
EMPTY_TREE = bytes.fromhex("086412020800")
ONLY_A_TOMBSTONE = bytes.fromhex("0864120c120a080810f38ff4b6092001")
CONTAINER = ContainerId(100)


def test_a_record_of_ozone_is_read() -> None:
    assert record_from_bytes(RECORD) == BlockRecord(
        CONTAINER,
        BlockId(7),
        42,
        (
            ChunkRecord(
                0,
                20480,
                ChecksumType.CRC32,
                16384,
                (bytes.fromhex("e81722f0"), bytes.fromhex("a2912082")),
                "7_chunk_1",
            ),
        ),
        (("TYPE", "KEY"),),
    )


def test_a_record_of_ozone_is_written_byte_for_byte() -> None:
    assert record_to_bytes(record_from_bytes(RECORD)) == RECORD


def test_zero_commit_and_zero_size_are_written_and_flags_are_not() -> None:
    message = BlockData(flags=3)
    message.blockID.containerID, message.blockID.localID = 1, 2

    written = record_to_bytes(record_from_proto(message))

    assert written == bytes.fromhex("0a060801100218002800")


def test_metadata_are_written_in_the_order_of_java() -> None:
    # A letter beyond the basic plane has a surrogate first, which Java sorts before
    # U+FF5E.
    record = BlockRecord(
        CONTAINER, BlockId(1), 0, (), (("\uff5e", None), ("\U0001f600", ""), ("a", "b"))
    )

    message = BlockData.FromString(record_to_bytes(record))

    assert [(e.key, e.HasField("value")) for e in message.metadata] == [
        ("a", True),
        ("\U0001f600", True),
        ("\uff5e", False),
    ]


def test_a_gap_between_chunks_is_a_records_own_business() -> None:
    message = BlockData.FromString(RECORD)
    message.chunks.add().CopyFrom(message.chunks[0])
    message.chunks[1].offset = 1 << 20
    message.ClearField("size")

    assert [chunk.offset for chunk in record_from_proto(message).chunks] == [0, 1 << 20]


def second_chunk(offset: int) -> Callable[[BlockData], None]:
    def change(message: BlockData) -> None:
        message.chunks.add().CopyFrom(message.chunks[0])
        message.chunks[1].offset = offset
        message.size *= 2

    return change


def field(path: str, value: object) -> Callable[[BlockData], None]:
    def change(message: BlockData) -> None:
        target: object = message.chunks[0] if path.startswith("chunk.") else message
        *parents, name = path.removeprefix("chunk.").split(".")
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return change


def far_away(message: BlockData) -> None:
    message.chunks[0].offset = BLOCK_BYTES_MAX - message.chunks[0].len + 1


def metadata_twice(message: BlockData) -> None:
    message.metadata.add().CopyFrom(message.metadata[0])


def one_checksum_less(message: BlockData) -> None:
    del message.chunks[0].checksumData.checksums[1]


def one_checksum_more(message: BlockData) -> None:
    message.chunks[0].checksumData.checksums.append(b"abcd")


def a_short_checksum(message: BlockData) -> None:
    message.chunks[0].checksumData.checksums[1] = b"abc"


def widths_that_add_up(message: BlockData) -> None:
    message.chunks[0].checksumData.checksums[:] = [b"abc", b"abcde"]


def a_checksum_that_looks_like_two(message: BlockData) -> None:
    """Serialised, the one of 10 bytes holds what could be the start of another."""
    message.chunks[0].checksumData.checksums[:] = [b"abcd\x1a\x04efgh", b""]


def too_many_chunks(message: BlockData) -> None:
    chunk = message.chunks[0]
    message.chunks.extend([chunk] * BLOCK_CHUNKS_MAX)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("chunks_unsorted", second_chunk(0)),
        ("chunks_overlap", second_chunk(20479)),
        ("size_contradicts_chunks", field("size", 20479)),
        ("size_contradicts_chunks", field("size", -1)),
        ("negative_number", field("chunk.offset", (1 << 64) - 1)),
        ("negative_number", field("chunk.len", (1 << 64) - 1)),
        ("negative_number", field("blockID.blockCommitSequenceId", (1 << 64) - 1)),
        ("negative_number", field("chunk.checksumData.bytesPerChecksum", 1 << 31)),
        ("chunk_too_large", field("chunk.len", CHUNK_BYTES_MAX + 1)),
        ("block_too_large", far_away),
        ("window_size", field("chunk.checksumData.bytesPerChecksum", 0)),
        ("checksum_count", one_checksum_less),
        ("checksum_count", one_checksum_more),
        ("checksum_width", a_short_checksum),
        ("checksum_width", widths_that_add_up),
        ("checksum_width", a_checksum_that_looks_like_two),
        ("checksum_width", field("chunk.checksumData.type", "SHA256")),
        ("duplicate_metadata", metadata_twice),
        ("too_many_chunks", too_many_chunks),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_by_name(
    reason: str, change: Callable[[BlockData], None]
) -> None:
    message = BlockData.FromString(RECORD)
    change(message)

    with pytest.raises(RecordInvalidError) as caught:
        record_from_bytes(message.SerializeToString())

    assert caught.value.facts["reason"] == reason


@pytest.mark.parametrize(
    "unknown", [b"\x20\x05", b"\x22\x04abcd"], ids=["a number", "as long as a checksum"]
)
def test_a_field_that_we_do_not_know_is_passed_over_among_checksums(unknown: bytes) -> None:
    sums = BlockData.FromString(RECORD).chunks[0].checksumData.SerializeToString()
    for at in (0, 2, 6, 12, len(sums)):
        message = BlockData.FromString(RECORD)
        message.chunks[0].checksumData.ParseFromString(sums[:at] + unknown + sums[at:])
        assert record_from_proto(message) == record_from_bytes(RECORD)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x01",
        RECORD[:-1],
        RECORD[:20],
        RECORD[10:],
        b"\xff" * 50,
        RECORD.replace(b"\x08\x02\x10", b"\x08\x09\x10"),
    ],
    ids=[
        "empty",
        "garbage",
        "cut",
        "cut in a chunk",
        "no block ID",
        "endless number",
        "unknown checksum type",
    ],
)
def test_bytes_that_are_no_record_are_refused(raw: bytes) -> None:
    with pytest.raises(RecordInvalidError) as caught:
        record_from_bytes(raw)

    assert caught.value.facts["reason"] == "unparsable"


@pytest.mark.parametrize("text", [b"TYPE", b"KEY", b"chunk"])
def test_text_that_is_no_text_is_refused(text: bytes) -> None:
    with pytest.raises(RecordInvalidError) as caught:
        record_from_bytes(RECORD.replace(text, b"\xff" + text[1:]))

    assert caught.value.facts["reason"] == "not_text"


def test_a_chunk_at_the_limit_is_read() -> None:
    message = BlockData.FromString(RECORD)
    message.chunks[0].len = message.size = CHUNK_BYTES_MAX
    message.chunks[0].checksumData.bytesPerChecksum = CHUNK_BYTES_MAX // 2

    assert record_from_proto(message).length_bytes == CHUNK_BYTES_MAX


def test_a_tree_of_ozone_is_read() -> None:
    assert tree_from_bytes(TREE, CONTAINER) == ContainerTree(
        CONTAINER,
        0xF8062E72,
        (
            BlockTree(BlockId(7), 0x967C8194, False, (ChunkTree(0, 20480, 0x87CDD787),)),
            BlockTree(BlockId(8), 0x96DD07F3, True),
            BlockTree(BlockId(9), 0xF49A6946),
        ),
    )


@pytest.mark.parametrize(
    ("raw", "root", "blocks"),
    [(EMPTY_TREE, 0, 0), (ONLY_A_TOMBSTONE, None, 1), (b"", None, 0), (b"\x08\x64", None, 0)],
    ids=["W1 empty", "M3 only a tombstone", "M12 no bytes", "no tree"],
)
def test_no_root_is_told_from_the_root_of_nothing(
    raw: bytes, root: int | None, blocks: int
) -> None:
    tree = tree_from_bytes(raw, CONTAINER)

    assert tree.data_checksum == root
    assert len(tree.blocks) == blocks


@pytest.mark.parametrize("number", [-1, -(1 << 63), (1 << 63) - 1])
def test_any_number_may_stand_where_a_checksum_belongs(number: int) -> None:
    info = ContainerChecksumInfo.FromString(TREE)
    info.containerMerkleTree.dataChecksum = number
    info.containerMerkleTree.blockMerkleTree[0].chunkMerkleTree[0].dataChecksum = number

    tree = tree_from_bytes(info.SerializeToString(), CONTAINER)

    assert tree.data_checksum == tree.blocks[0].chunks[0].data_checksum == number


def refusal(raw: bytes) -> str:
    with pytest.raises(TreeRefusedError) as caught:
        tree_from_bytes(raw, CONTAINER)
    return caught.value.reason


def test_a_tree_of_another_container_is_refused() -> None:
    assert refusal(b"\x08\x65" + TREE[2:]) == "wrong_container"
    assert refusal(TREE[2:]) == "wrong_container"


@pytest.mark.parametrize(
    "raw", [b"\x01\x02\x03", TREE[:-1], b"\x0a"], ids=["M11 junk", "cut", "cut tag"]
)
def test_bytes_that_are_no_tree_are_refused(raw: bytes) -> None:
    assert refusal(raw) == "unparsable"
    assert refusal(b"\x0a" * (MESSAGE_BYTES_MAX + 1)) == "too_large"


@pytest.mark.parametrize("ids", [(8, 7), (7, 7)])
def test_blocks_and_chunks_out_of_order_are_refused(ids: tuple[int, int]) -> None:
    blocks, chunks = ContainerChecksumInfo(containerID=100), ContainerChecksumInfo(containerID=100)
    block = chunks.containerMerkleTree.blockMerkleTree.add(blockID=1)
    for number in ids:
        blocks.containerMerkleTree.blockMerkleTree.add(blockID=number)
        block.chunkMerkleTree.add(offset=number)

    assert refusal(blocks.SerializeToString()) == "blocks_unsorted"
    assert refusal(chunks.SerializeToString()) == "chunks_unsorted"


def test_more_chunks_than_a_block_can_have_are_refused() -> None:
    info = ContainerChecksumInfo(containerID=100)
    block = info.containerMerkleTree.blockMerkleTree.add(blockID=1)
    for offset in range(BLOCK_CHUNKS_MAX + 1):
        block.chunkMerkleTree.add(offset=offset)

    assert refusal(info.SerializeToString()) == "too_many_chunks"


def test_a_tree_file_says_which_container_it_is_of() -> None:
    assert container_id_of_tree(TREE) == 100
    for raw in (b"", b"\x01", TREE[2:]):
        with pytest.raises(TreeRefusedError):
            container_id_of_tree(raw)
