"""A bucket is replicated while it is written to and everything breaks: the second part
of `treefold bucket demo`.

The master, the syncers and the commands are processes as an operator runs them. The
syncer that has the replication is killed, the next one is cut off from the master, and
an object of the target is damaged. Lags are computed from the logs of both stores.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGTERM

from admin.demo.cuttable_link import CuttableLink
from admin.demo.lag_picture import Mark, draw_lag
from admin.demo.process import DemoProcess
from admin.demo.replicated_pair import ReplicatedPair
from admin.demo.replicated_writers import BucketWriters, archived_body, archived_key
from admin.demo.replication_lag import (
    CrossedChange,
    LagSummary,
    crossed_changes,
    oldest_ages_ms,
    summary,
)
from replicator.master.client import MasterClient
from replicator.replication import Condition, DesiredState, Policy, PolicyId, Stage
from runtime.documents import parse_json
from runtime.errors import ProcessFailedError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject

_POLICY = PolicyId("demo")
_WRITERS = 4
_SYNCERS = ("syncer-1", "syncer-2")
# The object whose data file is damaged.
_DAMAGED = 7
# Whatever is waited for happens in this time, or the demo fails.
_WAIT_S = 60.0
_POLL_S = 0.05
_STEP_MS = 100
_Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplicationScale:
    """How much happens. Between two faults the writers have `quiet_s` seconds; the
    default of `lease_s` is that of the product.
    """

    objects: int = 1_000
    quiet_s: float = 2.0
    lease_s: float = 6.0


@dataclass(slots=True)
class ReplicationResult:
    """What became of a replication. `bytes_equal` is None where that was not checked;
    times are ms since the epoch.
    """

    begin_ms: int = 0
    end_ms: int = 0
    killed: Mark = field(default_factory=lambda: Mark(0, ""))
    cut: Mark = field(default_factory=lambda: Mark(0, ""))
    flipped_ms: int = 0
    paused: Mark | None = None
    stopped_itself: bool = False
    changes: list[CrossedChange] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    repaired: bool = False
    equal: bool = False
    objects: int = 0
    root: str = ""
    receipts: int = 0
    bytes_equal: bool | None = None
    elapsed_s: float = 0.0

    @property
    def is_as_expected(self) -> bool:
        """Whether nothing was lost, and everything was found and repaired."""
        return (
            self.stopped_itself
            and all(one.arrived_ms is not None for one in self.changes)
            and self.damaged == [archived_key(_DAMAGED)]
            and self.repaired
            and self.equal
            and self.receipts > 0
            and self.bytes_equal is not False
        )

    def lags(self) -> Mapping[str, LagSummary]:
        """The lag of the changes in each phase, by its name. A fault counts until all
        that waited at its end has arrived.
        """
        outages = {
            "syncer is dead": _until_caught_up(self.killed, self.changes),
            "link is cut": _until_caught_up(self.cut, self.changes),
        }
        if self.paused is not None:
            outages["replication is paused"] = _until_caught_up(self.paused, self.changes)
        phases: dict[str, list[CrossedChange]] = {"nothing fails": []}
        phases |= {name: [] for name in outages}
        for change in self.changes:
            names = (name for name, span in outages.items() if change.was_pending(*span))
            phases[next(names, "nothing fails")].append(change)
        return {name: summary(found) for name, found in phases.items()}

    def picture(self) -> str:
        """The age of the oldest change that the target lacked, over time, as SVG."""
        marks = [
            Mark(one.at_ms - self.begin_ms, one.text, (one.end_ms or 0) - self.begin_ms)
            for one in (self.killed, self.cut)
        ]
        marks.append(Mark(self.flipped_ms - self.begin_ms, "target damaged, repaired"))
        steady = self.lags()["nothing fails"]
        return draw_lag(
            "How far a replica is behind, while its syncers are killed and cut off",
            f"Age of the oldest change that the target lacked. {len(self.changes):,} changes by"
            f" {_WRITERS} writers, none lost; outside of the faults lag p50 {steady.p50_ms} ms,"
            f" p99 {steady.p99_ms} ms.",
            oldest_ages_ms(self.changes, self.begin_ms, self.end_ms, _STEP_MS),
            _STEP_MS,
            marks,
        )

    def as_json(self) -> JsonObject:
        """What `--json` prints of it."""
        return {
            "changes": len(self.changes),
            "lag": [
                {
                    "while": name,
                    "changes": lag.changes,
                    "p50Milliseconds": lag.p50_ms,
                    "p99Milliseconds": lag.p99_ms,
                    "maxMilliseconds": lag.max_ms,
                }
                for name, lag in self.lags().items()
            ],
            "takeoverSeconds": {
                name: _lasted_s(mark) for name, mark in (("kill", self.killed), ("cut", self.cut))
            },
            "stoppedItself": self.stopped_itself,
            "damaged": list(self.damaged),
            "repaired": self.repaired,
            "equal": self.equal,
            "objects": self.objects,
            "root": self.root,
            "receipts": self.receipts,
            "bytesEqual": self.bytes_equal,
            "elapsedSeconds": round(self.elapsed_s, 1),
        }


def replicate(
    folder: Path, buckets: ReplicatedPair, scale: ReplicationScale, say: _Say, *, check: bool
) -> ReplicationResult:
    """Replicate a bucket, and break what can break; processes have their files in an
    empty folder. `say` gets a line for each event. With `check` every object of the
    target is compared with what the writers wrote.

    Raises:
        ReconcileError: a process did not start, or what has to happen did not.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        pair = _Demo(folder, buckets, scale, stack, say)
        result = pair.run()
        if check:
            result.bytes_equal = pair.holds_what_was_written()
            say("every key and byte is what the writers wrote" if result.bytes_equal else "WRONG")
    result.elapsed_s = time.monotonic() - began_s
    return result


class _Demo:
    """Two buckets, writers of the source, a master and two syncers."""

    def __init__(
        self,
        folder: Path,
        buckets: ReplicatedPair,
        scale: ReplicationScale,
        stack: ExitStack,
        say: _Say,
    ) -> None:
        self._folder, self._scale, self._stack, self._say = folder, scale, stack, say
        self._buckets = buckets
        self._source, self._target = buckets.source, buckets.target
        self._writers = stack.enter_context(BucketWriters(self._source, _WRITERS))
        self._result = ReplicationResult()
        master = self._process("master", ["replication-master", "run"])
        (master.folder / "config.toml").write_text(
            f"state_folder = {json.dumps(str(master.folder / 'state'))}\n"
            f'listen = "127.0.0.1:0"\nlease_s = {scale.lease_s}\n'
        )
        master.start()
        self._client = MasterClient([master.address])
        stack.callback(self._client.close)
        self._links = {name: stack.enter_context(CuttableLink(master.address)) for name in _SYNCERS}
        self._syncers = {name: self._process(name, ["syncer", "run"]) for name in _SYNCERS}
        for name, syncer in self._syncers.items():
            (syncer.folder / "config.toml").write_text(
                f"state_folder = {json.dumps(str(syncer.folder / 'state'))}\n"
                f'masters = ["{self._links[name].address}"]\nmetrics = "127.0.0.1:0"\n'
            )
        # Before syncers are stopped: they give back at the master what they have.
        for link in self._links.values():
            stack.callback(link.mend)
        with ThreadPoolExecutor(len(_SYNCERS)) as pool:
            started = [pool.submit(syncer.start) for syncer in self._syncers.values()]
            self._writers.fill(scale.objects)
        for one in started:
            one.result()

    def run(self) -> ReplicationResult:
        result = self._result
        self._replicate()
        self._buckets.begin()
        result.begin_ms = _now_ms()
        self._writers.start()
        # Between two faults the writers go on: the lag without one is shown, too.
        time.sleep(self._scale.quiet_s)
        self._kill_syncer()
        time.sleep(self._scale.quiet_s)
        self._cut_link()
        time.sleep(self._scale.quiet_s)
        self._damage()
        self._writers.end()
        result.end_ms = _now_ms()
        self._settle()
        result.changes = crossed_changes(*self._buckets.changes())
        self._prove()
        self._cancel()
        return result

    def holds_what_was_written(self) -> bool:
        """Whether the target has exactly the keys and bytes that the writers wrote."""
        written = dict(self._writers.held)
        for facts in self._target.lister.list_objects(""):
            with self._target.reader.read(facts) as pieces:
                if written.pop(facts.key, None) != b"".join(pieces):
                    return False
        return not written

    def _replicate(self) -> None:
        """Begin to replicate, and wait until the log is followed."""
        began_s = time.monotonic()
        policy = Policy(_POLICY, self._source.address, self._target.address)
        self._client.add_policy(policy, "a demo")

        def is_live() -> bool:
            view = self._client.replication(_POLICY)
            report = view.state.report
            return (
                view.condition is Condition.ACTIVE
                and report is not None
                and report.checkpoint.stage is Stage.LIVE
            )

        self._await(is_live, "the replication to follow the log")
        took_s = time.monotonic() - began_s
        self._say(f"{self._scale.objects} objects copied in {took_s:.1f} s; now {_WRITERS} writers")

    def _kill_syncer(self) -> None:
        """Kill the syncer that has the replication, and start it again afterwards."""
        name = self._holder()
        at_ms = _now_ms()
        self._syncers[name].signal(SIGKILL)
        self._syncers[name].wait()
        end_ms = self._await_takeover(name)
        self._result.killed = Mark(at_ms, "syncer killed (kill -9)", end_ms)
        self._say(
            f"kill -9 of {name}: {self._holder()} went on {_lasted_s(self._result.killed)} s later"
        )
        self._syncers[name].start()
        self._await_both()

    def _cut_link(self) -> None:
        """Cut the link of the syncer that has the replication to its master. It has to
        stop by itself before its lease ends: nobody can tell it.
        """
        name = self._holder()
        at_ms = _now_ms()
        self._links[name].cut()
        end_ms = self._await_takeover(name)
        self._result.cut = Mark(at_ms, "link to the master cut", end_ms)
        log = (self._syncers[name].folder / "log").read_text(errors="replace")
        self._result.stopped_itself = '"lease_lost"' in log
        self._links[name].mend()
        self._say(
            f"link of {name} cut: it stopped by itself, and {self._holder()} went on"
            f" {_lasted_s(self._result.cut)} s later"
        )
        self._await_both()

    def _damage(self) -> None:
        """Damage an object that nobody writes, find it, copy it again."""
        key, result = archived_key(_DAMAGED), self._result
        result.flipped_ms = _now_ms()
        if self._buckets.pauses_for_damage:
            self._client.set_desired(_POLICY, DesiredState.PAUSED, "a demo")
            self._await(lambda: self._condition() is Condition.PAUSED, "the pause")
        kind = self._buckets.damage(key, archived_body(_DAMAGED))
        prefix = key.split("/", 1)[0] + "/"
        status, found = self._compare("verify", "--level", "read", "--prefix", prefix)
        result.damaged = [str(one["key"]) for one in found[:-1] if one.get("kind") == kind]
        self._say(
            f"{self._buckets.damage_text}: verify --level read finds {kind}"
            f" {', '.join(result.damaged) or 'nothing'} (exit {status})"
        )
        status, found = self._compare("sync", "--prefix", prefix)
        result.repaired = status == ExitCode.CLEAN and found[-1].get("copied") == 1
        self._say(f"sync copied {found[-1].get('copied')} object again")
        if self._buckets.pauses_for_damage:
            self._client.set_desired(_POLICY, DesiredState.ENABLED, "a demo")
            result.paused = Mark(result.flipped_ms, "paused", _now_ms())

    def _cancel(self) -> None:
        """End the replication: its snapshots are removed."""
        self._client.set_desired(_POLICY, DesiredState.CANCELLED, "a demo")
        self._await(lambda: self._condition() is Condition.CANCELLED, "its end")

    def _condition(self) -> Condition:
        return self._client.replication(_POLICY).condition

    def _settle(self) -> None:
        """Wait until the syncer says that every change is at the target."""
        assert self._source.feed is not None
        newest = self._source.feed.position().index

        def is_settled() -> bool:
            report = self._client.replication(_POLICY).state.report
            position = report.checkpoint.position if report else None
            return position is not None and position.index >= newest

        self._await(is_settled, "every change to be at the target")

    def _prove(self) -> None:
        """Read both sides, and check the receipts without asking anybody."""
        result = self._result
        _, found = self._compare("verify", "--level", "read")
        result.equal = found[-1].get("equal") is True
        result.objects = _count(found[-1].get("objects"))
        path = str(self._folder / "pair" / "receipts.jsonl")
        status, verified = self._command("receipts", "verify", path)
        _, shown = self._command("receipts", "show", path)
        sides = [shown[-1].get(side) for side in ("source", "target")]
        roots = {str(side["root"]) for side in sides if isinstance(side, dict)}
        result.equal &= len(roots) == 1
        result.root = min(roots)
        if status == ExitCode.CLEAN:
            result.receipts = _count(verified[-1].get("records"))
        self._say(
            f"{'equal' if result.equal else 'NOT EQUAL'}: {result.objects} objects, root"
            f" {result.root[:16]}…; {result.receipts} receipts hold, checked offline"
        )

    def _compare(self, command: str, *options: str) -> tuple[int, list[JsonObject]]:
        addresses = self._source.address, self._target.address
        return self._command(command, *addresses, *options, "--state", str(self._folder / "pair"))

    def _command(self, *words: str) -> tuple[int, list[JsonObject]]:
        """Run `treefold bucket WORDS --json`: its exit status, and what it printed."""
        command = [sys.executable, "-m", "admin.cli", "bucket", *words, "--json"]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        try:
            printed = [parse_json(line) for line in done.stdout.splitlines()]
        except ValueError:
            printed = []
        if not printed or done.returncode not in (ExitCode.CLEAN, ExitCode.FINDINGS):
            text = (
                f"treefold bucket {words[0]} ended with {done.returncode}:"
                f" {(done.stderr + done.stdout).strip()[-500:]}"
            )
            raise ProcessFailedError(text, process=words[0])
        return done.returncode, printed

    def _holder(self) -> str:
        """The name of the syncer that has the replication; empty where none has."""
        holder = self._client.replication(_POLICY).state.holder
        for name, syncer in self._syncers.items():
            path = syncer.folder / "state" / "syncer_uuid"
            if holder is not None and path.read_text().strip() == holder.syncer_id:
                return name
        return ""

    def _await_takeover(self, name: str) -> int:
        """Wait until another syncer than `name` has changed the target; when it had."""
        self._await(lambda: self._holder() not in ("", name), "another syncer to take over")
        before = self._buckets.target_changes()
        self._await(lambda: self._buckets.target_changes() > before, "work to go on")
        return _now_ms()

    def _await_both(self) -> None:
        """Wait until both syncers have a lease."""

        def have_both() -> bool:
            status = self._client.status()
            return sum(status.now_ms < one.record.lease.expires_ms for one in status.syncers) == 2

        self._await(have_both, "both syncers to be registered")

    def _await(self, happened: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _WAIT_S
        while not happened():
            if time.monotonic() > deadline_s:
                raise ProcessFailedError(f"waited {_WAIT_S:.0f} s for {what}", process="syncer")
            time.sleep(_POLL_S)

    def _process(self, name: str, words: list[str]) -> DemoProcess:
        """A process that ends with the demo; it is not started yet."""
        folder = self._folder / name
        folder.mkdir()
        options = ["--config", str(folder / "config.toml"), "--log-format", "json"]
        command = [sys.executable, "-m", "admin.cli", *words, *options]
        process = DemoProcess(name, command, folder)
        self._stack.callback(process.wait)
        self._stack.callback(process.signal, SIGTERM)
        return process


def _until_caught_up(mark: Mark, changes: Sequence[CrossedChange]) -> tuple[int, int]:
    """From the beginning of an outage until what was missing at its end had arrived."""
    end_ms = mark.end_ms or mark.at_ms
    arrivals = (one.arrived_ms or end_ms for one in changes if one.made_ms <= end_ms)
    return mark.at_ms, max(arrivals, default=end_ms)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _lasted_s(mark: Mark) -> float:
    return round(((mark.end_ms or mark.at_ms) - mark.at_ms) / 1_000, 1)


def _count(value: object) -> int:
    return value if isinstance(value, int) else 0
