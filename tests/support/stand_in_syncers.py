"""A stand-in for the process of a syncer: it registers, beats, and reports a position
that grows, and notes from when to when it believed to have each replication.
"""

import threading
import time
import uuid
from collections.abc import Sequence
from itertools import combinations

from merkle.errors import ReconcileError
from replicator.master.client import SyncerClient
from replicator.master.errors import MasterUnavailableError
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Caller, HeldReport
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    PolicyId,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.port import FeedPosition
from runtime.errors import BusyError, DatabaseError
from runtime.tls_files import Tls
from tests.support.waiting import wait_until

_CONDITIONS = {
    DesiredState.ENABLED: Condition.ACTIVE,
    DesiredState.PAUSED: Condition.PAUSED,
    DesiredState.CANCELLED: Condition.CANCELLED,
}


class StandInSyncer:
    """One process's worth of a syncer, in a thread of the test; a context manager."""

    def __init__(self, name: str, masters: Sequence[str], *, tls: Tls | None = None) -> None:
        self.syncer_id = SyncerId(name)
        self.session = uuid.uuid4().hex
        self._client = SyncerClient(masters, Caller(self.syncer_id, self.session), tls=tls)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        # Of each belief: the replication, its epoch, and from when to when.
        self.beliefs: list[list[object]] = []
        self.acknowledged: dict[PolicyId, int] = {}
        self.desired: dict[PolicyId, DesiredState] = {}
        self.failures: list[ReconcileError] = []

    def __enter__(self) -> "StandInSyncer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Fall silent at once, as after kill -9: nothing is released."""
        self._end()
        self._client.close()

    def leave(self) -> None:
        """End as a process that is stopped: what it has is free at once."""
        self._end()
        self._client.release((), ends=True)
        self._client.close()

    def _end(self) -> None:
        self._stopping.set()
        self._thread.join()
        # Nothing of this process can write any more.
        self._note([], 0.0)

    def has(self, policy_id: PolicyId) -> bool:
        """Whether it believes that it has a replication now."""
        now_s = time.monotonic()
        return any(one[0] == policy_id and _end(one) > now_s for one in list(self.beliefs))

    def await_work(self, policy_id: PolicyId) -> None:
        """Wait until it has a replication."""
        wait_until(lambda: self.has(policy_id), f"{self.syncer_id} to get {policy_id}")

    def _run(self) -> None:
        capacity, reports = SyncerCapacity(8), dict[PolicyId, int]()
        heartbeat_s, has_lease = 0.1, False
        sequence = 0
        while not self._stopping.wait(heartbeat_s):
            try:
                if not has_lease:
                    lease = self._client.register("localhost", 1, capacity)
                    has_lease, heartbeat_s = True, lease.heartbeat_s
                work = self._client.heartbeat(capacity, ())
                self._note([(one.policy.policy_id, one.epoch) for one in work.assignments],
                           work.lease.asked_s + work.lease.duration_s * 0.9)  # fmt: skip
                for one in work.assignments:
                    policy_id, position = one.policy.policy_id, one.checkpoint.position
                    start = max(reports.get(policy_id, 0), position.index if position else 0)
                    reports[policy_id] = start + 1
                    self.desired[policy_id] = one.policy.desired
                    sequence += 1
                    checkpoint = Checkpoint(Stage.LIVE, position=FeedPosition("log", start + 1))
                    report = ReplicationReport(_CONDITIONS[one.policy.desired], checkpoint)
                    self._client.save_report(HeldReport(policy_id, one.epoch, sequence, report))
                    self.acknowledged[policy_id] = start + 1
            except (MasterUnavailableError, BusyError, DatabaseError) as error:
                self.failures.append(error)
            except ReconcileError as error:
                self.failures.append(error)
                self._note([], 0.0)
                has_lease = False

    def _note(self, has: list[tuple[PolicyId, int]], until_s: float) -> None:
        now_s = time.monotonic()
        for belief in self.beliefs:
            if (belief[0], belief[1]) not in has:
                belief[3] = min(_end(belief), now_s)
        for policy_id, epoch in has:
            known = [one for one in self.beliefs if one[:2] == [policy_id, epoch]]
            if known and _end(known[-1]) > now_s:
                known[-1][3] = until_s
            else:
                self.beliefs.append([policy_id, epoch, now_s, until_s])


def assert_one_at_a_time(syncers: Sequence[StandInSyncer]) -> None:
    """No two of them ever believed at once that they had one replication (OZ-037)."""
    for ours, theirs in combinations(syncers, 2):
        for mine in ours.beliefs:
            for other in theirs.beliefs:
                if mine[0] == other[0]:
                    assert _end(mine) <= _start(other) or _end(other) <= _start(mine), (mine, other)


def _start(belief: list[object]) -> float:
    assert isinstance(belief[2], float)
    return belief[2]


def _end(belief: list[object]) -> float:
    assert isinstance(belief[3], float)
    return belief[3]
