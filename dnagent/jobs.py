"""Reconcile commands on this datanode: queued, run a few at a time, and told of until
their end.

One job a container: a command for a container that another job waits for or works on is
refused, as Ozone drops it, and the refusal is reported like any other end, so that the
controller never waits for a job that nobody does. A job that is sent once more while it
is here is neither begun twice nor refused. `JobTable` decides that, without threads;
`Jobs` runs what it admits.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

from dnagent.events import AGENT_EVENTS
from dnagent.heartbeat import JobReport, PeerAddress, ReconcileCommand
from dnagent.ports import ReconciliationStatus
from dnagent.store import ReplicaStore
from merkle.errors import ReconcileError
from merkle.outcome import OutcomeState, RepairOutcome, RepairProgress, RepairReport
from merkle.replica import PeerId
from merkle.tree import ContainerId
from repair.ports import Peer
from repair.requests import ReconcileOptions
from repair.runner import RepairJob, Runner
from runtime.errors import BusyError, OperationInterruptedError
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics

# Ozone's own limit on a datanode's command queue.
_JOBS_MAX = 5000


class JobTable:
    """Which container has which job, from its command to its end. Not thread-safe."""

    def __init__(self) -> None:
        self._commands: dict[ContainerId, ReconcileCommand] = {}

    def admit(self, command: ReconcileCommand) -> bool:
        """Take in a job; False where it is here already.

        Raises:
            BusyError: the container has another job, or too many jobs wait.
        """
        container_id = command.container_id
        held = self._commands.get(container_id)
        if held is not None and held.job_id == command.job_id:
            return False
        if held is not None:
            raise BusyError(
                f"container {container_id} has job {held.job_id} already", container_id=container_id
            )
        if len(self._commands) >= _JOBS_MAX:
            raise BusyError(f"{_JOBS_MAX} jobs are waiting already", limit=_JOBS_MAX)
        self._commands[container_id] = command
        return True

    def find(self, job_id: str) -> ReconcileCommand | None:
        """The command of a job that waits or runs."""
        return next(
            (command for command in self._commands.values() if command.job_id == job_id), None
        )

    def forget(self, command: ReconcileCommand) -> None:
        """The job ended."""
        self._commands.pop(command.container_id, None)

    def __len__(self) -> int:
        return len(self._commands)


class Jobs:
    """The reconcile commands of this datanode. Thread-safe."""

    def __init__(
        self,
        runner: Runner,
        store: ReplicaStore,
        *,
        connect: Callable[[PeerAddress], Peer],
        threads_max: int,
        fetches_max: int,
        return_to_service: bool,
        on_scan_bytes: Callable[[int], None],
        on_end: Callable[[JobReport], None],
        metrics: Metrics,
    ) -> None:
        """`connect` opens a peer; `on_end` hears how each job ended."""
        self._runner = runner
        self._store = store
        self._connect = connect
        self._fetches_max = fetches_max
        self._return_to_service = return_to_service
        self._on_scan_bytes = on_scan_bytes
        self._on_end = on_end
        self._metrics = metrics
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="job")
        self._lock = threading.Lock()
        self._table = JobTable()
        self._futures: dict[ContainerId, Future[None]] = {}
        self._log = get_logger("jobs", AGENT_EVENTS)

    def submit(self, command: ReconcileCommand) -> None:
        """Queue a job; where that is refused, the refusal is its end."""
        try:
            with self._lock:
                if self._table.admit(command):
                    self._futures[command.container_id] = self._pool.submit(self._run, command)
                    self._metrics.set("dnagent_reconciliations_queued", len(self._table))
        except BusyError as refusal:
            self._refuse(command, refusal)

    def cancel(self, job_id: str) -> None:
        """End a job that waits or runs; nothing happens where there is none."""
        with self._lock:
            command = self._table.find(job_id)
            future = self._futures[command.container_id] if command else None
        if command is None or future is None:
            return
        if future.cancel():
            self._forget(command)
            self._end(
                command,
                OperationInterruptedError("the job was cancelled before it began"),
                OutcomeState.INTERRUPTED,
            )
        else:
            # Not waited for: its end is reported when it comes.
            self._runner.interrupt(command.container_id, "the job was cancelled", timeout_s=0)

    def running(self) -> list[JobReport]:
        """How far the jobs are that run now."""
        return [
            running_report(job.job_id, job.container_id, progress)
            for job, progress in self._runner.running()
        ]

    def status(self) -> tuple[ReconciliationStatus, ...]:
        """The same for people."""
        found = []
        for job, progress in self._runner.running():
            at = progress or RepairProgress(phase="starting")
            found.append(
                ReconciliationStatus(
                    job.job_id, job.container_id, at.phase, at.windows_written, at.bytes_fetched
                )
            )
        return tuple(found)

    def close(self) -> None:
        """End all jobs and wait for the threads."""
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.cancel()
        self._runner.close()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, command: ReconcileCommand) -> None:
        container_id, job_id = command.container_id, command.job_id
        self._log.info(
            "reconcile_started", container_id=container_id, job_id=job_id, peers=len(command.peers)
        )
        try:
            with ExitStack() as stack:
                peers: dict[PeerId, Peer] = {}
                for address in command.peers:
                    peers[address.peer] = peer = self._connect(address)
                    stack.callback(peer.close)
                outcome = self._runner.run(
                    RepairJob(
                        job_id,
                        container_id,
                        options_of(command, self._fetches_max, self._return_to_service),
                    ),
                    lambda cancelled: self._store.open_replica(
                        container_id, job_id, cancelled=cancelled, on_bytes=self._on_scan_bytes
                    ),
                    peers,
                )
        except ReconcileError as error:
            self._forget(command)
            self._refuse(command, error)
            return
        except BaseException as error:
            # A fault of our own. It ends this job alone: the container may have
            # another, and the controller hears.
            self._forget(command)
            fault = ReconcileError(f"a fault of the agent ended the job: {error!r}")
            self._log.error(
                "reconcile_failed", container_id=container_id, job_id=job_id, **error_fields(fault)
            )
            self._end(command, fault, OutcomeState.FAILED)
            raise
        self._forget(command)
        self._note(command, outcome)
        self._on_end(report_of(job_id, outcome))

    def _note(self, command: ReconcileCommand, outcome: RepairOutcome) -> None:
        progress = outcome.progress
        self._metrics.count("dnagent_reconciliations_total", state=outcome.state.value)
        self._metrics.count("dnagent_windows_written_total", progress.windows_written)
        self._metrics.count("dnagent_repair_fetched_bytes_total", progress.bytes_fetched)
        self._metrics.count(
            "dnagent_chunks_repaired_total", progress.chunks_repaired, outcome="written"
        )
        for peer in outcome.peers:
            if peer.outcome != "ok":
                self._log.warning(
                    "peer_set_aside", job_id=command.job_id, peer=peer.peer, error_code=peer.outcome
                )
                self._metrics.count("dnagent_peer_refusals_total", reason=peer.outcome)
        fields = {
            "container_id": command.container_id,
            "job_id": command.job_id,
            "verdict": outcome.verdict.value if outcome.verdict else None,
            "windows_written": progress.windows_written,
            "bytes_fetched": progress.bytes_fetched,
        }
        match outcome.state:
            case OutcomeState.DONE:
                self._log.info("reconcile_finished", **fields)
            case OutcomeState.INTERRUPTED:
                self._log.info("reconcile_interrupted", **fields, error=outcome.message)
            case OutcomeState.FAILED | OutcomeState.REFUSED:
                self._log.error(
                    "reconcile_failed",
                    **fields,
                    error_code=outcome.error_code,
                    error=outcome.message,
                )

    def _refuse(self, command: ReconcileCommand, error: ReconcileError) -> None:
        self._metrics.count("dnagent_reconciliations_total", state="refused")
        fields = {
            **error_fields(error),
            "container_id": command.container_id,
            "job_id": command.job_id,
        }
        self._log.warning("reconcile_refused", **fields)
        self._end(command, error, OutcomeState.REFUSED)

    def _end(self, command: ReconcileCommand, error: ReconcileError, state: OutcomeState) -> None:
        self._on_end(refusal_of(command, error, state))

    def _forget(self, command: ReconcileCommand) -> None:
        with self._lock:
            self._table.forget(command)
            self._futures.pop(command.container_id, None)
            self._metrics.set("dnagent_reconciliations_queued", len(self._table))


def options_of(
    command: ReconcileCommand, fetches_max: int, return_to_service: bool
) -> ReconcileOptions:
    """How to carry out a command."""
    # Without the controller's word it is not known what the replica may claim to be, so
    # it stays as it is.
    return_to = command.container_state if return_to_service else None
    return ReconcileOptions(
        fetches_max=fetches_max, return_to=return_to, skip_final_scan=command.skip_final_scan
    )


def refusal_of(command: ReconcileCommand, error: ReconcileError, state: OutcomeState) -> JobReport:
    """The end of a job that an error kept from having an outcome."""
    report = RepairReport(error_code=error.code, message=error.message)
    return JobReport(command.job_id, command.container_id, state, report)


def report_of(job_id: str, outcome: RepairOutcome) -> JobReport:
    """How a job ended."""
    report = replace(
        RepairReport.of(outcome.progress),
        verdict=outcome.verdict,
        error_code=outcome.error_code,
        message=outcome.message,
        evidence=outcome.evidence,
        claimed_deleted=outcome.claimed_deleted,
        peers=outcome.peers,
    )
    return JobReport(job_id, outcome.container_id, outcome.state, report)


def running_report(
    job_id: str, container_id: ContainerId, progress: RepairProgress | None
) -> JobReport:
    """How far a job is that runs."""
    report = RepairReport.of(progress) if progress else RepairReport()
    return JobReport(job_id, container_id, None, report)
