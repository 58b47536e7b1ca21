"""What many small exports cost beyond their rows: `python -m
benchmarks.bench_many_exports [--exports N] [--rows N] [--rounds N] [--s3] [--json]`.

Sweeps on a local Spark two tables with the same rows: one of N exports with 20,000 rows
(--rows) each, and one of N / 100 exports. The difference of their CPU time, of the
whole process tree, is what exports cost. With --s3 both are in a bucket that is 50 ms
away (ministack behind a relay), and the wall time of reading is compared.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from admin.demo.synthetic import SyntheticCluster, synthetic
from benchmarks.bench_sweep import NullProgress
from benchmarks.measure import Report, Samples
from benchmarks.process_tree import cpu_timer
from spark.engine import SparkEngine
from spark.session import spark_session
from sweep.engine import SweepRequest
from sweep.run import sweep
from tests.support.s3_servers import S3Bucket, S3Endpoint, ministack
from tests.support.wan import WanLink

EXPORTS = 500
ROWS = 20_000
# Exports of the table with as many rows in fewer exports.
FEWER = 100
ROUNDS = 3
DELAY_MS = 25.0
# CPU of an export beyond its rows, in ms; wall time against that of fewer exports.
CPU_BAR_MS = 3.0
WALL_BAR = 2.0
# Rows of a replica: 20 blocks of 64 chunks.
BLOCKS, CHUNKS, REPLICAS = 20, 64, 3


class _Reading(NullProgress):
    """Measures how long the rows are read, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def begin(self, what: str, total: int | None, unit: str) -> None:
        now = time.monotonic()
        if self._began:
            self.seconds, self._began = now - self._began, 0.0
        if what == "reading":
            self._began = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exports", type=int, default=EXPORTS)
    parser.add_argument("--rows", type=int, default=ROWS, help="Rows of an export.")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--s3", action="store_true", help="Read from a bucket 50 ms away.")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    many, few = arguments.exports, max(REPLICAS, arguments.exports // FEWER)
    rows = arguments.rows
    report = Report(f"{many} exports of {rows:,} rows, and the same rows in {few}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = {number: folder / f"{number}-exports" for number in (many, few)}
        for number, table in names.items():
            _write(table, many * rows, number)
        tables = {number: str(table) for number, table in names.items()}
        if arguments.s3:
            tables = _upload(folder, names, stack)
        timer = stack.enter_context(cpu_timer())
        session = stack.enter_context(spark_session("local[2]"))
        engine = SparkEngine(session)

        def run(number: int) -> tuple[float, float]:
            """CPU seconds of a sweep, and wall seconds of its reading."""
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            progress, cpu, begun = _Reading(), timer.read_s(), time.monotonic()
            request = SweepRequest(out, (tables[number],))
            summary = sweep(request, engine, progress)
            assert summary.rows >= 0.9 * many * rows
            assert not summary.skipped
            # Finding the exports is reading, too.
            whole = time.monotonic() - begun
            return timer.read_s() - cpu, whole if arguments.s3 else progress.seconds

        found = _interleaved(run, arguments.rounds, many, few)
    if arguments.s3:
        theirs = Samples(f"{few} exports", tuple(1 / wall for _, wall in found[few]))
        ours = Samples("ours", tuple(1 / wall for _, wall in found[many]))
        report.add("sweeps, 50 ms away", "1/s", ours, theirs, 1 / WALL_BAR)
    pairs = zip(found[many], found[few], strict=True)
    cost = tuple(1000 * (ours[0] - theirs[0]) / (many - few) for ours, theirs in pairs)
    bar = Samples("as it has to be", (CPU_BAR_MS,))
    report.add("CPU an export beyond its rows", "ms", Samples("ours", cost), bar, most=1)
    report.show(as_json=arguments.json)


def _write(table: Path, rows: int, datanodes: int) -> None:
    cluster = SyntheticCluster(
        containers=rows // (REPLICAS * BLOCKS * CHUNKS),
        blocks=BLOCKS,
        chunks=CHUNKS,
        full=1,
        datanodes=datanodes,
    )
    # In a process of its own: generating takes more memory than the sweep.
    if (child := os.fork()) == 0:
        synthetic(table, cluster)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _upload(folder: Path, tables: dict[int, Path], stack: ExitStack) -> dict[int, str]:
    """The addresses of the tables in a bucket across a slow link."""
    server = stack.enter_context(ministack(folder / "log"))
    endpoint = S3Endpoint(server.url, "test", "test")
    os.environ |= endpoint.environment
    bucket = endpoint.fresh_bucket()
    with endpoint.client() as client:
        for table in tables.values():
            for path in (path for path in table.rglob("*") if path.is_file()):
                key = str(path.relative_to(folder))
                client.put_object(Bucket=bucket.name, Key=key, Body=path.read_bytes())
    link = stack.enter_context(WanLink(endpoint.address, delay_ms=DELAY_MS))
    far = S3Bucket(link.through(endpoint), bucket.name)
    return {
        number: f"s3://{far.name}/{table.name}?endpoint_url={far.endpoint.url}"
        for number, table in tables.items()
    }


def _interleaved(
    run: Callable[[int], tuple[float, float]], rounds: int, *numbers: int
) -> dict[int, list[tuple[float, float]]]:
    """What `run` returns for each number in each round, after one that warms up."""
    found: dict[int, list[tuple[float, float]]] = {number: [] for number in numbers}
    for each in range(1 + rounds):
        for number in numbers:
            result = run(number)
            if each:
                found[number].append(result)
    return found


if __name__ == "__main__":
    main()
