"""Read all data of one replica over the wire, and check each window of it.

The result is what a scan on the datanode would find: the tree of the bytes, the bad
windows of chunks that do not match their record, and the chunks of which the file has
not a byte. The datanode itself stores nothing of it, and does not notice what it is.

Where an agent has scanned the replica on its host, only what it did not find healthy
crosses the network.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from live.ports import DatanodeReader
from merkle.checksum import Buffer, fold, window_checksums
from merkle.errors import RecordInvalidError
from merkle.limits import TREE_BLOCKS_MAX
from merkle.merge import merge
from merkle.record import BlockRecord, ChunkRecord
from merkle.survey import ChunkPlace
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from merkle.windows import bad_windows, is_sound
from ozone.ports import ByteRange
from repair.ports import LACKING_RESULTS
from runtime.errors import PeerRefusedError, RemoteProtocolError

# Ozone's key for the length of a block over all of its cells of data.
_GROUP_LENGTH_KEY = "blockGroupLen"
# Checksums that are kept of one replica: three times those of the largest container, at
# 32 bytes for each 8 KiB.
_KEPT_BYTES_MAX = 64 << 20
# Two of each block of the largest container; the tree of so many takes some 400 MiB.
_CHUNKS_MAX = 2 * TREE_BLOCKS_MAX


@dataclass(frozen=True, slots=True)
class DeepReading:
    """What the data of a replica showed."""

    tree: ContainerTree
    bad_windows: dict[ChunkPlace, frozenset[int]]
    lost: frozenset[ChunkPlace]
    bytes_read: int
    # How many windows the chunks have that are bad or lost.
    window_counts: dict[ChunkPlace, int] = field(default_factory=dict)
    # Chunks without checksums, which nothing can prove.
    unverifiable: int = 0
    # Of an erasure-coded replica alone, whose stripes are compared by them.
    records: dict[BlockId, BlockRecord] = field(default_factory=dict)


def read_replica(
    reader: DatanodeReader,
    container_id: ContainerId,
    stored: ContainerTree,
    on_bytes: Callable[[int], None],
    *,
    is_erasure_coded: bool = False,
    is_scanned: bool = False,
) -> DeepReading:
    """Read and check all chunks on record. `stored` is the replica's tree file, which
    has its tombstones; `on_bytes` is called with each count of bytes read, and may
    wait. With `is_scanned` it is the tree of a scan of the data just now: chunks that
    it shows as on record are not read again.

    Raises:
        PeerUnavailableError: the datanode did not answer in time.
        PeerRefusedError: it refused to read.
        RemoteProtocolError: it sent something invalid, or more records than a container
            has.
        RecordInvalidError: a record contradicts itself, or is of an erasure-coded block
            and does not say how long that is.
    """
    reading = _Reading(reader, container_id, on_bytes, stored if is_scanned else None)
    deleted = {block.block_id for block in stored.blocks if block.deleted}
    for count, record in enumerate(reader.list_records(container_id)):
        # A listing may have no end.
        if count >= TREE_BLOCKS_MAX:
            raise RemoteProtocolError(
                f"container {container_id} has more than {TREE_BLOCKS_MAX} blocks"
            )
        if record.container_id != container_id:
            raise RecordInvalidError(f"container {container_id} has a record of another one")
        if record.block_id not in deleted:
            if is_erasure_coded:
                reading.keep(record)
            reading.read_block(record)
    return DeepReading(
        merge(reading.builder.build(), stored),
        reading.bad_windows,
        frozenset(reading.lost),
        reading.bytes_read,
        reading.window_counts,
        reading.unverifiable,
        reading.records,
    )


def group_length_bytes(record: BlockRecord) -> int:
    """The length of an erasure-coded block over all of its cells of data.

    Raises:
        RecordInvalidError: the record does not have it.
    """
    value = dict(record.metadata).get(_GROUP_LENGTH_KEY) or ""
    if not (value.isascii() and value.isdecimal() and len(value) < 20):
        raise RecordInvalidError(f"block {record.block_id} has no length of its block group")
    return int(value)


@dataclass
class _Reading:
    """The reading of one replica as far as it got."""

    reader: DatanodeReader
    container_id: ContainerId
    on_bytes: Callable[[int], None]
    scanned: ContainerTree | None = None
    builder: TreeBuilder = field(init=False)
    bad_windows: dict[ChunkPlace, frozenset[int]] = field(default_factory=dict)
    lost: set[ChunkPlace] = field(default_factory=set)
    window_counts: dict[ChunkPlace, int] = field(default_factory=dict)
    bytes_read: int = 0
    unverifiable: int = 0
    chunks: int = 0
    records: dict[BlockId, BlockRecord] = field(default_factory=dict)
    kept_bytes: int = 0
    # Of the chunk that is read, and used again: fresh memory for each costs as much as
    # the checksums.
    buffer: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.builder = TreeBuilder(self.container_id)

    def keep(self, record: BlockRecord) -> None:
        """Keep the record of an erasure-coded block."""
        group_length_bytes(record)
        self.kept_bytes += sum(
            len(one.entries) + len(one.stripe_checksum or b"") for one in record.chunks
        )
        if self.kept_bytes > _KEPT_BYTES_MAX:
            raise RemoteProtocolError(
                f"container {self.container_id} has more checksums than a container holds"
            )
        self.records[record.block_id] = record

    def read_block(self, record: BlockRecord) -> None:
        """Read and enter the chunks of one block."""
        wanted = deque[ChunkRecord]()
        for chunk in record.chunks:
            self.chunks += 1
            if self.chunks > _CHUNKS_MAX:
                raise RemoteProtocolError(
                    f"container {self.container_id} has more chunks than a container holds"
                )
            if not chunk.is_verifiable:
                self.unverifiable += 1
                continue
            if not is_sound(chunk):
                text = f"block {record.block_id} has a record that proves nothing"
                raise RecordInvalidError(text)
            if self._is_scanned_lost(record, chunk):
                self._enter(record, chunk, b"")
            elif not self._is_scanned_healthy(record, chunk):
                wanted.append(chunk)
        ends: dict[int, int] = {}
        for chunk, one, pieces in self._ranges(record, list(wanted)):
            while wanted[0] is not chunk:
                self._enter(record, wanted.popleft(), self._data(ends))
                ends = {}
            start = one.offset - chunk.offset
            ends[start] = self._keep_pieces(chunk, start, pieces)
        while wanted:
            self._enter(record, wanted.popleft(), self._data(ends))
            ends = {}

    def _ranges(
        self, record: BlockRecord, chunks: Sequence[ChunkRecord]
    ) -> Iterator[tuple[ChunkRecord, ByteRange, Sequence[bytes]]]:
        """What the datanode has of these chunks; nothing if it has no such file."""
        if not chunks:
            return
        try:
            yield from self.reader.read_block(self.container_id, record.block_id, chunks)
        except PeerRefusedError as error:
            if error.facts["result"] not in LACKING_RESULTS:
                raise

    def _is_scanned_healthy(self, record: BlockRecord, chunk: ChunkRecord) -> bool:
        """Enter a chunk that the scan found as on record; returns whether it did."""
        block = self.scanned.block(record.block_id) if self.scanned else None
        healthy = ChunkTree(chunk.offset, chunk.length_bytes, chunk.data_checksum)
        if block is None or block.deleted or healthy not in block.chunks:
            return False
        self.builder.add_chunk(record.block_id, healthy)
        return True

    def _is_scanned_lost(self, record: BlockRecord, chunk: ChunkRecord) -> bool:
        """Whether the scan looked for this chunk, and found not a byte of it. Of a
        block that the scan does not know nothing is known.
        """
        block = self.scanned.block(record.block_id) if self.scanned else None
        if block is None or block.deleted:
            return False
        return all(one.offset != chunk.offset for one in block.chunks)

    def _keep_pieces(self, chunk: ChunkRecord, start: int, pieces: Sequence[bytes]) -> int:
        """Copy pieces of a chunk to the buffer, from `start` on; returns where they
        end.
        """
        if len(self.buffer) < chunk.length_bytes:
            self.buffer = bytearray(chunk.length_bytes)
        at = start
        with memoryview(self.buffer) as view:
            for piece in pieces:
                view[at : at + len(piece)] = piece
                at += len(piece)
        self.bytes_read += at - start
        self.on_bytes(at - start)
        return at

    def _data(self, ends: Mapping[int, int]) -> Buffer:
        """The bytes of a chunk of which these ranges were read, up to the first that
        the file lacks; valid until the next chunk.
        """
        end = 0
        while (further := ends.get(end, end)) > end:
            end = further
        return memoryview(self.buffer)[:end]

    def _enter(self, record: BlockRecord, chunk: ChunkRecord, data: Buffer) -> None:
        place = record.block_id, chunk.offset
        if not data:
            self.lost.add(place)
            self.window_counts[place] = len(chunk.checksums)
            self.builder.add_block(record.block_id)
            return
        observed = window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum)
        is_whole = observed == chunk.entries
        if not is_whole:
            self.bad_windows[place] = frozenset(bad_windows(chunk, data))
            self.window_counts[place] = len(chunk.checksums)
        self.builder.add_chunk(
            record.block_id, ChunkTree(chunk.offset, len(data), fold(observed), is_whole)
        )
