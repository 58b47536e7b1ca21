"""Cuts of two buckets that move, spans, and what two cuts show."""

import random
from dataclasses import replace

import numpy as np
import pytest

from proof.comparison import BucketComparison
from proof.cuts import rewound, undone_changes
from proof.errors import (
    CutUnknownError,
    JournalTrimmedError,
    NotCertifiedError,
    ProfileDiffersError,
    SpansInvalidError,
)
from proof.index import WHOLE, AppliedPositions, ItemFacts, KeyRange, Position
from proof.item import KEY_HASH_BYTES, Item, ItemHasher, Profile
from proof.naming import ItemDifferenceKind, Naming
from proof.root import SetRoot
from proof.spans import SPAN_ITEMS, SpanSums, parts_of
from proof.symbols import KEPT_SYMBOLS, IdDifference, peel
from proof.tracking import DifferenceTracker
from runtime.errors import RemoteProtocolError
from tests.support.bucket_pairs import Name, names_of, random_item, random_items, steps
from tests.support.memory_index import PROFILE, Link, MemoryIndex, compare


def applied(through: int, *above: int, listed: int | None = None) -> AppliedPositions:
    positions = tuple(Position(one) for one in above)
    return AppliedPositions(
        Position(through), positions, None if listed is None else Position(listed)
    )


def test_a_rewound_index_is_the_index_as_it_was() -> None:
    """Roots of any ranges, symbols, IDs and items, whatever happened since."""
    for seed in range(60):
        rng = random.Random(seed)
        items = random_items(rng, 60, 100)
        index, then = MemoryIndex(items.values()), MemoryIndex(items.values())
        for side in (index, then):
            side.put(Item("last before", 1))
        for _ in range(rng.randrange(50)):
            item = random_item(rng, 100)
            if rng.random() < 0.6:
                index.put(item)
            else:
                index.delete(item.key, item.version)
        bounds = sorted({random_item(rng, 100).key for _ in range(5)})
        with rewound(index, applied(1)) as view:
            for one in parts_of(WHOLE, bounds):
                assert view.roots([one]) == then.roots([one]), seed
            assert view.roots(parts_of(WHOLE, bounds)) == then.roots(parts_of(WHOLE, bounds))
            symbols = view.symbols(KEPT_SYMBOLS) - then.symbols(KEPT_SYMBOLS)
            assert not symbols.sums.any()
            assert not symbols.counts.any()
            some = KeyRange(*bounds[:2])
            assert sorted(map(tuple, view.ids(some))) == sorted(map(tuple, then.ids(some)))
            hashes = np.unique(then.ids(WHOLE)[:, 0] >> np.uint64(16))
            found = {row.id for row in view.find(hashes)}
            unchanged = index.items.items() & then.items.items()
            changed_back = {one.now for one in view.undone}
            hasher = ItemHasher(PROFILE)
            assert found == {hasher.id(item) for _, item in unchanged} - changed_back


def test_a_cut_that_is_not_reached_or_not_kept_any_more_is_refused() -> None:
    index = MemoryIndex()
    for number in range(10):
        index.put(Item(f"k{number}", 1))
    index.trim(4)
    for cut, error in (
        (applied(11), CutUnknownError),
        (applied(5, 11), CutUnknownError),
        (applied(3), JournalTrimmedError),
    ):
        with pytest.raises(error), rewound(index, cut):
            pytest.fail("it opened")
    with rewound(index, applied(4)) as view:
        assert view.roots([WHOLE])[0].count == 4


def test_a_cut_with_a_change_but_not_the_one_before_it_is_refused() -> None:
    index = MemoryIndex()
    changes = [index.put(Item("k", size)) for size in range(3)]
    assert len(undone_changes(changes[2:], applied(2))) == 1
    assert undone_changes(changes, applied(0, 1, 2))[0].first == 3
    for cut in (applied(0, 3), applied(0, 1, 3)):
        with pytest.raises(RemoteProtocolError, match="without"):
            undone_changes(changes, cut)


def test_equal_while_moving_needs_one_trip() -> None:
    source, target = MemoryIndex(), MemoryIndex()
    target.applied = applied(0)
    for number in range(50):
        source.put(Item(f"k{number}", 1))
    for number in (0, 1, 2, 7, 30):
        target.put(Item(f"k{number}", 1))
    target.applied = applied(3, 8, 31)
    link = Link(target)
    outcome = compare(source, target, applied=target.applied, link=link)
    assert outcome.is_equal
    assert (outcome.cut, outcome.ours.count) == (target.applied, 5)
    assert link.total_bytes <= 256
    # What was acknowledged before is not what the target holds now.
    assert compare(source, target, applied=applied(2)).is_equal
    assert compare(source, target).is_equal


def test_a_target_ahead_of_our_index_is_compared_later() -> None:
    source, target = MemoryIndex([Item("a", 1)]), MemoryIndex()
    target.applied = applied(1)
    with pytest.raises(CutUnknownError) as raised:
        compare(source, target)
    assert raised.value.retryable


def test_a_difference_whose_key_changed_since_is_in_flight() -> None:
    source, target = MemoryIndex([Item("a", 1), Item("b", 1)]), MemoryIndex()
    running = steps(source, target)
    assert next(running) is None
    source.put(Item("a", 2))
    outcome = next(one for one in running if one)
    assert names_of(outcome.differences) == {("b", ""): ItemDifferenceKind.MISSING}
    assert outcome.in_flight == 1


def test_changes_while_the_target_was_listed_are_unknown() -> None:
    """Position 1 came before the listing, 2 within, 3 after it."""
    source = MemoryIndex()
    for key in ("before", "within", "after"):
        source.put(Item(key, 1))
    target = MemoryIndex([Item("within", 1), Item("foreign", 1)])
    target.applied = applied(1, listed=2)
    outcome = compare(source, target)
    assert names_of(outcome.differences) == {
        ("before", ""): ItemDifferenceKind.MISSING,
        ("foreign", ""): ItemDifferenceKind.EXTRA,
    }
    assert names_of(outcome.unknown) == {("within", ""): ItemDifferenceKind.EXTRA}
    assert outcome.in_flight == 0


def test_another_profile_is_refused_before_anything_is_compared() -> None:
    index = MemoryIndex([Item("a", 1)])
    link = Link(index, Profile(bytes(32)))
    with pytest.raises(ProfileDiffersError):
        compare(index, index, link=link)


def test_an_index_whose_symbols_have_an_id_without_an_item_says_so() -> None:
    source = MemoryIndex([Item("a", 1), Item("b", 1)])
    with rewound(source, applied(0)) as view:
        found = IdDifference(view.ids(WHOLE), view.ids(WHOLE)[:0])
        source.lose_row("a")
        with pytest.raises(NotCertifiedError, match="without an item"):
            Naming(ItemHasher(PROFILE), applied(0), found, view)


class TwinHasher(ItemHasher):
    """Gives all keys one key hash."""

    def hashes(self, item: Item) -> bytes:
        return bytes(KEY_HASH_BYTES) + super().hashes(item)[KEY_HASH_BYTES:]


def named_twins(
    hasher: TwinHasher, source: MemoryIndex, target: MemoryIndex
) -> dict[Name, ItemDifferenceKind]:
    found = peel(source.symbols(40) - target.symbols(40))
    assert found is not None
    with rewound(source, applied(0)) as view:
        naming = Naming(hasher, applied(0), found, view)
    assert naming.unnamed_hashes == [bytes(KEY_HASH_BYTES)]
    rows = target.find(np.zeros(1, np.uint64))
    naming.take(
        frozenset(naming.unnamed_hashes), [ItemFacts(row.item, row.evidence) for row in rows]
    )
    return names_of(naming.result().differences)


def test_twins_of_one_key_hash_are_named_by_both_sides() -> None:
    hasher = TwinHasher(PROFILE)
    same, ours = Item("same", 1), [Item("changed", 1), Item("missing", 1)]
    theirs = [Item("changed", 2), Item("extra", 1)]
    source, target = MemoryIndex([same, *ours], hasher), MemoryIndex([same, *theirs], hasher)
    assert named_twins(hasher, source, target) == {
        ("changed", ""): ItemDifferenceKind.CHANGED,
        ("missing", ""): ItemDifferenceKind.MISSING,
        ("extra", ""): ItemDifferenceKind.EXTRA,
    }


def test_an_equal_twin_keeps_two_others_from_being_one_changed_item() -> None:
    hasher, same = TwinHasher(PROFILE), Item("same", 1)
    source = MemoryIndex([same, Item("missing", 1)], hasher)
    target = MemoryIndex([same, Item("extra", 1)], hasher)
    assert named_twins(hasher, source, target) == {
        ("missing", ""): ItemDifferenceKind.MISSING,
        ("extra", ""): ItemDifferenceKind.EXTRA,
    }


def two_comparisons() -> tuple[BucketComparison, BucketComparison]:
    source, target = MemoryIndex([Item("a", 1), Item("b", 1)]), MemoryIndex([Item("x", 1)])
    return compare(source, target, job=b"the 1st."), compare(source, target, job=b"the 2nd.")


def test_a_difference_is_repaired_once_two_cuts_show_it() -> None:
    first, second = two_comparisons()
    tracker = DifferenceTracker()
    assert tracker.observe(first) == ()
    # The same job again is no second look.
    assert tracker.observe(first) == ()
    assert tracker.observe(second) == second.differences
    healed = replace(second, job=b"the 3rd.", differences=second.differences[:1])
    assert tracker.observe(healed) == second.differences[:1]
    assert tracker.observe(replace(first, job=b"the 4th.")) == second.differences[:1]


def test_a_difference_that_is_another_each_time_is_not_repaired() -> None:
    first, _ = two_comparisons()
    source, target = MemoryIndex([Item("a", 2), Item("b", 1)]), MemoryIndex([Item("x", 3)])
    tracker = DifferenceTracker()
    tracker.observe(first)
    again = tracker.observe(compare(source, target, job=b"the 2nd."))
    assert names_of(again) == {("b", ""): ItemDifferenceKind.MISSING}


def root_by_spans(spans: SpanSums, index: MemoryIndex, key_range: KeyRange) -> SetRoot:
    inside, parts = spans.cover(key_range)
    assert len(parts) <= 2
    return sum((SetRoot.of(index.ids(part)) for part in parts), inside)


def test_spans_sum_up_any_range() -> None:
    rng = random.Random(4)
    items = random_items(rng, 200, 400)
    index, spans = MemoryIndex(items.values()), SpanSums()
    for name, item in items.items():
        spans.change(name[0], None, ItemHasher(PROFILE).id(item))
    assert spans.root == index.roots([WHOLE])[0]
    split_into_small = SpanSums.from_bytes(spans.to_bytes())
    assert split_into_small.rebalance(split=index.split, read_ids=index.ids, items=10) > 10
    for kept in (spans, split_into_small):
        for _ in range(300):
            item = random_item(rng, 400)
            change = index.put(item) if rng.random() < 0.5 else index.delete(item.key)
            for side in (spans, split_into_small):
                side.change(change.key, change.old, change.new)
            start, end = sorted(random_item(rng, 400).key for _ in range(2))
            for one in (KeyRange(start, end), KeyRange(start), KeyRange("", end), WHOLE):
                assert root_by_spans(kept, index, one) == index.roots([one])[0]
        again = SpanSums.from_bytes(kept.to_bytes())
        assert again.to_bytes() == kept.to_bytes()


def test_large_spans_are_split_and_small_ones_joined() -> None:
    items = [Item(f"{number:06}", number) for number in range(5 * SPAN_ITEMS)]
    index, spans = MemoryIndex(items), SpanSums()
    hasher = ItemHasher(PROFILE)
    for item in items:
        spans.change(item.key, None, hasher.id(item))
    assert spans.rebalance(split=index.split, read_ids=index.ids) == 5
    _, parts = spans.cover(KeyRange("000100", "020000"))
    assert all(index.roots([part])[0].count <= SPAN_ITEMS for part in parts)
    for item in items[100:]:
        change = index.delete(item.key)
        spans.change(change.key, change.old, change.new)
    assert spans.rebalance(split=index.split, read_ids=index.ids) == 1
    assert spans.root == index.roots([WHOLE])[0]


def test_damaged_span_sums_are_refused() -> None:
    data = SpanSums().to_bytes()
    for raw in (b"", data[:-1], data + b"\0", data * 2, b"\0\0\0\1" + data[4:] + b"\xff"):
        with pytest.raises(SpansInvalidError):
            SpanSums.from_bytes(raw)
