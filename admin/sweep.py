"""`treefold sweep`: check every replica of a cluster in bulk, and show earlier results.

Results go to stdout, progress to stderr. The packages `sweep` and `spark` do the work;
this module parses options and prints.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc

from admin.answer import controller_options
from admin.cluster_sweep import cluster_sweep_options, sweep_with_cluster
from admin.command_result import error_json, print_error
from admin.demo.sweep_demo import demo
from admin.engines import open_engine
from admin.metrics_file import check_metrics_file, metrics_file_option
from admin.option_types import WholeNumber
from admin.paths import LocalPath, OutPath, is_address
from admin.spark_options import check_spark_options, spark_options
from admin.sweep_metrics import write_metrics
from chunktable.files import AnyPath
from chunktable.places import check_scheme
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.replica import TreeSource
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.json_numbers import exact
from runtime.output import print_json, print_line, print_table, size_text
from runtime.progress import ProgressStyle, progress_sink
from scm.client import ControllerClient
from spark.pack import pack as build_pack
from sweep.changes import SweepChanges, compare_sweeps
from sweep.engine import SweepRequest
from sweep.model import FindingKind, NotCompared
from sweep.output import JsonObject, Summary, SweepStore, SweepTable
from sweep.truth import compared_truth

# Rows printed without --json.
_ROWS_SHOWN = 50

# Diverged containers in the document of `show --json`.
_DETAILS_MAX = 100_000

# Sent to the controller as the origin of a job.
_REQUESTED_BY = "treefold sweep"

# What becomes of findings, in the order in which it is printed.
_CHANGES = ("new", "persisting", "healed", "gone", "unseen")

_PLACES = ("container", "block", "offset")


_out = click.option(
    "--out",
    metavar="DIR",
    type=OutPath(),
    required=True,
    help=(
        "The folder of sweeps, or s3://BUCKET/PREFIX?endpoint_url=URL with credentials from the"
        " environment. Use the same one for every sweep of a cluster."
    ),
)

_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group()
def sweep() -> None:
    """Check every replica of a cluster in bulk: compare roots first, then the blocks
    and chunks of replicas that differ.

    `run` reads chunk tables that agents exported, or volumes. `show` and `compare`
    print what earlier sweeps found.
    """


@sweep.command()
@click.option(
    "--volume",
    "volumes",
    metavar="PATH",
    multiple=True,
    help="The root of an Ozone volume on this machine; opened read-only. May be repeated.",
)
@click.option(
    "--table",
    "tables",
    metavar="PATH",
    multiple=True,
    help=(
        "A chunk table: a folder of exports, a Parquet file, or a folder of Parquet files. Also an"
        " s3:// URL. May be repeated."
    ),
)
@click.argument("more", metavar="[PATH]...", nargs=-1)
@click.option(
    "--source",
    type=click.Choice([source.value for source in TreeSource]),
    default=TreeSource.TREE.value,
    show_default=True,
    help=(
        "Where the checksums of volumes come from: stored trees (block records if there is no"
        " tree), block records, or reading all data. Tables name their own source."
    ),
)
@spark_options
@click.option(
    "--threads",
    type=WholeNumber(1, 1024),
    help="Threads of the local engine. Default: one per core.",
)
@_out
@click.option(
    "--fresh",
    is_flag=True,
    help="Start over instead of resuming an unfinished sweep of the same inputs.",
)
@click.option(
    "--keep",
    type=WholeNumber(1),
    default=30,
    show_default=True,
    metavar="N",
    help="Sweeps that stay in DIR.",
)
@click.option(
    "--write-trees",
    is_flag=True,
    help=(
        "Also write all trees to DIR/trees: Parquet files with the bytes of Ozone's tree files,"
        " one row per replica. The trees of the last two sweeps stay."
    ),
)
@click.option(
    "--gone",
    metavar="NAME",
    multiple=True,
    help=(
        "What was removed from the cluster on purpose: a datanode (its UUID, or a beginning of it"
        " that no other has), DATANODE/VOLUME, or container=ID. Its replicas are no longer"
        " expected. Everything else that the sweep before had must be read again, or its"
        " containers are UNSEEN. May be repeated."
    ),
)
@cluster_sweep_options
@metrics_file_option
@click.option(
    "--reconcile",
    is_flag=True,
    help="Ask the controller to reconcile the REPAIRABLE containers, within its limits.",
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
    out: AnyPath,
    fresh: bool,
    keep: int,
    write_trees: bool,
    gone: tuple[str, ...],
    cluster: str | None,
    rate: int,
    metrics_file: Path | None,
    reconcile: bool,
    as_json: bool,
) -> None:
    """Compare all replicas in volumes, chunk tables or a running cluster.

    With --cluster the datanodes' trees are read over the network into tables in DIR,
    without agents. A datanode that does not answer leaves its containers UNKNOWN.

    Several tables may follow one --table. Open and erasure-coded replicas are not
    compared. Inputs that cannot be read are skipped and listed; their replicas never
    count as missing. DIR receives an HTML report and the Parquet tables `roots`,
    `verdicts`, `findings` and `summary`, partitioned by sweep_id. After an interruption
    or a crash, the same command resumes the sweep.

    \b
    Examples:
      treefold sweep run --table /exports/night --out /var/lib/treefold/sweeps
      treefold sweep run --volume /data/hdds --source data --out /tmp/out --json

    Exit status: 0 no findings, 1 failed, 2 usage, 3 replicas diverged or are damaged, 5
    an input or replica was not read, or has no tree, or nothing could be compared, 7 a
    store does not answer, 8 another sweep runs in DIR, 130 interrupted.
    """
    _check_paths(tables, volumes, more, metrics_file, cluster=cluster)
    check_spark_options(engine, threads=threads, master=master, settings=settings, pack=pack)
    request = SweepRequest(
        out, (*tables, *more), volumes, TreeSource(source), fresh, keep, write_trees, gone
    )
    sweeps = SweepStore(out, Disk())
    with (
        progress_sink(output) as progress,
        open_engine(engine, out, threads, settings, master, pack) as chosen,
    ):
        summary, read = sweep_with_cluster(request, chosen, progress, sweeps, cluster, rate)
    document = summary.json() | {"report": str(sweeps.report(summary.sweep_id))} | read
    # The sweep is complete, so errors from here on do not hide it.
    errors = list[ReconcileError]()
    if metrics_file is not None:
        with _collected(errors):
            write_metrics(metrics_file, summary)
    if reconcile:
        with _collected(errors):
            document["reconcile"] = _reconcile_repairable(controller, sweeps, summary.sweep_id)
    document |= {"errors": [error_json(one) for one in errors]} if errors else {}
    truth = compared_truth(sweeps, summary.sweep_id, datetime.now(UTC))
    _print_run(sweeps, document, truth, as_json=as_json)
    for one in errors:
        print_error(one)
    click.get_current_context().exit(errors[0].exit_status if errors else exit_status(summary))


@sweep.command()
@click.argument("sweep_id", metavar="ID")
@_out
@_json
def show(sweep_id: str, out: AnyPath, as_json: bool) -> int:
    """Show the summary and the findings of a sweep.

    ID is the ID of a sweep, a unique prefix of one, or `latest`.
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
def compare(before: str, after: str, out: AnyPath, as_json: bool) -> int:
    """Compare the findings of two sweeps.

    Lists the findings that are new in B, persist since A, or were healed, by container
    and kind. A finding of A is `unseen` if B did not read all expected replicas of its
    container, could not decide it, or compared trees of older scans than A. Containers
    that are UNSEEN in B are listed as `unseen_replica`, and those that are UNKNOWN in B
    and were decided in A as `undecided`. A finding of A is `gone` if its damaged
    replica was removed. A silent change is an event between two sweeps: it is new in B
    or not listed.

    A and B are IDs of sweeps, unique prefixes, or `latest`.

    Exit status: 0 all were healed or are gone, or there were none, 3 something is new
    or persists, 5 neither, but something is unseen.
    """
    sweeps = SweepStore(out, Disk())
    earlier, later = sweeps.sweep(before), sweeps.sweep(after)
    changes = compare_sweeps(sweeps, earlier, later)
    rows = _change_rows(changes)
    if as_json:
        lists: dict[str, list[JsonObject]] = {name: [] for name in _CHANGES}
        for name, container_id, kind, reason in rows:
            entry: JsonObject = {"containerID": container_id, "kind": kind}
            lists[name].append(entry | ({"reason": reason} if reason else {}))
        print_json({"before": earlier, "after": later} | lists)
    else:
        counts = Counter(name for name, *_ in rows)
        print_line(
            f"{earlier} -> {later}: " + ", ".join(f"{counts[name]} {name}" for name in _CHANGES)
        )
        if rows:
            heads = ("CHANGE", "CONTAINER", "KIND", "REASON")
            print_table(heads, rows[:_ROWS_SHOWN], numbers=("CONTAINER",), folded=("REASON",))
        _print_rest(len(rows))
    if changes.new or changes.persisting:
        return ExitCode.FINDINGS
    return ExitCode.PARTLY if changes.unseen else 0


def _change_rows(changes: SweepChanges) -> list[tuple[str, int, str, str]]:
    """All changes: what became of it, container, kind, and the reason if gone or
    unseen.
    """
    lists = (("new", changes.new), ("persisting", changes.persisting), ("healed", changes.healed))
    rows = [(name, *place, "") for name, places in lists for place in places]
    rows += [("gone", *place, reason) for place, reason in changes.gone.items()]
    return rows + [("unseen", *place, reason) for place, reason in changes.unseen.items()]


@sweep.command()
@click.option(
    "--out",
    metavar="DIR",
    type=LocalPath(file_okay=False, path_type=Path),
    required=True,
    help="The folder for the two files; existing ones are replaced.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def pack(out: Path, *, as_json: bool) -> None:
    """Pack Treefold and its libraries for Spark executors.

    Writes treefold.zip with the code and treefold-env.tar.gz with the libraries of this
    installation, both for --archives. No network is needed. Executors need the same
    minor version of Python and the same kind of machine. `treefold sweep run --engine
    spark --pack DIR` uses both files.
    """
    packed = build_pack(out, Disk())
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


@contextmanager
def _collected(errors: list[ReconcileError]) -> Iterator[None]:
    try:
        yield
    except ReconcileError as error:
        errors.append(error)


def _check_paths(
    tables: tuple[str, ...],
    volumes: tuple[str, ...],
    more: tuple[str, ...],
    metrics_file: Path | None,
    *,
    cluster: str | None,
) -> None:
    """Refuse a sweep of nothing, and metrics that cannot be written after it."""
    if more and not tables:
        raise UsageError(f"{more[0]}: put --table or --volume in front of it")
    if not (tables or volumes or cluster):
        raise UsageError("nothing to sweep: give --table, --volume or --cluster")
    for name in (*tables, *more):
        if is_address(name):
            check_scheme(name)
    for name in volumes:
        if not name:
            raise UsageError("--volume: the path is empty")
        if is_address(name):
            raise UsageError(f"--volume {name}: volumes are folders of this machine")
    check_metrics_file(metrics_file)


def _print_run(sweeps: SweepStore, document: JsonObject, truth: str, *, as_json: bool) -> None:
    """Print what a sweep that has just ended found, and first and last which `truth` it
    read, and how much of it was compared.
    """
    for is_last in (False, True):
        if is_last and as_json:
            print_json(document)
        elif is_last:
            _print_sweep(sweeps, str(document["sweepID"]), document)
        if as_json:
            # Stdout is one JSON object.
            click.echo(truth, err=True)
        else:
            print_line(truth)


def _print_sweep(sweeps: SweepStore, sweep_id: str, document: JsonObject) -> None:
    """What a sweep that has just ended found, for people."""
    _print_summary(document)
    _print_findings(sweeps, sweep_id, document)
    print_line(f"report: {document['report']}")
    if "reconcile" in document:
        print_line(_reconcile_text(document["reconcile"]))


def _reconcile_repairable(
    controller: ControllerClient, sweeps: SweepStore, sweep_id: str
) -> JsonObject:
    """Request the reconciliation of a sweep's repairable containers. Returns the number
    of jobs, and of refusals by reason.
    """
    columns, is_repairable = (
        ["container_id", "verdict"],
        pc.field("verdict") == Verdict.REPAIRABLE.value,
    )
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id, columns, where=is_repairable)
    repairable = verdicts["container_id"].to_pylist()
    outcomes = controller.reconcile(
        sorted(repairable), dry_run=False, reason=f"sweep {sweep_id}", requested_by=_REQUESTED_BY
    )
    refused = Counter(
        outcome.ruling.eligibility.value for outcome in outcomes if not outcome.job_id
    )
    return {"jobs": len(outcomes) - refused.total(), "refused": dict(sorted(refused.items()))}


def _reconcile_text(requested: object) -> str:
    assert isinstance(requested, dict)
    refused = "".join(
        f", {count} refused: {reason}" for reason, count in requested["refused"].items()
    )
    return f"reconciliation: {requested['jobs']} jobs{refused}; `treefold job list` shows them"


def exit_status(summary: Summary) -> int:
    """The exit status of `run`."""
    unread = summary.findings.get(FindingKind.UNREADABLE.value, 0)
    if summary.diverged or sum(summary.findings.values()) > unread:
        return ExitCode.FINDINGS
    if summary.skipped or unread or summary.unseen or summary.without_tree:
        return ExitCode.PARTLY
    # That all are excluded by design is an answer; UNKNOWN for all is none.
    is_answered = summary.compared or summary.verdicts.keys() == {NotCompared.EXCLUDED.value}
    return 0 if is_answered else ExitCode.PARTLY


def _print_summary(summary: JsonObject) -> None:
    """Print a summary as text."""
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
    # The summary lists skipped inputs already.
    listed = [f"{one['input']}: {one['reason']}" for one in skipped]
    findings = findings.filter(
        pc.invert(pc.is_in(findings["detail"], pa.array(listed, pa.string())))
    )
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
    _print_rest(findings.num_rows, place="the table `findings`")


def _print_rest(count: int, *, place: str = "--json") -> None:
    if count > _ROWS_SHOWN:
        print_line(f"and {count - _ROWS_SHOWN} more; {place} has them all", style="dim")


def _details(sweeps: SweepStore, sweep_id: str) -> list[JsonObject]:
    """The diverged containers with their findings, up to _DETAILS_MAX."""
    diverged = sweeps.read(SweepTable.VERDICTS, sweep_id, where=pc.field("diverged"))
    diverged = diverged.slice(0, _DETAILS_MAX)
    findings = sweeps.read(SweepTable.FINDINGS, sweep_id)
    named: dict[int, list[JsonObject]] = {}
    of_diverged = findings.filter(
        pc.is_in(findings["container_id"], value_set=diverged["container_id"])
    )
    for finding in of_diverged.to_pylist():
        named.setdefault(finding["container_id"], []).append(
            {
                "kind": finding["kind"],
                "blockID": exact(finding["block_id"]),
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
