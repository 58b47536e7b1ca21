"""Read the columns of a row group from the bytes of a Parquet file, without expanding
them.

Most columns of a chunk table have the same value in many consecutive rows. A Parquet
file stores them as runs of indexes into a dictionary, and here they stay runs: an
EncodedColumn is a list of segments, each some rows whose values can be computed one by
one. Checksums are stored as they are, and are read where they lie.

Only what our writer produces is known here. Anything else, also a malformed page, is
None, and pyarrow reads it or says what is wrong.
"""

import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Raw: TypeAlias = NDArray[np.uint8]
    Int64s: TypeAlias = NDArray[np.int64]

# Stands for null.
NULL = int(np.iinfo(np.int64).min)
# Values of text in one dictionary: names of datanodes, volumes and states are few.
_TEXTS_MAX = 1 << 12
# Bytes of a column for each row of a group, and of its dictionary; pages that claim
# more are malformed.
_ROW_BYTES_MAX = 64
_DICTIONARY_BYTES_MAX = 16 << 20
# Pages of a column chunk. Ours have ten at most, those of version 1 some fifty.
_PAGES_MAX = 1 << 9
# Types of pages, and encodings of their values.
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_PLAIN, _DELTA = 0, 5
_INDEXES = (2, 8)
_ZSTD = pa.Codec("zstd")
# How a column's values are stored: as a type of numpy, as bits, or as text.
_BOOLEAN, _TEXT = "?", "text"
_KINDS = {
    ("INT64", "NONE"): "<i8",
    ("INT64", "INT_64"): "<i8",
    ("INT64", "TIMESTAMP_MILLIS"): "<i8",
    ("INT32", "NONE"): "<i4",
    ("INT32", "INT_32"): "<i4",
    ("INT32", "UINT_32"): "<u4",
    ("BOOLEAN", "NONE"): _BOOLEAN,
    ("BYTE_ARRAY", "UTF8"): _TEXT,
}


class PageError(ValueError):
    """A page has an index that its dictionary has not."""

    def __init__(self) -> None:
        super().__init__("a page has an index that its dictionary has not")


@dataclass(frozen=True, slots=True)
class Runs:
    """The values of a column as runs of equal ones: the first row of each, and its
    value. Null is NULL; text is the number of a value in EncodedColumn.texts.
    """

    starts: "Int64s"
    values: "Int64s"

    def at(self, rows: "Int64s") -> "Int64s":
        """The values of some rows, which ascend."""
        from chunktable import page_kernels

        out = np.empty(len(rows), np.int64)
        page_kernels.values_at(rows, self.starts, self.values, out)
        return out


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """A column of a row group as segments of rows (chunktable.page_kernels)."""

    raw: "Raw"
    segments: "Int64s"
    # The dictionary, with as many entries as an index can have, of which `size` count.
    values: "Int64s"
    size: int
    # The values if they are text; `values` are their numbers.
    texts: pa.Array | None = None
    # Whether each row has a value, if some may not. The segments are then of the rows
    # that have one.
    levels: "EncodedColumn | None" = None

    @property
    def count(self) -> int:
        """The number of rows, or of those that have a value."""
        return int(self.segments[-1, 0])

    def runs(self) -> Runs:
        """The column as runs.

        Raises:
            PageError: an index is not in the dictionary.
        """
        from chunktable import page_kernels

        if len(self.segments) == 2 and self.segments[0, 1] == 0 and self.levels is None:
            # The same value in all rows.
            return Runs(np.zeros(1, np.int64), self.values[self.segments[:1, 2]])
        count = self.count
        starts, values = np.empty((2, count), np.int64)
        used = page_kernels.runs(
            self.raw, self.segments, self.values, self.size, count, starts, values
        )
        if used == page_kernels.BAD:
            raise PageError
        found = Runs(starts[:used].copy(), values[:used].copy())
        return found if self.levels is None else _with_nulls(found, self.levels.runs())

    def without_levels(self) -> Self:
        """The column with null as a value.

        Raises:
            PageError: an index is not in the dictionary.
        """
        if self.levels is None:
            return self
        runs = self.runs()
        segments = np.zeros((len(runs.starts) + 1, 3), np.int64)
        segments[:-1, 0], segments[:-1, 2] = runs.starts, np.arange(len(runs.starts))
        segments[-1, 0] = self.levels.count
        return replace(
            self, segments=segments, values=runs.values, size=len(runs.values), levels=None
        )

    def fill(self, begin: int, out: "Int64s") -> None:
        """Fill `out` with the values of the rows from `begin` on.

        Raises:
            PageError: an index is not in the dictionary.
        """
        from chunktable import page_kernels

        at = int(np.searchsorted(self.segments[:-1, 0], begin, "right")) - 1
        columns = self.raw, self.segments, self.values, self.size
        if page_kernels.fill(*columns, at, begin, begin + len(out), out) == page_kernels.BAD:
            raise PageError


def constant_column(value: int, rows: int) -> EncodedColumn:
    """A column with the same value in all rows."""
    segments = np.array([[0, 0, 0], [rows, 0, 0]], np.int64)
    return EncodedColumn(np.zeros(8, np.uint8), segments, np.array([value], np.int64), 1)


def group_range(metadata: pq.FileMetaData, group: int) -> tuple[int, int]:
    """Where the column chunks of a row group begin in a file, and where they end."""
    found = metadata.row_group(group)
    ranges = [_chunk_range(found.column(i)) for i in range(found.num_columns)]
    return min(first for first, _ in ranges), max(end for _, end in ranges)


def _chunk_range(chunk: pq.ColumnChunkMetaData) -> tuple[int, int]:
    first = chunk.data_page_offset
    if chunk.dictionary_page_offset is not None:
        first = min(first, chunk.dictionary_page_offset)
    return first, first + chunk.total_compressed_size


@dataclass(frozen=True, slots=True)
class RowRanges:
    """Some rows: ascending, disjoint ranges `starts[i]:ends[i]`."""

    starts: "Int64s"
    ends: "Int64s"

    def overlaps(self, first: int, last: int) -> bool:
        """Whether some of them are among the rows `first:last`."""
        place = int(np.searchsorted(self.ends, first, "right"))
        return place < len(self.starts) and int(self.starts[place]) < last


def encoded_columns(
    raw: "Raw",
    base: int,
    metadata: pq.FileMetaData,
    group: int,
    columns: Mapping[str, int],
    wanted: RowRanges | None = None,
) -> dict[str, EncodedColumn] | None:
    """Columns of a row group, given by their indexes; None if one has a form that is
    not known here. `raw` is the file from the byte `base` on, with the column chunks.

    With `wanted`, pages that have none of these rows are not read, and the values of
    all other rows are meaningless.
    """
    found, read = metadata.row_group(group), dict[str, EncodedColumn]()
    for name, place in columns.items():
        pages = _pages(raw, base, found.column(place), found.num_rows, wanted)
        column = pages and _column(pages, metadata.schema.column(place), found.num_rows)
        if not column:
            return None
        read[name] = column
    return read


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of a column chunk, each from `starts[i]` to `ends[i]` in `raw`."""

    raw: "Raw"
    starts: Sequence[int]
    ends: Sequence[int]
    is_dictionary: Sequence[bool]
    encodings: Sequence[int]
    counts: Sequence[int]
    is_read: Sequence[bool]

    @property
    def of_data(self) -> Sequence[int]:
        """The numbers of the pages that hold rows."""
        return [i for i, other in enumerate(self.is_dictionary) if not other]


def _pages(
    raw: "Raw", base: int, chunk: pq.ColumnChunkMetaData, rows: int, wanted: RowRanges | None
) -> _Pages | None:
    """The pages of a column chunk without compression; None if they are malformed."""
    from chunktable import page_kernels as kernels

    first, end = (place - base for place in _chunk_range(chunk))
    if not 0 <= first < end <= len(raw):
        return None
    headers = np.empty((_PAGES_MAX, kernels.PAGE_FIELDS), np.int64)
    count = kernels.page_headers(raw, first, end, headers)
    if count < 1:
        return None
    types, encodings, counts, starts, stored, plain = headers[:count].T.tolist()
    of_data = [kind == _DATA_PAGE for kind in types]
    is_dictionary = [kind == _DICTIONARY_PAGE for kind in types]
    is_known = all(map(operator.or_, of_data, is_dictionary)) and not any(is_dictionary[1:])
    if not is_known or min(counts) < 0 or sum(compress(counts, of_data)) != rows:
        return None
    if sum(plain) > _ROW_BYTES_MAX * rows + _DICTIONARY_BYTES_MAX:
        return None
    lasts = list(accumulate(n * is_data for n, is_data in zip(counts, of_data, strict=True)))
    is_read = [
        wanted is None or not is_data or wanted.overlaps(last - n, last)
        for n, last, is_data in zip(counts, lasts, of_data, strict=True)
    ]
    if chunk.compression == "UNCOMPRESSED":
        ends = list(map(operator.add, starts, stored))
        if chunk.physical_type == "BOOLEAN" or set(encodings) != {_PLAIN}:
            raw = np.concatenate([raw[:end], np.zeros(kernels.PADDING_BYTES, np.uint8)])
        return _Pages(raw, starts, ends, is_dictionary, encodings, counts, is_read)
    if chunk.compression != "ZSTD":
        return None
    ends = list(accumulate(map(operator.mul, plain, is_read)))
    out = np.empty(ends[-1] + kernels.PADDING_BYTES, np.uint8)
    for at, length, begin, stop in zip(starts, stored, [0, *ends], ends, strict=False):
        if stop > begin:
            held = _ZSTD.decompress(pa.py_buffer(raw[at : at + length]), stop - begin)
            out[begin:stop] = np.frombuffer(held, np.uint8)
    return _Pages(out, [0, *ends[:-1]], ends, is_dictionary, encodings, counts, is_read)


def _column(pages: _Pages, described: pq.ColumnSchema, rows: int) -> EncodedColumn | None:
    """The column of these pages; None if its type or an encoding is not known."""
    kind = _KINDS.get((described.physical_type, described.converted_type))
    if kind is None or described.max_repetition_level or described.max_definition_level > 1:
        return None
    if described.max_definition_level and not all(pages.is_read):
        return None
    starts, levels = list(pages.starts), None
    counts = np.where(pages.is_dictionary, 0, pages.counts)
    firsts = [0, *np.cumsum(counts).tolist()]
    if described.max_definition_level:
        found = _Segments(pages.raw, 2)
        for i in pages.of_data:
            length = int.from_bytes(pages.raw[starts[i] : starts[i] + 4].tobytes(), "little")
            end = starts[i] + 4 + length
            if end > pages.ends[i] or not found.add_indexes(
                starts[i] + 4, end, 1, firsts[i], firsts[i + 1]
            ):
                return None
            starts[i] = end
        levels = found.column(rows, np.arange(2), None)
        firsts = _ranks(levels.runs(), np.array(firsts)).tolist()
    values, texts = np.arange(2), None
    if pages.is_dictionary[0]:
        plain = pages.raw[starts[0] : pages.ends[0]].tobytes()
        dictionary = _dictionary(plain, pages.counts[0], kind)
        if pages.encodings[0] not in (_PLAIN, *_INDEXES) or dictionary is None:
            return None
        values, texts = dictionary
    found = _Segments(pages.raw, len(values))
    for i in pages.of_data:
        begin, end, first, last = starts[i], pages.ends[i], firsts[i], firsts[i + 1]
        if not pages.is_read[i]:
            found.skip(first)
        elif first < last and not found.add_page(pages.encodings[i], kind, begin, end, first, last):
            return None
    return found.column(firsts[-1], values, texts, None if firsts[-1] == rows else levels)


class _Segments:
    """Collects the segments of a column, page by page."""

    def __init__(self, raw: "Raw", size: int) -> None:
        self._raw = raw
        # The number of values in the dictionary.
        self._size = size
        self._found: list[Int64s] = []
        # The number of values that an index can have.
        self._values = 1
        # Values that were packed as differences.
        self._unpacked: list[Int64s] = []
        self._unpacked_bytes = 0
        self._skipped = 0

    def skip(self, first: int) -> None:
        """Add a page that is not read, from the row `first` on."""
        self._found.append(np.array([[first, 0, 0]]))
        self._skipped += 1

    def add_page(
        self, encoding: int, kind: str, begin: int, end: int, first: int, last: int
    ) -> bool:
        """Add a page's rows `first:last`, whose values are in the bytes `begin:end`.
        Returns False if they are malformed, or in a form that is not known.
        """
        from chunktable import page_kernels as kernels

        count = last - first
        if encoding in _INDEXES:
            width = int(self._raw[begin]) if begin < end else -1
            return self.add_indexes(begin + 1, end, width, first, last)
        if encoding == _PLAIN and kind in ("<i8", "<u4"):
            width = kernels.PLAIN_64 if kind == "<i8" else kernels.PLAIN_32
            self._found.append(np.array([[first, width, begin]]))
            return width // 8 * count <= end - begin and not self._unpacked
        if encoding == _PLAIN and kind == _BOOLEAN:
            self._found.append(np.array([[first, 1, begin]]))
            self._values = 2
            return count <= 8 * (end - begin)
        if encoding == _DELTA and kind == "<i8":
            out = np.empty(count, np.int64)
            # All pages lie in one array, of the values as they are unpacked.
            is_first = len(self._found) - self._skipped == len(self._unpacked)
            self._found.append(np.array([[first, kernels.PLAIN_64, self._unpacked_bytes]]))
            self._unpacked.append(out)
            self._unpacked_bytes += out.nbytes
            return is_first and kernels.unpack_deltas(self._raw, begin, end, out) == count
        return False

    def add_indexes(self, begin: int, end: int, width: int, first: int, last: int) -> bool:
        """Add the rows `first:last`, whose indexes have `width` bits; returns as
        `add_page` does.
        """
        from chunktable import page_kernels as kernels

        # Indexes have no more bits than the dictionary needs.
        if not 0 <= width <= kernels.WIDTH_MAX or 1 << width > 2 * self._size or self._unpacked:
            return False
        self._values = max(self._values, 1 << width)
        # A run takes a byte or more.
        found = np.empty((max(end - begin, 0), 3), np.int64)
        used = kernels.add_segments(
            self._raw, begin, end, width, first, last - first, self._size, found
        )
        if used != kernels.BAD:
            self._found.append(found[:used].copy())
        return bool(used != kernels.BAD)

    def column(
        self,
        rows: int,
        values: "Int64s",
        texts: pa.Array | None,
        levels: EncodedColumn | None = None,
    ) -> EncodedColumn:
        """The column of `rows` rows, with this dictionary."""
        padded = np.zeros(max(self._values, len(values), 1), np.int64)
        padded[: len(values)] = values
        segments = np.concatenate([*self._found, [[rows, 0, 0]]])
        raw = self._raw
        if self._unpacked:
            raw = np.concatenate(self._unpacked).view(np.uint8)
        return EncodedColumn(raw, segments, padded, len(values), texts, levels)


def _dictionary(plain: bytes, count: int, kind: str) -> "tuple[Int64s, pa.Array | None] | None":
    """The values of a dictionary page, and the texts if they are their numbers; None if
    it is malformed.
    """
    if kind != _TEXT:
        dtype = np.dtype(kind)
        if kind == _BOOLEAN or count * dtype.itemsize > len(plain):
            return None
        return np.frombuffer(plain, dtype, count).astype(np.int64), None
    texts, at = list[bytes](), 0
    while len(texts) < min(count, _TEXTS_MAX) and at + 4 <= len(plain):
        (length,) = struct.unpack_from("<I", plain, at)
        texts.append(plain[at + 4 : at + 4 + length])
        at += 4 + length
    if len(texts) != count or at > len(plain):
        return None
    # Bytes that are not UTF-8 raise an error here.
    return np.arange(count), pa.array(texts, pa.binary()).cast(pa.string())


def _ranks(present: Runs, rows: "Int64s") -> "Int64s":
    """How many of the rows before each of `rows` have a value. The runs of `present`
    are 1 where they have one.
    """
    before = np.cumsum(np.diff(present.starts) * present.values[:-1])
    before = np.concatenate([[0], before])
    run = np.searchsorted(present.starts, rows, "right") - 1
    ranks: Int64s = before[run] + (rows - present.starts[run]) * present.values[run]
    return ranks


def _with_nulls(found: Runs, present: Runs) -> Runs:
    """The runs of all rows, of those of the rows that have a value."""
    has_value = present.values == 1
    firsts = present.starts[has_value]
    ranks = _ranks(present, firsts)
    # Where each run of values begins; others begin after nulls.
    stretch = np.searchsorted(ranks, found.starts, "right") - 1
    rows = firsts[stretch] + found.starts - ranks[stretch]
    starts = np.union1d(rows, present.starts)
    values = np.full(len(starts), NULL, np.int64)
    is_value = present.at(starts) == 1
    values[is_value] = found.at(_ranks(present, starts[is_value]))
    return Runs(starts, values)
