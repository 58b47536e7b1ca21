"""LtHash16: a hash of a set of items that no key protects and that still holds.

Each item is expanded to 1,024 lanes of 16 bits by BLAKE3; the hash is the sum of the
lanes. So items are added and removed in any order, and two sums add up to that of both
sets. Sums of short hashes and xors can be forged; sums of lattices this wide cannot, by
what is known. Roots and symbols are keyed instead, which is cheaper, but proves nothing
to those who hold the key.
"""

import itertools
from collections.abc import Iterable, Iterator

from blake3 import blake3
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from proof.item import Item, canonical_bytes

LANES = 1024
STATE_BYTES = 2 * LANES
# Items expanded before they are added up: half a MiB, which stays in a core's cache.
# The sums of their lanes fit 32 bits.
_BATCH_ITEMS = 256
# numpy adds a batch in a tenth of the time, but its import takes as long as adding up
# this many items without it.
_NUMPY_ITEMS_MIN = 20_000
# Every other lane of a state that is one number, and the bit above each of them.
_EVEN = int.from_bytes(b"\xff\xff\x00\x00" * (LANES // 2), "little")
_ABOVE = int.from_bytes(b"\x00\x00\x01\x00" * (LANES // 2), "little")
_LANE_BITS = 16


class LtHash:
    """The hash of a set that starts empty, or as an earlier `state`."""

    def __init__(self, state: bytes = bytes(STATE_BYTES)) -> None:
        assert len(state) == STATE_BYTES
        self._lanes = int.from_bytes(state, "little")

    def add(self, items: Iterable[Item]) -> None:
        """Add items. An item that is added twice counts twice."""
        for lanes in _sums(items):
            self._lanes = _plus(self._lanes, lanes)

    def remove(self, items: Iterable[Item]) -> None:
        """Remove items that were added."""
        for lanes in _sums(items):
            self._lanes = _minus(self._lanes, lanes)

    def add_hash(self, other: "LtHash") -> None:
        """Add all items of another set."""
        self._lanes = _plus(self._lanes, other._lanes)

    @property
    def state(self) -> bytes:
        """2,048 bytes from which adding and removing continues."""
        return self._lanes.to_bytes(STATE_BYTES, "little")

    @property
    def digest(self) -> bytes:
        """32 bytes, the SHA-256 of the state: what a receipt states."""
        return sha256(self.state)


def sha256(data: bytes) -> bytes:
    """The SHA-256 of some bytes."""
    hasher = Hash(SHA256())
    hasher.update(data)
    return hasher.finalize()


def _plus(ours: int, theirs: int) -> int:
    """The sums of all lanes, each modulo 2^16."""
    even = ((ours & _EVEN) + (theirs & _EVEN)) & _EVEN
    odd = ((ours >> _LANE_BITS & _EVEN) + (theirs >> _LANE_BITS & _EVEN)) & _EVEN
    return even | odd << _LANE_BITS


def _minus(ours: int, theirs: int) -> int:
    """The differences of all lanes, each modulo 2^16."""
    even = ((ours & _EVEN | _ABOVE) - (theirs & _EVEN)) & _EVEN
    odd = ((ours >> _LANE_BITS & _EVEN | _ABOVE) - (theirs >> _LANE_BITS & _EVEN)) & _EVEN
    return even | odd << _LANE_BITS


class _WorkCounter:
    """Items added up in this process. Threads may lose counts of each other, which does
    no harm.
    """

    items = 0


_work = _WorkCounter()


def _sums(items: Iterable[Item]) -> Iterator[int]:
    """The sums of the lanes of some items at a time."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, _BATCH_ITEMS)):
        expanded = [blake3(canonical_bytes(item)).digest(length=STATE_BYTES) for item in batch]
        _work.items += len(batch)
        yield (fast_sum if _work.items > _NUMPY_ITEMS_MIN else slow_sum)(expanded)


def slow_sum(expanded: list[bytes]) -> int:
    """The sum of some states, of which there are at most 65,536, as one number."""
    even = odd = 0
    for one in expanded:
        lanes = int.from_bytes(one, "little")
        even += lanes & _EVEN
        odd += lanes >> _LANE_BITS & _EVEN
    return even & _EVEN | (odd & _EVEN) << _LANE_BITS


def fast_sum(expanded: list[bytes]) -> int:
    """The same by numpy."""
    import numpy as np

    lanes = np.frombuffer(b"".join(expanded), np.dtype("<u2")).reshape(-1, LANES)
    return int.from_bytes(lanes.sum(axis=0, dtype=np.dtype("<u2")).tobytes(), "little")
