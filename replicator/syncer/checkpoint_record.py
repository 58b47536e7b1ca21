"""The record of how far a replication is, at the master and in the syncer's folder.

Keys that fail by themselves are passed over, so that a position says less where some
have failed. Which ones they are only this process knows. So the record tells the next
one that there were some, and that process knows them once it has compared all.
"""

from collections.abc import Callable
from dataclasses import replace

from replicator.replication import Checkpoint, Stage
from replicator.syncer.folder import SyncerFolder
from replicator.syncer.lease import Lease


class CheckpointRecord:
    """Saves checkpoints. Owned by the thread that works."""

    def __init__(
        self,
        begun_at: Checkpoint,
        *,
        lease: Lease,
        folder: SyncerFolder,
        failed: Callable[[], int],
    ) -> None:
        """`begun_at` is what is recorded now, and `failed` how many keys fail."""
        self._begun_at = begun_at
        self._lease, self._folder, self._failed = lease, folder, failed
        self._saved: Checkpoint | None = None
        self.has_unknown_failures = begun_at.has_failed
        """Whether keys failed in a process before this one, and nobody knows which."""

    @property
    def stage(self) -> Stage:
        """The stage that is recorded."""
        return (self._saved or self._begun_at).stage

    def note_compared(self) -> None:
        """Note that all was compared: what had failed before is known again."""
        self.has_unknown_failures = False

    def with_failures(self, checkpoint: Checkpoint) -> Checkpoint:
        """A checkpoint that says whether keys have failed."""
        return replace(checkpoint, has_failed=self._failed() > 0 or self.has_unknown_failures)

    def save(self, checkpoint: Checkpoint) -> None:
        """Record a checkpoint, unless it is what was recorded last.

        Raises:
            LeaseLostError: another syncer works on this.
            ReconcileError: the master does not answer, or a file cannot be written.
        """
        checkpoint = self.with_failures(checkpoint)
        if checkpoint == self._saved:
            # Rounds of a source without a log change nothing in it.
            return
        self._lease.check()
        self._lease.save(checkpoint)
        self._folder.save(checkpoint)
        self._saved = checkpoint

    def note_failures(self) -> None:
        """Record at once that keys have failed: the next process would take all before
        the position for copied.

        Raises:
            LeaseLostError, ReconcileError: see `save`.
        """
        known = self._saved or self._begun_at
        if self._failed() and not known.has_failed and known != Checkpoint():
            self.save(known)
