"""Requests and events of a reconciliation.

repair.reconciliation decides and returns requests; repair.runner executes them and
returns events. Every request but `ReportOutcome` is answered by exactly one event:
either the one that its docstring names, or `RequestFailed`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from merkle.errors import RecordInvalidError
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
    """Load our replica's state and stored tree -> OwnLoaded."""


@dataclass(frozen=True, slots=True)
class FetchTree:
    """Fetch a peer's tree -> TreeArrived."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LoadRecords:
    """Load our records of these blocks, except missing and unparsable ones ->
    OwnRecords.
    """

    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class FetchRecords:
    """Fetch a peer's records of these blocks -> RecordsArrived."""

    peer: PeerId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CheckLocal:
    """Compare our own file with this record -> LocalChecked."""

    block_id: BlockId
    chunk: ChunkRecord


@dataclass(frozen=True, slots=True)
class FetchWindows:
    """Fetch windows of a chunk (ascending indices) from a peer and prove them against
    this record -> WindowsArrived.
    """

    peer: PeerId
    block_id: BlockId
    chunk: ChunkRecord
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteWindows:
    """Save an undo copy, write, sync and read back, all under the container's lock ->
    WindowsWritten.
    """

    block_id: BlockId
    chunk: ChunkRecord
    runs: tuple[ProvenWindows, ...]
    source: PeerId

    @property
    def length_bytes(self) -> int:
        """The number of bytes to write."""
        return sum(len(run.data) for run in self.runs)


@dataclass(frozen=True, slots=True)
class PutBlock:
    """Store a block's record, unless the block was deleted meanwhile, and recompute the
    container's counters -> BlockStored.
    """

    record: BlockRecord


@dataclass(frozen=True, slots=True)
class StoreTree:
    """Merge a tree into the stored one if that still has this generation ->
    TreeStored.
    """

    tree: ContainerTree
    generation: bytes


@dataclass(frozen=True, slots=True)
class AdvanceBcsId:
    """Raise the container's commit to `bcs_id` -> BcsIdAdvanced."""

    bcs_id: int


@dataclass(frozen=True, slots=True)
class Rescan:
    """Read all data again, store the resulting tree, and mark the replica UNHEALTHY on
    findings -> Scanned.
    """


@dataclass(frozen=True, slots=True)
class ReturnToService:
    """Set the state of an UNHEALTHY replica that scanned clean, if its tree still has
    this generation -> StateChanged.
    """

    state: ReplicaState
    generation: bytes


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """Report the outcome; the last request of a job. No event answers it."""

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
    """Our replica as stored; `tree` is None if none was ever built.

    `bcs_id` is the container's commit, 0 if the database has lost it.
    `recorded_bcs_id` is the highest commit in the container's block records. It is read
    if the container's commit is lost, and for an UNHEALTHY replica, in which an
    incomplete round may have left a block with a later commit. Otherwise it is None.
    """

    tree: ContainerTree | None
    generation: bytes
    state: ReplicaState
    bcs_id: int
    replica_index: int = 0
    recorded_bcs_id: int | None = None


@dataclass(frozen=True, slots=True)
class TreeArrived:
    """A peer's tree, checked."""

    peer: PeerId
    tree: ContainerTree


@dataclass(frozen=True, slots=True)
class OwnRecords:
    """Our records, by block."""

    records: Mapping[BlockId, BlockRecord]


@dataclass(frozen=True, slots=True)
class RecordsArrived:
    """A peer's records, by block."""

    peer: PeerId
    records: Mapping[BlockId, BlockRecord]


@dataclass(frozen=True, slots=True)
class LocalChecked:
    """The windows of our file that do not match (`bad`, ascending indices), and the
    file's length.
    """

    block_id: BlockId
    offset: int
    bad: tuple[int, ...]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class WindowsArrived:
    """The proven windows from a peer. If an error ended the fetch early, `code` is its
    code, `retryable` whether a retry may succeed, and `lacks_bytes` as in
    RequestFailed.
    """

    peer: PeerId
    block_id: BlockId
    offset: int
    runs: tuple[ProvenWindows, ...]
    bytes_fetched: int
    code: str = ""
    retryable: bool = False
    lacks_bytes: bool = False


@dataclass(frozen=True, slots=True)
class WindowsWritten:
    """The windows are durable. `unread_bytes` is, for each run, the number of
    overwritten bytes that were unreadable and are in no undo copy.
    """

    block_id: BlockId
    offset: int
    source: PeerId
    runs: tuple[ProvenWindows, ...]
    unread_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockStored:
    """The block's record is stored."""

    block_id: BlockId


@dataclass(frozen=True, slots=True)
class TreeStored:
    """The merged tree that is now stored."""

    tree: ContainerTree
    generation: bytes


@dataclass(frozen=True, slots=True)
class BcsIdAdvanced:
    """The container's commit is at least `bcs_id`."""

    bcs_id: int


@dataclass(frozen=True, slots=True)
class Scanned:
    """The tree that the scan stored, and the places of its findings: block and offset,
    as far as known.

    `lost` are the offsets, by block, of chunks that are on record but not in the tree:
    no byte of them was found.
    """

    tree: ContainerTree
    generation: bytes
    findings: tuple[tuple[BlockId | None, int | None], ...]
    state: ReplicaState
    lost: Mapping[BlockId, Collection[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The replica now has this state."""

    state: ReplicaState


class FailureKind(Enum):
    """The consequence of a failed request for the repair."""

    # The container is being deleted, or may no longer be changed.
    CONTAINER_GONE = "container_gone"
    # The block was deleted meanwhile, so it needs no repair.
    BLOCK_GONE = "block_gone"
    # Another writer stored a tree after we loaded ours.
    TREE_CHANGED = "tree_changed"
    # The block's file became shorter after we checked it.
    FILE_SHRANK = "file_shrank"
    # A row that concerns the block cannot be parsed.
    RECORD_INVALID = "record_invalid"
    DISK_FAILED = "disk_failed"
    OTHER = "other"


_FAILURE_KINDS = {
    ContainerNotFoundError.code: FailureKind.CONTAINER_GONE,
    ContainerStateError.code: FailureKind.CONTAINER_GONE,
    OperationInterruptedError.code: FailureKind.CONTAINER_GONE,
    BlockNotFoundError.code: FailureKind.BLOCK_GONE,
    StaleTreeError.code: FailureKind.TREE_CHANGED,
    ChunkGapError.code: FailureKind.FILE_SHRANK,
    RecordInvalidError.code: FailureKind.RECORD_INVALID,
    DiskError.code: FailureKind.DISK_FAILED,
}


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request failed; `code` is the error's stable code, `retryable` whether a later
    attempt may succeed.

    `lacks_bytes` means that the peer does not have the bytes. Otherwise they were not
    read, and may be good.
    """

    request: Request
    code: str
    message: str = ""
    retryable: bool = False
    lacks_bytes: bool = False

    @property
    def kind(self) -> FailureKind:
        """The consequence of the failure, by its code."""
        return _FAILURE_KINDS.get(self.code, FailureKind.OTHER)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The job must end now: it was cancelled, or the container is being deleted. It
    answers no request.
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
    """Options of one reconciliation.

    `return_to` is the state in which an UNHEALTHY replica returns to service; with None
    it stays UNHEALTHY, as in Ozone. The conditions are:

    - Every peer sent its tree.
    - A full scan after all repairs found no fault, and the tree has not changed since.
    - Our plan is empty, and its verdict is MATCH or REPAIRABLE.
    - Our commit is not behind that of any block seen here or at a peer in this job.

    The controller chooses the state (scm.registry): CLOSED only if a replica is or was
    CLOSED or all have one commit, otherwise QUASI_CLOSED. If a replica wrongly reports
    CLOSED, SCM closes the container at its commit and drops the others.

    At the end all data is read once more, as in Ozone, so that damage which no tree
    shows yet is repaired in the same job. `skip_final_scan` omits this read if nothing
    was changed, for jobs of the automatic mode.
    """

    fetches_max: int = 4
    rounds_max: int = 3
    return_to: ReplicaState | None = None
    skip_final_scan: bool = False

    def __post_init__(self) -> None:
        assert self.fetches_max >= 1
        assert self.rounds_max >= 1
        assert self.return_to in (None, ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED)
