"""What a repair needs: other holders of a container, and what is read of and written to
our replica.
"""

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


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a block file as a peer sent them, proven by nothing yet; `data` may be a
    view of a larger message.
    """

    offset: int
    data: bytes | memoryview

    @property
    def end(self) -> int:
        """The first byte behind the piece."""
        return self.offset + len(self.data)


class Peer(Protocol):
    """Another holder of our containers. Every call ends within a deadline.

    All methods may raise PeerUnavailableError (no answer in time: retry, or ask
    another), PeerRefusedError (it answered with an error; fact `result` names it) and
    RemoteProtocolError (it spoke nonsense: do not ask it again this round).
    """

    @property
    def peer_id(self) -> PeerId:
        """Which datanode it is."""

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """Its tree, parsed and checked.

        Raises:
            TreeRefusedError: the tree is not one we may act on.
        """

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """Its records of these blocks; what it does not hold is left out."""

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        """Bytes of one chunk as its disk holds them, never beyond what was asked.

        Ranges are ascending, do not overlap and lie inside the chunk. No piece crosses
        from one range into another that does not touch it. Where its file ends early
        all that is there is yielded first, then PeerRefusedError with result
        `short_read` is raised: windows that came whole are worth proving.
        """

    def close(self) -> None:
        """Give up the connection; idempotent."""


class ReplicaReader(Protocol):
    """One replica of ours, to read. Every method may raise ContainerNotFoundError,
    DiskError and DatabaseError.
    """

    def own(self) -> OwnLoaded:
        """State and stored tree, with every tombstone known."""

    def records(self, block_ids: Sequence[BlockId]) -> dict[BlockId, BlockRecord]:
        """The merged records of these blocks; one that is not there, or cannot be
        parsed, is left out.
        """

    def check(self, block_id: BlockId, chunk: ChunkRecord) -> tuple[tuple[int, ...], int]:
        """The windows of the chunk that our file does not match or lacks or cannot
        give, and the file's length.
        """

    def scan(self) -> Scanned:
        """Read everything, store the tree that shows, mark the replica unhealthy on
        findings.

        Raises:
            OperationInterruptedError: the reconciliation was cancelled meanwhile.
        """


class ReplicaWriter(Protocol):
    """One replica of ours, to repair: durable when a method returns, and refused unless
    the container is closed.

    Every method may raise ContainerNotFoundError, ContainerStateError, DiskError and
    DatabaseError.
    """

    def write_windows(
        self, block_id: BlockId, chunk: ChunkRecord, runs: Sequence[ProvenWindows]
    ) -> tuple[int, ...]:
        """Keep an undo copy, write in place, make durable, read back and compare.

        Returns for each run how many of the bytes before it could not be read, so that
        no undo copy has them.

        Raises:
            BlockNotFoundError: the block was deleted.
            UndoBudgetError: nothing was written.
        """

    def put_block(self, record: BlockRecord) -> None:
        """Store the record, counters recomputed.

        Raises:
            BlockNotFoundError: the block was deleted.
        """

    def store_tree(self, tree: ContainerTree, generation: bytes) -> TreeStored:
        """Merge into the stored tree.

        Raises:
            StaleTreeError: it is not of this generation any more.
        """

    def advance_bcs_id(self, bcs_id: int) -> None:
        """Raise the container's commit to this one; never lowers it."""

    def set_state(self, state: ReplicaState, generation: bytes) -> None:
        """Bring an unhealthy replica back into service.

        Raises:
            StaleTreeError: the stored tree is not of this generation any more: another
                scan saw something else.
        """


class ReplicaAccess(ReplicaReader, ReplicaWriter, Protocol):
    """Both."""


class Audit(Protocol):
    """Puts down one write into replica data before it counts as done
    (repair.audit.AuditLog.write).
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
