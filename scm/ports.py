"""The ports of a controller: a sink for orders, leadership, and a store.

Reports of agents need no port: their source calls `Controller.heartbeat`. Orders here
are for one replica. Ozone's SCM can order only the reconciliation of a container as a
whole; its port is in scm.container_reports.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from scm.datanodes import Datanode
from scm.jobs import Job, JobId
from scm.policy import Visit


@dataclass(frozen=True, slots=True)
class ReconcileOrder:
    """An order for `peer` to reconcile its replica with those of `peers`.

    An order with the same command ID is the same order, sent again. To the agent each
    `round` of a job is a separate job.
    """

    command_id: str
    term: int
    peer: PeerId
    job_id: JobId
    container_id: ContainerId
    peers: tuple[Datanode, ...]
    # CLOSED or QUASI_CLOSED: the state that an UNHEALTHY replica may return to.
    returns_to: ReplicaState = ReplicaState.QUASI_CLOSED
    # For automatic jobs: without this scan no data is read if the trees agree.
    skip_final_scan: bool = False
    round: int = 1
    resumes: int = 0
    # What the datanode may fetch in a second for this job; 0 means no limit.
    bytes_per_second: int = 0
    # For the audit file of the agent.
    requested_by: str = ""
    reason: str = ""
    # The digest of the plan to carry out; empty: no plan.
    plan: str = ""


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """An order to stop a round of a job; each has a command ID of its own."""

    command_id: str
    term: int
    peer: PeerId
    job_id: JobId
    container_id: ContainerId
    round: int = 1
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class ThrottleOrder:
    """An order to change the rate of a round of a job that the datanode has; 0 means no
    limit.
    """

    command_id: str
    term: int
    peer: PeerId
    job_id: JobId
    round: int
    resumes: int
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class ScanOrder:
    """An order to scan a replica."""

    command_id: str
    term: int
    peer: PeerId
    container_id: ContainerId


AnyOrder: TypeAlias = ReconcileOrder | CancelOrder | ThrottleOrder | ScanOrder


class CommandSink(Protocol):
    """Delivers orders to datanodes, without waiting for them. An accepted order is
    delivered at least once, unless it is withdrawn.
    """

    def send(self, order: AnyOrder) -> bool:
        """Accept an order; it replaces one with the same ID for the same datanode.

        Returns False if the datanode has too many unconfirmed orders.
        """

    def withdraw(self, peer: PeerId, command_id: str) -> None:
        """Stop delivering an order; an unknown one is ignored."""

    def is_undelivered(self, peer: PeerId, command_id: str) -> bool:
        """Whether this sink holds the order and never began to deliver it; False for an
        unknown one.
        """


class Leadership(Protocol):
    """Which controller leads."""

    def term(self) -> int | None:
        """The term in which this controller leads, higher than all earlier terms; None
        while another controller leads.
        """


class JobAudit(Protocol):
    """The record of who did what. A line is durable when a method returns.

    Every method but `ended` raises DiskError if it is not; then what it records must
    not be done.
    """

    def ordered(self, jobs: Sequence[Job]) -> None:
        """Record jobs that are about to start."""

    def requested(self, kind: str, job: Job, who: str, why: str = "") -> None:
        """Record that somebody requested the end or another change of a job."""

    def scans_ordered(self, container_ids: Sequence[ContainerId], who: str) -> None:
        """Record that scans of these containers are about to be sent."""

    def ended(self, job: Job) -> None:
        """Record how a job ended."""

    def refused(self, *, who: str, what: str, why: str) -> None:
        """Record that a request was refused."""


class JobStore(Protocol):
    """The persistent state. A write is atomic, and durable when it returns.

    Every method raises DatabaseError if the store cannot be read or written.
    """

    def jobs(self) -> Sequence[Job]:
        """All stored jobs, oldest first."""

    def visits(self) -> Sequence[Visit]:
        """All stored visits, one for each container."""

    def holders(self) -> Mapping[ContainerId, AbstractSet[PeerId]]:
        """The datanodes that hold a replica of each container, as last saved."""

    def save(
        self,
        jobs: Iterable[Job] = (),
        visits: Iterable[Visit] = (),
        holders: Mapping[ContainerId, AbstractSet[PeerId]] = MappingProxyType({}),
    ) -> None:
        """Add or replace these jobs, visits and holders; all or none. A container
        without holders is removed.
        """

    def next_term(self) -> int:
        """A new term, higher than all returned before; durable."""
