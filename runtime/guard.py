"""Threads that live as long as their process.

An error that nobody foresaw, such as an unexpected file or a defect, must end one step
of such a thread and never the thread: what it does would silently stop. Whether it
stands still in a step, `runtime.thread_health` sees by its progress.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from merkle.errors import ReconcileError
from runtime.errors import InternalError
from runtime.log import get_logger
from runtime.metrics import Metrics


class ThreadGuard:
    """Names the unforeseen errors of one thread. Each is logged and counted."""

    def __init__(self, thread: str, metrics: Metrics | None = None, counter: str = "") -> None:
        """`counter` is the name of the counter; its only label is `thread`. Without
        metrics an error is only logged.
        """
        self._thread = thread
        self._metrics = metrics
        self._counter = counter
        self._log = get_logger("guard")
        self._depth = 0
        self._is_idle = False
        # Changes whenever the thread gets on. Only a change counts: several threads may
        # help in a step, and an addition of theirs may be lost.
        self.progress = 0

    @property
    def is_in_step(self) -> bool:
        """Whether the thread works, so that `progress` has to change."""
        return self._depth > 0 and not self._is_idle

    def note_progress(self) -> None:
        """Say that a long step gets on."""
        self.progress += 1

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Wait for work within a step: it is no lack of progress."""
        self._is_idle = True
        try:
            yield
        finally:
            self._is_idle = False
            self.progress += 1

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turn an unforeseen error of the block into a named one, which the loop of the
        thread handles like others.

        Raises:
            InternalError: an error that is not a ReconcileError ended the block.
        """
        self._depth += 1
        self.progress += 1
        try:
            yield
        except ReconcileError:
            raise
        # Any error: which one a defect raises is not known, and all must be logged.
        except Exception as error:
            if self._metrics is not None:
                self._metrics.count(self._counter, thread=self._thread)
            self._log.error("thread_failed", thread=self._thread, error=repr(error), exc_info=error)
            raise InternalError(
                f"an internal error in thread {self._thread}: {error!r}", thread=self._thread
            ) from error
        finally:
            self._depth -= 1
            self.progress += 1
