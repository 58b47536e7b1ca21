"""Targets that lie, stall, replay or corrupt: a named error, and never a false word."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from merkle.errors import ReconcileError
from proof.comparison import TRIPS_MAX, BucketComparison, SourceComparison
from proof.errors import ComparisonLimitError, NotCertifiedError
from proof.item import Item, ItemHasher
from proof.messages import (
    Answer,
    AnswerMessage,
    BitmapAnswer,
    NamesAnswer,
    NamesQuestion,
    QuestionMessage,
    RootAnswer,
    SymbolsAnswer,
    UnequalAnswer,
)
from proof.root import SetRoot
from proof.wire import decode_answer, encode_answer
from runtime.errors import RemoteProtocolError
from tests.support.bucket_pairs import differing, names_of, pair_at_rest
from tests.support.memory_index import PROFILE, Link, MemoryIndex, compare
from tests.support.mutation import mutated_bytes

JOB = b"job of 8"
HASHER = ItemHasher(PROFILE)
Lie = Callable[[QuestionMessage, AnswerMessage], AnswerMessage]


def compare_with(source: MemoryIndex, target: MemoryIndex, lie: Lie) -> BucketComparison:
    """A comparison in which each answer passes through `lie`."""
    side, link = SourceComparison(source, PROFILE, JOB), Link(target)
    questions = side.start()
    while questions:
        questions = side.step(
            [
                lie(question, answer)
                for question, answer in zip(questions, link.carry(questions), strict=True)
            ]
        )
    assert side.outcome is not None
    return side.outcome


def lying(kind: type[Answer], change: Callable[[Answer], Answer]) -> Lie:
    """Change the answers of one kind."""

    def lie(_: QuestionMessage, message: AnswerMessage) -> AnswerMessage:
        if isinstance(message.answer, kind):
            return replace(message, answer=change(message.answer))
        return message

    return lie


@pytest.mark.parametrize("group", range(5))
def test_corrupt_answers_are_named_or_change_nothing(group: int) -> None:
    """What comes after the root is certified by it: whatever is found is the truth."""
    kept = 0
    for seed in range(group, 1_000, 5):
        rng = random.Random(seed)
        size = rng.choice((10, 100, 1000))
        source, target = pair_at_rest(rng, size, rng.choice((1, 20, size)))
        truth = differing(source.items, target.items)

        def lie(_: QuestionMessage, message: AnswerMessage, rng: random.Random) -> AnswerMessage:
            if isinstance(message.answer, RootAnswer) or rng.random() < 0.3:
                return message
            raw = encode_answer(message)
            return decode_answer(mutated_bytes(rng, raw, [raw]))

        try:
            outcome = compare_with(source, target, lambda q, a, rng=rng: lie(q, a, rng))
        except ReconcileError:
            continue
        kept += 1
        assert outcome.is_equal == (not truth), seed
        found = names_of(outcome.differences)
        assert found.items() <= truth.items(), seed
        assert len(found) + outcome.in_flight == len(truth), seed
    assert kept > 20


def test_a_corrupt_root_is_never_equal() -> None:
    for seed in range(400):
        rng = random.Random(seed)
        source, target = pair_at_rest(rng, 50, rng.choice((1, 20)))
        truth = differing(source.items, target.items)

        def lie(_: QuestionMessage, message: AnswerMessage, rng: random.Random) -> AnswerMessage:
            raw = encode_answer(message)
            return decode_answer(mutated_bytes(rng, raw, [raw]))

        try:
            outcome = compare_with(source, target, lambda q, a, rng=rng: lie(q, a, rng))
        except ReconcileError:
            continue
        assert not (outcome.is_equal and truth), seed


@pytest.fixture
def unequal() -> tuple[MemoryIndex, MemoryIndex]:
    """5,000 items each, some hundreds of which differ."""
    return pair_at_rest(random.Random(1), 5_000, 300)


def test_a_target_that_claims_to_be_equal_must_know_our_root(
    unequal: tuple[MemoryIndex, MemoryIndex],
) -> None:
    lie = lying(RootAnswer, lambda answer: replace(answer, symbols=b""))
    with pytest.raises(RemoteProtocolError, match="without holding our root"):
        compare_with(*unequal, lie)


def test_a_replayed_answer_is_of_another_job_or_number() -> None:
    source = MemoryIndex([Item("a", 1)])
    earlier = list[AnswerMessage]()

    def keep(_: QuestionMessage, message: AnswerMessage) -> AnswerMessage:
        earlier.append(message)
        return message

    assert compare_with(source, MemoryIndex([Item("a", 1)]), keep).is_equal
    source.put(Item("b", 2))
    for job, number, reason in ((b"another.", 0, "of another job"), (JOB, 1, "not those to")):
        replayed = replace(earlier[0], job=job, number=number)
        with pytest.raises(RemoteProtocolError, match=reason):
            compare_with(source, MemoryIndex([Item("a", 1)]), lambda q, a, r=replayed: r)
    # The same job twice would be the caller's fault; even then the root is not ours.
    with pytest.raises(RemoteProtocolError, match="without holding our root"):
        compare_with(source, MemoryIndex([Item("a", 1)]), lambda q, a: earlier[0])


@pytest.mark.parametrize("number", [0, 2])
def test_all_questions_get_one_answer_each(number: int) -> None:
    source, target = MemoryIndex([Item("a", 1)]), MemoryIndex()
    side = SourceComparison(source, PROFILE, JOB)
    answers = Link(target).carry(side.start())
    with pytest.raises(RemoteProtocolError, match="not those to the questions"):
        side.step(answers * number)


def test_an_answer_of_another_kind_is_refused(unequal: tuple[MemoryIndex, MemoryIndex]) -> None:
    lie = lying(SymbolsAnswer, lambda answer: UnequalAnswer((None,)))
    with pytest.raises(RemoteProtocolError, match="a UnequalAnswer where a SymbolsAnswer"):
        compare_with(*unequal, lie)


def test_fewer_symbols_than_asked_for_are_refused(
    unequal: tuple[MemoryIndex, MemoryIndex],
) -> None:
    lie = lying(SymbolsAnswer, lambda answer: SymbolsAnswer(bytes(18)))
    with pytest.raises(RemoteProtocolError, match="not the symbols"):
        compare_with(*unequal, lie)


def test_an_index_with_a_wrong_symbol_is_found_out_by_new_symbols() -> None:
    """The kept symbols of the target are wrong: two failures lead to a salt, and to
    symbols that are encoded from the items.
    """
    source, target = pair_at_rest(random.Random(1), 5_000, 300)
    for at in range(0, 20_000, 3):
        target.corrupt_symbol(at)
    salts = set[int]()

    def watch(question: QuestionMessage, message: AnswerMessage) -> AnswerMessage:
        if isinstance(message.answer, SymbolsAnswer):
            salts.add(question.question.salt)
        return message

    outcome = compare_with(source, target, watch)
    assert names_of(outcome.differences) == differing(source.items, target.items)
    assert len(salts) > 1


def test_noise_for_symbols_costs_bytes_and_nothing_else() -> None:
    """A list gives the truth in the end; noise there is not certified."""
    source, target = pair_at_rest(random.Random(1), 5_000, 300)
    rng = random.Random(2)

    def noise(_: QuestionMessage, message: AnswerMessage) -> AnswerMessage:
        answer = message.answer
        if isinstance(answer, SymbolsAnswer):
            return replace(message, answer=SymbolsAnswer(rng.randbytes(len(answer.symbols))))
        if isinstance(answer, BitmapAnswer) and noisy_lists:
            return replace(message, answer=replace(answer, present=bytes(len(answer.present))))
        return message

    noisy_lists = False
    outcome = compare_with(source, target, noise)
    assert names_of(outcome.differences) == differing(source.items, target.items)
    noisy_lists = True
    with pytest.raises(NotCertifiedError):
        compare_with(source, target, noise)


def test_a_target_that_claims_2_to_the_60_items_is_refused() -> None:
    source, target = pair_at_rest(random.Random(1), 300, 20)
    lie = lying(RootAnswer, lambda answer: replace(answer, root=SetRoot(2**60, 5)))
    with pytest.raises((RemoteProtocolError, NotCertifiedError, ComparisonLimitError)):
        compare_with(source, target, lie)


def disjoint() -> tuple[MemoryIndex, MemoryIndex]:
    """Two that share nothing, so that a list is cheapest."""
    sides = [[Item(f"{name}{n}", n) for n in range(900)] for name in "ab"]
    return MemoryIndex(sides[0]), MemoryIndex(sides[1])


def test_a_list_of_more_items_than_the_target_has_is_refused() -> None:
    def more(answer: Answer) -> Answer:
        assert isinstance(answer, BitmapAnswer)
        return replace(answer, extras=answer.extras * 2, extras_count=answer.extras_count * 2)

    with pytest.raises(RemoteProtocolError, match="more items than it has"):
        compare_with(*disjoint(), lying(BitmapAnswer, more))


def test_a_list_that_never_ends_is_refused() -> None:
    def none(answer: Answer) -> Answer:
        assert isinstance(answer, BitmapAnswer)
        return replace(answer, extras=b"")

    with pytest.raises(RemoteProtocolError, match="leaves out items"):
        compare_with(*disjoint(), lying(BitmapAnswer, none))


def test_a_list_in_pieces_is_put_together() -> None:
    """A target that answers 100 items at a time is slow, and not wrong."""
    source, target = disjoint()

    def few(_: QuestionMessage, message: AnswerMessage) -> AnswerMessage:
        if isinstance(message.answer, BitmapAnswer):
            few_ids = message.answer.extras[: 16 * 100]
            return replace(message, answer=replace(message.answer, extras=few_ids))
        return message

    outcome = compare_with(source, target, few)
    assert names_of(outcome.differences) == differing(source.items, target.items)
    assert outcome.trips > 9


def test_a_bitmap_that_does_not_fit_is_refused() -> None:
    def longer(answer: Answer) -> Answer:
        assert isinstance(answer, BitmapAnswer)
        return replace(answer, present=answer.present + b"\0")

    with pytest.raises(RemoteProtocolError, match="does not fit"):
        compare_with(*disjoint(), lying(BitmapAnswer, longer))


def some_extras() -> tuple[MemoryIndex, MemoryIndex]:
    items = [Item(f"k{n}", n) for n in range(100)]
    return MemoryIndex(items[3:]), MemoryIndex(items[:-1])


def test_names_that_were_not_asked_for_are_refused() -> None:
    def other(answer: Answer) -> Answer:
        assert isinstance(answer, NamesAnswer)
        forged = replace(answer.items[0], item=Item("important", 0))
        return replace(answer, items=(forged, *answer.items[1:]))

    with pytest.raises(RemoteProtocolError, match="'important' was not asked for"):
        compare_with(*some_extras(), lying(NamesAnswer, other))


def test_names_that_are_left_out_are_counted_and_not_guessed() -> None:
    def fewer(answer: Answer) -> Answer:
        assert isinstance(answer, NamesAnswer)
        return replace(answer, items=answer.items[1:])

    outcome = compare_with(*some_extras(), lying(NamesAnswer, fewer))
    assert (len(outcome.differences), outcome.in_flight, outcome.is_equal) == (3, 1, False)


@pytest.mark.parametrize("answered", [0, 4])
def test_names_of_none_or_too_many_hashes_are_refused(answered: int) -> None:
    lie = lying(NamesAnswer, lambda answer: replace(answer, answered=answered))
    with pytest.raises(RemoteProtocolError, match="names of more, or of none"):
        compare_with(*some_extras(), lie)


def test_a_target_that_names_one_item_at_a_time_ends_in_a_limit() -> None:
    source = MemoryIndex()
    target = MemoryIndex([Item(f"k{n}", n) for n in range(2 * TRIPS_MAX)])

    def one(question: QuestionMessage, message: AnswerMessage) -> AnswerMessage:
        answer, asked = message.answer, question.question
        if isinstance(answer, NamesAnswer) and isinstance(asked, NamesQuestion):
            first = asked.key_hashes[:6]
            items = [facts for facts in answer.items if HASHER.id(facts.item)[:6] == first]
            return replace(message, answer=NamesAnswer(1, tuple(items)))
        return message

    with pytest.raises(ComparisonLimitError, match="did not end"):
        compare_with(source, target, one)


def prefixes() -> tuple[MemoryIndex, MemoryIndex]:
    """The target lacks a prefix of 30,000 items, more than the kept symbols decode."""
    items = [Item(f"{'abc'[n % 3]}/{n}", n) for n in range(90_000)]
    return MemoryIndex(items), MemoryIndex([item for item in items if item.key[0] != "b"])


def test_a_lost_prefix_is_settled_by_counts() -> None:
    source, target = prefixes()
    link = Link(target)
    outcome = compare(source, target, link=link)
    assert len(outcome.differences) == 30_000
    assert {one.key[0] for one in outcome.differences} == {"b"}
    assert link.total_bytes < 32_000
    assert outcome.trips <= 5


def test_counts_of_ranges_that_are_not_true_are_not_certified() -> None:
    source, target = prefixes()

    def settle(answer: Answer) -> Answer:
        assert isinstance(answer, UnequalAnswer)
        return UnequalAnswer(tuple(0 for _ in answer.counts))

    with pytest.raises(NotCertifiedError):
        compare_with(source, target, lying(UnequalAnswer, settle))
    for counts, reason in (((0,), "as many counts"), (None, "add up to more")):
        lie = lying(
            UnequalAnswer,
            lambda answer, counts=counts: UnequalAnswer(
                counts or tuple(10**6 for _ in answer.counts)
            ),
        )
        with pytest.raises(RemoteProtocolError, match=reason):
            compare_with(source, target, lie)
