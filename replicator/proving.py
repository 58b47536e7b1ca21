"""Compare a bucket near us with one behind a verifier, by their indexes.

Both sides may change while they are compared. A comparison is exact for the two indexes
at its cut, but an index is as old as its last refresh: what one comparison shows may be
on its way. So what is reported as a difference was shown by two comparisons, with a
refresh of both sides in between. "Equal" is said of one moment only: the one at which
both sides began a refresh that found just what their indexes had.
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from proof.comparison import BucketComparison, SourceComparison
from proof.index import WHOLE, ItemIndex, KeyRange
from proof.item import EvidenceLevel, ItemId, Profile
from proof.messages import JOB_BYTES, AnswerMessage, QuestionMessage
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.root import SetRoot
from proof.symbols import ids_from_bytes
from proof.tracking import DifferenceTracker
from replicator.copier import NewExecutor
from replicator.part_proofs import DifferenceTally, compare_parts
from replicator.refresh import IndexedBucket, prefix_range
from replicator.verifier.client import VerifierClient
from runtime.errors import OperationInterruptedError
from runtime.progress import ProgressSink

# Questions of one step that are asked at a time.
_QUESTIONS_AT_ONCE = 8
# Refreshes and comparisons while the sides look equal and move.
COMPARISONS_MAX = 4
# Between two looks at whether one who waits for the other side should stop.
_BEGIN_CHECK_S = 0.2


class TargetProver(Protocol):
    """The side that answers a comparison."""

    def prove(self, question: QuestionMessage) -> AnswerMessage:
        """The answer to one question."""


@dataclass(frozen=True, slots=True)
class PairProof:
    """What was found by one comparison, or by two. `differences` are certain; `tally`
    counts them, also where they are not kept. `in_flight` are those that only the last
    comparison showed, or that it could not name. `bytes_crossed` are of messages,
    without headers. `is_settled` says that both sides held what was compared at one
    moment, when the refresh before it began. `damaged` are keys that count as changed:
    a side knows that its bytes are not those that were recorded.
    """

    comparison: BucketComparison
    differences: Sequence[ItemDifference]
    in_flight: int
    bytes_crossed: int
    round_trips: int
    is_settled: bool
    tally: DifferenceTally
    damaged: frozenset[str] = frozenset()

    @property
    def is_equal(self) -> bool:
        """Whether both sides were equal at one moment, by the last comparison."""
        return self.comparison.is_equal and self.is_settled

    @property
    def is_moving(self) -> bool:
        """Whether the sides look equal, and moved: another look may show it."""
        return self.comparison.is_equal and not self.is_settled

    @property
    def objects(self) -> int:
        """The keys that a side has, but for those that are in flight to the target."""
        extras = sum(one.kind is ItemDifferenceKind.EXTRA for one in self.differences)
        return self.comparison.ours.count + extras

    @property
    def levels(self) -> dict[EvidenceLevel, int]:
        """How many keys are known at which level at both sides. Each side counts its
        own items, and nobody knows which: those that one side has not read may be
        others than those of the other side. So each key counts at the least level that
        it can have.
        """
        objects = self.objects
        sides = (self.comparison.ours_evidence, self.comparison.theirs_evidence)
        # What only one side has is known by listings.
        listed = sum(one.kind is not ItemDifferenceKind.CHANGED for one in self.differences)
        listed += self.in_flight + sum(side.listed for side in sides)
        unread = listed + sum(side.recorded for side in sides)
        listed, unread = min(listed, objects), min(unread, objects)
        return {
            EvidenceLevel.LISTED: listed,
            EvidenceLevel.RECORDED: unread - listed,
            EvidenceLevel.READ: objects - unread,
        }

    def level_of(self, difference: ItemDifference) -> EvidenceLevel:
        """How a difference is known: that a side lacks a key, by its listing."""
        if difference.kind is not ItemDifferenceKind.CHANGED or difference.ours is None:
            return EvidenceLevel.LISTED
        far = self.comparison.theirs_evidence
        level = EvidenceLevel.RECORDED if far.recorded else EvidenceLevel.READ
        # The other side did not say how it knows just this item.
        theirs = EvidenceLevel.LISTED if far.listed else level
        return min(difference.ours.evidence.level, theirs)

    @property
    def oldest_read_at_s(self) -> int | None:
        """When what was read longest ago was read, in seconds since 1970; None if
        nothing was read at both sides.
        """
        if not self.levels[EvidenceLevel.READ]:
            return None
        sides = (self.comparison.ours_evidence, self.comparison.theirs_evidence)
        times = (at for side in sides if (at := side.oldest_read_at_s) is not None)
        return min(times, default=None)


def prove(
    target: TargetProver,
    index: ItemIndex,
    profile: Profile,
    *,
    key_range: KeyRange = WHOLE,
) -> BucketComparison:
    """Compare the index of the source with a target. The questions of one step are
    asked at once.

    Raises:
        ReconcileError: what SourceComparison.step and `target` raise; nothing is known.
    """
    job = secrets.token_bytes(JOB_BYTES)
    comparison = SourceComparison(index, profile, job, key_range=key_range)
    questions = comparison.start()
    while questions:
        questions = comparison.step(ask_all(target, questions))
    assert comparison.outcome is not None
    return comparison.outcome


def ask_all(
    target: TargetProver,
    questions: Sequence[QuestionMessage],
    new_executor: NewExecutor = ThreadPoolExecutor,
) -> list[AnswerMessage]:
    """The answers to questions that do not wait for each other, in their order."""
    if len(questions) == 1:
        return [target.prove(questions[0])]
    with new_executor(_QUESTIONS_AT_ONCE, "prove") as pool:
        return list(pool.map(target.prove, questions))


class PairProver:
    """Proves one pair: a bucket near us, and one behind a verifier."""

    def __init__(
        self,
        source: IndexedBucket,
        client: VerifierClient,
        *,
        prefix: str = "",
        stopped: Callable[[], bool],
        progress: ProgressSink | None = None,
    ) -> None:
        """`stopped` says whether to give up; refreshes are shown by `progress`."""
        self._source = source
        self._progress = progress
        self._client = client
        self._prefix = prefix
        self._stopped = stopped
        self._failed = threading.Event()
        # What each side held when the last refresh began, as far as that is known.
        self._held: tuple[SetRoot | None, SetRoot | None] = None, None
        # What the last refresh knew to be damaged, by its key's hash.
        self._damaged = frozenset[bytes]()
        self.unsettled: int | None = None
        """How many keys the last refresh could not describe at either side, since they
        changed under each look; None where the other side did not say.
        """

    def refresh(self, *, read_since_s: int = 0) -> None:
        """Bring both indexes up to date, each side near its store, both at a time and
        from one moment on.

        Raises:
            StoreError: a side could not be listed or read.
            OperationInterruptedError: `stopped`.
        """
        self._failed.clear()
        shown = _RefreshStage(self._progress, self._expected_keys())

        def stopped() -> bool:
            return self._stopped() or self._failed.is_set()

        def far_progress(objects: int, _bytes_read: int) -> None:
            begun.set()
            shown.note("far", objects)

        self._held = None, None
        start, begun = self._source.start(), threading.Event()
        with self._source.new_executor(1, "far-refresh") as pool:
            far = pool.submit(
                self._client.refresh,
                self._source.profile,
                read_since_s=read_since_s,
                prefix=self._prefix,
                progress=far_progress,
                stopped=stopped,
            )
            try:
                while not begun.wait(_BEGIN_CHECK_S) and not far.done():
                    if stopped():
                        raise OperationInterruptedError("the refresh was stopped")
                if far.done():
                    far.result()
                ours = self._source.refresher(stopped).refresh(
                    read_since_s=read_since_s,
                    prefix=self._prefix,
                    note=lambda progress: shown.note("near", progress.objects),
                )
            except BaseException:
                self._failed.set()
                raise
            theirs = far.result()
        self._damaged = theirs.damaged | self._source.key_hashes(ours.damaged_keys)
        self._held = self._source.settled_root(start, self._prefix), theirs.settled
        self.unsettled = None
        if theirs.unsettled is not None:
            self.unsettled = ours.unsettled + theirs.unsettled

    def note_deletes(self, ids: Iterable[ItemId]) -> None:
        """Note that the target has deleted these items since the last refresh: what it
        held then counts without them.
        """
        ours, theirs = self._held
        if theirs is not None:
            theirs -= SetRoot.of(ids_from_bytes(b"".join(ids)))
        self._held = ours, theirs

    def compare(
        self,
        take: Callable[[BucketComparison], None] | None = None,
        *,
        known: Iterable[ItemDifference] = (),
        only_keys: bool = False,
    ) -> PairProof:
        """Compare the indexes once, after a refresh. All that differs counts as
        certain: both indexes are as they were. With `take`, that gets the differences
        part by part, and they are not kept. `known` and `only_keys` are as for
        `compare_parts`.

        Raises:
            ReconcileError: see `prove`.
        """
        before, whole = self._crossed(), None
        kept, tally, in_flight, trips = list[ItemDifference](), DifferenceTally(), 0, 0
        for part in compare_parts(
            self._source.index,
            self._source.profile,
            lambda asked: ask_all(self._client, asked, self._source.new_executor),
            prefix_range(self._prefix),
            known=known,
            only_keys=only_keys,
        ):
            whole = part if whole is None else whole
            # Each look at one reads the index again.
            differences = tuple(part.differences)
            tally.add(differences)
            in_flight += part.in_flight + len(part.unknown)
            trips += part.trips
            if take is not None:
                take(replace(part, differences=differences))
            else:
                kept += differences
        assert whole is not None
        is_settled = self._held == (whole.ours, whole.theirs)
        # Equal sides that moved meanwhile, or differences that nobody found: at least
        # one key is not known.
        is_unknown = not is_settled if whole.is_equal else not tally.count
        return PairProof(
            replace(whole, differences=tuple(kept)),
            tuple(kept),
            max(in_flight, int(is_unknown)),
            self._crossed() - before,
            trips,
            is_settled,
            tally,
            self._damaged_of(kept),
        )

    def settle(self, *, read_since_s: int = 0) -> PairProof:
        """Refresh and compare, and once more if there are differences; certain are
        those that both show. While the sides look equal and move, it is done a few
        times more. What was read by the first refresh is not read again.

        Raises:
            StoreError: a side could not be listed or read.
            OperationInterruptedError: `stopped`.
            ReconcileError: see `prove`.
        """
        tracker = DifferenceTracker()
        self.refresh(read_since_s=read_since_s)
        first = self.compare()
        if first.is_equal:
            return first
        tracker.observe(first.comparison)
        crossed, trips = first.bytes_crossed, first.round_trips
        for _ in range(COMPARISONS_MAX - 1):
            self.refresh(read_since_s=min(read_since_s, 1))
            last = self.compare(known=first.differences)
            certain = tracker.observe(last.comparison)
            crossed, trips = crossed + last.bytes_crossed, trips + last.round_trips
            if not last.is_moving:
                break
        return PairProof(
            last.comparison,
            certain,
            last.in_flight + len(last.differences) - len(certain),
            crossed,
            trips,
            last.is_settled,
            _tally_of(certain),
            self._damaged_of(certain),
        )

    def _damaged_of(self, differences: Sequence[ItemDifference]) -> frozenset[str]:
        """The keys among them that a side knows to be damaged."""
        if not self._damaged:
            return frozenset()
        changed = (one.key for one in differences if one.kind is ItemDifferenceKind.CHANGED)
        return frozenset(key for key in changed if self._source.key_hashes((key,)) & self._damaged)

    def _expected_keys(self) -> int:
        """About as many keys as both sides will list; 0 if nobody knows."""
        if self._progress is None:
            return 0
        with self._source.index.snapshot() as snapshot:
            return 2 * snapshot.roots([prefix_range(self._prefix)])[0].count

    def _crossed(self) -> int:
        return self._client.bytes_sent + self._client.bytes_received


def _tally_of(differences: Sequence[ItemDifference]) -> DifferenceTally:
    tally = DifferenceTally()
    tally.add(differences)
    return tally


class _RefreshStage:
    """Shows a refresh of both sides as one stage. Thread-safe."""

    def __init__(self, progress: ProgressSink | None, expected_keys: int) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._seen = {"near": 0, "far": 0}
        if progress is not None:
            progress.begin("refresh both indexes", expected_keys or None, "keys")

    def note(self, side: str, objects: int) -> None:
        """Note how many objects a side has seen so far."""
        with self._lock:
            more = objects - self._seen[side]
            self._seen[side] = objects
            if self._progress is not None:
                self._progress.advance(more)


def level_text(comparison: BucketComparison, profile: Profile) -> str:
    """The weakest level at which items of both sides are known, as reports write it."""
    sides = (comparison.ours_evidence, comparison.theirs_evidence)
    if profile.algorithm is None or any(side.listed for side in sides):
        return EvidenceLevel.LISTED.name.lower()
    if not any(side.recorded or side.read for side in sides):
        return EvidenceLevel.LISTED.name.lower()
    is_recorded = any(side.recorded for side in sides)
    level = EvidenceLevel.RECORDED if is_recorded else EvidenceLevel.READ
    return f"{level.name.lower()}:{profile.algorithm.value}"
