"""The trees of a container's replicas, as their agents have them now, compared."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from merkle.comparison import Comparison, compare, with_doubt
from merkle.errors import ReconcileError
from merkle.limits import PEERS_MAX
from merkle.tree import ContainerTree
from ozone.datanode_client import DatanodeClient
from repair.peers import AgentPeer, checked_tree
from runtime.roles import Identity, Role
from runtime.rpc import Deadlines, open_channel
from runtime.tls_files import Tls
from scm.policy import RootComparison
from scm.views import ContainerStatus, ReplicaStatus

# A datanode that takes longer is left out, and named.
_CLUSTER_DEADLINES = Deadlines(tree_s=5.0)


def fetch_trees(
    container: ContainerStatus,
    *,
    tls: Tls | None,
    insecure: bool,
    deadlines: Deadlines | None = None,
) -> tuple[dict[str, ContainerTree], dict[str, ReconcileError]]:
    """The trees of the live replicas, and the errors of those that could not be
    fetched, by datanode. Agents are called by our own files of TLS.
    """
    # Imported here: what calls no agent does not need it.
    from runtime.tls_faults import named_fault

    def fetch(replica: ReplicaStatus) -> ContainerTree | ReconcileError:
        peer_id, address = replica.datanode.peer, replica.datanode.address
        try:
            server = Identity(Role.DATANODE, peer_id)
            channel = open_channel(address, tls=tls, insecure=insecure, server=server)
            explain = partial(named_fault, address=address, tls=tls)
            peer = AgentPeer(peer_id, channel, address, deadlines=deadlines, explain=explain)
            try:
                return peer.tree(container.container_id)
            finally:
                peer.close()
        except ReconcileError as error:
            return error

    return _fetch_all(container, fetch)


def fetch_cluster_trees(
    container: ContainerStatus,
) -> tuple[dict[str, ContainerTree], dict[str, ReconcileError]]:
    """The same of a cluster without agents, from its datanodes."""

    def fetch(replica: ReplicaStatus) -> ContainerTree | ReconcileError:
        peer_id, number = replica.datanode.peer, container.container_id
        try:
            # Ozone itself uses no TLS in an unsecured cluster.
            channel = open_channel(replica.datanode.address, insecure=True)
            client = DatanodeClient(
                channel, f"datanode {peer_id}", datanode_id=peer_id, deadlines=_CLUSTER_DEADLINES
            )
            try:
                [(_, found)] = client.each_tree_bytes([number])
            finally:
                client.close()
            return found if isinstance(found, ReconcileError) else checked_tree(found, number)
        except ReconcileError as error:
            return error

    return _fetch_all(container, fetch)


def _fetch_all(
    container: ContainerStatus, fetch: Callable[[ReplicaStatus], ContainerTree | ReconcileError]
) -> tuple[dict[str, ContainerTree], dict[str, ReconcileError]]:
    trees: dict[str, ContainerTree] = {}
    errors: dict[str, ReconcileError] = {}
    live = [replica for replica in container.replicas if replica.is_live]
    with ThreadPoolExecutor(max(1, min(len(live), PEERS_MAX))) as pool:
        for replica, result in zip(live, pool.map(fetch, live), strict=True):
            name = replica.datanode.peer
            if isinstance(result, ReconcileError):
                errors[name] = result
            else:
                trees[name] = result
    return trees, errors


def compare_live(
    container: ContainerStatus, trees: Mapping[str, ContainerTree]
) -> tuple[Comparison, str]:
    """The comparison of the trees of live replicas, and what it does not show; empty if
    it shows all: the trees of all expected replicas, each of a recent scan.
    """
    compared = compare(trees)
    doubt = ""
    if container.compared.comparison is RootComparison.UNKNOWN:
        doubt = container.compared.note
    if is_incomplete := len(trees) < container.expected_replicas:
        doubt = f"{len(trees)} of {container.expected_replicas} expected replicas were compared"
    return with_doubt(compared, is_incomplete=is_incomplete) if doubt else compared, doubt
