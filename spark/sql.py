"""Replicas from rows in no order at all, in Spark SQL alone: a block's rows of a task are one before they are shuffled,
and none is handed to Python.

A block's checksum is an XOR over its chunks once each chunk's rank is known (spark.gf2). Where a cluster's chunks are
of one length but for the last of a block, a chunk tells its rank itself: offset / length. That this is true of a block
is proved by the same aggregate: every offset is a multiple of the length, and the XOR of one bit a rank over its n
chunks has the n lowest bits, which n chunks can make in no other way than by the ranks 0 to n - 1.

A block of which it is not proved, of more than RANKS chunks, with checksums of more than 32 bits, with rows that
contradict each other or lack a value, sends its container to the exact path.

Aggregates by long text are slow. So rows are grouped by a hash of what names a replica, 64 bits, and the names are
taken from the first row of each block; that no two replicas of a container share a hash is seen there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, IntegerType, LongType, StructField, StructType

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
# Lengths of chunks that are looked for: a cluster has one, or two where clients are set differently; and the share of
# blocks that makes one worth what it costs every row.
_LENGTHS_MAX = 2
_SHARE_MIN = 1 / 64
# Ozone's default, for tables without one.
_CHUNK_BYTES = 4 << 20
# Without NULLs, which would be asked for at every look into a table.
_INTS = ArrayType(IntegerType(), containsNull=False)
_WORDS = ArrayType(ArrayType(LongType(), containsNull=False), containsNull=False)


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


def aggregate(rows: DataFrame, names: pa.Table, *, last_offset: int | None = None) -> Aggregated:
    """The replicas of all containers in `rows`, which has the columns of the chunk table; `names` are those in it.

    Where nobody knows beforehand the `last_offset` at which any chunk begins, the rows are asked for it.
    """
    lengths = lengths_of(names)
    if last_offset is None:
        found = rows.sparkSession.sql("SELECT max(chunk_offset) AS last FROM {rows}", rows=rows).toArrow()
        last_offset = found["last"][0].as_py() or 0
    words = -(-(last_offset // min(lengths) + 1) // _WORD_BITS)
    ranks_max = _WORD_BITS * min(max(words, 1), RANKS // _WORD_BITS)
    return _settled(names, folded(rows, lengths, ranks_max=ranks_max).toArrow())


def lengths_of(names: pa.Table) -> list[int]:
    """Lengths of chunks by which ranks are told, those of most blocks first; at least one."""
    held = names.filter(pc.greater(names["length"], 0)).group_by("length").aggregate([("blocks", "sum")])
    counted = sorted(zip(held["blocks_sum"].to_pylist(), held["length"].to_pylist(), strict=True), reverse=True)
    least = _SHARE_MIN * sum(blocks for blocks, _ in counted)
    return [length for blocks, length in counted[:_LENGTHS_MAX] if blocks >= least] or [_CHUNK_BYTES]


def folded(rows: DataFrame, lengths: list[int], *, ranks_max: int = RANKS) -> DataFrame:
    """Sums of each replica, by container and hash of its name; where not `regular`, the root is not to be trusted.

    `lengths` are those by which ranks are told, at least one, and `ranks_max`, a multiple of 64, is how many a block
    may have. Where these are wrong, more is not regular.
    """
    session = rows.sparkSession
    # The last map is the identity, for what has no rank.
    plain = np.left_shift(np.arange(256, dtype=np.uint32), np.arange(0, 32, 8, dtype=np.uint32)[:, None])
    ranks = _table(session, np.concatenate([rank_tables(ranks_max), plain[None]]))
    ends, constants = end_tables(ranks_max)
    words, kinds = range(ranks_max // _WORD_BITS), range(len(lengths))
    bits = [f"array({', '.join(f'bits{i}_{word}' for word in words)})" for i in kinds]
    filled = {
        "$ALL_RANKS": ", ".join(
            f"CAST(IF(chunk_offset >= 0 AND chunk_offset % {length} = 0 AND chunk_offset div {length} < {ranks_max},"
            f" chunk_offset div {length}, {ranks_max}) AS INT) AS rank{i}"
            for i, length in enumerate(lengths)
        ),
        "$ALL_BITS": ", ".join(_bits(i, word, len(words)) for i in kinds for word in words),
        "$MORE_REGISTERS": "".join(f"bit_xor({_image_at(f'rank{i}')}) AS register{i}, " for i in kinds[1:]),
        "$REGISTER": "CASE " + " ".join(f"WHEN {of} = expected THEN register{i}" for i, of in enumerate(bits)) + " END",
        "$RANKS": str(ranks_max),
    }
    checksums = session.sql(
        _filled(_CHECKSUMS, filled),
        blocks=session.sql(_filled(_BLOCKS, filled), rows=rows, ranks=ranks),
        words=_table(session, word_tables()),
        ends=_table(session, ends),
        constants=_table(session, constants),
        bits=_one_row(session, _bits_below(ranks_max), _WORDS),
    )
    return session.sql(_REPLICAS, blocks=checksums, steps=_table(session, step_tables()))


def _table(session: SparkSession, table: "NDArray[np.uint32]") -> DataFrame:
    """A table as a query of one row: as a literal it would cost the driver half a minute a query."""
    return _one_row(session, table.reshape(-1).view(np.int32))


def _one_row(session: SparkSession, value: object, kind: DataType = _INTS) -> DataFrame:
    return session.createDataFrame(pa.table({"t": pa.array([value])}), StructType([StructField("t", kind, False)]))


def _filled(template: str, parts: Mapping[str, str]) -> str:
    for name, part in parts.items():
        template = template.replace(name, part)
    return template


def _bits(length: int, word: int, words: int) -> str:
    """SQL for one word of the XOR of a bit a rank; rank `$RANKS` is that of none."""
    rank = f"rank{length}"
    chosen = f"shiftright({rank}, 6) = {word}" if words > 1 else f"{rank} < $RANKS"
    return f"bit_xor(IF({chosen}, shiftleft(1L, {rank}), 0L)) AS bits{length}_{word}"


def _bits_below(ranks: int) -> list[list[int]]:
    """For each count from 0 to `ranks`, words with the bits of the ranks below it."""
    numbers = [((1 << count) - 1).to_bytes(ranks // 8, "little") for count in range(ranks + 1)]
    return [np.frombuffer(number, np.int64).tolist() for number in numbers]


def _settled(names: pa.Table, sums: pa.Table) -> Aggregated:
    rows = sums["rows"].to_numpy()
    has_name = pc.is_valid(sums["container_id"]).to_numpy()
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
    # Names that lack something, and chunks of a replica that has no tree.
    is_whole = reduce(pc.and_, (pc.is_valid(names[name]) for name in ("volume", *AGREED)))
    suspects.append(names["container_id"].filter(pc.invert(is_whole)))
    treeless = names.filter(pc.equal(names["source"], "none")).select(hashed)
    suspects.append(
        sums.filter(pc.greater(sums["blocks"], 0)).join(treeless, hashed, join_type="left semi")["container_id"]
    )
    exact = np.unique(np.concatenate([column.to_numpy() for column in suspects])).astype(np.int64)
    containers = sums["container_id"].to_numpy()
    is_exact = np.isin(containers, exact)
    counts = np.bincount(np.searchsorted(exact, containers[is_exact]), rows[has_name][is_exact], len(exact))
    settled = sums.filter(pa.array(~is_exact)).join(names.drop_columns(["length", "blocks"]), hashed, join_type="inner")
    columns = {name: settled[name] for name in REPLICA_SCHEMA.names if name != "path"}
    columns["path"] = pa.array([Path.SQL.value] * settled.num_rows, pa.string())
    columns["root"] = pc.if_else(pc.equal(settled["source"], "none"), None, settled["root"])
    # Of a time that is finer, the rest is dropped.
    columns["scanned_at"] = columns["scanned_at"].cast(REPLICA_SCHEMA.field("scanned_at").type, safe=False)
    replicas = pa.table([columns[name] for name in REPLICA_SCHEMA.names], REPLICA_SCHEMA.names).cast(REPLICA_SCHEMA)
    return Aggregated(replicas, exact, counts.astype(np.int64), int(rows.sum()), lost)


def _image(table: str, value: str, *, size: int = 4, at: str = "0") -> str:
    """SQL for the image of the `size` lower bytes of a number under the map whose tables begin at `at`."""
    return " ^ ".join(
        f"get({table}, {at} + {256 * i} + CAST(shiftrightunsigned({value}, {8 * i}) & 255 AS INT))" for i in range(size)
    )


# Text is hashed a piece at a time: chained, each would wait for the one before.
_NAME = (
    "xxhash64(datanode) ^ shiftleft(CAST(hash(volume) AS BIGINT), 31) ^ shiftleft(CAST(hash(state) AS BIGINT), 17)"
    " ^ CAST(hash(source) AS BIGINT) ^ xxhash64(bcs_id, replica_index, generation)"
)
# What the rows of a block are.
_CHUNK, _BLOCK, _REPLICA, _UNFIT, _DELETED = (1 << bit for bit in range(5))
_NEEDED = ("block_id", "chunk_offset", "length", "matches", "deleted")

# The first row of each block, or the only one of a replica without blocks.
_NAMES = f"""
SELECT {", ".join((*KEY, *AGREED))}, {_NAME} AS name, max(length) AS length, count(*) AS blocks
FROM {{rows}}
WHERE chunk_offset <= 0
GROUP BY {", ".join((*KEY, *AGREED))}
"""


def _image_at(rank: str) -> str:
    """SQL for the image of a chunk's checksum at its rank."""
    return _image("(SELECT t FROM {ranks})", "checksum", at=f"1024 * {rank}")


# What of a block's rows no order can change: few numbers, as each costs every row. Rows of no replica are those of a
# container that is NULL.
_BLOCKS = f"""
SELECT container_id, name, block_id,
  -- Beside the register 32 bits of what is no part of the tree's checksums.
  bit_xor(CAST({_image_at("rank0")} AS BIGINT) & 4294967295L
    | shiftleft(CAST(hash(chunk_offset, length, checksum) AS BIGINT), 32)) AS register,
  $MORE_REGISTERS
  $ALL_BITS,
  count(*) AS rows,
  try_sum(length) AS bytes,
  -- Corrupt and unverifiable chunks, in one number that is good for 65,535 rows; a regular block has 256 at most.
  try_sum(IF(matches, IF(checksum = 0, 65536L, 0L), 1L)) AS counts,
  bit_or(IF({" OR ".join(f"{name} IS NULL" for name in _NEEDED)}, {_UNFIT}, 0)
    | IF(checksum BETWEEN 0 AND 4294967295, 0, IF(chunk_offset = {CONTAINER_ROW} AND checksum IS NOT NULL, 0, {_UNFIT}))
    | IF(deleted, {_DELETED}, 0)
    | CASE WHEN chunk_offset >= 0 THEN {_CHUNK} WHEN chunk_offset = {BLOCK_ROW} THEN {_BLOCK}
        WHEN chunk_offset = {CONTAINER_ROW} THEN {_REPLICA} ELSE {_UNFIT} END
  ) AS kinds,
  max(scanned_at) AS scanned_at
FROM (
  SELECT IF(datanode IS NULL, NULL, container_id) AS container_id, {_NAME} AS name, block_id, chunk_offset, length,
    checksum, matches, deleted, scanned_at, $ALL_RANKS
  FROM {{rows}}
)
GROUP BY container_id, name, block_id
"""

_CHECKSUMS = f"""
SELECT container_id, name, block_id, rows, scanned_at, regular, kinds & {_REPLICA} > 0 AS is_empty, deleted,
  {_image("(SELECT t FROM {words})", "checksum")} AS word,
  IF(deleted, 0L, chunks) AS chunks,
  IF(deleted OR chunks = 0, 0L, bytes) AS bytes,
  IF(deleted OR chunks = 0, 0L, counts & 65535) AS corrupt,
  IF(deleted, 0L, IF(chunks = 0, 1L, shiftright(counts, 16) & 65535)) AS unverifiable,
  xxhash64(block_id, checksum, deleted, IF(deleted, 0, mix), IF(deleted OR chunks = 0, 0L, bytes)) AS mix
FROM (
  SELECT *,
    IF(kinds = {_BLOCK | _DELETED}, register,
      {_image("(SELECT t FROM {ends})", "image", at="1024 * chunks")} ^ get((SELECT t FROM {{constants}}), chunks)
    ) AS checksum
  FROM (
    SELECT *,
      IF(chunks > 0, register, 0) ^ {_image("(SELECT t FROM {words})", "block_id", size=8)} AS image,
      coalesce(bytes IS NOT NULL AND IF(is_of_chunks, rows <= $RANKS AND register IS NOT NULL,
        rows = 1 AND kinds & {_UNFIT} = 0), false) AS regular
    FROM (
      SELECT *, CAST(IF(is_of_chunks, $REGISTER, register0) AS INT) AS register
      FROM (
        SELECT * EXCEPT (register),
          CAST(shiftright(shiftleft(register, 32), 32) AS INT) AS register0,
          CAST(shiftright(register, 32) AS INT) AS mix,
          -- What is irregular needs numbers that raise nothing, no more.
          CAST(IF(is_of_chunks, least(rows, $RANKS), 0) AS INT) AS chunks,
          get((SELECT t FROM {{bits}}), CAST(least(rows, $RANKS) AS INT)) AS expected
        FROM (
          SELECT *, kinds & {_DELETED} > 0 AS deleted, kinds & {~_DELETED} = {_CHUNK} AS is_of_chunks
          FROM {{blocks}}
        )
      )
    )
  )
)
"""

_REPLICAS = f"""
SELECT * EXCEPT (words, steps),
  4294967295L & ~CAST(aggregate(
    words, -1, (register, block) -> {_image("steps", "register")} ^ block.word
  ) AS BIGINT) AS root
FROM (
  -- A function cannot ask for a table, but sees the columns beside it.
  SELECT container_id, name, (SELECT t FROM {{steps}}) AS steps,
    array_sort(collect_list(struct(block_id, word)) FILTER (WHERE NOT is_empty)) AS words,
    max(scanned_at) AS scanned_at,
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
  GROUP BY container_id, name
)
"""
