"""`treefold sweep demo`: generate a damaged synthetic cluster, sweep it, and compare
the findings with the damage.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from admin.demo.ground_truth import DamageKind, GroundTruth
from admin.demo.synthetic import RowOrder, SyntheticCluster, synthetic
from admin.engines import open_engine
from admin.option_types import Fraction, WholeNumber
from admin.spark_options import ENGINES, LOCAL, SPARK
from merkle.outcome import DIVERGED_VERDICTS
from runtime.disk import Disk
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode
from runtime.output import print_json, print_line, print_table
from runtime.progress import ProgressSink, ProgressStyle, progress_sink
from spark.errors import SparkMissingError
from sweep.engine import SweepRequest
from sweep.model import REPLICA_SCHEMA, FindingKind
from sweep.output import JsonObject, Summary, SweepStore, SweepTable
from sweep.report import write_report
from sweep.run import sweep as run_sweep

_LARGEST = 1_000_000
# Kinds of damage that are also silent changes.
_SILENT_KINDS = (DamageKind.CORRUPT_CHUNK, DamageKind.CONFLICTING_CHUNK, DamageKind.LOST_CHUNK)

Place = tuple[object, ...]


_DIVERGED = {verdict.value for verdict in DIVERGED_VERDICTS}


@dataclass(frozen=True, slots=True)
class EngineResult:
    """The result of one engine's sweep of the second night, as sets of rows."""

    summary: Summary
    report: Path
    found: frozenset[Place]
    verdicts: frozenset[Place]
    roots: frozenset[Place]


@click.command()
@click.option(
    "--engine",
    type=click.Choice(["both", *ENGINES]),
    default="both",
    show_default=True,
    help="The engines to run. With `both`, Spark is left out if it is not installed.",
)
@click.option(
    "--seed",
    type=WholeNumber(0),
    default=1,
    show_default=True,
    help="Seed of the random numbers; the same seed generates the same cluster.",
)
@click.option(
    "--datanodes",
    type=WholeNumber(3, 1000),
    default=6,
    show_default=True,
    help="Number of datanodes.",
)
@click.option(
    "--containers",
    type=WholeNumber(1, _LARGEST),
    default=400,
    show_default=True,
    help="Number of containers, with three replicas each.",
)
@click.option(
    "--blocks",
    type=WholeNumber(2, _LARGEST),
    default=20,
    show_default=True,
    help="Mean number of blocks per container.",
)
@click.option(
    "--chunks",
    type=WholeNumber(1, 256),
    default=64,
    show_default=True,
    help="Greatest number of chunks per block.",
)
@click.option(
    "--largest",
    type=WholeNumber(0, _LARGEST),
    default=0,
    help="Least number of blocks in the first container, to test a large one.",
)
@click.option(
    "--damage",
    type=Fraction(0, 0.1),
    default=0.0025,
    show_default=True,
    help="Share of containers with each kind of damage.",
)
@click.option(
    "--order",
    type=click.Choice([order.value for order in RowOrder]),
    default=RowOrder.CLUSTERED.value,
    show_default=True,
    help="Write exports as agents do, or shuffle the rows over all files.",
)
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep all files in this folder. Default: only the reports are kept.",
)
@click.option("--check", is_flag=True, help="Print only mistakes; for use in scripts.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def demo(
    output: ProgressStyle,
    *,
    engine: str,
    seed: int,
    datanodes: int,
    containers: int,
    blocks: int,
    chunks: int,
    largest: int,
    damage: float,
    order: str,
    keep: Path | None,
    check: bool,
    as_json: bool,
) -> int:
    """Sweep a synthetic cluster and check the findings.

    Generates the chunk tables of a cluster for two nights, before and after it is
    damaged, and sweeps both. Each engine must find all of the damage and nothing else.
    With two engines, their roots, verdicts and findings must be equal.

    Exit status: 0 all findings are as expected, 1 they are not.
    """
    kinds = dict.fromkeys(DamageKind, damage)
    cluster = SyntheticCluster(
        seed, datanodes, containers, blocks, chunks, largest, RowOrder(order), kinds
    )
    with _folder(keep) as folder, progress_sink(output) as progress:
        names = _engines(engine, progress)
        started = time.monotonic()
        synthetic(folder / "night-1", cluster, healthy=True)
        truth = synthetic(folder / "night-2", cluster)
        made_s = time.monotonic() - started
        results = {}
        for name in names:
            progress.note(f"sweeping with the engine {name}")
            results[name] = _run_engine(name, folder, progress)
        wrong = mistakes(truth, results)
        if keep is None and not check:
            results = _with_lasting_reports(results)
        if as_json:
            print_json(_json(truth, results, wrong))
        elif not check:
            _print(truth, results, made_s)
        for text in wrong:
            click.echo(text, err=True)
        if not (as_json or check):
            print_line("")
            if not wrong:
                same = (
                    "; the engines agree in every root, verdict and finding"
                    if len(results) > 1
                    else ""
                )
                print_line(
                    f"all {len(truth.damages)} damages were found, and nothing else{same}",
                    style="bold",
                )
            for one in results.values():
                print_line(f"report: {one.report}")
    return ExitCode.FAILED if wrong else 0


def mistakes(truth: GroundTruth, results: dict[str, EngineResult]) -> list[str]:
    """The differences between findings and damage, and between engines, as texts."""
    wrong, expected = list[str](), _expected(truth)
    verdicts = {(damage.container_id, damage.verdict.value) for damage in truth.damages}
    for name, one in results.items():
        wrong += [
            f"{name}: not found: {_named(place)}" for place in sorted(expected - one.found, key=str)
        ]
        wrong += [
            f"{name}: found, but not done: {_named(place)}"
            for place in sorted(one.found - expected, key=str)
        ]
        diverged = {place[:2] for place in one.verdicts if place[1] in _DIVERGED}
        wrong += [
            f"{name}: container {place[0]} is not {place[1]}"
            for place in sorted(verdicts ^ diverged, key=str)
        ]
    first, *others = results.items()
    for name, other in others:
        for what, differing in (
            ("roots", first[1].roots ^ other.roots),
            ("verdicts", first[1].verdicts ^ other.verdicts),
            ("findings", first[1].found ^ other.found),
        ):
            if differing:
                wrong.append(f"{first[0]} and {name} differ in {len(differing)} {what}")
    return wrong


def _engines(name: str, progress: ProgressSink) -> list[str]:
    if name != "both":
        return [name]
    try:
        with open_engine(SPARK, Path()):
            return list(ENGINES)
    except SparkMissingError as error:
        progress.note(f"only the local engine runs: {error.message}")
        return [LOCAL]


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="treefold-sweep-") as name:
            yield Path(name)
        return
    hint = "Choose a new folder."
    try:
        if keep.exists() and any(keep.iterdir()):
            raise UsageError(f"{keep} is not empty", hint=hint)
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{keep} cannot be used: {error.strerror}", hint=hint) from error
    yield keep


def _run_engine(name: str, folder: Path, progress: ProgressSink) -> EngineResult:
    out = folder / f"sweeps-{name}"
    with open_engine(name, out) as engine:
        for night in ("night-1", "night-2"):
            summary = run_sweep(SweepRequest(out, (str(folder / night),)), engine, progress)
    sweeps = SweepStore(out, Disk())
    write_report(sweeps, summary)
    names = ("kind", "container_id", "block_id", "chunk_offset", "lacking", "sources")
    # Without path and fingerprint, which depend on the engine.
    sums = [n for n in REPLICA_SCHEMA.names if n not in ("path", "fingerprint")]
    return EngineResult(
        summary,
        Path(str(sweeps.report(summary.sweep_id))),
        _places(sweeps, SweepTable.FINDINGS, summary.sweep_id, names),
        _places(
            sweeps,
            SweepTable.VERDICTS,
            summary.sweep_id,
            ("container_id", "verdict", "replicas", "excluded"),
        ),
        _places(sweeps, SweepTable.ROOTS, summary.sweep_id, sums),
    )


def _places(
    sweeps: SweepStore, table: SweepTable, sweep_id: str, names: Sequence[str]
) -> frozenset[Place]:
    rows = sweeps.read(table, sweep_id, names).to_pylist()
    return frozenset(
        tuple(tuple(row[name]) if isinstance(row[name], list) else row[name] for name in names)
        for row in rows
    )


def _expected(truth: GroundTruth) -> frozenset[Place]:
    """The findings that a sweep must have."""
    silent = (
        (
            FindingKind.SILENT_CHANGE.value,
            damage.container_id,
            damage.block_id,
            damage.offset,
            (datanode,),
            (),
        )
        for damage in truth.damages
        if damage.kind in _SILENT_KINDS
        for datanode in damage.datanodes
    )
    return frozenset([*(damage.finding for damage in truth.damages), *silent])


def _named(place: Place) -> str:
    kind, container_id, block_id, offset, *_ = place
    return f"{kind} in container {container_id}, block {block_id}" + (
        "" if offset is None else f", offset {offset}"
    )


def _with_lasting_reports(results: dict[str, EngineResult]) -> dict[str, EngineResult]:
    """The results, with reports copied to a folder that is not removed."""
    folder = Path(tempfile.mkdtemp(prefix="treefold-sweep-report-"))
    return {
        name: replace(one, report=Path(shutil.copy(one.report, folder / f"{name}.html")))
        for name, one in results.items()
    }


def _json(truth: GroundTruth, results: dict[str, EngineResult], wrong: list[str]) -> JsonObject:
    return {
        "rows": truth.rows,
        "containers": truth.containers,
        "replicas": truth.replicas,
        "damages": len(truth.damages),
        "engines": {
            name: one.summary.json() | {"report": str(one.report)} for name, one in results.items()
        },
        "wrong": wrong,
        "ok": not wrong,
    }


def _print(truth: GroundTruth, results: dict[str, EngineResult], made_s: float) -> None:
    print_line(
        f"generated {truth.containers:,} containers, {truth.replicas:,} replicas,"
        f" {truth.rows:,} chunks per night in {made_s:.1f} s, and damaged"
        f" {len(truth.damages)} containers"
    )
    rows = []
    for kind in DamageKind:
        of_kind = {damage.finding for damage in truth.damages if damage.kind is kind}
        rows.append(
            (kind.value, len(of_kind), *(len(of_kind & one.found) for one in results.values()))
        )
    silent = {place for place in _expected(truth) if place[0] == FindingKind.SILENT_CHANGE.value}
    rows.append(
        (
            FindingKind.SILENT_CHANGE.value,
            len(silent),
            *(len(silent & one.found) for one in results.values()),
        )
    )
    headings = ("DAMAGE", "DONE", *(f"FOUND BY {name.upper()}" for name in results))
    print_table(headings, rows, numbers=headings[1:])
    for name, one in results.items():
        summary = one.summary
        verdicts = ", ".join(f"{count:,} {verdict}" for verdict, count in summary.verdicts.items())
        print_line(
            f"{name}: {verdicts}; {summary.seconds:.1f} s,"
            f" {summary.rows / summary.seconds / 1e6:.1f} M rows/s; roots computed"
            f" {', '.join(f'{path} {count:,}' for path, count in summary.paths.items())}"
        )
