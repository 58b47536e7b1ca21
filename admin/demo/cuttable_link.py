"""A TCP link to a process on this machine, which can be cut and mended."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

_PIECE_BYTES = 64 << 10
_CONNECT_S = 10.0


class CuttableLink:
    """Relays connections to one address. While it is cut, no byte gets through and no
    end is told, as if a cable was pulled; nothing that was sent is lost. A context
    manager that ends every connection.
    """

    def __init__(self, to: str) -> None:
        """`to` is HOST:PORT."""
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._sockets = {self._listener}
        self._is_closed = False
        self._is_open = threading.Event()
        self._is_open.set()
        threading.Thread(target=self._accept, name="link", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_closed = True
            ended = list(self._sockets)
        for one in ended:
            # Whoever waits for it wakes up, which `close` alone does not do.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._is_open.set()

    def cut(self) -> None:
        """Let nothing through."""
        self._is_open.clear()

    def mend(self) -> None:
        """Let everything through again, what was sent meanwhile first."""
        self._is_open.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._is_open.wait()
        try:
            far = socket.create_connection(self._to, timeout=_CONNECT_S)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        with self._lock:
            if self._is_closed:
                near.close()
                far.close()
                return
            self._sockets |= {near, far}
        threading.Thread(target=self._relay, args=(far, near), daemon=True).start()
        self._relay(near, far)

    def _relay(self, source: socket.socket, target: socket.socket) -> None:
        """Relay one direction, until a side ends the connection."""
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._is_open.wait()
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        with self._lock:
            self._sockets -= {source, target}
