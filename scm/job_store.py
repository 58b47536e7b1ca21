"""Store jobs, visits and the holders of containers in SQLite, so that a restarted
controller continues with them.

A job is one row: the columns used in queries, and the whole value as JSON. The file's
`user_version` is the schema version: an older file is migrated step by step, and a
newer one is refused.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json
from sqlalchemy import (
    Column,
    Connection,
    Engine,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    event,
    select,
    text,
    tuple_,
)
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.engine.url import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry

from merkle.replica import PeerId
from merkle.tree import ContainerId
from runtime.errors import BusyError, ConfigError, DatabaseError
from scm.jobs import Job, JobState
from scm.policy import Visit

# Further ended jobs are dropped, oldest first; active jobs are never dropped.
_ENDED_JOBS_KEPT = 10_000

_TERMINAL = tuple(state.value for state in JobState if state.is_terminal)
_JOB = TypeAdapter(Job)
_VISIT = TypeAdapter(Visit)
_PEERS = TypeAdapter(frozenset[PeerId])

_T = TypeVar("_T")

_metadata = MetaData()
_jobs = Table(
    "jobs",
    _metadata,
    Column("job_id", String, primary_key=True),
    Column("container_id", Integer, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("created_at_s", Float, nullable=False, index=True),
    Column("job", String, nullable=False),
)
_visits = Table(
    "visits",
    _metadata,
    Column("container_id", Integer, primary_key=True),
    Column("visit", String, nullable=False),
)
_holders = Table(
    "holders",
    _metadata,
    Column("container_id", Integer, primary_key=True),
    Column("datanodes", String, nullable=False),
)
_terms = Table("terms", _metadata, Column("term", Integer, primary_key=True))

# Each migrates a file from the version of its index to the next. Released migrations
# are never edited.
Migration = Callable[[Connection], None]
MIGRATIONS: tuple[Migration, ...] = (
    lambda connection: _metadata.create_all(connection),
    lambda connection: _holders.create(connection, checkfirst=True),
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
        self._engine = _engine(path)
        try:
            with self._transaction() as connection:
                _migrate(connection, path, migrations)
        except BaseException:
            self.close()
            raise

    def jobs(self) -> Sequence[Job]:
        """All jobs, oldest first (JobStore.jobs)."""
        with self._transaction() as connection:
            rows = connection.execute(
                select(_jobs.c.job).order_by(_jobs.c.created_at_s, _jobs.c.job_id)
            ).scalars()
            return [_value(_JOB, row) for row in rows]

    def visits(self) -> Sequence[Visit]:
        """All visits (JobStore.visits)."""
        with self._transaction() as connection:
            return [
                _value(_VISIT, row) for row in connection.execute(select(_visits.c.visit)).scalars()
            ]

    def holders(self) -> Mapping[ContainerId, AbstractSet[PeerId]]:
        """All holders (JobStore.holders)."""
        # Few different sets: millions of containers share them.
        sets: dict[str, frozenset[PeerId]] = {}
        found = {}
        with self._transaction() as connection:
            for container_id, row in connection.execute(
                select(_holders.c.container_id, _holders.c.datanodes)
            ):
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
        visit_rows = [
            {"container_id": visit.container_id, "visit": _VISIT.dump_json(visit).decode()}
            for visit in visits
        ]
        with self._transaction() as connection:
            if job_rows:
                upsert = insert(_jobs)
                changed = {"state": upsert.excluded.state, "job": upsert.excluded.job}
                connection.execute(
                    upsert.on_conflict_do_update(index_elements=["job_id"], set_=changed), job_rows
                )
                if any(row["state"] in _TERMINAL for row in job_rows):
                    _drop_old(connection, self._ended_jobs_kept)
            if visit_rows:
                upsert = insert(_visits)
                kept = upsert.on_conflict_do_update(
                    index_elements=["container_id"], set_={"visit": upsert.excluded.visit}
                )
                connection.execute(kept, visit_rows)
            _save_holders(connection, holders)

    def next_term(self) -> int:
        """A new term, already on disk (JobStore.next_term)."""
        with self._transaction() as connection:
            term = int(connection.execute(select(_terms.c.term)).scalar() or 0) + 1
            connection.execute(_terms.delete())
            connection.execute(_terms.insert().values(term=term))
            return term

    def close(self) -> None:
        """Close the file and release the lock; idempotent."""
        self._engine.dispose()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise DatabaseError(f"{self._path}: {_cause(error)}", path=str(self._path)) from error
        except ValueError as error:
            raise DatabaseError(
                f"{self._path}: a row has an invalid value", path=str(self._path)
            ) from error


def _value(kind: TypeAdapter[_T], row: str) -> _T:
    """The value in a row's JSON.

    Raises:
        ValueError: it is not JSON of this kind, or has Infinity or NaN, which the next
            save could not write.
    """
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


def _engine(path: Path) -> Engine:
    engine = create_engine(URL.create("sqlite", database=str(path)))

    @event.listens_for(engine, "connect")
    def configure(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        # Readers, such as a backup, do not block us; commits survive a power failure.
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    return engine


def _migrate(connection: Connection, path: Path, migrations: Sequence[Migration]) -> None:
    version = int(connection.execute(text("PRAGMA user_version")).scalar() or 0)
    if version > len(migrations):
        raise ConfigError(
            f"{path}: has schema version {version}; this program supports up to {len(migrations)}",
            hint="use the version of treefold that wrote it, or newer",
        )
    for migration in migrations[version:]:
        migration(connection)
    connection.execute(text(f"PRAGMA user_version={len(migrations)}"))


def _save_holders(
    connection: Connection, holders: Mapping[ContainerId, AbstractSet[PeerId]]
) -> None:
    rows = [
        {"container_id": number, "datanodes": json.dumps(sorted(peers))}
        for number, peers in holders.items()
        if peers
    ]
    if rows:
        upsert = insert(_holders)
        changed = {"datanodes": upsert.excluded.datanodes}
        connection.execute(
            upsert.on_conflict_do_update(index_elements=["container_id"], set_=changed), rows
        )
    gone = [{"gone": number} for number, peers in holders.items() if not peers]
    if gone:
        connection.execute(
            _holders.delete().where(_holders.c.container_id == bindparam("gone")), gone
        )


def _drop_old(connection: Connection, kept: int) -> None:
    ended = _jobs.c.state.in_(_TERMINAL)
    # All jobs of one request have one creation time, so the ID is a part of the order.
    age = tuple_(_jobs.c.created_at_s, _jobs.c.job_id)
    newest_first = (_jobs.c.created_at_s.desc(), _jobs.c.job_id.desc())
    dropped = (
        select(_jobs.c.created_at_s, _jobs.c.job_id)
        .where(ended)
        .order_by(*newest_first)
        .offset(kept)
        .limit(1)
    )
    newest_dropped = connection.execute(dropped).one_or_none()
    if newest_dropped is not None:
        connection.execute(_jobs.delete().where(ended, age <= tuple_(*newest_dropped)))


def _cause(error: SQLAlchemyError) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause)
