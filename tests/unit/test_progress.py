"""Progress on stderr: remarks can be copied from there, and move no cursor."""

import pytest

from runtime.output import print_line
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
