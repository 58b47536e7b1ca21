"""The controller's ticker: no error ends its thread, and each is logged and counted."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from runtime.errors import DatabaseError
from runtime.metrics import Metrics
from scm.metrics import CONTROLLER_METRICS
from scm.ticker import Ticker
from tests.support.waiting import wait_until


@dataclass
class Ticked:
    """A controller that fails as often as it has errors left, and counts its ticks."""

    errors: list[Exception] = field(default_factory=list)
    gauge_errors: list[Exception] = field(default_factory=list)
    ticks: int = 0
    measured: int = 0

    def tick(self, now_s: float) -> None:
        del now_s
        if self.errors:
            raise self.errors.pop()
        self.ticks += 1

    def gauges(self, now_s: float) -> Mapping[str, float]:
        del now_s
        if self.gauge_errors:
            raise self.gauge_errors.pop()
        self.measured += 1
        return {"scm_containers": 5.0}


@contextmanager
def ticking(controller: Ticked) -> Iterator[Callable[[str], float]]:
    """The ticker while it runs; yields a reader of its metrics."""
    metrics = Metrics(CONTROLLER_METRICS)
    ticker = Ticker(
        controller.tick,
        controller.gauges,
        threading.Lock(),
        lambda: 7.0,
        metrics,
        interval_s=0.001,
    )
    ticker.start()
    try:
        yield (
            lambda name: (
                metrics.value(name, thread="ticker") if "thread" in name else metrics.value(name)
            )
        )
    finally:
        ticker.stop()


def test_a_tick_that_fails_unforeseen_is_counted_and_followed_by_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    controller = Ticked(errors=[RuntimeError("not foreseen"), KeyError(12)])
    with ticking(controller) as value:
        wait_until(lambda: controller.ticks > 1, "two ticks after the failures")
        assert value("scm_thread_failures_total") == 2
        assert value("scm_containers") == 5
    # As an event, with what went wrong.
    logged = capsys.readouterr().err
    assert logged.count("thread_failed") == 2
    assert "not foreseen" in logged


def test_gauges_are_published_though_the_tick_fails() -> None:
    controller = Ticked(errors=[RuntimeError("a defect")] * 1_000_000)
    with ticking(controller) as value:
        wait_until(lambda: controller.measured > 1, "gauges")
        assert value("scm_containers") == 5
    assert controller.ticks == 0


def test_gauges_that_fail_end_no_tick() -> None:
    controller = Ticked(gauge_errors=[ZeroDivisionError("a defect")])
    with ticking(controller) as value:
        wait_until(lambda: controller.measured > 0, "gauges")
        assert value("scm_thread_failures_total") == 1


def test_a_store_that_fails_is_logged_and_is_no_failure_of_the_thread(
    capsys: pytest.CaptureFixture[str],
) -> None:
    controller = Ticked(errors=[DatabaseError("disk full")])
    with ticking(controller) as value:
        wait_until(lambda: controller.ticks > 0, "a tick after the failure")
        assert value("scm_thread_failures_total") == 0
    assert "disk full" in capsys.readouterr().err
