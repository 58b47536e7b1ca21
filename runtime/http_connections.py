"""HTTP/1.1 for the S3 client: kept connections, one request and its answer at a time.

The standard library parses the head of each answer as an e-mail, and urllib3 has layers
for redirects, proxies and encodings on top. For a small object that was most of the CPU
of a request. Here is only what S3 needs: bodies of a known length out; heads, lengths
and chunks in. What is not HTTP/1.1 as its specification writes it is an error.
"""

import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from merkle.checksum import Buffer
from merkle.errors import ReconcileError

if TYPE_CHECKING:
    # Not at run time: without TLS nobody needs it.
    from ssl import SSLContext

# Received at a time, in one call of the kernel where there is no TLS.
_PIECE_BYTES = 1 << 20
_HEAD_BYTES_MAX = 64 << 10
# A body this small goes out together with its head: in one packet, if it fits.
_JOINED_BYTES_MAX = 64 << 10
_IDLE_MAX = 64
_LINE_BYTES_MAX = 1 << 10
_NO_CONTENT = (204, 304)


class HttpProtocolError(ReconcileError):
    """The answer ended early, or is not HTTP/1.1."""

    code = "http_protocol"


class HttpPool:
    """Connections to one host, kept for the next request. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: "SSLContext | None",
        connect_timeout_s: float,
        progress_timeout_s: float,
    ) -> None:
        """`progress_timeout_s` is the longest time without a byte of progress."""
        self._address = host, port
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._progress_timeout_s = progress_timeout_s
        self._idle = deque["HttpConnection"](maxlen=_IDLE_MAX)
        # Who replaces a client need not know who still uses it.
        weakref.finalize(self, _close_all, self._idle)
        self._is_closed = False

    def connection(self) -> "HttpConnection":
        """A connection that nobody else uses: an idle one, or a new one.

        Raises:
            OSError: the host was not reached; nothing was sent.
        """
        with suppress(IndexError):
            while True:
                # The latest one: the others may reach their server's limit meanwhile.
                kept = self._idle.pop()
                if kept.is_usable:
                    return kept
                kept.close()
        link = socket.create_connection(self._address, self._connect_timeout_s)
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                link = self._tls.wrap_socket(link, server_hostname=self._address[0])
            _limit_waits(link, self._progress_timeout_s)
        except BaseException:
            link.close()
            raise
        return HttpConnection(link, is_tls=self._tls is not None)

    def keep(self, connection: "HttpConnection") -> None:
        """Take a connection back on which an answer was read to its end."""
        if self._is_closed or len(self._idle) >= _IDLE_MAX:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        """Close all idle connections; those in use are closed when they come back."""
        self._is_closed = True
        _close_all(self._idle)


def _close_all(connections: "deque[HttpConnection]") -> None:
    with suppress(IndexError):
        while True:
            connections.pop().close()


class HttpConnection:
    """One connection. Its user sends a request, and reads the answer to its end."""

    def __init__(self, link: socket.socket, *, is_tls: bool) -> None:
        self._link = link
        # The kernel waits for all bytes of a piece; TLS has records of its own.
        self._flags = 0 if is_tls else socket.MSG_WAITALL
        self._readable = select.poll()
        self._readable.register(link, select.POLLIN)
        # What was received and not taken yet.
        self._rest = b""

    @property
    def is_usable(self) -> bool:
        """Whether the server has not closed it. Between two requests it sends nothing
        else.
        """
        return not self._rest and not self._readable.poll(0)

    def close(self) -> None:
        """Close it; idempotent."""
        self._link.close()

    def exchange(
        self,
        head: bytes,
        body: Buffer,
        *,
        pieces: Iterable[Buffer] = (),
        is_bodiless: bool = False,
    ) -> "HttpAnswer":
        """Send a request, and read the head of its answer. `pieces` follow the body.
        They are taken no more once the server answers without waiting for them.
        `is_bodiless` says that the answer has no body, whatever its head says: HEAD.

        Raises:
            OSError, HttpProtocolError: the request may have arrived, but its answer
                did not.
        """
        is_sent = True
        try:
            self._send(head, memoryview(body).cast("B"))
            for piece in pieces:
                self._link.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            # A server that refuses a request need not read all of it.
            is_sent = False
        self._acknowledge_at_once()
        while True:
            text = self._head()
            answer = _parsed(text, self, is_bodiless=is_bodiless)
            # 100 and the like announce an answer.
            if answer.status >= 200:
                break
        answer.is_kept = answer.is_kept and is_sent
        return answer

    def take(self, length_bytes: int, *, waits_for_all: bool = True) -> bytes:
        """The next bytes, at most so many; none at the end of the connection."""
        if self._rest:
            found, self._rest = self._rest[:length_bytes], self._rest[length_bytes:]
            return found
        flags = self._flags if waits_for_all else 0
        return self._link.recv(min(length_bytes, _PIECE_BYTES), flags)

    def line(self) -> bytes:
        """The next line without its end.

        Raises:
            HttpProtocolError: it is too long, or the connection ended.
        """
        while (end := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > _LINE_BYTES_MAX:
                raise HttpProtocolError("a line of the answer is too long")
            self._receive()
        found, self._rest = self._rest[:end], self._rest[end + 2 :]
        return found

    def _send(self, head: bytes, body: memoryview) -> None:
        if body.nbytes <= _JOINED_BYTES_MAX:
            self._link.sendall(head + body)
        else:
            self._link.sendall(head)
            self._link.sendall(body)

    def _acknowledge_at_once(self) -> None:
        """A server that sends a head and a short body apart waits with the body until
        the head is acknowledged (Ceph does), and a kernel that waits for something to
        send with it takes 40 ms. The option holds for one answer, and only Linux has
        it.
        """
        if hasattr(socket, "TCP_QUICKACK"):
            self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def _head(self) -> bytes:
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            if len(self._rest) > _HEAD_BYTES_MAX:
                raise HttpProtocolError("the head of the answer is too long")
            self._receive()
        found, self._rest = self._rest[:end], self._rest[end + 4 :]
        return found

    def _receive(self) -> None:
        received = self._link.recv(_HEAD_BYTES_MAX)
        if not received:
            raise HttpProtocolError("the server closed the connection before its answer ended")
        self._rest += received


@dataclass(slots=True)
class HttpAnswer:
    """The head of an answer, with the body still to be read. Names of headers are in
    lower case; values are Latin-1, as HTTP libraries have them. `head_bytes` is the
    length of the head on the wire.

    `length_bytes` is what is left of the body; None where its end is not announced.
    """

    status: int
    headers: Mapping[str, str]
    head_bytes: int
    is_kept: bool
    is_chunked: bool
    length_bytes: int | None
    _connection: HttpConnection
    _is_read: bool = field(default=False)

    def pieces(self) -> Iterator[bytes]:
        """The body, in pieces of up to 1 MiB.

        Raises:
            OSError, HttpProtocolError: it did not arrive whole.
        """
        if self.is_chunked:
            yield from self._chunks()
        elif self.length_bytes is None:
            while piece := self._connection.take(_PIECE_BYTES, waits_for_all=False):
                yield piece
        else:
            yield from self._exactly(self.length_bytes)
        self._is_read = True

    def release(self, pool: HttpPool) -> None:
        """Give the connection back, or close it if the body was not read to its end;
        called once.
        """
        if self.length_bytes == 0 and not self.is_chunked:
            self._is_read = True
        if self._is_read and self.is_kept:
            pool.keep(self._connection)
        else:
            self._connection.close()

    def _exactly(self, length_bytes: int) -> Iterator[bytes]:
        left = length_bytes
        while left:
            piece = self._connection.take(left)
            if not piece:
                raise HttpProtocolError(f"{left} of {length_bytes} bytes are missing")
            left -= len(piece)
            yield piece

    def _chunks(self) -> Iterator[bytes]:
        while True:
            text = self._connection.line().partition(b";")[0].strip()
            if not text or text.strip(b"0123456789abcdefABCDEF") or len(text) > 15:
                raise HttpProtocolError("a chunk of the answer has no length")
            length_bytes = int(text, 16)
            yield from self._exactly(length_bytes)
            if not length_bytes:
                break
            if self._connection.line():
                raise HttpProtocolError("a chunk of the answer is longer than announced")
        while self._connection.line():
            # Headers after the body are nothing that S3 has a use for.
            pass


def _limit_waits(link: socket.socket, progress_timeout_s: float) -> None:
    """Let each wait for progress end. The kernel does it: Python's own timeout is one
    for all of a body, which would cut slow links off, and costs a call more.
    """
    whole, rest = divmod(progress_timeout_s, 1)
    most = struct.pack("ll", int(whole), int(rest * 1e6))
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, most)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, most)


def _parsed(head: bytes, connection: HttpConnection, *, is_bodiless: bool) -> HttpAnswer:
    """The answer that a head announces.

    Raises:
        HttpProtocolError: it is no head of HTTP/1.1.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, said = first.partition(" ")
    status = said[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (
        len(status) == 3 and status.isascii() and status.isdigit() and said[3:4] in ("", " ")
    ):
        raise HttpProtocolError(f"the answer begins with {first[:40]!r}")
    headers = dict[str, str]()
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name[0] in " \t" or name[-1] in " \t":
            raise HttpProtocolError(f"a header of the answer is {line[:40]!r}")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    is_chunked, length_bytes = _framing(int(status), headers, is_bodiless=is_bodiless)
    asks = headers.get("connection", "").lower()
    is_kept = asks == "keep-alive" if version == "HTTP/1.0" else asks != "close"
    return HttpAnswer(
        int(status),
        headers,
        len(head) + 4,
        is_kept and (is_chunked or length_bytes is not None),
        is_chunked,
        length_bytes,
        connection,
    )


def _framing(
    status: int, headers: Mapping[str, str], *, is_bodiless: bool
) -> tuple[bool, int | None]:
    """Whether the body comes in chunks, or else its length; None is to the end of the
    connection.
    """
    if is_bodiless or status in _NO_CONTENT or status < 200:
        return False, 0
    coding = headers.get("transfer-encoding", "").lower()
    if coding:
        if coding != "chunked":
            raise HttpProtocolError(f"the answer is coded as {coding[:40]!r}")
        return True, None
    text = headers.get("content-length")
    if text is None:
        return False, None
    if not (text.isascii() and text.isdigit()):
        raise HttpProtocolError(f"the answer announces {text[:40]!r} bytes")
    return False, int(text)
