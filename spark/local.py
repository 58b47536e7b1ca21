"""The engine of one machine: threads over the parts, and bounded memory whatever the size of a container.

Decoding Parquet and folding rows release the interpreter, so that threads use all cores. Containers whose rows have to
be sorted or compared are gathered in one pass into files, some containers in each, which are then worked on one after
the other.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merkle.errors import DiskError
from protos.chunk_table import CHUNK_SCHEMA, place_of
from spark.compare import inspect
from spark.exact import exact_replicas
from spark.files import fold_part, read_rows
from spark.large import block_ranges, inspect_large, large_replicas
from spark.model import FINDING_SCHEMA, REPLICA_SCHEMA, VERDICT_SCHEMA, Part
from spark.runs import RUN_SCHEMA
from spark.sweep import Int64s, Judged, Wave

# Rows that are sorted at a time by one thread, at some 400 bytes each.
GROUP_ROWS = 1 << 20
# A wave is stored when it has so many rows: some seconds of work, which is all that a crash costs.
WAVE_ROWS = 64 << 20
# At some 300 bytes each.
_WAVE_RUNS = 1 << 20
# Files that are open at a time while containers are gathered.
_FILES_MAX = 256

T = TypeVar("T")
R = TypeVar("R")


class LocalEngine:
    """Threads of this process; `scratch` is a folder for rows that do not fit into memory, made and removed here."""

    name = "local"

    def __init__(self, scratch: Path, *, threads: int | None = None, group_rows: int = GROUP_ROWS) -> None:
        self._scratch = scratch
        self._threads = threads or len(os.sched_getaffinity(0))
        self._group_rows = group_rows

    def fold(self, parts: Sequence[Part], store: Callable[[Wave], None], tell: Callable[[int], None]) -> None:
        """See Engine."""
        done, rows, runs = list[tuple[Part, _Done]](), 0, 0
        for part, one in self._each(parts, lambda part: (part, _fold(part))):
            tell(one.rows)
            done.append((part, one))
            rows += one.rows
            runs += one.runs.num_rows
            if rows >= WAVE_ROWS or runs >= _WAVE_RUNS:
                store(_wave(done))
                done, rows, runs = [], 0, 0
        if done:
            store(_wave(done))

    def exact(self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s) -> Iterator[Judged]:
        """See Engine."""

        def work(group: tuple[Int64s, pa.Table]) -> Judged:
            ids, held = group
            if self._is_large(ids, held):
                replicas, findings = large_replicas(block_ranges(held, self._group_rows))
            else:
                replicas, findings = exact_replicas(held)
            return Judged(replicas, VERDICT_SCHEMA.empty_table(), findings)

        yield from self._each(self._gathered(parts, container_ids, rows), work)

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[Judged]:
        """See Engine."""
        of_replica = replicas["container_id"].to_numpy()

        def work(group: tuple[Int64s, pa.Table]) -> Judged:
            ids, held = group
            theirs = replicas.filter(pa.array(np.isin(of_replica, ids)))
            if self._is_large(ids, held):
                verdicts, findings = inspect_large(block_ranges(held, self._group_rows), theirs)
            else:
                inspected = inspect(held, theirs)
                verdicts, findings = inspected.verdicts, inspected.findings
            return Judged(REPLICA_SCHEMA.empty_table(), verdicts, findings)

        yield from self._each(self._gathered(parts, container_ids, rows), work)

    def _is_large(self, container_ids: Int64s, rows: pa.Table) -> bool:
        return len(container_ids) == 1 and rows.num_rows > self._group_rows

    def _gathered(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[tuple[Int64s, pa.Table]]:
        """All rows of these containers with their IDs, some containers at a time."""
        # Few enough files, which are cut again by what they hold; the rows before a container tell its file.
        size = max(self._group_rows, int(rows.sum()) // _FILES_MAX + 1)
        _, starts = np.unique(_groups(rows, size), return_index=True)
        firsts = container_ids[starts]
        with self._spill(len(starts)) as spill:

            def gather(part: Part) -> None:
                for batch in read_rows(part, container_ids):
                    if batch.num_rows:
                        spill.add(np.searchsorted(firsts, batch["container_id"].to_numpy(), "right") - 1, batch)

            for _ in self._each(parts, gather):
                pass
            for ids, held in zip(np.split(container_ids, starts[1:]), spill.taken(), strict=True):
                yield from _cut(ids, held, self._group_rows)

    def _each(self, items: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
        """What `work` makes of the items, as it is done; no more are taken than there are threads for."""
        waiting, running = iter(items), set[Future[R]]()
        with ThreadPoolExecutor(self._threads, "sweep") as pool:
            try:
                while True:
                    running |= {pool.submit(work, item) for item in islice(waiting, self._threads - len(running))}
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    @contextmanager
    def _spill(self, groups: int) -> Iterator["_Spill"]:
        # What a killed process left behind is of no use.
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            self._scratch.mkdir(parents=True)
            with _Spill(self._scratch, groups) as spill:
                yield spill
        except OSError as error:
            raise DiskError(f"rows cannot be kept in {self._scratch}: {error}", path=str(self._scratch)) from error
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)


class _Spill:
    """Rows in files, one a group."""

    def __init__(self, folder: Path, groups: int) -> None:
        self._paths = [folder / f"{number:05}.arrows" for number in range(groups)]
        self._stack = ExitStack()
        self._locks = [Lock() for _ in range(groups)]
        self._writers = [
            self._stack.enter_context(
                pa.ipc.new_stream(self._stack.enter_context(pa.OSFile(str(path), "wb")), _SPILLED)
            )
            for path in self._paths
        ]

    def __enter__(self) -> "_Spill":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, group: Int64s, batch: pa.RecordBatch) -> None:
        """Put each row of a batch into the file of its group. Thread-safe."""
        order = np.argsort(group, kind="stable")
        batch = _compact(batch).take(pa.array(order))
        numbers, starts = np.unique(group[order], return_index=True)
        for number, start, end in zip(numbers.tolist(), starts.tolist(), [*starts[1:], len(order)], strict=True):
            with self._locks[number]:
                self._writers[number].write_batch(batch.slice(start, end - start))

    def taken(self) -> Iterator[pa.Table]:
        """All rows, file by file, mapped into memory, once all are added; a file is gone behind it."""
        self._stack.close()
        for path in self._paths:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
                yield stream.read_all()
            path.unlink()


_TEXT = pa.dictionary(pa.int32(), pa.string())
# Names repeat, and are half of a row.
_SPILLED = pa.schema([f.with_type(_TEXT) if f.type == pa.string() else f for f in CHUNK_SCHEMA])


def _compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [
        column.dictionary_encode().cast(field.type) if field.type == _TEXT and column.type != _TEXT else column
        for column, field in zip(batch.columns, _SPILLED, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SPILLED)


def _cut(container_ids: Int64s, rows: pa.Table, rows_max: int) -> Iterator[tuple[Int64s, pa.Table]]:
    """Containers that have about so many rows together, or a single one; those without rows too."""
    if rows.num_rows <= rows_max:
        yield container_ids, rows.unify_dictionaries()
        return
    of_row = rows["container_id"].to_numpy()
    places = np.searchsorted(container_ids, of_row)
    counts = np.bincount(places, minlength=len(container_ids))
    group_of = _groups(counts, rows_max)
    for group in range(int(group_of[-1]) + 1):
        chosen = group_of == group
        if np.count_nonzero(chosen) == 1 and counts[chosen][0] == rows.num_rows:
            # As it lies in the file, not copied.
            yield container_ids[chosen], rows
        else:
            yield container_ids[chosen], rows.filter(pa.array(chosen[places])).unify_dictionaries()


def _groups(rows: Int64s, rows_max: int) -> Int64s:
    """The number of each container's group: about so many rows in each, a container that has more by itself alone."""
    is_large = rows > rows_max
    place = np.cumsum(np.where(is_large, 0, rows)) // rows_max
    changes = np.ones(len(rows), np.bool_)
    changes[1:] = (place[1:] != place[:-1]) | is_large[1:] | is_large[:-1]
    return np.cumsum(changes) - 1


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of one part: runs, or containers for the exact path with the numbers of their rows."""

    rows: int
    runs: pa.Table
    findings: pa.Table
    exact: Int64s
    exact_rows: Int64s
    skipped: str


# Rows that tell how the others lie.
_PROBE_ROWS = 1 << 18
_NONE = np.empty(0, np.int64)


def _fold(part: Part) -> _Done:
    scattered = _scattered(part)
    if scattered is not None:
        ids, counts = scattered
        return _Done(part.rows, RUN_SCHEMA.empty_table(), FINDING_SCHEMA.empty_table(), ids, counts, "")
    folded = fold_part(part)
    return _Done(folded.rows, folded.runs, folded.findings, _NONE, _NONE, folded.skipped)


def _scattered(part: Part) -> tuple[Int64s, Int64s] | None:
    """The containers of a part and their rows, where hardly two rows of a replica follow each other.

    To fold such rows makes a run of each, all of which the exact path throws away.
    """
    if part.manifest is not None:
        return None
    with suppress(OSError, ValueError, KeyError, pa.ArrowException):
        filesystem, path = place_of(part.location)
        with filesystem.open_input_file(path) as source, pq.ParquetFile(source, read_dictionary=["datanode"]) as file:
            groups = list(range(part.first, part.last))
            first = next(file.iter_batches(_PROBE_ROWS, groups[:1], ["datanode", "container_id"], use_threads=False))
            nodes, ids = first["datanode"].indices.to_numpy(), first["container_id"].to_numpy()
            if 4 * np.count_nonzero((nodes[1:] != nodes[:-1]) | (ids[1:] != ids[:-1])) < len(ids):
                return None
            counts = Counter[int]()
            for batch in file.iter_batches(_PROBE_ROWS, groups, ["datanode", "container_id"], use_threads=False):
                if batch["datanode"].null_count or batch["container_id"].null_count:
                    return None
                found, rows = np.unique(batch["container_id"].to_numpy(), return_counts=True)
                counts.update(dict(zip(found.tolist(), rows.tolist(), strict=True)))
            return np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)
    # What is wrong with it, folding tells.
    return None


def _wave(done: Sequence[tuple[Part, _Done]]) -> Wave:
    return Wave(
        tuple(part.part_id for part, _ in done),
        sum(one.rows for _, one in done),
        pa.concat_tables([RUN_SCHEMA.empty_table(), *(one.runs for _, one in done)]),
        REPLICA_SCHEMA.empty_table(),
        pa.concat_tables([FINDING_SCHEMA.empty_table(), *(one.findings for _, one in done)]),
        np.concatenate([one.exact for _, one in done]),
        np.concatenate([one.exact_rows for _, one in done]),
        {part.part_id: one.skipped for part, one in done if one.skipped},
    )
