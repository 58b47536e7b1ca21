"""Decide whether a container may be reconciled now; a refusal is a returned reason.

Ozone's rules come first, in Ozone's order. They concern only the container. Our rules
then check that live datanodes can execute the orders. Ozone sends its command to dead
datanodes too, and accepts a container with a single replica.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from merkle.replica import ContainerReplica, ContainerState, ReplicaState
from merkle.tree import ContainerId


class Eligibility(Enum):
    """`ok`, or the reason of a refusal: Ozone's results by their names, then ours."""

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
    PLAN_CHANGED = "PLAN_CHANGED"


_STATES_BY_RANK = (
    (ReplicaState.CLOSED, ContainerState.CLOSED),
    (ReplicaState.RECOVERING, ContainerState.RECOVERING),
    (ReplicaState.QUASI_CLOSED, ContainerState.QUASI_CLOSED),
    (ReplicaState.CLOSING, ContainerState.CLOSING),
    (ReplicaState.OPEN, ContainerState.OPEN),
)
# A report of an INVALID replica has no cause; only its agent knows it.
INVALID_HINT = (
    "the descriptor or records of an INVALID replica cannot be read: find the cause in the line"
    " container_skipped of its agent's log, or for a descriptor with `treefold doctor` on that"
    " datanode; repair or remove the damaged files there"
)
_ELIGIBLE_CONTAINER_STATES = frozenset({ContainerState.CLOSED, ContainerState.QUASI_CLOSED})


@dataclass(frozen=True, slots=True)
class Ruling:
    """An eligibility and its explanation for the user, which is empty for OK."""

    eligibility: Eligibility
    message: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether the container may be reconciled."""
        return self.eligibility is Eligibility.OK


OK = Ruling(Eligibility.OK)


@dataclass(frozen=True, slots=True)
class Availability:
    """The facts for our rules: whether there are datanodes to execute an order."""

    is_leader: bool
    live_replicas: int
    # Live replicas whose agent may repair: it owns the volume, and repair is enabled.
    live_writable_replicas: int


def container_state(replicas: Iterable[ContainerReplica]) -> ContainerState | None:
    """The container's state, derived from its replicas; None without replicas.

    SCM's database is not read here. A replica reaches a state only by SCM's command, so
    the most advanced replica shows the container's state:

    1. CLOSED, if a replica is CLOSED.
    2. RECOVERING, if one is RECOVERING: it is rebuilt from replicas not reported here.
    3. QUASI_CLOSED, if one is QUASI_CLOSED.
    4. CLOSING or OPEN, if one is CLOSING or OPEN, in this order.
    5. Otherwise the replicas are UNHEALTHY, INVALID or DELETED, which does not show the
       container's state. It is DELETED if all are DELETED, otherwise CLOSED, because
       none of them accepts writes.

    A replica that lags (OPEN beside CLOSED) is refused by its own state, not by the
    container's.
    """
    states = {replica.state for replica in replicas}
    if not states:
        return None
    for state, proven in _STATES_BY_RANK:
        if state in states:
            return proven
    return ContainerState.DELETED if states == {ReplicaState.DELETED} else ContainerState.CLOSED


def is_erasure_coded(replicas: Iterable[ContainerReplica]) -> bool:
    """Whether the container is erasure-coded. Its replicas have an index above 0, and
    differ by design.
    """
    return any(replica.is_erasure_coded for replica in replicas)


def describe_not_closed(replicas: Iterable[ContainerReplica]) -> str:
    """List the replicas that are not closed; empty if there are none.

    An example is `INVALID on datanode dn-2, OPEN on datanode dn-3`.
    """
    found = sorted((r.state.value, r.peer) for r in replicas if not r.state.is_closed)
    return ", ".join(f"{state} on datanode {peer}" for state, peer in found)


def evaluate(
    container_id: ContainerId,
    state: ContainerState | None,
    replicas: Sequence[ContainerReplica],
    *,
    required_nodes: int,
    is_expected: bool = False,
) -> Ruling:
    """Apply Ozone's rules; the first match decides. `state` is None if the container is
    unknown, or if it `is_expected` and no replica was reported yet.
    """
    if state is None and is_expected:
        message = f"Cannot reconcile container {container_id} because no replicas could be found."
        return Ruling(Eligibility.NO_REPLICAS_FOUND, message)
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
    if named := describe_not_closed(replicas):
        states = ", ".join(replica.state.name for replica in replicas)
        message = (
            f"Cannot reconcile container #{container_id} in state {state.value} with replica"
            f" states: {states}"
        )
        # Ozone's message ends here, without the datanodes.
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


def evaluate_availability(container_id: ContainerId, availability: Availability) -> Ruling:
    """Apply our rules to a container that Ozone's rules allow."""
    if not availability.is_leader:
        return Ruling(
            Eligibility.NOT_LEADER,
            f"Cannot reconcile container {container_id}: this controller is not the leader.",
        )
    if availability.live_replicas < 2:
        return Ruling(
            Eligibility.NO_LIVE_PEERS,
            f"Cannot reconcile container {container_id} with {availability.live_replicas}"
            f" replica{'' if availability.live_replicas == 1 else 's'} on live datanodes: there is"
            " no peer to compare with.",
        )
    if availability.live_writable_replicas == 0:
        return Ruling(
            Eligibility.READ_ONLY,
            f"Cannot reconcile container {container_id}: every live replica is held read-only.",
        )
    return OK
