"""Compiled kernels that hash names and items as `proof.item.ItemHasher` does, many at
once: BLAKE2b (RFC 7693) with a key, without the GIL.

A message begins with the block of the key; its fields follow, each after its length.
Most messages end in one block more. So many of these as a vector of the processor has
words are hashed together, a message in each lane.
Importing this module compiles it or loads it from numba's cache.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from merkle.intrinsics import LANES, U64, copy_bytes, jit, swap
from proof.item import SECRET_BYTES, Item, ItemHasher, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_BYTES = 128
_HASH_BYTES = 6
_LENGTH_BYTES = 4
_SIZE_BYTES = 8
# Of an item besides its texts: six lengths, two bytes that say yes or no, and a size.
_ITEM_BYTES = 6 * _LENGTH_BYTES + 2 + _SIZE_BYTES
_ROUNDS = 12
_IV = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    np.uint64,
)
_SIGMA = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    ],
    np.uint8,
)
_24, _63 = map(np.uint64, (24, 63))
_16, _32, _40 = map(np.uint64, (16, 32, 40))
_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_OUT_BYTES = types.Array(types.uint8, 1, "C")
_ENDS = types.Array(types.int64, 1, "C", readonly=True)
_NUMBERS = types.Array(types.uint64, 1, "C", readonly=True)
_WORDS, _FLAGS = types.Array(types.uint64, 1, "C"), types.Array(types.boolean, 1, "C", True)
_FOUR = types.UniTuple(U64, 4)
# Messages that are hashed together. LANES has 128 bits each, a message takes 64.
_TOGETHER = 2 * LANES
_BLOCK_WORDS = _BLOCK_BYTES // 8
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I64, _TOGETHER)
# The places of the state that a round mixes: columns, then diagonals.
_MIXED_PLACES = tuple(
    (n, 4 + (n + by) % 4, 8 + (n + 2 * by) % 4, 12 + (n + 3 * by) % 4)
    for by in (0, 1)
    for n in range(4)
)
_intrinsic: Callable[[Callable[..., object]], Callable[..., np.uint64]] = intrinsic


def keyed_start(secret: bytes, person: bytes) -> "NDArray[np.uint64]":
    """The state of a hash of 6 bytes with this key and person, after the block of the
    key.
    """
    parameters = np.zeros(64, np.uint8)
    parameters[:4] = _HASH_BYTES, len(secret), 1, 1
    parameters[48 : 48 + len(person)] = np.frombuffer(person, np.uint8)
    state = _IV ^ parameters.view(np.uint64)
    block = np.zeros(_BLOCK_BYTES, np.uint8)
    block[: len(secret)] = np.frombuffer(secret, np.uint8)
    _compress(state, block.view(np.uint64), 0, _BLOCK_BYTES, False)
    return state


@jit(_FOUR(U64, U64, U64, U64, U64, U64))
def _mixed(
    a: np.uint64, b: np.uint64, c: np.uint64, d: np.uint64, x: np.uint64, y: np.uint64
) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    a = a + b + x
    d ^= a
    d = d >> _32 | d << _32
    c = c + d
    b ^= c
    b = b >> _24 | b << _40
    a = a + b + y
    d ^= a
    d = d >> _16 | d << np.uint64(48)
    c = c + d
    b ^= c
    b = b >> _63 | b << np.uint64(1)
    return a, b, c, d


@jit(types.void(_WORDS, _WORDS, types.int64, types.int64, types.boolean))
def _compress(
    state: "NDArray[np.uint64]",
    words: "NDArray[np.uint64]",
    first: int,
    counted: int,
    is_last: bool,
) -> None:
    """Take in the block of `words` from `first` on; `counted` bytes are in so far."""
    v0, v1, v2, v3 = state[0], state[1], state[2], state[3]
    v4, v5, v6, v7 = state[4], state[5], state[6], state[7]
    v8, v9, v10, v11 = _IV[0], _IV[1], _IV[2], _IV[3]
    v12, v13, v14, v15 = _IV[4] ^ np.uint64(counted), _IV[5], _IV[6], _IV[7]
    if is_last:
        v14 = ~v14
    m = words[first : first + 16]
    for number in range(_ROUNDS):
        s = _SIGMA[number % 10]
        v0, v4, v8, v12 = _mixed(v0, v4, v8, v12, m[s[0]], m[s[1]])
        v1, v5, v9, v13 = _mixed(v1, v5, v9, v13, m[s[2]], m[s[3]])
        v2, v6, v10, v14 = _mixed(v2, v6, v10, v14, m[s[4]], m[s[5]])
        v3, v7, v11, v15 = _mixed(v3, v7, v11, v15, m[s[6]], m[s[7]])
        v0, v5, v10, v15 = _mixed(v0, v5, v10, v15, m[s[8]], m[s[9]])
        v1, v6, v11, v12 = _mixed(v1, v6, v11, v12, m[s[10]], m[s[11]])
        v2, v7, v8, v13 = _mixed(v2, v7, v8, v13, m[s[12]], m[s[13]])
        v3, v4, v9, v14 = _mixed(v3, v4, v9, v14, m[s[14]], m[s[15]])
    state[0] ^= v0 ^ v8
    state[1] ^= v1 ^ v9
    state[2] ^= v2 ^ v10
    state[3] ^= v3 ^ v11
    state[4] ^= v4 ^ v12
    state[5] ^= v5 ^ v13
    state[6] ^= v6 ^ v14
    state[7] ^= v7 ^ v15


@_intrinsic
def _last_blocks(
    typing_context: object, start: object, blocks: object, lengths: object, out: object
) -> object:
    """Take in one last block after the block of the key, for _TOGETHER messages. By
    addresses: the state of all of them, their blocks, their lengths, and where the
    first words of their states go.
    """

    def generate(
        context: object, builder: ir.IRBuilder, signature: object, values: Sequence[ir.Value]
    ) -> ir.Value:
        start, blocks, lengths, out = values

        def word(address: ir.Value, at: int) -> ir.Value:
            place = builder.add(address, _I64(8 * at))
            found = builder.load(builder.inttoptr(place, _I64.as_pointer()))
            found.align = 8
            return found

        def vector(words: Sequence[ir.Value]) -> ir.Value:
            made: ir.Value = ir.Constant(_VECTOR, ir.Undefined)
            for lane, one in enumerate(words):
                made = builder.insert_element(made, one, _I32(lane))
            return made

        def every(number: int) -> ir.Value:
            return ir.Constant(_VECTOR, _TOGETHER * [number])

        def turned(a: ir.Value, b: ir.Value, bits: int) -> ir.Value:
            both = builder.xor(a, b)
            return builder.or_(builder.lshr(both, every(bits)), builder.shl(both, every(64 - bits)))

        m = [
            vector([word(blocks, _BLOCK_WORDS * lane + at) for lane in range(_TOGETHER)])
            for at in range(_BLOCK_WORDS)
        ]
        v = [vector(_TOGETHER * [word(start, at)]) for at in range(8)]
        first = v[0]
        v += [every(int(one)) for one in _IV]
        counted = vector([word(lengths, lane) for lane in range(_TOGETHER)])
        v[12] = builder.xor(v[12], builder.add(counted, every(_BLOCK_BYTES)))
        v[14] = builder.not_(v[14])
        for number in range(_ROUNDS):
            sigma = iter(_SIGMA[number % 10].tolist())
            for a, b, c, d in _MIXED_PLACES:
                for by_d, by_b in ((32, 24), (16, 63)):
                    v[a] = builder.add(builder.add(v[a], v[b]), m[next(sigma)])
                    v[d] = turned(v[d], v[a], by_d)
                    v[c] = builder.add(v[c], v[d])
                    v[b] = turned(v[b], v[c], by_b)
        found = builder.xor(first, builder.xor(v[0], v[8]))
        builder.store(found, builder.inttoptr(out, _VECTOR.as_pointer())).align = 8
        return out

    return U64(U64, U64, U64, U64), generate


@jit(U64(U64))
def _first_bytes(state: np.uint64) -> np.uint64:
    return swap(state) >> np.uint64(64 - 8 * _HASH_BYTES)


@jit(U64(_WORDS, _WORDS, _OUT_BYTES, types.int64, _WORDS))
def _hash(
    start: "NDArray[np.uint64]",
    state: "NDArray[np.uint64]",
    message: "NDArray[np.uint8]",
    length: int,
    words: "NDArray[np.uint64]",
) -> np.uint64:
    """The 48 bits of a message in the memory of `words`, which is longer by a block."""
    state[:] = start
    end = (length + _BLOCK_BYTES - 1) // _BLOCK_BYTES * _BLOCK_BYTES
    message[length:end] = 0
    for at in range(0, end, _BLOCK_BYTES):
        counted = _BLOCK_BYTES + min(at + _BLOCK_BYTES, length)
        _compress(state, words, at // 8, counted, at + _BLOCK_BYTES == end)
    return _first_bytes(state[0])


@jit(_WORDS(types.int64))
def _words_for(longest: int) -> "NDArray[np.uint64]":
    """Memory for the blocks that are hashed together, and for a longer message."""
    return np.zeros(_TOGETHER * _BLOCK_WORDS + longest // 8 + 32, np.uint64)


@jit(types.int64(types.int64, types.int64))
def _message_start(n: int, length: int) -> int:
    """Where message `n` begins in this memory."""
    return _BLOCK_BYTES * (n % _TOGETHER if length <= _BLOCK_BYTES else _TOGETHER)


@jit(types.void(_WORDS, _WORDS, _WORDS, types.int64, types.int64, _WORDS))
def _end_message(
    start: "NDArray[np.uint64]",
    words: "NDArray[np.uint64]",
    lengths: "NDArray[np.uint64]",
    n: int,
    length: int,
    out: "NDArray[np.uint64]",
) -> None:
    """Hash message `n` of all that go to `out`, alone if it is long, or with those
    before it that wait.
    """
    lane, message = n % _TOGETHER, words.view(np.uint8)
    lengths[lane] = length
    if length <= _BLOCK_BYTES:
        message[lane * _BLOCK_BYTES + length : (lane + 1) * _BLOCK_BYTES] = 0
    else:
        first = _TOGETHER * _BLOCK_WORDS
        state, long = np.empty(8, np.uint64), words[first:]
        out[n] = _hash(start, state, message[8 * first :], length, long)
    if lane < _TOGETHER - 1 and n < len(out) - 1:
        return
    states = np.empty(_TOGETHER, np.uint64)
    _last_blocks(
        U64(start.ctypes.data),
        U64(words.ctypes.data),
        U64(lengths.ctypes.data),
        U64(states.ctypes.data),
    )
    for at in range(lane + 1):
        # Long ones have their hashes.
        if lengths[at] <= np.uint64(_BLOCK_BYTES):
            out[n - lane + at] = _first_bytes(states[at])


@jit(types.int64(_OUT_BYTES, types.int64, types.uint64, types.int64))
def _put_number(out: "NDArray[np.uint8]", at: int, value: np.uint64, size: int) -> int:
    for n in range(size):
        out[at + n] = (value >> np.uint64(8 * (size - 1 - n))) & np.uint64(255)
    return at + size


@jit(types.int64(_OUT_BYTES, types.int64, _BYTES, types.int64, types.int64))
def _put_bytes(
    out: "NDArray[np.uint8]", at: int, data: "NDArray[np.uint8]", start: int, end: int
) -> int:
    to, source = U64(out.ctypes.data) + U64(at), U64(data.ctypes.data) + U64(start)
    copy_bytes(to, source, U64(end - start))
    return at + end - start


@jit(types.int64(_OUT_BYTES, types.int64, _BYTES, types.int64, types.int64))
def _put_field(
    out: "NDArray[np.uint8]", at: int, data: "NDArray[np.uint8]", start: int, end: int
) -> int:
    at = _put_number(out, at, np.uint64(end - start), _LENGTH_BYTES)
    return _put_bytes(out, at, data, start, end)


@jit(types.int64(_ENDS, types.int64))
def _start(ends: "NDArray[np.int64]", at: int) -> int:
    return ends[at - 1] if at else 0


@jit(types.int64(_ENDS))
def _longest(ends: "NDArray[np.int64]") -> int:
    longest = 0
    for n in range(len(ends)):
        longest = max(longest, ends[n] - _start(ends, n))
    return longest


@jit(types.void(_WORDS, _BYTES, _ENDS, _BYTES, _ENDS, _WORDS))
def hash_names(
    start: "NDArray[np.uint64]",
    keys: "NDArray[np.uint8]",
    key_ends: "NDArray[np.int64]",
    versions: "NDArray[np.uint8]",
    version_ends: "NDArray[np.int64]",
    out: "NDArray[np.uint64]",
) -> None:
    """The 48 bits of each key and version, which are columns (`proof.columns`)."""
    assert len(key_ends) == len(version_ends) == len(out)
    words = _words_for(2 * _LENGTH_BYTES + _longest(key_ends) + _longest(version_ends))
    message, lengths = words.view(np.uint8), np.zeros(_TOGETHER, np.uint64)
    for n in range(len(out)):
        key_start, version_start = _start(key_ends, n), _start(version_ends, n)
        length = 2 * _LENGTH_BYTES + key_ends[n] - key_start + version_ends[n] - version_start
        at = _message_start(n, length)
        at = _put_field(message, at, keys, key_start, key_ends[n])
        _put_field(message, at, versions, version_start, version_ends[n])
        _end_message(start, words, lengths, n, length, out)


@jit(
    types.void(
        _WORDS,
        _BYTES,
        _ENDS,
        _BYTES,
        _ENDS,
        _FLAGS,
        _NUMBERS,
        _FLAGS,
        _BYTES,
        _ENDS,
        _BYTES,
        _ENDS,
        _WORDS,
    )
)
def hash_items(
    start: "NDArray[np.uint64]",
    keys: "NDArray[np.uint8]",
    key_ends: "NDArray[np.int64]",
    versions: "NDArray[np.uint8]",
    version_ends: "NDArray[np.int64]",
    is_marker: "NDArray[np.bool_]",
    sizes: "NDArray[np.uint64]",
    has_content: "NDArray[np.bool_]",
    contents: "NDArray[np.uint8]",
    content_ends: "NDArray[np.int64]",
    properties: "NDArray[np.uint8]",
    properties_ends: "NDArray[np.int64]",
    out: "NDArray[np.uint64]",
) -> None:
    """The 48 bits of each item's canonical bytes."""
    assert len(key_ends) == len(version_ends) == len(is_marker) == len(sizes) == len(out)
    assert len(out) == len(has_content) == len(content_ends) == len(properties_ends)
    most = _longest(key_ends) + _longest(version_ends)
    most += _longest(content_ends) + _longest(properties_ends) + _ITEM_BYTES
    words, lengths = _words_for(most), np.zeros(_TOGETHER, np.uint64)
    message = words.view(np.uint8)
    for n in range(len(out)):
        length = _ITEM_BYTES + key_ends[n] - _start(key_ends, n)
        length += version_ends[n] - _start(version_ends, n)
        length += content_ends[n] - _start(content_ends, n)
        length += properties_ends[n] - _start(properties_ends, n)
        at = _message_start(n, length)
        at = _put_field(message, at, keys, _start(key_ends, n), key_ends[n])
        at = _put_field(message, at, versions, _start(version_ends, n), version_ends[n])
        at = _put_number(message, at, np.uint64(1), _LENGTH_BYTES)
        at = _put_number(message, at, np.uint64(is_marker[n]), 1)
        at = _put_number(message, at, np.uint64(_SIZE_BYTES), _LENGTH_BYTES)
        at = _put_number(message, at, sizes[n], _SIZE_BYTES)
        # The content is one field behind a byte that tells whether it is known.
        first, end = _start(content_ends, n), content_ends[n]
        at = _put_number(message, at, np.uint64(1 + end - first), _LENGTH_BYTES)
        at = _put_number(message, at, np.uint64(has_content[n]), 1)
        at = _put_bytes(message, at, contents, first, end)
        _put_field(message, at, properties, _start(properties_ends, n), properties_ends[n])
        _end_message(start, words, lengths, n, length, out)


def _self_test() -> None:
    """Hash a name and an item that are longer than a block: a compiler bug would make
    equal buckets differ.

    Raises:
        ImportError: a kernel is wrong.
    """
    if sys.byteorder != "little":
        raise ImportError("the kernels read words as this machine does not store them")
    secret = bytes(range(SECRET_BYTES))
    item = Item("é" * 90, 1 << 40, b"c" * 16, b"p" * 16, "v")

    def column(text: bytes) -> "tuple[NDArray[np.uint8], NDArray[np.int64]]":
        return np.frombuffer(text, np.uint8), np.array([len(text)])

    names = (*column(item.key.encode()), *column(b"v"))
    yes, no, size = np.array([True]), np.array([False]), np.array([1 << 40], np.uint64)
    key, whole = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    hash_names(keyed_start(secret, b"key"), *names, key)
    rest = (*column(b"c" * 16), *column(b"p" * 16))
    hash_items(keyed_start(secret, b"item"), *names, no, size, yes, *rest, whole)
    expected = ItemHasher(Profile(secret)).hashes(item)
    if int(key[0]).to_bytes(6, "big") + int(whole[0]).to_bytes(6, "big") != expected:
        raise ImportError("the compiled kernels of IDs are wrong")


_self_test()
