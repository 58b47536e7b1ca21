"""Whether a process was asked to end, or to read its settings anew."""

import faulthandler
import select
import signal
import socket
import time
from types import FrameType
from typing import Self

_STDERR = 2
_STOPPING = frozenset({signal.SIGTERM, signal.SIGINT})


class StopSignals:
    """Whether SIGTERM or SIGINT came, and with `reloads` SIGHUP. Create it in the main
    thread, before others; a context manager, after which signals are not waited for,
    and still ignored: a second one must not break off the end of the process.

    Not a `threading.Event`: a handler that sets one may run while its own thread holds
    the event's lock, and a handler whose signal comes just before the wait begins runs
    only after it.
    """

    def __init__(self, *, reloads: bool = False) -> None:
        self._came = False
        self._is_reload_due = False
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in _STOPPING:
            signal.signal(number, self._note)
        if reloads:
            # Its number comes by the descriptor.
            signal.signal(signal.SIGHUP, lambda _number, _frame: None)
        # By SIGABRT systemd's watchdog ends a process: it prints where every thread is.
        faulthandler.enable(_STDERR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()

    def is_set(self) -> bool:
        """Whether one came."""
        return self._came

    def wait(self, seconds: float) -> bool:
        """Wait for one, up to `seconds`; returns whether one came that stops. One that
        asks for a reload ends the wait, too.
        """
        deadline_s = time.monotonic() + seconds
        while not (self._came or self._is_reload_due):
            if (left_s := deadline_s - time.monotonic()) <= 0:
                break
            if select.select([self._reader], [], [], left_s)[0]:
                # The numbers of signals: their handler may run later than this.
                numbers = self._reader.recv(4096)
                self._came |= not _STOPPING.isdisjoint(numbers)
                self._is_reload_due |= signal.SIGHUP in numbers
        return self._came

    def take_reload(self) -> bool:
        """Whether a reload was asked for since the last call."""
        is_due, self._is_reload_due = self._is_reload_due, False
        return is_due

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._came = True
