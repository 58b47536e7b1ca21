"""The containers that wait to be healed: how many bytes, and for how long.

Failures that are counted cannot say whether repairs keep up; a backlog that grows, or
whose oldest entry does, can.
"""

from merkle.tree import ContainerId


class Backlog:
    """Containers whose replicas differ, since when, and the bytes of the largest
    replica. Not thread-safe: the caller holds a lock.
    """

    def __init__(self) -> None:
        # Times never fall, so that the oldest entry is the first one.
        self._entries: dict[ContainerId, tuple[float, int]] = {}
        self._length_bytes = 0

    @property
    def length_bytes(self) -> int:
        """The bytes of all its containers."""
        return self._length_bytes

    def put(self, container_id: ContainerId, length_bytes: int, now_s: float) -> None:
        """Add a container, or note its size; one that is in it keeps its time."""
        since_s, earlier_bytes = self._entries.get(container_id, (now_s, 0))
        self._entries[container_id] = (since_s, length_bytes)
        self._length_bytes += length_bytes - earlier_bytes

    def remove(self, container_id: ContainerId) -> None:
        """Take a container out, if it is in."""
        _, earlier_bytes = self._entries.pop(container_id, (0.0, 0))
        self._length_bytes -= earlier_bytes

    def oldest_age_s(self, now_s: float) -> float:
        """Seconds since the oldest entry came; 0 without any."""
        oldest = next(iter(self._entries.values()), None)
        return max(0.0, now_s - oldest[0]) if oldest else 0.0
