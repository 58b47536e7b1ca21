"""The tables of an index in RocksDB, for more than about 10^8 objects.

Rows, entries by hash, journal and values share one order of keys, told apart by their
first byte. RocksDB checks its blocks when it reads them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ozone.key_values import KeyScanner, KeyValues, write_sorted
from proof.columns import ByteColumn, NameColumns, gathered
from proof.errors import IndexDamagedError
from proof.item import KEY_HASH_BYTES
from proof.tables import ItemRow, JournalRow, RowColumns, TableBatch
from runtime.disk import Disk
from runtime.errors import DatabaseError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROW, _HASH, _JOURNAL, _VALUE = b"i", b"h", b"j", b"v"
# Ends a key, behind which the version stands; the same bytes inside a key are escaped,
# so that the order is that of (key, version).
_END, _AFTER_END = b"\0\0", b"\0\1"
_POSITION_BYTES = 8
# Rows of a file that are objects of Python at a time.
_TOGETHER = 4_096
# What RocksDB says of blocks and logs that fail their checksum, or are missing.
_DAMAGE = ("Corruption", "No such file", "Checksum mismatch")


class RocksTables:
    """ItemTables in a RocksDB, which this process alone opens."""

    def __init__(self, path: Path, *, building: bool = False) -> None:
        """Open the database; with `building`, create it.

        Raises:
            IndexDamagedError: RocksDB finds it damaged.
            DatabaseError: it cannot be opened, or another process has it open.
        """
        self._path = path
        self._is_building = building
        with _translated(path):
            self._database = KeyValues(path, create=building)

    @contextmanager
    def view(self) -> Iterator["_RocksView"]:
        """See ItemTables.view."""
        with self._database.scanner() as scanner:
            yield _RocksView(scanner, self._path)

    def versions(self, keys: Sequence[bytes]) -> list[list[ItemRow]]:
        """See ItemTables.versions."""
        with _translated(self._path):
            return [
                [
                    _item_row(*found)
                    for found in self._database.scan(start + _END, start + _AFTER_END)
                ]
                for start in map(_row_start, keys)
            ]

    def write(self, batch: TableBatch) -> None:
        """See ItemTables.write."""
        puts = list[tuple[bytes, bytes]]()
        for one in batch.puts:
            puts += ((_row_key(one), one.row), (_hash_key(one), b""))
        puts += ((_journal_key(position), change) for position, change in batch.journal)
        puts += (
            (_VALUE + name.encode(), data)
            for name, data in batch.values.items()
            if data is not None
        )
        deletes = [key for one in batch.deletes for key in (_row_key(one), _hash_key(one))]
        deletes += (_VALUE + name.encode() for name, data in batch.values.items() if data is None)
        trimmed = batch.journal_through
        self._database.write(
            puts,
            deletes,
            delete_range=(_journal_key(0), _journal_key(trimmed + 1)) if trimmed else None,
            durable=not self._is_building,
        )

    def take_files(self, paths: Sequence[Path]) -> None:
        """While the generation is built, take over files of `write_rows_file` and
        `write_hashes_file`, which were made of disjoint ranges.

        Raises:
            DatabaseError: one is missing or damaged, or overlaps with another.
        """
        assert self._is_building
        self._database.take_files(paths)

    def settle(self) -> None:
        """See ItemTables.settle."""
        assert self._is_building
        self._database.flush()
        Disk().sync_folder(self._path)
        self._is_building = False

    def close(self) -> None:
        """See ItemTables.close."""
        self._database.close()


def write_rows_file(path: Path, keys: ByteColumn, rows: ByteColumn) -> None:
    """Write rows of items without versions to a file for `RocksTables.take_files`. Keys
    ascend.

    Raises:
        DatabaseError: it cannot be written.
    """
    heads = np.full((len(keys), 1), ord(_ROW), np.uint8)
    held = (some.texts() for some in rows.pieces(_TOGETHER))
    pairs = (zip(*both, strict=True) for both in zip(_names(heads, keys), held, strict=True))
    write_sorted(path, chain.from_iterable(pairs))


def write_hashes_file(path: Path, hashes: "NDArray[np.uint64]", keys: ByteColumn) -> None:
    """Write the entries by hash (48 bits) of such rows to a file for `take_files`. They
    ascend by hash, then by key.

    Raises:
        DatabaseError: it cannot be written.
    """
    heads = hashes.astype(">u8").view(np.uint8).reshape(len(hashes), -1)
    heads = np.ascontiguousarray(heads[:, -KEY_HASH_BYTES - len(_HASH) :])
    heads[:, 0] = ord(_HASH)
    write_sorted(path, zip(chain.from_iterable(_names(heads, keys)), repeat(b"")))


def _names(heads: "NDArray[np.uint8]", keys: ByteColumn) -> Iterator[list[bytes]]:
    """The names of rows without versions, or of their entries by hash, _TOGETHER at a
    time. Each begins with a row of `heads`.
    """
    has_zeros, width, first = not keys.data.all(), heads.shape[1], 0
    for some in keys.pieces(_TOGETHER):
        if has_zeros:
            some = ByteColumn.of([key.replace(b"\0", b"\0\xff") for key in some.texts()])
        ours = heads[first : first + len(some)].reshape(-1)
        first += len(some)
        # Of each name its head, its key and the end.
        starts = np.zeros((len(some), 3), np.int64)
        lengths = np.full((len(some), 3), (width, 0, len(_END)))
        lengths[:, 1] = some.lengths
        starts[:, 0] = np.arange(0, len(ours), width)
        starts[:, 1] = some.ends - some.lengths + len(ours)
        starts[:, 2] = len(ours) + len(some.data)
        data = np.concatenate((ours, some.data, np.frombuffer(_END, np.uint8)))
        found = gathered(data, starts.reshape(-1), lengths.reshape(-1))
        yield ByteColumn(found.data, found.ends[2::3]).texts()


class _RocksView:
    """TableView of a snapshot."""

    def __init__(self, scanner: KeyScanner, path: Path) -> None:
        self._scanner = scanner
        self._path = path

    def rows(self, start: bytes, end: bytes | None) -> Iterator[ItemRow]:
        """See TableView.rows."""
        with _translated(self._path):
            last = _after(_ROW) if end is None else _row_start(end)
            for found in self._scanner.scan(_row_start(start), last):
                yield _item_row(*found)

    def by_hash(self, key_hashes: "NDArray[np.uint64]") -> RowColumns:
        """See TableView.by_hash."""
        found = list[ItemRow]()
        with _translated(self._path):
            for place in self._places(key_hashes):
                row = self._scanner.get(place)
                if row is None:
                    raise IndexDamagedError("an entry by hash has no row", path=str(self._path))
                found.append(_item_row(place, row))
        return RowColumns.of(found)

    def names_by_hash(self, key_hashes: "NDArray[np.uint64]") -> NameColumns:
        """See TableView.names_by_hash."""
        with _translated(self._path):
            found = [_item_row(place, b"") for place in self._places(key_hashes)]
        return NameColumns.of([one.key for one in found], [one.version for one in found])

    def _places(self, key_hashes: "NDArray[np.uint64]") -> Iterator[bytes]:
        """The keys of the rows with these hashes."""
        for key_hash in key_hashes.tolist():
            first = _HASH + key_hash.to_bytes(KEY_HASH_BYTES, "big")
            for entry, _ in list(self._scanner.scan(first, first + b"\xff" * 2)):
                yield _ROW + entry[len(first) :]

    def journal(self, *, after: int, through: int) -> Iterator[JournalRow]:
        """See TableView.journal."""
        with _translated(self._path):
            for key, change in self._scanner.scan(
                _journal_key(after + 1), _journal_key(through + 1)
            ):
                yield JournalRow(int.from_bytes(key[len(_JOURNAL) :], "big"), change)

    def values(self, prefix: str) -> dict[str, bytes]:
        """See TableView.values."""
        first = _VALUE + prefix.encode()
        with _translated(self._path):
            found = self._scanner.scan(first, _after(first))
            return {key[len(_VALUE) :].decode(): data for key, data in found}

    def damage(self) -> list[str]:
        """See TableView.damage: each row has one entry by hash."""
        with _translated(self._path):
            rows = missing = 0
            for row in self.rows(b"", None):
                rows += 1
                missing += self._scanner.get(_hash_key(row)) is None
            entries = sum(1 for _ in self._scanner.scan(_HASH, _after(_HASH)))
        if missing or entries != rows:
            return [f"{missing} of {rows} rows have no entry by hash; there are {entries} entries"]
        return []


def _row_start(key: bytes) -> bytes:
    return _ROW + key.replace(b"\0", b"\0\xff")


def _row_key(one: ItemRow) -> bytes:
    return _row_start(one.key) + _END + one.version


def _hash_key(one: ItemRow) -> bytes:
    return _HASH + one.row[:KEY_HASH_BYTES] + _row_key(one)[len(_ROW) :]


def _journal_key(position: int) -> bytes:
    return _JOURNAL + position.to_bytes(_POSITION_BYTES, "big")


def _item_row(key: bytes, row: bytes) -> ItemRow:
    name, _, version = key[len(_ROW) :].partition(_END)
    return ItemRow(name.replace(b"\0\xff", b"\0"), version, row)


def _after(prefix: bytes) -> bytes:
    return prefix[:-1] + bytes((prefix[-1] + 1,))


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except DatabaseError as error:
        if not any(word in error.message for word in _DAMAGE):
            raise
        raise IndexDamagedError(
            error.message,
            hint="Rebuild the index from a listing of the bucket.",
            path=str(path),
        ) from error
