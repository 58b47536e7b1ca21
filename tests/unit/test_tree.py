"""Trees and their builder, row by row of Ozone's tree writer tests."""

from dataclasses import replace

import pytest

from merkle.tree import (
    BlockId,
    BlockTree,
    ChunkTree,
    ContainerTree,
    TreeBuilder,
    block_checksum,
    root_hex,
)
from tests.support.trees import (
    CONTAINER,
    block,
    chunk,
    chunks,
    container,
    counted_tree,
    deleted,
    encode_by_protobuf,
    recorded,
)

ABC, DEF = b"\x01\x02\x03", b"\x04\x05\x06"
# Checksums of the deleted block data of the conformance rows: three recorded chunks.
DELETED_CHUNKS = [0x92FD4BFA, 0xF13116C9, 0x4161C4E7]


def built(*blocks: tuple[int, list[ChunkTree]]) -> ContainerTree:
    """Through the builder, in the order given."""
    builder = TreeBuilder(CONTAINER)
    for block_id, chunk_trees in blocks:
        builder.add_block(BlockId(block_id))
        for chunk_tree in chunk_trees:
            builder.add_chunk(BlockId(block_id), chunk_tree)
    return builder.build()


def hexes(tree: ContainerTree) -> list[str]:
    return [f"{entry.data_checksum:08x}" for entry in tree.blocks]


def test_an_empty_tree_has_the_root_zero() -> None:
    """W1: zero, and present: an empty tree is not an unknown one."""
    assert built() == ContainerTree(CONTAINER, 0, ())


def test_a_chunk_a_block_and_a_root_are_folded_in_turn() -> None:
    """CR-011, CR-012, W2"""
    tree = built((1, [recorded(0, ABC, length_bytes=4 << 20)]))
    assert tree.blocks[0].chunks == (ChunkTree(0, 4 << 20, 0xF130F21E, True),)
    assert hexes(tree) == ["e2533532"]
    assert root_hex(tree.data_checksum) == "8c3bfc16"


def test_a_gap_between_chunks_changes_no_checksum() -> None:
    """W3"""
    tree = built((1, [recorded(0, ABC), recorded(2, DEF)]))
    assert [entry.offset for entry in tree.blocks[0].chunks] == [0, 2]
    assert hexes(tree) == ["3e9902e4"]
    assert root_hex(tree.data_checksum) == "e512cf31"
    assert built((1, [recorded(0, ABC), recorded(1, DEF)])).data_checksum == tree.data_checksum


def test_the_same_chunks_in_another_block_have_another_checksum() -> None:
    """W4"""
    tree = built((2, [recorded(0, ABC), recorded(2, DEF)]))
    assert hexes(tree) == ["deb46605"]
    assert root_hex(tree.data_checksum) == "f6f6d114"


def test_changing_any_chunk_changes_its_block_and_the_root_and_no_other_block() -> None:
    """CR-011"""
    whole = counted_tree(3)
    for at, entry in enumerate(whole.blocks):
        for position, entry_chunk in enumerate(entry.chunks):
            changed = list(entry.chunks)
            changed[position] = replace(entry_chunk, data_checksum=entry_chunk.data_checksum ^ 1)
            blocks = list(whole.blocks)
            blocks[at] = BlockTree.live(entry.block_id, changed)
            tree = container(*blocks, container_id=whole.container_id)
            assert blocks[at].data_checksum != entry.data_checksum
            assert tree.data_checksum != whole.data_checksum


def test_the_same_content_builds_the_same_tree() -> None:
    """W5"""
    content = (1, [recorded(0, ABC), recorded(1, DEF)])
    assert built(content) == built(content)


def test_block_ids_distinguish_containers_of_equal_chunks() -> None:
    """W6: four blocks each, of the chunks of W3."""
    same = [recorded(0, ABC), recorded(2, DEF)]
    roots = [
        root_hex(built(*((i, same) for i in ids)).data_checksum)
        for ids in ((2, 3, 4, 5), (1, 2, 3, 4))
    ]
    assert roots == ["a7f98055", "ea5b8e7"]


def test_a_block_without_chunks_counts() -> None:
    """W7"""
    tree = built((1, []))
    assert tree.blocks == (BlockTree(BlockId(1), 0x7E433189, False, ()),)
    assert root_hex(tree.data_checksum) == "af2d13a5"


def test_adding_a_block_again_changes_nothing() -> None:
    """W8"""
    content = [recorded(0, ABC), recorded(1, DEF)]
    assert built((1, content), (1, [])) == built((1, content))


def test_blocks_and_chunks_added_in_any_order_come_out_sorted() -> None:
    """CR-015, W9"""
    tree = built(
        (3, [recorded(1, ABC), recorded(0, ABC)]), (1, [recorded(1, ABC), recorded(0, ABC)])
    )
    assert [entry.block_id for entry in tree.blocks] == [1, 3]
    assert hexes(tree) == ["6715b889", "d8dc0037"]
    assert root_hex(tree.data_checksum) == "c39dca03"


def interleaved() -> TreeBuilder:
    builder = TreeBuilder(CONTAINER)
    one, two, three = BlockId(1), BlockId(2), BlockId(3)
    builder.add_chunk(two, recorded(0, ABC))
    builder.add_chunk(one, recorded(1, b"\x01\x02"))
    builder.add_chunk(one, recorded(2, ABC))
    builder.add_chunk(three, recorded(0, b"\x01"))
    builder.add_chunk(two, recorded(1, ABC))
    builder.add_chunk(three, recorded(1, b"\x02\x03\x04"))
    builder.add_chunk(one, recorded(0, ABC))
    builder.add_chunk(three, recorded(1, b"\x02\x03\x04"))
    return builder


def test_interleaved_adding_makes_no_difference() -> None:
    """CR-015, W10"""
    tree = interleaved().build()
    assert hexes(tree) == ["029c103e", "8738dc68", "d78a5175"]
    assert root_hex(tree.data_checksum) == "44294df9"


def test_a_tombstone_stands_beside_live_blocks_with_exactly_its_checksum() -> None:
    """W11"""
    builder = TreeBuilder(CONTAINER)
    builder.add_chunk(BlockId(1), recorded(0, ABC))
    builder.set_deleted(BlockId(2), 123456789)
    tree = builder.build()
    assert tree.blocks[1] == deleted(2, 123456789)
    assert root_hex(tree.data_checksum) == "b91270b3"


def test_deleting_a_live_block_leaves_only_the_tombstone() -> None:
    """W12"""
    builder = TreeBuilder(CONTAINER)
    builder.add_chunk(BlockId(2), recorded(0, ABC))
    builder.set_deleted(BlockId(2), 123456789)
    tree = builder.build()
    assert tree.blocks == (deleted(2, 123456789),)
    assert root_hex(tree.data_checksum) == "11d7dc38"


def test_a_tree_rebuilt_from_a_tree_is_the_same_and_can_grow() -> None:
    """W13"""
    start = TreeBuilder(CONTAINER)
    for entry in interleaved().build().blocks[:2]:
        for entry_chunk in entry.chunks:
            start.add_chunk(entry.block_id, entry_chunk)
    start.add_block(BlockId(3))
    start.set_deleted(BlockId(4), 123456)
    tree = start.build()
    assert root_hex(tree.data_checksum) == "23367cd2"

    again = TreeBuilder(CONTAINER, tree)
    assert encode_by_protobuf(again.build()) == encode_by_protobuf(tree)
    again.add_chunk(BlockId(3), recorded(0, b"\x01", matches=False))
    again.add_block(BlockId(5))
    grown = again.build()
    assert hexes(grown)[2] == "f446a7b2"
    assert not grown.blocks[2].chunks[0].checksum_matches
    assert hexes(grown)[4] == "b9d9a696"
    assert root_hex(grown.data_checksum) == "d1e23e8e"


@pytest.mark.parametrize(
    ("compute_root", "root"),
    [pytest.param(True, 0xD288BC23, id="W14"), pytest.param(False, None, id="W15")],
)
def test_recorded_deletions_get_the_checksum_of_their_chunks(
    compute_root: bool, root: int | None
) -> None:
    """W14, W15: without a root where no tree was built yet."""
    builder = TreeBuilder(CONTAINER)
    for block_id in (1, 2):
        builder.delete_recorded(BlockId(block_id), DELETED_CHUNKS)
    tree = builder.build(compute_root=compute_root)
    assert tree.blocks == (deleted(1, 0x3F7361E4), deleted(2, 0x4D2E3D43))
    assert tree.data_checksum == root


def test_recorded_deletions_spare_the_other_blocks() -> None:
    """W16"""
    builder = TreeBuilder(CONTAINER)
    builder.add_chunk(BlockId(1), recorded(0, ABC))
    builder.add_chunk(BlockId(2), recorded(0, DEF))
    for block_id in (1, 3):
        builder.delete_recorded(BlockId(block_id), DELETED_CHUNKS)
    tree = builder.build()
    assert [entry.deleted for entry in tree.blocks] == [True, False, True]
    assert tree.blocks[1].chunks == (recorded(0, DEF),)
    assert root_hex(tree.data_checksum) == "a65b80df"


def test_a_recorded_deletion_beats_the_live_block() -> None:
    """W17"""
    builder = TreeBuilder(CONTAINER)
    builder.add_chunk(BlockId(7), recorded(0, ABC))
    live_checksum = builder.build().blocks[0].data_checksum
    builder.delete_recorded(BlockId(7), DELETED_CHUNKS)
    tree = builder.build()
    assert tree.blocks == (deleted(7, 0xDBC9D8AA),)
    assert tree.blocks[0].data_checksum != live_checksum


@pytest.mark.parametrize(
    ("block_count", "root"),
    [(1, "133629b5"), (2, "36e6b01b"), (3, "f62520b4"), (4, "8f173189"), (5, "532619e9")],
)
def test_the_counted_trees_have_their_known_roots(block_count: int, root: str) -> None:
    """The common fixture of the conformance rows."""
    assert root_hex(counted_tree(block_count).data_checksum) == root


@pytest.mark.parametrize(
    ("block_id", "checksum"),
    [(0, 0x8C28B28A), (1, 0x7E433189), (9, 0xF49A6946), ((1 << 63) - 1, 0x7C66DDA3)],
)
def test_the_id_alone_gives_an_empty_block_its_checksum(block_id: int, checksum: int) -> None:
    assert block_checksum(block_id, []) == checksum


def test_a_deletion_with_the_recorded_chunks_leaves_the_root_as_it_was() -> None:
    """Why trees are compared by more than their roots."""
    live = container(block(20, *chunks(2)), block(21, chunk(0)))
    builder = TreeBuilder(CONTAINER, live)
    builder.delete_recorded(BlockId(20), [entry.data_checksum for entry in chunks(2)])
    assert builder.build().data_checksum == live.data_checksum
    assert builder.build() != live


def test_a_chunk_added_to_a_deleted_block_does_not_bring_it_back() -> None:
    builder = TreeBuilder(CONTAINER)
    builder.set_deleted(BlockId(20), 5)
    builder.add_chunk(BlockId(20), chunk(0))
    builder.add_block(BlockId(20))
    assert builder.build().blocks == (deleted(20, 5),)


def test_a_block_is_found_by_its_id() -> None:
    tree = container(block(20, chunk(0)), deleted(22, 5), block(24))
    assert [tree.block(BlockId(i)) for i in (19, 20, 21, 22, 24, 25)] == [
        None,
        block(20, chunk(0)),
        None,
        deleted(22, 5),
        block(24),
        None,
    ]


def test_an_unknown_root_is_shown_as_zero() -> None:
    assert root_hex(None) == "0"
    assert root_hex(0) == "0"


def test_unsorted_values_are_no_trees() -> None:
    two = container(block(1), block(2))
    with pytest.raises(AssertionError):
        replace(two, blocks=two.blocks[::-1])
    with pytest.raises(AssertionError):
        BlockTree(BlockId(1), 0, False, (chunk(4096), chunk(0)))
