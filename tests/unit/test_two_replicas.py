"""What one replica lacks of one other, row by row of Ozone's diff tests: the plan and
the comparison of two.
"""

from dataclasses import replace

import pytest

from merkle.comparison import Comparison, Difference, DifferenceKind, compare
from merkle.outcome import Verdict
from merkle.plan import ChunkFault, RepairPlan, plan_repair
from merkle.replica import PeerId
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerTree
from tests.support.trees import CONTAINER, block, chunk, chunks, container, corrupt, deleted

PEER = PeerId("theirs")
# (missing blocks, missing chunks, corrupt chunks)
SHAPES = [
    (0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 2, 3), (2, 3, 1), (3, 1, 2), (2, 2, 3), (3, 2, 2), (2, 1,
     4), (2, 3, 4),
    (1, 2, 4), (3, 3, 3), (3, 3, 0), (3, 0, 3), (0, 3, 3),
]  # fmt: skip
MATCH = Comparison(CONTAINER, Verdict.MATCH)

Places = list[tuple[DifferenceKind, int, int | None]]


def whole(block_count: int) -> ContainerTree:
    """Blocks 1..n of four chunks."""
    return container(*(block(i, *chunks(4)) for i in range(1, block_count + 1)))


def damaged(
    tree: ContainerTree, *, blocks: int, missing: int, bad: int
) -> tuple[ContainerTree, Places]:
    """The tree without its first blocks, others without first and with corrupt last
    chunks; and what it lacks.
    """
    left: list[BlockTree] = []
    lacking: Places = [
        (DifferenceKind.MISSING_BLOCK, entry.block_id, None) for entry in tree.blocks[:blocks]
    ]
    survivors = tree.blocks[blocks:]
    for i, entry in enumerate(survivors):
        # Dealt out in turn, so that a block loses a second chunk only after each has
        # lost one.
        lost = len(range(i, missing, len(survivors)))
        spoiled = len(entry.chunks) - len(range(i, bad, len(survivors)))
        lacking += [
            (DifferenceKind.MISSING_CHUNK, entry.block_id, c.offset) for c in entry.chunks[:lost]
        ]
        lacking += [
            (DifferenceKind.CORRUPT_CHUNK, entry.block_id, c.offset) for c in entry.chunks[spoiled:]
        ]
        kept = [
            *entry.chunks[lost:spoiled],
            *(corrupt(chunk_tree) for chunk_tree in entry.chunks[spoiled:]),
        ]
        left.append(BlockTree.live(entry.block_id, kept))
    return container(*left), lacking


def all_deleted(tree: ContainerTree, block_ids: range) -> ContainerTree:
    kept = [entry for entry in tree.blocks if entry.block_id not in block_ids]
    return container(*kept, *(deleted(i, 1000 + i) for i in block_ids))


def plan(ours: ContainerTree, theirs: ContainerTree) -> RepairPlan:
    return plan_repair(ours, {PEER: theirs})


def lacking_here(ours: ContainerTree, theirs: ContainerTree) -> tuple[Difference, ...]:
    """What a comparison says that we lack and the peer has."""
    differences = compare({"ours": ours, "theirs": theirs}).differences
    return tuple(d for d in differences if (d.lacking, d.sources) == (("ours",), ("theirs",)))


def planned(made: RepairPlan, lacking: Places, theirs: ContainerTree) -> bool:
    """Whether the plan fetches exactly this, all of it from the peer."""
    wanted: dict[tuple[int, int], ChunkFault] = {}
    for kind, block_id, offset in lacking:
        entry = theirs.block(BlockId(block_id))
        assert entry is not None
        fault = ChunkFault.CORRUPT if kind is DifferenceKind.CORRUPT_CHUNK else ChunkFault.MISSING
        wanted |= {(block_id, c.offset): fault for c in entry.chunks if offset in (None, c.offset)}
    assert {chunk.sources for repair in made.blocks for chunk in repair.chunks} <= {(PEER,)}
    return wanted == {
        (repair.block_id, c.offset): c.fault for repair in made.blocks for c in repair.chunks
    }


@pytest.mark.parametrize(("blocks", "missing", "bad"), SHAPES)
def test_all_that_is_lacking_is_listed_and_planned(blocks: int, missing: int, bad: int) -> None:
    """D1"""
    theirs = whole(5)
    ours, lacking = damaged(theirs, blocks=blocks, missing=missing, bad=bad)
    assert [(d.kind, d.block_id, d.offset) for d in lacking_here(ours, theirs)] == lacking
    assert len(lacking) == blocks + missing + bad
    made = plan(ours, theirs)
    assert planned(made, lacking, theirs)
    assert (made.verdict, made.tombstones, made.evidence) == (Verdict.REPAIRABLE, (), ())


@pytest.mark.parametrize(("blocks", "missing", "bad"), SHAPES)
def test_a_damaged_peer_has_nothing_to_give(blocks: int, missing: int, bad: int) -> None:
    """D2: it is the peer that should come to us."""
    ours = whole(5)
    theirs, _ = damaged(ours, blocks=blocks, missing=missing, bad=bad)
    assert plan(ours, theirs).is_empty
    assert lacking_here(ours, theirs) == ()


def test_equal_trees_have_no_difference() -> None:
    """D3"""
    assert plan(whole(5), whole(5)) == RepairPlan(CONTAINER, Verdict.MATCH)
    assert compare({"ours": whole(5), "theirs": whole(5)}) == MATCH


def test_a_block_deleted_at_the_peer_is_never_missing_here() -> None:
    """D4"""
    ours, lacking = damaged(whole(5), blocks=3, missing=3, bad=3)
    theirs = all_deleted(whole(10), range(6, 11))
    made = plan(ours, theirs)
    assert planned(made, lacking, theirs)
    assert [entry.block_id for entry in made.tombstones] == [6, 7, 8, 9, 10]
    assert made.claimed_deleted == ()
    live = plan(ours, whole(10))
    assert {6, 7, 8, 9, 10} < {repair.block_id for repair in live.blocks}
    assert live.tombstones == ()


def test_of_deleted_blocks_nothing_is_missing() -> None:
    """D5"""
    theirs = all_deleted(whole(5), range(1, 6))
    made = plan(container(*theirs.blocks[3:]), theirs)
    assert (made.blocks, made.tombstones) == ((), theirs.blocks[:3])
    assert compare({"ours": theirs, "theirs": theirs}) == MATCH


def test_a_block_deleted_here_needs_no_repair() -> None:
    """D6"""
    theirs = whole(5)
    ours, _ = damaged(theirs, blocks=0, missing=3, bad=3)
    assert plan(all_deleted(ours, range(1, 6)), theirs).is_empty


def test_damage_to_a_block_that_a_peer_has_deleted_is_a_delete_to_learn_of() -> None:
    """D7"""
    ours, _ = damaged(whole(5), blocks=0, missing=3, bad=3)
    theirs = all_deleted(whole(5), range(1, 6))
    made = plan(ours, theirs)
    assert (made.blocks, made.tombstones) == ((), theirs.blocks)
    assert made.claimed_deleted == tuple(entry.block_id for entry in ours.blocks)


def test_equal_roots_do_not_hide_a_difference() -> None:
    """Differs from Ozone on purpose: roots of different states can be equal, by
    accident or by design.
    """
    ours, theirs = container(block(20, *chunks(1))), container(block(20, *chunks(2)))
    forged = replace(ours, data_checksum=theirs.data_checksum)
    assert [repair.block_id for repair in plan(forged, theirs).blocks] == [20]


def test_any_number_is_accepted_as_a_checksum() -> None:
    """D: a reader accepts any int64 and compares for equality."""
    ours = container(
        BlockTree(BlockId(1), -5, False, (ChunkTree(0, 9, -7, False),)), deleted(2, -9)
    )
    theirs = container(
        BlockTree(BlockId(1), -6, False, (chunk(0, -8, length_bytes=9),)), deleted(2, -9)
    )
    assert planned(plan(ours, theirs), [(DifferenceKind.CORRUPT_CHUNK, 1, 0)], theirs)
