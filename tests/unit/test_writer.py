"""Writing containers: layout, order and counters of a datanode; deletes, closes and
repairs that are safe to repeat.
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from merkle.checksum import Buffer
from merkle.record import BlockRecord, DeleteTransaction
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import Counters
from ozone.descriptor import dump_descriptor, with_checksum
from ozone.errors import (
    BlockNotFoundError,
    ChunkGapError,
    ContainerNotFoundError,
    ContainerStateError,
    ContainerUnsupportedError,
    ReadOnlyError,
    UndoBudgetError,
)
from ozone.repair_writer import Patch, RepairWriter, WriteResult
from ozone.rocks import (
    Batch,
    Counter,
    OzoneTable,
    block_key,
    container_prefix,
    counter_key,
    long_bytes,
)
from ozone.scan import build_from_metadata, scan
from ozone.treefile import TreeFiles, TreeStatus
from ozone.undo import UndoStore
from ozone.volume import Hold, open_volume
from runtime.disk import Disk, Operation, disk_error
from runtime.errors import DatabaseError, DiskError
from tests.support.disk import (
    PAGE_BYTES,
    BadSectorDisk,
    CountingDisk,
    FailingDisk,
    no_file_grows,
)
from tests.support.volumes import (
    UNDO_BYTES_MAX,
    Owned,
    block_record,
    chunk_record,
    content,
    copy_volume,
    new_volume,
    owned,
    tree_of_files,
    unpack,
    write_block,
)

SEVEN = ContainerId(7)
ONE, TWO, THREE = BlockId(1), BlockId(2), BlockId(3)
JOB = "job-1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return new_volume(tmp_path / "volume1")


@pytest.fixture
def owner(root: Path, tmp_path: Path) -> Iterator[Owned]:
    """A volume with the empty, open container 7."""
    with owned(root, tmp_path / "state") as held:
        held.writer.create_container(SEVEN)
        yield held


@pytest.fixture
def closed(owner: Owned) -> Owned:
    """Container 7 closed, with blocks 1 (two chunks) and 2."""
    write_block(owner.writer, SEVEN, ONE, 4096, 1000, bcs_id=3)
    write_block(owner.writer, SEVEN, TWO, 3000, bcs_id=4)
    owner.writer.close(SEVEN)
    return owner


def counters(owner: Owned) -> Counters:
    return owner.store.open(SEVEN).counters()


def state(owner: Owned) -> ReplicaState:
    return owner.store.open(SEVEN).state


def rows(owner: Owned, table: OzoneTable) -> list[bytes]:
    return [key[9:] for key, _ in owner.volume.database.items(table, container_prefix(SEVEN))]


def delete(owner: Owned, tx_id: int, *block_ids: int) -> None:
    owner.writer.receive_delete(
        DeleteTransaction(tx_id, SEVEN, tuple(map(BlockId, block_ids)), 100 * len(block_ids))
    )


def test_a_new_container_has_folders_and_descriptor_and_no_rows(owner: Owned) -> None:
    container = owner.store.open(SEVEN)
    assert container.folder == owner.volume.working_folder / "current" / "containerDir0" / "7"
    assert container.descriptor.metadata_path == str(container.metadata_folder)
    assert container.descriptor.origin_node_id == owner.volume.datanode_id
    assert container.chunks_folder.is_dir()
    assert counters(owner) == Counters(None, None, None, None, None)
    with pytest.raises(ContainerStateError, match="exists"):
        owner.writer.create_container(SEVEN)


def test_a_failed_creation_leaves_nothing(root: Path, tmp_path: Path) -> None:
    disk = FailingDisk(
        errno.ENOSPC, lambda op, path: op is Operation.RENAME and path.suffix == ".container"
    )
    with owned(root, tmp_path / "state", disk=disk) as owner:
        with pytest.raises(DiskError):
            owner.writer.create_container(SEVEN)
        assert owner.volume.container_ids() == []


def test_commits_count_blocks_and_bytes_as_a_datanode_does(owner: Owned) -> None:
    write_block(owner.writer, SEVEN, ONE, 4096, 1000, bcs_id=3)
    assert counters(owner) == Counters(3, 1, 5096, None, None)
    write_block(owner.writer, SEVEN, BlockId(10), 7, bcs_id=4)
    write_block(owner.writer, SEVEN, BlockId(9), 0, bcs_id=5)
    assert counters(owner) == Counters(5, 3, 5103, None, None)
    assert rows(owner, OzoneTable.BLOCK_DATA) == [b"1", b"10", b"9"]


def test_a_commit_that_was_applied_is_not_applied_again(owner: Owned) -> None:
    record = write_block(owner.writer, SEVEN, ONE, 100, bcs_id=3)
    assert not owner.writer.put_block(replace(record, bcs_id=2, chunks=()))
    assert not owner.writer.put_block(replace(record, chunks=()))
    assert owner.store.open(SEVEN).record(ONE) == record
    assert counters(owner).block_count == 1


def test_a_commit_replaced_by_a_longer_one_counts_once(owner: Owned) -> None:
    write_block(owner.writer, SEVEN, ONE, 100, bcs_id=3)
    write_block(owner.writer, SEVEN, ONE, 100, 50, bcs_id=4)
    assert counters(owner) == Counters(4, 1, 150, None, None)


def test_a_commit_outside_the_log_keeps_the_commit_of_its_block(owner: Owned) -> None:
    record = write_block(owner.writer, SEVEN, ONE, 100, bcs_id=3)
    assert owner.writer.put_block(replace(record, bcs_id=0))
    assert owner.store.open(SEVEN).record(ONE) == record
    assert counters(owner).bcs_id == 3


def test_a_record_does_not_name_bytes_that_were_not_written(owner: Owned) -> None:
    owner.writer.write_chunk(SEVEN, ONE, 0, b"half")
    with pytest.raises(ChunkGapError):
        owner.writer.put_block(block_record(SEVEN, ONE, [chunk_record(0, b"half and half")]))
    assert rows(owner, OzoneTable.BLOCK_DATA) == []


def test_a_write_behind_the_end_of_the_file_is_refused(owner: Owned) -> None:
    with pytest.raises(ChunkGapError):
        owner.writer.write_chunk(SEVEN, ONE, 1, b"x")
    owner.writer.write_chunk(SEVEN, ONE, 0, b"0123")
    owner.writer.write_chunk(SEVEN, ONE, 4, b"4567")
    owner.writer.write_chunk(SEVEN, ONE, 2, b"ab")
    with pytest.raises(ChunkGapError):
        owner.writer.write_chunk(SEVEN, ONE, 9, b"x")
    assert owner.store.open(SEVEN).read(ONE, 0, 99) == b"01ab4567"


def test_bytes_are_durable_before_a_record_names_them(root: Path, tmp_path: Path) -> None:
    """reliability F6."""
    disk = CountingDisk()
    with owned(root, tmp_path / "state", disk=disk) as owner:
        owner.writer.create_container(SEVEN)
        disk.operations.clear()
        write_block(owner.writer, SEVEN, ONE, 100)
        assert [op for op, _ in disk.operations] == [
            Operation.WRITE,
            Operation.SYNC,
            Operation.SYNC_FOLDER,
            Operation.BATCH,
        ]


def test_writing_does_no_work_for_a_tree_that_comes_with_the_close(owner: Owned) -> None:
    """CR-045, CR-012: what it is made of are the checksums that the client recorded."""
    record = write_block(owner.writer, SEVEN, ONE, 4096, 1000, bcs_id=3)
    assert owner.trees.read(SEVEN).status is TreeStatus.ABSENT
    tree = owner.writer.close(SEVEN)
    assert [chunk.data_checksum for chunk in tree.blocks[0].chunks] == [
        c.data_checksum for c in record.chunks
    ]
    assert owner.trees.read(SEVEN).tree == tree


def test_a_close_has_its_tree_before_it_is_closed(root: Path, tmp_path: Path) -> None:
    """CR-016, CR-046: clients' writes, their tree, its root in the database, then the
    state.
    """
    disk = CountingDisk()
    with owned(root, tmp_path / "state", disk=disk) as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 100)
        disk.operations.clear()
        tree = owner.writer.close(SEVEN)
        database = owner.volume.database.path
        order = [
            path.suffix
            for op, path in disk.operations
            if op in (Operation.RENAME, Operation.BATCH) or path == database
        ]
        assert order == [".container", ".db", ".tree", ".db", ".container"]
        assert disk.operations[4] == (Operation.SYNC, database)
        assert state(owner) is ReplicaState.CLOSED
        assert owner.trees.read(SEVEN).tree == tree == build_from_metadata(owner.store.open(SEVEN))
        assert counters(owner).data_checksum == tree.data_checksum
        disk.operations.clear()
        assert owner.writer.close(SEVEN) == tree
        assert disk.operations == []


def test_closing_forgets_which_blocks_were_final(owner: Owned) -> None:
    batch = Batch()
    batch.put(OzoneTable.FINALIZE_BLOCKS, block_key(SEVEN, ONE), long_bytes(1))
    batch.put(OzoneTable.FINALIZE_BLOCKS, block_key(ContainerId(8), ONE), long_bytes(1))
    owner.volume.database.write(batch)
    owner.writer.quasi_close(SEVEN)
    assert rows(owner, OzoneTable.FINALIZE_BLOCKS) == []
    assert (
        owner.volume.database.get(OzoneTable.FINALIZE_BLOCKS, block_key(ContainerId(8), ONE))
        is not None
    )


def test_a_quasi_closed_container_closes_with_the_tree_of_its_scan(owner: Owned) -> None:
    write_block(owner.writer, SEVEN, ONE, 3000)
    owner.writer.quasi_close(SEVEN)
    path = owner.store.open(SEVEN).block_path(ONE)
    path.write_bytes(b"?" + path.read_bytes()[1:])
    scanned = owner.writer.store_tree(SEVEN, scan(owner.store.open(SEVEN)).tree)
    assert owner.writer.close(SEVEN) == scanned
    assert state(owner) is ReplicaState.CLOSED


@pytest.mark.parametrize("how", ["close", "quasi_close", "mark_unhealthy"])
def test_a_closed_container_takes_no_writes(owner: Owned, how: str) -> None:
    """CR-008."""
    record = write_block(owner.writer, SEVEN, ONE, 100, bcs_id=3)
    getattr(owner.writer, how)(SEVEN)
    with pytest.raises(ContainerStateError):
        owner.writer.write_chunk(SEVEN, ONE, 0, b"x")
    with pytest.raises(ContainerStateError):
        owner.writer.put_block(replace(record, bcs_id=9))


def test_an_unhealthy_container_is_neither_closed_nor_emptied(closed: Owned) -> None:
    closed.writer.mark_unhealthy(SEVEN)
    closed.writer.mark_unhealthy(SEVEN)
    assert state(closed) is ReplicaState.UNHEALTHY
    delete(closed, 5, 1)
    for refused in (closed.writer.close, closed.writer.quasi_close, closed.writer.delete_blocks):
        with pytest.raises(ContainerStateError):
            refused(SEVEN)


def test_an_open_container_marked_unhealthy_gets_its_tree(owner: Owned) -> None:
    write_block(owner.writer, SEVEN, ONE, 100)
    owner.writer.mark_unhealthy(SEVEN)
    assert counters(owner).data_checksum == owner.trees.read(SEVEN).tree.data_checksum is not None


def test_a_replica_is_unhealthy_even_if_its_tree_cannot_be_written(
    root: Path, tmp_path: Path
) -> None:
    """A disk that loses data may refuse the tree; nobody may read from it meanwhile."""
    disk = FailingDisk(errno.EIO, lambda _, path: path.name.startswith("7.tree"))
    with owned(root, tmp_path / "state", disk=disk) as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 100)
        with pytest.raises(DiskError):
            owner.writer.mark_unhealthy(SEVEN)
        assert disk.failed
        assert state(owner) is ReplicaState.UNHEALTHY
        assert owner.trees.read(SEVEN).status is TreeStatus.ABSENT


def test_state_and_scan_time_change_nothing_else(closed: Owned) -> None:
    before = closed.store.open(SEVEN).descriptor
    closed.writer.set_scan_timestamp(SEVEN, 1755900000123)
    closed.writer.set_state(SEVEN, ReplicaState.QUASI_CLOSED)
    after = closed.store.open(SEVEN).descriptor
    changed = replace(before, state=ReplicaState.QUASI_CLOSED, data_scan_timestamp_ms=1755900000123)
    assert after == with_checksum(changed)


def _incremental(offset: int, length: int, *, full: bool = False, bcs_id: int = 0) -> BlockRecord:
    data = content(ONE, offset + length)[offset:]
    chunk = chunk_record(offset, data, metadata=(("full", ""),) if full else ())
    return block_record(
        SEVEN, ONE, [chunk] if length else [], bcs_id=bcs_id, metadata=(("incremental", ""),)
    )


def test_an_incremental_block_grows_by_its_last_chunk(owner: Owned) -> None:
    whole = content(ONE, 5000)
    owner.writer.write_chunk(SEVEN, ONE, 0, whole)
    store, writer = owner.store, owner.writer
    assert writer.put_block(_incremental(0, 1000, bcs_id=1), end_of_block=False)
    assert (rows(owner, OzoneTable.BLOCK_DATA), rows(owner, OzoneTable.LAST_CHUNK_INFO)) == (
        [b"1"],
        [b"1"],
    )
    stored, merged = store.open(SEVEN).stored_record(ONE), store.open(SEVEN).record(ONE)
    assert stored is not None
    assert merged is not None
    assert (stored.chunks, merged.length_bytes, merged.bcs_id) == ((), 1000, 1)
    assert counters(owner) == Counters(1, 1, 1000, None, None)
    # The same chunk, longer, then full.
    assert writer.put_block(_incremental(0, 1500, bcs_id=2), end_of_block=False)
    assert counters(owner) == Counters(2, 1, 1500, None, None)
    assert writer.put_block(_incremental(0, 2000, full=True, bcs_id=3), end_of_block=False)
    assert rows(owner, OzoneTable.LAST_CHUNK_INFO) == []
    assert counters(owner) == Counters(3, 1, 2000, None, None)
    # Several chunks, the last not full.
    two = _incremental(2000, 1000, full=True, bcs_id=4)
    both = replace(two, chunks=two.chunks + _incremental(3000, 500).chunks)
    assert writer.put_block(both, end_of_block=False)
    merged = store.open(SEVEN).record(ONE)
    assert merged is not None
    assert [c.offset for c in merged.chunks] == [0, 2000, 3000]
    assert counters(owner) == Counters(4, 1, 3500, None, None)
    # The end of the block, with nothing new: the pending chunk becomes part of it.
    assert writer.put_block(_incremental(0, 0, bcs_id=5))
    stored = store.open(SEVEN).stored_record(ONE)
    assert stored is not None
    assert ([c.offset for c in stored.chunks], stored.bcs_id) == ([0, 2000, 3000], 5)
    assert rows(owner, OzoneTable.LAST_CHUNK_INFO) == []
    assert counters(owner) == Counters(5, 1, 3500, None, None)
    writer.close(SEVEN)
    assert scan(store.open(SEVEN)).findings == ()


def test_receiving_a_delete_deletes_nothing_yet(closed: Owned) -> None:
    """CR-056."""
    before = closed.trees.read(SEVEN).raw
    delete(closed, 5, 1)
    assert closed.trees.read(SEVEN).raw == before
    assert closed.store.open(SEVEN).block_length(ONE) == 5096
    assert rows(closed, OzoneTable.DELETE_TXNS) == [b"5"]
    assert counters(closed).delete_transaction == 5
    database = closed.volume.database
    assert database.get_long(SEVEN, Counter.PENDING_DELETE_COUNT) == 1
    assert database.get_long(SEVEN, Counter.PENDING_DELETE_BYTES) == 100


def test_a_delete_received_twice_counts_once_and_an_older_one_still_counts(closed: Owned) -> None:
    delete(closed, 5, 1)
    delete(closed, 5, 1)
    delete(closed, 4, 2)
    assert rows(closed, OzoneTable.DELETE_TXNS) == [b"4", b"5"]
    assert counters(closed).delete_transaction == 5
    assert closed.volume.database.get_long(SEVEN, Counter.PENDING_DELETE_COUNT) == 2


def test_a_deleted_block_leaves_a_tombstone_and_nothing_else(closed: Owned) -> None:
    entry = closed.trees.read(SEVEN).tree.blocks[0]
    root = counters(closed).data_checksum
    delete(closed, 5, 1, 99)
    assert closed.writer.delete_blocks(SEVEN) == [1]
    assert closed.store.open(SEVEN).block_length(ONE) is None
    assert rows(closed, OzoneTable.BLOCK_DATA) == [b"2"]
    assert rows(closed, OzoneTable.DELETE_TXNS) == []
    tombstone = closed.trees.read(SEVEN).tree.blocks[0]
    assert (tombstone.deleted, tombstone.data_checksum) == (True, entry.data_checksum)
    assert counters(closed) == Counters(4, 1, 3000, root, 5)
    assert closed.volume.database.get_long(SEVEN, Counter.PENDING_DELETE_COUNT) == 0
    assert closed.volume.database.get_long(SEVEN, Counter.PENDING_DELETE_BYTES) == 0
    assert closed.writer.delete_blocks(SEVEN) == []


def test_a_delete_goes_tombstone_then_bytes_then_record(root: Path, tmp_path: Path) -> None:
    """CR-055."""
    disk = CountingDisk()
    with owned(root, tmp_path / "state", disk=disk) as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 100)
        owner.writer.close(SEVEN)
        delete(owner, 5, 1)
        disk.operations.clear()
        owner.writer.delete_blocks(SEVEN)
        metadata = owner.store.open(SEVEN).metadata_folder
        order = [
            (op, path.suffix)
            for op, path in disk.operations
            if op in (Operation.REMOVE, Operation.BATCH)
            or (op is Operation.RENAME and path.parent == metadata)
        ]
        assert order == [
            (Operation.RENAME, ".tree"),
            (Operation.REMOVE, ".block"),
            (Operation.BATCH, ".db"),
        ]


def test_a_deleted_container_leaves_no_file_and_no_row(closed: Owned) -> None:
    other = ContainerId(8)
    closed.writer.create_container(other)
    write_block(closed.writer, other, ONE, 10)
    batch = Batch()
    batch.put(OzoneTable.FINALIZE_BLOCKS, block_key(SEVEN, ONE), long_bytes(1))
    closed.volume.database.write(batch)
    closed.writer.delete_container(SEVEN)
    assert closed.volume.container_ids() == [8]
    assert all(rows(closed, table) == [] for table in OzoneTable)
    assert closed.store.open(other).record(ONE) is not None
    assert list((closed.volume.working_folder / "tmp" / "deleted-containers").iterdir()) == []
    with pytest.raises(ContainerNotFoundError):
        closed.writer.delete_container(SEVEN)
    closed.writer.create_container(SEVEN)


def test_deletions_that_were_cut_short_are_finished_at_start(closed: Owned) -> None:
    gone = closed.volume.working_folder / "tmp" / "deleted-containers"
    closed.store.open(SEVEN).folder.rename(gone / "7")
    eight = ContainerId(8)
    closed.writer.create_container(eight, state=ReplicaState.DELETED)
    nine = closed.writer.create_container(ContainerId(9))
    broken = closed.store.open(ContainerId(9)).descriptor_path
    broken.write_bytes(b"nonsense")
    for name in ("0", "99999999999999999999", "junk"):
        (gone / name).mkdir()
    failed: list[ContainerId] = []
    finished = closed.writer.finish_deletions(
        closed.volume.container_ids(), lambda one, _: failed.append(one)
    )
    assert (finished, failed) == ([SEVEN, eight], [])
    assert closed.volume.container_ids() == [9]
    assert all(rows(closed, table) == [] for table in OzoneTable)
    assert dump_descriptor(nine) != b"nonsense"


def test_a_container_that_came_back_keeps_its_rows(closed: Owned) -> None:
    """Its earlier replica was set aside, and its deletion was cut short."""
    gone = closed.volume.working_folder / "tmp" / "deleted-containers" / "7"
    shutil.copytree(closed.store.open(SEVEN).folder, gone)
    before = {table: rows(closed, table) for table in OzoneTable}
    assert closed.writer.finish_deletions([SEVEN], lambda *_: None) == []
    assert {table: rows(closed, table) for table in OzoneTable} == before
    assert before[OzoneTable.BLOCK_DATA]
    assert closed.store.open(SEVEN).record(ONE) is not None


def _damage(owner: Owned, block_id: BlockId, offset: int) -> bytes:
    """Flip a byte; returns the file as it was."""
    path = owner.store.open(SEVEN).block_path(block_id)
    good = path.read_bytes()
    bad = bytearray(good)
    bad[offset] ^= 0x10
    path.write_bytes(bytes(bad))
    return good


def test_a_window_is_written_in_place_with_an_undo_copy(closed: Owned) -> None:
    good = _damage(closed, ONE, 1500)
    bad = closed.store.open(SEVEN).read(ONE, 1024, 1024)
    written = closed.writer.write_windows(
        SEVEN, ONE, [Patch(1024, memoryview(good)[1024:2048])], job=JOB
    )
    assert written == WriteResult(1024, (0,))
    assert closed.store.open(SEVEN).block_path(ONE).read_bytes() == good
    undo = closed.volume.state_folder / "undo"
    assert tree_of_files(undo) == {f"7/{JOB}/1-1024-1024": bad}
    assert closed.undo.used_bytes == 1024


def test_what_stands_there_already_is_not_written_again(closed: Owned) -> None:
    """inv-I8."""
    good = closed.store.open(SEVEN).block_path(ONE).read_bytes()
    before = closed.store.open(SEVEN).block_path(ONE).stat().st_mtime_ns
    assert closed.writer.write_windows(SEVEN, ONE, [Patch(0, good[:1024])], job=JOB) == WriteResult(
        0, (0,)
    )
    assert closed.store.open(SEVEN).block_path(ONE).stat().st_mtime_ns == before
    assert closed.undo.used_bytes == 0


def test_a_lost_file_is_written_anew_in_one_pass(closed: Owned) -> None:
    path = closed.store.open(SEVEN).block_path(ONE)
    good = path.read_bytes()
    path.unlink()
    path.parent.joinpath(f"{TWO}.block").unlink()
    path.parent.rmdir()
    patches = [Patch(0, good[:4096]), Patch(4096, good[4096:])]
    assert closed.writer.write_windows(SEVEN, ONE, patches, job=JOB).length_bytes == len(good)
    assert path.read_bytes() == good


def test_a_new_block_file_is_durable_and_so_is_its_name(root: Path, tmp_path: Path) -> None:
    disk = CountingDisk()
    with owned(root, tmp_path / "state", disk=disk) as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 4096)
        owner.writer.close(SEVEN)
        path = owner.store.open(SEVEN).block_path(ONE)
        path.unlink()
        disk.operations.clear()
        owner.writer.write_windows(SEVEN, ONE, [Patch(0, content(ONE, 4096))], job=JOB)
        assert disk.operations == [
            (Operation.WRITE, path),
            (Operation.SYNC, path),
            (Operation.SYNC_FOLDER, path.parent),
        ]


def test_a_truncated_tail_is_continued_but_never_past_a_gap(closed: Owned) -> None:
    path = closed.store.open(SEVEN).block_path(ONE)
    good = path.read_bytes()
    path.write_bytes(good[:2000])
    with pytest.raises(ChunkGapError):
        closed.writer.write_windows(
            SEVEN, ONE, [Patch(1024, good[1024:2048]), Patch(3072, good[3072:])], job=JOB
        )
    assert path.read_bytes() == good[:2000]
    written = closed.writer.write_windows(SEVEN, ONE, [Patch(1024, good[1024:])], job=JOB)
    assert written.length_bytes == len(good) - 1024
    assert path.read_bytes() == good


@pytest.mark.parametrize("how", ["pending transaction", "tombstone"])
def test_a_deleted_block_is_never_brought_back(closed: Owned, how: str) -> None:
    """inv-I5: asked under the lock, whatever was planned before."""
    record = closed.store.open(SEVEN).record(ONE)
    assert record is not None
    good = closed.store.open(SEVEN).block_path(ONE).read_bytes()
    delete(closed, 5, 1)
    if how == "tombstone":
        closed.writer.delete_blocks(SEVEN)
    with pytest.raises(BlockNotFoundError):
        closed.writer.write_windows(SEVEN, ONE, [Patch(0, good)], job=JOB)
    with pytest.raises(BlockNotFoundError):
        closed.writer.put_repaired_block(record, job=JOB)
    if how == "tombstone":
        assert closed.store.open(SEVEN).block_length(ONE) is None


def test_only_closed_containers_are_repaired(owner: Owned) -> None:
    """inv-I13."""
    record = write_block(owner.writer, SEVEN, ONE, 100)
    with pytest.raises(ContainerStateError):
        owner.writer.write_windows(SEVEN, ONE, [Patch(0, b"x")], job=JOB)
    with pytest.raises(ContainerStateError):
        owner.writer.put_repaired_block(record, job=JOB)
    with pytest.raises(ContainerStateError):
        owner.writer.advance_bcs_id(SEVEN, 9)
    with pytest.raises(ContainerNotFoundError):
        owner.writer.write_windows(ContainerId(99), ONE, [Patch(0, b"x")], job=JOB)


def test_an_erasure_coded_replica_is_not_repaired(owner: Owned) -> None:
    coded = ContainerId(9)
    owner.writer.create_container(coded, replica_index=2)
    owner.writer.close(coded)
    with pytest.raises(ContainerStateError, match="erasure"):
        owner.writer.write_windows(coded, ONE, [Patch(0, b"x")], job=JOB)


def test_beyond_the_undo_budget_nothing_is_overwritten(root: Path, tmp_path: Path) -> None:
    with owned(root, tmp_path / "state", undo_bytes_max=1500) as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 4096)
        owner.writer.close(SEVEN)
        good = owner.store.open(SEVEN).block_path(ONE).read_bytes()
        owner.store.open(SEVEN).block_path(ONE).write_bytes(bytes(4096))
        patches = [Patch(0, good[:1024]), Patch(1024, good[1024:2048])]
        with pytest.raises(UndoBudgetError):
            owner.writer.write_windows(SEVEN, ONE, patches, job=JOB)
        assert owner.store.open(SEVEN).block_path(ONE).read_bytes() == bytes(4096)
        assert owner.writer.write_windows(SEVEN, ONE, patches[:1], job=JOB).length_bytes == 1024
        # A later start counts what is there.
        again = UndoStore(owner.volume.state_folder / "undo", Disk(), budget_bytes=1500)
        assert again.used_bytes == 1024


def test_undo_copies_go_by_age(closed: Owned) -> None:
    for job, block_id, age_s in (("old", ONE, 1000), ("new", TWO, 10)):
        good = _damage(closed, block_id, 0)
        closed.writer.write_windows(SEVEN, block_id, [Patch(0, good[:1024])], job=job)
        for copy in (closed.volume.state_folder / "undo" / "7" / job).iterdir():
            os.utime(copy, (50_000 - age_s, 50_000 - age_s))
    assert closed.undo.clean(older_than_s=500, now_s=50_000) == 1024
    assert closed.undo.used_bytes == 1024
    assert [job.name for job in (closed.volume.state_folder / "undo" / "7").iterdir()] == ["new"]


def test_a_repaired_block_is_counted_once(closed: Owned) -> None:
    """Row 6 of the reference's quirks: a refilled file does not count a second time."""
    record = closed.store.open(SEVEN).record(ONE)
    assert record is not None
    assert not closed.writer.put_repaired_block(record, job=JOB)
    assert counters(closed).used_bytes == 8096
    closed.writer.store_tree(SEVEN, build_from_metadata(closed.store.open(SEVEN)))
    batch = Batch()
    batch.delete(OzoneTable.BLOCK_DATA, block_key(SEVEN, ONE))
    closed.volume.database.write(batch)
    assert closed.writer.put_repaired_block(record, job=JOB)
    assert (counters(closed).used_bytes, counters(closed).block_count) == (8096, 2)


def test_a_wrong_counter_is_set_right_by_a_repair(closed: Owned) -> None:
    batch = Batch()
    batch.put(OzoneTable.METADATA, counter_key(SEVEN, Counter.BYTES_USED), long_bytes(999_999))
    batch.delete(OzoneTable.METADATA, counter_key(SEVEN, Counter.BLOCK_COUNT))
    closed.volume.database.write(batch)
    record = closed.store.open(SEVEN).record(TWO)
    assert record is not None
    assert closed.writer.put_repaired_block(record, job=JOB)
    assert (counters(closed).used_bytes, counters(closed).block_count) == (8096, 2)


def test_counters_stay_right_over_a_repair_of_many_blocks(closed: Owned) -> None:
    """Counted once, then kept: what is lost, grows or is new is told apart."""
    one, two = (closed.store.open(SEVEN).record(block_id) for block_id in (ONE, TWO))
    assert one is not None
    assert two is not None
    three = replace(one, block_id=BlockId(3))
    batch = Batch()
    batch.delete(OzoneTable.BLOCK_DATA, block_key(SEVEN, ONE))
    batch.put(OzoneTable.METADATA, counter_key(SEVEN, Counter.BYTES_USED), long_bytes(999_999))
    closed.volume.database.write(batch)
    closed.writer.write_windows(
        SEVEN, three.block_id, [Patch(0, bytes(one.length_bytes))], job="job"
    )
    shorter = replace(two, chunks=two.chunks[:-1])
    for record in (one, shorter, three, two, three):
        closed.writer.put_repaired_block(record, job=JOB)
        held = list(closed.store.open(SEVEN).records())
        assert counters(closed).block_count == len(held)
        assert counters(closed).used_bytes == sum(block.length_bytes for block in held)


def test_a_repair_raises_commits_only_as_it_is_told(closed: Owned) -> None:
    record = closed.store.open(SEVEN).record(ONE)
    assert record is not None
    closed.writer.put_repaired_block(replace(record, bcs_id=8), job=JOB)
    assert counters(closed).bcs_id == 4
    closed.writer.advance_bcs_id(SEVEN, 8)
    assert counters(closed).bcs_id == 8
    closed.writer.advance_bcs_id(SEVEN, 6)
    assert counters(closed).bcs_id == 8


def test_a_repaired_block_takes_in_its_last_chunk(owner: Owned) -> None:
    """Row 4 of the reference's quirks: both rows change in one batch."""
    owner.writer.write_chunk(SEVEN, ONE, 0, content(ONE, 3000))
    owner.writer.put_block(_incremental(0, 2000, full=True), end_of_block=False)
    owner.writer.put_block(_incremental(2000, 1000), end_of_block=False)
    owner.writer.close(SEVEN)
    merged = owner.store.open(SEVEN).record(ONE)
    assert merged is not None
    assert len(merged.chunks) == 2
    assert owner.writer.put_repaired_block(merged, job=JOB)
    assert rows(owner, OzoneTable.LAST_CHUNK_INFO) == []
    assert (
        owner.store.open(SEVEN).record(ONE) == merged == owner.store.open(SEVEN).stored_record(ONE)
    )
    assert counters(owner).used_bytes == 3000


def test_a_repaired_record_names_no_new_chunk_that_the_file_lacks(closed: Owned) -> None:
    data = content(THREE, 2000)
    record = block_record(SEVEN, THREE, [chunk_record(0, data)])
    with pytest.raises(ChunkGapError):
        closed.writer.put_repaired_block(record, job=JOB)
    closed.writer.write_windows(SEVEN, THREE, [Patch(0, data)], job=JOB)
    assert closed.writer.put_repaired_block(record, job=JOB)
    assert (counters(closed).used_bytes, counters(closed).block_count) == (10_096, 3)


def test_bytes_that_a_killed_repair_wrote_are_durable_before_a_record_names_them(
    root: Path, tmp_path: Path
) -> None:
    """inv-I7: the next run finds them in place and writes nothing, yet only the page
    cache may have them.
    """
    disk = CountingDisk()
    with owned(root, tmp_path / "state", disk=disk) as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 4096)
        owner.writer.close(SEVEN)
        container = owner.store.open(SEVEN)
        container.block_path(TWO).write_bytes(content(TWO, 1024))
        disk.operations.clear()
        owner.writer.put_repaired_block(
            block_record(SEVEN, TWO, [chunk_record(0, content(TWO, 1024))]), job=JOB
        )
        operations = [operation for operation, _ in disk.operations]
        assert (Operation.SYNC, container.block_path(TWO)) in disk.operations
        assert operations == [Operation.SYNC, Operation.SYNC_FOLDER, Operation.BATCH]


def test_an_unreadable_record_does_not_keep_others_from_repair(closed: Owned) -> None:
    record = closed.store.open(SEVEN).record(ONE)
    assert record is not None
    batch = Batch()
    batch.put(OzoneTable.BLOCK_DATA, block_key(SEVEN, ONE), b"\xff")
    batch.put(OzoneTable.BLOCK_DATA, block_key(SEVEN, TWO), b"\xff")
    closed.volume.database.write(batch)
    assert closed.writer.put_repaired_block(record, job=JOB)
    assert counters(closed).block_count == 2


def test_a_row_that_could_not_be_read_is_kept_before_it_is_overwritten(closed: Owned) -> None:
    record = closed.store.open(SEVEN).record(ONE)
    assert record is not None
    rows_before = {
        OzoneTable.BLOCK_DATA: b"\xff no record",
        OzoneTable.LAST_CHUNK_INFO: b"\xff",
    }
    batch = Batch()
    for table, row in rows_before.items():
        batch.put(table, block_key(SEVEN, ONE), row)
    closed.volume.database.write(batch)
    assert closed.writer.put_repaired_block(record, job=JOB)
    kept = tree_of_files(closed.volume.state_folder / "undo")
    assert kept == {
        f"7/{JOB}/1-block_data-11": b"\xff no record",
        f"7/{JOB}/1-last_chunk_info-1": b"\xff",
    }
    assert closed.undo.used_bytes == 12
    # What could be read is known from the tree, the peers and the log; it takes no
    # room.
    assert closed.writer.put_repaired_block(replace(record, bcs_id=8), job=JOB)
    assert tree_of_files(closed.volume.state_folder / "undo") == kept


def test_a_row_that_could_not_be_read_and_does_not_fit_the_budget_stays(
    root: Path, tmp_path: Path
) -> None:
    with owned(root, tmp_path / "state", undo_bytes_max=10) as owner:
        owner.writer.create_container(SEVEN)
        record = write_block(owner.writer, SEVEN, ONE, 4096)
        owner.writer.close(SEVEN)
        batch = Batch()
        batch.put(OzoneTable.BLOCK_DATA, block_key(SEVEN, ONE), b"\xff no record")
        owner.volume.database.write(batch)
        with pytest.raises(UndoBudgetError):
            owner.writer.put_repaired_block(record, job=JOB)
        assert (
            owner.volume.database.get(OzoneTable.BLOCK_DATA, block_key(SEVEN, ONE))
            == b"\xff no record"
        )


def test_after_a_failed_sync_nothing_more_is_changed(root: Path, tmp_path: Path) -> None:
    with owned(root, tmp_path / "state") as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 4096)
        owner.writer.close(SEVEN)
        good = _damage(owner, ONE, 5)
        disk = FailingDisk(
            errno.EIO, lambda op, path: op is Operation.SYNC and path.suffix == ".block"
        )
        failing = RepairWriter(owner.volume, owner.trees, owner.undo, disk)
        with pytest.raises(DiskError) as failed:
            failing.write_windows(SEVEN, ONE, [Patch(0, good[:1024])], job=JOB)
        assert failed.value.facts["suspect"] is True
        assert owner.volume.suspect is not None
        with pytest.raises(DiskError, match="suspect"):
            failing.write_windows(SEVEN, ONE, [Patch(0, good[:1024])], job=JOB)
        with pytest.raises(DiskError, match="suspect"):
            owner.writer.set_state(SEVEN, ReplicaState.UNHEALTHY)
        assert len(disk.failed) == 1


def test_a_database_that_cannot_be_made_durable_makes_the_volume_suspect(
    root: Path, tmp_path: Path
) -> None:
    """Its log is written and synced by the library, which does not tell a failed sync
    from another fault.
    """
    with owned(root, tmp_path / "state") as owner:
        owner.writer.create_container(SEVEN)
        write_block(owner.writer, SEVEN, ONE, 1000, bcs_id=3)
        owner.writer.close(SEVEN)
        with no_file_grows(), pytest.raises(DatabaseError) as caught:
            owner.writer.advance_bcs_id(SEVEN, 1000)
        assert caught.value.facts["suspect"]
        assert owner.volume.suspect is not None
        with pytest.raises(DiskError, match="is suspect"):
            owner.writer.advance_bcs_id(SEVEN, 1000)
        with pytest.raises(DatabaseError, match="cannot close"):
            owner.volume.close()
    # Given back all the same, and whole.
    with owned(root, tmp_path / "state") as owner:
        assert counters(owner).bcs_id == 3


class _ForgettingDisk(Disk):
    """While one job's copies are removed, the container of the next goes."""

    def __init__(self, other: Path) -> None:
        self._other = other

    def remove_folder(self, folder: Path) -> None:
        super().remove_folder(folder)
        shutil.rmtree(self._other, ignore_errors=True)


def test_undo_copies_that_vanish_while_old_ones_are_removed_are_no_error(tmp_path: Path) -> None:
    for container_id in (1, 2):
        UndoStore(tmp_path, Disk(), budget_bytes=100).keep(
            ContainerId(container_id), JOB, ONE, 0, b"bytes"
        )
    store = UndoStore(tmp_path, _ForgettingDisk(tmp_path / "2"), budget_bytes=100)
    assert store.clean(older_than_s=-100, now_s=time.time()) == 5


def test_only_copies_of_jobs_are_removed_from_the_undo_folder(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "undo", tmp_path / "elsewhere"
    store = UndoStore(folder, Disk(), budget_bytes=100)
    for container_id in (100, 200):
        store.keep(ContainerId(container_id), JOB, ONE, 0, b"bytes")
    strays = [folder / "NOTES.txt", folder / "100" / "NOTES.txt", folder / "kept" / JOB / "copy"]
    strays.append(elsewhere / "1-0-5")
    for path in strays:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept for the ticket")
    (folder / "100" / "linked").symlink_to(elsewhere)
    assert store.clean(older_than_s=-100, now_s=time.time()) == 10
    assert all(path.exists() for path in strays)
    assert not (folder / "200" / JOB).exists()


class _UnlistableDisk(Disk):
    """Cannot list one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self, folder: Path) -> list[str]:
        if folder == self._folder:
            raise disk_error("list", folder, OSError(errno.EIO, os.strerror(errno.EIO)))
        return super().names(folder)


def test_one_bad_undo_folder_does_not_keep_the_others(tmp_path: Path) -> None:
    for container_id in (1, 2):
        UndoStore(tmp_path, Disk(), budget_bytes=100).keep(
            ContainerId(container_id), JOB, ONE, 0, b"bytes"
        )
    store = UndoStore(tmp_path, _UnlistableDisk(tmp_path / "1"), budget_bytes=100)
    with pytest.raises(DiskError, match="cannot list"):
        store.clean(older_than_s=-100, now_s=time.time())
    assert not (tmp_path / "2" / JOB).exists()
    assert (tmp_path / "1" / JOB).exists()


class _LyingDisk(Disk):
    """Loses what it writes to block files, without a word."""

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        super().write_at(path, offset, bytes(len(data)))


def test_what_was_written_is_read_back(closed: Owned) -> None:
    good = _damage(closed, ONE, 5)
    lying = RepairWriter(closed.volume, closed.trees, closed.undo, _LyingDisk())
    with pytest.raises(DiskError, match="does not hold"):
        lying.write_windows(SEVEN, ONE, [Patch(0, good[:1024])], job=JOB)


@pytest.fixture
def three_pages(owner: Owned) -> tuple[Owned, Path, bytes]:
    """Container 7 closed, with block 3 of three pages, all of them other bytes than
    those returned.
    """
    write_block(owner.writer, SEVEN, THREE, 3 * PAGE_BYTES)
    owner.writer.close(SEVEN)
    path = owner.store.open(SEVEN).block_path(THREE)
    good = path.read_bytes()
    path.write_bytes(bytes(byte ^ 1 for byte in good))
    return owner, path, good


@pytest.mark.parametrize(
    ("bad", "copies"),
    [
        ({0}, [(PAGE_BYTES, 2 * PAGE_BYTES)]),
        ({1}, [(0, PAGE_BYTES), (2 * PAGE_BYTES, PAGE_BYTES)]),
        ({0, 2}, [(PAGE_BYTES, PAGE_BYTES)]),
        ({0, 1, 2}, []),
    ],
)
def test_what_a_bad_sector_hides_is_written_over_and_what_can_be_read_is_kept_first(
    three_pages: tuple[Owned, Path, bytes], bad: set[int], copies: list[tuple[int, int]]
) -> None:
    """inv-I4: what cannot be read matches nothing."""
    owner, path, good = three_pages
    before = path.read_bytes()
    disk = BadSectorDisk({(path, page * PAGE_BYTES) for page in bad})
    writer = RepairWriter(owner.volume, owner.trees, owner.undo, disk)
    written = writer.write_windows(SEVEN, THREE, [Patch(0, good)], job=JOB)
    assert written == WriteResult(len(good), (len(bad) * PAGE_BYTES,))
    assert path.read_bytes() == good
    kept = tree_of_files(owner.volume.state_folder / "undo")
    assert kept.keys() == {f"7/{JOB}/3-{offset}-{length}" for offset, length in copies}
    assert all(
        kept[f"7/{JOB}/3-{at}-{length}"] == before[at : at + length] for at, length in copies
    )


def test_each_patch_tells_what_of_it_was_hidden(three_pages: tuple[Owned, Path, bytes]) -> None:
    owner, path, good = three_pages
    writer = RepairWriter(
        owner.volume, owner.trees, owner.undo, BadSectorDisk({(path, PAGE_BYTES)})
    )
    parts = [Patch(at, good[at : at + PAGE_BYTES]) for at in range(0, 3 * PAGE_BYTES, PAGE_BYTES)]
    assert writer.write_windows(SEVEN, THREE, parts, job=JOB).unread_bytes == (0, PAGE_BYTES, 0)


def test_bytes_that_cannot_be_read_for_another_reason_are_not_written_over(
    three_pages: tuple[Owned, Path, bytes],
) -> None:
    owner, path, good = three_pages
    before = path.read_bytes()
    writer = RepairWriter(
        owner.volume, owner.trees, owner.undo, BadSectorDisk({(path, 0)}, errno.ENOMEM)
    )
    with pytest.raises(DiskError):
        writer.write_windows(SEVEN, THREE, [Patch(0, good)], job=JOB)
    assert path.read_bytes() == before


def test_a_bad_sector_that_also_holds_bytes_that_nobody_proved_stays(
    three_pages: tuple[Owned, Path, bytes],
) -> None:
    """A sector is written as a whole or not at all."""
    owner, path, good = three_pages
    writer = RepairWriter(owner.volume, owner.trees, owner.undo, BadSectorDisk({(path, 0)}))
    with pytest.raises(DiskError):
        writer.write_windows(SEVEN, THREE, [Patch(0, good[:1024])], job=JOB)


def test_a_link_in_the_place_of_a_block_file_is_not_followed(closed: Owned, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(5096))
    path = closed.store.open(SEVEN).block_path(ONE)
    path.unlink()
    path.symlink_to(victim)
    with pytest.raises(DiskError):
        closed.writer.write_windows(SEVEN, ONE, [Patch(0, b"x" * 1024)], job=JOB)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DiskError):
        closed.writer.write_windows(SEVEN, ONE, [Patch(0, b"x" * 1024)], job=JOB)
    assert victim.read_bytes() == bytes(5096)


def test_a_read_only_volume_has_no_writer(root: Path, tmp_path: Path) -> None:
    with open_volume(
        root, hold=Hold.READ_ONLY, state_folder=tmp_path / "state", disk=Disk()
    ) as volume:
        undo = UndoStore(tmp_path / "undo", Disk(), budget_bytes=UNDO_BYTES_MAX)
        with pytest.raises(ReadOnlyError):
            RepairWriter(volume, TreeFiles(volume, Disk()), undo, Disk())


def test_containers_of_other_layouts_are_not_written(owner: Owned) -> None:
    path = owner.store.open(SEVEN).descriptor_path
    old = with_checksum(
        replace(owner.store.open(SEVEN).descriptor, schema_version=None, layout_version=1)
    )
    path.write_bytes(dump_descriptor(old))
    with pytest.raises(ContainerUnsupportedError):
        owner.writer.write_chunk(SEVEN, ONE, 0, b"x")


def test_a_container_of_a_real_datanode_is_repaired_in_place(tmp_path: Path) -> None:
    root = copy_volume(unpack("healthy", tmp_path / "healthy"), "dn1", tmp_path / "volume1")
    one = ContainerId(1)
    with owned(root, tmp_path / "state") as owner:
        container = owner.store.open(one)
        tree: ContainerTree = owner.trees.read(one).tree
        block_id = container.block_ids()[-1]
        record = container.record(block_id)
        assert record is not None
        good = container.block_path(block_id).read_bytes()
        container.block_path(block_id).unlink()
        owner.writer.write_windows(one, block_id, [Patch(0, good)], job=JOB)
        # Ozone's own counters and record are what we would write.
        assert not owner.writer.put_repaired_block(record, job=JOB)
        assert owner.writer.store_tree(one, scan(container).tree) == tree
    with owned(root, tmp_path / "state") as owner:
        result = scan(owner.store.open(one))
        assert (result.findings, result.tree) == ((), tree)
