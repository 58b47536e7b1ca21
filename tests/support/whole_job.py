"""A job without a controller around it: its rounds are carried out by whoever holds the
replicas.
"""

from collections.abc import Callable, Mapping, Sequence

from merkle.outcome import OutcomeState, RepairOutcome, RepairReport
from merkle.replica import PeerId
from merkle.tree import ContainerId
from scm.job_steps import new_job, step
from scm.jobs import Job, JobId, OrderIssued, OrderState, ProgressReceived
from scm.policy import Roots, Target


def whole_job(
    container_id: int,
    peers: Sequence[PeerId],
    roots: Callable[[], Roots],
    carry_out: Callable[[Sequence[PeerId]], Mapping[PeerId, RepairOutcome]],
) -> Job:
    """The job at its end; `carry_out` has these datanodes reconcile, `roots` says how
    all replicas are now.
    """
    targets = tuple(
        Target(peer, tuple(other for other in peers if other != peer)) for peer in peers
    )
    job = new_job(JobId("job-1"), ContainerId(container_id), targets, now_s=0.0, roots=roots())
    while not job.state.is_terminal:
        orders = [order for order in job.orders if order.state is OrderState.QUEUED]
        for order in orders:
            job = step(job, OrderIssued(order.peer), 0.0)
        outcomes = carry_out([order.peer for order in orders])
        assert {outcome.state for outcome in outcomes.values()} == {OutcomeState.DONE}
        left = {root[0]: root for root in roots()}
        for order in orders:
            progress = RepairReport(verdict=outcomes[order.peer].verdict)
            told = ProgressReceived(
                order.peer, OrderState.DONE, progress, order.round, left[order.peer]
            )
            job = step(job, told, 0.0)
    return job
