"""Copy a bucket once: compare, plan, copy, compare again, and delete.

The plan is made whole before anything is changed, in the ledger, so that its length is
known and a listing that fails changes nothing. The result is never concluded from what
was copied: it is what another comparison found, which began after the last copy.
"Equal" is said only of one moment at which both sides held all that was compared
(replicator.cut). While they move they are compared again, a few times.

Deletes come last, because they need two comparisons (replicator.deletes). No listing
follows them. The store answers for each key that it is deleted, so the result is that
of the last comparison without these keys.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Self, TypeVar

from merkle.errors import ReconcileError
from proof.receipts import Receipt
from proof.root import SetRoot
from replicator.comparison import DecidedKey, EqualityTally, KeyComparison
from replicator.copier import Copier, CopierLimits, NewExecutor
from replicator.copy_requests import (
    CopyFailedError,
    CopyResult,
    FailureReason,
    ObjectStamp,
)
from replicator.copy_task import CopyLimits
from replicator.crossing import Crossing, lacking
from replicator.cut import CutCheck
from replicator.deletes import (
    DELETES_AT_ONCE,
    MOVED,
    ExtraDeleter,
    SecondCut,
    in_flight,
    shows_same,
)
from replicator.difference import Action, DecisionRules
from replicator.key_copy import KeyCopier
from replicator.ledger import PairLedger, PlannedStep
from replicator.listing import lists_key
from replicator.pair import check_pair
from replicator.stores.errors import StoreError, UnsupportedObjectError
from replicator.stores.port import ObjectFacts, Store
from replicator.uploads import drop_upload
from runtime.errors import OperationInterruptedError
from runtime.progress import BYTES, ProgressSink
from runtime.rate_limit import Clock, RateLimiter
from runtime.retry import Backoff, Sleep, call_with_retry

T = TypeVar("T")

# Steps written to the plan in one transaction.
_STEPS_AT_ONCE = 1_000
# Comparisons after the last write: what still moves then is in flight.
_COMPARISONS_MAX = 4


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """What the caller may choose. A rate of 0 bytes per second is no limit. So many
    failures are named in the report; all are counted.
    """

    prefix: str = ""
    delete: bool = False
    bytes_per_second: int = 0
    failures_named_max: int = 10_000
    copy_limits: CopyLimits = field(default_factory=CopyLimits)
    copier_limits: CopierLimits = field(default_factory=CopierLimits)
    backoff: Backoff = field(default_factory=Backoff)


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What will be done: keys by action, and the object bytes of copies and patches.
    Of a patch only the changed bytes will cross, so that `bytes` is an upper bound.
    """

    copies: int
    patches: int
    properties: int
    deletes: int
    extras: int
    equal: int
    bytes: int

    @classmethod
    def of(cls, counts: Mapping[Action, int], *, equal: int, length_bytes: int) -> Self:
        """The plan of so many keys of each action."""
        return cls(
            copies=counts[Action.COPY],
            patches=counts[Action.PATCH],
            properties=counts[Action.PROPERTIES],
            deletes=counts[Action.DELETE],
            extras=counts[Action.LEAVE],
            equal=equal,
            bytes=length_bytes,
        )

    @property
    def objects(self) -> int:
        """How many keys the source has."""
        return self.copies + self.patches + self.properties + self.equal

    @property
    def changes(self) -> int:
        """How many keys will be changed at the target."""
        return self.copies + self.patches + self.properties + self.deletes

    @property
    def work(self) -> tuple[int, str]:
        """What there is to do before the deletes, and its unit: bytes, or keys where
        only empty objects and properties cross.
        """
        return (self.bytes, BYTES) if self.bytes else (self.changes - self.deletes, "keys")


@dataclass(frozen=True, slots=True)
class Failure:
    """A key that was not brought to the target. `reason` is a value of FailureReason,
    `detail` a sentence.
    """

    key: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The outcome. `differences` are keys that were unequal when they were compared
    again and were not deleted since, and the keys `in_flight`: they were equal when
    they were looked at, but were changed while others were. `root` is of the objects
    that were equal, as 32 hexadecimal digits. `failed` are the first of `failed_count`
    failures.
    """

    copied: int
    deleted: int
    metadata_only: int
    bytes: int
    failed: tuple[Failure, ...]
    failed_count: int
    equal: bool
    level: str
    root: str
    differences: int
    in_flight: int = 0

    def document(self) -> dict[str, object]:
        """The report as the command prints it."""
        return {
            "copied": self.copied,
            "deleted": self.deleted,
            "metadataOnly": self.metadata_only,
            "bytes": self.bytes,
            "failed": [{"key": one.key, "reason": one.reason} for one in self.failed],
            "failedCount": self.failed_count,
            "equal": self.equal,
            "level": self.level,
            "root": self.root,
            "differences": self.differences,
        }


@dataclass(slots=True)
class CopyTally:
    """Counts what a run did at the target."""

    copied: int = 0
    deleted: int = 0
    metadata_only: int = 0
    bytes: int = 0
    failed_count: int = 0
    failed: list[Failure] = field(default_factory=list)
    failures_named_max: int = 10_000

    def add(self, result: CopyResult | None) -> None:
        """Count a copy; None is a source that is gone."""
        if result is None:
            return
        self.bytes += result.sent_bytes
        if result.properties_only:
            self.metadata_only += 1
        else:
            self.copied += 1

    def fail(self, key: str, error: ReconcileError) -> None:
        """Count a key that was not brought to the target."""
        self.failed_count += 1
        if len(self.failed) < self.failures_named_max:
            self.failed.append(Failure(key, _failure_reason(error).value, error.message))

    def report(
        self, *, equal: bool, level: str, root: SetRoot, differences: int, in_flight: int = 0
    ) -> SyncReport:
        """The report, with what the comparison after it found."""
        return SyncReport(
            copied=self.copied,
            deleted=self.deleted,
            metadata_only=self.metadata_only,
            bytes=self.bytes,
            failed=tuple(self.failed),
            failed_count=self.failed_count,
            equal=equal,
            level=level,
            root=f"{root.total:032x}",
            differences=differences,
            in_flight=in_flight,
        )


class BucketSync:
    """One run over a pair of stores. Use it as a context manager."""

    def __init__(
        self,
        source: Store,
        target: Store,
        ledger: PairLedger,
        options: SyncOptions,
        *,
        progress: ProgressSink,
        clock: Clock,
        sleep: Sleep,
        is_cancelled: Callable[[], bool],
        new_executor: NewExecutor = ThreadPoolExecutor,
    ) -> None:
        """Prepare a run; nothing is read yet.

        Raises:
            PairRefusedError: source and target are the same bucket.
        """
        check_pair(source.address, target.address)
        self._source = source
        self._target = target
        self._ledger = ledger
        self._options = options
        self._progress = progress
        self._clock = clock
        self._sleep = sleep
        self._is_cancelled = is_cancelled
        self._crossing = Crossing.between(source.capabilities, target.capabilities)
        self._workers = new_executor(options.copier_limits.copies, "object")
        self._stop = threading.Event()
        rate = RateLimiter(options.bytes_per_second, clock, self._wait)
        self._copier = Copier(
            source,
            target,
            ledger,
            limits=options.copier_limits,
            rate=rate,
            backoff=options.backoff,
            sleep=sleep,
            is_cancelled=self._is_stopped,
            new_executor=new_executor,
        )
        self._keys = KeyCopier(
            target,
            ledger,
            self._copier,
            crossing=self._crossing,
            limits=options.copy_limits,
        )
        self._lists_all = all(one.capabilities.lists_all_keys for one in (source, target))
        rules = DecisionRules(
            may_delete=options.delete and self._lists_all,
            stamps_cover_properties=source.capabilities.stamps_cover_properties,
            patches=target.capabilities.copies_ranges,
        )
        self._comparison = KeyComparison(
            source,
            target,
            ledger,
            rules=rules,
            readers=self._workers,
            sleep=sleep,
            backoff=options.backoff,
            is_cancelled=self._is_stopped,
            crossing=self._crossing,
        )
        self._deleter = ExtraDeleter(source, target, readers=self._workers, retried=self._retried)
        self._tally = EqualityTally(ledger.secret)
        self._second_cut: SecondCut[PlannedStep] | None = None
        self._in_flight = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what still runs, and wait for requests that are on their way."""
        self._stop.set()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._copier.close()

    @property
    def limitations(self) -> tuple[str, ...]:
        """What does not cross between these stores, in sentences; to be said before the
        first byte.
        """
        return lacking(self._source.capabilities, self._target.capabilities)

    @property
    def lists_all(self) -> bool:
        """Whether both sides list all keys; otherwise equality cannot be shown."""
        return self._lists_all

    def plan(self) -> SyncPlan:
        """Compare both sides and make the plan; `steps` has it key by key.

        Raises:
            StoreError: a listing is not complete, or a side did not answer.
            OperationInterruptedError: the caller interrupted it.
        """
        self._ledger.save_crossing(self._crossing)
        self._ledger.clear_plan()
        self._second_cut = None
        counts = dict.fromkeys(Action, 0)
        length_bytes = 0
        batch = list[PlannedStep]()
        # Without a prefix about as many keys as the last run has seen.
        estimate = 0 if self._options.prefix else self._ledger.row_count()
        self._progress.begin("compare", estimate or None, "keys")
        for decided in self._compared(rows_are_fresh=False):
            state, decision = decided.state, decided.decision
            counts[decision.action] += 1
            if decision.action is Action.NOTHING:
                continue
            step = PlannedStep(
                key=state.key,
                action=decision.action.value,
                length_bytes=_sent_at_most(decision.action, state.source),
                source=ObjectStamp.of(state.source) if state.source else None,
                target=ObjectStamp.of(state.target) if state.target else None,
                reason=decision.reason,
            )
            length_bytes += step.length_bytes
            batch.append(step)
            if len(batch) >= _STEPS_AT_ONCE:
                self._ledger.add_to_plan(batch)
                batch.clear()
        self._ledger.add_to_plan(batch)
        return SyncPlan.of(counts, equal=counts[Action.NOTHING], length_bytes=length_bytes)

    def steps(self) -> Iterator[PlannedStep]:
        """The plan, key by key in their order."""
        return self._ledger.plan()

    def execute(self, plan: SyncPlan) -> SyncReport:
        """Carry out the plan that `plan` has just made: copy, compare again, and delete
        what both comparisons showed.

        Raises:
            StoreError: a listing is not complete: what is at the target is unknown.
            OperationInterruptedError: the caller interrupted it; run it again.
        """
        outcome = CopyTally(failures_named_max=self._options.failures_named_max)
        try:
            self._clean_scratch()
            self._progress.begin("copy", *plan.work)
            self._copy_all(plan, outcome)
            if outcome.failed_count == len(outcome.failed):
                self._drop_uploads({one.key for one in outcome.failed})
            if plan.changes or self._in_flight:
                self._compare_again(plan, outcome)
            self._delete_all(outcome)
        except BaseException:
            # Threads that wait for memory or parts end, too.
            self._stop.set()
            raise
        tally = self._tally
        return outcome.report(
            equal=self._lists_all and not tally.differences and not self._in_flight,
            level=tally.level_text,
            root=tally.root,
            differences=tally.differences + self._in_flight,
            in_flight=self._in_flight,
        )

    def receipt(self) -> Receipt | None:
        """What the last comparison found of both sides, but for what was deleted after
        it, to be signed; None where a side does not list all keys or changed meanwhile,
        so that nobody knows what it holds.
        """
        if not self._lists_all or self._in_flight:
            return None
        return self._tally.sets.receipt(
            source=self._source.address,
            target=self._target.address,
            prefix=self._options.prefix,
            groups=self._crossing.groups,
            time_ms=self._clock.now_ms(),
        )

    def _compare_again(self, plan: SyncPlan, outcome: CopyTally) -> None:
        """Compare until nothing moved meanwhile, or no further look can help. The last
        comparison is the second cut, which confirms deletes.
        """
        # Of a key that failed the ledger may know what an earlier run has seen.
        rows_are_fresh = not outcome.failed_count
        for _ in range(_COMPARISONS_MAX):
            self._progress.begin("verify", plan.equal + plan.changes + plan.extras, "keys")
            cut = self._second_cut = SecondCut(self._planned_deletes())
            moved, moved_count = list[str](), 0
            for decided in self._compared(rows_are_fresh=rows_are_fresh):
                if decided.decision.action is not Action.DELETE:
                    continue
                if not cut.confirms(decided.state.key, shows_same(decided)):
                    moved_count += 1
                    if moved_count <= self._options.failures_named_max:
                        moved.append(decided.state.key)
            if not self._in_flight:
                break
            rows_are_fresh = True
        for key in moved:
            outcome.fail(key, in_flight(key, MOVED))
        outcome.failed_count += moved_count - len(moved)

    def _compared(self, *, rows_are_fresh: bool) -> Iterator[DecidedKey]:
        """Compare all keys; the tally and the keys in flight are those of this look."""
        prefix = self._options.prefix
        tally = self._tally = EqualityTally(self._ledger.secret)
        cut = CutCheck(
            self._source,
            self._target,
            prefix,
            rows_are_fresh=rows_are_fresh,
            retried=self._retried,
        )
        for decided in self._comparison.decisions(prefix):
            tally.add(decided)
            cut.add(decided)
            self._progress.advance(1)
            yield decided
        # Differences are reported as such; what moved besides makes no difference then.
        deletes = self._second_cut.confirmed if self._second_cut is not None else 0
        is_unequal = tally.differences > deletes
        self._in_flight = 0 if is_unequal else cut.in_flight(self._comparison.gone)

    def _copy_all(self, plan: SyncPlan, outcome: CopyTally) -> None:
        running = dict[Future[CopyResult | None], PlannedStep]()
        for step in self._ledger.plan():
            if Action(step.action) in (Action.DELETE, Action.LEAVE):
                continue
            self._check_stop()
            # Few are submitted ahead, so that an interruption does not wait for many.
            if len(running) >= 2 * self._options.copier_limits.copies:
                self._settle(running, plan, outcome)
            running[self._workers.submit(self._carry_out, step)] = step
        while running:
            self._settle(running, plan, outcome)

    def _settle(
        self,
        running: dict[Future[CopyResult | None], PlannedStep],
        plan: SyncPlan,
        outcome: CopyTally,
    ) -> None:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            step = running.pop(one)
            try:
                outcome.add(one.result())
            except StoreError as error:
                outcome.fail(step.key, error)
            self._progress.advance(step.length_bytes if plan.bytes else 1)

    def _carry_out(self, step: PlannedStep) -> CopyResult | None:
        assert step.source is not None
        target = step.target.facts(step.key) if step.target else None
        source = step.source.facts(step.key)
        row = self._ledger.row(step.key)
        result = self._keys.carry_out(Action(step.action), source, target, row)
        if result is None and self._retried(lambda: lists_key(self._source.lister, step.key)):
            raise CopyFailedError(
                FailureReason.SOURCE_UNREADABLE,
                f"{step.key} is listed at the source, but it cannot be read there",
            )
        return result

    def _delete_all(self, outcome: CopyTally) -> None:
        """Delete the extras that both cuts have shown alike. What the store answers for
        each key is known of it; the rest is as the second cut has shown it.
        """
        cut = self._second_cut
        if cut is None or not cut.confirmed:
            return
        self._progress.begin("delete", cut.confirmed, "keys")
        confirmed = cut.of(self._planned_deletes())
        while batch := list(islice(confirmed, DELETES_AT_ONCE)):
            self._check_stop()
            result = self._deleter.delete(batch)
            self._ledger.forget([step.key for step in result.deleted])
            for step in result.deleted:
                assert step.target is not None
                self._tally.remove_extra(step.key, step.target.size_bytes)
            for key, error in result.failed:
                outcome.fail(key, error)
            outcome.deleted += len(result.deleted)
            self._progress.advance(len(batch))

    def _planned_deletes(self) -> Iterator[PlannedStep]:
        return (step for step in self._ledger.plan() if step.action == Action.DELETE.value)

    def _drop_uploads(self, failed: set[str]) -> None:
        """Abort uploads of earlier runs whose keys need no copy any more. Those of keys
        that failed now are kept: the next run resumes them.
        """
        for key in self._ledger.upload_keys():
            record = self._ledger.upload(key)
            if record is not None and key not in failed:
                with suppress(StoreError):
                    self._copier.run(drop_upload(key, record))

    def _clean_scratch(self) -> None:
        """Remove what a killed patch left at the target."""
        scratch = self._target.scratch
        records = (self._ledger.upload(key) for key in self._ledger.upload_keys())
        if scratch is not None and any(one is not None and not one.is_whole for one in records):
            # What is left takes space and does no other harm; a later run removes it.
            with suppress(StoreError):
                scratch.clean(before_ms=self._clock.now_ms())

    def _retried(self, call: Callable[[], T]) -> T:
        return call_with_retry(call, sleep=self._sleep, backoff=self._options.backoff)

    def _is_stopped(self) -> bool:
        return self._stop.is_set() or self._is_cancelled()

    def _check_stop(self) -> None:
        if self._is_stopped():
            raise OperationInterruptedError("the sync was interrupted", hint="Run it again.")

    def _wait(self, seconds: float) -> bool:
        self._sleep(seconds)
        return self._is_stopped()


def _failure_reason(error: ReconcileError) -> FailureReason:
    """Why a key was not brought to the target, of the error that stopped it."""
    if isinstance(error, CopyFailedError):
        return error.reason
    if isinstance(error, UnsupportedObjectError):
        return FailureReason.UNSUPPORTED
    return FailureReason.UNAVAILABLE if error.retryable else FailureReason.TARGET_REFUSED


def _sent_at_most(action: Action, source: ObjectFacts | None) -> int:
    is_sent = source is not None and action in (Action.COPY, Action.PATCH)
    return source.size_bytes if source is not None and is_sent else 0
