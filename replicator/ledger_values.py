"""The values of the ledger's rows, checked as they are read."""

import sqlite3
from collections.abc import Sequence
from typing import TypeAlias

from replicator.copy_requests import ObjectStamp

Values: TypeAlias = Sequence[str | int | bytes | None]


def insert_row(connection: sqlite3.Connection, table: str, values: Values) -> None:
    """Insert a row, or replace the one with its key."""
    marks = ", ".join("?" for _ in values)
    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)


def remove_row(connection: sqlite3.Connection, table: str, key: bytes) -> None:
    """Remove the row of a key, if there is one."""
    connection.execute(f"DELETE FROM {table} WHERE key = ?", (key,))


def stamp_values(stamp: ObjectStamp | None) -> tuple[str | int | None, ...]:
    """The four columns of a stamp."""
    if stamp is None:
        return (None, None, None, None)
    return (stamp.version, stamp.etag, stamp.modified_ms, stamp.size_bytes)


def stamp_of(values: Sequence[object]) -> ObjectStamp | None:
    """The stamp in four columns.

    Raises:
        sqlite3.DatabaseError: they are of another kind.
    """
    version, etag, modified_ms, size_bytes = values
    if version is None:
        return None
    return ObjectStamp(str(version), str(etag), integer(modified_ms), integer(size_bytes))


def known_stamp(values: Sequence[object]) -> ObjectStamp:
    """The same where there must be one.

    Raises:
        sqlite3.DatabaseError: there is none, or the columns are of another kind.
    """
    stamp = stamp_of(values)
    if stamp is None:
        raise sqlite3.DatabaseError("an object has no stamp")
    return stamp


def integer(value: object) -> int:
    """A number.

    Raises:
        sqlite3.DatabaseError: it is none.
    """
    if not isinstance(value, int):
        raise sqlite3.DatabaseError(f"{value!r} is not a number")
    return value


def binary(value: object) -> bytes:
    """Bytes.

    Raises:
        sqlite3.DatabaseError: it is something else.
    """
    if not isinstance(value, bytes):
        raise sqlite3.DatabaseError(f"{value!r} is not binary")
    return value
