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
from replicator.stores.port import ObjectProperties, StoreUnavailableError
from replicator.sync import SyncReport
from tests.support.bucket_sync import LIMITS, Remarks, SyncRunner
from tests.support.kill_points import KilledError
from tests.support.memory_store import MEMORY, UNGUARDED, UNPROVEN, MemoryStore, StoreFaults

KINDS = (MEMORY, UNPROVEN, UNGUARDED, replace(MEMORY, creates_conditionally=False))
KEYS = tuple(f"k{number}" for number in range(7))
# Few sizes, so that other contents of equal size are common.
SIZES = (0, 5, 5, LIMITS.part_bytes + 1, 3 * LIMITS.part_bytes)
State = tuple[bytes | int, bytes]


@dataclass
class Watch(Remarks):
    """Notes at which levels both sides were equal, as whole sets and at one moment,
    since the last comparison began: no run writes after that.
    """

    now: Callable[[], set[str]] = set
    were_equal: set[str] = field(default_factory=set)

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """A comparison that begins forgets what was before."""
        super().begin(what, total, unit)
        if what in ("compare", "verify"):
            self.were_equal = self.now()

    def look(self) -> None:
        """One of the sides has changed."""
        self.were_equal |= self.now()


class Storm:
    """Everything that goes on while a sync runs."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = random.Random(seed)
        self._clock_ms = 1_700_000_000_000
        capabilities = self.rng.choice(KINDS)
        self._feeds = self.rng.random() < 0.5, self.rng.random() < 0.5
        self.source = MemoryStore("memory:a", MEMORY, now_ms=self._now_ms, has_feed=self._feeds[0])
        self.target = MemoryStore(
            "memory:b",
            capabilities,
            now_ms=self._now_ms,
            says_little=self.rng.random() < 0.5,
            has_feed=self._feeds[1],
        )
        self._crossing = Crossing.between(MEMORY, capabilities)
        self.watch = Watch(now=self._levels)
        self._flipped = set[tuple[str, str]]()
        self._owners = 0
        self.runner = SyncRunner(
            self.source.store(),
            self.target.store(),
            folder,
            delete=True,
            attempts_max=3,
            progress=self.watch,
        )
        self.kills = self.rng.random() < 0.7
        self.changes = self.rng.choice([0.0, 0.02, 0.2])

    def _states(self, store: MemoryStore, *, is_listed: bool) -> dict[str, State]:
        """What there is of each key, as far as it crosses; of bodies only the length
        where the level is "listed".
        """
        return {
            key: (
                len(one.body) if is_listed else one.body,
                self._crossing.digest(one.properties),
            )
            for key, one in store.objects.items()
        }

    def _levels(self) -> set[str]:
        """The levels at which both sides are equal now."""
        return {
            name
            for name, is_listed in (("listed", True), ("deeper", False))
            if self._states(self.source, is_listed=is_listed)
            == self._states(self.target, is_listed=is_listed)
        }

    def blow(self) -> None:
        """Let everything go on at each operation from now on."""
        self._flipped.clear()
        faults = StoreFaults(lambda *_: self._strike(0.02), lambda *_: self._strike(0.02))
        self.source.faults = self.target.faults = faults

    def calm(self) -> None:
        """Let nothing happen any more."""
        self.source.faults = self.target.faults = StoreFaults()

    def change(self) -> None:
        """One of the writers changes one key of the source, or somebody else one of the
        target.
        """
        key = self.rng.choice(KEYS)
        if self.rng.random() < 0.1:
            self._change_target(key)
        else:
            self._change_source(key)
        self.watch.look()

    def _change_source(self, key: str) -> None:
        found = self.source.objects.get(key)
        match self.rng.randrange(4):
            case 0 if found and self._may_flip("source", key):
                self.source.remove(key)
            case 1 if found and found.body:
                at = self.rng.randrange(len(found.body))
                flipped = bytes([found.body[at] ^ 1])
                body = found.body[:at] + flipped + found.body[at + 1 :]
                self.source.write(key, body, found.properties)
            case 2 if found:
                self.source.touch(key, self._properties())
            case _ if found or self._may_flip("source", key):
                body = self.rng.randbytes(self.rng.choice(SIZES))
                self.source.write(key, body, self._properties())

    def _change_target(self, key: str) -> None:
        found = self.target.objects.get(key)
        if found and self.rng.random() < 0.5 and self._may_flip("target", key):
            self.target.remove(key)
        elif found or self._may_flip("target", key):
            self.target.write(key, self.rng.randbytes(5), self._properties())

    def _may_flip(self, side: str, key: str) -> bool:
        """Whether a key may appear or vanish now. In a store without a feed it does so
        once: what is there for a moment between two listings, nobody can see.
        """
        if self._feeds[side == "target"]:
            return True
        is_first = (side, key) not in self._flipped
        self._flipped.add((side, key))
        return is_first

    def check(self, report: SyncReport) -> None:
        """What was said to be equal was equal at one moment since the last write."""
        if report.equal:
            assert ("listed" if report.level == "listed" else "deeper") in self.watch.were_equal

    def _properties(self) -> ObjectProperties:
        """New ones each time where no feed shows that they changed and came back."""
        self._owners += 1
        owner = self.rng.choice("ab") if all(self._feeds) else str(self._owners)
        return ObjectProperties(
            metadata=(("owner", owner),), tags=(("team", self.rng.choice("xy")),)
        )

    def _strike(self, share: float) -> None:
        if self.rng.random() < self.changes:
            self.change()
        if self.kills and self.rng.random() < share / 4:
            raise KilledError
        if self.rng.random() < share:
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
        for _ in range(3):
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
        assert not storm.target.uploading
    return said_equal, report.level != "listed"


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_nothing_is_said_to_be_equal_that_is_not(start: int, tmp_path: Path) -> None:
    results = [weather(seed, tmp_path / str(seed)) for seed in range(start, start + 10)]
    assert sum(equal for equal, _ in results) > 5
    assert sum(recorded for _, recorded in results) > 3
