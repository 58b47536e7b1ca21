"""Rounds by snapshots are compared beside: no change waits for a comparison."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from replicator.replication import Condition, ReplicationOptions
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import Change, ChangeKind
from replicator.syncer.comparing import Comparing
from replicator.syncer.differences_found import DifferenceSink
from replicator.syncer.phase import SyncPhase
from replicator.syncer.round_proofs import RoundProofs
from replicator.syncer.snapshot_proofs import SnapshotProofs
from tests.support.memory_store import MemoryStore
from tests.support.replications import (
    LaterExecutor,
    Replication,
    StepClock,
    failing,
    held,
    step_limits,
)

EVERY_S = 600.0


def begun(folder: Path) -> tuple[MemoryStore, MemoryStore, Replication]:
    """A replication from snapshot to snapshot, whose next comparison is soon due. Its
    keys are compared when the test says so.
    """
    clock = StepClock()
    source = MemoryStore("memory:a", has_snapshots=True, now_ms=clock.now_ms)
    target = MemoryStore("memory:b", now_ms=clock.now_ms)
    for number in range(20):
        source.write(f"k{number:05}", b"x%d" % number)
    replication = Replication(
        source.store(),
        target.store(),
        folder,
        options=ReplicationOptions(interval_s=5.0),
        limits=replace(step_limits(), prove_every_s=EVERY_S),
        clock=clock,
        later=LaterExecutor(),
        run_later=frozenset({"comparer"}),
    )
    compare_all(replication)
    assert held(target) == held(source)
    assert replication.engine.report().differences == 0
    return source, target, replication


def compare(replication: Replication, steps: int) -> None:
    """Some steps, in which keys are compared."""
    assert replication.later is not None
    for _ in range(steps):
        replication.step(0.5)
        while replication.later.waiting:
            replication.later.run()


def compare_all(replication: Replication) -> None:
    """Until a comparison has come to its end that begins from now on."""
    replication.clock.pass_s(EVERY_S)
    compare(replication, 300)


def test_changes_cross_while_both_sides_are_compared(tmp_path: Path) -> None:
    source, target, replication = begun(tmp_path)
    assert replication.later is not None
    replication.clock.pass_s(EVERY_S)
    replication.run(100)
    assert replication.later.waiting, "no comparison is under way"
    proven_ms = replication.engine.report().proven_ms
    for number in range(5):
        source.write("k00001", b"again %d" % number)
        source.remove(f"k0001{number}")
        written_ms = replication.clock.ms
        replication.run(80)
        assert held(target) == held(source)
        assert (replication.engine.report().oldest_unproven_ms or 0) >= written_ms
    assert replication.engine.report().proven_ms == proven_ms
    compare(replication, 100)
    report = replication.engine.report()
    assert (report.condition, report.differences) == (Condition.ACTIVE, 0)
    assert (report.proven_ms or 0) > (proven_ms or 0)
    assert len(source.snapshots) <= 2


@pytest.mark.parametrize("harm", ["deleted", "other bytes", "foreign"])
def test_what_others_did_at_the_target_is_found_and_mended(harm: str, tmp_path: Path) -> None:
    source, target, replication = begun(tmp_path)
    match harm:
        case "deleted":
            target.remove("k00003")
        case "other bytes":
            target.write("k00003", b"foreign")
        case _:
            target.write("foreign", b"foreign")
    harmed_ms = replication.clock.ms
    replication.run(100)
    assert held(target) != held(source)
    replication.clock.pass_s(EVERY_S)
    proven_ms, worst = replication.engine.report().proven_ms, 0
    for _ in range(100):
        compare(replication, 1)
        worst = max(worst, replication.engine.report().differences or 0)
    assert worst == 1
    assert held(target) == held(source)
    assert replication.engine.report().proven_ms == proven_ms
    # It is compared again soon, and proven then.
    compare(replication, 300)
    report = replication.engine.report()
    assert report.differences == 0
    assert (report.proven_ms or 0) > harmed_ms


def test_what_changes_under_a_comparison_is_no_difference(tmp_path: Path) -> None:
    source, target, replication = begun(tmp_path)
    proven_ms = replication.engine.report().proven_ms or 0
    replication.clock.pass_s(EVERY_S)
    assert replication.later is not None
    for number in range(200):
        source.write(f"k{number % 20:05}", b"new %d" % number)
        if number % 3:
            source.remove(f"k{(number + 7) % 20:05}")
        replication.step(0.5)
        if replication.later.waiting and not number % 5:
            replication.later.run()
    for _ in range(100):
        compare(replication, 1)
        assert replication.engine.report().differences == 0
    assert (replication.engine.report().proven_ms or 0) > proven_ms
    assert held(target) == held(source)


def test_a_key_that_failed_leaves_nothing_proven(tmp_path: Path) -> None:
    source, target, replication = begun(tmp_path)
    proven_ms = replication.engine.report().proven_ms
    mend = failing(target, StoreUnavailableError("503"), {"put"})
    source.write("k00001", b"another")
    compare(replication, 60)
    replication.clock.pass_s(EVERY_S)
    compare(replication, 60)
    report = replication.engine.report()
    assert report.failed == 1
    assert report.differences
    assert report.proven_ms == proven_ms
    mend()
    compare_all(replication)
    assert held(target) == held(source)
    assert replication.engine.report().differences == 0


def test_rounds_wait_for_a_comparison_where_very_much_differs() -> None:
    """It is not kept in memory: another comparison applies what it finds."""
    clock, closed = StepClock(), list[str]()
    phase = SimpleNamespace(close=lambda: closed.append("phase"))

    class Endless:
        """A comparison that finds a thousand keys at a time."""

        is_done = is_waiting = False

        def __init__(self, _phase: SyncPhase, sink: DifferenceSink) -> None:
            self._sink = sink

        def advance(self) -> None:
            """See Comparing."""
            for number in range(1_000):
                self._sink.take(Change(0, f"k{number}", "", ChangeKind.PUT))

        def cancel(self) -> None:
            """See Comparing."""
            closed.append("comparison")

    proofs = SnapshotProofs(
        RoundProofs(clock, EVERY_S),
        lambda: cast("SyncPhase", phase),
        lambda *given: cast("Comparing", Endless(*given)),
    )
    assert not proofs.advance(())
    clock.pass_s(EVERY_S)
    for _ in range(10):
        assert proofs.advance(())
    assert proofs.is_under_way
    assert not proofs.must_compare
    proofs.advance(())
    assert (proofs.is_under_way, proofs.must_compare) == (False, True)
    assert closed == ["comparison", "phase"]
    # Nothing is begun beside the rounds until that has been done.
    assert not proofs.advance(())


def test_a_lost_snapshot_ends_the_comparison_that_waits_for_it(tmp_path: Path) -> None:
    source, target, replication = begun(tmp_path)
    target.remove("k00003")
    replication.clock.pass_s(EVERY_S)
    assert replication.later is not None
    for _ in range(40):
        replication.step(0.5)
        while replication.later.waiting:
            replication.later.run()
        source.snapshots.clear()
    compare_all(replication)
    compare_all(replication)
    assert held(target) == held(source)
    assert replication.engine.report().differences == 0
