"""A master in memory: who holds the lease of one replication, and its checkpoint."""

from collections.abc import Callable

from replicator.replication import Checkpoint
from replicator.stores.errors import StoreUnavailableError
from replicator.syncer.lease import LeaseLostError, LeaseTimer
from tests.support.replications import StepClock

LEASE_S = 10.0
MARGIN_S = 2.0


class LeaseAuthority:
    """Gives the lease to one holder at a time, by its own clock."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.epoch = 0
        self.until_s = float("-inf")
        self.checkpoint: Checkpoint | None = None
        self.on_save: Callable[[Checkpoint], None] = lambda _checkpoint: None

    def acquire(self) -> "SimulatedLease | None":
        """A lease for a new holder; None while another one may still work."""
        now_s = self._clock.monotonic_s()
        if now_s < self.until_s:
            return None
        self.epoch += 1
        self.until_s = now_s + LEASE_S
        lease = SimulatedLease(self, self.epoch, self._clock)
        lease.timer.renew(asked_s=now_s, duration_s=LEASE_S)
        return lease

    def renew(self, lease: "SimulatedLease") -> None:
        """Prolong a lease that has not ended."""
        now_s = self._clock.monotonic_s()
        if lease.epoch != self.epoch or now_s >= self.until_s:
            lease.timer.revoke()
            return
        self.until_s = now_s + LEASE_S
        lease.timer.renew(asked_s=now_s, duration_s=LEASE_S)

    def save(self, epoch: int, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint of the holder with this epoch."""
        if epoch != self.epoch:
            raise LeaseLostError("another syncer has the lease")
        self.checkpoint = checkpoint
        self.on_save(checkpoint)


class SimulatedLease:
    """One holder's lease; it may be cut off from the authority."""

    def __init__(self, authority: LeaseAuthority, epoch: int, clock: StepClock) -> None:
        self._authority = authority
        self._epoch = epoch
        self.timer = LeaseTimer(clock, margin_s=MARGIN_S)
        self.is_cut_off = False
        self.checks = True
        """A planted bug leaves the checks out."""

    @property
    def epoch(self) -> int:
        """See Lease."""
        return self._epoch

    def check(self) -> None:
        """See Lease."""
        if self.checks:
            self.timer.check()

    def save(self, checkpoint: Checkpoint) -> None:
        """See Lease."""
        if self.is_cut_off:
            raise StoreUnavailableError("the master does not answer")
        self._authority.save(self._epoch, checkpoint)
