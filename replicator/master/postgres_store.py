"""The records of several masters, in PostgreSQL.

Every write is one serialisable transaction, so that it is as if masters wrote one after
another; one that meets another is refused, and decided anew. The time is that of the
server. A connection that is lost is made anew with the next call.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psycopg
from psycopg import errors

from replicator.master.errors import MasterUnavailableError
from replicator.master.record_json import parsed_record, record_json, record_key
from replicator.master.records import Record, RecordKey, StoredRecord, StoredState
from runtime.errors import ConfigError, DatabaseError

_SCHEMA = 1
# Masters that start at once must not create the tables at once. The number has no
# meaning.
_CREATION_LOCK = 0x7265706C
_TABLES = (
    "CREATE TABLE IF NOT EXISTS treefold_replication_schema (version integer NOT NULL)",
    "INSERT INTO treefold_replication_schema SELECT 1"
    " WHERE NOT EXISTS (SELECT FROM treefold_replication_schema)",
    "CREATE TABLE IF NOT EXISTS treefold_replication_records (kind text NOT NULL,"
    " name text NOT NULL, version bigint NOT NULL, record text NOT NULL,"
    " PRIMARY KEY (kind, name))",
    # Versions go on after a record was removed: no two records ever share one.
    "CREATE SEQUENCE IF NOT EXISTS treefold_replication_versions",
)
_NOW = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_VERSIONS = "SELECT kind, name, version FROM treefold_replication_records"
_RECORD = "SELECT version, record FROM treefold_replication_records WHERE kind = %s AND name = %s"
_VERSION = "SELECT version FROM treefold_replication_records WHERE kind = %s AND name = %s"
_SAVE = (
    "INSERT INTO treefold_replication_records"
    " VALUES (%s, %s, nextval('treefold_replication_versions'), %s)"
    " ON CONFLICT (kind, name) DO UPDATE"
    " SET version = excluded.version, record = excluded.record RETURNING version"
)
_REMOVE = "DELETE FROM treefold_replication_records WHERE kind = %s AND name = %s"
# A master that was stopped in the middle of a transaction must not keep others waiting,
# and one whose link to the database is cut must say so within a lease. What is
# acknowledged is on the server's disk, whatever its default.
_SESSION = (
    "-c statement_timeout=4000 -c lock_timeout=2000 -c synchronous_commit=on"
    " -c idle_in_transaction_session_timeout=3000"
)
_CONNECT_TIMEOUT_S = 3
_ANSWER_TIMEOUT_MS = 5_000


class PostgresMasterStore:
    """The store of several masters (MasterStore). Thread-safe."""

    def __init__(self, url: str, clock_ms: Callable[[], int] | None = None) -> None:
        """Create the tables as needed. `clock_ms` is used instead of the server's
        clock.

        Raises:
            ConfigError: the URL is invalid, or a newer version wrote the records.
            MasterUnavailableError: the server does not answer, or refuses us.
        """
        self._url = url
        self._clock_ms = clock_ms
        self._guard = threading.Lock()
        self._connection: psycopg.Connection[tuple[object, ...]] | None = None
        # What was read last; a record is read again only if its version is another.
        self._known: dict[RecordKey, StoredRecord] = {}
        try:
            with self._guard, self._transaction("READ COMMITTED") as cursor:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_CREATION_LOCK,))
                for statement in _TABLES:
                    cursor.execute(statement)
                cursor.execute("SELECT max(version) FROM treefold_replication_schema")
                version = _number(cursor.fetchone())
        except BaseException:
            self.close()
            raise
        if version > _SCHEMA:
            self.close()
            raise ConfigError(
                f"the database has schema version {version}; this program supports up to {_SCHEMA}",
                hint="Use the version of treefold that wrote it, or newer.",
            )

    def read(self) -> StoredState:
        """All records as of one moment (MasterStore.read)."""
        with self._guard, self._transaction("REPEATABLE READ READ ONLY") as cursor:
            cursor.execute(_NOW)
            now_ms = _number(cursor.fetchone())
            cursor.execute(_VERSIONS)
            records = dict[RecordKey, StoredRecord]()
            for kind, name, version in cursor.fetchall():
                key = record_key(str(kind), str(name))
                known = self._known.get(key)
                if known is None or known.version != version:
                    known = _stored(cursor, key)
                records[key] = known
            self._known = records
        return StoredState(self._clock_ms() if self._clock_ms else now_ms, records)

    def write(
        self,
        expected: Mapping[RecordKey, int],
        records: Sequence[Record],
        removed: Sequence[RecordKey] = (),
    ) -> bool:
        """Write all or none, durably (MasterStore.write)."""
        try:
            with self._guard, self._transaction("SERIALIZABLE") as cursor:
                # In one order, so that two masters do not wait for each other.
                for key, version in sorted(expected.items(), key=lambda one: _row(one[0])):
                    cursor.execute(_VERSION, _row(key))
                    row = cursor.fetchone()
                    if (_number(row) if row else 0) != version:
                        raise _ChangedError
                for record in sorted(records, key=lambda one: _row(one.key)):
                    cursor.execute(_SAVE, (*_row(record.key), record_json(record)))
                for key in removed:
                    cursor.execute(_REMOVE, _row(key))
        except (_ChangedError, errors.SerializationFailure, errors.DeadlockDetected):
            return False
        return True

    def close(self) -> None:
        """Close the connection (MasterStore.close)."""
        with self._guard:
            self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _transaction(self, isolation: str) -> Iterator["psycopg.Cursor[tuple[object, ...]]"]:
        """All or nothing. What says that another transaction was met comes as it is."""
        try:
            connection = self._connected()
            with connection.cursor() as cursor:
                cursor.execute(f"BEGIN ISOLATION LEVEL {isolation}")
                try:
                    yield cursor
                    cursor.execute("COMMIT")
                except BaseException:
                    if not connection.broken:
                        cursor.execute("ROLLBACK")
                    raise
        except (errors.SerializationFailure, errors.DeadlockDetected):
            raise
        except psycopg.OperationalError as error:
            # Lost, refused or too slow. A new connection starts from what is there.
            self._drop()
            raise MasterUnavailableError(
                f"the database does not answer: {_first_line(error)}",
                hint="Another master may reach it.",
            ) from error
        except psycopg.Error as error:
            self._drop()
            raise DatabaseError(f"the database refuses: {_first_line(error)}") from error

    def _connected(self) -> "psycopg.Connection[tuple[object, ...]]":
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg.connect(
                    self._url,
                    autocommit=True,
                    connect_timeout=_CONNECT_TIMEOUT_S,
                    tcp_user_timeout=_ANSWER_TIMEOUT_MS,
                    options=_SESSION,
                    application_name="treefold replication-master",
                )
            except psycopg.ProgrammingError as error:
                raise ConfigError(f"database: {_first_line(error)}") from error
        return self._connection


class _ChangedError(Exception):
    """A record has another version than expected; ends a transaction."""


def _stored(cursor: "psycopg.Cursor[tuple[object, ...]]", key: RecordKey) -> StoredRecord:
    cursor.execute(_RECORD, _row(key))
    row = cursor.fetchone()
    assert row is not None
    return StoredRecord(_number(row), parsed_record(key, str(row[1])))


def _row(key: RecordKey) -> tuple[str, str]:
    return key.kind.value, key.name


def _number(row: tuple[object, ...] | None) -> int:
    value = row[0] if row else None
    if not isinstance(value, int):
        raise DatabaseError(f"expected a number, found {value!r}")
    return value


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().partition("\n")[0]
