"""Which orders go out now, and sending them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from merkle.replica import PeerId
from scm.job_index import JobIndex
from scm.jobs import Job, JobId, Order, OrderAbandoned, OrderIssued, OrderState, task_id
from scm.policy import free_slots
from scm.ports import CancelOrder, CommandSink, Leadership, ReconcileOrder
from scm.registry import Registry
from scm.rules import Rules

# Orders of a datanode looked at for one that can go out: one that waits for its peers
# does not hold up the rest.
_DISPATCH_SEARCH_MAX = 100


class Dispatcher:
    """Sends the orders of jobs. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        *,
        rules: Rules,
        registry: Registry,
        jobs: JobIndex,
        sink: CommandSink,
        leadership: Leadership,
        started_at_s: float,
    ) -> None:
        self._rules = rules
        self._registry = registry
        self._jobs = jobs
        self._sink = sink
        self._leadership = leadership
        self._started_at_s = started_at_s
        # Nobody knows which of the orders that were out at the start arrived.
        self._resend = [
            (job.job_id, order.peer)
            for job in jobs.active()
            for order in job.orders
            if order.state.is_in_flight
        ]

    def is_gone(self, peer: PeerId, now_s: float) -> bool:
        """Whether a datanode is dead, or was silent for as long since our start."""
        if self._registry.datanode(peer) is not None:
            return self._registry.is_dead(peer)
        return now_s - self._started_at_s >= self._rules.dead_after_s

    def dispatch(
        self, peer: PeerId, now_s: float
    ) -> Iterator[tuple[JobId, OrderIssued | OrderAbandoned]]:
        """Send a datanode the orders that it has slots for; yields what became of each.

        The caller takes each event into its job before it asks for the next.
        """
        if not self._registry.is_live(peer):
            return
        free = free_slots(self._jobs.running_at(peer), self._rules.orders_per_datanode)
        for job_id in list(islice(self._jobs.queued_at(peer), _DISPATCH_SEARCH_MAX)):
            if free == 0:
                return
            job = self._jobs.get(job_id)
            order = job.order(peer) if job else None
            assert job is not None
            assert order is not None
            if all(self.is_gone(other, now_s) for other in order.peers):
                yield job_id, OrderAbandoned(peer, "all its peers are dead")
            elif self._send(job, replace(order, attempts=order.attempts + 1), now_s):
                yield job_id, OrderIssued(peer)
                free -= 1

    def send_again(self, now_s: float) -> None:
        """Send what was out when this process started, as soon as it can be sent."""
        waiting, self._resend = self._resend, []
        for job_id, peer in waiting:
            job = self._jobs.get(job_id)
            order = job.order(peer) if job else None
            if job and order and order.state.is_in_flight and not self._send(job, order, now_s):
                self._resend.append((job_id, peer))

    def withdraw(self, job_id: JobId, before: Order, after: Order) -> None:
        """Take back an order that is at its datanode no longer."""
        self._sink.withdraw(before.peer, command_id(job_id, before))
        if after.state in (OrderState.EXPIRED, OrderState.CANCELLED):
            self.call_off(job_id, before)

    def call_off(self, job_id: JobId, order: Order) -> None:
        """Tell a datanode to stop working on an order."""
        term = self._leadership.term()
        self._sink.withdraw(order.peer, command_id(job_id, order))
        if term is not None:
            self._sink.send(CancelOrder(f"{job_id}/cancel", term, order.peer, job_id, order.round))

    def _send(self, job: Job, order: Order, now_s: float) -> bool:
        """Send once its peers can be named: after a start of ours they may not have
        reported yet.
        """
        term = self._leadership.term()
        peers = [
            self._registry.datanode(peer) for peer in order.peers if self._registry.is_live(peer)
        ]
        known = tuple(datanode for datanode in peers if datanode is not None)
        is_early = (
            len(known) < len(order.peers) and now_s - self._started_at_s < self._rules.stale_after_s
        )
        if term is None or not known or is_early or not self._registry.is_live(order.peer):
            return False
        return self._sink.send(
            ReconcileOrder(
                command_id(job.job_id, order),
                term,
                order.peer,
                job.job_id,
                job.container_id,
                known,
                returns_to=self._registry.returns_to(
                    job.container_id, required_nodes=self._rules.required_nodes
                ),
                # Only a scan finds what is in no tree, and a verdict that rests on one
                # must not be lost.
                skip_final_scan=job.automatic and order.round == 1,
                round=order.round,
            )
        )


def command_id(job_id: JobId, order: Order) -> str:
    """The ID of an order's command: the same after our restart, another after the
    agent's.
    """
    return f"{task_id(job_id, order.round)}/{order.attempts}"
