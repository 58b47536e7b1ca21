"""Look-ups of thousands of rows in the pages of a SQLite file, without SQLite.

The kernels (`proof.page_kernels`, the extra `fast`) read SQLite's own B-trees, names in
half the time that SQLite takes. Two things make that safe.

No page changes meanwhile. In WAL mode a checkpoint writes nothing to the file that came
after the snapshot of an open reader (sqlite.org/wal.html, "Concurrency"). So once the
whole log has been written back while a transaction is open, the file itself is what
that transaction sees, until it ends. Otherwise SQLite answers.

What is not found here is asked of SQLite, and what is found is checked by the callers
like all that an index gives: names by their hash, rows by their checksum.
"""

import os
import sqlite3
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from proof.columns import ByteColumn, NameColumns, gathered
from proof.symbols import kernels_for
from proof.tables import RowColumns

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Fewer look-ups cost less than to ask whether the log is written back.
LOOKUPS_MIN = 200
_NAMES = _TABLE, _BY_HASH = "item", "item_by_hash"
# The kernels read eight bytes at a time.
_WORD = np.zeros(8, np.uint8)


class _PageKernels(Protocol):
    """The interface of the module proof.page_kernels, which documents it."""

    def find_names(
        self, file: int, page_bytes: int, pages: int, root: int, hashes: "NDArray[np.uint64]"
    ) -> tuple["NDArray[Any]", ...]:
        """Names by hash."""

    def find_rows(
        self, file: int, page_bytes: int, pages: int, root: int, *names: "NDArray[Any]"
    ) -> tuple["NDArray[Any]", ...]:
        """Rows by name."""


class PageFile:
    """The file of a database, and a connection of its own that writes its log back.
    Threads may share it.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path, self._connection = path, connection
        self._lock = threading.Lock()
        self._file: int | None = None
        self._page_bytes = 0
        self._roots = dict[str, int]()

    def reader(self, lookups: int) -> "PageReader | None":
        """Reads what an open transaction sees, which has read before, until it ends.
        None if SQLite has to: for few look-ups, without kernels, or while the log
        cannot be written back: others read or write, or the disk is full or fails.
        """
        kernels = _kernels_for(lookups) if lookups >= LOOKUPS_MIN else None
        if kernels is None:
            return None
        with self._lock, suppress(sqlite3.Error, OSError):
            execute = self._connection.execute
            is_busy, logged, written = execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if is_busy or logged < 0 or logged != written:
                return None
            if self._file is None:
                self._page_bytes = execute("PRAGMA page_size").fetchone()[0]
                schema = execute("SELECT name, rootpage FROM sqlite_schema")
                self._roots = {name: root for name, root in schema if name in _NAMES}
                self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            pages = os.fstat(self._file).st_size // self._page_bytes
            if self._roots.keys() == set(_NAMES):
                return PageReader(kernels, (self._file, self._page_bytes, pages), self._roots)
        return None

    def close(self) -> None:
        """Release the file; idempotent. Only once no other connection is open: a file
        that is closed loses all locks that this process has on it (fcntl(2)).
        """
        self._connection.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class PageReader:
    """The rows of one moment. What is damaged is not found."""

    def __init__(
        self, kernels: _PageKernels, place: tuple[int, int, int], roots: dict[str, int]
    ) -> None:
        """Internal: made by PageFile.reader."""
        self._kernels, self._place, self._roots = kernels, place, roots

    def names(self, hashes: "NDArray[np.uint64]") -> tuple[NameColumns, "NDArray[np.uint64]"]:
        """The names of hashes (ascending, each once), and the hashes of which none was
        found.
        """
        data, starts, key_ends, ends, is_found = self._names(hashes)
        keys = ByteColumn(data, ends)
        versions = ByteColumn(data[:0], np.zeros(len(ends), np.int64))
        if (key_ends != ends).any():
            keys = gathered(data, starts, key_ends - starts)
            versions = gathered(data, key_ends, ends - key_ends)
        return NameColumns(keys, versions), hashes[~is_found]

    def rows(self, hashes: "NDArray[np.uint64]") -> tuple[RowColumns, "NDArray[np.uint64]"]:
        """The rows of hashes (ascending, each once), in the order of keys, and the
        hashes of which none was found.
        """
        data, starts, key_ends, ends, has_name = self._names(hashes)
        # In this order a page is read once for all that is in it.
        order = ByteColumn(data, ends).order()
        starts, key_ends, ends = starts[order], key_ends[order], ends[order]
        found, row_ends, has_row = self._kernels.find_rows(
            *self._place,
            self._roots[_TABLE],
            np.concatenate((data, _WORD)),
            starts,
            key_ends,
            ends,
        )
        starts, key_ends, ends = starts[has_row], key_ends[has_row], ends[has_row]
        names = NameColumns(
            gathered(data, starts, key_ends - starts), gathered(data, key_ends, ends - key_ends)
        )
        left = np.concatenate((hashes[~has_name], hashes[has_name][order[~has_row]]))
        return RowColumns(names, ByteColumn(found, row_ends[has_row])), left

    def _names(self, hashes: "NDArray[np.uint64]") -> tuple["NDArray[Any]", ...]:
        """Names joined; where each and its key and version begin and end; which hashes
        have one.
        """
        data, key_ends, ends, is_found = self._kernels.find_names(
            *self._place, self._roots[_BY_HASH], hashes
        )
        key_ends, ends = key_ends[is_found], ends[is_found]
        starts = np.concatenate((ends[:0], [0], ends[:-1]))[: len(ends)]
        return data, starts, key_ends, ends, is_found


def _kernels_for(lookups: int) -> _PageKernels | None:
    """The kernels, under the terms of `proof.symbols.kernels_for`."""
    return _load() if kernels_for(lookups) is not None else None


@cache
def _load() -> _PageKernels | None:
    try:
        from proof import page_kernels as loaded
    except ImportError:
        return None
    return cast(_PageKernels, loaded)
