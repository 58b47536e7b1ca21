"""The agent of one datanode: it starts and stops scanners, server, heartbeats, jobs.

A volume that cannot be opened is reported and left out. At least one must open.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dnagent.config import EXTRA_HINT, LIVE_LIMITS, AgentConfig, ScanSettings, VolumeSettings
from dnagent.events import AGENT_EVENTS
from dnagent.heartbeat import (
    CancelCommand,
    Command,
    HeartbeatSender,
    JobReport,
    PeerAddress,
    ReconcileCommand,
    ScanCommand,
    ThrottleCommand,
)
from dnagent.incarnation import next_incarnation
from dnagent.jobs import Jobs
from dnagent.messages import HeartbeatClient
from dnagent.metrics import AGENT_METRICS, PROCESS
from dnagent.plans import RepairPlans
from dnagent.ports import AgentStatus, ScanReport, VolumeStatus
from dnagent.repair_server import RepairService
from dnagent.scanner import Scanner, ScanPace, scan_coverage
from dnagent.server import AgentService
from dnagent.store import ReplicaStore
from dnagent.undo_jobs import UndoJobs
from dnagent.volumes import ManagedVolume
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId
from ozone.datanode import SERVICE as OZONE_SERVICE
from ozone.datanode import XceiverService
from ozone.errors import VolumeError
from ozone.mapped import MappedReader
from ozone.site import SECURED_HINT
from ozone.volume import Hold, open_volume
from repair.audit import AuditLog
from repair.peers import AgentPeer
from repair.ports import Peer
from repair.runner import Runner
from runtime.access import Access
from runtime.audit_upkeep import AuditUpkeep
from runtime.disk import Disk
from runtime.errors import BusyError, ConfigError, InternalError, OperationInterruptedError
from runtime.folder_lock import FolderLock
from runtime.guard import ThreadGuard
from runtime.live_limits import limits_of, log_reload, other_changes
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, MetricsServer
from runtime.rate_limit import Clock, RateLimiter, RateMeter, SystemClock, steady_clock
from runtime.read_limits import ReadLimits
from runtime.roles import Identity, Role
from runtime.rpc import open_channel, start_server
from runtime.setting_values import split_address
from runtime.thread_health import STEP_S_MAX, ThreadHealth
from runtime.tls_files import FAULT
from runtime.tls_renewal import RenewableTls

# The interval of maintenance; within it changes by the owner of a volume are noticed.
_REFRESH_S = 60.0
# A scan occupies a server thread until it ends; the other threads are for reads.
_SCAN_CALLS_MAX = 8
# Long enough for a write and its sync, but not for a call to a peer that hangs.
_INTERRUPT_S = 30.0
_POLL_S = 0.1
_SECURED_FAULT = "the Ozone cluster is secured: a datanode sent a token"
_REPAIR_OFF_HINT = "Repair is off, so the volume is opened read-only. Set enabled in [repair]."
# Requests to peers at once, over all jobs: their threads start when they are needed.
_FETCHES_MAX = 64
_LIMIT_METRICS = {
    "scan.bytes_per_second": "dnagent_scan_limit_bytes_per_second",
    "scan.on_demand_bytes_per_second": "dnagent_scan_on_demand_limit_bytes_per_second",
    "serve.bytes_per_second": "dnagent_serve_limit_bytes_per_second",
    "repair.bytes_per_second": "dnagent_repair_limit_bytes_per_second",
    "repair.reconciliations_max": "dnagent_reconciliations_limit",
}
# Calls of agents and of the command line, and those of Ozone's datanodes.
_RPC_THREADS, _OZONE_THREADS = 32, 16


@dataclass(frozen=True, slots=True)
class FailedVolume:
    """A volume that could not be opened."""

    settings: VolumeSettings
    error: ReconcileError


class Agent:
    """One agent. `stop` ends everything that `start` started."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        config_file: Path | None = None,
        refresh_s: float = _REFRESH_S,
        clock: Clock | None = None,
    ) -> None:
        """The settings were read from `config_file`. `refresh_s` is the interval of
        maintenance.
        """
        self._config = config
        self._config_file = config_file
        self._limits = limits_of(config, LIVE_LIMITS, file=config_file, now_s=time.time())
        clock = self._clock = clock or SystemClock()
        self._steady_s = steady_clock(lambda: clock.now_ms() / 1000, clock.monotonic_s)
        self._repair_meter = RateMeter(clock)
        self._refresh_s = refresh_s
        self._disk = Disk()
        self._log = get_logger("agent", AGENT_EVENTS)
        self._stop = threading.Event()
        self._repair_limiter = RateLimiter(config.repair.bytes_per_second, clock, self._stop.wait)
        self._serve_limiter = RateLimiter(config.serve.bytes_per_second, clock, self._stop.wait)
        # Of the scans of jobs, and of exports.
        self._scan_limiters = [
            RateLimiter(config.scan.bytes_per_second, clock, self._stop.wait) for _ in range(2)
        ]
        self._stack = ExitStack()
        self._failed: list[FailedVolume] = []
        self._last_errors: dict[str, str] = {}
        self._duplicates: set[ContainerId] = set()
        self._scanners: dict[str, Scanner] = {}
        self._heartbeats: HeartbeatSender | None = None
        self._scan_calls = threading.Semaphore(_SCAN_CALLS_MAX)
        self.thread_health = ThreadHealth()
        self.metrics = Metrics(AGENT_METRICS)
        self._tls: RenewableTls | None = None
        self._has_seen_token = False
        self.datanode_id = PeerId("")
        self.address = ""

    def start(self) -> None:
        """Open the volumes and start all parts. After an error all parts are stopped.

        Raises:
            BusyError: another process uses the state folder.
            ReconcileError: no volume can be opened, or an address cannot be bound.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all parts in reverse order. Running scans and repairs are interrupted,
        and leave a consistent state.
        """
        self._stop.set()
        self._stack.close()

    def scan(self, container_id: ContainerId, cancelled: Callable[[], bool]) -> ScanReport:
        """Scan a container now (ScanService.scan)."""
        if not self._scan_calls.acquire(blocking=False):
            raise BusyError(
                f"{_SCAN_CALLS_MAX} callers are already waiting for scans", limit=_SCAN_CALLS_MAX
            )
        try:
            future = self._scanner_of(container_id).request(container_id, ignore_gap=True)
            while not cancelled():
                try:
                    return future.result(timeout=_POLL_S)
                except FutureTimeoutError:
                    continue
            raise OperationInterruptedError(
                "the caller no longer waits for this scan", container_id=container_id
            )
        finally:
            self._scan_calls.release()

    def reload(self, config: AgentConfig) -> None:
        """Take over the limits of these settings; the others need a restart. Nothing
        that runs is interrupted.
        """
        before = self._limits
        self._limits = limits_of(
            config, LIVE_LIMITS, file=self._config_file, now_s=time.time(), earlier=before
        )
        self._repair_limiter.change(config.repair.bytes_per_second)
        self._serve_limiter.change(config.serve.bytes_per_second)
        for limited in self._scan_limiters:
            limited.change(config.scan.bytes_per_second)
        for scanner in self._scanners.values():
            scanner.limit(_pace_of(config.scan))
        self._jobs.set_running_max(config.repair.reconciliations_max)
        self._publish_limits()
        others = other_changes(self._config, config, LIVE_LIMITS)
        log_reload(self._log, before, self._limits, others)

    def schedule(self, container_id: ContainerId) -> None:
        """Request the build of a missing tree (ScanService.schedule)."""
        self._scanner_of(container_id).wake()

    def status(self) -> AgentStatus:
        """The current status (StatusSource.status)."""
        volumes = []
        for volume in self._store.volumes:
            scanner = self._scanners[volume.name]
            try:
                coverage = scan_coverage(volume.candidates(), self._clock.now_ms())
            except ReconcileError:
                # Its error is shown: what was read once says nothing of a failed disk.
                coverage = None, 0
            volumes.append(
                VolumeStatus(
                    path=volume.name,
                    storage_id=volume.volume.storage_id,
                    hold=_hold_label(volume.volume.hold),
                    containers=len(volume.replicas()),
                    bytes_scanned=scanner.bytes_scanned,
                    containers_scanned=scanner.containers_scanned,
                    last_error=self._last_errors.get(volume.name) or scanner.last_error,
                    scan_bytes_per_second=scanner.bytes_per_second,
                    full_scan_age_s=coverage[0],
                    never_scanned=coverage[1],
                )
            )
        for failed in self._failed:
            text = f"{failed.error.code}: {failed.error.message}"
            path = str(failed.settings.path)
            hold = _hold_label(self._config.hold_of(failed.settings))
            volumes.append(VolumeStatus(path, "", hold, 0, last_error=text))
        return AgentStatus(
            self.datanode_id,
            self._config.repair.enabled,
            tuple(volumes),
            self._jobs.status(),
            roles_enforced=self._config.tls is not None,
            limits=self._limits,
            repair_bytes_per_second=self._repair_meter.bytes_per_second(),
            fault=self.thread_health.fault(self._clock.monotonic_s(), STEP_S_MAX)
            or (_SECURED_FAULT if self._has_seen_token else ""),
        )

    def _start(self) -> None:
        config = self._config
        # One for server, heartbeats and peers: a job that begins amid a renewal goes on
        # with the files that all use.
        self._tls = RenewableTls(config.rpc_tls) if config.rpc_tls else None
        folder = config.state_folder.absolute()
        self._disk.make_folder(folder)
        lock = FolderLock(folder, "treefold agent run")
        self._stack.callback(lock.release)
        self._disk.remove_temporaries(folder)
        audit = self._audit = AuditLog(config.audit_path)
        self._stack.callback(audit.close)
        upkeep = AuditUpkeep(audit, self.metrics, PROCESS, self.thread_health)
        self._stack.callback(upkeep.stop)
        volumes = self._open_volumes()
        self.datanode_id = PeerId(volumes[0].volume.datanode_id)
        repair = config.repair
        runner = Runner(
            self.datanode_id,
            threads_max=_FETCHES_MAX,
            audit=audit.write,
            reserve=self._reserve,
        )
        self._store = ReplicaStore(
            volumes,
            repair_enabled=repair.enabled,
            interrupt=lambda container_id: runner.interrupt(
                container_id, "the container is being deleted", timeout_s=_INTERRUPT_S
            ),
        )
        self._start_jobs(runner)
        for volume in volumes:
            scanner = Scanner(
                volume,
                _pace_of(config.scan),
                metrics=self.metrics,
                on_change=self._replica_changed,
                thread_health=self.thread_health,
            )
            self._scanners[volume.name] = scanner
        self._start_server()
        self._start_heartbeats()
        for scanner in self._scanners.values():
            scanner.start()
            self._stack.callback(scanner.stop)
        if config.export.to is not None:
            self._start_exports(config.export.to)
        maintenance = threading.Thread(target=self._run_maintenance, name="upkeep")
        self.thread_health.watch(maintenance)
        maintenance.start()
        self._stack.callback(maintenance.join)
        if config.ozone_conf is None:
            text = "whether the Ozone cluster is secured is not known: set ozone_conf"
            self._log.warning("cluster_security_unknown", hint=text)
        self._log.info(
            "process_started",
            datanode_id=self.datanode_id,
            address=self.address,
            volumes=len(volumes),
        )

    def _start_jobs(self, runner: Runner) -> None:
        repair = self._config.repair
        self._plans = RepairPlans(
            self.datanode_id,
            self._store,
            connect=self._connect,
            return_to_service=repair.return_to_closed,
            reserve=self._reserve,
        )
        self._undos = UndoJobs(
            self.datanode_id,
            self._store,
            runner,
            connect=self._connect,
            audit=self._audit,
            reserve=self._reserve,
        )
        self._jobs = Jobs(
            runner,
            self._store,
            connect=self._connect,
            running_max=repair.reconciliations_max,
            fetches_max=repair.fetches_max,
            return_to_service=repair.return_to_closed,
            on_scan_bytes=self._scan_limiters[0].take,
            on_end=self._job_ended,
            audit=self._audit,
            plan_of=self._plans.get,
            metrics=self.metrics,
            limit_bytes_per_second=lambda: self._repair_limiter.bytes_per_second,
        )
        self._publish_limits()
        self._stack.callback(self._jobs.close)

    def _open_volumes(self) -> list[ManagedVolume]:
        volumes: list[ManagedVolume] = []
        for settings in self._config.volumes:
            try:
                volumes.append(self._open_volume(settings, volumes))
            except ReconcileError as error:
                self._failed.append(FailedVolume(settings, error))
                self._log.error(
                    "volume_failed", **{**error_fields(error), "volume": str(settings.path)}
                )
        self.metrics.set("dnagent_volumes_failed", len(self._failed))
        if not volumes:
            raise self._failed[0].error
        return volumes

    def _open_volume(self, settings: VolumeSettings, volumes: list[ManagedVolume]) -> ManagedVolume:
        config = self._config
        volume = open_volume(
            settings.path,
            hold=config.hold_of(settings),
            state_folder=config.state_folder,
            disk=self._disk,
            database_volumes=config.database_volumes,
        )
        try:
            if volumes and volume.datanode_id != volumes[0].volume.datanode_id:
                text = (
                    f"{volume.root} belongs to datanode {volume.datanode_id}, {volumes[0].name} to"
                    " another"
                )
                raise VolumeError(text, reason="datanode_differs", path=str(volume.root))
            opened = ManagedVolume(
                volume,
                self._disk,
                undo_bytes=config.repair.undo_bytes,
                mapped=MappedReader() if self._config.scan.mapped else None,
                on_deleted=self._audit.delete,
                on_returned=self._audit.return_to_service,
            )
        except BaseException:
            volume.close()
            raise
        self._stack.callback(opened.close)
        containers = len(opened.replicas())
        self._log.info(
            "volume_opened",
            volume=opened.name,
            hold=_hold_label(volume.hold),
            containers=containers,
        )
        if volume.hold is not settings.hold:
            self._log.warning("owner_hold_unused", volume=opened.name, hint=_REPAIR_OFF_HINT)
        return opened

    def _start_server(self) -> None:
        config = self._config
        access = Access(
            config.roles.table,
            is_enforced=config.tls is not None,
            on_refusal=self._audit.refused,
            metrics=self.metrics,
            names=PROCESS,
        )
        limits = ReadLimits(self._serve_limiter, config.serve.client_bytes_max)
        services = [
            AgentService(self._store, self, self, limits=limits).register,
            RepairService(self._plans, self._undos, access).register,
            XceiverService(self._store, self._note_token, limits=limits).register,
        ]
        server = start_server(
            config.listen,
            services,
            tls=self._tls,
            insecure=config.insecure,
            access=access,
            threads=_RPC_THREADS,
            # Whoever holds all of its threads keeps no agent from being answered.
            own_threads={OZONE_SERVICE: _OZONE_THREADS},
            share_threads=True,
            calls_max=128,
        )
        self._stack.callback(server.stop)
        self.address = server.address
        if config.metrics:
            host, port = split_address(config.metrics)
            page = MetricsServer(self.metrics, host, port)
            self._stack.callback(page.close)
        self._log.info("server_started", address=self.address, roles_enforced=access.is_enforced)

    def _start_heartbeats(self) -> None:
        config = self._config
        if config.controller is None:
            return
        self._heartbeats = HeartbeatSender(
            HeartbeatClient(
                config.controller,
                datanode_id=self.datanode_id,
                advertised=config.advertised or self.address,
                incarnation=next_incarnation(
                    config.state_folder.absolute(), self._disk, time.time_ns() // 1_000_000
                ),
                returns_to_service=config.repair.enabled and config.repair.return_to_closed,
                tls=self._tls,
                insecure=config.insecure,
            ),
            interval_s=config.heartbeat_interval_s,
            replicas=self._store.replicas,
            running=self._jobs.running,
            on_command=self._execute,
            metrics=self.metrics,
            thread_health=self.thread_health,
        )
        self._heartbeats.start()
        self._stack.callback(self._heartbeats.stop)

    def _start_exports(self, to: str) -> None:
        # Imported here: it needs pyarrow, an optional dependency.
        try:
            from dnagent.export_schedule import scheduled_export
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            raise ConfigError(f"export.to: {missing} is not installed", hint=EXTRA_HINT) from error

        settings = self._config.export
        exports = scheduled_export(
            to,
            [volume.survey() for volume in self._store.volumes],
            [(str(failed.settings.path), failed.error) for failed in self._failed],
            source=settings.source,
            interval_s=settings.interval_s,
            audit_file=self._config.audit_path,
            disk=self._disk,
            metrics=self.metrics,
            on_bytes=self._scan_limiters[1].take,
        )
        self.thread_health.watch(exports.thread)
        exports.start()
        self._stack.callback(exports.stop)

    def _reserve(self, length_bytes: int) -> None:
        self._repair_limiter.take(length_bytes)
        self._repair_meter.count(length_bytes)

    def _note_token(self) -> None:
        if not self._has_seen_token:
            self._has_seen_token = True
            self._log.error("cluster_secured", error=_SECURED_FAULT, hint=SECURED_HINT)

    def _publish_limits(self) -> None:
        values = {limit.name: limit.value for limit in self._limits}
        for name, metric in _LIMIT_METRICS.items():
            self.metrics.set(metric, values[name])

    def _connect(self, peer: PeerAddress) -> Peer:
        channel = open_channel(
            peer.address,
            tls=self._tls,
            insecure=self._config.insecure,
            server=Identity(Role.DATANODE, peer.peer),
        )
        logged = set[object]()

        def explain(error: ReconcileError) -> ReconcileError:
            # Imported here: it is needed only where a connection failed.
            from runtime.tls_faults import named_fault

            named = named_fault(error, peer.address, self._config.rpc_tls)
            fault = named.facts.get(FAULT)
            # Once for each job, not for each try.
            if fault and fault not in logged:
                logged.add(fault)
                self._log.warning("peer_unreachable", peer=peer.peer, **error_fields(named))
            return named

        return AgentPeer(peer.peer, channel, peer.address, explain=explain)

    def _execute(self, command: Command) -> None:
        match command:
            case ReconcileCommand():
                self._jobs.submit(command)
            case CancelCommand():
                self._jobs.cancel(command)
            case ThrottleCommand(job_id, bytes_per_second):
                self._jobs.throttle(job_id, bytes_per_second)
            case ScanCommand(container_id):
                try:
                    self._scanner_of(container_id).request(container_id, ignore_gap=True)
                except ReconcileError as error:
                    self._log.warning(
                        "command_dropped", **{**error_fields(error), "container_id": container_id}
                    )

    def _job_ended(self, progress: JobReport) -> None:
        if self._heartbeats is not None:
            self._heartbeats.report_end(progress)

    def _replica_changed(self, _: ContainerId) -> None:
        if self._heartbeats is not None:
            self._heartbeats.wake()

    def _scanner_of(self, container_id: ContainerId) -> Scanner:
        return self._scanners[self._store.volume_of(container_id).name]

    def _run_maintenance(self) -> None:
        """Regularly reload read-only volumes, delete undo copies that have expired, and
        look for containers on several volumes.
        """
        older_than_s = self._config.repair.undo_days * 86_400.0
        guard = ThreadGuard("upkeep", self.metrics, PROCESS.thread_failures)
        while True:
            for volume in self._store.volumes:
                try:
                    with guard.named_errors():
                        self._maintain(volume, older_than_s)
                    self._last_errors.pop(volume.name, None)
                except ReconcileError as error:
                    self._last_errors[volume.name] = f"{error.code}: {error.message}"
                    self._log.error(
                        "volume_failed", **{**error_fields(error), "volume": volume.name}
                    )
            with suppress(InternalError), guard.named_errors():
                self._report_duplicates()
            if self._stop.wait(self._refresh_s):
                return

    def _report_duplicates(self) -> None:
        found = self._store.duplicates()
        self.metrics.set("dnagent_containers_duplicated", len(found))
        # Logged once, not at every look.
        for container_id in sorted(found.keys() - self._duplicates):
            counts, *others = found[container_id]
            self._log.error(
                "container_duplicated", container_id=container_id, volume=counts, others=others
            )
        self._duplicates = set(found)

    def _maintain(self, volume: ManagedVolume, older_than_s: float) -> None:
        try:
            if volume.volume.hold is Hold.READ_ONLY:
                volume.refresh()
                self._scanners[volume.name].wake()
            freed = volume.undo.clean(older_than_s=older_than_s, now_s=self._steady_s())
            if freed:
                self._log.info("undo_pruned", volume=volume.name, length_bytes=freed)
        finally:
            self.metrics.set("dnagent_containers", len(volume.replicas()), volume=volume.name)
            self.metrics.set("dnagent_undo_bytes", volume.undo.used_bytes, volume=volume.name)


def _pace_of(scan: ScanSettings) -> ScanPace:
    interval_ms, min_gap_ms = round(scan.interval_s * 1000), round(scan.min_gap_s * 1000)
    rates = scan.bytes_per_second, scan.on_demand_bytes_per_second
    return ScanPace(scan.enabled, interval_ms, min_gap_ms, *rates)


def _hold_label(hold: Hold) -> str:
    return hold.value.replace("_", "-")
