"""The ranges of a bucket's verification as tasks of a Spark cluster
(replicator.verified_ranges).

The ranges are a DataFrame with a row each, in a partition of its own. Keys do not pass
through Spark: what differs is in files of tasks, and rows of counts come back.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from spark.bucket_index import Advance, rows_of
from spark.errors import FolderNotSharedError
from spark.jobs import cores

Work = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class SparkRangeEngine:
    """An engine (replicator.verified_ranges.RangeEngine) that uses all cores of a Spark
    session.
    """

    def __init__(self, session: SparkSession) -> None:
        self._session = session

    def tasks_at_once(self) -> int:
        """See RangeEngine."""
        return cores(self._session)

    def rows(
        self,
        ranges: pa.Table,
        work: Work,
        schema: pa.Schema,
        marker: Path,
        advance: Callable[[int], None],
    ) -> pa.Table:
        """See RangeEngine; FolderNotSharedError if a task does not see the marker,
        PackagesMissingError if executors lack what it imports.
        """
        report = Advance(advance, ranges.num_rows)
        frame = self.frame(ranges, work, schema, marker)
        found = rows_of(self._session, frame, "verifying a bucket", report)
        report.finish()
        return found

    def frame(self, ranges: pa.Table, work: Work, schema: pa.Schema, marker: Path) -> DataFrame:
        """The job."""
        number = ranges.schema.names[0]
        each = self._session.createDataFrame(ranges).repartitionById(ranges.num_rows, number)
        return each.mapInArrow(partial(_run, marker, work), from_arrow_schema(schema))


def _run(marker: Path, work: Work, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    if not marker.is_file():
        raise FolderNotSharedError(f"executors do not see {marker.parent}")
    yield from work(batches)
