"""What must be said of replicas, worked out from copies of chunks with other code than
the product's: no tree is compared, and no root.

A copy is whole where its bytes match its record. `of_windows` makes copies of recorded
windows and bytes, `of_tree` of what rows tell. `judged` looks at one block after the
other, and there at every pair of copies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from merkle.comparison import DifferenceKind
from merkle.outcome import Verdict
from merkle.tree import BlockId, ContainerTree
from tests.support.replicas import StoredReplica
from tests.support.trees import CHUNK_BYTES

# Kind, block, offset, who lacks it, who has it.
Finding = tuple[DifferenceKind, BlockId, int | None, tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Copy:
    """One replica's copy of one chunk; `content` is equal for equal bytes, None where
    nothing is recorded that could tell.
    """

    length: int
    content: object
    is_whole: bool


# A live block's copies by offset, or the checksum of a deleted one.
Held = Mapping[int, Copy] | int
# A replica's blocks; None where its tree was never built.
Replica = Mapping[BlockId, Held] | None


def of_windows(stored: StoredReplica) -> Replica:
    """A replica by its records and bytes."""
    blocks: dict[BlockId, Held] = {
        block_id: {
            offset: Copy(CHUNK_BYTES, chunk.data, chunk.data == chunk.record)
            for offset, chunk in chunks.items()
        }
        for block_id, chunks in stored.blocks.items()
    }
    return blocks | dict(stored.tombstones)


def of_tree(tree: ContainerTree) -> Replica:
    """A replica by what rows tell of it."""
    if tree.data_checksum is None:
        return None
    return {
        block.block_id: block.data_checksum
        if block.deleted
        else {
            chunk.offset: Copy(
                chunk.length_bytes,
                # Whole and 0: its client recorded no checksums.
                chunk.data_checksum if chunk.data_checksum or not chunk.checksum_matches else None,
                chunk.checksum_matches,
            )
            for chunk in block.chunks
        }
        for block in tree.blocks
    }


def judged(replicas: Mapping[str, Replica]) -> tuple[Verdict, list[Finding]]:
    """The verdict on these replicas, and all findings in the order of their places."""
    known = {name: blocks for name, blocks in sorted(replicas.items()) if blocks is not None}
    verdicts, findings = set[Verdict](), list[Finding]()
    for block_id in sorted(set().union(*known.values())):
        held = {name: blocks[block_id] for name, blocks in known.items() if block_id in blocks}
        without = tuple(name for name in known if name not in held)
        live = {name: entry for name, entry in held.items() if not isinstance(entry, int)}
        if len(live) < len(held):
            dead = max(entry for entry in held.values() if isinstance(entry, int))
            has = tuple(name for name, entry in held.items() if entry == dead)
            lacks = tuple(name for name in known if name not in has)
            verdicts.add(Verdict.REPAIRABLE if lacks else Verdict.MATCH)
            if lacks:
                findings.append((DifferenceKind.DELETED_BLOCK, block_id, None, lacks, has))
            continue
        for verdict, found in _of_live(block_id, live, without):
            verdicts.add(verdict)
            findings += found
    verdict = next((one for one in _WORST_FIRST if one in verdicts), Verdict.UNKNOWN)
    if verdict is Verdict.MATCH and len(replicas) == 1:
        verdict = Verdict.UNKNOWN
    # Whoever has no tree may hold what is lost, or lack what all others hold.
    if len(known) < len(replicas) and verdict in (Verdict.MATCH, Verdict.UNRECOVERABLE):
        verdict = Verdict.UNKNOWN
    return verdict, findings


_WORST_FIRST = (Verdict.UNRECOVERABLE, Verdict.CONFLICT, Verdict.REPAIRABLE, Verdict.MATCH)


def _of_live(
    block_id: BlockId, held: Mapping[str, Mapping[int, Copy]], without: Sequence[str]
) -> Iterator[tuple[Verdict, list[Finding]]]:
    """Verdict and findings of each chunk that can be verified; the first also tells who
    lacks the whole block.
    """
    chunks: dict[int, dict[str, Copy]] = {}
    for name, copies in held.items():
        for offset, copy in copies.items():
            if copy.content is not None:
                chunks.setdefault(offset, {})[name] = copy
    first, *others = held.values()
    is_settled = all(copy.is_whole and copy.content is not None for copy in first.values())
    # What all hold alike is no conflict, however it was cut into chunks.
    alike = is_settled and all(other == first for other in others)
    overlapping = set[int]() if alike else _overlapping(chunks)
    whole_in = {
        offset: {name for name, copy in copies.items() if copy.is_whole}
        for offset, copies in chunks.items()
    }
    missing = list[Finding]()
    if without and chunks:
        everywhere = set(held).intersection(*whole_in.values())
        has = everywhere or set().union(*whole_in.values())
        kind = DifferenceKind.MISSING_BLOCK
        missing.append((kind, block_id, None, tuple(without), tuple(sorted(has))))
    for offset, copies in sorted(chunks.items()):
        whole = tuple(sorted(whole_in[offset]))
        bad = tuple(sorted(copies.keys() - whole_in[offset]))
        absent = tuple(name for name in sorted(held) if name not in copies)
        if offset in overlapping or _is_contradicted(copies, whole, bad):
            lacks = tuple(sorted((*bad, *absent)))
            kind = DifferenceKind.CONFLICTING_CHUNK
            yield Verdict.CONFLICT, [*missing, (kind, block_id, offset, lacks, whole)]
        else:
            found = list(missing)
            if absent:
                found.append((DifferenceKind.MISSING_CHUNK, block_id, offset, absent, whole))
            if bad:
                found.append((DifferenceKind.CORRUPT_CHUNK, block_id, offset, bad, whole))
            # Bytes that are bad alike everywhere hold nothing that another lacks.
            is_lost = not whole and len({copies[name] for name in bad}) == 1
            is_even = not (bad or absent or without)
            yield (
                (
                    Verdict.UNRECOVERABLE
                    if is_lost
                    else Verdict.MATCH
                    if is_even
                    else Verdict.REPAIRABLE
                ),
                found,
            )
        missing = []


def _overlapping(chunks: Mapping[int, Mapping[str, Copy]]) -> set[int]:
    """The offsets of chunks that share bytes with a chunk at another offset."""
    ends = {
        offset: offset + max(copy.length for copy in copies.values())
        for offset, copies in chunks.items()
    }
    pairs = [(a, b) for a, b in combinations(sorted(ends), 2) if b < ends[a]]
    return {offset for pair in pairs for offset in pair}


def _is_contradicted(copies: Mapping[str, Copy], whole: Sequence[str], bad: Sequence[str]) -> bool:
    """Whether copies that match their own records differ, or a bad one is longer than
    they are.
    """
    if not whole:
        return False
    one = copies[whole[0]]
    return any(copies[name] != one for name in whole) or any(
        copies[name].length > one.length for name in bad
    )
