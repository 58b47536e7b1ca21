"""The thread that asks SCM: it reads reports into a controller, and requests rounds.

All containers are read page by page, again and again; those of jobs at every poll. The
controller is locked only while it decides, never while SCM is asked.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from merkle.errors import ReconcileError
from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer
from runtime.errors import InternalError
from runtime.guard import ThreadGuard
from runtime.log import error_fields, get_logger
from runtime.metrics import Metrics
from runtime.thread_health import ThreadHealth
from scm.cluster_controller import ClusterController
from scm.container_reports import ClusterListing, ClusterSnapshot, read_snapshot
from scm.events import CONTROLLER_EVENTS
from scm.metrics import PROCESS

# Containers of a page: one call for the list, one for the replicas of each.
_PAGE = 1_000

_log = get_logger("server", CONTROLLER_EVENTS)


class ClusterFeed:
    """Polls SCM until it is stopped, whatever becomes of a poll."""

    def __init__(
        self,
        cluster: ClusterListing,
        controller: ClusterController,
        lock: threading.Lock,
        clock: Callable[[], float],
        metrics: Metrics,
        *,
        poll_s: float,
        read_every_s: float,
        thread_health: ThreadHealth | None = None,
    ) -> None:
        """`lock` is held by whoever calls the controller. Polls are `poll_s` seconds
        apart, and readings of all containers begin `read_every_s` seconds apart.
        """
        self._cluster = cluster
        self._controller = controller
        self._lock = lock
        self._clock = clock
        self._poll_s, self._read_every_s = poll_s, read_every_s
        # The end of the last page of a reading under way, and when the last one began.
        self._after: int | None = 0
        self._read_at_s = clock()
        self._guard = ThreadGuard("cluster_feed", metrics, PROCESS.thread_failures)
        self._thread_health = thread_health or ThreadHealth()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster_feed")

    def start(self) -> None:
        """Start the thread."""
        self._thread_health.watch(self._thread, self._guard)
        self._thread.start()

    def close(self) -> None:
        """Wait for the running poll, and close the connections."""
        self._stopping.set()
        # It may not have begun.
        if self._thread.ident is not None:
            self._thread.join()
        self._cluster.close()

    def poll(self) -> None:
        """Read the next page and the containers of jobs, and request what is due.

        Raises:
            DatabaseError: changes cannot be saved; the next poll tries again.
        """
        with self._lock:
            watched = self._controller.watched()
        try:
            in_safe_mode = self._cluster.identity().in_safe_mode
            snapshot = self._read(watched)
        except ReconcileError as error:
            self._note_silence(error)
            return
        with self._lock:
            due = self._controller.report(snapshot, self._clock(), in_safe_mode=in_safe_mode)
        if not due:
            return
        answers: Mapping[ContainerId, ReconcileError | None]
        try:
            answers = self._cluster.reconcile(due)
        except ReconcileError as error:
            # Whether SCM has the requests is not known: the roots will tell.
            self._note_silence(error)
            return
        with self._lock:
            self._controller.note_answers(answers, self._clock())

    def _read(self, watched: list[ContainerId]) -> ClusterSnapshot:
        now_s = self._clock()
        if self._after is None and now_s - self._read_at_s >= self._read_every_s:
            self._after, self._read_at_s = 0, now_s
        if self._after is None:
            return read_snapshot(self._cluster, watched)
        page: list[ClusterContainer] = list(islice(self._cluster.containers(self._after), _PAGE))
        is_last = len(page) < _PAGE
        through = (1 << 63) - 1 if is_last else page[-1].container_id
        snapshot = read_snapshot(self._cluster, watched, page)
        snapshot = replace(snapshot, listed=(self._after, through))
        self._after = None if is_last else through
        return snapshot

    def _note_silence(self, error: ReconcileError) -> None:
        with self._lock:
            self._controller.note_silence(error, self._clock())

    def _run(self) -> None:
        while not self._stopping.wait(self._poll_s):
            # The guard has logged and counted it; the next poll tries again.
            with suppress(InternalError), self._guard.named_errors():
                try:
                    self.poll()
                except ReconcileError as error:
                    _log.error("request_failed", **error_fields(error))
