"""What any process may meet: its arguments and settings, disks, other processes."""

from merkle.errors import ReconcileError


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


class DatabaseError(ReconcileError):
    """A RocksDB cannot be opened, read or written."""

    code = "database_failed"


class DiskError(ReconcileError):
    """A file operation failed; after a failed fsync the volume is suspect."""

    code = "disk_failed"


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


class BusyError(ReconcileError):
    """The same work is already queued or running, or a bounded queue is full."""

    code = "busy"
    exit_status = 8


class ProcessFailedError(ReconcileError):
    """A process that was started for a purpose ended or did not start; the end of its
    log is in the message.
    """

    code = "process_failed"


class OperationInterruptedError(ReconcileError):
    """The work was cancelled, or what it works on is being deleted."""

    code = "interrupted"
