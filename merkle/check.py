"""Is a tree one that we may act on? Order, ranges, limits and every sum that can be
recomputed.

Parsing accepts what Ozone accepts; before a tree steers a repair it must pass here,
because a peer's tree is evidence, not an order. What cannot be recomputed is believed
only as far as it can do no harm: a corrupt chunk's observed checksum, and a
tombstone's. Nothing proves a tombstone's checksum, so an out-of-range one is not
refused: it would shut out a whole replica for a number that Ozone stores and compares
as any int64, while a liar could send a number in range just as well.
"""

from enum import Enum

from merkle.errors import TreeRefusedError
from merkle.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_CHUNKS_MAX,
    CHECKSUM_MAX,
    CHUNK_BYTES_MAX,
    TREE_BLOCKS_MAX,
)
from merkle.tree import BlockTree, ContainerTree, block_checksum, container_checksum

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1


class TreeRefusal(Enum):
    """Why a tree is not acted on: the first rows are found when it is parsed, the
    others by `check_tree`.
    """

    UNPARSABLE = "unparsable"
    TOO_LARGE = "too_large"
    WRONG_CONTAINER = "wrong_container"
    BLOCKS_UNSORTED = "blocks_unsorted"
    CHUNKS_UNSORTED = "chunks_unsorted"

    CONTAINER_ID_RANGE = "container_id_range"
    TOO_MANY_BLOCKS = "too_many_blocks"
    TOO_MANY_CHUNKS = "too_many_chunks"
    BLOCK_ID_RANGE = "block_id_range"
    TOMBSTONE_RANGE = "tombstone_range"
    TOMBSTONE_WITH_CHUNKS = "tombstone_with_chunks"
    CHUNK_OFFSET_RANGE = "chunk_offset_range"
    CHUNK_LENGTH_RANGE = "chunk_length_range"
    CHUNK_CHECKSUM_RANGE = "chunk_checksum_range"
    EMPTY_CHUNK_WITH_CHECKSUM = "empty_chunk_with_checksum"
    BLOCK_TOO_LONG = "block_too_long"
    CHUNKS_OVERLAP = "chunks_overlap"
    BLOCK_CHECKSUM = "block_checksum"
    ROOT_CHECKSUM = "root_checksum"


def check_tree(tree: ContainerTree) -> None:
    """Refuse a tree that breaks a rule; order is already guaranteed by the values. A
    missing root is allowed.

    Raises:
        TreeRefusedError: with the `TreeRefusal` of the first broken rule as its reason.
    """
    if not 0 < tree.container_id <= _INT64_MAX:
        raise _refused(TreeRefusal.CONTAINER_ID_RANGE, f"container ID {tree.container_id}")
    if len(tree.blocks) > TREE_BLOCKS_MAX:
        raise _refused(
            TreeRefusal.TOO_MANY_BLOCKS, f"{len(tree.blocks)} blocks, more than {TREE_BLOCKS_MAX}"
        )
    for block in tree.blocks:
        if not 0 <= block.block_id <= _INT64_MAX:
            raise _refused(TreeRefusal.BLOCK_ID_RANGE, f"block ID {block.block_id}")
        if block.deleted:
            _check_tombstone(block)
        else:
            _check_live(block)
    if tree.data_checksum is not None and tree.data_checksum != container_checksum(
        [block.data_checksum for block in tree.blocks]
    ):
        raise _refused(TreeRefusal.ROOT_CHECKSUM, "the root is not the fold of its blocks")


def _check_tombstone(block: BlockTree) -> None:
    if not _INT64_MIN <= block.data_checksum <= _INT64_MAX:
        raise _refused(TreeRefusal.TOMBSTONE_RANGE, "a tombstone's checksum is no int64", block)
    if block.chunks:
        raise _refused(TreeRefusal.TOMBSTONE_WITH_CHUNKS, "a deleted block has chunks", block)


def _check_live(block: BlockTree) -> None:
    if len(block.chunks) > BLOCK_CHUNKS_MAX:
        raise _refused(
            TreeRefusal.TOO_MANY_CHUNKS,
            f"{len(block.chunks)} chunks, more than {BLOCK_CHUNKS_MAX}",
            block,
        )
    healthy_end = 0
    for chunk in block.chunks:
        if not 0 <= chunk.offset <= BLOCK_BYTES_MAX:
            raise _refused(TreeRefusal.CHUNK_OFFSET_RANGE, f"chunk offset {chunk.offset}", block)
        if not 0 <= chunk.length_bytes <= CHUNK_BYTES_MAX:
            raise _refused(
                TreeRefusal.CHUNK_LENGTH_RANGE, f"chunk length {chunk.length_bytes}", block
            )
        if not 0 <= chunk.data_checksum <= CHECKSUM_MAX:
            raise _refused(
                TreeRefusal.CHUNK_CHECKSUM_RANGE, f"chunk checksum {chunk.data_checksum}", block
            )
        # No bytes, no windows: the fold of nothing is 0.
        if chunk.length_bytes == 0 and chunk.data_checksum != 0:
            raise _refused(
                TreeRefusal.EMPTY_CHUNK_WITH_CHECKSUM, f"empty chunk at {chunk.offset}", block
            )
        end = chunk.offset + chunk.length_bytes
        if end > BLOCK_BYTES_MAX:
            raise _refused(
                TreeRefusal.BLOCK_TOO_LONG, f"chunk ends at {end}, beyond {BLOCK_BYTES_MAX}", block
            )
        # Only healthy chunks have their recorded length for certain.
        if chunk.checksum_matches:
            if chunk.offset < healthy_end:
                raise _refused(
                    TreeRefusal.CHUNKS_OVERLAP,
                    f"chunk at {chunk.offset} begins in the one before",
                    block,
                )
            healthy_end = end
    if block.data_checksum != block_checksum(
        block.block_id, [chunk.data_checksum for chunk in block.chunks]
    ):
        raise _refused(
            TreeRefusal.BLOCK_CHECKSUM, "the block's checksum is not the fold of its chunks", block
        )


def _refused(reason: TreeRefusal, message: str, block: BlockTree | None = None) -> TreeRefusedError:
    if block is None:
        return TreeRefusedError(reason.value, message)
    return TreeRefusedError(
        reason.value, f"block {block.block_id}: {message}", block_id=block.block_id
    )
