"""The port of the storage below an index: rows, a journal and a few values.

Keys, versions and rows are bytes here. Keys are ordered by their bytes, versions of a
key too. A row begins with the hashes of its item's ID, and the first six bytes of these
can be looked up.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from proof.columns import ByteColumn, NameColumns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ItemRow(NamedTuple):
    """One version of a key."""

    key: bytes
    version: bytes
    row: bytes


@dataclass(frozen=True, slots=True, eq=False)
class RowColumns:
    """Many of them. Rows are as stored: their checksums tell what is damaged."""

    names: NameColumns
    rows: ByteColumn

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, rows: Sequence[tuple[bytes, bytes, bytes]]) -> "RowColumns":
        """The columns of these.

        Raises:
            TypeError: one has something else than bytes.
        """
        names = NameColumns.of([key for key, _, _ in rows], [version for _, version, _ in rows])
        return cls(names, ByteColumn.of([row for _, _, row in rows]))

    def joined(self, other: "RowColumns") -> "RowColumns":
        """These, and those behind them."""
        return RowColumns(self.names.joined(other.names), self.rows.joined(other.rows))


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

    def by_hash(self, key_hashes: "NDArray[np.uint64]") -> RowColumns:
        """All rows that begin with one of these (48 bits, big-endian), which ascend and
        are there once each; in any order.
        """

    def names_by_hash(self, key_hashes: "NDArray[np.uint64]") -> NameColumns:
        """The keys and the versions of the same rows, for less. They come from the
        order by hash, which has no checksum.
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
