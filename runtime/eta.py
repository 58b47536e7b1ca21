"""How fast work goes, and how long the rest of it takes: by what was done lately.

A mean since the beginning is wrong for hours after a slow start, and after a pause.
"""

from collections import deque

# The rate is that of this much of the past.
_WINDOW_S = 60.0
# Between two samples: 60 of them hold the window.
_SAMPLE_EVERY_S = 1.0
# No ETA is estimated until one of these is reached.
_ETA_AFTER_S = 30.0
_ETA_AFTER_SHARE = 0.01


class RateWindow:
    """Counts what is done, with the time of each count in seconds of any clock."""

    def __init__(self, begun_s: float) -> None:
        self.done = 0
        self._begun_s = begun_s
        self._samples = deque([(begun_s, 0)])
        self._latest_s = begun_s

    def add(self, count: int, now_s: float) -> None:
        """Count more as done."""
        self.done += count
        self._latest_s = now_s
        if now_s - self._samples[-1][0] >= _SAMPLE_EVERY_S:
            self._samples.append((now_s, self.done))
        while len(self._samples) > 1 and self._samples[1][0] <= now_s - _WINDOW_S:
            self._samples.popleft()

    def skip(self, count: int) -> None:
        """Count as done what cost no time: it says nothing of the rest."""
        self.done += count
        self._samples = deque((at_s, done + count) for at_s, done in self._samples)

    def rate(self) -> float:
        """Units per second over the window, up to the last count."""
        since_s, before = self._samples[0]
        return (self.done - before) / max(self._latest_s - since_s, 1e-9)

    def eta_s(self, total: int) -> float | None:
        """Seconds until `total` is done; 0 if it is, for example of an estimated total
        that was too low. None if it cannot be said yet, or nothing gets on.
        """
        if self.done >= total:
            return 0.0
        is_early = self._latest_s - self._begun_s < _ETA_AFTER_S
        if is_early and self.done < total * _ETA_AFTER_SHARE:
            return None
        rate = self.rate()
        return (total - self.done) / rate if rate else None


def duration_text(seconds: float) -> str:
    """A duration for people, of two units at most: `40s`, `5m 10s`, `3h 20m`,
    `2d 4h`.
    """
    whole = round(seconds)
    for unit, size, below, below_size in (
        ("d", 86_400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            rest = whole % size // below_size
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"
