"""What commands get of a replication master, as messages and as values."""

from protos import replication_pb2 as pb
from replicator.master.messages import (
    caller_from,
    caller_to,
    capacity_from,
    capacity_to,
    policy_from,
    policy_id_from,
    policy_to,
    report_from,
    report_to,
    time_from,
)
from replicator.master.records import (
    Holder,
    Leaving,
    PolicyRecord,
    ReplicationError,
    ReplicationState,
    SyncerLease,
    SyncerRecord,
)
from replicator.master.syncer_rules import Caller
from replicator.master.views import MasterStatus, ReplicationView, SyncerView
from replicator.replication import Condition, ReplicationFault
from runtime.errors import RemoteProtocolError
from runtime.rpc import printable


def view_to(view: ReplicationView) -> pb.Replication:
    """The message of a replication."""
    record, state = view.record, view.state
    message = pb.Replication(
        policy=policy_to(record.policy),
        created_ms=record.created_ms,
        changed_by=record.changed_by,
        changed_ms=record.changed_ms,
        reason=record.reason,
        is_deleted=record.is_deleted,
        skips_cleanup=record.skips_cleanup,
        returns_policy_id=record.returns_policy or "",
        failed_over_ms=record.failed_over_ms,
        condition=view.condition.value,
        condition_reason=view.reason,
        epoch=state.epoch,
        waiting_since_ms=state.waiting_since_ms,
        sequence=state.sequence,
        reported_ms=state.reported_ms,
        seen_ms=view.seen_ms,
        now_ms=view.now_ms,
        is_enabled=view.is_enabled,
        was_given=state.was_given,
    )
    if state.holder:
        message.holder.CopyFrom(_holder_to(state.holder))
        if view.lease_expires_ms is not None:
            message.holder.lease_expires_ms = view.lease_expires_ms
    if state.leaving:
        message.leaving.holder.CopyFrom(_holder_to(state.leaving.holder))
        message.leaving.epoch = state.leaving.epoch
        message.leaving.taken_ms = state.leaving.taken_ms
        message.leaving.until_ms = state.leaving.until_ms
    if state.report:
        message.report.CopyFrom(report_to(state.report))
    if state.error:
        message.error.fault = state.error.fault.value
        message.error.message = state.error.message
        message.error.at_ms = state.error.at_ms
    return message


def view_from(message: pb.Replication) -> ReplicationView:
    """The replication of a message.

    Raises:
        UsageError: it is invalid; see messages.checked_answer.
        RemoteProtocolError: it is invalid.
    """
    policy, returns = policy_from(message.policy), message.returns_policy_id
    has_holder, has_leaving = message.HasField("holder"), message.HasField("leaving")
    if has_holder and has_leaving:
        raise RemoteProtocolError("a replication has a holder, and one that leaves it")
    try:
        condition = Condition(message.condition)
        error = (
            ReplicationError(
                ReplicationFault(message.error.fault),
                message.error.message,
                time_from(message.error.at_ms),
            )
            if message.HasField("error")
            else None
        )
    except ValueError as invalid:
        raise RemoteProtocolError(f"replication {policy.policy_id}: {invalid}") from invalid
    record = PolicyRecord(
        policy,
        time_from(message.created_ms),
        time_from(message.changed_ms),
        printable(message.changed_by),
        printable(message.reason),
        message.is_deleted,
        message.skips_cleanup,
        policy_id_from(returns) if returns else None,
        time_from(message.failed_over_ms) if message.HasField("failed_over_ms") else None,
    )
    state = ReplicationState(
        policy.policy_id,
        time_from(message.waiting_since_ms),
        message.epoch,
        _holder_from(message.holder) if has_holder else None,
        _leaving_from(message.leaving) if has_leaving else None,
        message.sequence,
        report_from(message.report) if message.HasField("report") else None,
        time_from(message.reported_ms) if message.HasField("reported_ms") else None,
        error,
        message.was_given,
    )
    has_lease = has_holder and message.holder.HasField("lease_expires_ms")
    return ReplicationView(
        record,
        state,
        condition,
        printable(message.condition_reason),
        time_from(message.seen_ms) if message.HasField("seen_ms") else None,
        time_from(message.holder.lease_expires_ms) if has_lease else None,
        time_from(message.now_ms),
        message.is_enabled,
    )


def _holder_to(holder: Holder) -> pb.Holder:
    caller = caller_to(Caller(holder.syncer_id, holder.session))
    return pb.Holder(syncer=caller, host=holder.host, since_ms=holder.since_ms)


def _holder_from(message: pb.Holder) -> Holder:
    caller = caller_from(message.syncer, "")
    return Holder(
        caller.syncer_id, caller.session, printable(message.host), time_from(message.since_ms)
    )


def _leaving_from(message: pb.Leaving) -> Leaving:
    holder = _holder_from(message.holder)
    return Leaving(holder, message.epoch, time_from(message.taken_ms), time_from(message.until_ms))


def status_to(status: MasterStatus) -> pb.GetStatusResponse:
    """The message of a master's status."""
    return pb.GetStatusResponse(
        is_enabled=status.is_enabled,
        syncers=[_syncer_to(one) for one in status.syncers],
        policies=status.policies,
        unassigned=status.unassigned,
        now_ms=status.now_ms,
        store=status.store,
        assignment_mode=status.assignment_mode,
        assignment_strategy=status.assignment_strategy,
        tokens=status.tokens,
        pending_entries_max=status.pending_entries_max,
        fault=status.fault,
        roles_enforced=status.roles_enforced,
    )


def status_from(message: pb.GetStatusResponse) -> MasterStatus:
    """The status of a message.

    Raises:
        UsageError: it is invalid; see messages.checked_answer.
        RemoteProtocolError: it is invalid.
    """
    return MasterStatus(
        message.is_enabled,
        tuple(_syncer_from(one) for one in message.syncers),
        message.policies,
        message.unassigned,
        time_from(message.now_ms),
        printable(message.store),
        printable(message.assignment_mode),
        printable(message.assignment_strategy),
        message.tokens,
        message.pending_entries_max,
        printable(message.fault),
        message.roles_enforced,
    )


def _syncer_to(view: SyncerView) -> pb.Syncer:
    record = view.record
    return pb.Syncer(
        syncer=caller_to(Caller(record.syncer_id, record.session)),
        owner=record.owner,
        host=record.host,
        started_ms=record.started_ms,
        capacity=capacity_to(record.capacity),
        renewed_ms=record.lease.renewed_ms,
        lease_expires_ms=record.lease.expires_ms,
        replications=view.replications,
    )


def _syncer_from(message: pb.Syncer) -> SyncerView:
    if message.renewed_ms >= message.lease_expires_ms:
        raise RemoteProtocolError("a lease ends before it was renewed")
    caller = caller_from(message.syncer, message.owner)
    record = SyncerRecord(
        caller.syncer_id,
        caller.session,
        caller.owner,
        printable(message.host),
        time_from(message.started_ms),
        capacity_from(message.capacity),
        SyncerLease(time_from(message.renewed_ms), time_from(message.lease_expires_ms)),
    )
    return SyncerView(record, message.replications)
