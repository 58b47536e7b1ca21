"""All 512 states of one block of one chunk on three replicas, and all orders in which
the replicas repair.

Each replica runs its one plan against both others, one after another in every order,
and all at once. Wherever the replicas can become equal, one round suffices; every other
state is named; nothing is lost on the way.
"""

from collections.abc import Iterator
from functools import reduce
from itertools import permutations, product

import pytest

from merkle.outcome import Verdict
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerTree
from tests.support.replicas import (
    Cluster,
    StoredChunk,
    StoredReplica,
    concurrent_round,
    join,
    live_round,
    plan_of,
    reconcile,
)

BLOCK = BlockId(20)
RECORD, OTHER_RECORD = (1, 2), (3, 4)
PEERS = (PeerId("a"), PeerId("b"), PeerId("c"))


def live(record: tuple[int, int], data: tuple[int, int]) -> StoredReplica:
    return StoredReplica({BLOCK: {0: StoredChunk(record, data)}})


HEALTHY = live(RECORD, RECORD)
LIVE_SUM = HEALTHY.tree().blocks[0].data_checksum

STATES = {
    "absent": StoredReplica(),
    "healthy": HEALTHY,
    "bad-1": live(RECORD, (91, 2)),
    "bad-2": live(RECORD, (1, 92)),
    "other": live(OTHER_RECORD, OTHER_RECORD),
    "deleted": StoredReplica(tombstones={BLOCK: LIVE_SUM}),
    "deleted-lower": StoredReplica(tombstones={BLOCK: LIVE_SUM - 1}),
    "deleted-higher": StoredReplica(tombstones={BLOCK: LIVE_SUM + 1}),
}


def end_of(names: tuple[str, ...]) -> ContainerTree | Verdict:
    """What must come of a state: the tree that all end with, or why they cannot."""
    deletions = [STATES[name].tombstones[BLOCK] for name in names if name.startswith("deleted")]
    if deletions:
        return StoredReplica(tombstones={BLOCK: max(deletions)}).tree()
    present = set(names) - {"absent"}
    if not present:
        return STATES["absent"].tree()
    if present == {"other"}:
        return STATES["other"].tree()
    if "other" in present:
        return Verdict.CONFLICT
    return (
        HEALTHY.tree()
        if "healthy" in present or {"bad-1", "bad-2"} <= present
        else Verdict.UNRECOVERABLE
    )


def rounds(cluster: Cluster) -> Iterator[tuple[Cluster, set[Verdict]]]:
    for order in permutations(PEERS):
        yield live_round(cluster, order)
    yield concurrent_round(cluster)


def chunks_of(cluster: Cluster) -> list[StoredChunk]:
    return [
        chunk
        for replica in cluster.values()
        for blocks in replica.blocks.values()
        for chunk in blocks.values()
    ]


def assert_nothing_was_lost(before: Cluster, after: Cluster) -> None:
    """inv-I3 to I6 for one round."""
    for record in (RECORD, OTHER_RECORD):
        healthy = StoredChunk(record, record)
        assert chunks_of(after).count(healthy) >= chunks_of(before).count(healthy)
    for peer in before:
        was, now = before[peer].chunk(BLOCK, 0), after[peer].chunk(BLOCK, 0)
        if was is not None:
            assert now is not None, "bytes go only with the cluster's own delete"
            assert now.record == was.record
            changed = [i for i in range(2) if now.data[i] != was.data[i]]
            assert all(
                was.data[i] != was.record[i] and now.data[i] == was.record[i] for i in changed
            )
        elif now is not None:
            assert now.is_healthy
        if BLOCK in before[peer].tombstones:
            assert now is None, "a deleted block is never brought back"
            assert after[peer].tombstones[BLOCK] >= before[peer].tombstones[BLOCK]


@pytest.mark.parametrize("first", STATES)
def test_one_round_makes_replicas_equal_or_names_why_not(first: str) -> None:
    """CR-007, inv-I1, I3, I4, I5, I6, I8: 512 states times seven ways to carry out a
    round.
    """
    cases = 0
    for names in product([first], STATES, STATES):
        start = dict(zip(PEERS, (STATES[name] for name in names), strict=True))
        end = end_of(names)
        for after, verdicts in rounds(start):
            cases += 1
            assert_nothing_was_lost(start, after)
            trees = [replica.tree() for replica in after.values()]
            if isinstance(end, Verdict):
                assert end in verdicts, names
                assert Verdict.MATCH not in verdicts, names
                continue
            assert trees == [end] * 3, names
            assert not verdicts & {Verdict.CONFLICT, Verdict.UNRECOVERABLE}, names
            again = [plan_of(after, peer) for peer in PEERS]
            assert all(plan.is_empty for plan in again), names
            assert {plan.verdict for plan in again} == {
                Verdict.MATCH if end.blocks else Verdict.UNKNOWN
            }, names
    assert cases == 64 * 7


def test_all_states_that_cannot_converge_are_counted() -> None:
    """Bad copies under another record are a conflict here: Ozone would overwrite them
    with the other's bytes.
    """
    ends = [end_of(names) for names in product(STATES, repeat=3)]
    assert len(ends) == 512
    named = [end for end in ends if isinstance(end, Verdict)]
    assert (named.count(Verdict.CONFLICT), named.count(Verdict.UNRECOVERABLE)) == (54, 14)


def test_carrying_out_plans_is_idempotent_commutative_and_associative() -> None:
    """inv-I2, over all states whose records agree, wherever one copy is whole or the
    block is deleted.
    """
    names = [name for name in STATES if name != "other"]
    cases = 0
    for start in product(names, repeat=3):
        a, b, c = (STATES[name] for name in start)
        assert reconciled(a, a) == a
        if _is_settled_by(start[:2]):
            assert reconciled(a, b).tree() == reconciled(b, a).tree() == end_of(start[:2])
        if _is_settled_by(start):
            cases += 1
            left, right = reconciled(reconciled(a, b), c), reconciled(a, reconciled(b, c))
            assert left.tree() == right.tree() == end_of(start), start
    assert cases == 7**3 - 3**3


def _is_settled_by(names: tuple[str, ...]) -> bool:
    """Whether pairs suffice to settle the block: what is absent, or bad, can be had
    whole or is deleted.
    """
    return any(name == "healthy" or name.startswith("deleted") for name in names)


def reconciled(ours: StoredReplica, theirs: StoredReplica) -> StoredReplica:
    """One replica after its plan against another was carried out."""
    return reconcile({PEERS[0]: ours, PEERS[1]: theirs}, PEERS[0])[0]


def test_the_reference_join_ends_where_a_round_does() -> None:
    """Of the tests' own `join`: what the replicas agree on is what they held
    together.
    """
    names = [name for name in STATES if name != "other"]
    for start in product(names, repeat=3):
        if isinstance(end := end_of(start), Verdict):
            continue
        states = [STATES[name] for name in start]
        assert reduce(join, states).tree() == end
        for after, _ in rounds(dict(zip(PEERS, states, strict=True))):
            assert {replica.tree() for replica in after.values()} == {end}
