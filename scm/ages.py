"""How old the roots of containers are: the time of the last full scan of each.

A root says what its datanode read when it last scanned the data. A heartbeat repeats
the root and reads nothing. Containers are kept by the hour of their oldest scan, so
that an age needs no search through all of them.
"""

from collections.abc import Iterable

from merkle.replica import ContainerReplica
from merkle.tree import ContainerId

_HOUR_S = 3600.0
# A time before all scans, for roots of data that was never read.
_NEVER = -1


def oldest_scan_ms(replicas: Iterable[ContainerReplica]) -> int | None:
    """The time of the oldest last scan of these replicas, in milliseconds since the
    epoch; None if one was never scanned, or without replicas.
    """
    times = [replica.data_scan_timestamp_ms for replica in replicas]
    scanned = [time for time in times if time is not None]
    return min(scanned) if scanned and len(scanned) == len(times) else None


class RootAges:
    """The hours of the oldest scans. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._hours: dict[ContainerId, int] = {}
        self._containers: dict[int, set[ContainerId]] = {}
        # Hours before this one were returned by `aged`.
        self._aged_before = 0

    def put(self, container_id: ContainerId, replicas: Iterable[ContainerReplica]) -> None:
        """Set the age of a container from its closed replicas."""
        oldest_ms = oldest_scan_ms(replicas)
        self.remove(container_id)
        hour = _NEVER if oldest_ms is None else max(0, int(oldest_ms / 1000 / _HOUR_S))
        self._hours[container_id] = hour
        self._containers.setdefault(hour, set()).add(container_id)

    def remove(self, container_id: ContainerId) -> None:
        """Forget a container; an unknown one is ignored."""
        hour = self._hours.pop(container_id, None)
        if hour is None:
            return
        self._containers[hour].discard(container_id)
        if not self._containers[hour]:
            del self._containers[hour]

    def aged(self, before_s: float) -> set[ContainerId]:
        """The containers whose oldest scan began to lie before this time since the last
        call, at most an hour late.
        """
        before = int(before_s / _HOUR_S) if before_s > 0 else 0
        if before <= self._aged_before:
            return set()
        due = [hour for hour in self._containers if self._aged_before <= hour < before]
        self._aged_before = before
        return {container_id for hour in due for container_id in self._containers[hour]}

    @property
    def oldest_s(self) -> float | None:
        """The hour of the oldest scan, in seconds since the epoch; None without any."""
        hours = [hour for hour in self._containers if hour != _NEVER]
        return min(hours) * _HOUR_S if hours else None

    @property
    def never_scanned(self) -> int:
        """The number of containers with a replica that was never scanned."""
        return len(self._containers.get(_NEVER, ()))
