"""The local side of a repair: what it reads from our replica and writes to it."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dnagent.events import AGENT_EVENTS
from dnagent.scanner import ScanDepth
from dnagent.volumes import RESCAN_BACKOFF, ManagedVolume
from merkle.errors import RecordInvalidError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import ProvenWindows, bad_windows, prove
from ozone.containers import Container
from ozone.errors import (
    ContainerStateError,
    StaleTreeError,
)
from ozone.repair_writer import Patch, RepairWriter
from ozone.scan import lost_chunks
from ozone.treefile import TreeStatus
from repair.requests import OwnLoaded, Scanned, TreeStored
from runtime.errors import DatabaseError, DiskError
from runtime.log import get_logger
from runtime.retry import call_with_retry

_log = get_logger("store", AGENT_EVENTS)


class LocalReplica:
    """Our replica, open for repair (repair.runner.Replica)."""

    def __init__(
        self,
        volume: ManagedVolume,
        writer: RepairWriter,
        container_id: ContainerId,
        job_id: str,
        *,
        cancelled: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> None:
        """Callers use `ReplicaStore.open_replica`."""
        self._volume = volume
        self._writer = writer
        self._container_id = container_id
        self._job_id = job_id
        self._cancelled = cancelled
        self._on_bytes = on_bytes

    def own(self) -> OwnLoaded:
        """State, commit and stored tree, as on disk now."""
        replica = self._volume.replica(self._container_id)
        stored = self._volume.trees.read(self._container_id)
        has_root = stored.status is TreeStatus.PRESENT and stored.tree.data_checksum is not None
        tree = stored.known if has_root else None
        bcs_id, recorded = replica.bcs_id, None
        # Erasure-coded replicas have no commit. An open replica is not repaired.
        if replica.state.is_closed and replica.replica_index == 0:
            bcs_id, recorded = self._commits(replica.state)
        return OwnLoaded(
            tree, stored.generation, replica.state, bcs_id, replica.replica_index, recorded
        )

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        """Our records of these blocks, without missing and invalid ones."""
        container, found = self._container, dict[BlockId, BlockRecord]()
        for block_id in block_ids:
            try:
                record = container.record(block_id)
            except RecordInvalidError:
                # Treated as missing; the scan has reported it.
                continue
            if record is not None:
                found[block_id] = record
        return found

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        """Indexes of the windows that fail the record, and the file's length in bytes;
        without a file, all windows and 0.
        """
        container = self._container
        length = container.block_length(block_id)
        if length is None:
            return tuple(range(len(chunk.checksums))), 0
        try:
            return (
                bad_windows(chunk, container.read(block_id, chunk.offset, chunk.length_bytes)),
                length,
            )
        except DiskError:
            # A bad sector: other windows may still be readable.
            good = [
                index
                for index in range(len(chunk.checksums))
                if self._is_good(container, block_id, chunk, index)
            ]
            return tuple(sorted(set(range(len(chunk.checksums))) - set(good))), length

    def scan(self) -> Scanned:
        """Read all data and store the tree; repeated if another writer stored a tree
        meanwhile.

        Raises:
            StaleTreeError: the tree changed during every try.
            OperationInterruptedError: the repair was cancelled.
        """

        def pause(seconds: float) -> None:
            self._cancelled.wait(seconds)

        return call_with_retry(self._scan_once, sleep=pause, backoff=RESCAN_BACKOFF)

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        """Write proven windows; returns, for each run, the number of overwritten bytes
        that could not be read and have no undo copy.
        """
        self._require_replica()
        patches = [Patch(chunk.offset + chunk.window(run.first)[0], run.data) for run in runs]
        written = self._writer.write_windows(
            self._container_id, block_id, patches, job=self._job_id
        )
        return written.unread_bytes

    def put_block(self, record: BlockRecord) -> None:
        """Store the record of a repaired block."""
        self._require_replica()
        self._writer.put_repaired_block(record, job=self._job_id)

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        """Merge a tree into the stored one.

        Raises:
            StaleTreeError: the stored tree no longer has this generation.
        """
        # The blocks written since are those of this repair.
        return TreeStored(*self._volume.store_tree(tree, generation, blocks_may_change=True))

    def advance_bcs_id(self, bcs_id: int) -> None:
        """Raise the container's commit to `bcs_id`."""
        self._require_replica()
        self._writer.advance_bcs_id(self._container_id, bcs_id)
        self._volume.reload(self._container_id)

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        """Return an UNHEALTHY replica to service.

        Raises:
            ContainerStateError: the replica is not UNHEALTHY.
            StaleTreeError: the tree or a block changed since this generation.
            DiskError: the audit file or the state cannot be written.
        """
        assert state in (ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED)
        with self._writer.locked(self._container_id):
            before = self._container.state
            if before is not ReplicaState.UNHEALTHY:
                text = f"container {self._container_id} is {before.name}, not UNHEALTHY"
                raise ContainerStateError(text, container_id=self._container_id, state=before.name)
            if self._volume.trees.generation(self._container_id) != generation:
                text = f"container {self._container_id} changed since its clean scan"
                raise StaleTreeError(text, container_id=self._container_id)
            self._volume.on_returned(self._container_id, state.value, self._job_id)
            self._writer.set_state(self._container_id, state)
        self._volume.reload(self._container_id)
        _log.info("replica_returned_to_closed", container_id=self._container_id, state=state.name)

    def _scan_once(self) -> Scanned:
        container_id = self._container_id
        completed = self._volume.examine(
            container_id, ScanDepth.DATA, self._on_bytes, self._cancelled.is_set
        )
        result = completed.result
        result.require_decided(container_id)
        stored, generation = self._volume.store_tree(result.tree, completed.generation)
        completed = replace(completed, generation=generation)
        self._volume.record_result(completed, time.time_ns() // 1_000_000)
        state = self._volume.replica(container_id).state
        places = tuple((finding.block_id, finding.offset) for finding in result.findings)
        lost = self._lost_chunks(stored) if places else {}
        return Scanned(stored, generation, places, state, lost)

    def _commits(self, state: ReplicaState) -> tuple[int, int | None]:
        """The container's commit, 0 if its row is lost, and the highest commit in our
        records; None if that is not needed or cannot be read.

        A container without commits has no such row either; its records have commit 0.
        """
        container = self._container
        bcs_id = container.counters().bcs_id
        if bcs_id is not None and state is not ReplicaState.UNHEALTHY:
            return bcs_id, None
        try:
            return bcs_id or 0, container.recorded_bcs_id()
        except (DatabaseError, RecordInvalidError):
            # An unreadable row or an invalid key may hide a higher commit: keep the
            # commit until it is repaired.
            return bcs_id or 0, None

    def _lost_chunks(self, stored: ContainerTree) -> dict[BlockId, list[int]]:
        try:
            return lost_chunks(self._container, stored)
        except (DatabaseError, RecordInvalidError):
            # The scan has reported it: the recorded chunks are unknown.
            return {}

    def _is_good(
        self, container: Container, block_id: BlockId, chunk: ChunkRecord, index: int
    ) -> bool:
        start, length_bytes = chunk.window(index)
        try:
            data = container.read(block_id, chunk.offset + start, length_bytes)
        except DiskError:
            return False
        return bool(prove(chunk, index, data))

    def _require_replica(self) -> None:
        self._volume.replica(self._container_id)

    @property
    def _container(self) -> Container:
        self._require_replica()
        return self._volume.containers.get(self._container_id)
