"""Tables in several files, each written by one task, and read range by range.

A task that fails, or that an engine runs twice, leaves files behind. So a file counts
only when its name is committed: in the note of a stage (sweep.work) or in the manifest
of a table (sweep.output). Readers take the committed names, and never list a folder.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock
from types import MappingProxyType
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chunktable.files import AnyPath, Files, NewFile, open_parquet, store_error
from runtime.disk import Disk
from runtime.errors import DiskError
from sweep.errors import SweepWorkError
from sweep.fragments import Int64s

# Small enough that a range of containers reads little beside its own rows.
_ROW_GROUP = 1 << 15
# Rows in one range, at about 300 bytes each.
RANGE_ROWS = 1_000_000
# What pyarrow raises for a damaged file; ArrowInvalid is a ValueError.
UNREADABLE = (OSError, ValueError, pa.ArrowException)
# Rows between two samples of the container IDs in a file, and samples at least.
_SAMPLED_EVERY = 1 << 12
_SAMPLES_MIN = 16
_ID_MIN, _ID_MAX = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TablePlace:
    """Where the files of a table are written."""

    folder: AnyPath
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A durable file of a table. `starts` samples its container IDs: pairs of an ID and
    the number of rows that it stands for, without the rows that have no ID. The least
    ID is one of them; `last` is the greatest, None if it is not known.
    """

    name: str
    rows: int
    starts: tuple[tuple[int, int], ...] = ()
    last: int | None = None

    @classmethod
    def of(cls, raw: Mapping[str, object]) -> "StoredFile":
        """The file from its JSON object.

        Raises:
            ValueError, TypeError, KeyError: it is no such object.
        """
        name, rows, starts = str(raw["name"]), raw["rows"], raw["starts"]
        # Earlier releases wrote none.
        last = raw.get("last")
        if not isinstance(rows, int) or not isinstance(starts, list) or "/" in name:
            raise TypeError(f"{raw!r} is not a file of a table")
        if last is not None and not (isinstance(last, int) and starts):
            raise TypeError(f"{raw!r} is not a file of a table")
        return cls(name, rows, tuple((int(first), int(count)) for first, count in starts), last)

    def may_hold(self, wanted: "Range") -> bool:
        """Whether it may have rows in a range."""
        if self.last is None:
            return True
        if wanted.first is None and sum(count for _, count in self.starts) < self.rows:
            return True
        is_below = wanted.first is None or wanted.first <= self.last
        return is_below and min(first for first, _ in self.starts) <= wanted.last

    def without_samples(self) -> "StoredFile":
        """The same with its least ID alone: what `may_hold` needs."""
        counted = sum(count for _, count in self.starts)
        return replace(self, starts=((min(self.starts)[0], counted),)) if self.starts else self


class TableFileWriter:
    """Writes at most one file of each table, and returns those with rows."""

    def __init__(self, places: Mapping[str, TablePlace], disk: Disk) -> None:
        self._places = places
        self._files = Files(disk)
        self._open = dict[str, tuple[AnyPath, NewFile, pq.ParquetWriter]]()
        # Rows that wait until there are enough for a row group.
        self._waiting = dict[str, list[pa.Table]]()
        self._rows = dict[str, int]()
        self._starts = dict[str, list[tuple[int, int]]]()
        self._last = dict[str, int]()

    def add(self, tables: Mapping[str, pa.Table]) -> None:
        """Append rows to the files of these tables.

        Raises:
            DiskError: a file cannot be written.
        """
        for name, table in tables.items():
            if table.num_rows:
                waiting = self._waiting.setdefault(name, [])
                waiting.append(table)
                if sum(one.num_rows for one in waiting) >= _ROW_GROUP:
                    self._write(name)

    def close(self) -> dict[str, StoredFile]:
        """Make the files durable.

        Raises:
            DiskError: a file cannot be written.
        """
        for name in list(self._waiting):
            self._write(name)
        found = dict[str, StoredFile]()
        for name, (path, new, writer) in self._open.items():
            with _named_errors(path):
                writer.close()
            new.close()
            starts = tuple(self._starts[name])
            found[name] = StoredFile(path.name, self._rows[name], starts, self._last.get(name))
        self._open.clear()
        return found

    def discard(self) -> None:
        """Remove the files that are not closed."""
        for _, new, writer in self._open.values():
            # On a full disk its end cannot be written either.
            with suppress(OSError):
                writer.close()
            new.discard()
        self._open.clear()
        self._waiting.clear()

    def _write(self, name: str) -> None:
        place, table = self._places[name], pa.concat_tables(self._waiting.pop(name))
        with _named_errors(place.folder):
            if name not in self._open:
                # Unique: the file of another attempt must not be replaced.
                path = place.folder / f"{name}-{uuid4().hex}.parquet"
                new = self._files.create(path)
                self._open[name] = path, new, _writer(new, place.schema)
                self._rows[name], self._starts[name] = 0, []
            columns = table.select(place.schema.names).cast(place.schema)
            self._open[name][2].write_table(columns, row_group_size=_ROW_GROUP)
        self._rows[name] += table.num_rows
        ids = table["container_id"].drop_null().to_numpy()
        if len(ids):
            self._starts[name] += _starts_of(ids)
            self._last[name] = max(int(ids.max()), self._last.get(name, _ID_MIN))


@contextmanager
def _named_errors(path: AnyPath) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{path} cannot be written: {error}"
        raise store_error(path, error) or DiskError(text, path=str(path)) from error


def _writer(new: NewFile, schema: pa.Schema) -> pq.ParquetWriter:
    # Only text has few values: a dictionary of numbers costs more than it saves.
    packed = {one.name: "DELTA_BINARY_PACKED" for one in schema if one.name == "container_id"}
    return pq.ParquetWriter(
        new.target,
        schema,
        compression="zstd",
        use_dictionary=[one.name for one in schema if not pa.types.is_integer(one.type)],
        column_encoding=packed,
        write_page_checksum=True,
    )


def _starts_of(ids: Int64s) -> list[tuple[int, int]]:
    """Sampled container IDs of some rows, ascending, each with the number of rows that
    it stands for.
    """
    if (ids[1:] < ids[:-1]).any():
        ids = np.sort(ids)
    step = max(1, min(_SAMPLED_EVERY, len(ids) // _SAMPLES_MIN))
    places = np.arange(0, len(ids), step)
    counts = np.diff(np.append(places, len(ids)))
    return list(zip(ids[places].tolist(), counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Range:
    """Container IDs from `first` to `last`, both inclusive. If `first` is None, the
    range also has the rows without a container.
    """

    first: int | None
    last: int


_ALL = Range(None, _ID_MAX)


def rows_in_range(rows: pa.Table, wanted: Range) -> pa.Table:
    """The rows of a table in a range of container IDs."""
    ids = rows["container_id"]
    keep = pc.less_equal(ids, wanted.last)
    if wanted.first is not None:
        keep = pc.and_(keep, pc.greater_equal(ids, wanted.first))
    return rows.filter(pc.fill_null(keep, wanted.first is None))


class StoredTable:
    """A table stored in several files, each about ascending by container ID.

    Raises:
        SweepWorkError: a file cannot be read; raised by every method.
    """

    def __init__(
        self,
        paths: Sequence[AnyPath],
        schema: pa.Schema,
        files: Mapping[AnyPath, StoredFile] = MappingProxyType({}),
    ) -> None:
        """Open the files `paths`. Those in `files` are opened only while they are
        read.
        """
        self.schema = schema
        self.paths = (*paths, *files)
        self._files = dict(files)
        self._open = {path: _open_stored(path, schema) for path in paths}
        # A reader of Parquet serves one thread at a time.
        self._lock = Lock()

    def plus(self, other: "StoredTable") -> "StoredTable":
        """Both tables as one, with this schema."""
        opened, files = [*self._open, *other._open], {**self._files, **other._files}
        return StoredTable(opened, self.schema, files)

    def sizes(self, wanted: Range) -> Iterator[tuple[AnyPath, int]]:
        """Each file that may have rows in a range, and its number of rows."""
        for path, opened in self._open.items():
            if any(may_hold(opened, i, wanted) for i in range(opened.metadata.num_row_groups)):
                yield path, opened.metadata.num_rows
        for path, file in self._files.items():
            if file.may_hold(wanted):
                yield path, file.rows

    def unopened(self) -> dict[AnyPath, StoredFile]:
        """All files, for a process that opens those it needs."""
        known = {path: file.without_samples() for path, file in self._files.items()}
        return {path: StoredFile(path.name, 0) for path in self._open} | known

    def starts(self) -> Iterator[tuple[int, int]]:
        """Container IDs, each with the number of rows that it stands for: the least of
        each row group, or samples. Rows without container IDs are left out.
        """
        yield from (start for file in self._files.values() for start in file.starts)
        for file in self._open.values():
            for i in range(file.metadata.num_row_groups):
                statistics = _statistics(file, i)
                if statistics is not None and statistics.has_min_max:
                    yield statistics.min, file.metadata.row_group(i).num_rows

    def tables(self) -> Iterator[pa.Table]:
        """The whole table, file by file."""
        for path in self.paths:
            yield pa.concat_tables([self.schema.empty_table(), *self.pieces(path, _ALL)])

    def read(self, wanted: Range) -> pa.Table:
        """All rows in this range, in any order."""
        found = [piece for path in self.paths for piece in self.pieces(path, wanted)]
        return pa.concat_tables([self.schema.empty_table(), *found])

    def pieces(self, path: AnyPath, wanted: Range) -> Iterator[pa.Table]:
        """The rows of one file in this range, a row group at a time."""
        if path in self._files and not self._files[path].may_hold(wanted):
            return
        with self._lock:
            file = self._open.get(path) or _open_stored(path, self.schema)
            for group in range(file.metadata.num_row_groups):
                if may_hold(file, group, wanted):
                    yield rows_in_range(_read_group(file, group, path, self.schema), wanted)


def _open_stored(path: AnyPath, schema: pa.Schema) -> pq.ParquetFile:
    try:
        file = open_parquet(path)
        # Arrow ignores requested columns that the file lacks.
        if missing := set(schema.names) - set(file.schema_arrow.names):
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    except UNREADABLE as error:
        raise unreadable_error(path, error) from error
    return file


def _read_group(file: pq.ParquetFile, group: int, path: AnyPath, schema: pa.Schema) -> pa.Table:
    try:
        return file.read_row_group(group, columns=schema.names).cast(schema)
    except UNREADABLE as error:
        raise unreadable_error(path, error) from error


def may_hold(file: pq.ParquetFile, group: int, wanted: Range) -> bool:
    """Whether a row group may have rows in a range."""
    statistics, rows = _statistics(file, group), file.metadata.row_group(group).num_rows
    if statistics is None:
        # What is not told is looked at.
        return bool(rows)
    if wanted.first is None and statistics.null_count:
        return True
    if not statistics.has_min_max:
        return bool(statistics.null_count != rows)
    is_below = wanted.first is None or wanted.first <= statistics.max
    return bool(statistics.min <= wanted.last and is_below)


def unreadable_error(path: AnyPath, why: Exception | str) -> DiskError:
    """The error for a file of a sweep's own work that cannot be read: a SweepWorkError,
    unless the store does not answer or refuses. Then the work may be whole.
    """
    if not isinstance(why, str) and (of_store := store_error(path, why)):
        return of_store
    reason = why.message if isinstance(why, DiskError) else why
    return SweepWorkError(
        f"{path} cannot be read: {reason}", hint="--fresh starts over.", path=str(path)
    )


def ranges(tables: Iterable[StoredTable], rows_max: int = RANGE_ROWS) -> list[Range]:
    """Split all container IDs into ranges with about `rows_max` rows in these tables
    together; returns at least one range.
    """
    found, first, count = list[Range](), None, 0
    for least, rows in sorted(start for table in tables for start in table.starts()):
        # A row group counts for the range in which it begins: it is small compared with
        # a range.
        if count + rows > rows_max and count and (first is None or least > first):
            found.append(Range(first, least - 1))
            first, count = least, 0
        count += rows
    return [*found, Range(first, _ID_MAX)]


def _statistics(file: pq.ParquetFile, group: int) -> pq.Statistics | None:
    """The statistics of the container IDs in a row group; None if it has no rows."""
    place = file.schema_arrow.get_field_index("container_id")
    return file.metadata.row_group(group).column(place).statistics
