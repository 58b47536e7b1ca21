"""What writing all trees adds to a sweep: `python -m benchmarks.bench_trees [--rows N]
[--json]`.

The same sweep of the same chunk tables on one machine, of roots only and with every
replica's tree written. The figure is processor time, all threads together: how long a
disk takes to sync concerns the trees alone, and drifts.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks.bench_sweep import THREADS, Silent
from benchmarks.measure import Report, interleaved
from benchmarks.tables import make_table
from sweep.engine import LocalEngine, SweepRequest
from sweep.gather import Gatherer
from sweep.run import sweep

ROUNDS = 5
ROWS = 5_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="About so many rows of chunks.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        truth = make_table(place / "table", arguments.rows)
        variants = {
            "with trees": lambda: swept(place, write_trees=True),
            "roots only": lambda: swept(place, write_trees=False),
        }
        rates = interleaved(truth.rows / 1e6, variants, rounds=ROUNDS, clock=time.process_time)
    report = Report(f"sweep of {truth.rows:,} rows")
    report.add("sweep", "M rows/s of CPU", rates["with trees"], rates["roots only"], 0.5)
    report.show(as_json=arguments.json)


def swept(place: Path, *, write_trees: bool) -> None:
    """A whole sweep into a folder of its own."""
    out = place / "out"
    shutil.rmtree(out, ignore_errors=True)
    engine = LocalEngine(Gatherer(out / "work" / "spill", threads=THREADS))
    sweep(
        SweepRequest(out, tables=(str(place / "table"),), write_trees=write_trees), engine, Silent()
    )


if __name__ == "__main__":
    main()
