"""Scan a container: read what is on disk, compare it with what was recorded; findings
and a tree come out.

The rules are those of Ozone's container scanner, to the letter where they reach the
tree, so that a root computed here equals the one that a datanode reports for the same
bytes. First the folder and the descriptor are checked; if they fail, nothing else is
read and the tree is empty. Then every chunk is read window by window. A chunk that does
not match enters the tree with the checksums of the bytes that were found, marked as not
matching.

One deliberate difference: a record that cannot be parsed costs its own block only.
Ozone stops at the first.

Data are read into a buffer, or mapped by a worker process, which is faster. The worker
is believed only where it finds what was recorded: everything else is read again the
plain way, so that every finding is that of a plain read.
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

# Measured: each doubling up to here makes a scan faster, none beyond it does. It is
# also the size of most chunks, so that one costs one read and one call of the kernel.
BUFFER_BYTES = 4 << 20
# One request to the worker covers so much, and one more waits behind it: a rate limit
# and a cancel, which act between requests, let no more pass. Smaller ones, as measured,
# cost more than they are worth.
MAPPED_BYTES = 32 << 20
# Files or descriptors have run out in this process or machine: it says nothing about
# the container.
_EXHAUSTED = {errno.errorcode[errno.EMFILE], errno.errorcode[errno.ENFILE]}


class FindingType(Enum):
    """The faults that a scan can find, by Ozone's names."""

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
    """One fault: of the container, of a block, or of a chunk (at `offset` in the
    block).
    """

    type: FindingType
    block_id: BlockId | None = None
    offset: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class ScanResult:
    """What a scan saw; `tree` holds live blocks only, stored tombstones are laid over
    it by whoever keeps the tree.

    `bad_windows` names, for every chunk that is in the tree and does not match, the
    windows that failed or were not there. `transient`: there are findings, but each of
    them came from a lack of file handles; they prove nothing. `deleted`: the container
    is marked as deleted or went away during the scan; there are no findings.
    """

    tree: ContainerTree
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    bytes_read: int = 0
    bad_windows: Mapping[tuple[BlockId, int], frozenset[int]] = field(default_factory=dict)
    transient: bool = False
    deleted: bool = False

    def require_decided(self, container_id: ContainerId) -> None:
        """Refuse a scan that says nothing about the container.

        Raises:
            ContainerNotFoundError: the container is being deleted.
            BusyError: the system refused to open more files; scan again later.
        """
        if self.deleted:
            raise ContainerNotFoundError(
                f"container {container_id} is being deleted", container_id=container_id
            )
        if self.transient:
            raise BusyError(
                "too many open files; nothing was decided about the container",
                container_id=container_id,
            )


def build_from_metadata(container: Container) -> ContainerTree:
    """The tree by the records alone, as Ozone builds it at close: empty blocks and
    chunks without checksums included.

    Raises:
        DatabaseError, RecordInvalidError: a record cannot be read.
    """
    builder = TreeBuilder(container.container_id)
    for record in container.records():
        _add_record(builder, record)
    return builder.build()


def scan_metadata(container: Container) -> ScanResult:
    """Check folder, descriptor and records, and build the tree by the records that can
    be read.

    Raises:
        OperationInterruptedError: the volume was closed meanwhile.
    """
    findings, deleted, transient = _check_folder(container)
    if deleted:
        return _deleted(container)
    builder = TreeBuilder(container.container_id)
    notes = _Notes()
    for record in _records(container, findings):
        notes.see(record)
        _add_record(builder, record)
    _check_held(container, findings)
    return ScanResult(builder.build(), tuple(findings), notes.all(container), transient=transient)


def scan(
    container: Container,
    *,
    on_bytes: Callable[[int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    mapped: MappedReader | None = None,
) -> ScanResult:
    """Check the container and read all of its data, by `mapped` if given; what comes
    out is the same.

    `on_bytes` is told of every piece read and may wait, which limits the rate;
    `cancelled` is asked before each.

    Raises:
        OperationInterruptedError: `cancelled` said so, or the volume was closed
            meanwhile.
    """
    findings, deleted, transient = _check_folder(container)
    if deleted:
        return _deleted(container)
    if findings:
        return ScanResult(
            ContainerTree.of(container.container_id, ()), tuple(findings), transient=transient
        )
    data = _DataScan(container, on_bytes or _ignore, cancelled or _never)
    data.blocks(_records(container, findings), mapped)
    findings += _still_recorded(container, data.findings)
    _check_held(container, findings)
    if findings and not container.disk.is_folder(container.folder):
        return _deleted(container)
    return ScanResult(
        tree=data.builder.build(),
        findings=tuple(findings),
        notes=data.notes.all(container),
        bytes_read=data.bytes_read,
        bad_windows=data.bad_windows,
        transient=bool(findings) and data.exhausted == len(findings),
    )


def lost_chunks(container: Container, tree: ContainerTree) -> dict[BlockId, list[int]]:
    """The offsets of the chunks that records name and a tree of the data has not, by
    block; deleted ones are not lost.

    Raises:
        DatabaseError, RecordInvalidError: the table cannot be iterated; a record that
            cannot be read is passed over.
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
    """The faults of folder and descriptor; whether the container is marked as deleted;
    whether they prove nothing.

    The descriptor's recorded paths are not compared with where the container was found:
    volumes move.
    """

    def found(
        kind: FindingType, detail: str, *, transient: bool = False
    ) -> tuple[list[Finding], bool, bool]:
        return [Finding(kind, detail=detail)], False, transient

    if not container.disk.is_folder(container.folder):
        return found(FindingType.MISSING_CONTAINER_DIR, f"{container.folder} is not there")
    if not container.disk.is_folder(container.metadata_folder):
        return found(FindingType.MISSING_METADATA_DIR, f"{container.metadata_folder} is not there")
    try:
        state = container.descriptor.state
    except DiskError as error:
        missing = error.facts.get("missing")
        kind = FindingType.MISSING_CONTAINER_FILE if missing else FindingType.CORRUPT_CONTAINER_FILE
        return found(kind, error.message, transient=error.facts.get("errno") in _EXHAUSTED)
    except DescriptorError as error:
        return found(FindingType.CORRUPT_CONTAINER_FILE, error.message)
    if state is ReplicaState.DELETED:
        return [], True, False
    if not container.disk.is_folder(container.chunks_folder):
        return found(FindingType.MISSING_CHUNKS_DIR, f"{container.chunks_folder} is not there")
    return [], False, False


def _records(container: Container, findings: list[Finding]) -> Iterator[BlockRecord]:
    """Every record that can be read; what cannot becomes a finding."""
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


def _check_held(container: Container, findings: list[Finding]) -> None:
    """End without a word about the container if its database was taken away under the
    scan (row S17).
    """
    if findings and container.volume.is_closed:
        text = f"the volume was closed during the scan of container {container.container_id}"
        raise OperationInterruptedError(text, container_id=container.container_id)


def _still_recorded(container: Container, findings: list[Finding]) -> list[Finding]:
    """The findings without those on files of blocks that were deleted since their
    records were read.
    """
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


def _deleted(container: Container) -> ScanResult:
    return ScanResult(
        ContainerTree.of(container.container_id, ()),
        notes=("the container is deleted",),
        deleted=True,
    )


class _Notes:
    """What is worth saying and is no fault."""

    def __init__(self) -> None:
        self._chunks_unverifiable = 0
        self._blocks_unverifiable = 0

    def see(self, record: BlockRecord) -> None:
        """Count the chunks of a record that were written without checksums."""
        chunks = sum(not chunk.is_verifiable for chunk in record.chunks)
        self._chunks_unverifiable += chunks
        self._blocks_unverifiable += chunks > 0

    def all(self, container: Container) -> tuple[str, ...]:
        """What is worth a note, one sentence each."""
        notes = []
        if self._chunks_unverifiable:
            notes.append(
                f"{self._chunks_unverifiable} chunks in {self._blocks_unverifiable} blocks were"
                " written without checksums (type NONE) and cannot be verified"
            )
        # Where these fail, findings say so already.
        with contextlib.suppress(DatabaseError, DiskError, RecordInvalidError):
            notes += [
                f"orphan file {name}: no record names it" for name in container.orphan_files()
            ]
        return tuple(notes)


def large_pages(length_bytes: int) -> mmap.mmap:
    """Memory in large pages, where the system has them: a copy into it is up to a tenth
    faster.
    """
    memory = mmap.mmap(-1, length_bytes)
    # A kernel without them refuses; other systems do not even have the word.
    with contextlib.suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class _Buffer(threading.local):
    """One read buffer a thread, page-aligned."""

    def __init__(self) -> None:
        self._view = memoryview(large_pages(BUFFER_BYTES))

    def of(self, length: int) -> memoryview:
        """At least `length` bytes, which only a window larger than the buffer makes
        larger.
        """
        if length > len(self._view):
            return memoryview(bytearray(length))
        return self._view


_buffer = _Buffer()


@dataclass
class _Observed:
    """One chunk as read."""

    length_bytes: int = 0
    checksums: list[bytes] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)
    error: DiskError | None = None


@dataclass
class _MappedBlock:
    """One block whose chunks the worker is asked for, group by group."""

    record: BlockRecord
    groups: list[list[ChunkRecord]]
    asked: int = 0
    answered: int = 0
    # The worker died on this file, or was refused it: no more of it is asked for.
    failed: bool = False
    proven: dict[int, _Observed] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether every group that was asked for was answered."""
        return self.answered == self.asked and (self.failed or self.asked == len(self.groups))

    def take(self, answer: bytes | MappedReadError) -> Iterator[ChunkRecord]:
        """Note the answer to the next group; yields the chunks that hold what was
        recorded.
        """
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
                self.proven[chunk.offset] = _Observed(chunk.length_bytes, [entries])
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
        self.exhausted = 0
        self._container = container
        self._on_bytes = on_bytes
        self._cancelled = cancelled

    def blocks(self, records: Iterator[BlockRecord], mapped: MappedReader | None) -> None:
        """Read all blocks."""
        if mapped is None:
            for record in records:
                self._block(record, {})
            return
        line: deque[_MappedBlock] = deque()
        with contextlib.closing(mapped.answers(self._requests(records, line))) as answers:
            for answer in answers:
                self._go_on()
                block = next(block for block in line if block.answered < block.asked)
                for chunk in block.take(answer):
                    self._count(chunk.length_bytes)
                while line and line[0].is_done:
                    self._block(line[0].record, line.popleft().proven)
        for block in line:
            self._block(block.record, block.proven)

    def _block(self, record: BlockRecord, proven: Mapping[int, _Observed]) -> None:
        """Read of one block what is not proven to hold what was recorded, and note what
        there is.
        """
        self.notes.see(record)
        if not record.chunks:
            return
        chunks = [chunk for chunk in record.chunks if chunk.is_verifiable]
        try:
            with self._container.open_block(record.block_id) as reader:
                observed = [
                    proven.get(chunk.offset) or self._read(reader, chunk) for chunk in chunks
                ]
        except DiskError as error:
            if error.facts.get("missing"):
                self._file_missing(record)
                return
            # Ozone opens the file for each chunk, and fails each time.
            observed = [_Observed(error=error) for _ in chunks]
        # Behind all reads: each drives what is not data out of the processor's caches.
        for chunk, seen in zip(chunks, observed, strict=True):
            self._judge(record.block_id, chunk, seen)

    def _file_missing(self, record: BlockRecord) -> None:
        # The writer of a short erasure-coded stripe records blocks of no bytes that
        # never get a file.
        if record.chunks[0].length_bytes == 0:
            return
        path = self._container.block_path(record.block_id)
        self.findings.append(
            Finding(FindingType.MISSING_DATA_FILE, record.block_id, detail=f"{path} is not there")
        )

    def _requests(
        self, records: Iterator[BlockRecord], line: "deque[_MappedBlock]"
    ) -> Iterator[MappedRequest]:
        """What to ask the worker, block by block; each block is put into the line
        first.
        """
        for record in records:
            block = _MappedBlock(record, _groups(record))
            line.append(block)
            path = self._container.block_path(record.block_id)
            while not block.failed and block.asked < len(block.groups):
                group = block.groups[block.asked]
                block.asked += 1
                ranges = (
                    MappedRange(c.offset, c.length_bytes, c.checksum_type, c.bytes_per_checksum)
                    for c in group
                )
                yield MappedRequest(path, tuple(ranges))

    def _read(self, reader: Reader, chunk: ChunkRecord) -> _Observed:
        """Read one chunk through the buffer, whole windows at a time, and compare as it
        goes.
        """
        observed = _Observed()
        window, width = chunk.bytes_per_checksum, WIDTH[chunk.checksum_type]
        recorded = chunk.entries
        buffer = _buffer.of(min(window, chunk.length_bytes))
        step = max(window, len(buffer) // window * window)
        while observed.length_bytes < chunk.length_bytes:
            self._go_on()
            start = observed.length_bytes
            wanted = min(step, chunk.length_bytes - start)
            try:
                count = reader.read_into(buffer[:wanted], chunk.offset + start)
            except DiskError as error:
                observed.error = error
                break
            if count:
                first = start // window
                checksums = window_checksums(buffer[:count], chunk.checksum_type, window)
                expected = recorded[first * width : first * width + len(checksums)]
                if checksums != expected:
                    observed.bad |= {first + i for i in _differing(checksums, expected, width)}
                observed.checksums.append(checksums)
                observed.length_bytes += count
                self._count(count)
            if count < wanted:
                break
        return observed

    def _go_on(self) -> None:
        if self._cancelled():
            raise OperationInterruptedError(
                f"the scan of container {self._container.container_id} was cancelled"
            )

    def _count(self, length_bytes: int) -> None:
        self.bytes_read += length_bytes
        self._on_bytes(length_bytes)

    def _judge(self, block_id: BlockId, chunk: ChunkRecord, seen: _Observed) -> None:
        """Enter one chunk into the tree, with at most one finding."""
        self.builder.add_block(block_id)
        kind, detail = None, ""
        if seen.error:
            kind, detail = FindingType.CORRUPT_CHUNK, seen.error.message
            self.exhausted += seen.error.facts.get("errno") in _EXHAUSTED
        elif seen.bad:
            kind, detail = (
                FindingType.CORRUPT_CHUNK,
                f"{len(seen.bad)} of {len(chunk.checksums)} windows differ",
            )
        elif seen.length_bytes == 0 < chunk.length_bytes:
            kind, detail = FindingType.MISSING_CHUNK, "the file ends before it"
        elif seen.length_bytes < chunk.length_bytes:
            kind = FindingType.INCONSISTENT_CHUNK_LENGTH
            detail = f"{seen.length_bytes} of {chunk.length_bytes} bytes are there"
        if kind is not None:
            self.findings.append(Finding(kind, block_id, chunk.offset, detail))
        if kind is FindingType.MISSING_CHUNK:
            return
        length = chunk.length_bytes if seen.error else seen.length_bytes
        checksum = fold(b"".join(seen.checksums))
        self.builder.add_chunk(block_id, ChunkTree(chunk.offset, length, checksum, kind is None))
        if kind is not None:
            bad = seen.bad
            if seen.length_bytes < chunk.length_bytes:
                bad |= set(
                    range(seen.length_bytes // chunk.bytes_per_checksum, len(chunk.checksums))
                )
            self.bad_windows[block_id, chunk.offset] = frozenset(bad)


def _groups(record: BlockRecord) -> list[list[ChunkRecord]]:
    """The chunks that can be verified, as many together as one request covers, at least
    one.
    """
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


def _differing(ours: bytes, theirs: bytes, width: int) -> Iterator[int]:
    return (
        i
        for i in range(len(ours) // width)
        if ours[i * width : (i + 1) * width] != theirs[i * width :][:width]
    )


def _ignore(_: int) -> None:
    pass


def _never() -> bool:
    return False
