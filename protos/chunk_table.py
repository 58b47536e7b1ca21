"""The chunk table: every chunk of a datanode's replicas as rows of Parquet, which
agents write and sweeps read.

A row is one chunk. A block without chunks, and a tombstone whose chunks are not known,
is one row at offset BLOCK_ROW whose `checksum` is the block's own. A replica without
blocks is one row at offset CONTAINER_ROW, block 0; where no tree could be made of it at
all, the row's `source` is "none", for an unknown root is not that of an empty tree. All
rows of a deleted block say `deleted`; where they are chunks, the tombstone's checksum
is what they fold to.

Rows ascend by (datanode, volume, container_id, block_id, chunk_offset), and a replica
lies in one file, in one piece. Readers profit from that and rely on it nowhere.

A table is a folder, named by the datanode, with Parquet files and manifests. A file
never changes: what changed since is in a later file, and the inventory says which file
holds a replica now. Rows of a replica in any other file are superseded. The manifest is
written last and names every file, so that an export is there as a whole or not at all.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import Enum, StrEnum
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from merkle.checksum import RunningFingerprint, fingerprint
from merkle.columns import TreeColumns
from merkle.errors import ChunkTableError, DestinationError, UsageError
from merkle.replica import ReplicaState, Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Offsets that are none: what the row speaks of instead of a chunk.
BLOCK_ROW = -1
CONTAINER_ROW = -2

# Changed only when a reader of the old version would misread a table; added columns are
# no such change.
VERSION = 1

# `source` is one of these: which truth of the replica the row was taken from; "none"
# where there is no tree.
SOURCES = ("tree", "metadata", "data", "none")

CHUNK_SCHEMA = pa.schema(
    [
        # UUID of the datanode, and the storage ID of its volume.
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        # A ReplicaState's name.
        pa.field("state", pa.string(), nullable=False),
        pa.field("bcs_id", pa.int64(), nullable=False),
        # Above 0: erasure-coded.
        pa.field("replica_index", pa.int32(), nullable=False),
        pa.field("block_id", pa.int64(), nullable=False),
        pa.field("chunk_offset", pa.int64(), nullable=False),
        # Bytes.
        pa.field("length", pa.int64(), nullable=False),
        # The data checksum of the tree: the window checksums folded into one integer.
        pa.field("checksum", pa.int64(), nullable=False),
        pa.field("matches", pa.bool_(), nullable=False),
        pa.field("deleted", pa.bool_(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        # Changes whenever anything else of the replica's rows does, but for
        # `scanned_at`.
        pa.field("generation", pa.int64(), nullable=False),
        # When the data were last read whole; unknown where they never were.
        pa.field("scanned_at", pa.timestamp("ms", tz="UTC")),
    ]
)
# Constant over all rows of a replica.
REPLICA_COLUMNS = (
    "datanode",
    "volume",
    "container_id",
    "state",
    "bcs_id",
    "replica_index",
    "source",
    "generation",
    "scanned_at",
)

# What happened to the data of a datanode's replicas since the table before, by its
# agent's own doing.
EVENT_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        pa.field("time", pa.timestamp("ms", tz="UTC"), nullable=False),
        # "repair" or "delete".
        pa.field("kind", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        # Null: the whole container.
        pa.field("block_id", pa.int64()),
        # Where in the block the bytes written begin, which may be inside of a chunk;
        # null: the whole block.
        pa.field("chunk_offset", pa.int64()),
        # Bytes written; 0 for a delete.
        pa.field("length", pa.int64(), nullable=False),
        # Empty where no job of a controller did it.
        pa.field("job", pa.string(), nullable=False),
    ]
)

# The inventory: each replica of the table once, with the file that holds its rows now.
CONTAINER_SCHEMA = pa.schema(
    [
        pa.field("volume", pa.string(), nullable=False),
        pa.field("container_id", pa.int64(), nullable=False),
        pa.field("generation", pa.int64(), nullable=False),
        pa.field("file", pa.string(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)

# Faults met while the trees were taken.
FAULT_SCHEMA = pa.schema(
    [
        pa.field("datanode", pa.string(), nullable=False),
        # A volume that could not be opened is named by its path.
        pa.field("volume", pa.string(), nullable=False),
        # Null for a fault of a whole volume.
        pa.field("container_id", pa.int64()),
        # See ozone.survey.Fault.
        pa.field("kind", pa.string(), nullable=False),
        pa.field("block_id", pa.int64()),
        pa.field("chunk_offset", pa.int64()),
        pa.field("detail", pa.string(), nullable=False),
    ]
)

_FORMAT = "treefold-chunk-table"
# Rows of one batch: enough for arrays to pay, few enough to wait in memory by the
# dozen.
_BATCH_ROWS = 1 << 17
# A manifest names some files; a larger one is another file of that name.
_MANIFEST_BYTES_MAX = 64 << 20
# Of a file whose content is verified: large reads, for which a fingerprint has no
# overhead.
_READ_BYTES = 4 << 20
# Files of which a process remembers that it verified them, some 300 bytes each.
_VERIFIED_MAX = 1 << 16
_MANIFEST_NAME = re.compile(r"manifest-([0-9]{9,18})\.json")
_FILE_NAME = re.compile(
    r"(chunks|containers|events|findings)-([0-9]{9,18})-[0-9a-f]{8}(-[0-9]{4,})?\.parquet"
)
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True, slots=True)
class Replica:
    """What all rows of a replica say alike; `source` is one of SOURCES, `scanned_at_ms`
    ms since the epoch.
    """

    datanode: str
    volume: str
    container_id: int
    state: ReplicaState
    bcs_id: int
    replica_index: int
    source: str
    scanned_at_ms: int | None = None

    def __post_init__(self) -> None:
        assert self.source in SOURCES


class ReplicaRows:
    """The rows of one replica, kept as arrays of what is not alike in all of them."""

    def __init__(self, replica: Replica, columns: Mapping[str, "NDArray[Any]"]) -> None:
        """Not for callers: see `rows_of`."""
        self.replica = replica
        self.count = len(columns["block_id"])
        self._columns = columns

    @cached_property
    def generation(self) -> int:
        """A fingerprint of all rows, as an int64; the time of the last scan is not in
        it.
        """
        said = asdict(self.replica) | {"state": self.replica.state.name}
        del said["scanned_at_ms"]
        running = RunningFingerprint()
        running.update(json.dumps(said).encode())
        for column in self._columns.values():
            running.update(np.ascontiguousarray(column))
        return int.from_bytes(running.digest()[:8], "big", signed=True)

    def batches(self, rows_max: int = _BATCH_ROWS) -> Iterator[pa.RecordBatch]:
        """The rows in order, by CHUNK_SCHEMA, at most `rows_max` a batch."""
        replica = self.replica
        scanned = pa.scalar(replica.scanned_at_ms, CHUNK_SCHEMA.field("scanned_at").type)
        alike: dict[str, Any] = asdict(replica) | {
            "state": replica.state.name,
            "generation": self.generation,
        }
        alike["scanned_at"] = scanned
        # One array for all batches: each has a slice of it.
        width = min(self.count, rows_max)
        same = {
            name: pa.repeat(pa.scalar(alike[name], CHUNK_SCHEMA.field(name).type), width)
            for name in REPLICA_COLUMNS
        }
        for start in range(0, self.count, rows_max):
            length = min(rows_max, self.count - start)
            arrays = [
                (
                    same[field.name].slice(0, length)
                    if field.name in same
                    else pa.array(self._columns[field.name][start : start + length], field.type)
                )
                for field in CHUNK_SCHEMA
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=CHUNK_SCHEMA)


def parquet_writer(where: object, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of one file of a table into a path or a stream, so that it is fast to
    read.

    Nearly all columns repeat themselves, and dictionaries of them are read several
    times as fast as their values; checksums never do, and are read three times as fast
    packed as differences, which Spark and others know too. Text in `schema` may be
    dictionaries.
    """
    packed = {name: "DELTA_BINARY_PACKED" for name in schema.names if name == "checksum"}
    return pq.ParquetWriter(
        where,
        schema,
        compression="zstd",
        use_dictionary=[name for name in schema.names if name not in packed],
        column_encoding=packed or None,
        # A flipped bit in a file is found by who reads the page.
        write_page_checksum=True,
        # Whether text came as dictionaries is nobody's business.
        store_schema=False,
    )


def rows_of(replica: Replica, tree: TreeColumns | None) -> ReplicaRows:
    """The rows of a replica; `tree` is None exactly where the source is "none". Chunks'
    offsets are not negative.
    """
    assert (tree is None) == (replica.source == "none")
    if tree is None or not len(tree.block_ids):
        return ReplicaRows(replica, _single(CONTAINER_ROW))
    counts = np.diff(tree.chunk_starts)
    widths = np.maximum(counts, 1)
    lacking = counts == 0
    # The row of each block without chunks.
    at = (np.cumsum(widths) - widths)[lacking]
    total = int(widths.sum())
    is_chunk = np.ones(total, np.bool_)
    is_chunk[at] = False
    offsets = np.full(total, BLOCK_ROW, np.int64)
    lengths, checksums = np.zeros(total, np.int64), np.empty(total, np.int64)
    matches = np.ones(total, np.bool_)
    assert not len(tree.chunk_offsets) or int(tree.chunk_offsets.min()) >= 0
    offsets[is_chunk] = tree.chunk_offsets
    lengths[is_chunk] = tree.chunk_lengths
    checksums[is_chunk] = tree.chunk_checksums
    checksums[at] = tree.block_checksums[lacking]
    matches[is_chunk] = tree.chunk_matches
    columns = {
        "block_id": np.repeat(tree.block_ids, widths),
        "chunk_offset": offsets,
        "length": lengths,
        "checksum": checksums,
        "matches": matches,
        "deleted": np.repeat(tree.block_deleted, widths),
    }
    return ReplicaRows(replica, columns)


def _single(offset: int) -> dict[str, "NDArray[Any]"]:
    numbers = {"block_id": 0, "chunk_offset": offset, "length": 0, "checksum": 0}
    flags = {"matches": True, "deleted": False}
    return {name: np.array([value], np.int64) for name, value in numbers.items()} | {
        name: np.array([value], np.bool_) for name, value in flags.items()
    }


class FileKind(StrEnum):
    """What a file of a table holds; the value begins its name."""

    CHUNKS = "chunks"
    # The inventory, by CONTAINER_SCHEMA; one a manifest.
    CONTAINERS = "containers"
    EVENTS = "events"
    FINDINGS = "findings"


class TableRefusal(Enum):
    """Why a table or a manifest is not read: the reason of a ChunkTableError."""

    # The folder or file is not there, or cannot be read.
    UNREADABLE = "unreadable"
    NO_MANIFEST = "no_manifest"
    NOT_A_MANIFEST = "not_a_manifest"
    NEWER_VERSION = "newer_version"
    CHECKSUM = "checksum"
    FILE_MISSING = "file_missing"
    FILE_SIZE = "file_size"
    # A Parquet file whose columns are not those of its kind.
    SCHEMA = "schema"
    # A file has not the rows that the inventory or the manifest says, or these
    # contradict each other.
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class TableFile:
    """One file: rows, bytes, and the xxh3_128 of its bytes in hex."""

    name: str
    kind: FileKind
    rows: int
    length_bytes: int
    checksum: str
    created_at: datetime

    @property
    def sequence(self) -> int:
        """Of the export that wrote it."""
        return sequence_of(self.name)


@dataclass(frozen=True, slots=True)
class SkippedVolume:
    """A volume of the datanode that is not in the table, and why."""

    path: str
    error_code: str
    message: str


@dataclass(frozen=True, slots=True)
class AuditMark:
    """How far the agent's audit file was read: so many bytes, whose first ones have
    this fingerprint in hex.
    """

    length_bytes: int
    head_bytes: int
    head: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One state of a table. `volumes` are the storage IDs of those that were read;
    counts are of live rows.

    `volumes_created_ms` says since when volumes exist, in ms since the epoch, as far as
    they tell.
    """

    datanode: str
    sequence: int
    # The sequence of the table before, whose files are kept too.
    previous: int | None
    # Before the first replica was read: what an agent did later need not be in the
    # rows.
    begun_at: datetime
    created_at: datetime
    source: Source
    volumes: tuple[str, ...]
    skipped: tuple[SkippedVolume, ...]
    files: tuple[TableFile, ...]
    containers: int
    rows: int
    audit: AuditMark | None = None
    volumes_created_ms: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return manifest_name(self.sequence)

    def of_kind(self, kind: FileKind) -> tuple[TableFile, ...]:
        return tuple(file for file in self.files if file.kind is kind)

    def to_bytes(self) -> bytes:
        """The file's bytes: JSON with a checksum over all the rest."""
        said: dict[str, Any] = {
            "format": _FORMAT,
            "version": VERSION,
            "datanode": self.datanode,
            "sequence": self.sequence,
            "previous": self.previous,
            "begun_at": self.begun_at.isoformat(timespec="milliseconds"),
            "created_at": self.created_at.isoformat(timespec="milliseconds"),
            "source": self.source.value,
            "volumes": list(self.volumes),
            "volumes_created_ms": dict(self.volumes_created_ms),
            "skipped": [asdict(volume) for volume in self.skipped],
            "counts": {"containers": self.containers, "rows": self.rows},
            "audit": asdict(self.audit) if self.audit else None,
            "files": [
                {
                    "name": file.name,
                    "kind": file.kind.value,
                    "rows": file.rows,
                    "bytes": file.length_bytes,
                    "checksum": file.checksum,
                    "created_at": file.created_at.isoformat(timespec="milliseconds"),
                }
                for file in self.files
            ],
        }
        return json.dumps(said | {"checksum": _json_checksum(said)}, indent=1).encode() + b"\n"


def parse_manifest(raw: bytes, name: str) -> Manifest:
    """The manifest in the bytes of the file of that name; keys that are not known are
    passed over.

    Raises:
        ChunkTableError: it is none, is damaged, or a newer release wrote it.
    """
    try:
        said = json.loads(raw)
        if said["format"] != _FORMAT:
            raise ValueError(f"format {said['format']!r}")
        version = _number(said["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(
            TableRefusal.NOT_A_MANIFEST, f"{name} is no manifest of a chunk table: {error}"
        ) from error
    if version > VERSION:
        hint = "Read it with the release that wrote it, or a later one."
        text = f"{name} has version {version}, and this release reads up to {VERSION}"
        raise _refused(TableRefusal.NEWER_VERSION, text, hint=hint)
    checksum = said.pop("checksum", None)
    if checksum != _json_checksum(said):
        raise _refused(TableRefusal.CHECKSUM, f"{name} does not match its own checksum")
    try:
        manifest = _manifest(said)
        if manifest.name != name:
            raise ValueError(f"sequence {manifest.sequence}")
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(
            TableRefusal.NOT_A_MANIFEST, f"{name} is no manifest of a chunk table: {error}"
        ) from error
    return manifest


def manifest_name(sequence: int) -> str:
    """The name of the manifest with this number."""
    return f"manifest-{sequence:09d}.json"


def manifest_sequence(name: str) -> int | None:
    """The number in the name of a manifest; None where it is not one's."""
    match = _MANIFEST_NAME.fullmatch(name)
    return int(match[1]) if match and manifest_name(int(match[1])) == name else None


def file_name(kind: FileKind, sequence: int, token: str, number: int | None = None) -> str:
    """The name of a file that this export writes; `token`, 8 hex digits, keeps apart
    two that run at once.
    """
    name = (
        f"{kind.value}-{sequence:09d}-{token}"
        + ("" if number is None else f"-{number:04d}")
        + ".parquet"
    )
    assert _FILE_NAME.fullmatch(name)
    return name


def is_file_name(name: str) -> bool:
    """Whether it is the name of a file of a table."""
    return bool(_FILE_NAME.fullmatch(name))


def sequence_of(name: str) -> int:
    """The number of the export that wrote the file of that name."""
    match = _FILE_NAME.fullmatch(name)
    assert match
    return int(match[2])


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


def tables_in(filesystem: pa_fs.FileSystem, folder: str) -> list[str]:
    """The folders of tables at `folder`: itself, or those in it, sorted.

    Raises:
        ChunkTableError: it cannot be read.
    """
    entries = _entries(filesystem, folder)
    if any(manifest_sequence(entry.base_name) is not None for entry in entries):
        return [folder]
    folders = sorted(entry.path for entry in entries if entry.type is pa_fs.FileType.Directory)
    return [
        path
        for path in folders
        if any(
            manifest_sequence(entry.base_name) is not None for entry in _entries(filesystem, path)
        )
    ]


def read_manifest(filesystem: pa_fs.FileSystem, path: str) -> Manifest:
    """The manifest in a file.

    Raises:
        ChunkTableError: see `parse_manifest`; or it cannot be read.
    """
    with _reading(path), filesystem.open_input_file(path) as file:
        if file.size() > _MANIFEST_BYTES_MAX:
            raise _refused(TableRefusal.NOT_A_MANIFEST, f"{path} is too large for a manifest")
        raw = file.read()
    return parse_manifest(raw, path.rpartition("/")[2])


def latest_manifest(filesystem: pa_fs.FileSystem, folder: str) -> Manifest:
    """The manifest with the highest number that is whole: its checksum is right, its
    files are there in their sizes.

    Raises:
        ChunkTableError: there is none that is whole (then of the highest, why), or the
            highest is of a newer release, for which an older state is no stand-in.
    """
    entries = {entry.base_name: entry for entry in _entries(filesystem, folder)}
    sequences = sorted((s for s in map(manifest_sequence, entries) if s is not None), reverse=True)
    first: ChunkTableError | None = None
    for sequence in sequences:
        try:
            manifest = read_manifest(filesystem, f"{folder}/{manifest_name(sequence)}")
            check_files(manifest, {name: entry.size for name, entry in entries.items()})
        except ChunkTableError as error:
            if error.reason == TableRefusal.NEWER_VERSION.value:
                raise
            first = first or error
        else:
            return manifest
    raise first or _refused(TableRefusal.NO_MANIFEST, f"{folder} has no manifest of a chunk table")


def check_files(manifest: Manifest, sizes: Mapping[str, int | None]) -> None:
    """Whether all files that a manifest names are there and have their sizes.

    Raises:
        ChunkTableError: one is missing or of another size.
    """
    for file in manifest.files:
        size = sizes.get(file.name)
        if size is None:
            raise _refused(
                TableRefusal.FILE_MISSING, f"{manifest.name} names {file.name}, which is not there"
            )
        if size != file.length_bytes:
            text = f"{file.name} has {size} bytes, and {manifest.name} says {file.length_bytes}"
            raise _refused(TableRefusal.FILE_SIZE, text)


def check_content(filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
    """Read a file whole and compare it with the manifest's checksum.

    Raises:
        ChunkTableError: it differs or cannot be read.
    """
    running = RunningFingerprint()
    room = memoryview(bytearray(min(_READ_BYTES, max(file.length_bytes, 1))))
    path = f"{folder}/{file.name}"
    # Not mapped into memory: a file that is cut meanwhile would kill the process.
    with _reading(path), filesystem.open_input_stream(path, compression=None) as stream:
        while count := stream.readinto(room):
            running.update(room[:count])
    if running.digest().hex() != file.checksum:
        raise _refused(TableRefusal.CHECKSUM, f"{path} does not match the checksum of its manifest")


class _Verified:
    """Which files a process has verified: one that is read in many parts is read for
    that once, by whoever is first.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._done: dict[tuple[object, ...], Future[None]] = {}

    def check(self, filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
        path = f"{folder}/{file.name}"
        with _reading(path):
            info = filesystem.get_file_info(path)
        key = (filesystem.type_name, path, info.size, info.mtime_ns, file.checksum)
        with self._lock:
            known = self._done.get(key)
            if known is None:
                self._done[key] = mine = Future[None]()
                while len(self._done) > _VERIFIED_MAX:
                    del self._done[next(iter(self._done))]
        if known is not None:
            known.result()
            return
        try:
            check_content(filesystem, folder, file)
        except BaseException as error:
            # Told to those who wait now; whoever comes later looks again.
            with self._lock:
                self._done.pop(key, None)
            mine.set_exception(error)
            raise
        mine.set_result(None)


_VERIFIED = _Verified()


def check_content_once(filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
    """`check_content`, once a process as long as size and time of change stay: for
    readers that do not live long.

    Raises:
        ChunkTableError: it differs or cannot be read.
    """
    _VERIFIED.check(filesystem, folder, file)


def check_counts(manifest: Manifest) -> None:
    """Whether a manifest's counts are those of its files: one that names no file would
    pass for an empty table.

    Raises:
        ChunkTableError: they contradict each other.
    """
    listed = sum(file.rows for file in manifest.of_kind(FileKind.CONTAINERS))
    held = sum(file.rows for file in manifest.of_kind(FileKind.CHUNKS))
    # Each replica has a row at least, and rows that are superseded do not count.
    if manifest.containers != listed or not manifest.containers <= manifest.rows <= held:
        text = (
            f"{manifest.name} counts {manifest.containers} replicas and {manifest.rows} rows,"
            f" and its files have {listed} and {held}"
        )
        raise _refused(TableRefusal.ROWS, text)


def check_rows(name: str, *, found: int, recorded: int) -> None:
    """Whether a file has as many rows as are recorded of it.

    Raises:
        ChunkTableError: it has not.
    """
    if found != recorded:
        raise _refused(
            TableRefusal.ROWS, f"{name} has {found} rows, and its manifest says {recorded}"
        )


def read_inventory(filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest) -> pa.Table:
    """Which file holds each replica now, by CONTAINER_SCHEMA.

    Raises:
        ChunkTableError: it cannot be read.
    """
    tables = [
        _read_table(filesystem, folder, f, CONTAINER_SCHEMA)
        for f in manifest.of_kind(FileKind.CONTAINERS)
    ]
    inventory = pa.concat_tables([CONTAINER_SCHEMA.empty_table(), *tables])
    named = {f.name for f in manifest.of_kind(FileKind.CHUNKS) if f.rows}
    unnamed = set(inventory["file"].unique().to_pylist()) - named
    if unnamed:
        text = (
            f"the inventory of {folder}/{manifest.name} has rows in {min(unnamed)}, which the"
            " manifest has not"
        )
        raise _refused(TableRefusal.ROWS, text)
    return inventory


def read_events(filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest) -> pa.Table:
    """All events that the table still has, by EVENT_SCHEMA.

    Raises:
        ChunkTableError: a file cannot be read.
    """
    tables = [
        _read_table(filesystem, folder, f, EVENT_SCHEMA) for f in manifest.of_kind(FileKind.EVENTS)
    ]
    return pa.concat_tables([EVENT_SCHEMA.empty_table(), *tables])


def read_faults(filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest) -> pa.Table:
    """The faults met by the export, by FAULT_SCHEMA.

    Raises:
        ChunkTableError: a file cannot be read.
    """
    tables = [
        _read_table(filesystem, folder, f, FAULT_SCHEMA)
        for f in manifest.of_kind(FileKind.FINDINGS)
    ]
    return pa.concat_tables([FAULT_SCHEMA.empty_table(), *tables])


def held_in(inventory: pa.Table, file: str) -> frozenset[tuple[str, int]]:
    """Volume and container of the replicas whose rows the file of that name holds
    now.
    """
    here = inventory.filter(pc.equal(inventory["file"], file))
    return frozenset(zip(here["volume"].to_pylist(), here["container_id"].to_pylist(), strict=True))


def superseded(batch: pa.RecordBatch, held: Set[tuple[str, int]]) -> "NDArray[np.bool_]":
    """Which rows of a file's batch are not of replicas that the file holds now (see
    `held_in`).
    """
    out = np.ones(batch.num_rows, np.bool_)
    for volume, container_id, start, end in replica_stretches(batch):
        out[start:end] = (volume, container_id) not in held
    return out


def replica_stretches(batch: pa.RecordBatch) -> Iterator[tuple[str, int, int, int]]:
    """Where one replica's rows begin and end in a batch: volume, container, first row,
    row behind the last.
    """
    if not batch.num_rows:
        return
    ids = batch.column("container_id").to_numpy()
    volumes = batch.column("volume")
    codes = volumes if isinstance(volumes, pa.DictionaryArray) else volumes.dictionary_encode()
    places = codes.indices.to_numpy()
    cuts = np.flatnonzero((ids[1:] != ids[:-1]) | (places[1:] != places[:-1])) + 1
    starts = [0, *cuts.tolist()]
    for start, end in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        yield codes.dictionary[int(places[start])].as_py(), int(ids[start]), start, end


def _read_table(
    filesystem: pa_fs.FileSystem, folder: str, file: TableFile, schema: pa.Schema
) -> pa.Table:
    # Before it is parsed: of damage in a footer pyarrow may return fewer rows, or end
    # the process.
    check_content_once(filesystem, folder, file)
    path = f"{folder}/{file.name}"
    with _reading(path):
        table = pq.read_table(path, filesystem=filesystem, page_checksum_verification=True)
    try:
        # Columns of later releases are passed over.
        table = table.select(schema.names).cast(schema)
    except (KeyError, ValueError) as error:
        raise _refused(
            TableRefusal.SCHEMA, f"{path} has not the columns of its kind: {error}"
        ) from error
    check_rows(path, found=table.num_rows, recorded=file.rows)
    return table


def _entries(filesystem: pa_fs.FileSystem, folder: str) -> list[pa_fs.FileInfo]:
    with _reading(folder):
        return named(filesystem.get_file_info(pa_fs.FileSelector(folder)))


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    # pyarrow says what is wrong with a Parquet file by ArrowInvalid, a ValueError.
    except (OSError, ValueError) as error:
        raise _refused(TableRefusal.UNREADABLE, f"{path} cannot be read: {error}") from error


def _manifest(said: Mapping[str, Any]) -> Manifest:
    files = tuple(
        TableFile(
            name=_file_name(file["name"], FileKind(file["kind"])),
            kind=FileKind(file["kind"]),
            rows=_number(file["rows"]),
            length_bytes=_number(file["bytes"]),
            checksum=_text(file["checksum"]),
            created_at=_time(file["created_at"]),
        )
        for file in said["files"]
    )
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is named twice")
    audit = said["audit"]
    previous = said["previous"]
    return Manifest(
        datanode=_text(said["datanode"]),
        sequence=_number(said["sequence"]),
        previous=None if previous is None else _number(previous),
        begun_at=_time(said["begun_at"]),
        created_at=_time(said["created_at"]),
        source=Source(said["source"]),
        volumes=tuple(_text(volume) for volume in said["volumes"]),
        # Manifests of earlier releases have none.
        volumes_created_ms={
            v: _number(ms) for v, ms in dict(said.get("volumes_created_ms", {})).items()
        },
        skipped=tuple(
            SkippedVolume(_text(v["path"]), _text(v["error_code"]), _text(v["message"]))
            for v in said["skipped"]
        ),
        files=files,
        containers=_number(said["counts"]["containers"]),
        rows=_number(said["counts"]["rows"]),
        audit=(
            AuditMark(
                _number(audit["length_bytes"]), _number(audit["head_bytes"]), _text(audit["head"])
            )
            if audit
            else None
        ),
    )


def _file_name(value: object, kind: FileKind) -> str:
    # A name becomes a part of a path.
    if (
        not isinstance(value, str)
        or not _FILE_NAME.fullmatch(value)
        or not value.startswith(kind.value + "-")
    ):
        raise ValueError(f"{value!r} is no name of a file of {kind.value}")
    return value


def _number(value: object) -> int:
    if type(value) is not int or value not in _INT64 or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _time(value: object) -> datetime:
    time = datetime.fromisoformat(_text(value))
    if time.tzinfo is None:
        raise ValueError(f"{value!r} has no time zone")
    return time


def _json_checksum(said: Mapping[str, Any]) -> str:
    return fingerprint(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hex()


def _refused(refusal: TableRefusal, message: str, *, hint: str = "") -> ChunkTableError:
    return ChunkTableError(refusal.value, message, hint=hint)
