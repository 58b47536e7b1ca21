"""Run a sweep: fold all parts, compare all containers, write the tables.

The stages are pure functions in other modules; an engine decides where they run and how
much at a time. A wave is on disk when `store` returns, so an interrupted sweep resumes
after its last wave. It writes the same tables as an uninterrupted one.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.places import check_name
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import DiskError
from runtime.progress import ProgressSink
from sweep.engine import Engine, FoldedWave, SweepRequest, absolute
from sweep.errors import SweepInputError, SweepWorkError
from sweep.faults import list_once
from sweep.gather import Gatherer
from sweep.history import History, whole_names
from sweep.inputs import (
    ALL_OR_NONE,
    NO_ROWS,
    Inputs,
    export_datanodes,
    export_findings,
    open_export,
    table_parts,
)
from sweep.ledger import ROOT_KEYS, Ledger, ReadPlaces, settle_expected
from sweep.model import (
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    VERDICT_SCHEMA,
    FindingKind,
    Part,
    PartKind,
    RootMethod,
)
from sweep.output import (
    JsonObject,
    SkippedInput,
    Summary,
    SweepStore,
    SweepTable,
    SweepTotals,
    container_ids_of,
    new_sweep_id,
    write_atomically,
)
from sweep.runs import RUN_SCHEMA, settle
from sweep.tally import Comparisons, rows_by_container, sort_by
from sweep.trees import TreeJob, part_file
from sweep.volumes import OpenVolumes, copy_part, open_volumes
from sweep.work import (
    Plan,
    Range,
    StoredTable,
    SweepStage,
    WorkFolders,
    exclusive,
    number_of,
    numbers_of,
    pairs_of,
    plan_key,
    ranges,
    rows_in_range,
    texts_of,
    unreadable_error,
)

Int64s = npt.NDArray[np.int64]


def sweep(
    request: SweepRequest,
    engine: Engine,
    progress: ProgressSink,
    *,
    disk: Disk | None = None,
    report: Callable[[Summary], Sequence[str]] = lambda _: (),
) -> Summary:
    """Run a sweep, or resume an unfinished one over the same inputs.

    `report` is called with the summary before the sweep is complete, so a complete
    sweep always has its report. It returns notes for the summary.

    Raises:
        BusyError: another sweep is running in the folder.
        SweepInputError: none of the inputs can be read.
        DiskError: results cannot be stored.
        ChunkTableError: an input cannot be read any more.
        UsageError: a name is invalid, or `out` is inside a table.
        AmbiguousIdError: what is gone is the beginning of several datanodes' IDs.
    """
    for name in (str(request.out), *request.tables, *request.volumes):
        check_name(name)
    request = absolute(request)
    disk, was_there = disk or Disk(), os.path.lexists(request.out)
    disk.make_folder(request.out)
    with exclusive(request.out), ExitStack() as stack:
        work, output = WorkFolders(request.out, disk), SweepStore(request.out, disk)
        request = replace(request, gone=whole_names(output, request.gone))
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

        def run(request: SweepRequest) -> Summary:
            new = _new_plan(engine.name, request.source, volumes, inputs, skipped)
            plan = work.resume_or_begin(new, fresh=request.fresh, note=progress.note)
            complete = output.sweeps()
            for sweep_id in set(complete) - {plan.sweep_id}:
                # A crash may have left the work folder of a complete sweep.
                work.remove(sweep_id)
            begun = _Sweep(
                request, plan, engine, progress, volumes, inputs, work, output, disk, report
            )
            return begun.finish() if plan.sweep_id in complete else begun.run()

        try:
            return run(request)
        except SweepWorkError as error:
            progress.note(f"starting over: {error.message}")
            return run(replace(request, fresh=True))


def _new_plan(
    engine: str,
    source: TreeSource,
    volumes: OpenVolumes,
    inputs: Inputs,
    skipped: tuple[SkippedInput, ...],
) -> Plan:
    now, parts, manifests = datetime.now(UTC), (*volumes.parts, *inputs.parts), inputs.manifests
    key = plan_key(engine, source, parts, skipped, manifests)
    return Plan(new_sweep_id(now), now, engine, source, parts, skipped, manifests, key)


class _Sweep:
    """Runs one sweep. Each stage skips its finished work."""

    def __init__(
        self,
        request: SweepRequest,
        plan: Plan,
        engine: Engine,
        progress: ProgressSink,
        volumes: OpenVolumes,
        inputs: Inputs,
        work: WorkFolders,
        output: SweepStore,
        disk: Disk,
        report: Callable[[Summary], Sequence[str]],
    ) -> None:
        self._request = request
        self._plan = plan
        self._engine = engine
        self._progress = progress
        self._volumes = volumes
        self._inputs = inputs
        self._work = work
        self._output = output
        self._disk = disk
        self._report = report
        self._history = History(request.out, disk)

    def run(self) -> Summary:
        """Run the unfinished stages, and return the summary."""
        started = time.monotonic()
        copied = self._copy_volumes()
        folded = self._fold(copied)
        parts = self._parts(copied)
        summary = self._compare(parts, folded)
        summary = replace(summary, seconds=time.monotonic() - started)
        if self._request.write_trees:
            notes = (*summary.notes, *self._write_trees(parts))
            summary = replace(summary, notes=notes, seconds=time.monotonic() - started)
        self._history.save(self._plan.sweep_id, parts, self._plan.manifests)
        summary = replace(summary, notes=(*summary.notes, *self._report(summary)))
        self._output.write_summary(summary)
        self._clean_up()
        return summary

    def finish(self) -> Summary:
        """Clean up after a sweep that is complete, and return its summary."""
        try:
            summary = Summary.of(self._output.summary(self._plan.sweep_id))
        except DiskError as error:
            raise unreadable_error(
                self._output.path(SweepTable.SUMMARY, self._plan.sweep_id), error
            ) from error
        self._clean_up()
        return summary

    def _clean_up(self) -> None:
        self._output.retain(self._request.keep)
        self._history.retain(self._output.sweeps())
        # Last: while the plan exists, the same command resumes here.
        self._work.remove(self._plan.sweep_id)

    def _copy_volumes(self) -> tuple[Part, ...]:
        """Copy the volumes' rows to files, and return the parts of these files."""
        stage = self._work.stage(self._plan, "copied")
        done = {str(note["part_id"]) for note in stage.notes()}
        folder = self._history.folder(self._plan.sweep_id)
        parts = [part for part in self._plan.parts if part.kind is PartKind.VOLUME]
        wanted = [part for part in parts if part.part_id not in done]
        self._progress.begin("reading volumes", len(wanted), "parts")
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
                    self._progress.advance(1)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        copied = table_parts([str(folder / f"{part.part_id}.parquet") for part in parts])
        for one in copied.skipped:
            if one.reason != NO_ROWS:
                raise unreadable_error(Path(one.input), one.reason)
        return copied.parts

    def _parts(self, copied: Sequence[Part]) -> tuple[Part, ...]:
        return (*copied, *(part for part in self._plan.parts if part.kind is PartKind.FILE))

    def _fold(self, copied: Sequence[Part]) -> SweepStage:
        """Fold all parts, except those of tables that have an unreadable part."""
        while True:
            parts = self._parts(copied)
            stage = self._work.stage(self._plan, "folded")
            notes = stage.notes()
            done = {part_id for note in notes for part_id in texts_of(note["part_ids"])}
            wanted = [part for part in parts if part.part_id not in done]
            if done:
                self._progress.note(f"{len(done)} of {len(parts)} parts were read before")
            if wanted:
                self._progress.begin("reading", sum(part.rows for part in wanted), "rows")
                self._engine.fold(wanted, partial(_store, stage), self._progress.advance)
            unread = {
                part_id: reason
                for note in stage.notes()
                for part_id, reason in pairs_of(note["skipped"])
            }
            if not unread:
                return stage
            for part in copied:
                if part.part_id in unread:
                    raise unreadable_error(Path(part.location), unread[part.part_id])
            # A replica may continue in another part of the same table; with half of its
            # rows it would seem damaged.
            tables = {
                _table_of(part): unread[part.part_id] + (ALL_OR_NONE if part.table else "")
                for part in parts
                if part.part_id in unread
            }
            skipped = tuple(SkippedInput(table, reason) for table, reason in tables.items())
            for one in skipped:
                self._progress.note(f"left out: {one.input}: {one.reason}")
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

    def _compare(self, parts: Sequence[Part], folded: SweepStage) -> Summary:
        """Compare all containers, and write all tables except the summary."""
        sweep_id = self._plan.sweep_id
        totals, judged = SweepTotals(), self._work.path(self._plan, "judged.parquet")
        with (
            self._output.write_table(SweepTable.ROOTS, sweep_id) as roots,
            write_atomically(judged, VERDICT_SCHEMA, self._disk) as verdicts,
        ):
            comparisons = Comparisons(roots, verdicts, totals)
            unsettled, rows = self._compare_settled(folded, comparisons)
            exact = self._sort(parts, unsettled, rows)
            from_rows = exact.table("replicas", REPLICA_SCHEMA)
            for wanted in ranges([from_rows]):
                comparisons.add(from_rows.read(wanted))
            inspected = self._inspect(parts, comparisons)
            for decided in inspected.table("verdicts", VERDICT_SCHEMA).tables():
                verdicts.add(decided)
        notes = self._settle_expected(judged, totals)
        stages = (self._work.stage(self._plan, "copied"), folded, exact, inspected)
        summary = self._summary(parts, folded, comparisons, stages)
        return replace(summary, notes=(*notes, *summary.notes))

    def _settle_expected(self, judged: Path, totals: SweepTotals) -> tuple[str, ...]:
        """Write the final verdicts, and the expected replicas that were not read.
        Returns notes on earlier sweeps.
        """
        sweep_id, manifests = self._plan.sweep_id, self._plan.manifests
        ledger = Ledger(self._output, self._history, sweep_id, self._request.required)
        ledger.add_exports(manifests, self._plan.skipped)
        volumes = {(one.datanode, one.volume) for one in self._volumes.surveys.values()}
        for _, _, manifest in map(open_export, manifests):
            volumes |= {(manifest.datanode, volume) for volume in manifest.volumes}
        datanodes = self._output.datanodes(sweep_id) | {datanode for datanode, _ in volumes}
        places = ReadPlaces(
            frozenset(volumes), datanodes, self._plan.skipped, ledger.without_events
        )
        roots = StoredTable([self._output.path(SweepTable.ROOTS, sweep_id)], ROOT_KEYS)
        read = StoredTable([judged], VERDICT_SCHEMA)
        with (
            self._output.write_table(SweepTable.VERDICTS, sweep_id) as verdicts,
            self._output.write_table(SweepTable.UNSEEN, sweep_id) as unseen,
        ):
            wanted = ranges([roots, read, *ledger.tables])
            for settled, unread in settle_expected(
                ledger, wanted, roots, read, places, self._request.gone
            ):
                verdicts.add(settled)
                unseen.add(unread)
                totals.add_verdicts(settled)
        return ledger.notes

    def _compare_settled(
        self, folded: SweepStage, comparisons: Comparisons
    ) -> tuple[Int64s, Int64s]:
        """Compare the containers whose runs settle. Returns the others, whose rows must
        be sorted, ascending, and the approximate number of rows of each.
        """
        runs, replicas = folded.table("runs", RUN_SCHEMA), folded.table("replicas", REPLICA_SCHEMA)
        requested = Counter[int]()
        for note in folded.notes():
            requested.update(
                dict(zip(numbers_of(note["exact"]), numbers_of(note["exact_rows"]), strict=True))
            )
        named = np.array(sorted(requested), np.int64)
        ids, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for wanted in ranges([runs, replicas]):
            pieces, whole = runs.read(wanted), replicas.read(wanted)
            settled = settle(pieces)
            # With both runs and replicas, neither has all rows of the container.
            mixed = np.intersect1d(container_ids_of(pieces), container_ids_of(whole))
            exact = np.union1d(np.union1d(settled.exact, _ids_in_range(named, wanted)), mixed)
            counted = rows_by_container(pieces, whole)
            ids.append(exact)
            rows.append(
                np.array(
                    [max(1, counted.get(i, 0) + requested[i]) for i in exact.tolist()], np.int64
                )
            )
            held = pa.concat_tables([settled.replicas, whole])
            is_exact = pc.is_in(held["container_id"], value_set=pa.array(exact))
            comparisons.add(held.filter(pc.invert(is_exact)))
        return np.concatenate(ids), np.concatenate(rows)

    def _sort(self, parts: Sequence[Part], container_ids: Int64s, rows: Int64s) -> SweepStage:
        """Compute the replicas of these containers from their sorted rows."""
        stage = self._work.stage(self._plan, "exact")
        left = _unfinished(stage, container_ids)
        if left.any():
            container_ids, rows = container_ids[left], rows[left]
            self._progress.begin("sorting", len(container_ids), "containers")
            for found in self._engine.exact(parts, container_ids, rows):
                ids = container_ids_of(found.replicas)
                stage.add(
                    {"containers": ids.tolist()},
                    {"replicas": found.replicas, "findings": found.findings},
                )
                self._progress.advance(len(ids))
        return stage

    def _inspect(self, parts: Sequence[Part], comparisons: Comparisons) -> SweepStage:
        """Decide the candidates by their rows."""
        stage = self._work.stage(self._plan, "inspected")
        container_ids, rows, replicas = comparisons.candidates()
        left = _unfinished(stage, container_ids)
        if left.any():
            container_ids, rows = container_ids[left], rows[left]
            self._progress.begin("comparing", len(container_ids), "containers")
            for found in self._engine.inspect(parts, container_ids, rows, replicas):
                ids = container_ids_of(found.verdicts)
                stage.add(
                    {"containers": ids.tolist()},
                    {"verdicts": found.verdicts, "findings": found.findings},
                )
                self._progress.advance(len(ids))
        return stage

    def _summary(
        self,
        parts: Sequence[Part],
        folded: SweepStage,
        comparisons: Comparisons,
        stages: Sequence[SweepStage],
    ) -> Summary:
        """Find silent changes, write the findings, and return the summary with
        `seconds` 0.
        """
        sweep_id, totals = self._plan.sweep_id, comparisons.totals
        seen, notes = self._history.last_seen(self._output, sweep_id)
        of_agents, lost = export_findings(self._plan.manifests)
        skipped = (*self._plan.skipped, *lost, *self._gone(seen))
        unread = [_unreadable_row(f"{one.input}: {one.reason}") for one in skipped]
        silent = self._history.silent_changes_since(
            self._output,
            sweep_id,
            Gatherer(self._request.out / "work" / "spill"),
            parts,
            self._plan.manifests,
            seen,
        )
        loose = [
            *comparisons.findings,
            pa.Table.from_pylist(unread, FINDING_SCHEMA),
            of_agents,
            self._volumes.findings,
            silent.findings,
        ]
        tables = [stage.table("findings", FINDING_SCHEMA) for stage in stages]
        self._write_findings(pa.concat_tables(loose), tables, totals)
        return Summary(
            sweep_id=sweep_id,
            engine=self._plan.engine,
            source=",".join(sorted(self._output.sources(sweep_id))) or "none",
            started_at=self._plan.started_at,
            seconds=0.0,
            rows=sum(number_of(note["rows"]) for note in folded.notes()),
            containers=totals.containers,
            replicas=totals.replicas,
            excluded=totals.excluded,
            compared=totals.compared,
            unseen=totals.unseen,
            diverged=tuple(sorted(totals.diverged)),
            verdicts=dict(sorted(totals.verdicts.items())),
            findings=dict(sorted(totals.findings.items())),
            paths=dict(sorted(totals.paths.items())),
            skipped=skipped,
            notes=(*self._inputs.notes, *_engine_notes(folded), *notes, *silent.notes),
            previous=silent.previous,
            volumes_created_ms={**self._inputs.volumes_created_ms, **self._volumes.created_ms},
        )

    def _gone(self, seen: Mapping[str, str]) -> Iterator[SkippedInput]:
        """The datanodes that were in an earlier sweep (`seen`: which) and are not in
        this one.
        """
        held = self._output.datanodes(self._plan.sweep_id) | export_datanodes(self._plan.manifests)
        held |= {survey.datanode for survey in self._volumes.surveys.values()}
        # Agents name the export folder after the datanode; if it was skipped, it is
        # listed already.
        named = {name for one in self._plan.skipped for name in one.input.split("/")}
        for datanode in sorted(seen.keys() - held - named - set(self._request.gone)):
            yield SkippedInput(
                f"datanode {datanode}",
                f"it was in sweep {seen[datanode]} and is in no input that was read; its replicas"
                f" were not compared (--gone {datanode} if it was removed on purpose)",
            )

    def _write_trees(self, parts: Sequence[Part]) -> Sequence[str]:
        """Write the trees of all replicas; returns notes."""
        sweep_id, rows = self._plan.sweep_id, Counter[int]()
        others, ordered = [np.empty(0, np.int64)], False
        for piece in self._output.pieces(
            SweepTable.ROOTS, sweep_id, ["container_id", "path", "chunks", "blocks"]
        ):
            is_ordered = pc.equal(piece["path"], RootMethod.FILE_WISE.value)
            unordered = np.unique(piece["container_id"].filter(pc.invert(is_ordered)).to_numpy())
            others.append(unordered)
            held = pc.is_in(piece["container_id"], value_set=pa.array(unordered))
            rows.update(rows_by_container(RUN_SCHEMA.empty_table(), piece.filter(held)))
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
        self._progress.begin("writing trees", sum(part.rows for part in wanted.values()), "rows")
        for packed in self._engine.trees(job, self._disk):
            stage.add(asdict(packed), {})
            if packed.name in wanted:
                self._progress.advance(wanted[packed.name].rows)
        # A resumed sweep may have several notes for one file; the last one counts.
        too_large = sum(
            {str(note["name"]): number_of(note["too_large"]) for note in stage.notes()}.values()
        )
        return (
            [f"{too_large} trees were not written: they are larger than agents store"]
            if too_large
            else []
        )

    def _write_findings(
        self, loose: pa.Table, stages: Sequence[StoredTable], totals: "SweepTotals"
    ) -> None:
        """Write all findings once, sorted by container, block and offset."""
        with self._output.write_table(SweepTable.FINDINGS, self._plan.sweep_id) as writer:
            for wanted in ranges(stages):
                rows = pa.concat_tables(
                    [rows_in_range(loose, wanted), *(stage.read(wanted) for stage in stages)]
                )
                rows = list_once(rows)
                rows = sort_by(rows, "container_id", "block_id", "chunk_offset", "kind", "detail")
                writer.add(rows)
                totals.add_findings(rows)


def _unfinished(stage: SweepStage, container_ids: Int64s) -> npt.NDArray[np.bool_]:
    """Which of these containers have no entry in the stage."""
    done = [i for note in stage.notes() for i in numbers_of(note["containers"])]
    return ~np.isin(container_ids, np.array(done, np.int64))


def _ids_in_range(container_ids: Int64s, wanted: Range) -> Int64s:
    first = 0 if wanted.first is None else np.searchsorted(container_ids, wanted.first)
    return container_ids[first : np.searchsorted(container_ids, wanted.last, "right")]


def _store(stage: SweepStage, wave: FoldedWave) -> None:
    note: JsonObject = {
        "part_ids": list(wave.part_ids),
        "rows": wave.rows,
        "exact": wave.exact.tolist(),
        "exact_rows": wave.exact_rows.tolist(),
        "skipped": dict(wave.skipped),
        "notes": list(wave.notes),
    }
    stage.add(note, {"runs": wave.runs, "replicas": wave.replicas, "findings": wave.findings})


def _engine_notes(folded: SweepStage) -> tuple[str, ...]:
    # Work of an earlier release has none.
    return tuple(text for note in folded.notes() for text in texts_of(note.get("notes", [])))


def _table_of(part: Part) -> str:
    return part.manifest or part.table or part.location


def _unreadable_row(detail: str) -> dict[str, object]:
    return {"kind": FindingKind.UNREADABLE.value, "lacking": [], "sources": [], "detail": detail}
