"""One replication at work: carries out what its stages ask, one step after the other.

Two threads drive it: `receive` reads the log of the source, `work` does all the rest,
in small units, so that an order of the operator is followed soon. Whatever is written
asks the lease first. What a store does not answer is tried again for ever. Anything
else stops the replication with its reason, until somebody resumes it.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from merkle.errors import ReconcileError
from replicator.copier import NewExecutor
from replicator.ledger import PairLedger
from replicator.pair import check_pair
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    ReplicationFault,
    ReplicationReport,
    SyncerId,
)
from replicator.stores.errors import FeedGapError, SnapshotLostError, StoreError
from replicator.stores.port import Store
from replicator.syncer.capture import ChangeCapture
from replicator.syncer.faults import FaultVerdict, verdict
from replicator.syncer.fence import fenced_store
from replicator.syncer.folder import SyncerFolder
from replicator.syncer.following import LogFollower
from replicator.syncer.lease import Lease, LeaseLostError
from replicator.syncer.limits import EngineLimits
from replicator.syncer.phase import Tools
from replicator.syncer.prefixes import ALL, uncovered
from replicator.syncer.property_reads import READS_MAX
from replicator.syncer.queue import ChangeQueue, QueueDamagedError, clear_folder
from replicator.syncer.rounds import RoundRunner
from replicator.syncer.stages import GapFound, StageMachine, WishesChanged
from replicator.syncer.store_health import StoreHealth, is_unavailable
from replicator.syncer.tally import ReplicationTally
from replicator.syncer.workers import ChangeWorkers
from runtime.disk import Disk
from runtime.errors import DiskError, InternalError, OperationInterruptedError
from runtime.rate_limit import Clock, RateLimiter

if TYPE_CHECKING:
    # These bring gRPC, which nobody else waits for.
    from replicator.syncer.target_verifier import TargetVerifier
    from replicator.verifier.client import VerifierClient

# Between two looks at what to do, when there is nothing to do.
_IDLE_S = 0.2
_RETRY_FIRST_S = 0.5
_RETRY_MAX_S = 5.0


class ReplicationEngine:
    """Keeps one target equal to its source. `receive` belongs to one thread, `work` to
    another; the rest may be called by any.
    """

    def __init__(
        self,
        policy: Policy,
        source: Store,
        target: Store,
        *,
        parent: Path,
        syncer: SyncerId,
        lease: Lease,
        checkpoint: Checkpoint | None,
        clock: Clock,
        limits: EngineLimits | None = None,
        disk: Disk | None = None,
        new_executor: NewExecutor = ThreadPoolExecutor,
        verifier: "VerifierClient | None" = None,
    ) -> None:
        """Open the folder of the pair below `parent`. `checkpoint` is the master's;
        None without a master, for that of the folder. `verifier` is a client of the one
        beside the target, which the caller closes.

        Raises:
            PairRefusedError: source and target overlap.
            BusyError: another process works on this pair here.
            ConfigError: the folder is of another syncer.
            LedgerDamagedError: the ledger cannot be read.
            DiskError: the folder cannot be read or written.
        """
        check_pair(source.address, target.address)
        self._policy = policy
        self._lease = lease
        self._clock = clock
        self._limits = limits or EngineLimits()
        self._verifier = _target_verifier(verifier, policy, lease, clock)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._wished: Policy | None = None
        self._source = source
        self._folder = SyncerFolder(
            parent, syncer=syncer, source=source.address, target=target.address, disk=disk
        )
        try:
            self._ledger = PairLedger(
                self._folder.path / "ledger", source=source.address, target=target.address
            )
            known = checkpoint if checkpoint is not None else self._folder.checkpoint()
            self._queue = self._open_queue()
        except BaseException:
            self._folder.close()
            raise
        self._rate = RateLimiter(policy.options.bytes_per_second, clock, self._wait)
        copies = self._limits.copier.copies
        threads = {"change": copies, "reader": copies, "properties": READS_MAX}
        threads |= {"lister": 1, "comparer": 1, "health": 1}
        self._executors = {name: new_executor(count, name) for name, count in threads.items()}
        fenced = fenced_store(target, lease)
        if self._verifier is not None:
            from replicator.syncer.verified_store import verified_store

            fenced = verified_store(fenced, self._verifier)
        self._build(known or Checkpoint(), fenced, new_executor)
        self._is_stale = self._gap_is_told = self._is_over = self._is_closed = False
        self._not_before_s, self._failures = 0.0, 0
        self._waiting: FaultVerdict | None = None
        self._stopped: FaultVerdict | None = None
        self._equal_as_of_ms: int | None = None

    def _build(self, known: Checkpoint, target: Store, new_executor: NewExecutor) -> None:
        """Put together what works on this pair, from a checkpoint on."""
        policy, source, lease, clock = self._policy, self._source, self._lease, self._clock
        self._proofs = None
        if self._verifier is not None:
            from replicator.syncer.index_proofs import IndexProofs

            self._proofs = IndexProofs(
                self._verifier, self._ledger, self._folder.path, clock, new_executor
            )
        self._health = StoreHealth(source, target, policy.policy_id, clock)
        tools = self._tools(target, new_executor)
        self._tally = ReplicationTally()
        self._workers = ChangeWorkers(
            self._executors["change"],
            threads=self._limits.copier.copies,
            clock=clock,
            tally=self._tally,
            judge=self._judge,
            health=self._health,
            prober=self._executors["health"],
            wait_s=self._limits.wait_s,
        )
        feed = source.feed
        self._capture = ChangeCapture(feed, self._queue, lease, clock) if feed is not None else None
        self._machine = StageMachine(
            known,
            prefixes=policy.prefixes,
            is_live=policy.options.is_live,
            has_feed=feed is not None,
            has_snapshots=source.snapshots is not None,
        )
        self._apply_options()
        self._rounds = RoundRunner(
            tools,
            self._machine,
            self._workers,
            policy=policy,
            capture=self._capture,
            folder=self._folder,
            lease=lease,
            clock=clock,
            limits=self._limits,
        )
        self._follower: LogFollower | None = None
        if self._capture is not None:
            self._follower = LogFollower(
                self._rounds,
                self._machine,
                self._workers,
                queue=self._queue,
                capture=self._capture,
                lease=lease,
                clock=clock,
                limits=self._limits,
            )

    def _tools(self, target: Store, new_executor: NewExecutor) -> Tools:
        """What all phases share."""
        return Tools(
            source=self._source,
            target=target,
            ledger=self._ledger,
            rate=self._rate,
            readers=self._executors["reader"],
            lister=self._executors["lister"],
            comparer=self._executors["comparer"],
            property_readers=self._executors["properties"],
            new_executor=new_executor,
            sleep=self._sleep,
            backoff=self._limits.backoff,
            is_stopped=self._stop.is_set,
            wake=self._note_news,
            fails_alone=self._fails_alone,
            copier_limits=self._limits.copier,
            copy_limits=self._limits.copy,
            default_acls_in_a_row=self._limits.default_acls_in_a_row,
            verifier=self._verifier,
            proofs=self._proofs,
        )

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to do any more: it was cancelled, or its lease has
        ended. Its folder is gone.
        """
        return self._is_over

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Those that it works for: orders are followed once `work` is called."""
        return self._policy.prefixes

    @property
    def entries_taken(self) -> int:
        """Changes taken from the queue so far."""
        return self._queue.taken

    def change(self, policy: Policy) -> None:
        """Follow other wishes of the operator from now on. An order to run resumes also
        what has stopped.
        """
        with self._lock:
            self._wished = policy
        if policy.desired is not DesiredState.ENABLED:
            self._stop.set()
        self._rate.change(policy.options.bytes_per_second)
        self._wake.set()

    def interrupt(self) -> None:
        """Let what runs come to its end soon, and begin nothing: `close` follows."""
        self._stop.set()
        self._wake.set()

    def close(self) -> None:
        """Stop what runs, wait for requests that are on their way, and let go of the
        folder; idempotent.
        """
        self._stop.set()
        if not self._is_closed and not self._is_over:
            with suppress(ReconcileError):
                if self._follower is not None and self._rounds.may_follow:
                    self._follower.finish()
        self._is_closed = True
        self._close_work()
        self._ledger.close()
        self._folder.close()

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to do."""
        self._wake.wait(seconds)
        self._wake.clear()

    def receive(self) -> float:
        """Read the log once; the seconds until the next reading."""
        capture = self._capture
        if capture is None or self._is_over:
            return _IDLE_S
        try:
            return capture.poll(wake=self._wake.set)
        except ReconcileError as error:
            capture.error = error
            if isinstance(error, DiskError):
                # What the source has to say cannot be kept here.
                self._stopped = verdict(error, source_answers=True)
            self._wake.set()
            return 1.0

    def work(self) -> float:
        """Do one unit of work; the seconds after which there may be more."""
        if self._is_over:
            return _IDLE_S
        wait_s = self._work()
        self._equal_as_of_ms = self._oldest_unproven_ms()
        return wait_s

    def _work(self) -> float:
        self._take_wishes()
        desired = self._policy.desired
        try:
            if desired is DesiredState.CANCELLED:
                self._cancel()
                return _IDLE_S
            if desired is DesiredState.PAUSED or self._stopped is not None:
                self._workers.pump(may_start=False)
                return _IDLE_S
            self._lease.check()
            return self._advance()
        except OperationInterruptedError:
            return 0.0
        except LeaseLostError as error:
            self._fence(error)
        except ReconcileError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - this is the loop of a runner
            self._fail(InternalError(f"{type(error).__name__}: {error}"))
        return _IDLE_S

    def report(self) -> ReplicationReport:
        """What is known of it now."""
        numbers, workers, capture = self._tally.numbers(), self._workers, self._capture
        waiting = self._waiting or workers.waiting or self._receive_verdict()
        stopped = self._stopped or workers.stopped
        trouble = stopped or waiting or workers.key_fault
        if trouble is None and self._verifier is not None:
            # All goes on without it.
            trouble = self._verifier.trouble
        proof = self._rounds.proof
        return ReplicationReport(
            condition=self._condition(stopped, waiting),
            checkpoint=self._rounds.checkpoints.with_failures(self._machine.checkpoint),
            fault=trouble.fault if trouble is not None else None,
            message=trouble.message if trouble is not None else "",
            queued=self._queue.count,
            applied=numbers.applied,
            duplicates=capture.duplicates if capture is not None else 0,
            failed=workers.failed,
            sent_bytes=numbers.sent_bytes,
            proven_position=proof.position,
            proven_ms=proof.proven_ms,
            proof_level=proof.level,
            differences=proof.differences,
            oldest_unproven_ms=self._equal_as_of_ms,
            last_applied_ms=numbers.last_applied_ms,
            lag_p50_ms=numbers.lag_p50_ms,
            lag_p99_ms=numbers.lag_p99_ms,
            failed_keys=workers.failed_keys,
        )

    def _condition(self, stopped: FaultVerdict | None, waiting: FaultVerdict | None) -> Condition:
        desired = self._policy.desired
        if desired is DesiredState.CANCELLED:
            return Condition.CANCELLED
        if stopped is not None:
            return Condition.ERROR
        if desired is DesiredState.PAUSED:
            return Condition.PAUSED if self._workers.is_idle else Condition.ACTIVE
        return Condition.WAITING if waiting is not None else Condition.ACTIVE

    def _oldest_unproven_ms(self) -> int | None:
        """Every change made before this time is at the target; None where unknown."""
        if uncovered(self._policy.prefixes, self._machine.checkpoint.prefixes):
            # Nobody knows of what age the changes are below a prefix that was added.
            return None
        if self._follower is None or not self._machine.is_live:
            return self._rounds.equal_as_of_ms
        return self._follower.equal_as_of_ms

    @property
    def _knows_applied(self) -> bool:
        return self._follower is not None and self._follower.knows_applied

    @property
    def _awaits_answer(self) -> bool:
        """Whether a store was asked something, and has not answered: a retry that was
        merely begun is no sign that it will.
        """
        follower = self._follower
        return self._rounds.awaits_answer or (follower is not None and follower.awaits_answer)

    def _open_queue(self) -> ChangeQueue:
        path = self._folder.path / "queue"
        try:
            return ChangeQueue(path, self._folder.disk)
        except QueueDamagedError:
            # The log is read again from the checkpoint, or there is a gap.
            clear_folder(path, self._folder.disk)
            return ChangeQueue(path, self._folder.disk)

    def _take_wishes(self) -> None:
        with self._lock:
            wished, self._wished = self._wished, None
        if wished is None:
            return
        before, self._policy = self._policy, wished
        self._rounds.policy = wished
        self._apply_options()
        if wished.desired is DesiredState.ENABLED:
            self._stop.clear()
            self._stopped, self._waiting, self._not_before_s = None, None, 0.0
            self._workers.resume()
        others = (before.prefixes, before.options) != (wished.prefixes, wished.options)
        if others and wished.desired is not DesiredState.CANCELLED:
            if uncovered(wished.prefixes, before.prefixes or ALL):
                self._forget_proof()
            event = WishesChanged(wished.prefixes, wished.options.is_live, self._knows_applied)
            self._rounds.tell(event)
            self._is_stale = True

    def _forget_proof(self) -> None:
        """Keys are wanted of which no comparison has said anything so far."""
        self._rounds.forget_proof()
        if self._follower is not None:
            self._follower.prove_soon()

    def _apply_options(self) -> None:
        self._rate.change(self._policy.options.bytes_per_second)
        if self._capture is not None:
            self._capture.entries_max = self._policy.options.queue_entries_max
            self._capture.prefixes = self._policy.prefixes

    def _advance(self) -> float:
        """One unit of what is to be done."""
        capture, rounds, workers = self._capture, self._rounds, self._workers
        if self._is_stale:
            self._is_stale = False
            rounds.end_phase()
        if capture is not None and capture.has_gap and not self._gap_is_told:
            self._gap_is_told = True
            rounds.tell(GapFound(self._knows_applied))
        if capture is not None and not capture.has_gap:
            self._gap_is_told = False
        done = 0
        if self._clock.monotonic_s() >= self._not_before_s:
            done += rounds.advance()
            if self._follower is not None and rounds.may_follow:
                done += self._follower.follow()
            if not self._awaits_answer:
                self._failures, self._waiting = 0, None
        done += workers.pump(may_start=True)
        if workers.lost is not None:
            raise workers.lost
        rounds.checkpoints.note_failures()
        if done or not workers.is_idle:
            return 0.0
        return min(_IDLE_S, rounds.idle_s) if rounds.idle_s else _IDLE_S

    def _fail(self, error: ReconcileError) -> None:
        """What follows from an error of a request."""
        found = self._judge(error)
        if found.fault is ReplicationFault.STATE_DAMAGED and isinstance(error, QueueDamagedError):
            # It is read again from the log, and compared where the log has a gap.
            self._rounds.end_phase()
            self._queue.clear()
            self._rounds.tell(GapFound(self._knows_applied))
            return
        if isinstance(error, SnapshotLostError) and self._rounds.lose_snapshot():
            return
        if found.waits:
            wait_s = min(_RETRY_FIRST_S * 2 ** min(self._failures, 10), _RETRY_MAX_S)
            self._not_before_s = self._clock.monotonic_s() + wait_s
            self._failures += 1
            self._waiting = found
        else:
            self._stopped = found

    def _judge(self, error: ReconcileError) -> FaultVerdict:
        answers = True
        if isinstance(error, StoreError):
            try:
                next(self._source.lister.list_objects(""), None)
            except ReconcileError:
                answers = False
        return verdict(error, source_answers=answers)

    def _fails_alone(self, error: StoreError) -> bool:
        """Whether an error is of one object, so that others go on."""
        if is_unavailable(error):
            return self._health.both_answer()
        return not isinstance(error, SnapshotLostError) and self._judge(error).is_of_key

    def _receive_verdict(self) -> FaultVerdict | None:
        """Why the log cannot be read, where that is all that is wrong."""
        error = self._capture.error if self._capture is not None else None
        if error is None or isinstance(error, FeedGapError):
            return None
        return verdict(error, source_answers=False)

    def _fence(self, error: LeaseLostError) -> None:
        """Another syncer may work on this: stop, and remove what is kept of it."""
        self._stopped = verdict(error, source_answers=True)
        self._end()

    def _cancel(self) -> None:
        """Let go of everything but what is at the target (OZ-126)."""
        if not self._is_over:
            for snapshot in self._machine.snapshots:
                self._rounds.delete_snapshot(snapshot)
            self._rounds.delete_left()
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._stop.set()
        self._close_work()
        self._ledger.close()
        self._folder.remove()

    def _close_work(self) -> None:
        with suppress(ReconcileError):
            self._rounds.end_phase()
        if self._proofs is not None:
            self._proofs.close()
        for executor in self._executors.values():
            executor.shutdown(wait=True, cancel_futures=True)

    def _note_news(self) -> None:
        """Something was read: the work goes on, whatever it waits for."""
        self._wake.set()
        self._workers.wake()

    def _wait(self, seconds: float) -> bool:
        self._sleep(seconds)
        return self._stop.is_set()

    def _sleep(self, seconds: float) -> None:
        self._stop.wait(seconds)


def _target_verifier(
    client: "VerifierClient | None", policy: Policy, lease: Lease, clock: Clock
) -> "TargetVerifier | None":
    if client is None:
        return None
    from replicator.syncer.target_verifier import TargetVerifier

    return TargetVerifier(client, policy, lease, clock)
