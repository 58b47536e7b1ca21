"""Trees as columns: the reference's golden values, and what columns refuse to hold."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from merkle.checksum import KERNEL_BYTES_MIN, implementations, kernels_for
from merkle.columns import (
    TreeColumns,
    array_encode_blocks,
    encode_columns,
    encode_tree,
    fold_blocks,
    fold_root,
    fold_windows,
    library_encode_blocks,
    library_fold_blocks,
    library_fold_windows,
    state_fingerprint,
)
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from tests.support.trees import block, chunk, chunks, container, counted_tree, deleted

FULL = (
    "0864123a08f2dc98c00f121a0807109483f2b3091a0e08001080a0011887af"
    "b7be0820012000120a080810f38ff4b6092001120a080910c6d2e9a40f2000"
)
# Five blocks of four chunks, whose single window entries of three bytes count up from
# 1.
COUNTED_CHUNKS = """
    f130f21e 85331923 f132df67 f3ea6b43  c9620575 cdc4009e ae085dad 1e588f83
    81951cc8 f596f7f5 f13a6a83 62045839  588c360f 03137880 60df25b3 c0d130f2
    107b2fb2 6478c48f 107902cb 12a1b6ef"""
COUNTED_BLOCKS = "e88231c3 75c48c87 41524ae2 c2bc5d7e c4c5df84"
COUNTED_ROOTS = "133629b5 36e6b01b f62520b4 8f173189 532619e9"


def numbers(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def int64s(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(values, np.int64)


def full_tree() -> ContainerTree:
    """The reference's full file example: a live block, a deleted one, an empty one."""
    live = BlockTree.live(BlockId(7), [ChunkTree(0, 20480, 0x87CDD787)])
    return container(live, deleted(8, 0x96DD07F3), block(9), container_id=100)


def test_the_full_file_example_has_the_bytes_of_ozone() -> None:
    tree = full_tree()
    assert [b.data_checksum for b in tree.blocks] == [0x967C8194, 0x96DD07F3, 0xF49A6946]
    assert tree.data_checksum == 0xF8062E72
    assert encode_tree(tree).hex() == FULL
    assert encode_tree(tree).endswith(library_encode_blocks(tree))
    assert encode_columns(TreeColumns.of(tree)).hex() == FULL


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (container(container_id=100), "086412020800"),
        (
            ContainerTree(ContainerId(100), None, (deleted(8, 0x96DD07F3),)),
            "0864120c120a080810f38ff4b6092001",
        ),
        (ContainerTree(ContainerId(100), None), "08641200"),
    ],
    ids=["empty container", "tombstone without a root", "neither root nor blocks"],
)
def test_other_forms_have_the_bytes_of_ozone(tree: ContainerTree, expected: str) -> None:
    assert encode_tree(tree).hex() == expected
    assert encode_columns(TreeColumns.of(tree)).hex() == expected


def test_a_negative_number_takes_ten_bytes() -> None:
    tree = ContainerTree(ContainerId(100), -1, (deleted(-2, 1 << 62),))
    minus_one, minus_two = "ff" * 9 + "01", "fe" + "ff" * 8 + "01"
    expected = f"0864122408{minus_one}121708{minus_two}10{'80' * 8}402001"
    assert encode_tree(tree).hex() == expected
    assert encode_columns(TreeColumns.of(tree)).hex() == expected


def test_many_chunks_have_the_bytes_of_few() -> None:
    """More than are laid out at a time, with numbers of every length."""
    chance, total = np.random.default_rng(5), 70_004
    checksums = chance.integers(-(1 << 63), 1 << 63, total) >> chance.integers(0, 64, total)
    columns = TreeColumns(
        ContainerId(1),
        7,
        int64s([-1, 2, 3, 1 << 62, (1 << 63) - 1]),
        int64s([0, 5, -6, 1, 2]),
        np.array([False, True, False, False, False]),
        int64s([0, 3, 3, 3, 70_003, 70_004]),
        np.arange(total) << 30,
        chance.integers(0, 1 << 31, total),
        checksums,
        chance.random(total) < 0.5,
    )
    expected = library_encode_blocks(columns.to_tree())
    assert array_encode_blocks(columns) == expected
    assert encode_columns(columns).endswith(expected)


def test_chunks_under_a_tombstone_are_left_out() -> None:
    """Ozone drops them when it reads such a file; written again, they must not come
    back.
    """
    foreign = container(BlockTree(BlockId(1), 5, True, chunks(2)))
    assert TreeColumns.of(foreign).to_tree() == container(deleted(1, 5))
    assert encode_tree(foreign) == encode_tree(container(deleted(1, 5)))
    assert library_encode_blocks(foreign) == library_encode_blocks(container(deleted(1, 5)))
    columns = TreeColumns.of(container(block(1, *chunks(2))))
    with pytest.raises(AssertionError):
        replace(columns, block_deleted=np.array([True]))


def test_counted_windows_fold_to_the_golden_chunks_blocks_and_roots() -> None:
    entries = bytes(range(1, 61))
    starts = int64s(list(range(0, 61, 3)))
    chunk_checksums = fold_windows(entries, starts)
    assert chunk_checksums.tolist() == numbers(COUNTED_CHUNKS)
    assert library_fold_windows(memoryview(entries), starts).tolist() == numbers(COUNTED_CHUNKS)
    ids, chunk_starts = int64s([1, 2, 3, 4, 5]), int64s([0, 4, 8, 12, 16, 20])
    blocks = fold_blocks(ids, chunk_starts, chunk_checksums)
    assert blocks.tolist() == numbers(COUNTED_BLOCKS)
    assert library_fold_blocks(ids, chunk_starts, chunk_checksums).tolist() == numbers(
        COUNTED_BLOCKS
    )
    assert [fold_root(blocks[:count]) for count in range(1, 6)] == numbers(COUNTED_ROOTS)


def test_blocks_without_chunks_fold_their_ids() -> None:
    ids, starts, none = int64s([0, 1, 9, (1 << 63) - 1]), int64s([0] * 5), int64s([])
    expected = numbers("8c28b28a 7e433189 f49a6946 7c66dda3")
    assert fold_blocks(ids, starts, none).tolist() == expected
    assert library_fold_blocks(ids, starts, none).tolist() == expected
    kernel = kernels_for(KERNEL_BYTES_MIN)
    assert kernel is None or kernel.blocks(ids, starts, none).tolist() == expected


def test_nothing_folds_to_nothing() -> None:
    none, one = int64s([]), int64s([0])
    assert fold_blocks(none, one, none).tolist() == []
    assert library_fold_blocks(none, one, none).tolist() == []
    assert fold_windows(b"", one).tolist() == []
    assert fold_windows(b"", int64s([0, 0])).tolist() == [0]
    assert fold_root(none) == 0


def test_a_part_of_many_blocks_folds_as_in_the_whole() -> None:
    """`chunk_starts` may begin anywhere, so that a slice of a bigger table needs no
    copy of its chunks.
    """
    tree = TreeColumns.of(counted_tree(5))
    part = fold_blocks(tree.block_ids[2:4], tree.chunk_starts[2:5], tree.chunk_checksums)
    assert part.tolist() == numbers(COUNTED_BLOCKS)[2:4]
    assert (
        library_fold_blocks(
            tree.block_ids[2:4], tree.chunk_starts[2:5], tree.chunk_checksums
        ).tolist()
        == part.tolist()
    )


@pytest.mark.parametrize(
    ("starts", "entries"),
    [([4, 0], b"1234"), ([0, 5], b"1234"), ([-1, 4], b"1234")],
    ids=["down", "beyond", "before"],
)
def test_starts_outside_the_entries_are_refused(starts: list[int], entries: bytes) -> None:
    """The kernels read addresses: a wrong place must stop before they do."""
    window_folds: list[Callable[..., object]] = [fold_windows, library_fold_windows]
    block_folds: list[Callable[..., object]] = [fold_blocks, library_fold_blocks]
    if kernel := kernels_for(KERNEL_BYTES_MIN):
        window_folds.append(kernel.crc32c_ranges)
        block_folds.append(kernel.blocks)
    for fold_some in window_folds:
        with pytest.raises(AssertionError):
            fold_some(memoryview(entries), int64s(starts))
    for fold_some in block_folds:
        with pytest.raises(AssertionError):
            fold_some(int64s([1]), int64s(starts), int64s([7] * 4))
        with pytest.raises(AssertionError):
            fold_some(int64s([1, 2]), int64s([0, 4]), int64s([7] * 4))


def test_many_blocks_take_the_kernel_and_agree_with_the_library() -> None:
    rng = np.random.default_rng(3)
    counts = rng.integers(0, 9, 10_000)
    starts = np.concatenate([[0], np.cumsum(counts)])
    ids = np.arange(10_000) - 5_000
    checksums = rng.integers(-(1 << 63), (1 << 63) - 1, int(starts[-1]))
    assert np.array_equal(
        fold_blocks(ids, starts, checksums), library_fold_blocks(ids, starts, checksums)
    )
    strided = fold_blocks(np.repeat(ids, 2)[::2], starts, np.repeat(checksums, 2)[::2])
    assert np.array_equal(strided, fold_blocks(ids, starts, checksums))


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, offset=c.offset + 1),
        lambda c: replace(c, length_bytes=c.length_bytes - 1),
        lambda c: replace(c, data_checksum=c.data_checksum ^ 1),
        lambda c: replace(c, checksum_matches=False),
    ],
    ids=["offset", "length", "checksum", "matches"],
)
def test_the_fingerprint_sees_what_the_root_does_not(change: "object") -> None:
    assert callable(change)
    ours = container(block(1, *chunks(3)))
    theirs = container(block(1, *chunks(2), change(chunk(2 * 4096))))
    assert state_fingerprint(ours) != state_fingerprint(theirs)
    assert state_fingerprint(ours) == state_fingerprint(container(block(1, *chunks(3))))


def test_the_fingerprint_tells_a_live_block_from_a_deleted_one() -> None:
    live = container(block(1))
    gone = container(deleted(1, live.blocks[0].data_checksum))
    assert live.data_checksum == gone.data_checksum
    assert state_fingerprint(live) != state_fingerprint(gone)


def test_columns_that_are_slices_of_bigger_ones_encode_alike() -> None:
    tree = TreeColumns.of(counted_tree(5))
    wide = np.zeros((len(tree.block_ids), 3), np.int64)
    wide[:, 1] = tree.block_ids
    assert not wide[:, 1].flags.c_contiguous
    assert encode_columns(replace(tree, block_ids=wide[:, 1])) == encode_columns(tree)


def test_memory_that_may_only_be_read_folds_and_encodes() -> None:
    implementations()
    columns = TreeColumns.of(counted_tree(5))
    arrays = {
        name: getattr(columns, name)
        for name in TreeColumns.__slots__
        if name.startswith(("block", "chunk"))
    }
    ids, starts, checksums = np.arange(100), np.arange(101), np.arange(100)
    for array in (*arrays.values(), ids, starts, checksums):
        array.flags.writeable = False
    assert encode_columns(replace(columns, **arrays)) == encode_tree(columns.to_tree())
    assert (
        fold_blocks(ids, starts, checksums).tolist()
        == library_fold_blocks(ids, starts, checksums).tolist()
    )


def test_columns_of_different_lengths_are_refused() -> None:
    columns = TreeColumns.of(full_tree())
    with pytest.raises(AssertionError):
        replace(columns, chunk_offsets=int64s([]))
    with pytest.raises(AssertionError):
        replace(columns, block_ids=int64s([1]))
