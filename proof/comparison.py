"""The source's side of a comparison: asks, decodes, certifies and names differences.

One question carries the digest of the root. A target that holds the same answers with
it, and nothing else is needed. Otherwise symbols of the difference come, as many as
their counts say are needed, until they decode; or ranges, or lists, where these cost
less. The IDs found must add up to the difference of the roots. No answer can make
unequal buckets equal: a target that does not hold the source's root cannot name it.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from proof.answers import coded_symbols
from proof.column_naming import ColumnNaming
from proof.cuts import RewoundSnapshot, rewound, with_extras
from proof.decoding import (
    LISTED_IDS_MAX,
    RESPLIT_RANGES,
    SPLIT_RANGES,
    Progress,
    Step,
    is_split_again,
    next_size,
    next_step,
    remaining_estimate,
    should_decode,
)
from proof.errors import ComparisonLimitError, NotCertifiedError, TooManyDifferencesError
from proof.extra_naming import (
    Extras,
    KeyNaming,
    extras_at,
    known_extras,
    split_extras,
    with_extras_named,
)
from proof.index import (
    WHOLE,
    AppliedPositions,
    EvidenceCounts,
    IndexedItem,
    ItemIndex,
    KeyRange,
    Position,
)
from proof.item import Profile, mix
from proof.item_columns import ColumnHasher
from proof.messages import (
    JOB_SYMBOLS_MAX,
    LISTED_MAX,
    NAMES_MAX,
    RANGES_MAX,
    SYMBOLS_MAX,
    Answer,
    AnswerMessage,
    BitmapAnswer,
    KeysAnswer,
    KeysQuestion,
    ListQuestion,
    NamesAnswer,
    NamesQuestion,
    Question,
    QuestionMessage,
    RootAnswer,
    RootQuestion,
    SplitQuestion,
    SymbolsAnswer,
    SymbolsQuestion,
    UnequalAnswer,
)
from proof.naming import ItemDifference, NamingResult
from proof.root import ROOT_EMPTY, SetRoot
from proof.spans import parts_of
from proof.symbols import (
    SYMBOL_BYTES,
    CodedSymbols,
    IdDifference,
    Ids,
    estimated_difference,
    ids_from_bytes,
    peel,
    short_ids,
)
from runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Rounds of questions; an honest target needs about six.
TRIPS_MAX = 64
# In a row, of symbols that should have decoded; then other symbols are encoded afresh.
_FAILURES_MAX = 2

_Result = TypeVar("_Result")
# Yields questions, takes their answers, and returns what it was for.
_Asking: TypeAlias = Generator[list[Question], list[Answer], _Result]
_AnswerType = TypeVar("_AnswerType", bound=Answer)


@dataclass(frozen=True, slots=True)
class BucketComparison:
    """What a comparison found, at one cut."""

    job: bytes
    ours: SetRoot
    theirs: SetRoot
    cut: AppliedPositions
    position: Position
    """Of the target's own journal."""
    ours_evidence: EvidenceCounts
    theirs_evidence: EvidenceCounts
    differences: Sequence[ItemDifference] = ()
    """Certain at this cut; by key and version. To read one reads the index again."""
    in_flight: int = 0
    """Differences of items that changed after the cut, on either side."""
    unknown: tuple[ItemDifference, ...] = ()
    """Of items that changed while the target was listed: each wants a look."""
    trips: int = 1

    @property
    def is_equal(self) -> bool:
        """Whether the two sides hold the same items at the cut."""
        return self.ours == self.theirs


@dataclass(frozen=True, slots=True)
class _Unequal:
    """Ranges that differ, how many items either side has there, and the IDs of those
    ranges that the target has nothing in.
    """

    ranges: tuple[KeyRange, ...]
    ours: int
    theirs: int
    surpluses: int
    """The sum of the absolute differences of the counts, range by range."""
    settled: Ids


class SourceComparison:
    """A comparison as a state machine: `start` gives the first questions, `step` takes
    all their answers and gives the next, and none when `outcome` is there.

    `job` is JOB_BYTES that no other job has. `applied` is what the target acknowledged
    last; the target says itself what it holds, so a wrong one costs bytes only. Answers
    that break a rule end in a ReconcileError, after which the job is over. So does a
    difference of many more than `differences_max` items, since memory grows with it;
    `unequal` is then what is known of the range.

    `known` are differences that an earlier comparison found. Extras among them that the
    target still has are found again and cost nothing: the question is then whether it
    holds our items and these. With `only_keys` extras are named without their facts.
    """

    def __init__(
        self,
        index: ItemIndex,
        profile: Profile,
        job: bytes,
        *,
        applied: AppliedPositions | None = None,
        key_range: KeyRange = WHOLE,
        known: Iterable[ItemDifference] = (),
        only_keys: bool = False,
        differences_max: int | None = None,
    ) -> None:
        self._differences_max = differences_max
        self._index = index
        self._profile = profile.digest
        self._hasher = ColumnHasher(profile)
        self._job = job
        self._asked = applied
        self._range = key_range
        self._only_keys = only_keys
        self._known = known_extras(one for one in known if one.key in key_range)
        # Of these what the target must have besides our items, at the cut.
        self._extras: Extras = {}
        self._numbers: list[int] = []
        self._trips = 0
        self._salts = 0
        self._symbols_read = 0
        self._steps = self._compare()
        self.outcome: BucketComparison | None = None
        """What was found, once no question is left."""
        self.unequal: BucketComparison | None = None
        """The roots, where they differ, before the differences are found."""

    def start(self) -> list[QuestionMessage]:
        """The first questions."""
        return self._ask(next(self._steps))

    def step(self, answers: Sequence[AnswerMessage]) -> list[QuestionMessage]:
        """Take the answers to all questions asked last; the next questions.

        Raises:
            RemoteProtocolError: an answer is malformed, of another job, or impossible.
            NotCertifiedError: the differences found do not explain the roots.
            TooManyDifferencesError: there are more than `differences_max`.
            ComparisonLimitError: the difference is too large, or answers lead nowhere.
            CutUnknownError: the target holds positions that our index has not read yet.
            JournalTrimmedError: our journal no longer reaches back to the cut.
        """
        by_number = {message.number: message for message in answers}
        if len(by_number) != len(answers) or sorted(by_number) != self._numbers:
            raise RemoteProtocolError("the answers are not those to the questions asked")
        if any(message.job != self._job for message in answers):
            raise RemoteProtocolError("an answer is of another job")
        try:
            questions = self._steps.send([by_number[number].answer for number in self._numbers])
        except StopIteration as done:
            self._numbers = []
            self.outcome = replace(done.value, trips=self._trips)
            return []
        return self._ask(questions)

    def _ask(self, questions: list[Question]) -> list[QuestionMessage]:
        if self._trips >= TRIPS_MAX:
            raise ComparisonLimitError(f"the comparison did not end in {TRIPS_MAX} rounds")
        self._trips += 1
        first = self._numbers[-1] + 1 if self._numbers else 0
        self._numbers = list(range(first, first + len(questions)))
        return [
            QuestionMessage(self._job, number, self._profile, question)
            for number, question in zip(self._numbers, questions, strict=True)
        ]

    def _compare(self) -> _Asking[BucketComparison]:
        with self._index.snapshot() as snapshot:
            now = AppliedPositions(snapshot.position)
        with rewound(self._index, self._asked or now) as view:
            self._extras, ours_evidence = extras_at(view, self._known), view.evidence
            root = self._wanted(view).roots([self._range])[0]
        digest = self._hasher.items.root_digest(self._job, root.count, root.total)
        answers = yield [RootQuestion(self._range, self._asked, digest)]
        answer = _expected(RootAnswer, answers[0])
        self._cut, self._at = answer.applied or now, answer.position
        with rewound(self._index, self._cut) as view:
            self._extras = extras_at(view, self._known)
            root, wanted = (one.roots([self._range])[0] for one in (view, self._wanted(view)))
        outcome = BucketComparison(
            self._job, root, answer.root, self._cut, self._at, ours_evidence, answer.evidence
        )
        if root == answer.root:
            return outcome
        self._theirs_count = answer.root.count
        found = IdDifference(_NO_IDS, _NO_IDS)
        if wanted != answer.root:
            if not answer.symbols:
                raise RemoteProtocolError("the target claims to be equal without holding our root")
            self.unequal = outcome
            found = yield from self._decode(wanted, answer)
            # The estimate is a rough one; naming takes the most memory.
            self._check_size(wanted, answer.root, (len(found.ours) + len(found.theirs)) / 2)
        ours, theirs = SetRoot.of(found.ours), SetRoot.of(found.theirs)
        if wanted - answer.root != ours - theirs:
            raise NotCertifiedError(
                f"{len(found.ours) + len(found.theirs)} differing IDs do not add up to the"
                " difference of the roots",
                hint="check both indexes against their buckets",
            )
        named = yield from self._name(found)
        return replace(
            outcome,
            differences=named.differences,
            in_flight=named.in_flight,
            unknown=named.unknown,
        )

    @contextmanager
    def _view(self) -> Iterator[RewoundSnapshot]:
        """What the target must hold at the cut."""
        with rewound(self._index, self._cut) as view:
            yield self._wanted(view)

    def _wanted(self, view: RewoundSnapshot) -> RewoundSnapshot:
        extras = ((one.key, one.version, one_id) for one_id, one in self._extras.items())
        return with_extras(view, extras) if self._extras else view

    def _decode(self, root: SetRoot, answer: RootAnswer) -> _Asking[IdDifference]:
        """The IDs that only one side has, not certified yet."""
        left = _Unequal((self._range,), root.count, answer.root.count, 0, _NO_IDS)
        theirs = CodedSymbols.from_bytes(answer.symbols)
        is_split, failures = False, 0
        if answer.root == ROOT_EMPTY:
            # As before a first sync: all that we have is missing there.
            self._check_size(root, answer.root, root.count)
            with self._view() as view:
                return IdDifference(view.ids(self._range), _NO_IDS)
        while True:
            size = len(theirs)
            if size:
                with self._view() as view:
                    difference = coded_symbols(view, left.ranges, size, theirs.salt) - theirs
                found = peel(difference)
                if found is not None:
                    return _joined(found, left.settled)
                estimate = estimated_difference(difference, left.ours - left.theirs)
                estimate = min(estimate, left.ours + left.theirs)
                if not is_split:
                    self._check_size(root, answer.root, estimate)
                failures = failures + 1 if should_decode(size, estimate) else 0
                if failures >= _FAILURES_MAX:
                    theirs, failures = CodedSymbols.zeros(0, self._new_salt()), 0
            progress = Progress(len(theirs), estimate, left.ours, left.theirs, not is_split)
            match next_step(progress):
                case Step.LIST:
                    return _joined((yield from self._list(left.ranges)), left.settled)
                case Step.SYMBOLS:
                    theirs = yield from self._more(
                        left.ranges, theirs, next_size(len(theirs), estimate)
                    )
                case Step.SPLIT:
                    left = yield from self._split_twice(left.ranges)
                    if not left.ranges:
                        return _joined(IdDifference(_NO_IDS, _NO_IDS), left.settled)
                    estimate = remaining_estimate(
                        estimate,
                        settled=len(left.settled),
                        surpluses=left.surpluses,
                        items=left.ours + left.theirs,
                    )
                    is_split, theirs = True, CodedSymbols.zeros(0)

    def _check_size(self, ours: SetRoot, theirs: SetRoot, estimate: float) -> None:
        most = self._differences_max
        if most is not None and estimate > most:
            raise TooManyDifferencesError(
                f"about {estimate:.0f} items differ, more than {most}",
                hint="compare part by part",
                ours=ours.count,
                theirs=theirs.count,
                estimate=int(estimate),
            )

    def _new_salt(self) -> int:
        self._salts += 1
        return mix(int.from_bytes(self._job, "big") ^ self._salts)

    def _more(
        self, ranges: tuple[KeyRange, ...], theirs: CodedSymbols, size: int
    ) -> _Asking[CodedSymbols]:
        """The target's symbols up to a size."""
        first = len(theirs)
        self._symbols_read += size - first
        if self._symbols_read > JOB_SYMBOLS_MAX:
            raise ComparisonLimitError(
                f"the difference needs more than {JOB_SYMBOLS_MAX} symbols",
                hint="compare prefix by prefix, or copy first",
            )
        spans = [
            (start, min(start + SYMBOLS_MAX, size)) for start in range(first, size, SYMBOLS_MAX)
        ]
        answers = yield [
            SymbolsQuestion(self._at, ranges, start, end, theirs.salt) for start, end in spans
        ]
        for (start, end), raw in zip(spans, answers, strict=True):
            answer = _expected(SymbolsAnswer, raw)
            if len(answer.symbols) != (end - start) * SYMBOL_BYTES:
                raise RemoteProtocolError(f"not the symbols from {start} to {end}")
            theirs = theirs.joined(CodedSymbols.from_bytes(answer.symbols, theirs.salt))
        return theirs

    def _split_twice(self, ranges: tuple[KeyRange, ...]) -> _Asking[_Unequal]:
        """The ranges that differ, closer where counts settled most of them."""
        once = yield from self._split(ranges, SPLIT_RANGES)
        if not is_split_again(settled=len(once.settled), left=once.ours + once.theirs):
            return once
        number = max(2, RESPLIT_RANGES // len(once.ranges))
        twice = yield from self._split(once.ranges, number)
        return replace(twice, settled=np.concatenate((once.settled, twice.settled)))

    def _split(self, ranges: tuple[KeyRange, ...], number: int) -> _Asking[_Unequal]:
        with self._view() as view:
            parts = [part for one in ranges for part in parts_of(one, view.split(one, number))]
            if len(parts) > RANGES_MAX:
                parts = list(ranges)
            roots = view.roots(parts)
        question = SplitQuestion(
            self._at, tuple(parts), tuple((root.count, root.total % (1 << 64)) for root in roots)
        )
        answer = _expected(UnequalAnswer, (yield [question])[0])
        if len(answer.counts) != len(parts):
            raise RemoteProtocolError("not as many counts as ranges")
        unequal = [
            (part, root.count, count)
            for part, root, count in zip(parts, roots, answer.counts, strict=True)
            if count is not None
        ]
        theirs = sum(count for _, _, count in unequal)
        if theirs > self._theirs_count:
            raise RemoteProtocolError("the counts of ranges add up to more than all items")
        left = [one for one in unequal if one[2]]
        with self._view() as view:
            settled = [view.ids(part) for part, _, count in unequal if not count]
        return _Unequal(
            ranges=_merged([part for part, _, _ in left]),
            ours=sum(ours for _, ours, _ in left),
            theirs=theirs,
            surpluses=sum(abs(ours - count) for _, ours, count in left),
            settled=np.concatenate([_NO_IDS, *settled]),
        )

    def _list(self, ranges: tuple[KeyRange, ...]) -> _Asking[IdDifference]:
        """What differs, from short IDs of all that is left."""
        pending = list[tuple[KeyRange, Ids, int]]()
        with self._view() as view:
            for part in _listable(view, ranges):
                ids = view.ids(part)
                pending.append((part, ids[np.argsort(short_ids(ids))], 0))
        ours, theirs, extras_count = list[Ids](), list[Ids](), 0
        while pending:
            answers = yield [
                ListQuestion(self._at, part, short_ids(ids).astype(">u8").tobytes(), skip)
                for part, ids, skip in pending
            ]
            unfinished = []
            for (part, ids, skip), raw in zip(pending, answers, strict=True):
                answer = _expected(BitmapAnswer, raw)
                is_present = _present(answer.present, len(ids))
                extras = ids_from_bytes(answer.extras)
                if skip == 0:
                    ours.append(ids[~is_present])
                theirs.append(extras)
                extras_count += len(extras)
                if extras_count > min(self._theirs_count, LISTED_IDS_MAX):
                    raise RemoteProtocolError("the target lists more items than it has")
                if skip + len(extras) < answer.extras_count:
                    if not len(extras):
                        raise RemoteProtocolError("the target leaves out items that it counts")
                    unfinished.append((part, ids, skip + len(extras)))
            pending = unfinished
        return IdDifference(np.concatenate([_NO_IDS, *ours]), np.concatenate([_NO_IDS, *theirs]))

    def _name(self, found: IdDifference) -> _Asking[NamingResult]:
        """Which items the IDs are of."""
        found, extras = split_extras(found, self._extras)
        if self._only_keys:
            by_key = yield from self._name_keys(found)
            found, extras = by_key.left, extras + by_key.extras
        with rewound(self._index, self._cut) as view:
            naming = ColumnNaming(self._hasher, self._cut, found, view, self._items)
        hashes = naming.unnamed_hashes
        while hashes:
            chunks = _chunks(hashes)
            answers = yield [NamesQuestion(self._at, b"".join(chunk)) for chunk in chunks]
            hashes = []
            for chunk, raw in zip(chunks, answers, strict=True):
                answer = _expected(NamesAnswer, raw)
                asked = chunk[: _checked(answer.answered, chunk)]
                naming.take(asked, answer.items)
                hashes += chunk[len(asked) :]
        return with_extras_named(naming.result(), extras, view, self._cut)

    def _name_keys(self, found: IdDifference) -> _Asking[KeyNaming]:
        """Ask for keys alone."""
        naming = KeyNaming(self._hasher.items, found)
        hashes = naming.hashes
        while hashes:
            chunks = _chunks(hashes)
            answers = yield [KeysQuestion(self._at, b"".join(chunk)) for chunk in chunks]
            hashes = []
            for chunk, raw in zip(chunks, answers, strict=True):
                answer = _expected(KeysAnswer, raw)
                asked = chunk[: _checked(answer.answered, chunk)]
                naming.take(asked, answer.names)
                hashes += chunk[len(asked) :]
        return naming

    def _items(self, hashes: "NDArray[np.uint64]") -> Sequence[IndexedItem]:
        """Our items of these key hashes, as they are now."""
        with self._index.snapshot() as snapshot:
            return snapshot.find(hashes)


_NO_IDS = ids_from_bytes(b"")


def _expected(kind: type[_AnswerType], answer: Answer) -> _AnswerType:
    if not isinstance(answer, kind):
        raise RemoteProtocolError(f"a {type(answer).__name__} where a {kind.__name__} was due")
    return answer


def _chunks(hashes: Sequence[bytes]) -> list[Sequence[bytes]]:
    return [hashes[at : at + NAMES_MAX] for at in range(0, len(hashes), NAMES_MAX)]


def _checked(answered: int, asked: Sequence[bytes]) -> int:
    """How many of the hashes asked for an answer is about."""
    if not 0 < answered <= len(asked):
        raise RemoteProtocolError("names of more, or of none, of what was asked")
    return answered


def _joined(found: IdDifference, settled: Ids) -> IdDifference:
    return IdDifference(np.concatenate((found.ours, settled)), found.theirs)


def _merged(ranges: Sequence[KeyRange]) -> tuple[KeyRange, ...]:
    """Neighbours as one range."""
    merged = list[KeyRange]()
    for one in ranges:
        if merged and merged[-1].end == one.start:
            merged[-1] = KeyRange(merged[-1].start, one.end)
        else:
            merged.append(one)
    return tuple(merged)


def _listable(view: RewoundSnapshot, ranges: Sequence[KeyRange]) -> Iterator[KeyRange]:
    """Parts whose IDs fit a message each."""
    for one, root in zip(ranges, view.roots(ranges), strict=True):
        if root.count <= LISTED_MAX:
            yield one
            continue
        bounds = view.split(one, 2 * root.count // LISTED_MAX + 1)
        if not bounds:
            raise ComparisonLimitError(f"one key has {root.count} versions")
        yield from _listable(view, parts_of(one, bounds))


def _present(bitmap: bytes, size: int) -> "NDArray[np.bool_]":
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8)).astype(np.bool_)
    if len(bitmap) != -(-size // 8) or bits[size:].any():
        raise RemoteProtocolError("a bitmap does not fit the list")
    return bits[:size]
