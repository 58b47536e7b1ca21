"""What a pair of buckets is known to hold, in a folder of its own: SQLite.

A row says which version of the source a key at the target is, by the stamps of both
and the hashes of what was sent. It never outlives its evidence: a row counts for a side
only while that side answers the same stamp. Uploads that were begun are recorded before
their parts, so that a killed run costs the parts that were on their way.

Threads commit together: whoever commits first takes the changes of all that wait. Only
uploads and the like are synced to the disk before anybody goes on. Of rows, a power cut
may take the last ones: then the target is looked at again.
"""

import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TypeAlias, TypeVar

from proof.item import ContentHash, EvidenceLevel, HashAlgorithm
from replicator.copy_requests import CopyResult, ObjectStamp, SentPart, UploadRecord
from replicator.crossing import Crossing
from replicator.ledger_values import (
    Values,
    binary,
    insert_row,
    integer,
    known_stamp,
    remove_row,
    stamp_of,
    stamp_values,
)
from replicator.stores.port import UploadedPart, UploadId
from replicator.windows import KEY_BYTES, WindowTable, pack_hashes, unpack_table
from runtime.disk import Disk
from runtime.errors import ConfigError, DatabaseError
from runtime.folder_lock import FolderLock
from runtime.row_order import in_order

T = TypeVar("T")

FILE = "ledger.sqlite"
_SCHEMA_VERSION = 1
# Rows read at a time: a listing of any length takes the same memory.
_PAGE_ROWS = 1_000
_BUSY_S = 30.0
# The columns of a stamp, in the order of its fields.
_STAMP_TYPES = "{0}_version TEXT, {0}_etag TEXT, {0}_modified_ms INTEGER, {0}_bytes INTEGER"

_TABLES = f"""
CREATE TABLE pair (
  source TEXT NOT NULL, target TEXT NOT NULL, secret BLOB NOT NULL, crossing TEXT
);
CREATE TABLE objects (
  key BLOB PRIMARY KEY, {_STAMP_TYPES.format("source")}, {_STAMP_TYPES.format("target")},
  hashes TEXT NOT NULL, properties BLOB NOT NULL, level INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE damaged (key BLOB PRIMARY KEY, {_STAMP_TYPES.format("target")}) WITHOUT ROWID;
CREATE TABLE windows (key BLOB PRIMARY KEY, packed BLOB NOT NULL);
CREATE TABLE uploads (
  key BLOB PRIMARY KEY, upload TEXT, {_STAMP_TYPES.format("source")},
  {_STAMP_TYPES.format("target")}, properties BLOB NOT NULL, part_bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE parts (
  key BLOB NOT NULL, number INTEGER NOT NULL, bytes INTEGER NOT NULL, etag TEXT NOT NULL,
  blake3 BLOB NOT NULL, PRIMARY KEY (key, number)
) WITHOUT ROWID;
CREATE TABLE plan (
  number INTEGER PRIMARY KEY, key BLOB NOT NULL, action TEXT NOT NULL, bytes INTEGER NOT NULL,
  {_STAMP_TYPES.format("source")}, {_STAMP_TYPES.format("target")}, reason TEXT NOT NULL
);
"""
_SELECT_ROWS = (
    "SELECT *, EXISTS (SELECT 1 FROM windows WHERE windows.key = objects.key) FROM objects"
)
_Change: TypeAlias = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A key whose content and properties were equal at both sides, when the source had
    one stamp and the target the other. `hashes` are sorted by algorithm. `has_windows`
    says that windows of the target's bytes are kept beside the row.
    """

    key: str
    source: ObjectStamp
    target: ObjectStamp
    hashes: tuple[ContentHash, ...]
    properties: bytes
    level: EvidenceLevel
    has_windows: bool = False

    def __post_init__(self) -> None:
        names = [one.algorithm.value for one in self.hashes]
        assert names == sorted(set(names))


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One row of the plan. `action` is the value of an Action; the stamps are those of
    the listing, with key and size all that the execution needs.
    """

    key: str
    action: str
    length_bytes: int
    source: ObjectStamp | None
    target: ObjectStamp | None
    reason: str


class LedgerDamagedError(DatabaseError):
    """The ledger cannot be read."""

    code = "ledger_damaged"


class PairLedger:
    """The ledger of one pair, which one process opens at a time. Thread-safe."""

    def __init__(self, folder: Path, *, source: str, target: str) -> None:
        """Open the ledger in a folder, which is created as needed, for a pair of
        addresses.

        Raises:
            BusyError: another process uses the folder.
            ConfigError: the ledger is of another pair, or of a newer version.
            LedgerDamagedError: the file is no ledger any more.
            DiskError: the folder cannot be created or locked.
        """
        Disk().make_folder(folder)
        self._path = folder / FILE
        self._pending = list[_PendingChange]()
        self._pending_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        # Whether a commit ends with a sync; changed by whoever commits.
        self._syncs = True
        self._folder_lock = FolderLock(folder, "treefold bucket")
        self._read_lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        # Of its own, so that nobody who reads waits for a disk that writes.
        self._reading: sqlite3.Connection | None = None
        # Keys that may have an upload of ours: few of all that are copied.
        self._uploading = set[str]()
        try:
            with self._translated():
                self._connection = self._connected()
                self._connection.execute("PRAGMA journal_mode=WAL")
                self._connection.execute("PRAGMA synchronous=FULL")
                self.secret = self._open_pair(source, target)
                self._reading = self._connected()
                self._uploading.update(self.upload_keys())
        except BaseException:
            self.close()
            raise

    @staticmethod
    def exists_in(folder: Path) -> bool:
        """Whether a folder has a ledger."""
        return os.path.lexists(folder / FILE)

    @property
    def folder(self) -> Path:
        """Where the ledger lies."""
        return self._path.parent

    def close(self) -> None:
        """Close the file and release the folder; idempotent."""
        opened = self._reading, self._connection
        self._reading = self._connection = None
        # Whoever closes last tidies up the file: the one that may write.
        for connection in opened:
            if connection is not None:
                with suppress(sqlite3.Error):
                    connection.close()
        self._folder_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def settle(self) -> None:
        """Bring all changes into the file itself, for `LedgerView`."""
        with self._translated(), self._commit_lock:
            assert self._connection is not None
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def row(self, key: str) -> LedgerRow | None:
        """What is known of a key."""
        rows = self._query(_ledger_row, f"{_SELECT_ROWS} WHERE key = ?", (key.encode(),))
        return rows[0] if rows else None

    def rows(self, prefix: str, *, start_after: str = "") -> Iterator[LedgerRow]:
        """All rows below a prefix, after `start_after`, in ascending order of their
        keys' UTF-8 bytes.
        """
        above = start_after >= prefix and bool(start_after)
        start = (start_after if above else prefix).encode()
        while True:
            comparison = ">" if above else ">="
            statement = f"{_SELECT_ROWS} WHERE key {comparison} ? ORDER BY key LIMIT {_PAGE_ROWS}"
            page = self._query(_ledger_row, statement, (start,))
            with self._translated():
                in_order(page, lambda row: row.key.encode(), after=start if above else None)
            for row in page:
                if not row.key.startswith(prefix):
                    return
                yield row
            if len(page) < _PAGE_ROWS:
                return
            start, above = page[-1].key.encode(), True

    def damaged(self) -> dict[str, ObjectStamp]:
        """The keys whose bytes at the target were found damaged, with the stamps that
        they had then.
        """

        def parse(values: Sequence[object]) -> tuple[str, ObjectStamp | None]:
            return binary(values[0]).decode(), stamp_of(values[1:5])

        found = self._query(parse, "SELECT * FROM damaged")
        return {key: stamp for key, stamp in found if stamp is not None}

    def save_damaged(self, key: str, stamp: ObjectStamp | None) -> None:
        """Note that a key's bytes at the target are not those that were recorded; with
        None, that they are.
        """
        values = (key.encode(), *stamp_values(stamp))
        if stamp is None:
            self._commit(lambda connection: remove_row(connection, "damaged", key.encode()))
        else:
            self._commit(lambda connection: insert_row(connection, "damaged", values))

    def row_count(self) -> int:
        """How many keys are known."""
        return self._query(lambda values: integer(values[0]), "SELECT count(*) FROM objects")[0]

    def crossing(self) -> Crossing | None:
        """Which properties the rows' digests cover; None before the first sync."""
        groups = self._query(lambda values: values[0], "SELECT crossing FROM pair")[0]
        return Crossing.of_groups(str(groups).split(",")) if groups else None

    def save_crossing(self, crossing: Crossing) -> None:
        """Note which properties digests cover from now on. Where they were others, the
        rows are forgotten: their digests cannot be compared with new ones.
        """
        known = self.crossing()
        if crossing == known:
            return

        def change(connection: sqlite3.Connection) -> None:
            connection.execute("UPDATE pair SET crossing = ?", (",".join(crossing.groups),))
            if known is not None:
                connection.execute("UPDATE objects SET properties = x''")

        self._commit(change)

    def windows(self, key: str, size_bytes: int) -> WindowTable | None:
        """The windows of a key's bytes at the target, of this size."""
        statement = "SELECT packed FROM windows WHERE key = ?"
        rows = self._query(lambda values: binary(values[0]), statement, (key.encode(),))
        return unpack_table(size_bytes, rows[0]) if rows else None

    def upload(self, key: str) -> UploadRecord | None:
        """The upload of a key that was begun and neither completed nor aborted."""
        if key not in self._uploading:
            return None
        name = (key.encode(),)
        statement = "SELECT * FROM parts WHERE key = ? ORDER BY number"
        records = self._query(_upload_record, "SELECT * FROM uploads WHERE key = ?", name)
        if not records:
            return None
        return replace(records[0], sent=tuple(self._query(_sent_part, statement, name)))

    def upload_keys(self) -> list[str]:
        """The keys that have an upload of ours, in order."""
        statement = "SELECT key FROM uploads ORDER BY key"
        return self._query(lambda values: binary(values[0]).decode(), statement)

    def save_upload(self, key: str, record: UploadRecord | None) -> None:
        """Replace what is recorded of the key's upload; durable when this returns."""
        name = key.encode()
        if record is not None:
            self._uploading.add(key)

        def change(connection: sqlite3.Connection) -> None:
            _forget_upload(connection, name)
            if record is not None:
                values = (
                    name,
                    record.upload,
                    *stamp_values(record.source),
                    *stamp_values(record.target),
                    record.properties,
                    record.part_bytes,
                )
                insert_row(connection, "uploads", values)
                for sent in record.sent:
                    _insert_part(connection, name, sent)

        self._commit(change)
        if record is None:
            self._uploading.discard(key)

    def save_part(self, key: str, sent: SentPart) -> None:
        """Add a part to the key's upload; durable when this returns."""
        self._commit(lambda connection: _insert_part(connection, key.encode(), sent))

    def save_copy(self, result: CopyResult) -> None:
        """Record an object that the target acknowledged, and forget the upload that has
        made it: new properties end none, so that what is left of one can be aborted.
        """
        row = LedgerRow(
            key=result.source.key,
            source=ObjectStamp.of(result.source),
            target=ObjectStamp.of(result.target),
            hashes=tuple(sorted(result.hashes, key=lambda one: one.algorithm.value)),
            properties=result.properties,
            level=EvidenceLevel.RECORDED if result.hashes else EvidenceLevel.LISTED,
        )
        name = row.key.encode()
        ends_upload = not result.properties_only and row.key in self._uploading

        def change(connection: sqlite3.Connection) -> None:
            insert_row(connection, "objects", _row_values(row))
            if not result.properties_only:
                remove_row(connection, "damaged", name)
            if not result.properties_only or result.windows is not None:
                remove_row(connection, "windows", name)
            if result.windows is not None:
                insert_row(connection, "windows", (name, pack_hashes(result.windows)))
            if ends_upload:
                _forget_upload(connection, name)

        self._commit(change, is_synced=False)
        if ends_upload:
            self._uploading.discard(row.key)

    def save_rows(self, rows: Sequence[LedgerRow]) -> None:
        """Record what was found equal; windows go unless the row has them."""

        def change(connection: sqlite3.Connection) -> None:
            for row in rows:
                _save_row(connection, row)

        if rows:
            self._commit(change, is_synced=False)

    def revise(self, found: Sequence[tuple[LedgerRow | None, LedgerRow | None]]) -> None:
        """Record what a comparison has found: for each key its row when that began, and
        the new one; None is no row. Where the row is another one by now, that is newer
        than what was found, and stays.
        """

        def change(connection: sqlite3.Connection) -> None:
            for before, after in found:
                row = before or after
                assert row is not None
                name = row.key.encode()
                known = connection.execute(f"{_SELECT_ROWS} WHERE key = ?", (name,)).fetchone()
                if (_ledger_row(known) if known is not None else None) != before:
                    continue
                if after is not None:
                    _save_row(connection, after)
                else:
                    _forget_key(connection, name)

        if found:
            self._commit(change, is_synced=False)

    def forget(self, keys: Sequence[str]) -> None:
        """Forget keys that were deleted at the target."""

        def change(connection: sqlite3.Connection) -> None:
            for key in keys:
                _forget_key(connection, key.encode())

        if keys:
            self._commit(change, is_synced=False)

    def clear_plan(self) -> None:
        """Begin a new plan."""
        self._commit(lambda connection: connection.execute("DELETE FROM plan"))

    def add_to_plan(self, steps: Sequence[PlannedStep]) -> None:
        """Append steps to the plan."""

        def change(connection: sqlite3.Connection) -> None:
            for step in steps:
                values = (
                    None,
                    step.key.encode(),
                    step.action,
                    step.length_bytes,
                    *stamp_values(step.source),
                    *stamp_values(step.target),
                    step.reason,
                )
                insert_row(connection, "plan", values)

        self._commit(change)

    def plan(self) -> Iterator[PlannedStep]:
        """The steps of the plan, in the order of their keys."""
        after = 0
        statement = f"SELECT * FROM plan WHERE number > ? ORDER BY number LIMIT {_PAGE_ROWS}"
        while page := self._query(_numbered_step, statement, (after,)):
            with self._translated():
                in_order(page, lambda numbered: numbered[0], after=after)
            yield from (step for _, step in page)
            after = page[-1][0]

    def _connected(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )

    def _open_pair(self, source: str, target: str) -> bytes:
        """Create the tables or check whose they are; returns the secret of the pair."""
        connection = self._connection
        assert connection is not None
        version = integer(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > _SCHEMA_VERSION:
            raise ConfigError(
                f"{self._path}: has schema version {version}; this program supports up to"
                f" {_SCHEMA_VERSION}",
                hint="Use the version of treefold that wrote it, or newer.",
            )
        if version == 0:
            secret = secrets.token_bytes(KEY_BYTES)
            connection.execute("BEGIN IMMEDIATE")
            for statement in _TABLES.split(";\n"):
                connection.execute(statement)
            insert_row(connection, "pair", (source, target, secret, None))
            connection.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")
            connection.execute("COMMIT")
            return secret
        known = connection.execute("SELECT source, target, secret FROM pair").fetchone()
        if known is None:
            raise sqlite3.DatabaseError("it names no pair")
        if known[:2] != (source, target):
            raise ConfigError(
                f"{self._path.parent} is the state of {known[0]} and {known[1]}",
                hint="Give each pair of buckets a folder of its own (--state).",
                source=known[0],
                target=known[1],
            )
        return binary(known[2])

    def _query(
        self, parse: Callable[[Sequence[object]], T], statement: str, values: Values = ()
    ) -> list[T]:
        with self._translated():
            with self._read_lock:
                assert self._reading is not None
                rows = self._reading.execute(statement, values).fetchall()
            return [parse(row) for row in rows]

    def _commit(self, change: _Change, *, is_synced: bool = True) -> None:
        """Make a change, together with those that other threads wait for; durable where
        it `is_synced`.
        """
        ours = _PendingChange(change, is_synced)
        with self._pending_lock:
            self._pending.append(ours)
        with self._translated(), self._commit_lock:
            with self._pending_lock:
                batch, self._pending = self._pending, []
            if batch:
                self._commit_batch(batch)
            # Another thread may have taken ours, and failed with it.
            if ours.error is not None:
                raise ours.error

    def _commit_batch(self, batch: Sequence["_PendingChange"]) -> None:
        assert self._connection is not None
        wanted = any(one.is_synced for one in batch)
        try:
            if wanted != self._syncs:
                # The log keeps the order of its changes either way.
                self._connection.execute(f"PRAGMA synchronous={'FULL' if wanted else 'NORMAL'}")
                self._syncs = wanted
            self._connection.execute("BEGIN IMMEDIATE")
            for one in batch:
                one.change(self._connection)
            self._connection.execute("COMMIT")
        except (sqlite3.Error, ValueError) as error:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            for one in batch:
                one.error = error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if not str(error).startswith("no such"):
                # The disk is full or fails; the file may well be whole.
                raise DatabaseError(f"{self._path}: {error}", path=str(self._path)) from error
            raise self._damaged(error) from error
        except (sqlite3.Error, ValueError, IndexError) as error:
            # Other columns than ours are an IndexError.
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> LedgerDamagedError:
        return LedgerDamagedError(
            f"{self._path}: {error}",
            hint=f"Remove {self._path.parent} and run again: what the target holds is compared"
            " anew, and what its store proves equal is not sent again.",
            path=str(self._path),
        )


@dataclass(slots=True, eq=False)
class _PendingChange:
    change: _Change
    is_synced: bool
    error: Exception | None = None


def _ledger_row(values: Sequence[object]) -> LedgerRow:
    hashes = tuple(
        ContentHash(HashAlgorithm(name), bytes.fromhex(digest))
        for name, _, digest in (one.partition(":") for one in str(values[9]).split())
    )
    names = [one.algorithm.value for one in hashes]
    if names != sorted(set(names)):
        raise sqlite3.DatabaseError("the hashes of an object are in no order")
    level = EvidenceLevel(integer(values[11]))
    return LedgerRow(
        key=binary(values[0]).decode(),
        source=known_stamp(values[1:5]),
        target=known_stamp(values[5:9]),
        hashes=hashes,
        properties=binary(values[10]),
        level=level,
        has_windows=bool(values[12]),
    )


def _row_values(row: LedgerRow) -> Values:
    return (
        row.key.encode(),
        *stamp_values(row.source),
        *stamp_values(row.target),
        " ".join(f"{one.algorithm.value}:{one.digest.hex()}" for one in row.hashes),
        row.properties,
        int(row.level),
    )


def _upload_record(values: Sequence[object]) -> UploadRecord:
    _, upload, *rest = values
    source, target = known_stamp(rest[:4]), stamp_of(rest[4:8])
    upload_id = UploadId(upload) if isinstance(upload, str) else None
    return UploadRecord(upload_id, source, target, binary(rest[8]), integer(rest[9]))


def _numbered_step(values: Sequence[object]) -> tuple[int, PlannedStep]:
    number, key, action, length_bytes, *rest = values
    source, target = stamp_of(rest[:4]), stamp_of(rest[4:8])
    name = binary(key).decode()
    step = PlannedStep(name, str(action), integer(length_bytes), source, target, str(rest[8]))
    return integer(number), step


def _sent_part(values: Sequence[object]) -> SentPart:
    _, number, length_bytes, etag, blake3 = values
    return SentPart(UploadedPart(integer(number), integer(length_bytes), str(etag)), binary(blake3))


def _insert_part(connection: sqlite3.Connection, key: bytes, sent: SentPart) -> None:
    part = sent.part
    insert_row(connection, "parts", (key, part.number, part.size_bytes, part.etag, sent.blake3))


def _save_row(connection: sqlite3.Connection, row: LedgerRow) -> None:
    insert_row(connection, "objects", _row_values(row))
    if not row.has_windows:
        remove_row(connection, "windows", row.key.encode())


def _forget_key(connection: sqlite3.Connection, key: bytes) -> None:
    for table in ("objects", "windows", "damaged"):
        remove_row(connection, table, key)


def _forget_upload(connection: sqlite3.Connection, key: bytes) -> None:
    for table in ("uploads", "parts"):
        remove_row(connection, table, key)
