"""One repair plan over all peers at once, and the verdict on a set of replicas.

All replicas are laid side by side. For each block the tombstone with the largest checksum wins over everything
else; without one, the block should hold the union of all healthy chunks, so that the longest copy wins. A chunk is
decided by its copies at one offset:

- healthy copies that agree: every other replica can take it from them;
- healthy copies that disagree, or chunkings that overlap: CONFLICT, nobody's bytes are touched;
- only corrupt copies with different observed checksums: they may be bad in different windows, so that good ones
  can be put together and proven, window by window: REPAIRABLE;
- only corrupt copies, all alike: the same bytes are wrong everywhere: UNRECOVERABLE.

A verdict speaks of the whole set: a plan may hold no work for us and say REPAIRABLE, because a peer lacks what we
have. The worst finding decides: UNRECOVERABLE, CONFLICT, REPAIRABLE, MATCH, in this order. What nobody can verify
(empty live blocks, and chunks whose type NONE recorded no checksums: trees built from metadata have them, scanned
ones have not) is set aside on all sides first. The verdict is UNKNOWN where nothing else is left or nothing was
compared; and where a tree was never built, instead of a MATCH or a loss that this replica might refute.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from merkle.check import TreeRefusal
from merkle.errors import TreeRefusedError
from merkle.replica import PeerId
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree

# Neighbouring chunks share a source up to this length, so that one request can bring several of them.
SPREAD_BYTES = 16 << 20
# Named one by one in the evidence for what nobody can verify; a container may hold nothing else.
UNVERIFIABLE_NAMED_MAX = 10

BadWindows = Mapping[tuple[BlockId, int], frozenset[int]]


class Verdict(Enum):
    """What is known of a set of replicas."""

    MATCH = "match"
    REPAIRABLE = "repairable"
    UNRECOVERABLE = "unrecoverable"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


class ChunkFault(Enum):
    """What is wrong with our copy of a chunk."""

    MISSING = "missing"
    CORRUPT = "corrupt"


class EvidenceKind(Enum):
    """What a verdict rests on."""

    HEALTHY_COPIES_DIFFER = "healthy_copies_differ"
    LENGTHS_DIFFER = "lengths_differ"
    CHUNKINGS_OVERLAP = "chunkings_overlap"
    SOLE_COPY_CORRUPT = "sole_copy_corrupt"
    COPIES_CORRUPT_ALIKE = "copies_corrupt_alike"
    BAD_WINDOWS_SHARED = "bad_windows_shared"
    WINDOWS_UNPROVEN = "windows_unproven"
    # Found while repairing: what the records say, and who did not answer.
    RECORDS_DIFFER = "records_differ"
    RECORD_UNPROVEN = "record_unproven"
    SOURCE_UNREACHABLE = "source_unreachable"
    HOLE = "hole"
    DAMAGED_AGAIN = "damaged_again"
    UNVERIFIABLE = "unverifiable"
    NO_ROOT = "no_root"
    NOTHING_COMPARED = "nothing_compared"


class DifferenceKind(Enum):
    """How replicas differ in one block or chunk."""

    MISSING_BLOCK = "missing_block"
    MISSING_CHUNK = "missing_chunk"
    CORRUPT_CHUNK = "corrupt_chunk"
    DELETED_BLOCK = "deleted_block"
    CONFLICTING_CHUNK = "conflicting_chunk"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a verdict, with the place it is about."""

    kind: EvidenceKind
    block_id: BlockId | None
    offset: int | None
    detail: str


@dataclass(frozen=True, slots=True)
class ChunkRepair:
    """One chunk to mend here: `sources` hold it healthy, best first; `partial_sources` hold it corrupt."""

    offset: int
    fault: ChunkFault
    sources: tuple[PeerId, ...]
    partial_sources: tuple[PeerId, ...] = ()

    def __post_init__(self) -> None:
        assert self.sources or self.partial_sources


@dataclass(frozen=True, slots=True)
class BlockRepair:
    """One block to mend here, in offset order; `holders` are the peers with a live entry, and so with a record."""

    block_id: BlockId
    block_missing: bool
    holders: tuple[PeerId, ...]
    chunks: tuple[ChunkRepair, ...]

    def __post_init__(self) -> None:
        assert self.chunks
        assert all(a.offset < b.offset for a, b in zip(self.chunks, self.chunks[1:], strict=False))


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """All that one replica should do to catch up with its peers; the verdict is on all of them together."""

    container_id: ContainerId
    verdict: Verdict
    blocks: tuple[BlockRepair, ...] = ()
    tombstones: tuple[BlockTree, ...] = ()
    claimed_deleted: tuple[BlockId, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        assert all(a.block_id < b.block_id for a, b in zip(self.blocks, self.blocks[1:], strict=False))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do here, whatever the verdict."""
        return not (self.blocks or self.tombstones)


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: `lacking` names the replicas to be mended, `sources` those that have it right."""

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


def plan_repair(ours: ContainerTree, peers: Mapping[PeerId, ContainerTree]) -> RepairPlan:
    """What to fetch, and from whom, so that we hold what all replicas together hold. Touches nothing healthy here.

    Peers that did not answer are not given; that the verdict does not speak of them is the caller's to say.
    An empty tree of ours plans the whole container; one that was never built (no root) plans nothing.

    Raises:
        TreeRefusedError: the trees are of different containers.
    """
    names = sorted(peers)
    survey = _survey([ours, *(peers[name] for name in names)])
    blocks: list[BlockRepair] = []
    tombstones: list[BlockTree] = []
    claimed: list[BlockId] = []
    if ours.data_checksum is None:
        return RepairPlan(ours.container_id, Verdict.UNKNOWN, evidence=tuple(survey.evidence))
    for block in survey.blocks:
        own, others = block.entries[0], block.entries[1:]
        if block.tombstone is not None:
            if own is None or not own.deleted or own.data_checksum < block.tombstone.data_checksum:
                tombstones.append(block.tombstone)
            if own is not None and not own.deleted:
                claimed.append(block.block_id)
            continue
        chunks = tuple(filter(None, (_chunk_repair(block.block_id, slot, names) for slot in block.slots)))
        if chunks:
            holders = tuple(name for name, entry in zip(names, others, strict=True) if entry is not None)
            blocks.append(BlockRepair(block.block_id, own is None, holders, chunks))
    return RepairPlan(
        ours.container_id,
        survey.verdict,
        tuple(blocks),
        tuple(tombstones),
        tuple(claimed),
        tuple(survey.evidence),
    )


def compare(trees: Mapping[str, ContainerTree], *, bad_windows: Mapping[str, BadWindows] | None = None) -> Comparison:
    """How replicas differ, all against all, and what can be done about it.

    With the bad windows of scans (window indices by block and offset, those beyond the end of a truncated file
    included) a chunk that is corrupt on all replicas is decided instead of presumed.

    Raises:
        TreeRefusedError: the trees are of different containers.
    """
    assert trees
    names = sorted(trees)
    windows = [(bad_windows or {}).get(name) for name in names]
    survey = _survey([trees[name] for name in names], windows)
    differences = [difference for block in survey.blocks for difference in _differences(block, names)]
    container_id = trees[names[0]].container_id
    return Comparison(container_id, survey.verdict, tuple(differences), tuple(survey.evidence))


@dataclass(slots=True)
class _Slot:
    """All copies of the chunk at one offset, by replica; `known` says whose lack of it means anything."""

    offset: int
    copies: list[ChunkTree | None]
    known: list[bool]
    evidence: EvidenceKind | None = None

    @property
    def healthy(self) -> list[int]:
        return [i for i, chunk in enumerate(self.copies) if chunk is not None and chunk.checksum_matches]

    @property
    def corrupt(self) -> list[int]:
        return [i for i, chunk in enumerate(self.copies) if chunk is not None and not chunk.checksum_matches]

    @property
    def absent(self) -> list[int]:
        return [i for i, chunk in enumerate(self.copies) if chunk is None and self.known[i]]

    @property
    def verdict(self) -> Verdict:
        if self.evidence is not None:
            return _VERDICTS[self.evidence]
        return Verdict.REPAIRABLE if self.corrupt or self.absent else Verdict.MATCH


@dataclass(slots=True)
class _Block:
    """One block on all replicas; its slots are empty where a tombstone settles it."""

    block_id: BlockId
    entries: list[BlockTree | None]
    known: list[bool]
    tombstone: BlockTree | None = None
    slots: list[_Slot] = field(default_factory=list)

    @property
    def undeleted(self) -> list[int]:
        """Replicas that do not hold the winning tombstone."""
        return [i for i, e in enumerate(self.entries) if e != self.tombstone and (e is not None or self.known[i])]


@dataclass(slots=True)
class _Survey:
    blocks: list[_Block]
    verdict: Verdict
    evidence: list[Evidence]


_VERDICTS: Mapping[EvidenceKind, Verdict] = {
    EvidenceKind.HEALTHY_COPIES_DIFFER: Verdict.CONFLICT,
    EvidenceKind.LENGTHS_DIFFER: Verdict.CONFLICT,
    EvidenceKind.CHUNKINGS_OVERLAP: Verdict.CONFLICT,
    EvidenceKind.SOLE_COPY_CORRUPT: Verdict.UNRECOVERABLE,
    EvidenceKind.COPIES_CORRUPT_ALIKE: Verdict.UNRECOVERABLE,
    EvidenceKind.BAD_WINDOWS_SHARED: Verdict.UNRECOVERABLE,
    EvidenceKind.WINDOWS_UNPROVEN: Verdict.REPAIRABLE,
}
_DETAILS: Mapping[EvidenceKind, str] = {
    EvidenceKind.HEALTHY_COPIES_DIFFER: "copies that match their own records have different checksums",
    EvidenceKind.LENGTHS_DIFFER: "copies at the same offset have different recorded lengths",
    EvidenceKind.CHUNKINGS_OVERLAP: "replicas split these bytes into chunks differently",
    EvidenceKind.SOLE_COPY_CORRUPT: "the only copy is corrupt",
    EvidenceKind.COPIES_CORRUPT_ALIKE: "all copies are corrupt in the same way",
    EvidenceKind.BAD_WINDOWS_SHARED: "the same windows are bad in all copies",
    EvidenceKind.WINDOWS_UNPROVEN: "all copies are corrupt, in different ways: their windows may complete each other",
}
_WORST_FIRST = (Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.REPAIRABLE, Verdict.MATCH)


def _survey(trees: Sequence[ContainerTree], windows: Sequence[BadWindows | None] = ()) -> _Survey:
    """Lay the trees side by side; blocks that are whole and equal everywhere are left out."""
    for tree in trees:
        if tree.container_id != trees[0].container_id:
            raise TreeRefusedError(
                TreeRefusal.WRONG_CONTAINER.value,
                f"trees of containers {trees[0].container_id} and {tree.container_id} cannot be compared",
            )
    known = [tree.data_checksum is not None for tree in trees]
    by_id = [{block.block_id: block for block in tree.blocks} for tree in trees]
    blocks: list[_Block] = []
    aside: list[BlockId] = []
    verdicts: set[Verdict] = set()
    evidence: list[Evidence] = []
    for block_id in sorted(set().union(*by_id)):
        entries = [replica.get(block_id) for replica in by_id]
        if _is_settled(entries):
            verdicts.add(Verdict.MATCH)
            continue
        block = _Block(block_id, entries, known)
        blocks.append(block)
        tombstones = [entry for entry in entries if entry is not None and entry.deleted]
        if tombstones:
            block.tombstone = max(tombstones, key=lambda entry: entry.data_checksum)
            verdicts.add(Verdict.REPAIRABLE if block.undeleted else Verdict.MATCH)
            continue
        block.slots, all_verifiable = _slots(entries, known)
        if not all_verifiable:
            aside.append(block_id)
        _judge(block, windows)
        for slot in block.slots:
            verdicts.add(slot.verdict)
            if slot.evidence is not None:
                evidence.append(Evidence(slot.evidence, block_id, slot.offset, _DETAILS[slot.evidence]))
    verdict = next((verdict for verdict in _WORST_FIRST if verdict in verdicts), Verdict.UNKNOWN)
    if aside or not verdicts:
        evidence.append(Evidence(EvidenceKind.UNVERIFIABLE, None, None, _unverifiable(aside)))
    if not all(known):
        evidence.append(Evidence(EvidenceKind.NO_ROOT, None, None, "a replica has no tree yet, or one without a root"))
        if verdict in (Verdict.MATCH, Verdict.UNRECOVERABLE):
            verdict = Verdict.UNKNOWN
    if len(trees) < 2:
        evidence.append(Evidence(EvidenceKind.NOTHING_COMPARED, None, None, "there is only one tree"))
        if verdict is Verdict.MATCH:
            verdict = Verdict.UNKNOWN
    return _Survey(blocks, verdict, evidence)


def _is_settled(entries: Sequence[BlockTree | None]) -> bool:
    """Whether all replicas hold the same entry with nothing to verify or mend in it: the common case, so fast."""
    first = entries[0]
    if first is None or not all(entry == first for entry in entries[1:]):
        return False
    if first.deleted:
        return True
    return bool(first.chunks) and all(chunk.checksum_matches and chunk.data_checksum for chunk in first.chunks)


def _slots(entries: Sequence[BlockTree | None], known: list[bool]) -> tuple[list[_Slot], bool]:
    """The verifiable chunks of all replicas by ascending offset, and whether these are all there is."""
    copies: dict[int, list[ChunkTree | None]] = {}
    all_verifiable = True
    for i, entry in enumerate(entries):
        for chunk in entry.chunks if entry is not None else ():
            # A matching chunk that folds to 0 had no checksums to match. (One real chunk in 2^32 folds to 0, too.)
            if chunk.checksum_matches and chunk.data_checksum == 0:
                all_verifiable = False
            else:
                copies.setdefault(chunk.offset, [None] * len(entries))[i] = chunk
    return [_Slot(offset, copies[offset], known) for offset in sorted(copies)], all_verifiable and bool(copies)


def _judge(block: _Block, windows: Sequence[BadWindows | None]) -> None:
    """Note on each slot why it cannot simply be copied."""
    longest: _Slot | None = None
    longest_end = 0
    for slot in block.slots:
        slot.evidence = _evidence(slot, block.block_id, windows)
        if longest is not None and slot.offset < longest_end:
            for overlapping in (longest, slot):
                if overlapping.verdict is not Verdict.CONFLICT:
                    overlapping.evidence = EvidenceKind.CHUNKINGS_OVERLAP
        end = slot.offset + max(chunk.length_bytes for chunk in slot.copies if chunk is not None)
        if end > longest_end:
            longest, longest_end = slot, end


def _evidence(slot: _Slot, block_id: BlockId, windows: Sequence[BadWindows | None]) -> EvidenceKind | None:
    healthy = [chunk for chunk in slot.copies if chunk is not None and chunk.checksum_matches]
    corrupt = [chunk for chunk in slot.copies if chunk is not None and not chunk.checksum_matches]
    if healthy:
        length_bytes = healthy[0].length_bytes
        # A corrupt copy may be cut short, but what was read of it is never longer than its record.
        if any(chunk.length_bytes != length_bytes for chunk in healthy) or any(
            chunk.length_bytes > length_bytes for chunk in corrupt
        ):
            return EvidenceKind.LENGTHS_DIFFER
        if any(chunk.data_checksum != healthy[0].data_checksum for chunk in healthy):
            return EvidenceKind.HEALTHY_COPIES_DIFFER
        return None
    if len(corrupt) == 1:
        return EvidenceKind.SOLE_COPY_CORRUPT
    bad = [_bad_windows(windows, i, block_id, slot.offset) for i in slot.corrupt]
    scanned = [indices for indices in bad if indices is not None]
    if len(scanned) == len(corrupt):
        shared = frozenset.intersection(*scanned)
        return EvidenceKind.BAD_WINDOWS_SHARED if shared else EvidenceKind.WINDOWS_UNPROVEN
    alike = len({(chunk.length_bytes, chunk.data_checksum) for chunk in corrupt}) == 1
    return EvidenceKind.COPIES_CORRUPT_ALIKE if alike else EvidenceKind.WINDOWS_UNPROVEN


def _bad_windows(windows: Sequence[BadWindows | None], i: int, block_id: BlockId, offset: int) -> frozenset[int] | None:
    replica = windows[i] if windows else None
    return replica.get((block_id, offset)) if replica is not None else None


def _chunk_repair(block_id: BlockId, slot: _Slot, names: Sequence[PeerId]) -> ChunkRepair | None:
    """What to do about our copy (replica 0): nothing if it is healthy, or if no copy is known to be right."""
    own = slot.copies[0]
    if slot.verdict is not Verdict.REPAIRABLE or (own is not None and own.checksum_matches):
        return None
    fault = ChunkFault.MISSING if own is None else ChunkFault.CORRUPT
    sources = [names[i - 1] for i in slot.healthy]
    # A copy that is corrupt exactly as ours is has no window that ours has not.
    partial = [names[i - 1] for i in slot.corrupt if i > 0 and slot.copies[i] != own]
    return ChunkRepair(
        slot.offset, fault, _ranked(sources, block_id, slot.offset), _ranked(partial, block_id, slot.offset)
    )


def _ranked(peers: Sequence[PeerId], block_id: BlockId, offset: int) -> tuple[PeerId, ...]:
    """Every peer is as good as another, so let each be the first for some: reads spread over all of them."""
    if not peers:
        return ()
    first = (block_id + offset // SPREAD_BYTES) % len(peers)
    return (*peers[first:], *peers[:first])


def _differences(block: _Block, names: Sequence[str]) -> Iterable[Difference]:
    def named(replicas: Iterable[int]) -> tuple[str, ...]:
        return tuple(names[i] for i in replicas)

    if block.tombstone is not None:
        if block.undeleted:
            deleted = [i for i, entry in enumerate(block.entries) if entry == block.tombstone]
            yield Difference(DifferenceKind.DELETED_BLOCK, block.block_id, None, named(block.undeleted), named(deleted))
        return
    without = {i for i, entry in enumerate(block.entries) if entry is None and block.known[i]}
    if without and block.slots:
        whole = set(range(len(names))).intersection(*(slot.healthy for slot in block.slots))
        partly = set().union(*(slot.healthy for slot in block.slots))
        yield Difference(
            DifferenceKind.MISSING_BLOCK, block.block_id, None, named(sorted(without)), named(sorted(whole or partly))
        )
    for slot in block.slots:
        healthy, corrupt = named(slot.healthy), named(slot.corrupt)
        absent = named(i for i in slot.absent if i not in without)
        if slot.verdict is Verdict.CONFLICT:
            lacking = named(sorted({*slot.corrupt, *slot.absent} - without))
            yield Difference(DifferenceKind.CONFLICTING_CHUNK, block.block_id, slot.offset, lacking, healthy)
            continue
        if absent:
            yield Difference(DifferenceKind.MISSING_CHUNK, block.block_id, slot.offset, absent, healthy)
        if corrupt:
            yield Difference(DifferenceKind.CORRUPT_CHUNK, block.block_id, slot.offset, corrupt, healthy)


def _unverifiable(aside: Sequence[BlockId]) -> str:
    if not aside:
        return "there are no blocks, which is also what a failed scan leaves behind"
    shown = ", ".join(str(block_id) for block_id in aside[:UNVERIFIABLE_NAMED_MAX])
    rest = f" and {len(aside) - UNVERIFIABLE_NAMED_MAX} more" if len(aside) > UNVERIFIABLE_NAMED_MAX else ""
    return f"without recorded checksums, wholly or in part: block {shown}{rest}"
