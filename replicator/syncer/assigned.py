"""One assigned replication at work, from the opening of its stores to its end.

It has a thread of its own: a store that does not answer, or a request that is on its
way when the work must stop, keeps no heartbeat from being sent.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from merkle.errors import ReconcileError
from replicator.events import SYNCER_EVENTS
from replicator.master.syncer_rules import Assignment, HeldReport
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationFault,
    ReplicationReport,
    SyncerId,
)
from replicator.stores.address import check_outside
from replicator.stores.errors import StoreError
from replicator.stores.opening import open_store
from replicator.stores.port import Store
from replicator.stores.probe_memory import ProbeMemory
from replicator.syncer.duties import HeldReplication
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.faults import FaultVerdict, verdict
from replicator.syncer.folder import folder_name
from replicator.syncer.lease import LeaseLostError
from replicator.syncer.limits import EngineLimits, follower_copies
from replicator.syncer.master_lease import MasterLease
from replicator.syncer.target_probe import TargetProbe
from replicator.syncer.target_verifier import follower_client
from replicator.syncer.threads import ReplicationThreads
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from runtime.errors import BusyError, DiskError, InternalError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.rate_limit import Clock
from runtime.tls_files import Tls

# Between two looks at a replication that runs.
_LOOK_S = 0.5
_RETRY_FIRST_S = 0.5
_RETRY_MAX_S = 30.0
# Objects written at once, and parts; Copier reads as many besides.
_PARTS = 8
_log = get_logger("syncer", SYNCER_EVENTS)


class AssignedReplication:
    """A replication that the master gave to this syncer in one epoch. Thread-safe."""

    def __init__(
        self,
        assignment: Assignment,
        lease: MasterLease,
        *,
        parent: Path,
        syncer: SyncerId,
        clock: Clock,
        copies: int,
        guard: ThreadGuard,
        tls: Tls | None = None,
        insecure: bool = False,
    ) -> None:
        """Begin to work. `parent` holds the folders of all replications, `copies` is
        how many objects are copied at once. `tls` and `insecure` are for the verifier
        beside the target.
        """
        self.policy_id: PolicyId = assignment.policy.policy_id
        self._epoch = assignment.epoch
        self._checkpoint = assignment.checkpoint
        self._lease = lease
        self._probe = TargetProbe(clock, assignment.target_probe)
        self._parent = parent
        self._syncer = syncer
        self._clock = clock
        self._limits = EngineLimits(copier=follower_copies(-(-copies // 2), _PARTS))
        self._guard = guard
        self._tls = tls
        self._insecure = insecure
        self._lock = threading.Lock()
        self._policy = assignment.policy
        self._changes = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._engine: ReplicationEngine | None = None
        self._trouble: FaultVerdict | None = None
        self._last: ReplicationReport | None = None
        self._taken = 0
        self._is_lost = False
        self._told: tuple[Condition, ReplicationFault | None] | None = None
        lease.describe = self.report
        self._thread = threading.Thread(
            target=self._run, name=f"replication-{self.policy_id}", daemon=True
        )
        self._thread.start()

    def held(self) -> HeldReplication:
        """What the syncer decides by."""
        has_ended = not self._thread.is_alive()
        last = self._last
        is_cancelled = has_ended and last is not None and last.condition is Condition.CANCELLED
        with self._lock:
            return HeldReplication(self._policy, self._epoch, has_ended, is_cancelled)

    def change(self, policy: Policy) -> None:
        """Follow other wishes of the operator from now on."""
        with self._lock:
            self._policy = policy
            self._changes += 1
            engine = self._engine
        if engine is not None:
            engine.change(policy)
        self._wake.set()

    def stop(self, *, is_lost: bool) -> None:
        """Let what runs come to its end. `is_lost`: it is another's, so that nothing is
        written any more, and what is kept of it here is removed.
        """
        if is_lost:
            self._is_lost = True
            self._lease.revoke()
        self._stop.set()
        self._wake.set()
        engine = self._engine
        if engine is not None and not is_lost:
            engine.interrupt()

    def join(self) -> None:
        """Wait until nothing runs any more."""
        self._thread.join()

    def report(self) -> ReplicationReport:
        """How it is now."""
        return replace(self._report(), target_probe=self._probe.text)

    def _report(self) -> ReplicationReport:
        engine, trouble = self._engine, self._trouble
        if engine is not None and trouble is None:
            return engine.report()
        if self._last is not None:
            return self._last
        paused = self._policy.desired is DesiredState.PAUSED
        condition = Condition.PAUSED if paused else Condition.ACTIVE
        if trouble is not None:
            condition = Condition.WAITING if trouble.waits else Condition.ERROR
        return ReplicationReport(
            condition,
            self._checkpoint,
            trouble.fault if trouble else None,
            trouble.message if trouble else "",
        )

    def next_report(self) -> HeldReport | None:
        """What the next heartbeat says of it, and the log if that is news."""
        found = self._lease.report()
        if found is not None:
            self._tell(found.report)
        return found

    @property
    def entries_taken(self) -> int:
        """Changes taken from the queue so far."""
        engine = self._engine
        return self._taken + (engine.entries_taken if engine is not None else 0)

    def _tell(self, report: ReplicationReport) -> None:
        known = report.condition, report.fault
        if known == self._told:
            return
        self._told = known
        fields = {
            "replication": self.policy_id,
            "condition": report.condition.value,
            "stage": report.checkpoint.stage.value,
            "fault": report.fault.value if report.fault else "",
            "reason": report.message,
        }
        if report.condition is Condition.ERROR:
            _log.error("replication_stopped", **fields)
        elif report.condition is Condition.WAITING:
            _log.warning("replication_waits", **fields)
        else:
            _log.info("replication_changed", **fields)

    def _run(self) -> None:
        """Work until it is over or must stop, whatever becomes of an attempt."""
        failures = 0
        while not self._stop.is_set():
            changes = self._changes
            try:
                with self._guard.named_errors():
                    if self._is_wanted() and self._work():
                        return
                self._wait_for_change(changes, None)
                failures = 0
            except LeaseLostError:
                return
            except ReconcileError as error:
                self._note(error)
                _log.warning(
                    "replication_failed", replication=self.policy_id, **error_fields(error)
                )
                waits = self._trouble is not None and self._trouble.waits
                wait_s = min(_RETRY_FIRST_S * 2 ** min(failures, 10), _RETRY_MAX_S)
                self._wait_for_change(changes, wait_s if waits else None)
                failures += 1

    def _is_wanted(self) -> bool:
        return self._policy.desired is not DesiredState.PAUSED

    def _work(self) -> bool:
        """Open the stores, and follow the source until the end; False where it has to
        begin again, as with another verifier.
        """
        with ExitStack() as opened:
            policy = self._policy
            check_outside(self._parent, policy.source)
            check_outside(self._parent, policy.target)
            source = opened.enter_context(_opened(policy.source, may_write=False, create=False))
            # Later a missing target is not made anew: its disk may not be mounted.
            is_new = self._checkpoint == Checkpoint()
            target = opened.enter_context(
                _opened(policy.target, may_write=True, create=is_new, memory=self._probe.memory)
            )
            self._probe.note_opened()
            verifier = None
            if policy.options.verifier:
                verifier = opened.enter_context(
                    follower_client(policy.options.verifier, tls=self._tls, insecure=self._insecure)
                )
            with self._guard.idle():
                is_over = self._follow(source, target, verifier)
            if self._is_lost:
                # A running engine finds out by itself, a paused one does not (OZ-050).
                name = folder_name(source.address, target.address)
                Disk().remove_folder(self._parent / name)
            return is_over

    def _follow(self, source: Store, target: Store, verifier: VerifierClient | None) -> bool:
        with self._lock:
            policy = self._policy
        engine = ReplicationEngine(
            policy,
            source,
            target,
            parent=self._parent,
            syncer=self._syncer,
            lease=self._lease,
            checkpoint=self._checkpoint,
            clock=self._clock,
            limits=self._limits,
            verifier=verifier,
        )
        with ReplicationThreads(engine, self.policy_id) as threads:
            with self._lock:
                self._engine, self._trouble = engine, None
                if self._policy != policy:
                    engine.change(self._policy)
            try:
                while not engine.is_over and threads.is_alive() and not self._stop.is_set():
                    self._wake.wait(_LOOK_S)
                    self._wake.clear()
                    if self._is_wanted() and self._probe.is_due:
                        self._check_target(policy.target)
                    if self._policy.options.verifier != policy.options.verifier:
                        return False
                if not (engine.is_over or self._stop.is_set()):
                    raise InternalError(f"a thread of replication {self.policy_id} has ended")
                return True
            finally:
                self._last = engine.report()
                self._checkpoint = self._last.checkpoint
                self._taken += engine.entries_taken
                self._engine = None

    def _check_target(self, address: str) -> None:
        """Ask the target once more what it does, beside the work.

        Raises:
            _StoreNotOpenedError: it does other things than what it was opened for.
        """
        if self._probe.has_changed(address):
            reason = "the target does other things than before: it is opened again"
            raise _StoreNotOpenedError(
                FaultVerdict(ReplicationFault.TARGET_UNAVAILABLE, reason, waits=True)
            )

    def _note(self, error: ReconcileError) -> None:
        self._last = None
        if isinstance(error, BusyError):
            self._trouble = FaultVerdict(
                ReplicationFault.STATE_DAMAGED, f"{error.message} {error.hint}".strip(), waits=True
            )
            return
        if isinstance(error, _StoreNotOpenedError):
            self._trouble = error.verdict
            return
        found = verdict(error, source_answers=True)
        self._trouble = FaultVerdict(
            found.fault, found.message, waits=found.waits or isinstance(error, InternalError)
        )

    def _wait_for_change(self, changes: int, seconds: float | None) -> None:
        """Wait for so long, or until the operator wants something."""
        with self._guard.idle():
            while not self._stop.is_set() and self._changes == changes:
                if not self._wake.wait(seconds) and seconds is not None:
                    return
                self._wake.clear()


@contextmanager
def _opened(
    address: str, *, may_write: bool, create: bool, memory: ProbeMemory | None = None
) -> Iterator[Store]:
    """One side of a replication.

    Raises:
        _StoreNotOpenedError: it cannot be opened.
    """
    with ExitStack() as opened:
        try:
            store = opened.enter_context(
                open_store(address, may_write=may_write, create=create, memory=memory)
            )
        except ReconcileError as error:
            raise _StoreNotOpenedError(_opening_verdict(error, is_source=not may_write)) from error
        yield store


def _opening_verdict(error: ReconcileError, *, is_source: bool) -> FaultVerdict:
    if isinstance(error, DiskError):
        # That of a bucket in a folder, and not the syncer's own.
        error = StoreError(error.message, hint=error.hint, **error.facts)
    found, fault = verdict(error, source_answers=not is_source), ReplicationFault
    if found.is_of_key:
        # No key was asked for: the bucket itself is not what it should be.
        missing = fault.SOURCE_MISSING if is_source else fault.TARGET_MISSING
        return FaultVerdict(missing, found.message)
    return found


class _StoreNotOpenedError(ReconcileError):
    """A side of a replication cannot be opened; `verdict` says what follows."""

    code = "store_not_opened"

    def __init__(self, found: FaultVerdict) -> None:
        super().__init__(found.message)
        self.verdict = found
