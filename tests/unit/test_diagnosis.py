"""A running cluster is diagnosed without agents: each verdict, or why there is none."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest

from live.deep_read import read_replica
from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.comparison import DifferenceKind
from merkle.errors import ReconcileError
from merkle.outcome import Verdict
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import ContainerState, ReplicaState
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.scm_client import NodeHealth
from runtime.errors import DiskError, RemoteProtocolError
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.peers import CHUNK_BYTES, WINDOW_BYTES, MemoryReplica

BLOCK = BlockId(20)


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin() as found:
        yield found


def rescan(replica: MemoryReplica) -> None:
    replica.tree = encode_tree(replica.scanned_tree())


def test_equal_replicas_match(cluster: LiveTwin) -> None:
    for number in range(1, 6):
        cluster.add(number)
    found = cluster.diagnose()
    assert {one.verdict for one in found.values()} == {Verdict.MATCH}
    assert sorted(found) == [1, 2, 3, 4, 5]
    assert {one.doubt for one in found.values()} == {""}


def test_replicas_with_equal_bytes_share_one_tree_and_others_have_their_own(
    cluster: LiveTwin,
) -> None:
    cluster.add(1)
    replicas = cluster.add(2)
    replicas[1].flip(BLOCK, 100)
    rescan(replicas[1])
    found = cluster.diagnose()
    [shared] = {id(one.tree) for one in found[1].readings}
    assert found[1].verdict is Verdict.MATCH
    assert [one.tree for one in found[2].readings] == [one.scanned_tree() for one in replicas]
    assert shared not in {id(one.tree) for one in found[2].readings}


def test_a_chunk_that_a_scan_found_corrupt_is_repairable_from_the_others(
    cluster: LiveTwin,
) -> None:
    replicas = cluster.add(1)
    replicas[0].flip(BLOCK, 100)
    rescan(replicas[0])
    found = cluster.diagnose()[1]
    assert found.verdict is Verdict.REPAIRABLE
    [difference] = found.comparison.differences
    assert difference.kind is DifferenceKind.CORRUPT_CHUNK
    assert (difference.block_id, difference.offset) == (BLOCK, 0)
    assert difference.lacking == (PEERS[0],)
    assert difference.sources == (PEERS[1], PEERS[2])


def test_damage_that_no_scan_has_seen_is_found_by_reading_the_data(cluster: LiveTwin) -> None:
    replicas = cluster.add(1)
    replicas[1].flip(BLOCK, CHUNK_BYTES + 5)
    assert cluster.diagnose()[1].verdict is Verdict.MATCH
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.REPAIRABLE
    [difference] = found.comparison.differences
    assert (difference.offset, difference.lacking) == (CHUNK_BYTES, (PEERS[1],))
    deep = found.readings[1].deep
    assert deep is not None
    assert deep.bad_windows == {(BLOCK, CHUNK_BYTES): frozenset({0})}
    assert deep.bytes_read == 55_000


def test_the_same_window_damaged_everywhere_is_beyond_repair(cluster: LiveTwin) -> None:
    for replica in cluster.add(1):
        replica.flip(BLOCK, 100)
    assert cluster.diagnose(deep=True)[1].verdict is Verdict.UNRECOVERABLE


def test_different_windows_damaged_everywhere_complete_each_other(cluster: LiveTwin) -> None:
    for number, replica in enumerate(cluster.add(1)):
        replica.flip(BLOCK, number * WINDOW_BYTES)
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.REPAIRABLE


def test_a_truncated_file_lacks_what_it_lost(cluster: LiveTwin) -> None:
    replicas = cluster.add(1)
    del replicas[2].files[BLOCK][CHUNK_BYTES + 10 :]
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.REPAIRABLE
    assert {(one.kind, one.offset) for one in found.comparison.differences} == {
        (DifferenceKind.CORRUPT_CHUNK, CHUNK_BYTES),
        (DifferenceKind.MISSING_CHUNK, 2 * CHUNK_BYTES),
        (DifferenceKind.MISSING_CHUNK, 3 * CHUNK_BYTES),
    }


def test_a_missing_file_is_asked_for_once(cluster: LiveTwin) -> None:
    """Each failed request costs a real datanode a scan."""
    replicas = cluster.add(1)
    del replicas[0].files[BLOCK]
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.REPAIRABLE
    assert {one.lacking for one in found.comparison.differences} == {(PEERS[0],)}
    assert cluster.sources[0].failed_reads == 1


def test_deleted_blocks_stay_deleted_when_the_data_are_read(cluster: LiveTwin) -> None:
    for replica in cluster.add(1):
        tree = replica.scanned_tree()
        blocks = [BlockTree.tombstone(BLOCK, 7), *(b for b in tree.blocks if b.block_id != BLOCK)]
        replica.tree = encode_tree(ContainerTree.of(ContainerId(1), blocks))
        # Ozone removes the file first, the record later.
        del replica.files[BLOCK]
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.MATCH
    assert cluster.sources[0].failed_reads == 0


def test_a_silent_datanode_makes_a_match_unknown(cluster: LiveTwin) -> None:
    cluster.add(1)
    cluster.stop(2)
    found = cluster.diagnose()[1]
    assert found.verdict is Verdict.UNKNOWN
    assert found.is_unreachable
    assert f"datanode {PEERS[1]}: peer_unavailable" in found.doubt


def test_a_silent_datanode_does_not_hide_what_the_others_show(cluster: LiveTwin) -> None:
    replicas = cluster.add(1)
    replicas[0].flip(BLOCK, 100)
    rescan(replicas[0])
    cluster.stop(3)
    assert cluster.diagnose()[1].verdict is Verdict.REPAIRABLE


def test_nothing_is_called_lost_while_a_datanode_is_silent(cluster: LiveTwin) -> None:
    for replica in cluster.add(1)[:2]:
        replica.flip(BLOCK, 100)
        rescan(replica)
    cluster.stop(3)
    assert cluster.diagnose()[1].verdict is Verdict.UNKNOWN


def test_a_dead_datanode_is_not_asked(cluster: LiveTwin) -> None:
    cluster.add(1)
    cluster.set_health(1, NodeHealth.DEAD)
    found = cluster.diagnose()[1]
    assert found.verdict is Verdict.UNKNOWN
    assert "DEAD" in found.doubt
    assert cluster.sources[0].trees == 0


def test_a_stale_datanode_is_asked(cluster: LiveTwin) -> None:
    cluster.add(1)
    cluster.set_health(1, NodeHealth.STALE)
    assert cluster.diagnose()[1].verdict is Verdict.MATCH


def test_a_replica_that_is_not_closed_is_not_asked_for(cluster: LiveTwin) -> None:
    cluster.add(1)[0].state = ReplicaState.OPEN
    cluster.report(1)
    found = cluster.diagnose()[1]
    assert found.verdict is Verdict.UNKNOWN
    assert "the replica is OPEN" in found.doubt
    assert cluster.sources[0].trees == 0


def test_fewer_replicas_than_required_prove_no_match(cluster: LiveTwin) -> None:
    cluster.add(1, replicas=2)
    found = cluster.diagnose()[1]
    assert found.verdict is Verdict.UNKNOWN
    assert found.doubt == "datanodes reported 2 of 3 replicas"
    assert not found.is_unreachable


def test_a_container_without_any_replica_is_unknown(cluster: LiveTwin) -> None:
    cluster.add(1)
    cluster.scm.replicas[ContainerId(1)] = []
    assert cluster.diagnose()[1].verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("state", [ContainerState.OPEN, ContainerState.DELETING])
def test_a_container_that_is_not_closed_is_not_compared(
    cluster: LiveTwin, state: ContainerState
) -> None:
    cluster.add(1)
    number = ContainerId(1)
    cluster.scm.containers[number] = replace(cluster.scm.containers[number], state=state)
    found = cluster.diagnose()[1]
    assert state.value in found.doubt
    assert [source.trees for source in cluster.sources] == [0, 0, 0]


def test_a_replica_without_an_index_is_no_part_of_an_erasure_coded_container(
    cluster: LiveTwin,
) -> None:
    cluster.add(1)
    number = ContainerId(1)
    cluster.scm.containers[number] = replace(cluster.scm.containers[number], is_erasure_coded=True)
    found = cluster.diagnose(deep=True)[1]
    assert found.verdict is Verdict.UNKNOWN
    assert "not read: replica index 1, 2, 3, 4, 5" in found.doubt


@pytest.mark.parametrize("tree", [b"\xff\xff", DiskError("the disk failed"), b""])
def test_one_unreadable_tree_costs_its_container_alone(
    cluster: LiveTwin, tree: bytes | ReconcileError
) -> None:
    for number in range(1, 4):
        cluster.add(number)
    cluster.sources[1].replicas[ContainerId(2)].tree = tree
    found = cluster.diagnose()
    assert [found[number].verdict for number in (1, 2, 3)] == [
        Verdict.MATCH, Verdict.UNKNOWN, Verdict.MATCH,
    ]  # fmt: skip
    assert str(PEERS[1]) in found[2].doubt
    assert not found[2].is_unreachable


def test_a_stream_that_the_datanode_ends_costs_one_container_alone(cluster: LiveTwin) -> None:
    """Ozone ends a stream at an exception that nobody foresaw; later requests on it are
    lost.
    """
    for number in range(1, 6):
        cluster.add(number)

    original = cluster.sources[0].head

    def head(container_id: ContainerId) -> object:
        if container_id == 3:
            raise RuntimeError("unforeseen")
        return original(container_id)

    cluster.sources[0].head = head
    found = cluster.diagnose()
    assert {n: one.verdict for n, one in found.items()} == {
        1: Verdict.MATCH, 2: Verdict.MATCH, 3: Verdict.UNKNOWN, 4: Verdict.MATCH, 5: Verdict.MATCH,
    }  # fmt: skip


def test_more_containers_than_one_batch(cluster: LiveTwin) -> None:
    for number in range(1, 1101):
        cluster.add(number, {20: 100})
    found = cluster.diagnose()
    assert list(found) == list(range(1, 1101))
    assert {one.verdict for one in found.values()} == {Verdict.MATCH}


class EndlessListing:
    """A datanode that lists records without end; the other methods are never called."""

    def __init__(self, chunks: int) -> None:
        self._chunks = tuple(ChunkRecord(at, 1, ChecksumType.NONE, 0, ()) for at in range(chunks))

    def list_records(self, container_id: ContainerId) -> Iterator[BlockRecord]:
        for number in count(1):
            yield BlockRecord(container_id, BlockId(number), 1, self._chunks)


@pytest.mark.parametrize("chunks", [0, 1000])
def test_a_listing_without_end_is_refused(chunks: int) -> None:
    container_id = ContainerId(1)
    stored = ContainerTree.of(container_id, [])
    with pytest.raises(RemoteProtocolError, match="more"):
        read_replica(EndlessListing(chunks), container_id, stored, lambda _: None)
