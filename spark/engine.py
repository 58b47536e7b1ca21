"""The engine of a Spark cluster: what the engine of one machine does, a task at a time.

Every task works file-wise: it opens its part itself, and only what it comes to travels,
as one row with tables in Arrow's own format. No row of a chunk crosses between Spark
and Python but those of containers that have to be sorted or inspected, which are
brought together by Spark. Where rows lie in no order at all, and blocks are large
enough for it to pay, Spark SQL folds them (spark.sql).
"""

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
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
    """What is done with files whose rows lie in no order."""

    # By what is faster: SQL where blocks have _CHUNKS_MIN chunks or more, otherwise
    # sorting.
    AUTO = "auto"
    SQL = "sql"
    EXACT = "exact"


# Below, an aggregate of a block is wider than its chunks, and sorting them is cheaper.
_CHUNKS_MIN = 4

# Of containers whose rows are brought together at a time: what a crash costs.
_GATHERED_ROWS = 256 << 20
_GATHERED_CONTAINERS = 100_000

# What tasks make, packed.
_MADE = pa.schema([pa.field("made", pa.binary(), nullable=False)])
# Where in the text that comes back it says what went wrong: our own error, what a task
# met, what Spark says.
_CAUSES = (
    re.compile(r"merkle\.errors\.(\w+: .*)"),
    re.compile(r"most recent failure: (.*)"),
    re.compile(r"(.+)"),
)

# Others' rows may lack a value.
_NULLABLE = pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])
# Spark keeps times in microseconds, which are too many for a time that nobody has
# checked.
_TRAVELLING = pa.schema(
    [
        *(f.with_type(pa.int64()) if pa.types.is_timestamp(f.type) else f for f in _NULLABLE),
        # Spark must be told which group of containers a row belongs to.
        pa.field("gathered_in", pa.int32(), nullable=False),
    ]
)


def _ignore(*_: int) -> None:
    """Where nobody is told."""


class SparkEngine:
    """All cores of a Spark session."""

    name = "spark"

    def __init__(self, session: SparkSession, *, scattered: Scattered = Scattered.AUTO) -> None:
        self._session = session
        self._scattered = scattered
        self._cores = session.sparkContext.defaultParallelism

    def fold(
        self,
        parts: Sequence[Part],
        store: Callable[[FoldedWave], None],
        tell: Callable[[int], None],
    ) -> None:
        """See Engine.

        Raises:
            SparkFailedError: a job failed, and its tasks again and again.
        """
        held = list[tuple[Part, FoldedWave]]()
        # A minute or so for each core.
        for wave in _cut(parts, WAVE_ROWS * self._cores):
            told = _Told(sum(part.rows for part in wave), tell)
            by_id = {part.part_id: part for part in wave}
            ordered = list[FoldedWave]()
            for one in self._made(
                self._each(len(wave), partial(_fold, wave)), "reading", told.share
            ):
                assert isinstance(one, FoldedWave)
                if len(one.exact):
                    held.append((by_id[one.part_ids[0]], one))
                else:
                    ordered.append(one)
            if ordered:
                store(_joined(ordered))
            told.rest()
        if held:
            # A replica may lie in all of them.
            store(self._by_sql([part for part, _ in held]) or _joined([one for _, one in held]))

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed, and its tasks again and again.
        """
        for ids, counts in _gatherings(container_ids, rows):
            yield from self._judged(_exact, parts, ids, counts)

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed, and its tasks again and again.
        """
        of_replica = replicas["container_id"].to_numpy()
        for ids, counts in _gatherings(container_ids, rows):
            theirs = replicas.filter(pa.array(np.isin(of_replica, ids)))
            yield from self._judged(partial(_inspect, theirs), parts, ids, counts)

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """See Engine: written by tasks where they see the folder; else this machine
        writes what they would have.

        Raises:
            SparkFailedError: a job failed, and its tasks again and again.
        """
        # Seen by tasks exactly where the folder is shared.
        mark = job.folder / f".shared-{uuid4().hex}"
        disk.replace(mark, b"")
        try:
            left = list(job.ordered)
            for wave in _cut(job.ordered, WAVE_ROWS * self._cores):
                for made in self._made(
                    self._each(len(wave), partial(_pack, job, wave, mark)), "writing trees"
                ):
                    assert isinstance(made, tuple)
                    part, packed = made
                    if packed is not None:
                        left.remove(part)
                        yield packed
        finally:
            disk.remove(mark)
        with TemporaryDirectory(prefix="treefold-") as scratch:
            yield from LocalEngine(Gatherer(Path(scratch))).trees(replace(job, ordered=left), disk)

    def _judged(
        self, judge: "Judge", parts: Sequence[Part], ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """Bring the rows of these containers together, group by group, and judge each
        group in a task.
        """
        _, starts = np.unique(np.cumsum(rows) // GROUP_ROWS, return_index=True)
        groups = _Groups(ids, rows, starts)
        arrived = self._each(len(parts), partial(_travelling, list(parts), groups), _TRAVELLING)
        arrived = arrived.repartitionById(len(starts), "gathered_in")
        missing = set(range(len(starts)))
        for made in self._made(
            arrived.mapInArrow(partial(_judge, judge, groups), "made binary"), "gathering"
        ):
            assert isinstance(made, tuple)
            group, judged = made
            missing.discard(group)
            yield from judged
        # Spark starts no tasks where there are no rows at all.
        for group in sorted(missing):
            yield from groups.judged(group, judge, ())

    def _by_sql(self, parts: Sequence[Part]) -> FoldedWave | None:
        """All these parts in Spark SQL; nothing where another way is better, or Spark
        cannot read them so.
        """
        # Files of exports lie in order, and no other reader would verify them.
        assert all(part.manifest is None for part in parts)
        if self._scattered is Scattered.EXACT:
            return None
        files = _whole_files(parts)
        if files is None:
            return None
        with suppress(PySparkException, Py4JError):
            return watched(
                self._session,
                "reading in no order",
                partial(self._aggregated, files, parts),
                _ignore,
            )
        return None

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
            # Spark has names of its own for files that it passes over.
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

    def _each(
        self,
        count: int,
        work: "Callable[[int], Iterable[pa.RecordBatch]]",
        schema: pa.Schema = _MADE,
    ) -> DataFrame:
        """What `work` makes of each number below `count`, a task each."""
        numbers = self._session.range(0, count, 1, count)
        return numbers.mapInArrow(partial(_of_numbers, work), from_arrow_schema(schema))

    def _made(
        self, frame: DataFrame, what: str, tell: Callable[[int, int], None] = _ignore
    ) -> Iterator[object]:
        """What tasks made, as they left it."""
        try:
            made = watched(self._session, what, frame.toArrow, tell)["made"]
        except (PySparkException, Py4JError) as error:
            raise SparkFailedError(f"{what} failed on Spark: {_cause(str(error))}") from error
        for one in made:
            # Made by our own tasks, and brought by Spark, which brings the tasks the
            # same way.
            yield pickle.loads(one.as_buffer())


Judge: TypeAlias = Callable[
    [LocalEngine, Sequence[Part], Int64s, Int64s], Iterator[ContainerResults]
]


@dataclass(frozen=True, slots=True)
class _Groups:
    """Containers, ascending, with about how many rows each has; those of group i begin
    at `starts[i]`.
    """

    container_ids: Int64s
    rows: Int64s
    starts: Int64s

    def of(self, batch: pa.RecordBatch) -> "NDArray[np.int32]":
        """The group of each row."""
        firsts = self.container_ids[self.starts]
        places = np.searchsorted(firsts, batch["container_id"].to_numpy(), "right") - 1
        groups: NDArray[np.int32] = places.astype(np.int32)
        return groups

    def judged(
        self, group: int, judge: Judge, batches: Iterable[pa.RecordBatch]
    ) -> list[ContainerResults]:
        """Judge the containers of a group; these are all of their rows, which wait on
        disk.
        """
        chosen = slice(
            self.starts[group], self.starts[group + 1] if group + 1 < len(self.starts) else None
        )
        ids, rows = self.container_ids[chosen], self.rows[chosen]
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


class _Told:
    """Says how many rows are done, of what Spark says of tasks."""

    def __init__(self, total: int, tell: Callable[[int], None]) -> None:
        self._total = total
        self._tell = tell
        self._said = 0

    def share(self, done: int, total: int) -> None:
        """Report rows up to this share of tasks."""
        now = self._total * done // total
        if now > self._said:
            self._tell(now - self._said)
            self._said = now

    def rest(self) -> None:
        """Report the rows that are left."""
        self.share(1, 1)


def last_offset(files: Iterable[pq.FileMetaData]) -> int | None:
    """Where the last chunk of all begins, if the footers say it."""
    last = 0
    for metadata in files:
        at = (
            metadata.schema.names.index("chunk_offset")
            if "chunk_offset" in metadata.schema.names
            else -1
        )
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(at).statistics if at >= 0 else None
            if statistics is None or not (
                statistics.has_min_max and isinstance(statistics.max, int)
            ):
                return None
            last = max(last, statistics.max)
    return last


def _whole_files(parts: Sequence[Part]) -> dict[str, pq.FileMetaData] | None:
    """The files of these parts, if they are whole files that Spark can read as well."""
    rows = Counter[str]()
    for part in parts:
        rows[part.location] += part.rows
    # What is at another address pyarrow's filesystems know, and Spark perhaps not.
    if any("://" in location for location in rows):
        return None
    files = {location: pq.read_metadata(location) for location in rows}
    are_whole = all(files[location].num_rows == count for location, count in rows.items())
    return (
        files
        if are_whole and all(is_plain(one.schema.to_arrow_schema()) for one in files.values())
        else None
    )


def _of_numbers(
    work: Callable[[int], Iterable[pa.RecordBatch]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from work(number)


def _fold(parts: Sequence[Part], number: int) -> Iterator[pa.RecordBatch]:
    waves = list[FoldedWave]()
    with TemporaryDirectory(prefix="treefold-") as scratch:
        LocalEngine(Gatherer(Path(scratch), threads=1)).fold([parts[number]], waves.append, _ignore)
    yield from map(_packed, waves)


def _pack(job: TreeJob, parts: Sequence[Part], mark: Path, number: int) -> Iterator[pa.RecordBatch]:
    part, packed = parts[number], None
    if mark.exists():
        with TemporaryDirectory(prefix="treefold-") as scratch:
            packed = pack_part(job, part, Gatherer(Path(scratch), threads=1), Disk())
    yield _packed((part, packed))


def _travelling(parts: Sequence[Part], groups: _Groups, number: int) -> Iterator[pa.RecordBatch]:
    for batch in read_rows(parts[number], groups.container_ids):
        columns = [
            column.cast(field.type)
            for column, field in zip(batch.columns, _TRAVELLING, strict=False)
        ]
        yield pa.RecordBatch.from_arrays([*columns, pa.array(groups.of(batch))], schema=_TRAVELLING)


def _judge(
    judge: Judge, groups: _Groups, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    group = context.partitionId()
    yield _packed((group, groups.judged(group, judge, batches)))


def _exact(
    engine: LocalEngine, parts: Sequence[Part], ids: Int64s, rows: Int64s
) -> Iterator[ContainerResults]:
    return engine.exact(parts, ids, rows)


def _inspect(
    replicas: pa.Table, engine: LocalEngine, parts: Sequence[Part], ids: Int64s, rows: Int64s
) -> Iterator[ContainerResults]:
    theirs = replicas.filter(pa.array(np.isin(replicas["container_id"].to_numpy(), ids)))
    return engine.inspect(parts, ids, rows, theirs)


def _packed(made: object) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([pickle.dumps(made)], pa.binary())], schema=_MADE)


def _conformed(frame: DataFrame) -> DataFrame:
    """A table of others with the columns of CHUNK_SCHEMA; what does not fit is null,
    which is seen later.
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


def _cut(parts: Sequence[Part], rows_max: int) -> Iterator[list[Part]]:
    waves, rows = list[Part](), 0
    for part in parts:
        waves.append(part)
        rows += part.rows
        if rows >= rows_max:
            yield waves
            waves, rows = [], 0
    if waves:
        yield waves


def _gatherings(container_ids: Int64s, rows: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """So many containers at a time."""
    place = np.maximum(
        np.cumsum(rows) // _GATHERED_ROWS, np.arange(len(rows)) // _GATHERED_CONTAINERS
    )
    cuts = np.flatnonzero(place[1:] != place[:-1]) + 1
    yield from zip(np.split(container_ids, cuts), np.split(rows, cuts), strict=True)


def _joined(waves: Sequence[FoldedWave]) -> FoldedWave:
    return FoldedWave(
        tuple(part_id for wave in waves for part_id in wave.part_ids),
        sum(wave.rows for wave in waves),
        pa.concat_tables([wave.runs for wave in waves]),
        pa.concat_tables([wave.replicas for wave in waves]),
        pa.concat_tables([wave.findings for wave in waves]),
        np.concatenate([wave.exact for wave in waves]),
        np.concatenate([wave.exact_rows for wave in waves]),
        {part_id: reason for wave in waves for part_id, reason in wave.skipped.items()},
    )


def _cause(text: str) -> str:
    return next((match[1].strip() for cause in _CAUSES if (match := cause.search(text))), "")
