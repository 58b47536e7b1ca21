"""How fast Ozone is asked to reconcile: per datanode, and per hour.

Ozone queues every command that it gets, and its datanodes work the queue down at their
own rate. What is not to be queued must not be requested. Times are passed in.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from merkle.replica import PeerId
from merkle.tree import ContainerId

_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class PaceLimits:
    """Limits on requests; 0 means no limit per hour."""

    per_datanode: int = 2
    per_hour: int = 0

    def __post_init__(self) -> None:
        assert self.per_datanode >= 1
        assert self.per_hour >= 0


class Pace:
    """Counts what runs and what was requested. Not thread-safe."""

    def __init__(self, limits: PaceLimits) -> None:
        self._limits = limits
        self._running: dict[ContainerId, frozenset[PeerId]] = {}
        self._load = Counter[PeerId]()
        # Times of the requests of the last hour, oldest first.
        self._requested_s = deque[float]()

    def change_limits(self, limits: PaceLimits) -> None:
        """Go on with these limits; what runs is not interrupted."""
        self._limits = limits

    @property
    def running(self) -> Collection[ContainerId]:
        """The containers that have a place at their datanodes."""
        return self._running.keys()

    def has_place(self, peer: PeerId) -> bool:
        """Whether one more container may be requested at a datanode."""
        return self._load[peer] < self._limits.per_datanode

    def may_request(self, container_id: ContainerId, peers: Iterable[PeerId], now_s: float) -> bool:
        """Whether a request for a container on these datanodes is within the limits.

        A further round of a container that runs takes no second place at them.
        """
        while self._requested_s and self._requested_s[0] <= now_s - _HOUR_S:
            self._requested_s.popleft()
        if self._limits.per_hour and len(self._requested_s) >= self._limits.per_hour:
            return False
        ours = self._running.get(container_id, frozenset())
        return all(self.has_place(peer) for peer in set(peers) - ours)

    def requested(self, container_id: ContainerId, peers: Iterable[PeerId], now_s: float) -> None:
        """Count a request that was sent."""
        self.ended(container_id)
        self._running[container_id] = frozenset(peers)
        self._load.update(self._running[container_id])
        if self._limits.per_hour:
            self._requested_s.append(now_s)

    def ended(self, container_id: ContainerId) -> None:
        """Free the places of a container; one that does not run is ignored."""
        self._load.subtract(self._running.pop(container_id, frozenset()))
        self._load = +self._load
