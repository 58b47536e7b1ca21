"""The controller: it handles reports and requests, and returns orders.

It combines registry, rules and jobs, without sockets and clocks. The caller passes
times, and orders leave through a port, so the same code runs behind gRPC and in a
simulation. An order is sent when its datanode has a free slot, and again after a
restart of either side. Agents ignore repeated IDs of jobs and commands.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos.errors import JobNotFoundError
from runtime.errors import BusyError, DatabaseError
from runtime.log import get_logger
from scm.controller_parts import ControllerParts
from scm.eligibility import Eligibility, Ruling
from scm.events import CONTROLLER_EVENTS
from scm.heartbeats import Heartbeat
from scm.job_steps import name_unwritten, new_job, roots_covered_by_verdict, step
from scm.jobs import (
    AgentRestarted,
    CancelRequested,
    ControllerResumed,
    Event,
    Job,
    JobId,
    JobState,
    OrderAbandoned,
    OrderAccepted,
    PauseRequested,
    ProgressReceived,
    ResumeRequested,
    TakenOver,
    ThrottleRequested,
    TimePassed,
    task_of,
)
from scm.limits import LIMITS, ControllerLimits
from scm.planned import PlannedOrder, ruling_of_plan
from scm.policy import (
    Root,
    RootComparison,
    next_visit,
    resume_visit,
    roots,
    targets,
    unwritten,
)
from scm.ports import CommandSink, JobAudit, JobStore, Leadership, ScanOrder
from scm.queries import ClusterQueries
from scm.registry import HeartbeatEffect
from scm.rules import Rules
from scm.unsaved import UnsavedChanges
from scm.views import ReconcileResponse

_log = get_logger("scm", CONTROLLER_EVENTS)


class Controller:
    """The decisions of the controller; `queries` answers questions. Not thread-safe."""

    def __init__(
        self,
        *,
        rules: Rules,
        store: JobStore,
        sink: CommandSink,
        leadership: Leadership,
        audit: JobAudit,
        new_job_id: Callable[[], JobId],
        now_s: float,
        pause_after_s: float = math.inf,
        on_finished: Callable[[Job], None] = lambda job: None,
        parts: ControllerParts | None = None,
        limits: ControllerLimits = LIMITS,
    ) -> None:
        """Continue the store's jobs; their orders in flight are sent again.

        A time between two calls of `heartbeat` and `tick` of more than `pause_after_s`
        is a pause: the process was stopped, or its disk stood still. Deadlines leave it
        out. `on_finished` gets each job that ended. Tests replace `parts` by wrong
        ones.

        Raises:
            DatabaseError: the store cannot be read.
        """
        parts = parts or ControllerParts()
        self._rules = rules
        self._limits = limits
        self._sink = sink
        self._leadership = leadership
        self._audit = audit
        self._new_job_id = new_job_id
        self._first_run = parts.first_run
        self._on_finished = on_finished
        self._registry = parts.registry(
            stale_after_s=rules.stale_after_s,
            dead_after_s=rules.dead_after_s,
            required_nodes=rules.required_nodes,
            roots_stale_after_s=rules.roots_stale_after_s,
            holders=store.holders(),
            now_s=now_s,
            limits=limits,
        )
        self._jobs = parts.job_index(limits)
        for job in store.jobs():
            self._jobs.put(step(job, ControllerResumed(), now_s))
        self._visits = {visit.container_id: resume_visit(visit, now_s) for visit in store.visits()}
        self.queries = ClusterQueries(rules, self._registry, self._jobs, self._visits, leadership)
        self._dispatcher = parts.dispatcher(
            rules=rules,
            registry=self._registry,
            jobs=self._jobs,
            sink=sink,
            leadership=leadership,
            started_at_s=now_s,
        )
        self._automatic = parts.automatic(
            rules=rules,
            registry=self._registry,
            visits=self._visits,
            is_eligible=lambda container_id: self.queries.evaluate(container_id).is_ok,
            now_s=now_s,
        )
        self._unsaved = UnsavedChanges(store, now_s, limits)
        self._pause_after_s = pause_after_s
        self._ran_at_s = now_s
        self._scans = 0

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> HeartbeatEffect:
        """Handle reports and progress, and send the datanode orders for its free slots.

        Raises:
            DatabaseError: the changes cannot be saved; nothing is sent.
            UsageError: the datanode reports too many containers; its earlier reports
                stay, and go stale.
        """
        self._leave_out_pause(now_s)
        peer = heartbeat.datanode.peer
        effect = self._registry.handle_heartbeat(
            heartbeat.datanode,
            incarnation=heartbeat.incarnation,
            sequence=heartbeat.sequence,
            report=heartbeat.report,
            now_s=now_s,
        )
        if not effect.applied:
            return effect
        for container_id in effect.reassigned:
            self._unsaved.add_holders(container_id, self._registry.holders(container_id))
        if effect.registered:
            _log.info("datanode_registered", datanode=peer, address=heartbeat.datanode.address)
        if effect.restarted:
            for job_id in self._jobs.in_flight_at(peer):
                self._step(job_id, AgentRestarted(peer), now_s)
        for command_id in heartbeat.acknowledged:
            self._sink.withdraw(peer, command_id)
            job_id, round_, resumes = task_of(command_id.partition("/")[0])
            self._step(job_id, OrderAccepted(peer, round_, resumes), now_s)
        # With its full report a datanode sends the progress again, and then with the
        # replica's current root.
        for report in heartbeat.progress if not effect.full_report_wanted else ():
            root = self._reported_root(report.job_id, peer)
            self._step(
                report.job_id,
                ProgressReceived(
                    peer, report.state, report.progress, report.round, root, report.resumes
                ),
                now_s,
            )
        self._save_and_dispatch([peer], now_s)
        return effect

    def tick(self, now_s: float) -> None:
        """Update everything that depends on time: stale datanodes, expired orders and
        automatic mode. Call it about once a second.

        Raises:
            DatabaseError: the changes cannot be saved; the next tick tries again.
        """
        self._leave_out_pause(now_s)
        for peer, liveness in self._registry.update_liveness(now_s):
            _log.warning("datanode_stale", datanode=peer, liveness=liveness.value)
        ordered = self._jobs.peers_with_orders
        for peer in sorted(peer for peer in ordered if self._dispatcher.is_gone(peer, now_s)):
            for job_id in [*self._jobs.in_flight_at(peer), *self._jobs.queued_at(peer)]:
                self._step(job_id, OrderAbandoned(peer, "datanode is dead"), now_s)
        self._dispatcher.resend(now_s)
        ticked = TimePassed(self._registry.live(), self._rules.command_deadline_s)
        for job_id in self._jobs.in_flight:
            self._step(job_id, ticked, now_s)
        if self._rules.starts_jobs(now_s) and self._leadership.term() is not None:
            self._start_automatic_jobs(now_s)
        self._save_and_dispatch(self._jobs.peers_with_queue, now_s)
        self._unsaved.save_holders_if_due(now_s)

    def reconcile(
        self,
        container_ids: Iterable[ContainerId],
        *,
        dry_run: bool,
        reason: str,
        requested_by: str,
        now_s: float,
        plans: Sequence[PlannedOrder] = (),
    ) -> list[ReconcileResponse]:
        """Start a job for each eligible container; with `dry_run` only return the
        rulings. A job that automatic mode began is taken over. A container in `plans`
        gets orders only for the replicas there.

        Raises:
            UsageError: there are plans, and nobody here follows one.
            DatabaseError: the jobs cannot be saved; none is started.
            DiskError: the audit file cannot be written; none is started.
        """
        self._check_plans(plans)
        outcomes, jobs = list[ReconcileResponse](), list[Job]()
        for container_id in dict.fromkeys(container_ids):
            planned = [one for one in plans if one.container_id == container_id]
            ruling = self._evaluate(container_id, planned)
            if ruling.eligibility is Eligibility.ALREADY_RUNNING:
                active = self._jobs.active_job_of(container_id)
                if active is not None and not dry_run:
                    # A job of automatic mode keeps nobody from asking for one, and then
                    # does not count for that mode's limit.
                    event = TakenOver(requested_by, reason)
                    self._request("takeover", active, event, now_s, requested_by, reason)
                outcomes.append(ReconcileResponse(container_id, ruling, active))
            elif not ruling.is_ok or dry_run:
                outcomes.append(ReconcileResponse(container_id, ruling))
            elif self._jobs.active_count + len(jobs) >= self._limits.jobs_active_max:
                message = (
                    f"Cannot reconcile container {container_id}:"
                    f" {self._limits.jobs_active_max} jobs are waiting."
                )
                outcomes.append(
                    ReconcileResponse(container_id, Ruling(Eligibility.QUEUE_FULL, message))
                )
            else:
                jobs.append(
                    self._new_job(
                        container_id,
                        reason=reason,
                        requested_by=requested_by,
                        now_s=now_s,
                        planned=planned,
                    )
                )
                outcomes.append(ReconcileResponse(container_id, ruling, jobs[-1].job_id))
        for outcome in outcomes if not dry_run else ():
            if not outcome.ruling.is_ok:
                what, why = f"reconcile {outcome.container_id}", outcome.ruling.message
                self._audit.refused(who=requested_by, what=what, why=why)
        if jobs:
            self._start_jobs(jobs, now_s)
            for peer in self._jobs.peers_with_queue:
                self._dispatch(peer, now_s)
            self._try_save_changes(now_s)
        return outcomes

    def cancel(self, job_id: JobId, now_s: float, *, requested_by: str = "") -> Job:
        """Request the end of a job; agents stop after the current window. Orders that
        no agent can have end at once.

        Raises:
            DatabaseError: the request cannot be saved; the job continues.
            DiskError: the audit file cannot be written; the job continues.
            JobNotFoundError: there is no such job.
        """
        job = self.job(job_id)
        if not job.state.is_terminal and job.cancel_requested_at_s is None:
            self._audit.requested("cancel", job, requested_by)
            request = CancelRequested(self._dispatcher.undelivered(job))
            self._unsaved.save([step(job, request, now_s)], now_s)
            self._step(job_id, request, now_s)
            job = self.job(job_id)
            for order in job.orders:
                if order.state.is_in_flight:
                    self._dispatcher.send_cancel(job, order)
            self._try_save_changes(now_s)
        return self.job(job_id)

    def pause(self, job_id: JobId, *, by: str, reason: str, now_s: float) -> Job:
        """Stop a job at its next safe points until it is resumed; agents that may have
        its orders are told. A job that is paused already keeps its reason.

        Raises:
            DatabaseError: the request cannot be saved; the job continues.
            DiskError: the audit file cannot be written; likewise.
            JobNotFoundError: there is no such job.
        """
        request = PauseRequested(by, reason, self._dispatcher.undelivered(self.job(job_id)))
        if self._request("pause", job_id, request, now_s, by, reason):
            job = self.job(job_id)
            for order in job.orders:
                if order.is_stopping:
                    self._dispatcher.send_cancel(job, order)
        return self.job(job_id)

    def resume(self, job_id: JobId, *, by: str, now_s: float) -> Job:
        """Let a paused job go on.

        Raises:
            DatabaseError: the request cannot be saved; the job stays paused.
            DiskError: the audit file cannot be written; likewise.
            JobNotFoundError: there is no such job.
        """
        if self._request("resume", job_id, ResumeRequested(), now_s, by):
            _log.info("job_resumed", job=job_id, requested_by=by)
            for peer in sorted(self.job(job_id).peers):
                self._dispatch(peer, now_s)
            self._try_save_changes(now_s)
        return self.job(job_id)

    def throttle(self, job_id: JobId, request: ThrottleRequested, now_s: float) -> Job:
        """Set limits of a job; agents that may have its orders are told.

        Raises:
            DatabaseError: the request cannot be saved; the limits stay.
            DiskError: the audit file cannot be written; likewise.
            JobNotFoundError: there is no such job.
        """
        if self._request("throttle", job_id, request, now_s, request.by):
            job = self.job(job_id)
            _log.info(
                "job_throttled",
                job=job_id,
                requested_by=request.by,
                bytes_per_second=job.bytes_per_second.value,
                containers_max=job.containers_max.value,
            )
            for order in job.orders:
                if order.state.is_in_flight and not order.is_stopping:
                    self._dispatcher.send_throttle(job, order)
        return self.job(job_id)

    def _check_plans(self, plans: Sequence[PlannedOrder]) -> None:
        """Refuse plans that nobody here could follow."""

    def _request(
        self, kind: str, job_id: JobId, request: Event, now_s: float, who: str, why: str = ""
    ) -> bool:
        """Record, save and apply what someone requested of a job; returns whether it
        changed anything.
        """
        job = self.job(job_id)
        changed = step(job, request, now_s)
        if changed is job:
            return False
        self._audit.requested(kind, job, who, why)
        self._unsaved.save([changed], now_s)
        self._step(job_id, request, now_s)
        self._try_save_changes(now_s)
        return True

    def scan(
        self, container_ids: Iterable[ContainerId], *, requested_by: str = ""
    ) -> tuple[list[ContainerId], int]:
        """Order a scan of every live replica; returns the unknown containers and the
        number of orders.

        Raises:
            BusyError: this controller is not the leader.
            DiskError: the audit file cannot be written; no scan is sent.
        """
        term = self._leadership.term()
        if term is None:
            raise BusyError("this controller is not the leader")
        unknown, orders = [], 0
        wanted = list(dict.fromkeys(container_ids))
        self._audit.scans_ordered(wanted, requested_by)
        for container_id in wanted:
            replicas = self._registry.replicas(container_id)
            if not replicas:
                unknown.append(container_id)
            for replica in replicas:
                if self._registry.is_live(replica.peer):
                    self._scans += 1
                    # The term makes IDs unique across restarts.
                    order = ScanOrder(
                        f"scan-{term}-{self._scans}", term, replica.peer, container_id
                    )
                    orders += self._sink.send(order)
        return unknown, orders

    def job(self, job_id: JobId) -> Job:
        """The current state of a job.

        Raises:
            JobNotFoundError: there is no such job.
        """
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFoundError(f"There is no job {job_id}.")
        return job

    def job_id_of(self, text: str) -> JobId:
        """The ID of a job, given whole or as a beginning that no other ID has.

        Raises:
            AmbiguousIdError: several begin so.
            JobNotFoundError: none does.
        """
        return self._jobs.find(text)

    def jobs(self, state: JobState | None, limit: int) -> list[Job]:
        """Up to `limit` jobs in `state`, newest first; None selects all states."""
        return self._jobs.newest(state, limit)

    def change_limits(self, *, orders_per_datanode: int, automatic_jobs: int) -> None:
        """Go on with these limits; what runs is not interrupted."""
        self._rules = replace(
            self._rules, orders_per_datanode=orders_per_datanode, automatic_jobs=automatic_jobs
        )
        self._dispatcher.change_rules(self._rules)
        self.queries.change_rules(self._rules)

    def gauges(self, now_s: float) -> dict[str, float]:
        """The current gauges, by their names in scm.metrics."""
        return self.queries.gauges(now_s)

    def fault(self, _now_s: float) -> str:
        """Why nothing is reported; empty if that is not known."""
        return ""

    @property
    def term(self) -> int | None:
        """The term in which this controller leads; None while it does not."""
        return self._leadership.term()

    def _leave_out_pause(self, now_s: float) -> None:
        pause_s = now_s - self._ran_at_s
        self._ran_at_s = max(now_s, self._ran_at_s)
        if pause_s <= self._pause_after_s:
            return
        _log.warning("controller_paused", seconds=round(pause_s, 3))
        self._registry.resume(pause_s)
        self._dispatcher.resume(pause_s)
        for job in list(self._jobs.active()):
            self._step(job.job_id, ControllerResumed(), now_s)

    def _start_automatic_jobs(self, now_s: float) -> None:
        running = sum(job.automatic for job in self._jobs.active())
        chosen = self._automatic.choose(self._rules.automatic_jobs - running, now_s)
        jobs = [
            self._new_job(
                container_id, reason=reason, requested_by="automatic", now_s=now_s, automatic=True
            )
            for container_id, reason in chosen
        ]
        if jobs:
            self._start_jobs(jobs, now_s)

    def _evaluate(self, container_id: ContainerId, planned: Sequence[PlannedOrder]) -> Ruling:
        ruling = self.queries.evaluate(container_id)
        if not ruling.is_ok or not planned:
            return ruling
        replicas = self._registry.replicas(container_id)
        found = targets(replicas, self._registry.live())
        return ruling_of_plan(container_id, planned, replicas, found)

    def _new_job(
        self,
        container_id: ContainerId,
        *,
        reason: str,
        requested_by: str,
        now_s: float,
        automatic: bool = False,
        planned: Sequence[PlannedOrder] = (),
    ) -> Job:
        replicas = self._registry.replicas(container_id)
        plans = {one.peer: one.digest for one in planned}
        found = targets(replicas, self._registry.live())
        if plans:
            found = tuple(target for target in found if target.peer in plans)
        assert found, "an eligible container has a target"
        job = new_job(
            self._new_job_id(),
            container_id,
            found,
            now_s=now_s,
            automatic=automatic,
            reason=reason,
            requested_by=requested_by,
            roots=roots(replicas),
            plans=plans,
            run=self._first_run(container_id),
        )
        assert job.job_id not in self._jobs
        return job

    def _start_jobs(self, jobs: Sequence[Job], now_s: float) -> None:
        """Save and start new jobs, all or none. A job that is not on disk must not run,
        and a failed request must leave none.
        """
        # First: a job without a line must not be on disk.
        self._audit.ordered(jobs)
        self._unsaved.save(jobs, now_s)
        for job in jobs:
            self._jobs.put(job)
            _log.info(
                "job_created",
                job=job.job_id,
                container_id=job.container_id,
                reason=job.reason,
                requested_by=job.requested_by,
                automatic=job.automatic,
            )

    def _step(self, job_id: JobId, event: Event, now_s: float) -> None:
        job = self._jobs.get(job_id)
        if job is None:
            return
        changed = step(job, event, now_s)
        if changed is job:
            return
        if changed.state in (JobState.DONE, JobState.PARTIAL):
            replicas = self._registry.replicas(job.container_id)
            reasons = unwritten(replicas, changed.peers, by_plan=changed.by_plan)
            changed = name_unwritten(changed, reasons)
        for before, after in self._jobs.put(changed):
            self._dispatcher.withdraw(changed, before, after)
        self._unsaved.add_job(changed)
        if [order.state for order in changed.orders] != [order.state for order in job.orders]:
            self._unsaved.is_urgent = True
        if changed.state is not job.state:
            self._unsaved.is_urgent = True
            self._unsaved.add_line(
                partial(
                    _log.info,
                    "job_changed",
                    job=job_id,
                    container_id=job.container_id,
                    state=changed.state.value,
                )
            )
        if changed.state.is_terminal:
            self._finish(changed, now_s)

    def _finish(self, job: Job, now_s: float) -> None:
        compared = self._registry.compared(job.container_id)
        visit = next_visit(
            self._visits.get(job.container_id),
            container_id=job.container_id,
            job_id=job.job_id,
            verdict=job.verdict,
            succeeded=job.state is JobState.DONE
            and compared.comparison is not RootComparison.DIVERGED,
            verdict_roots=roots_covered_by_verdict(job),
            now_s=now_s,
            is_final=job.is_not_converging,
        )
        self._visits[job.container_id] = visit
        self._unsaved.add_visit(visit)
        self._on_finished(job)
        self._audit.ended(job)
        self._unsaved.add_line(
            partial(
                _log.info,
                "job_finished",
                job=job.job_id,
                container_id=job.container_id,
                state=job.state.value,
                verdict=job.verdict.value if job.verdict else "",
                detail=job.detail,
                bytes_fetched=job.bytes_done,
            )
        )

    def _reported_root(self, job_id: JobId, peer: PeerId) -> Root | None:
        """The root of the job's replica, as this datanode last reported it."""
        job = self._jobs.get(job_id)
        held = roots(self._registry.replicas(job.container_id)) if job else ()
        return next((root for root in held if root[0] == peer), None)

    def _save_and_dispatch(self, peers: Iterable[PeerId], now_s: float) -> None:
        # Saved before any order is sent: an agent must never work on a job that a
        # restart would lose.
        self._unsaved.save_if_due(now_s)
        for peer in peers:
            self._dispatch(peer, now_s)
        self._unsaved.save_if_due(now_s)

    def _dispatch(self, peer: PeerId, now_s: float) -> None:
        for job_id, event in self._dispatcher.dispatch(peer, now_s):
            self._step(job_id, event, now_s)

    def _try_save_changes(self, now_s: float) -> None:
        # An error would reject a request that is on disk. The next tick tries again.
        with suppress(DatabaseError):
            self._unsaved.save_if_due(now_s)
