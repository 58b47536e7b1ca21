"""One block's repair: which record decides, which windows are bad, from whom they come,
and when they may be written.

A `BlockRepairer` belongs to a reconciliation (repair.reconciliation), which hands it
the events of its block and takes along the requests it has for them. A chunk passes
through: check our file, fetch what is bad, write what is proven, next source for the
rest; then it is done, or failed for a reason that is kept.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from merkle.checksum import ChecksumType
from merkle.outcome import Evidence, EvidenceKind, PeerOutcome, Verdict
from merkle.plan import BlockRepair, ChunkRepair
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import ChunkTree, ContainerId
from merkle.windows import ProvenWindows, is_sound, runs_of
from repair.requests import (
    CheckLocal,
    FetchWindows,
    LocalChecked,
    PutBlock,
    Request,
    WindowsArrived,
    WindowsWritten,
    WriteWindows,
)

# A peer that failed this often in one job is not asked again in it.
_FAILURES_MAX = 3

Failure: TypeAlias = tuple[Verdict, Evidence]
_Refusal: TypeAlias = tuple[Verdict, EvidenceKind, str]


class Sources:
    """How the peers have behaved in this job."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.bytes_fetched: dict[PeerId, int] = dict.fromkeys(peers, 0)
        self._failures: dict[PeerId, int] = dict.fromkeys(self.bytes_fetched, 0)
        self._broken_promises: dict[PeerId, int] = dict.fromkeys(self.bytes_fetched, 0)
        self._codes: dict[PeerId, str] = {}

    def failed(self, peer: PeerId, code: str) -> None:
        """It did not answer, or not to what it was asked."""
        self._failures[peer] += 1
        self._codes[peer] = code

    def broke_promise(self, peer: PeerId, code: str) -> None:
        """Its tree called a chunk healthy, and it did not have it so.

        It lies, or has not looked lately: rot that no scan has found yet. So it is
        asked after others from now on, but it is asked: it may be the only one that
        holds the next window whole. Each chunk asks it once at most.
        """
        self._broken_promises[peer] += 1
        self._codes.setdefault(peer, code)

    def failure_score(self, peer: PeerId) -> int:
        """How many others to ask before it, relatively."""
        return self._failures[peer] + self._broken_promises[peer]

    def is_usable(self, peer: PeerId) -> bool:
        """Whether the peer is still asked in this job."""
        return self._failures[peer] < _FAILURES_MAX

    def outcomes(self) -> tuple[PeerOutcome, ...]:
        """What each peer gave."""
        return tuple(
            PeerOutcome(peer, self._codes.get(peer, "ok"), fetched)
            for peer, fetched in self.bytes_fetched.items()
        )


@dataclass(slots=True, eq=False)
class ChunkRepairer:
    """One chunk; `wanted` are the windows still lacking proven bytes, None before the
    check.
    """

    offset: int
    record: ChunkRecord
    # Whether our record does not name it yet.
    is_new: bool
    sources: list[PeerId]
    partial_sources: frozenset[PeerId]
    wanted: set[int] | None = None
    held: list[tuple[ProvenWindows, PeerId]] = field(default_factory=list)
    fetching: bool = False
    writing: bool = False
    unreachable: bool = False
    done: bool = False
    failed: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is done about the chunk."""
        return self.done or self.failed

    def position(self, run: ProvenWindows) -> int:
        """Where a run begins, in bytes from the start of the block."""
        return self.offset + self.record.window(run.first)[0]


class BlockRepairer:
    """One block; requests gather in `out` until they are taken."""

    def __init__(
        self,
        repair: BlockRepair,
        own: BlockRecord | None,
        records: Mapping[PeerId, BlockRecord],
        entries: Mapping[PeerId, Mapping[int, ChunkTree]],
        sources: Sources,
        *,
        committed: int,
        at_once_max: int,
    ) -> None:
        """`records` and `entries` are the holders': their records, and their tree
        entries by offset.

        A holder with entries and no record was asked for one in vain. `committed` is
        our container's commit.
        """
        self.repair = repair
        self.block_id = repair.block_id
        self.own = own
        self.out: list[Request] = []
        self.failures: dict[int, Failure] = {}
        # Whether nothing stands against taking a peer's commit.
        self.is_clean = True
        # Deleted meanwhile, or damaged again: nothing more is done, what is under way
        # is heard and forgotten.
        self.is_dropped = False
        self._records = records
        self._entries = entries
        self._sources = sources
        self._committed = committed
        self._at_once_max = at_once_max
        self._chunks: list[ChunkRepairer] = []
        self._by_offset: dict[int, ChunkRepairer] = {}
        # All before it are settled.
        self._first_open = 0
        # Where what our record names, or will name, ends: there another chunk may
        # begin.
        self._ends = {ours.end for ours in (own.chunks if own else ())}
        self._file_bytes = 0
        for chunk in repair.chunks:
            chosen = self._chosen(chunk)
            if isinstance(chosen, ChunkRecord):
                self._add_chunk(chunk, chosen)
            else:
                self._give_up(chunk.offset, *chosen)

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is done about any chunk."""
        return next(self._open_chunks(), None) is None

    def repaired(self) -> list[ChunkRecord]:
        """The chunks that are whole now."""
        return [chunk.record for chunk in self._chunks if chunk.done]

    def start(self, count: int) -> int:
        """Have the first `count` open chunks under way; returns how many that are."""
        started = 0
        for chunk in islice(self._open_chunks(), count):
            started += 1
            if chunk.wanted is None and not chunk.fetching:
                chunk.fetching = True
                self.out.append(CheckLocal(self.block_id, chunk.record))
        return started

    def put(self, container_id: ContainerId) -> tuple[PutBlock | None, int]:
        """Of a settled block: the record to store, if it changed, and the commit that
        is ours now, 0 if it is not.

        The commit of a peer is taken only if nothing failed, and only of those whose
        every chunk we have, as far as it can be believed.
        """
        chunks = {ours.offset: ours for ours in (self.own.chunks if self.own else ())}
        chunks.update(
            {chunk.offset: chunk.record for chunk in self._chunks if chunk.is_new and chunk.done}
        )
        covered = [peer for peer, record in self._records.items() if _covers(chunks, record)]
        bcs_id = self.own.bcs_id if self.own else 0
        if self.is_clean:
            bcs_id = max(
                [
                    bcs_id,
                    *(believed_commit(peer, self._records, self._committed) for peer in covered),
                ]
            )
        self.is_clean = self.is_clean and len(covered) == len(self._records)
        adopted = bcs_id if self.is_clean else 0
        ordered = tuple(chunks[offset] for offset in sorted(chunks))
        if self.own is not None:
            own = self.own
            # A pending last chunk that peers hold in full, so that their trees have it:
            # ours shall have it too.
            is_pending_mended = own.chunks[-1:] and own.chunks[-1] in self.repaired()
            metadata = _settled(own.metadata) if is_pending_mended else own.metadata
            record = BlockRecord(
                container_id, self.block_id, bcs_id, ordered, metadata, own.replica_index
            )
            return (PutBlock(record) if record != own else None), adopted
        if not ordered:
            return None, adopted
        # The peer that knows most of the block describes it; the same one whoever is
        # asked first.
        knowing = max(
            (self._records[peer] for peer in sorted(self._records)),
            key=lambda record: (_covers(chunks, record), record.bcs_id),
        )
        return PutBlock(
            BlockRecord(container_id, self.block_id, bcs_id, ordered, _settled(knowing.metadata))
        ), adopted

    def drop(self) -> None:
        """Do nothing more."""
        self.is_dropped = True
        for chunk in self._chunks:
            chunk.held.clear()

    def local_checked(self, event: LocalChecked) -> int:
        """Returns how many bytes are bad."""
        chunk = self._by_offset[event.offset]
        chunk.fetching = False
        chunk.wanted = set(event.bad)
        self._file_bytes = max(self._file_bytes, event.file_bytes)
        return sum(chunk.record.window(index)[1] for index in event.bad)

    def windows_arrived(self, event: WindowsArrived) -> None:
        """Take in proven windows, and why others are missing."""
        self._sources.bytes_fetched[event.peer] += event.bytes_fetched
        chunk = self._by_offset[event.offset]
        chunk.fetching = False
        assert chunk.wanted is not None
        for run in event.runs:
            assert chunk.wanted.issuperset(run.windows)
            chunk.wanted.difference_update(run.windows)
            chunk.held.append((run, event.peer))
        chunk.unreachable = chunk.unreachable or event.retryable
        if event.retryable:
            self._sources.failed(event.peer, event.code)
            # It was cut off while it was of use: it may send the rest. Failures bound
            # how often.
            chunk.sources.append(event.peer)
        elif chunk.wanted and event.peer not in chunk.partial_sources:
            self._sources.broke_promise(event.peer, event.code or "windows_unproven")

    def fetch_failed(self, peer: PeerId, offset: int, code: str, *, retryable: bool) -> None:
        """Take in that a peer gave nothing for a chunk."""
        chunk = self._by_offset[offset]
        chunk.fetching = False
        chunk.unreachable = chunk.unreachable or retryable
        if retryable:
            self._sources.failed(peer, code)
        # One that holds the chunk corrupt, or perhaps not at all, promised nothing.
        elif peer not in chunk.partial_sources:
            self._sources.broke_promise(peer, code)

    def windows_written(self, event: WindowsWritten) -> None:
        """Take in that windows are durable."""
        chunk = self._by_offset[event.offset]
        chunk.writing = False
        for run in event.runs:
            self._file_bytes = max(self._file_bytes, chunk.position(run) + len(run.data))

    def advance(self) -> None:
        """Do for each chunk under way, in order, what can be done now."""
        if self.is_dropped:
            return
        # Those under way are the first ones open, and no more than may be.
        is_first = True
        for chunk in list(islice(self._open_chunks(), self._at_once_max)):
            if chunk.wanted is not None:
                self._advance_chunk(chunk, is_first=is_first)
            is_first = is_first and chunk.is_settled

    def _chosen(self, chunk: ChunkRepair) -> ChunkRecord | _Refusal:
        """The record that decides what this chunk's bytes are, or why none may."""
        if self.own is not None and chunk.offset in self.own.by_offset:
            own = self.own.by_offset[chunk.offset]
            if is_sound(own):
                return own
            return Verdict.UNKNOWN, EvidenceKind.UNVERIFIABLE, "our record has no usable checksums"
        proven: dict[PeerId, ChunkRecord] = {}
        others: dict[PeerId, ChunkRecord] = {}
        for peer, record in self._records.items():
            if chunk.offset not in record.by_offset:
                continue
            theirs = record.by_offset[chunk.offset]
            entry = self._entries[peer].get(chunk.offset)
            if entry is None or not entry.checksum_matches or not theirs.is_verifiable:
                others[peer] = theirs
            elif self._is_proven_record(theirs, entry):
                proven[peer] = theirs
            else:
                # Its record and its tree contradict each other, so neither says
                # anything about the chunk.
                self._sources.broke_promise(peer, "remote_protocol")
        agreed = {_essence(theirs) for theirs in (*proven.values(), *others.values())}
        if len(agreed) == 1 and self._may_be_contradicted(
            next(iter((*proven.values(), *others.values())))
        ):
            detail = "a holder that may have recorded something else gave no record"
            return Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, detail
        if proven and len(agreed) == 1:
            return proven[
                next(peer for peer in (*chunk.sources, *sorted(proven)) if peer in proven)
            ]
        if len(agreed) > 1:
            return Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, "the peers' records disagree"
        is_complete = all(peer in self._records for peer in self.repair.holders)
        if (
            not chunk.sources
            and others
            and (is_complete or len(others) > 1)
            and all(is_sound(theirs) for theirs in others.values())
        ):
            # All copies are bad somewhere, so no tree can bear a record out. Bytes can:
            # those who have a record agree on it, and it is taken only once it has
            # proven every window, bytes from elsewhere if one gave it.
            return others[min(others)]
        if not is_complete:
            return Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, "a holder gave no record"
        if agreed and not any(theirs.is_verifiable for theirs in others.values()):
            return (
                Verdict.UNKNOWN,
                EvidenceKind.UNVERIFIABLE,
                "the peers' records have no checksums",
            )
        return (
            Verdict.UNRECOVERABLE,
            EvidenceKind.RECORD_UNPROVEN,
            "no peer's record is borne out by its tree",
        )

    def _may_be_contradicted(self, record: ChunkRecord) -> bool:
        """Whether a holder was asked for its record in vain, and its tree does not bear
        this one out.
        """
        silent = (
            entries.get(record.offset)
            for peer, entries in self._entries.items()
            if peer not in self._records
        )
        return any(
            entry is None
            or not entry.checksum_matches
            or entry.data_checksum != record.data_checksum
            for entry in silent
        )

    def _is_proven_record(self, record: ChunkRecord, entry: ChunkTree) -> bool:
        return is_sound(record) and record.data_checksum == entry.data_checksum

    def _add_chunk(self, chunk: ChunkRepair, record: ChunkRecord) -> None:
        is_new = self.own is None or chunk.offset not in self.own.by_offset
        if is_new and self.own is not None and _overlaps(record, self.own.chunks):
            detail = "our record has other chunks here"
            self._give_up(chunk.offset, Verdict.CONFLICT, EvidenceKind.CHUNKINGS_OVERLAP, detail)
            return
        sources = list(dict.fromkeys((*chunk.sources, *chunk.partial_sources)))
        givers = [
            peer for peer, theirs in self._records.items() if chunk.offset in theirs.by_offset
        ]
        if is_new and not chunk.sources and len(givers) == 1:
            # Its bytes would fit its record even if both were forged.
            sources = [peer for peer in sources if peer != givers[0]]
        added = ChunkRepairer(
            chunk.offset, record, is_new, sources, frozenset(chunk.partial_sources)
        )
        self._chunks.append(added)
        self._by_offset[chunk.offset] = added

    def _open_chunks(self) -> Iterator[ChunkRepairer]:
        """Those not settled, in order."""
        while self._first_open < len(self._chunks) and self._chunks[self._first_open].is_settled:
            self._first_open += 1
        return (
            chunk for chunk in islice(self._chunks, self._first_open, None) if not chunk.is_settled
        )

    def _advance_chunk(self, chunk: ChunkRepairer, *, is_first: bool) -> None:
        """Write, fetch, or settle one chunk; one that is not the first open one may
        still be given its place.
        """
        self._write_held(chunk)
        if chunk.wanted and not chunk.fetching:
            self._fetch_next(chunk)
        if chunk.writing or chunk.fetching:
            return
        if not chunk.wanted and not chunk.held and (not chunk.is_new or self._follows(chunk)):
            chunk.done = True
            self._ends.add(chunk.record.end)
            if self._differs_at_all(chunk):
                detail = "mended here, but a peer recorded other checksums than we did"
                self._give_up(chunk.offset, Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, detail)
        elif is_first:
            self._chunk_failed(chunk)

    def _write_held(self, chunk: ChunkRepairer) -> None:
        if chunk.writing or not chunk.held or not self._may_write(chunk):
            return
        reach, source = self._file_bytes, None
        ready: list[ProvenWindows] = []
        for run, peer in sorted(chunk.held, key=lambda held: held[0].first):
            # One request has one source, so that the audit line can name it.
            if source in (None, peer) and self._fits(chunk.position(run), reach):
                ready.append(run)
                source = peer
                reach = max(reach, chunk.position(run) + len(run.data))
        if source is not None:
            chunk.held = [held for held in chunk.held if held[0] not in ready]
            chunk.writing = True
            self.out.append(WriteWindows(self.block_id, chunk.record, tuple(ready), source))

    def _fits(self, position: int, file_bytes: int) -> bool:
        return position <= file_bytes

    def _may_write(self, chunk: ChunkRepairer) -> bool:
        """One that no record of ours names only whole, and without a hole before it."""
        return not chunk.is_new or (not chunk.wanted and self._follows(chunk))

    def _follows(self, chunk: ChunkRepairer) -> bool:
        """Whether a record of ours names, or will name, what ends where the chunk
        begins.
        """
        return chunk.offset == 0 or chunk.offset in self._ends

    def _fetch_next(self, chunk: ChunkRepairer) -> None:
        """Ask the next source for what is still lacking: healthy ones before others,
        the most reliable first.
        """
        assert chunk.wanted is not None
        usable = [peer for peer in chunk.sources if self._sources.is_usable(peer)]
        if len(usable) < len(chunk.sources):
            chunk.unreachable = True
        if not usable:
            chunk.sources = []
            return
        essence = _essence(chunk.record)
        disagreeing = {
            peer
            for peer in usable
            if (record := self._records.get(peer)) is not None
            and (theirs := record.by_offset.get(chunk.offset)) is not None
            and _essence(theirs) != essence
        }
        peer = min(
            usable,
            key=lambda p: (
                p in disagreeing,
                p in chunk.partial_sources,
                self._sources.failure_score(p),
            ),
        )
        chunk.sources.remove(peer)
        chunk.fetching = True
        self.out.append(
            FetchWindows(peer, self.block_id, chunk.record, tuple(sorted(chunk.wanted)))
        )

    def _chunk_failed(self, chunk: ChunkRepairer) -> None:
        """Nothing more can be done for this chunk in this round; say why."""
        assert chunk.wanted is not None
        if not chunk.wanted:
            verdict = (
                self.failures[min(self.failures)][0] if self.failures else Verdict.UNRECOVERABLE
            )
            detail = "what lies before it is missing, and is not to be had"
            self._give_up(chunk.offset, verdict, EvidenceKind.HOLE, detail)
        elif chunk.unreachable:
            detail = f"{_windows(chunk.wanted)}: a source did not answer"
            self._give_up(chunk.offset, Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, detail)
        elif self._differs_at_all(chunk):
            detail = f"{_windows(chunk.wanted)}: a peer recorded other checksums than we did"
            self._give_up(chunk.offset, Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, detail)
        else:
            detail = f"{_windows(chunk.wanted)}: bad everywhere"
            self._give_up(
                chunk.offset, Verdict.UNRECOVERABLE, EvidenceKind.WINDOWS_UNPROVEN, detail
            )
        chunk.failed = True
        chunk.held.clear()

    def _differs_at_all(self, chunk: ChunkRepairer) -> bool:
        """Whether a peer recorded something else for this chunk; a record that its own
        tree belies does not count.
        """
        for peer, record in self._records.items():
            theirs = record.by_offset.get(chunk.offset)
            if theirs is None or _essence(theirs) == _essence(chunk.record):
                continue
            entry = self._entries[peer].get(chunk.offset)
            if (
                entry is None
                or not entry.checksum_matches
                or theirs.data_checksum == entry.data_checksum
            ):
                return True
        return False

    def _give_up(self, offset: int, verdict: Verdict, kind: EvidenceKind, detail: str) -> None:
        self.is_clean = False
        self.failures[offset] = verdict, Evidence(kind, self.block_id, offset, detail)


def believed_commit(peer: PeerId, records: Mapping[PeerId, BlockRecord], committed: int) -> int:
    """The commit in a peer's record of a block, or a lower one if that is all that
    others bear out.

    Up to our container's own commit it changes nothing that SCM or a reader goes by.
    One beyond that must not be contradicted by another peer, which has recorded every
    chunk of this one's and still an earlier commit: then the highest of those counts. A
    record with commit 0 says nothing. Among honest peers a later commit comes with more
    data, so that the peer who has it is not contradicted and Ozone's rule, the highest,
    holds.
    """
    record = records[peer]
    others = [
        theirs.bcs_id
        for other, theirs in records.items()
        if other != peer and theirs.bcs_id and _covers(theirs.by_offset, record)
    ]
    if not others or record.bcs_id <= max(committed, *others):
        return record.bcs_id
    return max(others)


def _settled(metadata: tuple[tuple[str, str | None], ...]) -> tuple[tuple[str, str | None], ...]:
    """A block's metadata without the mark that has readers look for a pending last
    chunk: our list is whole.
    """
    return tuple(entry for entry in metadata if entry[0] != "incremental")


def _essence(chunk: ChunkRecord) -> tuple[int, ChecksumType, int, Sequence[bytes]]:
    """What two records of one chunk must have in common to mean the same bytes."""
    return chunk.length_bytes, chunk.checksum_type, chunk.bytes_per_checksum, chunk.checksums


def _overlaps(chunk: ChunkRecord, ours: Sequence[ChunkRecord]) -> bool:
    """Whether a chunk lies over one of ours, which are in order and do not overlap."""
    at = bisect_left(ours, chunk.offset, key=lambda own: own.offset)
    return any(
        own.offset < chunk.end and chunk.offset < own.end for own in ours[max(at - 1, 0) : at + 1]
    )


def _covers(chunks: Mapping[int, ChunkRecord], record: BlockRecord) -> bool:
    """Whether every chunk of a peer's record is ours too, by offset and length."""
    return all(
        (ours := chunks.get(theirs.offset)) is not None and ours.length_bytes == theirs.length_bytes
        for theirs in record.chunks
    )


def _windows(wanted: Iterable[int]) -> str:
    """Window numbers for people, shortened: "windows 3, 7-9"."""
    runs = [
        str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}"
        for run in runs_of(sorted(wanted))
    ]
    return "windows " + ", ".join(runs[:10]) + (", ..." if len(runs) > 10 else "")
