"""Scan the replicas of a volume periodically and on request, and act on the findings.

The choice of the next container is a pure function. A `Scanner` has two threads for its
volume: one scans all containers in turn, and one serves requests, which must not wait
for a slow scan in the background. The time of each container's last scan is on disk, so
the order survives a restart. An interrupted scan leaves no trace.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from dnagent.events import AGENT_EVENTS
from dnagent.metrics import PROCESS
from dnagent.ports import ScanFinding, ScanReport
from merkle.errors import ReconcileError
from merkle.replica import ReplicaState
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError, ContainerStateError, StaleTreeError, VolumeError
from ozone.scan import ScanResult
from runtime.errors import BusyError, OperationInterruptedError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics
from runtime.rate_limit import Clock, RateLimiter, RateMeter, SystemClock
from runtime.retry import Backoff, call_with_retry
from runtime.thread_health import ThreadHealth

# States whose data can be scanned: in the others chunks may still be written.
_SCANNED_STATES = frozenset(
    {ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED, ReplicaState.UNHEALTHY}
)
# States in which chunks may still be written: only folder, descriptor and records are
# checked.
_CHECKED_STATES = frozenset({ReplicaState.OPEN, ReplicaState.CLOSING})
# The interval of Ozone's metadata scanner.
CHECK_INTERVAL_MS = 3 * 3_600_000
# Ozone's own limit on a datanode's command queue.
REQUESTS_MAX = 5000
# How long the background thread sleeps when nothing is due, unless woken.
_IDLE_S = 30.0
# A requested scan fails when its tree was stale this often; a background scan follows.
_STALE_TRIES_MAX = 3


@dataclass(frozen=True, slots=True)
class ScanCandidate:
    """The facts about a replica that decide on its next scan.

    Times are in ms since the epoch.
    """

    container_id: ContainerId
    state: ReplicaState
    # None if there is no tree yet, or only tombstones are known.
    data_checksum: int | None
    last_scan_ms: int | None


def is_due(candidate: ScanCandidate, *, now_ms: int, gap_ms: int) -> bool:
    """Whether a replica may be scanned now: no chunks are being written, and its last
    scan is at least `gap_ms` ago.
    """
    if candidate.state not in _SCANNED_STATES:
        return False
    # A time in the future means that the clock was set back: the age is unknown, so the
    # scan is due.
    return candidate.last_scan_ms is None or not 0 <= now_ms - candidate.last_scan_ms < gap_ms


def next_to_scan(
    candidates: Iterable[ScanCandidate], *, now_ms: int, gap_ms: int
) -> ContainerId | None:
    """The due container that is scanned next; None if nothing is due.

    Replicas never scanned come first, then the oldest scan, then the lowest ID.
    """
    due = [c for c in candidates if is_due(c, now_ms=now_ms, gap_ms=gap_ms)]
    order = sorted(
        due, key=lambda c: (c.last_scan_ms is not None, c.last_scan_ms or 0, c.container_id)
    )
    return order[0].container_id if order else None


def _next_without_tree(candidates: Iterable[ScanCandidate]) -> ContainerId | None:
    """The lowest ID among the replicas that should have a tree but have none."""
    treeless = (
        c.container_id for c in candidates if c.state in _SCANNED_STATES and c.data_checksum is None
    )
    return min(treeless, default=None)


def _next_to_check(
    candidates: Iterable[ScanCandidate], checked_ms: Mapping[ContainerId, int], *, now_ms: int
) -> ContainerId | None:
    """The lowest ID among the open replicas whose last check in this process is at
    least an interval ago.
    """
    due = (
        c.container_id
        for c in candidates
        if c.state in _CHECKED_STATES
        and not 0 <= now_ms - checked_ms.get(c.container_id, -1) < CHECK_INTERVAL_MS
    )
    return min(due, default=None)


def scan_coverage(candidates: Iterable[ScanCandidate], now_ms: int) -> tuple[float | None, int]:
    """Seconds since the oldest data scan of a replica, and how many replicas were never
    scanned. None if one was never, or without replicas that are scanned.
    """
    times = [c.last_scan_ms for c in candidates if c.state in _SCANNED_STATES]
    known = [time_ms for time_ms in times if time_ms is not None]
    never = len(times) - len(known)
    return None if never or not known else max(0, now_ms - min(known)) / 1000, never


class ScanDepth(Enum):
    """What a scan reads.

    DATA reads all data. METADATA builds a missing tree from records. CHECK looks for
    faults in folder, descriptor and records.
    """

    DATA = "data"
    METADATA = "metadata"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class CompletedScan:
    """The result of a scan. `generation` is that of the stored tree before the scan, or
    once the scan's tree is stored, of that tree.
    """

    container_id: ContainerId
    source: ScanDepth
    result: ScanResult
    generation: bytes


class ScannedVolume(Protocol):
    """The replicas of a volume, as a scanner uses them.

    Every method with a container ID raises ContainerNotFoundError if the container is
    deleted, even during the call.
    """

    @property
    def name(self) -> str:
        """The volume's path, for logs and metrics."""

    def candidates(self) -> list[ScanCandidate]:
        """All replicas of the volume.

        Raises:
            VolumeError: the volume failed or is missing.
        """

    def candidate(self, container_id: ContainerId) -> ScanCandidate:
        """One replica.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
        """

    def examine(
        self,
        container_id: ContainerId,
        source: ScanDepth,
        on_bytes: Callable[[int], None],
        cancelled: Callable[[], bool],
    ) -> CompletedScan:
        """Read one replica, without changes on disk.

        `on_bytes` gets the number of bytes after each read, and may block.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
            OperationInterruptedError: `cancelled` returned True.
            ReconcileError: the replica cannot be read at all.
        """

    def write_tree(self, completed: CompletedScan) -> CompletedScan:
        """Merge the scan's tree into the stored one; returns the scan with the
        generation of the result.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
            StaleTreeError: the stored tree or a block changed since the scan began.
            ReconcileError: the tree cannot be stored.
        """

    def record_result(self, completed: CompletedScan, at_ms: int) -> bool:
        """Store the findings, and for a DATA scan its time, `at_ms` since the epoch.

        With findings the replica becomes UNHEALTHY. Returns True if it was not before.

        Raises:
            ContainerNotFoundError: the container is not on this volume.
            StaleTreeError: the stored tree or a block no longer has the scan's
                generation; nothing is stored.
            DiskError: the findings cannot be stored.
        """


@dataclass(slots=True)
class ScanRequest:
    """A requested scan. `future` has the report for all callers that joined it.

    With `ignore_gap` a recent scan does not replace it.
    """

    container_id: ContainerId
    ignore_gap: bool
    future: "Future[ScanReport]"


class ScanQueue:
    """Requested scans in order of arrival, one entry for each container. Thread-safe.

    An entry leaves the queue when its scan starts. A later request may be about bytes
    that the running scan has already read, so it is queued again. Row S21 covers only
    entries still in the queue.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: OrderedDict[ContainerId, ScanRequest] = OrderedDict()
        self._closed = False

    def add(self, container_id: ContainerId, *, ignore_gap: bool) -> "Future[ScanReport]":
        """Queue a container, or join the entry that is already queued.

        Raises:
            BusyError: the queue is full, or the scanner is stopping.
        """
        with self._changed:
            if self._closed:
                raise BusyError("the scanner is stopping")
            request = self._waiting.get(container_id)
            if request is None:
                if len(self._waiting) >= REQUESTS_MAX:
                    raise BusyError(f"{REQUESTS_MAX} scans are already waiting", limit=REQUESTS_MAX)
                request = self._waiting[container_id] = ScanRequest(
                    container_id, ignore_gap, Future()
                )
                self._changed.notify()
            request.ignore_gap |= ignore_gap
            return request.future

    def take(self) -> ScanRequest | None:
        """Wait for an entry and remove it; returns None once the queue is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            return None if self._closed else self._waiting.popitem(last=False)[1]

    def close(self) -> None:
        """Close the queue; the futures of queued entries get an error."""
        with self._changed:
            self._closed = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
        for request in dropped:
            request.future.set_exception(
                OperationInterruptedError("the scanner stopped before this scan started")
            )


@dataclass(frozen=True, slots=True)
class ScanPace:
    """How often and how fast a scanner scans.

    `bytes_per_second` limits the thread in the background, and
    `on_demand_bytes_per_second` that for requests; 0 means no limit. Without
    `background` data are only read on request, but missing trees are still built.
    """

    background: bool = True
    interval_ms: int = 7 * 86_400_000
    min_gap_ms: int = 15 * 60_000
    bytes_per_second: int = 5 << 20
    on_demand_bytes_per_second: int = 50 << 20


class Scanner:
    """Scans one volume in the background and on request, and acts on the findings."""

    def __init__(
        self,
        volume: ScannedVolume,
        pace: ScanPace,
        *,
        metrics: Metrics,
        on_change: Callable[[ContainerId], None],
        clock: Clock | None = None,
        thread_health: ThreadHealth | None = None,
    ) -> None:
        """`on_change` gets each container whose root or state a scan changed.
        `thread_health` sees whether the threads live.
        """
        self._volume = volume
        self._pace = pace
        self._metrics = metrics
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._thread_health = thread_health or ThreadHealth()
        self._log = get_logger("scanner", AGENT_EVENTS).bind(volume=volume.name)
        self._requests = ScanQueue()
        self._requests_guard = ThreadGuard("scan-requests", metrics, PROCESS.thread_failures)
        self._background_guard = ThreadGuard("scan-background", metrics, PROCESS.thread_failures)
        self._stop = threading.Event()
        self._wake = threading.Event()
        # A failed scan stores no time: without these times the same container would
        # always be next.
        self._retry_s: dict[ContainerId, float] = {}
        self._checked_ms: dict[ContainerId, int] = {}
        self._background_limiter, self._request_limiter = (
            RateLimiter(rate, self._clock, self._stop.wait)
            for rate in (pace.bytes_per_second, pace.on_demand_bytes_per_second)
        )
        self._threads = (
            threading.Thread(target=self._serve_requests, name=f"scan-requests-{volume.name}"),
            threading.Thread(target=self._run_background, name=f"scan-background-{volume.name}"),
        )
        self._meter = RateMeter(self._clock)
        self.bytes_scanned = 0
        self.containers_scanned = 0
        self.last_error = ""

    @property
    def bytes_per_second(self) -> float:
        """The bytes read in a second, over the last minute."""
        return self._meter.bytes_per_second()

    def limit(self, pace: ScanPace) -> None:
        """Change the limits of its two threads to those of `pace`."""
        self._background_limiter.change(pace.bytes_per_second)
        self._request_limiter.change(pace.on_demand_bytes_per_second)

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            self._thread_health.watch(thread)
            thread.start()

    def stop(self) -> None:
        """Interrupt running scans and wait for the threads. An interrupted scan changes
        nothing (row S18).
        """
        self._stop.set()
        self._wake.set()
        self._requests.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def request(self, container_id: ContainerId, *, ignore_gap: bool) -> "Future[ScanReport]":
        """Queue a scan. Without `ignore_gap` a recent scan is not repeated; the report
        then has the replica's current state and no findings.

        Raises:
            BusyError: the queue is full, or the scanner is stopping.
        """
        return self._requests.add(container_id, ignore_gap=ignore_gap)

    def wake(self) -> None:
        """Look for background work now, because replicas were added or changed."""
        self._wake.set()

    def step(self) -> bool:
        """Do the most urgent background work; returns False if there is none.

        Raises:
            VolumeError: the volume failed; there will be no more work.
        """
        now_ms, now_s = self._clock.now_ms(), self._clock.monotonic_s()
        candidates = self._volume.candidates()
        ready = [c for c in candidates if self._retry_s.get(c.container_id, now_s) <= now_s]
        # Trees first: without one a replica cannot be compared.
        treeless = _next_without_tree(ready)
        if treeless is not None and self._try_scan(treeless, ScanDepth.METADATA):
            return True
        # If the records cannot be read, a data scan builds the tree and reports the
        # findings. It must be due, so that a tree that cannot be written does not cause
        # a scan at every try.
        due = (c for c in ready if is_due(c, now_ms=now_ms, gap_ms=self._background_gap_ms))
        container_id = treeless if treeless in {c.container_id for c in due} else None
        if container_id is None and self._pace.background:
            unchecked = _next_to_check(ready, self._checked_ms, now_ms=now_ms)
            if unchecked is not None:
                self._checked_ms[unchecked] = now_ms
                self._try_scan(unchecked, ScanDepth.CHECK)
                return True
            container_id = next_to_scan(ready, now_ms=now_ms, gap_ms=self._background_gap_ms)
        if container_id is None:
            self._update_full_pass_time(candidates)
            return False
        self._try_scan(container_id, ScanDepth.DATA)
        return True

    def _try_scan(self, container_id: ContainerId, source: ScanDepth) -> bool:
        try:
            with self._background_guard.named_errors():
                self._scan(container_id, source, self._background_limiter)
        except VolumeError:
            raise
        except ReconcileError as error:
            self._try_later(container_id)
            self._log_failure(container_id, error)
            return False
        return True

    def _try_later(self, container_id: ContainerId) -> None:
        # On a clock that nobody sets: it would wait for the time of a step back too.
        gap_s = max(self._pace.min_gap_ms, 1) / 1000
        self._retry_s[container_id] = self._clock.monotonic_s() + gap_s

    @property
    def _background_gap_ms(self) -> int:
        return max(self._pace.interval_ms, self._pace.min_gap_ms)

    def _run_background(self) -> None:
        while not self._stop.is_set():
            try:
                with self._background_guard.named_errors():
                    is_idle = not self.step()
            except VolumeError as error:
                # The thread ends with its volume (row S17); requests get the error.
                self.last_error = error.message
                self._log.error("volume_failed", **error_fields(error))
                self._thread_health.dismiss(threading.current_thread())
                return
            except ReconcileError as error:
                self.last_error = error.message
                is_idle = True
            if is_idle:
                self._wake.wait(_IDLE_S)
                # Not before the step: a stop that came since the loop looked for one
                # would be cleared with it.
                self._wake.clear()

    def _serve_requests(self) -> None:
        while request := self._requests.take():
            try:
                with self._requests_guard.named_errors():
                    report = self._execute_request(request)
            except ReconcileError as error:
                self._log_failure(request.container_id, error)
                request.future.set_exception(error)
            else:
                request.future.set_result(report)

    def _execute_request(self, request: ScanRequest) -> ScanReport:
        candidate = self._volume.candidate(request.container_id)
        if candidate.state not in _SCANNED_STATES:
            state = candidate.state.name
            raise ContainerStateError(
                f"container {request.container_id} is {state} and cannot be scanned", state=state
            )
        gap_ms = 0 if request.ignore_gap else self._pace.min_gap_ms
        if not is_due(candidate, now_ms=self._clock.now_ms(), gap_ms=gap_ms):
            self._metrics.count("dnagent_scans_skipped_total", reason="gap")
            return _report(candidate, None)
        return call_with_retry(
            lambda: self._scan(request.container_id, ScanDepth.DATA, self._request_limiter),
            # The cause, a repair that stores its tree, is over soon.
            sleep=self._sleep,
            backoff=Backoff(attempts_max=_STALE_TRIES_MAX),
        )

    def _sleep(self, seconds: float) -> None:
        self._stop.wait(seconds)

    def _scan(
        self, container_id: ContainerId, source: ScanDepth, limiter: RateLimiter
    ) -> ScanReport:
        """Scan, and act on the result as Ozone's scanner does, in the same order."""
        before = self._volume.candidate(container_id)
        self._log.debug("scan_started", container_id=container_id, source=source.value)

        def on_bytes(length_bytes: int) -> None:
            self.bytes_scanned += length_bytes
            self._meter.count(length_bytes)
            self._metrics.count("dnagent_scan_bytes_total", length_bytes, volume=self._volume.name)
            limiter.take(length_bytes)

        completed = self._volume.examine(container_id, source, on_bytes, self._stop.is_set)
        result = completed.result
        if self._stop.is_set():
            raise OperationInterruptedError(
                "the scanner stopped during this scan", container_id=container_id
            )
        # Raises if the container was deleted meanwhile, which is not a finding (row
        # S12).
        self._volume.candidate(container_id)
        result.require_decided(container_id)
        is_stored = source is ScanDepth.CHECK
        if not is_stored:
            stored = self._write_tree(completed)
            is_stored, completed = stored is not None, stored or completed
        if source is ScanDepth.METADATA:
            self._metrics.count("dnagent_trees_built_total")
            self._log.info("tree_built", container_id=container_id)
        elif source is ScanDepth.DATA or result.findings:
            self._record_result(completed)
        if is_stored:
            self._retry_s.pop(container_id, None)
        else:
            # Otherwise a container without a tree would always be next.
            self._try_later(container_id)
        after = self._volume.candidate(container_id)
        if (after.state, after.data_checksum) != (before.state, before.data_checksum):
            self._on_change(container_id)
        return _report(after, result)

    def _write_tree(self, completed: CompletedScan) -> CompletedScan | None:
        """Store the tree; returns None if a write error prevents it.

        Findings count even then (row S16). A METADATA scan has none, so it fails.
        """
        try:
            return self._volume.write_tree(completed)
        except (StaleTreeError, ContainerNotFoundError):
            raise
        except ReconcileError as error:
            if completed.source is ScanDepth.METADATA:
                raise
            self.last_error = error.message
            fields = _without(error, "container_id")
            self._log.error("tree_write_failed", container_id=completed.container_id, **fields)
            return None

    def _record_result(self, completed: CompletedScan) -> None:
        container_id, findings = completed.container_id, completed.result.findings
        for finding in findings:
            self._metrics.count("dnagent_findings_total", type=finding.type.name)
        if self._volume.record_result(completed, self._clock.now_ms()):
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
            bytes_read=completed.result.bytes_read,
        )

    def _log_failure(self, container_id: ContainerId, error: ReconcileError) -> None:
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

    def _update_full_pass_time(self, candidates: list[ScanCandidate]) -> None:
        times = [c.last_scan_ms for c in candidates if c.state in _SCANNED_STATES]
        known = [time_ms for time_ms in times if time_ms is not None]
        if known and len(known) == len(times):
            name = "dnagent_scan_last_full_pass_timestamp_seconds"
            self._metrics.set(name, max(known) / 1000, volume=self._volume.name)


def _report(candidate: ScanCandidate, result: ScanResult | None) -> ScanReport:
    findings = result.findings if result else ()
    faults = tuple(
        ScanFinding(finding.type.name, finding.block_id, finding.offset) for finding in findings
    )
    bytes_read = result.bytes_read if result else 0
    return ScanReport(
        candidate.container_id, candidate.state, candidate.data_checksum or 0, bytes_read, faults
    )


def _without(error: ReconcileError, name: str) -> dict[str, object]:
    return {key: value for key, value in error_fields(error).items() if key != name}
