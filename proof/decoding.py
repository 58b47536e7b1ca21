"""How a comparison goes on when the symbols so far do not decode: pure decisions.

The estimate of the difference comes from the counts of symbols. It decides how many
symbols to ask for, and when ranges or a list of short IDs cost less.
"""

from dataclasses import dataclass
from enum import Enum

from proof.item import ID_BYTES
from proof.messages import JOB_SYMBOLS_MAX, SHORT_ID_BYTES
from proof.symbols import KEPT_SYMBOLS, SYMBOL_BYTES

# Ranges that are compared before IDs are read. A range takes some 28 bytes where keys
# are long, so that a lost prefix stays below 32 kB with all headers.
SPLIT_RANGES = 896
# Ranges in a second split, of what a lost or an extra prefix leaves over at its ends.
RESPLIT_RANGES = 128
# Symbols for an ID of the difference, where there are many.
_SYMBOLS_AN_ID = 1.4
# IDs that a source lists in one job: 80 MB.
LISTED_IDS_MAX = 10_000_000


class Step(Enum):
    """What to ask for next."""

    SYMBOLS = "symbols"
    SPLIT = "split"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known of a difference that did not decode yet. `symbols` are those of the
    ranges and the salt at hand; `ours` and `theirs` count the items in these ranges.
    """

    symbols: int
    estimate: float
    ours: int
    theirs: int
    may_split: bool
    """The ranges were not split yet."""


def _first_size(estimate: float) -> int:
    """How many symbols to ask for at first where the difference is known."""
    return min(JOB_SYMBOLS_MAX, int((_SYMBOLS_AN_ID + 2 / max(estimate, 1) ** 0.5) * estimate) + 8)


def next_size(symbols: int, estimate: float) -> int:
    """How many symbols to have next. Few symbols estimate badly, so that they lead to
    at most twice their square.
    """
    if not symbols:
        return _first_size(estimate)
    wanted = int((_SYMBOLS_AN_ID + 2 / symbols**0.5) * estimate) + 8
    return max(int(1.25 * symbols) + 1, min(2 * symbols**2, wanted))


def should_decode(symbols: int, estimate: float) -> bool:
    """Whether that many symbols decode nearly always: then a failure says something."""
    return symbols >= _first_size(estimate)


def next_step(progress: Progress) -> Step:
    """The cheapest way on, in bytes; symbols that are kept cost no reading besides."""
    size, wanted = next_size(progress.symbols, progress.estimate), _first_size(progress.estimate)
    surplus = progress.ours - progress.theirs
    theirs_only = max(0.0, (progress.estimate - surplus) / 2)
    listed = SHORT_ID_BYTES * progress.ours + progress.ours / 8 + ID_BYTES * theirs_only
    symbols = SYMBOL_BYTES * (max(size, wanted) - progress.symbols)
    if listed < symbols and progress.ours <= LISTED_IDS_MAX and not _is_one_sided(progress):
        return Step.LIST
    if progress.may_split and (size > KEPT_SYMBOLS or _is_one_sided(progress)):
        return Step.SPLIT
    return Step.SYMBOLS


def _is_one_sided(progress: Progress) -> bool:
    """Whether the counts alone say that the symbols kept are too few, and that one side
    lacks most of what differs: ranges settle that for less.
    """
    surplus = abs(progress.ours - progress.theirs)
    return (
        progress.may_split
        and _SYMBOLS_AN_ID * surplus > KEPT_SYMBOLS
        and 2 * surplus > progress.estimate
        and min(progress.ours, progress.theirs) > 0
    )


def is_split_again(*, settled: int, left: int) -> bool:
    """Whether to split the ranges left over once more: counts settled most of the
    difference, so that the rest is at the ends of what one side lacks.
    """
    return settled > left > SPLIT_RANGES


def remaining_estimate(estimate: float, *, settled: int, surpluses: int, items: int) -> float:
    """The difference in ranges that are left over when others are settled. `surpluses`
    is the sum of the absolute differences of their counts, `items` that of the counts.
    """
    # What is left of an estimate of nearly the settled size says little.
    left = surpluses if 2 * settled > estimate else estimate - settled
    return float(min(max(left, surpluses, 1), items))
