"""The data files of a local bucket: written once, never changed, removed when no row
names them.

A file has a name of its own from the start, since nothing refers to it before its row
is committed: bytes and folder are synced first. What a killed writer leaves behind is a
file without a row. Each writer therefore has a folder of its own and holds a lock on a
file; whoever opens the bucket later and gets that lock may remove such files. The
system releases the lock with the process, so that no dead writer blocks anybody.
"""

import contextlib
import fcntl
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from merkle.checksum import Buffer
from replicator.hashing import ContentHasher
from replicator.stores.errors import StoreError
from runtime.disk import Disk, disk_error
from runtime.errors import DiskError

# Bytes that are hashed, written and read at a time.
_PIECE_BYTES = 1 << 20
# Files of one directory: a sync of a directory costs more the larger it is.
_FOLDER_FILES_MAX = 1000
_TOKEN_BYTES = 8
_ZEROS = bytes(_PIECE_BYTES)
# Looked at first: few bytes that are not zero end the comparison.
_ZEROS_PROBE_BYTES = 64

_DATA_FOLDER = "data"
_WRITERS_FOLDER = "writers"


class ObjectDamagedError(StoreError):
    """The bytes of an object are not those that were written, or cannot be read."""

    code = "object_damaged"


class DataFiles:
    """The data files of one bucket, and this process as their writer. Thread-safe."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._data = folder / _DATA_FOLDER
        self._writers = folder / _WRITERS_FOLDER
        self._disk = disk
        self._lock = threading.Lock()
        self._written = 0
        self._folder: Path | None = None
        self._descriptor = -1
        self._token = ""
        # Files without a row may be left, or come back after a power cut: the next
        # process that opens the bucket has to look.
        self.has_orphans = False

    def begin(self) -> str:
        """Become a writer, once; returns the token that the caller records durably
        before the first `write`.

        Raises:
            DiskError: the lock file cannot be made.
        """
        if self._token:
            # It could not be recorded the last time.
            return self._token
        self._disk.make_folder(self._writers)
        token = secrets.token_hex(_TOKEN_BYTES)
        path = self._writers / token
        while self._descriptor < 0:
            descriptor = _locked(path, blocks=True)
            assert descriptor is not None
            # Another process may have taken the lock first and removed the file.
            if _is_at(descriptor, path):
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        self._token = token
        return token

    def write(self, data: Buffer, hasher: ContentHasher) -> str:
        """Write a new file, durable when this returns; returns its name.

        Stretches of zeros become holes.

        Raises:
            DiskError: it cannot be written.
        """
        assert self._token
        path = self._next_path()
        view = memoryview(data).cast("B")
        try:
            for at in range(0, len(view), _PIECE_BYTES):
                piece = view[at : at + _PIECE_BYTES]
                hasher.update(piece)
                # The last piece gives the file its length.
                if at + _PIECE_BYTES >= len(view) or not _is_zeros(piece):
                    self._disk.write_at(path, at, piece)
            self._disk.sync(path)
            self._disk.sync_folder(path.parent)
        except BaseException:
            self.abandon(self._name(path))
            raise
        finally:
            view.release()
        return self._name(path)

    def abandon(self, name: str) -> None:
        """Remove a file whose row was not committed. Whether that is durable is left to
        the next process that opens the bucket.
        """
        self.has_orphans = True
        with contextlib.suppress(OSError):
            os.unlink(self._data / name)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that no row names any more, durably; a missing one is not an
        error.

        Raises:
            DiskError: one cannot be removed.
        """
        folders = set[Path]()
        for name in names:
            path = self._data / name
            self._disk.remove(path)
            folders.add(path.parent)
        for folder in sorted(folders):
            if self._disk.is_folder(folder):
                self._disk.sync_folder(folder)

    def read(self, name: str, first: int, end: int) -> Iterator[bytes]:
        """The bytes `first` to `end` of a file, in pieces.

        Raises:
            ObjectDamagedError: the file is shorter.
            DiskError: it does not exist or cannot be read.
        """
        path = self._data / name
        buffer = memoryview(bytearray(min(_PIECE_BYTES, end - first)))
        with self._disk.reader(path) as reader:
            while first < end:
                piece = buffer[: end - first]
                count = reader.read_into(piece, first)
                if count < len(piece):
                    raise ObjectDamagedError(
                        f"{path} ends after {first + count} of at least {end} bytes",
                        path=str(path),
                    )
                yield bytes(piece)
                first += count

    @contextlib.contextmanager
    def if_ended(self, token: str) -> Iterator[bool]:
        """Whether a writer has ended; while the block runs no other process can clear
        up after it. Its lock file is removed when the block ends without an error.

        Raises:
            DiskError: the lock file cannot be opened or removed.
        """
        path = self._writers / token
        self._disk.make_folder(self._writers)
        # A power cut may have lost the file: whoever clears up makes it anew.
        descriptor = _locked(path, blocks=False)
        if descriptor is None:
            yield False
            return
        try:
            yield True
            self._disk.remove(path)
        finally:
            os.close(descriptor)

    def writers(self) -> set[str]:
        """Tokens of the writers that have a lock file.

        Raises:
            DiskError: the directory cannot be listed.
        """
        return set(self._names(self._writers))

    def names(self, token: str) -> Iterator[str]:
        """The files of a writer.

        Raises:
            DiskError: its folder cannot be listed.
        """
        for group in self._names(self._data / token):
            for name in self._names(self._data / token / group):
                yield f"{token}/{group}/{name}"

    def remove_empty_folders(self, tokens: Iterable[str]) -> None:
        """Remove the empty folders of writers that have ended. Another process may do
        the same.

        Raises:
            DiskError: one cannot be listed or removed.
        """
        for token in tokens:
            folder = self._data / token
            for group in self._names(folder):
                self._remove_if_empty(folder / group)
            self._remove_if_empty(folder)

    def end(self) -> None:
        """Remove the lock file of this writer, of which nobody needs to know any more.

        Raises:
            DiskError: it cannot be removed.
        """
        self._disk.remove(self._writers / self._token)

    def release(self) -> None:
        """Release the lock; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _next_path(self) -> Path:
        with self._lock:
            number, self._written = self._written, self._written + 1
            folder = self._data / self._token / f"{number // _FOLDER_FILES_MAX:06}"
            if folder != self._folder:
                self._disk.make_folder(folder)
                self._folder = folder
            return folder / f"{number % _FOLDER_FILES_MAX:03}"

    def _names(self, folder: Path) -> list[str]:
        """None where the directory does not exist, or another process removed it."""
        try:
            return self._disk.names(folder)
        except DiskError as error:
            if error.facts.get("missing"):
                return []
            raise

    def _remove_if_empty(self, folder: Path) -> None:
        try:
            if not self._disk.names(folder):
                self._disk.remove_folder(folder)
        except DiskError as error:
            if not error.facts.get("missing"):
                raise

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self._data))


def _locked(path: Path, *, blocks: bool) -> int | None:
    """A locked file, made if need be; None if another process holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise disk_error("lock", path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocks else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise disk_error("lock", path, error) from error
    return descriptor


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _is_zeros(piece: memoryview) -> bool:
    probe = piece[:_ZEROS_PROBE_BYTES]
    return bytes(probe) == _ZEROS[: len(probe)] and bytes(piece) == _ZEROS[: len(piece)]
