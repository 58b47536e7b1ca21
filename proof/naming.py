"""From IDs that only one side has to differences of named items.

The source knows its own items by their key hashes. Two IDs of one key hash are one
changed item, and only items that the source lacks need names from the target. Items of
different keys with one key hash (twins) are named by both sides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from proof.cuts import RewoundSnapshot, UndoneChange
from proof.errors import NotCertifiedError
from proof.index import AppliedPositions, IndexedItem, ItemFacts
from proof.item import KEY_HASH_BYTES, ItemHasher, ItemId
from proof.symbols import IdDifference, each_id, ids_from_bytes, key_hashes
from runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ItemDifferenceKind(Enum):
    """Seen from the source."""

    MISSING = "missing"
    """The target lacks the item."""
    EXTRA = "extra"
    """Only the target has the item."""
    CHANGED = "changed"
    """Both have the key and version, with different content or properties."""


@dataclass(frozen=True, slots=True)
class ItemDifference:
    """One item that differs. `ours` is None if extra. `theirs` is known if extra,
    unless only keys were asked for. An item that has changed since the cut may have
    neither. `theirs_id` is None if missing.
    """

    kind: ItemDifferenceKind
    key: str
    version: str
    ours: IndexedItem | None = None
    theirs: ItemFacts | None = None
    theirs_id: ItemId | None = None


@dataclass(frozen=True, slots=True)
class NamingResult:
    """See BucketComparison."""

    differences: Sequence[ItemDifference]
    in_flight: int
    unknown: tuple[ItemDifference, ...]


class Naming:
    """Names the IDs of one comparison. Ask the target for `unnamed_hashes`, give its
    answers to `take`, then read `result`.
    """

    def __init__(
        self,
        hasher: ItemHasher,
        cut: AppliedPositions,
        found: IdDifference,
        view: RewoundSnapshot,
    ) -> None:
        self._hasher = hasher
        self._cut = cut
        rows = view.find(np.unique(key_hashes(found.ours)))
        self._rows = {row.id: row for row in rows}
        self._undone_by_id = {one.then: one for one in view.undone if one.then is not None}
        self._undone = {(one.key, one.version): one for one in view.undone}
        self._differences = list[ItemDifference]()
        self._unknown = list[ItemDifference]()
        self._in_flight = 0
        ours, theirs = key_hashes(found.ours), key_hashes(found.theirs)
        known = key_hashes(ids_from_bytes(b"".join(self._rows)))
        changed = np.intersect1d(_single(ours), _single(theirs))
        changed = np.setdiff1d(changed, np.setdiff1d(known, _single(known)))
        theirs_changed = each_id(found.theirs[np.isin(theirs, changed)])
        self._changed = {item_id[:KEY_HASH_BYTES]: item_id for item_id in theirs_changed}
        is_changed, is_missing = np.isin(ours, changed), ~np.isin(ours, theirs)
        for kind, wanted in (
            (ItemDifferenceKind.CHANGED, is_changed),
            (ItemDifferenceKind.MISSING, is_missing),
        ):
            for item_id in each_id(found.ours[wanted]):
                self._add_ours(kind, item_id, self._changed.get(item_id[:KEY_HASH_BYTES]))
        self._twins = each_id(found.ours[~is_changed & ~is_missing])
        unnamed = found.theirs[~np.isin(theirs, changed)]
        self._unnamed = set(each_id(unnamed))
        self._named = dict[tuple[str, str], ItemFacts]()
        self.unnamed_hashes = sorted({item_id[:KEY_HASH_BYTES] for item_id in self._unnamed})

    def take(self, key_hashes: frozenset[bytes], items: Sequence[ItemFacts]) -> None:
        """Items that the target has for these key hashes.

        Raises:
            RemoteProtocolError: an item is of another hash.
        """
        for facts in items:
            item_id = self._hasher.id(facts.item)
            if item_id[:KEY_HASH_BYTES] not in key_hashes:
                raise RemoteProtocolError(f"{facts.item.key!r} was not asked for")
            # A twin that is equal at both sides has none of the IDs.
            if item_id in self._unnamed:
                self._unnamed.remove(item_id)
                self._named[facts.item.key, facts.item.version] = facts

    def result(self) -> NamingResult:
        """All differences by key and version, once all names are taken. IDs that the
        target did not name have changed there since the cut.
        """
        for item_id in self._twins:
            row = self._rows.get(item_id)
            other = self._named.pop((row.item.key, row.item.version), None) if row else None
            if other is None:
                self._add_ours(ItemDifferenceKind.MISSING, item_id)
            else:
                self._add_ours(ItemDifferenceKind.CHANGED, item_id, self._hasher.id(other.item))
        for (key, version), facts in self._named.items():
            theirs_id = self._hasher.id(facts.item)
            self._add(
                ItemDifference(
                    ItemDifferenceKind.EXTRA, key, version, theirs=facts, theirs_id=theirs_id
                )
            )
        in_flight = self._in_flight + len(self._unnamed)
        return NamingResult(_ordered(self._differences), in_flight, _ordered(self._unknown))

    def _add_ours(
        self, kind: ItemDifferenceKind, item_id: ItemId, theirs_id: ItemId | None = None
    ) -> None:
        row = self._rows.get(item_id)
        if row is not None:
            item = row.item
            self._add(ItemDifference(kind, item.key, item.version, row, theirs_id=theirs_id))
            return
        undone = self._undone_by_id.get(item_id)
        if undone is None:
            raise NotCertifiedError(
                "the symbols of this index have an ID without an item",
                hint="check the index against its bucket, or rebuild it",
                id=item_id.hex(),
            )
        self._add(ItemDifference(kind, undone.key, undone.version, theirs_id=theirs_id))

    def _add(self, difference: ItemDifference) -> None:
        undone = self._undone.get((difference.key, difference.version))
        if undone is None:
            self._differences.append(difference)
        elif self._is_unknown(undone):
            self._unknown.append(difference)
        else:
            self._in_flight += 1

    def _is_unknown(self, undone: UndoneChange) -> bool:
        listed = self._cut.listed_through
        return listed is not None and undone.first <= listed


def _single(hashes: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """Those that occur once."""
    values, counts = np.unique(hashes, return_counts=True)
    single: NDArray[np.uint64] = values[counts == 1]
    return single


def _ordered(differences: list[ItemDifference]) -> tuple[ItemDifference, ...]:
    return tuple(sorted(differences, key=lambda one: (one.key, one.version)))
