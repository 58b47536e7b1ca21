"""An HTTP server that keeps what arrives, byte for byte, and answers as it is told."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "e"\r\n\r\n'


def answer(status: int, body: bytes = b"", headers: str = "") -> bytes:
    """The bytes of an answer."""
    head = f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


@dataclass
class Arrived:
    """One request as it crossed the wire."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    length_bytes: int


@dataclass
class WireServer:
    """Answers each request with what `answer_to` its method and target has, else with
    the next of `answers`, then with OK. An empty answer closes the connection.
    """

    port: int
    answers: list[bytes] = field(default_factory=list)
    arrived: list[Arrived] = field(default_factory=list)
    connections: int = 0
    answer_to: Callable[[str, str], bytes | None] = lambda _method, _target: None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection until it is closed."""
        self.connections += 1
        with connection, connection.makefile("rb") as stream, suppress(OSError):
            while line := stream.readline():
                method, target, _ = line.decode("latin-1").split(" ")
                length, headers = len(line), dict[str, str]()
                while (header := stream.readline()) != b"\r\n":
                    length += len(header)
                    name, _, value = header.decode("utf-8").partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", "0")))
                length += len(b"\r\n") + len(body)
                self.arrived.append(Arrived(method, target, headers, body, length))
                said = self.answer_to(method, target)
                if said is None:
                    said = self.answers.pop(0) if self.answers else OK
                if not said:
                    return
                connection.sendall(said)
                if b"Connection: close" in said:
                    return


@contextmanager
def wire_server() -> Iterator[WireServer]:
    """A server on a free loopback port that ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = WireServer(listener.getsockname()[1])

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()
