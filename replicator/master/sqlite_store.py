"""The records of one master, in SQLite.

The master opens the file exclusively, so it reads every record once, and keeps what it
wrote. The file's `user_version` is the schema version; a newer one is refused.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from replicator.master.record_json import parsed_record, record_json, record_key
from replicator.master.records import Record, RecordKey, StoredRecord, StoredState
from runtime.errors import ConfigError, DatabaseError
from runtime.folder_lock import FolderLock
from runtime.sqlite_file import open_sqlite, sqlite_transaction

# By itself in a folder, whose lock keeps other masters out.
DATABASE_FILE = "replication.db"
_SCHEMA = 1
_TABLES = (
    "CREATE TABLE records (kind VARCHAR NOT NULL, name VARCHAR NOT NULL,"
    " version INTEGER NOT NULL, record VARCHAR NOT NULL, PRIMARY KEY (kind, name))",
    # Versions go on after a record was removed: no two records ever share one.
    "CREATE TABLE versions (last INTEGER NOT NULL)",
    "INSERT INTO versions VALUES (0)",
)
_SAVE = (
    "INSERT INTO records VALUES (?, ?, ?, ?) ON CONFLICT (kind, name)"
    " DO UPDATE SET version = excluded.version, record = excluded.record"
)
# Days since noon in Greenwich on 24 November 4714 BC, in ms since 1970.
_NOW = "SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"
Clock = Callable[[], int]


class SqliteMasterStore:
    """The store of one master (MasterStore). Thread-safe."""

    def __init__(self, folder: Path, clock_ms: Clock | None = None) -> None:
        """Open the database in a folder, and create it as needed. `clock_ms` is used
        instead of SQLite's clock.

        Raises:
            BusyError: another process uses the folder.
            ConfigError: a newer version wrote the file.
            DatabaseError: the file cannot be opened, or a row has an invalid value.
        """
        self._path = folder / DATABASE_FILE
        self._clock_ms = clock_ms
        self._guard = threading.Lock()
        self._folder = FolderLock(folder, "treefold replication-master")
        self._connection: sqlite3.Connection | None = None
        try:
            with self._named_errors():
                self._connection = open_sqlite(self._path)
            with self._transaction() as connection:
                _create(connection, self._path)
                rows = connection.execute("SELECT kind, name, version, record FROM records")
                self._records = {
                    (key := record_key(kind, name)): StoredRecord(version, parsed_record(key, text))
                    for kind, name, version, text in rows
                }
        except BaseException:
            self.close()
            raise

    def read(self) -> StoredState:
        """All records now (MasterStore.read)."""
        with self._guard:
            if self._clock_ms is not None:
                return StoredState(self._clock_ms(), dict(self._records))
            with self._named_errors():
                assert self._connection is not None
                (now_ms,) = self._connection.execute(_NOW).fetchone()
            return StoredState(int(now_ms), dict(self._records))

    def write(
        self,
        expected: Mapping[RecordKey, int],
        records: Sequence[Record],
        removed: Sequence[RecordKey] = (),
    ) -> bool:
        """Write all or none, durably (MasterStore.write)."""
        with self._guard:
            for key, version in expected.items():
                found = self._records.get(key)
                if (found.version if found else 0) != version:
                    return False
            stored = dict[RecordKey, StoredRecord]()
            with self._transaction() as connection:
                (last,) = connection.execute("SELECT last FROM versions").fetchone()
                for version, record in enumerate(records, start=last + 1):
                    key = record.key
                    row = (key.kind.value, key.name, version, record_json(record))
                    connection.execute(_SAVE, row)
                    stored[key] = StoredRecord(version, record)
                connection.execute("UPDATE versions SET last = ?", (last + len(records),))
                connection.executemany(
                    "DELETE FROM records WHERE kind = ? AND name = ?",
                    [(key.kind.value, key.name) for key in removed],
                )
            self._records.update(stored)
            for key in removed:
                self._records.pop(key, None)
            return True

    def close(self) -> None:
        """Close the file and release its folder (MasterStore.close)."""
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._folder.release()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        if connection is None:
            raise DatabaseError(f"{self._path}: is closed", path=str(self._path))
        with self._named_errors(), sqlite_transaction(connection):
            yield connection

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DatabaseError(f"{self._path}: {error}", path=str(self._path)) from error


def _create(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > _SCHEMA:
        raise ConfigError(
            f"{path}: has schema version {version}; this program supports up to {_SCHEMA}",
            hint="Use the version of treefold that wrote it, or newer.",
        )
    if version == 0:
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version={_SCHEMA}")
