"""Check what a diagnosis of a running cluster rests on: SCM, and each datanode's port.

A datanode is asked for the tree of one of its closed replicas. This shows at once that
the port can be reached, that it is Ozone's, that it wants no token, and that the
release has trees.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from live.ports import ClusterDirectory, DatanodeReader
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.scm_client import ClusterIdentity, ClusterNode, NodeHealth
from repair.peers import checked_tree

# Of the protocol of datanodes in Ozone 2.2; trees came with it.
_VERSION_MIN = 3
# Containers that are searched for a replica of each datanode.
_SEARCHED_MAX = 10_000
_PAGE = 500
_DATANODES_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class NodeCheckup:
    """One datanode: how long its tree took in seconds, None if none was read; and what
    is wrong with it.
    """

    node: ClusterNode
    tree_s: float | None = None
    problems: tuple[str, ...] = ()
    # What was not tried, and why.
    note: str = ""


@dataclass(frozen=True, slots=True)
class ClusterCheckup:
    """The cluster, its datanodes in the order of SCM, and what is wrong with it as a
    whole.
    """

    identity: ClusterIdentity
    nodes: tuple[NodeCheckup, ...]
    problems: tuple[str, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.problems and not any(one.problems for one in self.nodes)


def check_cluster(
    directory: ClusterDirectory,
    connect: Callable[[ClusterNode], DatanodeReader],
    scm_faults: Sequence[str] = (),
) -> ClusterCheckup:
    """Check the cluster. `scm_faults` say why SCMs that do not lead do not answer.

    Raises:
        As the methods of the directory; what datanodes raise is among their problems.
    """
    identity, nodes = directory.identity(), directory.nodes()
    samples = _samples(directory, {node.peer for node in nodes if not node.is_dead})

    def check(node: ClusterNode) -> NodeCheckup:
        return _check_node(node, samples.get(node.peer), connect)

    with ThreadPoolExecutor(_DATANODES_AT_ONCE, thread_name_prefix="doctor") as pool:
        checked = tuple(pool.map(check, nodes))
    problems = (*_problems(identity, nodes), *(f"SCM {fault}" for fault in scm_faults))
    return ClusterCheckup(identity, checked, problems)


def _problems(identity: ClusterIdentity, nodes: Sequence[ClusterNode]) -> Iterator[str]:
    if identity.in_safe_mode:
        yield "SCM is in safe mode: it may not know all replicas yet"
    if not nodes:
        yield "SCM knows no datanode"


def _samples(directory: ClusterDirectory, wanted: set[PeerId]) -> dict[PeerId, ContainerId]:
    """A container of which each datanode has a closed replica, as far as there is one
    among the first ones.
    """
    found: dict[PeerId, ContainerId] = {}
    containers = islice(directory.containers(), _SEARCHED_MAX)
    while wanted - found.keys() and (page := list(islice(containers, _PAGE))):
        replicas = directory.replicas([one.container_id for one in page])
        for replica in (one for group in replicas.values() for one in group):
            if replica.state.is_closed and not replica.is_erasure_coded:
                found.setdefault(replica.peer, replica.container_id)
    return found


def _check_node(
    node: ClusterNode,
    container_id: ContainerId | None,
    connect: Callable[[ClusterNode], DatanodeReader],
) -> NodeCheckup:
    problems = list[str]()
    if node.health is not NodeHealth.HEALTHY:
        problems.append(f"SCM calls it {node.health.value}")
    if node.version is not None and node.version < _VERSION_MIN:
        problems.append(
            f"its protocol has version {node.version}: trees need Ozone 2.2, which has"
            f" {_VERSION_MIN}"
        )
    if not node.address:
        problems.append("it names no port for reads")
    if node.is_dead or not node.address or container_id is None:
        note = "" if container_id is not None else "no closed replica to read a tree of"
        return NodeCheckup(node, None, tuple(problems), note)
    begun_s = time.monotonic()
    try:
        reader = connect(node)
        try:
            for _, found in reader.each_tree_bytes([container_id]):
                if not isinstance(found, bytes):
                    raise found
                checked_tree(found, container_id)
        finally:
            reader.close()
    except ReconcileError as error:
        problems.append(f"{error.code}: {error.message}")
        return NodeCheckup(node, None, tuple(problems))
    return NodeCheckup(node, time.monotonic() - begun_s, tuple(problems))
