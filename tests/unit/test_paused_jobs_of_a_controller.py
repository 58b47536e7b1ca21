"""A controller pauses, resumes and limits jobs: agents are told, and a restart keeps
it.
"""

import pytest

from merkle.outcome import Verdict
from runtime.errors import DatabaseError
from scm.jobs import Job, JobState, OrderState, ThrottleRequested
from scm.ports import ThrottleOrder
from scm.rules import Rules
from tests.support.cluster_reports import World, replica

DNS = ("dn-1", "dn-2", "dn-3")


def running(world: World) -> Job:
    """A job whose orders are at the agents."""
    world.report(*(replica(peer, 1, root=number) for number, peer in enumerate(DNS)))
    [job] = world.reconcile(1)
    world.pass_time(1, beating=DNS)
    return job


def pause(world: World, job: Job) -> Job:
    return world.controller.pause(job.job_id, by="me", reason="peak", now_s=world.now_s)


def stop_all(world: World, job: Job) -> None:
    for peer in DNS:
        world.told(job, peer, OrderState.INTERRUPTED)


def limits(world: World, peer: str) -> list[int]:
    return [
        order.bytes_per_second
        for order in world.sink.orders
        if order.peer == peer and isinstance(order, ThrottleOrder)
    ]


def test_agents_of_a_paused_job_are_told_to_stop_and_later_start_again() -> None:
    """Operator rule R3."""
    world = World()
    job = running(world)
    pause(world, job)
    assert [len(world.cancels(peer)) for peer in DNS] == [1, 1, 1]
    assert [len(world.orders(peer)) for peer in DNS] == [0, 0, 0]
    stop_all(world, job)
    assert world.controller.job(job.job_id).state is JobState.PAUSED
    world.pass_time(10_000, beating=DNS, step_s=500)
    assert world.controller.job(job.job_id).state is JobState.PAUSED
    assert [len(world.orders(peer)) for peer in DNS] == [0, 0, 0]
    world.controller.resume(job.job_id, by="me", now_s=world.now_s)
    assert [[order.resumes for order in world.orders(peer)] for peer in DNS] == [[1], [1], [1]]
    assert world.finish(job, *DNS, verdict=Verdict.MATCH).state is JobState.DONE


@pytest.mark.parametrize("has_stopped", [False, True])
def test_a_pause_and_its_limits_outlive_a_restart(*, has_stopped: bool) -> None:
    """Operator rules R5, R9."""
    world = World()
    job = running(world)
    request = ThrottleRequested("me", bytes_per_second=300, containers_max=1)
    world.controller.throttle(job.job_id, request, world.now_s)
    pause(world, job)
    if has_stopped:
        stop_all(world, job)
    world.restart()
    again = world.controller.job(job.job_id)
    assert again.pause is not None
    assert (again.pause.by, again.pause.reason) == ("me", "peak")
    assert (again.bytes_per_second.value, again.containers_max.value) == (300, 1)
    world.report(*(replica(peer, 1, root=number) for number, peer in enumerate(DNS)))
    world.pass_time(1, beating=DNS)
    # Those that may not have heard it are told once more.
    assert [len(world.cancels(peer)) for peer in DNS] == [not has_stopped] * 3
    assert [len(world.orders(peer)) for peer in DNS] == [0, 0, 0]
    if not has_stopped:
        stop_all(world, job)
    world.controller.resume(job.job_id, by="me", now_s=world.now_s)
    world.pass_time(1, beating=DNS)
    assert [order.bytes_per_second for peer in DNS for order in world.orders(peer)] == [300]


def test_a_limit_reaches_the_agents_that_run_and_those_that_start_later() -> None:
    """Operator rule R9."""
    world = World()
    job = running(world)
    world.controller.throttle(
        job.job_id, ThrottleRequested("me", bytes_per_second=300), world.now_s
    )
    assert [limits(world, peer) for peer in DNS] == [[100], [100], [100]]
    world.restart()
    world.report(*(replica(peer, 1, root=number) for number, peer in enumerate(DNS)))
    world.pass_time(1, beating=DNS)
    # Nobody knows whether the first one arrived.
    assert [limits(world, peer) for peer in DNS] == [[100], [100], [100]]
    assert [order.bytes_per_second for order in world.orders("dn-1")] == [100]


def test_limits_do_not_gather_for_an_agent_that_is_away() -> None:
    world = World()
    job = running(world)
    for rate in (300, 600, 900):
        world.controller.throttle(job.job_id, ThrottleRequested("me", rate), world.now_s)
    assert [limits(world, peer) for peer in DNS] == [[300], [300], [300]]
    world.finish(job, "dn-1", verdict=Verdict.MATCH)
    assert [len(limits(world, peer)) for peer in DNS] == [0, 1, 1]


def test_a_paused_job_keeps_no_other_waiting() -> None:
    """Operator rule R7: its orders take no slot of a datanode, and no place in its
    queue.
    """
    world = World(Rules(orders_per_datanode=1))
    # More than are looked at in one search.
    numbers = range(1, 103)
    for root, peer in enumerate(DNS):
        world.beat(peer, [replica(peer, one, root=root) for one in numbers])
    *first, last = world.reconcile(*numbers)
    assert world.controller.job(last.job_id).state is JobState.QUEUED
    for job in first:
        pause(world, job)
    world.pass_time(1, beating=DNS)
    assert world.controller.job(last.job_id).state is JobState.RUNNING


def test_what_cannot_be_saved_is_not_paused() -> None:
    world = World()
    job = running(world)
    world.store.is_full = True
    with pytest.raises(DatabaseError):
        pause(world, job)
    assert world.controller.job(job.job_id).pause is None
    assert [len(world.cancels(peer)) for peer in DNS] == [0, 0, 0]
