"""Whose commit is believed: honest peers as Ozone believes them, and a liar no further
than they bear it out.
"""

from hypothesis import given
from hypothesis import strategies as st

from merkle.checksum import ChecksumType
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from repair.block_repair import believed_commit

CHUNKS = tuple(ChunkRecord(i, 1, ChecksumType.CRC32C, 1, (bytes([i, 0, 0, 0]),)) for i in range(5))
LIAR = PeerId("liar")
COMMITS = st.integers(0, (1 << 63) - 1)


def block(chunks: int, bcs_id: int) -> BlockRecord:
    return BlockRecord(ContainerId(7), BlockId(1), bcs_id, CHUNKS[:chunks])


@st.composite
def honest(draw: st.DrawFn) -> dict[PeerId, BlockRecord]:
    """Replicas of one block at different moments of its writing: each commit added
    chunks, later is higher.
    """
    commits = sorted(draw(st.sets(st.integers(1, 10**6), min_size=5, max_size=5)))
    moments = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    return {
        PeerId(f"dn-{i}"): block(moment + 1, commits[moment]) for i, moment in enumerate(moments)
    }


def highest(records: dict[PeerId, BlockRecord], committed: int) -> int:
    return max(believed_commit(peer, records, committed) for peer in records)


@given(honest(), COMMITS)
def test_of_honest_peers_the_highest_counts(
    records: dict[PeerId, BlockRecord], committed: int
) -> None:
    assert highest(records, committed) == max(record.bcs_id for record in records.values())


@given(honest(), COMMITS, COMMITS, st.data())
def test_a_liar_raises_nothing_beyond_what_peers_with_its_chunks_and_we_know(
    records: dict[PeerId, BlockRecord], committed: int, lie: int, data: st.DataObject
) -> None:
    most = max(len(record.chunks) for record in records.values())
    lying = records | {LIAR: block(data.draw(st.integers(1, most)), lie)}
    assert highest(lying, committed) <= max(
        committed, *(record.bcs_id for record in records.values())
    )


@given(honest(), COMMITS, st.integers(1, 5), COMMITS)
def test_a_liar_cannot_keep_down_what_two_honest_peers_say(
    records: dict[PeerId, BlockRecord], committed: int, chunks: int, lie: int
) -> None:
    doubled = records | {PeerId(f"{peer}-twin"): record for peer, record in records.items()}
    assert highest(doubled | {LIAR: block(chunks, lie)}, committed) >= max(
        r.bcs_id for r in records.values()
    )
