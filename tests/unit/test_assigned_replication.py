"""A replication at its syncer: what is reported while a store cannot be opened, and
what is left when the lease is lost.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ozone.manager_values import BucketLayout
from replicator.master.messages import options_from, options_to
from replicator.master.syncer_rules import Assignment
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationFault,
    ReplicationOptions,
    Stage,
    SyncerId,
)
from replicator.stores.errors import StoreError
from replicator.stores.local import LocalBucket
from replicator.stores.port import Store
from replicator.syncer.assigned import AssignedReplication
from replicator.syncer.lease import LeaseTimer
from replicator.syncer.master_lease import MasterLease
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.guard import ThreadGuard
from runtime.rate_limit import SystemClock
from tests.support.logged_events import events, logged
from tests.support.master_clients import RecordingClient
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_twin_service import TwinService
from tests.support.stores import put
from tests.support.verifiers import config_of, verifier_of
from tests.support.waiting import wait_until


class ForwardClock(SystemClock):
    """The clock of the machine, which a test puts forward."""

    ahead_s = 0.0

    def monotonic_s(self) -> float:
        """See Clock."""
        return super().monotonic_s() + self.ahead_s


@contextmanager
def assigned(
    folder: Path,
    *,
    desired: DesiredState = DesiredState.ENABLED,
    lease_s: float = 60.0,
    target: str = "",
    target_probe: str = "",
    clock: SystemClock | None = None,
) -> Iterator[AssignedReplication]:
    clock = clock or SystemClock()
    timer = LeaseTimer(clock, margin_s=0.0)
    timer.renew(asked_s=clock.monotonic_s(), duration_s=lease_s)
    policy = Policy(
        PolicyId("p1"),
        f"local:{folder / 'source'}",
        target or f"local:{folder / 'target'}",
        desired=desired,
    )
    assignment = Assignment(policy, 3, Checkpoint(), target_probe)
    (folder / "state").mkdir(exist_ok=True)
    found = AssignedReplication(
        assignment,
        MasterLease(RecordingClient(), timer, assignment),
        parent=folder / "state",
        syncer=SyncerId("s1"),
        clock=clock,
        copies=2,
        guard=ThreadGuard("replication"),
    )
    try:
        yield found
    finally:
        found.stop(is_lost=False)
        found.join()


def make_source(folder: Path) -> None:
    with LocalBucket(folder / "source", Disk(), create=True) as bucket:
        put(bucket.store(), "a")


def arrived(folder: Path) -> bool:
    """Whether the target has the object; it may just be being made."""
    with suppress(StoreError), LocalBucket(folder / "target", Disk()) as bucket:
        return bucket.view.facts("a") is not None
    return False


def test_a_source_that_is_missing_stops_it_until_it_is_resumed(tmp_path: Path) -> None:
    with assigned(tmp_path) as found:
        wait_until(lambda: found.report().condition is Condition.ERROR, "the error")
        assert found.report().fault is ReplicationFault.SOURCE_MISSING
        assert "does not exist" in found.report().message
        assert not (tmp_path / "target").exists()
        assert not found.held().has_ended
        make_source(tmp_path)
        # The operator resumes it: the policy has another revision.
        found.change(replace(found.held().policy, revision=2))
        wait_until(lambda: arrived(tmp_path), "the object")
        wait_until(lambda: found.report().condition is Condition.ACTIVE, "its recovery")
        assert found.report().fault is None


def test_a_paused_one_opens_no_store(tmp_path: Path) -> None:
    with assigned(tmp_path, desired=DesiredState.PAUSED) as found:
        assert found.report().condition is Condition.PAUSED
        make_source(tmp_path)
        assert not arrived(tmp_path)
        found.change(replace(found.held().policy, desired=DesiredState.ENABLED, revision=2))
        wait_until(lambda: arrived(tmp_path), "the object")


def test_a_target_is_made_only_by_a_new_replication(tmp_path: Path) -> None:
    """A target that was there before may be on a disk that is not mounted."""
    make_source(tmp_path)
    with assigned(tmp_path) as found:
        wait_until(lambda: arrived(tmp_path), "the object")
        wait_until(lambda: found.report().checkpoint != Checkpoint(), "a checkpoint")
        known = found.report().checkpoint
    (tmp_path / "target").rename(tmp_path / "gone")
    Disk().remove_folder(tmp_path / "state")
    clock = SystemClock()
    timer = LeaseTimer(clock, margin_s=0.0)
    timer.renew(asked_s=clock.monotonic_s(), duration_s=60.0)
    assignment = Assignment(found.held().policy, 4, known)
    (tmp_path / "state").mkdir()
    again = AssignedReplication(
        assignment,
        MasterLease(RecordingClient(), timer, assignment),
        parent=tmp_path / "state",
        syncer=SyncerId("s1"),
        clock=clock,
        copies=2,
        guard=ThreadGuard("replication"),
    )
    wait_until(lambda: again.report().condition is Condition.ERROR, "the error")
    assert again.report().fault is ReplicationFault.TARGET_MISSING
    assert not (tmp_path / "target").exists()
    again.stop(is_lost=False)
    again.join()


def test_what_is_lost_or_ends_with_its_lease_leaves_nothing_here(tmp_path: Path) -> None:
    """OZ-050."""
    make_source(tmp_path)
    with assigned(tmp_path) as found:
        wait_until(lambda: arrived(tmp_path), "the object")
        assert list((tmp_path / "state").iterdir())
        found.stop(is_lost=True)
        wait_until(lambda: found.held().has_ended, "its end")
        assert list((tmp_path / "state").iterdir()) == []
        assert not found.held().is_cancelled
    Disk().remove_folder(tmp_path / "state")
    with assigned(tmp_path, lease_s=1.0) as found:
        wait_until(lambda: found.held().has_ended, "its end")
        assert list((tmp_path / "state").iterdir()) == []
        assert found.report().fault is ReplicationFault.LEASE_LOST


def test_a_cancelled_one_says_so_in_the_end(tmp_path: Path) -> None:
    make_source(tmp_path)
    with assigned(tmp_path) as found:
        wait_until(lambda: arrived(tmp_path), "the object")
        found.change(replace(found.held().policy, desired=DesiredState.CANCELLED, revision=2))
        wait_until(lambda: found.held().has_ended, "its end")
        assert found.held().is_cancelled
        report = found.next_report()
        assert report is not None
        assert report.report.condition is Condition.CANCELLED
        assert list((tmp_path / "state").iterdir()) == []
    database = sqlite3.connect(tmp_path / "source" / "bucket.db")
    assert database.execute("SELECT count(*) FROM snapshots").fetchone() == (0,)
    database.close()


def test_another_verifier_is_followed_while_it_runs(tmp_path: Path) -> None:
    make_source(tmp_path)
    with (
        LocalBucket(tmp_path / "target", Disk(), create=True),
        verifier_of(config_of(tmp_path / "verifier", f"local:{tmp_path / 'target'}")) as client,
        assigned(tmp_path) as found,
    ):
        wait_until(lambda: arrived(tmp_path), "the object")
        policy = found.held().policy
        options = replace(policy.options, verifier=client.address)
        found.change(replace(policy, options=options, revision=2))
        with LocalBucket(tmp_path / "source", Disk()) as bucket:
            put(bucket.store(), "b")
        audit = tmp_path / "verifier" / "audit.jsonl"
        wait_until(lambda: '"kind": "put"' in audit.read_text(), "a write by the verifier")
        # Nobody listens there: all goes on, and the report says why.
        options = replace(policy.options, verifier="127.0.0.1:1")
        found.change(replace(policy, options=options, revision=3))
        with LocalBucket(tmp_path / "source", Disk()) as bucket:
            put(bucket.store(), "c")
        fault = ReplicationFault.VERIFIER_UNAVAILABLE
        wait_until(lambda: found.report().fault is fault, "the report")
        assert found.report().condition is Condition.ACTIVE


def test_a_verifier_crosses_in_messages_and_has_a_port() -> None:
    options = ReplicationOptions(verifier="far.example:9894")
    assert options_from(options_to(options)) == options
    with pytest.raises(UsageError, match="verifier"):
        options_from(options_to(replace(options, verifier="far.example")))


def is_at_work(found: AssignedReplication, target: Store) -> bool:
    """Whether the target has the object."""
    found.report()
    return target.reader.facts("a") is not None


def test_the_next_syncer_takes_the_word_of_the_last_one_and_asks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway is asked some forty questions: not while work waits for the answers."""
    make_source(tmp_path)
    with TwinService() as service, OzoneBuckets(service, service.s3_endpoint) as buckets:
        service.s3_endpoint.set_environment(monkeypatch)
        target = buckets.fresh(BucketLayout.OBJECT_STORE)
        with assigned(tmp_path, target=target.address) as found:
            wait_until(lambda: is_at_work(found, target), "the object")
            known = found.report().target_probe
        # A record bears the time of its questions: it is another one after each probe.
        assert "creates_conditionally" in known
        assert target.writer.delete(["a"]) == []
        clock = ForwardClock()
        with assigned(
            tmp_path, target=target.address, target_probe=known, clock=clock, lease_s=600.0
        ) as found:
            wait_until(lambda: is_at_work(found, target), "the object")
            assert found.report().target_probe == known
            # A minute later it asks.
            clock.ahead_s = 61.0
            wait_until(lambda: found.report().target_probe != known, "another record")
            assert found.report().condition is Condition.ACTIVE


def test_a_target_that_does_other_things_now_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_source(tmp_path)
    with TwinService() as service, OzoneBuckets(service, service.s3_endpoint) as buckets:
        service.s3_endpoint.set_environment(monkeypatch)
        target = buckets.fresh(BucketLayout.OBJECT_STORE)
        with assigned(tmp_path, target=target.address) as found:
            wait_until(lambda: is_at_work(found, target), "the object")
            known = found.report().target_probe
        claim = '"creates_conditionally":true'
        stale = known.replace(claim, claim.replace("true", "false"))
        assert stale != known
        clock = ForwardClock()
        with (
            logged(),
            assigned(
                tmp_path, target=target.address, target_probe=stale, clock=clock, lease_s=600.0
            ) as found,
        ):
            wait_until(lambda: found.report().checkpoint.stage is Stage.LIVE, "its work")
            said = list[str]()
            clock.ahead_s = 61.0

            def is_opened_again() -> bool:
                said.extend(str(one.get("error", "")) for one in events(capsys))
                return any("opened again" in one for one in said)

            wait_until(is_opened_again, "its end")
            wait_until(lambda: found.report().condition is Condition.ACTIVE, "work, begun again")
            assert claim in found.report().target_probe
