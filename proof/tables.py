"""The port of the storage below an index: rows, a journal and a few values.

Keys, versions and rows are bytes here. Keys are ordered by their bytes, versions of a
key too. A row begins with the hashes of its item's ID, and the first six bytes of these
can be looked up.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class ItemRow(NamedTuple):
    """One version of a key."""

    key: bytes
    version: bytes
    row: bytes


class JournalRow(NamedTuple):
    """One change, in the form of `proof.stored_index`."""

    position: int
    change: bytes


@dataclass(slots=True)
class TableBatch:
    """Changes that are written as one. A value of None is removed. The journal up to
    `journal_through` is dropped.
    """

    puts: list[ItemRow] = field(default_factory=list)
    # (key, version, the row that is there)
    deletes: list[ItemRow] = field(default_factory=list)
    journal: list[JournalRow] = field(default_factory=list)
    values: dict[str, bytes | None] = field(default_factory=dict)
    journal_through: int = 0


class TableView(Protocol):
    """All tables at one moment. Every method raises DatabaseError, or IndexDamagedError
    where the storage itself finds damage.
    """

    def rows(self, start: bytes, end: bytes | None) -> Iterator[ItemRow]:
        """The rows from one key on and before another, ascending; None is no end."""

    def by_hash(self, key_hashes: Sequence[int]) -> Sequence[tuple[bytes, bytes, bytes]]:
        """Key, version and row of all rows that begin with one of these (48 bits,
        big-endian), in any order. Damaged ones may be of another type.
        """

    def names_by_hash(self, key_hashes: Sequence[int]) -> tuple[list[bytes], list[bytes]]:
        """The keys and the versions of the same rows, for less. They come from the
        order by hash, which has no checksum: damaged ones may even be of another type.
        """

    def journal(self, *, after: int, through: int) -> Iterator[JournalRow]:
        """The journal after one position and up to another, ascending."""

    def values(self, prefix: str) -> dict[str, bytes]:
        """The values whose names begin so."""

    def damage(self) -> list[str]:
        """What the storage finds wrong with itself, by reading all of it."""


class ItemTables(Protocol):
    """The storage of one generation of an index. One thread at a time writes. Errors
    are those of TableView.
    """

    def view(self) -> AbstractContextManager[TableView]:
        """What was written last, unchanged until the context ends."""

    def versions(self, keys: Sequence[bytes]) -> list[list[ItemRow]]:
        """The rows of each key, as written last."""

    def write(self, batch: TableBatch) -> None:
        """Write everything in a batch, or nothing; durable on return. While a
        generation is built, nothing is durable before `settle`.
        """

    def settle(self) -> None:
        """End the building: look-ups by hash work, and all is durable."""

    def close(self) -> None:
        """Release files and locks; idempotent. All views have ended."""
