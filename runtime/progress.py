"""Progress of long work, on stderr: a bar on a terminal, a line now and then elsewhere.

Whether a bar may be drawn is decided once, by the root command, and passed down in
`ProgressStyle`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import click

from runtime.output import console, printable, size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# The unit whose counts are shown as sizes.
BYTES = "bytes"
# Between two lines in a log.
LINE_EVERY_S = 10.0
# Between two updates of a bar: one for every buffer would cost as much as to read it.
_UPDATE_EVERY_S = 0.1
# A rate seen for less than this does not predict the rest.
_ETA_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class ProgressStyle:
    """How this run shows progress: `bars` on stderr, or lines."""

    bars: bool = False


class ProgressSink(Protocol):
    """Takes the progress of work that has stages."""

    def note(self, text: str) -> None:
        """Show a remark."""
        ...

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """Begin a stage of `total` units; None where the total is unknown."""
        ...

    def advance(self, count: int) -> None:
        """Count units of the stage as done."""
        ...


@contextmanager
def progress_sink(
    style: ProgressStyle, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[ProgressSink]:
    """A sink that shows progress on stderr in this style."""
    if not style.bars:
        yield _LineSink(clock)
        return
    # Imported here, because lines need none of it.
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    ) as progress:
        yield _BarSink(progress, clock)


@dataclass(slots=True)
class _Stage:
    what: str
    total: int | None
    unit: str
    begun_s: float
    shown_s: float
    done: int = 0

    def amount(self, now_s: float) -> str:
        """How much is done, of how much, and the rate."""
        rate = self.done / max(now_s - self.begun_s, 1e-9)
        if self.unit == BYTES:
            of_total = "" if self.total is None else f" of {size_text(self.total)}"
            return f"{size_text(self.done)}{of_total}  {size_text(rate)}/s"
        of_total = "" if self.total is None else f" of {self.total:,}"
        return f"{self.done:,}{of_total} {self.unit}  {rate:,.0f}/s"

    def line(self, now_s: float) -> str:
        """One line on the stage.

        It has no ETA before one can be known. Work beyond an estimated total is
        finishing.
        """
        text = f"{self.what}  {self.amount(now_s)}"
        if self.total is None:
            return text
        if self.done >= self.total:
            return text + "  finishing"
        elapsed_s = now_s - self.begun_s
        if elapsed_s >= _ETA_AFTER_S and self.done:
            text += f"  ETA {round((self.total - self.done) * elapsed_s / self.done)}s"
        return text


class _LineSink:
    """A line now and then, for logs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage: _Stage | None = None

    def note(self, text: str) -> None:
        """Print a remark."""
        click.echo(printable(text), err=True)

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """Begin a stage of `total` units."""
        now_s = self._clock()
        self._stage = _Stage(what, total, unit, now_s, now_s)

    def advance(self, count: int) -> None:
        """Count units as done; a line is printed every LINE_EVERY_S."""
        stage, now_s = self._stage, self._clock()
        assert stage is not None
        stage.done += count
        if now_s - stage.shown_s >= LINE_EVERY_S:
            stage.shown_s = now_s
            click.echo(stage.line(now_s), err=True)


class _BarSink:
    """A bar, for people who watch."""

    def __init__(self, progress: "Progress", clock: Callable[[], float]) -> None:
        self._progress = progress
        self._clock = clock
        self._task: TaskID | None = None
        self._stage: _Stage | None = None

    def note(self, text: str) -> None:
        """Print a remark above the bar."""
        # Not wrapped: a hash or an address that is copied from here stays whole.
        self._progress.console.print(printable(text), soft_wrap=True)

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """Replace the bar by that of a stage of `total` units."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        now_s = self._clock()
        self._stage = _Stage(what, total, unit, now_s, now_s)
        self._task = self._progress.add_task(what, total=total, amount="")

    def advance(self, count: int) -> None:
        """Count units as done."""
        stage, now_s = self._stage, self._clock()
        assert stage is not None
        assert self._task is not None
        stage.done += count
        if now_s - stage.shown_s >= _UPDATE_EVERY_S:
            stage.shown_s = now_s
            self._progress.update(self._task, completed=stage.done, amount=stage.amount(now_s))
