"""A link to a store whose disks decay: bytes that it answers with are other ones.

Nothing else shows it: the listing, the ETag and the time are those of the upload, as of
a store that reads what its disk returns.
"""

import socket
import socketserver
import threading
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Self

from tests.support.s3_servers import S3Endpoint

_PIECE_BYTES = 1 << 16


class DecayingLink:
    """A link to an S3 server on loopback; a context manager that ends it. Once `decays`
    is set, `body` is answered with one bit flipped.
    """

    def __init__(self, endpoint: S3Endpoint, body: bytes) -> None:
        """`body` is at least two bytes that no other answer has."""
        self._endpoint, self._body = endpoint, body
        self.decays = threading.Event()
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> S3Endpoint:
        """The endpoint as it is reached across this link."""
        return replace(self._endpoint, url=f"http://127.0.0.1:{self._server.server_address[1]}")

    def _handler(self) -> type[socketserver.BaseRequestHandler]:
        link = self

        class Relay(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                link._relay(self.request)

        return Relay

    def _relay(self, near: socket.socket) -> None:
        host, port = self._endpoint.address.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as far:
            sender = threading.Thread(target=_copy, args=(near, far), daemon=True)
            sender.start()
            with suppress(OSError):
                while piece := far.recv(_PIECE_BYTES):
                    near.sendall(self._decayed(piece) if self.decays.is_set() else piece)
                near.shutdown(socket.SHUT_WR)
            sender.join()

    def _decayed(self, piece: bytes) -> bytes:
        return piece.replace(self._body, bytes([self._body[0] ^ 1]) + self._body[1:])


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while piece := source.recv(_PIECE_BYTES):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
