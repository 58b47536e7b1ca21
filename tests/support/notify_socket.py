"""The socket that systemd gives to a service of Type=notify, and what arrives there."""

import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.waiting import PATIENCE_S


class NotifySocket:
    """A datagram socket in a folder, or without one in the abstract namespace."""

    def __init__(self, folder: Path | None = None) -> None:
        self.address = str(folder / "notify") if folder else f"@treefold-{uuid.uuid4().hex}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address if folder else b"\0" + self.address[1:].encode())
        # All that came, in order.
        self.received: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def environment(self, *, watchdog_s: float | None = None) -> Mapping[str, str]:
        """The environment of a process that systemd starts; without WATCHDOG_PID, which
        is not known before the process runs.
        """
        watchdog = {} if watchdog_s is None else {"WATCHDOG_USEC": str(round(watchdog_s * 1e6))}
        return {**os.environ, "NOTIFY_SOCKET": self.address, **watchdog}

    def receive(self) -> str:
        """The next message; fails when none comes."""
        self._socket.settimeout(PATIENCE_S)
        message = self._socket.recv(1 << 16).decode()
        self.received.append(message)
        return message

    def receive_until(self, text: str) -> str:
        """The next message that has this text."""
        while text not in (message := self.receive()):
            pass
        return message

    def fill(self) -> None:
        """Let so much wait here that no more fits."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sender.sendto(b"filler", self.address)

    def drop_waiting(self) -> list[str]:
        """Take what has arrived and was not received."""
        self._socket.setblocking(False)
        waiting = []
        try:
            while True:
                waiting.append(self._socket.recv(1 << 16).decode())
        except BlockingIOError:
            return waiting
