"""A job: the reconciliation of one container, with one order for each live replica.

A round is one reconciliation by each datanode. A replica may be repaired only after
another has compared itself with it. The other is then ordered again, for a further
round of the same job (scm.policy.peers_to_reorder).

The job is a pure state machine: `step(job, event, now_s)` returns the next job. Its
state is derived only from its orders, so it cannot be RUNNING after all have ended.
Terminal states are final: late or repeated events change nothing.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import NewType, TypeAlias, assert_never

from merkle.outcome import (
    FINAL_VERDICTS,
    RepairReport,
    Verdict,
    worst_verdict,
)
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.policy import Root, Roots, RoundEnd, Target, peers_to_reorder

JobId = NewType("JobId", str)

# An agent that restarted this often during one order will probably do so again.
ATTEMPTS_MAX = 3
# The second round spreads the repairs of the first; the third, late ones of the second.
ROUNDS_MAX = 3
_LATER_ROUNDS = {str(number) for number in range(2, ROUNDS_MAX + 1)}
# How long a cancelled job waits for the agents that may have its orders to confirm.
CANCEL_GRACE_S = 60.0
# The rate is measured over the last minute of active time, so that waiting affects
# neither rate nor ETA.
_RATE_WINDOW_S = 60.0
# No ETA is estimated until one of these is reached.
_ETA_AFTER_S = 30.0
_ETA_AFTER_SHARE = 0.01


_NOTHING_REPORTED = RepairReport()


class JobState(Enum):
    """The state of a job. PARTIAL: some orders failed, damage remains, or a replica
    that it could not write still differs.
    """

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    WAITING = "WAITING"
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
    # The root of the replica, as reported with the latest progress.
    root: Root | None = None
    # The digest of the plan to carry out; empty: no plan.
    plan: str = ""


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

    def __post_init__(self) -> None:
        assert self.orders
        assert len({order.peer for order in self.orders}) == len(self.orders)

    @property
    def bytes_done(self) -> int:
        """Bytes fetched by all datanodes."""
        return sum(order.progress.bytes_fetched for order in self.orders)

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
        """The rate over the last minute of active time; 0 if unknown."""
        if len(self.samples) < 2:
            return 0.0
        (first_s, first_bytes), (last_s, last_bytes) = self.samples[0], self.samples[-1]
        return (last_bytes - first_bytes) / (last_s - first_s) if last_s > first_s else 0.0

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
    | TimePassed
    | ControllerResumed
)


def new_job(
    job_id: JobId,
    container_id: ContainerId,
    targets: tuple[Target, ...],
    *,
    now_s: float,
    automatic: bool = False,
    reason: str = "",
    requested_by: str = "",
    roots: Roots = (),
    plans: Mapping[PeerId, str] = MappingProxyType({}),
) -> Job:
    """A QUEUED job, with an order for each target, by its plan if it has one."""
    job = Job(
        job_id,
        container_id,
        tuple(Order(one.peer, one.peers, plan=plans.get(one.peer, "")) for one in targets),
        created_at_s=now_s,
        automatic=automatic,
        reason=reason,
        requested_by=requested_by,
        last_progress_at_s=now_s,
        counted_at_s=now_s,
        roots=roots,
    )
    return _update_state(job, now_s)


def step(job: Job, event: Event, now_s: float) -> Job:
    """The job after the event; the same object if nothing changed, and always if the
    job has ended.
    """
    if job.state.is_terminal:
        return job
    match event:
        case OrderIssued(peer):
            return _change(job, peer, now_s, _issue)
        case OrderAccepted(peer, round_):
            return _change(job, peer, now_s, lambda order, at_s: _accept(order, round_, at_s))
        case ProgressReceived():
            return _record_progress(job, event, now_s)
        case AgentRestarted(peer):
            return _change(job, peer, now_s, _requeue_after_restart)
        case OrderAbandoned(peer, reason):
            return _change(
                job,
                peer,
                now_s,
                lambda order, _: replace(order, state=OrderState.EXPIRED, detail=reason),
            )
        case CancelRequested(undelivered):
            return _cancel(job, now_s, undelivered)
        case TimePassed(live, command_deadline_s):
            return _check_deadlines(job, now_s, live, command_deadline_s)
        case ControllerResumed():
            return _restart_deadlines(job, now_s)
        case _:
            assert_never(event)


def name_unwritten(job: Job, reasons: Mapping[PeerId, str]) -> Job:
    """A job that has ended, after a look at the replicas without an order: PARTIAL, not
    DONE, if some of them differ from those that it repaired, for these reasons.
    """
    if not reasons or job.state not in (JobState.DONE, JobState.PARTIAL):
        return job
    named = [f"{peer} still differs: {reason}" for peer, reason in reasons.items()]
    detail = "; ".join(part for part in (job.detail, *named) if part)
    return replace(job, state=JobState.PARTIAL, detail=detail)


def task_id(job_id: JobId, round_: int) -> str:
    """The job ID that agents get for a round of a job.

    It is unique for each round, so that a late report of one round is never taken for
    the next.
    """
    return job_id if round_ == 1 else f"{job_id}.{round_}"


def task_of(text: str) -> tuple[JobId, int]:
    """The job and the round of a `task_id`."""
    job_id, _, round_ = text.rpartition(".")
    return (JobId(job_id), int(round_)) if job_id and round_ in _LATER_ROUNDS else (JobId(text), 1)


def roots_covered_by_verdict(job: Job) -> Roots:
    """The roots for which a final verdict of the job holds: those of the datanode with
    the verdict and of the peers that answered it.

    The roots are those before the latest round, because a replica repaired since may
    help the others. So may a replica on a datanode that was silent or is new.
    """
    most = frozenset[PeerId]()
    for order in job.orders:
        if order.progress.verdict in FINAL_VERDICTS:
            answered = {peer.peer for peer in order.progress.peers if peer.outcome == "ok"}
            most = max(most, frozenset({order.peer, *answered}), key=len)
    return tuple(root for root in job.roots if root[0] in most)


def _change(job: Job, peer: PeerId, now_s: float, change: Callable[[Order, float], Order]) -> Job:
    order = job.order(peer)
    if order is None or order.state.is_terminal:
        return job
    return _with_order(job, change(order, now_s), now_s)


def _issue(order: Order, now_s: float) -> Order:
    if order.state is not OrderState.QUEUED:
        return order
    return replace(
        order, state=OrderState.ISSUED, attempts=order.attempts + 1, advanced_at_s=now_s, detail=""
    )


def _accept(order: Order, round_: int, now_s: float) -> Order:
    # An agent without a response sends the confirmation of an earlier round again.
    is_new = order.state is OrderState.ISSUED and order.round == round_
    return replace(order, state=OrderState.RUNNING, advanced_at_s=now_s) if is_new else order


def _requeue_after_restart(order: Order, now_s: float) -> Order:
    if not order.state.is_in_flight:
        return order
    if order.attempts >= ATTEMPTS_MAX:
        return replace(
            order,
            state=OrderState.FAILED,
            detail=f"agent restarted {order.attempts} times during it",
        )
    return replace(order, state=OrderState.QUEUED, detail="agent restarted")


def _record_progress(job: Job, event: ProgressReceived, now_s: float) -> Job:
    order = job.order(event.peer)
    if (
        order is None
        or order.state.is_terminal
        or (order.state is OrderState.QUEUED and not order.attempts)
    ):
        return job
    # An agent without a response sends the result of an earlier round again.
    if event.round != order.round:
        return job
    progress = event.progress.after_rounds(order.rounds).at_least(order.progress)
    has_advanced = progress != order.progress or event.state is not order.state
    changed = replace(
        order,
        state=event.state,
        progress=progress,
        advanced_at_s=now_s if has_advanced else order.advanced_at_s,
        detail=_error_text(progress)
        if event.state.is_terminal and event.state is not OrderState.DONE
        else "",
        root=event.root,
    )
    if has_advanced:
        job = replace(job, last_progress_at_s=now_s)
    return _with_order(job, changed, now_s)


def _error_text(progress: RepairReport) -> str:
    return ": ".join(part for part in (progress.error_code, progress.message) if part)


def _cancel(job: Job, now_s: float, undelivered: AbstractSet[PeerId]) -> Job:
    if job.cancel_requested_at_s is not None:
        return job
    orders = tuple(
        replace(order, state=OrderState.CANCELLED)
        if order.state is OrderState.ISSUED and order.peer in undelivered
        else order
        for order in job.orders
    )
    return _update_state(replace(job, orders=orders, cancel_requested_at_s=now_s), now_s)


def _restart_deadlines(job: Job, now_s: float) -> Job:
    # Stored times cannot be compared with `now_s`: the system clock may have been set.
    orders = tuple(
        replace(order, advanced_at_s=now_s) if order.state.is_in_flight else order
        for order in job.orders
    )
    cancelled_at_s = now_s if job.cancel_requested_at_s is not None else None
    return replace(job, orders=orders, cancel_requested_at_s=cancelled_at_s, counted_at_s=now_s)


def _check_deadlines(
    job: Job, now_s: float, live: AbstractSet[PeerId], command_deadline_s: float
) -> Job:
    is_grace_over = (
        job.cancel_requested_at_s is not None
        and now_s - job.cancel_requested_at_s >= CANCEL_GRACE_S
    )
    orders = []
    for order in job.orders:
        if order.state.is_in_flight and is_grace_over:
            order = replace(
                order, state=OrderState.CANCELLED, detail="datanode did not confirm that it stopped"
            )
        elif order.state.is_in_flight and now_s - order.advanced_at_s >= command_deadline_s:
            order = replace(
                order,
                state=OrderState.EXPIRED,
                detail=f"no progress for {command_deadline_s:.0f} s",
            )
        orders.append(order)
    return _update_state(replace(job, orders=tuple(orders)), now_s, live)


def _with_order(job: Job, changed: Order, now_s: float) -> Job:
    orders = tuple(changed if order.peer == changed.peer else order for order in job.orders)
    return job if orders == job.orders else _update_state(replace(job, orders=orders), now_s)


def _update_state(job: Job, now_s: float, live: AbstractSet[PeerId] | None = None) -> Job:
    """Update the active time, and derive the state from the orders; with `live` None
    all datanodes count as live.
    """
    if job.cancel_requested_at_s is not None:
        # This includes orders requeued because their agent restarted.
        orders = (
            replace(o, state=OrderState.CANCELLED) if o.state is OrderState.QUEUED else o
            for o in job.orders
        )
        job = replace(job, orders=tuple(orders))
    elif all(order.state.is_terminal for order in job.orders):
        job = _start_next_round(job)
    if job.state is JobState.RUNNING:
        job = _add_sample(replace(job, active_s=job.active_s + max(0.0, now_s - job.counted_at_s)))
    state, detail = _derive_state(job, live)
    started_at_s = job.started_at_s
    if state is JobState.RUNNING and not job.started_at_s:
        started_at_s = now_s
        job = replace(job, samples=((job.active_s, job.bytes_done),))
    return replace(
        job,
        state=state,
        detail=detail,
        started_at_s=started_at_s,
        finished_at_s=now_s if state.is_terminal else 0.0,
        counted_at_s=max(now_s, job.counted_at_s),
    )


def _start_next_round(job: Job) -> Job:
    """The job with a further round for the datanodes that it may help; the same object
    if there are none.
    """
    if any(order.plan for order in job.orders):
        # A plan is carried out once: another round would do what nobody has seen.
        return job
    last = max(order.round for order in job.orders)
    ends = [
        RoundEnd(
            order.root,
            repaired=order.round == last
            and order.progress.chunks_repaired > order.rounds.chunks_repaired,
            is_settled=order.progress.verdict not in FINAL_VERDICTS | {Verdict.UNKNOWN},
        )
        for order in job.orders
        if order.state is OrderState.DONE and order.root
    ]
    again = peers_to_reorder(job.roots, ends)
    if not again or last == ROUNDS_MAX:
        return job
    orders = tuple(
        _next_round_order(order, last + 1) if order.peer in again else order for order in job.orders
    )
    roots = {root[0]: root for root in (*job.roots, *(end.root for end in ends))}
    return replace(job, orders=orders, roots=tuple(sorted(roots.values())))


def _next_round_order(order: Order, round_: int) -> Order:
    # Its verdict is outdated by the changes since.
    so_far = replace(order.progress, verdict=None, evidence=())
    detail = "further round: a peer has changed"
    return Order(
        order.peer, order.peers, progress=so_far, detail=detail, round=round_, rounds=so_far
    )


def _add_sample(job: Job) -> Job:
    samples = (*job.samples, (job.active_s, job.bytes_done))
    # Bounds the list: one sample is kept from before the window, and one for each
    # second.
    while len(samples) > 2 and samples[1][0] <= job.active_s - _RATE_WINDOW_S:
        samples = samples[1:]
    if len(samples) > 2 and samples[-1][0] - samples[-3][0] < 1.0:
        samples = (*samples[:-2], samples[-1])
    return replace(job, samples=samples)


def _derive_state(job: Job, live: AbstractSet[PeerId] | None) -> tuple[JobState, str]:
    orders = job.orders
    if all(order.state.is_terminal for order in orders):
        return _final_state(job)
    in_flight = [order.peer for order in orders if order.state.is_in_flight]
    if in_flight and (live is None or not live.isdisjoint(in_flight)):
        return JobState.RUNNING, "stopping" if job.cancel_requested_at_s is not None else ""
    if in_flight:
        return JobState.WAITING, f"no heartbeat from datanode {', '.join(in_flight)}"
    queued = [order.peer for order in orders if order.state is OrderState.QUEUED]
    detail = f"queued for datanode {', '.join(queued)}"
    if len(queued) == len(orders) and not any(
        order.attempts or order.round > 1 for order in orders
    ):
        return JobState.QUEUED, detail
    return JobState.WAITING, detail


def _final_state(job: Job) -> tuple[JobState, str]:
    undone = [order for order in job.orders if order.state is not OrderState.DONE]
    detail = "; ".join(f"{order.peer}: {order.detail or order.state.value}" for order in undone)
    if job.cancel_requested_at_s is not None and undone:
        return JobState.CANCELLED, detail
    if len(undone) == len(job.orders):
        return JobState.FAILED, detail
    verdict = job.verdict
    if verdict in FINAL_VERDICTS:
        assert verdict is not None
        return JobState.PARTIAL, "; ".join(
            part for part in (f"{verdict.value} damage remains", detail) if part
        )
    return (JobState.PARTIAL, detail) if undone else (JobState.DONE, "")
