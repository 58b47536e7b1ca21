"""Replicas that are whole where they are read are settled there: what an inventory
lists, what several parts of a file have of a replica, and what is read twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunktable.manifest import Manifest, parse_manifest
from chunktable.places import LocalDestination
from chunktable.schema import CONTAINER_SCHEMA
from dnagent.export import ExportLimits, export
from merkle.checksum import KERNEL_BYTES_MIN, fingerprint, kernels_for
from merkle.replica import TreeSource
from runtime.disk import Disk
from spark.task_parts import parts_of_text, text_of
from sweep.exports import at_once, parts_of_holders
from sweep.files import fold_part
from sweep.inputs import table_parts
from sweep.listed import ListedReplicas
from sweep.model import REPLICA_SCHEMA, Part, PartKind, RootMethod
from sweep.pieces import StoredTable, TableFileWriter, TablePlace
from sweep.runs import settle
from sweep.stages import CompareStage, by_replica
from sweep.whole_exports import fold_small_exports
from tests.support.tables import MemoryWalk, blocks, replica


def listed(*rows: tuple[str, int, int]) -> pa.Table:
    held = [
        {"volume": v, "container_id": i, "generation": 1, "file": "f", "rows": n}
        for v, i, n in rows
    ]
    return pa.Table.from_pylist(held, CONTAINER_SCHEMA)


def test_replicas_are_found_by_volume_and_container() -> None:
    found = ListedReplicas.of(listed(("b", 7, 3), ("a", 9, 2), ("a", 7, 1)), None)
    volumes = pa.chunked_array([["a", "b"], ["c", None, "a", "b"]])
    places = found.places(volumes, pa.array([7, 7, 7, 7, 8, 9]))
    assert found.is_live(places).tolist() == [True, True, False, False, False, False]
    assert found.rows[places[:2]].tolist() == [1, 3]
    # Volumes of which another export counts are listed, and not live.
    partial = ListedReplicas.of(listed(("b", 7, 3), ("a", 7, 1)), ["b"])
    places = partial.places(volumes, pa.array([7] * 6))
    assert partial.is_live(places).tolist() == [False, True, False, False, False, True]


def test_of_an_empty_inventory_nothing_is_live_and_nothing_is_wrong() -> None:
    found = ListedReplicas.of(listed(), None)
    places = found.places(pa.array(["a"]), pa.array([7]))
    assert found.is_live(places).tolist() == [False]
    found.count(places, np.array([5]))
    assert found.wrong() == ""


def test_what_was_counted_is_held_against_the_inventory() -> None:
    rows = ("a", 7, 4), ("b", 7, 2), ("b", 8, 1)
    found = ListedReplicas.of(listed(*rows, rows[1]), None)
    places = found.places(pa.array(["a", "b", "a", "b"]), pa.array([7, 7, 7, 8]))
    found.count(places, np.array([3, 2, 1, 1]))
    assert found.wrong() == ""
    found.count(places[1:2], np.array([1]))
    assert found.wrong() == "3 rows of container 7 on volume b, and the inventory says 2"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """An export of one file with 20 replicas, in row groups of seven rows."""
    walk, folder = MemoryWalk(), tmp_path / "dn"
    walk.put(*(replica(number, *blocks(2 + number % 3)) for number in range(20)))
    export([walk], (), LocalDestination(folder, Disk()), source=TreeSource.TREE)
    (chunks,) = folder.glob("chunks-*")
    pq.write_table(pq.read_table(chunks), chunks, row_group_size=7)
    (place,) = folder.glob("manifest-*")
    rewrite(place, chunks)
    return folder


def rewrite(place: Path, changed: Path) -> Manifest:
    manifest, raw = parse_manifest(place.read_bytes(), place.name), changed.read_bytes()
    files = tuple(
        replace(one, length_bytes=len(raw), checksum=fingerprint(raw).hex(), pieces=())
        if one.name == changed.name
        else one
        for one in manifest.files
    )
    manifest = replace(manifest, files=files)
    place.write_bytes(manifest.to_bytes())
    return manifest


def test_a_part_settles_what_it_has_whole_and_the_others_are_joined(exported: Path) -> None:
    (whole,) = table_parts([str(exported)]).parts
    expected = fold_part(whole)
    assert (expected.runs.num_rows, expected.replicas.num_rows) == (0, 20)
    folded = [fold_part(part) for part in table_parts([str(exported)], part_rows=25).parts]
    runs = pa.concat_tables([one.runs for one in folded])
    assert len(folded) > 2
    # Only those that continue in the next part.
    assert 0 < runs.num_rows <= 2 * (len(folded) - 1)
    settled = pa.concat_tables([settle(runs).replicas, *(one.replicas for one in folded)])
    assert by_replica(settled).drop_columns("path") == by_replica(expected.replicas).drop_columns(
        "path"
    )
    assert set(settled["path"].to_pylist()) == {
        RootMethod.FILE_WISE.value,
        RootMethod.FRAGMENTS.value,
    }
    # Streamed, as tasks do it, it is the same.
    stored = list[pa.Table]()
    streamed = fold_part(whole, lambda tables: stored.append(tables["replicas"]))
    assert (streamed.replicas.num_rows, streamed.rows) == (0, expected.rows)
    assert pa.concat_tables(stored) == expected.replicas


def test_the_first_part_of_a_file_counts_the_rows_of_all(exported: Path) -> None:
    (chunks,) = exported.glob("chunks-*")
    (place,) = exported.glob("manifest-*")
    rows = pq.read_table(chunks)
    # A row near the end is of another container than the inventory says.
    ids = rows["container_id"].to_pylist()
    ids[-3] = 18
    column = rows.schema.get_field_index("container_id")
    field = rows.schema.field(column)
    pq.write_table(rows.set_column(column, field, [ids]), chunks, row_group_size=7)
    rewrite(place, chunks)
    first, *others = table_parts([str(exported)], part_rows=25).parts
    assert "and the inventory says" in fold_part(first).skipped
    assert [fold_part(part).skipped for part in others] == [""] * len(others)


def test_small_exports_become_one_table_and_a_damaged_one_is_left_out(tmp_path: Path) -> None:
    kernels_for(KERNEL_BYTES_MIN)
    for number in range(12):
        walk = MemoryWalk(datanode=f"dn-{number}")
        held = (replica(100 * number + i, *blocks(1 + i % 3)) for i in range(9))
        walk.put(*held)
        to = LocalDestination(tmp_path / walk.datanode, Disk())
        export([walk], (), to, source=TreeSource.TREE)
        # Replicas 0 and 3 are in a second file, and one is gone.
        del walk.replicas_held[100 * number + 5]
        walk.put(replica(100 * number, *blocks(7)), replica(100 * number + 3, *blocks(4)))
        export([walk], (), to, source=TreeSource.TREE, limits=ExportLimits(small_files_max=9))
    parts = table_parts([str(tmp_path)]).parts
    assert len(parts) == 24
    broken = parts[5]
    raw = bytearray(Path(broken.location).read_bytes())
    raw[len(raw) // 2] ^= 1
    Path(broken.location).write_bytes(raw)
    stored = list[Mapping[str, pa.Table]]()
    found = list(fold_small_exports(parts, stored.append))
    expected = [fold_part(part) for part in parts]
    assert [one.skipped for one in found] == [one.skipped for one in expected]
    assert [one.rows for one in found] == [one.rows for one in expected]
    assert found[5].skipped.endswith("does not match the checksum of its manifest")
    replicas = pa.concat_tables([tables["replicas"] for tables in stored])
    whole = pa.concat_tables([one.replicas for one in expected])
    assert by_replica(replicas) == by_replica(whole)
    assert replicas.num_rows > 80
    if kernels_for(0):
        # That of all others, and what was left of the damaged one.
        assert [tables["replicas"].num_rows for tables in stored] == [0, replicas.num_rows]


def replicas(*rows: tuple[int, str, RootMethod]) -> pa.Table:
    """Replicas by container, datanode and path."""
    common = dict.fromkeys(REPLICA_SCHEMA.names, 0) | {"volume": "v", "state": "CLOSED"}
    common |= {"source": "tree", "scanned_at": None, "blocks": 1, "chunks": 1}
    held = [
        common | {"container_id": number, "datanode": datanode, "path": path.value}
        for number, datanode, path in rows
    ]
    return pa.Table.from_pylist(held, REPLICA_SCHEMA)


def test_a_replica_that_was_folded_in_two_places_is_sorted_and_so_are_mixed_paths() -> None:
    files, sql = RootMethod.FILE_WISE, RootMethod.SQL
    found = CompareStage()(
        {
            "replicas": replicas(
                (1, "a", files), (1, "b", files), (2, "a", files), (2, "b", sql), (2, "c", sql),
                (3, "a", sql), (3, "b", sql), (4, "a", files), (4, "b", files), (4, "a", files),
            )
        }
    )  # fmt: skip
    assert found["exact"]["container_id"].to_pylist() == [2, 4]
    assert set(found["roots"]["container_id"].to_pylist()) == {1, 3}


def test_the_parts_of_a_task_arrive_with_their_manifests(exported: Path) -> None:
    parts = table_parts([str(exported)], part_rows=25).parts
    again = parts_of_text(text_of({5: parts[0], 2: parts[1]}))
    assert again == {5: parts[0], 2: parts[1]}
    assert again[5].export == parts[0].export is not None
    # It is not read again.
    (place,) = exported.glob("manifest-*")
    place.unlink()
    assert fold_part(again[2]).skipped == ""


def test_only_parts_of_datanodes_with_these_replicas_are_read_again(exported: Path) -> None:
    (part,) = table_parts([str(exported)]).parts
    assert part.export is not None
    plain = replace(part, export=None, manifest=None)
    for datanode, kept in ((part.export.datanode, (part, plain)), ("another", (plain,))):
        place = TablePlace(exported / "work", REPLICA_SCHEMA)
        writer = TableFileWriter({"replicas": place}, Disk())
        writer.add({"replicas": replicas((1, datanode, RootMethod.FILE_WISE))})
        (file,) = writer.close().values()
        held = StoredTable([], REPLICA_SCHEMA, {place.folder / file.name: file})
        assert parts_of_holders([part, plain], held) == kept


@pytest.mark.parametrize("place", ["/exports/1.parquet", "s3://exports/1.parquet"])
def test_many_parts_are_read_at_once_and_come_in_order(place: str) -> None:
    parts = [Part(str(n), PartKind.FILE, place, 0, 1, 1) for n in range(100)]
    found = list(at_once(parts, lambda part: int(part.part_id) ** 2, place))
    assert found == [number**2 for number in range(100)]
    assert list(at_once([], str, place)) == []
