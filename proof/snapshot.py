"""A consistent read of a stored index: tables of one moment, and sums that fit them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from proof.columns import NameColumns
from proof.index import AppliedPositions, EvidenceCounts, KeyRange, Position
from proof.item_columns import FoundItems
from proof.root import SetRoot
from proof.rows import checked_hashes, decode_rows
from proof.spans import SpanSums
from proof.symbols import CodedSymbols, Ids, ids_from_hashes
from proof.tables import ItemRow, TableView


class StoredSnapshot:
    """ItemSnapshot of a stored index. Every method raises DatabaseError, or
    IndexDamagedError where what it reads cannot be right.
    """

    def __init__(
        self,
        view: TableView,
        *,
        position: Position,
        applied: AppliedPositions | None,
        evidence: EvidenceCounts,
        symbols: CodedSymbols,
        spans: SpanSums,
    ) -> None:
        self._view = view
        self._position = position
        self._applied = applied
        self._evidence = evidence
        self._symbols = symbols
        self._spans = spans

    @property
    def position(self) -> Position:
        """See ItemSnapshot.position."""
        return self._position

    @property
    def applied(self) -> AppliedPositions | None:
        """See ItemSnapshot.applied."""
        return self._applied

    @property
    def evidence(self) -> EvidenceCounts:
        """See ItemSnapshot.evidence; the oldest reading is rounded down to its hour."""
        return self._evidence

    def roots(self, ranges: Sequence[KeyRange]) -> list[SetRoot]:
        """See ItemSnapshot.roots."""
        found = []
        for one in ranges:
            root, parts = self._spans.cover(one)
            for part in parts:
                root += SetRoot.of(self.ids(part))
            found.append(root)
        return found

    def symbols(self, size: int) -> CodedSymbols:
        """See ItemSnapshot.symbols."""
        return self._symbols.head(size)

    def ids(self, key_range: KeyRange) -> Ids:
        """See ItemSnapshot.ids."""
        return read_ids(self._view, key_range)

    def split(self, key_range: KeyRange, parts: int) -> list[str]:
        """See ItemSnapshot.split."""
        spans = self._spans.counts(key_range)
        if len(spans) >= parts:
            return _bounds(spans, key_range, parts, sum(items for _, items in spans))
        return split_rows(self._view, key_range, parts, self.roots([key_range])[0].count)

    def find(self, key_hashes: npt.NDArray[np.uint64]) -> FoundItems:
        """See ItemSnapshot.find."""
        return decode_rows(self._view.by_hash(_each_once(key_hashes)))

    def names(self, key_hashes: npt.NDArray[np.uint64]) -> NameColumns:
        """See ItemSnapshot.names."""
        return self._view.names_by_hash(_each_once(key_hashes))


def read_ids(view: TableView, key_range: KeyRange) -> Ids:
    """The IDs of a range, shape (items, 2).

    Raises:
        IndexDamagedError: a row is damaged.
    """
    return ids_from_hashes(b"".join(checked_hashes(*row) for row in _range_rows(view, key_range)))


def split_rows(view: TableView, key_range: KeyRange, parts: int, count: int) -> list[str]:
    """At most `parts - 1` keys that cut a range of `count` items into parts of nearly
    equal counts, by reading it.
    """
    rows = groupby(_range_rows(view, key_range), lambda row: row.key)
    keys = ((key.decode(), len(list(versions))) for key, versions in rows)
    return _bounds(keys, key_range, parts, count)


def _each_once(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Ascending: neighbours are found in one page."""
    ascending: npt.NDArray[np.uint64] = np.sort(hashes)
    is_first = np.ones(len(ascending), np.bool_)
    is_first[1:] = ascending[1:] != ascending[:-1]
    return ascending[is_first]


def _range_rows(view: TableView, key_range: KeyRange) -> Iterator[ItemRow]:
    """The rows of a range, ascending."""
    end = key_range.end
    return view.rows(key_range.start.encode(), None if end is None else end.encode())


def _bounds(
    counted: Iterable[tuple[str, int]], key_range: KeyRange, parts: int, count: int
) -> list[str]:
    """The keys at which another of `parts` equal shares of `count` is reached."""
    bounds, before = list[str](), 0
    for key, items in counted:
        reached = before * parts // max(count, 1)
        if reached > len(bounds) and key > key_range.start and len(bounds) < parts - 1:
            bounds.append(key)
        before += items
    return bounds
