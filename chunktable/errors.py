"""What may be wrong with a chunk table or with its place."""

from merkle.errors import ReconcileError, RefusalError


class ChunkTableError(RefusalError):
    """A chunk table cannot be read: `reason` is a value of
    chunktable.manifest.TableRefusal.
    """

    code = "chunk_table_invalid"


class DestinationError(ReconcileError):
    """A folder or bucket to export to cannot be written; what it held before is still
    there.
    """

    code = "destination_failed"
    retryable = True
    exit_status = 7
