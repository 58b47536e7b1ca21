"""The port behind which a sweep is computed, and the engine of one machine.

Decoding Parquet and folding rows release the interpreter, so that threads use all
cores. Containers whose rows have to be sorted or compared are gathered first
(sweep.gather), so that memory is bounded whatever the size of a container.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.places import resolve_location
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import UsageError
from sweep.compare import inspect, inspect_large
from sweep.exact import block_ranges, exact_replicas, large_replicas
from sweep.files import fold_part, is_plain, opened_rows
from sweep.gather import Gatherer, Int64s
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, VERDICT_SCHEMA, Part
from sweep.runs import RUN_SCHEMA, full
from sweep.trees import PackedTreeFile, TreeJob, pack_part, pack_rows


@dataclass(frozen=True, slots=True)
class FoldedWave:
    """All that came of some parts, which are never folded again.

    An engine that computes whole replicas gives these instead of runs, and names in
    `exact` the containers that it cannot decide; where a container has both runs and
    replicas, the sweep decides it along the exact path.
    """

    part_ids: tuple[str, ...]
    # Rows of the chunk table that were read.
    rows: int
    # sweep.runs.RUN_SCHEMA; any order.
    runs: pa.Table
    # REPLICA_SCHEMA and FINDING_SCHEMA.
    replicas: pa.Table
    findings: pa.Table
    # Containers, and about how many rows each has.
    exact: Int64s
    exact_rows: Int64s
    # Parts (of `part_ids`) that could not be read, with why: their tables are left out
    # of the sweep.
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerResults:
    """What came of the rows of some containers, each of them whole: REPLICA_SCHEMA,
    VERDICT_SCHEMA, FINDING_SCHEMA.
    """

    replicas: pa.Table
    verdicts: pa.Table
    findings: pa.Table


class Engine(Protocol):
    """Where the work is done. Whatever an engine reads or keeps is bounded, however
    large a container is.
    """

    @property
    def name(self) -> str:
        """What the summary calls it."""
        ...

    def fold(
        self,
        parts: Sequence[Part],
        store: Callable[[FoldedWave], None],
        tell: Callable[[int], None],
    ) -> None:
        """Fold all parts, in waves of a few minutes at most, each given to `store`;
        `tell` of rows as they are read.

        All parts are of files: the volumes of this machine are made into some first. A
        part that cannot be read is no error: its wave names it.
        """
        ...

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """Replicas and findings of these containers from their sorted rows
        (sweep.exact), without verdicts.

        `rows` says about how many rows each of them has.
        """
        ...

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[ContainerResults]:
        """Verdicts and findings of these containers from their rows (sweep.compare),
        without replicas.

        `replicas` are those of these containers, whether they take part or not.
        """
        ...

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """Write the trees of all replicas that have one, file by file (sweep.trees).

        Raises:
            DiskError: one cannot be written.
            ChunkTableError: a part cannot be read any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What is asked of a sweep."""

    out: Path
    tables: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    source: TreeSource = TreeSource.TREE
    # Begin anew where a sweep of the same inputs was not finished.
    fresh: bool = False
    keep: int = 30
    # Beside the tables, all trees.
    write_trees: bool = False
    # Datanodes that were taken out of the cluster on purpose.
    gone: tuple[str, ...] = ()


def absolute(request: SweepRequest) -> SweepRequest:
    """The same with places that the next sweep finds from wherever it is started.

    Raises:
        UsageError: the folder of sweeps lies in a table.
    """

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if name and "://" not in name else name

    for name in request.tables:
        if (
            name
            and "://" not in name
            and request.out.resolve().is_relative_to(Path(name).resolve())
        ):
            raise UsageError(
                f"--out {request.out} lies in --table {name}: the next sweep would take its tables"
                " for the cluster's",
                hint="Give an --out beside it.",
            )
    return replace(request, out=request.out.absolute(), tables=tuple(map(absolute, request.tables)))


# A wave is stored when it has so many rows: some seconds of work, which is all that a
# crash costs.
WAVE_ROWS = 64 << 20

# At some 300 bytes each.
_WAVE_RUNS = 1 << 20


class LocalEngine:
    """Threads of this process."""

    name = "local"

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer

    def fold(
        self,
        parts: Sequence[Part],
        store: Callable[[FoldedWave], None],
        tell: Callable[[int], None],
    ) -> None:
        """See Engine."""
        done, rows, runs = list[tuple[Part, _Done]](), 0, 0
        for part, one in self._gatherer.each(parts, lambda part: (part, _fold(part))):
            tell(one.rows)
            done.append((part, one))
            rows += one.rows
            runs += one.runs.num_rows
            if rows >= WAVE_ROWS or runs >= _WAVE_RUNS:
                store(_wave(done))
                done, rows, runs = [], 0, 0
        if done:
            store(_wave(done))

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s
    ) -> Iterator[ContainerResults]:
        """See Engine."""

        def work(group: tuple[Int64s, pa.Table]) -> ContainerResults:
            ids, held = group
            if self._is_large(ids, held):
                replicas, findings = large_replicas(block_ranges(held, self._gatherer.group_rows))
            else:
                replicas, findings = exact_replicas(held)
            return ContainerResults(replicas, VERDICT_SCHEMA.empty_table(), findings)

        yield from self._gatherer.each(self._gatherer.gathered(parts, container_ids, rows), work)

    def inspect(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Iterator[ContainerResults]:
        """See Engine."""
        of_replica = replicas["container_id"].to_numpy()

        def work(group: tuple[Int64s, pa.Table]) -> ContainerResults:
            ids, held = group
            theirs = replicas.filter(pa.array(np.isin(of_replica, ids)))
            if self._is_large(ids, held):
                ranges = block_ranges(held, self._gatherer.group_rows)
                inspected = inspect_large(ranges, theirs)
            else:
                inspected = inspect(held, theirs)
            empty = REPLICA_SCHEMA.empty_table()
            return ContainerResults(empty, inspected.verdicts, inspected.findings)

        yield from self._gatherer.each(self._gatherer.gathered(parts, container_ids, rows), work)

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """See Engine."""
        yield from self._gatherer.each(
            job.ordered, lambda part: pack_part(job, part, self._gatherer.single_threaded(), disk)
        )
        if len(job.others):
            yield from self.other_trees(
                job, self._gatherer.gathered(job.parts, job.others, job.rows), disk
            )

    def other_trees(
        self, job: TreeJob, groups: Iterable[tuple[Int64s, pa.Table]], disk: Disk
    ) -> Iterator[PackedTreeFile]:
        """Those of the other containers, of which these are the rows in groups."""

        def work(group: tuple[int, tuple[Int64s, pa.Table]]) -> PackedTreeFile:
            number, (ids, held) = group
            return pack_rows(job, number, ids, held, self._gatherer.group_rows, disk)

        yield from self._gatherer.each(enumerate(groups), work)

    def _is_large(self, container_ids: Int64s, rows: pa.Table) -> bool:
        return len(container_ids) == 1 and rows.num_rows > self._gatherer.group_rows


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of one part: runs, or containers for the exact path with the numbers of
    their rows.
    """

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
    if _is_scattered(part):
        # What is wrong with it, folding tells.
        with suppress(ChunkTableError):
            counts, rows = _counted(part)
            # Rows that belong to no replica are a finding, which folding makes.
            if rows == part.rows:
                ids, of_ids = (
                    np.array(list(numbers), np.int64)
                    for numbers in (counts.keys(), counts.values())
                )
                return _Done(
                    part.rows,
                    RUN_SCHEMA.empty_table(),
                    FINDING_SCHEMA.empty_table(),
                    ids,
                    of_ids,
                    "",
                )
    folded = fold_part(part)
    return _Done(folded.rows, folded.runs, folded.findings, _NONE, _NONE, folded.skipped)


def _is_scattered(part: Part) -> bool:
    """Whether hardly two rows of a replica follow each other, as far as the first of
    them tell.

    To fold such rows makes a run of each, all of which the exact path throws away.
    """
    if part.manifest is not None:
        return False
    with suppress(OSError, ValueError, KeyError, pa.ArrowException):
        filesystem, path = resolve_location(part.location)
        with (
            filesystem.open_input_file(path) as source,
            pq.ParquetFile(source, read_dictionary=["datanode"]) as file,
        ):
            if not is_plain(file.schema_arrow):
                return False
            groups, names = [part.first], ["datanode", "container_id"]
            first = next(file.iter_batches(_PROBE_ROWS, groups, names, use_threads=False))
            nodes, ids = first["datanode"].indices.to_numpy(), first["container_id"].to_numpy()
            changes = np.count_nonzero((nodes[1:] != nodes[:-1]) | (ids[1:] != ids[:-1]))
            return bool(4 * changes >= len(ids))
    return False


def _counted(part: Part) -> tuple[Counter[int], int]:
    """The rows of each container, and of all.

    Every column is read, though one would do: a file that cannot be read is left out as
    long as nothing was made of the others of its table, and the exact path comes later.

    Raises:
        ChunkTableError: the part cannot be read.
    """
    counts, total = Counter[int](), 0
    with opened_rows(part) as (stretches, _):
        for rows in stretches:
            found, held = np.unique(
                full(rows.integers["container_id"], rows.count), return_counts=True
            )
            counts.update(dict(zip(found.tolist(), held.tolist(), strict=True)))
            total += rows.count
    return counts, total


def _wave(done: Sequence[tuple[Part, _Done]]) -> FoldedWave:
    return FoldedWave(
        tuple(part.part_id for part, _ in done),
        sum(one.rows for _, one in done),
        pa.concat_tables([RUN_SCHEMA.empty_table(), *(one.runs for _, one in done)]),
        REPLICA_SCHEMA.empty_table(),
        pa.concat_tables([FINDING_SCHEMA.empty_table(), *(one.findings for _, one in done)]),
        np.concatenate([one.exact for _, one in done]),
        np.concatenate([one.exact_rows for _, one in done]),
        {part.part_id: one.skipped for part, one in done if one.skipped},
    )
