"""The engine of a Spark cluster.

Tasks open their parts themselves, and write runs, replicas, verdicts and findings to
files, which the driver commits (spark.commits). So the driver holds counts and names of
files, however many replicas there are. The stages that compare get their rows by a
shuffle (spark.by_range). Rows of chunks are shuffled only for containers that must be
sorted or inspected. Where rows are in no order, and blocks are large enough for it to
pay, Spark SQL folds them (spark.sql).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from chunktable.errors import ObjectStoreError
from chunktable.files import AnyPath, Files
from runtime.disk import Disk
from runtime.documents import parse_json
from spark.by_container import (
    ROW_SCHEMA,
    ContainerGroups,
    Judge,
    inspect_containers,
    judge_group,
    revisit_containers,
    select_rows,
    selection_texts,
    shuffles,
    sort_containers,
    store_containers,
)
from spark.by_range import RangeJob, file_groups, range_waves, run_texts
from spark.commits import (
    COMMIT_SCHEMA,
    Commit,
    SharedFolders,
    by_table,
    commit_batch,
    commits_of,
)
from spark.errors import FolderNotSharedError, cause_of, failure_of
from spark.jobs import SPARK_ERRORS, cores, watched
from spark.scattered import fold_in_sql, whole_files
from spark.task_parts import parts_of_text, text_of
from sweep.engine import (
    WAVE_ROWS,
    ContainerResults,
    FoldedWave,
    LocalEngine,
    Places,
    RangeResult,
    Revisit,
    scattered_containers,
)
from sweep.errors import EarlierRowsError, SweepWorkError
from sweep.exports import ExportWork, here
from sweep.files import unreadable_finding
from sweep.gather import Gatherer, Int64s
from sweep.model import FINDING_SCHEMA, REPLICA_SCHEMA, REQUEST_SCHEMA, VERDICT_SCHEMA, Part
from sweep.pieces import Range, StoredTable, TableFileWriter
from sweep.runs import RUN_SCHEMA
from sweep.stages import ContainerStage
from sweep.trees import PackedTreeFile, TreeJob, pack_part
from sweep.whole_exports import fold_export, fold_small_exports


class Scattered(Enum):
    """How files whose rows are in no order are processed."""

    # The faster one: SQL where blocks average _CHUNKS_MIN chunks or more, otherwise
    # sorting.
    AUTO = "auto"
    SQL = "sql"
    EXACT = "exact"


# Below, an aggregate of a block is wider than its chunks, and sorting them is cheaper.
_CHUNKS_MIN = 4

# Rows that one task of `by_range` reads.
_READ_ROWS = 1 << 20

# Rows of the parts that share a task.
_TASK_ROWS = 1 << 20
# Rows that take as long as one replica, whose own rows come on top.
_REPLICA_ROWS = 60

# Exports of one task.
_EXPORTS_OF_TASK = 512

_REQUESTED = "requested"
_PACKED_SCHEMA = pa.schema(
    [
        pa.field("number", pa.int32(), nullable=False),
        pa.field("name", pa.string(), nullable=False),
        pa.field("trees", pa.int64(), nullable=False),
        pa.field("too_large", pa.int64(), nullable=False),
    ]
)
# The tables of results that are all in files.
_NOTHING = (
    REPLICA_SCHEMA.empty_table(),
    VERDICT_SCHEMA.empty_table(),
    FINDING_SCHEMA.empty_table(),
)
# Errors of tasks that the sweep itself, or an operator, can do something about.
_NOT_SHARED = re.compile(r"\bFolderNotSharedError: (.*)")
_EARLIER = re.compile(r"\bEarlierRowsError: (.*)")
_DAMAGED = re.compile(r"\bSweepWorkError: (.*)")


def _ignore(*_: int) -> None:
    """Discard progress."""


class SparkEngine:
    """An engine (sweep.engine.Engine) that uses all cores of a Spark session."""

    name = "spark"
    # A task holds one range, and works on it with some hundred bytes a row more.
    range_rows = 1 << 17

    def __init__(self, session: SparkSession, *, scattered: Scattered = Scattered.AUTO) -> None:
        self._session = session
        self._scattered = scattered
        self._cores = cores(session)
        # This machine's, for the markers and the lists of containers that tasks read.
        self._disk = Disk()

    def fold(
        self,
        parts: Sequence[Part],
        places: Places,
        store: Callable[[FoldedWave], None],
        advance: Callable[[int], None],
    ) -> None:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
            FolderNotSharedError: executors do not see the folder of the sweep.
        """
        unordered = list[tuple[Part, Commit]]()
        with self._shared(places) as shared:
            # One wave takes each core about a minute.
            for wave in _waves(parts, WAVE_ROWS * self._cores):
                progress = _RowProgress(sum(part.rows for part in wave), advance)
                ordered, texts = list[tuple[Part, Commit]](), _task_texts(wave)
                frame = run_texts(self._session, texts, partial(_fold, shared), COMMIT_SCHEMA)
                for commit in self._commits(frame, "reading", progress.tasks_done):
                    scattered = _REQUESTED in commit.files
                    (unordered if scattered else ordered).append((wave[commit.number], commit))
                if ordered:
                    store(_wave(ordered))
                progress.finish()
        if unordered:
            # All at once: the rows of a replica may be in all of these parts.
            by_sql = self._fold_by_sql([part for part, _ in unordered], places)
            if isinstance(by_sql, FoldedWave):
                store(by_sql)
            else:
                store(replace(_wave(unordered), notes=(by_sql,) if by_sql else ()))

    def by_range(
        self,
        stage: ContainerStage,
        inputs: Mapping[str, StoredTable],
        wanted: Sequence[Range],
        places: Places,
    ) -> Iterator[RangeResult]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
            FolderNotSharedError: executors do not see the folder of the sweep.
        """
        # An input without files would only widen the rows.
        absent = {name: table.schema for name, table in inputs.items() if not table.paths}
        schemas = {n: table.schema for n, table in inputs.items() if n not in absent}
        with self._shared(places) as shared:
            for of_wave in range_waves(wanted):
                groups = file_groups(inputs, of_wave, _READ_ROWS)
                if not groups:
                    continue
                job = RangeJob(stage, schemas, of_wave, shared, absent)
                frame = job.frame(self._session, groups)
                for commit in self._commits(frame, type(stage).__name__):
                    yield RangeResult(of_wave[commit.number], {}, commit.files, commit.totals)

    def exact(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, places: Places
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
            FolderNotSharedError: executors do not see the folder of the sweep.
        """
        for ids, counts in shuffles(container_ids, rows):
            yield from self._shuffle(sort_containers, [parts], ids, counts, places)

    def inspect(
        self,
        parts: Sequence[Part],
        container_ids: Int64s,
        rows: Int64s,
        replicas: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
            FolderNotSharedError: executors do not see the folder of the sweep.
        """
        for ids, counts in shuffles(container_ids, rows):
            judge = partial(inspect_containers, replicas.unopened())
            yield from self._shuffle(judge, [parts], ids, counts, places)

    def revisit(
        self,
        work: Revisit,
        parts: Sequence[Part],
        earlier: Sequence[Part],
        requested: tuple[Int64s, Int64s],
        changed: StoredTable,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
            FolderNotSharedError: executors do not see the folder of the sweep.
        """
        judge = partial(revisit_containers, work, changed.unopened(), changed.schema)
        for ids, counts in shuffles(*requested):
            yield from self._shuffle(judge, [parts, earlier], ids, counts, places)

    def for_each(self, work: ExportWork, texts: Sequence[str]) -> Iterator[pa.Table]:
        """See Engine.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
        """
        if len(texts) <= work.alone_max:
            yield from here(work, texts)
            return
        size = -(-len(texts) // max(self._cores, len(texts) // _EXPORTS_OF_TASK))
        groups = [json.dumps({"texts": texts[at : at + size]}) for at in range(0, len(texts), size)]
        frame = run_texts(self._session, groups, partial(_for_each, work), work.schema)
        yield self._rows_of(frame, "reading exports").cast(work.schema)

    def trees(self, job: TreeJob, disk: Disk) -> Iterator[PackedTreeFile]:
        """See Engine. Tasks that see the folder write their part; this machine writes
        the parts of the others.

        Raises:
            SparkFailedError: a job failed after all retries of its tasks.
        """
        # A task sees this file exactly where the folder is shared.
        marker = job.folder / f".shared-{uuid4().hex}"
        files = Files(disk)
        files.replace(marker, b"")
        try:
            left = list(job.ordered)
            # A task needs no parts but its own.
            pack = partial(_pack, replace(job, parts=(), ordered=()), marker)
            for wave in _waves(job.ordered, WAVE_ROWS * self._cores):
                texts = [text_of({number: part}) for number, part in enumerate(wave)]
                packing = run_texts(self._session, texts, pack, _PACKED_SCHEMA)
                for row in self._rows_of(packing, "writing trees").to_pylist():
                    left.remove(wave[row.pop("number")])
                    yield PackedTreeFile(**row)
        finally:
            files.remove(marker)
        with TemporaryDirectory(prefix="treefold-") as scratch:
            yield from LocalEngine(Gatherer(Path(scratch))).trees(replace(job, ordered=left), disk)

    @contextmanager
    def _shared(self, places: Places) -> Iterator[SharedFolders]:
        shared = SharedFolders.of(places, self._disk)
        try:
            yield shared
        finally:
            shared.remove(self._disk)

    def _shuffle(
        self,
        judge: Judge,
        selections: Sequence[Sequence[Part]],
        ids: Int64s,
        rows: Int64s,
        places: Places,
    ) -> Iterator[ContainerResults]:
        """Shuffle the rows of these containers in each selection of parts into groups,
        and judge each group in a task.
        """
        with self._shared(places) as shared, self._stored(places, ids, rows) as containers:
            groups = ContainerGroups.stored(containers)
            select = partial(select_rows, containers)
            texts = selection_texts([_task_texts(parts) for parts in selections])
            selected = run_texts(self._session, texts, select, ROW_SCHEMA)
            work = partial(judge_group, judge, containers, len(selections), shared)
            judged = selected.repartitionById(len(groups.starts), "gathered_in").mapInArrow(
                work, from_arrow_schema(COMMIT_SCHEMA)
            )
            commits = list(self._commits(judged, "gathering"))
            count, files = sum(commit.count for commit in commits), by_table(commits)
            yield ContainerResults(*_NOTHING, count, files)
            # Spark starts no task for a partition without rows.
            for group in set(range(len(groups.starts))) - {commit.number for commit in commits}:
                yield from groups.judge(group, judge, len(selections), ())

    @contextmanager
    def _stored(self, places: Places, ids: Int64s, rows: Int64s) -> Iterator[AnyPath]:
        """A file of these containers that tasks can read."""
        folder = next(iter(places.values())).folder
        path = folder / f".containers-{uuid4().hex}.npy"
        files = Files(self._disk)
        files.make_folder(folder)
        store_containers(path, ids, rows, self._disk)
        try:
            yield path
        finally:
            files.remove(path)

    def _fold_by_sql(self, parts: Sequence[Part], places: Places) -> FoldedWave | str | None:
        """Fold all these parts in Spark SQL; None if sorting is preferred or Spark
        cannot read them, and a note if it failed.

        Raises:
            FolderNotSharedError: an executor does not see the folder of the sweep.
        """
        # Files with a manifest are in order, and Spark's reader would not verify them.
        assert all(part.manifest is None for part in parts)
        if self._scattered is Scattered.EXACT:
            return None
        files = whole_files(parts)
        if files is None:
            return None
        try:
            return watched(
                self._session,
                "reading in no order",
                partial(self._aggregated, files, parts, places),
                _ignore,
            )
        except SPARK_ERRORS as error:
            if unshared := _unshared(error):
                raise unshared from error
            cause = cause_of(str(error))
            return f"the rows in no order were sorted, because Spark SQL failed: {cause}"

    def _aggregated(
        self, files: Mapping[str, pq.FileMetaData], parts: Sequence[Part], places: Places
    ) -> FoldedWave | None:
        chunks_min = _CHUNKS_MIN if self._scattered is Scattered.AUTO else 0
        with self._shared(places) as shared:
            return fold_in_sql(
                self._session, files, parts, shared, chunks_min=chunks_min, cores=self._cores
            )

    def _commits(
        self, frame: DataFrame, description: str, report: Callable[[int, int], None] = _ignore
    ) -> Iterator[Commit]:
        """Run a frame of COMMIT_SCHEMA."""
        return commits_of(self._rows_of(frame, description, report))

    def _rows_of(
        self, frame: DataFrame, description: str, report: Callable[[int, int], None] = _ignore
    ) -> pa.Table:
        """Run a frame.

        Raises:
            FolderNotSharedError: an executor does not see the folder of the sweep.
            SweepWorkError: a file of the sweep's own work cannot be read.
            SparkFailedError: the job failed otherwise.
            PackagesMissingError: executors lack what tasks import.
        """
        try:
            return watched(self._session, description, frame.toArrow, report)
        except SPARK_ERRORS as error:
            if unshared := _unshared(error):
                raise unshared from error
            if earlier := _EARLIER.search(str(error)):
                raise EarlierRowsError(earlier[1].strip()) from error
            if damaged := _DAMAGED.search(str(error)):
                raise SweepWorkError(damaged[1].strip(), path="") from error
            raise failure_of(description, str(error)) from error


class _RowProgress:
    """Converts Spark's counts of tasks to rows and reports the rows as they grow."""

    def __init__(self, rows: int, advance: Callable[[int], None]) -> None:
        self._rows = rows
        self._advance = advance
        self._reported = 0

    def tasks_done(self, done: int, total: int) -> None:
        """Report rows up to this share of the tasks."""
        rows = self._rows * done // total
        if rows > self._reported:
            self._advance(rows - self._reported)
            self._reported = rows

    def finish(self) -> None:
        """Report the rows that are left."""
        self.tasks_done(1, 1)


def _unshared(error: Exception) -> FolderNotSharedError | None:
    """The error of a task that does not see the folder of the sweep."""
    hint = "Give an --out that all executors have at the same path."
    found = _NOT_SHARED.search(str(error))
    return FolderNotSharedError(found[1].strip(), hint=hint) if found else None


def _fold(shared: SharedFolders, text: str) -> Iterator[pa.RecordBatch]:
    """Fold the parts of one task. The files of all are in the last commit."""
    shared.check()
    parts = parts_of_text(text)
    writer, commits = TableFileWriter(shared.places, Disk()), list[Commit]()
    if len(parts) > 1:
        folds = list(fold_small_exports(list(parts.values()), writer.add))
        commits += [Commit(n, one.rows, one.skipped) for n, one in zip(parts, folds, strict=True)]
    else:
        ((number, part),) = parts.items()
        requested = scattered_containers(part)
        if requested is not None:
            writer.add({_REQUESTED: requested})
            commits.append(Commit(number, part.rows))
        else:
            folded = fold_export(part, writer.add)
            if folded.skipped:
                writer.discard()
            commits.append(Commit(number, folded.rows, folded.skipped))
    commits[-1] = replace(commits[-1], files=writer.close())
    yield commit_batch(commits)


def _for_each(work: ExportWork, text: str) -> Iterator[pa.RecordBatch]:
    yield from work(parse_json(text)["texts"]).to_batches()


def fold_tasks(parts: Sequence[Part]) -> list[list[int]]:
    """The numbers of the parts of each task: small exports share one, because starting
    a task costs more than reading one. Files without a manifest are alone: their rows
    may be in no order, which is decided by part.
    """
    tasks, rows = list[list[int]](), 0
    for number, part in enumerate(parts):
        weight = _weight(part) if part.manifest else _TASK_ROWS
        if not tasks or rows + weight > _TASK_ROWS:
            tasks.append([])
            rows = 0
        tasks[-1].append(number)
        rows += weight
    return tasks


def _task_texts(parts: Sequence[Part]) -> list[str]:
    """For each task its parts, by their index in `parts`, and their manifests."""
    return [text_of({number: parts[number] for number in task}) for task in fold_tasks(parts)]


def _weight(part: Part) -> int:
    """The rows of a part; a replica counts as the rows that take as long."""
    return part.rows + _REPLICA_ROWS * part.replicas


def _pack(job: TreeJob, marker: AnyPath, text: str) -> Iterator[pa.RecordBatch]:
    ((number, part),) = parts_of_text(text).items()
    if _is_seen(marker):
        with TemporaryDirectory(prefix="treefold-") as scratch:
            packed = pack_part(job, part, Gatherer(Path(scratch), threads=1), Disk())
        row = {"number": number, **asdict(packed)}
        yield pa.RecordBatch.from_pylist([row], _PACKED_SCHEMA)


def _is_seen(marker: AnyPath) -> bool:
    try:
        return Files(Disk()).exists(marker)
    except ObjectStoreError:
        # This machine may not be let in: the driver is.
        return False


def _waves(parts: Sequence[Part], rows_min: int) -> Iterator[list[Part]]:
    """Consecutive parts, a wave ending with the part that brings it to `rows_min`."""
    wave, rows = list[Part](), 0
    for part in parts:
        wave.append(part)
        rows += _weight(part)
        if rows >= rows_min:
            yield wave
            wave, rows = [], 0
    if wave:
        yield wave


def _wave(folded: Sequence[tuple[Part, Commit]]) -> FoldedWave:
    findings = [unreadable_finding(commit.skipped) for _, commit in folded if commit.skipped]
    return FoldedWave(
        tuple(part.part_id for part, _ in folded),
        sum(commit.count for _, commit in folded),
        RUN_SCHEMA.empty_table(),
        REPLICA_SCHEMA.empty_table(),
        pa.concat_tables([FINDING_SCHEMA.empty_table(), *findings]),
        REQUEST_SCHEMA.empty_table(),
        by_table(commit for _, commit in folded),
        {part.part_id: commit.skipped for part, commit in folded if commit.skipped},
    )
