"""Rows as they cross an exchange: many in one row, column by column.

Spark converts Arrow to rows and back, one value at a time, and copies each row several
times. A replica has 18 columns, of which most are the same as in the row before. So the
rows of one range travel as one row with a list for each column. A list has a value for
each row, or a single one if the column is constant. Text is a list of values, and a
list of indexes into it.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sweep.fragments import Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNT = pa.field("row_count", pa.int32(), nullable=False)
# Rows that travel in one: enough that a row costs nothing, and about a megabyte.
_PACKED_ROWS_MAX = 1 << 13
# Values of a column of text that each packed row gets all of.
_VALUES_MAX = 16
_CODES = "_codes"


def packed_fields(schema: pa.Schema) -> list[pa.Field]:
    """The columns of packed rows of a table; times are integers: one that nobody
    checked may overflow Spark's microseconds.
    """
    fields = list[pa.Field]()
    for one in schema:
        kind = pa.int64() if pa.types.is_timestamp(one.type) else one.type
        fields.append(pa.field(one.name, pa.list_(kind)))
        if pa.types.is_string(kind):
            fields.append(pa.field(one.name + _CODES, pa.list_(pa.int32())))
    return fields


def packed(rows: pa.Table, groups: Int64s) -> tuple[Int64s, dict[str, pa.Array]]:
    """Pack rows, each with the number of its group: the group of each packed row, and
    its columns by name.
    """
    if not (groups[1:] >= groups[:-1]).all():
        order = np.argsort(groups, kind="stable")
        rows, groups = rows.take(pa.array(order)), groups[order]
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    ends = np.append(starts[1:], len(groups))
    starts = np.concatenate(
        [np.arange(a, b, _PACKED_ROWS_MAX) for a, b in zip(starts, ends, strict=True)]
    )
    counts = np.diff(starts, append=len(groups))
    columns = {COUNT.name: pa.array(counts, COUNT.type)}
    for field in rows.schema:
        column = rows[field.name].combine_chunks()
        if pa.types.is_timestamp(field.type):
            column = column.view(pa.int64())
        if pa.types.is_string(field.type):
            columns |= _packed_text(field.name, column, starts, counts)
        else:
            columns[field.name] = _packed_values(column, starts, counts)
    return groups[starts], columns


def unpacked(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """The rows of a table that were packed."""
    found = pa.Table.from_batches(batches).combine_chunks()
    counts = found[COUNT.name].to_numpy().astype(np.int64)
    columns = list[pa.Array]()
    for field in schema:
        if pa.types.is_string(field.type):
            codes = _unpacked_values(found[field.name + _CODES], counts)
            values = _unpacked_text(found[field.name], codes, counts)
        else:
            values = _unpacked_values(found[field.name], counts)
        columns.append(values.cast(field.type))
    return pa.table(columns, schema)


def _packed_values(column: pa.Array, starts: Int64s, counts: Int64s) -> pa.ListArray:
    lengths = counts
    if not column.null_count and pa.types.is_integer(column.type):
        values = column.to_numpy()
        is_constant = np.minimum.reduceat(values, starts) == np.maximum.reduceat(values, starts)
        if is_constant.any():
            kept = np.repeat(~is_constant, counts)
            kept[starts] = True
            column, lengths = pa.array(values[kept]), np.where(is_constant, 1, counts)
    return pa.ListArray.from_arrays(_offsets(lengths), column)


def _packed_text(
    name: str, column: pa.Array, starts: Int64s, counts: Int64s
) -> Iterator[tuple[str, pa.Array]]:
    encoded = column.dictionary_encode(null_encoding="encode")
    codes, size = encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)
    if size <= _VALUES_MAX:
        of_values, lengths = np.tile(np.arange(size), len(starts)), np.full(len(starts), size)
    else:
        # Each packed row has only its own values.
        places = np.repeat(np.arange(len(starts)), counts) * size + codes
        found, codes = np.unique(places, return_inverse=True)
        of_values, lengths = found % size, np.bincount(found // size, minlength=len(starts))
        codes -= np.repeat(np.cumsum(lengths) - lengths, counts)
    yield (
        name,
        pa.ListArray.from_arrays(_offsets(lengths), encoded.dictionary.take(pa.array(of_values))),
    )
    yield name + _CODES, _packed_values(pa.array(codes, pa.int32()), starts, counts)


def _offsets(lengths: Int64s) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())


def _unpacked_values(column: pa.ChunkedArray, counts: Int64s) -> pa.Array:
    """The values of all packed rows, one for each row."""
    lists = column.combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
    values = lists.flatten()
    if (lengths == counts).all():
        return values
    firsts = np.cumsum(lengths) - lengths
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return values.take(
        pa.array(np.repeat(firsts, counts) + within * np.repeat(lengths > 1, counts))
    )


def _unpacked_text(column: pa.ChunkedArray, codes: pa.Array, counts: Int64s) -> pa.Array:
    lists = column.combine_chunks()
    lengths = pc.list_value_length(lists).to_numpy().astype(np.int64)
    # The same text comes from many packed rows.
    encoded = lists.flatten().dictionary_encode(null_encoding="encode")
    firsts = np.repeat(np.cumsum(lengths) - lengths, counts)
    indexes: NDArray[np.int32] = encoded.indices.to_numpy()[firsts + codes.to_numpy()]
    return pa.DictionaryArray.from_arrays(pa.array(indexes), encoded.dictionary)
