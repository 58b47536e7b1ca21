"""Twins of the file port: one counts the durable operations, one crashes at the Nth,
one fails, one has bad sectors.
"""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from merkle.checksum import Buffer
from runtime.disk import Disk, Operation, Reader, disk_error

PAGE_BYTES = 4096


class CountingDisk(Disk):
    """Remembers every durable operation in order."""

    def __init__(self) -> None:
        self.operations: list[tuple[Operation, Path]] = []

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        self.operations.append((operation, path))
        act()


class Crash(Enum):
    """What a crash at an operation leaves behind."""

    BEFORE = "before"
    TORN = "torn"
    AFTER = "after"
    # The machine, not only the process: whatever was not synced yet is gone.
    POWER_CUT = "power_cut"


class CrashingDisk(CountingDisk):
    """Kills its own process at the Nth durable operation (from 0), without any cleaning
    up.
    """

    def __init__(self, at: int, crash: Crash) -> None:
        super().__init__()
        self._at = at
        self._crash = crash
        self._unsynced: list[tuple[Path, Callable[[], None]]] = []

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        here = len(self.operations) == self._at
        if here and self._crash is Crash.BEFORE:
            die()
        if here and self._crash is Crash.TORN:
            (torn or act)()
            die()
        if self._crash is Crash.POWER_CUT:
            self._note(operation, path)
        super().durable(operation, path, act, torn)
        if operation is Operation.SYNC:
            self._unsynced = [(p, undo) for p, undo in self._unsynced if p != path]
        if operation is Operation.SYNC_FOLDER:
            self._unsynced = [(p, undo) for p, undo in self._unsynced if p != path / "*"]
        if here:
            for _, undo in reversed(self._unsynced):
                undo()
            die()

    def _note(self, operation: Operation, path: Path) -> None:
        match operation:
            case Operation.WRITE:
                self._unsynced.append((path, _restorer(path)))
            case Operation.RENAME if any(
                p == path.with_name(path.name + ".tmp") for p, _ in self._unsynced
            ):
                # The new name without the bytes, as file systems do it: an empty file
                # in the place of the old one.
                self._unsynced.append((path, lambda: os.truncate(path, 0)))
            case Operation.RENAME:
                # The name under which the file was before is not known here: losing the
                # new entry is what counts.
                self._unsynced.append((path.parent / "*", _restorer(path)))
            case Operation.REMOVE if path.is_file():
                self._unsynced.append((path.parent / "*", _restorer(path)))
            case _:
                pass


def _restorer(path: Path) -> Callable[[], None]:
    if path.is_dir():
        return lambda: None
    before = path.read_bytes() if path.exists() else None

    def restore() -> None:
        if before is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(before)
        elif not path.is_dir():
            # A folder that was renamed stays where it is: a power cut may leave either,
            # and BEFORE leaves the other.
            path.unlink(missing_ok=True)

    return restore


def die() -> None:
    """End this process as SIGKILL does: nothing is flushed, closed or unwound."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class FailingDisk(Disk):
    """Fails the operations that `fails` picks, with the given errno, before they do
    anything.
    """

    errno: int
    fails: Callable[[Operation, Path], bool]
    failed: list[tuple[Operation, Path]] = field(default_factory=list)

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        if self.fails(operation, path):
            self.failed.append((operation, path))
            suspect = operation in (Operation.SYNC, Operation.SYNC_FOLDER)
            raise disk_error(
                operation.value, path, OSError(self.errno, os.strerror(self.errno)), suspect=suspect
            )
        act()


@dataclass
class BadSectorDisk(Disk):
    """Pages of files that cannot be read until they are written over, each as a whole,
    as the system and a drive do.
    """

    bad: set[tuple[Path, int]] = field(default_factory=set)
    error: int = errno.EIO

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        self._check("read", path, offset, length)
        return super().read_at(path, offset, length)

    @contextmanager
    def reader(self, path: Path) -> Iterator[Reader]:
        with path.open("rb") as file:
            yield _CheckedReader(path, file.fileno(), self._check)

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        whole = {
            page
            for page in self._pages(offset, len(data))
            if offset <= page and page + PAGE_BYTES <= offset + len(data)
        }
        for page in self._pages(offset, len(data)):
            if page not in whole:
                self._check("write", path, page, PAGE_BYTES)
        super().write_at(path, offset, data)
        self.bad -= {(path, page) for page in whole}

    def _check(self, operation: str, path: Path, offset: int, length: int) -> None:
        if any((path, page) in self.bad for page in self._pages(offset, length)):
            raise disk_error(operation, path, OSError(self.error, os.strerror(self.error)))

    def _pages(self, offset: int, length: int) -> range:
        return range(offset // PAGE_BYTES * PAGE_BYTES, offset + length, PAGE_BYTES)


class _CheckedReader(Reader):
    def __init__(self, path: Path, fd: int, check: Callable[[str, Path, int, int], None]) -> None:
        super().__init__(path, fd)
        self._file = path
        self._check = check

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._check("read", self._file, offset, len(buffer))
        return super().read_into(buffer, offset)
