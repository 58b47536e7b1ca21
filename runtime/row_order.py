"""Rows of SQLite that are read page by page: a damaged file may give them out of order,
and then a reader that goes on from the last one would never end.
"""

import sqlite3
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

Row = TypeVar("Row")
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
