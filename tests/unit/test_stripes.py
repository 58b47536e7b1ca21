"""An erasure-coded container is verified by its data: which stripes are whole, which
are still readable, and which records contradict each other.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from live.stripes import StripeDamage
from merkle.columns import encode_tree
from merkle.comparison import DifferenceKind
from merkle.outcome import EvidenceKind, Verdict
from merkle.tree import BlockId
from ozone.scm_client import NodeHealth
from tests.support.bounded_memory import bounded_memory
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.peers import CHUNK_BYTES, MemoryReplica

# Two whole stripes and a third, whose second cell is short; and one with one cell.
BLOCKS = {20: 5 * CHUNK_BYTES + 100, 21: 1000}
BLOCK = BlockId(20)


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin() as found:
        yield found


@pytest.fixture
def replicas(cluster: LiveTwin) -> list[MemoryReplica]:
    return cluster.add_erasure_coded(1, BLOCKS)


def test_whole_replicas_match_and_only_their_data_are_compared(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    found = cluster.diagnose(deep=True)[1]
    assert (found.verdict, found.doubt) == (Verdict.MATCH, "")
    assert found.stripes is not None
    assert (found.stripes.stripe_count, found.stripes.readable_count) == (4, 4)
    asked = [source.trees for source in cluster.sources]
    shallow = cluster.diagnose()[1]
    assert shallow.verdict is Verdict.UNKNOWN
    assert "--deep" in shallow.doubt
    assert shallow.stripes is None
    assert [source.trees for source in cluster.sources] == asked


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_a_damaged_cell_names_its_index_and_is_given_back_by_the_others(
    cluster: LiveTwin, replicas: list[MemoryReplica], damaged: int
) -> None:
    replicas[damaged].flip(BLOCK, CHUNK_BYTES + 5)
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.REPAIRABLE
    assert found.stripes is not None
    assert found.stripes.damages == (StripeDamage(BLOCK, 1, (damaged + 1,), (), is_readable=True),)
    [difference] = found.comparison.differences
    assert difference.kind is DifferenceKind.CORRUPT_CHUNK
    assert (difference.lacking, difference.offset) == ((PEERS[damaged],), CHUNK_BYTES)
    assert set(difference.sources) == set(PEERS) - {PEERS[damaged]}


def test_two_cells_of_one_stripe_lost_leave_the_other_stripes_readable(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    replicas[0].flip(BLOCK, 5)
    replicas[1].flip(BLOCK, 900)
    replicas[2].flip(BLOCK, CHUNK_BYTES)
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.UNRECOVERABLE
    assert found.stripes is not None
    assert [(one.stripe, one.is_readable) for one in found.stripes.damages] == [
        (0, False), (1, True),
    ]  # fmt: skip
    assert found.stripes.readable_count == 3
    [evidence] = found.comparison.evidence
    assert evidence.kind == EvidenceKind.BYTES_LOST
    assert "replica index 1, 2" in evidence.detail


def test_a_cell_without_bytes_needs_no_replica(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    # The first cell is lost; that of parity has the same bytes.
    replicas[0].flip(21, 5)
    found = cluster.diagnose(deep=True)[1]
    assert found.stripes is not None
    assert [one.is_readable for one in found.stripes.damages] == [True]


def test_a_lost_file_and_a_lost_record_lack_every_stripe(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    del replicas[1].files[BLOCK]
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.REPAIRABLE
    kinds = {one.kind for one in found.comparison.differences}
    assert (kinds, len(found.comparison.differences)) == ({DifferenceKind.MISSING_CHUNK}, 3)
    del replicas[1].records[BLOCK]
    replicas[1].tree = encode_tree(replicas[1].scanned_tree())
    found = cluster.diagnose(deep=True)[1]
    [difference] = found.comparison.differences
    assert (difference.kind, difference.offset) == (DifferenceKind.MISSING_BLOCK, None)
    assert found.stripes is not None
    assert [one.lacking for one in found.stripes.damages] == [(2,)] * 3


def test_a_record_of_other_bytes_contradicts_the_checksums_of_its_stripe(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    other = cluster.add_erasure_coded(2, BLOCKS)[1]
    replicas[1].files[BLOCK] = other.files[BLOCK]
    replicas[1].records[BLOCK] = replace(
        other.records[BLOCK], container_id=replicas[1].container_id
    )
    replicas[1].tree = encode_tree(replicas[1].scanned_tree())
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.CONFLICT
    assert found.stripes is not None
    assert {one.conflicting for one in found.stripes.damages} == {(2,)}
    assert {one.kind for one in found.comparison.evidence} == {EvidenceKind.RECORDS_DIFFER}


def test_a_silent_datanode_leaves_a_doubt_that_names_its_index(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    cluster.set_health(2, NodeHealth.DEAD)
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.UNKNOWN
    assert "replica index 2" in found.doubt
    # With one more lost nothing can be said of its stripe.
    replicas[0].flip(BLOCK, 5)
    assert cluster.diagnose(deep=True)[1].verdict is Verdict.UNKNOWN


def test_a_record_without_the_length_of_its_block_is_not_guessed(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    record = replicas[0].records[BLOCK]
    for value in ("", "-1", "1" * 40, "x"):
        replicas[0].records[BLOCK] = replace(record, metadata=(("blockGroupLen", value),))
        found = cluster.diagnose(deep=True)[1]
        assert found.verdict is Verdict.UNKNOWN
        assert "no length" in found.doubt


def test_a_chunk_far_away_costs_one_stripe(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    """A record that only one datanode has, of a block that it invents."""
    liar = replicas[0]
    first = replace(liar.records[BLOCK].chunks[0], name="22_chunk_1", stripe_checksum=None)
    far = replace(first, offset=(1 << 40) - 2 * CHUNK_BYTES, name="22_chunk_2")
    metadata = (("blockGroupLen", str(1 << 41)),)
    number = BlockId(22)
    liar.records[number] = replace(
        liar.records[BLOCK], block_id=number, chunks=(first, far), metadata=metadata
    )
    with bounded_memory():
        found = cluster.diagnose(deep=True)[1]
    assert found.stripes is not None
    # The first, the next one for all in between, that of the far chunk and the next.
    assert found.stripes.stripe_count == 4 + 4
    assert {one.block_id for one in found.stripes.damages} == {number}


def test_a_length_without_end_costs_one_stripe(
    cluster: LiveTwin, replicas: list[MemoryReplica]
) -> None:
    for replica in replicas:
        record = replica.records[BLOCK]
        replica.records[BLOCK] = replace(record, metadata=(("blockGroupLen", str(1 << 62)),))
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.UNRECOVERABLE
    assert found.stripes is not None
    # The third is short where it may not be, and the fourth is not there.
    assert found.stripes.stripe_count == 5
    assert [one.stripe for one in found.stripes.damages] == [2, 3]
