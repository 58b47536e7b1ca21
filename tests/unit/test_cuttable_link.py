"""A link that is cut lets nothing through, tells no end, and loses nothing."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from admin.demo.cuttable_link import CuttableLink

SILENT_S = 0.2
WITHIN_S = 10.0


@pytest.fixture
def ends() -> Iterator[tuple[CuttableLink, socket.socket, socket.socket]]:
    """A link and both ends of one connection over it."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        link = stack.enter_context(CuttableLink(f"127.0.0.1:{server.getsockname()[1]}"))
        host, port = link.address.split(":")
        near = stack.enter_context(socket.create_connection((host, int(port)), WITHIN_S))
        far = stack.enter_context(server.accept()[0])
        far.settimeout(WITHIN_S)
        yield link, near, far


def test_what_was_sent_while_it_was_cut_arrives_once_it_is_mended(
    ends: tuple[CuttableLink, socket.socket, socket.socket],
) -> None:
    link, near, far = ends
    near.sendall(b"before")
    assert far.recv(100) == b"before"
    far.sendall(b"answer")
    assert near.recv(100) == b"answer"
    link.cut()
    near.sendall(b"meanwhile")
    far.settimeout(SILENT_S)
    with pytest.raises(TimeoutError):
        far.recv(100)
    far.settimeout(WITHIN_S)
    link.mend()
    assert far.recv(100) == b"meanwhile"
    near.close()
    assert far.recv(100) == b""


def test_a_cut_link_can_be_closed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        CuttableLink(f"127.0.0.1:{server.getsockname()[1]}") as link,
    ):
        host, port = link.address.split(":")
        with socket.create_connection((host, int(port)), WITHIN_S) as near:
            link.cut()
            near.sendall(b"lost")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), WITHIN_S)
