"""`treefold reconcile`: print a plan, have it confirmed, and make the replicas of
containers equal.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from admin.answer import (
    check_agents,
    controller_options,
    json_option,
)
from admin.cluster_plan import PlannedContainer, print_cluster_plan
from admin.cluster_reconcile import cluster_reconcile_options
from admin.command_result import CommandResult, command_result
from admin.comparison import comparison_json
from admin.confirmation import is_confirmed
from admin.containers import (
    container_json,
    has_invalid_replica,
    root_of,
)
from admin.datanode_names import DatanodeNames
from admin.jobs import await_jobs, exit_status_of, job_json, print_jobs, unknown_reason
from admin.option_types import Reason
from admin.paths import LocalPath
from admin.plan_files import (
    PlanFile,
    check_new_file,
    load_plans,
    make_plans,
    print_plans,
    save_plans,
)
from admin.reconcile_status import print_status, requested_ids
from admin.requester import requester
from merkle.comparison import Comparison
from merkle.outcome import Verdict
from merkle.replica import ReplicaState
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_table
from runtime.progress import ProgressStyle
from scm.client import ControllerClient
from scm.eligibility import INVALID_HINT, Eligibility
from scm.policy import RootComparison
from scm.replica_trees import compare_live, fetch_trees
from scm.views import ContainerStatus, ReconcileResponse

# A plan for more containers is made without fetching their trees.
_PLAN_TREES_MAX = 20
# Rows of the printed plan.
_PLAN_ROWS_MAX = 100

_UNKNOWN = {Eligibility.CONTAINER_NOT_FOUND, Eligibility.NO_REPLICAS_FOUND}
_BUSY = {Eligibility.ALREADY_RUNNING, Eligibility.QUEUE_FULL}


@click.command()
@click.argument("arguments", metavar="ID... | -", nargs=-1)
@click.option("--all-diverged", is_flag=True, help="Reconcile all containers that diverged.")
@click.option("--status", is_flag=True, help="Only show roots and whether they match.")
@click.option("--dry-run", is_flag=True, help="Only show the plan.")
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    type=LocalPath(path_type=Path),
    help="Have the agents plan every write, save that, and start nothing. They read and"
    " fetch for it at the rate of repairs.",
)
@click.option(
    "--apply",
    "apply_file",
    metavar="FILE",
    type=LocalPath(exists=True, dir_okay=False, path_type=Path),
    help="Carry out exactly the plan in FILE; refused if a replica has changed since.",
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--wait", is_flag=True, help="Wait for the jobs and show their results.")
@click.option(
    "--reason",
    default="",
    metavar="TEXT",
    type=Reason(),
    help="A reason, stored with the jobs.",
)
@json_option
@cluster_reconcile_options
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
    plan_file: Path | None,
    apply_file: Path | None,
    yes: bool,
    wait: bool,
    reason: str,
    as_json: bool,
) -> None:
    """Make the replicas of containers equal, repairing each from the others.

    IDs are arguments or lines of standard input (`-`). The plan is printed first; to
    continue, give --yes or confirm on a terminal. UNRECOVERABLE in a plan is not final:
    a file whose block record is lost may have good data. --cluster has Ozone itself
    reconcile, and watches until all roots are equal.

    Exit status: 0 done, 1 failed, 2 usage, 3 replicas differ (--status), 4 damage
    beyond repair, 5 partly done, 6 refused, 7 no controller or agent, 8 running.
    """
    if status:
        if dry_run or plan_file or apply_file or wait or reason:
            raise UsageError("--status only shows: it takes containers and no other option")
        print_status(controller, arguments, all_diverged, as_json=as_json)
        return
    with command_result("reconcile", as_json=as_json) as answer:
        _check_files(plan_file, apply_file, has_ids=bool(arguments or all_diverged), wait=wait)
        planned = load_plans(apply_file) if apply_file else None
        requested = (
            planned.container_ids
            if planned
            else requested_ids(controller, arguments, all_diverged, as_json=as_json)
        )
        _check_files_of_cluster(scms := controller.status().scms, plan_file or apply_file)
        plans = planned.replicas if planned else ()
        outcomes = controller.reconcile(requested, dry_run=True, plans=plans)
        if any(o.ruling.eligibility in _UNKNOWN for o in outcomes):
            check_agents(controller)
        views = controller.get_containers(requested)
        wanted = [outcome for outcome in outcomes if outcome.ruling.is_ok]
        _show_plan(controller, answer, outcomes, views, planned, has_agents=not scms)
        if plan_file:
            _save_plan(controller, answer, [views[o.container_id] for o in wanted], plan_file)
        is_busy = any(outcome.job_id for outcome in outcomes)
        if dry_run or plan_file or not (wanted or (wait and is_busy)):
            return
        if planned and not _is_current(answer, planned, views):
            return
        if wanted and not is_confirmed(answer, _question(len(wanted)), yes=yes):
            return
        # Do only what was shown and confirmed: containers refused in the plan stay
        # refused.
        started = controller.reconcile(
            [outcome.container_id for outcome in wanted],
            dry_run=False,
            reason=reason,
            requested_by=requester(),
            plans=plans,
        )
        _note_refusals(answer, started, views)
        outcomes = [*started, *(outcome for outcome in outcomes if not outcome.ruling.is_ok)]
        answer.exit_status = _status_of(outcomes)
        _report_jobs(answer, outcomes)
        if wait:
            _wait(controller, answer, outcomes, output, planned, has_agents=not scms)


def _check_files(
    plan_file: Path | None, apply_file: Path | None, *, has_ids: bool, wait: bool
) -> None:
    """Check --plan and --apply before anything is asked."""
    if apply_file and (has_ids or plan_file):
        raise UsageError("--apply takes its containers from the file, and nothing else")
    if plan_file and wait:
        raise UsageError("--plan starts nothing, so there is nothing to --wait for")
    if plan_file:
        check_new_file(plan_file)


def _check_files_of_cluster(scms: Sequence[str], file: Path | None) -> None:
    """Refuse --plan and --apply of a controller without agents, of these SCMs."""
    if scms and file:
        cluster = ",".join(scms)
        raise UsageError(
            "Ozone's reconciliation follows no plan: this controller has no agents",
            hint=f"`treefold rescue ID --cluster {cluster} --dry-run` shows what a rescue could"
            " prove and write.",
        )


def _show_plan(
    controller: ControllerClient,
    answer: CommandResult,
    outcomes: Sequence[ReconcileResponse],
    views: dict[int, ContainerStatus],
    planned: PlanFile | None,
    *,
    has_agents: bool,
) -> None:
    """Print the plan and the refusals, and set the exit status that they have."""
    if has_agents:
        _show_writes(controller, answer, outcomes, views, planned)
    else:
        _show_cluster_plan(answer, outcomes, views)
    _note_refusals(answer, outcomes, views)
    answer.exit_status = _status_of(outcomes)


def _show_writes(
    controller: ControllerClient,
    answer: CommandResult,
    outcomes: Sequence[ReconcileResponse],
    views: dict[int, ContainerStatus],
    planned: PlanFile | None,
) -> None:
    wanted = [outcome for outcome in outcomes if outcome.ruling.is_ok]
    compared = _compared(
        controller, answer, [views[o.container_id] for o in wanted if o.container_id in views]
    )
    answer.data = {
        "plan": [_plan_json(outcome, views, compared) for outcome in outcomes],
        "jobs": [],
    }
    if planned is not None:
        for one in planned.containers:
            for text in one.unknown:
                answer.warn(f"container {one.container_id}: {text}")
        if not answer.as_json:
            print_plans(planned)
        if not planned.container_ids:
            answer.print("The plan has nothing to write.")
    elif not answer.as_json:
        _print_plan(wanted, views, compared)


def _show_cluster_plan(
    answer: CommandResult,
    outcomes: Sequence[ReconcileResponse],
    views: dict[int, ContainerStatus],
) -> None:
    """Of a controller without agents: the plan of `reconcile --cluster`."""
    plan = [
        PlannedContainer.of_view(one.container_id, one.ruling, views.get(one.container_id))
        for one in outcomes
    ]
    answer.data = {"plan": [one.json() for one in plan], "jobs": []}
    if not answer.as_json:
        print_cluster_plan([one for one in plan if one.ruling.is_ok])


def _save_plan(
    controller: ControllerClient,
    answer: CommandResult,
    views: Sequence[ContainerStatus],
    path: Path,
) -> None:
    """Have the agents make their plans, and write them to a file."""
    if not views:
        # Each has its refusal already.
        answer.print("No container can be planned: no file was written.")
        return
    made = make_plans(controller, views)
    save_plans(made, path)
    for one in made.containers:
        for text in one.unknown:
            answer.warn(f"container {one.container_id}: {text}")
        if one.has_failures:
            answer.exit_status = ExitCode.PARTLY
    assert isinstance(answer.data, dict)
    answer.data["planFile"] = str(path)
    answer.data["replicas"] = [
        {"digest": entry.digest} | dict(entry.document)
        for one in made.containers
        for entry in one.replicas
    ]
    if not answer.as_json:
        print_plans(made)
    answer.print(f"The plan is in {path}: carry it out with `treefold reconcile --apply {path}`")


def _is_current(
    answer: CommandResult, planned: PlanFile, views: dict[int, ContainerStatus]
) -> bool:
    """Whether all replicas have the roots that the plan was made from."""
    changed = planned.changed_peers(views)
    for text in changed:
        answer.fail("plan_changed", text, hint="make a new plan with --plan")
    if changed:
        answer.exit_status = ExitCode.REFUSED
    return not changed


def _compared(
    controller: ControllerClient, answer: CommandResult, views: Sequence[ContainerStatus]
) -> dict[int, Comparison]:
    """Compare the agents' current trees of each container; nothing for a long list."""
    if len(views) > _PLAN_TREES_MAX:
        return {}
    found: dict[int, Comparison] = {}
    for view in views:
        trees, errors = fetch_trees(view, tls=controller.tls, insecure=controller.insecure)
        for name, error in errors.items():
            answer.warn(
                f"container {view.container_id}: the plan lacks the tree of datanode"
                f" {DatanodeNames.of_containers([view]).text(name)}:"
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
            names = DatanodeNames.of_containers([view])
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
                            *(
                                f"{names.text(who)} is not written: {why}"
                                for who, why in left.items()
                            ),
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


def _question(count: int) -> str:
    return f"Reconcile {count} container{'' if count == 1 else 's'}?"


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
    outcomes: Sequence[ReconcileResponse],
    output: ProgressStyle | None,
    planned: PlanFile | None,
    *,
    has_agents: bool,
) -> None:
    job_ids = [outcome.job_id for outcome in outcomes if outcome.job_id]
    try:
        started = [controller.job(job_id) for job_id in job_ids]
        jobs = await_jobs(controller, started, output or ProgressStyle())
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
    names = DatanodeNames.of_controller(controller)
    answer.data["jobs"] = [
        names.json(job_json(job) | {"comparison": _comparison_text(views.get(job.container_id))})
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
        if status == 0 and planned and planned.is_partial(job.container_id):
            answer.warn(f"container {job.container_id}: its plan did not know all replicas")
            status = ExitCode.PARTLY
    if not answer.as_json:
        print_jobs(map(names.job, jobs))
    if has_agents:
        _warn_of_unhealthy(answer, list(views.values()))
    else:
        _warn_of_ozones_unhealthy(answer, list(views.values()))
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
            hosts = DatanodeNames.of_containers([view])
            named = ", ".join(f"{hosts.text(peer)}: {why}" for peer, why in stay.items())
            answer.warn(f"{start}{named}. Change that at their agents, and reconcile again")
        if back := _returning(view):
            answer.warn(
                f"{start}{', '.join(back)}. They were not proven clean: `treefold job show` says"
                " why"
            )


def _warn_of_ozones_unhealthy(answer: CommandResult, views: Sequence[ContainerStatus]) -> None:
    for view in views:
        if left := _unhealthy(view):
            hosts = DatanodeNames.of_containers([view])
            answer.warn(
                f"container {view.container_id}: still UNHEALTHY:"
                f" {', '.join(map(hosts.text, left))}. Ozone's reconciliation does not change that"
            )


def _comparison_text(view: ContainerStatus | None) -> str | None:
    return view.compared.comparison.value if view else None
