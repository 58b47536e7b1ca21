"""Builders of what datanodes report, and a controller in memory to report it to."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType

from merkle.outcome import PeerOutcome, RepairReport, Verdict
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from runtime.errors import DatabaseError, DiskError
from scm.controller import Controller
from scm.datanodes import Datanode
from scm.heartbeats import Heartbeat, ProgressReport
from scm.jobs import Job, JobId, OrderState
from scm.limits import LIMITS, ControllerLimits
from scm.policy import Visit
from scm.ports import AnyOrder, CancelOrder, CommandSink, ReconcileOrder
from scm.registry import HeartbeatEffect, ReplicaReport
from scm.rules import Rules

# When replicas were scanned, unless a test says otherwise: as its clock starts.
SCANNED_MS = 1_000_000_000
DN1, DN2 = PeerId("dn-1"), PeerId("dn-2")


def replica(
    peer: str = "dn-1",
    container_id: int = 1,
    state: ReplicaState = ReplicaState.CLOSED,
    root: int | None = 7,
    *,
    index: int = 0,
    read_only: bool = False,
    fingerprint: bytes = b"",
    scanned_ms: int | None = SCANNED_MS,
) -> ContainerReplica:
    return ContainerReplica(
        PeerId(peer),
        ContainerId(container_id),
        state,
        root,
        0,
        index,
        data_scan_timestamp_ms=scanned_ms,
        read_only=read_only,
        fingerprint=fingerprint,
    )


def replicas(*roots: int | None, container_id: int = 1) -> list[ContainerReplica]:
    """One replica for each root, on dn-1, dn-2, ..."""
    return [
        replica(f"dn-{number}", container_id, root=root)
        for number, root in enumerate(roots, start=1)
    ]


@dataclass
class MemoryAudit:
    """The lines of an audit file, in memory, each as its kind and what it is about."""

    lines: list[tuple[str, object, str]] = field(default_factory=list)
    fails: bool = False

    def ordered(self, jobs: Sequence[Job]) -> None:
        self._add(*(("order", job.container_id, job.requested_by) for job in jobs))

    def requested(self, kind: str, job: Job, who: str, why: str = "") -> None:
        self._add((kind, job.container_id, who))

    def scans_ordered(self, container_ids: Sequence[ContainerId], who: str) -> None:
        self._add(*(("scan", container_id, who) for container_id in container_ids))

    def ended(self, job: Job) -> None:
        self.lines.append(("end", job.container_id, job.requested_by))

    def refused(self, *, who: str, what: str, why: str) -> None:
        self._add(("refused", what, who))

    def _add(self, *lines: tuple[str, object, str]) -> None:
        if self.fails:
            raise DiskError("the audit file is full")
        self.lines += lines


class MemoryJobStore:
    """A store that outlives a controller, but not the test; one that `is_full` takes
    nothing more.
    """

    def __init__(self) -> None:
        self.is_full = False
        self._jobs: dict[JobId, Job] = {}
        self._visits: dict[ContainerId, Visit] = {}
        self._holders: dict[ContainerId, AbstractSet[PeerId]] = {}
        self._term = 0

    def jobs(self) -> Sequence[Job]:
        return sorted(self._jobs.values(), key=lambda job: (job.created_at_s, job.job_id))

    def visits(self) -> Sequence[Visit]:
        return list(self._visits.values())

    def holders(self) -> Mapping[ContainerId, AbstractSet[PeerId]]:
        return dict(self._holders)

    def save(
        self,
        jobs: Iterable[Job] = (),
        visits: Iterable[Visit] = (),
        holders: Mapping[ContainerId, AbstractSet[PeerId]] = MappingProxyType({}),
    ) -> None:
        if self.is_full:
            raise DatabaseError("database or disk is full")
        self._jobs.update((job.job_id, job) for job in jobs)
        self._visits.update((visit.container_id, visit) for visit in visits)
        self._holders.update(holders)
        self._holders = {number: peers for number, peers in self._holders.items() if peers}

    def next_term(self) -> int:
        self._term += 1
        return self._term


class MemorySink:
    """Orders as they were sent; those withdrawn are taken out."""

    def __init__(self) -> None:
        self.orders: list[AnyOrder] = []
        self._delivered: set[tuple[PeerId, str]] = set()

    def send(self, order: AnyOrder) -> bool:
        self._take_out(order.peer, order.command_id)
        self.orders.append(order)
        return True

    def withdraw(self, peer: PeerId, command_id: str) -> None:
        self._take_out(peer, command_id)
        self._delivered.discard((peer, command_id))

    def is_undelivered(self, peer: PeerId, command_id: str) -> bool:
        held = {(order.peer, order.command_id) for order in self.orders}
        return (peer, command_id) in held - self._delivered

    def deliver(self, peer: PeerId) -> list[AnyOrder]:
        found = [order for order in self.orders if order.peer == peer]
        self._delivered.update((peer, order.command_id) for order in found)
        return found

    def _take_out(self, peer: PeerId, command_id: str) -> None:
        self.orders = [o for o in self.orders if (o.peer, o.command_id) != (peer, command_id)]


@dataclass
class FixedLeadership:
    value: int | None = 1

    def term(self) -> int | None:
        return self.value


@dataclass
class World:
    """A controller, what it talks to, and datanodes that report when told to."""

    rules: Rules = field(default_factory=Rules)
    store: MemoryJobStore = field(default_factory=MemoryJobStore)
    audit: MemoryAudit = field(default_factory=MemoryAudit)
    leadership: FixedLeadership = field(default_factory=FixedLeadership)
    now_s: float = 1_000_000.0
    pause_after_s: float = math.inf
    limits: ControllerLimits = LIMITS
    incarnations: dict[PeerId, int] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _sequences: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new controller over the same store; orders that waited are lost with the
        old one.
        """
        self.sink = MemorySink()
        self.controller = self.new_controller(self.sink)

    def new_controller(self, sink: CommandSink) -> Controller:
        """A controller over the store, whose orders go there."""
        return Controller(
            rules=self.rules,
            store=self.store,
            sink=sink,
            leadership=self.leadership,
            audit=self.audit,
            new_job_id=lambda: JobId(f"job{next(self._numbers)}"),
            now_s=self.now_s,
            pause_after_s=self.pause_after_s,
            limits=self.limits,
        )

    def beat(
        self,
        peer: str,
        replicas: Iterable[ContainerReplica] | None = None,
        *,
        full: bool = True,
        progress: tuple[ProgressReport, ...] = (),
        acknowledged: tuple[str, ...] = (),
    ) -> HeartbeatEffect:
        """A heartbeat; its response brings the datanode all orders that wait for it."""
        peer_id = PeerId(peer)
        effect = self.controller.heartbeat(
            Heartbeat(
                Datanode(peer_id, f"host-{peer}", f"127.0.0.1:{9000 + int(peer[-1])}"),
                self.incarnations.get(peer_id, 1),
                next(self._sequences),
                ReplicaReport(full, tuple(replicas)) if replicas is not None else None,
                progress,
                acknowledged,
            ),
            self.now_s,
        )
        self.sink.deliver(peer_id)
        return effect

    def report(self, *reported: ContainerReplica) -> None:
        """A full report of each datanode that holds any of these."""
        for peer in sorted({r.peer for r in reported}):
            self.beat(peer, [r for r in reported if r.peer == peer])

    def pass_time(
        self, seconds: float, *, beating: Iterable[str] = (), step_s: float = 10.0
    ) -> None:
        """Tick until then; `beating` datanodes send empty heartbeats all the while."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(self.now_s + step_s, until_s)
            for peer in beating:
                self.beat(peer)
            self.controller.tick(self.now_s)

    def reconcile(self, *container_ids: int) -> list[Job]:
        outcomes = self.controller.reconcile(
            [ContainerId(number) for number in container_ids],
            dry_run=False,
            reason="test",
            requested_by="test",
            now_s=self.now_s,
        )
        return [self.controller.job(outcome.job_id) for outcome in outcomes if outcome.job_id]

    def told(self, job: Job, peer: str, state: OrderState, **figures: object) -> None:
        """The datanode reports progress of its order, for which it heard all its
        peers.
        """
        order = self.controller.job(job.job_id).order(PeerId(peer))
        assert order is not None
        heard = tuple(PeerOutcome(other, "ok") for other in order.peers)
        progress = RepairReport(**{"peers": heard, **figures})
        report = ProgressReport(job.job_id, state, progress, order.round, order.resumes)
        self.beat(peer, progress=(report,))

    def finish(self, job: Job, *peers: str, verdict: Verdict = Verdict.REPAIRABLE) -> Job:
        for peer in peers:
            self.told(job, peer, OrderState.DONE, verdict=verdict)
        return self.controller.job(job.job_id)

    def orders(self, peer: str) -> list[ReconcileOrder]:
        return [
            order
            for order in self.sink.orders
            if order.peer == peer and isinstance(order, ReconcileOrder)
        ]

    def cancels(self, peer: str) -> list[CancelOrder]:
        return [
            order
            for order in self.sink.orders
            if order.peer == peer and isinstance(order, CancelOrder)
        ]
