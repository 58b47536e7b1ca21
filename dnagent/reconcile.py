"""Reconciliation: one container's repair on one datanode, as a state machine without I/O.

`start()` and `step(event)` return requests; whoever carries them out (dnagent.runner, or a simulation) answers each
with exactly one event, in any order, and the machine ends with a `Report`. Nothing here waits, reads or writes.

A round is: own tree and all peers' trees -> one plan -> records, a page of blocks at a time -> per chunk: which of our
windows are bad, those windows from the sources in turn, written as they are proven -> block records -> tree -> scan.
A scan that shows damage the plan had not seen starts another round.

What makes it safe, and what every change here must keep:

- Our own recorded checksums decide what is good. Only where we have no record is a peer's taken, and only if it
  hashes to that peer's healthy tree entry (or, where no peer holds the chunk whole, two holders recorded the same)
  and no other replica's record says otherwise.
- Bytes reach a `WriteWindows` only as `Proven`, which `prove` alone makes, by comparing them with that record; windows
  that match here are never among them. Bytes are durable before a record names them, records before the tree does.
- A file never grows past a gap. A chunk that no record of ours names is added only whole, right behind one that is.
- A peer's tombstone changes our tree, nothing else; a block with a tombstone is not repaired.
- A kill between any two requests leaves a state in which the next run does the rest and rewrites nothing.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TypeAlias, assert_never

from dnagent.requests import (
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
    Outcome,
    OutcomeState,
    OwnLoaded,
    OwnRecords,
    PeerOutcome,
    Progress,
    PutBlock,
    ReconcileOptions,
    RecordsArrived,
    Report,
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
from merkle.checksum import ChecksumType
from merkle.limits import PEERS_MAX
from merkle.plan import BlockRepair, ChunkRepair, Evidence, EvidenceKind, RepairPlan, Verdict, plan_repair
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from merkle.windows import Proven, is_sound, runs_of

# Records of so many blocks are held at a time, of every holder; a page more costs one round trip.
RECORDS_PAGE_BLOCKS = 64
# A peer that failed or lied this often in one job is not asked again in it.
STRIKES_MAX = 3
# A tree that changes under us so often is being rewritten by something; the next job tries again.
STALE_TREES_MAX = 5
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


# Codes of local failures that mean the container is going away or no longer ours to change.
_GONE = frozenset({"container_not_found", "container_state", "interrupted"})
# The block was deleted while we worked on it: nothing is wrong, and nothing is left to do.
_BLOCK_GONE = frozenset({"block_not_found", "block_deleted"})
_Refusal: TypeAlias = tuple[Verdict, EvidenceKind, str]
_WORST_FIRST = (Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.UNKNOWN)


@dataclass(slots=True, eq=False)
class _ChunkWork:
    """One chunk being mended; `wanted` are the windows still lacking proven bytes, None before the check."""

    offset: int
    record: ChunkRecord
    is_new: bool
    sources: list[PeerId]
    partial_sources: frozenset[PeerId]
    wanted: set[int] | None = None
    held: list[tuple[Proven, PeerId]] = field(default_factory=list)
    fetching: bool = False
    writing: bool = False
    unreachable: bool = False
    done: bool = False
    failed: bool = False

    @property
    def is_settled(self) -> bool:
        return self.done or self.failed

    def position(self, run: Proven) -> int:
        return self.offset + self.record.window(run.first)[0]


@dataclass(slots=True, eq=False)
class _BlockWork:
    """One block being mended; `chunks` ascending, all before `first_open` settled."""

    repair: BlockRepair
    own: BlockRecord | None
    records: Mapping[PeerId, BlockRecord]
    # The holders' tree entries by offset.
    entries: Mapping[PeerId, Mapping[int, ChunkTree]]
    chunks: list[_ChunkWork] = field(default_factory=list)
    by_offset: dict[int, _ChunkWork] = field(default_factory=dict)
    first_open: int = 0
    # Where what our record names, or will name, ends: there another chunk may begin.
    ends: set[int] = field(default_factory=set)
    file_bytes: int = 0
    is_clean: bool = True
    gone: bool = False
    stored: bool = False
    new_record: BlockRecord | None = None

    @property
    def block_id(self) -> BlockId:
        return self.repair.block_id

    def open_chunks(self) -> Iterator[_ChunkWork]:
        """Those not settled, in order."""
        while self.first_open < len(self.chunks) and self.chunks[self.first_open].is_settled:
            self.first_open += 1
        return (chunk for chunk in islice(self.chunks, self.first_open, None) if not chunk.is_settled)

    @property
    def is_settled(self) -> bool:
        return next(self.open_chunks(), None) is None


class Reconciliation:
    """One container's repair on one datanode; see the module's docstring for the contract."""

    def __init__(
        self, container_id: ContainerId, own: PeerId, peers: Sequence[PeerId], options: ReconcileOptions | None = None
    ) -> None:
        assert len(peers) <= PEERS_MAX
        assert len(set(peers)) == len(peers)
        assert own not in peers
        self.outcome: Outcome | None = None
        self._container_id = container_id
        self._options = options or ReconcileOptions()
        self._phase = _Phase.LOADING
        self._out: list[Request] = []
        self._in_flight = 0
        self._peers = tuple(sorted(peers))
        # Of the job.
        self._strikes: dict[PeerId, int] = dict.fromkeys(self._peers, 0)
        self._peer_codes: dict[PeerId, str] = {}
        self._bytes_from: dict[PeerId, int] = dict.fromkeys(self._peers, 0)
        self._counters: dict[str, int] = dict.fromkeys(Progress.__slots__[1:], 0)
        self._halt: RequestFailed | None = None
        self._claimed: set[BlockId] = set()
        self._bcs_seen = 0
        self._changed = False
        self._scanned_clean = False
        self._findings: tuple[tuple[BlockId | None, int | None], ...] = ()
        # Of the round.
        self._own_tree: ContainerTree | None = None
        self._own_ready = False
        self._generation = b""
        self._state: ReplicaState | None = None
        self._bcs_id = 0
        self._trees: dict[PeerId, ContainerTree] = {}
        self._plan: RepairPlan | None = None
        # How many blocks of the plan were begun.
        self._begun = 0
        self._page: tuple[BlockRepair, ...] = ()
        self._own_records: Mapping[BlockId, BlockRecord] = {}
        self._peer_records: dict[PeerId, Mapping[BlockId, BlockRecord]] = {}
        self._blocks: dict[BlockId, _BlockWork] = {}
        self._repaired: dict[BlockId, dict[int, ChunkTree]] = {}
        self._tombstones: tuple[BlockTree, ...] = ()
        self._failures: dict[BlockId, dict[int, tuple[Verdict, Evidence]]] = {}
        self._is_clean = True
        self._adopted_bcs_id = 0
        self._must_scan = False
        self._stale_trees = 0

    # -- the interface --

    def start(self) -> list[Request]:
        """The first requests."""
        self._begin_round()
        return self._taken()

    def step(self, event: Event) -> list[Request]:
        """Take in what happened; return what to do about it. After the end nothing is done about anything."""
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
            case LocalChecked():
                self._local_checked(event)
            case WindowsArrived():
                self._windows_arrived(event)
            case WindowsWritten():
                self._windows_written(event)
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
    def progress(self) -> Progress:
        """How far it is."""
        return Progress(self._phase.value, **self._counters)

    # -- rounds --

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
            if self._strikes[peer] < STRIKES_MAX:
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
        self._bcs_seen = max(self._bcs_seen, event.bcs_id)
        self._own_ready = True
        if not event.state.is_closed:
            self._finish(OutcomeState.REFUSED, "container_state", f"the replica is {event.state.value}")
        elif event.replica_index > 0:
            self._finish(OutcomeState.REFUSED, "container_state", "the replica is erasure-coded")

    def _all_loaded(self) -> None:
        if self._halt is not None and self._phase is _Phase.LOADING and not self._own_ready:
            # Our own tree cannot be read: nothing is safe to do but to look at the data, which replaces it.
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
        self._plan = plan_repair(own, self._trees)
        self._claimed.update(self._plan.claimed_deleted)
        self._tombstones = self._adopted(self._plan)
        self._begun = 0
        self._counters["blocks_planned"] += len(self._plan.blocks)
        self._is_clean = not self._plan.evidence
        self._phase = _Phase.REPAIRING
        self._next_page()

    def _adopted(self, plan: RepairPlan) -> tuple[BlockTree, ...]:
        return plan.tombstones

    # -- records --

    def _next_page(self) -> None:
        assert self._plan is not None
        self._blocks = {}
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
            if wanted and self._strikes[peer] < STRIKES_MAX:
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
            work = _BlockWork(repair, own, theirs, {peer: self._entries(peer, repair.block_id) for peer in theirs})
            work.ends.update(ours.end for ours in (own.chunks if own else ()))
            self._blocks[repair.block_id] = work
            for record in (*theirs.values(), *((own,) if own else ())):
                self._bcs_seen = max(self._bcs_seen, record.bcs_id)
            for chunk in repair.chunks:
                chosen = self._chosen(work, chunk)
                if isinstance(chosen, ChunkRecord):
                    self._add_chunk(work, chunk, chosen)
                else:
                    self._give_up(work, chunk.offset, *chosen)
        for work in self._blocks.values():
            self._block_settled(work)
        self._go_on()

    def _chosen(self, work: _BlockWork, chunk: ChunkRepair) -> ChunkRecord | _Refusal:
        """The record that decides what this chunk's bytes are, or why none may."""
        if work.own is not None and chunk.offset in work.own.by_offset:
            own = work.own.by_offset[chunk.offset]
            if is_sound(own):
                return own
            return Verdict.UNKNOWN, EvidenceKind.UNVERIFIABLE, "our record has no usable checksums"
        proven: dict[PeerId, ChunkRecord] = {}
        others: dict[PeerId, ChunkRecord] = {}
        for peer, record in work.records.items():
            if chunk.offset not in record.by_offset:
                continue
            theirs = record.by_offset[chunk.offset]
            entry = work.entries[peer].get(chunk.offset)
            if entry is None or not entry.checksum_matches or not theirs.is_verifiable:
                others[peer] = theirs
            elif self._is_proven_record(theirs, entry):
                proven[peer] = theirs
            else:
                # Its record and its tree contradict each other, so neither says anything about the chunk.
                self._strike(peer, "remote_protocol")
        agreed = {_essence(theirs) for theirs in (*proven.values(), *others.values())}
        if proven and len(agreed) == 1:
            return proven[next(peer for peer in (*chunk.sources, *sorted(proven)) if peer in proven)]
        if len(agreed) > 1:
            return Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, "the peers' records disagree"
        if not chunk.sources and len(others) > 1 and all(is_sound(theirs) for theirs in others.values()):
            # All copies are bad somewhere, so no tree can bear a record out; those who wrote it agree on it.
            return others[min(others)]
        if any(peer not in work.records for peer in work.repair.holders):
            return Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, "a holder gave no record"
        if agreed and not any(theirs.is_verifiable for theirs in others.values()):
            return Verdict.UNKNOWN, EvidenceKind.UNVERIFIABLE, "the peers' records have no checksums"
        return Verdict.UNRECOVERABLE, EvidenceKind.RECORD_UNPROVEN, "no peer's record is borne out by its tree"

    def _is_proven_record(self, record: ChunkRecord, entry: ChunkTree) -> bool:
        return is_sound(record) and record.data_checksum == entry.data_checksum

    def _entries(self, peer: PeerId, block_id: BlockId) -> dict[int, ChunkTree]:
        blocks = self._trees[peer].blocks
        at = bisect_left(blocks, block_id, key=lambda block: block.block_id)
        found = blocks[at] if at < len(blocks) and blocks[at].block_id == block_id else None
        return {chunk.offset: chunk for chunk in found.chunks} if found else {}

    def _add_chunk(self, work: _BlockWork, chunk: ChunkRepair, record: ChunkRecord) -> None:
        is_new = work.own is None or chunk.offset not in work.own.by_offset
        if is_new and work.own is not None and _overlaps(record, work.own.chunks):
            detail = "our record has other chunks here"
            self._give_up(work, chunk.offset, Verdict.CONFLICT, EvidenceKind.CHUNKINGS_OVERLAP, detail)
            return
        sources = list(dict.fromkeys((*chunk.sources, *chunk.partial_sources)))
        added = _ChunkWork(chunk.offset, record, is_new, sources, frozenset(chunk.partial_sources))
        work.chunks.append(added)
        work.by_offset[chunk.offset] = added

    # -- chunks --

    def _start_chunks(self) -> None:
        """Begin as many chunks as may be under way, in order: bytes can be fetched ahead, and wait to be written."""
        left = self._options.fetches_max
        for work in self._blocks.values():
            for chunk in islice(work.open_chunks(), left):
                left -= 1
                if chunk.wanted is None and not chunk.fetching:
                    chunk.fetching = True
                    self._ask(CheckLocal(work.block_id, chunk.record))

    def _local_checked(self, event: LocalChecked) -> None:
        work, chunk = self._work(event.block_id, event.offset)
        chunk.fetching = False
        chunk.wanted = set(event.bad)
        work.file_bytes = max(work.file_bytes, event.file_bytes)
        self._counters["bytes_planned"] += sum(chunk.record.window(index)[1] for index in event.bad)
        self._advance(work)

    def _windows_arrived(self, event: WindowsArrived) -> None:
        self._count_bytes(event.peer, event.bytes_fetched)
        work, chunk = self._work(event.block_id, event.offset)
        chunk.fetching = False
        assert chunk.wanted is not None
        for run in event.runs:
            assert chunk.wanted.issuperset(run.windows)
            chunk.wanted.difference_update(run.windows)
            chunk.held.append((run, event.peer))
        chunk.unreachable = chunk.unreachable or event.retryable
        if event.retryable:
            self._strike(event.peer, event.code)
            # It was cut off while it was of use: it may send the rest. Strikes bound how often.
            chunk.sources.append(event.peer)
        elif chunk.wanted and event.peer not in chunk.partial_sources:
            # It called the chunk healthy and yet did not send it so.
            self._strike(event.peer, event.code or "remote_protocol")
        self._advance(work)

    def _windows_written(self, event: WindowsWritten) -> None:
        work, chunk = self._work(event.block_id, event.offset)
        chunk.writing = False
        self._changed = self._must_scan = True
        for run in event.runs:
            work.file_bytes = max(work.file_bytes, chunk.position(run) + len(run.data))
            self._counters["bytes_written"] += len(run.data)
            self._counters["windows_written"] += run.count
        self._advance(work)

    def _advance(self, work: _BlockWork) -> None:
        """Do for each chunk of a block, in order, what can be done now."""
        if self._halt is not None or work.gone:
            return
        # Those under way are the first ones open, and no more than may be.
        is_first = True
        for chunk in list(islice(work.open_chunks(), self._options.fetches_max)):
            if chunk.wanted is not None:
                self._advance_chunk(work, chunk, is_first=is_first)
            is_first = is_first and chunk.is_settled
        self._block_settled(work)

    def _advance_chunk(self, work: _BlockWork, chunk: _ChunkWork, *, is_first: bool) -> None:
        """Write, fetch, or settle one chunk; one that is not the first open one may still be given its place."""
        self._write_held(work, chunk)
        if chunk.wanted and not chunk.fetching:
            self._fetch_next(work, chunk)
        if chunk.writing or chunk.fetching:
            return
        if not chunk.wanted and not chunk.held and (not chunk.is_new or self._follows(work, chunk)):
            chunk.done = True
            work.ends.add(chunk.record.end)
            self._counters["chunks_repaired"] += 1
            if self._differs_at_all(work, chunk):
                detail = "mended here, but a peer recorded other checksums than we did"
                self._give_up(work, chunk.offset, Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, detail)
        elif is_first:
            self._chunk_failed(work, chunk)

    def _write_held(self, work: _BlockWork, chunk: _ChunkWork) -> None:
        if chunk.writing or not chunk.held or not self._may_extend(work, chunk):
            return
        reach = work.file_bytes
        ready: list[Proven] = []
        source = chunk.held[0][1]
        for run, peer in sorted(chunk.held, key=lambda held: held[0].first):
            # One request has one source, so that the audit line can name it.
            if peer == source and self._fits(chunk.position(run), reach):
                ready.append(run)
                reach = max(reach, chunk.position(run) + len(run.data))
        if not ready:
            # Another source's run may be the one that closes the gap.
            for run, peer in sorted(chunk.held, key=lambda held: held[0].first):
                if self._fits(chunk.position(run), reach):
                    ready, source = [run], peer
                    break
            else:
                return
        chunk.held = [held for held in chunk.held if held[0] not in ready]
        chunk.writing = True
        self._ask(WriteWindows(work.block_id, chunk.record, tuple(ready), source))

    def _fits(self, position: int, file_bytes: int) -> bool:
        return position <= file_bytes

    def _may_extend(self, work: _BlockWork, chunk: _ChunkWork) -> bool:
        """Whether a chunk may be written now: one that no record of ours names only whole, and without a hole."""
        return not chunk.is_new or (not chunk.wanted and self._follows(work, chunk))

    def _follows(self, work: _BlockWork, chunk: _ChunkWork) -> bool:
        """Whether a record of ours names, or will name, what ends where the chunk begins."""
        return chunk.offset == 0 or chunk.offset in work.ends

    def _fetch_next(self, work: _BlockWork, chunk: _ChunkWork) -> None:
        """Ask the next source for what is still lacking: those without a strike first, healthy ones before others."""
        usable = [peer for peer in chunk.sources if self._strikes[peer] < STRIKES_MAX]
        if len(usable) < len(chunk.sources):
            chunk.unreachable = True
        if not usable:
            chunk.sources = []
            return
        disagreeing = {
            peer
            for peer in usable
            if (record := work.records.get(peer)) is not None
            and (theirs := record.by_offset.get(chunk.offset)) is not None
            and _essence(theirs) != _essence(chunk.record)
        }
        peer = min(usable, key=lambda p: (p in disagreeing, p in chunk.partial_sources, self._strikes[p]))
        chunk.sources.remove(peer)
        chunk.fetching = True
        assert chunk.wanted is not None
        self._ask(FetchWindows(peer, work.block_id, chunk.record, tuple(sorted(chunk.wanted))))

    def _chunk_failed(self, work: _BlockWork, chunk: _ChunkWork) -> None:
        """Nothing more can be done for this chunk in this round; say why."""
        assert chunk.wanted is not None
        if not chunk.wanted:
            before = self._failures.get(work.block_id, {})
            verdict = before[min(before)][0] if before else Verdict.UNRECOVERABLE
            self._give_up(
                work, chunk.offset, verdict, EvidenceKind.HOLE, "what lies before it is missing, and is not to be had"
            )
        elif chunk.unreachable:
            detail = f"{_windows(chunk.wanted)}: a source did not answer"
            self._give_up(work, chunk.offset, Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, detail)
        elif self._differs_at_all(work, chunk):
            detail = f"{_windows(chunk.wanted)}: a peer recorded other checksums than we did"
            self._give_up(work, chunk.offset, Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, detail)
        else:
            detail = f"{_windows(chunk.wanted)}: bad everywhere"
            self._give_up(work, chunk.offset, Verdict.UNRECOVERABLE, EvidenceKind.WINDOWS_UNPROVEN, detail)
        chunk.failed = True
        chunk.held.clear()

    def _differs_at_all(self, work: _BlockWork, chunk: _ChunkWork) -> bool:
        """Whether a peer recorded something else for this chunk; a record that its own tree belies does not count."""
        for peer, record in work.records.items():
            theirs = record.by_offset.get(chunk.offset)
            if theirs is None or _essence(theirs) == _essence(chunk.record):
                continue
            entry = work.entries[peer].get(chunk.offset)
            if entry is None or not entry.checksum_matches or theirs.data_checksum == entry.data_checksum:
                return True
        return False

    def _give_up(self, work: _BlockWork, offset: int, verdict: Verdict, kind: EvidenceKind, detail: str) -> None:
        work.is_clean = False
        fact = Evidence(kind, work.block_id, offset, detail)
        self._failures.setdefault(work.block_id, {})[offset] = verdict, fact

    def _work(self, block_id: BlockId, offset: int) -> tuple[_BlockWork, _ChunkWork]:
        work = self._blocks[block_id]
        return work, work.by_offset[offset]

    # -- blocks --

    def _block_settled(self, work: _BlockWork) -> None:
        """Once all chunks of a block are, store its record if that changed."""
        if work.stored or work.gone or self._halt is not None or not work.is_settled:
            return
        work.stored = True
        chunks = {ours.offset: ours for ours in work.own.chunks} if work.own else {}
        chunks.update({chunk.offset: chunk.record for chunk in work.chunks if chunk.is_new and chunk.done})
        covered = [record for record in work.records.values() if _covers(chunks, record)]
        own_bcs_id = work.own.bcs_id if work.own else 0
        bcs_id = max([own_bcs_id, *(record.bcs_id for record in covered)]) if work.is_clean else own_bcs_id
        if len(covered) < len(work.records):
            work.is_clean = False
        if not work.is_clean:
            self._is_clean = False
        elif work.chunks:
            self._adopted_bcs_id = max(self._adopted_bcs_id, bcs_id)
        ordered = tuple(chunks[offset] for offset in sorted(chunks))
        if work.own is not None:
            work.new_record = BlockRecord(
                self._container_id, work.block_id, bcs_id, ordered, work.own.metadata, work.own.replica_index
            )
        elif ordered:
            # The peer that knows most of the block describes it; the same one whoever is asked first.
            knowing = max(
                (work.records[peer] for peer in sorted(work.records)),
                key=lambda record: (_covers(chunks, record), record.bcs_id),
            )
            # Our list is whole: there is no pending last chunk that this mark would have readers look for.
            metadata = tuple(entry for entry in knowing.metadata if entry[0] != "incremental")
            work.new_record = BlockRecord(self._container_id, work.block_id, bcs_id, ordered, metadata)
        if work.new_record is not None and work.new_record != work.own:
            self._ask(PutBlock(work.new_record))
        else:
            self._note_repaired(work)

    def _block_stored(self, work: _BlockWork) -> None:
        self._changed = self._must_scan = True
        if work.own is None:
            self._counters["blocks_added"] += 1
        self._note_repaired(work)

    def _note_repaired(self, work: _BlockWork) -> None:
        self._counters["blocks_done"] += 1
        for chunk in work.chunks:
            if chunk.done:
                record = chunk.record
                entry = ChunkTree(record.offset, record.length_bytes, record.data_checksum)
                self._repaired.setdefault(work.block_id, {})[record.offset] = entry

    def _block_gone(self, block_id: BlockId) -> None:
        """It was deleted meanwhile: forget it, and let the tree say what deletion made of it."""
        self._drop(self._blocks[block_id])
        self._failures.pop(block_id, None)
        self._repaired.pop(block_id, None)

    def _damaged_again(self, work: _BlockWork) -> None:
        """The file shrank while we worked on it: leave the block as it is, and let the scan start another round."""
        self._is_clean = False
        self._must_scan = True
        self._drop(work)

    def _drop(self, work: _BlockWork) -> None:
        """Do nothing more for a block; what is under way for it is heard and forgotten."""
        work.gone = True
        for chunk in work.chunks:
            chunk.failed = True
            chunk.held.clear()

    # -- after the blocks --

    def _store_tree(self) -> None:
        """Lay what was repaired and which deletes were learned over our tree as it is stored."""
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
        if self._halt is None and self._is_clean and self._adopted_bcs_id > self._bcs_id:
            self._ask(AdvanceBcsId(self._adopted_bcs_id))
        else:
            self._scan_if_needed()

    def _scan_if_needed(self) -> None:
        if self._halt is not None:
            self._conclude()
            return
        self._phase = _Phase.SCANNING
        if self._must_scan or self._wants_return():
            self._ask(Rescan())
        else:
            self._after_scan()

    def _wants_return(self) -> bool:
        """Whether only a clean scan stands between an unhealthy replica and its return to service."""
        return (
            self._options.return_to is not None
            and self._state is ReplicaState.UNHEALTHY
            and not self._scanned_clean
            and not self._failures
            and self._plan is not None
            and self._plan.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)
        )

    def _scanned(self, event: Scanned) -> None:
        self._counters["scans"] += 1
        self._own_tree, self._generation, self._state = event.tree, event.generation, event.state
        self._scanned_clean = not event.findings
        # What a deleted block lacks is nobody's loss.
        deleted = {block.block_id for block in event.tree.blocks if block.deleted}
        self._findings = tuple(place for place in event.findings if place[0] not in deleted)
        self._must_scan = False

    def _after_scan(self) -> None:
        if self._halt is not None:
            self._conclude()
            return
        assert self._own_tree is not None
        self._plan = plan_repair(self._own_tree, self._trees)
        left = [(block.block_id, chunk.offset) for block in self._plan.blocks for chunk in block.chunks]
        fresh = bool(self._plan.tombstones) or any(
            offset not in self._failures.get(block_id, {}) for block_id, offset in left
        )
        if fresh and self._counters["rounds"] < self._options.rounds_max:
            self._begin_round()
            return
        for block_id, offset in left:
            fact = Evidence(EvidenceKind.DAMAGED_AGAIN, block_id, offset, "still or again damaged after the last round")
            self._failures.setdefault(block_id, {}).setdefault(offset, (Verdict.UNKNOWN, fact))
        if (
            self._state is ReplicaState.UNHEALTHY
            and self._scanned_clean
            and self._options.return_to is not None
            and self._plan.is_empty
            and not self._failures
            and self._plan.verdict in (Verdict.MATCH, Verdict.REPAIRABLE)
            and self._bcs_id >= self._bcs_seen
        ):
            self._phase = _Phase.RETURNING
            self._ask(ReturnToService(self._options.return_to))
            return
        self._conclude()

    # -- failures --

    def _failed(self, event: RequestFailed) -> None:
        match event.request:
            case FetchTree(peer) | FetchRecords(peer):
                self._strike(peer, event.code)
            case FetchWindows(peer, block_id, chunk_record):
                self._strike(peer, event.code)
                work, chunk = self._work(block_id, chunk_record.offset)
                chunk.fetching = False
                chunk.unreachable = chunk.unreachable or event.retryable
                self._advance(work)
            case LoadOwn() if self._phase is _Phase.RELOADING:
                self._finish(OutcomeState.FAILED, event.code, event.message)
            case LoadOwn() if event.code in _GONE:
                self._finish(OutcomeState.REFUSED, event.code, event.message)
            case StoreTree() if event.code == "tree_stale" and self._stale_trees < STALE_TREES_MAX:
                # A scan or a delete was faster: our repairs are on disk, so lay them over what is stored now.
                self._stale_trees += 1
                self._phase = _Phase.RELOADING
                self._ask(LoadOwn())
            case CheckLocal(block_id) | WriteWindows(block_id) if event.code in _BLOCK_GONE:
                self._block_gone(block_id)
            case PutBlock(record) if event.code in _BLOCK_GONE:
                self._block_gone(record.block_id)
            case WriteWindows(block_id) if event.code == "chunk_gap":
                self._damaged_again(self._blocks[block_id])
            case PutBlock(record) if event.code == "chunk_gap":
                self._damaged_again(self._blocks[record.block_id])
            case _ if event.code in _GONE:
                self._finish(OutcomeState.INTERRUPTED, event.code, event.message)
            case _:
                # The disk, or the undo budget: what is done is done; nothing new is begun.
                self._halt = self._halt or event

    def _strike(self, peer: PeerId, code: str) -> None:
        self._strikes[peer] += 1
        self._peer_codes[peer] = code

    # -- the end --

    def _conclude(self) -> None:
        if self._halt is not None:
            self._finish(OutcomeState.FAILED, self._halt.code, self._halt.message)
        else:
            self._finish(OutcomeState.DONE)

    def _finish(self, state: OutcomeState, code: str = "", message: str = "") -> None:
        """Everything under way is forgotten: its answers come too late to matter."""
        progress = self.progress
        self._phase = _Phase.DONE
        failures = [failure for of_block in self._failures.values() for failure in of_block.values()]
        evidence = [*(self._plan.evidence if self._plan else ()), *(fact for _, fact in failures)]
        for place in self._findings:
            evidence.append(Evidence(EvidenceKind.FINDINGS_REMAIN, *place, "found by the last scan"))
        self.outcome = Outcome(
            container_id=self._container_id,
            state=state,
            verdict=self._verdict(),
            progress=progress,
            error_code=code,
            message=message,
            evidence=tuple(evidence[:EVIDENCE_MAX]),
            claimed_deleted=tuple(sorted(self._claimed)),
            peers=tuple(
                PeerOutcome(peer, self._peer_codes.get(peer, "ok"), self._bytes_from[peer]) for peer in self._peers
            ),
            replica_state=self._state,
            data_checksum=self._own_tree.data_checksum if self._own_tree else None,
        )
        self._out.append(Report(self.outcome))

    def _verdict(self) -> Verdict | None:
        if self._plan is None:
            return None
        failed = {verdict for of_block in self._failures.values() for verdict, _ in of_block.values()}
        seen = {self._plan.verdict, *failed}
        if self._findings and not seen & set(_WORST_FIRST):
            # Damage that no tree shows: chunks of which nobody has a byte left are in none.
            seen.add(Verdict.UNRECOVERABLE)
        if Verdict.UNRECOVERABLE in seen and len(self._trees) < len(self._peers):
            # A peer that did not answer may hold what the others lack.
            seen = seen - {Verdict.UNRECOVERABLE} | {Verdict.UNKNOWN}
        for verdict in _WORST_FIRST:
            if verdict in seen:
                return verdict
        if self._changed or self._plan.verdict is Verdict.REPAIRABLE:
            return Verdict.REPAIRABLE
        # Equal to those that answered is not equal to all.
        return Verdict.MATCH if len(self._trees) == len(self._peers) else Verdict.UNKNOWN

    def _count_bytes(self, peer: PeerId, length_bytes: int) -> None:
        self._bytes_from[peer] += length_bytes
        self._counters["bytes_fetched"] += length_bytes

    def _ask(self, request: Request) -> None:
        self._in_flight += 1
        self._out.append(request)

    def _taken(self) -> list[Request]:
        out, self._out = self._out, []
        return out


def _essence(chunk: ChunkRecord) -> tuple[int, ChecksumType, int, tuple[bytes, ...]]:
    """What two records of one chunk must have in common to mean the same bytes."""
    return chunk.length_bytes, chunk.checksum_type, chunk.bytes_per_checksum, chunk.checksums


def _overlaps(chunk: ChunkRecord, ours: Sequence[ChunkRecord]) -> bool:
    """Whether a chunk lies over one of ours, which are in order and do not overlap."""
    at = bisect_left(ours, chunk.offset, key=lambda own: own.offset)
    return any(own.offset < chunk.end and chunk.offset < own.end for own in ours[max(at - 1, 0) : at + 1])


def _covers(chunks: Mapping[int, ChunkRecord], record: BlockRecord) -> bool:
    """Whether every chunk of a peer's record is ours too, by offset and length."""
    return all(
        (ours := chunks.get(theirs.offset)) is not None and ours.length_bytes == theirs.length_bytes
        for theirs in record.chunks
    )


def _windows(wanted: Iterable[int]) -> str:
    """Window numbers for people, shortened: "windows 3, 7-9"."""
    runs = [str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in runs_of(sorted(wanted))]
    return "windows " + ", ".join(runs[:10]) + (", ..." if len(runs) > 10 else "")
