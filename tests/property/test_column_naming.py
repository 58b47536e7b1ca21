"""Differences are named by columns as they are one by one, also where key hashes meet
and while the source moves.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from proof.column_naming import ColumnNaming, difference_names
from proof.columns import NameColumns
from proof.cuts import rewound
from proof.errors import IndexDamagedError
from proof.extra_naming import KeyNaming, with_extras_named
from proof.index import WHOLE, AppliedPositions, ItemFacts, Position
from proof.item import KEY_HASH_BYTES, Item, ItemHasher, Profile
from proof.item_columns import ColumnHasher, ItemColumns
from proof.naming import ItemDifferenceKind, Naming, NamingResult
from proof.symbols import IdDifference, Ids, ids_from_bytes, ids_from_hashes, ids_to_bytes
from runtime.errors import RemoteProtocolError
from tests.support.bucket_pairs import Items, differing, names_of, random_item, random_items
from tests.support.memory_index import PROFILE, MemoryIndex, compare

CUT = AppliedPositions(Position(0))


class MeetingHasher(ItemHasher):
    """Gives keys one of a few hashes."""

    def __init__(self, profile: Profile, hashes: int) -> None:
        super().__init__(profile)
        self._hashes = hashes

    def key_hash(self, key: bytes, version: bytes) -> int:
        return super().key_hash(key, version) % self._hashes

    def hashes(self, item: Item) -> bytes:
        key_hash = self.key_hash(item.key.encode(), item.version.encode())
        return key_hash.to_bytes(KEY_HASH_BYTES, "big") + super().hashes(item)[KEY_HASH_BYTES:]


class MeetingColumns(ColumnHasher):
    """The same of columns."""

    def __init__(self, profile: Profile, hashes: int) -> None:
        super().__init__(profile)
        self.items = MeetingHasher(profile, hashes)

    def key_hashes(self, names: NameColumns) -> "NDArray[np.uint64]":
        pairs = zip(names.keys.texts(), names.versions.texts(), strict=True)
        return np.array([self.items.key_hash(*pair) for pair in pairs], np.uint64)

    def ids(self, items: ItemColumns) -> Ids:
        return ids_from_hashes(b"".join(self.items.hashes(one.item) for one in items))


def apart(source: MemoryIndex, target: MemoryIndex) -> IdDifference:
    """The IDs that only one side has."""
    sides = [_each(side.ids(WHOLE)) for side in (source, target)]
    return IdDifference(
        *(ids_from_bytes(b"".join(sorted(one - other))) for one, other in (sides, sides[::-1]))
    )


def _each(ids: Ids) -> set[bytes]:
    data = ids_to_bytes(ids)
    return {data[at : at + 16] for at in range(0, len(data), 16)}


def answered(naming: ColumnNaming | Naming, target: MemoryIndex) -> NamingResult:
    """The result, once the target has named what it was asked for."""
    asked = naming.unnamed_hashes
    for first in range(0, len(asked), 7):
        some = asked[first : first + 7]
        rows = target.find(np.array([int.from_bytes(one, "big") for one in some], np.uint64))
        facts = [ItemFacts(row.item, row.evidence) for row in rows]
        if isinstance(naming, ColumnNaming):
            # A target that says things twice changes nothing.
            naming.take(some, facts * 2)
            naming.take(some, facts)
        else:
            naming.take(frozenset(some), facts)
    return naming.result()


@pytest.mark.parametrize("hashes", [1, 3, 20, 200, 2**40])
def test_columns_are_named_as_items_are_one_by_one(hashes: int) -> None:
    for seed in range(60):
        rng, hasher = random.Random(seed), MeetingColumns(PROFILE, hashes)
        ours, theirs = random_items(rng, 60, 60), random_items(rng, 60, 60)
        common = random_items(rng, 30, 60)
        source = MemoryIndex((ours | common).values(), hasher.items)
        target = MemoryIndex((theirs | common).values(), hasher.items)
        found = apart(source, target)
        cut = AppliedPositions(Position(0), (), rng.choice((None, Position(3))))
        for _ in range(rng.choice((0, 0, 9))):
            item = random_item(rng, 60)
            source.put(item)
        with rewound(source, cut) as view:
            expected = answered(Naming(hasher.items, cut, found, view), target)
            result = answered(ColumnNaming(hasher, cut, found, view, source.find), target)
        assert result.differences == expected.differences, seed
        assert (result.in_flight, result.unknown) == (expected.in_flight, expected.unknown), seed
        assert list(difference_names(result.differences)) == list(
            difference_names(expected.differences)
        ), seed
        if hashes > 200 and not source.position:
            assert names_of(result.differences) == differing(source.items, target.items), seed


def a_pair() -> tuple[MemoryIndex, MemoryIndex]:
    items: Items = {(f"k{n}", ""): Item(f"k{n}", n) for n in range(40)}
    changed = [replace(item, size_bytes=99) for item in items.values()]
    return MemoryIndex(items.values()), MemoryIndex([*changed[:20], *list(items.values())[21:]])


def test_an_item_that_changed_before_it_is_read_is_left_out() -> None:
    source, target = a_pair()
    found = compare(source, target).differences
    source.put(Item("k3", 1234))
    kept = {one.key: one.ours for one in found}
    assert len(kept) == 21
    assert [key for key, ours in kept.items() if ours is None] == ["k3"]


def test_an_item_that_was_not_asked_for_is_refused() -> None:
    source, target = a_pair()
    with rewound(source, CUT) as view:
        naming = ColumnNaming(ColumnHasher(PROFILE), CUT, apart(target, source), view, source.find)
    with pytest.raises(RemoteProtocolError, match="was not asked for"):
        naming.take(naming.unnamed_hashes, [ItemFacts(*_facts(source, "k39"))])


def _facts(index: MemoryIndex, key: str) -> tuple[Item, object]:
    [row] = [
        row for row in index.find(index.ids(WHOLE)[:, 0] >> np.uint64(16)) if row.item.key == key
    ]
    return row.item, row.evidence


class DamagedOrder(MemoryIndex):
    """Its order by hash leads to other keys."""

    other = b"k0 with a flipped bit"

    def names(self, key_hashes: "NDArray[np.uint64]") -> NameColumns:
        names = super().names(key_hashes)
        return NameColumns.of([self.other for _ in range(len(names))], names.versions.texts())


def test_an_order_by_hash_that_is_damaged_names_nothing() -> None:
    source, target = a_pair()
    damaged = DamagedOrder(source.items.values())
    with pytest.raises(IndexDamagedError, match="another"):
        compare(damaged, target)


@pytest.mark.parametrize("hashes", [1, 20, 200, 2**40])
def test_keys_alone_name_no_extra_wrongly(hashes: int) -> None:
    """What a key hash does not tell is left to naming by facts, and the result is the
    same.
    """
    for seed in range(40):
        rng, hasher = random.Random(seed), MeetingColumns(PROFILE, hashes)
        sides = [random_items(rng, 40, 60) | random_items(rng, 30, 30) for _ in range(2)]
        source, target = (MemoryIndex(side.values(), hasher.items) for side in sides)
        naming = KeyNaming(hasher.items, apart(source, target))
        for key_hash in naming.hashes:
            rows = target.find(np.array([int.from_bytes(key_hash, "big")], np.uint64))
            naming.take([key_hash], [(row.item.key, row.item.version) for row in rows])
        with rewound(source, CUT) as view:
            found = apart(source, target)
            expected = answered(ColumnNaming(hasher, CUT, found, view, source.find), target)
            rest = answered(ColumnNaming(hasher, CUT, naming.left, view, source.find), target)
        result = with_extras_named(rest, naming.extras, view, CUT)
        assert names_of(result.differences) == names_of(expected.differences), seed
        for one in naming.extras:
            item = target.items[one.key, one.version]
            assert one.theirs_id == hasher.items.id(item), seed
        if hashes > 200:
            kinds = names_of(expected.differences).values()
            assert len(naming.extras) == list(kinds).count(ItemDifferenceKind.EXTRA), seed


def test_a_key_that_was_not_asked_for_is_refused() -> None:
    source, target = a_pair()
    naming = KeyNaming(ColumnHasher(PROFILE).items, apart(target, source))
    assert len(naming.hashes) == 1
    with pytest.raises(RemoteProtocolError, match="was not asked for"):
        naming.take(naming.hashes, [("k39", "")])
