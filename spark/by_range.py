"""A stage of a sweep on a Spark cluster (sweep.stages), as one job:

    read the stored tables  ->  exchange by range of containers  ->  run the stage

Rows travel in typed columns, one for each column of any input. Ranges have about equal
numbers of rows, because the driver cuts them by samples of the stored tables. So no
partition is larger than others, and none has to be sorted by Spark.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from sweep.gather import Int64s
from sweep.output import SweepTotals
from sweep.pieces import Range, StoredFile, StoredTable, TableFileWriter
from sweep.stages import ContainerStage

# Rows of one batch between Spark and Python.
_BATCH_ROWS = 1 << 16
# Reading needs no more of a file than its path.
_UNKNOWN = StoredFile("", 0)
_INPUT, _RANGE_NUMBER = "stage_input", "range_number"


@dataclass(frozen=True, slots=True)
class RangeJob:
    """A stage and the ranges to run it for, ascending. `schemas` are those of the
    inputs by name.
    """

    stage: ContainerStage
    schemas: Mapping[str, pa.Schema]
    wanted: Sequence[Range]
    shared: SharedFolders

    @property
    def row_schema(self) -> pa.Schema:
        """The columns of all inputs, and those that say which range and input a row
        belongs to.
        """
        fields = dict[str, pa.Field]()
        for schema in self.schemas.values():
            for one in map(_travelling, schema):
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
                rows = rows.append_column(_RANGE_NUMBER, pa.array(ranges, pa.int32()))
                tag = pa.repeat(pa.scalar(numbers[name], pa.int32()), rows.num_rows)
                rows = rows.append_column(_INPUT, tag).filter(pa.array(ranges >= 0))
                columns = [
                    rows[one.name].cast(one.type)
                    if one.name in rows.column_names
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
            rows = pa.Table.from_batches([batch])
            assert pc.all(pc.equal(rows[_RANGE_NUMBER], number)).as_py()
            # Only the columns of its input are kept: the others are null.
            for tag, (name, schema) in enumerate(self.schemas.items()):
                held = rows.select([_INPUT, *schema.names]).filter(pc.equal(rows[_INPUT], tag))
                tables.setdefault(name, []).append(held.select(schema.names).cast(schema))
        if not tables:
            return
        found = self.stage({name: pa.concat_tables(held) for name, held in tables.items()})
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


def _travelling(field: pa.Field) -> pa.Field:
    """A column as it travels. Times are integers: one that nobody checked may overflow
    Spark's microseconds.
    """
    is_time = pa.types.is_timestamp(field.type)
    return pa.field(field.name, pa.int64() if is_time else field.type)
