"""A source without a log is read in rounds: what is said of its changes is so.

Writers put, overwrite, tag and delete while rounds read the source, and requests fail
or wait. Whenever a time is reported before which every change is at the target, the
history is asked. Planted bugs must be found.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from replicator.assumed_acls import DEFAULT_IN_A_ROW, AssumedAcls
from replicator.crossing import Crossing
from replicator.ledger import LedgerRow
from replicator.replication import ReplicationOptions
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import Change, ObjectProperties
from replicator.syncer.comparing import StoreComparing
from replicator.syncer.property_reads import PropertyReads
from replicator.syncer.schedule import SettledTimes, Work
from replicator.syncer.source_rounds import SourceRounds
from tests.support.memory_store import MEMORY, MemoryStore, StoreFaults
from tests.support.replication_history import History, HistoryViolationError
from tests.support.replications import LaterExecutor, Replication, StepClock, step_limits

KEYS = [f"{letter}{number}" for letter in "abc" for number in range(5)]
STEPS = 250
SEEDS = 4


class Rounds:
    """One source, one target, and what happens to them by one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.clock = StepClock()
        self.later = LaterExecutor()
        self.source = MemoryStore("memory:a", now_ms=self._now_ms)
        self.target = MemoryStore("memory:b", now_ms=self._now_ms, says_little=True)
        whole = Crossing.between(MEMORY, MEMORY)
        self.history, self.without_acls = History(whole), History(replace(whole, acl=False))
        self.claims = 0
        self._errors = self.rng.choice((0.0, 0.005))
        self._list_s = self.rng.choice((0.0, 0.6))
        for _ in range(20):
            self._write()
        self.replication = Replication(
            self.source.store(),
            self.target.store(),
            folder,
            options=ReplicationOptions(interval_s=0.5),
            limits=replace(
                step_limits(),
                page_keys=self.rng.choice((3, 1_000)),
                # By every other seed objects are copied before their ACL is read: a
                # bucket of more would take long.
                default_acls_in_a_row=0 if seed % 2 else DEFAULT_IN_A_ROW,
                # Comparisons mend what rounds do not see.
                prove_every_s=4.0 if seed % 3 == 1 else 3_600.0,
            ),
            clock=self.clock,
            later=self.later,
            run_later=frozenset({"change", "lister", "comparer", "properties"}),
        )
        self.source.faults = self.target.faults = StoreFaults(self._before)

    def run(self) -> None:
        """Let things happen, and look at every claim."""
        claimed = None
        for step in range(STEPS):
            is_quiet = step < 40
            if not is_quiet and self.rng.random() < 0.3:
                self._write()
            self.replication.step(self.rng.choice((0.02, 0.2)))
            while self.later.waiting and (is_quiet or self.rng.random() < 0.5):
                self.later.run(self.rng.randrange(len(self.later.waiting)))
            as_of_ms = self.replication.engine.report().oldest_unproven_ms
            if as_of_ms is not None and as_of_ms != claimed:
                claimed, self.claims = as_of_ms, self.claims + 1
                self.without_acls.acknowledged(self.target, as_of_ms - 1, ())
                self.history.acknowledged(self.target, as_of_ms - 1, self._newer(as_of_ms - 1))
        self.replication.kill()

    def _write(self) -> None:
        # Most writes go to few pages of a listing: those are read more often.
        few = KEYS[:3] if self.rng.random() < 0.9 else KEYS
        rng, source, key = self.rng, self.source, self.rng.choice(few)
        found = source.objects.get(key)
        acl = (('id="ann"', "READ"),) if rng.random() < 0.3 else ()
        tag = ObjectProperties(tags=(("team", str(self._now_ms())),), acl=acl)
        match rng.randrange(4):
            case 0 if found:
                source.remove(key)
            case 1 if found:
                source.touch(key, tag)
            case _:
                source.write(key, b"%d" % self._now_ms(), tag)
        # Its index in the history is its time.
        for history in (self.history, self.without_acls):
            history.note(source, self.clock.ms + 1)
        self._now_ms()

    def _newer(self, through: int) -> set[str]:
        """The keys of which the target has a newer version, maybe still without its
        ACL.
        """
        history, objects = self.without_acls, self.target.objects
        return {
            key
            for key, states in history.states.items()
            if any(
                index > through and one == history.state(objects.get(key)) for index, one in states
            )
        }

    def _before(self, name: str, _key: str) -> None:
        if name == "list" and self._list_s:
            # Only what takes long leaves time for other looks at the source.
            self.clock.pass_s(self._list_s)
        if self.rng.random() < self._errors:
            raise StoreUnavailableError("503")

    def _now_ms(self) -> int:
        self.clock.ms += 1
        return self.clock.ms


def weather(seed: int, folder: Path) -> int:
    """One run to its end; how many claims were looked at."""
    rounds = Rounds(seed, folder)
    try:
        rounds.run()
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    return rounds.claims


def several(seeds: int, folder: Path) -> list[int]:
    """The claims of some runs."""
    return [weather(seed, folder / str(seed)) for seed in range(seeds)]


def test_no_change_is_missing_before_the_time_that_is_reported(tmp_path: Path) -> None:
    assert min(several(SEEDS, tmp_path)) > 5


def skips_deletes(self: SourceRounds, change: Change) -> Work | None:
    """What the source lacks is passed over."""
    has_key = self._source.reader.facts(change.key) is not None
    return touch(self, change) if has_key else None


def counts_at_once(self: SettledTimes, as_of_ms: int, _works: deque[Work]) -> None:
    """A round counts before what it has found is applied."""
    add(self, as_of_ms, deque())


def reads_no_properties(self: PropertyReads, row: LedgerRow) -> bytes:
    """New tags are not seen."""
    del self
    return row.properties


def reads_some_properties(self: PropertyReads, key: str) -> Iterator[LedgerRow]:
    """Those of all keys but the first are not seen."""
    return islice(rows_after(self, key), 1)


def is_done_once_read(self: StoreComparing) -> bool:
    """A comparison counts before what it has found is applied."""
    return self._is_read


touch, add, rows_after = SourceRounds._touch, SettledTimes.add, PropertyReads._rows_after
BUGS: dict[str, tuple[type, str, object]] = {
    "deletes are skipped": (SourceRounds, "_touch", skips_deletes),
    "a round counts too soon": (SettledTimes, "add", counts_at_once),
    "properties are not read": (PropertyReads, "_digest", reads_no_properties),
    "some properties are not read": (PropertyReads, "_rows_after", reads_some_properties),
    "an ACL counts that was not read": (AssumedAcls, "oldest_ms", property(lambda _: None)),
    "a comparison counts too soon": (StoreComparing, "is_done", property(is_done_once_read)),
}


@pytest.mark.crashes
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, name, wrong = BUGS[bug]
    monkeypatch.setattr(broken, name, wrong)
    with pytest.raises(HistoryViolationError):
        several(3 * SEEDS, tmp_path)
