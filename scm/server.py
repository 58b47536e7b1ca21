"""The controller's gRPC service, with one lock, one clock and one thread for ticks.

Heartbeat passes an agent's report to the controller and returns the orders in the
agent's outbox. An order stays in the outbox until the agent confirms it, so that a lost
response loses nothing.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
from google.protobuf.message import Message

from merkle.limits import TEXT_CHARACTERS_MAX
from merkle.replica import ContainerState, PeerId
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from runtime.access import Access
from runtime.audit_upkeep import AuditUpkeep
from runtime.disk import Disk
from runtime.errors import BusyError, UsageError
from runtime.live_limits import LiveLimit, limits_of, log_reload, other_changes
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, MetricsServer
from runtime.rate_limit import steady_clock
from runtime.rpc import start_server
from runtime.setting_values import split_address
from runtime.thread_health import STEP_S_MAX, ThreadHealth
from scm.audit import ControllerAudit
from scm.cluster_feed import ClusterFeed
from scm.config import LIVE_LIMITS, ControllerConfig
from scm.controller import Controller
from scm.dashboard.start import start_dashboard
from scm.events import CONTROLLER_EVENTS
from scm.job_store import SqliteJobStore
from scm.jobs import Job, JobState, ThrottleRequested
from scm.local_controller import LocalController
from scm.messages import (
    command_to,
    container_id_from,
    container_to,
    controller_status_from,
    heartbeat_from,
    job_to,
    outcome_to,
    planned_from,
    status_response_to,
    status_to,
)
from scm.metrics import CONTROLLER_METRICS, PROCESS
from scm.policy import RootComparison
from scm.ports import AnyOrder, ScanOrder
from scm.replica_trees import fetch_cluster_trees
from scm.start_controller import Surroundings, make_controller
from scm.ticker import Ticker
from scm.views import ControllerStatus

if TYPE_CHECKING:
    from scm.dashboard.server import DashboardServer

SERVICE = "treefold.controller.v1.Controller"
# Unconfirmed orders of one datanode beyond which no scan is added. Other orders are
# limited by its slots.
_OUTBOX_SCANS_MAX = 10_000
# Commands in one response; the rest follows with the next heartbeats.
_COMMANDS_MAX = 1_000
# The largest clusters have thousands of datanodes.
_DATANODES_MAX = 20_000
# Containers or jobs in one response, and IDs in one request; both stay far below the
# limit of a message.
_PAGE_MAX = 1_000
# As many as a command line takes.
_UNSERVED_MAX = 5
IDS_MAX = 10_000
_TICK_S = 1.0
# A process that missed so many ticks was stopped, or waited for its disk. It cannot say
# that its datanodes were silent.
_PAUSE_AFTER_S = 10 * _TICK_S

E = TypeVar("E", bound=Enum)
_log = get_logger("scm", CONTROLLER_EVENTS)


class Outbox:
    """Orders that wait for the heartbeats of their datanodes (scm.ports.CommandSink).
    Not thread-safe: the caller holds a lock.
    """

    def __init__(self) -> None:
        self._waiting: dict[PeerId, dict[str, AnyOrder]] = {}
        # Command IDs, of those that wait, in a response that was made.
        self._delivered: dict[PeerId, set[str]] = {}

    def send(self, order: AnyOrder) -> bool:
        """Keep the order for the datanode's next heartbeat (CommandSink.send)."""
        waiting = self._waiting.setdefault(order.peer, {})
        if isinstance(order, ScanOrder) and len(waiting) >= _OUTBOX_SCANS_MAX:
            return False
        waiting[order.command_id] = order
        return True

    def withdraw(self, peer: PeerId, command_id: str) -> None:
        """Drop an order (CommandSink.withdraw)."""
        self._waiting.get(peer, {}).pop(command_id, None)
        self._delivered.get(peer, set()).discard(command_id)

    def is_undelivered(self, peer: PeerId, command_id: str) -> bool:
        """Whether the order waits, and was in no response (CommandSink)."""
        is_waiting = command_id in self._waiting.get(peer, {})
        return is_waiting and command_id not in self._delivered.get(peer, set())

    def deliver(self, peer: PeerId) -> Sequence[AnyOrder]:
        """The orders for this datanode's next response, oldest first. They stay until
        withdrawn.
        """
        found = list(islice(self._waiting.get(peer, {}).values(), _COMMANDS_MAX))
        self._delivered.setdefault(peer, set()).update(order.command_id for order in found)
        return found


class ControllerService:
    """The Controller service: it converts messages into calls under one lock."""

    def __init__(
        self,
        controller: Controller,
        outbox: Outbox,
        lock: threading.Lock,
        clock: Callable[[], float],
        metrics: Metrics,
        access: Access,
        *,
        limits: Callable[[], Sequence[LiveLimit]] = tuple,
        thread_health: ThreadHealth | None = None,
        scms: Sequence[str] = (),
    ) -> None:
        """`limits` has those in effect, and `thread_health` knows the process's
        threads. `scms` are those of the cluster that it drives without agents.
        """
        self._limits = limits
        self._scms = scms
        self._thread_health = thread_health or ThreadHealth()
        self._started_s = clock()
        self._controller = controller
        self._outbox = outbox
        self._lock = lock
        self._clock = clock
        self._metrics = metrics
        self._access = access

    def register(self, server: grpc.Server) -> None:
        """Add the service to this server."""
        methods: tuple[tuple[str, Callable[..., Message], type[Message]], ...] = (
            ("Heartbeat", self.heartbeat, pb.HeartbeatRequest),
            ("ListContainers", self.list_containers, pb.ListContainersRequest),
            ("GetContainers", self.get_containers, pb.GetContainersRequest),
            ("Reconcile", self.reconcile, pb.ReconcileRequest),
            ("ListJobs", self.list_jobs, pb.ListJobsRequest),
            ("GetJob", self.get_job, pb.GetJobRequest),
            ("CancelJob", self.cancel_job, pb.CancelJobRequest),
            ("PauseJob", self.pause_job, pb.PauseJobRequest),
            ("ResumeJob", self.resume_job, pb.ResumeJobRequest),
            ("ThrottleJob", self.throttle_job, pb.ThrottleJobRequest),
            ("ListDatanodes", self.list_datanodes, pb.ListDatanodesRequest),
            ("Scan", self.scan, pb.ScanRequest),
            ("GetStatus", self.get_status, pb.GetStatusRequest),
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialize)
            for name, method, request in methods
        }
        assert set(handlers) == set(pb.DESCRIPTOR.services_by_name["Controller"].methods_by_name)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        """Handle a heartbeat; the response has the waiting commands.

        Raises:
            AccessDeniedError: the caller is not the agent of this datanode.
            UsageError: the heartbeat is invalid, or has too many containers.
            BusyError: there are too many datanodes, or an agent of the datanode that
                started later has reported.
            DatabaseError: the changes cannot be saved.
        """
        self._access.check_datanode(context, request.datanode.datanode_id)
        heartbeat = heartbeat_from(request)
        peer = heartbeat.datanode.peer
        self._metrics.count("scm_heartbeats_total")
        with self._lock:
            if (
                self._controller.queries.datanode(peer) is None
                and self._controller.queries.datanode_count >= _DATANODES_MAX
            ):
                raise BusyError(f"{_DATANODES_MAX} datanodes are already known")
            try:
                effect = self._controller.heartbeat(heartbeat, self._clock())
            except UsageError as error:
                # Its agent only retries; the operator of the controller has to know.
                _log.warning("heartbeat_refused", datanode=peer, **error_fields(error))
                raise
            if effect.outdated:
                raise BusyError(
                    f"an agent of datanode {peer} that started later has reported",
                    hint="Only one agent may run for a datanode. If this is the only one, its state"
                    " folder was lost and the machine's clock set back: set the clock, and start"
                    " the agent again.",
                )
            term = self._controller.term
            # With the current term: agents reject orders of an earlier term.
            orders = (
                [replace(order, term=term) for order in self._outbox.deliver(peer)]
                if term is not None
                else []
            )
        return pb.HeartbeatResponse(
            commands=[command_to(order) for order in orders],
            full_report_wanted=effect.full_report_wanted,
            term=term or 0,
        )

    def list_containers(
        self, request: pb.ListContainersRequest, _: grpc.ServicerContext
    ) -> pb.ListContainersResponse:
        """A page of containers, by state and comparison."""
        state = _parse_filter(ContainerState, request.state)
        comparison = _parse_filter(RootComparison, request.comparison)
        limit = min(request.limit or _PAGE_MAX, _PAGE_MAX)
        with self._lock:
            views, more = self._controller.queries.containers(
                state=state, comparison=comparison, after=request.after_container_id, limit=limit
            )
            now_s = self._clock()
            return pb.ListContainersResponse(
                containers=[container_to(view, self._controller.queries, now_s) for view in views],
                more=more,
            )

    def get_containers(
        self, request: pb.GetContainersRequest, _: grpc.ServicerContext
    ) -> pb.GetContainersResponse:
        """The known containers among the requested ones, and the unknown IDs."""
        answer = pb.GetContainersResponse()
        with self._lock:
            now_s = self._clock()
            for container_id in _container_ids(request.container_ids, _PAGE_MAX):
                view = self._controller.queries.container(container_id)
                if view is None:
                    answer.unknown_container_ids.append(container_id)
                else:
                    answer.containers.append(container_to(view, self._controller.queries, now_s))
        return answer

    def reconcile(
        self, request: pb.ReconcileRequest, context: grpc.ServicerContext
    ) -> pb.ReconcileResponse:
        """Start jobs; with a dry run, return which jobs would start."""
        if request.all_diverged and request.container_ids:
            raise UsageError("give either container IDs or all_diverged, not both")
        if len(request.plans) > IDS_MAX:
            raise UsageError(f"{len(request.plans)} planned replicas; the limit is {IDS_MAX}")
        plans = [planned_from(one) for one in request.plans]
        named = _container_ids(request.container_ids, IDS_MAX)
        reason, requested_by = (
            _check_text(request.reason, "reason"),
            self._requester(request.requested_by, context),
        )
        with self._lock:
            outcomes = self._controller.reconcile(
                self._controller.queries.diverged() if request.all_diverged else named,
                dry_run=request.dry_run,
                reason=reason,
                requested_by=requested_by,
                now_s=self._clock(),
                plans=plans,
            )
        return pb.ReconcileResponse(outcomes=[outcome_to(outcome) for outcome in outcomes])

    def list_jobs(
        self, request: pb.ListJobsRequest, _: grpc.ServicerContext
    ) -> pb.ListJobsResponse:
        """The newest jobs."""
        state = _parse_filter(JobState, request.state)
        with self._lock:
            jobs = self._controller.jobs(state, min(request.limit or _PAGE_MAX, _PAGE_MAX))
            return pb.ListJobsResponse(jobs=[self._job_to(job, brief=True) for job in jobs])

    def get_job(self, request: pb.GetJobRequest, _: grpc.ServicerContext) -> pb.Job:
        """One job with its evidence."""
        with self._lock:
            job_id = self._controller.job_id_of(request.job_id)
            return self._job_to(self._controller.job(job_id))

    def cancel_job(self, request: pb.CancelJobRequest, context: grpc.ServicerContext) -> pb.Job:
        """Request the end of a job."""
        requested_by = self._requester(request.requested_by, context)
        with self._lock:
            job_id = self._controller.job_id_of(request.job_id)
            job = self._controller.cancel(job_id, self._clock(), requested_by=requested_by)
            return self._job_to(job)

    def pause_job(self, request: pb.PauseJobRequest, context: grpc.ServicerContext) -> pb.Job:
        """Stop a job until it is resumed."""
        by = self._requester(request.requested_by, context)
        reason = _check_text(request.reason, "reason")
        with self._lock:
            job_id = self._controller.job_id_of(request.job_id)
            return self._job_to(
                self._controller.pause(job_id, by=by, reason=reason, now_s=self._clock())
            )

    def resume_job(self, request: pb.ResumeJobRequest, context: grpc.ServicerContext) -> pb.Job:
        """Let a paused job go on."""
        by = self._requester(request.requested_by, context)
        with self._lock:
            job_id = self._controller.job_id_of(request.job_id)
            return self._job_to(self._controller.resume(job_id, by=by, now_s=self._clock()))

    def throttle_job(self, request: pb.ThrottleJobRequest, context: grpc.ServicerContext) -> pb.Job:
        """Set limits of a job."""
        limits = ThrottleRequested(
            self._requester(request.requested_by, context),
            request.bytes_per_second if request.HasField("bytes_per_second") else None,
            request.containers_max if request.HasField("containers_max") else None,
        )
        with self._lock:
            job_id = self._controller.job_id_of(request.job_id)
            return self._job_to(self._controller.throttle(job_id, limits, self._clock()))

    def list_datanodes(
        self, request: pb.ListDatanodesRequest, _: grpc.ServicerContext
    ) -> pb.ListDatanodesResponse:
        """All known datanodes and their liveness."""
        with self._lock:
            statuses = self._controller.queries.datanodes(self._clock())
        return pb.ListDatanodesResponse(
            datanodes=[status_to(status) for status in statuses],
        )

    def scan(self, request: pb.ScanRequest, context: grpc.ServicerContext) -> pb.ScanResponse:
        """Order scans of the live replicas."""
        container_ids = _container_ids(request.container_ids, IDS_MAX)
        requested_by = self._requester(request.requested_by, context)
        with self._lock:
            unknown, commands = self._controller.scan(container_ids, requested_by=requested_by)
        return pb.ScanResponse(unknown_container_ids=unknown, commands=commands)

    def status(self) -> ControllerStatus:
        """What is wrong, as a client gets it."""
        return controller_status_from(self._status())

    def get_status(self, _: pb.GetStatusRequest, __: grpc.ServicerContext) -> pb.GetStatusResponse:
        """What is wrong, in one answer."""
        return self._status()

    def _status(self) -> pb.GetStatusResponse:
        with self._lock:
            now_s, queries = self._clock(), self._controller.queries
            return status_response_to(
                queries.gauges(now_s),
                queries.job_counts(),
                self._limits(),
                unserved=queries.unserved(_UNSERVED_MAX),
                started_age_s=now_s - self._started_s,
                fault=self._thread_health.fault(time.monotonic(), STEP_S_MAX)
                or self._controller.fault(now_s),
                automatic=queries.is_automatic,
                roles_enforced=self._access.is_enforced,
                scms=self._scms,
            )

    def _requester(self, claimed: str, context: grpc.ServicerContext) -> str:
        """Who the certificate says, or without TLS the client, marked as unproven."""
        return self._access.requester(context, _check_text(claimed, "requester"))

    def _job_to(self, job: Job, *, brief: bool = False) -> pb.Job:
        return job_to(job, self._controller.queries.compared(job.container_id), brief=brief)


class ControllerServer:
    """A running controller; `address` is where it listens, `dashboard_port` where its
    page is (0 without one), and `thread_health` knows its threads.
    """

    def __init__(self, config: ControllerConfig, config_file: Path | None = None) -> None:
        """Open the store, start a new term, and listen. The settings were read from
        `config_file`.

        Raises:
            BusyError: another controller uses the state folder, or another process the
                audit file.
            ConfigError: an address cannot be bound, or a newer version wrote the state.
            DatabaseError, DiskError: the state cannot be read or created.
        """
        self.thread_health = ThreadHealth()
        self._config, self._config_file = config, config_file
        self._limits = limits_of(config, LIVE_LIMITS, file=config_file, now_s=time.time())
        # Setting the system clock must not make all datanodes dead at once.
        self._clock = steady_clock()
        self._lock = threading.Lock()
        self._metrics = Metrics(CONTROLLER_METRICS)
        self._metrics_server: MetricsServer | None = None
        self._dashboard: DashboardServer | None = None
        self._feed: ClusterFeed | None = None
        # Durably: the store's terms must not begin anew after a power cut.
        Disk().make_folder(config.state_folder.absolute())
        self._store = SqliteJobStore(config.state_folder / "controller.db")
        self._audit: ControllerAudit | None = None
        self._upkeep: AuditUpkeep | None = None
        try:
            self._audit = ControllerAudit(config.audit_path)
            self._upkeep = AuditUpkeep(self._audit, self._metrics, PROCESS, self.thread_health)
            outbox = Outbox()
            surroundings = Surroundings(
                self._store,
                self._audit,
                self._lock,
                self._clock,
                self._metrics,
                self.thread_health,
                _PAUSE_AFTER_S,
            )
            self._controller, self._feed = make_controller(config, outbox, surroundings)
            access = self._serve(config, outbox, self._audit)
        except BaseException:
            self._close()
            raise
        self.address = self._rpc.address
        self._ticker = Ticker(
            self._controller.tick,
            self._controller.gauges,
            self._lock,
            self._clock,
            self._metrics,
            interval_s=_TICK_S,
            thread_health=self.thread_health,
        )
        self._ticker.start()
        if self._feed:
            self._feed.start()
        _log.info(
            "server_started",
            address=self.address,
            term=self._controller.term,
            roles_enforced=access.is_enforced,
        )
        self.dashboard_port = self._dashboard.port if self._dashboard else 0
        if self._dashboard:
            self.thread_health.watch(self._dashboard.thread)
            _log.info("dashboard_started", port=self.dashboard_port)

    def _serve(self, config: ControllerConfig, outbox: Outbox, audit: ControllerAudit) -> Access:
        access = Access(
            config.roles.table,
            is_enforced=config.tls is not None,
            on_refusal=audit.refused,
            metrics=self._metrics,
            names=PROCESS,
        )
        service = ControllerService(
            self._controller,
            outbox,
            self._lock,
            self._clock,
            self._metrics,
            access,
            limits=lambda: self._limits,
            thread_health=self.thread_health,
            scms=config.cluster.scms,
        )
        local = LocalController(self._controller, self._lock, self._clock, service.status)
        self._dashboard = start_dashboard(
            config.dashboard,
            local,
            fetch_cluster_trees if config.cluster.scms else None,
            tls=config.rpc_tls,
            insecure=config.insecure,
        )
        if config.metrics:
            host, port = split_address(config.metrics)
            self._metrics_server = MetricsServer(self._metrics, host, port)
        self._rpc = start_server(
            config.listen,
            [service.register],
            tls=config.rpc_tls,
            insecure=config.insecure,
            access=access,
        )
        return access

    def reload(self, config: ControllerConfig) -> None:
        """Take over the limits of these settings; the others need a restart."""
        before = self._limits
        after = limits_of(
            config, LIVE_LIMITS, file=self._config_file, now_s=time.time(), earlier=before
        )
        with self._lock:
            self._limits = after
            self._controller.change_limits(
                orders_per_datanode=config.orders_per_datanode,
                automatic_jobs=config.automatic.jobs_max,
            )
        log_reload(_log, before, after, other_changes(self._config, config, LIVE_LIMITS))

    def stop(self) -> None:
        """Stop serving, wait for the running tick, and close the store."""
        self._rpc.stop()
        self._ticker.stop()
        self._close()

    def _close(self) -> None:
        if self._dashboard:
            self._dashboard.close()
        if self._metrics_server:
            self._metrics_server.close()
        if self._feed:
            self._feed.close()
        if self._upkeep:
            self._upkeep.stop()
        if self._audit:
            self._audit.close()
        self._store.close()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _container_ids(numbers: Sequence[int], limit: int) -> list[ContainerId]:
    if len(numbers) > limit:
        raise UsageError(f"{len(numbers)} container IDs in one request; the limit is {limit}")
    return [container_id_from(number) for number in numbers]


def _parse_filter(values: type[E], name: str) -> E | None:
    if not name:
        return None
    try:
        return values(name)
    except ValueError as error:
        known = ", ".join(str(value.value) for value in values)
        raise UsageError(f"{name[:TEXT_CHARACTERS_MAX]!r} is not one of {known}") from error


def _check_text(text: str, what: str) -> str:
    if len(text) > TEXT_CHARACTERS_MAX or not all(c.isprintable() for c in text):
        raise UsageError(f"the {what} must be at most {TEXT_CHARACTERS_MAX} printable characters")
    return text
