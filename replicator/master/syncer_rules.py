"""What a master answers a syncer: lease, assignments, and whose reports count.

A report counts if its session has a valid lease and the replication, in the epoch that
it had when it reported, and if none that is newer came before. Whatever is late,
repeated or from before a takeover changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replicator.master.assignment import AssignmentRules, pulled
from replicator.master.errors import SyncerRefusedError
from replicator.master.leases import has_ended, is_valid
from replicator.master.records import (
    Holder,
    PolicyRecord,
    Record,
    RecordKey,
    RecordKind,
    ReplicationError,
    ReplicationState,
    StoredState,
    SyncerCapacity,
    SyncerLease,
    SyncerRecord,
    wanted,
)
from replicator.master.transition import Transition, given_to, given_up
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.syncer.lease import LeaseLostError
from runtime.errors import BusyError, UsageError

# Enough for any cluster that one database serves.
SYNCERS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Which process calls. `owner` is as in SyncerRecord."""

    syncer_id: SyncerId
    session: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a process says of itself when it begins."""

    host: str
    started_ms: int
    capacity: SyncerCapacity


@dataclass(frozen=True, slots=True)
class HeldReport:
    """What the holder of a replication in an epoch says of it."""

    policy_id: PolicyId
    epoch: int
    sequence: int
    report: ReplicationReport


@dataclass(frozen=True, slots=True)
class Assignment:
    """A replication that a syncer has. `policy.desired` and its options are what counts
    now, all settings considered. All that the syncer writes anywhere carries `epoch`.
    `target_probe` is what the last syncer has said of the target.
    """

    policy: Policy
    epoch: int
    checkpoint: Checkpoint
    target_probe: str = ""


@dataclass(frozen=True, slots=True)
class SyncerRules:
    """How long leases last, and how many changes may wait in a queue at most, whatever
    a policy says (OZ-144).
    """

    lease_ms: int
    pending_entries_max: int
    assignment: AssignmentRules


@dataclass(frozen=True, slots=True)
class HeartbeatAnswer:
    """All that the syncer has, and whose reports did not count."""

    assignments: tuple[Assignment, ...] = ()
    refused: tuple[PolicyId, ...] = ()


def register(
    state: StoredState, caller: Caller, registration: Registration, *, lease_ms: int, age_ms: int
) -> Transition[None]:
    """Give a process its lease. What it has from before gets a new epoch: it asks
    because it has stopped.

    `age_ms` is how long the syncer's record is unchanged at least, by RecordAges.

    Raises:
        BusyError: another process of this syncer may still work, or there are too many
            syncers.
        SyncerRefusedError: another certificate registered this ID.
    """
    now_ms, known = state.now_ms, state.syncer(caller.syncer_id)
    if known is None and len(state.syncers) >= SYNCERS_MAX:
        raise BusyError(f"{SYNCERS_MAX} syncers are already known")
    if known is not None:
        _check_owner(known, caller)
        is_other = known.session != caller.session
        if is_other and not has_ended(known.lease, now_ms, age_ms):
            wait_s = max(known.lease.duration_ms - age_ms, 0) / 1000
            raise BusyError(
                f"another process of syncer {caller.syncer_id}, on {known.host}, may still work",
                hint=f"Its lease ends in some {wait_s:.0f} s, unless it renews it.",
            )
    syncer = SyncerRecord(
        caller.syncer_id,
        caller.session,
        caller.owner,
        registration.host,
        registration.started_ms,
        registration.capacity,
        SyncerLease(now_ms, now_ms + lease_ms),
    )
    has = [one for one in state.states if _is_held_by(one, caller.syncer_id)]
    free = [given_up(one, now_ms) for one in has]
    if not free or known is None or known.session != caller.session:
        return Transition(None, (syncer, *free))
    epoch = state.next_round
    again = [given_to(one, syncer, epoch.number, now_ms) for one in free]
    return Transition(None, (syncer, epoch, *again))


def heartbeat(
    state: StoredState,
    caller: Caller,
    capacity: SyncerCapacity,
    reports: Sequence[HeldReport],
    rules: SyncerRules,
) -> Transition[HeartbeatAnswer]:
    """Renew a lease, take in reports, and say what the syncer has.

    Raises:
        LeaseLostError: the lease has ended, or there is none: the syncer must stop all
            it has, and register again.
        SyncerRefusedError: another certificate registered this ID.
    """
    now_ms, known = state.now_ms, _valid_syncer(state, caller)
    lease = SyncerLease(now_ms, now_ms + rules.lease_ms)
    syncer = replace(known, capacity=capacity, lease=lease)
    changed = dict[PolicyId, ReplicationState]()
    depends_on, refused = set[RecordKey](), []
    for held in reports:
        found = changed.get(held.policy_id) or state.state(held.policy_id)
        try:
            after = _with_report(state, found, caller, held)
        except (LeaseLostError, UsageError):
            refused.append(held.policy_id)
            continue
        if after is not found:
            changed[held.policy_id] = after
            depends_on.add(RecordKey(RecordKind.POLICY, held.policy_id))
    records: list[Record] = [syncer]
    granted = pulled(state, syncer, rules.assignment)
    if granted:
        changed.update({one.policy_id: one for one in granted})
        records.append(state.next_round)
        depends_on.add(state.settings.key)
        depends_on |= {RecordKey(RecordKind.POLICY, one.policy_id) for one in granted}
    held_now = [changed.get(one.policy_id, one) for one in state.states]
    assignments = tuple(
        _assignment(record, one, state, rules)
        for one in held_now
        if _has(one.holder, caller) and (record := state.policy(one.policy_id))
    )
    # An assignment that was taken meanwhile must not be confirmed by this answer.
    depends_on |= {RecordKey(RecordKind.STATE, one.policy.policy_id) for one in assignments}
    answer = HeartbeatAnswer(assignments, tuple(refused))
    return Transition(answer, (*records, *changed.values()), (), frozenset(depends_on))


def save_report(state: StoredState, caller: Caller, held: HeldReport) -> Transition[None]:
    """Take in one report. A repeated one changes nothing.

    Raises:
        LeaseLostError: the lease has ended, or the replication is not the caller's in
            this epoch, or a newer report came before.
        SyncerRefusedError: another certificate registered this ID.
        UsageError: the checkpoint would go back.
    """
    known, found = _valid_syncer(state, caller), state.state(held.policy_id)
    after = _with_report(state, found, caller, held)
    if after is found:
        return Transition(None)
    # The lease must not end, and begin anew, in between.
    policy = RecordKey(RecordKind.POLICY, held.policy_id)
    return Transition(None, (after,), (), frozenset({known.key, policy}))


def release(
    state: StoredState, caller: Caller, released: Sequence[tuple[PolicyId, int]], *, ends: bool
) -> Transition[None]:
    """Note that a process has stopped working on these replications, each as it had it
    in an epoch; with `ends` on all, and that it gives up its lease.

    Raises:
        SyncerRefusedError: another certificate registered this ID.
    """
    known, epochs = state.syncer(caller.syncer_id), dict(released)
    if known is None or known.session != caller.session:
        return Transition(None)
    _check_owner(known, caller)
    states = []
    for one in state.states:
        last = one.holder or (one.leaving.holder if one.leaving else None)
        epoch = one.leaving.epoch if one.leaving else one.epoch
        if _has(last, caller) and (ends or epochs.get(one.policy_id) == epoch):
            states.append(given_up(one, state.now_ms))
    return Transition(None, tuple(states), (known.key,) if ends else ())


def goes_back(before: Checkpoint, after: Checkpoint) -> bool:
    """Whether a checkpoint says less than one before it (OZ-135). Positions of two logs
    cannot be compared. Where the log has a gap the position is given up: the round that
    follows compares (OZ-103).
    """
    old, new = before.position, after.position
    if old is None:
        return False
    if new is None:
        return after.stage is Stage.LIVE or after.stage not in (before.stage, Stage.INCREMENTAL)
    return new.log == old.log and new.index < old.index


def _valid_syncer(state: StoredState, caller: Caller) -> SyncerRecord:
    known = state.syncer(caller.syncer_id)
    if known is None or known.session != caller.session or not is_valid(known.lease, state.now_ms):
        raise LeaseLostError(
            f"syncer {caller.syncer_id} has no valid lease",
            hint="It stops what it does, and registers again.",
            policy_id="",
        )
    _check_owner(known, caller)
    return known


def _check_owner(known: SyncerRecord, caller: Caller) -> None:
    if known.owner != caller.owner:
        raise SyncerRefusedError(
            f"syncer {known.syncer_id} was registered by {known.owner or 'a process without TLS'}",
            hint="A state folder was copied, or its certificate replaced: begin with an empty one.",
        )


def _is_held_by(state: ReplicationState, syncer_id: SyncerId) -> bool:
    return state.holder is not None and state.holder.syncer_id == syncer_id


def _has(holder: Holder | None, caller: Caller) -> bool:
    return holder is not None and (holder.syncer_id, holder.session) == (
        caller.syncer_id,
        caller.session,
    )


def _with_report(
    state: StoredState, found: ReplicationState | None, caller: Caller, held: HeldReport
) -> ReplicationState:
    """The state with a report; the same one if it has it already."""
    record = state.policy(held.policy_id)
    is_held = found is not None and _has(found.holder, caller) and found.epoch == held.epoch
    if found is None or record is None or not is_held:
        raise LeaseLostError(
            f"replication {held.policy_id} is not the caller's in epoch {held.epoch}",
            hint="It stops working on it.",
            policy_id=held.policy_id,
        )
    if held.sequence == found.sequence and held.report == found.report:
        return found
    if held.sequence <= found.sequence:
        raise LeaseLostError(
            f"replication {held.policy_id}: a newer report than {held.sequence} is known",
            policy_id=held.policy_id,
        )
    if found.report is not None and goes_back(found.report.checkpoint, held.report.checkpoint):
        raise UsageError(
            f"replication {held.policy_id}: its position would go back",
            hint="What was acknowledged is at the target: a checkpoint never says less.",
        )
    report = held.report
    error = (
        ReplicationError(report.fault, report.message, state.now_ms)
        if report.fault is not None
        else found.error
    )
    after = replace(
        found, sequence=held.sequence, report=report, reported_ms=state.now_ms, error=error
    )
    is_over = wanted(record, state.settings) is DesiredState.CANCELLED
    if is_over and report.condition is Condition.CANCELLED:
        return given_up(after, state.now_ms)
    return after


def _assignment(
    record: PolicyRecord, one: ReplicationState, state: StoredState, rules: SyncerRules
) -> Assignment:
    options = record.policy.options
    entries = min(options.queue_entries_max, rules.pending_entries_max)
    policy = replace(
        record.policy,
        desired=wanted(record, state.settings),
        options=replace(options, queue_entries_max=entries),
    )
    if one.report is None:
        return Assignment(policy, one.epoch, Checkpoint())
    return Assignment(policy, one.epoch, one.report.checkpoint, one.report.target_probe)
