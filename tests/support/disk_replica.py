"""Replicas of a simulated cluster on real volumes: the product's store, writer and tree
files in the place of their twins in memory.

A `DiskReplica` keeps its `stored` as a picture of its volume: whatever a storm changes
in the picture is brought to the disk before the product looks at it, and whatever the
product changes is read back. So the same observers judge both kinds, and peers read
from the picture. A crash unwinds out of a durable operation; the volume is then opened
anew.
"""

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Self, TypeVar

from dnagent.local_replica import LocalReplica
from dnagent.scanner import CompletedScan, ScanDepth
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.record import BlockRecord, ChunkRecord, DeleteTransaction
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerTree
from merkle.windows import ProvenWindows
from ozone.errors import ContainerNotFoundError, ContainerStateError
from ozone.repair_writer import RepairWriter
from ozone.rocks import Batch, Counter, OzoneTable, block_key, counter_key, long_bytes
from ozone.treefile import TreeStatus
from ozone.volume import Hold, open_volume
from protos.convert import record_to_bytes
from repair.requests import OwnLoaded, Scanned, TreeStored
from runtime.disk import Disk, Operation, Reader, disk_error
from tests.support.memory import CrashError, Observer, RepairableReplica
from tests.support.peers import MemoryReplica
from tests.support.volumes import new_volume, owned

# A crash comes at one of the first durable operations of a request.
_OPERATIONS = 12
_UNDO_BYTES = 1 << 20
_SCANNED_MS = 1_700_000_000_000
T = TypeVar("T")


@dataclass
class StormyDisk(Disk):
    """Fails where it is told to, or ends the process at a durable operation.

    It never syncs: no power is cut here, and syncs would take most of the time.
    """

    operations_left: int | None = None
    failing: bool = False

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        if self.failing and operation is Operation.WRITE:
            raise disk_error("write", path, OSError(errno.EIO, os.strerror(errno.EIO)))
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left < 0:
                self.operations_left = None
                if torn is not None:
                    torn()
                raise CrashError
        if operation not in (Operation.SYNC, Operation.SYNC_FOLDER):
            act()

    @contextmanager
    def reader(self, path: Path) -> Iterator[Reader]:
        if self.failing and path.suffix == ".block":
            raise disk_error("open", path, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        with super().reader(path) as reader:
            yield reader


class _NeverCancelled(Event):
    def wait(self, timeout: float | None = None) -> bool:
        """No time goes by between two attempts at a scan."""
        del timeout
        return False


class DiskReplica(RepairableReplica):
    """A replica with a volume of its own; `folder` is its and nobody else's."""

    def __init__(
        self,
        name: str,
        stored: MemoryReplica,
        observer: Observer | None,
        folder: Path,
        local: type[LocalReplica],
    ) -> None:
        super().__init__(name, stored, observer)
        self._folder = folder
        self._root = new_volume(folder / "volume")
        self._disk = StormyDisk()
        self._local = local
        self._stack = ExitStack()
        self._deletes = 0
        self._make_container()
        self._open()
        self._on_disk = self._look()
        self._bring()
        self._read_back()

    def close(self) -> None:
        self._stack.close()

    def restart(self) -> None:
        """Another agent opens the volume, and finishes the deletions of the one that
        died.
        """
        self._disk.operations_left, self._disk.failing = None, False
        if not self.exists:
            return
        self._stack.close()
        self._open()
        if self.stored.state is not ReplicaState.UNHEALTHY:
            self._writer.delete_blocks(self.stored.container_id)
        self._read_back()

    def own(self) -> OwnLoaded:
        return self._of_disk(lambda local: local.own())

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        return self._of_disk(lambda local: local.records(block_ids))

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        return self._of_disk(lambda local: local.check(block_id, chunk))

    def scan(self) -> Scanned:
        before = self.stored.state
        scanned = self._of_disk(lambda local: local.scan())
        self.scans += 1
        self._judge_scan(before, scanned.tree)
        return scanned

    def begin_scan(self) -> CompletedScan:
        container_id = self.stored.container_id

        def examine() -> CompletedScan:
            return self._volume.examine(container_id, ScanDepth.DATA, lambda _: None, lambda: False)

        return self._of_disk(lambda _: examine())

    def end_scan(self, scan: CompletedScan) -> None:
        before = self.stored.state

        def settle() -> None:
            self._volume.record_result(self._volume.write_tree(scan), _SCANNED_MS)

        self._of_disk(lambda _: settle())
        tree, _ = self.known_tree()
        assert tree is not None
        self._judge_scan(before, tree)

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        unread: list[int] = []
        for run in runs:
            before = len(self.stored.files.get(block_id, b""))
            offset = chunk.offset + chunk.window(run.first)[0]
            refused = block_id in self.remembered or block_id in self.pending_deletes
            if self.observer and self.exists and not refused and offset <= before:
                self.observer.writes(self, block_id, offset, run.data)
            unread += self._of_disk(
                lambda local, run=run: local.write_windows(block_id, chunk, [run])
            )
            self.bytes_written += len(run.data)
        return tuple(unread)

    def put_block(self, record: BlockRecord) -> None:
        before = self.stored.records.get(record.block_id)
        refused = record.block_id in self.remembered or record.block_id in self.pending_deletes
        length = len(self.stored.files.get(record.block_id, b""))
        short = any(
            chunk.end > length and not (before and chunk.offset in before.by_offset)
            for chunk in record.chunks
        )
        if self.observer and self.exists and not refused and not short:
            self.observer.puts(self, record)
        self._of_disk(lambda local: local.put_block(record))
        self.puts += 1

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        stored = self._of_disk(lambda local: local.store_tree(tree, generation))
        if self.observer:
            self.observer.stores(self, stored.tree)
        return stored

    def advance_bcs_id(self, bcs_id: int) -> None:
        self._of_disk(lambda local: local.advance_bcs_id(bcs_id))

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        self._of_disk(lambda local: local.set_state(state, generation))
        if self.observer:
            self.observer.returns(self, generation)

    def known_tree(self) -> tuple[ContainerTree | None, bytes]:
        if not self.exists:
            return super().known_tree()
        self._bring()
        stored = self._volume.trees.read(self.stored.container_id)
        known = stored.known
        if stored.status is not TreeStatus.PRESENT:
            known = replace(known, data_checksum=None)
        return known, stored.generation

    def delete_block(self, block_id: BlockId, *, crash_after: int | None = None) -> None:
        def act() -> None:
            if self.stored.state is ReplicaState.UNHEALTHY:
                raise ContainerStateError("an UNHEALTHY container deletes no blocks")
            self._deletes += 1
            container_id = self.stored.container_id
            transaction = DeleteTransaction(self._deletes, container_id, (block_id,))
            self._writer.receive_delete(transaction)
            self._disk.operations_left = None if crash_after is None else 2 * crash_after
            self._writer.delete_blocks(container_id)

        self._of_disk(lambda _: act())
        self.pending_deletes.discard(block_id)

    def delete_container(self) -> None:
        self._of_disk(lambda _: self._replica_store.delete_container(self.stored.container_id))
        super().delete_container()
        self._stack.close()

    def _of_disk(self, act: Callable[[LocalReplica], T]) -> T:
        """Carry out something on disk, in the state of the picture, and look at what
        came of it.
        """
        if not self.exists:
            raise ContainerNotFoundError("the container is deleted")
        self._bring()
        self._disk.failing = self.failing_disk
        if self.tear is not None:
            self._disk.operations_left, self.tear = self.tear(_OPERATIONS), None
        local = self._local(
            self._volume,
            self._writer,
            self.stored.container_id,
            "job",
            cancelled=_NeverCancelled(),
            on_bytes=lambda _: None,
        )
        try:
            return act(local)
        finally:
            self._disk.operations_left, self._disk.failing = None, False
            if self._volume.replicas():
                self._read_back()

    def _judge_scan(self, before: ReplicaState, tree: ContainerTree) -> None:
        if self.observer:
            self.observer.stores(self, tree)
            if before is not self.stored.state:
                self.observer.marks(self)

    def _make_container(self) -> None:
        """A closed container without blocks, in the state of the picture."""
        container_id = self.stored.container_id
        with owned(self._root, self._folder / "state", disk=self._disk) as made:
            made.writer.create_container(container_id)
            made.writer.close(container_id)
            made.writer.set_state(container_id, self.stored.state)

    def _open(self) -> None:
        state = self._folder / "state"
        volume = open_volume(self._root, hold=Hold.OWNER, state_folder=state, disk=self._disk)
        self._volume = ManagedVolume(volume, self._disk, undo_bytes=_UNDO_BYTES)
        self._stack = ExitStack()
        self._stack.callback(self._volume.close)
        self._replica_store = ReplicaStore([self._volume], repair_enabled=True)

    @property
    def _writer(self) -> RepairWriter:
        assert self._volume.writer is not None
        return self._volume.writer

    def _bring(self) -> None:
        """Let the disk be as the picture is, where that was changed."""
        container_id, now, was = self.stored.container_id, self.stored, self._on_disk
        container, batch, changed = self._volume.containers.get(container_id), Batch(), False
        for block_id in now.files.keys() | was.files.keys():
            data = now.files.get(block_id)
            if data is None:
                container.block_path(block_id).unlink(missing_ok=True)
            elif data != was.files.get(block_id):
                container.block_path(block_id).write_bytes(data)
        for block_id in now.records.keys() | was.records.keys():
            record, key = now.records.get(block_id), block_key(container_id, block_id)
            if record is None:
                batch.delete(OzoneTable.BLOCK_DATA, key)
            elif record != was.records.get(block_id):
                batch.put(OzoneTable.BLOCK_DATA, key, record_to_bytes(record))
            changed = changed or record != was.records.get(block_id)
        if now.bcs_id != was.bcs_id:
            key, changed = counter_key(container_id, Counter.BCS_ID), True
            batch.put(OzoneTable.METADATA, key, long_bytes(now.bcs_id))
        if changed:
            self._volume.volume.database.write(batch)
        if now.tree != was.tree:
            path, changed = self._volume.trees.path(container_id), True
            path.unlink(missing_ok=True)
            if isinstance(now.tree, bytes):
                path.write_bytes(now.tree)
        if changed:
            self._volume.reload(container_id)
        self._on_disk = _copy_of(now)

    def _read_back(self) -> None:
        """Let the picture be as the disk is."""
        found = self._look()
        stored = self.stored
        stored.records, stored.files, stored.tree = found.records, found.files, found.tree
        stored.state, stored.bcs_id = found.state, found.bcs_id
        self._on_disk = _copy_of(stored)
        known = self._volume.trees.read(stored.container_id).known
        self.remembered = {block.block_id: block for block in known.blocks if block.deleted}

    def _look(self) -> MemoryReplica:
        container_id = self.stored.container_id
        container = self._volume.containers.open(container_id)
        records = {record.block_id: record for record in container.records()}
        files = {
            BlockId(int(path.stem)): bytearray(path.read_bytes())
            for path in container.chunks_folder.glob("*.block")
        }
        tree, commit = self._volume.trees.raw(container_id), container.counters().bcs_id or 0
        return MemoryReplica(container_id, records, files, tree, container.state, commit)


def _copy_of(stored: MemoryReplica) -> MemoryReplica:
    files = {block_id: bytearray(file) for block_id, file in stored.files.items()}
    return replace(stored, records=dict(stored.records), files=files)


class DiskReplicas:
    """Makes the replicas of a world below one folder; closes all of them."""

    def __init__(self, folder: Path, local: type[LocalReplica] = LocalReplica) -> None:
        self._folder = folder
        self._local = local
        self._made: list[DiskReplica] = []

    def replica(self, name: str, stored: MemoryReplica, observer: Observer | None) -> DiskReplica:
        """A replica on a volume of its own."""
        folder = self._folder / f"{len(self._made)}"
        folder.mkdir(parents=True)
        self._made.append(DiskReplica(name, stored, observer, folder, self._local))
        return self._made[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._made:
            replica.close()
