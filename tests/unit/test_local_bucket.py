"""The local bucket: what is refused, what a snapshot shows, what the history keeps, and
what is on disk.
"""

import errno
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from replicator.stores.errors import (
    FeedGapError,
    PositionTrimmedError,
    PreconditionFailedError,
    SnapshotLostError,
    StoreError,
    StoreUnavailableError,
)
from replicator.stores.local import LocalBucket
from replicator.stores.local_contents import Content, NewBlob, Segment
from replicator.stores.local_database import _UPGRADES, NotABucketError, StoreFullError
from replicator.stores.local_files import ObjectDamagedError
from replicator.stores.port import (
    ChangeKind,
    CopySource,
    ObjectProperties,
    UploadId,
    WriteCondition,
)
from runtime.disk import Disk, Operation
from runtime.errors import DiskError
from tests.support.bad_input import another_user, forbidden, public_folder, unchanged
from tests.support.disk import FailingDisk
from tests.support.stores import ANYTHING, NOTHING, changes_after, content, current, keys, put

# More than fits a row.
LARGE = b"0123456789abcdef" * 4096
BLUE = ObjectProperties(metadata=(("colour", "blue"),))


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[LocalBucket]:
    with LocalBucket(tmp_path / "bucket", Disk(), create=True) as opened:
        yield opened


def data_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("data/*/*/*")}


def open_bucket(folder: Path, *, create: bool = False) -> None:
    LocalBucket(folder, Disk(), create=create).close()


def make_database(folder: Path, *statements: str) -> None:
    folder.mkdir()
    connection = sqlite3.connect(folder / "bucket.db")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def make_newer(folder: Path) -> None:
    open_bucket(folder, create=True)
    connection = sqlite3.connect(folder / "bucket.db")
    connection.execute("PRAGMA user_version = 99")
    connection.close()


def make_headless(folder: Path) -> None:
    """The data of a bucket whose database was lost."""
    with LocalBucket(folder, Disk(), create=True) as opened:
        put(opened.store(), "key", LARGE)
    for path in folder.glob("bucket.db*"):
        path.unlink()


def write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)


NOT_BUCKETS: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: write_file(folder, b"x"),
    "below a file": lambda folder: write_file(folder.parent / "below", b"x"),
    "other files": lambda folder: write_file(folder / "other", b"x"),
    "not a database": lambda folder: write_file(folder / "bucket.db", b"text " * 1000),
    "another's database": lambda folder: make_database(folder, "CREATE TABLE x (y)"),
    "another's application": lambda folder: make_database(folder, "PRAGMA application_id = 7"),
    "a newer format": make_newer,
    "data only": make_headless,
}


@pytest.mark.parametrize("create", [False, True])
@pytest.mark.parametrize("name", NOT_BUCKETS)
def test_what_is_not_a_bucket_is_refused_and_unchanged(
    tmp_path: Path, name: str, create: bool
) -> None:
    folder = tmp_path / "folder"
    NOT_BUCKETS[name](folder)
    if name == "below a file":
        folder = tmp_path / "below" / "folder"
    # SQLite has files beside a database of ours while it is open.
    untouched = nullcontext() if name == "a newer format" else unchanged(tmp_path)
    with untouched, pytest.raises(StoreError) as failed:
        open_bucket(folder, create=create)
    assert str(folder.parent) in failed.value.message
    assert isinstance(failed.value, NotABucketError) or name == "below a file"


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_only_a_target_is_created(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a" / "bucket"
    if name == "empty":
        (folder / "lost+found").mkdir(parents=True)
    with unchanged(tmp_path), pytest.raises(NotABucketError) as failed:
        open_bucket(folder)
    assert failed.value.hint
    open_bucket(folder, create=True)
    open_bucket(folder, create=True)
    open_bucket(folder)


def test_a_bucket_whose_creation_was_cut_short_is_completed_as_a_target(tmp_path: Path) -> None:
    write_file(tmp_path / "bucket" / "bucket.db", b"")
    with pytest.raises(NotABucketError, match="never completed"):
        open_bucket(tmp_path / "bucket")
    open_bucket(tmp_path / "bucket", create=True)
    open_bucket(tmp_path / "bucket")


def test_what_another_user_may_not_change_is_named() -> None:
    with public_folder() as folder:
        bucket = folder / "bucket"
        with LocalBucket(bucket, Disk(), create=True) as opened:
            put(opened.store(), "key", LARGE)
        with another_user():
            for target, create in ((bucket, False), (folder / "new", True)):
                with pytest.raises(StoreError) as failed:
                    open_bucket(target, create=create)
                assert failed.value.facts["denied"] is True
                assert "root" in failed.value.hint
        with forbidden(bucket), another_user(), pytest.raises(StoreError) as failed:
            open_bucket(bucket)
        assert failed.value.facts["denied"] is True
        # Its files belong to others, but not the folder.
        bucket.chmod(0o777)
        with another_user(), LocalBucket(bucket, Disk()) as opened:
            assert keys(opened.store()) == ["key"]
            with pytest.raises(StoreError) as failed:
                put(opened.store(), "key")
        assert "root" in failed.value.hint


ACTIONS: dict[str, Callable[[LocalBucket], object]] = {
    "put": lambda bucket: put(bucket.store(), "key", LARGE[::-1]),
    "put a little": lambda bucket: put(bucket.store(), "key", b"little"),
    "delete": lambda bucket: bucket.delete(["key"]),
    "properties": lambda bucket: bucket.put_properties(current(bucket.store(), "key"), BLUE),
    "part": lambda bucket: bucket.write_part("up", next(bucket.uploads(""))[1], 1, LARGE[::-1]),
    "complete": lambda bucket: bucket.complete(
        "up", (up := next(bucket.uploads(""))[1]), list(bucket.parts("up", up)), NOTHING, ANYTHING
    ),
}


class OneFailure:
    """Picks the operation of this number, from 0, once it is armed."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.is_armed = False

    def __call__(self, operation: Operation, path: Path) -> bool:
        self.left -= self.is_armed
        return self.is_armed and self.left == -1


def with_upload(folder: Path) -> None:
    with LocalBucket(folder, Disk(), create=True) as bucket:
        put(bucket.store(), "key", LARGE)
        upload = bucket.begin("up", NOTHING)
        for number in (1, 2):
            bucket.write_part("up", upload, number, LARGE)


def state(bucket: LocalBucket) -> object:
    [(_, upload)] = list(bucket.uploads("")) or [("", UploadId(""))]
    parts = list(bucket.parts("up", upload)) if upload else []
    return list(bucket.view.list_versions("")), changes_after(bucket.feed), parts


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_operation_is_named_and_changes_nothing(
    tmp_path: Path, name: str, number: int
) -> None:
    """Each operation in turn fails, until the action has no more of them."""
    for failing in range(20):
        folder = tmp_path / str(failing)
        with_upload(folder)
        fails = OneFailure(failing)
        disk = FailingDisk(number, fails)
        with LocalBucket(folder, disk) as bucket:
            before = state(bucket)
            fails.is_armed = True
            failure: StoreError | None = None
            try:
                ACTIONS[name](bucket)
            except StoreError as error:
                failure = error
            fails.is_armed = False
            # What comes after the commit is done later, and is no failure.
            assert (state(bucket) == before) == (failure is not None)
            if failure is not None:
                assert isinstance(failure, StoreFullError) == (number == errno.ENOSPC)
                assert failure.hint or number == errno.EIO
            assert content(bucket.store(), put(bucket.store(), "after", LARGE)) == LARGE
        check_no_orphans(folder)
        if not disk.failed:
            assert failing > 0
            return
    pytest.fail("the action has more operations than were tried")


def check_no_orphans(folder: Path) -> None:
    """After it was opened, a bucket has just the files that its rows name."""
    open_bucket(folder)
    connection = sqlite3.connect(folder / "bucket.db")
    rows = connection.execute("SELECT file FROM blobs WHERE file IS NOT NULL").fetchall()
    connection.close()
    assert data_files(folder) == {f"data/{name}" for (name,) in rows}
    assert list((folder / "writers").iterdir()) == []


def test_a_full_disk_below_the_database_is_named(bucket: LocalBucket) -> None:
    connection = bucket._database._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(StoreFullError) as failed:
        put(bucket.store(), "key", bytes(16_000))
    assert failed.value.hint
    assert keys(bucket.store()) == []
    connection.execute("PRAGMA max_page_count = 100000")
    put(bucket.store(), "key", bytes(16_000))


def test_a_bucket_that_another_process_changes_for_too_long_is_unavailable(tmp_path: Path) -> None:
    open_bucket(tmp_path / "bucket", create=True)
    other = sqlite3.connect(tmp_path / "bucket" / "bucket.db", isolation_level=None)
    with LocalBucket(tmp_path / "bucket", Disk(), lock_wait_s=0.01) as bucket:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError) as failed:
            put(bucket.store(), "key")
        assert failed.value.retryable
        # Readers do not wait.
        assert keys(bucket.store()) == []
        other.rollback()
        put(bucket.store(), "key")
    other.close()


def test_an_end_that_cannot_be_recorded_is_named_and_blocks_nobody(tmp_path: Path) -> None:
    armed = False
    disk = FailingDisk(errno.EIO, lambda *_: armed)
    bucket = LocalBucket(tmp_path / "bucket", disk, create=True)
    put(bucket.store(), "key", LARGE)
    armed = True
    with pytest.raises(StoreError):
        bucket.close()
    bucket.close()
    with LocalBucket(tmp_path / "bucket", Disk()) as again:
        assert content(again.store(), current(again.store(), "key")) == LARGE
    assert list((tmp_path / "bucket" / "writers").iterdir()) == []


def test_new_properties_and_copied_ranges_write_no_data(
    bucket: LocalBucket, tmp_path: Path
) -> None:
    store = bucket.store()
    facts = put(store, "key", LARGE)
    files = data_files(tmp_path / "bucket")
    changed = store.writer.put_properties(facts, BLUE)
    assert (changed.etag, changed.hashes) == (facts.etag, facts.hashes)
    upload = bucket.begin("copy", NOTHING)
    source = CopySource("key", facts.version, facts.etag, 5, len(LARGE) - 5)
    part = bucket.copy_part("copy", upload, 1, source)
    copy = bucket.complete("copy", upload, [part], NOTHING, ANYTHING)
    assert data_files(tmp_path / "bucket") == files
    # The data stay while any of the objects has them.
    bucket.delete(["key"])
    bucket.trim(bucket.feed.position().index)
    assert keys(store) == ["copy"]
    assert [facts.key for facts in store.lister.list_versions("")] == ["copy"]
    assert content(store, copy) == LARGE[5:-5]
    bucket.delete(["copy"])
    bucket.trim(bucket.feed.position().index)
    assert data_files(tmp_path / "bucket") == set()


def test_a_snapshot_stays_as_the_bucket_was(bucket: LocalBucket) -> None:
    store = bucket.store()
    for key in ("a", "b", "c"):
        put(store, key, key.encode() + LARGE)
    first = current(store, "a")
    snapshot = bucket.snapshots.create("one")
    view = bucket.snapshots.open(snapshot)
    shown = replace(store, lister=view.lister, reader=view.reader)
    before = list(view.lister.list_objects(""))
    put(store, "a", b"new")
    bucket.delete(["b"])
    put(store, "d")
    bucket.put_properties(current(store, "c"), BLUE)
    for _ in range(2):
        assert list(view.lister.list_objects("")) == before == list(view.lister.list_versions(""))
        assert view.reader.facts("a") == first
        assert view.reader.facts("d") is None
        assert view.reader.facts("d", version=current(store, "d").version) is None
        assert view.reader.properties("c") == NOTHING
        for facts in before:
            assert content(shown, facts) == facts.key.encode() + LARGE
        assert keys(store) == ["a", "c", "d"]
        bucket.trim(7)
    with pytest.raises(PositionTrimmedError):
        changes_after(bucket.feed, 6)
    bucket.snapshots.delete("one")
    bucket.snapshots.delete("one")
    assert bucket.snapshots.find("one") is None
    # Another one of the same name is not the same.
    bucket.snapshots.create("one")
    for read in (
        lambda: list(view.lister.list_objects("")),
        lambda: list(view.lister.list_versions("")),
        lambda: view.reader.facts("a"),
        lambda: content(shown, first),
        lambda: list(bucket.snapshots.difference(snapshot, snapshot)),
    ):
        with pytest.raises(SnapshotLostError):
            read()


def test_what_a_deleted_snapshot_has_kept_is_removed(tmp_path: Path) -> None:
    """Also where it takes several transactions, and a kill came between them."""
    left = 2

    class Killer(Disk):
        def durable(
            self,
            operation: Operation,
            path: Path,
            act: Callable[[], None],
            torn: Callable[[], None] | None = None,
        ) -> None:
            nonlocal left
            left -= operation is Operation.BATCH
            if left <= 0:
                raise DiskError("killed")
            act()

    folder = tmp_path / "bucket"
    names = [f"{i:05}" for i in range(2500)]
    with LocalBucket(folder, Disk(), create=True) as bucket:
        with bucket._database.change() as rows:
            for name in names:
                body = NewBlob(body=b"x")
                made = rows.add_content(Content(1, "0" * 32, 0))
                rows.add_segments(made, [Segment(0, 1, rows.add_blob(body), 0, 0)])
                rows.supersede(name.encode(), made, NOTHING, modified_ms=1)
        for name in ("one", "two"):
            bucket.snapshots.create(name)
        bucket.delete(names)
        bucket.trim(1 << 40)
        assert len(list(bucket.view.list_versions(""))) == 5000
        bucket.snapshots.delete("one")
        assert len(list(bucket.view.list_versions(""))) == 5000
    bucket = LocalBucket(folder, Killer())
    with pytest.raises(StoreError):
        bucket.snapshots.delete("two")
    assert 0 < len(list(bucket.view.list_versions(""))) < 5000
    bucket.close()
    with LocalBucket(folder, Disk()) as bucket:
        assert list(bucket.view.list_versions("")) == []
        with bucket._database.view() as rows:
            assert rows.is_swept()
            assert rows.blob(1) is None


def test_the_log_of_a_copied_or_restored_bucket_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    with LocalBucket(folder, Disk(), create=True) as bucket:
        put(bucket.store(), "a")
        early = bucket.feed.position()
    shutil.copytree(folder, tmp_path / "backup")
    with LocalBucket(folder, Disk()) as bucket:
        assert bucket.feed.position() == early
        put(bucket.store(), "b")
        late = bucket.feed.position()
        assert [change.key for change in changes_after(bucket.feed, early)] == ["b"]
    # A moved bucket is the same one.
    folder.rename(tmp_path / "moved")
    with LocalBucket(tmp_path / "moved", Disk()) as bucket:
        assert changes_after(bucket.feed, late) == []
    shutil.rmtree(tmp_path / "moved")
    # Inodes may be those of the files that were removed.
    shutil.copytree(tmp_path / "backup", folder)
    with LocalBucket(folder, Disk()) as bucket:
        put(bucket.store(), "c")
        put(bucket.store(), "d")
        for position in (early, late):
            with pytest.raises(FeedGapError) as caught:
                bucket.feed.read(position)
            assert not isinstance(caught.value, PositionTrimmedError)
        now = bucket.feed.position()
        with pytest.raises(FeedGapError):
            bucket.feed.read(replace(now, index=now.index + 1))
    # Of the database alone, in its place.
    shutil.copy(tmp_path / "backup" / "bucket.db", tmp_path / "again")
    (tmp_path / "again").replace(folder / "bucket.db")
    with LocalBucket(folder, Disk()) as bucket:
        assert bucket.feed.position().log not in (early.log, now.log)


def test_a_bucket_of_the_first_format_is_upgraded(tmp_path: Path) -> None:
    folder = tmp_path / "bucket"
    folder.mkdir()
    connection = sqlite3.connect(folder / "bucket.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(_UPGRADES[0])
    connection.executescript("""
        INSERT INTO contents VALUES (1, 1, '00000000000000000000000000000000', 0, NULL, NULL),
            (2, 1, '00000000000000000000000000000000', 0, NULL, NULL);
        INSERT INTO blobs VALUES (1, NULL, x'78'), (2, NULL, x'79');
        INSERT INTO segments VALUES (1, 0, 1, 1, 0, 0), (2, 0, 1, 2, 0, 0);
        INSERT INTO versions VALUES (3, 'a', 5, 1, 7, '{}'), (4, 'b', NULL, 2, 8, '{}'),
            (5, 'a', NULL, NULL, 9, '{}');
        UPDATE versions SET key = CAST(key AS BLOB);
        UPDATE history SET position = 5, trimmed = 2;
    """)
    connection.close()
    for _ in range(2):
        with LocalBucket(folder, Disk()) as bucket:
            store = bucket.store()
            assert [(one.index, one.key, one.kind) for one in changes_after(bucket.feed, 2)] == [
                (3, "a", ChangeKind.PUT),
                (4, "b", ChangeKind.PUT),
                (5, "a", ChangeKind.DELETE),
            ]
            assert content(store, current(store, "b")) == b"y"
    with LocalBucket(folder, Disk()) as bucket:
        bucket.rename(current(bucket.store(), "b"), "c")
        bucket.trim(1 << 40)
        assert [facts.key for facts in bucket.view.list_versions("")] == ["c"]


def test_trimming_removes_what_only_the_history_has(bucket: LocalBucket, tmp_path: Path) -> None:
    store = bucket.store()
    old = [put(store, "a", bytes([i]) + LARGE) for i in range(3)]
    put(store, "b", LARGE)
    bucket.delete(["b"])
    assert len(data_files(tmp_path / "bucket")) == 4
    with store.reader.read(old[0]) as pieces:
        next(pieces)
        bucket.trim(1 << 40)
        # What was opened can be read to its end.
        assert sum(len(piece) for piece in pieces) == 0
    assert bucket.feed.position().index == 5
    assert list(store.lister.list_versions("")) == old[2:]
    assert len(data_files(tmp_path / "bucket")) == 1
    with pytest.raises(PreconditionFailedError):
        content(store, old[0])
    assert changes_after(bucket.feed, 5) == []
    # Positions go on.
    assert put(store, "b").version == "6"
    assert [change.key for change in changes_after(bucket.feed, 5)] == ["b"]


def test_the_history_is_kept_for_so_many_changes(tmp_path: Path) -> None:
    with LocalBucket(
        tmp_path / "bucket", Disk(), create=True, history_changes_max=20, body_bytes_max=0
    ) as bucket:
        for i in range(100):
            put(bucket.store(), f"{i % 3}", b"%d" % i)
            kept = len(data_files(tmp_path / "bucket"))
            assert min(i + 1, 20) <= kept <= 24
            assert len(changes_after(bucket.feed, max(i + 1 - 20, 0))) == min(i + 1, 20)
        with pytest.raises(PositionTrimmedError):
            changes_after(bucket.feed, 50)
        assert keys(bucket.store()) == ["0", "1", "2"]


def test_two_openers_share_a_bucket(tmp_path: Path) -> None:
    with (
        LocalBucket(tmp_path / "bucket", Disk(), create=True) as one,
        LocalBucket(tmp_path / "bucket", Disk()) as two,
    ):
        first = put(one.store(), "key", LARGE)
        assert content(two.store(), current(two.store(), "key")) == LARGE
        put(two.store(), "key", LARGE[::-1])
        with pytest.raises(PreconditionFailedError):
            one.put("key", b"x", NOTHING, WriteCondition(etag=first.etag))
        assert [change.index for change in changes_after(one.feed)] == [1, 2]
        upload = one.begin("up", NOTHING)
        parts = [two.write_part("up", upload, 1, LARGE), one.write_part("up", upload, 2, b"x")]
        assert content(two.store(), two.complete("up", upload, parts, NOTHING, ANYTHING)) == (
            LARGE + b"x"
        )
    assert list((tmp_path / "bucket" / "writers").iterdir()) == []


@pytest.mark.parametrize("fails_first", [False, True])
def test_what_a_living_writer_has_not_recorded_yet_is_not_removed(
    tmp_path: Path, fails_first: bool
) -> None:
    """A second process opens the bucket between a write's data and its row."""
    batches = 0

    class Opener(Disk):
        def durable(
            self,
            operation: Operation,
            path: Path,
            act: Callable[[], None],
            torn: Callable[[], None] | None = None,
        ) -> None:
            nonlocal batches
            batches += operation is Operation.BATCH
            if fails_first and operation is Operation.BATCH and batches == 1:
                raise DiskError("the writer cannot be recorded")
            act()
            if operation is Operation.SYNC:
                open_bucket(tmp_path / "bucket")

    open_bucket(tmp_path / "bucket", create=True)
    with LocalBucket(tmp_path / "bucket", Opener()) as bucket:
        if fails_first:
            with pytest.raises(StoreError):
                put(bucket.store(), "key", LARGE)
        assert content(bucket.store(), put(bucket.store(), "key", LARGE)) == LARGE
        assert content(bucket.store(), put(bucket.store(), "key", LARGE)) == LARGE
    check_no_orphans(tmp_path / "bucket")


@pytest.mark.parametrize("end", [b"", b"end"])
def test_zeros_take_no_space(bucket: LocalBucket, tmp_path: Path, end: bytes) -> None:
    body = bytes(5 << 20) + b"x" + bytes(5 << 20) + end
    assert content(bucket.store(), put(bucket.store(), "key", body)) == body
    [path] = tmp_path.glob("bucket/data/*/*/*")
    assert path.stat().st_size == len(body)
    assert path.stat().st_blocks * 512 <= 2 << 20


def test_of_many_threads_one_creates_the_object(bucket: LocalBucket) -> None:
    results = list[str]()

    def create(number: int) -> None:
        try:
            bucket.put("key", LARGE + bytes([number]), NOTHING, WriteCondition(absent=True))
            results.append("made")
        except PreconditionFailedError:
            results.append("refused")
        for i in range(20):
            put(bucket.store(), f"{number}/{i}", LARGE if i % 2 else b"x")

    threads = [threading.Thread(target=create, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["made"] + ["refused"] * 5
    assert [change.index for change in changes_after(bucket.feed)] == list(range(1, 122))
    for facts in bucket.view.list_objects(""):
        assert len(content(bucket.store(), facts)) == facts.size_bytes


def damage(folder: Path, how: str) -> None:
    path = next(folder.glob("data/*/*/*"))
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:-1])
    else:
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])


@pytest.mark.parametrize("how", ["gone", "short", "flipped"])
def test_damaged_data_are_named_and_never_copied(
    bucket: LocalBucket, tmp_path: Path, how: str
) -> None:
    facts = put(bucket.store(), "key", LARGE)
    damage(tmp_path / "bucket", how)
    if how == "flipped":
        # A read checks nothing: whoever scrubs compares with the hashes.
        assert content(bucket.store(), facts) != LARGE
    else:
        with pytest.raises(ObjectDamagedError):
            content(bucket.store(), facts)
    upload = bucket.begin("copy", NOTHING)
    # Also where the damage is outside of the range.
    source = CopySource("key", facts.version, facts.etag, 1000, 2000)
    with pytest.raises(ObjectDamagedError):
        bucket.copy_part("copy", upload, 1, source)


def test_a_closed_bucket_can_be_moved(tmp_path: Path) -> None:
    with LocalBucket(tmp_path / "bucket", Disk(), create=True) as bucket:
        put(bucket.store(), "key", LARGE)
    shutil.move(tmp_path / "bucket", tmp_path / "moved")
    with LocalBucket(tmp_path / "moved", Disk()) as bucket:
        assert content(bucket.store(), current(bucket.store(), "key")) == LARGE


def test_errors_of_a_bucket_are_ours(bucket: LocalBucket) -> None:
    bucket.close()
    bucket.close()
    with pytest.raises(ReconcileError):
        put(bucket.store(), "key")
