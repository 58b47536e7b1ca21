"""The tables of an index in one SQLite file, for up to about 10^8 objects.

Items are in the order of their keys, without row numbers: a key stands once beside its
row and once in the index by hash. An update leaves that index alone. SQLite does not
check its pages, so each row has its own checksum.
"""

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from proof.columns import NameColumns
from proof.errors import IndexDamagedError, IndexRefusal, IndexRefusedError
from proof.item import KEY_HASH_BYTES
from proof.sqlite_pages import PageFile
from proof.tables import ItemRow, JournalRow, RowColumns, TableBatch
from runtime.disk import Disk
from runtime.errors import DatabaseError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# In the file's header, where the `file` command finds it.
_APPLICATION_ID = 0x54464958
_SCHEMA_VERSION = 1
_CREATE = f"""
CREATE TABLE item (
    key BLOB NOT NULL, version BLOB NOT NULL, key_hash INTEGER NOT NULL, row BLOB NOT NULL,
    PRIMARY KEY (key, version)
) WITHOUT ROWID;
CREATE TABLE journal (position INTEGER PRIMARY KEY, change BLOB NOT NULL);
CREATE TABLE value (name BLOB PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {_SCHEMA_VERSION};
"""
_CREATE_BY_HASH = "CREATE INDEX item_by_hash ON item (key_hash)"
_SETTINGS = """
PRAGMA cell_size_check = ON;
PRAGMA secure_delete = OFF;
PRAGMA temp_store = FILE;
"""
# A crash while a generation is built leaves a file that is removed.
_BUILDING = "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536"
# Random changes touch pages again: a longer log writes each of them back less often.
_DURABLE = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA wal_autocheckpoint = 16384;
PRAGMA cache_size = -65536;
"""
_READING = "PRAGMA query_only = ON; PRAGMA cache_size = -16384"
# The connections of ended views that are kept for later ones.
_IDLE_VIEWS_MAX = 4
# Milliseconds that a statement waits for another process, such as a backup.
_BUSY_TIMEOUT_S = 30.0
_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}
_PRIMARY_CODE = 0xFF
# Rows are looked up so many at a time: one by one costs twice as much.
_LOOKED_UP = 500
_PUT = """
INSERT INTO item (key, version, key_hash, row) VALUES (?, ?, ?, ?)
ON CONFLICT (key, version) DO UPDATE SET row = excluded.row
"""
_SELECT = "SELECT key, version, key_hash, row FROM item"
# A damaged page can return any type.
_TYPE_ERRORS = (AttributeError, TypeError, OverflowError)
_OTHER_TYPE = "a row of the index has another type"


class SqliteTables:
    """ItemTables in a file, which this process alone writes."""

    def __init__(self, path: Path, *, building: bool = False) -> None:
        """Open the file; with `building`, create it.

        Raises:
            IndexRefusedError: it is not an index, or of a newer schema.
            IndexDamagedError: it begins as an index, and is damaged.
            DatabaseError: it cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        self._idle = list[sqlite3.Connection]()
        self._is_building = building
        self._writer = self._connect()
        try:
            with _translated(path, "open"):
                if building:
                    self._writer.executescript(_SETTINGS + _BUILDING)
                    self._writer.executescript(_CREATE)
                else:
                    _check_header(self._writer, path)
                    self._writer.executescript(_SETTINGS + _DURABLE)
            self._pages = PageFile(path, self._connect())
        except BaseException:
            self._writer.close()
            raise

    @contextmanager
    def view(self) -> Iterator["_SqliteView"]:
        """See ItemTables.view."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
            with _translated(self._path, "open"):
                connection.executescript(_SETTINGS + _READING)
        try:
            with _translated(self._path, "read"):
                connection.execute("BEGIN")
                # A transaction begins with its first read.
                connection.execute("SELECT 1 FROM value LIMIT 1").fetchall()
            yield _SqliteView(connection, self._path, self._pages)
        finally:
            with suppress(sqlite3.Error):
                connection.rollback()
            with self._lock:
                is_kept = len(self._idle) < _IDLE_VIEWS_MAX and not connection.in_transaction
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def versions(self, keys: Sequence[bytes]) -> list[list[ItemRow]]:
        """See ItemTables.versions."""
        found = dict[bytes, list[ItemRow]]((key, []) for key in keys)
        wanted = sorted(found)
        with _translated(self._path, "read"):
            for first in range(0, len(wanted), _LOOKED_UP):
                some = wanted[first : first + _LOOKED_UP]
                statement = f"{_SELECT} WHERE key IN ({_marks(some)}) ORDER BY key, version"
                for row in map(_item_row, self._writer.execute(statement, some)):
                    found[row.key].append(row)
        return [found[key] for key in keys]

    def write(self, batch: TableBatch) -> None:
        """See ItemTables.write."""
        # In their order a page is found once for all that change in it.
        puts = (
            (key, version, int.from_bytes(row[:KEY_HASH_BYTES], "big"), row[KEY_HASH_BYTES:])
            for key, version, row in sorted(batch.puts)
        )
        deletes = ((one.key, one.version) for one in batch.deletes)
        values = ((name.encode(), data) for name, data in batch.values.items() if data is not None)
        gone = ((name.encode(),) for name, data in batch.values.items() if data is None)
        writer = self._writer
        with _translated(self._path, "write"):
            writer.execute("BEGIN IMMEDIATE")
            try:
                writer.executemany("DELETE FROM item WHERE key = ? AND version = ?", deletes)
                writer.executemany(_PUT, puts)
                writer.executemany("INSERT INTO journal VALUES (?, ?)", batch.journal)
                if batch.journal_through:
                    through = (batch.journal_through,)
                    writer.execute("DELETE FROM journal WHERE position <= ?", through)
                writer.executemany("INSERT OR REPLACE INTO value VALUES (?, ?)", values)
                writer.executemany("DELETE FROM value WHERE name = ?", gone)
                writer.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    writer.rollback()
                raise

    def settle(self) -> None:
        """See ItemTables.settle."""
        assert self._is_building
        with _translated(self._path, "write"):
            # Appended rows fill their pages to nine tenths, copied ones wholly.
            self._writer.execute("VACUUM")
            self._writer.execute(_CREATE_BY_HASH)
            self._writer.executescript(_DURABLE)
        Disk().sync(self._path)
        self._is_building = False

    def close(self) -> None:
        """See ItemTables.close."""
        for connection in (*self._idle, self._writer):
            with suppress(sqlite3.Error):
                connection.close()
        self._idle.clear()
        self._pages.close()

    def _connect(self) -> sqlite3.Connection:
        with _translated(self._path, "open"):
            return sqlite3.connect(
                self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )


class _SqliteView:
    """TableView in a read transaction."""

    def __init__(self, connection: sqlite3.Connection, path: Path, pages: PageFile) -> None:
        self._connection = connection
        self._path = path
        self._pages = pages

    def rows(self, start: bytes, end: bytes | None) -> Iterator[ItemRow]:
        """See TableView.rows."""
        bound, arguments = ("", [start]) if end is None else (" AND key < ?", [start, end])
        statement = f"{_SELECT} WHERE key >= ?{bound} ORDER BY key, version"
        return self._select(statement, arguments)

    def by_hash(self, key_hashes: "NDArray[np.uint64]") -> RowColumns:
        """See TableView.by_hash."""
        found = list[tuple[bytes, bytes, bytes]]()
        with _translated(self._path, "read"):
            reader = self._pages.reader(len(key_hashes))
            read, left = reader.rows(key_hashes) if reader else (RowColumns.of([]), key_hashes)
            for cursor in self._by_hash(_SELECT, left):
                try:
                    found += [
                        (key, version, key_hash.to_bytes(KEY_HASH_BYTES, "big") + row)
                        for key, version, key_hash, row in cursor.fetchall()
                    ]
                except _TYPE_ERRORS as error:
                    raise IndexDamagedError(_OTHER_TYPE) from error
        try:
            return read.joined(RowColumns.of(found))
        except _TYPE_ERRORS as error:
            raise IndexDamagedError(_OTHER_TYPE) from error

    def names_by_hash(self, key_hashes: "NDArray[np.uint64]") -> NameColumns:
        """See TableView.names_by_hash."""
        keys, versions = list[bytes](), list[bytes]()
        with _translated(self._path, "read"):
            reader = self._pages.reader(len(key_hashes))
            read, left = (
                reader.names(key_hashes) if reader else (NameColumns.of([], []), key_hashes)
            )
            for cursor in self._by_hash("SELECT key, version FROM item", left):
                rows = cursor.fetchall()
                keys += [key for key, _ in rows]
                versions += [version for _, version in rows]
        try:
            return read.joined(NameColumns.of(keys, versions))
        except _TYPE_ERRORS as error:
            raise IndexDamagedError(_OTHER_TYPE) from error

    def _by_hash(self, select: str, key_hashes: "NDArray[np.uint64]") -> Iterator[sqlite3.Cursor]:
        """The rows, some at a time: thousands of tuples would call the collector."""
        hashes = key_hashes.tolist()
        for first in range(0, len(hashes), _LOOKED_UP):
            some = hashes[first : first + _LOOKED_UP]
            statement = f"{select} WHERE key_hash IN ({_marks(some)})"
            yield self._connection.execute(statement, some)

    def journal(self, *, after: int, through: int) -> Iterator[JournalRow]:
        """See TableView.journal."""
        statement = "SELECT * FROM journal WHERE position > ? AND position <= ? ORDER BY position"
        with _translated(self._path, "read"):
            for position, change in self._connection.execute(statement, (after, through)):
                if not isinstance(position, int) or not isinstance(change, bytes):
                    raise _damaged(self._path, "a row of the journal has another type")
                yield JournalRow(position, change)

    def values(self, prefix: str) -> dict[str, bytes]:
        """See TableView.values."""
        found, first = dict[str, bytes](), prefix.encode()
        statement = "SELECT name, data FROM value WHERE substr(name, 1, ?) = ?"
        with _translated(self._path, "read"):
            for name, data in self._connection.execute(statement, (len(first), first)):
                if not isinstance(data, bytes):
                    raise _damaged(self._path, "a value has another type")
                found[name.decode(errors="replace")] = data
        return found

    def damage(self) -> list[str]:
        """See TableView.damage."""
        with _translated(self._path, "read"):
            said = [str(row[0]) for row in self._connection.execute("PRAGMA integrity_check(10)")]
        return [] if said == ["ok"] else said

    def _select(self, statement: str, arguments: Sequence[bytes | int]) -> Iterator[ItemRow]:
        with _translated(self._path, "read"):
            for found in self._connection.execute(statement, arguments):
                yield _item_row(found)


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _item_row(found: tuple[bytes, bytes, int, bytes]) -> ItemRow:
    """The row as it was put."""
    try:
        key, version, key_hash, row = found
        if not (isinstance(key, bytes) and isinstance(version, bytes)):
            raise TypeError("a key is text")
        return ItemRow(key, version, key_hash.to_bytes(KEY_HASH_BYTES, "big") + row)
    except _TYPE_ERRORS as error:
        raise IndexDamagedError(_OTHER_TYPE) from error


def _check_header(connection: sqlite3.Connection, path: Path) -> None:
    # The pragmas of an empty or foreign file succeed, or raise NOTADB.
    try:
        application_id = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & _PRIMARY_CODE != sqlite3.SQLITE_NOTADB:
            raise
        application_id, version = 0, 0
    if application_id != _APPLICATION_ID:
        raise IndexRefusedError(
            IndexRefusal.NOT_AN_INDEX.value,
            f"{path} is not the index of a bucket",
            hint="Name another folder, or remove the file if it is not needed.",
            path=str(path),
        )
    if version > _SCHEMA_VERSION:
        raise IndexRefusedError(
            IndexRefusal.NEWER_SCHEMA.value,
            f"{path} has schema version {version}; this program supports up to {_SCHEMA_VERSION}",
            hint="Use the version of treefold that wrote it, or newer.",
            path=str(path),
        )


def _damaged(path: Path, text: str) -> IndexDamagedError:
    return IndexDamagedError(
        f"the index {path} is damaged: {text}",
        hint="Rebuild the index from a listing of the bucket.",
        path=str(path),
    )


@contextmanager
def _translated(path: Path, verb: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
        if code in _DAMAGE_CODES:
            raise _damaged(path, str(error)) from error
        raise DatabaseError(f"cannot {verb} the index {path}: {error}", path=str(path)) from error
    except UnicodeDecodeError as error:
        # SQLite's message quotes the damaged text.
        raise _damaged(path, "its tables cannot be read") from error
