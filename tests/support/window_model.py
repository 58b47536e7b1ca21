"""What can be recovered of damaged replicas, decided window by window from the recorded
checksums and the bytes of all replicas; no tree is looked at.

A block that a delete transaction removed from any replica (the caller knows) is dead:
nothing of it may change anywhere. A chunk that two records describe differently is
contested: each record counts for its own replica alone, and nobody can say who is
right. Of any other chunk a window is recoverable if the file of any replica has bytes
that match its recorded checksum.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

from merkle.outcome import Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId
from tests.support.oracle import Seen, good_windows

Replicas = Mapping[str, Seen]


@dataclass(frozen=True)
class Window:
    """One window of a block; `at` is the offset of its chunk."""

    block_id: BlockId
    at: int
    index: int


@dataclass
class Recoverable:
    """What is known of the live blocks of a container before its repair."""

    chunks: dict[tuple[BlockId, int], ChunkRecord]
    contested: set[tuple[BlockId, int]]
    lost: set[Window]

    @property
    def broken_blocks(self) -> set[BlockId]:
        """The blocks that cannot be whole, or of which nobody knows what is whole."""
        return {window.block_id for window in self.lost} | {b for b, _ in self.contested}


def recoverable(before: Replicas, dead: Set[BlockId]) -> Recoverable:
    """Decide what each window is, from all records and files."""
    found = Recoverable({}, set(), set())
    for seen in before.values():
        for block_id, record in seen.records.items():
            for chunk in () if block_id in dead else record.chunks:
                known = found.chunks.setdefault((block_id, chunk.offset), chunk)
                if _essence(known) != _essence(chunk):
                    found.contested.add((block_id, chunk.offset))
    for (block_id, at), chunk in found.chunks.items():
        if (block_id, at) not in found.contested:
            held = set[int]().union(
                *(good_windows(chunk, seen.file(block_id)) for seen in before.values())
            )
            lost = set(range(len(chunk.checksums))) - held
            found.lost |= {Window(block_id, at, index) for index in lost}
    return found


def complaints(
    before: Replicas, after: Replicas, dead: Mapping[str, Set[BlockId]], verdict: Verdict
) -> list[str]:
    """What a job of all replicas did that it may not, or did not that it could; `dead`
    are the blocks that were deleted, by replica.
    """
    gone = set[BlockId]().union(*dead.values())
    known = recoverable(before, gone)
    found = [
        *_harm(before, after, gone),
        *_resurrections(after, dead),
        *_omissions(before, after, known),
    ]
    truth = _verdict(before, known)
    if verdict not in truth:
        found.append(f"the verdict is {verdict.value}, not {' or '.join(v.value for v in truth)}")
    return found


def _essence(chunk: ChunkRecord) -> tuple[object, ...]:
    return (chunk.length_bytes, chunk.checksum_type, chunk.bytes_per_checksum, chunk.checksums)


def _verdict(before: Replicas, known: Recoverable) -> tuple[Verdict, ...]:
    """The verdicts that would be true."""
    if known.lost:
        return (Verdict.UNRECOVERABLE,)
    if known.contested:
        # The bytes of one of the records may be nowhere.
        return (Verdict.CONFLICT, Verdict.UNRECOVERABLE)
    if all(_is_whole(seen, known) for seen in before.values()):
        # Trees, commits and tombstones may still have differed.
        return (Verdict.MATCH, Verdict.REPAIRABLE)
    return (Verdict.REPAIRABLE,)


def _is_whole(seen: Seen, known: Recoverable) -> bool:
    return all(
        at in _offsets(seen.records.get(block_id))
        and len(good_windows(chunk, seen.file(block_id))) == len(chunk.checksums)
        for (block_id, at), chunk in known.chunks.items()
    )


def _offsets(record: BlockRecord | None) -> set[int]:
    return {chunk.offset for chunk in record.chunks} if record else set()


def _omissions(before: Replicas, after: Replicas, known: Recoverable) -> Iterator[str]:
    """Recoverable windows that are not good everywhere.

    A replica without the record of a chunk stores it only whole, and a file grows
    without holes: of a block with losses, only what lies before the end of its file.
    """
    for (block_id, at), chunk in known.chunks.items():
        if (block_id, at) in known.contested:
            continue
        lost = {w.index for w in known.lost if (w.block_id, w.at) == (block_id, at)}
        for name, seen in after.items():
            was = before[name]
            missing = set(range(len(chunk.checksums))) - lost
            missing -= good_windows(chunk, seen.file(block_id))
            if block_id in known.broken_blocks:
                had_record = at in _offsets(was.records.get(block_id))
                end = len(was.file(block_id)) if had_record else 0
                missing = {i for i in missing if at + sum(chunk.window(i)) <= end}
            elif at not in _offsets(seen.records.get(block_id)):
                yield f"{name}: block {block_id} has no record of the chunk at {at}"
            if missing:
                yield f"{name}: block {block_id} chunk {at}: windows {sorted(missing)} not repaired"


def _harm(before: Replicas, after: Replicas, gone: Set[BlockId]) -> Iterator[str]:
    """Bytes and records that changed although they were good, or belong to nobody."""
    for name, was in before.items():
        now = after[name]
        for block_id, record in was.records.items():
            kept = {c.offset: c for c in now.records[block_id].chunks if block_id in now.records}
            for chunk in record.chunks:
                if chunk.offset not in kept or _essence(kept[chunk.offset]) != _essence(chunk):
                    yield f"{name}: block {block_id}: the record of chunk {chunk.offset} changed"
        for file_name, data in was.files.items():
            block_id = BlockId(int(file_name.removesuffix(".block")))
            proven = None if block_id in gone else now.records.get(block_id)
            if not _only_repaired(data, now.file(block_id), proven):
                yield f"{name}: {file_name}: bytes changed that were good, or that nothing proves"


def _only_repaired(was: bytes, now: bytes, record: BlockRecord | None) -> bool:
    """Whether the bytes are as before, but for bad windows that are good now."""
    expected = was.ljust(len(now), b"\0")
    for chunk in record.chunks if record else ():
        for index in good_windows(chunk, now) - good_windows(chunk, was):
            low, length = chunk.window(index)
            low, high = chunk.offset + low, chunk.offset + low + length
            expected = expected[:low] + now[low:high] + expected[high:]
    return expected == now


def _resurrections(after: Replicas, dead: Mapping[str, Set[BlockId]]) -> Iterator[str]:
    for name, blocks in dead.items():
        for block_id in blocks:
            if block_id in after[name].records or f"{block_id}.block" in after[name].files:
                yield f"{name}: deleted block {block_id} came back"
