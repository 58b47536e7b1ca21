"""The engine of a Spark cluster: each task runs the engine of one machine on one part.

A task opens its part itself and returns only the result, as one row with tables in
Arrow format. Rows of chunks pass between Spark and Python only for containers that must
be sorted or inspected; Spark shuffles those. Where rows are in no order, and blocks are
large enough for it to pay, Spark SQL folds them (spark.sql).
"""

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial, reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeAlias
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit
from pyspark.sql.pandas.types import from_arrow_schema

from chunktable.schema import CHUNK_SCHEMA
from runtime.disk import Disk
from spark.errors import SparkFailedError
from spark.session import watched
from spark.sql import aggregate, names_of
from sweep.engine import WAVE_ROWS, ContainerResults, FoldedWave, LocalEngine
from sweep.files import DEFAULTS, is_plain, read_rows, unreadable_finding
from sweep.gather import GROUP_ROWS, Gatherer, Int64s
from sweep.inputs import table_parts
from sweep.model import FINDING_SCHEMA, Part
from sweep.runs import RUN_SCHEMA
from sweep.trees import PackedTreeFile, TreeJob, pack_part

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Scattered(Enum):
    """How files whose rows are in no order are processed."""

    # The faster one: SQL where blocks average _CHUNKS_MIN chunks or more, otherwise
    # sorting.
    AUTO = "auto"
    SQL = "sql"
    EXACT = "exact"


# Below, an aggregate of a block is wider than its chunks, and sorting them is cheaper.
_CHUNKS_MIN = 4

# Rows and containers shuffled by one job, and so the most that a crash loses.
_GATHERED_ROWS_MAX = 256 << 20
_GATHERED_CONTAINERS_MAX = 100_000

# Results of tasks, pickled.
_RESULT_SCHEMA = pa.schema([pa.field("result", pa.binary(), nullable=False)])
# Where Spark's error text names the cause: our own error first, then the last failure
# of a task, then the innermost exception of Java, then any line.
_CAUSES = (
    re.compile(r"merkle\.errors\.(\w+: .*)"),
    re.compile(r"most recent failure: (.*)"),
    re.compile(r"(?s:.*)\nCaused by: (.*)"),
    re.compile(r"\n: (.*)"),
    re.compile(r"(.+)"),
)

# Tables from other writers may lack values.
_NULLABLE = pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])
# Times travel as integers: an unchecked one may overflow Spark's microseconds.
_SHUFFLE_SCHEMA = pa.schema(
    [
        *(f.with_type(pa.int64()) if pa.types.is_timestamp(f.type) else f for f in _NULLABLE),
        # The group of containers that a row belongs to: Spark shuffles by it.
        pa.field("gathered_in", pa.int32(), nullable=False),
    ]
)


def _ignore(*_: int) -> None:
    """Discard progress."""


class SparkEngine:
    """An engine (sweep.engine.Engine) that uses all cores of a Spark session."""

    name = "spark"

    def __init__(self, session: SparkSession, *, scattered: Scattered = Scattered.AUTO) -> None:
        self._session = session
        self._scattered = scattered
        self._cores = session.sparkContext.defaultParallelism

    def fold(
        self,
        parts: Sequence[Part],
        store: Callable[[FoldedWave], None],
        advance: Callable[[int], None],
    ) -> None:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
        """
        unordered = list[tuple[Part, FoldedWave]]()
        # One wave takes each core about a minute.
        for wave in _waves(parts, WAVE_ROWS * self._cores):
            progress = _RowProgress(sum(part.rows for part in wave), advance)
            by_id = {part.part_id: part for part in wave}
            ordered = list[FoldedWave]()
            for folded in self._results(
                self._run(len(wave), partial(_fold, wave)), "reading", progress.tasks_done
            ):
                assert isinstance(folded, FoldedWave)
                if len(folded.exact):
                    unordered.append((by_id[folded.part_ids[0]], folded))
                else:
                    ordered.append(folded)
            if ordered:
                store(_concatenated(ordered))
            progress.finish()
        if unordered:
            # All at once: the rows of a replica may be in all of these parts.
            by_sql = self._fold_by_sql([part for part, _ in unordered])
            if isinstance(by_sql, FoldedWave):
                store(by_sql)
            else:
                sorted_later = _concatenated([folded for _, folded in unordered])
                store(replace(sorted_later, notes=(by_sql,) if by_sql else ()))

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
        """
        for ids, counts in _batches(container_ids, rows):
            yield from self._shuffle(_exact, parts, ids, counts)

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
        """
        of_replica = replicas["container_id"].to_numpy()
        for ids, counts in _batches(container_ids, rows):
            theirs = replicas.filter(pa.array(np.isin(of_replica, ids)))
            yield from self._shuffle(partial(_inspect, theirs), parts, ids, counts)

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """See Engine. Tasks that see the folder write their part; this machine writes
        the parts of the others.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
        """
        # A task sees this file exactly where the folder is shared.
        marker = job.folder / f".shared-{uuid4().hex}"
        disk.replace(marker, b"")
        try:
            left = list(job.ordered)
            for wave in _waves(job.ordered, WAVE_ROWS * self._cores):
                for result in self._results(
                    self._run(len(wave), partial(_pack, job, wave, marker)), "writing trees"
                ):
                    assert isinstance(result, tuple)
                    part, packed = result
                    if packed is not None:
                        left.remove(part)
                        yield packed
        finally:
            disk.remove(marker)
        with TemporaryDirectory(prefix="treefold-") as scratch:
            yield from LocalEngine(Gatherer(Path(scratch))).trees(replace(job, ordered=left), disk)

    def _shuffle(
        self, judge: "Judge", parts: Sequence[Part], ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """Shuffle the rows of these containers into groups, and judge each group in a
        task.
        """
        _, starts = np.unique(np.cumsum(rows) // GROUP_ROWS, return_index=True)
        groups = _ContainerGroups(ids, rows, starts)
        selected = self._run(
            len(parts), partial(_select_rows, list(parts), groups), _SHUFFLE_SCHEMA
        )
        shuffled = selected.repartitionById(len(starts), "gathered_in")
        missing = set(range(len(starts)))
        for result in self._results(
            shuffled.mapInArrow(partial(_judge, judge, groups), "result binary"), "gathering"
        ):
            assert isinstance(result, tuple)
            group, of_containers = result
            missing.discard(group)
            yield from of_containers
        # Spark starts no task for a partition without rows.
        for group in sorted(missing):
            yield from groups.judge(group, judge, ())

    def _fold_by_sql(self, parts: Sequence[Part]) -> FoldedWave | str | None:
        """Fold all these parts in Spark SQL; None if sorting is preferred or Spark
        cannot read them, and a note if it failed.
        """
        # Files with a manifest are in order, and Spark's reader would not verify them.
        assert all(part.manifest is None for part in parts)
        if self._scattered is Scattered.EXACT:
            return None
        files = _whole_files(parts)
        if files is None:
            return None
        try:
            return watched(
                self._session,
                "reading in no order",
                partial(self._aggregated, files, parts),
                _ignore,
            )
        except (PySparkException, Py4JError) as error:
            return (
                f"the rows in no order were sorted, because Spark SQL failed: {_cause(str(error))}"
            )

    def _aggregated(
        self, files: Mapping[str, pq.FileMetaData], parts: Sequence[Part]
    ) -> FoldedWave | None:
        rows = self._rows(files)
        names = names_of(rows)
        blocks = pc.sum(names["blocks"]).as_py() or 0
        if self._scattered is Scattered.AUTO and _CHUNKS_MIN * blocks > sum(
            part.rows for part in parts
        ):
            return None
        found = aggregate(rows, names, last_offset=last_offset(files.values()))
        if found.rows != sum(part.rows for part in parts):
            # Spark ignores files with certain names, so rows are missing.
            return None
        text = f"{found.lost} rows name no datanode or no container"
        return FoldedWave(
            tuple(part.part_id for part in parts),
            found.rows,
            RUN_SCHEMA.empty_table(),
            found.replicas,
            unreadable_finding(text) if found.lost else FINDING_SCHEMA.empty_table(),
            found.exact,
            found.exact_rows,
        )

    def _rows(self, files: Mapping[str, pq.FileMetaData]) -> DataFrame:
        by_columns = dict[tuple[str, ...], list[str]]()
        for location, metadata in files.items():
            by_columns.setdefault(tuple(metadata.schema.names), []).append(location)
        frames = [
            _conformed(self._session.read.parquet(*locations)) for locations in by_columns.values()
        ]
        return reduce(DataFrame.unionAll, frames)

    def _run(
        self,
        count: int,
        work: "Callable[[int], Iterable[pa.RecordBatch]]",
        schema: pa.Schema = _RESULT_SCHEMA,
    ) -> DataFrame:
        """The rows that `work` returns for each number below `count`, in one task
        each.
        """
        numbers = self._session.range(0, count, 1, count)
        return numbers.mapInArrow(partial(_for_numbers, work), from_arrow_schema(schema))

    def _results(
        self, frame: DataFrame, description: str, report: Callable[[int, int], None] = _ignore
    ) -> Iterator[object]:
        """Run a frame of _RESULT_SCHEMA and return its unpickled results."""
        try:
            results = watched(self._session, description, frame.toArrow, report)["result"]
        except (PySparkException, Py4JError) as error:
            raise SparkFailedError(
                f"{description} failed on Spark: {_cause(str(error))}"
            ) from error
        for result in results:
            # Safe to unpickle: our own tasks pickled it, and Spark itself pickles the
            # tasks.
            yield pickle.loads(result.as_buffer())


Judge: TypeAlias = Callable[
    [LocalEngine, Sequence[Part], Int64s, Int64s], Iterator[ContainerResults]
]


@dataclass(frozen=True, slots=True)
class _ContainerGroups:
    """Containers in ascending order, each with its approximate number of rows; group i
    begins at index `starts[i]`.
    """

    container_ids: Int64s
    rows: Int64s
    starts: Int64s

    def of(self, batch: pa.RecordBatch) -> "NDArray[np.int32]":
        """The group of each row."""
        firsts = self.container_ids[self.starts]
        indexes = np.searchsorted(firsts, batch["container_id"].to_numpy(), "right") - 1
        groups: NDArray[np.int32] = indexes.astype(np.int32)
        return groups

    def judge(
        self, group: int, judge: Judge, batches: Iterable[pa.RecordBatch]
    ) -> list[ContainerResults]:
        """Judge the containers of a group. `batches` hold all of their rows, which are
        buffered on disk.
        """
        members = slice(
            self.starts[group], self.starts[group + 1] if group + 1 < len(self.starts) else None
        )
        ids, rows = self.container_ids[members], self.rows[members]
        with TemporaryDirectory(prefix="treefold-") as scratch:
            path = Path(scratch, "rows.parquet")
            with pq.ParquetWriter(path, _NULLABLE) as writer:
                for batch in batches:
                    assert (batch["gathered_in"].to_numpy() == group).all()
                    writer.write_table(
                        pa.Table.from_batches([batch]).select(_NULLABLE.names).cast(_NULLABLE)
                    )
            engine = LocalEngine(Gatherer(Path(scratch, "spill"), threads=1))
            return list(judge(engine, table_parts([str(path)]).parts, ids, rows))


class _RowProgress:
    """Converts Spark's counts of tasks to rows and reports the rows as they grow."""

    def __init__(self, rows: int, advance: Callable[[int], None]) -> None:
        self._rows = rows
        self._advance = advance
        self._reported = 0

    def tasks_done(self, done: int, total: int) -> None:
        """Report rows up to this share of the tasks."""
        rows = self._rows * done // total
        if rows > self._reported:
            self._advance(rows - self._reported)
            self._reported = rows

    def finish(self) -> None:
        """Report the rows that are left."""
        self.tasks_done(1, 1)


def last_offset(files: Iterable[pq.FileMetaData]) -> int | None:
    """The largest chunk offset in these files, in bytes; None if a footer lacks its
    statistics.
    """
    last = 0
    for metadata in files:
        column = (
            metadata.schema.names.index("chunk_offset")
            if "chunk_offset" in metadata.schema.names
            else -1
        )
        for group in range(metadata.num_row_groups):
            statistics = (
                metadata.row_group(group).column(column).statistics if column >= 0 else None
            )
            if statistics is None or not (
                statistics.has_min_max and isinstance(statistics.max, int)
            ):
                return None
            last = max(last, statistics.max)
    return last


def _whole_files(parts: Sequence[Part]) -> dict[str, pq.FileMetaData] | None:
    """The footers of the parts' files by location; None unless these are whole files
    that Spark can read.
    """
    rows = Counter[str]()
    for part in parts:
        rows[part.location] += part.rows
    # pyarrow has filesystems for URLs that Spark may not have.
    if any("://" in location for location in rows):
        return None
    files = {location: pq.read_metadata(location) for location in rows}
    are_whole = all(files[location].num_rows == count for location, count in rows.items())
    return (
        files
        if are_whole and all(is_plain(one.schema.to_arrow_schema()) for one in files.values())
        else None
    )


def _for_numbers(
    work: Callable[[int], Iterable[pa.RecordBatch]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from work(number)


def _fold(parts: Sequence[Part], number: int) -> Iterator[pa.RecordBatch]:
    waves = list[FoldedWave]()
    with TemporaryDirectory(prefix="treefold-") as scratch:
        LocalEngine(Gatherer(Path(scratch), threads=1)).fold([parts[number]], waves.append, _ignore)
    yield from map(_pickled, waves)


def _pack(
    job: TreeJob, parts: Sequence[Part], marker: Path, number: int
) -> Iterator[pa.RecordBatch]:
    part, packed = parts[number], None
    if marker.exists():
        with TemporaryDirectory(prefix="treefold-") as scratch:
            packed = pack_part(job, part, Gatherer(Path(scratch), threads=1), Disk())
    yield _pickled((part, packed))


def _select_rows(
    parts: Sequence[Part], groups: _ContainerGroups, number: int
) -> Iterator[pa.RecordBatch]:
    for batch in read_rows(parts[number], groups.container_ids):
        columns = [
            column.cast(field.type)
            for column, field in zip(batch.columns, _SHUFFLE_SCHEMA, strict=False)
        ]
        yield pa.RecordBatch.from_arrays(
            [*columns, pa.array(groups.of(batch))], schema=_SHUFFLE_SCHEMA
        )


def _judge(
    judge: Judge, groups: _ContainerGroups, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    group = context.partitionId()
    yield _pickled((group, groups.judge(group, judge, batches)))


def _exact(
    engine: LocalEngine, parts: Sequence[Part], ids: Int64s, rows: Int64s
) -> Iterator[ContainerResults]:
    return engine.exact(parts, ids, rows)


def _inspect(
    replicas: pa.Table, engine: LocalEngine, parts: Sequence[Part], ids: Int64s, rows: Int64s
) -> Iterator[ContainerResults]:
    theirs = replicas.filter(pa.array(np.isin(replicas["container_id"].to_numpy(), ids)))
    return engine.inspect(parts, ids, rows, theirs)


def _pickled(result: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array([pickle.dumps(result)], pa.binary())], schema=_RESULT_SCHEMA
    )


def _conformed(frame: DataFrame) -> DataFrame:
    """Another writer's table with the columns of CHUNK_SCHEMA. A value that does not
    fit becomes null; `aggregate` sends its container to the exact path.
    """
    fields = from_arrow_schema(_NULLABLE).fields
    return frame.select(
        *(
            (col(f.name) if f.name in frame.columns else lit(DEFAULTS[f.name]))
            .try_cast(f.dataType)
            .alias(f.name)
            for f in fields
        )
    )


def _waves(parts: Sequence[Part], rows_min: int) -> Iterator[list[Part]]:
    """Consecutive parts, a wave ending with the part that brings it to `rows_min`."""
    wave, rows = list[Part](), 0
    for part in parts:
        wave.append(part)
        rows += part.rows
        if rows >= rows_min:
            yield wave
            wave, rows = [], 0
    if wave:
        yield wave


def _batches(container_ids: Int64s, rows: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Containers and their rows in batches of one shuffle each."""
    batch = np.maximum(
        np.cumsum(rows) // _GATHERED_ROWS_MAX, np.arange(len(rows)) // _GATHERED_CONTAINERS_MAX
    )
    cuts = np.flatnonzero(batch[1:] != batch[:-1]) + 1
    yield from zip(np.split(container_ids, cuts), np.split(rows, cuts), strict=True)


def _concatenated(waves: Sequence[FoldedWave]) -> FoldedWave:
    return FoldedWave(
        tuple(part_id for wave in waves for part_id in wave.part_ids),
        sum(wave.rows for wave in waves),
        pa.concat_tables([wave.runs for wave in waves]),
        pa.concat_tables([wave.replicas for wave in waves]),
        pa.concat_tables([wave.findings for wave in waves]),
        np.concatenate([wave.exact for wave in waves]),
        np.concatenate([wave.exact_rows for wave in waves]),
        {part_id: reason for wave in waves for part_id, reason in wave.skipped.items()},
        tuple(dict.fromkeys(note for wave in waves for note in wave.notes)),
    )


def _cause(text: str) -> str:
    return next((match[1].strip() for cause in _CAUSES if (match := cause.search(text))), "")
