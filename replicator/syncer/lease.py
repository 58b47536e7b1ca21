"""Who may work on a replication now: a lease, whose epoch grows with each holder.

The port is what a syncer needs of its master. Whatever it changes, it asks first: the
queue, the checkpoint, and each write to the target. A syncer that was stopped for
longer than its lease finds out at its next step, by a clock that never jumps.
"""

import threading
from typing import Protocol

from merkle.errors import ReconcileError
from replicator.replication import Checkpoint
from runtime.rate_limit import Clock


class LeaseLostError(ReconcileError):
    """Another syncer may hold the replication by now. This one stops, and removes what
    it kept of it (OZ-049, OZ-050).
    """

    code = "lease_lost"
    exit_status = 8


class Lease(Protocol):
    """The right to work on one replication. Thread-safe."""

    @property
    def epoch(self) -> int:
        """Grows with every new holder of the replication."""

    def check(self) -> None:
        """Return if the lease has some time left.

        Raises:
            LeaseLostError: it has ended, or is about to.
        """

    def save(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint at the master if the epoch is still the newest one.

        Raises:
            LeaseLostError: it is not.
            ReconcileError: retryable: the master does not answer; it may have saved.
        """


class LeaseTimer:
    """When a lease ends, on the clock of its holder: a renewal counts from the moment
    at which it was asked for, so that the holder stops first. Thread-safe.
    """

    def __init__(self, clock: Clock, *, margin_s: float) -> None:
        """There is no lease yet. `margin_s` is kept for requests that are on their
        way when the lease ends.
        """
        self._clock = clock
        self._margin_s = margin_s
        self._lock = threading.Lock()
        self._until_s: float | None = None
        self._is_revoked = False

    def renew(self, *, asked_s: float, duration_s: float) -> None:
        """Note a renewal that was asked for at a moment of the monotonic clock."""
        with self._lock:
            until_s = asked_s + duration_s - self._margin_s
            self._until_s = max(until_s, self._until_s or until_s)

    def revoke(self) -> None:
        """The master has said that the lease is another's; no renewal helps."""
        with self._lock:
            self._is_revoked = True

    def left_s(self) -> float:
        """Seconds until work has to stop; 0 where it has to have stopped."""
        with self._lock:
            if self._is_revoked or self._until_s is None:
                return 0.0
            return max(0.0, self._until_s - self._clock.monotonic_s())

    def check(self) -> None:
        """Return if there is time left.

        Raises:
            LeaseLostError: there is none.
        """
        if not self.left_s():
            raise LeaseLostError("the lease of this replication has ended")


class LocalLease:
    """The lease of a syncer without a master: the lock of its folder keeps others out,
    and the folder has the checkpoint.
    """

    @property
    def epoch(self) -> int:
        """See Lease: there is one holder."""
        return 1

    def check(self) -> None:
        """See Lease."""

    def save(self, checkpoint: Checkpoint) -> None:
        """See Lease."""
