"""Read the tables of a sweep by ranges of container IDs, so that no more than a range
of them is held at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from chunktable.files import AnyPath
from sweep.model import REQUEST_SCHEMA
from sweep.output import SweepStore, SweepTable
from sweep.pieces import Range, StoredFile, StoredTable, ranges, rows_in_range

# Rows of all tables in one range.
_RANGE_ROWS = 1 << 16
_ID_SCHEMA = pa.schema([REQUEST_SCHEMA.field("container_id")])


class RangeReader(Protocol):
    """Tables of one sweep by name."""

    def pieces(
        self, table: SweepTable, columns: Sequence[str], wanted: Range
    ) -> Iterator[pa.Table]:
        """The rows of a table in a range, in pieces; `columns` has container_id."""
        ...


class SweepReader:
    """The tables of one sweep, which are written. All methods raise DiskError for a
    table that cannot be read, or was written by a later version.
    """

    def __init__(self, sweeps: SweepStore, sweep_id: str) -> None:
        self.sweep_id = sweep_id
        self._sweeps = sweeps
        # A manifest has thousands of files, so it is not read once for each range.
        self._files = dict[SweepTable, dict[AnyPath, StoredFile | None]]()

    def stored(self, table: SweepTable) -> StoredTable:
        """The container IDs of a table, to choose ranges by."""
        self._files_of(table)
        return self._sweeps.stored(table, self.sweep_id, _ID_SCHEMA)

    def pieces(
        self, table: SweepTable, columns: Sequence[str], wanted: Range
    ) -> Iterator[pa.Table]:
        """The rows of a table in a range, a row group at a time; `columns` has
        container_id.
        """
        for path, file in self._files_of(table).items():
            if file is None or file.may_hold(wanted):
                for piece in self._sweeps.pieces_of_file(path, columns, wanted):
                    yield rows_in_range(piece, wanted)

    def _files_of(self, table: SweepTable) -> dict[AnyPath, StoredFile | None]:
        if table not in self._files:
            # It refuses tables of later versions.
            next(self._sweeps.pieces(table, self.sweep_id, _ID_SCHEMA.names), None)
            self._files[table] = self._sweeps.stored_files(table, self.sweep_id)
        return self._files[table]


def ranges_of(
    readers: Iterable[SweepReader],
    tables: Sequence[SweepTable],
    *,
    rows_max: int = _RANGE_ROWS,
) -> list[Range]:
    """Split all container IDs into ranges with about `rows_max` rows in these tables of
    all readers together.

    Raises:
        DiskError: a table cannot be read.
    """
    return ranges([reader.stored(table) for reader in readers for table in tables], rows_max)
