"""The controller as a whole, without sockets and clocks: reports and requests in,
orders and views out.

Registry, rules and jobs are brought together here. Times are passed in and orders leave
through a port, so that the same code runs behind gRPC and in a simulation. An order is
sent when its datanode has a free slot. It is sent again after either side was
restarted; agents know the IDs of their jobs and of commands, which makes that harmless.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from merkle.replica import ContainerReplica, PeerId
from merkle.tree import ContainerId
from protos.errors import JobNotFoundError
from runtime.errors import BusyError, DatabaseError
from runtime.log import get_logger
from scm.eligibility import (
    Availability,
    ContainerState,
    Eligibility,
    Ruling,
    evaluate,
    evaluate_availability,
)
from scm.events import CONTROLLER_EVENTS
from scm.jobs import (
    AgentRestarted,
    CancelRequested,
    DatanodeProgress,
    Event,
    Job,
    JobId,
    JobState,
    Order,
    OrderAbandoned,
    OrderAccepted,
    OrderIssued,
    OrderState,
    ProgressReceived,
    TimePassed,
    new_job,
    roots_covered_by_verdict,
    step,
    task_id,
    task_of,
)
from scm.policy import (
    ComparisonResult,
    Root,
    RootComparison,
    Visit,
    after_job,
    free_slots,
    is_due,
    roots,
    targets,
)
from scm.ports import CancelOrder, CommandSink, JobStore, Leadership, ReconcileOrder, ScanOrder
from scm.registry import Datanode, DatanodeStatus, HeartbeatEffect, Registry, ReplicaReport

# Jobs that have not ended; more requests are refused until some have.
_JOBS_ACTIVE_MAX = 200_000
# Ended jobs that can still be asked for by their ID; the store drops older ones too.
_JOBS_ENDED_MAX = 10_000
# Progress alone is put down this often at most; every change of state at once.
_SAVE_PROGRESS_EVERY_S = 10.0
# Containers looked at in one tick while automatic mode searches for its next ones.
_AUTOMATIC_SEARCH_MAX = 1_000
# Orders of a datanode looked at for one that can go out: one that waits for its peers
# does not hold up the rest.
_DISPATCH_SEARCH_MAX = 100

log = get_logger("scm", CONTROLLER_EVENTS)


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings that decisions depend on."""

    required_nodes: int = 3
    stale_after_s: float = 90.0
    dead_after_s: float = 600.0
    orders_per_datanode: int = 2
    command_deadline_s: float = 3600.0
    # Automatic mode: how many of its jobs at once, and how often a matching container
    # is visited.
    automatic: bool = False
    automatic_jobs: int = 4
    visit_every_s: float = 60.0


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """What a datanode tells of one order."""

    job_id: JobId
    state: OrderState
    progress: DatanodeProgress
    round: int = 1


@dataclass(frozen=True, slots=True)
class Heartbeat:
    datanode: Datanode
    incarnation: str
    sequence: int
    report: ReplicaReport | None = None
    progress: tuple[ProgressReport, ...] = ()
    acknowledged: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerView:
    """A container as it is known now."""

    container_id: ContainerId
    state: ContainerState | None
    compared: ComparisonResult
    replicas: tuple[ContainerReplica, ...]
    ruling: Ruling
    visit: Visit | None


@dataclass(frozen=True, slots=True)
class ReconcileResponse:
    """What came of a request for one container; the job of another request where one is
    under way.
    """

    container_id: ContainerId
    ruling: Ruling
    job_id: JobId | None = None


class Controller:
    """Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        *,
        rules: Rules,
        store: JobStore,
        sink: CommandSink,
        leadership: Leadership,
        new_job_id: Callable[[], JobId],
        now_s: float,
        on_finished: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """Begin where the store's jobs stand: their orders that were out are sent
        again.
        """
        self._rules = rules
        self._store = store
        self._sink = sink
        self._leadership = leadership
        self._new_job_id = new_job_id
        self._on_finished = on_finished
        self._registry = Registry(
            stale_after_s=rules.stale_after_s, dead_after_s=rules.dead_after_s
        )
        self._started_at_s = now_s
        self._jobs: dict[JobId, Job] = {}
        # Jobs that have not ended, by container; in the order they were made.
        self._active: dict[ContainerId, JobId] = {}
        self._ended: dict[JobId, None] = {}
        self._in_flight: dict[JobId, None] = {}
        self._queued: dict[PeerId, dict[JobId, None]] = {}
        self._running: Counter[PeerId] = Counter()
        self._visits = {visit.container_id: visit for visit in store.visits()}
        self._unsaved: dict[JobId, None] = {}
        self._unsaved_visits: dict[ContainerId, None] = {}
        self._saved_at_s = now_s
        self._save_now = False
        self._visited_at_s = now_s
        self._visit_cursor = ContainerId(0)
        self._scans = 0
        for job in store.jobs():
            self._keep(job)
        # Nobody knows which of the orders that were out arrived.
        self._resend = [
            (job_id, order.peer)
            for job_id in self._in_flight
            for order in self._jobs[job_id].orders
            if order.state.is_in_flight
        ]

    # ---- reports

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> HeartbeatEffect:
        """Take in reports and progress, and send this datanode what it has slots
        for.
        """
        peer = heartbeat.datanode.peer
        observed = self._registry.observe(
            heartbeat.datanode,
            incarnation=heartbeat.incarnation,
            sequence=heartbeat.sequence,
            report=heartbeat.report,
            now_s=now_s,
        )
        if not observed.applied:
            return observed
        if observed.registered:
            log.info("datanode_registered", datanode=peer, address=heartbeat.datanode.address)
        if observed.restarted:
            for job_id in self._jobs_with_order_at(peer):
                self._step(job_id, AgentRestarted(peer), now_s)
        for command_id in heartbeat.acknowledged:
            self._sink.withdraw(peer, command_id)
            job_id, round_ = task_of(command_id.partition("/")[0])
            self._step(job_id, OrderAccepted(peer, round_), now_s)
        # Who owes us a full report tells of it once more, and then with what has become
        # of the replica.
        for told in heartbeat.progress if not observed.full_report_wanted else ():
            root = self._root(told.job_id, peer)
            self._step(
                told.job_id,
                ProgressReceived(peer, told.state, told.progress, told.round, root),
                now_s,
            )
        self._dispatch_stored([peer], now_s)
        return observed

    def tick(self, now_s: float) -> None:
        """Let time go by: datanodes grow stale, orders expire, automatic mode goes on.
        Call it about once a second.
        """
        for peer, liveness in self._registry.age(now_s):
            log.warning("datanode_stale", datanode=peer, liveness=liveness.value)
        ordered = {*self._queued, *(peer for peer, running in self._running.items() if running)}
        for peer in sorted(peer for peer in ordered if self._is_gone(peer, now_s)):
            for job_id in [*self._jobs_with_order_at(peer), *self._queued.get(peer, ())]:
                self._step(job_id, OrderAbandoned(peer, "datanode is dead"), now_s)
        self._send_again(now_s)
        ticked = TimePassed(self._registry.live(), self._rules.command_deadline_s)
        for job_id in list(self._in_flight):
            self._step(job_id, ticked, now_s)
        if self._rules.automatic and self._leadership.term() is not None:
            self._automatic(now_s)
        self._dispatch_stored(list(self._queued), now_s)

    # ---- requests

    def reconcile(
        self,
        container_ids: Iterable[ContainerId],
        *,
        dry_run: bool,
        reason: str,
        requested_by: str,
        now_s: float,
    ) -> list[ReconcileResponse]:
        """Start a job for each container that may be reconciled; with `dry_run` only
        say which.

        Raises:
            DatabaseError: the jobs cannot be put down; none is started.
        """
        outcomes, jobs = list[ReconcileResponse](), list[Job]()
        for container_id in dict.fromkeys(container_ids):
            ruling = self._rule(container_id)
            if ruling.eligibility is Eligibility.ALREADY_RUNNING:
                outcomes.append(ReconcileResponse(container_id, ruling, self._active[container_id]))
            elif not ruling.is_ok or dry_run:
                outcomes.append(ReconcileResponse(container_id, ruling))
            elif len(self._active) + len(jobs) >= _JOBS_ACTIVE_MAX:
                message = (
                    f"Cannot reconcile container {container_id}: {_JOBS_ACTIVE_MAX} jobs are"
                    " waiting."
                )
                outcomes.append(
                    ReconcileResponse(container_id, Ruling(Eligibility.QUEUE_FULL, message))
                )
            else:
                jobs.append(
                    self._new_job(
                        container_id, reason=reason, requested_by=requested_by, now_s=now_s
                    )
                )
                outcomes.append(ReconcileResponse(container_id, ruling, jobs[-1].job_id))
        if jobs:
            self._begin(jobs, now_s)
            for peer in list(self._queued):
                self._dispatch(peer, now_s)
            self._save_what_is_done(now_s)
        return outcomes

    def cancel(self, job_id: JobId, now_s: float) -> Job:
        """Ask the job to end; agents stop after the window they are writing.

        Raises:
            DatabaseError: the wish cannot be put down; the job goes on.
            JobNotFoundError: there is no such job.
        """
        job = self.job(job_id)
        if not job.state.is_terminal and job.cancel_requested_at_s is None:
            self._save([step(job, CancelRequested(), now_s)], now_s)
            self._step(job_id, CancelRequested(), now_s)
            for order in job.orders:
                if order.state.is_in_flight:
                    self._call_off(job_id, order)
            self._save_what_is_done(now_s)
        return self.job(job_id)

    def scan(self, container_ids: Iterable[ContainerId]) -> tuple[list[ContainerId], int]:
        """Order a scan of every live replica; returns the containers that are unknown
        and how many orders went out.

        Raises:
            BusyError: this controller does not lead.
        """
        term = self._leadership.term()
        if term is None:
            raise BusyError("this controller does not lead")
        unknown, orders = [], 0
        for container_id in dict.fromkeys(container_ids):
            replicas = self._registry.replicas(container_id)
            if not replicas:
                unknown.append(container_id)
            for replica in replicas:
                if self._registry.is_live(replica.peer):
                    self._scans += 1
                    # The term keeps IDs apart over restarts.
                    order = ScanOrder(
                        f"scan-{term}-{self._scans}", term, replica.peer, container_id
                    )
                    orders += self._sink.send(order)
        return unknown, orders

    # ---- views

    def job(self, job_id: JobId) -> Job:
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFoundError(f"There is no job {job_id}.")
        return job

    def jobs(self, state: JobState | None, limit: int) -> list[Job]:
        """Newest first."""
        newest = reversed(self._jobs.values())
        return list(islice((job for job in newest if state in (None, job.state)), limit))

    def container(self, container_id: ContainerId) -> ContainerView | None:
        """What is known of it; None where nothing is."""
        if not self._registry.knows(container_id):
            return None
        return ContainerView(
            container_id,
            self._registry.state(container_id),
            self._registry.compared(container_id),
            tuple(self._registry.replicas(container_id)),
            self._rule(container_id),
            self._visits.get(container_id),
        )

    def containers(
        self,
        *,
        state: ContainerState | None,
        comparison: RootComparison | None,
        after: int,
        limit: int,
    ) -> tuple[list[ContainerView], bool]:
        """Up to `limit` beyond `after`, ascending; and whether there are more."""
        known = (
            container_id
            for container_id in self._registry.container_ids(after)
            if (
                comparison is None or self._registry.compared(container_id).comparison is comparison
            )
            and (state is None or self._registry.state(container_id) is state)
        )
        found = [self.container(container_id) for container_id in islice(known, limit + 1)]
        views = [view for view in found if view is not None]
        return views[:limit], len(views) > limit

    def diverged(self) -> list[ContainerId]:
        return sorted(self._registry.diverged())

    def datanodes(self, now_s: float) -> list[DatanodeStatus]:
        return self._registry.datanodes(now_s)

    def datanode(self, peer: PeerId) -> Datanode | None:
        return self._registry.datanode(peer)

    def is_live(self, peer: PeerId) -> bool:
        return self._registry.is_live(peer)

    def heartbeat_age_s(self, peer: PeerId, now_s: float) -> float:
        return self._registry.heartbeat_age_s(peer, now_s)

    def figures(self) -> dict[str, float]:
        """The gauges of this moment, by the names of scm/metrics.py."""
        counts = self._registry.counts()
        return {
            "scm_datanodes_live": len(self._registry.live()),
            "scm_containers": len(self._registry),
            "scm_containers_diverged": counts[RootComparison.DIVERGED],
            "scm_containers_unknown": counts[RootComparison.UNKNOWN],
            "scm_jobs_running": len(self._in_flight),
        }

    @property
    def datanodes_known(self) -> int:
        return self._registry.datanodes_known

    @property
    def required_nodes(self) -> int:
        return self._rules.required_nodes

    @property
    def term(self) -> int | None:
        return self._leadership.term()

    # ---- rules

    def _rule(self, container_id: ContainerId) -> Ruling:
        replicas = self._registry.replicas(container_id)
        state = self._registry.state(container_id)
        ruling = evaluate(container_id, state, replicas, required_nodes=self._rules.required_nodes)
        if not ruling.is_ok:
            return ruling
        live = [replica for replica in replicas if self._registry.is_live(replica.peer)]
        surroundings = Availability(
            is_leader=self._leadership.term() is not None,
            live_replicas=len(live),
            live_writable_replicas=sum(not replica.read_only for replica in live),
        )
        ruling = evaluate_availability(container_id, surroundings)
        active = self._active.get(container_id)
        if active is None or not ruling.is_ok:
            return ruling
        message = f"Container {container_id} is being reconciled already, by job {active}."
        return Ruling(Eligibility.ALREADY_RUNNING, message)

    def _automatic(self, now_s: float) -> None:
        """Work the diverged containers down; and one by one, slowly, have matching ones
        learn of deletes.
        """
        running = sum(self._jobs[job_id].automatic for job_id in self._active.values())
        slots = self._rules.automatic_jobs - running
        chosen = list[Job]()
        for container_id in list(islice(self._registry.diverged(), _AUTOMATIC_SEARCH_MAX)):
            if slots <= 0:
                break
            # Whether it gets a job or has to rest: the next search begins with others.
            self._registry.postpone(container_id)
            if self._may_visit(container_id, now_s):
                chosen.append(self._new_automatic_job(container_id, "diverged", now_s))
                slots -= 1
        if slots > 0 and now_s - self._visited_at_s >= self._rules.visit_every_s:
            self._visited_at_s = now_s
            found = self._next_matching(now_s)
            if found is not None:
                chosen.append(self._new_automatic_job(found, "visit", now_s))
        if chosen:
            self._begin(chosen, now_s)

    def _may_visit(self, container_id: ContainerId, now_s: float) -> bool:
        now_roots = roots(self._registry.replicas(container_id))
        return (
            is_due(self._visits.get(container_id), now_roots, now_s)
            and self._rule(container_id).is_ok
        )

    def _next_matching(self, now_s: float) -> ContainerId | None:
        searched = list(
            islice(self._registry.container_ids(self._visit_cursor), _AUTOMATIC_SEARCH_MAX)
        )
        for container_id in searched:
            self._visit_cursor = container_id
            if self._registry.compared(
                container_id
            ).comparison is RootComparison.MATCH and self._may_visit(container_id, now_s):
                return container_id
        if len(searched) < _AUTOMATIC_SEARCH_MAX:
            self._visit_cursor = ContainerId(0)
        return None

    # ---- jobs

    def _new_automatic_job(self, container_id: ContainerId, reason: str, now_s: float) -> Job:
        return self._new_job(
            container_id, reason=reason, requested_by="automatic", now_s=now_s, automatic=True
        )

    def _new_job(
        self,
        container_id: ContainerId,
        *,
        reason: str,
        requested_by: str,
        now_s: float,
        automatic: bool = False,
    ) -> Job:
        replicas = self._registry.replicas(container_id)
        found = targets(replicas, self._registry.live())
        assert found, "a container that may be reconciled has somebody to do it"
        job = new_job(
            self._new_job_id(),
            container_id,
            found,
            now_s=now_s,
            automatic=automatic,
            reason=reason,
            requested_by=requested_by,
            roots=roots(replicas),
        )
        assert job.job_id not in self._jobs
        return job

    def _begin(self, jobs: Sequence[Job], now_s: float) -> None:
        """Take up new jobs, all or none: what is not on disk must not be worked for,
        nor come to be after a failure.
        """
        self._save(jobs, now_s)
        for job in jobs:
            self._keep(job)
            log.info(
                "job_created", job=job.job_id, container_id=job.container_id, reason=job.reason,
                requested_by=job.requested_by, automatic=job.automatic,
            )  # fmt: skip

    def _step(self, job_id: JobId, event: Event, now_s: float) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        changed = step(job, event, now_s)
        if changed is job:
            return
        self._keep(changed)
        self._unsaved[job_id] = None
        if [order.state for order in changed.orders] != [order.state for order in job.orders]:
            self._save_now = True
        if changed.state is not job.state:
            self._save_now = True
            log.info(
                "job_changed", job=job_id, container_id=job.container_id, state=changed.state.value
            )
        if changed.state.is_terminal:
            self._finish(changed, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        compared = self._registry.compared(job.container_id)
        self._visits[job.container_id] = after_job(
            self._visits.get(job.container_id),
            container_id=job.container_id,
            job_id=job.job_id,
            verdict=job.verdict,
            succeeded=job.state is JobState.DONE
            and compared.comparison is not RootComparison.DIVERGED,
            spoken_of=roots_covered_by_verdict(job),
            now_s=now_s,
        )
        self._unsaved_visits[job.container_id] = None
        self._on_finished(job)
        log.info(
            "job_finished", job=job.job_id, container_id=job.container_id, state=job.state.value,
            verdict=job.verdict.value if job.verdict else "", detail=job.detail,
            bytes_fetched=job.bytes_done,
        )  # fmt: skip

    def _keep(self, job: Job) -> None:
        """Take the job as it is now into every index."""
        earlier = self._jobs.get(job.job_id)
        self._jobs[job.job_id] = job
        for before in earlier.orders if earlier else ():
            self._running[before.peer] -= before.state.is_in_flight
            after = job.order(before.peer)
            if after and before.state.is_in_flight and not after.state.is_in_flight:
                self._sink.withdraw(before.peer, command_id(job.job_id, before))
                if after.state in (OrderState.EXPIRED, OrderState.CANCELLED):
                    self._call_off(job.job_id, before)
        for order in job.orders:
            self._running[order.peer] += order.state.is_in_flight
            if order.state is OrderState.QUEUED:
                self._queued.setdefault(order.peer, {}).setdefault(job.job_id)
            elif order.peer in self._queued:
                self._queued[order.peer].pop(job.job_id, None)
                if not self._queued[order.peer]:
                    del self._queued[order.peer]
        if any(order.state.is_in_flight for order in job.orders):
            self._in_flight.setdefault(job.job_id)
        else:
            self._in_flight.pop(job.job_id, None)
        if not job.state.is_terminal:
            self._active[job.container_id] = job.job_id
            return
        if self._active.get(job.container_id) == job.job_id:
            del self._active[job.container_id]
        self._ended[job.job_id] = None
        if len(self._ended) > _JOBS_ENDED_MAX:
            oldest = next(iter(self._ended))
            del self._ended[oldest], self._jobs[oldest]

    def _root(self, job_id: JobId, peer: PeerId) -> Root | None:
        """Of the replica that the job is about, as this datanode last reported it."""
        job = self._jobs.get(job_id)
        held = roots(self._registry.replicas(job.container_id)) if job else ()
        return next((root for root in held if root[0] == peer), None)

    def _jobs_with_order_at(self, peer: PeerId) -> list[JobId]:
        found = []
        for job_id in self._in_flight:
            order = self._jobs[job_id].order(peer)
            if order is not None and order.state.is_in_flight:
                found.append(job_id)
        return found

    def _is_gone(self, peer: PeerId, now_s: float) -> bool:
        """Dead, or not heard of since we began, and that is as long."""
        if self._registry.datanode(peer) is not None:
            return self._registry.is_dead(peer)
        return now_s - self._started_at_s >= self._rules.dead_after_s

    # ---- orders

    def _dispatch_stored(self, peers: Iterable[PeerId], now_s: float) -> None:
        # Stored before anything goes out: an agent must never work for a job that
        # nobody remembers.
        self._save_changes(now_s)
        for peer in peers:
            self._dispatch(peer, now_s)
        self._save_changes(now_s)

    def _dispatch(self, peer: PeerId, now_s: float) -> None:
        if not self._registry.is_live(peer):
            return
        free = free_slots(self._running[peer], self._rules.orders_per_datanode)
        for job_id in list(islice(self._queued.get(peer, ()), _DISPATCH_SEARCH_MAX)):
            if free == 0:
                return
            order = self._jobs[job_id].order(peer)
            assert order is not None
            if all(self._is_gone(other, now_s) for other in order.peers):
                self._step(job_id, OrderAbandoned(peer, "all its peers are dead"), now_s)
            elif self._send(job_id, replace(order, attempts=order.attempts + 1), now_s):
                self._step(job_id, OrderIssued(peer), now_s)
                free -= 1

    def _send_again(self, now_s: float) -> None:
        waiting, self._resend = self._resend, []
        for job_id, peer in waiting:
            job = self._jobs.get(job_id)
            order = job.order(peer) if job else None
            if order and order.state.is_in_flight and not self._send(job_id, order, now_s):
                self._resend.append((job_id, peer))

    def _send(self, job_id: JobId, order: Order, now_s: float) -> bool:
        """Send once its peers can be named: after a start of ours they may not have
        been heard of yet.
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
        job = self._jobs[job_id]
        return self._sink.send(
            ReconcileOrder(
                command_id(job_id, order),
                term,
                order.peer,
                job_id,
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

    def _call_off(self, job_id: JobId, order: Order) -> None:
        term = self._leadership.term()
        self._sink.withdraw(order.peer, command_id(job_id, order))
        if term is not None:
            self._sink.send(CancelOrder(f"{job_id}/cancel", term, order.peer, job_id, order.round))

    def _save_changes(self, now_s: float) -> None:
        if not self._unsaved or not (
            self._save_now or now_s - self._saved_at_s >= _SAVE_PROGRESS_EVERY_S
        ):
            return
        self._save([], now_s)

    def _save_what_is_done(self, now_s: float) -> None:
        # To fail now would be to deny a request that is granted and on disk; the next
        # tick tries again, and tells.
        with suppress(DatabaseError):
            self._save_changes(now_s)

    def _save(self, ahead: Sequence[Job], now_s: float) -> None:
        """Put down what has changed, and of these jobs what they are to become."""
        jobs = {job_id: self._jobs[job_id] for job_id in self._unsaved if job_id in self._jobs}
        jobs.update((job.job_id, job) for job in ahead)
        visits = [self._visits[container_id] for container_id in self._unsaved_visits]
        self._store.save(jobs.values(), visits)
        self._unsaved.clear()
        self._unsaved_visits.clear()
        self._saved_at_s, self._save_now = now_s, False


def command_id(job_id: JobId, order: Order) -> str:
    """The same after a restart of ours, another after one of the agent's."""
    return f"{task_id(job_id, order.round)}/{order.attempts}"
