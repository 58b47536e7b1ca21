"""Many byte strings, or many numbers, as arrays: what is done to thousands of items at
once goes through these, because a Python object of each would cost more than the work.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import numpy as np

from proof.symbols import kernels_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WORD_BYTES = 8


class _ColumnKernels(Protocol):
    """The interface of the module proof.column_kernels, which documents it."""

    def gather(
        self,
        data: "NDArray[np.uint8]",
        starts: "NDArray[np.int64]",
        lengths: "NDArray[np.int64]",
    ) -> tuple["NDArray[np.uint8]", "NDArray[np.int64]"]:
        """Parts of bytes, joined."""

    def first_words(
        self, data: "NDArray[np.uint8]", ends: "NDArray[np.int64]"
    ) -> "NDArray[np.uint64]":
        """What texts are ordered by."""

    def row_checksums(self, *columns: "NDArray[Any]") -> "NDArray[np.uint64]":
        """Checksums of rows with their names."""


@dataclass(frozen=True, slots=True, eq=False)
class ByteColumn:
    """Byte strings, joined. `ends` (int64) says where each ends in `data` (uint8)."""

    data: "NDArray[np.uint8]"
    ends: "NDArray[np.int64]"

    def __post_init__(self) -> None:
        assert len(self.data) == (self.ends[-1] if len(self.ends) else 0)

    def __len__(self) -> int:
        return len(self.ends)

    @classmethod
    def of(cls, texts: Sequence[bytes]) -> Self:
        """The column of these."""
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return cls(np.frombuffer(b"".join(texts), np.uint8), np.cumsum(lengths))

    @property
    def lengths(self) -> "NDArray[np.int64]":
        """Of each, in bytes."""
        return np.diff(self.ends, prepend=0)

    @property
    def is_utf8(self) -> bool:
        """Whether each is UTF-8: all together are, and none begins inside one."""
        try:
            self.data.tobytes().decode()
        except UnicodeDecodeError:
            return False
        firsts = self.data[(self.ends - self.lengths)[self.lengths > 0]]
        return not ((firsts & 0xC0) == 0x80).any()

    def order(self) -> "NDArray[np.intp]":
        """Their places in ascending order. Most differ in one word: the first that is
        not the same in all. Those that do not are compared whole.
        """
        kernels = column_kernels()
        find = kernels.first_words if kernels else _first_words
        words = find(self.data, self.ends)
        places = np.argsort(words)
        words = words[places]
        is_same = np.zeros(len(words) + 1, np.bool_)
        is_same[1:-1] = words[1:] == words[:-1]
        edges = np.flatnonzero(is_same[1:] != is_same[:-1]).reshape(-1, 2)
        tied = places[is_same[1:] | is_same[:-1]]
        texts, first_tied = self.taken(tied).texts(), 0
        for first, last in edges.tolist():
            end_tied = first_tied + last + 1 - first
            order = sorted(range(first_tied, end_tied), key=texts.__getitem__)
            places[first : last + 1] = tied[order]
            first_tied = end_tied
        return places

    def texts(self) -> list[bytes]:
        """All of them."""
        data, ends = self.data.tobytes(), self.ends.tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def pieces(self, length: int) -> "Iterator[ByteColumn]":
        """Columns of so many of them at a time, in order."""
        for first in range(0, len(self), length):
            ends = self.ends[first : first + length]
            start = int(self.ends[first - 1]) if first else 0
            yield ByteColumn(self.data[start : ends[-1]], ends - start)

    def text(self, at: int) -> bytes:
        """One of them."""
        return self.data[self.ends[at - 1] if at else 0 : self.ends[at]].tobytes()

    def joined(self, other: "ByteColumn") -> "ByteColumn":
        """These, and those behind them."""
        ends = np.concatenate((self.ends, other.ends + len(self.data)))
        return ByteColumn(np.concatenate((self.data, other.data)), ends)

    def taken(self, places: "NDArray[np.intp]") -> "ByteColumn":
        """Those at some places, in their order."""
        lengths = self.lengths[places]
        return gathered(self.data, self.ends[places] - lengths, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class NameColumns:
    """Keys and versions of items, in UTF-8."""

    keys: ByteColumn
    versions: ByteColumn

    def __post_init__(self) -> None:
        assert len(self.keys) == len(self.versions)

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(cls, keys: Sequence[bytes], versions: Sequence[bytes]) -> "NameColumns":
        """The columns of these."""
        return cls(ByteColumn.of(keys), ByteColumn.of(versions))

    def joined(self, other: "NameColumns") -> "NameColumns":
        """These, and those behind them."""
        return NameColumns(self.keys.joined(other.keys), self.versions.joined(other.versions))

    def taken(self, places: "NDArray[np.intp]") -> "NameColumns":
        """Those at some places, in their order."""
        return NameColumns(self.keys.taken(places), self.versions.taken(places))

    def order(self) -> "NDArray[np.intp]":
        """Their places by key, then by version, in the order of bytes."""
        # Most buckets have no versions, and comparing pairs takes five times as long.
        if not len(self.versions.data):
            return self.keys.order()
        pairs = list(zip(self.keys.texts(), self.versions.texts(), strict=True))
        return np.array(sorted(range(len(pairs)), key=pairs.__getitem__), np.intp)

    def texts(self) -> tuple[list[str], list[str]]:
        """All keys and all versions.

        Raises:
            UnicodeDecodeError: one is not UTF-8.
        """
        return _decoded(self.keys), _decoded(self.versions)


def _first_words(data: "NDArray[np.uint8]", ends: "NDArray[np.int64]") -> "NDArray[np.uint64]":
    """The first word of each text that is not the same in all."""
    starts = np.concatenate((ends[:0], [0], ends[:-1]))[: len(ends)]
    whole = np.concatenate((data, np.zeros(_WORD_BYTES, np.uint8)))
    shortest, skipped = int((ends - starts).min()) if len(ends) else 0, 0
    words = words_at(whole, starts, ends)
    while skipped + _WORD_BYTES <= shortest and (words == words[0]).all():
        skipped += _WORD_BYTES
        words = words_at(whole, starts + skipped, ends)
    return words


def words_at(
    data: "NDArray[np.uint8]", starts: "NDArray[np.int64]", ends: "NDArray[np.int64]"
) -> "NDArray[np.uint64]":
    """The eight bytes of each text at `starts`, zeros after its end, as numbers of the
    same order. `data` has eight bytes more.
    """
    windows = np.lib.stride_tricks.sliding_window_view(data, _WORD_BYTES)
    words: NDArray[np.uint64] = windows[starts].view(">u8")[:, 0].astype(np.uint64)
    unused = (_WORD_BYTES - np.clip(ends - starts, 0, _WORD_BYTES)).astype(np.uint64)
    bits = np.minimum(np.uint64(8) * unused, np.uint64(63))
    words = words >> bits << bits
    words[unused == _WORD_BYTES] = 0
    return words


def gathered(
    data: "NDArray[np.uint8]", starts: "NDArray[np.int64]", lengths: "NDArray[np.int64]"
) -> ByteColumn:
    """The parts of `data` that begin at `starts`.

    Raises:
        IndexError: a part ends behind `data`.
    """
    kernels = column_kernels()
    if kernels is not None:
        starts, lengths = np.ascontiguousarray(starts), np.ascontiguousarray(lengths)
        return ByteColumn(*kernels.gather(data, starts, lengths))
    ends = np.cumsum(lengths, dtype=np.int64)
    shifts = np.repeat(starts - ends + lengths, lengths)
    return ByteColumn(data[np.arange(len(shifts)) + shifts], ends)


def column_kernels() -> _ColumnKernels | None:
    """The kernels of columns, once this process has loaded kernels for more work."""
    return _load() if kernels_for(0) is not None else None


@cache
def _load() -> _ColumnKernels | None:
    try:
        from proof import column_kernels as loaded
    except ImportError:
        return None
    return cast(_ColumnKernels, loaded)


def numbers_of(values: Iterable[int], count: int) -> "NDArray[np.uint64]":
    """So many numbers of 64 bits as an array."""
    return np.fromiter(values, np.uint64, count)


def _decoded(column: ByteColumn) -> list[str]:
    if not len(column.data):
        return [""] * len(column)
    data = column.data.tobytes()
    if not data.isascii():
        return [text.decode() for text in column.texts()]
    text, ends = data.decode(), column.ends.tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
