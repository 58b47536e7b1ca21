"""What a repair writes into a closed container: windows, block records, the commit.

The order is as in ozone.writer: bytes are durable before a record names them.
"""

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from merkle.checksum import Buffer
from merkle.errors import RecordInvalidError
from merkle.record import BlockRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import Container
from ozone.errors import (
    BlockNotFoundError,
    ChunkGapError,
    ContainerStateError,
)
from ozone.rocks import (
    Batch,
    Counter,
    OzoneTable,
    block_key,
)
from ozone.treefile import TreeFiles
from ozone.undo import UndoStore
from ozone.volume import Volume
from ozone.writer import ContainerWriter, check_no_gap, require_state
from protos.convert import (
    record_to_bytes,
)
from runtime.disk import Disk
from runtime.errors import DiskError

_BAD_SECTOR = errno.errorcode[errno.EIO]
_PAGE_BYTES = 4096
_CLOSED = frozenset(state for state in ReplicaState if state.is_closed)
# A device may try for seconds before it gives up a sector: what this many halvings do
# not find is not looked for.
_SPLITS_MAX = 64


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes to stand at an offset of a block file."""

    offset: int
    data: Buffer

    @property
    def end(self) -> int:
        """The first byte behind the patch."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """How many bytes were written, and for each patch how many stood there that no undo
    copy has: a bad sector.
    """

    length_bytes: int
    unread_bytes: tuple[int, ...]


class RepairWriter(ContainerWriter):
    """A ContainerWriter that also repairs closed containers."""

    def __init__(self, volume: Volume, trees: TreeFiles, undo: UndoStore, disk: Disk) -> None:
        """Raises ReadOnlyError unless the volume is held as owner."""
        super().__init__(volume, trees, undo, disk)
        # Containers whose counters were computed from all records since their tree was
        # last stored: one pass for a repair, not one for each block.
        self._counted: set[ContainerId] = set()

    def store_tree(
        self,
        container_id: ContainerId,
        fresh: ContainerTree,
        *,
        expected_generation: bytes | None = None,
    ) -> ContainerTree:
        """See ContainerWriter.store_tree; the next repair counts all records again."""
        with self.locked(container_id):
            self._counted.discard(container_id)
            return super().store_tree(container_id, fresh, expected_generation=expected_generation)

    def write_windows(
        self, container_id: ContainerId, block_id: BlockId, patches: Sequence[Patch], *, job: str
    ) -> WriteResult:
        """Put proven bytes into a closed container's block file: undo copy, write,
        sync, read back.

        Patches are in ascending order. Bytes that stand there already are not written
        again. What a bad sector keeps from being read (EIO) is damaged for certain and
        cannot be copied: it is written over all the same, since the drive gives it
        another sector then.

        Raises:
            ContainerStateError: the container is not closed.
            BlockNotFoundError: the block was deleted, or is to be.
            ChunkGapError: the file would get a gap; nothing is written.
            UndoBudgetError: nothing is written.
        """
        with self.locked(container_id):
            container = self._repairable(container_id, block_id)
            path = container.block_path(block_id)
            length = self._disk.length(path)
            unread, changes, end = [], [], length or 0
            for patch in patches:
                check_no_gap(container_id, block_id, end, patch.offset)
                before = [] if length is None else self._pieces_under(path, patch)
                there = max(min(patch.end, length or 0) - patch.offset, 0)
                unread.append(there - sum(len(data) for _, data in before))
                if before != [(patch.offset, patch.data)]:
                    changes.append((patch, before))
                end = max(end, patch.end)
            if not changes:
                return WriteResult(0, tuple(unread))
            for _, before in changes:
                for offset, data in before:
                    self._undo.keep(container_id, job, block_id, offset, data)
            if length is None:
                # A lost folder is damage like any other.
                self._disk.make_folder(container.chunks_folder)
            for patch, _ in changes:
                self._disk.write_at(path, patch.offset, patch.data)
            self._disk.sync(path)
            if length is None:
                self._disk.sync_folder(container.chunks_folder)
            for patch, _ in changes:
                if self._disk.read_at(path, patch.offset, len(patch.data)) != patch.data:
                    raise DiskError(
                        f"{path} does not hold what was just written at {patch.offset}",
                        path=str(path),
                        suspect=True,
                    )
            return WriteResult(sum(len(patch.data) for patch, _ in changes), tuple(unread))

    def put_repaired_block(self, record: BlockRecord, *, job: str) -> bool:
        """Make this the block's record, its last chunk merged in; a row that could not
        be read gets an undo copy.

        The first time after a tree was stored, the container's counters are computed
        anew from all records: damage may have left them wrong.

        The commit ID to stand in the record is the caller's decision; that of the
        container is left (`advance_bcs_id`). Returns False where all of it stood there
        already.

        Raises:
            ContainerStateError, BlockNotFoundError: as in `write_windows`.
            ChunkGapError: the record names a chunk that our record did not and that the
                file has not whole. UndoBudgetError: nothing is written.
        """
        container_id, block_id = record.container_id, record.block_id
        with self.locked(container_id):
            container = self._repairable(container_id, block_id)
            known = _readable(container, block_id)
            length = self._disk.length(container.block_path(block_id)) or 0
            for chunk in record.chunks:
                if chunk.end > length and not (known and chunk.offset in known.by_offset):
                    raise ChunkGapError(
                        f"block {block_id} of container {container_id} has {length} bytes, not the"
                        f" chunk at {chunk.offset} of {chunk.length_bytes}",
                        container_id=container_id,
                        block_id=block_id,
                        offset=chunk.offset,
                    )
            if any(
                chunk.length_bytes and not (known and chunk.offset in known.by_offset)
                for chunk in record.chunks
            ):
                # A run that was killed may have written them, so that this one found
                # them in place, and the cache may be all that has them.
                self._disk.sync(container.block_path(block_id))
                self._disk.sync_folder(container.chunks_folder)
            batch, key = Batch(), block_key(container_id, block_id)
            if known is None:
                # What we cannot read another program, or a person, may.
                for table in (OzoneTable.BLOCK_DATA, OzoneTable.LAST_CHUNK_INFO):
                    row = self._database.get(table, key)
                    if row is not None:
                        self._undo.keep_row(container_id, job, block_id, table, row)
            self._put_changed(batch, OzoneTable.BLOCK_DATA, key, record_to_bytes(record))
            if self._database.get(OzoneTable.LAST_CHUNK_INFO, key) is not None:
                batch.delete(OzoneTable.LAST_CHUNK_INFO, key)
            if container_id in self._counted:
                is_new = self._database.get(OzoneTable.BLOCK_DATA, key) is None
                before = known.length_bytes if known and not is_new else 0
                self._add_counter(
                    batch, container_id, Counter.BYTES_USED, record.length_bytes - before
                )
                self._add_counter(batch, container_id, Counter.BLOCK_COUNT, int(is_new))
            else:
                others = [
                    _readable(container, other)
                    for other in container.block_ids()
                    if other != block_id
                ]
                used = record.length_bytes + sum(other.length_bytes for other in others if other)
                self._put_counter(batch, container_id, Counter.BYTES_USED, used)
                self._put_counter(batch, container_id, Counter.BLOCK_COUNT, 1 + len(others))
            self._database.write(batch)
            self._counted.add(container_id)
            return bool(batch.changes)

    def advance_bcs_id(self, container_id: ContainerId, bcs_id: int) -> None:
        """Raise the container's commit ID to this one; never lower it."""
        with self.locked(container_id):
            require_state(self._container(container_id), _CLOSED, "is not repaired")
            batch = Batch()
            if bcs_id > self._number(container_id, Counter.BCS_ID):
                self._put_counter(batch, container_id, Counter.BCS_ID, bcs_id)
            self._database.write(batch)

    def _finish_deletion(self, container_id: ContainerId) -> None:
        super()._finish_deletion(container_id)
        self._counted.discard(container_id)

    def _repairable(self, container_id: ContainerId, block_id: BlockId) -> Container:
        container = self._container(container_id)
        require_state(container, _CLOSED, "is not repaired")
        if container.replica_index > 0:
            raise ContainerStateError(
                f"container {container_id} is erasure-coded and not repaired",
                container_id=container_id,
            )
        # Asked now, under the lock: a deletion that came after the repair was planned
        # wins.
        pending = {
            i for transaction in self._transactions(container_id) for i in transaction.block_ids
        }
        if block_id in pending or block_id in self._trees.deleted_blocks(container_id):
            raise BlockNotFoundError(
                f"block {block_id} of container {container_id} was deleted",
                container_id=container_id,
                block_id=block_id,
                deleted=True,
            )
        return container

    def _pieces_under(self, path: Path, patch: Patch) -> list[tuple[int, bytes]]:
        """What stands in the place of a patch: all in one piece, or those that can be
        read around bad sectors.
        """
        pieces, todo, splits_left = [], [(patch.offset, patch.end)], _SPLITS_MAX
        while todo:
            start, end = todo.pop()
            try:
                data = self._disk.read_at(path, start, end - start)
            except DiskError as error:
                if error.facts.get("errno") != _BAD_SECTOR:
                    raise
                # Halves, cut between pages: a page is what the system reads, or fails
                # to read, at once.
                middle = max((start + end) // 2, start + _PAGE_BYTES) // _PAGE_BYTES * _PAGE_BYTES
                if splits_left and middle < end:
                    splits_left -= 1
                    todo += [(middle, end), (start, middle)]
            else:
                if data:
                    pieces.append((start, data))
        return pieces


def _readable(container: Container, block_id: BlockId) -> BlockRecord | None:
    """The merged record; None also where it cannot be read, which must not keep another
    block from being repaired.
    """
    try:
        return container.record(block_id)
    except RecordInvalidError:
        return None
