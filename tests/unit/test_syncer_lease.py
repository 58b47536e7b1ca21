"""The lease of a replication at its syncer, its reports, and its metrics."""

from dataclasses import replace

import pytest

from replicator.master.client import SyncerClient
from replicator.master.syncer_rules import Assignment
from replicator.replication import (
    Checkpoint,
    Condition,
    Policy,
    PolicyId,
    ReplicationReport,
    Stage,
)
from replicator.stores.port import FeedPosition
from replicator.syncer.gauges import Observation, SyncerGauges
from replicator.syncer.lease import LeaseLostError, LeaseTimer
from replicator.syncer.master_lease import MasterLease
from replicator.syncer.metrics import SYNCER_METRICS
from runtime.metrics import Metrics
from tests.support.master_clients import RecordingClient
from tests.support.replications import StepClock

P1 = PolicyId("p1")
ASSIGNMENT = Assignment(Policy(P1, "local:/a", "local:/b"), 7, Checkpoint())
LATER = Checkpoint(Stage.LIVE, position=FeedPosition("log", 5))
REPORT = ReplicationReport(Condition.ACTIVE, Checkpoint())


def lease_of(client: SyncerClient, clock: StepClock) -> MasterLease:
    timer = LeaseTimer(clock, margin_s=1.0)
    timer.renew(asked_s=clock.monotonic_s(), duration_s=6.0)
    lease = MasterLease(client, timer, ASSIGNMENT)
    lease.describe = lambda: REPORT
    return lease


def test_a_heartbeat_never_says_less_than_what_was_saved() -> None:
    client = RecordingClient()
    lease = lease_of(client, StepClock())
    first = lease.report()
    assert first is not None
    assert first.report.checkpoint == Checkpoint()
    lease.save(LATER)
    second = lease.report()
    assert second is not None
    # The replication describes itself as before; what counts is what the master has.
    assert second.report.checkpoint == LATER
    assert [one.report.checkpoint for one in client.saved] == [LATER]
    assert first.sequence < client.saved[0].sequence < second.sequence
    assert {first.epoch, second.epoch, lease.epoch} == {7}


def test_a_report_that_a_heartbeat_overtook_is_saved_with_a_newer_number() -> None:
    client = RecordingClient(refusals=2)
    lease_of(client, StepClock()).save(LATER)
    assert [one.sequence for one in client.saved] == [3]
    with pytest.raises(LeaseLostError):
        lease_of(RecordingClient(refusals=3), StepClock()).save(LATER)


def test_after_its_end_or_its_loss_nothing_is_saved() -> None:
    clock, client = StepClock(), RecordingClient()
    lease = lease_of(client, clock)
    clock.pass_s(4.9)
    lease.check()
    clock.pass_s(0.2)
    with pytest.raises(LeaseLostError):
        lease.save(LATER)
    lost = lease_of(client, clock)
    lost.revoke()
    with pytest.raises(LeaseLostError):
        lost.save(LATER)
    assert client.saved == []


def test_metrics_show_what_is_known_and_counters_never_go_back() -> None:
    """OZ-171."""
    metrics = Metrics(SYNCER_METRICS)
    gauges = SyncerGauges(metrics)
    report = replace(
        REPORT, queued=3, applied=10, duplicates=2, lag_p99_ms=250, oldest_unproven_ms=4_000
    )
    gauges.show({P1: Observation(report, 12)}, 10_000)
    of_one = {"replication": "p1"}
    assert metrics.value("syncer_queue_entries", **of_one) == 3
    assert metrics.value("syncer_lag_seconds", quantile="0.99", **of_one) == 0.25
    assert metrics.value("syncer_rpo_seconds", **of_one) == 6
    assert metrics.value("syncer_replications", condition="ACTIVE") == 1
    assert b'quantile="0.5"' not in metrics.page()
    # It begins anew, as after a takeover, and knows nothing of its age.
    again = replace(report, applied=4, oldest_unproven_ms=None)
    gauges.show({P1: Observation(again, 15)}, 20_000)
    assert metrics.value("syncer_entries_replicated_total", **of_one) == 14
    assert metrics.value("syncer_entries_taken_total", **of_one) == 15
    assert metrics.value("syncer_entries_duplicate_total", **of_one) == 2
    assert b"syncer_rpo_seconds{" not in metrics.page()
    gauges.show({}, 30_000)
    assert b"syncer_queue_entries{" not in metrics.page()
    assert metrics.value("syncer_replications", condition="ACTIVE") == 0
