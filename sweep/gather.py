"""Gather all rows of some containers from many files, in bounded memory.

One pass over the parts writes the rows to spill files, each for a group of containers.
The files are then read one after the other.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from chunktable.schema import CHUNK_SCHEMA
from runtime.errors import DiskError
from sweep.files import read_rows
from sweep.model import Part

Int64s = npt.NDArray[np.int64]

# Rows that one thread sorts at a time, at about 400 bytes each.
GROUP_ROWS = 1 << 20
# Spill files open at a time.
_FILES_MAX = 256

T = TypeVar("T")
R = TypeVar("R")


class Gatherer:
    """Gathers rows and runs work in threads. Spill files are in `scratch`, and are
    removed after use.
    """

    def __init__(
        self, scratch: Path, *, threads: int | None = None, group_rows: int = GROUP_ROWS
    ) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        self.group_rows = group_rows
        self._scratch = scratch

    def single_threaded(self) -> "Gatherer":
        """A gatherer with one thread, for use inside a thread of this one."""
        return Gatherer(self._scratch, threads=1, group_rows=self.group_rows)

    def gather(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[tuple[Int64s, pa.Table]]:
        """The rows of these containers, some containers at a time, each group with its
        IDs. `rows` is the approximate number of rows of each container.

        Raises:
            DiskError: rows cannot be spilled to disk.
            ChunkTableError: a part cannot be read any more.
        """
        # Bounds the number of files; each is split again by its actual rows.
        size = max(self.group_rows, int(rows.sum()) // _FILES_MAX + 1)
        _, starts = np.unique(_groups(rows, size), return_index=True)
        firsts = container_ids[starts]
        with self._spill(len(starts)) as spill:

            def spill_part(part: Part) -> None:
                for batch in read_rows(part, container_ids):
                    if batch.num_rows:
                        spill.add(
                            np.searchsorted(firsts, batch["container_id"].to_numpy(), "right") - 1,
                            batch,
                        )

            for _ in self.map(parts, spill_part):
                pass
            for ids, held in zip(
                np.split(container_ids, starts[1:]), spill.read_and_remove(), strict=True
            ):
                yield from _split(ids, held, self.group_rows)

    def map(self, items: Iterable[T], work: Callable[[T], R]) -> Iterator[R]:
        """The results of `work` for all items, in order of completion. Takes no more
        items than there are free threads.
        """
        waiting, running = iter(items), set[Future[R]]()
        with ThreadPoolExecutor(self.threads, "sweep") as pool:
            try:
                while True:
                    running |= {
                        pool.submit(work, item)
                        for item in islice(waiting, self.threads - len(running))
                    }
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    @contextmanager
    def _spill(self, groups: int) -> Iterator["_Spill"]:
        try:
            self._scratch.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=self._scratch))
            try:
                with _Spill(folder, groups) as spill:
                    yield spill
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError as error:
            raise DiskError(
                f"cannot store rows in {self._scratch}: {error}", path=str(self._scratch)
            ) from error


class _Spill:
    """Stores rows in files, one per group."""

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
        """Append each row of a batch to the file of its group. Thread-safe."""
        order = np.argsort(group, kind="stable")
        batch = _to_spilled(batch).take(pa.array(order))
        numbers, starts = np.unique(group[order], return_index=True)
        for number, start, end in zip(
            numbers.tolist(), starts.tolist(), [*starts[1:], len(order)], strict=True
        ):
            with self._locks[number]:
                self._writers[number].write_batch(batch.slice(start, end - start))

    def read_and_remove(self) -> Iterator[pa.Table]:
        """The rows of each file, mapped into memory. Each file is removed after it was
        read, and no more rows can be added.
        """
        self._stack.close()
        for path in self._paths:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
                yield stream.read_all()
            path.unlink()


_TEXT = pa.dictionary(pa.int32(), pa.string())
# Names repeat and are half of a row, so they are stored as dictionaries.
_SPILLED = pa.schema([f.with_type(_TEXT) if f.type == pa.string() else f for f in CHUNK_SCHEMA])


def _to_spilled(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [
        column.dictionary_encode().cast(field.type)
        if field.type == _TEXT and column.type != _TEXT
        else column
        for column, field in zip(batch.columns, _SPILLED, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SPILLED)


def _split(
    container_ids: Int64s, rows: pa.Table, rows_max: int
) -> Iterator[tuple[Int64s, pa.Table]]:
    """Split containers into groups of about `rows_max` rows, with at least one
    container each. Containers without rows are included.
    """
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
            # Return the mapped file without copying it.
            yield container_ids[chosen], rows
        else:
            yield container_ids[chosen], rows.filter(pa.array(chosen[places])).unify_dictionaries()


def _groups(rows: Int64s, rows_max: int) -> Int64s:
    """The group number of each container. A group has about `rows_max` rows; a
    container with more rows forms a group by itself.
    """
    is_large = rows > rows_max
    place = np.cumsum(np.where(is_large, 0, rows)) // rows_max
    changes = np.ones(len(rows), np.bool_)
    changes[1:] = (place[1:] != place[:-1]) | is_large[1:] | is_large[:-1]
    return np.cumsum(changes) - 1
