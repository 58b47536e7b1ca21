"""Peers that misbehave on a real socket: each ends in a named error within its
deadline, in bounded memory (inv-I10), and what cannot be known to be wrong is caught by
the recorded checksums (inv-I4).
"""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from live.deep_read import read_replica
from merkle.checksum import window_checksums
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import ContainerId, ContainerTree
from ozone.datanode import XceiverService
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from repair.peers import AgentPeer, DatanodePeer
from repair.ports import Peer
from runtime.rpc import Deadlines, UnaryCall, open_channel, start_server
from tests.support.bounded_memory import bounded_memory
from tests.support.evil_records import BLOCK, CHUNK_BYTES, replica
from tests.support.evil_server import CASES, Ask, Case
from tests.support.peers import MemoryScans, MemorySource, MemoryStatus

ROOT = Path(__file__).resolve().parents[2]
PEER = PeerId("evil")
# A call that only its deadline ends has this long.
STALLED_S = 0.7
# Any other ends by itself, well before this.
PATIENT_S = 30.0

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def evil_address() -> Iterator[str]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.evil_server"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout
        yield f"127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


def connect(kind: str, address: str, limit_s: float) -> Peer:
    channel = open_channel(address)
    deadlines = Deadlines(
        tree_s=limit_s, records_s=limit_s, read_s=limit_s, read_bytes_per_s=1 << 40
    )
    if kind == "agent":
        return AgentPeer(PEER, channel, address, deadlines=deadlines)
    return DatanodePeer(PEER, DatanodeClient(channel, address, deadlines=deadlines))


def ask_tree(peer: Peer, container_id: ContainerId) -> None:
    peer.tree(container_id)


def ask_records(peer: Peer, container_id: ContainerId) -> None:
    """A record is of use only if it is there."""
    assert peer.records(container_id, [BLOCK]) == {}


def ask_read(peer: Peer, container_id: ContainerId) -> None:
    """Bytes are of use only if they match the record."""
    chunk = replica(container_id).records[BLOCK].chunks[0]
    data = bytearray(CHUNK_BYTES)
    for piece in peer.read(container_id, BLOCK, chunk, [ByteRange(0, CHUNK_BYTES)]):
        data[piece.offset : piece.end] = piece.data
    assert len(data) == CHUNK_BYTES
    assert window_checksums(data, chunk.checksum_type, chunk.bytes_per_checksum) != b"".join(
        chunk.checksums
    )


def ask_list(peer: Peer, container_id: ContainerId) -> None:
    """As a deep diagnosis reads a replica."""
    assert isinstance(peer, DatanodePeer)
    read_replica(peer._client, container_id, ContainerTree.of(container_id, []), lambda _: None)


ASK: dict[Ask, Callable[[Peer, ContainerId], None]] = {
    Ask.TREE: ask_tree,
    Ask.RECORDS: ask_records,
    Ask.READ: ask_read,
    Ask.LIST: ask_list,
}


def code_of(peer: Peer, ask: Ask, container_id: ContainerId) -> str | None:
    """The code of the error that the call ends with; its text must be fit for a
    terminal.
    """
    error = None
    try:
        ASK[ask](peer, container_id)
    except ReconcileError as raised:
        error = raised
    if error is None:
        return None
    assert error.message.isprintable()
    assert len(error.message) < 2000
    return error.code


@pytest.mark.parametrize(("container_id", "case"), CASES.items(), ids=lambda value: str(value))
def test_a_hostile_peer_ends_in_a_named_error(
    evil_address: str, container_id: ContainerId, case: Case
) -> None:
    """inv-I4, inv-I10, inv-I11, CR-036."""
    stalls = case.codes == ("peer_unavailable",)
    peer = connect(case.kind, evil_address, STALLED_S if stalls else PATIENT_S)
    started = time.monotonic()
    with bounded_memory():
        code = code_of(peer, case.ask, container_id)
    took_s = time.monotonic() - started
    peer.close()
    assert code in case.codes if case.codes else code is None
    # On a busy machine parsing ten million parts takes its time, waiting does not.
    assert took_s < (STALLED_S + 5 if stalls else PATIENT_S)


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def http_1(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    silent(connection)


def noise(connection: socket.socket) -> None:
    connection.sendall(os.urandom(1 << 20))


def settings_then_silence(connection: socket.socket) -> None:
    connection.sendall(b"\0\0\0\x04\0\0\0\0\0")
    silent(connection)


def frame_of_sixteen_mebibytes(connection: socket.socket) -> None:
    connection.sendall(b"\0\0\0\x04\0\0\0\0\0" + b"\xff\xff\xff\0\0\0\0\0\x01")
    silent(connection)


def byte_by_byte(connection: socket.socket) -> None:
    """A valid preface, one byte in a while, so that something always arrives."""
    gap = threading.Event()
    for byte in b"\0\0\0\x04\0\0\0\0\0" * 1000:
        connection.sendall(bytes([byte]))
        gap.wait(0.05)


def close_at_once(_: socket.socket) -> None:
    pass


@contextmanager
def listening(behaviour: Callable[[socket.socket], None]) -> Iterator[str]:
    """A socket whose every connection is treated so, each in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_connections: list[socket.socket] = []

    def serve(connection: socket.socket) -> None:
        try:
            behaviour(connection)
        except OSError:
            return
        finally:
            connection.close()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_connections.append(connection)
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(10)
        for connection in open_connections:
            connection.close()


@pytest.mark.parametrize("kind", ["agent", "datanode"])
@pytest.mark.parametrize(
    "behaviour",
    [
        silent,
        reset,
        close_at_once,
        http_1,
        noise,
        settings_then_silence,
        frame_of_sixteen_mebibytes,
        byte_by_byte,
    ],
)
def test_what_is_no_grpc_server_is_an_unavailable_peer(
    kind: str, behaviour: Callable[[socket.socket], None]
) -> None:
    with listening(behaviour) as address, bounded_memory():
        peer = connect(kind, address, STALLED_S)
        started = time.monotonic()
        assert code_of(peer, Ask.TREE, ContainerId(1)) in ("peer_unavailable", "remote_protocol")
        assert time.monotonic() - started < STALLED_S + 5
        peer.close()


@pytest.mark.parametrize("kind", ["agent", "datanode"])
@pytest.mark.parametrize("after_bytes", [0, 100, 20_000, 100_000])
def test_a_connection_that_is_reset_in_the_middle_is_an_unavailable_peer(
    kind: str, after_bytes: int
) -> None:
    """The server is an honest one; what stands between resets the connection after so
    many bytes of its answers.
    """
    container_id = ContainerId(1)
    source = MemorySource(replica(container_id))
    agent = AgentService(source, MemoryScans(source), MemoryStatus(AgentStatus(PEER, False)))
    server = start_server("127.0.0.1:0", [agent.register, XceiverService(source).register])

    def between(connection: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", server.port)) as onward:
            threading.Thread(target=pump, args=(connection, onward), daemon=True).start()
            left = after_bytes
            while left > 0 and (data := onward.recv(min(left, 4096))):
                connection.sendall(data)
                left -= len(data)
            # Wakes the pump: a socket that is being read from is not closed before that
            # ends.
            connection.shutdown(socket.SHUT_RD)
            reset(connection)

    def pump(source_socket: socket.socket, target: socket.socket) -> None:
        try:
            while data := source_socket.recv(65536):
                target.sendall(data)
        except OSError:
            return

    with listening(between) as address:
        peer = connect(kind, address, PATIENT_S)
        assert code_of(peer, Ask.READ, container_id) in ("peer_unavailable", "remote_protocol")
        peer.close()
    server.stop(0)


def test_a_server_outlives_hostile_clients() -> None:
    """Half-open connections, noise and requests that are none leave it answering."""
    container_id = ContainerId(1)
    source = MemorySource(replica(container_id))
    agent = AgentService(source, MemoryScans(source), MemoryStatus(AgentStatus(PEER, False)))
    with bounded_memory():
        server = start_server("127.0.0.1:0", [agent.register, XceiverService(source).register])
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        for i, connection in enumerate(idle):
            connection.sendall(os.urandom(1000) if i % 2 else b"PRI * HTTP/2.0\r\n")
        with open_channel(server.address) as channel:
            for method in ("GetContainerHashes", "GetBlockRecords", "ScanContainer", "GetStatus"):
                call: UnaryCall = channel.unary_unary(f"/treefold.agent.v1.Agent/{method}")
                with pytest.raises(grpc.RpcError) as caught:
                    call(b"\xff" * 50, timeout=PATIENT_S)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        unlimited = (("grpc.max_send_message_length", -1),)
        with grpc.insecure_channel(server.address, options=unlimited) as channel:
            call = channel.unary_unary("/treefold.agent.v1.Agent/GetBlockRecords")
            with pytest.raises(grpc.RpcError) as caught:
                call(bytes(64 << 20), timeout=PATIENT_S)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        peer = connect("agent", server.address, PATIENT_S)
        assert peer.tree(container_id) == source.replicas[container_id].scanned_tree()
        peer.close()
        for connection in idle:
            connection.close()
        server.stop(0)


def test_a_stalled_peer_does_not_keep_others_waiting(evil_address: str) -> None:
    """inv-I11: calls to one peer share nothing with calls to another."""
    stalled = next(
        c for c, case in CASES.items() if case.name == "never answers" and case.ask is Ask.TREE
    )
    slow, fast = (
        connect("agent", evil_address, PATIENT_S),
        connect("agent", evil_address, PATIENT_S),
    )
    waiting = threading.Thread(target=lambda: code_of(slow, Ask.TREE, stalled))
    waiting.start()
    quick = next(
        c for c, case in CASES.items() if case.name == "wrong root" and case.kind == "agent"
    )
    assert code_of(fast, Ask.TREE, quick) == "tree_refused"
    assert waiting.is_alive()
    # Closing the peer ends what waits for it.
    slow.close()
    waiting.join(10)
    assert not waiting.is_alive()
    fast.close()
