"""What an index refuses, and what its self-check finds."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from merkle.errors import ReconcileError
from proof.errors import IndexDamagedError, IndexRefusal, IndexRefusedError
from proof.generations import OPENERS, StorageKind, storage_for
from proof.index import WHOLE, Position
from proof.index_state import DerivedState
from proof.item import ItemId
from proof.open_generation import IndexLimits
from proof.spans import SpanSums
from proof.sqlite_index import SqliteTables
from proof.stored_index import StoredIndex
from proof.tables import ItemRow, TableBatch
from runtime.errors import DatabaseError
from tests.support.stored_indexes import (
    Model,
    assert_is,
    changed,
    hashes_of,
    open_index,
    stamped,
)


@pytest.fixture
def index(tmp_path: Path) -> StoredIndex:
    made = open_index(tmp_path)
    made.apply([(f"k{number}", stamped(f"k{number}")) for number in range(50)])
    return made


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.sqlite")
    return path


def run(folder: Path, statement: str) -> None:
    connection = sqlite3.connect(file_of(folder))
    connection.execute(statement)
    connection.commit()
    connection.close()


def another_database(folder: Path) -> None:
    file_of(folder).unlink()
    connection = sqlite3.connect(folder / "generation-00000001.sqlite")
    connection.execute("CREATE TABLE item (key)")
    connection.commit()
    connection.close()


FOREIGN: dict[str, tuple[Callable[[Path], object], IndexRefusal]] = {
    "empty": (lambda folder: file_of(folder).write_bytes(b""), IndexRefusal.NOT_AN_INDEX),
    "text": (lambda folder: file_of(folder).write_text("x" * 5000), IndexRefusal.NOT_AN_INDEX),
    "another database": (another_database, IndexRefusal.NOT_AN_INDEX),
    "without a format": (
        lambda folder: run(folder, "DELETE FROM value WHERE name = CAST('format' AS BLOB)"),
        IndexRefusal.NOT_AN_INDEX,
    ),
    "newer": (lambda folder: run(folder, "PRAGMA user_version = 2"), IndexRefusal.NEWER_SCHEMA),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_is_no_index_is_refused_and_left_alone(
    tmp_path: Path, index: StoredIndex, name: str
) -> None:
    index.close()
    spoil, reason = FOREIGN[name]
    spoil(tmp_path)
    before = file_of(tmp_path).read_bytes()
    with pytest.raises(IndexRefusedError) as caught:
        open_index(tmp_path)
    assert caught.value.reason == reason
    assert caught.value.hint
    assert file_of(tmp_path).read_bytes() == before


SPOILED = {
    "a lost row": "DELETE FROM item WHERE key = CAST('k7' AS BLOB)",
    "a row of another key": "UPDATE item SET key = CAST('other' AS BLOB)"
    " WHERE key = CAST('k7' AS BLOB)",
    "another row": "UPDATE item SET row = (SELECT row FROM item WHERE key = CAST('k8' AS BLOB))"
    " WHERE key = CAST('k7' AS BLOB)",
    "another hash": "UPDATE item SET key_hash = 5 WHERE key = CAST('k7' AS BLOB)",
    "another type": "UPDATE item SET row = 'text' WHERE key = CAST('k7' AS BLOB)",
}


@pytest.mark.parametrize("name", SPOILED)
def test_the_self_check_finds_what_was_changed_from_outside(
    tmp_path: Path, index: StoredIndex, name: str
) -> None:
    index.close()
    run(tmp_path, SPOILED[name])
    again = open_index(tmp_path)
    assert again.self_check().damage
    if name != "a lost row":
        with again.snapshot() as now, pytest.raises(IndexDamagedError):
            now.ids(WHOLE)
    again.close()


@pytest.mark.parametrize("column", ["key", "version", "row"])
def test_a_row_of_another_type_is_not_read_by_its_hash(
    tmp_path: Path, index: StoredIndex, column: str
) -> None:
    index.close()
    run(tmp_path, f"UPDATE item SET {column} = 'text' WHERE key = CAST('k7' AS BLOB)")
    with closing(open_index(tmp_path)) as again, again.snapshot() as now:
        with pytest.raises(IndexDamagedError, match="another type"):
            now.find(hashes_of([stamped("k7")]))
        assert len(now.find(hashes_of([stamped("k8")]))) == 1


def test_a_page_that_is_no_page_is_named_whichever_it_is(tmp_path: Path) -> None:
    """Also one that SQLite meets in the midst of its answer."""
    path = tmp_path / "pages.sqlite"
    hashes = np.arange(2_000, dtype=np.uint64) * np.uint64(1_000)
    with closing(SqliteTables(path, building=True)) as tables:
        rows = [(b"%05d" % one, b"", one.to_bytes(8, "big") + bytes(90)) for one in hashes.tolist()]
        tables.write(TableBatch(puts=[ItemRow(*row) for row in rows], values={"a": b"b"}))
        tables.settle()
    whole = path.read_bytes()
    page_bytes = int.from_bytes(whole[16:18], "big")
    refused = 0
    for start in range(page_bytes, len(whole), page_bytes):
        path.write_bytes(whole[:start] + bytes(page_bytes) + whole[start + page_bytes :])
        for read in ("by_hash", "names_by_hash"):
            try:
                with closing(SqliteTables(path)) as tables, tables.view() as view:
                    getattr(view, read)(hashes)
            except (IndexDamagedError, DatabaseError):
                refused += 1
    assert refused > 20


LOST = {
    "the sums": "DELETE FROM value WHERE name = CAST('state' AS BLOB)",
    "the head": "UPDATE value SET data = zeroblob(100) WHERE name = CAST('head' AS BLOB)",
    "the journal": "DELETE FROM journal WHERE position = 20",
}


@pytest.mark.parametrize("name", LOST)
def test_an_index_that_contradicts_itself_is_not_opened(
    tmp_path: Path, index: StoredIndex, name: str
) -> None:
    if name != "the journal":
        index.close()
    run(tmp_path, LOST[name])
    with pytest.raises(IndexDamagedError) as caught:
        open_index(tmp_path)
    assert "Rebuild" in caught.value.hint


def test_a_damaged_old_row_stops_a_change(tmp_path: Path, index: StoredIndex) -> None:
    index.close()
    run(tmp_path, SPOILED["another row"])
    again = open_index(tmp_path)
    with pytest.raises(IndexDamagedError):
        again.apply([("k7", stamped("k7", 3))])
    again.close()


def test_after_a_failed_write_the_index_is_opened_again(tmp_path: Path, index: StoredIndex) -> None:
    before = Model()
    changed(before, [(f"k{number}", stamped(f"k{number}")) for number in range(50)])
    blocker = sqlite3.connect(file_of(tmp_path))
    blocker.execute(
        "CREATE TRIGGER no BEFORE INSERT ON journal BEGIN SELECT RAISE(FAIL, 'full'); END"
    )
    blocker.commit()
    with pytest.raises(DatabaseError, match="full"):
        index.apply([("new", stamped("new"))])
    blocker.execute("DROP TRIGGER no")
    blocker.commit()
    blocker.close()
    with pytest.raises(DatabaseError, match="a write to it failed"):
        index.apply([("new", stamped("new"))])
    index.close()
    again = open_index(tmp_path)
    assert_is(again, before)
    again.close()


def test_commits_are_synced_and_files_of_others_stay(tmp_path: Path, index: StoredIndex) -> None:
    (tmp_path / "notes.txt").write_text("ours")
    (tmp_path / "building-00000009.sqlite").write_text("a crash left it")
    index.close()
    open_index(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generation-00000001.sqlite",
        "notes.txt",
    ]
    connection = sqlite3.connect(file_of(tmp_path))
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_the_database_is_chosen_by_the_number_of_items() -> None:
    assert storage_for(100_000_000) is StorageKind.SQLITE
    assert storage_for(100_000_001) is StorageKind.ROCKSDB
    assert issubclass(IndexDamagedError, ReconcileError)


@pytest.mark.parametrize(
    ("limits", "through"),
    [(IndexLimits(journal_rows=5), 0), (IndexLimits(), 40)],
    ids=["full journal", "trimmed journal"],
)
def test_a_crash_finds_the_journal_that_the_saved_sums_need(
    tmp_path: Path, limits: IndexLimits, through: int
) -> None:
    index, model = open_index(tmp_path, limits=limits), Model()
    for number in range(50):
        changes = [(f"k{number}", stamped(f"k{number}"))]
        index.apply(changes)
        changed(model, changes)
    index.trim_journal(through=Position(through))
    # As after a crash: the first one never saves its sums.
    again = open_index(tmp_path, limits=limits)
    assert_is(again, model)
    again.close()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM journal WHERE position = 20", "missing"),
        ("UPDATE journal SET change = zeroblob(100) WHERE position = 20", "row 20"),
    ],
)
def test_a_lost_row_of_the_journal_is_no_shorter_journal(
    tmp_path: Path, index: StoredIndex, statement: str, said: str
) -> None:
    assert len(index.changes(after=Position(10), through=Position(30))) == 20
    run(tmp_path, statement)
    with pytest.raises(IndexDamagedError, match=said):
        index.changes(after=Position(10), through=Position(30))
    index.close()


def spoil_spans(folder: Path, change: Callable[[SpanSums], object]) -> None:
    """Let the stored sums over spans be others."""
    select = "SELECT data FROM value WHERE name = CAST('state' AS BLOB)"
    with closing(sqlite3.connect(file_of(folder))) as connection:
        (state,) = connection.execute(select).fetchone()
        other = DerivedState.from_bytes(state)
        change(other.spans)
        update = "UPDATE value SET data = ? WHERE name = CAST('state' AS BLOB)"
        connection.execute(update, (other.to_bytes(),))
        connection.commit()


def test_sums_that_differ_from_the_last_batch_are_not_used(
    tmp_path: Path, index: StoredIndex
) -> None:
    index.close()
    spoil_spans(tmp_path, lambda spans: spans.change("k1", None, ItemId(b"\1" * 16)))
    with pytest.raises(IndexDamagedError, match="sums differ"):
        open_index(tmp_path)


def test_the_self_check_finds_items_counted_in_another_span(
    tmp_path: Path, index: StoredIndex
) -> None:
    with index.snapshot() as now:
        ids = now.ids(WHOLE)
    index.close()
    spoil_spans(
        tmp_path,
        lambda spans: spans.rebalance(
            split=lambda whole, parts: ["k3"],
            read_ids=lambda part: ids[: 0 if part.start else None],
            items=10,
        ),
    )
    with closing(open_index(tmp_path)) as again:
        (first, second) = again.self_check().damage
    assert "the span from ''" in first
    assert "the span from 'k3'" in second


def test_the_self_check_finds_an_entry_by_hash_without_a_row(tmp_path: Path) -> None:
    with closing(OPENERS[StorageKind.ROCKSDB](tmp_path / "rocks", True)) as tables:
        row = ItemRow(b"key", b"", bytes(40))
        tables.write(TableBatch(puts=[row]))
        with tables.view() as view:
            assert view.damage() == []
        tables.write(TableBatch(deletes=[row._replace(row=b"x" * 40)]))
        with tables.view() as view:
            assert view.damage()
