"""A controller that is killed in each state of a job, and starts again with its clock
where it was, a day ahead or a day behind.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from merkle.outcome import Verdict
from merkle.replica import PeerId
from scm.job_store import SqliteJobStore
from scm.jobs import Job, JobState, OrderState
from scm.rules import Rules
from tests.support.cluster_reports import MemoryJobStore, World, replica, replicas

DNS = ("dn-1", "dn-2", "dn-3")
STATES = ("queued", "issued", "running", "requeued", "cancelling", "waiting", "second round")
ENDS = ("done", "partial", "failed", "cancelled")


def brought_to(world: World, state: str) -> Job:
    """A job of container 1 in this state."""
    _diverged(world)
    if state == "queued":
        # Another job holds the slot of each datanode.
        for peer in DNS:
            world.beat(peer, [replica(peer, number, root=int(peer[-1])) for number in (1, 2)])
        world.reconcile(2)
    [job] = world.reconcile(1)
    match state:
        case "running" | "cancelling" | "waiting":
            for peer in DNS:
                world.told(job, peer, OrderState.RUNNING, bytes_fetched=10)
        case "requeued":
            world.incarnations[PeerId("dn-1")] = 2
            world.beat("dn-1", [replica("dn-1", root=1)])
        case "second round":
            for peer, root in zip(DNS, (5, 6, 6), strict=True):
                world.beat(peer, [replica(peer, root=root)])
                world.told(
                    job, peer, OrderState.DONE, verdict=Verdict.REPAIRABLE, chunks_repaired=1
                )
        case "done" | "partial":
            world.report(*replicas(5, 5, 5))
            first = OrderState.DONE if state == "done" else OrderState.FAILED
            world.told(job, "dn-1", first, verdict=Verdict.MATCH)
            world.finish(job, "dn-2", "dn-3", verdict=Verdict.MATCH)
        case "failed":
            for peer in DNS:
                world.told(job, peer, OrderState.FAILED)
        case "cancelled":
            world.controller.cancel(job.job_id, world.now_s)
            for peer in DNS:
                world.told(job, peer, OrderState.INTERRUPTED)
    if state == "cancelling":
        world.controller.cancel(job.job_id, world.now_s)
    if state == "waiting":
        world.pass_time(100)
    return world.controller.job(job.job_id)


class Killer:
    """Kills the controller of a world without a goodbye, and starts it again later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "state").mkdir()
        self.stores = [SqliteJobStore(folder / "state" / "controller.db")]

    @property
    def store(self) -> MemoryJobStore:
        """The store of the latest controller."""
        return cast(MemoryJobStore, self.stores[-1])

    def kill(self, world: World, jump_s: float) -> None:
        """Kill it; the clock was set by `jump_s` when it starts again."""
        # Copied under way, as a process leaves it that is killed.
        left = self._folder / f"left{len(self.stores)}"
        shutil.copytree(self._folder / "state", left)
        self.stores.append(SqliteJobStore(left / "controller.db"))
        world.store = self.store
        world.now_s += jump_s
        world.restart()


@pytest.fixture
def killer(tmp_path: Path) -> Iterator[Killer]:
    made = Killer(tmp_path)
    yield made
    for store in made.stores:
        store.close()


@pytest.mark.parametrize("jump_s", [0.0, 86_400.0, -86_400.0])
@pytest.mark.parametrize("state", STATES)
def test_a_controller_killed_in_any_state_of_a_job_brings_it_to_its_end(
    killer: Killer, state: str, jump_s: float
) -> None:
    world = World(Rules(orders_per_datanode=1), store=killer.store)
    before = brought_to(world, state)
    assert not before.state.is_terminal
    killer.kill(world, jump_s)
    again = world.controller.job(before.job_id)
    assert [(o.peer, o.state, o.attempts, o.round, o.progress) for o in again.orders] == [
        (o.peer, o.state, o.attempts, o.round, o.progress) for o in before.orders
    ]
    # No agent has said anything yet: nothing is given up.
    world.pass_time(5)
    assert not world.controller.job(before.job_id).state.is_terminal
    world.report(*replicas(5, 5, 5), *replicas(5, 5, 5, container_id=2))
    world.pass_time(5, beating=DNS)
    if state == "cancelling":
        for peer in DNS:
            world.told(before, peer, OrderState.INTERRUPTED)
        assert world.controller.job(before.job_id).state is JobState.CANCELLED
        return
    # The other job first, if there is one: it holds the slots.
    for job in world.controller.jobs(None, 10)[::-1]:
        for order in world.controller.job(job.job_id).orders:
            if order.state.is_in_flight:
                world.told(job, order.peer, OrderState.DONE, verdict=Verdict.MATCH)
    ended = world.controller.job(before.job_id)
    assert (ended.state, ended.detail) == (JobState.DONE, "")
    assert 0 <= ended.active_s < 300


@pytest.mark.parametrize("jump_s", [0.0, 86_400.0, -86_400.0])
@pytest.mark.parametrize("state", ENDS)
def test_a_job_that_ended_before_the_controller_was_killed_stays_as_it_was(
    killer: Killer, state: str, jump_s: float
) -> None:
    world = World(store=killer.store)
    before = brought_to(world, state)
    assert before.state.value == state.upper()
    killer.kill(world, jump_s)
    _diverged(world)
    world.pass_time(300, beating=DNS)
    assert world.controller.job(before.job_id) == before
    assert world.sink.orders == []


def _diverged(world: World) -> None:
    world.report(*replicas(1, 2, 3))
