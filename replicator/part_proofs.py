"""Compare two buckets part by part, where more differs than memory should hold.

A comparison takes as much memory as there are differences. So one that would find too
many is given up for parts of its range, each with a comparison of its own. The source
knows how to cut its own keys. Where the target has far more, a sample of its keys says
where to cut.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from proof.comparison import BucketComparison, SourceComparison
from proof.errors import ComparisonLimitError, TooManyDifferencesError
from proof.index import ItemIndex, KeyRange, Position
from proof.item import ID_BYTES, KEY_HASH_BYTES, Profile
from proof.lthash import LtHash
from proof.messages import (
    JOB_BYTES,
    Answer,
    AnswerMessage,
    BitmapAnswer,
    ListQuestion,
    NamesAnswer,
    NamesQuestion,
    Question,
    QuestionMessage,
)
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.root import ROOT_EMPTY, SetRoot
from proof.spans import parts_of
from runtime.errors import RemoteProtocolError

# Differences of one part: some 40 MB while they are named and planned.
DIFFERENCES_MAX = 16_384
# Parts that a range is cut into at a time, and parts of one job.
_CUTS_MAX = 256
_PARTS_MAX = 1 << 16
# Keys of the target that show where to cut.
_SAMPLE = 1_024
Ask = Callable[[Sequence[QuestionMessage]], list[AnswerMessage]]


@dataclass
class DifferenceTally:
    """What is kept of differences that are not: how many they are, what they explain of
    the roots, and by which the target's set is another than the source's.
    """

    count: int = 0
    explained: SetRoot = ROOT_EMPTY
    surplus: LtHash = field(default_factory=LtHash)

    def add(self, differences: Sequence[ItemDifference]) -> None:
        """Add some. Of a changed item only its difference is known: it counts as not
        held by the target. An extra that was named by its key alone explains nothing.
        """
        self.count += len(differences)
        for one in differences:
            if one.kind is ItemDifferenceKind.EXTRA and one.theirs is None:
                continue
            ours = SetRoot.of_item(one.ours.id if one.ours is not None else None)
            self.explained += ours - SetRoot.of_item(one.theirs_id)
        self.surplus.remove(one.ours.item for one in differences if one.ours is not None)
        self.surplus.add(one.theirs.item for one in differences if one.theirs is not None)


def compare_parts(
    index: ItemIndex,
    profile: Profile,
    ask: Ask,
    key_range: KeyRange,
    *,
    differences_max: int = DIFFERENCES_MAX,
    known: Iterable[ItemDifference] = (),
    only_keys: bool = False,
) -> Iterator[BucketComparison]:
    """Compare a range, or its parts in the order of their keys. The first comparison is
    of the whole range; if parts follow, it has the roots, and no differences. `known`
    and `only_keys` are as for SourceComparison; `known` comes by key, and is read as
    parts need it.

    Raises:
        ComparisonLimitError: one key has too many versions, or the parts lead nowhere.
        ReconcileError: what SourceComparison.step and `ask` raise.
    """
    later = _known_parts(key_range, iter(known), differences_max)
    first = next(later)
    is_one = first.key_range == key_range
    later = chain((first,), later)
    pending, parts = [next(later) if is_one else _KnownPart(key_range, ())], 0
    while pending:
        part, parts = pending.pop(), parts + 1
        if parts > _PARTS_MAX:
            raise ComparisonLimitError(f"the comparison did not end in {_PARTS_MAX} parts")
        comparison = SourceComparison(
            index,
            profile,
            secrets.token_bytes(JOB_BYTES),
            key_range=part.key_range,
            differences_max=differences_max,
            known=part.known,
            only_keys=only_keys,
        )
        is_whole = part.key_range == key_range
        try:
            questions = comparison.start()
            while questions:
                questions = comparison.step(ask(questions))
        except TooManyDifferencesError as error:
            whole = comparison.unequal
            assert whole is not None
            if is_whole:
                yield whole
            if is_one or not is_whole:
                bounds = _bounds(index, profile, ask, part.key_range, whole, error, differences_max)
                cut = parts_of(part.key_range, bounds)
                pending += (_KnownPart(one, part.known) for one in reversed(cut))
        else:
            assert comparison.outcome is not None
            yield comparison.outcome
            if is_whole:
                return
        if not pending:
            pending += islice(later, 1)


@dataclass(frozen=True, slots=True)
class _KnownPart:
    key_range: KeyRange
    known: Sequence[ItemDifference]


def _known_parts(
    key_range: KeyRange, known: Iterator[ItemDifference], most: int
) -> Iterator[_KnownPart]:
    """The range in parts, each with at most so many known differences."""
    start, part = key_range.start, list(islice(known, most))
    while True:
        more = list(islice(known, most))
        if not more or more[0].key <= start:
            yield _KnownPart(KeyRange(start, key_range.end), part)
            return
        yield _KnownPart(KeyRange(start, more[0].key), part)
        start, part = more[0].key, more


def _bounds(
    index: ItemIndex,
    profile: Profile,
    ask: Ask,
    part: KeyRange,
    found: BucketComparison,
    error: TooManyDifferencesError,
    differences_max: int,
) -> list[str]:
    """Keys that cut a part into some with fewer differences."""
    wanted = min(_CUTS_MAX, 2 + 2 * int(str(error.facts["estimate"])) // differences_max)
    if 2 * found.ours.count >= found.theirs.count:
        with index.snapshot() as snapshot:
            bounds = snapshot.split(part, wanted)
    else:
        keys = sorted(set(_sample(profile, ask, part, found.position)))
        inside = [key for key in keys if key in part and key > part.start]
        bounds = sorted({inside[len(inside) * at // wanted] for at in range(1, wanted) if inside})
    if not bounds:
        raise ComparisonLimitError("too many items of one key differ")
    return bounds


def _sample(profile: Profile, ask: Ask, part: KeyRange, at: Position) -> list[str]:
    """Some keys that the target has there. It answers in the order of hashes, which is
    as good as any chance.
    """
    job = secrets.token_bytes(JOB_BYTES)

    def answer(number: int, question: Question) -> Answer:
        (given,) = ask([QuestionMessage(job, number, profile.digest, question)])
        if (given.job, given.number) != (job, number):
            raise RemoteProtocolError("an answer is of another question")
        return given.answer

    listed = answer(0, ListQuestion(at, part, b"", 0))
    if not isinstance(listed, BitmapAnswer):
        raise RemoteProtocolError("the target did not list what was asked for")
    ids = listed.extras[: _SAMPLE * ID_BYTES]
    hashes = sorted({ids[at : at + KEY_HASH_BYTES] for at in range(0, len(ids), ID_BYTES)})
    named = answer(1, NamesQuestion(at, b"".join(hashes)))
    if not isinstance(named, NamesAnswer):
        raise RemoteProtocolError("the target did not name what was asked for")
    return [facts.item.key for facts in named.items]
