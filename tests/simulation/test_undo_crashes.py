"""A crash at any operation of an undo: whatever has its old bytes again is UNHEALTHY
and corrupt by the tree, its good bytes are kept, and repeating the undo does the rest.
"""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event

import pytest

from dnagent.undo_jobs import next_undo_id, plan_undo, put_back
from dnagent.volumes import ManagedVolume
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.ports import ByteRange
from ozone.repair_writer import Patch
from repair.audit import AuditLog
from repair.ports import Piece
from runtime.disk import Disk
from tests.support.audit_files import audit_lines, check_folder
from tests.support.disk import ImagingDisk
from tests.support.volumes import UNDO_BYTES_MAX, Owned, content, new_volume, owned, write_block

pytestmark = pytest.mark.crashes

SEVEN = ContainerId(7)
ONE, TWO = BlockId(1), BlockId(2)
OWN, PEER = PeerId("dn-1"), PeerId("dn-2")
JOB = "job-1"
LENGTH = 5000
# Block, offset and length of what the job repaired: in its second round, too.
REPAIRED = ((ONE, 1024, 1024, JOB), (TWO, 4096, 904, f"{JOB}.2"))


class Whole:
    """A peer that holds all blocks whole."""

    peer_id = PEER

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        del container_id, record_chunk
        for one in ranges:
            yield Piece(one.offset, content(block_id, LENGTH)[one.offset : one.end])

    def tree(self, container_id: ContainerId) -> ContainerTree:
        raise AssertionError("an undo believes no peer's tree")

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        raise AssertionError("an undo believes no peer's records")

    def close(self) -> None:
        pass


def old_bytes(length: int) -> bytes:
    return b"\xaa" * length


def repaired(owner: Owned) -> None:
    """Container 7, damaged and then repaired by a job with two rounds."""
    owner.writer.create_container(SEVEN)
    for bcs_id, block_id in enumerate((ONE, TWO), 1):
        write_block(owner.writer, SEVEN, block_id, LENGTH, bcs_id=bcs_id)
    owner.writer.close(SEVEN)
    for block_id, offset, length, job in REPAIRED:
        path = owner.store.open(SEVEN).block_path(block_id)
        data = bytearray(path.read_bytes())
        data[offset : offset + length] = old_bytes(length)
        path.write_bytes(data)
        good = content(block_id, LENGTH)[offset : offset + length]
        owner.writer.write_windows(SEVEN, block_id, [Patch(offset, good)], job=job)


def undo(owner: Owned, audit: Path) -> int:
    """Undo the job; returns the number of windows that were put back."""
    volume = ManagedVolume(owner.volume, owner.disk, undo_bytes=UNDO_BYTES_MAX)
    plan = plan_undo(volume, OWN, SEVEN, JOB, {PEER: Whole()})
    assert not any(one.decision.refuses for one in plan.windows)
    log = AuditLog(audit, disk=owner.disk)
    try:
        if plan.to_write:
            undo_id = next_undo_id(volume, SEVEN, JOB)
            put_back(volume, plan, undo_id, audit=log, cancelled=Event())
    finally:
        log.close()
    return len(plan.to_write)


def check(owner: Owned) -> int:
    """What must hold at any moment; returns the number of repaired ranges that have
    their old bytes.
    """
    container, undone = owner.store.open(SEVEN), 0
    tree = owner.trees.read(SEVEN).tree
    for block_id, offset, length, _ in REPAIRED:
        found = container.read(block_id, offset, length)
        good = content(block_id, LENGTH)[offset : offset + length]
        is_part = all(
            found[at : at + 1] in (good[at : at + 1], old_bytes(1)) for at in range(len(found))
        )
        assert is_part
        if found == good:
            continue
        undone += found == old_bytes(length)
        assert container.state is ReplicaState.UNHEALTHY
        block = tree.block(block_id)
        assert block is not None
        assert not block.chunks[0].checksum_matches
        kept = owner.volume.state_folder / "undo" / "7"
        copies = list(kept.glob(f"{JOB}.undo*/{block_id}-*"))
        assert any(good[:1024] in path.read_bytes() or path.read_bytes() in good for path in copies)
    return undone


def test_a_crash_at_any_operation_of_an_undo_does_no_harm(memory_folder: Path) -> None:
    start = memory_folder / "start"
    start.mkdir()
    new_volume(start / "volume1")
    with owned(start / "volume1", start / "state") as owner:
        repaired(owner)
    run = Path(shutil.copytree(start, memory_folder / "run"))
    disk = ImagingDisk(run, memory_folder / "images")
    with owned(run / "volume1", run / "state", disk=disk) as owner:
        disk.watch(owner.volume.database)
        assert undo(owner, run / "state" / "audit.jsonl") == 2
        assert check(owner) == len(REPAIRED)
    images = disk.finish()
    assert len(images) > 40
    for image in images:
        audit = image.folder / "state" / "audit.jsonl"
        with owned(image.folder / "volume1", image.folder / "state", disk=Disk()) as owner:
            try:
                check(owner)
                undo(owner, audit)
                assert check(owner) == len(REPAIRED)
                if image.is_final:
                    assert undo(owner, audit) == 0
            except AssertionError as error:
                raise AssertionError(f"{image}: {error}") from error
        assert check_folder(image.folder / "state").broken is None
        assert all(line["kind"] in ("write", "cut") for line in audit_lines(audit))
        shutil.rmtree(image.folder)
