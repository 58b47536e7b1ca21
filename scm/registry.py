"""What datanodes reported: who is alive, and which replicas of which container they
hold.

Reports come late, twice and out of order. Within one life of an agent (its incarnation)
the sequence number decides; a report of an earlier life is dropped however late it
comes, as long as the present one is heard of: a late first report of a dead life must
not shut out the living one for ever. A gap in the sequence loses nothing: agents send
what differs from what was last answered. Only after a start, of ours or of theirs, is a
full report asked for. Comparisons are kept as an index that is updated for the
containers a report touches, so that asking for the diverged ones costs nothing. No
clock: times are passed in.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from scm.eligibility import ContainerState, container_state
from scm.policy import ComparisonResult, RootComparison, compare

# Earlier lives of an agent that are remembered, so that a report of one of them is
# known as late.
_INCARNATIONS_KEPT = 16
# Containers whose last replica vanished: still known, to tell "no replicas" from "not
# found".
_EMPTY_CONTAINERS_MAX = 100_000


class Liveness(Enum):
    """By age of the last heartbeat: a STALE datanode gets no orders, a DEAD one's
    replicas count no more.
    """

    LIVE = "live"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Datanode:
    peer: PeerId
    hostname: str
    # host:port of its services.
    address: str


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Full: all that the datanode holds. Incremental: what changed, and what is
    gone.
    """

    full: bool
    replicas: tuple[ContainerReplica, ...] = ()
    removed: tuple[ContainerId, ...] = ()


@dataclass(frozen=True, slots=True)
class HeartbeatEffect:
    """What a heartbeat brought; `restarted` says that the agent began a new life since
    the one before.
    """

    applied: bool
    restarted: bool = False
    registered: bool = False
    full_report_wanted: bool = False
    changed: frozenset[ContainerId] = frozenset()


@dataclass(frozen=True, slots=True)
class DatanodeStatus:
    datanode: Datanode
    liveness: Liveness
    heartbeat_age_s: float
    replicas: int


@dataclass(slots=True)
class _Known:
    datanode: Datanode
    incarnation: str
    sequence: int
    heard_at_s: float
    liveness: Liveness = Liveness.LIVE
    full_report_wanted: bool = True
    containers: set[ContainerId] = field(default_factory=set)
    earlier: deque[str] = field(default_factory=lambda: deque(maxlen=_INCARNATIONS_KEPT))


class Registry:
    """Not thread-safe: its owner holds a lock."""

    def __init__(self, *, stale_after_s: float, dead_after_s: float) -> None:
        assert 0 < stale_after_s <= dead_after_s
        self._stale_after_s = stale_after_s
        self._dead_after_s = dead_after_s
        self._datanodes: dict[PeerId, _Known] = {}
        self._replicas: dict[ContainerId, dict[PeerId, ContainerReplica]] = {}
        self._empty: dict[ContainerId, ContainerState] = {}
        # A container that was closed once stays closed, whatever becomes of its
        # replicas.
        self._seen_closed: set[ContainerId] = set()
        self._compared: dict[ContainerId, ComparisonResult] = {}
        self._diverged: dict[ContainerId, None] = {}
        self._counts: Counter[RootComparison] = Counter()
        # STALE or DEAD; DEAD.
        self._silent: frozenset[PeerId] = frozenset()
        self._dead: frozenset[PeerId] = frozenset()
        self._ordered: list[ContainerId] | None = []

    def observe(
        self,
        datanode: Datanode,
        *,
        incarnation: str,
        sequence: int,
        report: ReplicaReport | None,
        now_s: float,
    ) -> HeartbeatEffect:
        """Take in one heartbeat."""
        known = self._datanodes.get(datanode.peer)
        if known is None:
            known = self._datanodes[datanode.peer] = _Known(datanode, incarnation, sequence, now_s)
            registered, restarted = True, False
        elif incarnation != known.incarnation:
            is_earlier = incarnation in known.earlier or _is_older(incarnation, known.incarnation)
            if is_earlier and known.liveness is Liveness.LIVE:
                return HeartbeatEffect(False, full_report_wanted=known.full_report_wanted)
            known.earlier.append(known.incarnation)
            known.incarnation, known.full_report_wanted = incarnation, True
            registered, restarted = False, True
        else:
            if sequence <= known.sequence:
                return HeartbeatEffect(False, full_report_wanted=known.full_report_wanted)
            registered = restarted = False
        was_live = known.liveness is Liveness.LIVE and not registered
        known.datanode, known.sequence = datanode, sequence
        known.heard_at_s, known.liveness = max(now_s, known.heard_at_s), Liveness.LIVE
        changed = self._apply(known, report) if report else set[ContainerId]()
        if not was_live:
            self._note_silent()
            changed |= known.containers
        self._index(changed)
        return HeartbeatEffect(
            True, restarted, registered, known.full_report_wanted, frozenset(changed)
        )

    def age(self, now_s: float) -> list[tuple[PeerId, Liveness]]:
        """Judge each datanode by the age of its last heartbeat; returns those that got
        worse.
        """
        worse = []
        for peer, known in self._datanodes.items():
            age_s = now_s - known.heard_at_s
            liveness = Liveness.DEAD if age_s >= self._dead_after_s else Liveness.STALE
            if age_s >= self._stale_after_s and liveness is not known.liveness:
                known.liveness = liveness
                worse.append((peer, liveness))
        if worse:
            self._note_silent()
            for peer, _ in worse:
                self._index(self._datanodes[peer].containers)
        return worse

    def knows(self, container_id: ContainerId) -> bool:
        """Whether a replica of the container was reported, now or before."""
        return container_id in self._replicas or container_id in self._empty

    def replicas(self, container_id: ContainerId) -> list[ContainerReplica]:
        """The replicas on datanodes that are not dead, in the order of their datanodes'
        IDs.
        """
        held = self._replicas.get(container_id, {})
        return [held[peer] for peer in sorted(held) if peer not in self._dead]

    def state(self, container_id: ContainerId) -> ContainerState | None:
        """The state by the rule of `container_state`, the last one known without
        replicas; None if unknown.
        """
        replicas = self.replicas(container_id) or list(
            self._replicas.get(container_id, {}).values()
        )
        return container_state(replicas) or self._empty.get(container_id)

    def returns_to(self, container_id: ContainerId, *, required_nodes: int) -> ReplicaState:
        """What an unhealthy replica of it that proves clean may become.

        SCM closes a container at the commit of whoever claims to be CLOSED, and drops
        replicas with another. So CLOSED only if a replica was ever reported CLOSED
        here, or if there is no other commit: as many replicas as there should be, all
        UNHEALTHY, all at one. QUASI_CLOSED is safe where neither is known, since SCM,
        which knows, orders such a replica to close.
        """
        replicas = self.replicas(container_id)
        has_one_commit = (
            len(replicas) >= required_nodes and len({replica.bcs_id for replica in replicas}) == 1
        )
        all_unhealthy = all(replica.state is ReplicaState.UNHEALTHY for replica in replicas)
        is_closed = container_id in self._seen_closed or (has_one_commit and all_unhealthy)
        return ReplicaState.CLOSED if is_closed else ReplicaState.QUASI_CLOSED

    def compared(self, container_id: ContainerId) -> ComparisonResult:
        """What the reported roots of the container say."""
        return self._compared.get(container_id) or ComparisonResult(
            RootComparison.UNKNOWN, "no replicas are known"
        )

    def is_live(self, peer: PeerId) -> bool:
        """Whether the datanode reported lately."""
        known = self._datanodes.get(peer)
        return known is not None and known.liveness is Liveness.LIVE

    def live(self) -> frozenset[PeerId]:
        """The datanodes that reported lately."""
        return frozenset(
            peer for peer, known in self._datanodes.items() if known.liveness is Liveness.LIVE
        )

    def is_dead(self, peer: PeerId) -> bool:
        """Whether it was heard of, but too long ago."""
        return peer in self._dead

    def datanode(self, peer: PeerId) -> Datanode | None:
        """A datanode and its address; None if it never reported."""
        known = self._datanodes.get(peer)
        return known.datanode if known else None

    def heartbeat_age_s(self, peer: PeerId, now_s: float) -> float:
        """Seconds since the datanode's last heartbeat."""
        return max(0.0, now_s - self._datanodes[peer].heard_at_s)

    def datanodes(self, now_s: float) -> list[DatanodeStatus]:
        """All datanodes that reported."""
        return [
            DatanodeStatus(
                known.datanode,
                known.liveness,
                self.heartbeat_age_s(peer, now_s),
                len(known.containers),
            )
            for peer, known in sorted(self._datanodes.items())
        ]

    @property
    def datanodes_known(self) -> int:
        """How many datanodes reported."""
        return len(self._datanodes)

    def container_ids(self, after: int = 0) -> Iterator[ContainerId]:
        """All known containers beyond `after`, ascending."""
        if self._ordered is None:
            self._ordered = sorted({*self._replicas, *self._empty})
        ordered = self._ordered
        yield from (ordered[at] for at in range(bisect_right(ordered, after), len(ordered)))

    def diverged(self) -> Collection[ContainerId]:
        """Containers whose replicas differ, longest known first."""
        return self._diverged.keys()

    def postpone(self, container_id: ContainerId) -> None:
        """Put a diverged container behind the others."""
        self._diverged[container_id] = self._diverged.pop(container_id)

    def counts(self) -> Mapping[RootComparison, int]:
        """How many containers have which comparison."""
        return self._counts

    def __len__(self) -> int:
        return len(self._replicas) + len(self._empty)

    def _apply(self, known: _Known, report: ReplicaReport) -> set[ContainerId]:
        peer = known.datanode.peer
        changed = set()
        # A DELETED replica is gone: its datanode reports it once so that it is
        # forgotten.
        present = {
            r.container_id: r for r in report.replicas if r.state is not ReplicaState.DELETED
        }
        for container_id, replica in present.items():
            held = self._replicas.get(container_id)
            if held is None:
                held = self._replicas[container_id] = {}
                if self._empty.pop(container_id, None) is None:
                    self._ordered = None
            if replica.state is ReplicaState.CLOSED:
                self._seen_closed.add(container_id)
            if held.get(peer) != replica:
                held[peer] = replica
                changed.add(container_id)
        gone = (
            known.containers - present.keys()
            if report.full
            else self._named_gone(report) & known.containers
        )
        for container_id in gone:
            self._forget(container_id, peer)
        # In place: an incremental report must not cost as much as the datanode holds.
        known.containers |= present.keys()
        known.containers -= gone
        known.full_report_wanted &= not report.full
        return changed | gone

    @staticmethod
    def _named_gone(report: ReplicaReport) -> set[ContainerId]:
        return {
            *report.removed,
            *(r.container_id for r in report.replicas if r.state is ReplicaState.DELETED),
        }

    def _forget(self, container_id: ContainerId, peer: PeerId) -> None:
        held = self._replicas[container_id]
        last = held.pop(peer)
        if held:
            return
        del self._replicas[container_id]
        state = container_state([last])
        assert state is not None
        self._empty[container_id] = state
        if len(self._empty) > _EMPTY_CONTAINERS_MAX:
            oldest = next(iter(self._empty))
            del self._empty[oldest]
            self._seen_closed.discard(oldest)
            self._ordered = None

    def _note_silent(self) -> None:
        self._silent = frozenset(self._datanodes.keys() - self.live())
        self._dead = frozenset(
            p for p in self._silent if self._datanodes[p].liveness is Liveness.DEAD
        )

    def _index(self, container_ids: Iterable[ContainerId]) -> None:
        for container_id in container_ids:
            earlier = self._compared.pop(container_id, None)
            if earlier:
                self._counts[earlier.comparison] -= 1
            held = self._replicas.get(container_id, {})
            replicas = [held[peer] for peer in held if peer not in self._dead]
            if not replicas:
                self._diverged.pop(container_id, None)
                continue
            compared = self._compared[container_id] = compare(replicas, silent=self._silent)
            self._counts[compared.comparison] += 1
            if compared.comparison is RootComparison.DIVERGED:
                self._diverged.setdefault(container_id)
            else:
                self._diverged.pop(container_id, None)


def _is_older(incarnation: str, than: str) -> bool:
    """Agents number their lives by the clock where they can; anything else cannot be
    put in order.
    """
    return incarnation.isdecimal() and than.isdecimal() and int(incarnation) < int(than)
