"""Jobs of containers that Ozone reconciles as a whole: the orders that follow from the
rounds, and the state that follows from the orders.

All functions are pure; scm.job_steps calls them.
"""

from collections.abc import Set as AbstractSet
from dataclasses import replace

from merkle.outcome import Verdict
from merkle.replica import PeerId
from scm.jobs import Job, JobState, OrderState
from scm.ozone_rounds import OZONE_ROUNDS_MAX, OzoneOutcome, OzoneRun


def apply_run(job: Job, run: OzoneRun, now_s: float, *, is_due: bool) -> Job:
    """The job after RunChanged, with all orders in one state; the same object if
    nothing changed.
    """
    state, detail = OrderState.RUNNING, ""
    # A root that changes after the end of a round begins no other.
    is_between = job.orders[0].state is OrderState.QUEUED and run.round == job.run_round
    if run.outcome is OzoneOutcome.REFUSED:
        state, detail = OrderState.REFUSED, run.detail
    elif run.outcome is OzoneOutcome.UNKNOWN:
        state, detail = OrderState.EXPIRED, run.detail
    elif run.outcome is not None:
        state = OrderState.DONE
    elif is_due and job.cancel_requested_at_s is not None:
        state, detail = OrderState.CANCELLED, f"no round after round {run.round} was requested"
    elif is_due or is_between:
        state = OrderState.QUEUED
    if (job.run, {state}) == (run, {order.state for order in job.orders}):
        return job
    # A sound comparison of all replicas alone is a match.
    is_match = run.outcome is OzoneOutcome.EQUAL and not run.detail
    known = {root[0]: root for root in run.seen}
    orders = tuple(
        replace(
            order,
            state=state,
            detail=detail,
            round=max(run.round, 1),
            attempts=run.round,
            root=known.get(order.peer),
            is_stopping=order.is_stopping and state is OrderState.RUNNING,
            progress=replace(order.progress, verdict=Verdict.MATCH) if is_match else order.progress,
        )
        for order in job.orders
    )
    has_advanced = job.run is None or run.seen != job.run.seen or run.round != job.run.round
    at_s = now_s if has_advanced else job.last_progress_at_s
    return replace(job, run=run, orders=orders, last_progress_at_s=at_s)


def abandon_cancelled_run(job: Job, live: AbstractSet[PeerId]) -> Job:
    """The job long after somebody cancelled it: it ends if nobody reports on it any
    more, and otherwise with its round.
    """
    if not live.isdisjoint(job.peers):
        return job
    detail = "its datanodes may still be at it: SCM does not report"
    orders = tuple(
        replace(order, state=OrderState.CANCELLED, detail=detail)
        if order.state.is_in_flight
        else order
        for order in job.orders
    )
    return replace(job, orders=orders)


def state_of_run(job: Job, run: OzoneRun, live: AbstractSet[PeerId] | None) -> tuple[JobState, str]:
    """The state and the detail of a job; `live` None counts all datanodes as live."""
    state = job.orders[0].state
    if state is OrderState.CANCELLED:
        return JobState.CANCELLED, job.orders[0].detail
    if job.is_not_converging:
        return JobState.PARTIAL, (
            f"Ozone does not make its replicas equal: {run.detail}; `treefold rescue"
            f" {job.container_id} --cluster ... --dry-run` shows what they still have together"
        )
    if state is OrderState.DONE:
        return JobState.DONE, run.detail
    if state.is_terminal:
        return JobState.FAILED, run.detail
    if job.pause and state is OrderState.QUEUED:
        return JobState.PAUSED, job.pause.text
    if live is not None and live.isdisjoint(job.peers):
        return JobState.WAITING, "SCM does not report a datanode of it as live"
    if state is OrderState.QUEUED:
        if run.round == 0:
            return JobState.QUEUED, "waits for a place at its datanodes"
        return JobState.WAITING, f"the roots differ after round {run.round}; the next one waits"
    if job.cancel_requested_at_s is not None:
        return JobState.RUNNING, f"stopping: Ozone ends round {run.round} first"
    if job.pause:
        return JobState.RUNNING, f"pausing {job.pause.text}"
    return JobState.RUNNING, f"round {run.round} of at most {OZONE_ROUNDS_MAX}"
