"""Make the plan of one replica's repair (repair.replica_plan).

A plan is made by the repair's own state machine. Its requests to write are answered as
if they had been carried out, and noted; everything else is carried out. So each window
of a plan was fetched from its source and proven. Damage that only a scan of all data
finds is not in it: the plan knows what trees and records show.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import assert_never

from merkle.outcome import OutcomeState, RepairOutcome
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from merkle.windows import runs_of
from ozone.errors import ContainerStateError, TreeMissingError
from repair.ports import Peer, ReplicaAccess
from repair.reconciliation import Reconciliation
from repair.replica_plan import PlannedWrite, ReplicaPlan, record_fingerprint
from repair.requests import (
    AdvanceBcsId,
    BcsIdAdvanced,
    BlockStored,
    CheckLocal,
    Event,
    FetchRecords,
    FetchTree,
    FetchWindows,
    LoadOwn,
    LoadRecords,
    OwnLoaded,
    OwnRecords,
    PutBlock,
    ReconcileOptions,
    ReportOutcome,
    Request,
    RequestFailed,
    Rescan,
    ReturnToService,
    Scanned,
    StateChanged,
    StoreTree,
    TreeArrived,
    TreeStored,
    WindowsWritten,
    WriteWindows,
)
from repair.runner import execute_local, execute_remote
from runtime.errors import DiskError, OperationInterruptedError, PeerUnavailableError


def make_plan(
    container_id: ContainerId,
    own: PeerId,
    replica: ReplicaAccess,
    peers: Mapping[PeerId, Peer],
    *,
    may_return: bool,
    reserve: Callable[[int], None] = lambda _: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> ReplicaPlan:
    """What a repair of our replica would write now; nothing is written.

    `may_return` is whether an UNHEALTHY replica may return to service. `reserve` is
    called with the bytes to fetch before each read, and may block to limit the rate.

    Raises:
        TreeMissingError: our replica has no tree yet, so nobody knows what it lacks.
        OperationInterruptedError: `cancelled` returned True.
        ReconcileError: our replica or all peers cannot be read, or it is not closed.
    """
    # The controller gives the state with its order: here any one stands for it.
    return_to = ReplicaState.QUASI_CLOSED if may_return else None
    options = ReconcileOptions(rounds_max=1, return_to=return_to)
    machine = Reconciliation(container_id, own, sorted(peers), options)
    recorder = _Recorder(container_id, own, replica, peers, reserve)
    waiting = deque(machine.start())
    while machine.outcome is None:
        if cancelled():
            raise OperationInterruptedError("the caller no longer waits for this plan")
        request = waiting.popleft()
        waiting.extend(machine.step(recorder.answer(request)))
    return recorder.plan(machine.outcome)


class _Recorder:
    """Answers the requests of a repair: reads are carried out, and writes are noted."""

    def __init__(
        self,
        container_id: ContainerId,
        own: PeerId,
        replica: ReplicaAccess,
        peers: Mapping[PeerId, Peer],
        reserve: Callable[[int], None],
    ) -> None:
        self._container_id = container_id
        self._own = own
        self._replica = replica
        self._peers = peers
        self._reserve = reserve
        self._loaded: OwnLoaded | None = None
        # As it would be by now.
        self._tree: ContainerTree | None = None
        self._roots: dict[PeerId, int] = {}
        self._unread: dict[PeerId, str] = {}
        self._own_records: dict[BlockId, str | None] = {}
        self._windows: dict[tuple[BlockId, int], dict[int, PeerId]] = {}
        self._chunks: dict[tuple[BlockId, int], ChunkRecord] = {}
        self._records: dict[BlockId, BlockRecord] = {}
        self._bcs_id: int | None = None
        self._returns_to_service = False

    def answer(self, request: Request) -> Event:
        """The event that answers the request."""
        match request:
            case FetchTree() | FetchRecords() | FetchWindows():
                peer = self._peers[request.peer]
                event = execute_remote(request, self._container_id, peer, reserve=self._reserve)
                self._note_tree(event)
                return event
            case LoadOwn():
                self._loaded = self._replica.own()
                self._tree = self._loaded.tree
                return self._loaded
            case LoadRecords() | CheckLocal():
                event = execute_local(request, self._replica)
                if isinstance(event, OwnRecords) and isinstance(request, LoadRecords):
                    for block_id in request.block_ids:
                        record = event.records.get(block_id)
                        self._own_records[block_id] = record_fingerprint(record)
                return event
            case WriteWindows(block_id, chunk, runs, source):
                self._chunks[block_id, chunk.offset] = chunk
                sources = self._windows.setdefault((block_id, chunk.offset), {})
                for run in runs:
                    sources.update(dict.fromkeys(run.windows, source))
                return WindowsWritten(block_id, chunk.offset, source, runs, (0,) * len(runs))
            case PutBlock(record):
                self._records[record.block_id] = record
                return BlockStored(record.block_id)
            case StoreTree(tree, generation):
                self._tree = tree
                return TreeStored(tree, generation)
            case AdvanceBcsId(bcs_id):
                self._bcs_id = bcs_id
                return BcsIdAdvanced(bcs_id)
            case Rescan():
                return self._scanned()
            case ReturnToService(state, _):
                self._returns_to_service = True
                return StateChanged(state)
            case ReportOutcome():
                raise AssertionError("no request follows the outcome")
            case _:
                assert_never(request)

    def plan(self, outcome: RepairOutcome) -> ReplicaPlan:
        """The plan, from the outcome of the repair that was not carried out.

        Raises:
            ContainerStateError: the replica cannot be repaired in its state.
            PeerUnavailableError: no peer sent a tree.
            DiskError: our replica cannot be read.
        """
        if outcome.state is OutcomeState.REFUSED:
            raise ContainerStateError(outcome.message, container_id=self._container_id)
        if outcome.state is not OutcomeState.DONE:
            if not self._roots:
                failed = ", ".join(f"{peer}: {code}" for peer, code in self._unread.items())
                raise PeerUnavailableError(f"no peer sent a tree to compare with ({failed})")
            raise DiskError(f"our replica cannot be read: {outcome.message}")
        loaded = self._loaded
        assert loaded is not None
        assert loaded.tree is not None
        assert loaded.tree.data_checksum is not None
        assert self._tree is not None
        before = {block.block_id for block in loaded.tree.blocks if block.deleted}
        after = {block.block_id for block in self._tree.blocks if block.deleted}
        return ReplicaPlan(
            self._container_id,
            self._own,
            datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            loaded.generation,
            loaded.tree.data_checksum,
            loaded.state,
            self._roots,
            self._unread,
            outcome.verdict,
            self._own_records,
            tuple(self._writes()),
            self._records,
            tuple(sorted(after - before)),
            self._bcs_id,
            self._returns_to_service,
            outcome.evidence,
        )

    def _note_tree(self, event: Event) -> None:
        match event:
            case TreeArrived(peer, tree) if tree.data_checksum is not None:
                self._roots[peer] = tree.data_checksum
            case TreeArrived(peer, _):
                self._unread[peer] = "tree_missing"
            case RequestFailed(FetchTree(peer), code):
                self._unread[peer] = code

    def _scanned(self) -> Scanned:
        """A scan that finds what is planned done, and nothing else."""
        if self._loaded is None or self._tree is None or self._tree.data_checksum is None:
            raise TreeMissingError(
                f"container {self._container_id} has no tree yet, so nobody knows what it lacks",
                hint=f"Run `treefold scan {self._container_id}` first.",
                container_id=self._container_id,
            )
        return Scanned(self._tree, self._loaded.generation, (), self._loaded.state)

    def _writes(self) -> Iterator[PlannedWrite]:
        for (block_id, chunk_offset), sources in sorted(self._windows.items()):
            chunk = self._chunks[block_id, chunk_offset]
            for peer in sorted(set(sources.values())):
                own = sorted(index for index, source in sources.items() if source == peer)
                for run in runs_of(own):
                    low, _ = chunk.window(run.start)
                    high, size = chunk.window(run.stop - 1)
                    yield PlannedWrite(
                        block_id,
                        chunk_offset,
                        run.start,
                        len(run),
                        chunk_offset + low,
                        high + size - low,
                        peer,
                        chunk.data_checksum,
                    )
