"""Reconcile commands on a datanode: each ends once, whatever becomes of it, and its end
is told.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnagent.heartbeat import CancelCommand, JobReport, PeerAddress, ReconcileCommand
from dnagent.jobs import JOBS_MAX, Jobs, JobTable
from dnagent.metrics import AGENT_METRICS
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.outcome import OutcomeState, Verdict
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.volume import Hold, open_volume
from repair.audit import AuditLog
from repair.ports import Peer
from repair.replica_plan import PlanShelf
from repair.runner import Runner
from runtime.disk import Disk, Operation
from runtime.errors import BusyError, PeerUnavailableError
from runtime.metrics import Metrics
from tests.support.audit_files import audit_lines
from tests.support.disk import FailingDisk
from tests.support.peers import MemoryPeer, MemorySource
from tests.support.volumes import content, new_volume, owned, write_block
from tests.support.waiting import wait_until

OWN, THEIRS = PeerId("dn-1"), PeerId("dn-2")
ONE, TWO = ContainerId(1), ContainerId(2)
BLOCK = BlockId(9)


class Held(MemoryPeer):
    """A peer that answers when it is let."""

    def __init__(self, peer_id: PeerId, source: MemorySource) -> None:
        super().__init__(peer_id, source)
        self.asked, self.let, self.is_closed = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    def tree(self, container_id: ContainerId) -> ContainerTree:
        self.asked.set()
        # As a channel does: closing it ends its calls.
        wait_until(
            lambda: self.let.is_set() or self.is_closed.is_set(), "the peer to be let answer"
        )
        if self.is_closed.is_set():
            raise PeerUnavailableError("closed")
        return super().tree(container_id)

    def close(self) -> None:
        self.is_closed.set()


@dataclass
class Rig:
    """Our damaged copy and a peer's healthy one of containers 1 and 2."""

    root: Path
    store: ReplicaStore
    peer: Held
    metrics: Metrics = field(default_factory=lambda: Metrics(AGENT_METRICS))
    audited: list[tuple[int, str]] = field(default_factory=list)
    ends: list[JobReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.audit = AuditLog(self.root.parent / "audit.jsonl")

    def jobs(
        self,
        store: ReplicaStore | None = None,
        *,
        return_to_service: bool = False,
        connect: Callable[[PeerAddress], Peer] | None = None,
        limit_bytes_per_second: Callable[[], int] = lambda: 0,
    ) -> Jobs:
        def audit(
            *,
            container: int,
            block: int,
            offset: int,
            length: int,
            source: str,
            job: str,
            unread: int,
        ) -> None:
            self.audited.append((offset, source))

        def on_end(progress: JobReport) -> None:
            assert progress.is_final
            self.ends.append(progress)

        return Jobs(
            Runner(OWN, threads_max=2, audit=audit),
            store or self.store,
            connect=connect or (lambda _: self.peer),
            running_max=1,
            fetches_max=2,
            return_to_service=return_to_service,
            on_scan_bytes=lambda _: None,
            on_end=on_end,
            audit=self.audit,
            plan_of=PlanShelf(0.0).get,
            metrics=self.metrics,
            limit_bytes_per_second=limit_bytes_per_second,
        )

    def end(self, count: int = 1) -> JobReport:
        wait_until(lambda: len(self.ends) >= count, "the job to end")
        return self.ends[count - 1]


def hold(root: Path, state_folder: Path, mode: Hold = Hold.OWNER) -> ManagedVolume:
    volume = open_volume(root, hold=mode, state_folder=state_folder, disk=Disk())
    return ManagedVolume(volume, Disk(), undo_bytes=1 << 20)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    theirs = new_volume(tmp_path / "theirs")
    with owned(theirs, tmp_path / "writer") as volume:
        for container_id in (ONE, TWO):
            volume.writer.create_container(container_id)
            write_block(volume.writer, container_id, BLOCK, 5000, bcs_id=1)
            volume.writer.close(container_id)
    ours = shutil.copytree(theirs, tmp_path / "ours")
    held, peers = (
        hold(ours, tmp_path / "state"),
        hold(theirs, tmp_path / "their-state", Hold.READ_ONLY),
    )
    path = held.containers.get(ONE).block_path(BLOCK)
    data = bytearray(path.read_bytes())
    data[1500] ^= 1
    path.write_bytes(data)
    store = ReplicaStore([held], repair_enabled=True)
    store.open_replica(ONE, "scan", cancelled=Event(), on_bytes=lambda _: None).scan()
    assert held.replica(ONE).state is ReplicaState.UNHEALTHY
    peer = Held(THEIRS, cast(MemorySource, ReplicaStore([peers], repair_enabled=False)))
    yield Rig(ours, store, peer)
    held.close()
    peers.close()


def command(
    container_id: ContainerId = ONE, job_id: str = "job-1", state: ReplicaState | None = None
) -> ReconcileCommand:
    return ReconcileCommand(container_id, job_id, (PeerAddress(THEIRS, "127.0.0.1:1"),), state)


def test_a_job_is_audited_with_who_why_and_the_roots_before_and_after(rig: Rig) -> None:
    rig.peer.let.set()
    jobs = rig.jobs()
    jobs.submit(replace(command(), requested_by="alice@ops", reason="ticket 7"))
    rig.end()
    jobs.submit(command(ContainerId(77), "job-2"))
    rig.end(2)
    jobs.close()
    begun, ended, begun_2, refused = audit_lines(rig.root.parent / "audit.jsonl")
    assert (begun["kind"], begun["who"], begun["why"]) == ("reconcile", "alice@ops", "ticket 7")
    assert (ended["kind"], ended["state"], ended["verdict"]) == ("end", "done", "REPAIRABLE")
    assert ended["windows_written"] == 1
    assert begun["root"] != ended["root"]
    assert begun_2["root"] is None
    assert (refused["kind"], str(refused["why"])[:19]) == ("refused", "container_not_found")


def test_a_job_that_cannot_be_audited_does_not_begin(rig: Rig) -> None:
    rig.peer.let.set()
    path = rig.root.parent / "full.jsonl"
    path.touch()
    disk = FailingDisk(errno.ENOSPC, lambda operation, _: operation is Operation.WRITE)
    rig.audit = AuditLog(path, disk=disk)
    jobs = rig.jobs()
    jobs.submit(command())
    end = rig.end()
    jobs.close()
    assert (end.state, end.report.error_code) == (OutcomeState.REFUSED, "disk_failed")
    assert not rig.peer.asked.is_set()


@pytest.mark.parametrize(
    ("return_to_service", "told", "state"),
    [
        (False, ReplicaState.CLOSED, ReplicaState.UNHEALTHY),
        # The controller does not say what the replica may claim to be.
        (True, None, ReplicaState.UNHEALTHY),
        (True, ReplicaState.CLOSED, ReplicaState.CLOSED),
        (True, ReplicaState.QUASI_CLOSED, ReplicaState.QUASI_CLOSED),
    ],
)
def test_a_job_mends_the_replica_and_tells_how_it_ended(
    rig: Rig, return_to_service: bool, told: ReplicaState | None, state: ReplicaState
) -> None:
    """T2"""
    rig.peer.let.set()
    jobs = rig.jobs(return_to_service=return_to_service)
    jobs.submit(command(state=told))
    end = rig.end()
    jobs.close()
    assert (end.state, end.report.verdict, end.report.error_code) == (
        OutcomeState.DONE,
        Verdict.REPAIRABLE,
        "",
    )
    assert (
        end.report.windows_written,
        end.report.bytes_fetched,
        end.report.chunks_repaired,
    ) == (1, 1024, 1)
    assert [(peer.peer, peer.outcome) for peer in end.report.peers] == [(THEIRS, "ok")]
    assert rig.audited == [(1024, THEIRS)]
    assert rig.store.head(ONE).state is state
    assert rig.store.read(ONE, BLOCK, 0, 5000) == content(BLOCK, 5000)
    assert rig.metrics.value("dnagent_reconciliations_total", state="done") == 1
    assert rig.peer.is_closed.is_set()


def test_a_replica_that_may_not_be_written_is_refused(rig: Rig) -> None:
    jobs = rig.jobs(ReplicaStore(rig.store.volumes, repair_enabled=False))
    jobs.submit(command())
    end = rig.end()
    jobs.close()
    assert (end.state, end.report.error_code, end.container_id) == (
        OutcomeState.REFUSED,
        "read_only",
        ONE,
    )
    assert not rig.peer.asked.is_set()


def test_a_job_without_peers_fails_once_and_changes_nothing(rig: Rig) -> None:
    """T1, on purpose not as Ozone, which reports such a container as reconciled; our
    controller never orders it.
    """
    root = rig.store.volume_of(ONE).replica(ONE).data_checksum
    jobs = rig.jobs()
    jobs.submit(ReconcileCommand(ONE, "job-1", ()))
    end = rig.end()
    jobs.close()
    assert (end.state, end.report.error_code, end.report.windows_written) == (
        OutcomeState.FAILED,
        "no_peer",
        0,
    )
    assert len(rig.ends) == 1
    assert rig.store.volume_of(ONE).replica(ONE).data_checksum == root != 0
    assert rig.metrics.value("dnagent_reconciliations_total", state="failed") == 1
    assert rig.metrics.value("dnagent_reconciliations_queued") == 0


def test_jobs_are_the_same_if_their_container_is_whoever_the_peers_are(rig: Rig) -> None:
    """T2; on purpose the second one is not dropped in silence: its end is told."""
    jobs = rig.jobs()
    jobs.submit(command())
    assert rig.peer.asked.wait(20)
    jobs.submit(ReconcileCommand(ONE, "job-2", ()))
    jobs.submit(ReconcileCommand(TWO, "job-3", (PeerAddress(THEIRS, "127.0.0.1:1"),)))
    assert (rig.end().job_id, rig.end().report.error_code) == ("job-2", "busy")
    assert rig.metrics.value("dnagent_reconciliations_queued") == 2
    rig.peer.let.set()
    assert {rig.end(number).job_id for number in (2, 3)} == {"job-1", "job-3"}
    jobs.close()


def test_a_container_that_is_not_here_is_refused(rig: Rig) -> None:
    """T1: on purpose its end is told, where Ozone says nothing."""
    jobs = rig.jobs()
    jobs.submit(command(ContainerId(77)))
    assert (rig.end().state, rig.end().report.error_code) == (
        OutcomeState.REFUSED,
        "container_not_found",
    )
    jobs.close()


def test_a_second_job_for_a_container_is_refused_and_the_first_goes_on(rig: Rig) -> None:
    jobs = rig.jobs()
    jobs.submit(command())
    assert rig.peer.asked.wait(20)
    jobs.submit(command(job_id="job-2"))
    assert (rig.end().job_id, rig.end().state, rig.end().report.error_code) == (
        "job-2",
        OutcomeState.REFUSED,
        "busy",
    )
    assert [progress.job_id for progress in jobs.running()] == ["job-1"]
    assert [status.job_id for status in jobs.status()] == ["job-1"]
    rig.peer.let.set()
    assert (rig.end(2).job_id, rig.end(2).state) == ("job-1", OutcomeState.DONE)
    # Once it has ended the container may be reconciled again.
    jobs.submit(command(job_id="job-3"))
    assert rig.end(3).job_id == "job-3"
    jobs.close()


def test_a_job_that_is_sent_once_more_while_it_runs_is_neither_refused_nor_begun_twice(
    rig: Rig,
) -> None:
    """CR-052"""
    jobs = rig.jobs()
    jobs.submit(command())
    assert rig.peer.asked.wait(20)
    jobs.submit(command())
    rig.peer.let.set()
    assert (rig.end().job_id, rig.end().state) == ("job-1", OutcomeState.DONE)
    jobs.close()
    assert len(rig.ends) == 1


def test_a_job_that_waits_or_runs_can_be_cancelled(rig: Rig) -> None:
    jobs = rig.jobs()
    jobs.submit(command())
    assert rig.peer.asked.wait(20)
    jobs.submit(command(TWO, "job-2"))
    jobs.cancel(CancelCommand("job-2", TWO))
    assert (rig.end().job_id, rig.end().state) == ("job-2", OutcomeState.INTERRUPTED)
    jobs.cancel(CancelCommand("job-1", ONE))
    assert (rig.end(2).job_id, rig.end(2).state) == ("job-1", OutcomeState.INTERRUPTED)
    jobs.cancel(CancelCommand("job-of-somebody-else", ContainerId(9)))
    assert (rig.end(3).state, rig.end(3).is_absent) == (OutcomeState.INTERRUPTED, True)
    jobs.close()
    assert rig.audited == []


@pytest.mark.parametrize("is_stop", [False, True])
def test_a_cancel_while_a_job_connects_to_its_peers_is_not_lost(rig: Rig, *, is_stop: bool) -> None:
    connecting, go_on = threading.Event(), threading.Event()

    def connect(_: PeerAddress) -> Peer:
        connecting.set()
        assert go_on.wait(20)
        return rig.peer

    rig.peer.let.set()
    jobs = rig.jobs(connect=connect)
    jobs.submit(command())
    assert connecting.wait(20)
    stop = threading.Thread(target=jobs.close)
    if is_stop:
        stop.start()
        wait_until(lambda: jobs._runner._is_closed, "the runner to close")
    else:
        jobs.cancel(CancelCommand("job-1", ONE))
    go_on.set()
    assert (rig.end().state, rig.end().report.error_code) == (
        OutcomeState.INTERRUPTED,
        "interrupted",
    )
    (stop.join if is_stop else jobs.close)()
    assert not rig.peer.asked.is_set()
    assert rig.audited == []


def test_more_jobs_run_at_once_when_the_limit_rises_and_none_is_interrupted_when_it_falls(
    rig: Rig,
) -> None:
    """Operator rule R9: without a restart."""
    # Each job closes its own connection when it ends.
    peers = [Held(rig.peer.peer_id, rig.peer.source) for _ in range(2)]
    unconnected = iter(peers)
    jobs = rig.jobs(connect=lambda _: next(unconnected))
    jobs.submit(command())
    jobs.submit(command(TWO, "job-2"))
    assert peers[0].asked.wait(20)
    assert [status.job_id for status in jobs.status()] == ["job-1"]
    jobs.set_running_max(2)
    wait_until(lambda: len(jobs.status()) == 2, "both jobs to run")
    jobs.set_running_max(1)
    for peer in peers:
        peer.let.set()
    assert {rig.end(1).state, rig.end(2).state} == {OutcomeState.DONE}
    jobs.close()


def test_a_limit_of_a_job_is_reported_and_changes_while_it_runs(rig: Rig) -> None:
    """Operator rule R9: the lower one of its own and the agent's is in effect."""
    jobs = rig.jobs(limit_bytes_per_second=lambda: 500)
    jobs.submit(replace(command(), bytes_per_second=300))
    assert rig.peer.asked.wait(20)
    for limit, in_effect in ((300, 300), (700, 500), (0, 500), (40, 40)):
        jobs.throttle("job-1", limit)
        assert [one.report.limit_bytes_per_second for one in jobs.running()] == [in_effect]
    jobs.throttle("job-of-somebody-else", 1)
    jobs.cancel(CancelCommand("job-1", ONE))
    # At 40 bytes a second it would take minutes.
    assert rig.end().state is OutcomeState.INTERRUPTED
    jobs.close()


def test_a_job_that_waits_for_bandwidth_stops_at_once(rig: Rig) -> None:
    """Operator rules R3, R9: at a byte a second its one chunk would take an hour."""
    rig.peer.let.set()
    jobs = rig.jobs()
    jobs.submit(replace(command(), bytes_per_second=1))
    wait_until(lambda: bool(jobs.status()), "the job to run")
    wait_until(lambda: jobs.running()[0].report.bytes_planned > 0, "the job to want bytes")
    jobs.cancel(CancelCommand("job-1", ONE))
    assert rig.end().state is OutcomeState.INTERRUPTED
    assert _within(20, jobs.close)
    assert rig.audited == []


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-3, 0)), max_size=30))
def test_the_oldest_jobs_run_and_never_more_than_the_limit(steps: list[int]) -> None:
    """A step is a command for a container, or a new limit after which one ends."""
    table, limit, order = JobTable(), 2, list[ContainerId]()
    for step in steps:
        if step > 0:
            order += [ContainerId(step)] * table.admit(command(ContainerId(step), f"job-{step}"))
        else:
            limit = -step
            running = [one for one in order if table.is_running(command(one))]
            if running:
                table.remove(command(running[0]))
                order.remove(running[0])
        while table.start_next(limit):
            assert sum(table.is_running(command(one)) for one in order) <= limit
        states = [table.is_running(command(one)) for one in order]
        assert states == sorted(states, reverse=True)
        assert sum(states) >= min(limit, len(order))


def test_the_table_takes_as_many_jobs_as_the_limit_and_not_one_more() -> None:
    table = JobTable()
    for number in range(1, JOBS_MAX + 1):
        assert table.admit(command(ContainerId(number), f"job-{number}"))
    assert len(table) == JOBS_MAX
    one_more = command(ContainerId(JOBS_MAX + 1), "one-more")
    with pytest.raises(BusyError, match=f"{JOBS_MAX} jobs"):
        table.admit(one_more)
    assert table.find("one-more") is None
    # What is in the table already is not one more.
    assert not table.admit(command(ContainerId(7), "job-7"))
    table.remove(command(ContainerId(7), "job-7"))
    assert table.admit(one_more)
    assert len(table) == JOBS_MAX


def _within(seconds: float, act: Callable[[], None]) -> bool:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def test_a_stop_does_not_wait_for_a_peer_that_does_not_answer(rig: Rig) -> None:
    jobs = rig.jobs()
    jobs.submit(command())
    assert rig.peer.asked.wait(20)
    assert _within(10, jobs.close)
    assert rig.end().state is OutcomeState.INTERRUPTED


def test_a_job_that_breaks_a_belief_of_ours_still_ends_and_keeps_no_other_away(rig: Rig) -> None:
    jobs = rig.jobs()
    rig.peer.let.set()
    # A controller that takes us for our own peer.
    jobs.submit(ReconcileCommand(ONE, "job-1", (PeerAddress(OWN, "127.0.0.1:1"),), None))
    assert rig.end(1).state in (OutcomeState.FAILED, OutcomeState.REFUSED)
    jobs.submit(command(job_id="job-2"))
    # It ran: only its peer is gone.
    assert (rig.end(2).job_id, rig.end(2).report.error_code) == ("job-2", "no_peer")
    jobs.close()
