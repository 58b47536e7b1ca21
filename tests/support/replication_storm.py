"""A replication in a storm: four writers, two syncers, a master, an operator, and
everything fails.

One thread draws from one seed who acts next. A syncer may be killed at any request, be
stopped for longer than its lease in the middle of a write, or be cut off from the
master, which restarts, and whose clock jumps. The operator pauses, resumes, throttles,
fences, cancels, and wants other prefixes. The history is looked at whenever the target
changes, whenever the master learns something, and after every step.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from replicator.crossing import Crossing
from replicator.master.records import wanted
from replicator.master.views import current_report, replication_view
from replicator.replication import (
    Checkpoint,
    Condition,
    DesiredState,
    Policy,
    PolicyId,
    ReplicationOptions,
    ReplicationReport,
    Stage,
)
from replicator.stores.errors import StoreUnavailableError
from replicator.stores.port import Store
from replicator.syncer.prefixes import covers
from tests.support.bucket_sync import LIMITS
from tests.support.kill_points import KilledError
from tests.support.master_host import LEASE_S, ORDER, MasterHost
from tests.support.memory_store import MEMORY, UNPROVEN, MemoryStore, StoreFaults
from tests.support.replication_history import History, HistoryViolationError, keys_below, properties
from tests.support.replications import Replication, StepClock
from tests.support.storm_syncer import StormSyncer

KEYS = ("a", "b", "c", "d/a", "d/b", "d/e/a", "d/e/b", "f/a", "f/b", "g")
# Below no prefix that anybody wants.
ELSEWHERE = "z"
PREFIXES = ("d/", "d/e/", "f/", "h/")
_WANTED = ((), (), ("d/",), ("a", "d/"), ("d/e/", "f/"), ("a", "b", "c", "d/e/"))
_FEW = ("d/",)
# While few keys are wanted: most are of others.
_WRITES_BESIDE = 12
_WRITES = {"put", "put_properties", "put_pieces", "delete", "complete", "rename"}
_POLICY = PolicyId("policy-1")
_TRACE = 400
# Of another syncer, until it has taken over.
_ACTS_MAX = 300


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
        options = ReplicationOptions(interval_s=5.0, is_live=rng.random() < 0.9)
        self._prefixes = rng.choice(_WANTED) if rng.random() < 0.4 else ()
        self.host = MasterHost(folder / "master", self.clock, rng)
        self.host.on_change = self._learned
        self.nodes = [self._node(f"s{n}", folder / f"s{n}") for n in (1, 2)]
        self._options = options
        self._add_policy()
        self._acting: StormSyncer | None = None
        self._errors = rng.choice((0.0, 0.01, 0.05))
        self._kills = rng.choice((0.0, 0.002, 0.01))
        self._stalls = rng.choice((0.0, 0.01, 0.03))
        self._gaps = rng.choice((0.0, 0.01, 0.04))
        self._pace = rng.choice((0.1, 0.5, 1.5))
        self._orders = rng.choice((0.0, 0.01, 0.04))
        self._strangers = rng.choice((0.0, 0.01))
        self._jumps = rng.choice((0.0, 0.02))
        self._clocks_agree = not self._jumps
        self.host.faults = rng.choice((0.0, 0.02, 0.1))
        self._in_stall = False
        self._seen = dict[str, object]()
        self._proven: object = None
        self._reported = Checkpoint()
        self.source.faults = StoreFaults(self._before_source, self._after)
        self.target.faults = StoreFaults(self._before_target, self._after_target)
        for _ in range(rng.randrange(12)):
            self.write()

    def __str__(self) -> str:
        return f"seed {self.seed}"

    def run(self, steps: int) -> None:
        """Let the storm blow."""
        for _ in range(steps):
            for _ in range(int(self._pace) + (self.rng.random() < self._pace % 1)):
                self.write()
            self._something()

    def heal(self) -> None:
        """Let nothing fail any more, and wait until the target is proven equal. Then a
        writer renames an object, out of all prefixes where there are any, and somebody
        deletes a copy, which no log tells: both is seen to, and proven. At last the
        operator wants few keys, and all of them again.
        """
        self._errors = self._kills = self._stalls = self._gaps = self._pace = 0.0
        self._orders = self._jumps = self._strangers = self.host.faults = 0.0
        for node in self.nodes:
            node.is_cut_off = False
        self.host.start()
        self._await_proof(0)
        known = [key for key in sorted(self.source.objects) if key in self.target.objects]
        if known:
            key = self.rng.choice(known)
            self._note(f"rename {key} to {ELSEWHERE}")
            self.source.move(key, ELSEWHERE)
            self.history.note(self.source, self.source.newest_index)
        self._await_new_proof()
        self._await_acknowledged()
        known = [key for key in sorted(self.source.objects) if key in self.target.objects]
        is_quiet = self._options.is_live and self._clocks_agree
        record = self.host.state().policy(_POLICY)
        prefixes = record.policy.prefixes if record is not None else ()
        known = [key for key in known if covers(prefixes, key)]
        if known and self.has_feed and is_quiet:
            # Nothing is under way any more that could explain what it lacks.
            self.history.harmed = self._harm(known), self.clock.ms
        self._await_new_proof()
        self._check_equal()
        for chosen in (_FEW, ()):
            self._note(f"operator: prefixes {chosen}")
            self._want_prefixes(chosen)
            for _ in range(_WRITES_BESIDE):
                self.write()
            self._await_new_proof()
            self._check_equal()

    def _want_prefixes(self, wanted: tuple[str, ...]) -> None:
        assert self.host.order(lambda master: master.set_prefixes(_POLICY, wanted, ORDER))

    def _await_new_proof(self) -> ReplicationReport:
        """Wait for one that begins now. Without a log some stores never show that they
        held still.
        """
        is_certain = self.has_feed and self._options.is_live
        return self._await_proof(self.clock.ms if is_certain else 0)

    def _await_acknowledged(self) -> None:
        """Wait until the whole log is acknowledged: nothing waits for what will never
        come. An empty queue may be that of a process that has read nothing so far.
        """
        if not (self.has_feed and self._options.is_live):
            return
        for _ in range(500):
            report = self._report()
            at = report.checkpoint if report is not None else Checkpoint()
            index = at.position.index if at.position is not None else 0
            if at.stage is Stage.LIVE and index >= self.source.newest_index:
                return
            self._something()
        raise AssertionError("something is never acknowledged")

    def _await_proof(self, since_ms: int) -> ReplicationReport:
        """Wait until a comparison that began since then has found both sides equal."""
        for step in range(3_000):
            if not step % 50:
                self._want_all()
            self._something()
            if self._is_proven(since_ms):
                break
        report = self._report()
        assert report is not None, self.host.replication(_POLICY)
        assert self._is_proven(since_ms), (report.condition, report.message, report.differences)
        return report

    def _want_all(self) -> None:
        """The operator wants the replication to run."""
        state = self.host.state()
        record = state.policy(_POLICY)
        if record is None:
            self._add_policy()
        elif record.is_deleted or record.policy.desired is DesiredState.CANCELLED:
            # What is cancelled ends only where something runs at all (OZ-124).
            if not state.settings.is_enabled:
                self.host.order(lambda master: master.set_enabled(ORDER, is_enabled=True))
            self.host.order(lambda master: master.delete_policy(_POLICY, ORDER, force=False))
        elif record.failed_over_ms is not None:
            self.host.order(lambda master: master.end_failover(_POLICY, ORDER))
        elif record.policy.desired is DesiredState.PAUSED or not state.settings.is_enabled:
            self.host.order(lambda master: master.set_enabled(ORDER, is_enabled=True))
            desired = DesiredState.ENABLED
            self.host.order(lambda master: master.set_desired(_POLICY, desired, ORDER))

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
        if rng.random() < self._jumps:
            # Clocks of machines jump; those that count time do not.
            self.clock.ms += rng.choice((-3_600_000, 3_600_000, 86_400_000))
        if rng.random() < self._jumps:
            self.host.offset_ms += rng.choice((-86_400_000, -5_000, 5_000, 20_000, 86_400_000))
        if self.has_feed and rng.random() < self._gaps:
            self._lose_log()
        if rng.random() < self._gaps / 2 and self.source.snapshots:
            name = rng.choice(sorted(self.source.snapshots))
            self._note(f"somebody deletes {name}")
            self.marks["snapshot lost"] += 1
            del self.source.snapshots[name]
        if rng.random() < self._strangers and self.target.objects:
            self._harm(sorted(self.target.objects))
        if rng.random() < self._orders:
            self._order()
        if rng.random() < self._kills:
            self._note("master is killed")
            self.marks["master killed"] += 1
            self.host.stop()
        elif rng.random() < 0.2:
            self._run_master()
        node = rng.choice(self.nodes)
        if rng.random() < self._stalls / 4:
            node.is_cut_off = not node.is_cut_off
            self._note(f"{node.name} is cut off: {node.is_cut_off}")
        self._act(node)

    def _harm(self, keys: Sequence[str]) -> str:
        """Somebody else deletes one of these objects of the target, and which."""
        key = self.rng.choice(keys)
        self._note(f"somebody deletes the copy of {key}")
        self.marks["harmed"] += 1
        self.history.tainted[key] = self.clock.ms
        self.target.remove(key)
        self._look()
        return key

    def _run_master(self) -> None:
        if self.host.is_up:
            self.host.tick()
        else:
            self.host.start()

    def _order(self) -> None:
        """The operator wants something else."""
        rng, host = self.rng, self.host
        if not self._is_wanted() and rng.random() < 0.7:
            self._want_all()
            return
        paused, enabled = DesiredState.PAUSED, DesiredState.ENABLED
        match rng.randrange(10):
            case 0 | 1:
                what = "pause"
                is_taken = host.order(lambda one: one.set_desired(_POLICY, paused, ORDER))
            case 2 | 3:
                what = "resume"
                is_taken = host.order(lambda one: one.set_desired(_POLICY, enabled, ORDER))
            case 4:
                what = "rate"
                rate = rng.choice((0, 1 << 20))
                self._options = replace(self._options, bytes_per_second=rate)
                options = self._options
                is_taken = host.order(lambda one: one.set_options(_POLICY, options, ORDER))
            case 5 if rng.random() < 0.5:
                what = "cancel"
                cancelled = DesiredState.CANCELLED
                is_taken = host.order(lambda one: one.set_desired(_POLICY, cancelled, ORDER))
            case 5:
                what = "failover"
                is_taken = host.order(lambda one: one.fail_over(_POLICY, ORDER))
            case 6:
                what = "disabled"
                is_enabled = rng.random() < 0.5
                is_taken = host.order(lambda one: one.set_enabled(ORDER, is_enabled=is_enabled))
            case 7 | 8:
                what = "prefixes"
                chosen = rng.choice(_WANTED)
                wished = tuple(sorted(chosen))
                is_taken = host.order(lambda one: one.set_prefixes(_POLICY, wished, ORDER))
                self._prefixes = chosen if is_taken else self._prefixes
            case _:
                what, is_taken = "all", True
                self._want_all()
        if is_taken:
            self._note(f"operator: {what} {self._prefixes if what == 'prefixes' else ''}")
            self.marks[what] += 1

    def _is_wanted(self) -> bool:
        state = self.host.state()
        record = state.policy(_POLICY)
        return (
            record is not None
            and record.failed_over_ms is None
            and wanted(record, state.settings) is DesiredState.ENABLED
        )

    def _add_policy(self) -> None:
        policy = Policy(
            _POLICY, "memory:a", "memory:b", tuple(sorted(self._prefixes)), self._options
        )
        if self.host.order(lambda master: master.add_policy(policy, ORDER)):
            self._reported = Checkpoint()

    def _node(self, name: str, parent: Path) -> StormSyncer:
        return StormSyncer(name, parent, self.host, self.clock, self._store)

    def _store(self, address: str) -> Store:
        return (self.source if address == self.source.address else self.target).store()

    def _lose_log(self) -> None:
        self.marks["gap"] += 1
        if self.rng.random() < 0.5:
            self._note("the log is trimmed")
            self.source.trimmed = self.source.newest_index
        else:
            self._note("the log is another one")
            self.source.log += "'"

    def _act(self, node: StormSyncer) -> None:
        """One thread of a syncer goes on for a while."""
        outer, self._acting = self._acting, node
        before = node.replication
        try:
            node.look()
            if node.is_beat_due and self.rng.random() < 0.7:
                node.beat()
            match self.rng.randrange(6):
                case 0 if node.replication is not None:
                    node.replication.engine.receive()
                case 1 | 2 if node.replication is not None:
                    node.replication.engine.work()
                case 3 if self.rng.random() < self._kills:
                    self._note(f"{node.name} ends in order")
                    self.marks["ended"] += 1
                    node.stop()
                case _:
                    if node.later.waiting:
                        node.later.run(self.rng.randrange(len(node.later.waiting)))
            if node.replication is not None:
                self._check_report(node, node.replication)
            if before is not None and node.replication is None:
                self._note(f"{node.name} is over")
                self.marks["fenced"] += 1
            elif before is None and node.replication is not None:
                self._note(f"{node.name} begins with epoch {node.epoch}")
        except KilledError:
            self._kill(node)
        finally:
            self._acting = outer
        self._look()

    def _check_report(self, node: StormSyncer, replication: Replication) -> None:
        """What is said to be proven is so (no false "equal"), and so is the RPO."""
        report = replication.engine.report()
        failed, position = replication.failed_keys(), report.proven_position
        known = report.checkpoint.prefixes
        if report.oldest_unproven_ms is not None and self._clocks_agree and known:
            self.marks["rpo"] += 1
            index = self.history.index_before(report.oldest_unproven_ms)
            self._acknowledged(index, failed, known, node)
        self._check_shown(report, failed, replication.engine.prefixes)
        proven = (replication, position, report.proven_ms)
        if report.proven_ms is None or proven == self._proven:
            return
        self._proven = proven
        if not report.differences:
            self.history.equal(report.proven_ms)
        if position is None:
            return
        self.marks["proven"] += 1
        if self._clocks_agree:
            self.history.proven(report.proven_ms)
        self._acknowledged(position.index, failed, known, node)

    def _check_shown(
        self, report: ReplicationReport, failed: set[str], wanted: Sequence[str]
    ) -> None:
        """What is shown as proven holds for all keys that are wanted now, however old
        the proof is.
        """
        position, proven_ms = report.proven_position, report.proven_ms
        if proven_ms is None or (position is None and not self._clocks_agree):
            return
        index = position.index if position else self.history.index_before(proven_ms)
        self.marks["shown"] += 1
        self.history.acknowledged(self.target, index, failed, lambda key: covers(wanted, key))

    def _acknowledged(
        self, index: int, failed: set[str], known: tuple[str, ...], node: StormSyncer
    ) -> None:
        self.history.acknowledged(self.target, index, failed, self._is_known(known, node))

    def _is_known(self, known: tuple[str, ...], node: StormSyncer) -> Callable[[str], bool]:
        """Whether the target is known to have a key, by its prefixes."""
        prefixes = node.policy.prefixes if node.policy is not None else ()
        return lambda key: key.startswith(known) and covers(prefixes, key)

    def _kill(self, node: StormSyncer) -> None:
        self._note(f"{node.name} is killed")
        self.marks["killed"] += 1
        node.kill()
        if self.rng.random() < 0.2:
            # Another machine takes its place, with an empty disk.
            other = self._node(f"{node.name}b", node.parent.with_name(f"{node.parent.name}b"))
            self.nodes[self.nodes.index(node)] = other

    def _before_source(self, name: str, key: str) -> None:
        del name, key
        self._strike()

    def _before_target(self, name: str, key: str) -> None:
        node = self._acting
        self._strike()
        if node is None or name not in _WRITES or node.lease is None:
            return
        if not self._in_stall and self.rng.random() < self._stalls:
            self._stall(node, name, key)
            return
        found = self.host.replication(_POLICY)
        if not self._may_write(node):
            raise HistoryViolationError(
                key, f"{node.session} writes by epoch {node.epoch}: {found}"
            )
        if node.report().condition in (Condition.PAUSED, Condition.CANCELLED):
            raise HistoryViolationError(key, f"{node.name} writes, and says that it does not")

    def _may_write(self, node: StormSyncer) -> bool:
        """Whether the master knows this process as the one that may work (R2). A late
        registration gives it another epoch, of which it hears with its next heartbeat.
        """
        found = self.host.replication(_POLICY)
        if found is None or node.lease is None:
            return False
        holder = found.holder or (found.leaving.holder if found.leaving else None)
        epoch = found.leaving.epoch if found.leaving else found.epoch
        is_ours = holder is not None and (holder.syncer_id, holder.session) == (
            node.name,
            node.session,
        )
        return is_ours and node.epoch <= epoch

    def _stall(
        self, node: StormSyncer, name: str, key: str, until: Callable[[], bool] | None = None
    ) -> None:
        """A process stops in the middle of a write, and comes back after its lease, and
        not before `until`.
        """
        self._note(f"{node.name} is stopped in {name} {key}")
        self.marks["stalled"] += 1
        self._in_stall, deleting = True, set(self.target.deleting)
        (other,) = (one for one in self.nodes if one is not node)
        others_before = self._acting
        self.clock.pass_s(LEASE_S + 1)
        for _ in range(_ACTS_MAX if until is not None else self.rng.randrange(60)):
            if until is not None and until():
                break
            self.clock.pass_s(0.3)
            self._run_master()
            self._act(other)
            if until is None and self.rng.random() < 0.3:
                self.write()
        self._acting, self._in_stall = others_before, False
        self._note(f"{node.name} goes on with {name} {key}")
        held = set(self.target.objects)
        if not self._may_write(node):
            # No store has a conditional delete, and a key that was absent, is so again:
            # the next comparison finds what this did.
            late = deleting if name == "delete" else {key} - held
            self.history.tainted |= dict.fromkeys(late, self.clock.ms)

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
        self.history.look(now, self.clock.ms)
        for key in sorted(now.keys() | self._seen.keys()):
            if now.get(key) is not self._seen.get(key) and key not in self.history.tainted:
                self._note(f"target has another {key}")
                self.history.written(key, now.get(key))
        self._seen = dict(now)

    def _learned(self) -> None:
        """The master may know more: it is so (R1), and its position never goes back."""
        state = self.host.state()
        found, record = state.state(_POLICY), state.policy(_POLICY)
        if found is None or record is None or found.report is None:
            self._reported = Checkpoint()
            return
        shown = current_report(replication_view(state, record))
        assert shown is not None
        failed = {one.key for one in shown.failed_keys}
        self._check_shown(shown, failed, record.policy.prefixes)
        before, checkpoint = self._reported, found.report.checkpoint
        if checkpoint == before:
            return
        self._reported = checkpoint
        position, old = checkpoint.position, before.position
        at = f"{position.log}:{position.index}" if position is not None else "-"
        names = [one.name[-2:] if one else "-" for one in (checkpoint.base, checkpoint.snapshot)]
        self._note(f"saved {checkpoint.stage.value} at {at}, snapshots {names}")
        self.marks[checkpoint.stage.value] += 1
        if checkpoint.stage is not Stage.LIVE or position is None:
            return
        if before.stage is Stage.LIVE and old is not None and old.log == position.log:
            assert old.index <= position.index
        node = next((one for one in self.nodes if self._may_write(one)), None)
        if node is None:
            return
        failed = node.replication.failed_keys() if node.replication is not None else set()
        self.marks["failed keys"] += bool(failed)
        self._acknowledged(position.index, failed, checkpoint.prefixes, node)

    def _report(self) -> ReplicationReport | None:
        for node in self.nodes:
            if node.replication is not None and self._may_write(node):
                return node.replication.engine.report()
        return None

    def _is_proven(self, since_ms: int) -> bool:
        report = self._report()
        is_new = report is not None and (report.proven_ms or 0) >= since_ms
        return bool(is_new and report and report.differences == 0 and not self._differing())

    def _differing(self) -> list[str]:
        ours, theirs = self.source.objects, self.target.objects
        state = self.history.state
        record = self.host.state().policy(_POLICY)
        prefixes = record.policy.prefixes if record is not None else ()
        keys = [key for key in sorted(ours.keys() | theirs.keys()) if covers(prefixes, key)]
        return [key for key in keys if state(ours.get(key)) != state(theirs.get(key))]

    def _check_equal(self) -> None:
        assert not self._differing()
        assert len(self.source.snapshots) <= 2

    def trace_of(self, key: str | None) -> list[str]:
        """What happened, of one key or of all: a short trace of a long storm."""
        words = ("saved", "begins", "over", "killed", "stopped", "goes on", "log", "below", "to")
        words = (*words, "operator:", "cut", "ends", "somebody")
        return [
            line
            for line in self.trace
            if key is None or line.endswith(key) or any(f" {word}" in line for word in words)
        ]

    def close(self) -> None:
        """End what runs."""
        for node in self.nodes:
            node.kill()
        self.host.close()

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.source.newest_index:5} {text}")

    def _new(self) -> int:
        self._bodies += 1
        return self._bodies

    def _now_ms(self) -> int:
        self.clock.ms += 1
        return self.clock.ms
