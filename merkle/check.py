"""Checks whether a tree may be acted on: order, ranges, limits and computed checksums;
and whether a record names its chunks as its own.

Parsing accepts what Ozone accepts. Before a tree drives a repair it must pass here,
because a peer's tree is a claim, not a proof.

Two checksums cannot be recomputed: that of a corrupt chunk, as it was observed, and
that of a tombstone. They are accepted, because a wrong one does no harm. A tombstone's
may be any int64, since Ozone stores and compares it as one. Refusing a number outside
of CRC range would exclude a whole replica, and a malicious peer could send one inside.
"""

import re
from enum import Enum

from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_CHUNKS_MAX,
    CHECKSUM_MAX,
    CHUNK_BYTES_MAX,
    TREE_BLOCKS_MAX,
)
from merkle.record import BlockRecord
from merkle.tree import BlockTree, ContainerTree, block_checksum, container_checksum

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
# Of a file.
_NAME_BYTES_MAX = 255
# As Ozone's clients name a chunk: by its block.
_NAME_OF_BLOCK = re.compile(r"([0-9]{1,20})_chunk_[0-9]+")


class TreeRefusal(Enum):
    """Why a tree is refused: the first five are found by parsing, the others by
    `check_tree`.
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


def check_chunk_names(record: BlockRecord) -> None:
    """Refuse a record of a peer that names a chunk like another one, like one of
    another block, or like a path. No checksum covers a name, and whoever takes the
    record over may keep each chunk in a file of its name, as Ozone's older layouts do.

    Raises:
        RecordInvalidError: its fact `reason` is `chunk_name`.
    """
    seen = set[str]()
    for chunk in record.chunks:
        name = chunk.name
        of_block = _NAME_OF_BLOCK.fullmatch(name)
        fault = ""
        if "/" in name or name in (".", "..") or not name.isprintable():
            fault = "is no name of a file"
        elif len(name.encode()) > _NAME_BYTES_MAX:
            fault = "is too long"
        elif of_block and int(of_block[1]) != record.block_id:
            fault = f"is that of block {of_block[1]}"
        elif name and name in seen:
            fault = "is that of another one"
        if fault:
            text = f"the name of chunk {chunk.offset} of block {record.block_id} {fault}"
            raise RecordInvalidError(text, reason="chunk_name", block_id=record.block_id)
        seen.add(name)


def check_tree(tree: ContainerTree) -> None:
    """Refuse a tree that breaks a rule. A missing root is allowed; the values already
    guarantee the order.

    Raises:
        TreeRefusedError: the tree breaks a rule; `reason` is the value of the first
            `TreeRefusal`.
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
        raise _refused(TreeRefusal.TOMBSTONE_RANGE, "a tombstone's checksum is not an int64", block)
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
        # Without bytes there are no windows, and the fold of nothing is 0.
        if chunk.length_bytes == 0 and chunk.data_checksum != 0:
            raise _refused(
                TreeRefusal.EMPTY_CHUNK_WITH_CHECKSUM, f"empty chunk at {chunk.offset}", block
            )
        end = chunk.offset + chunk.length_bytes
        if end > BLOCK_BYTES_MAX:
            raise _refused(
                TreeRefusal.BLOCK_TOO_LONG, f"chunk ends at {end}, beyond {BLOCK_BYTES_MAX}", block
            )
        # A corrupt chunk's length is what was read, which may differ from its record.
        if chunk.checksum_matches:
            if chunk.offset < healthy_end:
                raise _refused(
                    TreeRefusal.CHUNKS_OVERLAP,
                    f"the chunk at {chunk.offset} overlaps the previous one",
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
