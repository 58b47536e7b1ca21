"""What was recorded when data were written: a block's chunks with the client's window checksums.

Recorded checksums never change. A chunk is split into windows of `bytes_per_checksum` bytes, the last may
be shorter; each window has one entry in `checksums`, in order (Ozone's `ChunkInfo`, `BlockData`).
"""

from dataclasses import dataclass
from functools import cached_property

from merkle.checksum import ChecksumType, fold
from merkle.tree import BlockId, ContainerId


@dataclass(frozen=True)
class ChunkRecord:
    """One chunk as its writer described it; `offset` is bytes from the start of the block."""

    offset: int
    length_bytes: int
    checksum_type: ChecksumType
    bytes_per_checksum: int
    checksums: tuple[bytes, ...]
    name: str = ""
    metadata: tuple[tuple[str, str | None], ...] = ()
    stripe_checksum: bytes | None = None

    def __post_init__(self) -> None:
        assert self.offset >= 0
        assert self.length_bytes >= 0

    @property
    def end(self) -> int:
        return self.offset + self.length_bytes

    @cached_property
    def data_checksum(self) -> int:
        """The chunk's leaf in a tree: CRC32C over the recorded checksums in order, 0 if there are none."""
        return fold(b"".join(self.checksums))

    @property
    def is_verifiable(self) -> bool:
        """Whether the record can tell good bytes from bad: type NONE cannot."""
        return self.checksum_type is not ChecksumType.NONE

    def window(self, index: int) -> tuple[int, int]:
        """Offset inside the chunk and length, in bytes, of one window."""
        start = index * self.bytes_per_checksum
        return start, min(self.bytes_per_checksum, self.length_bytes - start)


@dataclass(frozen=True)
class BlockRecord:
    """One block as recorded: chunks in ascending offset order, and the commit it belongs to."""

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
        """Sum of the chunks' lengths: what Ozone calls the size of a block."""
        return sum(chunk.length_bytes for chunk in self.chunks)

    @cached_property
    def by_offset(self) -> dict[int, ChunkRecord]:
        return {chunk.offset: chunk for chunk in self.chunks}


@dataclass(frozen=True)
class DeleteTransaction:
    """The cluster's order to delete blocks of a container; only such an order makes bytes disappear."""

    tx_id: int
    container_id: ContainerId
    block_ids: tuple[BlockId, ...]
    # What one replica of the blocks takes up, where the sender says it.
    replica_bytes: int | None = None
