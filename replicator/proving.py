"""Compare a bucket near us with one behind a verifier, by their indexes.

Both sides may change while they are compared. A comparison is exact for the two indexes
at its cut, but an index is as old as its last refresh: what one comparison shows may be
on its way. So what is reported as a difference was shown by two comparisons, with a
refresh of both sides in between.
"""

import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from proof.comparison import BucketComparison, SourceComparison
from proof.index import WHOLE, ItemIndex, KeyRange
from proof.item import EvidenceLevel, Profile
from proof.messages import JOB_BYTES, AnswerMessage, QuestionMessage
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.tracking import DifferenceTracker
from replicator.refresh import IndexedBucket
from replicator.verifier.client import VerifierClient
from runtime.progress import ProgressSink

# Questions of one step that are asked at a time.
_QUESTIONS_AT_ONCE = 8
_SURROGATES = range(0xD800, 0xE000)
_CODE_POINTS = 0x110000


class TargetProver(Protocol):
    """The side that answers a comparison."""

    def prove(self, question: QuestionMessage) -> AnswerMessage:
        """The answer to one question."""


@dataclass(frozen=True, slots=True)
class PairProof:
    """What was found by one comparison, or by two. `differences` are certain;
    `in_flight` are those that only the last comparison showed, or that it could not
    name. `bytes_crossed` are of messages, without headers.
    """

    comparison: BucketComparison
    differences: Sequence[ItemDifference]
    in_flight: int
    bytes_crossed: int
    round_trips: int

    @property
    def is_equal(self) -> bool:
        """Whether the last comparison showed equal sides."""
        return self.comparison.is_equal

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
    target: TargetProver, index: ItemIndex, profile: Profile, *, key_range: KeyRange = WHOLE
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


def ask_all(target: TargetProver, questions: Sequence[QuestionMessage]) -> list[AnswerMessage]:
    """The answers to questions that do not wait for each other, in their order."""
    if len(questions) == 1:
        return [target.prove(questions[0])]
    with ThreadPoolExecutor(_QUESTIONS_AT_ONCE, thread_name_prefix="prove") as pool:
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

    def refresh(self, *, read_since_s: int = 0) -> None:
        """Bring both indexes up to date, each side near its store, both at a time.

        Raises:
            StoreError: a side could not be listed or read.
            OperationInterruptedError: `stopped`.
        """
        self._failed.clear()
        shown = _RefreshStage(self._progress, self._expected_keys())

        def stopped() -> bool:
            return self._stopped() or self._failed.is_set()

        with ThreadPoolExecutor(1, thread_name_prefix="far-refresh") as pool:
            far = pool.submit(
                self._client.refresh,
                self._source.profile,
                read_since_s=read_since_s,
                prefix=self._prefix,
                progress=lambda objects, _: shown.note("far", objects),
                stopped=stopped,
            )
            try:
                self._source.refresher(stopped).refresh(
                    read_since_s=read_since_s,
                    prefix=self._prefix,
                    note=lambda progress: shown.note("near", progress.objects),
                )
            except BaseException:
                self._failed.set()
                raise
            far.result()

    def compare(self) -> PairProof:
        """Compare the indexes once. All that differs counts as certain: both indexes
        are as they were.

        Raises:
            ReconcileError: see `prove`.
        """
        before = self._crossed()
        found = prove(
            self._client,
            self._source.index,
            self._source.profile,
            key_range=prefix_range(self._prefix),
        )
        in_flight = found.in_flight + len(found.unknown)
        return PairProof(found, found.differences, in_flight, self._crossed() - before, found.trips)

    def settle(self, *, read_since_s: int = 0) -> PairProof:
        """Refresh and compare, and once more if there are differences; certain are
        those that both show.

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
        self.refresh(read_since_s=read_since_s)
        second = self.compare()
        certain = tracker.observe(second.comparison)
        return PairProof(
            second.comparison,
            certain,
            second.in_flight + len(second.differences) - len(certain),
            first.bytes_crossed + second.bytes_crossed,
            first.round_trips + second.round_trips,
        )

    def _expected_keys(self) -> int:
        """About as many keys as both sides will list; 0 if nobody knows."""
        if self._progress is None:
            return 0
        with self._source.index.snapshot() as snapshot:
            return 2 * snapshot.roots([prefix_range(self._prefix)])[0].count

    def _crossed(self) -> int:
        return self._client.bytes_sent + self._client.bytes_received


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


def prefix_range(prefix: str) -> KeyRange:
    """The keys that begin with a prefix."""
    for at in range(len(prefix) - 1, -1, -1):
        after = ord(prefix[at]) + 1
        if after in _SURROGATES:
            after = _SURROGATES.stop
        if after < _CODE_POINTS:
            return KeyRange(prefix, prefix[:at] + chr(after))
    return KeyRange(prefix)
