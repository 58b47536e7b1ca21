"""Replicas from rows in no order at all, in Spark SQL alone: no row of a chunk is shuffled or handed to Python.

A block's checksum is an XOR over its chunks once each chunk's rank is known (spark.gf2). A full chunk tells its rank
itself: it is offset / length. Only the last chunk may be shorter, and as it has the greatest offset, what it wrongly
told is taken out again behind the aggregate. That all this is true of a block is proved by the same aggregate:

- the n - 1 other chunks are as long as the longest, for together they are n - 1 times as long;
- their ranks are 0 to n - 2, for the XOR of one bit a rank has n - 1 bits, and n - 1 chunks cannot make them twice;
- the last begins where they end.

A block of which it is not proved, of more than RANKS chunks, with checksums of more than 32 bits, with rows that
contradict each other or lack a value, sends its container to the exact path.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from protos.chunk_table import BLOCK_ROW, CONTAINER_ROW
from spark.gf2 import end_tables, rank_tables, step_tables, word_tables
from spark.model import REPLICA_SCHEMA, Path

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Chunks a block, at most: Ozone's own limits make it 64 of 4 MiB. Four words hold one bit each.
RANKS = 256
_WORDS = RANKS // 64


@dataclass(frozen=True, slots=True)
class Aggregated:
    """What the rows of whole containers come to."""

    # REPLICA_SCHEMA.
    replicas: pa.Table
    # Containers, ascending, of which no replica is in `replicas`: their rows have to be sorted.
    exact: "NDArray[np.int64]"
    # Rows that lack datanode, volume or container ID, and so belong to no replica.
    lost_rows: int
    rows: int


def aggregate(rows: DataFrame) -> Aggregated:
    """The replicas of all containers in `rows`, which has the columns of the chunk table and may have others."""
    return _settled(replicas(rows).toArrow())


def replicas(rows: DataFrame) -> DataFrame:
    """One row a replica (a row for each variant, where rows of a replica contradict each other).

    Beside the columns of REPLICA_SCHEMA there is `regular`, false where the root is not to be trusted, and `rows`.
    """
    session = rows.sparkSession
    chunks = session.sql(_BLOCKS, rows=rows, ranks=_table(session, _with_nothing(rank_tables(RANKS))))
    ends, constants = end_tables(RANKS)
    blocks = session.sql(
        _CHECKSUMS,
        blocks=chunks,
        ranks=_table(session, _with_nothing(rank_tables(RANKS))),
        words=_table(session, word_tables()),
        ends=_table(session, ends),
        constants=_table(session, constants),
    )
    return session.sql(_REPLICAS, blocks=blocks)


def _table(session: SparkSession, table: "NDArray[np.uint32]") -> DataFrame:
    """A table as a query of one row: as a literal it would cost the driver half a minute a query."""
    values = pa.array([table.reshape(-1).view(np.int32)], pa.list_(pa.int32()))
    return session.createDataFrame(pa.table({"t": values}))


def _with_nothing(tables: "NDArray[np.uint32]") -> "NDArray[np.uint32]":
    """The map of rank RANKS, which stands for no rank, is to 0."""
    return np.concatenate([tables, np.zeros((1, *tables.shape[1:]), np.uint32)])


def _settled(found: pa.Table) -> Aggregated:
    named = pc.and_(
        pc.and_(pc.is_valid(found["datanode"]), pc.is_valid(found["volume"])), pc.is_valid(found["container_id"])
    )
    lost = found.filter(pc.invert(named))
    found = found.filter(named)
    variants = found.group_by(["container_id", "datanode", "volume"]).aggregate([([], "count_all")])
    exact = np.union1d(
        found["container_id"].filter(pc.invert(found["regular"])).to_numpy(),
        variants["container_id"].filter(pc.greater(variants["count_all"], 1)).to_numpy(),
    ).astype(np.int64)
    settled = found.filter(pc.invert(pc.is_in(found["container_id"], pa.array(exact, pa.int64()))))
    rows = [int(pc.sum(table["rows"]).as_py() or 0) for table in (found, lost)]
    return Aggregated(settled.select(REPLICA_SCHEMA.names).cast(REPLICA_SCHEMA), exact, rows[1], sum(rows))


def _image(table: str, value: str, *, size: int = 4, at: str = "0") -> str:
    """SQL for the image of the `size` lower bytes of a number under the map whose tables begin at `at`."""
    byte = "{at} + {skip} + CAST(shiftrightunsigned({value}, {bits}) & 255 AS INT)"
    return " ^ ".join(f"get({table}, {byte.format(at=at, skip=256 * i, value=value, bits=8 * i)})" for i in range(size))


def _rank(offset: str, length: str) -> str:
    """SQL for the rank that a full chunk tells; RANKS for none."""
    quotient = f"{offset} div greatest({length}, 1L)"
    return (
        f"CAST(IF({offset} >= 0 AND {length} > 0 AND {offset} % greatest({length}, 1L) = 0 AND {quotient} < {RANKS},"
        f" {quotient}, {RANKS}L) AS INT)"
    )


def _bit(rank: str, word: int) -> str:
    """SQL for the word's share of the bit of a rank; 0 for none."""
    return f"IF({rank} >> 6 = {word}, 1L << {rank}, 0L)"


def _ones(count: str, word: int) -> str:
    """SQL for the word's share of the bits of so many ranks from 0 on."""
    return (
        f"CASE WHEN {count} >= {64 * word + 64} THEN -1L WHEN {count} <= {64 * word} THEN 0L"
        f" ELSE ~(-1L << CAST({count} - {64 * word} AS INT)) END"
    )


_REPLICA = "datanode, volume, container_id, state, bcs_id, replica_index, source, generation"
_RANK_TABLE = "(SELECT t FROM {ranks})"

# What of a block's rows no order can change. In a replica's own row, and in that of a block without chunks, the
# checksum is `last_checksum`, as there is no other row.
_BLOCKS = f"""
SELECT {_REPLICA}, block_id,
  count(*) AS rows,
  max(scanned_at) AS scanned_at,
  bool_or(lacks_value) AS lacks_value,
  min(chunk_offset) AS first_offset,
  max(chunk_offset) AS last_offset,
  max_by(length, chunk_offset) AS last_length,
  max_by(checksum, chunk_offset) AS last_checksum,
  max(length) AS length_max,
  try_sum(length) AS bytes,
  bit_or(checksum) AS checksum_bits,
  bit_xor({_image(_RANK_TABLE, "checksum", at="1024 * rank")}) AS register,
  {", ".join(f"bit_xor({_bit('rank', word)}) AS ranks{word}" for word in range(_WORDS))},
  count_if(NOT matches) AS corrupt,
  count_if(matches AND checksum = 0) AS unverifiable,
  bool_or(deleted) AS deleted,
  bit_xor(xxhash64(chunk_offset, length, checksum, matches)) AS mix
FROM (
  SELECT {_REPLICA}, block_id, chunk_offset, length, checksum, matches, deleted, scanned_at,
    {_rank("chunk_offset", "length")} AS rank,
    state IS NULL OR bcs_id IS NULL OR replica_index IS NULL OR source IS NULL OR generation IS NULL OR block_id IS NULL
      OR chunk_offset IS NULL OR length IS NULL OR checksum IS NULL OR matches IS NULL OR deleted IS NULL AS lacks_value
  FROM {{rows}}
)
GROUP BY {_REPLICA}, block_id
"""

_CHECKSUMS = f"""
SELECT {_REPLICA}, block_id, rows, scanned_at, kind = 'replica' AS is_empty, regular, word, deleted,
  IF(deleted, 0L, chunks) AS chunks,
  IF(deleted OR chunks = 0, 0L, bytes) AS bytes,
  IF(deleted OR chunks = 0, 0L, corrupt) AS corrupt,
  IF(deleted, 0L, IF(kind = 'block', 1L, unverifiable)) AS unverifiable,
  xxhash64(block_id, word, deleted, IF(deleted, 0L, mix)) AS mix
FROM (
  SELECT *, {_image("(SELECT t FROM {words})", "CAST(block_checksum AS BIGINT)")} AS word
  FROM (
    SELECT *,
      -- ANSI's cast raises where this one drops the upper half.
      IF(kind = 'block' AND deleted, CAST((last_checksum << 32) >> 32 AS INT),
        {_image("(SELECT t FROM {ends})", "register", at="1024 * CAST(chunks AS INT)")}
        ^ get((SELECT t FROM {{constants}}), CAST(chunks AS INT))) AS block_checksum
    FROM (
      SELECT * EXCEPT (register),
        IF(chunks = 0, 0, register
          ^ ({_image(_RANK_TABLE, "last_checksum", at="1024 * last_told")})
          ^ ({_image(_RANK_TABLE, "last_checksum", at="1024 * CAST(chunks - 1 AS INT)")}))
        ^ {_image("(SELECT t FROM {words})", "block_id", size=8)} AS register,
        coalesce(NOT lacks_value AND shiftrightunsigned(checksum_bits, 32) = 0 AND (
          kind <> 'chunks' AND rows = 1 OR kind = 'chunks' AND bytes IS NOT NULL AND rows = 1
          OR kind = 'chunks' AND rows <= {RANKS} AND length_max > 0
            AND last_offset = try_multiply(rows - 1, length_max)
            AND try_subtract(bytes, last_length) = last_offset
            AND {
    " AND ".join(f"ranks{word} ^ {_bit('last_told', word)} = {_ones('(rows - 1)', word)}" for word in range(_WORDS))
}
        ), false) AS regular
      FROM (
        SELECT *,
          -- What is irregular needs numbers that raise nothing, no more.
          IF(kind = 'chunks', least(rows, {RANKS}L), 0L) AS chunks,
          {_rank("last_offset", "last_length")} AS last_told
        FROM (
          SELECT *, CASE WHEN first_offset >= 0 THEN 'chunks' WHEN first_offset = {BLOCK_ROW} THEN 'block'
            WHEN first_offset = {CONTAINER_ROW} THEN 'replica' ELSE 'none' END AS kind
          FROM {{blocks}}
        )
      )
    )
  )
)
"""

_STEP = ", ".join(str(value) for value in step_tables().reshape(-1).view(np.int32).tolist())

_REPLICAS = f"""
SELECT {_REPLICA},
  max(scanned_at) AS scanned_at,
  IF(source = 'none', NULL, 4294967295L & ~CAST(aggregate(
    array_sort(collect_list(struct(block_id, word)) FILTER (WHERE NOT is_empty)),
    -1,
    (register, block) -> {_image(f"array({_STEP})", "register")} ^ block.word
  ) AS BIGINT)) AS root,
  coalesce(bit_xor(mix) FILTER (WHERE NOT is_empty), 0L) AS fingerprint,
  count_if(NOT is_empty) AS blocks,
  count_if(NOT is_empty AND deleted) AS deleted_blocks,
  sum(chunks) AS chunks,
  coalesce(try_sum(bytes), 0L) AS bytes,
  sum(corrupt) AS corrupt,
  coalesce(sum(unverifiable) FILTER (WHERE NOT is_empty), 0L) AS unverifiable,
  '{Path.SQL.value}' AS path,
  coalesce(
    bool_and(regular) AND try_sum(bytes) IS NOT NULL
      AND IF(bool_or(is_empty), count(*) = 1, source <> 'none'),
    false
  ) AS regular,
  sum(rows) AS rows
FROM {{blocks}}
GROUP BY {_REPLICA}
"""
