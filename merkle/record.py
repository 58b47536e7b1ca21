"""Block records: the chunks of a block with the window checksums that its client wrote.

Recorded checksums never change. A chunk is split into windows of `bytes_per_checksum`
bytes; the last may be shorter. Each window has one entry in `checksums`, in order
(Ozone's `ChunkInfo` and `BlockData`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from merkle.checksum import ChecksumType, fold
from merkle.tree import BlockId, ContainerId


class WindowChecksums(Sequence[bytes]):
    """Checksums of `width` bytes each, stored joined. A full block has 16,384, and one
    object for each would cost time.

    Equal to a tuple of the same checksums.
    """

    __slots__ = ("joined", "width")

    def __init__(self, joined: bytes, width: int) -> None:
        assert width > 0
        assert len(joined) % width == 0
        self.joined = joined
        self.width = width

    def __len__(self) -> int:
        return len(self.joined) // self.width

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[bytes, ...]: ...
    def __getitem__(self, index: int | slice) -> bytes | tuple[bytes, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        start = range(0, len(self.joined), self.width)[index]
        return self.joined[start : start + self.width]

    def __iter__(self) -> Iterator[bytes]:
        return (self.joined[i : i + self.width] for i in range(0, len(self.joined), self.width))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, WindowChecksums):
            return (self.joined, len(self)) == (other.joined, len(other))
        return isinstance(other, tuple) and tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@dataclass(frozen=True)
class ChunkRecord:
    """One chunk as its client recorded it; `offset` is in bytes from the start of the
    block.
    """

    offset: int
    length_bytes: int
    checksum_type: ChecksumType
    bytes_per_checksum: int
    checksums: tuple[bytes, ...] | WindowChecksums
    name: str = ""
    metadata: tuple[tuple[str, str | None], ...] = ()
    stripe_checksum: bytes | None = None

    def __post_init__(self) -> None:
        assert self.offset >= 0
        assert self.length_bytes >= 0

    @property
    def end(self) -> int:
        """The end of the chunk, in bytes from the start of the block."""
        return self.offset + self.length_bytes

    @property
    def entries(self) -> bytes:
        """The recorded checksums joined in order, the format of
        `merkle.checksum.window_checksums`.
        """
        return (
            self.checksums.joined
            if isinstance(self.checksums, WindowChecksums)
            else b"".join(self.checksums)
        )

    @property
    def content(self) -> tuple[int, ChecksumType, int, bytes]:
        """The fields that are equal in two records of the same bytes at one offset."""
        return self.length_bytes, self.checksum_type, self.bytes_per_checksum, self.entries

    @cached_property
    def data_checksum(self) -> int:
        """The chunk's leaf in a tree: CRC32C over the recorded checksums in order, 0 if
        there are none.
        """
        return fold(self.entries)

    @property
    def is_verifiable(self) -> bool:
        """Whether bytes can be checked against the record; with type NONE they
        cannot.
        """
        return self.checksum_type is not ChecksumType.NONE

    def window(self, index: int) -> tuple[int, int]:
        """Offset in the chunk and length of one window, in bytes."""
        start = index * self.bytes_per_checksum
        return start, min(self.bytes_per_checksum, self.length_bytes - start)


@dataclass(frozen=True)
class BlockRecord:
    """One block as recorded: its chunks in ascending offset order, and the BCS ID of
    its last commit.
    """

    container_id: ContainerId
    block_id: BlockId
    bcs_id: int
    chunks: tuple[ChunkRecord, ...]
    metadata: tuple[tuple[str, str | None], ...] = ()
    replica_index: int | None = None

    def __post_init__(self) -> None:
        assert all(a.offset < b.offset for a, b in zip(self.chunks, self.chunks[1:], strict=False))

    @property
    def length_bytes(self) -> int:
        """The sum of the chunks' lengths, which Ozone calls the size of a block."""
        return sum(chunk.length_bytes for chunk in self.chunks)

    @cached_property
    def by_offset(self) -> dict[int, ChunkRecord]:
        """The chunks by their offset."""
        return {chunk.offset: chunk for chunk in self.chunks}


@dataclass(frozen=True)
class DeleteTransaction:
    """The SCM's command to delete blocks of a container; bytes are deleted for no other
    reason.
    """

    tx_id: int
    container_id: ContainerId
    block_ids: tuple[BlockId, ...]
    # Size of the blocks in one replica; None if the sender does not report it.
    replica_bytes: int | None = None
