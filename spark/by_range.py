"""A stage of a sweep on a Spark cluster (sweep.stages), as one job:

    read the stored tables  ->  exchange by range of containers  ->  run the stage

Rows travel in typed columns, many in one (spark.columnar). Ranges have about equal
numbers of rows, because the driver cuts them by samples of the stored tables. So no
partition is larger than others, and none has to be sorted by Spark.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chunktable.files import AnyPath
from runtime.disk import Disk
from spark.columnar import COUNT, packed, packed_fields, unpacked
from spark.commits import COMMIT_SCHEMA, Commit, SharedFolders
from sweep.fragments import Int64s
from sweep.pieces import Range, StoredFile, StoredTable, TableFileWriter
from sweep.stages import ContainerStage
from sweep.totals import SweepTotals

# Ranges of one job at least, and jobs at most.
_RANGES_MIN, _WAVES_MAX = 64, 4
# Rows that are packed together: each range has its share of them.
_BATCH_ROWS = 1 << 16
# Reading needs no more of a file than its path.
_UNKNOWN = StoredFile("", 0)
_INPUT, _RANGE_NUMBER = "stage_input", "range_number"


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
        """The columns of all inputs as they travel (spark.columnar), and those that say
        which range and input the rows belong to.
        """
        fields = dict[str, pa.Field]()
        for schema in self.schemas.values():
            for one in packed_fields(schema):
                assert fields.setdefault(one.name, one).type == one.type
        return pa.schema(
            [
                pa.field(_RANGE_NUMBER, pa.int32(), nullable=False),
                pa.field(_INPUT, pa.int32(), nullable=False),
                COUNT,
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
        span = _span(self.wanted)
        for name, of_table in groupby(files, itemgetter(0)):
            table = StoredTable([], self.schemas[name], {path: _UNKNOWN for _, path in of_table})
            held, count = list[pa.Table](), 0
            # Of several files together: each may have a few rows of every range.
            for rows in chain.from_iterable(table.pieces(path, span) for path in table.paths):
                held.append(rows)
                count += rows.num_rows
                if count >= _BATCH_ROWS:
                    yield from self._packed(name, pa.concat_tables(held))
                    held, count = [], 0
            if count:
                yield from self._packed(name, pa.concat_tables(held))

    def _packed(self, name: str, rows: pa.Table) -> Iterator[pa.RecordBatch]:
        ranges = self._range_of(rows["container_id"])
        if (ranges < 0).any():
            rows, ranges = rows.filter(pa.array(ranges >= 0)), ranges[ranges >= 0]
        if not rows.num_rows:
            return
        schema, number = self.row_schema, list(self.schemas).index(name)
        ranges, given = packed(rows, ranges)
        given[_RANGE_NUMBER] = pa.array(ranges, pa.int32())
        given[_INPUT] = pa.repeat(pa.scalar(number, pa.int32()), len(ranges))
        columns = [given.get(one.name, pa.nulls(len(ranges), one.type)) for one in schema]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the stage on all rows of one range, and write its results to files.

        Raises:
            FolderNotSharedError: this machine does not see the folders.
            DiskError: a file cannot be written.
        """
        context = TaskContext.get()
        assert context is not None
        self.shared.check()
        number, held = context.partitionId(), dict[str, list[pa.RecordBatch]]()
        for batch in batches:
            assert (batch[_RANGE_NUMBER].to_numpy() == number).all()
            for tag, name in enumerate(self.schemas):
                ours = batch.filter(pc.equal(batch[_INPUT], tag))
                if ours.num_rows:
                    names = [one.name for one in packed_fields(self.schemas[name])]
                    held.setdefault(name, []).append(ours.select([COUNT.name, *names]))
        if not held:
            return
        schemas = {**self.absent, **self.schemas}
        tables = {name: schema.empty_table() for name, schema in schemas.items()}
        for name in list(held):
            tables[name] = unpacked(held.pop(name), schemas[name])
        found = self.stage(tables)
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


def range_waves(wanted: Sequence[Range]) -> Iterator[Sequence[Range]]:
    """The ranges of each job, which is the most that a crash loses. Their number is
    bounded: a file may have containers of all ranges, and then each job reads it.
    """
    size = max(_RANGES_MIN, -(-len(wanted) // _WAVES_MAX))
    for first in range(0, len(wanted), size):
        yield wanted[first : first + size]


def file_groups(
    inputs: Mapping[str, StoredTable], wanted: Sequence[Range], rows_max: int
) -> list[list[tuple[str, AnyPath]]]:
    """The files of some tables that may have rows in these ranges, which ascend, in
    groups of about `rows_max` rows, one for a task.
    """
    span = _span(wanted)
    groups, rows = list[list[tuple[str, AnyPath]]](), rows_max
    for name, table in inputs.items():
        for path, held in table.sizes(span):
            if rows + held > rows_max or not groups:
                groups.append([])
                rows = 0
            groups[-1].append((name, path))
            rows += held
    return groups


def _span(wanted: Sequence[Range]) -> Range:
    """From the first to the last of these ranges, which ascend."""
    return Range(wanted[0].first, wanted[-1].last)
