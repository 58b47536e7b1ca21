"""A comparison in parts finds what a whole one finds, and no part of it is large."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from proof.errors import ComparisonLimitError, NotCertifiedError
from proof.index import WHOLE
from proof.item import Item
from proof.messages import AnswerMessage, NamesAnswer, QuestionMessage, RootAnswer
from proof.root import SetRoot
from replicator.part_proofs import DifferenceTally, compare_parts
from runtime.errors import RemoteProtocolError
from tests.support.bucket_pairs import differing, names_of, pair_at_rest
from tests.support.memory_index import PROFILE, Link, MemoryIndex


def in_parts(
    source: MemoryIndex, target: MemoryIndex, differences_max: int
) -> tuple[dict[tuple[str, str], object], int, DifferenceTally]:
    """What the parts found together, how many they were, and the tally."""
    found, parts, tally, link = dict[tuple[str, str], object](), 0, DifferenceTally(), Link(target)
    last = ""
    for part in compare_parts(source, PROFILE, link.carry, WHOLE, differences_max=differences_max):
        parts += 1
        names = names_of(tuple(part.differences))
        assert not names.keys() & found.keys()
        # Estimates are rough; a single key may have many versions.
        assert len(names) <= 3 * differences_max
        assert all(key >= last for key, _ in names)
        last = max((key for key, _ in names), default=last)
        found |= names
        tally.add(tuple(part.differences))
    return found, parts, tally


@pytest.mark.parametrize("seed", range(40))
def test_parts_find_what_differs(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((0, 50, 400, 2_000))
    source, target = pair_at_rest(rng, size, rng.choice((0, 3, 300, 2_000)))
    if rng.random() < 0.3:
        source = MemoryIndex()
    truth = differing(source.items, target.items)
    found, parts, tally = in_parts(source, target, 64)
    assert found == truth
    assert tally.count == len(truth)
    assert tally.explained == source.roots([WHOLE])[0] - target.roots([WHOLE])[0]
    assert parts == 1 or len(truth) > 32


def test_many_extras_below_one_prefix_are_cut_by_the_keys_of_the_target() -> None:
    shared = [Item(f"{name}{number}", number) for name in "az" for number in range(50)]
    extras = [Item(f"m/{number:06}", number) for number in range(5_000)]
    found, parts, _ = in_parts(MemoryIndex(shared), MemoryIndex([*shared, *extras]), 128)
    assert len(found) == 5_000
    assert 5_000 / 384 < parts < 400


def test_a_target_that_always_has_too_many_ends_in_a_limit() -> None:
    """Each part is said to have more items than before, and to be another one."""
    source, target = MemoryIndex(), MemoryIndex([Item(f"k{n:05}", n) for n in range(3_000)])
    link = Link(target)

    def lying(questions: Sequence[QuestionMessage]) -> list[AnswerMessage]:
        def told(message: AnswerMessage) -> AnswerMessage:
            answer = message.answer
            if isinstance(answer, RootAnswer):
                root = SetRoot(10**9, 7)
                return replace(message, answer=replace(answer, root=root))
            if isinstance(answer, NamesAnswer):
                return replace(message, answer=NamesAnswer(answer.answered, answer.items[:3]))
            return message

        return [told(message) for message in link.carry(list(questions))]

    with pytest.raises((ComparisonLimitError, NotCertifiedError, RemoteProtocolError)):
        list(compare_parts(source, PROFILE, lying, WHOLE, differences_max=16))
