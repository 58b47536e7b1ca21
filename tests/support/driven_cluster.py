"""A controller that drives the twin of an Ozone cluster, poll by poll, on its time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from threading import Lock

from merkle.replica import ContainerReplica, ContainerState
from merkle.tree import ContainerId
from ozone.errors import ContainerNotFoundError
from ozone.scm_client import ClusterContainer, ClusterIdentity, ClusterNode
from runtime.errors import PeerRefusedError
from runtime.metrics import Metrics
from scm.cluster_controller import ClusterController
from scm.cluster_feed import ClusterFeed
from scm.jobs import Job, JobId
from scm.metrics import CONTROLLER_METRICS
from scm.rules import Rules
from tests.support.cluster_reports import FixedLeadership, MemoryAudit, MemoryJobStore
from tests.support.ozone_cluster_twin import SETTLE_S, OzoneClusterTwin

_METRICS = Metrics(CONTROLLER_METRICS)


@dataclass
class Listing:
    """ClusterListing of the twin."""

    twin: OzoneClusterTwin
    in_safe_mode: bool = False
    # The time of each request, by container.
    requested: list[tuple[float, ContainerId]] = field(default_factory=list)

    def identity(self) -> ClusterIdentity:
        self.twin.nodes()
        return ClusterIdentity("CID-1", "scm-1", (), self.in_safe_mode, len(self.twin.containers))

    def nodes(self) -> tuple[ClusterNode, ...]:
        return self.twin.nodes()

    def containers(self, after: int = 0) -> Iterator[ClusterContainer]:
        for number in sorted(one for one in self.twin.containers if one > after):
            yield ClusterContainer(number, ContainerState.CLOSED, "RATIS/THREE", 3)

    def get_containers(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, ClusterContainer]:
        return self.twin.get_containers(container_ids)

    def replicas(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, tuple[ContainerReplica, ...]]:
        return self.twin.replicas(container_ids)

    def close(self) -> None:
        """There is no connection."""

    def reconcile(
        self, container_ids: Sequence[ContainerId]
    ) -> dict[ContainerId, PeerRefusedError | ContainerNotFoundError | None]:
        self.requested += [(self.twin.now_s, number) for number in container_ids]
        return self.twin.reconcile(container_ids)


@dataclass
class DrivenCluster:
    """The twin, and a controller that is restarted at will."""

    twin: OzoneClusterTwin
    rules: Rules = field(default_factory=lambda: Rules(automatic=True))
    per_hour: int = 0
    poll_s: float = 5.0
    store: MemoryJobStore = field(default_factory=MemoryJobStore)
    audit: MemoryAudit = field(default_factory=MemoryAudit)
    ended: list[Job] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.listing = Listing(self.twin)
        self.restart()

    def restart(self) -> None:
        """A new process over the same store."""
        self.controller = ClusterController(
            rules=self.rules,
            settle_s=SETTLE_S,
            requests_per_hour=self.per_hour,
            store=self.store,
            leadership=FixedLeadership(),
            audit=self.audit,
            new_job_id=lambda: JobId(f"job{next(self._numbers)}"),
            now_s=self.twin.now_s,
            on_finished=self.ended.append,
        )
        self.feed = ClusterFeed(
            self.listing,
            self.controller,
            Lock(),
            lambda: self.twin.now_s,
            _METRICS,
            poll_s=self.poll_s,
            read_every_s=60.0,
        )

    def poll(self) -> None:
        """One poll and one tick; then time goes by."""
        self.feed.poll()
        self.controller.tick(self.twin.now_s)
        self.twin.advance(self.poll_s)

    def pass_time(self, seconds: float) -> None:
        """Poll for so long."""
        end_s = self.twin.now_s + seconds
        while self.twin.now_s < end_s:
            self.poll()

    def reconcile(self, number: int) -> Job:
        """A job that somebody requests."""
        [answer] = self.controller.reconcile(
            [ContainerId(number)], dry_run=False, reason="", requested_by="ann",
            now_s=self.twin.now_s,
        )  # fmt: skip
        assert answer.job_id is not None, answer.ruling
        return self.controller.job(answer.job_id)
