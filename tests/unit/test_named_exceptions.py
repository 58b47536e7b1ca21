"""The two exceptions that docs/safety.md names, and what it tells an operator to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from merkle.record import DeleteTransaction
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.rocks import Batch, OzoneTable, block_key
from ozone.volume import Version
from tests.support.in_process import Datanode, datanodes, reconcile
from tests.support.volumes import content, flip, new_volume, owned, write_block

SEVEN = ContainerId(7)
A, B = BlockId(1), BlockId(2)
NAMES = ("dn1", "dn2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two datanodes with equal replicas of container 7."""
    for number, name in enumerate(NAMES, start=1):
        node_id = f"00000000-0000-4000-8000-00000000000{number}"
        root = new_volume(tmp_path / name, version=Version(f"DS-{number}", "CID-x", node_id))
        with owned(root, tmp_path / "writer" / name) as made:
            made.writer.create_container(SEVEN)
            for block_id in (A, B):
                write_block(made.writer, SEVEN, block_id, 3000, bcs_id=block_id)
            made.writer.close(SEVEN)
    return tmp_path


@contextmanager
def started(folder: Path) -> Iterator[dict[str, Datanode]]:
    with datanodes({name: folder / name for name in NAMES}, folder / "state") as nodes:
        yield nodes


def delete(node: Datanode) -> None:
    assert node.held.writer is not None
    node.held.writer.receive_delete(DeleteTransaction(1, SEVEN, (A,)))
    node.held.writer.delete_blocks(SEVEN)
    node.held.reload(SEVEN)


def lose_row(node: Datanode) -> None:
    batch = Batch()
    batch.delete(OzoneTable.BLOCK_DATA, block_key(SEVEN, A))
    node.held.volume.database.write(batch)


def test_a_block_whose_row_was_lost_before_its_delete_comes_back_until_a_peer_deletes_it(
    folder: Path,
) -> None:
    with started(folder) as nodes:
        ours, theirs = nodes["dn1"], nodes["dn2"]
        lose_row(ours)
        delete(ours)
        assert reconcile(nodes, "dn1", SEVEN).progress.blocks_added == 1
        assert ours.store.record(SEVEN, A) is not None
        delete(theirs)
        outcome = reconcile(nodes, "dn1", SEVEN)
        assert outcome.claimed_deleted == (A,)
        # The job's report is the only sign that these bytes are left.
        assert ours.store.record(SEVEN, A) is not None
        assert reconcile(nodes, "dn2", SEVEN).progress.blocks_added == 0


def test_a_peers_false_tombstone_ends_the_repair_of_a_block_until_an_operator_acts(
    folder: Path,
) -> None:
    with started(folder) as nodes:
        ours, theirs = nodes["dn1"], nodes["dn2"]
        tree = ContainerTree.of(SEVEN, [BlockTree.tombstone(A, 77)])
        theirs.held.trees.update(SEVEN, tree)
        assert reconcile(nodes, "dn1", SEVEN).claimed_deleted == (A,)
        flip(ours.held.containers.get(SEVEN).block_path(A), 100)
        outcome = reconcile(nodes, "dn1", SEVEN)
        assert outcome.progress.windows_written == 0
    # The agents are stopped: the tree and both copies go, on each of the datanodes.
    for name in NAMES:
        (tree_file,) = (folder / name).rglob("7.tree")
        tree_file.unlink()
        for kind in ("previous", "tombstones", "trees"):
            for copy in (folder / "state" / name).glob(f"*/{kind}/7.tree"):
                copy.unlink()
    with started(folder) as nodes:
        for name in NAMES:
            replica = nodes[name].store.open_replica(
                SEVEN, "scan", cancelled=Event(), on_bytes=lambda _: None
            )
            replica.scan()
        assert reconcile(nodes, "dn1", SEVEN).progress.windows_written > 0
        assert nodes["dn1"].store.read(SEVEN, A, 0, 3000) == content(A, 3000)
