"""The Merkle tree of one replica, with three levels: container, block, chunk.

Every node's data checksum is a CRC32C, 0..2^32-1 in a signed 64-bit field. A chunk's
covers its window checksums; a block's covers its ID and its chunks' checksums; the
container's covers the checksums of all blocks, also deleted ones. No checksum covers
lengths, offsets or flags. A deleted block is a tombstone: it keeps the checksum it was
deleted with and has no chunks. The rules are those of Ozone's
ContainerMerkleTreeWriter.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType, Self

from merkle.checksum import fold

ContainerId = NewType("ContainerId", int)
BlockId = NewType("BlockId", int)


@dataclass(frozen=True, slots=True)
class ChunkTree:
    """A leaf: one chunk as last read from disk. `data_checksum` is any int64,
    `length_bytes` the number of bytes that were read.
    """

    offset: int
    length_bytes: int
    data_checksum: int
    checksum_matches: bool = True


@dataclass(frozen=True, slots=True)
class BlockTree:
    """One block: either live, its chunks in ascending offset order, or a tombstone
    without chunks.
    """

    block_id: BlockId
    data_checksum: int
    deleted: bool = False
    chunks: tuple[ChunkTree, ...] = ()

    def __post_init__(self) -> None:
        assert all(a.offset < b.offset for a, b in zip(self.chunks, self.chunks[1:], strict=False))

    @classmethod
    def live(cls, block_id: BlockId, chunks: Iterable[ChunkTree] = ()) -> Self:
        """A live block with its computed checksum; chunks may be in any order, their
        offsets must differ.
        """
        ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offset))
        return cls(
            block_id, block_checksum(block_id, [c.data_checksum for c in ordered]), False, ordered
        )

    @classmethod
    def tombstone(cls, block_id: BlockId, data_checksum: int) -> Self:
        """A deleted block; its checksum cannot be verified."""
        return cls(block_id, data_checksum, True)


@dataclass(frozen=True, slots=True)
class ContainerTree:
    """The tree of one replica: blocks in ascending ID order.

    `data_checksum` is None if no root was ever computed; 0 is the root of an empty
    tree.
    """

    container_id: ContainerId
    data_checksum: int | None
    blocks: tuple[BlockTree, ...] = ()

    def __post_init__(self) -> None:
        assert all(
            a.block_id < b.block_id for a, b in zip(self.blocks, self.blocks[1:], strict=False)
        )

    @classmethod
    def of(cls, container_id: ContainerId, blocks: Iterable[BlockTree]) -> Self:
        """A tree with its computed root; blocks may be in any order, their IDs must
        differ.
        """
        ordered = tuple(sorted(blocks, key=lambda block: block.block_id))
        return cls(container_id, container_checksum([b.data_checksum for b in ordered]), ordered)

    def block(self, block_id: BlockId) -> BlockTree | None:
        """The entry of one block, live or deleted; None if there is none."""
        index = bisect_left(self.blocks, block_id, key=lambda block: block.block_id)
        return (
            self.blocks[index]
            if index < len(self.blocks) and self.blocks[index].block_id == block_id
            else None
        )


def block_checksum(block_id: int, chunk_checksums: Iterable[int]) -> int:
    """CRC32C over the ID and the chunk checksums, each a big-endian int64."""
    values = [block_id, *chunk_checksums]
    return fold(struct.pack(f">{len(values)}q", *values))


def container_checksum(block_checksums: Iterable[int]) -> int:
    """CRC32C over the block checksums, each a big-endian int64; 0 without blocks."""
    values = list(block_checksums)
    return fold(struct.pack(f">{len(values)}q", *values))


def root_hex(data_checksum: int | None) -> str:
    """A root as Ozone prints it: lower-case hex without padding, "0" if unknown."""
    return f"{(data_checksum or 0) & 0xFFFF_FFFF_FFFF_FFFF:x}"


class TreeBuilder:
    """Collects blocks and chunks in any order and builds the tree (Ozone's writer, rows
    W1-W17).
    """

    def __init__(self, container_id: ContainerId, start: ContainerTree | None = None) -> None:
        """Start empty, or from a tree whose chunk and tombstone checksums are taken
        over unchecked.
        """
        self._container_id = container_id
        self._live: dict[BlockId, dict[int, ChunkTree]] = {}
        self._deleted: dict[BlockId, int] = {}
        for block in start.blocks if start else ():
            if block.deleted:
                self.set_deleted(block.block_id, block.data_checksum)
            else:
                self.add_block(block.block_id)
                for chunk in block.chunks:
                    self.add_chunk(block.block_id, chunk)

    def add_block(self, block_id: BlockId) -> None:
        """Add an empty live block; an existing block or tombstone stays."""
        if block_id not in self._deleted:
            self._live.setdefault(block_id, {})

    def add_chunk(self, block_id: BlockId, chunk: ChunkTree) -> None:
        """Add a chunk, and its block if necessary. It replaces a chunk at the same
        offset, but not a tombstone.
        """
        if block_id not in self._deleted:
            self._live.setdefault(block_id, {})[chunk.offset] = chunk

    def set_deleted(self, block_id: BlockId, data_checksum: int) -> None:
        """Make the block a tombstone with this checksum; it replaces any entry."""
        self._live.pop(block_id, None)
        self._deleted[block_id] = data_checksum

    def delete_recorded(self, block_id: BlockId, chunk_checksums: Iterable[int]) -> None:
        """Make the block a tombstone with the checksum over its recorded chunks, given
        in offset order.
        """
        self.set_deleted(block_id, block_checksum(block_id, chunk_checksums))

    def build(self, *, compute_root: bool = True) -> ContainerTree:
        """The tree of all entries; callers that know only tombstones so far ask for no
        root.
        """
        blocks = [
            BlockTree.live(block_id, chunks.values()) for block_id, chunks in self._live.items()
        ]
        blocks += [
            BlockTree.tombstone(block_id, checksum) for block_id, checksum in self._deleted.items()
        ]
        tree = ContainerTree.of(self._container_id, blocks)
        return tree if compute_root else ContainerTree(self._container_id, None, tree.blocks)
