"""Rows of SQLite, which does not check its pages: a damaged file may give rows of other
types, or out of order, and a reader that goes on from the last one would never end.
"""

import sqlite3
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import UnionType
from typing import TypeVar

Row = TypeVar("Row")
Values = TypeVar("Values", bound=Sequence[object] | None)
Place = TypeVar("Place", int, bytes, tuple[bytes, int], tuple[bytes, str])


def in_order(rows: list[Row], place: Callable[[Row], Place], *, after: Place | None) -> list[Row]:
    """The rows, if their places ascend, and begin after `after`.

    Raises:
        sqlite3.DatabaseError: they do not, which a whole file rules out.
    """
    places = [place(row) for row in rows]
    if after is not None:
        places.insert(0, after)
    if any(one >= other for one, other in pairwise(places)):
        raise sqlite3.DatabaseError("its rows are out of order: the file is damaged")
    return rows


def of_types(row: Values, *kinds: type | UnionType) -> Values:
    """The row, if its values are of these types.

    Raises:
        sqlite3.DatabaseError: they are not, or there is no row.
    """
    if row is None or not all(map(isinstance, row, kinds)) or len(row) != len(kinds):
        raise sqlite3.DatabaseError("a row has other types: the file is damaged")
    return row
