"""Read chunk tables from Parquet files: fold parts to runs, and select the rows of some
containers.

Reads the exports of agents and files from other writers. Columns with a default may be
missing, integers may have any width, and text any string type. A column that is
constant by the statistics of a row group is not decoded. Memory is bounded by the size
of a batch.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.manifest import FileKind, TableFile, TableRefusal
from chunktable.pages import group_range
from chunktable.places import resolve_location
from chunktable.reader import (
    check_rows,
    find_live_replicas,
    mark_superseded,
    open_verified,
    read_inventory,
    read_manifest,
)
from chunktable.schema import CHUNK_SCHEMA, CONTAINER_SCHEMA
from sweep.columns import cast_column, check_known, check_values, to_batch
from sweep.encoded import StoredGroup, batch_of, decoded_rows, stored_group
from sweep.fragments import Int64s
from sweep.listed import ListedReplicas
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, FindingKind, Part, PartKind
from sweep.rows import TEXT, EncodedRows, Rows, rows_of
from sweep.runs import RUN_SCHEMA, join, run_pieces

# The values of columns that a table may lack; all other columns are required.
DEFAULTS: Mapping[str, object] = {
    "volume": "",
    "state": "CLOSED",
    "bcs_id": 0,
    "replica_index": 0,
    "matches": True,
    "deleted": False,
    "source": "tree",
    "generation": 0,
    "scanned_at": None,
}
REQUIRED = tuple(name for name in CHUNK_SCHEMA.names if name not in DEFAULTS)

# About 30 MB of arrays, which is at least a page of each column.
_BATCH_ROWS = 1 << 18
_KINDS = (
    # All readers widen 32 bits without sign to 64.
    lambda kind: pa.types.is_signed_integer(kind) or pa.types.is_uint32(kind),
    pa.types.is_boolean,
    pa.types.is_timestamp,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
)
# Types of columns whose statistics are exact.
_EXACT = (
    pa.types.is_signed_integer,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_timestamp,
)
# Making one takes as long as folding some hundred rows.
_NO_RUNS, _NO_REPLICAS, _NO_FINDINGS = (
    schema.empty_table() for schema in (RUN_SCHEMA, REPLICA_SCHEMA, FINDING_SCHEMA)
)
# Stands for a null container ID; a table with such rows is refused.
_NO_CONTAINER = 0


@dataclass(frozen=True, slots=True)
class PartFold:
    """The result of folding one part."""

    # RUN_SCHEMA, REPLICA_SCHEMA and FINDING_SCHEMA. A replica of an export that the
    # part has whole is in `replicas`.
    runs: pa.Table
    replicas: pa.Table
    findings: pa.Table
    # Number of rows read.
    rows: int
    # Why the part could not be read; "" if it could. A replica may continue in another
    # part, so the caller must leave out the whole table.
    skipped: str = ""


def fold_part(
    part: Part, store: Callable[[Mapping[str, pa.Table]], None] | None = None
) -> PartFold:
    """Fold a part of a file to runs and replicas, without replicas that the export has
    superseded.

    With `store` the tables go there by name, some rows at a time, and those returned
    are empty: memory is bounded for any part. An unreadable part yields a finding and
    nothing else; what was stored of it does not count.
    """
    assert part.kind is PartKind.FILE
    runs, replicas = list[pa.Table](), list[pa.Table]()
    try:
        with _open(part) as reader:
            for whole, others in reader.folded():
                if store is not None:
                    store({"runs": others, "replicas": whole})
                    continue
                if others.num_rows:
                    runs.append(others)
                replicas.append(whole)
            reader.check_replicas()
    except ChunkTableError as error:
        finding = unreadable_finding(error.message)
        return PartFold(_NO_RUNS, _NO_REPLICAS, finding, 0, error.message)
    joined = join(pa.concat_tables(runs)) if runs else _NO_RUNS
    whole = pa.concat_tables(replicas) if replicas else _NO_REPLICAS
    return PartFold(joined, whole, _NO_FINDINGS, reader.rows)


def read_rows(part: Part, container_ids: Int64s) -> Iterator[pa.RecordBatch]:
    """The rows (CHUNK_SCHEMA) of these containers in a part that could be folded,
    without superseded rows. `container_ids` must ascend.

    Raises:
        ChunkTableError: the part cannot be read any more.
    """
    assert part.kind is PartKind.FILE
    held, entry = None, None
    if part.manifest is not None:
        entry = _export_entry(part)
        inventory = _of_volumes(part, entry[1])
        inventory = inventory.filter(
            pc.is_in(inventory["container_id"], pa.array(container_ids, pa.int64()))
        )
        if not inventory.num_rows:
            # Do not open the file: verifying it would read all of it.
            return
        held = find_live_replicas(inventory, _name(part))
    with _open(part, entry) as reader:
        for batch in reader.batches(container_ids):
            if held is not None:
                batch = batch.filter(pa.array(~mark_superseded(batch, held)))
            if batch.num_rows:
                yield batch


def is_readable(part: Part, container_ids: Int64s) -> bool:
    """Whether a part of an export still has the rows of these containers, as its
    manifest recorded them.
    """
    try:
        entry = _export_entry(part)
        ids = entry[1]["container_id"]
        if pc.any(pc.is_in(ids, pa.array(container_ids, pa.int64()))).as_py():
            with _open(part, entry) as reader:
                reader.check_bytes(container_ids)
    except ChunkTableError:
        return False
    return True


def is_plain(schema: pa.Schema) -> bool:
    """Whether a table's columns have the types of CHUNK_SCHEMA, in any width. Readers
    convert other types in different ways.
    """
    for field in CHUNK_SCHEMA:
        if field.name in schema.names:
            kind = schema.field(field.name).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not any(is_kind(kind) and is_kind(field.type) for is_kind in _KINDS):
                return False
    return True


@contextmanager
def open_rows(part: Part) -> Iterator[tuple[Iterator[Rows], pa.Table | None]]:
    """Open a part that could be folded: all of its rows, including superseded ones, and
    the inventory of its file if it has a manifest.

    Raises:
        ChunkTableError: the part cannot be read any more; also while rows are read.
    """
    assert part.kind is PartKind.FILE
    with _open(part) as reader:
        inventory = None
        if part.manifest is not None:
            inventory = reader.inventory().cast(CONTAINER_SCHEMA)
        yield reader.stretches(), inventory


class _Reader:
    """Reads the row groups of one part."""

    def __init__(
        self,
        part: Part,
        source: pa.NativeFile,
        file: pq.ParquetFile,
        inventory: pa.Table | None,
    ) -> None:
        # The number of rows read so far.
        self.rows = 0
        self._part = part
        self._source = source
        self._file = file
        # Each access to the property makes it anew.
        self._schema = file.schema_arrow
        self._inventory = inventory
        self._groups = _groups(part, file.metadata)
        self._listed = None if inventory is None else ListedReplicas.of(inventory, part.volumes)
        self._column_indexes = _column_indexes(file.metadata)
        missing = [column for column in REQUIRED if column not in self._column_indexes]
        if missing:
            raise _unreadable(
                TableRefusal.SCHEMA, f"{part.location} has no column {', '.join(missing)}"
            )
        names = Counter(self._schema.names)
        twice = [column for column in CHUNK_SCHEMA.names if names[column] > 1]
        if twice:
            raise _unreadable(
                TableRefusal.SCHEMA, f"{part.location} has more than one column {', '.join(twice)}"
            )
        if inventory is not None and "volume" not in self._column_indexes:
            raise _unreadable(TableRefusal.SCHEMA, f"{part.location} has no column volume")

    def inventory(self) -> pa.Table:
        """The replicas that the export lists in this file, without those of volumes
        that another export superseded.
        """
        assert self._inventory is not None
        return _of_volumes(self._part, self._inventory)

    def folded(self) -> Iterator[tuple[pa.Table, pa.Table]]:
        """The replicas (REPLICA_SCHEMA) that this part has whole, and the runs
        (RUN_SCHEMA) of the others, some at a time. Of an export, only those that it
        lists in this file.
        """
        if self._listed is not None:
            yield from self._listed.settled(self.stored_rows())
            return
        for piece in run_pieces(self.stored_rows()):
            yield _NO_REPLICAS, piece

    def check_replicas(self) -> None:
        """Check, after the part was read, that the whole file, not only the part, has
        as many rows of each replica as the inventory says. The first part of a file
        does it for the others.

        Raises:
            ChunkTableError: it has not.
        """
        if self._listed is None or self._part.first:
            return
        if self._part.last < self._file.metadata.num_rows:
            self._count_others()
        if wrong := self._listed.wrong():
            raise _unreadable(TableRefusal.ROWS, f"{self._part.location} has {wrong}")

    def _count_others(self) -> None:
        """Count the rows of the row groups that are not of this part.

        Those parts verify them. Here two columns are read, with the checksums of their
        pages: verifying would read the whole file again.
        """
        assert self._listed is not None
        others = [i for i in range(self._file.num_row_groups) if i not in self._groups]
        names = ["volume", "container_id"]
        filesystem, path = resolve_location(self._part.location)
        with filesystem.open_input_file(path) as source:
            file = _parquet_file(source, self._file.metadata)
            for batch in file.iter_batches(_BATCH_ROWS, others, names, use_threads=False):
                volumes = cast_column(batch["volume"], CHUNK_SCHEMA.field("volume"))
                if not pa.types.is_dictionary(volumes.type):
                    volumes = volumes.dictionary_encode()
                numbers = cast_column(batch["container_id"], CHUNK_SCHEMA.field("container_id"))
                ids = numbers.fill_null(_NO_CONTAINER).to_numpy()
                codes = volumes.indices.fill_null(-1).to_numpy()
                # Stretches of equal keys are few in files that agents wrote.
                changes = (ids[1:] != ids[:-1]) | (codes[1:] != codes[:-1])
                starts = np.flatnonzero(np.r_[True, changes])
                held = volumes.take(pa.array(starts))
                places = self._listed.places(held, pa.array(ids[starts]))
                self._listed.count(places, np.diff(starts, append=len(ids)))

    def stored_rows(self) -> Iterator[Rows | EncodedRows]:
        """All rows of the part: those of an export's row group as they are stored,
        where our kernels know it, others batch by batch.
        """
        for group in self._groups:
            stored = self._stored(group)
            rows = None if stored is None else stored.rows()
            if rows is None:
                yield from self._arrays(group)
                continue
            self.rows += rows.count
            check_known(self._part.location, {n: t.array() for n, t in rows.text.items()})
            yield rows

    def stretches(self) -> Iterator[Rows]:
        """All rows of the part, batch by batch."""
        for rows in self.stored_rows():
            if isinstance(rows, EncodedRows):
                yield from decoded_rows(rows, _BATCH_ROWS)
            else:
                yield rows

    def _arrays(self, group: int) -> Iterator[Rows]:
        for columns, count in self._read(group):
            self.rows += count
            check_values(self._part.location, columns)
            if count:
                yield rows_of(columns, count)

    def _stored(self, group: int) -> StoredGroup | None:
        """A row group of an export; see `stored_group`."""
        if self._inventory is None:
            return None
        indexes, metadata = self._column_indexes, self._file.metadata
        return stored_group(self._source, metadata, group, indexes, self._constants(group))

    def batches(self, container_ids: Int64s) -> Iterator[pa.RecordBatch]:
        """The rows of these containers."""
        for group in self._groups:
            if not self._may_hold(group, container_ids):
                continue
            stored = self._stored(group)
            if stored is not None and not stored.may_hold(container_ids):
                continue
            encoded = None if stored is None else stored.rows(container_ids)
            if encoded is not None:
                yield from map(batch_of, decoded_rows(encoded, _BATCH_ROWS, container_ids))
                continue
            for columns, count in self._read(group):
                rows = _rows_of_containers(columns["container_id"], count, container_ids)
                if len(rows):
                    # Select before expanding constant columns: the rows may be few.
                    taken = {
                        n: c if len(c) < count else c.take(pa.array(rows))
                        for n, c in columns.items()
                    }
                    yield to_batch(taken, len(rows))

    def check_bytes(self, container_ids: Int64s) -> None:
        """Read the row groups that may have rows of these containers: a large file is
        verified as it is read.

        Raises:
            ChunkTableError: one does not match its checksum.
        """
        for group in self._groups:
            if self._may_hold(group, container_ids):
                first, end = group_range(self._file.metadata, group)
                self._source.seek(first)
                self._source.read_buffer(end - first)

    def _may_hold(self, group: int, container_ids: Int64s) -> bool:
        """Whether a row group may have rows of these containers, by its statistics."""
        range_ = self._range(group, "container_id")
        if range_ is None:
            return len(container_ids) > 0
        first, end = (
            np.searchsorted(container_ids, range_[0]),
            np.searchsorted(container_ids, range_[1], "right"),
        )
        return bool(first < end)

    def _read(self, group: int) -> Iterator[tuple[dict[str, pa.Array], int]]:
        """The batches of a row group, each with its number of rows. A constant column
        has a single entry.
        """
        constants = self._constants(group)
        wanted = [name for name in CHUNK_SCHEMA.names if name not in constants]
        for batch in self._file.iter_batches(_BATCH_ROWS, [group], wanted, use_threads=False):
            columns = {
                name: cast_column(batch.column(name), CHUNK_SCHEMA.field(name)) for name in wanted
            }
            yield constants | columns, batch.num_rows

    def _constants(self, group: int) -> dict[str, pa.Array]:
        """The columns that have the same value in all rows of a row group by its
        statistics, or that the file lacks, with a single entry each.
        """
        constants: dict[str, pa.Array] = {}
        for field in CHUNK_SCHEMA:
            if field.name not in self._column_indexes:
                constants[field.name] = pa.array([DEFAULTS[field.name]], field.type)
            elif (value := self._constant(group, field.name)) is not None:
                constants[field.name] = cast_column(
                    pa.array([value], self._schema.field(field.name).type), field
                )
        return constants

    def _constant(self, group: int, name: str) -> object:
        """The value of a column that is constant in a row group by its statistics;
        otherwise None.
        """
        range_ = self._range(group, name)
        return range_[0] if range_ is not None and range_[0] == range_[1] else None

    def _range(self, group: int, name: str) -> tuple[Any, Any] | None:
        """The least and the greatest value of a column; None if it has nulls or its
        statistics are not exact.
        """
        kind = self._schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        # pyarrow returns statistics of unsigned integers as signed; those of other
        # types may be rounded.
        if not any(is_exact(kind) for is_exact in _EXACT):
            return None
        statistics = (
            self._file.metadata.row_group(group).column(self._column_indexes[name]).statistics
        )
        if statistics is None or not (
            statistics.has_min_max and statistics.has_null_count and not statistics.null_count
        ):
            return None
        # pyarrow returns times as datetimes, which end at the year 9999.
        with suppress(OverflowError, ValueError):
            return statistics.min, statistics.max
        return None


def _rows_of_containers(column: pa.Array, count: int, container_ids: Int64s) -> Int64s:
    """The indexes of a batch's rows that belong to these containers. `column` has
    `count` entries, or one if it is constant. Each stretch is looked up once.
    """
    held = column.fill_null(_NO_CONTAINER).to_numpy()
    starts = np.flatnonzero(np.r_[True, held[1:] != held[:-1]])
    lengths = np.diff(np.r_[starts, len(held)]) if len(held) == count else np.array([count])
    return np.flatnonzero(np.repeat(np.isin(held[starts], container_ids), lengths))


@contextmanager
def _open(part: Part, entry: "_ExportEntry | None" = None) -> Iterator[_Reader]:
    """Open a part; `entry` is its _export_entry, if that was read before."""
    if entry is None and part.manifest is not None:
        entry = _export_entry(part)
    file_, inventory = entry or (None, None)
    try:
        with _source(part, file_) as source:
            metadata = pq.read_metadata(source)
            if file_ is not None:
                check_rows(part.location, found=metadata.num_rows, recorded=file_.rows)
            yield _Reader(part, source, _parquet_file(source, metadata), inventory)
    # For a damaged file or a failed cast pyarrow raises ArrowInvalid, a ValueError, or
    # another ArrowException.
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(
            TableRefusal.UNREADABLE, f"{part.location} cannot be read: {error}"
        ) from error


def _parquet_file(source: pa.NativeFile, metadata: pq.FileMetaData) -> pq.ParquetFile:
    """The open file, which returns text as dictionaries."""
    kinds = {
        name: metadata.schema.column(place).physical_type
        for name, place in _column_indexes(metadata).items()
    }
    text = [name for name in TEXT if kinds.get(name) == "BYTE_ARRAY"]
    return pq.ParquetFile(
        source, metadata=metadata, read_dictionary=text, page_checksum_verification=True
    )


def _source(part: Part, file: TableFile | None) -> AbstractContextManager[pa.NativeFile]:
    """The file of a part, verified if it is that of an export."""
    filesystem, path = resolve_location(part.location)
    if file is not None:
        in_parts = part.first > 0 or part.last < file.rows
        return open_verified(filesystem, path.rpartition("/")[0], file, in_parts=in_parts)
    opened: AbstractContextManager[pa.NativeFile] = filesystem.open_input_file(path)
    return opened


_ExportEntry: TypeAlias = tuple[TableFile, pa.Table]


def _export_entry(part: Part) -> _ExportEntry:
    """The manifest's entry for a part's file, and the replicas that the inventory lists
    in it.

    Raises:
        ChunkTableError: the manifest or the inventory cannot be read.
    """
    assert part.manifest is not None
    filesystem, path = resolve_location(part.manifest)
    manifest, name = part.export or read_manifest(filesystem, path), _name(part)
    file = next((file for file in manifest.of_kind(FileKind.CHUNKS) if file.name == name), None)
    if file is None:
        raise _unreadable(TableRefusal.FILE_MISSING, f"{part.manifest} does not name {name}")
    inventory = read_inventory(filesystem, path.rpartition("/")[0], manifest, encoded=True)
    # Filtering copies, and the inventory of a volume of small replicas is large.
    if not file.rows or sum(one.rows > 0 for one in manifest.of_kind(FileKind.CHUNKS)) > 1:
        inventory = inventory.filter(pc.equal(inventory["file"], name))
    return file, inventory


def _name(part: Part) -> str:
    return resolve_location(part.location)[1].rpartition("/")[2]


def _groups(part: Part, metadata: pq.FileMetaData) -> Sequence[int]:
    """The row groups of a part."""
    if part.manifest is None:
        return range(part.first, part.last)
    groups = range(metadata.num_row_groups)
    starts = accumulate((metadata.row_group(group).num_rows for group in groups), initial=0)
    return [
        group
        for group, start in zip(groups, starts, strict=False)
        if part.first <= start < part.last
    ]


def _column_indexes(metadata: pq.FileMetaData) -> dict[str, int]:
    """The indexes of the columns of CHUNK_SCHEMA in a file, which may have others,
    also nested ones.
    """
    paths = {metadata.schema.column(place).path: place for place in range(metadata.num_columns)}
    return {name: paths[name] for name in CHUNK_SCHEMA.names if name in paths}


def _of_volumes(part: Part, inventory: pa.Table) -> pa.Table:
    """The replicas of an inventory that are in the part's volumes."""
    if part.volumes is None:
        return inventory
    volumes = pa.array(part.volumes, pa.string())
    return inventory.filter(pc.is_in(inventory["volume"], value_set=volumes))


def _unreadable(refusal: TableRefusal, message: str) -> ChunkTableError:
    return ChunkTableError(refusal.value, message)


def unreadable_finding(detail: str) -> pa.Table:
    """One row of FINDING_SCHEMA: an input that cannot be read; `detail` says why."""
    nothing: list[str] = []
    row = {
        "kind": FindingKind.UNREADABLE.value,
        "lacking": nothing,
        "sources": nothing,
        "detail": detail,
    }
    return pa.Table.from_pylist([row], FINDING_SCHEMA)
