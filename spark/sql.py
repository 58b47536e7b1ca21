"""Computes the totals of replicas in Spark SQL, from rows in no order.

Each task aggregates a block's rows to one before the shuffle, and no row passes through
Python.

A block's checksum is an XOR over its chunks once each chunk's rank is known
(sweep.fragments). Where all chunks but a block's last have one length, the rank is
offset / length. The same aggregate proves this for each block: every offset is a
multiple of the length, and the XOR of one bit per rank equals the n lowest bits. The n
chunks of a block can produce these bits only with the ranks 0 to n - 1.

A container takes the exact path if one of its blocks lacks this proof, has more than
RANKS chunks or a checksum of more than 32 bits, or has rows that contradict each other
or lack a value.

Aggregating by long text is slow. Rows are therefore grouped by a 64-bit hash of the
columns that name a replica. The names come from the first row of each block, where two
replicas with the same hash are detected.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ArrayType, DataType, IntegerType, LongType, StructField, StructType

from chunktable.schema import BLOCK_ROW, CONTAINER_ROW
from sweep.fragments import end_tables, rank_tables, step_tables, word_tables
from sweep.model import REPLICA_SCHEMA, REQUEST_SCHEMA, RootMethod
from sweep.runs import ATTRIBUTE_COLUMNS, KEY

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Chunks per block, at most. Ozone's defaults give 64 chunks of 4 MiB, whose bits fit
# one word; every further word costs time for every row.
RANKS = 256
_WORD_BITS = 64
# Chunk lengths that are tried. A cluster has one, or two where clients are configured
# differently; each costs time for every row, so it must cover this share of the blocks.
_LENGTHS_MAX = 2
_SHARE_MIN = 1 / 64
# Blocks per shuffle partition: some tens of megabytes.
_PARTITION_BLOCKS = 1 << 18
# Ozone's default chunk length, for tables whose rows give none.
_CHUNK_BYTES = 4 << 20
# Columns of a replica that are computed from its rows.
_SUMS = (
    "scanned_at",
    "root",
    "fingerprint",
    "blocks",
    "deleted_blocks",
    "chunks",
    "bytes",
    "corrupt",
    "unverifiable",
)
# Declared without NULLs, which Spark would check for at every lookup.
_INTS = ArrayType(IntegerType(), containsNull=False)
_WORDS = ArrayType(ArrayType(LongType(), containsNull=False), containsNull=False)


# The sums of replicas, each with the columns that name it.
_SUM_SCHEMA = pa.schema(
    [
        *(REPLICA_SCHEMA.field(n).with_nullable(True) for n in (*KEY, *ATTRIBUTE_COLUMNS)),
        *(REPLICA_SCHEMA.field(n).with_nullable(True) for n in REPLICA_SCHEMA.names if n in _SUMS),
        # Rows of the chunk table; 0 if another row counts them.
        pa.field("rows", pa.int64()),
        # Whether the rows name a replica, and whether all of this row is proven.
        pa.field("is_named", pa.bool_()),
        pa.field("is_proven", pa.bool_()),
    ]
)


@dataclass(frozen=True, slots=True)
class ReplicaNames:
    """The replicas in a table, which executors hold (`names_of`); the number of blocks,
    and the chunk lengths that ranks are computed from, at least one, the most frequent
    first.
    """

    frame: DataFrame
    blocks: int
    lengths: list[int]


@dataclass(frozen=True, slots=True)
class SettledSums:
    """The replicas (REPLICA_SCHEMA) that are proven in some rows of `aggregate`, and
    the containers of the others, whose rows must be sorted (REQUEST_SCHEMA).
    """

    replicas: pa.Table
    requested: pa.Table
    # Rows of the chunk table: all, and those without datanode or container ID.
    rows: int
    lost: int
    # Replicas whose container only `unnamed_containers` knows.
    unnamed: int


@contextmanager
def names_of(rows: DataFrame) -> Iterator[ReplicaNames]:
    """The replicas in `rows`, read from the rows whose `chunk_offset` is 0 or less."""
    session = rows.sparkSession
    # Once, because a scan costs more than the replicas that it finds.
    names = session.sql(_NAMES, rows=rows).persist(StorageLevel.DISK_ONLY)
    try:
        counted = session.sql("SELECT sum(blocks) AS blocks FROM {names}", names=names).toArrow()
        lengths = session.sql(_LENGTHS, names=names).toArrow()
        blocks = counted["blocks"][0].as_py() or 0
        held = zip(lengths["length"].to_pylist(), lengths["blocks"].to_pylist(), strict=True)
        frequent = [length for length, count in held if count >= _SHARE_MIN * blocks]
        yield ReplicaNames(names, blocks, frequent or [_CHUNK_BYTES])
    finally:
        names.unpersist()


def aggregate(rows: DataFrame, names: ReplicaNames, *, last_offset: int | None = None) -> DataFrame:
    """The sums of all replicas in `rows`, which has the columns of the
    chunk table. Run it within `partitions`.

    `last_offset` is the largest chunk offset, in bytes; without it a query over the
    rows finds it.
    """
    if last_offset is None:
        found = rows.sparkSession.sql(
            "SELECT max(chunk_offset) AS last FROM {rows}", rows=rows
        ).toArrow()
        last_offset = found["last"][0].as_py() or 0
    words = -(-(last_offset // min(names.lengths) + 1) // _WORD_BITS)
    ranks_max = _WORD_BITS * min(max(words, 1), RANKS // _WORD_BITS)
    sums = folded(rows, names.lengths, ranks_max=ranks_max)
    return rows.sparkSession.sql(_NAMED, sums=sums, names=names.frame)


def unnamed_containers(rows: DataFrame, names: ReplicaNames) -> DataFrame:
    """The containers (REQUEST_SCHEMA) of rows whose replica has no block that begins at
    offset 0.
    """
    return rows.sparkSession.sql(_OWNERS, rows=rows, names=names.frame)


def settled(sums: pa.Table) -> SettledSums:
    """Take apart rows of `aggregate`."""
    sums = sums.cast(_SUM_SCHEMA, safe=False)
    is_named, has_container = sums["is_named"], pc.is_valid(sums["container_id"])
    proven = sums.filter(sums["is_proven"])
    columns = {name: proven[name] for name in REPLICA_SCHEMA.names if name != "path"}
    columns["path"] = pa.array([RootMethod.SQL.value] * proven.num_rows, pa.string())
    columns["root"] = pc.if_else(
        pc.equal(proven["source"], "none"), pa.scalar(None, pa.int64()), proven["root"]
    )
    replicas = pa.table([columns[name] for name in REPLICA_SCHEMA.names], REPLICA_SCHEMA.names)
    others = sums.filter(pc.and_(has_container, pc.invert(sums["is_proven"])))
    lost = pc.sum(sums["rows"].filter(pc.invert(is_named))).as_py() or 0
    return SettledSums(
        replicas.cast(REPLICA_SCHEMA),
        others.select(REQUEST_SCHEMA.names).cast(REQUEST_SCHEMA),
        pc.sum(sums["rows"]).as_py() or 0,
        lost,
        pc.sum(pc.and_(is_named, pc.invert(has_container))).as_py() or 0,
    )


def folded(rows: DataFrame, lengths: list[int], *, ranks_max: int = RANKS) -> DataFrame:
    """The sums of each replica, by the hash of its name; the root is valid only where
    `regular` is true.

    `lengths` are the chunk lengths that ranks are computed from, at least one.
    `ranks_max`, a multiple of 64, is the most chunks that a block may have. Wrong
    values make fewer replicas regular, never a wrong root.
    """
    session = rows.sparkSession
    # The last map is the identity, for rows without a rank.
    plain = np.left_shift(
        np.arange(256, dtype=np.uint32), np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    )
    ranks = _table(session, np.concatenate([rank_tables(ranks_max), plain[None]]))
    ends, constants = end_tables(ranks_max)
    words, kinds = range(ranks_max // _WORD_BITS), range(len(lengths))
    bits = [f"array({', '.join(f'bits{i}_{word}' for word in words)})" for i in kinds]
    filled = {
        "$ALL_RANKS": ", ".join(
            f"CAST(IF(chunk_offset >= 0 AND chunk_offset % {length} = 0 AND chunk_offset div"
            f" {length} < {ranks_max}, chunk_offset div {length}, {ranks_max}) AS INT) AS rank{i}"
            for i, length in enumerate(lengths)
        ),
        "$ALL_BITS": ", ".join(_bits(i, word, len(words)) for i in kinds for word in words),
        "$MORE_REGISTERS": "".join(
            f"bit_xor({_image_at(f'rank{i}')}) AS register{i}, " for i in kinds[1:]
        ),
        "$REGISTER": (
            "CASE "
            + " ".join(f"WHEN {of} = expected THEN register{i}" for i, of in enumerate(bits))
            + " END"
        ),
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


@contextmanager
def partitions(session: SparkSession, blocks: int, *, cores: int) -> Iterator[None]:
    """Set the number of shuffle partitions by the number of blocks, at least one for
    each core. Larger partitions shuffle less, because neighbouring rows stay together.
    """
    name = "spark.sql.shuffle.partitions"
    before = str(session.conf.get(name))
    session.conf.set(name, max(cores, -(-blocks // _PARTITION_BLOCKS)))
    try:
        yield
    finally:
        session.conf.set(name, before)


def _table(session: SparkSession, table: "NDArray[np.uint32]") -> DataFrame:
    """A table as a query of one row; as a literal it would take the driver half a
    minute per query.
    """
    return _one_row(session, table.reshape(-1).view(np.int32))


def _one_row(session: SparkSession, value: object, kind: DataType = _INTS) -> DataFrame:
    return session.createDataFrame(
        pa.table({"t": pa.array([value])}), StructType([StructField("t", kind, False)])
    )


def _filled(template: str, parts: Mapping[str, str]) -> str:
    for name, part in parts.items():
        template = template.replace(name, part)
    return template


def _bits(length: int, word: int, words: int) -> str:
    """SQL for one word of the XOR of one bit per rank; rank `$RANKS` means no rank."""
    rank = f"rank{length}"
    is_in_word = f"shiftright({rank}, 6) = {word}" if words > 1 else f"{rank} < $RANKS"
    return f"bit_xor(IF({is_in_word}, shiftleft(1L, {rank}), 0L)) AS bits{length}_{word}"


def _bits_below(ranks: int) -> list[list[int]]:
    """For each count from 0 to `ranks`, the words with a bit for each rank below it."""
    numbers = [((1 << count) - 1).to_bytes(ranks // 8, "little") for count in range(ranks + 1)]
    return [np.frombuffer(number, np.int64).tolist() for number in numbers]


def _image(table: str, value: str, *, size: int = 4, at: str = "0") -> str:
    """SQL for the image of the `size` lower bytes of a number under the map whose
    tables begin at `at`.
    """
    return " ^ ".join(
        f"get({table}, {at} + {256 * i} + CAST(shiftrightunsigned({value}, {8 * i}) & 255 AS INT))"
        for i in range(size)
    )


# Odd numbers that mix well: a sum of products with them is a hash of the factors.
_ODD = (
    -7046029254386353131,
    -4417276706812531889,
    1609587929392839161,
    -8796714831421723037,
    2870177450012600261,
    -3372029247567499371,
    668265263904567827,
)


def _products(*terms: str) -> str:
    return " + ".join(f"{term} * {odd}L" for term, odd in zip(terms, _ODD, strict=False))


_NUMBERS = ("container_id", "bcs_id", "replica_index", "generation")
_TEXTS = ("volume", "state", "source")
# Each text is hashed by itself: in a chained hash each would wait for the one before.
# NULL becomes a number that no replica has.
_NAME = (
    "IF(datanode IS NULL OR container_id IS NULL, NULL, xxhash64(datanode) + "
    + _products(
        *(f"coalesce({name}, -{_ODD[2]}L)" for name in _NUMBERS),
        *(f"xxhash64({name})" for name in _TEXTS),
    )
    + ")"
)
_OWNED = ["name", "container_id"]
# Bits for the kinds of rows in a block.
_CHUNK, _BLOCK, _REPLICA, _UNFIT, _DELETED = (1 << bit for bit in range(5))
_NEEDED = ("block_id", "matches", "deleted")

# The first row of each block, or the only one of a replica without blocks.
_NAMES = f"""
SELECT {", ".join((*KEY, *ATTRIBUTE_COLUMNS))}, {_NAME} AS name, max(length) AS length,
    count(*) AS blocks
FROM {{rows}}
WHERE chunk_offset <= 0
GROUP BY {", ".join((*KEY, *ATTRIBUTE_COLUMNS))}
"""


def _image_at(rank: str) -> str:
    """SQL for the image of a chunk's checksum at its rank."""
    return _image("(SELECT t FROM {ranks})", "checksum", at=f"1024 * {rank}")


# The most frequent lengths of chunks.
_LENGTHS = f"""
SELECT length, sum(blocks) AS blocks FROM {{names}} WHERE length > 0
GROUP BY length ORDER BY blocks DESC, length DESC LIMIT {_LENGTHS_MAX}
"""

# The containers of rows whose names _NAMES did not find.
_OWNERS = f"""
SELECT container_id, count(*) AS rows
FROM (SELECT {_NAME} AS name, container_id FROM {{rows}}) given
WHERE name IS NOT NULL AND NOT EXISTS (SELECT 1 FROM {{names}} known WHERE known.name = given.name)
GROUP BY container_id
"""

# Two replicas with one hash have the sums of both. Rows that lack a value of a name, or
# have chunks and no tree, are not proven either.
_NAMED = f"""
SELECT {", ".join((*KEY, *ATTRIBUTE_COLUMNS))}, {", ".join(_SUMS)},
  IF(nth > 1, 0L, rows) AS rows, sums.name IS NOT NULL AS is_named,
  coalesce(regular AND of_name = 1 AND is_whole AND NOT (source = 'none' AND blocks > 0), false)
    AS is_proven
FROM {{sums}} sums LEFT JOIN (
  SELECT {", ".join((*KEY, *ATTRIBUTE_COLUMNS))}, name,
    {" AND ".join(f"{n} IS NOT NULL" for n in ("volume", *ATTRIBUTE_COLUMNS))} AS is_whole,
    count(*) OVER (PARTITION BY name) AS of_name,
    row_number() OVER (PARTITION BY name ORDER BY container_id) AS nth
  FROM {{names}} WHERE name IS NOT NULL
) names ON sums.name = names.name
"""

# Aggregates of a block that do not depend on the order of its rows. They are few,
# because each costs time for every row; those that vary between blocks are adjacent,
# which compresses better. Rows of no replica have the name NULL.
_BLOCKS = f"""
SELECT block_id, name,
  -- The register, and 32 bits that mix in what no checksum of the tree covers.
  bit_xor(CAST({_image_at("rank0")} AS BIGINT) & 4294967295L
    | (mixed ^ shiftrightunsigned(mixed, 29)) * {_ODD[3]}L & -4294967296L) AS register,
  sum(length) AS bytes,
  $MORE_REGISTERS
  $ALL_BITS,
  -- The rows, the corrupt chunks and the unverifiable chunks, packed into one number.
  -- They are right if there are no more than a block may have.
  sum(IF(matches, IF(checksum = 0, {1 << 48 | 1}L, 1L), {1 << 32 | 1}L)) AS counts,
  bit_or(IF({" OR ".join(f"{name} IS NULL" for name in _NEEDED)}, {_UNFIT}, 0)
    -- Bounded so that no sum overflows.
    | IF(length BETWEEN 0 AND 4294967295, 0, {_UNFIT})
    | IF(checksum BETWEEN 0 AND 4294967295, 0,
      IF(chunk_offset = {CONTAINER_ROW} AND checksum IS NOT NULL, 0, {_UNFIT}))
    | IF(deleted, {_DELETED}, 0)
    | CASE WHEN chunk_offset >= 0 THEN {_CHUNK} WHEN chunk_offset = {BLOCK_ROW} THEN {_BLOCK}
        WHEN chunk_offset = {CONTAINER_ROW} THEN {_REPLICA} ELSE {_UNFIT} END
  ) AS kinds,
  max(scanned_at) AS scanned_at
FROM (
  SELECT {_NAME} AS name, block_id, chunk_offset, length, checksum, matches, deleted, scanned_at,
    {_products("chunk_offset", "length", "checksum")} AS mixed, $ALL_RANKS
  FROM {{rows}}
)
GROUP BY block_id, name
"""

_CHECKSUMS = f"""
SELECT name, block_id, rows, scanned_at, regular, kinds & {_REPLICA} > 0 AS is_empty, deleted,
  {_image("(SELECT t FROM {words})", "checksum")} AS word,
  IF(deleted, 0L, chunks) AS chunks,
  IF(deleted OR chunks = 0, 0L, bytes) AS bytes,
  IF(deleted OR chunks = 0, 0L, shiftright(counts, 32) & 65535) AS corrupt,
  IF(deleted, 0L, IF(chunks = 0, 1L, shiftrightunsigned(counts, 48))) AS unverifiable,
  xxhash64(block_id, checksum, deleted, IF(deleted, 0, mix),
    IF(deleted OR chunks = 0, 0L, bytes)) AS mix
FROM (
  SELECT *,
    IF(kinds = {_BLOCK | _DELETED}, register,
      {_image("(SELECT t FROM {ends})", "image", at="1024 * chunks")}
        ^ get((SELECT t FROM {{constants}}), chunks)
    ) AS checksum
  FROM (
    SELECT *,
      IF(chunks > 0, register, 0) ^ {_image("(SELECT t FROM {words})", "block_id", size=8)}
        AS image,
      coalesce(bytes IS NOT NULL AND IF(is_of_chunks, rows <= $RANKS AND register IS NOT NULL,
        rows = 1 AND kinds & {_UNFIT} = 0), false) AS regular
    FROM (
      SELECT *, CAST(IF(is_of_chunks, $REGISTER, register0) AS INT) AS register
      FROM (
        SELECT * EXCEPT (register),
          CAST(shiftright(shiftleft(register, 32), 32) AS INT) AS register0,
          CAST(shiftright(register, 32) AS INT) AS mix,
          -- For irregular blocks any number will do that raises no error.
          CAST(IF(is_of_chunks, least(rows, $RANKS), 0) AS INT) AS chunks,
          get((SELECT t FROM {{bits}}), CAST(least(rows, $RANKS) AS INT)) AS expected
        FROM (
          SELECT *, counts & 4294967295L AS rows,
            kinds & {_DELETED} > 0 AS deleted, kinds & {~_DELETED} = {_CHUNK} AS is_of_chunks
          FROM {{blocks}}
        )
      )
    )
  )
)
"""

_REPLICAS = f"""
SELECT name, 4294967295L & ~CAST(aggregate(
    array_sort(arrays_zip(block_ids, words)), -1, (register, block) ->
      {_image("steps", "register")} ^ block.words
  ) AS BIGINT) AS root,
  fingerprint, CAST(size(words) AS BIGINT) AS blocks,
  deleted_blocks, chunks, bytes, corrupt, unverifiable,
  scanned_at, regular, chunks + others AS rows
FROM (
  -- A lambda cannot contain a subquery, but sees columns, so the table becomes one.
  -- Two lists, because a list of pairs would take twice the memory.
  SELECT name, (SELECT t FROM {{steps}}) AS steps,
    coalesce(bit_xor(mix) FILTER (WHERE NOT is_empty), 0L) AS fingerprint,
    coalesce(try_sum(bytes), 0L) AS bytes,
    sum(chunks) AS chunks,
    sum(rows - chunks) AS others,
    count_if(NOT is_empty AND deleted) AS deleted_blocks,
    sum(corrupt) AS corrupt,
    coalesce(sum(unverifiable) FILTER (WHERE NOT is_empty), 0L) AS unverifiable,
    coalesce(bool_and(regular) AND try_sum(bytes) IS NOT NULL AND (NOT bool_or(is_empty)
      OR count(*) = 1), false)
      AS regular,
    max(scanned_at) AS scanned_at,
    collect_list(block_id) FILTER (WHERE NOT is_empty) AS block_ids,
    collect_list(word) FILTER (WHERE NOT is_empty) AS words
  FROM {{blocks}}
  GROUP BY name
)
"""
