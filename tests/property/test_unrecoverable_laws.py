"""UNRECOVERABLE is said only of what was read everywhere: some chunk with recorded
checksums has a window that no file of any replica holds.

One replica reconciles with two peers. Files, records and trees of all three are damaged
at random, one of the blocks has no checksums, and peers fail in the middle. Nobody
lies: against false bytes there is no truth to hold a verdict to.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
PROVABLE, UNPROVABLE = BlockId(1), BlockId(2)
WINDOW, WINDOWS = 16, 4
FAILURES = (
    PeerUnavailableError("no answer"),
    PeerRefusedError("it cannot open the file", result="disk_failed"),
    RemoteProtocolError("bytes that are no answer"),
)


@dataclass(frozen=True)
class Damage:
    """What one replica is given: by block its record, the windows that are left of its
    file, and the windows that are bad, each in one of two ways.
    """

    has_record: tuple[bool, bool]
    windows: tuple[int | None, int | None]
    bad: tuple[tuple[int, int], ...]
    # Of before the damage, of after it, or none.
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


def damages(trees: Sequence[str] = ("before", "after", "none")) -> st.SearchStrategy[Damage]:
    left = st.sampled_from((WINDOWS, WINDOWS, WINDOWS, None, 0, 1, 2, 3))
    kept = st.sampled_from((True, True, False))
    bad = st.tuples(st.sampled_from((0, 0, 1, 2, 3)), st.sampled_from((1, 2)))
    return st.builds(
        Damage,
        st.tuples(kept, kept),
        st.tuples(left, left),
        st.lists(bad, max_size=3).map(tuple),
        st.sampled_from(trees),
    )


def failures() -> st.SearchStrategy[Failing | None]:
    failing = st.builds(Failing, st.integers(0, 4), st.integers(0, len(FAILURES) - 1))
    return st.one_of(st.none(), failing)


def replica(damage: Damage) -> MemoryReplica:
    sizes = {"window_bytes": WINDOW, "chunk_bytes": 2 * WINDOW}
    stored = replica_of(CONTAINER, {PROVABLE: WINDOWS * WINDOW}, **sizes)
    none = replica_of(
        CONTAINER, {UNPROVABLE: WINDOWS * WINDOW}, checksum_type=ChecksumType.NONE, **sizes
    )
    stored.records |= none.records
    stored.files |= none.files
    before = RepairableReplica("before", stored)
    before.scan()
    for window, how in damage.bad:
        stored.files[PROVABLE][window * WINDOW] ^= how
    for block_id, left, has_record in zip(
        (PROVABLE, UNPROVABLE), damage.windows, damage.has_record, strict=True
    ):
        if left is None:
            del stored.files[block_id]
        else:
            del stored.files[block_id][left * WINDOW :]
        if not has_record:
            del stored.records[block_id]
    if damage.tree == "after":
        before.scan()
    elif damage.tree == "none":
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


def lost_windows(replicas: Sequence[MemoryReplica]) -> set[int]:
    """The windows that a record of any replica could prove and no file holds."""
    true = replica_of(
        CONTAINER, {PROVABLE: WINDOWS * WINDOW}, window_bytes=WINDOW, chunk_bytes=2 * WINDOW
    ).files[PROVABLE]
    if not any(PROVABLE in stored.records for stored in replicas):
        return set()
    parts = [slice(window * WINDOW, (window + 1) * WINDOW) for window in range(WINDOWS)]
    files = [stored.files.get(PROVABLE, b"") for stored in replicas]
    return {
        window
        for window, part in enumerate(parts)
        if all(bytes(file[part]) != bytes(true[part]) for file in files)
    }


@settings(max_examples=1500)
@given(st.tuples(damages(), damages(), damages()), st.tuples(failures(), failures()))
def test_what_is_called_unrecoverable_is_held_by_nobody(
    harm: tuple[Damage, Damage, Damage], failing: tuple[Failing | None, Failing | None]
) -> None:
    replicas = [replica(damage) for damage in harm]
    lost = lost_windows(replicas)
    outcome = outcome_of(replicas, failing)
    assert outcome.verdict is not Verdict.UNRECOVERABLE or lost


@settings(max_examples=500)
@given(st.tuples(damages(("after",)), damages(("after",)), damages(("after",))))
def test_what_nobody_holds_is_called_so_once_everything_was_read(
    harm: tuple[Damage, Damage, Damage],
) -> None:
    """Of what our own record lists; its owner judges any other record."""
    replicas = [replica(damage) for damage in harm]
    lost = lost_windows(replicas)
    is_ours = PROVABLE in replicas[0].records
    outcome = outcome_of(replicas, (None, None))
    if is_ours:
        assert (outcome.verdict is Verdict.UNRECOVERABLE) == bool(lost)
