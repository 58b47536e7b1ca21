"""Compare a source with its target by their indexes, in a thread of its own.

The index of the source is kept in the replication's folder, and opened for one
comparison. What the ledger knows of contents is not read again. What differs goes to a
file, and is decided and applied by others.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from merkle.errors import ReconcileError
from proof.column_naming import difference_names
from proof.comparison import BucketComparison
from proof.errors import IndexDamagedError, IndexRefusedError
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.stored_index import StoredIndex
from replicator.copier import NewExecutor
from replicator.difference import Action
from replicator.ledger import PairLedger
from replicator.plan_spool import PlanSpool
from replicator.proven_plan import ProvenStep
from replicator.proving import COMPARISONS_MAX, PairProof, PairProver, level_text
from replicator.refresh import IndexedBucket, is_unchanged
from replicator.stores.port import ObjectFacts, ObjectReader, Store
from replicator.syncer.target_verifier import TargetVerifier, VerifierSession
from runtime.disk import Disk
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import Clock

_INDEX_PREFIX = "index-"
# Why a difference is applied although the ledger calls both sides equal.
DOUBTED = "the ledger takes it for equal"
# Why a key is looked at that is equal by both indexes.
_UNRECORDED = "the ledger does not have it"
_ROWS_AT_ONCE = 1_000


@dataclass(frozen=True, slots=True)
class IndexFindings:
    """What a comparison of two indexes found. `steps` has the differences; close it.
    `level` is that at which all else is equal. `in_flight` is 0 where both sides were
    at one moment what was compared. Unless `is_certain`, some keys changed under each
    look, or could not be named.
    """

    began_ms: int
    steps: PlanSpool
    level: str
    in_flight: int
    is_certain: bool


@dataclass(frozen=True, slots=True)
class ProofRequest:
    """What to compare, and what may follow. With `spares_foreign` only keys that were
    copied before are deleted. With `must_settle` sides that look equal and move are
    compared a few times. With `needs_rows` keys that are equal and have no row in the
    ledger are steps too: what rounds of the source alone do not know, they do not miss.
    """

    source: Store
    prefixes: tuple[str, ...]
    may_delete: bool
    spares_foreign: bool
    must_settle: bool
    needs_rows: bool = False


class IndexProofs:
    """The comparisons of one replication, one at a time. Owned by one thread."""

    def __init__(
        self,
        verifier: TargetVerifier,
        ledger: PairLedger,
        folder: Path,
        clock: Clock,
        new_executor: NewExecutor,
    ) -> None:
        """The index of the source lies below `folder`."""
        self._verifier = verifier
        self._ledger = ledger
        self._folder = folder
        self._clock = clock
        self._new_executor = new_executor
        self._executor: Executor = new_executor(1, "proof")
        self._stop = threading.Event()
        self._running: Future[IndexFindings | None] | None = None

    def start(self, request: ProofRequest) -> Future[IndexFindings | None]:
        """Begin a comparison; None comes of it where the verifier does not answer, or a
        listing does better.
        """
        self.cancel()
        self._stop = stop = threading.Event()
        self._running = self._executor.submit(
            lambda: self._verifier.call(lambda session: self._compare(request, session, stop))
        )
        return self._running

    def cancel(self) -> None:
        """End the comparison that runs, and wait for that."""
        running, self._running = self._running, None
        if running is None:
            return
        self._stop.set()
        if running.cancel():
            return
        # Nobody wants its result any more, nor the reason why there is none.
        with suppress(ReconcileError):
            found = running.result()
            if found is not None:
                found.steps.close()

    def close(self) -> None:
        """End what runs, and the thread; idempotent."""
        self.cancel()
        self._executor.shutdown(wait=True)

    def _compare(
        self, request: ProofRequest, session: VerifierSession, stop: threading.Event
    ) -> IndexFindings | None:
        """Compare, in the thread of comparisons.

        Raises:
            OperationInterruptedError: it was cancelled.
            ReconcileError: a side did not answer, or the comparison failed.
        """
        began_ms, client = self._clock.now_ms(), self._verifier.client
        evidence = client.describe().index.evidence
        if not evidence.listed + evidence.recorded + evidence.read:
            # Nothing is there to be listed, and the source need not be read twice.
            return None
        bucket, steps, left = self._opened(request.source, session), PlanSpool(self._folder), 0

        def take(part: BucketComparison) -> None:
            nonlocal left
            left += part.in_flight + len(part.unknown)
            for step in self._decided(request, session, bucket, part):
                _check_stop(stop)
                steps.add(step)

        try:
            with closing(bucket.index):
                proofs = list[PairProof]()
                for prefix in request.prefixes:
                    prover = PairProver(bucket, client, prefix=prefix, stopped=stop.is_set)
                    proofs.append(_proof(prover, take, must_settle=request.must_settle))
                    # None where the verifier does not say.
                    left += 1 if prover.unsettled is None else prover.unsettled
                    if request.needs_rows:
                        for step in self._unrecorded(bucket.index, prefix):
                            _check_stop(stop)
                            steps.add(step)
        except BaseException:
            steps.close()
            raise
        is_equal = all(one.is_equal for one in proofs)
        levels = (level_text(one.comparison, bucket.profile) for one in proofs)
        return IndexFindings(
            began_ms, steps, min(levels, key=_strength), 0 if is_equal else max(1, left), not left
        )

    def _opened(self, source: Store, session: VerifierSession) -> IndexedBucket:
        """The source with its index; indexes by other profiles are removed."""
        disk, profile = Disk(), session.profile
        name = f"{_INDEX_PREFIX}{profile.digest.hex()}"
        for other in disk.names(self._folder):
            if other.startswith(_INDEX_PREFIX) and other != name:
                disk.remove_folder(self._folder / other)
        try:
            index = StoredIndex(self._folder / name, profile, disk=disk)
        except (IndexDamagedError, IndexRefusedError):
            # All that it has can be found out again.
            disk.remove_folder(self._folder / name)
            index = StoredIndex(self._folder / name, profile, disk=disk)
        known = replace(source, reader=_KnowingReader(source.reader, self._ledger))
        return IndexedBucket(known, index, profile, self._clock, new_executor=self._new_executor)

    def _decided(
        self,
        request: ProofRequest,
        session: VerifierSession,
        bucket: IndexedBucket,
        part: BucketComparison,
    ) -> Iterator[ProvenStep]:
        names = list(difference_names(part.differences))
        ours = {key for kind, key, _ in names if kind is ItemDifferenceKind.EXTRA}
        if not request.may_delete:
            ours.clear()
        elif request.spares_foreign:
            ours = self._copied(session, ours)
        for kind, key, version in names:
            action, reason = Action.COPY, ""
            if kind is ItemDifferenceKind.EXTRA:
                action = Action.DELETE if key in ours else Action.LEAVE
            elif kind is ItemDifferenceKind.CHANGED and self._is_known(bucket.index, key):
                reason = DOUBTED
            yield ProvenStep(ItemDifference(kind, key, version), action, reason)

    def _unrecorded(self, index: StoredIndex, prefix: str) -> Iterator[ProvenStep]:
        """Keys of the source of which the ledger says nothing."""
        after = ""
        while rows := index.rows(start_after=after, limit=_ROWS_AT_ONCE, prefix=prefix):
            for row in rows:
                key = row.item.key
                if self._ledger.row(key) is None:
                    found = ItemDifference(ItemDifferenceKind.CHANGED, key, row.item.version)
                    yield ProvenStep(found, Action.NOTHING, _UNRECORDED)
            after = rows[-1].item.key

    def _copied(self, session: VerifierSession, keys: Iterable[str]) -> set[str]:
        """Those that the target still has as they were copied."""
        rows = {key: row for key in keys if (row := self._ledger.row(key)) is not None}
        found = self._verifier.client.facts(session.profile, sorted(rows))
        return {key for key, facts in found.items() if rows[key].target.agrees(facts)}

    def _is_known(self, index: StoredIndex, key: str) -> bool:
        """Whether the ledger says that the target has just the object of our index."""
        row, item = self._ledger.row(key), index.row(key)
        if row is None or item is None:
            return False
        return is_unchanged(item, row.source.facts(key))


def _check_stop(stop: threading.Event) -> None:
    if stop.is_set():
        raise OperationInterruptedError("the comparison was interrupted")


def _proof(
    prover: PairProver, take: Callable[[BucketComparison], None], *, must_settle: bool
) -> PairProof:
    """Refresh both sides and compare them, again while they look equal and move."""
    for left in reversed(range(COMPARISONS_MAX)):
        prover.refresh()
        proof = prover.compare(take, only_keys=True)
        if not (must_settle and proof.is_moving and left):
            break
    return proof


class _KnowingReader:
    """Reads a source, of whose contents the ledger knows what was read before."""

    def __init__(self, reader: ObjectReader, ledger: PairLedger) -> None:
        self._reader, self._ledger = reader, ledger
        self.properties = reader.properties
        self.properties_of = reader.properties_of
        self.read = reader.read
        self.read_whole = reader.read_whole

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        """See ObjectReader."""
        facts = self._reader.facts(key, version=version)
        row = self._ledger.row(key) if facts is not None and not version else None
        if facts is None or row is None or not row.source.agrees(facts):
            return facts
        known = {one.algorithm: one for one in (*row.hashes, *facts.hashes)}
        return replace(facts, hashes=tuple(known.values()))


def _strength(level: str) -> int:
    """How much a level says, the weakest first."""
    return ("listed", "recorded", "read").index(level.partition(":")[0])
