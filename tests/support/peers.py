"""Replicas and peers in memory: twins of the ports `ReplicaSource` and `Peer`, and
peers that misbehave.

`replica_of` makes a replica whose records and tree fit its bytes; tests damage a copy.
An `EvilPeer` behaves as the adapters would if the peer behind them misbehaved: where
they refuse, it raises what they raise; where they cannot know, it passes the lie on.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from dnagent.ports import AgentStatus, ScanReport
from merkle.check import check_tree
from merkle.checksum import WIDTH, ChecksumType, window_checksums
from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.errors import BlockNotFoundError, ContainerNotFoundError, TreeMissingError
from ozone.ports import ByteRange, ReplicaHead
from protos.convert import tree_from_bytes
from repair.ports import Piece
from runtime.errors import PeerRefusedError, PeerUnavailableError, RemoteProtocolError

WINDOW_BYTES = 4096
CHUNK_BYTES = 4 * WINDOW_BYTES


@dataclass
class MemoryReplica:
    """One container of one datanode; `tree` is the file's bytes, None without a file,
    or the error of reading it.
    """

    container_id: ContainerId
    records: dict[BlockId, BlockRecord] = field(default_factory=dict)
    files: dict[BlockId, bytearray] = field(default_factory=dict)
    tree: bytes | ReconcileError | None = None
    state: ReplicaState = ReplicaState.CLOSED
    bcs_id: int = 1
    replica_index: int = 0

    def flip(self, block_id: int, offset: int) -> None:
        """Damage one bit on disk; record and tree do not hear of it."""
        self.files[BlockId(block_id)][offset] ^= 1

    def scanned_tree(self) -> ContainerTree:
        """The tree that a scan of the bytes would make."""
        return ContainerTree.of(
            self.container_id, [self._scanned(record) for record in self.records.values()]
        )

    def _scanned(self, record: BlockRecord) -> BlockTree:
        file = self.files.get(record.block_id, bytearray())
        return BlockTree.live(
            record.block_id, [scanned_chunk(chunk, file) for chunk in record.chunks]
        )


def scanned_chunk(chunk: ChunkRecord, file: bytearray) -> ChunkTree:
    """The leaf of a chunk as found in its block's file."""
    data = bytes(file[chunk.offset : chunk.end])
    found = replace(chunk, checksums=_entries(data, chunk.checksum_type, chunk.bytes_per_checksum))
    return ChunkTree(
        chunk.offset, len(data), found.data_checksum, found.checksums == chunk.checksums
    )


def replica_of(
    container_id: int,
    blocks: Mapping[int, int],
    *,
    seed: int = 0,
    checksum_type: ChecksumType = ChecksumType.CRC32C,
    window_bytes: int = WINDOW_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> MemoryReplica:
    """A closed, healthy replica of blocks given by ID and length; one seed gives one
    content.
    """
    replica = MemoryReplica(ContainerId(container_id))
    for number, length_bytes in blocks.items():
        block_id = BlockId(number)
        data = random.Random(f"{seed}/{container_id}/{number}").randbytes(length_bytes)
        chunks = tuple(
            ChunkRecord(
                offset,
                len(part := data[offset : offset + chunk_bytes]),
                checksum_type,
                window_bytes,
                _entries(part, checksum_type, window_bytes),
                f"{number}_chunk_{1 + offset // chunk_bytes}",
            )
            for offset in range(0, length_bytes, chunk_bytes)
        )
        replica.files[block_id] = bytearray(data)
        replica.records[block_id] = BlockRecord(
            replica.container_id, block_id, replica.bcs_id, chunks, metadata=(("TYPE", "KEY"),)
        )
    replica.tree = encode_tree(replica.scanned_tree())
    return replica


def xor_replicas(
    container_id: int, blocks: Mapping[int, int], cell_bytes: int
) -> list[MemoryReplica]:
    """The replicas of an erasure-coded container of code XOR-2-1, as Ozone's client
    writes them: those of data, then that of parity.
    """
    replicas = [MemoryReplica(ContainerId(container_id), replica_index=i) for i in (1, 2, 3)]
    for number, length_bytes in blocks.items():
        block_id = BlockId(number)
        data = random.Random(f"{container_id}/{number}").randbytes(length_bytes)
        chunks: list[list[ChunkRecord]] = [[], [], []]
        files = [bytearray() for _ in replicas]
        for at, start in enumerate(range(0, length_bytes, 2 * cell_bytes)):
            first = data[start : start + cell_bytes]
            second = data[start + cell_bytes : start + 2 * cell_bytes]
            both = zip(first, second.ljust(len(first), b"\0"), strict=True)
            cells = [first, second, bytes(a ^ b for a, b in both)]
            made = [
                chunk_record(cell, at * cell_bytes, ChecksumType.CRC32, WINDOW_BYTES)
                for cell in cells
            ]
            joined = b"".join(chunk.entries for chunk in made)
            for index, (cell, chunk) in enumerate(zip(cells, made, strict=True)):
                if cell:
                    known = None if index == 1 else joined
                    chunks[index].append(replace(chunk, stripe_checksum=known))
                    files[index] += cell
        metadata = (("TYPE", "KEY"), ("blockGroupLen", str(length_bytes)))
        for index, replica in enumerate(replicas):
            replica.files[block_id] = files[index]
            replica.records[block_id] = BlockRecord(
                replica.container_id, block_id, 0, tuple(chunks[index]), metadata, index + 1
            )
    for replica in replicas:
        replica.tree = encode_tree(replica.scanned_tree())
    return replicas


def chunk_record(
    data: bytes, offset: int, checksum_type: ChecksumType, window_bytes: int
) -> ChunkRecord:
    """The record of a chunk, as its writer made it."""
    entries = _entries(data, checksum_type, window_bytes)
    return ChunkRecord(offset, len(data), checksum_type, window_bytes, entries, f"chunk_{offset}")


def _entries(data: bytes, checksum_type: ChecksumType, window_bytes: int) -> tuple[bytes, ...]:
    joined, width = window_checksums(data, checksum_type, window_bytes), WIDTH[checksum_type]
    return tuple(joined[i : i + width] for i in range(0, len(joined), width or 1))


class MemorySource:
    """The replicas of one datanode in memory."""

    def __init__(self, *replicas: MemoryReplica) -> None:
        self.replicas = {replica.container_id: replica for replica in replicas}

    def head(self, container_id: ContainerId) -> ReplicaHead:
        replica = self._replica(container_id)
        return ReplicaHead(replica.state, replica.bcs_id, replica.replica_index)

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        replica = self._replica(container_id)
        if isinstance(replica.tree, bytes):
            return replica.tree
        if replica.tree is not None:
            raise replica.tree
        if not build_missing:
            raise TreeMissingError(f"container {container_id} has no tree yet")
        blocks = [
            BlockTree.live(
                record.block_id,
                [ChunkTree(c.offset, c.length_bytes, c.data_checksum) for c in record.chunks],
            )
            for record in replica.records.values()
        ]
        return encode_tree(ContainerTree.of(container_id, blocks))

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        return self._replica(container_id).records.get(block_id)

    def records(
        self, container_id: ContainerId, start: BlockId | None, count: int
    ) -> Sequence[BlockRecord]:
        records = self._replica(container_id).records
        ids = sorted(records, key=str)
        if start is not None:
            ids = ids[ids.index(start) :] if start in records else []
        return [records[block_id] for block_id in ids[:count]]

    def read(
        self, container_id: ContainerId, block_id: BlockId, offset: int, length_bytes: int
    ) -> bytes:
        file = self._replica(container_id).files.get(block_id)
        if file is None:
            raise BlockNotFoundError(f"block {block_id} of container {container_id} has no file")
        return bytes(file[offset : offset + length_bytes])

    def _replica(self, container_id: ContainerId) -> MemoryReplica:
        if container_id not in self.replicas:
            raise ContainerNotFoundError(
                f"there is no container {container_id}", container_id=container_id
            )
        return self.replicas[container_id]


class MemoryScans:
    """A scanner that remembers what it was asked; a scan rebuilds the tree from the
    bytes.
    """

    def __init__(self, source: MemorySource) -> None:
        self._source = source
        self.scheduled: list[ContainerId] = []

    def scan(self, container_id: ContainerId, cancelled: Callable[[], bool]) -> ScanReport:
        state = self._source.head(container_id).state
        replica = self._source.replicas[container_id]
        # As a scan of files: without blocks that have none, and without lost chunks.
        tree = ContainerTree.of(
            container_id,
            [
                BlockTree.live(block.block_id, [one for one in block.chunks if one.length_bytes])
                for block in replica.scanned_tree().blocks
                if block.block_id in replica.files
            ],
        )
        replica.tree = encode_tree(tree)
        return ScanReport(
            container_id, state, tree.data_checksum or 0, sum(map(len, replica.files.values()))
        )

    def schedule(self, container_id: ContainerId) -> None:
        self.scheduled.append(container_id)


class MemoryStatus:
    """An agent with nothing to tell."""

    def __init__(self, status: AgentStatus) -> None:
        self._status = status

    def status(self) -> AgentStatus:
        return self._status


class MemoryPeer:
    """A peer that reads its source directly, with the manners of the adapters that
    cross a network.
    """

    def __init__(self, peer_id: PeerId, source: MemorySource) -> None:
        self.peer_id = peer_id
        self.source = source

    def tree(self, container_id: ContainerId) -> ContainerTree:
        self._check(container_id)
        if not self.source.head(container_id).state.is_closed:
            raise PeerRefusedError(
                f"container {container_id} is not closed", result="container_state"
            )
        try:
            raw = self.source.tree_bytes(container_id, build_missing=False)
        except ReconcileError as error:
            raise PeerRefusedError(error.message, result=error.code) from error
        tree = tree_from_bytes(raw, container_id)
        check_tree(tree)
        return tree

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        self._check(container_id)
        records = {block_id: self.source.record(container_id, block_id) for block_id in block_ids}
        return {block_id: record for block_id, record in records.items() if record is not None}

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        assert all(
            record_chunk.offset <= one.offset and one.end <= record_chunk.end for one in ranges
        )
        self._check(container_id)
        short = False
        for one in ranges:
            try:
                data = self.source.read(container_id, block_id, one.offset, one.length_bytes)
            except BlockNotFoundError as error:
                raise PeerRefusedError(error.message, result=error.code) from error
            short |= len(data) < one.length_bytes
            if data:
                yield Piece(one.offset, data)
        if short:
            raise PeerRefusedError(f"the file of block {block_id} ends early", result="short_read")

    def close(self) -> None:
        pass

    def _check(self, container_id: ContainerId) -> None:
        try:
            self.source.head(container_id)
        except ContainerNotFoundError as error:
            raise PeerRefusedError(error.message, result=error.code) from error


class Evil(Enum):
    """How a peer can misbehave without ceasing to speak the protocol."""

    NEVER_ANSWERS = "never_answers"
    ANSWERS_ONCE = "answers_once"
    NONSENSE = "nonsense"
    BAD_BYTES = "bad_bytes"
    BAD_BYTES_SOMETIMES = "bad_bytes_sometimes"
    SHORT_BYTES = "short_bytes"
    NO_BYTES = "no_bytes"
    EMPTY_TREE = "empty_tree"
    ALL_DELETED = "all_deleted"
    ALL_CORRUPT = "all_corrupt"
    TREE_OF_ANOTHER_CONTENT = "tree_of_another_content"
    CHANGING_TREE = "changing_tree"
    NO_RECORDS = "no_records"
    RECORDS_WITHOUT_CHECKSUMS = "records_without_checksums"
    RECORDS_OF_BAD_BYTES = "records_of_bad_bytes"
    # Each chunk lacks its last checksum, on record and in the tree.
    RECORDS_CUT_SHORT = "records_cut_short"


class EvilPeer(MemoryPeer):
    """A peer that misbehaves in one way; its lies are the same for the same seed."""

    def __init__(self, peer_id: PeerId, source: MemorySource, evil: Evil, seed: int = 0) -> None:
        super().__init__(peer_id, source)
        self.evil = evil
        self._random = random.Random(seed)
        self._calls = 0

    def tree(self, container_id: ContainerId) -> ContainerTree:
        self._answer()
        honest = super().tree(container_id)
        match self.evil:
            case Evil.EMPTY_TREE:
                return ContainerTree.of(container_id, ())
            case Evil.ALL_DELETED:
                return ContainerTree.of(
                    container_id,
                    [BlockTree.tombstone(b.block_id, b.data_checksum) for b in honest.blocks],
                )
            case Evil.ALL_CORRUPT:
                return self._mapped(honest, lambda chunk: replace(chunk, checksum_matches=False))
            case Evil.TREE_OF_ANOTHER_CONTENT | Evil.CHANGING_TREE:
                salt = self._calls if self.evil is Evil.CHANGING_TREE else 1
                return self._mapped(
                    honest, lambda chunk: replace(chunk, data_checksum=chunk.data_checksum ^ salt)
                )
            case Evil.RECORDS_CUT_SHORT:
                return self._of_short_records(honest)
            case _:
                return honest

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        self._answer()
        honest = super().records(container_id, block_ids)
        match self.evil:
            case Evil.NO_RECORDS:
                return {}
            case Evil.RECORDS_WITHOUT_CHECKSUMS:
                return {
                    block_id: _with_chunks(record, _unverifiable)
                    for block_id, record in honest.items()
                }
            case Evil.RECORDS_OF_BAD_BYTES:
                return {
                    block_id: _with_chunks(record, _of_bad_bytes)
                    for block_id, record in honest.items()
                }
            case Evil.RECORDS_CUT_SHORT:
                return {
                    block_id: _with_chunks(record, _cut_short)
                    for block_id, record in honest.items()
                }
            case _:
                return honest

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        self._answer()
        if self.evil is Evil.NO_BYTES:
            raise PeerRefusedError(f"the file of block {block_id} ends early", result="short_read")
        for piece in super().read(container_id, block_id, record_chunk, ranges):
            if self.evil is Evil.SHORT_BYTES:
                yield Piece(piece.offset, piece.data[:-1])
                raise PeerRefusedError(
                    f"the file of block {block_id} ends early", result="short_read"
                )
            bad = self.evil in _BAD_BYTES or (
                self.evil is Evil.BAD_BYTES_SOMETIMES and self._random.random() < 0.5
            )
            yield Piece(piece.offset, bytes(byte ^ 0x55 for byte in piece.data)) if bad else piece

    def _answer(self) -> None:
        self._calls += 1
        if self.evil is Evil.NEVER_ANSWERS or (self.evil is Evil.ANSWERS_ONCE and self._calls > 1):
            raise PeerUnavailableError(f"{self.peer_id} did not answer in time")
        if self.evil is Evil.NONSENSE:
            raise RemoteProtocolError(f"{self.peer_id} sent bytes that are no answer")

    @staticmethod
    def _mapped(tree: ContainerTree, change: Callable[[ChunkTree], ChunkTree]) -> ContainerTree:
        return ContainerTree.of(
            tree.container_id,
            [
                b if b.deleted else BlockTree.live(b.block_id, map(change, b.chunks))
                for b in tree.blocks
            ],
        )

    def _of_short_records(self, honest: ContainerTree) -> ContainerTree:
        records = super().records(honest.container_id, [b.block_id for b in honest.blocks])
        blocks = []
        for block in honest.blocks:
            record = records.get(block.block_id)
            short = _with_chunks(record, _cut_short).by_offset if record else {}
            leaves = [
                replace(chunk, data_checksum=short[chunk.offset].data_checksum)
                if chunk.offset in short and chunk.checksum_matches
                else chunk
                for chunk in block.chunks
            ]
            blocks.append(block if block.deleted else BlockTree.live(block.block_id, leaves))
        return ContainerTree.of(honest.container_id, blocks)


_BAD_BYTES = {Evil.BAD_BYTES, Evil.RECORDS_OF_BAD_BYTES}


def _with_chunks(record: BlockRecord, change: Callable[[ChunkRecord], ChunkRecord]) -> BlockRecord:
    return replace(record, chunks=tuple(change(chunk) for chunk in record.chunks))


def _unverifiable(chunk: ChunkRecord) -> ChunkRecord:
    return replace(chunk, checksums=(), checksum_type=ChecksumType.NONE)


def _cut_short(chunk: ChunkRecord) -> ChunkRecord:
    return replace(chunk, checksums=chunk.checksums[:-1])


def _of_bad_bytes(chunk: ChunkRecord) -> ChunkRecord:
    return replace(chunk, checksums=tuple(entry[::-1] for entry in chunk.checksums))
