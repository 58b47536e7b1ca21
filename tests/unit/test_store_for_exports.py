"""What exports need of the replicas that an agent holds: deletes told of before they
are done, and a survey.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from dnagent import scanner
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.replica import TreeSource
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from tests.support.volumes import new_volume, owned, write_block

ONE, BLOCK = ContainerId(1), BlockId(10)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A volume with container 1, closed, which has one block."""
    root = new_volume(tmp_path / "volume")
    with owned(root, tmp_path / "state") as owner:
        owner.writer.create_container(ONE)
        write_block(owner.writer, ONE, BLOCK, 4096, 100, bcs_id=1)
        owner.writer.close(ONE)
    return root


def held(
    root: Path,
    hold: Hold,
    on_deleted: Callable[[ContainerId, Sequence[BlockId] | None], None] = lambda *_: None,
) -> ManagedVolume:
    volume = open_volume(root, hold=hold, state_folder=root.parent / "state", disk=Disk())
    return ManagedVolume(volume, Disk(), undo_bytes=1 << 20, on_deleted=on_deleted)


def test_deletes_are_told_of_before_they_are_done(root: Path) -> None:
    told: list[tuple[ContainerId, list[BlockId] | None]] = []

    def note(container_id: ContainerId, block_ids: Sequence[BlockId] | None) -> None:
        assert volume.containers.get(ONE).block_path(BLOCK).exists()
        told.append((container_id, None if block_ids is None else list(block_ids)))

    with closing(held(root, Hold.OWNER, note)) as volume:
        store = ReplicaStore([volume], repair_enabled=True)
        replica = store.open_replica(ONE, "job-1", cancelled=Event(), on_bytes=lambda _: None)
        own = replica.own()
        assert own.tree is not None
        tree = ContainerTree.of(ONE, [*own.tree.blocks, BlockTree.tombstone(BlockId(15), 77)])
        replica.store_tree(tree, own.generation)
        store.delete_container(ONE)
    assert told == [(ONE, [15]), (ONE, None)]


def test_a_survey_has_the_trees_and_scan_times_that_are_kept_beside_a_read_only_volume(
    root: Path,
) -> None:
    with closing(held(root, Hold.READ_ONLY)) as volume:
        (before,) = volume.survey().replicas(TreeSource.TREE)
        assert (before.source, before.scanned_at_ms) == (TreeSource.TREE, None)
        examination = volume.examine(ONE, scanner.ScanDepth.DATA, lambda _: None, lambda: False)
        tree = ContainerTree.of(
            ONE, [*examination.result.tree.blocks, BlockTree.tombstone(BlockId(15), 77)]
        )
        _, generation = volume.store_tree(tree, examination.generation)
        examination = replace(examination, generation=generation)
        volume.record_result(examination, 1_800_000_000_000)
        (after,) = volume.survey().replicas(TreeSource.TREE)
        assert (after.tree, after.scanned_at_ms) == (tree, 1_800_000_000_000)
        volume.forget(ONE)
        (gone,) = volume.survey().replicas(TreeSource.TREE)
        assert gone.scanned_at_ms is None
