"""The port through which servers read replicas.

Ozone's datanode service (ozone.datanode) and ours (dnagent.server) use the same
`ReplicaSource`, so that peers of both kinds see the same container.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from merkle.record import BlockRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes in a block file; the offset is from its start."""

    offset: int
    length_bytes: int

    def __post_init__(self) -> None:
        assert self.offset >= 0
        assert self.length_bytes > 0

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.length_bytes


@dataclass(frozen=True, slots=True)
class ReplicaHead:
    """The attributes that a server checks before it serves a replica.

    `bcs_id` is the container's block commit sequence ID; `replica_index` is above 0 in
    erasure-coded containers.
    """

    state: ReplicaState
    bcs_id: int = 0
    replica_index: int = 0


class ReplicaSource(Protocol):
    """The replicas of one datanode, on all of its volumes. Thread-safe.

    Every method may raise ContainerNotFoundError, DiskError and DatabaseError.
    """

    def head(self, container_id: ContainerId) -> ReplicaHead:
        """The current state, commit and index of the replica.

        Raises:
            DescriptorError: the descriptor is invalid.
        """

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        """The content of the tree file, unparsed and unchecked; b"" for an empty file.

        If there is no file and `build_missing` is set, a serialised tree built from the
        records.

        Raises:
            TreeMissingError: there is no file and `build_missing` is not set.
        """

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        """The record of one block, merged with its pending last chunk; None if there is
        none.

        Raises:
            RecordInvalidError: the record cannot be parsed or contradicts itself.
        """

    def records(
        self, container_id: ContainerId, start: BlockId | None, count: int
    ) -> Sequence[BlockRecord]:
        """Up to `count` merged records in the order of their keys as text.

        The first is that of `start`, or of the first block if None; without a record of
        `start` the result is empty.

        Raises:
            RecordInvalidError: a record cannot be parsed or contradicts itself.
        """

    def read(
        self, container_id: ContainerId, block_id: BlockId, offset: int, length_bytes: int
    ) -> bytes:
        """Bytes of the block file, unverified; fewer than requested only at its end.

        Raises:
            BlockNotFoundError: the block has no file.
        """
