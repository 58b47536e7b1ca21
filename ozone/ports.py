"""What the servers of both wires need from the replicas that they serve: one port,
nothing of disks.

Ozone's datanode service (ozone.datanode) and our own (dnagent.server) answer from the
same `ReplicaSource`, so that a peer of either kind sees the same container.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from merkle.record import BlockRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Some bytes of a block file, counted from its start."""

    offset: int
    length_bytes: int

    def __post_init__(self) -> None:
        assert self.offset >= 0
        assert self.length_bytes > 0

    @property
    def end(self) -> int:
        """The first byte behind the range."""
        return self.offset + self.length_bytes


@dataclass(frozen=True, slots=True)
class ReplicaHead:
    """What a server must know of a replica before it answers for it."""

    state: ReplicaState
    bcs_id: int = 0
    replica_index: int = 0


class ReplicaSource(Protocol):
    """The replicas of one datanode, all volumes together. Thread-safe; every method may
    raise DiskError, DatabaseError, and ContainerNotFoundError for a container that is
    not here.
    """

    def head(self, container_id: ContainerId) -> ReplicaHead:
        """State and commit of the replica as it is now."""

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        """The tree file as it is on disk, unparsed, whatever it holds; b"" for an empty
        file.

        Where there is no file: with `build_missing` a serialised tree built from the
        records, else TreeMissingError.
        """

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        """The record of one block, its last chunk merged in; None if there is none. May
        raise RecordInvalidError.
        """

    def records(
        self, container_id: ContainerId, start: BlockId | None, count: int
    ) -> Sequence[BlockRecord]:
        """Up to `count` records, merged, in the order of their keys as text, from
        `start` (inclusive; none at all if no such block) or from the first.
        """

    def read(
        self, container_id: ContainerId, block_id: BlockId, offset: int, length_bytes: int
    ) -> bytes:
        """Bytes of the block file as they are on disk, fewer than asked only where it
        ends.

        Raises:
            BlockNotFoundError: there is no such file.
        """
