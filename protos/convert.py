"""Messages <-> values, checked on the way in; nothing else turns one into the other.

Reading is as lenient as Ozone where Ozone's own files are concerned (a tree may lack
its root, any int64 may stand where a checksum belongs) and strict where a wrong guess
would cost data: a record that contradicts itself is refused with a named reason, never
repaired in passing. Writing gives the bytes that Ozone writes for the same content.
Like Ozone, a record does not carry the unused `flags` nor unknown fields; whoever
leaves a record as it is leaves its bytes.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import numpy as np
from google.protobuf.message import DecodeError

from merkle.check import TreeRefusal
from merkle.checksum import WIDTH, ChecksumType
from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_CHUNKS_MAX,
    CHUNK_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    TREE_BLOCKS_MAX,
)
from merkle.record import BlockRecord, ChunkRecord, DeleteTransaction, WindowChecksums
from merkle.tree import (
    BlockId,
    BlockTree,
    ChunkTree,
    ContainerId,
    ContainerTree,
    container_checksum,
)
from protos.ozone_datanode_pb2 import (
    BlockData,
    BlockMerkleTree,
    ChecksumData,
    ChunkInfo,
    ContainerChecksumInfo,
    ContainerMerkleTree,
    DatanodeBlockID,
    DeletedBlocksTransaction,
    KeyValue,
)
from protos.raw_fields import exceeds_count, raw_fields

# Java reads the uint64 and uint32 fields as signed numbers; beyond these they would
# turn negative there.
_INT64_MAX = (1 << 63) - 1
_INT32_MAX = (1 << 31) - 1

# How a checksum stands in a serialised ChecksumData: its tag, that of a field with a
# length; its length; itself.
_CHECKSUMS_TAG = ChecksumData.CHECKSUMS_FIELD_NUMBER << 3 | 2
_ROW = {
    kind: np.dtype([("start", "V2"), ("checksum", f"V{width}")]) for kind, width in WIDTH.items()
}

# How the fields of a serialised tree begin: numbers, and messages, which have a length.
_CONTAINER_ID = ContainerChecksumInfo.CONTAINERID_FIELD_NUMBER << 3
_TREE = ContainerChecksumInfo.CONTAINERMERKLETREE_FIELD_NUMBER << 3 | 2
_ROOT = ContainerMerkleTree.DATACHECKSUM_FIELD_NUMBER << 3
_BLOCK = ContainerMerkleTree.BLOCKMERKLETREE_FIELD_NUMBER << 3 | 2
_BLOCK_ID = BlockMerkleTree.BLOCKID_FIELD_NUMBER << 3
_BLOCK_CHECKSUM = BlockMerkleTree.DATACHECKSUM_FIELD_NUMBER << 3
_BLOCK_DELETED = BlockMerkleTree.DELETED_FIELD_NUMBER << 3
_CHUNK = BlockMerkleTree.CHUNKMERKLETREE_FIELD_NUMBER << 3 | 2

# Parts of all records of one message: fields of chunks with their metadata, of which a
# chunk has some ten; and checksums, of which the largest message holds six million.
# Parsed, they take some 100 and 40 bytes each.
_CHUNK_FIELDS_MAX = 20 * BLOCK_CHUNKS_MAX
_CHECKSUMS_MAX = 4_000_000

_Metadata = tuple[tuple[str, str | None], ...]

# Field 3, a varint: a block ID in a delete transaction.
_LOCAL_ID_TAG = 0x18


def tree_from_bytes(raw: bytes, container_id: ContainerId) -> ContainerTree:
    """The tree in a serialised `ContainerChecksumInfo`, as a tree file or a peer holds
    it.

    Accepts what Ozone accepts: any int64, no root, no tree, and no bytes at all, which
    is a tree without root or blocks. It is not proven to be right:
    `merkle.check.check_tree` does that.

    Raises:
        TreeRefusedError: for what the first rows of TreeRefusal name, and for too many
            blocks or chunks.
    """
    if len(raw) > MESSAGE_BYTES_MAX:
        raise TreeRefusedError(
            TreeRefusal.TOO_LARGE.value, f"the tree of container {container_id} is {len(raw)} bytes"
        )
    try:
        info = ContainerChecksumInfo.FromString(raw)
    except DecodeError as error:
        raise TreeRefusedError(
            TreeRefusal.UNPARSABLE.value, f"the tree of container {container_id} cannot be parsed"
        ) from error
    if raw and info.containerID != container_id:
        raise TreeRefusedError(
            TreeRefusal.WRONG_CONTAINER.value,
            f"the tree of container {container_id} says it is that of {info.containerID}",
        )
    tree = info.containerMerkleTree
    if len(tree.blockMerkleTree) > TREE_BLOCKS_MAX:
        raise TreeRefusedError(
            TreeRefusal.TOO_MANY_BLOCKS.value,
            f"the tree of container {container_id} has {len(tree.blockMerkleTree)} blocks",
        )
    blocks = tuple(_block_tree(block, container_id) for block in tree.blockMerkleTree)
    for before, after in pairwise(blocks):
        if before.block_id >= after.block_id:
            raise TreeRefusedError(
                TreeRefusal.BLOCKS_UNSORTED.value,
                f"in the tree of container {container_id} block {after.block_id} follows"
                f" {before.block_id}",
            )
    return ContainerTree(
        container_id, tree.dataChecksum if tree.HasField("dataChecksum") else None, blocks
    )


def tombstones_from_bytes(raw: bytes, container_id: ContainerId) -> tuple[BlockTree, ...]:
    """The tombstones in a serialised `ContainerChecksumInfo` of any size; nothing else
    of it is unpacked.

    None at all unless all of it adds up: its ID, the order of its blocks, and its root
    where it has one. A tombstone with chunks belies it too: one flipped bit makes that
    of a live block.
    """
    said, root, last_id = None, None, None
    checksums, tombstones = list[int](), list[BlockTree]()
    try:
        for tag, value, part in raw_fields(memoryview(raw)):
            if tag == _CONTAINER_ID:
                said = value
            for inner_tag, number, block in raw_fields(part) if tag == _TREE else ():
                if inner_tag == _ROOT:
                    root = _int64(number)
                if inner_tag != _BLOCK:
                    continue
                head = {field: found for field, found, _ in raw_fields(block)}
                block_id, checksum = (
                    _int64(head.get(_BLOCK_ID, 0)),
                    _int64(head.get(_BLOCK_CHECKSUM, 0)),
                )
                is_deleted = bool(head.get(_BLOCK_DELETED))
                if (last_id is not None and block_id <= last_id) or (is_deleted and _CHUNK in head):
                    return ()
                last_id = block_id
                checksums.append(checksum)
                if is_deleted:
                    tombstones.append(BlockTree.tombstone(BlockId(block_id), checksum))
    except DecodeError:
        return ()
    is_right = said == container_id and root in (None, container_checksum(checksums))
    return tuple(tombstones) if is_right else ()


def container_id_of_tree(raw: bytes) -> ContainerId:
    """The container that a serialised `ContainerChecksumInfo` says it is of.

    Raises:
        TreeRefusedError: it cannot be parsed, or names none.
    """
    try:
        info = ContainerChecksumInfo.FromString(raw)
    except DecodeError as error:
        raise TreeRefusedError(TreeRefusal.UNPARSABLE.value, "the tree cannot be parsed") from error
    if not info.HasField("containerID"):
        raise TreeRefusedError(TreeRefusal.WRONG_CONTAINER.value, "the tree names no container")
    return ContainerId(info.containerID)


def _block_tree(block: BlockMerkleTree, container_id: ContainerId) -> BlockTree:
    if len(block.chunkMerkleTree) > BLOCK_CHUNKS_MAX:
        raise TreeRefusedError(
            TreeRefusal.TOO_MANY_CHUNKS.value,
            f"block {block.blockID} of container {container_id} has {len(block.chunkMerkleTree)}"
            " chunks in the tree",
        )
    chunks = tuple(
        ChunkTree(c.offset, c.length, c.dataChecksum, c.checksumMatches)
        for c in block.chunkMerkleTree
    )
    for before, after in pairwise(chunks):
        if before.offset >= after.offset:
            raise TreeRefusedError(
                TreeRefusal.CHUNKS_UNSORTED.value,
                f"in the tree of container {container_id} chunk {after.offset} of block"
                f" {block.blockID} follows {before.offset}",
            )
    return BlockTree(BlockId(block.blockID), block.dataChecksum, block.deleted, chunks)


def _int64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def record_from_bytes(raw: bytes) -> BlockRecord:
    """The record in a serialised `BlockData`, as kept in RocksDB.

    Raises:
        RecordInvalidError: as `record_from_proto`; also `unparsable` where the bytes
            are no such message.
    """
    if has_too_many_parts(raw):
        raise _invalid("too_many_chunks", "a block record has more parts than a block holds")
    try:
        return record_from_proto(BlockData.FromString(raw))
    except DecodeError as error:
        raise _invalid("unparsable", "a block record cannot be parsed") from error


def has_too_many_parts(raw: bytes, *path: int) -> bool:
    """Whether the `BlockData` at this path of field numbers, in a serialised message,
    would take too much memory when parsed.
    """
    chunks = BlockData.CHUNKS_FIELD_NUMBER
    within = {
        ChunkInfo.METADATA_FIELD_NUMBER: _CHUNK_FIELDS_MAX,
        ChunkInfo.CHECKSUMDATA_FIELD_NUMBER: _CHECKSUMS_MAX,
    }
    return any(
        exceeds_count(raw, *path, chunks, field, count_max=count_max)
        for field, count_max in within.items()
    )


def record_from_proto(message: BlockData) -> BlockRecord:
    """The record in a `BlockData` message.

    Raises:
        RecordInvalidError: its fact `reason` is one of `too_many_chunks`,
            `chunks_unsorted`, `chunks_overlap`, `size_contradicts_chunks`,
            `block_too_large`, or one of `chunk_from_proto`.
    """
    # Parsing does not ask for required fields; a checksum type that we do not know
    # counts as missing.
    if not message.IsInitialized():
        raise _invalid("unparsable", "a block record lacks a field")
    block_id = message.blockID.localID
    if len(message.chunks) > BLOCK_CHUNKS_MAX:
        raise _invalid(
            "too_many_chunks", f"block {block_id} has {len(message.chunks)} chunks", block_id
        )
    if message.blockID.blockCommitSequenceId > _INT64_MAX:
        raise _invalid(
            "negative_number", f"block {block_id} has a negative commit sequence ID", block_id
        )
    chunks = tuple(chunk_from_proto(chunk, block_id) for chunk in message.chunks)
    for before, after in pairwise(chunks):
        if before.offset >= after.offset:
            text = f"chunk {after.offset} of block {block_id} follows {before.offset}"
            raise _invalid("chunks_unsorted", text, block_id)
        if before.end > after.offset:
            text = f"chunk {before.offset} of block {block_id} runs into chunk {after.offset}"
            raise _invalid("chunks_overlap", text, block_id)
    if chunks and chunks[-1].end > BLOCK_BYTES_MAX:
        raise _invalid("block_too_large", f"block {block_id} ends at {chunks[-1].end}", block_id)
    record = BlockRecord(
        ContainerId(message.blockID.containerID),
        BlockId(block_id),
        message.blockID.blockCommitSequenceId,
        chunks,
        _metadata_from_proto(message.metadata, block_id),
        message.blockID.replicaIndex if message.blockID.HasField("replicaIndex") else None,
    )
    # Ozone fails on this too: a size that differs from its chunks means that one of
    # them is wrong.
    if message.HasField("size") and message.size != record.length_bytes:
        text = f"block {block_id} has size {message.size} and chunks of {record.length_bytes} bytes"
        raise _invalid("size_contradicts_chunks", text, block_id)
    return record


def chunk_from_proto(message: ChunkInfo, block_id: int | None = None) -> ChunkRecord:
    """The chunk record in a `ChunkInfo` message.

    Raises:
        RecordInvalidError: its fact `reason` is one of `unparsable`, `negative_number`,
            `chunk_too_large`, `window_size`, `checksum_count`, `checksum_width`,
            `duplicate_metadata`, `not_text`.
    """
    where = f"chunk {message.offset} of block {block_id}"
    if not message.IsInitialized():
        raise _invalid("unparsable", f"{where} lacks a field", block_id)
    data = message.checksumData
    kind, checksums = ChecksumType(data.type), None
    if message.offset > _INT64_MAX or message.len > _INT64_MAX:
        raise _invalid("negative_number", f"{where} has a negative offset or length", block_id)
    if message.len > CHUNK_BYTES_MAX:
        raise _invalid("chunk_too_large", f"{where} is {message.len} bytes", block_id)
    if data.bytesPerChecksum > _INT32_MAX:
        raise _invalid("negative_number", f"{where} has a negative window size", block_id)
    # Without checksums there are no windows, and a writer may record any size for them.
    if kind is not ChecksumType.NONE:
        if data.bytesPerChecksum == 0:
            raise _invalid("window_size", f"{where} has windows of 0 bytes", block_id)
        windows = -(-message.len // data.bytesPerChecksum)
        if len(data.checksums) != windows:
            text = f"{where} has {len(data.checksums)} checksums for {windows} windows"
            raise _invalid("checksum_count", text, block_id)
        checksums = _of_width(data, kind)
        if checksums is None:
            raise _invalid(
                "checksum_width", f"{where} has a checksum that is no {kind.name}", block_id
            )
    return ChunkRecord(
        message.offset,
        message.len,
        kind,
        data.bytesPerChecksum,
        tuple(data.checksums) if checksums is None else checksums,
        _text(message.chunkName, block_id),
        _metadata_from_proto(message.metadata, block_id),
        message.stripeChecksum if message.HasField("stripeChecksum") else None,
    )


def record_to_bytes(record: BlockRecord) -> bytes:
    """The record as Ozone writes it, byte for byte."""
    return record_to_proto(record).SerializeToString()


def record_to_proto(record: BlockRecord) -> BlockData:
    """The record as a message; Ozone writes the commit sequence ID and the size even
    where they are 0.
    """
    block_id = DatanodeBlockID(
        containerID=record.container_id,
        localID=record.block_id,
        blockCommitSequenceId=record.bcs_id,
    )
    if record.replica_index is not None:
        block_id.replicaIndex = record.replica_index
    return BlockData(
        blockID=block_id,
        metadata=_metadata_to_proto(record.metadata),
        chunks=[chunk_to_proto(chunk) for chunk in record.chunks],
        size=record.length_bytes,
    )


def chunk_to_proto(chunk: ChunkRecord) -> ChunkInfo:
    """The chunk record as a message."""
    message = ChunkInfo(
        chunkName=chunk.name,
        offset=chunk.offset,
        len=chunk.length_bytes,
        metadata=_metadata_to_proto(chunk.metadata),
        checksumData=ChecksumData(
            type=chunk.checksum_type.name,
            bytesPerChecksum=chunk.bytes_per_checksum,
            checksums=chunk.checksums,
        ),
    )
    if chunk.stripe_checksum is not None:
        message.stripeChecksum = chunk.stripe_checksum
    return message


def delete_transaction_from_bytes(raw: bytes) -> DeleteTransaction:
    """The transaction in a serialised `DeletedBlocksTransaction`, as kept in RocksDB.

    Raises:
        RecordInvalidError: reason `unparsable`.
    """
    try:
        message = DeletedBlocksTransaction.FromString(raw)
    except DecodeError as error:
        raise _invalid("unparsable", "a delete transaction cannot be parsed") from error
    if not message.IsInitialized():
        raise _invalid("unparsable", "a delete transaction lacks a field")
    return DeleteTransaction(
        message.txID,
        ContainerId(message.containerID),
        tuple(BlockId(block_id) for block_id in message.localID),
        message.totalSizePerReplica if message.HasField("totalSizePerReplica") else None,
    )


def may_delete_block(raw: bytes, block_id: BlockId) -> bool:
    """Whether a delete transaction that cannot be parsed may name the block: its field
    stands somewhere in the bytes.
    """
    number, field = int(block_id), bytearray([_LOCAL_ID_TAG])
    while number >= 0x80:
        field.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*field, number]) in raw


def delete_transaction_to_bytes(transaction: DeleteTransaction) -> bytes:
    """The transaction as it came from the cluster, as far as a datanode goes by it."""
    message = DeletedBlocksTransaction(
        txID=transaction.tx_id, containerID=transaction.container_id, localID=transaction.block_ids
    )
    # Required by older datanodes, which count tries in it.
    message.count = 0
    if transaction.replica_bytes is not None:
        message.totalSizePerReplica = transaction.replica_bytes
    return message.SerializeToString()


def _of_width(data: ChecksumData, kind: ChecksumType) -> WindowChecksums | None:
    """The checksums, or None where one has not the width that its type demands."""
    # Serialised, each is a tag, its length and itself. If that is what the bytes behind
    # the other fields are, as often as there are checksums, all have the width, and
    # none was made an object, which takes several times as long.
    raw, head, count = (
        data.SerializeToString(),
        _head(kind, data.bytesPerChecksum),
        len(data.checksums),
    )
    row, width = _ROW[kind], WIDTH[kind]
    if raw.startswith(head) and len(raw) >= len(head) + count * row.itemsize:
        rows = np.frombuffer(raw, row, count, len(head))
        if rows["start"].tobytes() == bytes((_CHECKSUMS_TAG, width)) * count:
            return WindowChecksums(rows["checksum"].tobytes(), width)
    # Nobody promises how a message is serialised, so it is a look at each that refuses.
    return (
        WindowChecksums(b"".join(data.checksums), width)
        if {*map(len, data.checksums)} <= {width}
        else None
    )


@lru_cache
def _head(kind: ChecksumType, bytes_per_checksum: int) -> bytes:
    """What comes before the checksums."""
    return ChecksumData(type=kind.name, bytesPerChecksum=bytes_per_checksum).SerializeToString()


def _metadata_from_proto(entries: Iterable[KeyValue], block_id: int | None) -> _Metadata:
    metadata = tuple(
        (
            _text(entry.key, block_id),
            _text(entry.value, block_id) if entry.HasField("value") else None,
        )
        for entry in entries
    )
    if len({key for key, _ in metadata}) != len(metadata):
        raise _invalid("duplicate_metadata", f"block {block_id} has a metadata key twice", block_id)
    return metadata


def _text(value: object, block_id: int | None) -> str:
    # What is not UTF-8 reaches us as bytes, whatever the stub says.
    if not isinstance(value, str):
        raise _invalid(
            "not_text", f"block {block_id} has a name or metadata that is not UTF-8", block_id
        )
    return value


def _metadata_to_proto(metadata: _Metadata) -> list[KeyValue]:
    # Java sorts by UTF-16 code unit, which differs from Python's order beyond the basic
    # plane.
    ordered = sorted(metadata, key=lambda entry: entry[0].encode("utf-16-be"))
    return [KeyValue(key=key, value=value) for key, value in ordered]


def _invalid(reason: str, message: str, block_id: int | None = None) -> RecordInvalidError:
    return RecordInvalidError(message, reason=reason, block_id=block_id)
