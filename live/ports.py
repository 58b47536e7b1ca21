"""The ports through which a running cluster is seen and joined: its directory, its
datanodes, a membership of our own.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from merkle.errors import ReconcileError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ContainerReplica
from merkle.tree import BlockId, ContainerId, ContainerTree
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

    # The SCMs that did not answer the last call.
    silent: tuple[str, ...]

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

    def read_block(
        self, container_id: ContainerId, block_id: BlockId, chunks: Sequence[ChunkRecord]
    ) -> Iterator[tuple[ChunkRecord, ByteRange, Sequence[bytes]]]:
        """Chunks of a block in ranges, in order, with their unproven bytes in pieces;
        without what is beyond the end of the file, and without pieces where a range
        cannot be read.
        """

    def close(self) -> None:
        """Close the connection."""


class AgentReader(Protocol):
    """The agent on a datanode's host, which reads the datanode's volumes beside it.

    All methods may raise PeerUnavailableError, PeerRefusedError, RemoteProtocolError
    and AccessDeniedError.
    """

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """The tree that was written last, by the datanode or by the agent; checked.

        Raises:
            TreeRefusedError: it breaks a rule of merkle.check.
        """

    def scan(self, container_id: ContainerId, length_bytes: int) -> int:
        """Read and check all data of a replica of about `length_bytes`, at the agent's
        own rate; returns the root of its tree from then on, 0 if it has none.
        """

    def close(self) -> None:
        """Close the connection."""
