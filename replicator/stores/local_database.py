"""The SQLite database of a local bucket: opening, transactions, and its errors by name.

Every commit is synced before it returns. Several processes may have the database open;
one that is killed leaves no lock. A bucket of an older format is upgraded when it is
opened.

The log of changes has a random identity. A file beside the database is made with it and
never touched again: whoever copies a bucket, or restores it from a copy, makes another
such file, by whose inode and time of change this is noticed. It then is another log.
"""

import contextlib
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from replicator.stores.errors import StoreError, StoreUnavailableError
from replicator.stores.local_rows import BucketRows
from runtime.disk import Disk, Operation, owner_of
from runtime.errors import DiskError

DATABASE_FILE = "bucket.db"
_LOG_FILE = "log"
_LOG_BYTES = 16
# "Tfbk": marks the file as a bucket of ours.
_APPLICATION_ID = 0x5466626B
# Keeps SQLite's log small after one large transaction.
_WAL_BYTES_MAX = 64 << 20

# Statements that lead from each format to the next; an empty database has format 0.
_UPGRADES = (
    f"""
CREATE TABLE history (position INTEGER NOT NULL, trimmed INTEGER NOT NULL);
INSERT INTO history VALUES (0, 0);
CREATE TABLE versions (
    position INTEGER PRIMARY KEY, key BLOB NOT NULL, superseded INTEGER, content INTEGER,
    modified_ms INTEGER NOT NULL, properties TEXT NOT NULL);
CREATE UNIQUE INDEX versions_current ON versions (key) WHERE superseded IS NULL;
CREATE INDEX versions_key ON versions (key, position DESC);
CREATE INDEX versions_superseded ON versions (superseded) WHERE superseded IS NOT NULL;
CREATE INDEX versions_content ON versions (content) WHERE content IS NOT NULL;
CREATE INDEX versions_markers ON versions (position) WHERE content IS NULL;
CREATE TABLE contents (
    content INTEGER PRIMARY KEY, size_bytes INTEGER NOT NULL, etag TEXT NOT NULL,
    crc32c INTEGER NOT NULL, md5 BLOB, blake3 BLOB);
CREATE TABLE segments (
    content INTEGER NOT NULL, first INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
    blob INTEGER NOT NULL, blob_first INTEGER NOT NULL, crc32c INTEGER NOT NULL,
    PRIMARY KEY (content, first)) WITHOUT ROWID;
CREATE INDEX segments_blob ON segments (blob);
CREATE TABLE blobs (blob INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT, body BLOB);
CREATE UNIQUE INDEX blobs_file ON blobs (file) WHERE file IS NOT NULL;
CREATE TABLE uploads (upload TEXT PRIMARY KEY, key BLOB NOT NULL, properties TEXT NOT NULL);
CREATE INDEX uploads_key ON uploads (key, upload);
CREATE TABLE parts (
    upload TEXT NOT NULL, number INTEGER NOT NULL, content INTEGER NOT NULL,
    PRIMARY KEY (upload, number)) WITHOUT ROWID;
CREATE TABLE writers (token TEXT PRIMARY KEY);
CREATE TABLE garbage (file TEXT PRIMARY KEY);
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = 1;
""",
    """
ALTER TABLE history ADD COLUMN swept INTEGER NOT NULL DEFAULT 0;
UPDATE history SET swept = trimmed;
ALTER TABLE history ADD COLUMN log TEXT NOT NULL DEFAULT '';
ALTER TABLE history ADD COLUMN log_stamp TEXT NOT NULL DEFAULT '';
ALTER TABLE versions ADD COLUMN previous_key BLOB;
CREATE TABLE snapshots (
    snapshot_id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, position INTEGER NOT NULL,
    created_ms INTEGER NOT NULL);
CREATE INDEX snapshots_position ON snapshots (position);
PRAGMA user_version = 2;
""",
)
_FORMAT_VERSION = len(_UPGRADES)


class NotABucketError(StoreError):
    """The folder is not a local bucket, or a version that this program cannot read."""

    code = "not_a_bucket"


class StoreFullError(StoreError):
    """There is no space left for the bucket."""

    code = "store_full"


class BucketDatabase:
    """The database of one bucket, for the threads of one process; others may have it
    open too.
    """

    def __init__(self, folder: Path, disk: Disk, *, create: bool, lock_wait_s: float) -> None:
        """Open the database, and make it first if it may be.

        Raises:
            NotABucketError: it is missing, or is not that of a bucket.
            StoreUnavailableError: another process holds it for too long.
            StoreError: it cannot be opened.
        """
        self._path = folder / DATABASE_FILE
        self._disk = disk
        self._lock = threading.RLock()
        with named_errors(self._path):
            uri = f"{self._path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
            self._connection = sqlite3.connect(
                uri, lock_wait_s, uri=True, isolation_level=None, check_same_thread=False
            )
        try:
            with named_errors(self._path):
                self._open(create)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database; idempotent."""
        with self._lock:
            self._connection.close()

    @contextlib.contextmanager
    def change(self) -> Iterator["BucketRows"]:
        """One transaction that changes rows: durable when the block has ended, or
        nothing of it after an error.

        Raises:
            StoreUnavailableError: another process changes rows for too long.
            StoreError: it cannot be committed.
        """
        with self._lock, named_errors(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield BucketRows(self._connection)
                self._disk.durable(Operation.BATCH, self._path, self._connection.commit)
            finally:
                if self._connection.in_transaction:
                    self._connection.rollback()

    @contextlib.contextmanager
    def view(self) -> Iterator["BucketRows"]:
        """One consistent view of all rows.

        Raises:
            StoreError: they cannot be read.
        """
        with self._lock, named_errors(self._path):
            self._connection.execute("BEGIN")
            try:
                yield BucketRows(self._connection)
            finally:
                self._connection.rollback()

    def _open(self, create: bool) -> None:
        execute = self._connection.execute
        if not self._is_ours():
            if not create:
                raise NotABucketError(
                    f"{self._path} was never completed", hint="A sync to it completes it."
                )
            execute("PRAGMA journal_mode = WAL")
        if self._version() < _FORMAT_VERSION:
            self._upgrade()
        version = self._version()
        if version > _FORMAT_VERSION:
            raise NotABucketError(
                f"{self._path} has format {version}; this program reads up to {_FORMAT_VERSION}",
                hint="Use the version of treefold that wrote it, or a newer one.",
            )
        execute("PRAGMA synchronous = FULL")
        execute(f"PRAGMA journal_size_limit = {_WAL_BYTES_MAX}")
        self._check_log()

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def _upgrade(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        # Another process may have been first.
        for statements in _UPGRADES[self._version() :]:
            for statement in statements.split(";"):
                self._connection.execute(statement)
        self._disk.durable(Operation.BATCH, self._path, self._connection.commit)
        self._disk.sync_folder(self._path.parent)

    def _check_log(self) -> None:
        """Begin another log if this is a copy of the bucket that recorded it."""
        with self.view() as rows:
            if rows.log_stamp() == self._log_stamp():
                return
        with self.change() as rows:
            if rows.log_stamp() != self._log_stamp():
                log = secrets.token_hex(_LOG_BYTES)
                self._disk.replace(self._path.with_name(_LOG_FILE), f"{log}\n".encode())
                rows.begin_log(log, self._log_stamp())

    def _log_stamp(self) -> str:
        try:
            _, _, changed_ns, inode = self._disk.stamp(self._path.with_name(_LOG_FILE))
        except DiskError as error:
            if error.facts.get("missing"):
                return "missing"
            raise
        # The database's own inode: it may be restored alone.
        return f"{self._disk.stamp(self._path)[3]} {inode} {changed_ns}"

    def _is_ours(self) -> bool:
        """False of an empty database.

        Raises:
            NotABucketError: it is another program's.
        """
        application = int(self._connection.execute("PRAGMA application_id").fetchone()[0])
        if application == _APPLICATION_ID:
            return True
        count = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if application or count:
            raise NotABucketError(f"{self._path} is the database of another program")
        return False


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Make errors of SQLite and of the disk those of a store.

    Raises:
        StoreUnavailableError: another process holds the database for too long.
        StoreFullError: there is no space left.
        StoreError: anything else.
    """
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        facts = {"path": str(path), "sqlite": name}
        if name.startswith("SQLITE_BUSY"):
            raise StoreUnavailableError(
                f"{path} is locked by another process", hint="Try again later.", **facts
            ) from error
        if name == "SQLITE_FULL":
            raise StoreFullError(
                f"{path}: {error}", hint=_FULL_HINT, errno="ENOSPC", **facts
            ) from error
        if name in ("SQLITE_NOTADB", "SQLITE_CANTOPEN"):
            raise NotABucketError(f"{path} cannot be opened: {error}", **facts) from error
        denied = {"denied": True} if name.startswith("SQLITE_READONLY") else {}
        hint = _hint(path, name)
        raise StoreError(f"{path}: {error}", hint=hint, **facts, **denied) from error
    except UnicodeDecodeError as error:
        # SQLite's message quotes the damaged text.
        raise StoreError(f"{path}: its tables cannot be read", path=str(path)) from error
    except DiskError as error:
        raise store_error(error) from error


def store_error(error: DiskError) -> StoreError:
    """A failed file operation, as the error of a store."""
    if error.facts.get("errno") in ("ENOSPC", "EDQUOT"):
        return StoreFullError(error.message, hint=_FULL_HINT, **error.facts)
    return StoreError(error.message, hint=error.hint, **error.facts)


_FULL_HINT = "Make room on its file system, then run the same again."


def _hint(path: Path, name: str) -> str:
    if name.startswith("SQLITE_READONLY"):
        return f"Its folder has to be writable: run this as {owner_of(path)}."
    return ""
