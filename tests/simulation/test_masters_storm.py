"""Masters and syncers under lost, repeated and late messages, restarts, stops, and a
database's clock that jumps (OZ-037, OZ-048, OZ-049, OZ-135, OZ-146): no two syncers
ever believe that they have one replication, and nothing acknowledged goes back.
"""

import pytest

from replicator.master.leases import is_valid
from replicator.replication import DesiredState
from tests.support.simulated_masters import PLANTED, MasterParts, MasterStorm

STEPS = 400
# A planted bug has to show within so many seeds.
SEEDS_MAX = 200


def weather(seed: int, parts: MasterParts = MasterParts()) -> MasterStorm:  # noqa: B008 - frozen
    """One storm of 40 seconds, with operators in it."""
    storm = MasterStorm(seed, masters=1 + seed % 3, syncers=2 + seed % 3, parts=parts)
    for step in range(STEPS):
        storm.step()
        if step % 40 == 0:
            storm.order()
    return storm


@pytest.mark.parametrize(
    "start",
    [
        *range(0, 100, 25),
        *(pytest.param(start, marks=pytest.mark.long) for start in range(100, 2_000, 25)),
    ],
)
def test_one_syncer_has_a_replication_and_no_acknowledgement_is_lost(start: int) -> None:
    storms = [weather(seed) for seed in range(start, start + 25)]
    assert sum(storm.takeovers for storm in storms)
    assert sum(storm.jumps for storm in storms)
    assert sum(sum(storm.acknowledged.values()) for storm in storms)


@pytest.mark.parametrize("seed", range(10))
def test_after_a_storm_every_replication_is_worked_on_again(seed: int) -> None:
    """OZ-045, OZ-048: liveness once faults stop, with whatever the operators left."""
    storm = weather(seed)
    storm.heal()
    storm.run(600)
    state = storm.store.read()
    wanted = [
        record
        for record in state.policies
        if not record.is_deleted
        and record.failed_over_ms is None
        and record.policy.desired is DesiredState.ENABLED
    ]
    held = 0
    for record in wanted:
        found = state.state(record.policy.policy_id)
        assert found is not None
        if found.holder is None:
            continue
        syncer = state.syncer(found.holder.syncer_id)
        assert syncer is not None
        assert is_valid(syncer.lease, state.now_ms)
        held += 1
    # Where there are tokens, paused ones keep theirs.
    if state.settings.is_enabled and not storm.rules.assignment.tokens:
        assert held == len(wanted)


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_is_the_same_again_by_its_seed(seed: int) -> None:
    ours, theirs = weather(seed), weather(seed)
    assert ours.store.records == theirs.store.records
    assert ours.acknowledged == theirs.acknowledged


@pytest.mark.crashes
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    for seed in range(SEEDS_MAX):
        try:
            weather(seed, PLANTED[name])
        except AssertionError:
            return
    pytest.fail(f"{SEEDS_MAX} seeds have not found: {name}")
