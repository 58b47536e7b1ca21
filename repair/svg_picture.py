"""Draws containers as an SVG: a row per replica, a cell per block, before and after.

The picture is wide, has a legend, and fits light and dark pages. Each kind of cell has
a mark of its own, so that no state is shown by colour alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from repair.picture import BlockCell, binned

# Colours on a light and on a dark page. Of text and marks the contrast to what is
# behind them is at least 4.5 to 1, of cells to the page at least 3 to 1.
COLOURS: Mapping[str, tuple[str, str]] = {
    "page": ("#ffffff", "#0d1117"),
    "band": ("#f3f5f8", "#161b22"),
    "text": ("#1b2129", "#e8edf3"),
    "quiet": ("#57606a", "#a0aab6"),
    "healthy": ("#1a7f5a", "#3fb98a"),
    "corrupt": ("#b4260f", "#ff7b66"),
    "missing": ("#9a5b00", "#e3a33a"),
    "conflict": ("#7a3db8", "#c297ff"),
    "deleted": ("#6b747e", "#929ca8"),
    # Marks inside of filled cells.
    "mark": ("#ffffff", "#0d1117"),
}
_COLOUR_OF = {
    BlockCell.HEALTHY: "healthy",
    BlockCell.DELETED: "deleted",
    BlockCell.MISSING: "missing",
    BlockCell.PARTLY_MISSING: "missing",
    BlockCell.CORRUPT: "corrupt",
    BlockCell.CONFLICT: "conflict",
}
# Lengths in units of the picture, which is as wide as a page of a README.
WIDTH = 1160
_CELL, _STEP, _ROW = 22, 26, 30
_MARGIN, _NAMES, _GAP = 24, 64, 28
# The least width of a container: its text below.
_LEAST = 104
_TOP, _BAND_HEAD, _BAND_FOOT, _LEGEND = 74, 46, 10, 40
# As many cells as a line has space for.
_CELLS_MAX = (WIDTH - 2 * _MARGIN - _NAMES) // _STEP
_LETTER = 7.4


@dataclass(frozen=True, slots=True)
class DrawnContainer:
    """A container to be drawn: the cells of its replicas by name, and what is said of
    it. Without cells only the words are drawn.
    """

    name: str
    before: Mapping[str, Sequence[BlockCell]]
    after: Mapping[str, Sequence[BlockCell]]
    found: str
    result: str

    @property
    def width(self) -> int:
        """The width of its cells or words."""
        rows = (*self.before.values(), *self.after.values())
        cells = max((len(binned(row, _CELLS_MAX)) for row in rows), default=0)
        letters = max(len(self.name), len(self.found), len(self.result))
        return max(cells * _STEP, round(letters * _LETTER), _LEAST)


def draw(title: str, subtitle: str, containers: Sequence[DrawnContainer]) -> str:
    """The picture as the text of an SVG file."""
    replicas = sorted({name for one in containers for name in (*one.before, *one.after)})
    lines = _lines(containers)
    band = _BAND_HEAD + _ROW * len(replicas) + _BAND_FOOT
    height = _TOP + len(lines) * (2 * band + 20) + _LEGEND
    drawn = list[str]()
    y = _TOP
    for line in lines:
        for is_after, heading in ((False, "before"), (True, "after")):
            drawn.append(
                f'<rect class="band" x="8" y="{y}" width="{WIDTH - 16}" height="{band}" rx="8"/>'
            )
            drawn.append(text_at(_MARGIN, y + 28, heading, "heading"))
            drawn += (
                text_at(_MARGIN, y + _BAND_HEAD + _ROW * row + 16, name, "name")
                for row, name in enumerate(replicas)
            )
            x = _MARGIN + _NAMES
            for one in line:
                drawn += _container(one, x, y, replicas, is_after=is_after)
                x += one.width + _GAP
            y += band + (12 if not is_after else 8)
    words = "a row: one replica; a cell: one block"
    drawn += kinds_legend(height - 18, _kinds(containers), words)
    return document(title, subtitle, height, drawn, cell_rules())


def _lines(containers: Sequence[DrawnContainer]) -> list[list[DrawnContainer]]:
    """The containers, side by side as far as there is space."""
    lines: list[list[DrawnContainer]] = [[]]
    left = WIDTH
    for one in containers:
        if lines[-1] and one.width > left:
            lines.append([])
        if not lines[-1]:
            left = WIDTH - 2 * _MARGIN - _NAMES
        lines[-1].append(one)
        left -= one.width + _GAP
    return lines


def _container(
    one: DrawnContainer, x: int, y: int, replicas: Sequence[str], *, is_after: bool
) -> list[str]:
    said = one.result if is_after else one.found
    drawn = [text_at(x, y + 18, one.name, "container"), text_at(x, y + 35, said, "quiet small")]
    rows = one.after if is_after else one.before
    for number, name in enumerate(replicas):
        top = y + _BAND_HEAD + _ROW * number
        row = binned(rows.get(name, ()), _CELLS_MAX)
        drawn += (cell_mark(cell, x + _STEP * at, top) for at, cell in enumerate(row))
    return drawn


def cell_mark(cell: BlockCell, x: int, y: int) -> str:
    """A cell: filled, or framed where there is nothing, with its mark."""
    colour = _COLOUR_OF[cell]
    frame = f'x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_CELL - 2}" rx="4"'
    middle, half = x + _CELL / 2, _CELL // 2
    match cell:
        case BlockCell.HEALTHY:
            return f'<rect class="{colour} cell" {frame}/>'
        case BlockCell.CORRUPT:
            cross = f"M{x + 7} {y + 7}l8 8m0-8l-8 8"
            return f'<rect class="{colour} cell" {frame}/><path class="cross" d="{cross}"/>'
        case BlockCell.CONFLICT:
            mark = f'<text class="letter" x="{middle:g}" y="{y + 16}">?</text>'
            return f'<rect class="{colour} cell" {frame}/>{mark}'
        case BlockCell.MISSING:
            return f'<rect class="{colour} frame dashed" {frame}/>'
        case BlockCell.PARTLY_MISSING:
            lower = f'x="{x + 1}" y="{y + half}" width="{_CELL - 2}" height="{half - 1}" rx="4"'
            return (
                f'<rect class="{colour} frame dashed" {frame}/>'
                f'<rect class="{colour} cell" {lower}/>'
            )
        case BlockCell.DELETED:
            stroke = f"M{x + 6} {y + half}h{_CELL - 12}"
            return (
                f'<rect class="{colour} frame" {frame}/><path class="{colour} dash" d="{stroke}"/>'
            )


def _kinds(containers: Sequence[DrawnContainer]) -> list[BlockCell]:
    shown = {
        cell
        for one in containers
        for rows in (one.before, one.after)
        for row in rows.values()
        for cell in row
    }
    return [cell for cell in BlockCell if cell in shown]


def kinds_legend(y: int, kinds: Sequence[BlockCell], words: str) -> list[str]:
    """A line at `y` with the meaning of these kinds of cells, and words at its end."""
    drawn, x = [], float(_MARGIN)
    for kind in kinds:
        drawn.append(cell_mark(kind, round(x), y - 16))
        drawn.append(text_at(round(x) + _STEP + 4, y, kind.meaning, "quiet"))
        x += _STEP + 30 + len(kind.meaning) * _LETTER
    drawn.append(
        f'<text class="quiet" x="{WIDTH - _MARGIN}" y="{y}" text-anchor="end">'
        f"{escape(words)}</text>"
    )
    return drawn


def text_at(x: int, y: int, text: str, kind: str) -> str:
    """A text that begins at (x, y), of a class of the rules."""
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'


def document(title: str, subtitle: str, height: int, drawn: Sequence[str], rules: str = "") -> str:
    """The text of an SVG file on a light or dark page. What is `drawn`, and further CSS
    `rules`, name colours as `var(--NAME)`, with the names of COLOURS.
    """
    rules = (
        "text{font:14px -apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif;"
        "fill:var(--text)}"
        ".title{font-size:20px;font-weight:600}.quiet{fill:var(--quiet)}.page{fill:var(--page)}"
    ) + rules
    light, dark = (
        "".join(f"--{name}:{pair[side]};" for name, pair in COLOURS.items()) for side in (0, 1)
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' role="img" aria-labelledby="title about">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="about">{escape(subtitle)}</desc>',
            f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}{rules}",
            "</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
            text_at(_MARGIN, 34, title, "title"),
            text_at(_MARGIN, 57, subtitle, "quiet"),
            *drawn,
            "</svg>\n",
        )
    )


def cell_rules() -> str:
    """The CSS rules of cells, names, headings and bands."""
    rules = (
        ".heading{font-size:15px;font-weight:600}.container{font-weight:600}"
        ".small{font-size:12.5px}"
        ".name{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,monospace;font-size:13px}"
        ".band{fill:var(--band)}"
        ".frame{fill:none;stroke-width:2}.dashed{stroke-dasharray:4 3}"
        ".dash{fill:none;stroke-width:2.5}"
        ".cross{fill:none;stroke:var(--mark);stroke-width:2.5;stroke-linecap:round}"
        ".letter{fill:var(--mark);font-weight:700;text-anchor:middle}"
    )
    for name in sorted(set(_COLOUR_OF.values())):
        rules += f".{name}.cell{{fill:var(--{name})}}"
        rules += f".{name}.frame,.{name}.dash{{stroke:var(--{name})}}"
    return rules
