"""Parts of Parquet files: anybody's columns, statistics that spare decoding, files that
are torn, replicas moved on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest

from chunktable.errors import ChunkTableError
from chunktable.manifest import FileKind
from chunktable.places import LocalDestination
from chunktable.schema import CHUNK_SCHEMA, ReplicaAttributes, rows_of
from dnagent.export import ExportLimits, export
from merkle.columns import TreeColumns
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import ContainerId, ContainerTree
from runtime.disk import Disk
from sweep.exact import block_ranges, exact_replicas, large_replicas, trees_of
from sweep.files import DEFAULTS, PartFold, fold_part, is_readable, read_rows
from sweep.model import Part, PartKind
from sweep.runs import fold_batches, settle
from sweep.stages import by_replica
from tests.support.tables import MemoryWalk, blocks, current_rows, replica

CONTAINERS = 30


def rows() -> pa.Table:
    """Two datanodes with the same containers."""
    batches = []
    for datanode in ("dn-a", "dn-b"):
        for number in range(CONTAINERS):
            told = ReplicaAttributes(
                datanode, "", number, ReplicaState.CLOSED, 0, 0, "tree", 1_700_000_000_000
            )
            tree = ContainerTree.of(ContainerId(number), blocks(1 + number % 3, 2, seed=number))
            batches += rows_of(told, TreeColumns.of(tree)).batches()
    return pa.Table.from_batches(batches, CHUNK_SCHEMA)


def part(path: Path, first: int = 0, last: int | None = None, manifest: Path | None = None) -> Part:
    last = pq.ParquetFile(path).num_row_groups if last is None else last
    return Part(
        "p",
        PartKind.FILE,
        str(path),
        first,
        last,
        0,
        manifest=None if manifest is None else str(manifest),
    )


def write(path: Path, table: pa.Table, group_rows: int = 1 << 20, **options: Any) -> Path:
    pq.write_table(table, path, row_group_size=group_rows, **options)
    return path


def replicas(*folded: PartFold) -> pa.Table:
    assert not any(one.skipped or one.findings.num_rows for one in folded)
    settled = settle(pa.concat_tables([one.runs for one in folded]))
    whole = pa.concat_tables([settled.replicas, *(one.replicas for one in folded)])
    assert not len(settled.exact)
    return by_replica(whole).drop_columns("path")


def expected(table: pa.Table) -> pa.Table:
    return exact_replicas(table)[0].drop_columns("path")


def test_a_file_is_cut_between_row_groups_anywhere(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", rows(), 7)
    count = pq.ParquetFile(path).num_row_groups
    parts = [part(path, i, min(i + 4, count)) for i in range(0, count, 4)]
    folded = [fold_part(one) for one in parts]
    assert replicas(*folded) == expected(rows())
    assert sum(one.rows for one in folded) == rows().num_rows


@pytest.mark.parametrize(
    "options", [{"write_statistics": False}, {"use_dictionary": False}, {"compression": "none"}]
)
def test_statistics_and_encodings_change_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    assert replicas(
        fold_part(part(write(tmp_path / "t.parquet", rows(), 50, **options)))
    ) == expected(rows())


def test_columns_that_are_constant_are_not_decoded(tmp_path: Path) -> None:
    """Bytes of such a column are destroyed, and nothing notices."""
    path = write(tmp_path / "t.parquet", rows(), use_dictionary=False, compression="none")
    metadata = pq.ParquetFile(path).metadata.row_group(0)
    for name in ("state", "source", "matches", "scanned_at"):
        column = metadata.column(CHUNK_SCHEMA.names.index(name))
        with path.open("r+b") as file:
            file.seek(column.data_page_offset)
            file.write(b"\xff" * column.total_compressed_size)
    assert replicas(fold_part(part(path))) == expected(rows())


def _as(**types: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    def changed(table: pa.Table) -> pa.Table:
        for name, kind in types.items():
            table = table.set_column(
                table.schema.get_field_index(name), name, table[name].cast(kind)
            )
        return table

    return changed


@pytest.mark.parametrize(
    "foreign",
    [
        _as(
            container_id=pa.int32(),
            length=pa.uint16(),
            checksum=pa.uint32(),
            bcs_id=pa.int8(),
            block_id=pa.uint64(),
        ),
        # As large as they are, they are negative to some readers, in the statistics
        # above all.
        lambda table: (
            table.drop_columns(["bcs_id", "generation"])
            .append_column("bcs_id", pa.array([0xFFFF_FFFF] * table.num_rows, pa.uint32()))
            .append_column("generation", pa.array([(1 << 63) - 1] * table.num_rows, pa.uint64()))
        ),
        _as(container_id=pa.string(), length=pa.decimal128(20, 0), block_id=pa.float64()),
        _as(container_id=pa.uint32()),
        _as(
            datanode=pa.large_string(),
            state=pa.dictionary(pa.int8(), pa.large_string()),
            source=pa.string_view(),
        ),
        _as(scanned_at=pa.timestamp("us"), matches=pa.int8(), replica_index=pa.int64()),
        lambda table: table.drop_columns([*DEFAULTS]).append_column(
            "note", pa.nulls(table.num_rows)
        ),
        lambda table: table.add_column(
            0, "extra", pa.array([{"a": 1, "length": 2}] * table.num_rows)
        ),
        lambda table: table.select(sorted(CHUNK_SCHEMA.names)),
    ],
)
def test_tables_of_others_are_read(tmp_path: Path, foreign: Callable[[pa.Table], pa.Table]) -> None:
    table = foreign(rows())
    read = fold_part(part(write(tmp_path / "t.parquet", table, 20)))
    unsaid = [
        name
        for name in ("bcs_id", "generation", "scanned_at")
        if name not in table.column_names
        or table[name].cast(CHUNK_SCHEMA.field(name).type) != rows()[name]
    ]
    assert replicas(read).drop_columns(unsaid) == expected(rows()).drop_columns(unsaid)
    (container,) = [pa.Table.from_batches(read_rows(part(tmp_path / "t.parquet"), np.array([3])))]
    assert container.schema == CHUNK_SCHEMA
    chosen = rows().filter(pc.equal(rows()["container_id"], 3))
    assert container.drop_columns(unsaid) == chosen.drop_columns(unsaid)


def test_a_value_that_is_missing_sends_its_container_to_the_exact_path(tmp_path: Path) -> None:
    held = rows().to_pylist()
    held[0]["length"], held[5]["chunk_offset"] = None, -7
    table = pa.Table.from_pylist(
        held, pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])
    )
    path = write(tmp_path / "t.parquet", table)
    settled = settle(fold_part(part(path)).runs)
    hit = sorted({held[0]["container_id"], held[5]["container_id"]})
    assert settled.exact.tolist() == hit
    found = pa.Table.from_batches(read_rows(part(path), settled.exact))
    _, findings = exact_replicas(found)
    assert sorted(findings["container_id"].to_pylist()) == hit


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("datanode", None, "has rows without datanode"),
        ("volume", None, "has rows without volume"),
        ("container_id", None, "has rows without container_id"),
        ("state", "CLOSD", "has rows with the unknown state 'CLOSD'"),
        ("state", "closed", "has rows with the unknown state 'closed'"),
        ("source", "banana", "has rows with the unknown source 'banana'"),
    ],
)
@pytest.mark.parametrize("rows_spoilt", [1, 10_000])
def test_rows_of_nobody_and_words_that_mean_nothing_are_refused_by_name(
    tmp_path: Path, column: str, value: object, said: str, rows_spoilt: int
) -> None:
    held = rows().to_pylist()
    for row in held[:rows_spoilt]:
        row[column] = value
    nullable = pa.schema([field.with_nullable(True) for field in CHUNK_SCHEMA])
    path = write(tmp_path / "t.parquet", pa.Table.from_pylist(held, nullable))
    folded = fold_part(part(path))
    assert folded.runs.num_rows == 0
    assert said in folded.skipped


def _cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _hollow(path: Path) -> None:
    metadata = (
        pq.ParquetFile(path).metadata.row_group(1).column(CHUNK_SCHEMA.names.index("checksum"))
    )
    with path.open("r+b") as file:
        file.seek(metadata.data_page_offset)
        file.write(bytes(metadata.total_compressed_size))


def _flipped(path: Path) -> None:
    """One bit of a page, which its checksum tells."""
    metadata = (
        pq.ParquetFile(path).metadata.row_group(1).column(CHUNK_SCHEMA.names.index("checksum"))
    )
    at = metadata.data_page_offset + metadata.total_compressed_size - 1
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    "damage", [_cut_short, _hollow, _flipped, Path.unlink, lambda path: path.write_bytes(b"")]
)
def test_a_broken_file_is_a_finding_without_runs(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = write(tmp_path / "t.parquet", rows(), 50, use_dictionary=False, write_page_checksum=True)
    whole = part(path)
    damage(path)
    folded = fold_part(whole)
    assert (folded.runs.num_rows, folded.rows) == (0, 0)
    assert folded.skipped
    (finding,) = folded.findings.to_pylist()
    assert (finding["kind"], finding["container_id"]) == ("unreadable", None)
    assert str(path) in finding["detail"]
    with pytest.raises(ChunkTableError):
        list(read_rows(whole, np.arange(CONTAINERS)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop_columns(["checksum", "length"]), "no column length, checksum"),
        (_as(container_id=pa.string()), "cannot be read"),
        (
            lambda t: t.set_column(8, "length", pa.array([1 << 63] * t.num_rows, pa.uint64())),
            "cannot be read",
        ),
    ],
)
def test_columns_that_cannot_be_taken_for_ours_are_a_finding(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table], said: str
) -> None:
    table = rows().set_column(2, "container_id", pc.add(rows()["container_id"], 1))
    table = change(table)
    if table.schema.field("container_id").type == pa.string():
        table = table.set_column(2, "container_id", pa.array(["nonsense"] * table.num_rows))
    folded = fold_part(part(write(tmp_path / "t.parquet", table)))
    assert said in folded.skipped
    assert not folded.runs.num_rows


def test_only_row_groups_that_may_hold_a_container_are_read(tmp_path: Path) -> None:
    table = rows().sort_by("container_id")
    path = write(tmp_path / "t.parquet", table, 20, use_dictionary=False, write_page_checksum=True)
    whole = part(path)
    _flipped(path)
    # The damage is in containers 1 to 9.
    assert sum(batch.num_rows for batch in read_rows(whole, np.array([-5, 20, 25, 1000]))) > 0
    assert list(read_rows(whole, np.array([-5, 1000]))) == []
    with pytest.raises(ChunkTableError):
        list(read_rows(whole, np.arange(10)))


def test_a_column_that_is_there_twice_is_a_finding(tmp_path: Path) -> None:
    table = rows()
    path = write(tmp_path / "t.parquet", table.append_column("checksum", table["checksum"]))
    folded = fold_part(part(path))
    assert folded.skipped == f"{path} has more than one column checksum"
    assert not folded.runs.num_rows


@pytest.mark.parametrize("time_ms", [253_402_300_800_000, (1 << 63) - 1, 1 - (1 << 63)])
def test_times_beyond_those_of_python_are_read(tmp_path: Path, time_ms: int) -> None:
    times = pa.array([time_ms] * rows().num_rows).cast(CHUNK_SCHEMA.field("scanned_at").type)
    table = rows().set_column(CHUNK_SCHEMA.names.index("scanned_at"), "scanned_at", times)
    held = replicas(fold_part(part(write(tmp_path / "t.parquet", table))))
    assert held == expected(table)
    assert held["scanned_at"].cast(pa.int64()).unique().to_pylist() == [time_ms]
    assert len(list(trees_of(table))) == held.num_rows
    large, _ = large_replicas(block_ranges(table.filter(pc.equal(table["container_id"], 2)), 3))
    assert large["scanned_at"].cast(pa.int64()).unique().to_pylist() == [time_ms]


def test_rows_scattered_over_a_file_join_to_a_run_a_replica(tmp_path: Path) -> None:
    """Blocks of all replicas in turn, and more runs than are kept before they are
    joined.
    """
    count = 220_000
    numbers = np.arange(count)
    columns: dict[str, Any] = {
        "datanode": pa.array(["dn-a", "dn-b"]).take(pa.array(numbers % 2)),
        "container_id": numbers // 2 % 5,
        "block_id": numbers // 10,
        "chunk_offset": np.zeros(count, np.int64),
        "length": np.ones(count, np.int64),
        "checksum": numbers // 2,
    }
    path = write(tmp_path / "t.parquet", pa.table(columns))
    folded = fold_part(part(path))
    assert folded.runs.num_rows == 10
    found = settle(folded.runs)
    assert not len(found.exact)
    assert found.replicas["chunks"].to_pylist() == [
        int(np.count_nonzero((numbers // 2 % 5 == i // 2) & (numbers % 2 == i % 2)))
        for i in range(10)
    ]
    ordered = pa.Table.from_batches(read_rows(part(path), np.arange(5))).sort_by(
        [(name, "ascending") for name in ("datanode", "container_id", "block_id")]
    )
    assert settle(fold_batches(ordered.combine_chunks().to_batches())).replicas == found.replicas


def test_replicas_that_an_export_holds_in_another_file_by_now_are_left_out(tmp_path: Path) -> None:
    walk, other = MemoryWalk(), MemoryWalk("DS-2")
    walk.put(*(replica(number, *blocks(number)) for number in (1, 2, 3)))
    other.put(replica(4, *blocks(2)))
    folder = LocalDestination(tmp_path, Disk())
    limits = ExportLimits(small_files_max=10)
    export([walk, other], (), folder, source=TreeSource.TREE, limits=limits)
    walk.put(replica(2, *blocks(3, seed=1)))
    del walk.replicas_held[3]
    manifest = export([walk, other], (), folder, source=TreeSource.TREE, limits=limits).manifest
    tables = manifest.of_kind(FileKind.CHUNKS)
    assert len(tables) > 1
    parts = [
        part(tmp_path / one.name, last=one.rows, manifest=tmp_path / manifest.name)
        for one in tables
    ]
    current = current_rows(pa_fs.LocalFileSystem(), str(tmp_path), manifest)
    assert replicas(*map(fold_part, parts)) == expected(current)
    moved = [
        row
        for one in parts
        for batch in read_rows(one, np.array([2, 3, 4]))
        for row in batch.to_pylist()
    ]
    assert {row["container_id"] for row in moved} == {2, 4}
    assert len(moved) == 6 + 4
    numbers = [row["container_id"] for row in current.select(["container_id"]).to_pylist()]
    damaged = next(
        one
        for one in parts
        if is_readable(one, np.array([2])) and list(read_rows(one, np.array([2])))
    )
    raw = bytearray(Path(damaged.location).read_bytes())
    raw[-20] ^= 1
    Path(damaged.location).write_bytes(raw)
    assert not is_readable(damaged, np.array(numbers))
    assert is_readable(damaged, np.array([99]))
    assert list(read_rows(damaged, np.array([99]))) == []
    assert "checksum" in fold_part(damaged).skipped
    (tmp_path / manifest.name).write_bytes(b"{}")
    assert not is_readable(parts[0], np.array(numbers))
    assert fold_part(parts[0]).skipped
