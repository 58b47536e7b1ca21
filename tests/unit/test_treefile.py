"""Tree files: merged, replaced durably, and no deletion ever forgotten (rows M1-M15,
inv-I5, inv-I7).
"""

import errno
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

import pytest

from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.errors import TreeRefusedError
from merkle.limits import BLOCK_CHUNKS_MAX, MESSAGE_BYTES_MAX
from merkle.record import BlockRecord, ChunkRecord, DeleteTransaction
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from ozone.errors import ContainerNotFoundError, StaleTreeError
from ozone.treefile import TreeFiles, TreeStatus
from ozone.volume import Hold, Volume, open_volume
from protos.convert import tree_from_bytes
from runtime.disk import Disk, Operation
from runtime.errors import DiskError
from tests.support.disk import CountingDisk, FailingDisk
from tests.support.trees import (
    CONTAINER,
    block,
    chunk,
    container,
    counted_tree,
    deleted,
    without_root,
)
from tests.support.volumes import (
    Owned,
    block_record,
    copy_volume,
    new_volume,
    owned,
    tree_of_files,
    unpack,
    write_block,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return new_volume(tmp_path / "volume1")


@pytest.fixture
def owner(root: Path, tmp_path: Path) -> Iterator[Owned]:
    """A volume with the empty container 12."""
    with owned(root, tmp_path / "state") as held:
        held.writer.create_container(CONTAINER)
        yield held


@pytest.fixture
def trees(owner: Owned) -> TreeFiles:
    return owner.trees


def records(*block_ids: int) -> list[BlockRecord]:
    """The conformance rows' deleted block data: chunks at offsets 0, 1, 2 with stored
    checksums counting from 0.
    """
    windows = (bytes([0, 1, 2]), bytes([3, 4, 5]), bytes([6, 7, 8]))
    chunks = [
        ChunkRecord(i, 1, ChecksumType.CRC32, 1, (window,)) for i, window in enumerate(windows)
    ]
    return [block_record(CONTAINER, block_id, chunks) for block_id in block_ids]


def tombstones(tree: ContainerTree) -> list[int]:
    return [b.block_id for b in tree.blocks if b.deleted]


def test_the_file_has_the_name_that_ozone_gave_it(owner: Owned) -> None:
    """M1."""
    owner.trees.update(CONTAINER, counted_tree(1))
    path = owner.volume.container_folder(CONTAINER) / "metadata" / f"{CONTAINER}.tree"
    assert owner.trees.path(CONTAINER) == path
    assert path.is_file()
    assert {p.name for p in path.parent.iterdir()} == {
        f"{CONTAINER}.tree",
        f"{CONTAINER}.container",
    }


def test_an_empty_update_writes_a_tree_with_root_zero(trees: TreeFiles) -> None:
    """M2."""
    trees.update(CONTAINER, TreeBuilder(CONTAINER).build())
    stored = trees.read(CONTAINER)
    assert stored.raw.hex() == "080c12020800"
    assert (stored.tree.data_checksum, stored.tree.blocks) == (0, ())


def test_adding_no_tombstones_writes_a_tree_without_root(trees: TreeFiles) -> None:
    """M3."""
    trees.add_tombstones(CONTAINER, [])
    stored = trees.read(CONTAINER)
    assert stored.status is TreeStatus.PRESENT
    assert (stored.tree.container_id, stored.tree.data_checksum, stored.tree.blocks) == (
        CONTAINER,
        None,
        (),
    )


def test_an_update_writes_the_tree_as_it_is(trees: TreeFiles) -> None:
    """M4."""
    assert trees.update(CONTAINER, counted_tree(5)) == counted_tree(5)
    assert trees.read(CONTAINER).raw == encode_tree(counted_tree(5))


def test_tombstones_alone_make_no_root(trees: TreeFiles) -> None:
    """M5, M14."""
    trees.add_tombstones(CONTAINER, records(1, 3, 7))
    stored = trees.read(CONTAINER)
    assert [f"{b.data_checksum:x}" for b in stored.tree.blocks] == [
        "3f7361e4",
        "631af6de",
        "dbc9d8aa",
    ]
    assert tombstones(stored.tree) == [1, 3, 7]
    assert stored.tree.data_checksum is None


def test_a_block_deleted_twice_is_one_tombstone(trees: TreeFiles) -> None:
    """M6."""
    trees.add_tombstones(CONTAINER, records(1, 2, 2, 3))
    trees.add_tombstones(CONTAINER, records(1, 1, 4))
    assert tombstones(trees.read(CONTAINER).tree) == [1, 2, 3, 4]


def test_tombstones_are_stored_sorted(trees: TreeFiles) -> None:
    """M7."""
    trees.add_tombstones(CONTAINER, records(2, 1, 3))
    assert tombstones(trees.read(CONTAINER).tree) == [1, 2, 3]


def test_tombstones_and_update_give_the_same_in_either_order(
    trees: TreeFiles, owner: Owned
) -> None:
    """M8, M9."""
    trees.add_tombstones(CONTAINER, records(1, 2))
    trees.update(CONTAINER, counted_tree(5))
    first = trees.read(CONTAINER).tree
    assert tombstones(first) == [1, 2]
    assert f"{first.data_checksum:x}" == "e85e9bd5"
    owner.writer.create_container(ContainerId(13))
    other = ContainerTree.of(ContainerId(13), counted_tree(5).blocks)
    trees.update(ContainerId(13), other)
    trees.add_tombstones(ContainerId(13), records(1, 2))
    assert trees.read(ContainerId(13)).tree.blocks == first.blocks
    assert trees.read(ContainerId(13)).tree.data_checksum == first.data_checksum


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.SYNC, Operation.RENAME])
def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    owner: Owned, operation: Operation
) -> None:
    """M10: by the file port, since root may write anywhere."""
    owner.trees.update(CONTAINER, counted_tree(3))
    before = tree_of_files(owner.volume.root / "hdds" / owner.volume.cluster_id / "current")
    metadata = owner.volume.container_folder(CONTAINER) / "metadata"
    disk = FailingDisk(errno.EACCES, lambda op, path: op is operation and path.parent == metadata)
    failing = TreeFiles(owner.volume, disk)
    with pytest.raises(DiskError) as failed:
        failing.update(CONTAINER, counted_tree(5))
    assert failed.value.facts["errno"] == "EACCES"
    assert disk.failed
    assert failing.stats.failures == 1
    assert tree_of_files(owner.volume.root / "hdds" / owner.volume.cluster_id / "current") == before
    assert owner.trees.read(CONTAINER).tree == counted_tree(3)


def test_an_unreadable_file_is_said_to_be_and_an_update_replaces_it(trees: TreeFiles) -> None:
    """M11: unlike Ozone, the old file is kept in quarantine."""
    trees.path(CONTAINER).write_bytes(b"\x01\x02\x03")
    stored = trees.read(CONTAINER)
    assert (stored.status, stored.reason, stored.tree.blocks) == (
        TreeStatus.UNREADABLE,
        "unparsable",
        (),
    )
    trees.update(CONTAINER, counted_tree(5))
    assert trees.read(CONTAINER).tree == counted_tree(5)
    assert trees.stats.quarantined == 1


def test_an_empty_file_counts_as_unreadable_and_an_update_restores_it(trees: TreeFiles) -> None:
    """M12: Ozone parses it to an empty message; here it is known that something was
    lost.
    """
    trees.path(CONTAINER).write_bytes(b"")
    stored = trees.read(CONTAINER)
    assert (stored.status, stored.reason, stored.fingerprint) == (
        TreeStatus.UNREADABLE,
        "empty",
        b"",
    )
    assert (stored.tree.data_checksum, stored.tree.blocks) == (None, ())
    trees.update(CONTAINER, counted_tree(5))
    assert trees.read(CONTAINER).tree == counted_tree(5)


def test_a_root_of_zero_is_a_root(trees: TreeFiles) -> None:
    """M14: unknown is None, wherever it comes from."""
    assert trees.read(CONTAINER).tree.data_checksum is None
    trees.path(CONTAINER).write_bytes(b"")
    assert trees.read(CONTAINER).tree.data_checksum is None
    trees.path(CONTAINER).write_bytes(encode_tree(without_root(deleted(1, 5))))
    assert trees.read(CONTAINER).tree.data_checksum is None
    trees.path(CONTAINER).write_bytes(encode_tree(container()))
    assert trees.read(CONTAINER).tree.data_checksum == 0
    trees.path(CONTAINER).write_bytes(encode_tree(counted_tree(1)))
    assert trees.read(CONTAINER).tree.data_checksum == counted_tree(1).data_checksum


def test_reads_and_writes_are_counted_and_an_update_reads_too(trees: TreeFiles) -> None:
    """M15."""
    trees.read(CONTAINER)
    assert (trees.stats.reads, trees.stats.writes) == (1, 0)
    trees.update(CONTAINER, counted_tree(2))
    assert (trees.stats.reads, trees.stats.writes) == (2, 1)
    trees.update(CONTAINER, counted_tree(2))
    assert (trees.stats.reads, trees.stats.writes, trees.stats.unchanged) == (3, 1, 1)
    assert trees.stats.read_s > 0
    assert trees.stats.write_s > 0


def test_an_absent_file_is_no_tree_and_no_loss(trees: TreeFiles) -> None:
    stored = trees.read(CONTAINER)
    assert (stored.status, stored.raw, stored.fingerprint, stored.recovered) == (
        TreeStatus.ABSENT,
        b"",
        b"",
        (),
    )
    with pytest.raises(ContainerNotFoundError):
        trees.read(ContainerId(99))


def test_a_stale_tree_does_not_overwrite_a_newer_one(trees: TreeFiles) -> None:
    began = trees.read(CONTAINER).generation
    trees.update(CONTAINER, counted_tree(2), expected_generation=began)
    with pytest.raises(StaleTreeError):
        trees.update(CONTAINER, counted_tree(1), expected_generation=began)
    assert trees.read(CONTAINER).tree == counted_tree(2)
    trees.update(CONTAINER, counted_tree(3), expected_generation=trees.read(CONTAINER).generation)
    assert trees.read(CONTAINER).tree == counted_tree(3)


def test_a_generation_never_returns_with_the_tree_that_had_it(trees: TreeFiles) -> None:
    """Damage, repair, and the tree is what it was: a scan that began before is old."""
    trees.update(CONTAINER, counted_tree(2))
    began = trees.read(CONTAINER).generation
    for tree in (counted_tree(3), counted_tree(2)):
        trees.update(CONTAINER, tree)
    assert trees.read(CONTAINER).tree == counted_tree(2)
    assert trees.generation(CONTAINER) != began
    with pytest.raises(StaleTreeError):
        trees.update(CONTAINER, counted_tree(3), expected_generation=began)


def test_a_change_of_blocks_makes_a_scan_old_and_not_the_repair_that_made_it(
    trees: TreeFiles,
) -> None:
    trees.update(CONTAINER, counted_tree(2))
    began = trees.read(CONTAINER).generation
    trees.blocks_changed(CONTAINER)
    with pytest.raises(StaleTreeError):
        trees.update(CONTAINER, counted_tree(3), expected_generation=began)
    trees.update(CONTAINER, counted_tree(3), expected_generation=began, blocks_may_change=True)
    trees.update(CONTAINER, counted_tree(2))
    with pytest.raises(StaleTreeError):
        trees.update(CONTAINER, counted_tree(3), expected_generation=began, blocks_may_change=True)


@pytest.mark.parametrize("loss", ["garbage", "empty", "removed", "old version put back"])
def test_a_deleted_block_stays_deleted_when_the_tree_is_lost(trees: TreeFiles, loss: str) -> None:
    """inv-I5: also where an old tree is put back."""
    trees.update(CONTAINER, counted_tree(5))
    old = trees.read(CONTAINER).raw
    trees.add_tombstones(CONTAINER, records(1))
    trees.add_tombstones(CONTAINER, records(4))
    whole = trees.read(CONTAINER).tree
    path = trees.path(CONTAINER)
    match loss:
        case "garbage":
            path.write_bytes(b"\xff" * 30)
        case "empty":
            path.write_bytes(b"")
        case "removed":
            path.unlink()
        case _:
            path.write_bytes(old)
    stored = trees.read(CONTAINER)
    assert [b.block_id for b in stored.recovered] == [1, 4]
    assert tombstones(stored.known) == [1, 4]
    trees.update(CONTAINER, counted_tree(5))
    assert trees.read(CONTAINER).tree == whole
    assert trees.read(CONTAINER).recovered == ()


def test_the_previous_version_gives_back_what_a_datanode_had_deleted(trees: TreeFiles) -> None:
    """A tombstone that was written by Ozone, not by us, is remembered from the next
    update on.
    """
    trees.path(CONTAINER).write_bytes(encode_tree(container(block(1, chunk(0)), deleted(2, 7))))
    trees.update(CONTAINER, container(block(1, chunk(0)), block(3, chunk(0))))
    trees.path(CONTAINER).write_bytes(b"\xff")
    assert [b.block_id for b in trees.read(CONTAINER).recovered] == [2]


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_in_the_tree_is_noticed(trees: TreeFiles, bit: int) -> None:
    raw = encode_tree(counted_tree(3))
    # In the root, and in a chunk's checksum.
    for position in (6, 40):
        damaged = bytearray(raw)
        damaged[position] ^= 1 << bit
        trees.path(CONTAINER).write_bytes(bytes(damaged))
        assert trees.read(CONTAINER).status is TreeStatus.UNREADABLE


def test_a_live_block_that_a_flipped_bit_calls_deleted_is_not_deleted(trees: TreeFiles) -> None:
    """inv-I6: the flag, the last byte of a block, is under no sum; but a tombstone has
    no chunks.
    """
    raw = bytearray(encode_tree(counted_tree(2)))
    raw[-1] ^= 2
    trees.path(CONTAINER).write_bytes(bytes(raw))
    stored = trees.read(CONTAINER)
    assert (stored.status, stored.reason) == (TreeStatus.UNREADABLE, "tombstone_with_chunks")
    trees.remember(stored)
    assert trees.update(CONTAINER, counted_tree(2)) == counted_tree(2)
    assert trees.deleted_blocks(CONTAINER) == frozenset()
    assert trees.stats.quarantined == 1


def test_tombstones_come_back_from_delete_transactions_that_were_not_finished(owner: Owned) -> None:
    for block_id in (1, 2, 3):
        write_block(owner.writer, CONTAINER, block_id, 100)
    tree = owner.writer.close(CONTAINER)
    owner.writer.receive_delete(DeleteTransaction(5, CONTAINER, (BlockId(2), BlockId(77))))
    assert owner.trees.read(CONTAINER).recovered == ()
    owner.trees.path(CONTAINER).write_bytes(b"\xff")
    expected = BlockTree.tombstone(BlockId(2), tree.blocks[1].data_checksum)
    assert owner.trees.read(CONTAINER).recovered == (expected,)


def test_a_quarantined_file_is_kept_once_outside_the_volume(owner: Owned) -> None:
    for _ in range(2):
        owner.trees.path(CONTAINER).write_bytes(b"\x01\x02\x03")
        owner.trees.update(CONTAINER, counted_tree(1))
    kept = list((owner.volume.state_folder / "quarantine").iterdir())
    assert [file.read_bytes() for file in kept] == [b"\x01\x02\x03"]


def test_a_block_that_becomes_a_tombstone_is_told_of_before_the_tree_is_written(
    owner: Owned,
) -> None:
    told: list[tuple[int, list[int]]] = []
    trees = TreeFiles(
        owner.volume,
        Disk(),
        on_deleted=lambda container_id, ids: told.append((container_id, [*ids])),
    )
    trees.update(CONTAINER, counted_tree(3))
    tombstones = [BlockTree.tombstone(BlockId(i), 7) for i in (2, 3)]
    gone = ContainerTree.of(CONTAINER, [counted_tree(3).blocks[0], *tombstones])
    for _ in range(2):
        trees.update(CONTAINER, gone)
    assert told == [(CONTAINER, [2, 3])]

    def refuse(*_: object) -> None:
        raise DiskError("the audit file is full")

    before = owner.trees.read(CONTAINER)
    with pytest.raises(DiskError):
        TreeFiles(owner.volume, Disk(), on_deleted=refuse).update(
            CONTAINER, ContainerTree.of(CONTAINER, [BlockTree.tombstone(BlockId(1), 7)])
        )
    assert owner.trees.read(CONTAINER) == before


def test_nothing_is_written_where_nothing_changes(owner: Owned) -> None:
    """inv-I8."""
    owner.trees.update(CONTAINER, counted_tree(3))
    disk = CountingDisk()
    assert TreeFiles(owner.volume, disk).update(CONTAINER, counted_tree(3)) == counted_tree(3)
    assert disk.operations == []


def test_an_update_is_durable_before_it_is_visible(owner: Owned) -> None:
    """reliability F1: write, sync, rename, sync of the folder."""
    disk = CountingDisk()
    TreeFiles(owner.volume, disk).update(CONTAINER, counted_tree(3))
    path = owner.trees.path(CONTAINER)
    temporary = path.with_name(path.name + ".tmp")
    assert [(op, p) for op, p in disk.operations if p.parent == path.parent or p == path.parent][
        -4:
    ] == [
        (Operation.WRITE, temporary),
        (Operation.SYNC, temporary),
        (Operation.RENAME, path),
        (Operation.SYNC_FOLDER, path.parent),
    ]


@dataclass
class _MeetingDisk(Disk):
    """During its first write it lets another thread go first, if that can."""

    other: Callable[[], object]
    thread: Thread | None = None

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        if self.thread is None:
            self.thread = Thread(target=self.other)
            self.thread.start()
            # It ends only if nothing keeps it out.
            self.thread.join(timeout=0.2)
        act()


@pytest.mark.parametrize("change", ["update", "add_tombstones"])
def test_two_changes_of_one_tree_at_a_time_are_both_in_it(owner: Owned, change: str) -> None:
    owner.trees.update(CONTAINER, counted_tree(3))

    def delete_block(block_id: int) -> None:
        if change == "update":
            files.update(CONTAINER, container(deleted(block_id, 7)))
        else:
            files.add_tombstones(CONTAINER, records(block_id))

    disk = _MeetingDisk(lambda: delete_block(2))
    files = TreeFiles(owner.volume, disk)
    delete_block(1)
    assert disk.thread is not None
    disk.thread.join()
    assert tombstones(files.read(CONTAINER).tree) == [1, 2]


def test_a_deletion_while_earlier_ones_are_copied_is_copied_too(owner: Owned) -> None:
    path = owner.trees.path(CONTAINER)
    path.write_bytes(encode_tree(container(deleted(1, 7))))
    disk = _MeetingDisk(lambda: files.add_tombstones(CONTAINER, records(2)))
    files = TreeFiles(owner.volume, disk)
    files.remember(files.read(CONTAINER))
    assert disk.thread is not None
    disk.thread.join()
    path.unlink()
    assert tombstones(files.read(CONTAINER).known) == [1, 2]


def _padded(tree: ContainerTree, *, spoilt: bool = False) -> bytes:
    """A tree and a field of 32 MiB that nobody knows; spoilt, its last bit is
    another.
    """
    raw = bytearray(encode_tree(tree))
    raw[-1] ^= spoilt
    return bytes(raw) + b"\x7a\x80\x80\x80\x10" + bytes(32 << 20)


def _long_block(block_id: int) -> BlockTree:
    """Of more chunks than we take."""
    return block(block_id, *(ChunkTree(i, 1, 7) for i in range(BLOCK_CHUNKS_MAX + 1)))


def _too_large() -> bytes:
    return _padded(container(block(1, chunk(0)), deleted(2, -7), deleted(9, 5)))


def _too_many_chunks() -> bytes:
    return encode_tree(container(_long_block(1), deleted(2, -7), deleted(9, 5)))


@pytest.mark.parametrize(
    ("made", "reason"), [(_too_large, "too_large"), (_too_many_chunks, "too_many_chunks")]
)
def test_a_tree_beyond_the_limits_is_set_aside_but_for_its_tombstones(
    owner: Owned, made: Callable[[], bytes], reason: str
) -> None:
    """inv-I5: it may be the only place that has them."""
    trees = owner.trees
    trees.path(CONTAINER).write_bytes(made())
    stored = trees.read(CONTAINER)
    assert (stored.status, stored.reason, stored.tree.data_checksum) == (
        TreeStatus.UNREADABLE,
        reason,
        None,
    )
    assert stored.known.blocks == (deleted(2, -7), deleted(9, 5))
    assert trees.deleted_blocks(CONTAINER) == {2, 9}
    # One that a datanode wrote has its tombstones kept when it is first seen, like any
    # other.
    trees.remember(stored)
    assert tree_from_bytes(
        (owner.volume.state_folder / "tombstones" / f"{CONTAINER}.tree").read_bytes(), CONTAINER
    )
    assert tombstones(trees.update(CONTAINER, counted_tree(3))) == [2, 9]
    assert trees.read(CONTAINER).status is TreeStatus.PRESENT
    [kept] = (owner.volume.state_folder / "quarantine").iterdir()
    assert kept.read_bytes() == made()


DOES_NOT_ADD_UP: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: bytes(MESSAGE_BYTES_MAX + 1),
    "cut short": lambda: _too_large()[:-1],
    "another container's": lambda: _padded(container(deleted(2, 7), container_id=CONTAINER + 1)),
    "a live block made a tombstone by one bit": lambda: _padded(
        container(block(2, chunk(0))), spoilt=True
    ),
    "another root": lambda: _padded(replace(container(deleted(2, 7)), data_checksum=5)),
}


@pytest.mark.parametrize("case", DOES_NOT_ADD_UP)
def test_of_a_tree_beyond_the_limits_that_does_not_add_up_nothing_is_believed(
    trees: TreeFiles, case: str
) -> None:
    """inv-I6."""
    trees.path(CONTAINER).write_bytes(DOES_NOT_ADD_UP[case]())
    assert trees.read(CONTAINER).known.blocks == ()
    assert trees.update(CONTAINER, counted_tree(1)) == counted_tree(1)
    assert trees.stats.quarantined == 1


def test_a_tree_beyond_the_limits_stays_where_what_would_replace_it_is_too(
    trees: TreeFiles,
) -> None:
    """The container is larger than we handle: its tree is whole, and Ozone's to
    read.
    """
    path = trees.path(CONTAINER)
    path.write_bytes(_too_many_chunks())
    with pytest.raises(TreeRefusedError) as refused:
        trees.update(CONTAINER, container(_long_block(1)))
    assert refused.value.reason == "too_many_chunks"
    assert path.read_bytes() == _too_many_chunks()
    assert trees.stats.quarantined == 0


def test_a_reader_copies_no_tree_beyond_the_limits_out_of_the_volume(tmp_path: Path) -> None:
    """The datanode may write one after each delete, and would fill our disk."""
    root = new_volume(tmp_path / "volume1")
    with owned(root, tmp_path / "theirs") as datanode:
        datanode.writer.create_container(CONTAINER)
        theirs = datanode.trees.path(CONTAINER)
        theirs.write_bytes(_too_large())
        with _reader(root, tmp_path / "ours") as volume:
            trees = TreeFiles(volume, Disk())
            ours = trees.update(CONTAINER, counted_tree(3))
            assert tombstones(ours) == [2, 9]
            assert trees.stats.quarantined == 0
            assert theirs.read_bytes() == _too_large()
            # Deleted by the datanode since, in the file that is older and still too
            # large.
            theirs.write_bytes(_padded(container(deleted(2, -7), deleted(3, 1), deleted(9, 5))))
            set_age(trees.path(CONTAINER), theirs, ours_s=0, theirs_s=60)
            again = trees.read(CONTAINER)
            assert again.tree == ours
            assert tombstones(again.known) == [2, 3, 9]


def test_a_deleted_container_is_forgotten(owner: Owned) -> None:
    owner.trees.update(CONTAINER, counted_tree(5))
    owner.trees.add_tombstones(CONTAINER, records(1))
    assert list(owner.volume.state_folder.rglob("*.tree"))
    owner.trees.forget(CONTAINER)
    assert not list(owner.volume.state_folder.rglob("*.tree"))


def test_deleted_blocks_follow_the_tree(trees: TreeFiles) -> None:
    assert trees.deleted_blocks(CONTAINER) == frozenset()
    trees.add_tombstones(CONTAINER, records(1))
    assert trees.deleted_blocks(CONTAINER) == {1}
    trees.update(CONTAINER, counted_tree(2))
    trees.add_tombstones(CONTAINER, records(2))
    assert trees.deleted_blocks(CONTAINER) == {1, 2}
    trees.path(CONTAINER).unlink()
    assert trees.deleted_blocks(CONTAINER) == {1, 2}


def _reader(root: Path, state: Path) -> Volume:
    return open_volume(root, hold=Hold.READ_ONLY, state_folder=state, disk=Disk())


def test_a_reader_keeps_its_trees_to_itself(tmp_path: Path) -> None:
    root = copy_volume(unpack("healthy", tmp_path / "healthy"), "dn1", tmp_path / "volume1")
    before = tree_of_files(root)
    six = ContainerId(6)
    with _reader(root, tmp_path / "state") as volume:
        trees = TreeFiles(volume, Disk())
        theirs = trees.read(six)
        assert len(tombstones(theirs.tree)) == 4
        fresh = ContainerTree.of(six, [b for b in theirs.tree.blocks if not b.deleted][:3])
        ours = trees.update(six, fresh, expected_generation=theirs.generation)
        assert tombstones(ours) == tombstones(theirs.tree)
        assert trees.read(six).tree == ours
        assert trees.path(six).is_relative_to(tmp_path / "state")
    assert tree_of_files(root) == before


def test_a_reader_learns_what_the_datanode_deletes_later(tmp_path: Path) -> None:
    root = new_volume(tmp_path / "volume1")
    with owned(root, tmp_path / "theirs") as datanode:
        datanode.writer.create_container(CONTAINER)
        datanode.trees.update(CONTAINER, counted_tree(5))
        with _reader(root, tmp_path / "ours") as volume:
            trees = TreeFiles(volume, Disk())
            trees.update(CONTAINER, counted_tree(4))
            datanode.trees.add_tombstones(CONTAINER, records(3))
            set_age(trees.path(CONTAINER), datanode.trees.path(CONTAINER), ours_s=0, theirs_s=60)
            assert [b.block_id for b in trees.read(CONTAINER).recovered] == [3]
            assert tombstones(trees.update(CONTAINER, counted_tree(4))) == [3]


def set_age(ours: Path, theirs: Path, *, ours_s: float, theirs_s: float) -> None:
    now_s = time.time()
    os.utime(ours, (now_s - ours_s, now_s - ours_s))
    os.utime(theirs, (now_s - theirs_s, now_s - theirs_s))


def test_a_reader_goes_by_whichever_tree_was_written_last(tmp_path: Path) -> None:
    """Ours after our scan; the datanode's once it has scanned or repaired the container
    since.
    """
    root = new_volume(tmp_path / "volume1")
    with owned(root, tmp_path / "theirs") as datanode:
        datanode.writer.create_container(CONTAINER)
        datanode.trees.update(CONTAINER, counted_tree(5))
        with _reader(root, tmp_path / "ours") as volume:
            trees = TreeFiles(volume, Disk())
            ours = TreeBuilder(CONTAINER, counted_tree(3))
            ours.set_deleted(BlockId(2), 77)
            stale = trees.update(CONTAINER, ours.build())
            paths = trees.path(CONTAINER), datanode.trees.path(CONTAINER)
            set_age(*paths, ours_s=0, theirs_s=60)
            began = trees.read(CONTAINER).generation
            assert trees.read(CONTAINER).tree == stale
            assert trees.raw(CONTAINER) == encode_tree(stale)

            # File systems have coarse clocks: the datanode may have written just before
            # our scan, and our scan has read what that left.
            set_age(*paths, ours_s=60, theirs_s=60)
            assert trees.read(CONTAINER).tree == stale

            set_age(*paths, ours_s=60, theirs_s=0)
            newer = trees.read(CONTAINER)
            assert newer.tree == counted_tree(5)
            assert trees.raw(CONTAINER) == newer.raw == paths[1].read_bytes()
            # What we know as deleted is not forgotten over it.
            assert (tombstones(newer.known), sorted(trees.deleted_blocks(CONTAINER))) == ([2], [2])
            # A scan that began before it came must not hide it.
            with pytest.raises(StaleTreeError):
                trees.update(CONTAINER, counted_tree(3), expected_generation=began)
            # An empty file is no tree, however new.
            paths[1].write_bytes(b"")
            assert trees.read(CONTAINER).tree == stale


def _written_by_a_datanode(owner: Owned, *block_ids: int) -> Path:
    """The tree file as Ozone leaves it: we keep nothing beside it."""
    owner.trees.update(CONTAINER, counted_tree(4))
    owner.trees.add_tombstones(CONTAINER, records(*block_ids))
    owner.trees.forget(CONTAINER)
    return owner.trees.path(CONTAINER)


def test_tombstones_of_a_tree_that_a_datanode_wrote_are_kept_when_it_is_first_seen(
    owner: Owned,
) -> None:
    """inv-I5: nothing was written by us, and then the file cannot be read any more."""
    path = _written_by_a_datanode(owner, 1, 3)
    before = path.read_bytes()
    owner.trees.remember(owner.trees.read(CONTAINER))
    assert path.read_bytes() == before
    path.write_bytes(b"\xff\xff garbage")
    stored = owner.trees.read(CONTAINER)
    assert (stored.status, tombstones(stored.known)) == (TreeStatus.UNREADABLE, [1, 3])


def test_what_is_kept_already_is_not_kept_again(root: Path, tmp_path: Path) -> None:
    disk = CountingDisk()
    with owned(root, tmp_path / "state", disk=disk) as held:
        held.writer.create_container(CONTAINER)
        _written_by_a_datanode(held, 1, 3)
        stored = held.trees.read(CONTAINER)
        disk.operations.clear()
        held.trees.remember(stored)
        assert disk.operations
        disk.operations.clear()
        held.trees.remember(stored)
        held.trees.remember(held.trees.read(CONTAINER))
        assert disk.operations == []


def test_remembering_an_older_reading_loses_nothing_that_was_kept_since(owner: Owned) -> None:
    _written_by_a_datanode(owner, 1)
    old = owner.trees.read(CONTAINER)
    owner.trees.add_tombstones(CONTAINER, records(3))
    owner.trees.remember(old)
    owner.trees.path(CONTAINER).unlink()
    (owner.volume.state_folder / "previous" / f"{CONTAINER}.tree").unlink()
    assert tombstones(owner.trees.read(CONTAINER).known) == [1, 3]


def test_a_tree_without_tombstones_leaves_nothing_to_keep(owner: Owned) -> None:
    owner.trees.update(CONTAINER, counted_tree(4))
    owner.trees.forget(CONTAINER)
    owner.trees.remember(owner.trees.read(CONTAINER))
    assert not list((owner.volume.state_folder / "tombstones").glob("*"))
