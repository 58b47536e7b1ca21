"""The lease of one replication, as the heartbeats of its syncer renew it.

Reports go to the master by two ways: with each heartbeat, and where a checkpoint has to
be on its disk before work goes on. Each has the next number, since a master refuses
what is older than what it knows. A heartbeat never says less than what was saved.
"""

import threading
from collections.abc import Callable
from dataclasses import replace

from replicator.master.client import SyncerClient
from replicator.master.syncer_rules import Assignment, HeldReport
from replicator.replication import Checkpoint, ReplicationReport
from replicator.syncer.lease import LeaseLostError, LeaseTimer

# A heartbeat may have passed by a report that was sent before it.
_SAVES_MAX = 3


class MasterLease:
    """The right of this syncer to work on one replication (Lease). Thread-safe."""

    def __init__(self, client: SyncerClient, timer: LeaseTimer, assignment: Assignment) -> None:
        """`timer` is that of the syncer: all its replications share one lease."""
        self._client = client
        self._timer = timer
        self._policy_id = assignment.policy.policy_id
        self._epoch = assignment.epoch
        self._saved = assignment.checkpoint
        self._sequence = 0
        self._is_revoked = False
        self._lock = threading.Lock()
        self.describe: Callable[[], ReplicationReport] | None = None
        """How the replication is; set by whoever works on it."""

    @property
    def epoch(self) -> int:
        """See Lease."""
        return self._epoch

    def check(self) -> None:
        """See Lease."""
        if self._is_revoked:
            raise LeaseLostError("another syncer may have this replication")
        self._timer.check()

    def revoke(self) -> None:
        """The master gave the replication to nobody or to another one."""
        self._is_revoked = True

    def save(self, checkpoint: Checkpoint) -> None:
        """See Lease."""
        assert self.describe is not None
        report = replace(self.describe(), checkpoint=checkpoint)
        with self._lock:
            for left in reversed(range(_SAVES_MAX)):
                self.check()
                self._sequence += 1
                held = HeldReport(self._policy_id, self._epoch, self._sequence, report)
                try:
                    self._client.save_report(held)
                    break
                except LeaseLostError:
                    if not left:
                        raise
            self._saved = checkpoint

    def report(self) -> HeldReport | None:
        """What the next heartbeat says; None while a checkpoint is being saved, which
        says it as well.
        """
        assert self.describe is not None
        report = self.describe()
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._sequence += 1
            known = replace(report, checkpoint=self._saved)
            return HeldReport(self._policy_id, self._epoch, self._sequence, known)
        finally:
            self._lock.release()
