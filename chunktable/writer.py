"""Write the Parquet files of a chunk table, bounding row groups and files."""

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import TableRefusal, table_error
from chunktable.places import Sink
from chunktable.schema import CHECKSUM_MAX, CHUNK_SCHEMA, ROW_ORDER
from runtime.errors import OperationInterruptedError

# A streaming reader holds one row group at a time and skips groups by statistics.
GROUP_ROWS = 1 << 20
# About 80 MB: enough files to share among a cluster's tasks, few enough to open.
FILE_ROWS_MAX = 16 * GROUP_ROWS
TEXT_TYPE = pa.dictionary(pa.int32(), pa.string())
# The schema in memory before writing: text that repeats is one dictionary entry and a
# number per row. Readers get plain text. A checksum takes 32 bits.
WRITTEN_SCHEMA = pa.schema(
    [
        f.with_type(
            TEXT_TYPE if f.type == pa.string() else pa.uint32() if f.name == "checksum" else f.type
        )
        for f in CHUNK_SCHEMA
    ]
)
# The same for files in which a checksum needs more bits: other programs may have
# written such trees.
_WIDE_SCHEMA = pa.schema(
    [CHUNK_SCHEMA.field("checksum") if f.name == "checksum" else f for f in WRITTEN_SCHEMA]
)

# Columns that ascend or have small values: as differences they take a few bits.
_PACKABLE = ("container_id", "bcs_id", "block_id", "chunk_offset", "length")
# Rows that are looked at to choose encodings.
_SAMPLE_ROWS = 1 << 16
# A dictionary pays if each of its values occurs so often.
_REPEATED_MIN = 4
# A file of fewer rows is not compressed: of such a file a reader spends more time on
# beginning to decompress each page than it saves.
_COMPRESSED_ROWS_MIN = 1 << 15


def _parquet_writer(where: object, first: pa.Table, *, is_sorted: bool = False) -> pq.ParquetWriter:
    """A writer of one file of a table to a path or stream, encoded to be read fast.
    `first` are the first rows to come, from which encodings are chosen. Text may be
    dictionary-encoded. `is_sorted` states that each row group is in ROW_ORDER.

    Where values repeat, a reader gets runs of them from a dictionary. Checksums neither
    repeat nor compress: they are stored as they are, and read where they lie.
    """
    schema, sample = first.schema, first.slice(0, _SAMPLE_ROWS)
    encodings = {
        name: "DELTA_BINARY_PACKED"
        for name in schema.names
        if name in _PACKABLE
        and pc.count_distinct(sample[name]).as_py() * _REPEATED_MIN > sample.num_rows
    }
    stored_as_is = set[str]()
    if "checksum" in schema.names:
        if schema.field("checksum").type == pa.uint32():
            encodings["checksum"] = "PLAIN"
            stored_as_is.add("checksum")
        else:
            encodings["checksum"] = "DELTA_BINARY_PACKED"
    places = map(schema.get_field_index, ROW_ORDER)
    if first.num_rows < _COMPRESSED_ROWS_MIN:
        stored_as_is = set(schema.names)
    return pq.ParquetWriter(
        where,
        schema,
        compression={name: "none" if name in stored_as_is else "zstd" for name in schema.names},
        use_dictionary=[name for name in schema.names if name not in encodings],
        column_encoding=encodings or None,
        # The reader of a page finds a flipped bit.
        write_page_checksum=True,
        # Other readers skip pages by it.
        write_page_index=True,
        sorting_columns=[pq.SortingColumn(place) for place in places] if is_sorted else None,
        # Readers would get the dictionary encoding of the writer's memory as a type.
        store_schema=False,
        **_PAGE_LIMIT,
    )


# A page has at most a megabyte. By default it also has at most 20,000 rows, and to open
# it costs as much as to fold 1,000. Earlier releases of pyarrow have no such limit.
_PAGE_LIMIT: dict[str, Any] = (
    {"max_rows_per_page": GROUP_ROWS}
    if "max_rows_per_page" in inspect.signature(pq.ParquetWriter).parameters
    else {}
)


@dataclass
class OpenChunkFile:
    """A Parquet file that is being written to `sink`, each row group a piece of it;
    `is_sorted` as in `_parquet_writer`.
    """

    name: str
    sink: Sink
    is_sorted: bool = False
    rows: int = 0
    _writer: Any = None

    def write(self, table: pa.Table) -> None:
        """Append a table as one row group."""
        if self._writer is None:
            self._writer = _parquet_writer(self.sink, table, is_sorted=self.is_sorted)
        self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self.sink.end_piece()
        self.rows += table.num_rows

    def close(self) -> None:
        """Write the footer, the last piece."""
        if self._writer is not None:
            self._writer.close()
            self.sink.end_piece()


@dataclass
class ChunkFileWriter:
    """Writes chunk files of bounded size, one after the other; all rows of a replica go
    into one file.

    `new_file` opens the next file. If `cancelled` returns True, `add` raises
    OperationInterruptedError.
    """

    new_file: Callable[[], AbstractContextManager[OpenChunkFile]]
    group_rows: int
    file_rows_max: int
    cancelled: Callable[[], bool]
    _stack: ExitStack = field(default_factory=ExitStack)
    _open: OpenChunkFile | None = None
    _schema: pa.Schema = WRITTEN_SCHEMA
    _group: list[pa.RecordBatch] = field(default_factory=list)
    _group_rows: int = 0

    def add(self, batches: Iterable[pa.RecordBatch], count: int, *, is_wide: bool = False) -> str:
        """Append a replica of `count` rows; returns the name of its file. `is_wide`: a
        checksum may have more than 32 bits.

        Raises:
            ChunkTableError: the batches do not have `count` rows in all.
            OperationInterruptedError: the export was cancelled.
        """
        taken = self._open.rows + self._group_rows if self._open else 0
        is_other = is_wide and self._schema is not _WIDE_SCHEMA
        if taken and (taken + count > self.file_rows_max or is_other):
            self._close()
        if self._open is None:
            self._open = self._stack.enter_context(self.new_file())
            self._schema = _WIDE_SCHEMA if is_wide else WRITTEN_SCHEMA
        name = self._open.name
        for batch in batches:
            if self.cancelled():
                raise OperationInterruptedError("the export was cancelled")
            count -= batch.num_rows
            self._group.append(_encoded(batch, self._schema))
            self._group_rows += batch.num_rows
            if self._group_rows >= self.group_rows:
                self._flush()
        if count:
            raise row_count_error(name)
        return name

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._close()
        else:
            self._stack.__exit__(kind, error, trace)

    def _close(self) -> None:
        self._flush()
        self._open = None
        self._stack.close()

    def _flush(self) -> None:
        if self._group and self._open is not None:
            self._open.write(pa.Table.from_batches(self._group, self._schema).unify_dictionaries())
        self._group, self._group_rows = [], 0


def _encoded(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [
        column.dictionary_encode()
        if written.type == TEXT_TYPE and not isinstance(column, pa.DictionaryArray)
        else column.cast(written.type)
        for column, written in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def has_wide_checksums(file: pq.ParquetFile) -> bool:
    """Whether a checksum in a file of chunks may have more than 32 bits."""
    if file.schema_arrow.field("checksum").type == pa.uint32():
        return False
    place = file.schema_arrow.get_field_index("checksum")
    groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
    ranges = [group.column(place).statistics for group in groups if group.num_rows]
    return not all(
        one is not None and one.has_min_max and one.min >= 0 and one.max <= CHECKSUM_MAX
        for one in ranges
    )


def row_count_error(name: str) -> ChunkTableError:
    """The error for a file whose row counts differ from those of the inventory."""
    return table_error(
        TableRefusal.ROWS,
        f"{name} does not have the rows that the inventory records",
        hint="Write the table anew with --full.",
    )
