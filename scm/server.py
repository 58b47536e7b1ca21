"""The controller behind gRPC: one lock, one clock, one thread that lets time go by.

Agents call Heartbeat: what they bring goes into the controller, what waits for them in
the outbox goes back. An order stays in the outbox until its agent has confirmed it, so
that a lost answer loses nothing.
"""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from itertools import islice
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos import controller_pb2 as pb
from runtime.disk import Disk
from runtime.errors import BusyError, UsageError
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, MetricsServer
from runtime.rpc import start_server
from scm.config import ControllerConfig
from scm.controller import Controller
from scm.eligibility import ContainerState
from scm.events import CONTROLLER_EVENTS
from scm.job_store import SqliteJobStore
from scm.jobs import JobId, JobState
from scm.messages import (
    command_to,
    container_id_from,
    container_to,
    heartbeat_from,
    job_to,
    outcome_to,
    status_to,
)
from scm.metrics import CONTROLLER_METRICS
from scm.policy import RootComparison
from scm.ports import AnyOrder, JobStore, ScanOrder

SERVICE = "treefold.controller.v1.Controller"
# Scans of one datanode that it did not confirm yet. Other orders are few: so many a
# datanode as it has slots.
_OUTBOX_SCANS_MAX = 10_000
# Commands in one answer; the rest comes with the next heartbeats.
_COMMANDS_MAX = 1_000
# Datanodes of the largest clusters number in the thousands.
DATANODES_MAX = 20_000
# Containers or jobs in one answer, and IDs in one request: keeps each far below the
# limit of a message.
_PAGE_MAX = 1_000
IDS_MAX = 10_000
_TICK_S = 1.0
# A reason is a sentence; a longer one is a mistake.
TEXT_CHARACTERS_MAX = 1_000

E = TypeVar("E", bound=Enum)


class Outbox:
    """Orders that wait for their datanodes' heartbeats. Not thread-safe: its owner
    holds a lock.
    """

    def __init__(self) -> None:
        self._waiting: dict[PeerId, dict[str, AnyOrder]] = {}

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

    def waiting(self, peer: PeerId) -> Sequence[AnyOrder]:
        """What to tell this datanode now, oldest first; it stays until withdrawn."""
        return list(islice(self._waiting.get(peer, {}).values(), _COMMANDS_MAX))


class SoleLeader:
    """A controller that is alone leads from its start, in a term that was never given
    before.
    """

    def __init__(self, store: JobStore) -> None:
        self._term = store.next_term()

    def term(self) -> int | None:
        """The term given at the start."""
        return self._term


def _steady_clock() -> Callable[[], float]:
    """Seconds since the epoch that never jump: a clock that is set must not make all
    datanodes dead at once.
    """
    offset_s = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset_s


class ControllerService:
    """The Controller service: turns messages into calls under one lock."""

    def __init__(
        self,
        controller: Controller,
        outbox: Outbox,
        lock: threading.Lock,
        clock: Callable[[], float],
        metrics: Metrics,
    ) -> None:
        self._controller = controller
        self._outbox = outbox
        self._lock = lock
        self._clock = clock
        self._metrics = metrics

    def register(self, server: grpc.Server) -> None:
        """Serve on this server."""
        methods: tuple[tuple[str, Callable[..., Message], type[Message]], ...] = (
            ("Heartbeat", self.heartbeat, pb.HeartbeatRequest),
            ("ListContainers", self.list_containers, pb.ListContainersRequest),
            ("GetContainers", self.get_containers, pb.GetContainersRequest),
            ("Reconcile", self.reconcile, pb.ReconcileRequest),
            ("ListJobs", self.list_jobs, pb.ListJobsRequest),
            ("GetJob", self.get_job, pb.GetJobRequest),
            ("CancelJob", self.cancel_job, pb.CancelJobRequest),
            ("ListDatanodes", self.list_datanodes, pb.ListDatanodesRequest),
            ("Scan", self.scan, pb.ScanRequest),
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, request.FromString, _serialised)
            for name, method, request in methods
        }
        assert set(handlers) == set(pb.DESCRIPTOR.services_by_name["Controller"].methods_by_name)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def heartbeat(
        self, request: pb.HeartbeatRequest, _: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        """Take in a heartbeat; the answer carries the waiting commands."""
        heartbeat = heartbeat_from(request)
        peer = heartbeat.datanode.peer
        self._metrics.count("scm_heartbeats_total")
        with self._lock:
            if (
                self._controller.datanode(peer) is None
                and self._controller.datanodes_known >= DATANODES_MAX
            ):
                raise BusyError(f"{DATANODES_MAX} datanodes are known already")
            observed = self._controller.heartbeat(heartbeat, self._clock())
            term = self._controller.term
            # In the term of now: agents take for void what waited here while another
            # led.
            orders = (
                [replace(order, term=term) for order in self._outbox.waiting(peer)]
                if term is not None
                else []
            )
        return pb.HeartbeatResponse(
            commands=[command_to(order) for order in orders],
            full_report_wanted=observed.full_report_wanted,
            term=term or 0,
        )

    def list_containers(
        self, request: pb.ListContainersRequest, _: grpc.ServicerContext
    ) -> pb.ListContainersResponse:
        """A page of containers, by state and comparison."""
        state = _chosen(ContainerState, request.state)
        comparison = _chosen(RootComparison, request.comparison)
        limit = min(request.limit or _PAGE_MAX, _PAGE_MAX)
        with self._lock:
            views, more = self._controller.containers(
                state=state, comparison=comparison, after=request.after_container_id, limit=limit
            )
            now_s = self._clock()
            return pb.ListContainersResponse(
                containers=[container_to(view, self._controller, now_s) for view in views],
                more=more,
            )

    def get_containers(
        self, request: pb.GetContainersRequest, _: grpc.ServicerContext
    ) -> pb.GetContainersResponse:
        """The containers asked for, as far as they are known."""
        answer = pb.GetContainersResponse()
        with self._lock:
            now_s = self._clock()
            for container_id in _container_ids(request.container_ids, _PAGE_MAX):
                view = self._controller.container(container_id)
                if view is None:
                    answer.unknown_container_ids.append(container_id)
                else:
                    answer.containers.append(container_to(view, self._controller, now_s))
        return answer

    def reconcile(
        self, request: pb.ReconcileRequest, _: grpc.ServicerContext
    ) -> pb.ReconcileResponse:
        """Start jobs, or say with a dry run which would start."""
        if request.all_diverged and request.container_ids:
            raise UsageError("either container IDs or all diverged ones, not both")
        named = _container_ids(request.container_ids, IDS_MAX)
        reason, requested_by = (
            _sentence(request.reason, "reason"),
            _sentence(request.requested_by, "requester"),
        )
        with self._lock:
            outcomes = self._controller.reconcile(
                self._controller.diverged() if request.all_diverged else named,
                dry_run=request.dry_run,
                reason=reason,
                requested_by=requested_by,
                now_s=self._clock(),
            )
        return pb.ReconcileResponse(outcomes=[outcome_to(outcome) for outcome in outcomes])

    def list_jobs(
        self, request: pb.ListJobsRequest, _: grpc.ServicerContext
    ) -> pb.ListJobsResponse:
        """The newest jobs."""
        state = _chosen(JobState, request.state)
        with self._lock:
            jobs = self._controller.jobs(state, min(request.limit or _PAGE_MAX, _PAGE_MAX))
        return pb.ListJobsResponse(jobs=[job_to(job, brief=True) for job in jobs])

    def get_job(self, request: pb.GetJobRequest, _: grpc.ServicerContext) -> pb.Job:
        """One job with its evidence."""
        with self._lock:
            return job_to(self._controller.job(JobId(request.job_id)))

    def cancel_job(self, request: pb.CancelJobRequest, _: grpc.ServicerContext) -> pb.Job:
        """Ask a job to end."""
        with self._lock:
            return job_to(self._controller.cancel(JobId(request.job_id), self._clock()))

    def list_datanodes(
        self, request: pb.ListDatanodesRequest, _: grpc.ServicerContext
    ) -> pb.ListDatanodesResponse:
        """All datanodes and how live they are."""
        with self._lock:
            statuses = self._controller.datanodes(self._clock())
        return pb.ListDatanodesResponse(datanodes=[status_to(status) for status in statuses])

    def scan(self, request: pb.ScanRequest, _: grpc.ServicerContext) -> pb.ScanResponse:
        """Order scans of the live replicas."""
        container_ids = _container_ids(request.container_ids, IDS_MAX)
        with self._lock:
            unknown, commands = self._controller.scan(container_ids)
        return pb.ScanResponse(unknown_container_ids=unknown, commands=commands)


class ControllerServer:
    """A controller that listens; `address` is where."""

    def __init__(self, config: ControllerConfig) -> None:
        """Open the store, take the lead, listen.

        Raises:
            BusyError: another controller has the state folder.
            ConfigError: an address cannot be listened on, or the state is of a newer
                version. DatabaseError, DiskError: the state cannot be read or made.
        """
        self._log = get_logger("scm", CONTROLLER_EVENTS)
        self._clock = _steady_clock()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._metrics = Metrics(CONTROLLER_METRICS)
        self._metrics_server: MetricsServer | None = None
        # Durably: the store's terms must not begin anew after a power cut.
        Disk().make_folder(config.state_folder.absolute())
        self._store = SqliteJobStore(config.state_folder / "controller.db")
        try:
            outbox = Outbox()
            self._controller = Controller(
                rules=config.rules,
                store=self._store,
                sink=outbox,
                leadership=SoleLeader(self._store),
                new_job_id=lambda: JobId(uuid.uuid4().hex[:12]),
                now_s=self._clock(),
                on_finished=lambda job: self._metrics.count(
                    "scm_jobs_finished_total", state=job.state.value
                ),
            )
            service = ControllerService(
                self._controller, outbox, self._lock, self._clock, self._metrics
            )
            if config.metrics:
                host, _, port = config.metrics.rpartition(":")
                self._metrics_server = MetricsServer(self._metrics, host.strip("[]"), int(port))
            self._rpc = start_server(
                config.listen,
                [service.register],
                tls=config.rpc_tls,
                insecure=config.insecure,
            )
        except BaseException:
            self._close()
            raise
        self.address = self._rpc.address
        self._ticker = threading.Thread(target=self._tick, name="ticker")
        self._ticker.start()
        self._log.info("server_started", address=self.address, term=self._controller.term)

    def stop(self) -> None:
        """Take no more calls, put down what is known, give up the state."""
        self._rpc.stop()
        self._stopping.set()
        self._ticker.join()
        self._close()

    def _tick(self) -> None:
        while not self._stopping.wait(_TICK_S):
            with self._lock:
                try:
                    self._controller.tick(self._clock())
                except ReconcileError as error:
                    # Nothing is lost: what could not be stored is tried again with the
                    # next tick.
                    self._log.error("request_failed", **error_fields(error))
                figures = self._controller.figures()
            for name, value in figures.items():
                self._metrics.set(name, value)

    def _close(self) -> None:
        if self._metrics_server:
            self._metrics_server.close()
        self._store.close()


def _serialised(message: Message) -> bytes:
    return message.SerializeToString()


def _container_ids(numbers: Sequence[int], limit: int) -> list[ContainerId]:
    if len(numbers) > limit:
        raise UsageError(f"{len(numbers)} container IDs in one request, {limit} at most")
    return [container_id_from(number) for number in numbers]


def _chosen(values: type[E], name: str) -> E | None:
    if not name:
        return None
    try:
        return values(name)
    except ValueError as error:
        known = ", ".join(str(value.value) for value in values)
        raise UsageError(f"{name[:TEXT_CHARACTERS_MAX]!r} is none of {known}") from error


def _sentence(text: str, what: str) -> str:
    if len(text) > TEXT_CHARACTERS_MAX or not all(c.isprintable() for c in text):
        raise UsageError(f"the {what} must be at most {TEXT_CHARACTERS_MAX} printable characters")
    return text
