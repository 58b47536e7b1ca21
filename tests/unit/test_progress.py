"""Progress on stderr: remarks can be copied from there, and move no cursor."""

import contextlib
import io
import re

import click
import pytest
from click.testing import CliRunner

from runtime.output import print_json, print_line, print_table
from runtime.progress import BYTES, ProgressStyle, progress_sink


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_results_go_to_stdout_whatever_is_drawn_on_the_terminal() -> None:
    """With a bar on stderr: otherwise `treefold ... --json | jq` would get nothing."""
    drawn, results = Terminal(), io.StringIO()
    with (
        contextlib.redirect_stderr(drawn),
        contextlib.redirect_stdout(results),
        progress_sink(ProgressStyle(bars=True)) as progress,
    ):
        progress.begin("reading", 100, BYTES)
        print_json({"containerID": 1})
        with progress.results():
            assert drawn.getvalue().endswith("\x1b[2K")
            print_json({"containerID": 2})
        progress.advance(100)
    assert results.getvalue() == '{"containerID": 1}\n{"containerID": 2}\n'


def test_a_bar_says_how_long_the_rest_takes_and_never_more_than_all() -> None:
    drawn, now = Terminal(), 0.0
    with (
        contextlib.redirect_stderr(drawn),
        progress_sink(ProgressStyle(bars=True), clock=lambda: now) as progress,
    ):
        progress.begin("reading", 100 << 20, BYTES)
        for _ in range(21):
            now += 10
            progress.advance(5 << 20)
            with progress.results():
                pass
    text = drawn.getvalue()
    assert "25.0 MiB of 100.0 MiB  512.0 KiB/s  ETA 2m 30s" in text
    assert "100.0 MiB of 100.0 MiB  512.0 KiB/s  finishing" in text
    # The total was estimated too low.
    assert "105.0 MiB  512.0 KiB/s  finishing" in text


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("environment", [{}, {"CI": ""}, {"CI": "true"}, {"FORCE_COLOR": "1"}])
def test_bars_are_only_on_a_terminal_that_is_not_that_of_ci(
    is_terminal: bool, environment: dict[str, str]
) -> None:
    """Operator rule R18."""
    style = ProgressStyle.of(is_terminal=is_terminal, environment=environment)
    assert style.bars is (is_terminal and "CI" not in environment)


def test_forced_colours_draw_no_boxes_in_a_pipe() -> None:
    """Operator rule R18."""

    @click.command()
    def show() -> None:
        print_table(("A", "B"), [("one", "two")])

    plain = CliRunner().invoke(show, color=True).stdout
    coloured = CliRunner(env={"FORCE_COLOR": "1"}).invoke(show, color=True).stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    assert "\x1b[1m" in coloured
