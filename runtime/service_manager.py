"""What systemd is told about this process: sd_notify, one datagram a message.

A unit of Type=notify is started once the process says that it is ready, and is killed
once it says for too long nothing. Without $NOTIFY_SOCKET every call does nothing. A
message that cannot be sent is logged, and never ends the process.
"""

import os
import socket
from collections.abc import Mapping

from runtime.log import get_logger

# Only a service manager that hangs lets its socket fill up.
_SEND_S_MAX = 5.0
# systemd drops a longer datagram whole.
_STATUS_CHARACTERS_MAX = 1_000


class ServiceManager:
    """The service manager that started this process, if one did."""

    def __init__(
        self, environment: Mapping[str, str], pid: int, *, send_s_max: float = _SEND_S_MAX
    ) -> None:
        """`environment` and `pid` are those of this process. A message that is not
        taken within `send_s_max` is given up.
        """
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._log = get_logger("service_manager")
        self._send_s_max = send_s_max
        self._has_failed = False
        self.watchdog_s = _watchdog_s(environment, pid)

    def ready(self, status: str) -> None:
        """The process serves. Call it once the port answers and all state is open."""
        self._send("READY=1", _status_line(status))

    def status(self, status: str) -> None:
        """What the process does, in a line, for `systemctl status`."""
        self._send(_status_line(status))

    def keep_alive(self) -> None:
        """The process works. Without it for `watchdog_s`, systemd ends the process."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """The process begins to stop."""
        self._send("STOPPING=1", _status_line("stopping"))

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            # A new socket each time: it is rare, and the manager may have been
            # restarted.
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(self._send_s_max)
                sender.sendto("\n".join(lines).encode(), _socket_address(self._address))
        # ValueError: the address is none that a socket can have.
        except (OSError, ValueError) as error:
            # Logged once for each outage, not for each message.
            if not self._has_failed:
                self._log.warning("notify_failed", address=self._address, error=str(error))
            self._has_failed = True
        else:
            self._has_failed = False


def _watchdog_s(environment: Mapping[str, str], pid: int) -> float | None:
    """The time after which a silent process is ended; None without a watchdog."""
    # Set for a parent of ours, it is not ours to keep.
    if environment.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    text = environment.get("WATCHDOG_USEC", "")
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    return int(text) / 1e6 if is_number and int(text) else None


def _socket_address(address: str) -> str | bytes:
    """The address of `sendto`. A leading @ stands for Linux' abstract namespace."""
    return b"\0" + os.fsencode(address[1:]) if address.startswith("@") else address


def _status_line(status: str) -> str:
    line = "".join(c if c.isprintable() else " " for c in status)
    return f"STATUS={line[:_STATUS_CHARACTERS_MAX]}"
