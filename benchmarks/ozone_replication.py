"""A replication between two real Ozone clusters: a master and two syncers near the
source, and a link with a delay and a bandwidth to the OM and the gateway of the target.

Ozone has nothing of its own to compare with, so that the peer of each row is its bar,
or what the writers alone reach. The clusters are started for this, or those run on that
OZONE_RUNNING and OZONE_RUNNING_SECOND name.
"""

import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from urllib.parse import quote

from benchmarks.measure import Report, Samples
from benchmarks.replication_runs import (
    BURST_OBJECTS,
    CHANGE_BYTES_MAX,
    CUT_OBJECTS,
    CUT_S,
    IDLE_BYTES_MAX,
    IDLE_S,
    LARGE_BYTES,
    OBJECT_BYTES,
    RESTART_S_MAX,
    SMALL_RATIO_MAX,
    TRICKLE_OBJECTS,
    TRICKLE_PER_S,
    Replicator,
)
from ozone.manager_values import BucketLayout
from replicator.master.client import MasterClient
from replicator.replication import Condition, DesiredState, Policy, PolicyId, Stage
from tests.support.ozone import OzoneCluster, first_cluster, second_cluster
from tests.support.ozone_buckets import OzoneBuckets
from tests.support.processes import TreefoldProcess
from tests.support.s3_servers import S3Bucket, S3Endpoint
from tests.support.syncers import syncer_process
from tests.support.waiting import wait_until
from tests.support.wan import WanLink

LAG_S_MAX = 1.0

_POLICY = PolicyId("bench")
_START_S = 120.0
_FIRST_PROOF_S = 10.0
# Two clusters that have just started are full with 20 objects a second on two cores;
# after these they are not.
_WARM_UP_OBJECTS = 2_000


@dataclass(frozen=True, slots=True)
class _Run:
    """A replication at work; `om_calls` counts the requests that the source's OM got by
    the port that only the syncers use.
    """

    report: Report
    ours: Replicator
    om_calls: Callable[[], int]

    def add(self, job: str, unit: str, value: float, most: float | None = None) -> None:
        """A row beside its bar, or beside nothing."""
        ours = Samples(self.ours.name, (value,))
        peer = Samples("the bar", (most,)) if most is not None else Samples("", (value,))
        self.report.add(job, unit, ours, peer, most=None if most is None else 1.0)


def measure_ozone(jobs: Sequence[str], *, delay_ms: float, mbit: float) -> Report:
    """Run these jobs, each once."""
    notes = [
        f"{delay_ms:g} ms each way, {mbit:g} Mbit/s; buckets with the layout OBJECT_STORE",
        f"not measured: {_WARM_UP_OBJECTS:,} objects before, for which Java compiles its code",
    ]
    report = Report("from one Ozone to another", notes)
    known = {
        "idle": _idle,
        "trickle": _trickle,
        "burst": _burst,
        "backlog": _backlog,
        "changes": _changes,
        "kill": _kill,
        "cut": _cut,
    }
    with _replication(delay_ms=delay_ms, mbit=mbit) as (ours, om_calls):
        ours.many("warm-up", _WARM_UP_OBJECTS, OBJECT_BYTES)
        for name in (one for one in jobs if one in known):
            known[name](_Run(report, ours, om_calls))
    return report


def _idle(run: _Run) -> None:
    """Nothing is written."""
    calls = run.om_calls()
    crossed = run.ours.idle(IDLE_S)
    run.add("idle, a minute: crossed", "B", crossed, IDLE_BYTES_MAX)
    run.add("idle, a minute: requests to the source's OM", "", run.om_calls() - calls)


def _trickle(run: _Run) -> None:
    """Objects come one by one."""
    found = run.ours.many("trickle", TRICKLE_OBJECTS, OBJECT_BYTES, per_second=TRICKLE_PER_S)
    job = f"{TRICKLE_PER_S:g} objects/s"
    run.add(f"{job}: lag, p50", "s", found.lag_s(0.5))
    run.add(f"{job}: lag, p99", "s", found.lag_s(0.99), LAG_S_MAX)


def _burst(run: _Run) -> None:
    """Objects come as fast as they are written."""
    calls = run.om_calls()
    found = run.ours.many("burst", BURST_OBJECTS, OBJECT_BYTES)
    calls = run.om_calls() - calls
    job = f"{BURST_OBJECTS:,} objects of 4 KiB"
    ours = Samples(run.ours.name, (BURST_OBJECTS / found.seconds,))
    writers = Samples("their writers", (BURST_OBJECTS / found.written_s,))
    run.report.add(job, "objects/s", ours, writers)
    run.add(f"{job}: lag, p50", "s", found.lag_s(0.5))
    run.add(f"{job}: lag, p99", "s", found.lag_s(0.99))
    crossed = found.crossed / (BURST_OBJECTS * OBJECT_BYTES)
    run.add(f"{job}: crossed", "B/B", crossed, SMALL_RATIO_MAX)
    run.add(f"{job}: requests to the source's OM, a change", "", calls / BURST_OBJECTS)


def _backlog(run: _Run) -> None:
    """Objects are written while the replication is paused: nothing competes then."""
    calls = run.om_calls()
    found = run.ours.many("backlog", BURST_OBJECTS, OBJECT_BYTES, is_paused=True)
    calls = run.om_calls() - calls
    job = f"backlog of {BURST_OBJECTS:,} objects of 4 KiB"
    run.add(job, "objects/s", BURST_OBJECTS / found.seconds)
    run.add(f"{job}: from the first arrival on", "objects/s", found.flow)
    run.add(f"{job}: requests to the source's OM, a change", "", calls / BURST_OBJECTS)


def _changes(run: _Run) -> None:
    """Small changes of a large object."""
    for name, crossed in run.ours.changes(LARGE_BYTES).items():
        run.add(f"64 MiB, {name}", "B", crossed, CHANGE_BYTES_MAX.get(name))


def _kill(run: _Run) -> None:
    """The syncer that has the replication is killed while objects are written."""
    seconds = run.ours.restarted_s()
    run.add("kill -9 of a syncer: the next object", "s", seconds, RESTART_S_MAX)


def _cut(run: _Run) -> None:
    """The links to the target are cut while objects are written."""
    job = f"links cut for {CUT_S:g} s, {CUT_OBJECTS} objects: all there after"
    run.add(job, "s", run.ours.caught_up_s())


class _Syncers:
    """A master with the lease of the product, and two syncers that it gives work."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        folder.mkdir()
        path = folder / "master.toml"
        path.write_text(
            f'state_folder = {json.dumps(str(folder / "master"))}\nlisten = "127.0.0.1:0"\n'
        )
        words = "replication-master", "run", "--config", str(path)
        master = stack.enter_context(TreefoldProcess(folder / "run", *words))
        self._address = master.address()
        self.client = MasterClient([self._address])
        stack.callback(self.client.close)
        self._processes = dict[str, tuple[str, TreefoldProcess]]()
        self._killed = ""
        for name in ("one", "other"):
            self._start(name)

    def kill(self) -> None:
        """As a crash of the one that has the replication."""
        holder = self.client.replication(_POLICY).state.holder
        assert holder is not None
        self._killed, process = self._processes.pop(holder.syncer_id)
        process.stop(SIGKILL)

    def start(self) -> None:
        """Start what was killed, as whoever watches it does."""
        self._start(self._killed)

    def pause(self) -> None:
        """As an operator does; returns once nothing is written any more."""
        self._want(DesiredState.PAUSED)
        wait_until(lambda: self._condition() is Condition.PAUSED, "a pause")

    def resume(self) -> None:
        """Let it go on."""
        self._want(DesiredState.ENABLED)

    def _want(self, desired: DesiredState) -> None:
        self.client.set_desired(_POLICY, desired, "a benchmark")

    def _condition(self) -> Condition | None:
        report = self.client.replication(_POLICY).state.report
        return report.condition if report is not None else None

    def is_live(self) -> bool:
        """Whether the log is followed."""
        report = self.client.replication(_POLICY).state.report
        return report is not None and report.checkpoint.stage is Stage.LIVE

    def _start(self, name: str) -> None:
        folder = self._folder / name
        process = self._stack.enter_context(syncer_process(folder, [self._address]))
        process.address()
        syncer_id = (folder / "state" / "syncer_uuid").read_text().strip()
        self._processes[syncer_id] = name, process


@contextmanager
def _replication(*, delay_ms: float, mbit: float) -> Iterator[tuple[Replicator, Callable[[], int]]]:
    """A replication that follows the log of a bucket, and the count of its requests to
    the source's OM.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-ozone-")))
        clusters = [stack.enter_context(one()) for one in (first_cluster, second_cluster)]
        endpoints = [S3Endpoint(f"http://{one.s3_address}", "any", "thing") for one in clusters]
        # Both take any credentials; syncers find these in their environment.
        os.environ.update(endpoints[0].environment)
        opened = [
            stack.enter_context(OzoneBuckets(*side))
            for side in zip(clusters, endpoints, strict=True)
        ]
        stores = [one.fresh(BucketLayout.OBJECT_STORE) for one in opened]
        places = [one.place(store)[1] for one, store in zip(opened, stores, strict=True)]
        links = [
            stack.enter_context(WanLink(address, delay_ms=delay_ms, mbit=mbit))
            for address in (clusters[1].om_address, clusters[1].s3_address)
        ]
        gateway = quote(f"http://{links[1].address}", safe="")
        target = f"ozone://{links[0].address}/s3v/{places[1]}?s3={gateway}"
        syncers = _Syncers(folder / "syncers", stack)
        syncers.client.add_policy(Policy(_POLICY, stores[0].address, target), "a benchmark")
        wait_until(syncers.is_live, "the log to be followed", timeout_s=_START_S)
        sides = zip(endpoints, places, strict=True)
        source, target_bucket = (S3Bucket(*one) for one in sides)
        acts = syncers.kill, syncers.start, syncers.pause, syncers.resume
        ours = Replicator("Treefold", source, target_bucket, links, *acts, stores[1].feed)
        # The first comparison of both sides comes soon after the start.
        time.sleep(_FIRST_PROOF_S)
        yield ours, lambda: _grpc_requests(clusters[0])


def _grpc_requests(cluster: OzoneCluster) -> int:
    """How many requests an OM got by gRPC; its gateway asks it by Hadoop RPC."""
    query = "Hadoop:service=OzoneManager,name=GrpcMetrics"
    with urllib.request.urlopen(f"{cluster.om_metrics}?qry={query}", timeout=10) as answer:
        (bean,) = json.load(answer)["beans"]
    return int(bean["GrpcQueueTimeNumOps"])
