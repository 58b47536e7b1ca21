"""Fold rows in no order by Spark SQL (spark.sql), and write what comes of it to files.

Spark reads the files itself, and tasks write replicas, so that neither rows nor
replicas pass through the driver.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from runtime.disk import Disk
from spark.commits import COMMIT_SCHEMA, Commit, SharedFolders, by_table, commits_of
from spark.sql import aggregate, names_of, partitions, settled, unnamed_containers
from sweep.engine import FoldedWave
from sweep.exact import NULLABLE_ROWS
from sweep.files import DEFAULTS, is_plain, unreadable_finding
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, REQUEST_SCHEMA, Part
from sweep.pieces import TableFileWriter
from sweep.runs import RUN_SCHEMA

# What a commit counts: all rows of the chunk table, those that belong to no replica,
# and replicas of which only other rows know the container.
_READ, _LOST, _UNNAMED = range(3)


def fold_in_sql(
    session: SparkSession,
    files: Mapping[str, pq.FileMetaData],
    parts: Sequence[Part],
    shared: SharedFolders,
    *,
    chunks_min: int,
    cores: int,
) -> FoldedWave | None:
    """Fold all these parts, which are whole files (`whole_files`). None if blocks have
    fewer than `chunks_min` chunks on average, or Spark does not read all rows. `cores`
    tasks run at once.

    Raises:
        PySparkException, Py4JError: a job failed.
    """
    rows, count = _rows(session, files), sum(part.rows for part in parts)
    with names_of(rows) as names:
        if chunks_min * names.blocks > count:
            return None
        sums = aggregate(rows, names, last_offset=last_offset(files.values()))
        with partitions(session, names.blocks, cores=cores):
            commits = _run(sums, partial(_store_sums, shared))
        counts = Counter[int]()
        for commit in commits:
            counts[commit.number] += commit.count
        if counts[_READ] != count:
            # Spark ignores files with certain names, so rows are missing.
            return None
        if counts[_UNNAMED]:
            owners = unnamed_containers(rows, names)
            commits += _run(owners, partial(_store_requests, shared))
    text = f"{counts[_LOST]} rows name no datanode or no container"
    return FoldedWave(
        tuple(part.part_id for part in parts),
        count,
        RUN_SCHEMA.empty_table(),
        REPLICA_SCHEMA.empty_table(),
        unreadable_finding(text) if counts[_LOST] else FINDING_SCHEMA.empty_table(),
        REQUEST_SCHEMA.empty_table(),
        by_table(commits),
    )


def _run(
    frame: DataFrame, work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
) -> list[Commit]:
    """The commits of `work` for each partition of a frame."""
    return list(commits_of(frame.mapInArrow(work, from_arrow_schema(COMMIT_SCHEMA)).toArrow()))


def _store_sums(
    shared: SharedFolders, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write the replicas and requests in some sums of spark.sql."""
    shared.check()
    held = list(batches)
    if not held:
        return
    found, writer = settled(pa.Table.from_batches(held)), TableFileWriter(shared.places, Disk())
    # By container: the stages that follow read the files range by range.
    writer.add({"replicas": found.replicas.sort_by("container_id")})
    writer.add({"requested": found.requested})
    yield Commit(_READ, found.rows, files=writer.close()).batch()
    yield Commit(_LOST, found.lost).batch()
    yield Commit(_UNNAMED, found.unnamed).batch()


def _store_requests(
    shared: SharedFolders, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    shared.check()
    writer = TableFileWriter(shared.places, Disk())
    for batch in batches:
        writer.add({"requested": pa.Table.from_batches([batch]).cast(REQUEST_SCHEMA)})
    yield Commit(_UNNAMED, files=writer.close()).batch()


def _rows(session: SparkSession, files: Mapping[str, pq.FileMetaData]) -> DataFrame:
    by_columns = dict[tuple[str, ...], list[str]]()
    for location, metadata in files.items():
        by_columns.setdefault(tuple(metadata.schema.names), []).append(location)
    frames = [_conformed(session.read.parquet(*locations)) for locations in by_columns.values()]
    return reduce(DataFrame.unionAll, frames)


def _conformed(frame: DataFrame) -> DataFrame:
    """Another writer's table with the columns of CHUNK_SCHEMA. A value that does not
    fit becomes null; `aggregate` sends its container to the exact path.
    """
    # As text, which both kinds of sessions take.
    values = {name: f"`{name}`" for name in frame.columns}
    values = {name: _literal(value) for name, value in DEFAULTS.items()} | values
    fields = from_arrow_schema(NULLABLE_ROWS).fields
    return frame.selectExpr(
        *(f"try_cast({values[f.name]} AS {f.dataType.simpleString()}) AS {f.name}" for f in fields)
    )


def _literal(value: object) -> str:
    return "NULL" if value is None else repr(value)


def whole_files(parts: Sequence[Part]) -> dict[str, pq.FileMetaData] | None:
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
