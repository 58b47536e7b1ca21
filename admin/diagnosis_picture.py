"""The picture of `treefold diagnose --svg`: which replica lacks what, block by block,
and of chunks whose data were read, window by window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from admin.diagnosis_text import NodeNames
from live.diagnosis import Diagnosis
from merkle.survey import ChunkPlace
from repair.picture import BlockCell, binned, cells
from repair.svg_picture import WIDTH, cell_mark, cell_rules, document, kinds_legend, text_at

# More containers make no picture that anybody looks at; the text and --out have all.
DRAWN_MAX = 50
_CHUNKS_MAX = 8
_NAME_LETTERS_MAX = 30
_MARGIN, _NAMES, _HEAD, _ROW, _STEP, _GAP, _FOOT = 24, 236, 78, 28, 26, 22, 40
_WINDOW, _WINDOW_STEP, _WINDOW_ROW = 7, 9, 15
_CELLS_MAX = (WIDTH - 2 * _MARGIN - _NAMES) // _STEP
_WINDOWS_MAX = (WIDTH - 2 * _MARGIN - _NAMES) // _WINDOW_STEP
# Of a window: framed where there is nothing, struck through where it is bad.
_RULES = (
    ".strike{fill:none;stroke:var(--corrupt);stroke-width:1.5}"
    ".thin{fill:none;stroke-width:1.2}.thin.corrupt{stroke:var(--corrupt)}"
    ".thin.missing{stroke:var(--missing);stroke-dasharray:2 1.5}"
)
_Rows = Mapping[str, Sequence[BlockCell]]


@dataclass(frozen=True, slots=True)
class DrawnDiagnosis:
    """A container to be drawn: the cells of its replicas by the name of their datanode,
    and of some damaged chunks those of their windows, under a heading each.
    """

    heading: str
    note: str
    blocks: _Rows
    chunks: tuple[tuple[str, _Rows], ...]


def drawn_diagnosis(diagnosis: Diagnosis) -> DrawnDiagnosis:
    """What is drawn of a diagnosis; it keeps none of its trees."""
    names = NodeNames(diagnosis.nodes)
    trees = {one.replica.peer: one.tree for one in diagnosis.readings if one.tree is not None}
    rows = cells({str(peer): tree for peer, tree in trees.items()}, diagnosis.comparison)
    unread = [one for one in diagnosis.readings if one.tree is None]
    blocks: dict[str, Sequence[BlockCell]] = {
        _short(names.text(peer)): binned(row, _CELLS_MAX) for peer, row in rows.items()
    }
    blocks |= {_short(f"{names.text(one.replica.peer)}: not read"): () for one in unread}
    deep = {names.text(one.replica.peer): one.deep for one in diagnosis.readings if one.deep}
    counts: dict[ChunkPlace, int] = {}
    for found in deep.values():
        counts |= found.window_counts
    # Those that most replicas have damaged come first.
    places = sorted(
        counts, key=lambda place: (-sum(place in one.window_counts for one in deep.values()), place)
    )
    chunks = []
    for place in places[:_CHUNKS_MAX]:
        windows = {
            _short(name): binned(
                _window_cells(
                    counts[place],
                    found.bad_windows.get(place, frozenset()),
                    is_lost=place in found.lost,
                ),
                _WINDOWS_MAX,
            )
            for name, found in deep.items()
        }
        chunks.append((f"block {place[0]}, chunk at {place[1]}: {counts[place]} windows", windows))
    container = diagnosis.container
    heading = f"container {container.container_id}: {diagnosis.verdict.value}"
    left = len(places) - len(chunks)
    more = f"{left} further damaged chunks are not drawn" if left else ""
    note = "; ".join(filter(None, (names.text(diagnosis.doubt), more)))
    return DrawnDiagnosis(heading, note[:150], blocks, tuple(chunks))


def draw_diagnoses(title: str, subtitle: str, containers: Sequence[DrawnDiagnosis]) -> str:
    """The picture as the text of an SVG file."""
    drawn, y = list[str](), _HEAD
    for one in containers:
        height = _height(one)
        drawn.append(
            f'<rect class="band" x="8" y="{y}" width="{WIDTH - 16}" height="{height - 10}" rx="8"/>'
        )
        drawn += _container(one, y)
        y += height
    kinds = {
        cell
        for one in containers
        for rows in (one.blocks, *(windows for _, windows in one.chunks))
        for row in rows.values()
        for cell in row
    }
    words = "a row: one replica; a large cell: one block, a small one: one window"
    drawn += kinds_legend(y + _FOOT - 18, [cell for cell in BlockCell if cell in kinds], words)
    return document(title, subtitle, y + _FOOT, drawn, cell_rules() + _RULES)


def _height(one: DrawnDiagnosis) -> int:
    note = _GAP if one.note else 0
    chunks = sum(_GAP + 6 + _WINDOW_ROW * len(rows) for _, rows in one.chunks)
    return 46 + note + _ROW * len(one.blocks) + chunks + 16


def _container(one: DrawnDiagnosis, top: int) -> list[str]:
    y = top + 28
    drawn = [text_at(_MARGIN, y, one.heading, "container")]
    if one.note:
        y += _GAP
        drawn.append(text_at(_MARGIN, y, one.note, "quiet small"))
    y += 14
    for name, row in one.blocks.items():
        drawn.append(text_at(_MARGIN, y + 16, name, "name"))
        drawn += (cell_mark(cell, _MARGIN + _NAMES + _STEP * at, y) for at, cell in enumerate(row))
        y += _ROW
    for heading, rows in one.chunks:
        y += _GAP
        drawn.append(text_at(_MARGIN, y, heading, "quiet small"))
        y += 6
        for name, row in rows.items():
            drawn.append(text_at(_MARGIN, y + 9, name, "name small"))
            drawn += (
                _window(cell, _MARGIN + _NAMES + _WINDOW_STEP * at, y)
                for at, cell in enumerate(row)
            )
            y += _WINDOW_ROW
    return drawn


def _window(cell: BlockCell, x: int, y: int) -> str:
    frame = f'x="{x}" y="{y + 2}" width="{_WINDOW}" height="{_WINDOW + 2}"'
    match cell:
        case BlockCell.CORRUPT:
            stroke = f"M{x} {y + 11}l{_WINDOW} -{_WINDOW + 2}"
            return f'<rect class="thin corrupt" {frame}/><path class="strike" d="{stroke}"/>'
        case BlockCell.MISSING:
            return f'<rect class="thin missing" {frame}/>'
        case _:
            return f'<rect class="healthy cell" {frame}/>'


def _window_cells(count: int, bad: frozenset[int], *, is_lost: bool) -> list[BlockCell]:
    if is_lost:
        return [BlockCell.MISSING] * count
    return [BlockCell.CORRUPT if at in bad else BlockCell.HEALTHY for at in range(count)]


def _short(name: str) -> str:
    return name if len(name) <= _NAME_LETTERS_MAX else f"{name[: _NAME_LETTERS_MAX - 1]}…"
