"""Many byte strings, or many numbers, as arrays: what is done to thousands of items at
once goes through these, because a Python object of each would cost more than the work.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


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

    def texts(self) -> list[bytes]:
        """All of them."""
        data, ends = self.data.tobytes(), self.ends.tolist()
        return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def text(self, at: int) -> bytes:
        """One of them."""
        return self.data[self.ends[at - 1] if at else 0 : self.ends[at]].tobytes()

    def taken(self, places: "NDArray[np.intp]") -> "ByteColumn":
        """Those at some places, in their order."""
        lengths = self.lengths[places]
        return gathered(self.data, self.ends[places] - lengths, lengths)


def gathered(
    data: "NDArray[np.uint8]", starts: "NDArray[np.int64]", lengths: "NDArray[np.int64]"
) -> ByteColumn:
    """The parts of `data` that begin at `starts`."""
    ends = np.cumsum(lengths, dtype=np.int64)
    shifts = np.repeat(starts - ends + lengths, lengths)
    return ByteColumn(data[np.arange(len(shifts)) + shifts], ends)


def numbers_of(values: Iterable[int], count: int) -> "NDArray[np.uint64]":
    """So many numbers of 64 bits as an array."""
    return np.fromiter(values, np.uint64, count)
