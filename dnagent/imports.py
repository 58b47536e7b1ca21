"""Import trees that a sweep wrote (chunktable.packed_trees) into the tree files of a
datanode's volumes.

The import serves replicas without a tree: it saves the hours that a scan would take to
build the same tree. A tree from a file is only a claim. It must fit everything that can
be read of the replica without its data: state, commit, and the recorded checksum of
every chunk that the tree calls healthy. A stored tree is replaced only if the imported
one is proven newer, and known tombstones stay.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from chunktable.manifest import SkippedVolume
from chunktable.packed_trees import PackedTree, read_trees, tree_files
from dnagent.config import AgentConfig
from dnagent.volumes import agent_scan_ms
from merkle.check import check_tree
from merkle.columns import encode_tree
from merkle.errors import ReconcileError, TreeRefusedError
from merkle.merge import merge
from merkle.record import BlockRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.containers import Container, ContainerStore
from ozone.errors import StaleTreeError
from ozone.treefile import StoredTree, TreeFiles, TreeStatus, pending_tombstones
from ozone.undo import UndoStore
from ozone.volume import Hold, Volume, open_volume
from ozone.writer import ContainerWriter
from protos.convert import tree_from_bytes
from repair.audit import AuditLog
from runtime.disk import Disk
from runtime.folder_lock import FolderLock

# Refusals listed with their container; all are counted.
_REFUSALS_LISTED_MAX = 1000


class _ImportRefusal(Enum):
    """Why a tree is not imported.

    A tree that merkle.check refuses has that reason, with the prefix `tree_`.
    """

    NO_ROOT = "no_root"
    # The root stored beside the tree differs from the tree's own.
    ROOT_DIFFERS = "root_differs"
    UNKNOWN_VOLUME = "unknown_volume"
    CONTAINER_NOT_HERE = "container_not_here"
    # The descriptor or the records of our container cannot be read.
    UNREADABLE = "unreadable"
    NOT_CLOSED = "not_closed"
    STATE_DIFFERS = "state_differs"
    BCS_ID_DIFFERS = "bcs_id_differs"
    REPLICA_INDEX_DIFFERS = "replica_index_differs"
    # A live block has neither a record nor a tombstone here.
    UNKNOWN_BLOCK = "unknown_block"
    # A chunk that the tree calls healthy differs from our record.
    RECORD_DIFFERS = "record_differs"
    # A tombstone of a block that has a record here and no pending delete.
    TOMBSTONE_OF_LIVE_BLOCK = "tombstone_of_live_block"
    # A tree is stored, and the imported one is not proven to be of a later scan.
    STORED_NOT_OLDER = "stored_not_older"
    # Another writer changed the stored tree during the import.
    CHANGED_MEANWHILE = "changed_meanwhile"


@dataclass(frozen=True, slots=True)
class _ReplicaFacts:
    """What is known of our replica without reading its data."""

    state: ReplicaState
    bcs_id: int
    replica_index: int
    records: Mapping[BlockId, BlockRecord]
    # Blocks listed in a pending delete transaction.
    pending: Set[BlockId]
    stored: StoredTree
    # When its tree was last written, and when its data were last scanned, in ms since
    # the epoch; None if never.
    stored_ms: int | None
    scanned_ms: int | None


@dataclass(slots=True)
class ImportResult:
    """The outcome for all trees of our datanodes."""

    imported: int = 0
    # Already stored, byte for byte.
    unchanged: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    # Container and reason of the first refusals.
    refusals: list[tuple[int, str]] = field(default_factory=list)
    skipped: list[SkippedVolume] = field(default_factory=list)

    @property
    def trees(self) -> int:
        """The number of trees read from the files."""
        return self.imported + self.unchanged + self.refused.total()

    def refuse(self, container_id: int, reason: str) -> None:
        """Count a refused tree, and list it while there is room."""
        self.refused[reason] += 1
        if len(self.refusals) < _REFUSALS_LISTED_MAX:
            self.refusals.append((container_id, reason))


def import_trees(
    config: AgentConfig,
    folder: Path,
    disk: Disk,
    *,
    on_tree: Callable[[ImportResult], None] = lambda _: None,
) -> ImportResult:
    """Import the trees in a folder that belong to the configured volumes.

    Each volume is opened with the hold of the agent. `on_tree` is called after every
    tree.

    Raises:
        ChunkTableError: the folder has no trees, or a file cannot be read; trees read
            before it are imported.
        BusyError: an agent or another import uses the state folder.
        VolumeError: no volume can be opened.
        DiskError: a tree cannot be written.
    """
    files, done = tree_files(folder), ImportResult()
    with ExitStack() as stack:
        disk.make_folder(config.state_folder.absolute())
        lock = FolderLock(config.state_folder.absolute(), "treefold agent import-trees")
        stack.callback(lock.release)
        audit = AuditLog(config.audit_path)
        stack.callback(audit.close)
        opened, error = dict[tuple[str, str], _ImportTarget](), None
        for settings in config.volumes:
            try:
                volume = open_volume(
                    settings.path,
                    hold=config.hold_of(settings),
                    state_folder=config.state_folder,
                    disk=disk,
                    database_volumes=config.database_volumes,
                )
                stack.enter_context(volume)
                # Every check needs the database, so open it now.
                _ = volume.database
            except ReconcileError as problem:
                error = error or problem
                done.skipped.append(
                    SkippedVolume(str(settings.path), problem.code, problem.message)
                )
                continue
            trees = TreeFiles(volume, disk, on_deleted=audit.delete)
            opened[volume.datanode_id, volume.storage_id] = _ImportTarget(
                volume, disk, trees, undo_bytes=config.repair.undo_bytes
            )
        if not opened:
            assert error is not None
            raise error
        datanodes = {datanode for datanode, _ in opened}
        for path in files:
            for packed in read_trees(path, datanodes):
                target = opened.get((packed.datanode, packed.volume))
                if target is None:
                    done.refuse(packed.container_id, _ImportRefusal.UNKNOWN_VOLUME.value)
                else:
                    target.import_tree(packed, done)
                on_tree(done)
    return done


class _ImportTarget:
    """An open volume, as the target of imported trees."""

    def __init__(self, volume: Volume, disk: Disk, trees: TreeFiles, *, undo_bytes: int) -> None:
        self._volume = volume
        self._disk = disk
        self._trees = trees
        self._containers = ContainerStore(volume, disk)
        # An owner also stores the root in its database.
        self._store = trees.update
        if volume.hold is Hold.OWNER:
            undo = UndoStore(volume.state_folder / "undo", disk, budget_bytes=undo_bytes)
            self._store = ContainerWriter(volume, trees, undo, disk).store_tree

    def import_tree(self, packed: PackedTree, done: ImportResult) -> None:
        """Import one tree, or record in `done` why it is refused.

        Raises:
            DiskError: the tree cannot be written.
        """
        container_id = ContainerId(packed.container_id)
        try:
            tree = tree_from_bytes(packed.tree, container_id)
            check_tree(tree)
        except TreeRefusedError as error:
            done.refuse(container_id, f"tree_{error.reason}")
            return
        try:
            container = self._containers.open(container_id)
            ours = self._read_facts(container)
        except ReconcileError as error:
            missing = error.code == "container_not_found"
            refusal = _ImportRefusal.CONTAINER_NOT_HERE if missing else _ImportRefusal.UNREADABLE
            done.refuse(container_id, refusal.value)
            return
        refused = _refusal_of(packed, tree, ours)
        if refused is not None:
            done.refuse(container_id, refused.value)
            return
        try:
            stored = self._store(container_id, tree, expected_generation=ours.stored.generation)
        except StaleTreeError:
            done.refuse(container_id, _ImportRefusal.CHANGED_MEANWHILE.value)
        except TreeRefusedError as error:
            # Merged with the known tombstones it may exceed the size limit.
            done.refuse(container_id, f"tree_{error.reason}")
        else:
            if encode_tree(stored) == ours.stored.raw:
                done.unchanged += 1
            else:
                done.imported += 1

    def _read_facts(self, container: Container) -> _ReplicaFacts:
        container_id = container.container_id
        # Read first, so that a write during the other reads is noticed.
        stored = self._trees.read(container_id)
        times = [
            self._disk.modified_ns(path)
            for path in {self._trees.path(container_id), container.tree_path}
        ]
        written = [time for time in times if time is not None]
        # Under a read-only hold our scans do not write their time to the descriptor.
        is_read_only = self._volume.hold is Hold.READ_ONLY
        agent_ms = agent_scan_ms(self._volume, self._disk, container_id) if is_read_only else None
        return _ReplicaFacts(
            container.state,
            container.counters().bcs_id or 0,
            container.replica_index,
            {record.block_id: record for record in container.records()},
            {block.block_id for block in pending_tombstones(self._volume.database, container_id)},
            stored,
            max(written) // 1_000_000 if written else None,
            agent_ms or container.descriptor.data_scan_timestamp_ms,
        )


def _refusal_of(
    packed: PackedTree, tree: ContainerTree, ours: _ReplicaFacts
) -> _ImportRefusal | None:
    """Why a valid tree may not be imported; None if it may."""
    deleted = {block.block_id for block in ours.stored.known.blocks if block.deleted}
    has_tree = (
        ours.stored.status is TreeStatus.PRESENT and ours.stored.tree.data_checksum is not None
    )
    # Compared as it would be written: with the tombstones known here.
    is_stored = encode_tree(merge(tree, ours.stored.known)) == ours.stored.raw
    checks: Sequence[tuple[_ImportRefusal, bool]] = (
        (_ImportRefusal.NO_ROOT, tree.data_checksum is None),
        (_ImportRefusal.ROOT_DIFFERS, tree.data_checksum != packed.root),
        (_ImportRefusal.NOT_CLOSED, not ours.state.is_closed),
        (_ImportRefusal.STATE_DIFFERS, packed.state != ours.state.name),
        (_ImportRefusal.BCS_ID_DIFFERS, packed.bcs_id != ours.bcs_id),
        (_ImportRefusal.REPLICA_INDEX_DIFFERS, packed.replica_index != ours.replica_index),
        (
            _ImportRefusal.UNKNOWN_BLOCK,
            any(
                not b.deleted and b.block_id not in ours.records and b.block_id not in deleted
                for b in tree.blocks
            ),
        ),
        (_ImportRefusal.RECORD_DIFFERS, not _match_records(tree, ours.records)),
        (
            _ImportRefusal.TOMBSTONE_OF_LIVE_BLOCK,
            any(
                b.deleted
                and b.block_id in ours.records
                and b.block_id not in deleted | ours.pending
                for b in tree.blocks
            ),
        ),
        (
            _ImportRefusal.STORED_NOT_OLDER,
            has_tree and not is_stored and not _is_newer(packed, ours),
        ),
    )
    return next((refusal for refusal, holds in checks if holds), None)


def _match_records(tree: ContainerTree, records: Mapping[BlockId, BlockRecord]) -> bool:
    """Whether the chunks that the tree calls healthy agree with our records."""
    for block in tree.blocks:
        record = records.get(block.block_id)
        if record is None:
            continue
        for chunk in block.chunks:
            if chunk.checksum_matches:
                recorded = record.by_offset.get(chunk.offset)
                claimed = chunk.length_bytes, chunk.data_checksum
                if recorded is None or (recorded.length_bytes, recorded.data_checksum) != claimed:
                    return False
    return True


def _is_newer(packed: PackedTree, ours: _ReplicaFacts) -> bool:
    """Whether the tree is of our last known scan, and the stored tree is older."""
    is_last_scan = packed.scanned_at_ms is not None and packed.scanned_at_ms == ours.scanned_ms
    return (
        is_last_scan and ours.stored_ms is not None and ours.stored_ms < (packed.scanned_at_ms or 0)
    )
