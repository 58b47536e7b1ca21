"""The values that the controller returns, and that commands make of its messages:
containers, replicas and jobs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from merkle.outcome import RepairReport, Verdict
from merkle.replica import ContainerReplica, ContainerState, PeerId
from merkle.tree import ContainerId
from runtime.live_limits import LiveLimit
from scm.datanodes import Datanode
from scm.eligibility import Ruling
from scm.jobs import NO_LIMIT, JobId, JobLimit, JobState, OrderState, Pause
from scm.policy import ComparisonResult, Visit


@dataclass(frozen=True, slots=True)
class ContainerView:
    """The current state of a container."""

    container_id: ContainerId
    state: ContainerState | None
    compared: ComparisonResult
    expected_replicas: int
    replicas: tuple[ContainerReplica, ...]
    ruling: Ruling
    visit: Visit | None


@dataclass(frozen=True, slots=True)
class ReconcileResponse:
    """The result of a request for one container. `job_id` is that of the new job, or of
    the job that already runs.
    """

    container_id: ContainerId
    ruling: Ruling
    job_id: JobId | None = None


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as last reported, and the age of its datanode's last heartbeat."""

    datanode: Datanode
    replica: ContainerReplica
    is_live: bool
    report_age_s: float


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """A container; `state` is None if it cannot be derived from the replicas."""

    container_id: ContainerId
    state: ContainerState | None
    compared: ComparisonResult
    ruling: Ruling
    last_verdict: Verdict | None
    last_job_id: str
    required_nodes: int
    # Replicas that must be known before the comparison may be a match.
    expected_replicas: int
    replicas: tuple[ReplicaStatus, ...]


@dataclass(frozen=True, slots=True)
class OrderStatus:
    """One datanode's part of a job."""

    peer: PeerId
    state: OrderState
    progress: RepairReport
    round: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job; `verdict` is what it found.

    Times are in seconds since the epoch; 0 means not yet.
    `eta_s` is None while it cannot be estimated, and 0 when the job is finishing.
    """

    job_id: str
    container_id: ContainerId
    state: JobState
    detail: str
    verdict: Verdict | None
    reason: str
    requested_by: str
    created_at_s: float
    started_at_s: float
    finished_at_s: float
    last_progress_at_s: float
    bytes_done: int
    bytes_planned: int
    rate_bytes_per_s: float
    eta_s: float | None
    orders: tuple[OrderStatus, ...]
    # How the replicas compare now; None from an older controller.
    compared: ComparisonResult | None = None
    mean_rate_bytes_per_s: float = 0.0
    # A time of 0 means that it was never set.
    bytes_per_second: JobLimit = NO_LIMIT
    containers_max: JobLimit = NO_LIMIT
    pause: Pause | None = None


@dataclass(frozen=True, slots=True)
class DatanodeView:
    """A datanode as its controller sees it."""

    datanode: Datanode
    is_live: bool
    heartbeat_age_s: float
    replicas: int


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    """What a controller says of itself and its containers; `fault` is empty while all
    its threads get on.
    """

    started_age_s: float
    fault: str
    containers: int
    diverged: int
    unknown: int
    # With a replica whose data was never scanned.
    unscanned: int
    # Clients cannot read them; `unserved_ids` has the first of them.
    unserved: int
    unserved_ids: tuple[ContainerId, ...]
    # None if no root is known.
    oldest_root_age_s: float | None
    jobs: Mapping[JobState, int]
    limits: tuple[LiveLimit, ...]
    automatic: bool
    # Whether callers need a role.
    roles_enforced: bool
    # The SCMs of the cluster that it drives; empty if it has agents.
    scms: tuple[str, ...] = ()
