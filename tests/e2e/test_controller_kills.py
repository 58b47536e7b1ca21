"""A controller process that is killed with jobs in every state at once, and one that is
killed while it saves: the next one knows all that the last one confirmed.
"""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from protos import controller_pb2 as pb
from protos.controller_pb2_grpc import ControllerStub
from runtime.rpc import open_channel
from tests.support.cluster_reports import replica
from tests.support.processes import TreefoldProcess, controller
from tests.support.reporting_agents import CALL_S, ReportingAgent
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.crashes]
DNS = ("dn-1", "dn-2", "dn-3")
# Of container IDs: the two that run hold both slots of each datanode.
ENDED, RUNNING, CANCELLED, QUEUED, ORDERED = 1, 2, 3, 4, 5
FIRST_SAVED = 10
KILLS_UNDER_SAVE = 3


@dataclass
class Cluster:
    """One controller after another on one state, and agents that outlive them."""

    folder: Path
    address: str
    process: TreefoldProcess
    stub: ControllerStub
    agents: Mapping[str, ReportingAgent]
    roots: dict[int, Mapping[str, int]] = field(default_factory=dict)
    # What each agent would say of its orders, by job.
    told: dict[str, str] = field(default_factory=dict)
    commands: list[tuple[str, pb.Command]] = field(default_factory=list)
    stack: ExitStack = field(default_factory=ExitStack)

    def kill(self) -> None:
        """SIGKILL, and another process."""
        self.process.stop(signal.SIGKILL)
        self.restart()

    def restart(self) -> None:
        """Another process on the same state and address."""
        self.process = self.stack.enter_context(controller(self.folder, self.address))
        self.process.address()

    def report(self, containers: Mapping[int, Mapping[str, int]]) -> None:
        """Report these roots from now on, those of all containers at once."""
        self.roots.update(containers)
        for peer, agent in self.agents.items():
            agent.report(*(
                replica(peer, container_id, root=roots[peer])
                for container_id, roots in self.roots.items()
            ))  # fmt: skip

    def beat(self) -> None:
        """Each agent reports its progress, and takes its commands."""
        for peer, agent in self.agents.items():
            progress = [
                pb.ReconcileProgress(
                    job_id=command.reconcile.job_id,
                    container_id=command.reconcile.container_id,
                    state=self.told[command.reconcile.job_id],
                    verdict="MATCH" if self.told[command.reconcile.job_id] == "done" else "",
                )
                for named, command in self.commands
                if named == peer and command.reconcile.job_id in self.told
            ]
            known = [command.command_id for named, command in self.commands if named == peer]
            answer = agent.beat(progress=progress, acknowledged=known)
            new = [command for command in answer.commands if command.command_id not in known]
            self.commands += [(peer, command) for command in new]

    def reconcile(self, container_id: int) -> str:
        """The ID of a new job."""
        request = pb.ReconcileRequest(
            container_ids=[container_id], reason="asked", requested_by="somebody"
        )
        outcome = self.stub.Reconcile(request, timeout=CALL_S, wait_for_ready=True).outcomes[0]
        assert outcome.job_id, outcome
        return str(outcome.job_id)

    def job(self, job_id: str) -> pb.Job:
        job: pb.Job = self.stub.GetJob(
            pb.GetJobRequest(job_id=job_id), timeout=CALL_S, wait_for_ready=True
        )
        return job

    def hear_cancel(self, job_id: str) -> set[str]:
        """The agents that heard, after one heartbeat more, that a job is cancelled."""
        self.beat()
        return {peer for peer, command in self.commands if command.cancel.job_id == job_id}

    def until(self, job_id: str, state: str) -> None:
        """Beat until the job is in this state."""

        def is_reached() -> bool:
            self.beat()
            return self.job(job_id).state == state

        wait_until(is_reached, f"{job_id} to be {state}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        process = stack.enter_context(controller(tmp_path))
        address = process.address()
        channel = open_channel(address)
        stack.callback(channel.close)
        agents = {peer: ReportingAgent(address, peer) for peer in DNS}
        for agent in agents.values():
            stack.callback(agent.close)
        yield Cluster(tmp_path, address, process, ControllerStub(channel), agents, stack=stack)


def test_a_killed_controller_goes_on_with_jobs_of_every_state(cluster: Cluster) -> None:
    """CR-052: queued, running, cancelling and ended at once, then ordered."""
    diverged = dict(zip(DNS, (1, 2, 3), strict=True))
    alike = dict.fromkeys(DNS, 9)
    cluster.report(dict.fromkeys((ENDED, RUNNING, CANCELLED, QUEUED, ORDERED), diverged))

    ended = cluster.reconcile(ENDED)
    cluster.told[ended] = "done"
    cluster.report({ENDED: alike})
    cluster.until(ended, "DONE")
    end = _without_comparison(cluster.job(ended))

    running, cancelled = cluster.reconcile(RUNNING), cluster.reconcile(CANCELLED)
    cluster.told |= {running: "running", cancelled: "running"}
    cluster.until(running, "RUNNING")
    cluster.until(cancelled, "RUNNING")
    queued = cluster.reconcile(QUEUED)
    cluster.stub.CancelJob(pb.CancelJobRequest(job_id=cancelled), timeout=CALL_S)
    cluster.kill()

    assert _without_comparison(cluster.job(ended)) == end
    assert cluster.job(queued).state == "QUEUED"
    assert cluster.job(running).state in ("QUEUED", "RUNNING", "WAITING")
    cluster.report({})
    # No agent has heard of it: the controller died before their next heartbeats.
    wait_until(lambda: cluster.hear_cancel(cancelled) == set(DNS), "all to hear the cancel")
    cluster.told[cancelled] = "interrupted"
    cluster.until(cancelled, "CANCELLED")
    cluster.report({QUEUED: alike})
    cluster.told[queued] = "done"
    cluster.until(queued, "DONE")

    ordered = cluster.reconcile(ORDERED)
    # Its orders have gone out, and no agent asks for them before the next start.
    assert cluster.job(ordered).state == "RUNNING"
    cluster.kill()

    cluster.report({RUNNING: alike, ORDERED: alike})
    cluster.told |= {running: "done", ordered: "done"}
    for job_id in (running, ordered):
        cluster.until(job_id, "DONE")
    assert _without_comparison(cluster.job(ended)) == end
    assert cluster.job(cancelled).state == "CANCELLED"
    orders = [
        (peer, command.reconcile.job_id)
        for peer, command in cluster.commands
        if command.HasField("reconcile")
    ]
    for job_id in (ended, running, cancelled, queued, ordered):
        assert {peer for peer, known in orders if known == job_id} == set(DNS)


def test_a_controller_killed_while_it_saves_knows_every_job_that_it_confirmed(
    cluster: Cluster,
) -> None:
    diverged = dict(zip(DNS, (1, 2, 3), strict=True))
    containers = range(FIRST_SAVED, FIRST_SAVED + 3_000)
    cluster.report(dict.fromkeys(containers, diverged))
    confirmed: dict[str, int] = {}
    left = iter(containers)
    for _ in range(KILLS_UNDER_SAVE):
        before = len(confirmed)

        def ask() -> None:
            for container_id in left:
                try:
                    confirmed[cluster.reconcile(container_id)] = container_id
                except grpc.RpcError:
                    return

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda before=before: len(confirmed) > before + 20, "some jobs")
        # One save follows another: it dies in one of them, or right before or after.
        cluster.process.stop(signal.SIGKILL)
        asking.join()
        cluster.restart()
        for job_id, container_id in confirmed.items():
            job = cluster.job(job_id)
            assert (job.container_id, len(job.datanodes)) == (container_id, len(DNS))
        cluster.report({})
    assert next(left, None) is not None


def _without_comparison(job: pb.Job) -> pb.Job:
    """What a job found; how its container compares now is unknown after a start."""
    found = pb.Job()
    found.CopyFrom(job)
    found.ClearField("comparison")
    found.ClearField("comparison_note")
    return found
