"""A stage of a sweep on a Spark cluster (sweep.stages), as one job:

    read the stored tables  ->  exchange by range of containers  ->  run the stage

Rows travel in typed columns, one for each column of any input; the many numbers of a
run share one. Ranges have about equal
numbers of rows, because the driver cuts them by samples of the stored tables. So no
partition is larger than others, and none has to be sorted by Spark.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chunktable.files import AnyPath
from runtime.disk import Disk
from spark.commits import COMMIT_SCHEMA, Commit, SharedFolders
from sweep.fragments import NUMBERS, Int64s
from sweep.output import SweepTotals
from sweep.pieces import Range, StoredFile, StoredTable, TableFileWriter
from sweep.runs import number_columns
from sweep.stages import ContainerStage

# Rows of one batch between Spark and Python.
_BATCH_ROWS = 1 << 16
# Reading needs no more of a file than its path.
_UNKNOWN = StoredFile("", 0)
_INPUT, _RANGE_NUMBER = "stage_input", "range_number"
_NUMBERS = pa.field("run_numbers", pa.list_(pa.int64()))


@dataclass(frozen=True, slots=True)
class RangeJob:
    """A stage and the ranges to run it for, ascending. `schemas` are those of the
    inputs by name, `absent` those of inputs without files.
    """

    stage: ContainerStage
    schemas: Mapping[str, pa.Schema]
    wanted: Sequence[Range]
    shared: SharedFolders
    absent: Mapping[str, pa.Schema] = field(default_factory=dict)

    @property
    def row_schema(self) -> pa.Schema:
        """The columns of all inputs, and those that say which range and input a row
        belongs to.
        """
        fields = dict[str, pa.Field]()
        for schema in self.schemas.values():
            for one in _travelling(schema):
                assert fields.setdefault(one.name, one).type == one.type
        return pa.schema(
            [
                pa.field(_RANGE_NUMBER, pa.int32(), nullable=False),
                pa.field(_INPUT, pa.int32(), nullable=False),
                *fields.values(),
            ]
        )

    def frame(
        self, session: SparkSession, groups: Sequence[Sequence[tuple[str, AnyPath]]]
    ) -> DataFrame:
        """The job, as a frame of COMMIT_SCHEMA; `groups` are the files of the inputs,
        for one task each.
        """
        by_range = self.read_frame(session, groups).repartitionById(len(self.wanted), _RANGE_NUMBER)
        return by_range.mapInArrow(self.run, from_arrow_schema(COMMIT_SCHEMA))

    def read_frame(
        self, session: SparkSession, groups: Sequence[Sequence[tuple[str, AnyPath]]]
    ) -> DataFrame:
        """The rows of the inputs in the wanted ranges, as a frame of `row_schema`."""
        return run_tasks(session, len(groups), partial(_read, self, groups), self.row_schema)

    def read(self, files: Sequence[tuple[str, AnyPath]]) -> Iterator[pa.RecordBatch]:
        """The rows of these files, each given with the name of its input, that are in a
        wanted range.

        Raises:
            SweepWorkError: a file cannot be read.
        """
        span = Range(self.wanted[0].first, self.wanted[-1].last)
        schema, numbers = self.row_schema, {name: i for i, name in enumerate(self.schemas)}
        for name, path in files:
            for rows in StoredTable([], self.schemas[name], {path: _UNKNOWN}).pieces(path, span):
                ranges = self._range_of(rows["container_id"])
                if (ranges < 0).any():
                    rows, ranges = rows.filter(pa.array(ranges >= 0)), ranges[ranges >= 0]
                given = {
                    **_packed(rows),
                    _RANGE_NUMBER: pa.array(ranges, pa.int32()),
                    _INPUT: pa.repeat(pa.scalar(numbers[name], pa.int32()), rows.num_rows),
                }
                columns = [
                    given[one.name].cast(one.type)
                    if one.name in given
                    else pa.nulls(rows.num_rows, one.type)
                    for one in schema
                ]
                yield from pa.table(columns, schema=schema).to_batches(_BATCH_ROWS)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage on all rows of one range, and write its results to files.

        Raises:
            FolderNotSharedError: this machine does not see the folders.
            DiskError: a file cannot be written.
        """
        context = TaskContext.get()
        assert context is not None
        self.shared.check()
        number, tables = context.partitionId(), dict[str, list[pa.Table]]()
        for batch in batches:
            assert (batch[_RANGE_NUMBER].to_numpy() == number).all()
            tags = batch[_INPUT].to_numpy()
            for tag in np.unique(tags).tolist():
                name = list(self.schemas)[tag]
                ours = tags == tag
                # Only the columns of its input are kept: the others are null.
                held = batch.select([one.name for one in _travelling(self.schemas[name])])
                held = held if ours.all() else held.filter(pa.array(ours))
                tables.setdefault(name, []).append(_unpacked(held, self.schemas[name]))
        if not tables:
            return
        schemas = {**self.absent, **self.schemas}
        held_of = {name: pa.concat_tables(tables[name]) for name in tables}
        empty = {name: schemas[name].empty_table() for name in schemas if name not in tables}
        found = self.stage({**held_of, **empty})
        writer = TableFileWriter(self.shared.places, Disk())
        writer.add(found)
        yield Commit(number, totals=SweepTotals.of(found), files=writer.close()).batch()

    def _range_of(self, container_ids: pa.ChunkedArray) -> Int64s:
        """The index of each row's range, -1 outside of all. Rows without a container
        belong to the range without a first one.
        """
        least = -(1 << 63)
        ids = pc.fill_null(container_ids, least).to_numpy()
        firsts = np.array([least if one.first is None else one.first for one in self.wanted])
        lasts = np.array([one.last for one in self.wanted])
        ranges = np.searchsorted(firsts, ids, "right") - 1
        numbers: Int64s = np.where((ranges >= 0) & (ids <= lasts[ranges]), ranges, -1)
        return numbers


def run_tasks(
    session: SparkSession,
    count: int,
    work: Callable[[int], Iterable[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    """The rows that `work` returns for each number below `count`, in one task each."""
    numbers = session.range(0, count, 1, count)
    return numbers.mapInArrow(partial(_for_numbers, work), from_arrow_schema(schema))


def _for_numbers(
    work: Callable[[int], Iterable[pa.RecordBatch]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from work(number)


def run_texts(
    session: SparkSession,
    texts: Sequence[str],
    work: Callable[[str], Iterable[pa.RecordBatch]],
    schema: pa.Schema,
) -> DataFrame:
    """The rows that `work` returns for each of these texts, in one task each. A task
    gets its own text alone, where all that `run_tasks` closes over goes to each task.
    """
    rows = pa.table({"number": pa.array(range(len(texts)), pa.int32()), "text": list(texts)})
    by_number = session.createDataFrame(rows).repartitionById(len(texts), "number")
    return by_number.mapInArrow(partial(_for_texts, work), from_arrow_schema(schema))


def _for_texts(
    work: Callable[[str], Iterable[pa.RecordBatch]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for text in batch.column(1).to_pylist():
            yield from work(text)


def _read(
    job: RangeJob, groups: Sequence[Sequence[tuple[str, AnyPath]]], number: int
) -> Iterator[pa.RecordBatch]:
    return job.read(groups[number])


def file_groups(
    inputs: Mapping[str, StoredTable], rows_max: int
) -> list[list[tuple[str, AnyPath]]]:
    """The files of some tables, in groups of about `rows_max` rows, one for a task."""
    groups, rows = list[list[tuple[str, AnyPath]]](), rows_max
    for name, table in inputs.items():
        for path, held in table.sizes():
            if rows + held > rows_max or not groups:
                groups.append([])
                rows = 0
            groups[-1].append((name, path))
            rows += held
    return groups


def _travelling(schema: pa.Schema) -> list[pa.Field]:
    """The columns of a table as they travel. Times are integers: one that nobody
    checked may overflow Spark's microseconds.
    """
    kept = [one for one in schema if not _is_number(one.name, schema)]
    fields = [one.with_type(pa.int64()) if pa.types.is_timestamp(one.type) else one for one in kept]
    fields = [one.with_nullable(True).remove_metadata() for one in fields]
    return fields if len(kept) == len(schema) else [*fields, _NUMBERS]


def _is_number(name: str, schema: pa.Schema) -> bool:
    return name in NUMBERS and set(NUMBERS) <= set(schema.names)


def _packed(rows: pa.Table) -> dict[str, pa.ChunkedArray | pa.Array]:
    """The columns of rows as they travel, by name."""
    columns = {n: rows[n] for n in rows.column_names if not _is_number(n, rows.schema)}
    if len(columns) < rows.num_columns:
        numbers = np.array([rows[name].to_numpy() for name in NUMBERS])
        offsets = np.arange(rows.num_rows + 1, dtype=np.int32) * len(NUMBERS)
        columns[_NUMBERS.name] = pa.ListArray.from_arrays(offsets, numbers.T.reshape(-1))
    return columns


def _unpacked(rows: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    """The rows of a table that travelled."""
    columns = {one.name: rows[one.name] for one in _travelling(schema)}
    if packed := columns.pop(_NUMBERS.name, None):
        numbers = packed.flatten().to_numpy().reshape(-1, len(NUMBERS)).T
        columns |= number_columns(numbers)
    return pa.table([columns[n].cast(schema.field(n).type) for n in schema.names], schema)
