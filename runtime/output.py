"""What commands print: JSON, lines and tables on stdout.

Tables are Rich's on a terminal and plain columns in a pipe. Rich itself heeds NO_COLOR
and FORCE_COLOR.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from runtime.errors import DiskError

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

JsonObject = dict[str, object]

# Without a terminal nobody sees a wide line whole.
_PIPE_COLUMNS = 100


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
    with _printing():
        click.echo(json.dumps(value))


def print_line(text: str, *, style: str = "", stderr: bool = False) -> None:
    """One line for people, however long."""
    with _printing():
        if style:
            console(stderr=stderr).print(printable(text), style=style, soft_wrap=True)
        else:
            click.echo(printable(text), err=stderr)


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
    from rich import box
    from rich.table import Table

    out = console()
    # Not `out.is_terminal`: FORCE_COLOR makes that true in a pipe, for colours only.
    is_terminal = sys.stdout.isatty()
    table = Table(
        box=box.ROUNDED if is_terminal else None, pad_edge=is_terminal, header_style="bold"
    )
    for column in columns:
        justify: JustifyMethod = "right" if column in numbers else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column not in folded)
    for row in rows:
        table.add_row(*(printable(str(cell)) for cell in row))
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


def printable(text: str) -> str:
    """A text without what could move the cursor or is not text: that is escaped."""
    # The name of a file can hold what moves the cursor, or is no text at all.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(length_bytes: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if length_bytes < 1024 or unit == "TiB":
            break
        length_bytes /= 1024
    return f"{length_bytes:.0f} B" if unit == "B" else f"{length_bytes:.1f} {unit}"
