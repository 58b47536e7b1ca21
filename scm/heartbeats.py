"""What the agents report to the controller."""

from dataclasses import dataclass

from merkle.outcome import RepairReport
from scm.datanodes import Datanode
from scm.jobs import JobId, OrderState
from scm.registry import ReplicaReport


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """A datanode's progress or result for one order."""

    job_id: JobId
    state: OrderState
    progress: RepairReport
    round: int = 1
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A heartbeat of an agent. `incarnation` is higher at each start of the agent, and
    `sequence` counts its heartbeats.
    """

    datanode: Datanode
    incarnation: int
    sequence: int
    report: ReplicaReport | None = None
    progress: tuple[ProgressReport, ...] = ()
    acknowledged: tuple[str, ...] = ()
