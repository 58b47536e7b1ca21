"""The datanodes of a cluster, and whether they are heard from."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from merkle.replica import PeerId
from ozone.scm_client import ClusterNode, NodeHealth


class Liveness(Enum):
    """A datanode's state by the age of its last heartbeat. A STALE datanode gets no
    orders; the replicas of a DEAD one are ignored.
    """

    LIVE = "live"
    STALE = "stale"
    DEAD = "dead"


# What SCM says of a datanode, in our words.
LIVENESS_OF: Mapping[NodeHealth, Liveness] = {
    NodeHealth.HEALTHY: Liveness.LIVE,
    NodeHealth.HEALTHY_READONLY: Liveness.LIVE,
    NodeHealth.STALE: Liveness.STALE,
    NodeHealth.DEAD: Liveness.DEAD,
}


@dataclass(frozen=True, slots=True)
class Datanode:
    """A datanode; `address` is the host:port of its agent, and `returns_to_service`
    says what that does with UNHEALTHY replicas that it has healed.
    """

    peer: PeerId
    hostname: str
    address: str
    returns_to_service: bool = False


@dataclass(frozen=True, slots=True)
class DatanodeStatus:
    """A datanode's liveness and number of replicas."""

    datanode: Datanode
    liveness: Liveness
    heartbeat_age_s: float
    replicas: int


def datanode_of(node: ClusterNode) -> Datanode:
    """A datanode as SCM knows it. If it names no port for reads, its address has port
    0, which nothing can reach.
    """
    return Datanode(node.peer, node.host, node.address or f"{node.host}:0")
