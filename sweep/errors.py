"""What ends a sweep, or keeps it from going on."""

from merkle.errors import ReconcileError
from runtime.errors import DiskError


class SweepInputError(ReconcileError):
    """None of a sweep's inputs can be read, so that there is nothing to compare."""

    code = "sweep_input"


class SweepWorkError(DiskError):
    """What is finished of a sweep cannot be read again, so that it cannot go on; begin
    it anew.
    """

    code = "sweep_work"


class SweepNotFoundError(ReconcileError):
    """There is no such sweep in the folder."""

    code = "sweep_not_found"
