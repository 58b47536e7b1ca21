"""Decide what is known of an erasure-coded container from the data of its replicas.

A block's data are cut into stripes, and each stripe into one cell for every data
replica, in the order of their indexes; the cells of the parity replicas are computed
from them. A replica has its cell of stripe n at offset n * cell length. Any `data` of
the cells give back all others, so a stripe is readable while so many are whole. A cell
without bytes, at the end of a block, needs no replica.

The first replica and those of parity also have the checksums of all cells of a stripe
on record. A cell that matches its own record, but not these, has a record of something
else: nothing decides between the two, and it is a CONFLICT.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from live.deep_read import DeepReading, group_length_bytes
from merkle.checksum import WIDTH
from merkle.comparison import Comparison, Difference, DifferenceKind
from merkle.outcome import Evidence, EvidenceKind, Verdict
from merkle.record import ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from ozone.scm_client import ErasureCode


@dataclass(frozen=True, slots=True)
class ErasureReplica:
    """What was read of one replica; `index` counts from 1, those of parity last."""

    peer: PeerId
    index: int
    reading: DeepReading


@dataclass(frozen=True, slots=True)
class StripeDamage:
    """One stripe that is not whole: the indexes of replicas that lack its cell, and of
    those whose record contradicts the checksums of the stripe.
    """

    block_id: BlockId
    stripe: int
    lacking: tuple[int, ...]
    conflicting: tuple[int, ...]
    is_readable: bool


@dataclass(frozen=True, slots=True)
class StripeReport:
    """All stripes of a container: their number, and those that are not whole, by block
    and number.
    """

    stripe_count: int
    damages: tuple[StripeDamage, ...]
    comparison: Comparison

    @property
    def readable_count(self) -> int:
        """How many stripes still give all of their data."""
        return self.stripe_count - sum(not one.is_readable for one in self.damages)


def stripe_text(damage: StripeDamage) -> str:
    """What is wrong with a stripe, in words."""
    found = [("lacked by", damage.lacking), ("contradicted by the record of", damage.conflicting)]
    return ", ".join(
        f"{what} replica index {', '.join(map(str, indexes))}" for what, indexes in found if indexes
    )


def compare_stripes(
    container_id: ContainerId, code: ErasureCode, replicas: Sequence[ErasureReplica]
) -> StripeReport:
    """The stripes of a container whose replicas were read with their records.

    A replica that was not read counts as one without cells, but is in no damage: the
    caller knows what it could change.
    """
    deleted = {
        block.block_id for one in replicas for block in one.reading.tree.blocks if block.deleted
    }
    found = {number for one in replicas for number in one.reading.records} - deleted
    count, damages = 0, list[StripeDamage]()
    differences, evidence = list[Difference](), list[Evidence]()
    for block_id in sorted(found):
        block = _Block(block_id, code, replicas)
        count += len(block.stripes)
        for stripe in block.stripes:
            cells = block.cells(stripe)
            damage = _damage(block, stripe, cells)
            if damage is not None:
                damages.append(damage)
                differences += _differences(block, stripe, cells, damage)
                evidence += _evidence(code, damage, code.cell_bytes * stripe)
    compared = Comparison(container_id, _verdict(damages), tuple(differences), tuple(evidence))
    return StripeReport(count, tuple(damages), compared)


@dataclass(frozen=True, slots=True)
class _Cell:
    """One replica's part of a stripe; `kind` is what is wrong with it, if anything."""

    replica: ErasureReplica
    chunks: tuple[ChunkRecord, ...]
    kind: DifferenceKind | None

    @property
    def entries(self) -> bytes:
        """Its recorded checksums, joined."""
        return b"".join(chunk.entries for chunk in self.chunks)


@dataclass(frozen=True)
class _Block:
    """One block on all replicas."""

    block_id: BlockId
    code: ErasureCode
    replicas: Sequence[ErasureReplica]

    @cached_property
    def length_bytes(self) -> int:
        """Of all data cells. A stripe that failed while it was written is on some
        replicas only, and is written again to another block: the least is what counts,
        as for Ozone.
        """
        records = (one.reading.records.get(self.block_id) for one in self.replicas)
        return min(group_length_bytes(one) for one in records if one is not None)

    @cached_property
    def stripes(self) -> Sequence[int]:
        """In ascending order; the last one may be short. Of stripes in a row that have
        no chunk anywhere the first stands for the others: a wrong length, or a chunk
        far away, must not cost time without end.
        """
        count = -(-self.length_bytes // (self.code.data * self.code.cell_bytes))
        held = {stripe for found in self._chunks_by_stripe.values() for stripe in found}
        return sorted(one for one in held | {one + 1 for one in held} | {0} if one < count)

    def cell_length(self, stripe: int, index: int) -> int:
        """The length of a replica's cell, in bytes; that of parity is the longest."""
        cell, at = self.code.cell_bytes, index - 1 if index <= self.code.data else 0
        start = (stripe * self.code.data + at) * cell
        return max(0, min(cell, self.length_bytes - start))

    def cells(self, stripe: int) -> list[_Cell]:
        """The cells of a stripe on the replicas that were read and should have one."""
        return [
            self._cell(one, stripe) for one in self.replicas if self.cell_length(stripe, one.index)
        ]

    def _cell(self, replica: ErasureReplica, stripe: int) -> _Cell:
        start, reading = stripe * self.code.cell_bytes, replica.reading
        if self.block_id not in reading.records:
            return _Cell(replica, (), DifferenceKind.MISSING_BLOCK)
        chunks = tuple(self._chunks_by_stripe[replica.peer].get(stripe, ()))
        length = self.cell_length(stripe, replica.index)
        is_present = (
            sum(chunk.length_bytes for chunk in chunks) == length
            and chunks[0].offset == start
            and chunks[-1].end == start + length
        )
        places = [(self.block_id, chunk.offset) for chunk in chunks]
        kind = None
        if not is_present or any(place in reading.lost for place in places):
            kind = DifferenceKind.MISSING_CHUNK
        elif any(place in reading.bad_windows for place in places):
            kind = DifferenceKind.CORRUPT_CHUNK
        return _Cell(replica, chunks, kind)

    @cached_property
    def _chunks_by_stripe(self) -> Mapping[PeerId, Mapping[int, list[ChunkRecord]]]:
        found: dict[PeerId, dict[int, list[ChunkRecord]]] = {}
        for one in self.replicas:
            by_stripe = found[one.peer] = defaultdict(list)
            record = one.reading.records.get(self.block_id)
            for chunk in record.chunks if record else ():
                by_stripe[chunk.offset // self.code.cell_bytes].append(chunk)
        return found


def _damage(block: _Block, stripe: int, cells: Sequence[_Cell]) -> StripeDamage | None:
    """What is wrong with a stripe, None if nothing is."""
    lacking = {cell.replica.index for cell in cells if cell.kind is not None}
    conflicting = set(_conflicting(block, stripe, cells))
    if not lacking and not conflicting:
        return None
    # Another replica of the same index may have the cell.
    whole = {cell.replica.index for cell in cells if cell.kind is None} - conflicting
    empty = sum(not block.cell_length(stripe, index + 1) for index in range(block.code.data))
    is_readable = len(whole) + empty >= block.code.data
    return StripeDamage(
        block.block_id, stripe, tuple(sorted(lacking)), tuple(sorted(conflicting)), is_readable
    )


def _conflicting(block: _Block, stripe: int, cells: Sequence[_Cell]) -> Iterator[int]:
    """The indexes whose records differ from the checksums of the stripe on another."""
    for holder in cells:
        if not holder.chunks or holder.chunks[0].stripe_checksum is None:
            continue
        chunk, stripe_checksum, at = holder.chunks[0], holder.chunks[0].stripe_checksum, 0
        for index in range(1, block.code.data + block.code.parity + 1):
            windows = -(-block.cell_length(stripe, index) // max(1, chunk.bytes_per_checksum))
            end = at + windows * WIDTH[chunk.checksum_type]
            for cell in cells:
                is_compared = cell.replica.index == index and cell.kind is None
                if is_compared and cell.entries != stripe_checksum[at:end]:
                    yield index
            at = end
        if at != len(stripe_checksum):
            yield holder.replica.index


def _differences(
    block: _Block, stripe: int, cells: Sequence[_Cell], damage: StripeDamage
) -> Iterator[Difference]:
    offset, conflicting = stripe * block.code.cell_bytes, damage.conflicting
    whole = sorted(
        cell.replica.peer
        for cell in cells
        if cell.kind is None and cell.replica.index not in conflicting
    )
    sources = tuple(whole) if damage.is_readable else ()
    for kind in DifferenceKind:
        lacking = tuple(sorted(cell.replica.peer for cell in cells if cell.kind is kind))
        # A lacking block lacks all of its stripes: it is named once.
        if lacking and (kind is not DifferenceKind.MISSING_BLOCK or stripe == 0):
            where = None if kind is DifferenceKind.MISSING_BLOCK else offset
            yield Difference(kind, block.block_id, where, lacking, sources)
    peers = tuple(sorted(c.replica.peer for c in cells if c.replica.index in conflicting))
    if peers:
        yield Difference(DifferenceKind.CONFLICTING_CHUNK, block.block_id, offset, peers, ())


def _evidence(code: ErasureCode, damage: StripeDamage, offset: int) -> Iterator[Evidence]:
    where = f"stripe {damage.stripe}: {stripe_text(damage)}"
    if damage.conflicting:
        yield Evidence(EvidenceKind.RECORDS_DIFFER, damage.block_id, offset, where)
    elif not damage.is_readable:
        text = f"{where}, and any {code.data} cells are needed"
        yield Evidence(EvidenceKind.BYTES_LOST, damage.block_id, offset, text)


def _verdict(damages: Sequence[StripeDamage]) -> Verdict:
    if any(not one.is_readable and not one.conflicting for one in damages):
        return Verdict.UNRECOVERABLE
    if any(one.conflicting for one in damages):
        return Verdict.CONFLICT
    return Verdict.REPAIRABLE if damages else Verdict.MATCH
