"""The controller as a whole, in memory: jobs from request to result, limits, restarts,
automatic mode.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import cast

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from merkle.outcome import RepairReport, Verdict
from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from protos.errors import JobNotFoundError
from runtime.errors import BusyError, DatabaseError, DiskError, UsageError
from runtime.metrics import Kind, Metrics
from scm.eligibility import Eligibility
from scm.heartbeats import ProgressReport
from scm.job_store import SqliteJobStore
from scm.jobs import ROUNDS_MAX, Job, JobId, JobState, OrderState, task_id
from scm.limits import ControllerLimits
from scm.messages import command_to, heartbeat_from, job_to
from scm.metrics import CONTROLLER_METRICS, PROCESS
from scm.policy import MATCH, RootComparison, Visit
from scm.ports import ReconcileOrder, ScanOrder
from scm.rules import Rules
from scm.server import ControllerService, Outbox
from scm.views import ReconcileResponse
from tests.support.cluster_reports import SCANNED_MS, MemoryJobStore, World, replica, replicas
from tests.support.identities import ANYBODY

DNS = ("dn-1", "dn-2", "dn-3")


def diverged(world: World, count: int = 1) -> None:
    """Containers 1..count, whose replicas differ."""
    for peer in DNS:
        world.beat(
            peer,
            [
                replica(peer, number, root=number if peer == "dn-1" else 0)
                for number in range(1, count + 1)
            ],
        )


def test_a_job_goes_from_request_to_result() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    assert job.state is JobState.RUNNING
    for peer in DNS:
        [order] = world.orders(peer)
        world.beat(peer, acknowledged=(order.command_id,))
        assert world.orders(peer) == []
        world.told(job, peer, OrderState.RUNNING, bytes_fetched=10, bytes_planned=30)
    assert world.controller.job(job.job_id).bytes_done == 30
    world.report(*replicas(5, 5, 5))
    ended = world.finish(job, *DNS)
    assert (ended.state, ended.verdict) == (JobState.DONE, Verdict.REPAIRABLE)
    view = world.controller.queries.container(ContainerId(1))
    assert view is not None
    assert view.visit is not None
    assert (view.visit.job_id, view.visit.failures) == (job.job_id, 0)
    assert view.ruling.is_ok


def test_an_order_says_what_an_unhealthy_replica_may_return_to() -> None:
    world = World()
    for peer, state in zip(
        DNS, (ReplicaState.CLOSED, ReplicaState.UNHEALTHY, ReplicaState.UNHEALTHY), strict=True
    ):
        other = ReplicaState.QUASI_CLOSED if state is ReplicaState.CLOSED else state
        world.beat(
            peer,
            [
                replica(peer, 1, state, root=int(peer[-1])),
                replica(peer, 2, other, root=int(peer[-1])),
            ],
        )
    world.reconcile(1, 2)
    for peer in DNS:
        orders = [order for order in world.orders(peer) if isinstance(order, ReconcileOrder)]
        assert {order.container_id: order.returns_to.value for order in orders} == {
            1: "CLOSED",
            2: "QUASI_CLOSED",
        }
        assert [command_to(order).reconcile.container_state for order in orders] == [
            "CLOSED",
            "QUASI_CLOSED",
        ]


def test_a_second_request_for_a_container_gets_the_job_that_is_under_way() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    [outcome] = world.controller.reconcile(
        [ContainerId(1)], dry_run=False, reason="", requested_by="", now_s=world.now_s
    )
    assert outcome.ruling.eligibility is Eligibility.ALREADY_RUNNING
    assert outcome.job_id == job.job_id
    assert len(world.sink.orders) == 3


def test_a_dry_run_starts_nothing() -> None:
    world = World()
    diverged(world, 2)
    outcomes = world.controller.reconcile(
        [ContainerId(1), ContainerId(1), ContainerId(9)],
        dry_run=True,
        reason="",
        requested_by="",
        now_s=world.now_s,
    )
    assert [(o.container_id, o.ruling.eligibility.value, o.job_id) for o in outcomes] == [
        (1, "ok", None),
        (9, "CONTAINER_NOT_FOUND", None),
    ]
    assert world.controller.jobs(None, 10) == []
    assert world.sink.orders == []
    assert list(world.store.jobs()) == []


def test_what_cannot_be_stored_is_not_begun() -> None:
    world = World(Rules(orders_per_datanode=1))
    diverged(world, 3)
    world.store.is_full = True
    with pytest.raises(DatabaseError):
        world.reconcile(1, 2)
    for peer in DNS:
        world.beat(peer)
    world.pass_time(5)
    assert (world.controller.jobs(None, 10), world.sink.orders) == ([], [])
    world.store.is_full = False
    world.pass_time(5)
    assert (world.controller.jobs(None, 10), world.sink.orders) == ([], [])
    assert [job.container_id for job in world.reconcile(1, 2)] == [1, 2]
    assert len(list(world.store.jobs())) == 2


def test_automatic_mode_begins_nothing_that_cannot_be_stored_and_goes_on_once_it_can() -> None:
    world = World(AUTOMATIC)
    diverged(world, 2)
    world.store.is_full = True
    for _ in range(3):
        with pytest.raises(DatabaseError):
            world.pass_time(1)
    assert (world.controller.jobs(None, 10), world.sink.orders) == ([], [])
    world.store.is_full = False
    world.pass_time(1)
    assert len(world.controller.jobs(None, 10)) == 2
    assert len(list(world.store.jobs())) == 2


def test_a_cancellation_that_cannot_be_stored_leaves_the_job_alone() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.store.is_full = True
    with pytest.raises(DatabaseError):
        world.controller.cancel(job.job_id, world.now_s)
    assert world.controller.job(job.job_id).cancel_requested_at_s is None
    assert [len(world.orders(peer)) for peer in DNS] == [1, 1, 1]
    assert [len(world.cancels(peer)) for peer in DNS] == [0, 0, 0]


def test_no_order_goes_out_before_what_led_to_it_is_stored() -> None:
    world = World(Rules(orders_per_datanode=1))
    diverged(world, 2)
    first, _ = world.reconcile(1, 2)
    world.store.is_full = True
    with pytest.raises(DatabaseError):
        world.finish(first, "dn-1")
    assert world.orders("dn-1") == []
    world.store.is_full = False
    world.beat("dn-1")
    assert [order.container_id for order in world.orders("dn-1")] == [2]


def test_a_request_that_is_stored_is_granted_though_what_follows_cannot_be() -> None:
    """Else it would be denied, and done all the same."""

    class FullAfterOne(MemoryJobStore):
        def save(self, jobs: Iterable[Job] = (), visits: Iterable[Visit] = ()) -> None:
            super().save(jobs, visits)
            self.is_full = True

    world = World(store=FullAfterOne())
    diverged(world)
    [job] = world.reconcile(1)
    assert len(world.sink.orders) == 3
    with pytest.raises(DatabaseError):
        world.pass_time(1)
    world.store.is_full = False
    assert world.controller.cancel(job.job_id, world.now_s).cancel_requested_at_s == world.now_s
    world.restart()
    assert world.controller.job(job.job_id).cancel_requested_at_s == world.now_s


def test_a_datanode_never_has_more_orders_than_its_limit_and_gets_the_next_when_one_ends() -> None:
    """CR: limits per datanode; reliability F7."""
    world = World(Rules(orders_per_datanode=2))
    diverged(world, 5)
    jobs = world.reconcile(1, 2, 3, 4, 5)
    assert [len(world.orders(peer)) for peer in DNS] == [2, 2, 2]
    assert [world.controller.job(job.job_id).state for job in jobs[2:]] == [JobState.QUEUED] * 3
    world.finish(jobs[0], "dn-1")
    assert {order.container_id for order in world.orders("dn-1")} == {2, 3}
    assert {order.container_id for order in world.orders("dn-2")} == {1, 2}


def test_orders_go_to_live_datanodes_only() -> None:
    world = World()
    diverged(world)
    world.pass_time(100, beating=("dn-1", "dn-2"))
    [job] = world.reconcile(1)
    assert [order.peer for order in job.orders] == ["dn-1", "dn-2"]
    assert world.orders("dn-3") == []
    assert {datanode.peer for datanode in world.orders("dn-1")[0].peers} == {"dn-2"}


def test_a_container_with_one_live_replica_is_refused() -> None:
    """CR: Ozone would send a command with an empty list of peers (T1)."""
    world = World()
    diverged(world)
    world.pass_time(100, beating=("dn-1",))
    assert world.reconcile(1) == []
    view = world.controller.queries.container(ContainerId(1))
    assert view is not None
    assert view.ruling.eligibility is Eligibility.NO_LIVE_PEERS


def test_a_restarted_controller_goes_on_and_sends_again_what_was_out() -> None:
    """Operator rule R5: no job lives in a terminal, or in one process."""
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    sent = {order.peer: order.command_id for order in world.orders("dn-1") + world.orders("dn-2")}
    world.finish(job, "dn-3")
    world.restart()
    assert [o.state for o in world.controller.job(job.job_id).orders if o.peer == "dn-3"] == [
        OrderState.DONE
    ]
    assert world.sink.orders == []
    diverged(world)
    world.pass_time(1)
    assert {
        o.peer: o.command_id for o in world.sink.orders if isinstance(o, ReconcileOrder)
    } == sent
    assert world.finish(job, "dn-1", "dn-2").state is JobState.DONE


def test_after_a_restart_orders_wait_until_their_peers_are_known() -> None:
    world = World()
    diverged(world)
    world.reconcile(1)
    world.restart()
    world.beat("dn-1", [replica("dn-1")])
    world.pass_time(30, beating=("dn-1",))
    assert world.sink.orders == []
    world.beat("dn-2", [replica("dn-2")])
    world.pass_time(70, beating=("dn-1", "dn-2"))
    # The third did not come in time: the others go on without it.
    assert {datanode.peer for datanode in world.orders("dn-1")[0].peers} == {"dn-2"}


def test_after_a_restart_two_of_three_peers_are_not_enough_for_an_order() -> None:
    world = World(Rules(stale_after_s=90))
    diverged(world, 2)
    world.reconcile(1)
    world.restart()
    for peer in ("dn-1", "dn-2"):
        world.beat(peer, [replica(peer, number, root=int(peer[-1])) for number in (1, 2)])
    world.pass_time(80, beating=("dn-1", "dn-2"))
    assert world.sink.orders == []
    diverged(world, 2)
    world.pass_time(1, beating=DNS)
    for peer in DNS:
        (order,) = world.orders(peer)
        assert {datanode.peer for datanode in order.peers} == {*DNS} - {peer}


def test_a_controller_that_was_down_for_longer_than_the_deadline_goes_on() -> None:
    world = World(Rules(command_deadline_s=300))
    diverged(world)
    [job] = world.reconcile(1)
    for peer in DNS:
        world.told(job, peer, OrderState.RUNNING, bytes_fetched=1)
    world.pass_time(20, beating=DNS)
    active_s = world.controller.job(job.job_id).active_s
    world.now_s += 3 * 3600
    world.restart()
    world.pass_time(1)
    running = world.controller.job(job.job_id)
    assert [order.state for order in running.orders] == [OrderState.RUNNING] * 3
    diverged(world)
    assert world.cancels("dn-1") == []
    assert world.finish(job, *DNS).state is JobState.DONE
    assert world.controller.job(job.job_id).active_s < active_s + 10


@pytest.mark.parametrize("jump_s", [-7 * 86_400.0, 7 * 86_400.0])
def test_a_clock_that_was_set_while_the_controller_was_down_moves_no_deadline(
    jump_s: float,
) -> None:
    world = World(Rules(command_deadline_s=300))
    diverged(world, 2)
    kept, left = world.reconcile(1, 2)
    world.pass_time(10, beating=DNS)
    world.now_s += jump_s
    world.restart()
    diverged(world, 2)
    world.pass_time(200, beating=DNS)
    assert not world.controller.job(left.job_id).state.is_terminal
    for peer in DNS:
        world.told(kept, peer, OrderState.RUNNING, bytes_fetched=1)
    world.pass_time(150, beating=DNS)
    assert "no progress for 300 s" in world.controller.job(left.job_id).detail
    assert world.controller.job(kept.job_id).state is JobState.RUNNING
    assert 300 <= world.controller.job(kept.job_id).active_s <= 370


@pytest.mark.parametrize("down_s", [0.0, 3600.0, -3600.0])
def test_after_a_restart_a_cancelled_job_is_cancelled_again_and_has_its_grace(
    down_s: float,
) -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.pass_time(1, beating=DNS)
    world.controller.cancel(job.job_id, world.now_s)
    world.now_s += down_s
    world.restart()
    diverged(world)
    world.pass_time(30, beating=DNS)
    assert [len(world.orders(peer)) for peer in DNS] == [0, 0, 0]
    assert [len(world.cancels(peer)) for peer in DNS] == [1, 1, 1]
    assert world.controller.job(job.job_id).detail == "stopping"
    world.told(job, "dn-1", OrderState.INTERRUPTED)
    world.pass_time(40, beating=DNS)
    assert world.controller.job(job.job_id).state is JobState.CANCELLED


def test_a_clock_that_was_set_back_does_not_keep_a_container_waiting() -> None:
    world = World(Rules(automatic=True))
    diverged(world)
    world.pass_time(1, beating=DNS)
    [job] = world.controller.jobs(None, 10)
    for peer in DNS:
        world.told(job, peer, OrderState.FAILED)
    world.now_s -= 30 * 86_400
    world.restart()
    diverged(world)
    world.pass_time(90, beating=DNS)
    assert len(world.controller.jobs(None, 10)) == 2


def test_a_process_that_stood_still_blames_nobody_for_its_silence() -> None:
    """After SIGSTOP or a paused machine the tick may come before any heartbeat."""
    world = World(Rules(command_deadline_s=300), pause_after_s=30.0)
    diverged(world)
    [job] = world.reconcile(1)
    world.now_s += 3600
    world.controller.tick(world.now_s)
    assert world.controller.queries.gauges(world.now_s)["scm_datanodes_live"] == 3
    assert world.controller.job(job.job_id).state is JobState.RUNNING
    world.pass_time(80)
    assert world.controller.queries.gauges(world.now_s)["scm_datanodes_live"] == 3
    world.pass_time(20)
    assert world.controller.queries.gauges(world.now_s)["scm_datanodes_live"] == 0
    world.pass_time(250, beating=DNS)
    assert "no progress for 300 s" in world.controller.job(job.job_id).detail


def test_jobs_that_end_together_beyond_the_limit_do_not_come_back(
    tmp_path: Path,
) -> None:
    store = SqliteJobStore(tmp_path / "controller.db")
    world = World(store=cast(MemoryJobStore, store), limits=ControllerLimits(jobs_ended_max=3))
    diverged(world, 8)
    world.reconcile(*range(1, 9))
    world.pass_time(700)
    assert [job.state for job in store.jobs()] == [JobState.FAILED] * 8
    world.restart()
    assert [job.state for job in world.controller.jobs(None, 10)] == [JobState.FAILED] * 3
    assert [outcome.job_id for outcome in dry_run(world, 1)] == [None]
    store.close()


def test_beyond_the_limit_of_active_jobs_a_request_is_refused() -> None:
    world = World(limits=ControllerLimits(jobs_active_max=2))
    diverged(world, 3)
    assert len(world.reconcile(1, 2, 3)) == 2
    [refused] = dry_run(world, 1)
    assert refused.ruling.eligibility is Eligibility.ALREADY_RUNNING
    [outcome] = world.controller.reconcile(
        [ContainerId(3)], dry_run=False, reason="", requested_by="", now_s=world.now_s
    )
    assert outcome.ruling.eligibility is Eligibility.QUEUE_FULL
    assert outcome.ruling.message == "Cannot reconcile container 3: 2 jobs are waiting."


def test_the_controller_logs_which_datanode_it_refuses() -> None:
    world = World(limits=ControllerLimits(containers_per_datanode_max=1))
    service = ControllerService(
        world.controller,
        Outbox(),
        Lock(),
        lambda: world.now_s,
        Metrics(CONTROLLER_METRICS),
        ANYBODY,
    )
    request = pb.HeartbeatRequest(
        datanode=pb.Datanode(datanode_id="dn-1", address="127.0.0.1:1"),
        incarnation="1",
        sequence=1,
        report=pb.ContainerReport(
            full=True,
            replicas=[pb.ReplicaReport(container_id=n, state="CLOSED") for n in (1, 2)],
        ),
    )
    with capture_logs() as lines, pytest.raises(UsageError, match="dn-1 reports 2 containers"):
        service.heartbeat(request, cast(grpc.ServicerContext, None))
    assert [(line["event"], line["datanode"]) for line in lines] == [("heartbeat_refused", "dn-1")]


def test_an_agent_is_told_that_a_later_one_of_its_datanode_has_reported() -> None:
    world = World()
    service = ControllerService(
        world.controller,
        Outbox(),
        Lock(),
        lambda: world.now_s,
        Metrics(CONTROLLER_METRICS),
        ANYBODY,
    )
    request = pb.HeartbeatRequest(
        datanode=pb.Datanode(datanode_id="dn-1", address="127.0.0.1:1"),
        incarnation="1700000000000",
        sequence=1,
    )
    service.heartbeat(request, cast(grpc.ServicerContext, None))
    # Repeated is not outdated.
    service.heartbeat(request, cast(grpc.ServicerContext, None))
    request.incarnation, request.sequence = "1699999999999", 9
    with pytest.raises(BusyError, match="an agent of datanode dn-1 that started later") as refused:
        service.heartbeat(request, cast(grpc.ServicerContext, None))
    assert "Only one agent may run" in refused.value.hint


def test_a_restarted_controller_knows_what_it_does_not_know() -> None:
    world = World()
    world.report(*replicas(7, 7, 7))
    assert said(world) == ("match", "", 3)
    world.pass_time(11, beating=DNS)
    world.restart()
    assert said(world) == (
        "unknown", "0 of 3 known: no report yet of datanode dn-1, dn-2, dn-3", 3,
    )  # fmt: skip
    assert world.controller.queries.gauges(world.now_s)["scm_containers_unknown"] == 1
    [refused] = dry_run(world, 1)
    assert refused.ruling.eligibility is Eligibility.NO_REPLICAS_FOUND
    world.report(*replicas(7, 7))
    assert said(world) == ("unknown", "2 of 3 known: no report yet of datanode dn-3", 3)
    world.report(*replicas(7, 7, 7))
    assert said(world) == ("match", "", 3)


def test_what_was_never_stored_is_expected_as_often_as_required() -> None:
    world = World()
    world.report(*replicas(7, 7))
    assert said(world) == ("unknown", "2 of 3 known", 3)


def test_holders_are_stored_in_parts_and_a_full_disk_stops_no_heartbeat() -> None:
    world = World(limits=ControllerLimits(holders_saved_max=2))
    diverged(world, 5)
    world.store.is_full = True
    with pytest.raises(DatabaseError):
        world.pass_time(20, step_s=20)
    assert world.beat("dn-1").applied
    world.store.is_full = False
    for stored in (2, 4, 5):
        world.pass_time(10, beating=DNS)
        assert len(world.store.holders()) == stored
    world.beat("dn-1", [replica("dn-1", 2)])
    for peer in ("dn-2", "dn-3"):
        world.beat(peer, [])
    world.pass_time(40, beating=DNS)
    assert world.store.holders() == {2: {"dn-1"}}


def test_all_agents_dead_is_unknown_in_metrics_too() -> None:
    world = World()
    world.report(*replicas(7, 7, 7))
    world.pass_time(700)
    assert said(world) == ("unknown", "0 of 3 known", 3)
    gauges = world.controller.queries.gauges(world.now_s)
    assert (gauges["scm_containers"], gauges["scm_containers_unknown"]) == (1, 1)
    world.pass_time(1, beating=DNS)
    assert said(world)[0] == "match"
    assert world.controller.queries.gauges(world.now_s)["scm_containers_unknown"] == 0


def test_what_differed_is_unknown_while_every_holder_is_silent() -> None:
    world = World()
    world.report(*replicas(7, 7, 8))
    assert said(world)[0] == "diverged"
    world.pass_time(120)
    assert said(world)[:2] == ("unknown", "all replicas are on silent datanodes")
    gauges = world.controller.queries.gauges(world.now_s)
    assert (gauges["scm_containers_diverged"], gauges["scm_containers_unknown"]) == (0, 1)
    # One that reports is enough to know that another one differs.
    world.pass_time(1, beating=DNS[:1])
    assert said(world)[0] == "diverged"


def test_a_container_is_out_of_service_while_no_known_replica_can_be_read() -> None:
    world = World()
    bad = ReplicaState.UNHEALTHY

    def unserved() -> list[ContainerId]:
        found = world.controller.queries.unserved(5)
        gauges = world.controller.queries.gauges(world.now_s)
        assert gauges["scm_containers_unserved"] == len(found)
        return found

    world.report(*replicas(7, 7, 7))
    assert unserved() == []
    # Equal roots are no service.
    world.report(*(replace(one, state=bad) for one in replicas(7, 7, 7)))
    assert unserved() == [ContainerId(1)]
    world.report(*replicas(7), *(replace(one, state=bad) for one in replicas(7, 7, 7)[1:]))
    assert unserved() == []


def test_the_age_of_the_oldest_root_is_a_metric() -> None:
    world = World(now_s=SCANNED_MS / 1000 + 50 * 3600)
    world.report(*replicas(7, 7, 7), replica("dn-1", 2, scanned_ms=None))
    gauges = world.controller.queries.gauges(world.now_s)
    assert 50 * 3600 <= gauges["scm_roots_oldest_age_seconds"] < 51 * 3600
    assert gauges["scm_containers_unscanned"] == 1
    assert gauges.keys() == {
        metric.name
        for metric in CONTROLLER_METRICS
        # Those that every process has are set by others.
        if metric.kind is Kind.GAUGE and metric not in PROCESS.table
    }


def test_the_backlog_is_a_metric_with_bytes_and_the_age_of_its_oldest() -> None:
    """Operator rule R12."""
    world = World()
    for root, peer in enumerate(DNS):
        held = [replace(replica(peer, n, root=root), used_bytes=100 + root) for n in (1, 2)]
        world.beat(peer, held)
    world.pass_time(100, beating=DNS)
    gauges = world.controller.queries.gauges(world.now_s)
    assert gauges["scm_containers_diverged"] == 2
    assert gauges["scm_diverged_bytes"] == 2 * 102
    assert gauges["scm_diverged_oldest_age_seconds"] == 100
    world.report(*(replica(peer, number, root=7) for peer in DNS for number in (1, 2)))
    gauges = world.controller.queries.gauges(world.now_s)
    assert gauges["scm_diverged_bytes"] == gauges["scm_diverged_oldest_age_seconds"] == 0


def said(world: World) -> tuple[str, str, int]:
    view = world.controller.queries.container(ContainerId(1))
    assert view is not None
    return view.compared.comparison.value, view.compared.note, view.expected_replicas


def dry_run(world: World, *numbers: int) -> list[ReconcileResponse]:
    return world.controller.reconcile(
        [ContainerId(number) for number in numbers],
        dry_run=True,
        reason="",
        requested_by="",
        now_s=world.now_s,
    )


def test_a_restarted_agent_gets_its_order_again_as_a_new_command() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    [before] = world.orders("dn-1")
    world.beat("dn-1", acknowledged=(before.command_id,))
    world.incarnations[PeerId("dn-1")] = 2
    world.beat("dn-1", [replica("dn-1")])
    [again] = world.orders("dn-1")
    assert again.job_id == job.job_id
    assert again.command_id != before.command_id


def test_what_a_dead_datanode_owed_is_given_up_and_the_rest_counts() -> None:
    world = World(Rules(orders_per_datanode=1))
    diverged(world, 2)
    first, second = world.reconcile(1, 2)
    world.pass_time(700, beating=("dn-1", "dn-2"))
    world.finish(first, "dn-1", "dn-2")
    assert world.controller.job(first.job_id).state is JobState.PARTIAL
    ended = world.finish(second, "dn-1", "dn-2")
    assert ended.state is JobState.PARTIAL
    assert ended.detail == "dn-3: datanode is dead"


def test_an_order_all_of_whose_peers_died_is_given_up() -> None:
    world = World(Rules(orders_per_datanode=1))
    diverged(world, 2)
    first, second = world.reconcile(1, 2)
    world.pass_time(700, beating=("dn-1",))
    world.finish(first, "dn-1")
    world.pass_time(10, beating=("dn-1",))
    assert world.controller.job(second.job_id).state is JobState.FAILED


def test_a_job_nobody_works_on_expires_by_its_deadline() -> None:
    world = World(Rules(command_deadline_s=300))
    diverged(world)
    [job] = world.reconcile(1)
    world.pass_time(310, beating=DNS)
    ended = world.controller.job(job.job_id)
    assert ended.state is JobState.FAILED
    assert "no progress" in ended.detail
    assert [len(world.cancels(peer)) for peer in DNS] == [1, 1, 1]
    assert [len(world.orders(peer)) for peer in DNS] == [0, 0, 0]


def test_a_cancelled_job_tells_its_agents() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.pass_time(1, beating=DNS)
    world.controller.cancel(job.job_id, world.now_s)
    assert [len(world.orders(peer)) for peer in DNS] == [0, 0, 0]
    assert [len(world.cancels(peer)) for peer in DNS] == [1, 1, 1]
    for peer in DNS:
        world.told(job, peer, OrderState.INTERRUPTED)
    assert world.controller.cancel(job.job_id, world.now_s).state is JobState.CANCELLED


def test_a_job_that_no_agent_can_have_is_cancelled_at_once() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    assert [len(world.orders(peer)) for peer in DNS] == [1, 1, 1]
    assert world.controller.cancel(job.job_id, world.now_s).state is JobState.CANCELLED
    # Nobody is told to stop what never reaches him.
    assert world.sink.orders == []
    [again] = world.reconcile(1)
    assert [order.job_id for order in world.orders("dn-1")] == [again.job_id]


def test_a_cancelled_job_waits_only_for_agents_that_may_have_its_order() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.beat("dn-2")
    cancelled = world.controller.cancel(job.job_id, world.now_s)
    states = [order.state for order in cancelled.orders]
    assert states == [OrderState.CANCELLED, OrderState.ISSUED, OrderState.CANCELLED]
    assert [len(world.cancels(peer)) for peer in DNS] == [0, 1, 0]
    world.told(job, "dn-2", OrderState.INTERRUPTED)
    assert world.controller.job(job.job_id).state is JobState.CANCELLED


@pytest.mark.parametrize("sent_again", [False, True])
def test_an_order_of_an_earlier_controller_may_have_been_delivered(*, sent_again: bool) -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.restart()
    diverged(world)
    if sent_again:
        world.controller.tick(world.now_s)
    assert [len(world.orders(peer)) for peer in DNS] == [int(sent_again)] * 3
    cancelled = world.controller.cancel(job.job_id, world.now_s)
    assert [order.state for order in cancelled.orders] == [OrderState.ISSUED] * 3
    assert [len(world.cancels(peer)) for peer in DNS] == [1, 1, 1]


def test_each_cancel_has_an_id_of_its_own() -> None:
    """Of two rounds of a job, of the request and of its end, and after a restart."""
    world, seen = World(), list[str]()
    diverged(world)
    [job] = world.reconcile(1)
    world.pass_time(1, beating=DNS)

    def note() -> None:
        for peer in DNS:
            for cancel in world.cancels(peer):
                seen.append(cancel.command_id)
                # Confirmed, which is no word on the order.
                world.beat(peer, acknowledged=(cancel.command_id,))
                assert world.cancels(peer) == []

    world.controller.cancel(job.job_id, world.now_s)
    note()
    orders = world.controller.job(job.job_id).orders
    assert [order.state for order in orders] == [OrderState.ISSUED] * 3
    world.leadership.value = 2
    world.restart()
    diverged(world)
    world.pass_time(1, beating=DNS)
    note()
    world.pass_time(100, beating=DNS)
    note()
    assert world.controller.job(job.job_id).state is JobState.CANCELLED
    assert len(seen) == 9
    assert len(set(seen)) == 9


def test_progress_of_a_job_that_ended_changes_nothing() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    ended = world.finish(job, *DNS)
    world.told(job, "dn-1", OrderState.FAILED)
    assert world.controller.job(job.job_id) is ended


def test_orders_cancels_scans_refusals_and_ends_are_audited() -> None:
    world = World()
    diverged(world, 2)
    container_id = ContainerId(1)

    def reconcile(who: str, *, dry_run: bool = False) -> ReconcileResponse:
        [outcome] = world.controller.reconcile(
            [container_id], dry_run=dry_run, reason="why", requested_by=who, now_s=world.now_s
        )
        return outcome

    reconcile("asks", dry_run=True)
    job_id = reconcile("orders").job_id
    assert job_id is not None
    reconcile("comes late")
    world.controller.cancel(job_id, world.now_s, requested_by="stops")
    world.controller.scan([container_id], requested_by="scans")
    assert [(kind, who) for kind, _, who in world.audit.lines] == [
        ("order", "orders"),
        ("refused", "comes late"),
        ("cancel", "stops"),
        ("end", "orders"),
        ("scan", "scans"),
    ]


def test_what_cannot_be_audited_is_not_done() -> None:
    world = World()
    diverged(world, 2)
    world.audit.fails = True
    with pytest.raises(DiskError):
        world.controller.reconcile(
            [ContainerId(1)], dry_run=False, reason="", requested_by="", now_s=world.now_s
        )
    with pytest.raises(DiskError):
        world.controller.scan([ContainerId(1)])
    assert (world.controller.jobs(None, 9), world.sink.orders) == ([], [])
    world.audit.fails = False
    [outcome] = world.controller.reconcile(
        [ContainerId(1)], dry_run=False, reason="", requested_by="", now_s=world.now_s
    )
    world.audit.fails = True
    assert outcome.job_id is not None
    with pytest.raises(DiskError):
        world.controller.cancel(outcome.job_id, world.now_s)
    assert world.controller.job(outcome.job_id).cancel_requested_at_s is None


def test_an_unknown_job_is_not_found() -> None:
    world = World()
    with pytest.raises(JobNotFoundError):
        world.controller.job(JobId("nope"))
    with pytest.raises(JobNotFoundError):
        world.controller.cancel(JobId("nope"), world.now_s)
    world.beat("dn-1", progress=(ProgressReport(JobId("nope"), OrderState.DONE, RepairReport()),))


def test_a_scan_is_ordered_of_every_live_replica() -> None:
    world = World()
    diverged(world, 2)
    unknown, orders = world.controller.scan([ContainerId(1), ContainerId(9), ContainerId(1)])
    assert (unknown, orders) == ([9], 3)
    assert all(isinstance(order, ScanOrder) for order in world.sink.orders)
    world.leadership.value = None
    with pytest.raises(BusyError):
        world.controller.scan([ContainerId(1)])


def test_containers_are_listed_in_pages_by_state_and_comparison() -> None:
    world = World()
    for peer in DNS:
        world.beat(
            peer, [replica(peer, n, root=1 if peer == "dn-1" and n % 2 else 0) for n in range(1, 8)]
        )
    views, more = world.controller.queries.containers(
        state=None, comparison=RootComparison.DIVERGED, after=1, limit=2
    )
    assert ([view.container_id for view in views], more) == ([3, 5], True)
    views, more = world.controller.queries.containers(
        state=None, comparison=RootComparison.DIVERGED, after=5, limit=2
    )
    assert ([view.container_id for view in views], more) == ([7], False)
    assert world.controller.queries.diverged() == [1, 3, 5, 7]


AUTOMATIC = Rules(automatic=True, automatic_jobs=2, visit_every_s=100)


def test_automatic_mode_is_off_unless_asked_for() -> None:
    world = World()
    diverged(world, 3)
    world.pass_time(60, beating=DNS)
    assert world.controller.jobs(None, 10) == []


def test_automatic_mode_works_the_diverged_list_down_some_at_a_time() -> None:
    """CR-014, CR-022"""
    world = World(AUTOMATIC)
    diverged(world, 5)
    seen = set[int]()
    for _ in range(10):
        world.pass_time(10, beating=DNS)
        active = [job for job in world.controller.jobs(None, 10) if not job.state.is_terminal]
        assert len(active) <= 2
        for job in active:
            for peer in DNS:
                world.beat(peer, [replica(peer, job.container_id, root=5)], full=False)
            world.finish(job, *DNS)
            seen.add(job.container_id)
    assert seen == {1, 2, 3, 4, 5}
    assert world.controller.queries.diverged() == []


def test_a_request_takes_over_the_job_that_automatic_mode_began() -> None:
    """Operator rule R8: and automatic mode may begin another in its place."""
    world = World(Rules(automatic=True, automatic_jobs=1))
    diverged(world, 2)
    world.pass_time(2, beating=DNS, step_s=1)
    [job] = world.controller.jobs(None, 10)
    assert (job.automatic, job.requested_by) == (True, "automatic")
    assert dry_run(world, job.container_id)[0].job_id == job.job_id
    assert world.controller.job(job.job_id).automatic
    [same] = world.reconcile(job.container_id)
    assert (same.job_id, same.automatic, same.requested_by) == (job.job_id, False, "test")
    world.restart()
    assert not world.controller.job(job.job_id).automatic
    diverged(world, 2)
    world.pass_time(2, beating=DNS, step_s=1)
    assert len(world.controller.jobs(None, 10)) == 2


def test_a_container_that_does_not_heal_is_tried_again_ever_later() -> None:
    world = World(AUTOMATIC)
    diverged(world)
    times = list[float]()
    for _ in range(200):
        world.pass_time(30, beating=DNS, step_s=30)
        for job in world.controller.jobs(None, 10):
            if not job.state.is_terminal:
                times.append(world.now_s)
                for peer in DNS:
                    world.told(job, peer, OrderState.FAILED)
    gaps = [b - a for a, b in pairwise(times)]
    assert len(gaps) >= 4
    assert all(b > 1.4 * a for a, b in pairwise(gaps))


def test_a_container_beyond_repair_is_left_alone_until_a_replica_changes() -> None:
    world = World(AUTOMATIC)
    diverged(world)
    world.pass_time(10, beating=DNS)
    [job] = world.controller.jobs(None, 10)
    world.finish(job, *DNS, verdict=Verdict.UNRECOVERABLE)
    world.pass_time(50_000, beating=DNS, step_s=60)
    assert len(world.controller.jobs(None, 10)) == 1
    world.beat("dn-1", [replica("dn-1", root=77)])
    world.pass_time(60, beating=DNS)
    assert len(world.controller.jobs(None, 10)) == 2


def test_a_verdict_without_a_silent_replica_holds_only_until_that_is_heard_of_again() -> None:
    world = World(AUTOMATIC)
    diverged(world)
    world.pass_time(100, beating=DNS[:2])
    for job in world.controller.jobs(None, 10):
        world.controller.cancel(job.job_id, world.now_s)
    world.pass_time(200, beating=DNS[:2])
    [job] = [job for job in world.controller.jobs(None, 10) if not job.state.is_terminal]
    assert [order.peer for order in job.orders] == list(DNS[:2])
    world.finish(job, *DNS[:2], verdict=Verdict.UNRECOVERABLE)
    world.pass_time(1_000, beating=DNS)
    again = world.controller.jobs(None, 1)[0]
    assert [order.peer for order in again.orders] == list(DNS)


def test_a_hopeless_verdict_does_not_hold_for_what_its_own_job_put_together() -> None:
    world = World(AUTOMATIC)
    diverged(world)
    world.pass_time(10, beating=DNS)
    [job] = world.controller.jobs(None, 10)
    # The third had its own in order before it failed, and the others had given up by
    # then.
    world.beat("dn-3", [replica("dn-3", root=5)])
    world.told(job, "dn-3", OrderState.FAILED)
    world.finish(job, "dn-1", "dn-2", verdict=Verdict.UNRECOVERABLE)
    world.pass_time(1_000, beating=DNS)
    assert len(world.controller.jobs(None, 10)) == 2


def test_a_hopeless_verdict_of_a_further_round_holds() -> None:
    world = World(AUTOMATIC)
    diverged(world)
    world.pass_time(10, beating=DNS)
    [job] = world.controller.jobs(None, 10)
    assert [order.skip_final_scan for order in world.orders("dn-1")] == [True]
    world.finish(job, "dn-1", "dn-2", verdict=Verdict.UNRECOVERABLE)
    world.beat("dn-3", [replica("dn-3", root=5)])
    world.finish(job, "dn-3")
    world.pass_time(10, beating=DNS)
    # What a scan found in the first round must not be forgotten in the second.
    assert [order.skip_final_scan for order in world.orders("dn-1")] == [False]
    world.finish(job, "dn-1", "dn-2", verdict=Verdict.UNRECOVERABLE)
    world.pass_time(50_000, beating=DNS, step_s=60)
    assert [job.state for job in world.controller.jobs(None, 10)] == [JobState.PARTIAL]


def test_one_job_orders_those_again_that_were_done_before_a_peer_was_put_together() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.finish(job, "dn-1", "dn-2", verdict=Verdict.UNRECOVERABLE)
    world.restart()
    diverged(world)
    world.beat("dn-3", [replica("dn-3", root=5)])
    assert world.finish(job, "dn-3").state is JobState.WAITING
    world.pass_time(1)
    orders = [order for peer in DNS for order in world.orders(peer)]
    assert [(order.peer, order.command_id) for order in orders] == [
        ("dn-1", "job1.2/1"),
        ("dn-2", "job1.2/1"),
    ]
    assert [command_to(order).reconcile.job_id for order in orders] == ["job1.2", "job1.2"]
    for order in orders:
        world.beat(order.peer, [replica(order.peer, root=5)], acknowledged=(order.command_id,))
    assert world.orders("dn-1") == []
    ended = world.finish(job, "dn-1", "dn-2")
    assert (ended.state, ended.verdict) == (JobState.DONE, Verdict.REPAIRABLE)


def test_an_end_counts_once_the_controller_knows_what_became_of_the_replica() -> None:
    """An agent tells of it again with the full report that a restarted controller asks
    for.
    """
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.finish(job, "dn-1", "dn-2", verdict=Verdict.UNRECOVERABLE)
    world.restart()
    end = (ProgressReport(job.job_id, OrderState.DONE, RepairReport(verdict=Verdict.REPAIRABLE)),)
    assert world.beat("dn-3", [], full=False, progress=end).full_report_wanted
    assert world.controller.job(job.job_id).state is JobState.RUNNING
    world.beat("dn-3", [replica("dn-3", root=5)], progress=end)
    assert [order.round for order in world.controller.job(job.job_id).orders] == [2, 2, 1]


def test_the_most_that_agents_can_say_in_all_rounds_is_still_shown() -> None:
    world, most = World(), (1 << 64) - 1
    diverged(world)
    [job] = world.reconcile(1)
    for round_ in range(1, ROUNDS_MAX + 1):
        for peer in DNS:
            said = pb.ReconcileProgress(
                job_id=task_id(job.job_id, round_), state="done", verdict="MATCH"
            )
            for name in (
                "bytes_fetched",
                "bytes_planned",
                "bytes_written",
                "windows_written",
                "chunks_repaired",
            ):
                setattr(said, name, most)
            said.peers.add(datanode_id=DNS[0], outcome="ok", bytes_fetched=most)
            datanode = pb.Datanode(datanode_id=peer, address="127.0.0.1:1")
            request = pb.HeartbeatRequest(datanode=datanode, incarnation="1", progress=[said])
            world.beat(peer, [replica(peer, root=10 * round_ + int(peer[-1]))])
            world.beat(peer, progress=heartbeat_from(request).progress)
        world.pass_time(1, beating=DNS)
    ended = world.controller.job(job.job_id)
    assert (ended.state, ended.orders[0].round) == (JobState.DONE, ROUNDS_MAX)
    assert job_to(ended, MATCH).bytes_done == ended.bytes_done


def test_a_further_round_is_cancelled_under_its_own_name() -> None:
    world = World()
    diverged(world)
    [job] = world.reconcile(1)
    world.finish(job, "dn-1", "dn-2")
    world.beat("dn-3", [replica("dn-3", root=5)])
    world.finish(job, "dn-3")
    world.pass_time(1, beating=DNS)
    world.controller.cancel(job.job_id, world.now_s)
    [cancel] = world.cancels("dn-1")
    assert command_to(cancel).cancel.job_id == "job1.2"
    for peer in DNS[:2]:
        world.told(job, peer, OrderState.INTERRUPTED)
    assert world.controller.job(job.job_id).state is JobState.CANCELLED


def test_orders_that_waited_while_another_led_bear_the_term_of_now() -> None:
    """CR-052"""
    world, outbox = World(), Outbox()
    world.controller = world.new_controller(outbox)
    service = ControllerService(
        world.controller, outbox, Lock(), lambda: world.now_s, Metrics(CONTROLLER_METRICS), ANYBODY
    )
    diverged(world)
    world.reconcile(1)
    world.leadership.value = None
    assert _commands(service, 100) == []
    world.leadership.value = 3
    assert _commands(service, 101) == [("job1/1", 3)]


def _commands(service: ControllerService, sequence: int) -> list[tuple[str, int]]:
    datanode = pb.Datanode(datanode_id="dn-1", address="127.0.0.1:9001")
    request = pb.HeartbeatRequest(datanode=datanode, incarnation="1", sequence=sequence)
    answer = service.heartbeat(request, cast(grpc.ServicerContext, None))
    return [(command.command_id, command.term) for command in answer.commands]


def test_matching_containers_are_visited_one_by_one_so_that_tombstones_spread() -> None:
    """CR-060."""
    world = World(AUTOMATIC)
    for peer in DNS:
        world.beat(peer, [replica(peer, number) for number in range(1, 4)])
    visited = list[int]()
    for _ in range(6):
        world.pass_time(100, beating=DNS)
        for job in world.controller.jobs(None, 10):
            if not job.state.is_terminal:
                visited.append(job.container_id)
                world.finish(job, *DNS, verdict=Verdict.MATCH)
    assert visited[:3] == [1, 2, 3]
    assert 5 <= len(visited) <= 6


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(1, 6)),
        st.tuples(st.just("end"), st.sampled_from(DNS)),
        st.tuples(st.just("fail"), st.sampled_from(DNS)),
        st.tuples(st.just("wait"), st.sampled_from(DNS)),
        st.tuples(st.just("reborn"), st.sampled_from(DNS)),
        st.tuples(st.just("restart"), st.just("")),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_limits_hold_whatever_happens(history: list[tuple[str, str | int]]) -> None:
    """Never more orders than slots, none to the dead, erasure-coded or read-only, one
    job a container.
    """
    world = World(Rules(orders_per_datanode=2, automatic=True, automatic_jobs=2, visit_every_s=30))

    def reports() -> None:
        for peer in DNS:
            found = [replica(peer, number, root=hash((peer, number)) % 2) for number in range(1, 6)]
            found.append(replica(peer, 6, index=int(peer[-1])))
            world.beat(
                peer, [*found, replica(peer, 7, root=int(peer[-1]), read_only=peer == "dn-3")]
            )

    reports()
    for action, argument in history:
        jobs = world.controller.jobs(None, 100)
        if action == "ask":
            world.reconcile(int(argument), 7)
        elif action in ("end", "fail"):
            state = OrderState.DONE if action == "end" else OrderState.FAILED
            for order in world.orders(str(argument))[:1]:
                world.told(
                    world.controller.job(order.job_id),
                    str(argument),
                    state,
                    verdict=Verdict.REPAIRABLE,
                )
        elif action == "wait":
            world.pass_time(60, beating=[peer for peer in DNS if peer != argument], step_s=20)
        elif action == "reborn":
            peer = PeerId(str(argument))
            world.incarnations[peer] = world.incarnations.get(peer, 1) + 1
            reports()
        elif action == "restart":
            world.restart()
            reports()
            world.pass_time(1)
        elif jobs:
            world.controller.cancel(jobs[int(argument) % len(jobs)].job_id, world.now_s)
        active = [job for job in world.controller.jobs(None, 1000) if not job.state.is_terminal]
        assert len({job.container_id for job in active}) == len(active)
        assert all(job.container_id != 6 for job in active)
        for peer in DNS:
            in_flight = [
                job for job in active if (o := job.order(PeerId(peer))) and o.state.is_in_flight
            ]
            assert len(in_flight) <= 2
            assert {order.job_id for order in world.orders(peer)} <= {
                job.job_id for job in in_flight
            }
        assert all(order.container_id != 7 for order in world.orders("dn-3"))
        stored = {job.job_id: job.state for job in world.store.jobs()}
        assert all(stored[job.job_id] == job.state for job in active), "a state that is not on disk"
