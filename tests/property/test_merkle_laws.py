"""Laws of merge, plan and comparison, over generated trees and replicas."""

from copy import deepcopy
from dataclasses import replace
from functools import reduce
from itertools import permutations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from merkle.check import check_tree
from merkle.comparison import DifferenceKind, compare
from merkle.merge import merge
from merkle.outcome import Verdict
from merkle.plan import plan_repair
from merkle.replica import PeerId
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerTree, TreeBuilder
from tests.support.replicas import (
    BLOCK_IDS,
    Cluster,
    StoredChunk,
    StoredReplica,
    concurrent_round,
    join,
    live_round,
    plan_of,
    reconcile,
    record_of,
    stored_replicas,
)
from tests.support.trees import CHUNK_BYTES, CONTAINER, container, deleted

# A busy machine breaks no law.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PEERS = [PeerId(name) for name in ("dn-a", "dn-b", "dn-c", "dn-d")]

# Few values, so that replicas often agree and often do not.
chunk_checksums = st.sampled_from([0, 1, 2])
live_blocks = st.builds(
    lambda block_id, chunks: BlockTree.live(
        BlockId(block_id),
        [ChunkTree(i * CHUNK_BYTES, CHUNK_BYTES, *chunk) for i, chunk in chunks.items()],
    ),
    st.sampled_from(BLOCK_IDS),
    st.dictionaries(st.integers(0, 3), st.tuples(chunk_checksums, st.booleans()), max_size=4),
)
tombstones = st.builds(deleted, st.sampled_from(BLOCK_IDS), st.integers(-2, 2))
trees = st.lists(live_blocks | tombstones, max_size=4, unique_by=lambda block: block.block_id).map(
    lambda blocks: container(*blocks)
)


clusters = st.lists(stored_replicas(), min_size=2, max_size=4).map(
    lambda rs: dict(zip(PEERS, rs, strict=False))
)


@unhurried
@given(trees, st.integers(1, 3))
def test_one_tree_of_all_replicas_is_compared_as_equal_trees_are(
    tree: ContainerTree, count: int
) -> None:
    one = compare(dict.fromkeys(PEERS[:count], tree))
    assert one == compare({peer: deepcopy(tree) for peer in PEERS[:count]})


@unhurried
@given(trees, trees, trees)
def test_merging_is_idempotent_and_associative(
    a: ContainerTree, b: ContainerTree, c: ContainerTree
) -> None:
    """inv-I2: laying a tree over the stored one again changes nothing, however the
    writes are grouped.
    """
    assert merge(a, a) == a
    assert merge(merge(a, b), b) == merge(a, b)
    assert merge(a, merge(b, c)) == merge(merge(a, b), c)


@unhurried
@given(trees, trees)
def test_what_is_deleted_after_a_merge_does_not_depend_on_its_order(
    a: ContainerTree, b: ContainerTree
) -> None:
    """inv-I5: tombstones of both sides stay; only which of two checksums stays depends
    on the side.
    """

    def deletions(tree: ContainerTree) -> set[BlockId]:
        return {block.block_id for block in tree.blocks if block.deleted}

    assert deletions(merge(a, b)) == deletions(merge(b, a)) == deletions(a) | deletions(b)


@unhurried
@given(trees)
def test_a_built_tree_passes_the_check_and_builds_the_same_tree(tree: ContainerTree) -> None:
    check_tree(tree)
    assert TreeBuilder(CONTAINER, tree).build() == tree


@unhurried
@given(trees)
def test_a_tree_does_not_differ_from_itself(tree: ContainerTree) -> None:
    """D3, CR-040"""
    plan = plan_repair(tree, {PEERS[0]: tree, PEERS[1]: tree})
    assert plan.is_empty
    assert plan.verdict is not Verdict.REPAIRABLE


@unhurried
@given(trees, trees)
def test_a_plan_against_one_peer_asks_for_no_more_than_ozone(
    ours: ContainerTree, theirs: ContainerTree
) -> None:
    """Ozone's rules bound ours: the plan leaves out conflicts and what cannot be
    verified, and adds nothing.
    """
    plan = plan_repair(ours, {PEERS[0]: theirs})
    wanted, tombstones = _ozone_diff(ours, theirs)
    healthy = {
        (block.block_id, repair.offset)
        for block in plan.blocks
        for repair in block.chunks
        if repair.sources
    }
    # Ozone compares checksums alone: it leaves a chunk that is flagged corrupt with the
    # healthy checksum, and takes a chunk without recorded checksums for a healthy one,
    # which to us is none.
    left_by_ozone = {
        (block.block_id, mine.offset)
        for block in ours.blocks
        for mine in block.chunks
        if mine.data_checksum in (0, _checksum_at(theirs, block.block_id, mine.offset))
    }
    assert healthy <= wanted | left_by_ozone
    assert plan.tombstones == tombstones


def _ozone_diff(
    ours: ContainerTree, theirs: ContainerTree
) -> tuple[set[tuple[BlockId, int]], tuple[BlockTree, ...]]:
    """The chunks and the tombstones that Ozone would take from a peer, but for its exit
    on equal checksums.
    """
    wanted: set[tuple[BlockId, int]] = set()
    tombstones: list[BlockTree] = []
    for entry in theirs.blocks:
        own = ours.block(entry.block_id)
        if entry.deleted:
            # Of two tombstones the larger checksum stays, so that all replicas end with
            # the same one.
            if own is None or not own.deleted or own.data_checksum < entry.data_checksum:
                tombstones.append(entry)
        elif own is None:
            wanted |= {(entry.block_id, chunk.offset) for chunk in entry.chunks}
        elif not own.deleted:
            held = {chunk.offset: chunk for chunk in own.chunks}
            for chunk in entry.chunks:
                mine = held.get(chunk.offset)
                is_ours = mine is not None and (
                    mine.checksum_matches or mine.data_checksum == chunk.data_checksum
                )
                if chunk.checksum_matches and not is_ours:
                    wanted.add((entry.block_id, chunk.offset))
    return wanted, tuple(tombstones)


def _checksum_at(tree: ContainerTree, block_id: BlockId, offset: int) -> int | None:
    block = tree.block(block_id)
    return (
        next((c.data_checksum for c in block.chunks if c.offset == offset), None) if block else None
    )


@unhurried
@given(trees, st.lists(trees, max_size=3))
def test_a_plan_never_touches_a_healthy_chunk_of_ours(
    ours: ContainerTree, others: list[ContainerTree]
) -> None:
    """inv-I4, inv-I5"""
    plan = plan_repair(ours, dict(zip(PEERS, others, strict=False)))
    for repair in plan.blocks:
        own = ours.block(repair.block_id)
        assert own is None or not own.deleted
        offsets = {chunk.offset: chunk for chunk in own.chunks} if own else {}
        for chunk in repair.chunks:
            mine = offsets.get(chunk.offset)
            assert mine is None or not mine.checksum_matches or mine.data_checksum == 0


@unhurried
@given(trees, st.lists(trees, min_size=2, max_size=3))
def test_the_order_of_peers_makes_no_difference(
    ours: ContainerTree, others: list[ContainerTree]
) -> None:
    named = list(zip(PEERS, others, strict=False))
    plans = [plan_repair(ours, dict(order)) for order in permutations(named)]
    assert all(plan == plans[0] for plan in plans)
    comparisons = [compare(dict(order)) for order in permutations(named)]
    assert all(comparison == comparisons[0] for comparison in comparisons)


@unhurried
@given(st.lists(trees, min_size=2, max_size=4))
def test_every_replica_gives_the_same_verdict_as_the_comparison(
    replicas: list[ContainerTree],
) -> None:
    """A verdict is on the set, so it does not matter who looks."""
    named = dict(zip(PEERS, replicas, strict=False))
    verdict = compare({str(peer): tree for peer, tree in named.items()}).verdict
    for own, ours in named.items():
        plan = plan_repair(ours, {peer: tree for peer, tree in named.items() if peer != own})
        assert plan.verdict is verdict
        assert not (plan.verdict is Verdict.MATCH and plan.blocks)


@unhurried
@given(st.lists(trees, min_size=2, max_size=4))
def test_replicas_match_exactly_when_nobody_has_anything_to_do(
    replicas: list[ContainerTree],
) -> None:
    comparison = compare(dict(zip(PEERS, replicas, strict=False)))
    assert (comparison.differences == ()) == (
        comparison.verdict in (Verdict.MATCH, Verdict.UNKNOWN)
    )
    for difference in comparison.differences:
        assert difference.lacking or difference.kind is DifferenceKind.CONFLICTING_CHUNK
        assert not set(difference.lacking) & set(difference.sources)


@st.composite
def whole_together(draw: st.DrawFn, count: int) -> list[StoredReplica]:
    """Replicas of which one, another for each block, holds all that any of them has of
    it; or has deleted it.
    """
    found = [draw(stored_replicas()) for _ in range(count)]
    for block_id in map(BlockId, BLOCK_IDS):
        offsets = {offset for one in found for offset in one.blocks.get(block_id, {})}
        index = draw(st.integers(0, count - 1))
        owner = found[index]
        if offsets and block_id not in owner.tombstones:
            records = {offset: record_of(block_id, offset // CHUNK_BYTES) for offset in offsets}
            whole = {offset: StoredChunk(record, record) for offset, record in records.items()}
            found[index] = replace(owner, blocks={**owner.blocks, block_id: whole})
    return found


@unhurried
@given(whole_together(2), whole_together(3))
def test_what_plans_make_of_replicas_is_a_join(
    two: list[StoredReplica], three: list[StoredReplica]
) -> None:
    """inv-I2: it matters neither who repairs nor in which order, nor how often."""
    assert reconciled(two[0], two[0]) == two[0]
    assert reconciled(*two).tree() == reconciled(*two[::-1]).tree()
    a, b, c = three
    left = reconciled(reconciled(a, b), c).tree()
    assert left == reconciled(a, reconciled(b, c)).tree()
    assert left == reconciled(c, reconciled(b, a)).tree()


def reconciled(ours: StoredReplica, theirs: StoredReplica) -> StoredReplica:
    """One replica after its plan against another was carried out."""
    return reconcile({PEERS[0]: ours, PEERS[1]: theirs}, PEERS[0])[0]


@unhurried
@given(clusters)
def test_carrying_out_the_plans_yields_the_join(cluster: Cluster) -> None:
    """inv-I1, I3, I4: live in two orders and at once; where the join is whole, all
    replicas end as the join.
    """
    whole = reduce(join, cluster.values())
    order = tuple(cluster)
    for after, verdicts in (
        live_round(cluster, order),
        live_round(cluster, order[::-1]),
        concurrent_round(cluster),
    ):
        for peer, replica in cluster.items():
            _assert_only_mended(replica, after[peer])
        if all(chunk.is_healthy for chunks in whole.blocks.values() for chunk in chunks.values()):
            assert {replica.tree() for replica in after.values()} == {whole.tree()}
            assert not verdicts & {Verdict.CONFLICT, Verdict.UNRECOVERABLE}
            assert all(plan_of(after, peer).is_empty for peer in after)
        else:
            assert Verdict.UNRECOVERABLE in verdicts
            # What can be mended is mended all the same, wherever it is recorded.
            for replica in after.values():
                for block_id, chunks in replica.blocks.items():
                    joined = whole.blocks.get(block_id, {})
                    assert all(
                        chunk.is_healthy
                        for o, chunk in chunks.items()
                        if o in joined and joined[o].is_healthy
                    )


def _assert_only_mended(before: StoredReplica, after: StoredReplica) -> None:
    assert after.tombstones.keys() >= before.tombstones.keys()
    for block_id, chunks in before.blocks.items():
        for offset, chunk in chunks.items():
            now = after.chunk(block_id, offset)
            assert now is not None
            for was, is_now, good in zip(chunk.data, now.data, chunk.record, strict=True):
                assert is_now in (was, good)
                assert was != good or is_now == good
