"""What a whole sweep of many replicas costs: `python -m benchmarks.bench_sweep_memory
[--replicas N] [--blocks N] [--chunks N] [--largest-blocks N] [--engine spark|local]
[--json]`.

By itself a replica has two chunks, the least that a sweep has to do per replica. Prints
the CPU seconds of the whole process tree, and the peak memory of the driver's Python,
of its JVM and of the largest Python worker. Memory is unique to the process (USS),
sampled ten times a second. Each size and shape wants a process of its own: memory that
a process took once may stay with it.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from admin.demo.synthetic import SyntheticCluster, synthetic
from benchmarks.bench_sweep import NullProgress
from benchmarks.process_tree import cpu_timer, memory_peaks
from runtime.progress import ProgressSink
from spark.engine import SparkEngine
from spark.session import spark_session
from sweep.engine import LocalEngine, SweepRequest
from sweep.gather import Gatherer
from sweep.run import sweep

REPLICAS = 1_000_000
THREADS = 2
# Files of a synthetic cluster, one per datanode.
DATANODES = 6


class _Stages(NullProgress):
    """Notes when each stage began, in seconds."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self.begun.append((what, round(time.monotonic(), 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--blocks", type=int, default=2, help="Of a replica, on average.")
    parser.add_argument("--chunks", type=int, default=1, help="Of each block.")
    parser.add_argument("--largest-blocks", type=int, default=0, help="Of the first container.")
    parser.add_argument("--engine", choices=("spark", "local"), default="spark")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = SyntheticCluster(
            containers=arguments.replicas // 3,
            blocks=arguments.blocks,
            chunks=arguments.chunks,
            largest_blocks=arguments.largest_blocks,
            full=1,
            datanodes=DATANODES,
        )
        found = measure(Path(folder), cluster, arguments.engine)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:24} {value}")


def measure(folder: Path, cluster: SyntheticCluster, engine: str) -> dict[str, object]:
    """Make this cluster and sweep it once."""
    # In a process of its own: generating takes more memory than the sweep.
    if (child := os.fork()) == 0:
        synthetic(folder / "table", cluster)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    progress: ProgressSink = _Stages()
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
        with memory_peaks() as peaks:
            cpu, wall = timer.read_s(), time.monotonic()
            summary = sweep(request, ours, progress)
            cpu, wall = timer.read_s() - cpu, time.monotonic() - wall
    tables = sum(path.stat().st_size for path in (folder / "out").rglob("*.parquet"))
    return {
        "engine": engine,
        "replicas": summary.replicas,
        "rows": summary.rows,
        "diverged": len(summary.diverged),
        "CPU s": round(cpu, 1),
        "CPU us a replica": round(1e6 * cpu / summary.replicas, 2),
        "wall s": round(wall, 1),
        "tables MiB": tables >> 20,
        **{f"{name} MiB": peak >> 20 for name, peak in peaks.items()},
        "largest RSS MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "stages": getattr(progress, "begun", []),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
