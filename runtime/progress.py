"""Progress of long work, on stderr: a bar on a terminal, a line now and then elsewhere.

Whether a bar may be drawn is decided once, by the root command, and passed down in
`ProgressStyle`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import click

from runtime.eta import RateWindow, duration_text
from runtime.output import console, printable, size_text

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# The unit whose counts are shown as sizes.
BYTES = "bytes"
# Between two lines in a log.
LINE_EVERY_S = 10.0
# Between two updates of a bar: one for every buffer would cost as much as to read it.
_UPDATE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class ProgressStyle:
    """How this run shows progress: `bars` on stderr, or lines."""

    bars: bool = False

    @classmethod
    def of(cls, *, is_terminal: bool, environment: Mapping[str, str]) -> Self:
        """Bars only where somebody watches: stderr is a terminal, not that of CI."""
        return cls(bars=is_terminal and "CI" not in environment)


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

    def skip(self, count: int) -> None:
        """Count units of the stage as done that cost no time."""
        ...

    def results(self) -> AbstractContextManager[object]:
        """While results are printed to stdout: no bar is in their way."""
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
    from rich.progress import BarColumn, Progress, TextColumn

    with Progress(
        TextColumn("{task.description}"),
        # With the longest amount it fits 80 columns.
        BarColumn(bar_width=16),
        TextColumn("{task.fields[amount]}"),
        console=console(stderr=True),
        transient=True,
        # Results go to stdout, which may be a file: Rich would take them to stderr.
        redirect_stdout=False,
    ) as progress:
        yield _BarSink(progress, clock)


class _Stage:
    def __init__(self, what: str, total: int | None, unit: str, begun_s: float) -> None:
        self._what = what
        self.total = total
        self._unit = unit
        self._window = RateWindow(begun_s)
        self._shown_s = begun_s

    @property
    def done(self) -> int:
        return self._window.done

    def advance(self, count: int, now_s: float, *, show_every_s: float) -> bool:
        """Count units as done; whether it is time to show them."""
        self._window.add(count, now_s)
        if now_s - self._shown_s < show_every_s:
            return False
        self._shown_s = now_s
        return True

    def skip(self, count: int) -> None:
        """Count units as done that cost no time."""
        self._window.skip(count)

    def line(self) -> str:
        """One line on the stage."""
        return f"{self._what}  {self.amount()}"

    def amount(self) -> str:
        """How much is done, of how much, the rate, and how long the rest takes.

        There is no ETA before one can be known. Work beyond an estimated total is
        finishing.
        """
        done, rate, of_total, rest = self.done, self._window.rate(), "", ""
        shown = size_text if self._unit == BYTES else lambda count: f"{count:,.0f}"
        if self.total is not None and done <= self.total:
            of_total = f" of {shown(self.total)}"
        unit = "" if self._unit == BYTES else f" {self._unit}"
        if self.total is not None:
            eta_s = self._window.eta_s(self.total)
            rest = "" if eta_s is None else f"  ETA {duration_text(eta_s)}"
            rest = "  finishing" if done >= self.total else rest
        return f"{shown(done)}{of_total}{unit}  {shown(rate)}/s{rest}"


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
        self._stage = _Stage(what, total, unit, self._clock())

    def advance(self, count: int) -> None:
        """Count units as done; a line is printed every LINE_EVERY_S."""
        stage = self._stage
        assert stage is not None
        if stage.advance(count, self._clock(), show_every_s=LINE_EVERY_S):
            click.echo(stage.line(), err=True)

    def skip(self, count: int) -> None:
        """Count units as done; the next line has them."""
        assert self._stage is not None
        self._stage.skip(count)

    def results(self) -> AbstractContextManager[object]:
        """Lines are in nobody's way."""
        return nullcontext()


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
        self._stage = _Stage(what, total, unit, self._clock())
        self._task = self._progress.add_task(what, total=total, amount="")

    def advance(self, count: int) -> None:
        """Count units as done."""
        stage = self._stage
        assert stage is not None
        assert self._task is not None
        if stage.advance(count, self._clock(), show_every_s=_UPDATE_EVERY_S):
            self._progress.update(self._task, completed=stage.done, amount=stage.amount())

    def skip(self, count: int) -> None:
        """Count units as done; the next update shows them."""
        assert self._stage is not None
        self._stage.skip(count)

    @contextmanager
    def results(self) -> Iterator[None]:
        """Take the bar away meanwhile."""
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()
