"""`treefold bucket status` and `backlog`: how far replications are, what is missing."""

import click

from admin.answer import json_option
from admin.bucket_output import counted
from admin.command_result import command_result
from admin.master_option import master_option
from admin.option_types import WholeNumber
from admin.replication_output import (
    condition_text,
    failed_key_json,
    failed_key_lines,
    master_json,
    status_lines,
    view_json,
)
from replicator.backlog import ReplicationBacklog, read_backlog
from replicator.master.client import MasterClient
from replicator.master.messages import policy_id_from
from replicator.master.views import MasterStatus, ReplicationView
from replicator.replication import Condition
from replicator.stores.opening import open_store
from replicator.stores.port import Change
from runtime.exit_codes import ExitCode
from runtime.json_numbers import exact
from runtime.output import JsonObject, age_text, print_line, print_table, time_text

# Nobody knows, nobody works on it, or a store does not answer who does.
_DEGRADED = (Condition.UNKNOWN, Condition.UNASSIGNED, Condition.WAITING)


@click.command(short_help="Say how far replications are, and how sure that is.")
@click.argument("policy_id", metavar="[REPLICATION]", required=False)
@json_option
@master_option
def status(*, master: MasterClient, policy_id: str | None, as_json: bool) -> None:
    """Say how far each replication is: up to which position source and target are
    proven equal, the age of the oldest change that is not, and the lag.

    What is not known is UNKNOWN, with the reason and the age of the last word.

    \b
    Exit status:
      0  all that should run runs, and no difference is known
      1  failed, 3 one stopped with an error, keys fail, or differences are known
      5  of one it is not known how it is, or no syncer has it, or it waits for a
         store that does not answer
      7  no master answers
    """
    with command_result("bucket status", as_json=as_json) as answer:
        state = master.status()
        views = (
            [master.replication(policy_id_from(policy_id))]
            if policy_id
            else list(master.replications())
        )
        answer.data = {
            "master": master_json(state),
            "replications": [view_json(view) for view in views],
        }
        answer.exit_status = status_exit(views)
        if as_json:
            return
        _print_master(state)
        for view in views:
            policy = view.record.policy
            print_line(f"{view.policy_id}: {condition_text(view)}")
            print_line(f"  {policy.source} to {policy.target}")
            for line in status_lines(view):
                print_line(f"  {line}")


def status_exit(views: list[ReplicationView]) -> int:
    """The exit status of `bucket status`: what is known to be wrong comes first."""
    for view in views:
        report = view.state.report
        if view.condition is Condition.ERROR or (report and (report.differences or report.failed)):
            return ExitCode.FINDINGS
    degraded = any(view.condition in _DEGRADED and not _is_stopped(view) for view in views)
    return ExitCode.PARTLY if degraded else 0


def _is_stopped(view: ReplicationView) -> bool:
    return view.record.failed_over_ms is not None or not view.is_enabled


def _print_master(state: MasterStatus) -> None:
    alive = [one for one in state.syncers if state.now_ms < one.record.lease.expires_ms]
    print_line(
        f"{counted(state.policies, 'replication')}; syncers with a lease: {len(alive)} of"
        f" {len(state.syncers)}"
        + ("" if state.is_enabled else "; replication is disabled cluster-wide")
    )
    for one in state.syncers:
        if one not in alive:
            age = age_text((state.now_ms - one.record.lease.renewed_ms) / 1000)
            print_line(f"  syncer {one.record.syncer_id} on {one.record.host}: last seen {age}")
    if state.fault:
        print_line(f"  the master has lost a thread: {state.fault}")


@click.command(short_help="List what the target is not known to have.")
@click.argument("policy_id", metavar="REPLICATION")
@click.option(
    "--limit",
    type=WholeNumber(1, 1_000_000),
    default=1_000,
    show_default=True,
    help="List at most this many changes.",
)
@json_option
@master_option
def backlog(*, master: MasterClient, policy_id: str, limit: int, as_json: bool) -> None:
    """List changes of the source that the target is not known to have, from the
    source's own log, oldest first, and the keys that fail by themselves, with the
    reason. The log does not tell of keys that were never copied: while there may be
    such keys, it is not known what is missing.

    \b
    Exit status:
      0  none, 3 there are some
      1  failed, 5 it is not known whether there are others
      7  the master or the source does not answer
    """
    with command_result("bucket backlog", as_json=as_json) as answer:
        view = master.replication(policy_id_from(policy_id))
        found = backlog_of(view, limit)
        answer.data = {"replication": view_json(view), "backlog": backlog_json(found)}
        if found.changes or found.failed_count:
            answer.exit_status = ExitCode.FINDINGS
        if not found.is_whole:
            answer.exit_status = ExitCode.PARTLY
        if not as_json:
            print_backlog(found)


def backlog_of(view: ReplicationView, limit: int) -> ReplicationBacklog:
    """What the source has beyond the last report of a replication.

    Raises:
        StoreError, ConfigError: the source did not say.
    """
    policy, report = view.record.policy, view.state.report
    with open_store(policy.source, may_write=False) as source:
        return read_backlog(source, report, policy.prefixes, limit=limit)


def backlog_json(found: ReplicationBacklog) -> JsonObject:
    """The changes, and whether they are all."""
    return {
        "changes": [_change_json(one) for one in found.changes],
        "isWhole": found.is_whole,
        "reason": found.reason,
        "failed": found.failed_count,
        "failedKeys": [failed_key_json(one) for one in found.failed],
    }


def _change_json(change: Change) -> JsonObject:
    return {
        "index": exact(change.index),
        "kind": change.kind.value,
        "key": change.key,
        "previousKey": change.previous_key or None,
        "at": time_text(change.time_ms / 1000) if change.time_ms else None,
    }


def print_backlog(found: ReplicationBacklog) -> None:
    """A row a change, and what is not known."""
    rows = [
        (
            one.index,
            one.kind.value,
            time_text(one.time_ms / 1000) if one.time_ms else "-",
            f"{one.previous_key} to {one.key}" if one.previous_key else one.key,
        )
        for one in found.changes
    ]
    if rows:
        print_table(("INDEX", "CHANGE", "AT", "KEY"), rows, numbers=("INDEX",), folded=("KEY",))
    for line in failed_key_lines(found.failed, found.failed_count):
        print_line(line)
    if found.is_whole:
        print_line(f"not known to be at the target: {counted(len(rows), 'change')}")
    else:
        print_line(f"UNKNOWN how many changes are missing at the target: {found.reason}")
