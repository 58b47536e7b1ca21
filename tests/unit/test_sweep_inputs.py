"""What a sweep reads of what it is given, and what it skips by name."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from protos.chunk_table import FileKind, latest_manifest, place_of
from spark.inputs import is_unchanged, table_parts
from spark.synthetic import Cluster, Order, synthetic
from tests.support.sweeps import run

SMALL = Cluster(seed=6, datanodes=3, containers=30, blocks=4, chunks=4, damage={})


@pytest.fixture
def exports(tmp_path: Path) -> list[Path]:
    synthetic(tmp_path / "table", SMALL)
    return sorted((tmp_path / "table").iterdir())


def test_exports_are_found_at_any_depth(tmp_path: Path, exports: list[Path]) -> None:
    deep = tmp_path / "a" / "b"
    deep.parent.mkdir()
    (tmp_path / "table").rename(deep)
    found = table_parts([str(tmp_path)])
    assert (len(found.parts), len(found.manifests), found.skipped) == (3, 3, ())


def test_of_a_datanode_with_two_exports_the_newest_counts(tmp_path: Path, exports: list[Path]) -> None:
    synthetic(tmp_path / "copy", SMALL)
    older = tmp_path / "copy" / exports[0].name
    manifest = latest_manifest(*place_of(str(older)))
    aged = replace(manifest, created_at=manifest.created_at.replace(year=2001))
    (older / manifest.name).write_bytes(aged.to_bytes())
    found = table_parts([str(older), *map(str, exports)])
    assert sorted(part.location for part in found.parts) == sorted(str(next(e.glob("chunks-*"))) for e in exports)
    assert found.skipped == ()


def test_a_folder_that_may_not_be_listed_costs_what_is_in_it_and_nothing_else() -> None:
    # Nothing is forbidden to root, and to nobody all that pytest makes.
    with tempfile.TemporaryDirectory() as name:
        table = Path(name) / "table"
        synthetic(table, SMALL)
        Path(name).chmod(0o755)
        forbidden, *others = sorted(table.iterdir())
        forbidden.chmod(0)
        me = os.geteuid()
        try:
            if me == 0:
                os.seteuid(65534)
            found = table_parts([str(table)])
        finally:
            os.seteuid(me)
            forbidden.chmod(0o755)
    assert [one.input for one in found.skipped] == [str(forbidden)]
    assert "Permission denied" in found.skipped[0].reason
    assert [Path(part.location).parent for part in found.parts] == others


@pytest.mark.parametrize("harm", ["manifest lost", "manifest changed", "file lost", "file cut", "newer version"])
def test_a_broken_export_is_skipped_by_name_and_no_container_diverges(
    tmp_path: Path, exports: list[Path], harm: str
) -> None:
    broken = exports[1]
    (manifest,), (chunks,) = broken.glob("manifest-*"), broken.glob("chunks-*")
    match harm:
        case "manifest lost":
            manifest.unlink()
        case "manifest changed":
            manifest.write_bytes(manifest.read_bytes().replace(b'"rows": ', b'"rows": 1'))
        case "file lost":
            chunks.unlink()
        case "file cut":
            chunks.write_bytes(chunks.read_bytes()[:-1])
        case "newer version":
            manifest.write_bytes(manifest.read_bytes().replace(b'"version": 1', b'"version": 2'))
    summary = run(tmp_path / "out", tmp_path / "table")
    assert [one.input for one in summary.skipped] == [str(broken)]
    assert summary.diverged == ()
    assert summary.findings == {"unreadable": 1}
    assert 0 < summary.replicas < 3 * SMALL.containers


def test_a_file_whose_pages_are_broken_takes_its_whole_export_out_of_the_sweep(
    tmp_path: Path, exports: list[Path]
) -> None:
    """Half a replica would pass for a damaged one."""
    (chunks,) = exports[1].glob("chunks-*")
    raw = bytearray(chunks.read_bytes())
    raw[len(raw) // 3 : len(raw) // 2] = bytes(len(raw) // 2 - len(raw) // 3)
    chunks.write_bytes(raw)
    summary = run(tmp_path / "out", tmp_path / "table")
    assert len(summary.skipped) == 1
    assert str(exports[1]) in summary.skipped[0].input
    assert summary.diverged == ()
    assert summary.replicas == sum(
        latest_manifest(*place_of(str(export))).containers for export in (exports[0], exports[2])
    )


def test_plain_files_need_no_manifest_and_foreign_ones_are_skipped(tmp_path: Path) -> None:
    truth = synthetic(tmp_path / "table", replace(SMALL, order=Order.SHUFFLED))
    pq.write_table(pa.table({"x": [1]}), tmp_path / "table" / "other.parquet")
    (tmp_path / "table" / "torn.parquet").write_bytes(b"PAR1")
    (tmp_path / "table" / "_temporary.parquet").write_bytes(b"")
    found = table_parts([str(tmp_path / "table")])
    assert sum(part.rows for part in found.parts) == truth.rows
    assert [Path(one.input).name for one in found.skipped] == ["other.parquet", "torn.parquet"]
    assert "datanode" in found.skipped[0].reason


def test_a_file_that_is_given_twice_is_read_once(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=Order.SHUFFLED))
    (first, *_) = sorted((tmp_path / "table").glob("*.parquet"))
    assert len(table_parts([str(first), str(tmp_path / "table")]).parts) == 3


def test_large_files_are_cut_between_row_groups(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=Order.SHUFFLED))
    (first, *_) = sorted((tmp_path / "table").glob("*.parquet"))
    table = pq.read_table(first)
    pq.write_table(table, first, row_group_size=10)
    found = table_parts([str(first)], part_rows=25)
    assert [(part.first, part.rows) for part in found.parts][:2] == [(0, 20), (2, 20)]
    assert sum(part.rows for part in found.parts) == table.num_rows
    assert len({part.part_id for part in found.parts}) == len(found.parts)


def test_a_part_tells_when_its_file_changed(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", replace(SMALL, order=Order.SHUFFLED))
    part = table_parts([str(tmp_path / "table")]).parts[0]
    assert is_unchanged(part)
    Path(part.location).write_bytes(Path(part.location).read_bytes() + b"x")
    assert not is_unchanged(part)
    Path(part.location).unlink()
    assert not is_unchanged(part)


def test_an_events_file_is_no_table(exports: list[Path]) -> None:
    manifest = latest_manifest(*place_of(str(exports[0])))
    assert {file.kind for file in manifest.files} == {FileKind.CHUNKS, FileKind.CONTAINERS}
    assert len(table_parts([str(exports[0])]).parts) == 1
