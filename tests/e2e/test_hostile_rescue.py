"""A rescue among the hostile: datanodes that lie about their replica, and strangers at
the port where it serves. Only proven bytes are staged and served, and it always ends.
"""

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

import grpc
import pytest

from live.rescue_runner import Staged, serve_staged, stage
from live.staging import StagingSource
from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.errors import ReconcileError
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, BlockTree, ChunkTree, ContainerId, ContainerTree
from ozone.datanode import SERVICE
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from protos.convert import tree_from_bytes
from protos.ozone_datanode_pb2 import (
    ContainerCommandRequestProto,
    DatanodeBlockID,
    ReadChunkRequestProto,
    Type,
)
from repair.peers import DatanodePeer
from runtime.disk import Disk
from runtime.rpc import Deadlines, RpcServer, StreamCall, open_channel
from tests.support.bounded_memory import bounded_memory
from tests.support.live_twin import PEERS, LiveTwin, live_twin
from tests.support.peers import CHUNK_BYTES, WINDOW_BYTES, MemoryReplica, chunk_record

NUMBER, BLOCK, OTHER = ContainerId(1), BlockId(20), BlockId(21)
OWN = PeerId("9fffffff-0000-4000-8000-000000000000")
DEADLINES = Deadlines(tree_s=5, records_s=5, read_s=5)
PATIENT_S = 30.0

pytestmark = pytest.mark.e2e


@dataclass
class Damaged:
    """A container whose first chunk each replica has damaged in another window."""

    live: LiveTwin
    replicas: list[MemoryReplica]
    content: dict[BlockId, bytes]
    records: dict[BlockId, BlockRecord]

    @property
    def liar(self) -> MemoryReplica:
        """The replica that is tampered with."""
        return self.replicas[2]

    def stage(self, folder: Path) -> Staged:
        """What a rescue puts together."""
        clients = {
            peer: DatanodeClient(open_channel(server.address), peer, deadlines=DEADLINES)
            for peer, server in zip(PEERS, self.live.servers, strict=True)
        }
        try:
            peers = {peer: DatanodePeer(peer, client) for peer, client in clients.items()}
            return stage(NUMBER, OWN, peers, folder, Disk(), bcs_id=1)
        finally:
            for client in clients.values():
                client.close()


@pytest.fixture
def damaged() -> Iterator[Damaged]:
    with live_twin() as live:
        replicas = live.add(NUMBER)
        content = {number: bytes(data) for number, data in replicas[0].files.items()}
        records = dict(replicas[0].records)
        for datanode, found in enumerate(replicas, 1):
            found.flip(BLOCK, datanode * WINDOW_BYTES + 7)
            found.tree = encode_tree(found.scanned_tree())
        yield Damaged(live, replicas, content, records)


Tamper = Callable[[MemoryReplica], None]


def chunk(at: int, change: Callable[[ChunkRecord], ChunkRecord], bcs_id: int = 1) -> Tamper:
    """Change the record of one chunk; the tree stays."""

    def tamper(found: MemoryReplica) -> None:
        record = found.records[BLOCK]
        chunks = [change(one) if i == at else one for i, one in enumerate(record.chunks)]
        found.records[BLOCK] = replace(record, chunks=tuple(chunks), bcs_id=bcs_id)

    return tamper


def own_bytes(found: MemoryReplica) -> None:
    """Its record and its tree bear out its own damaged bytes."""
    data = bytes(found.files[BLOCK][:CHUNK_BYTES])
    chunk(0, lambda one: chunk_record(data, 0, one.checksum_type, WINDOW_BYTES))(found)
    found.tree = encode_tree(found.scanned_tree())


def leaf(change: Callable[[ChunkTree], ChunkTree]) -> Tamper:
    """Change the first chunk in the tree; its sums are right."""

    def tamper(found: MemoryReplica) -> None:
        assert isinstance(found.tree, bytes)
        tree = tree_from_bytes(found.tree, NUMBER)
        blocks = [
            BlockTree.live(one.block_id, [change(one.chunks[0]), *one.chunks[1:]])
            if one.block_id == BLOCK
            else one
            for one in tree.blocks
        ]
        found.tree = encode_tree(ContainerTree.of(NUMBER, blocks))

    return tamper


def tombstone(found: MemoryReplica) -> None:
    blocks = [
        BlockTree.tombstone(one.block_id, 1) if one.block_id == BLOCK else one
        for one in found.scanned_tree().blocks
    ]
    found.tree = encode_tree(ContainerTree.of(NUMBER, blocks))


def healthy(found: MemoryReplica) -> None:
    right = found.records[BLOCK].chunks[0].data_checksum
    leaf(lambda one: replace(one, data_checksum=right, checksum_matches=True))(found)


def set_tree(make: Callable[[ContainerTree], ContainerTree | bytes]) -> Tamper:
    def tamper(found: MemoryReplica) -> None:
        made = make(found.scanned_tree())
        found.tree = made if isinstance(made, bytes) else encode_tree(made)

    return tamper


def other_block(found: MemoryReplica) -> None:
    found.records[BLOCK] = found.records[OTHER]


def other_bytes(found: MemoryReplica) -> None:
    found.files[BLOCK][:] = os.urandom(len(found.files[BLOCK]))


def cut(length: int) -> Tamper:
    def tamper(found: MemoryReplica) -> None:
        del found.files[BLOCK][length:]

    return tamper


def no_file(found: MemoryReplica) -> None:
    del found.files[BLOCK]


def no_record(found: MemoryReplica) -> None:
    del found.records[BLOCK]


def renamed(found: MemoryReplica) -> None:
    chunk(0, lambda one: replace(one, name="../../\x1b[2J"))(found)


# How a datanode lies, and the code of the error that the staging ends with, if any.
LIES: dict[str, tuple[Tamper, str]] = {
    "a chunk that lost its checksum type": (
        chunk(0, lambda one: replace(one, checksum_type=ChecksumType.NONE, checksums=())), ""),
    "checksums of another type": (
        chunk(0, lambda one: replace(one, checksum_type=ChecksumType.CRC32)), ""),
    "windows of another length": (chunk(0, lambda one: replace(one, bytes_per_checksum=5000)), ""),
    "a healthy chunk's checksums of another type": (
        chunk(1, lambda one: replace(one, checksum_type=ChecksumType.CRC32), 1 << 62), ""),
    "a healthy chunk's windows of another length": (
        chunk(1, lambda one: replace(one, bytes_per_checksum=5000), 1 << 62), ""),
    "a healthy chunk that lost its checksum type": (
        chunk(1, lambda one: replace(one, checksum_type=ChecksumType.NONE, checksums=()), 1 << 62),
        ""),
    "a checksum too few": (chunk(0, lambda one: replace(one, checksums=one.checksums[1:])), ""),
    "a checksum too many": (
        chunk(0, lambda one: replace(one, checksums=(*one.checksums, b"abcd"))), ""),
    "a longer chunk": (chunk(0, lambda one: replace(one, length_bytes=CHUNK_BYTES + 1)), ""),
    "a chunk beyond any block": (chunk(3, lambda one: replace(one, offset=1 << 41)), ""),
    "records and tree of its own bad bytes": (own_bytes, ""),
    "a commit that nobody made": (chunk(0, lambda one: one, bcs_id=1 << 62), ""),
    "a name that is a path": (renamed, ""),
    "no record": (no_record, ""),
    "the record of another block": (other_block, "remote_protocol"),
    "a damaged chunk called healthy": (healthy, ""),
    "a checksum of the tree that no record has": (
        leaf(lambda one: replace(one, data_checksum=7, checksum_matches=True)), ""),
    "another length in the tree": (leaf(lambda one: replace(one, length_bytes=1)), ""),
    "a block called deleted": (tombstone, ""),
    "a tree of nothing": (set_tree(lambda _: ContainerTree.of(NUMBER, [])), ""),
    "a tree of another container": (
        set_tree(lambda tree: replace(tree, container_id=ContainerId(2))), "tree_refused"),
    "a root that its blocks do not have": (
        set_tree(lambda tree: replace(tree, data_checksum=1)), "tree_refused"),
    "bytes that are no tree": (set_tree(lambda _: b"\xff" * 100), "tree_refused"),
    "no bytes of a tree": (set_tree(lambda _: b""), "peer_refused"),
    "other bytes": (other_bytes, ""),
    "a file that ends within a window": (cut(WINDOW_BYTES + 5), ""),
    "a file of no bytes": (cut(0), ""),
    "no file": (no_file, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_lying_datanode_gets_nothing_staged_that_is_not_proven(
    name: str, damaged: Damaged, tmp_path: Path
) -> None:
    tamper, expected = LIES[name]
    tamper(damaged.liar)
    code = ""
    with bounded_memory():
        try:
            staged = damaged.stage(tmp_path)
        except ReconcileError as error:
            code = error.code
    assert code == expected
    if not code:
        check_staged(staged, damaged)


def check_staged(staged: Staged, damaged: Damaged) -> None:
    """All that is staged or served is what the client wrote, by the client's record."""
    source = StagingSource(staged.replica, NUMBER)
    for block_id, offset in staged.replica.staged:
        found = damaged.records[block_id].by_offset[offset]
        data = source.read(NUMBER, block_id, offset, found.length_bytes)
        assert data == damaged.content[block_id][offset : found.end]
    served = source.record(NUMBER, BLOCK)
    for one in served.chunks if served else ():
        assert one.content == damaged.records[BLOCK].by_offset[one.offset].content


def test_an_honest_cluster_is_staged_whole(damaged: Damaged, tmp_path: Path) -> None:
    """What the lies are measured against."""
    staged = damaged.stage(tmp_path)
    assert staged.replica.staged == {(BLOCK, 0)}
    check_staged(staged, damaged)


@dataclass
class Port:
    """The port where a staged replica is served."""

    server: RpcServer
    folder: Path
    chunk: ChunkRecord
    content: bytes

    def read(self) -> bytes:
        """The staged chunk, as a datanode reads it."""
        client = DatanodeClient(open_channel(self.server.address), "rescue", deadlines=DEADLINES)
        try:
            [(_, pieces)] = client.read(
                NUMBER, BLOCK, self.chunk, [ByteRange(0, self.chunk.length_bytes)]
            )
            return b"".join(pieces)
        finally:
            client.close()

    def files(self) -> dict[str, str]:
        """What is in the folder, by the digest of each file."""
        return {
            one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in self.folder.iterdir()
        }


@pytest.fixture
def port(damaged: Damaged, tmp_path: Path) -> Iterator[Port]:
    staged = damaged.stage(tmp_path)
    server = serve_staged("127.0.0.1:0", staged.replica, NUMBER)
    [record] = [staged.replica.staged_record(place) for place in staged.replica.staged]
    yield Port(server, tmp_path, record, damaged.content[BLOCK][:CHUNK_BYTES])
    server.stop(0)


Request = ContainerCommandRequestProto


def request(kind: Type, container_id: int = NUMBER) -> Request:
    return Request(cmdType=kind, containerID=container_id, datanodeUuid="")


def read_request(block_id: int, offset: int, length: int, window: int = 4096) -> Request:
    found = request(Type.ReadChunk)
    body = ReadChunkRequestProto(
        blockID=DatanodeBlockID(containerID=NUMBER, localID=block_id), readChunkVersion=1
    )
    body.chunkData.chunkName, body.chunkData.offset, body.chunkData.len = "", offset, length
    body.chunkData.checksumData.type, body.chunkData.checksumData.bytesPerChecksum = 3, window
    found.readChunk.CopyFrom(body)
    return found


def calls(*requests: Request | bytes, count: int = 1) -> Callable[[str], None]:
    """Send these on a stream each, and read what comes."""

    def stranger(address: str) -> None:
        options = (("grpc.max_send_message_length", -1),)
        with grpc.insecure_channel(address, options=options) as channel:
            send: StreamCall = channel.stream_stream(f"/{SERVICE}/send")
            for one in requests:
                raw = one if isinstance(one, bytes) else one.SerializePartialToString()
                try:
                    for _ in send(repeat(raw, count), timeout=PATIENT_S):
                        pass
                except grpc.RpcError:
                    continue

    return stranger


def holds(address: str) -> None:
    """Sixty streams that send nothing and read nothing, while the test goes on."""
    channel = grpc.insecure_channel(address)
    forever = threading.Event()

    def never() -> Iterator[bytes]:
        forever.wait(PATIENT_S)
        yield from ()

    send: StreamCall = channel.stream_stream(f"/{SERVICE}/send")
    for _ in range(60):
        send(never(), timeout=PATIENT_S)
    # Time for the calls to arrive.
    forever.wait(0.5)


def noise(address: str) -> None:
    host, _, number = address.rpartition(":")
    for data in (os.urandom(1 << 20), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM"):
        with socket.create_connection((host, int(number))) as connection:
            connection.sendall(data)


_WRITES = (
    Type.CreateContainer, Type.UpdateContainer, Type.DeleteContainer, Type.PutBlock,
    Type.DeleteBlock, Type.WriteChunk, Type.DeleteChunk, Type.PutSmallFile,
    Type.CloseContainer, Type.StreamInit, Type.StreamWrite, Type.FinalizeBlock,
)  # fmt: skip
STRANGERS: dict[str, Callable[[str], None]] = {
    "writes": calls(*map(request, _WRITES)),
    "asks for another container": calls(
        request(Type.GetContainerChecksumInfo, 2), request(Type.GetBlock, -1)
    ),
    "asks without a body": calls(
        *map(request, (Type.GetBlock, Type.ListBlock, Type.ReadChunk, Type.Echo))
    ),
    "asks for a block that is not staged": calls(read_request(OTHER, 0, 5000)),
    "asks for chunks that are not staged": calls(read_request(BLOCK, CHUNK_BYTES, CHUNK_BYTES)),
    "asks for an offset of 2^64 - 1": calls(read_request(BLOCK, (1 << 64) - 1, 1)),
    "asks for 32 MiB": calls(read_request(BLOCK, 0, 32 << 20), count=20),
    "asks for 2^63 bytes": calls(read_request(BLOCK, 0, 1 << 63)),
    "asks for windows of one byte": calls(read_request(BLOCK, 0, CHUNK_BYTES, 1), count=100),
    "asks ten thousand times": calls(read_request(BLOCK, 0, CHUNK_BYTES), count=10_000),
    "sends 64 MiB": calls(bytes(64 << 20)),
    "sends what is no request": calls(b"\xff" * 1000, b""),
    "sends noise": noise,
    "holds sixty streams": holds,
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_keeps_no_datanode_from_the_staged_bytes(name: str, port: Port) -> None:
    before = port.files()
    with bounded_memory():
        STRANGERS[name](port.server.address)
        assert port.read() == port.content
    assert port.files() == before
