"""Store jobs, visits and the holders of containers in SQLite, so that a restarted
controller continues with them.

A job is one row: the columns used in queries, and the whole value as JSON. The file's
`user_version` is the schema version: an older file is migrated step by step, and a
newer one is refused.
"""

import fcntl
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from merkle.replica import PeerId
from merkle.tree import ContainerId
from runtime.errors import BusyError, ConfigError, DatabaseError
from runtime.row_order import of_types
from runtime.sqlite_file import open_sqlite, sqlite_transaction
from scm.jobs import Job, JobState
from scm.policy import Visit

# Further ended jobs are dropped, oldest first; active jobs are never dropped.
_ENDED_JOBS_KEPT = 10_000

_TERMINAL = tuple(state.value for state in JobState if state.is_terminal)
_ENDED = ", ".join(f"'{state}'" for state in _TERMINAL)
_JOB = TypeAdapter(Job)
_VISIT = TypeAdapter(Visit)
_PEERS = TypeAdapter(frozenset[PeerId])

_T = TypeVar("_T")

_TABLES = (
    "CREATE TABLE jobs (job_id VARCHAR NOT NULL PRIMARY KEY, container_id INTEGER NOT NULL,"
    " state VARCHAR NOT NULL, created_at_s FLOAT NOT NULL, job VARCHAR NOT NULL)",
    "CREATE INDEX ix_jobs_state ON jobs (state)",
    "CREATE INDEX ix_jobs_created_at_s ON jobs (created_at_s)",
    "CREATE TABLE visits (container_id INTEGER NOT NULL PRIMARY KEY, visit VARCHAR NOT NULL)",
    "CREATE TABLE terms (term INTEGER NOT NULL PRIMARY KEY)",
)
# Files of the first version may have it already.
_HOLDERS = (
    "CREATE TABLE IF NOT EXISTS holders (container_id INTEGER NOT NULL PRIMARY KEY,"
    " datanodes VARCHAR NOT NULL)"
)
_SAVE_JOB = (
    "INSERT INTO jobs VALUES (:job_id, :container_id, :state, :created_at_s, :job)"
    " ON CONFLICT (job_id) DO UPDATE SET state = excluded.state, job = excluded.job"
)
_SAVE_VISIT = (
    "INSERT INTO visits VALUES (?, ?)"
    " ON CONFLICT (container_id) DO UPDATE SET visit = excluded.visit"
)
_SAVE_HOLDERS = (
    "INSERT INTO holders VALUES (?, ?)"
    " ON CONFLICT (container_id) DO UPDATE SET datanodes = excluded.datanodes"
)
# All jobs of one request have one creation time, so the ID is a part of the order.
_DROP_OLD = f"""
    DELETE FROM jobs WHERE state IN ({_ENDED}) AND (created_at_s, job_id) <= (
        SELECT created_at_s, job_id FROM jobs WHERE state IN ({_ENDED})
        ORDER BY created_at_s DESC, job_id DESC LIMIT 1 OFFSET ?)
"""

# Each migrates a file from the version of its index to the next. Released migrations
# are never edited.
Migration = Callable[[sqlite3.Connection], object]
MIGRATIONS: tuple[Migration, ...] = (
    lambda connection: [connection.execute(statement) for statement in _TABLES],
    lambda connection: connection.execute(_HOLDERS),
    # Jobs may be PAUSED or STALLED: an older program would call their rows invalid.
    lambda connection: None,
)


class SqliteJobStore:
    """The store of one controller, which opens it exclusively. Not thread-safe: the
    caller holds a lock.
    """

    def __init__(
        self,
        path: Path,
        *,
        migrations: Sequence[Migration] = MIGRATIONS,
        ended_jobs_kept: int = _ENDED_JOBS_KEPT,
    ) -> None:
        """Open the file, and create or migrate it as needed.

        Raises:
            BusyError: another controller has the file open.
            ConfigError: a newer version wrote the file.
            DatabaseError: the file cannot be opened.
        """
        self._path = path
        self._ended_jobs_kept = ended_jobs_kept
        self._lock = _lock(path)
        self._connection: sqlite3.Connection | None = None
        try:
            with _named_errors(path):
                self._connection = open_sqlite(path)
            with self._transaction() as connection:
                _migrate(connection, path, migrations)
        except BaseException:
            self.close()
            raise

    def jobs(self) -> Sequence[Job]:
        """All jobs, oldest first (JobStore.jobs)."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT job FROM jobs ORDER BY created_at_s, job_id")
            return [_value(_JOB, row) for (row,) in rows]

    def visits(self) -> Sequence[Visit]:
        """All visits (JobStore.visits)."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT visit FROM visits")
            return [_value(_VISIT, row) for (row,) in rows]

    def holders(self) -> Mapping[ContainerId, AbstractSet[PeerId]]:
        """All holders (JobStore.holders)."""
        # Few different sets: millions of containers share them.
        sets: dict[str, frozenset[PeerId]] = {}
        found = {}
        with self._transaction() as connection:
            rows = connection.execute("SELECT container_id, datanodes FROM holders")
            for container_id, row in rows:
                if row not in sets:
                    sets[row] = _value(_PEERS, row)
                found[ContainerId(container_id)] = sets[row]
        return found

    def save(
        self,
        jobs: Iterable[Job] = (),
        visits: Iterable[Visit] = (),
        holders: Mapping[ContainerId, AbstractSet[PeerId]] = MappingProxyType({}),
    ) -> None:
        """Save jobs, visits and holders in one transaction (JobStore.save)."""
        job_rows = [
            {
                "job_id": job.job_id,
                "container_id": job.container_id,
                "state": job.state.value,
                "created_at_s": job.created_at_s,
                "job": _JOB.dump_json(job).decode(),
            }
            for job in jobs
        ]
        visit_rows = [(visit.container_id, _VISIT.dump_json(visit).decode()) for visit in visits]
        with self._transaction() as connection:
            connection.executemany(_SAVE_JOB, job_rows)
            if any(row["state"] in _TERMINAL for row in job_rows):
                connection.execute(_DROP_OLD, (self._ended_jobs_kept,))
            connection.executemany(_SAVE_VISIT, visit_rows)
            _save_holders(connection, holders)

    def next_term(self) -> int:
        """A new term, already on disk (JobStore.next_term)."""
        with self._transaction() as connection:
            row = connection.execute("SELECT max(term) FROM terms").fetchone()
            (last,) = of_types(row, int | None)
            term = (last or 0) + 1
            connection.execute("DELETE FROM terms")
            connection.execute("INSERT INTO terms VALUES (?)", (term,))
            return term

    def close(self) -> None:
        """Close the file and release the lock; idempotent."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        assert connection is not None
        with _named_errors(self._path), sqlite_transaction(connection):
            yield connection


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise DatabaseError(f"{path}: {error}", path=str(path)) from error
    except (ValueError, OverflowError) as error:
        raise DatabaseError(f"{path}: a row has an invalid value", path=str(path)) from error


def _value(kind: TypeAdapter[_T], row: str) -> _T:
    """The value in a row's JSON.

    Raises:
        sqlite3.DatabaseError: it is not text.
        ValueError: it is not JSON of this kind, or has Infinity or NaN, which the next
            save could not write.
    """
    of_types((row,), str)
    from_json(row, allow_inf_nan=False)
    return kind.validate_json(row)


def _lock(path: Path) -> int:
    """Lock the file beside the database; the lock is held until it is closed."""
    try:
        descriptor = os.open(
            path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640
        )
    except OSError as error:
        raise DatabaseError(
            f"{path}: cannot be opened: {error.strerror}", path=str(path)
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BusyError(f"{path}: another controller has it open", path=str(path)) from error
    return descriptor


def _migrate(connection: sqlite3.Connection, path: Path, migrations: Sequence[Migration]) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(migrations):
        raise ConfigError(
            f"{path}: has schema version {version}; this program supports up to {len(migrations)}",
            hint="use the version of treefold that wrote it, or newer",
        )
    for migration in migrations[version:]:
        migration(connection)
    connection.execute(f"PRAGMA user_version={len(migrations)}")


def _save_holders(
    connection: sqlite3.Connection, holders: Mapping[ContainerId, AbstractSet[PeerId]]
) -> None:
    rows = [(number, json.dumps(sorted(peers))) for number, peers in holders.items() if peers]
    connection.executemany(_SAVE_HOLDERS, rows)
    gone = [(number,) for number, peers in holders.items() if not peers]
    connection.executemany("DELETE FROM holders WHERE container_id = ?", gone)
