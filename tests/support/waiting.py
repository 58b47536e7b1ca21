"""Wait for a condition, and never for ever."""

import threading
import time
from collections.abc import Callable

PATIENCE_S = 30.0


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Return as soon as `condition` holds; fail with `what` was waited for when it does
    not in time.
    """
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {timeout_s} s in vain: {what}")
        pause.wait(0.01)
