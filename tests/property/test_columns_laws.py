"""Laws of trees as columns: they hold what the values hold, and every kernel agrees
with the plain rules.
"""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from merkle.checksum import KERNEL_BYTES_MIN, fold, kernels_for
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
from merkle.tree import (
    BlockId,
    BlockTree,
    ChunkTree,
    ContainerId,
    ContainerTree,
    block_checksum,
    container_checksum,
)
from protos.convert import tree_from_bytes
from tests.support.trees import encode_by_protobuf

# The first example may load the kernels, which takes seconds.
unhurried = settings(deadline=None)

int64s = (
    st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, (1 << 32) - 1) | st.integers(0, 200)
)
chunk_trees = st.builds(ChunkTree, int64s, int64s, int64s, st.booleans())
chunk_lists = st.lists(chunk_trees, max_size=5, unique_by=lambda chunk: chunk.offset).map(
    lambda chunks: tuple(sorted(chunks, key=lambda chunk: chunk.offset))
)
block_trees = st.builds(
    BlockTree, int64s.map(BlockId), int64s, st.just(False), chunk_lists
) | st.builds(BlockTree, int64s.map(BlockId), int64s, st.just(True))
trees = st.builds(
    lambda container_id, root, blocks: ContainerTree(
        ContainerId(container_id), root, tuple(sorted(blocks, key=lambda block: block.block_id))
    ),
    int64s,
    st.none() | int64s,
    st.lists(block_trees, max_size=6, unique_by=lambda block: block.block_id),
)


@unhurried
@given(trees)
def test_bytes_are_those_of_the_protobuf_library(tree: ContainerTree) -> None:
    expected = encode_by_protobuf(tree)
    assert encode_tree(tree) == expected
    assert encode_columns(TreeColumns.of(tree)) == expected
    columns, blocks = TreeColumns.of(tree), library_encode_blocks(tree)
    assert expected.endswith(blocks)
    assert array_encode_blocks(columns) == blocks
    kernel = kernels_for(KERNEL_BYTES_MIN)
    assert kernel is None or blocks == kernel.encode_blocks(
        columns.block_ids,
        columns.block_checksums,
        columns.block_deleted,
        columns.chunk_starts,
        columns.chunk_offsets,
        columns.chunk_lengths,
        columns.chunk_checksums,
        columns.chunk_matches,
    )


@unhurried
@given(trees)
def test_reading_the_bytes_back_gives_the_tree(tree: ContainerTree) -> None:
    assert tree_from_bytes(encode_tree(tree), tree.container_id) == tree


@unhurried
@given(trees)
def test_columns_hold_all_that_the_tree_holds(tree: ContainerTree) -> None:
    assert TreeColumns.of(tree).to_tree() == tree


@unhurried
@given(trees)
def test_computing_columns_is_computing_the_tree(tree: ContainerTree) -> None:
    blocks = [
        block if block.deleted else BlockTree.live(block.block_id, block.chunks)
        for block in tree.blocks
    ]
    assert TreeColumns.of(tree).computed().to_tree() == ContainerTree.of(tree.container_id, blocks)


@unhurried
@given(trees)
def test_blocks_fold_alike_by_kernel_by_library_and_one_by_one(tree: ContainerTree) -> None:
    columns = TreeColumns.of(tree)
    arguments = columns.block_ids, columns.chunk_starts, columns.chunk_checksums
    expected = [
        block_checksum(block.block_id, [chunk.data_checksum for chunk in block.chunks])
        for block in tree.blocks
    ]
    assert fold_blocks(*arguments).tolist() == expected
    assert library_fold_blocks(*arguments).tolist() == expected
    kernel = kernels_for(KERNEL_BYTES_MIN)
    assert kernel is None or kernel.blocks(*arguments).tolist() == expected
    assert fold_root(columns.block_checksums) == container_checksum(
        columns.block_checksums.tolist()
    )


@unhurried
@given(st.lists(st.binary(max_size=1100), max_size=8), st.binary(max_size=3))
def test_window_entries_fold_alike_by_kernel_by_library_and_one_by_one(
    chunks: list[bytes], before: bytes
) -> None:
    joined = memoryview(before + b"".join(chunks))
    starts = len(before) + np.cumsum([0, *map(len, chunks)])
    expected = [fold(chunk) for chunk in chunks]
    assert fold_windows(joined, starts).tolist() == expected
    assert library_fold_windows(joined, starts).tolist() == expected
    kernel = kernels_for(KERNEL_BYTES_MIN)
    assert kernel is None or not joined or kernel.crc32c_ranges(joined, starts).tolist() == expected


@unhurried
@given(trees, trees)
def test_fingerprints_are_equal_for_equal_blocks_and_no_others(
    ours: ContainerTree, theirs: ContainerTree
) -> None:
    assert (state_fingerprint(ours) == state_fingerprint(theirs)) == (ours.blocks == theirs.blocks)
    rootless = replace(ours, data_checksum=None)
    assert state_fingerprint(rootless) == state_fingerprint(ours)
