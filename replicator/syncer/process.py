"""A running syncer: it registers at its masters, renews its lease, and works.

One thread sends the heartbeats and does what follows from their answers; each
replication has threads of its own. Without a lease everything stops, and only then the
syncer registers again: whoever asks for a lease says by it that nothing runs.
"""

import math
import os
import socket
import threading
import time
import uuid
from contextlib import ExitStack

from merkle.errors import ReconcileError
from replicator.events import SYNCER_EVENTS
from replicator.master.client import SyncerClient
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Assignment, Caller
from replicator.replication import PolicyId
from replicator.syncer.assigned import AssignedReplication
from replicator.syncer.config import SyncerConfig
from replicator.syncer.duties import duties
from replicator.syncer.folder import folder_name, syncer_id
from replicator.syncer.gauges import Observation, SyncerGauges
from replicator.syncer.lease import LeaseLostError, LeaseTimer
from replicator.syncer.master_lease import MasterLease
from replicator.syncer.metrics import PROCESS, SYNCER_METRICS
from runtime.disk import Disk
from runtime.errors import BusyError
from runtime.folder_lock import FolderLock
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, MetricsServer
from runtime.rate_limit import SystemClock
from runtime.setting_values import split_address
from runtime.thread_health import ThreadHealth

# Of a lease, kept for requests that are on their way when it ends.
_MARGIN_SHARE = 0.25
# Before a master that refused or did not answer is asked again.
_RETRY_S = 0.5
# While something comes to its end.
_ENDING_S = 0.05
# After new orders, the master soon hears that they are carried out.
_ORDERED_S = 2.0
_ORDERED_HEARTBEAT_S = 0.25
# A replication that is not given back to this syncer by then is not expected again.
_LEFTOVER_S = 600.0
_REPLICATIONS_FOLDER = "replications"
_log = get_logger("syncer", SYNCER_EVENTS)


class _BootClock(SystemClock):
    """A clock that goes on while the machine sleeps: leases do, too."""

    def monotonic_s(self) -> float:
        """See Clock."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)


class SyncerProcess:
    """A syncer; `thread_health` knows its threads, `metrics_address` is that of its
    metrics, empty where it serves none.
    """

    def __init__(self, config: SyncerConfig) -> None:
        """Lock the state folder, and begin to ask for work.

        Raises:
            BusyError: another syncer uses the state folder (OZ-041).
            ConfigError: the metrics' address cannot be bound, a certificate cannot be
                read, or the UUID is damaged.
            DiskError: the state folder cannot be used.
        """
        self._config = config
        self.thread_health = ThreadHealth()
        self._stopping = threading.Event()
        self._metrics = Metrics(SYNCER_METRICS)
        self._gauges = SyncerGauges(self._metrics)
        self._clock = _BootClock()
        self._started_ms = self._clock.now_ms()
        self._metrics.set("syncer_start_time_seconds", self._started_ms / 1000)
        self._timer: LeaseTimer | None = None
        self._registered_s = 0.0
        self._ordered_s = -_ORDERED_S
        self._has_cleaned = False
        self._work = dict[PolicyId, AssignedReplication]()
        with ExitStack() as opened:
            disk = Disk()
            folder = config.state_folder.absolute()
            self._parent = folder / _REPLICATIONS_FOLDER
            disk.make_folder(self._parent)
            opened.callback(FolderLock(folder, "treefold syncer").release)
            self.syncer_id = syncer_id(folder, disk)
            self._client = SyncerClient(
                config.masters,
                Caller(self.syncer_id, uuid.uuid4().hex),
                tls=config.rpc_tls,
                insecure=config.insecure,
                monotonic_s=self._clock.monotonic_s,
            )
            opened.callback(self._client.close)
            self.metrics_address = ""
            if config.metrics:
                host, port = split_address(config.metrics)
                server = MetricsServer(self._metrics, host, port)
                opened.callback(server.close)
                self.metrics_address = f"{host}:{server.port}"
            guard = ThreadGuard("heartbeat", self._metrics, PROCESS.thread_failures)
            self._thread = threading.Thread(target=self._run, args=(guard,), name="heartbeat")
            self.thread_health.watch(self._thread, guard)
            self._thread.start()
            self._opened = opened.pop_all()
        _log.info("server_started", address=self.metrics_address, syncer=self.syncer_id)

    def stop(self) -> None:
        """Stop all work, give it back to the masters, and let go of the folder."""
        self._stopping.set()
        self._thread.join()
        self._opened.close()

    def _run(self, guard: ThreadGuard) -> None:
        """Send heartbeats until all has ended, whatever becomes of one."""
        while not (self._stopping.is_set() and not self._work):
            wait_s = _RETRY_S
            try:
                with guard.named_errors():
                    wait_s = self._step()
            except LeaseLostError as error:
                self._lose_lease(error)
                wait_s = 0.0
            except ReconcileError as error:
                self._metrics.count("syncer_heartbeat_failures_total")
                _log.warning("heartbeat_failed", **error_fields(error))
            self._show()
            if self._stopping.is_set():
                self._end_all(is_lost=False)
                time.sleep(min(wait_s, _ENDING_S))
            else:
                self._stopping.wait(wait_s)
        self._give_up()

    def _step(self) -> float:
        """One exchange with a master; the seconds until the next one."""
        if self._timer is not None and not self._timer.left_s():
            raise LeaseLostError("no master has renewed the lease in time")
        if self._timer is None:
            self._forget_ended()
            if self._work:
                return _ENDING_S
            return self._register()
        reports = [report for one in self._work.values() if (report := one.next_report())]
        answer = self._client.heartbeat(self._capacity(), reports)
        self._timer.renew(asked_s=answer.lease.asked_s, duration_s=answer.lease.duration_s)
        self._follow(answer.assignments)
        self._clean_leftovers()
        is_ordered = self._clock.monotonic_s() - self._ordered_s < _ORDERED_S
        return min(answer.lease.heartbeat_s, _ORDERED_HEARTBEAT_S if is_ordered else math.inf)

    def _register(self) -> float:
        try:
            lease = self._client.register(socket.gethostname(), self._started_ms, self._capacity())
        except BusyError as error:
            _log.info("heartbeat_failed", **error_fields(error))
            return _RETRY_S
        self._timer = LeaseTimer(self._clock, margin_s=_MARGIN_SHARE * lease.duration_s)
        self._timer.renew(asked_s=lease.asked_s, duration_s=lease.duration_s)
        self._registered_s = self._clock.monotonic_s()
        _log.info("syncer_registered", syncer=self.syncer_id, lease_s=lease.duration_s)
        return 0.0

    def _follow(self, assigned: tuple[Assignment, ...]) -> None:
        """Do what follows from what this syncer has."""
        due = duties(assigned, {name: one.held() for name, one in self._work.items()})
        for policy_id in due.ending:
            self._work[policy_id].stop(is_lost=True)
        for policy in due.changed:
            self._work[policy.policy_id].change(policy)
            self._ordered_s = self._clock.monotonic_s()
        if due.released:
            self._client.release(due.released)
            for policy_id, epoch in due.released:
                del self._work[policy_id]
                _log.info("replication_ended", replication=policy_id, epoch=epoch)
        if not self._stopping.is_set():
            for assignment in due.started:
                self._begin(assignment)

    def _begin(self, assignment: Assignment) -> None:
        assert self._timer is not None
        policy_id = assignment.policy.policy_id
        _log.info("replication_begun", replication=policy_id, epoch=assignment.epoch)
        guard = ThreadGuard("replication", self._metrics, PROCESS.thread_failures)
        self._work[policy_id] = AssignedReplication(
            assignment,
            MasterLease(self._client, self._timer, assignment),
            parent=self._parent,
            syncer=self.syncer_id,
            clock=self._clock,
            copies=self._config.copies,
            guard=guard,
            tls=self._config.rpc_tls,
            insecure=self._config.insecure,
        )

    def _lose_lease(self, error: LeaseLostError) -> None:
        self._metrics.count("syncer_leases_lost_total")
        _log.warning("lease_lost", **error_fields(error))
        if self._timer is not None:
            self._timer.revoke()
        self._timer = None
        self._end_all(is_lost=True)

    def _end_all(self, *, is_lost: bool) -> None:
        for one in self._work.values():
            one.stop(is_lost=is_lost)
        if is_lost or self._stopping.is_set():
            self._forget_ended()

    def _forget_ended(self) -> None:
        """With a lease that ends as a whole nothing is released alone."""
        self._work = {name: one for name, one in self._work.items() if not one.held().has_ended}

    def _give_up(self) -> None:
        try:
            self._client.release((), ends=True)
        except ReconcileError as error:
            # The lease ends by itself.
            _log.warning("heartbeat_failed", **error_fields(error))

    def _clean_leftovers(self) -> None:
        """Remove the folders of replications that went to others while this syncer was
        down. They would be read by nobody.
        """
        if self._has_cleaned or self._clock.monotonic_s() - self._registered_s < _LEFTOVER_S:
            return
        self._has_cleaned = True
        policies = (one.held().policy for one in self._work.values())
        used = {folder_name(policy.source, policy.target) for policy in policies}
        disk = Disk()
        for name in disk.names(self._parent):
            if name not in used:
                disk.remove_folder(self._parent / name)

    def _capacity(self) -> SyncerCapacity:
        found = os.statvfs(self._parent)
        return SyncerCapacity(
            self._config.replications_max, free_disk_bytes=found.f_bavail * found.f_frsize
        )

    def _show(self) -> None:
        left_s = self._timer.left_s() if self._timer is not None else 0.0
        self._metrics.set("syncer_lease_seconds", left_s)
        found = {
            name: Observation(one.report(), one.entries_taken) for name, one in self._work.items()
        }
        self._gauges.show(found, self._clock.now_ms())
