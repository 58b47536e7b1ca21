"""One repair plan over all peers at once, and the verdict on a set of replicas.

All replicas are laid side by side. For each block the tombstone with the largest
checksum wins over everything else; without one, the block should hold the union of all
healthy chunks, so that the longest copy wins. A chunk is decided by its copies at one
offset:

- healthy copies that agree: every other replica can take it from them;
- healthy copies that disagree, or chunkings that overlap: CONFLICT, nobody's bytes are
  touched;
- only corrupt copies with different observed checksums: they may be bad in different
  windows, so that good ones can be put together and proven, window by window:
  REPAIRABLE;
- only corrupt copies, all alike: the same bytes are wrong everywhere: UNRECOVERABLE, as
  far as trees tell. A replica that has no entry for the chunk may have lost no more
  than the record, so its file is asked all the same;
- no copies in any tree, because whoever has the record has not a byte: known to that
  replica's scan alone, which hands such chunks to its plan.

A verdict speaks of the whole set: a plan may hold no work for us and say REPAIRABLE,
because a peer lacks what we have. The worst finding decides: UNRECOVERABLE, CONFLICT,
REPAIRABLE, MATCH, in this order. What nobody can verify (empty live blocks, and chunks
whose type NONE recorded no checksums: trees built from metadata have them, scanned ones
have not) is set aside on all sides first. The verdict is UNKNOWN where nothing else is
left or nothing was compared; and where a tree was never built, instead of a MATCH or a
loss that this replica might refute.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from merkle.outcome import Evidence, EvidenceKind, Verdict
from merkle.replica import PeerId
from merkle.survey import BadWindows, BlockSlots, ChunkSlot, TreeSurvey
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree

# Neighbouring chunks share a source up to this length, so that one request can bring
# several of them.
SPREAD_BYTES = 16 << 20


class ChunkFault(Enum):
    """What is wrong with our copy of a chunk."""

    MISSING = "missing"
    CORRUPT = "corrupt"


class DifferenceKind(Enum):
    """How replicas differ in one block or chunk."""

    MISSING_BLOCK = "missing_block"
    MISSING_CHUNK = "missing_chunk"
    CORRUPT_CHUNK = "corrupt_chunk"
    DELETED_BLOCK = "deleted_block"
    CONFLICTING_CHUNK = "conflicting_chunk"


@dataclass(frozen=True, slots=True)
class ChunkRepair:
    """One chunk to mend here: `sources` hold it healthy, best first.

    `partial_sources` hold it corrupt, or, where nobody is known to hold it whole, in a
    file that no record names.
    """

    offset: int
    fault: ChunkFault
    sources: tuple[PeerId, ...]
    partial_sources: tuple[PeerId, ...] = ()

    def __post_init__(self) -> None:
        assert self.sources or self.partial_sources


@dataclass(frozen=True, slots=True)
class BlockRepair:
    """One block to mend here, in offset order; `holders` are the peers with a live
    entry, and so with a record.
    """

    block_id: BlockId
    holders: tuple[PeerId, ...]
    chunks: tuple[ChunkRepair, ...]

    def __post_init__(self) -> None:
        assert self.chunks
        assert all(a.offset < b.offset for a, b in zip(self.chunks, self.chunks[1:], strict=False))


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """All that one replica should do to catch up with its peers; the verdict is on all
    of them together.
    """

    container_id: ContainerId
    verdict: Verdict
    blocks: tuple[BlockRepair, ...] = ()
    tombstones: tuple[BlockTree, ...] = ()
    claimed_deleted: tuple[BlockId, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        assert all(
            a.block_id < b.block_id for a, b in zip(self.blocks, self.blocks[1:], strict=False)
        )

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do here, whatever the verdict."""
        return not (self.blocks or self.tombstones)


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: `lacking` names the replicas to be mended, `sources` those that
    have it right.
    """

    kind: DifferenceKind
    block_id: BlockId
    offset: int | None
    lacking: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Replicas side by side, none of them ours: ascending by block, then by offset."""

    container_id: ContainerId
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    evidence: tuple[Evidence, ...] = ()


def plan_repair(
    ours: ContainerTree,
    peers: Mapping[PeerId, ContainerTree],
    lost: Mapping[BlockId, Collection[int]] | None = None,
) -> RepairPlan:
    """What to fetch, and from whom, so that we hold what all replicas together hold.
    Touches nothing healthy here.

    Peers that did not answer are not given; that the verdict does not speak of them is
    the caller's to say. An empty tree of ours plans the whole container; one that was
    never built (no root) plans nothing. `lost` are the offsets of chunks that we have
    on record and not a byte of. Those that no tree has are planned too, without effect
    on the verdict: a file that outlived its record, which is in no tree either, may
    hold them.

    Raises:
        TreeRefusedError: the trees are of different containers.
    """
    names = sorted(peers)
    survey = TreeSurvey([ours, *(peers[name] for name in names)])
    blocks: list[BlockRepair] = []
    tombstones: list[BlockTree] = []
    claimed: list[BlockId] = []
    if ours.data_checksum is None:
        never_built = Evidence(
            EvidenceKind.NO_ROOT, None, None, "our tree was never built: what we lack is unknown"
        )
        return RepairPlan(ours.container_id, Verdict.UNKNOWN, evidence=(never_built,))
    for block in survey.blocks():
        own, others = block.entries[0], block.entries[1:]
        if block.tombstone is not None:
            if own is None or not own.deleted or own.data_checksum < block.tombstone.data_checksum:
                tombstones.append(block.tombstone)
            if own is not None and not own.deleted:
                claimed.append(block.block_id)
            continue
        chunks = tuple(
            filter(None, (_chunk_repair(block.block_id, slot, names) for slot in block.slots))
        )
        if chunks:
            holders = tuple(
                name for name, entry in zip(names, others, strict=True) if entry is not None
            )
            blocks.append(BlockRepair(block.block_id, holders, chunks))
    return RepairPlan(
        ours.container_id,
        survey.verdict,
        _with_lost(blocks, lost or {}, [ours, *peers.values()], names),
        tuple(tombstones),
        tuple(claimed),
        survey.evidence,
    )


def compare(
    trees: Mapping[str, ContainerTree], *, bad_windows: Mapping[str, BadWindows] | None = None
) -> Comparison:
    """How replicas differ, all against all, and what can be done about it.

    With the bad windows of scans (window indices by block and offset, those beyond the
    end of a truncated file included) a chunk that is corrupt on all replicas is decided
    instead of presumed. They may also be of a file that outlived its record, where the
    replica's tree has no entry: a repair asks for its bytes too.

    Raises:
        TreeRefusedError: the trees are of different containers.
    """
    assert trees
    names = sorted(trees)
    windows = [(bad_windows or {}).get(name) for name in names]
    survey = TreeSurvey([trees[name] for name in names], windows)
    differences = [
        difference for block in survey.blocks() for difference in _differences(block, names)
    ]
    container_id = trees[names[0]].container_id
    return Comparison(container_id, survey.verdict, tuple(differences), survey.evidence)


def _chunk_repair(
    block_id: BlockId, slot: ChunkSlot, names: Sequence[PeerId]
) -> ChunkRepair | None:
    """What to do about our copy (replica 0): nothing if it is healthy, or if there is
    nowhere to look for better.
    """
    own = slot.copies[0]
    if slot.verdict not in (Verdict.REPAIRABLE, Verdict.UNRECOVERABLE) or (
        own is not None and own.checksum_matches
    ):
        return None
    fault = ChunkFault.MISSING if own is None else ChunkFault.CORRUPT
    # Replica 0 is ours, the peers follow.
    sources = [names[i - 1] for i in slot.healthy]
    # A copy that is corrupt exactly as ours is has no window that ours has not.
    partial = [names[i - 1] for i in slot.corrupt if i > 0 and slot.copies[i] != own]
    unrecorded = [names[i - 1] for i in slot.absent if i > 0 and not slot.healthy]
    if not (sources or partial or unrecorded):
        return None
    ranked, rest = (
        _ranked(partial, block_id, slot.offset),
        _ranked(unrecorded, block_id, slot.offset),
    )
    return ChunkRepair(
        slot.offset, fault, _ranked(sources, block_id, slot.offset), (*ranked, *rest)
    )


def _with_lost(
    blocks: Sequence[BlockRepair],
    lost: Mapping[BlockId, Collection[int]],
    trees: Iterable[ContainerTree],
    names: Sequence[PeerId],
) -> tuple[BlockRepair, ...]:
    """The plan's blocks and, of live ones, the chunks that we have on record and nobody
    in a tree.
    """
    entries = [block for tree in trees for block in tree.blocks if block.block_id in lost]
    deleted = {block.block_id for block in entries if block.deleted}
    known = {(block.block_id, chunk.offset) for block in entries for chunk in block.chunks}
    planned = {block.block_id: block for block in blocks}
    for block_id in lost.keys() - deleted if names else ():
        chunks = [
            ChunkRepair(offset, ChunkFault.MISSING, (), _ranked(names, block_id, offset))
            for offset in lost[block_id]
            if (block_id, offset) not in known
        ]
        if chunks:
            block = planned.get(block_id)
            whole = sorted(
                [*(block.chunks if block else ()), *chunks], key=lambda chunk: chunk.offset
            )
            planned[block_id] = BlockRepair(block_id, block.holders if block else (), tuple(whole))
    return tuple(planned[block_id] for block_id in sorted(planned))


def _ranked(peers: Sequence[PeerId], block_id: BlockId, offset: int) -> tuple[PeerId, ...]:
    """Every peer is as good as another, so let each be the first for some: reads spread
    over all of them.
    """
    if not peers:
        return ()
    first = (block_id + offset // SPREAD_BYTES) % len(peers)
    return (*peers[first:], *peers[:first])


def _differences(block: BlockSlots, names: Sequence[str]) -> Iterable[Difference]:
    def named(replicas: Iterable[int]) -> tuple[str, ...]:
        return tuple(names[i] for i in replicas)

    if block.tombstone is not None:
        if block.undeleted:
            deleted = [i for i, entry in enumerate(block.entries) if entry == block.tombstone]
            yield Difference(
                DifferenceKind.DELETED_BLOCK,
                block.block_id,
                None,
                named(block.undeleted),
                named(deleted),
            )
        return
    without = set(block.without)
    if without and block.slots:
        whole = set(range(len(names))).intersection(*(slot.healthy for slot in block.slots))
        partly = set().union(*(slot.healthy for slot in block.slots))
        yield Difference(
            DifferenceKind.MISSING_BLOCK,
            block.block_id,
            None,
            named(sorted(without)),
            named(sorted(whole or partly)),
        )
    for slot in block.slots:
        healthy, corrupt = named(slot.healthy), named(slot.corrupt)
        absent = named(i for i in slot.absent if i not in without)
        if slot.verdict is Verdict.CONFLICT:
            lacking = named(sorted({*slot.corrupt, *slot.absent} - without))
            yield Difference(
                DifferenceKind.CONFLICTING_CHUNK, block.block_id, slot.offset, lacking, healthy
            )
            continue
        if absent:
            yield Difference(
                DifferenceKind.MISSING_CHUNK, block.block_id, slot.offset, absent, healthy
            )
        if corrupt:
            yield Difference(
                DifferenceKind.CORRUPT_CHUNK, block.block_id, slot.offset, corrupt, healthy
            )
