"""A replication in a storm loses nothing, and says nothing that is not so: R1 to R5.

Four writers put, overwrite, tag, rename and delete, also whole prefixes. Two syncers
are killed, stopped for longer than their lease, and cut off; logs are lost, snapshots
deleted, clocks jump, and requests fail before and after they took effect.
"""

from collections import Counter
from pathlib import Path

import pytest

from replicator.syncer.applier import ChangeApplier, Effect, Outcome
from replicator.syncer.lease import LeaseTimer
from replicator.syncer.rounds import RoundRunner
from replicator.syncer.schedule import ChangeSchedule, Work
from replicator.syncer.stages import NotePosition, Request, StageMachine
from tests.support.replication_history import HistoryViolationError
from tests.support.replication_storm import ReplicationStorm

STEPS = 400
SEEDS = 15


def weather(seed: int, folder: Path) -> ReplicationStorm:
    """One storm to its end; an error shows what happened to the key that it names."""
    storm = ReplicationStorm(seed, folder)
    try:
        storm.run(STEPS)
        storm.heal()
    except BaseException as error:
        key = getattr(error, "key", None)
        error.add_note("\n".join([f"seed {seed}", *storm.trace_of(key)]))
        raise
    finally:
        storm.close()
    return storm


@pytest.mark.parametrize(
    "start",
    [
        *range(0, 4 * SEEDS, SEEDS),
        *(pytest.param(start, marks=pytest.mark.long) for start in range(1_000, 4_000, SEEDS)),
    ],
)
def test_nothing_is_lost_in_a_storm(start: int, tmp_path: Path) -> None:
    """OZ-040, OZ-049, OZ-076, OZ-084, OZ-098, OZ-101, OZ-111, OZ-174."""
    marks, operations = Counter[str](), 0
    for seed in range(start, start + SEEDS):
        storm = weather(seed, tmp_path / str(seed))
        marks += storm.marks
        operations += storm.operations
    assert operations > 2_500
    expected = {"INITIAL_BATCH", "INCREMENTAL", "LIVE", "gap", "killed", "fenced", "proven"}
    assert expected <= marks.keys()


def test_a_storm_is_the_same_each_time(tmp_path: Path) -> None:
    traces = [list(weather(5, tmp_path / name).trace) for name in "ab"]
    assert traces[0] == traces[1]


def found(folder: Path, seeds: int = 60) -> bool:
    """Whether some storm shows that something is wrong."""
    for seed in range(seeds):
        try:
            weather(seed, folder / str(seed))
        except (HistoryViolationError, AssertionError):
            return True
    return False


def no_check(self: LeaseTimer) -> None:
    """A lease that never ends."""


def early_acknowledgement(self: ChangeSchedule, work: Work, *, is_settled: bool = True) -> None:
    """What is done is acknowledged with all before it."""
    finish(self, work, is_settled=is_settled)
    if work.numbers:
        self._done_through = max(self._done_through, *work.numbers)


def always_settled(self: ChangeSchedule, work: Work, *, is_settled: bool = True) -> None:
    """A change whose key is gone is acknowledged before the one that says so."""
    del is_settled
    finish(self, work)


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


finish = ChangeSchedule.finish
BUGS: dict[str, tuple[type, str, object]] = {
    "the lease is not checked": (LeaseTimer, "check", no_check),
    "what is open is acknowledged": (ChangeSchedule, "finish", early_acknowledgement),
    "a key that is gone settles a change": (ChangeSchedule, "finish", always_settled),
    "a gap is passed over": (StageMachine, "_leave_live", no_gap),
    "deletes are skipped": (ChangeApplier, "_delete", skipped_deletes),
    "the log is followed too soon": (RoundRunner, "may_follow", property(follows_too_soon)),
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong = BUGS[bug]
    monkeypatch.setattr(kind, name, wrong)
    assert found(tmp_path)
