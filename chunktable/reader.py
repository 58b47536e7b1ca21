"""The verified reader of chunk tables: manifests, and files whose bytes are recorded.

A table is a folder, named by the datanode, with Parquet files and manifests. A file
never changes: what changed since is in a later file, and the inventory says which file
holds a replica now. Rows of a replica in any other file are superseded. The manifest is
written last and names every file, so that an export is there as a whole or not at all.
"""

from collections.abc import Iterator, Set
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Lock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from chunktable.errors import ChunkTableError
from chunktable.manifest import (
    MANIFEST_BYTES_MAX,
    FileKind,
    Manifest,
    TableFile,
    TableRefusal,
    check_files,
    manifest_name,
    manifest_sequence,
    parse_manifest,
    refused,
)
from chunktable.places import named
from chunktable.schema import CONTAINER_SCHEMA, EVENT_SCHEMA, FAULT_SCHEMA, replica_stretches
from merkle.checksum import RunningFingerprint

# Of a file whose content is verified: large reads, for which a fingerprint has no
# overhead.
_READ_BYTES = 4 << 20
# Files of which a process remembers that it verified them, some 300 bytes each.
_VERIFIED_MAX = 1 << 16


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
        if file.size() > MANIFEST_BYTES_MAX:
            raise refused(TableRefusal.NOT_A_MANIFEST, f"{path} is too large for a manifest")
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
    raise first or refused(TableRefusal.NO_MANIFEST, f"{folder} has no manifest of a chunk table")


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
        raise refused(TableRefusal.CHECKSUM, f"{path} does not match the checksum of its manifest")


class _Verified:
    """Which files a process has verified: one that is read in many parts is read for
    that once, by whoever is first.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._done: dict[tuple[object, ...], Future[None]] = {}

    def check(self, filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
        """Verify the file unless this process did so; ChunkTableError if it differs."""
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


def check_rows(name: str, *, found: int, recorded: int) -> None:
    """Whether a file has as many rows as are recorded of it.

    Raises:
        ChunkTableError: it has not.
    """
    if found != recorded:
        raise refused(
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
        raise refused(TableRefusal.ROWS, text)
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
        raise refused(
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
        raise refused(TableRefusal.UNREADABLE, f"{path} cannot be read: {error}") from error
