"""`treefold status`: ask every process how it is, and say what is wrong."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import click

from admin.answer import controller_options, json_option
from admin.cluster_status import (
    AgentAnswer,
    ClusterAnswer,
    SweepAnswer,
    VerifierAnswer,
    answer_json,
    exit_status_of,
    health_of,
    lines,
    problems_of,
)
from admin.clusters import cluster_option
from admin.command_result import command_result
from admin.datanode_names import unique_prefixes
from admin.master_status import MasterAnswer
from admin.paths import LocalPath
from admin.tls_options import check_option_address
from dnagent.client import AgentClient
from merkle.errors import ReconcileError
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.output import print_line
from scm.client import ControllerClient
from scm.jobs import JobState
from scm.views import DatanodeView, JobStatus

# An agent that takes longer is reported as silent, so that one cannot hold up the rest.
_AGENT_S = 5.0
_CALLS_AT_ONCE = 16
# The newest jobs that are looked at, and of each state those that have not ended.
_JOBS_MAX = 1_000
_ACTIVE_MAX = 50
_EXTRA = "install the extra for chunk tables: pip install 'treefold[sweep]'"


@click.command()
@click.option(
    "--sweep",
    "sweep_folder",
    metavar="OUT",
    type=LocalPath(file_okay=False, path_type=Path),
    help="The folder of sweeps, the --out of `treefold sweep run`.",
)
@click.option(
    "--verifier",
    "verifiers",
    metavar="HOST:PORT",
    multiple=True,
    help="A verifier (`treefold verifier run`). May be repeated.",
)
@click.option(
    "--master",
    "masters",
    metavar="HOST:PORT",
    multiple=True,
    help="A replication master (`treefold replication-master run`). May be repeated.",
)
@cluster_option()
@json_option
@controller_options
def status(
    *,
    controller: ControllerClient,
    cluster: str | None,
    sweep_folder: Path | None,
    verifiers: tuple[str, ...],
    masters: tuple[str, ...],
    as_json: bool,
) -> None:
    """What is wrong, how sure that is, and what to do next.

    It asks the controller, the agents that the controller knows, and what the options
    name. What does not answer is UNKNOWN, with the reason. Nothing changes. With
    --cluster it asks the SCM of a running cluster instead, and no agent.

    \b
    Exit status:
      0  all is healthy
      3  something is wrong, for example diverged
      7  nothing is known to be wrong, and not all is known
    """
    for address in verifiers:
        check_option_address("--verifier", address)
    for address in masters:
        check_option_address("--master", address)
    if cluster is not None:
        if sweep_folder or verifiers or masters:
            raise UsageError("--cluster goes without --sweep, --verifier and --master")
        # Imported here, because the other status needs none of it.
        from admin.cluster_health import show_status

        with command_result("status", as_json=as_json) as result:
            show_status(cluster, result)
        return
    with command_result("status", as_json=as_json) as result:
        answer = ask(controller, sweep_folder, verifiers, masters)
        result.data = answer_json(answer)
        result.exit_status = exit_status_of(health_of(problems_of(answer)))
        if not as_json:
            for line in lines(answer):
                print_line(line)


def ask(
    controller: ControllerClient,
    sweep_folder: Path | None,
    verifiers: Sequence[str],
    masters: Sequence[str] = (),
) -> ClusterAnswer:
    """Ask everything; whoever does not answer is in the answer with the reason."""
    sweep = _ask_sweep(sweep_folder) if sweep_folder else None
    asked = tuple(_ask_verifier(controller, address) for address in verifiers)
    asked_masters = tuple(_ask_master(controller, address) for address in masters)
    try:
        found = controller.status()
        views = controller.datanodes()
        jobs = _jobs(controller)
    except UsageError:
        raise
    except ReconcileError as error:
        return ClusterAnswer(
            time.time(),
            controller.address,
            None,
            f"{error.code}: {error.message}",
            sweep=sweep,
            verifiers=asked,
            masters=asked_masters,
        )
    with ThreadPoolExecutor(_CALLS_AT_ONCE, thread_name_prefix="status") as pool:
        short = unique_prefixes(view.datanode.peer for view in views)
        agents = tuple(
            replace(one, short_id=short[one.view.datanode.peer])
            for one in pool.map(lambda view: _ask_agent(controller, view), views)
        )
    return ClusterAnswer(
        time.time(),
        controller.address,
        found,
        agents=agents,
        jobs=jobs,
        sweep=sweep,
        verifiers=asked,
        masters=asked_masters,
    )


def _jobs(controller: ControllerClient) -> tuple[JobStatus, ...]:
    """Jobs that have not ended, and the last one of each container if it did not end
    well.
    """
    found = controller.jobs(limit=_JOBS_MAX)
    for state in JobState:
        if not state.is_terminal:
            found += controller.jobs(state=state.value, limit=_ACTIVE_MAX)
    newest: dict[int, JobStatus] = {}
    for job in sorted(found, key=lambda job: job.created_at_s):
        newest[job.container_id] = job
    ended_well = (JobState.DONE, JobState.CANCELLED)
    return tuple(job for job in newest.values() if job.state not in ended_well)


def _ask_agent(controller: ControllerClient, view: DatanodeView) -> AgentAnswer:
    if not view.is_live:
        return AgentAnswer(view, None, "no heartbeat")
    address = view.datanode.address
    try:
        channel = controller.agent_channel(view.datanode.peer, address)
        with channel:
            return AgentAnswer(view, AgentClient(channel, address).status(timeout_s=_AGENT_S))
    except ReconcileError as error:
        return AgentAnswer(view, None, f"{error.code}: {error.message}")


def _ask_sweep(folder: Path) -> SweepAnswer:
    # Imported here: the controller's machine may have no pyarrow.
    try:
        from sweep.output import Summary, SweepStore
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        return SweepAnswer(str(folder), error=f"{missing} is not installed: {_EXTRA}")
    try:
        store = SweepStore(folder, Disk())
        sweep_id = store.sweep("latest")
        summary = Summary.of(store.summary(sweep_id))
        counts = [*summary.verdicts.values(), summary.unseen]
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"counts are not numbers: {counts}"[:200])
        found = SweepAnswer(
            str(folder),
            sweep_id,
            (summary.started_at + timedelta(seconds=summary.seconds)).timestamp(),
            tuple(sorted(summary.verdicts.items())),
            summary.unseen,
            len(summary.skipped),
            diverged=len(summary.diverged),
        )
    except ReconcileError as error:
        return SweepAnswer(str(folder), error=f"{error.code}: {error.message}")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        return SweepAnswer(str(folder), error=f"its summary cannot be read: {error!r}")
    return found


def _ask_verifier(controller: ControllerClient, address: str) -> VerifierAnswer:
    # Imported here: most clusters have no verifier.
    from replicator.verifier.client import VerifierClient

    try:
        client = VerifierClient(address, tls=controller.tls, insecure=controller.insecure)
        try:
            found = client.describe()
        finally:
            client.close()
    except ReconcileError as error:
        return VerifierAnswer(address, error=f"{error.code}: {error.message}")
    return VerifierAnswer(
        address, found.address, found.index.listed_at_s, roles_enforced=found.roles_enforced
    )


def _ask_master(controller: ControllerClient, address: str) -> MasterAnswer:
    # Imported here: most clusters replicate no bucket.
    from replicator.master.client import MasterClient

    try:
        client = MasterClient([address], tls=controller.tls, insecure=controller.insecure)
        try:
            return MasterAnswer(address, client.status(), tuple(client.replications()))
        finally:
            client.close()
    except ReconcileError as error:
        return MasterAnswer(address, error=f"{error.code}: {error.message}")
