"""The ports through which a running cluster is seen and joined: its directory, its
datanodes, a membership of our own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from merkle.errors import ReconcileError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ContainerReplica
from merkle.tree import BlockId, ContainerId
from ozone.ports import ByteRange
from ozone.scm_client import ClusterContainer, ClusterIdentity, ClusterNode
from ozone.scm_membership import ReportedReplica
from runtime.errors import PeerRefusedError, RemoteProtocolError


class ClusterDirectory(Protocol):
    """Which containers there are, and where: ozone.scm_client.ScmClient.

    All methods may raise PeerUnavailableError, PeerRefusedError, RemoteProtocolError,
    AccessDeniedError and SecuredClusterError.
    """

    def identity(self) -> ClusterIdentity:
        """Which cluster it is."""

    def nodes(self) -> tuple[ClusterNode, ...]:
        """All datanodes, in ascending order of their IDs."""

    def containers(self, after: int = 0) -> Iterator[ClusterContainer]:
        """All containers above an ID, in ascending order."""

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
    ) -> Mapping[ContainerId, ReconcileError | None]:
        """Order all datanodes of each container to reconcile it. By container: why SCM
        refuses, or None.
        """


class ClusterMember(Protocol):
    """A datanode's registration at SCM: ozone.scm_membership.ScmMembership.

    All methods but `close` may raise PeerUnavailableError, PeerRefusedError,
    RemoteProtocolError, AccessDeniedError and SecuredClusterError.
    """

    def register(self, replicas: Sequence[ReportedReplica]) -> None:
        """Register with a full report of these replicas."""

    def heartbeat(self, full_report: Sequence[ReportedReplica] | None = None) -> bool:
        """Say that we are alive, with a full report unless it is None. Returns whether
        SCM does not know us.
        """

    def close(self) -> None:
        """Close all connections."""


class DatanodeReader(Protocol):
    """The replicas of one datanode: ozone.datanode_client.DatanodeClient.

    All methods may raise PeerUnavailableError, PeerRefusedError and
    RemoteProtocolError.
    """

    def each_tree_bytes(
        self, container_ids: Sequence[ContainerId]
    ) -> Iterator[tuple[ContainerId, bytes | PeerRefusedError | RemoteProtocolError]]:
        """Each container with its tree file or its error, in order."""

    def list_records(self, container_id: ContainerId) -> Iterator[BlockRecord]:
        """All records of a container.

        Raises:
            RecordInvalidError: a record contradicts itself.
        """

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[tuple[ByteRange, Sequence[bytes]]]:
        """Each range with its unproven bytes in pieces; shortened or without pieces
        where the file ends.
        """

    def close(self) -> None:
        """Close the connection."""
