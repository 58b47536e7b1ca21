"""Compiled kernels that look up rows in the pages of a SQLite file, thousands at once.

SQLite copies each page into its cache, and makes a row a Python object: half of what a
look-up costs. These read the same B-trees (sqlite.org/fileformat2.html, section 1.6)
by themselves, with `pread`, and write what they find into columns. The caller answers
for it that no page changes meanwhile.

Nothing here decides alone. A page can be damaged: every offset is checked, and whatever
is unusual (overflow pages, twins of a hash, another type) is left to SQLite, which
names the damage. Importing this module compiles it or loads it from numba's cache.
"""

# Only part of numba is typed.
# mypy: allow-untyped-calls

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np
from numba.core import types

from merkle.intrinsics import U64, copy_bytes, jit, load64, swap

if TYPE_CHECKING:
    from numpy.typing import NDArray

if sys.byteorder != "little":
    raise ImportError("the kernels read words as this machine does not store them")

# Of a B-tree: 20 levels of pages hold more than a file can.
_LEVELS = 20
_INTERIOR, _LEAF = 2, 10
_INTERIOR_HEAD_BYTES, _LEAF_HEAD_BYTES = 12, 8
_CHILD_BYTES = 4
# A head with two varints and a record's head end after no more, so that they are read
# before they are checked; the memory is longer than the pages by this.
_SLACK_BYTES = 512
_VARINT_BYTES_MAX = 9
# Serial types of blobs are even and begin here.
_BLOB = 12
# Those of integers: bytes by type, and the two that are the values 0 and 1.
_INTEGER_BYTES = np.array([0, 1, 2, 3, 4, 6, 8, 0, 0, 0], np.int64)
_ZERO, _ONE = 8, 9
_HASH_BYTES = 6
# What a comparison or a look-up says of a cell that is left to SQLite.
_UNUSUAL = -2
_BYTES = types.Array(types.uint8, 1, "C")
_IN_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
_PLACES = types.Array(types.int64, 1, "C")
_IN_PLACES = types.Array(types.int64, 1, "C", readonly=True)
_HASHES = types.Array(types.uint64, 1, "C", readonly=True)
_FLAGS = types.Array(types.boolean, 1, "C")
_I64 = types.int64
_THREE = types.UniTuple(_I64, 3)
# The C library's function, found by its name when the kernel is loaded.
_pread = cast(
    Callable[[int, np.uint64, np.uint64, int], int],
    types.ExternalFunction(
        "pread", types.int64(types.int32, types.uintp, types.uintp, types.int64)
    ),
)


@jit(_I64(_BYTES, _I64))
def _byte(memory: "NDArray[np.uint8]", at: int) -> int:
    byte: int = memory[at]
    return byte


@jit(_I64(_BYTES, _I64))
def _two(memory: "NDArray[np.uint8]", at: int) -> int:
    return _byte(memory, at) << 8 | _byte(memory, at + 1)


@jit(_I64(_BYTES, _I64))
def _four(memory: "NDArray[np.uint8]", at: int) -> int:
    return _two(memory, at) << 16 | _two(memory, at + 2)


@jit(types.UniTuple(_I64, 2)(_BYTES, _I64))
def _varint(memory: "NDArray[np.uint8]", at: int) -> tuple[int, int]:
    """A number of up to eight bytes, and where it ends; longer ones are negative."""
    value = 0
    for n in range(_VARINT_BYTES_MAX - 1):
        byte = _byte(memory, at + n)
        value = value << 7 | byte & 127
        if byte < 128:
            return value, at + n + 1
    return -1, at


@jit(_I64(_BYTES, _I64, _I64))
def _integer(memory: "NDArray[np.uint8]", at: int, kind: int) -> int:
    """A value that is no less than 0, by its serial type (at most 9); else negative."""
    if kind >= _ZERO:
        return kind - _ZERO
    size = _INTEGER_BYTES[kind]
    if size == 0 or memory[at] > 127:
        return _UNUSUAL
    address = U64(memory.ctypes.data) + U64(at)
    return int(swap(load64(address)) >> U64(64 - 8 * size))


@jit(types.boolean(types.int32, _I64, _I64, _I64, _BYTES, _PLACES, _I64))
def _loaded(
    file: int,
    page_bytes: int,
    pages: int,
    page: int,
    memory: "NDArray[np.uint8]",
    held: "NDArray[np.int64]",
    level: int,
) -> bool:
    """Have a page in the memory of a level, where the one before may stand."""
    # Of no page, what was read last may be damaged.
    if not 1 < page <= pages:
        return False
    if held[level] == page:
        return True
    held[level] = 0
    address = memory.ctypes.data + np.uint64(level * page_bytes)
    read = _pread(file, address, np.uint64(page_bytes), (page - 1) * page_bytes)
    if read != page_bytes:
        return False
    base = level * page_bytes
    head = _LEAF_HEAD_BYTES if memory[base] == _LEAF else _INTERIOR_HEAD_BYTES
    if memory[base] not in (_INTERIOR, _LEAF):
        return False
    if head + 2 * _two(memory, base + 3) > page_bytes:
        return False
    held[level] = page
    return True


@jit(_I64(_BYTES, _I64, _I64, _I64))
def _cell(memory: "NDArray[np.uint8]", base: int, page_bytes: int, cell: int) -> int:
    """Where the length of a cell's record stands in a page at `base`; negative where
    the cell is damaged.
    """
    is_leaf = memory[base] == _LEAF
    head = _LEAF_HEAD_BYTES if is_leaf else _INTERIOR_HEAD_BYTES
    offset = _two(memory, base + head + 2 * cell)
    if offset < head or offset >= page_bytes:
        return _UNUSUAL
    return base + offset + (0 if is_leaf else _CHILD_BYTES)


@jit(_THREE(_BYTES, _I64, _I64, _I64))
def _record(
    memory: "NDArray[np.uint8]", base: int, page_bytes: int, cell: int
) -> tuple[int, int, int]:
    """Where the record of a cell begins, where its values begin, and where it ends. The
    first is negative where that is unusual.
    """
    at = _cell(memory, base, page_bytes, cell)
    if at < 0:
        return _UNUSUAL, 0, 0
    length, at = _varint(memory, at)
    # A longer one may go on in overflow pages, whose bytes are none of this page.
    if length < 2 or length > (page_bytes >> 2) - 32 or at + length > base + page_bytes:
        return _UNUSUAL, 0, 0
    head = _byte(memory, at)
    if head > 127 or head > length:
        return _UNUSUAL, 0, 0
    return at, at + head, at + length


@jit(_I64(_BYTES, _I64, _I64, _I64))
def _cell_hash(memory: "NDArray[np.uint8]", base: int, page_bytes: int, cell: int) -> int:
    """The hash that an entry by hash begins with; negative where that is unusual. Of a
    damaged cell it may be anything.
    """
    at = _cell(memory, base, page_bytes, cell)
    if at < 0:
        return _UNUSUAL
    if memory[at] > 127:
        at += 1
    kind = _byte(memory, at + 2)
    if memory[at] > 127 or memory[at + 1] > 127 or kind > _ONE:
        return _UNUSUAL
    return _integer(memory, at + 1 + _byte(memory, at + 1), kind)


@jit(_THREE(_BYTES, _I64, _I64, _I64))
def _name(memory: "NDArray[np.uint8]", at: int, kinds: int, end: int) -> tuple[int, int, int]:
    """Of a key and a version that stand at `at` and before `end`, by the serial types
    at `kinds`: where the key ends, where the version ends, and where the types that
    follow begin. The first is negative where that is unusual.
    """
    key_kind, kinds = _varint(memory, kinds)
    version_kind, kinds = _varint(memory, kinds)
    if key_kind < _BLOB or version_kind < _BLOB or key_kind & 1 or version_kind & 1:
        return _UNUSUAL, 0, 0
    key_end = at + (key_kind - _BLOB >> 1)
    version_end = key_end + (version_kind - _BLOB >> 1)
    if version_end > end:
        return _UNUSUAL, 0, 0
    return key_end, version_end, kinds


@jit(_I64(U64, _I64, U64, _I64))
def _compared(one: np.uint64, one_bytes: int, other: np.uint64, other_bytes: int) -> int:
    """-1, 0 or 1 as the bytes at one address come before those at the other. Eight
    bytes after each can be read.
    """
    least = min(one_bytes, other_bytes)
    for at in range(0, least, 8):
        a, b = swap(load64(one + np.uint64(at))), swap(load64(other + np.uint64(at)))
        if least - at < 8:
            unused = np.uint64(8 * (8 - least + at))
            a, b = a >> unused, b >> unused
        if a != b:
            return -1 if a < b else 1
    return -1 if one_bytes < other_bytes else 1 if one_bytes > other_bytes else 0


@jit(_I64(_BYTES, _I64, _I64, _I64, U64, _I64, U64, _I64))
def _cell_compared(
    memory: "NDArray[np.uint8]",
    base: int,
    page_bytes: int,
    cell: int,
    key: np.uint64,
    key_bytes: int,
    version: np.uint64,
    version_bytes: int,
) -> int:
    """-1, 0 or 1 as a row of the table comes before a key and version, or _UNUSUAL."""
    at, body, end = _record(memory, base, page_bytes, cell)
    if at < 0:
        return _UNUSUAL
    key_end, version_end, _ = _name(memory, body, at + 1, end)
    if key_end < 0:
        return _UNUSUAL
    start = memory.ctypes.data
    order = _compared(start + np.uint64(body), key_end - body, key, key_bytes)
    if order != 0:
        return order
    return _compared(start + np.uint64(key_end), version_end - key_end, version, version_bytes)


@jit(_I64(_BYTES, _I64, _I64, _I64))
def _child(memory: "NDArray[np.uint8]", base: int, page_bytes: int, cell: int) -> int:
    """The page of what comes before a cell of an interior page, and behind the last."""
    if cell == _two(memory, base + 3):
        return _four(memory, base + 8)
    offset = _two(memory, base + _INTERIOR_HEAD_BYTES + 2 * cell)
    return 0 if offset + _CHILD_BYTES > page_bytes else _four(memory, base + offset)


@jit(_BYTES(_BYTES, _I64, _I64))
def _with_room(data: "NDArray[np.uint8]", used: int, more: int) -> "NDArray[np.uint8]":
    if used + more <= len(data):
        return data
    longer = np.empty(2 * (used + more), np.uint8)
    longer[:used] = data[:used]
    return longer


@jit(types.Tuple((_I64, _I64))(types.int32, _I64, _I64, _I64, U64, _BYTES, _PLACES, _PLACES))
def _entry_of(
    file: int,
    page_bytes: int,
    pages: int,
    root: int,
    wanted: np.uint64,
    memory: "NDArray[np.uint8]",
    held: "NDArray[np.int64]",
    bounds: "NDArray[np.int64]",
) -> tuple[int, int]:
    """The level and the cell of the only entry of a hash; negative where there is none,
    or something unusual. The pages on the way to the hash before, which is less, hold
    this one too where it is below their `bounds`.
    """
    page, value, first = root, int(wanted), 0
    while first + 1 < _LEVELS and value < bounds[first + 1]:
        first += 1
        page = held[first]
    for level in range(first, _LEVELS):
        if not _loaded(file, page_bytes, pages, page, memory, held, level):
            return -1, -1
        base = level * page_bytes
        cells = _two(memory, base + 3)
        low, high, found = 0, cells, -1
        while low < high:
            middle = (low + high) >> 1
            there = _cell_hash(memory, base, page_bytes, middle)
            if there < 0:
                return -1, -1
            if there < value:
                low = middle + 1
            else:
                high, found = middle, there
        if memory[base] == _LEAF:
            is_one = low < cells and found == value
            if is_one and low + 1 < cells:
                is_one = _cell_hash(memory, base, page_bytes, low + 1) != value
            return (level, low) if is_one else (-1, -1)
        # An entry in an interior page may have twins on both sides.
        if low < cells and found == value:
            return -1, -1
        if level + 1 < _LEVELS:
            bounds[level + 1] = found if low < cells else bounds[level]
        page = _child(memory, base, page_bytes, low)
    return -1, -1


@jit(types.Tuple((_BYTES, _PLACES, _PLACES, _FLAGS))(types.int32, _I64, _I64, _I64, _HASHES))
def find_names(
    file: int, page_bytes: int, pages: int, root: int, hashes: "NDArray[np.uint64]"
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]", "NDArray[np.int64]", "NDArray[np.bool_]"]:
    """The key and the version of each hash (ascending) in the index by hash whose root
    is this page: both joined, where keys end, where versions end, and which hashes were
    found. What was not found has none, and may be there nevertheless.
    """
    memory = np.zeros(_LEVELS * page_bytes + _SLACK_BYTES, np.uint8)
    held = np.zeros(_LEVELS, np.int64)
    bounds = np.zeros(_LEVELS, np.int64)
    bounds[0] = 1 << 8 * _HASH_BYTES
    data = np.empty(64 * len(hashes) + _SLACK_BYTES, np.uint8)
    key_ends, ends = np.zeros(len(hashes), np.int64), np.zeros(len(hashes), np.int64)
    is_found, used = np.zeros(len(hashes), np.bool_), 0
    for n in range(len(hashes)):
        key_ends[n], ends[n] = used, used
        level, cell = _entry_of(file, page_bytes, pages, root, hashes[n], memory, held, bounds)
        if level < 0:
            continue
        at, body, end = _record(memory, level * page_bytes, page_bytes, cell)
        if at < 0:
            continue
        body += _INTEGER_BYTES[_byte(memory, at + 1)]
        key_end, version_end, _ = _name(memory, body, at + 2, end)
        if key_end < 0:
            continue
        data = _with_room(data, used, version_end - body)
        to, source = U64(data.ctypes.data) + U64(used), U64(memory.ctypes.data) + U64(body)
        copy_bytes(to, source, U64(version_end - body))
        key_ends[n] = used + key_end - body
        used += version_end - body
        ends[n], is_found[n] = used, True
    return data[:used], key_ends, ends, is_found


@jit(
    types.Tuple((_BYTES, _PLACES, _FLAGS))(
        types.int32, _I64, _I64, _I64, _IN_BYTES, _IN_PLACES, _IN_PLACES, _IN_PLACES
    )
)
def find_rows(
    file: int,
    page_bytes: int,
    pages: int,
    root: int,
    names: "NDArray[np.uint8]",
    starts: "NDArray[np.int64]",
    key_ends: "NDArray[np.int64]",
    ends: "NDArray[np.int64]",
) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]", "NDArray[np.bool_]"]:
    """The row of each name (fastest in the order of keys) in the table whose root is
    this page, its hash before it: all joined, where they end, and which were found.
    After the last name are eight bytes more.
    """
    memory = np.zeros(_LEVELS * page_bytes + _SLACK_BYTES, np.uint8)
    held = np.zeros(_LEVELS, np.int64)
    data = np.empty(96 * len(ends) + _SLACK_BYTES, np.uint8)
    row_ends, is_found, used = np.zeros(len(ends), np.int64), np.zeros(len(ends), np.bool_), 0
    address = U64(names.ctypes.data)
    for n in range(len(ends)):
        row_ends[n] = used
        key, version = address + U64(starts[n]), address + U64(key_ends[n])
        key_bytes, version_bytes = key_ends[n] - starts[n], ends[n] - key_ends[n]
        page, level, cell = root, 0, -1
        while level < _LEVELS:
            if not _loaded(file, page_bytes, pages, page, memory, held, level):
                break
            base, order = level * page_bytes, 0
            low, high = 0, _two(memory, base + 3)
            while low < high:
                middle = (low + high) >> 1
                order = _cell_compared(
                    memory, base, page_bytes, middle, key, key_bytes, version, version_bytes
                )
                if order == 0:
                    cell = middle
                if order in (0, _UNUSUAL):
                    break
                if order < 0:
                    low = middle + 1
                else:
                    high = middle
            if low < high or memory[base] == _LEAF:
                break
            page, level = _child(memory, base, page_bytes, low), level + 1
        if cell < 0:
            continue
        at, body, end = _record(memory, level * page_bytes, page_bytes, cell)
        if at < 0:
            continue
        _, place, kinds = _name(memory, body, at + 1, end)
        hash_kind = _byte(memory, kinds)
        row_kind, _ = _varint(memory, kinds + 1)
        if hash_kind > _ONE or row_kind < _BLOB or row_kind & 1:
            continue
        row_at, row_bytes = place + _INTEGER_BYTES[hash_kind], (row_kind - _BLOB >> 1)
        key_hash = _integer(memory, place, hash_kind)
        if row_at + row_bytes > end or key_hash < 0 or key_hash >> 8 * _HASH_BYTES:
            continue
        data = _with_room(data, used, _HASH_BYTES + row_bytes)
        for byte in range(_HASH_BYTES):
            data[used + byte] = key_hash >> 8 * (_HASH_BYTES - 1 - byte) & 255
        used += _HASH_BYTES
        to, source = U64(data.ctypes.data) + U64(used), U64(memory.ctypes.data) + U64(row_at)
        copy_bytes(to, source, U64(row_bytes))
        used += row_bytes
        row_ends[n], is_found[n] = used, True
    return data[:used], row_ends, is_found
