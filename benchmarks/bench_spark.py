"""The sweep's engines on Spark: `python -m benchmarks.bench_spark [--rows N] [--large
N] [--rounds N] [--json]`.

Measures CPU seconds of the whole process tree (driver, JVM, Python workers), which
other load disturbs less than wall time, on `local[2]` and clustered tables.

The engines are compared with two jobs that a user might write. The careful one sorts
within partitions and folds in `mapInArrow`. The obvious one uses `collect_list` and a
Python UDF, and is so slow that it runs on a tenth of the rows. All must compute the
same roots.

A ratio of CPU seconds is how many times ours runs in the time of the peer. The cost of
more rows is the slope between two sizes.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, collect_list, struct, udf
from pyspark.sql.types import LongType

from benchmarks.bench_sweep import NullProgress
from benchmarks.measure import Report, Samples
from benchmarks.process_tree import CpuTimer, cpu_timer, memory_peaks
from benchmarks.tables import make_table
from merkle.columns import fold_blocks, fold_root
from merkle.tree import block_checksum, container_checksum
from runtime.disk import Disk
from spark.engine import SparkEngine
from spark.jobs import cores
from spark.scattered import last_offset
from spark.session import spark_session
from spark.sql import aggregate, names_of, partitions, settled
from sweep.engine import FoldedWave, SweepRequest
from sweep.inputs import table_parts
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA
from sweep.output import SweepStore, SweepTable
from sweep.pieces import StoredFile, StoredTable, TablePlace
from sweep.run import sweep
from sweep.runs import RUN_SCHEMA, settle
from sweep.stages import requested_rows

ROUNDS = 5
WARM_UPS = 2
ROWS = 20_000_000
LARGE = 100_000_000
_KEY = ["datanode", "container_id"]
_SORTED = [*_KEY, "block_id", "chunk_offset"]

Roots = Mapping[tuple[str, int], int]


@dataclass
class Cost:
    """The cost of one variant, in each round."""

    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    shuffled_bytes: int = 0
    worker_bytes: int = 0

    def samples(self, name: str) -> Samples:
        return Samples(name, tuple(self.cpu_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="Rows of the small table.")
    parser.add_argument(
        "--large", type=int, default=LARGE, help="Rows of the table on which engines are compared."
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, few, large = (
            _table(Path(folder, name), rows)
            for name, rows in (
                ("rows", arguments.rows),
                ("few", arguments.rows // 10),
                ("large", arguments.large),
            )
        )
        half = Table(few.folder, few.rows // 2, share=2)
        settings = {"spark.driver.memory": "5g"}
        with cpu_timer() as timer, spark_session("local[2]", settings=settings) as session:
            # As in production, the large table makes planning and compiling negligible.
            costs = _rounds(
                session,
                timer,
                {
                    "file-wise": (file_wise, large),
                    "whole sweep": (whole_sweep, large),
                    "SQL": (by_sql, large),
                    "sort + mapInArrow": (by_sort, large),
                    "file-wise, small": (file_wise, small),
                    "whole sweep, small": (whole_sweep, small),
                    "SQL, small": (by_sql, small),
                },
                arguments.rounds,
            )
            tenth = _rounds(
                session,
                timer,
                {
                    "file-wise": (file_wise, few),
                    "collect_list + UDF": (by_udf, few),
                    "of half": (by_udf, half),
                },
                arguments.rounds,
            )
    report = Report(
        f"Spark local[2], {large.rows:,} rows",
        [
            f"{name}: {statistics.median(cost.wall_s):.1f} s by the clock, {_mib(cost)}"
            for name, cost in costs.items()
        ],
    )
    sort = costs["sort + mapInArrow"]
    _add(report, "CPU, file-wise", costs["file-wise"], sort, 6)
    _add(report, "CPU, whole sweep", costs["whole sweep"], sort, 6)
    _add(report, "CPU, SQL", costs["SQL"], sort, 3)
    naive = _slope(tenth["collect_list + UDF"], tenth["of half"], few.rows - few.rows // 2)
    slope = _slope(costs["file-wise"], costs["file-wise, small"], large.rows - small.rows)
    report.add(
        "CPU of a million rows more",
        "times",
        _one("collect_list + UDF, s", naive),
        _one("file-wise, s", slope),
        25,
    )
    for name in ("file-wise", "SQL"):
        ours, theirs = (
            _one(name, costs[name].shuffled_bytes / 2**20),
            _one("sort + mapInArrow", sort.shuffled_bytes / 2**20),
        )
        report.add(f"shuffled, {name}", "MiB", ours, theirs, most=0.05)
    for job in ("file-wise", "whole sweep"):
        at_large, at_small = (
            Samples(name, tuple(cpu / table.rows * 1e6 for cpu in cost.cpu_s))
            for name, cost, table in (
                ("large table", costs[job], large),
                ("small table", costs[f"{job}, small"], small),
            )
        )
        report.add(f"CPU of a million rows, {job}", "s", at_large, at_small, most=1.1)
    worker = _one("file-wise, large table", costs["file-wise"].worker_bytes / 2**20)
    report.add("peak memory of a Python worker", "MiB", worker, _one("a GiB", 1024.0), most=1)
    report.show(as_json=arguments.json)


@dataclass(frozen=True)
class Table:
    """A synthetic table. Only one of every `share` containers is used, which leaves
    `rows` rows.
    """

    folder: Path
    rows: int
    share: int = 1

    def frame(self, session: SparkSession) -> DataFrame:
        """The chunk rows, read with Spark's Parquet reader."""
        rows = session.read.parquet(*map(str, self.files()))
        return rows if self.share == 1 else rows.where(col("container_id") % self.share == 0)

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*/chunks-*.parquet"))


def _table(folder: Path, rows: int) -> Table:
    # The bars are defined for 64 chunks in every block.
    truth = make_table(folder, rows, full=1)
    return Table(folder, truth.rows)


def file_wise(session: SparkSession, table: Table) -> Roots:
    """The Spark engine, from files to replicas."""
    waves: list[FoldedWave] = []
    parts = table_parts([str(table.folder)]).parts
    with _place(RUN_SCHEMA) as of_runs, _place(REPLICA_SCHEMA) as of_replicas:
        places = {"runs": of_runs, "requested": of_runs, "replicas": of_replicas}
        SparkEngine(session).fold(parts, places, waves.append, lambda _: None)

        def stored(name: str) -> pa.Table:
            files = [file for wave in waves for file in wave.files.get(name, ())]
            return _stored(places[name], files)

        settled = settle(stored("runs")).replicas
        return _roots(pa.concat_tables([settled, stored("replicas")]))


@contextmanager
def _place(schema: pa.Schema) -> Iterator[TablePlace]:
    """Where tasks write the files of one table."""
    with tempfile.TemporaryDirectory() as folder:
        yield TablePlace(Path(folder), schema)


def _stored(place: TablePlace, files: Iterable[StoredFile]) -> pa.Table:
    """The rows of files that tasks wrote."""
    paths = {place.folder / file.name: file for file in files}
    tables = StoredTable([], place.schema, paths).tables()
    return pa.concat_tables([place.schema.empty_table(), *tables])


def whole_sweep(session: SparkSession, table: Table) -> Roots:
    """All of a sweep, which also compares, judges, reads what differs again, and writes
    tables.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        request = SweepRequest(out, (str(table.folder),))
        summary = sweep(request, SparkEngine(session), NullProgress())
        sweeps, names = SweepStore(out, Disk()), REPLICA_SCHEMA.names
        pieces = sweeps.pieces(SweepTable.ROOTS, summary.sweep_id, names)
        return _roots(pa.concat_tables(pieces).cast(REPLICA_SCHEMA))


def by_sql(session: SparkSession, table: Table) -> Roots:
    """The XOR aggregate in Spark SQL; containers with irregular blocks are computed
    from their sorted rows.
    """
    rows = table.frame(session)
    last = last_offset(pq.read_metadata(path) for path in table.files())
    with names_of(rows) as names, partitions(session, names.blocks, cores=cores(session)):
        found = settled(aggregate(rows, names, last_offset=last).toArrow())
        assert not found.unnamed
    ids, counts = requested_rows(found.requested)
    is_exact = pc.is_in(found.replicas["container_id"], value_set=pa.array(ids))
    parts = table_parts([str(table.folder)]).parts
    with _place(REPLICA_SCHEMA) as place, _place(FINDING_SCHEMA) as findings:
        places = {"replicas": place, "findings": findings}
        judged = list(SparkEngine(session).exact(parts, ids, counts, places))
        files = [file for one in judged for file in one.files.get("replicas", ())]
        whole = [found.replicas.filter(pc.invert(is_exact)), _stored(place, files)]
        return _roots(pa.concat_tables([*whole, *(one.replicas for one in judged)]))


def by_sort(session: SparkSession, table: Table) -> Roots:
    """Sort within partitions by replica, and fold Arrow batches in Python."""
    rows = (
        table.frame(session)
        .select(*_SORTED, "checksum")
        .repartition(*_KEY)
        .sortWithinPartitions(*_SORTED)
    )
    found = rows.mapInArrow(
        _fold_batches, "datanode string, container_id long, root long"
    ).toArrow()
    return _pairs(found)


def _fold_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The roots of sorted replicas, which may continue from batch to batch."""
    names = ["datanode", "container_id", "root"]
    rest: pa.Table | None = None

    def whole(rows: pa.Table) -> pa.RecordBatch:
        rows = rows.combine_chunks()
        datanode = rows["datanode"].combine_chunks().dictionary_encode()
        nodes, containers = datanode.indices.to_numpy(), rows["container_id"].to_numpy()
        blocks, offsets = rows["block_id"].to_numpy(), rows["chunk_offset"].to_numpy()
        replica = np.r_[True, (containers[1:] != containers[:-1]) | (nodes[1:] != nodes[:-1])]
        starts = np.flatnonzero(replica | np.r_[True, blocks[1:] != blocks[:-1]])
        checksums = rows["checksum"].to_numpy()
        folded = fold_blocks(blocks[starts], np.r_[starts, len(blocks)], checksums)
        folded = np.where(offsets[starts] < 0, checksums[starts], folded)
        at = np.flatnonzero(replica[starts])
        # A replica without blocks, or without a tree, is one row.
        roots = [
            0 if offsets[starts[a]] == -2 else fold_root(folded[a:b])
            for a, b in zip(at, np.r_[at[1:], len(starts)], strict=True)
        ]
        taken = rows["datanode"].take(pa.array(starts[at])).combine_chunks()
        return pa.RecordBatch.from_arrays(
            [taken, pa.array(containers[starts[at]]), pa.array(roots, pa.int64())], names
        )

    for batch in batches:
        table = pa.Table.from_batches([batch])
        rows = table if rest is None else pa.concat_tables([rest, table])
        last = pc.and_(*(pc.equal(rows[name], rows[name][-1]) for name in _KEY))
        cut = rows.num_rows - int(pc.sum(last).as_py())
        if cut:
            yield whole(rows.slice(0, cut))
        rest = rows.slice(cut)
    if rest is not None:
        yield whole(rest)


def by_udf(session: SparkSession, table: Table) -> Roots:
    """Python functions on lists of rows, first for each block, then for each
    container.
    """

    def block(block_id: int, chunks: list[tuple[int, int]]) -> int:
        ordered = sorted(chunks)
        return (
            ordered[0][1]
            if ordered[0][0] < 0
            else block_checksum(block_id, [checksum for _, checksum in ordered])
        )

    def container(blocks: list[tuple[int, int]]) -> int:
        return container_checksum([checksum for _, checksum in sorted(blocks)])

    rows = table.frame(session).where(col("chunk_offset") >= -1)
    blocks = rows.groupBy(*_KEY, "block_id").agg(
        collect_list(struct("chunk_offset", "checksum")).alias("chunks")
    )
    folded = blocks.withColumn(
        "checksum", udf(block, LongType(), useArrow=False)("block_id", "chunks")
    )
    replicas = folded.groupBy(*_KEY).agg(
        collect_list(struct("block_id", "checksum")).alias("blocks")
    )
    return _pairs(
        replicas.select(
            *_KEY, udf(container, LongType(), useArrow=False)("blocks").alias("root")
        ).toArrow()
    )


def _roots(replicas: pa.Table) -> Roots:
    assert replicas.schema == REPLICA_SCHEMA
    return _pairs(replicas.filter(pc.is_valid(replicas["root"])))


def _pairs(found: pa.Table) -> Roots:
    columns = (found[name].to_pylist() for name in ("datanode", "container_id", "root"))
    return {
        (datanode, container_id): root
        for datanode, container_id, root in zip(*columns, strict=True)
        if root
    }


def _rounds(
    session: SparkSession,
    timer: CpuTimer,
    variants: Mapping[str, tuple[Callable[[SparkSession, Table], Roots], Table]],
    rounds: int,
) -> dict[str, Cost]:
    """The costs of all variants, after warm-up rounds for Java's compiler. All variants
    on one table must compute the same roots.
    """
    costs = {name: Cost() for name in variants}
    for _ in range(WARM_UPS):
        first = [(table, variant(session, table)) for variant, table in variants.values()]
        for table, roots in first:
            assert all(roots == others for one, others in first if one == table), (
                "the variants do not agree"
            )
    for _ in range(rounds):
        for name, (variant, table) in variants.items():
            shuffled = _shuffled(session)
            with memory_peaks() as peaks:
                cpu, wall = timer.read_s(), time.perf_counter()
                variant(session, table)
                costs[name].wall_s.append(time.perf_counter() - wall)
                costs[name].cpu_s.append(timer.read_s() - cpu)
            costs[name].shuffled_bytes = _shuffled(session) - shuffled
            costs[name].worker_bytes = max(costs[name].worker_bytes, peaks["worker"])
            print(f"{name}: {costs[name].cpu_s[-1]:.1f} s of CPU", file=sys.stderr)
    return costs


def _shuffled(session: SparkSession) -> int:
    """The shuffle bytes that all stages have written so far."""
    context = session.sparkContext
    gateway = context._gateway
    assert gateway is not None
    no_quantiles = gateway.new_array(gateway.jvm.double, 0)
    stages = context._jsc.sc().statusStore().stageList(None, False, False, no_quantiles, None)
    return sum(int(stages.apply(i).shuffleWriteBytes()) for i in range(stages.size()))


def _add(report: Report, job: str, ours: Cost, peer: Cost, bar: float) -> None:
    """Add the row for how many times ours runs in the CPU time of the peer."""
    mine, others = (
        Samples(name, tuple(1 / s for s in cost.cpu_s))
        for name, cost in (("ours", ours), ("sort + mapInArrow", peer))
    )
    report.add(job, "1/s", mine, others, bar)


def _slope(large: Cost, small: Cost, rows: int) -> float:
    """CPU seconds per additional million rows."""
    return (statistics.median(large.cpu_s) - statistics.median(small.cpu_s)) / rows * 1e6


def _one(name: str, figure: float) -> Samples:
    return Samples(name, (figure,))


def _mib(cost: Cost) -> str:
    return (
        f"{statistics.median(cost.cpu_s):.1f} s of CPU, {cost.shuffled_bytes / 2**20:.1f} MiB"
        f" shuffled, workers to {cost.worker_bytes / 2**20:.0f} MiB"
    )


if __name__ == "__main__":
    main()
