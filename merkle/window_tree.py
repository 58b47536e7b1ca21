"""A tree of CRCs over the windows of an object, which finds where two objects differ.

Sums of `merkle.object_checksum`, taken over groups of 64 windows, groups of groups and
so on: two objects of one size are compared by a few hundred bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from merkle.object_checksum import Crc, multiply, object_crc, zeros_factor

if TYPE_CHECKING:
    from numpy.typing import NDArray

Uint64s: TypeAlias = "NDArray[np.uint64]"

# Children of a node: 64 CRCs fit one packet, and three levels of them 4 GiB in windows
# of 16 KiB.
FAN_OUT = 64


@dataclass(frozen=True, slots=True)
class WindowTree:
    """CRCs of the windows of one object, and of groups of them, up to the whole.

    `levels[0]` has the windows of `window_bytes` each, the last one maybe shorter;
    each further level a CRC for every 64 nodes below; the last level one, the object's.
    """

    crc: Crc
    size_bytes: int
    window_bytes: int
    levels: tuple[Uint64s, ...]

    def __post_init__(self) -> None:
        assert self.size_bytes > 0
        assert len(self.levels[0]) == -(-self.size_bytes // self.window_bytes)
        assert len(self.levels[-1]) == 1

    @property
    def whole(self) -> int:
        """The CRC of the whole object."""
        return int(self.levels[-1][0])

    def children(self, level: int, nodes: Sequence[int]) -> Uint64s:
        """The CRCs one level below some nodes of `level`, in order, joined.

        Raises:
            IndexError: there is no such level or node.
        """
        if not 0 < level < len(self.levels) or not all(
            0 <= node < len(self.levels[level]) for node in nodes
        ):
            raise IndexError("no such node")
        below = self.levels[level - 1]
        groups = [below[FAN_OUT * node : FAN_OUT * (node + 1)] for node in nodes]
        return np.concatenate(groups) if groups else below[:0]


def window_tree(crc: Crc, windows: Uint64s, *, size_bytes: int, window_bytes: int) -> WindowTree:
    """The tree over the CRCs of all windows of an object that is not empty."""
    levels, node_bytes = [windows], window_bytes
    while len(levels[-1]) > 1:
        levels.append(_parents(crc, levels[-1], node_bytes, size_bytes))
        node_bytes *= FAN_OUT
    return WindowTree(crc, size_bytes, window_bytes, tuple(levels))


def unequal_children(
    tree: WindowTree, level: int, nodes: Sequence[int], theirs: Uint64s
) -> list[int]:
    """Numbers, in the level below, of children whose CRC is not ours.

    `theirs` is what `children` of the same nodes gave at the other side.

    Raises:
        ValueError: their answer has another length.
    """
    ours = tree.children(level, nodes)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(theirs)} checksums instead of {len(ours)}")
    below = len(tree.levels[level - 1])
    numbers = [
        child for node in nodes for child in range(FAN_OUT * node, min(FAN_OUT * (node + 1), below))
    ]
    return [number for number, same in zip(numbers, ours == theirs, strict=True) if not same]


def _parents(crc: Crc, nodes: Uint64s, node_bytes: int, size_bytes: int) -> Uint64s:
    full = len(nodes) // FAN_OUT
    # The last group is apart where it is not full, or where its last node is short.
    if full * FAN_OUT == len(nodes) and size_bytes % node_bytes:
        full -= 1
    groups, length_bytes = nodes[: full * FAN_OUT].reshape(full, FAN_OUT), node_bytes
    while groups.shape[1] > 1:
        groups = _shift(crc, length_bytes, groups[:, 0::2]) ^ groups[:, 1::2]
        length_bytes *= 2
    parents = groups[:, 0]
    rest = nodes[full * FAN_OUT :].tolist()
    if rest:
        last_bytes = size_bytes - (len(nodes) - 1) * node_bytes
        lengths = [node_bytes] * (len(rest) - 1) + [last_bytes]
        last = object_crc(crc, zip(rest, lengths, strict=True))
        parents = np.append(parents, np.uint64(last))
    return parents


def _shift(crc: Crc, zero_bytes: int, values: Uint64s) -> Uint64s:
    """Each CRC as if `zero_bytes` zero bytes followed."""
    tables, shifted = _tables(crc, zero_bytes), np.zeros_like(values)
    for number, table in enumerate(tables):
        shifted ^= table[(values >> np.uint64(8 * number)) & np.uint64(0xFF)]
    return shifted


@lru_cache(maxsize=256)
def _tables(crc: Crc, zero_bytes: int) -> Uint64s:
    """One table of 256 for each byte of a CRC: a product is the sum of its bytes'."""
    width, _ = crc.value
    factor = zeros_factor(crc, zero_bytes)
    tables = np.zeros((width // 8, 256), np.uint64)
    for bit in range(width):
        table, low = tables[bit // 8], 1 << (bit % 8)
        table[low : 2 * low] = table[:low] ^ np.uint64(multiply(crc, factor, 1 << bit))
    return tables
