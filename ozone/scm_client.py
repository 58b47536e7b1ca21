"""A client of Ozone's SCM: the containers of a cluster, their replicas, its nodes.

It speaks StorageContainerLocationProtocol on SCM's client port. Only `reconcile` asks
for a change, which the datanodes make. In a cluster with several SCMs only the leader
answers: the addresses are tried in order, beginning with the one that answered last.
Another one names the leader, which is then tried next. While SCMs elect one, none
answers; a client can wait for that.

What SCM says of replicas is what datanodes reported, which can be old. Right after a
start SCM knows no roots until they reported again.
"""

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard

from google.protobuf.message import DecodeError, Message

from merkle.errors import ReconcileError
from merkle.limits import CHECKSUM_MAX, CONTAINER_ID_MAX, PEERS_MAX
from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError
from ozone.hadoop_rpc import Answer, HadoopRpcClient
from protos import ozone_scm_pb2 as pb
from runtime.errors import (
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
    UsageError,
)
from runtime.rpc import printable
from runtime.setting_values import split_address

SCM_PORT = 9860
_PROTOCOL = "org.apache.hadoop.hdds.scm.protocol.StorageContainerLocationProtocol"
# The client version of Ozone 2.2.
_CLIENT_VERSION = 3
# Ozone lists at most 4096 at a time by default (ozone.scm.container.list.max.count).
_CONTAINERS_PER_CALL = 1000
# Calls of one exchange, so that its responses and its deadline stay small.
_CALLS_AT_ONCE = 500
# Of one response, by far more than Ozone sends: parsed, each two bytes can take a
# hundred.
_RESPONSE_BYTES_MAX = 64 << 10
_CONTAINER_BYTES_MAX = 1 << 10
_REPLICA_BYTES_MAX = 2 << 10
# Of all datanodes, of which each takes some 500 bytes.
_NODES_BYTES_MAX = 4 << 20
# The port of a datanode that serves reads.
_READ_PORT = "STANDALONE"
_UUID = re.compile(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
# An address or a name. Anything else could be another kind of target to gRPC.
_HOST = re.compile(r"[0-9A-Za-z._-]{1,255}|\[[0-9A-Fa-f:.]{2,45}(%[0-9A-Za-z]{1,15})?\]")
_RELEASE_HINT = "The cluster's release may differ from the supported one, Apache Ozone 2.2."
_NOT_LEADER = ("NotLeaderException", "LeaderNotReadyException", "RetriableWithNoFailoverException")
# How an SCM that does not lead names the one that does. Its port is the one of its own.
_LEADER_NAMED = re.compile(r"Suggested leader is Server:([^\s:]{1,255}):[0-9]{1,5}")
_ELECTION_PAUSE_S = 0.5

Request = pb.ScmContainerLocationRequest
Response = pb.ScmContainerLocationResponse


class NodeHealth(Enum):
    """Whether SCM hears from a datanode, by Ozone's names."""

    HEALTHY = "HEALTHY"
    STALE = "STALE"
    DEAD = "DEAD"
    HEALTHY_READONLY = "HEALTHY_READONLY"


class NodeOperation(Enum):
    """What an operator decided about a datanode, by Ozone's names."""

    IN_SERVICE = "IN_SERVICE"
    ENTERING_MAINTENANCE = "ENTERING_MAINTENANCE"
    IN_MAINTENANCE = "IN_MAINTENANCE"
    DECOMMISSIONING = "DECOMMISSIONING"
    DECOMMISSIONED = "DECOMMISSIONED"


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """Which cluster this is. `scms` has a line of each SCM, with its role, as Ozone
    writes it.
    """

    cluster_id: str
    scm_id: str
    scms: tuple[str, ...]
    in_safe_mode: bool
    # Of any state.
    container_count: int


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """One datanode as SCM knows it.

    `address` is where it serves reads; empty if it named no such port. `version` is
    that of its protocol; None if it did not say.
    """

    peer: PeerId
    host: str
    address: str
    health: NodeHealth
    operation: NodeOperation
    version: int | None = None

    @property
    def is_dead(self) -> bool:
        """Whether SCM has not heard from it for so long that it counts as lost."""
        return self.health is NodeHealth.DEAD


@dataclass(frozen=True, slots=True)
class ErasureCode:
    """How a container is erasure-coded: so many replicas of data and of parity, and the
    length of their cells of a stripe in bytes.
    """

    data: int
    parity: int
    cell_bytes: int


@dataclass(frozen=True, slots=True)
class ClusterContainer:
    """One container as SCM knows it. `replication` is Ozone's text, such as RATIS/THREE
    or EC/rs-3-2-1024k; `required_replicas` of them should exist.
    """

    container_id: ContainerId
    state: ContainerState
    replication: str
    required_replicas: int
    is_erasure_coded: bool = False
    used_bytes: int = 0
    block_count: int = 0
    bcs_id: int = 0
    # None if it is not erasure-coded, or SCM named no valid code.
    erasure_code: ErasureCode | None = None


class ScmClient:
    """A client of the SCMs of one cluster. Thread-safe.

    All methods may raise PeerUnavailableError, RemoteProtocolError, PeerRefusedError,
    AccessDeniedError and SecuredClusterError.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        deadline_s: float = 30.0,
        election_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects on first use. `deadline_s` limits each exchange with one SCM. Calls
        wait up to `election_s` seconds while SCMs answer but none leads.

        Raises:
            ConfigError: an address is not host:port.
            UsageError: there is no address.
        """
        if not addresses:
            raise UsageError("a cluster needs the address of at least one SCM")
        self.addresses = tuple(addresses)
        self._clients = [
            HadoopRpcClient(address, _PROTOCOL, deadline_s=deadline_s) for address in addresses
        ]
        self._hosts = [split_address(address)[0] for address in addresses]
        self._leader = 0
        self._election_s, self._clock, self._sleep = election_s, clock, sleep

    @property
    def leader_address(self) -> str:
        """The address that answered last; the first one before any did."""
        return self.addresses[self._leader]

    def identity(self) -> ClusterIdentity:
        """The cluster's ID, its SCMs, whether it is in safe mode, and its size."""
        requests = [
            _request(pb.GetScmInfo, pb.GetScmInfoRequestProto()),
            _request(pb.InSafeMode, pb.InSafeModeRequestProto()),
            _request(pb.GetContainerCount, pb.GetContainerCountRequestProto()),
        ]
        info, mode, count = (
            self._parse(answer, request) for request, answer in self._ask(requests)
        )
        found = info.getScmInfoResponse
        return ClusterIdentity(
            printable(found.clusterId),
            printable(found.scmId),
            tuple(map(printable, found.peerRoles)),
            mode.inSafeModeResponse.inSafeMode,
            max(0, count.getContainerCountResponse.containerCount),
        )

    def nodes(self) -> tuple[ClusterNode, ...]:
        """All datanodes that SCM knows, dead ones too, in ascending order of their
        IDs.
        """
        query = pb.NodeQueryRequestProto(scope=pb.CLUSTER)
        [(request, answer)] = self._ask([_request(pb.QueryNode, query)])
        found = self._parse(answer, request).nodeQueryResponse.datanodes
        nodes = {node.peer: node for node in map(self._node, found)}
        return tuple(nodes[peer] for peer in sorted(nodes))

    def containers(self, after: int = 0) -> Iterator[ClusterContainer]:
        """All containers with IDs above `after`, in ascending order, read page by
        page.
        """
        last = after
        while last < CONTAINER_ID_MAX:
            query = pb.SCMListContainerRequestProto(
                count=_CONTAINERS_PER_CALL, startContainerID=last + 1
            )
            request = _request(pb.ListContainer, query)
            [(_, answer)] = self._ask([request])
            rows = self._parse(answer, request).scmListContainerResponse.containers
            if len(rows) > _CONTAINERS_PER_CALL:
                raise self._protocol_error(
                    f"listed {len(rows)} containers, requested were {_CONTAINERS_PER_CALL}"
                )
            for row in rows:
                # Anything else might never end.
                if row.containerID <= last:
                    raise self._protocol_error(f"listed container {row.containerID} after {last}")
                last = row.containerID
                yield self._container(row)
            # A page can be shorter than requested: SCM has a limit of its own.
            if not rows:
                return

    def get_containers(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, ClusterContainer]:
        """These containers, without those that SCM does not know."""
        requests = [
            _request(pb.GetContainer, pb.GetContainerRequestProto(containerID=i))
            for i in container_ids
        ]
        found: dict[ContainerId, ClusterContainer] = {}
        for request, answer in self._ask(requests):
            wanted = ContainerId(request.getContainerRequest.containerID)
            try:
                row = self._parse(answer, request).getContainerResponse.containerInfo
            except ContainerNotFoundError:
                continue
            self._check_id(row.containerID, wanted)
            found[wanted] = self._container(row)
        return found

    def replicas(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, tuple[ContainerReplica, ...]]:
        """The replicas of these containers that datanodes reported, in ascending order
        of the datanodes' IDs; without containers that SCM does not know.
        """
        requests = [
            _request(
                pb.GetContainerReplicas,
                pb.GetContainerReplicasRequestProto(containerID=i),
            )
            for i in container_ids
        ]
        found: dict[ContainerId, tuple[ContainerReplica, ...]] = {}
        for request, answer in self._ask(requests):
            wanted = ContainerId(request.getContainerReplicasRequest.containerID)
            try:
                rows = self._parse(answer, request).getContainerReplicasResponse.containerReplica
            except ContainerNotFoundError:
                continue
            if len(rows) > PEERS_MAX:
                raise self._protocol_error(f"sent {len(rows)} replicas of container {wanted}")
            for row in rows:
                self._check_id(row.containerID, wanted)
            # One datanode can report a replica on several volumes; SCM has one of them.
            replicas = {one.peer: one for one in map(self._replica, rows)}
            found[wanted] = tuple(replicas[peer] for peer in sorted(replicas))
        return found

    def reconcile(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None]:
        """Request Ozone's own reconciliation of these containers. Each has the refusal
        by SCM's rules, or None if SCM accepted the request.

        SCM answers before any datanode has its command, and says nothing of the result.
        A request that was accepted is lost if SCM's leader changes before the next
        heartbeats.
        """
        requests = [
            _request(pb.ReconcileContainer, pb.ReconcileContainerRequestProto(containerID=i))
            for i in container_ids
        ]
        found: dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None] = {}
        for request, answer in self._ask(requests):
            wanted = ContainerId(request.reconcileContainerRequest.containerID)
            try:
                self._parse(answer, request)
                found[wanted] = None
            except (PeerRefusedError, ContainerNotFoundError) as refusal:
                found[wanted] = refusal
        return found

    def faults(self) -> tuple[str, ...]:
        """Why an SCM does not answer, of each that does not, whether it would lead or
        not.
        """
        request = _request(pb.InSafeMode, pb.InSafeModeRequestProto())
        found = list[str]()
        for client in self._clients:
            try:
                client.call(request)
            except ReconcileError as error:
                if not _is_not_leader(error):
                    found.append(error.message)
        return tuple(found)

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()

    def _ask(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Answer]]:
        for start in range(0, len(requests), _CALLS_AT_ONCE):
            batch = requests[start : start + _CALLS_AT_ONCE]
            yield from zip(batch, self._ask_leader(batch), strict=True)

    def _ask_leader(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers of the first SCM that answers as leader."""
        until_s = self._clock() + self._election_s
        while True:
            failures = dict[int, PeerUnavailableError | PeerRefusedError]()
            answers = self._ask_each(requests, failures)
            if answers is not None:
                return answers
            standby = [one for one in failures.values() if isinstance(one, PeerRefusedError)]
            named = {
                leader
                for leader in map(_leader_named_by, standby)
                if leader and not any(_are_one(leader, host) for host in self._hosts)
            }
            # If all of them are followers of another one, nothing is elected.
            is_elsewhere = bool(named) and len(standby) == len(self._clients)
            if not standby or is_elsewhere or self._clock() >= until_s:
                break
            self._sleep(_ELECTION_PAUSE_S)
        raise PeerUnavailableError(
            f"no SCM answered: {'; '.join(one.message for one in failures.values())}",
            hint=(
                f"Is the SCM on {', '.join(sorted(named))}, which leads, among the addresses?"
                if named
                else "Check the addresses and that they are reachable: SCM's client port is"
                f" usually {SCM_PORT}. While SCMs elect a leader, none answers: try again."
            ),
        )

    def _ask_each(
        self,
        requests: Sequence[Request],
        failures: dict[int, PeerUnavailableError | PeerRefusedError],
    ) -> list[Answer] | None:
        """The answers of the leader, or None after every SCM has failed."""
        count = len(self._clients)
        order = [*range(self._leader, count), *range(self._leader)]
        while order:
            at = order.pop(0)
            try:
                answers: list[Answer] = self._clients[at].call_all(requests)
            except PeerUnavailableError as error:
                failures[at] = error
                continue
            except PeerRefusedError as error:
                if not _is_not_leader(error):
                    raise
                answers = [error]
            standby = next((one for one in answers if _is_not_leader(one)), None)
            if standby is None:
                self._leader = at
                return answers
            failures[at] = standby
            # It may be out of date, so that it only changes the order.
            if leader := _leader_named_by(standby):
                named = {at: _are_one(self._hosts[at], leader) for at in order}
                order.sort(key=lambda at: (self._hosts[at] != leader, not named[at]))
        return None

    def _parse(self, answer: Answer, request: Request) -> Response:
        if isinstance(answer, PeerRefusedError):
            if answer.facts["result"] == "ContainerNotFoundException":
                raise ContainerNotFoundError(answer.message) from answer
            raise answer
        if isinstance(answer, ReconcileError):
            raise answer
        if len(answer) > _RESPONSE_BYTES_MAX + _ROWS_BYTES_MAX.get(request.cmdType, 0):
            raise self._protocol_error(f"sent a response of {len(answer)} bytes")
        try:
            reply = Response.FromString(answer)
        except DecodeError as error:
            raise self._protocol_error("sent an invalid response") from error
        # A state that this release does not know reads as a missing field.
        if not reply.IsInitialized() or reply.cmdType != request.cmdType:
            raise self._protocol_error("sent a response with unknown or missing fields")
        if not reply.success or reply.status != Response.OK:
            name = Response.Status.Name(reply.status)
            raise PeerRefusedError(
                f"{self.leader_address}: {name}: {printable(reply.message)}", result=name
            )
        if not reply.HasField(_BODIES[request.cmdType][1]):
            raise self._protocol_error("sent a response without a body")
        return reply

    def _node(self, row: pb.Node) -> ClusterNode:
        if not row.nodeStates or not row.nodeOperationalStates:
            raise self._protocol_error("sent a datanode without a state")
        details = row.nodeID
        ports = {port.name: port.value for port in details.ports}
        host = details.ipAddress
        host = f"[{host}]" if ":" in host else host
        is_host = _HOST.fullmatch(host) is not None
        read_port = ports.get(_READ_PORT, 0)
        return ClusterNode(
            self._peer(details),
            printable(details.hostName),
            f"{host}:{read_port}" if is_host and 0 < read_port < 1 << 16 else "",
            NodeHealth(pb.NodeState.Name(row.nodeStates[0])),
            NodeOperation(pb.NodeOperationalState.Name(row.nodeOperationalStates[0])),
            details.currentVersion if details.HasField("currentVersion") else None,
        )

    def _peer(self, details: pb.DatanodeDetailsProto) -> PeerId:
        if not _UUID.fullmatch(details.uuid):
            raise self._protocol_error("sent a datanode without a valid UUID")
        return PeerId(details.uuid)

    def _container(self, row: pb.ContainerInfoProto) -> ClusterContainer:
        if row.containerID < 1:
            raise self._protocol_error(f"sent container {row.containerID}, which cannot exist")
        code = row.ecReplicationConfig
        is_erasure_coded = row.replicationType == pb.EC
        erasure_code = None
        if is_erasure_coded:
            if code.data > 0 and 0 <= code.parity <= PEERS_MAX - code.data and code.ecChunkSize > 0:
                erasure_code = ErasureCode(code.data, code.parity, code.ecChunkSize)
            required = min(max(0, code.data), PEERS_MAX) + min(max(0, code.parity), PEERS_MAX)
            kind = f"EC/{printable(code.codec)}-{code.data}-{code.parity}"
        else:
            required = int(row.replicationFactor)
            factor = pb.ReplicationFactor.Name(row.replicationFactor)
            kind = f"{pb.ReplicationType.Name(row.replicationType)}/{factor}"
        return ClusterContainer(
            ContainerId(row.containerID),
            ContainerState(pb.LifeCycleState.Name(row.state)),
            kind,
            required,
            is_erasure_coded,
            row.usedBytes,
            row.numberOfKeys,
            max(0, row.sequenceId),
            erasure_code,
        )

    def _replica(self, row: pb.SCMContainerReplicaProto) -> ContainerReplica:
        if row.state not in ReplicaState.__members__:
            raise self._protocol_error(
                f"sent a replica in state {printable(row.state)}, which is not known"
            )
        if not 0 <= row.dataChecksum <= CHECKSUM_MAX:
            raise self._protocol_error(f"sent root {row.dataChecksum}, which does not have 32 bits")
        return ContainerReplica(
            self._peer(row.datanodeDetails),
            ContainerId(row.containerID),
            ReplicaState(row.state),
            # Ozone reports 0 for a root that is not known.
            row.dataChecksum or None,
            # Datanodes can report less than nothing: -1 for unknown, or by a fault.
            max(0, row.sequenceID),
            # -1 is a replica that is not of an erasure-coded container.
            max(0, row.replicaIndex),
            max(0, row.bytesUsed),
            max(0, row.keyCount),
        )

    def _check_id(self, found: int, wanted: ContainerId) -> None:
        if found != wanted:
            raise self._protocol_error(f"answered for container {found} instead of {wanted}")

    def _protocol_error(self, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self.leader_address} {what}", hint=_RELEASE_HINT)


# What the rows of a response may take, beside the response itself.
_ROWS_BYTES_MAX: Mapping[pb.Type, int] = {
    pb.ListContainer: _CONTAINERS_PER_CALL * _CONTAINER_BYTES_MAX,
    pb.QueryNode: _NODES_BYTES_MAX,
    pb.GetContainerReplicas: PEERS_MAX * _REPLICA_BYTES_MAX,
}

# The fields of a call's request and of its response.
_BODIES: Mapping[pb.Type, tuple[str, str]] = {
    pb.GetContainer: ("getContainerRequest", "getContainerResponse"),
    pb.ListContainer: ("scmListContainerRequest", "scmListContainerResponse"),
    pb.QueryNode: ("nodeQueryRequest", "nodeQueryResponse"),
    pb.GetScmInfo: ("getScmInfoRequest", "getScmInfoResponse"),
    pb.InSafeMode: ("inSafeModeRequest", "inSafeModeResponse"),
    pb.GetContainerCount: ("getContainerCountRequest", "getContainerCountResponse"),
    pb.GetContainerReplicas: ("getContainerReplicasRequest", "getContainerReplicasResponse"),
    pb.ReconcileContainer: ("reconcileContainerRequest", "reconcileContainerResponse"),
}


def _is_not_leader(answer: object) -> TypeGuard[PeerRefusedError]:
    return isinstance(answer, PeerRefusedError) and str(answer.facts["result"]).endswith(
        _NOT_LEADER
    )


def _leader_named_by(refusal: PeerRefusedError) -> str:
    """The host that an SCM names as the leader; empty if it names none."""
    found = _LEADER_NAMED.search(refusal.message)
    return found[1] if found else ""


def _are_one(host: str, other: str) -> bool:
    """Whether two names may be of one host: SCMs name each other by what they have in
    their configuration, which need not be known here.
    """
    ours, theirs = _addresses(host), _addresses(other)
    return host == other or not ours or not theirs or not ours.isdisjoint(theirs)


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return set()


def _request(kind: pb.Type, body: Message) -> Request:
    request = Request(cmdType=kind, version=_CLIENT_VERSION, traceID="")
    # Not CopyFrom, which leaves a field unset whose message is empty.
    field: Message = getattr(request, _BODIES[kind][0])
    field.SetInParent()
    field.MergeFrom(body)
    return request
