"""Coded symbols: a sketch of a set of IDs from which a difference of two sets decodes.

This is the rateless IBLT of Yang, Gilad and Alizadeh (SIGCOMM 2024). Symbol i holds the
xor and the count of a share 1 / (1 + i / 2) of all IDs. Subtracting the symbols of two
sets leaves those of their difference; where one ID is alone in a symbol, it is taken
out of all its symbols, until none is left. About 1.4 symbols an ID are enough, however
large the sets are, and the first symbols serve small differences.

Which symbols an ID goes into depends on the ID and on a salt. Counts are modulo 2^16.
The compiled kernels (proof.kernels, the extra `fast`) and the arrays here give the same
symbols.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias, cast

import numpy as np

from proof.item import (
    CHECK_MASK,
    HASHES_BYTES,
    ID_BYTES,
    KEY_HASH_BYTES,
    MIX_FIRST,
    MIX_SECOND,
    MIX_STEP,
    WORD_MASK,
    ItemId,
    check_bits,
    mix,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

# An ID's 16 bytes as two big-endian words; shape (IDs, 2).
Ids: TypeAlias = "NDArray[np.uint64]"

# Symbols that an index keeps up to date over all its items.
KEPT_SYMBOLS = 32_768
# On the wire: 16 bytes of xor and 2 of count.
SYMBOL_BYTES = 18
# Loading the kernels takes as long as the arrays take for this many IDs.
KERNEL_IDS_MIN = 200_000
# Fewer IDs are faster one by one.
_PLAIN_IDS_MAX = 8
# IDs that go through the arrays at once: bounds the memory.
_BLOCK_IDS = 1 << 16
_COUNT_MODULUS = 1 << 16
_KEY_SHIFT = np.uint64(64 - 8 * KEY_HASH_BYTES)


class SymbolKernels(Protocol):
    """The interface of the module proof.kernels, which documents it."""

    def add(
        self,
        ids: Ids,
        salt: "np.uint64",
        sign: int,
        sums: "NDArray[np.uint64]",
        counts: "NDArray[np.int16]",
    ) -> None:
        """Put IDs into symbols, in place; `sign` -1 takes them out again."""

    def set_checks(self, ids: Ids) -> None:
        """Set the check bits of IDs, in place."""

    def peel(
        self,
        salt: "np.uint64",
        sums: "NDArray[np.uint64]",
        counts: "NDArray[np.int16]",
        found: Ids,
        signs: "NDArray[np.int8]",
    ) -> int:
        """Empty symbols in place; the number of IDs written to `found`, -1 if some
        symbol is not empty.
        """


@dataclass(frozen=True, slots=True, eq=False)
class CodedSymbols:
    """The first symbols of a set, which change in place. `sums` has shape (symbols, 2),
    `counts` (symbols,).
    """

    sums: "NDArray[np.uint64]"
    counts: "NDArray[np.int16]"
    salt: int = 0

    def __post_init__(self) -> None:
        assert self.sums.shape == (len(self.counts), 2)
        assert 0 <= self.salt <= WORD_MASK

    def __len__(self) -> int:
        return len(self.counts)

    def __sub__(self, other: "CodedSymbols") -> "CodedSymbols":
        """The symbols of the difference of two sets: IDs of this one count +1."""
        assert self.salt == other.salt
        return CodedSymbols(self.sums ^ other.sums, self.counts - other.counts, self.salt)

    @classmethod
    def zeros(cls, size: int, salt: int = 0) -> Self:
        """The symbols of the empty set."""
        return cls(np.zeros((size, 2), np.uint64), np.zeros(size, np.int16), salt)

    @classmethod
    def from_bytes(cls, data: bytes, salt: int = 0) -> Self:
        """Read `to_bytes`; asserts that the length is a multiple of SYMBOL_BYTES."""
        size, rest = divmod(len(data), SYMBOL_BYTES)
        assert rest == 0
        sums = ids_from_bytes(data[: size * ID_BYTES])
        return cls(sums, np.frombuffer(data, ">i2", offset=size * ID_BYTES).astype(np.int16), salt)

    def to_bytes(self) -> bytes:
        """All sums, then all counts, SYMBOL_BYTES a symbol."""
        return ids_to_bytes(self.sums) + self.counts.astype(">i2").tobytes()

    def head(self, size: int) -> "CodedSymbols":
        """A copy of the first `size` symbols."""
        assert size <= len(self)
        return CodedSymbols(self.sums[:size].copy(), self.counts[:size].copy(), self.salt)

    def joined(self, later: "CodedSymbols") -> "CodedSymbols":
        """These symbols, and those that follow them."""
        assert self.salt == later.salt
        sums = np.concatenate((self.sums, later.sums))
        return CodedSymbols(sums, np.concatenate((self.counts, later.counts)), self.salt)

    def add(self, ids: Ids) -> None:
        """Put IDs in, none of which is in the set."""
        self._change(ids, 1)

    def remove(self, ids: Ids) -> None:
        """Take IDs out that are in the set."""
        self._change(ids, -1)

    def _change(self, ids: Ids, sign: int) -> None:
        kernels = kernels_for(len(ids))
        if kernels is not None:
            kernels.add(ids, np.uint64(self.salt), sign, self.sums, self.counts)
            return
        if len(ids) <= _PLAIN_IDS_MAX:
            _add_plain(ids, self, sign)
            return
        for start in range(0, len(ids), _BLOCK_IDS):
            _add_arrays(ids[start : start + _BLOCK_IDS], self, sign)


@dataclass(frozen=True, slots=True, eq=False)
class IdDifference:
    """The IDs that only one of two sets has."""

    ours: Ids
    theirs: Ids


def ids_from_bytes(data: bytes) -> Ids:
    """IDs of 16 bytes each, joined, as an array."""
    return np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, 2)


def ids_to_bytes(ids: Ids) -> bytes:
    """The reverse of `ids_from_bytes`."""
    return ids.astype(">u8").tobytes()


def each_id(ids: Ids) -> list[ItemId]:
    """The IDs of an array, one by one."""
    data = ids_to_bytes(ids)
    return [ItemId(data[at : at + ID_BYTES]) for at in range(0, len(data), ID_BYTES)]


def ids_from_hashes(hashes: bytes) -> Ids:
    """The IDs of many items from `ItemHasher.hashes` of each, joined."""
    words = np.frombuffer(hashes, ">u4").astype(np.uint64).reshape(-1, HASHES_BYTES // 4)
    ids = np.empty((len(words), 2), np.uint64)
    ids[:, 0] = words[:, 0] << np.uint64(32) | words[:, 1]
    ids[:, 1] = words[:, 2] << np.uint64(32)
    _set_checks(ids)
    return ids


def ids_from_parts(key_hashes: "NDArray[np.uint64]", item_hashes: "NDArray[np.uint64]") -> Ids:
    """The same from 48 bits of the hash of each key, and of each whole item."""
    ids = np.empty((len(key_hashes), 2), np.uint64)
    ids[:, 0] = key_hashes << _KEY_SHIFT | item_hashes >> np.uint64(32)
    ids[:, 1] = item_hashes << np.uint64(32)
    _set_checks(ids)
    return ids


def key_hashes(ids: Ids) -> "NDArray[np.uint64]":
    """The 48 bits of each ID that depend on key and version only."""
    return ids[:, 0] >> _KEY_SHIFT


def key_hashes_from_bytes(data: bytes) -> "NDArray[np.uint64]":
    """Key hashes of KEY_HASH_BYTES each, big-endian, joined, as an array."""
    hashes = np.zeros((len(data) // KEY_HASH_BYTES, 8), np.uint8)
    hashes[:, -KEY_HASH_BYTES:] = np.frombuffer(data, np.uint8).reshape(-1, KEY_HASH_BYTES)
    return hashes.view(">u8")[:, 0].astype(np.uint64)


def short_ids(ids: Ids) -> "NDArray[np.uint64]":
    """8 bytes of each ID, for lists."""
    return ids[:, 0] ^ ids[:, 1]


def peel(difference: CodedSymbols) -> IdDifference | None:
    """The IDs whose symbols these are; None if the symbols do not decode.

    Wrong symbols decode to None, or to IDs that the roots do not certify.
    """
    size = len(difference)
    sums, counts = difference.sums.copy(), difference.counts.copy()
    found, signs = np.empty((size, 2), np.uint64), np.empty(size, np.int8)
    kernels = kernels_for(size)
    if kernels is not None:
        number = kernels.peel(np.uint64(difference.salt), sums, counts, found, signs)
    else:
        number = _peel_plain(difference.salt, sums, counts, found, signs)
    if number < 0:
        return None
    found, signs = found[:number], signs[:number]
    return IdDifference(ours=found[signs > 0], theirs=found[signs < 0])


def estimated_difference(difference: CodedSymbols, surplus: int) -> float:
    """How many IDs are in one of two sets only, from the counts of their symbols alone;
    `surplus` is by how many ours is the larger.

    The count of symbol i has mean surplus * p and variance d * p * (1 - p). From 32
    symbols, the standard deviation of the estimate is a quarter of it.
    """
    assert len(difference) > 1
    # The exact share: an ID goes from symbol i beyond i + s with probability
    # ((i + 1.5) / (i + s + 1.5))^2. To say 1 / (1 + i / 2) would be 4 % off at first,
    # which is much where the surplus is large.
    at = np.arange(1, len(difference))
    share = 1 - ((at + 0.5) / (at + 1.5)) ** 2
    mean = surplus * share
    # Counts are known modulo 2^16: take the number nearest to the mean.
    apart = difference.counts[1:] - mean
    apart -= np.round(apart / _COUNT_MODULUS) * _COUNT_MODULUS
    estimate = float(np.mean(apart**2 / (share * (1 - share))))
    return max(estimate, abs(surplus), 1.0)


def kernels_for(ids: int) -> SymbolKernels | None:
    """The kernels for work on this many IDs. None if they are not available, or if the
    process has not done enough work to load them.
    """
    if not _load.cache_info().currsize:
        _work.seen_ids += ids
        if _work.seen_ids < KERNEL_IDS_MIN:
            return None
    return _load()


class _WorkCounter:
    """IDs processed without kernels. Threads may lose counts of each other, which does
    no harm.
    """

    seen_ids = 0


_work = _WorkCounter()


@cache
def _load() -> SymbolKernels | None:
    try:
        from proof import kernels as loaded
    except ImportError:
        return None
    return cast(SymbolKernels, loaded)


def _mix_arrays(words: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    words = (words ^ (words >> np.uint64(30))) * np.uint64(MIX_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(MIX_SECOND)
    return words ^ (words >> np.uint64(31))


def _set_checks(ids: Ids) -> None:
    """Set the check bits of IDs, which are zeros."""
    kernels = kernels_for(0)
    if kernels is not None:
        kernels.set_checks(ids)
        return
    inner = _mix_arrays((ids[:, 1] >> np.uint64(32)) + np.uint64(MIX_STEP))
    ids[:, 1] |= _mix_arrays(ids[:, 0] ^ inner) & np.uint64(CHECK_MASK)


def _add_plain(ids: Ids, symbols: CodedSymbols, sign: int) -> None:
    for item_id in ids:
        high, low = item_id.tolist()
        places = _places(high, low, symbols.salt, len(symbols))
        symbols.sums[places] ^= item_id
        symbols.counts[places] += np.int16(sign)


def _add_arrays(ids: Ids, symbols: CodedSymbols, sign: int) -> None:
    """Move all IDs from symbol to symbol together until each is past the last."""
    size, step = np.uint64(len(symbols)), np.uint64(MIX_STEP)
    states = _mix_arrays(ids[:, 0] ^ ids[:, 1] ^ np.uint64(symbols.salt))
    places = np.zeros(len(ids), np.uint64)
    ids = np.ascontiguousarray(ids)
    while len(places) and size:
        at = places.astype(np.intp)
        for lane in (0, 1):
            np.bitwise_xor.at(symbols.sums[:, lane], at, ids[:, lane])
        np.add.at(symbols.counts, at, np.int16(sign))
        states = states * step
        strides = 4294967296.0 / np.sqrt(states.astype(np.float64) + 1.0) - 1.0
        places = places + np.ceil((places.astype(np.float64) + 1.5) * strides).astype(np.uint64)
        inside = places < size
        places, states, ids = places[inside], states[inside], ids[inside]


def _places(high: int, low: int, salt: int, size: int) -> list[int]:
    """The symbols before `size` that an ID goes into, ascending."""
    place, state, found = 0, mix(high ^ low ^ salt), []
    while place < size:
        found.append(place)
        state = state * MIX_STEP & WORD_MASK
        place += math.ceil((place + 1.5) * (4294967296.0 / math.sqrt(float(state) + 1.0) - 1.0))
    return found


def _peel_plain(
    salt: int,
    sums: "NDArray[np.uint64]",
    counts: "NDArray[np.int16]",
    found: Ids,
    signs: "NDArray[np.int8]",
) -> int:
    highs, lows, left = sums[:, 0].tolist(), sums[:, 1].tolist(), counts.tolist()
    size, number = len(left), 0
    stack = [i for i in range(size) if left[i] in (1, -1)]
    while stack:
        i = stack.pop()
        high, low, sign = highs[i], lows[i], left[i]
        if sign not in (1, -1) or check_bits(high, low) != low & CHECK_MASK or number == size:
            continue
        places = _places(high, low, salt, size)
        # An ID can be alone only in a symbol that it goes into: this adds log2(i) bits
        # to the check.
        if i not in places:
            continue
        found[number], signs[number] = (high, low), sign
        number += 1
        for place in places:
            highs[place] ^= high
            lows[place] ^= low
            left[place] = (left[place] - sign + 0x8000) % _COUNT_MODULUS - 0x8000
            if left[place] in (1, -1):
                stack.append(place)
    return number if not (any(highs) or any(lows) or any(left)) else -1
