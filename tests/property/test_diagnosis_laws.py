"""Laws of a diagnosis: what was not read is never taken for equal, nor for lost."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from live.diagnosis import ReplicaReading, diagnose
from merkle.comparison import compare
from merkle.outcome import Verdict
from merkle.replica import ContainerReplica, ContainerState, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.scm_client import ClusterContainer
from tests.support.live_twin import PEERS
from tests.support.peers import MemoryReplica, replica_of

# A busy machine breaks no law, and the first example may load kernels.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
CONTAINER = ContainerId(1)
# Of each replica: the bits to flip, and the blocks without a record.
Damage = tuple[list[tuple[int, int]], frozenset[int]]
damages = st.tuples(
    st.lists(st.tuples(st.sampled_from([20, 21]), st.integers(0, 9_999)), max_size=3),
    st.frozensets(st.sampled_from([20, 21]), max_size=1),
)


def damaged(damage: Damage) -> ContainerTree:
    replica: MemoryReplica = replica_of(CONTAINER, {20: 10_000, 21: 10_000})
    for block_id, offset in damage[0]:
        replica.flip(block_id, offset)
    for block_id in damage[1]:
        del replica.records[BlockId(block_id)]
    return replica.scanned_tree()


def readings(trees: list[ContainerTree | None]) -> list[ReplicaReading]:
    return [
        ReplicaReading(
            ContainerReplica(peer, CONTAINER, ReplicaState.CLOSED, None, 1),
            tree,
            "" if tree else "silent",
            is_unreachable=tree is None,
        )
        for peer, tree in zip(PEERS, trees, strict=False)
    ]


def container(required: int = 3) -> ClusterContainer:
    return ClusterContainer(CONTAINER, ContainerState.CLOSED, "RATIS/THREE", required)


@unhurried
@given(st.lists(damages, min_size=3, max_size=3))
def test_with_all_replicas_it_is_the_comparison_of_their_trees(damages: list[Damage]) -> None:
    trees = [damaged(damage) for damage in damages]
    found = diagnose(container(), readings(list(trees)), {})
    assert found.comparison == compare(dict(zip(PEERS, trees, strict=True)))
    assert found.doubt == ""
    assert not found.is_unreachable


@unhurried
@given(st.lists(damages, min_size=3, max_size=3), st.sets(st.integers(0, 2), min_size=1))
def test_without_some_nothing_is_called_equal_or_lost(
    damages: list[Damage], silent: set[int]
) -> None:
    trees = [None if at in silent else damaged(one) for at, one in enumerate(damages)]
    found = diagnose(container(), readings(trees), {})
    assert found.verdict not in (Verdict.MATCH, Verdict.UNRECOVERABLE)
    assert found.is_unreachable
    assert all(PEERS[at] in found.doubt for at in silent)


@unhurried
@given(st.lists(damages, min_size=0, max_size=2))
def test_fewer_than_required_are_never_all(damages: list[Damage]) -> None:
    found = diagnose(container(), readings([damaged(one) for one in damages]), {})
    assert found.verdict not in (Verdict.MATCH, Verdict.UNRECOVERABLE)
    assert found.doubt
