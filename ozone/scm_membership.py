"""A datanode's side of SCM's heartbeat protocol, as far as a source of one replica
needs it: register, report the replica, stay alive, report nothing, leave.

SCM believes what a new datanode says of itself. This one says that it is DECOMMISSIONED
and has no space: nothing is ever placed on it, and SCM forgets its replica when it
dies. The replica is reported UNHEALTHY: peers may reconcile from it, and SCM neither
counts it nor deletes another one on its account.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.hadoop_rpc import HadoopRpcClient
from protos import ozone_heartbeat_pb2 as pb
from runtime.errors import PeerRefusedError, RemoteProtocolError
from runtime.rpc import printable

_SCM_DATANODE_PORT = 9861
_PROTOCOL = "org.apache.hadoop.ozone.protocol.StorageContainerDatanodeProtocol"
# Of Ozone 2.2: SCM refuses a datanode of another software layout.
_LAYOUT_VERSION = 10
_CURRENT_VERSION = 3
# Of SCMCommandProto: SCM does not know this datanode, say since it was restarted.
_REREGISTER = 1
_CAPACITY_BYTES = 1 << 30
# Commands for a datanode that holds nothing are few; parsed, each takes a multiple.
_RESPONSE_BYTES_MAX = 1 << 20
# For an SCM that did not answer before: it must not delay what the others are told.
_SILENT_DEADLINE_S = 1.0
# Peers read from the first; they name the others, and nobody connects to them.
_PORTS = ("STANDALONE", "RATIS", "REPLICATION")


@dataclass(frozen=True, slots=True)
class ReportedReplica:
    """The replica that is served. `data_checksum` is its root, `bcs_id` the container's
    commit.
    """

    container_id: ContainerId
    data_checksum: int
    bcs_id: int
    used_bytes: int = 0
    block_count: int = 0


class ScmMembership:
    """One datanode's registration at all SCMs of a cluster, since any of them can
    become the leader. Thread-safe.

    Methods succeed if one SCM answered; `silent` has the addresses of those that did
    not answer the last call. They raise the last error if none did:
    PeerUnavailableError, RemoteProtocolError, PeerRefusedError, AccessDeniedError or
    SecuredClusterError.
    """

    def __init__(
        self, addresses: Sequence[str], node: PeerId, port: int, *, deadline_s: float = 10.0
    ) -> None:
        """`addresses` are SCMs' ports for datanodes; `node` is our UUID and `port`
        where peers read from us, on the host that SCM sees us connect from.

        Raises:
            ConfigError: an address is not host:port.
        """
        assert addresses
        self.node = node
        self.silent: tuple[str, ...] = ()
        self._clients = [
            HadoopRpcClient(address, _PROTOCOL, deadline_s=deadline_s) for address in addresses
        ]
        self._details = pb.DatanodeDetailsProto(
            uuid=node,
            ipAddress="127.0.0.1",
            hostName="localhost",
            ports=[pb.Port(name=name, value=port) for name in _PORTS],
            persistedOpState=pb.DECOMMISSIONED,
            persistedOpStateExpiry=0,
            currentVersion=_CURRENT_VERSION,
        )
        self._layout = pb.LayoutVersionProto(
            metadataLayoutVersion=_LAYOUT_VERSION, softwareLayoutVersion=_LAYOUT_VERSION
        )

    def register(self, replicas: Sequence[ReportedReplica]) -> None:
        """Register with a full report of these replicas.

        Raises:
            PeerRefusedError: SCM does not admit us; its layout version may differ.
        """
        body = pb.SCMRegisterRequestProto(
            extendedDatanodeDetails=pb.ExtendedDatanodeDetailsProto(datanodeDetails=self._details),
            nodeReport=pb.NodeReportProto(storageReport=[self._storage()]),
            containerReport=self._report(replicas),
            pipelineReports=pb.PipelineReportsProto(),
            dataNodeLayoutVersion=self._layout,
        )
        request = pb.SCMDatanodeRequest(cmdType=pb.Register, registerRequest=body)

        def check(reply: pb.SCMDatanodeResponse) -> None:
            self._check_node(reply.registerResponse.datanodeUUID)
            if reply.registerResponse.errorCode != pb.SCMRegisteredResponseProto.success:
                raise PeerRefusedError(
                    "SCM does not admit a datanode with the layout of Apache Ozone 2.2",
                    hint="The cluster runs another release, or its upgrade is not finalized.",
                    result="errorNodeNotPermitted",
                )

        self._ask_all(request, "registerResponse", check)

    def heartbeat(self, full_report: Sequence[ReportedReplica] | None = None) -> bool:
        """Say that we are alive, with a full report of our replicas unless it is None.
        Returns whether an SCM does not know us: then register again.
        """
        body = pb.SCMHeartbeatRequestProto(
            datanodeDetails=self._details,
            containerReport=None if full_report is None else self._report(full_report),
            dataNodeLayoutVersion=self._layout,
            commandQueueReport=pb.CommandQueueReportProto(),
        )
        request = pb.SCMDatanodeRequest(cmdType=pb.SendHeartbeat, sendHeartbeatRequest=body)
        is_unknown = False

        def check(reply: pb.SCMDatanodeResponse) -> None:
            nonlocal is_unknown
            self._check_node(reply.sendHeartbeatResponse.datanodeUUID)
            commands = reply.sendHeartbeatResponse.commands
            is_unknown |= any(one.commandType == _REREGISTER for one in commands)

        self._ask_all(request, "sendHeartbeatResponse", check)
        return is_unknown

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def _check_node(self, answered: str) -> None:
        if answered != self.node:
            raise RemoteProtocolError(f"SCM answered for datanode {printable(answered)}")

    def _ask_all(
        self,
        request: pb.SCMDatanodeRequest,
        body: str,
        check: Callable[[pb.SCMDatanodeResponse], None],
    ) -> None:
        failures = list[tuple[str, ReconcileError]]()
        for client in self._clients:
            deadline_s = _SILENT_DEADLINE_S if client.address in self.silent else math.inf
            try:
                raw = client.call(request, deadline_s=deadline_s)
                check(_parse(raw, request.cmdType, body, client.address))
            except ReconcileError as error:
                failures.append((client.address, error))
        self.silent = tuple(address for address, _ in failures)
        if len(failures) == len(self._clients):
            raise failures[-1][1]

    def _storage(self) -> pb.StorageReportProto:
        return pb.StorageReportProto(
            storageUuid=f"DS-{self.node}",
            storageLocation="/treefold-rescue",
            capacity=_CAPACITY_BYTES,
            remaining=0,
        )

    def _report(self, replicas: Sequence[ReportedReplica]) -> pb.ContainerReportsProto:
        return pb.ContainerReportsProto(
            reports=[
                pb.ContainerReplicaProto(
                    containerID=one.container_id,
                    state=pb.ContainerReplicaProto.UNHEALTHY,
                    size=one.used_bytes,
                    used=one.used_bytes,
                    keyCount=one.block_count,
                    readCount=0,
                    writeCount=0,
                    readBytes=0,
                    writeBytes=0,
                    deleteTransactionId=0,
                    blockCommitSequenceId=one.bcs_id,
                    originNodeId=self.node,
                    replicaIndex=0,
                    isEmpty=False,
                    dataChecksum=one.data_checksum,
                )
                for one in replicas
            ]
        )


def _parse(raw: bytes, kind: pb.Type, body: str, address: str) -> pb.SCMDatanodeResponse:
    if len(raw) > _RESPONSE_BYTES_MAX:
        raise RemoteProtocolError(f"{address} sent a response of {len(raw)} bytes")
    try:
        reply = pb.SCMDatanodeResponse.FromString(raw)
    except DecodeError as error:
        raise RemoteProtocolError(f"{address} sent an invalid response") from error
    if not reply.IsInitialized() or reply.cmdType != kind:
        raise RemoteProtocolError(f"{address} sent a response with unknown or missing fields")
    if not reply.success or reply.status != pb.OK:
        raise PeerRefusedError(f"{address}: {printable(reply.message)}", result="ERROR")
    if not reply.HasField(body):
        raise RemoteProtocolError(f"{address} sent a response without a body")
    return reply
