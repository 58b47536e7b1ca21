"""The port of a bucket's index, and the values that pass through it.

A comparison reads a bucket through a snapshot: all answers of one snapshot describe the
same position of the journal. Keys are ordered by code points, which is the order of
their UTF-8 bytes, as stores list them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType, Protocol

from proof.item import EvidenceLevel, Item, ItemId
from proof.root import SetRoot
from proof.symbols import CodedSymbols, Ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Position = NewType("Position", int)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys from `start` on and before `end`; None is past the last key."""

    start: str = ""
    end: str | None = None

    def __post_init__(self) -> None:
        assert self.end is None or self.start <= self.end

    def __contains__(self, key: str) -> bool:
        return self.start <= key and (self.end is None or key < self.end)


WHOLE = KeyRange()


@dataclass(frozen=True, slots=True)
class ItemEvidence:
    """How the content of one item is known; `read_at_s` only at level READ, in seconds
    since 1970.
    """

    level: EvidenceLevel
    read_at_s: int | None = None


@dataclass(frozen=True, slots=True)
class EvidenceCounts:
    """Items by level, and when the bytes of the longest unread item were last read."""

    listed: int = 0
    recorded: int = 0
    read: int = 0
    oldest_read_at_s: int | None = None


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """An item as one side tells the other, which computes the ID itself."""

    item: Item
    evidence: ItemEvidence


@dataclass(frozen=True, slots=True)
class IndexedItem:
    """A row of the index."""

    item: Item
    id: ItemId
    evidence: ItemEvidence


@dataclass(frozen=True, slots=True)
class IndexChange:
    """A row of the journal: at `position` the item of this key and version went from
    one ID to another. None is no item. Positions ascend and are at least 1.
    """

    position: Position
    key: str
    version: str
    old: ItemId | None
    new: ItemId | None


@dataclass(frozen=True, slots=True)
class AppliedPositions:
    """Which positions of the source's journal a target holds: all up to `through`, and
    `above`, ascending. A superseded position counts as applied with its successor.

    A target that is known by a listing only holds an unknown part of what came after
    `through` and until `listed_through`.
    """

    through: Position
    above: tuple[Position, ...] = ()
    listed_through: Position | None = None

    def __post_init__(self) -> None:
        assert list(self.above) == sorted(set(self.above))
        assert not self.above or self.above[0] > self.through
        assert self.listed_through is None or self.listed_through >= self.through


class ItemSnapshot(Protocol):
    """The items of a bucket at one position of its own journal."""

    @property
    def position(self) -> Position:
        """Of the last change in this snapshot; 0 before the first."""

    @property
    def applied(self) -> AppliedPositions | None:
        """What of a source's journal this bucket holds; None where nothing feeds it."""

    @property
    def evidence(self) -> EvidenceCounts:
        """Of all items."""

    def roots(self, ranges: Sequence[KeyRange]) -> list[SetRoot]:
        """The root of each of these ranges, which are ascending and disjoint."""

    def symbols(self, size: int) -> CodedSymbols:
        """A copy of the first `size` symbols of all items, at most KEPT_SYMBOLS."""

    def ids(self, key_range: KeyRange) -> Ids:
        """The IDs of a range in any order; shape (items, 2)."""

    def split(self, key_range: KeyRange, parts: int) -> list[str]:
        """At most `parts - 1` distinct keys, ascending and inside the range, that cut
        it into parts of nearly equal counts.
        """

    def find(self, key_hashes: "NDArray[np.uint64]") -> list[IndexedItem]:
        """All items whose key hash (48 bits, see `proof.symbols.key_hashes`) is among
        these, in any order. Hashes without an item are passed over, and twins of one
        hash are all returned.
        """


class ItemIndex(Protocol):
    """A bucket's index, which changes while it is compared."""

    def snapshot(self) -> AbstractContextManager[ItemSnapshot]:
        """Readable until the context ends."""

    def changes(self, *, after: Position, through: Position) -> list[IndexChange]:
        """The journal after one position and up to another, ascending.

        Raises:
            JournalTrimmedError: the journal no longer reaches back to `after`.
        """
