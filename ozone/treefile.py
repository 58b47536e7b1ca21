"""The tree file of a container, `<container ID>.tree`: read, merge, replace durably.

A tree can be rebuilt from the data, except for its tombstones. If they were lost, a
peer that still has a deleted block would bring it back. So the state folder keeps two
copies of them: the previous version of each tree, and a file of tombstones alone. The
latter is written before the tree that has them, or when a tree of a datanode is first
read. Each read restores the tombstones that a tree file lacks, because it is
unreadable, lost, or an older version.

An unreadable tree file is kept in quarantine. A tree beyond our limits (merkle.limits)
counts as unreadable except for its tombstones. It is replaced as soon as the replica's
tree is within the limits.

Under a read-only hold our trees are in the state folder only. Of our tree and the
volume's, the one written last counts: ours after a scan, the volume's after its
datanode scanned or repaired the container.

A generation names one state of a container's tree and blocks, and never returns. The
bytes of a tree may: damage, a repair, and the tree is what it was. So each generation
counts the changes: every tree written, and every change of blocks that a writer
reports to `blocks_changed`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from merkle.check import TreeRefusal
from merkle.checksum import fingerprint
from merkle.columns import encode_tree
from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.limits import BLOCK_CHUNKS_MAX, MESSAGE_BYTES_MAX, TREE_BLOCKS_MAX
from merkle.merge import merge
from merkle.record import BlockRecord
from merkle.tree import (
    BlockId,
    BlockTree,
    ContainerId,
    ContainerTree,
    TreeBuilder,
    block_checksum,
    container_checksum,
)
from ozone.errors import StaleTreeError
from ozone.rocks import Database, OzoneTable, block_key, container_prefix
from ozone.volume import Hold, Volume
from protos.convert import (
    delete_transaction_from_bytes,
    record_from_bytes,
    tombstones_from_bytes,
    tree_from_bytes,
)
from runtime.disk import Disk
from runtime.errors import DatabaseError, DiskError

# The counter of changes of blocks, at the end of a generation.
_COUNTER_BYTES = 8
# Bounds the number of locks; writers of different containers seldom share one.
_LOCK_STRIPES = 127
_BEYOND_LIMITS = {
    refusal.value
    for refusal in (TreeRefusal.TOO_LARGE, TreeRefusal.TOO_MANY_BLOCKS, TreeRefusal.TOO_MANY_CHUNKS)
}


class TreeStatus(Enum):
    """Whether a tree file is usable."""

    PRESENT = "present"
    ABSENT = "absent"
    # Empty, not parsable, with wrong checksums, or beyond our limits.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class StoredTree:
    """The content of a tree file.

    `raw` is its bytes, b"" if absent. `generation` was read before them, so a change
    during the read makes it an old one. Unless the status is PRESENT, `tree` has no
    root and no blocks, except the tombstones of a file beyond our limits. `recovered`
    are the tombstones, by ascending block ID, that the tree lacks but the state folder
    or a pending deletion has.

    Unless the status is PRESENT, peers may have tombstones that are lost here: compare
    with them before a block counts as missing.
    """

    status: TreeStatus
    raw: bytes
    tree: ContainerTree
    generation: bytes
    recovered: tuple[BlockTree, ...] = ()
    # Why it is unreadable (a TreeRefusal's value, or "empty").
    reason: str = ""
    # The tombstones in the state folder's file of tombstones.
    kept: Mapping[BlockId, BlockTree] = field(default_factory=dict, compare=False, repr=False)

    @property
    def fingerprint(self) -> bytes:
        """The fingerprint of the file's bytes; b"" if there are none."""
        return fingerprint(self.raw) if self.raw else b""

    @property
    def known(self) -> ContainerTree:
        """The tree with the recovered tombstones; it has a root if `tree` has one."""
        if not self.recovered:
            return self.tree
        blocks = {block.block_id: block for block in (*self.tree.blocks, *self.recovered)}
        whole = ContainerTree.of(self.tree.container_id, blocks.values())
        has_root = self.tree.data_checksum is not None
        return whole if has_root else ContainerTree(whole.container_id, None, whole.blocks)


@dataclass(slots=True)
class _TreeFileStats:
    """Counts and times, in seconds, since the start."""

    reads: int = 0
    writes: int = 0
    unchanged: int = 0
    failures: int = 0
    quarantined: int = 0
    tombstones_recovered: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


class TreeFiles:
    """The tree files of one volume. Thread-safe."""

    def __init__(
        self,
        volume: Volume,
        disk: Disk,
        *,
        on_deleted: Callable[[ContainerId, Sequence[BlockId]], None] | None = None,
        blocks_max: int = TREE_BLOCKS_MAX,
    ) -> None:
        """`on_deleted` is called with blocks that become tombstones, before their tree
        is written. A tree of more than `blocks_max` blocks is not written.
        """
        assert blocks_max <= TREE_BLOCKS_MAX
        self.stats = _TreeFileStats()
        self._on_deleted = on_deleted
        self._blocks_max = blocks_max
        self._volume = volume
        self._disk = disk
        self._locks = [threading.Lock() for _ in range(_LOCK_STRIPES)]
        # The number of trees written, and of changes of blocks. Never reset, not even
        # after a deletion: the container may be imported again.
        self._changes: dict[ContainerId, tuple[int, int]] = {}
        self._changes_lock = threading.Lock()
        # A tree beyond our limits may stay for long; parsing its millions of blocks
        # takes seconds each time.
        self._last_beyond: tuple[ContainerId | None, bytes, tuple[BlockTree, ...]] = None, b"", ()
        # A repair looks up many blocks of one container in a row.
        self._last_deleted: tuple[ContainerId | None, bytes, frozenset[BlockId]] = (
            None,
            b"",
            frozenset(),
        )

    def path(self, container_id: ContainerId) -> Path:
        """The path that the tree is written to.

        Raises:
            ContainerNotFoundError: the volume does not have the container.
        """
        if self._volume.hold is Hold.READ_ONLY:
            return self._state("trees", container_id)
        return self._volume_path(container_id)

    def read(self, container_id: ContainerId) -> StoredTree:
        """The stored tree and the tombstones that it lacks; a reader takes no lock.

        Raises:
            ContainerNotFoundError: the volume does not have the container.
            DiskError: the disk cannot be read, which proves nothing about the tree.
        """
        started = time.perf_counter()
        changes = self._changes_of(container_id)
        raw, other = self._versions(container_id)
        tree, status, reason = self._parse_usable(raw, container_id)
        previous, alone = (
            self._raw(self._state(kind, container_id)) for kind in ("previous", "tombstones")
        )
        remembered: dict[BlockId, BlockTree] = {}
        if status is not TreeStatus.PRESENT and (raw is not None or previous or alone):
            # The file existed. It may have had tombstones of unfinished deletions.
            remembered = {t.block_id: t for t in self._pending(container_id)}
        kept = self._tombstones_in(alone, container_id)
        # The newest copy last. The other version of a read-only volume has what its
        # datanode deleted since.
        remembered |= (
            self._tombstones_in(other, container_id)
            | self._tombstones_in(previous, container_id)
            | kept
        )
        present = {block.block_id for block in tree.blocks if block.deleted}
        self.stats.reads += 1
        self.stats.read_s += time.perf_counter() - started
        return StoredTree(
            status,
            raw or b"",
            tree,
            self._generation(container_id, changes, raw),
            tuple(remembered[block_id] for block_id in sorted(remembered.keys() - present)),
            reason,
            kept,
        )

    def remember(self, stored: StoredTree) -> None:
        """Copy the tombstones of a stored tree to the state folder, in case another
        program loses the tree file; does nothing if they are there.

        Raises:
            ContainerNotFoundError: as in `read`.
            DiskError: the copy cannot be written.
        """
        if _are_kept(stored.tree, stored.kept):
            return
        with self._lock(stored.tree.container_id):
            # Read again: a copy made meanwhile may have more tombstones.
            now = self.read(stored.tree.container_id)
            if not _are_kept(now.tree, now.kept):
                self._keep_tombstones(now.known)

    def raw(self, container_id: ContainerId) -> bytes | None:
        """The bytes of the tree file that counts, unchecked; None if there is none.

        Raises:
            ContainerNotFoundError, DiskError: as `read` does.
        """
        return self._versions(container_id)[0]

    def generation(self, container_id: ContainerId) -> bytes:
        """The generation of the stored tree, as in `StoredTree`; b"" if the file cannot
        be read, since no update of it succeeds.

        Raises:
            ContainerNotFoundError: the volume does not have the container.
        """
        changes = self._changes_of(container_id)
        try:
            return self._generation(container_id, changes, self.raw(container_id))
        except DiskError:
            return b""

    def blocks_changed(self, container_id: ContainerId) -> None:
        """Note that blocks or records were changed: a scan that began earlier may have
        read what is no longer there. Called after the change.
        """
        self._count(container_id, trees=0, blocks=1)

    def deleted_blocks(self, container_id: ContainerId) -> frozenset[BlockId]:
        """The blocks with a tombstone. The tree is parsed again only if its bytes
        changed.

        Raises:
            ContainerNotFoundError, DiskError: as in `read`.
        """
        generation = fingerprint(self.raw(container_id) or b"")
        last_id, last_generation, deleted = self._last_deleted
        if (last_id, last_generation) != (container_id, generation):
            deleted = frozenset(
                block.block_id for block in self.read(container_id).known.blocks if block.deleted
            )
            self._last_deleted = container_id, generation, deleted
        return deleted

    def update(
        self,
        container_id: ContainerId,
        fresh: ContainerTree,
        *,
        expected_generation: bytes | None = None,
        blocks_may_change: bool = False,
    ) -> ContainerTree:
        """Merge a fresh tree with the stored one, write the result and return it.

        Nothing is written if the stored tree is equal to the result. A caller that read
        the stored tree earlier passes its generation as `expected_generation`: the tree
        is not overwritten if the tree or a block changed since. With
        `blocks_may_change` only the tree counts: a repair changes the blocks itself.

        Raises:
            StaleTreeError: the tree or a block changed; nothing is written.
            TreeRefusedError: the result is beyond our limits; nothing is written.
            ContainerNotFoundError: as in `read`.
            DiskError: nothing is written; after a failed sync the state is unknown.
        """
        with self._lock(container_id):
            stored = self.read(container_id)
            if expected_generation is not None and not _is_current(
                stored.generation, expected_generation, blocks_may_change=blocks_may_change
            ):
                raise StaleTreeError(
                    f"the tree of container {container_id} changed meanwhile",
                    container_id=container_id,
                )
            return self._write(stored, merge(fresh, stored.known))

    def add_tombstones(
        self, container_id: ContainerId, records: Iterable[BlockRecord]
    ) -> ContainerTree:
        """Add tombstones for the blocks of these records, with the checksums of their
        recorded chunks, and return the new tree.

        The root is computed only if the stored tree has one: otherwise its live blocks
        are not known yet.

        Raises:
            ContainerNotFoundError, TreeRefusedError, DiskError: as in `update`.
        """
        with self._lock(container_id):
            stored = self.read(container_id)
            builder = TreeBuilder(container_id, stored.known)
            for record in records:
                builder.delete_recorded(
                    record.block_id, [chunk.data_checksum for chunk in record.chunks]
                )
            return self._write(
                stored, builder.build(compute_root=stored.tree.data_checksum is not None)
            )

    def forget(self, container_id: ContainerId) -> None:
        """Remove the state folder's files about a container durably, after its
        deletion.
        """
        for kind in ("trees", "previous", "tombstones"):
            path = self._state(kind, container_id)
            self._disk.remove(path)
            if self._disk.is_folder(path.parent):
                self._disk.sync_folder(path.parent)

    def _write(self, stored: StoredTree, tree: ContainerTree) -> ContainerTree:
        container_id, started = tree.container_id, time.perf_counter()
        encoded = encode_tree(tree)
        if stored.status is TreeStatus.PRESENT and stored.raw == encoded:
            self.stats.unchanged += 1
            return tree
        _check_limits(tree, len(encoded), self._blocks_max)
        path = self.path(container_id)
        if self._on_deleted is not None:
            known = {block.block_id for block in stored.known.blocks if block.deleted}
            deleted = [
                block.block_id
                for block in tree.blocks
                if block.deleted and block.block_id not in known
            ]
            if deleted:
                self._on_deleted(container_id, deleted)
        try:
            if not _are_kept(tree, stored.kept):
                self._keep_tombstones(tree)
            if stored.status is TreeStatus.PRESENT:
                self._replace(self._state("previous", container_id), stored.raw)
            elif stored.raw and not (
                self._volume.hold is Hold.READ_ONLY and stored.reason in _BEYOND_LIMITS
            ):
                # Named by content: after a crash the same file is not kept twice. A
                # tree beyond our limits in a read-only volume is not kept: it is valid
                # to the datanode that writes it, and it stays in the volume.
                kept = (
                    self._volume.state_folder
                    / "quarantine"
                    / f"{container_id}-{stored.fingerprint.hex()}.tree"
                )
                self._replace(kept, stored.raw)
                self.stats.quarantined += 1
            if self._volume.hold is Hold.READ_ONLY:
                self._replace(path, encoded)
            else:
                self._disk.replace(path, encoded)
        except DiskError:
            self.stats.failures += 1
            raise
        self._count(container_id, trees=1, blocks=0)
        self.stats.writes += 1
        self.stats.tombstones_recovered += len(stored.recovered)
        self.stats.write_s += time.perf_counter() - started
        return tree

    def _changes_of(self, container_id: ContainerId) -> tuple[int, int]:
        with self._changes_lock:
            return self._changes.get(container_id, (0, 0))

    def _count(self, container_id: ContainerId, *, trees: int, blocks: int) -> None:
        with self._changes_lock:
            trees_before, blocks_before = self._changes.get(container_id, (0, 0))
            self._changes[container_id] = trees_before + trees, blocks_before + blocks

    def _generation(
        self, container_id: ContainerId, changes: tuple[int, int], raw: bytes | None
    ) -> bytes:
        trees, blocks = (count.to_bytes(_COUNTER_BYTES) for count in changes)
        # The datanode of a read-only volume writes trees that we do not count.
        written_ns = b""
        if self._volume.hold is Hold.READ_ONLY:
            path = self._volume_path(container_id)
            written_ns = str(self._disk.modified_ns(path)).encode()
        return trees + written_ns + (fingerprint(raw) if raw else b"") + blocks

    def _keep_tombstones(self, tree: ContainerTree) -> None:
        tombstones = tuple(block for block in tree.blocks if block.deleted)
        alone = encode_tree(ContainerTree(tree.container_id, None, tombstones))
        self._replace(self._state("tombstones", tree.container_id), alone)

    def _replace(self, path: Path, data: bytes) -> None:
        """Replace a file in the state folder."""
        self._disk.make_folder(path.parent)
        self._disk.replace(path, data, unique=True)

    def _pending(self, container_id: ContainerId) -> list[BlockTree]:
        try:
            return pending_tombstones(self._volume.database, container_id)
        except DatabaseError:
            # The deletions stay pending until the database can be read again.
            return []

    def _parse_usable(
        self, raw: bytes | None, container_id: ContainerId
    ) -> tuple[ContainerTree, TreeStatus, str]:
        """The usable part of a tree file, its status, and why it is unreadable."""
        tree, reason = _parse(raw, container_id)
        if tree is not None:
            return tree, TreeStatus.PRESENT, ""
        beyond = (
            self._tombstones_beyond(raw, container_id) if raw and reason in _BEYOND_LIMITS else ()
        )
        status = TreeStatus.ABSENT if raw is None else TreeStatus.UNREADABLE
        return ContainerTree(container_id, None, beyond), status, reason

    def _tombstones_in(
        self, raw: bytes | None, container_id: ContainerId
    ) -> dict[BlockId, BlockTree]:
        tree, _, _ = self._parse_usable(raw, container_id)
        return {block.block_id: block for block in tree.blocks if block.deleted}

    def _tombstones_beyond(self, raw: bytes, container_id: ContainerId) -> tuple[BlockTree, ...]:
        generation = fingerprint(raw)
        last_id, last_generation, tombstones = self._last_beyond
        if (last_id, last_generation) != (container_id, generation):
            tombstones = tombstones_from_bytes(raw, container_id)
            self._last_beyond = container_id, generation, tombstones
        return tombstones

    def _raw(self, path: Path) -> bytes | None:
        try:
            return self._disk.read(path)
        except DiskError as error:
            if error.facts.get("missing"):
                return None
            raise

    def _versions(self, container_id: ContainerId) -> tuple[bytes | None, bytes | None]:
        """The bytes of the file that counts, and under a read-only hold those of the
        older one, which may have other tombstones.
        """
        path, volume_path = self.path(container_id), self._volume_path(container_id)
        raw = self._raw(path)
        if path == volume_path:
            return raw, None
        volume_raw = self._raw(volume_path)
        if raw is None:
            return volume_raw, None
        # With equal times ours counts, since it comes from our own scan.
        ours_ns, theirs_ns = self._disk.modified_ns(path), self._disk.modified_ns(volume_path)
        theirs_is_newer = theirs_ns is not None and ours_ns is not None and theirs_ns > ours_ns
        return (volume_raw, raw) if theirs_is_newer and volume_raw else (raw, volume_raw)

    def _volume_path(self, container_id: ContainerId) -> Path:
        return self._volume.container_folder(container_id) / "metadata" / f"{container_id}.tree"

    def _state(self, kind: str, container_id: ContainerId) -> Path:
        return self._volume.state_folder / kind / f"{container_id}.tree"

    def _lock(self, container_id: ContainerId) -> threading.Lock:
        return self._locks[container_id % _LOCK_STRIPES]


def pending_tombstones(database: Database, container_id: ContainerId) -> list[BlockTree]:
    """Tombstones for the blocks of delete transactions that still have a record.

    Invalid transactions and records yield none, since the checksums are unknown.

    Raises:
        DatabaseError: the database cannot be read.
    """
    builder = TreeBuilder(container_id)
    for _, raw in database.items(OzoneTable.DELETE_TXNS, container_prefix(container_id)):
        with contextlib.suppress(RecordInvalidError):
            for block_id in delete_transaction_from_bytes(raw).block_ids:
                record = database.get(OzoneTable.BLOCK_DATA, block_key(container_id, block_id))
                if record is not None:
                    with contextlib.suppress(RecordInvalidError):
                        chunks = record_from_bytes(record).chunks
                        builder.delete_recorded(block_id, [chunk.data_checksum for chunk in chunks])
    return list(builder.build(compute_root=False).blocks)


def _parse(raw: bytes | None, container_id: ContainerId) -> tuple[ContainerTree | None, str]:
    """The tree, or None and the reason."""
    if not raw:
        return None, "" if raw is None else "empty"
    try:
        tree = tree_from_bytes(raw, container_id)
    except TreeRefusedError as error:
        return None, error.reason
    # After a flipped bit most messages still parse, so the checksums are verified. The
    # other rules of merkle.check are for trees of peers, not for ours or Ozone's.
    if any(not b.deleted and b.data_checksum != _live_checksum(b) for b in tree.blocks):
        return None, TreeRefusal.BLOCK_CHECKSUM.value
    # No checksum covers the flag `deleted`: one flipped bit turns a live block into
    # this. Ozone's tombstones have no chunks.
    if any(b.deleted and b.chunks for b in tree.blocks):
        return None, TreeRefusal.TOMBSTONE_WITH_CHUNKS.value
    if tree.data_checksum not in (None, container_checksum(b.data_checksum for b in tree.blocks)):
        return None, TreeRefusal.ROOT_CHECKSUM.value
    return tree, ""


def _check_limits(tree: ContainerTree, length_bytes: int, blocks_max: int) -> None:
    """Refuse to write a tree that we could not read again."""
    chunks = max((len(block.chunks) for block in tree.blocks), default=0)
    for refusal, what, number, limit in (
        (TreeRefusal.TOO_LARGE, "bytes", length_bytes, MESSAGE_BYTES_MAX),
        (TreeRefusal.TOO_MANY_BLOCKS, "blocks", len(tree.blocks), blocks_max),
        (TreeRefusal.TOO_MANY_CHUNKS, "chunks in a block", chunks, BLOCK_CHUNKS_MAX),
    ):
        if number > limit:
            text = (
                f"the tree of container {tree.container_id} would have {number} {what}, more than"
                f" {limit}"
            )
            raise TreeRefusedError(refusal.value, text, container_id=tree.container_id)


def _is_current(current: bytes, expected: bytes, *, blocks_may_change: bool) -> bool:
    end = -_COUNTER_BYTES if blocks_may_change else None
    return current[:end] == expected[:end]


def _are_kept(tree: ContainerTree, kept: Mapping[BlockId, BlockTree]) -> bool:
    return all(kept.get(block.block_id) == block for block in tree.blocks if block.deleted)


def _live_checksum(block: BlockTree) -> int:
    return block_checksum(block.block_id, (chunk.data_checksum for chunk in block.chunks))
