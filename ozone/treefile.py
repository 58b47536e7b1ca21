"""`<container ID>.tree`: read it; update it by read, merge and durable replace; never
forget a deletion.

A tree can be built anew from the data, except for its tombstones: once they are lost, a
peer that still holds a deleted block brings it back. So they are remembered beside the
volume, in its state folder: the previous version of every tree, and the tombstones
alone, written before the tree that has them, or, of a tree that a datanode wrote, when
it is first seen. What a tree file lacks of them, because it is unreadable, lost or an
old one put back, is found again at the next read. An unreadable file is kept in
quarantine. One beyond our limits (merkle.limits) counts as unreadable, but for its
tombstones, and is replaced as soon as what the replica holds makes a tree within them.

Under a read-only hold our trees lie in the state folder altogether. Of the two, the one
written last counts: ours after a scan, the volume's once its datanode has scanned or
repaired the container since.
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

# Writers of different containers seldom meet; locks made per container would add up for
# ever.
_LOCK_STRIPES = 127
_BEYOND_LIMITS = {
    refusal.value
    for refusal in (TreeRefusal.TOO_LARGE, TreeRefusal.TOO_MANY_BLOCKS, TreeRefusal.TOO_MANY_CHUNKS)
}


class TreeStatus(Enum):
    """What became of a tree file."""

    PRESENT = "present"
    ABSENT = "absent"
    # Empty, not parsable, with sums that do not add up, or beyond our limits.
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class StoredTree:
    """A tree file as read.

    `raw` are its bytes, b"" if absent; `tree` is an empty one without root unless the
    status is PRESENT, or has the tombstones alone of a file that is beyond our limits;
    `recovered` are those that we know from elsewhere and the tree lacks, by ascending
    block ID. `generation` changes with the bytes. Unless the status is PRESENT, peers
    may know tombstones that are lost here: ask them before anything is taken for
    missing.
    """

    status: TreeStatus
    raw: bytes
    tree: ContainerTree
    generation: bytes
    recovered: tuple[BlockTree, ...] = ()
    # Why it is unreadable (a TreeRefusal's value, or "empty").
    reason: str = ""
    # The tombstones that are kept alone in the state folder.
    kept: Mapping[BlockId, BlockTree] = field(default_factory=dict, compare=False, repr=False)

    @property
    def known(self) -> ContainerTree:
        """The tree with the recovered tombstones laid over it; without a root where the
        tree has none.
        """
        if not self.recovered:
            return self.tree
        blocks = {block.block_id: block for block in (*self.tree.blocks, *self.recovered)}
        whole = ContainerTree.of(self.tree.container_id, blocks.values())
        has_root = self.tree.data_checksum is not None
        return whole if has_root else ContainerTree(whole.container_id, None, whole.blocks)


@dataclass(slots=True)
class _TreeFileStats:
    """What was done so far."""

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
    ) -> None:
        """`on_deleted` hears of the blocks that become tombstones, before their tree is
        written.
        """
        self.stats = _TreeFileStats()
        self._on_deleted = on_deleted
        self._volume = volume
        self._disk = disk
        self._locks = [threading.Lock() for _ in range(_LOCK_STRIPES)]
        # Walking through millions of blocks takes seconds, and what cannot be replaced
        # is met again and again.
        self._last_beyond: tuple[ContainerId | None, bytes, tuple[BlockTree, ...]] = None, b"", ()
        # A repair asks about many blocks of one container in a row.
        self._last_deleted: tuple[ContainerId | None, bytes, frozenset[BlockId]] = (
            None,
            b"",
            frozenset(),
        )

    def path(self, container_id: ContainerId) -> Path:
        """Where the tree is written.

        Raises:
            ContainerNotFoundError: there is no such container.
        """
        if self._volume.hold is Hold.READ_ONLY:
            return self._state("trees", container_id)
        return self._volume_path(container_id)

    def read(self, container_id: ContainerId) -> StoredTree:
        """The stored tree and the tombstones that it lacks; a reader takes no lock.

        Raises:
            ContainerNotFoundError: there is no such container.
            DiskError: the disk cannot be read, which says nothing about the tree.
        """
        started = time.perf_counter()
        raw, other = self._versions(container_id)
        tree, status, reason = self._believed(raw, container_id)
        previous, alone = (
            self._raw(self._state(kind, container_id)) for kind in ("previous", "tombstones")
        )
        remembered: dict[BlockId, BlockTree] = {}
        if status is not TreeStatus.PRESENT and (raw is not None or previous or alone):
            # The file was there once. Its tombstones may be of deletions that were not
            # finished.
            remembered = {t.block_id: t for t in self._pending(container_id)}
        kept = self._tombstones_in(alone, container_id)
        # What we remember, newest last; of a read-only volume also what its datanode
        # has deleted since.
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
            fingerprint(raw) if raw else b"",
            tuple(remembered[block_id] for block_id in sorted(remembered.keys() - present)),
            reason,
            kept,
        )

    def remember(self, stored: StoredTree) -> None:
        """Keep the tombstones of a tree as it was read, lest they go with a file that
        another program may lose.

        Written once: what is kept already costs nothing.

        Raises:
            ContainerNotFoundError: as in `read`.
            DiskError: they could not be kept.
        """
        if _are_kept(stored.tree, stored.kept):
            return
        with self._lock(stored.tree.container_id):
            # Read again: what was kept meanwhile must not be replaced by less.
            now = self.read(stored.tree.container_id)
            if not _are_kept(now.tree, now.kept):
                self._keep_tombstones(now.known)

    def raw(self, container_id: ContainerId) -> bytes | None:
        """The bytes of the tree file that counts, whatever they are; None where there
        is none.

        Raises:
            ContainerNotFoundError, DiskError: as `read` does.
        """
        return self._versions(container_id)[0]

    def generation(self, container_id: ContainerId) -> bytes:
        """That of the stored tree, as `read` has it; of a file that cannot be read that
        of none, which no write meets.

        Raises:
            ContainerNotFoundError: there is no such container.
        """
        try:
            raw = self.raw(container_id)
        except DiskError:
            return b""
        return fingerprint(raw) if raw else b""

    def deleted_blocks(self, container_id: ContainerId) -> frozenset[BlockId]:
        """The blocks that are known as deleted. The tree is parsed again only if its
        bytes changed.

        Raises:
            as `read` does.
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
    ) -> ContainerTree:
        """Lay a fresh tree over the stored one, write the outcome and return it.

        Nothing is written if the stored tree is that already. With
        `expected_generation`, that of the StoredTree which the work began with, a tree
        that changed meanwhile is not overwritten.

        Raises:
            StaleTreeError: the stored tree changed; nothing is written.
            TreeRefusedError: the outcome is beyond our limits; nothing is written.
            ContainerNotFoundError: as in `read`.
            DiskError: nothing is written, or after a failed sync it is unknown.
        """
        with self._lock(container_id):
            stored = self.read(container_id)
            if expected_generation is not None and stored.generation != expected_generation:
                raise StaleTreeError(
                    f"the tree of container {container_id} changed meanwhile",
                    container_id=container_id,
                )
            return self._write(stored, merge(fresh, stored.known))

    def add_tombstones(
        self, container_id: ContainerId, records: Iterable[BlockRecord]
    ) -> ContainerTree:
        """Make the blocks of these records tombstones, with the checksums of their
        recorded chunks.

        The root is computed only if the stored tree has one: without it the live blocks
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
        """Drop what is remembered of a container that was deleted."""
        for kind in ("trees", "previous", "tombstones"):
            self._disk.remove(self._state(kind, container_id))

    def _write(self, stored: StoredTree, tree: ContainerTree) -> ContainerTree:
        container_id, started = tree.container_id, time.perf_counter()
        encoded = encode_tree(tree)
        if stored.status is TreeStatus.PRESENT and stored.raw == encoded:
            self.stats.unchanged += 1
            return tree
        _check_limits(tree, len(encoded))
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
                # Named by content: the same file met again after a crash is kept once.
                # One beyond our limits may be rightly so to the datanode that goes on
                # writing it, and stays in its volume.
                kept = (
                    self._volume.state_folder
                    / "quarantine"
                    / f"{container_id}-{stored.generation.hex()}.tree"
                )
                self._replace(kept, stored.raw)
                self.stats.quarantined += 1
            if self._volume.hold is Hold.READ_ONLY:
                self._disk.make_folder(path.parent)
            self._disk.replace(path, encoded)
        except DiskError:
            self.stats.failures += 1
            raise
        self.stats.writes += 1
        self.stats.tombstones_recovered += len(stored.recovered)
        self.stats.write_s += time.perf_counter() - started
        return tree

    def _keep_tombstones(self, tree: ContainerTree) -> None:
        tombstones = tuple(block for block in tree.blocks if block.deleted)
        alone = encode_tree(ContainerTree(tree.container_id, None, tombstones))
        self._replace(self._state("tombstones", tree.container_id), alone)

    def _replace(self, path: Path, data: bytes) -> None:
        self._disk.make_folder(path.parent)
        self._disk.replace(path, data)

    def _pending(self, container_id: ContainerId) -> list[BlockTree]:
        try:
            return pending_tombstones(self._volume.database, container_id)
        except DatabaseError:
            # The deletions that it holds are still to be done, whenever it can be read
            # again.
            return []

    def _believed(
        self, raw: bytes | None, container_id: ContainerId
    ) -> tuple[ContainerTree, TreeStatus, str]:
        """What is taken from a tree file, what became of it, and why it is
        unreadable.
        """
        tree, reason = _parsed(raw, container_id)
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
        tree, _, _ = self._believed(raw, container_id)
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
        """The file that counts, and under a read-only hold the older one, which may
        have tombstones of its own.
        """
        path, volume_path = self.path(container_id), self._volume_path(container_id)
        raw = self._raw(path)
        if path == volume_path:
            return raw, None
        volume_raw = self._raw(volume_path)
        if raw is None:
            return volume_raw, None
        # Equal times prove nothing; then ours, which a scan of ours made.
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
    """Tombstones for the blocks that a delete transaction names and that still have a
    record.

    A transaction or record that cannot be read gives none: nothing can be said about
    the checksums.

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


def _parsed(raw: bytes | None, container_id: ContainerId) -> tuple[ContainerTree | None, str]:
    """The tree, or why there is none."""
    if not raw:
        return None, "" if raw is None else "empty"
    try:
        tree = tree_from_bytes(raw, container_id)
    except TreeRefusedError as error:
        return None, error.reason
    # A flipped bit mostly leaves a message that still parses. Only the sums are asked
    # of what we or Ozone wrote: the other rules of merkle.check are for strangers.
    if any(not b.deleted and b.data_checksum != _live_checksum(b) for b in tree.blocks):
        return None, TreeRefusal.BLOCK_CHECKSUM.value
    # One flipped bit makes that of a live block, which is under no sum; Ozone's
    # tombstones have none.
    if any(b.deleted and b.chunks for b in tree.blocks):
        return None, TreeRefusal.TOMBSTONE_WITH_CHUNKS.value
    if tree.data_checksum not in (None, container_checksum(b.data_checksum for b in tree.blocks)):
        return None, TreeRefusal.ROOT_CHECKSUM.value
    return tree, ""


def _check_limits(tree: ContainerTree, length_bytes: int) -> None:
    """What we would not take for a tree when we read it again must not stand in the
    place of another.
    """
    chunks = max((len(block.chunks) for block in tree.blocks), default=0)
    for refusal, what, number, limit in (
        (TreeRefusal.TOO_LARGE, "bytes", length_bytes, MESSAGE_BYTES_MAX),
        (TreeRefusal.TOO_MANY_BLOCKS, "blocks", len(tree.blocks), TREE_BLOCKS_MAX),
        (TreeRefusal.TOO_MANY_CHUNKS, "chunks in a block", chunks, BLOCK_CHUNKS_MAX),
    ):
        if number > limit:
            text = (
                f"the tree of container {tree.container_id} would have {number} {what}, more than"
                f" {limit}"
            )
            raise TreeRefusedError(refusal.value, text, container_id=tree.container_id)


def _are_kept(tree: ContainerTree, kept: Mapping[BlockId, BlockTree]) -> bool:
    return all(kept.get(block.block_id) == block for block in tree.blocks if block.deleted)


def _live_checksum(block: BlockTree) -> int:
    return block_checksum(block.block_id, (chunk.data_checksum for chunk in block.chunks))
