"""`treefold reconcile`: print a plan, have it confirmed, and make the replicas of
containers equal.

With --status it only shows what the datanodes last reported. Its JSON has the shape of
`ozone admin container reconcile --status`, with one deliberate difference: if a root is
unknown or there is nothing to compare with, `replicasMatch` is null, where Ozone has
true.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import click

from admin.answer import (
    check_agents,
    container_ids,
    controller_options,
    json_option,
)
from admin.command_result import CommandResult, command_result
from admin.comparison import comparison_json
from admin.containers import (
    compare_live,
    container_json,
    datanode_json,
    fetch_trees,
    has_invalid_replica,
    root_of,
)
from admin.jobs import await_jobs, exit_status_of, job_json, print_jobs, unknown_reason
from admin.requester import requester
from merkle.comparison import Comparison
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.replica import ReplicaState
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_line, print_table
from runtime.progress import ProgressStyle
from scm.client import ControllerClient
from scm.eligibility import INVALID_HINT, ContainerState, Eligibility
from scm.policy import RootComparison
from scm.views import ContainerStatus, ReconcileResponse

# A plan for more containers is made without fetching their trees.
_PLAN_TREES_MAX = 20
# Rows of the printed plan.
_PLAN_ROWS_MAX = 100

# Unknown containers counted in one line; a thousand are one page.
_UNKNOWN_COUNTED_MAX = 1_000

_UNKNOWN = {Eligibility.CONTAINER_NOT_FOUND, Eligibility.NO_REPLICAS_FOUND}
_BUSY = {Eligibility.ALREADY_RUNNING, Eligibility.QUEUE_FULL}
_MATCH = {RootComparison.MATCH: True, RootComparison.DIVERGED: False}
# Ozone's names for replication factors.
_FACTORS = {1: "ONE", 3: "THREE"}


@click.command()
@click.argument("arguments", metavar="ID... | -", nargs=-1)
@click.option("--all-diverged", is_flag=True, help="Reconcile all containers that diverged.")
@click.option("--status", is_flag=True, help="Only show roots and whether they match.")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--wait", is_flag=True, help="Wait for the jobs and show their results.")
@click.option("--reason", default="", metavar="TEXT", help="A reason, stored with the jobs.")
@json_option
@controller_options
@click.pass_obj
def reconcile(
    output: ProgressStyle | None,
    *,
    controller: ControllerClient,
    arguments: tuple[str, ...],
    all_diverged: bool,
    status: bool,
    dry_run: bool,
    yes: bool,
    wait: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Make the replicas of containers equal, repairing each from the others.

    IDs are arguments; with `-` they are read from standard input, one per line. The
    plan is printed first. To continue, give --yes or confirm on a terminal. The verdict
    UNRECOVERABLE in a plan is preliminary: a file whose block record is lost is in no
    tree, and the reconciliation may find good data in it.

    Exit status: 0 done, 1 failed, 2 usage, 3 replicas differ (--status), 4 damage
    beyond repair, 5 partly done, 6 refused, 7 controller unreachable or no agent
    reports to it, 8 already running.
    """
    if status:
        _status(controller, arguments, all_diverged, as_json=as_json)
        return
    with command_result("reconcile", as_json=as_json) as answer:
        requested = _requested_ids(controller, arguments, all_diverged, as_json=as_json)
        outcomes = controller.reconcile(requested, dry_run=True)
        if any(o.ruling.eligibility in _UNKNOWN for o in outcomes):
            check_agents(controller)
        views = controller.get_containers(requested)
        wanted = [outcome for outcome in outcomes if outcome.ruling.is_ok]
        busy = [outcome for outcome in outcomes if outcome.job_id]
        compared = _compared(
            controller, answer, [views[o.container_id] for o in wanted if o.container_id in views]
        )
        answer.data = {
            "plan": [_plan_json(outcome, views, compared) for outcome in outcomes],
            "jobs": [],
        }
        if not as_json:
            _print_plan(wanted, views, compared)
        _note_refusals(answer, outcomes, views)
        answer.exit_status = _status_of(outcomes)
        if dry_run or not (wanted or (wait and busy)):
            return
        if wanted and not _is_confirmed(len(wanted), yes=yes):
            answer.fail(
                "refused",
                "Nothing was changed: not confirmed.",
                hint="add --yes to confirm, or --dry-run to see only the plan",
            )
            answer.exit_status = ExitCode.REFUSED
            return
        # Do only what was shown and confirmed: containers refused in the plan stay
        # refused.
        container_ids = [outcome.container_id for outcome in wanted]
        started = controller.reconcile(
            container_ids, dry_run=False, reason=reason, requested_by=requester()
        )
        _note_refusals(answer, started, views)
        outcomes = [*started, *(outcome for outcome in outcomes if not outcome.ruling.is_ok)]
        answer.exit_status = _status_of(outcomes)
        _report_jobs(answer, outcomes)
        if wait:
            job_ids = [outcome.job_id for outcome in outcomes if outcome.job_id]
            _wait(controller, answer, job_ids, output or ProgressStyle())


def _requested_ids(
    controller: ControllerClient, arguments: tuple[str, ...], all_diverged: bool, *, as_json: bool
) -> list[int]:
    if not all_diverged:
        requested = container_ids(arguments)
        if not requested:
            click.echo("Standard input has no container ID: there is nothing to do.", err=True)
        return requested
    if arguments:
        raise UsageError("give either container IDs or --all-diverged, not both")
    found: list[int] = [
        view.container_id
        for view in controller.containers(comparison=RootComparison.DIVERGED.value)
    ]
    if found:
        return found
    check_agents(controller)
    unknown = islice(
        controller.containers(comparison=RootComparison.UNKNOWN.value), _UNKNOWN_COUNTED_MAX
    )
    count = sum(1 for _ in unknown)
    if not as_json:
        click.echo("No container is known to be diverged.")
    if count:
        click.echo(
            f"{'At least ' if count == _UNKNOWN_COUNTED_MAX else ''}{count}"
            f" container{'' if count == 1 else 's'} not compared: see `treefold container list"
            " --comparison unknown`",
            err=True,
        )
    return found


def _compared(
    controller: ControllerClient, answer: CommandResult, views: Sequence[ContainerStatus]
) -> dict[int, Comparison]:
    """Compare the agents' current trees of each container; nothing for a long list."""
    if len(views) > _PLAN_TREES_MAX:
        return {}
    found: dict[int, Comparison] = {}
    for view in views:
        trees, errors = fetch_trees(controller, view)
        for name, error in errors.items():
            answer.warn(
                f"container {view.container_id}: the plan lacks the tree of datanode {name}:"
                f" {error.message}"
            )
        # Without all replicas, the plan could report data as lost that only the missing
        # one holds.
        if trees and not errors:
            found[view.container_id], _ = compare_live(view, trees)
    return found


def _plan_json(
    outcome: ReconcileResponse,
    views: dict[int, ContainerStatus],
    compared: dict[int, Comparison],
) -> JsonObject:
    view = views.get(outcome.container_id)
    differences = compared.get(outcome.container_id)
    return {
        "containerID": outcome.container_id,
        "eligibility": outcome.ruling.eligibility.value,
        "message": outcome.ruling.message,
        "datanodes": _ordered(view) if view and outcome.ruling.is_ok else [],
        "notWritten": _not_written(view) if view and outcome.ruling.is_ok else {},
        "returnToService": _returning(view) if view else [],
        "stayUnhealthy": _staying(view) if view else {},
        "container": container_json(view) if view else None,
        "trees": comparison_json(differences) if differences else None,
    }


def _ordered(view: ContainerStatus) -> list[str]:
    """The datanodes that would get an order: those with live, writable replicas."""
    return [r.datanode.peer for r in view.replicas if r.is_live and not r.replica.read_only]


def _not_written(view: ContainerStatus) -> dict[str, str]:
    """Who would get no order, and why."""
    return {
        r.datanode.peer: "read-only" if r.replica.read_only else "silent"
        for r in view.replicas
        if not r.is_live or r.replica.read_only
    }


def _returning(view: ContainerStatus) -> list[str]:
    """The datanodes with UNHEALTHY replicas that return to service once they are proven
    clean.
    """
    stay = _staying(view)
    return [peer for peer in _unhealthy(view) if peer not in stay]


def _staying(view: ContainerStatus) -> dict[str, str]:
    """The datanodes with UNHEALTHY replicas that stay as they are, and why."""
    reasons = _not_written(view)
    for one in view.replicas:
        if not one.datanode.returns_to_service:
            reasons.setdefault(one.datanode.peer, "return_to_closed is off")
    return {peer: reasons[peer] for peer in _unhealthy(view) if peer in reasons}


def _unhealthy(view: ContainerStatus) -> list[str]:
    return [
        one.datanode.peer for one in view.replicas if one.replica.state is ReplicaState.UNHEALTHY
    ]


def _after_repair(view: ContainerStatus) -> Iterator[str]:
    """What becomes of the UNHEALTHY replicas, in the words of the plan."""
    if back := _returning(view):
        yield f"{len(back)} UNHEALTHY return to service once proven clean"
    for peer, why in _staying(view).items():
        yield f"{peer} stays UNHEALTHY: {why}"


def _print_plan(
    wanted: Sequence[ReconcileResponse],
    views: dict[int, ContainerStatus],
    compared: dict[int, Comparison],
) -> None:
    if not wanted:
        return
    click.echo(
        "Plan: each datanode compares its replica with the others' and repairs what differs."
    )
    rows = []
    for outcome in wanted[:_PLAN_ROWS_MAX]:
        view = views.get(outcome.container_id)
        if view is not None:
            left = _not_written(view)
            rows.append(
                (
                    view.container_id,
                    view.state.value if view.state else "",
                    view.compared.comparison.value,
                    len(_ordered(view)),
                    "; ".join(
                        (
                            _work(view, compared),
                            *_after_repair(view),
                            *(f"{who} is not written: {why}" for who, why in left.items()),
                        )
                    ),
                )
            )
    print_table(
        ("CONTAINER", "STATE", "REPLICAS", "ORDERS", "TO DO"),
        rows,
        numbers=("CONTAINER", "ORDERS"),
        folded=("TO DO",),
    )
    if len(wanted) > _PLAN_ROWS_MAX:
        click.echo(f"... and {len(wanted) - _PLAN_ROWS_MAX} more")


def _work(view: ContainerStatus, compared: dict[int, Comparison]) -> str:
    comparison = compared.get(view.container_id)
    if comparison is None:
        return "roots " + ", ".join(
            root_of(replica.replica) or "unknown" for replica in view.replicas
        )
    kinds = Counter(difference.kind.value for difference in comparison.differences)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    # A reconciliation also reads files that are in no tree.
    presumed = " by the trees alone" if comparison.verdict is Verdict.UNRECOVERABLE else ""
    return f"{comparison.verdict.value}{presumed}{': ' if counted else ''}{counted}"


def _is_confirmed(count: int, *, yes: bool) -> bool:
    if yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    return click.confirm(
        f"Reconcile {count} container{'' if count == 1 else 's'}?", default=False, err=True
    )


def _note_refusals(
    answer: CommandResult,
    outcomes: Sequence[ReconcileResponse],
    views: dict[int, ContainerStatus],
) -> None:
    """Report the refusals in Ozone's words, with hints."""
    for outcome in outcomes:
        if not outcome.ruling.is_ok:
            view = views.get(outcome.container_id)
            is_refused_for_it = (
                outcome.ruling.eligibility is Eligibility.INELIGIBLE_REPLICA_STATES
                and view is not None
                and has_invalid_replica(view)
            )
            answer.fail(
                outcome.ruling.eligibility.value.lower(),
                outcome.ruling.message,
                hint=INVALID_HINT if is_refused_for_it else "",
            )


def _status_of(outcomes: Sequence[ReconcileResponse]) -> int:
    refused = [outcome for outcome in outcomes if not outcome.ruling.is_ok]
    if refused and len(refused) < len(outcomes):
        return ExitCode.PARTLY
    return _refusal_status(refused) if refused else 0


def _refusal_status(refused: Sequence[ReconcileResponse]) -> int:
    names = {outcome.ruling.eligibility for outcome in refused}
    if names <= _BUSY:
        return ExitCode.BUSY
    return ExitCode.FAILED if names == {Eligibility.CONTAINER_NOT_FOUND} else ExitCode.REFUSED


def _report_jobs(answer: CommandResult, outcomes: Sequence[ReconcileResponse]) -> None:
    """Print the jobs and the number of refusals, in Ozone's words."""
    started = [outcome for outcome in outcomes if outcome.ruling.is_ok]
    for outcome in started:
        answer.print(
            f"Reconciliation has been triggered for container {outcome.container_id} (job"
            f" {outcome.job_id})"
        )
    failed = len(outcomes) - len(started)
    if started:
        answer.print("")
        answer.print(
            'Use "treefold reconcile --status" to see the checksums of each container replica'
        )
    if failed and not answer.as_json:
        click.echo(
            f"Failed to trigger reconciliation for {failed} container{'s' if failed > 1 else ''}",
            err=True,
        )
    assert isinstance(answer.data, dict)
    answer.data["jobs"] = [
        {"containerID": o.container_id, "jobID": o.job_id} for o in outcomes if o.job_id
    ]


def _wait(
    controller: ControllerClient,
    answer: CommandResult,
    job_ids: Sequence[str],
    output: ProgressStyle,
) -> None:
    try:
        jobs = await_jobs(controller, [controller.job(job_id) for job_id in job_ids], output)
    except KeyboardInterrupt:
        answer.fail(
            "interrupted",
            "Interrupted; the jobs continue.",
            hint="treefold job list shows them, treefold job cancel JOB ends one",
        )
        answer.exit_status = ExitCode.INTERRUPTED
        return
    views = controller.get_containers([job.container_id for job in jobs])
    assert isinstance(answer.data, dict)
    answer.data["jobs"] = [
        job_json(job) | {"comparison": _comparison_text(views.get(job.container_id))}
        for job in jobs
    ]
    status = exit_status_of(jobs)
    for job in jobs:
        view = views.get(job.container_id)
        if job.verdict is Verdict.UNKNOWN:
            has_blocks = view is None or any(
                replica.replica.block_count for replica in view.replicas
            )
            answer.warn(
                f"container {job.container_id}: the verdict is UNKNOWN:"
                f" {unknown_reason(job, has_blocks=has_blocks)}"
            )
        if status == 0 and view is not None and view.compared.comparison is RootComparison.DIVERGED:
            answer.warn(
                f"container {job.container_id}: the replicas still differ: {view.compared.note}"
            )
            status = ExitCode.PARTLY
    if not answer.as_json:
        print_jobs(jobs)
    _warn_of_unhealthy(answer, list(views.values()))
    # Waiting for a job that was running already is not a failure.
    others = {str(error["code"]) for error in answer.errors} - {
        Eligibility.ALREADY_RUNNING.value.lower()
    }
    if not others:
        answer.errors.clear()
        answer.exit_status = status
    elif status:
        answer.exit_status = status


def _warn_of_unhealthy(answer: CommandResult, views: Sequence[ContainerStatus]) -> None:
    """Say which replicas are out of service still, why, and what to do about it."""
    for view in views:
        start = f"container {view.container_id}: still UNHEALTHY, so out of service: "
        if stay := _staying(view):
            named = ", ".join(f"{peer} ({why})" for peer, why in stay.items())
            answer.warn(f"{start}{named}. Change that at their agents, and reconcile again")
        if back := _returning(view):
            answer.warn(
                f"{start}{', '.join(back)}. They were not proven clean: `treefold job show` says"
                " why"
            )


def _comparison_text(view: ContainerStatus | None) -> str | None:
    return view.compared.comparison.value if view else None


@contextmanager
def _reason_in_json(*, as_json: bool) -> Iterator[None]:
    """Print the document of an error in place of Ozone's array. The array has no place
    for a reason, and an empty one would say that all is well.
    """
    try:
        yield
    except ReconcileError:
        with command_result("reconcile", as_json=as_json):
            raise


def _status(
    controller: ControllerClient, arguments: tuple[str, ...], all_diverged: bool, *, as_json: bool
) -> None:
    """Print the status as a table, or with --json as Ozone's array. Failures of single
    containers go to stderr in both cases.

    Raises:
        ReconcileError: the controller gave no answer, or no agent reports to it;
            without `as_json`.
    """
    with _reason_in_json(as_json=as_json):
        requested = _requested_ids(controller, arguments, all_diverged, as_json=as_json)
        views = controller.get_containers(requested)
        is_unknown = any(v.compared.comparison is RootComparison.UNKNOWN for v in views.values())
        if is_unknown or len(views) < len(requested):
            check_agents(controller)
    shown, failures = list[ContainerStatus](), list[str]()
    for number in requested:
        view = views.get(number)
        if view is None:
            failures.append(
                f"Failed to get reconciliation status of container {number}: Container #{number}"
                " not found."
            )
        elif view.state is ContainerState.OPEN:
            failures.append(
                f"Cannot get status of container {number}. Reconciliation is not supported for open"
                " containers"
            )
        elif any(replica.replica.replica_index > 0 for replica in view.replicas):
            failures.append(
                f"Cannot get status of container {number}. "
                "Reconciliation is only supported for Ratis replicated containers"
            )
        else:
            shown.append(view)
    if as_json:
        click.echo(ozone_json([_status_json(view) for view in shown]))
    elif shown:
        _print_status(shown)
    for failure in failures:
        click.echo(failure, err=True)
    if failures:
        many = "s" if len(failures) > 1 else ""
        click.echo(
            f"Failed to process reconciliation status for {len(failures)} container{many}", err=True
        )
        raise click.exceptions.Exit(ExitCode.PARTLY if shown else ExitCode.FAILED)
    if any(view.compared.comparison is RootComparison.DIVERGED for view in shown):
        raise click.exceptions.Exit(ExitCode.FINDINGS)


def _status_json(view: ContainerStatus) -> JsonObject:
    return {
        "containerID": view.container_id,
        "state": view.state.value if view.state else "",
        "replicationConfig": {
            "replicationFactor": _FACTORS.get(view.required_nodes, str(view.required_nodes)),
            "requiredNodes": view.required_nodes,
            "minimumNodes": 1,
            "replicationType": "RATIS",
        },
        "replicasMatch": _MATCH.get(view.compared.comparison),
        "replicas": [
            {
                "datanode": datanode_json(replica.datanode),
                "state": replica.replica.state.value,
                "dataChecksum": root_of(replica.replica) or "0",
            }
            for replica in view.replicas
        ],
    }


def _print_status(shown: Sequence[ContainerStatus]) -> None:
    for view in shown:
        note = f" ({view.compared.note})" if view.compared.note else ""
        print_line(
            f"Container {view.container_id}: {view.state.value if view.state else ''}, replicas:"
            f" {view.compared.comparison.value}{note}"
        )
        rows = [
            (
                replica.datanode.peer,
                replica.datanode.hostname or replica.datanode.address,
                replica.replica.state.value,
                root_of(replica.replica) or "unknown",
            )
            for replica in view.replicas
        ]
        print_table(
            ("DATANODE", "HOST", "STATE", "ROOT"), rows, numbers=("ROOT",), folded=("HOST",)
        )


def ozone_json(value: object, indent: int = 0) -> str:
    """JSON in the layout of Ozone's library: `"key" : value`, brackets open on the same
    line, and `[ ]` if empty.
    """
    if isinstance(value, dict):
        if not value:
            return "{ }"
        inner = "  " * (indent + 1)
        lines = [
            f"{inner}{json.dumps(key)} : {ozone_json(item, indent + 1)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + "\n" + "  " * indent + "}"
    if isinstance(value, list):
        return (
            "[ " + ", ".join(ozone_json(item, indent) for item in value) + " ]" if value else "[ ]"
        )
    return json.dumps(value, ensure_ascii=False)
