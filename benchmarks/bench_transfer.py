"""How fast data come from a peer: our ReadWindows against a bare gRPC stream of the same messages and plain TCP.

    python -m benchmarks.bench_transfer [--json]

Servers run in processes of their own over one file in the page cache. `bare gRPC` reads the file and streams the bytes
of each piece as they are, with neither protocol nor checks: it is what the transport allows. `agent` is AgentPeer
against AgentService; `agent, verified` also computes every window's checksum; `datanode` is DatanodePeer against
XceiverService. TCP sends with sendfile.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from benchmarks.measure import Report, Samples, interleaved
from dnagent.peer import AgentPeer, DatanodePeer
from dnagent.ports import AgentStatus, ByteRange, Peer, ReplicaHead, ScanReport
from dnagent.server import AgentService
from dnagent.wire import PIECE_BYTES_MAX
from merkle.checksum import ChecksumType, window_checksums
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.datanode import DatanodeClient, XceiverService
from ozone.disk import Disk
from ozone.ports import ReplicaSource
from runtime.rpc import Handler, UnaryStreamCall, open_channel, start_server

CHUNK_BYTES = 4 << 20
FILE_BYTES = 192 << 20
ROUNDS = 9
# Of what a bare stream of the same messages reaches.
BAR = 0.8
CONTAINER, BLOCK, PEER = ContainerId(1), BlockId(1), PeerId("bench")
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))


class OneFile:
    """A ReplicaSource of one block file; the scanner and the status of the service are never asked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._disk = Disk()

    def head(self, container_id: ContainerId) -> ReplicaHead:
        return ReplicaHead(ReplicaState.CLOSED)

    def tree_bytes(self, container_id: ContainerId, *, build_missing: bool) -> bytes:
        raise NotImplementedError

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        return None

    def records(self, container_id: ContainerId, start: BlockId | None, count: int) -> Sequence[BlockRecord]:
        return ()

    def read(self, container_id: ContainerId, block_id: BlockId, offset: int, length_bytes: int) -> bytes:
        return self._disk.read_at(self._path, offset, length_bytes)

    def scan(self, container_id: ContainerId, cancelled: Callable[[], bool]) -> ScanReport:
        raise NotImplementedError

    def schedule(self, container_id: ContainerId) -> None:
        raise NotImplementedError

    def status(self) -> AgentStatus:
        raise NotImplementedError


def serve_ours(path: Path, ready: Connection) -> None:
    one = OneFile(path)
    source: ReplicaSource = one
    server = start_server("127.0.0.1:0", [AgentService(source, one, one).register, XceiverService(source).register])
    ready.send(server.port)
    ready.recv()
    server.stop(0)


def serve_bare(path: Path, ready: Connection) -> None:
    fd = os.open(path, os.O_RDONLY)

    def pieces(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        start, length = (int(number) for number in request.split())
        for offset in range(start, start + length, PIECE_BYTES_MAX):
            yield os.pread(fd, min(PIECE_BYTES_MAX, start + length - offset), offset)

    server = grpc.server(ThreadPoolExecutor(8), options=_OPTIONS)
    handler: Handler = grpc.unary_stream_rpc_method_handler(pieces)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bare", {"Read": handler}),))
    ready.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    ready.recv()
    server.stop(0).wait()


def serve_tcp(path: Path, ready: Connection) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, path.open("rb") as file:
        ready.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            while request := connection.recv(64):
                start, length = (int(number) for number in request.split())
                position = start
                while position < start + length:
                    position += os.sendfile(connection.fileno(), file.fileno(), position, start + length - position)


def peer_reader(peer: Peer, *, verify: bool) -> Callable[[int], int]:
    def read(offset: int) -> int:
        chunk = ChunkRecord(offset, CHUNK_BYTES, ChecksumType.CRC32C, 16 << 10, ())
        size = 0
        for piece in peer.read(CONTAINER, BLOCK, chunk, [ByteRange(offset, CHUNK_BYTES)]):
            size += len(piece.data)
            if verify:
                window_checksums(piece.data, ChecksumType.CRC32C, 16 << 10)
        return size

    return read


def bare_reader(port: int) -> Callable[[int], int]:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
    call: UnaryStreamCall = channel.unary_stream("/bench.Bare/Read")
    return lambda offset: sum(len(raw) for raw in call(b"%d %d" % (offset, CHUNK_BYTES)))


def tcp_reader(port: int) -> Callable[[int], int]:
    connection, buffer = socket.create_connection(("127.0.0.1", port)), bytearray(1 << 20)

    def read(offset: int) -> int:
        connection.sendall(b"%d %d" % (offset, CHUNK_BYTES))
        left = CHUNK_BYTES
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        return CHUNK_BYTES

    return read


def main(as_json: bool) -> None:
    report = Report("transfer of a 192 MiB block file over loopback")
    with tempfile.TemporaryDirectory(prefix="treefold-bench-") as folder:
        path = Path(folder) / "1.block"
        path.write_bytes(os.urandom(FILE_BYTES))
        rates = _measure(path)
    bare = rates["bare gRPC"]
    report.add("agent", "MB/s", rates["agent"], bare, BAR)
    for name in ("agent, verified", "datanode", "plain TCP, sendfile"):
        report.add(name, "MB/s", rates[name], bare)
    report.show(as_json=as_json)


def _measure(path: Path) -> dict[str, Samples]:
    context, stops, ports = multiprocessing.get_context("spawn"), [], []
    for serve in (serve_ours, serve_bare, serve_tcp):
        here, there = context.Pipe()
        context.Process(target=serve, args=(path, there), daemon=True).start()
        ports.append(here.recv())
        stops.append(here)
    ours, bare, tcp = ports
    address = f"127.0.0.1:{ours}"
    agent = AgentPeer(PEER, open_channel(address), address)
    datanode = DatanodePeer(PEER, DatanodeClient(open_channel(address), address))
    readers = {
        "plain TCP, sendfile": tcp_reader(tcp),
        "bare gRPC": bare_reader(bare),
        "agent": peer_reader(agent, verify=False),
        "agent, verified": peer_reader(agent, verify=True),
        "datanode": peer_reader(datanode, verify=False),
    }

    def whole(read: Callable[[int], int]) -> None:
        assert sum(map(read, range(0, FILE_BYTES, CHUNK_BYTES))) == FILE_BYTES

    rates = interleaved(FILE_BYTES / 1e6, {name: partial(whole, read) for name, read in readers.items()}, rounds=ROUNDS)
    agent.close()
    datanode.close()
    for stop in stops[:2]:
        stop.send(None)
    return rates


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
