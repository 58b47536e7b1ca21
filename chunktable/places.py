"""Where a chunk table lies: a local folder, or a bucket."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import pyarrow.fs as pa_fs

from chunktable.errors import DestinationError
from merkle.checksum import RunningFingerprint
from runtime.disk import Disk, disk_error
from runtime.errors import BusyError, UsageError


def place_of(location: str) -> tuple[pa_fs.FileSystem, str]:
    """The file system of a folder or file, and its path there; S3 is written
    `s3://bucket/prefix?endpoint_override=...`.

    Credentials are those of the environment or of ~/.aws, as the AWS command line finds
    them.

    Raises:
        UsageError: a URI that cannot be understood, or one with a secret in it; a name
            that is no text.
        DestinationError: the region of a bucket cannot be asked for.
    """
    check_name(location)
    if "://" not in location:
        return pa_fs.LocalFileSystem(), os.path.abspath(location)
    if "@" in location.split("/")[2]:
        # It would be in every log and process list.
        raise UsageError(
            "give credentials by the environment (AWS_ACCESS_KEY_ID and so on), not in the address"
        )
    try:
        filesystem, path = pa_fs.FileSystem.from_uri(location)
    except ValueError as error:
        raise UsageError(f"{location}: not an address of files: {error}") from error
    except OSError as error:
        raise DestinationError(f"{location} cannot be reached: {error}", path=location) from error
    return filesystem, path.rstrip("/")


def check_name(location: str) -> None:
    """Refuse a path that is no text in UTF-8: Parquet's libraries take no other, and no
    table could name it.

    Raises:
        UsageError: it is none.
    """
    try:
        location.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(location).decode(errors="backslashreplace")
        hint = (
            "Give it another name; a name with other letters than ASCII wants a locale of UTF-8,"
            " such as C.UTF-8."
        )
        raise UsageError(f"{shown}: its name is no text in UTF-8", hint=hint) from error


def named(entries: Iterable[pa_fs.FileInfo]) -> list[pa_fs.FileInfo]:
    """Those whose names are text in UTF-8, as ours are; pyarrow cannot say the
    others'.
    """
    found = list[pa_fs.FileInfo]()
    for entry in entries:
        with suppress(UnicodeDecodeError):
            _ = entry.path
            found.append(entry)
    return found


# One write of a file.
_WRITE_BYTES = 8 << 20


class Destination(Protocol):
    """Where one datanode's table lies: read through pyarrow, changed through this."""

    @property
    def filesystem(self) -> pa_fs.FileSystem:
        """The file system through which the table is read."""

    @property
    def folder(self) -> str:
        """The table's directory in that file system."""

    def create(self, name: str) -> "AbstractContextManager[Sink]":
        """A new file: there under its name, durably and whole, once the block ends
        without an error.

        Raises:
            DiskError, DestinationError: it cannot be written.
        """

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is no error."""

    def exclusive(self) -> AbstractContextManager[bool]:
        """Keep other exports out; False where that cannot be done.

        Raises:
            BusyError: another is under way.
        """


class LocalDestination:
    """A folder on disk (Destination)."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.filesystem: pa_fs.FileSystem = pa_fs.LocalFileSystem()
        self.folder = str(folder)
        self._path = folder
        self._disk = disk

    @contextmanager
    def create(self, name: str) -> Iterator["Sink"]:
        """A temporary file beside, renamed once it is whole and synced."""
        path = self._path / name
        temporary = path.with_name(name + ".tmp")
        # A crash may have left a longer one.
        if temporary.exists():
            self._disk.remove(temporary)
        try:
            sink = Sink(lambda data, at: self._disk.write_at(temporary, at, data))
            yield sink
            sink.flush()
            self._disk.sync(temporary)
            self._disk.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        self._disk.sync_folder(self._path)

    def remove(self, name: str) -> None:
        """Remove the file; one that is missing is no error."""
        self._disk.remove(self._path / name)

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """Lock the directory; True where no other process holds it."""
        self._disk.make_folder(self._path)
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise disk_error("open", self._path, error) from error
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BusyError(
                    f"another export writes to {self._path}", path=str(self._path)
                ) from error
            except OSError as error:
                raise disk_error("lock", self._path, error) from error
            yield True
        finally:
            os.close(fd)


class ObjectDestination:
    """A prefix of a bucket, or a folder of any file system that pyarrow knows
    (Destination).

    An object is there once its upload has ended, whole. Two exports at once do each
    other no harm: their files have different names, neither removes what the other may
    still need, and the later manifest counts.
    """

    def __init__(self, filesystem: pa_fs.FileSystem, folder: str) -> None:
        self.filesystem = filesystem
        self.folder = folder

    @contextmanager
    def create(self, name: str) -> Iterator["Sink"]:
        """One upload, which the store completes or drops."""
        path = f"{self.folder}/{name}"
        with self._translated("write", path):
            stream = self.filesystem.open_output_stream(path, compression=None)
        try:
            with self._translated("write", path):
                sink = Sink(lambda data, _: stream.write(data))
                yield sink
                sink.flush()
                stream.close()
        except BaseException:
            # pyarrow cannot give up an upload; what nobody names is removed sooner or
            # later.
            with contextlib.suppress(OSError, ValueError):
                stream.close()
                self.filesystem.delete_file(path)
            raise

    def remove(self, name: str) -> None:
        """Remove the object; one that is missing is no error."""
        path = f"{self.folder}/{name}"
        with self._translated("remove", path), contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(path)

    def exclusive(self) -> AbstractContextManager[bool]:
        """Always False: buckets have no locks."""
        return nullcontext(False)

    @contextmanager
    def _translated(self, operation: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DestinationError(
                f"cannot {operation} {path}: {error}", operation=operation, path=path
            ) from error


def destination_of(location: str, datanode: str, disk: Disk) -> Destination:
    """The table of a datanode in a local folder or under a URI such as
    `s3://bucket/prefix`.

    Raises:
        UsageError: the location cannot be understood.
        DestinationError: a bucket cannot be reached.
    """
    filesystem, path = place_of(location)
    if isinstance(filesystem, pa_fs.LocalFileSystem):
        return LocalDestination(Path(path) / datanode, disk)
    return ObjectDestination(filesystem, f"{path}/{datanode}")


class Sink:
    """A file that is being written: gathers small writes, and notes size and
    fingerprint. What pyarrow writes to.
    """

    closed = False

    def __init__(self, put: Callable[[bytes, int], object]) -> None:
        """`put` takes the next bytes and where they begin."""
        self._put = put
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._running = RunningFingerprint()
        self.length_bytes = 0

    def write(self, data: bytes) -> int:
        """Take bytes over; returns how many."""
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= _WRITE_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Hand on what was gathered."""
        if self._waiting:
            joined = b"".join(self._waiting)
            self._waiting, self._waiting_bytes = [], 0
            self._put(joined, self.length_bytes)
            self._running.update(joined)
            self.length_bytes += len(joined)

    def close(self) -> None:
        """Hand on the rest."""
        self.flush()

    @property
    def checksum(self) -> str:
        """The fingerprint of all bytes that were put, in hex."""
        return self._running.digest().hex()
