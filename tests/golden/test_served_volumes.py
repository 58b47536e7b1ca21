"""What real datanodes wrote, read back over both wires: tree files byte for byte, every
window of every chunk.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from dnagent.store import ReplicaStore
from dnagent.volumes import ManagedVolume
from merkle.checksum import window_checksums
from merkle.record import ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from ozone.datanode import XceiverService
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from ozone.volume import Hold, open_volume
from repair.peers import AgentPeer, DatanodePeer
from repair.ports import Peer
from runtime.disk import Disk
from runtime.rpc import RpcServer, open_channel, start_server
from tests.support.peers import MemoryScans, MemorySource, MemoryStatus
from tests.support.volumes import container_folder, state_of, unpack

PEER = PeerId("dn1")


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack("healthy", tmp_path_factory.mktemp("healthy")) / "dn1" / "volume1"


@pytest.fixture(scope="module")
def store(volume: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaStore]:
    state = tmp_path_factory.mktemp("state")
    opened = ManagedVolume(
        open_volume(volume, hold=Hold.READ_ONLY, state_folder=state, disk=Disk()),
        Disk(),
        undo_bytes=0,
    )
    store = ReplicaStore([opened], repair_enabled=False)
    yield store
    store.close()


@pytest.fixture(scope="module")
def server(store: ReplicaStore) -> Iterator[RpcServer]:
    agent = AgentService(store, MemoryScans(MemorySource()), MemoryStatus(AgentStatus(PEER, False)))
    running = start_server("127.0.0.1:0", [agent.register, XceiverService(store).register])
    yield running
    running.stop(0)


@pytest.fixture(params=["agent", "datanode"])
def peer(request: pytest.FixtureRequest, server: RpcServer) -> Iterator[Peer]:
    channel = open_channel(server.address)
    found: Peer = (
        AgentPeer(PEER, channel, server.address)
        if request.param == "agent"
        else DatanodePeer(PEER, DatanodeClient(channel, server.address))
    )
    yield found
    found.close()


def is_whole(peer: Peer, container_id: ContainerId, block_id: BlockId, chunk: ChunkRecord) -> bool:
    """Whether the chunk's bytes come whole and match the record."""
    pieces = peer.read(container_id, block_id, chunk, [ByteRange(chunk.offset, chunk.length_bytes)])
    data = b"".join(bytes(piece.data) for piece in pieces)
    found = window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum)
    return len(data) == chunk.length_bytes and found == b"".join(chunk.checksums)


def test_tree_files_are_served_byte_for_byte(
    server: RpcServer, store: ReplicaStore, volume: Path
) -> None:
    """wire-I7."""
    client = DatanodeClient(open_channel(server.address), server.address)
    replicas = store.replicas()
    assert replicas
    for replica in replicas:
        file = (
            container_folder(volume, replica.container_id)
            / "metadata"
            / f"{replica.container_id}.tree"
        )
        assert client.tree_bytes(replica.container_id) == file.read_bytes()
    client.close()


def test_every_window_of_every_block_comes_back_as_recorded(
    peer: Peer, store: ReplicaStore
) -> None:
    chunks = 0
    for replica in store.replicas():
        tree = peer.tree(replica.container_id)
        live = [block.block_id for block in tree.blocks if not block.deleted]
        records = peer.records(replica.container_id, live)
        assert sorted(records) == live
        for record in records.values():
            for chunk in record.chunks:
                assert is_whole(peer, replica.container_id, record.block_id, chunk)
                chunks += 1
    assert chunks > 40


def test_serving_leaves_the_volume_untouched(peer: Peer, store: ReplicaStore, volume: Path) -> None:
    before = state_of(volume)
    for replica in store.replicas():
        peer.tree(replica.container_id)
    assert state_of(volume) == before
