"""A job: the reconciliation of one container, with one order for each live replica.

A round is one reconciliation by each datanode. A replica may be repaired only after
another has compared itself with it. The other is then ordered again, for a further
round of the same job (scm.policy.peers_to_reorder).

These are a job's values and the events that change it; scm.job_steps has the state
machine. A job's state is derived from its orders and its pause.
"""

import re
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum
from typing import NewType, TypeAlias

from merkle.outcome import RepairReport, Verdict, worst_verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.ozone_rounds import OzoneOutcome, OzoneRun
from scm.policy import Root, Roots

JobId = NewType("JobId", str)

# The second round spreads the repairs of the first; the third, late ones of the second.
ROUNDS_MAX = 3
# No ETA is estimated until one of these is reached.
_ETA_AFTER_S = 30.0
_ETA_AFTER_SHARE = 0.01
# A run of an order, as agents know it: a later round, or one that goes on after pauses.
_LATER_ROUND = re.compile(rf"(.+)\.([2-{ROUNDS_MAX}])")
_RESUMED = re.compile(rf"(.+)\.([1-{ROUNDS_MAX}])\.r([1-9][0-9]{{0,8}})")

_NOTHING_REPORTED = RepairReport()


class JobState(Enum):
    """The state of a job.

    WAITING: for what its detail names. STALLED: its datanodes report, but no progress.
    PARTIAL: some orders failed, damage remains, or a replica that it could not write
    still differs.
    """

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    WAITING = "WAITING"
    STALLED = "STALLED"
    DONE = "DONE"
    PARTIAL = "PARTIAL"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended."""
        return self in (JobState.DONE, JobState.PARTIAL, JobState.FAILED, JobState.CANCELLED)


class OrderState(Enum):
    """The state of an order."""

    QUEUED = "queued"
    ISSUED = "issued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    REFUSED = "refused"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_in_flight(self) -> bool:
        """Whether the order is at its datanode."""
        return self in (OrderState.ISSUED, OrderState.RUNNING)

    @property
    def is_terminal(self) -> bool:
        """Whether the order has ended."""
        return not self.is_in_flight and self is not OrderState.QUEUED


@dataclass(frozen=True, slots=True)
class Order:
    """One datanode's part of a job."""

    peer: PeerId
    peers: tuple[PeerId, ...]
    state: OrderState = OrderState.QUEUED
    attempts: int = 0
    # The time of the last progress; the command's deadline counts from it.
    advanced_at_s: float = 0.0
    progress: RepairReport = _NOTHING_REPORTED
    detail: str = ""
    round: int = 1
    # The progress of earlier rounds.
    rounds: RepairReport = _NOTHING_REPORTED
    # The progress of the runs of this round that a pause ended.
    paused_runs: RepairReport = _NOTHING_REPORTED
    # How often a pause ended a run; the next run has a task ID of its own.
    resumes: int = 0
    # Whether the datanode was told to stop because the job was paused.
    is_stopping: bool = False
    restarts: int = 0
    # The root of the replica, as reported with the latest progress.
    root: Root | None = None
    # The digest of the plan to carry out; empty: no plan.
    plan: str = ""


@dataclass(frozen=True, slots=True)
class Pause:
    """Who paused a job, why, and when, in seconds since the epoch."""

    by: str
    reason: str
    at_s: float

    @property
    def text(self) -> str:
        """By whom and why, for a job's detail."""
        return f"by {self.by or 'nobody'}{': ' if self.reason else ''}{self.reason}"


@dataclass(frozen=True, slots=True)
class JobLimit:
    """A limit that someone set on a job; `value` 0 means none."""

    value: int = 0
    set_by: str = ""
    set_at_s: float = 0.0


NO_LIMIT = JobLimit()


@dataclass(frozen=True, slots=True)
class Job:
    """A job. Times are in seconds since the epoch; 0 means not yet."""

    job_id: JobId
    container_id: ContainerId
    orders: tuple[Order, ...]
    created_at_s: float
    state: JobState = JobState.QUEUED
    detail: str = ""
    automatic: bool = False
    reason: str = ""
    requested_by: str = ""
    started_at_s: float = 0.0
    finished_at_s: float = 0.0
    last_progress_at_s: float = 0.0
    cancel_requested_at_s: float | None = None
    # The time in RUNNING, and when it was last updated.
    active_s: float = 0.0
    counted_at_s: float = 0.0
    # (active time, bytes done), within the window of the rate.
    samples: tuple[tuple[float, int], ...] = ()
    # The roots of the replicas before the latest round.
    roots: Roots = ()
    pause: Pause | None = None
    # What all its datanodes together may fetch in a second.
    bytes_per_second: JobLimit = NO_LIMIT
    # How many of the container's replicas may be repaired at once.
    containers_max: JobLimit = NO_LIMIT
    # Of a container that Ozone itself reconciles as a whole: its rounds. All orders are
    # then one order to SCM, and have one state.
    run: OzoneRun | None = None

    def __post_init__(self) -> None:
        assert self.orders
        assert len({order.peer for order in self.orders}) == len(self.orders)

    @property
    def bytes_done(self) -> int:
        """Bytes fetched by all datanodes."""
        return sum(order.progress.bytes_fetched for order in self.orders)

    @property
    def by_plan(self) -> bool:
        """Whether the job carries out a plan."""
        return any(order.plan for order in self.orders)

    @property
    def run_round(self) -> int:
        """The rounds that Ozone was asked for."""
        return self.run.round if self.run else 0

    @property
    def is_not_converging(self) -> bool:
        """Whether Ozone leaves the replicas different, however often it is asked."""
        return self.run is not None and self.run.outcome is OzoneOutcome.NOT_CONVERGING

    @property
    def bytes_planned(self) -> int:
        """Bytes planned by all datanodes; never less than the bytes done."""
        return sum(
            max(order.progress.bytes_planned, order.progress.bytes_fetched) for order in self.orders
        )

    @property
    def verdict(self) -> Verdict | None:
        """The worst verdict of any datanode; None if there is none yet."""
        found = {order.progress.verdict for order in self.orders if order.progress.verdict}
        return worst_verdict(found)

    @property
    def rate_bytes_per_s(self) -> float:
        """The rate over the last minute of active time; 0 if unknown, or while the job
        does not run.
        """
        if self.state is not JobState.RUNNING or len(self.samples) < 2:
            return 0.0
        (first_s, first_bytes), (last_s, last_bytes) = self.samples[0], self.samples[-1]
        return (last_bytes - first_bytes) / (last_s - first_s) if last_s > first_s else 0.0

    @property
    def mean_rate_bytes_per_s(self) -> float:
        """The rate over all active time; 0 before there is any."""
        return self.bytes_done / self.active_s if self.active_s > 0 else 0.0

    @property
    def bytes_per_second_of_each(self) -> int:
        """The share of the job's rate that an order gets which is sent now; 0 means no
        limit.

        The shares of the orders in flight never add up to more than the limit: each was
        divided by at least as many orders as there are in flight now.
        """
        limit = self.bytes_per_second.value
        if not limit:
            return 0
        unended = sum(not order.state.is_terminal for order in self.orders)
        at_once = min(unended, self.containers_max.value or unended)
        # A lower limit on orders interrupts none of those that are in flight.
        return max(1, limit // max(at_once, self.in_flight_count, 1))

    @property
    def in_flight_count(self) -> int:
        """The number of orders at their datanodes."""
        return sum(order.state.is_in_flight for order in self.orders)

    @property
    def may_send(self) -> bool:
        """Whether a further order may be sent now."""
        most = self.containers_max.value
        return self.pause is None and (not most or self.in_flight_count < most)

    @property
    def eta_s(self) -> float | None:
        """The estimated remaining active time; 0 when finishing; None while it cannot
        be estimated.
        """
        if self.state is not JobState.RUNNING or self.bytes_planned == 0:
            return None
        if self.active_s < _ETA_AFTER_S and self.bytes_done < self.bytes_planned * _ETA_AFTER_SHARE:
            return None
        if self.bytes_done >= self.bytes_planned:
            return 0.0
        rate = self.rate_bytes_per_s
        return (self.bytes_planned - self.bytes_done) / rate if rate > 0 else None

    @property
    def peers(self) -> frozenset[PeerId]:
        """The datanodes that have an order."""
        return frozenset(order.peer for order in self.orders)

    def order(self, peer: PeerId) -> Order | None:
        """The order of one datanode; None if it has none."""
        return next((order for order in self.orders if order.peer == peer), None)


@dataclass(frozen=True, slots=True)
class OrderIssued:
    """The order was sent to the datanode."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class OrderAccepted:
    """The datanode confirmed the order."""

    peer: PeerId
    round: int = 1
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class ProgressReceived:
    """The datanode reported progress or its result. `state` is RUNNING, DONE, FAILED,
    INTERRUPTED or REFUSED. `root` is that of its replica, as reported with it.
    """

    peer: PeerId
    state: OrderState
    progress: RepairReport
    round: int = 1
    root: Root | None = None
    resumes: int = 0


@dataclass(frozen=True, slots=True)
class AgentRestarted:
    """The datanode's agent restarted, and has lost its orders."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class OrderAbandoned:
    """The datanode will not execute its order; `reason` is for the job's detail."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The end of the job was requested. No order was delivered to the `undelivered`
    datanodes, so none of them has anything to stop.
    """

    undelivered: AbstractSet[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class PauseRequested:
    """Nothing more of the job is to run until it is resumed. No order was delivered to
    the `undelivered` datanodes, so none of them has anything to stop.
    """

    by: str
    reason: str = ""
    undelivered: AbstractSet[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """The job is to go on."""


@dataclass(frozen=True, slots=True)
class ThrottleRequested:
    """Limits on the job were set; None leaves a limit as it is, 0 removes it."""

    by: str
    bytes_per_second: int | None = None
    containers_max: int | None = None


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Someone requested what automatic mode had begun: the job is theirs now."""

    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunChanged:
    """The roots of a container that Ozone reconciles were looked at, a request was sent
    or SCM refused it. `is_due` is whether its next round may be requested.
    """

    run: OzoneRun
    is_due: bool = False


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time passed; `live` are the live datanodes."""

    live: AbstractSet[PeerId]
    command_deadline_s: float


@dataclass(frozen=True, slots=True)
class ControllerResumed:
    """The controller started, or did not run for a while. It saw nothing meanwhile, so
    deadlines and active time count from now.
    """


Event: TypeAlias = (
    OrderIssued
    | OrderAccepted
    | ProgressReceived
    | AgentRestarted
    | OrderAbandoned
    | CancelRequested
    | PauseRequested
    | ResumeRequested
    | ThrottleRequested
    | TakenOver
    | RunChanged
    | TimePassed
    | ControllerResumed
)


def task_id(job_id: JobId, round_: int, resumes: int = 0) -> str:
    """The job ID that agents get for a run of an order.

    It is unique for each round, and for each run that follows a pause, so that a late
    report or a late command to stop is never taken for the next.
    """
    if resumes:
        return f"{job_id}.{round_}.r{resumes}"
    return job_id if round_ == 1 else f"{job_id}.{round_}"


def task_of(text: str) -> tuple[JobId, int, int]:
    """The job, the round and the number of resumes of a `task_id`."""
    if resumed := _RESUMED.fullmatch(text):
        return JobId(resumed[1]), int(resumed[2]), int(resumed[3])
    if later := _LATER_ROUND.fullmatch(text):
        return JobId(later[1]), int(later[2]), 0
    return JobId(text), 1, 0
