"""A running verifier: store, index, service, and threads that refresh and scrub."""

import threading
from collections.abc import Callable
from contextlib import ExitStack

from merkle.errors import ReconcileError
from proof.kernel_loading import load_kernels
from replicator.events import VERIFIER_EVENTS
from replicator.metrics import PROCESS, VERIFIER_METRICS
from replicator.refresh import RefreshProgress
from replicator.stores.address import check_outside
from replicator.stores.opening import open_store
from replicator.verifier.audit import VerifierAudit
from replicator.verifier.config import VerifierConfig
from replicator.verifier.server import VerifierService
from replicator.verifier.state import EPOCHS_FILE, locked_state, open_index
from runtime.access import Access
from runtime.audit_upkeep import AuditUpkeep
from runtime.call_limits import CallLimits
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, MetricsServer
from runtime.rate_limit import RateLimiter, SystemClock
from runtime.rpc import start_server
from runtime.setting_values import split_address
from runtime.thread_health import ThreadHealth

# Half of them are more calls than a syncer makes at once: of each worker one, or of
# each question of a comparison, and its streams.
_RPC_THREADS = 64
# Before a step that failed is tried again.
_FAILURE_PAUSE_S = 60.0
# A syncer may read a slow source between two batches, and a refresh may take days.
CALL_LIMITS = CallLimits(idle_s=300.0, stream_s=7 * 86_400.0)
_log = get_logger("verifier", VERIFIER_EVENTS)


class VerifierProcess:
    """A verifier of one bucket; `address` is where it listens, and `thread_health`
    knows its threads.
    """

    def __init__(self, config: VerifierConfig, call_limits: CallLimits = CALL_LIMITS) -> None:
        """Open the store and the index, and listen.

        Raises:
            BusyError: another verifier uses the state folder, or another process the
                audit file.
            ConfigError: an address cannot be bound, or the state belongs to another
                bucket or algorithm.
            UsageError: the bucket's address is invalid.
            StoreError: the store does not answer.
            IndexRefusedError, IndexDamagedError, DatabaseError, DiskError: the state
                cannot be used.
        """
        self._config = config
        self.thread_health = ThreadHealth()
        self._stopping = threading.Event()
        self._refreshed = threading.Event()
        self._metrics = Metrics(VERIFIER_METRICS)
        clock = SystemClock()
        with ExitStack() as opened:
            folder = opened.enter_context(locked_state(config.state_folder, config.bucket))
            check_outside(config.audit_path.absolute().parent, config.bucket)
            audit = VerifierAudit(config.audit_path)
            opened.callback(audit.close)
            store = opened.enter_context(open_store(config.bucket, may_write=config.writes))
            state = open_index(
                folder, store, clock, bucket=config.bucket, algorithm=config.algorithm
            )
            self._bucket = opened.enter_context(state)
            access = self._access(audit)
            self._service = VerifierService(
                self._bucket,
                access=access,
                audit=audit if config.writes else None,
                epochs_file=folder / EPOCHS_FILE,
            )
            opened.callback(self._service.close)
            if config.metrics:
                host, port = split_address(config.metrics)
                opened.callback(MetricsServer(self._metrics, host, port).close)
            rpc = start_server(
                config.listen,
                [self._service.register],
                tls=config.rpc_tls,
                insecure=config.insecure,
                access=access,
                threads=_RPC_THREADS,
                # One client that holds all it gets keeps no other from being answered.
                share_threads=True,
                calls_max=2 * _RPC_THREADS,
                limits=call_limits,
            )
            opened.callback(rpc.stop)
            self.address = rpc.address
            upkeep = AuditUpkeep(audit, self._metrics, PROCESS, self.thread_health)
            opened.callback(upkeep.stop)
            self._threads = [
                self._start_loop(name, step)
                for name, step in (("refresh", self._refresh), ("scrub", self._scrub))
            ]
            self._threads.append(self._start_loading())
            self._opened = opened.pop_all()
        _log.info(
            "server_started",
            address=self.address,
            bucket=config.bucket,
            roles_enforced=access.is_enforced,
        )

    def _access(self, audit: VerifierAudit) -> Access:
        return Access(
            self._config.roles.table,
            is_enforced=self._config.tls is not None,
            on_refusal=audit.refused,
            metrics=self._metrics,
            names=PROCESS,
        )

    def stop(self) -> None:
        """Stop serving, and close index and store."""
        self._stopping.set()
        self._refreshed.set()
        for thread in self._threads:
            thread.join()
        self._opened.close()

    def _start_loop(self, name: str, step: Callable[[ThreadGuard], None]) -> threading.Thread:
        guard = ThreadGuard(name, self._metrics, PROCESS.thread_failures)
        thread = threading.Thread(target=self._loop, args=(guard, step), name=name)
        self.thread_health.watch(thread, guard)
        thread.start()
        return thread

    def _start_loading(self) -> threading.Thread:
        """Load the kernels of comparisons. Calls are answered meanwhile, without."""
        stopped = self._stopping.is_set
        thread = threading.Thread(target=load_kernels, args=(stopped,), name="kernels")
        thread.start()
        return thread

    def _loop(self, guard: ThreadGuard, step: Callable[[ThreadGuard], None]) -> None:
        """Repeat a step, whatever becomes of it, until the process stops."""
        while not self._stopping.is_set():
            try:
                with guard.named_errors():
                    step(guard)
            except ReconcileError as error:
                if not self._stopping.is_set():
                    self._metrics.count("verifier_refresh_failures_total")
                    _log.error("refresh_failed", **error_fields(error))
                    self._stopping.wait(_FAILURE_PAUSE_S)

    def _refresh(self, guard: ThreadGuard) -> None:
        """List the bucket, and wait until it is due again."""
        self._note(self._service.refresh_now(stopped=self._polled_by(guard)))
        self._refreshed.set()
        with guard.idle():
            self._stopping.wait(self._config.refresh_every_s)

    def _scrub(self, guard: ThreadGuard) -> None:
        """After the next refresh, read what was not read for long. A pass may take
        longer than the time to the next refresh, which does not wait for it.
        """
        with guard.idle():
            self._refreshed.wait()
        self._refreshed.clear()
        scrub, bucket = self._config.scrub, self._bucket
        since_s = bucket.clock.now_ms() // 1000 - int(scrub.read_again_after_s)
        if self._stopping.is_set() or not scrub.enabled or not self._is_due(since_s):
            return
        stopped = self._polled_by(guard)

        def wait(seconds: float) -> bool:
            return self._stopping.wait(seconds) or stopped()

        limiter = RateLimiter(scrub.bytes_per_second, bucket.clock, wait)
        refresher = bucket.refresher(stopped, limiter)
        self._note(refresher.scrub(read_since_s=since_s))

    def _polled_by(self, guard: ThreadGuard) -> Callable[[], bool]:
        """Whether to stop. A pass may take days and asks this all along, which shows
        that it gets on.
        """

        def is_stopping() -> bool:
            guard.note_progress()
            return self._stopping.is_set()

        return is_stopping

    def _is_due(self, since_s: int) -> bool:
        """Whether any object was not read since then; a pass looks at every row."""
        evidence = self._service.state().evidence
        read_at_s = evidence.oldest_read_at_s
        return bool(evidence.listed or evidence.recorded) or (
            read_at_s is not None and read_at_s < since_s
        )

    def _note(self, progress: RefreshProgress) -> None:
        self._metrics.count("verifier_bytes_read_total", progress.bytes_read)
        self._metrics.count("verifier_damaged_total", progress.damaged)
        state = self._service.state()
        for level in ("listed", "recorded", "read"):
            self._metrics.set("verifier_items", getattr(state.evidence, level), level=level)
        self._metrics.set("verifier_listed_at_seconds", state.listed_at_s or 0)
        self._metrics.set("verifier_oldest_read_at_seconds", state.evidence.oldest_read_at_s or 0)
        if progress.damaged:
            _log.error("bucket_damaged", objects=progress.damaged)
        _log.info("bucket_refreshed", objects=progress.objects, bytes_read=progress.bytes_read)
