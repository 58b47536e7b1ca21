"""Whether the threads of a process live, and whether their steps end.

A thread that ended, or stands still in a step, does its work no longer, and no error
says so. The main thread looks at all of them now and then, and lets systemd's watchdog
end a process of which one is lost (`runtime.process`).
"""

import threading
from dataclasses import dataclass

from runtime.guard import ThreadGuard

# How long a step may stand still where no watchdog says so. Requests to stores with all
# their retries take minutes.
STEP_S_MAX = 600.0


@dataclass(slots=True)
class _WatchedThread:
    """A thread, and when its progress was last seen to change."""

    thread: threading.Thread
    guard: ThreadGuard | None
    progress: int = -1
    changed_at_s: float = 0.0

    def fault(self, now_s: float, step_s_max: float) -> str:
        """What is wrong with it; empty if nothing is."""
        if self.thread.ident is None:
            return ""
        if not self.thread.is_alive():
            return f"thread {self.thread.name} has ended"
        if self.guard is None:
            return ""
        if not self.guard.is_in_step or self.guard.progress != self.progress:
            self.progress, self.changed_at_s = self.guard.progress, now_s
            return ""
        still_s = now_s - self.changed_at_s
        if still_s < step_s_max:
            return ""
        return f"thread {self.thread.name} has made no progress for {still_s:.0f} s"


class ThreadHealth:
    """The threads that a process cannot do without. Thread-safe."""

    def __init__(self) -> None:
        self._watched: dict[threading.Thread, _WatchedThread] = {}
        self._lock = threading.Lock()

    def watch(self, thread: threading.Thread, guard: ThreadGuard | None = None) -> None:
        """Expect of a thread that it lives, from its start on. With its guard also that
        its steps progress: not for steps that wait for a disk, since a disk that hangs
        costs its volume and not the process.
        """
        with self._lock:
            self._watched[thread] = _WatchedThread(thread, guard)

    def dismiss(self, thread: threading.Thread) -> None:
        """Expect nothing more of a thread, which ends because its work is done."""
        with self._lock:
            self._watched.pop(thread, None)

    def fault(self, now_s: float, step_s_max: float) -> str:
        """What is wrong with the first thread that is lost; empty if none is.

        A step is lost that made no progress between looks for `step_s_max`. `now_s` is
        a time on a clock that never jumps.
        """
        with self._lock:
            faults = [watched.fault(now_s, step_s_max) for watched in self._watched.values()]
        return next(filter(None, faults), "")
