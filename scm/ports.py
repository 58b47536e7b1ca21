"""What a controller needs of the world: somewhere to send orders to, somebody who says
whether it leads, a memory.

Reports come in by calls: whoever has news of replicas (the service that agents send
heartbeats to; later a reader of Ozone's own SCM) calls `Controller.heartbeat`, so that
no port is needed for them. An adapter that can only order a container as a whole, as
Ozone's SCM can, carries out the first order of a job and takes the others as carried
out, without roots: nobody goes again then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from scm.jobs import Job, JobId
from scm.policy import Visit
from scm.registry import Datanode


@dataclass(frozen=True, slots=True)
class ReconcileOrder:
    """Have `peer` reconcile its replica with those of `peers`. The same ID again is the
    same order again.

    A further `round` of a job is a task of its own to whoever carries it out.
    """

    command_id: str
    term: int
    peer: PeerId
    job_id: JobId
    container_id: ContainerId
    peers: tuple[Datanode, ...]
    # CLOSED or QUASI_CLOSED: what an unhealthy replica that proves clean may return to.
    returns_to: ReplicaState = ReplicaState.QUASI_CLOSED
    # Nobody asked for it: data need not be read where the trees show nothing to repair.
    skip_final_scan: bool = False
    round: int = 1


@dataclass(frozen=True, slots=True)
class CancelOrder:
    command_id: str
    term: int
    peer: PeerId
    job_id: JobId
    round: int = 1


@dataclass(frozen=True, slots=True)
class ScanOrder:
    command_id: str
    term: int
    peer: PeerId
    container_id: ContainerId


AnyOrder: TypeAlias = ReconcileOrder | CancelOrder | ScanOrder


class CommandSink(Protocol):
    """Where orders go. Never waits for a datanode: what is taken is delivered at least
    once, or withdrawn.
    """

    def send(self, order: AnyOrder) -> bool:
        """Take an order over; one with the same ID for the same datanode is replaced.

        False: not taken, the datanode has too many orders that it did not confirm.
        """

    def withdraw(self, peer: PeerId, command_id: str) -> None:
        """Deliver it no more; nothing happens if it is unknown."""


class Leadership(Protocol):
    """Who leads."""

    def term(self) -> int | None:
        """The term in which this controller leads, higher than any before; None while
        another leads.
        """


class JobStore(Protocol):
    """What outlives the process. Each write is on disk when it returns, all of it or
    nothing.
    """

    def jobs(self) -> Sequence[Job]:
        """All jobs kept, oldest first."""

    def visits(self) -> Sequence[Visit]:
        """All visits kept."""

    def save(self, jobs: Iterable[Job] = (), visits: Iterable[Visit] = ()) -> None:
        """Put down these as they are now."""

    def next_term(self) -> int:
        """A term that was never given before."""
