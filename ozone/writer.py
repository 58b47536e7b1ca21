"""Changes of a container, as a datanode makes them: create, write, close, delete.

Bytes are durable before a record names them, records before the tree includes them, and
the tree before a close returns. A deletion has the reverse order: tombstone, then
bytes, then record, so that no deleted block is ever without a tombstone. After a crash,
the same call repeated ends in the same state.

A re-entrant lock per container serialises changes; a caller that makes several holds
the lock around them. Builders, tests and repairs use this module; it does not serve
client writes.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from merkle.checksum import Buffer
from merkle.errors import ReconcileError, RecordInvalidError, TreeRefusedError
from merkle.record import BlockRecord, DeleteTransaction
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import Container, ContainerStore
from ozone.descriptor import Descriptor, dump_descriptor, with_checksum
from ozone.errors import (
    ChunkGapError,
    ContainerNotFoundError,
    ContainerStateError,
    ContainerUnsupportedError,
    DescriptorError,
    ReadOnlyError,
)
from ozone.incremental import is_incremental, put_incremental
from ozone.rocks import (
    Batch,
    Counter,
    Database,
    OzoneTable,
    block_key,
    container_prefix,
    counter_key,
    delete_key,
    long_bytes,
)
from ozone.scan import build_from_metadata
from ozone.treefile import TreeFiles
from ozone.undo import UndoStore
from ozone.volume import Hold, Volume, container_id_of
from protos.convert import (
    delete_transaction_from_bytes,
    delete_transaction_to_bytes,
    record_to_bytes,
)
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError

_CONTAINER_BYTES_MAX = 5 << 30
# A closing follower still receives writes that its leader accepted before. A recovering
# replica is being filled.
_WRITABLE = frozenset({ReplicaState.OPEN, ReplicaState.CLOSING, ReplicaState.RECOVERING})
# As in Ozone, an unhealthy replica does not delete blocks: it may have the last good
# copy.
_DELETING = frozenset({ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED})


class ContainerWriter:
    """Writes to the containers of one volume that is held as owner. Thread-safe.

    Every method may raise ContainerNotFoundError, DescriptorError,
    ContainerUnsupportedError, ContainerStateError, DatabaseError and DiskError. After a
    failed sync (with the fact `suspect`) the volume is marked suspect, and every
    further change is refused.
    """

    def __init__(self, volume: Volume, trees: TreeFiles, undo: UndoStore, disk: Disk) -> None:
        """A writer of this volume; `trees` and `undo` belong to the same volume.

        Raises:
            ReadOnlyError: the volume is not held as owner.
        """
        if volume.hold is not Hold.OWNER:
            raise ReadOnlyError(
                f"the volume {volume.root} is held read-only", path=str(volume.root)
            )
        self._volume = volume
        self._store = ContainerStore(volume, disk)
        self._trees = trees
        self._undo = undo
        self._disk = disk
        self._locks: dict[ContainerId, threading.RLock] = {}
        self._locks_guard = threading.Lock()

    @contextmanager
    def locked(self, container_id: ContainerId) -> Iterator[None]:
        """Hold the container's lock, which excludes all other changes.

        Raises:
            DiskError: the volume is suspect.
        """
        with self._locks_guard:
            lock = self._locks.setdefault(container_id, threading.RLock())
        with lock:
            if self._volume.suspect is not None:
                raise DiskError(
                    f"the volume {self._volume.root} is suspect: {self._volume.suspect}",
                    hint=(
                        "Check the device. Restart the agent when the volume can be trusted again."
                    ),
                    suspect=True,
                    path=str(self._volume.root),
                )
            try:
                yield
            except (DiskError, DatabaseError) as error:
                if error.facts.get("suspect"):
                    self._volume.suspect = error.message
                raise

    def create_container(
        self,
        container_id: ContainerId,
        *,
        state: ReplicaState = ReplicaState.OPEN,
        replica_index: int = 0,
    ) -> Descriptor:
        """Create an empty container and return its descriptor; a failed creation leaves
        nothing.

        Raises:
            ContainerStateError: the container exists.
        """
        with self.locked(container_id):
            folder = self._volume.usual_folder(container_id)
            # Not the folder: an interrupted creation leaves one.
            if (folder / "metadata" / f"{container_id}.container").exists():
                raise ContainerStateError(
                    f"container {container_id} exists already", container_id=container_id
                )
            descriptor = Descriptor(
                container_id=container_id,
                state=state,
                chunks_path=str(folder / "chunks"),
                metadata_path=str(folder / "metadata"),
                max_size_bytes=_CONTAINER_BYTES_MAX,
                origin_node_id=self._volume.datanode_id,
                origin_pipeline_id=None,
                replica_index=replica_index,
            )
            try:
                self._disk.make_folder(folder / "metadata")
                self._disk.make_folder(folder / "chunks")
                return self._put_descriptor(folder, descriptor)
            except DiskError:
                self._disk.remove_folder(folder)
                raise

    def close(self, container_id: ContainerId) -> ContainerTree:
        """Close a container: state CLOSED, with a stored tree and its root in the
        database; returns the tree.
        """
        return self._close(container_id, ReplicaState.CLOSED)

    def quasi_close(self, container_id: ContainerId) -> ContainerTree:
        """Close a container in state QUASI_CLOSED: the other replicas may have another
        commit. Returns the tree.
        """
        return self._close(container_id, ReplicaState.QUASI_CLOSED)

    def mark_unhealthy(self, container_id: ContainerId) -> None:
        """Set the state UNHEALTHY, which Ozone never reverts; a replica without a tree
        gets one.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            self._set_state(container, ReplicaState.UNHEALTHY)
            # The tree is optional: records may be unreadable or beyond our limits.
            with suppress(DatabaseError, RecordInvalidError, TreeRefusedError):
                if container.counters().data_checksum is None:
                    self.store_tree(container_id, build_from_metadata(container))

    def set_state(self, container_id: ContainerId, state: ReplicaState) -> None:
        """Set the state in the descriptor and change nothing else."""
        with self.locked(container_id):
            self._set_state(self._container(container_id), state)

    def set_scan_timestamp(self, container_id: ContainerId, timestamp_ms: int) -> None:
        """Record the time of the last full scan, in ms since the epoch, in the
        descriptor.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            self._put_descriptor(
                container.folder, replace(container.descriptor, data_scan_timestamp_ms=timestamp_ms)
            )

    def store_tree(
        self,
        container_id: ContainerId,
        fresh: ContainerTree,
        *,
        expected_generation: bytes | None = None,
        blocks_may_change: bool = False,
    ) -> ContainerTree:
        """Merge a tree into the stored one and write its root to the database.

        Returns the merged tree; raises as `TreeFiles.update` does.
        """
        with self.locked(container_id):
            tree = self._trees.update(
                container_id,
                fresh,
                expected_generation=expected_generation,
                blocks_may_change=blocks_may_change,
            )
            root = tree.data_checksum
            assert root is not None, "a merged tree has a root"
            if self._database.get_long(container_id, Counter.DATA_CHECKSUM) != root:
                batch = Batch()
                batch.put(
                    OzoneTable.METADATA,
                    counter_key(container_id, Counter.DATA_CHECKSUM),
                    long_bytes(root),
                )
                self._database.write(batch)
            return tree

    def delete_container(self, container_id: ContainerId) -> None:
        """Delete a container in any state; after a crash, `finish_deletions` completes
        it.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            if container.state is not ReplicaState.DELETED:
                self._set_state(container, ReplicaState.DELETED)
            moved = self._deleted_folder / str(container_id)
            self._disk.make_folder(self._deleted_folder)
            # Left by an interrupted deletion of the same container.
            self._disk.remove_folder(moved)
            self._disk.rename(container.folder, moved)
            self._disk.sync_folder(container.folder.parent)
            self._disk.sync_folder(self._deleted_folder)
            self._finish_deletion(container_id)

    def finish_deletions(
        self,
        container_ids: Iterable[ContainerId],
        on_failure: Callable[[ContainerId, ReconcileError], None],
    ) -> list[ContainerId]:
        """Finish interrupted deletions, at start; returns the containers deleted.

        These are the containers among `container_ids` in state DELETED, and those whose
        folder was moved already. `on_failure` gets each failure; the next start tries
        again.
        """
        finished: list[ContainerId] = []

        def attempt(container_id: ContainerId, finish: Callable[[ContainerId], bool]) -> None:
            try:
                if finish(container_id):
                    finished.append(container_id)
            except ReconcileError as error:
                on_failure(container_id, error)

        for name in self._disk.names(self._deleted_folder) if self._deleted_folder.is_dir() else ():
            moved = container_id_of(name)
            if moved is not None:
                attempt(moved, self._finish_moved)
        for container_id in container_ids:
            attempt(container_id, self._finish_marked)
        return finished

    def write_chunk(
        self, container_id: ContainerId, block_id: BlockId, offset: int, data: Buffer
    ) -> None:
        """Write bytes of a block, inside its file or at its end; durable after
        `put_block`.

        Raises:
            ContainerStateError: the container takes no more writes.
            ChunkGapError: the file ends before `offset`.
        """
        with self.locked(container_id):
            container = self._writable(container_id)
            path = container.block_path(block_id)
            check_no_gap(container_id, block_id, self._disk.length(path) or 0, offset)
            with self._changing_blocks(container_id):
                self._disk.write_at(path, offset, data)

    def put_block(self, record: BlockRecord, *, end_of_block: bool = True) -> bool:
        """Commit a block: all of its chunks, or the new ones if the record is marked
        `incremental`.

        Returns False if the commit was applied before: its ID is not 0 and not above
        the container's.

        Raises:
            ContainerStateError: the container takes no more writes.
            ChunkGapError: the record names bytes that were not written.
        """
        container_id, block_id = record.container_id, record.block_id
        with self.locked(container_id):
            container = self._writable(container_id)
            if 0 < record.bcs_id <= (container.counters().bcs_id or 0):
                return False
            batch, stored = Batch(), container.stored_record(block_id)
            before = container.record(block_id)
            if record.bcs_id == 0 and stored is not None:
                record = replace(record, bcs_id=stored.bcs_id)
            self._make_durable(container, record)
            if is_incremental(record):
                after = put_incremental(batch, container, record, stored, end_of_block=end_of_block)
            else:
                batch.put(
                    OzoneTable.BLOCK_DATA,
                    block_key(container_id, block_id),
                    record_to_bytes(record),
                )
                after = record.length_bytes
            grown = after - (before.length_bytes if before else 0)
            if record.bcs_id:
                self._put_counter(batch, container_id, Counter.BCS_ID, record.bcs_id)
            self._add_counter(batch, container_id, Counter.BYTES_USED, grown)
            self._add_counter(batch, container_id, Counter.BLOCK_COUNT, 0 if stored else 1)
            with self._changing_blocks(container_id):
                self._database.write(batch)
            return True

    def receive_delete(self, transaction: DeleteTransaction) -> bool:
        """Store a transaction that deletes blocks, without deleting them yet; returns
        False if it was received before.
        """
        container_id = transaction.container_id
        with self.locked(container_id):
            self._container(container_id)
            key, highest = (
                delete_key(container_id, transaction.tx_id),
                self._number(container_id, Counter.DELETE_TX),
            )
            if (
                transaction.tx_id == highest
                or self._database.get(OzoneTable.DELETE_TXNS, key) is not None
            ):
                return False
            batch = Batch()
            batch.put(OzoneTable.DELETE_TXNS, key, delete_transaction_to_bytes(transaction))
            if transaction.tx_id > highest:
                self._put_counter(batch, container_id, Counter.DELETE_TX, transaction.tx_id)
            self._add_counter(
                batch, container_id, Counter.PENDING_DELETE_COUNT, len(transaction.block_ids)
            )
            if transaction.replica_bytes is not None:
                self._add_counter(
                    batch, container_id, Counter.PENDING_DELETE_BYTES, transaction.replica_bytes
                )
            self._database.write(batch)
            return True

    def delete_blocks(self, container_id: ContainerId) -> list[BlockId]:
        """Carry out the received delete transactions; returns the blocks that had a
        record. A transaction that cannot be parsed stays.

        Raises:
            ContainerStateError: the container is neither CLOSED nor QUASI_CLOSED.
            RecordInvalidError: a record is invalid, so its tombstone would have no
                checksum.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            require_state(container, _DELETING, "deletes no blocks")
            transactions, _ = self._pending_deletes(container_id)
            if not transactions:
                return []
            block_ids = sorted({block_id for t in transactions for block_id in t.block_ids})
            records = [r for r in map(container.stored_record, block_ids) if r is not None]
            freed = sum(r.length_bytes for r in map(container.record, block_ids) if r is not None)
            if records:
                self._trees.add_tombstones(container_id, records)
            with self._changing_blocks(container_id):
                for block_id in block_ids:
                    self._disk.remove(container.block_path(block_id))
                if container.chunks_folder.is_dir():
                    self._disk.sync_folder(container.chunks_folder)
            batch = Batch()
            for block_id in block_ids:
                batch.delete(OzoneTable.BLOCK_DATA, block_key(container_id, block_id))
                batch.delete(OzoneTable.LAST_CHUNK_INFO, block_key(container_id, block_id))
            for transaction in transactions:
                batch.delete(OzoneTable.DELETE_TXNS, delete_key(container_id, transaction.tx_id))
            self._add_counter(batch, container_id, Counter.BYTES_USED, -freed)
            self._add_counter(batch, container_id, Counter.BLOCK_COUNT, -len(records))
            pending = sum(len(t.block_ids) for t in transactions)
            self._add_counter(batch, container_id, Counter.PENDING_DELETE_COUNT, -pending)
            if self._database.get_long(container_id, Counter.PENDING_DELETE_BYTES) is not None:
                pending_bytes = sum(t.replica_bytes or 0 for t in transactions)
                self._add_counter(batch, container_id, Counter.PENDING_DELETE_BYTES, -pending_bytes)
            with self._changing_blocks(container_id):
                self._database.write(batch)
            return [record.block_id for record in records]

    @contextmanager
    def _changing_blocks(self, container_id: ContainerId) -> Iterator[None]:
        """Counts a change of blocks when it ends, also by an error: scans that began
        before may have read what is no longer there.
        """
        try:
            yield
        finally:
            self._trees.blocks_changed(container_id)

    @property
    def _database(self) -> Database:
        return self._volume.database

    @property
    def _deleted_folder(self) -> Path:
        return self._volume.working_folder / "tmp" / "deleted-containers"

    def _container(self, container_id: ContainerId) -> Container:
        return self._store.open(container_id)

    def _writable(self, container_id: ContainerId) -> Container:
        container = self._container(container_id)
        require_state(container, _WRITABLE, "takes no writes")
        return container

    def _close(self, container_id: ContainerId, state: ReplicaState) -> ContainerTree:
        with self.locked(container_id):
            container = self._container(container_id)
            require_state(container, _CLOSABLE | {state}, f"cannot become {state.name}")
            if container.state.is_closed and container.counters().data_checksum is not None:
                stored = self._trees.read(container_id)
                if stored.tree.data_checksum is not None:
                    # Kept: it may come from a scan, which knows more than the records.
                    self._set_state(container, state)
                    return stored.tree
            if container.state is ReplicaState.OPEN:
                # No client writes in this state, so the tree stays correct.
                self._set_state(container, ReplicaState.CLOSING)
            self._database.sync_wal()
            batch = Batch()
            for key, _ in self._database.items(
                OzoneTable.FINALIZE_BLOCKS, container_prefix(container_id)
            ):
                batch.delete(OzoneTable.FINALIZE_BLOCKS, key)
            self._database.write(batch)
            # Before the state, so that no crash leaves a closed container without a
            # tree.
            tree = self.store_tree(container_id, build_from_metadata(container))
            self._set_state(container, state)
            return tree

    def _set_state(self, container: Container, state: ReplicaState) -> None:
        current = self._container(container.container_id).descriptor
        if current.state is not state:
            self._put_descriptor(container.folder, replace(current, state=state))

    def _put_descriptor(self, folder: Path, descriptor: Descriptor) -> Descriptor:
        valid = with_checksum(descriptor)
        self._disk.replace(
            folder / "metadata" / f"{valid.container_id}.container", dump_descriptor(valid)
        )
        return valid

    def _finish_moved(self, container_id: ContainerId) -> bool:
        # A container that was imported again owns its rows. Ozone itself empties the
        # folder of deleted containers.
        with suppress(ContainerNotFoundError):
            self._volume.container_folder(container_id)
            return False
        with self.locked(container_id):
            self._finish_deletion(container_id)
        return True

    def _finish_marked(self, container_id: ContainerId) -> bool:
        # Without a valid descriptor, the container is not known to be deleted.
        with suppress(DescriptorError, ContainerNotFoundError, ContainerUnsupportedError):
            if self._store.open(container_id).state is ReplicaState.DELETED:
                self.delete_container(container_id)
                return True
        return False

    def _finish_deletion(self, container_id: ContainerId) -> None:
        batch = Batch()
        for table in OzoneTable:
            for key, _ in self._database.items(table, container_prefix(container_id)):
                batch.delete(table, key)
        self._database.write(batch)
        self._trees.forget(container_id)
        self._undo.forget(container_id)
        # Last: the next start finds by this folder what is left to be removed.
        self._disk.remove_folder(self._deleted_folder / str(container_id))

    def _make_durable(self, container: Container, record: BlockRecord) -> None:
        if not any(chunk.length_bytes for chunk in record.chunks):
            return
        path = container.block_path(record.block_id)
        end, length = record.chunks[-1].end, self._disk.length(path) or 0
        if end > length:
            raise ChunkGapError(
                f"block {record.block_id} of container {record.container_id} has {length} bytes,"
                f" not {end}",
                container_id=record.container_id,
                block_id=record.block_id,
                offset=length,
            )
        self._disk.sync(path)
        self._disk.sync_folder(container.chunks_folder)

    def _pending_deletes(
        self, container_id: ContainerId
    ) -> tuple[list[DeleteTransaction], list[bytes]]:
        """The received delete transactions by ascending ID, and the rows that cannot be
        parsed.
        """
        transactions, unparsable = [], []
        for _, raw in self._database.items(OzoneTable.DELETE_TXNS, container_prefix(container_id)):
            try:
                transactions.append(delete_transaction_from_bytes(raw))
            except RecordInvalidError:
                unparsable.append(raw)
        return sorted(transactions, key=lambda t: t.tx_id), unparsable

    def _number(self, container_id: ContainerId, counter: Counter) -> int:
        return self._database.get_long(container_id, counter) or 0

    def _put_counter(
        self, batch: Batch, container_id: ContainerId, counter: Counter, value: int
    ) -> None:
        self._put_changed(
            batch, OzoneTable.METADATA, counter_key(container_id, counter), long_bytes(value)
        )

    def _add_counter(
        self, batch: Batch, container_id: ContainerId, counter: Counter, amount: int
    ) -> None:
        # A wrong counter must not become negative: Ozone would accept it.
        self._put_counter(
            batch, container_id, counter, max(self._number(container_id, counter) + amount, 0)
        )

    def _put_changed(self, batch: Batch, table: OzoneTable, key: bytes, value: bytes) -> None:
        if self._database.get(table, key) != value:
            batch.put(table, key, value)


_CLOSABLE = frozenset({ReplicaState.OPEN, ReplicaState.CLOSING, ReplicaState.QUASI_CLOSED})


def require_state(container: Container, states: frozenset[ReplicaState], otherwise: str) -> None:
    """Check the container's state; `otherwise` ends the error's sentence.

    Raises:
        ContainerStateError: it is not one of `states`.
    """
    if container.state not in states:
        raise ContainerStateError(
            f"container {container.container_id} is {container.state.name} and {otherwise}",
            container_id=container.container_id,
            state=container.state.name,
        )


def check_no_gap(container_id: ContainerId, block_id: BlockId, end: int, offset: int) -> None:
    """Check that a write at `offset` continues a file that ends at `end`.

    Raises:
        ChunkGapError: it would leave a gap.
    """
    if offset > end:
        raise ChunkGapError(
            f"block {block_id} of container {container_id} ends at {end}; a write at {offset} would"
            " leave a gap",
            container_id=container_id,
            block_id=block_id,
            offset=offset,
        )
