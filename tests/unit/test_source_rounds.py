"""Rounds without a log read the source alone, and send only what the ledger lacks."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from replicator.replication import (
    Condition,
    DesiredState,
    Policy,
    ReplicationOptions,
    Stage,
)
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import ObjectFacts, ObjectProperties, WholeObject
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.lease import LocalLease
from replicator.syncer.limits import EngineLimits
from replicator.syncer.threads import ReplicationThreads
from runtime.rate_limit import SystemClock
from tests.support.memory_store import MEMORY, MemoryStore
from tests.support.replications import (
    POLICY,
    SYNCER,
    LaterExecutor,
    Replication,
    StepClock,
    held,
    step_limits,
)
from tests.support.waiting import wait_until

KEYS = 60


@contextmanager
def at_work(
    source: MemoryStore, target: MemoryStore, folder: Path, limits: EngineLimits
) -> Iterator[ReplicationEngine]:
    """A replication in its own threads."""
    engine = ReplicationEngine(
        Policy(POLICY, "memory:a", "memory:b", options=ReplicationOptions(interval_s=0.1)),
        source.store(),
        target.store(),
        parent=folder,
        syncer=SYNCER,
        lease=LocalLease(),
        checkpoint=None,
        clock=SystemClock(),
        limits=limits,
    )
    with ReplicationThreads(engine, "test"):
        yield engine


def rounds(
    folder: Path, *, covers: bool = False, prefixes: tuple[str, ...] = ()
) -> tuple[MemoryStore, MemoryStore, Replication]:
    """A replication whose last comparison found both sides equal."""
    capabilities = replace(MEMORY, stamps_cover_properties=covers)
    source = MemoryStore("memory:a", capabilities, has_feed=False)
    target = MemoryStore("memory:b")
    for number in range(KEYS):
        source.write(f"k{number:03}", b"x%d" % number)
    replication = Replication(
        source.store(),
        target.store(),
        folder,
        options=ReplicationOptions(interval_s=1.0),
        prefixes=prefixes,
        limits=replace(step_limits(), prove_every_s=1e9),
    )
    replication.run(60)
    assert replication.engine.report().differences == 0
    source.calls.clear()
    target.calls.clear()
    return source, target, replication


def test_a_round_without_a_change_asks_the_target_nothing(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)
    before = replication.engine.report()
    replication.run(100)
    assert source.calls.count("list") >= 5
    assert not target.calls
    after = replication.engine.report()
    assert after.checkpoint.stage is Stage.INCREMENTAL
    # Nothing was compared with the target: no proof is younger than the last one.
    assert (after.proven_ms, after.differences) == (before.proven_ms, 0)
    assert before.oldest_unproven_ms is not None
    assert after.oldest_unproven_ms is not None
    assert after.oldest_unproven_ms > before.oldest_unproven_ms


def test_a_comparison_of_prefixes_that_were_wanted_before_proves_nothing(tmp_path: Path) -> None:
    """OZ-161: it had been asked for before the order came."""
    source = MemoryStore("memory:a", replace(MEMORY, stamps_cover_properties=True), has_feed=False)
    target = MemoryStore("memory:b")
    for key in ("in/a", "out/b"):
        source.write(key, key.encode())
    later = LaterExecutor()
    replication = Replication(
        source.store(),
        target.store(),
        tmp_path,
        options=ReplicationOptions(interval_s=1.0),
        prefixes=("in/",),
        later=later,
        run_later=frozenset({"comparer"}),
    )
    engine = replication.engine

    def read() -> None:
        while later.waiting:
            later.run()
        engine.work()

    while engine.report().checkpoint.stage is Stage.INITIAL_BATCH:
        replication.step()
        read()
    while not later.waiting:
        replication.step()
    replication.change(prefixes=())
    for _ in range(2_000):
        replication.step()
        read()
        if engine.report().proven_ms is not None:
            break
    assert engine.report().proven_ms is not None
    assert held(target) == held(source)


def test_what_changed_crosses_and_the_target_is_not_listed(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)
    source.write("new", b"new")
    source.write("k001", b"other")
    source.remove("k002")
    source.touch("k003", ObjectProperties(tags=(("team", "x"),)))
    sent = target.payload
    replication.run(60)
    assert held(target) == held(source)
    assert target.payload == sent + len(b"new") + len(b"other")
    assert "list" not in target.calls


def test_the_lag_of_a_round_counts_from_when_an_object_was_written(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)
    assert replication.engine.report().lag_p99_ms is None
    clock = replication.clock
    source._now_ms = clock.now_ms
    for number in range(20):
        source.write(f"new{number}", b"new")
        clock.pass_s(0.05)
    source.remove("k002")
    source.touch("k003", ObjectProperties(tags=(("team", "x"),)))
    replication.run(60)
    assert held(target) == held(source)
    report = replication.engine.report()
    assert report.lag_p50_ms is not None
    assert report.lag_p99_ms is not None
    # A delete and a tag have no time of their own.
    assert 400 <= report.lag_p50_ms <= report.lag_p99_ms <= 2_500
    before = report.lag_p99_ms
    source.touch("k004", ObjectProperties(tags=(("team", "x"),)))
    clock.pass_s(100)
    replication.run(60)
    assert replication.engine.report().lag_p99_ms == before


def test_nothing_is_deleted_by_a_listing_that_lacks_a_key(tmp_path: Path) -> None:
    """A delete needs a fresh answer of the source."""
    source, target, replication = rounds(tmp_path)
    whole = source.list_objects

    def lacking(prefix: str, *, start_after: str = "") -> object:
        found = whole(prefix, start_after=start_after)
        return (one for one in found if one.key != "k005")

    source.list_objects = lacking  # type: ignore[method-assign, assignment]
    replication.run(60)
    assert "k005" in target.objects
    assert "delete" not in target.calls


def test_a_round_goes_on_where_the_listing_failed(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)
    source.write("k001", b"other")
    source.write("z", b"z")
    failures = iter([True, False, True, False])

    def before(name: str, _key: str) -> None:
        if name in {"list", "properties"} and next(failures, False):
            raise StoreUnavailableError("503")

    source.faults = replace(source.faults, before=before)
    replication.run(200)
    assert next(failures, None) is None
    assert held(target) == held(source)


def test_a_failed_write_holds_back_what_is_known_of_the_target(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)

    def before(name: str, _key: str) -> None:
        if name.startswith("put"):
            raise StoreUnavailableError("503")

    target.faults = replace(target.faults, before=before)
    replication.clock.pass_s(5)
    changed_ms = replication.clock.ms
    source.write("new", b"new")
    replication.run(100)
    unproven = replication.engine.report().oldest_unproven_ms
    assert unproven is not None
    assert unproven <= changed_ms + 1_000
    target.faults = replace(target.faults, before=lambda _name, _key: None)
    replication.run(200)
    assert held(target) == held(source)
    proven = replication.engine.report().oldest_unproven_ms
    assert proven is not None
    assert proven > changed_ms


def test_only_the_prefixes_are_read(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path, prefixes=("k00", "k02"))
    source.write("k010", b"outside")
    source.write("k029", b"inside")
    source.remove("k000")
    replication.run(60)
    assert set(target.objects) == {k for k in source.objects if k.startswith(("k00", "k02"))}


def test_others_writes_at_the_target_are_found_by_the_comparison(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)
    target.write("k001", b"foreign")
    replication.run(60)
    assert held(target) != held(source)
    replication.engine.close()
    replication.start()
    replication.run(60)
    assert held(target) == held(source)


class _SlowReads(MemoryStore):
    """A source whose properties take time to read."""

    clock: StepClock | None = None

    def properties_of(self, facts: object) -> ObjectProperties:
        if self.clock is not None:
            self.clock.pass_s(0.1)
        return super().properties_of(facts)  # type: ignore[arg-type]


def test_reading_takes_no_more_than_its_share_of_time(tmp_path: Path) -> None:
    source, target = _SlowReads("memory:a", has_feed=False), MemoryStore("memory:b")
    for number in range(KEYS):
        source.write(f"k{number:03}", b"x%d" % number)
    replication = Replication(
        source.store(),
        target.store(),
        tmp_path,
        options=ReplicationOptions(interval_s=1.0),
        limits=replace(step_limits(), prove_every_s=1e9),
    )
    replication.run(60)
    source.clock = replication.clock
    replication.run(600)
    source.calls.clear()
    began_s = replication.clock.monotonic_s()
    replication.run(1_000)
    spent_s = 0.1 * source.calls.count("properties")
    assert spent_s <= 0.3 * (replication.clock.monotonic_s() - began_s)
    source.touch("k007", ObjectProperties(tags=(("team", "x"),)))
    replication.run(2_000)
    assert held(target) == held(source)


@pytest.mark.parametrize("covers", [True, False])
def test_properties_are_read_where_stamps_do_not_show_them(tmp_path: Path, covers: bool) -> None:
    source, _, replication = rounds(tmp_path, covers=covers)
    replication.run(60)
    assert ("properties" in source.calls) is not covers


def test_what_is_new_at_a_start_need_not_wait_for_a_comparison(tmp_path: Path) -> None:
    """The ledger of the process before tells what the target has."""
    source, target, replication = rounds(tmp_path)
    replication.engine.close()
    source.write("new", b"new")
    source.remove("k001")
    target.calls.clear()
    replication.start()
    replication.run(20)
    assert held(target) == held(source)
    assert "list" not in target.calls
    # Nobody knows what that process did at its end.
    assert replication.engine.report().oldest_unproven_ms is None
    replication.run(60)
    assert target.calls.count("list") > 0
    assert replication.engine.report().oldest_unproven_ms is not None
    assert replication.engine.report().differences == 0


def test_a_late_write_of_the_process_before_is_found_soon(tmp_path: Path) -> None:
    source, target, replication = rounds(tmp_path)
    replication.engine.close()
    replication.start()
    replication.run(10)
    target.write("k001", b"late")
    source.write("new", b"new")
    replication.run(100)
    assert held(target) == held(source)


@pytest.mark.parametrize("what", ["a lost ledger", "other prefixes"])
def test_a_start_that_knows_too_little_compares_first(tmp_path: Path, what: str) -> None:
    source, target, replication = rounds(tmp_path, prefixes=("k00",))
    replication.engine.close()
    if what == "a lost ledger":
        (ledger,) = tmp_path.rglob("ledger.sqlite")
        for file in ledger.parent.iterdir():
            file.unlink()
    else:
        replication.prefixes = ("k00", "k01")
    target.calls.clear()
    replication.start()
    replication.run(3)
    assert "list" in target.calls
    replication.run(60)
    assert set(target.objects) == {
        one for one in source.objects if one.startswith(replication.prefixes)
    }


def test_properties_that_come_slowly_delay_no_new_object(tmp_path: Path) -> None:
    source, target = MemoryStore("memory:a"), MemoryStore("memory:b")
    for number in range(KEYS):
        source.write(f"k{number:03}", b"x%d" % number)
    answers, is_slow, first = threading.Event(), threading.Event(), set(source.objects)

    def before(name: str, key: str) -> None:
        if name == "properties" and key in first and is_slow.is_set():
            assert answers.wait(60)

    source.faults = replace(source.faults, before=before)
    with at_work(source, target, tmp_path, EngineLimits()) as engine:
        wait_until(lambda: engine.report().differences == 0, "the first comparison")
        is_slow.set()
        wait_until(lambda: source.calls.count("list") > 10, "some rounds")
        source.touch("k007", ObjectProperties(tags=(("team", "x"),)))
        for name in ("a", "k00a", "z"):
            source.write(name, b"new")
            wait_until(partial(target.objects.__contains__, name), "a new object")
        is_slow.clear()
        answers.set()
        wait_until(lambda: held(target) == held(source), "the tag")


@pytest.fixture
def gate(tmp_path: Path) -> Iterator["Gate"]:
    gate = Gate(tmp_path)
    yield gate
    gate.opened.set()


class Gate:
    """A target that answers no listing while it is closed, as a comparison needs it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened, self.reached = threading.Event(), threading.Event()
        self.opened.set()
        self.source = MemoryStore("memory:a", replace(MEMORY, stamps_cover_properties=True))
        self.target = MemoryStore("memory:b")
        for number in range(KEYS):
            self.source.write(f"k{number:03}", b"x%d" % number)
        self.target.faults = replace(self.target.faults, before=self._before)

    def close(self) -> None:
        """The next listing waits."""
        self.reached.clear()
        self.opened.clear()

    def _before(self, name: str, _key: str) -> None:
        if name == "list" and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(60)


def test_a_change_does_not_wait_for_a_comparison(gate: "Gate") -> None:
    """Both sides are listed beside the rounds, however long that takes."""
    source, target = gate.source, gate.target
    with at_work(source, target, gate.folder, EngineLimits(prove_every_s=2.0)) as engine:
        wait_until(lambda: engine.report().proven_ms is not None, "the first comparison")
        gate.close()
        assert gate.reached.wait(60)
        for number in range(20):
            began_s = time.monotonic()
            source.write(f"new{number}", b"new")
            wait_until(partial(target.objects.__contains__, f"new{number}"), "a new object")
            assert time.monotonic() - began_s <= 5
        source.remove("k001")
        wait_until(lambda: "k001" not in target.objects, "a delete")
        proven_ms = engine.report().proven_ms
        gate.opened.set()
        # What came meanwhile is in flight: it is no difference, and not proven by this.
        wait_until(
            lambda: (engine.report().proven_ms or 0) > (proven_ms or 0), "a proof", timeout_s=90
        )
        assert engine.report().differences == 0
    assert held(target) == held(source)


def test_a_pause_ends_a_comparison_at_once_and_a_resume_goes_on_with_it(gate: "Gate") -> None:
    source, target = gate.source, gate.target
    with at_work(source, target, gate.folder, EngineLimits(prove_every_s=2.0)) as engine:
        wait_until(lambda: engine.report().proven_ms is not None, "the first comparison")
        gate.close()
        assert gate.reached.wait(60)
        policy = Policy(POLICY, "memory:a", "memory:b", options=ReplicationOptions(interval_s=0.1))
        began_s = time.monotonic()
        engine.change(replace(policy, desired=DesiredState.PAUSED))
        wait_until(lambda: engine.report().condition is Condition.PAUSED, "a pause")
        assert time.monotonic() - began_s <= 2
        target.write("k001", b"foreign")
        target.calls.clear()
        gate.opened.set()
        time.sleep(0.5)
        # The request that was under way has come to its end, and no other follows.
        assert target.calls.count("list") <= 1
        assert target.objects["k001"].body == b"foreign"
        engine.change(policy)
        wait_until(lambda: held(target) == held(source), "a repair")


def test_a_comparison_reads_no_more_than_what_may_wait(tmp_path: Path) -> None:
    """Its memory is bounded: what differs is applied before more is read."""
    later, target = LaterExecutor(), MemoryStore("memory:b")
    source = MemoryStore("memory:a", has_feed=False, page_keys=100)
    for number in range(1_000):
        source.write(f"k{number:03}", b"x")
    replication = Replication(source.store(), target.store(), tmp_path, later=later)
    replication.run(50)
    # Nothing is applied yet.
    read = source.calls.count("list")
    assert 5 <= read <= 9
    for _ in range(30):
        while later.waiting:
            later.run()
        replication.step()
    assert read < source.calls.count("list") <= 12


class _SlowListing(MemoryStore):
    """A source whose listing takes 1 s, and notes from where it was listed."""

    clock: StepClock | None = None
    listed_from: list[str]

    def list_objects(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectFacts]:
        if self.clock is not None:
            self.clock.pass_s(1.0)
            self.listed_from.append(start_after)
        return super().list_objects(prefix, start_after=start_after)


def slowly_listed(folder: Path, later: LaterExecutor) -> tuple[_SlowListing, Replication]:
    """A replication in rounds that read some of its pages more often than others."""
    capabilities = replace(MEMORY, stamps_cover_properties=True)
    source = _SlowListing("memory:a", capabilities, has_feed=False)
    source.listed_from = []
    for number in range(KEYS):
        source.write(f"k{number:03}", b"x%d" % number)
    replication = Replication(
        source.store(),
        MemoryStore("memory:b").store(),
        folder,
        options=ReplicationOptions(interval_s=0.2),
        limits=replace(step_limits(), prove_every_s=1e9, page_keys=10),
        later=later,
    )
    for _ in range(100):
        replication.step()
        while later.waiting:
            later.run()
    source.clock = replication.clock
    source._now_ms = replication.clock.now_ms
    # All pages are listed, and this one has changed.
    source.write("k055", b"new")
    while "" not in source.listed_from:
        replication.step()
    for _ in range(20):
        replication.step()
        while later.waiting:
            later.run()
    return source, replication


def test_pages_that_changed_lately_are_read_between_two_rounds(tmp_path: Path) -> None:
    later = LaterExecutor()
    source, replication = slowly_listed(tmp_path, later)
    assert "k05" in source.listed_from
    source.listed_from.clear()
    for number in range(8):
        source.write("k055", b"%d" % number)
        for _ in range(10):
            replication.step()
            while later.waiting:
                later.run()
    # No other page is read between two rounds, and those come as before.
    assert set(source.listed_from) == {"", "k05"}
    source.listed_from.clear()
    replication.run(100)
    # Once nothing changes any more, only rounds are left.
    assert set(source.listed_from[-5:]) == {""}


def test_what_is_found_between_two_rounds_has_to_be_applied_first(tmp_path: Path) -> None:
    later = LaterExecutor()
    source, replication = slowly_listed(tmp_path, later)
    written_ms, source.listed_from = 0, [""]
    while source.listed_from[-1] != "k05":
        # A round has found the last one.
        while later.waiting:
            later.run()
        source.listed_from = [""]
        source.write("k055", b"%d" % replication.clock.ms)
        written_ms = replication.clock.ms
        while not later.waiting:
            replication.step()
    source.listed_from.clear()
    while source.listed_from.count("") < 4:
        replication.step()
    claimed = replication.engine.report().oldest_unproven_ms
    assert claimed is not None
    assert claimed <= written_ms
    while later.waiting:
        later.run()
    replication.run(20)
    claimed = replication.engine.report().oldest_unproven_ms
    assert claimed is not None
    assert claimed > written_ms


def test_after_many_default_acls_an_acl_is_read_once_nothing_waits(tmp_path: Path) -> None:
    later = LaterExecutor()
    source, target = MemoryStore("memory:a", has_feed=False), MemoryStore("memory:b")
    options = ReplicationOptions(interval_s=1.0)
    replication = Replication(
        source.store(),
        target.store(),
        tmp_path,
        options=options,
        later=later,
        run_later=frozenset({"properties"}),
    )
    source._now_ms = replication.clock.now_ms

    def run(steps: int = 60) -> None:
        for _ in range(steps):
            replication.step()
            while later.waiting:
                later.run()

    run()
    for number in range(64):
        source.write(f"k{number:03}", b"x")
    run()
    shared = ObjectProperties(acl=(('uri="everyone"', "READ"),))
    replication.clock.pass_s(1)
    written_ms = replication.clock.ms
    source.write("shared", b"x", shared)
    replication.run(60)
    # Its copy came without the ACL, and is not said to be as its source.
    assert target.objects["shared"].properties.acl == ()
    assert (replication.engine.report().oldest_unproven_ms or 0) <= written_ms
    run(100)
    assert held(target) == held(source)
    assert (replication.engine.report().oldest_unproven_ms or 0) > written_ms
    # From then on ACLs are expected.
    source.write("other", b"x", shared)
    replication.run(60)
    assert target.objects["other"].properties.acl == shared.acl


def test_acls_that_do_not_cross_are_not_read(tmp_path: Path) -> None:
    asked = list[bool]()

    class Asked(MemoryStore):
        def read_whole(self, facts: ObjectFacts, *, with_acl: bool = True) -> WholeObject:
            asked.append(with_acl)
            return super().read_whole(facts, with_acl=with_acl)

    source = Asked("memory:a", has_feed=False)
    source.write("k", b"x")
    target = MemoryStore("memory:b", replace(MEMORY, keeps_acls=False))
    Replication(source.store(), target.store(), tmp_path).run(20)
    assert (asked, target.bodies()) == ([False], {"k": b"x"})
