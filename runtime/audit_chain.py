"""The audit file of a process: JSON lines, each bound to the line before it.

A line ends with its number (`seq`), the hash of the line before (`prev`), and its own
hash (`hash`, SHA-256 of all that precedes it in the line). So a line that is changed,
removed, inserted or moved breaks the chain there (runtime.audit_check). The first line
of a chain has as `prev` the hash of all bytes before it in the file: those of a file
from before there was a chain.

The chain goes on over restarts and files. A full file gets the number of its last line
as part of its name, and the next begins with the next number. What follows the last
newline was never acknowledged: after a crash a line of kind `cut` takes its place.
"""

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from runtime.disk import Disk, Operation, disk_error
from runtime.documents import parse_json
from runtime.errors import BusyError, DiskError
from runtime.folder_lock import lock_holder

# About 200,000 lines; a check reads such a file in two seconds.
_FILE_BYTES_MAX = 64 << 20
# Far above the longest line; the end of a file is looked for in this much of it.
_TAIL_BYTES = 1 << 20
_HASH_FIELD = re.compile(rb', "hash": "([0-9a-f]{64})"\}')
_HASH_FIELD_BYTES = len(', "hash": ""}') + 64
_DIGITS = 12
# The same refusal is written once in this time, and then with its number: a caller that
# tries again and again must not fill the disk. With the time between two looks of
# runtime.audit_upkeep it stays below a minute.
_REFUSALS_EVERY_S = 45.0
# Different refusals of that time that get lines of their own: of one caller, so that it
# keeps nobody else's off the record, and of all.
_REFUSALS_OF_ONE_MAX, _REFUSALS_MAX = 20, 1_000
# Fields with texts of callers and peers, and the characters of such a text that are
# kept.
_OUTSIDE_TEXTS = ("who", "what", "why", "key", "first", "last")
_TEXT_CHARACTERS_MAX = 1_024


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where a chain goes on: the number of the next line, and the hash before it."""

    sequence: int
    hash: str


@dataclass(frozen=True, slots=True)
class AuditLine:
    """A line whose hash is right; `fields` are all of its fields."""

    sequence: int
    previous: str
    hash: str
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class AuditTail:
    """The last files of a chain with their bytes, oldest first, and its head: the hash
    of the line that was written last. It is empty if none was, or if it is not known
    where that line is. `moves` is how often somebody took the file away before; it is
    away now unless it `is_held`. A chain that has not begun has no files.
    """

    files: tuple[tuple[Path, bytes], ...]
    head: str
    moves: int
    is_held: bool = True


def parse_line(raw: bytes) -> AuditLine | None:
    """The line in these bytes, which have no newline; None if its hash is not right, or
    it has none.
    """
    found = _HASH_FIELD.fullmatch(raw[-_HASH_FIELD_BYTES:])
    if found is None:
        return None
    own = found[1].decode()
    if sha256(raw[:-_HASH_FIELD_BYTES]).hexdigest() != own:
        return None
    try:
        fields = parse_json(raw)
    except ValueError:
        return None
    sequence, previous = fields.get("seq"), fields.get("prev")
    if not isinstance(sequence, int) or not isinstance(previous, str):
        return None
    return AuditLine(sequence, previous, own, fields)


def chain_files(path: Path, disk: Disk) -> list[Path]:
    """The full files of the audit file at `path`, oldest first, and then `path` itself;
    only those that exist.

    Raises:
        DiskError: their folder cannot be listed.
    """
    pattern = re.compile(rf"{re.escape(path.stem)}-[0-9]{{{_DIGITS}}}{re.escape(path.suffix)}")
    names = disk.names(path.parent)
    found = [path.with_name(name) for name in names if pattern.fullmatch(name)]
    return [*found, *([path] if path.name in names else [])]


class AuditFile:
    """Appends lines to an audit file, durably. Thread-safe; one process at a time."""

    def __init__(
        self,
        path: Path,
        *,
        disk: Disk | None = None,
        file_bytes_max: int = _FILE_BYTES_MAX,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the file and find the end of its chain, or begin one. A new file is
        readable only by its owner and group.

        Raises:
            BusyError: another process writes the file.
            DiskError: the file cannot be opened, read or written.
        """
        self._path = path.absolute()
        self._disk = disk or Disk()
        self._file_bytes_max = file_bytes_max
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._refusals_lock = threading.Lock()
        self._refusals: dict[tuple[str, str, str], int] = {}
        self._refusals_unlisted: dict[str, int] = {}
        self._refusals_since_s = monotonic_s()
        self._suspect: DiskError | None = None
        self._write_fault = ""
        self._moves = 0
        # None: what the last write left is not known.
        self._end: ChainEnd | None = None
        self._length_bytes = 0
        self._descriptor: int | None = None
        try:
            self._open()
            self._recover()
        except BaseException:
            self.close()
            raise

    @property
    def write_fault(self) -> str:
        """Why the last line could not be written; empty if it was."""
        return self._write_fault

    def refused(self, *, who: str, what: str, why: str) -> None:
        """Record that a request was refused: who sent it, what it was, and why not.

        A refusal that repeats within 45 seconds is counted; a line has the number as
        `repeated`. `write_counts` or the next refusal writes it after that time, or
        `close`. A crash loses counts that are not written.

        Raises:
            DiskError: the line is not on disk. The request must be refused all the
                same.
        """
        key = who, what, why
        with self._refusals_lock:
            if self._monotonic_s() - self._refusals_since_s >= _REFUSALS_EVERY_S:
                self._write_repeated()
            if key in self._refusals:
                self._refusals[key] += 1
                return
            of_one = sum(caller == who for caller, _, _ in self._refusals)
            if of_one >= _REFUSALS_OF_ONE_MAX or len(self._refusals) >= _REFUSALS_MAX:
                named = who if len(self._refusals_unlisted) < _REFUSALS_MAX else ""
                self._refusals_unlisted[named] = self._refusals_unlisted.get(named, 0) + 1
                return
            self.append([{"kind": "refused", "who": who, "what": what, "why": why}])
            self._refusals[key] = 0

    def write_counts(self) -> None:
        """Write the counts of refusals that are 45 seconds old.

        Raises:
            DiskError: they are not on disk; the next call tries again.
        """
        with self._refusals_lock:
            is_due = self._monotonic_s() - self._refusals_since_s >= _REFUSALS_EVERY_S
            if is_due and (self._refusals or self._refusals_unlisted):
                self._write_repeated()

    def tail(self) -> AuditTail:
        """The file and the full one before it, as they are between two lines.

        Raises:
            DiskError: they cannot be read.
        """
        with self._lock:
            has_begun = self._end is None or self._end.sequence > 0
            files = chain_files(self._path, self._disk)[-2:] if has_begun else []
            read = tuple((path, self._disk.read(path)) for path in files)
            # A file that somebody moved away has the last line elsewhere.
            is_held = self._holds_file()
            is_known = has_begun and self._length_bytes > 0 and is_held
            head = self._end.hash if self._end and is_known else ""
            return AuditTail(read, head, self._moves, is_held)

    def append(self, entries: Sequence[Mapping[str, object]]) -> None:
        """Append a line for each entry; durable on return.

        Raises:
            DiskError: the lines are not known to be on disk. After a failed sync no
                more are written until the next start.
        """
        if not entries:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with self._lock:
            if self._suspect is not None:
                raise self._suspect
            try:
                self._append([{"time": now, **_plain(entry)} for entry in entries])
                self._write_fault = ""
            except DiskError as error:
                # Some of the lines may be in the file, whole or in part.
                self._end = None
                failure = DiskError(
                    f"audit file {self._path} cannot be written: {error.message}",
                    hint=error.hint,
                    **error.facts,
                )
                self._write_fault = failure.message
                if error.facts.get("suspect"):
                    self._suspect = failure
                raise failure from error

    def close(self) -> None:
        """Write the counts of refusals and close the file; nothing can be recorded
        afterwards.
        """
        try:
            with self._refusals_lock:
                if self._descriptor is not None:
                    self._write_repeated()
        except DiskError:
            # They are only counts, and the process is ending.
            pass
        finally:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is not None:
                os.close(descriptor)

    def _append(self, entries: Sequence[Mapping[str, object]]) -> None:
        self._follow_file()
        if self._end is None:
            self._recover()
        if self._length_bytes >= self._file_bytes_max:
            self._rotate()
        assert self._end is not None
        text, end = bytearray(), self._end
        for entry in entries:
            line, end = _encoded(entry, end)
            text += line
        self._write(text, end)

    def _write(self, text: bytes | bytearray, end: ChainEnd) -> None:
        self._disk.write_at(self._path, self._length_bytes, text)
        self._disk.sync(self._path)
        self._length_bytes += len(text)
        self._end = end

    def _open(self) -> None:
        """Open the file and hold it: two writers would each continue the same line."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

        def create() -> None:
            os.close(os.open(self._path, flags | os.O_CREAT, 0o640))

        try:
            if not self._path.exists():
                self._disk.durable(Operation.WRITE, self._path, create)
            descriptor = os.open(self._path, flags)
        except OSError as error:
            raise DiskError(
                f"audit file {self._path} cannot be opened: {error.strerror}", path=str(self._path)
            ) from error
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(
                f"audit file {self._path} is in use by process {lock_holder(descriptor)}",
                hint="Each process needs an audit file of its own: set audit_file.",
                path=str(self._path),
            ) from error
        except OSError as error:
            raise disk_error("lock", self._path, error) from error
        # A new file, too, must be there after a power cut.
        self._disk.sync_folder(self._path.parent)

    def _holds_file(self) -> bool:
        """Whether the file that we write is still the one at the path."""
        assert self._descriptor is not None
        try:
            held, found = os.fstat(self._descriptor), os.stat(self._path)
        except OSError:
            return False
        return (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)

    def _follow_file(self) -> None:
        """Notice that somebody moved or shortened the file: the chain goes on in what
        is there now, from the line that we wrote last.
        """
        assert self._descriptor is not None
        try:
            held, found = os.fstat(self._descriptor), os.stat(self._path)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise disk_error("stat", self._path, error) from error
        if found is None or (held.st_dev, held.st_ino) != (found.st_dev, found.st_ino):
            self._open()
            self._moves += 1
        elif found.st_size == self._length_bytes:
            return
        known, self._end = self._end, None
        self._recover(known)

    def _rotate(self) -> None:
        assert self._end is not None
        number = f"{self._end.sequence - 1:0{_DIGITS}}"
        full = self._path.with_name(f"{self._path.stem}-{number}{self._path.suffix}")
        self._disk.rename(self._path, full)
        # Before the next file takes its name: one entry may be durable without another.
        self._disk.sync_folder(full.parent)
        self._open()
        self._length_bytes = 0

    def _recover(self, known: ChainEnd | None = None) -> None:
        """Find the end of the chain, which is `known` if given, and replace what a
        crash left of a line.
        """
        length = self._disk.length(self._path) or 0
        whole, torn_bytes = self._whole_bytes(self._path, length)
        end = known or self._end_of(self._path, whole)
        if end is None:
            rotated = chain_files(self._path, self._disk)[:-1]
            if rotated:
                before = self._disk.length(rotated[-1]) or 0
                end = self._end_of(rotated[-1], self._whole_bytes(rotated[-1], before)[0])
        self._length_bytes = whole
        self._end = end or ChainEnd(0, self._hash_of(whole))
        if torn_bytes:
            entry = {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "kind": "cut",
                "bytes": torn_bytes,
            }
            line, end = _encoded(entry, self._end)
            if len(line) < torn_bytes:
                # Written over all of it, and never shortened: as long as there is no
                # newline, a crash leaves a torn line again.
                missing = torn_bytes - len(line)
                line, end = _encoded({**entry, "over": " " * missing}, self._end)
            self._write(line, end)

    def _whole_bytes(self, path: Path, length: int) -> tuple[int, int]:
        """The bytes up to the last newline, and the number of those after it."""
        start = max(length - _TAIL_BYTES, 0)
        at = self._disk.read_at(path, start, length - start).rfind(b"\n")
        if at < 0 and start:
            start, at = 0, self._disk.read_at(path, 0, length).rfind(b"\n")
        whole = start + at + 1
        return whole, length - whole

    def _end_of(self, path: Path, whole: int) -> ChainEnd | None:
        """The end of the chain in a file; None if none of its last lines is of one.

        Damaged lines at the end keep their numbers, so that a check names the first of
        them and not those that follow.
        """
        start = max(whole - _TAIL_BYTES, 0)
        lines = self._disk.read_at(path, start, whole - start).split(b"\n")[:-1]
        for behind, raw in enumerate(reversed(lines)):
            line = parse_line(raw)
            if line is not None:
                own = line.hash if behind == 0 else sha256(lines[-1]).hexdigest()
                return ChainEnd(line.sequence + behind + 1, own)
        return None

    def _hash_of(self, length: int) -> str:
        """The hash of the first bytes of the file."""
        found, at = sha256(), 0
        while at < length:
            part = self._disk.read_at(self._path, at, min(_TAIL_BYTES, length - at))
            if not part:
                break
            found.update(part)
            at += len(part)
        return found.hexdigest()

    def _write_repeated(self) -> None:
        """Write the counts of refusals, and begin to count anew."""
        lines: list[dict[str, object]] = [
            {"kind": "refused", "who": who, "what": what, "why": why, "repeated": count}
            for (who, what, why), count in self._refusals.items()
            if count
        ]
        why = "more different refusals in a minute than have lines"
        for who, count in self._refusals_unlisted.items():
            lines.append({"kind": "refused", "who": who, "what": "", "why": why, "repeated": count})
        self.append(lines)
        self._refusals.clear()
        self._refusals_unlisted.clear()
        self._refusals_since_s = self._monotonic_s()


def _plain(entry: Mapping[str, object]) -> dict[str, object]:
    """The entry with its texts from outside bounded, and escaped for terminals."""
    found = dict(entry)
    for name in _OUTSIDE_TEXTS:
        text = found.get(name)
        if isinstance(text, str):
            kept = text[:_TEXT_CHARACTERS_MAX]
            escaped = (
                c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in kept
            )
            found[name] = "".join(escaped) + ("..." if len(kept) < len(text) else "")
    return found


def _encoded(entry: Mapping[str, object], end: ChainEnd) -> tuple[bytes, ChainEnd]:
    """The line of an entry that follows `end`, with its newline, and the end after
    it.
    """
    body = json.dumps({**entry, "seq": end.sequence, "prev": end.hash})[:-1].encode()
    own = sha256(body).hexdigest()
    return body + f', "hash": "{own}"}}\n'.encode(), ChainEnd(end.sequence + 1, own)
