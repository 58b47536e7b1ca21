"""Errors of a chunk table, and of the folder or bucket that holds it."""

from merkle.errors import ReconcileError, RefusalError
from runtime.errors import DiskError


class ChunkTableError(RefusalError):
    """A chunk table cannot be read; `reason` is a value of `TableRefusal`."""

    code = "chunk_table_invalid"


class DestinationError(ReconcileError):
    """The destination of an export cannot be written; what it held before is intact."""

    code = "destination_failed"
    retryable = True
    exit_status = 7


class ObjectStoreError(DiskError):
    """An object of a bucket cannot be read or written."""

    code = "object_store_failed"


class BucketMissingError(ObjectStoreError):
    """There is no such bucket."""

    code = "bucket_missing"


class StoreDeniedError(ObjectStoreError):
    """The credentials are missing, wrong, or may not do this in the bucket."""

    code = "store_denied"


class StoreUnreachableError(ObjectStoreError):
    """The store does not answer, or the connection was cut; a later attempt may
    succeed.
    """

    code = "store_unreachable"
    retryable = True
    exit_status = 7
