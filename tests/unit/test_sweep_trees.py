"""The trees that a sweep writes are, byte for byte, those that plain trees encode to."""

from dataclasses import replace
from pathlib import Path

import pytest

from merkle.columns import encode_tree
from protos.convert import tree_from_bytes
from spark.synthetic import Cluster, Order, synthetic
from tests.support.chunk_rows import rows_in, trees_in
from tests.support.sweeps import OnePartWaves, packed_trees, run
from tests.support.volumes import container_folder, unpack

SMALL = Cluster(seed=7, datanodes=4, containers=150, blocks=5, chunks=4)


@pytest.mark.parametrize("cluster", [SMALL, replace(SMALL, order=Order.SHUFFLED), replace(SMALL, chunks=1)])
def test_packed_trees_are_those_of_the_rows(tmp_path: Path, cluster: Cluster) -> None:
    synthetic(tmp_path / "table", cluster)
    sweep_id = run(tmp_path / "out", tmp_path / "table", write_trees=True).sweep_id
    expected = {
        (container_id, *key): encode_tree(tree)
        for container_id, replicas in trees_in(rows_in(tmp_path / "table")).items()
        for key, (_, tree) in replicas.items()
        if tree.data_checksum is not None
    }
    assert packed_trees(tmp_path / "out", sweep_id) == expected


def test_trees_of_volumes_are_the_tree_files_of_their_datanodes(tmp_path: Path) -> None:
    """A healthy replica's tree file, as a real datanode wrote it, comes out again byte for byte."""
    folder = unpack("healthy", tmp_path / "cluster")
    sweep_id = run(tmp_path / "out", volumes=sorted(folder.glob("dn*/volume1")), write_trees=True).sweep_id
    found = sorted(packed_trees(tmp_path / "out", sweep_id).values())
    files = []
    for volume in folder.glob("dn*/volume1"):
        for container_id in range(1, 7):
            files.append((container_folder(volume, container_id) / "metadata" / f"{container_id}.tree").read_bytes())
            tree_from_bytes(files[-1], container_id)  # type: ignore[arg-type]
    assert found == sorted(files)


def test_trees_of_only_two_sweeps_stay(tmp_path: Path) -> None:
    synthetic(tmp_path / "table", SMALL)
    ids = [
        run(tmp_path / "out", tmp_path / "table", engine=OnePartWaves(tmp_path / "s"), write_trees=True).sweep_id
        for _ in range(3)
    ]
    assert [bool(packed_trees(tmp_path / "out", sweep_id)) for sweep_id in ids] == [False, True, True]
