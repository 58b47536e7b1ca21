"""`treefold sweep`: check every replica of a cluster in bulk, and look at what earlier sweeps found.

The summary goes to stdout, how the sweep goes on to stderr. All that is computed is in `spark`; this says it.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from admin.answer import EXIT_FINDINGS, EXIT_PARTLY
from admin.output import LINE_EVERY_S, Output, console, print_json, print_line, print_table
from merkle.errors import UsageError
from merkle.plan import Verdict
from ozone.disk import Disk
from runtime.metrics import Metrics
from spark.gather import Gatherer
from spark.local import LocalEngine
from spark.model import REPLICA_SCHEMA, FindingKind, Source
from spark.output import JsonObject, Summary, Table
from spark.output import Output as Sweeps
from spark.report import Night, render, report_of
from spark.sweep import Request, Watcher
from spark.sweep import sweep as carry_out

# Shown to people; --json has them all.
_ROWS_SHOWN = 50
_DETAILS_MAX = 100_000
_PLACES = ("container", "block", "offset")
# A rate seen for less than this says nothing about the rest.
_ETA_AFTER_S = 3.0

_out = click.option(
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where sweeps are kept: one folder for all nights.",
)
_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group()
def sweep() -> None:
    """Check every replica of a cluster in bulk: roots first, then blocks and chunks of what differs.

    `run` reads chunk tables that agents exported, or volumes; `show` and `compare` look at what sweeps found.
    """


@sweep.command()
@click.option("--volume", "volumes", metavar="PATH", multiple=True, help="Root of an Ozone volume, read in place.")
@click.option(
    "--table",
    "tables",
    metavar="PATH",
    multiple=True,
    help="A chunk table: a folder of exports, a Parquet file, a folder of Parquet files, or an s3:// address.",
)
@click.argument("more", metavar="[PATH]...", nargs=-1)
@click.option(
    "--source",
    type=click.Choice([source.value for source in Source]),
    default=Source.TREE.value,
    show_default=True,
    help="Which truth of a volume is compared: stored trees (records where there is none), block records, or all data "
    "read anew. Tables have theirs.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of the local engine; as many as cores.")
@_out
@click.option("--fresh", is_flag=True, help="Begin anew where a sweep over the same inputs was not finished.")
@click.option(
    "--keep", type=click.IntRange(1), default=30, show_default=True, metavar="N", help="Sweeps that stay in DIR."
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write figures for Prometheus' textfile collector: node_exporter reads FILE.prom in its folder.",
)
@_json
@click.pass_obj
def run(
    output: Output,
    *,
    volumes: tuple[str, ...],
    tables: tuple[str, ...],
    more: tuple[str, ...],
    source: str,
    threads: int | None,
    out: Path,
    fresh: bool,
    keep: int,
    metrics_file: Path | None,
    as_json: bool,
) -> int:
    """Compare all replicas in volumes and chunk tables.

    Several tables may follow one --table. Open and erasure-coded replicas take no part. What cannot be read is skipped
    by name and never taken for absent. DIR gets the tables `roots`, `verdicts`, `findings` and `summary`, Parquet,
    partitioned by sweep_id, and a report. Interrupted or killed, the same command goes on where it was.

    \b
      treefold sweep run --table /exports/night --out /var/lib/treefold/sweeps
      treefold sweep run --volume /data/hdds1 --volume /mnt/dn2/hdds1 --source data --out /tmp/sweeps --json

    Exit status: 0 nothing found, 1 failed, 2 usage, 3 something diverged or is damaged, 5 nothing of that, but not all
    could be read, 8 another sweep writes to DIR, 130 interrupted.
    """
    if more and not tables:
        raise UsageError(f"{more[0]}: say --table or --volume before it")
    if not (tables or volumes):
        raise UsageError("give something to sweep: --table or --volume")
    request = Request(out, (*tables, *more), volumes, Source(source), fresh, keep)
    with talking(output) as watcher:
        summary = carry_out(request, LocalEngine(Gatherer(out / "work" / "spill", threads=threads)), watcher)
    sweeps = Sweeps(out, Disk())
    report = write_report(sweeps, summary.sweep_id)
    if metrics_file is not None:
        write_metrics(metrics_file, summary)
    if as_json:
        print_json(summary.json() | {"report": str(report)})
    else:
        print_summary(summary.json())
        _print_findings(sweeps, summary.sweep_id)
        print_line(f"report: {report}")
    return exit_status(summary)


@sweep.command()
@click.argument("sweep_id", metavar="ID")
@_out
@_json
def show(sweep_id: str, out: Path, as_json: bool) -> int:
    """Show a sweep: its summary, and what is wrong with which container.

    ID may be `latest`, or the beginning of an ID.
    """
    sweeps = Sweeps(out, Disk())
    sweep_id = sweeps.sweep(sweep_id)
    summary = sweeps.summary(sweep_id)
    if as_json:
        print_json(summary | {"containersDiverged": _details(sweeps, sweep_id)})
    else:
        print_summary(summary)
        _print_findings(sweeps, sweep_id)
    return 0


@sweep.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@_out
@_json
def compare(before: str, after: str, out: Path, as_json: bool) -> int:
    """Say what is new, healed, or persists from sweep A to B.

    It is said by container and kind of finding. What A found in a container that B did not see, or could not tell, is
    `unseen`: nobody knows whether it was healed.

    Exit status: 0 nothing new and nothing persists, 3 otherwise.
    """
    sweeps = Sweeps(out, Disk())
    earlier, later = sweeps.sweep(before), sweeps.sweep(after)
    changes = compared(sweeps, earlier, later)
    if as_json:
        lists = {
            name: [{"containerID": container_id, "kind": kind} for container_id, kind in places]
            for name, places in changes.items()
        }
        print_json({"before": earlier, "after": later} | lists)
    else:
        print_line(f"{earlier} -> {later}: " + ", ".join(f"{len(places)} {name}" for name, places in changes.items()))
        rows = [(name, container_id, kind) for name, places in changes.items() for container_id, kind in places]
        if rows:
            print_table(("CHANGE", "CONTAINER", "KIND"), rows[:_ROWS_SHOWN], numbers=("CONTAINER",))
        _print_rest(len(rows))
    return EXIT_FINDINGS if changes["new"] or changes["persisting"] else 0


@sweep.result_callback()
@click.pass_context
def _exit(ctx: click.Context, status: int) -> None:
    ctx.exit(status)


def exit_status(summary: Summary) -> int:
    """What `run` ends with."""
    unread = summary.findings.get(FindingKind.UNREADABLE.value, 0)
    if summary.diverged or sum(summary.findings.values()) > unread:
        return EXIT_FINDINGS
    return EXIT_PARTLY if summary.skipped or unread else 0


def compared(sweeps: Sweeps, before: str, after: str) -> Mapping[str, list[tuple[int, str]]]:
    """What two sweeps found in containers, by what became of it: container and kind, ascending."""
    earlier, later = _found(sweeps, before), _found(sweeps, after)
    verdicts = sweeps.read(Table.VERDICTS, after, ["container_id", "verdict"])
    known = verdicts.filter(pc.not_equal(verdicts["verdict"], Verdict.UNKNOWN.value))
    told = set(known["container_id"].to_pylist())
    gone = earlier - later
    return {
        "new": sorted(later - earlier),
        "persisting": sorted(later & earlier),
        "healed": sorted(place for place in gone if place[0] in told),
        "unseen": sorted(place for place in gone if place[0] not in told),
    }


def _found(sweeps: Sweeps, sweep_id: str) -> set[tuple[int, str]]:
    """Containers with the kinds of what diverged in them, or changed in silence."""
    verdicts = sweeps.read(Table.VERDICTS, sweep_id, ["container_id", "diverged"])
    diverged = verdicts.filter(verdicts["diverged"])["container_id"]
    findings = sweeps.read(Table.FINDINGS, sweep_id, ["container_id", "kind"])
    counts = pc.is_in(findings["container_id"], value_set=diverged)
    silent = pc.equal(findings["kind"], FindingKind.SILENT_CHANGE.value)
    places = findings.filter(pc.or_(counts, silent)).group_by(["container_id", "kind"]).aggregate([])
    return set(zip(places["container_id"].to_pylist(), places["kind"].to_pylist(), strict=True))


def print_summary(summary: JsonObject) -> None:
    """A summary for people."""
    print_line(
        f"sweep {summary['sweepID']} ({summary['engine']}, {summary['source']}): "
        f"{_number(summary['containers'])} containers, {_number(summary['replicas'])} replicas, "
        f"{_number(summary['rows'])} rows in {summary['seconds']} s"
    )
    verdicts = summary["verdicts"]
    assert isinstance(verdicts, dict)
    print_line("  " + (", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "nothing compared"))
    for key, style in (("skipped", "bold"), ("notes", "dim")):
        listed = summary[key]
        assert isinstance(listed, list)
        for one in listed[:_ROWS_SHOWN]:
            text = f"skipped: {one['input']}: {one['reason']}" if key == "skipped" else f"note: {one}"
            print_line(f"  {text}", style=style)
        _print_rest(len(listed))


def _print_findings(sweeps: Sweeps, sweep_id: str) -> None:
    findings = sweeps.read(Table.FINDINGS, sweep_id)
    for finding in findings.slice(0, _ROWS_SHOWN).to_pylist():
        places = ((name, finding[f"{name}_id" if name != "offset" else "chunk_offset"]) for name in _PLACES)
        where = " ".join(f"{name} {value}" for name, value in places if value is not None)
        whose = f": {', '.join(finding['lacking'])} <- {', '.join(finding['sources']) or 'nowhere'}"
        has_whose = finding["lacking"] or finding["sources"]
        detail = f": {finding['detail']}" if finding["detail"] else ""
        print_line(f"{where or 'input'}: {finding['kind']}{whose if has_whose else ''}{detail}")
    _print_rest(findings.num_rows)


def _print_rest(count: int) -> None:
    if count > _ROWS_SHOWN:
        print_line(f"and {count - _ROWS_SHOWN} more; --json has them all", style="dim")


def _details(sweeps: Sweeps, sweep_id: str) -> list[JsonObject]:
    """The diverged containers with their findings."""
    verdicts = sweeps.read(Table.VERDICTS, sweep_id)
    diverged = verdicts.filter(verdicts["diverged"]).slice(0, _DETAILS_MAX)
    findings = sweeps.read(Table.FINDINGS, sweep_id)
    named: dict[int, list[JsonObject]] = {}
    of_diverged = findings.filter(pc.is_in(findings["container_id"], value_set=diverged["container_id"]))
    for finding in of_diverged.to_pylist():
        named.setdefault(finding["container_id"], []).append(
            {
                "kind": finding["kind"],
                "blockID": finding["block_id"],
                "offset": finding["chunk_offset"],
                "lacking": finding["lacking"],
                "sources": finding["sources"],
                "detail": finding["detail"],
            }
        )
    return [
        {
            "containerID": row["container_id"],
            "verdict": row["verdict"],
            "replicas": row["replicas"],
            "excluded": row["excluded"],
            "detail": row["detail"],
            "findings": named.get(row["container_id"], []),
        }
        for row in diverged.sort_by("container_id").to_pylist()
    ]


def write_metrics(path: Path, summary: Summary) -> None:
    """The figures of the last sweep, for Prometheus' textfile collector.

    Raises:
        DiskError: the file cannot be written.
    """
    metrics = Metrics("sweep")
    metrics.set("sweep_finished_timestamp_seconds", time.time())
    metrics.set("sweep_duration_seconds", summary.seconds)
    metrics.set("sweep_rows", summary.rows)
    metrics.set("sweep_replicas", summary.replicas)
    metrics.set("sweep_inputs_skipped", len(summary.skipped))
    for verdict in Verdict:
        metrics.set("sweep_containers", summary.verdicts.get(verdict.value, 0), verdict=verdict.value)
    for kind, count in summary.findings.items():
        metrics.set("sweep_findings", count, kind=kind)
    disk = Disk()
    disk.make_folder(path.absolute().parent)
    disk.replace(path.absolute(), metrics.page())


def write_report(sweeps: Sweeps, sweep_id: str) -> Path:
    """The report of a complete sweep, one HTML file beside its tables.

    Raises:
        DiskError: it cannot be written, or a table of the sweep cannot be read.
    """
    verdicts = sweeps.read(Table.VERDICTS, sweep_id)
    diverged = verdicts.filter(verdicts["diverged"])
    held, replicas = Counter[tuple[str, str]](), [REPLICA_SCHEMA.empty_table()]
    for piece in sweeps.pieces(Table.ROOTS, sweep_id, REPLICA_SCHEMA.names):
        counted = piece.group_by(["datanode", "volume"]).aggregate([([], "count_all")]).to_pylist()
        held.update({(row["datanode"], row["volume"]): row["count_all"] for row in counted})
        replicas.append(piece.filter(pc.is_in(piece["container_id"], value_set=diverged["container_id"])))
    summary = sweeps.summary(sweep_id)
    report = report_of(
        _night(summary),
        engine=str(summary["engine"]),
        held=held,
        replicas=pa.concat_tables(replicas),
        verdicts=diverged,
        findings=sweeps.read(Table.FINDINGS, sweep_id).slice(0, _DETAILS_MAX),
        earlier=[_night(sweeps.summary(name)) for name in sweeps.sweeps() if name < sweep_id],
        skipped=[f"{one['input']}: {one['reason']}" for one in _objects(summary["skipped"])],
    )
    disk, path = Disk(), sweeps.report(sweep_id)
    disk.make_folder(path.parent)
    disk.replace(path, render(report).encode())
    return path


def _night(summary: JsonObject) -> Night:
    verdicts, containers = summary["verdicts"], summary["containers"]
    assert isinstance(verdicts, dict)
    assert isinstance(containers, int)
    return Night(str(summary["sweepID"]), datetime.fromisoformat(str(summary["startedAt"])), containers, verdicts)


def _objects(value: object) -> list[JsonObject]:
    assert isinstance(value, list)
    return value


@dataclass(slots=True)
class _Stage:
    what: str
    total: int
    unit: str
    since: float
    done: int = 0
    said: float = 0.0

    def text(self, now: float) -> str:
        rate = self.done / max(now - self.since, 1e-9)
        text = f"{self.what}  {self.done:,} of {self.total:,} {self.unit}  {rate:,.0f}/s"
        if now - self.since >= _ETA_AFTER_S and 0 < self.done < self.total:
            text += f"  ETA {round((self.total - self.done) / rate)}s"
        return text


class _Lines:
    """Progress for logs: a line when a stage begins, and one now and then."""

    def __init__(self) -> None:
        self._stage: _Stage | None = None

    def note(self, text: str) -> None:
        click.echo(text, err=True)

    def begin(self, what: str, total: int, unit: str) -> None:
        now = time.monotonic()
        self._stage = _Stage(what, total, unit, now, said=now)

    def advance(self, count: int) -> None:
        stage, now = self._stage, time.monotonic()
        assert stage is not None
        stage.done += count
        if now - stage.said >= LINE_EVERY_S:
            stage.said = now
            click.echo(stage.text(now), err=True)


class _Bars:
    """Progress for people who watch."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None
        self._stage: _Stage | None = None

    def note(self, text: str) -> None:
        self._progress.console.print(text)

    def begin(self, what: str, total: int, unit: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._stage = _Stage(what, total, unit, time.monotonic())
        self._task = self._progress.add_task(what, total=total, rate="")

    def advance(self, count: int) -> None:
        assert self._task is not None
        assert self._stage is not None
        self._stage.done += count
        rate = self._stage.done / max(time.monotonic() - self._stage.since, 1e-9)
        self._progress.update(self._task, advance=count, rate=f"{rate:,.0f} {self._stage.unit}/s")


@contextmanager
def talking(output: Output) -> Iterator[Watcher]:
    """Who tells how a sweep goes on: a bar where somebody watches, lines elsewhere."""
    if not output.bars:
        yield _Lines()
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    ) as progress:
        yield _Bars(progress)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
