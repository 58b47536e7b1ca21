"""What an audit file needs while its process runs: counts of refusals are written in
bounded time, and the chain is checked against the line that was written last.

So a process that is killed loses the counts of a minute at most, and an alert says when
somebody changes the file below a running process. Only the last two files are checked;
`treefold audit verify` checks all.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from runtime.audit_chain import AuditFile
from runtime.audit_check import AuditBreak, check_tail
from runtime.errors import DiskError, InternalError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics, ProcessMetrics
from runtime.thread_health import ThreadHealth

# With the time after which counts are due: at most a minute.
_LOOK_EVERY_S = 10.0
# A check of two full files takes seconds of a processor.
_CHECK_EVERY_S = 3600.0
# What can be wrong with an audit file: its chain does not hold, or cannot be read; or a
# line could not be written.
AUDIT_FAULTS = _CHAIN, _WRITE = ("chain", "write")
_log = get_logger("audit")


class AuditUpkeep:
    """Looks after an audit file until it is stopped."""

    def __init__(
        self,
        audit: AuditFile,
        metrics: Metrics,
        names: ProcessMetrics,
        thread_health: ThreadHealth,
        *,
        look_every_s: float = _LOOK_EVERY_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start. The gauge of audit faults in `names` is 1 while there is a fault, with
        the label `fault` of AUDIT_FAULTS.
        """
        self._audit = audit
        self._metrics = metrics
        self._gauge = names.audit_fault
        self._look_every_s = look_every_s
        self._monotonic_s = monotonic_s
        self._checked_s: float | None = None
        self._broken: AuditBreak | None = None
        self._moves = 0
        self._is_failing = False
        self._stopping = threading.Event()
        self._guard = ThreadGuard("audit", metrics, names.thread_failures)
        # Without the guard: a step may wait for a disk that hangs.
        self._thread = threading.Thread(target=self._run, name="audit")
        thread_health.watch(self._thread)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the step under way; there is no other."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            # The guard has logged and counted it; the next step tries again.
            with suppress(InternalError), self._guard.named_errors():
                self._step()
            if self._stopping.wait(self._look_every_s):
                return

    def _step(self) -> None:
        try:
            self._audit.write_counts()
        except DiskError as error:
            # Once, not at each try.
            if not self._is_failing:
                _log.error("audit_failed", **error_fields(error))
        self._is_failing = bool(self._audit.write_fault)
        self._metrics.set(self._gauge, self._is_failing, fault=_WRITE)
        now_s = self._monotonic_s()
        if self._checked_s is None or now_s - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now_s
            self._check()

    def _check(self) -> None:
        try:
            tail = self._audit.tail()
        except DiskError as error:
            _log.error("audit_failed", **error_fields(error))
            self._metrics.set(self._gauge, 1, fault=_CHAIN)
            return
        broken = check_tail(tail).broken
        is_moved = tail.moves != self._moves or not tail.is_held
        self._moves = tail.moves
        self._metrics.set(self._gauge, broken is not None or is_moved, fault=_CHAIN)
        if is_moved:
            text = "somebody moved or deleted the audit file; its chain goes on in a new one"
            _log.error("audit_broken", fault="moved", error=text)
        if broken is not None and broken != self._broken:
            _log.error(
                "audit_broken",
                path=str(broken.path),
                line=broken.line,
                fault=broken.fault.value,
                error=broken.detail,
            )
        self._broken = broken
