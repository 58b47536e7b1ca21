"""`treefold sweep`: check every replica of a cluster in bulk, and look at what earlier
sweeps found.

The summary goes to stdout, how the sweep goes on to stderr. All that is computed is in
`spark`; this says it.
"""

import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc

from admin.answer import controller_options
from admin.demo.sweep_demo import demo
from admin.engines import ENGINES, LOCAL, SPARK, chosen_engine
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.metrics import Kind, Metric, Metrics
from runtime.output import print_json, print_line, print_table, size_text
from runtime.progress import ProgressStyle, progress_sink
from scm.client import ControllerClient
from spark.pack import pack as make
from sweep.engine import SweepRequest
from sweep.model import FindingKind
from sweep.output import JsonObject, Summary, SweepStore, SweepTable
from sweep.report import write_report
from sweep.run import sweep as carry_out

# Shown to people; --json has them all.
_ROWS_SHOWN = 50

_DETAILS_MAX = 100_000

# Who asks the controller.
_SWEEP = "treefold sweep"

_PLACES = ("container", "block", "offset")


class _Folder(click.Path):
    """A folder; an empty word, such as a variable that is not set, is not the one we
    are in.
    """

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Refuse an empty path; otherwise as click.Path."""
        if not os.fspath(value):
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


_out = click.option(
    "--out",
    metavar="DIR",
    type=_Folder(file_okay=False, path_type=Path),
    required=True,
    help="Where sweeps are kept: one folder for all nights.",
)

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group()
def sweep() -> None:
    """Check every replica of a cluster in bulk: roots first, then blocks and chunks of
    what differs.

    `run` reads chunk tables that agents exported, or volumes; `show` and `compare` look
    at what sweeps found.
    """


@sweep.command()
@click.option(
    "--volume",
    "volumes",
    metavar="PATH",
    multiple=True,
    help="Root of an Ozone volume, read in place.",
)
@click.option(
    "--table",
    "tables",
    metavar="PATH",
    multiple=True,
    help=(
        "A chunk table: a folder of exports, a Parquet file, a folder of Parquet files, or an s3://"
        " address."
    ),
)
@click.argument("more", metavar="[PATH]...", nargs=-1)
@click.option(
    "--source",
    type=click.Choice([source.value for source in TreeSource]),
    default=TreeSource.TREE.value,
    show_default=True,
    help=(
        "Which truth of a volume is compared: stored trees (records where there is none), block"
        " records, or all data read anew. Tables have theirs."
    ),
)
@click.option(
    "--engine",
    type=click.Choice(ENGINES),
    default=LOCAL,
    show_default=True,
    help="Threads of this machine, or a Spark cluster; the answers are the same.",
)
@click.option(
    "--threads", type=click.IntRange(1, 1024), help="Threads of the local engine; as many as cores."
)
@click.option(
    "--master",
    metavar="URL",
    help="The Spark master: local[*] if not said, spark://HOST:PORT, yarn, k8s://...",
)
@click.option(
    "--conf", "settings", metavar="KEY=VALUE", multiple=True, help="A setting of Spark's own."
)
@click.option(
    "--pack",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help=(
        "What `treefold sweep pack` made, for executors that have neither our code nor our"
        " libraries."
    ),
)
@_out
@click.option(
    "--fresh", is_flag=True, help="Begin anew where a sweep over the same inputs was not finished."
)
@click.option(
    "--keep",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    metavar="N",
    help="SweepStore that stay in DIR.",
)
@click.option(
    "--write-trees",
    is_flag=True,
    help=(
        "Write all trees too, as the bytes of Ozone's tree files: DIR/trees, Parquet, a row a"
        " replica. Those of two sweeps stay."
    ),
)
@click.option(
    "--gone",
    metavar="DATANODE",
    multiple=True,
    help=(
        "A datanode that was taken out of the cluster on purpose, and is not missed where an"
        " earlier sweep had it."
    ),
)
@click.option(
    "--metrics-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help=(
        "Write figures for Prometheus' textfile collector: node_exporter reads FILE.prom in its"
        " folder."
    ),
)
@click.option(
    "--reconcile",
    is_flag=True,
    help="Have the controller repair what can be repaired, within its own limits.",
)
@_json
@controller_options
@click.pass_obj
def run(
    output: ProgressStyle,
    *,
    controller: ControllerClient,
    volumes: tuple[str, ...],
    tables: tuple[str, ...],
    more: tuple[str, ...],
    source: str,
    engine: str,
    threads: int | None,
    master: str | None,
    settings: tuple[str, ...],
    pack: Path | None,
    out: Path,
    fresh: bool,
    keep: int,
    write_trees: bool,
    gone: tuple[str, ...],
    metrics_file: Path | None,
    reconcile: bool,
    as_json: bool,
) -> None:
    """Compare all replicas in volumes and chunk tables.

    Several tables may follow one --table. Open and erasure-coded replicas take no part.
    What cannot be read is skipped by name and never taken for absent. DIR gets the
    tables `roots`, `verdicts`, `findings` and `summary`, Parquet, partitioned by
    sweep_id, and a report. Interrupted or killed, the same command goes on where it
    was.

    \b
      treefold sweep run --table /exports/night --out /var/lib/treefold/sweeps treefold
      sweep run --volume /data/hdds1 --volume /mnt/dn2/hdds1 --source data --out
      /tmp/sweeps --json

    Exit status: 0 nothing found, 1 failed, 2 usage, 3 something diverged or is damaged,
    5 nothing of that, but not all could be read, 8 another sweep writes to DIR, 130
    interrupted.
    """
    if more and not tables:
        raise UsageError(f"{more[0]}: say --table or --volume before it")
    if not (tables or volumes):
        raise UsageError("give something to sweep: --table or --volume")
    if metrics_file is not None and not metrics_file.absolute().parent.is_dir():
        raise UsageError(f"--metrics-file: there is no folder {metrics_file.absolute().parent}")
    request = SweepRequest(
        out, (*tables, *more), volumes, TreeSource(source), fresh, keep, write_trees, gone
    )
    if engine == LOCAL and (master or settings or pack):
        raise UsageError("--master, --conf and --pack are for --engine spark")
    if pack and (master or "local").startswith("local"):
        raise UsageError("--pack is for the executors of a cluster: name its --master")
    if engine == SPARK and threads:
        raise UsageError(
            "--threads is for the local engine; a master in this process is --master 'local[N]'"
        )
    spark = {"master": master} if master else {}
    sweeps = SweepStore(out, Disk())
    with (
        progress_sink(output) as watcher,
        chosen_engine(engine, out, threads, settings, pack=pack, **spark) as chosen,
    ):
        summary = carry_out(
            request, chosen, watcher, report=lambda made: write_report(sweeps, made)
        )
    report = sweeps.report(summary.sweep_id)
    said = summary.json() | {"report": str(report)}
    refused: ReconcileError | None = None
    if reconcile:
        try:
            said["reconcile"] = _reconciled(controller, sweeps, summary.sweep_id)
        except ReconcileError as error:
            refused = error
    if as_json:
        print_json(said)
    else:
        _print_summary(said)
        _print_findings(sweeps, summary.sweep_id, said)
        print_line(f"report: {report}")
        if "reconcile" in said:
            print_line(_given(said["reconcile"]))
    # From here on the sweep is complete, and was told of.
    if metrics_file is not None:
        _write_metrics(metrics_file, summary)
    if refused is not None:
        raise refused
    click.get_current_context().exit(exit_status(summary))


@sweep.command()
@click.argument("sweep_id", metavar="ID")
@_out
@_json
def show(sweep_id: str, out: Path, as_json: bool) -> int:
    """Show what a sweep found, in all and by container.

    ID may be `latest`, or the beginning of an ID.
    """
    sweeps = SweepStore(out, Disk())
    sweep_id = sweeps.sweep(sweep_id)
    summary = sweeps.summary(sweep_id)
    if as_json:
        print_json(summary | {"containersDiverged": _details(sweeps, sweep_id)})
    else:
        _print_summary(summary)
        _print_findings(sweeps, sweep_id, summary)
    return 0


@sweep.command()
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@_out
@_json
def compare(before: str, after: str, out: Path, as_json: bool) -> int:
    """Say what is new, healed, or persists from sweep A to B.

    It is said by container and kind of finding. What A found in a container that B did
    not see, or could not tell, is `unseen`: nobody knows whether it was healed. A
    change in silence is of one night, and new in B or nothing.

    Exit status: 0 nothing new and nothing persists, 3 otherwise.
    """
    sweeps = SweepStore(out, Disk())
    earlier, later = sweeps.sweep(before), sweeps.sweep(after)
    changes = compared(sweeps, earlier, later)
    if as_json:
        lists = {
            name: [{"containerID": container_id, "kind": kind} for container_id, kind in places]
            for name, places in changes.items()
        }
        print_json({"before": earlier, "after": later} | lists)
    else:
        print_line(
            f"{earlier} -> {later}: "
            + ", ".join(f"{len(places)} {name}" for name, places in changes.items())
        )
        rows = [
            (name, container_id, kind)
            for name, places in changes.items()
            for container_id, kind in places
        ]
        if rows:
            print_table(("CHANGE", "CONTAINER", "KIND"), rows[:_ROWS_SHOWN], numbers=("CONTAINER",))
        _print_rest(len(rows))
    return ExitCode.FINDINGS if changes["new"] or changes["persisting"] else 0


@sweep.command()
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Where to put them; what an earlier run put there is replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def pack(out: Path, *, as_json: bool) -> None:
    """Pack our code and the libraries it needs for Spark executors.

    treefold.zip is our code, for --py-files; treefold-env.tar.gz holds the libraries of
    this very installation, for --archives, made without a network. Executors need a
    Python of the same minor version on the same kind of machine. `treefold sweep run
    --engine spark --pack DIR` takes both along.
    """
    packed = make(out, Disk())
    if as_json:
        print_json(
            {
                "code": str(packed.code),
                "environment": str(packed.environment),
                "distributions": list(packed.distributions),
            }
        )
        return
    for path in (packed.code, packed.environment):
        print_line(f"{path}  {size_text(path.stat().st_size)}")
    print_line(", ".join(packed.distributions))


sweep.add_command(demo)


@sweep.result_callback()
@click.pass_context
def _exit(ctx: click.Context, status: int) -> None:
    ctx.exit(status)


def _reconciled(controller: ControllerClient, sweeps: SweepStore, sweep_id: str) -> JsonObject:
    """Have the controller repair the repairable containers of a sweep; how many it
    took, and why not the others.
    """
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id, ["container_id", "verdict"])
    repairable = verdicts.filter(pc.equal(verdicts["verdict"], Verdict.REPAIRABLE.value))[
        "container_id"
    ].to_pylist()
    outcomes = controller.reconcile(
        sorted(repairable), dry_run=False, reason=f"sweep {sweep_id}", requested_by=_SWEEP
    )
    refused = Counter(
        outcome.ruling.eligibility.value for outcome in outcomes if not outcome.job_id
    )
    return {"jobs": len(outcomes) - refused.total(), "refused": dict(sorted(refused.items()))}


def _given(said: object) -> str:
    assert isinstance(said, dict)
    refused = "".join(f", {count} refused: {reason}" for reason, count in said["refused"].items())
    return f"given to the controller: {said['jobs']} jobs{refused}; `treefold job list` shows them"


def exit_status(summary: Summary) -> int:
    """What `run` ends with."""
    unread = summary.findings.get(FindingKind.UNREADABLE.value, 0)
    if summary.diverged or sum(summary.findings.values()) > unread:
        return ExitCode.FINDINGS
    return ExitCode.PARTLY if summary.skipped or unread else 0


def compared(sweeps: SweepStore, before: str, after: str) -> Mapping[str, list[tuple[int, str]]]:
    """What two sweeps found in containers, by what became of it: container and kind,
    ascending.
    """
    earlier, later = _found(sweeps, before), _found(sweeps, after)
    verdicts = sweeps.read(SweepTable.VERDICTS, after, ["container_id", "verdict"])
    known = verdicts.filter(pc.not_equal(verdicts["verdict"], Verdict.UNKNOWN.value))
    told = set(known["container_id"].to_pylist())
    # A change in silence is an event of one night: it neither lasts nor heals.
    events = {place for place in earlier | later if place[1] == FindingKind.SILENT_CHANGE.value}
    gone = earlier - later - events
    return {
        "new": sorted((later - earlier) | (later & events)),
        "persisting": sorted((later & earlier) - events),
        "healed": sorted(place for place in gone if place[0] in told),
        "unseen": sorted(place for place in gone if place[0] not in told),
    }


def _found(sweeps: SweepStore, sweep_id: str) -> set[tuple[int, str]]:
    """Containers with the kinds of what diverged in them, or changed in silence."""
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id, ["container_id", "diverged"])
    diverged = verdicts.filter(verdicts["diverged"])["container_id"]
    findings = sweeps.read(SweepTable.FINDINGS, sweep_id, ["container_id", "kind"])
    counts = pc.is_in(findings["container_id"], value_set=diverged)
    silent = pc.equal(findings["kind"], FindingKind.SILENT_CHANGE.value)
    places = (
        findings.filter(pc.or_(counts, silent)).group_by(["container_id", "kind"]).aggregate([])
    )
    return set(zip(places["container_id"].to_pylist(), places["kind"].to_pylist(), strict=True))


def _print_summary(summary: JsonObject) -> None:
    """A summary for people."""
    print_line(
        f"sweep {summary['sweepID']} ({summary['engine']}, {summary['source']}): "
        f"{_number(summary['containers'])} containers, {_number(summary['replicas'])} replicas, "
        f"{_number(summary['rows'])} rows in {summary['seconds']} s"
    )
    verdicts = summary["verdicts"]
    assert isinstance(verdicts, dict)
    print_line(
        "  "
        + (
            ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
            or "nothing compared"
        )
    )
    for key, style in (("skipped", "bold"), ("notes", "dim")):
        listed = summary[key]
        assert isinstance(listed, list)
        for one in listed[:_ROWS_SHOWN]:
            text = (
                f"skipped: {one['input']}: {one['reason']}" if key == "skipped" else f"note: {one}"
            )
            print_line(f"  {text}", style=style)
        _print_rest(len(listed))


def _print_findings(sweeps: SweepStore, sweep_id: str, summary: JsonObject) -> None:
    findings = sweeps.read(SweepTable.FINDINGS, sweep_id)
    skipped = summary["skipped"]
    assert isinstance(skipped, list)
    # The summary has named them.
    told = [f"{one['input']}: {one['reason']}" for one in skipped]
    findings = findings.filter(pc.invert(pc.is_in(findings["detail"], pa.array(told, pa.string()))))
    for finding in findings.slice(0, _ROWS_SHOWN).to_pylist():
        places = (
            (name, finding[f"{name}_id" if name != "offset" else "chunk_offset"])
            for name in _PLACES
        )
        where = " ".join(f"{name} {value}" for name, value in places if value is not None)
        whose = f": {', '.join(finding['lacking'])} <- {', '.join(finding['sources']) or 'nowhere'}"
        has_whose = finding["lacking"] or finding["sources"]
        detail = f": {finding['detail']}" if finding["detail"] else ""
        print_line(f"{where or 'input'}: {finding['kind']}{whose if has_whose else ''}{detail}")
    _print_rest(findings.num_rows)


def _print_rest(count: int) -> None:
    if count > _ROWS_SHOWN:
        print_line(f"and {count - _ROWS_SHOWN} more; --json has them all", style="dim")


def _details(sweeps: SweepStore, sweep_id: str) -> list[JsonObject]:
    """The diverged containers with their findings."""
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id)
    diverged = verdicts.filter(verdicts["diverged"]).slice(0, _DETAILS_MAX)
    findings = sweeps.read(SweepTable.FINDINGS, sweep_id)
    named: dict[int, list[JsonObject]] = {}
    of_diverged = findings.filter(
        pc.is_in(findings["container_id"], value_set=diverged["container_id"])
    )
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


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


SWEEP_METRICS = (
    Metric("sweep_finished_timestamp_seconds", Kind.GAUGE, "When the last sweep was complete."),
    Metric("sweep_duration_seconds", Kind.GAUGE, "How long the last sweep took."),
    Metric("sweep_rows", Kind.GAUGE, "Rows that the last sweep read."),
    Metric("sweep_replicas", Kind.GAUGE, "Replicas that the last sweep saw."),
    Metric("sweep_inputs_skipped", Kind.GAUGE, "Inputs that the last sweep could not read."),
    Metric(
        "sweep_containers", Kind.GAUGE, "Containers of the last sweep, by verdict.", ("verdict",)
    ),
    Metric("sweep_findings", Kind.GAUGE, "Findings of the last sweep, by kind.", ("kind",)),
)


def _write_metrics(path: Path, summary: Summary) -> None:
    """The figures of the last sweep, for Prometheus' textfile collector.

    Raises:
        DiskError: the file cannot be written.
    """
    metrics = Metrics(SWEEP_METRICS)
    metrics.set("sweep_finished_timestamp_seconds", time.time())
    metrics.set("sweep_duration_seconds", summary.seconds)
    metrics.set("sweep_rows", summary.rows)
    metrics.set("sweep_replicas", summary.replicas)
    metrics.set("sweep_inputs_skipped", len(summary.skipped))
    for verdict in Verdict:
        metrics.set(
            "sweep_containers", summary.verdicts.get(verdict.value, 0), verdict=verdict.value
        )
    for kind, count in summary.findings.items():
        metrics.set("sweep_findings", count, kind=kind)
    Disk().replace(path.absolute(), metrics.page())
