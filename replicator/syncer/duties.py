"""What a syncer begins, changes, ends and gives back, by what its master has assigned.

A replication that is assigned anew has another epoch: what runs by the old one ends
first, since both would share a folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replicator.master.syncer_rules import Assignment
from replicator.replication import Policy, PolicyId


@dataclass(frozen=True, slots=True)
class HeldReplication:
    """A replication that this syncer works on, or did. `has_ended`: nothing of it runs
    any more. `is_cancelled`: it ended since it was cancelled, which the master has to
    hear of.
    """

    policy: Policy
    epoch: int
    has_ended: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Duties:
    """What to do: `ending` are those that must stop, `released` those that have stopped
    and are forgotten, each with its epoch.
    """

    started: tuple[Assignment, ...] = ()
    changed: tuple[Policy, ...] = ()
    ending: tuple[PolicyId, ...] = ()
    released: tuple[tuple[PolicyId, int], ...] = ()


def duties(assigned: Sequence[Assignment], held: Mapping[PolicyId, HeldReplication]) -> Duties:
    """What follows from all that the master has assigned, and all that is held."""
    by_id = {one.policy.policy_id: one for one in assigned}
    changed, ending = list[Policy](), list[PolicyId]()
    released = list[tuple[PolicyId, int]]()
    for policy_id, ours in held.items():
        found = by_id.get(policy_id)
        is_ours = found is not None and found.epoch == ours.epoch
        if ours.has_ended:
            if not (is_ours and ours.is_cancelled):
                released.append((policy_id, ours.epoch))
        elif found is None or not is_ours:
            ending.append(policy_id)
        elif found.policy != ours.policy:
            changed.append(found.policy)
    gone = {policy_id for policy_id, _ in released}
    started = [
        one
        for policy_id, one in by_id.items()
        # By the epoch that was just given back nothing begins again.
        if policy_id not in held or (policy_id in gone and held[policy_id].epoch != one.epoch)
    ]
    return Duties(tuple(started), tuple(changed), tuple(ending), tuple(released))
