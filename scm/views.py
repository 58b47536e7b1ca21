"""The values that the controller returns, and that commands make of its messages:
containers, replicas and jobs.
"""

from dataclasses import dataclass

from merkle.outcome import RepairReport, Verdict
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId
from scm.eligibility import ContainerState, Ruling
from scm.jobs import JobId, JobState, OrderState
from scm.policy import ComparisonResult, Visit
from scm.registry import Datanode


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
