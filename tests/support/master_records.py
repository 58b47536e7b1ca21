"""Builders of the records of replication masters, and one master in memory."""

from collections.abc import Iterable
from dataclasses import replace

from replicator.master.assignment import AssignmentRules
from replicator.master.master import ReplicationMaster
from replicator.master.orders import OperatorOrder
from replicator.master.records import (
    Holder,
    PolicyRecord,
    Record,
    ReplicationError,
    ReplicationState,
    StoredRecord,
    StoredState,
    SyncerCapacity,
    SyncerLease,
    SyncerRecord,
)
from replicator.master.syncer_rules import (
    Caller,
    HeartbeatAnswer,
    HeldReport,
    Registration,
    SyncerRules,
)
from replicator.master.views import MasterStatus, ReplicationView, SyncerView
from replicator.replication import (
    Checkpoint,
    Condition,
    Policy,
    PolicyId,
    ReplicationFault,
    ReplicationOptions,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.port import FeedPosition
from tests.support.memory_masters import MemoryMasterStore

P1, P2 = PolicyId("p1"), PolicyId("p2")
LEASE_MS = 6_000
ALICE = OperatorOrder("operator/alice", "why")
CAPACITY = SyncerCapacity(4)


def policy(policy_id: PolicyId = P1, options: ReplicationOptions | None = None) -> Policy:
    return Policy(
        policy_id,
        f"local:/{policy_id}",
        f"local:/copy/{policy_id}",
        (),
        options or ReplicationOptions(),
    )


def report(
    index: int | None = 1,
    condition: Condition = Condition.ACTIVE,
    *,
    fault: ReplicationFault | None = None,
    log: str = "log",
) -> ReplicationReport:
    position = None if index is None else FeedPosition(log, index)
    checkpoint = Checkpoint(Stage.LIVE, position=position, prefixes=("",))
    message = "message" if fault else ""
    return ReplicationReport(condition, checkpoint, fault, message, target_probe='{"store":"x"}')


def state_of(records: Iterable[Record], now_ms: int = 1_000_000) -> StoredState:
    stored = {one.key: StoredRecord(number, one) for number, one in enumerate(records, start=1)}
    return StoredState(now_ms, stored)


class OneMaster:
    """A master on a store in memory, with both clocks in the hands of the test."""

    def __init__(self, assignment: AssignmentRules | None = None) -> None:
        self.now_s = 1_000.0
        self.jump_ms = 0
        self.store = MemoryMasterStore(lambda: int(self.now_s * 1000) + self.jump_ms)
        rules = SyncerRules(LEASE_MS, 500_000, assignment or AssignmentRules())
        self.rules = rules
        self.master = self.another()

    def another(self) -> ReplicationMaster:
        """Another master of the same records, such as after a restart."""
        return ReplicationMaster(self.store, self.rules, lambda: self.now_s, lambda _: None)

    def passes(self, seconds: float, *, beating: Iterable["OneSyncer"] = ()) -> None:
        """Let time go by in steps of a second, with a tick and heartbeats in each."""
        for _ in range(int(seconds)):
            self.now_s += 1
            for syncer in beating:
                syncer.beat()
            self.master.tick()

    def add(self, one: Policy | None = None) -> None:
        self.master.add_policy(one or policy(), ALICE)


class OneSyncer:
    """What a syncer sends, one call at a time."""

    def __init__(
        self, one: OneMaster, name: str = "s1", session: str = "a", owner: str = ""
    ) -> None:
        self._one = one
        self.caller = Caller(SyncerId(name), session, owner)
        self.capacity = CAPACITY
        self.sequence = 0
        self.last = HeartbeatAnswer()

    def register(self) -> "OneSyncer":
        self._one.master.register(self.caller, Registration("host-1", 1, self.capacity))
        return self

    def beat(self, *reports: HeldReport) -> HeartbeatAnswer:
        self.last = self._one.master.heartbeat(self.caller, self.capacity, reports)
        return self.last

    def epoch(self, policy_id: PolicyId = P1) -> int | None:
        """That of a replication by the last heartbeat; None if it has none."""
        found = [one for one in self.last.assignments if one.policy.policy_id == policy_id]
        return found[0].epoch if found else None

    def held(
        self, what: ReplicationReport, *, epoch: int | None = None, policy_id: PolicyId = P1
    ) -> HeldReport:
        self.sequence += 1
        known = self.epoch(policy_id) if epoch is None else epoch
        assert known is not None
        return HeldReport(policy_id, known, self.sequence, what)

    def save(self, what: ReplicationReport, *, epoch: int | None = None) -> None:
        self._one.master.save_report(self.caller, self.held(what, epoch=epoch))

    def with_capacity(self, capacity: SyncerCapacity) -> "OneSyncer":
        self.capacity = replace(capacity)
        return self


A_HOLDER = Holder(SyncerId("s1"), "session", "host-1", 5)
A_VIEW = ReplicationView(
    PolicyRecord(policy(), 1, 2, "operator/alice", "why", returns_policy=P2, failed_over_ms=3),
    ReplicationState(
        P1,
        1,
        2,
        A_HOLDER,
        sequence=4,
        report=replace(
            report(5, fault=ReplicationFault.TARGET_FULL),
            proven_position=FeedPosition("log", 4),
            proven_ms=6,
            lag_p99_ms=7,
        ),
        reported_ms=8,
        error=ReplicationError(ReplicationFault.TARGET_FULL, "full", 9),
        was_given=True,
    ),
    Condition.ACTIVE,
    "",
    10,
    11,
    12,
    True,
)
A_STATUS = MasterStatus(
    True,
    (
        SyncerView(
            SyncerRecord(
                SyncerId("s1"), "a", "syncer/s1", "h", 1, SyncerCapacity(2, 3), SyncerLease(4, 5)
            ),
            6,
        ),
    ),
    7,
    8,
    9,
    "sqlite",
    "push",
    "free_disk",
    10,
    11,
    "thread ticker has ended",
    True,
)
