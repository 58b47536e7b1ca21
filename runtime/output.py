"""What commands print: JSON, lines and tables on stdout.

Tables are Rich's on a terminal and plain columns in a pipe. Colours are Rich's: it
heeds NO_COLOR, and FORCE_COLOR in a pipe. An answer that cannot be written ends the
command with an OutputError: a script must not take silence for an empty list.
"""

import io
import json
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from runtime.errors import OutputError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console, JustifyMethod

JsonObject = dict[str, object]

# Without a terminal nobody sees a wide line whole.
_PIPE_COLUMNS = 100


class _AnswerFile(io.FileIO):
    """Stdout, for the answer of a command. What cannot be written ends the command,
    once; what follows, at the latest as the process ends, is dropped without a word.
    """

    def __init__(self, number: int, *, is_closed: bool) -> None:
        """Of a file descriptor; with `is_closed` the caller has no stdout, and nothing
        can be written.
        """
        super().__init__(number, "w", closefd=False)
        self._fault = "stdout is closed" if is_closed else ""
        self._is_lost = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """The number of bytes that were taken.

        Raises:
            BrokenPipeError: nobody reads the pipe; Click ends the command.
            OutputError: the bytes cannot be written.
        """
        if self._is_lost:
            return len(memoryview(data))
        try:
            if not self._fault:
                return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._fault = error.strerror or str(error)
        self._is_lost = True
        raise OutputError(
            f"the answer cannot be written: {self._fault}",
            hint="Send it to /dev/null if only the exit status matters.",
        )


def answer_stream(number: int, *, encoding: str, is_closed: bool = False) -> io.TextIOWrapper:
    """An _AnswerFile for text. It escapes what the encoding lacks, as stderr does: the
    name of an object may have any letter.
    """
    file = _AnswerFile(number, is_closed=is_closed)
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding, "backslashreplace", line_buffering=file.isatty()
    )


def console(*, stderr: bool = False) -> "Console":
    """A console on what stdout or stderr is now."""
    # Imported here, because JSON needs none of it.
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else _PIPE_COLUMNS
    # Names are printed as they are: `:key:` in one is no emoji.
    return Console(
        file=file, width=width, highlight=False, markup=False, emoji=False, soft_wrap=False
    )


def print_json(value: object) -> None:
    """One JSON value on one line, in ASCII: names of files need not be text in any
    encoding.
    """
    click.echo(json.dumps(value))


def print_line(text: str, *, style: str = "", stderr: bool = False) -> None:
    """One line for people. On a terminal a longer one continues on the next, indented
    by two more, and breaks between words only; elsewhere it stays one, however long.
    """
    for line in _lines(printable(text), stderr=stderr):
        if style:
            console(stderr=stderr).print(line, style=style, soft_wrap=True)
        else:
            click.echo(line, err=stderr)


def print_text(text: str, *, stderr: bool = False) -> None:
    """The lines of a text, each as `print_line` prints it."""
    for line in text.splitlines() or [""]:
        print_line(line, stderr=stderr)


def _lines(text: str, *, stderr: bool) -> list[str]:
    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    if not is_terminal or len(text) <= (width := console(stderr=stderr).width):
        return [text]
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text,
        width,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def print_row(cells: Sequence[object], widths: Iterable[int], *, style: str = "") -> None:
    """A row of a table that is printed as it grows: `widths` are those of all cells but
    the last, negative to align to the right. A last cell for which there is no space is
    on a line of its own, whole.
    """
    texts = [printable(str(cell)) for cell in cells]
    line, last = "", texts[-1]
    for text, width in zip(texts, widths, strict=False):
        line += (text.rjust(-width) if width < 0 else text.ljust(width)) + "  "
    if line and len(line) + len(last) > console().width:
        print_line(line.rstrip(), style=style)
        line = "    "
    print_line(line + last, style=style)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Sequence[str] = (),
    folded: Sequence[str] = (),
) -> None:
    """A table; the columns in `numbers` are aligned to the right, those in `folded`
    give way where space is short: they wrap between words, and where a word has no
    space they are below their rows. No word is ever broken.
    """
    from rich import box
    from rich.table import Table

    out = console()
    # Not the console's opinion: FORCE_COLOR adds colour to a pipe, not boxes.
    is_boxed = sys.stdout.isatty()
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    needed = [
        max(_width_of([name, *texts], is_folded=name in folded))
        for name, *texts in zip(columns, *cells, strict=True)
    ]
    frame = 3 * len(columns) + 1 if is_boxed else 2 * (len(columns) - 1)
    if sum(needed) + frame > out.width:
        _print_narrow(columns, cells, numbers=numbers, folded=folded)
        return
    table = Table(box=box.ROUNDED if is_boxed else None, pad_edge=is_boxed, header_style="bold")
    for column, width in zip(columns, needed, strict=True):
        justify: JustifyMethod = "right" if column in numbers else "left"
        table.add_column(
            column, justify=justify, min_width=width, no_wrap=column not in folded, overflow="fold"
        )
    for row in cells:
        table.add_row(*row)
    out.print(table)


def _width_of(texts: Sequence[str], *, is_folded: bool) -> Iterator[int]:
    from rich.cells import cell_len

    yield 1
    for text in texts:
        for part in text.split() if is_folded else [text]:
            yield cell_len(part)


def _print_narrow(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str],
    folded: Sequence[str],
) -> None:
    """A table that does not fit: the columns in `folded` are lines below each row. If
    the others do not fit either, so are all but the first.
    """
    width = console().width
    kept = [at for at, column in enumerate(columns) if column not in folded]
    widths = {at: max(_width_of([columns[at], *(row[at] for row in rows)], is_folded=False))
              for at in kept}  # fmt: skip
    if sum(widths.values()) + 2 * (len(kept) - 1) > width:
        kept = kept[:1]
    padded = [widths[at] * (-1 if columns[at] in numbers else 1) for at in kept]
    print_row([columns[at] for at in kept], padded[:-1], style="bold")
    for row in rows:
        print_row([row[at] for at in kept], padded[:-1])
        for at, column in enumerate(columns):
            if at not in kept and row[at]:
                print_line(f"    {column.lower()}: {row[at]}")


def printable(text: str) -> str:
    """A text without what could move the cursor or is not text: that is escaped."""
    # The name of a file can hold what moves the cursor, or is no text at all.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def time_text(seconds: float) -> str:
    """A time in seconds since 1970 as text, for example `2026-11-23T12:00:00Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def age_text(seconds: float) -> str:
    """An age as text, for example `3m ago`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit} ago"
    return f"{max(0.0, seconds):.0f}s ago"


def size_text(length_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if length_bytes < 1024 or unit == "TiB":
            break
        length_bytes /= 1024
    return f"{length_bytes:.0f} B" if unit == "B" else f"{length_bytes:.1f} {unit}"
