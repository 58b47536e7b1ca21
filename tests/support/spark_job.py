"""A job whose classes are Spark's that tests use: Parquet, SQL, Arrow, sorts."""

import tempfile
from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.sql import SparkSession


def same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches as they come."""
    yield from batches


def run(folder: str) -> None:
    """Write a table, read it, and group, sort and join it."""
    settings: dict[str, bool | float | int | str | None] = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
    }
    session = SparkSession.builder.config(map=settings).getOrCreate()
    rows = session.range(1_000, numPartitions=2).selectExpr("id", "id % 7 AS part", "'a' AS name")
    rows.write.parquet(f"{folder}/rows")
    read = session.read.parquet(f"{folder}/rows")
    mapped = read.mapInArrow(same, read.schema)
    grouped = mapped.groupBy("part").applyInArrow(lambda table: table, read.schema)
    sums = grouped.groupBy("part").agg({"id": "sum", "name": "max"})
    joined = read.join(sums, "part").repartition(2, "part").sortWithinPartitions("part", "id")
    joined.mapInArrow(same, joined.schema).write.partitionBy("part").parquet(f"{folder}/joined")
    assert session.read.parquet(f"{folder}/joined").count() == 1_000
    session.sparkContext.parallelize([1, 2], 2).map(str).collect()
    session.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        run(place)
