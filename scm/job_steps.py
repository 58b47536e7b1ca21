"""The state machine of a job: `step(job, event, now_s)` returns the next job.

It is pure. A job's state is derived only from its orders and its pause, so it cannot be
RUNNING after all orders have ended. Terminal states are final: late or repeated events
change nothing.

A pause stops the run of each order at its next safe point; what was written stays. The
order waits, and starts a further run when the job is resumed. Nothing expires in
between.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import MappingProxyType
from typing import assert_never

from merkle.outcome import FINAL_VERDICTS, RepairReport, Verdict
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.jobs import (
    ROUNDS_MAX,
    AgentRestarted,
    CancelRequested,
    ControllerResumed,
    Event,
    Job,
    JobId,
    JobLimit,
    JobState,
    Order,
    OrderAbandoned,
    OrderAccepted,
    OrderIssued,
    OrderState,
    Pause,
    PauseRequested,
    ProgressReceived,
    ResumeRequested,
    RunChanged,
    TakenOver,
    ThrottleRequested,
    TimePassed,
)
from scm.ozone_rounds import OzoneRun
from scm.policy import Roots, RoundEnd, Target, peers_to_reorder
from scm.run_steps import abandon_cancelled_run, apply_run, state_of_run

# An agent that restarted this often during one order will probably do so again.
RESTARTS_MAX = 3
# How long a cancelled job waits for the agents that may have its orders to confirm.
CANCEL_GRACE_S = 60.0
# Agents report every few seconds, and count each byte that they read or fetch. One that
# reports no more of them for this long is at a standstill.
STALLED_AFTER_S = 300.0
# The rate is measured over the last minute of active time, so that waiting affects
# neither rate nor ETA.
_RATE_WINDOW_S = 60.0


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
    run: OzoneRun | None = None,
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
        run=run,
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
            return job if job.pause else _change(job, peer, now_s, _issue)
        case OrderAccepted():
            return _change(job, event.peer, now_s, lambda order, at_s: _accept(order, event, at_s))
        case ProgressReceived():
            return _record_progress(job, event, now_s)
        case AgentRestarted(peer):
            return _change(job, peer, now_s, _requeue_after_restart)
        case OrderAbandoned(peer, reason):
            # Nobody is to be missed while the job is paused.
            if job.pause:
                return job
            return _change(
                job,
                peer,
                now_s,
                lambda order, _: replace(order, state=OrderState.EXPIRED, detail=reason),
            )
        case CancelRequested(undelivered):
            return _cancel(job, now_s, undelivered)
        case PauseRequested():
            return _pause(job, event, now_s)
        case ResumeRequested():
            return _resume(job, now_s)
        case TakenOver(by, reason):
            taken = replace(job, automatic=False, requested_by=by, reason=reason)
            return taken if job.automatic else job
        case ThrottleRequested():
            return _throttle(job, event, now_s)
        case RunChanged(run, is_due):
            changed = apply_run(job, run, now_s, is_due=is_due)
            return job if changed is job else _update_state(changed, now_s)
        case TimePassed(live, _) if job.run is not None:
            is_grace_over = _is_grace_over(job, now_s)
            changed = abandon_cancelled_run(job, live) if is_grace_over else job
            return _update_state(changed, now_s, live)
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
    is_done = job.state in (JobState.DONE, JobState.PARTIAL)
    if not reasons or not is_done or job.run is not None:
        return job
    named = [f"{peer} still differs: {reason}" for peer, reason in reasons.items()]
    detail = "; ".join(part for part in (job.detail, *named) if part)
    return replace(job, state=JobState.PARTIAL, detail=detail)


def roots_covered_by_verdict(job: Job) -> Roots:
    """The roots for which a final verdict of the job holds: those of the datanode with
    the verdict and of the peers that answered it.

    The roots are those before the latest round, because a replica repaired since may
    help the others. So may a replica on a datanode that was silent or is new. If Ozone
    cannot make replicas equal, the roots are those that it left.
    """
    if job.run is not None and job.is_not_converging:
        return job.run.seen
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


def _accept(order: Order, event: OrderAccepted, now_s: float) -> Order:
    # An agent without a response sends the confirmation of an earlier run again.
    is_this_run = (event.round, event.resumes) == (order.round, order.resumes)
    if order.state is not OrderState.ISSUED or not is_this_run:
        return order
    return replace(order, state=OrderState.RUNNING, advanced_at_s=now_s)


def _requeue_after_restart(order: Order, now_s: float) -> Order:
    if not order.state.is_in_flight:
        return order
    restarts = order.restarts + 1
    if restarts >= RESTARTS_MAX:
        return replace(
            order,
            state=OrderState.FAILED,
            restarts=restarts,
            is_stopping=False,
            detail=f"agent restarted {restarts} times during it",
        )
    return replace(_queue_again(order), restarts=restarts, detail="agent restarted")


def _queue_again(order: Order) -> Order:
    """The order in the queue again; with a new task ID, if a command to stop the old
    one may still be on its way.
    """
    return replace(
        order,
        state=OrderState.QUEUED,
        resumes=order.resumes + order.is_stopping,
        is_stopping=False,
        detail="",
    )


def _record_progress(job: Job, event: ProgressReceived, now_s: float) -> Job:
    order = job.order(event.peer)
    if (
        order is None
        or order.state.is_terminal
        or (order.state is OrderState.QUEUED and not order.attempts)
    ):
        return job
    # An agent without a response sends the result of an earlier run again.
    if (event.round, event.resumes) != (order.round, order.resumes):
        return job
    this_round = event.progress.after_rounds(order.paused_runs)
    progress = this_round.after_rounds(order.rounds).at_least(order.progress)
    has_advanced = progress != order.progress or event.state is not order.state
    if order.is_stopping and event.state is OrderState.INTERRUPTED:
        changed = _queue_stopped(order, this_round, progress)
    else:
        is_failure = event.state.is_terminal and event.state is not OrderState.DONE
        changed = replace(
            order,
            state=event.state,
            progress=progress,
            advanced_at_s=now_s if has_advanced else order.advanced_at_s,
            detail=_error_text(progress) if is_failure else "",
            is_stopping=order.is_stopping and not event.state.is_terminal,
            root=event.root,
        )
    if has_advanced:
        job = replace(job, last_progress_at_s=now_s)
    return _with_order(job, changed, now_s)


def _queue_stopped(order: Order, this_round: RepairReport, progress: RepairReport) -> Order:
    """The order after the run that a pause ended: its figures stay, what it said of the
    replicas does not. The next run plans the bytes anew that are left.
    """
    so_far = replace(
        this_round,
        verdict=None,
        evidence=(),
        error_code="",
        message="",
        bytes_planned=this_round.bytes_fetched,
        # The next run finds these by the tree, which an interrupted run did not store,
        # and counts them again.
        blocks_planned=0,
        blocks_done=0,
        chunks_repaired=0,
        tombstones_adopted=0,
    )
    shown = replace(progress, verdict=None, evidence=(), error_code="", message="")
    return replace(_queue_again(order), paused_runs=so_far, progress=shown)


def _error_text(progress: RepairReport) -> str:
    return ": ".join(part for part in (progress.error_code, progress.message) if part)


def _cancel(job: Job, now_s: float, undelivered: AbstractSet[PeerId]) -> Job:
    if job.cancel_requested_at_s is not None:
        return job
    orders = tuple(
        replace(order, state=OrderState.CANCELLED)
        if order.state is OrderState.ISSUED and order.peer in undelivered
        else replace(order, is_stopping=False)
        for order in job.orders
    )
    changed = replace(job, orders=orders, cancel_requested_at_s=now_s, pause=None)
    return _update_state(changed, now_s)


def _pause(job: Job, event: PauseRequested, now_s: float) -> Job:
    if job.pause is not None or job.cancel_requested_at_s is not None:
        return job
    orders = tuple(
        replace(order, state=OrderState.QUEUED)
        if order.state is OrderState.ISSUED and order.peer in event.undelivered
        else replace(order, is_stopping=order.state.is_in_flight)
        for order in job.orders
    )
    pause = Pause(event.by, event.reason, now_s)
    return _update_state(replace(job, orders=orders, pause=pause), now_s)


def _resume(job: Job, now_s: float) -> Job:
    if job.pause is None:
        return job
    return _update_state(_restart_deadlines(replace(job, pause=None), now_s), now_s)


def _throttle(job: Job, event: ThrottleRequested, now_s: float) -> Job:
    rate, most = event.bytes_per_second, event.containers_max
    if rate is not None:
        job = replace(job, bytes_per_second=JobLimit(rate, event.by, now_s))
    if most is not None:
        job = replace(job, containers_max=JobLimit(most, event.by, now_s))
    return job


def _restart_deadlines(job: Job, now_s: float) -> Job:
    # Stored times cannot be compared with `now_s`: the system clock may have been set.
    orders = tuple(
        replace(order, advanced_at_s=now_s) if order.state.is_in_flight else order
        for order in job.orders
    )
    cancelled_at_s = now_s if job.cancel_requested_at_s is not None else None
    # Ozone gets as long as after a request: what is under way is not ordered again.
    run = replace(job.run, quiet_since_s=now_s) if job.run else None
    job = replace(job, orders=orders, cancel_requested_at_s=cancelled_at_s, run=run)
    return replace(job, counted_at_s=now_s)


def _check_deadlines(
    job: Job, now_s: float, live: AbstractSet[PeerId], command_deadline_s: float
) -> Job:
    if job.pause is not None:
        return _update_state(job, now_s, live)
    is_grace_over = _is_grace_over(job, now_s)
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
    job = _update_state(replace(job, orders=tuple(orders)), now_s, live)
    idle_s = min(
        (now_s - order.advanced_at_s for order in job.orders if order.state.is_in_flight),
        default=0.0,
    )
    if (
        job.state is not JobState.RUNNING
        or job.cancel_requested_at_s is not None
        or idle_s < STALLED_AFTER_S
    ):
        return job
    silent = ", ".join(order.peer for order in job.orders if order.state.is_in_flight)
    detail = f"no progress for {STALLED_AFTER_S:.0f} s at datanode {silent}"
    return replace(job, state=JobState.STALLED, detail=detail)


def _is_grace_over(job: Job, now_s: float) -> bool:
    return (
        job.cancel_requested_at_s is not None
        and now_s - job.cancel_requested_at_s >= CANCEL_GRACE_S
    )


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
    elif job.run is None and all(order.state.is_terminal for order in job.orders):
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
    if job.by_plan:
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
    if job.run is not None:
        return state_of_run(job, job.run, live)
    if all(order.state.is_terminal for order in orders):
        return _final_state(job)
    in_flight = [order.peer for order in orders if order.state.is_in_flight]
    if in_flight and (live is None or not live.isdisjoint(in_flight)):
        is_cancelled = job.cancel_requested_at_s is not None
        pausing = f"pausing {job.pause.text}" if job.pause else ""
        return JobState.RUNNING, "stopping" if is_cancelled else pausing
    if job.pause and not in_flight:
        return JobState.PAUSED, job.pause.text
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
