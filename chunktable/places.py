"""Places that hold a chunk table: a local folder, or a prefix of a bucket."""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

import pyarrow.fs as pa_fs

from chunktable.errors import DestinationError
from merkle.checksum import RunningFingerprint
from runtime.disk import Disk, disk_error
from runtime.errors import BusyError, UsageError


def resolve_location(location: str) -> tuple[pa_fs.FileSystem, str]:
    """The file system of a local path or a URI, and the path in that file system.

    S3 is `s3://bucket/prefix?endpoint_url=...`, with credentials from the environment
    or ~/.aws, as for the AWS command line.

    Raises:
        UsageError: the URI is invalid or contains a secret, or the name is not UTF-8.
    """
    check_name(location)
    if "://" not in location:
        return pa_fs.LocalFileSystem(), os.path.abspath(location)
    check_scheme(location)
    if "@" in location.split("/")[2]:
        # A secret in the address would appear in every log and process list.
        raise UsageError(
            "give credentials by the environment (AWS_ACCESS_KEY_ID and so on), not in the address"
        )
    if location.lower().startswith("s3:"):
        # Most places are local, and botocore takes longer to import than all of ours.
        from chunktable.s3_files import s3_files

        return s3_files(location)
    try:
        filesystem, path = pa_fs.FileSystem.from_uri(location)
    except ValueError as error:
        raise UsageError(f"{location} is not an address of files: {error}") from error
    return filesystem, path.rstrip("/")


@runtime_checkable
class _WholeReader(Protocol):
    """What a file system of ours does in one request."""

    def read_whole(self, path: str, bytes_max: int) -> bytes: ...


def read_whole(filesystem: pa_fs.FileSystem, path: str, bytes_max: int) -> bytes:
    """The bytes of a whole file, in one request of a bucket: opening a file would ask
    for its size first. Of a larger file it returns more than `bytes_max`, but not all.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(filesystem, pa_fs.PyFileSystem) and isinstance(filesystem.handler, _WholeReader):
        return filesystem.handler.read_whole(path, bytes_max)
    if isinstance(filesystem, pa_fs.LocalFileSystem):
        # pyarrow would first make room for the greatest length.
        with open(path, "rb") as file:
            return file.read(min(os.fstat(file.fileno()).st_size, bytes_max) + 1)
    with filesystem.open_input_stream(path, compression=None) as stream:
        found: bytes = stream.read(bytes_max + 1)
    return found


def check_scheme(location: str) -> None:
    """Check that an address has a scheme that is served. pyarrow has others, which
    need libraries that we do not ship, or wait minutes for a cloud that is not there.

    Raises:
        UsageError: it has another.
    """
    scheme, _, rest = location.partition(":/")
    scheme = scheme.lower()
    if scheme in _FORMS and rest.startswith("/"):
        return
    if scheme in _FORMS:
        # As a path it would be a folder that is not there.
        raise UsageError(
            f"{location}: {scheme}:/ is not an address that is served",
            hint=f"Write {_FORMS[scheme]}.",
        )
    hint = _HINTS.get(scheme, "Use a folder, or s3://bucket/prefix?endpoint_override=HOST:PORT.")
    raise UsageError(f"{location}: {scheme}:// is not an address that is served", hint=hint)


_FORMS = {"s3": "s3://BUCKET/PREFIX", "file": "file:///PATH, or the path alone"}

_OZONE = "Use Ozone's S3 gateway: s3://BUCKET/PREFIX?endpoint_override=HOST:9878&scheme=http."
_MOUNT = "Mount it as a folder, or copy the tables to a folder or to s3://BUCKET/PREFIX."
_HINTS = {
    **dict.fromkeys(("ofs", "o3fs", "o3"), _OZONE),
    **dict.fromkeys(("hdfs", "viewfs", "webhdfs"), _MOUNT),
    **dict.fromkeys(("gs", "gcs", "abfs", "abfss"), _MOUNT),
    **dict.fromkeys(("s3a", "s3n"), "Write s3:// instead."),
}


def check_name(location: str) -> None:
    """Check that a path is UTF-8 text: Parquet's libraries take no other.

    Raises:
        UsageError: it is not.
    """
    try:
        location.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(location).decode(errors="backslashreplace")
        hint = (
            "Rename it. A name with letters beyond ASCII requires a UTF-8 locale, such as C.UTF-8."
        )
        raise UsageError(f"{shown}: its name is not UTF-8 text", hint=hint) from error


def drop_undecodable_names(entries: Iterable[pa_fs.FileInfo]) -> list[pa_fs.FileInfo]:
    """The entries whose names are UTF-8, as all of ours are.

    pyarrow raises UnicodeDecodeError when the path of another is read.
    """
    found = list[pa_fs.FileInfo]()
    for entry in entries:
        with suppress(UnicodeDecodeError):
            _ = entry.path
            found.append(entry)
    return found


# A Sink gathers this much before it writes to the file.
_WRITE_BYTES = 8 << 20


class Destination(Protocol):
    """Where one datanode's table is exported to: read through pyarrow, changed through
    this port.
    """

    @property
    def filesystem(self) -> pa_fs.FileSystem:
        """The file system through which the table is read."""

    @property
    def folder(self) -> str:
        """The path of the table's directory in that file system."""

    def create(self, name: str) -> "AbstractContextManager[Sink]":
        """Open a new file for writing.

        The file appears under its name, durable and complete, when the block ends
        without an error. After an error it does not appear.

        Raises:
            DiskError: a local file cannot be written.
            DestinationError: an object cannot be written.
        """

    def remove(self, name: str) -> None:
        """Remove a file; a missing file is not an error.

        Raises:
            DiskError: a local file cannot be removed.
            DestinationError: an object cannot be removed.
        """

    def exclusive(self) -> AbstractContextManager[bool]:
        """Keep other exports out while the block runs; yields False if the place has no
        locks.

        Raises:
            BusyError: another export is running.
            DiskError: a local directory cannot be made or locked.
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
        """See Destination: a temporary file, renamed when it is complete and synced."""
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
        """See Destination."""
        self._disk.remove(self._path / name)

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """See Destination: locks the directory, so that it always yields True."""
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
    """A prefix of a bucket, or a folder of any file system that pyarrow supports
    (Destination).

    An object appears, complete, when its upload ends. Two exports at a time are safe:
    their files have different names, neither removes what the other may still need, and
    the later manifest counts.
    """

    def __init__(self, filesystem: pa_fs.FileSystem, folder: str) -> None:
        self.filesystem = filesystem
        self.folder = folder

    @contextmanager
    def create(self, name: str) -> Iterator["Sink"]:
        """See Destination: one upload, which the store completes or drops."""
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
            # pyarrow cannot abort an upload. If the removal fails, a later export
            # removes the file, since no manifest names it.
            with contextlib.suppress(OSError, ValueError):
                stream.close()
                self.filesystem.delete_file(path)
            raise

    def remove(self, name: str) -> None:
        """See Destination."""
        path = f"{self.folder}/{name}"
        with self._translated("remove", path), contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(path)

    def exclusive(self) -> AbstractContextManager[bool]:
        """See Destination: yields False, since buckets have no locks."""
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
    """The destination of a datanode's table, in a local folder or under a URI such as
    `s3://bucket/prefix`.

    Raises:
        UsageError: the location is invalid.
        DestinationError: a bucket cannot be reached.
    """
    filesystem, path = resolve_location(location)
    if isinstance(filesystem, pa_fs.LocalFileSystem):
        return LocalDestination(Path(path) / datanode, disk)
    return ObjectDestination(filesystem, f"{path}/{datanode}")


class Sink:
    """A file that is being written, as a file object for pyarrow.

    Gathers small writes; computes the size, the fingerprint, and those of the pieces
    that the writer ends.
    """

    closed = False

    def __init__(self, put: Callable[[bytes, int], object]) -> None:
        """`put` writes bytes at an offset in the file; offsets ascend without gaps."""
        self._put = put
        self._buffered: list[bytes] = []
        self._buffered_bytes = 0
        self._running = RunningFingerprint()
        self._piece = RunningFingerprint()
        self._piece_at = 0
        self.length_bytes = 0
        # The pieces that have ended: the length in bytes and the fingerprint in hex.
        self.pieces: list[tuple[int, str]] = []

    def write(self, data: bytes) -> int:
        """Append bytes; returns their count."""
        self._buffered.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes >= _WRITE_BYTES:
            self.flush()
        return len(data)

    def flush(self) -> None:
        """Write what was gathered."""
        if self._buffered:
            joined = b"".join(self._buffered)
            self._buffered, self._buffered_bytes = [], 0
            self._put(joined, self.length_bytes)
            self._running.update(joined)
            self._piece.update(joined)
            self.length_bytes += len(joined)

    def end_piece(self) -> None:
        """End a piece of the file, which begins where the one before ended."""
        self.flush()
        self.pieces.append((self.length_bytes - self._piece_at, self._piece.digest().hex()))
        self._piece, self._piece_at = RunningFingerprint(), self.length_bytes

    def close(self) -> None:
        """Write the rest."""
        self.flush()

    @property
    def checksum(self) -> str:
        """The fingerprint of all flushed bytes, in hex."""
        return self._running.digest().hex()
