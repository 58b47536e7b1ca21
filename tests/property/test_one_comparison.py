"""One comparison: whoever compares the same replicas comes to the same verdict."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from admin.tree_build import ReplicaTree
from admin.tree_diff import compare_replicas as tree_diff
from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.columns import state_fingerprint
from merkle.comparison import Comparison, Difference, DifferenceKind, RangedComparison, compare
from merkle.outcome import Evidence, Verdict
from merkle.plan import plan_repair
from merkle.replica import ContainerReplica, PeerId, ReplicaState, TreeSource
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerTree
from scm.policy import RootComparison
from scm.policy import compare as compare_roots
from sweep.compare import compare_replicas, inspect
from sweep.exact import exact_replicas
from tests.support.chunk_rows import Row
from tests.support.reference import judged, of_tree
from tests.support.trees import CHUNK_BYTES, CONTAINER, container, deleted, without_root

# A busy machine breaks no law, and the first example may load kernels.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = ("dn-a", "dn-b", "dn-c", "dn-d")
BLOCK_IDS = st.sampled_from(range(20, 23))
# Few values, so that replicas often agree and often do not; 0 is what a chunk without
# recorded checksums folds to.
CHUNKS = st.builds(
    lambda i, length, checksum, matches: ChunkTree(i * CHUNK_BYTES, length, checksum, matches),
    st.integers(0, 2),
    st.sampled_from([CHUNK_BYTES] * 6 + [CHUNK_BYTES // 2, 2 * CHUNK_BYTES]),
    st.sampled_from([1] * 6 + [2, 0]),
    st.sampled_from([True] * 5 + [False]),
)
LIVE_BLOCKS = st.builds(
    BlockTree.live, BLOCK_IDS, st.lists(CHUNKS, max_size=3, unique_by=lambda chunk: chunk.offset)
)
TOMBSTONES = st.builds(deleted, BLOCK_IDS, st.integers(-1, 2))
BLOCKS = st.lists(
    LIVE_BLOCKS | LIVE_BLOCKS | LIVE_BLOCKS | TOMBSTONES,
    max_size=3,
    unique_by=lambda block: block.block_id,
)
TREES = BLOCKS.map(lambda blocks: container(*blocks))


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, ContainerTree]:
    """One to four replicas, most of them equal to the first but for a block or two.

    A replica whose tree was never built has no tombstones here: the chunk table has no
    rows for them, so that a sweep would know less than the others.
    """
    first = draw(TREES)
    trees = [first]
    for _ in range(draw(st.integers(0, 3))):
        changed = {block.block_id: block for block in first.blocks}
        changed |= {block.block_id: block for block in draw(BLOCKS)[: draw(st.integers(0, 2))]}
        for block_id in draw(st.sets(BLOCK_IDS, max_size=1)):
            changed.pop(BlockId(block_id), None)
        trees.append(draw(st.sampled_from([container(*changed.values())] * 9 + [without_root()])))
    return dict(zip(NAMES, trees, strict=False))


def rows_of(name: str, tree: ContainerTree) -> Iterator[Row]:
    """A replica as an agent exports it."""
    replica = {
        "datanode": name,
        "volume": "DS-1",
        "container_id": CONTAINER,
        "state": "CLOSED",
        "bcs_id": 1,
        "replica_index": 0,
        "source": "tree" if tree.data_checksum is not None else "none",
        "generation": 0,
        "scanned_at": None,
    }

    def row(block_id: int, offset: int, chunk: ChunkTree | None, checksum: int, dead: bool) -> Row:
        return replica | {
            "block_id": block_id,
            "chunk_offset": offset,
            "length": chunk.length_bytes if chunk else 0,
            "checksum": checksum,
            "matches": chunk.checksum_matches if chunk else True,
            "deleted": dead,
        }

    if tree.data_checksum is None or not tree.blocks:
        yield row(0, CONTAINER_ROW, None, 0, False)
        return
    for block in tree.blocks:
        if not block.chunks:
            yield row(block.block_id, BLOCK_ROW, None, block.data_checksum, block.deleted)
        for chunk in block.chunks:
            yield row(block.block_id, chunk.offset, chunk, chunk.data_checksum, False)


def swept(trees: Mapping[str, ContainerTree]) -> tuple[Verdict, set[tuple[object, ...]]]:
    """The verdict of a sweep, and its findings as (kind, block, offset, lacking,
    sources).
    """
    rows = [dict(row) for name, tree in trees.items() for row in rows_of(name, tree)]
    table = pa.Table.from_pylist(rows, CHUNK_SCHEMA)
    replicas, _ = exact_replicas(table)
    quick = compare_replicas(replicas)
    slow = inspect(table, replicas) if len(quick.candidates) else quick
    [verdict] = slow.verdicts["verdict"].to_pylist()
    found = slow.findings.to_pylist()
    return Verdict(verdict), {
        (
            one["kind"],
            one["block_id"],
            one["chunk_offset"],
            tuple(one["lacking"]),
            tuple(one["sources"]),
        )
        for one in found
    }


def reported(trees: Mapping[str, ContainerTree]) -> RootComparison:
    """What the controller says, who knows no more than roots and fingerprints."""
    return compare_roots(
        [
            ContainerReplica(
                PeerId(name),
                CONTAINER,
                ReplicaState.CLOSED,
                tree.data_checksum,
                bcs_id=1,
                block_count=len(tree.blocks),
                fingerprint=state_fingerprint(tree) if tree.data_checksum is not None else b"",
            )
            for name, tree in trees.items()
        ]
    ).comparison


def diffed(trees: Mapping[str, ContainerTree]) -> Comparison:
    """What `treefold tree diff` says of stored trees."""
    replicas = {
        name: ReplicaTree(CONTAINER, "CLOSED", 0, TreeSource.TREE, tree)
        for name, tree in trees.items()
    }
    return tree_diff(CONTAINER, replicas, {}).comparison


@unhurried
@given(clusters())
def test_all_who_compare_the_same_replicas_give_one_verdict(
    trees: dict[str, ContainerTree],
) -> None:
    comparison = compare(trees)
    verdict, differences = judged({name: of_tree(tree) for name, tree in trees.items()})
    assert comparison.verdict is verdict
    assert list(comparison.differences) == [Difference(*found) for found in differences]
    assert diffed(trees) == comparison
    for name, ours in trees.items():
        peers = {PeerId(peer): tree for peer, tree in trees.items() if peer != name}
        if ours.data_checksum is not None:
            assert plan_repair(ours, peers).verdict is comparison.verdict
    verdict, findings = swept(trees)
    assert verdict is comparison.verdict
    assert findings == {
        (d.kind.value, d.block_id, d.offset, d.lacking, d.sources) for d in comparison.differences
    }


@unhurried
@given(clusters(), st.sets(st.integers(20, 23)))
def test_ranges_of_blocks_are_compared_as_whole_trees_are(
    trees: dict[str, ContainerTree], edges: set[int]
) -> None:
    whole, ranged = compare(trees), RangedComparison(trees)
    differences, evidence = list[Difference](), list[Evidence]()
    for first, end in pairwise((0, *sorted(edges), 100)):
        here = {
            name: replace(tree, blocks=tuple(b for b in tree.blocks if first <= b.block_id < end))
            for name, tree in trees.items()
        }
        found, facts = ranged.add(here)
        differences += found
        evidence += facts
    evidence += ranged.evidence
    found_whole = (whole.verdict, whole.differences, whole.evidence)
    assert (ranged.verdict, tuple(differences), tuple(evidence)) == found_whole


@unhurried
@given(clusters())
def test_a_plan_holds_work_exactly_for_what_the_comparison_says_a_replica_lacks(
    trees: dict[str, ContainerTree],
) -> None:
    lacking = {
        (name, difference.block_id)
        for difference in compare(trees).differences
        for name in difference.lacking
        # Nobody's bytes are touched in a conflict; without a source, files without a
        # record are asked though no tree promises anything.
        if difference.kind is not DifferenceKind.CONFLICTING_CHUNK and difference.sources
    }
    for name, ours in trees.items():
        plan = plan_repair(ours, {PeerId(n): tree for n, tree in trees.items() if n != name})
        planned = {block.block_id for block in plan.blocks if any(c.sources for c in block.chunks)}
        planned |= {block.block_id for block in plan.tombstones}
        if ours.data_checksum is not None:
            assert planned == {block_id for who, block_id in lacking if who == name}


@unhurried
@given(clusters())
def test_the_controller_never_contradicts_the_comparison(trees: dict[str, ContainerTree]) -> None:
    """Roots and fingerprints cannot name a difference, but what they say holds."""
    comparison, roots = compare(trees), reported(trees)
    verifiable = all(
        chunk.data_checksum or not chunk.checksum_matches
        for tree in trees.values()
        for block in tree.blocks
        for chunk in block.chunks
    ) and all(block.chunks or block.deleted for tree in trees.values() for block in tree.blocks)
    if verifiable and comparison.verdict is Verdict.MATCH:
        assert roots is RootComparison.MATCH
    if roots is RootComparison.MATCH:
        assert len({(b.block_id, b.deleted) for t in trees.values() for b in t.blocks}) == len(
            {b.block_id for t in trees.values() for b in t.blocks}
        )
        assert not [d for d in comparison.differences if d.kind is not DifferenceKind.CORRUPT_CHUNK]
