"""What the controller answers to commands: containers, replicas and jobs as they are
now, as values.
"""

from dataclasses import dataclass

from merkle.outcome import RepairReport, Verdict
from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId
from scm.eligibility import ContainerState, Ruling
from scm.jobs import JobState, OrderState
from scm.policy import ComparisonResult
from scm.registry import Datanode


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as its datanode last reported it, and how old that report is."""

    datanode: Datanode
    replica: ContainerReplica
    is_live: bool
    report_age_s: float


@dataclass(frozen=True, slots=True)
class ContainerStatus:
    """One container; `state` is None where the replicas' states allow none."""

    container_id: ContainerId
    state: ContainerState | None
    compared: ComparisonResult
    ruling: Ruling
    last_verdict: Verdict | None
    last_job_id: str
    required_nodes: int
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
    """One job; times are seconds since the epoch, 0 for what has not happened.

    `eta_s` is None while it is too early to tell, and 0 when finishing.
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
