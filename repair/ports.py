"""The ports of a repair: peers, our replica, and the audit file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import ProvenWindows
from ozone.ports import ByteRange
from repair.requests import (
    OwnLoaded,
    Scanned,
    TreeStored,
)

# The results with which a peer says that its file ends early, or that it has none; the
# last is Ozone's. After any other error nobody knows what the peer has.
LACKING_RESULTS = frozenset({"short_read", "block_not_found", "UNABLE_TO_FIND_CHUNK"})


@dataclass(frozen=True, slots=True)
class Piece:
    """Unproven bytes of a block file from a peer. `offset` is in bytes from the start
    of the file; `data` may be a view of a larger message.
    """

    offset: int
    data: bytes | memoryview

    @property
    def end(self) -> int:
        """The offset after the piece's last byte."""
        return self.offset + len(self.data)


class Peer(Protocol):
    """Another datanode with replicas of our containers. Every call ends within a
    deadline.

    Raises, in every method but `close`:
        PeerUnavailableError: no response in time; a retry or another peer may help.
        PeerRefusedError: the peer returned an error; its fact `result` names it.
        AccessDeniedError: the peer does not let our certificate read.
        RemoteProtocolError: the peer sent an invalid message.
    """

    @property
    def peer_id(self) -> PeerId:
        """The UUID of the datanode."""

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """The peer's tree, parsed and checked.

        Raises:
            TreeRefusedError: the tree breaks a rule of merkle.check.
        """

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """The peer's records of these blocks; blocks that it does not hold are
        missing.
        """

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        """Unproven bytes of one chunk from the peer's disk, only in the given ranges.

        Ranges are in bytes from the start of the block, ascending, disjoint and inside
        the chunk. A piece may span adjacent ranges, but no gap.

        Raises:
            PeerRefusedError: with a result of LACKING_RESULTS, the peer has no more of
                these bytes. All that it has are yielded first, because whole windows
                may be proven. With any other result the bytes were not read.
        """

    def close(self) -> None:
        """Close the connection; idempotent."""


class ReplicaReader(Protocol):
    """Reads of one replica of ours.

    Raises, in every method:
        ContainerNotFoundError: the container is gone.
        DiskError: a file cannot be read.
        DatabaseError: the database cannot be read.
    """

    def own(self) -> OwnLoaded:
        """The replica's state and its stored tree, with every known tombstone."""

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        """The merged records of these blocks; records that are missing or unparsable
        are left out.
        """

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        """Compare the chunk's bytes in our file with this record.

        Returns the indices of the windows that differ, are missing or cannot be read,
        and the file's length in bytes.
        """

    def scan(self) -> Scanned:
        """Read all data, store the resulting tree, and mark the replica UNHEALTHY on
        findings.

        Raises:
            OperationInterruptedError: the reconciliation was cancelled meanwhile.
        """


class ReplicaWriter(Protocol):
    """Changes to one replica of ours, durable when a method returns.

    Raises, in every method:
        ContainerNotFoundError: the container is gone.
        ContainerStateError: the container is not closed.
        DiskError: a file cannot be read or written.
        DatabaseError: the database cannot be read or written.
    """

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        """Save an undo copy, write the windows in place, sync, read back and compare.

        Returns for each run the number of overwritten bytes that could not be read and
        are therefore in no undo copy.

        Raises:
            BlockNotFoundError: the block was deleted.
            RecordInvalidError: a row that may delete the block cannot be parsed.
            ChunkGapError: the file has become too short: a write would leave a gap.
            UndoBudgetError: no space for the undo copy; nothing was written.
        """

    def put_block(self, record: BlockRecord) -> None:
        """Store the record and recompute the container's counters.

        Raises:
            BlockNotFoundError: the block was deleted.
            ChunkGapError: the record names bytes that the file does not have.
        """

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        """Merge the tree into the stored one and return the result.

        Raises:
            StaleTreeError: the stored tree no longer has this generation.
        """

    def advance_bcs_id(self, bcs_id: int) -> None:
        """Raise the container's commit to `bcs_id`; a higher one stays."""

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        """Return an UNHEALTHY replica to service in this state.

        Raises:
            ContainerStateError: the replica is not UNHEALTHY.
            StaleTreeError: the stored tree no longer has this generation, because
                another scan or a delete changed it.
        """


class ReplicaAccess(ReplicaReader, ReplicaWriter, Protocol):
    """Reads of and changes to one replica of ours."""


class Audit(Protocol):
    """Records one write into replica data durably, as repair.audit.AuditLog.write.

    Raises:
        DiskError: the line is not on disk.
    """

    def __call__(
        self,
        *,
        container: int,
        block: int,
        offset: int,
        length: int,
        source: str,
        job: str,
        unread: int,
    ) -> None: ...
