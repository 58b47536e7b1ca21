"""The row groups of an export as they are stored: replicas as runs, and the columns
that differ between chunks as pages (chunktable.pages).

A fold needs neither arrays of Arrow nor the attributes of each row. A second reading
needs a few containers, and decodes only their rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.pages import (
    EncodedColumn,
    RowRanges,
    constant_column,
    encoded_columns,
    group_range,
)
from chunktable.schema import CHUNK_SCHEMA, REPLICA_COLUMNS
from merkle.checksum import kernels_for
from sweep.fragments import Int64s
from sweep.runs import (
    ROW_COLUMNS,
    TEXT,
    EncodedRows,
    TextColumn,
    flags_of,
    integers_of,
    to_arrow,
)

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
        runs = {name: columns[name].runs() for name in REPLICA_COLUMNS if name in columns}
        changes = np.zeros(self.count, np.bool_)
        changes[0] = True
        for found in runs.values():
            changes[found.starts] = True
        starts = np.flatnonzero(changes)
        text, integers = dict[str, TextColumn](), dict[str, Int64s]()
        for name in REPLICA_COLUMNS:
            constant = self._constants.get(name)
            if constant is None:
                values = runs[name].at(starts)
            elif name in TEXT:
                values = np.zeros(len(starts), np.int64)
            else:
                values = np.repeat(integers_of(constant), len(starts))
            if name in TEXT:
                texts = columns[name].texts if constant is None else constant.cast(pa.string())
                text[name] = TextColumn(values.astype(np.int32), texts)
            else:
                integers[name] = values
        wanted = None
        if container_ids is not None:
            is_wanted = np.isin(integers["container_id"], container_ids)
            ends = np.append(starts[1:], self.count)
            wanted = RowRanges(starts[is_wanted], ends[is_wanted])
        of_rows = self._columns(ROW_COLUMNS, wanted)
        if of_rows is None:
            return None
        for name in ROW_COLUMNS:
            if (constant := self._constants.get(name)) is not None:
                is_flag = pa.types.is_boolean(constant.type)
                value = flags_of(constant) if is_flag else integers_of(constant)
                of_rows[name] = constant_column(int(value[0]), self.count)
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
        return encoded_columns(self._raw, self._base, *group, indexes, wanted)


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


def rows_of_containers(
    rows: EncodedRows, container_ids: Int64s, rows_max: int
) -> Iterator[tuple[dict[str, pa.Array], int]]:
    """The columns of the rows of these containers, at most `rows_max` rows at a time,
    each with the number of rows. No other rows are decoded.

    Raises:
        PageError: a page is malformed.
    """
    is_wanted = np.isin(rows.integers["container_id"], container_ids)
    ends = np.append(rows.starts[1:], rows.count)
    # The stretches to read, cut into pieces: the number, first row and end of each.
    pieces = [
        (number, first, min(first + rows_max, end))
        for number, begin, end in zip(
            np.flatnonzero(is_wanted).tolist(),
            rows.starts[is_wanted].tolist(),
            ends[is_wanted].tolist(),
            strict=True,
        )
        for first in range(begin, end, rows_max)
    ]
    sizes = np.array([end - first for _, first, end in pieces], np.int64)
    groups = np.cumsum(sizes) // rows_max
    cuts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(pieces)]
    for begin, end in pairwise(cuts):
        if begin < end:
            yield _decoded(rows, pieces[begin:end])


def _decoded(
    rows: EncodedRows, pieces: list[tuple[int, int, int]]
) -> tuple[dict[str, pa.Array], int]:
    numbers = np.array([number for number, _, _ in pieces])
    counts = np.array([end - first for _, first, end in pieces])
    total = int(counts.sum())
    of_row = np.repeat(numbers, counts)
    columns = dict[str, pa.Array]()
    for name, text in rows.text.items():
        columns[name] = TextColumn(text.codes[of_row], text.values).array()
    for name, values in rows.integers.items():
        columns[name] = to_arrow(name, values[of_row])
    places = np.cumsum(counts) - counts
    for name in ROW_COLUMNS:
        out = np.empty(total, np.int64)
        for (_, first, end), place in zip(pieces, places.tolist(), strict=True):
            rows.columns[name].fill(first, out[place : place + end - first])
        is_flag = pa.types.is_boolean(CHUNK_SCHEMA.field(name).type)
        columns[name] = pa.array(out.astype(np.bool_) if is_flag else out)
    return columns, total
