"""May this container be reconciled now? Ozone's rules in Ozone's order, then ours; a
refusal is a returned reason.

Ozone's rules ask about the container alone. Ours, which come after them, ask whether an
order would reach anybody: Ozone sends its command to dead datanodes too and lets a
container with a single replica reconcile with nobody.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from merkle.replica import ContainerReplica, ReplicaState
from merkle.tree import ContainerId


class ContainerState(Enum):
    """Life cycle of a container, as Ozone's SCM keeps it."""

    OPEN = "OPEN"
    CLOSING = "CLOSING"
    QUASI_CLOSED = "QUASI_CLOSED"
    CLOSED = "CLOSED"
    DELETED = "DELETED"
    RECOVERING = "RECOVERING"


class Eligibility(Enum):
    """`ok`, or why not: first Ozone's results by Ozone's names, then ours."""

    OK = "ok"
    CONTAINER_NOT_FOUND = "CONTAINER_NOT_FOUND"
    INELIGIBLE_CONTAINER_STATE = "INELIGIBLE_CONTAINER_STATE"
    NO_REPLICAS_FOUND = "NO_REPLICAS_FOUND"
    INELIGIBLE_REPLICA_STATES = "INELIGIBLE_REPLICA_STATES"
    INELIGIBLE_REPLICATION_TYPE = "INELIGIBLE_REPLICATION_TYPE"
    NOT_ENOUGH_REQUIRED_NODES = "NOT_ENOUGH_REQUIRED_NODES"

    NOT_LEADER = "NOT_LEADER"
    NO_LIVE_PEERS = "NO_LIVE_PEERS"
    READ_ONLY = "READ_ONLY"
    ALREADY_RUNNING = "ALREADY_RUNNING"
    QUEUE_FULL = "QUEUE_FULL"


_PROVEN = (
    (ReplicaState.CLOSED, ContainerState.CLOSED),
    (ReplicaState.RECOVERING, ContainerState.RECOVERING),
    (ReplicaState.QUASI_CLOSED, ContainerState.QUASI_CLOSED),
    (ReplicaState.CLOSING, ContainerState.CLOSING),
    (ReplicaState.OPEN, ContainerState.OPEN),
)
# An INVALID replica tells nothing but that it is one; why is known where it lies.
INVALID_HINT = (
    "what describes an INVALID replica cannot be read: the line container_skipped in the log of its"
    " agent names the cause, and so does `treefold doctor` there for a descriptor; repair or remove"
    " there what is damaged"
)
_ELIGIBLE_CONTAINER_STATES = frozenset({ContainerState.CLOSED, ContainerState.QUASI_CLOSED})


@dataclass(frozen=True, slots=True)
class Ruling:
    """A reason and the sentence that a person reads; empty when all is well."""

    eligibility: Eligibility
    message: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the container may be reconciled."""
        return self.eligibility is Eligibility.OK


OK = Ruling(Eligibility.OK)


@dataclass(frozen=True, slots=True)
class Availability:
    """What the rules of ours ask about: not the container, but whether and by whom an
    order could be carried out.
    """

    is_leader: bool
    live_replicas: int
    # Live replicas whose agent may repair: volume owned, repair enabled.
    live_writable_replicas: int


def container_state(replicas: Iterable[ContainerReplica]) -> ContainerState | None:
    """The container's state, derived from its replicas, since no SCM database tells it;
    None without replicas.

    The most advanced state that a replica proves is the container's, because each is
    reached only on SCM's word:
    1. a CLOSED replica proves CLOSED;
    2. else a RECOVERING one RECOVERING (it is being rebuilt from others that nobody
       reports);
    3. else a QUASI_CLOSED one QUASI_CLOSED;
    4. else a CLOSING one CLOSING, and then an OPEN one OPEN;
    5. else only UNHEALTHY, INVALID and DELETED replicas are left, which say nothing of
       the container. If all are DELETED it is DELETED; otherwise CLOSED, since none of
       them takes writes any more.
    A replica that lags behind (OPEN beside CLOSED) is thus refused by its own state,
    not by the container's.
    """
    states = {replica.state for replica in replicas}
    if not states:
        return None
    for state, proven in _PROVEN:
        if state in states:
            return proven
    return ContainerState.DELETED if states == {ReplicaState.DELETED} else ContainerState.CLOSED


def is_erasure_coded(replicas: Iterable[ContainerReplica]) -> bool:
    """Replicas of an erasure-coded container hold different data by design; each has an
    index above 0.
    """
    return any(replica.is_erasure_coded for replica in replicas)


def not_closed(replicas: Iterable[ContainerReplica]) -> str:
    """Which replicas are not closed, and where: `INVALID on datanode dn-2, OPEN on
    datanode dn-3`; empty for none.
    """
    found = sorted((r.state.value, r.peer) for r in replicas if not r.state.is_closed)
    return ", ".join(f"{state} on datanode {peer}" for state, peer in found)


def evaluate(
    container_id: ContainerId,
    state: ContainerState | None,
    replicas: Sequence[ContainerReplica],
    *,
    required_nodes: int,
) -> Ruling:
    """Ozone's rules, first match wins; `state` is None where the container is
    unknown.
    """
    if state is None:
        return Ruling(
            Eligibility.CONTAINER_NOT_FOUND,
            f"Container #{container_id} not found for reconciliation.",
        )
    if state not in _ELIGIBLE_CONTAINER_STATES:
        message = f"Cannot reconcile container {container_id} in state {state.value}."
        return Ruling(Eligibility.INELIGIBLE_CONTAINER_STATE, message)
    if not replicas:
        message = f"Cannot reconcile container {container_id} because no replicas could be found."
        return Ruling(Eligibility.NO_REPLICAS_FOUND, message)
    if named := not_closed(replicas):
        states = ", ".join(replica.state.name for replica in replicas)
        message = (
            f"Cannot reconcile container #{container_id} in state {state.value} with replica"
            f" states: {states}"
        )
        # Ozone says no more, and leaves it open where to look.
        message += f" ({named})"
        return Ruling(Eligibility.INELIGIBLE_REPLICA_STATES, message)
    if is_erasure_coded(replicas):
        return Ruling(
            Eligibility.INELIGIBLE_REPLICATION_TYPE,
            f"Cannot reconcile container #{container_id} with replication type EC. "
            "Reconciliation is currently only supported for Ratis containers.",
        )
    if required_nodes <= 1:
        return Ruling(
            Eligibility.NOT_ENOUGH_REQUIRED_NODES,
            f"Cannot reconcile container #{container_id} with {required_nodes} required nodes. "
            "Reconciliation is only supported for containers with more than 1 required node.",
        )
    return OK


def evaluate_availability(container_id: ContainerId, surroundings: Availability) -> Ruling:
    """Our rules, for a container that Ozone's allow."""
    if not surroundings.is_leader:
        return Ruling(
            Eligibility.NOT_LEADER,
            f"Cannot reconcile container {container_id}: this controller does not lead.",
        )
    if surroundings.live_replicas < 2:
        return Ruling(
            Eligibility.NO_LIVE_PEERS,
            f"Cannot reconcile container {container_id} with {surroundings.live_replicas}"
            f" replica{'' if surroundings.live_replicas == 1 else 's'} on live datanodes: there is"
            " no peer to compare with.",
        )
    if surroundings.live_writable_replicas == 0:
        return Ruling(
            Eligibility.READ_ONLY,
            f"Cannot reconcile container {container_id}: every live replica is held read-only.",
        )
    return OK
