"""A syncer in a simulation: the heartbeats of its process, and one replication, in one
thread. It does what SyncerProcess and AssignedReplication do, whose threads a seed
cannot order.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from replicator.master.errors import MasterUnavailableError
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Assignment, Caller
from replicator.replication import (
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationReport,
    SyncerId,
)
from replicator.stores.port import Store
from replicator.syncer.duties import HeldReplication, duties
from replicator.syncer.folder import folder_name
from replicator.syncer.lease import LeaseLostError, LeaseTimer
from replicator.syncer.master_lease import MasterLease
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from runtime.errors import BusyError
from tests.support.master_host import MasterHost
from tests.support.replications import LaterExecutor, Replication, StepClock, step_limits

CAPACITY = SyncerCapacity(1)
_MARGIN_SHARE = 0.25
_RETRY_S = 0.5


class StormSyncer:
    """One machine with a syncer. `replication` is what it works on."""

    def __init__(
        self,
        name: str,
        parent: Path,
        host: MasterHost,
        clock: StepClock,
        stores: Callable[[str], Store],
    ) -> None:
        """`stores` opens a side of a replication."""
        self.name = name
        self.parent = parent
        self._host = host
        self._clock = clock
        self._stores = stores
        self._sessions = 0
        self.is_cut_off = False
        self.later = LaterExecutor()
        self.replication: Replication | None = None
        self.verifier: Callable[[], VerifierClient] | None = None
        """Makes a client of the one beside the target; None without one."""
        self.begin()

    def begin(self) -> None:
        """Begin as a new process."""
        self._sessions += 1
        self.session = f"{self.name}-{self._sessions}"
        caller = Caller(SyncerId(self.name), self.session)
        self._client = self._host.client(caller, lambda: self.is_cut_off)
        self._timer: LeaseTimer | None = None
        self._beat_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self.replication = None
        self._assignment: Assignment | None = None
        self.lease: MasterLease | None = None
        self.policy: Policy | None = None
        self._last: ReplicationReport | None = None
        self._is_lost = self._has_ended = False

    @property
    def epoch(self) -> int:
        """Of what it has; 0 where it has nothing."""
        return self.lease.epoch if self.lease is not None else 0

    @property
    def policy_id(self) -> PolicyId:
        """Of what it has."""
        assert self.policy is not None
        return self.policy.policy_id

    @property
    def is_beat_due(self) -> bool:
        """Whether it is time for a heartbeat."""
        return self._clock.monotonic_s() >= self._beat_s

    def beat(self) -> None:
        """One exchange with the master."""
        self._beat_s = self._clock.monotonic_s() + _RETRY_S
        try:
            if self._timer is None:
                self._register()
                return
            if not self._timer.left_s():
                raise LeaseLostError("no master has renewed the lease in time")
            reports = [self.lease.report()] if self.lease is not None else []
            work = self._client.heartbeat(CAPACITY, [one for one in reports if one])
            self._beat_s = self._clock.monotonic_s() + work.lease.heartbeat_s
            self._timer.renew(asked_s=work.lease.asked_s, duration_s=work.lease.duration_s)
            self._follow(work.assignments)
        except LeaseLostError:
            self._lose_lease()
        except (BusyError, MasterUnavailableError):
            pass

    def look(self) -> None:
        """What the thread of a replication does when it looks."""
        if self.lease is None or self._has_ended:
            return
        if self._is_lost:
            self._close()
            self._has_ended = True
        elif self.replication is not None and self.replication.engine.is_over:
            self._last, self.replication = self.replication.engine.report(), None
            self._has_ended = True
        elif self.replication is None:
            assert self.policy is not None
            if self.policy.desired is not DesiredState.PAUSED:
                self._open(self.policy)

    def stop(self) -> None:
        """End in order, and give everything back."""
        if self.replication is not None:
            self._close()
        with suppress(MasterUnavailableError):
            self._client.release((), ends=True)
        self.begin()

    def kill(self) -> None:
        """End as a killed process does."""
        if self.replication is not None:
            self.replication.kill()
        self.begin()

    def report(self) -> ReplicationReport:
        """How the replication is."""
        if self.replication is not None:
            return self.replication.engine.report()
        if self._last is not None:
            return self._last
        assert self._assignment is not None
        assert self.policy is not None
        paused = self.policy.desired is DesiredState.PAUSED
        condition = Condition.PAUSED if paused else Condition.ACTIVE
        return ReplicationReport(condition, self._assignment.checkpoint)

    def _register(self) -> None:
        if self.lease is not None:
            if not self._has_ended:
                return
            self._forget()
        lease = self._client.register("host", 1, CAPACITY)
        self._timer = LeaseTimer(self._clock, margin_s=_MARGIN_SHARE * lease.duration_s)
        self._timer.renew(asked_s=lease.asked_s, duration_s=lease.duration_s)

    def _follow(self, assigned: tuple[Assignment, ...]) -> None:
        held = dict[PolicyId, HeldReplication]()
        if self.policy is not None:
            is_cancelled = self._last is not None and self._last.condition is Condition.CANCELLED
            held[self.policy_id] = HeldReplication(
                self.policy, self.epoch, self._has_ended, self._has_ended and is_cancelled
            )
        due = duties(assigned, held)
        for _ in due.ending:
            self._end(is_lost=True)
        for policy in due.changed:
            self.policy = policy
            if self.replication is not None:
                self.replication.policy = policy
                self.replication.engine.change(policy)
        if due.released:
            self._client.release(due.released)
            self._forget()
        for assignment in due.started:
            assert self._timer is not None
            self._assignment, self.policy = assignment, assignment.policy
            self.lease = MasterLease(self._client, self._timer, assignment)
            self.lease.describe = self.report

    def _lose_lease(self) -> None:
        if self._timer is not None:
            self._timer.revoke()
        self._timer = None
        self._end(is_lost=True)

    def _end(self, *, is_lost: bool) -> None:
        if self.lease is not None and is_lost:
            self.lease.revoke()
            self._is_lost = True

    def _close(self) -> None:
        replication = self.replication
        if replication is None:
            return
        self._last = replication.engine.report()
        replication.engine.interrupt()
        replication.engine.close()
        self.replication = None
        self.later = LaterExecutor()
        if self._is_lost:
            name = folder_name(replication.source.address, replication.target.address)
            Disk().remove_folder(self.parent / name)

    def _open(self, policy: Policy) -> None:
        assert self._assignment is not None
        assert self.lease is not None
        self.later = LaterExecutor()
        checkpoint = self._last.checkpoint if self._last else self._assignment.checkpoint
        self.replication = Replication(
            self._stores(policy.source),
            self._stores(policy.target),
            self.parent,
            options=policy.options,
            prefixes=policy.prefixes,
            lease=self.lease,
            clock=self._clock,
            limits=replace(step_limits(), prove_every_s=20.0),
            checkpoint=checkpoint,
            later=self.later,
            syncer=SyncerId(self.name),
            policy_id=policy.policy_id,
            verifier=self.verifier() if self.verifier is not None else None,
        )
        if policy.desired is not DesiredState.ENABLED:
            self.replication.engine.change(policy)
