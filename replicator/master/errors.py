"""What a caller of a replication master may meet."""

from merkle.errors import ReconcileError


class MasterUnavailableError(ReconcileError):
    """No replication master answered."""

    code = "replication_master_unavailable"
    retryable = True
    exit_status = 7


class PolicyNotFoundError(ReconcileError):
    """There is no such policy."""

    code = "policy_not_found"


class PolicyRefusedError(ReconcileError):
    """A policy cannot be made, or not be changed this way now; the message says why."""

    code = "policy_refused"
    exit_status = 6


class SyncerRefusedError(ReconcileError):
    """A syncer may not speak under this ID: another certificate registered it."""

    code = "syncer_refused"
    exit_status = 6
