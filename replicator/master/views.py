"""What is said of a replication: what is wanted, how it is, how sure that is."""

from dataclasses import dataclass, replace

from replicator.master.leases import is_valid
from replicator.master.records import (
    PolicyRecord,
    ReplicationState,
    StoredState,
    SyncerRecord,
    wanted,
)
from replicator.replication import Condition, DesiredState, PolicyId, ReplicationReport
from replicator.syncer.prefixes import uncovered


@dataclass(frozen=True, slots=True)
class ReplicationView:
    """One replication as of `now_ms`. `lease_expires_ms` is that of its holder.
    `reason` says why its condition is not known; otherwise it is empty.
    """

    record: PolicyRecord
    state: ReplicationState
    condition: Condition
    reason: str
    seen_ms: int | None
    lease_expires_ms: int | None
    now_ms: int
    is_enabled: bool

    @property
    def policy_id(self) -> PolicyId:
        """Its ID."""
        return self.record.policy.policy_id


@dataclass(frozen=True, slots=True)
class SyncerView:
    """A syncer and how many replications it has."""

    record: SyncerRecord
    replications: int


@dataclass(frozen=True, slots=True)
class MasterStatus:
    """A master's view of all, and its own settings. `fault` names a thread that is
    lost; empty if none is.
    """

    is_enabled: bool
    syncers: tuple[SyncerView, ...]
    policies: int
    unassigned: int
    now_ms: int
    store: str
    assignment_mode: str
    assignment_strategy: str
    tokens: int
    pending_entries_max: int
    fault: str = ""
    roles_enforced: bool = False


def replication_view(state: StoredState, record: PolicyRecord) -> ReplicationView:
    """The view of a policy whose state is known."""
    found = state.state(record.policy.policy_id)
    assert found is not None
    syncer = state.syncer(found.holder.syncer_id) if found.holder else None
    if syncer is not None and found.holder and syncer.session != found.holder.session:
        syncer = None
    condition, reason = _condition(state, record, found, syncer)
    return ReplicationView(
        record,
        found,
        condition,
        reason,
        syncer.lease.renewed_ms if syncer else found.reported_ms,
        syncer.lease.expires_ms if syncer else None,
        state.now_ms,
        state.settings.is_enabled,
    )


def _condition(
    state: StoredState, record: PolicyRecord, found: ReplicationState, syncer: SyncerRecord | None
) -> tuple[Condition, str]:
    if found.leaving is not None:
        age_s = max(state.now_ms - found.leaving.taken_ms, 0) // 1000
        name = found.leaving.holder.syncer_id
        return Condition.UNKNOWN, f"syncer {name} was told to stop {age_s} s ago, and may not know"
    if found.holder is not None:
        name = found.holder.syncer_id
        if syncer is None or not is_valid(syncer.lease, state.now_ms):
            last_ms = syncer.lease.renewed_ms if syncer else found.holder.since_ms
            age_s = max(state.now_ms - last_ms, 0) // 1000
            return Condition.UNKNOWN, f"syncer {name} was last heard of {age_s} s ago"
        if found.report is None or found.sequence == 0:
            age_s = max(state.now_ms - found.holder.since_ms, 0) // 1000
            return Condition.UNKNOWN, f"syncer {name} has it for {age_s} s, and has not reported"
        return found.report.condition, ""
    if found.report is not None and found.report.condition is Condition.CANCELLED:
        return Condition.CANCELLED, ""
    match wanted(record, state.settings):
        case DesiredState.PAUSED:
            return Condition.PAUSED, ""
        case DesiredState.CANCELLED if found.has_ended:
            return Condition.CANCELLED, ""
        case _:
            return Condition.UNASSIGNED, ""


def rpo_ms(view: ReplicationView) -> int | None:
    """The age of the oldest change that is not proven at the target, in ms; None if it
    is not known, such as while keys are compared that an order has added.
    """
    report = view.state.report
    if report is None or report.oldest_unproven_ms is None or missing_prefixes(view):
        return None
    if view.condition is Condition.UNKNOWN:
        return None
    return max(view.now_ms - report.oldest_unproven_ms, 0)


def current_report(view: ReplicationView) -> ReplicationReport | None:
    """What was reported last, as far as it is true of what is wanted now: of keys that
    an order has added nothing was compared, whatever an older report says of others.
    """
    report = view.state.report
    if report is None or not missing_prefixes(view):
        return report
    return replace(
        report,
        proven_position=None,
        proven_ms=None,
        proof_level="",
        differences=report.differences or None,
    )


def missing_prefixes(view: ReplicationView) -> tuple[str, ...]:
    """The prefixes that are wanted, and whose keys were not all brought over yet; the
    empty one is all keys. With a report only.
    """
    report = view.state.report
    known = report.checkpoint.prefixes if report is not None else ()
    return uncovered(view.record.policy.prefixes, known)
