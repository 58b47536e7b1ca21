"""What a syncer does by its assignments: one run of a replication at a time, each given
back once, and nothing begun that is not assigned.
"""

from hypothesis import given
from hypothesis import strategies as st

from replicator.master.syncer_rules import Assignment
from replicator.replication import Checkpoint, DesiredState, Policy, PolicyId
from replicator.syncer.duties import HeldReplication, duties

IDS = [PolicyId(name) for name in ("a", "b", "c")]
EPOCHS = st.integers(1, 3)


def policies(policy_id: PolicyId) -> st.SearchStrategy[Policy]:
    return st.builds(
        lambda desired, revision: Policy(
            policy_id, "local:/a", "local:/b", desired=desired, revision=revision
        ),
        st.sampled_from(DesiredState),
        st.integers(1, 2),
    )


ASSIGNED = st.lists(st.sampled_from(IDS), unique=True).flatmap(
    lambda ids: st.tuples(
        *(st.builds(Assignment, policies(name), EPOCHS, st.just(Checkpoint())) for name in ids)
    )
)
HELD = st.lists(st.sampled_from(IDS), unique=True).flatmap(
    lambda ids: st.fixed_dictionaries(
        {
            name: st.builds(HeldReplication, policies(name), EPOCHS, st.booleans(), st.booleans())
            for name in ids
        }
    )
)


@given(ASSIGNED, HELD)
def test_a_replication_runs_once_and_is_given_back_once(
    assigned: tuple[Assignment, ...], held: dict[PolicyId, HeldReplication]
) -> None:
    due, by_id = duties(assigned, held), {one.policy.policy_id: one for one in assigned}
    started = [one.policy.policy_id for one in due.started]
    released = [policy_id for policy_id, _ in due.released]
    for policy_id in IDS:
        named = [list(due.ending), released, [one.policy_id for one in due.changed]]
        assert sum(group.count(policy_id) for group in named) <= 1
    for one in due.started:
        assert by_id[one.policy.policy_id] == one
        ours = held.get(one.policy.policy_id)
        # What runs by another epoch has to end first, and has to be given back.
        assert ours is None or (ours.has_ended and ours.epoch != one.epoch)
        assert ours is None or one.policy.policy_id in released
    for policy_id, ours in held.items():
        found = by_id.get(policy_id)
        is_ours = found is not None and found.epoch == ours.epoch
        assert (policy_id in due.ending) == (not is_ours and not ours.has_ended)
        assert ((policy_id, ours.epoch) in due.released) == (
            ours.has_ended and not (is_ours and ours.is_cancelled)
        )
    assert set(started) >= by_id.keys() - held.keys()


@given(ASSIGNED)
def test_what_is_held_as_assigned_needs_nothing(assigned: tuple[Assignment, ...]) -> None:
    held = {one.policy.policy_id: HeldReplication(one.policy, one.epoch) for one in assigned}
    assert duties(assigned, held) == duties((), {})
