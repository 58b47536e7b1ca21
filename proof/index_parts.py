"""The files of an index that is built in parts, and the sums that are merged.

A bucket is cut into ranges of keys. From the listed objects of one range a task makes a
file of rows, a file of their names, and the sums: the set roots of spans, the coded
symbols, and counts. Then other tasks each make the entries by hash of one share of all
hashes, from the names of all ranges. All of it is a function of the listing alone, so
that whichever task or engine comes first may be used. A range that has its sums is
done, which is what a resumed build goes by.

Sums have no order: the merge is associative and commutative, with `IndexSums.empty` for
nothing.
"""

import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from proof.columns import ByteColumn
from proof.index import Position
from proof.index_state import DerivedState, EvidenceTally, damaged, seal, unseal
from proof.item import ID_BYTES, KEY_HASH_BYTES
from proof.listed_rows import EncodedItems, ListedItemRules, encode_listed
from proof.listing import LISTED_SCHEMA, ListingPart, byte_array, byte_column, range_numbers
from proof.rocks_index import write_hashes_file, write_rows_file
from proof.root import SetRoot
from proof.spans import SPAN_ITEMS, SpanSums
from proof.symbols import (
    KEPT_SYMBOLS,
    KERNEL_IDS_MIN,
    SYMBOL_BYTES,
    CodedSymbols,
    kernels_for,
    key_hashes,
)
from runtime.disk import Disk, disk_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The file of how a build was cut; it is there before any task.
PLAN = "plan.json"
_COUNTS = struct.Struct(">QQQQ")
_SPAN = struct.Struct(f">IQ{ID_BYTES}s")
_SYMBOLS_BYTES = KEPT_SYMBOLS * SYMBOL_BYTES
_HASH_BITS = 8 * KEY_HASH_BYTES
# A task reads a slice of each range for each share: fewer shares are fewer slices.
_RANGES_PER_SHARE = 4
_TOKEN_BYTES, _PLACE_BYTES = 8, 8
# Rows that are cut into ranges at once: with more of them, slices are fewer and larger.
_SLICED_ROWS = 1 << 19
_NAMES_SCHEMA = pa.schema([("hash", pa.uint64()), ("key", pa.binary())])
_ORDER = ("key", "modified_ms", "version", "etag", "size_bytes", "etag_is_md5")


@dataclass(frozen=True, slots=True, eq=False)
class IndexSums:
    """What an index derives from disjoint ranges of its items: `spans` are first keys
    and roots, ascending; `levels` counts items by evidence, LISTED first; `repeated`
    counts rows of a listing that named a key once more.
    """

    spans: tuple[tuple[str, SetRoot], ...]
    symbols: CodedSymbols
    levels: tuple[int, int, int] = (0, 0, 0)
    repeated: int = 0

    def __add__(self, other: "IndexSums") -> "IndexSums":
        return IndexSums.of_all((self, other))

    @classmethod
    def empty(cls) -> Self:
        """The sums of no items."""
        return cls((), CodedSymbols.zeros(KEPT_SYMBOLS))

    @classmethod
    def of_all(cls, parts: Iterable["IndexSums"]) -> "IndexSums":
        """The sums of disjoint ranges together, in any order."""
        spans, symbols = list[tuple[str, SetRoot]](), CodedSymbols.zeros(KEPT_SYMBOLS)
        listed = recorded = read = repeated = 0
        for one in parts:
            spans += one.spans
            np.bitwise_xor(symbols.sums, one.symbols.sums, out=symbols.sums)
            # Counts are modulo 2^16, as they are kept.
            np.add(symbols.counts, one.symbols.counts, out=symbols.counts)
            listed, recorded, read = (
                ours + more for ours, more in zip((listed, recorded, read), one.levels, strict=True)
            )
            repeated += one.repeated
        spans.sort(key=lambda span: span[0])
        return cls(tuple(spans), symbols, (listed, recorded, read), repeated)

    @classmethod
    def of(cls, items: EncodedItems, repeated: int = 0) -> "IndexSums":
        """The sums of the items of a range, whose keys ascend and are there once."""
        symbols = CodedSymbols.zeros(KEPT_SYMBOLS)
        symbols.add(items.ids)
        spans = tuple(
            (items.keys.text(at).decode(), SetRoot.of(items.ids[at : at + SPAN_ITEMS]))
            for at in range(0, len(items.keys), SPAN_ITEMS)
        )
        return cls(spans, symbols, items.levels, repeated)

    @property
    def count(self) -> int:
        """How many items there are."""
        return sum(self.levels)

    def derived(self) -> tuple[DerivedState, EvidenceTally]:
        """The same as an index keeps them; before its first change."""
        spans = SpanSums.of(
            ("" if not number else start, root) for number, (start, root) in enumerate(self.spans)
        )
        return DerivedState(Position(0), self.symbols, spans), EvidenceTally(self.levels)

    def to_bytes(self) -> bytes:
        """For a file, or a column of rows."""
        out = [_COUNTS.pack(*self.levels, self.repeated), self.symbols.to_bytes()]
        for start, root in self.spans:
            key = start.encode()
            out += (_SPAN.pack(len(key), root.count, root.total.to_bytes(ID_BYTES, "big")), key)
        return seal(b"".join(out))

    @classmethod
    def from_bytes(cls, data: bytes) -> "IndexSums":
        """Read `to_bytes`.

        Raises:
            IndexDamagedError: these bytes are not what was written.
        """
        whole = unseal(data)
        at = _COUNTS.size + _SYMBOLS_BYTES
        if len(whole) < at:
            raise damaged("sums of a part are cut short")
        listed, recorded, read, repeated = _COUNTS.unpack_from(whole)
        symbols = CodedSymbols.from_bytes(whole[_COUNTS.size : at])
        spans = list[tuple[str, SetRoot]]()
        while at < len(whole):
            length, count, total = _SPAN.unpack_from(whole, at)
            at += _SPAN.size + length
            key = whole[at - length : at].decode()
            spans.append((key, SetRoot(count, int.from_bytes(total, "big"))))
        return cls(tuple(spans), symbols, (listed, recorded, read), repeated)


@dataclass(frozen=True, slots=True)
class IndexJob:
    """The work of all tasks; it can be pickled. `folder` is seen by all of them at one
    path. Its `rules` have the profile's secret.
    """

    folder: Path
    rules: ListedItemRules
    bounds: tuple[bytes, ...]

    @property
    def ranges(self) -> int:
        """How many ranges of keys there are."""
        return len(self.bounds) + 1

    @property
    def shares(self) -> int:
        """How many shares of all hashes there are."""
        return -(-self.ranges // _RANGES_PER_SHARE)

    @property
    def is_seen(self) -> bool:
        """Whether this machine sees the folder of the build."""
        return (self.folder / PLAN).is_file()

    def rows_path(self, number: int) -> Path:
        """The rows of a range; empty if it has no objects."""
        return self.folder / f"rows-{number:06}.sst"

    def hashes_path(self, number: int) -> Path:
        """The entries by hash of a share; empty if it has none."""
        return self.folder / f"hashes-{number:06}.sst"

    def sums_path(self, number: int) -> Path:
        """The sums of a range, once it is done."""
        return self.folder / f"sums-{number:06}.bin"

    def _names_path(self, number: int) -> Path:
        return self.folder / f"names-{number:06}.arrow"

    def is_done(self, number: int) -> bool:
        """Whether the files of a range are whole."""
        paths = (self.sums_path(number), self.rows_path(number), self._names_path(number))
        return all(path.is_file() for path in paths)

    def index_range(self, number: int, listed: pa.Table, disk: Disk) -> int:
        """Make the files of a range from its objects, in columns of LISTED_SCHEMA and
        in any order; how many there are. Of several with one key the one that was
        modified last counts.

        Raises:
            DatabaseError, DiskError: a file cannot be written.
        """
        objects = current_objects(listed)
        # All ranges have about as many.
        if objects.num_rows * self.ranges >= KERNEL_IDS_MIN:
            kernels_for(KERNEL_IDS_MIN)
        items = encode_listed(objects, self.rules)
        with _written(self.rows_path(number), disk) as path:
            if len(items.keys):
                write_rows_file(path, items.keys, items.rows)
        hashes = key_hashes(items.ids)
        # Shares are equal parts of all hashes.
        shares = (hashes * np.uint64(self.shares)) >> np.uint64(_HASH_BITS)
        names = pa.table([pa.array(hashes), byte_array(items.keys)], schema=_NAMES_SCHEMA)
        with _written(self._names_path(number), disk) as path:
            write_slices(path, names, shares.astype(np.int32), self.shares)
        sums = IndexSums.of(items, listed.num_rows - len(items.keys))
        disk.replace(self.sums_path(number), sums.to_bytes(), unique=True)
        return len(items.keys)

    def index_hashes(self, number: int, disk: Disk) -> None:
        """Make the entries by hash of a share, once all ranges are done, unless an
        earlier run has.

        Raises:
            DatabaseError, DiskError: a file cannot be read or written.
        """
        if self.hashes_path(number).is_file():
            return
        paths = [self._names_path(one) for one in range(self.ranges)]
        names = read_slices(paths, number, self.shares, _NAMES_SCHEMA)
        hashes, keys = names["hash"].to_numpy(), byte_column(names["key"])
        order = _by_hash(hashes, keys)
        with _written(self.hashes_path(number), disk) as path:
            if len(order):
                write_hashes_file(path, hashes[order], keys.taken(order))

    def sums(self, numbers: Sequence[int], disk: Disk) -> IndexSums:
        """The sums of some ranges together, which are done.

        Raises:
            IndexDamagedError: a file is not what was written.
            DiskError: one cannot be read.
        """
        return IndexSums.of_all(
            IndexSums.from_bytes(disk.read(self.sums_path(number))) for number in numbers
        )

    def files(self) -> list[Path]:
        """All files of rows and of entries by hash that have some, once all are made.

        Raises:
            DiskError: one is missing.
        """
        paths = [
            *map(self.rows_path, range(self.ranges)),
            *map(self.hashes_path, range(self.shares)),
        ]
        try:
            return [path for path in paths if path.stat().st_size]
        except OSError as error:
            raise disk_error("look at", self.folder, error) from error


def ranged_rows(
    part: ListingPart, bounds: Sequence[bytes], wanted: frozenset[int]
) -> Iterator[tuple[pa.Table, "NDArray[np.int32]"]]:
    """The objects of a part in the wanted ranges, many at a time, and the number of the
    range of each.

    Raises:
        ListingInvalidError: the part cannot be read.
    """
    is_wanted = np.zeros(len(bounds) + 1, np.bool_)
    is_wanted[list(wanted)] = True
    held, held_numbers, count = list[pa.Table](), list["NDArray[np.int32]"](), 0
    for batch in part.rows():
        numbers = range_numbers(batch.column(0), bounds)
        keep = is_wanted[numbers]
        rows = pa.Table.from_batches([batch])
        held.append(rows if keep.all() else rows.filter(pa.array(keep)))
        held_numbers.append(numbers[keep])
        count += len(held_numbers[-1])
        if count >= _SLICED_ROWS:
            yield pa.concat_tables(held), np.concatenate(held_numbers)
            held, held_numbers, count = [], [], 0
    if count:
        yield pa.concat_tables(held), np.concatenate(held_numbers)


def current_objects(listed: pa.Table) -> pa.Table:
    """The objects in the order of their keys, each once: what was modified last."""
    if not listed.num_rows:
        return LISTED_SCHEMA.empty_table()
    listed = listed.combine_chunks()
    listed = listed.take(pa.array(byte_column(listed["key"]).order())).combine_chunks()
    keys = listed["key"].combine_chunks()
    is_last = np.ones(len(keys), np.bool_)
    is_last[:-1] = pc.not_equal(keys[1:], keys[:-1]).to_numpy(zero_copy_only=False)
    if is_last.all():
        return listed
    # Any rule would do that does not depend on the order in which rows came.
    listed = listed.sort_by([(name, "ascending") for name in _ORDER])
    return listed.filter(pa.array(is_last)).combine_chunks()


def slices(rows: pa.Table, numbers: "NDArray[np.int32]", count: int) -> Iterator[pa.RecordBatch]:
    """The rows with each number below `count`, ascending; some have none."""
    # Numbers of 16 bits are sorted by their digits, which needs no comparing.
    assert count <= 1 << 16
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=count)).tolist()
    batches = rows.take(pa.array(order)).combine_chunks().to_batches()
    assert len(batches) <= 1
    whole = batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)
    for start, end in zip([0, *ends], ends, strict=False):
        yield whole.slice(start, end - start)


def write_slices(path: Path, rows: pa.Table, numbers: "NDArray[np.int32]", count: int) -> None:
    """Write rows to a file as `count` slices: each row goes to the one with its number.
    Where each slice begins and ends stands behind them, so that a reader of one need
    not read of the others.

    Raises:
        DiskError: it cannot be written.
    """
    places = [0]
    try:
        with path.open("wb") as file:
            for one in slices(rows, numbers, count):
                if one.num_rows:
                    file.write(one.serialize())
                places.append(file.tell())
            file.write(np.array(places, "<i8").tobytes())
    except OSError as error:
        raise disk_error("write", path, error) from error


def read_slices(paths: Iterable[Path], number: int, count: int, schema: pa.Schema) -> pa.Table:
    """The slice with this number of each of some files of `count` slices, as one table.

    Raises:
        DiskError: one cannot be read, or is not whole.
    """
    found = list[pa.RecordBatch]()
    for path in paths:
        try:
            with path.open("rb") as file:
                file.seek((number - count - 1) * _PLACE_BYTES, os.SEEK_END)
                start, end = np.frombuffer(file.read(2 * _PLACE_BYTES), "<i8").tolist()
                if end > start:
                    file.seek(start)
                    data = pa.py_buffer(file.read(end - start))
                    found.append(pa.ipc.read_record_batch(data, schema))
        except (OSError, ValueError, pa.ArrowException) as error:
            raise disk_error("read", path, OSError(str(error))) from error
    return pa.Table.from_batches(found, schema)


@contextmanager
def _written(path: Path, disk: Disk) -> Iterator[Path]:
    """A new file that gets its name once it is whole and durable. Another task may do
    the same at the same time.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")
    try:
        temporary.touch()
        yield temporary
        disk.sync(temporary)
        disk.rename(temporary, path)
    except BaseException:
        disk.remove(temporary)
        raise
    disk.sync_folder(path.parent)


def _by_hash(hashes: "NDArray[np.uint64]", keys: ByteColumn) -> "NDArray[np.intp]":
    """The places of entries by hash, and of twins of one hash by key."""
    order = np.argsort(hashes)
    ordered = hashes[order]
    is_twin = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(is_twin):
        twins = np.unique(ordered[is_twin])
        for first, last in zip(
            np.searchsorted(ordered, twins), np.searchsorted(ordered, twins, "right"), strict=True
        ):
            order[first:last] = sorted(order[first:last].tolist(), key=keys.text)
    return order
