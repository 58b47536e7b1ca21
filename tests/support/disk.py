"""Twins of the file port: one counts the durable operations, one keeps what a crash at
each of them would leave, one fails, one has bad sectors.
"""

import errno
import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import pytest

from merkle.checksum import Buffer
from ozone.rocks import Database
from runtime.disk import Disk, Operation, Reader, disk_error
from tests.support.power_cut import PowerCut, copy_live

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


@contextmanager
def recorded_syncs() -> Iterator[list[Path]]:
    """The files and directories that Python code syncs meanwhile, in order, as the
    system sees it.
    """
    found: list[Path] = []

    def recording(sync: Callable[[int], None]) -> Callable[[int], None]:
        def record(descriptor: int) -> None:
            sync(descriptor)
            found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recording(os.fsync))
        patch.setattr(os, "fdatasync", recording(os.fdatasync))
        yield found


class Crash(Enum):
    """What ends a run in the middle of an operation, or after it."""

    KILL = "kill before"
    # In the middle of a write.
    TORN = "kill in"
    # The machine, not only the process: all that is not durable is gone, or some of it.
    POWER_CUT = "power cut after"
    POWER_CUT_LAST_KEPT = "power cut, the latest entry kept, after"
    POWER_CUT_SOME_KEPT = "power cut, something kept, after"


@dataclass(frozen=True)
class CrashImage:
    """A copy of a folder as a crash would leave it."""

    folder: Path
    crash: Crash
    operation: Operation
    path: Path
    # Among the operations of the run, from 0.
    number: int
    # After the last operation: the run itself was over.
    is_final: bool = False

    def __str__(self) -> str:
        return f"{self.crash.value} {self.number}: {self.operation.value} {self.path.name}"


class ImagingDisk(CountingDisk):
    """Copies a folder at every operation, as each kind of crash at this moment would
    leave it.

    A killed process leaves what it has written so far; what a power cut leaves is for
    `PowerCut` to say.
    """

    def __init__(self, root: Path, images: Path) -> None:
        super().__init__()
        self._images: list[CrashImage] = []
        self.is_armed = True
        self._root = root
        self._folder = images
        self._power_cut = PowerCut(root)
        self._lock = threading.RLock()
        self._source: Path | None = None
        images.mkdir()

    def finish(self) -> list[CrashImage]:
        """All images; those after the last operation are final ones."""
        last = len(self.operations) - 1
        return [
            replace(image, is_final=True)
            if image.number == last and image.crash not in (Crash.KILL, Crash.TORN)
            else image
            for image in self._images
        ]

    def watch(self, database: Database) -> None:
        """See `PowerCut.watch`."""
        self._power_cut.watch(database)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            self._source = source
            super().rename(source, target)

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        def act_with_images() -> None:
            self._copy(Crash.KILL, operation, path)
            if torn is not None and self.is_armed:
                torn()
                self._copy(Crash.TORN, operation, path)
            act()

        with self._lock:
            self._power_cut.follow(operation, path, act_with_images, self._source)
            number = len(self.operations)
            if self.is_armed:
                self._power_cut.image(self._add(Crash.POWER_CUT, operation, path))
            if self.is_armed and not self._power_cut.is_all_durable:
                self._power_cut.image_of_last(self._add(Crash.POWER_CUT_LAST_KEPT, operation, path))
                self._power_cut.image(
                    self._add(Crash.POWER_CUT_SOME_KEPT, operation, path), random.Random(number)
                )
            self.operations.append((operation, path))

    def _copy(self, crash: Crash, operation: Operation, path: Path) -> None:
        if self.is_armed:
            copy_live(self._root, self._add(crash, operation, path))

    def _add(self, crash: Crash, operation: Operation, path: Path) -> Path:
        folder = self._folder / str(len(self._images))
        self._images.append(CrashImage(folder, crash, operation, path, len(self.operations)))
        return folder


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


@contextmanager
def no_file_grows(beyond_bytes: int = 0) -> Iterator[None]:
    """The system refuses every write of this process, or those beyond a file's first
    bytes, as a disk does that fails or is full.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (beyond_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class _CheckedReader(Reader):
    def __init__(self, path: Path, fd: int, check: Callable[[str, Path, int, int], None]) -> None:
        super().__init__(path, fd)
        self._file = path
        self._check = check

    def read_into(self, buffer: memoryview, offset: int) -> int:
        self._check("read", self._file, offset, len(buffer))
        return super().read_into(buffer, offset)
