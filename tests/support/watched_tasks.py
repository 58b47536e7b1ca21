"""Two tasks of Spark, one of which waits until a report has told of the other."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from spark.jobs import watched
from tests.support.waiting import wait_until


def reports_of_two_tasks(session: SparkSession, stop: Path) -> list[tuple[int, int]]:
    """What `watched` reports while they run. `stop` is a file that is not there yet."""
    told = list[tuple[int, int]]()

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.column(0)[0].as_py() == 1:
                wait_until(stop.exists, "the other task is told of")
            yield batch

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        if done == 1:
            stop.touch()

    waiting = session.range(0, 2, 1, 2).mapInArrow(wait, "id long")
    assert len(watched(session, "waiting", waiting.collect, tell)) == 2
    return told
