"""Threads that live as long as their process.

An error that nobody foresaw, such as an unexpected file or a defect, must end one step
of such a thread and never the thread: what it does would silently stop.
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

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Turn an unforeseen error of the block into a named one, which the loop of the
        thread handles like others.

        Raises:
            InternalError: an error that is not a ReconcileError ended the block.
        """
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
