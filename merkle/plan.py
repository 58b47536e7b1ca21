"""Plans a repair over all peers at once: what to fetch, and from which peers.

The rules of `merkle.survey` decide about each block and chunk. The verdict is about the
whole set: it can be REPAIRABLE although we have nothing to repair, because a peer lacks
a chunk that we have.

A plan also has chunks that no tree shows healthy: those that are corrupt everywhere,
and those that our records name although our file has no byte of them. Peers without an
entry for such a chunk may have lost only the record, so their files are read.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from merkle.outcome import Evidence, EvidenceKind, Verdict
from merkle.replica import PeerId
from merkle.survey import ChunkSlot, TreeSurvey
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree

# Neighbouring chunks within this many bytes share a source, so that one request can
# return several of them.
SPREAD_BYTES = 16 << 20


class ChunkFault(Enum):
    """What is wrong with our copy of a chunk."""

    MISSING = "missing"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True)
class ChunkRepair:
    """One chunk to repair here; `sources` hold it healthy, best first.

    `partial_sources` hold it corrupt, or have it in no tree: their file may have
    outlived its record. They are asked last.
    """

    offset: int
    fault: ChunkFault
    sources: tuple[PeerId, ...]
    partial_sources: tuple[PeerId, ...] = ()

    def __post_init__(self) -> None:
        assert self.sources or self.partial_sources


@dataclass(frozen=True, slots=True)
class BlockRepair:
    """One block to repair here, its chunks in offset order. `holders` are the peers
    with a live entry, and so with a record.
    """

    block_id: BlockId
    holders: tuple[PeerId, ...]
    chunks: tuple[ChunkRepair, ...]

    def __post_init__(self) -> None:
        assert self.chunks
        assert all(a.offset < b.offset for a, b in zip(self.chunks, self.chunks[1:], strict=False))


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """All that one replica should do to match its peers; the verdict is about all of
    them together.
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


def plan_repair(
    ours: ContainerTree,
    peers: Mapping[PeerId, ContainerTree],
    lost: Mapping[BlockId, Collection[int]] | None = None,
) -> RepairPlan:
    """What to fetch, and from which peers, so that we hold what all replicas together
    hold. Healthy chunks of ours are never replaced.

    `peers` are only the peers that answered; the caller reports that the verdict does
    not cover the others. If our tree is empty, the whole container is planned; if it
    was never built (no root), nothing is.

    `lost` are the offsets, in bytes, of chunks that we have on record but no byte of.
    They are planned even if no tree has them, because a file that outlived its record
    may hold them. They do not affect the verdict.

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


def _chunk_repair(
    block_id: BlockId, slot: ChunkSlot, names: Sequence[PeerId]
) -> ChunkRepair | None:
    """The repair of our copy (replica 0); None if it is healthy or has no source."""
    own = slot.copies[0]
    if slot.verdict not in (Verdict.REPAIRABLE, Verdict.UNRECOVERABLE) or (
        own is not None and own.checksum_matches
    ):
        return None
    fault = ChunkFault.MISSING if own is None else ChunkFault.CORRUPT
    # Replica 0 is ours; replica i is the peer i - 1.
    sources = [names[i - 1] for i in slot.healthy]
    # A copy that is corrupt exactly as ours has no good window that ours lacks.
    partial = [names[i - 1] for i in slot.corrupt if i > 0 and slot.copies[i] != own]
    unrecorded = [names[i - 1] for i in slot.absent if i > 0]
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
    """The plan's blocks, with the `lost` chunks of live blocks that no tree has."""
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
    """The peers rotated by block and offset, so that reads spread over all of them."""
    if not peers:
        return ()
    first = (block_id + offset // SPREAD_BYTES) % len(peers)
    return (*peers[first:], *peers[:first])
