"""Limits on rates of bytes, meters of them, and the clocks that both and others use."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

# The longest single wait for bandwidth, so that a stop is noticed.
_SLICE_S = 0.2
# What is left below it is an error of rounding: no clock could wait for it.
_BYTES_LEFT_MIN = 1e-3
# The time that a meter measures over.
_METER_S = 60.0


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


def steady_clock(
    wall_s: Callable[[], float] = time.time, monotonic_s: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Seconds since the epoch, without jumps: what is old must not depend on when the
    system clock was set.
    """
    offset_s = wall_s() - monotonic_s()
    return lambda: monotonic_s() + offset_s


class RateLimiter:
    """Limits a rate of bytes: a caller waits until its bytes fit the rate. The rate may
    change while callers wait. Thread-safe.
    """

    def __init__(self, bytes_per_second: int, clock: Clock, wait: Callable[[float], bool]) -> None:
        """With `bytes_per_second` 0 there is no limit. `wait` sleeps for some seconds;
        it returns True if the caller should stop waiting.
        """
        self._rate = bytes_per_second
        self._clock = clock
        self._wait = wait
        self._lock = threading.Lock()
        # Bytes that were taken, and how many of them the rate has allowed by then.
        self._taken = 0
        self._allowed = 0.0
        self._at_s = clock.monotonic_s()

    @property
    def bytes_per_second(self) -> int:
        """The rate; 0 means no limit."""
        return self._rate

    def change(self, bytes_per_second: int) -> None:
        """Set another rate, also for those who wait now; 0 means no limit."""
        with self._lock:
            self._advance()
            self._rate = bytes_per_second

    def take(self, length_bytes: int) -> None:
        """Count bytes just read, and wait until the rate is back under the limit."""
        with self._lock:
            self._advance()
            self._taken += length_bytes
            until = self._taken
        while (left_s := self._left_s(until)) > 0:
            if self._wait(min(left_s, _SLICE_S)):
                return

    def _left_s(self, until: int) -> float:
        with self._lock:
            self._advance()
            left = until - self._allowed
            return left / self._rate if self._rate and left > _BYTES_LEFT_MIN else 0.0

    def _advance(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._rate:
            # Idle time gives no credit: the limit must also prevent a burst after it.
            allowed = self._allowed + (now_s - self._at_s) * self._rate
            self._allowed = min(float(self._taken), allowed)
        else:
            self._allowed = float(self._taken)
        self._at_s = now_s


class RateMeter:
    """Measures a rate over the last minute. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._started_s = clock.monotonic_s()
        # Bytes by the second in which they came, oldest first.
        self._seconds: deque[tuple[int, int]] = deque()

    def count(self, length_bytes: int) -> None:
        """Count bytes that went through now."""
        now_s = self._clock.monotonic_s()
        second = int(now_s)
        with self._lock:
            if self._seconds and self._seconds[-1][0] == second:
                length_bytes += self._seconds.pop()[1]
            self._seconds.append((second, length_bytes))
            self._forget(now_s)

    def bytes_per_second(self) -> float:
        """The mean rate over the last minute, or since the start if that is less."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            self._forget(now_s)
            total = sum(length for _, length in self._seconds)
        return total / min(_METER_S, max(1.0, now_s - self._started_s))

    def _forget(self, now_s: float) -> None:
        while self._seconds and self._seconds[0][0] <= now_s - _METER_S:
            self._seconds.popleft()
