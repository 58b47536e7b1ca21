"""The state of a reconciliation: of the job, of one round, of one page of blocks.

Each round and each page starts with a new value, so no state of an earlier one is left.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from merkle.limits import RECORDS_CHUNKS_MAX
from merkle.outcome import COUNTERS, Evidence, EvidenceKind, Verdict, worst_verdict
from merkle.plan import BlockRepair, RepairPlan
from merkle.record import BlockRecord
from merkle.replica import PeerId, ReplicaState
from merkle.survey import chunk_verdict
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from repair.block_repair import BlockRepairer, Failure
from repair.requests import RequestFailed
from repair.sources import Sources

# Bounds the records in memory, of every holder; each page costs one round trip.
PAGE_BLOCKS_MAX = 64
PAGE_CHUNKS_MAX = RECORDS_CHUNKS_MAX // 2
# With SHA-256 over every 512 bytes, checksums take 7 % of the data's size.
PAGE_DATA_BYTES_MAX = 1 << 30


class Phase(Enum):
    """The phases of a reconciliation; the values are shown as progress."""

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


@dataclass(slots=True)
class RepairState:
    """State from the first request of a job to its outcome."""

    sources: Sources
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    # The local failure after which no new work starts.
    halt: RequestFailed | None = None
    # The plan at the start of the latest round, or after its scan.
    plan: RepairPlan | None = None
    claimed: set[BlockId] = field(default_factory=set)
    # The highest commit of a block seen here or at a peer.
    bcs_seen: int = 0
    # Something on our disk was changed.
    changed: bool = False
    scanned_clean: bool = False
    # The places of the latest scan's findings, except those in deleted blocks.
    findings: tuple[tuple[BlockId | None, int | None], ...] = ()
    # Offsets, by block, of chunks of which the latest scan found no byte on disk.
    lost: Mapping[BlockId, Collection[int]] = field(default_factory=dict)
    stale_trees: int = 0


@dataclass(slots=True)
class OurReplica:
    """Our replica as last loaded, stored or scanned."""

    tree: ContainerTree | None = None
    generation: bytes = b""
    state: ReplicaState | None = None
    bcs_id: int = 0
    # The highest commit in our block records; None unless it may be above the
    # container's.
    recorded_bcs_id: int | None = None

    @property
    def committed(self) -> int:
        """The container's commit; if it is lost, the highest of our records."""
        return self.bcs_id or self.recorded_bcs_id or 0


@dataclass(slots=True)
class RoundState:
    """State of one round: the peers' trees, and what was repaired and what failed."""

    own_ready: bool = False
    trees: dict[PeerId, ContainerTree] = field(default_factory=dict)
    # The number of planned blocks whose repair was started.
    started: int = 0
    repaired: dict[BlockId, dict[int, ChunkTree]] = field(default_factory=dict)
    tombstones: tuple[BlockTree, ...] = ()
    failures: dict[BlockId, dict[int, Failure]] = field(default_factory=dict)
    is_clean: bool = True
    adopted_bcs_id: int = 0
    must_scan: bool = False


@dataclass(slots=True)
class PageState:
    """The blocks that are repaired together, with their records."""

    repairs: tuple[BlockRepair, ...] = ()
    own_records: Mapping[BlockId, BlockRecord] = field(default_factory=dict)
    peer_records: dict[PeerId, Mapping[BlockId, BlockRecord]] = field(default_factory=dict)
    blocks: dict[BlockId, BlockRepairer] = field(default_factory=dict)
    settled: set[BlockId] = field(default_factory=set)


def _verdict_of(
    job: RepairState, round_: RoundState, *, has_all_trees: bool, is_complete: bool
) -> Verdict | None:
    """The verdict on all replicas that answered; None if there is none.

    `is_complete` is true if the repair was neither interrupted nor failed.
    """
    if job.plan is None:
        return None
    failed = {verdict for block in round_.failures.values() for verdict, _ in block.values()}
    seen = {*_planned_verdicts(job.plan, round_), *failed}
    if job.findings and is_complete and seen <= {Verdict.MATCH, Verdict.REPAIRABLE}:
        # No chunk explains this damage, for example the lost file of a block without
        # checksums: a peer's file may hold the bytes, and nothing can prove it.
        seen.add(Verdict.UNKNOWN)
    if Verdict.UNRECOVERABLE in seen and not has_all_trees:
        # A peer that did not answer may hold the chunk.
        seen = seen - {Verdict.UNRECOVERABLE} | {Verdict.UNKNOWN}
    worst = worst_verdict(seen)
    if worst not in (Verdict.MATCH, Verdict.REPAIRABLE):
        return worst
    if job.changed or job.findings or job.plan.verdict is Verdict.REPAIRABLE:
        return Verdict.REPAIRABLE
    if not is_complete:
        # The comparison was not completed.
        return None
    # A peer that did not answer may differ.
    return Verdict.MATCH if has_all_trees else Verdict.UNKNOWN


def _planned_verdicts(plan: RepairPlan, round_: RoundState) -> set[Verdict]:
    """The plan's verdict; if the trees call chunks UNRECOVERABLE, the verdict on each.

    Trees do not show files without a record. The plan has a chunk if such files, or
    copies that are damaged in another way, have to be read. Then what the repair found
    counts. Until that is known, the chunk is UNKNOWN.
    """
    if plan.verdict is not Verdict.UNRECOVERABLE:
        return {plan.verdict}
    planned = {(block.block_id, chunk.offset) for block in plan.blocks for chunk in block.chunks}
    found = set[Verdict]()
    for fact in plan.evidence:
        verdict, place = chunk_verdict(fact), (fact.block_id, fact.offset)
        if verdict is Verdict.UNRECOVERABLE and place in planned:
            assert fact.block_id is not None
            assert fact.offset is not None
            failure = round_.failures.get(fact.block_id, {}).get(fact.offset)
            verdict = failure[0] if failure else Verdict.UNKNOWN
        if verdict is not None:
            found.add(verdict)
    return found


def evidence_of(job: RepairState, round_: RoundState) -> tuple[Evidence, ...]:
    """The evidence for the verdict: of the plan, of failed chunks, of the last
    scan.
    """
    failed = [fact for block in round_.failures.values() for _, fact in block.values()]
    found = [
        Evidence(EvidenceKind.FINDINGS_REMAIN, *place, "found by the last scan")
        for place in job.findings
    ]
    return (*(job.plan.evidence if job.plan else ()), *failed, *found)


def repaired_tree(container_id: ContainerId, ours: OurReplica, round_: RoundState) -> ContainerTree:
    """Our tree with the chunks repaired and the tombstones adopted in this round."""
    builder = TreeBuilder(container_id, ours.tree)
    for block_id, chunks in round_.repaired.items():
        for chunk in chunks.values():
            builder.add_chunk(block_id, chunk)
    for tombstone in round_.tombstones:
        builder.set_deleted(tombstone.block_id, tombstone.data_checksum)
    return builder.build()


def page_length(repairs: Sequence[BlockRepair], trees: Collection[ContainerTree]) -> int:
    """How many of the next blocks, PAGE_BLOCKS_MAX at most, form a page.

    It is at least one, and no more than bounds the memory of the records.
    """
    assert len(repairs) <= PAGE_BLOCKS_MAX
    chunks, data_bytes = 0, 0
    for count, repair in enumerate(repairs):
        entries = [chunks_of(tree, repair.block_id).values() for tree in trees]
        chunks += max(map(len, entries), default=0)
        data_bytes += max((sum(c.length_bytes for c in entry) for entry in entries), default=0)
        if count and (chunks > PAGE_CHUNKS_MAX or data_bytes > PAGE_DATA_BYTES_MAX):
            return count
    return len(repairs)


def chunks_of(tree: ContainerTree, block_id: BlockId) -> dict[int, ChunkTree]:
    """A block's chunks in a tree, by offset; empty if the tree lacks the block."""
    block = tree.block(block_id)
    return {} if block is None else {chunk.offset: chunk for chunk in block.chunks}


def _planned_tombstones(plan: RepairPlan) -> tuple[BlockTree, ...]:
    return plan.tombstones


@dataclass(frozen=True, slots=True)
class RepairRules:
    """The rules of a reconciliation. A plan has narrower ones (repair.replica_plan);
    tests replace them by wrong ones.
    """

    block_repairer: Callable[..., BlockRepairer] = BlockRepairer
    tombstones_to_adopt: Callable[[RepairPlan], tuple[BlockTree, ...]] = _planned_tombstones
    verdict: Callable[..., Verdict | None] = _verdict_of
