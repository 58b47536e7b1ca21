"""The watch over a server's calls outlives what it watches."""

from contextlib import AbstractContextManager
from typing import cast

import grpc

from runtime.call_limits import WATCH_THREAD, CallLimits, CallWatch, WatchedCall
from runtime.guard import ThreadGuard
from runtime.metrics import Metrics, ProcessMetrics
from tests.support.waiting import wait_until


class _Call:
    """The context of a call; its cancel may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.cancels = 0
        self._error = error

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def cancel(self) -> None:
        self.cancels += 1
        if self._error is not None:
            raise self._error


def test_a_call_that_cannot_be_cancelled_does_not_end_the_watch() -> None:
    names, metrics = ProcessMetrics("server"), Metrics([ProcessMetrics("server").failures])
    guard = ThreadGuard(WATCH_THREAD, metrics, names.thread_failures)
    watch = CallWatch(CallLimits(idle_s=0.0), guard)
    broken, idle = _Call(RuntimeError("not foreseen")), _Call()
    try:
        with _watched(watch, broken):
            wait_until(lambda: broken.cancels > 0, "the first cancel")
            with _watched(watch, idle):
                wait_until(lambda: idle.cancels > 0, "the second cancel")
        assert metrics.value(names.thread_failures, thread=WATCH_THREAD) > 0
    finally:
        watch.close()


def _watched(watch: CallWatch, call: _Call) -> AbstractContextManager[WatchedCall]:
    context = cast(grpc.ServicerContext, call)
    return watch.watch(context, service="s", calls_per_client_max=9, is_stream=True)
