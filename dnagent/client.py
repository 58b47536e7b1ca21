"""A client of the Agent service, for commands: scans, plans and undo at one replica,
and the status.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from dnagent.ports import AgentStatus, ReconciliationStatus, VolumeStatus
from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos.agent_pb2 import (
    GetStatusRequest,
    GetStatusResponse,
    Holder,
    PlanRepairRequest,
    PlanRepairResponse,
    ScanContainerRequest,
    ScanContainerResponse,
    UndoJobRequest,
    UndoJobResponse,
)
from protos.agent_pb2 import VolumeStatus as VolumeMessage
from protos.agent_pb2_grpc import AgentStub
from protos.values import rate_from, seconds_from
from runtime.errors import PeerUnavailableError, RemoteProtocolError
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


@dataclass(frozen=True, slots=True)
class UndoSummary:
    """The plan of an undo, as a JSON document; if it was carried out, the ID under
    which it can be undone, and the name of the replica's state after it.
    """

    plan: bytes
    undo_id: str
    state: str


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

    def plan_repair(
        self,
        container_id: ContainerId,
        peers: Mapping[PeerId, str],
        *,
        timeout_s: float,
    ) -> bytes:
        """What a repair of this replica would write (repair.replica_plan), as a JSON
        document. `peers` are the addresses of the other holders.

        Raises:
            PeerUnavailableError: the agent did not answer in time.
            ReconcileError: the agent refused; the error has its reason.
        """
        request = PlanRepairRequest(container_id=container_id, peers=_holders(peers))
        with named_errors(self._target, PeerUnavailableError):
            answer: PlanRepairResponse = self._stub.PlanRepair(request, timeout=timeout_s)
        return answer.plan

    def undo_job(
        self,
        container_id: ContainerId,
        job_id: str,
        peers: Mapping[PeerId, str],
        *,
        digest: str = "",
        requested_by: str = "",
        reason: str = "",
        timeout_s: float,
    ) -> UndoSummary:
        """Plan the undo of a job on this replica (repair.undo_plan); with the plan's
        digest carry it out. `peers` are the addresses of the other holders.

        Raises:
            PeerUnavailableError: the agent did not answer in time.
            ReconcileError: the agent refused; the error has its reason.
        """
        request = UndoJobRequest(
            container_id=container_id,
            job_id=job_id,
            peers=_holders(peers),
            digest=digest,
            requested_by=requested_by,
            reason=reason,
        )
        with named_errors(self._target, PeerUnavailableError):
            answer: UndoJobResponse = self._stub.UndoJob(request, timeout=timeout_s)
        return UndoSummary(answer.plan, answer.undo_id, answer.state)

    def status(self, *, timeout_s: float) -> AgentStatus:
        """What the agent says of itself.

        Raises:
            PeerUnavailableError: the agent did not answer in time.
            RemoteProtocolError: its answer is invalid.
            ReconcileError: the agent refused; the error has its reason.
        """
        with named_errors(self._target, PeerUnavailableError):
            answer: GetStatusResponse = self._stub.GetStatus(GetStatusRequest(), timeout=timeout_s)
        try:
            return _status_from(answer)
        except ValueError as error:
            text = f"{self._target} sent an invalid status: {error}"
            raise RemoteProtocolError(text) from error


def _status_from(message: GetStatusResponse) -> AgentStatus:
    """The status in an agent's answer.

    Raises:
        ValueError: a time or a rate is none.
    """
    return AgentStatus(
        PeerId(message.datanode_id),
        message.repair_enabled,
        tuple(_volume_from(volume) for volume in message.volumes),
        tuple(
            ReconciliationStatus(
                one.job_id,
                ContainerId(one.container_id),
                one.phase,
                one.windows_written,
                one.bytes_fetched,
            )
            for one in message.reconciliations
        ),
        tuple(
            LiveLimit(one.name, one.value, one.set_by, seconds_from(one.set_at_s))
            for one in message.limits
        ),
        rate_from(message.repair_bytes_per_second),
        message.fault,
        message.roles_enforced,
    )


def _holders(peers: Mapping[PeerId, str]) -> list[Holder]:
    return [Holder(datanode_id=peer, address=address) for peer, address in peers.items()]


def _volume_from(message: VolumeMessage) -> VolumeStatus:
    return VolumeStatus(
        message.path,
        message.storage_id,
        message.hold,
        message.containers,
        message.bytes_scanned,
        message.containers_scanned,
        message.last_error,
        rate_from(message.scan_bytes_per_second),
        seconds_from(message.full_scan_age_s) if message.HasField("full_scan_age_s") else None,
        message.never_scanned,
    )
