"""Replication masters, syncers and replications in `treefold status`.

Pure functions from what the masters answered. What did not answer is UNKNOWN, with the
reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from admin.bucket_output import counted
from admin.replication_output import condition_text, master_json, status_lines, view_json
from replicator.master.views import MasterStatus, ReplicationView
from replicator.replication import Condition, DesiredState
from runtime.output import JsonObject, age_text

# Rows of replications and syncers; `treefold bucket status` has all.
_ROWS_MAX = 8


@dataclass(frozen=True, slots=True)
class MasterAnswer:
    """A replication master, and what it answered: None if it did not, and why."""

    address: str
    status: MasterStatus | None = None
    replications: tuple[ReplicationView, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplicationProblem:
    """Something to act on; `action` is a command to copy. `is_known` tells what is
    wrong from what is unknown.
    """

    text: str
    action: str
    is_known: bool = True


def problems_of_masters(masters: Sequence[MasterAnswer]) -> Iterator[ReplicationProblem]:
    """All that is wrong or unknown of replications and who works on them."""
    for one in masters:
        look = "systemctl status treefold-replication-master"
        if one.error:
            text = f"replication master {one.address}: {one.error}"
            yield ReplicationProblem(text, look, is_known=False)
        elif one.status and one.status.fault:
            yield ReplicationProblem(
                f"replication master {one.address}: {one.status.fault}",
                "journalctl -u treefold-replication-master",
            )
    answered = _answered(masters)
    if answered is None or answered.status is None:
        return
    if not answered.status.is_enabled and answered.replications:
        yield ReplicationProblem("replication is disabled cluster-wide", "treefold bucket enable")
    for view in answered.replications:
        yield from _problems_of_one(view, is_enabled=answered.status.is_enabled)


def _problems_of_one(view: ReplicationView, *, is_enabled: bool) -> Iterator[ReplicationProblem]:
    look = f"treefold bucket status {view.policy_id}"
    named = f"replication {view.policy_id}"
    report = view.state.report
    if view.condition is Condition.ERROR and report is not None:
        fault = report.fault.value if report.fault else "error"
        yield ReplicationProblem(f"{named} stopped: {fault}: {report.message}", look)
    if report is not None and report.differences:
        text = f"{named}: {report.differences} differences between source and target"
        yield ReplicationProblem(text, look)
    if report is not None and report.failed:
        text = f"{named}: {counted(report.failed, 'key')} cannot be copied"
        yield ReplicationProblem(text, f"treefold bucket backlog {view.policy_id}")
    if view.record.failed_over_ms is not None:
        text = f"{named} failed over: its source is not in service"
        yield ReplicationProblem(text, f"treefold bucket failback {view.policy_id}")
        return
    if view.condition is Condition.UNKNOWN:
        yield ReplicationProblem(f"{named}: {view.reason}", look, is_known=False)
    if view.condition is Condition.WAITING and report is not None:
        fault = report.fault.value if report.fault else "a store does not answer"
        yield ReplicationProblem(f"{named} waits: {fault}: {report.message}", look)
    is_wanted = view.record.policy.desired is DesiredState.ENABLED and is_enabled
    if view.condition is Condition.UNASSIGNED and is_wanted:
        age = age_text((view.now_ms - view.state.waiting_since_ms) / 1000)
        text = f"{named}: no syncer has had it since {age}"
        yield ReplicationProblem(text, "systemctl status treefold-syncer", is_known=False)


def lines_of_masters(masters: Sequence[MasterAnswer]) -> Iterator[str]:
    """The lines of all masters, then of syncers and replications."""
    if not masters:
        yield "replication master: not looked at; --master HOST:PORT names one"
        return
    for one in masters:
        if one.status is None:
            yield f"replication master {one.address}: UNKNOWN, {one.error}"
            continue
        text = counted(one.status.policies, "replication")
        text += "" if one.status.is_enabled else ", disabled"
        text += "" if one.status.roles_enforced else "; no TLS, so no roles"
        yield f"replication master {one.address}: {text}"
    answered = _answered(masters)
    if answered is None or answered.status is None:
        yield "syncers: UNKNOWN, no replication master answered"
        return
    status = answered.status
    alive = [one for one in status.syncers if status.now_ms < one.record.lease.expires_ms]
    yield f"syncers: {len(alive)} of {len(status.syncers)} have a lease"
    for syncer in status.syncers[:_ROWS_MAX]:
        if syncer not in alive:
            age = age_text((status.now_ms - syncer.record.lease.renewed_ms) / 1000)
            yield f"  {syncer.record.syncer_id} on {syncer.record.host}: UNKNOWN, last seen {age}"
    for view in answered.replications[:_ROWS_MAX]:
        yield f"  {view.policy_id}: {condition_text(view)}"
        yield from (f"    {line}" for line in status_lines(view))
    if len(answered.replications) > _ROWS_MAX:
        more = len(answered.replications) - _ROWS_MAX
        yield f"  and {more} more: see `treefold bucket status`"


def masters_json(masters: Sequence[MasterAnswer]) -> list[JsonObject]:
    """Each master; null is unknown."""
    return [
        {
            "address": one.address,
            "error": one.error or None,
            "status": master_json(one.status) if one.status else None,
            "replications": [view_json(view) for view in one.replications] if one.status else None,
        }
        for one in masters
    ]


def _answered(masters: Sequence[MasterAnswer]) -> MasterAnswer | None:
    """The first one that answered: all of one database say the same."""
    return next((one for one in masters if one.status is not None), None)
