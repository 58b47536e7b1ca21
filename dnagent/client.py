"""A client of the Agent service, for commands: scans of one replica, and the status."""

from dataclasses import dataclass

import grpc

from dnagent.ports import AgentStatus, ReconciliationStatus, VolumeStatus
from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos.agent_pb2 import (
    GetStatusRequest,
    GetStatusResponse,
    ScanContainerRequest,
    ScanContainerResponse,
)
from protos.agent_pb2 import VolumeStatus as VolumeMessage
from protos.agent_pb2_grpc import AgentStub
from runtime.errors import PeerUnavailableError
from runtime.live_limits import LiveLimit
from runtime.rpc import named_errors


@dataclass(frozen=True, slots=True)
class ScanSummary:
    """A replica after a scan: the name of its state, its root, and the type of each
    finding.
    """

    state: str
    data_checksum: int
    findings: tuple[str, ...]


class AgentClient:
    """A client on an open channel, which the caller closes."""

    def __init__(self, channel: grpc.Channel, target: str) -> None:
        """`target` is the agent's address, for error messages."""
        self._stub = AgentStub(channel)
        self._target = target

    def scan(self, container_id: ContainerId, *, timeout_s: float) -> ScanSummary:
        """Scan a replica now; the agent stores the resulting tree.

        Raises:
            PeerUnavailableError: the agent did not answer in time.
            ReconcileError: the agent refused; the error has its reason.
        """
        with named_errors(self._target, PeerUnavailableError):
            answer: ScanContainerResponse = self._stub.ScanContainer(
                ScanContainerRequest(container_id=container_id), timeout=timeout_s
            )
        findings = tuple(finding.type for finding in answer.findings)
        return ScanSummary(answer.state, answer.data_checksum, findings)

    def status(self, *, timeout_s: float) -> AgentStatus:
        """What the agent says of itself.

        Raises:
            PeerUnavailableError: the agent did not answer in time.
            ReconcileError: the agent refused; the error has its reason.
        """
        with named_errors(self._target, PeerUnavailableError):
            answer: GetStatusResponse = self._stub.GetStatus(GetStatusRequest(), timeout=timeout_s)
        return AgentStatus(
            PeerId(answer.datanode_id),
            answer.repair_enabled,
            tuple(_volume_from(volume) for volume in answer.volumes),
            tuple(
                ReconciliationStatus(
                    one.job_id,
                    ContainerId(one.container_id),
                    one.phase,
                    one.windows_written,
                    one.bytes_fetched,
                )
                for one in answer.reconciliations
            ),
            tuple(
                LiveLimit(one.name, one.value, one.set_by, one.set_at_s) for one in answer.limits
            ),
            answer.repair_bytes_per_second,
            answer.fault,
        )


def _volume_from(message: VolumeMessage) -> VolumeStatus:
    return VolumeStatus(
        message.path,
        message.storage_id,
        message.hold,
        message.containers,
        message.bytes_scanned,
        message.containers_scanned,
        message.last_error,
        message.scan_bytes_per_second,
        message.full_scan_age_s if message.HasField("full_scan_age_s") else None,
        message.never_scanned,
    )
