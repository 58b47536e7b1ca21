"""What the page needs of a controller: to read it, and to give it orders."""

from collections.abc import Sequence
from typing import Protocol

from scm.views import ContainerStatus, ControllerStatus, DatanodeView, JobStatus, ReconcileResponse


class ClusterReader(Protocol):
    """The state of the cluster now. Thread-safe."""

    def status(self) -> ControllerStatus:
        """What the controller says of itself and its containers."""

    def diverged(self, limit: int) -> Sequence[ContainerStatus]:
        """The first containers whose replicas differ, ascending."""

    def container(self, container_id: int) -> ContainerStatus | None:
        """One container; None if no datanode has reported it."""

    def datanodes(self) -> Sequence[DatanodeView]:
        """All datanodes that are known, by ID."""

    def jobs(self, limit: int) -> Sequence[JobStatus]:
        """The newest jobs, newest first, without their evidence."""


class JobBoard(Protocol):
    """One job, and orders about jobs. Thread-safe.

    Each may raise what the controller does: JobNotFoundError, JobEndedError and others.
    """

    def job(self, job_id: str) -> JobStatus:
        """A job with its evidence."""

    def reconcile(self, container_id: int, requested_by: str) -> ReconcileResponse:
        """Begin a job for a container, or say why not."""

    def cancel(self, job_id: str, requested_by: str) -> None:
        """Ask for the end of a job."""

    def pause(self, job_id: str, requested_by: str) -> None:
        """Stop a job until it is resumed."""

    def resume(self, job_id: str, requested_by: str) -> None:
        """Let a paused job go on."""
