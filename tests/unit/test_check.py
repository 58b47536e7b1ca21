"""Which trees are acted on, with the reason for each refusal."""

from dataclasses import replace

import pytest

from merkle.check import TreeRefusal, check_tree
from merkle.errors import TreeRefusedError
from merkle.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_CHUNKS_MAX,
    CHECKSUM_MAX,
    CHUNK_BYTES_MAX,
    TREE_BLOCKS_MAX,
)
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from tests.support.trees import (
    CHUNK_BYTES,
    CONTAINER,
    block,
    chunk,
    chunks,
    container,
    corrupt,
    deleted,
    unverifiable,
    without_root,
)

INT64_MAX = (1 << 63) - 1


def healthy_with(*chunk_trees: ChunkTree) -> ContainerTree:
    """All sums are right; only the chunks themselves may break a rule."""
    return container(block(20, *chunk_trees))


def lying_block() -> ContainerTree:
    honest = block(20, *chunks(2))
    return container(replace(honest, data_checksum=honest.data_checksum ^ 1))


def without_its_id() -> ContainerTree:
    """Feature-branch builds of Ozone folded the chunks without the block's ID."""
    return container(BlockTree(BlockId(20), 0, False, chunks(2)))


def lying_root() -> ContainerTree:
    honest = container(block(20, *chunks(2)))
    return ContainerTree(CONTAINER, 5, honest.blocks)


ACCEPTED = {
    "a healthy tree": container(block(20, *chunks(4)), block(21, chunk(0)), deleted(22, 5)),
    "an empty tree": container(),
    "a tree that was never built": without_root(deleted(20, 5)),
    "a block without chunks": container(block(20)),
    "block ID 0": container(block(0, chunk(0))),
    "the largest IDs": container(block(INT64_MAX, chunk(0)), container_id=INT64_MAX),
    "a chunk without recorded checksums": healthy_with(unverifiable(0)),
    "an empty chunk": healthy_with(chunk(0), chunk(CHUNK_BYTES, 0, length_bytes=0)),
    "a corrupt chunk": healthy_with(corrupt(chunk(0)), chunk(CHUNK_BYTES)),
    "a corrupt chunk that is cut short": healthy_with(
        chunk(0, length_bytes=100, matches=False), chunk(CHUNK_BYTES)
    ),
    "a corrupt chunk of which nothing could be read": healthy_with(chunk(0, 0, matches=False)),
    # Only a healthy chunk's length is the recorded one, and only healthy chunks are
    # copied.
    "a corrupt chunk beginning in the one before": healthy_with(chunk(0), corrupt(chunk(100))),
    "a gap between chunks": healthy_with(chunk(0), chunk(3 * CHUNK_BYTES)),
    "the largest checksum": healthy_with(chunk(0, CHECKSUM_MAX)),
    "the longest chunk": healthy_with(chunk(0, length_bytes=CHUNK_BYTES_MAX)),
    "the longest block": healthy_with(chunk(BLOCK_BYTES_MAX - CHUNK_BYTES)),
    "the largest offset": healthy_with(chunk(BLOCK_BYTES_MAX, 0, length_bytes=0)),
    # Nothing proves a tombstone's checksum; Ozone stores and compares any int64.
    "a negative tombstone": container(deleted(20, -1)),
    "the largest tombstone": container(deleted(20, INT64_MAX)),
    "the smallest tombstone": container(deleted(20, -(1 << 63))),
}

REFUSED = [
    ("container ID 0", container(container_id=0), TreeRefusal.CONTAINER_ID_RANGE),
    ("a negative container ID", container(container_id=-1), TreeRefusal.CONTAINER_ID_RANGE),
    (
        "a container ID beyond int64",
        container(container_id=INT64_MAX + 1),
        TreeRefusal.CONTAINER_ID_RANGE,
    ),
    ("a negative block ID", container(block(-1, chunk(0))), TreeRefusal.BLOCK_ID_RANGE),
    ("a deleted block with a negative ID", container(deleted(-1, 5)), TreeRefusal.BLOCK_ID_RANGE),
    (
        "a tombstone beyond int64",
        without_root(deleted(20, INT64_MAX + 1)),
        TreeRefusal.TOMBSTONE_RANGE,
    ),
    (
        "a tombstone with chunks",
        container(BlockTree(BlockId(20), 5, True, chunks(1))),
        TreeRefusal.TOMBSTONE_WITH_CHUNKS,
    ),
    ("a negative offset", healthy_with(chunk(-1, 5)), TreeRefusal.CHUNK_OFFSET_RANGE),
    (
        "an offset above the limit",
        healthy_with(chunk(BLOCK_BYTES_MAX + 1, 0, length_bytes=0)),
        TreeRefusal.CHUNK_OFFSET_RANGE,
    ),
    ("a negative length", healthy_with(chunk(0, length_bytes=-1)), TreeRefusal.CHUNK_LENGTH_RANGE),
    (
        "a length above the limit",
        healthy_with(chunk(0, length_bytes=CHUNK_BYTES_MAX + 1)),
        TreeRefusal.CHUNK_LENGTH_RANGE,
    ),
    ("a negative checksum", healthy_with(chunk(0, -1)), TreeRefusal.CHUNK_CHECKSUM_RANGE),
    (
        "a checksum above 32 bits",
        healthy_with(chunk(0, CHECKSUM_MAX + 1)),
        TreeRefusal.CHUNK_CHECKSUM_RANGE,
    ),
    (
        "an observed checksum above 32 bits",
        healthy_with(chunk(0, CHECKSUM_MAX + 1, matches=False)),
        TreeRefusal.CHUNK_CHECKSUM_RANGE,
    ),
    (
        "an empty chunk with a checksum",
        healthy_with(chunk(0, 5, length_bytes=0)),
        TreeRefusal.EMPTY_CHUNK_WITH_CHECKSUM,
    ),
    (
        "a block longer than any",
        healthy_with(chunk(BLOCK_BYTES_MAX - CHUNK_BYTES + 1)),
        TreeRefusal.BLOCK_TOO_LONG,
    ),
    (
        "overlapping chunks",
        healthy_with(chunk(0), chunk(CHUNK_BYTES - 1)),
        TreeRefusal.CHUNKS_OVERLAP,
    ),
    (
        "healthy chunks overlapping over a corrupt one",
        healthy_with(
            chunk(0, length_bytes=3 * CHUNK_BYTES),
            corrupt(chunk(CHUNK_BYTES)),
            chunk(2 * CHUNK_BYTES),
        ),
        TreeRefusal.CHUNKS_OVERLAP,
    ),
    ("a block that is not the fold of its chunks", lying_block(), TreeRefusal.BLOCK_CHECKSUM),
    ("a block folded without its ID", without_its_id(), TreeRefusal.BLOCK_CHECKSUM),
    ("a root that is not the fold of its blocks", lying_root(), TreeRefusal.ROOT_CHECKSUM),
    ("a root of nothing", ContainerTree(CONTAINER, 5, ()), TreeRefusal.ROOT_CHECKSUM),
]


@pytest.mark.parametrize("tree", [pytest.param(tree, id=name) for name, tree in ACCEPTED.items()])
def test_a_tree_within_the_rules_is_accepted(tree: ContainerTree) -> None:
    check_tree(tree)


@pytest.mark.parametrize(
    ("tree", "reason"), [pytest.param(tree, reason, id=name) for name, tree, reason in REFUSED]
)
def test_a_tree_that_breaks_a_rule_is_refused_by_name(
    tree: ContainerTree, reason: TreeRefusal
) -> None:
    with pytest.raises(TreeRefusedError) as refusal:
        check_tree(tree)
    assert refusal.value.reason == reason.value
    assert refusal.value.code == "tree_refused"


def test_the_numbers_of_chunks_and_blocks_are_bounded() -> None:
    """Each limit at its value and one above."""

    def chunky(count: int) -> ContainerTree:
        return container(block(20, *(ChunkTree(i, 1, i) for i in range(count))))

    check_tree(chunky(BLOCK_CHUNKS_MAX))
    with pytest.raises(TreeRefusedError) as refusal:
        check_tree(chunky(BLOCK_CHUNKS_MAX + 1))
    assert refusal.value.reason == TreeRefusal.TOO_MANY_CHUNKS.value

    tombstones = [deleted(i, i) for i in range(TREE_BLOCKS_MAX + 1)]
    check_tree(ContainerTree(CONTAINER, None, tuple(tombstones[:-1])))
    with pytest.raises(TreeRefusedError) as refusal:
        check_tree(ContainerTree(ContainerId(1), None, tuple(tombstones)))
    assert refusal.value.reason == TreeRefusal.TOO_MANY_BLOCKS.value
