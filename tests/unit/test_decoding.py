"""How a comparison goes on when its symbols do not decode."""

from hypothesis import given
from hypothesis import strategies as st

from proof.decoding import (
    Progress,
    Step,
    is_split_again,
    next_size,
    next_step,
    remaining_estimate,
    should_decode,
)
from proof.symbols import KEPT_SYMBOLS


def progress(
    symbols: int, estimate: float, ours: int, theirs: int, *, may_split: bool = True
) -> Progress:
    return Progress(symbols, estimate, ours, theirs, may_split)


@given(st.integers(0, 10_000_000), st.floats(1, 1e7))
def test_symbols_always_grow_and_few_of_them_are_not_believed(symbols: int, guess: float) -> None:
    size = next_size(symbols, guess)
    assert size > 1.25 * symbols
    if symbols:
        assert size <= max(2 * symbols**2, 1.25 * symbols + 1)


@given(st.floats(1, 1e7))
def test_enough_symbols_are_asked_for_at_once(estimate: float) -> None:
    assert should_decode(next_size(0, estimate), estimate)
    assert next_size(0, estimate) <= 1.4 * estimate + 2 * estimate**0.5 + 8


@given(st.floats(1, 1e7), st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_what_is_left_is_neither_none_nor_more_than_all(
    estimate: float, settled: int, surpluses: int, more: int
) -> None:
    items = surpluses + more + 1
    left = remaining_estimate(estimate, settled=settled, surpluses=surpluses, items=items)
    assert max(1, surpluses) <= left <= items


def test_symbols_that_are_kept_come_first() -> None:
    assert next_step(progress(32, 100, 10**6, 10**6)) is Step.SYMBOLS
    assert next_step(progress(32, 10**5, 10**7, 10**7)) is Step.SYMBOLS
    assert next_step(progress(2048, 20_000, 10**6, 10**6)) is Step.SYMBOLS


def test_more_than_what_is_kept_is_split_once() -> None:
    assert next_step(progress(2048, KEPT_SYMBOLS, 10**7, 10**7)) is Step.SPLIT
    after = progress(2048, KEPT_SYMBOLS, 10**7, 10**7, may_split=False)
    assert next_step(after) is Step.SYMBOLS


def test_a_lost_prefix_is_split_before_more_symbols_come() -> None:
    assert next_step(progress(32, 10**6, 10**7, 9 * 10**6)) is Step.SPLIT
    # Where a list would cost less, too.
    assert next_step(progress(32, 10**6, 10**6, 10)) is Step.SPLIT
    # Counts say nothing where one side has nothing.
    assert next_step(progress(32, 10**6, 10**6, 0)) is Step.LIST


def test_a_list_is_cheaper_above_a_third_of_all_items() -> None:
    for share, step in ((0.2, Step.SYMBOLS), (0.6, Step.LIST)):
        assert next_step(progress(32, share * 10_000, 10_000, 10_000)) is step
    # Nobody lists more than fits a job.
    assert next_step(progress(2048, 2 * 10**7, 2 * 10**7, 2 * 10**7)) is Step.SPLIT


def test_what_counts_settled_for_the_most_part_is_split_again() -> None:
    assert is_split_again(settled=10**6, left=20_000)
    assert not is_split_again(settled=10**6, left=500)
    assert not is_split_again(settled=10, left=20_000)
