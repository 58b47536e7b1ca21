"""Builders of trees for tests: `container(block(20, chunk(0)))`.

Checksums are made up from the place, so that equal places are equal everywhere unless a
test says otherwise.
"""

import struct
from dataclasses import replace

from merkle.checksum import fold
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from protos.ozone_datanode_pb2 import (
    BlockMerkleTree,
    ChunkMerkleTree,
    ContainerChecksumInfo,
    ContainerMerkleTree,
)

CHUNK_BYTES = 4096
CONTAINER = ContainerId(12)


def chunk(
    offset: int,
    data_checksum: int | None = None,
    *,
    length_bytes: int = CHUNK_BYTES,
    matches: bool = True,
) -> ChunkTree:
    """A chunk; healthy, and with a checksum of its offset, unless given."""
    if data_checksum is None:
        data_checksum = fold(b"chunk" + struct.pack(">q", offset))
    return ChunkTree(offset, length_bytes, data_checksum, matches)


def chunks(count: int) -> tuple[ChunkTree, ...]:
    """The first `count` chunks of a block, each right behind the one before."""
    return tuple(chunk(i * CHUNK_BYTES) for i in range(count))


def corrupt(healthy: ChunkTree, damage: int = 1) -> ChunkTree:
    """The chunk as a scan finds it after damage; different damage gives different
    observed checksums.
    """
    return replace(healthy, data_checksum=healthy.data_checksum ^ damage, checksum_matches=False)


def unverifiable(offset: int) -> ChunkTree:
    """A chunk of type NONE, as a tree built from metadata has it."""
    return chunk(offset, 0)


def block(block_id: int, *chunk_trees: ChunkTree) -> BlockTree:
    """A live block."""
    return BlockTree.live(BlockId(block_id), chunk_trees)


def deleted(block_id: int, data_checksum: int) -> BlockTree:
    """A tombstone."""
    return BlockTree.tombstone(BlockId(block_id), data_checksum)


def container(*blocks: BlockTree, container_id: int = CONTAINER) -> ContainerTree:
    """A tree with its root."""
    return ContainerTree.of(ContainerId(container_id), blocks)


def without_root(*blocks: BlockTree) -> ContainerTree:
    """A tree that was never built: only what deletions left in it."""
    return ContainerTree(CONTAINER, None, blocks)


def recorded(
    offset: int, *window_checksums: bytes, matches: bool = True, length_bytes: int = 4 << 20
) -> ChunkTree:
    """A chunk whose checksum is the fold of its recorded window checksums."""
    return ChunkTree(offset, length_bytes, fold(b"".join(window_checksums)), matches)


def counted_tree(block_count: int) -> ContainerTree:
    """The conformance rows' test tree: blocks 1..n of 4 chunks at offsets 0..3, window
    checksums counting up from 1.
    """
    builder = TreeBuilder(CONTAINER)
    for i in range(4 * block_count):
        window = bytes((3 * i + k + 1) % 256 for k in range(3))
        builder.add_chunk(BlockId(1 + i // 4), recorded(i % 4, window))
    return builder.build()


def encode_by_protobuf(tree: ContainerTree) -> bytes:
    """The tree file's bytes as the protobuf library writes them: the oracle of our own
    encoder.
    """
    blocks = [
        BlockMerkleTree(
            blockID=block.block_id,
            dataChecksum=block.data_checksum,
            deleted=block.deleted,
            chunkMerkleTree=[
                ChunkMerkleTree(
                    offset=chunk_tree.offset,
                    length=chunk_tree.length_bytes,
                    dataChecksum=chunk_tree.data_checksum,
                    checksumMatches=chunk_tree.checksum_matches,
                )
                for chunk_tree in block.chunks
            ],
        )
        for block in tree.blocks
    ]
    merkle_tree = ContainerMerkleTree(dataChecksum=tree.data_checksum, blockMerkleTree=blocks)
    return ContainerChecksumInfo(
        containerID=tree.container_id, containerMerkleTree=merkle_tree
    ).SerializeToString()
