"""Write the Parquet files of a chunk table, in row groups and files of bounded size."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import (
    TableRefusal,
)
from chunktable.schema import (
    CHUNK_SCHEMA,
)
from runtime.errors import OperationInterruptedError

# What a reader that streams holds at once, and skips at once by its statistics.
GROUP_ROWS = 1 << 20
# Some 80 MB: enough files for a cluster's tasks, few enough to open.
FILE_ROWS_MAX = 16 * GROUP_ROWS
TEXT_TYPE = pa.dictionary(pa.int32(), pa.string())
# As it is written: a text that is the same in all rows is one entry and a number a row.
# Readers see plain text.
WRITTEN_SCHEMA = pa.schema(
    [f.with_type(TEXT_TYPE) if f.type == pa.string() else f for f in CHUNK_SCHEMA]
)


def parquet_writer(where: object, schema: pa.Schema) -> pq.ParquetWriter:
    """A writer of one file of a table into a path or a stream, so that it is fast to
    read.

    Nearly all columns repeat themselves, and dictionaries of them are read several
    times as fast as their values; checksums never do, and are read three times as fast
    packed as differences, which Spark and others know too. Text in `schema` may be
    dictionaries.
    """
    packed = {name: "DELTA_BINARY_PACKED" for name in schema.names if name == "checksum"}
    return pq.ParquetWriter(
        where,
        schema,
        compression="zstd",
        use_dictionary=[name for name in schema.names if name not in packed],
        column_encoding=packed or None,
        # A flipped bit in a file is found by who reads the page.
        write_page_checksum=True,
        # Whether text came as dictionaries is nobody's business.
        store_schema=False,
    )


@dataclass
class OpenChunkFile:
    """A Parquet file under way."""

    name: str
    writer: Any
    rows: int = 0

    def write(self, table: pa.Table) -> None:
        """Append a table as one row group."""
        self.writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self.rows += table.num_rows


@dataclass
class ChunkFileWriter:
    """Chunk files of bounded size, one after the other, a replica in one piece in one
    of them.
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
        """Put a replica of so many rows behind the one before; the name of its file."""
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
            raise too_few_rows(name)
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


def too_few_rows(name: str) -> ChunkTableError:
    return ChunkTableError(
        TableRefusal.ROWS.value,
        f"{name} has not the rows that the inventory says",
        hint="Write the table anew with --full.",
    )
