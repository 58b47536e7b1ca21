"""Why a replication waits or stopped, of the error that ended its work."""

from dataclasses import dataclass

from merkle.errors import ReconcileError
from replicator.copy_requests import CopyFailedError, FailureReason
from replicator.ledger import LedgerDamagedError
from replicator.replication import ReplicationFault
from replicator.stores.errors import StoreError, UnsupportedObjectError
from replicator.syncer.lease import LeaseLostError
from replicator.syncer.queue import QueueDamagedError
from runtime.errors import DatabaseError, DiskError

_FULL = frozenset({"ENOSPC", "EDQUOT", "QUOTA_EXCEEDED", "QuotaExceeded", "InsufficientCapacity"})
_FULL |= {"XMinioStorageFull", "QuotaExceededException", "StorageFull"}
_FORBIDDEN = frozenset({"AccessDenied", "PERMISSION_DENIED", "EACCES", "EPERM", "EROFS"})
_FORBIDDEN |= {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled", "AccountProblem"}
_MISSING = frozenset({"NoSuchBucket", "BUCKET_NOT_FOUND", "VOLUME_NOT_FOUND"})
_OF_KEYS = frozenset(FailureReason) - {FailureReason.UNAVAILABLE, FailureReason.TARGET_REFUSED}


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """A fault, and what follows: `waits`: try again for ever; `is_of_key`: one object
    only, so that the others go on. With neither the replication stops until it is
    resumed.
    """

    fault: ReplicationFault
    message: str
    waits: bool = False
    is_of_key: bool = False


def verdict(
    error: ReconcileError, *, source_answers: bool, fails_alone: bool = False
) -> FaultVerdict:
    """What follows from an error. `source_answers` says whether the source was asked
    after it, and did: then the target is to blame where the error does not say.
    `fails_alone` says that both stores answer for other keys, again and again.
    """
    text = f"{error.message} {error.hint}".strip()
    reason = error.reason if isinstance(error, CopyFailedError) else None
    is_of_source = not source_answers or reason is FailureReason.SOURCE_UNREADABLE
    fault = ReplicationFault
    if isinstance(error, LeaseLostError):
        return FaultVerdict(fault.LEASE_LOST, text)
    if isinstance(error, QueueDamagedError | LedgerDamagedError):
        return FaultVerdict(fault.STATE_DAMAGED, text)
    if isinstance(error, DiskError | DatabaseError):
        # Stores have errors of their own, also those in folders.
        return FaultVerdict(fault.LOCAL_DISK, text)
    if error.retryable or reason is FailureReason.UNAVAILABLE:
        if fails_alone:
            return FaultVerdict(fault.OBJECT_FAILED, text, is_of_key=True)
        waiting = fault.SOURCE_UNAVAILABLE if is_of_source else fault.TARGET_UNAVAILABLE
        return FaultVerdict(waiting, text, waits=True)
    if isinstance(error, UnsupportedObjectError) or reason is FailureReason.UNSUPPORTED:
        return FaultVerdict(fault.OBJECT_UNSUPPORTED, text, is_of_key=True)
    words = _words(error)
    if words & _FULL:
        return FaultVerdict(fault.TARGET_FULL, text)
    if words & _FORBIDDEN:
        forbidden = fault.SOURCE_FORBIDDEN if is_of_source else fault.TARGET_FORBIDDEN
        # A source that answers forbids this object alone.
        return FaultVerdict(forbidden, text, is_of_key=is_of_source and source_answers)
    if words & _MISSING:
        return FaultVerdict(fault.SOURCE_MISSING if is_of_source else fault.TARGET_MISSING, text)
    if reason in _OF_KEYS:
        return FaultVerdict(fault.OBJECT_FAILED, text, is_of_key=True)
    if isinstance(error, StoreError):
        return FaultVerdict(fault.OBJECT_FAILED, text, is_of_key=True)
    return FaultVerdict(fault.DEFECT, text)


def _words(error: BaseException | None) -> set[str]:
    """The names of an error and of what caused it, as stores spell them."""
    found = set[str]()
    while error is not None:
        facts = error.facts if isinstance(error, ReconcileError) else {}
        found |= {
            str(facts[name]) for name in ("errno", "s3_code", "code", "result") if name in facts
        }
        if facts.get("status") == 403:
            found.add("AccessDenied")
        if facts.get("status") == 507:
            found.add("StorageFull")
        if facts.get("denied"):
            found.add("EACCES")
        error = error.__cause__
    return found
