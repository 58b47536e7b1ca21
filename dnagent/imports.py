"""Import trees that a sweep wrote (chunktable.packed_trees) into the tree files of a
datanode's volumes.

For replicas that have no tree yet, or lost it: a scan makes the same one, hours later.
What a file of trees says is taken for no more than a claim. The replica must still be
the one that the tree was made of, by all that can be read of it without its data:
state, commit, the recorded checksum of every chunk that the tree calls sound. A stored
tree is only replaced by what is proven to be newer, and whatever tombstones are known
here stay.
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
from dnagent.volumes import own_scan_ms
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

# Refusals of which the containers are told one by one; all are counted.
_NAMED_MAX = 1000


class ImportRefusal(Enum):
    """Why a tree is not imported; beside these, the reasons of merkle.check with
    `tree_` before them.
    """

    NO_ROOT = "no_root"
    # The root beside the tree is not the tree's own.
    ROOT_DIFFERS = "root_differs"
    UNKNOWN_VOLUME = "unknown_volume"
    CONTAINER_NOT_HERE = "container_not_here"
    # Of the container here, descriptor or records.
    UNREADABLE = "unreadable"
    NOT_CLOSED = "not_closed"
    STATE_DIFFERS = "state_differs"
    BCS_ID_DIFFERS = "bcs_id_differs"
    REPLICA_INDEX_DIFFERS = "replica_index_differs"
    # A live block has no record here, and is not known as deleted.
    UNKNOWN_BLOCK = "unknown_block"
    # A sound chunk is not as its block's record has it.
    RECORD_DIFFERS = "record_differs"
    # A tombstone of a block that has a record here, and that nobody asked to delete.
    TOMBSTONE_OF_LIVE_BLOCK = "tombstone_of_live_block"
    # There is a stored tree, and the scan that this one is of is not proven to be
    # later.
    STORED_NOT_OLDER = "stored_not_older"
    # Somebody else wrote the stored tree at the same time.
    CHANGED_MEANWHILE = "changed_meanwhile"


@dataclass(frozen=True, slots=True)
class LocalReplicaFacts:
    """What can be said of our replica without reading its data."""

    state: ReplicaState
    bcs_id: int
    replica_index: int
    records: Mapping[BlockId, BlockRecord]
    # Blocks that a delete transaction names.
    pending: Set[BlockId]
    stored: StoredTree
    # When a tree of it was last written, and when its data were last read whole.
    stored_ms: int | None
    scanned_ms: int | None


@dataclass(slots=True)
class ImportResult:
    """What became of all trees of our datanodes."""

    imported: int = 0
    # Stored already, byte for byte.
    unchanged: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    # Container and reason, of the first refusals.
    refusals: list[tuple[int, str]] = field(default_factory=list)
    skipped: list[SkippedVolume] = field(default_factory=list)

    @property
    def trees(self) -> int:
        """All that were looked at."""
        return self.imported + self.unchanged + self.refused.total()

    def refuse(self, container_id: int, reason: str) -> None:
        """Count one more."""
        self.refused[reason] += 1
        if len(self.refusals) < _NAMED_MAX:
            self.refusals.append((container_id, reason))


def import_trees(
    config: AgentConfig,
    folder: Path,
    disk: Disk,
    *,
    on_tree: Callable[[ImportResult], None] = lambda _: None,
) -> ImportResult:
    """Import the trees in a folder that are of the datanodes of these volumes, held as
    the settings say.

    Raises:
        ChunkTableError: the folder has no trees, or a file cannot be read; what came
            before is imported.
        VolumeError: no volume can be opened.
        DiskError: a tree cannot be written.
    """
    files, done = tree_files(folder), ImportResult()
    with ExitStack() as stack:
        audit = AuditLog(config.audit_path)
        stack.callback(audit.close)
        opened, error = dict[tuple[str, str], _ImportTarget](), None
        for settings in config.volumes:
            try:
                volume = open_volume(
                    settings.path,
                    hold=settings.hold,
                    state_folder=config.state_folder,
                    disk=disk,
                    database_volumes=config.database_volumes,
                )
                stack.enter_context(volume)
                # Without it nothing can be checked.
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
                held = opened.get((packed.datanode, packed.volume))
                if held is None:
                    done.refuse(packed.container_id, ImportRefusal.UNKNOWN_VOLUME.value)
                else:
                    held.take(packed, done)
                on_tree(done)
    return done


def refusal_of(
    packed: PackedTree, tree: ContainerTree, here: LocalReplicaFacts
) -> ImportRefusal | None:
    """Why a tree that is sound in itself is not to be imported; None where it is."""
    deleted = {block.block_id for block in here.stored.known.blocks if block.deleted}
    has_tree = (
        here.stored.status is TreeStatus.PRESENT and here.stored.tree.data_checksum is not None
    )
    # As it would be written, with the tombstones that are known here.
    is_stored = encode_tree(merge(tree, here.stored.known)) == here.stored.raw
    checks: Sequence[tuple[ImportRefusal, bool]] = (
        (ImportRefusal.NO_ROOT, tree.data_checksum is None),
        (ImportRefusal.ROOT_DIFFERS, tree.data_checksum != packed.root),
        (ImportRefusal.NOT_CLOSED, not here.state.is_closed),
        (ImportRefusal.STATE_DIFFERS, packed.state != here.state.name),
        (ImportRefusal.BCS_ID_DIFFERS, packed.bcs_id != here.bcs_id),
        (ImportRefusal.REPLICA_INDEX_DIFFERS, packed.replica_index != here.replica_index),
        (
            ImportRefusal.UNKNOWN_BLOCK,
            any(
                not b.deleted and b.block_id not in here.records and b.block_id not in deleted
                for b in tree.blocks
            ),
        ),
        (ImportRefusal.RECORD_DIFFERS, not _are_as_recorded(tree, here.records)),
        (
            ImportRefusal.TOMBSTONE_OF_LIVE_BLOCK,
            any(
                b.deleted
                and b.block_id in here.records
                and b.block_id not in deleted | here.pending
                for b in tree.blocks
            ),
        ),
        (
            ImportRefusal.STORED_NOT_OLDER,
            has_tree and not is_stored and not _is_newer(packed, here),
        ),
    )
    return next((refusal for refusal, holds in checks if holds), None)


class _ImportTarget:
    """One open volume that trees are imported into."""

    def __init__(self, volume: Volume, disk: Disk, trees: TreeFiles, *, undo_bytes: int) -> None:
        self._volume = volume
        self._disk = disk
        self._trees = trees
        self._containers = ContainerStore(volume, disk)
        # An owner's database has the root too.
        self._store = trees.update
        if volume.hold is Hold.OWNER:
            undo = UndoStore(volume.state_folder / "undo", disk, budget_bytes=undo_bytes)
            self._store = ContainerWriter(volume, trees, undo, disk).store_tree

    def take(self, packed: PackedTree, done: ImportResult) -> None:
        """Import one tree, or note why not.

        Raises:
            DiskError: it cannot be written.
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
            here = self._here(container)
        except ReconcileError as error:
            missing = error.code == "container_not_found"
            refusal = ImportRefusal.CONTAINER_NOT_HERE if missing else ImportRefusal.UNREADABLE
            done.refuse(container_id, refusal.value)
            return
        refused = refusal_of(packed, tree, here)
        if refused is not None:
            done.refuse(container_id, refused.value)
            return
        try:
            stored = self._store(container_id, tree, expected_generation=here.stored.generation)
        except StaleTreeError:
            done.refuse(container_id, ImportRefusal.CHANGED_MEANWHILE.value)
        except TreeRefusedError as error:
            # With the tombstones that are known here it is too large.
            done.refuse(container_id, f"tree_{error.reason}")
        else:
            if encode_tree(stored) == here.stored.raw:
                done.unchanged += 1
            else:
                done.imported += 1

    def _here(self, container: Container) -> LocalReplicaFacts:
        container_id = container.container_id
        # First, so that whatever is written while the rest is read is noticed.
        stored = self._trees.read(container_id)
        times = [
            self._disk.modified_ns(path)
            for path in {self._trees.path(container_id), container.tree_path}
        ]
        written = [time for time in times if time is not None]
        # Under a read-only hold a scan of ours leaves no time in the descriptor.
        is_ours = self._volume.hold is Hold.READ_ONLY
        own_ms = own_scan_ms(self._volume, self._disk, container_id) if is_ours else None
        return LocalReplicaFacts(
            container.state,
            container.counters().bcs_id or 0,
            container.replica_index,
            {record.block_id: record for record in container.records()},
            {block.block_id for block in pending_tombstones(self._volume.database, container_id)},
            stored,
            max(written) // 1_000_000 if written else None,
            own_ms or container.descriptor.data_scan_timestamp_ms,
        )


def _are_as_recorded(tree: ContainerTree, records: Mapping[BlockId, BlockRecord]) -> bool:
    """Whether each chunk that matches its record, as the tree says, does."""
    for block in tree.blocks:
        record = records.get(block.block_id)
        if record is None:
            continue
        for chunk in block.chunks:
            if chunk.checksum_matches:
                recorded = record.by_offset.get(chunk.offset)
                said = chunk.length_bytes, chunk.data_checksum
                if recorded is None or (recorded.length_bytes, recorded.data_checksum) != said:
                    return False
    return True


def _is_newer(packed: PackedTree, here: LocalReplicaFacts) -> bool:
    """Whether it is of the last scan that we know of, and nothing was written to the
    stored tree since.
    """
    known = packed.scanned_at_ms is not None and packed.scanned_at_ms == here.scanned_ms
    return known and here.stored_ms is not None and here.stored_ms < (packed.scanned_at_ms or 0)
