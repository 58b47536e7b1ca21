"""What a reconciliation knows: of the job, of one round, of one page of blocks.

A new round, and a new page, is a new value: nothing of the one before is left over.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from merkle.outcome import COUNTERS, Evidence, EvidenceKind, Verdict, worst_verdict
from merkle.plan import BlockRepair, RepairPlan
from merkle.record import BlockRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree, TreeBuilder
from repair.block_repair import BlockRepairer, Failure, Sources
from repair.requests import RequestFailed


class Phase(Enum):
    """What a reconciliation does now; the values are shown as progress."""

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
    """What lasts from the first request of a job to its outcome."""

    sources: Sources
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    # The local failure after which nothing new is begun.
    halt: RequestFailed | None = None
    # The plan of the latest round, or after its scan.
    plan: RepairPlan | None = None
    claimed: set[BlockId] = field(default_factory=set)
    # The highest commit of a block seen here or at a peer.
    bcs_seen: int = 0
    # Whether anything on our disk was changed.
    changed: bool = False
    scanned_clean: bool = False
    # Places where the latest scan found faults, without those in deleted blocks.
    findings: tuple[tuple[BlockId | None, int | None], ...] = ()
    # Chunks by block that the latest scan found without a byte on disk.
    lost: Mapping[BlockId, Collection[int]] = field(default_factory=dict)
    stale_trees: int = 0


@dataclass(slots=True)
class OurReplica:
    """Our replica as it was last loaded, stored or scanned."""

    tree: ContainerTree | None = None
    generation: bytes = b""
    state: ReplicaState | None = None
    bcs_id: int = 0
    # The highest commit in our block records, where it may be above the container's.
    recorded_bcs_id: int | None = None

    @property
    def committed(self) -> int:
        """The container's commit; if it is lost, the highest of our records."""
        return self.bcs_id or self.recorded_bcs_id or 0


@dataclass(slots=True)
class RoundState:
    """What belongs to one round: trees, what was repaired, what failed."""

    own_ready: bool = False
    trees: dict[PeerId, ContainerTree] = field(default_factory=dict)
    # How many blocks of the plan were begun.
    begun: int = 0
    repaired: dict[BlockId, dict[int, ChunkTree]] = field(default_factory=dict)
    tombstones: tuple[BlockTree, ...] = ()
    failures: dict[BlockId, dict[int, Failure]] = field(default_factory=dict)
    is_clean: bool = True
    adopted_bcs_id: int = 0
    must_scan: bool = False


@dataclass(slots=True)
class PageState:
    """The blocks whose records are held at a time."""

    repairs: tuple[BlockRepair, ...] = ()
    own_records: Mapping[BlockId, BlockRecord] = field(default_factory=dict)
    peer_records: dict[PeerId, Mapping[BlockId, BlockRecord]] = field(default_factory=dict)
    blocks: dict[BlockId, BlockRepairer] = field(default_factory=dict)
    settled: set[BlockId] = field(default_factory=set)


def _verdict_of(
    job: RepairState, round_: RoundState, *, has_all_trees: bool, is_complete: bool
) -> Verdict | None:
    """The verdict on all replicas that answered; None where none can be given.

    `is_complete` says that the repair came to its end.
    """
    if job.plan is None:
        return None
    failed = {verdict for block in round_.failures.values() for verdict, _ in block.values()}
    seen = {job.plan.verdict, *failed}
    if job.findings and is_complete and seen <= {Verdict.MATCH, Verdict.REPAIRABLE}:
        # Damage that no tree shows: a chunk of which no replica has a byte is in none.
        seen.add(Verdict.UNRECOVERABLE)
    if Verdict.UNRECOVERABLE in seen and not has_all_trees:
        # A peer that did not answer may hold what the others lack.
        seen = seen - {Verdict.UNRECOVERABLE} | {Verdict.UNKNOWN}
    worst = worst_verdict(seen)
    if worst not in (Verdict.MATCH, Verdict.REPAIRABLE):
        return worst
    if job.changed or job.findings or job.plan.verdict is Verdict.REPAIRABLE:
        return Verdict.REPAIRABLE
    if not is_complete:
        # The trees' common part says nothing about what was not compared any more.
        return None
    # Equal to those that answered is not equal to all.
    return Verdict.MATCH if has_all_trees else Verdict.UNKNOWN


def evidence_of(job: RepairState, round_: RoundState) -> tuple[Evidence, ...]:
    """What the verdict rests on: the plan, what failed, what the last scan found."""
    failed = [fact for block in round_.failures.values() for _, fact in block.values()]
    found = [
        Evidence(EvidenceKind.FINDINGS_REMAIN, *place, "found by the last scan")
        for place in job.findings
    ]
    return (*(job.plan.evidence if job.plan else ()), *failed, *found)


def repaired_tree(container_id: ContainerId, ours: OurReplica, round_: RoundState) -> ContainerTree:
    """Our tree with what was repaired and which deletes were learned in this round."""
    builder = TreeBuilder(container_id, ours.tree)
    for block_id, chunks in round_.repaired.items():
        for chunk in chunks.values():
            builder.add_chunk(block_id, chunk)
    for tombstone in round_.tombstones:
        builder.set_deleted(tombstone.block_id, tombstone.data_checksum)
    return builder.build()


def chunks_of(tree: ContainerTree, block_id: BlockId) -> dict[int, ChunkTree]:
    """A block's chunks in a tree, by offset; none where the tree has no such block."""
    at = bisect_left(tree.blocks, block_id, key=lambda block: block.block_id)
    found = tree.blocks[at] if at < len(tree.blocks) else None
    if found is None or found.block_id != block_id:
        return {}
    return {chunk.offset: chunk for chunk in found.chunks}


def _planned_tombstones(plan: RepairPlan) -> tuple[BlockTree, ...]:
    return plan.tombstones


@dataclass(frozen=True, slots=True)
class RepairRules:
    """The rules that a reconciliation applies and tests exchange for wrong ones."""

    block_repairer: type[BlockRepairer] = BlockRepairer
    tombstones_to_adopt: Callable[[RepairPlan], tuple[BlockTree, ...]] = _planned_tombstones
    verdict: Callable[..., Verdict | None] = _verdict_of
