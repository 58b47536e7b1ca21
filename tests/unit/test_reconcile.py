"""What a reconciliation asks for, event by event, on replicas in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.outcome import EvidenceKind, OutcomeState, RepairOutcome, Verdict
from merkle.plan import BlockRepair, ChunkFault, ChunkRepair
from merkle.record import BlockRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.errors import UndoBudgetError
from repair.ports import Piece
from repair.reconciliation import Reconciliation
from repair.requests import (
    AdvanceBcsId,
    Cancelled,
    CheckLocal,
    Event,
    FetchRecords,
    FetchTree,
    FetchWindows,
    LoadOwn,
    LoadRecords,
    PutBlock,
    ReconcileOptions,
    ReportOutcome,
    Request,
    RequestFailed,
    Rescan,
    Scanned,
    StoreTree,
    WriteWindows,
)
from repair.round import (
    PAGE_BLOCKS_MAX,
    PAGE_CHUNKS_MAX,
    PAGE_DATA_BYTES_MAX,
    page_length,
)
from repair.runner import execute_local, execute_remote
from runtime.errors import PeerRefusedError, PeerUnavailableError, RemoteProtocolError
from tests.support.faults import Forger
from tests.support.memory import CrashError, RepairableReplica
from tests.support.peers import Evil, EvilPeer, MemoryPeer, MemoryReplica, MemorySource, replica_of

WINDOW = 16
CHUNK = 4 * WINDOW
BLOCK = 3 * CHUNK
A = BlockId(1)
B = BlockId(2)
OWN = PeerId("dn1")


@dataclass
class World:
    """Our replica, its peers, and what was asked of them, in order."""

    ours: RepairableReplica
    peers: dict[PeerId, MemoryPeer]
    asked: list[Request]

    def of(self, kind: type[Request]) -> list[Request]:
        return [request for request in self.asked if isinstance(request, kind)]

    def disk(self, peer: str) -> MemoryReplica:
        return self.peers[PeerId(peer)].source.replicas[ContainerId(7)]


def world(*blocks: int, peers: int = 2, length: int = BLOCK, bcs_id: int = 1) -> World:
    """Equal, healthy replicas of these blocks."""
    copies = [_stored(blocks, length, bcs_id) for _ in range(peers + 1)]
    others = {
        PeerId(f"dn{i}"): MemoryPeer(PeerId(f"dn{i}"), MemorySource(copies[i - 1]))
        for i in range(2, peers + 2)
    }
    return World(RepairableReplica("dn1", copies[0]), others, [])


def _stored(blocks: Iterable[int], length: int, bcs_id: int) -> MemoryReplica:
    stored = replica_of(7, dict.fromkeys(blocks, length), window_bytes=WINDOW, chunk_bytes=CHUNK)
    stored.bcs_id = bcs_id
    stored.records = {
        block_id: replace(record, bcs_id=bcs_id) for block_id, record in stored.records.items()
    }
    return stored


def scan(stored: MemoryReplica) -> None:
    """Bring the tree up to what the bytes are; the state stays."""
    stored.tree = encode_tree(RepairableReplica("scan", replace(stored)).examine()[0])


class Failing(MemoryPeer):
    """A peer that cannot be read."""

    def __init__(self, peer_id: PeerId, error: ReconcileError) -> None:
        super().__init__(peer_id, MemorySource())
        self._error = error

    def read(self, *_: object) -> Iterator[Piece]:
        raise self._error


def drop_record(stored: MemoryReplica, block_id: BlockId, *, data_too: bool) -> None:
    del stored.records[block_id]
    if data_too:
        del stored.files[block_id]


def run(
    at: World,
    options: ReconcileOptions | None = None,
    *,
    meddle: Callable[[Request], Event | None] = lambda _: None,
    stop_before: int | None = None,
) -> RepairOutcome:
    """Everything in the order asked; `meddle` may answer in the place of the world, or
    change it.
    """
    machine = Reconciliation(ContainerId(7), OWN, sorted(at.peers), options)
    waiting = list(machine.start())
    at.asked = []
    while waiting:
        if len(at.asked) == stop_before:
            raise CrashError
        request = waiting.pop(0)
        at.asked.append(request)
        if isinstance(request, ReportOutcome):
            continue
        event = meddle(request)
        if event is None:
            match request:
                case FetchTree() | FetchRecords() | FetchWindows():
                    event = execute_remote(request, ContainerId(7), at.peers[request.peer])
                case _:
                    event = execute_local(request, at.ours)
        waiting += machine.step(event)
    assert machine.outcome is not None
    assert at.of(ReportOutcome) == [ReportOutcome(machine.outcome)]
    return machine.outcome


def kinds(outcome: RepairOutcome) -> set[EvidenceKind]:
    return {EvidenceKind(evidence.kind) for evidence in outcome.evidence}


def healthy(at: World, block_id: BlockId) -> bytes:
    return bytes(
        replica_of(7, {block_id: BLOCK}, window_bytes=WINDOW, chunk_bytes=CHUNK).files[block_id]
    )


def test_equal_replicas_are_left_alone_and_only_trees_are_asked_for() -> None:
    """CR-040."""
    at = world(A, B)
    outcome = run(at, ReconcileOptions(skip_final_scan=True))
    assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.MATCH)
    assert {type(request) for request in at.asked} == {LoadOwn, FetchTree, ReportOutcome}


def test_damage_that_no_tree_shows_yet_is_found_and_mended_in_the_same_job() -> None:
    """As Ozone scans after every reconciliation; ours goes on from what that scan
    finds.
    """
    at = world(A, B)
    at.ours.stored.flip(B, CHUNK)
    outcome = run(at)
    assert outcome.verdict is Verdict.REPAIRABLE
    assert outcome.progress.windows_written == 1
    assert bytes(at.ours.stored.files[B]) == healthy(at, B)


def test_only_the_bad_window_of_a_corrupt_chunk_is_fetched_and_written() -> None:
    """CR-030"""
    at = world(A)
    at.ours.stored.flip(A, CHUNK + WINDOW)
    scan(at.ours.stored)
    outcome = run(at)
    (fetch,) = at.of(FetchWindows)
    assert isinstance(fetch, FetchWindows)
    assert fetch.windows == (1,)
    assert outcome.progress.bytes_fetched == outcome.progress.bytes_written == WINDOW
    assert outcome.verdict is Verdict.REPAIRABLE
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert not at.of(PutBlock)


def test_a_chunk_that_nobody_holds_whole_is_put_together_window_by_window() -> None:
    at = world(A)
    at.ours.stored.flip(A, 0)
    at.disk("dn2").flip(A, WINDOW)
    at.disk("dn3").flip(A, 2 * WINDOW)
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.REPAIRABLE
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert outcome.progress.bytes_fetched == WINDOW


def test_what_a_peer_lacks_too_is_asked_of_the_next_one_and_good_windows_are_kept() -> None:
    at = world(A)
    for window in (0, 1):
        at.ours.stored.flip(A, window * WINDOW)
    at.disk("dn2").flip(A, 0)
    at.disk("dn3").flip(A, WINDOW)
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    outcome = run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert [
        len(fetch.windows) for fetch in at.of(FetchWindows) if isinstance(fetch, FetchWindows)
    ] == [2, 1]
    assert outcome.verdict is Verdict.REPAIRABLE


def test_good_windows_are_written_even_if_others_are_bad_everywhere() -> None:
    at = world(A)
    for stored, windows in (
        (at.ours.stored, (0, 1)),
        (at.disk("dn2"), (1, 2)),
        (at.disk("dn3"), (1, 3)),
    ):
        for window in windows:
            stored.flip(A, window * WINDOW)
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.UNRECOVERABLE
    assert EvidenceKind.WINDOWS_UNPROVEN in kinds(outcome)
    assert outcome.progress.bytes_written == WINDOW
    assert bytes(at.ours.stored.files[A][:WINDOW]) == healthy(at, A)[:WINDOW]


def test_a_tree_that_is_wrong_about_our_data_makes_us_write_nothing() -> None:
    """inv-I4: what matches here is not written again, whatever trees say."""
    at = world(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    at.ours.stored.flip(A, 0)
    outcome = run(at)
    assert outcome.progress.bytes_fetched == outcome.progress.bytes_written == 0
    assert outcome.data_checksum == at.peers[PeerId("dn2")].tree(ContainerId(7)).data_checksum


def test_bytes_beyond_the_recorded_end_stay() -> None:
    at = world(A)
    at.ours.stored.files[A] += b"more"
    at.ours.stored.flip(A, BLOCK - 1)
    scan(at.ours.stored)
    run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A) + b"more"


def test_a_truncated_block_is_refilled_in_order_in_one_pass() -> None:
    """CR-003"""
    at = world(A)
    del at.ours.stored.files[A][CHUNK + 5 :]
    scan(at.ours.stored)
    outcome = run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert outcome.progress.rounds == 1


def test_a_chunk_that_our_record_lacks_is_written_whole_or_not_at_all() -> None:
    """Three of its windows can be had, the last one nowhere."""
    at = world(A)
    ours = at.ours.stored
    ours.records[A] = _only(ours.records[A], (0,), 1)
    del ours.files[A][CHUNK:]
    for peer in ("dn2", "dn3"):
        at.disk(peer).flip(A, 2 * CHUNK - 1)
    for stored in (ours, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    outcome = run(at)
    assert outcome.progress.bytes_fetched >= CHUNK - WINDOW
    assert not at.of(WriteWindows)
    assert bytes(ours.files[A]) == healthy(at, A)[:CHUNK]
    assert (outcome.verdict, _offsets(at)) == (Verdict.UNRECOVERABLE, [0])


@pytest.mark.parametrize("offset", [CHUNK + WINDOW, 2 * CHUNK - 1], ids=["a window", "one byte"])
def test_a_chunk_is_not_laid_over_another_that_only_our_record_has(offset: int) -> None:
    """Our file ends before it, so that no tree of ours shows the overlap."""
    at = world(A)
    ours, whole = at.ours.stored, at.ours.stored.records[A]
    later = replace(whole.chunks[1], offset=offset, checksum_type=ChecksumType.CRC32)
    ours.records[A] = replace(whole, chunks=(whole.chunks[0], later))
    del ours.files[A][CHUNK:]
    scan(ours)
    outcome = run(at, ReconcileOptions(rounds_max=1))
    assert outcome.verdict is Verdict.CONFLICT
    assert EvidenceKind.CHUNKINGS_OVERLAP in kinds(outcome)
    assert bytes(ours.files[A]) == healthy(at, A)[:CHUNK]
    assert ours.records[A].chunks == (whole.chunks[0], later)


def test_a_file_is_never_extended_past_a_gap() -> None:
    at = world(A)
    del at.ours.stored.files[A][:]
    for peer in ("dn2", "dn3"):
        at.disk(peer).flip(A, 0)
        at.disk(peer).flip(A, WINDOW * (2 if peer == "dn2" else 3))
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.UNRECOVERABLE
    assert EvidenceKind.HOLE in kinds(outcome)
    assert len(at.ours.stored.files[A]) == 0


def test_at_most_the_allowed_number_of_chunks_is_under_way() -> None:
    at = world(*range(1, 9))
    for block_id in at.ours.stored.files:
        at.ours.stored.flip(block_id, 0)
        at.ours.stored.flip(block_id, CHUNK)
    scan(at.ours.stored)
    machine = Reconciliation(ContainerId(7), OWN, sorted(at.peers), ReconcileOptions(fetches_max=3))
    under_way: list[Request] = list(machine.start())
    most = 0
    while under_way:
        bulk = [
            request
            for request in under_way
            if isinstance(request, FetchWindows | WriteWindows | CheckLocal)
        ]
        most = max(most, len(bulk))
        # Bulk is answered last, so that as much as may be is under way.
        request = next((one for one in under_way if one not in bulk), under_way[0])
        under_way.remove(request)
        match request:
            case FetchTree() | FetchRecords() | FetchWindows():
                under_way += machine.step(
                    execute_remote(request, ContainerId(7), at.peers[request.peer])
                )
            case ReportOutcome():
                pass
            case _:
                under_way += machine.step(execute_local(request, at.ours))
    assert most == 3
    assert machine.outcome is not None
    assert machine.outcome.progress.chunks_repaired == 16


def test_a_peer_that_sends_bad_bytes_is_passed_over_and_asked_last_from_then_on() -> None:
    """CR-036."""
    at = world(A, B)
    at.peers[PeerId("dn2")] = EvilPeer(
        PeerId("dn2"), at.peers[PeerId("dn2")].source, Evil.BAD_BYTES
    )
    for block_id in (A, B):
        at.ours.stored.flip(block_id, 0)
        at.ours.stored.flip(block_id, CHUNK)
    scan(at.ours.stored)
    outcome = run(at, ReconcileOptions(fetches_max=1))
    assert outcome.verdict is Verdict.REPAIRABLE
    asked = [fetch.peer for fetch in at.of(FetchWindows) if isinstance(fetch, FetchWindows)]
    assert asked.count(PeerId("dn2")) <= 1
    assert {block_id: bytes(at.ours.stored.files[block_id]) for block_id in (A, B)} == {
        block_id: healthy(at, block_id) for block_id in (A, B)
    }


@pytest.mark.parametrize("evil", list(Evil))
def test_one_honest_peer_is_enough_for_what_we_have_records_of(evil: Evil) -> None:
    """inv-I11: all others lie or hang; a tombstone that a peer claims is adopted, and
    said.
    """
    at = world(A, peers=3)
    for peer in ("dn2", "dn3"):
        at.peers[PeerId(peer)] = EvilPeer(PeerId(peer), at.peers[PeerId(peer)].source, evil)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    outcome = run(at)
    if evil is Evil.ALL_DELETED:
        assert outcome.claimed_deleted == (A,)
    elif evil in (
        Evil.TREE_OF_ANOTHER_CONTENT,
        Evil.CHANGING_TREE,
        Evil.RECORDS_CUT_SHORT,
    ):
        # Copies that are both said to be good and differ are for a person to judge.
        assert outcome.verdict is Verdict.CONFLICT
    else:
        assert bytes(at.ours.stored.files[A]) == healthy(at, A)


def test_rot_that_a_peer_has_not_seen_yet_does_not_keep_it_from_giving_the_rest() -> None:
    """inv-I1: each of many chunks is whole in one place only, and no tree says so."""
    chunks = 8
    at = world(A, length=chunks * CHUNK)
    for index in range(chunks):
        at.ours.stored.flip(A, index * CHUNK)
        at.disk("dn3" if index % 2 else "dn2").flip(A, index * CHUNK)
    outcome = run(at)
    assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.REPAIRABLE)
    assert outcome.progress.windows_written == chunks
    assert RepairableReplica("scan", replace(at.ours.stored)).examine()[1] == ()


def test_a_peer_without_an_answer_leaves_no_claim_that_all_is_well() -> None:
    """inv-I12."""
    at = world(A)
    at.peers[PeerId("dn2")] = EvilPeer(
        PeerId("dn2"), at.peers[PeerId("dn2")].source, Evil.NEVER_ANSWERS
    )
    outcome = run(at)
    assert outcome.verdict is Verdict.UNKNOWN
    assert [(peer.peer, peer.outcome) for peer in outcome.peers] == [
        ("dn2", "peer_unavailable"),
        ("dn3", "ok"),
    ]


def test_no_loss_is_declared_while_a_peer_that_may_have_the_data_is_silent() -> None:
    at = world(A)
    at.peers[PeerId("dn2")] = EvilPeer(
        PeerId("dn2"), at.peers[PeerId("dn2")].source, Evil.NEVER_ANSWERS
    )
    at.ours.stored.flip(A, 0)
    at.disk("dn3").flip(A, 0)
    for stored in (at.ours.stored, at.disk("dn3")):
        scan(stored)
    assert run(at).verdict is Verdict.UNKNOWN


def test_all_peers_failing_changes_nothing_and_is_reported() -> None:
    """CR-029, R7."""
    at = world(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    outcome = run(
        at, meddle=lambda r: RequestFailed(r, "peer_refused") if isinstance(r, FetchTree) else None
    )
    assert (outcome.state, outcome.error_code, outcome.verdict) == (
        OutcomeState.FAILED,
        "no_peer",
        None,
    )
    assert {type(request) for request in at.asked} == {LoadOwn, FetchTree, ReportOutcome}


def test_a_lost_record_of_whole_data_is_taken_from_a_peer_without_fetching_a_byte() -> None:
    at = world(A)
    drop_record(at.ours.stored, A, data_too=False)
    scan(at.ours.stored)
    outcome = run(at)
    assert outcome.progress.bytes_fetched == 0
    assert at.ours.stored.records[A] == at.disk("dn2").records[A]


def test_a_missing_block_is_added_with_its_metadata_and_commit_after_its_bytes() -> None:
    at = world(A, B, bcs_id=5)
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    outcome = run(at)
    order = [
        type(request)
        for request in at.asked
        if isinstance(request, WriteWindows | PutBlock | StoreTree | Rescan)
    ]
    assert order == [WriteWindows] * 3 + [PutBlock, StoreTree, Rescan]
    assert at.ours.stored.records[A] == at.disk("dn2").records[A]
    assert at.ours.stored.records[A].metadata == (("TYPE", "KEY"),)
    assert outcome.progress.blocks_added == 1


def test_records_that_disagree_are_a_conflict_and_none_is_taken() -> None:
    at = world(A)
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    theirs = at.disk("dn3")
    other = replica_of(7, {A: BLOCK}, seed=9, window_bytes=WINDOW, chunk_bytes=CHUNK)
    theirs.records, theirs.files, theirs.tree = other.records, other.files, None
    scan(theirs)
    # As if the third one's tree were lost on the way: the records alone must tell.
    honest = at.peers[PeerId("dn2")].tree(ContainerId(7))
    (block,) = honest.blocks
    doubtful = replace(
        block, chunks=tuple(replace(chunk, checksum_matches=False) for chunk in block.chunks)
    )
    theirs.tree = encode_tree(ContainerTree.of(ContainerId(7), [doubtful]))
    outcome = run(at)
    assert outcome.verdict is Verdict.CONFLICT
    assert EvidenceKind.RECORDS_DIFFER in kinds(outcome)
    assert A not in at.ours.stored.records
    assert A not in at.ours.stored.files


def test_a_record_that_its_own_tree_belies_is_set_aside_for_an_honest_one() -> None:
    at = world(A)
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    at.peers[PeerId("dn2")] = Forger(PeerId("dn2"), at.peers[PeerId("dn2")].source, Evil.BAD_BYTES)
    outcome = run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert outcome.verdict is Verdict.REPAIRABLE


def test_our_own_record_decides_even_if_all_peers_recorded_something_else() -> None:
    at = world(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    for peer in ("dn2", "dn3"):
        other = replica_of(7, {A: BLOCK}, seed=9, window_bytes=WINDOW, chunk_bytes=CHUNK)
        at.disk(peer).records, at.disk(peer).files, at.disk(peer).tree = (
            other.records,
            other.files,
            other.tree,
        )
    before, record = bytes(at.ours.stored.files[A]), at.ours.stored.records[A]
    outcome = run(at)
    assert outcome.verdict is Verdict.CONFLICT
    assert bytes(at.ours.stored.files[A]) == before
    assert at.ours.stored.records[A] == record


def test_a_record_without_checksums_is_never_taken_in_nor_repaired_by() -> None:
    at = world(A, B)
    for stored in (at.disk("dn2"), at.disk("dn3")):
        stored.records[A] = _unverifiable(stored.records[A])
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    outcome = run(at)
    assert outcome.state is OutcomeState.DONE
    assert A not in at.ours.stored.records
    assert A not in at.ours.stored.files


def _unverifiable(record: BlockRecord) -> BlockRecord:
    chunks = tuple(replace(c, checksum_type=ChecksumType.NONE, checksums=()) for c in record.chunks)
    return replace(record, chunks=chunks)


def test_two_holders_that_recorded_the_same_are_believed_where_no_copy_is_whole() -> None:
    at = world(A)
    drop_record(at.ours.stored, A, data_too=True)
    at.disk("dn2").flip(A, 0)
    at.disk("dn3").flip(A, WINDOW)
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    outcome = run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert outcome.verdict is Verdict.REPAIRABLE


@pytest.mark.parametrize("sound", ["dn3", ""])
def test_a_holder_that_gave_no_record_may_contradict_the_others(sound: str) -> None:
    """Its tree says that it has a record of the chunk and does not bear out theirs: who
    gave one may have lied.
    """
    at = world(A, peers=3)
    drop_record(at.ours.stored, A, data_too=True)
    for window, peer in enumerate(("dn2", "dn3", "dn4")):
        if peer != sound:
            at.disk(peer).flip(A, window * WINDOW)
        scan(at.disk(peer))
    scan(at.ours.stored)

    def silent(request: Request) -> Event | None:
        is_asked = isinstance(request, FetchRecords) and request.peer == "dn2"
        return RequestFailed(request, "peer_unavailable", retryable=True) if is_asked else None

    outcome = run(at, meddle=silent)
    assert outcome.verdict is Verdict.UNKNOWN
    assert EvidenceKind.SOURCE_UNREACHABLE in kinds(outcome)
    # The first chunk is the one that is damaged; what lies behind it waits.
    assert A not in at.ours.stored.records
    assert A not in at.ours.stored.files
    assert run(at).verdict is Verdict.REPAIRABLE
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)


def test_a_single_holder_whose_tree_does_not_bear_out_its_record_is_not_believed() -> None:
    at = world(A, peers=1)
    drop_record(at.ours.stored, A, data_too=True)
    at.disk("dn2").flip(A, 0)
    for stored in (at.ours.stored, at.disk("dn2")):
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.UNRECOVERABLE
    assert A not in at.ours.stored.files


@pytest.mark.parametrize("is_whole", [True, False], ids=["confirmed by its tree", "whole nowhere"])
def test_a_record_that_lacks_a_checksum_is_never_taken(*, is_whole: bool) -> None:
    """It would prove all windows but the last, and the last would be lost."""
    at = world(A)
    drop_record(at.ours.stored, A, data_too=True)
    drop_record(at.disk("dn3"), A, data_too=False)
    theirs = at.disk("dn2")
    record = theirs.records[A]
    short = replace(record.chunks[-1], checksums=record.chunks[-1].checksums[:-1])
    theirs.records[A] = replace(record, chunks=(*record.chunks[:-1], short))
    for stored in (at.ours.stored, at.disk("dn3")):
        scan(stored)
    leaf = ChunkTree(short.offset, short.length_bytes, short.data_checksum, is_whole)
    (block,) = theirs.scanned_tree().blocks
    claimed = BlockTree.live(A, [*block.chunks[:-1], leaf])
    theirs.tree = encode_tree(ContainerTree.of(ContainerId(7), [claimed]))
    outcome = run(at)
    assert EvidenceKind.RECORD_UNPROVEN in kinds(outcome)
    assert _offsets(at) == [0, 1]
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)[: 2 * CHUNK]


@pytest.mark.parametrize("flipped", ["dn2", "dn2 dn3", "ours"])
def test_a_file_that_outlived_its_record_is_a_source_where_no_copy_is_whole(flipped: str) -> None:
    """Whoever has a record is bad in the same window, and whoever has the good bytes
    has no record.
    """
    at = world(A)
    replicas = {"ours": at.ours.stored, "dn2": at.disk("dn2"), "dn3": at.disk("dn3")}
    for name, stored in replicas.items():
        if name in flipped.split():
            stored.flip(A, WINDOW)
        else:
            drop_record(stored, A, data_too=False)
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.REPAIRABLE
    assert at.ours.stored.records[A].chunks == _stored([A], BLOCK, 1).records[A].chunks
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    # A peer that has no such file is not held to have broken a promise.
    assert all(peer.outcome == "ok" for peer in outcome.peers)


def test_a_record_of_ours_that_was_lost_after_the_scan_comes_from_whoever_is_bad_alike() -> None:
    """Its bytes are of no use to us, so that it was no source to begin with."""
    at = world(A)
    drop_record(at.disk("dn3"), A, data_too=False)
    for stored in (at.ours.stored, at.disk("dn2")):
        stored.flip(A, 0)
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    drop_record(at.ours.stored, A, data_too=False)
    assert run(at).verdict is Verdict.REPAIRABLE
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)


@pytest.mark.parametrize("has_file", [True, False], ids=["file elsewhere", "nowhere"])
@pytest.mark.parametrize("kept", [0, 2 * CHUNK], ids=["whole block", "last chunk"])
def test_what_we_have_on_record_and_nobody_in_a_tree_is_looked_for_in_files_without_record(
    has_file: bool, kept: int
) -> None:
    """The record here, its bytes there: no tree has the chunk, so that only a scan of
    ours knows of it.
    """
    at = world(A, B)
    for stored in (at.disk("dn2"), at.disk("dn3")):
        drop_record(stored, A, data_too=not has_file)
        scan(stored)
    if kept:
        del at.ours.stored.files[A][kept:]
    else:
        del at.ours.stored.files[A]
    outcome = run(at, ReconcileOptions(return_to=ReplicaState.CLOSED))
    assert outcome.state is OutcomeState.DONE
    assert outcome.verdict is (Verdict.REPAIRABLE if has_file else Verdict.UNRECOVERABLE)
    assert all(peer.outcome == "ok" for peer in outcome.peers)
    if has_file:
        assert bytes(at.ours.stored.files[A]) == healthy(at, A)
        assert outcome.replica_state is ReplicaState.CLOSED
        # From now on our tree has it, so that the others take the record, and with it
        # what they hold already.
        tree, _ = at.ours.known_tree()
        assert tree is not None
        assert {block.block_id for block in tree.blocks} == {A, B}
    else:
        assert (EvidenceKind.WINDOWS_UNPROVEN, A) in {
            (e.kind, e.block_id) for e in outcome.evidence
        }


def test_a_peer_without_a_file_is_asked_in_vain_and_stays_a_source_for_other_blocks() -> None:
    at = world(*range(1, 9), peers=2)
    for block_id in map(BlockId, range(1, 9)):
        at.ours.stored.flip(block_id, 0)
        drop_record(at.disk("dn2"), block_id, data_too=block_id < 8)
        drop_record(at.disk("dn3"), block_id, data_too=block_id < 8)
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.UNRECOVERABLE
    assert bytes(at.ours.stored.files[BlockId(8)]) == healthy(at, BlockId(8))


def test_a_pending_last_chunk_that_peers_have_in_full_is_settled_here() -> None:
    """Our reading of the record is theirs already; as long as it stays in two parts, no
    scan can see it so.
    """
    at = world(A)
    record = at.ours.stored.records[A]
    at.ours.stored.records[A] = replace(record, metadata=(*record.metadata, ("incremental", None)))
    block = at.ours.stored.scanned_tree().blocks[0]
    at.ours.stored.tree = encode_tree(
        ContainerTree.of(
            ContainerId(7), [BlockTree.live(A, block.chunks[:-1])]
        )  # as a scan of the stored part sees it
    )
    run(at)
    assert at.of(PutBlock) == [PutBlock(record)]


def test_records_of_many_blocks_are_asked_for_a_page_at_a_time() -> None:
    count = 2 * PAGE_BLOCKS_MAX + 1
    at = world(*range(1, count + 1), length=WINDOW)
    for block_id in list(at.ours.stored.records):
        drop_record(at.ours.stored, block_id, data_too=True)
    scan(at.ours.stored)
    outcome = run(at)
    assert outcome.progress.blocks_added == count
    assert (
        max(len(r.block_ids) for r in at.of(FetchRecords) if isinstance(r, FetchRecords))
        == PAGE_BLOCKS_MAX
    )


@pytest.mark.parametrize(
    ("blocks", "chunks", "length", "expected"),
    [
        (PAGE_BLOCKS_MAX, 1, 4096, PAGE_BLOCKS_MAX),
        (3, PAGE_CHUNKS_MAX // 2, 1, 2),
        (3, PAGE_CHUNKS_MAX // 2 + 1, 1, 1),
        (3, 64, PAGE_DATA_BYTES_MAX // 128, 2),
        (2, 1, 2 * PAGE_DATA_BYTES_MAX, 1),
    ],
)
def test_a_page_is_as_long_as_the_memory_of_its_records_allows(
    blocks: int, chunks: int, length: int, expected: int
) -> None:
    """Counts of chunks are those of whichever tree has the most."""
    small = tuple(ChunkTree(i * length, length, 1) for i in range(min(chunks, 2)))
    large = tuple(ChunkTree(i * length, length, 1) for i in range(chunks))
    trees = [
        ContainerTree(
            ContainerId(7), 0, tuple(BlockTree(BlockId(i), 0, False, held) for i in range(blocks))
        )
        for held in (small, large)
    ]
    fault = ChunkRepair(0, ChunkFault.MISSING, (PeerId("dn2"),))
    repairs = [BlockRepair(BlockId(i), (), (fault,)) for i in range(blocks)]
    assert page_length(repairs, trees) == expected


def _with_peer_block(
    chunks: Sequence[int], *, own: Sequence[int] = (0,), unhealthy: Sequence[int] = ()
) -> World:
    """Rows B: our block 0 has a chunk at 0 and commit 1; the one peer's has these
    chunks and commit 99.
    """
    at = world(A, peers=1, length=4 * CHUNK)
    theirs, ours = at.disk("dn2"), at.ours.stored
    theirs.records[A] = _only(theirs.records[A], chunks, 99)
    theirs.bcs_id = 99
    ours.records[A] = _only(ours.records[A], own, 1)
    del ours.files[A][len(own) * CHUNK :]
    for chunk in unhealthy:
        theirs.flip(A, chunk * CHUNK)
    for stored in (ours, theirs):
        scan(stored)
    return at


def _only(record: BlockRecord, chunks: Iterable[int], bcs_id: int) -> BlockRecord:
    return replace(record, chunks=tuple(record.chunks[i] for i in chunks), bcs_id=bcs_id)


def _commits(at: World) -> tuple[int, int]:
    return at.ours.stored.records[A].bcs_id, at.ours.stored.bcs_id


def _offsets(at: World, block_id: BlockId = A) -> list[int]:
    return [chunk.offset // CHUNK for chunk in at.ours.stored.records[block_id].chunks]


def test_a_hole_stops_the_block_and_keeps_both_commits() -> None:
    """B1."""
    at = _with_peer_block((0, 1, 3))
    outcome = run(at)
    assert _offsets(at) == [0, 1]
    assert _commits(at) == (1, 1)
    # The last chunk is whole at the peer; no record lists what is missing before it.
    assert outcome.verdict is Verdict.UNKNOWN
    assert EvidenceKind.HOLE in kinds(outcome)


def test_a_peers_unhealthy_chunk_is_left_out_and_keeps_both_commits() -> None:
    """B2."""
    at = _with_peer_block((0, 1, 2), unhealthy=(2,))
    run(at)
    assert _offsets(at) == [0, 1]
    assert _commits(at) == (1, 1)


def test_of_a_missing_block_the_healthy_beginning_is_taken() -> None:
    """B3; a new block that is not whole has commit 0."""
    at = _with_peer_block((0, 1, 2), unhealthy=(2,))
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    run(at)
    assert _offsets(at) == [0, 1]
    assert _commits(at) == (0, 1)


def test_a_block_that_is_whole_takes_the_peers_commit_and_the_container_after_a_clean_round() -> (
    None
):
    """B4."""
    at = _with_peer_block((0, 1))
    commits: list[tuple[int, int]] = []

    def look(request: Request) -> None:
        if isinstance(request, AdvanceBcsId):
            commits.append(_commits(at))

    run(at, meddle=look)
    assert commits == [(99, 1)]
    assert _commits(at) == (99, 99)


def test_one_block_that_is_not_whole_keeps_the_containers_commit() -> None:
    """B5: another block is whole and has its commit."""
    at = world(A, B, peers=1)
    theirs, ours = at.disk("dn2"), at.ours.stored
    theirs.records[A], theirs.records[B] = (
        _only(theirs.records[A], (0, 1, 2), 98),
        _only(theirs.records[B], (0, 1), 99),
    )
    theirs.flip(A, 2 * CHUNK)
    for block_id in (A, B):
        ours.records[block_id] = _only(ours.records[block_id], (0,), 1)
        del ours.files[block_id][CHUNK:]
    for stored in (ours, theirs):
        scan(stored)
    run(at)
    assert (ours.records[A].bcs_id, ours.records[B].bcs_id, ours.bcs_id) == (1, 99, 1)


def test_an_unhealthy_chunk_anywhere_keeps_the_containers_commit() -> None:
    """B6: what nobody can give us is in no repair, and yet not ours."""
    at = world(A, B, peers=1)
    theirs, ours = at.disk("dn2"), at.ours.stored
    theirs.records[A] = _only(theirs.records[A], (0, 1), 99)
    ours.records[A] = _only(ours.records[A], (0,), 1)
    del ours.files[A][CHUNK:]
    for stored in (ours, theirs):
        stored.flip(B, 0)
        scan(stored)
    outcome = run(at)
    assert _commits(at) == (99, 1)
    assert outcome.verdict is Verdict.UNRECOVERABLE


def test_a_block_with_a_failed_chunk_keeps_its_commit() -> None:
    """The peer's record has no chunk that ours lacks, only a later commit."""
    at = world(A, peers=1)
    theirs = at.disk("dn2")
    theirs.records[A] = replace(theirs.records[A], bcs_id=99)
    # Damage of one window, but not alike, so that the chunk is tried.
    theirs.flip(A, CHUNK)
    for offset in (0, CHUNK + 1):
        at.ours.stored.flip(A, offset)
    for stored in (at.ours.stored, theirs):
        scan(stored)
    outcome = run(at)
    assert outcome.progress.windows_written == 1
    assert outcome.verdict is Verdict.UNRECOVERABLE
    assert _commits(at) == (1, 1)


@pytest.mark.parametrize(
    ("committed", "honest", "other", "taken"),
    [
        (1, 99, 10**15, (99, 99)),
        # Our container is there already: the block's commit may be any up to it.
        (500, 99, 500, (500, 500)),
        # A record without a commit contradicts nothing.
        (1, 0, 10**15, (10**15, 10**15)),
    ],
)
def test_a_commit_that_another_peer_with_the_same_chunks_contradicts_is_not_taken(
    committed: int, honest: int, other: int, taken: tuple[int, int]
) -> None:
    at = world(A, peers=2, bcs_id=1)
    at.ours.stored.bcs_id = committed
    for peer, commit in (("dn2", honest), ("dn3", other)):
        at.disk(peer).records[A] = replace(at.disk(peer).records[A], bcs_id=commit)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    assert run(at).verdict is Verdict.REPAIRABLE
    assert _commits(at) == taken


def test_a_later_commit_of_a_peer_that_alone_has_the_last_chunk_is_taken() -> None:
    """As Ozone does: honest peers of one block differ in commit because they differ in
    chunks.
    """
    at = world(A, peers=2)
    for stored, chunks, commit in (
        (at.ours.stored, 1, 1),
        (at.disk("dn2"), 2, 10),
        (at.disk("dn3"), 3, 12),
    ):
        stored.records[A] = _only(stored.records[A], range(chunks), commit)
        del stored.files[A][chunks * CHUNK :]
        stored.bcs_id = commit
        scan(stored)
    run(at)
    assert _offsets(at) == [0, 1, 2]
    assert _commits(at) == (12, 12)


def _without_commit(*, peers: int = 2) -> World:
    """Equal replicas of blocks with commits 5 and 9, as the containers have; ours has
    lost its own.
    """
    at = world(A, B, peers=peers, bcs_id=9)
    for stored in (at.ours.stored, *(at.disk(peer) for peer in at.peers)):
        stored.records[A] = replace(stored.records[A], bcs_id=5)
    at.ours.stored.bcs_id = 0
    return at


def test_a_lost_commit_comes_back_from_our_records_once() -> None:
    at = _without_commit()
    assert run(at).verdict is Verdict.MATCH
    assert at.of(AdvanceBcsId) == [AdvanceBcsId(9)]
    assert at.ours.stored.bcs_id == 9
    run(at)
    assert at.of(AdvanceBcsId) == []


@pytest.mark.parametrize("record_too", [False, True])
@pytest.mark.parametrize("block_id", [A, B])
def test_a_replica_without_its_commit_returns_to_service_with_its_own_and_not_the_repaired_one(
    block_id: BlockId, record_too: bool
) -> None:
    """SCM would drop a replica that claims to be closed at an earlier commit, and
    readers are refused there.
    """
    at = _without_commit()
    if record_too:
        drop_record(at.ours.stored, block_id, data_too=True)
    else:
        at.ours.stored.flip(block_id, 0)
    at.ours.scan()
    at.ours.stored.state = ReplicaState.UNHEALTHY
    outcome = run(at, ReconcileOptions(return_to=ReplicaState.CLOSED))
    assert at.of(AdvanceBcsId) == [AdvanceBcsId(9)]
    assert (outcome.replica_state, at.ours.stored.bcs_id) == (ReplicaState.CLOSED, 9)


def test_a_lost_commit_comes_back_also_where_a_round_was_not_clean() -> None:
    """The replica is put together from two that are both bad: what is mended so takes
    no peer's commit that round.
    """
    at = _without_commit()
    for stored, chunk in (
        (at.ours.stored, 0),
        (at.disk("dn2"), WINDOW),
        (at.disk("dn3"), 2 * WINDOW),
    ):
        stored.flip(A, chunk)
        scan(stored)
    at.ours.scan()
    outcome = run(at, ReconcileOptions(return_to=ReplicaState.CLOSED))
    assert (outcome.replica_state, at.ours.stored.bcs_id) == (ReplicaState.CLOSED, 9)


def test_a_lost_commit_waits_for_peers_that_are_silent() -> None:
    """One of them may hold what a block of ours with an earlier commit lacks."""
    at = _without_commit()
    at.peers[PeerId("dn2")] = EvilPeer(
        PeerId("dn2"), at.peers[PeerId("dn2")].source, Evil.NEVER_ANSWERS
    )
    at.ours.stored.flip(A, 0)
    run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert at.ours.stored.bcs_id == 0


def test_a_lost_commit_is_not_that_of_a_block_while_another_is_not_whole() -> None:
    """B5, had the container's commit been lost after that round."""
    at = _with_peer_block((0, 1, 2), unhealthy=(2,))
    for stored, commit in ((at.ours.stored, 99), (at.disk("dn2"), 99)):
        whole = _stored([B], BLOCK, commit)
        stored.records |= whole.records
        stored.files |= whole.files
        scan(stored)
    at.ours.stored.bcs_id = 0
    outcome = run(at)
    assert outcome.verdict is Verdict.UNRECOVERABLE
    assert (at.ours.stored.records[B].bcs_id, at.ours.stored.bcs_id) == (99, 0)


def _with_a_block_beyond_its_container() -> World:
    """Block A was mended to the peer's commit, 99, while B was bad everywhere, so that
    the container stayed at 1.
    """
    at = world(A, B, peers=1)
    theirs, ours = at.disk("dn2"), at.ours.stored
    theirs.records[A] = _only(theirs.records[A], (0, 1, 2), 99)
    for stored in (ours, theirs):
        stored.flip(B, 0)
        scan(stored)
    ours.flip(A, 0)
    at.ours.scan()
    outcome = run(at, CLOSING)
    assert (outcome.verdict, outcome.replica_state) == (
        Verdict.UNRECOVERABLE,
        ReplicaState.UNHEALTHY,
    )
    assert _commits(at) == (99, 1)
    return at


CLOSING = ReconcileOptions(return_to=ReplicaState.CLOSED)


@pytest.mark.parametrize("commit", [1, 50])
def test_a_replica_returns_to_service_at_the_commit_of_its_blocks(commit: int) -> None:
    """A round that was not clean left it to the block; a reader who asks for that is
    refused by the container.
    """
    at = _with_a_block_beyond_its_container()
    theirs = at.disk("dn2")
    theirs.flip(B, 0)
    theirs.records[B] = replace(theirs.records[B], bcs_id=commit)
    scan(theirs)
    assert run(at, CLOSING).replica_state is ReplicaState.CLOSED
    assert _commits(at) == (99, 99)


def test_an_unclean_round_and_the_one_that_ends_it_leave_the_commit_of_the_blocks() -> None:
    at = world(A, B)
    for peer in at.peers:
        at.disk(peer).records[B] = replace(at.disk(peer).records[B], bcs_id=99)
    for stored, start in (
        (at.ours.stored, 0),
        (at.disk("dn2"), WINDOW),
        (at.disk("dn3"), 2 * WINDOW),
    ):
        stored.flip(A, start)
        scan(stored)
    at.ours.stored.flip(B, 0)
    at.ours.scan()
    assert run(at, CLOSING).replica_state is ReplicaState.CLOSED
    assert (at.ours.stored.records[B].bcs_id, at.ours.stored.bcs_id) == (99, 99)


def test_a_commit_of_a_block_does_not_reach_the_container_while_a_peer_is_silent() -> None:
    at = _with_a_block_beyond_its_container()
    theirs = at.disk("dn2")
    theirs.flip(B, 0)
    scan(theirs)
    silent = PeerId("dn3")
    at.peers[silent] = EvilPeer(silent, at.peers[PeerId("dn2")].source, Evil.NEVER_ANSWERS)
    assert run(at, CLOSING).replica_state is ReplicaState.UNHEALTHY
    assert _commits(at) == (99, 1)


def test_a_peers_tombstone_changes_our_tree_and_nothing_else() -> None:
    """CR-003, CR-005, CR-006, inv-I6"""
    at = world(A, B)
    other = RepairableReplica("dn2", at.disk("dn2"))
    other.delete_block(A)
    before = bytes(at.ours.stored.files[A]), at.ours.stored.records[A]
    outcome = run(at)
    assert outcome.claimed_deleted == (A,)
    assert outcome.progress.tombstones_adopted == 1
    assert (bytes(at.ours.stored.files[A]), at.ours.stored.records[A]) == before
    tree, _ = at.ours.known_tree()
    assert tree is not None
    entry = tree.block(A)
    assert entry is not None
    assert entry.deleted


def test_a_deleted_block_is_never_brought_back() -> None:
    """inv-I5: also after our tree file is lost."""
    at = world(A, B)
    at.ours.delete_block(A)
    at.ours.stored.tree = None
    outcome = run(at)
    assert A not in at.ours.stored.records
    assert A not in at.ours.stored.files
    assert outcome.state is OutcomeState.DONE


def test_a_block_that_a_peer_deleted_is_not_repaired() -> None:
    at = world(A, B)
    RepairableReplica("dn2", at.disk("dn2")).delete_block(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    run(at)
    assert not at.of(FetchWindows)


@pytest.mark.parametrize("chunks_at_once", [1, 4])
def test_a_delete_that_comes_during_the_repair_wins(chunks_at_once: int) -> None:
    """CR-052; other blocks are repaired in the same round."""
    at = world(A, B)
    for block_id in (A, B):
        at.ours.stored.flip(block_id, 0)
    scan(at.ours.stored)

    def meddle(request: Request) -> None:
        if (
            isinstance(request, WriteWindows)
            and request.block_id == A
            and A in at.ours.stored.records
        ):
            at.ours.delete_block(A)

    outcome = run(at, ReconcileOptions(fetches_max=chunks_at_once, rounds_max=1), meddle=meddle)
    assert A not in at.ours.stored.files
    assert bytes(at.ours.stored.files[B]) == healthy(at, B)
    assert outcome.state is OutcomeState.DONE


def test_damage_of_a_block_that_is_deleted_during_the_repair_is_not_reported() -> None:
    """Its first window is bad in every copy; the rest is about to be recorded here."""
    at = world(A, B)
    ours = at.ours.stored
    ours.records[A] = _only(ours.records[A], (0,), 1)
    for place, stored in enumerate((ours, at.disk("dn2"), at.disk("dn3"))):
        stored.flip(A, place)
        scan(stored)

    def meddle(request: Request) -> None:
        if isinstance(request, PutBlock):
            at.ours.delete_block(A)

    outcome = run(at, meddle=meddle)
    assert at.of(PutBlock)
    assert (outcome.verdict, outcome.evidence) == (Verdict.REPAIRABLE, ())


def test_a_block_whose_record_is_refused_since_its_deletion_is_pending_is_in_no_tree() -> None:
    at = world(A, B)
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    at.ours.stored.flip(B, 0)
    scan(at.ours.stored)

    def meddle(request: Request) -> None:
        if isinstance(request, PutBlock) and request.record.block_id == A:
            at.ours.pending_deletes.add(A)

    run(at, meddle=meddle)
    assert A in at.ours.stored.files
    stored = [request.tree for request in at.of(StoreTree) if isinstance(request, StoreTree)]
    assert stored
    assert all([block.block_id for block in tree.blocks] == [B] for tree in stored)


@pytest.mark.parametrize("before", [LoadRecords, CheckLocal, WriteWindows, PutBlock, StoreTree])
def test_whenever_the_delete_comes_the_block_is_deleted_in_the_tree_and_no_other(
    before: type[Request],
) -> None:
    """inv-I5: block A is taken in, so that it has bytes, a record and an entry in the
    tree to forget.
    """
    at = world(A, B)
    for block_id in (A, B):
        drop_record(at.ours.stored, block_id, data_too=True)
    scan(at.ours.stored)

    def meddle(request: Request) -> None:
        if isinstance(request, before) and not at.ours.remembered:
            # The transaction leaves no record and no file, whatever was there.
            at.ours.remembered[A] = BlockTree.tombstone(A, 77)
            at.ours.stored.records.pop(A, None)
            at.ours.stored.files.pop(A, None)
            stored = at.ours.known_tree()[0]
            assert stored is not None
            at.ours.stored.tree = encode_tree(stored)

    outcome = run(at, meddle=meddle)
    tree, _ = at.ours.known_tree()
    assert tree is not None
    assert {block.block_id: block.deleted for block in tree.blocks} == {A: True, B: False}
    assert A not in at.ours.stored.records
    assert A not in at.ours.stored.files
    assert bytes(at.ours.stored.files[B]) == healthy(at, B)
    assert outcome.state is OutcomeState.DONE
    for request in at.of(StoreTree)[-1:]:
        assert isinstance(request, StoreTree)
        # Nor does the last request for a tree claim that the block is whole.
        assert not any(b.block_id == A and not b.deleted for b in request.tree.blocks)


def test_a_block_deleted_before_there_were_trees_ends_deleted_everywhere_and_leaves_no_orphan() -> (
    None
):
    """CR-059, its eight steps; unlike CR-061 the last delete is the cluster's own
    transaction, not one of ours.
    """
    at = world(A, B)
    # Deleted here by an old version, which left no tombstone: a peer's copy comes back,
    # as if it had been lost.
    drop_record(at.ours.stored, A, data_too=True)
    scan(at.ours.stored)
    assert run(at).progress.blocks_added == 1
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    # Each peer deletes it, with a tombstone: from the first we learn of it, the second
    # tells nothing new.
    for peer, claimed in (("dn2", (A,)), ("dn3", ())):
        RepairableReplica(peer, at.disk(peer)).delete_block(A)
        outcome = run(at)
        assert (outcome.claimed_deleted, outcome.progress.blocks_added) == (claimed, 0)
        assert A in at.ours.stored.records
    # At last the transaction reaches us too.
    at.ours.delete_block(A)
    outcome = run(at)
    assert (outcome.verdict, outcome.claimed_deleted) == (Verdict.MATCH, ())
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        assert (set(stored.records), set(stored.files)) == ({B}, {B})
    assert {stored.tree for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3"))} == {
        at.ours.stored.tree
    }


def test_a_tree_that_changed_meanwhile_is_read_again_and_the_repair_laid_over_it() -> None:
    at = world(A, B)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    done: list[int] = []

    def meddle(request: Request) -> None:
        if isinstance(request, StoreTree) and not done:
            done.append(1)
            at.ours.delete_block(B)

    outcome = run(at, meddle=meddle)
    tree, _ = at.ours.known_tree()
    assert tree is not None
    assert [block.deleted for block in tree.blocks] == [False, True]
    assert all(chunk.checksum_matches for chunk in tree.blocks[0].chunks)
    assert len(at.of(StoreTree)) == 2
    assert outcome.state is OutcomeState.DONE


def test_a_replica_without_a_tree_is_scanned_first() -> None:
    """CR-033"""
    at = world(A)
    at.ours.stored.flip(A, 0)
    at.ours.stored.tree = None
    outcome = run(at)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert outcome.progress.scans == 2


def test_damage_that_only_the_last_scan_shows_starts_another_round() -> None:
    at = world(A, B)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    hits = [B]

    def meddle(request: Request) -> None:
        if isinstance(request, Rescan) and hits:
            at.ours.stored.flip(hits.pop(), 0)

    outcome = run(at, meddle=meddle)
    assert outcome.progress.rounds == 2
    assert bytes(at.ours.stored.files[B]) == healthy(at, B)
    assert outcome.verdict is Verdict.REPAIRABLE


def test_a_disk_that_damages_again_and_again_is_given_up_by_name() -> None:
    at = world(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)

    def meddle(request: Request) -> None:
        if isinstance(request, Rescan):
            at.ours.stored.flip(A, 0)

    outcome = run(at, ReconcileOptions(rounds_max=3), meddle=meddle)
    assert outcome.progress.rounds == 3
    assert outcome.verdict is Verdict.UNKNOWN
    assert EvidenceKind.DAMAGED_AGAIN in kinds(outcome)


def test_an_own_tree_that_cannot_be_read_still_gets_a_scan() -> None:
    """R6."""
    at = world(A)
    outcome = run(
        at, meddle=lambda r: RequestFailed(r, "disk_failed") if isinstance(r, LoadOwn) else None
    )
    assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "disk_failed")
    assert len(at.of(Rescan)) == 1


BACK = ReconcileOptions(return_to=ReplicaState.CLOSED)


def _unhealthy(at: World) -> World:
    at.ours.stored.flip(A, 0)
    at.ours.scan()
    assert at.ours.stored.state is ReplicaState.UNHEALTHY
    return at


def test_a_mended_replica_returns_to_service_only_where_asked() -> None:
    for options, state in ((None, ReplicaState.UNHEALTHY), (BACK, ReplicaState.CLOSED)):
        at = _unhealthy(world(A))
        assert run(at, options).replica_state is state
        assert at.ours.stored.state is state


def test_a_replica_that_was_mended_by_a_killed_run_returns_after_a_scan() -> None:
    at = _unhealthy(world(A))
    run(at)
    outcome = run(at, BACK)
    assert outcome.replica_state is ReplicaState.CLOSED
    assert outcome.progress.scans == 1


def test_a_replica_that_not_all_peers_were_compared_with_stays_unhealthy() -> None:
    """The one that is silent may have a later commit, or what nobody else has."""
    at = _unhealthy(world(A))
    at.peers[PeerId("dn2")] = EvilPeer(
        PeerId("dn2"), at.peers[PeerId("dn2")].source, Evil.NEVER_ANSWERS
    )
    assert run(at, BACK).replica_state is ReplicaState.UNHEALTHY
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)


def test_a_replica_that_is_not_whole_stays_unhealthy() -> None:
    at = world(A)
    for stored in (at.ours.stored, at.disk("dn2"), at.disk("dn3")):
        stored.flip(A, 0)
        scan(stored)
    at.ours.scan()
    assert run(at, BACK).replica_state is ReplicaState.UNHEALTHY


def test_a_replica_whose_commit_could_not_be_advanced_stays_unhealthy() -> None:
    at = _unhealthy(world(A))
    for peer in ("dn2", "dn3"):
        at.disk(peer).records[A] = replace(at.disk(peer).records[A], bcs_id=9)

    def meddle(request: Request) -> Event | None:
        return (
            RequestFailed(request, "database_failed") if isinstance(request, AdvanceBcsId) else None
        )

    outcome = run(at, BACK, meddle=meddle)
    assert (outcome.state, outcome.replica_state) == (OutcomeState.FAILED, ReplicaState.UNHEALTHY)


def test_a_replica_behind_a_commit_that_others_contradict_stays_unhealthy() -> None:
    """One peer has the block at commit 99, the other the same chunks at commit 1: ours
    stays at 1, and SCM may know of 99.
    """
    at = world(A)
    at.disk("dn2").records[A] = replace(at.disk("dn2").records[A], bcs_id=99)
    at.ours.stored.flip(A, 0)
    at.ours.scan()
    outcome = run(at, CLOSING)
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert _commits(at) == (1, 1)
    assert (outcome.verdict, outcome.replica_state) == (
        Verdict.REPAIRABLE,
        ReplicaState.UNHEALTHY,
    )


def test_a_finding_of_the_last_scan_that_no_chunk_explains_leaves_the_verdict_open() -> None:
    at = _unhealthy(world(A, B))

    def meddle(request: Request) -> Event | None:
        if not isinstance(request, Rescan):
            return None
        event = execute_local(request, at.ours)
        assert isinstance(event, Scanned)
        return replace(event, findings=((BlockId(9), None),))

    outcome = run(at, BACK, meddle=meddle)
    assert outcome.verdict is Verdict.UNKNOWN
    assert EvidenceKind.FINDINGS_REMAIN in kinds(outcome)
    assert outcome.replica_state is ReplicaState.UNHEALTHY


@pytest.mark.parametrize("losers", [("dn1",), ("dn1", "dn2", "dn3")], ids=["here", "everywhere"])
def test_nobody_knows_whether_the_lost_file_of_a_block_without_checksums_can_be_replaced(
    losers: tuple[str, ...],
) -> None:
    at = world(B)
    for name, stored in (("dn1", at.ours.stored), *((n, at.disk(n)) for n in ("dn2", "dn3"))):
        other = replica_of(7, {A: BLOCK}, checksum_type=ChecksumType.NONE, chunk_bytes=CHUNK)
        stored.records |= other.records
        stored.files |= {} if name in losers else other.files
        scan(stored)
    outcome = run(at)
    assert outcome.verdict is Verdict.UNKNOWN
    assert (EvidenceKind.FINDINGS_REMAIN, A) in {(e.kind, e.block_id) for e in outcome.evidence}
    assert A not in at.ours.stored.files


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (PeerUnavailableError("no answer"), Verdict.UNKNOWN),
        (PeerRefusedError("it cannot open the file", result="disk_failed"), Verdict.UNKNOWN),
        (RemoteProtocolError("bytes that are no answer"), Verdict.UNKNOWN),
        (PeerRefusedError("it has no file", result="block_not_found"), Verdict.UNRECOVERABLE),
        (PeerRefusedError("its file ends early", result="short_read"), Verdict.UNRECOVERABLE),
    ],
    ids=lambda value: str(getattr(value, "message", value)),
)
def test_a_file_that_could_not_be_read_may_have_outlived_its_record(
    error: ReconcileError, verdict: Verdict
) -> None:
    """By the trees alone the one copy on record is lost."""
    at = world(A)
    at.ours.stored.flip(A, 0)
    for peer in ("dn2", "dn3"):
        drop_record(at.disk(peer), A, data_too=True)
        scan(at.disk(peer))
    scan(at.ours.stored)

    def fail(request: Request) -> Event | None:
        if isinstance(request, FetchWindows) and request.peer == "dn3":
            return execute_remote(request, ContainerId(7), Failing(request.peer, error))
        return None

    assert run(at, meddle=fail).verdict is verdict


def test_a_repair_that_ends_before_it_read_all_files_calls_nothing_lost() -> None:
    at = world(A)
    at.ours.stored.flip(A, 0)
    for peer in ("dn2", "dn3"):
        drop_record(at.disk(peer), A, data_too=True)
        scan(at.disk(peer))
    scan(at.ours.stored)

    def cancel(request: Request) -> Event | None:
        return Cancelled("stopping") if isinstance(request, CheckLocal) else None

    outcome = run(at, meddle=cancel)
    assert (outcome.state, outcome.verdict) == (OutcomeState.INTERRUPTED, Verdict.UNKNOWN)


def test_a_peer_whose_tree_was_never_built_may_hold_what_the_others_lost() -> None:
    at = world(A)
    at.ours.stored.flip(A, 0)
    at.disk("dn2").flip(A, 1)
    for stored in (at.ours.stored, at.disk("dn2")):
        scan(stored)
    at.disk("dn3").tree = encode_tree(ContainerTree(ContainerId(7), None, ()))
    outcome = run(at)
    assert outcome.verdict is Verdict.UNKNOWN
    assert EvidenceKind.WINDOWS_UNPROVEN in kinds(outcome)


def test_nobody_returns_to_service_while_a_peer_has_no_tree() -> None:
    """It may hold data, or a later commit, that we lack; what another peer lacks does
    not matter.
    """
    at = _unhealthy(world(A, B))
    drop_record(at.disk("dn2"), B, data_too=True)
    scan(at.disk("dn2"))
    at.disk("dn3").tree = encode_tree(ContainerTree(ContainerId(7), None, ()))
    assert run(at, BACK).replica_state is ReplicaState.UNHEALTHY
    scan(at.disk("dn3"))
    assert run(at, BACK).replica_state is ReplicaState.CLOSED


def test_what_a_tree_promised_in_vain_may_be_in_a_file_without_a_record() -> None:
    """The third is asked last, because the tree of the second has the chunk."""
    at = world(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)
    at.disk("dn2").flip(A, 0)
    drop_record(at.disk("dn3"), A, data_too=False)
    scan(at.disk("dn3"))
    assert run(at).verdict is Verdict.REPAIRABLE
    assert bytes(at.ours.stored.files[A]) == healthy(at, A)
    assert [one.peer for one in at.of(FetchWindows)][-1] == "dn3"


@pytest.mark.parametrize("state", [s for s in ReplicaState if not s.is_closed])
def test_a_replica_that_is_not_closed_is_refused(state: ReplicaState) -> None:
    at = world(A)
    at.ours.stored.state = state
    outcome = run(at)
    assert (outcome.state, outcome.error_code) == (OutcomeState.REFUSED, "container_state")
    assert not at.of(FetchRecords)


def test_an_erasure_coded_replica_is_refused() -> None:
    at = world(A)
    at.ours.stored.replica_index = 2
    assert run(at).state is OutcomeState.REFUSED


def test_a_failing_disk_stops_the_repair_and_is_named() -> None:
    at = world(A, B)
    for block_id in (A, B):
        at.ours.stored.flip(block_id, 0)
    scan(at.ours.stored)
    at.ours.failing_disk = True
    outcome = run(at, ReconcileOptions(fetches_max=1))
    assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "disk_failed")
    assert len(at.of(WriteWindows)) == 1
    assert not at.of(Rescan)


def test_a_file_that_cannot_be_looked_at_keeps_no_other_block_from_being_mended() -> None:
    """A link, or a folder, in the place of a block file; each of its chunks fails by
    itself.
    """
    at = world(A, B)
    at.ours.stored.flip(A, 0)
    at.ours.stored.flip(A, CHUNK)
    at.ours.stored.flip(B, 0)
    scan(at.ours.stored)

    def meddle(request: Request) -> Event | None:
        if isinstance(request, CheckLocal) and request.block_id == A:
            return RequestFailed(request, "disk_failed", "not a regular file", retryable=False)
        return None

    outcome = run(at, ReconcileOptions(return_to=ReplicaState.CLOSED), meddle=meddle)
    assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.UNKNOWN)
    named = {
        (e.block_id, e.offset) for e in outcome.evidence if e.kind is EvidenceKind.FILE_UNREADABLE
    }
    assert named == {(A, 0), (A, CHUNK)}
    assert bytes(at.ours.stored.files[B]) == healthy(at, B)
    assert outcome.replica_state is ReplicaState.UNHEALTHY


def test_an_exhausted_undo_budget_keeps_what_is_done_and_begins_nothing_more() -> None:
    at = world(A, B)
    for block_id in (A, B):
        at.ours.stored.flip(block_id, 0)
    scan(at.ours.stored)

    def meddle(request: Request) -> Event | None:
        if isinstance(request, WriteWindows) and request.block_id == B:
            return RequestFailed(request, UndoBudgetError.code)
        return None

    outcome = run(at, ReconcileOptions(fetches_max=1), meddle=meddle)
    assert (outcome.state, outcome.error_code) == (OutcomeState.FAILED, "undo_budget")
    assert len(at.of(StoreTree)) == 1
    assert run(at).verdict is Verdict.REPAIRABLE


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_repair_that_is_cut_short_calls_nothing_lost_that_it_did_not_try_to_mend(
    is_cancelled: bool,
) -> None:
    """The damage is found by this job's own scan."""
    at = world(A)
    at.ours.stored.flip(A, 0)

    def meddle(request: Request) -> Event | None:
        if isinstance(request, WriteWindows):
            return (
                Cancelled("shut down")
                if is_cancelled
                else RequestFailed(request, UndoBudgetError.code)
            )
        return None

    outcome = run(at, meddle=meddle)
    assert outcome.state is (OutcomeState.INTERRUPTED if is_cancelled else OutcomeState.FAILED)
    assert outcome.verdict is Verdict.REPAIRABLE
    assert EvidenceKind.FINDINGS_REMAIN in kinds(outcome)


def test_a_repair_that_could_not_look_does_not_say_that_all_is_equal() -> None:
    at = world(A)
    outcome = run(
        at, meddle=lambda r: RequestFailed(r, "disk_failed") if isinstance(r, Rescan) else None
    )
    assert (outcome.state, outcome.verdict) == (OutcomeState.FAILED, None)


def _battered() -> World:
    """Something of everything to repair."""
    at = world(A, B, 3, 4)
    at.ours.stored.flip(A, 0)
    del at.ours.stored.files[B][CHUNK + 3 :]
    drop_record(at.ours.stored, BlockId(3), data_too=True)
    scan(at.ours.stored)
    RepairableReplica("dn2", at.disk("dn2")).delete_block(BlockId(4))
    return at


def _state(at: World) -> tuple[object, ...]:
    stored = at.ours.stored
    return stored.records, stored.files, stored.tree, stored.state, stored.bcs_id


def test_a_kill_before_any_request_leaves_the_rest_to_the_next_run() -> None:
    """inv-I7, I8: and that ends in the same state as a run that nobody disturbed."""
    calm = _battered()
    run(calm)
    steps = len(calm.asked)
    assert steps > 15
    for number in range(steps):
        at = _battered()
        with pytest.raises(CrashError):
            run(at, stop_before=number)
        run(at)
        assert _state(at) == _state(calm)
        written = at.ours.bytes_written
        run(at)
        assert at.ours.bytes_written == written


def test_a_cancel_ends_the_run_at_once_wherever_it_is() -> None:
    """CR-057."""
    calm = _battered()
    run(calm)
    for number in range(len(calm.asked) - 1):
        at = _battered()
        machine = Reconciliation(ContainerId(7), OWN, sorted(at.peers))
        waiting = list(machine.start())
        for _ in range(number):
            request = waiting.pop(0)
            match request:
                case FetchTree() | FetchRecords() | FetchWindows():
                    waiting += machine.step(
                        execute_remote(request, ContainerId(7), at.peers[request.peer])
                    )
                case ReportOutcome():
                    raise AssertionError
                case _:
                    waiting += machine.step(execute_local(request, at.ours))
        (report,) = machine.step(Cancelled("the container is being deleted"))
        assert isinstance(report, ReportOutcome)
        assert report.outcome.state is OutcomeState.INTERRUPTED
        assert machine.step(Cancelled("again")) == []
        late = RequestFailed(waiting[0], "interrupted") if waiting else Cancelled("late")
        assert machine.step(late) == []


def test_a_container_that_goes_away_interrupts() -> None:
    at = world(A)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)

    def meddle(request: Request) -> None:
        if isinstance(request, WriteWindows):
            at.ours.delete_container()

    outcome = run(at, meddle=meddle)
    assert (outcome.state, outcome.error_code) == (OutcomeState.INTERRUPTED, "container_not_found")


def test_a_tree_that_is_lost_during_a_repair_is_built_by_a_scan_and_not_of_what_was_repaired() -> (
    None
):
    at = world(A, B)
    at.ours.stored.flip(A, 0)
    scan(at.ours.stored)

    def lose_tree(request: Request) -> Event | None:
        if isinstance(request, StoreTree) and len(at.of(StoreTree)) == 1:
            at.ours.stored.tree = b""
        return None

    outcome = run(at, meddle=lose_tree)
    assert (outcome.state, outcome.verdict) == (OutcomeState.DONE, Verdict.REPAIRABLE)
    # The first was refused, because the tree that it was made from is gone.
    assert len(at.of(StoreTree)) == 1
    theirs = RepairableReplica("dn2", at.disk("dn2")).known_tree()[0]
    assert at.ours.known_tree()[0] == theirs
