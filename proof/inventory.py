"""Listings that stores wrote themselves: S3 Inventories, and folders of Parquet files.

An inventory is a manifest and files of CSV or Parquet. The manifest has the MD5 of each
file; its own is in `manifest.checksum`, which the store writes last. Of an inventory
with all versions only the current ones count. Everything in it is somebody else's: what
is missing, damaged or contradictory is an error, never an absent object.
"""

import hashlib
import posixpath
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote, unquote_to_bytes, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from chunktable.places import resolve_location
from merkle.errors import ReconcileError
from proof.columns import gathered
from proof.errors import ListingInvalidError
from proof.listing import LISTED_SCHEMA, byte_array, byte_column
from runtime.documents import parse_json

_CHECKSUM = "manifest.checksum"
_MANIFEST_BYTES_MAX = 64 << 20
_BATCH_ROWS = 1 << 16
_PIECE_BYTES = 4 << 20
_MD5 = re.compile(r"[0-9a-f]{32}")
# A name of another kind is no file below the inventory's folder.
_SEPARATORS = re.compile(r"[/\\]\.\.?(?=[/\\]|$)")
# Columns by the names that Parquet files have; manifests of CSV have others.
_KEY, _SIZE, _MODIFIED, _ETAG = "key", "size", "last_modified_date", "e_tag"
_VERSION, _LATEST, _MARKER = "version_id", "is_latest", "is_delete_marker"
_MULTIPART, _ENCRYPTION = "is_multipart_uploaded", "encryption_status"
_NEEDED = (_KEY, _SIZE, _MODIFIED, _ETAG)
_USED = (*_NEEDED, _VERSION, _LATEST, _MARKER, _MULTIPART, _ENCRYPTION)
_ALIASES = {"etag": _ETAG, "last_modified": _MODIFIED, "size_bytes": _SIZE}
# Objects that were encrypted by these have ETags that are no MD5.
_OTHER_ETAGS = pa.array(["SSE-C", "SSE-KMS", "DSSE-KMS"])
_TIME = pa.timestamp("ms", "UTC")
# Sizes and times that an index can keep; no store has greater ones.
_SIZE_MAX, _MODIFIED_MAX = 1 << 56, 1 << 48
# Of an ETag or a version, as of those that a listing of S3 may have.
_NAME_MAX = 1024


@dataclass(frozen=True, slots=True)
class ListingScope:
    """Which keys of a bucket are objects of an address: those below `prefix`, which
    they lose, but not those that begin with `hidden` then. Without `has_versions`
    versions are not taken over.
    """

    prefix: str = ""
    hidden: str = ""
    has_versions: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a manifest says. `created_ms` is in ms since 1970."""

    bucket: str
    created_ms: int
    parts: "tuple[ListingFile, ...]"


@dataclass(frozen=True)
class ListingFile:
    """A file of a listing (ListingPart). `columns` are those of a CSV file, None for
    Parquet; `md5` is empty where nobody declared it, and then `stamp` tells two states
    of the file apart.
    """

    location: str
    scope: ListingScope
    columns: tuple[str, ...] | None = None
    md5: str = ""
    stamp: str = ""

    def rows(self) -> Iterator[pa.RecordBatch]:
        """See ListingPart. A file with an MD5 is read once more before that."""
        with self._translated(), self._opened(verified=True) as file:
            for table in self._tables(file, _USED):
                yield from _conformed(table, self.scope).to_batches()

    def listed_keys(self) -> Iterator[pa.Array]:
        """See ListingPart."""
        with self._unverified() as file:
            for table in self._tables(file, (_KEY,)):
                yield _below(table, self.scope)[_KEY].combine_chunks()

    def check_columns(self) -> None:
        """Check that the file has all that an index wants.

        Raises:
            ListingInvalidError: it lacks a column, or cannot be read.
        """
        if self.columns is not None:
            _check_columns(self.columns, self.location)
            return
        with self._unverified() as file:
            _check_columns(_names(pq.read_schema(file).names), self.location)

    def _tables(self, file: pa.NativeFile, wanted: Sequence[str]) -> Iterator[pa.Table]:
        """The wanted columns that there are, by the names of Parquet files."""
        if self.columns is not None:
            yield from self._csv_tables(file, wanted)
            return
        parquet = pq.ParquetFile(file)
        held = parquet.schema_arrow.names
        stored = dict(zip(_names(held), held, strict=True))
        _check_columns(tuple(stored), self.location)
        columns = [stored[name] for name in wanted if name in stored]
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=columns):
            yield pa.table(batch.columns, _names(batch.schema.names))

    def _csv_tables(self, file: pa.NativeFile, wanted: Sequence[str]) -> Iterator[pa.Table]:
        columns = self.columns
        assert columns is not None
        try:
            reader = pa_csv.open_csv(
                pa.CompressedInputStream(file, "gzip"),
                read_options=pa_csv.ReadOptions(column_names=columns, block_size=_PIECE_BYTES),
                convert_options=pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(columns, pa.string()),
                    include_columns=[name for name in wanted if name in columns],
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                return
            raise
        for batch in reader:
            table = pa.table(batch)
            keys = [_unquoted(key) for key in table[_KEY].to_pylist()]
            yield table.set_column(0, _KEY, pa.array(keys, pa.binary()))

    @contextmanager
    def _unverified(self) -> Iterator[pa.NativeFile]:
        try:
            with self._translated(), self._opened(verified=False) as file:
                yield file
        except ListingInvalidError:
            # Of a damaged file its MD5 says more than whoever read it.
            with self._translated(), self._opened(verified=True):
                raise

    @contextmanager
    def _opened(self, *, verified: bool) -> Iterator[pa.NativeFile]:
        files, path = resolve_location(self.location)
        if not verified or not self.md5:
            with files.open_input_file(path) as file:
                yield file
            return
        # What is read below must be what was checked here, so a remote file is copied.
        with tempfile.TemporaryFile(prefix="treefold-") as copy:
            is_local, digest = isinstance(files, pa_fs.LocalFileSystem), hashlib.md5()
            with files.open_input_stream(path, compression=None) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    digest.update(piece)
                    if not is_local:
                        copy.write(piece)
            if digest.hexdigest() != self.md5:
                raise ListingInvalidError(
                    f"{self.location}: its MD5 is {digest.hexdigest()}, not the manifest's"
                    f" {self.md5}",
                    hint="Copy it again, or wait for the next inventory.",
                )
            copy.seek(0)
            with files.open_input_file(path) if is_local else pa.PythonFile(copy, "r") as file:
                yield file

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ListingInvalidError as error:
            text = error.message
            if self.location in text:
                raise
            raise ListingInvalidError(f"{self.location}: {text}", hint=error.hint) from error
        except FileNotFoundError as error:
            raise ListingInvalidError(f"{self.location} does not exist") from error
        except (pa.ArrowException, OSError, EOFError, ValueError) as error:
            raise ListingInvalidError(f"{self.location} cannot be read: {error}") from error


def read_inventory(address: str, scope: ListingScope) -> Inventory:
    """The inventory of a `manifest.json`: a path, or an address of S3. Its files are
    below the destination bucket, or a local copy of that.

    Raises:
        UsageError: the address is invalid.
        ListingInvalidError: a document is missing or damaged, or the inventory lacks
            what an index wants.
    """
    files, path = resolve_location(address)
    body = _document(files, path, address)
    checksum = _document(files, posixpath.join(posixpath.dirname(path), _CHECKSUM), address)
    found, declared = hashlib.md5(body).hexdigest(), checksum.decode(errors="replace").strip()
    if found != declared.lower():
        raise ListingInvalidError(
            f"{address}: its MD5 is {found}, and {_CHECKSUM} says {declared[:40]!r}",
            hint="Copy both again. The store writes the checksum last.",
        )
    manifest = _Manifest(address, body)
    place = _place_of(files, path, manifest)
    parts = tuple(
        ListingFile(_location(address, place, key), scope, manifest.columns, md5)
        for key, md5 in manifest.files
    )
    if manifest.columns is not None:
        _check_columns(manifest.columns, address)
    for part in parts[:1]:
        part.check_columns()
    return Inventory(manifest.bucket, manifest.created_ms, parts)


def read_folder(address: str, scope: ListingScope) -> tuple[ListingFile, ...]:
    """The Parquet files in a folder, and below it, as a listing; names that begin with
    a dot or an underscore are passed over, as by other readers of tables.

    Raises:
        UsageError: the address is invalid.
        ListingInvalidError: there is no such folder, no such file, or one cannot be
            read or lacks what an index wants.
    """
    files, path = resolve_location(address)
    try:
        entries = files.get_file_info(pa_fs.FileSelector(path, recursive=True))
    except (OSError, ReconcileError) as error:
        raise ListingInvalidError(f"{address} cannot be listed: {error}") from error
    found = sorted(
        (entry.path, f"{entry.size} {entry.mtime_ns}")
        for entry in entries
        if entry.type is pa_fs.FileType.File
        and entry.path.endswith(".parquet")
        and not any(part[:1] in "._" for part in entry.path[len(path) :].split("/") if part)
    )
    if not found:
        raise ListingInvalidError(f"{address} has no Parquet file")
    parts = tuple(
        ListingFile(_location(address, "", name), scope, stamp=stamp) for name, stamp in found
    )
    for part in parts:
        part.check_columns()
    return parts


class _Manifest:
    """The fields of a manifest that are used, checked."""

    def __init__(self, address: str, body: bytes) -> None:
        self._address = address
        try:
            document = parse_json(body)
        except ValueError as error:
            raise self._invalid(f"it is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise self._invalid("it is not an object of JSON")
        self._document: Mapping[str, object] = document
        self.bucket = self._text(document, "sourceBucket")
        created = self._text(document, "creationTimestamp")
        if not created.isascii() or not created.isdecimal() or int(created) >= _MODIFIED_MAX:
            raise self._invalid(f"creationTimestamp is {created[:40]!r}")
        self.created_ms = int(created)
        self.columns = self._columns()
        self.files = tuple(self._file(one) for one in self._entries())

    @cached_property
    def _kind(self) -> str:
        return self._text(self._document, "fileFormat")

    def _columns(self) -> tuple[str, ...] | None:
        match self._kind:
            case "CSV":
                names = [one.strip() for one in self._text(self._document, "fileSchema").split(",")]
                columns = tuple(_snake(name) for name in names)
                if len(set(columns)) < len(columns) or not all(columns):
                    raise self._invalid(f"fileSchema names a column twice, or none: {names}")
                return columns
            case "Parquet":
                return None
            case other:
                hint = "Have the inventory written as Parquet or CSV."
                raise ListingInvalidError(
                    f"{self._address}: files of {other[:20]!r} are not read", hint=hint
                )

    def _entries(self) -> Sequence[object]:
        entries = self._document.get("files")
        if not isinstance(entries, list):
            raise self._invalid("it has no list of files")
        return entries

    def _file(self, entry: object) -> tuple[str, str]:
        if not isinstance(entry, dict):
            raise self._invalid("an entry of files is not an object")
        key, md5 = self._text(entry, "key"), self._text(entry, "MD5checksum").lower()
        if not _MD5.fullmatch(md5):
            raise self._invalid(f"the MD5 of {key[:200]!r} is {md5[:40]!r}")
        if key.startswith("/") or _SEPARATORS.search("/" + key) or "\0" in key:
            raise self._invalid(f"{key[:200]!r} is not the key of a file below the manifest's")
        return key, md5

    def _text(self, document: Mapping[str, object], name: str) -> str:
        value = document.get(name)
        if not isinstance(value, str) or not value:
            raise self._invalid(f"it has no {name}")
        return value

    def _invalid(self, text: str) -> ListingInvalidError:
        return ListingInvalidError(f"{self._address} is not the manifest of an inventory: {text}")


def _document(files: pa_fs.FileSystem, path: str, address: str) -> bytes:
    try:
        with files.open_input_stream(path, compression=None) as stream:
            body = bytes(stream.read(_MANIFEST_BYTES_MAX + 1))
    except FileNotFoundError as error:
        name = posixpath.basename(path)
        raise ListingInvalidError(
            f"{address}: {name} does not exist",
            hint="Name the manifest.json of one inventory; manifest.checksum lies beside it.",
        ) from error
    except (OSError, ReconcileError) as error:
        raise ListingInvalidError(f"{address} cannot be read: {error}") from error
    if len(body) > _MANIFEST_BYTES_MAX:
        raise ListingInvalidError(f"{address} is longer than {_MANIFEST_BYTES_MAX >> 20} MiB")
    return body


def _place_of(files: pa_fs.FileSystem, path: str, manifest: _Manifest) -> str:
    """The folder, or bucket, that the keys in a manifest are below."""
    if not isinstance(files, pa_fs.LocalFileSystem):
        return path.partition("/")[0]
    folder = posixpath.dirname(path)
    if not manifest.files:
        return folder
    first = manifest.files[0][0]
    while True:
        with suppress(OSError):
            if files.get_file_info(posixpath.join(folder, first)).type is pa_fs.FileType.File:
                return folder
        if folder == posixpath.dirname(folder):
            raise ListingInvalidError(
                f"{path}: {first!r} is in no folder above it",
                hint="Copy the files too, below the folder that has the inventory: with aws s3"
                " sync, the whole destination prefix.",
            )
        folder = posixpath.dirname(folder)


def _location(address: str, place: str, key: str) -> str:
    """The address of a file beside another one."""
    path = posixpath.join(place, key)
    if "://" not in address:
        return path
    parts = urlsplit(address)
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{quote(path)}{query}"


def _snake(name: str) -> str:
    """The name of a column of a Parquet inventory, from that of a CSV one."""
    if name == "ETag":
        return _ETAG
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _names(stored: Sequence[str]) -> tuple[str, ...]:
    """Columns by the names that are used here, in the same order."""
    lower = [name.lower() for name in stored]
    return tuple(_ALIASES.get(name, name) for name in lower)


def _check_columns(names: Sequence[str], location: str) -> None:
    missing = [name for name in _NEEDED if name not in names]
    if missing:
        raise ListingInvalidError(
            f"{location} has no column {', '.join(missing)}",
            hint="Configure the inventory with Size, LastModifiedDate and ETag.",
        )
    if _VERSION in names and _LATEST not in names:
        raise ListingInvalidError(
            f"{location} has versions, and no column {_LATEST}: nobody knows which are current",
            hint="Configure the inventory for current versions, or with IsLatest.",
        )


def _unquoted(key: str) -> bytes:
    """The key that an inventory of CSV writes as in a query of a URL."""
    return unquote_to_bytes(key.replace("+", " ")) if "%" in key or "+" in key else key.encode()


def _below(table: pa.Table, scope: ListingScope) -> pa.Table:
    """The rows whose keys the address has, without its prefix."""
    keys = table[_KEY]
    if keys.null_count:
        raise ListingInvalidError("an object has no key")
    keys = keys.cast(pa.binary())
    if scope.prefix:
        prefix = scope.prefix.encode()
        is_below = pc.starts_with(keys, prefix)
        table, keys = table.filter(is_below), keys.filter(is_below)
        # Arrow's own slice of bytes fails where many keys are short.
        whole = byte_column(keys)
        starts = whole.ends - whole.lengths + len(prefix)
        rest = gathered(whole.data, starts, whole.ends - starts)
        keys = pa.chunked_array([byte_array(rest)])
    is_seen = pc.greater(pc.binary_length(keys), 0)
    if scope.hidden:
        is_seen = pc.and_(is_seen, pc.invert(pc.starts_with(keys, scope.hidden.encode())))
    table = table.set_column(table.column_names.index(_KEY), _KEY, keys)
    return table if pc.all(is_seen).as_py() is not False else table.filter(is_seen)


def _conformed(table: pa.Table, scope: ListingScope) -> pa.Table:
    """The current objects, in columns of LISTED_SCHEMA."""
    table = table.filter(_is_current(table))
    table = _below(table, scope)
    missing = [name for name in _NEEDED if table[name].null_count]
    if missing:
        raise ListingInvalidError(f"an object has no {missing[0]}")
    # Arrow checks no text that it reads.
    table[_KEY].cast(pa.string())
    etag = pc.binary_length(table[_ETAG].cast(pa.binary()))
    version = _texts(table, _VERSION) if scope.has_versions else _constant(table, b"", pa.binary())
    size = table[_SIZE].cast(pa.int64())
    modified = _milliseconds(table[_MODIFIED])
    for name, values, limit in (
        (_SIZE, size, _SIZE_MAX),
        (_MODIFIED, modified, _MODIFIED_MAX),
        (_ETAG, etag, _NAME_MAX),
        (_VERSION, pc.binary_length(version), _NAME_MAX),
    ):
        least, most = (pc.min_max(values)[which].as_py() for which in ("min", "max"))
        if least is not None and not 0 <= least <= most < limit:
            raise ListingInvalidError(f"an object has an impossible {name}: {least} to {most}")
    columns = [
        table[_KEY],
        size,
        modified,
        pc.utf8_trim(table[_ETAG].cast(pa.string()), '"').cast(pa.binary()),
        version,
        _etag_is_md5(table),
    ]
    return pa.table(columns, schema=LISTED_SCHEMA)


def _is_current(table: pa.Table) -> pa.ChunkedArray:
    """Whether each row is the current version of its key, and no delete marker."""
    latest = _flags(table, _LATEST, absent=True)
    return pc.and_(latest, pc.invert(_flags(table, _MARKER, absent=False)))


def _etag_is_md5(table: pa.Table) -> pa.ChunkedArray:
    in_one = pc.invert(_flags(table, _MULTIPART, absent=False))
    if _ENCRYPTION not in table.column_names:
        return in_one
    status = table[_ENCRYPTION].cast(pa.string())
    return pc.and_(in_one, pc.invert(pc.is_in(status, _OTHER_ETAGS)))


def _flags(table: pa.Table, name: str, *, absent: bool) -> pa.ChunkedArray:
    if name not in table.column_names:
        return _constant(table, absent, pa.bool_())
    values = table[name]
    if not pa.types.is_boolean(values.type):
        # CSV has empty texts.
        texts = values.cast(pa.string())
        values = pc.if_else(pc.equal(texts, ""), None, texts).cast(pa.bool_())
    return pc.fill_null(values, absent)


def _texts(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        return _constant(table, b"", pa.binary())
    return pc.fill_null(table[name].cast(pa.string()), "").cast(pa.binary())


def _milliseconds(times: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_integer(times.type) or pa.types.is_floating(times.type):
        raise ListingInvalidError(f"{_MODIFIED} is a number, and not a time")
    if pa.types.is_timestamp(times.type) and times.type.tz is None:
        return times.cast(pa.timestamp("ms"), safe=False).cast(pa.int64())
    return times.cast(_TIME, safe=False).cast(pa.int64())


def _constant(table: pa.Table, value: bytes | bool, kind: pa.DataType) -> pa.ChunkedArray:
    return pa.chunked_array([pa.repeat(pa.scalar(value, kind), table.num_rows)])
