"""Replicas from rows in no order at all, in Spark SQL alone: no row of a chunk is shuffled or handed to Python.

A block's checksum is an XOR over its chunks once each chunk's rank is known (spark.gf2). A chunk as long as the
table's chunks usually are is full, and tells its rank itself: offset / length. The chunk that is not full must be the
last. That this is true of a block is proved by the same aggregate:

- full chunks are all of one length, and at most one chunk is not full;
- the f full ones are of the ranks 0 to f - 1: the XOR of one bit a rank has f bits, and f chunks can make them in no
  other way;
- the other one begins where they end.

A block of which it is not proved, of more than RANKS chunks, with checksums of more than 32 bits, with rows that
contradict each other or lack a value, sends its container to the exact path.

Aggregates by long text are slow. So rows are grouped by a hash of what names a replica, and the names are taken from
the first row of each block; that no two replicas of a container share a hash is seen there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession

from protos.chunk_table import BLOCK_ROW, CONTAINER_ROW
from spark.gf2 import end_tables, rank_tables, step_tables, word_tables
from spark.model import REPLICA_SCHEMA, Path
from spark.runs import AGREED, KEY

if TYPE_CHECKING:
    from numpy.typing import NDArray

Int64s: TypeAlias = "NDArray[np.int64]"

# Chunks a block, at most: Ozone's own limits make it 64 of 4 MiB, whose bits one word holds; each more costs every row.
RANKS = 256
_WORD_BITS = 64
# Lengths that full chunks may have: a cluster has one, or few where clients are set differently.
_LENGTHS_MAX = 8


@dataclass(frozen=True, slots=True)
class Aggregated:
    """What the rows of whole containers come to."""

    # REPLICA_SCHEMA.
    replicas: pa.Table
    # Containers, ascending, of which no replica is in `replicas`, as their rows have to be sorted; how many these are.
    exact: Int64s
    exact_rows: Int64s
    rows: int
    # Of these, rows that lack datanode or container ID, and so belong to no replica.
    lost: int


def names_of(rows: DataFrame) -> pa.Table:
    """Each replica in `rows`, with its number of `blocks`, as far as these begin where blocks begin."""
    return rows.sparkSession.sql(_NAMES, rows=rows).toArrow()


def aggregate(rows: DataFrame, names: pa.Table) -> Aggregated:
    """The replicas of all containers in `rows`, which has the columns of the chunk table; `names` are those in it."""
    lengths = names.group_by("length").aggregate([("blocks", "sum")]).sort_by([("blocks_sum", "descending")])
    full = [length for length in lengths["length"].to_pylist() if length and length > 0][:_LENGTHS_MAX]
    last = rows.sparkSession.sql("SELECT max(chunk_offset) AS last FROM {rows}", rows=rows).toArrow()["last"][0].as_py()
    words = -(-((last or 0) // min(full, default=1 << 62) + 1) // _WORD_BITS)
    return _settled(names, folded(rows, full, ranks_max=_WORD_BITS * min(max(words, 1), RANKS // _WORD_BITS)).toArrow())


def folded(rows: DataFrame, lengths: list[int], *, ranks_max: int = RANKS) -> DataFrame:
    """Sums of each replica, by container and hash of its name; where not `regular`, the root is not to be trusted.

    `lengths` are those that full chunks may have, and `ranks_max`, a multiple of 64, is how many a block may have.
    Where these are wrong, more is not regular.
    """
    session = rows.sparkSession
    ranks = _table(session, np.concatenate([rank_tables(ranks_max), np.zeros((1, 4, 256), np.uint32)]))
    ends, constants = end_tables(ranks_max)
    words = range(ranks_max // _WORD_BITS)
    filled = {
        "$BITS_OF_RANKS": ", ".join(_bits(word, len(words)) for word in words),
        "$BITS": f"array({', '.join(f'bits{word}' for word in words)})",
        "$LENGTHS": ", ".join(f"{length}L" for length in lengths) or "NULL",
        "$RANKS": str(ranks_max),
    }
    checksums = session.sql(
        _filled(_CHECKSUMS, filled),
        blocks=session.sql(_filled(_BLOCKS, filled), rows=rows, ranks=ranks),
        ranks=ranks,
        words=_table(session, word_tables()),
        ends=_table(session, ends),
        constants=_table(session, constants),
        bits=_one_row(session, _bits_below(ranks_max)),
    )
    return session.sql(_REPLICAS, blocks=checksums)


def _table(session: SparkSession, table: "NDArray[np.uint32]") -> DataFrame:
    """A table as a query of one row: as a literal it would cost the driver half a minute a query."""
    return _one_row(session, table.reshape(-1).view(np.int32))


def _one_row(session: SparkSession, value: object) -> DataFrame:
    return session.createDataFrame(pa.table({"t": pa.array([value])}))


def _filled(template: str, parts: Mapping[str, str]) -> str:
    for name, part in parts.items():
        template = template.replace(name, part)
    return template


def _bits(word: int, words: int) -> str:
    """SQL for one word of the XOR of a bit a rank; rank `$RANKS` is that of no full chunk."""
    bit = "shiftleft(1L, rank)"
    chosen = f"shiftright(rank, 6) = {word}" if words > 1 else "rank < $RANKS"
    return f"bit_xor(IF({chosen}, {bit}, 0L)) AS bits{word}"


def _bits_below(ranks: int) -> list[list[int]]:
    """For each count from 0 to `ranks`, words with the bits of the ranks below it."""
    numbers = [((1 << count) - 1).to_bytes(ranks // 8, "little") for count in range(ranks + 1)]
    return [np.frombuffer(number, np.int64).tolist() for number in numbers]


def _settled(names: pa.Table, sums: pa.Table) -> Aggregated:
    rows = sums["rows"].to_numpy()
    has_name = sums["has_name"].to_numpy()
    lost = int(rows[~has_name].sum())
    sums = sums.filter(pa.array(has_name))
    names = names.filter(pc.and_(names["datanode"].is_valid(), names["container_id"].is_valid()))
    hashed = ["container_id", "name"]
    suspects = [sums["container_id"].filter(pc.invert(sums["regular"]))]
    # A replica under two names, and two replicas of one hash.
    for keys in (list(KEY), hashed):
        counted = names.group_by(keys).aggregate([([], "count_all")])
        suspects.append(counted["container_id"].filter(pc.greater(counted["count_all"], 1)))
    # Rows of a name that no block begins with.
    suspects.append(sums.join(names.select(hashed), hashed, join_type="left anti")["container_id"])
    exact = np.unique(np.concatenate([column.to_numpy() for column in suspects])).astype(np.int64)
    containers = sums["container_id"].to_numpy()
    is_exact = np.isin(containers, exact)
    counts = np.bincount(np.searchsorted(exact, containers[is_exact]), rows[has_name][is_exact], len(exact))
    settled = sums.filter(pa.array(~is_exact)).join(names.drop_columns(["length", "blocks"]), hashed, join_type="inner")
    columns = {name: settled[name] for name in REPLICA_SCHEMA.names if name != "path"}
    columns["path"] = pa.array([Path.SQL.value] * settled.num_rows, pa.string())
    columns["root"] = pc.if_else(pc.equal(settled["source"], "none"), None, settled["root"])
    replicas = pa.table([columns[name] for name in REPLICA_SCHEMA.names], REPLICA_SCHEMA.names).cast(REPLICA_SCHEMA)
    return Aggregated(replicas, exact, counts.astype(np.int64), int(rows.sum()), lost)


def _image(table: str, value: str, *, size: int = 4, at: str = "0") -> str:
    """SQL for the image of the `size` lower bytes of a number under the map whose tables begin at `at`."""
    return " ^ ".join(
        f"get({table}, {at} + {256 * i} + CAST(shiftrightunsigned({value}, {8 * i}) & 255 AS INT))" for i in range(size)
    )


_NAME = f"xxhash64({', '.join((*KEY, *AGREED))})"
_RANK_TABLE = "(SELECT t FROM {ranks})"
_CHUNK, _BLOCK, _REPLICA, _UNFIT = 1, 2, 4, 8
_NEEDED = ("volume", *AGREED, "block_id", "length", "checksum", "matches", "deleted")

# The first row of each block, or the only one of a replica without blocks.
_NAMES = f"""
SELECT {", ".join((*KEY, *AGREED))}, {_NAME} AS name, max(length) AS length, count(*) AS blocks
FROM {{rows}}
WHERE chunk_offset <= 0
GROUP BY {", ".join((*KEY, *AGREED))}
"""

# What of a block's rows no order can change. `other` is the checksum of the only row that is no full chunk.
_BLOCKS = f"""
SELECT container_id, name, block_id, has_name,
  count(*) AS rows,
  max(scanned_at) AS scanned_at,
  bit_or(kind) AS kinds,
  max(chunk_offset) AS last_offset,
  min(full_length) AS length,
  max(full_length) AS length_max,
  bit_xor(IF(full_length IS NULL, CAST(shiftright(shiftleft(checksum, 32), 32) AS INT), 0)) AS other,
  bit_xor({_image(_RANK_TABLE, "checksum", at="1024 * rank")}) AS register,
  $BITS_OF_RANKS,
  -- Four counts in one number, good for 32,767 rows, of which a regular block has 256 at most.
  try_sum(IF(full_length IS NULL, 1L, 0L) + IF(matches, 0L, 65536L) + IF(deleted, 4294967296L, 0L)
    + IF(matches AND checksum = 0, 281474976710656L, 0L)) AS counts,
  try_sum(length) AS bytes,
  -- Of a regular block, the lengths follow from `bytes`; which chunks are corrupt is looked at in any case.
  bit_xor(xxhash64(chunk_offset, checksum)) AS mix
FROM (
  SELECT *,
    -- Divisions are what a row costs most.
    CAST(IF(quotient < $RANKS AND quotient * full_length = chunk_offset, quotient, $RANKSL) AS INT) AS rank
  FROM (
    SELECT *, chunk_offset div full_length AS quotient
    FROM (
      SELECT container_id, {_NAME} AS name, block_id, chunk_offset, length, checksum, matches, deleted, scanned_at,
        datanode IS NOT NULL AND container_id IS NOT NULL AS has_name,
        IF(chunk_offset >= 0 AND length IN ($LENGTHS), length, NULL) AS full_length,
        CASE WHEN chunk_offset >= 0 AND checksum BETWEEN 0 AND 4294967295 THEN {_CHUNK}
          WHEN chunk_offset = {BLOCK_ROW} AND checksum BETWEEN 0 AND 4294967295 THEN {_BLOCK}
          WHEN chunk_offset = {CONTAINER_ROW} THEN {_REPLICA}
          ELSE {_UNFIT} END
        | IF({" OR ".join(f"{name} IS NULL" for name in _NEEDED)}
          OR source = 'none' AND chunk_offset <> {CONTAINER_ROW}, {_UNFIT}, 0) AS kind
      FROM {{rows}}
    )
  )
)
GROUP BY container_id, name, block_id, has_name
"""

_CHECKSUMS = f"""
SELECT container_id, name, block_id, has_name, rows, scanned_at, regular, kinds = {_REPLICA} AS is_empty, deleted,
  {_image("(SELECT t FROM {words})", "checksum")} AS word,
  IF(deleted, 0L, chunks) AS chunks,
  IF(deleted OR chunks = 0, 0L, bytes) AS bytes,
  IF(deleted OR chunks = 0, 0L, shiftright(counts, 16) & 65535) AS corrupt,
  IF(deleted, 0L, IF(chunks = 0, 1L, shiftright(counts, 48) & 65535)) AS unverifiable,
  xxhash64(block_id, checksum, deleted, IF(deleted, 0L, mix), IF(deleted OR chunks = 0, 0L, bytes)) AS mix
FROM (
  SELECT *,
    IF(kinds = {_BLOCK} AND deleted, other,
      {_image("(SELECT t FROM {ends})", "register", at="1024 * chunks")} ^ get((SELECT t FROM {{constants}}), chunks)
    ) AS checksum
  FROM (
    SELECT * EXCEPT (register),
      IF(others > 0 AND chunks > 0, register ^ {_image(_RANK_TABLE, "other", at="1024 * (chunks - 1)")}, register)
        ^ {_image("(SELECT t FROM {words})", "block_id", size=8)} AS register,
      coalesce(bytes IS NOT NULL AND CASE
        WHEN kinds <> {_CHUNK} THEN rows = 1 AND kinds < {_UNFIT}
        ELSE rows <= $RANKS AND others <= 1
          AND $BITS = get((SELECT t FROM {{bits}}), full)
          AND (full = 0 OR length = length_max AND (others = 0 OR last_offset = try_multiply(full, length)))
      END, false) AS regular
    FROM (
      SELECT *, (shiftright(counts, 32) & 65535) > 0 AS deleted,
        -- What is irregular needs numbers that raise nothing, no more.
        CAST(IF(kinds = {_CHUNK}, least(rows, $RANKS), 0) AS INT) AS chunks,
        CAST(counts & 65535 AS INT) AS others,
        CAST(greatest(least(rows, $RANKS) - (counts & 65535), 0) AS INT) AS full
      FROM {{blocks}}
    )
  )
)
"""

_STEP = ", ".join(str(value) for value in step_tables().reshape(-1).view(np.int32).tolist())

_REPLICAS = f"""
SELECT container_id, name, has_name,
  max(scanned_at) AS scanned_at,
  4294967295L & ~CAST(aggregate(
    array_sort(collect_list(struct(block_id, word)) FILTER (WHERE NOT is_empty)),
    -1,
    (register, block) -> {_image(f"array({_STEP})", "register")} ^ block.word
  ) AS BIGINT) AS root,
  coalesce(bit_xor(mix) FILTER (WHERE NOT is_empty), 0L) AS fingerprint,
  count_if(NOT is_empty) AS blocks,
  count_if(NOT is_empty AND deleted) AS deleted_blocks,
  sum(chunks) AS chunks,
  coalesce(try_sum(bytes), 0L) AS bytes,
  sum(corrupt) AS corrupt,
  coalesce(sum(unverifiable) FILTER (WHERE NOT is_empty), 0L) AS unverifiable,
  coalesce(bool_and(regular) AND try_sum(bytes) IS NOT NULL AND (NOT bool_or(is_empty) OR count(*) = 1), false)
    AS regular,
  sum(rows) AS rows
FROM {{blocks}}
GROUP BY container_id, name, has_name
"""
