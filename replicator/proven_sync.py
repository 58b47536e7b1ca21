"""Copy a bucket once to a target with a verifier beside it: prove, write, and prove.

The plan is what a comparison found, so that nothing crosses for what is equal. Small
objects and new properties go to the verifier in batches, and of large objects the
windows that changed. Whole large objects go to the target's store directly. Each write
names the item that it replaces, and the source is read when it is sent, so that no
second comparison is needed before it. Deletes are sent after the second comparison,
which has to show them too (replicator.proven_deletes). Nothing is remembered of what
was sent: after a killed run the next comparison finds what is missing.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import chain, islice
from typing import TypeVar

from proof.comparison import BucketComparison
from proof.item import KEY_HASH_BYTES, Item, ItemHasher, ItemId
from proof.messages import (
    NAMES_MAX,
    NamesAnswer,
    NamesQuestion,
    QuestionMessage,
)
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.receipts import Receipt
from replicator.copier import Copier, NewExecutor
from replicator.copy import copy_object
from replicator.copy_requests import CopyFailedError, CopyResult, FailureReason
from replicator.copy_task import CopyTask
from replicator.crossing import Crossing, lacking
from replicator.deletes import MOVED, SecondCut, in_flight
from replicator.difference import Action
from replicator.hashing import blake3_of
from replicator.ledger import PairLedger, PlannedStep
from replicator.pair import check_pair
from replicator.plan_spool import PlanSpool
from replicator.proven_deletes import ProvenDeleter, shows_same_item
from replicator.proven_plan import ProvenStep, batched_writes, decide_step, refusal_error
from replicator.proven_receipt import proven_receipt
from replicator.proving import COMPARISONS_MAX, PairProof, PairProver, level_text
from replicator.refresh import IndexedBucket, is_unchanged
from replicator.stores.errors import ObjectMissingError, PreconditionFailedError, StoreError
from replicator.stores.port import ObjectFacts, ObjectProperties, Store
from replicator.sync import CopyTally, SyncOptions, SyncPlan, SyncReport
from replicator.verifier.client import VerifierClient
from replicator.verifier.values import (
    BODY_BYTES_MAX,
    DELETES_MAX,
    RUN_BYTES,
    Write,
    WriteOutcome,
    WritesRefusedError,
)
from replicator.window_patch import WindowPatcher
from runtime.errors import OperationInterruptedError, RemoteProtocolError
from runtime.progress import BYTES, ProgressSink
from runtime.rate_limit import Clock, RateLimiter
from runtime.retry import Sleep, call_with_retry

T = TypeVar("T")

# No item has it.
_NO_ID = ItemId(b"")
# Small objects that are read ahead of the batch that they will be in.
_READ_AHEAD = 64


def _keep_nothing(_part: BucketComparison) -> None:
    """The differences are counted, and that is all."""


class ProvenSync(AbstractContextManager["ProvenSync"]):
    """One run over a pair whose target has a verifier. Use it as a context manager."""

    def __init__(
        self,
        source: IndexedBucket,
        target: Store,
        ledger: PairLedger,
        client: VerifierClient,
        options: SyncOptions,
        *,
        progress: ProgressSink,
        clock: Clock,
        sleep: Sleep,
        is_cancelled: Callable[[], bool],
        new_executor: NewExecutor = ThreadPoolExecutor,
    ) -> None:
        """Prepare a run; nothing is read yet. `target` is the verifier's bucket.

        Raises:
            PairRefusedError: source and target are the same bucket.
            DiskError: the plan has no place on disk.
        """
        check_pair(source.store.address, target.address)
        self._source = source.store
        self._bucket = source
        self._target = target
        self._ledger = ledger
        self._client = client
        self._options = options
        self._progress = progress
        self._sleep = sleep
        self._is_cancelled = is_cancelled
        self._stop = threading.Event()
        self._crossing = Crossing.between(self._source.capabilities, target.capabilities)
        self._lists_all = all(one.capabilities.lists_all_keys for one in (self._source, target))
        self._prover = PairProver(
            source, client, prefix=options.prefix, stopped=self._is_stopped, progress=progress
        )
        self._workers = new_executor(options.copier_limits.objects, "object")
        self._rate = RateLimiter(options.bytes_per_second, clock, self._wait)
        self._copier = Copier(
            self._source,
            target,
            ledger,
            limits=options.copier_limits,
            rate=self._rate,
            backoff=options.backoff,
            sleep=sleep,
            is_cancelled=self._is_stopped,
            new_executor=new_executor,
        )
        self._patcher = WindowPatcher(
            self._source,
            client,
            source.profile,
            take_bytes=self._rate.take,
            new_executor=source.new_executor,
        )
        self._deleter = ProvenDeleter(
            self._source, client, source.profile, readers=self._workers, retried=self._of_source
        )
        self._proof: PairProof | None = None
        self._counts_bytes = True
        with ExitStack() as opened:
            # All, and objects that were small when they were listed, and are large now.
            self._steps, self._grown = (
                opened.enter_context(closing(PlanSpool(ledger.folder))) for _ in range(2)
            )
            opened.callback(self._copier.close)
            opened.callback(self._workers.shutdown, cancel_futures=True)
            self._opened = opened.pop_all()

    def __exit__(self, *_error: object) -> None:
        """Stop what still runs, and wait for requests that are on their way."""
        self._stop.set()
        self._opened.close()

    @property
    def limitations(self) -> tuple[str, ...]:
        """What does not cross between these stores, in sentences."""
        notes = lacking(self._source.capabilities, self._target.capabilities)
        if self._crossing.acl:
            notes += ("with a verifier ACLs are not compared: they cross with other changes only",)
        return notes

    @property
    def lists_all(self) -> bool:
        """Whether both sides list all keys; otherwise equality cannot be shown."""
        return self._lists_all

    def receipt(self) -> Receipt | None:
        """What the last comparison proved, to be signed; None where it is not known
        which set a side holds.
        """
        if self._proof is None or self._proof.is_moving or not self._lists_all:
            return None
        return proven_receipt(
            self._bucket,
            self._proof,
            source=self._source.address,
            target=self._target.address,
            prefix=self._options.prefix,
            time_ms=self._bucket.clock.now_ms(),
        )

    def plan(self) -> SyncPlan:
        """Bring both indexes up to date, compare them and make the plan.

        Raises:
            WritesRefusedError: the verifier takes no writes.
            StoreError: a side could not be listed or read, or did not answer.
            OperationInterruptedError: the caller interrupted it.
            ReconcileError: the comparison failed; nothing is known.
        """
        if not self._client.describe().takes_writes:
            raise WritesRefusedError(
                "this verifier takes no writes",
                hint="Set writes = true in its configuration, or sync without --verifier.",
            )
        # Not the secret itself: whoever has it can search for equal hashes.
        self._client.begin_run(blake3_of(b"run" + self._ledger.secret)[:RUN_BYTES])
        self._steps.clear()
        counts, extras, length_bytes = dict.fromkeys(Action, 0), 0, 0
        may_delete = self._options.delete and self._lists_all

        def take(part: BucketComparison) -> None:
            nonlocal extras, length_bytes
            named = self._named(part)
            for one in part.differences:
                theirs = named.get(one.theirs_id) if one.theirs_id else None
                step = decide_step(one, theirs, may_delete=may_delete)
                self._steps.add(step)
                counts[step.action] += 1
                extras += one.kind is ItemDifferenceKind.EXTRA
                length_bytes += step.length_bytes

        # What is to be deleted needs no facts but its key.
        proof = self._proof = self._prove(take, only_keys=may_delete)
        equal = proof.comparison.ours.count - len(self._steps) + extras
        return SyncPlan.of(counts, equal=equal, length_bytes=length_bytes)

    def steps(self) -> Iterator[PlannedStep]:
        """The plan, key by key in their order."""
        for step in self._steps:
            yield PlannedStep(
                step.key, step.action.value, step.length_bytes, None, None, step.reason
            )

    def execute(self, plan: SyncPlan) -> SyncReport:
        """Carry out the plan that `plan` has just made, and prove the result.

        Raises:
            VerifierUnavailableError: the verifier does not answer; run it again.
            StoreError: a side could not be listed: what is at the target is unknown.
            OperationInterruptedError: the caller interrupted it; run it again.
            ReconcileError: the comparison failed; nothing is known.
        """
        outcome = CopyTally()
        try:
            self._counts_bytes = plan.bytes > 0
            work = (plan.bytes, BYTES) if self._counts_bytes else (plan.changes, "keys")
            self._progress.begin("copy", *work)
            self._write_all((step for step in self._steps if step.is_small), outcome)
            large = (step for step in self._steps if step.action in (Action.COPY, Action.PATCH))
            self._copy_all((step for step in large if not step.is_small), outcome)
            self._copy_all(self._grown, outcome)
            if plan.deletes:
                self._prove_and_delete(outcome)
            elif plan.changes:
                self._proof = self._prove()
            for _ in range(COMPARISONS_MAX - 1):
                if self._proof is None or not self._proof.is_moving:
                    break
                self._proof = self._prove()
        except BaseException:
            self._stop.set()
            raise
        assert self._proof is not None
        found = self._proof.comparison
        left = self._proof.tally.count + self._proof.in_flight
        return outcome.report(
            equal=self._lists_all and self._proof.is_equal,
            level=level_text(found, self._bucket.profile),
            root=found.ours,
            differences=left,
            in_flight=self._proof.in_flight,
        )

    def _prove_and_delete(self, outcome: CopyTally) -> None:
        """Compare again, delete the extras that this and the plan show alike, and
        compare the indexes: the verifier notes each delete in its own.
        """
        cut = SecondCut(self._planned_deletes())

        def take(part: BucketComparison) -> None:
            for one in part.differences:
                is_extra = one.kind is ItemDifferenceKind.EXTRA
                if is_extra and not cut.confirms(one.key, shows_same_item(one)):
                    outcome.fail(one.key, in_flight(one.key, MOVED))

        known = (step.difference for step in self._planned_deletes())
        self._prove(take, known=known)
        if cut.confirmed:
            self._progress.begin("delete", cut.confirmed, "keys")
        confirmed = cut.of(self._planned_deletes())
        while batch := [step.difference for step in islice(confirmed, DELETES_MAX)]:
            self._check_stop()
            self._prover.note_deletes(self._deleter.delete(batch, outcome))
            self._progress.advance(len(batch))
        self._proof = self._prover.compare(_keep_nothing)

    def _planned_deletes(self) -> Iterator[ProvenStep]:
        return (step for step in self._steps if step.action is Action.DELETE)

    def _prove(
        self,
        take: Callable[[BucketComparison], None] = _keep_nothing,
        *,
        known: Iterable[ItemDifference] = (),
        only_keys: bool = False,
    ) -> PairProof:
        self._prover.refresh()
        return self._prover.compare(take, known=known, only_keys=only_keys)

    def _check_stop(self) -> None:
        if self._is_stopped():
            raise OperationInterruptedError("the sync was interrupted", hint="Run it again.")

    def _named(self, found: BucketComparison) -> dict[ItemId, Item]:
        """The target's items that changed, by ID, as far as it still has them."""
        ids = [
            one.theirs_id
            for one in found.differences
            if one.kind is ItemDifferenceKind.CHANGED and one.theirs_id
        ]
        pending = sorted({item_id[:KEY_HASH_BYTES] for item_id in ids})
        hasher, named, number = ItemHasher(self._bucket.profile), dict[ItemId, Item](), 0
        while pending:
            chunk = pending[:NAMES_MAX]
            question = NamesQuestion(found.position, b"".join(chunk))
            job = found.job
            asked = QuestionMessage(job, number, self._bucket.profile.digest, question)
            given = self._client.prove(asked)
            answer, is_ours = given.answer, (given.job, given.number) == (job, number)
            if not (
                is_ours and isinstance(answer, NamesAnswer) and 0 < answer.answered <= len(chunk)
            ):
                raise RemoteProtocolError("the verifier did not name what was asked")
            named |= {hasher.id(facts.item): facts.item for facts in answer.items}
            pending, number = pending[answer.answered :], number + 1
        return named

    def _write_all(self, steps: Iterator[ProvenStep], outcome: CopyTally) -> None:
        """Send what goes into batches."""
        first = next(steps, None)
        if first is None:
            return
        steps = chain((first,), steps)
        sent = deque[list[tuple[ProvenStep, Write]]]()

        def batches() -> Iterator[list[Write]]:
            for batch in batched_writes(self._prepared(steps, outcome)):
                sent.append(batch)
                yield [write for _, write in batch]

        for result in self._client.write(self._bucket.profile, batches()):
            for (step, write), done in zip(sent.popleft(), result.results, strict=True):
                _count(outcome, step, write, done)
                self._progress.advance(step.length_bytes if self._counts_bytes else 1)
            self._check_stop()

    def _prepared(
        self, steps: Iterable[ProvenStep], outcome: CopyTally
    ) -> Iterator[tuple[ProvenStep, Write]]:
        """Each write with its step, in order, some read ahead."""
        waiting = deque[tuple[ProvenStep, Future[Write | None]]]()
        left = iter(steps)
        while True:
            self._check_stop()
            while len(waiting) < _READ_AHEAD and (step := next(left, None)) is not None:
                waiting.append((step, self._workers.submit(self._prepare, step)))
            if not waiting:
                return
            step, future = waiting.popleft()
            try:
                write = future.result()
            except StoreError as error:
                outcome.fail(step.key, error)
                continue
            if write is not None:
                self._rate.take(len(write.body or b""))
                yield step, write

    def _prepare(self, step: ProvenStep) -> Write | None:
        """The write of a step, from the source as it is now; None if there is nothing
        to do any more.
        """
        key, replaced = step.key, step.difference.theirs_id
        facts = self._of_source(lambda: self._source.reader.facts(key))
        if facts is None:
            return None
        properties = self._properties(facts)
        row = self._bucket.index.row(key)
        if step.action is Action.PROPERTIES and row is not None and is_unchanged(row, facts):
            return Write(key, None, properties, b"", replaced)
        if facts.size_bytes > BODY_BYTES_MAX:
            self._grown.add(step)
            return None
        body = self._body(facts)
        return Write(key, body, properties, blake3_of(body), replaced)

    def _copy_all(self, steps: Iterable[ProvenStep], outcome: CopyTally) -> None:
        """Copy and patch large objects."""
        running = dict[Future[CopyResult | int | None], ProvenStep]()
        left = iter(steps)
        while True:
            self._check_stop()
            # Few are submitted ahead, so that an interruption does not wait for many.
            while len(running) < 2 * self._options.copier_limits.objects:
                step = next(left, None)
                if step is None:
                    break
                running[self._workers.submit(self._carry_out, step)] = step
            if not running:
                return
            for one in wait(running, return_when=FIRST_COMPLETED).done:
                step = running.pop(one)
                try:
                    result = one.result()
                except StoreError as error:
                    outcome.fail(step.key, error)
                else:
                    if isinstance(result, int):
                        outcome.copied += 1
                        outcome.bytes += result
                    else:
                        outcome.add(result)
                self._progress.advance(step.length_bytes if self._counts_bytes else 1)

    def _carry_out(self, step: ProvenStep) -> CopyResult | int | None:
        """Copy or patch one object; the bytes sent in patches."""
        facts = self._of_source(lambda: self._source.reader.facts(step.key))
        if facts is None:
            return None
        if step.action is Action.PATCH and facts.size_bytes:
            sent = self._patch(step, facts)
            if sent is not None:
                return sent
        target = call_with_retry(
            lambda: self._target.reader.facts(step.key),
            sleep=self._sleep,
            backoff=self._options.backoff,
        )
        task = CopyTask(
            source=facts,
            target=target,
            sends_pieces=self._target.piece_writer is not None,
            upload=self._ledger.upload(step.key),
            capabilities=self._target.capabilities,
            crossing=self._crossing,
            window_key=self._ledger.secret,
            limits=self._options.copy_limits,
            source_etags_prove=self._copier.source_etags_prove,
        )
        result = self._copier.run(copy_object(task))
        if result is not None:
            self._ledger.save_copy(result)
        return result

    def _patch(self, step: ProvenStep, facts: ObjectFacts) -> int | None:
        """Send the windows that changed; the bytes sent, or None where the object is
        better sent whole.
        """
        assert step.theirs is not None
        assert step.difference.theirs_id is not None
        assert self._proof is not None
        made = self._patcher.patch(
            facts,
            self._properties(facts),
            job=self._proof.comparison.job,
            base=step.difference.theirs_id,
            base_bytes=step.theirs.size_bytes,
        )
        return made.sent_bytes if made is not None else None

    def _properties(self, facts: ObjectFacts) -> ObjectProperties:
        """The properties that cross."""
        read = self._source.reader.properties_of
        try:
            return self._crossing.of(self._of_source(lambda: read(facts)))
        except (ObjectMissingError, PreconditionFailedError) as error:
            raise _source_changed(facts.key) from error

    def _body(self, facts: ObjectFacts) -> bytes:
        def read() -> bytes:
            with self._source.reader.read(facts) as pieces:
                return b"".join(pieces)

        try:
            return self._of_source(read)
        except (ObjectMissingError, PreconditionFailedError) as error:
            raise _source_changed(facts.key) from error

    def _of_source(self, call: Callable[[], T]) -> T:
        return call_with_retry(call, sleep=self._sleep, backoff=self._options.backoff)

    def _is_stopped(self) -> bool:
        return self._stop.is_set() or self._is_cancelled()

    def _wait(self, seconds: float) -> bool:
        self._sleep(seconds)
        return self._is_stopped()


def _source_changed(key: str) -> CopyFailedError:
    return CopyFailedError(FailureReason.SOURCE_CHANGED, f"{key} changed while it was read")


def _count(outcome: CopyTally, step: ProvenStep, write: Write, done: WriteOutcome) -> None:
    """Count what became of one write."""
    if done.error:
        outcome.fail(step.key, refusal_error(done.error, done.reason))
    elif write.body is not None:
        outcome.copied += 1
        outcome.bytes += len(write.body)
    else:
        outcome.metadata_only += 1
