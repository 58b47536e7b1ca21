"""Naming of many differences at once: columns, and no object for an item until it is
read.

What is plain goes through arrays: one ID of a key hash at a side, one item of it in the
index, and no change of it since the cut. All else (twins, items in flight) is left to
`proof.naming`, item by item.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar, overload

import numpy as np

from proof.columns import NameColumns
from proof.cuts import RewoundSnapshot
from proof.index import AppliedPositions, IndexedItem, ItemFacts
from proof.index_state import damaged
from proof.item import KEY_HASH_BYTES
from proof.item_columns import ColumnHasher, ItemColumns
from proof.naming import ItemDifference, ItemDifferenceKind, Naming, NamingResult
from proof.symbols import (
    IdDifference,
    Ids,
    each_id,
    key_hashes,
    key_hashes_from_bytes,
)
from runtime.errors import RemoteProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Value = TypeVar("_Value", bound=np.generic)
# In the order in which plain differences are kept.
_KINDS = np.array(
    [ItemDifferenceKind.CHANGED, ItemDifferenceKind.MISSING, ItemDifferenceKind.EXTRA], object
)
# Reads the source's items of some key hashes, as they are now.
ItemReader = Callable[["NDArray[np.uint64]"], Sequence[IndexedItem]]


class _ColumnDifferences(Sequence[ItemDifference]):
    """Differences by key and version. `names` needs what is at hand; the first other
    reading reads the source's items from its index, all at once, and raises what that
    raises. An item that has changed there since the cut is None.
    """

    def __init__(
        self,
        changed: int,
        names: NameColumns,
        ours: Ids,
        theirs: Ids,
        extras: ItemColumns,
        rest: Sequence[ItemDifference],
        read: ItemReader,
    ) -> None:
        """Internal: made by ColumnNaming. All changed items come first, so many, then
        missing ones, then `extras`; `ours` has IDs of the first two, `theirs` of the
        first and the last.
        """
        counts = (changed, len(names) - changed - len(extras), len(extras))
        self._kinds = np.repeat(_KINDS, counts)
        self._names = names
        if rest:
            keys, versions = (
                [one.key.encode() for one in rest],
                [one.version.encode() for one in rest],
            )
            self._names = names.joined(NameColumns.of(keys, versions))
            self._kinds = np.array([*self._kinds, *(one.kind for one in rest)], object)
        self._ours, self._theirs, self._extras = ours, theirs, extras
        self._rest, self._read = rest, read
        self._order = self._names.order()
        self._made: tuple[ItemDifference, ...] | None = None

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, at: int) -> ItemDifference: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[ItemDifference]: ...
    def __getitem__(self, at: int | slice) -> ItemDifference | Sequence[ItemDifference]:
        return self._items()[at]

    def __iter__(self) -> Iterator[ItemDifference]:
        return iter(self._items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._items() == tuple(other)

    def names(self) -> Iterator[tuple[ItemDifferenceKind, str, str]]:
        """Kind, key and version of each."""
        keys, versions = self._names.taken(self._order).texts()
        return zip(self._kinds[self._order].tolist(), keys, versions, strict=True)

    def _items(self) -> tuple[ItemDifference, ...]:
        if self._made is None:
            made = [*self._plain(), *self._rest]
            self._made = tuple([made[at] for at in self._order.tolist()])
        return self._made

    def _plain(self) -> Iterator[ItemDifference]:
        rows = {row.id: row for row in self._read(key_hashes(self._ours))}
        ours, theirs = each_id(self._ours), each_id(self._theirs)
        changed = len(theirs) - len(self._extras)
        extras, names = iter(self._extras), zip(*self._names.texts(), strict=True)
        for at, (kind, name) in enumerate(zip(self._kinds.tolist(), names, strict=True)):
            if at == len(ours) + len(self._extras):
                break
            row = rows.get(ours[at]) if at < len(ours) else None
            match kind:
                case ItemDifferenceKind.CHANGED:
                    yield ItemDifference(kind, *name, row, theirs_id=theirs[at])
                case ItemDifferenceKind.MISSING:
                    yield ItemDifference(kind, *name, row)
                case ItemDifferenceKind.EXTRA:
                    theirs_id = theirs[changed + at - len(ours)]
                    yield ItemDifference(kind, *name, None, next(extras), theirs_id)


def difference_names(
    differences: Sequence[ItemDifference],
) -> Iterator[tuple[ItemDifferenceKind, str, str]]:
    """Kind, key and version of each, without reading items."""
    if isinstance(differences, _ColumnDifferences):
        return differences.names()
    return ((one.kind, one.key, one.version) for one in differences)


class ColumnNaming:
    """Names the IDs of one comparison, as `proof.naming.Naming` does."""

    def __init__(
        self,
        hasher: ColumnHasher,
        cut: AppliedPositions,
        found: IdDifference,
        view: RewoundSnapshot,
        read: ItemReader,
    ) -> None:
        """`read` reads our items later.

        Raises:
            NotCertifiedError: our index has no item of one of our IDs.
            IndexDamagedError: it has another one.
        """
        self._hasher, self._read = hasher, read
        ours, our_hashes = _by_hash(found.ours)
        theirs, their_hashes = _by_hash(found.theirs)
        names, name_places, name_hashes = self._found(view, our_hashes)
        moved = np.unique(np.array(_undone_hashes(view), np.uint64))
        in_theirs, at_theirs = _places(our_hashes, their_hashes)
        in_names, at_names = _places(our_hashes, name_hashes)
        is_plain = (
            _single(our_hashes)
            & in_names
            & _read(_single(name_hashes), at_names)
            & (~in_theirs | _read(_single(their_hashes), at_theirs))
            & ~_places(our_hashes, moved)[0]
        )
        is_extra = (
            _single(their_hashes)
            & ~_places(their_hashes, our_hashes)[0]
            & ~_places(their_hashes, moved)[0]
        )
        is_changed, is_missing = is_plain & in_theirs, is_plain & ~in_theirs
        order = np.concatenate((at_names[is_changed], at_names[is_missing]))
        self._names = names.taken(_read(name_places, order))
        self._changed = int(is_changed.sum())
        self._ours = np.concatenate((ours[is_changed], ours[is_missing]))
        self._changed_theirs = theirs[at_theirs[is_changed]]
        self._extras, self._extra_hashes = theirs[is_extra], their_hashes[is_extra]
        self._answers = list[tuple[ItemColumns, Ids]]()
        is_answered = np.zeros(len(their_hashes), np.bool_)
        is_answered[at_theirs[is_changed]] = True
        rest = IdDifference(ours[~is_plain], theirs[~is_extra & ~is_answered])
        is_left = bool(len(rest.ours) or len(rest.theirs))
        self._rest = Naming(hasher.items, cut, rest, view) if is_left else None
        unnamed = _hash_bytes(self._extra_hashes)
        if self._rest:
            unnamed = sorted([*unnamed, *self._rest.unnamed_hashes])
        self.unnamed_hashes = unnamed

    def take(self, key_hashes_asked: Sequence[bytes], items: Sequence[ItemFacts]) -> None:
        """Items that the target has for these key hashes.

        Raises:
            RemoteProtocolError: an item is of another hash.
        """
        columns = ItemColumns.of(items)
        ids = self._hasher.ids(columns)
        hashes = key_hashes(ids)
        asked = key_hashes_from_bytes(b"".join(key_hashes_asked))
        is_asked = _places(hashes, np.sort(asked))[0]
        if not is_asked.all():
            key = columns[int(np.argmin(is_asked))].item.key
            raise RemoteProtocolError(f"{key!r} was not asked for")
        is_known, places = _places(hashes, self._extra_hashes)
        wanted = _read(self._extras, places)
        is_one = np.flatnonzero(is_known & (wanted == ids).all(axis=1))
        # Each counts once, whatever a target repeats, and is not wanted again.
        is_one = np.sort(is_one[np.unique(places[is_one], return_index=True)[1]])
        if len(is_one):
            self._extras[places[is_one]] = 0
            named = columns if len(is_one) == len(columns) else columns.taken(is_one)
            self._answers.append((named, ids[is_one]))
        if self._rest:
            others = [items[at] for at in np.flatnonzero(~is_known).tolist()]
            self._rest.take(frozenset(key_hashes_asked), others)

    def result(self) -> NamingResult:
        """All differences by key and version, once all names are taken. IDs that the
        target did not name have changed there since the cut.
        """
        rest = self._rest.result() if self._rest else NamingResult((), 0, ())
        extras = _joined([columns for columns, _ in self._answers])
        found = [ids for _, ids in self._answers]
        differences = _ColumnDifferences(
            self._changed,
            self._names.joined(extras.names),
            self._ours,
            np.concatenate((self._changed_theirs, *found)),
            extras,
            rest.differences,
            self._read,
        )
        unnamed = len(self._extras) - len(extras)
        return NamingResult(differences, rest.in_flight + unnamed, rest.unknown)

    def _found(
        self, view: RewoundSnapshot, hashes: "NDArray[np.uint64]"
    ) -> tuple[NameColumns, "NDArray[np.intp]", "NDArray[np.uint64]"]:
        """The names of these hashes that our index has; their places by hash, and the
        hashes. The index's order by hash has no checksum, but a name that
        was found there has the hash itself.
        """
        names = view.names(hashes)
        found = self._hasher.key_hashes(names)
        if not _places(found, hashes)[0].all():
            raise damaged("its order by hash has another key than its rows")
        order = np.argsort(found)
        return names, order, found[order]


def _by_hash(ids: Ids) -> tuple[Ids, "NDArray[np.uint64]"]:
    hashes = key_hashes(ids)
    order = np.argsort(hashes)
    return ids[order], hashes[order]


def _single(hashes: "NDArray[np.uint64]") -> "NDArray[np.bool_]":
    """Which of these, ascending, occur once."""
    differs = np.ones(len(hashes) + 1, np.bool_)
    differs[1:-1] = hashes[1:] != hashes[:-1]
    return differs[1:] & differs[:-1]


def _places(
    hashes: "NDArray[np.uint64]", among: "NDArray[np.uint64]"
) -> tuple["NDArray[np.bool_]", "NDArray[np.intp]"]:
    """Which hashes are among some, ascending, and where the first of each is; elsewhere
    the place says nothing, but is one of `among`.
    """
    if not len(among):
        return np.zeros(len(hashes), np.bool_), np.zeros(len(hashes), np.intp)
    places = np.minimum(np.searchsorted(among, hashes), len(among) - 1)
    return among[places] == hashes, places


def _read(values: "NDArray[_Value]", places: "NDArray[np.intp]") -> "NDArray[_Value]":
    """The values at some places; of none, zeros."""
    if not len(values):
        return np.zeros((len(places), *values.shape[1:]), values.dtype)
    return values[places]


def _undone_hashes(view: RewoundSnapshot) -> list[int]:
    """The key hashes of what changed since the cut."""
    ids = [one for undone in view.undone for one in (undone.then, undone.now) if one is not None]
    return [int.from_bytes(one[:KEY_HASH_BYTES], "big") for one in ids]


def _hash_bytes(hashes: "NDArray[np.uint64]") -> list[bytes]:
    data = hashes.astype(">u8").view(np.uint8).reshape(-1, 8)[:, -KEY_HASH_BYTES:].tobytes()
    return [data[at : at + KEY_HASH_BYTES] for at in range(0, len(data), KEY_HASH_BYTES)]


def _joined(parts: Sequence[ItemColumns]) -> ItemColumns:
    if len(parts) == 1:
        return parts[0]
    return ItemColumns.of([facts for part in parts for facts in part])
