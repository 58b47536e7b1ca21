"""What a sync must not touch, and what it must not say, while others write."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.stores.errors import (
    PositionTrimmedError,
    PreconditionFailedError,
    StoreError,
    StoreUnavailableError,
)
from replicator.stores.port import ObjectFacts, ObjectProperties
from replicator.stores.stamps import same_stamp
from replicator.windows import WINDOW_BYTES
from tests.support.bucket_sync import LIMITS, SyncRunner
from tests.support.kill_points import KilledError
from tests.support.memory_store import (
    MEMORY,
    PLAIN,
    STITCHING,
    UNPROVEN,
    MemoryStore,
    StoreFaults,
)

PART = LIMITS.part_bytes
ANN = ObjectProperties(metadata=(("owner", "ann"),), tags=(("team", "red"),))
BOB = replace(ANN, metadata=(("owner", "bob"),))
BLUE = replace(ANN, tags=(("team", "blue"),))
LARGE = random.Random(1).randbytes(int(3.5 * PART))
Pair = tuple[MemoryStore, MemoryStore]


def memory_pair(*, feeds: bool = False, small_pages: bool = False) -> Pair:
    pages = 1 if small_pages else 3
    return (
        MemoryStore("memory:a", has_feed=feeds, page_keys=pages),
        MemoryStore("memory:b", has_feed=feeds, page_keys=pages),
    )


def runner(pair: Pair, folder: Path, *, delete: bool = False) -> SyncRunner:
    return SyncRunner(pair[0].store(), pair[1].store(), folder / "state", delete=delete)


def on_call(store: MemoryStore, name: str, number: int, act: Callable[[], object]) -> None:
    """Act just before the call of this number (from 1) of an operation."""
    calls = iter(range(1, 1_000_000))

    def before(called: str, _key: str) -> None:
        if called == name and next(calls) == number:
            act()

    store.faults.before = before


def verifying(run: SyncRunner) -> bool:
    """Whether the last stage that began is a comparison after the last write."""
    return run.progress.stages[-1][0] == "verify"


@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_equal_is_not_said_while_a_side_moves(feeds: bool, side: int, tmp_path: Path) -> None:
    pair = memory_pair(feeds=feeds)
    pair[0].write("a", b"1", ANN)
    run = runner(pair, tmp_path)
    moving = pair[side]

    def move(name: str, _key: str) -> None:
        # The same object anew: each look finds it equal, and another one.
        if name == "list" and run.progress.stages and verifying(run):
            moving.write("a", b"1", ANN)

    moving.faults.before = move
    report = run()
    assert (report.copied, report.failed) == (1, ())
    assert (report.equal, report.in_flight, report.differences) == (False, 1, 1)
    assert report.document()["differences"] == 1
    assert [stage for stage, _, _ in run.progress.stages].count("verify") == 4
    moving.faults.before = lambda *_: None
    assert run().equal


@pytest.mark.parametrize("feeds", [False, True])
def test_what_moved_once_is_compared_again(feeds: bool, tmp_path: Path) -> None:
    pair = memory_pair(feeds=feeds)
    pair[0].write("a", b"1", ANN)
    run = runner(pair, tmp_path)
    on_call(pair[0], "list", 2, lambda: pair[0].write("a", b"1", ANN))
    report = run()
    assert (report.equal, report.in_flight) == (True, 0)
    assert [stage for stage, _, _ in run.progress.stages].count("verify") == 2


class LaterHead(MemoryStore):
    """HEAD has the whole second after the listed time, as Ceph may."""

    def facts(self, key: str, *, version: str = "") -> ObjectFacts | None:
        found = super().facts(key, version=version)
        return found and replace(found, modified_ms=(found.modified_ms // 1000 + 1) * 1000)

    def put_properties(
        self, facts: ObjectFacts, properties: ObjectProperties, *, tags_only: bool = False
    ) -> ObjectFacts:
        now = self.facts(facts.key)
        if now is None or not same_stamp(now, facts):
            raise PreconditionFailedError(f"{facts.key} changed")
        return super().put_properties(facts, properties, tags_only=tags_only)


def test_a_time_that_differs_by_its_rounding_is_no_change(tmp_path: Path) -> None:
    source, target = LaterHead("memory:a"), LaterHead("memory:b")
    source.write("a", b"1", ANN)
    source.write("large", LARGE, BOB)
    run = runner((source, target), tmp_path)
    assert run().equal
    source.touch("a", BOB)
    changed = run()
    assert (changed.equal, changed.metadata_only, changed.copied) == (True, 1, 0)
    again = run()
    assert (again.equal, again.metadata_only, again.copied) == (True, 0, 0)


def test_keys_that_were_equal_at_different_moments_are_not_equal(tmp_path: Path) -> None:
    """One key becomes equal just after another one ceased to be."""
    for feeds in (False, True):
        pair = memory_pair(feeds=feeds, small_pages=True)
        source, target = pair
        for key in ("a", "b"):
            source.write(key, b"1", ANN)
        run = runner(pair, tmp_path / str(feeds))
        assert run().equal
        source.write("b", b"2", ANN)

        def swap(source: MemoryStore = source) -> None:
            source.write("a", b"2", ANN)
            source.write("b", b"1", ANN)

        # When "a" has been listed, and "b" has not.
        on_call(source, "list", 2, swap)
        report = run()
        assert not report.equal
        assert source.bodies() != target.bodies()


def test_a_feed_that_stands_still_spares_the_second_look(tmp_path: Path) -> None:
    for feeds, looks in ((True, 0), (False, 1)):
        pair = memory_pair(feeds=feeds)
        pair[0].write("a", b"1", ANN)
        run = runner(pair, tmp_path / str(feeds))
        run()
        run.progress.stages.clear()
        assert run().equal
        assert [stage for stage, _, _ in run.progress.stages].count("verify") == looks


def test_changes_beside_the_prefix_are_no_movement(tmp_path: Path) -> None:
    pair = memory_pair(feeds=True)
    pair[0].write("in/a", b"1", ANN)
    run = runner(pair, tmp_path)
    run.prefix = "in/"
    on_call(pair[0], "list", 2, lambda: pair[0].write("out/a", b"1", ANN))
    report = run()
    assert report.equal
    assert [stage for stage, _, _ in run.progress.stages].count("verify") == 1


def test_changes_that_are_no_longer_kept_are_movement(tmp_path: Path) -> None:
    pair = memory_pair(feeds=True)
    pair[0].write("a", b"1", ANN)
    run = runner(pair, tmp_path)

    def trim(name: str, _key: str) -> None:
        if name == "list":
            pair[0].write("a", b"1", ANN)
        if name == "changes":
            raise PositionTrimmedError("trimmed")

    pair[0].faults.before = trim
    report = run()
    assert (report.equal, report.in_flight) == (False, 1)


def test_a_tag_of_an_earlier_run_proves_nothing_of_this_one(tmp_path: Path) -> None:
    """It was blue when the run began to look, whatever it is now."""
    pair = memory_pair()
    pair[0].write("a", b"1", ANN)
    pair[0].write("b", b"1", ANN)
    run = runner(pair, tmp_path)
    assert run().equal
    pair[0].touch("a", BLUE)
    on_call(pair[0], "properties", 1, lambda: pair[0].touch("a", ANN))
    report = run()
    assert report.equal
    # One look at the first tags cannot show at which moment both were red.
    assert [stage for stage, _, _ in run.progress.stages][-1] == "verify"


def test_a_foreign_object_is_not_deleted(tmp_path: Path) -> None:
    pair = memory_pair()
    pair[0].write("a", b"1", ANN)
    for key in ("extra", "other"):
        pair[1].write(key, b"2", ANN)
    run = runner(pair, tmp_path, delete=True)
    with run._ledger() as ledger, run.open(ledger) as sync:
        plan = sync.plan()
        assert plan.deletes == 2
        pair[1].write("extra", b"new", ANN)
        report = sync.execute(plan)
    assert [(one.key, one.reason) for one in report.failed] == [("extra", "in_flight")]
    assert (report.deleted, report.equal, report.differences) == (1, False, 1)
    assert pair[1].bodies() == {"a": b"1", "extra": b"new"}


def test_a_delete_that_is_sent_again_spares_what_came_since(tmp_path: Path) -> None:
    pair = memory_pair()
    for key in ("x", "y"):
        pair[1].write(key, b"2", ANN)

    def lose(name: str, _key: str) -> None:
        if name == "delete" and pair[1].calls.count("delete") == 1:
            pair[1].write("x", b"new", ANN)
            raise StoreUnavailableError("the answer is lost")

    pair[1].faults.after = lose
    run = runner(pair, tmp_path, delete=True)
    run.attempts_max = 2
    report = run()
    assert [(one.key, one.reason) for one in report.failed] == [("x", "in_flight")]
    assert (report.deleted, report.equal) == (1, False)
    assert pair[1].bodies() == {"x": b"new"}


def test_a_delete_that_cannot_be_checked_fails_by_name(tmp_path: Path) -> None:
    pair = memory_pair()
    for key in ("x", "y"):
        pair[1].write(key, b"2", ANN)

    def fail(name: str, key: str) -> None:
        if (name, key, run.progress.stages[-1][0]) == ("facts", "x", "delete"):
            raise StoreError("AccessDenied")

    pair[0].faults.before = fail
    run = runner(pair, tmp_path, delete=True)
    report = run()
    assert [one.key for one in report.failed] == ["x"]
    assert (report.deleted, report.failed_count) == (1, 1)
    assert list(pair[1].objects) == ["x"]


def test_properties_of_a_newer_object_of_the_target_are_not_those_of_the_listed_one(
    tmp_path: Path,
) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", b"abc", BOB)
    target.write("k", b"abc", ANN)
    on_call(target, "properties", 1, lambda: target.write("k", b"xyz", BOB))
    report = runner(pair, tmp_path)()
    assert report.copied == 1
    assert target.bodies() == source.bodies()


def test_a_foreign_write_of_the_same_bytes_is_not_taken_for_ours(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", b"abc", ANN)
    on_call(target, "put", 1, lambda: target.write("k", b"abc", BOB))
    run = runner(pair, tmp_path)
    report = run()
    assert [one.reason for one in report.failed] == ["target_changed"]
    assert not report.equal
    assert run().equal
    assert target.objects["k"].properties == ANN


@pytest.mark.parametrize("has_parts", [False, True])
def test_uploads_of_others_are_left_alone(has_parts: bool, tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", LARGE, ANN)
    old = target.begin("k", BOB)
    if has_parts:
        target.write_part("k", old, 1, b"theirs")
    target.calls.clear()

    def lose(name: str, _key: str) -> None:
        if name == "begin" and target.calls.count("begin") == 1:
            raise StoreUnavailableError("the answer is lost")

    target.faults.after = lose
    run = runner(pair, tmp_path)
    run.attempts_max = 2
    assert run().equal
    assert list(target.uploading) == [old]


def test_of_two_uploads_that_began_at_once_none_is_aborted(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", LARGE, ANN)
    theirs = list[str]()

    def lose(name: str, _key: str) -> None:
        if name == "begin" and not theirs:
            theirs.append("begun")
            theirs.append(target.begin("k", BOB))
            raise StoreUnavailableError("the answer is lost")

    target.faults.after = lose
    run = runner(pair, tmp_path)
    run.attempts_max = 2
    assert run().equal
    assert theirs[1] in target.uploading
    assert not any(one.parts for one in target.uploading.values())


def test_an_upload_with_parts_is_none_whose_id_we_never_learned(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", LARGE, ANN)

    def lose(name: str, _key: str) -> None:
        if name == "begin" and target.calls.count("begin") == 1:
            theirs = target.begin("k", BOB)
            target.write_part("k", theirs, 1, b"theirs")
            raise StoreUnavailableError("the request is lost")

    target.faults.before = lose
    run = runner(pair, tmp_path)
    run.attempts_max = 2
    assert run().equal
    assert [len(one.parts) for one in target.uploading.values()] == [1]


def test_an_upload_of_others_that_began_after_a_kill_is_left_alone(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", LARGE, ANN)
    run = runner(pair, tmp_path)

    def refuse(name: str, _key: str) -> None:
        if name == "begin":
            raise KeyboardInterrupt

    target.faults.before = refuse
    with pytest.raises(KeyboardInterrupt):
        run()
    target.faults.before = lambda *_: None
    theirs = target.begin("k", BOB)
    assert run().equal
    assert list(target.uploading) == [theirs]


def stitched_pair(tmp_path: Path) -> tuple[Pair, SyncRunner]:
    """A pair that is equal, and then one byte of its large object is changed."""
    # Of what is made of parts this target declares no hash.
    kind = replace(STITCHING, whole_hashes=())
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", kind)
    body = bytearray(random.Random(2).randbytes(20 * PART))
    pair[0].write("k", bytes(body), ANN)
    run = runner(pair, tmp_path)
    assert run().equal
    pair[1].payload = 0
    body[600_000] ^= 1
    pair[0].write("k", bytes(body), ANN)
    return pair, run


def test_a_stitch_whose_answer_was_lost_is_found_by_the_next_run(tmp_path: Path) -> None:
    pair, run = stitched_pair(tmp_path)
    source, target = pair
    target.calls.clear()

    def lose(name: str, key: str) -> None:
        if (name, key) == ("complete", "k"):
            raise StoreUnavailableError("the answer is lost")

    target.faults.after = lose
    run.attempts_max = 2
    run()
    sent = target.payload
    assert 0 < sent <= 4 * (16 << 10)
    target.faults.after = lambda *_: None
    assert run().equal
    assert target.payload == sent
    assert target.bodies() == source.bodies()
    assert not target.uploading


def test_a_stitch_of_an_older_source_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    pair, run = stitched_pair(tmp_path)
    source, target = pair

    def kill(name: str, key: str) -> None:
        if (name, key) == ("complete", "k"):
            raise KeyboardInterrupt

    target.faults.after = kill
    with pytest.raises(KeyboardInterrupt):
        run()
    target.faults.after = lambda *_: None
    body = bytearray(source.bodies()["k"])
    body[5] ^= 1
    source.write("k", bytes(body), ANN)
    assert run().equal
    assert target.bodies() == source.bodies()


def verify_stages(run: SyncRunner) -> int:
    return [stage for stage, _, _ in run.progress.stages].count("verify")


def test_keys_that_vanished_from_both_sides_are_looked_for_again(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("a", b"1", ANN)
    run = runner(pair, tmp_path)
    assert run().equal
    source.write("b", b"1", ANN)

    def vanish() -> None:
        source.remove("a")
        target.remove("a")

    on_call(target, "put", 1, vanish)
    run.progress.stages.clear()
    assert run().equal
    assert verify_stages(run) == 2


def test_properties_that_changed_at_both_sides_are_looked_at_again(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", has_feed=True)
    source, target = pair
    source.write("a", b"1", ANN)
    run = runner(pair, tmp_path)
    assert run().equal
    source.write("b", b"1", ANN)

    def change() -> None:
        source.touch("a", BLUE)
        target.write("a", b"1", BLUE)

    on_call(target, "put", 1, change)
    run.progress.stages.clear()
    assert run().equal
    assert verify_stages(run) == 2


def test_after_a_failure_rows_of_earlier_runs_count_no_more(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("a", b"1", ANN)
    run = runner(pair, tmp_path)
    assert run().equal
    source.touch("a", BLUE)

    def refuse(name: str, _key: str) -> None:
        if name == "put_properties":
            source.touch("a", ANN)
            raise StoreError("AccessDenied")

    target.faults.before = refuse
    run.progress.stages.clear()
    assert run().failed_count == 1
    assert verify_stages(run) == 2


def test_uploads_of_failures_that_are_not_named_are_resumed_too(tmp_path: Path) -> None:
    pair = memory_pair()
    source, target = pair
    source.write("k", LARGE, ANN)

    def fail(name: str, _key: str) -> None:
        if name == "complete":
            raise StoreUnavailableError("503")

    target.faults.before = fail
    run = runner(pair, tmp_path)
    run.failures_named_max = 0
    assert run().failed_count == 1
    target.faults.before = lambda *_: None
    assert run().equal
    assert target.payload == len(LARGE)


def test_tags_that_a_killed_completion_lost_are_put_afterwards(tmp_path: Path) -> None:
    """Some stores take tags only after the object exists: a kill comes between."""
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", UNPROVEN)
    source, target = pair
    source.write("k", LARGE, ANN)
    run = runner(pair, tmp_path)

    def lose(name: str, _key: str) -> None:
        if name == "complete":
            target.touch("k", replace(ANN, tags=()))
            raise KeyboardInterrupt

    target.faults.after = lose
    with pytest.raises(KeyboardInterrupt):
        run()
    target.faults.after = lambda *_: None
    sent = target.payload
    assert run().equal
    assert target.payload == sent
    assert target.objects["k"].properties == ANN


@pytest.mark.parametrize("hashes", [("md5",), ()])
def test_a_large_object_that_hashes_prove_is_not_sent_again_without_a_ledger(
    hashes: tuple[str, ...], tmp_path: Path
) -> None:
    source = MemoryStore("memory:a", replace(MEMORY, whole_hashes=hashes))
    target = MemoryStore("memory:b")
    # The target declares a hash of it; the source is newer, and may have none.
    target.write("k", LARGE, ANN)
    for _ in range(2):
        source.write("k", LARGE, ANN)
    report = runner((source, target), tmp_path)()
    assert (report.copied, report.bytes, report.equal) == (0, 0, True)
    assert report.level == ("recorded:md5" if hashes else "recorded:blake3")


def test_failures_are_named_up_to_a_limit_and_all_are_counted(tmp_path: Path) -> None:
    pair = MemoryStore("memory:a"), MemoryStore("memory:b", PLAIN)
    for number in range(5):
        pair[0].write(str(number), b"")

    def refuse(name: str, _key: str) -> None:
        if name == "put":
            raise StoreError("AccessDenied")

    pair[1].faults.before = refuse
    run = runner(pair, tmp_path)
    run.failures_named_max = 3
    report = run()
    document = report.document()
    assert document["failedCount"] == report.failed_count == 5
    assert len({one.key for one in report.failed}) == len(report.failed) == 3
    assert not report.equal


def test_an_upload_is_aborted_where_only_properties_cross_in_the_end(tmp_path: Path) -> None:
    """A patch was killed, and then the source has again what the target has."""
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b", STITCHING)
    body, other = random.Random(4).randbytes(PART), random.Random(5).randbytes(PART)
    source.write("k", 3 * body)
    run = runner((source, target), tmp_path)
    run()
    source.write("k", 2 * body + other)

    def kill(name: str, _key: str) -> None:
        if name == "complete":
            raise KilledError

    target.faults.before = kill
    with pytest.raises(KilledError):
        run()
    assert target.uploading
    target.faults = StoreFaults()
    source.write("k", 3 * body, ANN)
    assert run().metadata_only == 1
    assert not target.uploading


def test_windows_that_are_stitched_in_together_keep_their_own_bytes(tmp_path: Path) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b", STITCHING)
    body = bytearray(random.Random(6).randbytes(8 * PART))
    source.write("k", bytes(body))
    run = runner((source, target), tmp_path)
    run()
    for at in (1 * PART, 4 * PART, 7 * PART):
        body[at] ^= 1
    source.write("k", bytes(body))
    report = run()
    assert (report.copied, report.bytes) == (1, 3 * WINDOW_BYTES)
    assert target.bodies() == {"k": bytes(body)}
