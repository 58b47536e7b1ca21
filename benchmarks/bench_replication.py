"""Following a bucket beside Ceph's own replication, between the same two stores.

    python -m benchmarks.bench_replication [--only JOB ...] [--json]

The command starts two Ceph stores (tests/testbed/ceph_rgw.sh, `sh tools/setup.sh peers`
installs them) as two zones of one realm. Ceph replicates one bucket, and `treefold
bucket sync --watch` another, of which Ceph replicates nothing. Both cross links with a
delay and a bandwidth that count every byte in both directions.

With `--stores ozone` it starts two real Ozone clusters instead
(tests/testbed/ozone_cluster.py), and a replication master with two syncers between
them: benchmarks/ozone_replication.py.

With `--stores verified` it shows what a verifier beside the target saves, and what a
gap in the log costs then (jobs burst and gap): benchmarks/verified_replication.py.

The lag of an object is from the answer to its PUT to the first listing of the target
that has it; the target is listed every 0.1 s, from the first key on that is not there
yet, beside the link. What is spent by which process is noted. S3 has no log of changes
that everybody may read: the watched sync lists the source at an interval, near it.
"""

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measure import Report, Samples
from benchmarks.ozone_replication import measure_ozone
from benchmarks.replication_runs import (
    BURST_OBJECTS,
    CAUGHT_UP_S_MAX,
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
    Arrivals,
    Replicator,
    bare_copies,
    ceph_replication,
    watched_sync,
)
from benchmarks.verified_replication import measure_verified
from tests.support.processes import ROOT
from tests.support.rgw import RgwMultisite
from tests.support.s3_servers import S3Bucket

JOBS = ("idle", "trickle", "burst", "backlog", "changes", "kill", "cut", "gap")
DELAY_MS = 45.0
MBIT = 200.0
INTERVAL_S = 0.25

# Ours against the peer's.
OBJECT_RATE_MIN = 3.0
LAG_RATIO_MAX = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", choices=("ceph", "ozone", "verified"), default="ceph")
    parser.add_argument("--gap-objects", type=int, default=100_000, help="Of --stores verified.")
    parser.add_argument("--only", choices=JOBS, nargs="+", default=JOBS, help="Default: all.")
    parser.add_argument("--delay-ms", type=float, default=DELAY_MS, help="One way.")
    parser.add_argument("--mbit", type=float, default=MBIT, help="Of each direction; 0: no limit.")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="Between two listings.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    link = {"delay_ms": arguments.delay_ms, "mbit": arguments.mbit}
    if arguments.stores == "ozone":
        measure_ozone(arguments.only, **link).show(as_json=arguments.json)
        return
    if arguments.stores == "verified":
        gap_objects = arguments.gap_objects
        found = measure_verified(arguments.only, gap_objects=gap_objects, **link)
        found.show(as_json=arguments.json)
        return
    notes = [
        f"{arguments.delay_ms:g} ms each way, {arguments.mbit:g} Mbit/s; the source is listed"
        f" every {arguments.interval:g} s"
    ]
    report = Report("following a bucket", notes)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-replication-")))
        sites = RgwMultisite(ROOT / ".testbed" / "ceph-bench", **link)
        stack.enter_context(sites)
        peer = stack.enter_context(ceph_replication(sites))
        ours = stack.enter_context(
            watched_sync(sites, folder, interval_s=arguments.interval, **link)
        )
        jobs: dict[str, Callable[[Report, Replicator, Replicator], None]] = {
            "idle": idle,
            "trickle": trickle,
            "burst": burst,
            "backlog": lambda report, ours, peer: backlog(
                report, ours, peer, lambda bucket: bare_copies(sites, bucket, "backlog/", **link)
            ),
            "changes": changes,
            "kill": kill,
            "cut": cut,
        }
        for name in (one for one in arguments.only if one in jobs):
            jobs[name](report, ours, peer)
    report.show(as_json=arguments.json)


def idle(report: Report, ours: Replicator, peer: Replicator) -> None:
    """Nothing is written."""
    mine, theirs = (_samples(one, one.idle(IDLE_S)) for one in (ours, peer))
    report.add("idle, a minute", "B", mine, theirs)
    bar = Samples("the bar", (IDLE_BYTES_MAX,))
    report.add("idle, a minute", "B", mine, bar, most=1.0)


def trickle(report: Report, ours: Replicator, peer: Replicator) -> None:
    """Objects come one by one."""
    found = _in_turn(
        ours,
        peer,
        lambda one: one.many("trickle", TRICKLE_OBJECTS, OBJECT_BYTES, per_second=TRICKLE_PER_S),
    )
    job = f"{TRICKLE_PER_S:g} objects/s"
    for share in (0.5, 0.99):
        mine, theirs = (_samples(one, run.lag_s(share)) for one, run in found)
        most = LAG_RATIO_MAX if share > 0.5 else None
        report.add(f"{job}: lag, p{share * 100:g}", "s", mine, theirs, most=most)


def burst(report: Report, ours: Replicator, peer: Replicator) -> None:
    """Objects come as fast as they are written."""
    found = _in_turn(ours, peer, lambda one: one.many("burst", BURST_OBJECTS, OBJECT_BYTES))
    job = f"{BURST_OBJECTS:,} objects of 4 KiB"
    mine, theirs = (_samples(one, BURST_OBJECTS / run.seconds) for one, run in found)
    report.add(job, "objects/s", mine, theirs, OBJECT_RATE_MIN)
    mine, theirs = (_samples(one, run.lag_s(0.99)) for one, run in found)
    report.add(f"{job}: lag, p99", "s", mine, theirs, most=LAG_RATIO_MAX)
    payload = BURST_OBJECTS * OBJECT_BYTES
    mine, theirs = (_samples(one, run.crossed / payload) for one, run in found)
    report.add(f"{job}: crossed", "B/B", mine, theirs)
    bar = Samples("the bar", (SMALL_RATIO_MAX,))
    report.add(f"{job}: crossed", "B/B", mine, bar, most=1.0)
    _add_cpu(report, job, found)


def backlog(
    report: Report,
    ours: Replicator,
    peer: Replicator,
    bare: Callable[[S3Bucket], tuple[float, float]],
) -> None:
    """Objects are written while the replicator is stopped (SIGSTOP; of Ceph that is the
    gateway of the second zone, which pulls), so that their writers take no CPU from it.
    Then bare requests copy them, which is what the stores and the machine allow.
    """
    found = _in_turn(
        ours,
        peer,
        lambda one: one.many("backlog", BURST_OBJECTS, OBJECT_BYTES, is_paused=True),
    )
    job = f"backlog of {BURST_OBJECTS:,} objects of 4 KiB"
    mine, theirs = (_samples(one, BURST_OBJECTS / run.seconds) for one, run in found)
    report.add(job, "objects/s", mine, theirs, OBJECT_RATE_MIN)
    flows, theirs_flow = (_samples(one, run.flow) for one, run in found)
    report.add(f"{job}: from the first arrival on", "objects/s", flows, theirs_flow)
    _, theirs_ms = _add_cpu(report, job, found)
    with ours.paused():
        rate, cpu_s = bare(ours.source)
    name = "bare GET and PUT"
    report.add(f"{name} of the same", "objects/s", Samples(name, (rate,)), theirs)
    spent = Samples(name, (cpu_s * 1000 / BURST_OBJECTS,))
    report.add(f"{name}: CPU, an object", "ms", spent, theirs_ms)


def _add_cpu(
    report: Report, job: str, found: list[tuple[Replicator, Arrivals]]
) -> tuple[Samples, Samples]:
    """CPU of all together, and a note of each part."""
    per_object = 1000 / BURST_OBJECTS
    for one, run in found:
        parts = (f"{part} {cpu_s * per_object:.2f}" for part, cpu_s in run.cpu_s.items())
        note = f"{job}, {one.name}, CPU in ms an object: {', '.join(parts)}"
        report.notes = [*report.notes, note]
    ours, peer = (_samples(one, sum(run.cpu_s.values()) * per_object) for one, run in found)
    report.add(f"{job}: CPU, an object", "ms", ours, peer)
    return ours, peer


def changes(report: Report, ours: Replicator, peer: Replicator) -> None:
    """Small changes of a large object."""
    found = [one.changes(LARGE_BYTES) for one in (ours, peer)]
    for name in found[0]:
        mine, theirs = (
            _samples(one, crossed[name]) for one, crossed in zip((ours, peer), found, strict=True)
        )
        job = f"64 MiB, {name}"
        report.add(job, "B", mine, theirs)
        if name in CHANGE_BYTES_MAX:
            bar = Samples("the bar", (CHANGE_BYTES_MAX[name],))
            report.add(job, "B", mine, bar, most=1.0)


def kill(report: Report, ours: Replicator, peer: Replicator) -> None:
    """The replicator is killed and started again while an object waits."""
    mine, theirs = (_samples(one, one.restarted_s()) for one in (ours, peer))
    report.add("kill -9 and start: the next object", "s", mine, theirs)
    bar = Samples("the bar", (RESTART_S_MAX,))
    report.add("kill -9 and start: the next object", "s", mine, bar, most=1.0)


def cut(report: Report, ours: Replicator, peer: Replicator) -> None:
    """The links of each are cut while objects are written."""
    mine, theirs = (_samples(one, one.caught_up_s()) for one in (ours, peer))
    job = f"links cut for {CUT_S:g} s, {CUT_OBJECTS} objects: all there after"
    report.add(job, "s", mine, theirs)
    report.add(job, "s", mine, Samples("the bar", (CAUGHT_UP_S_MAX,)), most=1.0)


def _in_turn(
    ours: Replicator, peer: Replicator, run: Callable[[Replicator], Arrivals]
) -> list[tuple[Replicator, Arrivals]]:
    """The same of both. Ours reads its source also when nothing is written there, so
    that it is stopped while the peer is measured.
    """
    mine = run(ours)
    with ours.paused():
        return [(ours, mine), (peer, run(peer))]


def _samples(one: Replicator, value: float) -> Samples:
    return Samples(one.name, (value,))


if __name__ == "__main__":
    main()
