"""Reconcile commands on this datanode: queued, run a few at a time, and told of until their end.

One job a container: a second command for a container whose job waits or runs is refused, as Ozone drops it, and the
refusal is reported like any other end, so that the controller never waits for a job that nobody does.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

from dnagent.heartbeat import PeerAddress, ReconcileCommand
from dnagent.heartbeat import Progress as JobProgress
from dnagent.ports import Peer, ReconciliationStatus
from dnagent.requests import Outcome, OutcomeState, Progress, ReconcileOptions
from dnagent.runner import Job, Runner
from dnagent.store import ReplicaStore
from merkle.errors import BusyError, InterruptedRepairError, ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos import controller_pb2
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics

# Ozone's own limit on a datanode's command queue.
JOBS_MAX = 5000


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
        on_end: Callable[[JobProgress], None],
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
        self._jobs: dict[ContainerId, tuple[ReconcileCommand, Future[None]]] = {}
        self._log = get_logger("jobs")

    def submit(self, command: ReconcileCommand) -> None:
        """Queue a job; where that is refused, the refusal is its end."""
        container_id = command.container_id
        with self._lock:
            if container_id in self._jobs:
                other = self._jobs[container_id][0].job_id
                refusal = BusyError(f"container {container_id} has job {other} already", container_id=container_id)
            elif len(self._jobs) >= JOBS_MAX:
                refusal = BusyError(f"{JOBS_MAX} jobs are waiting already", limit=JOBS_MAX)
            else:
                self._jobs[container_id] = command, self._pool.submit(self._run, command)
                self._metrics.set("dnagent_reconciliations_queued", len(self._jobs))
                return
        self._refuse(command, refusal)

    def cancel(self, job_id: str) -> None:
        """End a job that waits or runs; nothing happens where there is none."""
        with self._lock:
            found = next((held for held in self._jobs.values() if held[0].job_id == job_id), None)
        if found is None:
            return
        command, future = found
        if future.cancel():
            self._forget(command)
            self._end(command, InterruptedRepairError("the job was cancelled before it began"), "interrupted")
        else:
            # Not waited for: its end is reported when it comes.
            self._runner.interrupt(command.container_id, "the job was cancelled", timeout_s=0)

    def running(self) -> list[JobProgress]:
        """How far the jobs are that run now."""
        return [
            JobProgress(job.job_id, False, progress_message(job.job_id, job.container_id, progress))
            for job, progress in self._runner.running()
        ]

    def status(self) -> tuple[ReconciliationStatus, ...]:
        """The same for people."""
        found = []
        for job, progress in self._runner.running():
            at = progress or Progress("starting")
            found.append(
                ReconciliationStatus(job.job_id, job.container_id, at.phase, at.windows_written, at.bytes_fetched)
            )
        return tuple(found)

    def close(self) -> None:
        """End all jobs and wait for the threads."""
        with self._lock:
            futures = [future for _, future in self._jobs.values()]
        for future in futures:
            future.cancel()
        self._runner.close()
        self._pool.shutdown(cancel_futures=True)

    def _run(self, command: ReconcileCommand) -> None:
        container_id, job_id = command.container_id, command.job_id
        self._log.info("reconcile_started", container_id=container_id, job_id=job_id, peers=len(command.peers))
        try:
            with ExitStack() as stack:
                peers: dict[PeerId, Peer] = {}
                for address in command.peers:
                    peers[address.peer] = peer = self._connect(address)
                    stack.callback(peer.close)
                outcome = self._runner.run(
                    Job(job_id, container_id, self._options(command)),
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
            # A fault of our own. It ends this job alone: the container may have another, and the controller hears.
            self._forget(command)
            fault = ReconcileError(f"a fault of the agent ended the job: {error!r}")
            self._log.error("reconcile_failed", container_id=container_id, job_id=job_id, **error_fields(fault))
            self._end(command, fault, "failed")
            raise
        self._forget(command)
        self._note(command, outcome)
        self._on_end(JobProgress(job_id, True, outcome_message(job_id, outcome)))

    def _options(self, command: ReconcileCommand) -> ReconcileOptions:
        # Without the controller's word it is not known what the replica may claim to be, so it stays as it is.
        return_to = command.container_state if self._return_to_service else None
        return ReconcileOptions(fetches_max=self._fetches_max, return_to=return_to, spare_scan=command.spare_scan)

    def _note(self, command: ReconcileCommand, outcome: Outcome) -> None:
        progress = outcome.progress
        self._metrics.count("dnagent_reconciliations_total", state=outcome.state.value)
        self._metrics.count("dnagent_windows_written_total", progress.windows_written)
        self._metrics.count("dnagent_repair_fetched_bytes_total", progress.bytes_fetched)
        self._metrics.count("dnagent_chunks_repaired_total", progress.chunks_repaired, outcome="written")
        for peer in outcome.peers:
            if peer.outcome != "ok":
                self._log.warning("peer_set_aside", job_id=command.job_id, peer=peer.peer, error_code=peer.outcome)
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
                self._log.error("reconcile_failed", **fields, error_code=outcome.error_code, error=outcome.message)

    def _refuse(self, command: ReconcileCommand, error: ReconcileError) -> None:
        self._metrics.count("dnagent_reconciliations_total", state="refused")
        fields = {**error_fields(error), "container_id": command.container_id, "job_id": command.job_id}
        self._log.warning("reconcile_refused", **fields)
        self._end(command, error, "refused")

    def _end(self, command: ReconcileCommand, error: ReconcileError, state: str) -> None:
        message = controller_pb2.ReconcileProgress(
            job_id=command.job_id,
            container_id=command.container_id,
            state=state,
            error_code=error.code,
            message=error.message,
        )
        self._on_end(JobProgress(command.job_id, True, message))

    def _forget(self, command: ReconcileCommand) -> None:
        with self._lock:
            self._jobs.pop(command.container_id, None)
            self._metrics.set("dnagent_reconciliations_queued", len(self._jobs))


def progress_message(
    job_id: str, container_id: ContainerId, progress: Progress | None
) -> controller_pb2.ReconcileProgress:
    """How far a job is."""
    message = controller_pb2.ReconcileProgress(job_id=job_id, container_id=container_id, state="running")
    if progress is not None:
        _fill(message, progress)
    return message


def outcome_message(job_id: str, outcome: Outcome) -> controller_pb2.ReconcileProgress:
    """How a job ended."""
    message = controller_pb2.ReconcileProgress(
        job_id=job_id,
        container_id=outcome.container_id,
        state=outcome.state.value,
        verdict=outcome.verdict.value if outcome.verdict else "",
        error_code=outcome.error_code,
        message=outcome.message,
        evidence=[
            controller_pb2.Evidence(kind=one.kind.value, block_id=one.block_id, offset=one.offset, detail=one.detail)
            for one in outcome.evidence
        ],
        claimed_deleted_block_ids=outcome.claimed_deleted,
        peers=[
            controller_pb2.PeerOutcome(datanode_id=one.peer, outcome=one.outcome, bytes_fetched=one.bytes_fetched)
            for one in outcome.peers
        ],
    )
    _fill(message, outcome.progress)
    return message


def _fill(message: controller_pb2.ReconcileProgress, progress: Progress) -> None:
    message.bytes_fetched = progress.bytes_fetched
    message.bytes_written = progress.bytes_written
    message.windows_written = progress.windows_written
    message.bytes_planned = progress.bytes_planned
    message.blocks_done = progress.blocks_done
    message.blocks_planned = progress.blocks_planned
    message.chunks_repaired = progress.chunks_repaired
    message.tombstones_adopted = progress.tombstones_adopted
