"""Containers as SCM reports them: with the cluster's own state and required count.

This is the port through which a cluster without agents is read and ordered. SCM takes
orders for containers as a whole, and never for one replica.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from merkle.replica import ContainerReplica, ContainerState, PeerId
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError
from ozone.scm_client import ClusterContainer, ClusterIdentity, ClusterNode, NodeHealth
from runtime.errors import PeerRefusedError
from scm.eligibility import Availability, Ruling, evaluate, evaluate_availability
from scm.policy import Knowledge

_HEARD = frozenset({NodeHealth.HEALTHY, NodeHealth.HEALTHY_READONLY})


class ClusterReports(Protocol):
    """Reports of containers, and orders for them as a whole: ozone.scm_client.

    All methods may raise PeerUnavailableError, PeerRefusedError, RemoteProtocolError,
    AccessDeniedError and SecuredClusterError.
    """

    def nodes(self) -> tuple[ClusterNode, ...]:
        """All datanodes, in ascending order of their IDs."""

    def get_containers(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, ClusterContainer]:
        """These containers, without unknown ones."""

    def replicas(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, tuple[ContainerReplica, ...]]:
        """The reported replicas of these containers, without unknown ones."""

    def reconcile(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None]:
        """Request reconciliation; each container has its refusal or None."""


class ClusterListing(ClusterReports, Protocol):
    """The same, with all containers."""

    def identity(self) -> ClusterIdentity:
        """Which cluster it is, and whether it is in safe mode."""

    def containers(self, after: int = 0) -> Iterator[ClusterContainer]:
        """All containers above an ID, in ascending order."""

    def close(self) -> None:
        """Close all connections."""


@dataclass(frozen=True, slots=True)
class ContainerReport:
    """A container with the cluster's own state and required count, and its replicas;
    `live` are those whose datanodes SCM hears from.
    """

    container: ClusterContainer
    replicas: tuple[ContainerReplica, ...]
    live: frozenset[PeerId]

    @property
    def known(self) -> Knowledge:
        """What a comparison of its roots has to take into account."""
        silent = frozenset(replica.peer for replica in self.replicas) - self.live
        return Knowledge(self.container.required_replicas, silent)


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All datanodes, and some containers as SCM reports them now. `gone` are containers
    that SCM does not know. With `listed`, all containers with IDs above its first
    number and up to its second are here; others in between are gone too.
    """

    nodes: tuple[ClusterNode, ...]
    containers: Mapping[ContainerId, ContainerReport]
    gone: frozenset[ContainerId] = frozenset()
    listed: tuple[int, int] | None = None


def ruling_of(container_id: ContainerId, report: ContainerReport | None) -> Ruling:
    """Whether a container may be reconciled: Ozone's rules, then whether two of its
    replicas are on datanodes that SCM hears from. None is a container unknown to SCM.
    """
    if report is None:
        return evaluate(container_id, None, (), required_nodes=0)
    ruling = evaluate(
        container_id,
        report.container.state,
        report.replicas,
        required_nodes=report.container.required_replicas,
    )
    if not ruling.is_ok:
        return ruling
    live = len(report.live)
    return evaluate_availability(container_id, Availability(True, live, live))


def read_reports(
    cluster: ClusterReports, container_ids: Sequence[ContainerId]
) -> Mapping[ContainerId, ContainerReport]:
    """The reports of these containers, without those that SCM does not know."""
    return read_snapshot(cluster, container_ids).containers


def read_snapshot(
    cluster: ClusterReports,
    container_ids: Sequence[ContainerId],
    page: Sequence[ClusterContainer] = (),
) -> ClusterSnapshot:
    """The datanodes, these containers, and those of a page of SCM's list."""
    nodes = cluster.nodes()
    heard = {node.peer for node in nodes if node.health in _HEARD}
    containers = {one.container_id: one for one in page}
    wanted = [number for number in container_ids if number not in containers]
    containers |= cluster.get_containers(wanted) if wanted else {}
    # SCM keeps deleted containers on record.
    containers = {
        number: one for number, one in containers.items() if one.state is not ContainerState.DELETED
    }
    replicas = cluster.replicas(list(containers))
    reports = {
        number: ContainerReport(
            container,
            replicas.get(number, ()),
            frozenset(r.peer for r in replicas.get(number, ()) if r.peer in heard),
        )
        for number, container in containers.items()
    }
    return ClusterSnapshot(nodes, reports, frozenset(container_ids) - reports.keys())


def reason_not_compared(container: ClusterContainer) -> str:
    """Why the roots of a container are not compared; empty if they are."""
    if container.state not in (ContainerState.CLOSED, ContainerState.QUASI_CLOSED):
        return f"the container is {container.state.value}: only closed ones have trees"
    return ""
