"""A replication master in a simulation: on SQLite, with its service, and with messages
that are lost, repeated and late; it restarts, and the clock of its database jumps.
"""

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message

from merkle.errors import ReconcileError
from protos.replication_pb2_grpc import ReplicationMasterStub
from replicator.master.assignment import AssignmentMode, AssignmentRules
from replicator.master.audit import MasterAudit
from replicator.master.client import SyncerClient
from replicator.master.errors import MasterUnavailableError
from replicator.master.master import ReplicationMaster
from replicator.master.metrics import MASTER_METRICS
from replicator.master.orders import OperatorOrder
from replicator.master.records import ReplicationState, StoredState
from replicator.master.server import ReplicationMasterService
from replicator.master.sqlite_store import SqliteMasterStore
from replicator.master.syncer_rules import Caller, SyncerRules
from replicator.replication import PolicyId
from runtime.access import Access
from runtime.metrics import Metrics
from runtime.roles import RoleTable
from tests.support.master_records import A_STATUS
from tests.support.replications import StepClock

LEASE_S = 10.0
ORDER = OperatorOrder("operator", "simulated")
_LATE_MAX = 8
_AnswerT = TypeVar("_AnswerT", bound=Message)
# Method of the stub: method of the service.
_METHODS = {
    "Register": "register_syncer",
    "Heartbeat": "heartbeat",
    "SaveReport": "save_report",
    "Release": "release",
}


class MasterHost:
    """The machine of the master. `on_change` is called after each request."""

    def __init__(self, folder: Path, clock: StepClock, rng: random.Random) -> None:
        self._folder = folder
        self._clock = clock
        self._rng = rng
        # How fast the master's own clock runs: it never jumps, and is not exact.
        self._drift = 1 + rng.uniform(-0.02, 0.02)
        self._rules = SyncerRules(
            int(LEASE_S * 1000), 1_000_000, AssignmentRules(rng.choice(list(AssignmentMode)))
        )
        self._late = deque[Callable[[], object]](maxlen=_LATE_MAX)
        self.is_up = False
        """Whether it answers."""
        self.offset_ms = 0
        """How far the database's clock has jumped."""
        self.faults = 0.0
        self.on_change: Callable[[], None] = lambda: None
        folder.mkdir(parents=True)
        self._audit = MasterAudit(folder / "audit.jsonl")
        self.start()

    def start(self) -> None:
        """Begin, or begin again as another process."""
        if self.is_up:
            self.stop()
        self.store = SqliteMasterStore(self._folder, self._now_ms)
        self.master = ReplicationMaster(
            self.store, self._rules, self._monotonic_s, lambda _attempt: None
        )
        self.service = ReplicationMasterService(
            self.master,
            access=Access(RoleTable(), is_enforced=False),
            audit=self._audit,
            metrics=Metrics(MASTER_METRICS),
            status=lambda: A_STATUS,
        )
        self.is_up = True

    def stop(self) -> None:
        """End as a killed process does: what was answered is on disk."""
        self.store.close()
        self.is_up = False

    def close(self) -> None:
        """End for good."""
        self.stop()
        self._audit.close()

    def tick(self) -> None:
        """What a master does by itself; and messages arrive that were late."""
        if not self.is_up:
            return
        self.master.tick()
        if self._late and self._rng.random() < 0.2:
            with suppress(ReconcileError):
                self._late.popleft()()
        self.on_change()

    def state(self) -> StoredState:
        """All records, as an observer sees them."""
        return self.store.read()

    def replication(self, policy_id: PolicyId) -> ReplicationState | None:
        """How a replication is; None if there is none."""
        return self.state().state(policy_id)

    def order(self, call: Callable[[ReplicationMaster], object]) -> bool:
        """Whether the master took an order."""
        if not self.is_up:
            return False
        try:
            call(self.master)
        except ReconcileError:
            return False
        self.on_change()
        return True

    def client(self, caller: Caller, is_cut_off: Callable[[], bool]) -> SyncerClient:
        """The connection of a syncer's process."""
        return _LinkedClient(_Link(self, is_cut_off), caller, self._clock.monotonic_s)

    def serve(self, name: str, request: Message) -> Message:
        """Answer one request, as the server does."""
        if not self.is_up:
            raise MasterUnavailableError("the master does not run")
        context = cast(grpc.ServicerContext, None)
        answer = getattr(self.service, _METHODS[name])(request, context)
        assert isinstance(answer, Message)
        return answer

    def deliver(self, name: str, request: Message) -> Message:
        """Carry a request to the master and its answer back, with what may go wrong."""
        rng = self._rng
        if rng.random() < self.faults:
            if rng.random() < 0.5:
                self._late.append(partial(self.serve, name, request))
            raise MasterUnavailableError("a request was lost")
        answer = self.serve(name, request)
        if rng.random() < self.faults:
            with suppress(ReconcileError):
                self.serve(name, request)
        self.on_change()
        if rng.random() < self.faults:
            raise MasterUnavailableError("an answer was lost")
        return answer

    def _now_ms(self) -> int:
        return int(self._clock.monotonic * 1000) + 1_700_000_000_000 + self.offset_ms

    def _monotonic_s(self) -> float:
        return self._clock.monotonic * self._drift


class _Link:
    """Stands in the place of channels: every request crosses as bytes."""

    def __init__(self, host: MasterHost, is_cut_off: Callable[[], bool]) -> None:
        self._host = host
        self._is_cut_off = is_cut_off

    def call(
        self, method: Callable[[ReplicationMasterStub], Callable[..., _AnswerT]], request: Message
    ) -> _AnswerT:
        return method(cast(ReplicationMasterStub, self))(request, timeout=0)

    def close(self) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Message]:
        def deliver(request: Message, timeout: float) -> Message:
            del timeout
            if self._is_cut_off():
                raise MasterUnavailableError("the master cannot be reached")
            arrived = type(request).FromString(request.SerializeToString())
            answer = self._host.deliver(name, arrived)
            return type(answer).FromString(answer.SerializeToString())

        return deliver


class _LinkedClient(SyncerClient):
    """A client over a link of the simulation."""

    def __init__(self, link: _Link, caller: Caller, monotonic_s: Callable[[], float]) -> None:
        self._calls = link  # type: ignore[assignment]
        self._caller = caller
        self._monotonic_s = monotonic_s
        self._known = {}
