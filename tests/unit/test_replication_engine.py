"""A replication brings a target to its source, follows it, and survives failures."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    ReplicationOptions,
    Stage,
)
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import ChangeBatch, ChangeFeed, FeedPosition, ObjectProperties
from runtime.errors import BusyError
from tests.support.bucket_sync import LIMITS
from tests.support.memory_store import UNPROVEN, MemoryStore
from tests.support.replications import LaterExecutor, Replication, failing, held

BIG = bytes(LIMITS.part_bytes * 4)


def pair(**choices: bool) -> tuple[MemoryStore, MemoryStore]:
    source = MemoryStore("memory:a", has_feed=choices.pop("has_feed", True), **choices)
    return source, MemoryStore("memory:b", renames=True)


def live(folder: Path, **choices: bool) -> tuple[MemoryStore, MemoryStore, Replication]:
    """A replication that follows a log, of three objects."""
    source, target = pair(**choices)
    for key in ("a", "b", "c"):
        source.write(key, key.encode())
    replication = Replication(source.store(), target.store(), folder)
    replication.run(30)
    assert replication.engine.report().checkpoint.stage is Stage.LIVE
    return source, target, replication


def test_what_was_there_arrives_and_then_what_changes(tmp_path: Path) -> None:
    """OZ-026, OZ-051, OZ-101, OZ-131."""
    source, target = pair(has_snapshots=True)
    for number in range(40):
        source.write(f"k{number}", b"old")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.step()
    source.write("k1", b"new")
    source.remove("k2")
    source.write("late", b"late")
    replication.run(40)
    assert held(target) == held(source)
    report = replication.engine.report()
    assert report.checkpoint.stage is Stage.LIVE
    assert report.condition is Condition.ACTIVE
    source.remove("k3")
    source.write("later", b"later")
    replication.run(20)
    assert held(target) == held(source)
    assert replication.engine.report().checkpoint.position is not None


def test_renames_and_new_tags_move_no_data(tmp_path: Path) -> None:
    """OZ-028, OZ-118."""
    source, target, replication = live(tmp_path)
    sent = target.payload
    source.move("a", "z")
    source.touch("b", ObjectProperties(tags=(("team", "x"),)))
    replication.run(20)
    assert held(target) == held(source)
    assert target.payload == sent


def test_a_directory_is_renamed_and_deleted_as_a_whole(tmp_path: Path) -> None:
    source, target, replication = live(tmp_path)
    for number in range(70):
        source.write(f"d/{number}", b"x" * number)
    replication.run(40)
    sent = target.payload
    source.move("d/", "e/")
    source.write("e/new", b"new")
    replication.run(40)
    assert held(target) == held(source)
    assert target.payload == sent + 3
    source.remove_below("e/")
    replication.run(40)
    assert held(target) == held(source)


def test_many_deletes_cross_in_few_requests(tmp_path: Path) -> None:
    """OZ-010, OZ-116."""
    source, target, replication = live(tmp_path)
    for number in range(200):
        source.write(f"d{number}", b"x")
    replication.run(60)
    target.calls.clear()
    for number in range(200):
        source.remove(f"d{number}")
    replication.run(60)
    assert held(target) == held(source)
    assert target.calls.count("delete") <= 25


def test_a_change_that_is_overtaken_is_done_with_the_later_one(tmp_path: Path) -> None:
    source, target, replication = live(tmp_path)
    for number in range(15):
        source.write("hot", b"%d" % number)
    sent = target.payload
    replication.run(20)
    assert held(target) == held(source)
    assert target.payload - sent <= 4


def test_without_a_log_it_compares_in_rounds_and_never_says_live(tmp_path: Path) -> None:
    source, target = pair(has_feed=False)
    source.write("a", b"a")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(20)
    assert held(target) == held(source)
    source.write("b", b"b")
    source.remove("a")
    replication.run(5)
    assert held(target) != held(source)
    replication.run(40, seconds=10.0)
    assert held(target) == held(source)
    report = replication.engine.report()
    assert report.checkpoint.stage is Stage.INCREMENTAL
    assert report.differences == 0


def test_snapshots_are_let_go_of_and_an_empty_round_lists_nothing(tmp_path: Path) -> None:
    """OZ-008, OZ-059, OZ-068, OZ-069."""
    source, target = pair(has_feed=False, has_snapshots=True)
    for number in range(30):
        source.write(f"k{number}", b"x")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.limits = replace(replication.limits, prove_every_s=1e9)
    replication.engine.close()
    replication.start()
    replication.run(40, seconds=10.0)
    assert held(target) == held(source)
    assert len(source.snapshots) <= 2
    source.calls.clear()
    replication.run(40, seconds=10.0)
    assert "difference" in source.calls
    assert not any(call.startswith("list") for call in source.calls)
    source.write("k1", b"new")
    replication.run(40, seconds=10.0)
    assert held(target) == held(source)


def test_few_of_many_new_objects_are_looked_for_before_they_are_written(tmp_path: Path) -> None:
    """Those of a first copy neither: the write has a condition."""
    source, target = pair()
    for number in range(400):
        source.write(f"k{number:03}", b"x")
    # The comparison has listed before: somebody writes there later.
    target.faults = replace(
        target.faults,
        before=lambda name, _key: target.write("k300", b"foreign") if name == "put" else None,
    )
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(200)
    assert held(target).keys() == held(source).keys()
    assert target.calls.count("facts") < 200
    target.faults = replace(target.faults, before=lambda _name, _key: None)
    source.write("k300", b"another")
    replication.run(100)
    assert held(target) == held(source)


def test_a_first_copy_asks_the_source_once_for_each_object(tmp_path: Path) -> None:
    """The comparison has listed what it is: the read is pinned to that."""
    source, target = pair(has_feed=False)
    for number in range(100):
        source.write(f"k{number:03}", b"x")

    def overwrite(name: str, key: str) -> None:
        if (name, key) == ("read", "k050") and len(source.objects[key].body) == 1:
            source.write(key, b"later")

    source.faults = replace(source.faults, before=overwrite)
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(40)
    assert held(target) == held(source)
    # This store looks at an object as it is read; one was another one by then.
    assert source.calls.count("facts") <= source.calls.count("read") + 2


def test_a_pause_keeps_its_place_and_resends_nothing(tmp_path: Path) -> None:
    """OZ-130: also in the middle of a large object."""
    source, target, replication = live(tmp_path)
    source.write("big", BIG)
    parts = 0

    def before(name: str, _key: str) -> None:
        nonlocal parts
        if name == "write_part":
            parts += 1
            if parts == 2:
                replication.change(desired=DesiredState.PAUSED)

    target.faults = replace(target.faults, before=before)
    replication.run(10)
    assert replication.engine.report().condition is Condition.PAUSED
    assert "big" not in target.objects
    sent = target.payload
    replication.run(50)
    assert target.payload == sent
    replication.change(desired=DesiredState.ENABLED)
    replication.run(30)
    assert held(target) == held(source)
    assert target.payload == len(BIG) + 3


def test_a_cancelled_one_leaves_the_target_and_nothing_else(tmp_path: Path) -> None:
    """OZ-128."""
    source, target, replication = live(tmp_path, has_snapshots=True)
    replication.change(desired=DesiredState.CANCELLED)
    replication.run(5)
    assert replication.engine.is_over
    assert replication.engine.report().condition is Condition.CANCELLED
    assert not source.snapshots
    assert not list(tmp_path.iterdir())
    assert held(target) == held(source)


@pytest.mark.parametrize("knows", [True, False])
def test_what_killed_syncers_have_left_at_the_source_is_removed(
    tmp_path: Path, *, knows: bool
) -> None:
    """OZ-068, OZ-126: snapshots of this replication that no checkpoint names, whatever
    their numbers; nobody else's.
    """
    source, target, replication = live(tmp_path, has_snapshots=True)
    (base,) = source.snapshots
    checkpoint = replication.engine.report().checkpoint
    assert checkpoint.base is not None
    replication.kill()
    snapshots = source.store().snapshots
    assert snapshots is not None
    prefix = base.rpartition("-")[0]
    others = ("theirs", f"{prefix}-daily", "treefold-0123456789ab-1")
    for name in (f"{prefix}-7", f"{prefix}-12", *others):
        snapshots.create(name)
    if not knows:
        checkpoint = replace(checkpoint, stage=Stage.INCREMENTAL, base=None, position=None)
    again = Replication(source.store(), target.store(), tmp_path, checkpoint=checkpoint)
    again.run(40)
    if knows:
        # While the log is followed, a snapshot is made from time to time.
        again.run(20, seconds=100)
    held_now = {one.name for one in again.engine._machine.snapshots}
    assert 1 <= len(held_now) <= 2
    assert set(source.snapshots) == {*held_now, *others}
    again.change(desired=DesiredState.CANCELLED)
    snapshots.create(f"{prefix}-3")
    again.run(5)
    assert set(source.snapshots) == set(others)


def test_a_prefix_that_is_added_is_brought_over_beside_the_log(tmp_path: Path) -> None:
    """OZ-161."""
    source, target = pair(has_snapshots=True)
    for key in ("in/a", "in/b", "out/c"):
        source.write(key, key.encode())
    replication = Replication(source.store(), target.store(), tmp_path, prefixes=("in/",))
    replication.run(30)
    assert sorted(target.objects) == ["in/a", "in/b"]
    source.move("in/a", "out/a")
    source.move("out/c", "in/c")
    replication.run(30)
    assert sorted(target.objects) == ["in/b", "in/c"]
    known_ms = replication.engine.report().oldest_unproven_ms
    assert known_ms is not None
    source.write("out/old", b"old")
    replication.run(20)
    replication.change(prefixes=("in/", "out/"))
    replication.engine.work()
    # There are changes that the target lacks, and nobody knows of what age.
    assert replication.engine.report().oldest_unproven_ms is None
    replication.run(30)
    assert held(target) == held(source)
    assert (replication.engine.report().oldest_unproven_ms or 0) > known_ms
    assert replication.engine.report().checkpoint.prefixes == ("in/", "out/")
    source.write("out/d", b"d")
    replication.run(30)
    assert held(target) == held(source)


@pytest.mark.parametrize("wanted", [(), ("in/", "out/"), ("out/",)])
def test_a_proof_does_not_outlive_its_prefixes(wanted: tuple[str, ...], tmp_path: Path) -> None:
    """OZ-161: nothing is called equal of keys that were not compared so far."""
    source, target = pair()
    for key in ("in/a", "out/b"):
        source.write(key, key.encode())
    later = LaterExecutor()
    replication = Replication(
        source.store(), target.store(), tmp_path, prefixes=("in/",), later=later
    )
    engine = replication.engine

    def run(steps: int) -> None:
        for _ in range(steps):
            while later.waiting:
                later.run()
            replication.step()

    run(100)
    before = engine.report()
    assert before.proven_ms is not None
    replication.change(prefixes=wanted)
    for _ in range(20):
        # Nothing is copied meanwhile.
        replication.step()
        report = engine.report()
        assert (report.proven_ms, report.proven_position, report.differences) == (None, None, None)
    run(100)
    after = engine.report()
    assert "out/b" in target.objects
    assert (after.proven_ms or 0) > before.proven_ms
    assert after.differences == 0
    replication.change(prefixes=("out/",))
    replication.step()
    # What was proven of more keys holds for some of them.
    assert engine.report().proven_ms == after.proven_ms


def test_prefixes_that_change_at_the_start_hold_up_neither_log_nor_queue(tmp_path: Path) -> None:
    """OZ-084, OZ-161: the log is captured before what was added is compared."""
    source, target, replication = live(tmp_path)
    replication.change(prefixes=("a", "b"))
    replication.step()
    for key in ("a", "b"):
        source.write(key, b"new")
    replication.engine.receive()
    before = replication.engine.report()
    assert before.queued == 2
    replication.kill()
    again = Replication(
        source.store(),
        target.store(),
        tmp_path,
        prefixes=("a", "b"),
        checkpoint=before.checkpoint,
        later=(later := LaterExecutor()),
    )
    again.change(prefixes=("a", "b", "c"))
    again.engine.work()
    source.write("c", b"new")
    again.engine.receive()
    assert again.engine.report().queued == 3
    for _ in range(10):
        # The first key takes longer than all others.
        while len(later.waiting) > 1:
            later.run(1)
        again.step()
    for _ in range(30):
        while later.waiting:
            later.run()
        again.step()
    assert held(target) == held(source)
    assert again.engine.report().queued == 0
    assert again.engine.report().checkpoint.position == FeedPosition("memory", source.newest_index)


def test_what_is_queued_and_not_applied_is_not_acknowledged_at_the_end(tmp_path: Path) -> None:
    """OZ-135: also where a process ends before it has applied anything."""
    source, target, replication = live(tmp_path)
    before = replication.engine.report().checkpoint
    replication.kill()
    source.write("late", b"late")
    again = Replication(source.store(), target.store(), tmp_path, checkpoint=before)
    again.engine.receive()
    again.engine.work()
    again.engine.receive()
    again.engine.close()
    assert "late" not in target.objects
    assert again.engine.report().checkpoint.position == before.position


def test_other_prefixes_are_compared_from_their_start(tmp_path: Path) -> None:
    """OZ-056, OZ-161: a last key is about the prefixes that were compared so far."""
    source, target = pair()
    for key in ("in/a", "out/b"):
        source.write(key, key.encode())
    begun = Checkpoint(position=FeedPosition("memory", 2), last_key="out/b", compared=("out/",))
    replication = Replication(
        source.store(), target.store(), tmp_path, prefixes=("in/",), checkpoint=begun
    )
    replication.run(30)
    assert sorted(target.objects) == ["in/a"]


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    """OZ-143."""
    _, _, replication = live(tmp_path)
    with pytest.raises(BusyError):
        Replication(replication.source, replication.target, tmp_path)


@pytest.mark.parametrize("capabilities", [None, UNPROVEN])
def test_a_ring_of_buckets_comes_to_rest(capabilities: object, tmp_path: Path) -> None:
    """OZ-155, OZ-156."""
    kinds = {"capabilities": capabilities} if capabilities else {}
    stores = [MemoryStore(f"memory:{name}", has_feed=True, **kinds) for name in "abc"]  # type: ignore[arg-type]
    ring = [
        Replication(stores[at].store(), stores[(at + 1) % 3].store(), tmp_path / str(at))
        for at in range(3)
    ]
    for one in stores:
        one.write(f"from {one.address}", one.address.encode())
    for _ in range(200):
        for one in ring:
            one.step()
    assert held(stores[0]) == held(stores[1]) == held(stores[2])
    changes = [one.newest_index for one in stores]
    for _ in range(100):
        for one in ring:
            one.step()
    assert [one.newest_index for one in stores] == changes


def test_of_two_writes_to_a_pair_the_newer_counts_on_both_sides(tmp_path: Path) -> None:
    """OZ-158."""
    now = [1_700_000_000_000]
    stores = [MemoryStore(f"memory:{name}", has_feed=True, now_ms=lambda: now[0]) for name in "ab"]
    options = ReplicationOptions(newest_wins=True)
    both = [
        Replication(one.store(), other.store(), tmp_path / one.address[-1], options=options)
        for one, other in (stores, stores[::-1])
    ]

    def run() -> None:
        for _ in range(60):
            for one in both:
                one.step()
                now[0] += 100

    run()
    stores[0].write("k", b"older")
    now[0] += 5_000
    stores[1].write("k", b"newer")
    stores[0].write("same", b"aa")
    stores[1].write("same", b"bb")
    run()
    assert held(stores[0]) == held(stores[1])
    assert stores[0].objects["k"].body == b"newer"
    stores[0].remove("k")
    run()
    assert "k" not in stores[1].objects


def test_what_is_known_of_the_target_is_reported(tmp_path: Path) -> None:
    source, target, replication = live(tmp_path)
    replication.run(100)
    report = replication.engine.report()
    assert report.differences == 0
    assert report.proven_position == report.checkpoint.position
    assert report.proof_level.startswith("recorded")
    assert report.oldest_unproven_ms is not None
    assert replication.clock.ms - report.oldest_unproven_ms <= 1_000
    mend = failing(target, StoreUnavailableError("503"), {"put"})
    source.write("late", b"late")
    replication.run(60, seconds=1.0)
    report = replication.engine.report()
    assert report.oldest_unproven_ms is not None
    assert replication.clock.ms - report.oldest_unproven_ms >= 50_000
    mend()
    replication.run(60, seconds=1.0)
    report = replication.engine.report()
    assert report.lag_p99_ms is not None
    assert report.applied >= 1


def test_the_lag_behind_a_log_is_told_as_median_and_99th_percentile(tmp_path: Path) -> None:
    """OZ-090: from the change to the target's answer, of seconds at most while all
    answers, and as long as it was where the target did not.
    """
    source, target, replication = live(tmp_path)
    source._now_ms = replication.clock.now_ms
    replication.run(100)
    for number in range(150):
        source.write(f"k{number}", b"x")
        replication.run(3)
    report = replication.engine.report()
    assert report.lag_p50_ms is not None
    assert report.lag_p99_ms is not None
    assert report.lag_p50_ms <= report.lag_p99_ms <= 1_000
    mend = failing(target, StoreUnavailableError("503"), {"put"})
    for number in range(4):
        source.write(f"late{number}", b"x")
    replication.run(60)
    mend()
    replication.run(120)
    late = replication.engine.report()
    assert late.lag_p50_ms == report.lag_p50_ms
    assert late.lag_p99_ms is not None
    assert 5_000 <= late.lag_p99_ms <= 12_000


def test_a_difference_that_a_comparison_finds_is_mended_and_counted(tmp_path: Path) -> None:
    """OZ-003: somebody else has changed the target."""
    source, target, replication = live(tmp_path)
    replication.limits = replace(replication.limits, prove_every_s=30.0)
    replication.engine.close()
    replication.start()
    replication.run(100)
    target.remove("a")
    target.write("foreign", b"foreign")
    for _ in range(40):
        replication.run(10)
        if replication.engine.report().differences:
            break
    assert replication.engine.report().differences == 2
    replication.run(20)
    assert held(target) == held(source)
    replication.run(400)
    assert replication.engine.report().differences == 0


@dataclass
class LateFeed:
    """A feed whose log has a change some time after it was answered."""

    feed: ChangeFeed
    delay_ms: int

    def position(self) -> FeedPosition:
        """See ChangeFeed."""
        return self.feed.position()

    def settled_position(self) -> FeedPosition:
        """See ChangeFeed."""
        return self.feed.settled_position()

    def read(self, after: FeedPosition) -> ChangeBatch:
        """See ChangeFeed."""
        return replace(self.feed.read(after), delay_ms=self.delay_ms)


def test_nothing_is_proven_of_the_time_that_a_log_may_be_late(tmp_path: Path) -> None:
    proven_ms = []
    for delay_ms in (0, 250):
        source, target = pair()
        source.write("a", b"a")
        store = source.store()
        assert store.feed is not None
        store = replace(store, feed=LateFeed(store.feed, delay_ms))
        replication = Replication(store, target.store(), tmp_path / str(delay_ms))
        replication.run(30)
        replication.clock.pass_s(10)
        replication.run(5)
        proven_ms.append(replication.engine.report().oldest_unproven_ms)
    assert None not in proven_ms
    assert proven_ms[1] == (proven_ms[0] or 0) - 250


def test_a_quiet_log_is_read_less_often_until_it_has_a_change(tmp_path: Path) -> None:
    """OZ-006: and often enough that a change comes within a second."""
    source, _, replication = live(tmp_path)
    engine, clock = replication.engine, replication.clock
    source.write("a", b"changed")
    engine.receive()
    busy_s = engine.receive()
    clock.pass_s(60)
    quiet_s = engine.receive()
    assert 2 * busy_s < quiet_s <= 0.5
    assert engine.receive() == quiet_s
    source.write("a", b"again")
    engine.receive()
    assert engine.receive() == busy_s
