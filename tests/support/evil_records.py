"""Block records that no honest peer sends."""

from collections.abc import Callable
from functools import partial

from google.protobuf.internal.encoder import _VarintBytes

from merkle.tree import BlockId, ContainerId
from protos.convert import record_to_proto
from protos.ozone_datanode_pb2 import BlockData
from tests.support.peers import MemoryReplica, replica_of

BLOCK = BlockId(20)
# What a test asks for: one chunk of that length.
CHUNK_BYTES = 256 << 10


def replica(container_id: ContainerId) -> MemoryReplica:
    """What an honest peer would hold."""
    return replica_of(container_id, {20: CHUNK_BYTES, 21: 5000}, chunk_bytes=CHUNK_BYTES)


def length_field(number: int, data: bytes) -> bytes:
    """A length-delimited field, whatever the message would say to it."""
    return _VarintBytes(number << 3 | 2) + _VarintBytes(len(data)) + data


def raw_record(container_id: ContainerId, change: Callable[[BlockData], object]) -> bytes:
    """An honest record, but for what is changed."""
    message = record_to_proto(replica(container_id).records[BLOCK])
    change(message)
    return message.SerializePartialToString()


def many_chunks(container_id: ContainerId) -> bytes:
    return raw_record(container_id, lambda _: None) + b"\x22\x00" * 12_000_000


def _many_entries(container_id: ContainerId) -> bytes:
    """Metadata of one chunk, each entry of no byte."""
    return raw_record(container_id, lambda _: None) + length_field(4, b"\x22\x00" * 12_000_000)


def _many_checksums(container_id: ContainerId) -> bytes:
    return raw_record(container_id, lambda _: None) + length_field(
        4, length_field(5, b"\x08\x03\x10\x01" + b"\x1a\x00" * 12_000_000)
    )


def _set_chunk(**fields: object) -> Callable[[BlockData], object]:
    def change(message: BlockData) -> None:
        for name, value in fields.items():
            setattr(message.chunks[0], name, value)
        message.ClearField("size")

    return change


def _set_sums(bytes_per_checksum: int) -> Callable[[BlockData], object]:
    def change(message: BlockData) -> None:
        message.chunks[0].checksumData.bytesPerChecksum = bytes_per_checksum

    return change


def _add_chunk(offset: int) -> Callable[[BlockData], object]:
    def change(message: BlockData) -> None:
        message.chunks.append(message.chunks[0])
        message.chunks[-1].offset = offset
        message.ClearField("size")

    return change


def _add_twice(message: BlockData) -> None:
    message.metadata.add(key="a", value="b")
    message.metadata.add(key="a", value="c")


# Records that no honest peer sends: none of them may be taken.
RECORDS: dict[str, Callable[[ContainerId], bytes]] = {
    name: partial(raw_record, change=change)
    for name, change in {
        "a checksum too few": lambda m: m.chunks[0].checksumData.checksums.pop(),
        "a checksum too many": lambda m: m.chunks[0].checksumData.checksums.append(b"abcd"),
        "a checksum of three bytes": lambda m: (
            m.chunks[0].checksumData.checksums.pop(),
            m.chunks[0].checksumData.checksums.append(b"abc"),
        ),
        "no checksums": lambda m: m.chunks[0].checksumData.ClearField("checksums"),
        "windows of no bytes": _set_sums(0),
        "windows of one byte": _set_sums(1),
        "windows of 2^32 - 1 bytes": _set_sums((1 << 32) - 1),
        "windows of twice the length": _set_sums(8192),
        "a chunk of 2^63 bytes": _set_chunk(len=1 << 63),
        "a chunk of 33 MiB": _set_chunk(len=33 << 20),
        "a chunk of no bytes with checksums": _set_chunk(len=0),
        "an offset of 2^64 - 1": _set_chunk(offset=(1 << 64) - 1),
        "an offset beyond any block": _set_chunk(offset=1 << 41),
        "a chunk record twice": _add_chunk(0),
        "chunks that overlap": _add_chunk(1),
        "a size that its chunks do not have": lambda m: setattr(m, "size", 1),
        "a size below 0": lambda m: setattr(m, "size", -1),
        "a commit of 2^63": lambda m: setattr(m.blockID, "blockCommitSequenceId", 1 << 63),
        "metadata twice": _add_twice,
        "a chunk without a name": lambda m: m.chunks[0].ClearField("chunkName"),
    }.items()
} | {
    "chunks out of order": lambda c: raw_record(
        c, lambda m: (_add_chunk(1 << 30)(m), m.chunks.reverse())
    ),
    "a name that is no text": lambda c: raw_record(c, lambda _: None).replace(
        b"20_chunk_1", b"\xff\xfe_chunk_1"
    ),
    "a checksum type that does not exist": lambda c: raw_record(c, lambda _: None).replace(
        b"\x08\x03\x10", b"\x08\x63\x10"
    ),
    "millions of empty chunks": many_chunks,
    "millions of empty entries of metadata": _many_entries,
    "millions of empty checksums": _many_checksums,
}


# A datanode's response with one of these is not a response.
NOT_ONE_RECORD = frozenset({
    "a chunk without a name", "a checksum type that does not exist", "millions of empty chunks",
    "millions of empty entries of metadata", "millions of empty checksums",
})  # fmt: skip
