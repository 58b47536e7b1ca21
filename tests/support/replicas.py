"""Replicas in memory, and the smallest executor of a repair plan: what a plan promises,
without disks and peers.

A window's bytes are one number, and so is its recorded checksum: bytes are good where
the numbers are equal. The executor keeps the rules of repair. A window is written only
if it equals our record. Where we have no record, a peer's is taken if it hashes to that
peer's tree entry, or if the chunk is whole nowhere and at least two holders recorded
the same; never where another holder's record differs. A chunk is added only whole, and
only right behind one that is there. A tombstone changes the tree alone.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from merkle.checksum import fold
from merkle.outcome import Verdict
from merkle.plan import ChunkRepair, RepairPlan, plan_repair
from merkle.replica import PeerId
from merkle.tree import BlockId, ChunkTree, ContainerTree, TreeBuilder
from tests.support.trees import CHUNK_BYTES, CONTAINER

Windows = tuple[int, ...]
# The blocks and the windows of a chunk that drawn replicas have.
BLOCK_IDS = range(20, 24)
WINDOWS = 3


@dataclass(frozen=True)
class StoredChunk:
    """One chunk's recorded checksums and bytes, a number a window."""

    record: Windows
    data: Windows

    def tree(self, offset: int) -> ChunkTree:
        """The leaf that a scan makes of it."""
        observed = fold(struct.pack(f">{len(self.data)}Q", *self.data))
        return ChunkTree(offset, CHUNK_BYTES, observed, self.data == self.record)

    @property
    def is_healthy(self) -> bool:
        return self.data == self.record


@dataclass(frozen=True)
class StoredReplica:
    """Blocks by ID, their chunks by offset; a tombstone hides a block from the tree,
    its bytes stay.
    """

    blocks: Mapping[BlockId, Mapping[int, StoredChunk]] = field(default_factory=dict)
    tombstones: Mapping[BlockId, int] = field(default_factory=dict)

    def tree(self) -> ContainerTree:
        """The tree after a full scan."""
        builder = TreeBuilder(CONTAINER)
        for block_id, chunks in self.blocks.items():
            for offset, chunk in chunks.items():
                builder.add_chunk(block_id, chunk.tree(offset))
        for block_id, checksum in self.tombstones.items():
            builder.set_deleted(block_id, checksum)
        return builder.build()

    def chunk(self, block_id: BlockId, offset: int) -> StoredChunk | None:
        return self.blocks.get(block_id, {}).get(offset)


def record_of(block_id: int, i: int) -> tuple[int, ...]:
    """What was written there, a number a window, the same on all replicas."""
    return tuple(1000 * block_id + 10 * i + window for window in range(WINDOWS))


@st.composite
def stored_chunks(draw: st.DrawFn, block_id: int, i: int) -> StoredChunk:
    record = record_of(block_id, i)
    damage = draw(st.sampled_from([()] * 3 + [(0,), (1,), (0, 1), (1, 2), (0, 1, 2)]))
    # Two ways to be wrong, so that copies can be wrong alike.
    wrong = draw(st.sampled_from([7, 8]))
    return StoredChunk(
        record, tuple(wrong if window in damage else good for window, good in enumerate(record))
    )


@st.composite
def stored_replicas(draw: st.DrawFn) -> StoredReplica:
    """A replica of blocks that all agree on what was written: chunks lost from the end,
    windows bad, blocks gone.
    """
    blocks: dict[BlockId, dict[int, StoredChunk]] = {}
    gone: dict[BlockId, int] = {}
    for block_id in map(BlockId, BLOCK_IDS):
        fate = draw(st.sampled_from(["live"] * 6 + ["absent", "deleted"]))
        if fate == "live":
            count = draw(st.integers(1, 3))
            blocks[block_id] = {
                i * CHUNK_BYTES: draw(stored_chunks(block_id, i)) for i in range(count)
            }
        elif fate == "deleted":
            gone[block_id] = draw(st.integers(0, 2))
    return StoredReplica(blocks, gone)


Cluster = dict[PeerId, StoredReplica]


def plan_of(cluster: Cluster, own: PeerId) -> RepairPlan:
    """The plan of one replica against all others."""
    return plan_repair(
        cluster[own].tree(), {peer: cluster[peer].tree() for peer in cluster if peer != own}
    )


def reconcile(cluster: Cluster, own: PeerId) -> tuple[StoredReplica, set[Verdict]]:
    """One replica's plan carried out; what it found that no plan can mend, from the
    trees and from the records.
    """
    plan = plan_of(cluster, own)
    mine = cluster[own]
    verdicts = {plan.verdict}
    tombstones = {
        **mine.tombstones,
        **{block.block_id: block.data_checksum for block in plan.tombstones},
    }
    blocks = {block_id: dict(chunks) for block_id, chunks in mine.blocks.items()}
    for block in plan.blocks:
        holders = [cluster[peer] for peer in block.holders]
        for repair in block.chunks:
            held = [
                chunk
                for holder in holders
                if (chunk := holder.chunk(block.block_id, repair.offset))
            ]
            before = mine.chunk(block.block_id, repair.offset)
            record = before.record if before else _adopted(held)
            after = _mended(cluster, block.block_id, repair, before, record) if record else before
            has_place = repair.offset == 0 or repair.offset - CHUNK_BYTES in blocks.get(
                block.block_id, {}
            )
            if after is not None and (before is not None or has_place):
                blocks.setdefault(block.block_id, {})[repair.offset] = after
            # Named even if our copy is mended: the replica with the other record will
            # never be like ours.
            if len({chunk.record for chunk in (*held, *([before] if before else []))}) > 1:
                verdicts.add(Verdict.CONFLICT)
            elif after is None or not after.is_healthy:
                verdicts.add(Verdict.UNRECOVERABLE)
    return replace(mine, blocks=blocks, tombstones=tombstones), verdicts


def _adopted(held: list[StoredChunk]) -> Windows | None:
    """The record to take where we have none."""
    if len({chunk.record for chunk in held}) != 1:
        return None
    # The record of a healthy copy hashes to its tree entry.
    return held[0].record if len(held) > 1 or held[0].is_healthy else None


def _mended(
    cluster: Cluster,
    block_id: BlockId,
    repair: ChunkRepair,
    before: StoredChunk | None,
    record: Windows,
) -> StoredChunk | None:
    data: list[int | None] = list(before.data) if before else [None] * len(record)
    for window, wanted in enumerate(record):
        if data[window] == wanted:
            continue
        for peer in (*repair.sources, *repair.partial_sources):
            theirs = cluster[peer].chunk(block_id, repair.offset)
            if theirs is not None and theirs.data[window] == wanted:
                data[window] = wanted
                break
    whole = tuple(value for value in data if value is not None)
    return (
        StoredChunk(record, whole)
        if len(whole) == len(record) and (before or whole == record)
        else None
    )


def live_round(cluster: Cluster, order: tuple[PeerId, ...]) -> tuple[Cluster, set[Verdict]]:
    """Each replica runs its plan in turn, and sees what those before it did."""
    cluster, verdicts = dict(cluster), set[Verdict]()
    for own in order:
        cluster[own], found = reconcile(cluster, own)
        verdicts |= found
    return cluster, verdicts


def concurrent_round(cluster: Cluster) -> tuple[Cluster, set[Verdict]]:
    """All replicas run their plans on the state before the round."""
    after, verdicts = Cluster(), set[Verdict]()
    for own in cluster:
        after[own], found = reconcile(cluster, own)
        verdicts |= found
    return after, verdicts


def join(a: StoredReplica, b: StoredReplica) -> StoredReplica:
    """What two replicas hold together, where their records agree: largest tombstones,
    good windows of either.
    """
    tombstones = dict(a.tombstones)
    for block_id, checksum in b.tombstones.items():
        tombstones[block_id] = max(checksum, tombstones.get(block_id, checksum))
    blocks: dict[BlockId, dict[int, StoredChunk]] = {}
    for block_id in {*a.blocks, *b.blocks} - {*tombstones}:
        for offset in {*a.blocks.get(block_id, {}), *b.blocks.get(block_id, {})}:
            copies = [chunk for replica in (a, b) if (chunk := replica.chunk(block_id, offset))]
            assert len({chunk.record for chunk in copies}) == 1
            blocks.setdefault(block_id, {})[offset] = _joined(copies)
    return StoredReplica(blocks, tombstones)


def _joined(copies: list[StoredChunk]) -> StoredChunk:
    record = copies[0].record
    columns = zip(*(chunk.data for chunk in copies), strict=True)
    # Of bad bytes either will do, as long as it is always the same one.
    return StoredChunk(
        record,
        tuple(r if r in column else min(column) for r, column in zip(record, columns, strict=True)),
    )
