"""Kills a sync at a chosen point: around any request or change of the ledger."""

from collections.abc import Sequence

from replicator.copy_requests import CopyResult, SentPart, UploadRecord
from replicator.ledger import LedgerRow, PairLedger, PlannedStep
from tests.support.memory_store import StoreFaults


class KilledError(BaseException):
    """The process ends here. No code of the product catches it."""


class KillSwitch:
    """Counts points; from number `at` on every point ends the process."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.passed = 0

    def point(self, *_where: str) -> None:
        """Pass a point, or end."""
        self.passed += 1
        if self.at is not None and self.passed > self.at:
            raise KilledError

    def faults(self) -> StoreFaults:
        """Points before and after each operation of a store."""
        return StoreFaults(self.point, self.point)


class KillableLedger(PairLedger):
    """A ledger with points before and after each change."""

    switch = KillSwitch(None)

    def save_upload(self, key: str, record: UploadRecord | None) -> None:
        """See PairLedger."""
        self.switch.point()
        super().save_upload(key, record)
        self.switch.point()

    def save_part(self, key: str, sent: SentPart) -> None:
        """See PairLedger."""
        self.switch.point()
        super().save_part(key, sent)
        self.switch.point()

    def save_copy(self, result: CopyResult) -> None:
        """See PairLedger."""
        self.switch.point()
        super().save_copy(result)
        self.switch.point()

    def save_rows(self, rows: Sequence[LedgerRow]) -> None:
        """See PairLedger."""
        self.switch.point()
        super().save_rows(rows)

    def forget(self, keys: Sequence[str]) -> None:
        """See PairLedger."""
        self.switch.point()
        super().forget(keys)

    def add_to_plan(self, steps: Sequence[PlannedStep]) -> None:
        """See PairLedger."""
        self.switch.point()
        super().add_to_plan(steps)
