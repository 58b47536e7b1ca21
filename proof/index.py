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

    from proof.columns import NameColumns

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

    def find(self, key_hashes: "NDArray[np.uint64]") -> Sequence[IndexedItem]:
        """All items whose key hash (48 bits, see `proof.symbols.key_hashes`) is among
        these, in any order. Hashes without an item are passed over, and twins of one
        hash are all returned.
        """

    def names(self, key_hashes: "NDArray[np.uint64]") -> "NameColumns":
        """The keys and the versions of the same items, for less. They are not checked:
        hash them before use.
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


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a store says of one version of a key: while it is the same, and the size
    too, so are the bytes and properties.
    """

    version: str
    etag: str
    modified_ms: int


@dataclass(frozen=True, slots=True)
class StampedItem:
    """What an index stores for one version of a key. `is_damaged`: under this stamp its
    bytes were seen to change, or could not be read any more.
    """

    item: Item
    evidence: ItemEvidence
    stamp: Stamp
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class ListingNote:
    """When a listing of a prefix began, in seconds since 1970, and whether it reached
    the end.
    """

    began_at_s: int
    is_complete: bool


class IndexWriter(Protocol):
    """The writing side of an index. One thread at a time writes; others may read.

    Every method raises DatabaseError if the storage fails, and IndexDamagedError if
    what it holds cannot be right. After either of `apply`, `note_listing` or
    `trim_journal` the index has to be opened again.
    """

    def rows(self, *, start_after: str, limit: int, prefix: str = "") -> list[StampedItem]:
        """At least `limit` items with keys after `start_after`, if there are as many,
        in the order of keys and versions: for a merge with a listing. More only because
        the versions of a key come together.
        """

    def row(self, key: str) -> StampedItem | None:
        """The item of a key without a version."""

    def apply(
        self,
        changes: Sequence[tuple[str, StampedItem | None]],
        *,
        applied: AppliedPositions | None = None,
    ) -> SetRoot:
        """Store items, and remove all versions of the keys with None, in one
        transaction, durable on return; the root afterwards.

        What is unchanged writes no journal row. `applied` replaces what was noted
        before, unless it is None.
        """

    def note_listing(self, prefix: str, *, began_at_s: int, complete: bool) -> None:
        """Note when the bucket was last listed below a prefix."""

    def trim_journal(self, *, through: Position) -> None:
        """Drop the journal up to the last position that every side acknowledged."""
