"""The writes of a repair to a closed container: windows, block records, the commit.

As in ozone.writer, bytes are durable before a record names them.
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
from ozone.errors import BlockNotFoundError, ChunkGapError, ContainerStateError
from ozone.rocks import Batch, Counter, OzoneTable, block_key
from ozone.treefile import TreeFiles
from ozone.undo import UndoStore
from ozone.volume import Volume
from ozone.writer import ContainerWriter, check_no_gap, require_state
from protos.convert import may_delete_block, record_to_bytes
from runtime.disk import Disk
from runtime.errors import DiskError

_BAD_SECTOR = errno.errorcode[errno.EIO]
_PAGE_BYTES = 4096
_CLOSED = frozenset(state for state in ReplicaState if state.is_closed)
# A device may retry a bad sector for seconds, so the search around bad sectors ends
# after this many halvings.
_SPLITS_MAX = 64


@dataclass(frozen=True, slots=True)
class Patch:
    """Bytes to write at an offset of a block file."""

    offset: int
    data: Buffer

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + len(self.data)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The bytes written, and for each patch the overwritten bytes without an undo copy,
    because of bad sectors.
    """

    length_bytes: int
    unread_bytes: tuple[int, ...]


class RepairWriter(ContainerWriter):
    """A ContainerWriter that can also repair closed containers."""

    def __init__(self, volume: Volume, trees: TreeFiles, undo: UndoStore, disk: Disk) -> None:
        """As in ContainerWriter.

        Raises:
            ReadOnlyError: the volume is not held as owner.
        """
        super().__init__(volume, trees, undo, disk)
        # Containers whose counters were recomputed since their tree was last stored:
        # one pass over all records per repair, not one per block.
        self._recounted: set[ContainerId] = set()

    def store_tree(
        self,
        container_id: ContainerId,
        fresh: ContainerTree,
        *,
        expected_generation: bytes | None = None,
        blocks_may_change: bool = False,
    ) -> ContainerTree:
        """As in ContainerWriter; the next repair recomputes the counters."""
        with self.locked(container_id):
            self._recounted.discard(container_id)
            return super().store_tree(
                container_id,
                fresh,
                expected_generation=expected_generation,
                blocks_may_change=blocks_may_change,
            )

    def write_windows(
        self, container_id: ContainerId, block_id: BlockId, patches: Sequence[Patch], *, job: str
    ) -> WriteResult:
        """Write proven bytes to a block file of a closed container, with undo copies.

        Patches ascend. Each is copied, written, synced and read back, unless the file
        has these bytes already. Bytes in a bad sector (EIO) cannot be copied; they are
        overwritten without, since the drive then remaps the sector.

        Raises:
            ContainerStateError: the container is not closed, or is erasure-coded.
            BlockNotFoundError: the block was deleted, or its deletion is pending.
            RecordInvalidError: a delete transaction that cannot be parsed may name it.
            ChunkGapError: the file would get a gap; nothing is written.
            UndoBudgetError: the copies do not fit; nothing is written.
            DiskError: a read or write failed, or the bytes read back differ (with the
                fact `suspect`).
        """
        with self.locked(container_id):
            container = self._repairable(container_id, block_id)
            path = container.block_path(block_id)
            length = self._disk.length(path)
            unread, changes, end = [], [], length or 0
            for patch in patches:
                check_no_gap(container_id, block_id, end, patch.offset)
                before = [] if length is None else self._read_around_bad_sectors(path, patch)
                present = max(min(patch.end, length or 0) - patch.offset, 0)
                unread.append(present - sum(len(data) for _, data in before))
                if before != [(patch.offset, patch.data)]:
                    changes.append((patch, before))
                end = max(end, patch.end)
            if not changes:
                return WriteResult(0, tuple(unread))
            for _, before in changes:
                for offset, data in before:
                    self._undo.keep(container_id, job, block_id, offset, data)
            with self._changing_blocks(container_id):
                self._write_patches(
                    container, path, [patch for patch, _ in changes], is_new=length is None
                )
            return WriteResult(sum(len(patch.data) for patch, _ in changes), tuple(unread))

    def put_repaired_block(self, record: BlockRecord, *, job: str) -> bool:
        """Store this merged record of a block; returns False if nothing changed.

        A row that cannot be parsed gets an undo copy first. The first call after a tree
        was stored recomputes the container's counters from all records, since damage
        may have left them wrong. The record's commit ID is stored as given; the
        container's is not changed (see `advance_bcs_id`).

        Raises:
            ContainerStateError, BlockNotFoundError: as in `write_windows`.
            ChunkGapError: the record adds a chunk that the file does not hold in full;
                nothing is written.
            UndoBudgetError: the copies do not fit; nothing is written.
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
                # A killed run may have written these bytes, which this run then found
                # in place: they may be in the page cache only.
                self._disk.sync(container.block_path(block_id))
                self._disk.sync_folder(container.chunks_folder)
            batch, key = Batch(), block_key(container_id, block_id)
            if known is None:
                # Another program, or a person, may be able to read these rows.
                for table in (OzoneTable.BLOCK_DATA, OzoneTable.LAST_CHUNK_INFO):
                    row = self._database.get(table, key)
                    if row is not None:
                        self._undo.keep_row(container_id, job, block_id, table, row)
            self._put_changed(batch, OzoneTable.BLOCK_DATA, key, record_to_bytes(record))
            if self._database.get(OzoneTable.LAST_CHUNK_INFO, key) is not None:
                batch.delete(OzoneTable.LAST_CHUNK_INFO, key)
            if container_id in self._recounted:
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
            with self._changing_blocks(container_id):
                self._database.write(batch)
            self._recounted.add(container_id)
            return bool(batch.changes)

    def advance_bcs_id(self, container_id: ContainerId, bcs_id: int) -> None:
        """Raise the container's commit ID to `bcs_id`; never lower it.

        Raises:
            ContainerStateError: the container is not closed.
        """
        with self.locked(container_id):
            require_state(self._container(container_id), _CLOSED, "is not repaired")
            batch = Batch()
            if bcs_id > self._number(container_id, Counter.BCS_ID):
                self._put_counter(batch, container_id, Counter.BCS_ID, bcs_id)
            self._database.write(batch)

    def _finish_deletion(self, container_id: ContainerId) -> None:
        super()._finish_deletion(container_id)
        self._recounted.discard(container_id)

    def _write_patches(
        self, container: Container, path: Path, patches: Sequence[Patch], *, is_new: bool
    ) -> None:
        """Write, sync, read back and compare."""
        if is_new:
            # The folder itself may have been lost.
            self._disk.make_folder(container.chunks_folder)
        for patch in patches:
            self._disk.write_at(path, patch.offset, patch.data)
        self._disk.sync(path)
        if is_new:
            self._disk.sync_folder(container.chunks_folder)
        for patch in patches:
            if self._disk.read_at(path, patch.offset, len(patch.data)) != patch.data:
                raise DiskError(
                    f"{path} does not hold the bytes just written at {patch.offset}",
                    path=str(path),
                    suspect=True,
                )

    def _repairable(self, container_id: ContainerId, block_id: BlockId) -> Container:
        container = self._container(container_id)
        require_state(container, _CLOSED, "is not repaired")
        if container.replica_index > 0:
            raise ContainerStateError(
                f"container {container_id} is erasure-coded and not repaired",
                container_id=container_id,
            )
        # Checked under the lock: a deletion that arrived after the repair was planned
        # wins.
        transactions, unparsable = self._pending_deletes(container_id)
        pending = {i for transaction in transactions for i in transaction.block_ids}
        if block_id in pending or block_id in self._trees.deleted_blocks(container_id):
            raise BlockNotFoundError(
                f"block {block_id} of container {container_id} was deleted",
                container_id=container_id,
                block_id=block_id,
                deleted=True,
            )
        if any(may_delete_block(raw, block_id) for raw in unparsable):
            raise RecordInvalidError(
                f"a delete transaction of container {container_id} cannot be parsed and may name"
                f" block {block_id}",
                hint="Compare the row of delete_txns with those of the other replicas.",
                container_id=container_id,
                block_id=block_id,
            )
        return container

    def _read_around_bad_sectors(self, path: Path, patch: Patch) -> list[tuple[int, bytes]]:
        """The bytes that a patch would overwrite, with their offsets: one piece, or the
        readable pieces around bad sectors.
        """
        pieces, todo, splits_left = [], [(patch.offset, patch.end)], _SPLITS_MAX
        while todo:
            start, end = todo.pop()
            try:
                data = self._disk.read_at(path, start, end - start)
            except DiskError as error:
                if error.facts.get("errno") != _BAD_SECTOR:
                    raise
                # Split in halves between pages: the system reads whole pages, or fails
                # to.
                middle = max((start + end) // 2, start + _PAGE_BYTES) // _PAGE_BYTES * _PAGE_BYTES
                if splits_left and middle < end:
                    splits_left -= 1
                    todo += [(middle, end), (start, middle)]
            else:
                if data:
                    pieces.append((start, data))
        return pieces


def _readable(container: Container, block_id: BlockId) -> BlockRecord | None:
    """The merged record, None if it is missing or invalid: an invalid record must not
    prevent the repair of another block.
    """
    try:
        return container.record(block_id)
    except RecordInvalidError:
        return None
