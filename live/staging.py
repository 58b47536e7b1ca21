"""A replica under construction on our own disk: what a container's replicas hold
together.

It is the replica that a repair (repair.reconciliation) works on. It begins with what
all live replicas hold equal and healthy: those chunks stand in its tree and records,
and their bytes are not here. The repair then plans the rest, chunk by chunk, and
nothing else: a record counts only if all replicas that have one agree, and bytes only
if they match it. So the staged files hold proven windows of diverged chunks alone.

To datanodes it is one replica like any other (ozone.ports.ReplicaSource). Each read is
proven once more, and reads of bytes that are not here are refused.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from merkle.columns import encode_tree
from merkle.merge import merge
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from merkle.windows import ProvenWindows, bad_windows
from ozone.errors import BlockNotFoundError, ContainerNotFoundError, StaleTreeError
from ozone.ports import ReplicaHead
from repair.requests import OwnLoaded, Scanned, TreeStored
from runtime.disk import Disk

_Place = tuple[BlockId, int]


def settled_tree(trees: Mapping[PeerId, ContainerTree], container_id: ContainerId) -> ContainerTree:
    """The chunks that all trees have equal and healthy, in blocks that none has
    deleted; with the tombstones that all agree on.
    """
    blocks: list[BlockTree] = []
    first, *others = trees.values()
    for block in first.blocks:
        copies = [block, *filter(None, (tree.block(block.block_id) for tree in others))]
        if len(copies) < len(trees):
            continue
        if all(copy == block for copy in copies) and block.deleted:
            blocks.append(block)
        elif not any(copy.deleted for copy in copies):
            common = set(block.chunks).intersection(*(copy.chunks for copy in copies))
            settled = [chunk for chunk in common if chunk.checksum_matches]
            if settled or not any(copy.chunks for copy in copies):
                blocks.append(BlockTree.live(block.block_id, settled))
    return ContainerTree.of(container_id, blocks)


def settled_record(
    block_id: BlockId, settled: ContainerTree, records: Mapping[PeerId, BlockRecord]
) -> BlockRecord | None:
    """The record of a block's settled chunks; None if there are none, or if a replica
    has another record of one of them.
    """
    entry = settled.block(block_id)
    if entry is None or entry.deleted or not entry.chunks or not records:
        return None
    leaves = {chunk.offset: chunk for chunk in entry.chunks}
    latest = max(records.values(), key=lambda record: record.bcs_id)
    chunks = tuple(chunk for chunk in latest.chunks if chunk.offset in leaves)
    for chunk in chunks:
        leaf = leaves[chunk.offset]
        if (chunk.length_bytes, chunk.data_checksum) != (leaf.length_bytes, leaf.data_checksum):
            return None
        if any(_differs(record, chunk) for record in records.values()):
            return None
    return BlockRecord(latest.container_id, block_id, latest.bcs_id, chunks, latest.metadata)


def _differs(record: BlockRecord, chunk: ChunkRecord) -> bool:
    other = record.by_offset.get(chunk.offset)
    return other is None or other.content != chunk.content


class StagingReplica:
    """One staged replica; the methods are those of repair.ports.ReplicaAccess and of
    ozone.ports.ReplicaSource. Thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        container_id: ContainerId,
        *,
        settled: ContainerTree,
        records: Mapping[BlockId, BlockRecord],
        bcs_id: int,
    ) -> None:
        """`folder` exists and is empty. `settled` and `records` are as
        `settled_tree` and `settled_record` make them; `bcs_id` is the container's
        commit.
        """
        self._folder, self._disk, self._container_id = folder, disk, container_id
        self._records = dict(records)
        self._settled = {
            (block.block_id, chunk.offset) for block in settled.blocks for chunk in block.chunks
        }
        self._tree, self._bcs_id = settled, bcs_id
        self._written: set[_Place] = set()
        self._generation = 0
        self._lock = threading.Lock()

    @property
    def tree(self) -> ContainerTree:
        """The tree as it is now."""
        return self._tree

    @property
    def staged(self) -> frozenset[_Place]:
        """The chunks whose bytes are here, whole and proven: block and offset."""
        return frozenset(
            (block.block_id, chunk.offset)
            for block in self._tree.blocks
            for chunk in block.chunks
            if (block.block_id, chunk.offset) in self._written and chunk.checksum_matches
        )

    def staged_record(self, place: _Place) -> ChunkRecord:
        """The record against which a staged chunk was proven."""
        return self._records[place[0]].by_offset[place[1]]

    def own(self) -> OwnLoaded:
        """See ReplicaReader.own."""
        with self._lock:
            return OwnLoaded(
                self._tree, self._generation_bytes(), ReplicaState.UNHEALTHY, self._bcs_id
            )

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        """See ReplicaReader.records."""
        return {one: self._records[one] for one in block_ids if one in self._records}

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        """See ReplicaReader.check. The file is as long as all before the chunk: what
        others hold equal is not here.
        """
        path = self._file(block_id)
        data: bytes = b""
        if self._disk.length(path) is not None:
            data = self._disk.read_at(path, chunk.offset, chunk.length_bytes)
        return bad_windows(chunk, data), chunk.offset + len(data)

    def proven_bytes(self, block_id: BlockId, chunk: ChunkRecord) -> bytes:
        """The bytes of a staged chunk; empty if they no longer match its record."""
        data = self._disk.read_at(self._file(block_id), chunk.offset, chunk.length_bytes)
        return data if not bad_windows(chunk, data) else b""

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        """See ReplicaWriter.write_windows; there is nothing to undo."""
        for run in runs:
            low, _ = chunk.window(run.first)
            self._disk.write_at(self._file(block_id), chunk.offset + low, run.data)
        self._disk.sync(self._file(block_id))
        self._written.add((block_id, chunk.offset))
        return (0,) * len(runs)

    def put_block(self, record: BlockRecord) -> None:
        """See ReplicaWriter.put_block."""
        self._records[record.block_id] = record

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        """See ReplicaWriter.store_tree."""
        with self._lock:
            if generation != self._generation_bytes():
                raise StaleTreeError("the staged tree changed")
            self._tree, self._generation = merge(tree, self._tree), self._generation + 1
            return TreeStored(self._tree, self._generation_bytes())

    def advance_bcs_id(self, bcs_id: int) -> None:
        """See ReplicaWriter.advance_bcs_id."""
        self._bcs_id = max(self._bcs_id, bcs_id)

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        """A staged replica stays UNHEALTHY; no repair of it asks for another state."""
        raise AssertionError(f"a staged replica never becomes {state.value}")

    def scan(self) -> Scanned:
        """Prove all staged chunks once more. One that does not match is no longer in
        the tree.
        """
        with self._lock:
            findings = tuple(place for place in sorted(self._written) if not self._is_whole(place))
            blocks = [
                block
                if block.deleted
                else BlockTree.live(
                    block.block_id,
                    [one for one in block.chunks if (block.block_id, one.offset) not in findings],
                )
                for block in self._tree.blocks
            ]
            self._tree = ContainerTree.of(self._container_id, blocks)
            self._generation += 1
            return Scanned(self._tree, self._generation_bytes(), findings, ReplicaState.UNHEALTHY)

    def _is_whole(self, place: _Place) -> bool:
        record = self._records.get(place[0])
        chunk = record.by_offset.get(place[1]) if record else None
        # A chunk of which a window found no proof is in no record.
        return chunk is None or not self.check(place[0], chunk)[0]

    def _generation_bytes(self) -> bytes:
        return self._generation.to_bytes(8, "big")

    def _file(self, block_id: BlockId) -> Path:
        return self._folder / f"{block_id}.block"


class StagingSource:
    """A staged replica as datanodes read it; the methods are those of
    ozone.ports.ReplicaSource.
    """

    def __init__(self, replica: StagingReplica, container_id: ContainerId) -> None:
        self._replica, self._container_id = replica, container_id
        self._tree_bytes = encode_tree(replica.tree)

    def head(self, container_id: ContainerId) -> ReplicaHead:
        """See ReplicaSource.head."""
        self._require(container_id)
        loaded = self._replica.own()
        return ReplicaHead(loaded.state, loaded.bcs_id)

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        """See ReplicaSource.tree_bytes."""
        self._require(container_id)
        return self._tree_bytes

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        """See ReplicaSource.record; None for blocks that all replicas hold equal."""
        self._require(container_id)
        return self._replica.records([block_id]).get(block_id)

    def records(
        self, container_id: ContainerId, start: BlockId | None, count: int
    ) -> Sequence[BlockRecord]:
        """See ReplicaSource.records: none. No datanode lists the blocks of a peer."""
        self._require(container_id)
        return ()

    def read(
        self, container_id: ContainerId, block_id: BlockId, offset: int, length_bytes: int
    ) -> bytes:
        """See ReplicaSource.read. Only proven bytes leave: the chunks are checked
        again.

        Raises:
            BlockNotFoundError: some of the bytes are not staged, or no longer match.
        """
        self._require(container_id)
        record = self._replica.records([block_id]).get(block_id)
        staged = self._replica.staged
        parts: list[bytes] = []
        at, end = offset, offset + length_bytes
        for chunk in record.chunks if record else ():
            if chunk.offset <= at < chunk.end and at < end:
                if (block_id, chunk.offset) not in staged:
                    break
                data = self._replica.proven_bytes(block_id, chunk)
                parts.append(data[at - chunk.offset : end - chunk.offset])
                at += len(parts[-1])
        if at < end:
            raise BlockNotFoundError(
                f"bytes {at} to {end} of block {block_id} are not part of this rescue",
                container_id=container_id,
                block_id=block_id,
            )
        return b"".join(parts)

    def _require(self, container_id: ContainerId) -> None:
        if container_id != self._container_id:
            raise ContainerNotFoundError(
                f"there is no container {container_id}", container_id=container_id
            )
