"""Some keys fail for ever, and now and then a whole store is down: which is which?

A key that is never answered for holds up itself alone, and is named, also where it lies
in a folder that is renamed or deleted. While a store is down everything waits, and no
key is blamed for it. Planted bugs must be found.
"""

import random
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from replicator.crossing import Crossing
from replicator.replication import Condition, ReplicationOptions
from replicator.stores.errors import StoreUnavailableError
from replicator.syncer.failing_keys import FailingKeys
from replicator.syncer.store_health import HealthAnswer, StoreHealth
from replicator.syncer.workers import ChangeWorkers
from tests.support.memory_store import MEMORY, MemoryStore, StoreFaults
from tests.support.replication_history import (
    History,
    HistoryViolationError,
    keys_below,
    properties,
)
from tests.support.replications import LaterExecutor, Replication, StepClock, step_limits
from tests.support.weather import shows_a_bug, weather

FOLDERS, NAMES = "abc", range(6)
KEYS = [f"{folder}/{name}" for folder in FOLDERS for name in NAMES]
# Whether the source has a log, and whether it makes snapshots.
WAYS = ((False, False), (False, True), (True, False), (True, True))
READS = {"read", "facts", "properties"}
WRITES = {"put", "put_properties", "facts", "delete", "rename"}
EPOCHS = 3
SEEDS = 8
_TRACE = 200


class FailingKeysStorm:
    """A replication, keys that fail, and outages, drawn from one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock, self.later = StepClock(), LaterExecutor()
        has_feed, has_snapshots = WAYS[seed % len(WAYS)]
        self.source = MemoryStore(
            "memory:a", now_ms=self._now_ms, has_feed=has_feed, has_snapshots=has_snapshots
        )
        renames = rng.random() < 0.5
        self.target = MemoryStore(
            "memory:b", now_ms=self._now_ms, says_little=True, renames=renames
        )
        self.history = History(Crossing.between(MEMORY, MEMORY))
        # Whatever folder they are renamed to.
        bad = rng.sample(NAMES, rng.choice((1, 1, 2)))
        self.bad = {f"{folder}/{name}" for folder in FOLDERS for name in bad}
        # Folders whose bad keys may stay under their old names. What changes such a
        # folder as a whole waits for them.
        self._renamed = set[str]()
        self._renames_bad = rng.random() < 0.3
        self.trace = deque[str](maxlen=_TRACE)
        self._side = rng.choice((self.source, self.target))
        names = sorted(READS if self._side is self.source else WRITES)
        self._fails = set(rng.sample(names, rng.randint(1, len(names))))
        self._down = set[str]()
        self._claimed: tuple[int | None, int | None] = None, None
        for _ in range(30):
            self._write()
        if rng.random() < 0.5:
            # So that the first comparison has to read properties.
            for key, one in self.source.objects.items():
                self.target.write(key, one.body, one.properties)
        self.source.faults = StoreFaults(lambda name, key: self._before(self.source, name, key))
        self.target.faults = StoreFaults(lambda name, key: self._before(self.target, name, key))
        self.replication = Replication(
            self.source.store(),
            self.target.store(),
            folder,
            options=ReplicationOptions(interval_s=5.0),
            limits=replace(step_limits(), prove_every_s=rng.choice((30.0, 3_600.0))),
            clock=self.clock,
            later=self.later,
        )

    def __str__(self) -> str:
        return f"seed {self.seed}: {sorted(self._fails)} fail for {sorted(self.bad)}"

    def run(self, steps: int) -> None:
        """Some times of outages, and of such without one."""
        for _ in range(steps):
            both = "memory:a", "memory:b"
            self._down = set(self.rng.sample(both, self.rng.choice((1, 1, 2))))
            self._note(f"down: {sorted(self._down)}")
            self._go_on(self.rng.choice((3, 30, 100)), writes=0.3)
            self._down.clear()
            self._note("up")
            self._go_on(60, writes=0.3)
            self._go_on(60, writes=0.0, step_s=(2.0,))
            self._check_progress()

    def heal(self) -> None:
        """Let nothing fail any more: all is equal at last."""
        self._fails.clear()
        self._go_on(200, writes=0.0, step_s=(10.0,))
        report = self.replication.engine.report()
        assert not self._differing()
        assert (report.condition, report.failed) == (Condition.ACTIVE, 0)
        assert not self.target.uploading

    def trace_of(self, key: str | None) -> list[str]:
        """What happened, of one key or of all."""
        return [line for line in self.trace if key is None or line.endswith(key) or ":" in line]

    def close(self) -> None:
        """End what runs."""
        self.replication.kill()

    def _go_on(
        self, steps: int, *, writes: float, step_s: tuple[float, ...] = (0.1, 0.5, 2.0)
    ) -> None:
        for _ in range(steps):
            if self.rng.random() < writes:
                self._write()
            self.replication.step(self.rng.choice(step_s))
            while self.later.waiting and self.rng.random() < 0.9:
                self.later.run(self.rng.randrange(len(self.later.waiting)))
            self._check_report()

    def _check_report(self) -> None:
        """No key is blamed for a store, and nobody says what is not so."""
        report = self.replication.engine.report()
        for one in report.failed_keys:
            if one.key not in self.bad:
                raise HistoryViolationError(one.key, f"is blamed: {one.message}")
        claimed = report.oldest_unproven_ms, report.proven_ms
        if claimed == self._claimed:
            return
        self._claimed = claimed
        self._note(f"claimed: {claimed}")
        if report.oldest_unproven_ms is not None:
            index = self.history.index_before(report.oldest_unproven_ms)
            self.history.acknowledged(self.target, index, ())
        if report.proven_ms is not None:
            index = self.history.index_before(report.proven_ms)
            if report.proven_position is not None:
                index = report.proven_position.index
            self.history.acknowledged(self.target, index, ())

    def _check_progress(self) -> None:
        """All is equal but for keys that fail, and those are named."""
        report = self.replication.engine.report()
        assert report.condition is Condition.ACTIVE, report.message
        differing, named = set(self._differing()), {one.key for one in report.failed_keys}
        differing = {key for key in differing if key[:2] not in self._renamed}
        assert differing <= self.bad
        assert differing <= named

    def _differing(self) -> list[str]:
        ours, theirs, state = self.source.objects, self.target.objects, self.history.state
        return [key for key in KEYS if state(ours.get(key)) != state(theirs.get(key))]

    def _write(self) -> None:
        rng, source, key = self.rng, self.source, self.rng.choice(KEYS)
        match rng.randrange(9):
            case 8:
                self._change_folder()
            case 0 | 1 if key in source.objects:
                self._note(f"delete {key}")
                source.remove(key)
            case 2 | 3 if key in source.objects:
                self._note(f"tag {key}")
                source.touch(key, properties("o", str(self._now_ms())))
            case _:
                self._note(f"write {key}")
                source.write(key, b"%d" % self._now_ms(), properties("o", "x"))
        self.history.note(source, source.newest_index)

    def _change_folder(self) -> None:
        old, new = self.rng.sample([f"{folder}/" for folder in FOLDERS], 2)
        if self.rng.random() < 0.4:
            self._note(f"delete: {old}")
            self.source.remove_below(old)
        elif not keys_below(self.source.objects, new):
            held = self.source.objects.keys() | self.target.objects.keys()
            if not self.bad.isdisjoint(keys_below(held, old)):
                if not self._renames_bad:
                    return
                self._renamed |= {old, new}
            self._note(f"rename: {old} to {new}")
            self.source.move(old, new)

    def _before(self, store: MemoryStore, name: str, key: str) -> None:
        keys = store.deleting if name == "delete" else (key,)
        is_bad = store is self._side and name in self._fails and not self.bad.isdisjoint(keys)
        if is_bad or store.address in self._down:
            raise StoreUnavailableError("503")

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.source.newest_index:5} {text}")

    def _now_ms(self) -> int:
        self.clock.ms += 1
        return self.clock.ms


@pytest.mark.parametrize(
    "start",
    [0, *(pytest.param(one, marks=pytest.mark.long) for one in range(1_000, 1_600, SEEDS))],
)
def test_a_key_that_fails_is_told_from_a_store_that_is_down(start: int, tmp_path: Path) -> None:
    for seed in range(start, start + SEEDS):
        weather(FailingKeysStorm(seed, tmp_path / str(seed)), EPOCHS)


def blamed_at_once(self: FailingKeys, key: str) -> bool:
    """Whatever fails is a fault of its key."""
    del self, key
    return True


def never_blamed(self: FailingKeys, key: str) -> bool:
    """Whatever fails is a fault of a store."""
    fails_alone(self, key)
    return False


def always_answers(self: StoreHealth, _avoided: object) -> HealthAnswer:
    """Whoever lists answers."""
    del self
    return HealthAnswer()


def never_answer(self: StoreHealth) -> bool:
    """A comparison waits for each key."""
    del self
    return False


def none_failed(self: ChangeWorkers) -> int:
    """A key that is held back counts as done."""
    del self
    return 0


fails_alone = FailingKeys.fails_alone
BUGS: dict[str, tuple[type, str, object]] = {
    "a key is blamed at once": (FailingKeys, "fails_alone", blamed_at_once),
    "no key is ever blamed": (FailingKeys, "fails_alone", never_blamed),
    "stores are not asked": (StoreHealth, "_ask", always_answers),
    "a comparison waits for a key": (StoreHealth, "both_answer", never_answer),
    "a key that is held back counts as done": (ChangeWorkers, "failed", property(none_failed)),
}


@pytest.mark.crashes
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name, wrong = BUGS[bug]
    monkeypatch.setattr(kind, name, wrong)
    storms = range(3 * SEEDS)
    assert shows_a_bug(lambda seed: FailingKeysStorm(seed, tmp_path / str(seed)), EPOCHS, storms)
