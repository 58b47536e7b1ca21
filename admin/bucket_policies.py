"""`treefold bucket add|change|delete|list|get|pause|resume|cancel|enable|disable`:
what operators want of replications.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import click

from admin.answer import json_option
from admin.bucket_pair import check_addresses, open_target
from admin.command_result import CommandResult, command_result
from admin.confirmation import is_confirmed
from admin.master_option import master_option
from admin.option_types import Reason
from admin.policy_options import chosen, policy_options, verifier_findings
from admin.replication_output import (
    condition_text,
    options_json,
    print_replication,
    print_replications,
    view_json,
)
from replicator.master.client import MasterClient
from replicator.master.messages import policy_id_from
from replicator.master.orders import check_is_new
from replicator.master.views import ReplicationView
from replicator.prechecks import (
    PrecheckReport,
    facts_of,
    is_empty,
    lost_properties,
    precheck,
)
from replicator.replication import Condition, DesiredState, Policy, ReplicationOptions
from replicator.stores.address import canonical_address
from replicator.stores.opening import open_store
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject

_reason_option = click.option(
    "--reason",
    default="",
    metavar="TEXT",
    type=Reason(),
    help="Why; shown with the replication, and stored in the master's audit file.",
)
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only show the plan.")
_policy_argument = click.argument("policy_id", metavar="REPLICATION")


def changes_replication(command: Callable[..., None]) -> Callable[..., None]:
    """The argument and options of a command that changes one replication."""
    for option in (master_option, json_option, _reason_option, _policy_argument):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class PrecheckedPair:
    """Two buckets, by the names of their stores, and what speaks against them."""

    source: str
    target: str
    report: PrecheckReport


def prechecked(source: str, target: str, *, allow_nonempty: bool) -> PrecheckedPair:
    """Ask both stores for all that speaks against a replication; changes neither.

    Raises:
        UsageError, ConfigError: an address is invalid.
        PairRefusedError: source and target overlap.
        StoreError: a store did not answer, or there is no such bucket.
    """
    source, target = canonical_address(source), canonical_address(target)
    check_addresses(source, target)
    with (
        open_store(source, may_write=False) as ours,
        open_target(target, may_write=False, is_trial=True) as theirs,
    ):
        report = precheck(
            facts_of(ours),
            facts_of(theirs),
            target_is_empty=is_empty(theirs),
            allow_nonempty=allow_nonempty,
        )
        lost = lost_properties(ours, theirs)
    return PrecheckedPair(source, target, replace(report, findings=report.findings + lost))


@click.command(short_help="Begin to replicate a bucket.")
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option("--name", metavar="NAME", help="Its ID. Default: a new one.")
@click.option(
    "--prefix",
    "prefixes",
    metavar="P",
    multiple=True,
    help="Only keys that begin with P; may be given several times.",
)
@click.option(
    "--allow-nonempty",
    is_flag=True,
    help="Also where the target has objects, which may be overwritten.",
)
@policy_options(is_new=True)
@dry_run_option
@yes_option
@_reason_option
@json_option
@master_option
def add(
    *,
    master: MasterClient,
    source: str,
    target: str,
    name: str | None,
    prefixes: tuple[str, ...],
    allow_nonempty: bool,
    given: Mapping[str, object],
    allow_silent: bool,
    dry_run: bool,
    yes: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Begin to replicate SOURCE to TARGET, and go on until it is cancelled.

    The buckets must exist; only a local target is made. All that speaks against it is
    printed at once, before anything is changed: other layouts, a quota that is too
    small, a target that has objects, snapshots disabled, a verifier of another bucket.
    Differences of ACLs and of the default replication are warnings, as is what the
    target does not keep of objects. A syncer (`treefold syncer run`) then gets the
    replication.

    \b
    Exit status:
      0  added, or with --dry-run nothing speaks against it
      1  failed, 2 usage
      6  refused: a check failed, there is one of this pair, or not confirmed
      7  a store or the master does not answer
    """
    with command_result("bucket add", as_json=as_json) as answer:
        policy_id = policy_id_from(name or uuid.uuid4().hex[:12])
        pair = prechecked(source, target, allow_nonempty=allow_nonempty)
        of_verifier = verifier_findings(given, pair.target, master, allow_silent=allow_silent)
        report = replace(pair.report, findings=(*pair.report.findings, *of_verifier))
        options = chosen(given, ReplicationOptions())
        policy = Policy(policy_id, pair.source, pair.target, tuple(sorted(set(prefixes))), options)
        answer.data = {"precheck": precheck_json(report), "replication": None}
        check_is_new(policy, (view.record.policy for view in master.replications()))
        if not note_prechecks(answer, report):
            return
        answer.print(f"Replicate {pair.source}\n  to {pair.target}\n  as {policy_id}")
        if dry_run or not is_confirmed(answer, "Begin this replication?", yes=yes):
            return
        view = master.add_policy(policy, reason)
        answer.data = {"precheck": precheck_json(report), "replication": view_json(view)}
        answer.print(f"replication {policy_id}: {condition_text(view)}")


def precheck_json(report: PrecheckReport) -> JsonObject:
    """All findings, and what could not be checked."""
    return {
        "findings": [
            {"check": one.check.value, "refusal": one.is_refusal, "text": one.text}
            for one in report.findings
        ],
        "unknown": [one.value for one in report.unknown],
    }


def note_prechecks(answer: CommandResult, report: PrecheckReport) -> bool:
    """Print all findings; returns whether the replication may begin."""
    for one in report.findings:
        if one.is_refusal:
            answer.fail(f"precheck_{one.check.value}", one.text)
        else:
            answer.warn(one.text)
    if report.unknown:
        names = ", ".join(one.value for one in report.unknown)
        answer.print(f"not checked, since a store does not say: {names}")
    if report.is_refused:
        answer.exit_status = ExitCode.REFUSED
    return not report.is_refused


@click.command("list", short_help="List replications.")
@click.option("--active", is_flag=True, help="Only those on which a syncer works.")
@json_option
@master_option
def list_command(*, master: MasterClient, active: bool, as_json: bool) -> None:
    """List replications, with stage and condition."""
    with command_result("bucket list", as_json=as_json) as answer:
        wanted = (Condition.ACTIVE, Condition.WAITING)
        views = [one for one in master.replications() if not active or one.condition in wanted]
        answer.data = {"replications": [view_json(view) for view in views]}
        if not as_json:
            print_replications(views)


@click.command(short_help="Show all that is stored of a replication.")
@_policy_argument
@json_option
@master_option
def get(*, master: MasterClient, policy_id: str, as_json: bool) -> None:
    """Show what is wanted of a replication, who has it, and what was reported last."""
    with command_result("bucket get", as_json=as_json) as answer:
        view = master.replication(policy_id_from(policy_id))
        answer.data = {"replication": view_json(view)}
        if not as_json:
            print_replication(view)


@click.command(short_help="Stop a replication until it is resumed.")
@changes_replication
def pause(*, master: MasterClient, policy_id: str, reason: str, as_json: bool) -> None:
    """Stop a replication, and keep how far it is.

    Its syncer stops within two seconds. What it has queued stays, and `treefold bucket
    resume` copies nothing again.

    Exit status: 0 it is paused, or was, 6 it was cancelled.
    """
    with command_result("bucket pause", as_json=as_json) as answer:
        view = master.set_desired(policy_id_from(policy_id), DesiredState.PAUSED, reason)
        print_wanted(answer, view)


@click.command(short_help="Let a replication go on.")
@changes_replication
def resume(*, master: MasterClient, policy_id: str, reason: str, as_json: bool) -> None:
    """Let a replication go on that was paused, or that stopped with an error.

    Exit status: 0 it goes on, 6 it was cancelled, or failed over.
    """
    with command_result("bucket resume", as_json=as_json) as answer:
        view = master.set_desired(policy_id_from(policy_id), DesiredState.ENABLED, reason)
        print_wanted(answer, view)


@click.command(short_help="Change the options of a replication while it runs.")
@policy_options(is_new=False)
@dry_run_option
@changes_replication
def change(
    *,
    master: MasterClient,
    policy_id: str,
    given: Mapping[str, object],
    allow_silent: bool,
    dry_run: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Change the options that are named, and leave the others as they are.

    Its syncer follows them within two seconds, also while it copies. A verifier is
    asked first: it has to be beside the replication's target, and to take writes.

    \b
    Exit status:
      0  ordered, or so already; 1 failed, 2 usage
      6  refused: the verifier is not this target's or does not answer, or the
         replication was cancelled
      7  no master answers, 8 somebody else changed the replication meanwhile
    """
    with command_result("bucket change", as_json=as_json) as answer:
        if not given:
            raise UsageError("expected an option to change, such as --rate")
        known = policy_id_from(policy_id)
        view = master.replication(known)
        policy = view.record.policy
        options = chosen(given, policy.options)
        before, after = options_json(policy.options), options_json(options)
        changes = {
            name: {"before": before[name], "after": value}
            for name, value in after.items()
            if before[name] != value
        }
        of_verifier = verifier_findings(given, policy.target, master, allow_silent=allow_silent)
        report = PrecheckReport(tuple(of_verifier), ())
        data = {"precheck": precheck_json(report), "changes": changes}
        answer.data = {**data, "replication": view_json(view)}
        if not note_prechecks(answer, report):
            return
        if not changes:
            answer.print(f"replication {known}: these are its options already")
            return
        answer.print(f"Change the options of replication {known}, {condition_text(view)}:")
        for name, one in changes.items():
            answer.print(f"  {name}: {json.dumps(one['before'])} -> {json.dumps(one['after'])}")
        if dry_run:
            return
        view = master.set_options(known, options, reason, revision=policy.revision)
        print_wanted(answer, view)
        answer.data = {**data, "replication": view_json(view)}


@click.command(short_help="End a replication.")
@dry_run_option
@yes_option
@changes_replication
def cancel(
    *,
    master: MasterClient,
    policy_id: str,
    reason: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """End a replication; it cannot be resumed from where it was.

    Its syncer removes the snapshots that it made at the source. The target keeps its
    objects, and the replication is listed until `treefold bucket delete`.

    Exit status: 0 it ends, 6 not confirmed.
    """
    with command_result("bucket cancel", as_json=as_json) as answer:
        known = policy_id_from(policy_id)
        view = master.replication(known)
        _print_plan(answer, view, "End")
        if dry_run or not is_confirmed(answer, "End this replication?", yes=yes):
            return
        print_wanted(answer, master.set_desired(known, DesiredState.CANCELLED, reason))


@click.command(short_help="End a replication, and forget it.")
@click.option(
    "--force",
    is_flag=True,
    help="Do not wait for a syncer to remove snapshots; they stay at the source.",
)
@dry_run_option
@yes_option
@changes_replication
def delete(
    *,
    master: MasterClient,
    policy_id: str,
    reason: str,
    force: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """End a replication, remove its snapshots and its state, and forget it.

    The target keeps its objects. If a syncer has to remove snapshots first, the
    replication is listed until that is done.

    Exit status: 0 gone, 5 a syncer has to clean up first, 6 not confirmed.
    """
    with command_result("bucket delete", as_json=as_json) as answer:
        known = policy_id_from(policy_id)
        view = master.replication(known)
        _print_plan(answer, view, "End and forget")
        if dry_run or not is_confirmed(answer, "Delete this replication?", yes=yes):
            return
        is_gone = master.delete_policy(known, reason, force=force)
        answer.data = {"replication": view_json(view), "isGone": is_gone}
        if is_gone:
            answer.print(f"replication {known}: gone")
        else:
            answer.print(f"replication {known}: goes once its syncer has stopped and cleaned up")
            answer.exit_status = ExitCode.PARTLY


@click.command(short_help="Let replications run, cluster-wide.")
@_reason_option
@json_option
@master_option
def enable(*, master: MasterClient, reason: str, as_json: bool) -> None:
    """Let replications run again after `treefold bucket disable`."""
    with command_result("bucket enable", as_json=as_json) as answer:
        master.set_enabled(reason, is_enabled=True)
        answer.data = {"enabled": True}
        answer.print("replication is enabled")


@click.command(short_help="Stop all replications, cluster-wide.")
@dry_run_option
@yes_option
@_reason_option
@json_option
@master_option
def disable(*, master: MasterClient, reason: str, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Stop all replications until `treefold bucket enable`.

    None runs and none begins. What is wanted of each, and how far it is, stays.

    Exit status: 0 disabled, 6 not confirmed.
    """
    with command_result("bucket disable", as_json=as_json) as answer:
        views = list(master.replications())
        running = [one for one in views if one.condition in (Condition.ACTIVE, Condition.WAITING)]
        answer.data = {"enabled": None, "running": [one.policy_id for one in running]}
        answer.print(f"Stop all replications; {len(running)} of {len(views)} run now")
        if dry_run or not is_confirmed(answer, "Stop them all?", yes=yes):
            return
        master.set_enabled(reason, is_enabled=False)
        answer.data = {"enabled": False, "running": [one.policy_id for one in running]}
        answer.print("replication is disabled")


def _print_plan(answer: CommandResult, view: ReplicationView, what: str) -> None:
    policy = view.record.policy
    answer.data = {"replication": view_json(view)}
    answer.print(f"{what} replication {view.policy_id}, {condition_text(view)}:")
    answer.print(f"  {policy.source}\n  to {policy.target}")


def print_wanted(answer: CommandResult, view: ReplicationView) -> None:
    """Print what is wanted of a replication now; the answer's data gets the view."""
    answer.data = {"replication": view_json(view)}
    desired = view.record.policy.desired.value
    answer.print(f"replication {view.policy_id}: wanted {desired}, now {condition_text(view)}")
