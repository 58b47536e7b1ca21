"""Indexes in memory, in SQLite and in RocksDB behave alike."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from proof.errors import IndexRefusal, IndexRefusedError, JournalTrimmedError, RebuildLimitError
from proof.generations import StorageKind, TablesOpener
from proof.index import (
    WHOLE,
    AppliedPositions,
    IndexWriter,
    ItemIndex,
    KeyRange,
    ListingNote,
    Position,
)
from proof.item import Profile
from proof.open_generation import IndexLimits
from proof.root import ROOT_EMPTY
from proof.stored_index import StoredIndex
from runtime.errors import DatabaseError
from tests.support.stored_indexes import (
    KINDS,
    Model,
    assert_is,
    changed,
    hashes_of,
    open_index,
    openers_of,
    rewound,
    stamped,
)

Openers = Mapping[StorageKind, TablesOpener]
NAMES = ["a", "a/b", "a\0b", "a\0", "b" * 300, "é", "日本", "\U0001f600", "z"]


@pytest.fixture(params=KINDS)
def openers(request: pytest.FixtureRequest) -> Openers:
    return openers_of(request.param)


def filled(folder: Path, openers: Openers) -> tuple[StoredIndex, Model]:
    index, model = open_index(folder, openers), Model()
    first = [(key, stamped(key)) for key in NAMES]
    first += [("a", stamped("a", 1, version=version)) for version in ("v1", "v2", "\0")]
    index.apply(first)
    changed(model, first)
    return index, model


def test_an_index_has_both_sides_of_its_port(tmp_path: Path, openers: Openers) -> None:
    index = open_index(tmp_path, openers)
    reading: ItemIndex = index
    writing: IndexWriter = index
    with reading.snapshot() as now:
        assert (now.position, now.applied) == (0, None)
        assert now.roots([WHOLE]) == [ROOT_EMPTY]
    assert writing.row("a") is None
    assert_is(index, {})


def test_items_are_found_in_order_by_key_and_by_hash(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    keys = sorted(NAMES)
    ranges = [
        KeyRange(start, end) for start in keys for end in [*keys, None] if not end or start <= end
    ]
    assert_is(index, model, [*ranges, KeyRange("a", "a")])
    assert index.row("a") == model["a", ""]
    assert index.row("none") is None
    with index.snapshot() as now:
        assert now.find(np.array([1, 2], np.uint64)) == []
        every = hashes_of(list(model.values()))
        names = now.names(np.repeat(every, 2)).texts()
        assert sorted(zip(*names, strict=True)) == sorted(model)
        assert not len(now.names(np.array([1, 2], np.uint64)))
        assert len(now.find(np.repeat(hashes_of([model["a", ""]]), 2))) == 1
    index.close()


def test_pages_of_rows_follow_each_other(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    for prefix in ["", "a", "a\0", "é", "none"]:
        wanted = [model[place] for place in sorted(model) if place[0].startswith(prefix)]
        for limit in (1, 2, 100):
            found, start_after = index.rows(start_after="", limit=limit, prefix=prefix), ""
            page = found
            while page:
                start_after = page[-1].item.key
                page = index.rows(start_after=start_after, limit=limit, prefix=prefix)
                found = found + page
            assert found == wanted
    index.close()


def test_changes_are_journalled_and_rewound(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    first = index.apply([])
    with index.snapshot() as now:
        cut = now.position
        assert cut == len(model)
    changes = [("a", None), ("b", stamped("b", 2)), ("b", stamped("b", 3)), ("z", stamped("z", 4))]
    last = index.apply(changes)
    changed(model, changes)
    assert_is(index, model)
    journal = index.changes(after=cut, through=Position(10**9))
    assert [(one.key, one.version) for one in journal] == [
        ("a", ""), ("a", "\0"), ("a", "v1"), ("a", "v2"), ("b", ""), ("z", ""),
    ]  # fmt: skip
    assert [one.position for one in journal] == list(range(cut + 1, cut + 7))
    assert [one.new is None for one in journal] == [True] * 4 + [False] * 2
    assert journal[4].old is None
    assert index.changes(after=cut, through=cut) == []
    assert rewound(index, cut) == first != last
    index.close()


def test_what_is_unchanged_writes_no_journal(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    with index.snapshot() as now:
        before = now.position
    index.apply([(key, model[key, ""]) for key in NAMES])
    index.apply([("never there", None), ("short", stamped("short")), ("short", None)])
    other = next(
        one for number in range(100)
        if (one := stamped("z", number)).evidence != model["z", ""].evidence
    )  # fmt: skip
    seen = [("z", type(other)(model["z", ""].item, other.evidence, other.stamp))]
    index.apply(seen)
    changed(model, seen)
    with index.snapshot() as now:
        assert now.position == before
    assert_is(index, model)
    index.close()


def test_an_index_is_the_same_after_it_was_opened_again(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    applied = AppliedPositions(Position(5), (Position(7), Position(9)), Position(8))
    index.apply([("a", stamped("a", 9))], applied=applied)
    changed(model, [("a", stamped("a", 9))])
    index.note_listing("a/", began_at_s=77, complete=False)
    index.note_listing("", began_at_s=78, complete=True)
    index.apply([])
    index.close()
    with pytest.raises(DatabaseError, match="closed"):
        index.apply([("a", None)])
    for _ in range(2):
        again = open_index(tmp_path, openers)
        assert_is(again, model)
        with again.snapshot() as now:
            assert (now.applied, now.position) == (applied, len(model) + 1)
        assert again.listing("a/") == ListingNote(77, False)
        assert again.listing("") == ListingNote(78, True)
        assert again.listing("b") is None
        again.close()


def test_a_snapshot_does_not_change(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    with index.snapshot() as before:
        root = before.roots([WHOLE])
        ids = before.ids(WHOLE).tolist()
        index.apply([(key, None) for key in NAMES])
        assert before.roots([KeyRange("", "a\0")]) != [ROOT_EMPTY]
        assert (before.roots([WHOLE]), before.ids(WHOLE).tolist()) == (root, ids)
        assert len(before.find(hashes_of(list(model.values())))) == len(model)
        index.close()
        assert before.ids(WHOLE).tolist() == ids
    assert_is(open_index(tmp_path, openers), {})


def test_a_trimmed_journal_says_so(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    index.trim_journal(through=Position(4))
    index.trim_journal(through=Position(2))
    with pytest.raises(JournalTrimmedError) as caught:
        index.changes(after=Position(3), through=Position(5))
    assert caught.value.facts["trimmed_through"] == 4
    assert len(index.changes(after=Position(4), through=Position(6))) == 2
    index.trim_journal(through=Position(10**9))
    index.close()
    again = open_index(tmp_path, openers)
    with again.snapshot() as now:
        assert again.changes(after=now.position, through=now.position) == []
    assert_is(again, model)
    again.close()


def test_a_journal_keeps_a_bounded_number_of_rows(tmp_path: Path, openers: Openers) -> None:
    limits = IndexLimits(saved_changes=5, journal_rows=20)
    index, model = open_index(tmp_path, openers, limits=limits), Model()
    for number in range(60):
        changes = [("a", stamped("a", number)), (f"b{number}", stamped(f"b{number}"))]
        index.apply(changes)
        changed(model, changes)
    assert len(index.changes(after=Position(100), through=Position(120))) == 20
    with pytest.raises(JournalTrimmedError):
        index.changes(after=Position(90), through=Position(120))
    index.close()
    again = open_index(tmp_path, openers, limits=limits)
    assert_is(again, model)
    again.close()


@pytest.mark.parametrize("items", [10, 9_000])
def test_a_rebuild_takes_over_what_changed_meanwhile(
    tmp_path: Path, openers: Openers, items: int
) -> None:
    index, _ = filled(tmp_path, openers)
    listed = [stamped(f"k{number:06}") for number in range(items)]
    model = {(one.item.key, ""): one for one in listed}
    index.note_listing("", began_at_s=5, complete=True)
    applied = AppliedPositions(Position(3))
    with index.rebuild(items=items) as building:
        half = items // 2
        building.add(listed[half:])
        building.add(listed[half - 2 : half + 2])
        meanwhile = [("k000003", None), ("new", stamped("new")), ("k000004", stamped("k000004", 7))]
        index.apply(meanwhile)
        building.add(listed[:half])
        with index.snapshot() as before:
            last = before.position
            count = before.roots([WHOLE])[0].count
            root = building.finish(applied=applied)
            # The old generation is there until its last snapshot ends.
            assert len(before.ids(WHOLE)) == count
    changed(model, meanwhile)
    assert_is(index, model, [WHOLE, KeyRange("k000002", "k000007"), KeyRange("k000005")])
    with index.snapshot() as now:
        assert (now.position, now.applied) == (last + 1, applied)
        assert now.roots([WHOLE]) == [root]
        if items > 1_000:
            assert len(now.split(WHOLE, 3)) == 2
            bounds = now.split(WHOLE, 100)
            assert len(bounds) == 99
            assert bounds == sorted(set(bounds))
            parts = [KeyRange(*pair) for pair in zip(["", *bounds], [*bounds, None], strict=True)]
            assert max(one.count for one in now.roots(parts)) <= 2 * items / 100
    with pytest.raises(JournalTrimmedError):
        index.changes(after=last, through=last)
    index.apply([("after", stamped("after"))])
    changed(model, [("after", stamped("after"))])
    index.close()
    again = open_index(tmp_path, openers)
    assert_is(again, model)
    assert again.listing("") == ListingNote(5, True)
    again.close()
    assert len([path for path in tmp_path.iterdir() if path.name.startswith("generation-")]) == 1


def test_an_unfinished_rebuild_changes_nothing(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    with suppress(KeyError), index.rebuild(items=1) as building:
        building.add([stamped("x")])
        raise KeyError
    with index.rebuild(items=1) as building:
        building.add([stamped("x")])
    assert not list(tmp_path.glob("building-*"))
    assert_is(index, model)
    index.close()


def test_a_rebuild_takes_over_no_more_keys_than_it_may(tmp_path: Path, openers: Openers) -> None:
    limits = IndexLimits(touched_keys=4)
    index, model = open_index(tmp_path, openers, limits=limits), Model()
    for count in (6, 4):
        changes = [(f"{number}", stamped(f"{number}", count)) for number in range(count)]
        with index.rebuild(items=1) as building:
            for change in changes:
                index.apply([change])
            if count > limits.touched_keys:
                with pytest.raises(RebuildLimitError):
                    building.finish()
            else:
                building.finish()
                model.clear()
        changed(model, changes)
        assert_is(index, model)
    index.close()


def test_an_index_of_another_profile_is_refused(tmp_path: Path, openers: Openers) -> None:
    index, model = filled(tmp_path, openers)
    index.close()
    for other in (Profile(b"t" * 32), Profile(b"s" * 32, None)):
        with pytest.raises(IndexRefusedError) as caught:
            open_index(tmp_path, openers, profile=other)
        assert caught.value.reason == IndexRefusal.OTHER_PROFILE
    again = open_index(tmp_path, openers)
    assert_is(again, model)
    again.close()
