"""A sync between two stores, run in this process without waiting."""

import random
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from proof.item import EvidenceLevel
from proof.receipts import Receipt
from replicator.copier import CopierLimits, NewExecutor
from replicator.copy_task import CopyLimits
from replicator.ledger import PairLedger
from replicator.stores.port import Store
from replicator.sync import BucketSync, SyncOptions, SyncPlan, SyncReport
from replicator.verify import BucketVerification, VerificationTally, VerifiedKey
from runtime.rate_limit import SystemClock
from runtime.retry import Backoff

# Small, so that objects of some KiB are large.
LIMITS = CopyLimits(part_bytes=64 << 10)
T = TypeVar("T")
P = ParamSpec("P")
Known = tuple[str, object, EvidenceLevel, bool, object]
ONE_THREAD = CopierLimits(objects=1, parts=1, memory_bytes=1 << 20)


class InlineExecutor(Executor):
    """Runs each call where it is submitted: one thread, one order."""

    def __init__(self, _threads: int, _name: str) -> None:
        pass

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor."""
        future = Future[T]()
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - a future takes any
            future.set_exception(error)
        return future


class _LateFuture(Future[T]):
    """A call that may not have run yet; who wants its result waits for others first."""

    def __init__(self, executor: "ChanceExecutor") -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> T:
        """See Future."""
        self._executor.run_until(self)
        return super().result(timeout)


class ChanceExecutor(Executor):
    """Runs calls in one thread and in any order: at once, or when a result is wanted.
    Nobody may wait for its futures otherwise.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._waiting: list[tuple[Future[object], Callable[[], object]]] = []

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor."""
        future = _LateFuture[T](self)
        self._waiting.append((future, partial(call, *args, **kwargs)))
        if self._rng.random() < 0.5:
            self.run_until(future)
        return future

    def run_until(self, future: Future[T]) -> None:
        """Run calls that wait, until this one has run."""
        while not future.done():
            one, call = self._waiting.pop(self._rng.randrange(len(self._waiting)))
            try:
                one.set_result(call())
            except BaseException as error:  # noqa: BLE001 - a future takes any
                one.set_exception(error)


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
    prefix: str = ""
    failures_named_max: int = 10_000
    copy_limits: CopyLimits = LIMITS
    copier_limits: CopierLimits = ONE_THREAD
    attempts_max: int = 1
    is_cancelled: Callable[[], bool] = lambda: False
    new_executor: NewExecutor = InlineExecutor
    progress: Remarks = field(default_factory=Remarks)

    def __call__(self) -> SyncReport:
        """Plan and execute."""
        with self._ledger() as ledger, self.open(ledger) as sync:
            return sync.execute(sync.plan())

    def plan(self) -> tuple[SyncPlan, list[tuple[str, str]]]:
        """Plan only; with each step's key and action."""
        with self._ledger() as ledger, self.open(ledger) as sync:
            plan = sync.plan()
            return plan, [(step.key, step.action) for step in sync.steps()]

    def open(self, ledger: PairLedger) -> BucketSync:
        """A sync that has not begun."""
        options = SyncOptions(
            prefix=self.prefix,
            failures_named_max=self.failures_named_max,
            delete=self.delete,
            copy_limits=self.copy_limits,
            copier_limits=self.copier_limits,
            backoff=Backoff(attempts_max=self.attempts_max, first_s=0, jitter_s=0),
        )
        return BucketSync(
            self.source,
            self.target,
            ledger,
            options,
            progress=self.progress,
            clock=SystemClock(),
            sleep=lambda _s: None,
            is_cancelled=self.is_cancelled,
            new_executor=self.new_executor,
        )

    def _ledger(self) -> PairLedger:
        return PairLedger(self.folder, source=self.source.address, target=self.target.address)


def bucket_verification(
    source: Store, target: Store, ledger: PairLedger, level: EvidenceLevel, readers: Executor
) -> BucketVerification:
    """A verification that tries nothing again and waits for nothing."""
    return BucketVerification(
        source,
        target,
        ledger,
        level=level,
        readers=readers,
        clock=SystemClock(),
        sleep=lambda _s: None,
        backoff=Backoff(attempts_max=1),
        is_cancelled=lambda: False,
    )


def known(key: VerifiedKey) -> Known:
    """What is printed of a key."""
    return key.key, key.kind, key.level, key.is_unsettled, key.damage


def stated(tally: VerificationTally, run: BucketVerification) -> list[object]:
    """All that a verification says of both sides together."""
    receipt = run.receipt(tally, "")
    assert receipt is None or isinstance(receipt, Receipt)
    unsigned = replace(receipt, time_ms=0) if receipt else None
    return [
        *(tally.objects, tally.differences, tally.unsettled, tally.kinds, tally.levels),
        *(tally.sets.levels, tally.sets.root, tally.sets.level, tally.is_equal),
        unsigned
        and replace(
            unsigned,
            source=replace(unsigned.source, oldest_read_at_s=None),
            target=replace(unsigned.target, oldest_read_at_s=None),
        ),
    ]
