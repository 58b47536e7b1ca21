"""SCMs that misbehave on a real socket, in every way of the table `CASES`.

They write Hadoop's frames by the twin's code, and bodies field by field: what they send
no honest SCM would.
"""

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf.internal.encoder import _VarintBytes

from merkle.replica import ContainerReplica
from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from protos import hadoop_rpc_pb2 as rpc
from protos import ozone_scm_pb2 as pb
from tests.support.evil_records import length_field
from tests.support.scm_twin import read_frame, read_preamble

NUMBER = ContainerId(7)
UUID = "1fffffff-0000-4000-8000-000000000000"
# The most objects for the fewest bytes: two each.
_MANY = 12_000_000

Body: TypeAlias = "pb.ScmContainerLocationResponse | bytes"


@dataclass(frozen=True)
class Case:
    """What a client asks, what it is sent, and the code of the error that must come
    out. Without a code the answer is taken, and `check` says of what it must be.
    """

    ask: Callable[[ScmClient], object]
    body: Callable[[], Body]
    code: str = ""
    check: Callable[[object], bool] = lambda _: True


def serve(body: Body) -> Callable[[socket.socket], None]:
    """Answers each call with this body."""
    raw = body if isinstance(body, bytes) else body.SerializePartialToString()

    def answer(connection: socket.socket) -> None:
        read_preamble(connection)
        while True:
            head, *_ = read_frame(connection)
            call_id = rpc.RpcRequestHeaderProto.FromString(head).callId
            found = rpc.RpcResponseHeaderProto(
                callId=call_id, status=rpc.RpcResponseHeaderProto.SUCCESS
            ).SerializeToString()
            start = _VarintBytes(len(found)) + found + _VarintBytes(len(raw))
            # Not joined: what is sent may be large, and counts as our memory.
            connection.sendall((len(start) + len(raw)).to_bytes(4, "big") + start)
            connection.sendall(raw)

    return answer


def _reply(kind: pb.Type) -> pb.ScmContainerLocationResponse:
    return pb.ScmContainerLocationResponse(cmdType=kind, status=pb.ScmContainerLocationResponse.OK)


def _rows(kind: pb.Type, body: int, row: int, count: int = _MANY) -> Callable[[], bytes]:
    """That many empty rows in the field `row` of the field `body`."""
    return lambda: (
        _reply(kind).SerializeToString() + length_field(body, bytes((row << 3 | 2, 0)) * count)
    )


def _container(**fields: object) -> pb.ContainerInfoProto:
    row = pb.ContainerInfoProto(
        containerID=NUMBER, state=pb.CLOSED, usedBytes=1, numberOfKeys=1, owner="o",
        replicationType=pb.RATIS, replicationFactor=pb.THREE,
    )  # fmt: skip
    code = fields.pop("code", None)
    for name, value in fields.items():
        setattr(row, name, value)
    if code:
        row.ecReplicationConfig.CopyFrom(code)
    return row


def _found(**fields: object) -> Callable[[], Body]:
    def body() -> Body:
        reply = _reply(pb.GetContainer)
        reply.getContainerResponse.containerInfo.CopyFrom(_container(**fields))
        return reply

    return body


def _listed(*numbers: int) -> Callable[[], Body]:
    def body() -> Body:
        reply = _reply(pb.ListContainer)
        reply.scmListContainerResponse.SetInParent()
        for number in numbers:
            reply.scmListContainerResponse.containers.append(_container(containerID=number))
        return reply

    return body


def _details(
    uuid: str = UUID, host: str = "127.0.0.1", port: int = 9859
) -> pb.DatanodeDetailsProto:
    details = pb.DatanodeDetailsProto(uuid=uuid, ipAddress=host, hostName="h\x1b[2J")
    details.ports.add(name="STANDALONE", value=port)
    return details


def _node(
    uuid: str = UUID, host: str = "127.0.0.1", port: int = 9859, *, is_stateless: bool = False
) -> Callable[[], Body]:
    def body() -> Body:
        reply = _reply(pb.QueryNode)
        node = reply.nodeQueryResponse.datanodes.add(nodeID=_details(uuid, host, port))
        if not is_stateless:
            node.nodeStates.append(pb.HEALTHY)
            node.nodeOperationalStates.append(pb.IN_SERVICE)
        return reply

    return body


def _replicas(count: int = 1, uuid: str = UUID, **fields: object) -> Callable[[], Body]:
    def body() -> Body:
        reply = _reply(pb.GetContainerReplicas)
        reply.getContainerReplicasResponse.SetInParent()
        for _ in range(count):
            row = reply.getContainerReplicasResponse.containerReplica.add(
                containerID=NUMBER, state="CLOSED", datanodeDetails=_details(uuid),
                placeOfBirth=UUID, sequenceID=1, keyCount=1, bytesUsed=1,
            )  # fmt: skip
            for name, value in fields.items():
                setattr(row, name, value)
        return reply

    return body


def _status(status: int, message: str) -> Callable[[], Body]:
    return lambda: (
        _reply(pb.QueryNode).SerializeToString()
        + _VarintBytes(5 << 3)
        + _VarintBytes(status)
        + length_field(4, message.encode())
    )


def _info(cluster_id: str = "CID-x", roles: int = 0) -> Callable[[], bytes]:
    info = pb.GetScmInfoResponseProto(clusterId=cluster_id, scmId="s").SerializeToString()
    return lambda: (
        _reply(pb.GetScmInfo).SerializeToString()
        + length_field(18, info + bytes((3 << 3 | 2, 0)) * roles)
    )


def _nodes(client: ScmClient) -> object:
    return client.nodes()


def _list(client: ScmClient) -> object:
    return [one.container_id for one in client.containers()]


def _list_from_last(client: ScmClient) -> object:
    return [one.container_id for one in client.containers((1 << 63) - 2)]


def _get(client: ScmClient) -> object:
    return client.get_containers([NUMBER])[NUMBER]


def _get_replicas(client: ScmClient) -> object:
    return client.replicas([NUMBER])[NUMBER]


def _identity(client: ScmClient) -> object:
    return client.identity()


def _code(**fields: object) -> pb.ECReplicationConfig:
    return pb.ECReplicationConfig(codec="rs\x1b", ecChunkSize=1, **fields)


_NONSENSE = "remote_protocol"
_ADDRESSES: Mapping[str, str] = {
    "a path of a socket for an address": "unix:/run/x",
    "another kind of target for an address": "dns://192.0.2.1/a",
    "line ends in an address": "127.0.0.1\r\nx",
    "two hosts in an address": "a,b",
    "an address without end": "a" * 60_000,
}
CASES: dict[str, Case] = {
    "millions of empty datanodes": Case(_nodes, _rows(pb.QueryNode, 11, 1), _NONSENSE),
    "millions of empty containers": Case(_list, _rows(pb.ListContainer, 9, 1), _NONSENSE),
    "millions of empty replicas": Case(
        _get_replicas, _rows(pb.GetContainerReplicas, 39, 1), _NONSENSE
    ),
    "millions of SCMs": Case(_identity, _info(roles=_MANY), _NONSENSE),
    "more containers than were requested": Case(_list, _listed(*range(1, 1002)), _NONSENSE),
    "a container twice": Case(_list, _listed(1, 1), _NONSENSE),
    "a listing that goes back": Case(_list, _listed(2, 1), _NONSENSE),
    "the same page for ever": Case(_list, _listed(1, 2), _NONSENSE),
    "container 0": Case(_list, _listed(0), _NONSENSE),
    "a container below 0": Case(_list, _listed(-1), _NONSENSE),
    "the last container that can be": Case(
        _list_from_last, _listed((1 << 63) - 1), check=lambda found: found == [(1 << 63) - 1]
    ),
    "another container": Case(_get, _found(containerID=8), _NONSENSE),
    "2^64 - 1 bytes in a container": Case(_get, _found(usedBytes=(1 << 64) - 1)),
    "a commit below 0": Case(
        _get, _found(sequenceId=-5), check=lambda found: getattr(found, "bcs_id", -1) == 0
    ),
    "two billion replicas of a code": Case(
        _get,
        _found(replicationType=pb.EC, code=_code(data=(1 << 31) - 1, parity=(1 << 31) - 1)),
        check=lambda found: getattr(found, "required_replicas", 999) <= 128,
    ),
    "less than no replicas of a code": Case(
        _get,
        _found(replicationType=pb.EC, code=_code(data=-1, parity=-1)),
        check=lambda found: getattr(found, "required_replicas", -1) == 0,
    ),
    "a replica of another container": Case(_get_replicas, _replicas(containerID=8), _NONSENSE),
    "a hundred replicas": Case(_get_replicas, _replicas(100), _NONSENSE),
    "a replica twice": Case(
        _get_replicas, _replicas(2), check=lambda found: len(_rows_of(found)) == 1
    ),
    "a root of 33 bits": Case(_get_replicas, _replicas(dataChecksum=1 << 32), _NONSENSE),
    "a root below 0": Case(_get_replicas, _replicas(dataChecksum=-1), _NONSENSE),
    "a state that does not exist": Case(_get_replicas, _replicas(state="\x1b[2J"), _NONSENSE),
    "counts below 0": Case(
        _get_replicas,
        _replicas(sequenceID=-1, keyCount=-1, bytesUsed=-(1 << 63), replicaIndex=-9),
        check=lambda found: _rows_of(found)[0].used_bytes == 0,
    ),
    "a replica without a datanode": Case(_get_replicas, _replicas(uuid=""), _NONSENSE),
    "a path for a UUID": Case(_nodes, _node("../" * 12), _NONSENSE),
    "control characters for a UUID": Case(_nodes, _node("\x1b[2J" * 9), _NONSENSE),
    "a datanode without state": Case(_nodes, _node(is_stateless=True), _NONSENSE),
    "a port of 2^32 - 1": Case(
        _nodes, _node(port=(1 << 32) - 1), check=lambda found: _address_of(found) == ""
    ),
    "an answer to something else": Case(_nodes, _listed(1), _NONSENSE),
    "an answer without a body": Case(_nodes, lambda: _reply(pb.QueryNode), _NONSENSE),
    "an answer without a status": Case(
        _nodes, lambda: pb.ScmContainerLocationResponse(cmdType=pb.QueryNode), _NONSENSE
    ),
    "bytes that are no message": Case(_nodes, lambda: b"\xff" * 100, _NONSENSE),
    "no bytes": Case(_nodes, lambda: b"", _NONSENSE),
    "a message cut short": Case(_nodes, lambda: b"\x5a\x7f\x0a", _NONSENSE),
    "a refusal that moves the cursor": Case(_nodes, _status(3, "\x1b[2J\r\n"), "peer_refused"),
    "a status that does not exist": Case(_nodes, lambda: b"\x08\x06\x28\x63", _NONSENSE),
} | {
    name: Case(_nodes, _node(host=host), check=lambda found: _address_of(found) == "")
    for name, host in _ADDRESSES.items()
}  # fmt: skip


def _rows_of(found: object) -> tuple[ContainerReplica, ...]:
    assert isinstance(found, tuple)
    return found


def _address_of(found: object) -> str:
    """Where the only datanode found is read; empty if it cannot be."""
    assert isinstance(found, tuple)
    return str(found[0].address)
