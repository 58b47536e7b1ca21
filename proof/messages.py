"""What the two sides of a comparison send each other.

The source asks and the target answers. Each question names the position at which the
target is to answer, so that the target keeps nothing between questions, and repeating
one does no harm. `proof.wire` gives messages their bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from proof.index import AppliedPositions, EvidenceCounts, ItemFacts, KeyRange, Position
from proof.item import ID_BYTES, KEY_HASH_BYTES, ROOT_DIGEST_BYTES
from proof.root import SetRoot
from proof.symbols import SYMBOL_BYTES

JOB_BYTES = 8
SHORT_ID_BYTES = 8
# Symbols in the first answer: enough for ten differing IDs in 99 of 100 cases.
FIRST_SYMBOLS = 32
# Of one job, on either side.
JOB_SYMBOLS_MAX = 10_000_000
MESSAGE_BYTES_MAX = 4 << 20
# What fits a message with its header and the bounds of some ranges.
SYMBOLS_MAX = 230_000
LISTED_MAX = 1 << 18
NAMES_MAX = 1 << 12
# IDs that a target has besides those listed, in one answer.
EXTRAS_MAX = 1 << 17
RANGES_MAX = 1 << 12
# Children of one node in a tree over an object's windows.
WINDOW_FANOUT = 64


@dataclass(frozen=True, slots=True)
class RootQuestion:
    """Is the target equal at `applied`? `digest` hides the source's root: only a target
    that holds the same root can answer with it.
    """

    key_range: KeyRange
    applied: AppliedPositions | None
    digest: bytes

    def __post_init__(self) -> None:
        assert len(self.digest) == ROOT_DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class SymbolsQuestion:
    """The symbols from `first` on and before `last` over some ranges."""

    at: Position
    ranges: tuple[KeyRange, ...]
    first: int
    last: int
    salt: int


@dataclass(frozen=True, slots=True)
class SplitQuestion:
    """Which of these ranges differ? `roots` are the source's counts, and its sums
    modulo 2^64.
    """

    at: Position
    ranges: tuple[KeyRange, ...]
    roots: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        assert len(self.ranges) == len(self.roots)


@dataclass(frozen=True, slots=True)
class ListQuestion:
    """Which of these IDs does the target lack in a range, and which has it besides?
    `short_ids` are SHORT_ID_BYTES each, big-endian, ascending. The first `skip` of
    those that it has besides are known from an answer before.
    """

    at: Position
    key_range: KeyRange
    short_ids: bytes
    skip: int = 0

    def __post_init__(self) -> None:
        assert len(self.short_ids) % SHORT_ID_BYTES == 0


@dataclass(frozen=True, slots=True)
class NamesQuestion:
    """The items of these key hashes, KEY_HASH_BYTES each, big-endian."""

    at: Position
    key_hashes: bytes

    def __post_init__(self) -> None:
        assert len(self.key_hashes) % KEY_HASH_BYTES == 0


@dataclass(frozen=True, slots=True)
class KeysQuestion:
    """The keys and versions of the items of these key hashes, as NamesQuestion has
    them. What the items are is not asked.
    """

    at: Position
    key_hashes: bytes

    def __post_init__(self) -> None:
        assert len(self.key_hashes) % KEY_HASH_BYTES == 0


@dataclass(frozen=True, slots=True)
class WindowsQuestion:
    """The children of one node of the tree over an object's windows; level 0 is the
    windows themselves.
    """

    key: str
    version: str
    level: int
    index: int


@dataclass(frozen=True, slots=True)
class RootAnswer:
    """The target's root, what of the source's journal it holds, the position of its own
    journal at which it answers from now on, and how its items are known.
    """

    root: SetRoot
    applied: AppliedPositions | None
    position: Position
    evidence: EvidenceCounts
    symbols: bytes = b""
    """The first symbols where the digest did not match; empty is equal."""

    def __post_init__(self) -> None:
        assert len(self.symbols) in (0, FIRST_SYMBOLS * SYMBOL_BYTES)


@dataclass(frozen=True, slots=True)
class SymbolsAnswer:
    """SYMBOL_BYTES a symbol, see `CodedSymbols.to_bytes`."""

    symbols: bytes

    def __post_init__(self) -> None:
        assert len(self.symbols) % SYMBOL_BYTES == 0


@dataclass(frozen=True, slots=True)
class UnequalAnswer:
    """For each range the target's count where it differs; None where it is equal."""

    counts: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class BitmapAnswer:
    """`present` has a bit for each listed ID, from the highest bit of the first byte
    on. `extras` are full IDs that were not listed, after those skipped, and
    `extras_count` is the number of all, skipped ones too.
    """

    present: bytes
    extras: bytes
    extras_count: int

    def __post_init__(self) -> None:
        assert len(self.extras) % ID_BYTES == 0


@dataclass(frozen=True, slots=True)
class NamesAnswer:
    """Items of the first `answered` key hashes, by key and version. A hash without an
    item has none at this position any more.
    """

    answered: int
    items: Sequence[ItemFacts]


@dataclass(frozen=True, slots=True)
class KeysAnswer:
    """Keys and versions of the items of the first `answered` key hashes, ascending. A
    hash without an item has none at this position any more.
    """

    answered: int
    names: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class WindowsAnswer:
    """The folded CRCs of a node's children, at most WINDOW_FANOUT."""

    checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.checksums) <= WINDOW_FANOUT


Question: TypeAlias = (
    RootQuestion
    | SymbolsQuestion
    | SplitQuestion
    | ListQuestion
    | NamesQuestion
    | WindowsQuestion
    | KeysQuestion
)
Answer: TypeAlias = (
    RootAnswer
    | SymbolsAnswer
    | UnequalAnswer
    | BitmapAnswer
    | NamesAnswer
    | WindowsAnswer
    | KeysAnswer
)


@dataclass(frozen=True, slots=True)
class QuestionMessage:
    """A question, the job that asks it and its number there, and the digest of the
    profile that gave the IDs.
    """

    job: bytes
    number: int
    profile: bytes
    question: Question

    def __post_init__(self) -> None:
        assert len(self.job) == JOB_BYTES
        assert len(self.profile) == ID_BYTES


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """An answer to the question of this job and number."""

    job: bytes
    number: int
    answer: Answer

    def __post_init__(self) -> None:
        assert len(self.job) == JOB_BYTES
