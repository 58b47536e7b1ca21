"""Limits on the calls of a server: how long one may stand still or last, and how many a
client may have.

A call holds a thread as long as it lasts. Without limits a client that opens streams
and sends nothing, or reads nothing, holds all of them.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import grpc

from runtime.errors import BusyError, InternalError
from runtime.guard import ThreadGuard

# By this name its failures are counted.
WATCH_THREAD = "stream-watch"
# How often calls are looked at; a limit is exceeded by this much at most.
_CHECK_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits on one server's calls; a call that exceeds a time is cancelled.

    `idle_s` is the time between two messages of a stream, in either direction.
    """

    idle_s: float = 60.0
    # The largest read at the slowest rate that we accept of peers ends before this.
    stream_s: float = 3600.0


class CallWatch:
    """Cancels streams that stand still or last too long, and refuses calls of a client
    that has too many. Thread-safe.
    """

    def __init__(self, limits: CallLimits, guard: ThreadGuard | None = None) -> None:
        """`guard` counts the errors of the thread that watches; without one they are
        only logged.
        """
        self._limits = limits
        self._guard = guard or ThreadGuard(WATCH_THREAD)
        self._lock = threading.Lock()
        self._calls: set[WatchedCall] = set()
        self._clients: Counter[tuple[str, str]] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=WATCH_THREAD, daemon=True)
        self._thread.start()

    @contextmanager
    def watch(
        self,
        context: grpc.ServicerContext,
        *,
        service: str,
        calls_per_client_max: int | None,
        is_stream: bool,
    ) -> Iterator["WatchedCall"]:
        """Watch one call while it lasts; its caller notes each message of a stream.

        Raises:
            BusyError: the client has as many calls as it may.
        """
        client = service, host_of(context)
        with self._lock:
            if calls_per_client_max is not None and self._clients[client] >= calls_per_client_max:
                raise BusyError(
                    f"{client[1]} has {self._clients[client]} calls under way already",
                    limit=calls_per_client_max,
                )
            self._clients[client] += 1
            call = WatchedCall(context, time.monotonic(), is_stream=is_stream)
            self._calls.add(call)
        try:
            yield call
        finally:
            with self._lock:
                self._calls.discard(call)
                self._clients[client] -= 1
                if not self._clients[client]:
                    del self._clients[client]

    def close(self) -> None:
        """Watch no more."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_CHECK_EVERY_S):
            now_s = time.monotonic()
            with self._lock:
                over = [call for call in self._calls if self._is_over(call, now_s)]
            for call in over:
                # The others are cancelled whatever becomes of this one.
                with suppress(InternalError), self._guard.named_errors():
                    call.context.cancel()

    def _is_over(self, call: "WatchedCall", now_s: float) -> bool:
        # A scan is one request and one answer, with hours between them.
        if not call.is_stream:
            return False
        is_idle = now_s - call.moved_s > self._limits.idle_s
        return is_idle or now_s - call.begun_s > self._limits.stream_s


class WatchedCall:
    """One call under way; `moved_s` is when its last message came or went."""

    def __init__(self, context: grpc.ServicerContext, now_s: float, *, is_stream: bool) -> None:
        self.context = context
        self.is_stream = is_stream
        self.begun_s = now_s
        self.moved_s = now_s

    def note_message(self) -> None:
        """A message came or went."""
        self.moved_s = time.monotonic()


def host_of(context: grpc.ServicerContext) -> str:
    """The caller's host: a certificate may be shared, and a port is new each time."""
    return str(context.peer()).rpartition(":")[0]
