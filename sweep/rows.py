"""Rows of the chunk table as arrays, or as an export stores them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from chunktable.pages import NULL, EncodedColumn
from chunktable.schema import CHUNK_SCHEMA
from sweep.fragments import Bools, Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)

# The text columns.
TEXT = ("datanode", "volume", "state", "source")
# The columns that differ between rows of a replica, in the order in which kernels take
# them.
ROW_COLUMNS = ("block_id", "chunk_offset", "length", "checksum", "matches", "deleted")


@dataclass(frozen=True, slots=True)
class TextColumn:
    """A column of text: for each row an index into `values`."""

    codes: "NDArray[np.int32]"
    values: pa.Array

    def array(self) -> pa.Array:
        """The text as Arrow stores it."""
        return pa.DictionaryArray.from_arrays(pa.array(self.codes), self.values)


@dataclass(frozen=True, slots=True)
class Rows:
    """At least one row of the chunk table, as arrays by column name. A column has
    `count` entries, or a single one if it is constant.

    `flags` are `matches` and `deleted`. Times are in ms since the epoch; null is the
    least int64.
    """

    count: int
    text: Mapping[str, TextColumn]
    integers: Mapping[str, Int64s]
    flags: Mapping[str, Bools]
    # The rows that lack a value; None if there are none.
    unreadable: "Bools | None" = None


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """The rows of a row group as it is stored. A stretch is some rows that are equal in
    REPLICA_COLUMNS. `text` and `integers` have one entry for each stretch; `columns`
    are those that differ between rows of a stretch.
    """

    count: int
    # The first row of each stretch.
    starts: Int64s
    text: Mapping[str, TextColumn]
    integers: Mapping[str, Int64s]
    columns: Mapping[str, EncodedColumn]


def rows_of(columns: Mapping[str, pa.Array], count: int) -> Rows:
    """Convert columns of CHUNK_SCHEMA to arrays. Text may be dictionaries; a constant
    column may have a single entry.
    """
    unreadable: Bools | None = None
    text, integers, flags = dict[str, TextColumn](), dict[str, Int64s](), dict[str, Bools]()
    for name in CHUNK_SCHEMA.names:
        column = columns[name]
        if column.null_count and name != "scanned_at":
            lacking = repeat(column.is_null().to_numpy(zero_copy_only=False), count)
            unreadable = lacking if unreadable is None else unreadable | lacking
        if name in TEXT:
            text[name] = text_of(column)
        elif pa.types.is_boolean(column.type):
            flags[name] = flags_of(column)
        else:
            integers[name] = integers_of(column)
    return Rows(count, text, integers, flags, unreadable)


def text_of(column: pa.Array) -> TextColumn:
    """Convert a column of text; null becomes ""."""
    if column.null_count:
        column = column.cast(pa.string()).fill_null("")
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    return TextColumn(column.indices.to_numpy(), column.dictionary)


def integers_of(column: pa.Array) -> Int64s:
    """Convert a column of integers or times; null becomes 0, or for times the least
    int64.
    """
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("ms", tz="UTC")).view(pa.int64()).fill_null(NULL)
    elif column.null_count:
        column = column.fill_null(0)
    array: Int64s = column.to_numpy().astype(np.int64, copy=False)
    return array


def flags_of(column: pa.Array) -> Bools:
    """Convert a column of booleans; null becomes False."""
    array: Bools = column.fill_null(False).to_numpy(zero_copy_only=False)
    return array


def take(column: "NDArray[_Scalar]", places: Int64s) -> "NDArray[_Scalar]":
    """The entries of some rows; `column` may have a single entry if it is constant."""
    return column[places] if len(column) > 1 else repeat(column, len(places))


def repeat(column: "NDArray[_Scalar]", count: int) -> "NDArray[_Scalar]":
    """The column with `count` entries; a single entry is repeated."""
    return column if len(column) == count else np.repeat(column, count)
