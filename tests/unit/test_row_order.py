"""Readers of SQLite's rows end, also where a damaged file gives them in a circle; rows
of other types are refused.
"""

import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import combinations, islice
from pathlib import Path

import pytest

from replicator.copy_requests import CopyResult, ObjectStamp
from replicator.hashing import ContentHasher
from replicator.ledger import LedgerDamagedError, PairLedger, PlannedStep
from replicator.stores.errors import StoreError
from replicator.stores.local import LocalBucket
from replicator.stores.port import ObjectFacts
from runtime.disk import Disk
from runtime.row_order import in_order, of_types
from tests.support.stores import ANYTHING, NOTHING, changes_after

# Several pages of a reader, on many pages of the file.
ROWS = 1_300
# More than any reader of so many rows may give.
ENDLESS = 4 * ROWS
# Of pages that are swapped.
PAIRS = 4


def test_rows_in_order_are_given_as_they_are() -> None:
    assert in_order([3, 5], lambda row: row, after=2) == [3, 5]
    assert in_order([3, 5], lambda row: row, after=None) == [3, 5]
    assert in_order(list[int](), lambda row: row, after=2) == []
    for rows in ([2, 5], [1], [3, 3], [5, 3]):
        with pytest.raises(sqlite3.DatabaseError):
            in_order(rows, lambda row: row, after=2)


def test_rows_of_their_types_are_given_as_they_are() -> None:
    assert of_types((3, None, b""), int, int | None, bytes) == (3, None, b"")
    for row in (None, (), (3,), (3, 4, 5), (3, "4"), (None, 4)):
        with pytest.raises(sqlite3.DatabaseError):
            of_types(row, int, int)


def _multiply(path: Path, table: str, values: Mapping[str, str]) -> None:
    """Repeat the only row of a table with other values of some columns: SQL in which
    `i` is the number of the row.
    """
    with closing(sqlite3.connect(path)) as connection:
        names = [str(row[1]) for row in connection.execute(f"PRAGMA table_info({table})")]
        chosen = ", ".join(values.get(name, name) for name in names)
        connection.execute(f"CREATE TEMP TABLE one AS SELECT * FROM {table}")
        connection.execute(f"DELETE FROM {table}")
        connection.execute(
            f"WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {ROWS})"
            f" INSERT INTO {table} SELECT {chosen} FROM n, one"
        )
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _pairs(leaves: Sequence[int]) -> list[tuple[int, int]]:
    """Any, and the ends of the table written last: a reader that goes on behind
    its last row begins again there.
    """
    found = random.Random(len(leaves)).sample(list(combinations(leaves, 2)), PAIRS)
    return [*found, *((one, leaves[-1]) for one in leaves[-16::3])]


def _refusals(
    path: Path, read: Callable[[], Iterator[Sequence[Callable[[], Iterable[object]]]]]
) -> int:
    """Swap pages of the file, two at a time; returns how many readers refused that. All
    readers end.
    """
    whole, refused = path.read_bytes(), 0
    page_bytes = int.from_bytes(whole[16:18], "big")
    leaves = [at for at in range(page_bytes, len(whole), page_bytes) if whole[at] in (0x0A, 0x0D)]
    for one, other in _pairs(leaves):
        changed = bytearray(whole)
        changed[one : one + page_bytes] = whole[other : other + page_bytes]
        changed[other : other + page_bytes] = whole[one : one + page_bytes]
        path.write_bytes(changed)
        try:
            for readers in read():
                for reader in readers:
                    try:
                        assert sum(1 for _ in islice(reader(), ENDLESS)) < ENDLESS
                    except (LedgerDamagedError, StoreError):
                        refused += 1
        except (LedgerDamagedError, StoreError):
            refused += 1
    return refused


def test_a_ledger_with_pages_out_of_order_is_refused(tmp_path: Path) -> None:
    def opened() -> PairLedger:
        return PairLedger(tmp_path, source="local:/a", target="local:/b")

    def read() -> Iterator[Sequence[Callable[[], Iterable[object]]]]:
        with opened() as ledger:
            yield ledger.plan, lambda: ledger.rows("")

    facts, stamp = ObjectFacts("k", 0, "etag", 1), ObjectStamp("v1", "etag", 17, 5)
    with opened() as ledger:
        ledger.add_to_plan([PlannedStep("k", "copy", 5, stamp, None, "missing")])
        ledger.save_copy(CopyResult(facts, facts, ContentHasher().hashes(), b"p", 0, None))
    path = tmp_path / "ledger.sqlite"
    _multiply(path, "objects", {"key": "CAST(printf('%05d', i) AS BLOB)"})
    _multiply(path, "plan", {"number": "i"})
    assert _refusals(path, read) > PAIRS // 2


def test_a_bucket_with_pages_out_of_order_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"

    def read() -> Iterator[Sequence[Callable[[], Iterable[object]]]]:
        with LocalBucket(folder, Disk()) as bucket:
            (_, upload), *_ = bucket.uploads("")
            yield (
                lambda: bucket.view.list_objects(""),
                lambda: bucket.view.list_versions(""),
                lambda: changes_after(bucket.feed),
                lambda: bucket.uploads(""),
                lambda: bucket.parts("00001", upload),
            )

    with LocalBucket(folder, Disk(), create=True) as bucket:
        bucket.put("k", b"", NOTHING, ANYTHING)
        upload = bucket.begin("k", NOTHING)
        bucket.write_part("k", upload, 1, b"")
    (path,) = folder.glob("*.db")
    key = "CAST(printf('%05d', i) AS BLOB)"
    _multiply(path, "versions", {"position": "i", "key": key})
    _multiply(
        path, "uploads", {"upload": "CASE i WHEN 1 THEN upload ELSE upload || i END", "key": key}
    )
    _multiply(path, "parts", {"number": "i"})
    assert _refusals(path, read) > PAIRS // 2
