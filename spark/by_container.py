"""Read the rows of some containers again, on a Spark cluster: those whose rows must be
sorted, those whose replicas differ, and those that changed since an earlier sweep.

    select rows of the parts  ->  exchange by group of containers  ->  judge each group

A group has about as many rows as one task sorts at a time. The rows of a larger
container form a group of their own, and are buffered on disk like all others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Self, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext

from chunktable.errors import ChunkTableError
from chunktable.files import AnyPath, Files
from runtime.disk import Disk
from spark.commits import Commit, SharedFolders
from spark.task_parts import parts_of_text
from sweep.engine import ContainerResults, LocalEngine, Revisit
from sweep.errors import EarlierRowsError
from sweep.exact import NULLABLE_ROWS
from sweep.exports import at_once
from sweep.files import read_rows
from sweep.gather import GROUP_ROWS, Gatherer, Int64s
from sweep.inputs import table_parts
from sweep.model import REPLICA_SCHEMA, Part
from sweep.pieces import StoredFile, StoredTable, TableFileWriter

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Rows and containers shuffled by one job, and so the most that a crash loses. Each job
# reads all parts; its tasks map the list of its containers into memory.
_GATHERED_ROWS_MAX = 256 << 20
_GATHERED_CONTAINERS_MAX = 8 << 20

# Times travel as integers: an unchecked one may overflow Spark's microseconds.
ROW_SCHEMA = pa.schema(
    [
        *(f.with_type(pa.int64()) if pa.types.is_timestamp(f.type) else f for f in NULLABLE_ROWS),
        # The group of containers that a row belongs to: Spark shuffles by it.
        pa.field("gathered_in", pa.int32(), nullable=False),
        # Which of the selections it is of (`selection_texts`).
        pa.field("selection", pa.int32(), nullable=False),
    ]
)

# Gets the parts of each selection.
Judge: TypeAlias = Callable[
    [LocalEngine, Sequence[Sequence[Part]], Int64s, Int64s], Iterator[ContainerResults]
]


@dataclass(frozen=True, slots=True)
class ContainerGroups:
    """Containers in ascending order, each with its approximate number of rows; group i
    begins at index `starts[i]`.
    """

    container_ids: Int64s
    rows: Int64s
    starts: Int64s

    @classmethod
    def stored(cls, path: AnyPath) -> Self:
        """Groups of about GROUP_ROWS rows of the containers in a file that
        `store_containers` wrote.
        """
        if isinstance(path, Path):
            container_ids, rows = np.load(path, mmap_mode="r")
        else:
            container_ids, rows = np.load(BytesIO(Files(Disk()).read(path)))
        _, starts = np.unique(np.cumsum(rows) // GROUP_ROWS, return_index=True)
        return cls(container_ids, rows, starts)

    def of(self, batch: pa.RecordBatch) -> "NDArray[np.int32]":
        """The group of each row."""
        firsts = self.container_ids[self.starts]
        indexes = np.searchsorted(firsts, batch["container_id"].to_numpy(), "right") - 1
        groups: NDArray[np.int32] = indexes.astype(np.int32)
        return groups

    def judge(
        self, group: int, judge: Judge, selections: int, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[ContainerResults]:
        """Judge the containers of a group. `batches` hold all of their rows in each
        selection, which are buffered on disk.
        """
        members = slice(
            self.starts[group], self.starts[group + 1] if group + 1 < len(self.starts) else None
        )
        ids, rows = self.container_ids[members], self.rows[members]
        with TemporaryDirectory(prefix="treefold-") as scratch:
            paths = [Path(scratch, f"rows-{number}.parquet") for number in range(selections)]
            with ExitStack() as stack:
                writers = [
                    stack.enter_context(pq.ParquetWriter(path, NULLABLE_ROWS)) for path in paths
                ]
                for batch in batches:
                    assert (batch["gathered_in"].to_numpy() == group).all()
                    for number, writer in enumerate(writers):
                        ours = batch.filter(pc.equal(batch["selection"], number))
                        if ours.num_rows:
                            held = pa.Table.from_batches([ours]).select(NULLABLE_ROWS.names)
                            writer.write_table(held.cast(NULLABLE_ROWS))
            engine = LocalEngine(Gatherer(Path(scratch, "spill"), threads=1))
            yield from judge(engine, [table_parts([str(p)]).parts for p in paths], ids, rows)


def store_containers(path: AnyPath, container_ids: Int64s, rows: Int64s, disk: Disk) -> None:
    """Store containers for ContainerGroups.stored.

    Raises:
        DiskError: they cannot be written.
    """
    buffer = BytesIO()
    np.save(buffer, np.array([container_ids, rows]))
    Files(disk).replace(path, buffer.getvalue())


def selection_texts(selections: Sequence[Sequence[str]]) -> list[str]:
    """The texts for `select_rows`: each has the parts of one task, and tells which
    selection they are of.
    """
    return [f"{number} {text}" for number, texts in enumerate(selections) for text in texts]


def select_rows(containers: AnyPath, text: str) -> Iterator[pa.RecordBatch]:
    """The rows (ROW_SCHEMA) of the stored containers in the parts of one task
    (spark.task_parts). Parts without any are not read: the inventory says so.

    Raises:
        ChunkTableError: a part cannot be read any more.
        EarlierRowsError: the same, of a selection after the first.
    """
    selection, _, of_parts = text.partition(" ")
    try:
        yield from _selected(ContainerGroups.stored(containers), int(selection), of_parts)
    except ChunkTableError as error:
        if selection == "0":
            raise
        raise EarlierRowsError(error.message) from error


def _selected(groups: ContainerGroups, selection: int, text: str) -> Iterator[pa.RecordBatch]:

    def select(part: Part) -> list[pa.RecordBatch]:
        return list(read_rows(part, groups.container_ids))

    parts = parts_of_text(text)
    # The rows of small exports fit in memory, those of one large part may not.
    found = chain.from_iterable(
        at_once(parts.values(), select, next(iter(parts.values())).location)
    )
    if len(parts) == 1:
        found = chain.from_iterable(read_rows(one, groups.container_ids) for one in parts.values())
    for batch in found:
        columns = [
            column.cast(field.type)
            for column, field in zip(batch.columns, ROW_SCHEMA, strict=False)
        ]
        whose = pa.repeat(pa.scalar(selection, pa.int32()), batch.num_rows)
        columns += [pa.array(groups.of(batch)), whose]
        yield pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def judge_group(
    judge: Judge,
    containers: AnyPath,
    selections: int,
    shared: SharedFolders,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Judge the stored containers of one group, and write the results to files.

    Raises:
        FolderNotSharedError: this machine does not see the folders.
        DiskError: a file cannot be written.
    """
    context = TaskContext.get()
    assert context is not None
    shared.check()
    group, count = context.partitionId(), 0
    writer = TableFileWriter(shared.places, Disk())
    for found in ContainerGroups.stored(containers).judge(group, judge, selections, batches):
        tables = {"replicas": found.replicas, "verdicts": found.verdicts}
        tables["findings"] = found.findings
        writer.add({name: table for name, table in tables.items() if name in shared.places})
        count += found.containers
    yield Commit(group, count, files=writer.close()).batch()


def sort_containers(
    engine: LocalEngine, parts: Sequence[Sequence[Part]], ids: Int64s, rows: Int64s
) -> Iterator[ContainerResults]:
    return engine.exact(parts[0], ids, rows, {})


def inspect_containers(
    replicas: Mapping[AnyPath, StoredFile],
    engine: LocalEngine,
    parts: Sequence[Sequence[Part]],
    ids: Int64s,
    rows: Int64s,
) -> Iterator[ContainerResults]:
    stored = StoredTable([], REPLICA_SCHEMA, replicas)
    return engine.inspect(parts[0], ids, rows, stored, {})


def revisit_containers(
    work: Revisit,
    changed: Mapping[AnyPath, StoredFile],
    schema: pa.Schema,
    engine: LocalEngine,
    parts: Sequence[Sequence[Part]],
    ids: Int64s,
    rows: Int64s,
) -> Iterator[ContainerResults]:
    ours, earlier = parts
    stored = StoredTable([], schema, changed)
    return engine.revisit(work, ours, earlier, (ids, rows), stored, {})


def shuffles(container_ids: Int64s, rows: Int64s) -> Iterator[tuple[Int64s, Int64s]]:
    """Containers and their rows in batches of one shuffle each."""
    batch = np.maximum(
        np.cumsum(rows) // _GATHERED_ROWS_MAX, np.arange(len(rows)) // _GATHERED_CONTAINERS_MAX
    )
    cuts = np.flatnonzero(batch[1:] != batch[:-1]) + 1
    yield from zip(np.split(container_ids, cuts), np.split(rows, cuts), strict=True)
