"""The controller of a cluster without agents: SCM reports, and Ozone reconciles.

Containers come from SCM's own records instead of heartbeats of agents, and an order is
for a container as a whole. A job has the rounds of its container (scm.ozone_rounds),
and ends when they do. Automatic mode, requests, visits, audit and store are those of
`Controller`.

A round is saved before it is requested. After a restart the run goes on as if its last
request had arrived: the roots tell, and nothing is ordered twice before they had time
to.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from runtime.errors import ConfigError, UsageError
from runtime.eta import duration_text
from runtime.log import get_logger
from scm.container_reports import ClusterSnapshot, ContainerReport, ruling_of
from scm.controller import Controller
from scm.controller_parts import ControllerParts
from scm.events import CONTROLLER_EVENTS
from scm.heartbeats import Heartbeat
from scm.job_steps import step
from scm.jobs import Job, JobId, OrderState, RunChanged, ThrottleRequested, TimePassed
from scm.limits import LIMITS, ControllerLimits
from scm.ozone_rounds import OzoneRun, RoundStep, observe, refused, request_sent
from scm.pace import Pace, PaceLimits
from scm.planned import PlannedOrder
from scm.ports import AnyOrder, JobAudit, JobStore, Leadership
from scm.registry import HeartbeatEffect
from scm.rules import Rules

# Queued containers of a datanode with a free place that are looked at in one call.
_SEARCH_MAX = 100
# A silence of SCM below this is a poll or two that failed.
_SILENT_AFTER_S = 10.0

_log = get_logger("scm", CONTROLLER_EVENTS)


class ClusterController(Controller):
    """The decisions for one cluster. Not thread-safe."""

    def __init__(
        self,
        *,
        rules: Rules,
        settle_s: float,
        requests_per_hour: int,
        store: JobStore,
        leadership: Leadership,
        audit: JobAudit,
        new_job_id: Callable[[], JobId],
        now_s: float,
        pause_after_s: float = math.inf,
        on_finished: Callable[[Job], None] = lambda job: None,
        limits: ControllerLimits = LIMITS,
    ) -> None:
        """Continue the store's jobs. A round without a change of a root ends after
        `settle_s` seconds; 0 requests per hour is no limit.

        Raises:
            ConfigError: the store is that of a controller of agents.
            DatabaseError: it cannot be read.
        """
        if store.holders() or any(
            job.run is None for job in store.jobs() if not job.state.is_terminal
        ):
            raise ConfigError(
                "state_folder: it is that of a controller of agents",
                hint="Give a controller with [cluster] a folder of its own.",
            )
        super().__init__(
            # Without deletes in the roots a visit to a matching container would only
            # cost its datanodes a scan.
            rules=replace(rules, visit_every_s=math.inf),
            store=store,
            sink=_NoReplicaOrders(),
            leadership=leadership,
            audit=audit,
            new_job_id=new_job_id,
            now_s=now_s,
            pause_after_s=pause_after_s,
            on_finished=on_finished,
            parts=ControllerParts(first_run=OzoneRun),
            limits=limits,
        )
        self._settle_s = settle_s
        self._requests_per_hour = requests_per_hour
        self._pace = Pace(self._pace_limits)
        self._count_earlier_requests(store.jobs(), now_s)
        self._answered_at_s = now_s
        # Why SCM is of no use now; empty if it is.
        self._fault = ""
        # Since when a rule refuses the container of a job.
        self._refused_since_s: dict[ContainerId, float] = {}
        self._not_converging = {
            visit.container_id
            for visit in store.visits()
            if visit.verdict is None and visit.hopeless_roots is not None
        }

    def watched(self) -> list[ContainerId]:
        """The containers whose jobs need the next report: those under way, and those
        that wait for datanodes with a free place.
        """
        found = dict.fromkeys(self._pace.running)
        for peer in self._jobs.peers_with_queue:
            if self._pace.has_place(peer):
                for job_id in islice(self._jobs.queued_at(peer), _SEARCH_MAX):
                    found.setdefault(self.job(job_id).container_id)
        return list(found)

    def report(
        self, snapshot: ClusterSnapshot, now_s: float, *, in_safe_mode: bool = False
    ) -> list[ContainerId]:
        """Handle what SCM reports; returns the containers whose next round is to be
        requested now. These rounds are on disk.

        In safe mode SCM does not know all replicas yet: nothing is concluded.

        Raises:
            DatabaseError: the changes cannot be saved; nothing is to be requested.
        """
        self._leave_out_pause(now_s)
        self._answered_at_s = now_s
        self._note_fault("SCM is in safe mode" if in_safe_mode else "")
        self._registry.handle_cluster(snapshot, now_s)
        if in_safe_mode:
            return []
        jobs = [
            self.job(job_id)
            for number in self.watched()
            if (number in snapshot.containers or number in snapshot.gone)
            and (job_id := self._jobs.active_job_of(number)) is not None
        ]
        ready = [
            job
            for job in jobs
            if self._observe(job, snapshot.containers.get(job.container_id), now_s)
        ]
        due = self._choose_due(ready, snapshot, now_s)
        self._unsaved.save_if_due(now_s)
        return due

    def note_answers(
        self, answers: Mapping[ContainerId, ReconcileError | None], now_s: float
    ) -> None:
        """Record what SCM answered to requests: its refusals, by container."""
        for container_id, refusal in answers.items():
            job_id = self._jobs.active_job_of(container_id)
            run = self.job(job_id).run if job_id else None
            if job_id and run and refusal is not None:
                self._step(job_id, RunChanged(refused(run, refusal.message)), now_s)
        self._try_save_changes(now_s)

    def note_silence(self, error: ReconcileError, now_s: float) -> None:
        """Record that SCM did not answer; its last reports count for a while."""
        if now_s - self._answered_at_s >= _SILENT_AFTER_S:
            self._note_fault(f"SCM does not answer: {error.code}: {error.message}")

    def fault(self, now_s: float) -> str:
        """Why SCM is of no use now, and for how long; empty if it is."""
        if not self._fault:
            return ""
        return f"{self._fault} (last report {duration_text(now_s - self._answered_at_s)} ago)"

    def gauges(self, now_s: float) -> dict[str, float]:
        """The gauges of any controller, and those of SCM."""
        stuck = sum(map(self.queries.is_not_converging, self._not_converging))
        return self.queries.gauges(now_s) | {
            "scm_cluster_report_age_seconds": max(0.0, now_s - self._answered_at_s),
            "scm_containers_not_converging": stuck,
        }

    def tick(self, now_s: float) -> None:
        """See Controller.tick. A silent SCM makes datanodes stale, never dead."""
        self._leave_out_pause(now_s)
        for peer, liveness in self._registry.update_liveness(now_s):
            _log.warning("datanode_stale", datanode=peer, liveness=liveness.value)
        ticked = TimePassed(self._registry.live(), math.inf)
        for job_id in self._jobs.in_flight:
            self._step(job_id, ticked, now_s)
        if self._rules.starts_jobs(now_s) and not self._fault:
            self._start_automatic_jobs(now_s)
        self._unsaved.save_if_due(now_s)

    def heartbeat(self, heartbeat: Heartbeat, now_s: float) -> HeartbeatEffect:
        """Refuse an agent.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"datanode {heartbeat.datanode.peer} sent a heartbeat at {now_s:.0f} s, but this"
            " controller drives a cluster by its SCM",
            hint="Start a controller without [cluster] for agents.",
        )

    def throttle(self, job_id: JobId, request: ThrottleRequested, now_s: float) -> Job:
        """Refuse limits of a job.

        Raises:
            JobNotFoundError: there is no such job.
            UsageError: there is one.
        """
        container_id = self.job(job_id).container_id
        raise UsageError(
            f"Ozone takes no limits for container {container_id}: {request.by or 'nobody'} may"
            " pause the job, or lower orders_per_datanode and cluster.requests_per_hour"
        )

    def scan(
        self, container_ids: Iterable[ContainerId], *, requested_by: str = ""
    ) -> tuple[list[ContainerId], int]:
        """Refuse scans.

        Raises:
            UsageError: always.
        """
        count = len(list(container_ids))
        raise UsageError(
            f"SCM orders no scans, of {count} containers for {requested_by or 'nobody'}: datanodes"
            " scan by a schedule of their own",
            hint="treefold diagnose ID --cluster ... --deep reads the data now.",
        )

    def change_limits(self, *, orders_per_datanode: int, automatic_jobs: int) -> None:
        """See Controller.change_limits."""
        super().change_limits(
            orders_per_datanode=orders_per_datanode, automatic_jobs=automatic_jobs
        )
        self._pace.change_limits(self._pace_limits)

    def _check_plans(self, plans: Sequence[PlannedOrder]) -> None:
        if plans:
            raise UsageError("Ozone's reconciliation follows no plan: plans are for agents")

    @property
    def _pace_limits(self) -> PaceLimits:
        return PaceLimits(self._rules.orders_per_datanode, self._requests_per_hour)

    def _count_earlier_requests(self, jobs: Sequence[Job], now_s: float) -> None:
        """Continue to count the places and the requests of an earlier process."""
        runs = [(job, job.run) for job in jobs if job.run is not None and job.run.round]
        for job, run in sorted(runs, key=lambda entry: entry[1].requested_s):
            # All rounds count as at the time of the last: rather too slow than too
            # many.
            for _ in range(run.round):
                self._pace.requested(job.container_id, job.peers, min(run.requested_s, now_s))
            if job.state.is_terminal:
                self._pace.ended(job.container_id)

    def _note_fault(self, fault: str) -> None:
        if fault == self._fault:
            return
        if fault:
            _log.warning("cluster_unavailable", reason=fault)
        else:
            _log.info("cluster_available", reason=self._fault)
        self._fault = fault

    def _observe(self, job: Job, report: ContainerReport | None, now_s: float) -> bool:
        """Look at the container of a job; returns whether its next round may be
        requested.
        """
        assert job.run is not None
        ruling = ruling_of(job.container_id, report)
        if not ruling.is_ok or report is None:
            # SCM knows few replicas right after its start: a refusal has to last.
            since_s = self._refused_since_s.setdefault(job.container_id, now_s)
            if now_s - since_s >= self._settle_s:
                self._step(job.job_id, RunChanged(refused(job.run, ruling.message)), now_s)
            return False
        self._refused_since_s.pop(job.container_id, None)
        run, next_step = observe(
            job.run, report.replicas, report.known, now_s=now_s, settle_s=self._settle_s
        )
        is_due = next_step is RoundStep.REQUEST
        self._step(job.job_id, RunChanged(run, is_due), now_s)
        return is_due

    def _choose_due(
        self, jobs: Sequence[Job], snapshot: ClusterSnapshot, now_s: float
    ) -> list[ContainerId]:
        """Choose, save and enter the rounds that may be requested now."""
        is_quiet = self._rules.is_quiet(now_s)
        due = list[tuple[JobId, RunChanged]]()
        ahead = list[Job]()
        begun = list[ContainerId]()
        for job in (self.job(job.job_id) for job in jobs):
            number, report = job.container_id, snapshot.containers.get(job.container_id)
            is_waiting = not job.state.is_terminal and job.orders[0].state is OrderState.QUEUED
            if job.pause and is_waiting:
                self._pace.ended(number)
            if report is None or job.run is None or job.pause or not is_waiting:
                continue
            peers = [replica.peer for replica in report.replicas]
            is_held = job.automatic and is_quiet
            if is_held or not self._pace.may_request(number, peers, now_s):
                continue
            if number not in self._pace.running:
                begun.append(number)
            self._pace.requested(number, peers, now_s)
            event = RunChanged(request_sent(job.run, report.replicas, now_s))
            due.append((job.job_id, event))
            ahead.append(step(job, event, now_s))
        if not due:
            return []
        try:
            self._unsaved.save(ahead, now_s)
        except ReconcileError:
            for number in begun:
                self._pace.ended(number)
            raise
        for job_id, event in due:
            self._step(job_id, event, now_s)
        return [job.container_id for job in ahead]

    def _finish(self, job: Job, now_s: float) -> None:
        super()._finish(job, now_s)
        self._pace.ended(job.container_id)
        self._refused_since_s.pop(job.container_id, None)
        if job.is_not_converging:
            self._not_converging.add(job.container_id)
            _log.warning("container_not_converging", job=job.job_id, container_id=job.container_id)
        else:
            self._not_converging.discard(job.container_id)


class _NoReplicaOrders:
    """SCM can order nothing of one replica alone (scm.ports.CommandSink)."""

    def send(self, order: AnyOrder) -> bool:
        """Accept no order."""
        assert order.peer
        return False

    def withdraw(self, peer: PeerId, command_id: str) -> None:
        """There is nothing to withdraw."""

    def is_undelivered(self, peer: PeerId, command_id: str) -> bool:
        """No order is known."""
        return not peer and not command_id
