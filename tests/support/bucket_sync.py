"""A sync between two stores, run in this process without waiting."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from replicator.copier import CopierLimits
from replicator.copy_task import CopyLimits
from replicator.ledger import Ledger
from replicator.stores.port import Store
from replicator.sync import BucketSync, SyncOptions, SyncPlan, SyncReport
from runtime.rate_limit import SystemClock
from runtime.retry import Backoff

# Small, so that objects of some KiB are large.
LIMITS = CopyLimits(part_bytes=64 << 10, parts_in_flight=2)
ONE_THREAD = CopierLimits(objects=1, parts=1, memory_bytes=1 << 20)


@dataclass
class Remarks:
    """A ProgressSink that keeps what it is told."""

    stages: list[tuple[str, int | None, str]] = field(default_factory=list)
    done: int = 0

    def note(self, text: str) -> None:
        """No remark is expected."""
        raise AssertionError(text)

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """A stage begins."""
        self.stages.append((what, total, unit))

    def advance(self, count: int) -> None:
        """Units are done."""
        self.done += count


@dataclass
class SyncRunner:
    """Runs syncs of one pair with one state folder."""

    source: Store
    target: Store
    folder: Path
    delete: bool = False
    copier_limits: CopierLimits = ONE_THREAD
    attempts_max: int = 1
    is_cancelled: Callable[[], bool] = lambda: False

    def __call__(self) -> SyncReport:
        """Plan and execute."""
        with self._ledger() as ledger, self.open(ledger) as sync:
            return sync.execute(sync.plan())

    def plan(self) -> tuple[SyncPlan, list[tuple[str, str]]]:
        """Plan only; with each step's key and action."""
        with self._ledger() as ledger, self.open(ledger) as sync:
            plan = sync.plan()
            return plan, [(step.key, step.action) for step in sync.steps()]

    def open(self, ledger: Ledger) -> BucketSync:
        """A sync that has not begun."""
        options = SyncOptions(
            delete=self.delete,
            copy_limits=LIMITS,
            copier_limits=self.copier_limits,
            backoff=Backoff(attempts_max=self.attempts_max, first_s=0, jitter_s=0),
        )
        return BucketSync(
            self.source,
            self.target,
            ledger,
            options,
            progress=Remarks(),
            clock=SystemClock(),
            sleep=lambda _s: None,
            is_cancelled=self.is_cancelled,
        )

    def _ledger(self) -> Ledger:
        return Ledger(self.folder, source=self.source.address, target=self.target.address)
