"""A running replication master: store, service, and a thread that lets time go by."""

import random
import threading
import time
from contextlib import ExitStack

from merkle.errors import ReconcileError
from replicator.events import MASTER_EVENTS
from replicator.master.audit import MasterAudit
from replicator.master.config import MasterConfig
from replicator.master.gauges import Gauges
from replicator.master.leases import is_valid
from replicator.master.master import ReplicationMaster
from replicator.master.metrics import MASTER_METRICS, PROCESS
from replicator.master.ports import MasterStore
from replicator.master.records import StoredState
from replicator.master.server import ReplicationMasterService
from replicator.master.sqlite_store import SqliteMasterStore
from replicator.master.views import MasterStatus, SyncerView
from runtime.access import Access
from runtime.audit_upkeep import AuditUpkeep
from runtime.disk import Disk
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, MetricsServer
from runtime.rpc import start_server
from runtime.setting_values import split_address
from runtime.thread_health import STEP_S_MAX, ThreadHealth

# How late at most a master sees that a lease has ended.
_TICK_S = 0.5
# Between two attempts of a decision whose records another master changed.
_PAUSE_S_MAX = 0.05
_log = get_logger("replication-master", MASTER_EVENTS)


class MasterProcess:
    """A replication master; `address` is where it listens, and `thread_health` knows
    its threads.
    """

    def __init__(self, config: MasterConfig) -> None:
        """Open the store, and listen.

        Raises:
            BusyError: another master uses the state folder, or another process the
                audit file.
            ConfigError: an address cannot be bound, or a newer version wrote the
                records.
            DatabaseError, DiskError: the records cannot be read or created.
        """
        self._config = config
        self.thread_health = ThreadHealth()
        self._stopping = threading.Event()
        self._metrics = Metrics(MASTER_METRICS)
        self._gauges = Gauges(self._metrics)
        with ExitStack() as opened:
            # Durably: what a database of a new folder acknowledged must stay.
            Disk().make_folder(config.state_folder.absolute())
            audit = MasterAudit(config.audit_path)
            opened.callback(audit.close)
            store = _open_store(config)
            opened.callback(store.close)
            self._master = ReplicationMaster(store, config.rules, time.monotonic, _pause)
            access = Access(
                config.roles.table,
                metrics=self._metrics,
                names=PROCESS,
                is_enforced=config.tls is not None,
                on_refusal=audit.refused,
            )
            self._is_enforced = access.is_enforced
            service = ReplicationMasterService(
                self._master,
                access=access,
                audit=audit,
                metrics=self._metrics,
                status=self._status,
            )
            if config.metrics:
                host, port = split_address(config.metrics)
                opened.callback(MetricsServer(self._metrics, host, port).close)
            rpc = start_server(
                config.listen,
                [service.register],
                tls=config.rpc_tls,
                insecure=config.insecure,
                access=access,
            )
            opened.callback(rpc.stop)
            self.address = rpc.address
            upkeep = AuditUpkeep(audit, self._metrics, PROCESS, self.thread_health)
            opened.callback(upkeep.stop)
            guard = ThreadGuard("ticker", self._metrics, PROCESS.thread_failures)
            self._thread = threading.Thread(target=self._run, args=(guard,), name="ticker")
            self.thread_health.watch(self._thread, guard)
            self._thread.start()
            self._opened = opened.pop_all()
        _log.info("server_started", address=self.address, roles_enforced=access.is_enforced)

    def stop(self) -> None:
        """Stop serving, and close the store."""
        self._stopping.set()
        self._thread.join()
        self._opened.close()

    def _run(self, guard: ThreadGuard) -> None:
        """Tick until the process stops, whatever becomes of a tick."""
        while not self._stopping.wait(_TICK_S):
            try:
                with guard.named_errors():
                    self._tick()
            except ReconcileError as error:
                self._metrics.count("replication_master_store_failures_total")
                _log.error("tick_failed", **error_fields(error))

    def _tick(self) -> None:
        report = self._master.tick()
        for policy_id, syncer_id in report.taken_over:
            self._metrics.count("replication_master_takeovers_total")
            _log.warning("replication_taken_over", replication=policy_id, syncer=syncer_id)
        for policy_id, syncer_id, epoch in report.assigned:
            self._metrics.count("replication_master_assignments_total")
            _log.info("replication_assigned", replication=policy_id, syncer=syncer_id, epoch=epoch)
        for policy_id in report.removed:
            _log.info("replication_removed", replication=policy_id)
        self._gauges.show(self._master.read())

    def _status(self) -> MasterStatus:
        state, rules = self._master.read(), self._master.rules
        held = [one.holder for one in state.states if one.holder]
        return MasterStatus(
            state.settings.is_enabled,
            tuple(
                SyncerView(one, sum(holder.syncer_id == one.syncer_id for holder in held))
                for one in state.syncers
            ),
            len(state.policies),
            _unassigned(state),
            state.now_ms,
            self._config.database or "sqlite",
            rules.assignment.mode.value,
            rules.assignment.strategy.value,
            rules.assignment.tokens,
            rules.pending_entries_max,
            self.thread_health.fault(time.monotonic(), STEP_S_MAX),
            self._is_enforced,
        )


def _open_store(config: MasterConfig) -> MasterStore:
    if config.database is None:
        return SqliteMasterStore(config.state_folder)
    # Imported here: psycopg is an extra, which one master does not need.
    from replicator.master.postgres_store import PostgresMasterStore

    return PostgresMasterStore(config.database)


def _unassigned(state: StoredState) -> int:
    living = {one.syncer_id for one in state.syncers if is_valid(one.lease, state.now_ms)}
    return sum(one.holder is None or one.holder.syncer_id not in living for one in state.states)


def _pause(attempt: int) -> None:
    # Two masters that met once must not meet again and again.
    # Whoever lost a compare-and-set tries again at once; apart, so that one wins.
    time.sleep(random.uniform(0, min(_PAUSE_S_MAX, 0.001 * 2**attempt)))
