"""What all sweeping commands share: the engine, how a sweep is told of, and its
report.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from admin.output import LINE_EVERY_S, ProgressStyle, console
from runtime.disk import Disk
from runtime.errors import DiskError, UsageError
from sweep.engine import Engine, LocalEngine, ProgressSink
from sweep.gather import Gatherer
from sweep.model import REPLICA_SCHEMA
from sweep.output import JsonObject, Summary, SweepStore, SweepTable
from sweep.report import PastSweep, render, report_of

LOCAL, SPARK = "local", "spark"
ENGINES = (LOCAL, SPARK)
# Findings in a report; a page with more helps nobody.
_REPORTED_MAX = 100_000
# A rate seen for less than this says nothing about the rest.
_ETA_AFTER_S = 3.0


@contextmanager
def chosen_engine(
    name: str,
    out: Path,
    threads: int | None = None,
    settings: Sequence[str] = (),
    master: str = "local[*]",
    pack: Path | None = None,
) -> Iterator[Engine]:
    """The engine of this name, for as long as it is needed.

    Raises:
        SparkMissingError, ProcessFailedError: Spark, or its Java, is not there or does
            not start. UsageError: a setting is none.
    """
    if name == LOCAL:
        yield LocalEngine(Gatherer(out / "work" / "spill", threads=threads))
        return
    pairs = [setting.partition("=") for setting in settings]
    if wrong := next((key for key, equals, _ in pairs if not (key and equals)), None):
        raise UsageError(f"--conf {wrong}: say KEY=VALUE")
    # First of all: it says by name what is not installed.
    from spark.session import is_local, spark_session

    chosen = {key: value for key, _, value in pairs}
    if address := chosen.get("spark.driver.bindAddress", "127.0.0.1" if is_local(master) else None):
        # Spark asks for the machine's address before it reads a setting, and not every
        # machine can tell.
        os.environ.setdefault("SPARK_LOCAL_IP", address)
    with spark_session(master, settings=chosen, pack=pack) as session:
        from spark.engine import SparkEngine

        yield SparkEngine(session)


def write_report(sweeps: SweepStore, swept: Summary) -> tuple[str, ...]:
    """Write the report of a sweep whose tables are written, one HTML file beside them;
    returns notes.

    Raises:
        DiskError: it cannot be written, or a table of the sweep cannot be read.
    """
    sweep_id = swept.sweep_id
    verdicts = sweeps.read(SweepTable.VERDICTS, sweep_id)
    diverged = verdicts.filter(verdicts["diverged"])
    held, replicas = Counter[tuple[str, str]](), [REPLICA_SCHEMA.empty_table()]
    for piece in sweeps.pieces(SweepTable.ROOTS, sweep_id, REPLICA_SCHEMA.names):
        counted = piece.group_by(["datanode", "volume"]).aggregate([([], "count_all")]).to_pylist()
        held.update({(row["datanode"], row["volume"]): row["count_all"] for row in counted})
        replicas.append(
            piece.filter(pc.is_in(piece["container_id"], value_set=diverged["container_id"]))
        )
    earlier, notes = list[PastSweep](), list[str]()
    for name in (name for name in sweeps.sweeps() if name < sweep_id):
        try:
            earlier.append(_night(sweeps.summary(name)))
        except DiskError as error:
            notes.append(f"sweep {name} is left out of the report: {error.message}")
    report = report_of(
        _night(swept.json()),
        engine=swept.engine,
        held=held,
        replicas=pa.concat_tables(replicas),
        verdicts=diverged,
        findings=sweeps.read(SweepTable.FINDINGS, sweep_id).slice(0, _REPORTED_MAX),
        earlier=earlier,
        skipped=[f"{one.input}: {one.reason}" for one in swept.skipped],
        volumes_created_ms=swept.volumes_created_ms,
    )
    disk, path = Disk(), sweeps.report(sweep_id)
    disk.make_folder(path.parent)
    disk.replace(path, render(report).encode())
    return tuple(notes)


def _night(summary: JsonObject) -> PastSweep:
    verdicts, containers = summary["verdicts"], summary["containers"]
    assert isinstance(verdicts, dict)
    assert isinstance(containers, int)
    return PastSweep(
        str(summary["sweepID"]),
        datetime.fromisoformat(str(summary["startedAt"])),
        containers,
        verdicts,
    )


@dataclass(slots=True)
class _Stage:
    what: str
    total: int
    unit: str
    since: float
    done: int = 0
    said: float = 0.0

    def text(self, now: float) -> str:
        """One line on how far the stage is, with rate and time left."""
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
        """Print a remark."""
        click.echo(text, err=True)

    def begin(self, what: str, total: int, unit: str) -> None:
        """Begin a stage of `total` units."""
        now = time.monotonic()
        self._stage = _Stage(what, total, unit, now, said=now)

    def advance(self, count: int) -> None:
        """Count units done; a line is printed now and then."""
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
        """Print a remark above the bar."""
        self._progress.console.print(text)

    def begin(self, what: str, total: int, unit: str) -> None:
        """Replace the bar by that of a stage of `total` units."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._stage = _Stage(what, total, unit, time.monotonic())
        self._task = self._progress.add_task(what, total=total, rate="")

    def advance(self, count: int) -> None:
        """Count units done."""
        assert self._task is not None
        assert self._stage is not None
        self._stage.done += count
        rate = self._stage.done / max(time.monotonic() - self._stage.since, 1e-9)
        self._progress.update(self._task, advance=count, rate=f"{rate:,.0f} {self._stage.unit}/s")


@contextmanager
def progress_sink(output: ProgressStyle) -> Iterator[ProgressSink]:
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
