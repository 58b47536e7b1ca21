"""Slow clients of the dashboard, on a real socket: none keeps the page from others."""

import http.client
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from scm.dashboard.server import DashboardServer

HEAD_S, ANSWER_S = 0.5, 0.7
# Beyond what the sockets of both sides take in.
LARGE_BYTES = 6 << 20
HELD = 40

Opened = Callable[[int], socket.socket]


def page(_: Request) -> Response:
    return PlainTextResponse("the page")


def large(_: Request) -> Response:
    return PlainTextResponse("x" * LARGE_BYTES)


@contextmanager
def served(head_s: float = HEAD_S, answer_s: float = ANSWER_S) -> Iterator[DashboardServer]:
    app = Starlette(routes=[Route("/", page), Route("/large", large)])
    server = DashboardServer(app, "127.0.0.1", 0, head_s=head_s, answer_s=answer_s)
    try:
        yield server
    finally:
        server.close()


def ask(port: int, path: str = "/") -> tuple[int, int]:
    """The status and the length of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, len(response.read())
    finally:
        connection.close()


def sending(data: bytes) -> Opened:
    def opened(port: int) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", port))
        # So that the server has to keep what this client does not read.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(data)
        return connection

    return opened


_HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
SLOW: dict[str, Opened] = {
    "sends nothing": sending(b""),
    "sends half a head": sending(_HEAD),
    "sends no body": sending(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"),
    "sends half a body": sending(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nabc"
    ),
    "stays after an answer": sending(_HEAD + b"\r\n"),
    "half a request after an answer": sending(_HEAD + b"\r\nGET"),
    "reads nothing": sending(_HEAD.replace(b"/ ", b"/large ") + b"\r\n"),
    "reads nothing and is to be closed": sending(
        _HEAD.replace(b"/ ", b"/large ") + b"Connection: close\r\n\r\n"
    ),
    "asks for a web socket": sending(_HEAD + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
}


def ended_after_s(connection: socket.socket) -> float:
    """How long until the server ended the connection; what it sent is not read."""
    started, gap = time.monotonic(), Event()
    while time.monotonic() - started < 20:
        try:
            # Nothing arrives at a closed connection: the second byte sees its reset.
            connection.sendall(b"x")
        except OSError:
            return time.monotonic() - started
        gap.wait(0.05)
    raise AssertionError("the server did not end the connection")


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_client_is_ended_by_its_time(name: str) -> None:
    with served() as server:
        connection = SLOW[name](server.port)
        assert ended_after_s(connection) < HEAD_S + ANSWER_S + 5
        connection.close()
        assert ask(server.port) == (200, 8)


@pytest.mark.parametrize("name", SLOW)
def test_slow_clients_keep_nobody_else_from_the_page(name: str) -> None:
    """More of them than connections are kept, all within their times."""
    with served(head_s=600, answer_s=600) as server:
        held = [SLOW[name](server.port) for _ in range(HELD)]
        # Forty requests of one moment are refused with 503; those answered are not.
        Event().wait(0.5)
        started = time.monotonic()
        assert ask(server.port) == (200, 8)
        assert time.monotonic() - started < 5
        for connection in held:
            connection.close()
        assert ask(server.port) == (200, 8)


def test_a_client_that_drips_its_head_is_ended_by_its_time() -> None:
    """One byte now and then does not begin the time anew."""
    with served() as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        started = time.monotonic()
        with pytest.raises(OSError, match=r"reset|pipe"):
            drip(connection, _HEAD + b"X-Pad: " + b"x" * 1000)
        assert time.monotonic() - started < HEAD_S + 5
        connection.close()


def drip(connection: socket.socket, data: bytes) -> None:
    gap = Event()
    for byte in data:
        connection.sendall(bytes([byte]))
        gap.wait(0.05)


def test_a_large_answer_may_take_its_time() -> None:
    """A slow network is not a hostile client: it has the time of an answer."""
    with served(head_s=0.3, answer_s=30) as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(_HEAD.replace(b"/ ", b"/large ") + b"Connection: close\r\n\r\n")
        Event().wait(1)
        read = 0
        while part := connection.recv(1 << 20):
            read += len(part)
        assert read > LARGE_BYTES
        connection.close()


def test_idle_connections_are_bounded_in_number() -> None:
    """They are ended as others come, not only at the end of their time."""
    with served(head_s=600, answer_s=600) as server:
        held = [SLOW["sends nothing"](server.port) for _ in range(HELD)]
        assert ask(server.port) == (200, 8)
        assert len(server._server.server_state.connections) <= 33
        for connection in held:
            connection.close()
