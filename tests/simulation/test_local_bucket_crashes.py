"""A local bucket whose process is killed, or whose machine loses power, at any moment:
each object is old or new and whole, nothing is left behind, each change is logged once.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from replicator.stores.local import LocalBucket
from replicator.stores.local_database import _UPGRADES
from replicator.stores.port import (
    Change,
    ChangeKind,
    CopySource,
    ObjectFacts,
    ObjectProperties,
    SnapshotView,
    UploadId,
)
from runtime.disk import Disk, Operation
from tests.support.disk import Crash, ImagingDisk
from tests.support.stores import ANYTHING, NOTHING, changes_after, content, current, put

pytestmark = pytest.mark.crashes

# Bytes in a row, so that small bodies take both ways.
ROW_BYTES = 100
BLUE = ObjectProperties(metadata=(("colour", "blue"),))


def body(seed: int, length: int = 300) -> bytes:
    return random.Random(seed).randbytes(length)


@dataclass(frozen=True)
class Seen:
    """All that a bucket has, read through its ports."""

    objects: tuple[tuple[str, bytes, ObjectProperties], ...]
    versions: tuple[tuple[str, str, bool], ...]
    changes: tuple[Change, ...]
    snapshots: tuple[tuple[str, str, bytes], ...]
    parts: tuple[tuple[int, str], ...]


def see(bucket: LocalBucket) -> Seen:
    store, view = bucket.store(), bucket.view
    versions = list(view.list_versions(""))
    for facts in versions:
        assert facts.is_delete_marker or len(content(store, facts)) == facts.size_bytes
    # Positions before are trimmed: the log is read from where it begins.
    begun = sqlite3.connect(bucket._folder / "bucket.db")
    (trimmed,) = begun.execute("SELECT trimmed FROM history").fetchone()
    begun.close()
    return Seen(
        tuple(
            (facts.key, content(store, facts), view.properties(facts.key))
            for facts in view.list_objects("")
        ),
        tuple((facts.key, facts.version, facts.is_delete_marker) for facts in versions),
        tuple(changes_after(bucket.feed, trimmed)),
        tuple(
            (name, facts.key, content_of(view, facts))
            for name in ("one", "two")
            if (found := bucket.snapshots.find(name)) is not None
            and (view := bucket.snapshots.open(found))
            for facts in view.lister.list_objects("")
        ),
        tuple(
            (part.number, part.etag)
            for key, upload in bucket.uploads("")
            for part in bucket.parts(key, upload)
        ),
    )


def content_of(view: SnapshotView, facts: ObjectFacts) -> bytes:
    return view.reader.read_whole(facts).body


def upload_of(bucket: LocalBucket) -> UploadId:
    return next(bucket.uploads("up"))[1]


def write_part(number: int, seed: int, length: int = 300) -> Callable[[LocalBucket], object]:
    return lambda bucket: bucket.write_part("up", upload_of(bucket), number, body(seed, length))


def copy(bucket: LocalBucket) -> object:
    facts = current(bucket.store(), "file")
    source = CopySource("file", facts.version, facts.etag, 50, 250)
    return bucket.copy_part("up", upload_of(bucket), 3, source)


def complete(bucket: LocalBucket) -> object:
    upload = upload_of(bucket)
    parts = list(bucket.parts("up", upload))[:3]
    return bucket.complete("up", upload, parts, NOTHING, ANYTHING)


def reopen(_: LocalBucket) -> None:
    """The test closes the bucket and opens it again: what it wrote so far is no longer
    looked through when the bucket is opened.
    """


STEPS: tuple[Callable[[LocalBucket], object], ...] = (
    lambda bucket: put(bucket.store(), "row", body(1, 50)),
    lambda bucket: put(bucket.store(), "file", body(2)),
    lambda bucket: put(bucket.store(), "file", body(3)),
    lambda bucket: bucket.put_properties(current(bucket.store(), "file"), BLUE),
    lambda bucket: bucket.begin("up", BLUE),
    write_part(2, 5),
    write_part(1, 4, 20),
    write_part(4, 6),
    write_part(2, 7),
    copy,
    complete,
    reopen,
    lambda bucket: bucket.snapshots.create("one"),
    lambda bucket: bucket.rename(current(bucket.store(), "file"), "renamed"),
    lambda bucket: bucket.snapshots.create("two"),
    lambda bucket: bucket.delete(["renamed", "missing", "row"]),
    lambda bucket: put(bucket.store(), "row", b""),
    lambda bucket: bucket.begin("up", NOTHING),
    write_part(1, 8),
    lambda bucket: bucket.abort("up", upload_of(bucket)),
    lambda bucket: bucket.trim(7),
    lambda bucket: put(bucket.store(), "file", body(9)),
    lambda bucket: bucket.snapshots.delete("one"),
    lambda bucket: bucket.trim(9),
    lambda bucket: bucket.snapshots.delete("two"),
)


# None of these may be there, whatever happened.
UNUSED_ROWS = (
    "SELECT count(*) FROM contents WHERE content NOT IN (SELECT content FROM versions"
    " WHERE content IS NOT NULL UNION SELECT content FROM parts)",
    "SELECT count(*) FROM segments WHERE content NOT IN (SELECT content FROM contents)",
    "SELECT count(*) FROM blobs WHERE blob NOT IN (SELECT blob FROM segments)",
    "SELECT count(*) FROM parts WHERE upload NOT IN (SELECT upload FROM uploads)",
)


def files_and_rows(folder: Path) -> tuple[set[str], set[str]]:
    """The data files that are there, and those that have a row."""
    connection = sqlite3.connect(folder / "bucket.db")
    rows = connection.execute("SELECT file FROM blobs WHERE file IS NOT NULL").fetchall()
    left = [connection.execute(query).fetchone() for query in UNUSED_ROWS]
    connection.close()
    assert left == [(0,)] * len(UNUSED_ROWS)
    found = {str(path.relative_to(folder / "data")) for path in folder.glob("data/*/*/*")}
    return found, {name for (name,) in rows}


def check_clean(folder: Path) -> None:
    found, named = files_and_rows(folder)
    assert found == named
    connection = sqlite3.connect(folder / "bucket.db")
    left = connection.execute("SELECT (SELECT count(*) FROM garbage), count(*) FROM writers")
    assert left.fetchone() == (0, 0)
    connection.close()
    assert list((folder / "writers").glob("*")) == []
    assert all(any(path.iterdir()) for path in folder.glob("data/*/*"))


def test_a_bucket_cut_short_anywhere_is_whole(memory_folder: Path) -> None:
    folder = memory_folder / "bucket"
    # Keeps the files of the database in place while the other has it open.
    with LocalBucket(folder, Disk(), create=True) as witness:
        disk = ImagingDisk(folder, memory_folder / "images")
        bucket = LocalBucket(folder, disk, body_bytes_max=ROW_BYTES)
        states, done = [see(witness)], [0]
        for step in STEPS:
            if step is reopen:
                bucket.close()
                bucket = LocalBucket(folder, disk, body_bytes_max=ROW_BYTES)
            else:
                step(bucket)
            states.append(see(witness))
            done.append(len(disk.operations))
        bucket.close()
    crashes = set[Crash]()
    for image in disk.finish():
        # What the step in the middle of which it ended began with, and what it made.
        # An image that was taken after the step's last operation has all of it.
        is_after = image.crash not in (Crash.KILL, Crash.TORN)
        number = image.number + is_after
        step_number = sum(end <= number for end in done) - 1
        expected = states[step_number : step_number + 2]
        with LocalBucket(image.folder, Disk()) as crashed:
            found = see(crashed)
            assert found in expected, image
            check_clean(image.folder)
            # It goes on.
            facts = put(crashed.store(), "after", body(10))
            assert content(crashed.store(), facts) == body(10)
            assert see(crashed).changes[:-1] == found.changes
        check_clean(image.folder)
        crashes.add(image.crash)
        shutil.rmtree(image.folder)
    assert crashes == set(Crash)


def test_a_bucket_of_the_first_format_is_upgraded_whole_or_not_at_all(
    memory_folder: Path,
) -> None:
    folder = memory_folder / "bucket"
    folder.mkdir()
    connection = sqlite3.connect(folder / "bucket.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(_UPGRADES[0])
    disk = ImagingDisk(folder, memory_folder / "images")
    with LocalBucket(folder, disk) as bucket:
        log = bucket.feed.position().log
        connection.close()
        put(bucket.store(), "key")
    images = 0
    for image in disk.finish():
        with LocalBucket(image.folder, Disk()) as crashed:
            assert crashed.feed.position().log != log
            assert crashed.snapshots.create("one").position == crashed.feed.position()
            put(crashed.store(), "after")
        check_clean(image.folder)
        images += 1
    assert images > 5


# What was written to a key: seed, bytes a part, parts (0: in one piece); None: deleted.
Write = tuple[int, int, int] | None
# A key of this writer, and whether the write is over.
Report = tuple[str, Write, bool]


class MortalDisk(Disk):
    """Kills its process before or after the last of so many operations."""

    def __init__(self, operations: int, *, is_last_done: bool) -> None:
        self._left = operations
        self._is_last_done = is_last_done

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        """See Disk."""
        self._left -= 1
        if self._left > 0 or self._is_last_done:
            super().durable(operation, path, act, torn)
        if self._left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def write_until_killed(
    folder: Path, writer: int, seed: int, history: int, reports: Connection
) -> None:
    """Write at random to keys of its own; report each write before and after it."""
    chance = random.Random(seed)
    disk = MortalDisk(chance.randrange(1, 150), is_last_done=chance.random() < 0.5)
    with LocalBucket(folder, disk, body_bytes_max=ROW_BYTES, history_changes_max=history) as bucket:
        while True:
            key = f"{writer}/{chance.randrange(4)}"
            made = (chance.randrange(1 << 30), chance.choice([0, 40, 300, 5000]), 3)
            write = chance.choice([None, made, (*made[:2], 0), (*made[:2], 0)])
            reports.send((key, write, False))
            if write is None:
                bucket.delete([key])
            elif not write[2]:
                put(bucket.store(), key, written(write))
            else:
                upload = bucket.begin(key, NOTHING)
                parts = [
                    bucket.write_part(key, upload, i, body(write[0] + i, write[1]))
                    for i in (3, 1, 2)
                ]
                bucket.complete(key, upload, parts, NOTHING, ANYTHING)
            reports.send((key, write, True))


def written(write: Write) -> bytes:
    """The bytes of an object that was written so."""
    assert write is not None
    seed, length, parts = write
    if not parts:
        return body(seed, length)
    return b"".join(body(seed + i, length) for i in range(1, parts + 1))


@dataclass
class Expected:
    """What the reports of one writer promise of its keys."""

    values: dict[str, Write]
    changes: list[tuple[str, bool]]
    in_flight: tuple[str, Write] | None = None

    def take(self, report: Report) -> None:
        key, write, is_over = report
        self.in_flight = None if is_over else (key, write)
        if is_over:
            self._apply(key, write)

    def settle(self, changes: list[tuple[str, bool]]) -> None:
        """Take the write that was cut short as done, if it was logged."""
        if self.in_flight is not None and changes != self.changes:
            self._apply(*self.in_flight)
        self.in_flight = None
        assert changes == self.changes

    def _apply(self, key: str, write: Write) -> None:
        # The removal of what is not there is no change.
        if write is not None or self.values.get(key) is not None:
            self.changes.append((key, write is None))
        self.values[key] = write


def start_writer(
    folder: Path, writer: int, seed: int, history: int
) -> tuple[ForkServerProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=write_until_killed, args=(folder, writer, seed, history, sender))
    child.start()
    sender.close()
    return child, receiver


@pytest.mark.parametrize("writers", [1, 2])
def test_killed_writers_leave_each_object_old_or_new(tmp_path: Path, writers: int) -> None:
    """Writers are killed at a random moment, time and again. Where there are two, one
    goes on beside the other's remains and is never blocked.
    """
    folder = tmp_path / "bucket"
    LocalBucket(folder, Disk(), create=True).close()
    values: list[dict[str, Write]] = [{} for _ in range(writers)]
    orphans = 0
    # One alone does so much at most; two may be far ahead of each other.
    history = 200 if writers == 1 else 100_000
    for number in range(40 // writers):
        with LocalBucket(folder, Disk()) as bucket:
            begun = bucket.feed.position()
        children = [start_writer(folder, i, 1000 * number + i, history) for i in range(writers)]
        for i, (child, receiver) in enumerate(children):
            expected = Expected(values[i], [])
            with suppress(EOFError):
                while True:
                    expected.take(receiver.recv())
            child.join()
            assert child.exitcode == -signal.SIGKILL
            receiver.close()
            if i == writers - 1:
                found, named = files_and_rows(folder)
                orphans += len(found - named)
            with LocalBucket(folder, Disk()) as bucket:
                expected.settle(
                    [
                        (change.key, change.kind is ChangeKind.DELETE)
                        for change in changes_after(bucket.feed, begun)
                        if change.key.startswith(f"{i}/")
                    ]
                )
                for key, write in values[i].items():
                    facts = bucket.view.facts(key)
                    assert (facts is None) == (write is None)
                    if facts is not None:
                        assert content(bucket.store(), facts) == written(write)
                indexes = [change.index for change in changes_after(bucket.feed, begun)]
                first = begun.index + 1
                assert indexes == list(range(first, first + len(indexes)))
        check_clean(folder)
    # Otherwise the writers were never killed where it matters.
    assert orphans
