"""Errors that end a sweep or prevent it from being resumed."""

from merkle.errors import ReconcileError
from runtime.errors import DiskError


class SweepInputError(ReconcileError):
    """None of a sweep's inputs can be read, so there is nothing to compare."""

    code = "sweep_input"


class SweepWorkError(DiskError):
    """The stored results of an unfinished sweep cannot be read. The sweep cannot be
    resumed and must start over.
    """

    code = "sweep_work"


class EarlierRowsError(ReconcileError):
    """The rows that an earlier sweep read cannot be read any more."""

    code = "earlier_rows"


class SweepNotFoundError(ReconcileError):
    """The folder has no such sweep."""

    code = "sweep_not_found"
