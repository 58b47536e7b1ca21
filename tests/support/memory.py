"""One replica in memory with the manners of the real one: twin of the ports
`ReplicaReader` and `ReplicaWriter`.

What it stores is a `MemoryReplica`, so that the memory peers can serve it. Every change
is shown to an `Observer` first, and a `tear` makes the next write end half-way, as a
crash does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from dnagent.scanner import CompletedScan, ScanDepth
from merkle.checksum import fingerprint
from merkle.columns import encode_tree
from merkle.errors import TreeRefusedError
from merkle.merge import merge
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, BlockTree, ContainerTree, TreeBuilder
from merkle.windows import ProvenWindows, bad_windows, is_sound
from ozone.errors import (
    BlockNotFoundError,
    ChunkGapError,
    ContainerNotFoundError,
    ContainerStateError,
    StaleTreeError,
)
from ozone.scan import Finding, FindingType, ScanResult
from protos.convert import tree_from_bytes
from repair.requests import OwnLoaded, Scanned, TreeStored
from runtime.errors import BusyError, DiskError
from tests.support.peers import MemoryReplica, scanned_chunk

_COUNTER_BYTES = 8
Findings = tuple[tuple[BlockId | None, int | None], ...]


class CrashError(Exception):
    """The process died here."""


class Observer(Protocol):
    """Sees every change of a replica before it is made."""

    def writes(
        self, replica: "RepairableReplica", block_id: BlockId, offset: int, new: bytes
    ) -> None: ...

    def puts(self, replica: "RepairableReplica", record: BlockRecord) -> None: ...

    def stores(self, replica: "RepairableReplica", tree: ContainerTree) -> None: ...

    def returns(self, replica: "RepairableReplica", generation: bytes) -> None: ...

    def marks(self, replica: "RepairableReplica") -> None: ...


class RepairableReplica:
    """A replica that can be repaired; `stored` is its disk and outlives it."""

    def __init__(self, name: str, stored: MemoryReplica, observer: Observer | None = None) -> None:
        self.name = name
        self.stored = stored
        self.observer = observer
        # Tombstones that a lost or old tree file cannot make us forget.
        self.remembered: dict[BlockId, BlockTree] = {}
        # Delete transactions of the cluster that were accepted and not finished.
        self.pending_deletes: set[BlockId] = set()
        self.exists = True
        # Of this process, as in the real store: a tree may come back, its generation
        # never does.
        self._trees_stored = self._blocks_changed = 0
        self.tear: Callable[[int], int] | None = None
        self.failing_disk = False
        self.refuses_gaps = True
        self.bytes_written = 0
        self.puts = 0
        self.scans = 0

    def own(self) -> OwnLoaded:
        self._check()
        tree, generation = self.known_tree()
        stored = self.stored
        recorded = None
        # 0 stands for a row that is lost.
        if not stored.bcs_id or stored.state is ReplicaState.UNHEALTHY:
            recorded = max((record.bcs_id for record in stored.records.values()), default=0)
        return OwnLoaded(
            tree, generation, stored.state, stored.bcs_id, stored.replica_index, recorded
        )

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        self._check()
        return {
            block_id: self.stored.records[block_id]
            for block_id in block_ids
            if block_id in self.stored.records
        }

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        self._check()
        file = self.stored.files.get(block_id, bytearray())
        return bad_windows(chunk, bytes(file[chunk.offset : chunk.end])), len(file)

    def scan(self) -> Scanned:
        self._check()
        if self.failing_disk:
            # As where there are no file handles: what is found then proves nothing.
            raise BusyError("too many open files")
        self.scans += 1
        tree, findings = self.examine()
        stored = self._settle(tree, self._generation(), is_damaged=bool(findings))
        known = {
            (block.block_id, chunk.offset) for block in stored.tree.blocks for chunk in block.chunks
        }
        lost = {
            block_id: [
                c.offset for c in record.chunks if is_sound(c) and (block_id, c.offset) not in known
            ]
            for block_id, record in self.stored.records.items()
            if block_id not in self.remembered
        }
        return Scanned(stored.tree, stored.generation, findings, self.stored.state, lost)

    def begin_scan(self) -> CompletedScan:
        """Read all bytes, and store nothing yet."""
        self._check()
        tree, places = self.examine()
        found = tuple(Finding(FindingType.CORRUPT_CHUNK, *place) for place in places)
        result = ScanResult(tree, found)
        container_id = self.stored.container_id
        return CompletedScan(container_id, ScanDepth.DATA, result, self._generation())

    def end_scan(self, scan: CompletedScan) -> None:
        """Store what a scan has seen.

        Raises:
            StaleTreeError: the tree or a block changed since the scan began.
        """
        self._check()
        result = scan.result
        self._settle(result.tree, scan.generation, is_damaged=bool(result.findings))

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        self._check(to_write=True)
        self._check_block(block_id)
        for run in runs:
            offset = chunk.offset + chunk.window(run.first)[0]
            data = run.data
            if self.refuses_gaps and offset > len(self.stored.files.get(block_id, b"")):
                raise ChunkGapError(f"the file of block {block_id} would get a gap at {offset}")
            if self.observer:
                self.observer.writes(self, block_id, offset, data)
            if self.failing_disk:
                raise DiskError("the disk failed", path=f"{block_id}.block")
            torn = self.tear is not None
            if self.tear is not None:
                data, self.tear = data[: self.tear(len(data))], None
            file = self.stored.files.setdefault(block_id, bytearray())
            file[offset : offset + len(data)] = data
            self._blocks_changed += 1
            self.bytes_written += len(data)
            if torn:
                raise CrashError
        return (0,) * len(runs)

    def put_block(self, record: BlockRecord) -> None:
        self._check(to_write=True)
        self._check_block(record.block_id)
        known, length = (
            self.stored.records.get(record.block_id),
            len(self.stored.files.get(record.block_id, b"")),
        )
        for chunk in record.chunks:
            if chunk.end > length and not (known and chunk.offset in known.by_offset):
                raise ChunkGapError(f"block {record.block_id} has not the chunk at {chunk.offset}")
        if self.observer:
            self.observer.puts(self, record)
        self.stored.records[record.block_id] = record
        self._blocks_changed += 1
        self.puts += 1

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        self._check()
        # The blocks written since are those of this repair.
        self._check_generation(generation, blocks_may_change=True)
        return self._store(merge(tree, self.known_tree()[0]))

    def advance_bcs_id(self, bcs_id: int) -> None:
        self._check(to_write=True)
        self.stored.bcs_id = max(self.stored.bcs_id, bcs_id)

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        self._check(to_write=True)
        if self.stored.state is not ReplicaState.UNHEALTHY:
            raise ContainerStateError(f"the container is {self.stored.state.name}, not UNHEALTHY")
        self._check_return(generation)
        if self.observer:
            self.observer.returns(self, generation)
        self.stored.state = state

    def _check_return(self, generation: bytes) -> None:
        self._check_generation(generation)

    def _check_generation(self, generation: bytes, *, blocks_may_change: bool = False) -> None:
        end = -_COUNTER_BYTES if blocks_may_change else None
        if generation[:end] != self._generation()[:end]:
            raise StaleTreeError("the tree or a block changed since its scan")

    def _settle(self, tree: ContainerTree, generation: bytes, *, is_damaged: bool) -> TreeStored:
        self._check_generation(generation)
        stored = self.store_tree(tree, generation)
        if is_damaged:
            self._mark_unhealthy()
        return stored

    def _mark_unhealthy(self) -> None:
        if self.observer:
            self.observer.marks(self)
        self.stored.state = ReplicaState.UNHEALTHY

    def known_tree(self) -> tuple[ContainerTree | None, bytes]:
        """The stored tree with all remembered tombstones, and its generation; no tree
        unless one was built.
        """
        raw = self.stored.tree if isinstance(self.stored.tree, bytes) else b""
        blocks: dict[BlockId, BlockTree] = {}
        has_root = False
        try:
            tree = tree_from_bytes(raw, self.stored.container_id) if raw else None
        except TreeRefusedError:
            tree = None
        if tree is not None:
            blocks = {block.block_id: block for block in tree.blocks}
            has_root = tree.data_checksum is not None
        blocks |= {
            block_id: t
            for block_id, t in self.remembered.items()
            if not _is_deleted(blocks.get(block_id))
        }
        known = ContainerTree.of(self.stored.container_id, blocks.values())
        if not has_root:
            known = replace(known, data_checksum=None)
        return known, self._generation()

    def examine(self) -> tuple[ContainerTree, Findings]:
        """What a scan of the bytes shows, and where it finds faults."""
        builder = TreeBuilder(self.stored.container_id)
        findings: list[tuple[BlockId | None, int | None]] = []
        for block_id in sorted(self.stored.records):
            file, chunks = self.stored.files.get(block_id), self.stored.records[block_id].chunks
            if file is None:
                # Of any type, as the real scan: a file without checksums is missed too.
                if chunks and chunks[0].length_bytes:
                    findings.append((block_id, None))
                continue
            for chunk in chunks:
                if not is_sound(chunk):
                    continue
                builder.add_block(block_id)
                entry = scanned_chunk(chunk, file)
                if not entry.checksum_matches:
                    findings.append((block_id, chunk.offset))
                if entry.length_bytes:
                    builder.add_chunk(block_id, entry)
        return builder.build(), tuple(findings)

    def delete_block(self, block_id: BlockId, *, crash_after: int | None = None) -> None:
        """Finish a delete transaction: tombstone, file, record; `crash_after` so many
        steps of it.
        """
        self._check(to_write=True)
        record = self.stored.records.get(block_id)
        for number, act in enumerate((self._add_tombstone, self._remove_file, self._remove_record)):
            if number == crash_after:
                raise CrashError
            act(block_id, record)
        self.pending_deletes.discard(block_id)

    def delete_container(self) -> None:
        """All of it goes."""
        self.exists = False
        self.stored.files.clear()
        self.stored.records.clear()
        self.stored.tree = None

    def restart(self) -> None:
        """The agent died; what it had in memory goes."""
        self._trees_stored = self._blocks_changed = 0

    def _remove_file(self, block_id: BlockId, _record: BlockRecord | None) -> None:
        self.stored.files.pop(block_id, None)
        self._blocks_changed += 1

    def _add_tombstone(self, block_id: BlockId, record: BlockRecord | None) -> None:
        if record is None:
            return
        known, _ = self.known_tree()
        builder = TreeBuilder(self.stored.container_id, known)
        builder.delete_recorded(block_id, [chunk.data_checksum for chunk in record.chunks])
        self._store(
            builder.build(compute_root=known is not None and known.data_checksum is not None)
        )

    def _remove_record(self, block_id: BlockId, _record: BlockRecord | None) -> None:
        self.stored.records.pop(block_id, None)
        self._blocks_changed += 1

    def _generation(self) -> bytes:
        raw = self.stored.tree if isinstance(self.stored.tree, bytes) else b""
        trees, blocks = (
            count.to_bytes(_COUNTER_BYTES) for count in (self._trees_stored, self._blocks_changed)
        )
        return trees + (fingerprint(raw) if raw else b"") + blocks

    def _store(self, tree: ContainerTree) -> TreeStored:
        if self.observer:
            self.observer.stores(self, tree)
        raw = encode_tree(tree)
        self._trees_stored += raw != self.stored.tree
        self.stored.tree = raw
        self.remembered |= {block.block_id: block for block in tree.blocks if block.deleted}
        return TreeStored(tree, self._generation())

    def _check(self, *, to_write: bool = False) -> None:
        if not self.exists:
            raise ContainerNotFoundError("the container is deleted")
        if to_write and not self.stored.state.is_closed:
            raise ContainerStateError("the container is not closed")

    def _check_block(self, block_id: BlockId) -> None:
        if block_id in self.remembered or block_id in self.pending_deletes:
            raise BlockNotFoundError(f"block {block_id} is deleted")


def _is_deleted(block: BlockTree | None) -> bool:
    return block is not None and block.deleted
