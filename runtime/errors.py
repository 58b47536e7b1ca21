"""Errors of any process: arguments, settings, disks, databases, other processes."""

from merkle.errors import ReconcileError


class UsageError(ReconcileError):
    """The arguments of a command or call are invalid."""

    code = "usage"
    exit_status = 2


class ConfigError(ReconcileError):
    """A configuration file is unreadable, or has an unknown key or an invalid value."""

    code = "config_invalid"
    exit_status = 2


class DatabaseError(ReconcileError):
    """A RocksDB database cannot be opened, read or written."""

    code = "database_failed"


class DiskError(ReconcileError):
    """A file operation failed. After a failed fsync the volume is suspect."""

    code = "disk_failed"


class OutputError(ReconcileError):
    """The answer of a command cannot be written to stdout; it is lost."""

    code = "output_failed"


class PeerUnavailableError(ReconcileError):
    """A peer did not answer in time; another peer, or a later round, may."""

    code = "peer_unavailable"
    retryable = True
    exit_status = 7


class PeerRefusedError(ReconcileError):
    """A peer answered with an error; `facts['result']` is the name of that error."""

    code = "peer_refused"


class AccessDeniedError(ReconcileError):
    """The caller's certificate has no role that may make this call."""

    code = "permission_denied"
    exit_status = 6


class RemoteProtocolError(ReconcileError):
    """A peer sent an invalid message: wrong container, wrong size, or bytes that fail
    their checksum.
    """

    code = "remote_protocol"


class BusyError(ReconcileError):
    """The same work is already queued or running, or a queue is full."""

    code = "busy"
    exit_status = 8


class ProcessFailedError(ReconcileError):
    """A child process did not start, or ended early; the message has the end of its
    log.
    """

    code = "process_failed"


class OperationInterruptedError(ReconcileError):
    """The work was cancelled, or its container or volume is being closed or deleted."""

    code = "interrupted"


class InternalError(ReconcileError):
    """An error that nobody foresaw: a defect, or a system call that was not expected to
    fail. The log has its cause.
    """

    code = "internal"
