"""The ports of an agent: what it needs from its peers, and what its service needs from
the rest of the agent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId


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
            OperationInterruptedError: `cancelled` turned true.
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

    def status(self) -> AgentStatus:
        """The agent's status now."""
