"""Compiled kernels that put IDs into coded symbols and peel them, without the GIL.

Importing this module compiles it or loads it from numba's cache. Only proof.symbols
therefore imports it, on first use.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

from typing import TYPE_CHECKING

import numpy as np
from numba.core import types

from merkle.intrinsics import U64, jit
from proof.item import CHECK_MASK, MIX_FIRST, MIX_SECOND, MIX_STEP

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FIRST, _SECOND, _STEP, _CHECK = map(np.uint64, (MIX_FIRST, MIX_SECOND, MIX_STEP, CHECK_MASK))
_0, _27, _30, _31, _32 = map(np.uint64, (0, 27, 30, 31, 32))
_WORDS = types.Array(types.uint64, 2, "C")
_IN_WORDS = types.Array(types.uint64, 2, "C", readonly=True)
_COUNTS, _SIGNS = types.Array(types.int16, 1, "C"), types.Array(types.int8, 1, "C")


def add(
    ids: "NDArray[np.uint64]",
    salt: np.uint64,
    sign: int,
    sums: "NDArray[np.uint64]",
    counts: "NDArray[np.int16]",
) -> None:
    """Put IDs (shape (IDs, 2)) into symbols, in place; `sign` -1 takes them out."""
    if len(counts):
        words = np.ascontiguousarray(ids)
        _add(words, salt, sign, sums, counts)


def peel(
    salt: np.uint64,
    sums: "NDArray[np.uint64]",
    counts: "NDArray[np.int16]",
    found: "NDArray[np.uint64]",
    signs: "NDArray[np.int8]",
) -> int:
    """Empty symbols in place. Write IDs and signs (+1 ours, -1 theirs) to `found` and
    `signs`, which are as long as `counts`; the number of them, -1 if some symbol is not
    empty.
    """
    assert len(sums) == len(counts) == len(found) == len(signs)
    return int(_peel(salt, sums, counts, found, signs))


@jit(U64(U64))
def _mix(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> _30)) * _FIRST
    word = (word ^ (word >> _27)) * _SECOND
    return word ^ (word >> _31)


@jit(U64(U64, U64))
def _check(high: np.uint64, low: np.uint64) -> np.uint64:
    return _mix(high ^ _mix((low >> _32) + _STEP)) & _CHECK


@jit(types.boolean(U64, U64))
def _is_id(high: np.uint64, low: np.uint64) -> bool:
    return bool(_check(high, low) == low & _CHECK)


@jit(types.void(_WORDS))
def set_checks(ids: "NDArray[np.uint64]") -> None:
    """Set the check bits of IDs, which are zeros."""
    for i in range(len(ids)):
        ids[i, 1] |= _check(ids[i, 0], ids[i, 1])


@jit(types.float64(types.float64, U64))
def _next(place: float, state: np.uint64) -> float:
    """The symbol of an ID that follows the one at `place`. Places are below 2^53, so
    that a float holds them exactly; converting them would take longer than the rest.
    """
    share = 4294967296.0 / np.sqrt(float(state) + 1.0) - 1.0
    return float(place + np.ceil((place + 1.5) * share))


@jit(types.void(_IN_WORDS, U64, types.int64, _WORDS, _COUNTS))
def _add(
    ids: "NDArray[np.uint64]",
    salt: np.uint64,
    sign: int,
    sums: "NDArray[np.uint64]",
    counts: "NDArray[np.int16]",
) -> None:
    size = float(len(counts))
    for i in range(len(ids)):
        high, low = ids[i, 0], ids[i, 1]
        place, state = 0.0, _mix(high ^ low ^ salt)
        while place < size:
            at = np.uint64(place)
            sums[at, 0] ^= high
            sums[at, 1] ^= low
            counts[at] += sign
            state *= _STEP
            place = _next(place, state)


@jit(types.int64(U64, _WORDS, _COUNTS, _WORDS, _SIGNS))
def _peel(
    salt: np.uint64,
    sums: "NDArray[np.uint64]",
    counts: "NDArray[np.int16]",
    found: "NDArray[np.uint64]",
    signs: "NDArray[np.int8]",
) -> int:
    size, number, top = len(counts), 0, 0
    stack, waits = np.empty(size, np.int64), np.zeros(size, np.bool_)
    places = np.empty(size + 1, np.uint64)
    for i in range(size):
        if abs(counts[i]) == 1:
            stack[top], waits[i], top = i, True, top + 1
    while top > 0:
        top -= 1
        i = stack[top]
        waits[i] = False
        high, low, sign = sums[i, 0], sums[i, 1], counts[i]
        if abs(sign) != 1 or not _is_id(high, low) or number == size:
            continue
        # An ID can be alone only in a symbol that it goes into: this adds log2(i) bits
        # to the check.
        place, state, goes, is_there = 0.0, _mix(high ^ low ^ salt), 0, False
        while place < size and goes <= size:
            places[goes] = np.uint64(place)
            is_there |= places[goes] == np.uint64(i)
            goes += 1
            state *= _STEP
            place = _next(place, state)
        if not is_there:
            continue
        found[number, 0], found[number, 1], signs[number] = high, low, sign
        number += 1
        for n in range(goes):
            at = places[n]
            sums[at, 0] ^= high
            sums[at, 1] ^= low
            counts[at] -= sign
            if abs(counts[at]) == 1 and not waits[at]:
                stack[top], waits[at], top = np.int64(at), True, top + 1
    for i in range(size):
        if sums[i, 0] != _0 or sums[i, 1] != _0 or counts[i] != 0:
            return -1
    return number


def _self_test() -> None:
    """Put three IDs into symbols and peel them: a compiler bug would make equal buckets
    differ.

    Raises:
        ImportError: a kernel is wrong.
    """
    from proof.item import check_bits

    ids = np.array([[7 * i, i << 32] for i in (1, 2, 3)], np.uint64)
    set_checks(ids)
    sums, counts = np.zeros((32, 2), np.uint64), np.zeros(32, np.int16)
    add(ids, _0, 1, sums, counts)
    found, signs = np.zeros_like(sums), np.zeros(32, np.int8)
    if (
        int(ids[0, 1]) != 1 << 32 | check_bits(7, 1 << 32)
        or counts[0] != 3
        or peel(_0, sums, counts, found, signs) != 3
        or {*map(tuple, found[:3].tolist())} != {*map(tuple, ids.tolist())}
    ):
        raise ImportError("the compiled kernels of coded symbols are wrong")


_self_test()
