"""One sweep from start to end: fold all parts, judge all containers, write the tables.

What an engine computes is pure and in other modules; an engine only says where and how
many at a time. Whatever it hands to `store` is on disk when `store` returns, so that a
sweep that ends anywhere goes on behind its last wave. The same sweep resumed and not
resumed ends in the same tables.
"""

import fcntl
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.places import check_name
from merkle.replica import TreeSource
from runtime.disk import Disk, disk_error
from runtime.errors import BusyError, DiskError, UsageError
from sweep.compare import compare_replicas
from sweep.errors import SweepInputError, SweepWorkError
from sweep.gather import Gatherer
from sweep.history import History
from sweep.inputs import NO_ROWS, Inputs, export_datanodes, export_findings, table_parts
from sweep.model import (
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    VERDICT_SCHEMA,
    FindingKind,
    Part,
    PartKind,
    RootMethod,
)
from sweep.output import JsonObject, Skipped, Summary, SweepStore, SweepTable, new_sweep_id
from sweep.runs import RUN_SCHEMA, settle
from sweep.trees import PackedTreeFile, TreeJob, part_file
from sweep.volumes import OpenVolumes, copy_part, open_volumes
from sweep.work import Plan, Range, Stage, StoredTable, Work, key_of, ranges, unreadable

Int64s = npt.NDArray[np.int64]

# Of volumes, which change: what was read a day ago is no part of this sweep.
_RESUMED_WITHIN = timedelta(days=1)


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


class ProgressSink(Protocol):
    """Who is told how a sweep goes on."""

    def note(self, text: str) -> None:
        """Something that a person should know."""
        ...

    def begin(self, what: str, total: int, unit: str) -> None:
        """A stage begins, of so many units."""
        ...

    def advance(self, count: int) -> None:
        """So many more are done."""
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


def sweep(
    request: SweepRequest,
    engine: Engine,
    watcher: ProgressSink,
    *,
    disk: Disk | None = None,
    report: Callable[[Summary], Sequence[str]] = lambda _: (),
) -> Summary:
    """Carry out a sweep, or the rest of one over the same inputs that was not finished.

    `report` is given the summary before the sweep is complete, so that a complete one
    has its report; it returns notes.

    Raises:
        BusyError: another sweep writes to the folder.
        SweepInputError: none of the inputs can be read. DiskError, ChunkTableError,
            UsageError
    """
    for name in (str(request.out), *request.tables, *request.volumes):
        check_name(name)
    request = _absolute(request)
    disk, was_there = disk or Disk(), os.path.lexists(request.out)
    disk.make_folder(request.out)
    with _exclusive(request.out), ExitStack() as stack:
        work, output = Work(request.out, disk), SweepStore(request.out, disk)
        scratch = request.out / "work" / "shadows"
        disk.remove_folder(scratch)
        stack.callback(disk.remove_folder, scratch)
        disk.make_folder(scratch)
        volumes = stack.enter_context(open_volumes(request.volumes, request.source, scratch, disk))
        inputs = table_parts(request.tables)
        skipped = (*volumes.skipped, *inputs.skipped)
        if not (volumes.surveys or inputs.parts or inputs.manifests):
            if not was_there:
                disk.remove_folder(request.out)
            reasons = "; ".join(f"{one.input}: {one.reason}" for one in skipped)
            raise SweepInputError(f"there is nothing to read: {reasons}", skipped=skipped)

        def carry_out(request: SweepRequest) -> Summary:
            plan = _begin(request, engine.name, volumes, inputs, skipped, work, watcher)
            complete = output.sweeps()
            for sweep_id in set(complete) - {plan.sweep_id}:
                # What was left of its work.
                work.end(sweep_id)
            begun = _Sweep(
                request, plan, engine, watcher, volumes, inputs, work, output, disk, report
            )
            return begun.ended() if plan.sweep_id in complete else begun.run()

        try:
            return carry_out(request)
        except SweepWorkError as error:
            watcher.note(f"begun anew: {error.message}")
            return carry_out(replace(request, fresh=True))


def _absolute(request: SweepRequest) -> SweepRequest:
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


def _begin(
    request: SweepRequest,
    engine: str,
    volumes: OpenVolumes,
    inputs: Inputs,
    skipped: tuple[Skipped, ...],
    work: Work,
    watcher: ProgressSink,
) -> Plan:
    """The plan of an unfinished sweep over the same inputs, or a new one; no other is
    left behind.
    """
    now = datetime.now(UTC)
    parts = (*volumes.parts, *inputs.parts)
    key = key_of(engine, request.source, parts, skipped, inputs.manifests)
    plan = Plan(
        new_sweep_id(now), now, engine, request.source, parts, skipped, inputs.manifests, key
    )
    found: Plan | None = None
    plans, broken = work.plans()
    for sweep_id, reason in broken.items():
        watcher.note(f"sweep {sweep_id} does not go on: {reason}")
        work.end(sweep_id)
    for other in plans:
        is_same = other.key == plan.key and (
            not volumes.parts or now - other.started_at < _RESUMED_WITHIN
        )
        if is_same and not request.fresh:
            found = other
        else:
            work.end(other.sweep_id)
    if found is not None:
        watcher.note(
            f"going on with sweep {found.sweep_id}, begun {found.started_at:%Y-%m-%d %H:%M:%S} UTC"
        )
        return found
    work.begin(plan)
    return plan


class _Sweep:
    """One sweep under way; every stage passes over what is finished of it."""

    def __init__(
        self,
        request: SweepRequest,
        plan: Plan,
        engine: Engine,
        watcher: ProgressSink,
        volumes: OpenVolumes,
        inputs: Inputs,
        work: Work,
        output: SweepStore,
        disk: Disk,
        report: Callable[[Summary], Sequence[str]],
    ) -> None:
        self._request = request
        self._plan = plan
        self._engine = engine
        self._watcher = watcher
        self._volumes = volumes
        self._inputs = inputs
        self._work = work
        self._output = output
        self._disk = disk
        self._report = report
        self._history = History(request.out, disk)

    def run(self) -> Summary:
        started = time.monotonic()
        copied = self._copied()
        folded = self._folded(copied)
        parts = self._parts(copied)
        exact, rows = self._unsettled(folded)
        self._exact(parts, exact, rows)
        summary = self._judged(parts, folded)
        summary = replace(summary, seconds=time.monotonic() - started)
        if self._request.write_trees:
            notes = (*summary.notes, *self._write_trees(parts))
            summary = replace(summary, notes=notes, seconds=time.monotonic() - started)
        self._history.remember(self._plan.sweep_id, parts, self._plan.manifests)
        summary = replace(summary, notes=(*summary.notes, *self._report(summary)))
        self._output.write_summary(summary)
        self._end()
        return summary

    def ended(self) -> Summary:
        """The summary of a sweep that is complete but for its end."""
        try:
            summary = Summary.of(self._output.summary(self._plan.sweep_id))
        except DiskError as error:
            raise unreadable(
                self._output.path(SweepTable.SUMMARY, self._plan.sweep_id), error
            ) from error
        self._end()
        return summary

    def _end(self) -> None:
        self._output.retain(self._request.keep)
        self._history.retain(self._output.sweeps())
        # Last: as long as it is there, the same command comes here again.
        self._work.end(self._plan.sweep_id)

    def _copied(self) -> tuple[Part, ...]:
        """The volumes' rows as files, and the parts of these."""
        stage = self._work.stage(self._plan, "copied")
        done = {str(note["part_id"]) for note in stage.notes()}
        folder = self._history.folder(self._plan.sweep_id)
        parts = [part for part in self._plan.parts if part.kind is PartKind.VOLUME]
        wanted = [part for part in parts if part.part_id not in done]
        self._watcher.begin("reading volumes", len(wanted), "parts")
        if not parts:
            return ()

        def copy(part: Part) -> tuple[Part, pa.Table]:
            return (
                part,
                copy_part(part, self._volumes, folder / f"{part.part_id}.parquet", self._disk)[1],
            )

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "volume") as pool:
            try:
                for part, findings in pool.map(copy, wanted):
                    stage.add({"part_id": part.part_id}, {"findings": findings})
                    self._watcher.advance(1)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        copied = table_parts([str(folder / f"{part.part_id}.parquet") for part in parts])
        for one in copied.skipped:
            if one.reason != NO_ROWS:
                raise unreadable(Path(one.input), one.reason)
        return copied.parts

    def _parts(self, copied: Sequence[Part]) -> tuple[Part, ...]:
        return (*copied, *(part for part in self._plan.parts if part.kind is PartKind.FILE))

    def _folded(self, copied: Sequence[Part]) -> Stage:
        """All parts folded, without the tables of which one cannot be read."""
        while True:
            parts = self._parts(copied)
            stage = self._work.stage(self._plan, "folded")
            notes = stage.notes()
            done = {part_id for note in notes for part_id in _texts(note["part_ids"])}
            wanted = [part for part in parts if part.part_id not in done]
            if done:
                self._watcher.note(f"{len(done)} of {len(parts)} parts were read before")
            if wanted:
                self._watcher.begin("reading", sum(part.rows for part in wanted), "rows")
                self._engine.fold(wanted, partial(_store, stage), self._watcher.advance)
            unread = {
                part_id: reason
                for note in stage.notes()
                for part_id, reason in _pairs(note["skipped"])
            }
            if not unread:
                return stage
            for part in copied:
                if part.part_id in unread:
                    raise unreadable(Path(part.location), unread[part.part_id])
            # A replica may go on in another part of the same table: half of it would
            # pass for damaged.
            tables = {
                _table_of(part): unread[part.part_id] for part in parts if part.part_id in unread
            }
            skipped = tuple(Skipped(table, reason) for table, reason in tables.items())
            for one in skipped:
                self._watcher.note(f"left out: {one.input}: {one.reason}")
            self._plan = replace(
                self._plan,
                parts=tuple(part for part in self._plan.parts if _table_of(part) not in tables),
                manifests=tuple(
                    manifest for manifest in self._plan.manifests if manifest not in tables
                ),
                skipped=(*self._plan.skipped, *skipped),
            )
            stage.clear()
            self._work.begin(self._plan)

    def _unsettled(self, folded: Stage) -> tuple[Int64s, Int64s]:
        """The containers that need the exact path, ascending, and about how many rows
        they have.
        """
        runs, replicas = folded.table("runs", RUN_SCHEMA), folded.table("replicas", REPLICA_SCHEMA)
        asked = Counter[int]()
        for note in folded.notes():
            asked.update(
                dict(zip(_numbers(note["exact"]), _numbers(note["exact_rows"]), strict=True))
            )
        named = np.array(sorted(asked), np.int64)
        ids, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for wanted in ranges([runs, replicas]):
            pieces = runs.read(wanted)
            exact = np.union1d(settle(pieces).exact, _within(named, wanted))
            exact = np.union1d(exact, np.intersect1d(_ids(pieces), _ids(replicas.read(wanted))))
            ids.append(exact)
            counted = _rows_by_container(pieces, replicas.read(wanted))
            rows.append(
                np.array([max(1, counted.get(i, 0) + asked[i]) for i in exact.tolist()], np.int64)
            )
        return np.concatenate(ids), np.concatenate(rows)

    def _exact(self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s) -> None:
        stage = self._work.stage(self._plan, "exact")
        done = np.array(
            [i for note in stage.notes() for i in _numbers(note["containers"])], np.int64
        )
        left = ~np.isin(container_ids, done)
        container_ids, rows = container_ids[left], rows[left]
        if len(container_ids):
            self._watcher.begin("sorting", len(container_ids), "containers")
            for judged in self._engine.exact(parts, container_ids, rows):
                ids = _ids(judged.replicas)
                stage.add(
                    {"containers": ids.tolist()},
                    {"replicas": judged.replicas, "findings": judged.findings},
                )
                self._watcher.advance(len(ids))

    def _judged(self, parts: Sequence[Part], folded: Stage) -> Summary:
        """Compare range by range, inspect the candidates, and write all tables but the
        summary.
        """
        sweep_id = self._plan.sweep_id
        runs, replicas = folded.table("runs", RUN_SCHEMA), folded.table("replicas", REPLICA_SCHEMA)
        exact = self._work.stage(self._plan, "exact")
        from_rows = exact.table("replicas", REPLICA_SCHEMA)
        totals = _Totals()
        candidates, theirs, rows = list[Int64s](), [REPLICA_SCHEMA.empty_table()], list[Int64s]()
        found = [FINDING_SCHEMA.empty_table()]
        with (
            self._output.writing(SweepTable.ROOTS, sweep_id) as roots,
            self._output.writing(SweepTable.VERDICTS, sweep_id) as verdicts,
        ):
            for wanted in ranges([runs, replicas, from_rows]):
                by_rows = from_rows.read(wanted)
                exact_ids = pa.array(_ids(by_rows))
                settled = pa.concat_tables(
                    [settle(runs.read(wanted)).replicas, replicas.read(wanted)]
                )
                settled = settled.filter(
                    pc.invert(pc.is_in(settled["container_id"], value_set=exact_ids))
                )
                held = _sorted(
                    pa.concat_tables([settled, by_rows]), "container_id", "datanode", "volume"
                )
                compared = compare_replicas(held)
                roots.add(held)
                verdicts.add(compared.verdicts)
                totals.add_replicas(held)
                totals.add_verdicts(compared.verdicts)
                found.append(compared.findings)
                candidates.append(compared.candidates)
                of_candidates = held.filter(
                    pc.is_in(held["container_id"], value_set=pa.array(compared.candidates))
                )
                theirs.append(of_candidates)
                counted = _rows_by_container(RUN_SCHEMA.empty_table(), of_candidates)
                rows.append(np.array([counted[int(i)] for i in compared.candidates], np.int64))
            inspected = self._inspected(
                parts, np.concatenate(candidates), np.concatenate(rows), pa.concat_tables(theirs)
            )
            for judged in inspected.table("verdicts", VERDICT_SCHEMA).tables():
                verdicts.add(judged)
                totals.add_verdicts(judged)
        assert totals.judged == totals.containers
        seen, untold = self._history.last_seen(self._output, sweep_id)
        of_agents, lost = export_findings(self._plan.manifests)
        skipped = (*self._plan.skipped, *lost, *self._gone(seen))
        unread = [_unreadable(f"{one.input}: {one.reason}") for one in skipped]
        found.append(pa.Table.from_pylist(unread, FINDING_SCHEMA))
        looked = self._history.look(
            self._output,
            sweep_id,
            Gatherer(self._request.out / "work" / "spill"),
            parts,
            self._plan.manifests,
            seen,
        )
        loose = [*found, of_agents, self._volumes.findings, looked.findings]
        stages = [
            stage.table("findings", FINDING_SCHEMA)
            for stage in (self._work.stage(self._plan, "copied"), folded, exact, inspected)
        ]
        self._write_findings(pa.concat_tables(loose), stages, totals)
        return Summary(
            sweep_id=sweep_id,
            engine=self._plan.engine,
            source=self._plan.source.value,
            started_at=self._plan.started_at,
            seconds=0.0,
            rows=sum(_number(note["rows"]) for note in folded.notes()),
            containers=totals.containers,
            replicas=totals.replicas,
            excluded=totals.excluded,
            diverged=tuple(sorted(totals.diverged)),
            verdicts=dict(sorted(totals.verdicts.items())),
            findings=dict(sorted(totals.findings.items())),
            paths=dict(sorted(totals.paths.items())),
            skipped=skipped,
            notes=(*untold, *looked.notes),
            previous=looked.previous,
            volumes_created_ms={**self._inputs.volumes_created_ms, **self._volumes.created_ms},
        )

    def _gone(self, seen: Mapping[str, str]) -> Iterator[Skipped]:
        """The datanodes that an earlier sweep had (`seen`: which) and nobody told of in
        this one.
        """
        held = self._output.datanodes(self._plan.sweep_id) | export_datanodes(self._plan.manifests)
        held |= {survey.datanode for survey in self._volumes.surveys.values()}
        # Where the folder is named after the datanode, as agents do it, it is named
        # already.
        named = {name for one in self._plan.skipped for name in one.input.split("/")}
        for datanode in sorted(seen.keys() - held - named - set(self._request.gone)):
            yield Skipped(
                f"datanode {datanode}",
                f"it was in sweep {seen[datanode]} and is in no input that was read; its replicas"
                f" were not compared (--gone {datanode} if it was taken out on purpose)",
            )

    def _inspected(
        self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s, replicas: pa.Table
    ) -> Stage:
        stage = self._work.stage(self._plan, "inspected")
        done = np.array(
            [i for note in stage.notes() for i in _numbers(note["containers"])], np.int64
        )
        left = ~np.isin(container_ids, done)
        container_ids, rows = container_ids[left], rows[left]
        if len(container_ids):
            self._watcher.begin("comparing", len(container_ids), "containers")
            for judged in self._engine.inspect(parts, container_ids, rows, replicas):
                ids = _ids(judged.verdicts)
                stage.add(
                    {"containers": ids.tolist()},
                    {"verdicts": judged.verdicts, "findings": judged.findings},
                )
                self._watcher.advance(len(ids))
        return stage

    def _write_trees(self, parts: Sequence[Part]) -> Sequence[str]:
        """The trees of all replicas, packed; returns notes on them."""
        sweep_id, rows = self._plan.sweep_id, Counter[int]()
        others, ordered = [np.empty(0, np.int64)], False
        for piece in self._output.pieces(
            SweepTable.ROOTS, sweep_id, ["container_id", "path", "chunks", "blocks"]
        ):
            is_ordered = pc.equal(piece["path"], RootMethod.FILE_WISE.value)
            unordered = np.unique(piece["container_id"].filter(pc.invert(is_ordered)).to_numpy())
            others.append(unordered)
            held = pc.is_in(piece["container_id"], value_set=pa.array(unordered))
            rows.update(_rows_by_container(RUN_SCHEMA.empty_table(), piece.filter(held)))
            ordered |= not pc.all(held).as_py()
        ids = np.unique(np.concatenate(others))
        stage = self._work.stage(self._plan, "trees")
        done = {str(note["name"]) for note in stage.notes()}
        wanted = {
            part_file(part): part for part in parts if ordered and part_file(part) not in done
        }
        job = TreeJob(
            self._output.trees(sweep_id),
            parts,
            tuple(wanted.values()),
            ids,
            np.array([max(1, rows[i]) for i in ids.tolist()], np.int64),
        )
        self._disk.make_folder(job.folder)
        self._watcher.begin("writing trees", sum(part.rows for part in wanted.values()), "rows")
        for packed in self._engine.trees(job, self._disk):
            stage.add(asdict(packed), {})
            if packed.name in wanted:
                self._watcher.advance(wanted[packed.name].rows)
        # Of those that were begun twice, the last counts.
        too_large = sum(
            {str(note["name"]): _number(note["too_large"]) for note in stage.notes()}.values()
        )
        return (
            [f"{too_large} trees are larger than agents store, and were not written"]
            if too_large
            else []
        )

    def _write_findings(
        self, loose: pa.Table, stages: Sequence[StoredTable], totals: "_Totals"
    ) -> None:
        """All findings, by container, block and offset."""
        with self._output.writing(SweepTable.FINDINGS, self._plan.sweep_id) as writer:
            for wanted in ranges(stages):
                rows = pa.concat_tables(
                    [_in_range(loose, wanted), *(stage.read(wanted) for stage in stages)]
                )
                rows = _sorted(rows, "container_id", "block_id", "chunk_offset", "kind", "detail")
                writer.add(rows)
                totals.add_findings(rows)


class _Totals:
    """What the summary counts."""

    def __init__(self) -> None:
        self.containers = 0
        self.replicas = 0
        self.judged = 0
        self.excluded = 0
        self.diverged: list[int] = []
        self.verdicts = Counter[str]()
        self.findings = Counter[str]()
        self.paths = Counter[str]()

    def add_replicas(self, replicas: pa.Table) -> None:
        self.replicas += replicas.num_rows
        self.containers += len(_ids(replicas))
        self.paths.update(_counts(replicas["path"]))

    def add_verdicts(self, verdicts: pa.Table) -> None:
        self.judged += verdicts.num_rows
        self.excluded += pc.sum(verdicts["excluded"]).as_py() or 0
        self.verdicts.update(_counts(verdicts["verdict"]))
        self.diverged += verdicts.filter(verdicts["diverged"])["container_id"].to_pylist()

    def add_findings(self, findings: pa.Table) -> None:
        self.findings.update(_counts(findings["kind"]))


def _rows_by_container(runs: pa.Table, replicas: pa.Table) -> Mapping[int, int]:
    """About how many rows each container has: those of deleted blocks count little."""
    counted = Counter[int]()
    for table, names in (
        (runs, ("ends", "first_chunks", "last_chunks", "inner_chunks", "inner_blocks")),
        (replicas, ("chunks", "blocks")),
    ):
        if table.num_rows:
            rows = np.sum([table[name].to_numpy() for name in names], axis=0)
            ids, places = np.unique(table["container_id"].to_numpy(), return_inverse=True)
            totals = np.bincount(places, weights=rows).astype(np.int64)
            counted.update(dict(zip(ids.tolist(), totals.tolist(), strict=True)))
    return counted


def _in_range(rows: pa.Table, wanted: Range) -> pa.Table:
    ids = rows["container_id"]
    keep = pc.less_equal(ids, wanted.last)
    if wanted.first is not None:
        keep = pc.and_(keep, pc.greater_equal(ids, wanted.first))
    return rows.filter(pc.fill_null(keep, wanted.first is None))


def _within(container_ids: Int64s, wanted: Range) -> Int64s:
    first = 0 if wanted.first is None else np.searchsorted(container_ids, wanted.first)
    return container_ids[first : np.searchsorted(container_ids, wanted.last, "right")]


def _sorted(table: pa.Table, *names: str) -> pa.Table:
    """By these columns, nulls first."""
    keys = {}
    for name in names:
        column = table[name]
        keys[name] = pc.fill_null(column, "" if pa.types.is_string(column.type) else -(1 << 63))
    return table.take(pc.sort_indices(pa.table(keys), [(name, "ascending") for name in names]))


def _ids(table: pa.Table) -> Int64s:
    return np.unique(table["container_id"].to_numpy())


def _counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {one["values"]: one["counts"] for one in pc.value_counts(column).to_pylist()}


def _store(stage: Stage, wave: FoldedWave) -> None:
    note: JsonObject = {
        "part_ids": list(wave.part_ids),
        "rows": wave.rows,
        "exact": wave.exact.tolist(),
        "exact_rows": wave.exact_rows.tolist(),
        "skipped": dict(wave.skipped),
    }
    stage.add(note, {"runs": wave.runs, "replicas": wave.replicas, "findings": wave.findings})


def _table_of(part: Part) -> str:
    return part.manifest or part.location


def _unreadable(detail: str) -> dict[str, object]:
    return {"kind": FindingKind.UNREADABLE.value, "lacking": [], "sources": [], "detail": detail}


def _texts(value: object) -> list[str]:
    assert isinstance(value, list)
    return value


def _pairs(value: object) -> list[tuple[str, str]]:
    assert isinstance(value, dict)
    return list(value.items())


def _numbers(value: object) -> list[int]:
    assert isinstance(value, list)
    return value


def _number(value: object) -> int:
    assert isinstance(value, int)
    return value


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Hold a folder against another sweep.

    Raises:
        BusyError: another process holds it.
    """
    path = folder / ".lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise disk_error("lock", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BusyError(
            f"another sweep writes to {folder}", hint="Wait for it, or give another --out."
        ) from error
    finally:
        os.close(fd)
