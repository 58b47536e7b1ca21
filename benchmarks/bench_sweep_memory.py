"""What a whole sweep of many replicas costs: `python -m benchmarks.bench_sweep_memory
[--replicas N ...] [--blocks N] [--chunks N] [--largest-blocks N] [--engine spark|local]
[--json]`.

By itself a replica has two chunks, the least that a sweep has to do per replica. Shows
the CPU time of the whole process tree, from the tables of chunks to the report, and the
peak memory of the driver's Python, of its JVM and of the largest Python worker. Memory
is unique to the process (USS), sampled ten times a second. Each of several sizes has a
process of its own, since memory that a process took once may stay with it; the cost of
a replica at the last one is compared with that at the first.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from admin.demo.synthetic import SyntheticCluster, synthetic
from benchmarks.bench_sweep import NullProgress
from benchmarks.measure import Report, Samples
from benchmarks.process_tree import cpu_timer, memory_peaks
from runtime.disk import Disk
from spark.engine import SparkEngine
from spark.session import spark_session
from sweep.engine import LocalEngine, SweepRequest
from sweep.gather import Gatherer
from sweep.output import SweepStore
from sweep.report import write_report
from sweep.run import sweep

REPLICAS = 1_000_000
THREADS = 2
# The cost of a replica of two chunks, what a process of Python may take, and how much
# more a replica may cost where there are many.
_MICROSECONDS_MAX, _PYTHON_MIB_MAX, _GROWTH_MAX = 10.0, 1024.0, 1.1
# Files of a synthetic cluster, one per datanode.
DATANODES = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[REPLICAS])
    parser.add_argument("--blocks", type=int, default=2, help="Of a replica, on average.")
    parser.add_argument("--chunks", type=int, default=1, help="Of each block.")
    parser.add_argument("--largest-blocks", type=int, default=0, help="Of the first container.")
    parser.add_argument("--engine", choices=("spark", "local"), default="spark")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        (replicas,) = arguments.replicas
        cluster = SyntheticCluster(
            containers=replicas // 3,
            blocks=arguments.blocks,
            chunks=arguments.chunks,
            largest_blocks=arguments.largest_blocks,
            full=1,
            datanodes=DATANODES,
        )
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(measure(Path(folder), cluster, arguments.engine)))
        return
    found = list[dict[str, float]]()
    for replicas in arguments.replicas:
        words = ["--measure", "--replicas", replicas, "--engine", arguments.engine]
        words += ["--blocks", arguments.blocks, "--chunks", arguments.chunks]
        words += ["--largest-blocks", arguments.largest_blocks]
        command = [sys.executable, "-m", "benchmarks.bench_sweep_memory", *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found.append(json.loads(done.stdout))
    is_least = (arguments.blocks, arguments.chunks, arguments.largest_blocks) == (2, 1, 0)
    _report(found, arguments.engine, is_least=is_least).show(as_json=arguments.json)


def _report(found: Sequence[Mapping[str, float]], engine: str, *, is_least: bool) -> Report:
    notes = [", ".join(f"{name} {value:,}" for name, value in one.items()) for one in found]
    report = Report(f"whole sweep, {engine}, of many replicas", notes)
    for one in found:
        job = f"{one['replicas']:,.0f} replicas"
        most = _MICROSECONDS_MAX if is_least else None
        _add(report, f"{job}, CPU of each", "us", one["us of CPU a replica"], most)
        _add(report, f"{job}, driver's Python", "MiB", one["driver MiB"], _PYTHON_MIB_MAX)
        if engine == "spark":
            _add(report, f"{job}, largest worker", "MiB", one["worker MiB"], _PYTHON_MIB_MAX)
    if len(found) > 1:
        last, first = (
            Samples(f"at {one['replicas']:,.0f}", (one["us of CPU a replica"],))
            for one in (found[-1], found[0])
        )
        report.add("CPU of each replica, at the last size", "us", last, first, most=_GROWTH_MAX)
    return report


def _add(report: Report, job: str, unit: str, value: float, most: float | None) -> None:
    peer = Samples("the bar" if most else "", (most or value,))
    report.add(job, unit, Samples("ours", (value,)), peer, most=1.0 if most else None)


def measure(folder: Path, cluster: SyntheticCluster, engine: str) -> dict[str, float]:
    """Make this cluster and sweep it once."""
    # In a process of its own: generating takes more memory than the sweep.
    if (child := os.fork()) == 0:
        synthetic(folder / "table", cluster)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with ExitStack() as stack:
        timer = stack.enter_context(cpu_timer())
        if engine == "spark":
            settings = {"spark.driver.memory": "2g"}
            session = stack.enter_context(spark_session(f"local[{THREADS}]", settings=settings))
            # Compile and start workers, which every sweep pays once.
            session.range(1).mapInArrow(lambda batches: batches, "id long").count()
            ours: LocalEngine | SparkEngine = SparkEngine(session)
        else:
            ours = LocalEngine(Gatherer(folder / "spill", threads=THREADS))
        request = SweepRequest(folder / "out", (str(folder / "table"),))
        sweeps = SweepStore(folder / "out", Disk())
        with memory_peaks() as peaks:
            cpu, wall = timer.read_s(), time.monotonic()
            summary = sweep(
                request, ours, NullProgress(), report=lambda found: write_report(sweeps, found)
            )
            cpu, wall = timer.read_s() - cpu, time.monotonic() - wall
    tables = sum(path.stat().st_size for path in (folder / "out").rglob("*.parquet"))
    return {
        "replicas": summary.replicas,
        "rows": summary.rows,
        "diverged": len(summary.diverged),
        "us of CPU a replica": round(1e6 * cpu / summary.replicas, 2),
        "s by the clock": round(wall, 1),
        "tables MiB": tables >> 20,
        **{f"{name} MiB": peak >> 20 for name, peak in peaks.items()},
        "load": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
