"""Compare our tree with one peer's: what would we need from that peer to match it?

The rules are Ozone's (rows D1-D7), with one difference: blocks are compared by `(deleted, checksum)` and equal
roots end nothing. A tombstone keeps the checksum of the block that it replaces, so a comparison by checksum alone
does not learn of such a delete. Equal states need no exit of their own: nothing comes of walking them.
"""

from dataclasses import dataclass

from merkle.check import TreeRefusal
from merkle.errors import TreeRefusedError
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerTree


@dataclass(frozen=True, slots=True)
class DiffReport:
    """What a peer has that we lack; entries are the peer's. Chunks are listed by block, ascending offset."""

    missing_blocks: tuple[BlockTree, ...] = ()
    missing_chunks: tuple[tuple[BlockId, tuple[ChunkTree, ...]], ...] = ()
    corrupt_chunks: tuple[tuple[BlockId, tuple[ChunkTree, ...]], ...] = ()
    diverged_deletes: tuple[BlockTree, ...] = ()
    # Chunks that we need but that are corrupt at the peer too.
    filtered_chunks: int = 0

    @property
    def needs_repair(self) -> bool:
        """Whether this peer can help; filtered chunks do not count."""
        return bool(self.missing_blocks or self.missing_chunks or self.corrupt_chunks or self.diverged_deletes)


def diff(ours: ContainerTree, theirs: ContainerTree) -> DiffReport:
    """What we should take from the peer to catch up with it; one-directional.

    Raises:
        TreeRefusedError: the trees are of different containers.
    """
    if ours.container_id != theirs.container_id:
        raise TreeRefusedError(
            TreeRefusal.WRONG_CONTAINER.value,
            f"the peer's tree is of container {theirs.container_id}, ours of {ours.container_id}",
        )
    missing_blocks: list[BlockTree] = []
    missing_chunks: list[tuple[BlockId, tuple[ChunkTree, ...]]] = []
    corrupt_chunks: list[tuple[BlockId, tuple[ChunkTree, ...]]] = []
    diverged: list[BlockTree] = []
    filtered = 0
    by_id = {block.block_id: block for block in ours.blocks}
    for theirs_block in theirs.blocks:
        ours_block = by_id.get(theirs_block.block_id)
        if ours_block is None:
            (diverged if theirs_block.deleted else missing_blocks).append(theirs_block)
        elif ours_block.data_checksum == theirs_block.data_checksum and ours_block.deleted == theirs_block.deleted:
            continue
        elif theirs_block.deleted:
            # Of two tombstones the larger checksum stays, so that all replicas end with the same one.
            if not ours_block.deleted or ours_block.data_checksum < theirs_block.data_checksum:
                diverged.append(theirs_block)
        elif not ours_block.deleted:
            missing, corrupt, unusable = _diff_chunks(ours_block.chunks, theirs_block.chunks)
            if missing:
                missing_chunks.append((theirs_block.block_id, missing))
            if corrupt:
                corrupt_chunks.append((theirs_block.block_id, corrupt))
            filtered += unusable
    return DiffReport(tuple(missing_blocks), tuple(missing_chunks), tuple(corrupt_chunks), tuple(diverged), filtered)


def _diff_chunks(
    ours: tuple[ChunkTree, ...], theirs: tuple[ChunkTree, ...]
) -> tuple[tuple[ChunkTree, ...], tuple[ChunkTree, ...], int]:
    """The peer's chunks that we miss, those that are corrupt here, and how many we need that are no good there."""
    by_offset = {chunk.offset: chunk for chunk in ours}
    missing: list[ChunkTree] = []
    corrupt: list[ChunkTree] = []
    filtered = 0
    for chunk in theirs:
        own = by_offset.get(chunk.offset)
        if own is not None and (own.checksum_matches or own.data_checksum == chunk.data_checksum):
            continue
        if not chunk.checksum_matches:
            filtered += 1
        elif own is None:
            missing.append(chunk)
        else:
            corrupt.append(chunk)
    return tuple(missing), tuple(corrupt), filtered
