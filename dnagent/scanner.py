"""Read what replicas hold, again and again, and act on what is found.

The choice of the next container is pure. A `Scanner` is the shell of one volume: a
background thread that goes round all containers, and one for requests, which must not
wait behind a slow round. After a restart the round goes on where it was, by the time of
each container's last scan, which lies on disk; a scan cut short leaves no trace.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from dnagent.events import AGENT_EVENTS
from dnagent.ports import ScannedFault, ScanReport
from merkle.errors import ReconcileError
from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError, ContainerStateError, StaleTreeError, VolumeError
from ozone.scan import ScanResult
from runtime.errors import BusyError, OperationInterruptedError
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics
from runtime.retry import Backoff, call_with_retry

# States whose data can be checked: in the others chunks may still be written.
_SCANNED_STATES = frozenset(
    {ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED, ReplicaState.UNHEALTHY}
)
# States in which chunks may still be written: only folder, descriptor and records can
# be checked.
_CHECKED_STATES = frozenset({ReplicaState.OPEN, ReplicaState.CLOSING})
# As often as Ozone's scanner of metadata does.
CHECK_INTERVAL_MS = 3 * 3_600_000
# Ozone's own limit on a datanode's command queue.
REQUESTS_MAX = 5000
# How long the background thread sleeps when nothing is due; a wake-up ends it at once.
_IDLE_S = 30.0
# Scans on request whose tree was overtaken this often are given up; the next round
# looks again.
_STALE_TRIES_MAX = 3
# One slice of a wait for bandwidth, so that a stop is noticed.
_SLICE_S = 0.2


class Clock(Protocol):
    """Time, passed in."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def monotonic_s(self) -> float:
        """Seconds of a clock that is never set back."""


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class ScanCandidate:
    """A replica as far as the choice of the next scan needs to know it; times are ms
    since the epoch.
    """

    container_id: ContainerId
    state: ReplicaState
    # None where there is no tree yet, or only tombstones are known.
    data_checksum: int | None
    last_scan_ms: int | None


def is_due(candidate: ScanCandidate, *, now_ms: int, gap_ms: int) -> bool:
    """Whether it may be scanned now: its data are settled, and the last scan is at
    least the gap ago.
    """
    if candidate.state not in _SCANNED_STATES:
        return False
    # A scan in the future is one of a clock that was set back since: of unknown age, so
    # due.
    return candidate.last_scan_ms is None or not 0 <= now_ms - candidate.last_scan_ms < gap_ms


def next_to_scan(
    candidates: Iterable[ScanCandidate], *, now_ms: int, gap_ms: int
) -> ContainerId | None:
    """Never scanned first, then the oldest scan, then the lowest ID; None if nothing is
    due.
    """
    due = [c for c in candidates if is_due(c, now_ms=now_ms, gap_ms=gap_ms)]
    order = sorted(
        due, key=lambda c: (c.last_scan_ms is not None, c.last_scan_ms or 0, c.container_id)
    )
    return order[0].container_id if order else None


def _next_without_tree(candidates: Iterable[ScanCandidate]) -> ContainerId | None:
    """The lowest ID among the replicas that should have a tree and have none."""
    treeless = (
        c.container_id for c in candidates if c.state in _SCANNED_STATES and c.data_checksum is None
    )
    return min(treeless, default=None)


def _next_to_check(
    candidates: Iterable[ScanCandidate], checked_ms: Mapping[ContainerId, int], *, now_ms: int
) -> ContainerId | None:
    """The lowest ID among the open replicas that were not checked for an interval; the
    times are this process's.
    """
    due = (
        c.container_id
        for c in candidates
        if c.state in _CHECKED_STATES
        and not 0 <= now_ms - checked_ms.get(c.container_id, -1) < CHECK_INTERVAL_MS
    )
    return min(due, default=None)


class ScanDepth(Enum):
    """What is read: all data; the records, for a missing tree; or folder, descriptor
    and records, for faults.
    """

    DATA = "data"
    METADATA = "metadata"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class CompletedScan:
    """A reading of one replica that ended, and the generation of the stored tree before
    it began.
    """

    container_id: ContainerId
    source: ScanDepth
    result: ScanResult
    generation: bytes


class ScannedVolume(Protocol):
    """A volume's replicas as a scanner needs them.

    Methods that name a container raise ContainerNotFoundError once it is deleted, also
    while it is being read.
    """

    @property
    def name(self) -> str:
        """The volume's path, for logs and metrics."""

    def candidates(self) -> list[ScanCandidate]:
        """All replicas.

        Raises:
            VolumeError: the volume is gone or was given up.
        """

    def candidate(self, container_id: ContainerId) -> ScanCandidate:
        """One replica; ContainerNotFoundError if it is gone."""

    def examine(
        self,
        container_id: ContainerId,
        source: ScanDepth,
        on_bytes: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> CompletedScan:
        """Read one replica and change nothing.

        Raises:
            OperationInterruptedError: `cancelled` turned true.
        """

    def write_tree(self, examination: CompletedScan) -> None:
        """Lay the tree over the stored one.

        Raises:
            StaleTreeError: the stored tree changed since the examination began.
        """

    def settle(self, examination: CompletedScan, at_ms: int) -> bool:
        """Keep findings, and the time if it was all data; with findings make the
        replica UNHEALTHY, True if new.
        """


class RateLimiter:
    """Lets bytes pass at a rate: whoever took more than its share waits before it takes
    more. Thread-safe.
    """

    def __init__(self, bytes_per_second: int, clock: Clock, wait: Callable[[float], bool]) -> None:
        """`bytes_per_second` 0 sets no limit; `wait` sleeps, and returns True when it
        is time to give up.
        """
        self._rate = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._free_at_s = clock.monotonic_s()

    def take(self, length_bytes: int) -> None:
        """Account for bytes just read, and wait until the rate is kept again."""
        if not self._rate:
            return
        with self._lock:
            # Idle time is not saved up: a burst after a quiet hour is what the limit is
            # there to prevent.
            self._free_at_s = (
                max(self._free_at_s, self._clock.monotonic_s()) + length_bytes / self._rate
            )
            free_at_s = self._free_at_s
        while (left_s := free_at_s - self._clock.monotonic_s()) > 0:
            if self._wait(min(left_s, _SLICE_S)):
                return


@dataclass(slots=True)
class ScanRequest:
    """A wish to have a container scanned; `future` tells all who asked while it was
    queued.
    """

    container_id: ContainerId
    without_gap: bool
    future: "Future[ScanReport]"


class ScanQueue:
    """Containers to scan on request, first come first served, one entry a container.
    Thread-safe.

    An entry leaves when its scan begins, not when it ends: a request that comes during
    the scan may be about bytes that the scan has passed already, so it is queued again
    (row S21 speaks of entries still queued).
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[ContainerId, ScanRequest] = OrderedDict()
        self._closed = False

    def add(self, container_id: ContainerId, *, without_gap: bool) -> "Future[ScanReport]":
        """Queue a container, or join the entry that waits already.

        Raises:
            BusyError: too many wait, or the scanner stops.
        """
        with self._changed:
            if self._closed:
                raise BusyError("the scanner is stopping")
            request = self._waiting.get(container_id)
            if request is None:
                if len(self._waiting) >= REQUESTS_MAX:
                    raise BusyError(f"{REQUESTS_MAX} scans are waiting already", limit=REQUESTS_MAX)
                request = self._waiting[container_id] = ScanRequest(
                    container_id, without_gap, Future()
                )
                self._changed.notify()
            request.without_gap |= without_gap
            return request.future

    def take(self) -> ScanRequest | None:
        """Wait for an entry and remove it; None once closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popitem(last=False)[1]

    def close(self) -> None:
        """Let nothing more in or out; who waits for an answer gets an error."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        for request in dropped:
            request.future.set_exception(
                OperationInterruptedError("the scanner stopped before this scan began")
            )


@dataclass(frozen=True, slots=True)
class ScanPace:
    """How often and how fast; `bytes_per_second` is for each of the two threads, 0 sets
    no limit.

    Without `background` no data are read unless asked for; missing trees are built all
    the same.
    """

    background: bool = True
    interval_ms: int = 7 * 86_400_000
    min_gap_ms: int = 15 * 60_000
    bytes_per_second: int = 5 << 20


class Scanner:
    """Scans one volume in the background and on request, and does what the findings ask
    for.
    """

    def __init__(
        self,
        volume: ScannedVolume,
        pace: ScanPace,
        *,
        metrics: Metrics,
        on_change: Callable[[ContainerId], None],
        clock: Clock | None = None,
    ) -> None:
        """`on_change` hears of each replica whose root or state a scan has changed."""
        self._volume = volume
        self._pace = pace
        self._metrics = metrics
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._log = get_logger("scanner", AGENT_EVENTS).bind(volume=volume.name)
        self._requests = ScanQueue()
        self._stop = threading.Event()
        self._wake = threading.Event()
        # A failed scan leaves no time on disk: without this the same container would be
        # next for ever.
        self._not_before_ms: dict[ContainerId, int] = {}
        self._checked_ms: dict[ContainerId, int] = {}
        self._limiters = [
            RateLimiter(pace.bytes_per_second, self._clock, self._stop.wait) for _ in range(2)
        ]
        self._threads = (
            threading.Thread(target=self._serve_requests, name=f"scan-requests-{volume.name}"),
            threading.Thread(target=self._go_round, name=f"scan-background-{volume.name}"),
        )
        self.bytes_scanned = 0
        self.containers_scanned = 0
        self.last_error = ""

    def start(self) -> None:
        """Begin to answer requests and to go round."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Give up what is running and wait for the threads; a scan cut short marks
        nothing (row S18).
        """
        self._stop.set()
        self._wake.set()
        self._requests.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def request(self, container_id: ContainerId, *, without_gap: bool) -> "Future[ScanReport]":
        """Queue a scan; unless `without_gap`, one that ended a moment ago is not
        repeated but told again.

        Raises:
            BusyError: too many wait, or the scanner stops.
        """
        return self._requests.add(container_id, without_gap=without_gap)

    def wake(self) -> None:
        """Replicas came or changed: look for work now."""
        self._wake.set()

    def step(self) -> bool:
        """Do the most urgent piece of background work; False if there is none.

        Raises:
            VolumeError: the volume is gone; there will be no more work.
        """
        now_ms = self._clock.now_ms()
        candidates = self._volume.candidates()
        ready = [c for c in candidates if self._not_before_ms.get(c.container_id, now_ms) <= now_ms]
        # Trees first: until there is one, nobody can tell whether the replica differs.
        treeless = _next_without_tree(ready)
        if treeless is not None and self._do(treeless, ScanDepth.METADATA, now_ms):
            return True
        # A container whose records cannot be read gets its tree, and its findings, from
        # a data scan; one whose tree cannot be written is not read again each time that
        # is tried.
        due = (c for c in ready if is_due(c, now_ms=now_ms, gap_ms=self._background_gap_ms))
        container_id = treeless if treeless in {c.container_id for c in due} else None
        if container_id is None and self._pace.background:
            unchecked = _next_to_check(ready, self._checked_ms, now_ms=now_ms)
            if unchecked is not None:
                self._checked_ms[unchecked] = now_ms
                self._do(unchecked, ScanDepth.CHECK, now_ms)
                return True
            container_id = next_to_scan(ready, now_ms=now_ms, gap_ms=self._background_gap_ms)
        if container_id is None:
            self._note_full_pass(candidates)
            return False
        self._do(container_id, ScanDepth.DATA, now_ms)
        return True

    def _do(self, container_id: ContainerId, source: ScanDepth, now_ms: int) -> bool:
        try:
            self._scan(container_id, source, self._limiters[0])
        except VolumeError:
            raise
        except ReconcileError as error:
            self._not_before_ms[container_id] = now_ms + max(self._pace.min_gap_ms, 1)
            self._note_failure(container_id, error)
            return False
        return True

    @property
    def _background_gap_ms(self) -> int:
        return max(self._pace.interval_ms, self._pace.min_gap_ms)

    def _go_round(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()
            try:
                is_idle = not self.step()
            except VolumeError as error:
                # Row S17: what is bound to the volume ends with it; requests are still
                # answered, with the reason.
                self.last_error = error.message
                self._log.error("volume_failed", **error_fields(error))
                return
            if is_idle:
                self._wake.wait(_IDLE_S)

    def _serve_requests(self) -> None:
        while request := self._requests.take():
            try:
                report = self._answer(request)
            except ReconcileError as error:
                self._note_failure(request.container_id, error)
                request.future.set_exception(error)
            else:
                request.future.set_result(report)

    def _answer(self, request: ScanRequest) -> ScanReport:
        candidate = self._volume.candidate(request.container_id)
        if candidate.state not in _SCANNED_STATES:
            state = candidate.state.name
            raise ContainerStateError(
                f"container {request.container_id} is {state}: not to be scanned", state=state
            )
        gap_ms = 0 if request.without_gap else self._pace.min_gap_ms
        if not is_due(candidate, now_ms=self._clock.now_ms(), gap_ms=gap_ms):
            self._metrics.count("dnagent_scans_skipped_total", reason="gap")
            return _report(candidate, None)
        return call_with_retry(
            lambda: self._scan(request.container_id, ScanDepth.DATA, self._limiters[1]),
            # What makes a scan stale is over soon: a repair that stores its tree.
            sleep=self._sleep,
            backoff=Backoff(attempts_max=_STALE_TRIES_MAX),
        )

    def _sleep(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _scan(
        self, container_id: ContainerId, source: ScanDepth, limiter: RateLimiter
    ) -> ScanReport:
        """Scan, and do what Ozone's scanner does about the result, in its order."""
        before = self._volume.candidate(container_id)
        self._log.debug("scan_started", container_id=container_id, source=source.value)

        def on_bytes(length_bytes: int) -> None:
            self.bytes_scanned += length_bytes
            self._metrics.count("dnagent_scan_bytes_total", length_bytes, volume=self._volume.name)
            limiter.take(length_bytes)

        examination = self._volume.examine(container_id, source, on_bytes, self._stop.is_set)
        result = examination.result
        if self._stop.is_set():
            raise OperationInterruptedError(
                "the scanner stopped during this scan", container_id=container_id
            )
        # A container deleted meanwhile is no finding: this raises, and nothing is done
        # (row S12).
        self._volume.candidate(container_id)
        result.require_decided(container_id)
        is_kept = source is ScanDepth.CHECK or self._write_tree(examination)
        if source is ScanDepth.METADATA:
            self._metrics.count("dnagent_trees_built_total")
            self._log.info("tree_built", container_id=container_id)
        elif source is ScanDepth.DATA or result.findings:
            self._settle(examination)
        if is_kept:
            self._not_before_ms.pop(container_id, None)
        else:
            # What has no tree would be next at once, for ever.
            self._not_before_ms[container_id] = self._clock.now_ms() + max(self._pace.min_gap_ms, 1)
        after = self._volume.candidate(container_id)
        if (after.state, after.data_checksum) != (before.state, before.data_checksum):
            self._on_change(container_id)
        return _report(after, result)

    def _write_tree(self, examination: CompletedScan) -> bool:
        """Whether it was kept; row S16: what was found counts all the same, and a tree
        of records found nothing.
        """
        try:
            self._volume.write_tree(examination)
        except (StaleTreeError, ContainerNotFoundError):
            raise
        except ReconcileError as error:
            if examination.source is ScanDepth.METADATA:
                raise
            self.last_error = error.message
            fields = _without(error, "container_id")
            self._log.error("tree_write_failed", container_id=examination.container_id, **fields)
            return False
        return True

    def _settle(self, examination: CompletedScan) -> None:
        container_id, findings = examination.container_id, examination.result.findings
        for finding in findings:
            self._metrics.count("dnagent_findings_total", type=finding.type.name)
        if self._volume.settle(examination, self._clock.now_ms()):
            self._metrics.count("dnagent_containers_marked_unhealthy_total")
            first = findings[0].type.name
            self._log.error(
                "replica_marked_unhealthy",
                container_id=container_id,
                findings=len(findings),
                first=first,
            )
        self.containers_scanned += 1
        self._metrics.count("dnagent_containers_scanned_total", volume=self._volume.name)
        self._log.info(
            "scan_finished",
            container_id=container_id,
            findings=len(findings),
            bytes_read=examination.result.bytes_read,
        )

    def _note_failure(self, container_id: ContainerId, error: ReconcileError) -> None:
        self._metrics.count("dnagent_scans_skipped_total", reason=error.code)
        if isinstance(
            error,
            OperationInterruptedError | ContainerNotFoundError | ContainerStateError | BusyError,
        ):
            self._log.info(
                "scan_interrupted", container_id=container_id, **_without(error, "container_id")
            )
        else:
            self.last_error = error.message
            self._log.warning(
                "scan_failed", container_id=container_id, **_without(error, "container_id")
            )

    def _note_full_pass(self, candidates: list[ScanCandidate]) -> None:
        times = [c.last_scan_ms for c in candidates if c.state in _SCANNED_STATES]
        known = [time_ms for time_ms in times if time_ms is not None]
        if known and len(known) == len(times):
            name = "dnagent_scan_last_full_pass_timestamp_seconds"
            self._metrics.set(name, max(known) / 1000, volume=self._volume.name)


def _report(candidate: ScanCandidate, result: ScanResult | None) -> ScanReport:
    findings = result.findings if result else ()
    faults = tuple(
        ScannedFault(finding.type.name, finding.block_id, finding.offset) for finding in findings
    )
    bytes_read = result.bytes_read if result else 0
    return ScanReport(
        candidate.container_id, candidate.state, candidate.data_checksum or 0, bytes_read, faults
    )


def _without(error: ReconcileError, name: str) -> dict[str, object]:
    return {key: value for key, value in error_fields(error).items() if key != name}
