"""One master: it reads all records, decides, and writes if nothing changed meanwhile.

A master keeps nothing in memory but how long it has seen records unchanged. So any
number of masters may work on one database, and each may be lost at any moment.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from replicator.master.assignment import TickReport, tick
from replicator.master.leases import RecordAges
from replicator.master.orders import (
    OperatorOrder,
    add_policy,
    delete_policy,
    end_failover,
    fail_over,
    set_desired,
    set_enabled,
    set_options,
    set_prefixes,
)
from replicator.master.ports import MasterStore
from replicator.master.records import RecordKey, RecordKind, StoredState, SyncerCapacity
from replicator.master.syncer_rules import (
    Caller,
    HeartbeatAnswer,
    HeldReport,
    Registration,
    SyncerRules,
    heartbeat,
    register,
    release,
    save_report,
)
from replicator.master.transition import Transition, known_policy
from replicator.master.views import ReplicationView, replication_view
from replicator.replication import DesiredState, Policy, PolicyId, ReplicationOptions
from runtime.errors import BusyError

# A decision is made anew if a record changed meanwhile. Masters and syncers change
# different records most of the time.
_ATTEMPTS_MAX = 20
# Called once a decision stands, and before it is written.
Recorder = Callable[[], None]
_T = TypeVar("_T")


def _unrecorded() -> None:
    """Nothing has to be on record first."""


class ReplicationMaster:
    """Answers syncers and operators from one store. Thread-safe.

    Every method may raise DatabaseError, and BusyError if records keep changing.
    """

    def __init__(
        self,
        store: MasterStore,
        rules: SyncerRules,
        monotonic_s: Callable[[], float],
        pause: Callable[[int], None],
    ) -> None:
        """`monotonic_s` is a clock that never jumps. `pause` waits before the attempt
        of a number, from 1 on.
        """
        self._store = store
        self.rules = rules
        self._monotonic_s = monotonic_s
        self._pause = pause
        self._ages = RecordAges()
        self._lock = threading.Lock()

    def read(self) -> StoredState:
        """All records now."""
        return self._read()[0]

    def tick(self) -> TickReport:
        """Do what is due; see assignment.tick."""
        return self._decide(lambda state, ages: tick(state, ages, self.rules.assignment))

    def register(self, caller: Caller, registration: Registration) -> None:
        """See syncer_rules.register."""
        key = RecordKey(RecordKind.SYNCER, caller.syncer_id)

        def rule(state: StoredState, ages: Mapping[RecordKey, int]) -> Transition[None]:
            age_ms, lease_ms = ages.get(key, 0), self.rules.lease_ms
            return register(state, caller, registration, lease_ms=lease_ms, age_ms=age_ms)

        self._decide(rule)

    def heartbeat(
        self, caller: Caller, capacity: SyncerCapacity, reports: Sequence[HeldReport]
    ) -> HeartbeatAnswer:
        """See syncer_rules.heartbeat."""
        return self._decide(
            lambda state, _: heartbeat(state, caller, capacity, reports, self.rules)
        )

    def save_report(self, caller: Caller, held: HeldReport) -> None:
        """See syncer_rules.save_report."""
        self._decide(lambda state, _: save_report(state, caller, held))

    def release(
        self, caller: Caller, released: Sequence[tuple[PolicyId, int]], *, ends: bool
    ) -> None:
        """See syncer_rules.release."""
        self._decide(lambda state, _: release(state, caller, released, ends=ends))

    def add_policy(
        self,
        policy: Policy,
        order: OperatorOrder,
        returns_policy: PolicyId | None = None,
        *,
        record: Recorder = _unrecorded,
    ) -> None:
        """See orders.add_policy."""
        self._decide(lambda state, _: add_policy(state, policy, order, returns_policy), record)

    def set_desired(
        self,
        policy_id: PolicyId,
        desired: DesiredState,
        order: OperatorOrder,
        *,
        record: Recorder = _unrecorded,
    ) -> None:
        """See orders.set_desired."""
        self._decide(lambda state, _: set_desired(state, policy_id, desired, order), record)

    def set_options(
        self,
        policy_id: PolicyId,
        options: ReplicationOptions,
        order: OperatorOrder,
        *,
        revision: int = 0,
        record: Recorder = _unrecorded,
    ) -> None:
        """See orders.set_options."""
        self._decide(
            lambda state, _: set_options(state, policy_id, options, order, revision=revision),
            record,
        )

    def set_prefixes(
        self,
        policy_id: PolicyId,
        prefixes: tuple[str, ...],
        order: OperatorOrder,
        *,
        record: Recorder = _unrecorded,
    ) -> None:
        """See orders.set_prefixes."""
        self._decide(lambda state, _: set_prefixes(state, policy_id, prefixes, order), record)

    def set_enabled(
        self, order: OperatorOrder, *, is_enabled: bool, record: Recorder = _unrecorded
    ) -> None:
        """See orders.set_enabled."""
        self._decide(lambda state, _: set_enabled(state, order, is_enabled=is_enabled), record)

    def delete_policy(
        self,
        policy_id: PolicyId,
        order: OperatorOrder,
        *,
        force: bool,
        record: Recorder = _unrecorded,
    ) -> bool:
        """See orders.delete_policy."""
        return self._decide(
            lambda state, _: delete_policy(state, policy_id, order, force=force), record
        )

    def fail_over(
        self, policy_id: PolicyId, order: OperatorOrder, *, record: Recorder = _unrecorded
    ) -> None:
        """See orders.fail_over."""
        self._decide(lambda state, _: fail_over(state, policy_id, order), record)

    def end_failover(
        self, policy_id: PolicyId, order: OperatorOrder, *, record: Recorder = _unrecorded
    ) -> None:
        """See orders.end_failover."""
        self._decide(lambda state, _: end_failover(state, policy_id, order), record)

    def replication(self, policy_id: PolicyId) -> ReplicationView:
        """One replication.

        Raises:
            PolicyNotFoundError: there is none.
        """
        state = self.read()
        return replication_view(state, known_policy(state, policy_id)[0])

    def _read(self) -> tuple[StoredState, Mapping[RecordKey, int]]:
        began_s = self._monotonic_s()
        state = self._store.read()
        with self._lock:
            return state, self._ages.note(state, began_s, self._monotonic_s())

    def _decide(
        self,
        rule: Callable[[StoredState, Mapping[RecordKey, int]], Transition[_T]],
        record: Recorder = _unrecorded,
    ) -> _T:
        is_recorded = False
        for attempt in range(1, _ATTEMPTS_MAX + 1):
            state, ages = self._read()
            decision = rule(state, ages)
            if not decision.is_change:
                return decision.answer
            if not is_recorded:
                record()
                is_recorded = True
            if self._store.write(decision.expected(state), decision.records, decision.removed):
                return decision.answer
            self._pause(attempt)
        raise BusyError("the records of the replication master keep changing")
