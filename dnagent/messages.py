"""The controller's messages, converted to and from an agent's values; the client."""

import re
from typing import assert_never

from dnagent.heartbeat import (
    CancelCommand,
    Command,
    CommandEnvelope,
    HeartbeatResponse,
    JobReport,
    OutgoingHeartbeat,
    PeerAddress,
    ReconcileCommand,
    ScanCommand,
    ThrottleCommand,
)
from merkle.limits import PEERS_MAX
from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from protos.controller_pb2_grpc import ControllerStub
from protos.errors import ControllerUnavailableError
from protos.values import replica_to, set_report
from runtime.roles import Role
from runtime.rpc import named_errors, open_channel
from runtime.setting_values import split_address
from runtime.tls_renewal import RenewableTls

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DEADLINE_S = 10.0


def request_of(
    heartbeat: OutgoingHeartbeat,
    *,
    datanode_id: str,
    address: str,
    incarnation: int,
    returns_to_service: bool = False,
) -> pb.HeartbeatRequest:
    """The message of a heartbeat; `incarnation` is higher at each start of an agent."""
    report = pb.ContainerReport(
        full=heartbeat.full,
        replicas=[replica_to(replica) for replica in heartbeat.replicas],
        removed_container_ids=heartbeat.removed,
        after_container_id=heartbeat.after,
        through_container_id=heartbeat.through,
    )
    return pb.HeartbeatRequest(
        datanode=pb.Datanode(
            datanode_id=datanode_id,
            hostname=split_address(address)[0],
            address=address,
            returns_to_service=returns_to_service,
        ),
        incarnation=str(incarnation),
        sequence=heartbeat.sequence,
        report=report,
        progress=[_progress_message(report) for report in heartbeat.progress],
        acknowledged_command_ids=heartbeat.acknowledged,
    )


def response_of(message: pb.HeartbeatResponse) -> HeartbeatResponse:
    """The response in a message, without commands that are unknown or invalid."""
    envelopes = []
    for sent in message.commands:
        command = _command_of(sent)
        if command is not None and sent.command_id:
            envelopes.append(CommandEnvelope(sent.command_id, sent.term, command))
    return HeartbeatResponse(tuple(envelopes), message.full_report_wanted, message.term)


# States that an UNHEALTHY replica may return to.
_RETURN_STATES = {state.value: state for state in (ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED)}


def _command_of(sent: pb.Command) -> Command | None:
    match sent.WhichOneof("body"):
        case "reconcile":
            body = sent.reconcile
            peers = tuple(
                PeerAddress(PeerId(p.datanode_id), p.address) for p in body.peers[:PEERS_MAX]
            )
            # Checked, because it becomes a folder name in the undo store.
            if not _JOB_ID.fullmatch(body.job_id):
                return None
            state = _RETURN_STATES.get(body.container_state)
            return ReconcileCommand(
                ContainerId(body.container_id),
                body.job_id,
                peers,
                state,
                body.skip_final_scan,
                body.bytes_per_second,
                body.requested_by,
                body.reason,
                body.plan,
            )
        case "cancel":
            return CancelCommand(sent.cancel.job_id, ContainerId(sent.cancel.container_id))
        case "throttle":
            return ThrottleCommand(sent.throttle.job_id, sent.throttle.bytes_per_second)
        case "scan":
            return ScanCommand(ContainerId(sent.scan.container_id))
        case None:
            return None
        case unreachable:
            assert_never(unreachable)


def _progress_message(job: JobReport) -> pb.ReconcileProgress:
    message = pb.ReconcileProgress(
        job_id=job.job_id,
        container_id=job.container_id,
        state=job.state.value if job.state else "running",
    )
    set_report(message, job.report)
    return message


class HeartbeatClient:
    """Sends heartbeats over gRPC (dnagent.heartbeat.HeartbeatReceiver)."""

    def __init__(
        self,
        address: str,
        *,
        datanode_id: str,
        advertised: str,
        incarnation: int,
        returns_to_service: bool = False,
        tls: RenewableTls | None,
        insecure: bool,
    ) -> None:
        """`advertised` is the address that peers use for this datanode. `incarnation`
        is higher at each start of its agent. `returns_to_service` is what the agent
        does with UNHEALTHY replicas that it has healed.
        """
        self._address = address
        self._datanode_id = datanode_id
        self._advertised = advertised
        self._incarnation = incarnation
        self._returns_to_service = returns_to_service
        self._tls = tls
        self._channel = open_channel(address, tls=tls, insecure=insecure, server=Role.CONTROLLER)
        self._stub = ControllerStub(self._channel)

    def heartbeat(self, heartbeat: OutgoingHeartbeat) -> HeartbeatResponse:
        """Send one heartbeat and return the response.

        Raises:
            ControllerUnavailableError: the controller did not answer in time.
            ReconcileError: the controller refused it; the error has its reason.
        """
        request = request_of(
            heartbeat,
            datanode_id=self._datanode_id,
            address=self._advertised,
            incarnation=self._incarnation,
            returns_to_service=self._returns_to_service,
        )
        try:
            with named_errors(self._address, ControllerUnavailableError):
                response: pb.HeartbeatResponse = self._stub.Heartbeat(request, timeout=DEADLINE_S)
        except ControllerUnavailableError as error:
            # Imported here: it is needed only where a connection failed.
            from runtime.tls_faults import named_fault

            raise named_fault(
                error, self._address, self._tls.files if self._tls else None
            ) from error
        return response_of(response)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
