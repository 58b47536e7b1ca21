"""The verified reader of chunk tables: manifests, and files with recorded checksums.

A table is a folder, named after its datanode, with Parquet files and manifests. A file
never changes: a later export writes changed replicas to new files. The inventory
records which file holds the live rows of a replica; its rows in other files are
superseded. The manifest is written last and names every file, so that a reader sees a
complete export or none.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from threading import Lock
from types import MappingProxyType

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
    table_error,
)
from chunktable.packs import read_packed
from chunktable.places import drop_undecodable_names, read_whole
from chunktable.schema import CONTAINER_SCHEMA, EVENT_SCHEMA, FAULT_SCHEMA, replica_stretches
from chunktable.seekable import SeekableReader
from chunktable.whole_files import ENCODED_INVENTORY, whole_inventory
from merkle.checksum import RunningFingerprint, fingerprint

# Files up to this size are read at once.
WHOLE_BYTES_MAX = 32 << 20
# One read of a file to be verified: large, so that the calls cost nothing.
_READ_BYTES = 4 << 20
# Verified files that a process remembers, about 300 bytes each.
_VERIFIED_MAX = 1 << 16


def tables_in(filesystem: pa_fs.FileSystem, folder: str) -> list[str]:
    """The table folders at `folder`: itself, or its subfolders that are tables, sorted.

    Raises:
        ChunkTableError: a folder cannot be read.
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
        ChunkTableError: the file cannot be read, or as in `parse_manifest`.
    """
    with _translate_errors(path):
        raw = _read(filesystem, path, MANIFEST_BYTES_MAX)
    if len(raw) > MANIFEST_BYTES_MAX:
        raise table_error(TableRefusal.NOT_A_MANIFEST, f"{path} is too large for a manifest")
    return parse_manifest(raw, path.rpartition("/")[2])


def latest_manifest(
    filesystem: pa_fs.FileSystem,
    folder: str,
    *,
    entries: Mapping[str, pa_fs.FileInfo] | None = None,
    known: Mapping[str, Manifest] = MappingProxyType({}),
) -> Manifest:
    """The valid manifest with the highest number.

    A manifest is valid if its checksum matches and its files exist with their recorded
    sizes. `entries` are the files of the folder by name, if they were listed before,
    and `known` manifests that were read before, by name.

    Raises:
        ChunkTableError: no manifest is valid (the reason is that of the highest), or
            one was written by a newer release, which an older state cannot replace.
    """
    if entries is None:
        entries = {entry.base_name: entry for entry in _entries(filesystem, folder)}
    sequences = sorted((s for s in map(manifest_sequence, entries) if s is not None), reverse=True)
    first: ChunkTableError | None = None
    for sequence in sequences:
        try:
            name = manifest_name(sequence)
            manifest = known.get(name) or read_manifest(filesystem, f"{folder}/{name}")
            check_files(manifest, {name: entry.size for name, entry in entries.items()})
        except ChunkTableError as error:
            if error.reason == TableRefusal.NEWER_VERSION.value:
                raise
            first = first or error
        else:
            return manifest
    raise first or table_error(
        TableRefusal.NO_MANIFEST, f"{folder} has no manifest of a chunk table"
    )


def check_content(filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
    """Read the whole file and compare it with the checksum in the manifest.

    Raises:
        ChunkTableError: the checksum differs, or the file cannot be read.
    """
    running = RunningFingerprint()
    buffer = memoryview(bytearray(min(_READ_BYTES, max(file.length_bytes, 1))))
    path = f"{folder}/{file.name}"
    # Not mapped into memory: a file truncated meanwhile would kill the process.
    with _translate_errors(path), filesystem.open_input_stream(path, compression=None) as stream:
        while count := stream.readinto(buffer):
            running.update(buffer[:count])
    if running.digest().hex() != file.checksum:
        raise _changed(path)


def read_verified(filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> bytes:
    """The bytes of a small file, whose checksum is that in the manifest. One request of
    a remote file system, where `check_content` and a reader need many.

    Raises:
        ChunkTableError: the checksum differs, or the file cannot be read.
    """
    path = f"{folder}/{file.name}"
    with _translate_errors(path):
        raw = _read(filesystem, path, max(file.length_bytes, WHOLE_BYTES_MAX))
    if fingerprint(raw).hex() != file.checksum:
        raise _changed(path)
    return raw


def _read(filesystem: pa_fs.FileSystem, path: str, bytes_max: int) -> bytes:
    packed = read_packed(filesystem, path)
    return read_whole(filesystem, path, bytes_max) if packed is None else packed


class PieceReader(SeekableReader):
    """A large file, as a file object for pyarrow. Each piece that the manifest names is
    read whole and verified before any of it is returned: whoever needs a part of the
    file reads little else, and nothing twice.
    """

    def __init__(self, filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
        """Open the file.

        Raises:
            ChunkTableError: it cannot be read.
        """
        self._bounds = [0, *accumulate(length for length, _ in file.pieces)]
        super().__init__(self._bounds[-1])
        self._path = f"{folder}/{file.name}"
        self._checksums = [checksum for _, checksum in file.pieces]
        with _translate_errors(self._path):
            self._opened = filesystem.open_input_file(self._path)
        self._held = dict[int, memoryview]()

    def read(self, size: int = -1) -> bytes | memoryview:
        """The next bytes.

        Raises:
            ChunkTableError: a piece does not match its checksum, or cannot be read.
        """
        end = self._length if size < 0 else min(self._at + size, self._length)
        found = list[memoryview]()
        while self._at < end:
            number = bisect_right(self._bounds, self._at) - 1
            first = self._bounds[number]
            found.append(self._piece(number)[self._at - first : end - first])
            self._at += len(found[-1])
        return found[0] if len(found) == 1 else b"".join(found)

    def close(self) -> None:
        """See io.RawIOBase."""
        if not self.closed:
            self._opened.close()
        super().close()

    def _piece(self, number: int) -> memoryview:
        if number in self._held:
            return self._held[number]
        first, end = self._bounds[number : number + 2]
        with _translate_errors(self._path):
            data = memoryview(self._opened.read_at(end - first, first))
        if fingerprint(data).hex() != self._checksums[number]:
            raise _changed(self._path)
        # The footer stays, and of the others the last one.
        last = len(self._checksums) - 1
        self._held = {n: piece for n, piece in self._held.items() if n == last} | {number: data}
        return data


def _changed(path: str) -> ChunkTableError:
    text = f"{path} does not match the checksum of its manifest"
    return table_error(TableRefusal.CHECKSUM, text)


class _VerificationCache:
    """The files that this process has verified.

    A file that is read in many parts is verified once: the first thread reads it, the
    others wait for the result.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._done: dict[tuple[object, ...], Future[None]] = {}

    def check(self, filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
        """Verify the file unless this process has; raises as `check_content` does."""
        path = f"{folder}/{file.name}"
        with _translate_errors(path):
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
            # Raised in the threads that wait now; later calls verify the file again.
            with self._lock:
                self._done.pop(key, None)
            mine.set_exception(error)
            raise
        mine.set_result(None)


_VERIFICATIONS = _VerificationCache()


def check_content_once(filesystem: pa_fs.FileSystem, folder: str, file: TableFile) -> None:
    """`check_content`, once per process while the file's size and modification time
    stay the same.

    Raises:
        ChunkTableError: the checksum differs, or the file cannot be read.
    """
    _VERIFICATIONS.check(filesystem, folder, file)


def check_rows(name: str, *, found: int, recorded: int) -> None:
    """Check that a file has as many rows as its manifest records.

    Raises:
        ChunkTableError: it does not.
    """
    if found != recorded:
        raise table_error(
            TableRefusal.ROWS, f"{name} has {found} rows; its manifest records {recorded}"
        )


def read_inventory(
    filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest, *, encoded: bool = False
) -> pa.Table:
    """The inventory (CONTAINER_SCHEMA): the file that holds each replica's live rows.
    If `encoded`, text is dictionaries: a replica takes a fifth of the memory.

    Raises:
        ChunkTableError: it cannot be read, or names a file that the manifest does not.
    """
    schema = ENCODED_INVENTORY if encoded else CONTAINER_SCHEMA
    tables = [
        _read_table(filesystem, folder, f, schema) for f in manifest.of_kind(FileKind.CONTAINERS)
    ]
    inventory = pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()
    listed = {f.name for f in manifest.of_kind(FileKind.CHUNKS) if f.rows}
    unlisted = set(inventory["file"].unique().to_pylist()) - listed
    if unlisted:
        text = (
            f"the inventory of {folder}/{manifest.name} has rows in {min(unlisted)}, which the"
            " manifest does not list"
        )
        raise table_error(TableRefusal.ROWS, text)
    return inventory


def read_events(filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest) -> pa.Table:
    """All events that the table still has (EVENT_SCHEMA).

    Raises:
        ChunkTableError: a file cannot be read.
    """
    tables = [
        _read_table(filesystem, folder, f, EVENT_SCHEMA) for f in manifest.of_kind(FileKind.EVENTS)
    ]
    return pa.concat_tables([EVENT_SCHEMA.empty_table(), *tables])


def read_faults(filesystem: pa_fs.FileSystem, folder: str, manifest: Manifest) -> pa.Table:
    """The faults that the export found (FAULT_SCHEMA).

    Raises:
        ChunkTableError: a file cannot be read.
    """
    tables = [
        _read_table(filesystem, folder, f, FAULT_SCHEMA)
        for f in manifest.of_kind(FileKind.FINDINGS)
    ]
    return pa.concat_tables([FAULT_SCHEMA.empty_table(), *tables])


def find_live_replicas(inventory: pa.Table, file: str) -> frozenset[tuple[str, int]]:
    """The replicas, by volume and container, whose live rows the file `file` holds."""
    rows = inventory.filter(pc.equal(inventory["file"], file))
    return frozenset(zip(rows["volume"].to_pylist(), rows["container_id"].to_pylist(), strict=True))


def mark_superseded(batch: pa.RecordBatch, live: Set[tuple[str, int]]) -> "NDArray[np.bool_]":
    """A mask of the superseded rows of a batch; `live` is from `find_live_replicas`."""
    mask = np.ones(batch.num_rows, np.bool_)
    for volume, container_id, start, end in replica_stretches(batch):
        mask[start:end] = (volume, container_id) not in live
    return mask


def _read_table(
    filesystem: pa_fs.FileSystem, folder: str, file: TableFile, schema: pa.Schema
) -> pa.Table:
    path = f"{folder}/{file.name}"
    with _translate_errors(path), open_verified(filesystem, folder, file) as source:
        if schema is ENCODED_INVENTORY and isinstance(source, pa.BufferReader):
            # What kernels know is read ten times as fast.
            inventory = whole_inventory(source.read(), file.rows)
            if inventory is not None:
                return inventory
            source.seek(0)
        encoded = [field.name for field in schema if pa.types.is_dictionary(field.type)]
        parquet = pq.ParquetFile(source, page_checksum_verification=True, read_dictionary=encoded)
        table = parquet.read(use_threads=False)
    try:
        # Columns of later releases are ignored.
        table = table.select(schema.names).cast(schema)
    except (KeyError, ValueError) as error:
        raise table_error(
            TableRefusal.SCHEMA, f"{path} does not have the columns of its kind: {error}"
        ) from error
    check_rows(path, found=table.num_rows, recorded=file.rows)
    return table


def open_verified(
    filesystem: pa_fs.FileSystem, folder: str, file: TableFile, *, in_parts: bool = False
) -> AbstractContextManager[pa.NativeFile]:
    """The open file, each part verified before it is parsed: with a damaged footer
    pyarrow may return fewer rows or crash the process. `in_parts`: others read the rest
    of the file.

    Raises:
        ChunkTableError: the checksum differs, or the file cannot be read. For a large
            file also while it is read.
    """
    path = f"{folder}/{file.name}"
    if file.length_bytes <= WHOLE_BYTES_MAX and not in_parts:
        held: AbstractContextManager[pa.NativeFile] = pa.BufferReader(
            read_verified(filesystem, folder, file)
        )
        return held
    if file.pieces:
        parts: AbstractContextManager[pa.NativeFile] = pa.PythonFile(
            PieceReader(filesystem, folder, file), "r"
        )
        return parts
    check_content_once(filesystem, folder, file)
    opened: AbstractContextManager[pa.NativeFile] = filesystem.open_input_file(path)
    return opened


def _entries(filesystem: pa_fs.FileSystem, folder: str) -> list[pa_fs.FileInfo]:
    with _translate_errors(folder):
        return drop_undecodable_names(filesystem.get_file_info(pa_fs.FileSelector(folder)))


@contextmanager
def _translate_errors(path: str) -> Iterator[None]:
    try:
        yield
    # For a bad Parquet file pyarrow raises ArrowInvalid, which is a ValueError.
    except (OSError, ValueError) as error:
        raise table_error(TableRefusal.UNREADABLE, f"{path} cannot be read: {error}") from error
