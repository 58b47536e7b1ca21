"""The repair of one block: it chooses the record and the sources, and orders writes.

A reconciliation (repair.reconciliation) passes the events of a block to its
`BlockRepairer` and collects the resulting requests. For each chunk the repairer checks
our file, fetches the bad windows, writes the proven ones, and turns to the next source
for the rest. The chunk ends as done, or as failed with the evidence.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from merkle.outcome import Evidence, EvidenceKind, Verdict
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
    RequestFailed,
    WindowsArrived,
    WindowsWritten,
    WriteWindows,
)
from repair.sources import Sources

Failure: TypeAlias = tuple[Verdict, Evidence]
_Refusal: TypeAlias = tuple[Verdict, EvidenceKind, str]


@dataclass(slots=True, eq=False)
class ChunkRepairer:
    """The state of one chunk's repair. `wanted` are the windows that have no proven
    bytes yet; None before the check. `held` are proven windows that are not written
    yet.
    """

    offset: int
    record: ChunkRecord
    # Our record does not list the chunk yet.
    is_new: bool
    sources: list[PeerId]
    partial_sources: frozenset[PeerId]
    # The peers whose bytes may be good, as far as anybody has read them.
    unread: frozenset[PeerId]
    wanted: set[int] | None = None
    held: list[tuple[ProvenWindows, PeerId]] = field(default_factory=list)
    fetching: bool = False
    writing: bool = False
    done: bool = False
    failed: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether the chunk needs no more requests."""
        return self.done or self.failed

    def position(self, run: ProvenWindows) -> int:
        """The start of a run, in bytes from the start of the block."""
        return self.offset + self.record.window(run.first)[0]


class BlockRepairer:
    """The repair of one block; `out` holds its requests until they are collected."""

    def __init__(
        self,
        repair: BlockRepair,
        own: BlockRecord | None,
        records: Mapping[PeerId, BlockRecord],
        entries: Mapping[PeerId, Mapping[int, ChunkTree]],
        sources: Sources,
        *,
        committed: int,
        chunks_max: int,
    ) -> None:
        """`records` and `entries` are the holders' records and their tree entries by
        offset.

        A holder with entries but no record did not answer the request for it.
        `committed` is our container's commit. At most `chunks_max` chunks are repaired
        at a time.
        """
        self.repair = repair
        self.block_id = repair.block_id
        self.own = own
        self.out: list[Request] = []
        self.failures: dict[int, Failure] = {}
        # Nothing failed, so a peer's commit may be adopted.
        self.is_clean = True
        # The block was deleted or damaged again meanwhile: no more requests are made,
        # and the events of open ones are ignored.
        self.is_dropped = False
        self._records = records
        self._entries = entries
        self._sources = sources
        self._committed = committed
        self._chunks_max = chunks_max
        self._chunks: list[ChunkRepairer] = []
        self._by_offset: dict[int, ChunkRepairer] = {}
        # All chunks before this index are settled.
        self._first_open = 0
        # The ends of the chunks that our record lists or will list: only there another
        # chunk may begin.
        self._ends = {ours.end for ours in (own.chunks if own else ())}
        self._file_bytes = 0
        for chunk in repair.chunks:
            choice = self._choose_record(chunk)
            if isinstance(choice, ChunkRecord):
                self._add_chunk(chunk, choice)
            else:
                self._add_failure(chunk.offset, *choice)

    @property
    def is_settled(self) -> bool:
        """Whether no chunk needs more requests."""
        return next(self._open_chunks(), None) is None

    def repaired(self) -> list[ChunkRecord]:
        """The records of the chunks that are healthy now."""
        return [chunk.record for chunk in self._chunks if chunk.done]

    def start(self, count: int) -> int:
        """Start the first `count` open chunks unless they are started; returns their
        number.
        """
        started = 0
        for chunk in islice(self._open_chunks(), count):
            started += 1
            if chunk.wanted is None and not chunk.fetching:
                chunk.fetching = True
                self.out.append(CheckLocal(self.block_id, chunk.record))
        return started

    def put(self, container_id: ContainerId) -> tuple[PutBlock | None, int]:
        """The request to store a settled block's record, if it changed, and the commit
        that the container may adopt, otherwise 0.

        A peer's commit is adopted only if nothing failed and we have every chunk of its
        record, and only as far as `believed_commit` allows.
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
            # If a pending last chunk was repaired, peers hold it in full and their
            # trees contain it; ours must too.
            is_last_repaired = own.chunks[-1:] and own.chunks[-1] in self.repaired()
            metadata = _without_incremental_mark(own.metadata) if is_last_repaired else own.metadata
            record = BlockRecord(
                container_id, self.block_id, bcs_id, ordered, metadata, own.replica_index
            )
            return (PutBlock(record) if record != own else None), adopted
        if not ordered:
            return None, adopted
        # Take the metadata of the latest record that our chunks cover. Sorting makes
        # the choice independent of the order of the answers.
        latest = max(
            (self._records[peer] for peer in sorted(self._records)),
            key=lambda record: (_covers(chunks, record), record.bcs_id),
        )
        metadata = _without_incremental_mark(latest.metadata)
        return PutBlock(
            BlockRecord(container_id, self.block_id, bcs_id, ordered, metadata)
        ), adopted

    def drop(self) -> None:
        """Make no more requests."""
        self.is_dropped = True
        for chunk in self._chunks:
            chunk.held.clear()

    def local_checked(self, event: LocalChecked) -> int:
        """Handle the check of our file; returns the number of bad bytes."""
        chunk = self._by_offset[event.offset]
        chunk.fetching = False
        chunk.wanted = set(event.bad)
        self._file_bytes = max(self._file_bytes, event.file_bytes)
        return sum(chunk.record.window(index)[1] for index in event.bad)

    def windows_arrived(self, event: WindowsArrived) -> None:
        """Handle the proven windows of a fetch, and the error that ended it, if any."""
        self._sources.bytes_fetched[event.peer] += event.bytes_fetched
        chunk = self._by_offset[event.offset]
        chunk.fetching = False
        assert chunk.wanted is not None
        for run in event.runs:
            assert chunk.wanted.issuperset(run.windows)
            chunk.wanted.difference_update(run.windows)
            chunk.held.append((run, event.peer))
        if event.code and not event.lacks_bytes:
            chunk.unread |= {event.peer}
        if event.retryable:
            self._sources.record_failure(event.peer, event.code)
            # The connection broke while the peer sent good windows, so it may send the
            # rest. The job's limit of failures bounds the attempts.
            chunk.sources.append(event.peer)
        elif chunk.wanted and event.peer not in chunk.partial_sources:
            self._sources.record_false_claim(event.peer, event.code or "windows_unproven")

    def fetch_failed(self, peer: PeerId, offset: int, event: RequestFailed) -> None:
        """Handle a fetch that returned no windows."""
        chunk = self._by_offset[offset]
        chunk.fetching = False
        if not event.lacks_bytes:
            chunk.unread |= {peer}
        if event.retryable:
            self._sources.record_failure(peer, event.code)
        # A partial source did not claim that its copy is healthy.
        elif peer not in chunk.partial_sources:
            self._sources.record_false_claim(peer, event.code)

    def windows_written(self, event: WindowsWritten) -> None:
        """Handle durable windows."""
        chunk = self._by_offset[event.offset]
        chunk.writing = False
        for run in event.runs:
            self._file_bytes = max(self._file_bytes, chunk.position(run) + len(run.data))

    def advance(self) -> None:
        """Make the next requests of each started chunk, in offset order."""
        if self.is_dropped:
            return
        # The started chunks are the first open ones.
        is_first = True
        for chunk in list(islice(self._open_chunks(), self._chunks_max)):
            if chunk.wanted is not None:
                self._advance_chunk(chunk, is_first=is_first)
            is_first = is_first and chunk.is_settled

    def _choose_record(self, chunk: ChunkRepair) -> ChunkRecord | _Refusal:
        """The record that this chunk's bytes must match, or why there is none."""
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
                # The peer's record and tree contradict each other, so neither counts.
                self._sources.record_false_claim(peer, "remote_protocol")
        contents = {theirs.content for theirs in (*proven.values(), *others.values())}
        if len(contents) == 1 and self._may_be_contradicted(
            next(iter((*proven.values(), *others.values())))
        ):
            detail = "a holder whose record may differ sent none"
            return Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, detail
        if proven and len(contents) == 1:
            return proven[
                next(peer for peer in (*chunk.sources, *sorted(proven)) if peer in proven)
            ]
        if len(contents) > 1:
            return Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, "the peers' records disagree"
        is_complete = all(peer in self._records for peer in self.repair.holders)
        if (
            not chunk.sources
            and others
            and (is_complete or len(others) > 1)
            and all(is_sound(theirs) for theirs in others.values())
        ):
            # Every copy has bad windows, so no tree can confirm a record; bytes can.
            # All records agree, and the chunk is stored only once every window is
            # proven. If one peer alone sent the record, bytes come from other peers.
            return others[min(others)]
        if not is_complete:
            return Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, "a holder sent no record"
        if contents and not any(theirs.is_verifiable for theirs in others.values()):
            return (
                Verdict.UNKNOWN,
                EvidenceKind.UNVERIFIABLE,
                "the peers' records have no checksums",
            )
        # Nothing was read, and nothing says which bytes would be good.
        return (
            Verdict.UNKNOWN,
            EvidenceKind.RECORD_UNPROVEN,
            "no peer's record is confirmed by its tree",
        )

    def _may_be_contradicted(self, record: ChunkRecord) -> bool:
        """Whether a holder sent no record although it was requested, and its tree does
        not confirm this one.
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
            self._add_failure(
                chunk.offset, Verdict.CONFLICT, EvidenceKind.CHUNKINGS_OVERLAP, detail
            )
            return
        sources = list(dict.fromkeys((*chunk.sources, *chunk.partial_sources)))
        recorders = [
            peer for peer, theirs in self._records.items() if chunk.offset in theirs.by_offset
        ]
        if is_new and not chunk.sources and len(recorders) == 1:
            # The peer's bytes would match its record even if both were forged.
            sources = [peer for peer in sources if peer != recorders[0]]
        # A copy that is corrupt exactly as ours is no source, and is read with ours.
        alike = {
            peer
            for peer, entries in self._entries.items()
            if chunk.offset in entries and peer not in (*chunk.sources, *chunk.partial_sources)
        }
        added = ChunkRepairer(
            chunk.offset,
            record,
            is_new,
            sources,
            frozenset(chunk.partial_sources),
            frozenset(self._sources.bytes_fetched) - alike,
        )
        self._chunks.append(added)
        self._by_offset[chunk.offset] = added

    def _open_chunks(self) -> Iterator[ChunkRepairer]:
        """The chunks that are not settled, in offset order."""
        while self._first_open < len(self._chunks) and self._chunks[self._first_open].is_settled:
            self._first_open += 1
        return (
            chunk for chunk in islice(self._chunks, self._first_open, None) if not chunk.is_settled
        )

    def _advance_chunk(self, chunk: ChunkRepairer, *, is_first: bool) -> None:
        """Write, fetch or settle one chunk. Only the first open one can fail, because a
        chunk before it may still close the gap.
        """
        self._write_held(chunk)
        if chunk.wanted and not chunk.fetching:
            self._fetch_next(chunk)
        if chunk.writing or chunk.fetching:
            return
        if not chunk.wanted and not chunk.held and (not chunk.is_new or self._follows(chunk)):
            chunk.done = True
            self._ends.add(chunk.record.end)
            if self._has_differing_record(chunk):
                detail = "repaired here, but a peer's record has other checksums than ours"
                self._add_failure(
                    chunk.offset, Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, detail
                )
        elif is_first:
            self._fail(chunk)

    def _write_held(self, chunk: ChunkRepairer) -> None:
        if chunk.writing or not chunk.held or not self._may_write(chunk):
            return
        file_bytes, source = self._file_bytes, None
        ready: list[ProvenWindows] = []
        for run, peer in sorted(chunk.held, key=lambda held: held[0].first):
            # A request has one source, so that the audit line can name it.
            if source in (None, peer) and self._fits(chunk.position(run), file_bytes):
                ready.append(run)
                source = peer
                file_bytes = max(file_bytes, chunk.position(run) + len(run.data))
        if source is not None:
            chunk.held = [held for held in chunk.held if held[0] not in ready]
            chunk.writing = True
            self.out.append(WriteWindows(self.block_id, chunk.record, tuple(ready), source))

    def _fits(self, position: int, file_bytes: int) -> bool:
        return position <= file_bytes

    def _may_write(self, chunk: ChunkRepairer) -> bool:
        """Whether windows may be written now; a chunk that our record does not list is
        written only whole and without a gap before it.
        """
        return not chunk.is_new or (not chunk.wanted and self._follows(chunk))

    def _follows(self, chunk: ChunkRepairer) -> bool:
        """Whether the chunk begins where a chunk ends that our record lists or will
        list.
        """
        return chunk.offset == 0 or chunk.offset in self._ends

    def _fetch_next(self, chunk: ChunkRepairer) -> None:
        """Fetch the remaining windows from the next source: peers whose record agrees
        first, then healthy sources, then the most reliable.
        """
        assert chunk.wanted is not None
        usable = [peer for peer in chunk.sources if self._sources.is_usable(peer)]
        if not usable:
            chunk.sources = []
            return
        content = chunk.record.content
        disagreeing = {
            peer
            for peer in usable
            if (record := self._records.get(peer)) is not None
            and (theirs := record.by_offset.get(chunk.offset)) is not None
            and theirs.content != content
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
        chunk.unread -= {peer}
        chunk.fetching = True
        self.out.append(
            FetchWindows(peer, self.block_id, chunk.record, tuple(sorted(chunk.wanted)))
        )

    def _fail(self, chunk: ChunkRepairer) -> None:
        """Give the chunk up for this round, with the evidence."""
        assert chunk.wanted is not None
        if not chunk.wanted:
            # The chunk itself has a source. If no chunk before it failed, no record
            # that could prove bytes lists what is missing there.
            verdict = self.failures[min(self.failures)][0] if self.failures else Verdict.UNKNOWN
            detail = "the data before it is missing and has no source"
            self._add_failure(chunk.offset, verdict, EvidenceKind.HOLE, detail)
        elif self._may_be_whole(chunk):
            detail = f"{_window_text(chunk.wanted)}: {len(chunk.unread)} copies were not read"
            self._add_failure(
                chunk.offset, Verdict.UNKNOWN, EvidenceKind.SOURCE_UNREACHABLE, detail
            )
        elif self._has_differing_record(chunk):
            detail = f"{_window_text(chunk.wanted)}: a peer's record has other checksums than ours"
            self._add_failure(chunk.offset, Verdict.CONFLICT, EvidenceKind.RECORDS_DIFFER, detail)
        else:
            detail = f"{_window_text(chunk.wanted)}: bad in every copy"
            self._add_failure(
                chunk.offset, Verdict.UNRECOVERABLE, EvidenceKind.WINDOWS_UNPROVEN, detail
            )
        chunk.failed = True
        chunk.held.clear()

    def _may_be_whole(self, chunk: ChunkRepairer) -> bool:
        """Whether copies that were not read may have all of the windows that are bad in
        the others.
        """
        assert chunk.wanted is not None
        if len(chunk.unread) == 1 and len(chunk.wanted) == len(chunk.record.checksums):
            (peer,) = chunk.unread
            entry = self._entries.get(peer, {}).get(chunk.offset)
            # No other copy has any good window, and this one's own scan found a bad
            # one.
            return entry is None or entry.checksum_matches
        return bool(chunk.unread)

    def _has_differing_record(self, chunk: ChunkRepairer) -> bool:
        """Whether a peer's record of this chunk differs; one that contradicts the
        peer's own tree does not count.
        """
        for peer, record in self._records.items():
            theirs = record.by_offset.get(chunk.offset)
            if theirs is None or theirs.content == chunk.record.content:
                continue
            entry = self._entries[peer].get(chunk.offset)
            if (
                entry is None
                or not entry.checksum_matches
                or theirs.data_checksum == entry.data_checksum
            ):
                return True
        return False

    def _add_failure(self, offset: int, verdict: Verdict, kind: EvidenceKind, detail: str) -> None:
        self.is_clean = False
        self.failures[offset] = verdict, Evidence(kind, self.block_id, offset, detail)


def believed_commit(peer: PeerId, records: Mapping[PeerId, BlockRecord], committed: int) -> int:
    """The commit in a peer's record of a block, or a lower one if other peers
    contradict it.

    A commit up to our container's (`committed`) has no effect on SCM or on readers, so
    it is accepted. A later one is contradicted by another peer whose record has the
    same chunks but an earlier commit; then the highest commit of such peers is
    returned. Records with commit 0 are ignored. Among honest peers a later commit has
    more data and is not contradicted, which gives Ozone's rule, the highest commit.
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


def _without_incremental_mark(
    metadata: tuple[tuple[str, str | None], ...],
) -> tuple[tuple[str, str | None], ...]:
    """A block's metadata without the mark that makes readers look for a pending last
    chunk: our record lists all chunks.
    """
    return tuple(entry for entry in metadata if entry[0] != "incremental")


def _overlaps(chunk: ChunkRecord, ours: Sequence[ChunkRecord]) -> bool:
    """Whether a chunk overlaps one of ours, which are sorted and disjoint."""
    index = bisect_left(ours, chunk.offset, key=lambda own: own.offset)
    return any(
        own.offset < chunk.end and chunk.offset < own.end
        for own in ours[max(index - 1, 0) : index + 1]
    )


def _covers(chunks: Mapping[int, ChunkRecord], record: BlockRecord) -> bool:
    """Whether `chunks` has every chunk of the record, by offset and length."""
    return all(
        (ours := chunks.get(theirs.offset)) is not None and ours.length_bytes == theirs.length_bytes
        for theirs in record.chunks
    )


def _window_text(wanted: Iterable[int]) -> str:
    """Window indices as text, ten ranges at most: "windows 3, 7-9"."""
    runs = [
        str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}"
        for run in runs_of(sorted(wanted))
    ]
    return "windows " + ", ".join(runs[:10]) + (", ..." if len(runs) > 10 else "")
