"""Limits on rates of bytes, and the clocks that they and others wait by."""

import threading
import time
from collections.abc import Callable
from typing import Protocol

# The longest single wait for bandwidth, so that a stop is noticed.
_SLICE_S = 0.2


class Clock(Protocol):
    """A source of time."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never jumps; only differences have a meaning."""


class SystemClock:
    """The clocks of the machine."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Seconds on a clock that never jumps."""
        return time.monotonic()


class RateLimiter:
    """Limits a rate of bytes: a caller waits until its bytes fit the rate.
    Thread-safe.
    """

    def __init__(self, bytes_per_second: int, clock: Clock, wait: Callable[[float], bool]) -> None:
        """With `bytes_per_second` 0 there is no limit. `wait` sleeps for some seconds;
        it returns True if the caller should stop waiting.
        """
        self._rate = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        self._free_at_s = clock.monotonic_s()

    def take(self, length_bytes: int) -> None:
        """Count bytes just read, and wait until the rate is back under the limit."""
        if not self._rate:
            return
        with self._lock:
            # Idle time gives no credit: the limit must also prevent a burst after it.
            self._free_at_s = (
                max(self._free_at_s, self._clock.monotonic_s()) + length_bytes / self._rate
            )
            free_at_s = self._free_at_s
        while (left_s := free_at_s - self._clock.monotonic_s()) > 0:
            if self._wait(min(left_s, _SLICE_S)):
                return
