"""The scanner: what is scanned next, and what a finished scan leads to (rows S10-S18,
S20, S21).
"""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnagent.metrics import AGENT_METRICS
from dnagent.ports import ScanReport
from dnagent.scanner import (
    CHECK_INTERVAL_MS,
    REQUESTS_MAX,
    CompletedScan,
    ScanCandidate,
    ScanDepth,
    Scanner,
    ScanPace,
    ScanQueue,
    is_due,
    next_to_scan,
)
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.errors import ContainerNotFoundError, ContainerStateError, StaleTreeError, VolumeError
from ozone.scan import Finding, FindingType, ScanResult
from runtime.errors import (
    BusyError,
    DatabaseError,
    DiskError,
    InternalError,
    OperationInterruptedError,
)
from runtime.metrics import Metrics
from runtime.thread_health import ThreadHealth
from tests.support.waiting import wait_until

ONE, TWO, THREE = ContainerId(1), ContainerId(2), ContainerId(3)
GAP_MS = 900_000
NOW_MS = 1_000_000_000
CORRUPT = Finding(FindingType.CORRUPT_CHUNK, BlockId(20), 0)


def closed(
    container_id: ContainerId, last_scan_ms: int | None = None, root: int | None = 7
) -> ScanCandidate:
    return ScanCandidate(container_id, ReplicaState.CLOSED, root, last_scan_ms)


def test_never_scanned_comes_first_then_the_oldest_then_the_lowest_id() -> None:
    """S11"""
    old, older, never = closed(ONE, 20), closed(TWO, 10), closed(THREE)
    order = []
    waiting = [old, closed(ContainerId(4), 10), older, never]
    while (container_id := next_to_scan(waiting, now_ms=NOW_MS, gap_ms=GAP_MS)) is not None:
        order.append(container_id)
        waiting = [c for c in waiting if c.container_id != container_id]
    assert order == [3, 2, 4, 1]


@pytest.mark.parametrize(
    ("age_ms", "due"),
    [(0, False), (GAP_MS - 1, False), (GAP_MS, True), (GAP_MS + 1, True), (-5, True)],
)
def test_a_scan_within_the_gap_is_not_repeated(age_ms: int, due: bool) -> None:
    """S10, S11; a scan in the future is one of a clock that was set back."""
    candidate = closed(ONE, NOW_MS - age_ms)
    assert is_due(candidate, now_ms=NOW_MS, gap_ms=GAP_MS) is due
    assert is_due(candidate, now_ms=NOW_MS, gap_ms=0)


@pytest.mark.parametrize("state", ReplicaState)
def test_only_closed_states_are_scanned(state: ReplicaState) -> None:
    """S15"""
    candidate = replace(closed(ONE), state=state)
    assert is_due(candidate, now_ms=NOW_MS, gap_ms=0) is state.is_closed


@given(
    st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 2 * NOW_MS)), max_size=8),
    st.integers(0, 10**9),
)
def test_what_is_chosen_is_due_and_nothing_due_is_older(
    scans: list[tuple[int, int | None]], gap_ms: int
) -> None:
    candidates = [closed(ContainerId(container_id), last) for container_id, last in scans]
    due = [c for c in candidates if is_due(c, now_ms=NOW_MS, gap_ms=gap_ms)]
    chosen = next_to_scan(candidates, now_ms=NOW_MS, gap_ms=gap_ms)
    assert (chosen is None) == (due == [])
    if chosen is not None:
        last = min(
            (c.last_scan_ms if c.last_scan_ms is not None else -1)
            for c in due
            if c.container_id == chosen
        )
        assert all(last <= (c.last_scan_ms if c.last_scan_ms is not None else -1) for c in due)


class Clock:
    def __init__(self) -> None:
        self.time_ms = NOW_MS
        # By which somebody set the system clock.
        self.set_by_ms = 0

    def now_ms(self) -> int:
        return self.time_ms + self.set_by_ms

    def monotonic_s(self) -> float:
        return self.time_ms / 1000


@dataclass
class FakeVolume:
    """A volume in memory; `during` runs while a container is being read, `after` when
    the last of it was read.
    """

    held: dict[ContainerId, ScanCandidate]
    findings: tuple[Finding, ...] = ()
    transient: bool = False
    during: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    examine_error: Exception | None = None
    write_errors: list[Exception] = field(default_factory=list)
    failed: VolumeError | None = None
    examined: list[tuple[ContainerId, ScanDepth]] = field(default_factory=list)
    written: list[ContainerId] = field(default_factory=list)
    marked: list[ContainerId] = field(default_factory=list)
    name: str = "v1"
    read_bytes: int = 100

    def candidates(self) -> list[ScanCandidate]:
        if self.failed:
            raise self.failed
        return list(self.held.values())

    def candidate(self, container_id: ContainerId) -> ScanCandidate:
        if container_id not in self.held:
            raise ContainerNotFoundError("gone", container_id=container_id)
        return self.held[container_id]

    def examine(
        self,
        container_id: ContainerId,
        source: ScanDepth,
        on_bytes: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> CompletedScan:
        self.examined.append((container_id, source))
        self.during()
        on_bytes(self.read_bytes)
        if cancelled():
            raise OperationInterruptedError("cancelled")
        if self.examine_error:
            raise self.examine_error
        result = ScanResult(
            ContainerTree.of(container_id, ()),
            self.findings,
            bytes_read=self.read_bytes,
            transient=self.transient,
        )
        self.after()
        return CompletedScan(container_id, source, result, b"g")

    def write_tree(self, completed: CompletedScan) -> CompletedScan:
        if self.write_errors:
            raise self.write_errors.pop()
        self.written.append(completed.container_id)
        before = self.candidate(completed.container_id)
        self.held[completed.container_id] = replace(before, data_checksum=99)
        return completed

    def record_result(self, completed: CompletedScan, at_ms: int) -> bool:
        before = self.candidate(completed.container_id)
        worse = bool(completed.result.findings) and before.state is not ReplicaState.UNHEALTHY
        state = ReplicaState.UNHEALTHY if worse else before.state
        scanned_ms = at_ms if completed.source is ScanDepth.DATA else before.last_scan_ms
        self.held[before.container_id] = replace(before, state=state, last_scan_ms=scanned_ms)
        if worse:
            self.marked.append(before.container_id)
        return worse


@dataclass
class Rig:
    volume: FakeVolume
    scanner: Scanner
    metrics: Metrics
    clock: Clock
    changed: list[ContainerId]


def rig(*candidates: ScanCandidate, background: bool = True, **more: object) -> Rig:
    volume = FakeVolume({c.container_id: c for c in candidates})
    for name, value in more.items():
        setattr(volume, name, value)
    metrics, clock, changed = Metrics(AGENT_METRICS), Clock(), list[ContainerId]()
    pace = ScanPace(background, min_gap_ms=GAP_MS, bytes_per_second=0, on_demand_bytes_per_second=0)
    return Rig(
        volume,
        Scanner(volume, pace, metrics=metrics, on_change=changed.append, clock=clock),
        metrics,
        clock,
        changed,
    )


def answer(rig: Rig, container_id: ContainerId, *, ignore_gap: bool = True) -> ScanReport:
    """Ask for one scan, of a scanner that is started for it."""
    rig.scanner.start()
    try:
        return rig.scanner.request(container_id, ignore_gap=ignore_gap).result(timeout=20)
    finally:
        rig.scanner.stop()


def test_a_clean_scan_writes_the_tree_and_the_time() -> None:
    """S13, S14, S15"""
    r = rig(closed(ONE))
    assert r.scanner.step()
    assert r.volume.written == [ONE]
    assert r.volume.held[ONE] == ScanCandidate(ONE, ReplicaState.CLOSED, 99, NOW_MS)
    assert r.changed == [ONE]
    assert r.metrics.value("dnagent_containers_scanned_total", volume="v1") == 1
    assert r.metrics.value("dnagent_scan_bytes_total", volume="v1") == 100
    assert not r.scanner.step()


def test_findings_make_a_replica_unhealthy_once() -> None:
    """S12, S13, S14: time and tree are kept for unhealthy ones too; a rescan counts as
    scanned, not as one more.
    """
    r = rig(closed(ONE), findings=(CORRUPT, CORRUPT))
    assert r.scanner.step()
    r.clock.time_ms += 8 * 86_400_000
    assert r.scanner.step()
    assert r.volume.marked == [ONE]
    assert r.volume.held[ONE].last_scan_ms == r.clock.time_ms
    assert r.volume.written == [ONE, ONE]
    assert r.metrics.value("dnagent_containers_marked_unhealthy_total") == 1
    assert r.metrics.value("dnagent_containers_scanned_total", volume="v1") == 2
    assert r.metrics.value("dnagent_findings_total", type="CORRUPT_CHUNK") == 4


def test_a_replica_that_was_unhealthy_before_is_scanned_and_not_newly_unhealthy() -> None:
    """S12, S14"""
    r = rig(replace(closed(ONE), state=ReplicaState.UNHEALTHY), findings=(CORRUPT,))
    assert r.scanner.step()
    assert r.volume.marked == []
    assert r.metrics.value("dnagent_containers_marked_unhealthy_total") == 0
    assert r.metrics.value("dnagent_containers_scanned_total", volume="v1") == 1


def test_a_scan_that_changes_nothing_is_not_reported() -> None:
    r = rig(closed(ONE, root=99))
    assert r.scanner.step()
    assert r.changed == []


def test_a_container_deleted_during_its_scan_is_left_alone() -> None:
    """S12, S13, S15"""
    r = rig(closed(ONE), findings=(CORRUPT,))
    r.volume.during = lambda: r.volume.held.clear()
    assert r.scanner.step()
    assert (r.volume.written, r.volume.marked) == ([], [])
    assert r.metrics.value("dnagent_containers_scanned_total", volume="v1") == 0


def test_running_out_of_files_says_nothing_about_the_container() -> None:
    """S20"""
    r = rig(closed(ONE), findings=(CORRUPT,), transient=True)
    assert r.scanner.step()
    assert (r.volume.written, r.volume.marked) == ([], [])
    assert r.volume.held[ONE] == closed(ONE)
    # Nor is it tried again at once, for ever.
    assert not r.scanner.step()
    r.clock.time_ms += GAP_MS
    assert r.scanner.step()


@pytest.mark.parametrize("set_by_ms", [-(86_400_000), 86_400_000])
def test_a_clock_that_is_set_neither_delays_nor_hastens_another_try(set_by_ms: int) -> None:
    r = rig(closed(ONE), findings=(CORRUPT,), transient=True)
    assert r.scanner.step()
    r.clock.set_by_ms = set_by_ms
    assert not r.scanner.step()
    r.clock.time_ms += GAP_MS
    assert r.scanner.step()


def test_a_tree_that_cannot_be_written_does_not_hide_the_findings() -> None:
    """S16"""
    r = rig(closed(ONE), findings=(CORRUPT,), write_errors=[DiskError("no space")])
    assert r.scanner.step()
    assert (r.volume.written, r.volume.marked) == ([], [ONE])
    assert r.volume.held[ONE].last_scan_ms == NOW_MS


def test_a_container_whose_tree_cannot_be_written_is_not_read_again_and_again() -> None:
    r = rig(closed(ONE, root=None), write_errors=[DiskError("no space", container_id=ONE)] * 3)
    assert r.scanner.step()
    assert r.volume.examined == [(ONE, ScanDepth.METADATA), (ONE, ScanDepth.DATA)]
    assert r.metrics.value("dnagent_trees_built_total") == 0
    assert r.scanner.last_error == "no space"
    assert not r.scanner.step()
    r.clock.time_ms += GAP_MS
    assert not r.scanner.step()
    assert r.volume.examined[2:] == [(ONE, ScanDepth.METADATA)]
    r.clock.time_ms += GAP_MS
    assert r.scanner.step()
    assert r.volume.written == [ONE]


def test_a_scan_that_was_overtaken_marks_nothing_and_is_repeated_later() -> None:
    """inv-I4: what was read before a repair says nothing about what is there after
    it.
    """
    r = rig(closed(ONE), findings=(CORRUPT,), write_errors=[StaleTreeError("changed")])
    assert r.scanner.step()
    assert r.volume.held[ONE] == closed(ONE)
    assert not r.scanner.step()
    r.clock.time_ms += GAP_MS
    assert r.scanner.step()
    assert r.volume.marked == [ONE]


def test_a_scan_on_request_that_was_overtaken_is_repeated_at_once() -> None:
    r = rig(closed(ONE), write_errors=[StaleTreeError("changed")], background=False)
    assert answer(r, ONE).data_checksum == 99
    assert len(r.volume.examined) == 2


def test_a_replica_without_a_tree_gets_one_before_any_data_is_read() -> None:
    """CR-016, CR-058"""
    r = rig(closed(ONE), closed(TWO, root=None), closed(THREE, NOW_MS, root=None))
    r.scanner.step()
    r.scanner.step()
    assert r.volume.examined == [(TWO, ScanDepth.METADATA), (THREE, ScanDepth.METADATA)]
    # It has a tree now, and still no scan.
    assert r.volume.held[TWO] == closed(TWO, root=99)
    assert r.changed == [TWO, THREE]
    assert r.metrics.value("dnagent_trees_built_total") == 2


def test_without_background_scans_trees_are_still_built() -> None:
    r = rig(closed(ONE, root=None), background=False)
    assert r.scanner.step()
    assert not r.scanner.step()
    assert r.volume.examined == [(ONE, ScanDepth.METADATA)]


def test_records_that_cannot_be_read_lead_to_a_data_scan() -> None:
    r = rig(closed(ONE, root=None), examine_error=DatabaseError("broken"))
    r.scanner.step()
    assert r.volume.examined == [(ONE, ScanDepth.METADATA), (ONE, ScanDepth.DATA)]
    assert not r.scanner.step()


def test_an_open_container_gets_no_tree_and_no_scan() -> None:
    """S15"""
    r = rig(replace(closed(ONE, root=None), state=ReplicaState.OPEN), background=False)
    assert not r.scanner.step()
    with pytest.raises(ContainerStateError):
        answer(r, ONE)
    assert r.volume.examined == []


def test_an_open_container_is_checked_now_and_then_and_keeps_its_state() -> None:
    """S12, S13, S15"""
    r = rig(replace(closed(ONE, root=None), state=ReplicaState.OPEN))
    assert r.scanner.step()
    assert not r.scanner.step()
    assert r.volume.held[ONE] == replace(closed(ONE, root=None), state=ReplicaState.OPEN)
    assert (r.volume.written, r.changed) == ([], [])
    r.clock.time_ms += CHECK_INTERVAL_MS
    assert r.scanner.step()
    assert r.volume.examined == [(ONE, ScanDepth.CHECK)] * 2
    # Not counted among the containers whose data were read.
    assert r.metrics.value("dnagent_containers_scanned_total", volume="v1") == 0


def test_corrupt_metadata_of_an_open_container_makes_it_unhealthy_once() -> None:
    """S12, S14, S15"""
    r = rig(
        replace(closed(ONE, root=None), state=ReplicaState.OPEN),
        findings=(Finding(FindingType.CORRUPT_CONTAINER_FILE),),
    )
    assert r.scanner.step()
    assert (r.volume.marked, r.volume.written, r.changed) == ([ONE], [], [ONE])
    assert r.volume.held[ONE] == replace(closed(ONE, root=None), state=ReplicaState.UNHEALTHY)
    assert r.metrics.value("dnagent_containers_marked_unhealthy_total") == 1
    r.clock.time_ms += CHECK_INTERVAL_MS
    # From here on it is a replica like others: it gets a tree, then its data are read.
    assert r.scanner.step()
    assert r.scanner.step()
    assert r.volume.examined == [
        (ONE, ScanDepth.CHECK),
        (ONE, ScanDepth.METADATA),
        (ONE, ScanDepth.DATA),
    ]
    assert r.volume.marked == [ONE]


def test_a_request_within_the_gap_is_answered_with_what_is_known() -> None:
    """S10"""
    r = rig(closed(ONE, NOW_MS - 1), background=False)
    report = answer(r, ONE, ignore_gap=False)
    assert (report.state, report.data_checksum, report.bytes_read) == (ReplicaState.CLOSED, 7, 0)
    assert r.volume.examined == []


def test_a_request_without_gap_is_scanned_and_answered_with_its_findings() -> None:
    """S10"""
    r = rig(closed(ONE, NOW_MS - 1), findings=(CORRUPT,), background=False)
    report = answer(r, ONE)
    assert (report.state, report.data_checksum, report.bytes_read) == (
        ReplicaState.UNHEALTHY,
        99,
        100,
    )
    assert [(fault.type, fault.block_id, fault.offset) for fault in report.findings] == [
        ("CORRUPT_CHUNK", 20, 0)
    ]


def test_a_failed_volume_ends_its_background_thread_and_is_named() -> None:
    """S17"""
    volume = FakeVolume({ONE: closed(ONE)}, failed=VolumeError("the disk is gone"))
    health = ThreadHealth()
    scanner = Scanner(
        volume,
        ScanPace(),
        metrics=Metrics(AGENT_METRICS),
        on_change=lambda _: None,
        thread_health=health,
    )
    scanner.start()
    wait_until(lambda: scanner.last_error == "the disk is gone", "the reason to be named")
    wait_until(
        lambda: "scan-background-v1" not in {thread.name for thread in threading.enumerate()},
        "the thread to end",
    )
    # It costs its volume, and not the process.
    assert health.fault(0, 1) == ""
    # Bound to requests, not to the round: still there.
    assert scanner.request(ONE, ignore_gap=True).result(timeout=20).container_id == ONE
    scanner.stop()


def test_a_volume_that_fails_in_the_middle_of_a_scan_marks_nothing() -> None:
    """S17"""
    r = rig(closed(ONE), findings=(CORRUPT,), examine_error=VolumeError("the disk is gone"))
    with pytest.raises(VolumeError):
        r.scanner.step()
    assert r.volume.held[ONE] == closed(ONE)
    assert (r.volume.written, r.volume.marked) == ([], [])


def test_a_failed_volume_does_not_stop_the_scanner_of_another() -> None:
    """S17"""
    failed, good = rig(closed(ONE), failed=VolumeError("the disk is gone")), rig(closed(TWO))
    for one in (failed, good):
        one.scanner.start()
    wait_until(lambda: good.volume.written == [TWO], "the good volume to be scanned")
    wait_until(lambda: failed.scanner.last_error == "the disk is gone", "the reason to be named")
    for one in (failed, good):
        one.scanner.stop()
    assert failed.volume.examined == []


def test_a_stop_during_a_scan_marks_nothing() -> None:
    """S18"""
    reading, go_on = threading.Event(), threading.Event()
    r = rig(closed(ONE), findings=(CORRUPT,), background=False)

    def during() -> None:
        reading.set()
        assert go_on.wait(20)

    r.volume.during = during
    r.scanner.start()
    future = r.scanner.request(ONE, ignore_gap=True)
    assert reading.wait(20)
    stopping = threading.Thread(target=r.scanner.stop)
    stopping.start()

    def is_closed() -> bool:
        try:
            r.scanner.request(TWO, ignore_gap=True)
        except BusyError:
            return True
        return False

    # The queue closes before the threads are waited for.
    wait_until(is_closed, "the queue to close")
    go_on.set()
    stopping.join(20)
    with pytest.raises(OperationInterruptedError):
        future.result(timeout=1)
    assert r.volume.held[ONE] == closed(ONE)
    assert (r.volume.written, r.volume.marked) == ([], [])


@pytest.mark.parametrize(
    ("candidate", "depth", "findings"),
    [
        (closed(ONE), ScanDepth.DATA, (CORRUPT,)),
        (closed(ONE, root=None), ScanDepth.METADATA, ()),
        (
            replace(closed(ONE, root=None), state=ReplicaState.OPEN),
            ScanDepth.CHECK,
            (Finding(FindingType.CORRUPT_CONTAINER_FILE),),
        ),
    ],
    ids=["data", "metadata", "check"],
)
def test_a_stop_after_the_last_read_of_a_scan_writes_nothing(
    candidate: ScanCandidate, depth: ScanDepth, findings: tuple[Finding, ...]
) -> None:
    """S18: the scan has its result, and may not store it any more."""
    r = rig(candidate, findings=findings)
    r.volume.after = r.scanner.stop
    r.scanner.step()
    assert r.volume.examined[0] == (ONE, depth)
    assert r.volume.held[ONE] == candidate
    assert (r.volume.written, r.volume.marked, r.changed) == ([], [], [])


def test_a_container_asked_for_twice_while_queued_is_scanned_once() -> None:
    """S21"""
    queue = ScanQueue()
    first = queue.add(ONE, ignore_gap=False)
    assert queue.add(ONE, ignore_gap=True) is first
    request = queue.take()
    assert request is not None
    assert (request.container_id, request.ignore_gap) == (ONE, True)


def test_a_request_that_comes_while_the_scan_runs_is_queued_again() -> None:
    """S21, where we differ from Ozone on purpose: the running scan may have passed what
    the request is about.
    """
    queue = ScanQueue()
    first = queue.add(ONE, ignore_gap=True)
    queue.take()
    assert queue.add(ONE, ignore_gap=True) is not first
    assert queue.take() is not None


def test_the_queue_is_bounded_and_joining_an_entry_is_not_refused() -> None:
    queue = ScanQueue()
    for container_id in range(REQUESTS_MAX):
        queue.add(ContainerId(container_id), ignore_gap=True)
    queue.add(ContainerId(0), ignore_gap=True)
    with pytest.raises(BusyError, match="already waiting"):
        queue.add(ContainerId(REQUESTS_MAX), ignore_gap=True)


def test_closing_the_queue_answers_all_who_wait() -> None:
    queue = ScanQueue()
    waiting: Future[ScanReport] = queue.add(ONE, ignore_gap=True)
    queue.close()
    assert queue.take() is None
    with pytest.raises(OperationInterruptedError):
        waiting.result(timeout=1)
    with pytest.raises(BusyError, match="stopping"):
        queue.add(ONE, ignore_gap=True)


def test_an_error_that_nobody_foresaw_ends_one_scan_and_no_thread() -> None:
    at = rig(closed(ONE), closed(TWO))

    def fail_first() -> None:
        if at.volume.examined[-1][0] == ONE:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    at.volume.during = fail_first
    at.scanner.start()
    try:
        wait_until(lambda: at.scanner.containers_scanned > 0, "the other container's scan")
        with pytest.raises(InternalError):
            at.scanner.request(ONE, ignore_gap=True).result(60)
        at.scanner.request(TWO, ignore_gap=True).result(60)
    finally:
        at.scanner.stop()
    for thread in ("scan-background", "scan-requests"):
        assert at.metrics.value("dnagent_thread_failures_total", thread=thread) == 1


def test_a_volume_that_fails_in_an_unforeseen_way_is_tried_again() -> None:
    at, calls = rig(closed(ONE)), list[int]()
    listed = at.volume.candidates

    def fail_once() -> list[ScanCandidate]:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("not foreseen")
        return listed()

    at.volume.candidates = fail_once
    at.scanner.start()
    try:
        wait_until(lambda: bool(calls), "the first look")
        wait_until(lambda: at.scanner.wake() or at.scanner.containers_scanned > 0, "a scan")
    finally:
        at.scanner.stop()
