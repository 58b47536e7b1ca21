"""A walk over a volume gives every replica with its tree from the asked truth, and
never ends at a bad one.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from merkle.columns import encode_tree
from merkle.replica import ReplicaState, TreeSource
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, root_hex
from ozone.rocks import OzoneTable, block_key
from ozone.survey import ROOT_DIFFERS, UNREADABLE, ReplicaSnapshot, VolumeSurvey
from ozone.treefile import TreeFiles
from ozone.volume import Hold, open_volume
from runtime.disk import Disk
from runtime.errors import OperationInterruptedError
from tests.support.handmade import NODE, STORAGE, VolumeMaker, whole
from tests.support.volumes import ERASURE_CODED, MOMENTS, OZONE, flip, state_of, unpack

TOMBSTONE = BlockTree.tombstone(BlockId(99), 4711)


def survey(
    root: Path,
    source: TreeSource,
    state: Path,
    *,
    trees: bool = False,
    **options: Callable[[], bool],
) -> dict[int, ReplicaSnapshot]:
    """All replicas of a volume by container."""
    disk = Disk()
    with open_volume(root, hold=Hold.READ_ONLY, state_folder=state, disk=disk) as volume:
        walk = VolumeSurvey(volume, disk, trees=TreeFiles(volume, disk) if trees else None)
        return {found.container_id: found for found in walk.replicas(source, **options)}


def make(root: Path, fill: Callable[[VolumeMaker], object] = lambda _: None) -> VolumeMaker:
    """A volume with containers 1 and 2, each with block 20 of two chunks."""
    with VolumeMaker(root) as made:
        for container_id in (1, 2):
            made.container(container_id)
            made.block(container_id, 20, whole(3000), whole(3000, 3000))
        fill(made)
    return made


def tree_path(made: VolumeMaker, container_id: int = 1) -> Path:
    return made.folder(container_id) / "metadata" / f"{container_id}.tree"


def store(made: VolumeMaker, *blocks: BlockTree, root: int | None = None) -> ContainerTree:
    stored = ContainerTree.of(ContainerId(1), blocks)
    stored = stored if root is None else ContainerTree(ContainerId(1), root, stored.blocks)
    tree_path(made).write_bytes(encode_tree(stored))
    return stored


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("source", "key"),
    [
        (TreeSource.TREE, "treeFileRoot"),
        (TreeSource.METADATA, "rootFromMetadata"),
        (TreeSource.DATA, "rootFromData"),
    ],
)
def test_roots_are_those_that_an_independent_reader_found(
    tmp_path: Path, moment: str, source: TreeSource, key: str
) -> None:
    expected = json.loads((OZONE / "expected.json").read_text())[moment]
    folder = unpack(moment, tmp_path / "volumes")
    for node in ("dn1", "dn2", "dn3"):
        rows = {row["containerID"]: row for row in expected if row["datanode"] == node}
        found = survey(folder / node / "volume1", source, tmp_path / node)
        assert found.keys() == rows.keys()
        for container_id, replica in found.items():
            assert replica.state is ReplicaState[rows[container_id]["state"]]
            wanted = rows[container_id][key]
            if replica.source is source and wanted is not None:
                assert root_hex(replica.tree.data_checksum) == wanted


def test_erasure_coded_replicas_come_with_their_index(tmp_path: Path) -> None:
    folder = unpack("healthy", tmp_path / "volumes", fixture=ERASURE_CODED)
    nodes = sorted(path.name for path in folder.iterdir() if path.is_dir())
    indexes = [
        found.replica_index
        for node in nodes
        for found in survey(folder / node / "volume1", TreeSource.TREE, tmp_path / node).values()
        if found.container_id == 3
    ]
    assert sorted(indexes) == [1, 2, 3, 4, 5]


def test_a_container_without_a_tree_is_taken_from_its_records_and_says_so(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    stored = ContainerTree.of(
        ContainerId(2), [BlockTree.live(BlockId(20), [ChunkTree(0, 3000, 5)])]
    )
    tree_path(made, 2).write_bytes(encode_tree(stored))
    found = survey(made.root, TreeSource.TREE, tmp_path / "state")
    assert [found[i].source for i in (1, 2)] == [TreeSource.METADATA, TreeSource.TREE]
    assert [chunk.offset for chunk in found[1].tree.blocks[0].chunks] == [0, 3000]
    assert found[2].tree == stored
    assert not found[1].faults + found[2].faults
    assert found[1].notes == ("there is no stored tree",)
    assert (found[1].bcs_id, found[1].state) == (7, ReplicaState.CLOSED)


def test_a_tree_of_tombstones_alone_is_laid_over_what_the_records_tell(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    tree_path(made).write_bytes(encode_tree(ContainerTree(ContainerId(1), None, (TOMBSTONE,))))
    for source in TreeSource:
        tree = survey(made.root, source, tmp_path / "state")[1].tree
        assert [(block.block_id, block.deleted) for block in tree.blocks] == [
            (20, False),
            (99, True),
        ]


@pytest.mark.parametrize("garbage", [b"", b"\xff\xffgarbage"])
def test_an_unreadable_tree_is_a_fault_and_counts_as_absent(tmp_path: Path, garbage: bytes) -> None:
    made = make(tmp_path / "v")
    tree_path(made).write_bytes(garbage)
    found = survey(made.root, TreeSource.TREE, tmp_path / "state")[1]
    assert found.source is TreeSource.METADATA
    assert [fault.kind for fault in found.faults] == [UNREADABLE]


def test_a_root_that_its_blocks_do_not_fold_to_is_a_fault(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    stored = store(made, BlockTree.live(BlockId(20), [ChunkTree(0, 3000, 5)]), root=1234)
    found = survey(made.root, TreeSource.TREE, tmp_path / "state")[1]
    assert (found.source, found.tree) == (TreeSource.TREE, stored)
    assert [fault.kind for fault in found.faults] == [ROOT_DIFFERS]


def test_a_tree_with_an_impossible_place_is_not_taken(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    store(made, BlockTree.live(BlockId(20), [ChunkTree(-1, 3000, 5)]))
    found = survey(made.root, TreeSource.TREE, tmp_path / "state")[1]
    assert found.source is TreeSource.METADATA
    assert [fault.kind for fault in found.faults] == [UNREADABLE]


def test_a_container_that_cannot_be_read_is_a_fault_and_the_walk_goes_on(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    (made.folder(1) / "metadata" / "1.container").write_bytes(b"nonsense")
    for source, known in (
        (TreeSource.TREE, TreeSource.METADATA),
        (TreeSource.METADATA, TreeSource.METADATA),
        (TreeSource.DATA, None),
    ):
        found = survey(made.root, source, tmp_path / "state")
        assert (found[1].state, found[1].source) == (None, known)
        assert [fault.kind for fault in found[1].faults] == ["CORRUPT_CONTAINER_FILE"]
        assert (found[2].state, bool(found[2].faults)) == (ReplicaState.CLOSED, False)


def test_a_container_of_an_older_schema_has_no_tree_and_says_why(tmp_path: Path) -> None:
    made = make(tmp_path / "v", lambda made: made.container(3, schema_version="2"))
    found = survey(made.root, TreeSource.TREE, tmp_path / "state")
    assert (found[3].state, found[3].source, found[3].tree.data_checksum) == (None, None, None)
    (fault,) = found[3].faults
    assert (fault.kind, "container_unsupported" in fault.detail) == (UNREADABLE, True)


def test_a_lost_folder_is_found_by_its_records(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    shutil.rmtree(made.folder(2))
    found = survey(made.root, TreeSource.DATA, tmp_path / "state")
    assert (found[2].state, found[2].source) == (None, None)
    assert [fault.kind for fault in found[2].faults] == ["MISSING_CONTAINER_DIR"]


def test_deleted_containers_are_left_out(tmp_path: Path) -> None:
    made = make(tmp_path / "v", lambda made: made.container(3, state=ReplicaState.DELETED))
    for source in TreeSource:
        assert survey(made.root, source, tmp_path / "state").keys() == {1, 2}


def test_a_database_that_cannot_be_read_is_the_volumes_fault_and_trees_are_still_told(
    tmp_path: Path,
) -> None:
    made = make(tmp_path / "v")
    stored = store(made, BlockTree.live(BlockId(20), [ChunkTree(0, 3000, 5)]))
    shutil.rmtree(made.database_path)
    disk = Disk()
    with open_volume(
        made.root, hold=Hold.READ_ONLY, state_folder=tmp_path / "s", disk=disk
    ) as volume:
        walk = VolumeSurvey(volume, disk)
        assert walk.fault is not None
        found = {replica.container_id: replica for replica in walk.replicas(TreeSource.TREE)}
    assert (found[1].source, found[1].tree) == (TreeSource.TREE, stored)
    assert found[2].source is None
    assert [fault.kind for fault in found[2].faults] == ["INACCESSIBLE_DB"]


def test_data_tell_of_damage_that_the_records_hide(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    flip(made.block_file(1, 20), 3500)
    found = survey(made.root, TreeSource.DATA, tmp_path / "state")
    assert [(f.kind, f.block_id, f.offset) for f in found[1].faults] == [
        ("CORRUPT_CHUNK", 20, 3000)
    ]
    assert [chunk.checksum_matches for chunk in found[1].tree.blocks[0].chunks] == [True, False]
    assert not survey(made.root, TreeSource.METADATA, tmp_path / "state")[1].faults


def test_what_an_agent_keeps_beside_a_read_only_volume_counts(tmp_path: Path) -> None:
    made, state = make(tmp_path / "v"), tmp_path / "state"
    ours = ContainerTree.of(
        ContainerId(1), [BlockTree.live(BlockId(20), [ChunkTree(0, 3000, 5)]), TOMBSTONE]
    )
    disk = Disk()
    with open_volume(made.root, hold=Hold.READ_ONLY, state_folder=state, disk=disk) as volume:
        TreeFiles(volume, disk).update(ContainerId(1), ours)
        walk = VolumeSurvey(volume, disk, trees=TreeFiles(volume, disk), scanned_ms={1: 555}.get)
        first, second = walk.replicas(TreeSource.TREE)
        assert (first.source, first.tree, first.scanned_at_ms) == (TreeSource.TREE, ours, 555)
        assert second.scanned_at_ms is None
        # The tombstone is remembered beside the tree too.
        (state / STORAGE / "trees" / "1.tree").unlink()
        first, _ = walk.replicas(TreeSource.TREE)
        assert [block.block_id for block in first.tree.blocks if block.deleted] == [99]
        assert (walk.datanode, walk.volume) == (NODE, STORAGE)


def test_a_walk_can_be_cut_short_and_changes_nothing(tmp_path: Path) -> None:
    made = make(tmp_path / "v")
    before = state_of(made.root)
    with pytest.raises(OperationInterruptedError):
        survey(made.root, TreeSource.DATA, tmp_path / "state", cancelled=lambda: True)
    survey(made.root, TreeSource.DATA, tmp_path / "state", trees=True)
    assert state_of(made.root) == before


def test_a_record_that_cannot_be_read_costs_its_own_block(tmp_path: Path) -> None:
    made = make(
        tmp_path / "v",
        lambda made: made.put(
            OzoneTable.BLOCK_DATA, block_key(ContainerId(1), BlockId(30)), b"\xff\xff"
        ),
    )
    found = survey(made.root, TreeSource.METADATA, tmp_path / "state")[1]
    assert [block.block_id for block in found.tree.blocks] == [20]
    assert [(fault.kind, fault.block_id) for fault in found.faults] == [("INACCESSIBLE_DB", 30)]
