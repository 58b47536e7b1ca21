"""The changes of one replication that wait to be applied, in a folder of their own.

A queue is a row of segment files, and a segment a row of pages. Each page is what one
append made durable: its changes, and the position of the log behind them. So after a
crash the queue ends with a whole page, and its last position is where the log is read
on. What was acknowledged is removed by whole segments.

In memory are a few numbers for each segment, and the page that is being read.
"""

import json
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from merkle.errors import ReconcileError
from proof.item import ContentHash, HashAlgorithm
from replicator.stores.port import Change, ChangeBatch, ChangeKind, FeedPosition, ObjectFacts
from runtime.disk import Disk
from runtime.documents import parse_json

_MAGIC = b"TFQ1"
# Magic, bytes of the payload, changes in it, index before it, index of its position.
_HEADER = struct.Struct("<4sIIQQ")
_CRC = struct.Struct("<I")
_NAME = "{:016d}.changes"
_SEGMENT_BYTES = 4 << 20
# Bounds the memory of a reader, whatever a feed answers at once.
_PAGE_CHANGES = 500
_PAGE_BYTES_MAX = 256 << 20


class QueueDamagedError(ReconcileError):
    """The queue cannot be read. Nothing is lost: the log is read again from the
    checkpoint, or both sides are compared.
    """

    code = "queue_damaged"


@dataclass(frozen=True, slots=True)
class QueuedChange:
    """A change and its number in this queue; numbers ascend from 1."""

    number: int
    change: Change


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What became of a batch: changes that were added, those that the queue or the
    target had already, and whether the queue was too full for the rest of it.
    """

    added: int
    duplicates: int
    is_full: bool


@dataclass(slots=True)
class _Segment:
    first_number: int
    changes: int = 0
    size_bytes: int = 0

    @property
    def end_number(self) -> int:
        return self.first_number + self.changes


@dataclass(frozen=True, slots=True)
class _Page:
    count: int
    after: int
    index: int
    payload: bytes
    end: int


class ChangeQueue:
    """The queue of one replication. One thread may append while another reads."""

    def __init__(
        self, folder: Path, disk: Disk | None = None, *, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        """Open the queue in a folder, which is created as needed. The caller holds a
        lock of the folder around it. A file that is larger than `segment_bytes` is
        followed by another.

        Raises:
            QueueDamagedError: a page before the last one is damaged; `clear_folder`
                makes the folder an empty queue.
            DiskError: the folder cannot be read or written.
        """
        self._folder = folder
        self._disk = disk or Disk()
        self._segment_bytes = segment_bytes
        self._disk.make_folder(folder)
        self._lock = threading.Lock()
        self._segments = list[_Segment]()
        self._position: FeedPosition | None = None
        self._acknowledged = 0
        # Where the reader is: the number behind what it has read, the segment with its
        # last page, and where that ends. Of the page some changes are left to take.
        self._read_to = 1
        self._segment = 0
        self._offset = 0
        self._page = list[QueuedChange]()
        self.taken = 0
        """Changes that were taken so far, those that were taken again too."""
        self._load()

    @property
    def position(self) -> FeedPosition | None:
        """Where to read the log on; None where nothing was begun."""
        return self._position

    @property
    def count(self) -> int:
        """Changes that are not acknowledged."""
        with self._lock:
            return self._end_number - 1 - self._acknowledged

    @property
    def taken_all(self) -> bool:
        """Whether every change was taken since the last `rewind`."""
        with self._lock:
            return not self._page and self._read_to >= self._end_number

    def begin(self, position: FeedPosition) -> None:
        """Follow the log from a position; what the queue has of another log, or of
        another place of this one, is dropped.

        Raises:
            DiskError: the folder cannot be written.
        """
        with self._lock:
            if self._position is not None and self._position.log == position.log:
                first = self._first_index()
                if first <= position.index <= self._position.index:
                    self._acknowledge_index(position.index)
                    return
            self._clear()
            self._write(position.log, position.index, [(position.index, ())])

    def append(self, batch: ChangeBatch, *, entries_max: int) -> AppendResult:
        """Add what is new of a batch, durable when this returns. Where the queue would
        hold more than `entries_max` changes the rest is left out: read it again later.

        Raises:
            QueueDamagedError: the batch is of another log than the queue.
            DiskError: the folder cannot be written.
        """
        with self._lock:
            known = self._position
            if known is None or known.log != batch.position.log:
                raise QueueDamagedError(f"{self._folder} is no queue of log {batch.position.log!r}")
            fresh = [one for one in batch.changes if one.index > known.index]
            duplicates = len(batch.changes) - len(fresh)
            room = entries_max - (self._end_number - 1 - self._acknowledged)
            taken = _cut(fresh, max(room, 0))
            is_full = taken < len(fresh)
            pages = list[tuple[int, Sequence[Change]]]()
            for first, end in _pages(fresh[:taken]):
                index = fresh[end - 1].index
                if end == len(fresh):
                    index = max(index, batch.position.index)
                pages.append((index, fresh[first:end]))
            if pages:
                self._write(known.log, known.index, pages)
            if not fresh and batch.position.index > known.index:
                # Durable with the next change: at worst it is read again.
                self._position = batch.position
            return AppendResult(taken, duplicates, is_full)

    def end(self, position: FeedPosition) -> None:
        """Make a position durable behind which nothing follows.

        Raises:
            DiskError: the folder cannot be written.
        """
        with self._lock:
            assert self._position is not None
            self._write(position.log, self._position.index, [(position.index, ())])

    def take(self, limit: int) -> list[QueuedChange]:
        """The next changes in their order, fewer than `limit` only at the end.

        Raises:
            QueueDamagedError: a page cannot be read.
            DiskError: the folder cannot be read.
        """
        with self._lock:
            found = list[QueuedChange]()
            while len(found) < limit and (self._page or self._read_page()):
                left = limit - len(found)
                found += self._page[:left]
                del self._page[:left]
            self.taken += len(found)
            return found

    def rewind(self) -> None:
        """Read again from the first change that is not acknowledged."""
        with self._lock:
            self._rewind()

    def acknowledge(self, number: int) -> None:
        """Let go of all changes up to a number.

        Raises:
            DiskError: a file cannot be removed.
        """
        with self._lock:
            self._acknowledged = max(self._acknowledged, min(number, self._end_number - 1))
            self._remove_acknowledged()

    def clear(self) -> None:
        """Drop everything, also the position.

        Raises:
            DiskError: a file cannot be removed.
        """
        with self._lock:
            self._clear()

    @property
    def _end_number(self) -> int:
        return self._segments[-1].end_number if self._segments else self._acknowledged + 1

    def _path(self, segment: _Segment) -> Path:
        return self._folder / _NAME.format(segment.first_number)

    def _write(self, log: str, after: int, pages: Sequence[tuple[int, Sequence[Change]]]) -> None:
        """Append pages, each with the index of its position: durable afterwards."""
        if not self._segments:
            self._segments.append(_Segment(self._acknowledged + 1))
        segment, written = self._segments[-1], bytearray()
        for index, changes in pages:
            rows = [_row(one) for one in changes]
            payload = json.dumps([log, rows], separators=(",", ":")).encode()
            header = _HEADER.pack(_MAGIC, len(payload), len(changes), after, index)
            written += header + _CRC.pack(zlib.crc32(payload, zlib.crc32(header))) + payload
            after = index
        path = self._path(segment)
        self._disk.write_at(path, segment.size_bytes, written)
        self._disk.sync(path)
        if not segment.size_bytes:
            self._disk.sync_folder(self._folder)
        segment.size_bytes += len(written)
        segment.changes += sum(len(changes) for _, changes in pages)
        self._position = FeedPosition(log, after)
        if segment.size_bytes > self._segment_bytes:
            # The next file appears with its first page.
            self._segments.append(_Segment(segment.end_number))

    def _first_index(self) -> int:
        """The log's index just before the first change that is kept."""
        for segment in self._segments:
            if segment.size_bytes:
                return next(_scan(self._disk, self._path(segment)))[0].after
        return 0

    def _acknowledge_index(self, index: int) -> None:
        """Let go of all changes up to an index of the log."""
        self._rewind()
        while self._page or self._read_page():
            for one in self._page:
                if one.change.index > index:
                    self._remove_acknowledged()
                    self._rewind()
                    return
                self._acknowledged = one.number
            self._page.clear()
        self._remove_acknowledged()
        self._rewind()

    def _remove_acknowledged(self) -> None:
        while len(self._segments) > 1 and self._segments[0].end_number - 1 <= self._acknowledged:
            if self._segments[0].end_number > self._read_to:
                # The reader is still in it.
                break
            gone = self._segments.pop(0)
            self._disk.remove(self._path(gone))
            # One after the other: what a crash leaves has no hole.
            self._disk.sync_folder(self._folder)

    def _clear(self) -> None:
        for name in self._disk.names(self._folder):
            self._disk.remove(self._folder / name)
        self._disk.sync_folder(self._folder)
        self._segments, self._position = [], None
        self._acknowledged = 0
        self._rewind()

    def _rewind(self) -> None:
        self._page.clear()
        self._read_to, self._segment, self._offset = self._acknowledged + 1, 0, 0

    def _read_page(self) -> bool:
        """Read the next page that has changes; whether there was one."""
        for segment in self._segments:
            if not segment.first_number <= self._read_to < segment.end_number:
                continue
            path, number = self._path(segment), self._read_to
            if self._segment != segment.first_number:
                self._segment, self._offset, number = segment.first_number, 0, segment.first_number
            while True:
                page = _page_at(self._disk, path, self._offset)
                if page is None:
                    raise _damaged(path, self._offset)
                self._offset = page.end
                if number + page.count > self._read_to:
                    break
                number += page.count
            rows = enumerate(_changes(page, path), number)
            self._page = [QueuedChange(at, one) for at, one in rows if at >= self._read_to]
            self._read_to = number + page.count
            return True
        return False

    def _load(self) -> None:
        """Find the segments, and cut off a page that a crash left torn."""
        self._disk.remove_temporaries(self._folder)
        names = [name for name in self._disk.names(self._folder) if name.endswith(".changes")]
        number = 1
        previous: int | None = None
        for at, name in enumerate(names):
            path = self._folder / name
            size_bytes, last = 0, None
            segment = _Segment(int(name.partition(".")[0]))
            for page, _ in _scan(self._disk, path):
                if previous is not None and page.after != previous:
                    raise QueueDamagedError(
                        f"{path}: changes before it are missing", path=str(path)
                    )
                previous, size_bytes, last = page.index, page.end, page
                segment.changes += page.count
            length = self._disk.length(path) or 0
            if size_bytes < length:
                if at + 1 < len(names) or _has_page_after(self._disk, path, size_bytes):
                    raise _damaged(path, size_bytes)
                # What a crash tore was never acknowledged to anybody.
                self._disk.replace(path, self._disk.read_at(path, 0, size_bytes))
            if at and segment.first_number != number:
                raise QueueDamagedError(f"{path}: is not the next file", path=str(path))
            if last is not None:
                self._position = FeedPosition(_log(last, path), last.index)
            segment.size_bytes = size_bytes
            if not at:
                self._acknowledged = segment.first_number - 1
            number = segment.end_number
            self._segments.append(segment)
        self._rewind()


def clear_folder(folder: Path, disk: Disk) -> None:
    """Make a folder an empty queue, whatever it holds.

    Raises:
        DiskError: a file cannot be removed.
    """
    for name in disk.names(folder):
        disk.remove(folder / name)
    disk.sync_folder(folder)


def _cut(changes: Sequence[Change], room: int) -> int:
    """How many of the changes fit: those of one index stay together."""
    if len(changes) <= room:
        return len(changes)
    while room and changes[room - 1].index == changes[room].index:
        room -= 1
    return room


def _pages(changes: Sequence[Change]) -> Iterator[tuple[int, int]]:
    first = 0
    while first < len(changes):
        end = min(first + _PAGE_CHANGES, len(changes))
        while end < len(changes) and changes[end].index == changes[end - 1].index:
            end += 1
        yield first, end
        first = end


def _page_at(disk: Disk, path: Path, offset: int) -> _Page | None:
    """The page at an offset; None if it is not whole."""
    fixed = _HEADER.size + _CRC.size
    head = disk.read_at(path, offset, fixed)
    if len(head) < fixed or not head.startswith(_MAGIC):
        return None
    _, length, count, after, index = _HEADER.unpack_from(head)
    if length > _PAGE_BYTES_MAX:
        return None
    payload = disk.read_at(path, offset + fixed, length)
    (crc,) = _CRC.unpack_from(head, _HEADER.size)
    if len(payload) < length or crc != zlib.crc32(payload, zlib.crc32(head[: _HEADER.size])):
        return None
    return _Page(count, after, index, payload, offset + fixed + length)


def _scan(disk: Disk, path: Path) -> Iterator[tuple[_Page, int]]:
    """The whole pages from the beginning, each with its offset."""
    offset = 0
    while (page := _page_at(disk, path, offset)) is not None:
        yield page, offset
        offset = page.end


def _has_page_after(disk: Disk, path: Path, offset: int) -> bool:
    """Whether a whole page lies behind a damaged one: then no crash has torn it."""
    rest = disk.read_at(path, offset, disk.length(path) or 0)
    at = rest.find(_MAGIC, 1)
    while at > 0:
        if _page_at(disk, path, offset + at) is not None:
            return True
        at = rest.find(_MAGIC, at + 1)
    return False


def _damaged(path: Path, offset: int) -> QueueDamagedError:
    return QueueDamagedError(
        f"{path}: the page at byte {offset} is damaged",
        hint="The log is read again from the checkpoint.",
        path=str(path),
        offset=offset,
    )


def _log(page: _Page, path: Path) -> str:
    try:
        log = parse_json(page.payload)[0]
    except (ValueError, TypeError, LookupError) as error:
        raise _damaged(path, page.end) from error
    return str(log)


def _changes(page: _Page, path: Path) -> list[Change]:
    try:
        rows = parse_json(page.payload)[1]
        found = [_change(row) for row in rows]
    except (ValueError, TypeError, LookupError, AssertionError) as error:
        raise _damaged(path, page.end) from error
    if len(found) != page.count:
        raise _damaged(path, page.end)
    return found


def _row(change: Change) -> list[object]:
    row: list[object] = [
        change.index,
        change.key,
        change.version,
        change.kind.value,
        change.previous_key,
        change.time_ms,
    ]
    facts = change.facts
    if facts is not None:
        hashes = [[one.algorithm.value, one.digest.hex()] for one in facts.hashes]
        row.append([facts.size_bytes, facts.etag, facts.modified_ms, facts.version, hashes])
    return row


def _change(row: Sequence[object]) -> Change:
    index, key, version, kind, previous, time_ms, *rest = row
    facts = None
    if rest:
        (described,) = rest
        assert isinstance(described, list)
        size_bytes, etag, modified_ms, object_version, hashes = described
        facts = ObjectFacts(
            str(key),
            _int(size_bytes),
            str(etag),
            _int(modified_ms),
            str(object_version),
            hashes=tuple(
                ContentHash(HashAlgorithm(name), bytes.fromhex(digest)) for name, digest in hashes
            ),
        )
    return Change(
        _int(index),
        str(key),
        str(version),
        ChangeKind(kind),
        str(previous),
        facts,
        _int(time_ms),
    )


def _int(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a number")
    return value
