"""The cost of writing all trees in a sweep: `python -m benchmarks.bench_trees [--rows
N] [--json]`.

Runs the same sweep on one machine with and without writing the trees. It measures the
CPU time of all threads, because the time that a disk takes to sync varies.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.bench_sweep import THREADS, NullProgress
from benchmarks.measure import Report, interleaved
from benchmarks.tables import make_table
from sweep.engine import LocalEngine, SweepRequest
from sweep.gather import Gatherer
from sweep.run import sweep

ROUNDS = 5
ROWS = 5_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="Approximate number of chunk rows.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        truth = make_table(place / "table", arguments.rows)
        variants = {
            "with trees": lambda: run_sweep(place, write_trees=True),
            "roots only": lambda: run_sweep(place, write_trees=False),
        }
        rates = interleaved(truth.rows / 1e6, variants, rounds=ROUNDS, clock=time.process_time)
    report = Report(f"sweep of {truth.rows:,} rows")
    report.add("sweep", "M rows/s of CPU", rates["with trees"], rates["roots only"], 0.5)
    report.show(as_json=arguments.json)


def run_sweep(place: Path, *, write_trees: bool) -> None:
    """Run a whole sweep into a new folder."""
    out = place / "out"
    shutil.rmtree(out, ignore_errors=True)
    engine = LocalEngine(Gatherer(out / "work" / "spill", threads=THREADS))
    sweep(
        SweepRequest(out, tables=(str(place / "table"),), write_trees=write_trees),
        engine,
        NullProgress(),
    )


if __name__ == "__main__":
    main()
