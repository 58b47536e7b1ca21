"""What a replication did so far, and how late it was."""

import threading
from collections import Counter, deque
from dataclasses import dataclass

from replicator.syncer.applier import Effect, Outcome

# Of so many changes the lag is told.
_LAGS = 2_000


@dataclass(frozen=True, slots=True)
class TallyNumbers:
    """A copy of the counters at one moment; times in ms."""

    applied: int
    sent_bytes: int
    effects: dict[Effect, int]
    last_applied_ms: int | None
    lag_p50_ms: int | None
    lag_p99_ms: int | None


class ReplicationTally:
    """Counts what was applied. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._effects = Counter[Effect]()
        self._lags = deque[int](maxlen=_LAGS)
        self._applied = 0
        self._sent_bytes = 0
        self._last_ms: int | None = None

    def applied(self, outcome: Outcome, since_ms: int | None, changes: int, now_ms: int) -> None:
        """Count an outcome of so many changes of the log. `since_ms` is when the oldest
        of them was made, or what a round has found; None where nobody knows: it has no
        lag.
        """
        with self._lock:
            self._applied += changes
            self._effects[outcome.effect] += 1
            self._sent_bytes += outcome.sent_bytes
            self._last_ms = now_ms
            if since_ms is not None:
                self._lags.append(max(0, now_ms - since_ms))

    def numbers(self) -> TallyNumbers:
        """The counters now."""
        with self._lock:
            lags = sorted(self._lags)
            return TallyNumbers(
                self._applied,
                self._sent_bytes,
                dict(self._effects),
                self._last_ms,
                _percentile(lags, 50),
                _percentile(lags, 99),
            )


def _percentile(values: list[int], percent: int) -> int | None:
    """The smallest value that so many percent of all do not exceed."""
    return values[-(-len(values) * percent // 100) - 1] if values else None
