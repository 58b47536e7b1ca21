"""What may be wrong with a volume, a container or what is done to them."""

from merkle.errors import ReconcileError
from runtime.errors import DiskError


class TreeMissingError(ReconcileError):
    """The container has no tree file yet; one is made in the background."""

    code = "tree_missing"
    retryable = True


class StaleTreeError(ReconcileError):
    """The stored tree changed after the caller read it; read it again and redo the
    work.
    """

    code = "tree_stale"
    retryable = True


class DescriptorError(ReconcileError):
    """A `.container` file cannot be parsed, or its checksum does not match."""

    code = "descriptor_invalid"


class VolumeError(ReconcileError):
    """A folder is not a usable Ozone volume."""

    code = "volume_invalid"


class VolumeLockedError(ReconcileError):
    """Another process holds the volume, so that we may not own it."""

    code = "volume_locked"
    exit_status = 8


class MappedReadError(DiskError):
    """A mapped file could not be checked, or the worker that did so died; read the file
    the plain way.
    """

    code = "mapped_read_failed"


class ContainerNotFoundError(ReconcileError):
    """There is no such container here."""

    code = "container_not_found"


class ContainerStateError(ReconcileError):
    """The container's state does not allow the operation."""

    code = "container_state"
    exit_status = 6


class ContainerUnsupportedError(ReconcileError):
    """The container is of a schema or layout of older Ozone releases, which is not
    read.
    """

    code = "container_unsupported"
    exit_status = 6


class BlockNotFoundError(ReconcileError):
    """There is no such block in the container."""

    code = "block_not_found"


class ChunkGapError(ReconcileError):
    """A write would leave a gap in a block file, or a record would name bytes that the
    file does not have.
    """

    code = "chunk_gap"


class ReadOnlyError(ReconcileError):
    """The volume is held read-only, or repair is not enabled in the configuration."""

    code = "read_only"
    exit_status = 6


class UndoBudgetError(ReconcileError):
    """The bytes to be overwritten do not fit the undo budget; the repair ends, and a
    later one goes on.
    """

    code = "undo_budget"
    exit_status = 6
