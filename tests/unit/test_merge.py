"""Laying a fresh tree over the stored one, row by row of Ozone's tree writer tests."""

from merkle.merge import merge
from merkle.tree import root_hex
from tests.support.trees import block, chunk, container, deleted, recorded, without_root

LIVE = block(1, recorded(0, b"\x01\x02\x03"))
OTHER = block(1, recorded(0, b"\x04\x05\x06"))


def test_a_deletion_in_the_stored_tree_beats_a_fresh_live_block() -> None:
    """W18: a scan that began before the delete must not bring the block back
    (inv-I5).
    """
    merged = merge(container(LIVE), container(deleted(1, 987654321)))
    assert merged.blocks == (deleted(1, 987654321),)
    assert root_hex(merged.data_checksum) == "73bc02ed"


def test_of_two_live_entries_the_fresh_one_stays() -> None:
    """W19"""
    assert merge(container(LIVE), container(OTHER)) == container(LIVE)


def test_a_fresh_deletion_beats_a_stored_live_block() -> None:
    """W20"""
    merged = merge(container(deleted(1, 12345)), container(LIVE))
    assert merged.blocks == (deleted(1, 12345),)
    assert root_hex(merged.data_checksum) == "84373274"


def test_of_two_deletions_the_fresh_checksum_stays() -> None:
    """W21"""
    merged = merge(container(deleted(1, 111)), container(deleted(1, 222)))
    assert merged.blocks == (deleted(1, 111),)
    assert root_hex(merged.data_checksum) == "b3fd1dcc"


def test_stored_deletions_stay_and_stored_live_blocks_go() -> None:
    """W22"""
    stored = container(block(5, chunk(0)), deleted(6, 555))
    merged = merge(container(block(7, recorded(0, b"\x09\x09\x09")), deleted(8, 444)), stored)
    assert [(entry.block_id, entry.deleted) for entry in merged.blocks] == [
        (6, True),
        (7, False),
        (8, True),
    ]
    assert [merged.blocks[i].data_checksum for i in (0, 2)] == [555, 444]
    assert root_hex(merged.data_checksum) == "a69985d6"


def test_without_a_stored_tree_the_fresh_one_stands() -> None:
    assert merge(container(LIVE), None) == container(LIVE)


def test_tombstones_of_a_tree_that_was_never_built_survive() -> None:
    """W15 then W18: deletions came first, the tree later."""
    merged = merge(container(LIVE, block(2, chunk(0))), without_root(deleted(2, 7)))
    assert merged == container(LIVE, deleted(2, 7))
