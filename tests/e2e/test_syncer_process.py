"""Real syncers and masters on local buckets, with writers beside them: whatever is
killed, stopped or cut, nothing is lost, and both buckets are equal in the end.
"""

import json
import random
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trustme

from replicator.master.client import MasterClient
from replicator.replication import Condition, DesiredState, ReplicationFault
from runtime.errors import AccessDeniedError
from tests.support.certificates import issue
from tests.support.processes import TreefoldProcess
from tests.support.syncers import (
    LEASE_S,
    ReplicatedPair,
    continued,
    fill,
    master_process,
    small_disk,
    stopped,
    syncer_process,
)
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

# Leases run out one after the other: minutes in which nothing is computed.
pytestmark = [pytest.mark.e2e, pytest.mark.peers, pytest.mark.timeout(240)]
# Work goes on so soon after its syncer was killed.
TAKEOVER_S = 10.0


class SyncedPair:
    """A master, two syncers by their IDs, and a pair that writers write to."""

    def __init__(
        self, folder: Path, stack: ExitStack, *, syncers: int = 2, lease_s: float = LEASE_S
    ) -> None:
        self.folder, self._stack = folder, stack
        self.master = stack.enter_context(master_process(folder / "master", lease_s=lease_s))
        self.address = self.master.address()
        self.client = MasterClient([self.address])
        stack.callback(self.client.close)
        self.pair = stack.enter_context(ReplicatedPair(folder, self.client))
        self.syncers = dict[str, TreefoldProcess]()
        for number in range(syncers):
            self.start(f"syncer-{number}")

    def start(self, name: str) -> str:
        """Start a syncer; its ID."""
        process = self._stack.enter_context(syncer_process(self.folder / name, [self.address]))
        process.address()
        path = self.folder / name / "state" / "syncer_uuid"
        found = path.read_text().strip()
        self.syncers[found] = process
        return found

    def enter(self, process: TreefoldProcess) -> TreefoldProcess:
        """A process that ends with this."""
        self._stack.enter_context(process)
        process.address()
        return process

    def holding(self) -> TreefoldProcess:
        """The syncer that has the replication."""
        wait_until(lambda: self.pair.holder() in self.syncers, "a syncer to have it")
        return self.syncers[self.pair.holder()]


@contextmanager
def synced(folder: Path, *, syncers: int = 2, lease_s: float = LEASE_S) -> Iterator[SyncedPair]:
    with ExitStack() as stack:
        yield SyncedPair(folder, stack, syncers=syncers, lease_s=lease_s)


def events(process: TreefoldProcess) -> list[str]:
    lines = [json.loads(line) for line in process.stderr.splitlines() if line.startswith("{")]
    return [line["event"] for line in lines]


def metrics_of(process: TreefoldProcess) -> str:
    with urllib.request.urlopen(f"http://{process.address()}/metrics") as answer:
        return str(answer.read().decode())


def test_a_bucket_is_replicated_while_it_is_written_to(tmp_path: Path) -> None:
    with synced(tmp_path, syncers=1) as world:
        pair = world.pair
        pair.write_on(2)
        pair.add()
        process = world.holding()
        pair.await_condition(Condition.ACTIVE)
        pair.await_change("something to arrive", within_s=20)
        time.sleep(3)
        pair.end_writers()
        pair.await_equal()
        pair.check_order()
        view = pair.view()
        assert view.state.report is not None
        assert view.state.report.applied > 0
        page = metrics_of(process)
        for name in ("queue_entries", "entries_taken_total", "entries_replicated_total"):
            assert f'syncer_{name}{{replication="p1"}}' in page
        assert 'syncer_lag_seconds{quantile="0.99",replication="p1"}' in page
        assert process.stop(signal.SIGTERM) == 0
        assert {"syncer_registered", "replication_begun", "process_stopping"} <= set(
            events(process)
        )
        wait_until(lambda: not pair.holder(), "it to be given back at once")


def test_a_killed_syncer_is_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    """OZ-040, OZ-048: by kill -9 at random moments, again and again."""
    chance = random.Random(1)
    with synced(tmp_path) as world:
        pair = world.pair
        pair.write_on(2)
        pair.add()
        pair.await_change("something to arrive", within_s=20)
        for number in range(4):
            time.sleep(chance.uniform(0.2, 2.0))
            killed = pair.holder()
            process = world.holding()
            process.stop(signal.SIGKILL)
            killed_s = time.monotonic()
            world.start(f"again-{number}")
            wait_until(lambda was=killed: pair.holder() not in ("", was), "another holder")
            pair.await_change("work to go on", within_s=TAKEOVER_S)
            assert time.monotonic() - killed_s < TAKEOVER_S
        pair.end_writers()
        pair.await_equal()
        pair.check_order()


def test_a_syncer_that_was_stopped_for_longer_than_its_lease_is_fenced(tmp_path: Path) -> None:
    """OZ-049, OZ-050: it writes nothing any more, and removes what it kept."""
    with synced(tmp_path) as world:
        pair = world.pair
        pair.write_on(2)
        pair.add()
        pair.await_change("something to arrive", within_s=20)
        for _ in range(2):
            before, process = pair.holder(), world.holding()
            stopped(process, pair.source, pair.target)
            wait_until(lambda was=before: pair.holder() not in ("", was), "another holder")
            pair.await_change("work to go on", within_s=TAKEOVER_S)
            continued(process)
            wait_until(lambda one=process: events(one).count("lease_lost") > 0, "the loss")
            pair.await_change("work to go on", within_s=TAKEOVER_S)
            # It registers again, as one without work.
            wait_until(
                lambda one=process: events(one).count("syncer_registered") > 1, "registration"
            )
            assert pair.holder() != before
        pair.end_writers()
        pair.await_equal()
        pair.check_order()


def test_a_master_is_restarted_and_the_same_syncer_goes_on(tmp_path: Path) -> None:
    """OZ-038: a lease outlives a short absence of the master."""
    with synced(tmp_path, syncers=1) as world:
        pair = world.pair
        pair.write_on(1)
        pair.add()
        pair.await_change("something to arrive", within_s=20)
        holder, epoch = pair.holder(), pair.view().state.epoch
        world.master.stop(signal.SIGKILL)
        with master_process(tmp_path / "master", listen=world.address) as again:
            assert again.address() == world.address
            pair.await_change("work to go on", within_s=TAKEOVER_S)
            wait_until(lambda: pair.view().condition is Condition.ACTIVE, "reports")
            assert pair.holder() == holder
            assert pair.view().state.epoch >= epoch
            pair.end_writers()
            pair.await_equal()
            pair.check_order()


def test_without_a_master_work_ends_with_the_lease(tmp_path: Path) -> None:
    with synced(tmp_path, syncers=1) as world:
        pair = world.pair
        pair.write_on(1)
        pair.add()
        pair.await_change("something to arrive", within_s=20)
        process = world.holding()
        world.master.stop(signal.SIGKILL)
        wait_until(lambda: "lease_lost" in events(process), "the end of the lease")
        time.sleep(0.5)
        at = pair.target.feed.position()
        time.sleep(1.0)
        assert pair.target.feed.position() == at
        with master_process(tmp_path / "master", listen=world.address):
            pair.await_change("work to go on", within_s=2 * TAKEOVER_S)
            pair.end_writers()
            pair.await_equal()


def test_a_syncer_that_is_cut_off_from_its_master_is_replaced(tmp_path: Path) -> None:
    """OZ-043, OZ-044: it stops by itself."""
    with synced(tmp_path, syncers=0) as world, WanLink(world.address) as link:
        pair = world.pair
        folder = tmp_path / "cut"
        process = world.enter(syncer_process(folder, [link.address]))
        pair.write_on(2)
        pair.add()
        wait_until(lambda: bool(pair.holder()), "a syncer to have it")
        pair.await_change("something to arrive", within_s=20)
        was = pair.holder()
        world.start("other")
        # A short cut costs nothing.
        link.cut()
        time.sleep(LEASE_S / 4)
        link.mend()
        time.sleep(LEASE_S)
        assert pair.holder() == was
        link.cut()
        wait_until(lambda: pair.holder() not in ("", was), "another holder")
        # A process that gets no processor for a second says it late.
        wait_until(lambda: "lease_lost" in events(process), "the syncer to stop by itself")
        pair.await_change("work to go on", within_s=TAKEOVER_S)
        link.mend()
        wait_until(lambda: events(process).count("syncer_registered") > 1, "registration")
        pair.end_writers()
        pair.await_equal()
        pair.check_order()


def test_a_target_that_is_full_stops_its_replication_and_no_other(tmp_path: Path) -> None:
    """OZ-132: ERROR with the reason, until it is resumed."""
    with (
        small_disk(tmp_path / "disk") as disk,
        synced(tmp_path, syncers=1) as world,
        ReplicatedPair(tmp_path, world.client, "p2", target=disk / "bucket") as full,
    ):
        other = world.pair
        for one in (full, other):
            one.write_on(1)
            one.add()
            one.await_change("something to arrive", within_s=20)
        ballast = fill(disk)
        view = full.await_condition(Condition.ERROR)
        assert view.state.report is not None
        assert view.state.report.fault is ReplicationFault.TARGET_FULL
        assert view.state.report.message
        other.await_change("the other to go on", within_s=5)
        ballast.unlink()
        full.order(DesiredState.ENABLED)
        full.await_change("work to go on", within_s=TAKEOVER_S)
        for one in (full, other):
            one.end_writers()
            one.await_equal()
            one.check_order()
        full.await_condition(Condition.ACTIVE)
        other.await_condition(Condition.ACTIVE)


def test_orders_take_effect_while_it_runs(tmp_path: Path) -> None:
    """OZ-125 to OZ-128: pause within 2 s of any lease, resume, cancel, cleanup."""
    with synced(tmp_path, syncers=1, lease_s=60.0) as world:
        pair = world.pair
        pair.write_on(1)
        pair.add()
        pair.await_change("something to arrive", within_s=20)
        pair.order(DesiredState.PAUSED)
        ordered_s = time.monotonic()
        pair.await_condition(Condition.PAUSED)
        # One more for a machine that does other things.
        assert time.monotonic() - ordered_s < 3
        at = pair.target.feed.position()
        time.sleep(0.7)
        assert pair.target.feed.position() == at
        pair.order(DesiredState.ENABLED)
        pair.await_change("work to go on", within_s=5)
        pair.order(DesiredState.CANCELLED)
        pair.await_condition(Condition.CANCELLED)
        folder = tmp_path / "syncer-0" / "state" / "replications"
        wait_until(lambda: not list(folder.iterdir()), "its folder to be removed")
        assert not pair.holder()


def test_a_second_syncer_of_a_folder_is_refused(tmp_path: Path) -> None:
    """OZ-035, OZ-041: and the UUID of a folder stays the same."""
    with ExitStack() as stack:
        address = stack.enter_context(master_process(tmp_path / "master")).address()
        first = stack.enter_context(syncer_process(tmp_path / "s", [address]))
        first.address()
        uuid = (tmp_path / "s" / "state" / "syncer_uuid").read_text()
        (tmp_path / "second").mkdir()
        second = stack.enter_context(
            TreefoldProcess(
                tmp_path / "second",
                *("syncer", "run", "--master", address, "--metrics", "127.0.0.1:0"),
                *("--state-folder", str(tmp_path / "s" / "state")),
            )
        )
        assert second.ended() == 8
        assert "in use by treefold syncer" in second.stderr
        assert first.stop(signal.SIGTERM) == 0
        again = stack.enter_context(syncer_process(tmp_path / "s", [address]))
        again.address()
        assert (tmp_path / "s" / "state" / "syncer_uuid").read_text() == uuid


def test_masters_and_syncers_know_each_other_by_certificates(tmp_path: Path) -> None:
    """Who is no syncer gets no work, and a syncer orders nothing."""
    authority = trustme.CA()
    tls = {
        identity: issue(authority, tmp_path / identity.replace("/", "-"), identity=identity)
        for identity in ("replication-master/m1", "syncer/s1", "operator/alice", "verifier/v1")
    }
    with ExitStack() as stack:
        master = master_process(tmp_path / "master", tls=tls["replication-master/m1"])
        address = stack.enter_context(master).address()
        client = MasterClient([address], tls=tls["operator/alice"])
        stack.callback(client.close)
        pair = stack.enter_context(ReplicatedPair(tmp_path, client))
        pair.write_on(1)
        pair.add()
        # The first of its masters does not answer.
        masters = ["127.0.0.1:1", address]
        syncer = syncer_process(tmp_path / "s", masters, tls=tls["syncer/s1"])
        stack.enter_context(syncer).address()
        pair.await_change("something to arrive", within_s=20)
        (seen,) = client.status().syncers
        assert seen.record.owner == "syncer/s1"
        impostor = MasterClient([address], tls=tls["syncer/s1"])
        stack.callback(impostor.close)
        with pytest.raises(AccessDeniedError):
            impostor.set_desired(pair.policy_id, DesiredState.PAUSED, "no operator")
        other = stack.enter_context(
            syncer_process(tmp_path / "other", [address], tls=tls["verifier/v1"])
        )
        assert other.ended() == 2
        assert "the role syncer is needed" in other.stderr
        pair.end_writers()
        pair.await_equal()
