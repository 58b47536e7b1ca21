"""Buckets that replicate to each other in a storm: a pair, or a ring of three.

Four writers work at all of them, also between a syncer's look and its write. Syncers
are killed, and some lose their disk; links are cut, logs lost, clocks jump. When it is
over the buckets come to rest, all equal, each key as its newest write has left it.
"""

import random
import shutil
from collections import Counter, deque
from dataclasses import replace
from functools import partial
from pathlib import Path

from replicator.crossing import Crossing
from replicator.replication import ReplicationOptions
from replicator.stores.errors import StoreUnavailableError
from tests.support.bucket_sync import LIMITS
from tests.support.kill_points import KilledError
from tests.support.memory_store import MEMORY, UNPROVEN, MemoryObject, MemoryStore, StoreFaults
from tests.support.replication_history import properties
from tests.support.replications import LaterExecutor, Replication, StepClock, step_limits

KEYS = ("a", "b", "c", "d/a")
_WRITES = {"put", "put_properties", "put_pieces", "delete", "complete", "rename"}
_TRACE = 300
# Long enough for every comparison to decide what was left to the other direction.
_REST_STEPS = 250
_WRITES_PER_OPERATION = 12


class _Link:
    """One direction: a syncer with a disk of its own."""

    def __init__(self, source: MemoryStore, target: MemoryStore, folder: Path, clock: StepClock):
        self.name = f"{source.address[-1]}>{target.address[-1]}"
        self.target, self.folder, self.is_cut = target, folder, False
        self._stores, self._clock = (source, target), clock
        self.later = LaterExecutor()
        self.replication = self._begin()

    def _begin(self) -> Replication:
        source, target = (one.store() for one in self._stores)
        return Replication(
            source,
            target,
            self.folder,
            options=ReplicationOptions(interval_s=5.0, newest_wins=True),
            clock=self._clock,
            limits=replace(step_limits(), prove_every_s=20.0, superseded_wait_s=30.0),
            later=self.later,
        )

    def kill(self, *, loses_disk: bool) -> None:
        """End as a killed process does, and begin anew."""
        self.replication.kill()
        if loses_disk:
            shutil.rmtree(self.folder)
        self.later = LaterExecutor()
        self.replication = self._begin()


class TwoWayStorm:
    """Everything that goes on around buckets of these names."""

    def __init__(self, seed: int, folder: Path, names: str) -> None:
        self._name = f"{names} {seed}"
        self.rng = rng = random.Random(self._name)
        self.clock = StepClock()
        self.trace = deque[str](maxlen=_TRACE)
        self.marks = Counter[str]()
        self.operations = self._bodies = 0
        self._offsets = dict.fromkeys(names, 0)
        # What the newest write of a client has left of a key; None where a client who
        # saw it has deleted it: then it may be gone.
        self.newest = dict[str, bytes | None]()
        self.stores = {name: self._store(name) for name in names}
        self.crossing = Crossing.between(MEMORY, UNPROVEN)
        pairs = zip(names, names[1:] + names[0], strict=True)
        self.links = [
            _Link(self.stores[one], self.stores[other], folder / f"{one}{other}", self.clock)
            for one, other in pairs
        ]
        self._acting: _Link | None = None
        self._errors = rng.choice((0.0, 0.02))
        self._kills = rng.choice((0.0, 0.002, 0.01))
        self._lost_disks = rng.choice((0.0, 0.3))
        self._cuts = rng.choice((0.0, 0.005))
        self._races = rng.choice((0.0, 0.1, 0.3))
        self._gaps = rng.choice((0.0, 0.0, 0.01))
        self._pace = rng.choice((0.1, 0.5))
        self._jumps = rng.choice((0.0, 0.0, 0.01))
        self.clocks_agree = not self._jumps
        for store in self.stores.values():
            before = partial(self._before, store)
            store.faults = StoreFaults(before, lambda _name, _key: self._strike())

    def __str__(self) -> str:
        return self._name

    def run(self, steps: int) -> None:
        """Let the storm blow."""
        for _ in range(steps):
            if self.rng.random() < self._pace:
                self.write()
            self._something()

    def heal(self) -> None:
        """Let nothing fail any more; all come to rest, and are equal."""
        self._errors = self._kills = self._cuts = self._races = self._gaps = self._jumps = 0.0
        for link in self.links:
            link.is_cut = False
        before, quiet = -1, 0
        for _ in range(6_000):
            self._something()
            writes = sum(one.newest_index for one in self.stores.values())
            quiet = quiet + 1 if writes == before and self.are_settled() else 0
            before = writes
            if quiet > _REST_STEPS * len(self.links):
                break
        assert self.are_settled(), self.differing()
        assert quiet > _REST_STEPS, "no rest"
        assert before <= _WRITES_PER_OPERATION * max(self.operations, 10), "a loop"
        for key, body in self.newest.items():
            if body is None or not self.clocks_agree:
                continue
            found = next(iter(self.stores.values())).objects.get(key)
            assert found is not None, f"{key}: lost"
            assert found.body == body, f"{key}: a newer write was lost: {found.facts}"

    def differing(self) -> list[str]:
        """Keys that are not the same everywhere."""
        kept = [one.objects for one in self.stores.values()]
        return [key for key in KEYS if len({self._state(one.get(key)) for one in kept}) > 1]

    def are_settled(self) -> bool:
        """Whether all buckets have the same objects, with the same properties."""
        return not self.differing()

    def trace_of(self, key: str | None) -> list[str]:
        """What happened, to all keys: they are few."""
        del key
        return list(self.trace)

    def close(self) -> None:
        """End what runs."""
        for link in self.links:
            link.replication.kill()

    def write(self, *, spared: MemoryStore | None = None) -> None:
        """One of the writers does something at one of the buckets, but for one."""
        rng = self.rng
        name = rng.choice([name for name, one in self.stores.items() if one is not spared])
        key = rng.choice(KEYS)
        store = self.stores[name]
        found = store.objects.get(key)
        self.operations += 1
        match rng.randrange(8):
            case 0 if found:
                self._note(f"{name}: delete {key}")
                self._gone(key, found)
                store.remove(key)
            case 1 if found:
                self._note(f"{name}: tag {key}")
                kept = replace(found.properties, tags=(("team", str(self._new())),))
                store.touch(key, kept)
            case 2 if found:
                other = rng.choice(KEYS)
                if other not in store.objects:
                    self._note(f"{name}: rename {key} to {other}")
                    self._gone(key, found)
                    store.move(key, other)
                    self.newest[other] = found.body
            case 3:
                self._put(name, key, rng.randbytes(LIMITS.part_bytes + self._new()), 2)
            case _:
                new = self._new()
                # Another length each time: some stores tell nothing else of a content.
                self._put(name, key, f"{key} {new}".encode() + bytes(new), 1)

    def _put(self, name: str, key: str, body: bytes, parts: int) -> None:
        self._note(f"{name}: put {key} {len(body)} {self._bodies}")
        owner = properties(self.rng.choice("ab"), "x")
        self.stores[name].write(key, body, owner, parts=parts)
        self.newest[key] = body

    def _gone(self, key: str, seen: MemoryObject) -> None:
        if self.newest.get(key) == seen.body:
            self.newest[key] = None

    def _something(self) -> None:
        """Time goes by, and a syncer goes on."""
        rng = self.rng
        self.clock.pass_s(rng.choice((0.05, 0.2, 0.6)))
        if rng.random() < self._jumps:
            name = rng.choice(sorted(self._offsets))
            self._offsets[name] += rng.choice((-3_600_000, -2_000, 2_000, 3_600_000))
            self.marks["jump"] += 1
        if rng.random() < self._gaps:
            store = self.stores[rng.choice(sorted(self.stores))]
            store.trimmed = store.newest_index
            self.marks["gap"] += 1
        link = rng.choice(self.links)
        if rng.random() < self._cuts:
            link.is_cut = not link.is_cut
            self._note(f"{link.name} is cut: {link.is_cut}")
            self.marks["cut"] += 1
        self._acting = link
        try:
            match rng.randrange(4):
                case 0:
                    link.replication.engine.receive()
                case 1:
                    link.replication.engine.work()
                case _ if link.later.waiting:
                    link.later.run(rng.randrange(len(link.later.waiting)))
                case _:
                    pass
        except KilledError:
            loses_disk = rng.random() < self._lost_disks
            self._note(f"{link.name} is killed, and loses its disk: {loses_disk}")
            self.marks["lost disk" if loses_disk else "killed"] += 1
            self._acting = None
            link.kill(loses_disk=loses_disk)
        finally:
            self._acting = None

    def _before(self, store: MemoryStore, name: str, key: str) -> None:
        link = self._acting
        if link is None:
            return
        self._strike()
        is_at_target = store is link.target
        if is_at_target and link.is_cut:
            raise StoreUnavailableError("the link is cut")
        if is_at_target and name in _WRITES:
            if self.rng.random() < self._races:
                self.marks["race"] += 1
                # No store has a conditional delete: what is written meanwhile is gone.
                self.write(spared=store if name == "delete" else None)
            self._note(f"{link.name} {name} {key or ' '.join(store.deleting)}")

    def _strike(self) -> None:
        if self._acting is None:
            return
        if self.rng.random() < self._kills:
            raise KilledError
        if self.rng.random() < self._errors:
            raise StoreUnavailableError("503")

    def _store(self, name: str) -> MemoryStore:
        rng = self.rng
        store = MemoryStore(
            f"memory:{name}",
            rng.choice((MEMORY, UNPROVEN)),
            now_ms=partial(self._now_ms, name),
            has_feed=rng.random() < 0.85,
            has_snapshots=rng.random() < 0.4,
            says_little=rng.random() < 0.5,
            renames=rng.random() < 0.5,
        )
        store.describes_changes = rng.random() < 0.5
        return store

    def _state(self, found: MemoryObject | None) -> tuple[bytes, bytes] | None:
        return (found.body, self.crossing.digest(found.properties)) if found else None

    def _now_ms(self, name: str) -> int:
        self.clock.ms += 1
        return self.clock.ms + self._offsets[name]

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.clock.ms % 10_000_000:8} {text}")

    def _new(self) -> int:
        self._bodies += 1
        return self._bodies
