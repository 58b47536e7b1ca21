"""The thread that lets time go by at the controller and publishes its gauges."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from merkle.errors import ReconcileError
from runtime.errors import InternalError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics
from runtime.thread_health import ThreadHealth
from scm.events import CONTROLLER_EVENTS
from scm.metrics import PROCESS

_log = get_logger("server", CONTROLLER_EVENTS)


class Ticker:
    """Ticks a controller until it is stopped, whatever becomes of a tick."""

    def __init__(
        self,
        tick: Callable[[float], None],
        gauges: Callable[[float], Mapping[str, float]],
        lock: threading.Lock,
        clock: Callable[[], float],
        metrics: Metrics,
        *,
        interval_s: float,
        thread_health: ThreadHealth | None = None,
    ) -> None:
        """`tick` does what is due at a time, `gauges` has the values of all gauges by
        their names, and `lock` excludes all other users of the controller.
        `thread_health` sees whether the thread gets on.
        """
        self._tick_controller = tick
        self._gauges = gauges
        self._lock = lock
        self._clock = clock
        self._metrics = metrics
        self._interval_s = interval_s
        self._guard = ThreadGuard("ticker", metrics, PROCESS.thread_failures)
        self._thread_health = thread_health or ThreadHealth()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ticker")

    def start(self) -> None:
        """Start the thread."""
        self._thread_health.watch(self._thread, self._guard)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the running tick; there is no other."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            for step in (self._tick, self._measure):
                # The guard has logged and counted it; the next tick tries again.
                with suppress(InternalError), self._guard.named_errors():
                    step()

    def _tick(self) -> None:
        with self._lock:
            try:
                self._tick_controller(self._clock())
            except ReconcileError as error:
                # Nothing is lost: the next tick saves the changes again.
                _log.error("request_failed", **error_fields(error))

    def _measure(self) -> None:
        with self._lock:
            gauges = self._gauges(self._clock())
        for name, value in gauges.items():
            self._metrics.set(name, value)
