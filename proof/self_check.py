"""The self-check of an index: everything derived from its items, computed anew."""

from dataclasses import dataclass
from itertools import pairwise

from proof.errors import IndexDamagedError
from proof.index import WHOLE, KeyRange
from proof.index_state import DerivedState, EvidenceTally, derive
from proof.item import ItemHasher
from proof.root import SetRoot
from proof.rows import checked_hashes, decode_row
from proof.snapshot import read_ids
from proof.tables import ItemRow, TableView

# Further damage says nothing that a rebuild needs to know.
_DAMAGE_MAX = 10


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What a check of all items found. `damage` is empty if the index is sound."""

    items: int
    damage: tuple[str, ...]


def self_check(
    view: TableView, hasher: ItemHasher, kept: DerivedState, tally: EvidenceTally
) -> SelfCheck:
    """Compare what was kept up to date with what the rows of a view give. It reads the
    rows twice, and the database as a whole.

    Raises:
        DatabaseError: the database cannot be read.
    """

    def check(row: ItemRow) -> None:
        if hasher.hashes(decode_row(*row).item) != checked_hashes(*row):
            raise IndexDamagedError(f"the ID of {row.key.decode()!r} is that of another item")

    items, damage = 0, list[str]()
    try:
        damage += view.damage()
        state, counted = derive(view.rows(b"", None), kept.position, check)
        items = state.root.count
        if state.root != kept.root:
            damage.append("the root is not the sum of the items")
        if state.symbols.to_bytes() != kept.symbols.to_bytes():
            damage.append("the coded symbols are not those of the items")
        if (counted.levels, counted.hours) != (tally.levels, tally.hours):
            damage.append("the counts by evidence are not those of the items")
        damage += _wrong_spans(view, kept)
    except IndexDamagedError as error:
        damage.append(error.message)
    return SelfCheck(items, tuple(damage[:_DAMAGE_MAX]))


def _wrong_spans(view: TableView, kept: DerivedState) -> list[str]:
    starts = [start for start, _ in kept.spans.counts(WHOLE)]
    wrong = list[str]()
    for start, end in pairwise([*starts, None]):
        assert start is not None
        span = KeyRange(start, end)
        root, parts = kept.spans.cover(span)
        if parts or root != SetRoot.of(read_ids(view, span)):
            wrong.append(f"the sum of the span from {start!r} is not that of its items")
    return wrong
