"""On 80 columns no word is broken: neither by us nor, since no line is longer, by the
terminal. Only a single word that is longer itself has a longer line.
"""

import contextlib
import io
import os
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from admin.cli import treefold
from admin.doctor import VolumeDiagnosis, print_diagnoses
from repair.picture import BlockCell, legend, strips
from runtime.output import print_line, print_row, print_table
from tests.tidy.test_documents import every_command

WIDTH = 80
UUID = "aabf944d-9c67-4a21-85c6-bd496e7ea31c"
PATH = "/data/a-rather-long-name-of-a-mount-point/of-a-disk/hdds-volume-number-12"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True, scope="module")
def terminal_of_80_columns() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(WIDTH))
        patch.setenv("TERM", "xterm")
        patch.setenv("NO_COLOR", "1")
        patch.delenv("FORCE_COLOR", raising=False)
        yield


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    shown = Terminal()
    with contextlib.redirect_stdout(shown):
        yield shown


def words_of(text: str) -> list[str]:
    return text.translate(str.maketrans("│╭╮╰╯├┤┬┴┼─", " " * 11)).split()


def check(shown: str, *expected: str) -> None:
    shown = click.unstyle(shown)
    for line in shown.splitlines():
        # No word is broken for it.
        assert cell_len(line) <= WIDTH or len(words_of(line)) <= 2, line
    words = words_of(shown)
    missing = [word for text in expected for word in text.split() if word not in words]
    assert missing == [], shown


@pytest.mark.parametrize("path", [path for path, _ in every_command()])
def test_the_help_of_a_command_fits(path: str) -> None:
    result = CliRunner().invoke(
        treefold, [*path.split()[1:], "--help"], prog_name="treefold", terminal_width=WIDTH
    )
    assert result.exit_code == 0, result.output
    check(result.stdout)


WORDS = st.text("abcdef/-.", min_size=1, max_size=60)
CELLS = st.one_of(WORDS, st.lists(st.text("abcdef", min_size=1, max_size=12), max_size=9)).map(
    lambda made: made if isinstance(made, str) else " ".join(made)
)


@given(
    rows=st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS), min_size=1, max_size=3),
    folded=st.sets(st.sampled_from(["A", "B", "C", "D"])),
    numbers=st.sets(st.sampled_from(["A", "B"])),
)
def test_a_table_breaks_no_word(
    rows: list[tuple[str, ...]], folded: set[str], numbers: set[str]
) -> None:
    """Law: whatever a table holds, every word of it is there whole."""
    with terminal() as shown:
        print_table(["A", "B", "C", "D"], rows, folded=tuple(folded), numbers=tuple(numbers))
    words = words_of(shown.getvalue())
    assert [
        word for row in rows for cell in row for word in cell.split() if word not in words
    ] == []


@given(
    st.lists(
        st.tuples(st.integers(0, 10**18), st.lists(st.text("abc", min_size=1, max_size=9)), WORDS),
        min_size=1,
        max_size=3,
    )
)
def test_a_table_with_long_folded_cells_fits(rows: list[tuple[int, list[str], str]]) -> None:
    with terminal() as shown:
        print_table(
            ["CONTAINER", "NOTE", "PATH"],
            [(number, " ".join(note), path) for number, note, path in rows],
            numbers=("CONTAINER",),
            folded=("NOTE", "PATH"),
        )
    check(shown.getvalue(), *(path for *_, path in rows))


@pytest.mark.parametrize("path", [PATH, "/data/hdds"])
def test_a_row_whose_last_cell_is_long_fits(path: str) -> None:
    with terminal() as shown:
        print_row([12, "CLOSED", "c096e20c", 6, 0, 0, path], (-9, 12, -8, -6, -7, -8))
    check(shown.getvalue(), path)
    assert len(shown.getvalue().splitlines()) == (1 if path == "/data/hdds" else 2)


@given(
    st.lists(st.one_of(WORDS, st.just("/long" * 20)), min_size=1, max_size=30), st.integers(0, 8)
)
def test_a_long_line_breaks_between_words(words: list[str], indent: int) -> None:
    with terminal() as shown:
        print_line(" " * indent + " ".join(words))
    check(shown.getvalue())
    assert shown.getvalue().split() == words


def test_in_a_pipe_a_line_stays_one() -> None:
    text = "word " * 100 + "end"
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        print_line(text)
    assert shown.getvalue() == text + "\n"


def test_the_doctor_prints_every_id_whole() -> None:
    cluster = f"CID-{UUID}"
    with terminal() as shown:
        print_diagnoses({"treefold": "0.1.0"}, [VolumeDiagnosis(PATH, UUID, cluster)], "none")
    check(shown.getvalue(), UUID, cluster, PATH)


def test_the_pictures_of_the_demo_fit() -> None:
    out = Console(file=Terminal(), width=WIDTH)
    with out.capture() as drawn:
        rows = {f"dn{number}": [BlockCell.HEALTHY] * 500 for number in range(3)}
        beside = dict.fromkeys(rows, "aabbccdd  QUASI_CLOSED")
        out.print(strips(rows, beside, WIDTH - 4))
        out.print(legend())
    shown = click.unstyle(drawn.get())
    check(shown, "QUASI_CLOSED")
    # With the indentation that the demo gives it.
    assert all(cell_len(line.rstrip()) <= WIDTH - 4 for line in shown.splitlines())
    assert len(shown.splitlines()) == len(rows) + 1


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_in_a_pipe_there_are_never_boxes_and_colour_only_if_it_is_forced(
    variables: dict[str, str], is_coloured: bool
) -> None:
    @click.command()
    def show() -> None:
        assert os.environ["COLUMNS"] == str(WIDTH)
        print_table(["A", "B"], [(1, 2)])
        print_line("note", style="red")

    unset = {"NO_COLOR": None, "FORCE_COLOR": None}
    shown = CliRunner(env={**unset, **variables}).invoke(show, color=True).stdout
    assert "note" in shown
    assert not set(shown) & set("│╭╮╰╯├┤┬┴┼─")
    assert ("\x1b[1m" in shown) is is_coloured or variables.get("NO_COLOR") == "1"
    assert ("\x1b[31m" in shown) is is_coloured


def test_a_terminal_has_boxes() -> None:
    with terminal() as shown:
        print_table(["A", "B"], [(1, 2)])
    assert "╭" in shown.getvalue()


def test_every_command_is_looked_at() -> None:
    assert len(every_command()) > 40
    assert all(isinstance(command, click.Command) for _, command in every_command())
