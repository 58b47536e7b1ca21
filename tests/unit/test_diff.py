"""What one replica lacks of another, row by row of Ozone's diff tests and beyond them."""

from dataclasses import replace

import pytest

from merkle.check import TreeRefusal
from merkle.diff import DiffReport, diff
from merkle.errors import TreeRefusedError
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerTree
from tests.support.trees import block, chunk, chunks, container, corrupt, counted_tree, deleted

# (missing blocks, missing chunks, corrupt chunks)
SHAPES = [
    (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 3), (2, 3, 1), (3, 1, 2), (2, 2, 3), (3, 2, 2), (2, 1, 4), (2, 3, 4),
    (1, 2, 4), (3, 3, 3), (3, 3, 0), (3, 0, 3), (0, 3, 3),
]  # fmt: skip


def damaged(tree: ContainerTree, *, blocks: int, missing: int, bad: int) -> tuple[ContainerTree, DiffReport]:
    """The tree without its first blocks, others without first and with corrupt last chunks; and what it lacks."""
    left: list[BlockTree] = []
    missing_chunks: list[tuple[BlockId, tuple[ChunkTree, ...]]] = []
    corrupt_chunks: list[tuple[BlockId, tuple[ChunkTree, ...]]] = []
    survivors = tree.blocks[blocks:]
    for i, whole in enumerate(survivors):
        # Dealt out in turn, so that a block loses a second chunk only after each has lost one.
        lost = len(range(i, missing, len(survivors)))
        spoiled = len(whole.chunks) - len(range(i, bad, len(survivors)))
        if lost:
            missing_chunks.append((whole.block_id, whole.chunks[:lost]))
        if spoiled < len(whole.chunks):
            corrupt_chunks.append((whole.block_id, whole.chunks[spoiled:]))
        kept = [*whole.chunks[lost:spoiled], *(corrupt(chunk_tree) for chunk_tree in whole.chunks[spoiled:])]
        left.append(BlockTree.live(whole.block_id, kept))
    report = DiffReport(tree.blocks[:blocks], tuple(missing_chunks), tuple(corrupt_chunks))
    return container(*left, container_id=tree.container_id), report


def all_deleted(tree: ContainerTree, block_ids: range) -> ContainerTree:
    kept = [entry for entry in tree.blocks if entry.block_id not in block_ids]
    return container(*kept, *(deleted(i, 1000 + i) for i in block_ids))


@pytest.mark.parametrize(("blocks", "missing", "bad"), SHAPES)
def test_all_that_is_lacking_is_listed_with_the_peers_entries(blocks: int, missing: int, bad: int) -> None:
    """D1"""
    theirs = counted_tree(5)
    ours, expected = damaged(theirs, blocks=blocks, missing=missing, bad=bad)
    report = diff(ours, theirs)
    assert report == expected
    assert report.needs_repair


@pytest.mark.parametrize(("blocks", "missing", "bad"), SHAPES)
def test_a_damaged_peer_has_nothing_to_give(blocks: int, missing: int, bad: int) -> None:
    """D2: it is the peer that should come to us."""
    ours = counted_tree(5)
    theirs, _ = damaged(ours, blocks=blocks, missing=missing, bad=bad)
    assert diff(ours, theirs) == DiffReport()


def test_equal_trees_have_no_difference() -> None:
    """D3"""
    assert diff(counted_tree(5), counted_tree(5)) == DiffReport()


def test_a_block_deleted_at_the_peer_is_never_missing_here() -> None:
    """D4"""
    live = counted_tree(10)
    ours, _ = damaged(counted_tree(5), blocks=3, missing=2, bad=2)
    report = diff(ours, all_deleted(live, range(6, 11)))
    assert [entry.block_id for entry in report.missing_blocks] == [1, 2, 3]
    assert report.missing_chunks
    assert [entry.block_id for entry in report.diverged_deletes] == [6, 7, 8, 9, 10]
    assert {6, 7, 8, 9, 10} < {entry.block_id for entry in diff(ours, live).missing_blocks}


def test_of_deleted_blocks_nothing_is_missing() -> None:
    """D5"""
    theirs = all_deleted(counted_tree(5), range(1, 6))
    ours = container(*theirs.blocks[3:])
    assert not diff(ours, theirs).missing_blocks
    assert diff(theirs, theirs) == DiffReport()


def test_a_block_deleted_here_needs_no_repair() -> None:
    """D6"""
    theirs = counted_tree(5)
    ours, _ = damaged(theirs, blocks=0, missing=3, bad=3)
    assert diff(all_deleted(ours, range(1, 6)), theirs) == DiffReport()


def test_damage_to_a_block_that_a_peer_has_deleted_is_a_delete_to_learn_of() -> None:
    """D7"""
    ours, _ = damaged(counted_tree(5), blocks=0, missing=3, bad=3)
    theirs = all_deleted(counted_tree(5), range(1, 6))
    report = diff(ours, theirs)
    assert report == DiffReport(diverged_deletes=theirs.blocks)


def test_a_tombstone_with_the_live_blocks_checksum_is_learned() -> None:
    """Differs from Ozone on purpose: it compares the checksum alone and does not learn of this delete."""
    live = block(20, *chunks(2))
    tombstone = deleted(20, live.data_checksum)
    ours, theirs = container(live), container(tombstone)
    assert ours.data_checksum == theirs.data_checksum
    assert diff(ours, theirs).diverged_deletes == (tombstone,)
    assert diff(theirs, ours) == DiffReport()


def test_equal_roots_do_not_hide_a_difference() -> None:
    """Differs from Ozone on purpose: roots of different states can be equal, by accident or by design."""
    ours, theirs = container(block(20, *chunks(1))), container(block(20, *chunks(2)))
    assert diff(replace(ours, data_checksum=theirs.data_checksum), theirs).missing_chunks


@pytest.mark.parametrize(
    ("ours", "theirs", "adopted"), [(5, 6, True), (6, 5, False), (6, 6, False), (-1, 0, True), (0, -1, False)]
)
def test_of_two_tombstones_the_larger_checksum_stays(ours: int, theirs: int, adopted: bool) -> None:
    """Compared as signed numbers, as Ozone does."""
    report = diff(container(deleted(20, ours)), container(deleted(20, theirs)))
    assert report.diverged_deletes == ((deleted(20, theirs),) if adopted else ())


def test_chunks_that_are_corrupt_at_the_peer_too_are_counted_only() -> None:
    """B6: a peer that cannot help must not look complete."""
    ours = container(block(20, corrupt(chunk(0), 1)))
    theirs = container(block(20, corrupt(chunk(0), 2), corrupt(chunk(4096))))
    report = diff(ours, theirs)
    assert report == DiffReport(filtered_chunks=2)
    assert not report.needs_repair


def test_chunks_that_are_corrupt_alike_are_no_difference() -> None:
    ours, theirs = container(block(20, corrupt(chunk(0)))), container(block(20, corrupt(chunk(0)), chunk(4096)))
    report = diff(ours, theirs)
    assert report == DiffReport(missing_chunks=((BlockId(20), (chunk(4096),)),))


def test_two_healthy_but_different_chunks_are_left_alone() -> None:
    ours, theirs = container(block(20, chunk(0, 1))), container(block(20, chunk(0, 2)))
    assert diff(ours, theirs) == DiffReport()


def test_any_number_is_accepted_as_a_checksum() -> None:
    """D: a reader accepts any int64 and compares for equality."""
    ours = container(BlockTree(BlockId(1), -5, False, (chunk(0, -7, matches=False),)), deleted(2, -9))
    theirs = container(BlockTree(BlockId(1), -6, False, (chunk(0, -8),)), deleted(2, -9))
    assert diff(ours, theirs).corrupt_chunks == ((1, (chunk(0, -8),)),)


def test_trees_of_different_containers_are_not_compared() -> None:
    """M13"""
    with pytest.raises(TreeRefusedError) as refusal:
        diff(container(container_id=1), container(container_id=2))
    assert refusal.value.reason == TreeRefusal.WRONG_CONTAINER.value
