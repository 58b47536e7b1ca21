"""A database of SQLite that one process writes: its settings, and its transactions."""

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_sqlite(path: Path) -> sqlite3.Connection:
    """Open a database, or make an empty one. Threads may share it one at a time.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        # Readers, such as a backup, do not block us; commits survive a power failure.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def sqlite_transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All that is written inside, or nothing if the block fails.

    Raises:
        sqlite3.Error: nothing was written.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # Of some errors, such as a full disk, SQLite itself rolls back.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
