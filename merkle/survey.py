"""Compares the trees of several replicas, block by block and chunk by chunk.

If a replica has a tombstone for a block, the tombstone with the largest checksum wins.
Otherwise the block should hold the union of all healthy chunks, so the longest copy
wins. The copies at one offset decide about a chunk:

- Healthy copies that agree: every other replica can take the chunk from them.
- Healthy copies that disagree, or chunks that overlap at different offsets: CONFLICT,
  and no replica is changed.
- Only corrupt copies, with different observed checksums: REPAIRABLE, because different
  windows may be bad. Good windows of several copies can be proven and combined.
- Only corrupt copies, all alike: UNRECOVERABLE as far as trees show. A replica without
  an entry for the chunk may have lost only the record, so its file is read as well.
- No copy in any tree, because the replicas with the record lost every byte: only a scan
  finds the chunk (`lost`). It is UNRECOVERABLE unless files without a record hold it.

The worst finding decides the verdict on all replicas (merkle.outcome). Entries that
cannot be verified are left out first: empty live blocks, and chunks of type NONE, which
have no checksums. Trees built from metadata contain such chunks, scanned trees do not.
The verdict is UNKNOWN if nothing is left or nothing was compared. It is also UNKNOWN,
instead of MATCH or UNRECOVERABLE, if one of the trees was never built.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from merkle.check import TreeRefusal
from merkle.errors import TreeRefusedError
from merkle.outcome import Evidence, EvidenceKind, Verdict, worst_verdict
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerTree

# Blocks named in the evidence for unverifiable blocks; all blocks of a container may be
# unverifiable.
_UNVERIFIABLE_NAMED_MAX = 10


# A chunk's block and its offset there, in bytes.
ChunkPlace = tuple[BlockId, int]
# The windows of chunks that do not match their record, by index.
BadWindows = Mapping[ChunkPlace, frozenset[int]]


@dataclass(slots=True)
class ChunkSlot:
    """All copies of the chunk at one offset, and the indices of the replicas that hold
    it healthy, hold it corrupt, or lack it.
    """

    offset: int
    copies: Sequence[ChunkTree | None]
    healthy: Sequence[int]
    corrupt: Sequence[int]
    absent: Sequence[int]
    evidence: EvidenceKind | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict on this chunk."""
        if self.evidence is not None:
            return _VERDICTS[self.evidence]
        return Verdict.REPAIRABLE if self.corrupt or self.absent else Verdict.MATCH


@dataclass(slots=True)
class BlockSlots:
    """One block on all replicas: either with its winning tombstone, or with slots in
    ascending offset order.
    """

    block_id: BlockId
    entries: Sequence[BlockTree | None]
    # Replicas that lack the block. A replica whose tree was never built is not one of
    # them.
    without: Sequence[int]
    tombstone: BlockTree | None = None
    slots: Sequence[ChunkSlot] = ()

    @property
    def undeleted(self) -> list[int]:
        """Indices of the replicas that should adopt the winning tombstone."""
        other = [
            i
            for i, entry in enumerate(self.entries)
            if entry is not None and entry != self.tombstone
        ]
        return sorted([*other, *self.without])


_VERDICTS: Mapping[EvidenceKind, Verdict] = {
    EvidenceKind.HEALTHY_COPIES_DIFFER: Verdict.CONFLICT,
    EvidenceKind.LENGTHS_DIFFER: Verdict.CONFLICT,
    EvidenceKind.CHUNKINGS_OVERLAP: Verdict.CONFLICT,
    EvidenceKind.SOLE_COPY_CORRUPT: Verdict.UNRECOVERABLE,
    EvidenceKind.COPIES_CORRUPT_ALIKE: Verdict.UNRECOVERABLE,
    EvidenceKind.BAD_WINDOWS_SHARED: Verdict.UNRECOVERABLE,
    EvidenceKind.WINDOWS_UNPROVEN: Verdict.REPAIRABLE,
    EvidenceKind.BYTES_LOST: Verdict.UNRECOVERABLE,
    EvidenceKind.BYTES_UNRECORDED: Verdict.REPAIRABLE,
}


_DETAILS: Mapping[EvidenceKind, str] = {
    EvidenceKind.HEALTHY_COPIES_DIFFER: (
        "copies that match their own records have different checksums"
    ),
    EvidenceKind.LENGTHS_DIFFER: "copies at the same offset have different recorded lengths",
    EvidenceKind.CHUNKINGS_OVERLAP: "replicas split these bytes into chunks differently",
    EvidenceKind.SOLE_COPY_CORRUPT: "the only copy on record is corrupt",
    EvidenceKind.COPIES_CORRUPT_ALIKE: "all copies are corrupt in the same way",
    EvidenceKind.BAD_WINDOWS_SHARED: "the same windows are bad in all copies",
    EvidenceKind.WINDOWS_UNPROVEN: (
        "no copy on record is whole: windows of several may complete each other"
    ),
    EvidenceKind.BYTES_LOST: "no replica has all bytes of a recorded chunk",
    EvidenceKind.BYTES_UNRECORDED: "only files without a record hold a recorded chunk",
}


def chunk_verdict(fact: Evidence) -> Verdict | None:
    """The verdict of the trees on the chunk that a survey's evidence is about; None if
    it is about no chunk.
    """
    return _VERDICTS.get(EvidenceKind(fact.kind))


class TreeSurvey:
    """Compares trees: iterate over `blocks` to the end, then read `verdict` and
    `evidence`.
    """

    def __init__(
        self,
        trees: Sequence[ContainerTree],
        windows: Sequence[BadWindows | None] = (),
        lost: Collection[ChunkPlace] = (),
    ) -> None:
        """`windows` has one entry a tree, or is empty; `lost` are chunks on record of
        which the recorder's file has not a byte.

        Raises:
            TreeRefusedError: the trees are of different containers.
        """
        for tree in trees:
            if tree.container_id != trees[0].container_id:
                raise TreeRefusedError(
                    TreeRefusal.WRONG_CONTAINER.value,
                    f"trees of containers {trees[0].container_id} and {tree.container_id} cannot be"
                    " compared",
                )
        self._trees = trees
        self._windows = windows
        self._lost = lost
        self._unknown = frozenset(i for i, tree in enumerate(trees) if tree.data_checksum is None)
        self._verdicts: set[Verdict] = set()
        self._aside: list[BlockId] = []
        self._evidence: list[Evidence] = []

    def blocks(self) -> Iterator[BlockSlots]:
        """All blocks in ascending ID order, except those that are healthy and equal on
        all replicas.
        """
        if self._is_one_settled_tree():
            self._verdicts.add(Verdict.MATCH)
        else:
            yield from self._each_block()
        self._note_lost()

    def blocks_of(self, trees: Sequence[ContainerTree]) -> Iterator[BlockSlots]:
        """Like `blocks`, of the next range of blocks: `trees` are those of the same
        replicas, in the same order, with the blocks of this range.
        """
        self._trees = trees
        return self.blocks()

    def take_evidence(self) -> list[Evidence]:
        """The facts about single blocks so far; `evidence` leaves them out from now
        on.
        """
        taken, self._evidence = self._evidence, []
        return taken

    def _is_one_settled_tree(self) -> bool:
        """Whether all replicas have the very same tree, with blocks and all of them
        settled. Nearly all containers do, so that they are not compared entry by entry.
        """
        first = self._trees[0]
        return (
            all(tree is first for tree in self._trees[1:])
            and bool(first.blocks)
            and all(map(_is_settled, first.blocks))
        )

    def _each_block(self) -> Iterator[BlockSlots]:
        by_id = [{block.block_id: block for block in tree.blocks} for tree in self._trees]
        for block_id in sorted(set().union(*by_id)):
            entries = [replica.get(block_id) for replica in by_id]
            held = [entry for entry in entries if entry is not None]
            is_uniform = all(entry == held[0] for entry in held[1:]) and _is_settled(held[0])
            if is_uniform and len(held) == len(entries):
                self._verdicts.add(Verdict.MATCH)
                continue
            without = [
                i for i, entry in enumerate(entries) if entry is None and i not in self._unknown
            ]
            tombstones = [entry for entry in held if entry.deleted]
            if tombstones:
                winner = max(tombstones, key=lambda entry: entry.data_checksum)
                block = BlockSlots(block_id, entries, without, winner)
                self._verdicts.add(Verdict.REPAIRABLE if block.undeleted else Verdict.MATCH)
            elif is_uniform:
                block = BlockSlots(
                    block_id, entries, without, slots=_uniform_slots(entries, without)
                )
                self._verdicts.add(Verdict.REPAIRABLE if without else Verdict.MATCH)
            else:
                block = BlockSlots(block_id, entries, without, slots=self._slots(block_id, entries))
            yield block

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """Every fact behind the verdict; complete once `blocks` is exhausted."""
        general = []
        if self._aside or not self._verdicts:
            general.append(
                Evidence(EvidenceKind.UNVERIFIABLE, None, None, _unverifiable(self._aside))
            )
        if self._unknown:
            detail = (
                f"{len(self._unknown)} of {len(self._trees)} trees were never built, or have no"
                " root"
            )
            general.append(Evidence(EvidenceKind.NO_ROOT, None, None, detail))
        if len(self._trees) < 2:
            general.append(
                Evidence(EvidenceKind.NOTHING_COMPARED, None, None, "there is only one tree")
            )
        return (*self._evidence, *general)

    @property
    def verdict(self) -> Verdict:
        """The verdict on all replicas; final once `blocks` is exhausted."""
        worst = worst_verdict(self._verdicts) or Verdict.UNKNOWN
        if worst is Verdict.MATCH and len(self._trees) < 2:
            return Verdict.UNKNOWN
        # A replica whose tree was never built may hold chunks that the others lost, or
        # lack chunks that they hold.
        if worst in (Verdict.MATCH, Verdict.UNRECOVERABLE) and self._unknown:
            return Verdict.UNKNOWN
        return worst

    def _note_lost(self) -> None:
        """Judge the recorded chunks that no tree has, since no recorder has a byte of
        them.
        """
        if not self._lost:
            return
        blocks = [block for tree in self._trees for block in tree.blocks]
        deleted = {block.block_id for block in blocks if block.deleted}
        held = {(block.block_id, chunk.offset) for block in blocks for chunk in block.chunks}
        for place in sorted(place for place in self._lost if place not in held):
            if place[0] in deleted:
                continue
            read = [windows[place] for windows in self._windows if windows and place in windows]
            is_whole = bool(read) and not frozenset.intersection(*read)
            kind = EvidenceKind.BYTES_UNRECORDED if is_whole else EvidenceKind.BYTES_LOST
            # Of a lone replica nothing is compared: another may hold what it lost.
            if is_whole or len(self._trees) > 1:
                self._verdicts.add(_VERDICTS[kind])
            self._evidence.append(Evidence(kind, *place, _DETAILS[kind]))

    def _slots(self, block_id: BlockId, entries: Sequence[BlockTree | None]) -> list[ChunkSlot]:
        """The verifiable chunks of all replicas in ascending offset order, each with
        its evidence. A block with other chunks is noted as unverifiable.
        """
        copies: dict[int, list[ChunkTree | None]] = {}
        has_unverifiable = False
        for i, entry in enumerate(entries):
            for chunk in entry.chunks if entry is not None else ():
                # A matching chunk with checksum 0 has no recorded checksums, except for
                # one real chunk in 2^32.
                if chunk.checksum_matches and chunk.data_checksum == 0:
                    has_unverifiable = True
                else:
                    copies.setdefault(chunk.offset, [None] * len(entries))[i] = chunk
        if has_unverifiable or not copies:
            self._aside.append(block_id)
        slots = [self._slot(block_id, offset, copies[offset]) for offset in sorted(copies)]
        _mark_overlaps(slots)
        for slot in slots:
            self._verdicts.add(slot.verdict)
            if slot.evidence is not None:
                self._evidence.append(
                    Evidence(slot.evidence, block_id, slot.offset, _DETAILS[slot.evidence])
                )
        return slots

    def _slot(
        self, block_id: BlockId, offset: int, copies: Sequence[ChunkTree | None]
    ) -> ChunkSlot:
        healthy, corrupt, absent = list[int](), list[int](), list[int]()
        for i, chunk in enumerate(copies):
            if chunk is None:
                if i not in self._unknown:
                    absent.append(i)
            elif chunk.checksum_matches:
                healthy.append(i)
            else:
                corrupt.append(i)
        slot = ChunkSlot(offset, copies, healthy, corrupt, absent)
        slot.evidence = (
            _healthy_evidence(slot) if healthy else self._corrupt_evidence(block_id, slot)
        )
        return slot

    def _corrupt_evidence(self, block_id: BlockId, slot: ChunkSlot) -> EvidenceKind:
        """The evidence for a chunk without a healthy copy."""
        pieces = [_bad_windows(self._windows, i, block_id, slot.offset) for i in slot.absent]
        unrecorded = [windows for windows in pieces if windows is not None]
        if len(slot.corrupt) == 1 and not unrecorded:
            return EvidenceKind.SOLE_COPY_CORRUPT
        bad = [
            *(_bad_windows(self._windows, i, block_id, slot.offset) for i in slot.corrupt),
            *unrecorded,
        ]
        scanned = [windows for windows in bad if windows is not None]
        if len(scanned) == len(bad):
            shared = frozenset.intersection(*scanned)
            return EvidenceKind.BAD_WINDOWS_SHARED if shared else EvidenceKind.WINDOWS_UNPROVEN
        alike = len({slot.copies[i] for i in slot.corrupt}) == 1
        return EvidenceKind.COPIES_CORRUPT_ALIKE if alike else EvidenceKind.WINDOWS_UNPROVEN


def _is_settled(entry: BlockTree) -> bool:
    """Whether an entry that all replicas share needs no check and no repair."""
    if entry.deleted:
        return True
    return bool(entry.chunks) and all(
        chunk.checksum_matches and chunk.data_checksum for chunk in entry.chunks
    )


def _uniform_slots(entries: Sequence[BlockTree | None], without: Sequence[int]) -> list[ChunkSlot]:
    """Slots of a healthy block whose entries are equal: most blocks of a lost
    replica.
    """
    healthy = [i for i, entry in enumerate(entries) if entry is not None]
    chunks = next(entry.chunks for entry in entries if entry is not None)
    return [
        ChunkSlot(
            chunk.offset,
            [chunk if entry is not None else None for entry in entries],
            healthy,
            (),
            without,
        )
        for chunk in chunks
    ]


def _healthy_evidence(slot: ChunkSlot) -> EvidenceKind | None:
    """The evidence against copying a healthy chunk to the other replicas, if any."""
    kind = None
    first = slot.copies[slot.healthy[0]]
    assert first is not None
    for chunk in slot.copies:
        if chunk is None or chunk is first:
            continue
        if chunk.checksum_matches:
            if chunk.length_bytes != first.length_bytes:
                return EvidenceKind.LENGTHS_DIFFER
            if chunk.data_checksum != first.data_checksum:
                kind = EvidenceKind.HEALTHY_COPIES_DIFFER
        # A corrupt copy may be truncated, but never longer than its record.
        elif chunk.length_bytes > first.length_bytes:
            return EvidenceKind.LENGTHS_DIFFER
    return kind


def _mark_overlaps(slots: Sequence[ChunkSlot]) -> None:
    """Mark overlapping chunks at different offsets as conflicts: neither can replace
    the other.
    """
    longest: ChunkSlot | None = None
    longest_end = 0
    for slot in slots:
        if longest is not None and slot.offset < longest_end:
            for overlapping in (longest, slot):
                if overlapping.verdict is not Verdict.CONFLICT:
                    overlapping.evidence = EvidenceKind.CHUNKINGS_OVERLAP
        end = slot.offset + max(chunk.length_bytes for chunk in slot.copies if chunk is not None)
        if end > longest_end:
            longest, longest_end = slot, end


def _bad_windows(
    windows: Sequence[BadWindows | None], i: int, block_id: BlockId, offset: int
) -> frozenset[int] | None:
    replica = windows[i] if windows else None
    return replica.get((block_id, offset)) if replica is not None else None


def _unverifiable(aside: Sequence[BlockId]) -> str:
    if not aside:
        return "there are no blocks, which is also what a failed scan leaves behind"
    shown = ", ".join(str(block_id) for block_id in aside[:_UNVERIFIABLE_NAMED_MAX])
    rest = (
        f" and {len(aside) - _UNVERIFIABLE_NAMED_MAX} more"
        if len(aside) > _UNVERIFIABLE_NAMED_MAX
        else ""
    )
    return f"without recorded checksums, wholly or in part: block {shown}{rest}"
