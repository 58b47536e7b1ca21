"""SCMs that misbehave on a real socket, to the client and to a rescue that joins: each
ends in a named error within its deadline and in bounded memory, and is never obeyed.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.scm_client import ScmClient
from ozone.scm_membership import ReportedReplica, ScmMembership
from protos import hadoop_rpc_pb2 as rpc
from protos import ozone_heartbeat_pb2 as beat
from tests.support.bounded_memory import bounded_memory
from tests.support.evil_scm import CASES, UUID, Case, serve
from tests.support.scm_twin import ScmTwin, frame, read_frame, read_preamble, served

# A call that only its deadline ends has this long; any other ends by itself.
STALLED_S, PATIENT_S = 0.7, 30.0
NODE = PeerId(UUID)
REPLICA = ReportedReplica(ContainerId(1), 7, 1)

pytestmark = pytest.mark.e2e


def code_of(call: Callable[[], object]) -> tuple[str, object]:
    """The code of the error that the call ends with, or what it gives; the error's text
    must be fit for a terminal.
    """
    try:
        return "", call()
    except ReconcileError as raised:
        error = raised
    assert error.message.isprintable()
    assert len(error.message) < 2000
    return error.code, None


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_hostile_scm_ends_in_a_named_error(case: Case) -> None:
    body = case.body()
    started = time.monotonic()
    with served(serve(body)) as address, bounded_memory():
        client = ScmClient([address], deadline_s=PATIENT_S)
        code, found = code_of(lambda: case.ask(client))
        client.close()
    assert code == case.code
    assert code or case.check(found)
    assert time.monotonic() - started < PATIENT_S


Datanodes = Callable[[beat.SCMDatanodeRequest], "beat.SCMDatanodeResponse | bytes"]


def datanode_port(answer: Datanodes) -> Callable[[socket.socket], None]:
    """SCM's port for datanodes, with these answers."""

    def serve_calls(connection: socket.socket) -> None:
        read_preamble(connection)
        while True:
            head, _, body = read_frame(connection)
            header = rpc.RpcResponseHeaderProto(
                callId=rpc.RpcRequestHeaderProto.FromString(head).callId,
                status=rpc.RpcResponseHeaderProto.SUCCESS,
            )
            reply = answer(beat.SCMDatanodeRequest.FromString(body))
            raw = reply if isinstance(reply, bytes) else reply.SerializePartialToString()
            connection.sendall(frame(header, raw))

    return serve_calls


def drip(connection: socket.socket) -> None:
    """A frame of a mebibyte, one byte now and then."""
    connection.sendall((1 << 20).to_bytes(4, "big"))
    while True:
        connection.sendall(b"\x08")
        time.sleep(STALLED_S / 20)


def silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def answered(
    request: beat.SCMDatanodeRequest, *, uuid: str = UUID, commands: tuple[int, ...] = ()
) -> beat.SCMDatanodeResponse:
    """An honest answer, but for what is given."""
    reply = beat.SCMDatanodeResponse(cmdType=request.cmdType, status=beat.OK)
    if request.cmdType == beat.Register:
        reply.registerResponse.errorCode = beat.SCMRegisteredResponseProto.success
        reply.registerResponse.datanodeUUID = uuid
        reply.registerResponse.clusterID = "CID-x"
    else:
        reply.sendHeartbeatResponse.datanodeUUID = uuid
        for command in commands:
            reply.sendHeartbeatResponse.commands.add(commandType=command)
    return reply


def failed(request: beat.SCMDatanodeRequest) -> beat.SCMDatanodeResponse:
    reply = answered(request)
    reply.success, reply.message = False, "\x1b[2J" * 10_000
    return reply


def other_kind(request: beat.SCMDatanodeRequest) -> beat.SCMDatanodeResponse:
    reply = answered(request)
    is_register = request.cmdType == beat.Register
    reply.cmdType = beat.SendHeartbeat if is_register else beat.Register
    return reply


def bodiless(request: beat.SCMDatanodeRequest) -> beat.SCMDatanodeResponse:
    return beat.SCMDatanodeResponse(cmdType=request.cmdType, status=beat.OK)


def crowded(request: beat.SCMDatanodeRequest) -> bytes:
    """Twelve million commands, each of no byte."""
    start = answered(request).SerializeToString()
    rows = b"\x12\x00" * 12_000_000
    return start + b"\x42" + beat_length(len(rows)) + rows


def beat_length(length: int) -> bytes:
    head = bytearray()
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    return bytes([*head, length])


MEMBERSHIPS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "says nothing": (silent, "peer_unavailable"),
    "drips": (drip, "peer_unavailable"),
    "millions of commands": (datanode_port(crowded), "remote_protocol"),
    "answers another datanode": (
        datanode_port(lambda one: answered(one, uuid=UUID.replace("1", "2"))),
        "remote_protocol",
    ),
    "answers something else": (datanode_port(other_kind), "remote_protocol"),
    "an answer without a body": (datanode_port(bodiless), "remote_protocol"),
    "bytes that are no message": (datanode_port(lambda _: b"\xff" * 50), "remote_protocol"),
    "a refusal that moves the cursor": (datanode_port(failed), "peer_refused"),
}


@contextmanager
def member_of(*scms: Callable[[socket.socket], None]) -> Iterator[ScmMembership]:
    with ExitStack() as stack:
        addresses = [stack.enter_context(served(one)) for one in scms]
        member = ScmMembership(addresses, NODE, 1, deadline_s=STALLED_S)
        stack.callback(member.close)
        yield member


@pytest.mark.parametrize("name", MEMBERSHIPS)
def test_an_scm_that_a_rescue_joins_ends_in_a_named_error(name: str) -> None:
    serve_calls, expected = MEMBERSHIPS[name]
    started = time.monotonic()
    with member_of(serve_calls) as member, bounded_memory():
        assert code_of(lambda: member.register([REPLICA]))[0] == expected
        assert code_of(member.heartbeat)[0] == expected
    assert time.monotonic() - started < 2 * STALLED_S + 10


@pytest.mark.parametrize("name", MEMBERSHIPS)
def test_one_hostile_scm_of_two_does_not_keep_a_rescue_from_leaving(name: str) -> None:
    twin = ScmTwin()
    with member_of(MEMBERSHIPS[name][0], twin.serve_datanodes) as member:
        member.register([])
        assert member.heartbeat(()) is False
    assert len(twin.registrations) == 1


def test_commands_of_scm_are_not_obeyed() -> None:
    """Of all that a datanode can be ordered, it registers again, and nothing else."""
    with member_of(datanode_port(lambda one: answered(one, commands=(2, 3, 4, 9)))) as member:
        assert member.heartbeat([REPLICA]) is False
    with member_of(datanode_port(lambda one: answered(one, commands=(1,) * 1000))) as member:
        assert member.heartbeat() is True
