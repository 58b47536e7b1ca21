"""Both replicas that can be repaired, the one on disk and the one in memory, keep the
same contract.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import pytest

from merkle.checksum import ChecksumType
from merkle.record import DeleteTransaction
from merkle.replica import ReplicaState
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from merkle.windows import prove
from ozone.errors import (
    BlockNotFoundError,
    ChunkGapError,
    ContainerNotFoundError,
    ContainerStateError,
    StaleTreeError,
)
from ozone.rocks import Batch, Counter, OzoneTable, counter_key
from repair.ports import ReplicaAccess
from runtime.errors import BusyError
from tests.support.disk_replica import StormyDisk
from tests.support.in_process import datanodes
from tests.support.memory import RepairableReplica
from tests.support.peers import replica_of
from tests.support.volumes import new_volume, owned

CONTAINER = ContainerId(7)
WINDOW = 1024
CHUNK = 4 * WINDOW
A, B = BlockId(1), BlockId(2)
STORED = replica_of(CONTAINER, {A: 2 * CHUNK, B: CHUNK}, window_bytes=WINDOW, chunk_bytes=CHUNK)
RECORDS = STORED.records
DATA = {block_id: bytes(file) for block_id, file in STORED.files.items()}


@dataclass
class Twin:
    """A replica, and the ways to hurt or change it behind its back."""

    replica: ReplicaAccess
    put_bytes: Callable[[BlockId, bytes | None], None]
    get_bytes: Callable[[BlockId], bytes]
    delete_block: Callable[[BlockId], None]
    set_state: Callable[[ReplicaState], None]
    delete_container: Callable[[], None]
    lose_commit: Callable[[], None]
    fail_opening: Callable[[bool], None]


@contextmanager
def _in_memory(_: Path) -> Iterator[Twin]:
    stored = replica_of(CONTAINER, {A: 2 * CHUNK, B: CHUNK}, window_bytes=WINDOW, chunk_bytes=CHUNK)
    replica = RepairableReplica("dn1", stored)

    def put_bytes(block_id: BlockId, data: bytes | None) -> None:
        stored.files.pop(block_id, None)
        if data is not None:
            stored.files[block_id] = bytearray(data)

    def set_state(state: ReplicaState) -> None:
        stored.state = state

    def lose_commit() -> None:
        stored.bcs_id = 0

    def fail_opening(fails: bool) -> None:
        replica.failing_disk = fails

    yield Twin(
        replica,
        put_bytes,
        lambda block_id: bytes(stored.files[block_id]),
        replica.delete_block,
        set_state,
        replica.delete_container,
        lose_commit,
        fail_opening,
    )


@contextmanager
def _on_disk(folder: Path) -> Iterator[Twin]:
    root = new_volume(folder / "volume1")
    with owned(root, folder / "writer") as made:
        made.writer.create_container(CONTAINER)
        for block_id, record in RECORDS.items():
            made.writer.write_chunk(CONTAINER, block_id, 0, DATA[block_id])
            # A second block of the same commit would be taken for a repetition.
            assert made.writer.put_block(record if block_id == A else replace(record, bcs_id=0))
        made.writer.close(CONTAINER)
    disk = StormyDisk()
    with datanodes({"dn1": root}, folder / "state", disks={"dn1": disk}) as nodes:
        node = nodes["dn1"]
        writer = node.held.writer
        assert writer is not None
        container = node.held.containers.get(CONTAINER)

        def put_bytes(block_id: BlockId, data: bytes | None) -> None:
            path = container.block_path(block_id)
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)

        def delete_block(block_id: BlockId) -> None:
            writer.receive_delete(DeleteTransaction(1, CONTAINER, (block_id,)))
            writer.delete_blocks(CONTAINER)

        def set_state(state: ReplicaState) -> None:
            writer.set_state(CONTAINER, state)
            node.held.reload(CONTAINER)

        def lose_commit() -> None:
            batch = Batch()
            batch.delete(OzoneTable.METADATA, counter_key(CONTAINER, Counter.BCS_ID))
            # Not looked at again: the row counts, not what is remembered of it.
            node.held.volume.database.write(batch)

        def fail_opening(fails: bool) -> None:
            disk.failing = fails

        yield Twin(
            node.store.open_replica(CONTAINER, "job-1", cancelled=Event(), on_bytes=lambda _: None),
            put_bytes,
            lambda block_id: container.block_path(block_id).read_bytes(),
            delete_block,
            set_state,
            lambda: node.store.delete_container(CONTAINER),
            lose_commit,
            fail_opening,
        )


@pytest.fixture(params=[_in_memory, _on_disk], ids=["memory", "disk"])
def twin(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Twin]:
    with request.param(tmp_path) as found:
        yield found


def test_it_tells_its_state_and_tree(twin: Twin) -> None:
    own = twin.replica.own()
    assert own.state is ReplicaState.CLOSED
    assert own.tree == ContainerTree.of(CONTAINER, STORED.scanned_tree().blocks)
    assert own.bcs_id == 1


def test_records_that_are_not_there_are_left_out(twin: Twin) -> None:
    found = twin.replica.records([A, BlockId(99)])
    assert found.keys() == {A}
    assert found[A].chunks == RECORDS[A].chunks
    assert found[A].metadata == RECORDS[A].metadata


def test_a_check_finds_bad_windows_short_files_and_lost_files(twin: Twin) -> None:
    second = RECORDS[A].chunks[1]
    assert twin.replica.check(A, second) == ((), 2 * CHUNK)
    hurt = bytearray(DATA[A])
    hurt[CHUNK + WINDOW] ^= 1
    twin.put_bytes(A, bytes(hurt))
    assert twin.replica.check(A, second) == ((1,), 2 * CHUNK)
    twin.put_bytes(A, DATA[A][: CHUNK + WINDOW + 5])
    assert twin.replica.check(A, second) == ((1, 2, 3), CHUNK + WINDOW + 5)
    twin.put_bytes(A, None)
    assert twin.replica.check(A, second) == ((0, 1, 2, 3), 0)


def test_windows_are_written_in_place_and_a_lost_file_is_made_anew(twin: Twin) -> None:
    first, second = RECORDS[A].chunks
    hurt = bytearray(DATA[A])
    hurt[CHUNK + WINDOW] ^= 1
    twin.put_bytes(A, bytes(hurt))
    twin.replica.write_windows(
        A, second, prove(second, 1, DATA[A][CHUNK + WINDOW : CHUNK + 2 * WINDOW])
    )
    assert twin.get_bytes(A) == DATA[A]
    twin.put_bytes(A, None)
    twin.replica.write_windows(A, first, prove(first, 0, DATA[A][:CHUNK]))
    assert twin.get_bytes(A) == DATA[A][:CHUNK]


def test_a_write_past_the_end_of_the_file_is_refused_and_leaves_it(twin: Twin) -> None:
    second = RECORDS[A].chunks[1]
    twin.put_bytes(A, DATA[A][:WINDOW])
    with pytest.raises(ChunkGapError):
        twin.replica.write_windows(A, second, prove(second, 0, DATA[A][CHUNK:]))
    assert twin.get_bytes(A) == DATA[A][:WINDOW]


def test_a_record_is_put_unless_its_bytes_are_missing(twin: Twin) -> None:
    shorter = replace(RECORDS[A], chunks=RECORDS[A].chunks[:1], bcs_id=0)
    twin.replica.put_block(shorter)
    assert twin.replica.records([A])[A] == shorter
    twin.put_bytes(A, DATA[A][:CHUNK])
    with pytest.raises(ChunkGapError):
        twin.replica.put_block(RECORDS[A])
    twin.put_bytes(A, DATA[A])
    twin.replica.put_block(RECORDS[A])
    assert twin.replica.records([A])[A] == RECORDS[A]


def test_a_deleted_block_takes_neither_bytes_nor_record(twin: Twin) -> None:
    """inv-I5."""
    twin.delete_block(A)
    first = RECORDS[A].chunks[0]
    with pytest.raises(BlockNotFoundError):
        twin.replica.write_windows(A, first, prove(first, 0, DATA[A][:CHUNK]))
    with pytest.raises(BlockNotFoundError):
        twin.replica.put_block(RECORDS[A])
    tree = twin.replica.own().tree
    assert tree is not None
    entry = tree.block(A)
    assert entry is not None
    assert entry.deleted
    assert twin.replica.records([A]) == {}


def test_a_tree_is_merged_unless_another_was_faster(twin: Twin) -> None:
    own = twin.replica.own()
    assert own.tree is not None
    fresh = ContainerTree.of(CONTAINER, [*own.tree.blocks, BlockTree.tombstone(BlockId(50), 5)])
    stored = twin.replica.store_tree(fresh, own.generation)
    assert stored.tree == fresh
    assert twin.replica.own().generation == stored.generation
    with pytest.raises(StaleTreeError):
        twin.replica.store_tree(own.tree, own.generation)
    # A tombstone survives a tree that does not have it.
    assert twin.replica.store_tree(own.tree, stored.generation).tree == fresh


def test_a_scan_tells_where_it_found_faults_stores_its_tree_and_marks_the_replica(
    twin: Twin,
) -> None:
    clean = twin.replica.scan()
    assert (clean.findings, clean.state) == ((), ReplicaState.CLOSED)
    hurt = bytearray(DATA[A])
    hurt[CHUNK] ^= 1
    twin.put_bytes(A, bytes(hurt))
    scanned = twin.replica.scan()
    assert scanned.findings == ((A, CHUNK),)
    assert scanned.state is ReplicaState.UNHEALTHY
    own = twin.replica.own()
    assert (own.tree, own.generation, own.state) == (
        scanned.tree,
        scanned.generation,
        scanned.state,
    )
    twin.put_bytes(A, DATA[A])
    clean = twin.replica.scan()
    assert clean.findings == ()
    # The tree of another scan says something else.
    with pytest.raises(StaleTreeError):
        twin.replica.set_state(ReplicaState.CLOSED, scanned.generation)
    twin.replica.set_state(ReplicaState.CLOSED, clean.generation)
    assert twin.replica.own().state is ReplicaState.CLOSED


def test_a_tree_that_comes_back_is_not_the_one_that_was(twin: Twin) -> None:
    """inv-I4: a scan that began before the damage and its repair is not of now."""
    first = twin.replica.own()
    assert first.tree is not None
    hurt = bytearray(DATA[A])
    hurt[CHUNK] ^= 1
    for data in (bytes(hurt), DATA[A]):
        twin.put_bytes(A, data)
        scanned = twin.replica.scan()
    assert (scanned.findings, scanned.tree) == ((), first.tree)
    assert scanned.generation != first.generation
    with pytest.raises(StaleTreeError):
        twin.replica.store_tree(first.tree, first.generation)
    with pytest.raises(StaleTreeError):
        twin.replica.set_state(ReplicaState.CLOSED, first.generation)
    twin.replica.set_state(ReplicaState.CLOSED, scanned.generation)


def test_a_block_changed_since_a_scan_counts_for_the_state_and_not_for_the_tree(
    twin: Twin,
) -> None:
    """A repair stores its tree behind its own writes; only a later scan clears it."""
    second, window = RECORDS[A].chunks[1], DATA[A][CHUNK : CHUNK + WINDOW]
    hurt = bytearray(DATA[A])
    hurt[CHUNK] ^= 1
    twin.put_bytes(A, bytes(hurt))
    twin.replica.scan()
    for change in (
        lambda: twin.replica.write_windows(A, second, prove(second, 0, window)),
        lambda: twin.replica.put_block(RECORDS[A]),
    ):
        before = twin.replica.own()
        assert before.tree is not None
        change()
        with pytest.raises(StaleTreeError):
            twin.replica.set_state(ReplicaState.CLOSED, before.generation)
        stored = twin.replica.store_tree(before.tree, before.generation)
        assert stored.tree == before.tree


def test_a_scan_that_runs_out_of_file_handles_tells_and_marks_nothing(twin: Twin) -> None:
    """inv-I4, S20: what it could not open may be whole."""
    before = twin.replica.scan()
    hurt = bytearray(DATA[A])
    hurt[CHUNK] ^= 1
    twin.put_bytes(A, bytes(hurt))
    twin.fail_opening(True)
    with pytest.raises(BusyError):
        twin.replica.scan()
    twin.fail_opening(False)
    own = twin.replica.own()
    assert (own.tree, own.generation, own.state) == (
        before.tree,
        before.generation,
        ReplicaState.CLOSED,
    )
    assert twin.replica.scan().state is ReplicaState.UNHEALTHY


def test_the_commit_only_rises(twin: Twin) -> None:
    twin.replica.advance_bcs_id(9)
    twin.replica.advance_bcs_id(3)
    assert twin.replica.own().bcs_id == 9


def test_a_commit_that_is_lost_is_told_from_the_records_until_it_is_there_again(twin: Twin) -> None:
    assert twin.replica.own().recorded_bcs_id is None
    twin.lose_commit()
    own = twin.replica.own()
    assert (own.bcs_id, own.recorded_bcs_id) == (0, 1)
    twin.replica.put_block(replace(RECORDS[B], bcs_id=4))
    assert twin.replica.own().recorded_bcs_id == 4
    twin.replica.advance_bcs_id(4)
    own = twin.replica.own()
    assert (own.bcs_id, own.recorded_bcs_id) == (4, None)


def test_the_records_of_an_unhealthy_replica_tell_what_its_commit_may_lack(twin: Twin) -> None:
    twin.replica.put_block(replace(RECORDS[B], bcs_id=4))
    assert twin.replica.own().recorded_bcs_id is None
    twin.set_state(ReplicaState.UNHEALTHY)
    own = twin.replica.own()
    assert (own.bcs_id, own.recorded_bcs_id) == (1, 4)


def test_a_replica_that_is_not_closed_is_not_changed(twin: Twin) -> None:
    """inv-I13."""
    first = RECORDS[A].chunks[0]
    twin.set_state(ReplicaState.CLOSING)
    with pytest.raises(ContainerStateError):
        twin.replica.write_windows(A, first, prove(first, 0, DATA[A][:CHUNK]))
    with pytest.raises(ContainerStateError):
        twin.replica.put_block(replace(RECORDS[A], bcs_id=0))
    with pytest.raises(ContainerStateError):
        twin.replica.advance_bcs_id(50)


def test_only_an_unhealthy_replica_returns_to_service(twin: Twin) -> None:
    """inv-I13."""
    for state in (ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED, ReplicaState.CLOSING):
        twin.set_state(state)
        with pytest.raises(ContainerStateError):
            twin.replica.set_state(ReplicaState.CLOSED, twin.replica.own().generation)
        assert twin.replica.own().state is state
    twin.set_state(ReplicaState.UNHEALTHY)
    twin.replica.set_state(ReplicaState.CLOSED, twin.replica.own().generation)
    assert twin.replica.own().state is ReplicaState.CLOSED


def test_the_lost_file_of_a_block_without_checksums_is_a_finding_and_no_lost_chunk(
    twin: Twin,
) -> None:
    chunks = tuple(
        replace(chunk, checksum_type=ChecksumType.NONE, checksums=()) for chunk in RECORDS[B].chunks
    )
    twin.replica.put_block(replace(RECORDS[B], chunks=chunks))
    assert twin.replica.scan().findings == ()
    twin.put_bytes(B, None)
    scanned = twin.replica.scan()
    assert (scanned.findings, scanned.state) == (((B, None),), ReplicaState.UNHEALTHY)
    assert not any(scanned.lost.values())


def test_a_deleted_container_is_named_by_every_call(twin: Twin) -> None:
    """CR-057."""
    first = RECORDS[A].chunks[0]
    own = twin.replica.own()
    assert own.tree is not None
    tree = own.tree
    twin.delete_container()
    for call in (
        twin.replica.own,
        twin.replica.scan,
        lambda: twin.replica.records([A]),
        lambda: twin.replica.check(A, first),
        lambda: twin.replica.write_windows(A, first, prove(first, 0, DATA[A][:CHUNK])),
        lambda: twin.replica.put_block(RECORDS[A]),
        lambda: twin.replica.store_tree(tree, own.generation),
        lambda: twin.replica.advance_bcs_id(9),
        lambda: twin.replica.set_state(ReplicaState.CLOSED, own.generation),
    ):
        with pytest.raises(ContainerNotFoundError):
            call()
