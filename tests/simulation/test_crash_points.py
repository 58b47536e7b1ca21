"""A crash at any operation of any kind of change: what is found then is legal, and
repeating the change ends where it would have ended undisturbed (inv-I3 to I5, I7, I8;
CR-046, CR-055).

The disk itself notes every operation. Before each it copies what a killed process would
leave, in the middle of each write too, and after each what a power cut would leave.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import pytest

from dnagent.scanner import ScanDepth
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume, agent_scan_ms
from merkle.errors import ReconcileError
from merkle.record import DeleteTransaction
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import bad_windows
from ozone.descriptor import dump_descriptor, parse_descriptor, with_checksum
from ozone.errors import ContainerNotFoundError
from ozone.repair_writer import Patch
from ozone.rocks import Batch, OzoneTable, block_key, container_prefix
from ozone.scan import build_from_metadata, scan
from ozone.treefile import TreeStatus
from protos.convert import record_to_bytes
from runtime.disk import Disk
from tests.support.disk import CountingDisk, ImagingDisk
from tests.support.power_cut import put_unsynced
from tests.support.volumes import (
    UNDO_BYTES_MAX,
    Owned,
    block_record,
    chunk_record,
    content,
    new_volume,
    owned,
    tree_of_files,
    write_block,
)

pytestmark = pytest.mark.crashes

SEVEN = ContainerId(7)
ONE, TWO, THREE, FOUR = (BlockId(i) for i in (1, 2, 3, 4))
LENGTHS: Mapping[BlockId, tuple[int, ...]] = {ONE: (4096, 1000), TWO: (3000,), THREE: (2048,)}
JOB = "job-1"
SCANNED_MS = 1_700_000_123_000
BEFORE_CLOSE = (ReplicaState.OPEN, ReplicaState.CLOSING)


@dataclass(frozen=True)
class Change:
    """One kind of change: how it is set up, done (again), and what must hold wherever
    it was cut short.
    """

    prepare: Callable[[Owned], None]
    act: Callable[[Owned], None]
    holds: Callable[[Owned], None]
    # Done once more it changes nothing; a client's write is written again, though, and
    # only its commit is not.
    settles: bool = True
    # The files it removed may come back with a power cut; the next start removes them.
    leaves_files: bool = False


def whole(block_id: BlockId) -> bytes:
    return content(block_id, sum(LENGTHS[block_id]))


def closed(owner: Owned) -> None:
    """Container 7, closed, with blocks 1 to 3; block 3 deleted."""
    owner.writer.create_container(SEVEN)
    for bcs_id, (block_id, lengths) in enumerate(LENGTHS.items(), 1):
        write_block(owner.writer, SEVEN, block_id, *lengths, bcs_id=bcs_id)
    owner.writer.close(SEVEN)
    delete(owner, 5, THREE)


def delete(owner: Owned, tx_id: int, block_id: BlockId) -> None:
    owner.writer.receive_delete(DeleteTransaction(tx_id, SEVEN, (block_id,), 10))
    owner.writer.delete_blocks(SEVEN)


def always(owner: Owned) -> None:
    """In whatever state: no record names bytes that are not there, and no deleted block
    lacks its tombstone.
    """
    container = owner.store.open(SEVEN)
    deleted = owner.trees.deleted_blocks(SEVEN)
    for record in container.records():
        # With its tombstone written, a block's bytes go before its record does.
        for chunk in record.chunks if record.block_id not in deleted else ():
            assert (
                bad_windows(
                    chunk, container.read(record.block_id, chunk.offset, chunk.length_bytes)
                )
                == ()
            )
    if container.state in (ReplicaState.CLOSED, ReplicaState.UNHEALTHY):
        assert THREE in deleted or not (container.metadata_folder / "7.tree").exists()


def _scanned(owner: Owned) -> ContainerTree:
    """A tree that differs from the stored one in a live block and in a tombstone."""
    live = build_from_metadata(owner.store.open(SEVEN))
    adopted = next(block for block in live.blocks if block.block_id == TWO)
    others = [block for block in live.blocks if block.block_id != TWO]
    return ContainerTree.of(SEVEN, [*others, type(adopted).tombstone(TWO, adopted.data_checksum)])


def write_tree(owner: Owned) -> None:
    owner.writer.store_tree(SEVEN, _scanned(owner))


def tree_is_old_or_new(owner: Owned) -> None:
    stored = owner.trees.read(SEVEN)
    assert stored.status is TreeStatus.PRESENT
    deleted = [block.block_id for block in stored.tree.blocks if block.deleted]
    assert deleted in ([THREE], [TWO, THREE])
    always(owner)


def garbled(owner: Owned) -> None:
    closed(owner)
    owner.trees.path(SEVEN).write_bytes(b"\xff\xff garbage")


def tree_is_garbled_or_new(owner: Owned) -> None:
    stored = owner.trees.read(SEVEN)
    assert stored.status is TreeStatus.PRESENT or stored.raw == b"\xff\xff garbage"
    assert THREE in owner.trees.deleted_blocks(SEVEN)
    if stored.status is TreeStatus.PRESENT:
        quarantine = owner.volume.state_folder / "quarantine"
        assert [file.read_bytes() for file in quarantine.glob("*.tree")] == [b"\xff\xff garbage"]


def as_a_datanode_left_it(owner: Owned) -> None:
    closed(owner)
    owner.trees.forget(SEVEN)


def remember(owner: Owned) -> None:
    owner.trees.remember(owner.trees.read(SEVEN))


def tree_is_as_it_was(owner: Owned) -> None:
    stored = owner.trees.read(SEVEN)
    assert stored.status is TreeStatus.PRESENT
    # All of them are kept, or, as yet, none.
    assert list(stored.kept) in ([], [THREE])
    always(owner)


def damaged(owner: Owned) -> None:
    """Block 1 with its second window bad and its tail lost; block 2 without its
    file.
    """
    closed(owner)
    container = owner.store.open(SEVEN)
    bad = bytearray(whole(ONE)[:4500])
    bad[1024:2048] = bytes(1024)
    container.block_path(ONE).write_bytes(bytes(bad))
    container.block_path(TWO).unlink()


def repair_windows(owner: Owned) -> None:
    good = whole(ONE)
    patches = [Patch(1024, good[1024:2048]), Patch(4096, good[4096:])]
    owner.writer.write_windows(SEVEN, ONE, patches, job=JOB)
    owner.writer.write_windows(SEVEN, TWO, [Patch(0, whole(TWO))], job=JOB)


def only_bad_windows_changed(owner: Owned) -> None:
    good, found = whole(ONE), owner.store.open(SEVEN).read(ONE, 0, 1 << 20)
    assert found[:1024] + found[2048:4096] == good[:1024] + good[2048:4096]
    assert len(found) >= 4500
    undo = owner.volume.state_folder / "undo" / "7" / JOB
    if found[1024:2048] != bytes(1024):
        assert (undo / "1-1024-1024").read_bytes() == bytes(1024)
    if found[4096:4500] != good[4096:4500] or len(found) > 4500:
        assert (undo / "1-4096-404").exists() or (undo / "1-4096-1000").exists()


def without_record(owner: Owned) -> None:
    closed(owner)
    batch = Batch()
    batch.delete(OzoneTable.BLOCK_DATA, block_key(SEVEN, TWO))
    owner.volume.database.write(batch)
    owner.store.open(SEVEN).block_path(TWO).unlink()
    owner.writer.store_tree(SEVEN, scan(owner.store.open(SEVEN)).tree)


def repair_block(owner: Owned) -> None:
    data = whole(TWO)
    owner.writer.write_windows(SEVEN, TWO, [Patch(0, data)], job=JOB)
    record = block_record(SEVEN, TWO, [chunk_record(0, data)], bcs_id=9)
    owner.writer.put_repaired_block(record, job=JOB)
    owner.writer.advance_bcs_id(record.container_id, 9)
    owner.writer.store_tree(SEVEN, build_from_metadata(owner.store.open(SEVEN)))


GARBAGE = b"\xff no record"


def with_an_unreadable_record(owner: Owned) -> None:
    closed(owner)
    batch = Batch()
    batch.put(OzoneTable.BLOCK_DATA, block_key(SEVEN, TWO), GARBAGE)
    batch.put(OzoneTable.LAST_CHUNK_INFO, block_key(SEVEN, TWO), GARBAGE)
    owner.volume.database.write(batch)


def repair_record(owner: Owned) -> None:
    record = block_record(SEVEN, TWO, [chunk_record(0, whole(TWO))], bcs_id=2)
    owner.writer.put_repaired_block(record, job=JOB)


def an_unreadable_record_is_there_or_kept(owner: Owned) -> None:
    undo = owner.volume.state_folder / "undo" / "7" / JOB
    for table in (OzoneTable.BLOCK_DATA, OzoneTable.LAST_CHUNK_INFO):
        if owner.volume.database.get(table, block_key(SEVEN, TWO)) != GARBAGE:
            assert (undo / f"2-{table.value}-{len(GARBAGE)}").read_bytes() == GARBAGE
            always(owner)


def tree_names_recorded_blocks_only(owner: Owned) -> None:
    always(owner)
    container = owner.store.open(SEVEN)
    live = {block.block_id for block in owner.trees.read(SEVEN).tree.blocks if not block.deleted}
    assert live <= set(container.block_ids())
    counters = container.counters()
    assert (counters.block_count, counters.used_bytes) in ((2, 8096), (1, 5096), (2, 8096))


def opened(owner: Owned) -> None:
    owner.writer.create_container(SEVEN)
    write_block(owner.writer, SEVEN, ONE, *LENGTHS[ONE], bcs_id=1)


def put_block(owner: Owned) -> None:
    data = content(FOUR, 3000)
    owner.writer.write_chunk(SEVEN, FOUR, 0, data[:2048])
    owner.writer.write_chunk(SEVEN, FOUR, 2048, data[2048:])
    chunks = [chunk_record(0, data[:2048]), chunk_record(2048, data[2048:])]
    owner.writer.put_block(block_record(SEVEN, FOUR, chunks, bcs_id=2))


def commits_match_counters(owner: Owned) -> None:
    always(owner)
    container = owner.store.open(SEVEN)
    counters = container.counters()
    assert counters.block_count == len(container.block_ids())
    assert counters.bcs_id == counters.block_count
    assert counters.used_bytes == sum(record.length_bytes for record in container.records())


def filled(owner: Owned) -> None:
    opened(owner)
    batch = Batch()
    batch.put(OzoneTable.FINALIZE_BLOCKS, block_key(SEVEN, ONE), bytes(8))
    owner.volume.database.write(batch)


def close(owner: Owned) -> None:
    owner.writer.close(SEVEN)


def quasi_close(owner: Owned) -> None:
    owner.writer.quasi_close(SEVEN)


def closed_means_with_a_tree(owner: Owned) -> None:
    container = owner.store.open(SEVEN)
    assert container.state in BEFORE_CLOSE or container.state.is_closed
    if container.state.is_closed:
        root = owner.trees.read(SEVEN).tree.data_checksum
        assert root is not None
        assert container.counters().data_checksum == root


def written(owner: Owned) -> None:
    """A block's bytes are durable, and its record has not arrived."""
    opened(owner)
    owner.writer.write_chunk(SEVEN, FOUR, 0, content(FOUR, 3000))


def commit_and_close(owner: Owned) -> None:
    """A client's commit is not synced; the log of Ratis has it until the container is
    closed.
    """
    if owner.store.open(SEVEN).state in BEFORE_CLOSE:
        record = block_record(SEVEN, FOUR, [chunk_record(0, content(FOUR, 3000))], bcs_id=2)
        database = owner.volume.database
        put_unsynced(
            database, OzoneTable.BLOCK_DATA, block_key(SEVEN, FOUR), record_to_bytes(record)
        )
    owner.writer.close(SEVEN)


def tree_is_of_recorded_blocks(owner: Owned) -> None:
    closed_means_with_a_tree(owner)
    tree = owner.trees.read(SEVEN).tree
    assert {block.block_id for block in tree.blocks} <= set(owner.store.open(SEVEN).block_ids())


def mark_unhealthy(owner: Owned) -> None:
    owner.writer.mark_unhealthy(SEVEN)


def marked_before_anything_else(owner: Owned) -> None:
    container = owner.store.open(SEVEN)
    assert container.read(ONE, 0, 1 << 20) == whole(ONE)
    assert container.state in (ReplicaState.OPEN, ReplicaState.UNHEALTHY)
    if container.state is ReplicaState.OPEN:
        assert owner.trees.read(SEVEN).status is TreeStatus.ABSENT


def _managed(owner: Owned) -> ManagedVolume:
    return ManagedVolume(owner.volume, owner.disk, undo_bytes=UNDO_BYTES_MAX)


def scan_with_findings(owner: Owned) -> None:
    volume = _managed(owner)
    scanned = volume.examine(SEVEN, ScanDepth.DATA, lambda _: None, lambda: False)
    assert scanned.result.findings
    volume.record_result(volume.write_tree(scanned), SCANNED_MS)


def unhealthy_means_with_findings(owner: Owned) -> None:
    container = owner.store.open(SEVEN)
    assert container.state in (ReplicaState.CLOSED, ReplicaState.UNHEALTHY)
    assert THREE in owner.trees.deleted_blocks(SEVEN)
    assert container.descriptor.data_scan_timestamp_ms in (None, SCANNED_MS)
    if container.descriptor.data_scan_timestamp_ms is not None:
        assert container.state is ReplicaState.UNHEALTHY
    if container.state is ReplicaState.UNHEALTHY:
        assert agent_scan_ms(owner.volume, owner.disk, SEVEN) == SCANNED_MS


def unhealthy(owner: Owned) -> None:
    closed(owner)
    owner.writer.mark_unhealthy(SEVEN)


def return_to_service(owner: Owned) -> None:
    if owner.store.open(SEVEN).state is ReplicaState.CLOSED:
        return
    replica = ReplicaStore([_managed(owner)], repair_enabled=True).open_replica(
        SEVEN, JOB, cancelled=Event(), on_bytes=lambda _: None
    )
    replica.set_state(ReplicaState.CLOSED, owner.trees.read(SEVEN).generation)


def out_of_service_or_back(owner: Owned) -> None:
    always(owner)
    container = owner.store.open(SEVEN)
    assert container.state in (ReplicaState.UNHEALTHY, ReplicaState.CLOSED)
    assert owner.trees.read(SEVEN).tree.data_checksum == container.counters().data_checksum


def delete_block(owner: Owned) -> None:
    delete(owner, 6, TWO)


def gone_means_with_a_tombstone(owner: Owned) -> None:
    always(owner)
    container = owner.store.open(SEVEN)
    if container.stored_record(TWO) is None or container.block_length(TWO) is None:
        assert TWO in owner.trees.deleted_blocks(SEVEN)
        tree = owner.trees.read(SEVEN).tree
        assert [block.block_id for block in tree.blocks if block.deleted] == [TWO, THREE]


def with_an_undo_copy(owner: Owned) -> None:
    closed(owner)
    owner.undo.keep(SEVEN, JOB, ONE, 0, b"before")


def delete_container(owner: Owned) -> None:
    def fail(container_id: ContainerId, error: ReconcileError) -> None:
        raise error

    owner.writer.finish_deletions(owner.volume.container_ids(), fail)
    with suppress(ContainerNotFoundError):
        owner.writer.delete_container(SEVEN)


def whole_or_going(owner: Owned) -> None:
    if SEVEN in owner.volume.container_ids():
        container = owner.store.open(SEVEN)
        assert container.state in (ReplicaState.CLOSED, ReplicaState.DELETED)
        assert container.read(ONE, 0, 1 << 20) == whole(ONE)
        assert container.record(ONE) is not None


def nothing(owner: Owned) -> None:
    del owner


def create_container(owner: Owned) -> None:
    if (
        SEVEN not in owner.volume.container_ids()
        or not owner.store.get(SEVEN).descriptor_path.exists()
    ):
        owner.writer.create_container(SEVEN)


def absent_or_empty(owner: Owned) -> None:
    for container_id in owner.volume.container_ids():
        path = owner.store.get(container_id).descriptor_path
        assert not path.exists() or owner.store.open(container_id).state is ReplicaState.OPEN


CHANGES = {
    "tree write": Change(closed, write_tree, tree_is_old_or_new),
    "tree write over garbage": Change(garbled, write_tree, tree_is_garbled_or_new),
    "first sight of a tree": Change(as_a_datanode_left_it, remember, tree_is_as_it_was),
    "window repair": Change(damaged, repair_windows, only_bad_windows_changed),
    "block repair": Change(without_record, repair_block, tree_names_recorded_blocks_only),
    "record repair": Change(
        with_an_unreadable_record, repair_record, an_unreadable_record_is_there_or_kept
    ),
    "put block": Change(opened, put_block, commits_match_counters, settles=False),
    "close": Change(filled, close, closed_means_with_a_tree),
    "quasi-close": Change(filled, quasi_close, closed_means_with_a_tree),
    "close after a commit": Change(written, commit_and_close, tree_is_of_recorded_blocks),
    "mark unhealthy": Change(opened, mark_unhealthy, marked_before_anything_else),
    # The findings and the time of the scan are written each time.
    "scan with findings": Change(
        damaged, scan_with_findings, unhealthy_means_with_findings, settles=False
    ),
    "return to service": Change(unhealthy, return_to_service, out_of_service_or_back),
    "delete block": Change(closed, delete_block, gone_means_with_a_tombstone),
    "delete container": Change(
        with_an_undo_copy, delete_container, whole_or_going, leaves_files=True
    ),
    "create container": Change(nothing, create_container, absent_or_empty),
}


@dataclass(frozen=True)
class Place:
    """A volume and the agent's state beside it, copied together."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "volume1"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def copy(self, folder: Path) -> "Place":
        shutil.copytree(self.folder, folder)
        return Place(folder)


def outcome(owner: Owned) -> tuple[dict[str, bytes], dict[bytes, bytes], frozenset[BlockId]]:
    """All that counts of container 7; what a crash left of temporary files does not."""
    rows = {
        table.encode() + key: value
        for table in OzoneTable
        for key, value in owner.volume.database.items(table, container_prefix(SEVEN))
    }
    if SEVEN not in owner.volume.container_ids():
        return (
            tree_of_files(owner.volume.working_folder / "tmp" / "deleted-containers")
            | tree_of_files(owner.volume.state_folder),
            rows,
            frozenset(),
        )
    files = tree_of_files(owner.volume.container_folder(SEVEN))
    files = {name: data for name, data in files.items() if not name.endswith(".tmp")}
    # The descriptor holds the paths of the copy it was made in.
    descriptor = replace(
        parse_descriptor(files.pop("metadata/7.container")), chunks_path="", metadata_path=""
    )
    files["descriptor"] = dump_descriptor(with_checksum(descriptor))
    return files, rows, owner.trees.deleted_blocks(SEVEN)


def run(place: Place, change: Callable[[Owned], None], disk: Disk | None = None) -> None:
    with owned(place.root, place.state, disk=disk) as owner:
        change(owner)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_cut_short_anywhere_can_be_repeated(name: str, memory_folder: Path) -> None:
    change = CHANGES[name]
    start = Place(memory_folder / "start")
    start.folder.mkdir()
    new_volume(start.root)
    run(start, change.prepare)
    undisturbed = start.copy(memory_folder / "undisturbed")
    disk = ImagingDisk(undisturbed.folder, memory_folder / "images")
    with owned(undisturbed.root, undisturbed.state, disk=disk) as owner:
        disk.watch(owner.volume.database)
        change.act(owner)
        expected = outcome(owner)
    images = disk.finish()
    assert images
    for image in images:
        place, again = Place(image.folder), CountingDisk()
        with owned(place.root, place.state, disk=again) as owner:
            try:
                change.holds(owner)
                if image.is_final:
                    found = outcome(owner)
                    assert found == expected or (found[1:] == expected[1:] and change.leaves_files)
                change.act(owner)
                assert outcome(owner) == expected
                again.operations.clear()
                change.act(owner)
                assert outcome(owner) == expected
                assert again.operations == [] or not change.settles
            except (AssertionError, ReconcileError) as error:
                raise AssertionError(f"{image}: {error}") from error
        shutil.rmtree(place.folder)
