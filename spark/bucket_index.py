"""The index of a bucket on a Spark cluster (proof.index_build):

    sample the parts of a listing
    read them  ->  exchange by range of keys  ->  write the files of each range
    write the entries by hash of each share
    merge the sums, some ranges a task

Spark converts Arrow to rows and back, one value at a time. So objects of one range
travel as one row: thousands of them, as Arrow stores them. Results are files in a
folder that executors and driver share, and rows of small numbers; of sums, which are
600 kB, the driver gets one for each 64 ranges.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from proof.index_parts import IndexJob, IndexSums, ranged_rows, slices
from proof.listing import LISTED_SCHEMA, SAMPLE_SCHEMA, ListingPart, sample_part
from runtime.disk import Disk
from spark.by_range import run_tasks
from spark.errors import FolderNotSharedError, task_failure
from spark.jobs import SPARK_ERRORS, watched

# Ranges whose sums one task merges.
_MERGED_RANGES = 64
_RANGE_NUMBER = "range_number"
# `objects` is a batch of LISTED_SCHEMA.
_EXCHANGED_SCHEMA = pa.schema(
    [
        pa.field(_RANGE_NUMBER, pa.int32(), nullable=False),
        pa.field("objects", pa.binary(), nullable=False),
    ]
)
# Objects that travel in one row, about a megabyte.
_OBJECTS_MAX = 1 << 13
_DONE_SCHEMA = pa.schema([pa.field("number", pa.int32(), nullable=False)])
_SUMS_SCHEMA = pa.schema([pa.field("sums", pa.binary(), nullable=False)])


class SparkIndexEngine:
    """An engine (proof.index_build.IndexEngine) that uses all cores of a Spark session.
    Every method also raises what a task did, FolderNotSharedError if executors do not
    see the folder of the build, PackagesMissingError if they lack what tasks import,
    and SparkFailedError if a job failed otherwise.
    """

    def __init__(self, session: SparkSession, disk: Disk) -> None:
        self._session, self._disk = session, disk

    def run(self, tasks: Sequence[Callable[[], None]], advance: Callable[[int], None]) -> None:
        """See IndexEngine."""
        frame = run_tasks(self._session, len(tasks), partial(_run, tasks), _DONE_SCHEMA)
        report = Advance(advance, len(tasks))
        rows_of(self._session, frame, "listing a bucket", report)
        report.finish()

    def sample(
        self, parts: Sequence[ListingPart], advance: Callable[[int], None]
    ) -> Iterator[pa.Table]:
        """See IndexEngine."""
        sampled = run_tasks(self._session, len(parts), partial(_sample, parts), SAMPLE_SCHEMA)
        yield rows_of(self._session, sampled, "sampling a listing", Advance(advance, len(parts)))

    def index_ranges(
        self,
        job: IndexJob,
        parts: Sequence[ListingPart],
        wanted: Sequence[int],
        advance: Callable[[int], None],
    ) -> None:
        """See IndexEngine."""
        report = Advance(advance, len(wanted))
        done = self.ranges_frame(job, parts, wanted)
        rows_of(self._session, done, "indexing ranges of keys", report)
        report.finish()
        # Spark starts no task for a partition without rows.
        for number in wanted:
            if not job.is_done(number):
                job.index_range(number, LISTED_SCHEMA.empty_table(), self._disk)

    def ranges_frame(
        self, job: IndexJob, parts: Sequence[ListingPart], wanted: Sequence[int]
    ) -> DataFrame:
        """The job of `index_ranges`, with a row for each range that has objects."""
        read = partial(_read, job, parts, wanted)
        rows = run_tasks(self._session, len(parts), read, _EXCHANGED_SCHEMA)
        return rows.repartitionById(len(wanted), _RANGE_NUMBER).mapInArrow(
            partial(_index_range, job, wanted), from_arrow_schema(_DONE_SCHEMA)
        )

    def index_hashes(self, job: IndexJob, advance: Callable[[int], None]) -> None:
        """See IndexEngine."""
        frame = run_tasks(self._session, job.shares, partial(_index_hashes, job), _DONE_SCHEMA)
        report = Advance(advance, job.shares)
        rows_of(self._session, frame, "indexing hashes", report)
        report.finish()

    def sums(self, job: IndexJob) -> IndexSums:
        """See IndexEngine."""
        tasks = -(-job.ranges // _MERGED_RANGES)
        frame = run_tasks(self._session, tasks, partial(_merge, job), _SUMS_SCHEMA)
        merged = rows_of(self._session, frame, "merging sums", lambda _done, _total: None)
        return IndexSums.of_all(IndexSums.from_bytes(one.as_py()) for one in merged["sums"])


def rows_of(
    session: SparkSession,
    frame: DataFrame,
    description: str,
    report: Callable[[int, int], None],
) -> pa.Table:
    """Run a frame; `report` gets the tasks done and known.

    Raises:
        ReconcileError: a task raised it, after all attempts.
        SparkFailedError, PackagesMissingError: the job failed otherwise.
    """
    try:
        return watched(session, description, frame.toArrow, report)
    except SPARK_ERRORS as error:
        raise task_failure(description, str(error)) from error


class Advance:
    """Counts units of a stage by Spark's counts of tasks, of which other stages are a
    part.
    """

    def __init__(self, advance: Callable[[int], None], units: int) -> None:
        self._advance, self._units, self._seen = advance, units, 0

    def __call__(self, done: int, total: int) -> None:
        now = self._units * done // max(total, 1)
        if now > self._seen:
            self._advance(now - self._seen)
            self._seen = now

    def finish(self) -> None:
        """All units are done."""
        self(1, 1)


def _run(tasks: Sequence[Callable[[], None]], number: int) -> Iterator[pa.RecordBatch]:
    tasks[number]()
    yield _done(number)


def _sample(parts: Sequence[ListingPart], number: int) -> Iterator[pa.RecordBatch]:
    yield from sample_part(number, parts[number], parts=len(parts)).to_batches()


def _read(
    job: IndexJob, parts: Sequence[ListingPart], wanted: Sequence[int], part: int
) -> Iterator[pa.RecordBatch]:
    """The objects of a part, with the places of their ranges among the wanted ones."""
    place = np.zeros(job.ranges, np.int32)
    place[list(wanted)] = np.arange(len(wanted))
    for objects, numbers in ranged_rows(parts[part], job.bounds, frozenset(wanted)):
        for number, one in enumerate(slices(objects, place[numbers], len(wanted))):
            for first in range(0, one.num_rows, _OBJECTS_MAX):
                yield _packed(number, one.slice(first, _OBJECTS_MAX))


def _packed(number: int, objects: pa.RecordBatch) -> pa.RecordBatch:
    """A row of _EXCHANGED_SCHEMA. It is alone in its batch: so it is not copied."""
    data = objects.serialize()
    buffers = [None, pa.py_buffer(np.array([0, data.size], np.int32)), data]
    columns = [pa.array([number], pa.int32()), pa.Array.from_buffers(pa.binary(), 1, buffers)]
    return pa.RecordBatch.from_arrays(columns, schema=_EXCHANGED_SCHEMA)


def _index_range(
    job: IndexJob, wanted: Sequence[int], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    assert context is not None
    _check_shared(job)
    held = [
        pa.ipc.read_record_batch(one.as_buffer(), LISTED_SCHEMA)
        for batch in batches
        for one in batch["objects"]
    ]
    if held:
        number = wanted[context.partitionId()]
        job.index_range(number, pa.Table.from_batches(held, LISTED_SCHEMA), Disk())
        yield _done(number)


def _index_hashes(job: IndexJob, number: int) -> Iterator[pa.RecordBatch]:
    _check_shared(job)
    job.index_hashes(number, Disk())
    yield _done(number)


def _merge(job: IndexJob, task: int) -> Iterator[pa.RecordBatch]:
    _check_shared(job)
    first = task * _MERGED_RANGES
    merged = job.sums(range(first, min(first + _MERGED_RANGES, job.ranges)), Disk())
    yield pa.RecordBatch.from_pylist([{"sums": merged.to_bytes()}], _SUMS_SCHEMA)


def _check_shared(job: IndexJob) -> None:
    if not job.is_seen:
        raise FolderNotSharedError(f"executors do not see {job.folder}")


def _done(number: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"number": number}], _DONE_SCHEMA)
