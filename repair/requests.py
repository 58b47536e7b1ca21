"""What a reconciliation asks for, what it hears, and what comes of it: the values
between repair.reconciliation, which decides, and repair.runner, which acts.

Every request but `ReportOutcome` is answered by exactly one event: the one its
docstring names, or `RequestFailed`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from merkle.outcome import RepairOutcome
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerTree
from merkle.windows import ProvenWindows
from ozone.errors import (
    BlockNotFoundError,
    ChunkGapError,
    ContainerNotFoundError,
    ContainerStateError,
    StaleTreeError,
)
from runtime.errors import DiskError, OperationInterruptedError


@dataclass(frozen=True, slots=True)
class LoadOwn:
    """Our replica's state and stored tree -> OwnLoaded."""


@dataclass(frozen=True, slots=True)
class FetchTree:
    """-> TreeArrived."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LoadRecords:
    """Our records of these blocks; one that is not there, or that nobody can read, is
    left out -> OwnRecords.
    """

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class FetchRecords:
    """-> RecordsArrived."""

    peer: PeerId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CheckLocal:
    """Which windows of our own file do not match this record, and how long is the file
    -> LocalChecked.
    """

    block_id: BlockId
    chunk: ChunkRecord


@dataclass(frozen=True, slots=True)
class FetchWindows:
    """Ascending windows of a chunk from a peer, proven against the record ->
    WindowsArrived.
    """

    peer: PeerId
    block_id: BlockId
    chunk: ChunkRecord
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteWindows:
    """Keep an undo copy, write, make durable, read back, all under the container's lock
    -> WindowsWritten.
    """

    block_id: BlockId
    chunk: ChunkRecord
    runs: tuple[ProvenWindows, ...]
    source: PeerId

    @property
    def length_bytes(self) -> int:
        """How many bytes are written."""
        return sum(len(run.data) for run in self.runs)


@dataclass(frozen=True, slots=True)
class PutBlock:
    """Store a block's record, counters recomputed, unless the block was deleted
    meanwhile -> BlockStored.
    """

    record: BlockRecord


@dataclass(frozen=True, slots=True)
class StoreTree:
    """Merge into the stored tree if it still has this generation -> TreeStored."""

    tree: ContainerTree
    generation: bytes


@dataclass(frozen=True, slots=True)
class AdvanceBcsId:
    """Raise the container's commit to this one -> BcsIdAdvanced."""

    bcs_id: int


@dataclass(frozen=True, slots=True)
class Rescan:
    """Read everything again, store the tree that shows, mark the replica unhealthy on
    findings -> Scanned.
    """


@dataclass(frozen=True, slots=True)
class ReturnToService:
    """Change the state of an unhealthy replica that proved clean, if its tree is still
    the one -> StateChanged.
    """

    state: ReplicaState
    generation: bytes


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """The end: tell whoever asked. No event answers it."""

    outcome: "RepairOutcome"


PeerRequest: TypeAlias = FetchTree | FetchRecords | FetchWindows
LocalRequest: TypeAlias = (
    LoadOwn
    | LoadRecords
    | CheckLocal
    | WriteWindows
    | PutBlock
    | StoreTree
    | AdvanceBcsId
    | Rescan
    | ReturnToService
)
Request: TypeAlias = PeerRequest | LocalRequest | ReportOutcome


@dataclass(frozen=True, slots=True)
class OwnLoaded:
    """`tree` is None where none was ever built.

    `bcs_id` is the container's commit, 0 where the database has lost it.
    `recorded_bcs_id` is the highest commit in the container's block records; it is
    looked up where the container's is lost, and of an UNHEALTHY replica, which a round
    that was not clean may have left with a block beyond it; otherwise it is None.
    """

    tree: ContainerTree | None
    generation: bytes
    state: ReplicaState
    bcs_id: int
    replica_index: int = 0
    recorded_bcs_id: int | None = None


@dataclass(frozen=True, slots=True)
class TreeArrived:
    peer: PeerId
    tree: ContainerTree


@dataclass(frozen=True, slots=True)
class OwnRecords:
    records: Mapping[BlockId, BlockRecord]


@dataclass(frozen=True, slots=True)
class RecordsArrived:
    peer: PeerId
    records: Mapping[BlockId, BlockRecord]


@dataclass(frozen=True, slots=True)
class LocalChecked:
    block_id: BlockId
    offset: int
    bad: tuple[int, ...]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class WindowsArrived:
    """What a peer sent of what was asked, proven; `code` is that of the error that cut
    it short, if any.
    """

    peer: PeerId
    block_id: BlockId
    offset: int
    runs: tuple[ProvenWindows, ...]
    bytes_fetched: int
    code: str = ""
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class WindowsWritten:
    """`unread_bytes` are, for each run, those that a bad sector hid, so that no undo
    copy has them.
    """

    block_id: BlockId
    offset: int
    source: PeerId
    runs: tuple[ProvenWindows, ...]
    unread_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_id: BlockId


@dataclass(frozen=True, slots=True)
class TreeStored:
    tree: ContainerTree
    generation: bytes


@dataclass(frozen=True, slots=True)
class BcsIdAdvanced:
    bcs_id: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """The tree now stored, and where the scan found faults, as far as they have a place
    in a block.

    `lost` are the offsets of chunks that are on record and not in the tree: not a byte
    of them was found.
    """

    tree: ContainerTree
    generation: bytes
    findings: tuple[tuple[BlockId | None, int | None], ...]
    state: ReplicaState
    lost: Mapping[BlockId, Collection[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateChanged:
    state: ReplicaState


class FailureKind(Enum):
    """What a failed request means for the repair."""

    # The container is being deleted, or is not ours to change any more.
    CONTAINER_GONE = "container_gone"
    # The block was deleted meanwhile: nothing is wrong, and nothing is left to do.
    BLOCK_GONE = "block_gone"
    # Another writer stored a tree since we loaded ours.
    TREE_CHANGED = "tree_changed"
    # The block's file became shorter since we checked it.
    FILE_SHRANK = "file_shrank"
    DISK_FAILED = "disk_failed"
    OTHER = "other"


_FAILURE_KINDS = {
    ContainerNotFoundError.code: FailureKind.CONTAINER_GONE,
    ContainerStateError.code: FailureKind.CONTAINER_GONE,
    OperationInterruptedError.code: FailureKind.CONTAINER_GONE,
    BlockNotFoundError.code: FailureKind.BLOCK_GONE,
    StaleTreeError.code: FailureKind.TREE_CHANGED,
    ChunkGapError.code: FailureKind.FILE_SHRANK,
    DiskError.code: FailureKind.DISK_FAILED,
}


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request was not carried out; `code` is an error's stable code, `retryable`
    whether a later job may do it.
    """

    request: Request
    code: str
    message: str = ""
    retryable: bool = False

    @property
    def kind(self) -> FailureKind:
        """What the failure means for the repair."""
        return _FAILURE_KINDS.get(self.code, FailureKind.OTHER)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job was cancelled or the container is being deleted: end now. Answers no
    request.
    """

    reason: str


Event: TypeAlias = (
    OwnLoaded
    | TreeArrived
    | OwnRecords
    | RecordsArrived
    | LocalChecked
    | WindowsArrived
    | WindowsWritten
    | BlockStored
    | TreeStored
    | BcsIdAdvanced
    | Scanned
    | StateChanged
    | RequestFailed
    | Cancelled
)


@dataclass(frozen=True, slots=True)
class ReconcileOptions:
    """`return_to` brings an UNHEALTHY replica back into service; None leaves it
    UNHEALTHY, as Ozone does.

    The rule: every peer gave its tree; a full scan after everything else found no
    fault, and no other has changed the tree since; our plan is empty and neither
    UNRECOVERABLE nor CONFLICT nor UNKNOWN; and our commit is not behind that of any
    block seen here or at a peer in this job. Which state it returns to is the choice of
    whoever knows the container (scm.registry): CLOSED only where a replica of it is or
    was CLOSED or all have one commit, else QUASI_CLOSED. A replica that falsely claims
    CLOSED makes SCM close the container at its commit and drop others.

    All data are read once more at the end, as Ozone does, so that damage which no tree
    shows yet is found and repaired in the same job. `skip_final_scan` leaves that out
    where nothing was changed, for visits that nobody asked for.
    """

    fetches_max: int = 4
    rounds_max: int = 3
    return_to: ReplicaState | None = None
    skip_final_scan: bool = False

    def __post_init__(self) -> None:
        assert self.fetches_max >= 1
        assert self.rounds_max >= 1
        assert self.return_to in (None, ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED)
