"""An export writes what changed, keeps two tables, tells of repairs and deletes, and
says what it could not read.
"""

import json
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest

from chunktable.errors import ChunkTableError
from chunktable.manifest import FileKind, SkippedVolume, manifest_name
from chunktable.places import LocalDestination, ObjectDestination
from chunktable.reader import (
    check_content,
    latest_manifest,
    read_events,
    read_faults,
    read_inventory,
)
from chunktable.schema import CHUNK_SCHEMA, ROW_ORDER, VERSION
from dnagent.export import ExportLimits, ExportResult, export
from dnagent.export_schedule import ScheduledExport
from dnagent.metrics import AGENT_METRICS
from merkle.replica import TreeSource
from merkle.tree import BlockId, BlockTree, ChunkTree
from ozone.survey import ReplicaFault
from repair.audit import AuditLog
from runtime.disk import Disk
from runtime.errors import BusyError, DiskError, OperationInterruptedError
from runtime.metrics import Metrics
from tests.support.tables import DATANODE, MemoryWalk, blocks, current_rows, replica, trees_of
from tests.support.trees import deleted
from tests.support.waiting import wait_until

LOCAL = pa_fs.LocalFileSystem()
AT = datetime(2026, 11, 22, 3, 0, 0, tzinfo=UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "table"


def run(
    folder: Path, *walks: MemoryWalk, disk: Disk | None = None, **options: object
) -> ExportResult:
    options = {"source": TreeSource.TREE, "skipped": []} | options
    return export(walks, destination=LocalDestination(folder, disk or Disk()), **options)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def chunk_files(done: ExportResult) -> list[str]:
    return [file.name for file in done.manifest.of_kind(FileKind.CHUNKS)]


def test_rows_are_sorted_whole_and_encoded_in_groups_and_files_of_bounded_size(
    folder: Path,
) -> None:
    walks = [MemoryWalk("DS-2"), MemoryWalk("DS-1")]
    for walk in walks:
        walk.put(*(replica(i, *blocks(4, 5)) for i in (7, 3, 11)))
    done = run(folder, *walks, limits=ExportLimits(group_rows=8, file_rows_max=50))
    files = [pq.ParquetFile(folder / name) for name in chunk_files(done)]
    assert [file.metadata.num_rows for file in files] == [40, 40, 40]
    places, seen = [], set()
    for file in files:
        assert file.schema_arrow.field("checksum").type == pa.uint32()
        assert pa.schema(file.schema_arrow).empty_table().cast(CHUNK_SCHEMA).num_rows == 0
        assert [file.metadata.row_group(i).num_rows for i in range(2)] == [20, 20]
        for column in range(file.metadata.num_columns):
            described = file.metadata.row_group(0).column(column)
            name = described.path_in_schema
            # Compressing so few rows would not pay.
            assert described.compression == "UNCOMPRESSED"
            assert ("RLE_DICTIONARY" in described.encodings) == (
                name not in ("checksum", "matches", "deleted")
            )
            assert "DELTA_BINARY_PACKED" not in described.encodings
            assert described.has_offset_index
            assert described.is_stats_set
        declared = file.metadata.row_group(0).sorting_columns
        assert [CHUNK_SCHEMA.names[one.column_index] for one in declared] == list(ROW_ORDER)
        rows = file.read().to_pylist()
        places += [
            (r["datanode"], r["volume"], r["container_id"], r["block_id"], r["chunk_offset"])
            for r in rows
        ]
        held = {(row["volume"], row["container_id"]) for row in rows}
        assert not held & seen
        seen |= held
    assert places == sorted(set(places))
    assert len(places) == done.manifest.rows == done.rows_written == 120


def test_checksums_of_more_than_32_bits_widen_the_files_that_have_them(folder: Path) -> None:
    walk = MemoryWalk()
    wide = BlockTree.live(BlockId(1), [ChunkTree(0, 4, 1 << 32, True), ChunkTree(4, 4, 7, True)])
    negative = BlockTree.tombstone(BlockId(1), -1)
    walk.put(*(replica(i, *blocks(4, 5)) for i in (1, 2, 4, 6)))
    walk.put(replica(3, wide), replica(5, negative))
    done = run(folder, walk, limits=ExportLimits(group_rows=8))
    files = [pq.ParquetFile(folder / name) for name in chunk_files(done)]
    assert [file.schema_arrow.field("checksum").type for file in files] == [pa.uint32(), pa.int64()]
    assert [sorted(set(file.read()["container_id"].to_pylist())) for file in files] == [
        [1, 2],
        [3, 4, 5, 6],
    ]
    rows = current_rows(pa_fs.LocalFileSystem(), str(folder), done.manifest)
    assert set(rows["checksum"].to_pylist()) >= {1 << 32, -1}
    # Rows of a wide file stay wide once they are moved, and no longer.
    del walk.replicas_held[3], walk.replicas_held[5]
    for _ in range(2):
        done = run(folder, walk, limits=ExportLimits(small_files_max=0))
    types = {pq.read_schema(folder / name).field("checksum").type for name in chunk_files(done)}
    assert types == {pa.uint32()}


@pytest.mark.parametrize(
    ("chunks_each", "packed"),
    [(64, set()), (1, {"block_id", "length"}), (3, {"block_id", "length"})],
)
def test_columns_that_hardly_repeat_are_packed_as_differences(
    folder: Path, chunks_each: int, packed: set[str]
) -> None:
    walk = MemoryWalk()
    held = [
        BlockTree.live(
            BlockId(i),
            [ChunkTree(j * 4096, 4096 if j else i, i, True) for j in range(chunks_each)],
        )
        for i in range(1, 500)
    ]
    walk.put(replica(1, *held))
    (name,) = chunk_files(run(folder, walk))
    metadata = pq.read_metadata(folder / name).row_group(0)
    columns = [metadata.column(i) for i in range(metadata.num_columns)]
    found = {c.path_in_schema for c in columns if "DELTA_BINARY_PACKED" in c.encodings}
    assert found == packed


def test_a_replica_with_more_rows_than_a_file_may_have_gets_one_of_its_own(folder: Path) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(2)), replica(2, *blocks(30)), replica(3, *blocks(2)))
    done = run(folder, walk, limits=ExportLimits(group_rows=8, file_rows_max=10))
    assert [pq.ParquetFile(folder / name).metadata.num_rows for name in chunk_files(done)] == [
        4,
        60,
        4,
    ]


def test_what_did_not_change_stays_where_it_is(folder: Path) -> None:
    walk = MemoryWalk()
    walk.put(*(replica(i, *blocks(3)) for i in (1, 2, 3, 4)))
    first = run(folder, walk)
    # A scan that finds nothing new is no change.
    walk.put(
        replica(1, *blocks(3), scanned_at_ms=1_800_000_000_000), replica(2, *blocks(3, seed=1))
    )
    second = run(folder, walk)
    assert (second.containers_written, second.rows_written) == (1, 6)
    assert chunk_files(second)[0] == chunk_files(first)[0]
    inventory = read_inventory(LOCAL, str(folder), second.manifest).to_pylist()
    assert [(row["container_id"], row["file"] == chunk_files(first)[0]) for row in inventory] == [
        (1, True),
        (2, False),
        (3, True),
        (4, True),
    ]
    assert run(folder, walk).containers_written == 0
    full = run(folder, walk, full=True)
    assert (full.containers_written, len(chunk_files(full))) == (4, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda: replica(1, *blocks(3), bcs_id=8),
        lambda: replica(1, *blocks(3), source=TreeSource.METADATA),
        lambda: replica(1, *blocks(2)),
        lambda: replica(1, *blocks(2), deleted(3, 5)),
        lambda: replica(1, *blocks(3), source=None),
    ],
)
def test_whatever_changed_is_written(folder: Path, change: Callable[[], object]) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)), replica(2, *blocks(9)))
    run(folder, walk)
    walk.put(change())
    assert run(folder, walk).containers_written == 1


def test_the_last_two_tables_are_kept_and_nothing_else(folder: Path) -> None:
    walk, manifests = MemoryWalk(), []
    for seed in range(4):
        walk.put(replica(1, *blocks(3, seed=seed)))
        manifests.append(run(folder, walk).manifest)
    kept = {manifest.name for manifest in manifests[2:]} | {
        f.name for m in manifests[2:] for f in m.files
    }
    assert names(folder) == kept
    # The one before is as readable as it was.
    rows = current_rows(LOCAL, str(folder), manifests[2])
    assert trees_of(rows) == {("DS-1", 1): replica(1, *blocks(3, seed=2)).tree}


def test_files_of_others_in_the_folder_stay(folder: Path) -> None:
    folder.mkdir()
    for name in ("notes.txt", "chunks.parquet", "manifest-1.json"):
        (folder / name).write_text("mine")
    (folder / "chunks-000000001-0123abcd-0001.parquet.tmp").write_text("left by a crash")
    (folder / "chunks-000000001-0123abcd-0001.parquet").write_text("left by a crash")
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    done = run(folder, walk)
    ours = {file.name for file in done.manifest.files} | {done.manifest.name}
    assert names(folder) == ours | {"notes.txt", "chunks.parquet", "manifest-1.json"}


def test_repairs_and_deletes_are_events_each_once(folder: Path, tmp_path: Path) -> None:
    path, walk = tmp_path / "audit.jsonl", MemoryWalk()
    walk.put(replica(1, *blocks(3)), replica(2, *blocks(3)))
    audit = AuditLog(path)
    audit.write(container=2, block=7, offset=4096, length=1024, source="dn-3", job="j1")
    audit.write(container=1, block=9, offset=0, length=2048, source="dn-3", job="j2")
    first = run(folder, walk, audit_file=path)
    audit.delete(1, [3])
    audit.return_to_service(1, "CLOSED", "j3")
    audit.refused(who="operator/alice", what="S/M", why="no role")
    with path.open("ab") as file:
        file.write(
            b'{"time": "2026-11-22T03:00:00+00:00", "container": 1}\nnonsense\n[1]\n{"time":'
            b' "cut sh'
        )
    del walk.replicas_held[2]
    second = run(folder, walk, audit_file=path)
    third = run(folder, walk, audit_file=path)
    assert (first.events, second.events, third.events) == (2, 2, 0)
    keys = ("kind", "container_id", "block_id", "chunk_offset", "length", "job")
    rows = [
        tuple(row[key] for key in keys)
        for row in read_events(LOCAL, str(folder), third.manifest).to_pylist()
    ]
    assert rows == [
        ("repair", 1, 9, 0, 2048, "j2"),
        ("repair", 2, 7, 4096, 1024, "j1"),
        ("delete", 1, 3, None, 0, ""),
        ("delete", 2, None, None, 0, ""),
    ]
    audit.close()


def test_events_are_read_on_over_audit_files_that_became_full(folder: Path, tmp_path: Path) -> None:
    path, walk = tmp_path / "audit.jsonl", MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    audit = AuditLog(path, file_bytes_max=800)

    def write(count: int) -> None:
        for block in range(count):
            audit.write(container=1, block=block, offset=0, length=1, source="dn-3", job="j1")

    write(1)
    assert run(folder, walk, audit_file=path).events == 1
    write(9)
    assert len(list(tmp_path.glob("audit-*.jsonl"))) > 1
    assert run(folder, walk, audit_file=path).events == 9
    assert run(folder, walk, audit_file=path).events == 0
    write(1)
    audit.close()
    assert run(folder, walk, audit_file=path).events == 1


def test_an_audit_file_that_was_begun_anew_is_read_from_its_start(
    folder: Path, tmp_path: Path
) -> None:
    path, walk = tmp_path / "audit.jsonl", MemoryWalk()
    walk.put(replica(1, *blocks(3)))

    def write(*blocks: int) -> None:
        audit = AuditLog(path)
        for block in blocks:
            audit.write(container=1, block=block, offset=0, length=1, source="dn-3", job="j1")
        audit.close()

    assert run(folder, walk, audit_file=path).events == 0
    write(1, 2)
    # Without the file nothing of it is passed over.
    assert run(folder, walk).events == 0
    assert run(folder, walk, audit_file=path).events == 2
    path.unlink()
    write(3, 4, 5)
    assert run(folder, walk, audit_file=path).events == 3
    path.unlink()
    write(6)
    assert run(folder, walk, audit_file=path).events == 1


def test_events_are_kept_for_a_time_and_in_files_of_bounded_size(
    folder: Path, tmp_path: Path
) -> None:
    path, walk = tmp_path / "audit.jsonl", MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    audit = AuditLog(path)
    for block in range(5):
        audit.write(container=1, block=block, offset=0, length=1, source="dn-3", job="j1")
    audit.close()
    kept = []
    for days in (0, 34, 36):
        now = AT + timedelta(days=days)
        done = run(
            folder,
            walk,
            audit_file=path,
            limits=ExportLimits(piece_rows=2),
            now=lambda now=now: now,
        )
        kept.append([file.rows for file in done.manifest.of_kind(FileKind.EVENTS)])
    assert kept == [[2, 2, 1], [2, 2, 1], []]


def test_faults_and_volumes_that_are_not_there_are_named(folder: Path) -> None:
    walk = MemoryWalk(fault=ReplicaFault("unreadable", "no database"))
    walk.put(
        replica(
            1, *blocks(1), faults=(ReplicaFault("CORRUPT_CHUNK", "2 of 3 windows differ", 1, 4096),)
        ),
        replica(
            2, source=None, faults=(ReplicaFault("unreadable", "a name that is no text: \udcff"),)
        ),
    )
    skipped = [SkippedVolume("/data/9", "volume_invalid", "no folder hdds")]
    done = run(folder, walk, skipped=skipped, limits=ExportLimits(piece_rows=2))
    assert done.faults == 4
    assert done.manifest.skipped == tuple(skipped)
    assert done.manifest.begun_at <= done.manifest.files[0].created_at <= done.manifest.created_at
    rows = read_faults(LOCAL, str(folder), done.manifest).to_pylist()
    assert sorted(
        (row["volume"], row["container_id"] or 0, row["kind"], row["chunk_offset"]) for row in rows
    ) == [
        ("/data/9", 0, "unreadable", None),
        ("DS-1", 0, "unreadable", None),
        ("DS-1", 1, "CORRUPT_CHUNK", 4096),
        ("DS-1", 2, "unreadable", None),
    ]
    assert trees_of(current_rows(LOCAL, str(folder), done.manifest))[("DS-1", 2)] is None


def test_the_age_of_volumes_is_told_as_far_as_it_is_known(folder: Path) -> None:
    done = run(folder, MemoryWalk("DS-2", created_ms=5), MemoryWalk("DS-1"))
    assert done.manifest.volumes == ("DS-1", "DS-2")
    assert done.manifest.volumes_created_ms == {"DS-2": 5}


def test_a_volume_that_is_not_read_any_more_leaves_the_table_and_deleted_nothing(
    folder: Path,
) -> None:
    walks = [MemoryWalk("DS-1"), MemoryWalk("DS-2")]
    for walk in walks:
        walk.put(replica(1, *blocks(3)))
    run(folder, *walks)
    done = run(folder, walks[0])
    assert (done.manifest.containers, done.lost_volumes, done.events) == (1, ("DS-2",), 0)
    assert done.manifest.volumes == ("DS-1",)


def test_a_damaged_table_is_made_anew(folder: Path) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    first = run(folder, walk)
    for file in first.manifest.files:
        (folder / file.name).write_bytes(b"")
    done = run(folder, walk)
    assert (done.manifest.sequence, done.manifest.previous, done.containers_written) == (2, None, 1)
    assert latest_manifest(LOCAL, str(folder)) == done.manifest
    assert names(folder) == {done.manifest.name} | {file.name for file in done.manifest.files}


def test_a_table_of_a_newer_release_is_not_touched(folder: Path) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    run(folder, walk)
    newer = json.dumps({"format": "treefold-chunk-table", "version": VERSION + 1})
    (folder / manifest_name(2)).write_text(newer)
    before = names(folder)
    with pytest.raises(ChunkTableError) as refused:
        run(folder, walk)
    assert refused.value.reason == "newer_version"
    assert names(folder) == before


def test_a_file_that_cannot_be_rewritten_is_named_and_a_full_export_does_without_it(
    folder: Path,
) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)), replica(2, *blocks(9)))
    first = run(folder, walk)
    path = folder / chunk_files(first)[0]
    data = bytearray(path.read_bytes())
    for at in range(100, 1000):
        data[at] ^= 0x55
    path.write_bytes(data)
    walk.put(replica(2, *blocks(9, seed=1)))
    before = names(folder)
    bucket = ObjectDestination(pa_fs.SubTreeFileSystem(str(folder), LOCAL), "")
    with pytest.raises(ChunkTableError, match=re.escape(path.name)) as refused:
        export([walk], (), bucket, source=TreeSource.TREE)
    assert "--full" in refused.value.hint
    assert names(folder) == before
    assert latest_manifest(LOCAL, str(folder)) == first.manifest
    done = run(folder, walk, full=True)
    assert (
        trees_of(current_rows(LOCAL, str(folder), done.manifest))[("DS-1", 1)]
        == replica(1, *blocks(3)).tree
    )


def test_a_file_that_rotted_is_written_anew_and_its_size_does_not_hide_it(
    folder: Path, tmp_path: Path
) -> None:
    walk, audit_file = MemoryWalk(), tmp_path / "audit.jsonl"
    walk.put(replica(1, *blocks(3)), replica(2, *blocks(2)))
    audit = AuditLog(audit_file)
    audit.write(container=1, block=10, offset=0, length=4, source="dn-3", job="j1")
    audit.close()
    run(folder, walk, audit_file=audit_file)
    walk.put(replica(3, *blocks(1)))
    second = run(folder, walk, audit_file=audit_file).manifest
    assert run(folder, walk, audit_file=audit_file).containers_written == 0
    for kind in (FileKind.CHUNKS, FileKind.EVENTS):
        path = folder / second.of_kind(kind)[0].name
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    done = run(folder, walk, audit_file=audit_file)
    assert done.containers_written == 2
    for file in done.manifest.files:
        check_content(LOCAL, str(folder), file)
    expected = {("DS-1", i): found.tree for i, found in walk.replicas_held.items()}
    assert trees_of(current_rows(LOCAL, str(folder), done.manifest)) == expected
    assert read_events(LOCAL, str(folder), done.manifest)["container_id"].to_pylist() == [1]


def test_who_has_an_audit_file_says_so_before_anything_was_repaired(
    folder: Path, tmp_path: Path
) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    assert run(folder, walk).manifest.audit is None
    assert run(folder, walk, audit_file=tmp_path / "audit.jsonl").manifest.audit is not None
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.write(container=1, block=10, offset=0, length=4, source="dn-3", job="j1")
    audit.close()
    assert run(folder, walk, audit_file=tmp_path / "audit.jsonl").events == 1


def test_many_small_files_become_one(folder: Path) -> None:
    walk, sizes = MemoryWalk(), []
    for i in range(8):
        walk.put(replica(i, *blocks(2)))
        sizes.append(len(chunk_files(run(folder, walk, limits=ExportLimits(small_files_max=3)))))
    assert sizes == [1, 2, 3, 4, 2, 3, 4, 2]
    expected = {("DS-1", i): found.tree for i, found in walk.replicas_held.items()}
    assert (
        trees_of(current_rows(LOCAL, str(folder), latest_manifest(LOCAL, str(folder)))) == expected
    )


def test_two_exports_to_one_folder_do_not_run_at_once(folder: Path) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    with LocalDestination(folder, Disk()).exclusive(), pytest.raises(BusyError):
        run(folder, walk)
    assert run(folder, walk).manifest.sequence == 1


def test_an_export_that_is_cut_short_leaves_the_table_as_it_was(folder: Path) -> None:
    walk = MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    run(folder, walk)
    before = names(folder)
    walk.put(*(replica(i, *blocks(3)) for i in range(2, 9)))
    calls = iter([False] * 5 + [True] * 100)
    with pytest.raises(OperationInterruptedError):
        run(folder, walk, cancelled=lambda: next(calls))
    assert names(folder) == before


class _Fake:
    """Exports that are scheduled: what each ends with is given."""

    def __init__(self, folder: Path, *ends: Exception | None) -> None:
        self.calls: list[bool] = []
        self._ends = list(ends)
        self._walk = MemoryWalk()
        self._walk.put(replica(1, *blocks(3)))
        self._folder = folder

    def __call__(self, full: bool, cancelled: Callable[[], bool]) -> ExportResult:
        self.calls.append(full)
        end = self._ends.pop(0) if self._ends else None
        if end is not None:
            raise end
        return run(self._folder, self._walk, full=full, cancelled=cancelled)


def test_exports_go_on_after_a_failure_and_make_a_damaged_table_anew(folder: Path) -> None:
    metrics = Metrics(AGENT_METRICS)
    errors = DiskError("no space"), ChunkTableError("unreadable", "a file"), OSError("unforeseen")
    exports = _Fake(folder, *errors, None)
    running = ScheduledExport(exports, lambda: None, interval_s=0.01, metrics=metrics)
    running.start()
    try:
        wait_until(
            lambda: metrics.value("dnagent_exports_total", outcome="done") >= 2, "two exports"
        )
    finally:
        running.stop()
    assert exports.calls[:5] == [False, False, True, False, False]
    assert metrics.value("dnagent_exports_total", outcome="failed") == 3
    assert metrics.value("dnagent_thread_failures_total", thread="export") == 1
    assert metrics.value("dnagent_export_table_rows") == 6
    assert metrics.value("dnagent_exported_rows_total") == 6


@pytest.mark.parametrize(
    ("age", "is_due"),
    [
        (timedelta(hours=2), True),
        (timedelta(minutes=1), False),
        (timedelta(days=-30), False),
        (None, True),
    ],
)
def test_a_restart_waits_until_the_next_export_is_due(
    folder: Path, age: timedelta | None, is_due: bool
) -> None:
    exports, asked = _Fake(folder), threading.Event()

    def last() -> datetime | None:
        asked.set()
        return None if age is None else datetime.now(UTC) - age

    running = ScheduledExport(exports, last, interval_s=3600, metrics=Metrics(AGENT_METRICS))
    running.start()
    try:
        assert asked.wait(60)
        if is_due:
            wait_until(lambda: bool(exports.calls), "the export")
    finally:
        running.stop()
    assert bool(exports.calls) == is_due


def test_the_audit_file_is_read_as_it_was_marked(folder: Path, tmp_path: Path) -> None:
    path, walk = tmp_path / "audit.jsonl", MemoryWalk()
    walk.put(replica(1, *blocks(3)))
    path.write_text(json.dumps({"time": AT.isoformat(), "container": 1}) + "\n")
    mark = run(folder, walk, audit_file=path).manifest.audit
    assert mark is not None
    assert mark.length_bytes == path.stat().st_size
    assert run(folder, walk, audit_file=tmp_path / "nothing").manifest.audit == mark
    assert DATANODE in run(folder, walk, audit_file=path).manifest.datanode
