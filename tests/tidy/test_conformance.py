"""docs/conformance.md is true: every row it names is cited by a test it names, and
every cited row is on it.
"""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "conformance.md").read_text()
ROW = re.compile(r"(CR-|wire-I|inv-I|[WMDRBEST])(\d+)(?:-\1(\d+))?")


def rows(text: str) -> list[str]:
    """The rows in a cell; `W1-W3` stands for three."""
    found = []
    for kind, first, last in ROW.findall(text):
        width = len(first) if kind == "CR-" else 0
        found += [
            f"{kind}{number:0{width}d}" for number in range(int(first), int(last or first) + 1)
        ]
    return found


def lines(heading: str) -> list[list[str]]:
    """The cells of each line of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1:]]


def cites(text: str, row: str) -> bool:
    """By its name, or in the name of a test: `test_s1_...`."""
    return bool(re.search(rf"(?<![\w-]){row}(?!\w)|def test_(?:\w+_)?{row.lower()}_", text))


@pytest.mark.parametrize("cells", lines("Rows and tests"), ids=lambda cells: cells[0])
def test_a_row_is_cited_by_a_test_that_the_page_names(cells: list[str]) -> None:
    files = [TESTS / name for name in re.findall(r"`([\w/.]+\.py)`", cells[1])]
    texts = [file.read_text() for file in files]
    assert [row for row in rows(cells[0]) if not any(cites(text, row) for text in texts)] == []


def test_every_row_is_held_or_named_as_not_reached() -> None:
    due = rows("W1-W22 M1-M15 D1-D7 R1-R7 B1-B6 E1-E3 S1-S5 S10-S18 S20 S21 T1-T19 CR-001-CR-061")
    due += rows("wire-I1-wire-I7 inv-I1-inv-I6 inv-I8")
    held = {row for cells in lines("Rows and tests") for row in rows(cells[0])}
    missed = {
        row
        for cells in lines("Rows not covered, and why")
        for row in rows(cells[0])
        if "(part)" not in cells[0]
    }
    differ = {row for cells in lines("Where we differ on purpose") for row in rows(cells[0])}
    assert [row for row in due if row not in held | missed | differ] == []
    assert not held & missed
