"""The client of Hadoop RPC: pipelining, reconnecting, errors by name, bad servers."""

import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from merkle.errors import ReconcileError
from ozone.errors import SecuredClusterError
from ozone.hadoop_rpc import HadoopRpcClient
from protos.hadoop_rpc_pb2 import RpcRequestHeaderProto, RpcResponseHeaderProto
from protos.ozone_scm_pb2 import GetContainerRequestProto
from runtime.errors import (
    AccessDeniedError,
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from tests.support.scm_twin import frame, read_frame, read_preamble, served

# Longer than any honest server needs, on a busy machine too.
DEADLINE_S = 1.0
Serve = Callable[[socket.socket], None]
Status = RpcResponseHeaderProto.RpcStatusProto
ERROR, FATAL = RpcResponseHeaderProto.ERROR, RpcResponseHeaderProto.FATAL


@contextmanager
def client_of(serve: Serve, deadline_s: float = DEADLINE_S) -> Iterator[HadoopRpcClient]:
    with served(serve) as address:
        client = HadoopRpcClient(address, "a.b.Protocol", deadline_s=deadline_s)
        yield client
        client.close()


def header(call_id: int, status: Status = RpcResponseHeaderProto.SUCCESS, **text: str) -> bytes:
    found = RpcResponseHeaderProto(callId=call_id % (1 << 32), status=status)
    found.exceptionClassName = text.get("name", "")
    found.errorMsg = text.get("message", "")
    return found.SerializeToString()


def call_id_of(connection: socket.socket) -> int:
    return RpcRequestHeaderProto.FromString(read_frame(connection)[0]).callId


def request(number: int = 1) -> GetContainerRequestProto:
    return GetContainerRequestProto(containerID=number)


def echo(connection: socket.socket) -> None:
    """Answers each call with its own request."""
    read_preamble(connection)
    while True:
        head, _, body = read_frame(connection)
        call_id = RpcRequestHeaderProto.FromString(head).callId
        connection.sendall(frame(header(call_id), body))


def test_many_calls_are_answered_in_the_order_of_the_requests() -> None:
    requests = [request(number) for number in range(1000)]
    with client_of(echo, deadline_s=30) as client:
        assert client.call_all(requests) == [one.SerializeToString() for one in requests]
        assert client.call(request(7)) == request(7).SerializeToString()


def test_responses_in_another_order_reach_their_calls() -> None:
    def reversed_pairs(connection: socket.socket) -> None:
        read_preamble(connection)
        while True:
            heads = [read_frame(connection) for _ in range(2)]
            for head, _, body in reversed(heads):
                call_id = RpcRequestHeaderProto.FromString(head).callId
                connection.sendall(frame(header(call_id), body))

    with client_of(reversed_pairs) as client:
        requests = [request(number) for number in range(10)]
        assert client.call_all(requests) == [one.SerializeToString() for one in requests]


def test_a_connection_that_the_server_closed_as_idle_is_opened_again() -> None:
    opened = count()

    def one_call(connection: socket.socket) -> None:
        next(opened)
        read_preamble(connection)
        connection.sendall(frame(header(call_id_of(connection)), b"yes"))

    with client_of(one_call) as client:
        assert [client.call(request()) for _ in range(3)] == [b"yes"] * 3
    assert next(opened) == 3


def test_a_server_that_closes_every_connection_is_not_tried_for_ever() -> None:
    opened = count()

    def close(connection: socket.socket) -> None:
        next(opened)

    with client_of(close) as client, pytest.raises(PeerUnavailableError):
        client.call(request())
    assert next(opened) == 1


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerUnavailableError, match="cannot connect"):
        HadoopRpcClient(address, "a.b.Protocol").call(request())


def test_an_exception_is_told_by_class_and_text_and_the_connection_goes_on() -> None:
    def refuse_first(connection: socket.socket) -> None:
        read_preamble(connection)
        refusal = {"name": "a.b.NotThereException", "message": "a.b.NotThereException: #1\n\tat x"}
        connection.sendall(frame(header(call_id_of(connection), ERROR, **refusal)))
        connection.sendall(frame(header(call_id_of(connection)), b"yes"))

    with client_of(refuse_first) as client:
        refused, answer = client.call_all([request(), request()])
    assert isinstance(refused, PeerRefusedError)
    assert refused.facts["result"] == "NotThereException"
    assert refused.message.endswith(": NotThereException: #1")
    assert answer == b"yes"


def test_a_user_without_permission_is_told_so() -> None:
    def deny(connection: socket.socket) -> None:
        read_preamble(connection)
        name = "org.apache.hadoop.security.AccessControlException"
        connection.sendall(frame(header(call_id_of(connection), ERROR, name=name)))
        time.sleep(DEADLINE_S)

    with client_of(deny) as client, pytest.raises(AccessDeniedError):
        client.call(request())


def test_a_cluster_with_kerberos_is_told_as_secured() -> None:
    def sasl_only(connection: socket.socket) -> None:
        read_preamble(connection)
        name = "org.apache.hadoop.security.AccessControlException"
        text = "SIMPLE authentication is not enabled.  Available:[TOKEN, KERBEROS]"
        connection.sendall(frame(header(-1, FATAL, name=name, message=text)))
        time.sleep(DEADLINE_S)

    with client_of(sasl_only) as client, pytest.raises(SecuredClusterError) as caught:
        client.call(request())
    assert "KERBEROS" in caught.value.message
    assert caught.value.hint


def test_text_of_a_server_is_bounded_and_moves_no_cursor() -> None:
    def shout(connection: socket.socket) -> None:
        read_preamble(connection)
        loud = {"name": "a.\x1b[2JB", "message": "\x1b[2J" * 100_000}
        connection.sendall(frame(header(call_id_of(connection), ERROR, **loud)))
        time.sleep(DEADLINE_S)

    with client_of(shout) as client, pytest.raises(PeerRefusedError) as caught:
        client.call(request())
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1000


def raw(make: Callable[[int], bytes], *, then_wait: bool = True) -> Serve:
    """Answers the first call with these bytes."""

    def serve(connection: socket.socket) -> None:
        read_preamble(connection)
        connection.sendall(make(call_id_of(connection)))
        if then_wait:
            time.sleep(5 * DEADLINE_S)

    return serve


def drip(connection: socket.socket) -> None:
    """One byte now and then, for ever; each arrives well within the deadline."""
    connection.sendall((1 << 20).to_bytes(4, "big"))
    while True:
        connection.sendall(b"\x08")
        time.sleep(DEADLINE_S / 20)


def endless(connection: socket.socket) -> None:
    """Answers one call without end, as fast as the client reads."""
    read_preamble(connection)
    call_id = call_id_of(connection)
    while True:
        connection.sendall(frame(header(call_id), b"yes"))


HOSTILE: dict[str, tuple[Serve, type[ReconcileError]]] = {
    "says nothing": (raw(lambda _: b""), PeerUnavailableError),
    "closes": (raw(lambda _: b"", then_wait=False), PeerUnavailableError),
    "ends within a length": (raw(lambda _: b"\0\0", then_wait=False), PeerUnavailableError),
    "ends within a frame": (raw(lambda _: b"\0\0\0\x09x", then_wait=False), PeerUnavailableError),
    "waits within a frame": (raw(lambda _: b"\0\0\0\x09x"), PeerUnavailableError),
    "announces 32 MiB": (raw(lambda _: b"\x02\0\0\0x"), PeerUnavailableError),
    "announces more": (raw(lambda _: b"\x02\0\0\x01x"), RemoteProtocolError),
    "announces 2 GiB": (raw(lambda _: b"\x7f\xff\xff\xff"), RemoteProtocolError),
    "announces less than nothing": (raw(lambda _: b"\xff\xff\xff\xff"), RemoteProtocolError),
    "announces nothing": (raw(lambda _: bytes(4)), RemoteProtocolError),
    "speaks HTTP": (raw(lambda _: b"HTTP/1.1 404 Not Found\r\n\r\n"), RemoteProtocolError),
    "speaks TLS": (raw(lambda _: b"\x15\x03\x03\0\x02\x02\x0a"), RemoteProtocolError),
    "a header that is none": (raw(lambda _: frame(b"\xff\xff", b"")), RemoteProtocolError),
    "a header without a call": (raw(lambda _: frame(b"\x10\0", b"")), RemoteProtocolError),
    "an unknown status": (raw(lambda i: frame(bytes([8, i, 16, 9]), b"")), RemoteProtocolError),
    "no body": (raw(lambda i: frame(header(i))), RemoteProtocolError),
    "a body beyond its frame": (raw(lambda _: b"\0\0\0\x02\x05x"), RemoteProtocolError),
    "a length without end": (raw(lambda _: b"\0\0\0\x06" + b"\xff" * 6), RemoteProtocolError),
    "a length cut off": (raw(lambda _: b"\0\0\0\x01\x80"), RemoteProtocolError),
    "another call": (raw(lambda i: frame(header(i + 1), b"yes")), RemoteProtocolError),
    "a call of the past": (raw(lambda i: frame(header(i - 1), b"yes")), RemoteProtocolError),
    "a fatal error": (raw(lambda _: frame(header(-1, FATAL, name="X"))), PeerRefusedError),
    "drips": (drip, PeerUnavailableError),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_is_an_error_by_name_within_the_deadline(name: str) -> None:
    serve, expected = HOSTILE[name]
    begun_s = time.monotonic()
    with client_of(serve) as client, pytest.raises(expected) as caught:
        client.call(request())
    assert type(caught.value) is expected
    assert time.monotonic() - begun_s < 3 * DEADLINE_S


def test_a_second_answer_to_one_call_is_refused() -> None:
    def twice(connection: socket.socket) -> None:
        read_preamble(connection)
        call_id = call_id_of(connection)
        connection.sendall(frame(header(call_id), b"yes") * 2)
        time.sleep(DEADLINE_S)

    with client_of(twice) as client, pytest.raises(RemoteProtocolError, match="does not wait"):
        client.call_all([request(), request()])


def test_answers_without_end_are_left_unread() -> None:
    with client_of(endless) as client:
        assert client.call(request()) == b"yes"
        with pytest.raises(RemoteProtocolError):
            client.call_all([request(), request()])


def test_memory_grows_with_what_arrives_and_not_with_what_was_announced() -> None:
    def announce(connection: socket.socket) -> None:
        read_preamble(connection)
        connection.sendall((32 << 20).to_bytes(4, "big") + b"x")
        time.sleep(3)

    tracemalloc.start()
    try:
        with client_of(announce, 0.3) as client, pytest.raises(PeerUnavailableError):
            client.call(request())
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_all_responses_to_one_exchange_are_bounded_together() -> None:
    def big(connection: socket.socket) -> None:
        read_preamble(connection)
        while True:
            connection.sendall(frame(header(call_id_of(connection)), bytes(30 << 20)))

    with client_of(big, 30) as client, pytest.raises(RemoteProtocolError, match="at most"):
        client.call_all([request()] * 5)
