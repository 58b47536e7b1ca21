"""File access: all reads and durable changes of files go through `Disk`.

A `Disk` is created once and passed down. Every change that must survive a crash goes
through `Disk.durable`; tests override it to stop, tear or fail a run at each change.
Only regular files are opened, never symbolic links: a link could lead out of its
directory, and a pipe would block the reader for ever.
"""

import contextlib
import errno
import os
import pwd
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from merkle.checksum import Buffer
from runtime.errors import DiskError

# O_NONBLOCK: opening a pipe returns at once, so that it can be checked and refused.
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ_BYTES = 1 << 20
_TOKEN_BYTES = 8
_TEMPORARY = re.compile(rf".+\.[0-9a-f]{{{2 * _TOKEN_BYTES}}}\.tmp")
# There is no directory, or a link that leads to itself.
_NO_FOLDER = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
# The largest file that `Disk.read` reads: a damaged inode can report any length.
WHOLE_BYTES_MAX = 256 << 20


class Operation(Enum):
    """The durable operations; tests count them, and errors have their names."""

    WRITE = "write"
    SYNC = "sync"
    RENAME = "rename"
    REMOVE = "remove"
    SYNC_FOLDER = "sync_folder"
    MAKE_FOLDER = "make_folder"
    # One write batch of a database.
    BATCH = "batch"


class Disk:
    """Reads files and changes them durably.

    Every method raises DiskError if a system call fails. Its facts are `operation`,
    `path`, `errno` (by name), and where they apply `missing` (no such file), `denied`
    (this user may not do it) and `suspect` (a sync failed). After a failed sync the
    content of the disk is unknown, so callers stop writing there. A failed sync is not
    retried: a second one may succeed although the bytes were lost.
    """

    def durable(
        self,
        operation: Operation,
        path: Path,
        act: Callable[[], None],
        torn: Callable[[], None] | None = None,
    ) -> None:
        """Carry out one durable operation by calling `act`.

        A test may call `torn` instead: it does the part that a crash may leave behind.
        """
        del operation, path, torn
        act()

    def read(self, path: Path) -> bytes:
        """The bytes of the whole file.

        Raises:
            DiskError: with EFBIG if the file is larger than WHOLE_BYTES_MAX.
        """
        with _translate_errors("read", path), _open_regular(path, os.O_RDONLY) as fd:
            if os.fstat(fd).st_size > WHOLE_BYTES_MAX:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
            parts = []
            while part := os.read(fd, _READ_BYTES):
                parts.append(part)
            return b"".join(parts)

    def read_at(self, path: Path, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer only if the file ends there."""
        with _translate_errors("read", path), _open_regular(path, os.O_RDONLY) as fd:
            parts, position, end = [], offset, offset + length
            while position < end and (part := os.pread(fd, end - position, position)):
                parts.append(part)
                position += len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    @contextlib.contextmanager
    def reader(self, path: Path) -> Iterator["Reader"]:
        """The file, opened for reading in pieces."""
        with contextlib.ExitStack() as stack:
            with _translate_errors("open", path):
                fd = stack.enter_context(_open_regular(path, os.O_RDONLY))
            yield Reader(path, fd)

    def length(self, path: Path) -> int | None:
        """The length of a regular file in bytes; None if it does not exist."""
        try:
            with _translate_errors("stat", path), _open_regular(path, os.O_RDONLY) as fd:
                return os.fstat(fd).st_size
        except DiskError as error:
            if error.facts.get("missing"):
                return None
            raise

    def modified_ns(self, path: Path) -> int | None:
        """The modification time of a file in ns since the epoch; None if it does not
        exist.
        """
        try:
            with _translate_errors("stat", path):
                return os.lstat(path).st_mtime_ns
        except DiskError as error:
            if error.facts.get("missing"):
                return None
            raise

    def stamp(self, path: Path) -> tuple[int, int, int, int]:
        """Length, times of the last writing and of the last change of a file in ns, and
        inode: no write leaves all of them as they were.
        """
        with _translate_errors("stat", path):
            found = os.lstat(path)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino

    def is_folder(self, path: Path) -> bool:
        """Whether the directory exists.

        Raises:
            DiskError: the device failed or permission was denied; the directory may
                exist.
        """
        # Not Path.is_dir: newer Pythons answer False where permission is denied.
        with _translate_errors("stat", path):
            try:
                return stat.S_ISDIR(os.stat(path).st_mode)
            except ValueError:
                # No path has a NUL byte.
                return False
            except OSError as error:
                if error.errno in _NO_FOLDER:
                    return False
                raise

    def names(self, folder: Path) -> list[str]:
        """The names of a directory's entries, sorted."""
        with _translate_errors("list", folder):
            return sorted(os.listdir(folder))

    def write_at(self, path: Path, offset: int, data: Buffer) -> None:
        """Write in place; a missing file is created. Not durable until `sync`."""
        self._write(path, offset, data, os.O_CREAT)

    def sync(self, path: Path) -> None:
        """Make a file's bytes durable.

        Raises:
            DiskError: with the fact `suspect` if the sync itself failed: the bytes may
                or may not be on disk.
        """

        def act() -> None:
            with (
                _translate_errors(Operation.SYNC.value, path),
                _open_regular(path, os.O_RDONLY) as fd,
            ):
                _sync(fd, Operation.SYNC, path)

        self.durable(Operation.SYNC, path, act)

    def sync_folder(self, folder: Path) -> None:
        """Make a directory's entries durable: created, renamed and removed files."""

        def act() -> None:
            with _translate_errors(Operation.SYNC_FOLDER.value, folder):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    _sync(fd, Operation.SYNC_FOLDER, folder)
                finally:
                    os.close(fd)

        self.durable(Operation.SYNC_FOLDER, folder, act)

    def rename(self, source: Path, target: Path) -> None:
        """Rename `source` to `target` atomically; not durable until `sync_folder`."""

        def act() -> None:
            with _translate_errors(Operation.RENAME.value, source):
                os.rename(source, target)

        self.durable(Operation.RENAME, target, act)

    def replace(
        self, path: Path, data: Buffer, *, unique: bool = False, private: bool = False
    ) -> None:
        """Replace a file's content durably: a crash leaves the old content or the new.

        Rename, not write in place: readers hold no lock and must never see half a
        file. On failure the old file is intact and the temporary file is removed. With
        `unique` no other writer has a temporary file of the same name; after a crash
        `remove_temporaries` finds it. With `private` only this user may read the file,
        from its first byte on.
        """
        token = f".{secrets.token_hex(_TOKEN_BYTES)}" if unique or private else ""
        temporary = path.with_name(f"{path.name}{token}.tmp")
        try:
            # A crash may have left a longer temporary file.
            mode = 0o600 if private else 0o644
            self._write(temporary, 0, data, os.O_CREAT | os.O_TRUNC, mode)
            self.sync(temporary)
            self.rename(temporary, path)
        except DiskError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self.sync_folder(path.parent)

    def remove(self, path: Path) -> None:
        """Remove a file. A missing file is not an error: removals are repeated after a
        crash.
        """

        def act() -> None:
            with (
                _translate_errors(Operation.REMOVE.value, path),
                contextlib.suppress(FileNotFoundError),
            ):
                os.unlink(path)

        self.durable(Operation.REMOVE, path, act)

    def remove_folder(self, folder: Path) -> None:
        """Remove a directory and its content, if it exists."""
        if not os.path.lexists(folder):
            return
        for name in self.names(folder):
            entry = folder / name
            if entry.is_dir() and not entry.is_symlink():
                self.remove_folder(entry)
            else:
                self.remove(entry)

        def act() -> None:
            with _translate_errors(Operation.REMOVE.value, folder):
                os.rmdir(folder)

        self.durable(Operation.REMOVE, folder, act)

    def remove_temporaries(self, folder: Path) -> None:
        """Remove the unique temporary files that killed processes left in a folder and
        its folders. Called while no other process writes there.
        """

        def fail(error: OSError) -> None:
            raise disk_error("list", folder, error) from error

        for parent, _, names in os.walk(folder, onerror=fail):
            for name in names:
                if _TEMPORARY.fullmatch(name):
                    self.remove(Path(parent) / name)

    def make_folder(self, folder: Path) -> None:
        """Create a directory and its parents durably; an existing one is not an
        error.
        """
        if self.is_folder(folder):
            return
        self.make_folder(folder.parent)

        def act() -> None:
            with _translate_errors(Operation.MAKE_FOLDER.value, folder):
                try:
                    os.mkdir(folder)
                except FileExistsError:
                    # Another process may have made it; anything else is in the way.
                    if not self.is_folder(folder):
                        raise

        self.durable(Operation.MAKE_FOLDER, folder, act)
        self.sync_folder(folder.parent)

    def _write(self, path: Path, offset: int, data: Buffer, flags: int, mode: int = 0o644) -> None:
        def write(part: memoryview) -> None:
            with (
                _translate_errors(Operation.WRITE.value, path),
                _open_regular(path, os.O_WRONLY | flags, mode) as fd,
            ):
                done = 0
                while done < len(part):
                    done += os.pwrite(fd, part[done:], offset + done)

        view = memoryview(data)
        self.durable(
            Operation.WRITE, path, lambda: write(view), lambda: write(view[: len(view) // 2])
        )


class Reader:
    """A file opened for reading into the caller's buffers."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill the buffer with the bytes from `offset`; returns their count, which is
        smaller than the buffer only at the end of the file.
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


def owner_of(path: Path) -> str:
    """The name of the user that owns a file, or the nearest folder above it that this
    process can see; the number if the user has no name.
    """
    for seen in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            number = os.stat(seen).st_uid
            # KeyError: the user of another machine.
            with contextlib.suppress(KeyError):
                return pwd.getpwuid(number).pw_name
            return str(number)
    return "its owner"


def _sync(fd: int, operation: Operation, path: Path) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        raise disk_error(operation.value, path, error, suspect=True) from error


@contextlib.contextmanager
def _open_regular(path: Path, flags: int, mode: int = 0o644) -> Iterator[int]:
    fd = os.open(path, flags | _FLAGS, mode)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _translate_errors(operation: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(operation, path, error) from error


def disk_error(operation: str, path: Path, error: OSError, *, suspect: bool = False) -> DiskError:
    """The DiskError for a failed system call; also used by callers that make their own
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
    if error.errno in (errno.EACCES, errno.EPERM):
        facts["denied"] = True
        hint = f"Run this as a user that may, such as {owner_of(path)}."
    if suspect:
        facts["suspect"] = True
        hint = "The content of the disk is unknown. Check the device before writing to it again."
    return DiskError(
        f"cannot {operation.replace('_', ' ')} {path}: {error.strerror or error}",
        hint=hint,
        **facts,
    )
