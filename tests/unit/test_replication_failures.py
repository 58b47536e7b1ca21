"""The failure tables of replication, a test a row, in each way to follow a source: by
rounds, by snapshots, and by its log.

The rows are those of docs/replication.md, which has those of the design (OZ-073 to
OZ-076 by snapshots, OZ-108 to OZ-111 by the log) and more.
"""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.copier import CopierLimits
from replicator.replication import (
    Condition,
    DesiredState,
    ReplicationFault,
    ReplicationOptions,
    Stage,
    SyncerId,
)
from replicator.stores.errors import StoreError, StoreUnavailableError, UnsupportedObjectError
from replicator.stores.local_database import StoreFullError
from replicator.stores.port import ObjectProperties
from replicator.syncer.lease import LeaseLostError, LocalLease
from runtime.disk import Operation
from tests.support.bucket_sync import LIMITS
from tests.support.disk import FailingDisk
from tests.support.memory_store import MemoryStore, StoreFaults
from tests.support.replications import (
    LaterExecutor,
    Replication,
    failing,
    held,
    step_limits,
)

BIG = bytes(LIMITS.part_bytes * 4)
# Whether the source has a log, and whether it makes snapshots.
WAYS = {"rounds": (False, False), "snapshots": (False, True), "log": (True, True)}
way_of_all = pytest.mark.parametrize("way", WAYS)
# All that a store may be asked for.
EVERYTHING = {
    "put", "write_part", "complete", "delete", "changes", "list", "read", "facts", "properties",
    "position", "create_snapshot", "find_snapshot", "find_snapshots", "difference",
    "delete_snapshot",
}  # fmt: skip


def begun(
    way: str, folder: Path, options: ReplicationOptions | None = None
) -> tuple[MemoryStore, MemoryStore, Replication]:
    """A replication of three objects that has ended its first copy."""
    has_feed, has_snapshots = WAYS[way]
    source = MemoryStore("memory:a", has_feed=has_feed, has_snapshots=has_snapshots)
    target = MemoryStore("memory:b", renames=True)
    for key in ("a", "b", "c"):
        source.write(key, key.encode())
    replication = Replication(
        source.store(), target.store(), folder, options or ReplicationOptions()
    )
    replication.run(60, seconds=10.0)
    assert held(target) == held(source)
    stage = Stage.LIVE if has_feed else Stage.INCREMENTAL
    assert replication.engine.report().checkpoint.stage is stage
    return source, target, replication


def whole_bytes(source: MemoryStore) -> int:
    """The bytes of all objects: what crosses if each crosses once."""
    return sum(len(one.body) for one in source.objects.values())


def failing_for(store: MemoryStore, error: StoreError, name: str, key: str) -> Callable[[], None]:
    """Let an operation fail for one key until the returned function is called."""

    def before(operation: str, of_key: str) -> None:
        if (operation, of_key) == (name, key):
            raise error

    store.faults = replace(store.faults, before=before)
    return lambda: setattr(store, "faults", StoreFaults())


@way_of_all
@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (StoreFullError("no space", errno="ENOSPC"), ReplicationFault.TARGET_FULL),
        (StoreError("no", status=403, s3_code="AccessDenied"), ReplicationFault.TARGET_FORBIDDEN),
        (StoreError("gone", s3_code="NoSuchBucket"), ReplicationFault.TARGET_MISSING),
    ],
)
def test_a_full_or_forbidden_target_stops_it_until_it_is_resumed(
    way: str, error: StoreError, fault: ReplicationFault, tmp_path: Path
) -> None:
    """OZ-073, OZ-108, OZ-132: with the exception, and nothing is passed over."""
    source, target, replication = begun(way, tmp_path)
    before = replication.engine.report().checkpoint
    mend = failing(target, error, {"put"})
    source.write("d", b"d")
    replication.run(40, seconds=10.0)
    report = replication.engine.report()
    assert (report.condition, report.fault) == (Condition.ERROR, fault)
    assert error.message in report.message
    assert report.checkpoint.base == before.base
    assert report.checkpoint.position == before.position
    mend()
    replication.run(40, seconds=10.0)
    assert "d" not in target.objects
    replication.change(desired=DesiredState.ENABLED)
    replication.run(40, seconds=10.0)
    assert held(target) == held(source)
    assert replication.engine.report().condition is Condition.ACTIVE


@way_of_all
def test_a_target_or_link_that_does_not_answer_is_tried_for_ever(way: str, tmp_path: Path) -> None:
    """OZ-074, OZ-109, OZ-081: the queue fills up, and the log is read no further; then
    all of it crosses, each object once.
    """
    source, target, replication = begun(way, tmp_path, ReplicationOptions(queue_entries_max=5))
    mend = failing(target, StoreUnavailableError("503"), EVERYTHING)
    for number in range(12):
        source.write(f"d{number}", b"x" * number)
    for _ in range(3):
        replication.run(200, seconds=10.0)
        report = replication.engine.report()
        assert report.condition is Condition.WAITING
        assert report.fault is ReplicationFault.TARGET_UNAVAILABLE
        assert "503" in report.message
    assert report.queued == (5 if way == "log" else 0)
    if way == "log":
        read = source.calls.count("changes")
        replication.run(50, seconds=10.0)
        # It looks whether there is room; nothing more is taken in.
        assert source.calls.count("changes") <= read + 50
        assert replication.engine.report().queued == 5
    mend()
    replication.run(80, seconds=10.0)
    assert held(target) == held(source)
    assert target.payload == whole_bytes(source)
    assert replication.engine.report().condition is Condition.ACTIVE


@way_of_all
def test_a_silent_target_is_waited_for_without_a_break(way: str, tmp_path: Path) -> None:
    """OZ-132: a retry that was merely begun is no answer."""
    has_feed, has_snapshots = WAYS[way]
    source = MemoryStore("memory:a", has_feed=has_feed, has_snapshots=has_snapshots)
    target = MemoryStore("memory:b")
    source.write("a", b"a")
    later = LaterExecutor()
    replication = Replication(
        source.store(),
        target.store(),
        tmp_path,
        ReplicationOptions(interval_s=1.0),
        later=later,
        run_later=frozenset({"comparer", "lister"}),
        limits=replace(step_limits(), prove_every_s=20.0),
    )

    def run(steps: int) -> list[Condition]:
        found = list[Condition]()
        for _ in range(steps):
            replication.step(1.0)
            found.append(replication.engine.report().condition)
            while later.waiting:
                later.run()
        return found

    run(100)
    assert held(target) == held(source)
    mend = failing(target, StoreUnavailableError("503"), EVERYTHING)
    found = run(200)
    assert Condition.WAITING in found
    assert set(found[found.index(Condition.WAITING) :]) == {Condition.WAITING}
    mend()
    assert set(run(40)[20:]) == {Condition.ACTIVE}


@way_of_all
def test_a_source_that_does_not_answer_is_waited_for(way: str, tmp_path: Path) -> None:
    """OZ-075, OZ-110: then it goes on from where it was."""
    source, target, replication = begun(way, tmp_path)
    before = replication.engine.report().checkpoint.position
    mend = failing(source, StoreUnavailableError("503"), EVERYTHING)
    source.write("d", b"d")
    source.remove("a")
    replication.run(300, seconds=10.0)
    report = replication.engine.report()
    assert report.condition is Condition.WAITING
    assert report.fault is ReplicationFault.SOURCE_UNAVAILABLE
    assert report.checkpoint.position == before
    # Nobody has said that anything was deleted.
    assert sorted(target.objects) == ["a", "b", "c"]
    mend()
    replication.run(80, seconds=10.0)
    assert held(target) == held(source)
    assert target.payload == whole_bytes(source) + len(b"a")
    assert replication.engine.report().condition is Condition.ACTIVE


def test_one_key_that_fails_does_not_hold_up_others(tmp_path: Path) -> None:
    source, target, replication = begun("log", tmp_path)

    def before(name: str, key: str) -> None:
        if name == "put" and key == "bad":
            raise UnsupportedObjectError("no such key here")

    target.faults = replace(target.faults, before=before)
    source.write("bad", b"bad")
    source.write("good", b"good")
    replication.run(30)
    assert "good" in target.objects
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.ACTIVE, 1)
    assert report.fault is ReplicationFault.OBJECT_UNSUPPORTED
    known = report.checkpoint.position
    replication.run(30)
    assert replication.engine.report().checkpoint.position == known
    source.remove("bad")
    replication.run(100, seconds=1.0)
    assert held(target) == held(source)
    assert replication.engine.report().failed == 0


FORBIDDEN = StoreError("no tags of it for you", status=403, s3_code="AccessDenied")


@way_of_all
@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (StoreError("its tags are gone"), ReplicationFault.OBJECT_FAILED),
        (FORBIDDEN, ReplicationFault.SOURCE_FORBIDDEN),
        (StoreUnavailableError("503"), ReplicationFault.OBJECT_FAILED),
    ],
)
def test_an_object_that_cannot_be_read_holds_up_itself_alone(
    way: str, error: StoreError, fault: ReplicationFault, tmp_path: Path
) -> None:
    """It is named, and tried again, and nobody says meanwhile that all is equal."""
    source, target, replication = begun(way, tmp_path)
    replication.run(400, seconds=10.0)
    before = replication.engine.report()
    assert before.differences == 0

    mend = failing_for(source, error, "properties", "b")
    failed_ms = replication.clock.ms
    source.touch("b", ObjectProperties(tags=(("team", "x"),)))
    source.write("d", b"d")
    source.write("a", b"another")
    source.remove("c")
    # Long enough for a comparison.
    replication.run(500, seconds=10.0)
    assert {key: one.body for key, one in target.objects.items()} == {
        "a": b"another", "b": b"b", "d": b"d",
    }  # fmt: skip
    report = replication.engine.report()
    assert (report.condition, report.failed, report.fault) == (Condition.ACTIVE, 1, fault)
    (named,) = report.failed_keys
    assert (named.key, named.fault) == ("b", fault)
    assert error.message in named.message
    assert report.differences != 0
    assert (report.proven_ms or 0) <= failed_ms
    assert report.oldest_unproven_ms is not None
    assert report.oldest_unproven_ms <= failed_ms
    mend()
    replication.run(500, seconds=10.0)
    assert held(target) == held(source)
    mended = replication.engine.report()
    assert (mended.failed, mended.failed_keys, mended.differences) == (0, (), 0)
    assert (mended.oldest_unproven_ms or 0) > report.oldest_unproven_ms


@way_of_all
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("error", [StoreError("its tags are gone"), StoreUnavailableError("503")])
def test_an_object_that_the_first_copy_cannot_compare_does_not_hold_up_others(
    way: str, side: str, error: StoreError, tmp_path: Path
) -> None:
    has_feed, has_snapshots = WAYS[way]
    source = MemoryStore("memory:a", has_feed=has_feed, has_snapshots=has_snapshots)
    target = MemoryStore("memory:b")
    for key in ("a", "b", "c"):
        source.write(key, key.encode())
    # Of the same content, so that properties decide.
    target.write("b", b"b")
    store = source if side == "source" else target
    mend = failing_for(store, error, "properties", "b")
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(100, seconds=10.0)
    assert target.bodies() == source.bodies()
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.ACTIVE, 1)
    assert [one.key for one in report.failed_keys] == ["b"]
    assert (report.proven_ms, report.oldest_unproven_ms) == (None, None)
    assert report.checkpoint.stage is not Stage.INITIAL_BATCH
    mend()
    replication.run(300, seconds=10.0)
    report = replication.engine.report()
    assert (report.failed, report.differences) == (0, 0)
    assert report.oldest_unproven_ms is not None


@way_of_all
@pytest.mark.parametrize("name", ["put", "facts", "delete"])
def test_a_key_that_the_target_never_answers_for_holds_up_itself_alone(
    way: str, name: str, tmp_path: Path
) -> None:
    """It is named, tried again more and more rarely, and crosses once it is mended."""
    source, target, replication = begun(way, tmp_path)
    asked = list[float]()

    def before(operation: str, key: str) -> None:
        keys = target.deleting if operation == "delete" else (key,)
        if operation == name and "b" in keys:
            asked.append(replication.clock.monotonic_s())
            raise StoreUnavailableError("500 each time")

    target.faults = replace(target.faults, before=before)
    if name == "delete":
        source.remove("b")
    else:
        source.write("b", b"another")
        # The target is looked at, and the write there has a condition.
        target.write("b", b"of somebody else")
    source.write("d", b"d")
    source.remove("c")
    # A round each minute.
    replication.run(700)
    assert {"a", "b", "d"} == set(target.objects)
    source.write("e", b"e")
    replication.run(700)
    assert "e" in target.objects
    replication.run(600, seconds=10.0)
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.ACTIVE, 1)
    (named,) = report.failed_keys
    assert (named.key, named.fault) == ("b", ReplicationFault.OBJECT_FAILED)
    assert "500 each time" in named.message
    assert report.differences != 0
    # Others go on at once, also while it is tried.
    asked.clear()
    replication.run(3_600, seconds=1.0)
    assert 1 <= len(asked) <= 20
    target.faults = StoreFaults()
    replication.run(600, seconds=10.0)
    assert held(target) == held(source)
    assert replication.engine.report().failed == 0
    assert not target.uploading


def test_writes_that_fail_for_all_keys_are_no_fault_of_single_ones(tmp_path: Path) -> None:
    """Such a target may still be listed and read."""
    source, target, replication = begun("log", tmp_path)
    mend = failing(target, StoreUnavailableError("503"), {"put", "write_part", "complete"})
    for number in range(100):
        source.write(f"d{number}", b"x")
    replication.run(600, seconds=10.0)
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.WAITING, 0)
    assert report.fault is ReplicationFault.TARGET_UNAVAILABLE
    mend()
    replication.run(20, seconds=1.0)
    assert held(target) == held(source)
    assert not target.uploading


def test_reads_that_fail_for_all_keys_are_no_fault_of_single_ones(tmp_path: Path) -> None:
    """Such a source may still be listed: its datanodes are down, and not its OM."""
    source, target, replication = begun("log", tmp_path)
    mend = failing(source, StoreUnavailableError("503"), {"read"})
    for number in range(100):
        source.write(f"d{number}", b"x")
    replication.run(600, seconds=10.0)
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.WAITING, 0)
    assert report.fault is ReplicationFault.SOURCE_UNAVAILABLE
    mend()
    replication.run(20, seconds=1.0)
    assert held(target) == held(source)


def test_more_than_a_thousand_keys_that_nobody_answers_for_wait(tmp_path: Path) -> None:
    """They stop nothing: it may be the fault of a store after all."""
    source, target, replication = begun("log", tmp_path)
    replication.engine.close()
    copier = CopierLimits(objects=600, parts=1, memory_bytes=1 << 20)
    replication.limits = replace(replication.limits, copier=copier)
    replication.start()
    mend = failing(target, StoreUnavailableError("503"), {"put"})
    for number in range(1_050):
        source.write(f"d{number}", b"")
    replication.run(60, seconds=0.5)
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.WAITING, 1_000)
    assert report.fault is ReplicationFault.TARGET_UNAVAILABLE
    mend()
    replication.run(60, seconds=1.0)
    assert held(target) == held(source)
    assert replication.engine.report().failed == 0


def test_a_source_that_forbids_everything_stops_it(tmp_path: Path) -> None:
    """It is no fault of one object where a listing is forbidden, too."""
    source, _, replication = begun("rounds", tmp_path)
    failing(source, FORBIDDEN, EVERYTHING)
    replication.run(40, seconds=10.0)
    report = replication.engine.report()
    assert report.fault is ReplicationFault.SOURCE_FORBIDDEN
    assert report.condition is Condition.ERROR


def test_more_than_a_thousand_keys_that_fail_stop_all(tmp_path: Path) -> None:
    """They have one cause, which somebody should look at."""
    source, target, replication = begun("log", tmp_path)
    mend = failing(target, UnsupportedObjectError("not such keys"), {"put"})
    for number in range(1_050):
        source.write(f"d{number}", b"")
    replication.run(400)
    report = replication.engine.report()
    assert (report.condition, report.failed) == (Condition.ERROR, 1_000)
    assert report.fault is ReplicationFault.OBJECT_UNSUPPORTED
    mend()
    replication.change(desired=DesiredState.ENABLED)
    replication.run(400)
    assert held(target) == held(source)


@pytest.mark.parametrize("knows", [True, False])
def test_a_gap_of_the_log_is_healed_without_copying_what_is_equal(
    knows: bool, tmp_path: Path
) -> None:
    """OZ-098, OZ-103: also where a key came and went, which no difference shows."""
    source, target, replication = begun("log", tmp_path)
    source.write("brief", b"brief")
    replication.run(20)
    if not knows:
        replication.engine.close()
        replication.start()
        replication.run(5)
    sent = target.payload
    source.remove("brief")
    source.write("missed", b"missed")
    source.log = "another"
    stages = list[Stage]()
    for _ in range(60):
        replication.step()
        stages.append(replication.engine.report().checkpoint.stage)
    assert Stage.INCREMENTAL in stages
    assert held(target) == held(source)
    assert target.payload == sent + len(b"missed")
    assert replication.engine.report().checkpoint.stage is Stage.LIVE
    assert len(source.snapshots) == 1


@way_of_all
def test_a_target_that_was_wiped_is_copied_anew_and_its_cost_is_told(
    way: str, tmp_path: Path
) -> None:
    """OZ-102: an operator ends the replication, empties the target, begins anew."""
    source, target, replication = begun(way, tmp_path)
    source.trimmed = source.newest_index
    replication.change(desired=DesiredState.CANCELLED)
    replication.run(5)
    assert replication.engine.is_over
    replication.engine.close()
    for key in list(target.objects):
        target.remove(key)
    again = Replication(source.store(), target.store(), tmp_path)
    source.write("d", b"written while it is copied")
    again.run(60, seconds=10.0)
    assert held(target) == held(source)
    assert again.engine.report().sent_bytes == whole_bytes(source)


def test_a_snapshot_that_is_deleted_while_it_is_copied_is_made_anew(tmp_path: Path) -> None:
    """OZ-169: what it lacks then is deleted nowhere."""
    source = MemoryStore("memory:a", has_snapshots=True)
    target = MemoryStore("memory:b")
    for number in range(30):
        source.write(f"k{number:02}", b"x")
    target.write("k05-of-before", b"to be deleted by the whole snapshot alone")
    target.write("k99", b"the same")

    def before(name: str, key: str) -> None:
        if name == "put" and key == "k10":
            source.snapshots.clear()

    target.faults = replace(target.faults, before=before)
    replication = Replication(source.store(), target.store(), tmp_path)
    replication.run(60, seconds=10.0)
    assert source.snapshots_made > 1
    assert held(target) == held(source)


@pytest.mark.parametrize("what", ["refused", "base"])
def test_a_difference_that_fails_is_replaced_by_a_comparison(what: str, tmp_path: Path) -> None:
    """OZ-174, OZ-169: it sends only what differs, and is recorded only as a whole."""
    source, target, replication = begun("snapshots", tmp_path)
    replication.limits = replace(replication.limits, prove_every_s=1e9)
    replication.engine.close()
    replication.start()
    replication.run(60, seconds=10.0)
    sent = target.payload
    if what == "base":
        source.snapshots.clear()
    else:
        failing(source, StoreError("the job has failed"), {"difference"})
    source.calls.clear()
    source.write("d", b"dd")
    source.remove("a")
    replication.run(60, seconds=10.0)
    assert "list" in source.calls
    assert held(target) == held(source)
    assert target.payload == sent + 2
    assert replication.engine.report().condition is Condition.ACTIVE
    assert len(source.snapshots) <= 2


@way_of_all
def test_a_killed_syncer_is_replaced_by_one_that_goes_on_from_its_record(
    way: str, tmp_path: Path
) -> None:
    """OZ-076, OZ-111, OZ-040, OZ-104: on another machine, from the master's record, and
    what is at the target already does not cross again.
    """
    source, target, killed = begun(way, tmp_path / "one")
    for number in range(20):
        source.write(f"d{number:02}", b"x" * (number + 1))
    source.remove("a")
    arrived = 0

    def before(name: str, _key: str) -> None:
        nonlocal arrived
        arrived += name == "put"
        if arrived > 9:
            raise StoreUnavailableError("the link of this machine is cut")

    target.faults = replace(target.faults, before=before)
    killed.run(40, seconds=10.0)
    recorded = killed.engine.report().checkpoint
    killed.kill()
    assert 3 < len(target.objects) < len(source.objects)
    target.faults = replace(target.faults, before=lambda _name, _key: None)
    source.calls.clear()
    another = Replication(
        source.store(),
        target.store(),
        tmp_path / "two",
        checkpoint=recorded,
        syncer=SyncerId("syncer-2"),
    )
    another.run(4, seconds=0.1)
    if way == "log":
        # It compares nothing: the log leads on from the record.
        assert "list" not in source.calls
    another.run(60, seconds=10.0)
    assert held(target) == held(source)
    assert target.payload == whole_bytes(source) + len(b"a")


def test_parts_that_a_killed_syncer_has_sent_are_kept_on_its_machine(tmp_path: Path) -> None:
    """OZ-009: a large object goes on with the part that is missing."""
    source, target, killed = begun("log", tmp_path)
    parts = 0

    def before(name: str, _key: str) -> None:
        nonlocal parts
        parts += name == "write_part"
        if parts > 2:
            raise StoreUnavailableError("about to be killed")

    target.faults = replace(target.faults, before=before)
    source.write("big", BIG)
    killed.run(20)
    checkpoint = killed.engine.report().checkpoint
    killed.kill()
    target.faults = replace(target.faults, before=lambda _name, _key: None)
    again = Replication(source.store(), target.store(), tmp_path, checkpoint=checkpoint)
    again.run(40, seconds=1.0)
    assert held(target) == held(source)
    assert target.payload == whole_bytes(source)


class LentLease(LocalLease):
    """A lease that a test ends."""

    is_lost = False

    def check(self) -> None:
        """See Lease."""
        if self.is_lost:
            raise LeaseLostError("it is another's")


@way_of_all
def test_a_syncer_stopped_for_longer_than_its_lease_stops_and_cleans_up(
    way: str, tmp_path: Path
) -> None:
    """OZ-049, OZ-050: it writes nothing any more, and removes what it kept."""
    source, target, replication = begun(way, tmp_path)
    replication.engine.close()
    lease = LentLease()
    (tmp_path / "other").mkdir()
    fenced = Replication(source.store(), target.store(), tmp_path, lease=lease)
    fenced.run(20, seconds=10.0)
    lease.is_lost = True
    source.write("late", b"late")
    snapshots = dict(source.snapshots)
    fenced.run(20, seconds=10.0)
    assert fenced.engine.is_over
    assert fenced.engine.report().fault is ReplicationFault.LEASE_LOST
    assert "late" not in target.objects
    assert source.snapshots == snapshots
    assert [one.name for one in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("when", ["at its start", "while it works"])
def test_a_damaged_queue_is_dropped_and_the_log_is_read_again(when: str, tmp_path: Path) -> None:
    """OZ-094: from the recorded position; nothing is lost, and nothing sent again."""
    source, target, replication = begun("log", tmp_path)
    mend = failing(target, StoreUnavailableError("503"), {"put"})
    # More than are taken of a queue at once.
    for number in range(1_500):
        source.write(f"d{number}", b"x")
    replication.run(100)
    recorded = replication.engine.report().checkpoint
    assert replication.engine.report().queued == 1_500
    if when == "at its start":
        replication.kill()
    for path in tmp_path.rglob("queue/*"):
        damaged = bytearray(path.read_bytes())
        for at in range(len(damaged) // 4, len(damaged), 997):
            damaged[at] ^= 1
        path.write_bytes(damaged)
    if when == "at its start":
        replication.checkpoint = recorded
        replication.start()
    mend()
    replication.run(600, seconds=1.0)
    assert replication.engine.report().condition is Condition.ACTIVE
    assert held(target) == held(source)
    assert target.payload == whole_bytes(source)


@pytest.mark.parametrize("what", ["queue", "checkpoint"])
def test_a_disk_of_the_syncer_that_is_full_stops_it_until_it_is_resumed(
    what: str, tmp_path: Path
) -> None:
    """It is not the target that is full, and nothing of the log is passed over."""
    source, target, replication = begun("log", tmp_path)
    recorded = replication.engine.report().checkpoint
    replication.engine.close()
    is_full = [False]

    def fails(_operation: Operation, path: Path) -> bool:
        return is_full[0] and what in str(path.relative_to(tmp_path))

    replication.checkpoint = recorded
    replication.disk = FailingDisk(errno.ENOSPC, fails)
    replication.start()
    replication.run(20)
    is_full[0] = True
    source.write("d", b"d")
    replication.run(40, seconds=1.0)
    report = replication.engine.report()
    assert (report.condition, report.fault) == (Condition.ERROR, ReplicationFault.LOCAL_DISK)
    is_full[0] = False
    replication.run(10, seconds=1.0)
    assert replication.engine.report().condition is Condition.ERROR
    replication.change(desired=DesiredState.ENABLED)
    replication.run(40, seconds=1.0)
    assert held(target) == held(source)
    assert replication.engine.report().condition is Condition.ACTIVE
    assert replication.engine.report().checkpoint.position != recorded.position
