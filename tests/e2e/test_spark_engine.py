"""Spark's engine on a real local Spark: along every path it says what the engine of one
machine says.
"""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from runtime.disk import Disk
from spark.engine import Scattered, SparkEngine
from spark.scattered import last_offset
from spark.sql import names_of
from sweep.engine import Engine, LocalEngine, SweepRequest
from sweep.gather import Gatherer
from sweep.output import Summary, SweepStore, SweepTable
from sweep.run import sweep
from tests.support.sql_folds import fold_frame
from tests.support.sweeps import Quiet, findings_of, packed_trees, verdicts_of
from tests.support.volumes import flip

# One JVM a run of the tests: all of Spark's are of one group.
pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]


def swept(out: Path, engine: Engine, *tables: Path) -> Summary:
    return sweep(SweepRequest(out, tuple(map(str, tables))), engine, Quiet())


def roots(out: Path, summary: Summary) -> list[dict[str, Any]]:
    """In one order, and without what depends on the path."""
    found: list[dict[str, Any]] = (
        SweepStore(out, Disk()).read(SweepTable.ROOTS, summary.sweep_id).to_pylist()
    )
    found.sort(key=lambda row: (row["container_id"], row["datanode"], row["volume"]))
    return [{key: row[key] for key in row if key not in ("path", "fingerprint")} for row in found]


def said(out: Path, summary: Summary) -> tuple[object, ...]:
    return (
        roots(out, summary),
        verdicts_of(out, summary.sweep_id),
        findings_of(out, summary.sweep_id),
    )


def agree(
    tmp_path: Path,
    session: SparkSession,
    table: Path,
    paths: dict[Scattered, set[str]],
    *more: Path,
) -> Summary:
    """Sweep along each way, and hold the answers against those of one machine."""
    one_machine = LocalEngine(Gatherer(tmp_path / "scratch", threads=1))
    local = swept(tmp_path / "local", one_machine, table, *more)
    for way, expected in paths.items():
        out = tmp_path / way.value
        summary = swept(out, SparkEngine(session, scattered=way), table, *more)
        assert said(out, summary) == said(tmp_path / "local", local)
        assert set(summary.paths) == expected
        assert summary.engine == "spark"
        assert summary.rows == local.rows
    return local


def test_in_order_parts_are_folded_where_they_lie(tmp_path: Path, session: SparkSession) -> None:
    truth = synthetic(
        tmp_path / "table", SyntheticCluster(seed=4, datanodes=4, containers=60, blocks=5, chunks=8)
    )
    local = agree(tmp_path, session, tmp_path / "table", {Scattered.AUTO: {"filewise"}})
    assert local.diverged == tuple(damage.container_id for damage in truth.damages)


def test_in_no_order_large_blocks_are_folded_in_sql(tmp_path: Path, session: SparkSession) -> None:
    cluster = SyntheticCluster(
        seed=5, datanodes=4, containers=60, blocks=5, chunks=12, order=RowOrder.SHUFFLED
    )
    truth = synthetic(tmp_path / "table", cluster)
    # Of a chunk that is missing in the middle no proof can be given.
    paths = {Scattered.AUTO: {"sql", "exact"}, Scattered.EXACT: {"exact"}}
    local = agree(tmp_path, session, tmp_path / "table", paths)
    assert local.diverged == tuple(damage.container_id for damage in truth.damages)


@pytest.mark.parametrize(
    ("column", "kind", "name", "way"),
    [
        ("scanned_at", pa.timestamp("us", tz="UTC"), "rows", "sql"),
        ("scanned_at", pa.timestamp("ms"), "rows", "sql"),
        ("checksum", pa.int64(), "_rows", "exact"),
        ("checksum", pa.float64(), "rows", None),
        ("replica_index", pa.int8(), "rows", "sql"),
    ],
)
def test_tables_that_spark_reads_in_ways_of_its_own_come_to_the_same(
    tmp_path: Path,
    session: SparkSession,
    column: str,
    kind: pa.DataType,
    name: str,
    way: str | None,
) -> None:
    cluster = SyntheticCluster(
        seed=8, datanodes=3, containers=12, blocks=3, chunks=12, order=RowOrder.SHUFFLED
    )
    synthetic(tmp_path / "made", cluster)
    table = pa.concat_tables(
        pq.read_table(path) for path in sorted((tmp_path / "made").rglob("*.parquet"))
    )
    values = table[column].cast(pa.int64())
    if column == "scanned_at":
        # A time that falls between two of ours.
        scale = 1000 if kind.unit == "us" else 1
        values = pa.array(values.to_numpy() * scale + scale // 2)
    elif pa.types.is_floating(kind):
        values = pa.array(values.to_numpy() + 0.5)
    changed = table.set_column(table.schema.get_field_index(column), column, values.cast(kind))
    pq.write_table(changed, tmp_path / f"{name}.parquet")
    inputs = tmp_path / f"{name}.parquet"
    local = swept(
        tmp_path / "local", LocalEngine(Gatherer(tmp_path / "scratch", threads=1)), inputs
    )
    summary = swept(tmp_path / "spark", SparkEngine(session), inputs)
    assert said(tmp_path / "spark", summary) == said(tmp_path / "local", local)
    assert (way in summary.paths) if way else not summary.paths


def test_in_no_order_tiny_blocks_are_sorted(tmp_path: Path, session: SparkSession) -> None:
    cluster = SyntheticCluster(
        seed=6, datanodes=3, containers=40, blocks=6, chunks=1, order=RowOrder.SHUFFLED
    )
    synthetic(tmp_path / "table", cluster)
    agree(tmp_path, session, tmp_path / "table", {Scattered.AUTO: {"exact"}})


def test_hostile_rows_come_to_the_same_along_every_path(
    tmp_path: Path, session: SparkSession
) -> None:
    rng = random.Random(7)
    rows = [
        row
        for container in range(1, 120)
        for node in "abc"
        for row in hostile(rng, node, container)
    ]
    rng.shuffle(rows)
    (tmp_path / "table").mkdir()
    for number in range(2):
        columns = list(zip(*rows[number::2], strict=True))
        table = pa.table([pa.array(column) for column in columns], CHUNK_SCHEMA.names)
        # Nulls are for others' tables, whose schema allows them.
        schema = pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])
        pq.write_table(table.cast(schema), tmp_path / "table" / f"{number}.parquet")
    agree(
        tmp_path,
        session,
        tmp_path / "table",
        {Scattered.SQL: {"sql", "exact"}, Scattered.EXACT: {"exact"}},
    )


def hostile(rng: random.Random, node: str, container: int) -> list[tuple[object, ...]]:
    """The rows of one replica, some of which no honest datanode would write."""
    same = random.Random(container)
    head = (node, "v", container, "CLOSED", 1, 0)
    kind = rng.choice(["none", "empty", *["blocks"] * 8])
    if kind != "blocks":
        return [
            (
                *head,
                0,
                CONTAINER_ROW,
                0,
                0,
                True,
                False,
                "none" if kind == "none" else "tree",
                1,
                None,
            )
        ]
    rows = list[list[object]]()
    for block in sorted(
        {same.choice([-(2**63), -1, 0, 2**63 - 1, same.getrandbits(40)]) for _ in range(4)}
    ):
        size, count = same.choice([4 << 20, 65536, 1000]), same.choice([0, 1, 2, 3, 63, 64, 65, 70])
        deleted = same.random() < 0.2
        tail = (deleted, "tree", 1, None)
        if not count:
            rows.append([*head, block, BLOCK_ROW, 0, same.getrandbits(32), True, *tail])
        for place in range(count):
            length = size if place + 1 < count else same.randrange(1, size + 1)
            checksum = 0 if same.random() < 0.01 else same.getrandbits(32)
            rows.append([*head, block, place * size, length, checksum, True, *tail])
    spoil = rng.random()
    at = rng.randrange(len(rows))
    names = CHUNK_SCHEMA.names
    if spoil < 0.05:
        del rows[at]
    elif spoil < 0.3:
        column, value = rng.choice(
            [
                ("chunk_offset", 2**62),
                ("chunk_offset", 1),
                ("chunk_offset", -3),
                ("length", 2**63 - 1),
                ("length", 0),
                ("length", -1),
                ("checksum", -1),
                ("checksum", 2**63 - 1),
                ("checksum", 0),
                ("matches", False),
                ("deleted", True),
                ("state", "OPEN"),
                ("replica_index", 3),
                ("generation", 9),
                ("source", "none"),
                ("checksum", None),
                ("length", None),
                ("block_id", None),
                ("state", None),
            ]
        )
        rows[at][names.index(column)] = value
    elif spoil < 0.35:
        rows.append(list(rows[at]))
    elif spoil < 0.4:
        rows.append([*rows[at][:9], 5, *rows[at][10:]])
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("order", [RowOrder.CLUSTERED, RowOrder.SHUFFLED])
def test_tasks_write_the_trees_that_one_machine_writes(
    tmp_path: Path, session: SparkSession, order: RowOrder
) -> None:
    synthetic(
        tmp_path / "table",
        SyntheticCluster(seed=8, datanodes=4, containers=60, blocks=5, chunks=8, order=order),
    )
    found = {}
    for engine in (LocalEngine(Gatherer(tmp_path / "scratch", threads=1)), SparkEngine(session)):
        out = tmp_path / engine.name
        request = SweepRequest(out, (str(tmp_path / "table"),), write_trees=True)
        found[engine.name] = packed_trees(out, sweep(request, engine, Quiet()).sweep_id)
        assert not list(out.glob("trees/*/.*"))
    assert found["spark"] == found["local"]
    assert found["spark"]


def test_of_replicas_with_one_root_sql_tells_those_that_differ(session: SparkSession) -> None:
    """What no checksum of the tree covers: lengths, and where chunks begin."""
    size, other = 4 << 20, 1 << 20

    def replica(container: int, node: str, *chunks: tuple[int, int]) -> list[tuple[object, ...]]:
        head = (node, "v", container, "CLOSED", 1, 0, 7)
        return [(*head, at, length, 11, True, False, "tree", 1, None) for at, length in chunks]

    rows = [
        *replica(1, "a", (0, size), (size, size)),
        *replica(1, "alike", (0, size), (size, size)),
        *replica(1, "shorter", (0, size), (size, size - 1)),
        # As many bytes as "a".
        *replica(1, "moved", (0, size + 1), (size, size - 1)),
        *replica(1, "scaled", (0, size + 1000), (size, size - 1000)),
        # As many and as long, but elsewhere.
        *replica(1, "elsewhere", (0, size), (other, size)),
        *replica(9, "a", (0, other), (other, 1000), (2 * other, 2000)),
        *replica(9, "swapped", (0, other), (other, 2000), (2 * other, 1000)),
        *(
            row
            for container in range(2, 9)
            for row in replica(container, "a", (0, other), (other, other))
        ),
    ]
    columns = [pa.array(column) for column in zip(*rows, strict=True)]
    table = pa.table(columns, CHUNK_SCHEMA.names).cast(CHUNK_SCHEMA)
    frame = session.createDataFrame(table)
    found = fold_frame(frame)
    assert not len(found.exact)
    for container in (1, 9):
        given = [row for row in found.replicas.to_pylist() if row["container_id"] == container]
        assert len({row["root"] for row in given}) == 1
        prints = {row["datanode"]: row["fingerprint"] for row in given}
        assert prints.pop("alike", prints["a"]) == prints["a"]
        assert len(set(prints.values())) == len(prints) > 1


def test_replicas_whose_names_have_one_hash_are_sorted(session: SparkSession) -> None:
    """The hash is a sum of products, so that what collides with a replica can be solved
    for.
    """

    def rows_of(*replicas: tuple[int, int]) -> DataFrame:
        rows = [
            ("a", "v", c, "CLOSED", bcs_id, 0, 7, 0, 9, 11, True, False, "tree", 1, None)
            for c, bcs_id in replicas
        ]
        columns = [pa.array(column) for column in zip(*rows, strict=True)]
        return session.createDataFrame(pa.table(columns, CHUNK_SCHEMA.names).cast(CHUNK_SCHEMA))

    def hashes(*replicas: tuple[int, int]) -> list[int]:
        with names_of(rows_of(*replicas)) as names:
            held = names.frame.toArrow().to_pylist()
        found = {(row["container_id"], row["bcs_id"]): row["name"] for row in held}
        return [found[replica] for replica in replicas]

    first, beyond, later = hashes((1, 0), (2, 0), (1, 1))
    bcs_id = (first - beyond) * pow(later - first, -1, 1 << 64) % (1 << 64)
    bcs_id -= (bcs_id >> 63) << 64
    alike = [(1, 0), (2, bcs_id)]
    assert len(set(hashes(*alike))) == 1
    rows = rows_of(*alike, (3, 0))
    found = fold_frame(rows)
    assert found.exact.tolist() == [1, 2]
    assert found.replicas["container_id"].to_pylist() == [3]


def test_a_damaged_page_of_rows_in_no_order_leaves_its_file_out(
    tmp_path: Path, session: SparkSession
) -> None:
    cluster = SyntheticCluster(
        seed=5, datanodes=4, containers=20, blocks=5, chunks=12, order=RowOrder.SHUFFLED
    )
    synthetic(tmp_path / "made", cluster)
    table = pa.concat_tables(
        pq.read_table(path) for path in sorted((tmp_path / "made").rglob("*.parquet"))
    )
    (tmp_path / "table").mkdir()
    good, bad = tmp_path / "table" / "good.parquet", tmp_path / "table" / "bad.parquet"
    for path, rows in ((good, table), (bad, table.slice(0, 500))):
        pq.write_table(
            rows, path, write_page_checksum=True, use_dictionary=False, compression="none"
        )
    column = pq.read_metadata(bad).row_group(0).column(CHUNK_SCHEMA.names.index("checksum"))
    raw = bytearray(bad.read_bytes())
    raw[column.data_page_offset + column.total_compressed_size // 2] ^= 4
    bad.write_bytes(raw)
    with pytest.raises(Py4JJavaError, match="CRC checksum verification failed"):
        session.read.parquet(str(bad)).selectExpr("sum(checksum)").collect()
    paths = {Scattered.SQL: {"exact", "sql"}, Scattered.EXACT: {"exact"}}
    local = agree(tmp_path, session, good, paths, bad)
    assert [one.input for one in local.skipped] == [str(bad)]


def test_what_was_not_read_is_unseen_on_spark_too(tmp_path: Path, session: SparkSession) -> None:
    synthetic(
        tmp_path / "table", SyntheticCluster(seed=4, datanodes=4, containers=60, blocks=5, chunks=8)
    )
    outs = {tmp_path / name: name for name in ("local", "spark")}
    for night in range(2):
        if night:
            chunks = sorted((tmp_path / "table").rglob("chunks-*"))[0]
            flip(chunks, chunks.stat().st_size // 2)
        for out, name in outs.items():
            scratch = Gatherer(tmp_path / "scratch", threads=1)
            engine = SparkEngine(session) if name == "spark" else LocalEngine(scratch)
            summary = swept(out, engine, tmp_path / "table")
    tables = [
        SweepStore(out, Disk()).read(table, SweepStore(out, Disk()).sweeps()[-1]).to_pylist()
        for table in (SweepTable.VERDICTS, SweepTable.UNSEEN)
        for out in outs
    ]
    for row in [row for table in tables[2:] for row in table]:
        # Each has sweeps of its own.
        del row["last_sweep"]
        row["reason"] = row["reason"].replace("/spark/", "/local/")
    assert tables[0] == tables[1]
    assert tables[2] == tables[3]
    assert summary.unseen == len(tables[2]) > 0
    assert {row["verdict"] for row in tables[0] if row["unread"]} <= {
        "UNSEEN",
        "REPAIRABLE",
        "CONFLICT",
    }


def test_a_failure_of_sql_is_a_note_with_its_cause(tmp_path: Path, session: SparkSession) -> None:
    failing = session.newSession()
    # Spark's own reader of Parquet cannot begin a batch of that size.
    failing.conf.set("spark.sql.parquet.columnarReaderBatchSize", "-1")
    cluster = SyntheticCluster(
        seed=5, datanodes=4, containers=20, blocks=5, chunks=12, order=RowOrder.SHUFFLED
    )
    truth = synthetic(tmp_path / "table", cluster)
    summary = swept(tmp_path / "out", SparkEngine(failing), tmp_path / "table")
    assert summary.paths.keys() == {"exact"}
    assert summary.diverged == tuple(damage.container_id for damage in truth.damages)
    (note,) = summary.notes
    assert "Spark SQL failed: " in note
    assert "NegativeArraySizeException" in note


def test_times_that_neither_python_nor_spark_has_are_no_trouble(
    tmp_path: Path, session: SparkSession
) -> None:
    cluster = SyntheticCluster(
        seed=5, datanodes=4, containers=20, blocks=5, chunks=12, order=RowOrder.SHUFFLED
    )
    synthetic(tmp_path / "made", cluster)
    table = pa.concat_tables(
        pq.read_table(path) for path in sorted((tmp_path / "made").rglob("*.parquet"))
    )
    times = pa.array([2**63 - 1] * table.num_rows).cast(CHUNK_SCHEMA.field("scanned_at").type)
    place = CHUNK_SCHEMA.names.index("scanned_at")
    pq.write_table(table.set_column(place, "scanned_at", times), tmp_path / "rows.parquet")
    swept_by = {}
    for engine in (LocalEngine(Gatherer(tmp_path / "scratch", threads=1)), SparkEngine(session)):
        summary = swept(tmp_path / engine.name, engine, tmp_path / "rows.parquet")
        swept_by[engine.name] = (
            summary.verdicts,
            summary.findings,
            summary.skipped,
            summary.replicas,
        )
    assert swept_by["spark"] == swept_by["local"]
    assert not summary.skipped


def test_the_last_offset_is_told_by_footers_that_know_it(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.parquet" for number in range(3)]
    for path, offsets in zip(paths, ([5, 300], [7], [None]), strict=True):
        pq.write_table(pa.table({"chunk_offset": pa.array(offsets, pa.int64())}), path)
    assert last_offset(map(pq.read_metadata, paths[:2])) == 300
    # It has no range: all is NULL.
    assert last_offset(map(pq.read_metadata, paths)) is None
