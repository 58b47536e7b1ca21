"""Compiled kernels that open all columns of a small Parquet file at once.

Python takes some microseconds for each number of a footer and each page, which for a
small file is ten times as long as its rows take. Nothing here trusts a number that a
file holds: a kernel that finds one out of bounds returns BAD.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

from typing import TYPE_CHECKING

import numpy as np
from numba.core import types

from chunktable.page_kernels import (
    BAD,
    PAGE_FIELDS,
    PLAIN_32,
    PLAIN_64,
    RAW,
    WIDTH_MAX,
    Int,
    add_segments,
    page_headers,
    unpack_deltas,
    unzigzag,
    varint,
)
from merkle.intrinsics import jit, load32, load64

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from chunktable.page_kernels import Int64s, Raw

# The columns of a table of column chunks: a number of their metadata is in the column
# of its field, and what the statistics hold comes after them.
CODEC, _BYTES, _DATA_AT, _DICTIONARY_AT = 4, 7, 9, 11
NULLS, _LEAST_AT, _LEAST_BYTES, _GREATEST_AT, _GREATEST_BYTES = range(17, 22)
CHUNK_FIELDS = 22
# The columns of a table of pages: the number of the column chunk, and those of
# `page_headers`. `open_columns` gets where the page's bytes begin and end.
PAGE_OF, _PAGE_TYPE, _PAGE_ENCODING, _PAGE_VALUES, _PAGE_AT, _PAGE_BYTES, PAGE_PLAIN_BYTES = range(
    7
)
_PAGE_END = _PAGE_BYTES

# Kinds of values: those of 8 bytes, of 4 with and without sign, of a bit, and text.
INT64, INT32, UINT32, BOOLEAN, TEXT = range(5)
# How many bytes a value has, but that of text.
KIND_BYTES = (8, 4, 4, 1)

# Pages of one column chunk.
_PAGES_MAX = 16
_DEPTH_MAX = 8
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_PLAIN, _PLAIN_DICTIONARY, _DELTA, _RLE_DICTIONARY = 0, 2, 5, 8
# Kinds of fields in Thrift's compact form.
_FALSE, _BYTE, _INTEGER_MAX, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 2, 3, 6, 7, 8, 9, 10, 12

_I64 = types.int64
_WORDS = types.Array(types.int64, 1, "C")
_IN_WORDS = types.Array(types.int64, 1, "C", readonly=True)
_MATRIX = types.Array(types.int64, 2, "C")


@jit(types.UniTuple(_I64, 3)(RAW, _I64, _I64, _I64))
def _field(raw: "Raw", at: Int, end: Int, before: Int) -> tuple[Int, Int, Int]:
    """The kind and the number of the field of a struct at `at`, and where its value
    begins. Kind 0 ends the struct. `before` is the number of the field before.
    """
    if at >= end:
        return BAD, 0, BAD
    byte = np.int64(raw[at])
    at += 1
    kind = byte & 15
    if kind == 0:
        return 0, 0, at
    if byte >> 4:
        return kind, before + (byte >> 4), at
    value, at = varint(raw, at, end)
    return kind, unzigzag(value), at


@jit(types.UniTuple(_I64, 3)(RAW, _I64, _I64))
def _list(raw: "Raw", at: Int, end: Int) -> tuple[Int, Int, Int]:
    """The kind and the number of the entries of a list, and where the first begins."""
    if at >= end:
        return BAD, 0, BAD
    byte = np.int64(raw[at])
    at += 1
    count: Int = byte >> 4
    if count == 15:
        count, at = varint(raw, at, end)
    # An entry takes a byte or more.
    if at == BAD or count < 0 or count > end - at:
        return BAD, 0, BAD
    return byte & 15, count, at


@jit(_I64(RAW, _I64, _I64, _I64, _I64))
def _skip(raw: "Raw", at: Int, end: Int, kind: Int, depth: Int) -> Int:
    """The end of a value of this kind, which begins at `at`."""
    if depth > _DEPTH_MAX:
        return BAD
    if kind <= _FALSE:
        # A boolean is in its kind.
        return at
    if kind == _BYTE:
        at += 1
    elif kind <= _INTEGER_MAX:
        _, at = varint(raw, at, end)
    elif kind == _DOUBLE:
        at += 8
    elif kind == _BINARY:
        length, at = varint(raw, at, end)
        if at == BAD or length < 0 or length > end - at:
            return BAD
        at += length
    elif kind in (_LIST, _SET):
        entry, count, at = _list(raw, at, end)
        if at == BAD:
            return BAD
        for _ in range(count):
            # Booleans of a list take a byte each.
            at = at + 1 if entry <= _FALSE else _skip(raw, at, end, entry, depth + 1)
            if at == BAD:
                return BAD
    elif kind == _STRUCT:
        number: Int = np.int64(0)
        while True:
            inner, number, at = _field(raw, at, end, number)
            if at == BAD:
                return BAD
            if inner == 0:
                break
            at = _skip(raw, at, end, inner, depth + 1)
            if at == BAD:
                return BAD
    else:
        return BAD
    return at if at <= end else BAD


@jit(_I64(RAW, _I64, _I64, _WORDS))
def _statistics(raw: "Raw", at: Int, end: Int, out: "Int64s") -> Int:
    """Read the statistics of a column chunk into its row; returns their end."""
    number: Int = np.int64(0)
    is_exact = True
    while True:
        kind, number, at = _field(raw, at, end, number)
        if at == BAD:
            return BAD
        if kind == 0:
            break
        if number == 3 and _BYTE < kind <= _INTEGER_MAX:
            value, at = varint(raw, at, end)
            out[NULLS] = unzigzag(value)
        elif number in (5, 6) and kind == _BINARY:
            length, at = varint(raw, at, end)
            if at == BAD or length < 0 or length > end - at:
                return BAD
            place = _GREATEST_AT if number == 5 else _LEAST_AT
            out[place], out[place + 1] = at, length
            at += length
        else:
            # Rounded bounds say so.
            is_exact &= not (number in (7, 8) and kind == _FALSE)
            at = _skip(raw, at, end, kind, 0)
        if at == BAD:
            return BAD
    if not is_exact:
        out[_LEAST_AT] = BAD
    return at


@jit(_I64(RAW, _I64, _I64, _WORDS))
def _chunk(raw: "Raw", at: Int, end: Int, out: "Int64s") -> Int:
    """Read the metadata of a column chunk into its row; returns their end."""
    number: Int = np.int64(0)
    while True:
        kind, number, at = _field(raw, at, end, number)
        if at == BAD or kind == 0:
            return at
        if number == 12 and kind == _STRUCT:
            at = _statistics(raw, at, end, out)
        elif 0 < number < NULLS and _BYTE < kind <= _INTEGER_MAX:
            value, at = varint(raw, at, end)
            out[number] = unzigzag(value)
        else:
            at = _skip(raw, at, end, kind, 0)
        if at == BAD:
            return BAD


@jit(types.UniTuple(_I64, 3)(RAW, _I64, _I64, _MATRIX))
def _row_group(raw: "Raw", at: Int, end: Int, chunks: "NDArray[np.int64]") -> tuple[Int, Int, Int]:
    """Read a row group; returns the numbers of its columns and rows, and its end."""
    bad = np.int64(0), np.int64(0), np.int64(BAD)
    number: Int = np.int64(0)
    columns: Int = np.int64(0)
    rows: Int = np.int64(0)
    while True:
        kind, number, at = _field(raw, at, end, number)
        if at == BAD or kind == 0:
            return columns, rows, at
        if number == 1 and kind == _LIST:
            entry, columns, at = _list(raw, at, end)
            if at == BAD or entry != _STRUCT or columns > chunks.shape[0]:
                return bad
            for column in range(columns):
                chunks[column, :] = BAD
                inner: Int = np.int64(0)
                while True:
                    kind, inner, at = _field(raw, at, end, inner)
                    if at == BAD:
                        return bad
                    if kind == 0:
                        break
                    if inner == 3 and kind == _STRUCT:
                        at = _chunk(raw, at, end, chunks[column])
                    else:
                        # The name of another file is no form of ours.
                        at = BAD if inner == 1 else _skip(raw, at, end, kind, 0)
                    if at == BAD:
                        return bad
        elif number == 3 and _BYTE < kind <= _INTEGER_MAX:
            value, at = varint(raw, at, end)
            rows = unzigzag(value)
        else:
            at = _skip(raw, at, end, kind, 0)
        if at == BAD:
            return bad


@jit(_I64(RAW, _I64, _MATRIX, _MATRIX))
def _pages(raw: "Raw", footer: Int, chunks: "NDArray[np.int64]", pages: "NDArray[np.int64]") -> Int:
    """Fill `pages` with those of all column chunks, which lie before the footer;
    returns their number.
    """
    used: Int = np.int64(0)
    headers = np.empty((_PAGES_MAX, PAGE_FIELDS), np.int64)
    for chunk in range(chunks.shape[0]):
        first = chunks[chunk, _DATA_AT]
        if chunks[chunk, _DICTIONARY_AT] != BAD:
            first = min(first, chunks[chunk, _DICTIONARY_AT])
        length = chunks[chunk, _BYTES]
        if first < 0 or length < 0 or length > footer - first:
            return BAD
        found = page_headers(raw, first, first + length, headers)
        if found < 1 or used + found > pages.shape[0]:
            return BAD
        pages[used : used + found, PAGE_OF] = chunk
        pages[used : used + found, _PAGE_TYPE:] = headers[:found]
        used += found
    return used


@jit(types.UniTuple(_I64, 5)(RAW, _I64, _I64, _WORDS, _MATRIX, _MATRIX))
def survey(
    raw: "Raw",
    at: Int,
    end: Int,
    groups: "Int64s",
    chunks: "NDArray[np.int64]",
    pages: "NDArray[np.int64]",
) -> tuple[Int, Int, Int, Int, Int]:
    """Read the footer `raw[at:end]` of a file, and the headers of its pages, which all
    lie before it. Fills `groups` with the numbers of rows of its row groups, a row of
    `chunks` for each column of each group, and one of `pages` for each of their pages.

    Returns the numbers of groups, BAD if it is malformed or has too many, of columns,
    and of pages; and where the schema begins and ends.
    """
    bad = np.int64(BAD), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    footer = at
    number: Int = np.int64(0)
    count: Int = np.int64(0)
    columns: Int = np.int64(0)
    rows: Int = np.int64(0)
    all_rows: Int = np.int64(0)
    schema_at: Int = np.int64(0)
    schema_end: Int = np.int64(0)
    while True:
        kind, number, at = _field(raw, at, end, number)
        if at == BAD:
            return bad
        if kind == 0:
            break
        begin = at
        if number == 3 and _BYTE < kind <= _INTEGER_MAX:
            value, at = varint(raw, at, end)
            all_rows = unzigzag(value)
        elif number == 4 and kind == _LIST:
            entry, count, at = _list(raw, at, end)
            if at == BAD or entry != _STRUCT or count > groups.size or columns:
                return bad
            for group in range(count):
                found, groups[group], at = _row_group(raw, at, end, chunks[group * columns :])
                if at == BAD or found == 0 or groups[group] < 0 or (group and found != columns):
                    return bad
                columns = found
                rows += groups[group]
        else:
            at = _skip(raw, at, end, kind, 0)
            if number == 2:
                schema_at, schema_end = begin, at
        if at == BAD:
            return bad
    used = _pages(raw, footer, chunks[: count * columns], pages)
    if used == BAD or rows != all_rows:
        return bad
    return count, columns, used, schema_at, schema_end


@jit(types.boolean(RAW, _WORDS, _I64, _WORDS))
def _fill_dictionary(raw: "Raw", page: "Int64s", kind: Int, out: "Int64s") -> bool:
    """Fill `out` with the values of a dictionary page, which of text are their
    numbers. Returns False if it is malformed, or `out` has no room for twice as many:
    packed indexes may have so many values.
    """
    count, at, end = page[_PAGE_VALUES], page[_PAGE_AT], page[_PAGE_END]
    if page[_PAGE_ENCODING] not in (_PLAIN, _PLAIN_DICTIONARY) or not 0 <= 2 * count < out.size - 1:
        return False
    if kind == TEXT:
        for i in range(count):
            out[i] = i
        return True
    width = 8 if kind == INT64 else 4
    if kind == BOOLEAN or count * width > end - at:
        return False
    first = np.uint64(raw.ctypes.data) + np.uint64(at)
    for i in range(count):
        place = first + np.uint64(width * i)
        if kind == INT64:
            out[i] = np.int64(load64(place))
        elif kind == UINT32:
            out[i] = np.int64(load32(place))
        else:
            out[i] = np.int64(np.int32(load32(place)))
    return True


@jit(_I64(RAW, _I64, _I64))
def _behind_levels(raw: "Raw", at: Int, end: Int) -> Int:
    """Where the values of a page begin, which has levels before them."""
    if end - at < 4:
        return BAD
    length = np.int64(load32(np.uint64(raw.ctypes.data) + np.uint64(at)))
    return at + 4 + length if length <= end - at - 4 else BAD


@jit(types.UniTuple(_I64, 2)(RAW, _WORDS, _I64, _I64, _I64, _I64, _MATRIX, _WORDS, _I64))
def _add_page(
    raw: "Raw",
    page: "Int64s",
    at: Int,
    kind: Int,
    row: Int,
    size: Int,
    segments: "NDArray[np.int64]",
    unpacked: "Int64s",
    deltas: Int,
) -> tuple[Int, Int]:
    """Fill `segments` with those of a page of data from `row` on, whose values begin at
    `at`; returns their number, BAD if it is malformed or of an unknown form, and how
    many values an index can have. Differences go to `unpacked`, from `deltas` on.
    """
    encoding, count, end = page[_PAGE_ENCODING], page[_PAGE_VALUES], page[_PAGE_END]
    bad = np.int64(BAD), np.int64(0)
    if encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
        width = np.int64(raw[at]) if at < end else np.int64(WIDTH_MAX + 1)
        if width > WIDTH_MAX or 1 << width > 2 * size:
            return bad
        added = add_segments(raw, at + 1, end, width, row, count, size, segments)
        return added, np.int64(1) << width
    segments[0, 0], segments[0, 1], segments[0, 2] = row, PLAIN_64, at
    is_whole = False
    if encoding == _PLAIN and kind == INT64:
        is_whole = 8 * count <= end - at
    elif encoding == _PLAIN and kind == UINT32:
        segments[0, 1] = PLAIN_32
        is_whole = 4 * count <= end - at
    elif encoding == _PLAIN and kind == BOOLEAN:
        segments[0, 1] = 1
        is_whole = count <= 8 * (end - at)
    elif encoding == _DELTA and kind == INT64 and count <= unpacked.size - deltas:
        segments[0, 2] = 8 * deltas
        out = unpacked[deltas : deltas + count]
        is_whole = unpack_deltas(raw, at, end, out) == count
    return (np.int64(1), np.int64(1)) if is_whole else bad


@jit(types.boolean(RAW, _MATRIX, _IN_WORDS, _IN_WORDS, _I64, _MATRIX, _WORDS, _WORDS, _MATRIX))
def open_columns(
    raw: "Raw",
    pages: "NDArray[np.int64]",
    kinds: "Int64s",
    has_levels: "Int64s",
    rows: Int,
    segments: "NDArray[np.int64]",
    dictionary: "Int64s",
    unpacked: "Int64s",
    columns: "NDArray[np.int64]",
) -> bool:
    """Fill `columns` with a row for each column of `rows` rows, whose pages without
    compression are in `raw`: their segments go to `segments`, values of dictionaries to
    `dictionary`, and those that were packed as differences to `unpacked`. With levels a
    column has no nulls. Returns False if a page is malformed or of an unknown form, or
    an output is full.
    """
    used, held, deltas, page = np.int64(0), np.int64(0), np.int64(0), 0
    for column in range(kinds.size):
        kind, size, row = kinds[column], np.int64(0), np.int64(0)
        values: Int = np.int64(1)
        columns[column, 0], columns[column, 2] = used, held
        first_page, is_delta = page, False
        if held + 2 > dictionary.size:
            return False
        if kind == BOOLEAN:
            dictionary[held], dictionary[held + 1] = 0, 1
            size = np.int64(2)
            values = size
        while page < pages.shape[0] and pages[page, PAGE_OF] == column:
            encoding, count = pages[page, _PAGE_ENCODING], pages[page, _PAGE_VALUES]
            at, end = pages[page, _PAGE_AT], pages[page, _PAGE_END]
            # The last segment is that behind the last row.
            if count < 0 or used + 2 > segments.shape[0]:
                return False
            if pages[page, _PAGE_TYPE] == _DICTIONARY_PAGE:
                if page != first_page:
                    return False
                if not _fill_dictionary(raw, pages[page], kind, dictionary[held:]):
                    return False
                size, page = count, page + 1
                continue
            if pages[page, _PAGE_TYPE] != _DATA_PAGE or count > rows - row:
                return False
            if has_levels[column]:
                at = _behind_levels(raw, at, end)
            # Differences go to an array of their own: all of a column or none.
            if at == BAD or (row and is_delta != (encoding == _DELTA)):
                return False
            is_delta = encoding == _DELTA
            added, possible = _add_page(
                raw, pages[page], at, kind, row, size, segments[used:-1], unpacked, deltas
            )
            if added == BAD:
                return False
            values = max(values, possible)
            deltas += count * is_delta
            used += added
            row += count
            page += 1
        if row != rows or used >= segments.shape[0]:
            return False
        segments[used, 0], segments[used, 1], segments[used, 2] = rows, 0, 0
        used += 1
        values = max(values, size)
        dictionary[held + size : held + values] = 0
        held += values
        columns[column, 1], columns[column, 3] = used, held
        columns[column, 4], columns[column, 5] = size, is_delta
    return bool(page == pages.shape[0])
