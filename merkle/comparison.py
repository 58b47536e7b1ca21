"""Compares replicas: what differs, and whether it can be repaired.

Every command and job that compares replicas uses the rules of `merkle.survey`, so that
all give one verdict on the same replicas. Trees alone cannot decide about a chunk that
no tree holds whole: a file that outlived its record may still have its bytes.
`unrecorded_copies` lists the files to read. `compare` decides by their bad windows.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from merkle.outcome import DIVERGED_VERDICTS, Evidence, Verdict
from merkle.survey import BadWindows, BlockSlots, ChunkPlace, TreeSurvey
from merkle.tree import BlockId, ContainerId, ContainerTree


class DifferenceKind(Enum):
    """How replicas differ in one block or chunk."""

    MISSING_BLOCK = "missing_block"
    MISSING_CHUNK = "missing_chunk"
    CORRUPT_CHUNK = "corrupt_chunk"
    DELETED_BLOCK = "deleted_block"
    CONFLICTING_CHUNK = "conflicting_chunk"


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: `lacking` are the replicas to repair, `sources` those to repair
    them from.
    """

    kind: DifferenceKind
    block_id: BlockId
    offset: int | None
    lacking: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences of replicas, in ascending order of block, then of offset."""

    container_id: ContainerId
    verdict: Verdict
    differences: tuple[Difference, ...] = ()
    evidence: tuple[Evidence, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the replicas are known to differ, or to be damaged."""
        return bool(self.differences) or self.verdict in DIVERGED_VERDICTS


@dataclass(frozen=True, slots=True)
class UnrecordedCopies:
    """A chunk that no tree holds whole, and the replicas whose files may have its bytes
    though their trees have no entry for it.

    `recorder` has a record of the chunk, by which bytes are proven.
    """

    block_id: BlockId
    offset: int
    recorder: str
    holders: tuple[str, ...]


def unrecorded_copies(
    trees: Mapping[str, ContainerTree],
    *,
    bad_windows: Mapping[str, BadWindows],
    lost: Mapping[str, Collection[ChunkPlace]],
) -> Iterator[UnrecordedCopies]:
    """The files to read before `compare` can decide, ascending by place.

    `bad_windows` and `lost` are what scans found, by replica: corrupt chunks, and
    chunks on record of which the replica's file has not a byte.
    """
    deleted = {block.block_id for tree in trees.values() for block in tree.blocks if block.deleted}
    held = {
        name: {(b.block_id, c.offset): c.checksum_matches for b in tree.blocks for c in b.chunks}
        for name, tree in trees.items()
    }
    # A replica with corrupt bytes goes before one that has none.
    recorders = {place: name for name, places in lost.items() for place in places}
    recorders |= {place: name for name, windows in bad_windows.items() for place in windows}
    for place in sorted(recorders):
        is_whole_somewhere = any(entries.get(place) for entries in held.values())
        if place[0] not in deleted and not is_whole_somewhere:
            holders = tuple(name for name, entries in held.items() if place not in entries)
            yield UnrecordedCopies(*place, recorders[place], holders)


def compare(
    trees: Mapping[str, ContainerTree],
    *,
    bad_windows: Mapping[str, BadWindows] | None = None,
    lost: Collection[ChunkPlace] = (),
) -> Comparison:
    """The differences of one or more replicas, and the verdict on them.

    With the bad windows of scans (window indices by block and offset, those beyond the
    end of a truncated file included) a chunk that is corrupt on all replicas is decided
    instead of presumed. They may also be of a file that outlived its record, where the
    replica's tree has no entry: a repair asks for its bytes too. `lost` are chunks that
    some replica has on record and of which its file has not a byte: those that are in
    no tree count as UNRECOVERABLE, or as REPAIRABLE where bad windows show that files
    without a record hold all of their bytes.

    Raises:
        TreeRefusedError: the trees are of different containers.
    """
    assert trees
    names = sorted(trees)
    windows = [(bad_windows or {}).get(name) for name in names]
    survey = TreeSurvey([trees[name] for name in names], windows, lost)
    differences = [
        difference for block in survey.blocks() for difference in _differences(block, names)
    ]
    container_id = trees[names[0]].container_id
    return Comparison(container_id, survey.verdict, tuple(differences), survey.evidence)


class RangedComparison:
    """Like `compare`, for trees that come in ascending ranges of blocks: what one range
    takes is free before the next.
    """

    def __init__(self, trees: Mapping[str, ContainerTree]) -> None:
        """`trees` have the roots of the replicas; their blocks do not count."""
        self._names = sorted(trees)
        self._survey = TreeSurvey([trees[name] for name in self._names])

    def add(self, trees: Mapping[str, ContainerTree]) -> tuple[list[Difference], list[Evidence]]:
        """The differences of the next range of the same replicas, and the facts about
        its blocks.
        """
        blocks = self._survey.blocks_of([trees[name] for name in self._names])
        found = [one for block in blocks for one in _differences(block, self._names)]
        return found, self._survey.take_evidence()

    @property
    def verdict(self) -> Verdict:
        """The verdict on the ranges so far, as of one tree."""
        return self._survey.verdict

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The facts about the container as a whole."""
        return self._survey.evidence


def with_doubt(compared: Comparison, *, is_incomplete: bool) -> Comparison:
    """The comparison as far as it can be told while something about the replicas is not
    known; `is_incomplete` is whether expected replicas were not compared.

    A MATCH needs all of them. UNRECOVERABLE needs all trees, because another replica
    may have the data. Otherwise the verdict is UNKNOWN.
    """
    if compared.verdict is Verdict.MATCH or (
        is_incomplete and compared.verdict is Verdict.UNRECOVERABLE
    ):
        return replace(compared, verdict=Verdict.UNKNOWN)
    return compared


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
