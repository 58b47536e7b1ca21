"""LtHash16: a hash of a set of items that no key protects and that still holds.

Each item is expanded to 1,024 lanes of 16 bits by BLAKE3; the hash is the sum of the
lanes. So items are added and removed in any order, and two sums add up to that of both
sets. Sums of short hashes and xors can be forged; sums of lattices this wide cannot, by
what is known. Roots and symbols are keyed instead, which is cheaper, but proves nothing
to those who hold the key.
"""

import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from cryptography.hazmat.primitives.hashes import SHA256, Hash

from proof.item import Item, canonical_bytes

LANES = 1024
STATE_BYTES = 2 * LANES
# Items expanded before they are added up: half a MiB, which stays in a core's cache.
_BATCH_ITEMS = 256
_LANE = np.dtype("<u2")


class LtHash:
    """The hash of a set that starts empty, or as an earlier `state`."""

    def __init__(self, state: bytes = bytes(STATE_BYTES)) -> None:
        assert len(state) == STATE_BYTES
        self._lanes = np.frombuffer(state, _LANE).copy()

    def add(self, items: Iterable[Item]) -> None:
        """Add items. An item that is added twice counts twice."""
        for lanes in _expanded(items):
            self._lanes += lanes

    def remove(self, items: Iterable[Item]) -> None:
        """Remove items that were added."""
        for lanes in _expanded(items):
            self._lanes -= lanes

    def add_hash(self, other: "LtHash") -> None:
        """Add all items of another set."""
        self._lanes += other._lanes

    @property
    def state(self) -> bytes:
        """2,048 bytes from which adding and removing continues."""
        return self._lanes.tobytes()

    @property
    def digest(self) -> bytes:
        """32 bytes, the SHA-256 of the state: what a receipt states."""
        return sha256(self.state)


def sha256(data: bytes) -> bytes:
    """The SHA-256 of some bytes."""
    hasher = Hash(SHA256())
    hasher.update(data)
    return hasher.finalize()


def _expanded(items: Iterable[Item]) -> Iterable[npt.NDArray[np.uint16]]:
    """The sums of the lanes of some items at a time."""
    rest = iter(items)
    while batch := list(itertools.islice(rest, _BATCH_ITEMS)):
        expanded = b"".join(
            blake3(canonical_bytes(item)).digest(length=STATE_BYTES) for item in batch
        )
        lanes = np.frombuffer(expanded, _LANE).reshape(-1, LANES)
        yield lanes.sum(axis=0, dtype=_LANE)
