"""Roots: the count and the sum of the IDs of a set of items.

A sum does not depend on the order of its items, and a change adds its new ID and takes
its old one away. So a past root is the present one without the changes since.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from proof.item import ID_BYTES, ItemId

if TYPE_CHECKING:
    from proof.symbols import Ids

_MODULUS = 1 << 8 * ID_BYTES
# More summands of 32 bits could overflow 64.
_SUMMANDS_MAX = 1 << 31


@dataclass(frozen=True, slots=True)
class SetRoot:
    """How many items, and the sum of their IDs modulo 2^128. Of a difference of two
    sets, the count may be negative.
    """

    count: int
    total: int

    def __post_init__(self) -> None:
        assert 0 <= self.total < _MODULUS

    def __add__(self, other: "SetRoot") -> "SetRoot":
        return SetRoot(self.count + other.count, (self.total + other.total) % _MODULUS)

    def __sub__(self, other: "SetRoot") -> "SetRoot":
        return SetRoot(self.count - other.count, (self.total - other.total) % _MODULUS)

    @classmethod
    def of(cls, ids: "Ids") -> Self:
        """The root of the items with these IDs (shape (items, 2))."""
        # Imported here, because a comparison without an index adds items one by one.
        import numpy as np

        assert len(ids) < _SUMMANDS_MAX
        half, low_half, total = np.uint64(32), np.uint64(0xFFFF_FFFF), 0
        for lane in (ids[:, 0], ids[:, 1]):
            high = int((lane >> half).sum(dtype=np.uint64))
            low = int((lane & low_half).sum(dtype=np.uint64))
            total = (total << 64) + (high << 32) + low
        return cls(len(ids), total % _MODULUS)

    @classmethod
    def of_all(cls, roots: Sequence["SetRoot"]) -> Self:
        """The root of disjoint sets together: far less than adding one by one."""
        return cls(sum(one.count for one in roots), sum(one.total for one in roots) % _MODULUS)

    @classmethod
    def of_item(cls, item_id: ItemId | None) -> Self:
        """The root of one item; None is no item."""
        return cls(1, int.from_bytes(item_id, "big")) if item_id is not None else cls(0, 0)


ROOT_EMPTY = SetRoot(0, 0)
