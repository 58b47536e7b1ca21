"""Open all columns of a Parquet file that is in memory.

pyarrow takes a millisecond to open a file, its footer and its columns, in which 50,000
rows are folded. A table has thousands of small files. So kernels do it at once for a
file as our writers write it, with the columns in their order. Any other file, also a
damaged one, is None here, and is left to pyarrow.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.pages import NULL, EncodedColumn, PageError, encoded_columns
from chunktable.schema import CHUNK_SCHEMA, CONTAINER_SCHEMA
from merkle.checksum import kernels_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"PAR1"
_GROUPS_MAX, _PAGES_MAX = 40, 4096
# Bytes of a file without compression for each row, and beside rows; a file that claims
# more is malformed.
_ROW_BYTES_MAX, _OTHER_BYTES_MAX = 256, 4 << 20
# Schemas that a process remembers: they differ by release alone.
_LAYOUTS_MAX = 64
_UNCOMPRESSED = 0
_CODECS = {1: pa.Codec("snappy"), 6: pa.Codec("zstd")}
_INDEXED = (2, 8)
_DELTA = 5

# What pyarrow raises for a damaged footer; ArrowInvalid is a ValueError.
_DAMAGED = (OSError, ValueError, pa.ArrowException)

# Checksums have 32 bits unless one needs more.
_SCHEMAS = (
    CHUNK_SCHEMA,
    pa.schema([f.with_type(pa.uint32()) if f.name == "checksum" else f for f in CHUNK_SCHEMA]),
    CONTAINER_SCHEMA,
)


class _Layout:
    """The columns of a schema of ours: name, kind of value, and whether a value may be
    null.
    """

    def __init__(self, schema: pa.Schema) -> None:
        from chunktable import file_kernels as kernels

        kinds = {
            pa.string(): kernels.TEXT,
            pa.bool_(): kernels.BOOLEAN,
            pa.int32(): kernels.INT32,
            pa.uint32(): kernels.UINT32,
        }
        self.names: Sequence[str] = schema.names
        self.kinds = [kinds.get(field.type, kernels.INT64) for field in schema]
        self.has_levels = [field.nullable for field in schema]


_layouts = dict[bytes, _Layout | None]()


class WholeFile:
    """A file of chunks or an inventory as our writers write it, in memory."""

    def __init__(
        self,
        raw: bytes,
        layout: _Layout,
        groups: Sequence[int],
        chunks: "NDArray[np.int64]",
        pages: "NDArray[np.int64]",
    ) -> None:
        """Internal: use `of`."""
        # The number of rows of each row group.
        self.groups = groups
        self._raw = raw
        self._data = np.frombuffer(raw, np.uint8)
        self._layout = layout
        self._chunks = chunks
        self._pages = pages

    @classmethod
    def of(cls, raw: bytes, rows: int) -> Self | None:
        """The file in these bytes, with so many rows; None if its form is not known."""
        from chunktable import file_kernels as kernels

        end = len(raw) - 8
        at = end - int.from_bytes(raw[end : end + 4], "little")
        if raw[-4:] != _MAGIC or at < len(_MAGIC):
            return None
        groups = np.empty(_GROUPS_MAX, np.int64)
        chunks = np.empty((_GROUPS_MAX * len(CHUNK_SCHEMA), kernels.CHUNK_FIELDS), np.int64)
        pages = np.empty((_PAGES_MAX, kernels.PAGE_PLAIN_BYTES + 1), np.int64)
        count, columns, used, first, last = kernels.survey(
            np.frombuffer(raw, np.uint8), at, end, groups, chunks, pages
        )
        counts = groups[: max(count, 0)].tolist()
        layout = _layout(raw, raw[first:last]) if count > 0 and min(counts) > 0 else None
        if layout is None or columns != len(layout.names) or sum(counts) != rows:
            return None
        return cls(raw, layout, counts, chunks[: count * columns], pages[:used])

    def columns(self, group: int) -> Mapping[str, EncodedColumn] | None:
        """The columns of a row group, by name; None if a page is malformed or of a form
        that is not known.
        """
        from chunktable import file_kernels as kernels

        layout, rows, width = self._layout, self.groups[group], len(self._layout.names)
        described = self._chunks[group * width :][:width].tolist()
        first = group * width
        bounds = np.searchsorted(self._pages[:, kernels.PAGE_OF], (first, first + width))
        pages = self._pages[slice(*bounds)].tolist()
        # One segment for all columns that are constant.
        segments = np.array([[0, 0, 0], [rows, 0, 0]], np.int64)
        found, others = dict[str, EncodedColumn](), list[int]()
        for number, (name, kind) in enumerate(zip(layout.names, layout.kinds, strict=True)):
            column = described[number]
            if layout.has_levels[number] and column[kernels.NULLS]:
                if column[kernels.NULLS] == rows:
                    found[name] = EncodedColumn(_NOTHING, segments, np.array([NULL]), 1)
                    continue
                some = self._with_nulls(group, name, number)
                if some is None:
                    return None
                found |= some
                continue
            if kind == kernels.UINT32:
                plain = self._stored_as_is(first + number, column, pages, rows)
                if plain is not None:
                    found[name] = plain
                    continue
            value = None
            if kind != kernels.UINT32:
                value = _constant(self._raw, *column[kernels.NULLS :])
            if value is None:
                others.append(number)
            elif kind == kernels.TEXT:
                texts = _text_array([value])
                if texts is None:
                    return None
                found[name] = EncodedColumn(_NOTHING, segments, _ZERO, 1, texts)
            elif len(value) == kernels.KIND_BYTES[kind]:
                held = np.array([int.from_bytes(value, "little", signed=True)], np.int64)
                found[name] = EncodedColumn(_NOTHING, segments, held, 1)
            else:
                return None
        opened = _open(self._raw, rows, others, layout, described, pages, first)
        return None if opened is None else found | opened

    def _with_nulls(self, group: int, name: str, number: int) -> dict[str, EncodedColumn] | None:
        """A column of which some rows have no value: finding them takes longer."""
        try:
            metadata = pq.read_metadata(pa.BufferReader(self._raw))
            return encoded_columns(self._data, 0, metadata, group, {name: number})
        except _DAMAGED:
            return None

    def _stored_as_is(
        self, chunk: int, column: Sequence[int], pages: Sequence[Sequence[int]], rows: int
    ) -> EncodedColumn | None:
        """A column of 4 bytes without compression, read where it lies in the file."""
        from chunktable import file_kernels as kernels
        from chunktable.page_kernels import PLAIN_32

        segments, row = list[tuple[int, int, int]](), 0
        for number, kind, encoding, count, at, stored, _ in pages:
            if number == chunk:
                if kind or encoding or not 0 <= 4 * count <= stored:
                    return None
                segments.append((row, PLAIN_32, at))
                row += count
        if column[kernels.CODEC] != _UNCOMPRESSED or row != rows:
            return None
        table = np.array([*segments, (rows, 0, 0)], np.int64)
        return EncodedColumn(self._data, table, _ZERO, 1)


# An inventory whose text is dictionaries.
ENCODED_INVENTORY = pa.schema(
    [
        field.with_type(pa.dictionary(pa.int32(), field.type))
        if pa.types.is_string(field.type)
        else field
        for field in CONTAINER_SCHEMA
    ]
)


def whole_inventory(raw: bytes, rows: int) -> pa.Table | None:
    """An inventory of so many replicas (ENCODED_INVENTORY); None if its form is not
    known here, or kernels are not used.
    """
    file = WholeFile.of(raw, rows) if kernels_for(0) is not None else None
    columns = file.columns(0) if file is not None and len(file.groups) == 1 else None
    if columns is None or "file" not in columns:
        return None
    found = list[pa.Array]()
    for field in ENCODED_INVENTORY:
        column, values = columns[field.name], np.empty(rows, np.int64)
        try:
            column.fill(0, values)
        except PageError:
            return None
        if column.texts is None:
            found.append(pa.array(values))
        else:
            codes = pa.array(values.astype(np.int32))
            found.append(pa.DictionaryArray.from_arrays(codes, column.texts))
    return pa.table(found, ENCODED_INVENTORY)


_NOTHING = np.zeros(8, np.uint8)
_ZERO = np.zeros(1, np.int64)


def _layout(raw: bytes, schema: bytes) -> _Layout | None:
    """The layout of a file with this part of its footer."""
    if schema not in _layouts:
        while len(_layouts) >= _LAYOUTS_MAX:
            del _layouts[next(iter(_layouts))]
        try:
            found = pq.read_schema(pa.BufferReader(raw)).remove_metadata()
        except _DAMAGED:
            return None
        _layouts[schema] = _Layout(found) if any(map(found.equals, _SCHEMAS)) else None
    return _layouts[schema]


def _constant(
    raw: bytes, nulls: int, at: int, length: int, greatest_at: int, greatest_length: int
) -> bytes | None:
    """The value of a column that has one, by its statistics."""
    if at < 0 or nulls or greatest_length != length:
        return None
    value = raw[at : at + length]
    return value if value == raw[greatest_at : greatest_at + length] else None


def _open(
    raw: bytes,
    rows: int,
    wanted: Sequence[int],
    layout: _Layout,
    described: Sequence[Sequence[int]],
    pages: Sequence[Sequence[int]],
    first: int,
) -> dict[str, EncodedColumn] | None:
    """The columns with these numbers, from their pages, whose columns are counted from
    `first`; None if one is malformed.
    """
    from chunktable import file_kernels as kernels

    place_of = {number: place for place, number in enumerate(wanted)}
    held, table, texts_at, length = list[bytes](), list[list[int]](), dict[int, int](), 0
    room, deltas, values = 2 * len(pages) + 2, 0, 2 * len(wanted)
    for number, kind, encoding, count, at, stored, plain in pages:
        number -= first
        if number not in place_of:
            continue
        data, codec = raw[at : at + stored], described[number][kernels.CODEC]
        if length + plain > _ROW_BYTES_MAX * rows + _OTHER_BYTES_MAX or count < 0:
            return None
        if codec != _UNCOMPRESSED:
            if codec not in _CODECS:
                return None
            try:
                data = _CODECS[codec].decompress(data, plain, asbytes=True)
            except (OSError, ValueError):
                return None
        if kind == _DICTIONARY_PAGE:
            texts_at.setdefault(number, len(table))
            values += 2 * min(count, len(data)) + 2
        elif encoding in _INDEXED:
            # A run takes a byte or more.
            room += len(data)
        elif encoding == _DELTA:
            deltas += min(count, rows)
        table.append([place_of[number], kind, encoding, count, length, length + len(data), 0])
        held.append(data)
        length += len(data)
    held.append(bytes(8))
    whole = np.frombuffer(b"".join(held), np.uint8)
    segments, dictionary = np.empty((room, 3), np.int64), np.empty(values, np.int64)
    unpacked, columns = np.empty(deltas, np.int64), np.empty((len(wanted), 6), np.int64)
    kinds = np.array([layout.kinds[number] for number in wanted], np.int64)
    levels = np.array([layout.has_levels[number] for number in wanted], np.int64)
    listed = np.array(table, np.int64).reshape(-1, 7)
    if not kernels.open_columns(
        whole, listed, kinds, levels, rows, segments, dictionary, unpacked, columns
    ):
        return None
    as_bytes, found = unpacked.view(np.uint8), dict[str, EncodedColumn]()
    for number, (begin, end, low, high, size, is_delta) in zip(
        wanted, columns.tolist(), strict=True
    ):
        texts = None
        if layout.kinds[number] == kernels.TEXT:
            texts = _texts(held[texts_at[number]], size) if number in texts_at else None
            if texts is None:
                return None
        found[layout.names[number]] = EncodedColumn(
            as_bytes if is_delta else whole, segments[begin:end], dictionary[low:high], size, texts
        )
    return found


_DICTIONARY_PAGE = 2


def _texts(plain: bytes, count: int) -> pa.Array | None:
    """The texts of a dictionary page; None if it is malformed."""
    found, at = list[bytes](), 0
    while len(found) < count and at + 4 <= len(plain):
        length = int.from_bytes(plain[at : at + 4], "little")
        found.append(plain[at + 4 : at + 4 + length])
        at += 4 + length
    return _text_array(found) if len(found) == count and at <= len(plain) else None


def _text_array(values: Sequence[bytes]) -> pa.Array | None:
    """The texts; None if one is not UTF-8."""
    try:
        return pa.array([value.decode() for value in values], pa.string())
    except UnicodeDecodeError:
        return None
