"""Report our replicas to the controller in heartbeats, and receive its commands.

`HeartbeatState` decides, without clock or socket, on the content of the next heartbeat,
and which commands of a response are new. A report is confirmed once the controller
responds to it. Every heartbeat carries all changes since, so a lost one costs only
time. `HeartbeatSender` is the thread that sends heartbeats and passes commands on.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from dnagent.events import AGENT_EVENTS
from dnagent.metrics import PROCESS
from merkle.errors import ReconcileError
from merkle.limits import MESSAGE_BYTES_MAX, TEXT_CHARACTERS_MAX
from merkle.outcome import OutcomeState, RepairReport
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from protos.values import CLAIMED_MAX, EVIDENCE_MAX
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics
from runtime.thread_health import ThreadHealth
from runtime.tls_files import FAULT

# A heartbeat is filled up to three quarters of the largest message; the rest follows
# with the next one.
_HEARTBEAT_BYTES_MAX = MESSAGE_BYTES_MAX * 3 // 4
_REPLICAS_PER_REPORT = 50_000
_REMOVED_PER_REPORT = 100_000
_ACKNOWLEDGED_PER_REPORT = 10_000
# The most that one takes in a message, with its tag and length.
REPLICA_BYTES_MAX = 200
_ID_BYTES_MAX = 12
# All fields of a job, a fact or a peer but its texts.
_FIELDS_BYTES_MAX = 300
_LISTED_BYTES_MAX = 50
# Commands remembered, so that a command sent again is not executed again.
COMMANDS_REMEMBERED = 10_000
# Results of reconciliations kept for the controller. After a longer outage it relies
# on the container reports.
PROGRESS_MAX = 1_000
# While the controller does not answer, the wait doubles from the interval up to this,
# so that its return is noticed soon.
_BACKOFF_MAX_S = 30.0
# The least time between two heartbeats, so that one heartbeat carries changes that
# come together.
_SPACING_S = 0.05


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Another holder, and the address of its services."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class ReconcileCommand:
    """A command to repair our replica from these peers."""

    container_id: ContainerId
    job_id: str
    peers: tuple[PeerAddress, ...]
    # The state that an UNHEALTHY replica may return to; None if it may not.
    container_state: ReplicaState | None = None
    skip_final_scan: bool = False
    # 0 means no limit but the agent's own.
    bytes_per_second: int = 0
    # Who ordered the job, and why; for the audit file.
    requested_by: str = ""
    reason: str = ""
    # The digest of the plan to carry out; empty: no plan.
    plan: str = ""


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """A command to cancel a reconciliation of a container."""

    job_id: str
    container_id: ContainerId


@dataclass(frozen=True, slots=True)
class ThrottleCommand:
    """A command to change the rate of a reconciliation; 0 means no limit."""

    job_id: str
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class ScanCommand:
    """A command to scan our replica now."""

    container_id: ContainerId


Command = ReconcileCommand | CancelCommand | ThrottleCommand | ScanCommand


@dataclass(frozen=True, slots=True)
class CommandEnvelope:
    """A command with the ID that it keeps when sent again, and its sender's term."""

    command_id: str
    term: int
    command: Command


@dataclass(frozen=True, slots=True)
class JobReport:
    """Progress or result of a reconciliation; `state` is None while it runs.
    `is_absent` if the agent has no such job: that it ended is all that it knows.
    """

    job_id: str
    container_id: ContainerId
    state: OutcomeState | None
    report: RepairReport
    is_absent: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state is not None

    @property
    def bytes_max(self) -> int:
        """An upper limit of its size in a message."""
        texts = [self.job_id, self.report.error_code, self.report.message]
        for fact in self.report.evidence:
            texts += [fact.kind, fact.detail]
        for peer in self.report.peers:
            texts += [peer.peer, peer.outcome]
        listed = len(self.report.evidence) + len(self.report.peers)
        return (
            _FIELDS_BYTES_MAX
            + listed * _LISTED_BYTES_MAX
            + len(self.report.claimed_deleted) * _ID_BYTES_MAX
            + sum(len(text.encode()) for text in texts)
        )

    def within_limits(self) -> "JobReport":
        """The report as the controller keeps it, so that it fits into any heartbeat."""
        evidence = tuple(
            replace(fact, detail=fact.detail[:TEXT_CHARACTERS_MAX])
            for fact in self.report.evidence[:EVIDENCE_MAX]
        )
        report = replace(
            self.report,
            message=self.report.message[:TEXT_CHARACTERS_MAX],
            evidence=evidence,
            claimed_deleted=self.report.claimed_deleted[:CLAIMED_MAX],
        )
        return replace(self, report=report)


@dataclass(frozen=True, slots=True)
class OutgoingHeartbeat:
    """The content of one heartbeat.

    `full` if `replicas` has all replicas of containers with IDs above `after` up to
    `through`; None: to the last. Replicas outside of this part are changes.
    """

    sequence: int
    full: bool
    replicas: tuple[ContainerReplica, ...]
    removed: tuple[ContainerId, ...]
    progress: tuple[JobReport, ...]
    acknowledged: tuple[str, ...]
    after: int = 0
    through: int | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatResponse:
    """The controller's response to a heartbeat."""

    envelopes: tuple[CommandEnvelope, ...]
    full_report_wanted: bool
    term: int


class HeartbeatState:
    """Which reports the controller has confirmed, and which commands we have seen."""

    def __init__(self, replicas_per_report: int = _REPLICAS_PER_REPORT) -> None:
        self._replicas_per_report = replicas_per_report
        self._sequence = 0
        self._full_wanted = True
        # The parts of a full report up to this container are confirmed.
        self._full_after = 0
        self._confirmed: dict[ContainerId, ContainerReplica] = {}
        # Reported in heartbeats without a response: the controller may have this state
        # or the previous one.
        self._unconfirmed: set[ContainerId] = set()
        self._term = 0
        self._seen_commands: OrderedDict[str, None] = OrderedDict()
        self._acknowledged: list[str] = []
        self._results: OrderedDict[str, JobReport] = OrderedDict()
        # Something did not fit into the last heartbeat.
        self._is_cut = False

    def add_result(self, progress: JobReport) -> None:
        """Keep the result of a reconciliation until the controller confirms it."""
        assert progress.is_final
        # The result of a job that has just ended says more than that it is absent.
        if progress.is_absent and progress.job_id in self._results:
            return
        self._results[progress.job_id] = progress.within_limits()
        if len(self._results) > PROGRESS_MAX:
            self._results.popitem(last=False)

    def next_heartbeat(
        self, replicas: Iterable[ContainerReplica], running: Iterable[JobReport]
    ) -> OutgoingHeartbeat:
        """The heartbeat to send now: a full report or its next part at start and on
        request, otherwise the difference from the confirmed state.
        """
        self._sequence += 1
        held = {replica.container_id: replica for replica in replicas}
        confirmed, unconfirmed = self._confirmed, self._unconfirmed
        after = self._full_after if self._full_wanted else 0
        if self._full_wanted:
            confirmed = {number: r for number, r in confirmed.items() if number <= after}
            unconfirmed = set()
        changed = [
            r
            for r in held.values()
            if confirmed.get(r.container_id) != r or r.container_id in unconfirmed
        ]
        changed.sort(key=lambda replica: replica.container_id)
        left = {replica.container_id for replica in changed[self._replicas_per_report :]}
        changed = changed[: self._replicas_per_report]
        through = max(after, changed[-1].container_id) if self._full_wanted and left else None
        gone = sorted((confirmed.keys() | unconfirmed) - held.keys())
        removed = gone[:_REMOVED_PER_REPORT]
        acknowledged = tuple(self._acknowledged[:_ACKNOWLEDGED_PER_REPORT])
        self._unconfirmed |= {replica.container_id for replica in changed} | set(removed)
        # A result must not arrive before the report of the repaired replica.
        ready = [p for p in self._results.values() if p.container_id not in left]
        # No progress report may follow a job's result.
        under_way = [p for p in running if p.job_id not in self._results]
        room = (
            _HEARTBEAT_BYTES_MAX
            - len(changed) * REPLICA_BYTES_MAX
            - len(removed) * _ID_BYTES_MAX
            - sum(len(command_id) + _ID_BYTES_MAX for command_id in acknowledged)
            - sum(p.bytes_max for p in under_way)
        )
        ended = _first_that_fit(ready, room)
        self._is_cut = bool(left) or len(removed) < len(gone) or len(ended) < len(ready)
        progress = *under_way, *ended
        return OutgoingHeartbeat(
            self._sequence,
            self._full_wanted,
            tuple(changed),
            tuple(removed),
            progress,
            acknowledged,
            after,
            through,
        )

    def handle_response(self, sent: OutgoingHeartbeat, answer: HeartbeatResponse) -> list[Command]:
        """Mark the reports in `sent` as confirmed; returns the new commands.

        A command is returned once, however often it is sent.
        """
        if sent.full:
            self._confirmed = {n: r for n, r in self._confirmed.items() if n <= sent.after}
        self._confirmed.update((replica.container_id, replica) for replica in sent.replicas)
        for container_id in sent.removed:
            self._confirmed.pop(container_id, None)
        self._unconfirmed -= {replica.container_id for replica in sent.replicas} | set(sent.removed)
        # A restarted controller may have accepted a delayed copy of an old full report.
        is_restarted = 0 < self._term < answer.term
        self._full_after = 0 if is_restarted else sent.through or 0
        is_part = sent.through is not None
        self._full_wanted = answer.full_report_wanted or is_restarted or is_part
        # A controller that wants a full report has dropped the rest of the heartbeat.
        if not answer.full_report_wanted:
            for progress in sent.progress:
                if self._results.get(progress.job_id) is progress:
                    del self._results[progress.job_id]
            self._acknowledged = self._acknowledged[len(sent.acknowledged) :]
        self._term = max(self._term, answer.term)
        return [envelope.command for envelope in answer.envelopes if self._accept(envelope)]

    @property
    def has_pending(self) -> bool:
        """Whether the next heartbeat should not wait for the interval."""
        is_more = self._is_cut or bool(self._results) or bool(self._acknowledged)
        return self._full_wanted or is_more

    def _accept(self, envelope: CommandEnvelope) -> bool:
        # A replaced leader may still send commands; they are void.
        if envelope.term < self._term:
            return False
        self._term = envelope.term
        self._acknowledged.append(envelope.command_id)
        if isinstance(envelope.command, CancelCommand):
            # It may have come before its job began. To cancel twice is to cancel.
            return True
        if envelope.command_id in self._seen_commands:
            return False
        self._seen_commands[envelope.command_id] = None
        if len(self._seen_commands) > COMMANDS_REMEMBERED:
            self._seen_commands.popitem(last=False)
        return True


def _first_that_fit(ready: Sequence[JobReport], room: int) -> list[JobReport]:
    """The longest beginning that fits into this many bytes, at least one."""
    found: list[JobReport] = []
    for report in ready:
        room -= report.bytes_max
        if found and room < 0:
            break
        found.append(report)
    return found


class HeartbeatReceiver(Protocol):
    """The controller, as agents call it."""

    def heartbeat(self, heartbeat: OutgoingHeartbeat) -> HeartbeatResponse:
        """Send one heartbeat and return the response.

        Raises:
            ControllerUnavailableError: the controller did not answer in time.
            ReconcileError: the controller refused it; the error has its reason.
        """

    def close(self) -> None:
        """Close the connection."""


class HeartbeatSender:
    """Sends heartbeats from its own thread until stopped. Thread-safe."""

    def __init__(
        self,
        controller: HeartbeatReceiver,
        *,
        interval_s: float,
        replicas: Callable[[], Iterable[ContainerReplica]],
        running: Callable[[], Iterable[JobReport]],
        on_command: Callable[[Command], None],
        metrics: Metrics,
        thread_health: ThreadHealth | None = None,
    ) -> None:
        """`on_command` must not block: it queues whatever takes long. `thread_health`
        sees whether the thread gets on.
        """
        self._controller = controller
        self._interval_s = interval_s
        self._replicas = replicas
        self._running = running
        self._on_command = on_command
        self._metrics = metrics
        self._state = HeartbeatState()
        self._state_lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._failures = 0
        self._tls_fault = ""
        self._log = get_logger("heartbeat", AGENT_EVENTS)
        self._guard = ThreadGuard("heartbeat", metrics, PROCESS.thread_failures)
        self._thread_health = thread_health or ThreadHealth()
        self._thread = threading.Thread(target=self._run, name="heartbeat")

    def start(self) -> None:
        """Start sending."""
        self._thread_health.watch(self._thread, self._guard)
        self._thread.start()

    def stop(self) -> None:
        """Stop sending, wait for the thread, and close the connection."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._controller.close()

    def wake(self) -> None:
        """Send the next heartbeat now, because a replica changed."""
        self._wake.set()

    def report_end(self, progress: JobReport) -> None:
        """Report the result of a reconciliation until the controller confirms it."""
        with self._state_lock:
            self._state.add_result(progress)
        self._wake.set()

    def send(self) -> bool:
        """Send one heartbeat and execute the commands of its response; returns False if
        it failed.
        """
        with self._state_lock:
            heartbeat = self._state.next_heartbeat(self._replicas(), self._running())
        try:
            answer = self._controller.heartbeat(heartbeat)
        except ReconcileError as error:
            self._metrics.count("dnagent_heartbeats_total", outcome=error.code)
            # Once for each outage, not for each try, and for each new fault of TLS.
            fault = str(error.facts.get(FAULT, ""))
            if self._failures == 0 or fault not in ("", self._tls_fault):
                self._log.warning("heartbeat_failed", **error_fields(error))
            self._failures += 1
            self._tls_fault = fault
            return False
        self._metrics.count("dnagent_heartbeats_total", outcome="answered")
        if self._failures:
            self._log.info("heartbeat_recovered", failures=self._failures)
            self._failures, self._tls_fault = 0, ""
        with self._state_lock:
            commands = self._state.handle_response(heartbeat, answer)
            if self._state.has_pending:
                self._wake.set()
        dropped = len(answer.envelopes) - len(commands)
        if dropped:
            self._metrics.count("dnagent_commands_total", dropped, outcome="dropped")
            self._log.debug("command_dropped", commands=dropped)
        for command in commands:
            self._metrics.count("dnagent_commands_total", outcome="accepted")
            self._log.info("command_received", command=type(command).__name__)
            self._execute(command)
        return True

    def _execute(self, command: Command) -> None:
        """Pass a command on. It is confirmed already, so an error must not keep those
        after it from being executed.
        """
        try:
            with self._guard.named_errors():
                self._on_command(command)
        except ReconcileError as error:
            self._metrics.count("dnagent_commands_total", outcome="failed")
            self._log.error("command_failed", command=type(command).__name__, **error_fields(error))

    def _try_send(self) -> bool:
        try:
            with self._guard.named_errors():
                return self.send()
        except ReconcileError:
            self._failures += 1
            return False

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._try_send():
                self._wake.wait(self._interval_s)
                # Not before the send: a stop that came since the loop looked for one
                # would be cleared with it.
                self._wake.clear()
                self._stop.wait(_SPACING_S)
            else:
                # Ignore wake-ups: they must not cause a busy loop while the controller
                # is away.
                self._stop.wait(
                    min(self._interval_s * 2 ** min(self._failures, 10), _BACKOFF_MAX_S)
                )
