"""Reconciliation: one container's repair on one datanode, as a state machine without
I/O.

`start()` and `step(event)` return requests; whoever carries them out (repair.runner,
or a simulation) answers each with exactly one event, in any order, and the machine ends
with a `Report`. Nothing here waits, reads or writes.

A round is: own tree and all peers' trees -> one plan -> records, a page of blocks at a
time -> per chunk: which of our windows are bad, those windows from the sources in turn,
written as they are proven -> block records -> tree -> scan. A scan that shows damage
the plan had not seen starts another round.

What makes it safe, and what every change here must keep:

- Our own recorded checksums decide what is good. Only where we have no record is a
  peer's taken, and only if it hashes to that peer's healthy tree entry (or, where no
  peer holds the chunk whole, if it proves every window of bytes that did not all come
  from where it came from) and no other replica's record says otherwise.
- Bytes reach a `WriteWindows` only as `Proven`, which `prove` alone makes, by comparing
  them with that record; windows that match here are never among them. Bytes are durable
  before a record names them, records before the tree does.
- A file never grows past a gap. A chunk that no record of ours names is added only
  whole, right behind one that is.
- A peer's tombstone changes our tree, nothing else; a block with a tombstone is not
  repaired.
- A container's commit says that we have all that was written up to it. A block that a
  round mended while another stayed broken has a later one. So one that is lost, or
  behind our block records in an UNHEALTHY replica, is taken from them only where
  nothing is left that any peer has and we lack, and before the replica returns to
  service.
- A kill between any two requests leaves a state in which the next run does the rest and
  rewrites nothing.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import assert_never

from merkle.limits import PEERS_MAX
from merkle.outcome import (
    COUNTERS,
    Evidence,
    EvidenceKind,
    OutcomeState,
    RepairOutcome,
    RepairProgress,
    Verdict,
    worst_verdict,
)
from merkle.plan import BlockRepair, RepairPlan, plan_repair
from merkle.record import BlockRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from repair.block_repair import BlockRepairer, Failure, Sources
from repair.requests import (
    AdvanceBcsId,
    BcsIdAdvanced,
    BlockStored,
    Cancelled,
    CheckLocal,
    Event,
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

# Records of so many blocks are held at a time, of every holder; a page more costs one
# round trip.
RECORDS_PAGE_BLOCKS = 64
# A tree that changes under us so often is being rewritten by something; the next job
# tries again.
_STALE_TREES_MAX = 5
# Evidence is a report, not a log: a wholly lost replica must not fill a message.
EVIDENCE_MAX = 1_000


class _Phase(Enum):
    LOADING = "loading"
    FIRST_SCAN = "first scan"
    RECORDS = "records"
    REPAIRING = "repairing"
    STORING = "storing the tree"
    RELOADING = "reloading the tree"
    COMMITTING = "committing"
    SCANNING = "scanning"
    RETURNING = "returning to service"
    DONE = "done"


# Codes of local failures that mean the container is going away or no longer ours to
# change.
_GONE = frozenset({"container_not_found", "container_state", "interrupted"})
# The block was deleted while we worked on it: nothing is wrong, and nothing is left to
# do.
_BLOCK_GONE = frozenset({"block_not_found", "block_deleted"})


class Reconciliation:
    """One container's repair on one datanode; see the module's docstring for the
    contract.
    """

    # What mends one block; tests put worse ones in its place.
    mending: type[BlockRepairer] = BlockRepairer

    def __init__(
        self,
        container_id: ContainerId,
        own: PeerId,
        peers: Sequence[PeerId],
        options: ReconcileOptions | None = None,
    ) -> None:
        assert len(peers) <= PEERS_MAX
        assert len(set(peers)) == len(peers)
        assert own not in peers
        self.outcome: RepairOutcome | None = None
        self._container_id = container_id
        self._options = options or ReconcileOptions()
        self._phase = _Phase.LOADING
        self._out: list[Request] = []
        self._in_flight = 0
        self._peers = tuple(sorted(peers))
        # Of the job.
        self._sources = Sources(self._peers)
        self._counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)
        self._halt: RequestFailed | None = None
        self._claimed: set[BlockId] = set()
        self._bcs_seen = 0
        self._changed = False
        self._scanned_clean = False
        self._findings: tuple[tuple[BlockId | None, int | None], ...] = ()
        self._lost: Mapping[BlockId, Collection[int]] = {}
        # Of the round.
        self._own_tree: ContainerTree | None = None
        self._own_ready = False
        self._generation = b""
        self._state: ReplicaState | None = None
        self._bcs_id = 0
        # The highest commit in our block records, where that may be beyond the
        # container's own.
        self._recorded_bcs_id: int | None = None
        self._trees: dict[PeerId, ContainerTree] = {}
        self._plan: RepairPlan | None = None
        # How many blocks of the plan were begun.
        self._begun = 0
        self._page: tuple[BlockRepair, ...] = ()
        self._own_records: Mapping[BlockId, BlockRecord] = {}
        self._peer_records: dict[PeerId, Mapping[BlockId, BlockRecord]] = {}
        self._blocks: dict[BlockId, BlockRepairer] = {}
        self._settled: set[BlockId] = set()
        self._repaired: dict[BlockId, dict[int, ChunkTree]] = {}
        self._tombstones: tuple[BlockTree, ...] = ()
        self._failures: dict[BlockId, dict[int, Failure]] = {}
        self._is_clean = True
        self._adopted_bcs_id = 0
        self._must_scan = False
        self._stale_trees = 0

    def start(self) -> list[Request]:
        """The first requests."""
        self._begin_round()
        return self._taken()

    def step(self, event: Event) -> list[Request]:
        """Take in what happened; return what to do about it. After the end nothing is
        done about anything.
        """
        if self._phase is _Phase.DONE:
            return []
        if isinstance(event, Cancelled):
            self._finish(OutcomeState.INTERRUPTED, "interrupted", event.reason)
            return self._taken()
        self._in_flight -= 1
        match event:
            case OwnLoaded():
                self._own_loaded(event)
            case TreeArrived(peer, tree):
                self._trees[peer] = tree
            case OwnRecords(records):
                self._own_records = records
            case RecordsArrived(peer, records):
                self._peer_records[peer] = records
            case LocalChecked(block_id):
                self._counters["bytes_planned"] += self._blocks[block_id].local_checked(event)
                self._advance(self._blocks[block_id])
            case WindowsArrived(_, block_id):
                self._counters["bytes_fetched"] += event.bytes_fetched
                self._blocks[block_id].windows_arrived(event)
                self._advance(self._blocks[block_id])
            case WindowsWritten(block_id):
                self._windows_written(event)
                self._blocks[block_id].windows_written(event)
                self._advance(self._blocks[block_id])
            case BlockStored(block_id):
                self._block_stored(self._blocks[block_id])
            case TreeStored(tree, generation):
                self._tree_stored(tree, generation)
            case BcsIdAdvanced(bcs_id):
                self._bcs_id = bcs_id
            case Scanned():
                self._scanned(event)
            case StateChanged(state):
                self._state = state
            case RequestFailed():
                self._failed(event)
            case _:
                assert_never(event)
        self._go_on()
        return self._taken()

    @property
    def progress(self) -> RepairProgress:
        """How far it is."""
        return RepairProgress(phase=self._phase.value, **self._counters)

    def _begin_round(self) -> None:
        self._phase = _Phase.LOADING
        self._counters["rounds"] += 1
        self._own_ready = False
        self._trees.clear()
        self._repaired.clear()
        self._failures.clear()
        self._is_clean = True
        self._adopted_bcs_id = 0
        self._must_scan = False
        self._ask(LoadOwn())
        for peer in self._peers:
            if self._sources.is_usable(peer):
                self._ask(FetchTree(peer))

    def _go_on(self) -> None:
        """Move to the next phase where the present one has nothing under way."""
        if self._phase is _Phase.REPAIRING and self._halt is None:
            self._start_chunks()
        if self._in_flight or self._phase is _Phase.DONE:
            return
        match self._phase:
            case _Phase.LOADING | _Phase.FIRST_SCAN:
                self._all_loaded()
            case _Phase.RECORDS:
                self._records_settled()
            case _Phase.REPAIRING:
                self._next_page()
            case _Phase.STORING:
                self._commit()
            case _Phase.RELOADING:
                self._store_tree()
            case _Phase.COMMITTING:
                self._scan_if_needed()
            case _Phase.SCANNING:
                self._after_scan()
            case _Phase.RETURNING:
                self._conclude()
            case _:
                assert_never(self._phase)

    def _own_loaded(self, event: OwnLoaded) -> None:
        self._own_tree, self._generation = event.tree, event.generation
        self._state, self._bcs_id = event.state, event.bcs_id
        self._recorded_bcs_id = event.recorded_bcs_id
        self._bcs_seen = max(self._bcs_seen, event.bcs_id, event.recorded_bcs_id or 0)
        self._own_ready = True
        if not event.state.is_closed:
            self._finish(
                OutcomeState.REFUSED, "container_state", f"the replica is {event.state.value}"
            )
        elif event.replica_index > 0:
            self._finish(OutcomeState.REFUSED, "container_state", "the replica is erasure-coded")

    def _all_loaded(self) -> None:
        if self._halt is not None and self._phase is _Phase.LOADING and not self._own_ready:
            # Our own tree cannot be read: nothing is safe to do but to look at the
            # data, which replaces it.
            self._phase = _Phase.SCANNING
            self._ask(Rescan())
        elif self._halt is not None:
            self._conclude()
        elif not self._trees:
            self._finish(OutcomeState.FAILED, "no_peer", "no peer gave a tree to compare with")
        elif self._own_tree is None or self._own_tree.data_checksum is None:
            # Records alone would claim health that nobody has looked at.
            self._phase = _Phase.FIRST_SCAN
            self._ask(Rescan())
        else:
            self._make_plan(self._own_tree)

    def _make_plan(self, own: ContainerTree) -> None:
        self._plan = plan_repair(own, self._trees, self._lost)
        self._claimed.update(self._plan.claimed_deleted)
        self._tombstones = self._adopted(self._plan)
        self._begun = 0
        self._counters["blocks_planned"] += len(self._plan.blocks)
        self._is_clean = not self._plan.evidence
        self._phase = _Phase.REPAIRING
        self._next_page()

    def _adopted(self, plan: RepairPlan) -> tuple[BlockTree, ...]:
        return plan.tombstones

    def _next_page(self) -> None:
        assert self._plan is not None
        self._blocks, self._settled = {}, set()
        if self._halt is not None or self._begun == len(self._plan.blocks):
            self._store_tree()
            return
        self._phase = _Phase.RECORDS
        self._page = self._plan.blocks[self._begun : self._begun + RECORDS_PAGE_BLOCKS]
        self._begun += len(self._page)
        self._own_records, self._peer_records = {}, {}
        self._ask(LoadRecords(tuple(block.block_id for block in self._page)))
        for peer in self._trees:
            wanted = tuple(block.block_id for block in self._page if peer in block.holders)
            if wanted and self._sources.is_usable(peer):
                self._ask(FetchRecords(peer, wanted))

    def _records_settled(self) -> None:
        self._phase = _Phase.REPAIRING
        if self._halt is not None:
            self._next_page()
            return
        for repair in self._page:
            own = self._own_records.get(repair.block_id)
            theirs = {
                peer: records[repair.block_id]
                for peer, records in self._peer_records.items()
                if repair.block_id in records and peer in repair.holders
            }
            for record in (*theirs.values(), *((own,) if own else ())):
                self._bcs_seen = max(self._bcs_seen, record.bcs_id)
            self._blocks[repair.block_id] = self._mending(repair, own, theirs)
        for work in self._blocks.values():
            self._settle(work)
        self._go_on()

    def _mending(
        self, repair: BlockRepair, own: BlockRecord | None, theirs: Mapping[PeerId, BlockRecord]
    ) -> BlockRepairer:
        # Of a holder that was heard and has no readable record nothing can disagree.
        telling = [
            peer for peer in repair.holders if peer in theirs or peer not in self._peer_records
        ]
        entries = {peer: self._entries(peer, repair.block_id) for peer in telling}
        return self.mending(
            repair,
            own,
            theirs,
            entries,
            self._sources,
            committed=self._committed,
            at_once_max=self._options.fetches_max,
        )

    def _entries(self, peer: PeerId, block_id: BlockId) -> dict[int, ChunkTree]:
        blocks = self._trees[peer].blocks
        at = bisect_left(blocks, block_id, key=lambda block: block.block_id)
        found = blocks[at] if at < len(blocks) and blocks[at].block_id == block_id else None
        return {chunk.offset: chunk for chunk in found.chunks} if found else {}

    def _start_chunks(self) -> None:
        """Begin as many chunks as may be under way, in order: bytes can be fetched
        ahead, and wait to be written.
        """
        left = self._options.fetches_max
        for work in self._blocks.values():
            if not work.is_dropped:
                left -= work.start(left)
                self._take(work)

    def _advance(self, work: BlockRepairer) -> None:
        if self._halt is None:
            work.advance()
            self._take(work)
            self._settle(work)

    def _take(self, work: BlockRepairer) -> None:
        """Its requests are ours."""
        for request in work.out:
            self._ask(request)
        work.out.clear()

    def _windows_written(self, event: WindowsWritten) -> None:
        self._changed = self._must_scan = True
        self._counters["bytes_written"] += sum(len(run.data) for run in event.runs)
        self._counters["windows_written"] += sum(run.count for run in event.runs)

    def _settle(self, work: BlockRepairer) -> None:
        """Once all chunks of a block are settled, store its record if that changed."""
        if work.block_id in self._settled or work.is_dropped or not work.is_settled:
            return
        self._settled.add(work.block_id)
        put, adopted_bcs_id = work.put(self._container_id)
        self._is_clean = self._is_clean and work.is_clean
        self._adopted_bcs_id = max(self._adopted_bcs_id, adopted_bcs_id)
        if work.failures:
            self._failures[work.block_id] = work.failures
        if put is not None:
            if self._recorded_bcs_id is not None:
                self._recorded_bcs_id = max(self._recorded_bcs_id, put.record.bcs_id)
            self._ask(put)
        else:
            self._note_repaired(work)

    def _block_stored(self, work: BlockRepairer) -> None:
        self._changed = self._must_scan = True
        if work.own is None:
            self._counters["blocks_added"] += 1
        self._note_repaired(work)

    def _note_repaired(self, work: BlockRepairer) -> None:
        self._counters["blocks_done"] += 1
        for record in work.repaired():
            self._counters["chunks_repaired"] += 1
            entry = ChunkTree(record.offset, record.length_bytes, record.data_checksum)
            self._repaired.setdefault(work.block_id, {})[record.offset] = entry

    def _block_gone(self, block_id: BlockId) -> None:
        """It was deleted meanwhile: forget it, and let the tree say what deletion made
        of it.
        """
        self._blocks[block_id].drop()
        self._failures.pop(block_id, None)
        self._repaired.pop(block_id, None)

    def _unreadable(self, work: BlockRepairer, message: str) -> None:
        """Our file cannot be looked at, say because it is a link or a folder: it is
        this block's fault alone.

        A disk that fails altogether shows in the next write, or in the scan.
        """
        self._is_clean = False
        for chunk in work.repair.chunks:
            fact = Evidence(EvidenceKind.FILE_UNREADABLE, work.block_id, chunk.offset, message)
            self._failures.setdefault(work.block_id, {})[chunk.offset] = Verdict.UNKNOWN, fact
        work.drop()

    def _damaged_again(self, work: BlockRepairer) -> None:
        """The file shrank while we worked on it: leave the block as it is, and let the
        scan start another round.
        """
        self._is_clean = False
        self._must_scan = True
        work.drop()

    def _store_tree(self) -> None:
        """Lay what was repaired and which deletes were learned over our tree as it is
        stored.
        """
        self._phase = _Phase.STORING
        if not self._repaired and not self._tombstones:
            self._commit()
            return
        builder = TreeBuilder(self._container_id, self._own_tree)
        for block_id, chunks in self._repaired.items():
            for chunk in chunks.values():
                builder.add_chunk(block_id, chunk)
        for tombstone in self._tombstones:
            builder.set_deleted(tombstone.block_id, tombstone.data_checksum)
        tree = builder.build()
        if tree == self._own_tree:
            self._commit()
        else:
            self._ask(StoreTree(tree, self._generation))

    def _tree_stored(self, tree: ContainerTree, generation: bytes) -> None:
        self._own_tree, self._generation = tree, generation
        self._changed = True
        self._counters["tombstones_adopted"] += len(self._tombstones)
        self._tombstones = ()

    def _commit(self) -> None:
        self._phase = _Phase.COMMITTING
        # A lost commit is not set to what this round happens to have mended: nobody
        # would see then that it was lost.
        is_known = self._bcs_id > 0 or self._recorded_bcs_id is None
        if (
            self._halt is None
            and self._is_clean
            and is_known
            and self._adopted_bcs_id > self._bcs_id
        ):
            self._ask(AdvanceBcsId(self._adopted_bcs_id))
        else:
            self._scan_if_needed()

    def _scan_if_needed(self) -> None:
        if self._halt is not None:
            self._conclude()
            return
        self._phase = _Phase.SCANNING
        unseen = not self._options.skip_final_scan and not self._counters["scans"]
        if self._must_scan or unseen or self._wants_return():
            self._ask(Rescan())
        else:
            self._after_scan()

    def _wants_return(self) -> bool:
        """Whether only a clean scan stands between an unhealthy replica and its return
        to service.
        """
        return (
            self._options.return_to is not None
            and self._state is ReplicaState.UNHEALTHY
            and not self._scanned_clean
            and not self._failures
            and self._plan is not None
            and self._plan.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)
            and len(self._trees) == len(self._peers)
        )

    def _scanned(self, event: Scanned) -> None:
        self._counters["scans"] += 1
        self._own_tree, self._generation, self._state = event.tree, event.generation, event.state
        self._scanned_clean = not event.findings
        # What a deleted block lacks is nobody's loss.
        deleted = {block.block_id for block in event.tree.blocks if block.deleted}
        self._findings = tuple(place for place in event.findings if place[0] not in deleted)
        self._lost = event.lost
        self._must_scan = False

    def _after_scan(self) -> None:
        if self._halt is not None:
            self._conclude()
            return
        assert self._own_tree is not None
        self._plan = plan_repair(self._own_tree, self._trees, self._lost)
        left = [
            (block.block_id, chunk.offset) for block in self._plan.blocks for chunk in block.chunks
        ]
        fresh = bool(self._plan.tombstones) or any(
            offset not in self._failures.get(block_id, {}) for block_id, offset in left
        )
        if fresh and self._counters["rounds"] < self._options.rounds_max:
            self._begin_round()
            return
        for block_id, offset in left:
            fact = Evidence(
                EvidenceKind.DAMAGED_AGAIN,
                block_id,
                offset,
                "still or again damaged after the last round",
            )
            self._failures.setdefault(block_id, {}).setdefault(offset, (Verdict.UNKNOWN, fact))
        is_whole = (
            self._plan.is_empty
            and not self._failures
            and self._plan.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)
            # One that is silent may have a later commit, or what nobody else has.
            and len(self._trees) == len(self._peers)
        )
        if is_whole and self._recorded_bcs_id is not None and self._recorded_bcs_id > self._bcs_id:
            self._phase = _Phase.COMMITTING
            self._ask(AdvanceBcsId(self._recorded_bcs_id))
        elif (
            is_whole
            and self._state is ReplicaState.UNHEALTHY
            and self._scanned_clean
            and self._options.return_to is not None
            and self._bcs_id >= self._bcs_seen
        ):
            self._phase = _Phase.RETURNING
            self._ask(ReturnToService(self._options.return_to, self._generation))
        else:
            self._conclude()

    @property
    def _committed(self) -> int:
        """The container's commit; where it is lost, as far as our records bear one
        out.
        """
        return self._bcs_id or self._recorded_bcs_id or 0

    def _failed(self, event: RequestFailed) -> None:
        match event.request:
            case FetchTree(peer) | FetchRecords(peer):
                self._sources.failed(peer, event.code)
            case FetchWindows(peer, block_id, chunk):
                self._blocks[block_id].fetch_failed(
                    peer, chunk.offset, event.code, retryable=event.retryable
                )
                self._advance(self._blocks[block_id])
            case StoreTree() if event.code == "tree_stale" and self._stale_trees < _STALE_TREES_MAX:
                # A scan or a delete was faster: our repairs are on disk, so lay them
                # over what is stored now.
                self._stale_trees += 1
                self._phase = _Phase.RELOADING
                self._ask(LoadOwn())
            case CheckLocal(block_id) | WriteWindows(block_id) if event.code in _BLOCK_GONE:
                self._block_gone(block_id)
            case PutBlock(record) if event.code in _BLOCK_GONE:
                self._block_gone(record.block_id)
            case CheckLocal(block_id) if event.code == "disk_failed":
                self._unreadable(self._blocks[block_id], event.message)
            case WriteWindows(block_id) if event.code == "chunk_gap":
                self._damaged_again(self._blocks[block_id])
            case PutBlock(record) if event.code == "chunk_gap":
                self._damaged_again(self._blocks[record.block_id])
            case _ if event.code in _GONE:
                self._finish(OutcomeState.INTERRUPTED, event.code, event.message)
            case _:
                # The disk, or the undo budget: what is done is done; nothing new is
                # begun.
                self._halt = self._halt or event

    def _conclude(self) -> None:
        if self._halt is not None:
            self._finish(OutcomeState.FAILED, self._halt.code, self._halt.message)
        else:
            self._finish(OutcomeState.DONE)

    def _finish(self, state: OutcomeState, code: str = "", message: str = "") -> None:
        """Everything under way is forgotten: its answers come too late to matter."""
        progress = self.progress
        self._phase = _Phase.DONE
        failures = [
            failure for of_block in self._failures.values() for failure in of_block.values()
        ]
        evidence = [*(self._plan.evidence if self._plan else ()), *(fact for _, fact in failures)]
        for place in self._findings:
            evidence.append(
                Evidence(EvidenceKind.FINDINGS_REMAIN, *place, "found by the last scan")
            )
        self.outcome = RepairOutcome(
            container_id=self._container_id,
            state=state,
            verdict=self._verdict(is_complete=state is OutcomeState.DONE),
            progress=progress,
            error_code=code,
            message=message,
            evidence=tuple(evidence[:EVIDENCE_MAX]),
            claimed_deleted=tuple(sorted(self._claimed)),
            peers=self._sources.outcomes(),
            replica_state=self._state,
            data_checksum=self._own_tree.data_checksum if self._own_tree else None,
        )
        self._out.append(ReportOutcome(self.outcome))

    def _verdict(self, *, is_complete: bool) -> Verdict | None:
        if self._plan is None:
            return None
        failed = {
            verdict for of_block in self._failures.values() for verdict, _ in of_block.values()
        }
        seen = {self._plan.verdict, *failed}
        if self._findings and is_complete and seen <= {Verdict.MATCH, Verdict.REPAIRABLE}:
            # Damage that no tree shows: chunks of which nobody has a byte left are in
            # none.
            seen.add(Verdict.UNRECOVERABLE)
        if Verdict.UNRECOVERABLE in seen and len(self._trees) < len(self._peers):
            # A peer that did not answer may hold what the others lack.
            seen = seen - {Verdict.UNRECOVERABLE} | {Verdict.UNKNOWN}
        worst = worst_verdict(seen)
        if worst not in (Verdict.MATCH, Verdict.REPAIRABLE):
            return worst
        if self._changed or self._findings or self._plan.verdict is Verdict.REPAIRABLE:
            return Verdict.REPAIRABLE
        if not is_complete:
            # What the trees have in common says nothing about what was not looked at
            # any more.
            return None
        # Equal to those that answered is not equal to all.
        return Verdict.MATCH if len(self._trees) == len(self._peers) else Verdict.UNKNOWN

    def _ask(self, request: Request) -> None:
        self._in_flight += 1
        self._out.append(request)

    def _taken(self) -> list[Request]:
        out, self._out = self._out, []
        return out
