"""The life of a container, as a datanode changes it: create, write, close, delete.

Bytes are made durable before a record names them, records before the tree speaks of
them, and the tree before a close is acknowledged. A deletion goes the other way round:
tombstone, then bytes, then record, so that at no moment a block is gone without a
tombstone. Whatever a crash leaves behind, the same call repeated ends in the same
state.

A container's changes exclude each other by its lock, which is re-entrant: whoever must
do several hold it around them. Nothing here serves client writes; builders, tests and
repairs use it.
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
from ozone.containers import INCREMENTAL, Container, ContainerStore
from ozone.descriptor import Descriptor, dump_descriptor, with_checksum
from ozone.errors import (
    ChunkGapError,
    ContainerNotFoundError,
    ContainerStateError,
    ContainerUnsupportedError,
    DescriptorError,
    ReadOnlyError,
)
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
# The metadata key of a chunk that an incremental writer has filled.
_FULL = "full"
# While closing, a follower still gets what its leader accepted before; a recovering
# replica is being filled.
_WRITABLE = frozenset({ReplicaState.OPEN, ReplicaState.CLOSING, ReplicaState.RECOVERING})
# As in Ozone, an unhealthy replica deletes no blocks: what it has may be the last good
# copy.
_DELETING = frozenset({ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED})


class ContainerWriter:
    """Writes to the containers of one volume that is held as owner. Thread-safe.

    Every method may raise ContainerNotFoundError, DescriptorError,
    ContainerUnsupportedError, ContainerStateError, DatabaseError and DiskError. After a
    failed sync (fact `suspect`) the volume is marked suspect and every further change
    is refused.
    """

    def __init__(self, volume: Volume, trees: TreeFiles, undo: UndoStore, disk: Disk) -> None:
        """Without a hold as owner: ReadOnlyError."""
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
        """Keep every other change away from one container."""
        with self._locks_guard:
            lock = self._locks.setdefault(container_id, threading.RLock())
        with lock:
            if self._volume.suspect is not None:
                raise DiskError(
                    f"the volume {self._volume.root} is suspect: {self._volume.suspect}",
                    hint=(
                        "Check the device; restart the agent when the volume can be trusted again."
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
        """An empty container; a failed creation leaves nothing. ContainerStateError if
        it is there already.
        """
        with self.locked(container_id):
            folder = self._volume.usual_folder(container_id)
            # Not the folder: a creation that was cut short left one behind.
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
        """CLOSED, with its tree and its root in the database; returns the tree."""
        return self._close(container_id, ReplicaState.CLOSED)

    def quasi_close(self, container_id: ContainerId) -> ContainerTree:
        """QUASI_CLOSED: closed without knowing whether all other replicas have the same
        commit.
        """
        return self._close(container_id, ReplicaState.QUASI_CLOSED)

    def mark_unhealthy(self, container_id: ContainerId) -> None:
        """UNHEALTHY, for good as far as Ozone is concerned; a replica that never had a
        tree gets one.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            if container.state is ReplicaState.UNHEALTHY:
                return
            self._set_state(container, ReplicaState.UNHEALTHY)
            # The state came first: a replica whose records cannot be read, or are
            # beyond our limits, waits for no tree.
            with suppress(DatabaseError, RecordInvalidError, TreeRefusedError):
                if container.counters().data_checksum is None:
                    self.store_tree(container_id, build_from_metadata(container))

    def set_state(self, container_id: ContainerId, state: ReplicaState) -> None:
        """Write another state into the descriptor and nothing else."""
        with self.locked(container_id):
            self._set_state(self._container(container_id), state)

    def set_scan_timestamp(self, container_id: ContainerId, timestamp_ms: int) -> None:
        """Note when the container's data were last read completely."""
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
    ) -> ContainerTree:
        """Merge a tree into the stored one (see `TreeFiles.update`), and let the
        database have its root.
        """
        with self.locked(container_id):
            tree = self._trees.update(container_id, fresh, expected_generation=expected_generation)
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
        """Delete a container in whatever state; what a crash leaves of it,
        `finish_deletions` removes.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            if container.state is not ReplicaState.DELETED:
                self._set_state(container, ReplicaState.DELETED)
            gone = self._gone_folder / str(container_id)
            self._disk.make_folder(self._gone_folder)
            # Left by a deletion of the same container that was cut short.
            self._disk.remove_folder(gone)
            self._disk.rename(container.folder, gone)
            self._disk.sync_folder(container.folder.parent)
            self._disk.sync_folder(self._gone_folder)
            self._finish_deletion(container_id)

    def finish_deletions(
        self,
        container_ids: Iterable[ContainerId],
        on_failure: Callable[[ContainerId, ReconcileError], None],
    ) -> list[ContainerId]:
        """At start: delete those of these containers that are marked as deleted, and
        what lies moved aside.

        `on_failure` hears of what could not be done, which the next start tries again.
        """
        finished: list[ContainerId] = []

        def attempt(container_id: ContainerId, finish: Callable[[ContainerId], bool]) -> None:
            try:
                if finish(container_id):
                    finished.append(container_id)
            except ReconcileError as error:
                on_failure(container_id, error)

        for name in self._disk.names(self._gone_folder) if self._gone_folder.is_dir() else ():
            moved = container_id_of(name)
            if moved is not None:
                attempt(moved, self._finish_moved)
        for container_id in container_ids:
            attempt(container_id, self._finish_marked)
        return finished

    def write_chunk(
        self, container_id: ContainerId, block_id: BlockId, offset: int, data: Buffer
    ) -> None:
        """Bytes of a block, inside its file or right at its end; durable once
        `put_block` names them.

        Raises:
            ContainerStateError: the container takes no writes any more.
            ChunkGapError: the file ends before `offset`.
        """
        with self.locked(container_id):
            container = self._writable(container_id)
            path = container.block_path(block_id)
            check_no_gap(container_id, block_id, self._disk.length(path) or 0, offset)
            self._disk.write_at(path, offset, data)

    def put_block(self, record: BlockRecord, *, end_of_block: bool = True) -> bool:
        """Commit a block: all of its chunks, or with the mark `incremental` those that
        are new.

        Returns False where the commit was applied before: its ID is not 0 and not above
        the container's.

        Raises:
            ContainerStateError: the container takes no writes any more.
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
            if _is_incremental(record):
                after = _put_incremental(
                    batch, container, record, stored, end_of_block=end_of_block
                )
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
            self._database.write(batch)
            return True

    def receive_delete(self, transaction: DeleteTransaction) -> bool:
        """Record the cluster's order to delete blocks; False where it was received
        before. Nothing is deleted yet.
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
        """Carry out the delete transactions that were received; returns the blocks that
        had a record.

        Raises:
            ContainerStateError: the container is neither CLOSED nor QUASI_CLOSED.
            RecordInvalidError: a record cannot be read, so that its tombstone would
                have no checksum.
        """
        with self.locked(container_id):
            container = self._container(container_id)
            require_state(container, _DELETING, "deletes no blocks")
            transactions = self._transactions(container_id)
            if not transactions:
                return []
            block_ids = sorted({block_id for t in transactions for block_id in t.block_ids})
            records = [r for r in map(container.stored_record, block_ids) if r is not None]
            freed = sum(r.length_bytes for r in map(container.record, block_ids) if r is not None)
            if records:
                self._trees.add_tombstones(container_id, records)
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
            self._database.write(batch)
            return [record.block_id for record in records]

    @property
    def _database(self) -> Database:
        return self._volume.database

    @property
    def _gone_folder(self) -> Path:
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
                    # It may be that of a scan, which knows more than the records.
                    self._set_state(container, state)
                    return stored.tree
            if container.state is ReplicaState.OPEN:
                # From here on no client writes, so that the tree stays true.
                self._set_state(container, ReplicaState.CLOSING)
            self._database.sync_wal()
            batch = Batch()
            for key, _ in self._database.items(
                OzoneTable.FINALIZE_BLOCKS, container_prefix(container_id)
            ):
                batch.delete(OzoneTable.FINALIZE_BLOCKS, key)
            self._database.write(batch)
            # Before the state, so that there is no closed container without a tree,
            # also after a crash between.
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
        # A container that came back has rows of its own; Ozone empties this folder by
        # itself.
        with suppress(ContainerNotFoundError):
            self._volume.container_folder(container_id)
            return False
        with self.locked(container_id):
            self._finish_deletion(container_id)
        return True

    def _finish_marked(self, container_id: ContainerId) -> bool:
        # Without a readable descriptor nothing says that it is to go.
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
        self._disk.remove_folder(self._gone_folder / str(container_id))
        self._trees.forget(container_id)
        self._undo.forget(container_id)

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

    def _transactions(self, container_id: ContainerId) -> list[DeleteTransaction]:
        rows = self._database.items(OzoneTable.DELETE_TXNS, container_prefix(container_id))
        return sorted(
            (delete_transaction_from_bytes(raw) for _, raw in rows), key=lambda t: t.tx_id
        )

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
        # A counter that was wrong before must not become negative: Ozone would take it
        # as it is.
        self._put_counter(
            batch, container_id, counter, max(self._number(container_id, counter) + amount, 0)
        )

    def _put_changed(self, batch: Batch, table: OzoneTable, key: bytes, value: bytes) -> None:
        if self._database.get(table, key) != value:
            batch.put(table, key, value)


_CLOSABLE = frozenset({ReplicaState.OPEN, ReplicaState.CLOSING, ReplicaState.QUASI_CLOSED})


def require_state(container: Container, states: frozenset[ReplicaState], otherwise: str) -> None:
    if container.state not in states:
        raise ContainerStateError(
            f"container {container.container_id} is {container.state.name} and {otherwise}",
            container_id=container.container_id,
            state=container.state.name,
        )


def check_no_gap(container_id: ContainerId, block_id: BlockId, end: int, offset: int) -> None:
    if offset > end:
        raise ChunkGapError(
            f"block {block_id} of container {container_id} ends at {end}; a write at {offset} would"
            " leave a gap",
            container_id=container_id,
            block_id=block_id,
            offset=offset,
        )


def _is_incremental(record: BlockRecord) -> bool:
    return any(key == INCREMENTAL for key, _ in record.metadata)


def _put_incremental(
    batch: Batch,
    container: Container,
    record: BlockRecord,
    stored: BlockRecord | None,
    *,
    end_of_block: bool,
) -> int:
    """The rows of an incremental commit, and the block's length after it."""
    key = block_key(record.container_id, record.block_id)
    settled = stored.chunks if stored else ()
    last_is_full = bool(record.chunks) and any(
        name == _FULL for name, _ in record.chunks[-1].metadata
    )
    if end_of_block or not record.chunks or last_is_full:
        pending = container.record(record.block_id) if not record.chunks else None
        chunks = pending.chunks if pending else settled + record.chunks
        whole = replace(stored or record, bcs_id=record.bcs_id, chunks=chunks)
        batch.put(OzoneTable.BLOCK_DATA, key, record_to_bytes(whole))
        batch.delete(OzoneTable.LAST_CHUNK_INFO, key)
        return whole.length_bytes
    # The last chunk is rewritten by every commit until it is full: kept apart, the long
    # list need not be.
    last = record.chunks[-1:]
    if stored is None or len(record.chunks) > 1:
        whole = replace(stored or record, bcs_id=record.bcs_id, chunks=settled + record.chunks[:-1])
        batch.put(OzoneTable.BLOCK_DATA, key, record_to_bytes(whole))
        settled = whole.chunks
    batch.put(OzoneTable.LAST_CHUNK_INFO, key, record_to_bytes(replace(record, chunks=last)))
    return sum(chunk.length_bytes for chunk in settled + last)
