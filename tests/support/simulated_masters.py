"""Replication masters and syncers in one thread, driven by a seed: the masters are the
product's own, on one database whose clock jumps; messages are lost, repeated and late.

An observer knows what each syncer believes, and checks after every step that no two
believe that they have one replication, that the database agrees with whoever does, and
that nothing that was acknowledged goes back.
"""

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from merkle.errors import ReconcileError
from replicator.master.assignment import AssignmentMode, AssignmentRules, Strategy
from replicator.master.errors import PolicyNotFoundError, PolicyRefusedError
from replicator.master.master import ReplicationMaster
from replicator.master.orders import OperatorOrder
from replicator.master.records import Record, RecordKey, StoredState, SyncerCapacity
from replicator.master.syncer_rules import (
    Assignment,
    Caller,
    HeartbeatAnswer,
    HeldReport,
    Registration,
    SyncerRules,
)
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.port import FeedPosition
from replicator.syncer.lease import LeaseLostError
from runtime.errors import BusyError
from tests.support.memory_masters import MemoryMasterStore

LEASE_MS = 6_000
# What a syncer leaves unused: clocks differ.
MARGIN_S = 0.6
# A message that takes longer is as good as lost.
_LATE_S_MAX = 20.0
_ORDER = OperatorOrder("operator", "simulated")


@dataclass(frozen=True)
class MasterFaults:
    """What may happen, by its chance at each step or message."""

    lost: float = 0.05
    repeated: float = 0.05
    late: float = 0.05
    restart: float = 0.01
    stopped: float = 0.02
    clock_jump: float = 0.01
    interleaved: float = 0.2
    drift: float = 0.02


PEACE = MasterFaults(0, 0, 0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class MasterParts:
    """How masters and syncers are made; a planted bug replaces one."""

    store: Callable[["MasterStorm"], MemoryMasterStore] = lambda storm: MemoryMasterStore(
        storm.database_ms
    )
    master_clock: Callable[["MasterStorm", float], float] = lambda storm, drift: storm.now_s * drift
    # From when the request was sent, when its answer came, and the lease.
    counts_until: Callable[[float, float, int], float] = lambda sent_s, _answered_s, lease_ms: (
        sent_s + lease_ms / 1000 - MARGIN_S
    )


class _InterleavedStore:
    """Between a master's look and its write, something else may happen."""

    def __init__(self, storm: "MasterStorm") -> None:
        self._storm = storm

    def read(self) -> StoredState:
        return self._storm.store.read()

    def write(
        self,
        expected: Mapping[RecordKey, int],
        records: Sequence[Record],
        removed: Sequence[RecordKey] = (),
    ) -> bool:
        self._storm.interleave()
        return self._storm.store.write(expected, records, removed)

    def close(self) -> None:
        pass


@dataclass
class _Work:
    """A replication as its syncer has it."""

    assignment: Assignment
    sequence: int
    index: int
    ended: bool = False


@dataclass
class SimulatedSyncer:
    """What the process of a syncer does, as the product's does it: one request for the
    lease at a time, an answer to an older one is not for it.
    """

    storm: "MasterStorm"
    syncer_id: SyncerId
    drift: float
    session: str = ""
    work: dict[PolicyId, _Work] = field(default_factory=dict)
    until_s: float = 0.0
    asked: int = 0
    asked_s: float = 0.0
    next_s: float = 0.0
    stopped_until_s: float = 0.0

    def clock_s(self) -> float:
        return self.storm.now_s * self.drift

    def believes(self, policy_id: PolicyId) -> bool:
        """Whether it would write for a replication now."""
        work = self.work.get(policy_id)
        return work is not None and not work.ended and self.clock_s() < self.until_s

    def restart(self) -> None:
        self.session = f"session-{next(self.storm.numbers)}"
        self.work.clear()
        self.until_s, self.next_s, self.asked = 0.0, 0.0, 0

    def run(self) -> None:
        """One step, unless it is stopped."""
        if self.storm.now_s < self.stopped_until_s:
            return
        clock_s = self.clock_s()
        if clock_s >= self.until_s:
            self.work.clear()
        if clock_s >= self.next_s:
            self._ask(clock_s)
        for policy_id in list(self.work):
            if clock_s < self.until_s and self.storm.rng.random() < 0.5:
                self._save(policy_id)

    def _ask(self, clock_s: float) -> None:
        self.asked, self.asked_s = next(self.storm.numbers), clock_s
        # An answer that does not come in time is not waited for.
        self.next_s = clock_s + 2.0
        caller, capacity = Caller(self.syncer_id, self.session), SyncerCapacity(3)
        if not self.work and clock_s >= self.until_s:
            registration = Registration("host", 1, capacity)
            self.storm.send(
                lambda master: master.register(caller, registration),
                partial(self._registered, self.session, self.asked, clock_s),
            )
            return
        self.storm.send(
            lambda master: master.heartbeat(caller, capacity, ()),
            partial(self._answered, self.session, self.asked, clock_s),
        )

    def _renew(self, sent_s: float) -> None:
        until_s = self.storm.parts.counts_until(sent_s, self.clock_s(), LEASE_MS)
        self.until_s = max(self.until_s, until_s)
        self.next_s = sent_s + LEASE_MS / 4000

    def _is_mine(self, session: str, asked: int) -> bool:
        """Whether an answer is that to the last request, and its first one."""
        if (session, asked) != (self.session, self.asked):
            return False
        self.asked = 0
        return True

    def _registered(
        self, session: str, asked: int, sent_s: float, answer: object, error: ReconcileError | None
    ) -> None:
        del answer
        if self._is_mine(session, asked) and error is None:
            self._renew(sent_s)

    def _answered(
        self,
        session: str,
        asked: int,
        sent_s: float,
        answer: object,
        error: ReconcileError | None,
    ) -> None:
        if not self._is_mine(session, asked):
            return
        if isinstance(error, LeaseLostError):
            self.work.clear()
            self.until_s, self.next_s = 0.0, 0.0
            return
        if error is not None:
            return
        assert isinstance(answer, HeartbeatAnswer)
        self._renew(sent_s)
        has = {one.policy.policy_id: one for one in answer.assignments}
        dropped = [
            (policy_id, work.assignment.epoch)
            for policy_id, work in self.work.items()
            if policy_id not in has or has[policy_id].epoch != work.assignment.epoch
        ]
        for policy_id, _ in dropped:
            del self.work[policy_id]
        if dropped:
            caller = Caller(self.syncer_id, self.session)
            self.storm.send(
                lambda master: master.release(caller, dropped, ends=False), lambda *_: None
            )
        for policy_id, one in has.items():
            if policy_id not in self.work:
                position = one.checkpoint.position
                self.work[policy_id] = _Work(one, 0, position.index if position else 0)
            else:
                self.work[policy_id].assignment = one

    def _save(self, policy_id: PolicyId) -> None:
        work = self.work[policy_id]
        if work.ended:
            return
        work.index += self.storm.rng.randrange(3)
        work.sequence += 1
        condition = {
            DesiredState.ENABLED: Condition.ACTIVE,
            DesiredState.PAUSED: Condition.PAUSED,
            DesiredState.CANCELLED: Condition.CANCELLED,
        }[work.assignment.policy.desired]
        checkpoint = Checkpoint(Stage.LIVE, position=FeedPosition("log", work.index))
        held = HeldReport(
            policy_id,
            work.assignment.epoch,
            work.sequence,
            ReplicationReport(condition, checkpoint),
        )
        work.ended = condition is Condition.CANCELLED
        caller = Caller(self.syncer_id, self.session)
        self.storm.send(
            lambda master: master.save_report(caller, held),
            partial(self._saved, policy_id, work.assignment.epoch, work.index),
        )

    def _saved(
        self,
        policy_id: PolicyId,
        epoch: int,
        index: int,
        answer: object,
        error: ReconcileError | None,
    ) -> None:
        del answer
        # Not of one that was deleted, and added anew by the same name.
        if error is None and epoch > self.storm.added_in[policy_id]:
            self.storm.acknowledged[policy_id] = max(
                self.storm.acknowledged.get(policy_id, 0), index
            )


class MasterStorm:
    """Masters, syncers, operators and the observer of one seed."""

    def __init__(
        self,
        seed: int,
        *,
        masters: int = 2,
        syncers: int = 3,
        policies: int = 4,
        faults: MasterFaults = MasterFaults(),
        parts: MasterParts = MasterParts(),
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1_000.0
        self.numbers = count(1)
        self.faults, self.parts = faults, parts
        self._offset_ms = 0
        self.store = parts.store(self)
        rules = AssignmentRules(
            self.rng.choice(list(AssignmentMode)),
            self.rng.choice(list(Strategy)),
            self.rng.choice([0, 0, 2]),
        )
        self.rules = SyncerRules(LEASE_MS, 1_000_000, rules)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._is_interleaved = False
        self.acknowledged: dict[PolicyId, int] = {}
        self.added_in: dict[PolicyId, int] = {}
        self.takeovers = 0
        self.jumps = 0
        self._drifts = [self._drift() for _ in range(masters)]
        self.masters = [self._master(drift) for drift in self._drifts]
        self.syncers = [
            SimulatedSyncer(self, SyncerId(f"s{number}"), self._drift())
            for number in range(syncers)
        ]
        for syncer in self.syncers:
            syncer.restart()
        self.policy_ids = [PolicyId(f"p{number}") for number in range(policies)]
        for policy_id in self.policy_ids:
            self._add(policy_id)

    def database_ms(self) -> int:
        return 1_700_000_000_000 + int(self.now_s * 1000) + self._offset_ms

    def send(
        self,
        call: Callable[[ReplicationMaster], object],
        on_answer: Callable[[object, ReconcileError | None], None],
    ) -> None:
        """Send a request to some master: it may be lost, repeated or late, and so may
        its answer.
        """
        times = 0 if self._happens(self.faults.lost) else 1
        times += self._happens(self.faults.repeated)
        for _ in range(times):
            self._later(partial(self._serve, call, on_answer))

    def interleave(self) -> None:
        """Let another thing happen in the middle of a decision."""
        if self._is_interleaved or not self._events or not self._happens(self.faults.interleaved):
            return
        self._is_interleaved = True
        try:
            _, _, event = self._events.pop(self.rng.randrange(len(self._events)))
            heapq.heapify(self._events)
            event()
        finally:
            self._is_interleaved = False

    def step(self) -> None:
        """A tenth of a second: what is due happens, in the order of a network."""
        self.now_s += 0.1
        while self._events and self._events[0][0] <= self.now_s:
            heapq.heappop(self._events)[2]()
            self.check()
        for syncer in self.syncers:
            syncer.run()
            self.check()
        for master in self.masters:
            if self.rng.random() < 0.2:
                self.takeovers += len(master.tick().taken_over)
                self.check()
        self._break_something()
        self.check()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def heal(self) -> None:
        """No faults from now on."""
        self.faults = PEACE
        for syncer in self.syncers:
            syncer.stopped_until_s = 0.0

    def check(self) -> None:
        """The invariants: see the module."""
        state = self.store.read()
        for found in state.states:
            believers = [one for one in self.syncers if one.believes(found.policy_id)]
            assert len(believers) <= 1, f"{found.policy_id}: {[s.syncer_id for s in believers]}"
            last = found.holder or (found.leaving.holder if found.leaving else None)
            for one in believers:
                who = (last.syncer_id, last.session) if last else None
                assert who == (one.syncer_id, one.session), f"{found} and {one.syncer_id}"
            position = found.report.checkpoint.position if found.report else None
            at = position.index if position else 0
            assert at >= self.acknowledged.get(found.policy_id, 0)

    def order(self) -> None:
        """An operator does something."""
        policy_id = self.rng.choice(self.policy_ids)
        master = self.rng.choice(self.masters)
        order: Callable[[], object] = self.rng.choice(
            [
                lambda: master.set_desired(policy_id, DesiredState.PAUSED, _ORDER),
                lambda: master.set_desired(policy_id, DesiredState.ENABLED, _ORDER),
                lambda: master.fail_over(policy_id, _ORDER),
                lambda: master.end_failover(policy_id, _ORDER),
                lambda: master.set_enabled(_ORDER, is_enabled=self.rng.random() < 0.8),
                lambda: self._delete(master, policy_id),
                lambda: self._add(policy_id),
            ]
        )
        with suppress(PolicyRefusedError, PolicyNotFoundError, BusyError):
            order()
        self.check()

    def _delete(self, master: ReplicationMaster, policy_id: PolicyId) -> None:
        master.delete_policy(policy_id, _ORDER, force=self.rng.random() < 0.5)

    def _add(self, policy_id: PolicyId) -> None:
        policy = Policy(policy_id, f"local:/{policy_id}", f"local:/copy/{policy_id}")
        master = self.rng.choice(self.masters)
        master.add_policy(policy, _ORDER)
        # Of one that was there before nothing is left.
        self.acknowledged.pop(policy_id, None)
        self.added_in[policy_id] = self.store.read().next_round.number - 1

    def _serve(
        self,
        call: Callable[[ReplicationMaster], object],
        on_answer: Callable[[object, ReconcileError | None], None],
    ) -> None:
        master = self.rng.choice(self.masters)
        answer: object = None
        error: ReconcileError | None = None
        try:
            answer = call(master)
        except ReconcileError as refused:
            error = refused
        if not self._happens(self.faults.lost):
            self._later(partial(on_answer, answer, error))

    def _later(self, event: Callable[[], None]) -> None:
        delay_s = self.rng.uniform(0.001, 0.3)
        if self._happens(self.faults.late):
            delay_s = self.rng.uniform(0.3, _LATE_S_MAX)
        heapq.heappush(self._events, (self.now_s + delay_s, next(self.numbers), event))

    def _master(self, drift: float) -> ReplicationMaster:
        return ReplicationMaster(
            _InterleavedStore(self),
            self.rules,
            lambda: self.parts.master_clock(self, drift),
            lambda _attempt: None,
        )

    def _break_something(self) -> None:
        if self._happens(self.faults.restart):
            at = self.rng.randrange(len(self.masters))
            self.masters[at] = self._master(self._drifts[at])
        if self._happens(self.faults.restart):
            self.rng.choice(self.syncers).restart()
        if self._happens(self.faults.stopped):
            syncer = self.rng.choice(self.syncers)
            syncer.stopped_until_s = self.now_s + self.rng.uniform(0.5, 3 * LEASE_MS / 1000)
        if self._happens(self.faults.clock_jump):
            self.jumps += 1
            self._offset_ms += self.rng.choice([-86_400_000, -5_000, 5_000, 20_000, 86_400_000])

    def _drift(self) -> float:
        return 1.0 + self.rng.uniform(-self.faults.drift, self.faults.drift)

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance


def without_comparison(storm: MasterStorm) -> MemoryMasterStore:
    """A planted bug: what changed meanwhile is written over."""

    class Blind(MemoryMasterStore):
        def write(
            self,
            expected: Mapping[RecordKey, int],
            records: Sequence[Record],
            removed: Sequence[RecordKey] = (),
        ) -> bool:
            del expected
            return super().write({}, records, removed)

    return Blind(storm.database_ms)


PLANTED: Mapping[str, MasterParts] = {
    "no compare-and-set": replace(MasterParts(), store=without_comparison),
    "the database's clock alone": replace(
        MasterParts(), master_clock=lambda storm, _drift: storm.database_ms() / 1000
    ),
    "a lease from when its answer came": replace(
        MasterParts(),
        counts_until=lambda _sent_s, answered_s, lease_ms: answered_s + lease_ms / 1000 - MARGIN_S,
    ),
    "a lease that is never over": replace(
        MasterParts(), counts_until=lambda sent_s, _answered_s, lease_ms: sent_s + lease_ms
    ),
}
