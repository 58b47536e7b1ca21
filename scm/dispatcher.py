"""Choose the orders that can be sent now, and send them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from merkle.replica import PeerId
from scm.job_index import JobIndex
from scm.jobs import Job, JobId, Order, OrderAbandoned, OrderIssued, OrderState, task_id
from scm.policy import free_slots
from scm.ports import CancelOrder, CommandSink, Leadership, ReconcileOrder, ThrottleOrder
from scm.registry import Registry
from scm.rules import Rules

# Queued orders of a datanode examined in one call. More than one, because an order that
# waits for its peers must not block the others.
_DISPATCH_SEARCH_MAX = 100


class Dispatcher:
    """Sends the orders of jobs. Not thread-safe: the caller holds a lock."""

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
        self._commands = 0
        # The latest command with a limit for each order in flight: a later one takes
        # its place, so that they do not gather for an agent that is away.
        self._throttles: dict[tuple[JobId, PeerId], str] = {}
        sent_before = [
            (job.job_id, order)
            for job in jobs.active()
            for order in job.orders
            if order.state.is_in_flight
        ]
        # Orders sent before the start may or may not have arrived.
        self._resend = [(job_id, order.peer) for job_id, order in sent_before]
        self._sent_before = {(order.peer, command_id(job, order)) for job, order in sent_before}

    def change_rules(self, rules: Rules) -> None:
        """Go on by these rules."""
        self._rules = rules

    def resume(self, pause_s: float) -> None:
        """Leave out a time in which this process did not run."""
        self._started_at_s += pause_s

    def is_gone(self, peer: PeerId, now_s: float) -> bool:
        """Whether a datanode is dead, or has been silent for that long since our
        start.
        """
        if self._registry.datanode(peer) is not None:
            return self._registry.is_dead(peer)
        return now_s - self._started_at_s >= self._rules.dead_after_s

    def dispatch(
        self, peer: PeerId, now_s: float
    ) -> Iterator[tuple[JobId, OrderIssued | OrderAbandoned]]:
        """Send a datanode as many orders as it has slots for; yields an event for each.

        The caller applies each event to its job before it requests the next.
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
            if not job.may_send:
                continue
            if all(self.is_gone(other, now_s) for other in order.peers):
                yield job_id, OrderAbandoned(peer, "all its peers are dead")
            elif self._send(job, replace(order, attempts=order.attempts + 1), now_s):
                yield job_id, OrderIssued(peer)
                free -= 1

    def resend(self, now_s: float) -> None:
        """Send the orders again that were in flight when this process started; those of
        a cancelled or paused job are cancelled again.
        """
        waiting, self._resend = self._resend, []
        for job_id, peer in waiting:
            job = self._jobs.get(job_id)
            order = job.order(peer) if job else None
            if job is None or order is None or not order.state.is_in_flight:
                continue
            if job.cancel_requested_at_s is not None or order.is_stopping:
                self.send_cancel(job, order)
            elif self._send(job, order, now_s):
                # An agent that has the order ignores it, and the limit within.
                self.send_throttle(job, order)
            else:
                self._resend.append((job_id, peer))

    def withdraw(self, job: Job, before: Order, after: Order) -> None:
        """Withdraw an order that is no longer at its datanode."""
        may_run = not self._is_undelivered(job.job_id, before)
        self._withdraw_throttle(job.job_id, before.peer)
        self._sink.withdraw(before.peer, command_id(job.job_id, before))
        if may_run and after.state in (OrderState.EXPIRED, OrderState.CANCELLED):
            self.send_cancel(job, before)

    def undelivered(self, job: Job) -> frozenset[PeerId]:
        """The datanodes that cannot have their latest order of this job."""
        return frozenset(
            order.peer for order in job.orders if self._is_undelivered(job.job_id, order)
        )

    def send_cancel(self, job: Job, order: Order) -> None:
        """Withdraw an order, and send its datanode a command to stop, with an ID of its
        own: that an earlier one was confirmed must not confirm this one.
        """
        term = self._leadership.term()
        self._sink.withdraw(order.peer, command_id(job.job_id, order))
        if term is not None:
            self._sink.send(
                CancelOrder(
                    self._new_command_id("cancel", term),
                    term,
                    order.peer,
                    job.job_id,
                    job.container_id,
                    order.round,
                    order.resumes,
                )
            )

    def send_throttle(self, job: Job, order: Order) -> None:
        """Send a datanode that has an order of this job the job's limit, if one was
        ever set.
        """
        term = self._leadership.term()
        if term is None or not job.bytes_per_second.set_at_s:
            return
        self._withdraw_throttle(job.job_id, order.peer)
        number = self._new_command_id("throttle", term)
        self._throttles[job.job_id, order.peer] = number
        self._sink.send(
            ThrottleOrder(
                number,
                term,
                order.peer,
                job.job_id,
                order.round,
                order.resumes,
                job.bytes_per_second_of_each,
            )
        )

    def _withdraw_throttle(self, job_id: JobId, peer: PeerId) -> None:
        number = self._throttles.pop((job_id, peer), None)
        if number is not None:
            self._sink.withdraw(peer, number)

    def _new_command_id(self, what: str, term: int) -> str:
        self._commands += 1
        # The term makes IDs unique across restarts.
        return f"{what}-{term}-{self._commands}"

    def _is_undelivered(self, job_id: JobId, order: Order) -> bool:
        command = (order.peer, command_id(job_id, order))
        return command not in self._sent_before and self._sink.is_undelivered(*command)

    def _send(self, job: Job, order: Order, now_s: float) -> bool:
        """Send an order; returns False if it must wait.

        After our start it waits for its peers to report their addresses.
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
                # Later rounds need the scan: their verdict replaces one that may rest
                # on damage that only a scan finds.
                skip_final_scan=job.automatic and order.round == 1,
                round=order.round,
                resumes=order.resumes,
                bytes_per_second=job.bytes_per_second_of_each,
                requested_by=job.requested_by,
                reason=job.reason,
                plan=order.plan,
            )
        )


def command_id(job_id: JobId, order: Order) -> str:
    """The ID of an order's command. It stays the same when the controller restarts, and
    changes when the agent does.
    """
    return f"{task_id(job_id, order.round, order.resumes)}/{order.attempts}"
