"""The speed of fetching data from a peer: ReadWindows compared with a bare gRPC stream
and with plain TCP.

    python -m benchmarks.bench_transfer [--json]

Each server runs in its own process and serves one block file from the page cache; ours
is an agent. `bare gRPC` streams the file's bytes in messages of the same size, without
protocol or checks, which is the limit of the transport. `agent` is AgentPeer with
AgentService; `agent, verified` also verifies the checksum of every window. `datanode`
is DatanodePeer with XceiverService. TCP uses sendfile.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import grpc

from benchmarks.containers import CHUNK_BYTES, held, new_volume, serve_agent, write_container
from benchmarks.measure import Report, Samples, interleaved
from merkle.checksum import ChecksumType, window_checksums
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from repair.peers import AgentPeer, DatanodePeer
from repair.ports import Peer
from repair.wire import PIECE_BYTES_MAX
from runtime.rpc import Handler, UnaryStreamCall, open_channel

CHUNKS = 48
FILE_BYTES = CHUNKS * CHUNK_BYTES
ROUNDS = 9
# The least ratio to a bare gRPC stream.
BAR = 0.8
CONTAINER, BLOCK = ContainerId(1), BlockId(1)
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


def write_block(volume: Path, state_folder: Path) -> tuple[Path, BlockRecord]:
    """Write a container of one block; returns its file and its record."""
    with held(volume, state_folder) as (opened, writer):
        (record,) = write_container(
            writer, CONTAINER, blocks=1, chunks=CHUNKS, checksum_type=ChecksumType.CRC32C
        )
        return opened.containers.get(CONTAINER).block_path(BLOCK), record


def serve_bare(path: Path, ready: Connection) -> None:
    fd = os.open(path, os.O_RDONLY)

    def pieces(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        start, length = (int(number) for number in request.split())
        for offset in range(start, start + length, PIECE_BYTES_MAX):
            yield os.pread(fd, min(PIECE_BYTES_MAX, start + length - offset), offset)

    server = grpc.server(ThreadPoolExecutor(8), options=_OPTIONS)
    handler: Handler = grpc.unary_stream_rpc_method_handler(pieces)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench.Bare", {"Read": handler}),)
    )
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
                    position += os.sendfile(
                        connection.fileno(), file.fileno(), position, start + length - position
                    )


def peer_reader(peer: Peer, record: BlockRecord, *, verify: bool) -> Callable[[int], int]:
    def read(offset: int) -> int:
        chunk = record.by_offset[offset]
        size, entries = 0, b""
        for piece in peer.read(CONTAINER, BLOCK, chunk, [ByteRange(offset, CHUNK_BYTES)]):
            size += len(piece.data)
            if verify:
                entries += window_checksums(
                    piece.data, chunk.checksum_type, chunk.bytes_per_checksum
                )
        assert not verify or entries == chunk.entries
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
        rates = _measure(Path(folder))
    bare = rates["bare gRPC"]
    report.add("agent", "MB/s", rates["agent"], bare, BAR)
    for name in ("agent, verified", "datanode", "plain TCP, sendfile"):
        report.add(name, "MB/s", rates[name], bare)
    report.show(as_json=as_json)


def _measure(root: Path) -> dict[str, Samples]:
    volume, state = new_volume(root / "volume1", 1), root / "state"
    context = multiprocessing.get_context("spawn")
    # In another process: after freeing large pieces, a process allocates faster, which
    # would distort the measurement here.
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        path, record = pool.submit(write_block, volume, state).result()

    def start(serve: Callable[..., None], *arguments: Path) -> tuple[Connection, SpawnProcess]:
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(*arguments, there), daemon=True)
        process.start()
        return here, process

    ours, bare, tcp = servers = (
        start(serve_agent, volume, state),
        start(serve_bare, path),
        start(serve_tcp, path),
    )
    datanode_id, address = ours[0].recv()
    agent = AgentPeer(datanode_id, open_channel(address), address)
    datanode = DatanodePeer(datanode_id, DatanodeClient(open_channel(address), address))
    readers = {
        "plain TCP, sendfile": tcp_reader(tcp[0].recv()),
        "bare gRPC": bare_reader(bare[0].recv()),
        "agent": peer_reader(agent, record, verify=False),
        "agent, verified": peer_reader(agent, record, verify=True),
        "datanode": peer_reader(datanode, record, verify=False),
    }

    def whole(read: Callable[[int], int]) -> None:
        assert sum(map(read, range(0, FILE_BYTES, CHUNK_BYTES))) == FILE_BYTES

    rates = interleaved(
        FILE_BYTES / 1e6,
        {name: partial(whole, read) for name, read in readers.items()},
        rounds=ROUNDS,
    )
    agent.close()
    datanode.close()
    for control, process in servers[:2]:
        control.send(None)
        process.join()
    return rates


if __name__ == "__main__":
    main("--json" in sys.argv[1:])
