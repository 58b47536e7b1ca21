"""The ledger of a pair: what it keeps, and whose it is."""

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from proof.item import EvidenceLevel
from replicator.copy_requests import CopyResult, ObjectStamp, SentPart, UploadRecord
from replicator.crossing import Crossing
from replicator.hashing import ContentHasher
from replicator.ledger import LedgerDamagedError, LedgerRow, PairLedger, PlannedStep
from replicator.pair import PairRefusedError, check_pair
from replicator.stores.port import ObjectFacts, UploadedPart, UploadId
from replicator.windows import WindowHasher, window_bytes_of
from runtime.errors import BusyError, ConfigError, DatabaseError

STAMP = ObjectStamp("v1", "etag", 17, 5)


def opened(folder: Path, source: str = "local:/a", target: str = "local:/b") -> PairLedger:
    return PairLedger(folder, source=source, target=target)


def result(key: str, body: bytes) -> CopyResult:
    hasher = ContentHasher()
    hasher.update(body)
    windows = WindowHasher(bytes(32), len(body))
    windows.update(body)
    source = ObjectFacts(key, len(body), "s", 1)
    target = ObjectFacts(key, len(body), "t", 2, "v")
    return CopyResult(source, target, hasher.hashes(), b"p", len(body), windows.table())


def test_everything_is_there_after_it_was_closed(tmp_path: Path) -> None:
    part = SentPart(UploadedPart(2, 5, "e"), b"b3")
    record = UploadRecord(None, STAMP, None, b"p", 8)
    step = PlannedStep("k", "copy", 5, STAMP, None, "missing")
    # Not a letter that UTF-16 orders as UTF-8 does, and a NUL.
    keys = ["", "a\0b", "ﬀ", "\U0001f600"]
    with opened(tmp_path) as ledger:
        secret = ledger.secret
        ledger.save_upload("k", record)
        ledger.save_upload("k", UploadRecord(UploadId("u"), STAMP, STAMP, b"p", 8))
        ledger.save_part("k", part)
        ledger.clear_plan()
        ledger.add_to_plan([step])
        for key in reversed(keys):
            ledger.save_copy(result(key, b"hello"))
    with opened(tmp_path) as ledger:
        assert ledger.secret == secret
        assert ledger.upload("k") == UploadRecord(
            UploadId("u"), STAMP, STAMP, b"p", 8, sent=(part,)
        )
        assert ledger.upload_keys() == ["k"]
        assert list(ledger.plan()) == [step]
        assert [row.key for row in ledger.rows("")] == keys
        assert [row.key for row in ledger.rows("a")] == ["a\0b"]
        row = ledger.row("ﬀ")
        assert row is not None
        assert (row.level, row.has_windows) == (EvidenceLevel.RECORDED, True)
        assert ledger.windows("ﬀ", 5) == result("ﬀ", b"hello").windows
        ledger.save_upload("k", None)
        assert ledger.upload("k") is None
        ledger.forget(["ﬀ"])
        assert ledger.row("ﬀ") is None
        assert ledger.windows("ﬀ", 5) is None


def test_digests_of_other_properties_are_forgotten(tmp_path: Path) -> None:
    both = Crossing(tags=True, headers=True, acl=False)
    with opened(tmp_path) as ledger:
        ledger.save_copy(result("k", b"x"))
        assert ledger.crossing() is None
        for crossing, digest in ((both, b"p"), (both, b"p"), (replace(both, tags=False), b"")):
            ledger.save_crossing(crossing)
            row = ledger.row("k")
            assert row is not None
            assert (ledger.crossing(), row.properties) == (crossing, digest)


def test_windows_of_very_large_objects_grow() -> None:
    assert window_bytes_of(16 << 30) == 16 << 10
    assert window_bytes_of((16 << 30) + 1) == 32 << 10


def test_a_copy_forgets_the_upload_of_its_key(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.save_upload("k", UploadRecord(UploadId("u"), STAMP, None, b"p", 8))
        ledger.save_part("k", SentPart(UploadedPart(1, 5, "e"), b"b3"))
        ledger.save_copy(result("k", b"x"))
        assert ledger.upload("k") is None
        ledger.save_upload("k", UploadRecord(UploadId("w"), STAMP, None, b"p", 8))
        again = ledger.upload("k")
        assert again is not None
        assert again.sent == ()


def test_more_rows_than_a_page_come_in_order(tmp_path: Path) -> None:
    rows = [
        LedgerRow(f"k{number:05}", STAMP, STAMP, (), b"", EvidenceLevel.LISTED)
        for number in range(2_500)
    ]
    with opened(tmp_path) as ledger:
        ledger.save_rows(rows[::-1])
        assert list(ledger.rows("k")) == rows
        ledger.add_to_plan([PlannedStep(row.key, "copy", 0, None, STAMP, "") for row in rows])
        assert [step.key for step in ledger.plan()] == [row.key for row in rows]


def test_the_folder_of_another_pair_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(ConfigError, match="is the state of local:/a and local:/b") as raised:
        opened(tmp_path, target="local:/c")
    assert "--state" in raised.value.hint
    opened(tmp_path).close()


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(BusyError):
        opened(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as connection:
        connection.execute("PRAGMA user_version=9")
    connection.close()
    with pytest.raises(ConfigError, match="version 9"):
        opened(tmp_path)


@pytest.mark.parametrize("damage", ["text", "row", "table"])
def test_a_damaged_file_is_named_with_what_to_do(damage: str, tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.save_copy(result("k", b"x"))
    path = tmp_path / "ledger.sqlite"
    if damage == "text":
        path.write_bytes(b"this is no database" * 100)
    else:
        change = "UPDATE objects SET hashes='md5:zz'" if damage == "row" else "DROP TABLE objects"
        with sqlite3.connect(path) as connection:
            connection.execute(change)
        connection.close()
    with pytest.raises(LedgerDamagedError) as raised, opened(tmp_path) as ledger:
        ledger.row("k")
    assert f"Remove {tmp_path}" in raised.value.hint
    # The lock was released: the next run says the same, and none waits.
    with pytest.raises(LedgerDamagedError), opened(tmp_path) as ledger:
        ledger.row("k")


def test_threads_commit_together_and_lose_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:

        def save(thread: int) -> None:
            for number in range(20):
                ledger.save_copy(result(f"{thread}-{number}", b"x"))
                assert ledger.row(f"{thread}-{number}") is not None

        threads = [threading.Thread(target=save, args=(thread,)) for thread in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(list(ledger.rows(""))) == 120


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("local:a", "local:./a"),
        ("local:a", "LOCAL:a/../a"),
        ("s3://b", "s3://b/"),
        ("s3://b/x", "s3://b"),
        ("s3://b/x", "s3://b/x/y"),
        ("s3://b?endpoint_url=http://h:80", "s3://b?profile=p&endpoint_url=http://H/"),
        ("s3://b?endpoint_url=http://localhost:9000", "s3://b?endpoint_url=http://127.0.0.1:9000"),
        ("s3://b", "s3://b?endpoint_url=https://s3.eu-west-1.amazonaws.com"),
        ("s3://b/x%20y", "s3://b/x y/z"),
    ],
)
def test_a_bucket_is_not_copied_to_itself(source: str, target: str) -> None:
    for pair in ((source, target), (target, source)):
        with pytest.raises(PairRefusedError) as raised:
            check_pair(*pair)
        assert raised.value.reason == "same_bucket"


def test_a_link_to_a_folder_is_that_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(PairRefusedError):
        check_pair(f"local:{tmp_path}/a", f"local:{tmp_path}/b")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("local:a", "local:b"),
        ("s3://b/x", "s3://b/y"),
        ("s3://b/x", "s3://b/xy"),
        ("s3://b", "s3://c"),
        ("s3://b?endpoint_url=http://h:9000", "s3://b?endpoint_url=http://h:9001"),
        ("s3://b", "local:b"),
    ],
)
def test_other_buckets_are_a_pair(source: str, target: str) -> None:
    check_pair(source, target)


def test_a_change_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        with pytest.raises(DatabaseError):
            ledger.save_part("k", SentPart(UploadedPart(1, 5, "\ud800"), b""))
        ledger.save_copy(result("k", b"x"))
        assert ledger.row("k") is not None


def test_whoever_reads_does_not_wait_for_a_disk_that_writes(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.save_copy(result("k", b"body"))
        with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            writing = threading.Thread(target=ledger.save_copy, args=(result("n", b"new"),))
            writing.start()
            row = ledger.row("k")
            assert row is not None
            assert [one.key for one in ledger.rows("")] == ["k"]
            assert writing.is_alive()
            other.execute("ROLLBACK")
        writing.join()
        assert [one.key for one in ledger.rows("")] == ["k", "n"]
