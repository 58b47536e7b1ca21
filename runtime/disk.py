"""Files: the one way in which the product reads and changes its files.

A `Disk` is made once and passed down. Every change that must survive a crash goes
through `Disk.durable`, which tests override to stop, tear or fail a run at each change.
A file is opened only if it is a regular file and not a symbolic link: a link would lead
a reader out of its directory, and a pipe would block it for ever.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from merkle.checksum import Buffer
from runtime.errors import DiskError

# O_NONBLOCK: opening a pipe returns at once, so that the check of the file's kind can
# refuse it.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ_BYTES = 1 << 20
# The largest file that `Disk.read` reads: a damaged inode can claim any length.
WHOLE_BYTES_MAX = 256 << 20


class Operation(Enum):
    """The durable operations, as tests count them and errors name them."""

    WRITE = "write"
    SYNC = "sync"
    RENAME = "rename"
    REMOVE = "remove"
    SYNC_FOLDER = "sync_folder"
    MAKE_FOLDER = "make_folder"
    # One write batch of a database, which has files of its own.
    BATCH = "batch"


class Disk:
    """Reads files and changes them durably.

    Errors of the system become DiskError. Its facts are `operation`, `path` and `errno`
    (by name), and where they apply `missing` (no such file) and `suspect` (a sync
    failed). After a failed sync nobody knows what the disk holds, so that callers stop
    writing there. The sync is never repeated: a second one may succeed without the
    bytes.
    """

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        """Carry out one durable operation. A test may call `torn` instead of `act`: it
        does the part that a crash may leave behind.
        """
        del operation, path, torn
        act()

    def read(self, path: Path) -> bytes:
        """The bytes of the whole file.

        Raises:
            DiskError: with EFBIG where the file is larger than WHOLE_BYTES_MAX.
        """
        with _translated("read", path), _opened(path, os.O_RDONLY) as fd:
            if os.fstat(fd).st_size > WHOLE_BYTES_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            parts = []
            while part := os.read(fd, _READ_BYTES):
                parts.append(part)
            return b"".join(parts)

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`, fewer only at the end of the file."""
        with _translated("read", path), _opened(path, os.O_RDONLY) as fd:
            parts, position, end = [], offset, offset + length
            while position < end and (part := os.pread(fd, end - position, position)):
                parts.append(part)
                position += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextlib.contextmanager
    def reader(self, path: Path) -> Iterator["Reader"]:
        """The file, open for reading in pieces."""
        with contextlib.ExitStack() as stack:
            with _translated("open", path):
                fd = stack.enter_context(_opened(path, os.O_RDONLY))
            yield Reader(path, fd)

    def length(self, path: Path) -> int | None:
        """Length of a regular file in bytes; None if the file does not exist."""
        try:
            with _translated("stat", path), _opened(path, os.O_RDONLY) as fd:
                return os.fstat(fd).st_size
        except DiskError as error:
            if error.facts.get("missing"):
                return None
            raise

    def modified_ns(self, path: Path) -> int | None:
        """When a file was last written, in ns since the epoch; None if the file does
        not exist.
        """
        try:
            with _translated("stat", path):
                return os.lstat(path).st_mtime_ns
        except DiskError as error:
            if error.facts.get("missing"):
                return None
            raise

    def is_folder(self, path: Path) -> bool:
        """Whether the directory exists.

        Raises:
            DiskError: the device failed, which does not mean that it is not there.
        """
        with _translated("stat", path):
            return path.is_dir()

    def names(self, folder: Path) -> list[str]:
        """The names of a directory's entries, sorted."""
        with _translated("list", folder):
            return sorted(os.listdir(folder))

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        """Write in place; a missing file is created. Not durable before `sync`."""
        self._write(path, offset, data, os.O_CREAT)

    def sync(self, path: Path) -> None:
        """Make a file's bytes durable.

        Raises:
            DiskError: with the fact `suspect`; the bytes may or may not be on disk.
        """

        def act() -> None:
            with _translated(Operation.SYNC.value, path), _opened(path, os.O_RDONLY) as fd:
                _sync(fd, Operation.SYNC, path)

        self.durable(Operation.SYNC, path, act)

    def sync_folder(self, folder: Path) -> None:
        """Make a directory's entries durable: files created in it, renamed or
        removed.
        """

        def act() -> None:
            with _translated(Operation.SYNC_FOLDER.value, folder):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    _sync(fd, Operation.SYNC_FOLDER, folder)
                finally:
                    os.close(fd)

        self.durable(Operation.SYNC_FOLDER, folder, act)

    def rename(self, source: Path, target: Path) -> None:
        """Put `source` in the place of `target`, atomically; not durable before
        `sync_folder`.
        """

        def act() -> None:
            with _translated(Operation.RENAME.value, source):
                os.rename(source, target)

        self.durable(Operation.RENAME, target, act)

    def replace(self, path: Path, data: Buffer) -> None:
        """Replace a file's content: after a crash the file has the old content or the
        new, never anything else.

        Rename, not write in place: a reader holds no lock and must never see half a
        file. On failure the old file is untouched and no temporary file stays.
        """
        temporary = path.with_name(path.name + ".tmp")
        try:
            # A crash may have left a longer temporary file behind.
            self._write(temporary, 0, data, os.O_CREAT | os.O_TRUNC)
            self.sync(temporary)
            self.rename(temporary, path)
        except DiskError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync_folder(path.parent)

    def remove(self, path: Path) -> None:
        """Remove a file. A missing file is not an error, since removals are repeated
        after a crash.
        """

        def act() -> None:
            with _translated(Operation.REMOVE.value, path), contextlib.suppress(FileNotFoundError):
                os.unlink(path)

        self.durable(Operation.REMOVE, path, act)

    def remove_folder(self, folder: Path) -> None:
        """Remove a directory, if it exists, with all that is in it."""
        if not os.path.lexists(folder):
            return
        for name in self.names(folder):
            entry = folder / name
            if entry.is_dir() and not entry.is_symlink():
                self.remove_folder(entry)
            else:
                self.remove(entry)

        def act() -> None:
            with _translated(Operation.REMOVE.value, folder):
                os.rmdir(folder)

        self.durable(Operation.REMOVE, folder, act)

    def make_folder(self, folder: Path) -> None:
        """Make a directory and its parents, durably; an existing one is not an
        error.
        """
        if self.is_folder(folder):
            return
        self.make_folder(folder.parent)

        def act() -> None:
            with (
                _translated(Operation.MAKE_FOLDER.value, folder),
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(folder)

        self.durable(Operation.MAKE_FOLDER, folder, act)
        self.sync_folder(folder.parent)

    def _write(self, path: Path, offset: int, data: Buffer, flags: int) -> None:
        def write(part: memoryview) -> None:
            with _translated(Operation.WRITE.value, path), _opened(path, os.O_WRONLY | flags) as fd:
                done = 0
                while done < len(part):
                    done += os.pwrite(fd, part[done:], offset + done)

        view = memoryview(data)
        self.durable(
            Operation.WRITE, path, lambda: write(view), lambda: write(view[: len(view) // 2])
        )


class Reader:
    """A file open for reading, into buffers that the caller keeps."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer with the bytes from `offset` and return their count, which is
        less than the buffer's length only where the file ends.
        """
        done = 0
        try:
            while done < len(buffer) and (
                count := os.preadv(self._fd, [buffer[done:]], offset + done)
            ):
                done += count
        except OSError as error:
            raise disk_error("read", self._path, error) from error
        return done


def _sync(fd: int, operation: Operation, path: Path) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise disk_error(operation.value, path, error, suspect=True) from error


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | _FLAGS, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translated(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(operation, path, error) from error


def disk_error(operation: str, path: Path, error: OSError, *, suspect: bool = False) -> DiskError:
    """The error for a failed system call, also for callers that use the system directly
    (preadv, flock).
    """
    facts: dict[str, object] = {
        "operation": operation,
        "path": str(path),
        "errno": errno.errorcode.get(error.errno or 0, str(error.errno)),
    }
    hint = ""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        facts["missing"] = True
    if suspect:
        facts["suspect"] = True
        hint = "What is on the disk is unknown. Check the device before anything is written there."
    return DiskError(
        f"cannot {operation.replace('_', ' ')} {path}: {error.strerror or error}",
        hint=hint,
        **facts,
    )
