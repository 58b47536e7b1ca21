"""Compiled kernels that decode the pages of a Parquet file, without holding the GIL.

Importing this module compiles it or loads it from numba's cache. So it is imported only
on first use. Nothing here trusts a length or an index that a file holds: a kernel that
finds one out of bounds returns BAD.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numba.core import types

from chunktable.schema import REPLICA_COLUMNS
from merkle.intrinsics import jit, load8, load32, load64

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Raw: TypeAlias = NDArray[np.uint8]
    Int64s: TypeAlias = NDArray[np.int64]

# numba knows one kind of integer.
Int: TypeAlias = int | np.int64

BAD = -1

# Bytes that kernels may read behind the end of packed indexes or differences.
PADDING_BYTES = 8

# The columns of `page_headers`.
_PAGE_TYPE, _PAGE_ENCODING, _PAGE_VALUES, _PAGE_AT, _PAGE_BYTES, _PAGE_PLAIN_BYTES = range(6)
PAGE_FIELDS = 6

# The columns of a table of segments. _SEGMENT_WIDTH is the number of bits of a packed
# index into the dictionary, or one of these.
_SEGMENT_ROW, _SEGMENT_WIDTH, _SEGMENT_AT = range(3)
# All rows have the dictionary's value number _SEGMENT_AT.
_CONSTANT = 0
WIDTH_MAX = 24
# Values of 4 bytes without sign, and values of 8 bytes.
PLAIN_32, PLAIN_64 = 32, 64

# Wider differences may lie in nine bytes.
_ONE_LOAD_WIDTH_MAX = 56
# With up to 7 bits before them they fit into a word.
_FLAGS_AT_ONCE = 57
# Structures within a page header.
_DEPTH_MAX = 8
_ONE, _THREE, _SEVEN, _EIGHT, _SIXTY_FOUR = map(np.uint64, (1, 3, 7, 8, 64))

_I64 = types.int64
RAW = types.Array(types.uint8, 1, "C", readonly=True)
_IN_WORDS = types.Array(types.int64, 1, "C", readonly=True)
SEGMENTS = types.Array(types.int64, 2, "C", readonly=True)
_WORDS = types.Array(types.int64, 1, "C")
_FLAGS = types.Array(types.boolean, 1, "C")
_MATRIX = types.Array(types.int64, 2, "C")
_PAIR = types.UniTuple(_I64, 2)
# The columns of one of `stretches`.
_RAWS, _TABLES, _DICTIONARIES, _SIZES = (
    types.UniTuple(kind, len(REPLICA_COLUMNS)) for kind in (RAW, SEGMENTS, _IN_WORDS, _I64)
)


@jit(_PAIR(RAW, _I64, _I64))
def varint(raw: "Raw", at: Int, end: Int) -> tuple[Int, Int]:
    """The number of variable length at `at`, and its end: BAD if `end` comes first."""
    value, shift = np.uint64(0), np.uint64(0)
    while at < end and shift < 64:
        byte = np.uint64(raw[at])
        at += 1
        value |= (byte & np.uint64(127)) << shift
        if byte < 128:
            return np.int64(value), at
        shift += _SEVEN
    return np.int64(0), BAD


@jit(_I64(_I64))
def unzigzag(value: Int) -> Int:
    word = np.uint64(value)
    return np.int64((word >> _ONE) ^ (~(word & _ONE) + _ONE))


@jit(types.void(_WORDS, _I64, _WORDS, _I64))
def _keep(page: "Int64s", depth: Int, fields: "Int64s", value: Int) -> None:
    """Keep a number of a page header, if it is one of those of `page_headers`."""
    if depth == 0:
        if fields[0] == 1:
            page[_PAGE_TYPE] = value
        elif fields[0] == 2:
            page[_PAGE_PLAIN_BYTES] = value
        elif fields[0] == 3:
            page[_PAGE_BYTES] = value
    # The headers of a data page and of a dictionary begin alike.
    elif depth == 1 and (fields[0] == 5 or fields[0] == 7):
        if fields[1] == 1:
            page[_PAGE_VALUES] = value
        elif fields[1] == 2:
            page[_PAGE_ENCODING] = value


@jit(_I64(RAW, _I64, _I64, _MATRIX))
def page_headers(raw: "Raw", at: Int, end: Int, out: "NDArray[np.int64]") -> Int:
    """Fill `out` with a row for each page of a column chunk, which lies in
    `raw[at:end]`: its type, encoding and number of values, where its bytes begin, and
    their number as stored and without compression. Returns the number of pages.
    """
    pages = 0
    fields = np.zeros(_DEPTH_MAX, np.int64)
    while at < end:
        if pages == out.shape[0]:
            return BAD
        out[pages, :] = BAD
        depth = 0
        fields[0] = 0
        while True:
            if at >= end:
                return BAD
            byte = np.int64(raw[at])
            at += 1
            kind = byte & 15
            if kind == 0:
                if depth == 0:
                    break
                depth -= 1
                continue
            if byte >> 4:
                fields[depth] += byte >> 4
            else:
                value, at = varint(raw, at, end)
                if at == BAD:
                    return BAD
                fields[depth] = unzigzag(value)
            if kind <= 2:
                # A boolean is in its kind.
                continue
            if kind == 3:
                at += 1
            elif kind <= 6:
                value, at = varint(raw, at, end)
                if at == BAD:
                    return BAD
                value = unzigzag(value)
                _keep(out[pages], depth, fields, value)
            elif kind == 7:
                at += 8
            elif kind == 8:
                value, at = varint(raw, at, end)
                if at == BAD or value < 0 or value > end - at:
                    return BAD
                at += value
            elif kind == 12:
                depth += 1
                if depth == _DEPTH_MAX:
                    return BAD
                fields[depth] = 0
            else:
                # Lists and maps, which no page header has.
                return BAD
        held = out[pages, _PAGE_BYTES]
        if held < 0 or held > end - at or out[pages, _PAGE_PLAIN_BYTES] < 0:
            return BAD
        out[pages, _PAGE_AT] = at
        at += held
        pages += 1
    return pages


@jit(_I64(RAW, _I64, _I64, _I64, _I64, _I64, _I64, _MATRIX))
def add_segments(
    raw: "Raw",
    at: Int,
    end: Int,
    width: Int,
    row: Int,
    count: Int,
    size: Int,
    segments: "NDArray[np.int64]",
) -> Int:
    """Fill `segments` with those of `count` rows from `row` on, whose indexes of
    `width` bits are in `raw[at:end]`. `size` is the number of values of the dictionary.
    Returns the number of segments.
    """
    used = 0
    last = row + count
    index_bytes = (width + 7) // 8
    while row < last:
        header, at = varint(raw, at, end)
        if at == BAD or header < 2 or used >= segments.shape[0]:
            return BAD
        if header & 1:
            groups = header >> 1
            if groups > end or groups * width > end - at:
                return BAD
            segments[used, _SEGMENT_WIDTH] = width
            segments[used, _SEGMENT_AT] = at if width else 0
            values = groups * 8
            at += groups * width
        else:
            values = header >> 1
            if index_bytes > end - at:
                return BAD
            index = np.int64(0)
            for i in range(index_bytes):
                index |= np.int64(raw[at + i]) << (8 * i)
            if index >= size:
                return BAD
            segments[used, _SEGMENT_WIDTH] = _CONSTANT
            segments[used, _SEGMENT_AT] = index
            at += index_bytes
        segments[used, _SEGMENT_ROW] = row
        used += 1
        row += min(values, last - row)
    return used


@jit(_I64(RAW, _I64, _I64, _WORDS))
def unpack_deltas(raw: "Raw", at: Int, end: Int, out: "Int64s") -> Int:
    """Fill `out` with the values of a page that is packed as differences, in
    `raw[at:end]`. Returns their number, which is that of `out`.
    """
    address = np.uint64(raw.ctypes.data)
    block_size, at = varint(raw, at, end)
    if at == BAD:
        return BAD
    minis, at = varint(raw, at, end)
    if at == BAD:
        return BAD
    total, at = varint(raw, at, end)
    if at == BAD or total != out.size or minis < 1 or block_size < 8 or block_size > 1 << 20:
        return BAD
    value, at = varint(raw, at, end)
    if at == BAD or block_size % minis or (block_size // minis) % 8:
        return BAD
    value = unzigzag(value)
    per_mini = block_size // minis
    if total:
        out[0] = value
    done = np.int64(1)
    while done < total:
        least, at = varint(raw, at, end)
        if at == BAD or minis > end - at:
            return BAD
        least = unzigzag(least)
        widths = at
        at += minis
        for mini in range(minis):
            if done >= total:
                break
            width = np.int64(raw[widths + mini])
            count = min(per_mini, total - done)
            if width > 64 or (count * width + 7) // 8 > end - at:
                return BAD
            mask = (_ONE << np.uint64(width)) - _ONE if width < 64 else ~np.uint64(0)
            first = address + np.uint64(at)
            bit = np.uint64(0)
            for i in range(done, done + count):
                place, shift = first + (bit >> _THREE), bit & _SEVEN
                word = load64(place) >> shift
                if width > _ONE_LOAD_WIDTH_MAX and shift:
                    word |= load8(place + _EIGHT) << (_SIXTY_FOUR - shift)
                value += least + np.int64(word & mask)
                out[i] = value
                bit += np.uint64(width)
            done += count
            at += per_mini * width // 8
    return total


@jit(_I64(RAW, SEGMENTS, _IN_WORDS, _I64, _I64, _I64, _I64, _WORDS))
def fill(
    raw: "Raw",
    segments: "Int64s",
    values: "Int64s",
    size: Int,
    at: int,
    begin: Int,
    end: Int,
    out: "Int64s",
) -> int:
    """Fill `out` with the values of the rows `begin:end`. Returns the segment in which
    `end` lies; `at` is one in or before which `begin` does.

    `values` is the dictionary of `size` values, with as many entries as a packed index
    can have. The last segment begins at the end of the rows.
    """
    address = np.uint64(raw.ctypes.data)
    while segments[at + 1, _SEGMENT_ROW] <= begin:
        at += 1
    row = begin
    largest = np.uint64(0)
    while row < end:
        stop = min(segments[at + 1, _SEGMENT_ROW], end)
        width = segments[at, _SEGMENT_WIDTH]
        place = segments[at, _SEGMENT_AT]
        skipped = row - segments[at, _SEGMENT_ROW]
        if width == _CONSTANT:
            value = values[place]
            for i in range(row - begin, stop - begin):
                out[i] = value
        elif width <= WIDTH_MAX:
            mask = (_ONE << np.uint64(width)) - _ONE
            first = address + np.uint64(place)
            bit = np.uint64(skipped * width)
            for i in range(row - begin, stop - begin):
                index = (load64(first + (bit >> _THREE)) >> (bit & _SEVEN)) & mask
                largest = max(largest, index)
                out[i] = values[np.int64(index)]
                bit += np.uint64(width)
        elif width == PLAIN_32:
            first = address + np.uint64(place) + np.uint64(4 * skipped)
            for i in range(row - begin, stop - begin):
                out[i] = np.int64(load32(first))
                first += np.uint64(4)
        else:
            first = address + np.uint64(place) + np.uint64(8 * skipped)
            for i in range(row - begin, stop - begin):
                out[i] = np.int64(load64(first))
                first += np.uint64(8)
        row = stop
        if row == segments[at + 1, _SEGMENT_ROW] and row < end:
            at += 1
    return at if largest < np.uint64(size) or largest == 0 else BAD


@jit(_I64(RAW, SEGMENTS, _IN_WORDS, _I64, _I64, _I64, _FLAGS))
def fill_flags(
    raw: "Raw",
    segments: "Int64s",
    values: "Int64s",
    at: int,
    begin: Int,
    end: Int,
    out: "NDArray[np.bool_]",
) -> int:
    """Like `fill`, of a column of booleans, whose packed indexes are the values."""
    address = np.uint64(raw.ctypes.data)
    while segments[at + 1, _SEGMENT_ROW] <= begin:
        at += 1
    row = begin
    while row < end:
        stop = min(segments[at + 1, _SEGMENT_ROW], end)
        place = segments[at, _SEGMENT_AT]
        if segments[at, _SEGMENT_WIDTH] == _CONSTANT:
            out[row - begin : stop - begin] = values[place] != 0
        else:
            first = address + np.uint64(place)
            bit = np.uint64(row - segments[at, _SEGMENT_ROW])
            i = row - begin
            while i < stop - begin:
                # Most flags are like those before them: look at many at once.
                count = min(stop - begin - i, _FLAGS_AT_ONCE)
                mask = (_ONE << np.uint64(count)) - _ONE
                word = (load64(first + (bit >> _THREE)) >> (bit & _SEVEN)) & mask
                if word == 0 or word == mask:
                    out[i : i + count] = word != 0
                else:
                    for k in range(count):
                        out[i + k] = (word >> np.uint64(k)) & _ONE
                i += count
                bit += np.uint64(count)
        row = stop
        if row == segments[at + 1, _SEGMENT_ROW] and row < end:
            at += 1
    return at


@jit(_I64(RAW, SEGMENTS, _IN_WORDS, _I64, _I64, _WORDS, _WORDS))
def runs(
    raw: "Raw",
    segments: "Int64s",
    values: "Int64s",
    size: Int,
    count: Int,
    starts: "Int64s",
    found: "Int64s",
) -> Int:
    """Find the runs of equal values of `count` rows: fill `starts` with their first
    rows and `found` with their values. Returns their number. See `fill` for the rest.
    """
    tile = np.empty(1024, np.int64)
    used = 0
    at = 0
    row = np.int64(0)
    while row < count:
        while segments[at + 1, _SEGMENT_ROW] <= row:
            at += 1
        if segments[at, _SEGMENT_WIDTH] == _CONSTANT:
            value = values[segments[at, _SEGMENT_AT]]
            if used == 0 or found[used - 1] != value:
                starts[used] = row
                found[used] = value
                used += 1
            row = segments[at + 1, _SEGMENT_ROW]
            continue
        stop = min(segments[at + 1, _SEGMENT_ROW], row + tile.size)
        at = fill(raw, segments, values, size, at, row, stop, tile)
        if at == BAD:
            return BAD
        for i in range(stop - row):
            if used == 0 or found[used - 1] != tile[i]:
                starts[used] = row + i
                found[used] = tile[i]
                used += 1
        row = stop
    return used


@jit(types.void(_IN_WORDS, _IN_WORDS, _IN_WORDS, _WORDS))
def values_at(rows: "Int64s", starts: "Int64s", values: "Int64s", out: "Int64s") -> None:
    """Fill `out` with the values of the runs that begin at `starts` in each of `rows`,
    which ascend.
    """
    run = 0
    for i in range(rows.size):
        while run + 1 < starts.size and starts[run + 1] <= rows[i]:
            run += 1
        out[i] = values[run]


@jit(types.Tuple((_WORDS, _MATRIX))(_RAWS, _TABLES, _DICTIONARIES, _SIZES, _I64))
def stretches(
    raws: "tuple[Raw, ...]",
    segments: "tuple[NDArray[np.int64], ...]",
    values: "tuple[Int64s, ...]",
    sizes: tuple[int, ...],
    rows: Int,
) -> "tuple[Int64s, NDArray[np.int64]]":
    """The stretches of rows that are equal in all of these columns: the first row of
    each, and the values, with a row for each column. No stretches if a page has an
    index that its dictionary has not. See `fill` for the rest.
    """
    columns = len(raws)
    bounds = np.zeros(columns + 1, np.int64)
    starts, found = np.empty(0, np.int64), np.empty(0, np.int64)
    for k in range(columns):
        room, table = bounds[k], segments[k]
        for i in range(table.shape[0] - 1):
            is_constant = table[i, _SEGMENT_WIDTH] == _CONSTANT
            room += 1 if is_constant else table[i + 1, _SEGMENT_ROW] - table[i, _SEGMENT_ROW]
        if starts.size < room:
            held, starts = starts, np.empty(room, np.int64)
            starts[: bounds[k]] = held[: bounds[k]]
            held, found = found, np.empty(room, np.int64)
            found[: bounds[k]] = held[: bounds[k]]
        own = starts[bounds[k] :], found[bounds[k] :]
        used = runs(raws[k], table, values[k], sizes[k], rows, own[0], own[1])
        if used == BAD:
            return np.empty(0, np.int64), np.empty((columns, 0), np.int64)
        bounds[k + 1] = bounds[k] + used
    merged = np.empty(min(bounds[columns], rows), np.int64)
    at = bounds[:columns] + 1
    row: Int = np.int64(0)
    count = 0
    while row < rows:
        merged[count] = row
        count += 1
        following = rows
        for k in range(columns):
            if at[k] < bounds[k + 1] and starts[at[k]] == row:
                at[k] += 1
            if at[k] < bounds[k + 1]:
                following = min(following, starts[at[k]])
        row = following
    merged = merged[:count].copy()
    out = np.empty((columns, count), np.int64)
    for k in range(columns):
        own = starts[bounds[k] : bounds[k + 1]], found[bounds[k] : bounds[k + 1]]
        values_at(merged, own[0], own[1], out[k])
    return merged, out
