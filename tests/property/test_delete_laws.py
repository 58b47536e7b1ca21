"""Laws of deletes: what two cuts and a fresh fact from the source must show, while both
sides move at random.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.comparison import DecidedKey
from replicator.copy_requests import ObjectStamp
from replicator.deletes import SecondCut, shows_same
from replicator.difference import Action, Decision, KeyState
from replicator.ledger import PlannedStep
from replicator.stores.port import DeleteFailure, ObjectFacts
from replicator.sync import SyncOptions, SyncReport
from tests.support.bucket_sync import Remarks, SyncRunner
from tests.support.flawed_stores import FlawedReader
from tests.support.memory_store import MEMORY, MemoryStore, StoreFaults
from tests.support.stores import put
from tests.support.verifiers import VerifiedPair, held, verified_pair

KEYS = tuple(f"k{number}" for number in range(9))
BODIES = (b"a", b"b", b"cc")
SEEDS, GROUPS = 96, 4
# Keys with the versions of them that a cut has shown.
extras = st.dictionaries(st.text(min_size=1, max_size=2), st.integers(1, 2), max_size=12)


def facts_of(key: str, version: int) -> ObjectFacts:
    return ObjectFacts(key, 1, "etag", version)


@given(planned=extras, seen=extras)
def test_a_second_cut_confirms_what_both_have_shown_alike(
    planned: dict[str, int], seen: dict[str, int]
) -> None:
    steps = [
        PlannedStep(key, Action.DELETE.value, 0, None, ObjectStamp.of(facts_of(key, version)), "")
        for key, version in sorted(planned.items())
    ]
    cut = SecondCut(iter(steps))
    alike = [key for key in sorted(planned) if seen.get(key) == planned[key]]
    for key, version in sorted(seen.items()):
        state = KeyState(key, None, facts_of(key, version), source_is_fresh=True)
        decided = DecidedKey(state, Decision(Action.DELETE, ""))
        assert cut.confirms(key, shows_same(decided)) == (key in alike)
    assert [step.key for step in cut.of(iter(steps))] == alike
    assert cut.confirmed == len(alike)


class Stages(Remarks):
    """Tells a watcher of each stage of a run."""

    watcher: "MovingSides"

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """See Remarks."""
        super().begin(what, total, unit)
        self.watcher.begin(what)


class WatchedTarget(MemoryStore):
    """Tells a watcher of each bulk delete before it takes effect."""

    watcher: "MovingSides"

    def delete(self, keys: Sequence[str]) -> list[DeleteFailure]:
        """See ObjectWriter."""
        self.watcher.check(keys)
        return super().delete(keys)


class MovingSides:
    """Both sides move at every request of a run. A key that appears at the source stays
    there: what comes and goes between two looks is seen by nobody without a feed.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.clock = 0
        self.source = MemoryStore("memory:a", MEMORY, now_ms=self._now_ms, page_keys=100)
        self.target = WatchedTarget("memory:b", MEMORY, now_ms=self._now_ms, page_keys=100)
        self.target.watcher = self
        self.runner = SyncRunner(self.source.store(), self.target.store(), folder, delete=True)
        self.runner.progress = stages = Stages()
        stages.watcher = self
        self.rate = self.rng.choice((0.02, 0.1, 0.3))
        self.deletes = self.spared = 0
        self.is_moving = False

    def run(self) -> None:
        """One run while everything moves."""
        self.first_cut = self.second_cut = self.cuts_ended = 0
        # When a key was last at the source; when the source last said that it has none,
        # and when it was last there before.
        self.present = dict[str, int]()
        self.absent = dict[str, tuple[int, int]]()
        self._old = set(self.source.objects)
        self.source.faults = StoreFaults(lambda *call: self._strike(self.source, *call))
        self.target.faults = StoreFaults(lambda *call: self._strike(self.target, *call))
        self.is_moving = True
        with self.runner._ledger() as ledger, self.runner.open(ledger) as sync:
            plan = sync.plan()
            self.first_cut = self.clock
            report = sync.execute(plan)
        self.is_moving = False
        self.source.faults = self.target.faults = StoreFaults()
        self.deletes += report.deleted
        self.spared += sum(one.reason == "in_flight" for one in report.failed)

    def check(self, keys: Sequence[str]) -> None:
        """No object may be deleted that was at the source at any time after the first
        cut, until the source was asked, nor one that was written at the target between
        the cuts.
        """
        for key in keys if self.is_moving else ():
            asked, present = self.absent.get(key, (0, 0))
            assert asked > self.cuts_ended, key
            assert present <= self.first_cut, key
            found = self.target.objects.get(key)
            written = found.facts.modified_ms if found else 0
            assert not self.first_cut < written <= self.second_cut, key

    def begin(self, what: str) -> None:
        """A stage of the run begins."""
        if what == "delete":
            self.cuts_ended = self.clock
            if self.is_moving and self.rng.random() < 0.5:
                self.move()

    def move(self) -> None:
        """Somebody changes one key of one side."""
        key, body = self.rng.choice(KEYS), self.rng.choice(BODIES)
        store = self.rng.choice((self.source, self.target))
        if self.rng.random() < 0.5:
            store.write(key, body)
        elif store is self.target or key in self._old:
            store.remove(key)
            if store is self.source:
                self._old.discard(key)

    def _strike(self, store: MemoryStore, name: str, key: str) -> None:
        for one in self.source.objects:
            self.present[one] = self.clock
        while self.rng.random() < self.rate:
            self.move()
        now = self._now_ms()
        if store is self.target and name == "list":
            self.second_cut = now
        if store is self.source and name == "facts" and key not in self.source.objects:
            self.absent[key] = now, self.present.get(key, 0)

    def _now_ms(self) -> int:
        self.clock += 1
        return self.clock


@pytest.mark.parametrize("group", range(GROUPS))
def test_moving_sides_lose_nothing(group: int, tmp_path: Path) -> None:
    deletes = spared = 0
    for seed in range(group, SEEDS, GROUPS):
        sides = MovingSides(seed, tmp_path / str(seed))
        for key in KEYS[:6]:
            sides.target.write(key, sides.rng.choice(BODIES))
        for key in KEYS[4:]:
            sides.source.write(key, sides.rng.choice(BODIES))
        for _ in range(2):
            sides.run()
        deletes, spared = deletes + sides.deletes, spared + sides.spared
        sides.runner()
        assert sides.runner().equal, seed
        assert sides.source.bodies() == sides.target.bodies(), seed
    # Both happened, or nothing was shown.
    assert min(deletes, spared) > 3, (deletes, spared)


class MovingPair(Remarks):
    """A pair with a verifier, whose sides move whenever a stage of a run begins, and
    when the source is asked for a key.
    """

    def __init__(self, seed: int, pair: VerifiedPair) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        reader = FlawedReader(pair.source, before_facts=lambda _key: self._may_move())
        source = replace(pair.source, reader=reader)
        self.pair = replace(pair, source=source, bucket=replace(pair.bucket, store=source))
        self.is_moving = False
        self.written, self.removed, self.at_source = set[str](), set[str](), set[str]()

    def run(self) -> SyncReport:
        """One run; everything moves from its plan on."""
        with self.pair.opened_sync(SyncOptions(delete=True), progress=self) as run:
            plan = run.plan()
            self.is_moving = True
            self._move()
            try:
                return run.execute(plan)
            finally:
                self.is_moving = False

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """See Remarks."""
        super().begin(what, total, unit)
        if self.is_moving:
            self._move()

    def _may_move(self) -> None:
        if self.is_moving and self.rng.random() < 0.1:
            # What appears after its look, before the delete, is in no law.
            self._move(may_appear=self.stages[-1][0] != "delete")

    def _move(self, *, may_appear: bool = True) -> None:
        key = self.rng.choice(KEYS)
        if self.rng.random() < 0.4 and may_appear:
            # What appears at the source stays there.
            put(self.pair.source, key, self.rng.choice(BODIES))
        elif self.rng.random() < 0.7:
            put(self.pair.target, key, self.rng.choice(BODIES))
            self.written.add(key)
            self.removed.discard(key)
        else:
            self.pair.target.writer.delete([key])
            self.removed.add(key)
            self.written.discard(key)
        self.at_source |= set(held(self.pair.source))


@pytest.mark.parametrize("seed", range(8))
def test_moving_sides_lose_nothing_with_a_verifier(seed: int, tmp_path: Path) -> None:
    with verified_pair(tmp_path) as pair:
        for key in KEYS[:7]:
            put(pair.target, key, b"old")
        for key in KEYS[5:]:
            put(pair.source, key, b"old")
        sides = MovingPair(seed, pair)
        report = sides.run()
        left = set(held(pair.target))
        # What others wrote, and what was at the source at any time after the plan.
        assert sides.written <= left
        assert sides.at_source & set(KEYS[:7]) <= left | sides.removed
        assert report.deleted + sum(one.reason == "in_flight" for one in report.failed)
        pair.sync(delete=True)
        assert pair.sync(delete=True).equal
        assert held(pair.source).keys() == held(pair.target).keys()
