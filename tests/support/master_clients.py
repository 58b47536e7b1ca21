"""Masters that a test plays itself."""

from replicator.master.client import SyncerClient
from replicator.master.syncer_rules import HeldReport
from replicator.syncer.lease import LeaseLostError


class RecordingClient(SyncerClient):
    """A master that refuses some reports, and keeps the others."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.saved: list[HeldReport] = []

    def save_report(self, held: HeldReport) -> None:
        """See SyncerClient."""
        if self.refusals:
            self.refusals -= 1
            raise LeaseLostError("a newer report is known")
        self.saved.append(held)
