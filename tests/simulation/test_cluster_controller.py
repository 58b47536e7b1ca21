"""Automatic mode over a cluster without agents: every diverged container is healed
within the limits or named, whatever SCM and our own process do meanwhile.
"""

import time
from collections import Counter
from itertools import pairwise

import pytest

from merkle.tree import ContainerId
from runtime.errors import ConfigError, DatabaseError, UsageError
from scm.cluster_controller import ClusterController
from scm.jobs import JobId, JobState, ThrottleRequested
from scm.ozone_rounds import OZONE_ROUNDS_MAX
from scm.policy import RootComparison
from scm.quiet_hours import QuietHours
from scm.rules import Rules
from tests.support.cluster_reports import FixedLeadership, MemoryAudit, World
from tests.support.cluster_reports import replica as agents_replica
from tests.support.driven_cluster import DrivenCluster
from tests.support.ozone_cluster_twin import SETTLE_S, OzoneClusterTwin

DAY_S = 86_400.0


def cluster(seed: int = 1, *, datanodes: int = 5, rules: Rules | None = None) -> DrivenCluster:
    twin = OzoneClusterTwin(seed, datanodes=datanodes)
    twin.now_s = 1_000_000.0
    return DrivenCluster(twin, rules or Rules(automatic=True, automatic_jobs=8))


def add(driven: DrivenCluster, count: int, *, hopeless_every: int = 0) -> None:
    twin = driven.twin
    for number in range(1, count + 1):
        hopeless = hopeless_every > 0 and number % hopeless_every == 0
        twin.add(number, rounds=twin.random.randint(1, 2), hopeless=hopeless)


def heal(driven: DrivenCluster, *, within_s: float = 20_000.0) -> None:
    """Poll until all containers are equal that can be."""
    end_s = driven.twin.now_s + within_s
    while not all(one.is_equal or one.hopeless for one in driven.twin.containers.values()):
        assert driven.twin.now_s < end_s
        driven.poll()
    driven.pass_time(2 * SETTLE_S)


def test_a_hundred_diverged_containers_are_healed_unattended_within_the_limit() -> None:
    driven = cluster(datanodes=10)
    add(driven, 100)
    heal(driven)
    assert driven.twin.concurrent_max <= driven.rules.orders_per_datanode
    assert Counter(job.state for job in driven.ended) == {JobState.DONE: 100}
    assert all(job.automatic and job.run is not None for job in driven.ended)
    counts = driven.controller.queries.gauges(driven.twin.now_s)
    assert counts["scm_containers"] == 100
    assert counts["scm_containers_diverged"] == 0
    lines = Counter(kind for kind, _, _ in driven.audit.lines)
    assert lines == {"order": 100, "end": 100}


def test_what_never_converges_is_said_once_and_rests_until_a_root_changes() -> None:
    driven = cluster()
    driven.twin.add(1, rounds=1, hopeless=True)
    driven.pass_time(DAY_S / 4)
    [job] = driven.ended
    assert job.state is JobState.PARTIAL
    assert "treefold rescue 1 --cluster" in job.detail
    assert driven.controller.gauges(driven.twin.now_s)["scm_containers_not_converging"] == 1
    view = driven.controller.queries.container(ContainerId(1))
    assert view is not None
    assert view.compared.comparison is RootComparison.DIVERGED
    assert "a rescue may" in view.compared.note
    driven.restart()
    driven.pass_time(DAY_S / 4)
    assert len(driven.ended) == 1
    # Somebody repaired one of its replicas: it is tried again.
    one = driven.twin.containers[ContainerId(1)]
    one.hopeless = False
    peer = min(one.roots)
    one.roots[peer] = one.reported[peer] = 4711
    driven.pass_time(DAY_S)
    assert [job.state for job in driven.ended] == [JobState.PARTIAL, JobState.DONE]
    assert driven.controller.gauges(driven.twin.now_s)["scm_containers_not_converging"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_no_restart_orders_twice_before_the_roots_had_time_to_change(seed: int) -> None:
    driven = cluster(seed)
    add(driven, 12, hopeless_every=5)
    end_s = driven.twin.now_s + 20_000
    while driven.twin.now_s < end_s:
        if driven.twin.random.random() < 0.02:
            driven.restart()
        driven.poll()
    requests: dict[ContainerId, list[float]] = {}
    for at_s, number in driven.listing.requested:
        requests.setdefault(number, []).append(at_s)
    for number, times in requests.items():
        assert len(times) <= OZONE_ROUNDS_MAX, number
        waits = [later - earlier for earlier, later in pairwise(times)]
        assert all(wait >= SETTLE_S for wait in waits)
    for number, one in driven.twin.containers.items():
        assert one.is_equal or one.hopeless, number


@pytest.mark.parametrize("seed", range(6))
def test_faults_of_scm_delay_and_nothing_false_is_said(seed: int) -> None:
    driven = cluster(seed, datanodes=4)
    add(driven, 10, hopeless_every=4)
    twin = driven.twin
    end_s = twin.now_s + 40_000
    while twin.now_s < end_s:
        twin.is_down = twin.random.random() < 0.1
        twin.drop_requests = twin.random.random() < 0.05
        if twin.random.random() < 0.003:
            twin.restart_scm()
        before = len(driven.ended)
        driven.poll()
        for job in driven.ended[before:]:
            if job.state is JobState.DONE:
                known = set(twin.containers[job.container_id].reported.values())
                assert len(known) == 1
                assert None not in known
    twin.is_down = twin.drop_requests = False
    heal(driven, within_s=2 * DAY_S)


def test_a_silent_scm_is_named_and_jobs_wait_for_it() -> None:
    driven = cluster(rules=Rules())
    driven.twin.add(1, rounds=2)
    driven.pass_time(10)
    job_id = driven.reconcile(1).job_id
    driven.pass_time(20)
    assert driven.controller.job(job_id).state is JobState.RUNNING
    driven.twin.is_down = True
    driven.pass_time(DAY_S)
    assert "SCM does not answer" in driven.controller.fault(driven.twin.now_s)
    job = driven.controller.job(job_id)
    assert job.state is JobState.WAITING
    assert "SCM does not report" in job.detail
    assert driven.controller.queries.datanodes(driven.twin.now_s)[0].liveness.value == "stale"
    driven.twin.is_down = False
    driven.pass_time(1_000)
    assert driven.controller.fault(driven.twin.now_s) == ""
    assert driven.controller.job(job_id).state is JobState.DONE


def test_in_safe_mode_nothing_is_concluded_or_ordered() -> None:
    driven = cluster()
    driven.twin.add(1, rounds=1)
    driven.listing.in_safe_mode = True
    driven.pass_time(1_000)
    assert not driven.listing.requested
    assert "safe mode" in driven.controller.fault(driven.twin.now_s)
    driven.listing.in_safe_mode = False
    driven.pass_time(1_000)
    assert [job.state for job in driven.ended] == [JobState.DONE]


def test_a_limit_per_hour_holds_over_restarts() -> None:
    driven = cluster()
    driven.per_hour = 4
    driven.restart()
    add(driven, 12)
    for _ in range(30):
        driven.pass_time(600)
        driven.restart()
    times = [at_s for at_s, _ in driven.listing.requested]
    assert len(times) >= 12
    for at_s in times:
        assert sum(at_s - 3600 < other <= at_s for other in times) <= 4


def test_quiet_hours_start_no_automatic_job_and_no_further_round() -> None:
    driven = cluster()
    local = time.localtime(driven.twin.now_s)
    minute = local.tm_hour * 60 + local.tm_min
    quiet = QuietHours(minute, (minute + 120) % 1440)
    driven.rules = Rules(automatic=True, quiet_hours=quiet)
    driven.restart()
    driven.twin.add(1, rounds=1)
    driven.twin.add(2, rounds=1)
    driven.pass_time(10)
    asked = driven.reconcile(2).job_id
    driven.pass_time(5_000)
    # What somebody asks for is done at once.
    assert [number for _, number in driven.listing.requested] == [2]
    assert driven.controller.job(asked).state is JobState.DONE
    driven.pass_time(5_000)
    assert driven.twin.containers[ContainerId(1)].is_equal


def test_a_cancelled_job_requests_no_further_round() -> None:
    driven = cluster(rules=Rules())
    driven.twin.add(1, rounds=2)
    driven.pass_time(10)
    job_id = driven.reconcile(1).job_id
    driven.poll()
    job = driven.controller.cancel(job_id, driven.twin.now_s, requested_by="ann")
    assert (job.state, job.detail) == (
        JobState.RUNNING,
        "stopping: Ozone ends round 1 first",
    )
    driven.pass_time(1_000)
    job = driven.controller.job(job_id)
    assert job.state is JobState.CANCELLED
    assert len(driven.listing.requested) == 1


def test_a_paused_job_frees_its_datanodes_after_the_round_and_goes_on_later() -> None:
    driven = cluster(datanodes=3, rules=Rules(orders_per_datanode=1))
    driven.twin.add(1, rounds=2)
    driven.twin.add(2, rounds=1)
    driven.pass_time(10)
    first = driven.reconcile(1).job_id
    driven.poll()
    paused = driven.controller.pause(first, by="ann", reason="backup", now_s=driven.twin.now_s)
    assert paused.detail == "pausing by ann: backup"
    second = driven.reconcile(2).job_id
    driven.pass_time(1_000)
    assert driven.controller.job(first).state is JobState.PAUSED
    assert driven.controller.job(second).state is JobState.DONE
    driven.controller.resume(first, by="ann", now_s=driven.twin.now_s)
    driven.pass_time(1_000)
    assert driven.controller.job(first).state is JobState.DONE


def test_a_refusal_ends_a_job_only_if_it_lasts() -> None:
    driven = cluster(rules=Rules())
    driven.twin.add(1, rounds=1)
    driven.pass_time(10)
    job_id = driven.reconcile(1).job_id
    driven.twin.lose_replica(1)
    driven.twin.lose_replica(1)
    driven.pass_time(SETTLE_S - 20)
    assert not driven.controller.job(job_id).state.is_terminal
    driven.pass_time(SETTLE_S)
    job = driven.controller.job(job_id)
    assert job.state is JobState.FAILED
    assert "no peer to compare with" in job.detail
    assert not driven.listing.requested


def test_a_round_that_cannot_be_saved_is_not_requested() -> None:
    driven = cluster(rules=Rules())
    driven.twin.add(1, rounds=1)
    driven.pass_time(10)
    job_id = driven.reconcile(1).job_id
    driven.store.is_full = True
    with pytest.raises(DatabaseError):
        driven.feed.poll()
    assert not driven.listing.requested
    assert driven.controller.job(job_id).state is JobState.QUEUED
    driven.store.is_full = False
    driven.pass_time(1_000)
    assert driven.controller.job(job_id).state is JobState.DONE


def test_a_container_that_scm_no_longer_lists_is_forgotten() -> None:
    driven = cluster(rules=Rules())
    add(driven, 3)
    driven.pass_time(10)
    del driven.twin.containers[ContainerId(2)]
    driven.pass_time(200)
    assert driven.controller.queries.container(ContainerId(2)) is None
    assert driven.controller.queries.gauges(0)["scm_containers"] == 2


def test_what_only_agents_do_is_refused() -> None:
    driven = cluster(rules=Rules())
    driven.twin.add(1, rounds=1)
    driven.pass_time(10)
    job_id = driven.reconcile(1).job_id
    with pytest.raises(UsageError, match="pause the job"):
        driven.controller.throttle(job_id, ThrottleRequested("ann", 1), driven.twin.now_s)
    with pytest.raises(UsageError, match="scan by a schedule"):
        driven.controller.scan([ContainerId(1)], requested_by="ann")


def test_the_state_of_a_controller_of_agents_is_not_taken_over() -> None:
    world = World()
    world.report(*(agents_replica(f"dn-{at}", root=at) for at in (1, 2, 3)))
    world.reconcile(1)
    with pytest.raises(ConfigError, match="controller of agents"):
        ClusterController(
            rules=Rules(), settle_s=90, requests_per_hour=0, store=world.store,
            leadership=FixedLeadership(), audit=MemoryAudit(), new_job_id=lambda: JobId("job"),
            now_s=world.now_s,
        )  # fmt: skip
