"""Files of this machine and objects of a bucket, by the same calls.

`Path` names files, `ObjectPath` objects. A bucket has neither folders nor renames: an
object appears, complete, when its upload ends, and a folder is a common beginning of
keys.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias
from urllib.parse import quote, unquote, urlsplit

import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from chunktable.errors import (
    BucketMissingError,
    ObjectStoreError,
    StoreDeniedError,
    StoreUnreachableError,
)
from chunktable.places import check_name, check_scheme, resolve_location
from runtime.disk import Disk, Operation
from runtime.errors import BusyError, ConfigError, DiskError
from runtime.s3_answers import S3Error, S3OutcomeUnknownError, S3UnavailableError

if TYPE_CHECKING:
    from chunktable.s3_files import ObjectSink, S3Files

# Objects that are removed at once: each takes a round trip.
_REMOVALS_AT_ONCE = 16
_CONFLICTS = (409, 412)
_DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"})


@dataclass(frozen=True, slots=True, order=True)
class ObjectPath:
    """An object or a folder of a bucket: what `Path` is for this machine. As text it is
    the address, which `resolve_location` takes.
    """

    bucket: str
    # Without a slash at its ends; empty for the bucket itself.
    key: str
    # Of the address, with its "?".
    options: str = ""

    @classmethod
    def of(cls, address: str) -> "ObjectPath":
        """The path of `s3://BUCKET/KEY?OPTIONS`.

        Raises:
            UsageError: it is no such address.
        """
        resolve_location(address)
        parts = urlsplit(address)
        options = f"?{parts.query}" if parts.query else ""
        return cls(parts.netloc, unquote(parts.path).strip("/"), options)

    def __truediv__(self, name: str) -> "ObjectPath":
        return replace(self, key=f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{quote(self.key, safe='/=~')}{self.options}"

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """The folder that it lies in."""
        return replace(self, key=self.key.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        """Another object or folder beside this one."""
        return self.parent / name


AnyPath: TypeAlias = Path | ObjectPath


def path_of(location: str) -> AnyPath:
    """The path that a location names: a local path, or an address of S3.

    Raises:
        UsageError: it is another address, or no address.
    """
    check_name(location)
    if "://" not in location:
        return Path(location)
    check_scheme(location)
    if location.lower().startswith("s3:"):
        return ObjectPath.of(location)
    return Path(resolve_location(location)[1])


def is_inside(path: AnyPath, folder: AnyPath) -> bool:
    """Whether a path is a folder or lies below it."""
    if isinstance(path, ObjectPath) and isinstance(folder, ObjectPath):
        is_below = f"{path.key}/".startswith(f"{folder.key}/".lstrip("/"))
        return path.bucket == folder.bucket and is_below
    if isinstance(path, Path) and isinstance(folder, Path):
        return real_path(path).is_relative_to(real_path(folder))
    return False


def real_path(path: Path) -> Path:
    """The path without links. Unlike Path.resolve it takes links that lead to each
    other: who opens the path gets the error.
    """
    return Path(os.path.realpath(path))


class NewFile(Protocol):
    """A file that is being written; `target` is what pyarrow writes to."""

    @property
    def target(self) -> "str | ObjectSink":
        """A path or a file object."""

    def close(self) -> None:
        """Let it appear, complete and durable.

        Raises:
            DiskError: it cannot be written.
        """

    def discard(self) -> None:
        """Leave nothing."""


class Files:
    """Reads files and objects, and changes them durably.

    Every method raises DiskError; of a bucket an ObjectStoreError, which is one.
    """

    def __init__(self, disk: Disk, check: Callable[[], None] = lambda: None) -> None:
        """`check` is called before each change of a bucket, and may refuse it."""
        self._disk = disk
        self._check = check

    def of_tasks(self) -> "Files":
        """The same for tasks elsewhere, which can ask nobody before a change."""
        return Files(self._disk)

    def read(self, path: AnyPath) -> bytes:
        """The bytes of the whole file, with the fact `missing` in the error if it does
        not exist.
        """
        if isinstance(path, Path):
            return self._disk.read(path)
        with _translated("read", path):
            store, place = _store(path)
            return store.get(place).body

    def exists(self, path: AnyPath) -> bool:
        """Whether there is such a file or folder."""
        if isinstance(path, Path):
            return path.exists()
        with _translated("read", path):
            store, place = _store(path)
            (info,) = store.get_file_info([place])
            return bool(info.type is not pa_fs.FileType.NotFound)

    def names(self, folder: AnyPath) -> list[str]:
        """The names of a folder's entries, sorted; none if it does not exist."""
        if isinstance(folder, Path):
            return self._disk.names(folder) if self._disk.is_folder(folder) else []
        return sorted(one.base_name for one in _listed(folder, recursive=False))

    def files_below(self, folder: AnyPath) -> list[str]:
        """The paths of all files below a folder, relative to it, sorted; none if it
        does not exist.
        """
        if isinstance(folder, Path):
            found = (path for path in folder.rglob("*") if path.is_file())
            return sorted(str(path.relative_to(folder)) for path in found)
        _, place = _store(folder)
        return sorted(
            one.path[len(place) + 1 :]
            for one in _listed(folder, recursive=True)
            if one.type is pa_fs.FileType.File
        )

    def replace(self, path: AnyPath, data: bytes) -> None:
        """Write a whole file: readers see the old content or the new."""
        if isinstance(path, Path):
            self._disk.replace(path, data)
            return
        self._check()
        store, place = _store(path)

        def put() -> None:
            store.put(place, data, {})

        self._changed(Operation.WRITE, path, put)

    def append(self, path: AnyPath, data: bytes) -> None:
        """Write a file that nobody else has written: an entry of a log that one process
        writes at a time.

        Raises:
            BusyError: another process has written it. A bucket of a store that ignores
                conditions cannot tell.
        """
        if isinstance(path, Path):
            self._disk.replace(path, data)
            return
        self._check()

        def put() -> None:
            # The answer to an earlier attempt of ours may have been lost.
            if swap_object(path, data, "") is None and self.read(path) != data:
                raise BusyError(f"another process has written {path}", path=str(path))

        self._changed(Operation.WRITE, path, put)

    def create(self, path: AnyPath) -> NewFile:
        """Begin a new file, whose folder is made. It replaces an old one when it is
        closed.
        """
        if isinstance(path, Path):
            self._disk.make_folder(path.parent)
            return _NewLocalFile(path, self._disk)
        self._check()
        store, place = _store(path)

        def change(act: Callable[[], None]) -> None:
            self._check()
            self._changed(Operation.WRITE, path, act)

        return _NewObject(store.open_writer(place), change)

    def remove(self, path: AnyPath) -> None:
        """Remove a file; a missing one is not an error."""
        if isinstance(path, Path):
            self._disk.remove(path)
            return
        self._check()
        store, place = _store(path)
        self._changed(Operation.REMOVE, path, lambda: store.delete_file(place))

    def remove_folder(self, folder: AnyPath) -> None:
        """Remove a folder and all that is in it, if it exists."""
        if isinstance(folder, Path):
            self._disk.remove_folder(folder)
            return
        below = [folder / name for name in self.files_below(folder)]
        with ThreadPoolExecutor(_REMOVALS_AT_ONCE, "remove") as pool:
            for _ in pool.map(self.remove, below):
                pass

    def make_folder(self, folder: AnyPath) -> None:
        """Make a folder and those above it; in a bucket there is nothing to do."""
        if isinstance(folder, Path):
            self._disk.make_folder(folder)

    def _changed(self, operation: Operation, path: ObjectPath, act: Callable[[], None]) -> None:
        with _translated(operation.value, path):
            self._disk.durable(operation, Path(path.bucket, path.key), act)


def open_parquet(path: AnyPath) -> pq.ParquetFile:
    """A Parquet file, whose pages are checked.

    Raises:
        OSError, ValueError, pa.ArrowException: it cannot be read.
    """
    if isinstance(path, Path):
        return pq.ParquetFile(path, page_checksum_verification=True)
    filesystem, place = resolve_location(str(path))
    # Column chunks that lie together are read together: each request is a round trip.
    return pq.ParquetFile(
        filesystem.open_input_file(place), page_checksum_verification=True, pre_buffer=True
    )


def store_error(path: AnyPath, error: Exception) -> ObjectStoreError | None:
    """The error of a store that refused or was not reached, if this caused an error of
    reading or writing a file: what the file holds has not.
    """
    found = error
    if isinstance(path, ObjectPath) and isinstance(error, OSError):
        found = _store_error("use", path, error)
    if isinstance(found, ObjectStoreError) and not found.facts.get("missing"):
        return found
    return None


class _NewLocalFile:
    """Written beside its place, and renamed (NewFile)."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._temporary = path.with_name(f".{path.name}.tmp")
        self.target: str = str(self._temporary)

    def close(self) -> None:
        """See NewFile."""
        self._disk.sync(self._temporary)
        self._disk.rename(self._temporary, self._path)
        self._disk.sync_folder(self._path.parent)

    def discard(self) -> None:
        """See NewFile."""
        with contextlib.suppress(DiskError):
            self._disk.remove(self._temporary)


class _NewObject:
    """One upload (NewFile)."""

    def __init__(self, writer: "ObjectSink", change: Callable[[Callable[[], None]], None]) -> None:
        self.target = writer
        self._change = change

    def close(self) -> None:
        """See NewFile."""
        self._change(self.target.close)

    def discard(self) -> None:
        """See NewFile: the parts of an upload are dropped."""
        with contextlib.suppress(OSError):
            self.target.discard()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as it was read: its ETag, and the seconds since it was written by the
    clock of the store.
    """

    content: bytes
    etag: str
    age_s: float


def read_object(path: ObjectPath) -> StoredObject | None:
    """The object; None if it does not exist.

    Raises:
        ObjectStoreError: it cannot be read.
    """
    try:
        with _translated("read", path):
            store, place = _store(path)
            answer = store.get(place)
    except DiskError as error:
        if error.facts.get("missing"):
            return None
        raise
    times = [answer.headers.get(name, "") for name in ("date", "last-modified")]
    with contextlib.suppress(ValueError, TypeError):
        now, then = map(parsedate_to_datetime, times)
        return StoredObject(
            answer.body, answer.headers.get("etag", ""), max((now - then).total_seconds(), 0.0)
        )
    return StoredObject(answer.body, answer.headers.get("etag", ""), 0.0)


def swap_object(path: ObjectPath, content: bytes, etag: str) -> str | None:
    """Write an object if it still has this ETag, or with an empty one if there is none.
    Returns the new ETag; None if it has another. A store that ignores conditions writes
    it whatever there is.

    Raises:
        ObjectStoreError: it cannot be written, or nobody knows whether it was.
    """
    try:
        with _translated("write", path):
            store, place = _store(path)
            return store.put(place, content, {"if-match": etag} if etag else {"if-none-match": "*"})
    except ObjectStoreError as error:
        # A store whose racers meet answers one of these; so does one that lost it.
        if error.facts.get("status") in _CONFLICTS or error.facts.get("missing"):
            return None
        raise


def _store(path: ObjectPath) -> "tuple[S3Files, str]":
    # See resolve_location.
    from chunktable.s3_files import s3_objects

    return s3_objects(str(path))


def _listed(folder: ObjectPath, *, recursive: bool) -> list[pa_fs.FileInfo]:
    try:
        with _translated("list", folder):
            store, place = _store(folder)
            return store.get_file_info_selector(pa_fs.FileSelector(place, recursive=recursive))
    except DiskError as error:
        # A folder that nothing lies in does not exist; a bucket does.
        is_missing = isinstance(error.__cause__, FileNotFoundError)
        if is_missing and not isinstance(error, BucketMissingError):
            return []
        raise


@contextmanager
def _translated(operation: str, path: ObjectPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _store_error(operation, path, error) from error


def _store_error(operation: str, path: ObjectPath, error: OSError) -> DiskError:
    """The error for what a file system of S3 raised."""
    cause = error.__cause__
    text = f"cannot {operation} {path}: {error}"
    if isinstance(cause, ConfigError):
        said = f"cannot {operation} {path}: {cause.message}"
        return StoreDeniedError(said, hint=cause.hint, path=str(path))
    if not isinstance(cause, S3Error):
        return DiskError(text, path=str(path))
    facts = {"path": str(path), "status": cause.status, "s3_code": cause.s3_code}
    kind = ObjectStoreError
    if cause.s3_code == "NoSuchBucket":
        kind = BucketMissingError
    elif cause.status == 404:
        facts["missing"] = True
    elif cause.status in (401, 403) or cause.s3_code in _DENIED:
        kind = StoreDeniedError
    elif isinstance(cause, S3UnavailableError | S3OutcomeUnknownError):
        kind = StoreUnreachableError
    return kind(f"cannot {operation} {path}: {cause.message}", hint=cause.hint, **facts)
