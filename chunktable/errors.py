"""Errors of a chunk table, and of the folder or bucket that holds it."""

from merkle.errors import ReconcileError, RefusalError


class ChunkTableError(RefusalError):
    """A chunk table cannot be read; `reason` is a value of `TableRefusal`."""

    code = "chunk_table_invalid"


class DestinationError(ReconcileError):
    """The destination of an export cannot be written; what it held before is intact."""

    code = "destination_failed"
    retryable = True
    exit_status = 7
