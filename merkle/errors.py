"""Every error that Treefold raises on purpose.

An exception means that the caller does not get what it was promised. A fault that we
went looking for is a finding, a value in a report, and has no class here. `code` is
stable: it stands in logs, metrics, RPC details and JSON. `retryable` says whether the
same call may succeed later; `exit_status` is what a command that ends with this error
returns.
"""

from typing import ClassVar


class ReconcileError(Exception):
    """Base of all errors raised on purpose.

    Facts given as keywords become part of the message's context and are kept in
    `facts`.
    """

    code: ClassVar[str] = "failed"
    retryable: ClassVar[bool] = False
    exit_status: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.facts = facts


class UsageError(ReconcileError):
    """The arguments of a command or call cannot be understood."""

    code = "usage"
    exit_status = 2


class ConfigError(ReconcileError):
    """A configuration file is unreadable, or holds an unknown key or an impossible
    value.
    """

    code = "config_invalid"
    exit_status = 2


class TreeRefusedError(ReconcileError):
    """A tree is not one we may act on; `reason` says which rule it breaks
    (merkle.check.TreeRefusal).
    """

    code = "tree_refused"

    def __init__(self, reason: str, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, reason=reason, **facts)
        self.reason = reason


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


class DatabaseError(ReconcileError):
    """A RocksDB cannot be opened, read or written."""

    code = "database_failed"


class DiskError(ReconcileError):
    """A file operation failed; after a failed fsync the volume is suspect."""

    code = "disk_failed"


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


class RecordInvalidError(ReconcileError):
    """A block record cannot be parsed or contradicts itself."""

    code = "record_invalid"


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


class PeerUnavailableError(ReconcileError):
    """A peer did not answer in time; another peer, or a later round, may."""

    code = "peer_unavailable"
    retryable = True
    exit_status = 7


class PeerRefusedError(ReconcileError):
    """A peer answered with an error of its own; `facts['result']` is its name."""

    code = "peer_refused"


class RemoteProtocolError(ReconcileError):
    """A peer spoke nonsense: wrong container, wrong size, bytes that fail their
    checksum.
    """

    code = "remote_protocol"


class ControllerUnavailableError(ReconcileError):
    """The controller did not answer."""

    code = "controller_unavailable"
    retryable = True
    exit_status = 7


class InterruptedRepairError(ReconcileError):
    """A reconciliation was stopped because its container is being deleted or its job
    was cancelled.
    """

    code = "interrupted"


class BusyError(ReconcileError):
    """The same work is already queued or running, or a bounded queue is full."""

    code = "busy"
    exit_status = 8


class JobNotFoundError(ReconcileError):
    """There is no such job."""

    code = "job_not_found"


class ChunkTableError(ReconcileError):
    """A chunk table cannot be read; `reason` says why
    (protos.chunk_table.TableRefusal).
    """

    code = "chunk_table_invalid"

    def __init__(self, reason: str, message: str, *, hint: str = "", **facts: object) -> None:
        super().__init__(message, hint=hint, reason=reason, **facts)
        self.reason = reason


class DestinationError(ReconcileError):
    """A folder or bucket to export to cannot be written; what it held before is still
    there.
    """

    code = "destination_failed"
    retryable = True
    exit_status = 7


class ProcessFailedError(ReconcileError):
    """A process that was started for a purpose ended or did not start; the end of its
    log is in the message.
    """

    code = "process_failed"


class SparkMissingError(ReconcileError):
    """Spark cannot run here: there is no pyspark, no Java, or one that is too old."""

    code = "spark_missing"


class SparkFailedError(ReconcileError):
    """A job failed on Spark, and would again."""

    code = "spark_failed"


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
