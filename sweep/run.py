"""Run a sweep: fold all parts, compare all containers, write the tables.

The stages are pure functions in other modules; an engine decides where they run and how
much at a time. A wave is on disk when `store` returns, so an interrupted sweep resumes
after its last wave. It writes the same tables as an uninterrupted one.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial, reduce
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from chunktable.files import AnyPath, Files, path_of
from chunktable.places import check_name
from merkle.checksum import fingerprint
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import DiskError
from runtime.progress import ProgressSink
from sweep.by_range import run_by_range, unfinished
from sweep.engine import Engine, FoldedWave, SweepRequest, absolute
from sweep.errors import SweepInputError, SweepWorkError
from sweep.exports import Exports, export_findings, parts_of_holders
from sweep.history import History, whole_names
from sweep.inputs import (
    ALL_OR_NONE,
    NO_ROWS,
    Inputs,
    table_parts,
)
from sweep.lease import exclusive
from sweep.ledger import ROOT_KEYS, Ledger, ReadPlaces
from sweep.model import (
    FINDING_SCHEMA,
    REPLICA_SCHEMA,
    REQUEST_SCHEMA,
    VERDICT_SCHEMA,
    FindingKind,
    Part,
    PartKind,
    RootMethod,
)
from sweep.night import Night
from sweep.output import (
    JsonObject,
    SkippedInput,
    Summary,
    SweepStore,
    SweepTable,
    SweepTableWriter,
    new_sweep_id,
)
from sweep.pieces import StoredTable, unreadable_error
from sweep.runs import RUN_SCHEMA
from sweep.stages import CompareStage, ContainerStage, FindingsStage, requested_rows
from sweep.totals import SweepTotals
from sweep.trees import TreeJob, part_file
from sweep.volumes import OpenVolumes, copy_part, open_volumes
from sweep.work import (
    Plan,
    SweepStage,
    WorkFolders,
    number_of,
    pairs_of,
    plan_key,
    texts_of,
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
    disk, out = disk or Disk(), request.out
    is_new = isinstance(out, Path) and not os.path.lexists(out)
    Files(disk).make_folder(out)
    with exclusive(out, progress.note) as check, ExitStack() as stack:
        output = SweepStore(out, disk, check)
        work = WorkFolders(out, output.access)
        request = replace(request, gone=whole_names(output, request.gone))
        scratch = stack.enter_context(_scratch_folder(out, "shadows", disk))
        volumes = stack.enter_context(open_volumes(request.volumes, request.source, scratch, disk))
        inputs = table_parts(request.tables, for_each=engine.for_each)
        skipped = (*volumes.skipped, *inputs.skipped)
        if not (volumes.surveys or inputs.parts or inputs.manifests):
            if is_new:
                output.access.remove_folder(out)
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


@contextmanager
def _scratch_folder(out: AnyPath, name: str, disk: Disk) -> Iterator[Path]:
    """An empty folder of this machine for what only this process needs; it is removed
    afterwards. It lies in the work folder, which has room, unless this is in a bucket.
    """
    if not isinstance(out, Path):
        with TemporaryDirectory(prefix="treefold-") as temporary:
            yield Path(temporary)
        return
    scratch = out / "work" / name
    disk.remove_folder(scratch)
    disk.make_folder(scratch)
    try:
        yield scratch
    finally:
        disk.remove_folder(scratch)


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
        self._history = History(request.out, output.access)

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
        self._history.save(self._plan.sweep_id, parts, self._exports(), self._engine.for_each)
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
                copy_part(
                    part, self._volumes, folder / f"{part.part_id}.parquet", self._output.access
                )[1],
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
                raise unreadable_error(path_of(one.input), one.reason)
        return copied.parts

    def _parts(self, copied: Sequence[Part]) -> tuple[Part, ...]:
        files = (part for part in self._plan.parts if part.kind is PartKind.FILE)
        exports = self._inputs.exports
        return (*copied, *(replace(one, export=exports.get(one.manifest or "")) for one in files))

    def _exports(self) -> Exports:
        """The exports that were read."""
        return {place: self._inputs.exports[place] for place in self._plan.manifests}

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
                places = {name: stage.place(name, of) for name, of in _FOLDED.items()}
                store = partial(_store, stage)
                self._engine.fold(wanted, places, store, self._progress.advance)
            unread = {
                part_id: reason
                for note in stage.notes()
                for part_id, reason in pairs_of(note["skipped"])
            }
            if not unread:
                return stage
            for part in copied:
                if part.part_id in unread:
                    raise unreadable_error(path_of(part.location), unread[part.part_id])
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
        totals = SweepTotals()
        with self._write_tables(SweepTable.ROOTS) as roots:
            inputs = {name: folded.table(name, schema) for name, schema in _FOLDED.items()}
            compared = self._by_range("compared", CompareStage(), inputs, roots, totals)
            exact = self._sort(parts, compared)
            # The others, whose rows had to be sorted.
            inputs = {"replicas": exact.table("replicas", REPLICA_SCHEMA)}
            others = self._by_range("compared-sorted", CompareStage(), inputs, roots, totals)
        candidates, judged, chosen = (
            compared.table(name, schema).plus(others.table(name, schema))
            for name, schema in (
                ("candidates", REQUEST_SCHEMA),
                ("judged", VERDICT_SCHEMA),
                ("chosen", REPLICA_SCHEMA),
            )
        )
        inspected = self._inspect(parts, candidates, chosen)
        judged = judged.plus(inspected.table("verdicts", VERDICT_SCHEMA))
        notes = self._settle_expected(judged, totals)
        found = [self._work.stage(self._plan, "copied"), folded, exact, inspected]
        findings = [stage.table("findings", FINDING_SCHEMA) for stage in found]
        findings += [stage.table("faults", FINDING_SCHEMA) for stage in (compared, others)]
        summary = self._summary(parts, folded, findings, totals)
        return replace(summary, notes=(*notes, *summary.notes))

    @contextmanager
    def _write_tables(self, *tables: SweepTable) -> Iterator[Mapping[str, SweepTableWriter]]:
        with ExitStack() as stack:
            yield {
                table.value: stack.enter_context(
                    self._output.write_table(table, self._plan.sweep_id)
                )
                for table in tables
            }

    def _by_range(
        self,
        name: str,
        work: ContainerStage,
        inputs: Mapping[str, StoredTable],
        writers: Mapping[str, SweepTableWriter],
        totals: SweepTotals,
        *,
        key: str = "",
    ) -> SweepStage:
        """Run a stage for all containers. Its outputs that have a writer are tables of
        the sweep; the others are tables of the returned stage.
        """
        stage = self._work.stage(self._plan, name)
        places = {table: stage.place(table, schema) for table, schema in work.schemas.items()}
        places |= {
            table: self._output.place(SweepTable(table), self._plan.sweep_id) for table in writers
        }
        run_by_range(self._engine, stage, work, inputs, places, writers, totals, key=key)
        return stage

    def _settle_expected(self, judged: StoredTable, totals: SweepTotals) -> tuple[str, ...]:
        """Write the final verdicts, and the expected replicas that were not read.
        Returns notes on earlier sweeps.
        """
        sweep_id, exports = self._plan.sweep_id, self._exports()
        ledger = Ledger(
            self._output, self._history, sweep_id, self._request.required, self._engine.for_each
        )
        ledger.add_exports(exports, self._plan.skipped)
        volumes = {(one.datanode, one.volume) for one in self._volumes.surveys.values()}
        for manifest in exports.values():
            volumes |= {(manifest.datanode, volume) for volume in manifest.volumes}
        datanodes = self._output.datanodes(sweep_id) | {datanode for datanode, _ in volumes}
        places = ReadPlaces(
            frozenset(volumes), datanodes, self._plan.skipped, ledger.without_events
        )
        inputs = {"judged": judged}
        if ledger.expects_any:
            inputs["roots"] = self._output.stored(SweepTable.ROOTS, sweep_id, ROOT_KEYS)
            inputs |= ledger.inputs(self._work.stage(self._plan, "expected"))
        stage = ledger.stage(places, self._request.gone)
        with self._write_tables(SweepTable.VERDICTS, SweepTable.UNSEEN) as writers:
            key = ledger.key(self._request.gone)
            self._by_range("settled", stage, inputs, writers, totals, key=key)
        return ledger.notes

    def _sort(self, parts: Sequence[Part], compared: SweepStage) -> SweepStage:
        """Compute the replicas of the containers whose runs did not settle, from their
        sorted rows.
        """
        stage = self._work.stage(self._plan, "exact")
        container_ids, rows = unfinished(compared.table("exact", REQUEST_SCHEMA), stage, "replicas")
        if len(container_ids):
            self._progress.begin("sorting", len(container_ids), "containers")
            places = {name: stage.place(name, of) for name, of in _SORTED.items()}
            for found in self._engine.exact(parts, container_ids, rows, places):
                stage.add({}, {"replicas": found.replicas, "findings": found.findings}, found.files)
                self._progress.advance(found.containers)
        return stage

    def _inspect(
        self, parts: Sequence[Part], candidates: StoredTable, replicas: StoredTable
    ) -> SweepStage:
        """Decide the candidates by their rows."""
        stage = self._work.stage(self._plan, "inspected")
        container_ids, rows = unfinished(candidates, stage, "verdicts")
        if len(container_ids):
            self._progress.begin("comparing", len(container_ids), "containers")
            places = {name: stage.place(name, of) for name, of in _INSPECTED.items()}
            holders = parts_of_holders(parts, replicas)
            for found in self._engine.inspect(holders, container_ids, rows, replicas, places):
                stage.add({}, {"verdicts": found.verdicts, "findings": found.findings}, found.files)
                self._progress.advance(found.containers)
        return stage

    def _summary(
        self,
        parts: Sequence[Part],
        folded: SweepStage,
        findings: Sequence[StoredTable],
        totals: SweepTotals,
    ) -> Summary:
        """Find silent changes, write all findings, and return the summary with
        `seconds` 0.
        """
        sweep_id = self._plan.sweep_id
        seen, notes = self._history.last_seen(self._output, sweep_id)
        of_agents, lost = export_findings(self._exports())
        skipped = (*self._plan.skipped, *lost, *self._gone(seen))
        unread = [_unreadable_row(f"{one.input}: {one.reason}") for one in skipped]
        revisited = self._work.stage(self._plan, "revisited")
        night = Night(self._engine, self._by_range, parts, revisited)
        silent = self._history.silent_changes_since(
            self._output, sweep_id, night, self._exports(), seen
        )
        loose = [
            pa.Table.from_pylist(unread, FINDING_SCHEMA),
            of_agents,
            self._volumes.findings,
        ]
        findings = [*findings, revisited.table("findings", FINDING_SCHEMA)]
        self._write_findings(pa.concat_tables(loose), findings, totals, repr(revisited.notes()))
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
            without_tree=totals.without_tree,
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
        held = self._output.datanodes(self._plan.sweep_id)
        held |= {manifest.datanode for manifest in self._exports().values()}
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
        sweep_id, ordered = self._plan.sweep_id, False
        others = [REQUEST_SCHEMA.empty_table()]
        for piece in self._output.pieces(
            SweepTable.ROOTS, sweep_id, ["container_id", "path", "chunks", "blocks"]
        ):
            is_ordered = pc.equal(piece["path"], RootMethod.FILE_WISE.value)
            unordered = piece["container_id"].filter(pc.invert(is_ordered)).unique()
            held = pc.is_in(piece["container_id"], value_set=unordered)
            theirs = piece.filter(held)
            rows = pc.add(theirs["chunks"], theirs["blocks"])
            others.append(pa.table([theirs["container_id"], rows], schema=REQUEST_SCHEMA))
            ordered |= not pc.all(held).as_py()
        container_ids, rows = requested_rows(pa.concat_tables(others))
        stage = self._work.stage(self._plan, "trees")
        done = {str(note["name"]) for note in stage.notes()}
        wanted = {
            part_file(part): part for part in parts if ordered and part_file(part) not in done
        }
        job = TreeJob(
            self._output.trees(sweep_id),
            parts,
            tuple(wanted.values()),
            container_ids,
            rows,
        )
        self._output.access.make_folder(job.folder)
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
        self, loose: pa.Table, found: Sequence[StoredTable], totals: SweepTotals, silent: str
    ) -> None:
        """Write all findings once, sorted by container, block and offset. `silent`
        identifies the silent changes.
        """
        stage = self._work.stage(self._plan, "loose")
        stage.clear()
        stage.add({}, {"findings": loose})
        whole = reduce(StoredTable.plus, found, stage.table("findings", FINDING_SCHEMA))
        with self._write_tables(SweepTable.FINDINGS) as writers:
            # An earlier run may have found other silent changes.
            key = fingerprint((repr(loose.to_pylist()) + silent).encode()).hex()
            inputs = {"findings": whole}
            self._by_range("listed", FindingsStage(), inputs, writers, totals, key=key)


# The tables of the stages that engines fill.
_FOLDED = {"runs": RUN_SCHEMA, "replicas": REPLICA_SCHEMA, "requested": REQUEST_SCHEMA}
_SORTED = {"replicas": REPLICA_SCHEMA, "findings": FINDING_SCHEMA}
_INSPECTED = {"verdicts": VERDICT_SCHEMA, "findings": FINDING_SCHEMA}


def _store(stage: SweepStage, wave: FoldedWave) -> None:
    note: JsonObject = {
        "part_ids": list(wave.part_ids),
        "rows": wave.rows,
        "skipped": dict(wave.skipped),
        "notes": list(wave.notes),
    }
    tables = {
        "runs": wave.runs,
        "replicas": wave.replicas,
        "requested": wave.requested,
        "findings": wave.findings,
    }
    stage.add(note, tables, wave.files)


def _engine_notes(folded: SweepStage) -> tuple[str, ...]:
    # Work of an earlier release has none.
    return tuple(text for note in folded.notes() for text in texts_of(note.get("notes", [])))


def _table_of(part: Part) -> str:
    return part.manifest or part.table or part.location


def _unreadable_row(detail: str) -> dict[str, object]:
    return {"kind": FindingKind.UNREADABLE.value, "lacking": [], "sources": [], "detail": detail}
