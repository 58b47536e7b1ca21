"""Windows of a large object as it was copied last: which of its bytes changed since?

The ledger keeps eight bytes of keyed BLAKE3 for each window, 0.1 % of the data. A CRC
would not do: 32 bits call a changed window unchanged once in 2^32, and anybody can make
such windows. The key is the ledger's secret, so nobody can search for equal hashes.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from merkle.checksum import Buffer

# Of one changed byte a window crosses. Larger ones would cost more than all else of a
# patch, smaller ones more of the ledger than they save.
WINDOW_BYTES = 8 << 10
# Of the trees that a verifier sends: these cross, too.
TREE_WINDOW_BYTES = 16 << 10
# Of very large objects the windows grow, so that a table takes at most 8 MiB.
_WINDOWS_MAX = 1 << 20
_HASH_BYTES = 8
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class WindowTable:
    """The hashes of all windows of one object, joined in order."""

    size_bytes: int
    window_bytes: int
    hashes: bytes

    def __post_init__(self) -> None:
        count = -(-self.size_bytes // self.window_bytes)
        assert len(self.hashes) == count * _HASH_BYTES


@dataclass(frozen=True, slots=True)
class ChangedRange:
    """The bytes `first` to `new_end` of an object, instead of `first` to `old_end` of
    what it was. Only at the end of the object are these lengths different.
    """

    first: int
    old_end: int
    new_end: int


class WindowHasher:
    """Computes the window table of an object whose bytes arrive in pieces."""

    def __init__(self, key: bytes, size_bytes: int) -> None:
        assert len(key) == KEY_BYTES
        self._key = key
        self._size_bytes = size_bytes
        self._window_bytes = window_bytes_of(size_bytes)
        self._rest = b""
        self._hashes = list[bytes]()

    def update(self, data: Buffer) -> None:
        """Add the next piece."""
        view, step = memoryview(data).cast("B"), self._window_bytes
        if self._rest:
            missing = step - len(self._rest)
            self._rest += bytes(view[:missing])
            view = view[missing:]
            if len(self._rest) < step:
                return
            self._add(memoryview(self._rest))
        whole = len(view) - len(view) % step
        for first in range(0, whole, step):
            self._add(view[first : first + step])
        self._rest = bytes(view[whole:])

    def checkpoint(self) -> Callable[[], None]:
        """What takes back all pieces that are added from now on."""
        count, rest = len(self._hashes), self._rest

        def undo() -> None:
            del self._hashes[count:]
            self._rest = rest

        return undo

    def table(self) -> WindowTable:
        """The table of the whole object; called once, after its last piece."""
        if self._rest:
            self._add(memoryview(self._rest))
            self._rest = b""
        return WindowTable(self._size_bytes, self._window_bytes, b"".join(self._hashes))

    def _add(self, window: memoryview) -> None:
        self._hashes.append(blake3(window, key=self._key).digest(length=_HASH_BYTES))


def window_bytes_of(size_bytes: int) -> int:
    """The length of the windows of an object of this size."""
    window_bytes = WINDOW_BYTES
    while size_bytes > window_bytes * _WINDOWS_MAX:
        window_bytes *= 2
    return window_bytes


def changed_ranges(old: WindowTable, new: WindowTable) -> tuple[ChangedRange, ...] | None:
    """Where `new` differs from `old`, ascending and disjoint; adjacent windows are
    joined. None where the tables cannot be compared.
    """
    if old.window_bytes != new.window_bytes:
        return None
    # Imported here, because only a change of a large object needs it.
    import numpy as np

    step = new.window_bytes
    ours, theirs = (np.frombuffer(table.hashes, np.uint64) for table in (new, old))
    common = min(len(ours), len(theirs))
    # A window that is short in one of them is another window.
    if old.size_bytes != new.size_bytes:
        common = min(old.size_bytes, new.size_bytes) // step
    changed = np.flatnonzero(ours[:common] != theirs[:common])
    return ranges_of(changed.tolist(), old.size_bytes, new.size_bytes, window_bytes=step)


def ranges_of(
    changed: Sequence[int], old_bytes: int, new_bytes: int, *, window_bytes: int
) -> tuple[ChangedRange, ...]:
    """Windows that changed, ascending, as ranges, with what follows the windows that
    are whole in both where the sizes differ. Neighbours are joined.
    """
    found = list[ChangedRange]()

    def add(first: int, old_end: int, new_end: int) -> None:
        if found and found[-1].new_end == first:
            first = found.pop().first
        found.append(ChangedRange(first, old_end, new_end))

    for window in changed:
        end = min((window + 1) * window_bytes, new_bytes)
        add(window * window_bytes, end, end)
    if old_bytes != new_bytes:
        add(min(old_bytes, new_bytes) // window_bytes * window_bytes, old_bytes, new_bytes)
    return tuple(found)


def pack_hashes(table: WindowTable) -> bytes:
    """The hashes, compressed: windows of equal bytes, such as zeros, repeat."""
    return zlib.compress(table.hashes, 1)


def unpack_table(size_bytes: int, packed: bytes) -> WindowTable | None:
    """The table that `pack_hashes` was given; None if these bytes are no such table."""
    window_bytes = window_bytes_of(size_bytes)
    length = -(-size_bytes // window_bytes) * _HASH_BYTES
    unpacker = zlib.decompressobj()
    try:
        hashes = unpacker.decompress(packed, length + 1)
    except zlib.error:
        return None
    return WindowTable(size_bytes, window_bytes, hashes) if len(hashes) == length else None
