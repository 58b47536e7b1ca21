"""Errors of volumes, of containers and of the operations on them."""

from merkle.errors import ReconcileError
from runtime.errors import DiskError


class TreeMissingError(ReconcileError):
    """The container has no tree file yet; one is built in the background."""

    code = "tree_missing"
    retryable = True


class StaleTreeError(ReconcileError):
    """The stored tree changed after the caller read it: read it again and repeat."""

    code = "tree_stale"
    retryable = True


class DescriptorError(ReconcileError):
    """A `.container` file cannot be parsed, or its checksum does not match."""

    code = "descriptor_invalid"


class VolumeError(ReconcileError):
    """A directory is not a usable Ozone volume."""

    code = "volume_invalid"


class SecuredClusterError(ReconcileError):
    """The Ozone cluster has Kerberos, tokens or encryption, which we do not support."""

    code = "cluster_secured"
    exit_status = 6


class VolumeLockedError(ReconcileError):
    """Another process holds the volume, so it cannot be opened as owner."""

    code = "volume_locked"
    exit_status = 8


class MappedReadError(DiskError):
    """A mapped file could not be checked, or the worker died; read the file with plain
    reads.
    """

    code = "mapped_read_failed"


class ContainerNotFoundError(ReconcileError):
    """This datanode or volume does not have the container."""

    code = "container_not_found"


class ContainerStateError(ReconcileError):
    """The container's state does not allow the operation."""

    code = "container_state"
    exit_status = 6


class ContainerUnsupportedError(ReconcileError):
    """The container has a schema or layout of an older Ozone release, which is not
    supported.
    """

    code = "container_unsupported"
    exit_status = 6


class BlockNotFoundError(ReconcileError):
    """The container does not have the block."""

    code = "block_not_found"


class ChunkGapError(ReconcileError):
    """A write would leave a gap in a block file, or a record names bytes beyond its
    end.
    """

    code = "chunk_gap"


class ReadOnlyError(ReconcileError):
    """The volume is held read-only, or the configuration does not enable repair."""

    code = "read_only"
    exit_status = 6


class UndoBudgetError(ReconcileError):
    """The bytes to overwrite do not fit the undo budget. The repair ends; a later one
    continues.
    """

    code = "undo_budget"
    exit_status = 6


class ManagerError(ReconcileError):
    """The Ozone Manager refused a request; the fact `status` is Ozone's name for it."""

    code = "om_refused"


class ManagerUnavailableError(ManagerError):
    """No Ozone Manager answered in time, or none leads; a later call may succeed."""

    code = "om_unavailable"
    retryable = True
    exit_status = 7


class ManagerBusyError(ManagerError):
    """The Ozone Manager cannot do this at the moment, such as in safe mode."""

    code = "om_busy"
    retryable = True
    exit_status = 8


class ManagerMissingError(ManagerError):
    """The volume, bucket, key or snapshot does not exist."""

    code = "om_missing"


class ManagerExistsError(ManagerError):
    """There is a volume, bucket, key or snapshot of this name already."""

    code = "om_exists"


class ManagerForbiddenError(ManagerError):
    """The user may not do this."""

    code = "om_forbidden"
    exit_status = 6


class ManagerFullError(ManagerError):
    """A quota does not allow it."""

    code = "om_full"


class LogGapError(ReconcileError):
    """The Ozone Manager cannot tell what followed a place in its log."""

    code = "om_log_gap"


class LogTrimmedError(LogGapError):
    """It no longer keeps the log from there on."""

    code = "om_log_trimmed"


class WriteBatchError(ReconcileError):
    """A batch of the Ozone Manager's log cannot be decoded."""

    code = "om_batch_invalid"
