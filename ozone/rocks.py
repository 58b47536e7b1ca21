"""RocksDB: the database of a volume's containers, opened beside a live datanode or as
its owner.

Schema V3 keeps all containers of a volume in one database: a key is the container ID (8
bytes, big-endian), `|`, and a text: a block's decimal ID or a counter's name. So the
order within a container is that of text, not of numbers.

A datanode must never notice that we read. Opening a database for reading still writes
into its folder, hence the shadow: a folder elsewhere with symbolic links to the files,
opened read-only. All table files are opened at once, so that what the datanode removes
later stays readable and the shadow can go as soon as the database is open. Opening
read-write in order to see whether the database is free would already rename the live
log: the lock is asked about, never tried.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Self

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    ChecksumType,
    ColumnFamily,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    SliceTransform,
    WriteBatch,
    WriteOptions,
)

from merkle.tree import BlockId, ContainerId
from ozone.errors import VolumeLockedError
from runtime.disk import Disk, Operation, disk_error
from runtime.errors import DatabaseError

# A datanode may remove a file between our listing it and opening it; each try lists
# afresh.
_SHADOW_TRIES_MAX = 8
_SEPARATOR = b"|"
_STRAY = "rocksdict-config.json"
# struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhqqi4x"


class OzoneTable(StrEnum):
    """The column families of schema V3."""

    BLOCK_DATA = "block_data"
    METADATA = "metadata"
    DELETE_TXNS = "delete_txns"
    FINALIZE_BLOCKS = "finalize_blocks"
    LAST_CHUNK_INFO = "last_chunk_info"


class Counter(StrEnum):
    """The names under which a container's numbers stand in the metadata table."""

    BCS_ID = "#BCSID"
    BLOCK_COUNT = "#BLOCKCOUNT"
    BYTES_USED = "#BYTESUSED"
    DATA_CHECKSUM = "#DATACHECKSUM"
    DELETE_TX = "#delTX"
    PENDING_DELETE_COUNT = "#PENDINGDELETEBLOCKCOUNT"
    PENDING_DELETE_BYTES = "#PENDINGDELETEBLOCKBYTES"


def container_prefix(container_id: ContainerId) -> bytes:
    """What all keys of one container begin with."""
    return container_id.to_bytes(8, "big", signed=True) + _SEPARATOR


def block_key(container_id: ContainerId, block_id: BlockId) -> bytes:
    """The key of a block in `block_data`, `last_chunk_info` and `finalize_blocks`."""
    return container_prefix(container_id) + str(block_id).encode()


def counter_key(container_id: ContainerId, counter: Counter) -> bytes:
    """The key of one of a container's numbers in `metadata`."""
    return container_prefix(container_id) + counter.encode()


def delete_key(container_id: ContainerId, tx_id: int) -> bytes:
    """The key of a delete transaction in `delete_txns`."""
    return container_prefix(container_id) + str(tx_id).encode()


def long_bytes(value: int) -> bytes:
    """A number as the metadata table holds it."""
    return value.to_bytes(8, "big", signed=True)


class Batch:
    """Changes that are written together or not at all."""

    def __init__(self) -> None:
        self.changes: list[tuple[OzoneTable, bytes, bytes | None]] = []

    def put(self, table: OzoneTable, key: bytes, value: bytes) -> None:
        """Write a row."""
        self.changes.append((table, key, value))

    def delete(self, table: OzoneTable, key: bytes) -> None:
        """Delete a row; one that is missing is no error."""
        self.changes.append((table, key, None))


class Database:
    """One open RocksDB. Safe to read from several threads; iterate to the end or drop
    the iterator before closing.
    """

    def __init__(self, rdict: Rdict, path: Path, *, disk: Disk | None) -> None:
        """Not for callers: see `open_shadow`, `open_owner` and `create`. Without a disk
        there is no writing.
        """
        self._rdict = rdict
        self._path = path
        self._disk = disk
        self._closed = False
        self._tables: dict[OzoneTable, Rdict] = {}
        for table in OzoneTable:
            # Databases of older releases lack some tables, and a shadow cannot create
            # them.
            with contextlib.suppress(DatabaseError), _translated(path, "open"):
                self._tables[table] = rdict.get_column_family(table.value)

    @classmethod
    def open_shadow(cls, path: Path, shadow_folder: Path) -> Self:
        """A snapshot of a database that another process may be writing; not a byte is
        written under `path`.

        Raises:
            DatabaseError: there is no database, or it cannot be read.
            DiskError: the shadow cannot be made, which says nothing about the database.
        """
        _require_database(path)
        for attempt in range(_SHADOW_TRIES_MAX):
            with _shadow_writes(shadow_folder):
                shadow = Path(tempfile.mkdtemp(dir=shadow_folder, prefix="shadow-"))
            try:
                with _translated(path, "open a shadow of"):
                    names = os.listdir(path)
                    with _shadow_writes(shadow_folder):
                        for name in names:
                            if name not in ("LOCK", _STRAY) and not name.startswith("LOG"):
                                # Absolute, or RocksDB reports a missing CURRENT.
                                (shadow / name).symlink_to(os.path.realpath(path / name))
                        return cls(_open(shadow, AccessType.read_only(False)), path, disk=None)
            except DatabaseError:
                if attempt == _SHADOW_TRIES_MAX - 1:
                    raise
            finally:
                shutil.rmtree(shadow, ignore_errors=True)
        raise AssertionError("the last try returns or raises")

    @classmethod
    def open_owner(cls, path: Path, disk: Disk) -> Self:
        """The database for reading and writing; missing tables are created.

        Raises:
            VolumeLockedError: another process, whose ID is the fact `pid`, or this one
                has it open.
            DatabaseError: there is no database, or it cannot be opened.
        """
        _require_database(path)
        with _claimed(path):
            holder = lock_holder(path / "LOCK")
            if holder is not None:
                raise _locked(path, holder)
            try:
                with _translated(path, "open"):
                    rdict = _open(path, AccessType.read_write())
                    for missing in set(OzoneTable) - set(
                        Rdict.list_cf(str(path), Options(raw_mode=True))
                    ):
                        rdict.create_column_family(missing.value, _table_options()).close()
            finally:
                _remove_stray(path)
            return cls(rdict, path, disk=disk)

    @classmethod
    def create(cls, path: Path, disk: Disk) -> Self:
        """A new database such as a datanode makes for a volume, open for reading and
        writing.

        Raises:
            DatabaseError: there is one already, or it cannot be created.
        """
        if (path / "CURRENT").exists():
            raise DatabaseError(f"there is a RocksDB in {path} already", path=str(path))
        disk.make_folder(path)
        with _claimed(path), _translated(path, "create"):
            options = Options(raw_mode=True)
            options.create_if_missing(True)
            options.create_missing_column_families(True)
            options.set_bytes_per_sync(1 << 20)
            tables = {name: _table_options() for name in ("default", *OzoneTable)}
            rdict = Rdict(
                str(path),
                options=options,
                column_families=tables,
                access_type=AccessType.read_write(),
            )
            _remove_stray(path)
            return cls(rdict, path, disk=disk)

    @property
    def path(self) -> Path:
        """Where the database lies, also if a shadow of it is open."""
        return self._path

    def get(self, table: OzoneTable, key: bytes) -> bytes | None:
        """The value under a key, or None."""
        rows = self._table(table)
        if rows is None:
            return None
        with _translated(self._path, "read"):
            value: bytes | None = rows.get(key)
            return value

    def get_long(self, container_id: ContainerId, counter: Counter) -> int | None:
        """One of a container's numbers, or None if it was never written.

        Raises:
            DatabaseError: with the fact `container_id`, where the row cannot be read or
                is no number. A bad sector in a table's file costs the rows of one of
                its blocks, some 16 KiB, and every other row can be read.
        """
        self._check_open()
        try:
            raw = self.get(OzoneTable.METADATA, counter_key(container_id, counter))
        except DatabaseError as error:
            text = f"{counter.value} of container {container_id}: {error.message}"
            raise DatabaseError(text, path=str(self._path), container_id=container_id) from error
        if raw is None:
            return None
        if len(raw) != 8:
            raise DatabaseError(
                f"{counter.value} of container {container_id} is {len(raw)} bytes, not 8",
                path=str(self._path),
                container_id=container_id,
            )
        return int.from_bytes(raw, "big", signed=True)

    def items(self, table: OzoneTable, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values under a prefix, in the order of the keys, as they were at the
        first step.
        """
        rows = self._table(table)
        if rows is None:
            return
        with _translated(self._path, "read"):
            options = ReadOptions()
            # An explicit bound: a prefix seek without the prefix extractor loaded runs
            # on into later containers.
            options.set_iterate_upper_bound(prefix[:-1] + bytes([prefix[-1] + 1]))
            options.set_total_order_seek(True)
            found = rows.iter(options)
            found.seek(prefix)
        while True:
            with _translated(self._path, "read"):
                if not found.valid():
                    # The end of the rows, or a block that cannot be read: the status
                    # alone tells them apart, and the binding's own iterators do not
                    # ask.
                    found.status()
                    return
                item = found.key(), found.value()
                found.next()
            yield item

    def write(self, batch: Batch) -> None:
        """Write all changes of a batch, or none; durable on return.

        Raises:
            DatabaseError: with the fact `suspect`, as a failed sync of a file has it:
                the library does not say which part failed, and until the database is
                opened anew it is unknown what it holds.
        """
        assert self._disk is not None, "a shadow is read-only"

        def act() -> None:
            with _translated(self._path, "write", suspect=True):
                changes = WriteBatch(raw_mode=True)
                for table, key, value in batch.changes:
                    if value is None:
                        changes.delete(key, self._handle(table))
                    else:
                        changes.put(key, value, self._handle(table))
                options = WriteOptions()
                options.sync = True
                self._rdict.write(changes, options)

        if batch.changes:
            self._check_open()
            self._disk.durable(Operation.BATCH, self._path, act)

    def sync_wal(self) -> None:
        """Make durable what the datanode before us wrote without sync."""
        assert self._disk is not None, "a shadow is read-only"

        def act() -> None:
            with _translated(self._path, "sync", suspect=True):
                self._rdict.flush_wal(True)

        self._check_open()
        self._disk.durable(Operation.SYNC, self._path, act)

    def close(self) -> None:
        """Close the database; an owner's lock is free afterwards. Closing twice is no
        error.

        Raises:
            DatabaseError: the library says that a write failed, which its writer heard
                then; it is closed all the same.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as closing:
            if self._disk is not None:
                closing.callback(_release, self._path)
                closing.callback(_remove_stray, self._path)
            closing.enter_context(_translated(self._path, "close"))
            for rows in (self._rdict, *self._tables.values()):
                closing.callback(rows.close)
            self._tables.clear()

    def _handle(self, table: OzoneTable) -> ColumnFamily:
        return self._rdict.get_column_family_handle(table.value)

    def _table(self, table: OzoneTable) -> Rdict | None:
        self._check_open()
        return self._tables.get(table)

    def _check_open(self) -> None:
        if self._closed:
            raise DatabaseError(f"the database {self._path} is closed", path=str(self._path))


def lock_holder(lock: Path) -> int | None:
    """The process that holds RocksDB's lock, or None; 0 is a process that we cannot
    see.

    Only ask about a database that this process has not open: closing any descriptor of
    a file drops all record locks that the process has on it.
    """
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatabaseError(
            f"cannot ask about the lock {lock}: {error.strerror}", path=str(lock)
        ) from error
    try:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(fd)


# The databases that this process has open as owner: asking the system would drop our
# own locks.
_owned: set[Path] = set()
_owned_lock = threading.Lock()


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Mark the database as open here for as long as no error comes."""
    with _owned_lock:
        if path.resolve() in _owned:
            raise _locked(path, os.getpid())
        _owned.add(path.resolve())
    try:
        yield
    except BaseException:
        _release(path)
        raise


def _release(path: Path) -> None:
    with _owned_lock:
        _owned.discard(path.resolve())


def _locked(path: Path, pid: int) -> VolumeLockedError:
    holder = f"process {pid}" if pid > 0 else "a process that is not visible from here"
    return VolumeLockedError(
        f"the database {path} is held by {holder}",
        hint="Stop the datanode that owns this volume first, or open the volume read-only.",
        path=str(path),
        pid=pid,
    )


def _require_database(path: Path) -> None:
    with _translated(path, "look into"):
        if not (path / "CURRENT").is_file():
            raise DatabaseError(f"there is no RocksDB in {path}", path=str(path), missing=True)
        for entry in path.iterdir():
            # A datanode may remove a file at any time; what is gone is no pipe. RocksDB
            # would wait for ever at one.
            with contextlib.suppress(OSError):
                if not stat.S_ISREG(mode := entry.stat().st_mode) and not stat.S_ISDIR(mode):
                    raise DatabaseError(
                        f"in the database {path}, {entry.name} is not a file", path=str(path)
                    )


def _remove_stray(path: Path) -> None:
    """Harmless to a datanode, but not ours to leave behind, least of all in what cannot
    be opened.
    """
    # What is wrong with the disk is said of the database: an error here would take that
    # one's place.
    with contextlib.suppress(OSError):
        (path / _STRAY).unlink(missing_ok=True)


@contextlib.contextmanager
def _shadow_writes(shadow_folder: Path) -> Iterator[None]:
    """What the system refuses meanwhile it refuses to the shadow: a full disk of ours
    is no broken database.
    """
    try:
        yield
    except OSError as error:
        raise disk_error("make a shadow in", shadow_folder, error) from error


def _open(path: Path, access: AccessType) -> Rdict:
    """Open with the options that the database was last written with, where they can be
    read.
    """
    names = Rdict.list_cf(str(path), Options(raw_mode=True))
    options, stored = Options(raw_mode=True), dict[str, Options]()
    with contextlib.suppress(DatabaseError), _translated(path, "read the options of"):
        # A newer RocksDB writes options that this one does not know.
        options, stored = Options.load_latest(str(path), ignore_unknown_options=True)
    options.create_if_missing(False)
    # All files opened at once: see the module's text.
    options.set_max_open_files(-1)
    # `default` among them: the options of the database as a whole say nothing about its
    # tables.
    tables = {name: stored.get(name) or _table_options() for name in names}
    for table in tables.values():
        # Set anew, since not all of it comes back from the file of options.
        table.set_block_based_table_factory(_block_options())
    return Rdict(str(path), options=options, column_families=tables, access_type=access)


def _block_options() -> BlockBasedOptions:
    """How a datanode lays out a table's files, whatever its profile."""
    blocks = BlockBasedOptions()
    # RocksDB 7, in Ozone up to 2.2, cannot read version 6, the default here.
    blocks.set_format_version(5)
    blocks.set_block_size(16 << 10)
    blocks.set_bloom_filter(10, False)
    blocks.set_checksum_type(ChecksumType.crc32c())
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    return blocks


def _table_options() -> Options:
    """What a datanode sets for a table (its DISK profile), as far as files depend on
    it.
    """
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(_block_options())
    options.set_compression_type(DBCompressionType.snappy())
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_write_buffer_size(128 << 20)
    options.set_prefix_extractor(
        SliceTransform.create_fixed_prefix(len(container_prefix(ContainerId(0))))
    )
    return options


@contextlib.contextmanager
def _translated(path: Path, verb: str, *, suspect: bool = False) -> Iterator[None]:
    """RocksDB's errors become ours. The binding raises bare `Exception`, so that no
    narrower class can be caught.

    It raises `OSError` where it writes a file of its own, before RocksDB tries
    anything.
    """
    try:
        yield
    except Exception as error:
        if (
            type(error) is not Exception
            and not isinstance(error, OSError)
            and type(error).__module__ != "rocksdict"
        ):
            raise
        text = str(error)
        # A LOCK that cannot be opened, as on a read-only file system, is held by
        # nobody.
        if "LOCK" in text and "open a file for lock" not in text:
            raise _locked(path, 0) from error
        raise DatabaseError(
            f"cannot {verb} the database {path}: {error}", path=str(path), suspect=suspect
        ) from error
