"""Scan a container: compare its data with its records; produce findings and a tree.

All rules that affect the tree are those of Ozone's container scanner, so that our root
equals the one that a datanode reports for the same bytes. First the folder and the
descriptor are checked; if they fail, nothing else is read and the tree is empty. Then
every chunk is read window by window. A chunk that does not match enters the tree with
the checksums of the bytes on disk, marked as not matching.

One deliberate difference: an invalid record costs its own block only. Ozone stops at
the first.

Data are read into a buffer, or mapped by a worker process, which is faster. The
worker's result counts only if it equals the record. All other chunks are read again
with plain reads, so that every finding comes from a plain read.
"""

import contextlib
import errno
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from merkle.checksum import WIDTH, fold, window_checksums
from merkle.errors import RecordInvalidError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from ozone.containers import Container
from ozone.errors import ContainerNotFoundError, DescriptorError, MappedReadError
from ozone.mapped import RANGES_MAX, MappedRange, MappedReader, MappedRequest
from runtime.disk import Reader
from runtime.errors import BusyError, DatabaseError, DiskError, OperationInterruptedError

# Measured: a scan gets faster with each doubling up to this size, but not beyond. Most
# chunks have this size, so each takes one read and one call of the checksum kernel.
BUFFER_BYTES = 4 << 20
# The bytes of one request to the worker; one more request is queued. It bounds what is
# read after a cancel, or ahead of a rate limit. Smaller requests were slower.
MAPPED_BYTES = 32 << 20
# File handles ran out, or this process may not read the file: that proves nothing about
# the container.
_INCONCLUSIVE = {
    errno.errorcode[number] for number in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM)
}


class FindingType(Enum):
    """The faults that a scan can find, with Ozone's names."""

    MISSING_CONTAINER_DIR = "MISSING_CONTAINER_DIR"
    MISSING_METADATA_DIR = "MISSING_METADATA_DIR"
    MISSING_CONTAINER_FILE = "MISSING_CONTAINER_FILE"
    CORRUPT_CONTAINER_FILE = "CORRUPT_CONTAINER_FILE"
    MISSING_CHUNKS_DIR = "MISSING_CHUNKS_DIR"
    INACCESSIBLE_DB = "INACCESSIBLE_DB"
    MISSING_DATA_FILE = "MISSING_DATA_FILE"
    MISSING_CHUNK = "MISSING_CHUNK"
    INCONSISTENT_CHUNK_LENGTH = "INCONSISTENT_CHUNK_LENGTH"
    CORRUPT_CHUNK = "CORRUPT_CHUNK"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault of the container, of a block, or of a chunk at `offset` in a block."""

    type: FindingType
    block_id: BlockId | None = None
    offset: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class ScanResult:
    """The result of a scan; `tree` has live blocks only, without stored tombstones.

    `bad_windows` has the corrupt and missing windows of the chunks in the tree that do
    not match, by block and offset. `notes` are sentences about what is not a fault.
    `transient` means that all findings come from a lack of file handles or of
    permission and prove nothing. `deleted` means that the container is in state DELETED
    or disappeared during the scan; there are no findings then.
    """

    tree: ContainerTree
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    bytes_read: int = 0
    bad_windows: Mapping[tuple[BlockId, int], frozenset[int]] = field(default_factory=dict)
    transient: bool = False
    deleted: bool = False

    def require_decided(self, container_id: ContainerId) -> None:
        """Check that the scan proves something about the container.

        Raises:
            ContainerNotFoundError: the container is being deleted.
            BusyError: too many files were open, or permission was denied; scan again
                later.
        """
        if self.deleted:
            raise ContainerNotFoundError(
                f"container {container_id} is being deleted", container_id=container_id
            )
        if self.transient:
            raise BusyError(self.inconclusive_text, container_id=container_id)

    @property
    def inconclusive_text(self) -> str:
        """Why a `transient` scan proves nothing."""
        return f"the scan of the container is inconclusive: {self.findings[0].detail}"


def build_from_metadata(container: Container) -> ContainerTree:
    """The tree of the records alone, with empty blocks and chunks without checksums, as
    Ozone builds it at close.

    Raises:
        DatabaseError, RecordInvalidError: as in `Container.records`.
    """
    builder = TreeBuilder(container.container_id)
    for record in container.records():
        _add_record(builder, record)
    return builder.build()


def scan_metadata(container: Container) -> ScanResult:
    """Check folder, descriptor and records; the tree is that of the valid records.

    Raises:
        OperationInterruptedError: the volume was closed meanwhile.
    """
    findings, deleted, transient = _check_folder(container)
    if deleted:
        return _deleted_result(container)
    builder = TreeBuilder(container.container_id)
    notes = _Notes()
    for record in _records(container, findings):
        notes.add(record)
        _add_record(builder, record)
    _check_volume_open(container, findings)
    texts = notes.texts(container)
    return ScanResult(builder.build(), tuple(findings), texts, transient=transient)


def scan(
    container: Container,
    *,
    on_bytes: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    mapped: MappedReader | None = None,
) -> ScanResult:
    """Check the container and read all of its data; `mapped` changes only the speed.

    `on_bytes` gets the size of every piece read and may block to limit the rate;
    `cancelled` is called before each piece.

    Raises:
        OperationInterruptedError: `cancelled` returned True, or the volume was closed
            meanwhile.
        DiskError: a folder cannot be checked.
    """
    findings, deleted, transient = _check_folder(container)
    if deleted:
        return _deleted_result(container)
    if findings:
        return ScanResult(
            ContainerTree.of(container.container_id, ()), tuple(findings), transient=transient
        )
    data = _DataScan(container, on_bytes or _ignore, cancelled or _never)
    data.read_blocks(_records(container, findings), mapped)
    findings += _drop_deleted_blocks(container, data.findings)
    _check_volume_open(container, findings)
    if findings and not container.disk.is_folder(container.folder):
        return _deleted_result(container)
    return ScanResult(
        tree=data.builder.build(),
        findings=tuple(findings),
        notes=data.notes.texts(container),
        bytes_read=data.bytes_read,
        bad_windows=data.bad_windows,
        transient=bool(findings) and data.inconclusive == len(findings),
    )


def lost_chunks(container: Container, tree: ContainerTree) -> dict[BlockId, list[int]]:
    """The offsets, by block, of recorded chunks that a tree of the data does not have.

    Deleted blocks and invalid records are skipped.

    Raises:
        DatabaseError, RecordInvalidError: as in `Container.block_ids`.
    """
    entries = {block.block_id: block for block in tree.blocks}
    lost: dict[BlockId, list[int]] = {}
    for block_id in container.block_ids():
        entry, record = entries.get(block_id), None
        with contextlib.suppress(RecordInvalidError):
            record = container.stored_record(block_id)
        if record is None or (entry and entry.deleted):
            continue
        known = {chunk.offset for chunk in entry.chunks} if entry else set[int]()
        offsets = [
            c.offset
            for c in record.chunks
            if c.is_verifiable and c.length_bytes and c.offset not in known
        ]
        if offsets:
            lost[block_id] = offsets
    return lost


def _check_folder(container: Container) -> tuple[list[Finding], bool, bool]:
    """The findings on folder and descriptor, and the flags `deleted` and `transient` of
    a ScanResult.

    The paths in the descriptor are not checked, since volumes move.
    """

    def fail(
        kind: FindingType, detail: str, *, transient: bool = False
    ) -> tuple[list[Finding], bool, bool]:
        return [Finding(kind, detail=detail)], False, transient

    if not container.disk.is_folder(container.folder):
        return fail(FindingType.MISSING_CONTAINER_DIR, f"{container.folder} is missing")
    if not container.disk.is_folder(container.metadata_folder):
        return fail(FindingType.MISSING_METADATA_DIR, f"{container.metadata_folder} is missing")
    try:
        state = container.descriptor.state
    except DiskError as error:
        missing = error.facts.get("missing")
        kind = FindingType.MISSING_CONTAINER_FILE if missing else FindingType.CORRUPT_CONTAINER_FILE
        return fail(kind, error.message, transient=error.facts.get("errno") in _INCONCLUSIVE)
    except DescriptorError as error:
        return fail(FindingType.CORRUPT_CONTAINER_FILE, error.message)
    if state is ReplicaState.DELETED:
        return [], True, False
    if not container.disk.is_folder(container.chunks_folder):
        return fail(FindingType.MISSING_CHUNKS_DIR, f"{container.chunks_folder} is missing")
    return [], False, False


def _records(container: Container, findings: list[Finding]) -> Iterator[BlockRecord]:
    """Every valid record; the others are added to the findings."""
    try:
        for block_id in container.block_ids():
            try:
                record = container.stored_record(block_id)
            except RecordInvalidError as error:
                findings.append(
                    Finding(FindingType.INACCESSIBLE_DB, block_id, detail=error.message)
                )
                continue
            if record is not None:
                yield record
    except (DatabaseError, RecordInvalidError) as error:
        findings.append(Finding(FindingType.INACCESSIBLE_DB, detail=error.message))


def _check_volume_open(container: Container, findings: list[Finding]) -> None:
    """Interrupt the scan if the volume was closed: the findings prove nothing then (row
    S17).
    """
    if findings and container.volume.is_closed:
        text = f"the volume was closed during the scan of container {container.container_id}"
        raise OperationInterruptedError(text, container_id=container.container_id)


def _drop_deleted_blocks(container: Container, findings: list[Finding]) -> list[Finding]:
    """The findings without missing files of blocks deleted during the scan."""
    missing = {
        finding.block_id for finding in findings if finding.type is FindingType.MISSING_DATA_FILE
    }
    if not missing:
        return findings
    container.volume.refresh()
    try:
        recorded = set(container.block_ids())
    except (DatabaseError, RecordInvalidError):
        return findings
    return [finding for finding in findings if finding.block_id not in missing - recorded]


def _add_record(builder: TreeBuilder, record: BlockRecord) -> None:
    builder.add_block(record.block_id)
    for chunk in record.chunks:
        builder.add_chunk(
            record.block_id, ChunkTree(chunk.offset, chunk.length_bytes, chunk.data_checksum)
        )


def _deleted_result(container: Container) -> ScanResult:
    return ScanResult(
        ContainerTree.of(container.container_id, ()),
        notes=("the container is deleted",),
        deleted=True,
    )


class _Notes:
    """Notes about what is unusual but not a fault."""

    def __init__(self) -> None:
        self._chunks_unverifiable = 0
        self._blocks_unverifiable = 0

    def add(self, record: BlockRecord) -> None:
        """Count the chunks of a record that were written without checksums."""
        chunks = sum(not chunk.is_verifiable for chunk in record.chunks)
        self._chunks_unverifiable += chunks
        self._blocks_unverifiable += chunks > 0

    def texts(self, container: Container) -> tuple[str, ...]:
        """The notes, one sentence each."""
        notes = []
        if self._chunks_unverifiable:
            notes.append(
                f"{self._chunks_unverifiable} chunks in {self._blocks_unverifiable} blocks were"
                " written without checksums (type NONE) and cannot be verified"
            )
        # If the listing fails, there is a finding for it already.
        with contextlib.suppress(DatabaseError, DiskError, RecordInvalidError):
            notes += [
                f"orphan file {name}: no record names it" for name in container.orphan_files()
            ]
        return tuple(notes)


def allocate_large_pages(length_bytes: int) -> mmap.mmap:
    """Memory in large pages, if the system has them: copies to it are up to a tenth
    faster. A process that is forked has its own.
    """
    memory = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # OSError: a kernel without large pages. AttributeError: not Linux.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Buffer(threading.local):
    """A page-aligned read buffer per thread."""

    def __init__(self) -> None:
        self._view = memoryview(allocate_large_pages(BUFFER_BYTES))

    def get(self, length: int) -> memoryview:
        """The buffer, or a new one if a window is larger: at least `length` bytes."""
        if length > len(self._view):
            return memoryview(bytearray(length))
        return self._view


_buffer = _Buffer()


@dataclass
class _ChunkReading:
    """The result of reading one chunk; `bad` are the indexes of windows that differ."""

    length_bytes: int = 0
    checksums: list[bytes] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    error: DiskError | None = None


@dataclass
class _MappedBlock:
    """One block whose chunks are requested from the worker, group by group."""

    record: BlockRecord
    groups: list[list[ChunkRecord]]
    requested: int = 0
    answered: int = 0
    # The worker died on this file or could not open it: no more of it is requested.
    failed: bool = False
    # The chunks that match their records, by offset.
    proven: dict[int, _ChunkReading] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether all answers arrived and nothing more will be requested."""
        all_requested = self.failed or self.requested == len(self.groups)
        return all_requested and self.answered == self.requested

    def accept(self, answer: bytes | MappedReadError) -> Iterator[ChunkRecord]:
        """Process the answer for the next group; yields the chunks that match."""
        group = self.groups[self.answered]
        self.answered += 1
        if isinstance(answer, MappedReadError):
            self.failed = True
            return
        at = 0
        for chunk in group:
            width = -(-chunk.length_bytes // chunk.bytes_per_checksum) * WIDTH[chunk.checksum_type]
            entries = answer[at : at + width]
            at += width
            if entries == chunk.entries:
                self.proven[chunk.offset] = _ChunkReading(chunk.length_bytes, [entries])
                yield chunk


class _DataScan:
    """Reads the blocks of one container."""

    def __init__(
        self, container: Container, on_bytes: Callable[[int], None], cancelled: Callable[[], bool]
    ) -> None:
        self.builder = TreeBuilder(container.container_id)
        self.findings: list[Finding] = []
        self.notes = _Notes()
        self.bytes_read = 0
        self.bad_windows: dict[tuple[BlockId, int], frozenset[int]] = {}
        self.inconclusive = 0
        self._container = container
        self._on_bytes = on_bytes
        self._cancelled = cancelled

    def read_blocks(self, records: Iterator[BlockRecord], mapped: MappedReader | None) -> None:
        """Read all blocks."""
        if mapped is None:
            for record in records:
                self._read_block(record, {})
            return
        queue: deque[_MappedBlock] = deque()
        with contextlib.closing(mapped.answers(self._requests(records, queue))) as answers:
            for answer in answers:
                self._check_cancelled()
                block = next(block for block in queue if block.answered < block.requested)
                for chunk in block.accept(answer):
                    self._count(chunk.length_bytes)
                while queue and queue[0].is_done:
                    self._read_block(queue[0].record, queue.popleft().proven)
        for block in queue:
            self._read_block(block.record, block.proven)

    def _read_block(self, record: BlockRecord, proven: Mapping[int, _ChunkReading]) -> None:
        """Read the chunks of one block that are not proven, and enter all of them."""
        self.notes.add(record)
        if not record.chunks:
            return
        chunks = [chunk for chunk in record.chunks if chunk.is_verifiable]
        try:
            with self._container.open_block(record.block_id) as reader:
                readings = [
                    proven.get(chunk.offset) or self._read(reader, chunk) for chunk in chunks
                ]
        except DiskError as error:
            if error.facts.get("missing"):
                self._report_missing_file(record)
                return
            # Ozone opens the file for each chunk and fails each time.
            readings = [_ChunkReading(error=error) for _ in chunks]
        # After all reads, since each read evicts other data from the processor caches.
        for chunk, reading in zip(chunks, readings, strict=True):
            self._enter(record.block_id, chunk, reading)

    def _report_missing_file(self, record: BlockRecord) -> None:
        # The writer of a short erasure-coded stripe records empty blocks that never get
        # a file.
        if record.chunks[0].length_bytes == 0:
            return
        path = self._container.block_path(record.block_id)
        self.findings.append(
            Finding(FindingType.MISSING_DATA_FILE, record.block_id, detail=f"{path} is missing")
        )

    def _requests(
        self, records: Iterator[BlockRecord], queue: "deque[_MappedBlock]"
    ) -> Iterator[MappedRequest]:
        """The worker's requests, block by block; each block is queued first."""
        for record in records:
            block = _MappedBlock(record, _group_chunks(record))
            queue.append(block)
            path = self._container.block_path(record.block_id)
            while not block.failed and block.requested < len(block.groups):
                group = block.groups[block.requested]
                block.requested += 1
                ranges = (
                    MappedRange(c.offset, c.length_bytes, c.checksum_type, c.bytes_per_checksum)
                    for c in group
                )
                yield MappedRequest(path, tuple(ranges))

    def _read(self, reader: Reader, chunk: ChunkRecord) -> _ChunkReading:
        """Read one chunk, whole windows at a time, and compare it with its record."""
        reading = _ChunkReading()
        window, width = chunk.bytes_per_checksum, WIDTH[chunk.checksum_type]
        recorded = chunk.entries
        buffer = _buffer.get(min(window, chunk.length_bytes))
        step = max(window, len(buffer) // window * window)
        while reading.length_bytes < chunk.length_bytes:
            self._check_cancelled()
            start = reading.length_bytes
            wanted = min(step, chunk.length_bytes - start)
            try:
                count = reader.read_into(buffer[:wanted], chunk.offset + start)
            except DiskError as error:
                reading.error = error
                break
            if count:
                first = start // window
                checksums = window_checksums(buffer[:count], chunk.checksum_type, window)
                expected = recorded[first * width : first * width + len(checksums)]
                if checksums != expected:
                    differing = _differing_entries(checksums, expected, width)
                    reading.bad |= {first + i for i in differing}
                reading.checksums.append(checksums)
                reading.length_bytes += count
                self._count(count)
            if count < wanted:
                break
        return reading

    def _check_cancelled(self) -> None:
        if self._cancelled():
            raise OperationInterruptedError(
                f"the scan of container {self._container.container_id} was cancelled"
            )

    def _count(self, length_bytes: int) -> None:
        self.bytes_read += length_bytes
        self._on_bytes(length_bytes)

    def _enter(self, block_id: BlockId, chunk: ChunkRecord, reading: _ChunkReading) -> None:
        """Enter one chunk into the tree, with at most one finding."""
        self.builder.add_block(block_id)
        kind, detail = None, ""
        if reading.error:
            kind, detail = FindingType.CORRUPT_CHUNK, reading.error.message
            self.inconclusive += reading.error.facts.get("errno") in _INCONCLUSIVE
        elif reading.bad:
            kind, detail = (
                FindingType.CORRUPT_CHUNK,
                f"{len(reading.bad)} of {len(chunk.checksums)} windows differ",
            )
        elif reading.length_bytes == 0 < chunk.length_bytes:
            kind, detail = FindingType.MISSING_CHUNK, "the file ends before the chunk"
        elif reading.length_bytes < chunk.length_bytes:
            kind = FindingType.INCONSISTENT_CHUNK_LENGTH
            detail = f"the file has {reading.length_bytes} of {chunk.length_bytes} bytes"
        if kind is not None:
            self.findings.append(Finding(kind, block_id, chunk.offset, detail))
        if kind is FindingType.MISSING_CHUNK:
            return
        length = chunk.length_bytes if reading.error else reading.length_bytes
        checksum = fold(b"".join(reading.checksums))
        self.builder.add_chunk(block_id, ChunkTree(chunk.offset, length, checksum, kind is None))
        if kind is not None:
            bad = reading.bad
            if reading.length_bytes < chunk.length_bytes:
                bad |= set(
                    range(reading.length_bytes // chunk.bytes_per_checksum, len(chunk.checksums))
                )
            self.bad_windows[block_id, chunk.offset] = frozenset(bad)


def _group_chunks(record: BlockRecord) -> list[list[ChunkRecord]]:
    """The verifiable chunks in groups of MAPPED_BYTES; a larger chunk stands alone."""
    groups: list[list[ChunkRecord]] = []
    room = 0
    for chunk in record.chunks:
        if not chunk.is_verifiable:
            continue
        room -= chunk.length_bytes
        if not groups or room < 0 or len(groups[-1]) == RANGES_MAX:
            groups.append([])
            room = MAPPED_BYTES - chunk.length_bytes
        groups[-1].append(chunk)
    return groups


def _differing_entries(ours: bytes, theirs: bytes, width: int) -> Iterator[int]:
    return (
        i
        for i in range(len(ours) // width)
        if ours[i * width : (i + 1) * width] != theirs[i * width :][:width]
    )


def _ignore(_: int) -> None:
    pass


def _never() -> bool:
    return False
