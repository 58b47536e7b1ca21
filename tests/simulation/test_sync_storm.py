"""A sync in a storm: four writers change the source at every moment, runs are killed,
both stores fail before and after they acted, and clocks jump. Whatever a run says to be
equal was equal while it was compared.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from merkle.errors import ReconcileError
from replicator.crossing import Crossing
from replicator.stores.errors import StoreUnavailableError
from replicator.sync import SyncReport
from tests.support.bucket_sync import LIMITS, Remarks, SyncRunner
from tests.support.kill_points import KilledError
from tests.support.memory_store import MEMORY, UNGUARDED, UNPROVEN, MemoryStore, StoreFaults
from tests.support.storm_writers import StormWriters

KINDS = (MEMORY, UNPROVEN, UNGUARDED, replace(MEMORY, creates_conditionally=False))
KEYS = tuple(f"k{number}" for number in range(7))
# Few, so that a content often comes back, and others of equal size are common.
BODIES = (
    b"",
    b"a" * 5,
    b"b" * 5,
    *(random.Random(size).randbytes(size) for size in (LIMITS.part_bytes + 1, 3 << 16)),
)
# What there is of a key, as far as it crosses: content and properties.
State = tuple[bytes, bytes]
Moment = tuple[dict[str, State], dict[str, State]]


@dataclass
class Watch(Remarks):
    """Notes what both sides held, as whole sets and at one moment each, since the last
    comparison began. After that a run writes nothing; it may delete.
    """

    now: Callable[[], Moment] = lambda: ({}, {})
    moments: list[Moment] = field(default_factory=list)
    deletes_before: int = 0
    deletes: Callable[[], int] = lambda: 0

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """A comparison that begins forgets what was before."""
        super().begin(what, total, unit)
        if what in ("compare", "verify"):
            self.moments = [self.now()]
            self.deletes_before = self.deletes()

    def look(self) -> None:
        """One of the sides has changed."""
        self.moments.append(self.now())


class Storm:
    """Everything that goes on while a sync runs."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self._clock_ms = 1_700_000_000_000
        capabilities = self.rng.choice(KINDS)
        # With few keys and contents each often becomes again what it was.
        self._is_dense = self.rng.random() < 0.6
        self._keys = KEYS[: 2 + self.rng.randrange(2)] if self._is_dense else KEYS
        feeds = self.rng.random() < 0.5, self.rng.random() < 0.5
        self.source = MemoryStore("memory:a", MEMORY, now_ms=self._now_ms, has_feed=feeds[0])
        self.target = MemoryStore(
            "memory:b",
            capabilities,
            now_ms=self._now_ms,
            says_little=self.rng.random() < 0.5,
            has_feed=feeds[1],
            page_keys=1 if self._is_dense else 3,
        )
        self._crossing = Crossing.between(MEMORY, capabilities)
        self.watch = Watch(now=self._moment, deletes=lambda: len(self.target.deleted))
        self._writers = StormWriters(
            self.rng,
            self.source,
            self.target,
            bodies=BODIES[1:3] if self._is_dense else BODIES,
            is_dense=self._is_dense,
            feeds=feeds,
        )
        self.runner = SyncRunner(
            self.source.store(),
            self.target.store(),
            folder,
            delete=True,
            attempts_max=3,
            progress=self.watch,
        )
        self.kills = self.rng.random() < 0.7
        self.changes = self.rng.choice([0.04, 0.08] if self._is_dense else [0.0, 0.02, 0.2])
        self.runs = 8 if self._is_dense else 3
        self._errors = 0.0 if self._is_dense else 0.02

    def _moment(self) -> Moment:
        """What both sides hold now."""
        ours, theirs = (
            {
                key: (one.body, self._crossing.digest(one.properties))
                for key, one in store.objects.items()
            }
            for store in (self.source, self.target)
        )
        return ours, theirs

    def blow(self) -> None:
        """Let everything go on at each operation from now on."""
        self._writers.appeared.clear()
        faults = StoreFaults(lambda *_: self._strike(), lambda *_: self._strike())
        self.source.faults = self.target.faults = faults

    def calm(self) -> None:
        """Let nothing happen any more."""
        self.source.faults = self.target.faults = StoreFaults()

    def change(self) -> None:
        """One of the writers changes one key of the source, or somebody else one of the
        target.
        """
        key = self.rng.choice(self._keys)
        if self.rng.random() < (0.4 if self._is_dense else 0.1):
            self._writers.change_target(key)
        else:
            self._writers.change_source(key)
        self.watch.look()

    def check(self, report: SyncReport) -> None:
        """What was said to be equal was equal at one moment since the last copy, but
        for the keys that were deleted since. At the level "listed" only the lengths of
        bodies count.
        """
        if not report.equal:
            return
        gone = set(self.target.deleted[self.watch.deletes_before :])

        def seen(states: dict[str, State]) -> dict[str, tuple[bytes | int, bytes]]:
            is_listed = report.level == "listed"
            return {
                key: (len(body) if is_listed else body, properties)
                for key, (body, properties) in states.items()
            }

        assert any(
            seen(ours) == seen({key: one for key, one in theirs.items() if key not in gone})
            for ours, theirs in self.watch.moments
        )

    def _strike(self) -> None:
        if self.rng.random() < self.changes:
            self.change()
        if self.kills and self.rng.random() < self._errors / 4:
            raise KilledError
        if self.rng.random() < self._errors:
            raise StoreUnavailableError("500")

    def _now_ms(self) -> int:
        jump = self.rng.choice([0, 1, 1, 1000, -5_000, 3_600_000, -3_600_000])
        self._clock_ms += jump
        return self._clock_ms


def sync_once(storm: Storm) -> SyncReport | None:
    try:
        return storm.runner()
    except (KilledError, ReconcileError):
        return None


def weather(seed: int, folder: Path) -> tuple[int, int]:
    """One storm to its end; how many runs said "equal", and at which level the last."""
    storm = Storm(seed, folder)
    said_equal = 0
    for _ in range(4):
        for _ in range(storm.rng.randrange(6)):
            storm.change()
        storm.blow()
        for _ in range(storm.runs):
            report = sync_once(storm)
            if report is not None:
                storm.check(report)
                said_equal += report.equal
        storm.calm()
        storm.runner()
        report = storm.runner()
        assert report.equal
        assert not report.failed
        storm.check(report)
        assert not any(one.parts for one in storm.target.uploading.values())
    return said_equal, report.level != "listed"


@pytest.mark.parametrize(
    "start",
    [
        *range(0, 20, 10),
        *(pytest.param(start, marks=pytest.mark.long) for start in range(20, 640, 10)),
    ],
)
def test_nothing_is_said_to_be_equal_that_is_not(start: int, tmp_path: Path) -> None:
    results = [weather(seed, tmp_path / str(seed)) for seed in range(start, start + 10)]
    assert sum(equal for equal, _ in results) > 5
    assert sum(recorded for _, recorded in results) > 3
