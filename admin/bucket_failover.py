"""`treefold bucket failover` and `failback`: let clients write to the target, and bring
what they wrote back.
"""

import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import click

from admin.bucket_pair import open_pair, verification_of
from admin.bucket_policies import (
    changes_replication,
    dry_run_option,
    yes_option,
)
from admin.bucket_status import backlog_json, backlog_of, print_backlog
from admin.client_steps import client_steps
from admin.command_result import CommandResult, command_result
from admin.confirmation import is_confirmed
from admin.replication_output import condition_text, status_lines, view_json
from merkle.errors import ReconcileError
from proof.item import EvidenceLevel
from replicator.backlog import ReplicationBacklog
from replicator.master.client import MasterClient
from replicator.master.errors import PolicyRefusedError
from replicator.master.messages import policy_id_from
from replicator.master.views import ReplicationView
from replicator.replication import Condition, DesiredState, Policy, PolicyId, Stage
from replicator.way_back import WayBackReport, newer_at_source, way_back
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_line

# Changes of the source that are listed before a failover.
_BACKLOG_MAX = 1_000
_POLL_S = 0.5
_READERS = 8
# Keys in one line.
_NAMED_MAX = 10
# Beyond the longest lease: the master itself waits that long.
_FENCE_S_MAX = 7_200.0


@click.command(short_help="Fence a replication, so that its target can be written.")
@dry_run_option
@yes_option
@changes_replication
def failover(
    *,
    master: MasterClient,
    policy_id: str,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Stop a replication for good, say what is missing at its target, and how clients
    move there.

    The plan has what the target is not known to have: changes from the source's own
    log if the source answers, otherwise what was reported last. Then the replication's
    epoch is raised, and this command waits until no syncer can write to the target any
    more. What is missing then is printed again. Only then clients may write there.
    `treefold bucket failback` leads back.

    \b
    Exit status:
      0  fenced, and nothing is missing
      1  failed, 3 fenced, and changes are missing at the target
      5  fenced, and it is not known what is missing
      6  refused, or not confirmed, 7 no master answers
    """
    with command_result("bucket failover", as_json=as_json) as answer:
        known = policy_id_from(policy_id)
        view = master.replication(known)
        missing = _missing(view)
        steps = client_steps(view.record.policy.source, view.record.policy.target)
        answer.data = _failover_json(view, missing, steps, is_fenced=False)
        if not as_json:
            _print_failover_plan(view, missing)
        if dry_run or not is_confirmed(answer, "Fence this replication?", yes=yes):
            return
        view = _await_fence(answer, master, master.fail_over(known, reason))
        # Its clients have gone on writing to the source until now.
        missing = _missing(view)
        answer.data = _failover_json(view, missing, steps, is_fenced=True)
        if not as_json:
            print_line("Now that nothing is replicated any more:")
            print_backlog(missing)
        answer.print("No syncer can write to the target any more. Now move the clients:")
        for line in steps:
            answer.print(f"  {line}")
        if missing.changes or missing.failed_count:
            answer.exit_status = ExitCode.FINDINGS
        if not missing.is_whole:
            answer.exit_status = ExitCode.PARTLY


def _missing(view: ReplicationView) -> ReplicationBacklog:
    """What the target is not known to have, as far as the source still answers."""
    try:
        return backlog_of(view, _BACKLOG_MAX)
    except ReconcileError as error:
        return ReplicationBacklog((), False, f"the source does not answer: {error.message}")


def _failover_json(
    view: ReplicationView, missing: ReplicationBacklog, steps: Sequence[str], *, is_fenced: bool
) -> JsonObject:
    return {
        "replication": view_json(view),
        "missing": backlog_json(missing),
        "isFenced": is_fenced,
        "steps": list(steps),
    }


def _print_failover_plan(view: ReplicationView, missing: ReplicationBacklog) -> None:
    policy = view.record.policy
    print_line(f"Fence replication {view.policy_id}, {condition_text(view)}:")
    print_line(f"  {policy.source} to {policy.target}")
    for line in status_lines(view):
        print_line(f"  {line}")
    print_backlog(missing)


def _await_fence(
    answer: CommandResult, master: MasterClient, view: ReplicationView
) -> ReplicationView:
    """Wait until no process can write for the replication any more."""
    deadline_s, is_said = time.monotonic() + _FENCE_S_MAX, False
    while not view.state.is_free:
        if time.monotonic() > deadline_s:
            raise PolicyRefusedError(
                f"replication {view.policy_id}: its syncer did not stop, nor did its lease end",
                hint="Clients must not write to the target yet. Run this command again.",
            )
        if not is_said and view.state.leaving:
            is_said = True
            name = view.state.leaving.holder.syncer_id
            answer.print(f"Waiting until syncer {name} has stopped, or its lease has ended")
        # Masters answer, and call nobody: whoever waits for a lease asks again.
        time.sleep(_POLL_S)
        view = master.replication(view.policy_id)
    return view


@click.command(short_help="Bring changes of the target back to the source.")
@click.option(
    "--finish",
    is_flag=True,
    help="All is back: end the way back, and replicate from the source again.",
)
@dry_run_option
@yes_option
@changes_replication
def failback(
    *,
    master: MasterClient,
    policy_id: str,
    finish: bool,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Lead back after a failover, in two steps.

    Once the source is in service again, the first step begins a replication from the
    target to the source. Where both have changed a key the newer object stays. Follow
    it by `treefold bucket status`. Then stop the writers of the target, and let
    --finish compare both buckets, end the way back and replicate from the source
    again. It refuses unless all that the target has is at the source, or something
    newer. What stays at the source beside that is printed.

    \b
    Exit status:
      0  begun, or finished
      1  failed, 6 refused, or not confirmed, 7 no master answers
    """
    with command_result("bucket failback", as_json=as_json) as answer:
        known = policy_id_from(policy_id)
        view = master.replication(known)
        if view.record.failed_over_ms is None:
            raise PolicyRefusedError(f"replication {known} has not failed over")
        back = next((one for one in master.replications() if _returns(one, known)), None)
        if finish:
            _finish(answer, master, view, back, reason, dry_run=dry_run, yes=yes)
        else:
            _begin(answer, master, view, back, reason, dry_run=dry_run, yes=yes)


def _returns(view: ReplicationView, policy_id: PolicyId) -> bool:
    is_over = view.record.is_deleted or view.record.policy.desired is DesiredState.CANCELLED
    return view.record.returns_policy == policy_id and not is_over


def _begin(
    answer: CommandResult,
    master: MasterClient,
    view: ReplicationView,
    back: ReplicationView | None,
    reason: str,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    if back is not None:
        answer.data = {"replication": view_json(view), "back": view_json(back)}
        answer.print(f"replication {back.policy_id} brings changes back already")
        return
    forth = view.record.policy
    policy = way_back_policy(forth)
    answer.data = {"replication": view_json(view), "back": None}
    answer.print(f"Replicate {policy.source}\n  back to {policy.target}\n  as {policy.policy_id}")
    if dry_run or not is_confirmed(answer, "Begin the way back?", yes=yes):
        return
    begun = master.add_policy(policy, reason, returns_policy=forth.policy_id)
    answer.data = {"replication": view_json(view), "back": view_json(begun)}
    answer.print(f"replication {begun.policy_id}: {condition_text(begun)}")
    answer.print(f"Follow it: treefold bucket status {begun.policy_id}")


def way_back_policy(forth: Policy) -> Policy:
    """The policy by which changes of the target come back: of one key that both sides
    have changed, the newer object stays. The verifier of the way forth is beside the
    bucket that is the source now.
    """
    options = replace(forth.options, newest_wins=True, verifier="")
    policy_id = PolicyId(f"back-{uuid.uuid4().hex[:12]}")
    return Policy(policy_id, forth.target, forth.source, forth.prefixes, options)


def _finish(
    answer: CommandResult,
    master: MasterClient,
    view: ReplicationView,
    back: ReplicationView | None,
    reason: str,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    if back is None:
        raise PolicyRefusedError(
            f"nothing brings the changes of replication {view.policy_id} back",
            hint=f"Begin with `treefold bucket failback {view.policy_id}`.",
        )
    # One that was interrupted has fenced it already.
    is_fenced = back.record.failed_over_ms is not None and back.state.is_free
    if why := "" if is_fenced else why_not_back(back):
        raise PolicyRefusedError(
            f"replication {back.policy_id} has not brought all back: {why}",
            hint=f"See `treefold bucket status {back.policy_id}`.",
        )
    policy = view.record.policy
    steps = client_steps(policy.target, policy.source)
    answer.data = _finish_json(view, back, steps, _compared(answer, back))
    answer.print(f"End replication {back.policy_id}, and replicate again from {policy.source}")
    if dry_run or not is_confirmed(answer, "Have the target's writers stopped?", yes=yes):
        return
    # Fenced as by a failover: nothing may write to the source beside its clients.
    fenced = _await_fence(answer, master, master.fail_over(back.policy_id, reason))
    try:
        report = _compared(answer, fenced)
    except BaseException:
        # What was written meanwhile has to come back too.
        master.end_failover(back.policy_id, reason)
        raise
    resumed = master.end_failover(view.policy_id, reason)
    master.set_desired(back.policy_id, DesiredState.CANCELLED, reason)
    answer.data = _finish_json(resumed, fenced, steps, report)
    answer.print("Now move the clients back:")
    for line in steps:
        answer.print(f"  {line}")


def _finish_json(
    view: ReplicationView, back: ReplicationView, steps: Sequence[str], report: WayBackReport
) -> JsonObject:
    return {
        "replication": view_json(view),
        "back": view_json(back),
        "steps": list(steps),
        "comparison": {
            "equal": report.equal,
            "unproven": report.unproven,
            "kept": list(report.kept.named),
            "onlyAtSource": list(report.only_at_source.named),
        },
    }


def _compared(answer: CommandResult, back: ReplicationView) -> WayBackReport:
    """Compare both buckets; prints what stays at the source beside what came back.

    Raises:
        PolicyRefusedError: not all that the target has is at the source.
        StoreError, BusyError: a store, or the state of the pair, cannot be read.
    """
    policy, stop = back.record.policy, threading.Event()
    with ExitStack() as opened:
        pair = opened.enter_context(
            open_pair(policy.source, policy.target, None, may_write=False, is_trial=True)
        )
        readers = opened.enter_context(ThreadPoolExecutor(_READERS, "compare"))
        opened.callback(stop.set)
        run = verification_of(pair, EvidenceLevel.RECORDED, readers, stop)
        prefixes = policy.prefixes or ("",)
        keys = (one for prefix in prefixes for one in run.keys(prefix))
        report = way_back(keys, newer_at_source(pair.source, pair.target))
        lists_all = run.lists_all
    if not lists_all:
        raise PolicyRefusedError(
            f"replication {back.policy_id}: a store does not list all of its keys, so that it"
            " cannot be shown that all is back"
        )
    if not report.is_back:
        named = ", ".join(report.lacking.named[:_NAMED_MAX])
        raise PolicyRefusedError(
            f"replication {back.policy_id} has not brought back {report.lacking.count} keys, such"
            f" as {named}",
            hint="Stop the writers of the target, and try again.",
        )
    for tally, text in (
        (report.kept, "keys were changed at both sides, and stay as the source has them"),
        (report.only_at_source, "keys are at the source only, and go to the target"),
    ):
        if tally.count:
            answer.warn(f"{tally.count} {text}: {', '.join(tally.named[:_NAMED_MAX])}")
    if report.unproven:
        answer.warn(f"{report.unproven} keys are known by name and size only")
    return report


def why_not_back(back: ReplicationView) -> str:
    """Why a way back still works, by what its syncer reported; empty if it does not."""
    report = back.state.report
    if report is None:
        return "it has reported nothing"
    if back.condition not in (Condition.ACTIVE, Condition.PAUSED):
        return f"it is {back.condition.value}{f': {back.reason}' if back.reason else ''}"
    if report.checkpoint.stage is Stage.INITIAL_BATCH:
        return "its first copy has not ended"
    if report.queued or report.failed:
        return f"{report.queued} changes wait, and {report.failed} failed"
    return ""
