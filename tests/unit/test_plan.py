"""One plan over all peers, and the verdict with its evidence."""

from collections.abc import Mapping

import pytest

from merkle.check import TreeRefusal
from merkle.comparison import Comparison, DifferenceKind, compare
from merkle.errors import TreeRefusedError
from merkle.outcome import EvidenceKind, Verdict
from merkle.plan import SPREAD_BYTES, BlockRepair, ChunkFault, ChunkRepair, RepairPlan, plan_repair
from merkle.replica import PeerId
from merkle.survey import BadWindows
from merkle.tree import BlockId, ContainerTree
from tests.support.trees import (
    CHUNK_BYTES,
    block,
    chunk,
    chunks,
    container,
    corrupt,
    deleted,
    unverifiable,
    without_root,
)

B, C, D = PeerId("dn-b"), PeerId("dn-c"), PeerId("dn-d")
FIRST, SECOND, THIRD = chunks(3)
WHOLE = container(block(20, FIRST, SECOND, THIRD), block(21, FIRST))


def plan(ours: ContainerTree, *peers: ContainerTree) -> RepairPlan:
    """The plan against peers named in turn."""
    return plan_repair(ours, dict(zip((B, C, D), peers, strict=False)))


def compared(
    *trees: ContainerTree, bad_windows: Mapping[str, BadWindows] | None = None
) -> Comparison:
    """The comparison of replicas named a, b, c."""
    return compare(dict(zip("abc", trees, strict=False)), bad_windows=bad_windows)


def kinds(judged: RepairPlan | Comparison) -> list[EvidenceKind]:
    return [evidence.kind for evidence in judged.evidence]


def differences(comparison: Comparison) -> list[tuple[str, int, int | None, str, str]]:
    return [
        (d.kind.value, d.block_id, d.offset, "".join(d.lacking), "".join(d.sources))
        for d in comparison.differences
    ]


def test_equal_replicas_need_nothing() -> None:
    """CR-040"""
    made = plan(WHOLE, WHOLE, WHOLE)
    assert made == RepairPlan(WHOLE.container_id, Verdict.MATCH)
    assert made.is_empty
    assert compared(WHOLE, WHOLE, WHOLE) == Comparison(WHOLE.container_id, Verdict.MATCH)


def test_a_missing_block_is_fetched_from_its_holders() -> None:
    """CR-005, CR-034"""
    made = plan(container(block(21, FIRST)), WHOLE, container(block(21, FIRST)), WHOLE)
    assert made.verdict is Verdict.REPAIRABLE
    assert [(repair.block_id, repair.holders) for repair in made.blocks] == [(20, (B, D))]
    assert [(repair.offset, repair.fault) for repair in made.blocks[0].chunks] == [
        (FIRST.offset, ChunkFault.MISSING),
        (SECOND.offset, ChunkFault.MISSING),
        (THIRD.offset, ChunkFault.MISSING),
    ]
    assert all(set(repair.sources) == {B, D} for repair in made.blocks[0].chunks)


def test_a_block_is_put_together_from_several_peers() -> None:
    """CR-034, CR-035: no peer holds it whole, all together do."""
    made = plan(
        container(block(20, corrupt(FIRST), SECOND)),
        container(block(20, FIRST, corrupt(SECOND), corrupt(THIRD))),
        container(block(20, corrupt(FIRST, 2), SECOND, THIRD)),
    )
    assert made.blocks == (
        BlockRepair(
            BlockId(20),
            (B, C),
            (
                ChunkRepair(FIRST.offset, ChunkFault.CORRUPT, (B,), (C,)),
                ChunkRepair(THIRD.offset, ChunkFault.MISSING, (C,), (B,)),
            ),
        ),
    )
    assert made.verdict is Verdict.REPAIRABLE


def test_a_truncated_tail_and_a_hole_are_mended_in_one_pass_in_offset_order() -> None:
    """Differs from Ozone on purpose: it writes missing chunks before corrupt ones, and
    so needs a second run.
    """
    four = container(block(20, *chunks(4)))
    made = plan(container(block(20, corrupt(SECOND), chunk(3 * CHUNK_BYTES))), four)
    assert [(repair.offset, repair.fault.value) for repair in made.blocks[0].chunks] == [
        (0, "missing"),
        (CHUNK_BYTES, "corrupt"),
        (2 * CHUNK_BYTES, "missing"),
    ]


def test_the_longest_block_wins() -> None:
    """CR-005, CR-010"""
    short, long = container(block(20, FIRST)), container(block(20, FIRST, SECOND))
    assert [repair.offset for repair in plan(short, long).blocks[0].chunks] == [SECOND.offset]
    beyond = plan(long, short)
    assert beyond.is_empty
    assert beyond.verdict is Verdict.REPAIRABLE, "the peer lacks what we have: that is no match"


def test_a_healthy_chunk_of_ours_is_never_planned() -> None:
    """inv-I4"""
    for theirs in (corrupt(FIRST), chunk(0, 5), chunk(0, length_bytes=100)):
        assert plan(container(block(20, FIRST)), container(block(20, theirs))).is_empty


def test_reads_spread_over_the_sources() -> None:
    """Every peer is first for some chunks, neighbours share one."""
    many = container(
        *(block(i, chunk(0), chunk(CHUNK_BYTES), chunk(SPREAD_BYTES)) for i in range(30))
    )
    made = plan(container(), many, many, many)
    first = [[repair.sources[0] for repair in entry.chunks] for entry in made.blocks]
    assert {one for one, _, _ in first} == {B, C, D}
    assert all(one == two != three for one, two, three in first)
    assert all(
        sorted(repair.sources) == [B, C, D] for entry in made.blocks for repair in entry.chunks
    )


def test_a_peers_tombstone_changes_the_tree_only() -> None:
    """Differs from CR-021, CR-037, CR-061 on purpose: bytes stay until the cluster's
    own delete (inv-I6).
    """
    live, tombstone = block(20, FIRST, corrupt(SECOND)), deleted(20, 5)
    made = plan(container(live), container(tombstone), container(block(20, FIRST, SECOND)))
    assert made == RepairPlan(
        WHOLE.container_id,
        Verdict.REPAIRABLE,
        tombstones=(tombstone,),
        claimed_deleted=(BlockId(20),),
    )


def test_a_tombstone_is_learned_even_where_checksums_are_equal() -> None:
    """reliability 3.1: compared as (deleted, checksum); Ozone skips and may need a
    second round.
    """
    live = block(20, FIRST)
    tombstone = deleted(20, live.data_checksum)
    assert container(live).data_checksum == container(tombstone).data_checksum
    assert plan(container(live), container(tombstone)).tombstones == (tombstone,)


@pytest.mark.parametrize(
    ("ours", "theirs", "adopted"),
    [
        ((5,), (6, 7), (7,)),
        ((7,), (6, 5), ()),
        ((), (-1, -2), (-1,)),
        ((-1,), (0,), (0,)),
        ((0,), (-1,), ()),
    ],
)
def test_the_largest_tombstone_wins(
    ours: tuple[int, ...], theirs: tuple[int, ...], adopted: tuple[int, ...]
) -> None:
    """Compared as signed numbers, as Ozone does."""
    made = plan(
        container(*(deleted(20, c) for c in ours)), *(container(deleted(20, c)) for c in theirs)
    )
    assert made.tombstones == tuple(deleted(20, checksum) for checksum in adopted)
    assert made.claimed_deleted == ()
    assert made.verdict is Verdict.REPAIRABLE


def test_a_deleted_block_is_never_brought_back() -> None:
    """inv-I5"""
    made = plan(container(deleted(20, 5)), container(block(20, FIRST)), container())
    assert made.is_empty
    assert made.verdict is Verdict.REPAIRABLE


def test_a_chunk_that_is_whole_nowhere_is_planned_window_by_window() -> None:
    made = plan(
        container(block(20, corrupt(FIRST, 1))),
        container(block(20, corrupt(FIRST, 2))),
        container(block(20)),
    )
    # The last one has no entry; its file may have outlived its record, so it is asked
    # last.
    assert made.blocks[0].chunks == (ChunkRepair(0, ChunkFault.CORRUPT, (), (B, C)),)
    assert made.verdict is Verdict.REPAIRABLE
    assert kinds(made) == [EvidenceKind.WINDOWS_UNPROVEN]


def test_a_copy_that_is_corrupt_as_ours_is_no_source() -> None:
    made = plan(
        container(block(20, corrupt(FIRST, 1))),
        container(block(20, corrupt(FIRST, 1))),
        container(block(20, corrupt(FIRST, 2))),
    )
    assert made.blocks[0].chunks[0].partial_sources == (C,)


def test_a_lost_chunk_is_put_together_from_corrupt_copies() -> None:
    made = plan(
        container(),
        container(block(20, corrupt(FIRST, 1))),
        container(block(20, corrupt(FIRST, 2))),
    )
    assert made.blocks[0].chunks == (ChunkRepair(0, ChunkFault.MISSING, (), (B, C)),)


UNRECOVERABLE = {
    "the same wrong bytes everywhere": (
        [corrupt(FIRST)], [corrupt(FIRST)], [corrupt(FIRST)], EvidenceKind.COPIES_CORRUPT_ALIKE, ()
    ),
    "corrupt alike here and there, lost at the third": (
        [corrupt(FIRST)], [corrupt(FIRST)], [], EvidenceKind.COPIES_CORRUPT_ALIKE, (C,)
    ),
    "corrupt here, lost elsewhere": ([corrupt(FIRST)], [], [], EvidenceKind.SOLE_COPY_CORRUPT,
    (B, C)),
    "lost here, corrupt at one peer": ([], [corrupt(FIRST)], [], EvidenceKind.SOLE_COPY_CORRUPT,
    (B, C)),
}  # fmt: skip


@pytest.mark.parametrize("case", UNRECOVERABLE)
def test_what_no_replica_has_is_named(case: str) -> None:
    """CR-029, inv-I3 says that it was not us who lost it; files without a record are
    looked into all the same.
    """
    *copies, kind, asked = UNRECOVERABLE[case]
    made = plan(*(container(block(20, *copy), block(21, FIRST)) for copy in copies))
    assert [chunk.sources for repair in made.blocks for chunk in repair.chunks] == [()] * bool(
        asked
    )
    assert {
        peer for repair in made.blocks for chunk in repair.chunks for peer in chunk.partial_sources
    } == {*asked}
    assert made.verdict is Verdict.UNRECOVERABLE
    assert [(evidence.kind, evidence.block_id, evidence.offset) for evidence in made.evidence] == [
        (kind, 20, 0)
    ]


CONFLICTS = {
    "different checksums": ([FIRST], [chunk(0, 5)], [(0, EvidenceKind.HEALTHY_COPIES_DIFFER)]),
    "different lengths": ([FIRST], [chunk(0, length_bytes=100)],
    [(0, EvidenceKind.LENGTHS_DIFFER)]),
    "a corrupt copy longer than the healthy one": (
        [corrupt(FIRST)], [chunk(0, length_bytes=100)], [(0, EvidenceKind.LENGTHS_DIFFER)]
    ),
    "one chunk here, two there": (
        [chunk(0, length_bytes=2 * CHUNK_BYTES)], [FIRST, SECOND],
        [(0, EvidenceKind.LENGTHS_DIFFER), (CHUNK_BYTES, EvidenceKind.CHUNKINGS_OVERLAP)],
    ),
    "chunks that overlap in part": (
        [FIRST], [chunk(100)], [(0, EvidenceKind.CHUNKINGS_OVERLAP),
         (100, EvidenceKind.CHUNKINGS_OVERLAP)]
    ),
    "chunks that overlap by their last and first byte": (
        [FIRST], [chunk(CHUNK_BYTES - 1)], [(0, EvidenceKind.CHUNKINGS_OVERLAP),
         (CHUNK_BYTES - 1, EvidenceKind.CHUNKINGS_OVERLAP)]
    ),
    "a chunk of ours over three of theirs": (
        [chunk(0, length_bytes=9)], [chunk(i, length_bytes=2) for i in (2, 4, 6)],
        [(i, EvidenceKind.CHUNKINGS_OVERLAP) for i in (0, 2, 4, 6)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFLICTS)
def test_a_conflict_is_named_and_not_touched(case: str) -> None:
    """CR-004"""
    ours, theirs, expected = CONFLICTS[case]
    for trees in ((ours, theirs), (theirs, ours)):
        made = plan(*(container(block(20, *chunk_trees)) for chunk_trees in trees))
        assert made.is_empty
        assert made.verdict is Verdict.CONFLICT
        assert [(evidence.offset, evidence.kind) for evidence in made.evidence] == expected


def test_a_corrupt_copy_cut_short_is_no_conflict() -> None:
    ours = container(block(20, chunk(0, 5, length_bytes=100, matches=False)))
    made = plan(ours, container(block(20, FIRST)))
    assert made.blocks[0].chunks == (ChunkRepair(0, ChunkFault.CORRUPT, (B,)),)


def test_a_corrupt_copy_of_ours_waits_while_the_healthy_ones_disagree() -> None:
    made = plan(
        container(block(20, corrupt(FIRST))),
        container(block(20, FIRST)),
        container(block(20, chunk(0, 5))),
    )
    assert made.is_empty
    assert made.verdict is Verdict.CONFLICT


def test_a_conflict_in_one_chunk_holds_up_no_other() -> None:
    made = plan(
        container(block(20, chunk(0, 5), corrupt(SECOND))), container(block(20, FIRST, SECOND))
    )
    assert [repair.offset for repair in made.blocks[0].chunks] == [SECOND.offset]
    assert made.verdict is Verdict.CONFLICT


def test_the_worst_finding_is_the_verdict() -> None:
    """Unrecoverable before conflict before repairable before match."""
    lost, disputed, lacking, equal = (
        (block(1, corrupt(FIRST)), block(1, corrupt(FIRST))),
        (block(2, FIRST), block(2, chunk(0, 5))),
        (block(3, FIRST), block(3, FIRST, SECOND)),
        (block(4, FIRST), block(4, FIRST)),
    )
    verdicts = []
    for pairs in (
        [lost, disputed, lacking, equal],
        [disputed, lacking, equal],
        [lacking, equal],
        [equal],
    ):
        verdicts.append(plan(*(container(*side) for side in zip(*pairs, strict=True))).verdict)
    assert verdicts == [Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.REPAIRABLE, Verdict.MATCH]


SCANNED_AND_BUILT = [
    pytest.param(container(), container(block(20)), id="an empty live block"),
    pytest.param(container(), container(block(20, unverifiable(0))), id="a block of type NONE"),
    pytest.param(
        container(block(20)),
        container(block(20, unverifiable(0))),
        id="an empty block and one of NONE",
    ),
    pytest.param(
        container(block(20, unverifiable(0))),
        container(block(20, unverifiable(0))),
        id="equal blocks of NONE",
    ),
    pytest.param(container(), container(), id="no blocks at all"),
]


@pytest.mark.parametrize(("ours", "theirs"), SCANNED_AND_BUILT)
def test_replicas_that_nobody_can_verify_never_match(
    ours: ContainerTree, theirs: ContainerTree
) -> None:
    """inv-I12: equal or not, nothing is known of them."""
    for made in (plan(ours, theirs), plan(theirs, ours, ours)):
        assert made.is_empty
        assert made.verdict is Verdict.UNKNOWN
        assert kinds(made) == [EvidenceKind.UNVERIFIABLE]
    assert compared(ours, theirs).verdict is Verdict.UNKNOWN
    assert compared(ours, theirs).differences == ()


def test_what_nobody_can_verify_is_set_aside_beside_the_rest() -> None:
    ours, theirs = (
        container(*WHOLE.blocks, block(22)),
        container(*WHOLE.blocks, block(23, unverifiable(0))),
    )
    made = plan(ours, theirs)
    assert (made.is_empty, made.verdict, kinds(made)) == (
        True,
        Verdict.MATCH,
        [EvidenceKind.UNVERIFIABLE],
    )
    assert made.evidence[0].detail.endswith("block 22, 23")


def test_an_empty_entry_is_no_healthy_block() -> None:
    """A block file cut to nothing leaves an empty entry: what others hold of it is
    missing, not set aside.
    """
    made = plan(container(block(20)), container(block(20, FIRST)))
    assert [len(repair.chunks) for repair in made.blocks] == [1]
    assert made.verdict is Verdict.REPAIRABLE


def test_a_corrupt_chunk_of_which_nothing_could_be_read_is_not_set_aside() -> None:
    made = plan(container(block(20, chunk(0, 0, matches=False))), container(block(20, FIRST)))
    assert [repair.fault for repair in made.blocks[0].chunks] == [ChunkFault.CORRUPT]


def test_many_unverifiable_blocks_are_named_in_few_words() -> None:
    many = container(*(block(i) for i in range(1000)))
    (evidence,) = plan(many, many).evidence
    assert evidence.detail.endswith("0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 990 more")


def test_equal_tombstones_alone_are_a_match() -> None:
    assert plan(container(deleted(20, 5)), container(deleted(20, 5))).verdict is Verdict.MATCH


def test_without_a_peer_nothing_is_known() -> None:
    assert (plan(WHOLE).verdict, kinds(plan(WHOLE))) == (
        Verdict.UNKNOWN,
        [EvidenceKind.NOTHING_COMPARED],
    )
    assert plan(container(block(20, corrupt(FIRST)))).verdict is Verdict.UNRECOVERABLE


def test_from_a_tree_of_ours_that_was_never_built_nothing_is_planned() -> None:
    """CR-047: unknown is not lacking."""
    made = plan(without_root(deleted(22, 5)), WHOLE)
    assert made.is_empty
    assert made.verdict is Verdict.UNKNOWN


def test_a_peer_without_a_root_lacks_nothing_but_its_tombstones_count() -> None:
    """CR-047: what it does not list is unknown, what it deleted is deleted."""
    made = plan(WHOLE, WHOLE, without_root())
    assert (made.is_empty, made.verdict, kinds(made)) == (
        True,
        Verdict.UNKNOWN,
        [EvidenceKind.NO_ROOT],
    )
    made = plan(WHOLE, WHOLE, without_root(deleted(21, 5)))
    assert made.tombstones == (deleted(21, 5),)
    assert made.verdict is Verdict.REPAIRABLE


def test_a_loss_is_not_claimed_while_a_replica_is_unknown() -> None:
    bad = container(block(20, corrupt(FIRST)))
    assert plan(bad, bad).verdict is Verdict.UNRECOVERABLE
    assert plan(bad, bad, without_root()).verdict is Verdict.UNKNOWN


def test_what_we_have_on_record_and_nobody_in_a_tree_is_asked_of_all() -> None:
    """A file that outlived its record is in no tree and may have it; what a tree shows
    is planned by the trees.
    """
    ours, theirs = (
        container(block(20, FIRST), deleted(21, 7)),
        container(block(20, FIRST, SECOND), block(22, FIRST)),
    )
    lost = {
        BlockId(20): [SECOND.offset, THIRD.offset],
        BlockId(21): [FIRST.offset],
        BlockId(22): [FIRST.offset],
        BlockId(23): [SECOND.offset, FIRST.offset],
    }
    made = plan_repair(ours, {B: theirs, C: container(block(20, FIRST))}, lost)
    assert {b.block_id: b.holders for b in made.blocks} == {20: (B, C), 22: (B,), 23: ()}
    found = {
        b.block_id: [(c.offset, c.sources, set(c.partial_sources)) for c in b.chunks]
        for b in made.blocks
    }
    assert found == {
        20: [(SECOND.offset, (B,), {C}), (THIRD.offset, (), {B, C})],
        22: [(FIRST.offset, (B,), {C})],
        23: [(FIRST.offset, (), {B, C}), (SECOND.offset, (), {B, C})],
    }
    assert made.verdict is plan_repair(ours, {B: theirs, C: container(block(20, FIRST))}).verdict
    assert plan_repair(ours, {}, lost).blocks == ()


def test_trees_of_different_containers_make_no_plan() -> None:
    """M13"""
    for attempt in (
        lambda: plan(WHOLE, container(container_id=13)),
        lambda: compared(WHOLE, container(container_id=1)),
    ):
        with pytest.raises(TreeRefusedError) as refusal:
            attempt()
        assert refusal.value.reason == TreeRefusal.WRONG_CONTAINER.value


def test_a_comparison_lists_who_lacks_what_and_who_has_it() -> None:
    comparison = compared(
        container(block(20, FIRST, SECOND), block(22, FIRST), block(24, FIRST)),
        container(
            block(20, corrupt(FIRST)),
            deleted(22, 7),
            block(24, chunk(0, 5)),
            block(26, FIRST, corrupt(SECOND)),
        ),
        container(
            block(20, FIRST, SECOND),
            deleted(22, 5),
            block(24, corrupt(FIRST)),
            block(26, FIRST, SECOND),
        ),
    )
    assert differences(comparison) == [
        ("corrupt_chunk", 20, 0, "b", "ac"),
        ("missing_chunk", 20, CHUNK_BYTES, "b", "ac"),
        ("deleted_block", 22, None, "ac", "b"),
        ("conflicting_chunk", 24, 0, "c", "ab"),
        ("missing_block", 26, None, "a", "c"),
        ("corrupt_chunk", 26, CHUNK_BYTES, "b", "c"),
    ]
    assert comparison.verdict is Verdict.CONFLICT


def test_a_missing_block_has_sources_even_if_nobody_holds_it_whole() -> None:
    comparison = compared(
        container(),
        container(block(20, corrupt(FIRST), SECOND)),
        container(block(20, FIRST, corrupt(SECOND))),
    )
    assert differences(comparison)[0] == ("missing_block", 20, None, "a", "bc")
    assert comparison.verdict is Verdict.REPAIRABLE


def test_a_missing_block_is_not_listed_again_for_its_chunks() -> None:
    comparison = compared(
        container(),
        container(block(20, FIRST, corrupt(SECOND))),
        container(block(20, chunk(0, 5), SECOND)),
    )
    assert differences(comparison) == [
        ("missing_block", 20, None, "a", "c"),
        ("conflicting_chunk", 20, 0, "", "bc"),
        ("corrupt_chunk", 20, CHUNK_BYTES, "b", "c"),
    ]


@pytest.mark.parametrize(
    ("windows", "verdict", "kind"),
    [
        (({0}, {0, 1}, {0}), Verdict.UNRECOVERABLE, EvidenceKind.BAD_WINDOWS_SHARED),
        (({0}, {0, 1}, {1}), Verdict.REPAIRABLE, EvidenceKind.WINDOWS_UNPROVEN),
        (({0}, {0}, None), Verdict.REPAIRABLE, EvidenceKind.WINDOWS_UNPROVEN),
    ],
)
def test_known_bad_windows_decide_what_checksums_only_suggest(
    windows: tuple[set[int] | None, ...], verdict: Verdict, kind: EvidenceKind
) -> None:
    """All three copies are corrupt, each differently; without all scans it stays a
    presumption.
    """
    copies = [container(block(20, corrupt(FIRST, damage))) for damage in (1, 2, 3)]
    scans = {
        name: {(BlockId(20), 0): frozenset(indices)}
        for name, indices in zip("abc", windows, strict=True)
        if indices is not None
    }
    comparison = compared(*copies, bad_windows=scans)
    assert (comparison.verdict, kinds(comparison)) == (verdict, [kind])
    assert differences(comparison) == [(DifferenceKind.CORRUPT_CHUNK.value, 20, 0, "abc", "")]


@pytest.mark.parametrize(
    ("copies", "windows", "verdict", "kind"),
    [
        ((1, None), ({0}, set()), Verdict.REPAIRABLE, EvidenceKind.WINDOWS_UNPROVEN),
        ((1, None), ({0}, {1}), Verdict.REPAIRABLE, EvidenceKind.WINDOWS_UNPROVEN),
        ((1, None), ({0}, {0, 1}), Verdict.UNRECOVERABLE, EvidenceKind.BAD_WINDOWS_SHARED),
        ((1, None), ({0}, None), Verdict.UNRECOVERABLE, EvidenceKind.SOLE_COPY_CORRUPT),
        ((1, 1, None), ({0}, {0}, {1}), Verdict.REPAIRABLE, EvidenceKind.WINDOWS_UNPROVEN),
        ((1, 1, None), ({0}, {0}, {0}), Verdict.UNRECOVERABLE, EvidenceKind.BAD_WINDOWS_SHARED),
    ],
)
def test_a_file_that_outlived_its_record_completes_the_corrupt_copies_if_its_windows_do(
    copies: tuple[int | None, ...],
    windows: tuple[set[int] | None, ...],
    verdict: Verdict,
    kind: EvidenceKind,
) -> None:
    trees = [
        container(block(20, corrupt(FIRST, damage))) if damage else container() for damage in copies
    ]
    scans = {
        name: {(BlockId(20), 0): frozenset(indices)}
        for name, indices in zip("abc", windows, strict=False)
        if indices is not None
    }
    comparison = compared(*trees, bad_windows=scans)
    assert (comparison.verdict, kinds(comparison)) == (verdict, [kind])


def test_a_comparison_of_replicas_of_which_one_is_unknown_blames_it_for_nothing() -> None:
    for unknown in (without_root(), without_root(block(20, FIRST))):
        comparison = compared(WHOLE, WHOLE, unknown)
        assert (comparison.differences, comparison.verdict) == ((), Verdict.UNKNOWN)
