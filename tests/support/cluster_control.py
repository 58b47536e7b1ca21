"""What the simulated cluster has between its controller and its datanodes: processes
that die, a network that loses.

The code is the product's: the controller with its service, outbox and wire messages;
the agents' heartbeat state, job table and command messages. Only what has threads or
sockets is replaced, by lists that the simulation picks from.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from threading import Lock
from types import MappingProxyType
from typing import cast

import grpc

from dnagent.heartbeat import HeartbeatState, OutgoingHeartbeat, ReconcileCommand
from dnagent.jobs import JobTable
from dnagent.messages import request_of
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from merkle.windows import prove
from protos import controller_pb2 as pb
from repair.reconciliation import Reconciliation
from repair.requests import Event, ReconcileOptions, Request
from repair.runner import Prove
from runtime.metrics import Metrics
from runtime.rate_limit import steady_clock
from scm.controller import Controller
from scm.jobs import Job, JobId
from scm.metrics import CONTROLLER_METRICS
from scm.policy import Visit
from scm.ports import JobStore
from scm.rules import Rules
from scm.server import ControllerService, Outbox
from tests.support.cluster_reports import MemoryAudit
from tests.support.identities import ANYBODY
from tests.support.memory import CrashError, RepairableReplica
from tests.support.observer import Ledger, ViolationError
from tests.support.run_witness import RunWitness

_CONTEXT = cast(grpc.ServicerContext, None)
_METRICS = Metrics(CONTROLLER_METRICS)
# Opens the job store anew for each life of the controller.
OpenStore = Callable[[], AbstractContextManager[JobStore]]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of the product that run; a planted bug takes the place of one."""

    machine: Callable[..., Reconciliation] = Reconciliation
    prove: Prove = prove
    replica: Callable[..., RepairableReplica] = RepairableReplica
    refuse_gaps: bool = True
    heartbeats: type[HeartbeatState] = HeartbeatState
    request_of: Callable[..., pb.HeartbeatRequest] = request_of
    controller: Callable[..., Controller] = Controller
    # The controller's clock, of the machine's wall clock and its monotonic one.
    clock: Callable[[Callable[[], float], Callable[[], float]], Callable[[], float]] = steady_clock


@dataclass(slots=True, eq=False)
class Run:
    """A reconciliation under way in an agent."""

    command: ReconcileCommand
    options: ReconcileOptions
    machine: Reconciliation
    witness: RunWitness
    # How long each file was when it began.
    lengths: Mapping[BlockId, int]
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    fetched_from: dict[tuple[BlockId, int], set[PeerId]] = field(default_factory=dict)


class AgentProcess:
    """One life of an agent: what dies with it."""

    def __init__(
        self, peer: PeerId, life: int, parts: Parts, *, replicas_per_report: int, born_at_s: float
    ) -> None:
        self.incarnation = life
        self.heartbeats = parts.heartbeats(replicas_per_report)
        self.jobs = JobTable()
        self.waiting: deque[ReconcileCommand] = deque()
        self.runs: dict[ContainerId, Run] = {}
        self.sent: OutgoingHeartbeat | None = None
        self.sent_at_s = born_at_s
        # Commands for each job that came, and how often the job began: what is sent
        # twice begins once.
        self.told: dict[str, set[str]] = {}
        self.begun: Counter[str] = Counter()

    @property
    def is_idle(self) -> bool:
        """Whether it has no job, begun or not."""
        return not self.runs and not self.waiting


@dataclass(frozen=True, slots=True)
class Message:
    """Under way between an agent and the controller."""

    peer: PeerId
    incarnation: int
    sequence: int
    raw: bytes
    sent_at_s: float
    # A copy may come long after the first.
    due_s: float = 0.0


class CrashingStore:
    """The job store; the process may die before or after a save."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self.dies_before_save = self.dies_after_save = False

    def jobs(self) -> Sequence[Job]:
        """All jobs that were saved."""
        return self._store.jobs()

    def visits(self) -> Sequence[Visit]:
        """All visits that were saved."""
        return self._store.visits()

    def holders(self) -> Mapping[ContainerId, AbstractSet[PeerId]]:
        """All holders that were saved."""
        return self._store.holders()

    def save(
        self,
        jobs: Iterable[Job] = (),
        visits: Iterable[Visit] = (),
        holders: Mapping[ContainerId, AbstractSet[PeerId]] = MappingProxyType({}),
    ) -> None:
        """Save all or nothing, unless the process dies first or right after.

        Raises:
            CrashError: the process died here.
        """
        if self.dies_before_save:
            raise CrashError
        self._store.save(jobs, visits, holders)
        if self.dies_after_save:
            raise CrashError

    def next_term(self) -> int:
        """A higher term than any before."""
        return self._store.next_term()


@dataclass(slots=True)
class Leadership:
    """Held, or lost to somebody else for a while."""

    value: int | None

    def term(self) -> int | None:
        """The term in which the controller leads; None where another one does."""
        return self.value


class ControllerProcess:
    """One life of the controller: what dies with it."""

    def __init__(
        self,
        parts: Parts,
        open_store: OpenStore,
        rules: Rules,
        ledger: Ledger,
        new_job_id: Callable[[], JobId],
        *,
        wall_s: Callable[[], float],
        monotonic_s: Callable[[], float],
    ) -> None:
        self._stack = ExitStack()
        self.now_s = clock = parts.clock(wall_s, monotonic_s)
        self.store = CrashingStore(self._stack.enter_context(open_store()))
        self.leadership = Leadership(self.store.next_term())
        outbox = Outbox()
        self.controller = parts.controller(
            rules=rules,
            store=self.store,
            sink=outbox,
            leadership=self.leadership,
            audit=MemoryAudit(),
            new_job_id=new_job_id,
            now_s=clock(),
            on_finished=ledger.finishes,
        )
        self.service = ControllerService(self.controller, outbox, Lock(), clock, _METRICS, ANYBODY)
        # The latest life of each agent that it answered.
        self.answered: Counter[str] = Counter()

    def heartbeat(self, raw: bytes) -> bytes:
        """Answer a heartbeat; both as they cross the wire."""
        request = pb.HeartbeatRequest.FromString(raw)
        answer = self.service.heartbeat(request, _CONTEXT)
        peer, life = request.datanode.datanode_id, int(request.incarnation)
        if life < self.answered[peer]:
            raise ViolationError(f"{peer} is taken back to its life {life}")
        self.answered[peer] = life
        return answer.SerializeToString()

    def tick(self) -> None:
        """Do what is due by the clock."""
        self.controller.tick(self.now_s())

    def reconcile(self, container_id: ContainerId) -> pb.ReconcileOutcome:
        """Somebody asks for a job; the outcome has its ID or says why there is none."""
        request = pb.ReconcileRequest(
            container_ids=[container_id], reason="asked", requested_by="somebody"
        )
        return self.service.reconcile(request, _CONTEXT).outcomes[0]

    def cancel(self, job_id: JobId) -> None:
        """Somebody cancels a job."""
        self.service.cancel_job(pb.CancelJobRequest(job_id=job_id), _CONTEXT)

    def pause(self, job_id: JobId) -> None:
        """Somebody pauses a job."""
        request = pb.PauseJobRequest(job_id=job_id, reason="peak hours", requested_by="somebody")
        self.service.pause_job(request, _CONTEXT)

    def resume(self, job_id: JobId) -> None:
        """Somebody lets a job go on."""
        self.service.resume_job(pb.ResumeJobRequest(job_id=job_id), _CONTEXT)

    def throttle(self, job_id: JobId, bytes_per_second: int, containers_max: int) -> None:
        """Somebody limits a job."""
        request = pb.ThrottleJobRequest(
            job_id=job_id, bytes_per_second=bytes_per_second, containers_max=containers_max
        )
        self.service.throttle_job(request, _CONTEXT)

    def active(self) -> list[Job]:
        """Jobs that have not ended."""
        return [job for job in self.controller.jobs(None, 1_000) if not job.state.is_terminal]

    def close(self) -> None:
        """Give up the store, as a process does that dies."""
        self._stack.close()


def chosen_rules(rng: random.Random, *, automatic: bool) -> Rules:
    """The product's own settings in many seeds; in others such that what is rare
    happens.
    """
    return Rules(
        stale_after_s=rng.choice((60.0, 90.0)),
        dead_after_s=rng.choice((150.0, 600.0)),
        orders_per_datanode=rng.choice((1, 2)),
        command_deadline_s=rng.choice((40.0, 200.0, 3600.0, 3600.0)),
        automatic=automatic,
        automatic_jobs=rng.choice((1, 4)),
        visit_every_s=rng.choice((20.0, 60.0)),
    )
