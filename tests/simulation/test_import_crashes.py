"""Kill an import of trees at every durable operation: each replica has its old tree or
the new one, no tombstone is lost, and the next import ends where this one would have.
"""

import shutil
import signal
import tempfile
from collections.abc import Iterator
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
from tests.support.disk import CountingDisk, Crash, CrashingDisk
from tests.support.forks import Forks
from tests.support.handmade import NODE, STORAGE, VolumeMaker, whole

TOMBSTONE = BlockTree.tombstone(BlockId(21), 99)


def config(folder: Path, hold: Hold) -> AgentConfig:
    return AgentConfig(
        volumes=(VolumeSettings(path=folder / "v", hold=hold),),
        state_folder=folder / "state",
        repair=RepairSettings(enabled=True),
    )


def run(folder: Path, hold: Hold, disk: Disk) -> ImportResult:
    return import_trees(config(folder, hold), folder / "packed", disk)


def crash(folder: str, hold: str, at: int, kind: str) -> None:
    """In a process of its own: import and die in it."""
    run(Path(folder), Hold(hold), CrashingDisk(at, Crash(kind)))


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


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: what a power cut takes is played here."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks(__name__) as server:
        yield server


@pytest.mark.parametrize("hold", list(Hold))
def test_an_import_killed_anywhere_is_done_or_undone(
    folder: Path, forks: Forks, hold: Hold
) -> None:
    start = folder / "start"
    start.mkdir()
    make(start, hold)
    before, disk = trees(start, hold), CountingDisk()
    undisturbed = shutil.copytree(start, folder / "undisturbed")
    assert run(undisturbed, hold, disk).imported == 2
    after = trees(undisturbed, hold)
    assert all(before[i] != after[i] for i in after)
    for kind in Crash:
        for at in range(len(disk.operations)):
            place = shutil.copytree(start, folder / f"{kind.value}-{at}")
            assert forks.run("crash", str(place), hold.value, at, kind.value) == -signal.SIGKILL
            assert all(found in (before[i], after[i]) for i, found in trees(place, hold).items())
            assert not run(place, hold, Disk()).refused
            assert trees(place, hold) == after
            shutil.rmtree(place)
