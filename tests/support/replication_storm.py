"""A replication in a storm: four writers, two syncers, one lease, and everything fails.

One thread draws from one seed who acts next. A syncer may be killed at any request, be
stopped for longer than its lease in the middle of a write, or be cut off from the
master. The history is looked at whenever the target changes and whenever progress is
recorded.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path

from replicator.crossing import Crossing
from replicator.replication import (
    Checkpoint,
    ReplicationOptions,
    ReplicationReport,
    Stage,
    SyncerId,
)
from replicator.stores.errors import StoreUnavailableError
from tests.support.bucket_sync import LIMITS
from tests.support.kill_points import KilledError
from tests.support.lease_authority import LEASE_S, LeaseAuthority, SimulatedLease
from tests.support.memory_store import MEMORY, UNPROVEN, MemoryStore, StoreFaults
from tests.support.replication_history import History, keys_below, properties
from tests.support.replications import LaterExecutor, Replication, StepClock, step_limits

KEYS = ("a", "b", "c", "d/a", "d/b", "d/e/a", "d/e/b", "f/a", "f/b", "g")
PREFIXES = ("d/", "d/e/", "f/", "h/")
_WRITES = {"put", "put_properties", "put_pieces", "delete", "complete", "rename"}
_TRACE = 400


@dataclass
class Node:
    """One machine with a syncer."""

    name: str
    parent: Path
    clock: StepClock
    lease: SimulatedLease | None = None
    replication: Replication | None = None
    later: LaterExecutor | None = None
    paused_until_s: float = 0.0


class ReplicationStorm:
    """Everything that goes on around one replication."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.clock = StepClock()
        self.trace = deque[str](maxlen=_TRACE)
        self.marks = Counter[str]()
        self.operations = 0
        self._bodies = 0
        capabilities = rng.choice((MEMORY, MEMORY, UNPROVEN))
        self.has_feed = rng.random() < 0.85
        self.source = MemoryStore(
            "memory:a",
            MEMORY,
            now_ms=self._now_ms,
            has_feed=self.has_feed,
            has_snapshots=rng.random() < 0.6,
        )
        self.source.describes_changes = rng.random() < 0.5
        self.target = MemoryStore(
            "memory:b",
            capabilities,
            now_ms=self._now_ms,
            says_little=rng.random() < 0.5,
            renames=rng.random() < 0.5,
        )
        self.history = History(Crossing.between(MEMORY, capabilities))
        self.authority = LeaseAuthority(self.clock)
        self.authority.on_save = self._saved
        self.options = ReplicationOptions(interval_s=5.0, is_live=rng.random() < 0.9)
        self.nodes = [Node(f"s{n}", folder / f"s{n}", self.clock) for n in (1, 2)]
        self._acting: Node | None = None
        self._errors = rng.choice((0.0, 0.01, 0.05))
        self._kills = rng.choice((0.0, 0.002, 0.01))
        self._stalls = rng.choice((0.0, 0.01, 0.03))
        self._gaps = rng.choice((0.0, 0.01, 0.04))
        self._pace = rng.choice((0.1, 0.5, 1.5))
        self._in_stall = False
        self._seen = dict[str, object]()
        self._proven: object = None
        self.source.faults = StoreFaults(self._before_source, self._after)
        self.target.faults = StoreFaults(self._before_target, self._after_target)
        for _ in range(rng.randrange(12)):
            self.write()

    def run(self, steps: int) -> None:
        """Let the storm blow."""
        for _ in range(steps):
            for _ in range(int(self._pace) + (self.rng.random() < self._pace % 1)):
                self.write()
            self._something()

    def heal(self) -> None:
        """Let nothing fail any more, and wait until the target is proven equal."""
        self._errors = self._kills = self._stalls = self._gaps = self._pace = 0.0
        for node in self.nodes:
            node.paused_until_s = 0.0
            if node.lease is not None:
                node.lease.is_cut_off = False
        for _ in range(3_000):
            self._something()
            for node in self.nodes:
                if node.replication is not None and node.lease is not None:
                    self.authority.renew(node.lease)
            if self._is_proven():
                break
        report = self._report()
        assert report is not None
        assert self._is_proven(), (report.condition, report.message, report.differences)
        self._check_equal()

    def write(self) -> None:
        """One of the writers does something."""
        rng, source = self.rng, self.source
        key = rng.choice(KEYS)
        found = source.objects.get(key)
        self.operations += 1
        match rng.randrange(12):
            case 0 | 1 if found:
                self._note(f"delete {key}")
                source.remove(key)
            case 2 if found:
                self._note(f"tag {key}")
                source.touch(key, replace(found.properties, tags=(("team", str(self._new())),)))
            case 3 if found:
                other = rng.choice(KEYS)
                if other not in source.objects:
                    self._note(f"rename {key} to {other}")
                    source.move(key, other)
            case 4 if rng.random() < 0.3:
                self._change_prefix()
            case 5:
                self._note(f"multipart {key}")
                new = self._new()
                body = rng.randbytes(LIMITS.part_bytes + new)
                source.write(key, body, properties("m", str(new)), parts=2)
            case _:
                self._note(f"put {key}")
                # Another length each time: some stores tell nothing else of a content.
                new = self._new()
                body = f"{key} {new}".encode() + bytes(new)
                source.write(key, body, properties(rng.choice("ab"), "x"))
        self.history.note(source, source.newest_index)

    def _change_prefix(self) -> None:
        prefix, other = self.rng.sample(PREFIXES, 2)
        if self.rng.random() < 0.5:
            self._note(f"delete all below {prefix}")
            self.source.remove_below(prefix)
            return
        is_nested = prefix.startswith(other) or other.startswith(prefix)
        if not is_nested and not keys_below(self.source.objects, other):
            self._note(f"rename {prefix} to {other}")
            self.source.move(prefix, other)

    def _something(self) -> None:
        """Time goes by, and somebody acts."""
        rng = self.rng
        self.clock.pass_s(rng.choice((0.05, 0.2, 0.6)))
        if rng.random() < 0.02:
            # Clocks of machines jump; those that count time do not.
            self.clock.ms += rng.choice((-3_600_000, 3_600_000, 86_400_000))
        if self.has_feed and rng.random() < self._gaps:
            self._lose_log()
        if rng.random() < self._gaps / 2 and self.source.snapshots:
            name = rng.choice(sorted(self.source.snapshots))
            self._note(f"somebody deletes {name}")
            self.marks["snapshot lost"] += 1
            del self.source.snapshots[name]
        node = rng.choice(self.nodes)
        if self.clock.monotonic_s() < node.paused_until_s:
            return
        if node.replication is None:
            self._begin(node)
            return
        if rng.random() < self._stalls / 4:
            self._note(f"{node.name} is cut off from the master")
            assert node.lease is not None
            node.lease.is_cut_off = not node.lease.is_cut_off
        self._act(node)

    def _lose_log(self) -> None:
        self.marks["gap"] += 1
        if self.rng.random() < 0.5:
            self._note("the log is trimmed")
            self.source.trimmed = self.source.newest_index
        else:
            self._note("the log is another one")
            self.source.log += "'"

    def _begin(self, node: Node) -> None:
        lease = self.authority.acquire()
        if lease is None:
            return
        self._note(f"{node.name} begins with epoch {lease.epoch}")
        node.lease, node.later = lease, LaterExecutor()
        limits = replace(step_limits(), prove_every_s=20.0)
        node.replication = Replication(
            self.source.store(),
            self.target.store(),
            node.parent,
            options=self.options,
            lease=lease,
            clock=node.clock,
            limits=limits,
            checkpoint=self.authority.checkpoint or Checkpoint(),
            later=node.later,
            syncer=SyncerId(node.name),
        )

    def _act(self, node: Node) -> None:
        """One thread of a syncer goes on for a while."""
        replication, later = node.replication, node.later
        assert replication is not None
        assert later is not None
        outer, self._acting = self._acting, node
        try:
            match self.rng.randrange(6):
                case 0:
                    replication.engine.receive()
                case 1 | 2:
                    replication.engine.work()
                case 3 if not self._in_stall or node is not outer:
                    assert node.lease is not None
                    if not node.lease.is_cut_off:
                        self.authority.renew(node.lease)
                case _:
                    if later.waiting:
                        later.run(self.rng.randrange(len(later.waiting)))
            self._check_proof(replication)
            if replication.engine.is_over:
                self._note(f"{node.name} is fenced")
                self.marks["fenced"] += 1
                node.replication = None
        except KilledError:
            self._kill(node)
        finally:
            self._acting = outer
        self._look()

    def _check_proof(self, replication: Replication) -> None:
        """What is said to be proven is so (no false "equal")."""
        report = replication.engine.report()
        position = report.proven_position
        proven = (replication, position, report.proven_ms)
        if position is None or proven == self._proven:
            return
        self._proven = proven
        self.marks["proven"] += 1
        self.history.acknowledged(self.target, position.index, replication.failed_keys())

    def _kill(self, node: Node) -> None:
        assert node.replication is not None
        self._note(f"{node.name} is killed")
        self.marks["killed"] += 1
        node.replication.kill()
        node.replication = None
        if self.rng.random() < 0.2:
            # Another machine takes its place, with an empty disk.
            node.parent = node.parent.with_name(node.parent.name + "'")

    def _before_source(self, name: str, key: str) -> None:
        del name, key
        self._strike()

    def _before_target(self, name: str, key: str) -> None:
        node = self._acting
        self._strike()
        if node is None or name not in _WRITES or node.lease is None:
            return
        may_stall = not self._in_stall and self.rng.random() < self._stalls
        if may_stall:
            self._stall(node, name, key)
        elif node.lease.epoch != self.authority.epoch:
            raise AssertionError(f"{node.name} writes {key} with an old epoch")

    def _stall(self, node: Node, name: str, key: str) -> None:
        """A process stops in the middle of a write, and comes back after its lease."""
        self._note(f"{node.name} is stopped in {name} {key}")
        self.marks["stalled"] += 1
        self._in_stall, deleting = True, set(self.target.deleting)
        (other,) = (one for one in self.nodes if one is not node)
        others_before = self._acting
        self.clock.pass_s(LEASE_S + 1)
        for _ in range(self.rng.randrange(60)):
            self.clock.pass_s(0.1)
            if other.replication is None:
                self._begin(other)
            else:
                self._act(other)
            if self.rng.random() < 0.3:
                self.write()
        self._acting, self._in_stall = others_before, False
        self._note(f"{node.name} goes on with {name} {key}")
        held = set(self.target.objects)
        assert node.lease is not None
        if node.lease.epoch != self.authority.epoch:
            # No store has a conditional delete, and a key that was absent, is so again:
            # the next comparison finds what this did.
            late = deleting if name == "delete" else {key} - held
            self.history.tainted |= late

    def _after(self, name: str, key: str) -> None:
        del name, key
        self._strike()

    def _after_target(self, name: str, key: str) -> None:
        self._look()
        self._after(name, key)

    def _strike(self) -> None:
        if self._acting is None:
            return
        if self.rng.random() < self._kills and not self._in_stall:
            raise KilledError
        if self.rng.random() < self._errors:
            raise StoreUnavailableError("503")

    def _look(self) -> None:
        """See which objects of the target are others than before."""
        now = dict(self.target.objects)
        for key in sorted(now.keys() | self._seen.keys()):
            if now.get(key) is not self._seen.get(key) and key not in self.history.tainted:
                self._note(f"target has another {key}")
                self.history.written(key, now.get(key))
        self._seen = dict(now)

    def _saved(self, checkpoint: Checkpoint) -> None:
        position = checkpoint.position
        at = f"{position.log}:{position.index}" if position is not None else "-"
        names = [one.name[-2:] if one else "-" for one in (checkpoint.base, checkpoint.snapshot)]
        self._note(f"saved {checkpoint.stage.value} at {at}, snapshots {names}")
        self.marks[checkpoint.stage.value] += 1
        if checkpoint.stage is Stage.LIVE and position is not None:
            node = self._acting
            assert node is not None
            assert node.replication is not None
            failed = node.replication.failed_keys()
            self.marks["failed keys"] += bool(failed)
            self.history.acknowledged(self.target, position.index, failed)

    def _report(self) -> ReplicationReport | None:
        for node in self.nodes:
            if node.replication is not None:
                return node.replication.engine.report()
        return None

    def _is_proven(self) -> bool:
        report = self._report()
        return bool(report and report.differences == 0 and not self._differing())

    def _differing(self) -> list[str]:
        ours, theirs = self.source.objects, self.target.objects
        state = self.history.state
        keys = ours.keys() | theirs.keys()
        return [key for key in keys if state(ours.get(key)) != state(theirs.get(key))]

    def _check_equal(self) -> None:
        assert not self._differing()
        assert len(self.source.snapshots) <= 2

    def trace_of(self, key: str | None) -> list[str]:
        """What happened, of one key or of all: a short trace of a long storm."""
        words = ("saved", "begins", "fenced", "killed", "stopped", "goes on", "log", "below", "to")
        return [
            line
            for line in self.trace
            if key is None or line.endswith(key) or any(f" {word}" in line for word in words)
        ]

    def close(self) -> None:
        """End what runs."""
        for node in self.nodes:
            if node.replication is not None:
                node.replication.kill()

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.source.newest_index:5} {text}")

    def _new(self) -> int:
        self._bodies += 1
        return self._bodies

    def _now_ms(self) -> int:
        self.clock.ms += 1
        return self.clock.ms
