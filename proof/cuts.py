"""Cuts: comparing two buckets that both change, without freezing either.

A cut says which changes of the source's journal the target holds. What the target must
hold is the source's present set with all other changes undone. So both sides read
themselves at a cut through a snapshot of now and the journal since.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from proof.errors import CutUnknownError
from proof.index import (
    AppliedPositions,
    EvidenceCounts,
    IndexChange,
    IndexedItem,
    ItemIndex,
    ItemSnapshot,
    KeyRange,
    Position,
)
from proof.item import ItemId
from proof.root import SetRoot
from proof.symbols import CodedSymbols, Ids, ids_from_bytes, short_ids
from runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from proof.columns import NameColumns


@dataclass(frozen=True, slots=True)
class UndoneChange:
    """All changes of one item after a cut: its ID then and now, None is no item, and
    the position of the first one.
    """

    key: str
    version: str
    then: ItemId | None
    now: ItemId | None
    first: Position


def undone_changes(changes: Iterable[IndexChange], applied: AppliedPositions) -> list[UndoneChange]:
    """What to undo of the journal after `applied.through`, one entry an item.

    Raises:
        RemoteProtocolError: `applied` has a change without an earlier one of the same
            item, which no target that applies changes in order can have.
    """
    above, found = frozenset(applied.above), dict[tuple[str, str], UndoneChange]()
    for change in changes:
        item = (change.key, change.version)
        before = found.get(item)
        if change.position in above:
            if before is not None:
                raise RemoteProtocolError(
                    f"the cut has position {change.position} without {before.first} of the"
                    " same item before it",
                    reason="cut_not_closed",
                )
            continue
        then = change.old if before is None else before.then
        first = change.position if before is None else before.first
        found[item] = UndoneChange(*item, then, change.new, first)
    return list(found.values())


class RewoundSnapshot:
    """A snapshot with some changes undone; an ItemSnapshot itself."""

    def __init__(
        self,
        snapshot: ItemSnapshot,
        undone: Sequence[UndoneChange],
        position: Position,
    ) -> None:
        self._snapshot = snapshot
        self._position = position
        self.undone = tuple(undone)

    @property
    def position(self) -> Position:
        """Where the snapshot was rewound to; changes after it may be in it."""
        return self._position

    @property
    def applied(self) -> AppliedPositions | None:
        """Of the present."""
        return self._snapshot.applied

    @property
    def evidence(self) -> EvidenceCounts:
        """Of the present."""
        return self._snapshot.evidence

    def roots(self, ranges: Sequence[KeyRange]) -> list[SetRoot]:
        """See ItemSnapshot."""
        roots = self._snapshot.roots(ranges)
        starts = [key_range.start for key_range in ranges]
        for one in self.undone:
            at = bisect_right(starts, one.key) - 1
            if at >= 0 and one.key in ranges[at]:
                roots[at] += SetRoot.of_item(one.then) - SetRoot.of_item(one.now)
        return roots

    def symbols(self, size: int) -> CodedSymbols:
        """See ItemSnapshot."""
        symbols = self._snapshot.symbols(size)
        symbols.remove(_ids(one.now for one in self.undone))
        symbols.add(_ids(one.then for one in self.undone))
        return symbols

    def ids(self, key_range: KeyRange) -> Ids:
        """See ItemSnapshot."""
        ids = self._snapshot.ids(key_range)
        inside = [one for one in self.undone if one.key in key_range]
        if not inside:
            return ids
        # A twin by 8 of 16 bytes would be left out too; the roots do not certify that.
        gone = np.isin(short_ids(ids), short_ids(_ids(one.now for one in inside)))
        return np.concatenate((ids[~gone], _ids(one.then for one in inside)))

    def split(self, key_range: KeyRange, parts: int) -> list[str]:
        """See ItemSnapshot."""
        return self._snapshot.split(key_range, parts)

    def find(self, key_hashes: "NDArray[np.uint64]") -> Sequence[IndexedItem]:
        """The items that have not changed since the cut: what the others were is not
        known any more.
        """
        found, now = self._snapshot.find(key_hashes), {one.now for one in self.undone}
        return [row for row in found if row.id not in now] if now else found

    def names(self, key_hashes: "NDArray[np.uint64]") -> "NameColumns":
        """See ItemSnapshot; of the present."""
        return self._snapshot.names(key_hashes)


@contextmanager
def rewound(index: ItemIndex, applied: AppliedPositions) -> Iterator[RewoundSnapshot]:
    """The index at a cut of its own journal, readable until the context ends.

    Raises:
        CutUnknownError: the journal has not reached a position of the cut.
        JournalTrimmedError: it no longer reaches back to it.
        RemoteProtocolError: see `undone_changes`.
    """
    with index.snapshot() as snapshot:
        last = applied.above[-1] if applied.above else applied.through
        if last > snapshot.position:
            raise CutUnknownError(
                f"the cut is at position {last}, the journal at {snapshot.position}",
                hint="let the index catch up with its bucket, then compare again",
                cut=last,
                journal=snapshot.position,
            )
        changes = index.changes(after=applied.through, through=snapshot.position)
        yield RewoundSnapshot(snapshot, undone_changes(changes, applied), applied.through)


def with_extras(
    view: RewoundSnapshot, extras: Iterable[tuple[str, str, ItemId]]
) -> RewoundSnapshot:
    """The snapshot with items that it does not have, by key, version and ID: what a
    target holds that has these besides.
    """
    undone = [UndoneChange(*item, None, Position(0)) for item in extras]
    return RewoundSnapshot(view, undone, view.position)


def _ids(ids: Iterable[ItemId | None]) -> Ids:
    return ids_from_bytes(b"".join(one for one in ids if one is not None))
