"""UNRECOVERABLE is said only of what was read everywhere: some chunk with recorded
checksums has a window that no file of any replica holds.

One replica reconciles with two peers. Files, records and trees of all three are damaged
at random, some chunks have no checksums, and peers fail in the middle. Nobody
lies: against false bytes there is no truth to hold a verdict to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.outcome import RepairOutcome, Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.ports import ByteRange
from repair.ports import Piece
from repair.reconciliation import Reconciliation
from repair.requests import FetchRecords, FetchTree, FetchWindows, ReportOutcome
from repair.runner import execute_local, execute_remote
from runtime.errors import PeerRefusedError, PeerUnavailableError, RemoteProtocolError
from tests.support.memory import RepairableReplica
from tests.support.peers import MemoryPeer, MemoryReplica, MemorySource, replica_of

CONTAINER, OWN = ContainerId(7), PeerId("dn1")
WINDOW, CHUNK_WINDOWS, CHUNKS = 16, 2, 2
CHUNK = CHUNK_WINDOWS * WINDOW
WINDOWS = CHUNK_WINDOWS * CHUNKS
# By block, which of its chunks have checksums.
BLOCKS = {BlockId(1): (True, True), BlockId(2): (False, False), BlockId(3): (False, True)}
FAILURES = (
    PeerUnavailableError("no answer"),
    PeerRefusedError("it cannot open the file", result="disk_failed"),
    RemoteProtocolError("bytes that are no answer"),
)


@dataclass(frozen=True)
class Damage:
    """What is left of one block: the chunks of its record, the windows of its file, and
    the windows that are bad, each in one of two ways. None stands for no record, no
    file.
    """

    chunks: int | None
    windows: int | None
    bad: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Harm:
    """What is left of one replica; its tree is of before the damage, of after it, or
    was never built.
    """

    blocks: tuple[Damage, ...]
    tree: str


@dataclass(frozen=True)
class Failing:
    """A peer answers so many calls, then fails so."""

    calls: int
    failure: int


class FailingPeer(MemoryPeer):
    """Answers a number of calls, and fails from then on."""

    def __init__(self, peer_id: PeerId, source: MemorySource, failing: Failing | None) -> None:
        super().__init__(peer_id, source)
        self._failing = failing
        self._calls = 0

    def tree(self, container_id: ContainerId) -> ContainerTree:
        self._count()
        return super().tree(container_id)

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        self._count()
        return super().records(container_id, block_ids)

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        self._count()
        yield from super().read(container_id, block_id, record_chunk, ranges)

    def _count(self) -> None:
        if self._failing is not None and self._calls >= self._failing.calls:
            raise FAILURES[self._failing.failure]
        self._calls += 1


def harms(*trees: str) -> st.SearchStrategy[Harm]:
    damage = st.builds(
        Damage,
        st.sampled_from((CHUNKS, CHUNKS, CHUNKS, 1, None)),
        st.sampled_from((WINDOWS, WINDOWS, WINDOWS, WINDOWS, 3, 2, 1, 0, None)),
        st.lists(st.tuples(st.integers(0, WINDOWS - 1), st.sampled_from((1, 2))), max_size=2).map(
            tuple
        ),
    )
    return st.builds(Harm, st.tuples(*[damage] * len(BLOCKS)), st.sampled_from(trees))


def failures() -> st.SearchStrategy[Failing | None]:
    failing = st.builds(Failing, st.integers(0, 4), st.integers(0, len(FAILURES) - 1))
    return st.one_of(st.none(), failing)


def whole() -> MemoryReplica:
    stored = replica_of(
        CONTAINER, dict.fromkeys(BLOCKS, CHUNKS * CHUNK), window_bytes=WINDOW, chunk_bytes=CHUNK
    )
    for block_id, provable in BLOCKS.items():
        chunks = tuple(
            chunk if has_sums else replace(chunk, checksum_type=ChecksumType.NONE, checksums=())
            for chunk, has_sums in zip(stored.records[block_id].chunks, provable, strict=True)
        )
        stored.records[block_id] = replace(stored.records[block_id], chunks=chunks)
    return stored


def replica(harm: Harm) -> MemoryReplica:
    stored = whole()
    RepairableReplica("before", stored).scan()
    for block_id, damage in zip(BLOCKS, harm.blocks, strict=True):
        for window, how in damage.bad:
            stored.files[block_id][window * WINDOW] ^= how
        if damage.windows is None:
            del stored.files[block_id]
        else:
            del stored.files[block_id][damage.windows * WINDOW :]
        if damage.chunks is None:
            del stored.records[block_id]
        else:
            record = stored.records[block_id]
            stored.records[block_id] = replace(record, chunks=record.chunks[: damage.chunks])
    if harm.tree == "after":
        RepairableReplica("after", stored).scan()
    elif harm.tree == "never":
        stored.tree = encode_tree(ContainerTree(CONTAINER, None, ()))
    return stored


def outcome_of(
    replicas: Sequence[MemoryReplica], failing: Sequence[Failing | None]
) -> RepairOutcome:
    ours = RepairableReplica(OWN, replicas[0])
    peers = {
        peer: FailingPeer(peer, MemorySource(stored), how)
        for peer, stored, how in zip(
            (PeerId("dn2"), PeerId("dn3")), replicas[1:], failing, strict=True
        )
    }
    machine = Reconciliation(CONTAINER, OWN, sorted(peers))
    waiting = machine.start()
    while waiting:
        match request := waiting.pop(0):
            case FetchTree() | FetchRecords() | FetchWindows():
                waiting += machine.step(execute_remote(request, CONTAINER, peers[request.peer]))
            case ReportOutcome():
                pass
            case _:
                waiting += machine.step(execute_local(request, ours))
    assert machine.outcome is not None
    return machine.outcome


def lost_windows(
    replicas: Sequence[MemoryReplica], recorders: Sequence[MemoryReplica]
) -> set[tuple[BlockId, int]]:
    """The windows that a recorder's checksums could prove and no file holds."""
    true = whole().files
    provable = {
        (block_id, chunk.offset // WINDOW + window)
        for stored in recorders
        for block_id, record in stored.records.items()
        for chunk in record.chunks
        for window in range(len(chunk.checksums))
    }

    def is_held(block_id: BlockId, window: int) -> bool:
        part = slice(window * WINDOW, (window + 1) * WINDOW)
        files = [stored.files.get(block_id, b"") for stored in replicas]
        return any(bytes(file[part]) == bytes(true[block_id][part]) for file in files)

    return {place for place in provable if not is_held(*place)}


@settings(max_examples=200)
@given(st.tuples(*[harms("before", "after", "never")] * 3), st.tuples(failures(), failures()))
def test_what_is_called_unrecoverable_is_held_by_nobody(
    harm: tuple[Harm, ...], failing: tuple[Failing | None, Failing | None]
) -> None:
    replicas = [replica(one) for one in harm]
    lost = lost_windows(replicas, replicas)
    assert outcome_of(replicas, failing).verdict is not Verdict.UNRECOVERABLE or lost


@settings(max_examples=200)
@given(st.tuples(*[harms("after")] * 3))
def test_what_nobody_holds_is_called_so_once_everything_was_read(harm: tuple[Harm, ...]) -> None:
    """Of what our own record lists; its owner judges any other record."""
    replicas = [replica(one) for one in harm]
    lost = lost_windows(replicas, replicas[:1])
    assert outcome_of(replicas, (None, None)).verdict is Verdict.UNRECOVERABLE or not lost
