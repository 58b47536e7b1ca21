"""Comparisons at random against brute force: at rest, moving, of ranges."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from proof.comparison import BucketComparison
from proof.index import KeyRange
from proof.item import Item
from proof.naming import ItemDifference, ItemDifferenceKind
from proof.root import SetRoot
from replicator.part_proofs import compare_parts
from tests.support.bucket_pairs import (
    NAMES,
    MovingPair,
    differing,
    names_of,
    pair_at_rest,
    random_item,
    random_items,
    steps,
)
from tests.support.memory_index import PROFILE, Link, MemoryIndex, compare

SEEDS_AT_REST = 4_000
SEEDS_MOVING = 1_500
SEEDS_RANGES = 300
# Seeds are run in groups, so that workers can share them.
GROUPS = 10


def agrees(
    outcome: BucketComparison, source: MemoryIndex, target: MemoryIndex, seed: object
) -> None:
    truth = differing(source.items, target.items)
    assert names_of(outcome.differences) == truth, seed
    assert outcome.is_equal == (not truth), seed
    assert (outcome.in_flight, outcome.unknown) == (0, ()), seed


@pytest.mark.parametrize("group", range(GROUPS))
def test_at_rest_exactly_what_differs_is_found(group: int) -> None:
    for seed in range(group, SEEDS_AT_REST, GROUPS):
        rng = random.Random(seed)
        size = int(2 ** rng.uniform(0, 7)) - 1
        source, target = pair_at_rest(rng, size, rng.choice((0, 1, 2, 10, size)))
        agrees(compare(source, target), source, target, seed)


@pytest.mark.parametrize("seed", range(12))
def test_larger_buckets_are_compared_as_well(seed: int) -> None:
    rng = random.Random(seed)
    source, target = pair_at_rest(rng, 10_000, (0, 3, 40, 300, 2_000, 20_000)[seed % 6])
    agrees(compare(source, target), source, target, seed)


@pytest.mark.parametrize("seed", range(4))
def test_sets_that_share_nothing_are_told_apart(seed: int) -> None:
    rng = random.Random(seed)
    sides = [MemoryIndex(random_items(rng, n, 10**5).values()) for n in (0, 700)]
    source, target = sides if seed % 2 else sides[::-1]
    agrees(compare(source, target), source, target, seed)


def test_a_target_that_has_nothing_is_told_no_ids() -> None:
    source = MemoryIndex(random_items(random.Random(1), 5_000, 10**5).values())
    target = MemoryIndex()
    link = Link(target)
    agrees(compare(source, target, link=link), source, target, "nothing")
    assert (link.trips, link.total_bytes < 1_000) == (1, True)


@pytest.mark.parametrize("group", range(GROUPS))
def test_of_a_range_what_differs_in_it_is_found(group: int) -> None:
    for seed in range(group, SEEDS_RANGES, GROUPS):
        rng = random.Random(seed)
        source, target = pair_at_rest(rng, 200, rng.choice((0, 3, 30)))
        start, end = sorted(rng.choice(NAMES) + f"{rng.randrange(400):05}" for _ in range(2))
        inside = KeyRange(start, end if rng.random() < 0.8 else None)
        outcome = compare(source, target, key_range=inside)
        truth = {
            name: kind
            for name, kind in differing(source.items, target.items).items()
            if name[0] in inside
        }
        assert names_of(outcome.differences) == truth, seed
        assert outcome.is_equal == (not truth), seed


@pytest.mark.parametrize("group", range(GROUPS))
def test_extras_that_are_known_are_found_again(group: int) -> None:
    """Whatever an earlier comparison found, and whatever moved since: the same is found
    as without knowing it, with the extras that are still there, and by keys alone.
    """
    for seed in range(group, SEEDS_AT_REST // 8, GROUPS):
        rng = random.Random(seed)
        size = int(2 ** rng.uniform(0, 7)) - 1
        source, target = pair_at_rest(rng, size, rng.choice((0, 2, 10, size)))
        first = compare(source, target, only_keys=True)
        agrees(first, source, target, seed)
        for _ in range(rng.choice((0, 0, 1, 3, 20))):
            side, item = rng.choice((source, target)), random_item(rng, 2 * size + 1)
            one = rng.choice(first.differences) if first.differences else None
            match rng.randrange(4):
                case 0 if one and one.kind is ItemDifferenceKind.EXTRA:
                    target.delete(one.key, one.version)
                case 1 if one:
                    side.put(replace(item, key=one.key, version=one.version))
                case 2:
                    side.delete(item.key, item.version)
                case _:
                    side.put(item)
        if rng.random() < 0.2 and first.differences:
            # What the target has goes to the source as it is.
            name = rng.choice(first.differences)
            if (name.key, name.version) in target.items:
                source.put(target.items[name.key, name.version])
        keys = rng.random() < 0.5
        inside = KeyRange(rng.choice(NAMES)) if rng.random() < 0.2 else KeyRange()
        plain = compare(source, target, key_range=inside)
        again = compare(source, target, known=first.differences, only_keys=keys, key_range=inside)
        assert names_of(again.differences) == names_of(plain.differences), seed
        assert [one.theirs_id for one in again.differences] == [
            one.theirs_id for one in plain.differences
        ], seed
        assert (again.ours, again.theirs, again.in_flight) == (plain.ours, plain.theirs, 0), seed


@pytest.mark.parametrize("extras", [3, 40, 3_000])
def test_extras_that_are_still_there_cost_nothing(extras: int) -> None:
    rng = random.Random(extras)
    items = random_items(rng, 2_000, 10**6)
    source = MemoryIndex(items.values())
    found = {**items, **{("x", str(n)): Item("x", n, version=str(n)) for n in range(extras)}}
    target = MemoryIndex(found.values())
    first = compare(source, target, only_keys=True)
    assert len(first.differences) == extras
    link = Link(target)
    again = compare(source, target, known=first.differences, link=link)
    assert again.differences == first.differences
    assert (link.trips, link.total_bytes < 256) == (1, True)
    assert not again.is_equal


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("knows_extras", [False, True])
def test_while_both_sides_move_nothing_is_found_wrongly(group: int, knows_extras: bool) -> None:
    """What is certain differs at the cut, what differs is certain or in flight, and
    only items that changed after the cut are in flight.
    """
    for seed in range(group, SEEDS_MOVING, GROUPS):
        rng = random.Random(seed)
        pair = MovingPair(rng, universe=rng.choice((4, 30, 120)))
        is_faithful = rng.random() < 0.5

        def move(pair: MovingPair, rng: random.Random, is_faithful: bool, most: int) -> None:
            for _ in range(rng.randrange(most)):
                pair.change_source()
            for _ in range(rng.randrange(most)):
                pair.apply(faithfully=is_faithful or rng.random() < 0.9)
            if not is_faithful and rng.random() < 0.5:
                pair.write_foreign()

        known: Sequence[ItemDifference] = ()
        if knows_extras:
            move(pair, rng, is_faithful, 20)
            pair.write_foreign()
            known = compare(pair.source, pair.target, only_keys=rng.random() < 0.5).differences
        move(pair, rng, is_faithful, 40)
        acknowledged = pair.target.applied
        if rng.random() < 0.3:
            move(pair, rng, is_faithful, 5)
        ours, theirs = pair.source_at_cut(), pair.target.items
        first_cut = (pair.source.position, pair.target.position)
        outcome = None
        for number, result in enumerate(
            steps(pair.source, pair.target, applied=acknowledged, known=known)
        ):
            outcome = result
            if number:
                move(pair, rng, is_faithful, 4)
        assert outcome is not None
        truth = differing(ours, theirs)
        found = names_of(outcome.differences)
        assert found.items() <= truth.items(), seed
        assert outcome.is_equal == (not truth), seed
        assert len(found) + outcome.in_flight == len(truth), seed
        assert outcome.unknown == ()
        moved = {
            (change.key, change.version)
            for index, after in zip(
                (pair.source, pair.target), (outcome.cut.through, first_cut[1]), strict=True
            )
            for change in index.changes(after=after, through=index.position)
        }
        assert truth.keys() - found.keys() <= moved, seed
        if is_faithful and not knows_extras:
            assert outcome.is_equal, seed


def test_a_rewound_root_is_that_of_a_replay() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        pair = MovingPair(rng, universe=40)
        for _ in range(60):
            rng.choice((pair.change_source, pair.apply))()
        outcome = next(one for one in steps(pair.source, pair.target) if one)
        expected = MemoryIndex(pair.source_at_cut().values())
        assert outcome.ours == SetRoot.of(expected.ids(KeyRange())), seed
        assert outcome.is_equal


@pytest.mark.parametrize("size", [1000, 20_000])
def test_bytes_and_trips_stay_within_their_bars(size: int) -> None:
    rng = random.Random(size)
    for changes in (0, 1, 5, 10, 100, 1000):
        source, target = pair_at_rest(rng, size, changes)
        link = Link(target)
        found = compare(source, target, link=link).differences
        names = sum(len(one.key.encode()) for one in found if one.theirs)
        assert link.total_bytes <= (1000 + 80 * len(found) + names if found else 256)
        assert link.trips <= (5 if found else 1)


@pytest.mark.parametrize("group", range(GROUPS))
def test_parts_with_known_extras_find_what_one_comparison_finds(group: int) -> None:
    """Whatever moved since the extras became known, and however small the parts are."""
    for seed in range(group, SEEDS_AT_REST // 40, GROUPS):
        rng = random.Random(seed)
        source, target = pair_at_rest(rng, 120, rng.choice((3, 30, 120)))
        for index in (source, target):
            for key, version in [name for name in index.items if name[1]]:
                index.delete(key, version)
        known = [
            one
            for one in compare(source, target, only_keys=True).differences
            if one.kind is ItemDifferenceKind.EXTRA
        ]
        for _ in range(rng.choice((0, 0, 5, 40))):
            side, item = rng.choice((source, target)), replace(random_item(rng, 241), version="")
            if rng.random() < 0.5:
                side.put(item)
            else:
                side.delete(item.key)
        link = Link(target)
        parts = list(
            compare_parts(
                source,
                PROFILE,
                lambda asked, link=link: link.carry(list(asked)),
                KeyRange(),
                differences_max=rng.choice((4, 16, 1_000)),
                known=iter(known),
                only_keys=rng.random() < 0.5,
            )
        )
        found = [one for part in parts for one in part.differences]
        assert [one.key for one in found] == sorted(one.key for one in found), seed
        assert names_of(tuple(found)) == differing(source.items, target.items), seed
        assert (parts[0].ours, parts[0].theirs) == tuple(
            SetRoot.of(index.ids(KeyRange())) for index in (source, target)
        ), seed


def test_known_extras_of_many_parts_cost_a_question_each() -> None:
    items = random_items(random.Random(1), 2_000, 10**6)
    extras = {(f"x{n:05}", ""): Item(f"x{n:05}", n) for n in range(3_000)}
    source, target = MemoryIndex(items.values()), MemoryIndex([*items.values(), *extras.values()])
    known = compare(source, target, only_keys=True).differences
    link = Link(target)
    parts = list(
        compare_parts(
            source,
            PROFILE,
            lambda asked: link.carry(list(asked)),
            KeyRange(),
            differences_max=1_000,
            known=iter(known),
        )
    )
    assert [one for part in parts for one in part.differences] == list(known)
    # One finds that more differs than one comparison takes; the others are as expected.
    assert len(parts) == 4
    assert link.total_bytes < 1_000 + 3 * 256


@pytest.mark.parametrize("shape", ["one place", "a lost prefix", "an extra prefix", "all changed"])
def test_wherever_the_differences_are_bytes_and_trips_stay_within_their_bars(shape: str) -> None:
    """Also where the differences are more than the symbols that are kept decode."""
    keys = [f"{'ab'[n % 2]}/{n:06}" for n in range(60_000)]
    ours = {key: Item(key, 1) for key in sorted(keys)}
    theirs, first = dict(ours), sorted(keys)[20_000:]
    match shape:
        case "one place":
            theirs |= {key: Item(key, 2) for key in first[:500]}
        case "a lost prefix":
            theirs = {key: item for key, item in ours.items() if key[0] == "a"}
        case "an extra prefix":
            ours = {key: item for key, item in ours.items() if key[0] == "a"}
        case "all changed":
            theirs = {key: Item(key, 2) for key in keys}
    source, target = MemoryIndex(ours.values()), MemoryIndex(theirs.values())
    link = Link(target)
    found = compare(source, target, link=link).differences
    assert len(found) == sum(ours.get(key) != theirs.get(key) for key in keys)
    names = sum(len(one.key.encode()) for one in found if one.theirs)
    assert link.total_bytes <= 1_000 + 80 * len(found) + names
    assert link.total_bytes <= 32_000 or shape != "a lost prefix"
    assert link.trips <= 5
