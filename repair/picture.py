"""Draws a container on a terminal: one row per replica, one cell per block.

Each kind of cell has its own character, so that no state is shown by colour alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum

from rich.table import Table
from rich.text import Text

from merkle.comparison import Comparison, DifferenceKind
from merkle.tree import BlockId, ContainerTree

# With more blocks, neighbours share a cell that shows the worst of them.
_CELLS_MAX = 72


class BlockCell(Enum):
    """The kinds of cells, from harmless to worst: character, style, meaning."""

    HEALTHY = ("█", "green", "healthy")
    DELETED = ("x", "dim", "deleted")
    MISSING = ("·", "yellow", "missing")
    PARTLY_MISSING = ("▄", "yellow", "partly missing")
    CORRUPT = ("▒", "bold red", "corrupt")
    CONFLICT = ("?", "bold magenta", "conflicting")

    @property
    def character(self) -> str:
        """The character on a terminal."""
        return self.value[0]

    @property
    def style(self) -> str:
        """The Rich style."""
        return self.value[1]

    @property
    def meaning(self) -> str:
        """The text for the legend."""
        return self.value[2]


_ORDER = list(BlockCell)
_CELL_OF = {
    DifferenceKind.MISSING_CHUNK: BlockCell.PARTLY_MISSING,
    DifferenceKind.CORRUPT_CHUNK: BlockCell.CORRUPT,
    DifferenceKind.CONFLICTING_CHUNK: BlockCell.CONFLICT,
}


def cells(
    trees: Mapping[str, ContainerTree], comparison: Comparison, blocks: Iterable[BlockId] = ()
) -> dict[str, list[BlockCell]]:
    """The cells of each replica: one for each block of any replica and of `blocks`, in
    ascending ID order.
    """
    union: Sequence[BlockId] = sorted(
        {block.block_id for tree in trees.values() for block in tree.blocks}.union(blocks)
    )
    found: dict[str, list[BlockCell]] = {}
    for name, tree in trees.items():
        entries = {block.block_id: block for block in tree.blocks}
        worse = {
            (difference.block_id, _CELL_OF[difference.kind])
            for difference in comparison.differences
            if difference.kind in _CELL_OF and name in difference.lacking
        }
        row = []
        for block_id in union:
            entry = entries.get(block_id)
            own = (
                BlockCell.MISSING
                if entry is None
                else BlockCell.DELETED
                if entry.deleted
                else BlockCell.HEALTHY
            )
            row.append(
                max([own, *(cell for at, cell in worse if at == block_id)], key=_ORDER.index)
            )
        found[name] = row
    return found


def strips(
    rows: Mapping[str, Sequence[BlockCell]], beside: Mapping[str, str], columns: int
) -> Table:
    """A borderless table with a row per replica: its name, its cells and its text in
    `beside`, such as the root; no row is wider than `columns`, as far as names and
    texts allow.
    """
    texts = max((len(name) + len(beside.get(name, "")) for name in rows), default=0)
    # Two blanks between the columns, and one after the last.
    cells_max = min(_CELLS_MAX, max(columns - texts - 5, 8))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for name, row in rows.items():
        strip = Text()
        for cell in binned(row, cells_max):
            strip.append(cell.character, cell.style)
        table.add_row(Text(name, "bold"), strip, beside.get(name, ""))
    return table


def legend() -> Text:
    """The meaning of the characters, in one line of less than 76 columns."""
    return Text("  ").join(
        Text(cell.character, cell.style) + Text(f" {cell.meaning}", "dim") for cell in BlockCell
    )


def binned(row: Sequence[BlockCell], cells_max: int) -> list[BlockCell]:
    """A row of at most `cells_max` cells: neighbours share one, the worst of them."""
    step = -(-len(row) // cells_max) or 1
    return [max(row[i : i + step], key=_ORDER.index) for i in range(0, len(row), step)]
