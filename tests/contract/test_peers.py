"""All peers behave alike: in memory, an agent over gRPC, a datanode of Ozone's protocol
over gRPC, and a datanode whose agent is asked first, also if the agent is silent.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import grpc
import pytest

from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from live.agent_peer import AgentFirstPeer
from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.errors import TreeRefusedError
from merkle.limits import BLOCK_CHUNKS_MAX, RECORDS_CHUNKS_MAX
from merkle.record import ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.datanode import XceiverService
from ozone.datanode_client import DatanodeClient, merge_ranges
from ozone.ports import ByteRange
from protos.agent_pb2 import GetBlockRecordsRequest, GetContainerHashesRequest
from protos.agent_pb2_grpc import AgentStub
from protos.convert import tree_from_bytes
from repair.peers import AgentPeer, DatanodePeer
from repair.ports import Peer, Piece
from runtime.errors import PeerRefusedError, PeerUnavailableError, RemoteProtocolError
from runtime.rpc import Deadlines, RpcServer, open_channel, start_server
from tests.support.peers import MemoryPeer, MemoryScans, MemorySource, MemoryStatus, replica_of

PEER = PeerId("7f541a06-6c26-476d-9994-c6e1947e11cb")
CONTAINER = ContainerId(12)
BLOCK = BlockId(20)
KINDS = ("memory", "agent", "datanode", "agent first", "agent silent")
NOBODY = "127.0.0.1:1"


@pytest.fixture
def source() -> MemorySource:
    """A container of three blocks, one of them empty, and one that is open."""
    still_open = replica_of(13, {1: 100})
    still_open.state = ReplicaState.OPEN
    return MemorySource(replica_of(CONTAINER, {9: 70_000, 20: 100_001, 100: 0}), still_open)


@pytest.fixture
def scans(source: MemorySource) -> MemoryScans:
    return MemoryScans(source)


@pytest.fixture
def server(source: MemorySource, scans: MemoryScans) -> Iterator[RpcServer]:
    agent = AgentService(source, scans, MemoryStatus(AgentStatus(PEER, False)))
    running = start_server("127.0.0.1:0", [agent.register, XceiverService(source).register])
    yield running
    running.stop(0)


@contextmanager
def limited(source: MemorySource, scans: MemoryScans, *, payload_bytes_max: int) -> Iterator[str]:
    """The address of an agent whose answers are small, so that few replicas exceed
    them.
    """
    status = MemoryStatus(AgentStatus(PEER, False))
    agent = AgentService(
        source,
        scans,
        status,
        payload_bytes_max=payload_bytes_max,
        page_bytes=payload_bytes_max // 2,
    )
    running = start_server("127.0.0.1:0", [agent.register])
    try:
        yield running.address
    finally:
        running.stop(0)


def connect(kind: str, address: str, deadlines: Deadlines | None = None) -> Peer:
    if kind.startswith("agent "):
        agent = connect("agent", address if kind == "agent first" else NOBODY, deadlines)
        return AgentFirstPeer(connect("datanode", address, deadlines), agent)
    channel = open_channel(address)
    if kind == "agent":
        return AgentPeer(PEER, channel, address, deadlines=deadlines)
    return DatanodePeer(PEER, DatanodeClient(channel, address, deadlines=deadlines))


@pytest.fixture(params=KINDS)
def peer(request: pytest.FixtureRequest, source: MemorySource, server: RpcServer) -> Iterator[Peer]:
    found = (
        MemoryPeer(PEER, source)
        if request.param == "memory"
        else connect(request.param, server.address)
    )
    yield found
    found.close()
    found.close()


def chunk_at(source: MemorySource, offset: int, block_id: BlockId = BLOCK) -> ChunkRecord:
    return source.replicas[CONTAINER].records[block_id].by_offset[offset]


def collect(
    peer: Peer, chunk: ChunkRecord, *ranges: ByteRange, block_id: BlockId = BLOCK
) -> dict[int, bytes]:
    """Every byte that came, by its offset."""
    return {
        piece.offset + i: bytes(piece.data[i : i + 1])
        for piece in peer.read(CONTAINER, block_id, chunk, ranges)
        for i in range(len(piece.data))
    }


def bytes_of(
    source: MemorySource, *ranges: ByteRange, block_id: BlockId = BLOCK
) -> dict[int, bytes]:
    file = source.replicas[CONTAINER].files[block_id]
    return {i: bytes(file[i : i + 1]) for one in ranges for i in range(one.offset, one.end)}


def test_a_tree_arrives_as_it_is_stored(peer: Peer, source: MemorySource) -> None:
    """CR-025, CR-031."""
    assert peer.peer_id == PEER
    assert peer.tree(CONTAINER) == source.replicas[CONTAINER].scanned_tree()


def test_tombstones_and_corrupt_chunks_are_part_of_the_tree(
    peer: Peer, source: MemorySource
) -> None:
    replica = source.replicas[CONTAINER]
    replica.flip(20, 5)
    tree = replica.scanned_tree()
    tree = ContainerTree.of(CONTAINER, [*tree.blocks, BlockTree.tombstone(BlockId(7), 77)])
    replica.tree = encode_tree(tree)
    assert peer.tree(CONTAINER) == tree


def test_a_tree_without_root_is_told_from_an_empty_one(peer: Peer, source: MemorySource) -> None:
    """CR-047."""
    tree = ContainerTree(CONTAINER, None, (BlockTree.tombstone(BlockId(7), 77),))
    source.replicas[CONTAINER].tree = encode_tree(tree)
    assert peer.tree(CONTAINER).data_checksum is None


def test_a_container_that_is_not_there_is_refused(peer: Peer) -> None:
    """CR-032."""
    with pytest.raises(PeerRefusedError) as caught:
        peer.tree(ContainerId(404))
    assert str(caught.value.facts["result"]).lower() == "container_not_found"


def test_the_tree_of_an_open_container_is_refused(peer: Peer) -> None:
    """CR-032."""
    with pytest.raises(PeerRefusedError):
        peer.tree(ContainerId(13))


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("unparsable", b"\x01\x02\x03"),
        ("another container's", encode_tree(ContainerTree.of(ContainerId(99), ()))),
        ("wrong root", encode_tree(ContainerTree(CONTAINER, 5, ()))),
        (
            "wrong block sum",
            encode_tree(ContainerTree.of(CONTAINER, [BlockTree(BlockId(1), 5, False, ())])),
        ),
        (
            "negative block ID",
            encode_tree(ContainerTree.of(CONTAINER, [BlockTree.live(BlockId(-1))])),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_tree_that_cannot_be_right_is_refused(
    peer: Peer, source: MemorySource, name: str, raw: bytes
) -> None:
    """wire-I5 for the first one: the server succeeds, the client fails."""
    source.replicas[CONTAINER].tree = raw
    with pytest.raises(TreeRefusedError) as caught:
        peer.tree(CONTAINER)
    assert caught.value.reason


def test_records_of_the_blocks_asked_for_arrive(peer: Peer, source: MemorySource) -> None:
    records = source.replicas[CONTAINER].records
    assert peer.records(CONTAINER, [BLOCK, BlockId(9)]) == {
        BLOCK: records[BLOCK],
        BlockId(9): records[BlockId(9)],
    }


def test_an_unknown_block_is_left_out(peer: Peer, source: MemorySource) -> None:
    wanted = [BlockId(1), BLOCK, BlockId(5), BlockId(2**62)]
    assert list(peer.records(CONTAINER, wanted)) == [BLOCK]
    assert peer.records(CONTAINER, []) == {}


def test_more_blocks_than_fit_one_request_are_asked_for_in_turns(
    peer: Peer, source: MemorySource
) -> None:
    source.replicas[CONTAINER] = replica_of(CONTAINER, dict.fromkeys(range(1, 1501), 1))
    assert len(peer.records(CONTAINER, [BlockId(i) for i in range(1, 2200)])) == 1500


@pytest.mark.parametrize("kind", ["agent", "datanode"])
def test_more_chunks_than_a_request_may_bring_are_refused(
    kind: str, source: MemorySource, server: RpcServer
) -> None:
    """A peer could fill our memory with records, of which it makes up as many as it
    likes.
    """
    blocks = RECORDS_CHUNKS_MAX // BLOCK_CHUNKS_MAX + 1
    one = replica_of(CONTAINER, {1: 1}, window_bytes=1, chunk_bytes=1)
    record = one.records[BlockId(1)]
    (chunk,) = record.chunks
    # Each has its own name, and none that of a block.
    chunks = tuple(replace(chunk, offset=i, name=f"c{i}") for i in range(BLOCK_CHUNKS_MAX))
    for number in range(1, blocks + 1):
        # The last block brings one chunk more than allowed.
        brought = chunks if number < blocks else chunks[:1]
        one.records[BlockId(number)] = replace(record, block_id=BlockId(number), chunks=brought)
    source.replicas[CONTAINER] = one
    with closing(connect(kind, server.address)) as peer:
        allowed = [BlockId(number) for number in range(1, blocks)]
        # Both count by the same rule, and seconds of reading show it once.
        if kind == "agent":
            assert len(peer.records(CONTAINER, allowed)) == blocks - 1
        with pytest.raises(RemoteProtocolError, match="chunks"):
            peer.records(CONTAINER, [*allowed, BlockId(blocks)])


def test_records_of_an_unknown_container_are_refused(peer: Peer) -> None:
    with pytest.raises(PeerRefusedError):
        peer.records(ContainerId(404), [BLOCK])


def test_a_window_arrives_with_nothing_around_it(peer: Peer, source: MemorySource) -> None:
    """CR-035."""
    wanted = ByteRange(16384 + 4096, 4096)
    assert collect(peer, chunk_at(source, 16384), wanted) == bytes_of(source, wanted)


def test_windows_that_touch_or_not_arrive_each_at_its_place(
    peer: Peer, source: MemorySource
) -> None:
    wanted = [ByteRange(0, 4096), ByteRange(4096, 4096), ByteRange(12288, 4096)]
    assert collect(peer, chunk_at(source, 0), *wanted) == bytes_of(source, *wanted)


def test_the_last_window_may_be_shorter(peer: Peer, source: MemorySource) -> None:
    last = max(source.replicas[CONTAINER].records[BLOCK].by_offset)
    wanted = ByteRange(last, 100_001 - last)
    assert collect(peer, chunk_at(source, last), wanted) == bytes_of(source, wanted)


def test_a_large_chunk_arrives_whole(peer: Peer, source: MemorySource) -> None:
    """Larger than any piece, not a multiple of the window."""
    replica = replica_of(CONTAINER, {20: 9_000_001}, window_bytes=1 << 20, chunk_bytes=16 << 20)
    source.replicas[CONTAINER] = replica
    pieces = list(
        peer.read(CONTAINER, BLOCK, replica.records[BLOCK].chunks[0], [ByteRange(0, 9_000_001)])
    )
    assert b"".join(bytes(piece.data) for piece in pieces) == replica.files[BLOCK]
    assert [piece.offset for piece in pieces] == sorted(piece.offset for piece in pieces)


def test_a_chunk_without_checksums_can_be_read(peer: Peer, source: MemorySource) -> None:
    replica = replica_of(CONTAINER, {20: 20_000}, checksum_type=ChecksumType.NONE)
    source.replicas[CONTAINER] = replica
    wanted = ByteRange(0, 16384)
    assert collect(peer, replica.records[BLOCK].chunks[0], wanted) == bytes_of(source, wanted)


def test_bad_bytes_are_served_as_they_are(peer: Peer, source: MemorySource) -> None:
    """CR-036: to tell good from bad is for whoever has the recorded checksums."""
    source.replicas[CONTAINER].flip(20, 7)
    wanted = ByteRange(0, 4096)
    assert collect(peer, chunk_at(source, 0), wanted) == bytes_of(source, wanted)


def test_what_is_left_of_a_shortened_file_arrives_before_the_error(
    peer: Peer, source: MemorySource
) -> None:
    chunk = chunk_at(source, 0)
    del source.replicas[CONTAINER].files[BLOCK][6000:]
    pieces: list[Piece] = []
    with pytest.raises(PeerRefusedError) as caught:
        pieces.extend(peer.read(CONTAINER, BLOCK, chunk, [ByteRange(0, 16384)]))
    assert (
        b"".join(bytes(piece.data) for piece in pieces) == source.replicas[CONTAINER].files[BLOCK]
    )
    assert caught.value.facts["result"] == "short_read"


def test_a_range_beyond_the_end_of_the_file_is_short(peer: Peer, source: MemorySource) -> None:
    chunk = chunk_at(source, 0)
    del source.replicas[CONTAINER].files[BLOCK][4096:]
    with pytest.raises(PeerRefusedError) as caught:
        list(peer.read(CONTAINER, BLOCK, chunk, [ByteRange(8192, 4096)]))
    assert caught.value.facts["result"] == "short_read"


def test_a_lost_file_is_refused(peer: Peer, source: MemorySource) -> None:
    chunk = chunk_at(source, 0)
    del source.replicas[CONTAINER].files[BLOCK]
    with pytest.raises(PeerRefusedError):
        list(peer.read(CONTAINER, BLOCK, chunk, [ByteRange(0, 4096)]))


def test_reading_may_be_given_up_half_way(peer: Peer, source: MemorySource) -> None:
    pieces = iter(
        peer.read(
            CONTAINER, BLOCK, chunk_at(source, 0), [ByteRange(0, 4096), ByteRange(8192, 4096)]
        )
    )
    next(pieces)
    del pieces
    assert peer.tree(CONTAINER)


@pytest.mark.parametrize("kind", ["agent", "datanode"])
def test_a_peer_that_is_away_is_unavailable(
    kind: str, server: RpcServer, source: MemorySource
) -> None:
    server.stop(0)
    peer = connect(kind, server.address, Deadlines(tree_s=5, records_s=5, read_s=5))
    calls: list[Callable[[], object]] = [
        lambda: peer.tree(CONTAINER),
        lambda: peer.records(CONTAINER, [BLOCK]),
        lambda: list(peer.read(CONTAINER, BLOCK, chunk_at(source, 0), [ByteRange(0, 4096)])),
    ]
    for call in calls:
        with pytest.raises(PeerUnavailableError) as caught:
            call()
        assert caught.value.retryable
    peer.close()


@pytest.mark.parametrize("kind", ["agent", "datanode"])
def test_a_peer_that_comes_back_is_found_again(
    kind: str, server: RpcServer, source: MemorySource
) -> None:
    peer = connect(kind, server.address)
    expected = peer.tree(CONTAINER)
    server.stop(0)
    with pytest.raises(PeerUnavailableError):
        peer.tree(CONTAINER)
    agent = AgentService(source, MemoryScans(source), MemoryStatus(AgentStatus(PEER, False)))
    again = start_server(server.address, [agent.register, XceiverService(source).register])
    found, deadline = None, time.monotonic() + 20
    while found is None and time.monotonic() < deadline:
        with contextlib.suppress(PeerUnavailableError):
            found = peer.tree(CONTAINER)
    assert found == expected
    again.stop(0)
    peer.close()


def test_a_missing_tree_is_an_error_for_agents_and_has_it_made(
    source: MemorySource, scans: MemoryScans, server: RpcServer
) -> None:
    """CR-032: no tree is an error, and a scan is scheduled."""
    source.replicas[CONTAINER].tree = None
    peer = connect("agent", server.address)
    with pytest.raises(PeerRefusedError) as caught:
        peer.tree(CONTAINER)
    assert caught.value.facts["result"] == "tree_missing"
    assert scans.scheduled == [CONTAINER]
    peer.close()


def test_a_tree_too_large_for_a_message_comes_in_pages(
    source: MemorySource, scans: MemoryScans
) -> None:
    replica = replica_of(CONTAINER, dict.fromkeys(range(1, 2001), 5))
    source.replicas[CONTAINER] = replica
    with limited(source, scans, payload_bytes_max=10_000) as address:
        with open_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            AgentStub(channel).GetContainerHashes(
                GetContainerHashesRequest(container_id=CONTAINER), timeout=10
            )
        assert "treefold-code" in {entry.key for entry in refused.value.trailing_metadata()}
        peer = connect("agent", address)
        assert peer.tree(CONTAINER) == replica.scanned_tree()
        peer.close()


def test_records_beyond_one_message_come_in_turns(source: MemorySource, scans: MemoryScans) -> None:
    source.replicas[CONTAINER] = replica_of(CONTAINER, dict.fromkeys(range(1, 51), 5))
    with limited(source, scans, payload_bytes_max=2_000) as address:
        with open_channel(address) as channel:
            asked = GetBlockRecordsRequest(container_id=CONTAINER, block_ids=range(60))
            first_turn = AgentStub(channel).GetBlockRecords(asked, timeout=10).block_data
        assert 0 < len(first_turn) < 50
        peer = connect("agent", address)
        assert list(peer.records(CONTAINER, [BlockId(i) for i in range(60)])) == list(range(1, 51))
        peer.close()


def test_a_record_of_another_block_is_nonsense(source: MemorySource, server: RpcServer) -> None:
    records = source.replicas[CONTAINER].records
    records[BLOCK] = records[BlockId(9)]
    for kind in ("agent", "datanode"):
        peer = connect(kind, server.address)
        with pytest.raises(RemoteProtocolError):
            peer.records(CONTAINER, [BLOCK])
        peer.close()


def test_a_record_of_another_container_is_nonsense(source: MemorySource, server: RpcServer) -> None:
    records = source.replicas[CONTAINER].records
    records[BLOCK] = replace(records[BLOCK], container_id=ContainerId(13))
    for kind in ("agent", "datanode"):
        peer = connect(kind, server.address)
        with pytest.raises(RemoteProtocolError):
            peer.records(CONTAINER, [BLOCK])
        peer.close()


def test_an_empty_tree_file_is_an_error_at_a_datanode_and_no_tree_at_an_agent(
    source: MemorySource, server: RpcServer
) -> None:
    """wire-I6."""
    source.replicas[CONTAINER].tree = b""
    datanode, agent = connect("datanode", server.address), connect("agent", server.address)
    with pytest.raises(PeerRefusedError) as caught:
        datanode.tree(CONTAINER)
    assert caught.value.facts["result"] == "IO_EXCEPTION"
    assert agent.tree(CONTAINER) == tree_from_bytes(b"", CONTAINER)
    datanode.close()
    agent.close()


def test_ranges_that_touch_become_one() -> None:
    ranges = [ByteRange(0, 10), ByteRange(10, 10), ByteRange(30, 5)]
    assert merge_ranges(ranges, 100) == [ByteRange(0, 20), ByteRange(30, 5)]


def test_a_long_range_is_cut() -> None:
    assert merge_ranges([ByteRange(5, 20), ByteRange(25, 1)], 10) == [
        ByteRange(5, 10),
        ByteRange(15, 10),
        ByteRange(25, 1),
    ]
