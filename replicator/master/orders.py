"""What operators order: policies, what is wanted of them, failover."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from replicator.master.errors import PolicyRefusedError
from replicator.master.records import (
    ClusterSettings,
    PolicyRecord,
    ReplicationState,
    StoredState,
    can_go,
)
from replicator.master.transition import Transition, known_policy, taken_from_living
from replicator.replication import DesiredState, Policy, PolicyId, ReplicationOptions
from runtime.errors import BusyError

# Enough for any cluster; all policies and states are read with every request.
POLICIES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class OperatorOrder:
    """Who orders something, and why."""

    who: str
    reason: str = ""


def add_policy(
    state: StoredState, policy: Policy, order: OperatorOrder, returns_policy: PolicyId | None
) -> Transition[None]:
    """Begin a replication. `returns_policy` is the one that failed over whose target is
    copied back by the new one.

    Raises:
        PolicyRefusedError: there is one of this ID or pair of buckets, or too many; or
            it does not return the replication that it should.
        PolicyNotFoundError: there is none to return.
    """
    check_is_new(policy, (record.policy for record in state.policies))
    if len(state.policies) >= POLICIES_MAX:
        raise PolicyRefusedError(f"there are {POLICIES_MAX} replications already")
    depends_on = frozenset({state.next_round.key})
    if returns_policy is not None:
        record, _ = known_policy(state, returns_policy)
        depends_on |= {record.key}
        if record.failed_over_ms is None:
            raise PolicyRefusedError(
                f"replication {returns_policy} has not failed over: nothing has to come back"
            )
        if (policy.source, policy.target) != (record.policy.target, record.policy.source):
            raise PolicyRefusedError(
                f"replication {returns_policy} is between other buckets",
                hint="Its target comes back to its source.",
            )
    record = PolicyRecord(
        policy, state.now_ms, state.now_ms, order.who, order.reason, returns_policy=returns_policy
    )
    waiting = ReplicationState(policy.policy_id, state.now_ms)
    # Two masters must not add the same pair at once.
    return Transition(None, (record, waiting, state.next_round), (), depends_on)


def check_is_new(policy: Policy, others: Iterable[Policy]) -> None:
    """See that a policy has an ID and a pair of buckets that no other one has.

    Raises:
        PolicyRefusedError: another one has.
    """
    for known in others:
        if known.policy_id == policy.policy_id:
            raise PolicyRefusedError(f"there is a replication {policy.policy_id} already")
        if (known.source, known.target) == (policy.source, policy.target):
            raise PolicyRefusedError(
                f"{policy.source} is replicated to {policy.target} by {known.policy_id}",
                hint="One syncer works for a pair of buckets. To let other keys cross:"
                f" treefold bucket prefixes {known.policy_id}.",
            )


def set_desired(
    state: StoredState, policy_id: PolicyId, desired: DesiredState, order: OperatorOrder
) -> Transition[None]:
    """Pause, resume or cancel a replication. One that stopped with an error is tried
    again: the order is a change in any case.

    Raises:
        PolicyNotFoundError: there is none.
        PolicyRefusedError: it was cancelled, or resumed though it failed over.
    """
    record, _ = known_policy(state, policy_id)
    is_cancelled = record.is_deleted or record.policy.desired is DesiredState.CANCELLED
    if is_cancelled and desired is not DesiredState.CANCELLED:
        raise PolicyRefusedError(
            f"replication {policy_id} was cancelled, and does not go on from where it was",
            hint=f"Delete it, and add it again: treefold bucket delete {policy_id}.",
        )
    if record.failed_over_ms is not None and desired is DesiredState.ENABLED:
        raise PolicyRefusedError(
            f"replication {policy_id} failed over: its target has writers of its own",
            hint=f"Bring their changes back first: treefold bucket failback {policy_id}.",
        )
    if desired is DesiredState.CANCELLED:
        # A syncer has to remove its snapshots, and writes nothing for it any more.
        record = replace(record, failed_over_ms=None)
    return Transition(None, (_changed(state, record, order, desired=desired),))


def set_options(
    state: StoredState,
    policy_id: PolicyId,
    options: ReplicationOptions,
    order: OperatorOrder,
    *,
    revision: int = 0,
) -> Transition[None]:
    """Give a replication other options, such as another rate, while it runs. They were
    chosen by what the policy was at this `revision`; 0 is any.

    Raises:
        PolicyNotFoundError: there is none.
        PolicyRefusedError: it was cancelled.
        BusyError: it has another revision.
    """
    record, _ = known_policy(state, policy_id)
    if _is_over(record):
        raise PolicyRefusedError(f"replication {policy_id} was cancelled")
    if record.policy.options == options:
        # A repeated order, whose first answer was lost.
        return Transition(None)
    if revision not in (0, record.policy.revision):
        raise BusyError(
            f"replication {policy_id} was changed meanwhile by {record.changed_by}",
            hint="Look at it again before you change it.",
        )
    policy = replace(record.policy, options=options)
    return Transition(None, (_changed(state, replace(record, policy=policy), order),))


def set_prefixes(
    state: StoredState, policy_id: PolicyId, prefixes: tuple[str, ...], order: OperatorOrder
) -> Transition[None]:
    """Replicate the keys below these prefixes from now on, and no others (OZ-161).

    Raises:
        PolicyNotFoundError: there is none.
        PolicyRefusedError: it was cancelled or failed over, or brings the changes of
            another replication back.
    """
    record, _ = known_policy(state, policy_id)
    if _is_over(record):
        raise PolicyRefusedError(f"replication {policy_id} was cancelled")
    # A way back compares what the way forth had: below other prefixes nothing would
    # have come back, and the way forth would delete it.
    if record.failed_over_ms is not None:
        raise PolicyRefusedError(
            f"replication {policy_id} failed over: its target has writers of its own",
            hint=f"Bring their changes back first: treefold bucket failback {policy_id}.",
        )
    if record.returns_policy is not None:
        raise PolicyRefusedError(
            f"replication {policy_id} brings back what {record.returns_policy} has copied"
        )
    policy = replace(record.policy, prefixes=prefixes)
    return Transition(None, (_changed(state, replace(record, policy=policy), order),))


def set_enabled(state: StoredState, order: OperatorOrder, *, is_enabled: bool) -> Transition[None]:
    """Let replications run, or none of them; what is wanted of each stays."""
    return Transition(None, (ClusterSettings(is_enabled, state.now_ms, order.who, order.reason),))


def delete_policy(
    state: StoredState, policy_id: PolicyId, order: OperatorOrder, *, force: bool
) -> Transition[bool]:
    """End a replication and forget it; the answer is whether that is done. Otherwise a
    syncer has to remove its snapshots first, or, with `force`, to stop.

    Raises:
        PolicyNotFoundError: there is none.
    """
    record, found = known_policy(state, policy_id)
    changed = _changed(state, record, order)
    deleted = replace(changed, is_deleted=True, skips_cleanup=force or record.skips_cleanup)
    if can_go(deleted, found):
        return Transition(True, (), (record.key, found.key))
    if not deleted.skips_cleanup or found.holder is None:
        return Transition(False, (deleted,), (), frozenset({found.key}))
    holder = state.syncer(found.holder.syncer_id)
    taken = taken_from_living(found, holder, state.now_ms)
    keys = frozenset({holder.key}) if holder else frozenset()
    return Transition(False, (deleted, taken), (), keys)


def fail_over(state: StoredState, policy_id: PolicyId, order: OperatorOrder) -> Transition[None]:
    """Fence a replication: its epoch is raised, and no syncer gets it until
    `end_failover`. The process that had it may write until it hears of this, or its
    lease ends: until then the state has `leaving`.

    Raises:
        PolicyNotFoundError: there is none.
        PolicyRefusedError: it was cancelled.
    """
    record, found = known_policy(state, policy_id)
    if record.is_deleted or record.policy.desired is DesiredState.CANCELLED:
        raise PolicyRefusedError(f"replication {policy_id} was cancelled")
    if record.failed_over_ms is not None:
        return Transition(None)
    holder = state.syncer(found.holder.syncer_id) if found.holder else None
    epoch = state.next_round
    taken = replace(taken_from_living(found, holder, state.now_ms), epoch=epoch.number)
    changed = replace(_changed(state, record, order), failed_over_ms=state.now_ms)
    keys = frozenset({holder.key}) if holder else frozenset()
    return Transition(None, (changed, taken, epoch), (), keys)


def end_failover(state: StoredState, policy_id: PolicyId, order: OperatorOrder) -> Transition[None]:
    """Let a replication that failed over go on from where it was.

    Raises:
        PolicyNotFoundError: there is none.
        PolicyRefusedError: it did not fail over, its fence is not complete, or another
            replication still copies its target back.
    """
    record, found = known_policy(state, policy_id)
    if record.failed_over_ms is None:
        raise PolicyRefusedError(f"replication {policy_id} has not failed over")
    if not found.is_free:
        raise PolicyRefusedError(
            f"replication {policy_id}: a syncer may still write to its target",
            hint="Try again once its lease has ended.",
        )
    for other in state.policies:
        back = state.state(other.policy.policy_id)
        is_stopped = other.failed_over_ms is not None or _is_over(other)
        if other.returns_policy == policy_id and not (back and back.is_free and is_stopped):
            raise PolicyRefusedError(
                f"replication {other.policy.policy_id} still copies its target back",
                hint=f"End that first: treefold bucket failback {policy_id} --finish.",
            )
    changed = replace(_changed(state, record, order), failed_over_ms=None)
    # Whoever began to copy back meanwhile changed the round.
    return Transition(None, (changed, state.next_round), (), frozenset({found.key}))


def _is_over(record: PolicyRecord) -> bool:
    return record.is_deleted or record.policy.desired is DesiredState.CANCELLED


def _changed(
    state: StoredState,
    record: PolicyRecord,
    order: OperatorOrder,
    *,
    desired: DesiredState | None = None,
) -> PolicyRecord:
    policy = replace(
        record.policy,
        desired=desired or record.policy.desired,
        revision=record.policy.revision + 1,
    )
    return replace(
        record,
        policy=policy,
        changed_ms=state.now_ms,
        changed_by=order.who,
        reason=order.reason,
    )
