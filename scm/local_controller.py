"""The controller of this process, for its own page: the values that a client gets of
another one (scm.client), without a connection.
"""

import threading
from collections.abc import Callable, Sequence

from merkle.tree import ContainerId
from scm.controller import Controller
from scm.jobs import Job, JobId
from scm.messages import (
    container_from,
    container_to,
    datanode_view_from,
    job_from,
    job_to,
    status_to,
)
from scm.views import (
    ContainerStatus,
    ContainerView,
    ControllerStatus,
    DatanodeView,
    JobStatus,
    ReconcileResponse,
)


class LocalController:
    """ClusterReader and JobBoard of the controller in this process. Thread-safe."""

    def __init__(
        self,
        controller: Controller,
        lock: threading.Lock,
        clock: Callable[[], float],
        status: Callable[[], ControllerStatus],
    ) -> None:
        """`lock` is held by whoever calls the controller, `clock` is its time, and
        `status` what its service answers.
        """
        self._controller = controller
        self._lock = lock
        self._clock = clock
        self._status = status

    def status(self) -> ControllerStatus:
        """See ClusterReader."""
        return self._status()

    def diverged(self, limit: int) -> Sequence[ContainerStatus]:
        """See ClusterReader."""
        with self._lock:
            queries = self._controller.queries
            views = [queries.container(one) for one in queries.diverged()[:limit]]
            return [self._container(view) for view in views if view is not None]

    def container(self, container_id: int) -> ContainerStatus | None:
        """See ClusterReader."""
        with self._lock:
            view = self._controller.queries.container(ContainerId(container_id))
            return self._container(view) if view is not None else None

    def datanodes(self) -> Sequence[DatanodeView]:
        """See ClusterReader."""
        with self._lock:
            found = self._controller.queries.datanodes(self._clock())
        return [datanode_view_from(status_to(one)) for one in found]

    def jobs(self, limit: int) -> Sequence[JobStatus]:
        """See ClusterReader."""
        with self._lock:
            return [self._job(job, brief=True) for job in self._controller.jobs(None, limit)]

    def job(self, job_id: str) -> JobStatus:
        """See JobBoard."""
        with self._lock:
            return self._job(self._controller.job(self._id(job_id)), brief=False)

    def reconcile(self, container_id: int, requested_by: str) -> ReconcileResponse:
        """See JobBoard."""
        with self._lock:
            [answer] = self._controller.reconcile(
                [ContainerId(container_id)],
                dry_run=False,
                reason="",
                requested_by=requested_by,
                now_s=self._clock(),
            )
        return answer

    def cancel(self, job_id: str, requested_by: str) -> None:
        """See JobBoard."""
        with self._lock:
            found, now_s = self._id(job_id), self._clock()
            self._controller.cancel(found, now_s, requested_by=requested_by)

    def pause(self, job_id: str, requested_by: str) -> None:
        """See JobBoard."""
        with self._lock:
            found, now_s = self._id(job_id), self._clock()
            self._controller.pause(found, by=requested_by, reason="", now_s=now_s)

    def resume(self, job_id: str, requested_by: str) -> None:
        """See JobBoard."""
        with self._lock:
            found, now_s = self._id(job_id), self._clock()
            self._controller.resume(found, by=requested_by, now_s=now_s)

    def _id(self, job_id: str) -> JobId:
        return self._controller.job_id_of(job_id)

    def _container(self, view: ContainerView) -> ContainerStatus:
        return container_from(container_to(view, self._controller.queries, self._clock()))

    def _job(self, job: Job, *, brief: bool) -> JobStatus:
        compared = self._controller.queries.compared(job.container_id)
        return job_from(job_to(job, compared, brief=brief))
