"""What a controller knows of the cluster, for its users: containers with their rulings,
datanodes, and gauges. Nothing changes here.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from heapq import nsmallest
from itertools import islice

from merkle.replica import ContainerState, PeerId
from merkle.tree import ContainerId
from scm.datanodes import Datanode, DatanodeStatus
from scm.eligibility import Availability, Eligibility, Ruling, evaluate, evaluate_availability
from scm.job_index import JobIndex
from scm.jobs import JobState
from scm.policy import ComparisonResult, RootComparison, Visit, roots
from scm.ports import Leadership
from scm.registry import Registry
from scm.rules import Rules
from scm.views import ContainerView

_NOT_CONVERGING = "Ozone's reconciliation does not make them equal: a rescue may"


class ClusterQueries:
    """The answers of a controller. Not thread-safe: the caller holds a lock."""

    def __init__(
        self,
        rules: Rules,
        registry: Registry,
        jobs: JobIndex,
        visits: Mapping[ContainerId, Visit],
        leadership: Leadership,
    ) -> None:
        self._rules = rules
        self._registry = registry
        self._jobs = jobs
        self._visits = visits
        self._leadership = leadership

    def container(self, container_id: ContainerId) -> ContainerView | None:
        """The current state of a container; None if it is unknown."""
        if not self._registry.has_container(container_id):
            return None
        compared = self._registry.compared(container_id)
        if self.is_not_converging(container_id):
            compared = replace(compared, note=f"{compared.note}; {_NOT_CONVERGING}")
        return ContainerView(
            container_id,
            self._registry.state(container_id),
            compared,
            self._registry.expected_replicas(container_id),
            tuple(self._registry.replicas(container_id)),
            self.evaluate(container_id),
            self._visits.get(container_id),
        )

    def is_not_converging(self, container_id: ContainerId) -> bool:
        """Whether Ozone left these very roots different, however often it was asked."""
        visit = self._visits.get(container_id)
        if visit is None or visit.verdict is not None or visit.hopeless_roots is None:
            return False
        return visit.hopeless_roots == roots(self._registry.replicas(container_id))

    def evaluate(self, container_id: ContainerId) -> Ruling:
        """Whether a job for the container may start now, with the reason."""
        replicas = self._registry.replicas(container_id)
        state = self._registry.state(container_id)
        ruling = evaluate(
            container_id,
            state,
            replicas,
            required_nodes=self._registry.required_nodes(container_id),
            is_expected=self._registry.has_container(container_id),
        )
        if not ruling.is_ok:
            return ruling
        live = [replica for replica in replicas if self._registry.is_live(replica.peer)]
        availability = Availability(
            is_leader=self._leadership.term() is not None,
            live_replicas=len(live),
            live_writable_replicas=sum(not replica.read_only for replica in live),
        )
        ruling = evaluate_availability(container_id, availability)
        active = self._jobs.active_job_of(container_id)
        if active is None or not ruling.is_ok:
            return ruling
        message = f"Container {container_id} is already being reconciled, by job {active}."
        return Ruling(Eligibility.ALREADY_RUNNING, message)

    def compared(self, container_id: ContainerId) -> ComparisonResult:
        """How the container's replicas compare now."""
        return self._registry.compared(container_id)

    def containers(
        self,
        *,
        state: ContainerState | None,
        comparison: RootComparison | None,
        after: int,
        limit: int,
    ) -> tuple[list[ContainerView], bool]:
        """Up to `limit` containers with IDs above `after`, ascending, and whether there
        are more. None selects all states or comparisons.
        """
        known = (
            container_id
            for container_id in self._registry.container_ids(after)
            if (
                comparison is None or self._registry.compared(container_id).comparison is comparison
            )
            and (state is None or self._registry.state(container_id) is state)
        )
        found = [self.container(container_id) for container_id in islice(known, limit + 1)]
        views = [view for view in found if view is not None]
        return views[:limit], len(views) > limit

    def diverged(self) -> list[ContainerId]:
        """The containers whose roots differ, ascending."""
        return sorted(self._registry.diverged())

    def unserved(self, limit: int) -> list[ContainerId]:
        """The first containers that clients cannot read (Registry.unserved)."""
        return nsmallest(limit, self._registry.unserved())

    def datanodes(self, now_s: float) -> list[DatanodeStatus]:
        """All known datanodes, by ID."""
        return self._registry.datanodes(now_s)

    def datanode(self, peer: PeerId) -> Datanode | None:
        """A datanode and its address; None if it never reported."""
        return self._registry.datanode(peer)

    def is_live(self, peer: PeerId) -> bool:
        """Whether the datanode is LIVE (scm.registry.Liveness)."""
        return self._registry.is_live(peer)

    def heartbeat_age_s(self, peer: PeerId, now_s: float) -> float:
        """Seconds since the datanode's last heartbeat."""
        return self._registry.heartbeat_age_s(peer, now_s)

    def report_age_s(self, container_id: ContainerId, peer: PeerId, now_s: float) -> float:
        """Seconds since the datanode last confirmed its replica (Registry)."""
        return self._registry.report_age_s(container_id, peer, now_s)

    def change_rules(self, rules: Rules) -> None:
        """Answer by these rules."""
        self._rules = rules

    def job_counts(self) -> Mapping[JobState, int]:
        """The number of jobs in each state, of all that are known."""
        return Counter(job.state for job in self._jobs.newest(None, len(self._jobs)))

    @property
    def is_automatic(self) -> bool:
        """Whether diverged containers get a job without a request."""
        return self._rules.automatic

    def gauges(self, now_s: float) -> dict[str, float]:
        """The current gauges, by their names in scm.metrics."""
        counts, ages = self._registry.counts(), self._registry.ages
        oldest_s = ages.oldest_s
        active = Counter(job.state for job in self._jobs.active())
        return {
            "scm_datanodes_live": len(self._registry.live()),
            "scm_containers": len(self._registry),
            "scm_containers_diverged": counts[RootComparison.DIVERGED],
            "scm_diverged_bytes": self._registry.backlog.length_bytes,
            "scm_diverged_oldest_age_seconds": self._registry.backlog.oldest_age_s(now_s),
            "scm_containers_unknown": counts[RootComparison.UNKNOWN],
            "scm_containers_unscanned": ages.never_scanned,
            "scm_containers_unserved": len(self._registry.unserved()),
            "scm_roots_oldest_age_seconds": max(0.0, now_s - oldest_s) if oldest_s else 0.0,
            "scm_jobs_running": len(self._jobs.in_flight),
            "scm_jobs_paused": active[JobState.PAUSED],
            "scm_jobs_stalled": active[JobState.STALLED],
            "scm_orders_limit": self._rules.orders_per_datanode,
            "scm_automatic_jobs_limit": self._rules.automatic_jobs,
            # Agents report by themselves, and say by verdicts what stays.
            "scm_cluster_report_age_seconds": 0.0,
            "scm_containers_not_converging": 0,
        }

    @property
    def datanode_count(self) -> int:
        """The number of known datanodes."""
        return self._registry.datanode_count

    def required_nodes(self, container_id: ContainerId) -> int:
        """How many replicas the container should have (Registry.required_nodes)."""
        return self._registry.required_nodes(container_id)
