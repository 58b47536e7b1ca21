"""Executes the requests of reconciliations, on peers and on our own replicas.

`execute_local` and `execute_remote` turn a request into its event. Only they call
ports, so a simulation can use them too. A `Runner` drives one state machine per
container. Requests to peers run in a shared, bounded pool of threads. Requests to our
own replica run in the caller's thread, one at a time, because a second writer would not
make a container's disk faster. When `run` returns, also after a cancel, no thread of
ours changes the container any more, so it may be deleted.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeAlias, assert_never

from merkle.errors import ReconcileError
from merkle.outcome import RepairOutcome, RepairProgress
from merkle.record import ChunkRecord
from merkle.replica import PeerId
from merkle.tree import ContainerId
from merkle.windows import ProvenWindows, prove, runs_of
from ozone.ports import ByteRange
from repair.ports import LACKING_RESULTS, Audit, Peer, ReplicaAccess
from repair.reconciliation import Reconciliation
from repair.requests import (
    AdvanceBcsId,
    BcsIdAdvanced,
    BlockStored,
    Cancelled,
    CheckLocal,
    Event,
    FetchRecords,
    FetchTree,
    FetchWindows,
    LoadOwn,
    LoadRecords,
    LocalChecked,
    LocalRequest,
    OwnRecords,
    PeerRequest,
    PutBlock,
    ReconcileOptions,
    RecordsArrived,
    ReportOutcome,
    Request,
    RequestFailed,
    Rescan,
    ReturnToService,
    StateChanged,
    StoreTree,
    TreeArrived,
    WindowsArrived,
    WindowsWritten,
    WriteWindows,
)
from repair.round import RepairRules
from repair.wire import RANGES_MAX
from runtime.errors import BusyError, OperationInterruptedError, RemoteProtocolError
from runtime.retry import Backoff, call_with_retry

# An agent gives one client half of its threads (runtime.rpc): several agents of one
# host share that half.
_CALLS_PER_PEER_MAX = 8

Prove: TypeAlias = Callable[[ChunkRecord, int, bytearray], tuple[ProvenWindows, ...]]


def execute_local(request: LocalRequest, replica: ReplicaAccess) -> Event:
    """Execute a request on our own replica; an error becomes `RequestFailed`."""
    try:
        match request:
            case LoadOwn():
                return replica.own()
            case LoadRecords(block_ids):
                return OwnRecords(replica.records(block_ids))
            case CheckLocal(block_id, chunk):
                bad, file_bytes = replica.check(block_id, chunk)
                return LocalChecked(block_id, chunk.offset, bad, file_bytes)
            case WriteWindows(block_id, chunk, runs, source):
                unread = replica.write_windows(block_id, chunk, runs)
                return WindowsWritten(block_id, chunk.offset, source, runs, unread)
            case PutBlock(record):
                replica.put_block(record)
                return BlockStored(record.block_id)
            case StoreTree(tree, generation):
                return replica.store_tree(tree, generation)
            case AdvanceBcsId(bcs_id):
                replica.advance_bcs_id(bcs_id)
                return BcsIdAdvanced(bcs_id)
            case Rescan():
                return replica.scan()
            case ReturnToService(state, generation):
                replica.set_state(state, generation)
                return StateChanged(state)
            case _:
                assert_never(request)
    except ReconcileError as error:
        return _failed(request, error)


def execute_remote(
    request: PeerRequest,
    container_id: ContainerId,
    peer: Peer,
    *,
    reserve: Callable[[int], None] = lambda _: None,
    prove: Prove = prove,
) -> Event:
    """Execute a request on a peer; an error becomes `RequestFailed`.

    `reserve` is called with the bytes to fetch before each read, and may block to limit
    the rate.
    """
    try:
        match request:
            case FetchTree(peer_id):
                return TreeArrived(peer_id, peer.tree(container_id))
            case FetchRecords(peer_id, block_ids):
                return RecordsArrived(peer_id, peer.records(container_id, block_ids))
            case FetchWindows():
                return _fetch_windows(request, container_id, peer, reserve, prove)
            case _:
                assert_never(request)
    except ReconcileError as error:
        return _failed(request, error)


def _failed(request: Request, error: ReconcileError) -> RequestFailed:
    return RequestFailed(request, error.code, error.message, error.retryable, _tells_of_lack(error))


def _tells_of_lack(error: ReconcileError) -> bool:
    return error.facts.get("result") in LACKING_RESULTS


def _fetch_windows(
    request: FetchWindows,
    container_id: ContainerId,
    peer: Peer,
    reserve: Callable[[int], None],
    prove: Prove,
) -> WindowsArrived:
    """Fetch windows, adjacent ones in one range. Bytes that arrived before an error are
    proven and kept.
    """
    chunk = request.chunk
    starts: dict[int, int] = {}
    ranges: list[ByteRange] = []
    for run in runs_of(request.windows):
        low, _ = chunk.window(run.start)
        high, size = chunk.window(run.stop - 1)
        starts[chunk.offset + low] = run.start
        ranges.append(ByteRange(chunk.offset + low, high + size - low))
    received: dict[int, bytearray] = {wanted.offset: bytearray() for wanted in ranges}
    failure: ReconcileError | None = None
    bytes_fetched = 0
    try:
        for i in range(0, len(ranges), RANGES_MAX):
            batch = ranges[i : i + RANGES_MAX]
            # Before the call: a peer must not run out of its deadline while we wait for
            # our own bandwidth.
            reserve(sum(wanted.length_bytes for wanted in batch))
            for piece in peer.read(container_id, request.block_id, chunk, batch):
                bytes_fetched += len(piece.data)
                _append(piece.offset, piece.data, batch, received)
    except ReconcileError as error:
        failure = error
    proven = tuple(
        run for offset, data in received.items() for run in prove(chunk, starts[offset], data)
    )
    if failure is not None and not proven:
        raise failure
    return WindowsArrived(
        request.peer,
        request.block_id,
        chunk.offset,
        proven,
        bytes_fetched,
        failure.code if failure else "",
        failure.retryable if failure else False,
        failure is not None and _tells_of_lack(failure),
    )


def _append(
    offset: int,
    data: bytes | memoryview,
    ranges: Sequence[ByteRange],
    received: dict[int, bytearray],
) -> None:
    for wanted in ranges:
        so_far = received[wanted.offset]
        if offset == wanted.offset + len(so_far) and offset + len(data) <= wanted.end:
            so_far += data
            return
    raise RemoteProtocolError(
        f"a peer sent bytes at {offset} that do not continue a requested range", offset=offset
    )


@dataclass(frozen=True, slots=True)
class RepairJob:
    """One repair of one container, with the ID of its job."""

    job_id: str
    container_id: ContainerId
    options: ReconcileOptions = field(default_factory=ReconcileOptions)
    # Those of a plan; None: the usual ones.
    rules: RepairRules | None = None


@dataclass(slots=True, eq=False)
class _Run:
    """A running reconciliation; `events` also carries the cancel."""

    job: RepairJob
    # Called with the bytes of each read from a peer before it; may block.
    reserve: Callable[[int], None]
    events: "SimpleQueue[Event | Future[Event]]" = field(default_factory=SimpleQueue)
    cancelled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    progress: RepairProgress | None = None


class Runner:
    """Runs reconciliations, at most one per container at a time. Thread-safe: each
    caller of `run` repairs one container in its own thread.
    """

    def __init__(
        self,
        own: PeerId,
        *,
        threads_max: int,
        audit: Audit,
        backoff: Backoff | None = None,
        reserve: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`threads_max` bounds concurrent requests to peers, over all containers.
        `reserve` limits the rate, see `execute_remote`.
        """
        assert threads_max >= 1
        self._own = own
        self._audit = audit
        self._backoff = backoff or Backoff()
        self._reserve = reserve
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="reconcile")
        self._lock = threading.Lock()
        self._peer_slots: dict[PeerId, threading.Semaphore] = {}
        self._runs: dict[ContainerId, _Run] = {}
        self._is_closed = False

    def run(
        self,
        job: RepairJob,
        open_replica: Callable[[threading.Event], ReplicaAccess],
        peers: Mapping[PeerId, Peer],
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
        on_progress: Callable[[RepairProgress], None] = lambda _: None,
        reserve: Callable[[int], None] = lambda _: None,
    ) -> RepairOutcome:
        """Reconcile to the end and return the outcome, which also reports failures.

        `open_replica` gets an event that is set on cancel, so that a scan can stop.
        `is_cancelled` is asked once, when `interrupt` can already find the run: a
        caller that first makes it true and then interrupts always cancels. `reserve`
        limits the rate of this run, besides that of all; it must not block for long
        after a cancel.

        Raises:
            OperationInterruptedError: it was cancelled before it began, or the runner
                is closed; nothing was opened.
            BusyError: this container is already being reconciled.
            ReconcileError: our replica cannot be opened.
        """
        with self.held(job, reserve) as cancelled:
            run = self._runs[job.container_id]
            if is_cancelled() or cancelled.is_set():
                raise OperationInterruptedError("the job was cancelled before it began")
            return self._drive(run, open_replica(cancelled), peers, on_progress)

    @contextmanager
    def held(
        self, job: RepairJob, reserve: Callable[[int], None] = lambda _: None
    ) -> Iterator[threading.Event]:
        """Keep reconciliations of a container away meanwhile; the event is set when the
        work must end.

        Raises:
            OperationInterruptedError: the runner is closed.
            BusyError: the container is being reconciled.
        """
        run = _Run(job, reserve)
        self._register(run)
        try:
            yield run.cancelled
        finally:
            with self._lock:
                del self._runs[job.container_id]
            run.ended.set()

    def interrupt(self, container_id: ContainerId, reason: str, *, timeout_s: float) -> bool:
        """Cancel the container's reconciliation, if there is one, and wait up to
        `timeout_s` seconds; True if none is running.
        """
        with self._lock:
            run = self._runs.get(container_id)
        if run is None:
            return True
        run.cancelled.set()
        run.events.put(Cancelled(reason))
        return run.ended.wait(timeout_s)

    def running(self) -> list[tuple[RepairJob, RepairProgress | None]]:
        """The running jobs, each with its progress, None before the first event."""
        with self._lock:
            return [(run.job, run.progress) for run in self._runs.values()]

    def close(self) -> None:
        """Cancel all jobs and wait for the threads; a call to a peer that hangs ends at
        its deadline.
        """
        with self._lock:
            # A run that is not registered yet must not begin.
            self._is_closed = True
            runs = list(self._runs.values())
        for run in runs:
            run.cancelled.set()
            run.events.put(Cancelled("the agent is stopping"))
        for run in runs:
            run.ended.wait()
        self._pool.shutdown(cancel_futures=True)

    def _register(self, run: _Run) -> None:
        container_id = run.job.container_id
        with self._lock:
            if self._is_closed:
                raise OperationInterruptedError("the agent is stopping")
            if container_id in self._runs:
                raise BusyError(
                    f"container {container_id} is already being reconciled",
                    container_id=container_id,
                    job_id=self._runs[container_id].job.job_id,
                )
            self._runs[container_id] = run

    def _drive(
        self,
        run: _Run,
        replica: ReplicaAccess,
        peers: Mapping[PeerId, Peer],
        on_progress: Callable[[RepairProgress], None],
    ) -> RepairOutcome:
        job = run.job
        machine = Reconciliation(job.container_id, self._own, sorted(peers), job.options, job.rules)
        local: deque[LocalRequest] = deque()
        remote: set[Future[Event]] = set()

        def dispatch(requests: Sequence[Request]) -> None:
            for request in requests:
                match request:
                    case FetchTree() | FetchRecords() | FetchWindows():
                        future = self._pool.submit(
                            self._execute_remote, request, run, peers[request.peer]
                        )
                        remote.add(future)
                        future.add_done_callback(run.events.put)
                    case ReportOutcome():
                        pass
                    case _:
                        local.append(request)

        dispatch(machine.start())
        while machine.outcome is None:
            arrived = self._next(run, wait=not local)
            if isinstance(arrived, Future):
                remote.discard(arrived)
                event = arrived.result()
            elif arrived is not None:
                event = arrived
            else:
                event = self._execute_local(local.popleft(), run.job, replica)
            dispatch(machine.step(event))
            run.progress = machine.progress
            on_progress(run.progress)
        for future in remote:
            future.cancel()
        return machine.outcome

    def _next(self, run: _Run, *, wait: bool) -> "Event | Future[Event] | None":
        try:
            return run.events.get(block=wait)
        except Empty:
            return None

    def _execute_remote(self, request: PeerRequest, run: _Run, peer: Peer) -> Event:
        """Execute a request in the pool; retry while the error is retryable and the run
        is not cancelled.
        """

        def reserve(length_bytes: int) -> None:
            run.reserve(length_bytes)
            self._reserve(length_bytes)
            # Nobody waits for these bytes any more.
            if run.cancelled.is_set():
                raise OperationInterruptedError("the job was cancelled")

        def attempt() -> Event:
            event = execute_remote(request, run.job.container_id, peer, reserve=reserve)
            if isinstance(event, RequestFailed) and event.retryable and not run.cancelled.is_set():
                raise _RetryError(event)
            return event

        def pause(seconds: float) -> None:
            run.cancelled.wait(seconds)

        with self._lock:
            slots = self._peer_slots.setdefault(
                request.peer, threading.Semaphore(_CALLS_PER_PEER_MAX)
            )
        try:
            with slots:
                return call_with_retry(attempt, sleep=pause, backoff=self._backoff)
        except _RetryError as error:
            return error.event

    def _execute_local(
        self, request: LocalRequest, job: RepairJob, replica: ReplicaAccess
    ) -> Event:
        event = execute_local(request, replica)
        if not (isinstance(request, WriteWindows) and isinstance(event, WindowsWritten)):
            return event
        try:
            for run, unread in zip(event.runs, event.unread_bytes, strict=True):
                self._audit(
                    container=job.container_id,
                    block=request.block_id,
                    offset=request.chunk.offset + request.chunk.window(run.first)[0],
                    length=len(run.data),
                    source=request.source,
                    job=job.job_id,
                    unread=unread,
                )
        except ReconcileError as error:
            # The write has no audit line, so it must be the last one.
            return _failed(request, error)
        return event


class _RetryError(ReconcileError):
    """Carries a failed attempt through the retries."""

    retryable = True

    def __init__(self, event: RequestFailed) -> None:
        super().__init__(event.message)
        self.event = event
