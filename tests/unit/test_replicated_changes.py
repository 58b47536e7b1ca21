"""What crosses by snapshots and by the log, and when: also what the source has no more,
and what became of a key in between.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ozone.manager_values import BucketLayout
from replicator.origin import unmarked
from replicator.replication import KEY_BYTES_MAX, Condition, ReplicationOptions, Stage
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import ChangeBatch, FeedPosition, ObjectProperties, Store
from tests.support.bucket_commands import write_large
from tests.support.memory_store import MemoryFeed, MemoryStore, StoreFaults
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.ozone_follower import OzoneFollower
from tests.support.ozone_twin_service import TwinService
from tests.support.replications import LaterExecutor, Replication, failing, held
from tests.support.stores import ANYTHING, content, current, keys, put

FLAT, TREE = BucketLayout.OBJECT_STORE, BucketLayout.FILE_SYSTEM_OPTIMIZED


@pytest.fixture
def buckets() -> Iterator[OzoneBuckets]:
    with TwinService() as service, OzoneBuckets(service, service.s3_endpoint) as opened:
        yield opened


def by_snapshots(folder: Path) -> tuple[MemoryStore, MemoryStore, Replication]:
    """A replication whose base is a snapshot of 20 objects."""
    source = MemoryStore("memory:a", has_snapshots=True)
    target = MemoryStore("memory:b")
    for number in range(20):
        source.write(f"k{number:02}", b"x")
    replication = Replication(source.store(), target.store(), folder)
    replication.limits = replace(replication.limits, prove_every_s=1e9)
    replication.engine.close()
    replication.start()
    # The second round compares, as the first of a process does.
    replication.run(60, seconds=10.0)
    assert held(target) == held(source)
    return source, target, replication


def test_what_is_deleted_during_a_round_is_still_copied_from_its_snapshot(tmp_path: Path) -> None:
    """OZ-054, OZ-071: the target gets the snapshot as a whole, then what came later."""
    source = MemoryStore("memory:a", has_snapshots=True)
    target = MemoryStore("memory:b")
    before = {f"k{number:02}": b"%d" % number for number in range(20)}
    for key, body in before.items():
        source.write(key, body)

    def change(name: str, key: str) -> None:
        if name == "put" and key == "k03":
            source.remove("k10")
            source.write("k11", b"overwritten")
            source.write("new", b"new")

    target.faults = replace(target.faults, before=change)
    replication = Replication(source.store(), target.store(), tmp_path)
    while replication.engine.report().checkpoint.base is None:
        replication.step()
    assert target.bodies() == before
    replication.run(60, seconds=10.0)
    assert held(target) == held(source)


def test_a_difference_goes_on_where_it_was_when_its_process_was_killed(tmp_path: Path) -> None:
    """OZ-065, OZ-067: it is not asked for again, and the base is the old one until all
    of it is at the target.
    """
    source, target, killed = by_snapshots(tmp_path)
    base = killed.engine.report().checkpoint.base
    for number in range(12):
        source.write(f"new{number:02}", b"y" * number)
    done = 0

    def cut(name: str, _key: str) -> None:
        nonlocal done
        done += name == "put"
        if done > 5:
            raise StoreUnavailableError("503")

    target.faults = replace(target.faults, before=cut)
    while killed.engine.report().condition is not Condition.WAITING:
        killed.step(10.0)
    checkpoint = killed.engine.report().checkpoint
    assert checkpoint.base is not None
    assert checkpoint.base != checkpoint.snapshot
    assert base is not None
    killed.kill()
    target.faults = replace(target.faults, before=lambda _name, _key: None)
    source.calls.clear()
    again = Replication(
        source.store(), target.store(), tmp_path, checkpoint=checkpoint, limits=killed.limits
    )
    while again.engine.report().checkpoint.base == checkpoint.base:
        again.step(0.01)
    assert "difference" not in source.calls
    assert held(target) == held(source)
    assert target.payload == sum(len(one.body) for one in source.objects.values())


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_a_difference_of_ozone_leads_to_the_new_snapshot_exactly(
    layout: BucketLayout, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-053, OZ-059, OZ-060, OZ-066: by the names that keys have in their bucket, with
    chains of renames, two keys that change places, what was renamed and changed, and
    what was deleted and made again.
    """
    store = buckets.fresh(layout)
    names = ("again", "brief", "gone", "left", "moved", "one", "right", "stays", "two")
    for key in names:
        put(store, f"d/{key}", key.encode() * 100)
    target = MemoryStore("memory:b", renames=True)
    options = ReplicationOptions(is_live=False, interval_s=1.0)
    made = Replication(store, target.store(), tmp_path, options=options)
    # Differences are all that is used: what they lack would stay.
    made.limits = replace(made.limits, prove_every_s=1e9)
    made.engine.close()
    made.start()
    follower = OzoneFollower(store, target, made)
    follower.settle()
    assert target.bodies() == {f"d/{key}": key.encode() * 100 for key in names}
    made.run(40)
    rename(store, "d/two", "d/three")
    rename(store, "d/one", "d/two")
    rename(store, "d/left", "d/between")
    rename(store, "d/right", "d/left")
    rename(store, "d/between", "d/right")
    rename(store, "d/moved", "d/there")
    put(store, "d/there", b"changed")
    assert store.writer.delete(["d/again", "d/gone"]) == []
    put(store, "d/again", b"made again")
    rename(store, "d/brief", "d/passing")
    assert store.writer.delete(["d/passing"]) == []
    follower.settle()
    assert made.engine.report().checkpoint.stage is Stage.INCREMENTAL
    assert sorted(target.bodies()) == [
        "d/again", "d/left", "d/right", "d/stays", "d/there", "d/three", "d/two"
    ]  # fmt: skip


def rename(store: Store, old: str, new: str) -> None:
    assert store.renamer is not None
    store.renamer.rename(current(store, old), new)


@pytest.mark.parametrize("layout", [FLAT, TREE])
def test_acls_and_tags_cross_by_the_log_of_ozone_without_data(
    layout: BucketLayout, buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-027 to OZ-029, OZ-086, OZ-114, OZ-117: its bytes and properties come from the
    source; an object in parts has its ETag there, too.
    """
    source, target = buckets.fresh(layout), buckets.fresh(layout)
    replication = Replication(source, target, tmp_path)
    given = ObjectProperties(metadata=(("colour", "blue"),), tags=(("a", "b"),))
    source.writer.put("d/key", b"x" * 1000, given, ANYTHING)
    write_large(source, "d/parts", bytes(9 << 20), given)
    replication.run(60)
    report = replication.engine.report()
    assert report.checkpoint.stage is Stage.LIVE
    for key in ("d/key", "d/parts"):
        found = target.reader.properties(key)
        found = replace(found, metadata=unmarked(found.metadata))
        assert found == source.reader.properties(key)
        bodies = [content(one, current(one, key)) for one in (source, target)]
        assert bodies[0] == bodies[1]
        assert current(target, key).etag == current(source, key).etag
    acl = (("group:staff", "rl"), ("user:alice", "rw"))
    for wanted in (acl, ()):
        buckets.manager.set_acl(*buckets.place(source), "d/key", wanted)
        replication.run(20)
        assert target.reader.properties("d/key").acl == wanted
    tagged = replace(given, tags=(("a", "c"),))
    source.writer.put_properties(current(source, "d/key"), tagged, tags_only=True)
    replication.run(20)
    assert target.reader.properties("d/key").tags == (("a", "c"),)
    assert replication.engine.report().sent_bytes == report.sent_bytes
    assert replication.engine.report().failed == 0


def test_clients_of_a_source_wait_for_no_syncer_and_no_target(
    buckets: OzoneBuckets, tmp_path: Path
) -> None:
    """OZ-007: they are answered while the target is down, the queue is full, and the
    syncer has ended. All of it crosses later.
    """
    source, target = buckets.fresh(FLAT), MemoryStore("memory:b")
    options = ReplicationOptions(queue_entries_max=2)
    replication = Replication(source, target.store(), tmp_path, options)
    replication.run(60)
    mend = failing(target, StoreUnavailableError("503"), {"put", "facts", "delete", "list"})
    for number in range(6):
        put(source, f"k{number}", b"x")
        replication.step()
    assert replication.engine.report().queued == 2
    replication.engine.close()
    put(source, "late", b"late")
    assert source.writer.delete(["k0"]) == []
    expected = ["k1", "k2", "k3", "k4", "k5", "late"]
    assert keys(source) == expected
    assert target.bodies() == {}
    mend()
    replication.start()
    replication.run(60)
    assert sorted(target.bodies()) == expected


def positions(source: MemoryStore) -> tuple[Store, list[FeedPosition]]:
    """A store, and after what its log was read, in order."""
    store, asked = source.store(), list[FeedPosition]()
    feed = store.feed
    assert feed is not None

    class Noting(MemoryFeed):
        def read(self, after: FeedPosition) -> ChangeBatch:
            asked.append(after)
            return super().read(after)

    return replace(store, feed=Noting(source)), asked


def test_a_log_is_followed_from_where_the_snapshot_was_made(tmp_path: Path) -> None:
    """OZ-052, OZ-077: by the next syncer, too, from the record alone; nothing that came
    meanwhile is lost, and nothing is sent twice.
    """
    source = MemoryStore("memory:a", has_feed=True, has_snapshots=True)
    target = MemoryStore("memory:b")
    for number in range(30):
        source.write(f"k{number:02}", b"old")
    made = source.newest_index
    mend = failing(target, StoreUnavailableError("503"), {"put"})
    first = Replication(source.store(), target.store(), tmp_path / "one")
    first.run(5)
    checkpoint = first.engine.report().checkpoint
    assert checkpoint.snapshot is not None
    assert checkpoint.snapshot.position == FeedPosition(source.log, made)
    first.kill()
    for number in range(5):
        source.write(f"new{number}", b"new")
    source.remove("k00")
    mend()
    store, asked = positions(source)
    again = Replication(store, target.store(), tmp_path / "two", checkpoint=checkpoint)
    again.run(60)
    assert asked[0] == checkpoint.position == FeedPosition(source.log, made)
    assert held(target) == held(source)
    assert target.payload == 30 * len(b"old") + 5 * len(b"new")


def test_a_log_is_read_on_from_the_last_index_that_was_acknowledged(tmp_path: Path) -> None:
    """OZ-088: by another syncer, from what the master has."""
    source, target = MemoryStore("memory:a", has_feed=True), MemoryStore("memory:b")
    first = Replication(source.store(), target.store(), tmp_path / "one")
    first.run(30)
    for number in range(5):
        source.write(f"k{number}", b"x")
    first.run(30)
    acknowledged = first.engine.report().checkpoint
    assert acknowledged.position == FeedPosition(source.log, 5)
    failing(target, StoreUnavailableError("503"), {"put"})
    source.write("late", b"late")
    first.run(30)
    assert first.engine.report().checkpoint.position == acknowledged.position
    first.kill()
    target.faults = StoreFaults()
    store, asked = positions(source)
    again = Replication(store, target.store(), tmp_path / "two", checkpoint=acknowledged)
    again.run(30)
    assert asked[0] == acknowledged.position
    assert held(target) == held(source)
    assert again.engine.report().checkpoint.position == FeedPosition(source.log, 6)


def test_a_first_copy_goes_on_behind_the_last_key_in_its_folder(tmp_path: Path) -> None:
    """OZ-064: the folder has no copy of the snapshot, but how far that was read."""
    source = MemoryStore("memory:a", has_snapshots=True, page_keys=100)
    target = MemoryStore("memory:b")
    for number in range(900):
        source.write(f"k{number:03}", b"")
    later = LaterExecutor()
    first = Replication(source.store(), target.store(), tmp_path, later=later)
    while not first.engine.report().checkpoint.last_key:
        first.step(1.0)
        while later.waiting:
            later.run()
    last_key = first.engine.report().checkpoint.last_key
    first.kill()
    looked = set[str]()

    def before(name: str, key: str) -> None:
        if name == "facts":
            looked.add(key)

    target.faults = replace(target.faults, before=before)
    again = Replication(source.store(), target.store(), tmp_path)
    while again.engine.report().checkpoint.base is None:
        again.step(1.0)
    assert source.snapshots_made == 1
    assert looked
    assert min(looked) > last_key
    assert held(target) == held(source)


def test_a_key_that_no_record_can_hold_is_not_recorded(tmp_path: Path) -> None:
    """Stores of Ozone have longer keys than a master takes; an earlier one will do."""
    source = MemoryStore("memory:a", has_snapshots=True)
    target = MemoryStore("memory:b")
    for number in range(450):
        # Each page of a comparison but the last one ends with a long one.
        tail = "x" * KEY_BYTES_MAX if number % 200 == 199 else ""
        for store in (source, target):
            store.write(f"k{number:03}{tail}", b"x")
    later = LaterExecutor()
    replication = Replication(
        source.store(), target.store(), tmp_path, later=later, run_later=frozenset({"comparer"})
    )
    seen = set[str]()
    for _ in range(20):
        replication.step(6.0)
        seen.add(replication.engine.report().checkpoint.last_key)
        while later.waiting:
            later.run()
    assert replication.engine.report().checkpoint.base is not None
    assert max(map(len, seen)) <= KEY_BYTES_MAX


def test_the_lag_by_snapshots_is_at_least_that_of_each_change(tmp_path: Path) -> None:
    """OZ-072: at most the interval and the time of two rounds."""
    source, target, replication = by_snapshots(tmp_path)
    clock = replication.clock
    source._now_ms = clock.now_ms
    replication.run(20, seconds=10.0)
    assert replication.engine.report().lag_p50_ms is None
    before = replication.engine.report().checkpoint.base
    while replication.engine.report().checkpoint.base == before:
        replication.step(1.0)
    # Just after a snapshot: the next one has it, an interval later.
    source.write("new", b"new")
    source.touch("k01", ObjectProperties(tags=(("team", "x"),)))
    written_ms = clock.ms
    while held(target) != held(source):
        replication.step(1.0)
    lag_ms = clock.ms - written_ms
    replication.run(5)
    interval_s = ReplicationOptions().interval_s
    report = replication.engine.report()
    assert report.lag_p50_ms is not None
    assert lag_ms - 1_000 <= report.lag_p50_ms <= 1_000 * (interval_s + 10)


def test_a_key_that_is_gone_when_its_change_is_applied_is_settled_by_a_later_one(
    tmp_path: Path,
) -> None:
    """OZ-087: it is no error, and acknowledged with the change that says so."""
    source, target = MemoryStore("memory:a", has_feed=True), MemoryStore("memory:b")
    replication = Replication(source.store(), target.store(), tmp_path)
    # The first proof is over.
    replication.run(100)
    source.write("brief", b"brief")
    # Gone, and its log does not say so yet.
    kept = source.objects.pop("brief")
    before = source.newest_index - 1
    replication.run(30)
    report = replication.engine.report()
    assert (report.condition, report.failed, report.fault) == (Condition.ACTIVE, 0, None)
    assert report.checkpoint.position is not None
    assert report.checkpoint.position.index == before
    source.objects["brief"] = kept
    source.remove("brief")
    replication.run(30)
    position = replication.engine.report().checkpoint.position
    assert position is not None
    assert position.index == source.newest_index
    assert "brief" not in target.objects


def test_a_comparison_settles_a_key_that_is_gone_and_of_which_the_log_says_no_more(
    tmp_path: Path,
) -> None:
    source, target = MemoryStore("memory:a", has_feed=True), MemoryStore("memory:b")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(30)
    source.write("brief", b"brief")
    del source.objects["brief"]
    replication.run(100)
    report = replication.engine.report()
    assert (report.queued, report.differences) == (0, 0)
    assert report.checkpoint.position is not None
    assert report.checkpoint.position.index == source.newest_index


def test_what_was_queued_for_prefixes_that_are_wanted_no_more_is_passed_over(
    tmp_path: Path,
) -> None:
    source, target = MemoryStore("memory:a", has_feed=True), MemoryStore("memory:b")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(100)
    source.write("a/brief", b"brief")
    del source.objects["a/brief"]
    source.write("a/late", b"late")
    source.write("b/k", b"k")
    replication.engine.receive()
    replication.change(prefixes=("b/",))
    replication.run(30)
    report = replication.engine.report()
    assert target.bodies().keys() == {"b/k"}
    assert report.queued == 0


def test_a_delete_reads_nothing_of_an_object(tmp_path: Path) -> None:
    """OZ-085: the source is only asked whether the key is there, for a log that is read
    again must not delete what is there by now.
    """
    source, target = MemoryStore("memory:a", has_feed=True), MemoryStore("memory:b")
    for number in range(10):
        source.write(f"k{number}", b"x")
    replication = Replication(source.store(), target.store(), tmp_path)
    # The first proof is over.
    replication.run(100)
    source.calls.clear()
    for number in range(5):
        source.remove(f"k{number}")
    replication.run(20)
    assert held(target) == held(source)
    assert source.calls.count("facts") == 5
    assert not {"read", "properties", "list"} & set(source.calls)


def test_the_log_is_read_on_while_an_object_is_sent(tmp_path: Path) -> None:
    """OZ-083: up to the limit of the queue."""
    source, target = MemoryStore("memory:a", has_feed=True), MemoryStore("memory:b")
    later = LaterExecutor()
    replication = Replication(
        source.store(),
        target.store(),
        tmp_path,
        later=later,
        options=ReplicationOptions(queue_entries_max=40),
    )
    replication.run(30)
    source.write("slow", b"slow")
    replication.run(5)
    assert len(later.waiting) == 1
    for number in range(60):
        source.write(f"k{number}", b"x")
    for _ in range(10):
        replication.engine.receive()
    assert replication.engine.report().queued == 40
    assert "slow" not in target.objects
    for _ in range(300):
        while later.waiting:
            later.run()
        replication.step()
    assert held(target) == held(source)


def test_no_key_is_at_the_target_without_its_data(tmp_path: Path) -> None:
    """OZ-005, OZ-015: whatever is listed there can be read, at every write."""
    source = MemoryStore("memory:a", has_feed=True)
    target = MemoryStore("memory:b")
    written = set[tuple[str, bytes]]()
    torn, looks = list[str](), 0

    def look(name: str, _key: str) -> None:
        nonlocal looks
        if name in ("put", "write_part", "copy_part", "complete"):
            looks += 1
            torn.extend(
                key for key, one in target.objects.items() if (key, one.body) not in written
            )

    target.faults = replace(target.faults, after=look)
    replication = Replication(source.store(), target.store(), tmp_path)
    for turn in range(5):
        for number in range(6):
            body = bytes([turn]) * (1 + 200_000 * (number == 0))
            source.write(f"k{number}", body)
            written.add((f"k{number}", body))
        replication.run(20)
    replication.run(60)
    assert (torn, looks > 30) == ([], True)
    assert held(target) == held(source)
