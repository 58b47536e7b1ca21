"""The ports of an agent's gRPC service: scans on demand, and the status."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId
from runtime.live_limits import LiveLimit


@dataclass(frozen=True, slots=True)
class ScanFinding:
    """A finding as sent over the wire; `type` is a name of Ozone's failure types."""

    type: str
    block_id: BlockId | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class ScanReport:
    """The findings of a scan, and the replica's state and root after it.

    `data_checksum` is 0 if the root is unknown.
    """

    container_id: ContainerId
    state: ReplicaState
    data_checksum: int
    bytes_read: int
    findings: tuple[ScanFinding, ...] = ()


class ScanService(Protocol):
    """Scans on demand. Thread-safe."""

    def scan(self, container_id: ContainerId, cancelled: Callable[[], bool]) -> ScanReport:
        """Scan now, and return when the scan is done.

        Raises:
            ContainerNotFoundError: the container is not on this datanode.
            ContainerStateError: a container in this state cannot be scanned.
            BusyError: too many scans are waiting.
            OperationInterruptedError: `cancelled` returned True, or the agent stops.
            ReconcileError: the scan failed.
        """

    def schedule(self, container_id: ContainerId) -> None:
        """Request a background scan that builds the missing tree. Repeated calls have
        no further effect.

        Raises:
            ContainerNotFoundError: the container is not on this datanode.
        """


@dataclass(frozen=True, slots=True)
class VolumeStatus:
    """A volume, and the work of its scanner since the start. `storage_id` is empty if
    the volume could not be opened; `last_error` is empty if there was none.
    """

    path: str
    storage_id: str
    hold: str
    containers: int
    bytes_scanned: int = 0
    containers_scanned: int = 0
    last_error: str = ""
    # Over the last minute.
    scan_bytes_per_second: float = 0.0
    # Since the oldest data scan of a replica; None if one was never scanned, if there
    # is none, or if the volume failed.
    full_scan_age_s: float | None = None
    never_scanned: int = 0


@dataclass(frozen=True, slots=True)
class ReconciliationStatus:
    """The progress of a running reconciliation."""

    job_id: str
    container_id: ContainerId
    phase: str
    windows_written: int = 0
    bytes_fetched: int = 0


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The state of an agent: volumes, running reconciliations, limits and rates, and
    whether its callers need a role.
    """

    datanode_id: PeerId
    repair_enabled: bool
    volumes: tuple[VolumeStatus, ...] = ()
    reconciliations: tuple[ReconciliationStatus, ...] = ()
    limits: tuple[LiveLimit, ...] = ()
    # Fetched by all repairs, over the last minute.
    repair_bytes_per_second: float = 0.0
    # Why a thread does not get on; empty if all do.
    fault: str = ""
    roles_enforced: bool = False


class StatusSource(Protocol):
    """The source of an agent's status. Thread-safe."""

    def status(self) -> AgentStatus:
        """The current status."""
