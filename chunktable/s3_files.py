"""Buckets of S3 as a file system for pyarrow, over our own client.

A key's folders are prefixes: they exist as long as an object lies below them. Whatever
the store refuses is an OSError, as with every file system of pyarrow; what does not
exist is a FileNotFoundError.
"""

import io
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, unquote_plus, urlsplit
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

import pyarrow as pa
import pyarrow.fs as pa_fs

from chunktable.seekable import SeekableReader
from merkle.checksum import Buffer
from merkle.errors import ReconcileError
from runtime.errors import UsageError
from runtime.s3 import Query, S3Client, open_client
from runtime.s3_account import S3Settings
from runtime.s3_answers import S3Answer, S3Error, parse_document

T = TypeVar("T")

# Whoever reads on from where the last read ended gets this much at a time.
_READ_AHEAD_BYTES = 4 << 20
# Of an upload; S3 takes 10,000 parts, so that an object may have 156 GiB.
_PART_BYTES = 16 << 20
# Our own of `runtime.s3`, and those that pyarrow had for the same.
_PARAMETERS = (
    "endpoint_url",
    "region",
    "profile",
    "addressing",
    "endpoint_override",
    "scheme",
    "force_virtual_addressing",
)


def s3_files(location: str) -> tuple[pa_fs.FileSystem, str]:
    """The file system of `s3://BUCKET/PREFIX?...`, and the path in it. No request is
    sent, and credentials are not looked for before the first.

    Raises:
        UsageError: it is no such address.
    """
    settings, path = _place(location)
    return _filesystem(settings, os.getpid()), path


def s3_objects(location: str) -> tuple["S3Files", str]:
    """The same without pyarrow between, for what its file systems do not have."""
    settings, path = _place(location)
    return _handler(settings, os.getpid()), path


def _place(location: str) -> tuple[S3Settings, str]:
    try:
        parts = urlsplit(location)
        given = dict(
            parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        )
    except ValueError as error:
        raise UsageError(f"{location} is not an address of files: {error}") from error
    if not parts.netloc or parts.fragment:
        raise UsageError(f"{location} is not an address of files: it names no bucket")
    unknown = sorted(set(given) - set(_PARAMETERS))
    if unknown:
        raise UsageError(
            f"{location} has unknown parameters: {', '.join(unknown)}",
            hint=f"Known are {', '.join(_PARAMETERS)}.",
        )
    is_virtual = given.get("force_virtual_addressing", "").lower() in ("1", "true")
    settings = S3Settings(
        endpoint_url=given.get("endpoint_url") or _endpoint(given),
        region=given.get("region", ""),
        profile=given.get("profile", ""),
        addressing=given.get("addressing") or "virtual" * is_virtual,
    )
    return settings, f"{parts.netloc}{unquote(parts.path)}".rstrip("/")


def _endpoint(given: dict[str, str]) -> str:
    address = given.get("endpoint_override", "")
    return (
        f"{given.get('scheme', 'https')}://{address}"
        if address and "://" not in address
        else address
    )


@cache
def _filesystem(settings: S3Settings, _process: int) -> pa_fs.FileSystem:
    return pa_fs.PyFileSystem(_handler(settings, _process))


@cache
def _handler(settings: S3Settings, _process: int) -> "S3Files":
    """One for all files of a store, so that its connections are used again; not by a
    process that was forked from this one.
    """
    return S3Files(lambda region: _open(settings, region))


def _open(settings: S3Settings, region: str) -> S3Client:
    found = (
        settings
        if settings.region
        else S3Settings(settings.endpoint_url, region, settings.profile, settings.addressing)
    )
    return open_client(found)


# pyarrow has no types.
class S3Files(pa_fs.FileSystemHandler):  # type: ignore[misc]
    """The buckets of one store; paths are `BUCKET/KEY`. Thread-safe."""

    def __init__(self, open_store: Callable[[str], S3Client]) -> None:
        """`open_store` gets a region, empty for the configured one."""
        self._open_store = open_store
        self._lock = threading.Lock()
        self._client: S3Client | None = None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def get_type_name(self) -> str:
        """The kind of file system."""
        return "s3"

    def normalize_path(self, path: str) -> str:
        """The path without a slash at its end."""
        return path.rstrip("/")

    def get_file_info(self, paths: Sequence[str]) -> list[pa_fs.FileInfo]:
        """Each path as an object, a folder, or missing."""
        return [self._info(path.rstrip("/")) for path in paths]

    def get_file_info_selector(self, selector: pa_fs.FileSelector) -> list[pa_fs.FileInfo]:
        """The objects and folders of a folder, or all below it."""
        base = selector.base_dir.rstrip("/")
        try:
            found = list(self._below(base, recursive=selector.recursive))
        except FileNotFoundError:
            if selector.allow_not_found:
                return []
            raise
        # A folder exists by what lies in it; a bucket may be empty.
        if not found and "/" in base and not selector.allow_not_found:
            raise FileNotFoundError(f"{base} does not exist")
        return found

    def create_dir(self, path: str, recursive: bool) -> None:
        """Nothing to do: a folder exists with its first object."""

    def delete_dir(self, path: str) -> None:
        """Refused, as are all operations that we have no use for."""
        raise _unsupported("delete_dir")

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        """Refused."""
        raise _unsupported("delete_dir_contents")

    def delete_root_dir_contents(self) -> None:
        """Refused."""
        raise _unsupported("delete_root_dir_contents")

    def delete_file(self, path: str) -> None:
        """Delete an object; a missing one is not an error."""
        self._ask("DELETE", path)

    def move(self, src: str, dest: str) -> None:
        """Refused."""
        raise _unsupported("move")

    def copy_file(self, src: str, dest: str) -> None:
        """Refused."""
        raise _unsupported("copy_file")

    def open_input_stream(self, path: str) -> pa.NativeFile:
        """The object for reading."""
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> pa.NativeFile:
        """The object for reading anywhere in it, as it is now: once another object has
        its key, reading fails.
        """
        answer = self._ask("HEAD", path)
        length = int(answer.headers.get("content-length", "0"))
        return pa.PythonFile(
            _ObjectReader(self._read, path, length, answer.headers.get("etag", "")), mode="r"
        )

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        """A new object, which appears when the stream is closed."""
        return pa.PythonFile(self.open_writer(path), mode="w")

    def open_writer(self, path: str) -> "ObjectSink":
        """A new object, which appears when the writer is closed."""
        return ObjectSink(self._ask, path)

    def get(self, path: str) -> S3Answer:
        """A whole object, in one request."""
        bucket, _, key = path.partition("/")

        def read(client: S3Client) -> S3Answer:
            with client.stream(bucket, key) as answer:
                return S3Answer(answer.status, answer.headers, b"".join(answer.pieces))

        with _as_os_error(path):
            return self._with_client(read)

    def read_whole(self, path: str, bytes_max: int) -> bytes:
        """The bytes of an object in one request; of a larger one the first
        `bytes_max` + 1 or more.
        """
        bucket, _, key = path.partition("/")

        def read(client: S3Client) -> bytes:
            found, length = list[bytes](), 0
            with client.stream(bucket, key) as answer:
                for piece in answer.pieces:
                    found.append(piece)
                    length += len(piece)
                    if length > bytes_max:
                        break
            return b"".join(found)

        with _as_os_error(path):
            return self._with_client(read)

    def put(self, path: str, body: Buffer, conditions: Mapping[str, str]) -> str:
        """Write an object, on conditions that are headers; returns its ETag."""
        return self._ask("PUT", path, body=body, headers=conditions).headers.get("etag", "")

    def open_append_stream(self, path: str, metadata: object) -> pa.NativeFile:
        """Refused: an object cannot grow."""
        raise _unsupported("open_append_stream")

    def _info(self, path: str) -> pa_fs.FileInfo:
        is_bucket = "/" not in path
        if not is_bucket:
            try:
                answer = self._ask("HEAD", path)
            except FileNotFoundError:
                pass
            else:
                size = int(answer.headers.get("content-length", "0"))
                modified = parsedate_to_datetime(answer.headers["last-modified"])
                return pa_fs.FileInfo(path, pa_fs.FileType.File, size=size, mtime=modified)
        try:
            exists = next(self._below(path, recursive=True, most=1), None) or is_bucket
        except FileNotFoundError:
            exists = False
        kind = pa_fs.FileType.Directory if exists else pa_fs.FileType.NotFound
        return pa_fs.FileInfo(path, kind)

    def _below(self, base: str, *, recursive: bool, most: int = 1000) -> Iterator[pa_fs.FileInfo]:
        """What lies below a folder. With `recursive` the folders between come too, each
        before what is in it.
        """
        bucket, _, folder = base.partition("/")
        prefix = f"{folder}/" if folder else ""
        query = [("list-type", "2"), ("encoding-type", "url"), ("prefix", prefix)]
        query.append(("max-keys", str(most)))
        query += [] if recursive else [("delimiter", "/")]
        token, reported = "", {prefix}
        while True:
            more = [("continuation-token", token)] if token else []
            root = _listing(self._ask("GET", bucket, query=[*query, *more]))
            for entry in root:
                if entry.tag not in ("Contents", "CommonPrefixes"):
                    continue
                key = _decoded(root, entry.findtext("Key") or entry.findtext("Prefix") or "")
                for at in (i for i, letter in enumerate(key) if letter == "/" and i >= len(prefix)):
                    if key[: at + 1] not in reported:
                        reported.add(key[: at + 1])
                        yield pa_fs.FileInfo(f"{bucket}/{key[:at]}", pa_fs.FileType.Directory)
                # An object with a slash at its end is a folder's marker.
                if not key.endswith("/"):
                    yield _file_info(f"{bucket}/{key}", entry)
                elif key == prefix and most == 1:
                    yield pa_fs.FileInfo(base, pa_fs.FileType.Directory)
            token = root.findtext("NextContinuationToken") or ""
            if root.findtext("IsTruncated") != "true" or not token:
                return

    def _read(self, path: str, first: int, end: int, etag: str) -> bytes:
        """The bytes from `first` to `end`, exclusive, of the object with this ETag."""
        bucket, _, key = path.partition("/")
        headers = {"range": f"bytes={first}-{end - 1}"} | ({"if-match": etag} if etag else {})

        def read(client: S3Client) -> bytes:
            with client.stream(bucket, key, headers=headers) as answer:
                return b"".join(answer.pieces)

        with _as_os_error(path):
            data = self._with_client(read)
        if len(data) != end - first:
            raise OSError(f"{path}: {len(data)} bytes came for {end - first}")
        return data

    def _ask(
        self,
        method: str,
        path: str,
        *,
        query: Query = (),
        body: Buffer = b"",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> S3Answer:
        bucket, _, key = path.partition("/")
        with _as_os_error(path):
            return self._with_client(
                lambda client: client.request(
                    method, bucket, key, query=query, body=body, headers=headers
                )
            )

    def _with_client(self, act: Callable[[S3Client], T]) -> T:
        """Do it, once more if the store names another region for the bucket."""
        with self._lock:
            client = self._client = self._client or self._open_store("")
        try:
            return act(client)
        except S3Error as error:
            region = str(error.facts.get("region", ""))
            if error.status not in (301, 400) or not region:
                raise
        with self._lock:
            # Whoever uses the other one goes on with it.
            client = self._client = self._open_store(region)
        return act(client)


class _ObjectReader(SeekableReader):
    """One object as a file."""

    def __init__(
        self, read: Callable[[str, int, int, str], bytes], path: str, length: int, etag: str
    ) -> None:
        super().__init__(length)
        self._read = read
        self._path, self._etag = path, etag
        self._ahead, self._ahead_at = memoryview(b""), 0

    def read(self, size: int | None = -1) -> Any:
        rest = max(self._length - self._at, 0)
        size = rest if size is None or size < 0 else min(size, rest)
        first, self._at = self._at, self._at + size
        if not size:
            return b""
        end, ahead_end = first + size, self._ahead_at + len(self._ahead)
        if not self._ahead_at <= first <= ahead_end or end > ahead_end:
            return self._fetch(first, end, is_next=first == ahead_end)
        return self._ahead[first - self._ahead_at : end - self._ahead_at]

    def _fetch(self, first: int, end: int, *, is_next: bool) -> memoryview:
        """Read ahead only where the last read ended: who jumps about wants no more."""
        last = min(max(end, first + _READ_AHEAD_BYTES), self._length) if is_next else end
        self._ahead = memoryview(self._read(self._path, first, last, self._etag))
        self._ahead_at = first
        return self._ahead[: end - first]


class ObjectSink(io.RawIOBase):
    """A new object as a file: one PUT if it is small, else an upload in parts."""

    def __init__(self, ask: Callable[..., S3Answer], path: str) -> None:
        self._ask = ask
        self._path = path
        self._gathered = bytearray()
        self._upload = ""
        self._etags: list[str] = []
        self._has_failed = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._gathered += data
        while len(self._gathered) >= _PART_BYTES:
            self._put_part(bytes(self._gathered[:_PART_BYTES]))
            del self._gathered[:_PART_BYTES]
        return memoryview(data).nbytes

    def close(self) -> None:
        """Complete the object; abort an upload of which a part has failed."""
        if self.closed:
            return
        super().close()
        if self._has_failed:
            self._abort()
        elif self._upload:
            self._complete()
        else:
            self._ask("PUT", self._path, body=bytes(self._gathered))

    def discard(self) -> None:
        """Close it, and let no object appear."""
        self._has_failed = True
        self.close()

    def _put_part(self, body: bytes) -> None:
        try:
            if not self._upload:
                begun = self._ask("POST", self._path, query=[("uploads", "")])
                root = _document(self._path, begun, "InitiateMultipartUploadResult")
                self._upload = root.findtext("UploadId") or ""
            query = [("partNumber", str(len(self._etags) + 1)), ("uploadId", self._upload)]
            answer = self._ask("PUT", self._path, query=query, body=body)
        except OSError:
            self._has_failed = True
            raise
        self._etags.append(answer.headers.get("etag", ""))

    def _complete(self) -> None:
        try:
            if self._gathered:
                self._put_part(bytes(self._gathered))
            rows = "".join(
                f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
                for number, etag in enumerate(self._etags, start=1)
            )
            body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
            self._ask("POST", self._path, query=[("uploadId", self._upload)], body=body)
        except OSError:
            self._abort()
            raise

    def _abort(self) -> None:
        if self._upload:
            self._ask("DELETE", self._path, query=[("uploadId", self._upload)])


def _listing(answer: S3Answer) -> Element:
    return _document("the listing", answer, "ListBucketResult")


def _document(what: str, answer: S3Answer, root: str) -> Element:
    with _as_os_error(what):
        return parse_document(answer.body, root)


def _decoded(root: Element, text: str) -> str:
    return unquote_plus(text) if root.findtext("EncodingType") == "url" else text


def _file_info(path: str, entry: Element) -> pa_fs.FileInfo:
    modified = datetime.fromisoformat(entry.findtext("LastModified") or "")
    # Whole seconds, as a HEAD of the same object says.
    modified = modified.replace(microsecond=0)
    when = modified.replace(tzinfo=modified.tzinfo or UTC)
    size = int(entry.findtext("Size") or 0)
    return pa_fs.FileInfo(path, pa_fs.FileType.File, size=size, mtime=when)


@contextmanager
def _as_os_error(path: str) -> Iterator[None]:
    """What pyarrow and its callers expect of a file system."""
    try:
        yield
    except S3Error as error:
        if error.status == 404:
            raise FileNotFoundError(f"{path} does not exist: {error.message}") from error
        raise OSError(_told(error)) from error
    except (ReconcileError, ValueError) as error:
        raise OSError(_told(error) if isinstance(error, ReconcileError) else str(error)) from error


def _told(error: ReconcileError) -> str:
    return f"{error.message.rstrip('.')}. {error.hint}" if error.hint else error.message


def _unsupported(operation: str) -> OSError:
    return OSError(f"{operation} is not supported for buckets")
