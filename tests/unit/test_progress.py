"""Progress on stderr: remarks can be copied from there, and move no cursor."""

import re

import click
import pytest
from click.testing import CliRunner

from admin.cli import may_draw_bars
from runtime.output import print_line, print_table
from runtime.progress import ProgressStyle, progress_sink


@pytest.mark.parametrize("bars", [False, True])
def test_a_remark_stays_whole_and_moves_no_cursor(
    capsys: pytest.CaptureFixture[str], bars: bool
) -> None:
    digest = "head 0123456789abcdef " * 20
    with progress_sink(ProgressStyle(bars=bars)) as progress:
        progress.note(f"{digest}\x1b[2J.")
    assert f"{digest}\\x1b[2J." in capsys.readouterr().err.splitlines()


def test_a_name_that_looks_like_an_emoji_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_line(":key:", style="red")
    print_line(":key:")
    assert capsys.readouterr().out == ":key:\n:key:\n"


@pytest.mark.parametrize(
    ("is_terminal", "environment", "bars"),
    [
        (True, {}, True),
        (True, {"CI": "true"}, False),
        (False, {}, False),
        (False, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_bars_are_for_terminals_that_somebody_watches(
    *, is_terminal: bool, environment: dict[str, str], bars: bool
) -> None:
    """Operator rule R18."""
    assert may_draw_bars(is_terminal, environment) is bars


def test_forced_colours_draw_no_boxes_in_a_pipe() -> None:
    """Operator rule R18."""

    @click.command()
    def show() -> None:
        print_table(("A", "B"), [("one", "two")])

    plain = CliRunner().invoke(show, color=True).stdout
    coloured = CliRunner(env={"FORCE_COLOR": "1"}).invoke(show, color=True).stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert "\x1b[1m" in coloured
