"""A replication in a storm loses nothing, and says nothing that is not so: R1 to R5.

Four writers put, overwrite, tag, rename and delete, also whole prefixes. Two syncers
are killed, stopped for longer than their lease, and cut off; their master restarts, and
its messages are lost, late and repeated; operators pause, fence, cancel, and want other
prefixes; logs are lost, snapshots deleted, clocks jump, and requests fail before and
after they took effect.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from replicator.master import assignment, orders, views
from replicator.master.leases import RecordAges, is_valid
from replicator.master.records import (
    RecordKey,
    ReplicationState,
    StoredState,
    SyncerLease,
    SyncerRecord,
)
from replicator.master.transition import given_up
from replicator.master.views import ReplicationView
from replicator.replication import Condition
from replicator.stores.port import Change, ChangeKind
from replicator.syncer import capture, proof
from replicator.syncer.applier import ChangeApplier, Effect, Outcome
from replicator.syncer.engine import ReplicationEngine
from replicator.syncer.lease import LeaseTimer
from replicator.syncer.prefixes import change_within
from replicator.syncer.rounds import RoundRunner
from replicator.syncer.schedule import ChangeSchedule, Work
from replicator.syncer.stages import NotePosition, Request, StageMachine
from tests.support.replication_storm import ReplicationStorm
from tests.support.weather import all_in_flight, shows_a_bug, weather

STEPS = 400
SEEDS = 15
# Of `make test`, with more than 10,000 operations in all.
GROUPS = 3
OPERATIONS_MIN = 3_334


@pytest.mark.parametrize(
    "start",
    [
        *range(0, GROUPS * SEEDS, SEEDS),
        *(
            pytest.param(start, marks=pytest.mark.long)
            for start in (GROUPS * SEEDS, *range(1_000, 4_000, SEEDS))
        ),
    ],
)
def test_nothing_is_lost_in_a_storm(start: int, tmp_path: Path) -> None:
    """OZ-040, OZ-048, OZ-049, OZ-076, OZ-084, OZ-098, OZ-101, OZ-111, OZ-135, OZ-161,
    OZ-174.
    """
    marks, operations = Counter[str](), 0
    for seed in range(start, start + SEEDS):
        storm = weather(ReplicationStorm(seed, tmp_path / str(seed)), STEPS)
        marks += storm.marks
        operations += storm.operations
    assert operations > (OPERATIONS_MIN if start < GROUPS * SEEDS else 1_000)
    expected = {"INITIAL_BATCH", "INCREMENTAL", "LIVE", "gap", "master killed", "rpo", "shown"}
    assert expected <= marks.keys()


@pytest.mark.parametrize(
    "seed",
    [
        # A gap ended a round between a record and the deletion of a snapshot.
        265,
        # What was cancelled had to end while the operator had disabled everything.
        1377,
        # A key had failed, and the next process knew nothing of it.
        1502,
        # Prefixes were withdrawn while no syncer had it, and wanted again: nobody knew
        # that they had not been followed meanwhile.
        2520,
        # Other prefixes were wanted before the log was captured: what had been taken of
        # the queue was taken twice.
        1553,
        # A lease ended by chance: an empty queue was that of a process that had read
        # nothing.
        3069,
        # A key was gone, and then below no prefix that was wanted: the log never told
        # of its deletion, for which an earlier change waited.
        5005,
        5015,
    ],
)
def test_a_storm_that_once_failed_heals(seed: int, tmp_path: Path) -> None:
    """OZ-124, OZ-126."""
    weather(ReplicationStorm(seed, tmp_path), STEPS)


def test_a_storm_is_the_same_each_time(tmp_path: Path) -> None:
    storms = [weather(ReplicationStorm(5, tmp_path / name), STEPS) for name in "ab"]
    one, other = ((list(storm.trace), storm.marks, storm.history.states) for storm in storms)
    assert one == other


def no_check(self: LeaseTimer) -> None:
    """A lease that never ends."""


def early_acknowledgement(self: ChangeSchedule, work: Work, *, is_settled: bool = True) -> int:
    """What is done is acknowledged with all before it."""
    count = finish(self, work, is_settled=is_settled)
    if work.numbers:
        self._done_through = max(self._done_through, *work.numbers)
    return count


def always_settled(self: ChangeSchedule, work: Work, *, is_settled: bool = True) -> int:
    """A change whose key is gone is acknowledged before the one that says so."""
    del is_settled
    return finish(self, work)


def no_gap(self: StageMachine, **_known: bool) -> list[Request]:
    """A gap in the log is passed over: what follows is queued."""
    del self
    return [NotePosition()]


def skipped_deletes(self: ChangeApplier, changes: object, **_choices: object) -> list[Outcome]:
    """Nothing is ever deleted."""
    del self
    assert isinstance(changes, list)
    return [Outcome(Effect.DELETED)] * len(changes)


def follows_too_soon(self: RoundRunner) -> bool:
    """The log is applied before it is recorded that it is."""
    return self._machine.is_live


def never(self: object, *_given: object) -> bool:
    """Nothing is."""
    del self
    return False


def clock_alone(lease: SyncerLease, now_ms: int, unchanged_ms: int) -> bool:
    """A lease ends by the clock of the database alone, which jumps."""
    del unchanged_ms
    return not is_valid(lease, now_ms)


def seen_for_ever(
    self: RecordAges, state: StoredState, read_s: float, now_s: float
) -> Mapping[RecordKey, int]:
    """A master takes what it has just read for what it has seen for long."""
    note(self, state, read_s, now_s)
    return dict.fromkeys(state.records, 1_000_000)


def taken_at_once(
    state: ReplicationState, _syncer: SyncerRecord | None, now_ms: int
) -> ReplicationState:
    """A fence is said to be complete while the old holder may still write."""
    return given_up(state, now_ms)


def paused_at_once(self: ReplicationEngine, *given: object) -> Condition:
    """What runs still is said to be paused."""
    found = condition(self, *given)
    return Condition.PAUSED if self._policy.desired.value == "PAUSED" else found


def no_way_out(change: Change, prefixes: Sequence[str]) -> Change | None:
    """A rename out of the prefixes is passed over."""
    found = change_within(change, prefixes)
    is_out = change.kind is ChangeKind.RENAME and found and found.kind is ChangeKind.DELETE
    return None if is_out else found


def kept_proof(self: ReplicationEngine) -> None:
    """A proof outlives its prefixes."""


def as_reported(_view: ReplicationView) -> tuple[str, ...]:
    """A report that is older than an order is shown as it is."""
    return ()


def no_backfill(self: StageMachine) -> list[Request]:
    """What has a prefix that was added is not compared."""
    missing = self._prefixes
    self._checkpoint = replace(self._checkpoint, prefixes=tuple(sorted(missing)) or ("",))
    return []


finish = ChangeSchedule.finish
note = RecordAges.note
condition = ReplicationEngine._condition
BUGS: dict[str, tuple[type | ModuleType, str, object]] = {
    "the lease is not checked": (LeaseTimer, "check", no_check),
    "what is open is acknowledged": (ChangeSchedule, "finish", early_acknowledgement),
    "a key that is gone settles a change": (ChangeSchedule, "finish", always_settled),
    "a gap is passed over": (StageMachine, "_leave_live", no_gap),
    "deletes are skipped": (ChangeApplier, "_delete", skipped_deletes),
    "the log is followed too soon": (RoundRunner, "may_follow", property(follows_too_soon)),
    "a lease ends by one clock": (assignment, "has_ended", clock_alone),
    "a master that restarts waits for nothing": (RecordAges, "note", seen_for_ever),
    "a fence is complete at once": (orders, "taken_from_living", taken_at_once),
    "what runs is paused": (ReplicationEngine, "_condition", paused_at_once),
    "a prefix that was added is known": (StageMachine, "_backfill", no_backfill),
    "a rename out of a prefix is passed over": (capture, "change_within", no_way_out),
    "a proof outlives its prefixes": (ReplicationEngine, "_forget_proof", kept_proof),
    "a report outlives its prefixes": (views, "missing_prefixes", as_reported),
    "every difference is in flight": (proof, "_is_among", all_in_flight),
    "an age is told of what a comparison found": (ChangeSchedule, "has_found", property(never)),
}
# Seeds of storms that show what is found in few of them.
FIRST_SEEDS = {
    "a lease ends by one clock": 49,
    "the lease is not checked": 88,
    "what is open is acknowledged": 28,
    "a master that restarts waits for nothing": 15,
    "a key that is gone settles a change": 14,
    "a rename out of a prefix is passed over": 56,
    "the log is followed too soon": 8,
    "what runs is paused": 123,
    "a prefix that was added is known": 166,
    "an age is told of what a comparison found": 41,
}


@pytest.mark.crashes
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong = BUGS[bug]
    monkeypatch.setattr(kind, name, wrong)
    first = FIRST_SEEDS.get(bug, 0)
    seeds = range(first, first + 60)
    assert shows_a_bug(lambda seed: ReplicationStorm(seed, tmp_path / str(seed)), STEPS, seeds)
