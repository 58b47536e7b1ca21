"""What goes wrong with an object store, by names that callers act on."""

from merkle.errors import ReconcileError


class StoreError(ReconcileError):
    """A store refused a request, or its answer is invalid."""

    code = "store_failed"


class StoreUnavailableError(StoreError):
    """A store did not answer in time, or asked to be called later."""

    code = "store_unavailable"
    retryable = True
    exit_status = 7


class ObjectMissingError(StoreError):
    """The key, its version, the upload or its part does not exist."""

    code = "object_missing"


class PreconditionFailedError(StoreError):
    """The object is not the one that the condition named: it changed meanwhile."""

    code = "precondition_failed"


class DigestMismatchError(StoreError):
    """The bytes that arrived do not have the hash that was sent with them."""

    code = "digest_mismatch"


class SnapshotLostError(StoreError):
    """A snapshot was deleted, or another one has its name: what it held is unknown."""

    code = "snapshot_lost"


class UnsupportedObjectError(StoreError):
    """The store cannot keep a key, a property or a part as it was given."""

    code = "object_unsupported"


class FeedGapError(StoreError):
    """Nobody can tell which changes followed a position: it is of another log, or the
    log does not continue there. Compare the stores instead.
    """

    code = "feed_gap"


class PositionTrimmedError(FeedGapError):
    """The changes after this position are no longer kept: list the store instead."""

    code = "position_trimmed"
