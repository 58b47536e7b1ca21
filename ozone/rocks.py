"""The RocksDB of a volume's containers, read beside a live datanode or opened as owner.

Schema V3 keeps all containers of a volume in one database. A key is the container ID (8
bytes, big-endian), `|`, and a text: a block's decimal ID or a counter's name. So the
order within a container is that of text, not of numbers.

Reading must not disturb a datanode. Even opening a database for reading writes to its
folder, so we open a shadow: a folder elsewhere with symbolic links to the files. All
table files are opened at once: files that the datanode removes later stay readable, and
the shadow is removed as soon as the database is open.

Opening read-write would rename the live log even if the database is locked, so the lock
is queried first, never tried.
"""

import contextlib
import errno
import os
import shutil
import stat
import tempfile
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
    RdictIter,
    ReadOptions,
    SliceTransform,
    WriteBatch,
    WriteOptions,
)

from merkle.tree import BlockId, ContainerId
from ozone.rocks_lock import claim, lock_error, lock_holder, release
from runtime.disk import Disk, Operation, disk_error
from runtime.errors import DatabaseError

# A datanode may remove a file after we listed it and before we open it; each try lists
# the files again.
_SHADOW_TRIES_MAX = 8
_SEPARATOR = b"|"
_STRAY = "rocksdict-config.json"


class OzoneTable(StrEnum):
    """The column families of schema V3."""

    BLOCK_DATA = "block_data"
    METADATA = "metadata"
    DELETE_TXNS = "delete_txns"
    FINALIZE_BLOCKS = "finalize_blocks"
    LAST_CHUNK_INFO = "last_chunk_info"


class Counter(StrEnum):
    """The keys of a container's counters in the metadata table."""

    BCS_ID = "#BCSID"
    BLOCK_COUNT = "#BLOCKCOUNT"
    BYTES_USED = "#BYTESUSED"
    DATA_CHECKSUM = "#DATACHECKSUM"
    DELETE_TX = "#delTX"
    PENDING_DELETE_COUNT = "#PENDINGDELETEBLOCKCOUNT"
    PENDING_DELETE_BYTES = "#PENDINGDELETEBLOCKBYTES"


def container_prefix(container_id: ContainerId) -> bytes:
    """The prefix of all keys of one container."""
    return container_id.to_bytes(8, "big", signed=True) + _SEPARATOR


def block_key(container_id: ContainerId, block_id: BlockId) -> bytes:
    """The key of a block in `block_data`, `last_chunk_info` and `finalize_blocks`."""
    return container_prefix(container_id) + str(block_id).encode()


def counter_key(container_id: ContainerId, counter: Counter) -> bytes:
    """The key of a container's counter in `metadata`."""
    return container_prefix(container_id) + counter.encode()


def delete_key(container_id: ContainerId, tx_id: int) -> bytes:
    """The key of a delete transaction in `delete_txns`."""
    return container_prefix(container_id) + str(tx_id).encode()


def long_bytes(value: int) -> bytes:
    """A number in the format of the metadata table: 8 bytes, big-endian, signed."""
    return value.to_bytes(8, "big", signed=True)


class Batch:
    """Changes that are written atomically."""

    def __init__(self) -> None:
        self.changes: list[tuple[OzoneTable, bytes, bytes | None]] = []

    def put(self, table: OzoneTable, key: bytes, value: bytes) -> None:
        """Write a row."""
        self.changes.append((table, key, value))

    def delete(self, table: OzoneTable, key: bytes) -> None:
        """Delete a row; a missing row is not an error."""
        self.changes.append((table, key, None))


class Database:
    """One open RocksDB. Several threads may read; exhaust or drop iterators before
    closing.
    """

    def __init__(self, rdict: Rdict, path: Path, *, disk: Disk | None) -> None:
        """Internal: use `open_shadow`, `open_owner` or `create`. Without `disk` the
        database is read-only.
        """
        self._rdict = rdict
        self._path = path
        self._disk = disk
        self._closed = False
        self._tables: dict[OzoneTable, Rdict] = {}
        for table in OzoneTable:
            # Databases of older releases lack some tables; a shadow cannot create them.
            with contextlib.suppress(DatabaseError), translate_errors(path, "open"):
                self._tables[table] = rdict.get_column_family(table.value)

    @classmethod
    def open_shadow(cls, path: Path, shadow_folder: Path) -> Self:
        """A snapshot of a database that another process may be writing; nothing is
        written under `path`.

        Raises:
            DatabaseError: there is no database, or it cannot be read.
            DiskError: the shadow cannot be created; the database may be intact.
        """
        require_database(path)
        for attempt in range(_SHADOW_TRIES_MAX):
            with _translate_shadow_errors(shadow_folder):
                shadow = Path(tempfile.mkdtemp(dir=shadow_folder, prefix="shadow-"))
            try:
                with translate_errors(path, "open a shadow of"):
                    names = os.listdir(path)
                    with _translate_shadow_errors(shadow_folder):
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
        """The database, opened for reading and writing; missing tables are created.

        Raises:
            VolumeLockedError: this or another process has it open; its ID is the fact
                `pid`.
            DatabaseError: there is no database, or it cannot be opened.
        """
        require_database(path)
        with claim(path):
            holder = lock_holder(path / "LOCK")
            if holder is not None:
                raise lock_error(path, holder)
            try:
                with translate_errors(path, "open"):
                    rdict = _open(path, AccessType.read_write())
                    for missing in set(OzoneTable) - set(
                        Rdict.list_cf(str(path), Options(raw_mode=True))
                    ):
                        rdict.create_column_family(missing.value, _table_options()).close()
            finally:
                remove_stray(path)
            return cls(rdict, path, disk=disk)

    @classmethod
    def create(cls, path: Path, disk: Disk) -> Self:
        """A new database, as a datanode creates it, opened for reading and writing.

        Raises:
            DatabaseError: the database exists or cannot be created.
        """
        if (path / "CURRENT").exists():
            raise DatabaseError(f"there is a RocksDB in {path} already", path=str(path))
        disk.make_folder(path)
        with claim(path), translate_errors(path, "create"):
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
            remove_stray(path)
            return cls(rdict, path, disk=disk)

    @property
    def path(self) -> Path:
        """The path of the database, even if a shadow of it is open."""
        return self._path

    def get(self, table: OzoneTable, key: bytes) -> bytes | None:
        """The value of a key; None if the key or the table is missing.

        Raises:
            DatabaseError: the row cannot be read.
        """
        rows = self._table(table)
        if rows is None:
            return None
        with translate_errors(self._path, "read"):
            value: bytes | None = rows.get(key)
            return value

    def get_long(self, container_id: ContainerId, counter: Counter) -> int | None:
        """The value of a container's counter; None if it was never written.

        Raises:
            DatabaseError: with the fact `container_id`: the row cannot be read or is
                not a number. A bad sector in a table file affects the rows of one of
                its blocks, about 16 KiB; other rows stay readable.
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
        """The keys with a prefix and their values, ascending by key, as of the first
        step.

        Raises:
            DatabaseError: a row cannot be read.
        """
        rows = self._table(table)
        if rows is None:
            return
        with translate_errors(self._path, "read"):
            options = ReadOptions()
            # An explicit bound: without the prefix extractor loaded, a prefix seek
            # continues into later containers.
            options.set_iterate_upper_bound(prefix[:-1] + bytes([prefix[-1] + 1]))
            options.set_total_order_seek(True)
            found = rows.iter(options)
            found.seek(prefix)
        yield from rows_from(found, self._path)

    def write(self, batch: Batch) -> None:
        """Write all changes of a batch, or none; durable on return.

        Raises:
            DatabaseError: with the fact `suspect`, as for a failed sync of a file. The
                library does not report which part failed, so the content is unknown
                until the database is opened again.
        """
        assert self._disk is not None, "a shadow is read-only"

        def act() -> None:
            with translate_errors(self._path, "write", suspect=True):
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
        """Make durable what a datanode wrote earlier without sync.

        Raises:
            DatabaseError: with the fact `suspect`, as in `write`.
        """
        assert self._disk is not None, "a shadow is read-only"

        def act() -> None:
            with translate_errors(self._path, "sync", suspect=True):
                self._rdict.flush_wal(True)

        self._check_open()
        self._disk.durable(Operation.SYNC, self._path, act)

    def close(self) -> None:
        """Close the database and release an owner's lock; closing twice is not an
        error.

        Raises:
            DatabaseError: an earlier write failed, which its caller knows already; the
                database is closed anyway.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.ExitStack() as closing:
            if self._disk is not None:
                closing.callback(release, self._path)
                closing.callback(remove_stray, self._path)
            closing.enter_context(translate_errors(self._path, "close"))
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


def rows_from(found: RdictIter, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """The rows from an iterator's place on."""
    while True:
        with translate_errors(path, "read"):
            if not found.valid():
                # The end of the rows, or an unreadable block: only the status
                # distinguishes them. The binding's own iterators ignore it.
                found.status()
                return
            item = found.key(), found.value()
            found.next()
        yield item


def require_database(path: Path) -> None:
    with translate_errors(path, "look into"):
        if not (path / "CURRENT").is_file():
            raise DatabaseError(f"there is no RocksDB in {path}", path=str(path), missing=True)
        for entry in path.iterdir():
            # RocksDB would block for ever on a pipe. A datanode may remove a file
            # meanwhile, which is no error.
            try:
                mode = entry.stat().st_mode
            except OSError:
                continue
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise DatabaseError(
                    f"in the database {path}, {entry.name} is not a file", path=str(path)
                )
            # RocksDB would report a corrupt database. Not by opening: to close any
            # descriptor of LOCK would drop the lock of this process.
            may_read = entry.name == "LOCK" or os.access(entry, os.R_OK, effective_ids=True)
            if not may_read and entry.exists():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(entry))


def remove_stray(path: Path) -> None:
    """Remove the file that the binding leaves; it would be harmless to a datanode."""
    # Suppressed: an error here would hide the database's own.
    with contextlib.suppress(OSError):
        (path / _STRAY).unlink(missing_ok=True)


@contextlib.contextmanager
def _translate_shadow_errors(shadow_folder: Path) -> Iterator[None]:
    """Raise DiskError for failed writes to the shadow: our disk may be full while the
    database is intact.
    """
    try:
        yield
    except OSError as error:
        raise disk_error("make a shadow in", shadow_folder, error) from error


def _open(path: Path, access: AccessType) -> Rdict:
    """Open a database with the options it was last written with, if readable."""
    names = Rdict.list_cf(str(path), Options(raw_mode=True))
    options, stored = Options(raw_mode=True), dict[str, Options]()
    with contextlib.suppress(DatabaseError), translate_errors(path, "read the options of"):
        # A newer RocksDB writes options that this one does not have.
        options, stored = Options.load_latest(str(path), ignore_unknown_options=True)
    options.create_if_missing(False)
    # All files are opened at once: see the module's docstring.
    options.set_max_open_files(-1)
    # Includes `default`: the database's own options do not apply to tables.
    tables = {name: stored.get(name) or _table_options() for name in names}
    for table in tables.values():
        # Set again, since the options file does not restore all of it.
        table.set_block_based_table_factory(_block_options())
    return Rdict(str(path), options=options, column_families=tables, access_type=access)


def _block_options() -> BlockBasedOptions:
    """The block format of a datanode's table files, the same in all of its profiles."""
    blocks = BlockBasedOptions()
    # RocksDB 7, in Ozone up to 2.2, cannot read version 6, our library's default.
    blocks.set_format_version(5)
    blocks.set_block_size(16 << 10)
    blocks.set_bloom_filter(10, False)
    blocks.set_checksum_type(ChecksumType.crc32c())
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    return blocks


def _table_options() -> Options:
    """A datanode's table options (its DISK profile), as far as they affect files."""
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
def translate_errors(path: Path, verb: str, *, suspect: bool = False) -> Iterator[None]:
    """Translate RocksDB's errors to ours.

    The binding raises bare `Exception`, so no narrower class can be caught. It raises
    `OSError` if it cannot write its own file, before it calls RocksDB.
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
        # A LOCK that cannot be opened, as on a read-only file system, is not held.
        if "LOCK" in text and "open a file for lock" not in text:
            raise lock_error(path, 0) from error
        raise DatabaseError(
            f"cannot {verb} the database {path}: {error}",
            path=str(path),
            suspect=suspect,
            denied=isinstance(error, PermissionError),
        ) from error
