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
