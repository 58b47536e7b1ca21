"""The ports of an agent: what it needs from its peers, and what its service needs from
the rest of the agent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.ports import ByteRange, ReplicaHead, ReplicaSource

__all__ = [
    "AgentStatus",
    "ByteRange",
    "Peer",
    "Piece",
    "ReconciliationStatus",
    "ReplicaHead",
    "ReplicaSource",
    "ScanReport",
    "ScanService",
    "ScannedFault",
    "StatusSource",
    "VolumeStatus",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a block file as a peer sent them, proven by nothing yet; `data` may be a
    view of a larger message.
    """

    offset: int
    data: bytes | memoryview

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


class Peer(Protocol):
    """Another holder of our containers. Every call ends within a deadline.

    All methods may raise PeerUnavailableError (no answer in time: retry, or ask
    another), PeerRefusedError (it answered with an error; fact `result` names it) and
    RemoteProtocolError (it spoke nonsense: do not ask it again this round).
    """

    @property
    def peer_id(self) -> PeerId: ...

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """Its tree, parsed and checked.

        Raises:
            TreeRefusedError: the tree is not one we may act on.
        """

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """Its records of these blocks; what it does not hold is left out."""

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        """Bytes of one chunk as its disk holds them, never beyond what was asked.

        Ranges are ascending, do not overlap and lie inside the chunk. No piece crosses
        from one range into another that does not touch it. Where its file ends early
        all that is there is yielded first, then PeerRefusedError with result
        `short_read` is raised: windows that came whole are worth proving.
        """

    def close(self) -> None:
        """Give up the connection; idempotent."""


@dataclass(frozen=True, slots=True)
class ScannedFault:
    """One finding of a scan as it goes over the wire; `type` is one of Ozone's
    names.
    """

    type: str
    block_id: BlockId | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class ScanReport:
    """What a scan of one container found, and how it left the replica."""

    container_id: ContainerId
    state: ReplicaState
    data_checksum: int
    bytes_read: int
    findings: tuple[ScannedFault, ...] = ()


class ScanService(Protocol):
    """The agent's scanner, on demand."""

    def scan(self, container_id: ContainerId, cancelled: Callable[[], bool]) -> ScanReport:
        """Scan now and answer when done.

        Raises:
            ContainerNotFoundError: no such container here.
            ContainerStateError: its state allows no scan.
            BusyError: too many scans are waiting.
            InterruptedRepairError: `cancelled` turned true.
        """

    def schedule(self, container_id: ContainerId) -> None:
        """Have it scanned in the background, soon; scheduling twice is once."""


@dataclass(frozen=True, slots=True)
class VolumeStatus:
    path: str
    storage_id: str
    hold: str
    containers: int
    bytes_scanned: int = 0
    containers_scanned: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class ReconciliationStatus:
    job_id: str
    container_id: ContainerId
    phase: str
    windows_written: int = 0
    bytes_fetched: int = 0


@dataclass(frozen=True, slots=True)
class AgentStatus:
    datanode_id: PeerId
    repair_enabled: bool
    volumes: tuple[VolumeStatus, ...] = ()
    reconciliations: tuple[ReconciliationStatus, ...] = ()


class StatusSource(Protocol):
    """Whoever knows how the agent is."""

    def status(self) -> AgentStatus: ...
