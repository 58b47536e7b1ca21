"""Tell the controller what we hold, and take its commands.

`HeartbeatState` decides, without a clock or a socket: what the next heartbeat says, and
which commands of an answer are new. What the controller is known to know is what it
last answered to; every heartbeat carries the difference, so a lost one costs nothing
but time. `Heartbeats` is the shell: a thread that sends, waits, and hands commands on.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from dnagent.events import AGENT_EVENTS
from merkle.errors import ReconcileError
from merkle.outcome import OutcomeState, RepairReport
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics

# A report of so many replicas stays well below one message; the rest follows with the
# next heartbeat.
_REPLICAS_PER_REPORT = 50_000
# Commands remembered, so that one that is sent again is not done again.
COMMANDS_REMEMBERED = 10_000
# Ends of reconciliations that wait to be told; a controller away for longer learns the
# rest from the reports.
PROGRESS_MAX = 1_000
# While the controller is away: doubles from the interval up to this, so that it is
# found soon when it is back.
_BACKOFF_MAX_S = 30.0
# Between two heartbeats, however much there is to tell: changes that come together go
# together.
_SPACING_S = 0.05


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Another holder, and where its services listen."""

    peer: PeerId
    address: str


@dataclass(frozen=True, slots=True)
class ReconcileCommand:
    container_id: ContainerId
    job_id: str
    peers: tuple[PeerAddress, ...]
    # What an unhealthy replica may return to; None where the controller does not say.
    container_state: ReplicaState | None = None
    skip_final_scan: bool = False


@dataclass(frozen=True, slots=True)
class CancelCommand:
    job_id: str


@dataclass(frozen=True, slots=True)
class ScanCommand:
    container_id: ContainerId


Command = ReconcileCommand | CancelCommand | ScanCommand


@dataclass(frozen=True, slots=True)
class CommandEnvelope:
    """A command with what makes it one and the same when it is sent again."""

    command_id: str
    term: int
    command: Command


@dataclass(frozen=True, slots=True)
class JobReport:
    """How far a reconciliation is; `state` is None while it runs."""

    job_id: str
    container_id: ContainerId
    state: OutcomeState | None
    report: RepairReport

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self.state is not None


@dataclass(frozen=True, slots=True)
class OutgoingHeartbeat:
    """What one heartbeat says."""

    sequence: int
    full: bool
    replicas: tuple[ContainerReplica, ...]
    removed: tuple[ContainerId, ...]
    progress: tuple[JobReport, ...]
    acknowledged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeartbeatResponse:
    """What the controller answered."""

    envelopes: tuple[CommandEnvelope, ...]
    full_report_wanted: bool
    term: int


class HeartbeatState:
    """What the controller knows of us, and which of its commands we know."""

    def __init__(self, replicas_per_report: int = _REPLICAS_PER_REPORT) -> None:
        self._replicas_per_report = replicas_per_report
        self._sequence = 0
        self._full_wanted = True
        self._known: dict[ContainerId, ContainerReplica] = {}
        # Told in heartbeats without an answer: of these the controller may know what
        # was told, or what was before.
        self._unsure: set[ContainerId] = set()
        self._term = 0
        self._seen: OrderedDict[str, None] = OrderedDict()
        self._acknowledged: list[str] = []
        self._ended: OrderedDict[str, JobReport] = OrderedDict()

    def ended(self, progress: JobReport) -> None:
        """Keep the end of a reconciliation until the controller has answered to it."""
        assert progress.is_final
        self._ended[progress.job_id] = progress
        if len(self._ended) > PROGRESS_MAX:
            self._ended.popitem(last=False)

    def next(
        self, replicas: Iterable[ContainerReplica], running: Iterable[JobReport]
    ) -> OutgoingHeartbeat:
        """The heartbeat to send now: everything at start and when asked, else what
        differs from what is known.
        """
        self._sequence += 1
        held = {replica.container_id: replica for replica in replicas}
        known = {} if self._full_wanted else self._known
        unsure = set[ContainerId]() if self._full_wanted else self._unsure
        changed = [
            r for r in held.values() if known.get(r.container_id) != r or r.container_id in unsure
        ]
        changed.sort(key=lambda replica: replica.container_id)
        left = {replica.container_id for replica in changed[self._replicas_per_report :]}
        changed = changed[: self._replicas_per_report]
        removed = sorted((known.keys() | unsure) - held.keys())
        self._unsure |= {replica.container_id for replica in changed} | set(removed)
        # The controller is to hear of an end with what became of the replica, or after
        # it.
        ended = tuple(p for p in self._ended.values() if p.container_id not in left)
        # The end of a job is the last word about it.
        progress = *(p for p in running if p.job_id not in self._ended), *ended
        return OutgoingHeartbeat(
            self._sequence,
            self._full_wanted,
            tuple(changed),
            tuple(removed),
            progress,
            tuple(self._acknowledged),
        )

    def answered(self, sent: OutgoingHeartbeat, answer: HeartbeatResponse) -> list[Command]:
        """Note that the controller knows what was sent; the commands to carry out, each
        once.
        """
        if sent.full:
            self._known, self._unsure = {}, set()
        self._known.update((replica.container_id, replica) for replica in sent.replicas)
        for container_id in sent.removed:
            self._known.pop(container_id, None)
        self._unsure -= {replica.container_id for replica in sent.replicas} | set(sent.removed)
        # A controller that began anew may have taken a late copy of an old full report
        # for what we hold.
        self._full_wanted = answer.full_report_wanted or 0 < self._term < answer.term
        # The controller keeps nothing of a heartbeat whose sender it did not know.
        if not answer.full_report_wanted:
            for progress in sent.progress:
                if self._ended.get(progress.job_id) is progress:
                    del self._ended[progress.job_id]
            self._acknowledged = self._acknowledged[len(sent.acknowledged) :]
        self._term = max(self._term, answer.term)
        return [envelope.command for envelope in answer.envelopes if self._accept(envelope)]

    @property
    def is_behind(self) -> bool:
        """Whether there is something that the controller should hear without waiting
        for the next turn.
        """
        return self._full_wanted or bool(self._ended) or bool(self._acknowledged)

    def _accept(self, envelope: CommandEnvelope) -> bool:
        # A leader that was replaced may not know it yet; its commands are void.
        if envelope.term < self._term:
            return False
        self._term = envelope.term
        self._acknowledged.append(envelope.command_id)
        if envelope.command_id in self._seen:
            return False
        self._seen[envelope.command_id] = None
        if len(self._seen) > COMMANDS_REMEMBERED:
            self._seen.popitem(last=False)
        return True


class HeartbeatReceiver(Protocol):
    """Whoever takes heartbeats."""

    def heartbeat(self, heartbeat: OutgoingHeartbeat) -> HeartbeatResponse:
        """Send one heartbeat; returns the controller's answer.

        Raises:
            ControllerUnavailableError: nobody answers.
            ReconcileError: the controller refuses it, with its reason.
        """

    def close(self) -> None:
        """Close the connection."""


class Heartbeats:
    """Sends heartbeats from a thread of its own until stopped."""

    def __init__(
        self,
        controller: HeartbeatReceiver,
        *,
        interval_s: float,
        replicas: Callable[[], Iterable[ContainerReplica]],
        running: Callable[[], Iterable[JobReport]],
        on_command: Callable[[Command], None],
        metrics: Metrics,
    ) -> None:
        """`on_command` must not block: what takes long is queued by it."""
        self._controller = controller
        self._interval_s = interval_s
        self._replicas = replicas
        self._running = running
        self._on_command = on_command
        self._metrics = metrics
        self._state = HeartbeatState()
        self._state_lock = threading.Lock()
        self._poke = threading.Event()
        self._stop = threading.Event()
        self._failures = 0
        self._log = get_logger("heartbeat", AGENT_EVENTS)
        self._thread = threading.Thread(target=self._run, name="heartbeat")

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more and wait for the thread."""
        self._stop.set()
        self._poke.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._controller.close()

    def poke(self) -> None:
        """Something changed that the controller should hear now."""
        self._poke.set()

    def ended(self, progress: JobReport) -> None:
        """Report the end of a reconciliation until the controller has heard of it."""
        with self._state_lock:
            self._state.ended(progress)
        self._poke.set()

    def beat(self) -> bool:
        """Send one heartbeat and carry out the commands of its answer; whether it was
        answered.
        """
        with self._state_lock:
            heartbeat = self._state.next(self._replicas(), self._running())
        try:
            answer = self._controller.heartbeat(heartbeat)
        except ReconcileError as error:
            self._metrics.count("dnagent_heartbeats_total", outcome=error.code)
            # One line when it goes away, not one for each try.
            if self._failures == 0:
                self._log.warning("heartbeat_failed", **error_fields(error))
            self._failures += 1
            return False
        self._metrics.count("dnagent_heartbeats_total", outcome="answered")
        if self._failures:
            self._log.info("heartbeat_recovered", failures=self._failures)
            self._failures = 0
        with self._state_lock:
            commands = self._state.answered(heartbeat, answer)
            if self._state.is_behind or len(heartbeat.replicas) == _REPLICAS_PER_REPORT:
                self._poke.set()
        dropped = len(answer.envelopes) - len(commands)
        if dropped:
            self._metrics.count("dnagent_commands_total", dropped, outcome="dropped")
            self._log.debug("command_dropped", commands=dropped)
        for command in commands:
            self._metrics.count("dnagent_commands_total", outcome="accepted")
            self._log.info("command_received", command=type(command).__name__)
            self._on_command(command)
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            self._poke.clear()
            if self.beat():
                self._poke.wait(self._interval_s)
                self._stop.wait(_SPACING_S)
            else:
                # A poke must not turn an absent controller into a busy loop.
                self._stop.wait(
                    min(self._interval_s * 2 ** min(self._failures, 10), _BACKOFF_MAX_S)
                )
