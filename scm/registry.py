"""The reported state of the cluster: live datanodes, and the replicas they hold.

Reports may be late, repeated or out of order. An incarnation is one start of an agent;
each start has a higher number. The pair of incarnation and sequence number orders the
reports of a datanode: one that is not later than the last is dropped. A gap in the
sequence is harmless, because agents report all changes since the last response. A full
report is requested only after a start of the controller or the agent. It may come in
parts. Until the last, replicas of parts to come stay as they were last known, and count
as unknown. Comparisons are updated for the containers in a report, so the diverged
containers are always known. Times are passed in.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import takewhile
from types import MappingProxyType

from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer
from runtime.errors import UsageError
from scm.ages import RootAges
from scm.backlog import Backlog
from scm.comparison_index import ComparisonIndex
from scm.container_reports import ClusterSnapshot, reason_not_compared
from scm.datanodes import LIVENESS_OF, Datanode, DatanodeStatus, Liveness, datanode_of
from scm.eligibility import container_state
from scm.limits import LIMITS, ControllerLimits
from scm.policy import ComparisonResult, Knowledge, RootComparison, compare, expected_replicas

# Containers without replicas that are remembered, to distinguish "no replicas" from
# "not found".
_EMPTY_CONTAINERS_MAX = 100_000
_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A full report lists all replicas of the datanode; an incremental one lists the
    changed and the removed ones.

    A long full report comes in parts, each with all replicas of containers with IDs
    above `after` up to `through` (None: to the last). `after` of the first part is 0,
    of each other the `through` of the part before. Replicas outside of its part are
    changes.
    """

    full: bool
    replicas: tuple[ContainerReplica, ...] = ()
    removed: tuple[ContainerId, ...] = ()
    after: int = 0
    through: int | None = None

    @property
    def is_first_part(self) -> bool:
        """Whether it begins a full report in parts."""
        return self.full and self.after == 0 and self.through is not None

    def lists(self, container_id: ContainerId) -> bool:
        """Whether the datanode has no replica of the container unless one is listed."""
        is_before_end = self.through is None or container_id <= self.through
        return self.full and self.after < container_id and is_before_end


@dataclass(frozen=True, slots=True)
class HeartbeatEffect:
    """The effect of a heartbeat. `applied` is False for a late or repeated one;
    `outdated` states that a later start of the agent has reported. `restarted` states
    that the agent has restarted since the last one. `reassigned` are the containers of
    which the datanode is or was a holder, and was not or is not now.
    """

    applied: bool
    restarted: bool = False
    registered: bool = False
    full_report_wanted: bool = False
    changed: frozenset[ContainerId] = frozenset()
    reassigned: frozenset[ContainerId] = frozenset()
    outdated: bool = False


@dataclass(slots=True)
class _DatanodeEntry:
    datanode: Datanode
    incarnation: int
    sequence: int
    last_heartbeat_s: float
    liveness: Liveness = Liveness.LIVE
    full_report_wanted: bool = True
    # The end of the parts of the full report that came in order.
    reported_through: int = 0
    containers: set[ContainerId] = field(default_factory=set)
    # Those of them that a full report under way has not reached. They were last known
    # at `known_at_s`.
    awaited: set[ContainerId] = field(default_factory=set)
    known_at_s: float = 0.0
    # Whether SCM reports it. Then DEAD is SCM's word alone: if SCM is silent, nobody
    # knows.
    is_of_cluster: bool = False

    def begin_full_report(self) -> None:
        """Count all replicas as last known at the last heartbeat, or earlier."""
        if not self.awaited:
            self.known_at_s = self.last_heartbeat_s
        self.awaited |= self.containers
        self.reported_through, self.full_report_wanted = 0, True


class Registry:
    """The reported replicas and datanodes. Not thread-safe: the caller holds a lock."""

    def __init__(
        self,
        *,
        stale_after_s: float,
        dead_after_s: float,
        required_nodes: int = 0,
        roots_stale_after_s: float = math.inf,
        holders: Mapping[ContainerId, AbstractSet[PeerId]] = MappingProxyType({}),
        now_s: float = 0.0,
        limits: ControllerLimits = LIMITS,
    ) -> None:
        """`holders` are those that an earlier process knew."""
        self._limits = limits
        assert 0 < stale_after_s <= dead_after_s
        self._required_nodes = required_nodes
        self._roots_stale_after_s = roots_stale_after_s
        self._started_at_s = self._now_s = now_s
        # The datanodes that hold a replica by their last reports, some of which an
        # earlier process received.
        self._holders: dict[ContainerId, AbstractSet[PeerId]] = dict(holders)
        # Those of an earlier process, until their datanode reports.
        self._unconfirmed: dict[PeerId, set[ContainerId]] = {}
        for container_id, peers in holders.items():
            for peer in peers:
                self._unconfirmed.setdefault(peer, set()).add(container_id)
        self._absent_are_dead = False
        self._stale_after_s = stale_after_s
        self._dead_after_s = dead_after_s
        self._datanodes: dict[PeerId, _DatanodeEntry] = {}
        self._replicas: dict[ContainerId, dict[PeerId, ContainerReplica]] = {}
        self._empty: dict[ContainerId, ContainerState] = {}
        # A container that was closed once stays closed, whatever its replicas are.
        self._seen_closed: set[ContainerId] = set()
        # What SCM says of containers, if it is the one that reports.
        self._facts: dict[ContainerId, ClusterContainer] = {}
        self._index = ComparisonIndex()
        # Datanodes that are STALE or DEAD, and those that are DEAD.
        self._silent: frozenset[PeerId] = frozenset()
        self._dead: frozenset[PeerId] = frozenset()
        self._update_comparisons(self._holders)

    def handle_heartbeat(
        self,
        datanode: Datanode,
        *,
        incarnation: int,
        sequence: int,
        report: ReplicaReport | None,
        now_s: float,
    ) -> HeartbeatEffect:
        """Record a heartbeat and its report, unless it is late or repeated.

        Raises:
            UsageError: the datanode would have too many containers; nothing changes.
        """
        if report:
            self._check_limit(datanode.peer, report)
        self._now_s = max(now_s, self._now_s)
        entry = self._datanodes.get(datanode.peer)
        if entry and (incarnation, sequence) <= (entry.incarnation, entry.sequence):
            return HeartbeatEffect(
                False,
                full_report_wanted=entry.full_report_wanted,
                outdated=incarnation < entry.incarnation,
            )
        registered = entry is None
        if entry is None:
            entry = _DatanodeEntry(datanode, incarnation, sequence, now_s)
            self._datanodes[datanode.peer] = entry
        awaited = frozenset(entry.awaited)
        restarted = incarnation != entry.incarnation
        if restarted or (report and report.is_first_part):
            entry.begin_full_report()
        was_live = entry.liveness is Liveness.LIVE and not registered
        entry.datanode, entry.incarnation, entry.sequence = datanode, incarnation, sequence
        entry.last_heartbeat_s, entry.liveness = max(now_s, entry.last_heartbeat_s), Liveness.LIVE
        unconfirmed = self._unconfirmed.get(datanode.peer, set())
        changed, reassigned = set[ContainerId](), set[ContainerId]()
        if not was_live:
            changed |= unconfirmed
        if report:
            applied = self._apply(entry, report)
            reassigned = self._update_holders(entry, report, applied)
            changed |= applied
        if not was_live:
            self._update_silent()
            changed |= entry.containers
        self._update_comparisons(changed | reassigned | (awaited ^ entry.awaited))
        return HeartbeatEffect(
            True,
            restarted,
            registered,
            entry.full_report_wanted,
            frozenset(changed),
            frozenset(reassigned),
        )

    def handle_cluster(self, snapshot: ClusterSnapshot, now_s: float) -> None:
        """Record what SCM says of its datanodes and of some containers."""
        self._now_s = now_s = max(now_s, self._now_s)
        changed = self._update_nodes(snapshot, now_s)
        gone = set(snapshot.gone)
        if snapshot.listed:
            after, through = snapshot.listed
            known = takewhile(lambda number: number <= through, self.container_ids(after))
            gone.update(number for number in known if number not in snapshot.containers)
        for container_id in gone:
            self._facts.pop(container_id, None)
            self._set_replicas(container_id, ())
        for container_id, report in snapshot.containers.items():
            self._facts[container_id] = report.container
            self._set_replicas(container_id, report.replicas)
        self._update_comparisons(changed | gone | snapshot.containers.keys())

    def _set_replicas(
        self, container_id: ContainerId, replicas: Iterable[ContainerReplica]
    ) -> None:
        # SCM lists the datanodes of all replicas, but not in the same moment.
        held = {one.peer: one for one in replicas if one.peer in self._datanodes}
        earlier = self._replicas.pop(container_id, {})
        for peer in earlier.keys() - held.keys():
            self._datanodes[peer].containers.discard(container_id)
        for peer in held.keys() - earlier.keys():
            self._datanodes[peer].containers.add(container_id)
        if held:
            self._replicas[container_id] = held

    def _update_nodes(self, snapshot: ClusterSnapshot, now_s: float) -> set[ContainerId]:
        """Bring the datanodes up to date; returns the containers of those of which the
        liveness changed.
        """
        changed = set[ContainerId]()
        for node in snapshot.nodes:
            entry = self._datanodes.get(node.peer)
            datanode = datanode_of(node)
            if entry is None:
                entry = _DatanodeEntry(datanode, 0, 0, now_s, Liveness.STALE, is_of_cluster=True)
                self._datanodes[node.peer] = entry
            liveness = LIVENESS_OF[node.health]
            if liveness is not entry.liveness:
                changed |= entry.containers
            entry.datanode, entry.liveness = datanode, liveness
            if liveness is Liveness.LIVE:
                entry.last_heartbeat_s = now_s
            else:
                # SCM says when it is silent, and not since when.
                entry.last_heartbeat_s = min(entry.last_heartbeat_s, now_s - self._stale_after_s)
        if changed or any(one.liveness is not Liveness.LIVE for one in self._datanodes.values()):
            self._update_silent()
        return changed

    def update_liveness(self, now_s: float) -> list[tuple[PeerId, Liveness]]:
        """Update each datanode's liveness by the age of its last heartbeat; returns the
        datanodes that became STALE or DEAD.
        """
        self._now_s = max(now_s, self._now_s)
        worse = []
        for peer, entry in self._datanodes.items():
            age_s = now_s - entry.last_heartbeat_s
            is_dead = age_s >= self._dead_after_s and not entry.is_of_cluster
            liveness = Liveness.DEAD if is_dead else Liveness.STALE
            if entry.is_of_cluster and entry.liveness is Liveness.DEAD:
                continue
            if age_s >= self._stale_after_s and liveness is not entry.liveness:
                entry.liveness = liveness
                worse.append((peer, liveness))
        if worse:
            self._update_silent()
            for peer, _ in worse:
                self._update_comparisons(self._datanodes[peer].containers)
                self._update_comparisons(self._unconfirmed.get(peer, ()))
        if not self._absent_are_dead and now_s - self._started_at_s >= self._dead_after_s:
            self._absent_are_dead = True
            for peer in self._unconfirmed.keys() - self._datanodes.keys():
                self._update_comparisons(self._unconfirmed[peer])
        self._update_comparisons(self._index.ages.aged(now_s - self._roots_stale_after_s))
        return worse

    def resume(self, pause_s: float) -> None:
        """Leave out a time in which this process could receive no heartbeat."""
        self._started_at_s += pause_s
        for entry in self._datanodes.values():
            entry.last_heartbeat_s += pause_s
            entry.known_at_s += pause_s

    def has_container(self, container_id: ContainerId) -> bool:
        """Whether a replica of the container is or was reported, here or to an earlier
        process.
        """
        return self._index.get(container_id) is not None

    def replicas(self, container_id: ContainerId) -> list[ContainerReplica]:
        """The replicas on datanodes that are not dead, by datanode ID."""
        held = self._replicas.get(container_id, {})
        return [held[peer] for peer in sorted(held) if peer not in self._dead]

    def state(self, container_id: ContainerId) -> ContainerState | None:
        """The state by `container_state`, without replicas the last known one; None if
        the container is unknown. What SCM says goes first.
        """
        if fact := self._facts.get(container_id):
            return fact.state
        replicas = self.replicas(container_id) or list(
            self._replicas.get(container_id, {}).values()
        )
        return container_state(replicas) or self._empty.get(container_id)

    def returns_to(self, container_id: ContainerId, *, required_nodes: int) -> ReplicaState:
        """The state that an UNHEALTHY replica may return to after its repair.

        SCM closes a container at the commit of a CLOSED replica, and deletes replicas
        with another commit. CLOSED is therefore returned only if a replica was reported
        CLOSED, or if there can be no other commit: all required replicas are UNHEALTHY
        and have one commit. Otherwise QUASI_CLOSED is safe, because SCM orders such a
        replica to close.
        """
        replicas = self.replicas(container_id)
        has_one_commit = (
            len(replicas) >= required_nodes and len({replica.bcs_id for replica in replicas}) == 1
        )
        all_unhealthy = all(replica.state is ReplicaState.UNHEALTHY for replica in replicas)
        is_closed = container_id in self._seen_closed or (has_one_commit and all_unhealthy)
        return ReplicaState.CLOSED if is_closed else ReplicaState.QUASI_CLOSED

    def compared(self, container_id: ContainerId) -> ComparisonResult:
        """The comparison of the container's reported roots."""
        return self._index.get(container_id) or compare([])

    def required_nodes(self, container_id: ContainerId) -> int:
        """How many replicas the container should have: SCM says it, or the settings."""
        fact = self._facts.get(container_id)
        return fact.required_replicas if fact else self._required_nodes

    def expected_replicas(self, container_id: ContainerId) -> int:
        """The number of replicas that must be known before a container can match."""
        replicas = self.replicas(container_id)
        return expected_replicas(replicas, self._knowledge(container_id, replicas))

    def holders(self, container_id: ContainerId) -> AbstractSet[PeerId]:
        """The datanodes that hold a replica by their last reports; an earlier process
        may have received these.
        """
        return self._holders.get(container_id, frozenset())

    @property
    def backlog(self) -> Backlog:
        """The diverged containers, since when this process knows it."""
        return self._index.backlog

    @property
    def ages(self) -> RootAges:
        """The ages of the roots."""
        return self._index.ages

    def is_live(self, peer: PeerId) -> bool:
        """Whether the datanode is LIVE."""
        entry = self._datanodes.get(peer)
        return entry is not None and entry.liveness is Liveness.LIVE

    def live(self) -> frozenset[PeerId]:
        """The datanodes that are LIVE."""
        return frozenset(
            peer for peer, entry in self._datanodes.items() if entry.liveness is Liveness.LIVE
        )

    def is_dead(self, peer: PeerId) -> bool:
        """Whether the datanode is DEAD; False if it never reported."""
        return peer in self._dead

    def datanode(self, peer: PeerId) -> Datanode | None:
        """A datanode and its address; None if it never reported."""
        entry = self._datanodes.get(peer)
        return entry.datanode if entry else None

    def heartbeat_age_s(self, peer: PeerId, now_s: float) -> float:
        """Seconds since the datanode's last heartbeat."""
        return max(0.0, now_s - self._datanodes[peer].last_heartbeat_s)

    def report_age_s(self, container_id: ContainerId, peer: PeerId, now_s: float) -> float:
        """Seconds since the datanode last confirmed its replica of the container: with
        every heartbeat, but not while its full report has still to reach the container.
        """
        entry = self._datanodes[peer]
        at_s = entry.known_at_s if container_id in entry.awaited else entry.last_heartbeat_s
        return max(0.0, now_s - at_s)

    def datanodes(self, now_s: float) -> list[DatanodeStatus]:
        """All known datanodes, by ID."""
        return [
            DatanodeStatus(
                entry.datanode,
                entry.liveness,
                self.heartbeat_age_s(peer, now_s),
                len(entry.containers),
            )
            for peer, entry in sorted(self._datanodes.items())
        ]

    @property
    def datanode_count(self) -> int:
        """The number of known datanodes."""
        return len(self._datanodes)

    def container_ids(self, after: int = 0) -> Iterator[ContainerId]:
        """All known containers with IDs above `after`, ascending."""
        return self._index.container_ids(after)

    def diverged(self) -> Collection[ContainerId]:
        """Containers whose replicas differ, in the order in which they diverged."""
        return self._index.diverged

    def unserved(self) -> Collection[ContainerId]:
        """Containers that clients cannot read: every reported replica is UNHEALTHY or
        INVALID.
        """
        return self._index.unserved

    def postpone(self, container_id: ContainerId) -> None:
        """Move a diverged container to the end of the order."""
        self._index.postpone(container_id)

    def counts(self) -> Mapping[RootComparison, int]:
        """The number of containers by comparison."""
        return self._index.counts

    def __len__(self) -> int:
        return len(self._index)

    def _check_limit(self, peer: PeerId, report: ReplicaReport) -> None:
        entry = self._datanodes.get(peer)
        held = entry.containers if entry else set[ContainerId]()
        if len(held) + len(report.replicas) <= self._limits.containers_per_datanode_max:
            return
        held = {number for number in held if not report.lists(number)}
        reported = {replica.container_id for replica in report.replicas}
        count = len((held | reported) - set(report.removed))
        if count > self._limits.containers_per_datanode_max:
            raise UsageError(
                f"datanode {peer} reports {count} containers; the limit is"
                f" {self._limits.containers_per_datanode_max}"
            )

    def _apply(self, entry: _DatanodeEntry, report: ReplicaReport) -> set[ContainerId]:
        peer = entry.datanode.peer
        changed = set()
        # A DELETED replica counts as removed.
        present = {
            r.container_id: r for r in report.replicas if r.state is not ReplicaState.DELETED
        }
        for container_id, replica in present.items():
            held = self._replicas.get(container_id)
            if held is None:
                held = self._replicas[container_id] = {}
                self._empty.pop(container_id, None)
            if replica.state is ReplicaState.CLOSED:
                self._seen_closed.add(container_id)
            if held.get(peer) != replica:
                held[peer] = replica
                changed.add(container_id)
        gone = (self._removed_by(report) - present.keys()) & entry.containers
        # The cost of an incremental report must not depend on all replicas.
        if report.full:
            listed = {number for number in entry.containers if report.lists(number)}
            gone |= listed - present.keys()
            if report.after <= entry.reported_through:
                entry.reported_through = report.through or _ID_MAX
                entry.full_report_wanted = report.through is not None
        for container_id in gone:
            self._remove_replica(container_id, peer)
        entry.containers |= present.keys()
        entry.containers -= gone
        entry.awaited -= present.keys() | gone
        return changed | gone

    @staticmethod
    def _removed_by(report: ReplicaReport) -> set[ContainerId]:
        return {
            *report.removed,
            *(r.container_id for r in report.replicas if r.state is ReplicaState.DELETED),
        }

    def _remove_replica(self, container_id: ContainerId, peer: PeerId) -> None:
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
            self._update_comparisons([oldest])

    def _update_silent(self) -> None:
        self._silent = frozenset(self._datanodes.keys() - self.live())
        self._dead = frozenset(
            p for p in self._silent if self._datanodes[p].liveness is Liveness.DEAD
        )

    def _update_comparisons(self, container_ids: Iterable[ContainerId]) -> None:
        for container_id in container_ids:
            held = self._replicas.get(container_id, {})
            if not (
                held
                or container_id in self._empty
                or container_id in self._holders
                or container_id in self._facts
            ):
                self._index.forget(container_id)
                continue
            replicas = [held[peer] for peer in held if peer not in self._dead]
            compared = self._compare(container_id, replicas)
            self._index.put(
                container_id,
                replicas,
                compared,
                self._now_s,
                has_scan_times=container_id not in self._facts,
            )

    def _compare(
        self, container_id: ContainerId, replicas: Sequence[ContainerReplica]
    ) -> ComparisonResult:
        fact = self._facts.get(container_id)
        if fact and (reason := reason_not_compared(fact)):
            return ComparisonResult(RootComparison.NOT_APPLICABLE, reason)
        return compare(replicas, self._knowledge(container_id, replicas))

    def _knowledge(
        self, container_id: ContainerId, replicas: Sequence[ContainerReplica]
    ) -> Knowledge:
        # SCM replaces the replicas of a dead datanode, so they are not expected.
        reported = {replica.peer for replica in replicas}
        missing = frozenset(
            peer
            for peer in self.holders(container_id)
            if peer not in reported and not self._is_dead_or_absent(peer)
        )
        if fact := self._facts.get(container_id):
            # SCM knows of no scan, so that the age of a root says nothing.
            return Knowledge(fact.required_replicas, self._silent)
        max_s = self._roots_stale_after_s
        awaited = frozenset(
            peer for peer in reported if container_id in self._datanodes[peer].awaited
        )
        return Knowledge(
            self._required_nodes,
            self._silent,
            missing,
            awaited,
            None if math.isinf(max_s) else (self._now_s - max_s) * 1000,
        )

    def _is_dead_or_absent(self, peer: PeerId) -> bool:
        return peer in self._dead or (self._absent_are_dead and peer not in self._datanodes)

    def _update_holders(
        self, entry: _DatanodeEntry, report: ReplicaReport, applied: AbstractSet[ContainerId]
    ) -> set[ContainerId]:
        """Bring `_holders` up to date with an applied report; returns what changed.

        What an earlier process knew of the datanode holds until a report contradicts
        it.
        """
        peer, held = entry.datanode.peer, entry.containers
        named = {replica.container_id for replica in report.replicas}
        added = {number for number in named & held if peer not in self.holders(number)}
        unconfirmed = self._unconfirmed.get(peer, set())
        listed = {number for number in unconfirmed if report.lists(number)}
        gone = {*applied, *named, *report.removed} | listed
        removed = {number for number in gone - held if peer in self.holders(number)}
        for container_id in added:
            self._holders[container_id] = frozenset({*self.holders(container_id), peer})
        for container_id in removed:
            left = frozenset(self.holders(container_id) - {peer})
            if left:
                self._holders[container_id] = left
            else:
                del self._holders[container_id]
        unconfirmed -= listed | named | removed
        if not unconfirmed:
            self._unconfirmed.pop(peer, None)
        return added | removed
