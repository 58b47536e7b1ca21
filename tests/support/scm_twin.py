"""Ozone's SCM in memory, served on a real socket: the twin of what ozone.scm_client
calls.

It parses and writes Hadoop's frames by itself, so that the client is not checked by its
own code. Contract tests keep it like a real SCM.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from google.protobuf.internal.decoder import _DecodeVarint32
from google.protobuf.internal.encoder import _VarintBytes
from google.protobuf.message import Message

from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer, ClusterNode, NodeHealth, NodeOperation
from protos import hadoop_rpc_pb2 as rpc
from protos import ozone_heartbeat_pb2 as beat
from protos import ozone_scm_pb2 as pb
from scm.eligibility import evaluate

_PACKAGE = "org.apache.hadoop.hdds.scm"


@contextmanager
def served(serve: Callable[[socket.socket], None], port: int = 0) -> Iterator[str]:
    """Call `serve` in a thread with each connection to a port of loopback, any free one
    by default; the address is yielded. A connection is closed when its `serve` ends.
    """
    with socket.create_server(("127.0.0.1", port)) as listener:
        connections = list[socket.socket]()

        def handle(connection: socket.socket) -> None:
            with connection, suppress(OSError, EOFError):
                serve(connection)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connections.append(connection)
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        # Ends `accept`, which a mere close would leave waiting.
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def read_exactly(connection: socket.socket, length_bytes: int) -> bytes:
    """That many bytes; EOFError if the client closed before."""
    found = b""
    while len(found) < length_bytes:
        part = connection.recv(length_bytes - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def read_frame(connection: socket.socket) -> list[bytes]:
    """The messages of the next frame."""
    raw = read_exactly(connection, int.from_bytes(read_exactly(connection, 4), "big"))
    at, found = 0, list[bytes]()
    while at < len(raw):
        length, at = _DecodeVarint32(raw, at)
        found.append(raw[at : at + length])
        at += length
    return found


def frame(*messages: Message | bytes) -> bytes:
    """A frame of these messages."""
    body = b""
    for message in messages:
        raw = message if isinstance(message, bytes) else message.SerializeToString()
        body += _VarintBytes(len(raw)) + raw
    return len(body).to_bytes(4, "big") + body


def read_preamble(connection: socket.socket) -> rpc.IpcConnectionContextProto:
    """The context of a new connection, after its preamble."""
    assert read_exactly(connection, 7) == b"hrpc\x09\0\0"
    header, context = read_frame(connection)
    assert rpc.RpcRequestHeaderProto.FromString(header).callId == -3
    return rpc.IpcConnectionContextProto.FromString(context)


class _RefusedError(Exception):
    """An exception of Java, by its class."""


@dataclass
class ScmTwin:
    """One SCM and what it knows; tests change the fields."""

    nodes: list[ClusterNode] = field(default_factory=list)
    containers: dict[ContainerId, ClusterContainer] = field(default_factory=dict)
    replicas: dict[ContainerId, list[ContainerReplica]] = field(default_factory=dict)
    cluster_id: str = "CID-twin"
    is_standby: bool = False
    # What it says of the leader while it does not lead, as Ozone does.
    leader_hint: str = "Could not determine the leader node."
    in_safe_mode: bool = False
    # ozone.scm.container.list.max.count.
    list_max: int = 4096
    # Called with each container whose reconciliation SCM accepts.
    on_reconcile: Callable[[ContainerId], None] = field(default=lambda container_id: None)
    reconciled: list[ContainerId] = field(default_factory=list)
    # Called with the name of each call that took effect, before it is answered.
    before_answer: Callable[[str], None] = field(default=lambda name: None)
    calls: int = 0
    connections: int = 0
    # After so many calls a connection is closed, as an idle one; None is never.
    calls_per_connection: int | None = None
    # Of datanodes that registered and reported by the wire; others are in `nodes`.
    registrations: list[beat.SCMRegisterRequestProto] = field(default_factory=list)
    software_layout: int = 10
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, connection: socket.socket) -> None:
        """Answer one connection until the client closes it."""
        protocol = read_preamble(connection).protocol
        with self._lock:
            self.connections += 1
        left = self.calls_per_connection
        while left is None or left > 0:
            header, method, body = read_frame(connection)
            call_id = rpc.RpcRequestHeaderProto.FromString(header).callId
            assert rpc.RequestHeaderProto.FromString(method).methodName == "submitRequest"
            with self._lock:
                self.calls += 1
            if not protocol.endswith(".StorageContainerLocationProtocol"):
                refusal = f"org.apache.hadoop.ipc_.RpcNoSuchProtocolException: {protocol}"
                connection.sendall(_error(call_id, refusal, rpc.RpcResponseHeaderProto.FATAL))
                return
            try:
                request = pb.ScmContainerLocationRequest.FromString(body)
                reply = self._answer(request)
                self.before_answer(pb.Type.Name(request.cmdType))
            except _RefusedError as refused:
                connection.sendall(_error(call_id, str(refused), rpc.RpcResponseHeaderProto.ERROR))
            else:
                connection.sendall(frame(_header(call_id), reply))
            left = None if left is None else left - 1

    def serve_datanodes(self, connection: socket.socket) -> None:
        """Answer one connection to the port for datanodes."""
        protocol = read_preamble(connection).protocol
        assert protocol.endswith(".StorageContainerDatanodeProtocol")
        while True:
            header, _, body = read_frame(connection)
            call_id = rpc.RpcRequestHeaderProto.FromString(header).callId
            request = beat.SCMDatanodeRequest.FromString(body)
            with self._lock:
                reply = self._answer_datanode(request)
            self.before_answer(beat.Type.Name(request.cmdType))
            connection.sendall(frame(_header(call_id), reply))

    def _answer_datanode(self, request: beat.SCMDatanodeRequest) -> beat.SCMDatanodeResponse:
        reply = beat.SCMDatanodeResponse(cmdType=request.cmdType, status=beat.OK)
        if request.cmdType == beat.Register:
            body = request.registerRequest
            self.registrations.append(body)
            answer = reply.registerResponse
            details = body.extendedDatanodeDetails.datanodeDetails
            answer.datanodeUUID, answer.clusterID = details.uuid, self.cluster_id
            answer.errorCode = beat.SCMRegisteredResponseProto.success
            if body.dataNodeLayoutVersion.softwareLayoutVersion != self.software_layout:
                answer.errorCode = beat.SCMRegisteredResponseProto.errorNodeNotPermitted
                return reply
            port = next(one.value for one in details.ports if one.name == "STANDALONE")
            known = [node for node in self.nodes if node.peer != details.uuid]
            self.nodes = [*known, ClusterNode(
                PeerId(details.uuid), "localhost", f"127.0.0.1:{port}", NodeHealth.HEALTHY,
                NodeOperation.DECOMMISSIONED, details.currentVersion,
            )]  # fmt: skip
            self._take_report(PeerId(details.uuid), body.containerReport)
            return reply
        heartbeat = request.sendHeartbeatRequest
        peer = PeerId(heartbeat.datanodeDetails.uuid)
        reply.sendHeartbeatResponse.datanodeUUID = peer
        if peer not in {node.peer for node in self.nodes}:
            reply.sendHeartbeatResponse.commands.add(commandType=1)
        elif heartbeat.HasField("containerReport"):
            self._take_report(peer, heartbeat.containerReport)
        return reply

    def _take_report(self, peer: PeerId, report: beat.ContainerReportsProto) -> None:
        """A full report replaces what the datanode had."""
        for number, known in self.replicas.items():
            self.replicas[number] = [one for one in known if one.peer != peer]
        for one in report.reports:
            state = ReplicaState(beat.ContainerReplicaProto.State.Name(one.state))
            number = ContainerId(one.containerID)
            self.replicas[number].append(
                ContainerReplica(peer, number, state, one.dataChecksum, one.blockCommitSequenceId)
            )

    def _answer(self, request: pb.ScmContainerLocationRequest) -> pb.ScmContainerLocationResponse:
        if self.is_standby:
            raise _RefusedError(
                "org.apache.hadoop.hdds.ratis.ServerNotLeaderException: SCM Server:scm-2"
                f"(127.0.0.1) is not the leader. {self.leader_hint}"
            )
        reply = pb.ScmContainerLocationResponse(
            cmdType=request.cmdType, status=pb.ScmContainerLocationResponse.OK
        )
        match request.cmdType:
            case pb.GetScmInfo:
                info = reply.getScmInfoResponse
                info.clusterId, info.scmId = self.cluster_id, "scm-1"
                info.peerRoles.append("127.0.0.1:9894:LEADER:scm-1:127.0.0.1")
            case pb.InSafeMode:
                reply.inSafeModeResponse.inSafeMode = self.in_safe_mode
            case pb.GetContainerCount:
                reply.getContainerCountResponse.containerCount = len(self.containers)
            case pb.QueryNode:
                reply.nodeQueryResponse.datanodes.extend(map(_node, self.nodes))
            case pb.ListContainer:
                query = request.scmListContainerRequest
                ids = sorted(i for i in self.containers if i >= query.startContainerID)
                reply.scmListContainerResponse.SetInParent()
                for number in ids[: min(query.count, self.list_max)]:
                    row = reply.scmListContainerResponse.containers.add()
                    row.CopyFrom(_container(self.containers[number]))
            case pb.GetContainer:
                found = self._container(request.getContainerRequest.containerID)
                reply.getContainerResponse.containerInfo.CopyFrom(_container(found))
            case pb.GetContainerReplicas:
                found = self._container(request.getContainerReplicasRequest.containerID)
                reply.getContainerReplicasResponse.SetInParent()
                for replica in self.replicas.get(found.container_id, []):
                    row = reply.getContainerReplicasResponse.containerReplica.add()
                    row.CopyFrom(self._replica(replica))
            case pb.ReconcileContainer:
                self._reconcile(ContainerId(request.reconcileContainerRequest.containerID))
                reply.reconcileContainerResponse.SetInParent()
        return reply

    def _reconcile(self, container_id: ContainerId) -> None:
        found = self.containers.get(container_id)
        replicas = self.replicas.get(container_id, [])
        required = found.required_replicas if found else 0
        state = found.state if found else None
        ruling = evaluate(container_id, state, replicas, required_nodes=required)
        if found is None:
            raise _RefusedError(
                f"{_PACKAGE}.container.ContainerNotFoundException: {ruling.message}"
            )
        if not ruling.is_ok:
            raise _RefusedError(f"{_PACKAGE}.exceptions.SCMException: {ruling.message}")
        with self._lock:
            self.reconciled.append(container_id)
        self.on_reconcile(container_id)

    def _container(self, container_id: int) -> ClusterContainer:
        found = self.containers.get(ContainerId(container_id))
        if found is None:
            raise _RefusedError(
                f"{_PACKAGE}.container.ContainerNotFoundException:"
                f" Container #{container_id} not found"
            )
        return found

    def _replica(self, replica: ContainerReplica) -> pb.SCMContainerReplicaProto:
        return pb.SCMContainerReplicaProto(
            containerID=replica.container_id,
            state=replica.state.value,
            datanodeDetails=_details(self._node_of(replica.peer)),
            placeOfBirth=replica.peer,
            sequenceID=replica.bcs_id,
            keyCount=replica.block_count,
            bytesUsed=replica.used_bytes,
            replicaIndex=replica.replica_index or -1,
            dataChecksum=replica.data_checksum or 0,
        )

    def _node_of(self, peer: PeerId) -> ClusterNode:
        return next(node for node in self.nodes if node.peer == peer)


def _header(call_id: int) -> rpc.RpcResponseHeaderProto:
    return rpc.RpcResponseHeaderProto(callId=call_id, status=rpc.RpcResponseHeaderProto.SUCCESS)


def _error(call_id: int, text: str, status: rpc.RpcResponseHeaderProto.RpcStatusProto) -> bytes:
    name = text.partition(":")[0]
    header = rpc.RpcResponseHeaderProto(
        callId=call_id,
        status=status,
        exceptionClassName=name,
        errorMsg=f"{text}\n\tat java.lang.Thread.run",
    )
    return frame(header)


def _details(node: ClusterNode) -> pb.DatanodeDetailsProto:
    host, _, port = node.address.rpartition(":")
    details = pb.DatanodeDetailsProto(uuid=node.peer, ipAddress=host, hostName=node.host)
    details.ports.add(name="RATIS", value=1)
    if port:
        details.ports.add(name="STANDALONE", value=int(port))
    if node.version is not None:
        details.currentVersion = node.version
    return details


def _node(node: ClusterNode) -> pb.Node:
    return pb.Node(
        nodeID=_details(node),
        nodeStates=[pb.NodeState.Value(node.health.value)],
        nodeOperationalStates=[pb.NodeOperationalState.Value(node.operation.value)],
    )


def _container(container: ClusterContainer) -> pb.ContainerInfoProto:
    row = pb.ContainerInfoProto(
        containerID=container.container_id,
        state=pb.LifeCycleState.Value(container.state.value),
        usedBytes=container.used_bytes,
        numberOfKeys=container.block_count,
        owner="OZONE",
        sequenceId=container.bcs_id,
        replicationType=pb.EC if container.is_erasure_coded else pb.RATIS,
    )
    if container.is_erasure_coded:
        code = row.ecReplicationConfig
        code.data, code.parity, code.codec, code.ecChunkSize = 3, 2, "RS", 1 << 20
        if known := container.erasure_code:
            code.data, code.parity, code.codec = known.data, known.parity, "XOR"
            code.ecChunkSize = known.cell_bytes
    else:
        row.replicationFactor = pb.ReplicationFactor.Value(container.replication.split("/")[1])
    return row
