"""Jobs are paused, limited and let go on in the middle of a storm, and still converge.

The storm is that of the other simulations: messages are lost, doubled and late, and
agents and the controller die. An operator pauses and resumes jobs besides. In peace
the operator resumes what is paused; the controller alone must bring the rest.
"""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from runtime.log import LogLevel, configure
from scm.controller import Controller
from scm.jobs import Event, JobId, JobState, ProgressReceived
from tests.support.cluster_control import ControllerProcess, Parts
from tests.support.observer import ViolationError
from tests.support.simulation import SimulatedCluster, cluster_of_seed

SEEDS = 16
CHANCE = 0.12


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    configure(level=LogLevel.ERROR)
    yield
    configure()


class Operator:
    """Pauses, resumes and limits jobs between steps of the storm."""

    def __init__(self, cluster: SimulatedCluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(f"operator {seed}")
        self._gone_on: set[JobId] = set()
        self.marks = Counter[str]()

    def look(self) -> None:
        """After a step of the storm: perhaps request something."""
        if self._rng.random() < CHANCE:
            self._act()
        self._count()

    def end(self) -> None:
        """Let every job go on, once there is a controller to ask."""
        world = self._cluster.world
        while world.host is None or any(job.pause for job in world.host.active()):
            world.now_s += 1.0
            world.start_what_is_due()
            for job in world.host.active() if world.host else ():
                if job.pause:
                    self._resume(job.job_id)

    def _resume(self, job_id: JobId) -> None:
        self._cluster.network.of_controller(lambda host: host.resume(job_id))

    def _act(self) -> None:
        host = self._cluster.world.host
        jobs = host.active() if host else []
        if not jobs:
            return
        job = self._rng.choice(jobs)

        def act(host: ControllerProcess) -> None:
            match self._rng.randrange(3):
                case 0:
                    host.throttle(job.job_id, self._rng.choice((0, 1000)), self._rng.randrange(3))
                case _ if job.pause:
                    host.resume(job.job_id)
                    self._gone_on.add(job.job_id)
                case _:
                    self.marks["paused in flight"] += bool(job.in_flight_count)
                    host.pause(job.job_id)

        self._cluster.network.of_controller(act)

    def _count(self) -> None:
        host = self._cluster.world.host
        for job in host.controller.jobs(None, 1_000) if host else ():
            self.marks["paused"] += job.state is JobState.PAUSED
            is_done = job.state is JobState.DONE and job.job_id in self._gone_on
            self.marks["done after a pause"] += is_done
            self.marks["sent again"] += any(order.resumes for order in job.orders)


def ran(seeds: int, parts: Parts | None = None) -> Counter[str]:
    """What happened in the first seeds."""
    return sum((ran_seed(seed, parts) for seed in range(seeds)), Counter[str]())


def ran_seed(seed: int, parts: Parts | None) -> Counter[str]:
    cluster = cluster_of_seed(seed, parts=parts)
    operator = Operator(cluster, seed)
    cluster.storm(after_step=operator.look)
    operator.end()
    cluster.heal()
    return operator.marks


@pytest.mark.timeout(600)
def test_jobs_that_are_paused_in_a_storm_still_make_their_replicas_equal() -> None:
    """Operator rules R3, R6."""
    marks = ran(SEEDS)
    expected = ("paused", "paused in flight", "done after a pause", "sent again")
    assert [mark for mark in expected if not marks[mark]] == []


class _TakesAStoppedRunForTheNext(Controller):
    def _step(self, job_id: JobId, event: Event, now_s: float) -> None:
        job = self._jobs.get(job_id)
        order = job.order(event.peer) if job and isinstance(event, ProgressReceived) else None
        if order and isinstance(event, ProgressReceived):
            event = ProgressReceived(
                event.peer, event.state, event.progress, event.round, event.root, order.resumes
            )
        super()._step(job_id, event, now_s)


@pytest.mark.timeout(600)
def test_a_late_word_of_a_stopped_run_that_counts_is_caught() -> None:
    with pytest.raises(ViolationError):
        ran(SEEDS, Parts(controller=_TakesAStoppedRunForTheNext))
