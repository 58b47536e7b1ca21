"""A stop that comes at any line of a thread's loop ends the thread: none is lost
between a look for it and the wait that follows.
"""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from dnagent.heartbeat import HeartbeatResponse, HeartbeatSender, OutgoingHeartbeat
from dnagent.metrics import AGENT_METRICS
from dnagent.scanner import Scanner
from protos.errors import ControllerUnavailableError
from runtime.metrics import Metrics
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.test_scanner import rig

# Far less than the loops wait when there is nothing to do.
ENDED_S = 10.0
NEVER = 10**9
LOOP_NAMES = {"_run", "_run_background"}


class Controller:
    """One that answers, or nobody."""

    def __init__(self, *, is_there: bool) -> None:
        self._is_there = is_there

    def heartbeat(self, _: OutgoingHeartbeat) -> HeartbeatResponse:
        if not self._is_there:
            raise ControllerUnavailableError("nobody listens there")
        return HeartbeatResponse((), full_report_wanted=False, term=1)

    def close(self) -> None:
        pass


def heartbeats(*, is_there: bool) -> HeartbeatSender:
    return HeartbeatSender(
        Controller(is_there=is_there),
        interval_s=30.0,
        replicas=list,
        running=list,
        on_command=lambda _: None,
        metrics=Metrics(AGENT_METRICS),
    )


LOOPS: dict[str, Callable[[], Scanner | HeartbeatSender]] = {
    "scanner": lambda: rig().scanner,
    "heartbeats": lambda: heartbeats(is_there=True),
    "heartbeats to nobody": lambda: heartbeats(is_there=False),
}


class StopAtLine:
    """Stops what it started just before a thread's loop executes its `line`th line."""

    def __init__(self, one: Scanner | HeartbeatSender, line: int) -> None:
        self._one = one
        self._line = line
        self._stopper = threading.Thread(target=self._stop, daemon=True)
        self._joins = threading.Event()
        self.executed = 0
        threading.settrace(self._trace_loop)
        one.start()
        threading.settrace(None)

    def ended(self) -> bool:
        """Whether the stop ends the loop at once; it comes now if no line was given."""
        if self._line == NEVER:
            self._stopper.start()
        else:
            wait_until(lambda: self.executed >= self._line, "the line to be reached")
        self._stopper.join(ENDED_S)
        return not self._stopper.is_alive()

    def _stop(self) -> None:
        sys.settrace(self._trace_stop)
        self._one.stop()

    def _trace_stop(self, frame: FrameType, event: str, _: object) -> None:
        # It has set what there is to set once it waits for the thread.
        if event == "call" and frame.f_code.co_name == "join":
            self._joins.set()

    def _trace_loop(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_name not in LOOP_NAMES:
            return None
        if event == "line":
            if self.executed + 1 == self._line:
                self._stopper.start()
                assert self._joins.wait(PATIENCE_S)
            self.executed += 1
        return self._trace_loop


def line_count(make: Callable[[], Scanner | HeartbeatSender]) -> int:
    """How many lines a loop executes until it waits."""
    run, seen = StopAtLine(make(), NEVER), -1
    pause = threading.Event()
    while run.executed == 0 or run.executed != seen:
        seen = run.executed
        pause.wait(0.2)
    assert run.ended()
    return seen


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_at_any_line_ends_the_loop(loop: str) -> None:
    for line in range(1, line_count(LOOPS[loop]) + 1):
        run = StopAtLine(LOOPS[loop](), line)
        assert run.ended(), line
