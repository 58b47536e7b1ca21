"""The port of an engine, which computes the stages of a sweep, and the local engine.

The local engine uses threads: decoding Parquet and folding rows release the GIL.
Containers whose rows must be sorted or compared are gathered first (sweep.gather),
which bounds memory for containers of any size.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from chunktable.errors import ChunkTableError
from chunktable.files import AnyPath, is_inside, path_of, real_path
from chunktable.places import resolve_location
from chunktable.schema import CHUNK_SCHEMA
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import UsageError
from sweep.compare import inspect, inspect_large
from sweep.errors import EarlierRowsError
from sweep.exact import block_ranges, exact_replicas, large_replicas
from sweep.exports import ExportWork, here
from sweep.files import is_plain, open_rows
from sweep.gather import Gatherer, Int64s
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, REQUEST_SCHEMA, VERDICT_SCHEMA, Part
from sweep.pieces import RANGE_ROWS, Range, StoredFile, StoredTable, TablePlace
from sweep.rows import repeat
from sweep.runs import RUN_SCHEMA
from sweep.stages import ContainerStage, requests
from sweep.totals import SweepTotals
from sweep.trees import PackedTreeFile, TreeJob, pack_part, pack_rows
from sweep.whole_exports import fold_export


@dataclass(frozen=True, slots=True)
class FoldedWave:
    """The complete results of some parts, stored together: these parts are not folded
    again.

    `replicas` are those that are whole; the others have runs. `requested` lists the
    containers that need their rows sorted.
    """

    part_ids: tuple[str, ...]
    # Number of rows of the chunk table that were read.
    rows: int
    # sweep.runs.RUN_SCHEMA, in any order.
    runs: pa.Table
    # REPLICA_SCHEMA and FINDING_SCHEMA.
    replicas: pa.Table
    findings: pa.Table
    # REQUEST_SCHEMA.
    requested: pa.Table
    # More rows of these tables, by name: durable files in the places that `fold` got.
    files: Mapping[str, Sequence[StoredFile]] = field(default_factory=dict)
    # The parts that could not be read, by part ID, with the reason. The sweep leaves
    # out their whole tables.
    skipped: Mapping[str, str] = field(default_factory=dict)
    # For the summary: what the engine could not do as it should have.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerResults:
    """The results of some containers, from all rows of each: tables of REPLICA_SCHEMA,
    VERDICT_SCHEMA and FINDING_SCHEMA.
    """

    replicas: pa.Table
    verdicts: pa.Table
    findings: pa.Table
    # The number of containers.
    containers: int
    # More rows of these tables, by name: durable files in their places.
    files: Mapping[str, Sequence[StoredFile]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What a stage returned for one range of containers: by table, the rows, or the
    durable file that has them; and the totals of both.
    """

    range: Range
    tables: Mapping[str, pa.Table]
    files: Mapping[str, StoredFile]
    totals: SweepTotals


# Where an engine may write files of its results, by table.
Places = Mapping[str, TablePlace]


class Revisit(Protocol):
    """Finds what changed in some containers since an earlier sweep. It can be
    pickled.
    """

    def __call__(self, earlier: pa.Table, rows: pa.Table, changed: pa.Table) -> pa.Table:
        """The findings (FINDING_SCHEMA) of some containers, from all of their rows in
        the earlier sweep and in this one (CHUNK_SCHEMA, in any order), and from the
        rows about them in the table `changed` of Engine.revisit.
        """
        ...


class Engine(Protocol):
    """Computes the stages of a sweep.

    Memory is bounded for containers of any size. `parts` are of PartKind.FILE: the
    sweep copies volumes into files first. Container IDs ascend. Tables are returned
    piece by piece, in any order; each container is in one piece. An engine returns
    rows, or files that its tasks wrote to `places`: then this process holds no rows.
    """

    @property
    def name(self) -> str:
        """The engine's name in the summary."""
        ...

    @property
    def range_rows(self) -> int:
        """About the number of rows of one range in `by_range`."""
        ...

    def fold(
        self,
        parts: Sequence[Part],
        places: Places,
        store: Callable[[FoldedWave], None],
        advance: Callable[[int], None],
    ) -> None:
        """Fold all parts, in waves that take a few minutes at most.

        Calls `store` once per wave, and `advance` with the number of rows read since
        the last call. An unreadable part is not an error; its wave names it in
        `skipped`.

        Raises:
            DiskError: rows or results cannot be stored.
        """
        ...

    def by_range(
        self,
        stage: ContainerStage,
        inputs: Mapping[str, StoredTable],
        wanted: Sequence[Range],
        places: Places,
    ) -> Iterator[RangeResult]:
        """Run a stage for each of these ranges of containers, in their order. A range
        without rows may have no result.

        Raises:
            DiskError: an input cannot be read, or results cannot be stored.
        """
        ...

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, places: Places
    ) -> Iterator[ContainerResults]:
        """The replicas and findings of these containers, computed from their sorted
        rows (sweep.exact); `verdicts` is empty.

        `rows` is the approximate number of rows of each container.

        Raises:
            DiskError: gathered rows cannot be stored.
            ChunkTableError: a part cannot be read any more.
        """
        ...

    def inspect(
        self,
        parts: Sequence[Part],
        container_ids: Int64s,
        rows: Int64s,
        replicas: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """The verdicts and findings of these containers, computed from their rows
        (sweep.compare); the table `replicas` of the results is empty.

        `rows` is the approximate number of rows of each container. `replicas`
        (REPLICA_SCHEMA) has all replicas of these containers, including those that are
        not compared, and perhaps of others.

        Raises:
            DiskError: gathered rows cannot be stored.
            ChunkTableError: a part cannot be read any more.
        """
        ...

    def revisit(
        self,
        work: Revisit,
        parts: Sequence[Part],
        earlier: Sequence[Part],
        requested: tuple[Int64s, Int64s],
        changed: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """The findings of `work` about these containers; the other tables of the
        results are empty. `earlier` are the parts of the earlier sweep.

        `requested` are the containers, and the approximate number of rows of each.
        `changed` has a column container_id, and may have rows of other containers.

        Raises:
            DiskError: gathered rows cannot be stored.
            ChunkTableError: a part cannot be read any more.
            EarlierRowsError: an earlier part cannot be read any more.
        """
        ...

    def for_each(self, work: ExportWork, texts: Sequence[str]) -> Iterator[pa.Table]:
        """What `work` returns for each of many texts, in any order. It mostly waits for
        storage, so it is done for many at a time.

        Raises:
            ReconcileError: as the work raises it, or the engine has failed.
        """
        ...

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """Write the trees of all replicas that have one; returns each file once it is
        durable (sweep.trees).

        Raises:
            DiskError: a file cannot be written.
            ChunkTableError: a part cannot be read any more.
        """
        ...


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What to sweep and where to store the result."""

    out: AnyPath
    tables: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    source: TreeSource = TreeSource.TREE
    # Start over, even if an unfinished sweep of the same inputs could be resumed.
    fresh: bool = False
    # Number of complete sweeps that stay in `out`.
    keep: int = 30
    # Write all trees as well as the tables.
    write_trees: bool = False
    # Datanodes that were removed from the cluster on purpose.
    gone: tuple[str, ...] = ()
    # How many replicas each container must have (sweep.ledger.REQUIRED_SCHEMA), where
    # SCM says it.
    required: pa.Table | None = None


def absolute(request: SweepRequest) -> SweepRequest:
    """The request with absolute paths, which a sweep started in another folder can
    resume.

    Raises:
        UsageError: `out` is inside one of the tables, or a table is a volume.
    """

    def absolute(name: str) -> str:
        return str(Path(name).absolute()) if name and "://" not in name else name

    for name in request.tables:
        place = path_of(name) if name else None
        if isinstance(place, Path):
            _refuse_volumes(name, place)
        if place and is_inside(request.out, place):
            raise UsageError(
                f"--out {request.out} is inside --table {name}: the next sweep would read its own"
                " results as a chunk table",
                hint="Choose an --out folder outside the table.",
            )
    out = request.out.absolute() if isinstance(request.out, Path) else request.out
    return replace(request, out=out, tables=tuple(map(absolute, request.tables)))


def _refuse_volumes(name: str, place: Path) -> None:
    """Refuse a folder that is a volume of a datanode, is in one, or has some."""
    place = real_path(place)
    is_root = (place / "hdds" / "VERSION", place / "VERSION")
    above = [one for one in (place, *place.parents[:_ABOVE_MAX]) if one.name == "hdds"]
    volumes = [one.parent for one in above if os.path.isfile(one / "VERSION")]
    relation = "is" if place.name == "hdds" else "is in"
    if not volumes and any(map(os.path.isfile, is_root)):
        volumes, relation = [place], "is"
    if not volumes:
        # A folder that cannot be listed is skipped by the sweep, with the reason.
        with suppress(OSError), os.scandir(place) as entries:
            held = [Path(one) for one in islice(entries, _BELOW_MAX)]
            volumes = sorted(one for one in held if os.path.isfile(one / "hdds" / "VERSION"))
        relation = "has"
    if volumes:
        raise UsageError(
            f"--table {name} {relation} a volume of a datanode, not a chunk table",
            hint=f"Use {' '.join(f'--volume {one}' for one in volumes)}.",
        )


# Folders from a table up to `hdds`: hdds/CID/current/containerDir0 has three.
_ABOVE_MAX = 3
# Entries of a table that are searched for volumes. The folder of a datanode has few; a
# folder of exports may have thousands, and each costs a request of a remote mount.
_BELOW_MAX = 100

# Rows after which a wave is stored. A crash costs at most one wave, which is some
# seconds of work.
WAVE_ROWS = 64 << 20

# Runs after which a wave is stored; each takes about 300 bytes of memory.
_WAVE_RUNS = 1 << 20


class LocalEngine:
    """An engine that uses the threads of this process."""

    name = "local"
    range_rows = RANGE_ROWS

    def __init__(self, gatherer: Gatherer) -> None:
        self._gatherer = gatherer

    def fold(
        self,
        parts: Sequence[Part],
        places: Places,
        store: Callable[[FoldedWave], None],
        advance: Callable[[int], None],
    ) -> None:
        """See Engine."""
        results, rows, runs = list[tuple[Part, _PartResult]](), 0, 0
        for part, result in self._gatherer.map(parts, lambda part: (part, _fold(part))):
            advance(result.rows)
            results.append((part, result))
            rows += result.rows
            runs += result.runs.num_rows + result.replicas.num_rows
            if rows >= WAVE_ROWS or runs >= _WAVE_RUNS:
                store(_wave(results))
                results, rows, runs = [], 0, 0
        if results:
            store(_wave(results))

    def by_range(
        self,
        stage: ContainerStage,
        inputs: Mapping[str, StoredTable],
        wanted: Sequence[Range],
        places: Places,
    ) -> Iterator[RangeResult]:
        """See Engine."""
        for one in wanted:
            tables = stage({name: table.read(one) for name, table in inputs.items()})
            yield RangeResult(one, tables, {}, SweepTotals.of(tables))

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, places: Places
    ) -> Iterator[ContainerResults]:
        """See Engine."""

        def work(group: tuple[Int64s, pa.Table]) -> ContainerResults:
            ids, held = group
            if self._is_large(ids, held):
                replicas, findings = large_replicas(block_ranges(held, self._gatherer.group_rows))
            else:
                replicas, findings = exact_replicas(held)
            return ContainerResults(replicas, VERDICT_SCHEMA.empty_table(), findings, len(ids))

        yield from self._gatherer.map(self._gatherer.gather(parts, container_ids, rows), work)

    def inspect(
        self,
        parts: Sequence[Part],
        container_ids: Int64s,
        rows: Int64s,
        replicas: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """See Engine."""

        def work(group: tuple[Int64s, pa.Table]) -> ContainerResults:
            ids, held = group
            theirs = replicas.read(Range(int(ids[0]), int(ids[-1])))
            theirs = theirs.filter(pc.is_in(theirs["container_id"], pa.array(ids)))
            if self._is_large(ids, held):
                ranges = block_ranges(held, self._gatherer.group_rows)
                inspected = inspect_large(ranges, theirs)
            else:
                inspected = inspect(held, theirs)
            empty = REPLICA_SCHEMA.empty_table()
            return ContainerResults(empty, inspected.verdicts, inspected.findings, len(ids))

        yield from self._gatherer.map(self._gatherer.gather(parts, container_ids, rows), work)

    def revisit(
        self,
        work: Revisit,
        parts: Sequence[Part],
        earlier: Sequence[Part],
        requested: tuple[Int64s, Int64s],
        changed: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """See Engine."""
        for ids, rows in self._gatherer.gather(parts, *requested):
            before = [CHUNK_SCHEMA.empty_table()]
            try:
                for _, held in self._gatherer.gather(earlier, ids, np.ones(len(ids), np.int64)):
                    before.append(held.cast(CHUNK_SCHEMA))
            except ChunkTableError as error:
                raise EarlierRowsError(error.message) from error
            ours = changed.read(Range(int(ids[0]), int(ids[-1])))
            ours = ours.filter(pc.is_in(ours["container_id"], pa.array(ids)))
            findings = work(pa.concat_tables(before), rows.cast(CHUNK_SCHEMA), ours)
            nothing = REPLICA_SCHEMA.empty_table(), VERDICT_SCHEMA.empty_table()
            yield ContainerResults(*nothing, findings, len(ids))

    def for_each(self, work: ExportWork, texts: Sequence[str]) -> Iterator[pa.Table]:
        """See Engine."""
        return here(work, texts)

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """See Engine."""
        yield from self._gatherer.map(
            job.ordered, lambda part: pack_part(job, part, self._gatherer.single_threaded(), disk)
        )
        if len(job.others):
            yield from self.other_trees(
                job, self._gatherer.gather(job.parts, job.others, job.rows), disk
            )

    def other_trees(
        self, job: TreeJob, groups: Iterable[tuple[Int64s, pa.Table]], disk: Disk
    ) -> Iterator[PackedTreeFile]:
        """Write the trees of the containers in `job.others`; `groups` are their IDs
        and rows, as Gatherer.gather returns them.
        """

        def work(group: tuple[int, tuple[Int64s, pa.Table]]) -> PackedTreeFile:
            number, (ids, held) = group
            return pack_rows(job, number, ids, held, self._gatherer.group_rows, disk)

        yield from self._gatherer.map(enumerate(groups), work)

    def _is_large(self, container_ids: Int64s, rows: pa.Table) -> bool:
        return len(container_ids) == 1 and rows.num_rows > self._gatherer.group_rows


@dataclass(frozen=True, slots=True)
class _PartResult:
    """The result of one part: its runs and replicas, or the containers to be sorted
    with the number of rows of each.
    """

    rows: int
    runs: pa.Table
    replicas: pa.Table
    findings: pa.Table
    requested: pa.Table
    skipped: str


# Rows that are read to find out whether a file is sorted.
_PROBE_ROWS = 1 << 18


def _fold(part: Part) -> _PartResult:
    requested = scattered_containers(part)
    if requested is not None:
        nothing = RUN_SCHEMA.empty_table(), REPLICA_SCHEMA.empty_table()
        return _PartResult(part.rows, *nothing, FINDING_SCHEMA.empty_table(), requested, "")
    folded, none = fold_export(part), REQUEST_SCHEMA.empty_table()
    tables = folded.runs, folded.replicas, folded.findings
    return _PartResult(folded.rows, *tables, none, folded.skipped)


def scattered_containers(part: Part) -> pa.Table | None:
    """The containers of a part whose rows are in no order (REQUEST_SCHEMA, ascending);
    None for any other part, and for one that cannot be read: folding it reports why.
    """
    if _is_scattered(part):
        with suppress(ChunkTableError):
            counts, rows = _count_rows(part)
            # Rows that belong to no replica are a finding, which folding makes.
            if rows == part.rows:
                ids = np.array(sorted(counts), np.int64)
                return requests(ids, np.array([counts[i] for i in ids.tolist()], np.int64))
    return None


def _is_scattered(part: Part) -> bool:
    """Whether consecutive rows mostly belong to different replicas, judged by the first
    rows of the part.

    Folding such rows would produce a run for almost every row, and all of these runs
    would be discarded when the rows are sorted.
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


def _count_rows(part: Part) -> tuple[Counter[int], int]:
    """The number of rows of each container, and of all.

    Reads every column, although one would do. An unreadable file must be noticed now,
    while its whole table can still be left out.

    Raises:
        ChunkTableError: the part cannot be read.
    """
    counts, total = Counter[int](), 0
    with open_rows(part) as (stretches, _):
        for rows in stretches:
            found, held = np.unique(
                repeat(rows.integers["container_id"], rows.count), return_counts=True
            )
            counts.update(dict(zip(found.tolist(), held.tolist(), strict=True)))
            total += rows.count
    return counts, total


def _wave(results: Sequence[tuple[Part, _PartResult]]) -> FoldedWave:
    return FoldedWave(
        tuple(part.part_id for part, _ in results),
        sum(result.rows for _, result in results),
        pa.concat_tables([result.runs for _, result in results]),
        pa.concat_tables([result.replicas for _, result in results]),
        pa.concat_tables([result.findings for _, result in results]),
        pa.concat_tables([result.requested for _, result in results]),
        skipped={part.part_id: result.skipped for part, result in results if result.skipped},
    )
