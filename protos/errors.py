"""What a caller of the controller's service may meet."""

from merkle.errors import ReconcileError


class ControllerUnavailableError(ReconcileError):
    """The controller did not answer."""

    code = "controller_unavailable"
    retryable = True
    exit_status = 7


class JobNotFoundError(ReconcileError):
    """There is no such job."""

    code = "job_not_found"
