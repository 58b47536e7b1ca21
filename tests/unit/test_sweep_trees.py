"""The trees that a sweep writes are, byte for byte, those that plain trees encode
to.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from chunktable.schema import BLOCK_ROW, CHUNK_SCHEMA, CONTAINER_ROW
from merkle.columns import encode_tree
from merkle.limits import MESSAGE_BYTES_MAX
from protos.convert import tree_from_bytes
from runtime.disk import Disk
from sweep.output import SweepStore, SweepTable
from sweep.trees import library_encode_trees
from tests.support.chunk_rows import rows_in, trees_in
from tests.support.sweeps import Killed, OnePartWaves, packed_trees, run
from tests.support.volumes import container_folder, unpack

SMALL = SyntheticCluster(seed=7, datanodes=4, containers=150, blocks=5, chunks=4)


def expected_trees(table: Path) -> dict[tuple[int, str, str], bytes]:
    return {
        (container_id, *key): encode_tree(tree)
        for container_id, replicas in trees_in(rows_in(table)).items()
        for key, (_, tree) in replicas.items()
        if tree.data_checksum is not None
    }


@pytest.mark.parametrize(
    "cluster",
    [
        SMALL,
        replace(SMALL, order=RowOrder.SHUFFLED),
        replace(SMALL, chunks=1),
        replace(SMALL, largest_blocks=900),
    ],
)
def test_packed_trees_are_those_of_the_rows(tmp_path: Path, cluster: SyntheticCluster) -> None:
    synthetic(tmp_path / "table", cluster)
    sweep_id = run(tmp_path / "out", tmp_path / "table", write_trees=True).sweep_id
    assert packed_trees(tmp_path / "out", sweep_id) == expected_trees(tmp_path / "table")


def test_a_packed_tree_says_what_its_replica_was(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    sweep_id = run(tmp_path / "out", tmp_path / "table", write_trees=True).sweep_id
    output = SweepStore(tmp_path / "out", Disk())
    names = [
        "container_id",
        "datanode",
        "volume",
        "state",
        "bcs_id",
        "replica_index",
        "source",
        "scanned_at",
        "root",
    ]
    packed = pa.concat_tables(
        [pq.read_table(path, columns=names) for path in output.trees(sweep_id).glob("*.parquet")]
    )
    swept = pq.read_table(output.path(SweepTable.ROOTS, sweep_id), columns=names, partitioning=None)
    swept = swept.filter(swept["root"].is_valid()).replace_schema_metadata()
    keys = [(name, "ascending") for name in names[:3]]
    assert packed.sort_by(keys).to_pylist() == swept.sort_by(keys).to_pylist()


def test_replicas_whose_ascending_rows_have_others_between_them_get_one_tree_each(
    tmp_path: Path,
) -> None:
    """All rows of block 1 of both replicas, then all of block 2: each replica ascends,
    and is in two pieces.
    """
    rows = [
        [
            node,
            "v",
            container,
            "CLOSED",
            1,
            0,
            block,
            offset,
            4096,
            5 + block + offset,
            True,
            False,
            "tree",
            0,
            None,
        ]
        for container in (1, 2)
        for block in range(40)
        for node in ("a", "b")
        for offset in range(0, 10 * 4096, 4096)
    ]
    (tmp_path / "table").mkdir()
    columns = [
        pa.array(column, field.type)
        for column, field in zip(zip(*rows, strict=True), CHUNK_SCHEMA, strict=True)
    ]
    pq.write_table(
        pa.Table.from_arrays(columns, schema=CHUNK_SCHEMA),
        tmp_path / "table" / "chunks-rows.parquet",
    )
    summary = run(tmp_path / "out", tmp_path / "table", write_trees=True)
    assert dict(summary.paths) == {"filewise": 4}
    assert packed_trees(tmp_path / "out", summary.sweep_id) == expected_trees(tmp_path / "table")


def test_kernels_and_libraries_make_the_same_bytes() -> None:
    kernels = pytest.importorskip(
        "sweep.kernels", reason="the extra `fast` is not installed", exc_type=ImportError
    )
    rng = np.random.default_rng(3)
    for _ in range(200):
        rows, starts = list[tuple[int | bool, ...]](), list[int]()
        for _ in range(rng.integers(1, 4)):
            starts.append(len(rows))
            if rng.random() < 0.2:
                rows.append((0, CONTAINER_ROW, 0, 0, True, False))
                continue
            for block in np.unique(
                rng.choice(np.array([-(1 << 63), -1, 0, 127, 128, 1 << 49, (1 << 63) - 1]), 3)
            ):
                if rng.random() < 0.3:
                    checksum = int(rng.integers(-(1 << 63), 1 << 63, dtype=np.int64))
                    rows.append(
                        (int(block), BLOCK_ROW, 0, checksum, True, bool(rng.random() < 0.5))
                    )
                    continue
                is_deleted = rng.random() < 0.2
                for offset in np.unique(
                    rng.choice(np.array([0, 1, 127, 1 << 22, 1 << 35, 1 << 48, (1 << 63) - 1]), 3)
                ):
                    value = int(
                        rng.choice(
                            np.array([0, 1 << 13, (1 << 32) - 1, (1 << 49) - 1, 1 << 49, -1])
                        )
                    )
                    rows.append(
                        (
                            int(block),
                            int(offset),
                            value,
                            value ^ 1,
                            bool(rng.random() < 0.5),
                            is_deleted,
                        )
                    )
        bounds = np.array([*starts, len(rows)])
        ids = rng.integers(1, 1 << 62, len(starts))
        kinds = [np.int64] * 4 + [np.bool_] * 2
        columns: list[Any] = [
            np.array(c, kind) for c, kind in zip(zip(*rows, strict=True), kinds, strict=True)
        ]
        expected_roots, expected = library_encode_trees(bounds[:-1], bounds[1:], ids, *columns)
        roots, ends = np.empty(len(starts), np.int64), np.empty(len(starts) + 1, np.int64)
        out = np.empty(kernels.TREE_ROW_BYTES * (len(rows) + len(starts)), np.uint8)
        kernels.encode_trees(bounds[:-1], bounds[1:], ids, len(rows), *columns, roots, ends, out)
        assert roots.tolist() == expected_roots.tolist()
        assert [out[a:b].tobytes() for a, b in pairwise(ends)] == expected.to_pylist()
        for container_id, raw in zip(ids.tolist(), expected.to_pylist(), strict=True):
            assert encode_tree(tree_from_bytes(raw, container_id)) == raw


@pytest.mark.parametrize("row_bytes", [15, 8])
def test_a_tree_that_no_agent_stores_is_left_out_and_counted(
    tmp_path: Path, row_bytes: int
) -> None:
    """Known for too large when it is made, or before, of its rows alone."""
    count = MESSAGE_BYTES_MAX // row_bytes
    same = dict.fromkeys(CHUNK_SCHEMA.names, 0) | {
        "datanode": "a", "volume": "v", "state": "CLOSED", "matches": True, "deleted": False,
        "source": "tree",
        "scanned_at": None, "length": 4096, "checksum": (1 << 32) - 1,
    }  # fmt: skip
    offsets = np.append(np.arange(count) * 4096, 0)
    columns = [
        (
            pa.array(np.append(np.full(count, 1), 2))
            if field.name == "container_id"
            else (
                pa.array(offsets)
                if field.name == "chunk_offset"
                else pa.repeat(pa.scalar(same[field.name], field.type), count + 1)
            )
        )
        for field in CHUNK_SCHEMA
    ]
    (tmp_path / "table").mkdir()
    table = pa.Table.from_arrays(columns, schema=CHUNK_SCHEMA)
    pq.write_table(table, tmp_path / "table" / "chunks-rows.parquet", row_group_size=1 << 20)
    summary = run(tmp_path / "out", tmp_path / "table", write_trees=True)
    assert list(packed_trees(tmp_path / "out", summary.sweep_id)) == [(2, "a", "v")]
    assert summary.notes == ("1 trees were not written: they are larger than agents store",)


@pytest.mark.parametrize("dies_after", [4, 6])
def test_a_sweep_killed_while_it_writes_trees_goes_on_behind_the_files_that_are_written(
    tmp_path: Path, dies_after: int
) -> None:
    synthetic(tmp_path / "table", replace(SMALL, damage={}))
    with pytest.raises(Killed):
        run(
            tmp_path / "out",
            tmp_path / "table",
            engine=OnePartWaves(tmp_path / "s", dies_after=dies_after),
            write_trees=True,
        )
    written = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("trees/*/*.parquet")
    }
    assert written
    sweep_id = run(tmp_path / "out", tmp_path / "table", write_trees=True).sweep_id
    assert packed_trees(tmp_path / "out", sweep_id) == expected_trees(tmp_path / "table")
    assert sum(path.stat().st_mtime_ns == time for path, time in written.items()) >= dies_after - 3


def test_trees_of_volumes_are_the_tree_files_of_their_datanodes(tmp_path: Path) -> None:
    """A healthy replica's tree file, as a real datanode wrote it, comes out again byte
    for byte.
    """
    folder = unpack("healthy", tmp_path / "cluster")
    sweep_id = run(
        tmp_path / "out", volumes=sorted(folder.glob("dn*/volume1")), write_trees=True
    ).sweep_id
    found = sorted(packed_trees(tmp_path / "out", sweep_id).values())
    files = []
    for volume in folder.glob("dn*/volume1"):
        for container_id in range(1, 7):
            files.append(
                (
                    container_folder(volume, container_id) / "metadata" / f"{container_id}.tree"
                ).read_bytes()
            )
            tree_from_bytes(files[-1], container_id)
    assert found == sorted(files)


def test_trees_of_only_two_sweeps_stay(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    ids = [
        run(
            tmp_path / "out",
            tmp_path / "table",
            engine=OnePartWaves(tmp_path / "s"),
            write_trees=True,
        ).sweep_id
        for _ in range(3)
    ]
    assert [bool(packed_trees(tmp_path / "out", sweep_id)) for sweep_id in ids] == [
        False,
        True,
        True,
    ]
