"""Reconcile commands on this datanode: a queue, a few threads, and progress reports.

How many run at once, and how fast each may fetch, can change while they run.

A container has one job at a time. A command for a container that has another job is
refused; Ozone drops it. The refusal is reported like any other result, so that the
controller never waits for a job that does not run. A command that is sent again while
its job waits or runs is ignored. `JobTable` makes these decisions, without threads;
`Jobs` runs the admitted jobs.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace

from dnagent.events import AGENT_EVENTS
from dnagent.heartbeat import CancelCommand, JobReport, PeerAddress, ReconcileCommand
from dnagent.metrics import PROCESS
from dnagent.ports import ReconciliationStatus
from dnagent.store import ReplicaStore
from merkle.errors import ReconcileError
from merkle.outcome import OutcomeState, RepairOutcome, RepairProgress, RepairReport
from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError
from repair.audit import AuditLog, outcome_facts
from repair.ports import Peer, ReplicaAccess
from repair.replica_plan import PlanChangedError, PlannedReplica, ReplicaPlan
from repair.requests import ReconcileOptions
from repair.runner import RepairJob, Runner
from runtime.errors import BusyError, DiskError, InternalError, OperationInterruptedError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics
from runtime.rate_limit import Clock, RateLimiter, SystemClock

# Ozone's own limit on a datanode's command queue.
JOBS_MAX = 5000
# The most that the settings allow to run at once.
_RUNNING_MAX = 64


class JobTable:
    """The waiting and running job of each container. Not thread-safe."""

    def __init__(self) -> None:
        self._commands: dict[ContainerId, ReconcileCommand] = {}
        self._running: set[ContainerId] = set()

    def admit(self, command: ReconcileCommand) -> bool:
        """Add a job; returns False if it is already in the table.

        Raises:
            BusyError: the container has another job, or too many jobs wait.
        """
        container_id = command.container_id
        held = self._commands.get(container_id)
        if held is not None and held.job_id == command.job_id:
            return False
        if held is not None:
            raise BusyError(
                f"container {container_id} already has job {held.job_id}", container_id=container_id
            )
        if len(self._commands) >= JOBS_MAX:
            raise BusyError(f"{JOBS_MAX} jobs are already waiting", limit=JOBS_MAX)
        self._commands[container_id] = command
        return True

    def start_next(self, running_max: int) -> ReconcileCommand | None:
        """The job that starts now, oldest first; None if none waits, or if so many run
        already.
        """
        if len(self._running) >= running_max:
            return None
        for container_id, command in self._commands.items():
            if container_id not in self._running:
                self._running.add(container_id)
                return command
        return None

    def is_running(self, command: ReconcileCommand) -> bool:
        """Whether the job has started."""
        return command.container_id in self._running

    def find(self, job_id: str) -> ReconcileCommand | None:
        """The command of a waiting or running job; None if there is no such job."""
        return next(
            (command for command in self._commands.values() if command.job_id == job_id), None
        )

    def remove(self, command: ReconcileCommand) -> None:
        """Remove a job that ended."""
        self._commands.pop(command.container_id, None)
        self._running.discard(command.container_id)

    def __len__(self) -> int:
        return len(self._commands)


@dataclass(slots=True, eq=False)
class _Control:
    """What can be done to a job from outside, and what it has read so far."""

    limiter: RateLimiter
    # Set when the job is to stop, and when it has ended: nothing waits for bandwidth
    # after it.
    stop: threading.Event = field(default_factory=threading.Event)
    bytes_scanned: int = 0


class Jobs:
    """The reconcile commands of this datanode. Thread-safe."""

    def __init__(
        self,
        runner: Runner,
        store: ReplicaStore,
        *,
        connect: Callable[[PeerAddress], Peer],
        running_max: int,
        fetches_max: int,
        return_to_service: bool,
        on_scan_bytes: Callable[[int], None],
        on_end: Callable[[JobReport], None],
        audit: AuditLog,
        plan_of: Callable[[str], ReplicaPlan],
        metrics: Metrics,
        limit_bytes_per_second: Callable[[], int] = lambda: 0,
        clock: Clock | None = None,
    ) -> None:
        """`connect` opens a connection to a peer. `on_end` gets each job's final
        report. `plan_of` returns the plan of a digest, or raises PlanUnknownError.
        `limit_bytes_per_second` has the limit of all jobs, which `runner` keeps.
        """
        self._runner = runner
        self._store = store
        self._connect = connect
        self._fetches_max = fetches_max
        self._return_to_service = return_to_service
        self._on_scan_bytes = on_scan_bytes
        self._on_end = on_end
        self._audit = audit
        self._plan_of = plan_of
        self._metrics = metrics
        self._limit_bytes_per_second = limit_bytes_per_second
        self._clock = clock or SystemClock()
        # It starts a thread only when a job needs one.
        self._pool = ThreadPoolExecutor(_RUNNING_MAX, thread_name_prefix="job")
        self._lock = threading.Lock()
        self._running_max = running_max
        self._is_closed = False
        self._table = JobTable()
        self._controls: dict[ContainerId, _Control] = {}
        self._log = get_logger("jobs", AGENT_EVENTS)
        self._guard = ThreadGuard("job", metrics, PROCESS.thread_failures)

    def submit(self, command: ReconcileCommand) -> None:
        """Queue a job. A refusal is reported as the job's result."""
        try:
            with self._lock:
                if self._table.admit(command):
                    stop = threading.Event()
                    limiter = RateLimiter(command.bytes_per_second, self._clock, stop.wait)
                    self._controls[command.container_id] = _Control(limiter, stop)
                    self._start_waiting()
                    self._metrics.set("dnagent_reconciliations_queued", len(self._table))
        except BusyError as refusal:
            self._refuse(command, refusal)

    def cancel(self, cancel: CancelCommand) -> None:
        """Cancel a waiting or running job. Without such a job report that it does not
        run: the command to start it may have been lost.
        """
        with self._lock:
            command = self._table.find(cancel.job_id)
            is_running = command is not None and self._table.is_running(command)
            if command is not None:
                # Before the interrupt, which finds no run while the job connects to its
                # peers.
                self._controls[command.container_id].stop.set()
                if not is_running:
                    self._drop(command)
        if command is None:
            self._on_end(absence_report(cancel))
        elif not is_running:
            self._report_error(
                command,
                OperationInterruptedError("the job was cancelled before it started"),
                OutcomeState.INTERRUPTED,
            )
        else:
            # Do not wait: `_run` reports the result.
            self._runner.interrupt(command.container_id, "the job was cancelled", timeout_s=0)

    def throttle(self, job_id: str, bytes_per_second: int) -> None:
        """Change the rate of a waiting or running job, 0 for no limit; without such a
        job, do nothing.
        """
        with self._lock:
            command = self._table.find(job_id)
            control = self._controls[command.container_id] if command else None
        if control is not None:
            control.limiter.change(bytes_per_second)

    def set_running_max(self, running_max: int) -> None:
        """Change how many jobs run at once. Those that run are not interrupted."""
        with self._lock:
            self._running_max = running_max
            self._start_waiting()

    def running(self) -> list[JobReport]:
        """Progress reports of the running jobs."""
        return [
            self._with_limits(running_report(job.job_id, job.container_id, progress))
            for job, progress in self._runner.running()
        ]

    def status(self) -> tuple[ReconciliationStatus, ...]:
        """The running jobs, for the agent's status."""
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
            self._is_closed = True
            for control in self._controls.values():
                control.stop.set()
        self._runner.close()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, command: ReconcileCommand) -> None:
        container_id, job_id = command.container_id, command.job_id
        control = self._controls[container_id]

        def on_scan_bytes(length_bytes: int) -> None:
            control.bytes_scanned += length_bytes
            self._on_scan_bytes(length_bytes)

        self._log.info(
            "reconcile_started", container_id=container_id, job_id=job_id, peers=len(command.peers)
        )
        try:
            with ExitStack() as stack, self._guard.named_errors():
                self._record_begin(command)
                plan = self._plan(command)
                peers: dict[PeerId, Peer] = {}
                for address in command.peers:
                    peers[address.peer] = peer = self._connect(address)
                    stack.callback(peer.close)
                outcome = self._runner.run(
                    RepairJob(
                        job_id,
                        container_id,
                        self._options(command, plan),
                        plan.rules if plan else None,
                    ),
                    lambda cancelled: self._open(command, plan, cancelled, on_scan_bytes),
                    peers,
                    is_cancelled=control.stop.is_set,
                    reserve=control.limiter.take,
                )
        except OperationInterruptedError as error:
            self._remove(command)
            self._report_error(command, error, OutcomeState.INTERRUPTED)
            return
        except InternalError as fault:
            # A defect of the agent ends only this job. It is reported, and another job
            # may follow.
            self._remove(command)
            self._log.error(
                "reconcile_failed", container_id=container_id, job_id=job_id, **error_fields(fault)
            )
            self._report_error(command, fault, OutcomeState.FAILED)
            return
        except ReconcileError as error:
            self._remove(command)
            self._refuse(command, error)
            return
        report = self._with_limits(report_of(job_id, outcome))
        self._remove(command)
        self._record_end(command, outcome)
        # Reported first: nothing may keep the controller waiting.
        self._on_end(report)
        self._record_outcome(command, outcome)

    def _plan(self, command: ReconcileCommand) -> ReplicaPlan | None:
        if not command.plan:
            return None
        plan = self._plan_of(command.plan)
        if plan.container_id != command.container_id:
            text = f"plan {command.plan[:12]} is of container {plan.container_id}"
            raise PlanChangedError(text, container_id=command.container_id)
        return plan

    def _options(self, command: ReconcileCommand, plan: ReplicaPlan | None) -> ReconcileOptions:
        if plan is not None:
            return plan.options(self._fetches_max, command.container_state)
        return options_of(command, self._fetches_max, self._return_to_service)

    def _open(
        self,
        command: ReconcileCommand,
        plan: ReplicaPlan | None,
        cancelled: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> ReplicaAccess:
        replica = self._store.open_replica(
            command.container_id, command.job_id, cancelled=cancelled, on_bytes=on_bytes
        )
        return PlannedReplica(plan, replica) if plan else replica

    def _record_begin(self, command: ReconcileCommand) -> None:
        self._audit.begin(
            "reconcile",
            container=command.container_id,
            job=command.job_id,
            who=command.requested_by,
            why=command.reason,
            root=self._root(command.container_id),
            peers=[one.peer for one in command.peers],
            plan=command.plan,
        )

    def _record_end(self, command: ReconcileCommand, outcome: RepairOutcome) -> None:
        try:
            self._audit.end(
                container=command.container_id,
                job=command.job_id,
                state=outcome.state.value,
                root=self._root(command.container_id),
                facts=outcome_facts(outcome),
            )
        except DiskError as error:
            # All writes have their lines. The end is reported all the same.
            self._log.error("audit_failed", job_id=command.job_id, **error_fields(error))

    def _root(self, container_id: ContainerId) -> int | None:
        with suppress(ContainerNotFoundError):
            return self._store.volume_of(container_id).replica(container_id).data_checksum
        return None

    def _record_outcome(self, command: ReconcileCommand, outcome: RepairOutcome) -> None:
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
        try:
            self._audit.refused(
                who=command.requested_by,
                what=f"reconcile {command.container_id}, job {command.job_id}",
                why=f"{error.code}: {error.message}",
            )
        except DiskError as failure:
            self._log.error("audit_failed", job_id=command.job_id, **error_fields(failure))
        self._report_error(command, error, OutcomeState.REFUSED)

    def _report_error(
        self, command: ReconcileCommand, error: ReconcileError, state: OutcomeState
    ) -> None:
        self._on_end(error_report(command, error, state))

    def _remove(self, command: ReconcileCommand) -> None:
        with self._lock:
            self._drop(command)
            self._start_waiting()

    def _drop(self, command: ReconcileCommand) -> None:
        self._table.remove(command)
        # A thread of the runner may still wait for bandwidth.
        self._controls.pop(command.container_id).stop.set()
        self._metrics.set("dnagent_reconciliations_queued", len(self._table))

    def _start_waiting(self) -> None:
        while not self._is_closed and (command := self._table.start_next(self._running_max)):
            self._pool.submit(self._run, command)

    def _with_limits(self, report: JobReport) -> JobReport:
        """The report with the bytes that the job's scans have read, and its limit."""
        with self._lock:
            control = self._controls.get(report.container_id)
        if control is None:
            return report
        limits = (control.limiter.bytes_per_second, self._limit_bytes_per_second())
        whole = replace(
            report.report,
            bytes_scanned=control.bytes_scanned,
            limit_bytes_per_second=min((limit for limit in limits if limit), default=0),
        )
        return replace(report, report=whole)


def options_of(
    command: ReconcileCommand, fetches_max: int, return_to_service: bool
) -> ReconcileOptions:
    """The options of the reconciliation that a command requests."""
    # Without a container state from the controller the allowed state is unknown, so the
    # replica keeps its own.
    return_to = command.container_state if return_to_service else None
    return ReconcileOptions(
        fetches_max=fetches_max, return_to=return_to, skip_final_scan=command.skip_final_scan
    )


def error_report(
    command: ReconcileCommand, error: ReconcileError, state: OutcomeState
) -> JobReport:
    """The final report of a job that ended with an error, without an outcome."""
    report = RepairReport(error_code=error.code, message=error.message)
    return JobReport(command.job_id, command.container_id, state, report)


def absence_report(cancel: CancelCommand) -> JobReport:
    """The answer to a command to cancel a job that this agent does not have."""
    report = RepairReport(error_code="interrupted", message="the agent has no such job")
    return JobReport(
        cancel.job_id, cancel.container_id, OutcomeState.INTERRUPTED, report, is_absent=True
    )


def report_of(job_id: str, outcome: RepairOutcome) -> JobReport:
    """The final report of a job with this outcome."""
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
    """The report of a running job."""
    report = RepairReport.of(progress) if progress else RepairReport()
    return JobReport(job_id, container_id, None, report)
