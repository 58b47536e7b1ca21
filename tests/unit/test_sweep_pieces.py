"""Tables in several files: only what is committed is read, and ranges of containers are
even however the files lie.
"""

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.disk import Disk
from runtime.errors import DiskError
from spark.by_range import file_groups, range_waves
from sweep.errors import SweepWorkError
from sweep.model import REQUEST_SCHEMA
from sweep.output import SweepStore, SweepTable
from sweep.pieces import (
    Range,
    StoredFile,
    StoredTable,
    TableFileWriter,
    TablePlace,
    ranges,
    rows_in_range,
)
from sweep.reader import SweepReader, ranges_of
from sweep.stages import requests

SWEEP = "20260101T000000Z-0000"
EARLIER = "20251231T000000Z-0000"


def unseen(*container_ids: int) -> pa.Table:
    """Rows of the table `unseen`."""
    schema = SweepStore(Path(), Disk()).place(SweepTable.UNSEEN, SWEEP).schema
    row = {"datanode": "a", "volume": "v", "last_sweep": SWEEP, "reason": "lost"}
    return pa.Table.from_pylist([row | {"container_id": i} for i in container_ids], schema)


def write(store: SweepStore, *pieces: pa.Table, sweep_id: str = SWEEP) -> None:
    """Write a table as tasks do, each piece in a file of its own."""
    places = {"unseen": store.place(SweepTable.UNSEEN, sweep_id)}
    with store.write_table(SweepTable.UNSEEN, sweep_id) as writer:
        for piece in pieces:
            task = TableFileWriter(places, Disk())
            task.add({"unseen": piece})
            for file in task.close().values():
                writer.add_file(file)


def test_the_committed_files_are_the_table_and_what_failed_tasks_left_is_not(
    tmp_path: Path,
) -> None:
    store = SweepStore(tmp_path, Disk())
    folder = store.path(SweepTable.UNSEEN, SWEEP).parent
    failed = TableFileWriter({"unseen": store.place(SweepTable.UNSEEN, SWEEP)}, Disk())
    failed.add({"unseen": unseen(7)})
    failed.close()
    (left,) = folder.iterdir()
    write(store, unseen(1, 2), unseen(), unseen(3))
    assert not left.exists()
    # A task that nobody waits for any more ends later still.
    failed.add({"unseen": unseen(9)})
    failed.close()
    assert ids_of(store.read(SweepTable.UNSEEN, SWEEP)) == [1, 2, 3]
    assert len(store.files(SweepTable.UNSEEN, SWEEP)) == 3
    stored = store.stored(SweepTable.UNSEEN, SWEEP, unseen().schema)
    assert ids_of(stored.read(Range(2, 9))) == [2, 3]


@pytest.mark.parametrize("as_files", [True, False])
def test_the_ranges_of_a_sweep_have_each_row_of_its_tables_once(
    tmp_path: Path, *, as_files: bool
) -> None:
    store, found = SweepStore(tmp_path, Disk()), dict[str, list[int]]()
    pieces = [unseen(*range(first, 900, 7)) for first in range(7)]
    for sweep_id in (SWEEP, EARLIER):
        if as_files:
            write(store, *pieces, sweep_id=sweep_id)
        else:
            with store.write_table(SweepTable.UNSEEN, sweep_id) as writer:
                for piece in pieces:
                    writer.add(piece)
    readers = [SweepReader(store, sweep_id) for sweep_id in (SWEEP, EARLIER)]
    parts = ranges_of(readers, [SweepTable.UNSEEN], rows_max=100)
    assert len(parts) > as_files
    for reader in readers:
        for part in parts:
            for piece in reader.pieces(SweepTable.UNSEEN, ["container_id", "reason"], part):
                assert rows_in_range(piece, part) == piece
                found.setdefault(reader.sweep_id, []).extend(piece["container_id"].to_pylist())
    assert found.keys() == {SWEEP, EARLIER}
    assert all(sorted(ids) == list(range(900)) for ids in found.values())


def test_a_reader_that_knows_no_manifest_refuses_the_table_by_its_version(tmp_path: Path) -> None:
    store = SweepStore(tmp_path, Disk())
    path = store.path(SweepTable.UNSEEN, SWEEP)
    with store.write_table(SweepTable.UNSEEN, SWEEP) as writer:
        writer.add(unseen(4))
    assert pq.read_schema(path).metadata[b"treefold.sweep"] == b"1"
    write(store, unseen(1))
    assert pq.read_schema(path).metadata[b"treefold.sweep"] == b"2"
    with store.write_table(SweepTable.UNSEEN, SWEEP) as writer:
        writer.add(unseen(5))
    # The manifest went with the files that it named.
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert ids_of(store.read(SweepTable.UNSEEN, SWEEP)) == [5]


@pytest.mark.parametrize(
    "text", ["", "{}", '{"files": [1]}', '{"files": [{"name": "../x", "rows": 1, "starts": []}]}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    store = SweepStore(tmp_path, Disk())
    write(store, unseen(1))
    manifest = store.path(SweepTable.UNSEEN, SWEEP).with_name("_manifest.json")
    manifest.write_text(text)
    with pytest.raises(DiskError, match=r"_manifest\.json"):
        store.read(SweepTable.UNSEEN, SWEEP)


def test_a_task_that_gives_up_leaves_no_file(tmp_path: Path) -> None:
    task = TableFileWriter({"rows": TablePlace(tmp_path, REQUEST_SCHEMA)}, Disk())
    task.add({"rows": rows_of([1])})
    task.discard()
    assert task.close() == {}
    assert not list(tmp_path.iterdir())


def test_a_committed_file_that_is_gone_is_an_error_and_no_empty_table(tmp_path: Path) -> None:
    table = stored(tmp_path, [[1, 2], [3]])
    table.paths[0].unlink()
    with pytest.raises(SweepWorkError, match="cannot be read"):
        table.read(Range(None, 9))


@given(st.lists(st.lists(st.integers(0, 400), max_size=60), max_size=8), st.integers(1, 50))
def test_every_row_is_in_one_range_and_ranges_are_even(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], rows_max: int
) -> None:
    """Also if each file has containers of the whole cluster, as exports have."""
    table = stored(tmp_path_factory.mktemp("pieces"), [sorted(ids) for ids in files])
    cut = ranges([table], rows_max)
    held = [table.read(one) for one in cut]
    assert sorted(i for rows in held for i in ids_of(rows)) == sorted(chain(*files))
    whole = pa.concat_tables([REQUEST_SCHEMA.empty_table(), *table.tables()])
    for one, rows in zip(cut, held, strict=True):
        assert ids_of(rows_in_range(whole, one)) == ids_of(rows)
        # Rows of one container are never divided, and samples stand for a few rows.
        repeated = max((ids_of(rows).count(i) for i in set(ids_of(rows))), default=0)
        assert rows.num_rows <= rows_max + repeated + 4 * len(files)


def rows_of(ids: list[int]) -> pa.Table:
    return requests(np.array(ids, np.int64), np.ones(len(ids), np.int64))


def ids_of(table: pa.Table) -> list[int]:
    found: list[int] = table["container_id"].to_pylist()
    return found


def stored(folder: Path, files: list[list[int]]) -> StoredTable:
    """A table of REQUEST_SCHEMA with these containers in its files."""
    found = {}
    for ids in files:
        task = TableFileWriter({"rows": TablePlace(folder, REQUEST_SCHEMA)}, Disk())
        task.add({"rows": rows_of(ids)})
        found |= {folder / file.name: file for file in task.close().values()}
    return StoredTable([], REQUEST_SCHEMA, found)


@pytest.mark.parametrize("has_statistics", [True, False])
def test_a_file_that_does_not_tell_its_ranges_is_read(tmp_path: Path, has_statistics: bool) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(unseen(3, 5, 8), path, row_group_size=1, write_statistics=has_statistics)
    stored = StoredTable([path], unseen().schema)
    assert ids_of(stored.read(Range(4, 8))) == [5, 8]
    assert ids_of(stored.read(Range(None, 4))) == [3]


def test_files_outside_a_range_are_not_opened(tmp_path: Path) -> None:
    table = stored(tmp_path, [[1, 4], [5, 9], [2, 7]])
    first, second, third = table.paths
    first.unlink()
    assert sorted(ids_of(table.read(Range(5, 9)))) == [5, 7, 9]
    assert [path for path, _ in table.sizes(Range(8, 20))] == [second]
    assert [path for path, _ in table.sizes(Range(None, 3))] == [first, third]
    # A process elsewhere knows as much.
    elsewhere = StoredTable([], table.schema, table.unopened())
    assert [path for path, _ in elsewhere.sizes(Range(8, 20))] == [second]
    with pytest.raises(SweepWorkError, match=first.name):
        elsewhere.read(Range(4, 4))


def test_rows_without_a_container_are_in_a_file_of_any_range(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("container_id", pa.int64())])
    task = TableFileWriter({"rows": TablePlace(tmp_path, schema)}, Disk())
    for ids in ([None, 30], [40, None], [None]):
        task.add({"rows": pa.table([ids], schema)})
    (file,) = task.close().values()
    table = StoredTable([], schema, {tmp_path / file.name: file})
    assert (file.last, [first for first, _ in file.starts]) == (40, [30, 40])
    assert ids_of(table.read(Range(None, 9))) == [None, None, None]
    assert list(table.sizes(Range(10, 29))) == []
    assert ids_of(table.read(Range(30, 39))) == [30]
    alone = StoredFile("rows.parquet", 2)
    assert alone.may_hold(Range(None, 0))


def test_a_file_of_an_earlier_release_may_hold_any_container() -> None:
    earlier = StoredFile.of({"name": "a.parquet", "rows": 2, "starts": [[5, 2]]})
    assert earlier.may_hold(Range(1, 2))
    later = StoredFile.of({"name": "a.parquet", "rows": 2, "starts": [[5, 2]], "last": 9})
    assert later.may_hold(Range(9, 12))
    assert not later.may_hold(Range(10, 12))
    for last, starts in (("9", [[5, 2]]), (9, [])):
        with pytest.raises(TypeError, match=r"a\.parquet"):
            StoredFile.of({"name": "a.parquet", "rows": 2, "starts": starts, "last": last})


def test_the_jobs_of_a_stage_open_files_once_or_a_few_times_however_many_ranges() -> None:
    waves_most = 4
    wanted = [Range(None if i == 0 else 10 * i, 10 * i + 9) for i in range(1000)]
    in_order = {
        Path(f"{i}"): StoredFile("", 100, ((100 * i, 100),), 100 * i + 99) for i in range(100)
    }
    of_all = {Path(f"{i}"): StoredFile("", 100, ((i, 100),), 9_900 + i) for i in range(100)}
    for files, most in ((in_order, 100 + waves_most), (of_all, 100 * waves_most)):
        table = StoredTable([], REQUEST_SCHEMA, files)
        jobs = [file_groups({"rows": table}, wave, 1000) for wave in range_waves(wanted)]
        opened = [path for groups in jobs for group in groups for _, path in group]
        assert set(opened) == set(files)
        assert len(opened) <= most
        assert all(len(group) <= 10 for groups in jobs for group in groups)
    assert [len(wave) for wave in range_waves(wanted[:100])] == [64, 36]
