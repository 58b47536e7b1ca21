"""Write the Parquet files of a chunk table, bounding row groups and files."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import TableRefusal, table_error
from chunktable.schema import CHUNK_SCHEMA
from runtime.errors import OperationInterruptedError

# A streaming reader holds one row group at a time and skips groups by statistics.
GROUP_ROWS = 1 << 20
# About 80 MB: enough files to share among a cluster's tasks, few enough to open.
FILE_ROWS_MAX = 16 * GROUP_ROWS
TEXT_TYPE = pa.dictionary(pa.int32(), pa.string())
# The schema in memory before writing: text that repeats is one dictionary entry and a
# number per row. Readers get plain text.
WRITTEN_SCHEMA = pa.schema(
    [f.with_type(TEXT_TYPE) if f.type == pa.string() else f for f in CHUNK_SCHEMA]
)


def parquet_writer(where: object, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of one file of a table to a path or stream, encoded to be read fast.

    The values of nearly all columns repeat: with dictionaries they are read several
    times as fast. Checksums do not repeat: packed as differences they are read three
    times as fast, by Spark and others too. Text in `schema` may be dictionary-encoded.
    """
    packed = {name: "DELTA_BINARY_PACKED" for name in schema.names if name == "checksum"}
    return pq.ParquetWriter(
        where,
        schema,
        compression="zstd",
        use_dictionary=[name for name in schema.names if name not in packed],
        column_encoding=packed or None,
        # The reader of a page finds a flipped bit.
        write_page_checksum=True,
        # Readers would get the dictionary encoding of the writer's memory as a type.
        store_schema=False,
    )


@dataclass
class OpenChunkFile:
    """A Parquet file that is being written."""

    name: str
    writer: Any
    rows: int = 0

    def write(self, table: pa.Table) -> None:
        """Append a table as one row group."""
        self.writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self.rows += table.num_rows


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
    _group: list[pa.RecordBatch] = field(default_factory=list)
    _group_rows: int = 0

    def add(self, batches: Iterable[pa.RecordBatch], count: int) -> str:
        """Append a replica of `count` rows; returns the name of its file.

        Raises:
            ChunkTableError: the batches do not have `count` rows in all.
            OperationInterruptedError: the export was cancelled.
        """
        taken = self._open.rows + self._group_rows if self._open else 0
        if taken and taken + count > self.file_rows_max:
            self._close()
        if self._open is None:
            self._open = self._stack.enter_context(self.new_file())
        name = self._open.name
        for batch in batches:
            if self.cancelled():
                raise OperationInterruptedError("the export was cancelled")
            count -= batch.num_rows
            self._group.append(_encoded(batch))
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
            self._open.write(
                pa.Table.from_batches(self._group, WRITTEN_SCHEMA).unify_dictionaries()
            )
        self._group, self._group_rows = [], 0


def _encoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [
        column.dictionary_encode()
        if written.type == TEXT_TYPE and not isinstance(column, pa.DictionaryArray)
        else column
        for column, written in zip(batch.columns, WRITTEN_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=WRITTEN_SCHEMA)


def row_count_error(name: str) -> ChunkTableError:
    """The error for a file whose row counts differ from those of the inventory."""
    return table_error(
        TableRefusal.ROWS,
        f"{name} does not have the rows that the inventory records",
        hint="Write the table anew with --full.",
    )
