"""Answers of an HTTP/1.1 server, as they come over a kept connection."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.http_connections import HttpConnection, HttpPool, HttpProtocolError

REQUEST = b"GET /x HTTP/1.1\r\nhost: h\r\n\r\n"
BODY = bytes(range(256)) * 300
BAD_HEADS = [
    b"HTTP/2 200 OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 2000 OK\r\n\r\n",
    b"HTTP/1.1 +20 OK\r\n\r\n",
    b"SSH-2.0-OpenSSH\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n: nameless\r\n\r\n",
    b"HTTP/1.1 200 OK\r\na: b\r\n folded\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nname : value\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
    b"HTTP/1.1 200 OK\r\ncontent-length: \xb2\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    b"HTTP/1.1 200 OK\r\na: " + b"x" * (65 << 10),
    b"HTTP/1.1 200 OK\r\ncontent-le",
    b"",
]
BAD_CHUNKS = [
    b"x\r\nabc\r\n0\r\n\r\n",
    b"-1\r\na\r\n0\r\n\r\n",
    b"0x1\r\na\r\n0\r\n\r\n",
    b"2\r\nabc\r\n0\r\n\r\n",
    b"3\r\nabc\r\n",
    b"3\r\nab",
    b"\r\n",
    b"1" * 16 + b"\r\n",
    b"3;" + b"x" * 2000,
]


class Peer:
    """Sends what it is told to for each request, in the given pieces; after the last
    one it closes the connection.
    """

    def __init__(self, *answers: list[bytes]) -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.connections = 0
        self.received = list[bytes]()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        with suppress(OSError):
            while self._answers:
                link, _ = self._listener.accept()
                self.connections += 1
                with link:
                    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._answer(link)

    def _answer(self, link: socket.socket) -> None:
        while self._answers:
            if not (request := link.recv(1 << 20)):
                return
            self.received.append(request)
            pieces = self._answers.pop(0)
            for piece in pieces:
                link.sendall(piece)
            if any(b"close" in piece for piece in pieces):
                return


def asked(pool: HttpPool, *, is_bodiless: bool = False) -> tuple[int, dict[str, str], bytes]:
    """One request and its whole answer."""
    connection = pool.connection()
    try:
        found = connection.exchange(REQUEST, b"", is_bodiless=is_bodiless)
    except BaseException:
        connection.close()
        raise
    try:
        return found.status, dict(found.headers), b"".join(found.pieces())
    finally:
        found.release(pool)


@pytest.fixture
def opened() -> Iterator[list[Peer]]:
    peers = list[Peer]()
    yield peers
    for peer in peers:
        peer.close()


def pool_of(peer: Peer) -> HttpPool:
    return HttpPool(
        "127.0.0.1", peer.port, tls=None, connect_timeout_s=10.0, progress_timeout_s=10.0
    )


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """The same bytes, cut at these places."""
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[first:end] for first, end in pairwise(places)]


@given(
    body=st.binary(max_size=600),
    chunks=st.lists(st.integers(1, 200), max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=6),
)
def test_an_answer_is_the_same_however_it_is_framed_and_cut(
    body: bytes, chunks: list[int], cuts: list[int]
) -> None:
    head = b"HTTP/1.1 207 Said so\r\nX-Name:  a b \r\nx-name: c\r\n"
    sized = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    coded, at = head + b"Transfer-Encoding: chunked\r\n\r\n", 0
    for size in (*chunks, max(len(body), 1)):
        if piece := body[at : at + size]:
            coded += b"%x;note\r\n%s\r\n" % (len(piece), piece)
            at += len(piece)
    coded += b"0\r\ntrailer: x\r\n\r\n"
    to_the_end = head.replace(b"1.1", b"1.0") + b"\r\n" + body
    peer = Peer(in_pieces(sized, cuts), in_pieces(coded, cuts), in_pieces(to_the_end, cuts))
    with closing(peer), closing(pool_of(peer)) as pool:
        for _ in range(3):
            status, headers, found = asked(pool)
            assert (status, headers["x-name"], found) == (207, "a b, c", body)
        assert peer.connections == 1


def test_an_announcement_is_no_answer_and_head_has_no_body(opened: list[Peer]) -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
    opened.append(Peer([b"HTTP/1.1 100 Continue\r\n\r\n", ok + b"abcde"], [ok], [ok + b"fghij"]))
    with closing(pool_of(opened[0])) as pool:
        assert asked(pool)[2] == b"abcde"
        assert asked(pool, is_bodiless=True)[1] == {"content-length": "5"}
        assert asked(pool)[2] == b"fghij"
    assert opened[0].connections == 1


@pytest.mark.parametrize("head", BAD_HEADS, ids=range(len(BAD_HEADS)))
def test_what_is_no_head_is_an_error(opened: list[Peer], head: bytes) -> None:
    opened.append(Peer([head]))
    with closing(pool_of(opened[0])) as pool, pytest.raises(HttpProtocolError):
        asked(pool)


@pytest.mark.parametrize("chunks", BAD_CHUNKS, ids=range(len(BAD_CHUNKS)))
def test_what_is_no_chunk_is_an_error(opened: list[Peer], chunks: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    opened.append(Peer([head + chunks]))
    with closing(pool_of(opened[0])) as pool, pytest.raises(HttpProtocolError):
        asked(pool)


def test_a_connection_is_not_used_again_when_its_state_is_not_known(opened: list[Peer]) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nabcde"
    opened.append(
        Peer(
            [whole],
            [whole.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")],
            [whole + b"unasked"],
            [whole],
        )
    )
    peer = opened[0]
    with closing(pool_of(peer)) as pool:
        connection = pool.connection()
        left = connection.exchange(REQUEST, b"")
        # Nobody reads this body.
        left.release(pool)
        assert asked(pool)[2] == b"abcde"
        assert peer.connections == 2
        assert asked(pool)[2] == b"abcde"
        assert peer.connections == 3
        assert asked(pool)[2] == b"abcde"
        assert peer.connections == 4


class Deaf(socket.socket):
    """An end whose peer has stopped reading: no body gets through."""

    def sendall(self, data: bytes, flags: int = 0) -> None:  # type: ignore[override]
        """Send heads only."""
        if len(data) > 1000:
            raise BrokenPipeError
        super().sendall(data, flags)


def test_a_server_that_refuses_before_it_has_read_all_is_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs, Deaf(fileno=ours.detach()) as deaf:
        theirs.sendall(b"HTTP/1.1 403 No\r\ncontent-length: 2\r\n\r\nno")
        connection = HttpConnection(deaf, is_tls=False)
        found = connection.exchange(b"PUT /x HTTP/1.1\r\n\r\n", bytes(1 << 20))
        assert (found.status, b"".join(found.pieces())) == (403, b"no")
        # What is left of the body would be read as the next request.
        assert not found.is_kept


def test_a_server_without_progress_is_given_up(opened: list[Peer]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = int(silent.getsockname()[1])
        pool = HttpPool("127.0.0.1", port, tls=None, connect_timeout_s=9, progress_timeout_s=0.1)
        with closing(pool):
            # Nobody reads: a large body gets no further than the buffers of the kernel.
            for body in (b"", bytes(64 << 20)):
                with closing(pool.connection()) as connection, pytest.raises(BlockingIOError):
                    connection.exchange(REQUEST, body)


def test_a_connection_whose_answer_was_not_read_is_closed(opened: list[Peer]) -> None:
    """The rest of the answer, which is still to come, would be taken for the next."""
    opened.append(Peer([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"], []))
    with closing(pool_of(opened[0])) as pool:
        connection = pool.connection()
        connection.exchange(REQUEST, b"").release(pool)
        with closing(pool.connection()) as other:
            assert other is not connection


def test_a_large_body_arrives_in_both_directions(opened: list[Peer]) -> None:
    sent = BODY * 20
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def mirror() -> None:
            link, _ = listener.accept()
            with link, link.makefile("rb") as stream:
                while stream.readline() != b"\r\n":
                    pass
                body = stream.read(len(sent))
                link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

        thread = threading.Thread(target=mirror, daemon=True)
        thread.start()
        port = int(listener.getsockname()[1])
        pool = HttpPool("127.0.0.1", port, tls=None, connect_timeout_s=10, progress_timeout_s=10)
        with closing(pool):
            found = pool.connection().exchange(b"PUT /x HTTP/1.1\r\n\r\n", memoryview(sent))
            assert b"".join(found.pieces()) == sent
            found.release(pool)
        thread.join()
