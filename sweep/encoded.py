"""The row groups of an export as they are stored: replicas as runs, and the columns
that differ between chunks as pages (chunktable.pages).

A fold needs neither arrays of Arrow nor the attributes of each row. A second reading
needs a few containers, and decodes only their rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.pages import (
    EncodedColumn,
    PageError,
    RowRanges,
    constant_column,
    encoded_columns,
    group_range,
)
from chunktable.schema import CHUNK_SCHEMA, REPLICA_COLUMNS
from merkle.checksum import kernels_for
from sweep.columns import to_batch
from sweep.fragments import Bools, Int64s
from sweep.rows import ROW_COLUMNS, TEXT, EncodedRows, Rows, TextColumn, flags_of, integers_of
from sweep.runs import to_arrow

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StoredGroup:
    """A row group of a verified file, in memory."""

    def __init__(
        self,
        raw: "NDArray[np.uint8]",
        base: int,
        metadata: pq.FileMetaData,
        group: int,
        indexes: Mapping[str, int],
        constants: Mapping[str, pa.Array],
    ) -> None:
        """Internal: use `stored_group`."""
        self.count = metadata.row_group(group).num_rows
        self._raw = raw
        self._base = base
        self._metadata = metadata
        self._group = group
        self._indexes = indexes
        self._constants = constants

    def rows(self, container_ids: "Int64s | None" = None) -> EncodedRows | None:
        """All rows; None if a column has a form that only pyarrow knows. With
        `container_ids` the columns that differ between chunks have values only for rows
        of these containers.

        Raises:
            PageError: a page is malformed.
        """
        columns = self._columns(REPLICA_COLUMNS)
        if columns is None:
            return None
        starts, text, integers = _stretches(columns, self.count)
        wanted = None
        if container_ids is not None:
            is_wanted = np.isin(integers["container_id"], container_ids)
            ends = np.append(starts[1:], self.count)
            wanted = RowRanges(starts[is_wanted], ends[is_wanted])
        of_rows = self._columns(ROW_COLUMNS, wanted)
        if of_rows is None:
            return None
        return EncodedRows(self.count, starts, text, integers, of_rows)

    def may_hold(self, container_ids: Int64s) -> bool:
        """Whether it has rows of these containers, or is in a form that only pyarrow
        knows.

        Raises:
            PageError: a page is malformed.
        """
        if "container_id" in self._constants:
            held = integers_of(self._constants["container_id"])
        elif found := self._columns(["container_id"]):
            held = found["container_id"].runs().values
        else:
            return True
        return bool(np.isin(held, container_ids).any())

    def _columns(
        self, names: Sequence[str], wanted: RowRanges | None = None
    ) -> dict[str, EncodedColumn] | None:
        indexes = {name: self._indexes[name] for name in names if name not in self._constants}
        group = self._metadata, self._group
        found = encoded_columns(self._raw, self._base, *group, indexes, wanted)
        if found is None:
            return None
        for name in names:
            if (constant := self._constants.get(name)) is not None:
                found[name] = _constant(name, constant, self.count)
        return found


def encoded_rows(columns: Mapping[str, EncodedColumn], count: int) -> EncodedRows:
    """All columns of CHUNK_SCHEMA as the rows of a row group.

    Raises:
        PageError: a page is malformed.
    """
    of_rows = {name: columns[name] for name in ROW_COLUMNS}
    return EncodedRows(count, *_stretches(columns, count), of_rows)


def _stretches(
    columns: Mapping[str, EncodedColumn], count: int
) -> tuple[Int64s, dict[str, TextColumn], dict[str, Int64s]]:
    """The first row of each stretch of rows that are equal in REPLICA_COLUMNS, and its
    text and integers.
    """
    from chunktable import page_kernels

    ours = [columns[name].without_levels() for name in REPLICA_COLUMNS]
    starts, found = page_kernels.stretches(
        tuple(column.raw for column in ours),
        tuple(column.segments for column in ours),
        tuple(column.values for column in ours),
        tuple(column.size for column in ours),
        count,
    )
    if count and not len(starts):
        raise PageError
    text, integers = dict[str, TextColumn](), dict[str, Int64s]()
    for name, column, values in zip(REPLICA_COLUMNS, ours, found, strict=True):
        if name in TEXT:
            text[name] = TextColumn(values.astype(np.int32), column.texts)
        else:
            integers[name] = values
    return starts, text, integers


def _constant(name: str, value: pa.Array, count: int) -> EncodedColumn:
    """The column with a single value in all rows."""
    if name in TEXT:
        return replace(constant_column(0, count), texts=value.cast(pa.string()))
    if pa.types.is_boolean(value.type):
        return constant_column(int(flags_of(value)[0]), count)
    return constant_column(int(integers_of(value)[0]), count)


def stored_group(
    source: pa.NativeFile,
    metadata: pq.FileMetaData,
    group: int,
    indexes: Mapping[str, int],
    constants: Mapping[str, pa.Array],
) -> StoredGroup | None:
    """A row group of a verified file; None if it has no rows, or kernels are not used.

    `indexes` are those of the columns of CHUNK_SCHEMA in the file, and `constants` the
    columns that have the same value in all rows, as arrays with one entry.
    """
    if not metadata.row_group(group).num_rows or kernels_for(0) is None:
        return None
    first, end = group_range(metadata, group)
    source.seek(first)
    raw = np.frombuffer(source.read_buffer(end - first), np.uint8)
    return StoredGroup(raw, first, metadata, group, indexes, constants)


def decoded_rows(
    rows: EncodedRows, rows_max: int, container_ids: "Int64s | None" = None
) -> Iterator[Rows]:
    """The rows as arrays, at most `rows_max` at a time; with `container_ids` those of
    these containers. No other rows are decoded.

    Raises:
        PageError: a page is malformed.
    """
    ends = np.append(rows.starts[1:], rows.count)
    stretches = np.arange(len(ends))
    if container_ids is not None:
        stretches = np.flatnonzero(np.isin(rows.integers["container_id"], container_ids))
    # Long stretches are cut.
    cuts = -(-(ends - rows.starts)[stretches] // rows_max)
    stretches = np.repeat(stretches, cuts)
    place = np.arange(len(stretches)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    firsts = rows.starts[stretches] + place * rows_max
    lasts = np.minimum(firsts + rows_max, ends[stretches])
    groups = (np.cumsum(lasts - firsts) - 1) // rows_max
    bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    for begin, end in pairwise(bounds):
        if begin < end:
            yield _decoded(rows, stretches[begin:end], firsts[begin:end], lasts[begin:end])


def _decoded(rows: EncodedRows, stretches: Int64s, firsts: Int64s, lasts: Int64s) -> Rows:
    """The rows `firsts[i]:lasts[i]`, which are of these stretches."""
    counts = lasts - firsts
    count = int(counts.sum())
    text = {
        name: TextColumn(np.repeat(one.codes[stretches], counts), one.values)
        for name, one in rows.text.items()
    }
    integers = {
        name: np.repeat(values[stretches], counts) for name, values in rows.integers.items()
    }
    flags = dict[str, Bools]()
    # Consecutive ranges are decoded together.
    begins = np.flatnonzero(np.append(True, firsts[1:] != lasts[:-1]))
    places = np.append((np.cumsum(counts) - counts)[begins], count).tolist()
    for name in ROW_COLUMNS:
        out = np.empty(count, np.int64)
        for first, (place, end) in zip(firsts[begins].tolist(), pairwise(places), strict=True):
            rows.columns[name].fill(first, out[place:end])
        if pa.types.is_boolean(CHUNK_SCHEMA.field(name).type):
            flags[name] = out.astype(np.bool_)
        else:
            integers[name] = out
    return Rows(count, text, integers, flags)


def batch_of(rows: Rows) -> pa.RecordBatch:
    """Rows with an entry for each, as a batch of CHUNK_SCHEMA."""
    columns: dict[str, pa.Array] = {name: text.array() for name, text in rows.text.items()}
    for name, values in rows.integers.items():
        columns[name] = pa.array(values) if name in ROW_COLUMNS else to_arrow(name, values)
    columns |= {name: pa.array(values) for name, values in rows.flags.items()}
    return to_batch(columns, rows.count)
