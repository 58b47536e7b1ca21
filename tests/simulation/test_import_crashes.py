"""A crash at any operation of an import of trees: each replica has its old tree or
the new one, no tombstone is lost, and the next import ends where this one would have.
"""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chunktable.packed_trees import TREE_SCHEMA
from dnagent.config import AgentConfig, RepairSettings, VolumeSettings
from dnagent.imports import ImportResult, import_trees
from merkle.columns import encode_tree
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.containers import ContainerStore
from ozone.scan import build_from_metadata
from ozone.treefile import TreeFiles
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from tests.support.disk import ImagingDisk
from tests.support.handmade import NODE, STORAGE, VolumeMaker, whole

pytestmark = pytest.mark.crashes

TOMBSTONE = BlockTree.tombstone(BlockId(21), 99)


def config(folder: Path, hold: Hold) -> AgentConfig:
    return AgentConfig(
        volumes=(VolumeSettings(path=folder / "v", hold=hold),),
        state_folder=folder / "state",
        repair=RepairSettings(enabled=hold is Hold.OWNER),
    )


def run(folder: Path, hold: Hold, disk: Disk) -> ImportResult:
    return import_trees(config(folder, hold), folder / "packed", disk)


def make(folder: Path, hold: Hold) -> None:
    """Two replicas without a whole tree; of the first, a deletion is known."""
    with VolumeMaker(folder / "v") as made:
        for container_id in (1, 2):
            made.container(container_id)
            for block_id in (20, 21):
                made.block(container_id, block_id, whole(3000))
    columns: dict[str, list[object]] = {name: [] for name in TREE_SCHEMA.names}
    with open_volume(folder / "v", hold=hold, state_folder=folder / "state", disk=Disk()) as volume:
        for container_id in (ContainerId(1), ContainerId(2)):
            tree = build_from_metadata(ContainerStore(volume, Disk()).get(container_id))
            row = (
                NODE,
                STORAGE,
                container_id,
                "CLOSED",
                7,
                0,
                "metadata",
                None,
                tree.data_checksum,
                encode_tree(tree),
            )
            for name, value in zip(columns, row, strict=True):
                columns[name].append(value)
        files = TreeFiles(volume, Disk())
        files.path(ContainerId(1)).parent.mkdir(parents=True, exist_ok=True)
        files.path(ContainerId(1)).write_bytes(
            encode_tree(ContainerTree(ContainerId(1), None, (TOMBSTONE,)))
        )
    (folder / "packed").mkdir()
    pq.write_table(pa.table(columns, TREE_SCHEMA), folder / "packed" / "trees.parquet")


def trees(folder: Path, hold: Hold) -> dict[int, bytes | None]:
    with open_volume(folder / "v", hold=hold, state_folder=folder / "state", disk=Disk()) as volume:
        files = TreeFiles(volume, Disk())
        assert TOMBSTONE in files.read(ContainerId(1)).known.blocks
        return {container_id: files.raw(ContainerId(container_id)) for container_id in (1, 2)}


@pytest.mark.parametrize("hold", list(Hold))
def test_an_import_cut_short_anywhere_is_done_or_undone(memory_folder: Path, hold: Hold) -> None:
    start = memory_folder / "start"
    start.mkdir()
    make(start, hold)
    before = trees(start, hold)
    undisturbed = shutil.copytree(start, memory_folder / "undisturbed")
    disk = ImagingDisk(undisturbed, memory_folder / "images")
    assert run(undisturbed, hold, disk).imported == 2
    after = trees(undisturbed, hold)
    assert all(before[i] != after[i] for i in after)
    for image in disk.finish():
        found = trees(image.folder, hold)
        assert all(tree in (before[i], after[i]) for i, tree in found.items()), image
        assert found == after or not image.is_final, image
        assert not run(image.folder, hold, Disk()).refused, image
        assert trees(image.folder, hold) == after, image
        shutil.rmtree(image.folder)
