"""The repair of one container on one datanode, as a state machine without I/O.

`start()` and `step(event)` return requests. The caller (repair.runner, or a simulation)
executes them and passes one event for each, in any order. The machine ends with a
`ReportOutcome`. Nothing here waits, reads or writes.

A round has these steps:

1. Load our tree and all peers' trees, and make one plan.
2. Load the records, a page of blocks at a time.
3. For each chunk, find our bad windows, fetch them from one source after the other, and
   write them as they are proven.
4. Store block records, then the tree, then scan. If the scan shows damage that the plan
   does not have, another round starts.

Safety rules that every change here must keep:

- Our own recorded checksums decide which bytes are good. A peer's record is used only
  if we have none and no other replica's record disagrees. It must hash to that peer's
  healthy tree entry. If no peer holds the chunk whole, it must instead prove every
  window, with bytes that do not all come from that peer.
- A `WriteWindows` takes only `ProvenWindows`, and only `prove` makes these, by
  comparing bytes with that record. Windows that match here are never among them. Bytes
  are durable before a record lists them, and records before the tree does.
- A file never grows past a gap. A chunk that our record does not list is added only
  whole, directly after one that it lists.
- A peer's tombstone changes our tree, nothing else; a block with a tombstone is not
  repaired.
- A container's commit means that we have all data written up to it. It may be lost. In
  an UNHEALTHY replica it may be behind a block that a round repaired while another
  stayed damaged. In both cases it is taken from our block records, but only if no peer
  has anything that we lack, and before the replica returns to service.
- After a kill between any two requests the next run does the rest and rewrites nothing.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

from merkle.limits import PEERS_MAX
from merkle.outcome import (
    Evidence,
    EvidenceKind,
    OutcomeState,
    RepairOutcome,
    RepairProgress,
    Verdict,
)
from merkle.plan import BlockRepair, plan_repair
from merkle.record import BlockRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ChunkTree, ContainerId, ContainerTree
from repair.block_repair import BlockRepairer
from repair.requests import (
    AdvanceBcsId,
    BcsIdAdvanced,
    BlockStored,
    Cancelled,
    CheckLocal,
    Event,
    FailureKind,
    FetchRecords,
    FetchTree,
    FetchWindows,
    LoadOwn,
    LoadRecords,
    LocalChecked,
    OwnLoaded,
    OwnRecords,
    PutBlock,
    ReconcileOptions,
    RecordsArrived,
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
    WindowsArrived,
    WindowsWritten,
    WriteWindows,
)
from repair.round import (
    PAGE_BLOCKS_MAX,
    OurReplica,
    PageState,
    Phase,
    RepairRules,
    RepairState,
    RoundState,
    chunks_of,
    evidence_of,
    page_length,
    repaired_tree,
)
from repair.sources import Sources

# A tree that another writer changes more often is left to the next job.
_STALE_TREES_MAX = 5
# Bounds the outcome's message, in case the whole replica is lost.
EVIDENCE_MAX = 1_000


class Reconciliation:
    """The repair of one container on one datanode; the module's docstring has the
    contract.
    """

    def __init__(
        self,
        container_id: ContainerId,
        own: PeerId,
        peers: Sequence[PeerId],
        options: ReconcileOptions | None = None,
        rules: RepairRules | None = None,
    ) -> None:
        """`rules` narrow the repair down to a plan; tests have wrong ones."""
        assert len(peers) <= PEERS_MAX
        assert len(set(peers)) == len(peers)
        assert own not in peers
        self.outcome: RepairOutcome | None = None
        self._container_id = container_id
        self._options = options or ReconcileOptions()
        self._rules = rules or RepairRules()
        self._phase = Phase.LOADING
        self._out: list[Request] = []
        self._in_flight = 0
        self._peers = tuple(sorted(peers))
        self._job = RepairState(Sources(self._peers))
        self._ours = OurReplica()
        self._round = RoundState()
        self._page = PageState()

    def start(self) -> list[Request]:
        """The first requests."""
        self._begin_round()
        return self._take_requests()

    def step(self, event: Event) -> list[Request]:
        """Handle an event and return the next requests; none after the end."""
        if self._phase is Phase.DONE:
            return []
        if isinstance(event, Cancelled):
            self._finish(OutcomeState.INTERRUPTED, "interrupted", event.reason)
            return self._take_requests()
        self._in_flight -= 1
        match event:
            case OwnLoaded():
                self._own_loaded(event)
            case TreeArrived(peer, tree):
                self._round.trees[peer] = tree
            case OwnRecords(records):
                self._page.own_records = records
            case RecordsArrived(peer, records):
                self._page.peer_records[peer] = records
            case LocalChecked(block_id):
                planned = self._page.blocks[block_id].local_checked(event)
                self._job.counters["bytes_planned"] += planned
                self._advance(self._page.blocks[block_id])
            case WindowsArrived(_, block_id):
                self._job.counters["bytes_fetched"] += event.bytes_fetched
                self._page.blocks[block_id].windows_arrived(event)
                self._advance(self._page.blocks[block_id])
            case WindowsWritten(block_id):
                self._windows_written(event)
                self._page.blocks[block_id].windows_written(event)
                self._advance(self._page.blocks[block_id])
            case BlockStored(block_id):
                self._block_stored(self._page.blocks[block_id])
            case TreeStored(tree, generation):
                self._tree_stored(tree, generation)
            case BcsIdAdvanced(bcs_id):
                self._ours.bcs_id = bcs_id
            case Scanned():
                self._scanned(event)
            case StateChanged(state):
                self._ours.state = state
            case RequestFailed():
                self._failed(event)
            case _:
                assert_never(event)
        self._continue()
        return self._take_requests()

    @property
    def progress(self) -> RepairProgress:
        """The current phase and the counters so far."""
        return RepairProgress(phase=self._phase.value, **self._job.counters)

    def _begin_round(self) -> None:
        self._phase = Phase.LOADING
        self._job.counters["rounds"] += 1
        self._round = RoundState()
        self._request(LoadOwn())
        for peer in self._peers:
            if self._job.sources.is_usable(peer):
                self._request(FetchTree(peer))

    def _continue(self) -> None:
        """Enter the next phase if the current one has no open requests."""
        if self._phase is Phase.REPAIRING and self._job.halt is None:
            self._start_chunks()
        if self._in_flight or self._phase is Phase.DONE:
            return
        match self._phase:
            case Phase.LOADING | Phase.FIRST_SCAN:
                self._all_loaded()
            case Phase.RECORDS:
                self._records_settled()
            case Phase.REPAIRING:
                self._next_page()
            case Phase.STORING:
                self._commit()
            case Phase.RELOADING:
                self._store_tree()
            case Phase.COMMITTING:
                self._scan_if_needed()
            case Phase.SCANNING:
                self._after_scan()
            case Phase.RETURNING:
                self._conclude()
            case _:
                assert_never(self._phase)

    def _own_loaded(self, event: OwnLoaded) -> None:
        self._ours.tree, self._ours.generation = event.tree, event.generation
        self._ours.state, self._ours.bcs_id = event.state, event.bcs_id
        self._ours.recorded_bcs_id = event.recorded_bcs_id
        self._job.bcs_seen = max(self._job.bcs_seen, event.bcs_id, event.recorded_bcs_id or 0)
        self._round.own_ready = True
        if not event.state.is_closed:
            self._finish(
                OutcomeState.REFUSED, "container_state", f"the replica is {event.state.value}"
            )
        elif event.replica_index > 0:
            self._finish(OutcomeState.REFUSED, "container_state", "the replica is erasure-coded")

    def _all_loaded(self) -> None:
        halted = self._job.halt is not None
        if halted and self._phase is Phase.LOADING and not self._round.own_ready:
            # Our own tree cannot be read. Only a scan is safe, and it replaces the
            # tree.
            self._phase = Phase.SCANNING
            self._request(Rescan())
        elif halted:
            self._conclude()
        elif not self._round.trees:
            self._finish(OutcomeState.FAILED, "no_peer", "no peer sent a tree to compare with")
        elif self._ours.tree is None or self._ours.tree.data_checksum is None:
            # A tree built from records alone would claim health that no scan has
            # checked.
            self._phase = Phase.FIRST_SCAN
            self._request(Rescan())
        else:
            self._make_plan(self._ours.tree)

    def _make_plan(self, own: ContainerTree) -> None:
        self._job.plan = plan_repair(own, self._round.trees, self._job.lost)
        self._job.claimed.update(self._job.plan.claimed_deleted)
        self._round.tombstones = self._rules.tombstones_to_adopt(self._job.plan)
        self._round.started = 0
        self._job.counters["blocks_planned"] += len(self._job.plan.blocks)
        self._round.is_clean = not self._job.plan.evidence
        self._phase = Phase.REPAIRING
        self._next_page()

    def _next_page(self) -> None:
        assert self._job.plan is not None
        self._page = PageState()
        if self._job.halt is not None or self._round.started >= len(self._job.plan.blocks):
            self._store_tree()
            return
        self._phase = Phase.RECORDS
        first = self._round.started
        left = self._job.plan.blocks[first : first + PAGE_BLOCKS_MAX]
        assert self._ours.tree is not None
        count = page_length(left, [self._ours.tree, *self._round.trees.values()])
        self._round.started += count
        self._page = PageState(left[:count])
        self._request(LoadRecords(tuple(block.block_id for block in self._page.repairs)))
        for peer in self._round.trees:
            wanted = tuple(block.block_id for block in self._page.repairs if peer in block.holders)
            if wanted and self._job.sources.is_usable(peer):
                self._request(FetchRecords(peer, wanted))

    def _records_settled(self) -> None:
        self._phase = Phase.REPAIRING
        if self._job.halt is not None:
            self._next_page()
            return
        for repair in self._page.repairs:
            own = self._page.own_records.get(repair.block_id)
            theirs = {
                peer: records[repair.block_id]
                for peer, records in self._page.peer_records.items()
                if repair.block_id in records and peer in repair.holders
            }
            for record in (*theirs.values(), *((own,) if own else ())):
                self._job.bcs_seen = max(self._job.bcs_seen, record.bcs_id)
            self._page.blocks[repair.block_id] = self._block_repairer(repair, own, theirs)
        for work in self._page.blocks.values():
            self._settle(work)
        self._continue()

    def _block_repairer(
        self, repair: BlockRepair, own: BlockRecord | None, theirs: Mapping[PeerId, BlockRecord]
    ) -> BlockRepairer:
        # A holder that answered without a readable record of the block cannot disagree.
        holders = [
            peer for peer in repair.holders if peer in theirs or peer not in self._page.peer_records
        ]
        entries = {peer: chunks_of(self._round.trees[peer], repair.block_id) for peer in holders}
        return self._rules.block_repairer(
            repair,
            own,
            theirs,
            entries,
            self._job.sources,
            committed=self._ours.committed,
            chunks_max=self._options.fetches_max,
        )

    def _start_chunks(self) -> None:
        """Start as many chunks as the options allow, in order. Bytes are fetched ahead
        and wait to be written.
        """
        left = self._options.fetches_max
        for work in self._page.blocks.values():
            if not work.is_dropped:
                left -= work.start(left)
                self._collect(work)

    def _advance(self, work: BlockRepairer) -> None:
        if self._job.halt is None:
            work.advance()
            self._collect(work)
            self._settle(work)

    def _collect(self, work: BlockRepairer) -> None:
        for request in work.out:
            self._request(request)
        work.out.clear()

    def _windows_written(self, event: WindowsWritten) -> None:
        self._job.changed = self._round.must_scan = True
        self._job.counters["bytes_written"] += sum(len(run.data) for run in event.runs)
        self._job.counters["windows_written"] += sum(run.count for run in event.runs)

    def _settle(self, work: BlockRepairer) -> None:
        """If all chunks of a block are settled, store its record if it changed."""
        if work.block_id in self._page.settled or work.is_dropped or not work.is_settled:
            return
        self._page.settled.add(work.block_id)
        put, adopted_bcs_id = work.put(self._container_id)
        self._round.is_clean = self._round.is_clean and work.is_clean
        self._round.adopted_bcs_id = max(self._round.adopted_bcs_id, adopted_bcs_id)
        if work.failures:
            self._round.failures[work.block_id] = work.failures
        if put is not None:
            if self._ours.recorded_bcs_id is not None:
                self._ours.recorded_bcs_id = max(self._ours.recorded_bcs_id, put.record.bcs_id)
            self._request(put)
        else:
            self._note_repaired(work)

    def _block_stored(self, work: BlockRepairer) -> None:
        self._job.changed = self._round.must_scan = True
        if work.own is None:
            self._job.counters["blocks_added"] += 1
        self._note_repaired(work)

    def _note_repaired(self, work: BlockRepairer) -> None:
        self._job.counters["blocks_done"] += 1
        for record in work.repaired():
            self._job.counters["chunks_repaired"] += 1
            entry = ChunkTree(record.offset, record.length_bytes, record.data_checksum)
            self._round.repaired.setdefault(work.block_id, {})[record.offset] = entry

    def _block_gone(self, block_id: BlockId) -> None:
        """Drop a block that was deleted meanwhile; the tree has its tombstone."""
        self._page.blocks[block_id].drop()
        self._round.failures.pop(block_id, None)

    def _unreadable(self, work: BlockRepairer, message: str) -> None:
        """Fail one block whose file or rows cannot be read, say because it is a link.

        If the whole disk fails, the next write or the scan will fail too.
        """
        self._round.is_clean = False
        for chunk in work.repair.chunks:
            fact = Evidence(EvidenceKind.FILE_UNREADABLE, work.block_id, chunk.offset, message)
            self._round.failures.setdefault(work.block_id, {})[chunk.offset] = Verdict.UNKNOWN, fact
        work.drop()

    def _damaged_again(self, work: BlockRepairer) -> None:
        """Drop a block whose file shrank meanwhile; the scan will start another
        round.
        """
        self._round.is_clean = False
        self._round.must_scan = True
        work.drop()

    def _store_tree(self) -> None:
        """Merge repaired chunks and adopted tombstones into our stored tree."""
        self._phase = Phase.STORING
        if not self._round.repaired and not self._round.tombstones:
            self._commit()
            return
        if self._ours.tree is None or self._ours.tree.data_checksum is None:
            # Our tree was lost meanwhile. One of the repaired chunks alone would call
            # all others missing; a scan builds the whole one. No commit is taken: what
            # we hold is not known before.
            self._round.must_scan = True
            self._scan_if_needed()
            return
        tree = repaired_tree(self._container_id, self._ours, self._round)
        if tree == self._ours.tree:
            self._commit()
        else:
            self._request(StoreTree(tree, self._ours.generation))

    def _tree_stored(self, tree: ContainerTree, generation: bytes) -> None:
        self._ours.tree, self._ours.generation = tree, generation
        self._job.changed = True
        self._job.counters["tombstones_adopted"] += len(self._round.tombstones)
        self._round.tombstones = ()

    def _commit(self) -> None:
        self._phase = Phase.COMMITTING
        # A lost commit is not replaced by that of one repaired block, which would hide
        # the loss.
        is_known = self._ours.bcs_id > 0 or self._ours.recorded_bcs_id is None
        if (
            self._job.halt is None
            and self._round.is_clean
            and is_known
            and self._round.adopted_bcs_id > self._ours.bcs_id
        ):
            self._request(AdvanceBcsId(self._round.adopted_bcs_id))
        else:
            self._scan_if_needed()

    def _scan_if_needed(self) -> None:
        if self._job.halt is not None:
            self._conclude()
            return
        self._phase = Phase.SCANNING
        is_unscanned = not self._options.skip_final_scan and not self._job.counters["scans"]
        if self._round.must_scan or is_unscanned or self._needs_scan_to_return():
            self._request(Rescan())
        else:
            self._after_scan()

    def _needs_scan_to_return(self) -> bool:
        """Whether an UNHEALTHY replica could return to service after a clean scan."""
        return (
            self._options.return_to is not None
            and self._ours.state is ReplicaState.UNHEALTHY
            and not self._job.scanned_clean
            and not self._round.failures
            and self._job.plan is not None
            and self._job.plan.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)
            and self._has_all_trees
        )

    def _scanned(self, event: Scanned) -> None:
        self._job.counters["scans"] += 1
        self._ours.tree, self._ours.generation = event.tree, event.generation
        self._ours.state = event.state
        self._job.scanned_clean = not event.findings
        # Missing data of a deleted block is not a loss.
        deleted = {block.block_id for block in event.tree.blocks if block.deleted}
        self._job.findings = tuple(place for place in event.findings if place[0] not in deleted)
        self._job.lost = event.lost
        self._round.must_scan = False

    def _after_scan(self) -> None:
        if self._job.halt is not None:
            self._conclude()
            return
        assert self._ours.tree is not None
        plan = plan_repair(self._ours.tree, self._round.trees, self._job.lost)
        self._job.plan = plan
        left = [(block.block_id, chunk.offset) for block in plan.blocks for chunk in block.chunks]
        fresh = bool(plan.tombstones) or any(
            offset not in self._round.failures.get(block_id, {}) for block_id, offset in left
        )
        if fresh and self._job.counters["rounds"] < self._options.rounds_max:
            self._begin_round()
            return
        for block_id, offset in left:
            detail = "still damaged, or damaged again, after the last round"
            fact = Evidence(EvidenceKind.DAMAGED_AGAIN, block_id, offset, detail)
            failures = self._round.failures.setdefault(block_id, {})
            failures.setdefault(offset, (Verdict.UNKNOWN, fact))
        is_whole = (
            plan.is_empty
            and not self._round.failures
            and plan.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)
            # A peer that did not answer may have a later commit or more data.
            and self._has_all_trees
        )
        recorded = self._ours.recorded_bcs_id
        if is_whole and recorded is not None and recorded > self._ours.bcs_id:
            self._phase = Phase.COMMITTING
            self._request(AdvanceBcsId(recorded))
        elif (
            is_whole
            and self._ours.state is ReplicaState.UNHEALTHY
            and self._job.scanned_clean
            and self._options.return_to is not None
            and self._ours.bcs_id >= self._job.bcs_seen
        ):
            self._phase = Phase.RETURNING
            self._request(ReturnToService(self._options.return_to, self._ours.generation))
        else:
            self._conclude()

    def _failed(self, event: RequestFailed) -> None:
        match event.request, event.kind:
            case ((FetchTree(peer) | FetchRecords(peer)), _):
                self._job.sources.record_failure(peer, event.code)
            case FetchWindows(peer, block_id, chunk), _:
                self._page.blocks[block_id].fetch_failed(peer, chunk.offset, event)
                self._advance(self._page.blocks[block_id])
            case StoreTree(), FailureKind.TREE_CHANGED if self._job.stale_trees < _STALE_TREES_MAX:
                # A scan or a delete stored a tree first. Our repairs are on disk, so
                # merge them into that tree.
                self._job.stale_trees += 1
                self._phase = Phase.RELOADING
                self._request(LoadOwn())
            case ((CheckLocal(block_id) | WriteWindows(block_id)), FailureKind.BLOCK_GONE):
                self._block_gone(block_id)
            case PutBlock(record), FailureKind.BLOCK_GONE:
                self._block_gone(record.block_id)
            case CheckLocal(block_id), FailureKind.DISK_FAILED:
                self._unreadable(self._page.blocks[block_id], event.message)
            case WriteWindows(block_id), FailureKind.RECORD_INVALID:
                self._unreadable(self._page.blocks[block_id], event.message)
            case PutBlock(record), FailureKind.RECORD_INVALID:
                self._unreadable(self._page.blocks[record.block_id], event.message)
            case WriteWindows(block_id), FailureKind.FILE_SHRANK:
                self._damaged_again(self._page.blocks[block_id])
            case PutBlock(record), FailureKind.FILE_SHRANK:
                self._damaged_again(self._page.blocks[record.block_id])
            case _, FailureKind.CONTAINER_GONE:
                self._finish(OutcomeState.INTERRUPTED, event.code, event.message)
            case _:
                # The disk failed or the undo budget is used up: keep what is repaired,
                # and start nothing new.
                self._job.halt = self._job.halt or event

    def _conclude(self) -> None:
        if self._job.halt is not None:
            self._finish(OutcomeState.FAILED, self._job.halt.code, self._job.halt.message)
        else:
            self._finish(OutcomeState.DONE)

    def _finish(self, state: OutcomeState, code: str = "", message: str = "") -> None:
        """Set the outcome; events of open requests are ignored from now on."""
        progress = self.progress
        self._phase = Phase.DONE
        self.outcome = RepairOutcome(
            container_id=self._container_id,
            state=state,
            verdict=self._rules.verdict(
                self._job,
                self._round,
                has_all_trees=self._has_all_trees,
                is_complete=state is OutcomeState.DONE,
            ),
            progress=progress,
            error_code=code,
            message=message,
            evidence=evidence_of(self._job, self._round)[:EVIDENCE_MAX],
            claimed_deleted=tuple(sorted(self._job.claimed)),
            peers=self._job.sources.outcomes(),
            replica_state=self._ours.state,
            data_checksum=self._ours.tree.data_checksum if self._ours.tree else None,
        )
        self._out.append(ReportOutcome(self.outcome))

    @property
    def _has_all_trees(self) -> bool:
        """Whether every peer sent a whole tree in this round; one that was never built
        shows tombstones alone.
        """
        whole = [tree for tree in self._round.trees.values() if tree.data_checksum is not None]
        return len(whole) == len(self._peers)

    def _request(self, request: Request) -> None:
        self._in_flight += 1
        self._out.append(request)

    def _take_requests(self) -> list[Request]:
        out, self._out = self._out, []
        return out
