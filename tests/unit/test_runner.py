"""The runner carries out requests with bounded threads, retries, limits and a way to be
stopped.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from merkle.outcome import OutcomeState, RepairOutcome, RepairProgress, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import ProvenWindows
from ozone.ports import ByteRange
from repair.ports import Peer, Piece
from repair.requests import FetchWindows, RequestFailed, WindowsArrived
from repair.runner import RepairJob, Runner, execute_remote
from runtime.errors import BusyError, DiskError, PeerRefusedError, PeerUnavailableError
from runtime.retry import Backoff
from tests.support.memory import RepairableReplica
from tests.support.peers import MemoryPeer, MemoryReplica, MemorySource, replica_of

WINDOW = 16
CHUNK = 8 * WINDOW
BLOCK = 2 * CHUNK
CONTAINER = ContainerId(7)
A = BlockId(1)
DEADLINE_S = 20.0
PATIENT = Backoff(attempts_max=3, first_s=0, jitter_s=0)


@dataclass
class Audit:
    """Keeps the lines; `fails` makes the next one fail."""

    lines: list[tuple[int, int, int, int, str, str]] = field(default_factory=list)
    fails: bool = False

    def __call__(
        self,
        *,
        container: int,
        block: int,
        offset: int,
        length: int,
        source: str,
        job: str,
        unread: int,
    ) -> None:
        if self.fails:
            raise DiskError("the audit file cannot be written")
        self.lines.append((container, block, offset, length, source, job))


def stored(*blocks: int) -> MemoryReplica:
    return replica_of(
        CONTAINER, dict.fromkeys(blocks, BLOCK), window_bytes=WINDOW, chunk_bytes=CHUNK
    )


def damaged(*windows: int) -> RepairableReplica:
    """Our replica with these windows of its one block flipped, and scanned."""
    replica = RepairableReplica("dn1", stored(A))
    for window in windows:
        replica.stored.flip(A, window * WINDOW)
    replica.scan()
    return replica


class HookedPeer(MemoryPeer):
    """Calls a hook before each answer."""

    def __init__(self, name: str, hook: Callable[[str], None], *blocks: int) -> None:
        super().__init__(PeerId(name), MemorySource(stored(*(blocks or (A,)))))
        self._hook = hook

    def tree(self, container_id: ContainerId) -> ContainerTree:
        self._hook("tree")
        return super().tree(container_id)

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        self._hook("records")
        return super().records(container_id, block_ids)

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        self._hook("read")
        yield from super().read(container_id, block_id, record_chunk, ranges)


@pytest.fixture
def make_runner() -> Iterator[Callable[..., Runner]]:
    runners: list[Runner] = []

    def make(
        audit: Audit | None = None,
        threads_max: int = 4,
        reserve: Callable[[int], None] = lambda _: None,
    ) -> Runner:
        runner = Runner(
            PeerId("dn1"),
            threads_max=threads_max,
            audit=audit or Audit(),
            backoff=PATIENT,
            reserve=reserve,
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.close()


def run(
    runner: Runner, replica: RepairableReplica, *peers: Peer, job: str = "job-9"
) -> RepairOutcome:
    return runner.run(
        RepairJob(job, CONTAINER), lambda _: replica, {peer.peer_id: peer for peer in peers}
    )


def test_a_job_heals_and_puts_down_one_line_for_each_run_of_windows(
    make_runner: Callable[..., Runner],
) -> None:
    audit, replica = Audit(), damaged(1, 2, 5)
    outcome = run(make_runner(audit), replica, HookedPeer("dn2", lambda _: None))
    assert outcome.verdict is Verdict.REPAIRABLE
    assert replica.stored.files == stored(A).files
    assert audit.lines == [
        (7, 1, WINDOW, 2 * WINDOW, "dn2", "job-9"),
        (7, 1, 5 * WINDOW, WINDOW, "dn2", "job-9"),
    ]


def test_a_write_that_cannot_be_accounted_for_is_the_last(
    make_runner: Callable[..., Runner],
) -> None:
    replica = damaged(1, 9)
    outcome = run(make_runner(Audit(fails=True)), replica, HookedPeer("dn2", lambda _: None))
    assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "disk_failed")
    assert replica.bytes_written <= 2 * WINDOW


def test_every_byte_that_is_fetched_passes_the_bandwidth_limit(
    make_runner: Callable[..., Runner],
) -> None:
    taken: list[int] = []
    outcome = run(
        make_runner(reserve=taken.append), damaged(1, 2, 9), HookedPeer("dn2", lambda _: None)
    )
    assert sum(taken) == outcome.progress.bytes_fetched == 3 * WINDOW


def test_bandwidth_is_waited_for_before_a_call_and_never_within_it(
    make_runner: Callable[..., Runner],
) -> None:
    """A wait within the call would run out the deadline of a healthy peer."""
    calls: list[str] = []

    class Reading(HookedPeer):
        def read(
            self,
            container_id: ContainerId,
            block_id: BlockId,
            record_chunk: ChunkRecord,
            ranges: Sequence[ByteRange],
        ) -> Iterator[Piece]:
            calls.append("call")
            yield from super().read(container_id, block_id, record_chunk, ranges)
            calls.append("end")

    outcome = run(
        make_runner(threads_max=1, reserve=lambda _: calls.append("wait")),
        damaged(1, 2, 9),
        Reading("dn2", lambda _: None),
    )
    assert outcome.progress.bytes_written == 3 * WINDOW
    reads = calls.count("call")
    assert reads
    assert calls == ["wait", "call", "end"] * reads


def test_progress_is_told_and_grows(make_runner: Callable[..., Runner]) -> None:
    told: list[RepairProgress] = []
    peer = HookedPeer("dn2", lambda _: None)
    make_runner().run(
        RepairJob("j", CONTAINER),
        lambda _: damaged(1),
        {peer.peer_id: peer},
        on_progress=told.append,
    )
    assert [p.bytes_written for p in told] == sorted(p.bytes_written for p in told)
    assert told[-1].chunks_repaired == 1


def test_an_error_that_may_pass_is_tried_again_and_another_is_not(
    make_runner: Callable[..., Runner],
) -> None:
    calls: list[str] = []

    def flaky(call: str) -> None:
        calls.append(call)
        if calls.count(call) == 1:
            raise PeerUnavailableError("not now")

    outcome = run(make_runner(), damaged(1), HookedPeer("dn2", flaky))
    assert outcome.verdict is Verdict.REPAIRABLE
    assert calls == ["tree", "tree", "records", "records", "read", "read"]

    refusals: list[str] = []

    def refuse(call: str) -> None:
        refusals.append(call)
        raise PeerRefusedError("no", result="whatever")

    assert run(make_runner(), damaged(1), HookedPeer("dn2", refuse)).error_code == "no_peer"
    assert refusals == ["tree"]


def _fetch(peer: MemoryPeer, *windows: int) -> WindowsArrived | RequestFailed:
    chunk = stored(A).records[A].chunks[0]
    event = execute_remote(FetchWindows(peer.peer_id, A, chunk, windows), CONTAINER, peer)
    assert isinstance(event, WindowsArrived | RequestFailed)
    return event


def test_adjacent_windows_are_asked_for_as_one_range() -> None:
    asked: list[Sequence[ByteRange]] = []

    class Asked(HookedPeer):
        def read(
            self,
            container_id: ContainerId,
            block_id: BlockId,
            record_chunk: ChunkRecord,
            ranges: Sequence[ByteRange],
        ) -> Iterator[Piece]:
            asked.append(ranges)
            yield from super().read(container_id, block_id, record_chunk, ranges)

    event = _fetch(Asked("dn2", lambda _: None), 0, 1, 2, 5)
    assert asked == [[ByteRange(0, 3 * WINDOW), ByteRange(5 * WINDOW, WINDOW)]]
    assert isinstance(event, WindowsArrived)
    assert [run.windows for run in event.runs] == [range(3), range(5, 6)]


def test_pieces_of_any_size_are_put_together() -> None:
    class Crumbs(HookedPeer):
        def read(
            self,
            container_id: ContainerId,
            block_id: BlockId,
            record_chunk: ChunkRecord,
            ranges: Sequence[ByteRange],
        ) -> Iterator[Piece]:
            for piece in super().read(container_id, block_id, record_chunk, ranges):
                for i in range(len(piece.data)):
                    yield Piece(piece.offset + i, memoryview(piece.data)[i : i + 1])

    event = _fetch(Crumbs("dn2", lambda _: None), 0, 1, 5)
    assert isinstance(event, WindowsArrived)
    assert sum(run.count for run in event.runs) == 3


def test_what_came_before_an_error_is_kept_if_it_is_proven() -> None:
    peer = HookedPeer("dn2", lambda _: None)
    del peer.source.replicas[CONTAINER].files[A][2 * WINDOW + 3 :]
    event = _fetch(peer, 0, 1, 2, 3)
    assert isinstance(event, WindowsArrived)
    assert [run.windows for run in event.runs] == [range(2)]
    assert (event.code, event.retryable) == ("peer_refused", False)


@pytest.mark.parametrize("offset", [3, 5 * WINDOW])
def test_bytes_that_nobody_asked_for_are_nonsense(offset: int) -> None:
    class Confused(HookedPeer):
        def read(
            self,
            container_id: ContainerId,
            block_id: BlockId,
            record_chunk: ChunkRecord,
            ranges: Sequence[ByteRange],
        ) -> Iterator[Piece]:
            yield Piece(offset, bytes(WINDOW))

    event = _fetch(Confused("dn2", lambda _: None), 0)
    assert isinstance(event, RequestFailed)
    assert event.code == "remote_protocol"


class Gate:
    """Holds a call until it is opened, and tells that it is held."""

    def __init__(self, call: str) -> None:
        self._call = call
        self.held = threading.Event()
        self.opened = threading.Event()

    def __call__(self, call: str) -> None:
        if call == self._call:
            self.held.set()
            assert self.opened.wait(DEADLINE_S)


def _in_thread(work: Callable[[], RepairOutcome]) -> tuple[threading.Thread, list[RepairOutcome]]:
    outcomes: list[RepairOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(work()))
    thread.start()
    return thread, outcomes


def test_a_container_is_reconciled_by_one_job_at_a_time(make_runner: Callable[..., Runner]) -> None:
    runner, gate = make_runner(), Gate("read")
    thread, outcomes = _in_thread(
        lambda: run(runner, damaged(1), HookedPeer("dn2", gate), job="first")
    )
    assert gate.held.wait(DEADLINE_S)
    with pytest.raises(BusyError) as refused:
        run(runner, damaged(1), HookedPeer("dn2", lambda _: None), job="second")
    assert refused.value.facts["job_id"] == "first"
    ((job, progress),) = runner.running()
    assert job.job_id == "first"
    assert progress is not None
    gate.opened.set()
    thread.join(DEADLINE_S)
    assert outcomes[0].verdict is Verdict.REPAIRABLE
    assert runner.running() == []


@pytest.mark.parametrize("call", ["tree", "records", "read"])
def test_an_interrupt_ends_the_job_while_a_peer_hangs_and_nothing_is_written_after(
    make_runner: Callable[..., Runner], call: str
) -> None:
    """CR-057: deleting a container does not wait for a peer."""
    runner, gate, replica = make_runner(), Gate(call), damaged(1)
    thread, outcomes = _in_thread(lambda: run(runner, replica, HookedPeer("dn2", gate)))
    assert gate.held.wait(DEADLINE_S)
    assert runner.interrupt(CONTAINER, "the container is being deleted", timeout_s=DEADLINE_S)
    thread.join(DEADLINE_S)
    assert (outcomes[0].state, outcomes[0].message) == (
        OutcomeState.INTERRUPTED,
        "the container is being deleted",
    )
    written = replica.bytes_written
    gate.opened.set()
    runner.close()
    assert replica.bytes_written == written == 0


def test_an_interrupt_where_nothing_runs_is_done_at_once(
    make_runner: Callable[..., Runner],
) -> None:
    assert make_runner().interrupt(CONTAINER, "why not", timeout_s=0)


def test_no_more_calls_are_under_way_at_peers_than_there_are_threads(
    make_runner: Callable[..., Runner],
) -> None:
    lock, under_way, most = threading.Lock(), [0], [0]

    class Counted(HookedPeer):
        def tree(self, container_id: ContainerId) -> ContainerTree:
            with lock:
                under_way[0] += 1
                most[0] = max(most[0], under_way[0])
            try:
                return super().tree(container_id)
            finally:
                with lock:
                    under_way[0] -= 1

    peers = [Counted(f"dn{i}", lambda _: None) for i in range(2, 12)]
    outcome = run(make_runner(threads_max=2), damaged(), *peers)
    assert outcome.verdict is Verdict.MATCH
    assert most[0] <= 2


def test_a_slow_peer_does_not_keep_another_containers_repair_from_its_disk(
    make_runner: Callable[..., Runner],
) -> None:
    """CR-044."""
    runner, gate = make_runner(), Gate("read")
    slow, _ = _in_thread(lambda: run(runner, damaged(1), HookedPeer("dn2", gate)))
    assert gate.held.wait(DEADLINE_S)
    other = RepairableReplica(
        "dn1", replica_of(8, {A: BLOCK}, window_bytes=WINDOW, chunk_bytes=CHUNK)
    )
    other.stored.flip(A, 0)
    other.scan()
    source = MemorySource(replica_of(8, {A: BLOCK}, window_bytes=WINDOW, chunk_bytes=CHUNK))
    peer = MemoryPeer(PeerId("dn2"), source)
    outcome = runner.run(RepairJob("other", ContainerId(8)), lambda _: other, {peer.peer_id: peer})
    assert outcome.verdict is Verdict.REPAIRABLE
    gate.opened.set()
    slow.join(DEADLINE_S)


def test_an_error_of_our_own_ends_the_job_with_its_traceback(
    make_runner: Callable[..., Runner],
) -> None:
    class Broken(HookedPeer):
        def tree(self, container_id: ContainerId) -> ContainerTree:
            raise ZeroDivisionError

    runner = make_runner()
    with pytest.raises(ZeroDivisionError):
        run(runner, damaged(1), Broken("dn2", lambda _: None))
    assert runner.running() == []


def test_only_proven_bytes_have_the_type_that_is_written() -> None:
    peer = HookedPeer("dn2", lambda _: None)
    peer.source.replicas[CONTAINER].flip(A, 0)
    event = _fetch(peer, 0, 1)
    assert isinstance(event, WindowsArrived)
    assert event.runs == (ProvenWindows(1, 1, bytes(stored(A).files[A][WINDOW : 2 * WINDOW])),)
    assert event.bytes_fetched == 2 * WINDOW
