"""The latest comparison of each container, and the sets that follow from it."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from merkle.replica import ContainerReplica, ReplicaState
from merkle.tree import ContainerId
from scm.ages import RootAges
from scm.backlog import Backlog
from scm.policy import ComparisonResult, RootComparison

# Ozone serves no client from such a replica.
_UNSERVED = frozenset({ReplicaState.UNHEALTHY, ReplicaState.INVALID})


class ComparisonIndex:
    """Comparisons by container. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._compared: dict[ContainerId, ComparisonResult] = {}
        self._counts: Counter[RootComparison] = Counter()
        self._diverged: dict[ContainerId, None] = {}
        self._unserved: set[ContainerId] = set()
        self._sorted_ids: list[ContainerId] | None = None
        # The diverged containers, since when this process knows it.
        self.backlog = Backlog()
        self.ages = RootAges()

    def __len__(self) -> int:
        return len(self._compared)

    def get(self, container_id: ContainerId) -> ComparisonResult | None:
        """The latest comparison of a container; None if it is unknown."""
        return self._compared.get(container_id)

    def container_ids(self, after: int) -> Iterator[ContainerId]:
        """All containers with IDs above `after`, ascending."""
        if self._sorted_ids is None:
            self._sorted_ids = sorted(self._compared)
        ordered = self._sorted_ids
        yield from (ordered[at] for at in range(bisect_right(ordered, after), len(ordered)))

    @property
    def diverged(self) -> Collection[ContainerId]:
        """Containers whose replicas differ, in the order in which they diverged."""
        return self._diverged.keys()

    @property
    def unserved(self) -> Collection[ContainerId]:
        """Containers of which every known replica is UNHEALTHY or INVALID."""
        return self._unserved

    @property
    def counts(self) -> Mapping[RootComparison, int]:
        """The number of containers by comparison."""
        return self._counts

    def postpone(self, container_id: ContainerId) -> None:
        """Move a diverged container to the end of the order."""
        self._diverged[container_id] = self._diverged.pop(container_id)

    def put(
        self,
        container_id: ContainerId,
        replicas: Sequence[ContainerReplica],
        compared: ComparisonResult,
        now_s: float,
        *,
        has_scan_times: bool,
    ) -> None:
        """Add a container or replace its comparison. Without scan times in its reports
        the age of its roots is not known, and is not counted.
        """
        earlier = self._compared.get(container_id)
        if earlier is None:
            self._sorted_ids = None
        else:
            self._counts[earlier.comparison] -= 1
        self._compared[container_id] = compared
        self._counts[compared.comparison] += 1
        closed = [replica for replica in replicas if replica.state.is_closed]
        if closed and has_scan_times:
            self.ages.put(container_id, closed)
        else:
            self.ages.remove(container_id)
        if replicas and {replica.state for replica in replicas} <= _UNSERVED:
            self._unserved.add(container_id)
        else:
            self._unserved.discard(container_id)
        if compared.comparison is RootComparison.DIVERGED:
            self._diverged.setdefault(container_id)
            largest = max((replica.used_bytes for replica in replicas), default=0)
            self.backlog.put(container_id, largest, now_s)
        else:
            self.backlog.remove(container_id)
            self._diverged.pop(container_id, None)

    def forget(self, container_id: ContainerId) -> None:
        """Take a container out, if it is in."""
        earlier = self._compared.pop(container_id, None)
        if earlier is not None:
            self._counts[earlier.comparison] -= 1
            self._sorted_ids = None
        self._diverged.pop(container_id, None)
        self._unserved.discard(container_id)
        self.backlog.remove(container_id)
        self.ages.remove(container_id)
