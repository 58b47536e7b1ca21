"""What commands print: results on stdout, talk on stderr, bars only where somebody
watches.

Tables are Rich's on a terminal and plain columns in a pipe. Rich itself heeds NO_COLOR
and FORCE_COLOR; whether a bar may be drawn is decided once, by the root command, and
passed down in `ProgressStyle`.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import click
from rich import box
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from runtime.errors import DiskError

JsonObject = dict[str, object]

# Without a terminal nobody sees a wide line whole.
_PIPE_COLUMNS = 100
# How often a log is told of progress.
LINE_EVERY_S = 10.0
# A bar is redrawn a few times a second; telling it of every buffer would cost as much
# as reading one.
_ADVANCE_BYTES = 4 << 20
# A rate seen for less than this says nothing about the rest.
_ETA_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class ProgressStyle:
    """How this run may talk: `bars` on stderr, or a line now and then."""

    bars: bool = False


def console(*, stderr: bool = False) -> Console:
    """A console on what stdout or stderr is now."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else _PIPE_COLUMNS
    return Console(file=file, width=width, highlight=False, markup=False, soft_wrap=False)


def print_json(value: object) -> None:
    """One JSON value on one line, in ASCII: names of files need not be text in any
    encoding.
    """
    with _printing():
        click.echo(json.dumps(value))


def print_line(text: str, *, style: str = "") -> None:
    """One line for people, however long."""
    with _printing():
        console().print(_printable(text), style=style, soft_wrap=True)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[str] = (),
    folded: Sequence[str] = (),
) -> None:
    """A table; the columns in `numbers` are aligned to the right, those in `folded`
    give way where space is short.
    """
    out = console()
    table = Table(
        box=box.ROUNDED if out.is_terminal else None, pad_edge=out.is_terminal, header_style="bold"
    )
    for column in columns:
        justify: JustifyMethod = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in folded)
    for row in rows:
        table.add_row(*(_printable(str(cell)) for cell in row))
    with _printing():
        out.print(table)


@contextmanager
def _printing() -> Iterator[None]:
    """Raise a DiskError where stdout is a file on a full disk; of a pipe that nobody
    reads Click sees to itself.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # What did not go out would be tried again, and told of by Python itself, when
        # the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise DiskError(f"the answer cannot be written: {error.strerror}") from error


def _printable(text: str) -> str:
    # The name of a file can hold what moves the cursor, or is no text at all.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(length_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if length_bytes < 1024 or unit == "TiB":
            break
        length_bytes /= 1024
    return f"{length_bytes:.0f} B" if unit == "B" else f"{length_bytes:.1f} {unit}"


def progress_text(what: str, done_bytes: int, total_bytes: int, elapsed_s: float) -> str:
    """One line of progress; no time to go before it can be known, none once the
    estimate of the total is used up.
    """
    rate = done_bytes / elapsed_s if elapsed_s > 0 else 0.0
    text = f"{what}  {size_text(done_bytes)} of {size_text(total_bytes)}  {size_text(rate)}/s"
    if done_bytes >= total_bytes:
        return text + "  finishing"
    if elapsed_s >= _ETA_AFTER_S and rate > 0:
        text += f"  ETA {round((total_bytes - done_bytes) / rate)}s"
    return text


@contextmanager
def byte_progress(
    what: str,
    total_bytes: int,
    output: ProgressStyle,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Report the bytes that the yielded function is told of: a bar, or one line every
    ten seconds.
    """
    if output.bars:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console(stderr=True),
            transient=True,
        ) as progress:
            task = progress.add_task(what, total=total_bytes)
            pending = 0

            def advance(count: int) -> None:
                nonlocal pending
                pending += count
                if pending >= _ADVANCE_BYTES:
                    progress.advance(task, pending)
                    pending = 0

            yield advance
        return
    start = said = clock()
    done = 0

    def tell(count: int) -> None:
        nonlocal done, said
        done += count
        now = clock()
        if now - said >= LINE_EVERY_S:
            said = now
            click.echo(progress_text(what, done, total_bytes, now - start), err=True)

    yield tell
