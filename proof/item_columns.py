"""Thousands of items as columns: read from an index, sent, checked and hashed without a
Python object for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast, overload

import numpy as np

from proof.columns import ByteColumn, NameColumns, numbers_of
from proof.index import IndexedItem, ItemEvidence, ItemFacts
from proof.item import ID_BYTES, EvidenceLevel, Item, ItemHasher, ItemId, Profile
from proof.symbols import (
    Ids,
    ids_from_bytes,
    ids_from_hashes,
    ids_from_parts,
    ids_to_bytes,
    kernels_for,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of an item's first byte: the level in the lowest two bits, then these.
LEVEL_MASK, DELETE_MARKER, HAS_CONTENT, WAS_READ = 3, 4, 8, 16
# Of the lengths and numbers of one item, at most.
_NUMBERS_BYTES_MAX = 40
_LEVELS = {int(level): level for level in EvidenceLevel}


@dataclass(frozen=True, slots=True, eq=False)
class ItemColumns(Sequence[ItemFacts]):
    """Items as one side tells the other. Reading one makes it. `sizes` and `read_at`
    (0 where it was not read) are of 64 bits.
    """

    names: NameColumns
    flags: "NDArray[np.uint8]"
    sizes: "NDArray[np.uint64]"
    contents: ByteColumn
    properties: ByteColumn
    read_at: "NDArray[np.uint64]"

    def __post_init__(self) -> None:
        parts = (self.flags, self.sizes, self.contents, self.properties, self.read_at)
        assert all(len(part) == len(self.names) for part in parts)

    def __len__(self) -> int:
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, at: int) -> ItemFacts: ...
    @overload
    def __getitem__(self, at: slice) -> "ItemColumns": ...
    def __getitem__(self, at: int | slice) -> "ItemFacts | ItemColumns":
        if isinstance(at, slice):
            return self.taken(np.arange(len(self))[at])
        places = np.arange(len(self))[at : at + 1 or None]
        if not len(places):
            raise IndexError(at)
        return next(iter(self.taken(places)))

    def __iter__(self) -> Iterator[ItemFacts]:
        rows = zip(
            *self.names.texts(),
            self.flags.tolist(),
            self.sizes.tolist(),
            self.contents.texts(),
            self.properties.texts(),
            self.read_at.tolist(),
            strict=True,
        )
        for key, version, flags, size, content, properties, read_at in rows:
            known = content if flags & HAS_CONTENT else None
            item = Item(key, size, known, properties, version, bool(flags & DELETE_MARKER))
            read_at_s = read_at if flags & WAS_READ else None
            yield ItemFacts(item, ItemEvidence(_LEVELS[flags & LEVEL_MASK], read_at_s))

    @classmethod
    def of(cls, facts: Sequence[ItemFacts]) -> "ItemColumns":
        """The columns of these."""
        if isinstance(facts, ItemColumns):
            return facts
        items = [one.item for one in facts]
        read = [one.evidence.read_at_s for one in facts]
        flags = bytes(
            one.evidence.level
            | one.item.is_delete_marker * DELETE_MARKER
            | (one.item.content is not None) * HAS_CONTENT
            | (one.evidence.read_at_s is not None) * WAS_READ
            for one in facts
        )
        return cls(
            NameColumns.of([i.key.encode() for i in items], [i.version.encode() for i in items]),
            np.frombuffer(flags, np.uint8),
            numbers_of((item.size_bytes for item in items), len(items)),
            ByteColumn.of([item.content or b"" for item in items]),
            ByteColumn.of([item.properties for item in items]),
            numbers_of((at or 0 for at in read), len(items)),
        )

    def taken(self, places: "NDArray[np.intp]") -> "ItemColumns":
        """Those at some places, in their order."""
        return ItemColumns(
            self.names.taken(places),
            self.flags[places],
            self.sizes[places],
            self.contents.taken(places),
            self.properties.taken(places),
            self.read_at[places],
        )

    @property
    def bytes_max(self) -> "NDArray[np.int64]":
        """How many bytes of a message each takes at most, without compression."""
        names = self.names.keys.lengths + self.names.versions.lengths
        return names + self.contents.lengths + self.properties.lengths + _NUMBERS_BYTES_MAX


@dataclass(frozen=True, slots=True, eq=False)
class FoundItems(Sequence[IndexedItem]):
    """Items of an index, with their IDs."""

    items: ItemColumns
    ids: Ids

    def __post_init__(self) -> None:
        assert len(self.items) == len(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @classmethod
    def of(cls, found: Sequence[IndexedItem]) -> "FoundItems":
        """The columns of these."""
        if isinstance(found, FoundItems):
            return found
        items = ItemColumns.of([ItemFacts(one.item, one.evidence) for one in found])
        return cls(items, ids_from_bytes(b"".join(one.id for one in found)))

    @overload
    def __getitem__(self, at: int) -> IndexedItem: ...
    @overload
    def __getitem__(self, at: slice) -> "FoundItems": ...
    def __getitem__(self, at: int | slice) -> "IndexedItem | FoundItems":
        if isinstance(at, slice):
            return self.taken(np.arange(len(self))[at])
        facts = self.items[at]
        return IndexedItem(facts.item, ItemId(ids_to_bytes(self.ids[at])), facts.evidence)

    def __iter__(self) -> Iterator[IndexedItem]:
        data = ids_to_bytes(self.ids)
        for number, facts in enumerate(self.items):
            item_id = ItemId(data[number * ID_BYTES : (number + 1) * ID_BYTES])
            yield IndexedItem(facts.item, item_id, facts.evidence)

    def taken(self, places: "NDArray[np.intp]") -> "FoundItems":
        """Those at some places, in their order."""
        return FoundItems(self.items.taken(places), self.ids[places])


class _IdKernels(Protocol):
    """The interface of the module proof.id_kernels, which documents it."""

    def keyed_start(self, secret: bytes, person: bytes) -> "NDArray[np.uint64]":
        """The state of a hash after the block of its key."""

    def hash_names(self, *columns: "NDArray[Any]") -> None:
        """Hash keys and versions."""

    def hash_items(self, *columns: "NDArray[Any]") -> None:
        """Hash whole items."""


class ColumnHasher:
    """Hashes columns as ItemHasher does items. Threads may share one."""

    def __init__(self, profile: Profile) -> None:
        self.items = ItemHasher(profile)
        """For one at a time."""
        self._secret = profile.secret

    def key_hashes(self, names: NameColumns) -> "NDArray[np.uint64]":
        """The 48 bits of each key and version."""
        found = np.empty(len(names), np.uint64)
        kernels = _kernels_for(len(names))
        if kernels is not None:
            kernels.hash_names(kernels.keyed_start(self._secret, b"key"), *_parts(names), found)
        else:
            pairs = zip(names.keys.texts(), names.versions.texts(), strict=True)
            found[:] = [self.items.key_hash(key, version) for key, version in pairs]
        return found

    def ids(self, items: ItemColumns) -> Ids:
        """The IDs of all items; shape (items, 2)."""
        kernels = _kernels_for(len(items))
        if kernels is None:
            return ids_from_hashes(b"".join(self.items.hashes(one.item) for one in items))
        keys, whole = self.key_hashes(items.names), np.empty(len(items), np.uint64)
        kernels.hash_items(
            kernels.keyed_start(self._secret, b"item"),
            *_parts(items.names),
            (items.flags & DELETE_MARKER) > 0,
            items.sizes,
            (items.flags & HAS_CONTENT) > 0,
            items.contents.data,
            items.contents.ends,
            items.properties.data,
            items.properties.ends,
            whole,
        )
        return ids_from_parts(keys, whole)


def _parts(names: NameColumns) -> tuple["NDArray[Any]", ...]:
    return names.keys.data, names.keys.ends, names.versions.data, names.versions.ends


def _kernels_for(items: int) -> _IdKernels | None:
    """The kernels for so many items, under the terms of `proof.symbols.kernels_for`."""
    return _load() if kernels_for(items) is not None else None


@cache
def _load() -> _IdKernels | None:
    try:
        from proof import id_kernels as loaded
    except ImportError:
        return None
    return cast(_IdKernels, loaded)
