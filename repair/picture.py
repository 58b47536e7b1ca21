"""Draw a container: one row a replica, one cell a block, so that damage is seen at a
glance.

State is never told by colour alone: each kind of cell has its own character.
"""

from collections.abc import Mapping, Sequence
from enum import Enum

from rich.table import Table
from rich.text import Text

from merkle.comparison import Comparison, DifferenceKind
from merkle.tree import BlockId, ContainerTree

# Wider pictures wrap on a terminal of 100 columns; beyond it neighbouring blocks share
# a cell, the worst one shows.
_CELLS_MAX = 72


class BlockCell(Enum):
    """What one cell says, from harmless to worst: character, style, meaning."""

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
        """The style of Rich."""
        return self.value[1]

    @property
    def meaning(self) -> str:
        """What the cell says, for the legend."""
        return self.value[2]


_ORDER = list(BlockCell)
_WORSENED_BY = {
    DifferenceKind.MISSING_CHUNK: BlockCell.PARTLY_MISSING,
    DifferenceKind.CORRUPT_CHUNK: BlockCell.CORRUPT,
    DifferenceKind.CONFLICTING_CHUNK: BlockCell.CONFLICT,
}


def cells(trees: Mapping[str, ContainerTree], comparison: Comparison) -> dict[str, list[BlockCell]]:
    """The cell of each block of the union, in ascending block order, for each
    replica.
    """
    union: Sequence[BlockId] = sorted(
        {block.block_id for tree in trees.values() for block in tree.blocks}
    )
    found: dict[str, list[BlockCell]] = {}
    for name, tree in trees.items():
        entries = {block.block_id: block for block in tree.blocks}
        worse = {
            (difference.block_id, _WORSENED_BY[difference.kind])
            for difference in comparison.differences
            if difference.kind in _WORSENED_BY and name in difference.lacking
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


def strips(rows: Mapping[str, Sequence[BlockCell]], beside: Mapping[str, str]) -> Table:
    """A borderless table: replica, its strip of cells, and what `beside` says of it
    (its root, say).
    """
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for name, row in rows.items():
        strip = Text()
        for cell in _binned(row):
            strip.append(cell.character, cell.style)
        table.add_row(Text(name, "bold"), strip, beside.get(name, ""))
    return table


def legend() -> Text:
    """What the characters mean, in one line."""
    return Text("   ").join(
        Text(cell.character, cell.style) + Text(f" {cell.meaning}", "dim") for cell in BlockCell
    )


def _binned(row: Sequence[BlockCell]) -> list[BlockCell]:
    step = -(-len(row) // _CELLS_MAX) or 1
    return [max(row[i : i + step], key=_ORDER.index) for i in range(0, len(row), step)]
