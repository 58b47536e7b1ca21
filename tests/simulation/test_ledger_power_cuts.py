"""A power cut takes the last rows of the ledger, which nobody syncs: the target has
copies that the ledger does not know, or lacks objects that it still names.

The power is cut after each change of the ledger. Of its log what was synced is left,
and of the rest any beginning; all other files are as they were. The source changes
before another process goes on. The target becomes equal, which is proven, and of what
it had already nothing is sent again.
"""

import random
import shutil
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from replicator.ledger import PairLedger
from replicator.replication import ReplicationOptions
from replicator.stores.capabilities import Capabilities
from replicator.stores.port import ObjectProperties
from tests.support.bucket_sync import LIMITS
from tests.support.kill_points import KilledError
from tests.support.memory_store import MEMORY, UNGUARDED, MemoryStore
from tests.support.replications import Replication, StepClock, held

pytestmark = pytest.mark.crashes

LARGE_BYTES = int(2.5 * LIMITS.part_bytes)
RED = ObjectProperties(metadata=(("owner", "ann"),), tags=(("team", "red"),))
BLUE = replace(RED, tags=(("team", "blue"),))
STEPS_MAX = 1_000
# The value of PRAGMA synchronous at which a commit ends with a sync of the log.
FULL = 2
# Capabilities of the target, the options, and what the source has.
KINDS: dict[str, tuple[Capabilities, ReplicationOptions, Sequence[str]]] = {
    "log": (MEMORY, ReplicationOptions(), ["has_feed", "renames"]),
    "rounds": (MEMORY, ReplicationOptions(interval_s=0.5), []),
    "snapshots": (MEMORY, ReplicationOptions(interval_s=0.5), ["has_snapshots"]),
    "without conditions": (UNGUARDED, ReplicationOptions(interval_s=0.5), []),
    "two ways": (MEMORY, ReplicationOptions(newest_wins=True), ["has_feed"]),
}


class PowerCuts:
    """Ends a process after a change of its ledger, and says what is durable of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: int | None = None
        self.changes = 0
        self._synced_bytes = dict[Path, int]()
        # SQLite writes past every port: only the ledger knows when it has committed.
        commit, cuts = PairLedger._commit_batch, self

        def committed(ledger: PairLedger, batch: Any) -> None:
            commit(ledger, batch)
            cuts.note(ledger)

        monkeypatch.setattr(PairLedger, "_commit_batch", committed)

    def note(self, ledger: PairLedger) -> None:
        """A change was committed."""
        log = ledger.folder / "ledger.sqlite-wal"
        assert ledger._connection is not None
        [level] = ledger._connection.execute("PRAGMA synchronous").fetchone()
        if level >= FULL:
            self._synced_bytes[log] = log.stat().st_size
        self.changes += 1
        if self.changes == self.at:
            raise KilledError

    def image(self, folder: Path, into: Path, rng: random.Random | None) -> None:
        """Write what is left of a folder: without `rng` nothing that is not synced."""
        shutil.copytree(folder, into)
        for log, synced in self._synced_bytes.items():
            left = into / log.relative_to(folder)
            end = synced if rng is None else rng.randint(synced, log.stat().st_size)
            with left.open("r+b") as file:
                file.truncate(end)
            # The index of the log is memory that processes share.
            left.with_name("ledger.sqlite-shm").unlink()


def rows(folder: Path) -> set[tuple[bytes, str]]:
    """The keys that a ledger knows, each with what the target has of it, whoever has
    it open.
    """
    [path] = folder.rglob("ledger.sqlite")
    connection = sqlite3.connect(path)
    try:
        return set(connection.execute("SELECT key, target_etag FROM objects"))
    finally:
        connection.close()


class Scene:
    """A pair of stores, their replication, and what happens to the source."""

    def __init__(self, kind: str, folder: Path) -> None:
        capabilities, options, has = KINDS[kind]
        self.rng, self.clock = random.Random(kind), StepClock()
        self.source = MemoryStore(
            "memory:a",
            now_ms=self._now_ms,
            has_feed="has_feed" in has,
            has_snapshots="has_snapshots" in has,
            renames="renames" in has,
        )
        self.target = MemoryStore(
            "memory:b", capabilities, now_ms=self._now_ms, renames="renames" in has
        )
        self._options = options
        self.folder = folder
        self.replication: Replication | None = None
        for number in range(5):
            self.source.write(f"k{number}", self.rng.randbytes(1_000), RED)
        self.source.write("large", self.rng.randbytes(LARGE_BYTES), RED)

    def begin(self) -> None:
        """Another process."""
        self.replication = Replication(
            self.source.store(),
            self.target.store(),
            self.folder,
            options=self._options,
            clock=self.clock,
        )

    def until_equal(self) -> None:
        """Go on until it is said that the target has all that was changed before, and
        with a log that both sides are equal.
        """
        assert self.replication is not None
        since_ms = self.clock.ms
        for _ in range(STEPS_MAX):
            self.replication.step()
            report = self.replication.engine.report()
            assert report.fault is None, report
            is_proven = report.proven_ms is not None or self.source.store().feed is None
            if is_proven and (report.oldest_unproven_ms or 0) > since_ms:
                assert held(self.source) == held(self.target)
                return
        raise AssertionError(report)

    def change(self) -> None:
        """Changes of all kinds, which the process sees one by one."""
        source, rng = self.source, self.rng
        for number in range(4):
            source.write(f"n{number}", rng.randbytes(500), RED)
        for key in ("k0", "k1"):
            source.write(key, rng.randbytes(1_000), RED)
        source.remove("k2")
        source.touch("k3", BLUE)
        source.write("large", rng.randbytes(LARGE_BYTES), RED)

    def change_more(self) -> None:
        """What happens while nobody looks: to keys whose rows may be lost, too."""
        self.source.write("n0", self.rng.randbytes(500), BLUE)
        self.source.write("k2", self.rng.randbytes(1_000), RED)
        for key in ("n1", "k1"):
            if key in self.source.objects:
                self.source.remove(key)

    def _now_ms(self) -> int:
        self.clock.ms += 1
        return self.clock.ms

    def missing_bytes(self) -> int:
        """Of the source's objects, those that the target does not have."""
        theirs = self.target.bodies().items()
        return sum(len(one[1]) for one in self.source.bodies().items() if one not in theirs)


def cut_and_go_on(
    kind: str, at: int, folder: Path, cuts: PowerCuts, rng: random.Random | None
) -> int | None:
    """One run whose power is cut after a change of the ledger, and the one after it;
    how many rows that changed. None if there is no such change.
    """
    scene = Scene(kind, folder / "before")
    cuts.at, cuts.changes = at, 0
    try:
        scene.begin()
        scene.until_equal()
        scene.change()
        scene.until_equal()
        return None
    except KilledError:
        pass
    cuts.at = None
    known = rows(scene.folder)
    cuts.image(scene.folder, folder / "after", rng)
    assert scene.replication is not None
    scene.replication.kill()
    scene.folder = folder / "after"
    lost = len(known ^ rows(scene.folder))
    # A round that goes to a snapshot from before the cut sends what that has.
    missing = scene.missing_bytes() if scene.source.snapshots else 0
    scene.change_more()
    missing += scene.missing_bytes()
    scene.target.payload = 0
    scene.begin()
    scene.until_equal()
    assert scene.target.payload <= missing
    assert not any(one.parts for one in scene.target.uploading.values())
    scene.replication.kill()
    return lost


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_power_cut_after_any_change_of_the_ledger_loses_and_doubles_nothing(
    kind: str, memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = list[int]()
    for at in range(1, STEPS_MAX):
        # All that is not synced is gone, or some of it.
        rng = random.Random(at) if at % 2 else None
        folder, cuts = memory_folder / str(at), PowerCuts(monkeypatch)
        try:
            found = cut_and_go_on(kind, at, folder, cuts, rng)
        except BaseException as error:
            error.add_note(f"cut after change {at}")
            raise
        finally:
            monkeypatch.undo()
            shutil.rmtree(folder, ignore_errors=True)
        if found is None:
            break
        lost.append(found)
    assert len(lost) > 15
    assert sum(count > 0 for count in lost) > 10
