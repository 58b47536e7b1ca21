"""What commands print of replications: JSON, tables, and how sure each word is."""

from collections.abc import Iterator, Sequence

from admin.bucket_output import counted
from replicator.master.records import Holder
from replicator.master.views import (
    MasterStatus,
    ReplicationView,
    current_report,
    missing_prefixes,
    rpo_ms,
)
from replicator.replication import (
    Checkpoint,
    Condition,
    FailedKey,
    ReplicationOptions,
    ReplicationReport,
    Stage,
)
from replicator.stores.port import FeedPosition, SnapshotFacts
from runtime.eta import duration_text
from runtime.json_numbers import exact
from runtime.output import JsonObject, age_text, print_line, print_table, size_text, time_text


def view_json(view: ReplicationView) -> JsonObject:
    """All that is known of a replication; a time that is not known is null."""
    record, state = view.record, view.state
    policy, leaving = record.policy, state.leaving
    rpo, report = rpo_ms(view), current_report(view)
    return {
        "id": policy.policy_id,
        "source": policy.source,
        "target": policy.target,
        "prefixes": list(policy.prefixes),
        "options": options_json(policy.options),
        "desired": policy.desired.value,
        "revision": policy.revision,
        "enabled": view.is_enabled,
        "createdAt": _time(record.created_ms),
        "changedAt": _time(record.changed_ms),
        "changedBy": record.changed_by,
        "reason": record.reason,
        "isDeleted": record.is_deleted,
        "returns": record.returns_policy,
        "failedOverAt": _time(record.failed_over_ms),
        "condition": view.condition.value,
        "conditionReason": view.reason,
        "epoch": state.epoch,
        "syncer": _holder_json(state.holder),
        "leaseExpiresAt": _time(view.lease_expires_ms),
        "leaving": _holder_json(leaving.holder) if leaving else None,
        "leavingUntil": _time(leaving.until_ms) if leaving else None,
        "lastSeenAt": _time(view.seen_ms),
        "rpoSeconds": None if rpo is None else rpo / 1000,
        "error": {
            "fault": state.error.fault.value,
            "message": state.error.message,
            "at": _time(state.error.at_ms),
        }
        if state.error
        else None,
        "report": report_json(report) if report else None,
        "reportedAt": _time(state.reported_ms),
        "asOf": _time(view.now_ms),
    }


def options_json(options: ReplicationOptions) -> JsonObject:
    """The options of a replication, as JSON prints them."""
    return {
        "bytesPerSecond": options.bytes_per_second,
        "queueEntriesMax": options.queue_entries_max,
        "intervalSeconds": options.interval_s,
        "live": options.is_live,
        "newestWins": options.newest_wins,
        "keepsAcls": options.keeps_acls,
        "verifier": options.verifier or None,
    }


def report_json(report: ReplicationReport) -> JsonObject:
    """What a syncer says of a replication, as JSON prints it."""
    checkpoint = report.checkpoint
    return {
        "condition": report.condition.value,
        "fault": report.fault.value if report.fault else None,
        "message": report.message,
        "stage": checkpoint.stage.value,
        "baseSnapshot": _snapshot_json(checkpoint.base),
        "snapshot": _snapshot_json(checkpoint.snapshot),
        "lastKey": checkpoint.last_key,
        "position": position_json(checkpoint.position),
        "queued": report.queued,
        "applied": report.applied,
        "duplicates": report.duplicates,
        "failed": report.failed,
        "failedKeys": [failed_key_json(one) for one in report.failed_keys],
        "sentBytes": report.sent_bytes,
        "equalUpTo": position_json(report.proven_position),
        "provenAt": _time(report.proven_ms),
        "proofLevel": report.proof_level or None,
        "differences": report.differences,
        "oldestUnprovenAt": _time(report.oldest_unproven_ms),
        "lastSyncAt": _time(report.last_applied_ms),
        "lagP50Milliseconds": report.lag_p50_ms,
        "lagP99Milliseconds": report.lag_p99_ms,
    }


def failed_key_json(failed: FailedKey) -> JsonObject:
    """A key that fails by itself, and why."""
    return {"key": failed.key, "fault": failed.fault.value, "message": failed.message}


def failed_key_lines(named: Sequence[FailedKey], count: int) -> Iterator[str]:
    """Which keys fail, and why: those that are named, of so many."""
    for one in named:
        yield f"fails: {one.key!r}: {one.fault.value}: {one.message}"
    if left := max(0, count - len(named)):
        yield f"fails: {counted(left, 'other key' if named else 'key')}"


def position_json(position: FeedPosition | None) -> JsonObject | None:
    """A place in a log of changes; the index is text, since it may have 64 bits."""
    return {"log": position.log, "index": exact(position.index)} if position else None


def _snapshot_json(snapshot: SnapshotFacts | None) -> JsonObject | None:
    if snapshot is None:
        return None
    return {
        "name": snapshot.name,
        "id": snapshot.snapshot_id,
        "position": position_json(snapshot.position),
        "createdAt": _time(snapshot.created_ms),
    }


def _holder_json(holder: Holder | None) -> JsonObject | None:
    if holder is None:
        return None
    return {
        "id": holder.syncer_id,
        "session": holder.session,
        "host": holder.host,
        "since": _time(holder.since_ms),
    }


def _time(time_ms: int | None) -> str | None:
    return None if time_ms is None else time_text(time_ms / 1000)


def print_replications(views: Sequence[ReplicationView]) -> None:
    """A row a replication."""
    rows = [
        (
            view.policy_id,
            condition_text(view),
            view.state.report.checkpoint.stage.value if view.state.report else "-",
            view.state.holder.syncer_id if view.state.holder else "-",
            _known_age(rpo_ms(view)),
            f"{view.record.policy.source} to {view.record.policy.target}",
        )
        for view in views
    ]
    columns = ("REPLICATION", "CONDITION", "STAGE", "SYNCER", "RPO", "BUCKETS")
    print_table(columns, rows, folded=("CONDITION", "BUCKETS"))


def condition_text(view: ReplicationView) -> str:
    """How a replication is, in some words."""
    text = view.condition.value
    if view.record.failed_over_ms is not None:
        text += ", failed over"
    if view.record.is_deleted:
        text += ", being deleted"
    return text


def print_replication(view: ReplicationView) -> None:
    """Every field that is stored of one replication."""
    record, state, policy = view.record, view.state, view.record.policy
    print_line(f"Replication {policy.policy_id}: {condition_text(view)}")
    for name, text in (
        ("source", policy.source),
        ("target", policy.target),
        ("prefixes", ", ".join(policy.prefixes) or "all keys"),
        ("wanted", f"{policy.desired.value}, revision {policy.revision}"),
        ("options", _options_text(policy.options)),
        ("created", _time(record.created_ms) or ""),
        ("changed", f"{_time(record.changed_ms)} by {record.changed_by or 'nobody'}"),
        ("reason", record.reason),
        ("returns", record.returns_policy or ""),
        ("failed over", _time(record.failed_over_ms) or ""),
        ("epoch", str(state.epoch)),
        ("syncer", _holder_text(state.holder) or "none"),
        ("lease until", _time(view.lease_expires_ms) or ""),
        ("leaving", _holder_text(state.leaving.holder) if state.leaving else ""),
        ("last seen", _time(view.seen_ms) or "never"),
    ):
        if text:
            print_line(f"  {name + ':':<13}{text}")
    if state.error:
        error = f"{state.error.fault.value}: {state.error.message}"
        print_line(f"  last error:  {_time(state.error.at_ms)} {error}")
    for line in status_lines(view):
        print_line(f"  {line}")


def status_lines(view: ReplicationView) -> Iterator[str]:
    """What is known of how far a replication is. Where it is not known, that is said,
    with the reason and the age of the last word.
    """
    report = current_report(view)
    if view.condition is Condition.UNKNOWN:
        yield f"UNKNOWN: {view.reason}"
        if report is not None and view.seen_ms is not None:
            yield f"what follows is of {age_text((view.now_ms - view.seen_ms) / 1000)}"
    elif not view.is_enabled:
        yield "replication is disabled cluster-wide"
    if report is None:
        yield "nothing was reported yet"
        return
    if report.fault is not None:
        yield f"{report.condition.value}: {report.fault.value}: {report.message}"
    yield f"stage {report.checkpoint.stage.value}{_position_text(report)}"
    missing = missing_prefixes(view)
    is_first_copy = report.checkpoint.stage is Stage.INITIAL_BATCH
    if missing and (report.checkpoint.prefixes or not is_first_copy):
        yield f"being compared for the first time: {_keys_text(missing, report.checkpoint)}"
    yield _proof_text(report, view.now_ms)
    yield f"RPO {_known_age(rpo_ms(view))}, lag p50 {_ms(report.lag_p50_ms)}, p99" + (
        f" {_ms(report.lag_p99_ms)}"
    )
    sent = size_text(report.sent_bytes)
    yield (
        f"{report.queued} changes queued, {report.applied} applied, {report.duplicates} duplicates,"
        f" {report.failed} failed, {sent} sent"
    )
    yield from failed_key_lines(report.failed_keys, report.failed)


def _keys_text(missing: Sequence[str], known: Checkpoint) -> str:
    if "" not in missing:
        return f"keys below {', '.join(missing)}"
    return "all other keys" if known.prefixes else "all keys"


def _position_text(report: ReplicationReport) -> str:
    checkpoint = report.checkpoint
    if checkpoint.position is not None:
        return f", replicated up to position {checkpoint.position.index}"
    return f", replicated up to key {checkpoint.last_key!r}" if checkpoint.last_key else ""


def _proof_text(report: ReplicationReport, now_ms: int) -> str:
    """What comparisons have shown: the last proof, and what the last one found."""
    proven, at_ms = report.proven_position, report.proven_ms
    if at_ms is None:
        text = "not proven equal yet"
    else:
        place = f"up to position {proven.index}" if proven else "at the time of the comparison"
        level = f", level {report.proof_level}" if report.proof_level else ""
        text = f"equal {place} ({age_text((now_ms - at_ms) / 1000)}{level})"
    if report.differences:
        text += f"; the last comparison found {report.differences} differences"
    return text


def _known_age(age_ms: int | None) -> str:
    return "UNKNOWN" if age_ms is None else duration_text(age_ms / 1000)


def _ms(value: int | None) -> str:
    return "unknown" if value is None else f"{value} ms"


def _options_text(options: ReplicationOptions) -> str:
    rate = options.bytes_per_second
    parts = [
        f"{size_text(rate)}/s" if rate else "no limit of the rate",
        f"{options.queue_entries_max} changes queued at most",
        "live" if options.is_live else f"every {duration_text(options.interval_s)}",
    ]
    parts += ["the newest wins"] if options.newest_wins else []
    parts += [] if options.keeps_acls else ["without ACLs"]
    parts += [f"verifier {options.verifier}"] if options.verifier else []
    return ", ".join(parts)


def _holder_text(holder: Holder | None) -> str:
    if holder is None:
        return ""
    return f"{holder.syncer_id} on {holder.host} since {_time(holder.since_ms)}"


def master_json(status: MasterStatus) -> JsonObject:
    """A master and its syncers."""
    return {
        "enabled": status.is_enabled,
        "policies": status.policies,
        "unassigned": status.unassigned,
        "store": status.store,
        "assignment": {
            "mode": status.assignment_mode,
            "strategy": status.assignment_strategy,
            "tokens": status.tokens,
        },
        "pendingEntriesMax": status.pending_entries_max,
        "fault": status.fault or None,
        "rolesEnforced": status.roles_enforced,
        "syncers": [
            {
                "id": one.record.syncer_id,
                "host": one.record.host,
                "startedAt": _time(one.record.started_ms),
                "lastSeenAt": _time(one.record.lease.renewed_ms),
                "leaseExpiresAt": _time(one.record.lease.expires_ms),
                "hasLease": status.now_ms < one.record.lease.expires_ms,
                "replications": one.replications,
                "replicationsMax": one.record.capacity.replications_max,
                "freeBytesPerSecond": one.record.capacity.free_bytes_per_second,
                "freeDiskBytes": one.record.capacity.free_disk_bytes,
            }
            for one in status.syncers
        ],
        "asOf": _time(status.now_ms),
    }
