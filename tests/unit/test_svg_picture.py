"""The picture of replicas before and after: what it shows, that it fits, and that it
can be read on light and dark pages.
"""

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repair.picture import BlockCell
from repair.svg_picture import COLOURS, WIDTH, DrawnContainer, draw

SVG = "{http://www.w3.org/2000/svg}"
NAMES = ("dn1", "dn2", "dn3")
ROWS = st.fixed_dictionaries(
    {name: st.lists(st.sampled_from(BlockCell), max_size=45) for name in NAMES}
)
CONTAINERS = st.lists(
    st.builds(
        DrawnContainer,
        st.integers(1, 10**9).map("container {}".format),
        ROWS,
        ROWS,
        st.sampled_from(["match", "unrecoverable", "<&>"]),
        st.sampled_from(["healed, equal", "not healed"]),
    ),
    max_size=5,
)


def container(name: str, *before: BlockCell) -> DrawnContainer:
    healthy = {"dn1": [BlockCell.HEALTHY] * len(before)}
    return DrawnContainer(name, {"dn1": list(before)}, healthy, "repairable", "healed")


def parsed(drawn: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawn)


def classes(drawn: str) -> list[str]:
    return [element.get("class", "") for element in parsed(drawn).iter()]


def texts(drawn: str) -> list[str]:
    return [element.text or "" for element in parsed(drawn).iter(f"{SVG}text")]


@settings(max_examples=20)
@given(CONTAINERS)
def test_everything_is_inside_of_the_picture(containers: list[DrawnContainer]) -> None:
    """Law: whatever is drawn, it is well formed, and nothing is cut off."""
    root = parsed(draw("title <&>", "subtitle", containers))
    _, _, width, height = map(int, root.attrib["viewBox"].split())
    assert width == WIDTH
    for element in root.iter():
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        letters = 0 if element.get("text-anchor") else 7.4 * len(element.text or "")
        wide = float(element.get("width", 0)) or (letters if element.tag == f"{SVG}text" else 0)
        if element.tag in (f"{SVG}rect", f"{SVG}text"):
            assert x + wide <= width, ElementTree.tostring(element)
            assert 0 <= y + float(element.get("height", 0)) <= height


@settings(max_examples=20)
@given(CONTAINERS)
def test_containers_are_side_by_side_and_never_one_over_the_other(
    containers: list[DrawnContainer],
) -> None:
    root = parsed(draw("t", "s", containers))
    heads = [one for one in root.iter(f"{SVG}text") if one.get("class") == "container"]
    assert len(heads) == 2 * len(containers)
    places = [(one.get("y"), float(one.get("x", 0))) for one in heads]
    for (first, other), (line, then) in combinations(places, 2):
        assert first != line or abs(other - then) >= 104


def test_each_kind_of_cell_has_a_mark_of_its_own_and_is_in_the_legend() -> None:
    drawn = {cell: draw("t", "s", [container("c", cell)]) for cell in BlockCell}
    for cell, picture in drawn.items():
        assert cell.meaning in texts(picture)
    shapes = set()
    for cell, picture in drawn.items():
        # Without its colour.
        kinds = (name.split(" ", 1)[-1] for name in classes(picture) if name)
        shapes.add((tuple(sorted(kinds)), cell is BlockCell.HEALTHY))
    assert len(shapes) == len(BlockCell)


def test_before_is_what_was_found_and_after_what_is_held() -> None:
    drawn = draw("t", "s", [container("container 3", BlockCell.CORRUPT, BlockCell.HEALTHY)])
    found = classes(drawn)
    # One of each in the legend.
    assert found.count("corrupt cell") == 1 + 1
    assert found.count("healthy cell") == 1 + 2 + 1
    assert [text for text in texts(drawn) if text in ("repairable", "healed")] == [
        "repairable",
        "healed",
    ]


def test_more_blocks_than_fit_share_cells_that_show_the_worst() -> None:
    cells = [BlockCell.HEALTHY] * 5000
    cells[4321] = BlockCell.CORRUPT
    drawn = draw("t", "s", [container("c", *cells)])
    assert "corrupt cell" in classes(drawn)
    assert len(classes(drawn)) < 200


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_text_marks_and_cells_can_be_read(side: int) -> None:
    colour = {name: pair[side] for name, pair in COLOURS.items()}
    for behind in (colour["page"], colour["band"]):
        for name in ("text", "quiet"):
            assert contrast(colour[name], behind) >= 4.5, name
        for name in ("healthy", "corrupt", "missing", "conflict", "deleted"):
            assert contrast(colour[name], behind) >= 3, name
    for name in ("corrupt", "conflict"):
        assert contrast(colour["mark"], colour[name]) >= 4.5, name


def test_it_follows_the_page_and_loads_nothing() -> None:
    drawn = draw("t", "s", [container("c", BlockCell.HEALTHY)])
    assert "@media (prefers-color-scheme:dark)" in drawn
    assert re.findall(r"https?://[^\"]+", drawn) == ["http://www.w3.org/2000/svg"]
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert used <= COLOURS.keys()
    assert all(drawn.count(f"--{name}:") == 2 for name in used)
