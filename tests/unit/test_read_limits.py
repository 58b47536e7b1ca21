"""What an agent beside a live datanode reads for its callers: at its own rate, and for
each of them only so much that it has not taken.
"""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest

from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from ozone.datanode import SERVICE, XceiverService
from protos.agent_pb2 import ReadWindowsRequest
from protos.ozone_datanode_pb2 import (
    ChecksumData,
    ChunkInfo,
    ContainerCommandRequestProto,
    DatanodeBlockID,
    ReadChunk,
    ReadChunkRequestProto,
)
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import RateLimiter, SystemClock
from runtime.read_limits import ReadLimits
from runtime.rpc import StreamCall, start_server
from tests.support.peers import MemoryScans, MemorySource, MemoryStatus, replica_of
from tests.support.waiting import wait_until

NUMBER, BLOCK = ContainerId(1), BlockId(20)
MIB = 1 << 20


@dataclass
class Call:
    """A call of a client, as gRPC shows it to a service."""

    host: str
    ended: threading.Event = field(default_factory=threading.Event)

    def peer(self) -> str:
        # A port is new each time.
        return f"ipv4:{self.host}:{id(self) % 50_000}"

    def is_active(self) -> bool:
        return not self.ended.is_set()


def shown(call: Call) -> grpc.ServicerContext:
    """The call as what it stands for; nothing else of it is asked."""
    return cast(grpc.ServicerContext, call)


@dataclass
class VirtualClock:
    """Time that passes only while somebody waits."""

    now_s: float = 0.0

    def now_ms(self) -> int:
        return round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        return False


class CountingSource(MemorySource):
    """Counts the bytes that were read of blocks, and the reads at once."""

    read_bytes = at_once = at_once_max = 0
    lock = threading.Lock()

    def read(self, container_id: ContainerId, block_id: BlockId, offset: int, length: int) -> bytes:
        with self.lock:
            self.read_bytes += length
            self.at_once += 1
            self.at_once_max = max(self.at_once_max, self.at_once)
        # As a disk, which lets others in meanwhile.
        threading.Event().wait(0.01)
        with self.lock:
            self.at_once -= 1
        return super().read(container_id, block_id, offset, length)


@pytest.fixture
def source() -> CountingSource:
    return CountingSource(replica_of(NUMBER, {BLOCK: 8 * MIB}, chunk_bytes=4 * MIB))


def limits(client_bytes_max: int, rate: int = 0) -> ReadLimits:
    limiter = RateLimiter(rate, SystemClock(), threading.Event().wait)
    return ReadLimits(limiter, client_bytes_max)


def service(source: MemorySource, found: ReadLimits) -> AgentService:
    status = MemoryStatus(AgentStatus(PeerId("dn"), repair_enabled=False))
    return AgentService(source, MemoryScans(source), status, limits=found)


def windows(agent: AgentService, call: Call) -> Generator[bytes, None, None]:
    """A read of all of the block, in pieces of 1 MiB."""
    request = ReadWindowsRequest(container_id=NUMBER, block_id=BLOCK)
    request.ranges.add(offset=0, length_bytes=8 * MIB)
    found = agent.windows(request, shown(call))
    assert isinstance(found, Generator)
    return found


def test_greedy_clients_that_take_nothing_have_only_their_share_under_way(
    source: CountingSource,
) -> None:
    """Two hosts with eight reads each, of which none takes more than a first piece; a
    third one is served in full meanwhile.
    """
    agent = service(source, limits(2 * MIB))
    reads = [windows(agent, Call(f"10.0.0.{host}")) for host in (1, 2) for _ in range(8)]
    with ThreadPoolExecutor(16) as pool:
        begun = [pool.submit(next, read, b"") for read in reads]
        wait_until(lambda: sum(one.done() for one in begun) == 4, "the shares to be full")
        assert source.read_bytes == 4 * MIB
        assert sum(map(len, windows(agent, Call("10.0.0.3")))) > 8 * MIB
        assert source.read_bytes == 12 * MIB
        # Each read that ends makes room for the next one of its host.
        left = list(zip(reads, begun, strict=True))

        def have_ended() -> bool:
            for read, one in [pair for pair in left if pair[1].done()]:
                read.close()
                left.remove((read, one))
            return not left

        wait_until(have_ended, "each read to have had its turn")
    assert source.read_bytes == (12 + 12) * MIB


def test_a_call_that_ends_before_its_turn_reads_nothing(source: CountingSource) -> None:
    agent = service(source, limits(MIB))
    first, second = Call("10.0.0.1"), Call("10.0.0.1")
    held = windows(agent, first)
    next(held)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, windows(agent, second))
        second.ended.set()
        with pytest.raises(OperationInterruptedError):
            waiting.result(10)
    assert source.read_bytes == MIB


def test_a_read_above_the_limit_is_served_alone() -> None:
    found, call = limits(MIB), Call("10.0.0.1")
    entered = threading.Event()

    def read_more() -> None:
        with found.admitted(shown(call), 1):
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with found.admitted(shown(call), 4 * MIB):
            pool.submit(read_more)
            assert not entered.wait(0.3)
        assert entered.wait(10)


def test_all_clients_together_stay_below_the_rate(source: CountingSource) -> None:
    clock = VirtualClock()
    found = ReadLimits(RateLimiter(2 * MIB, clock, clock.wait), 8 * MIB)
    agent = service(source, found)
    reads = [windows(agent, Call(f"10.0.0.{host}")) for host in (1, 2, 3)]
    for pieces in zip(*reads, strict=True):
        assert len(pieces) == 3
    assert source.read_bytes == 24 * MIB
    assert 12 <= clock.now_s < 12.5


def chunk_request(length: int) -> bytes:
    sums = ChecksumData(type="CRC32C", bytesPerChecksum=16384)
    chunk = ChunkInfo(chunkName="c", offset=0, len=length, checksumData=sums)
    block = DatanodeBlockID(containerID=NUMBER, localID=BLOCK)
    body = ReadChunkRequestProto(blockID=block, chunkData=chunk, readChunkVersion="V1")
    return ContainerCommandRequestProto(
        cmdType=ReadChunk, containerID=NUMBER, datanodeUuid="x", readChunk=body
    ).SerializeToString()


def test_datanodes_that_read_chunks_have_a_share_too(source: CountingSource) -> None:
    """Over real sockets: of one host's chunks only one fits its share at a time."""
    server = start_server(
        "127.0.0.1:0", [XceiverService(source, limits=limits(2 * MIB)).register], threads=8
    )
    try:
        with grpc.insecure_channel(server.address) as channel:
            send: StreamCall = channel.stream_stream(f"/{SERVICE}/send")
            calls = [send(iter([chunk_request(2 * MIB)] * 2), timeout=60) for _ in range(4)]
            # One that takes no answer gives its place back when it ends.
            calls[0].cancel()
            # Side by side: any may be admitted first, and keeps the share until it is
            # read.
            with ThreadPoolExecutor(3) as pool:
                read = pool.map(lambda call: [len(one) > 2 * MIB for one in call], calls[1:])
                assert list(read) == [[True, True]] * 3
            assert [len(one) > MIB for one in send(iter([chunk_request(MIB)]), timeout=60)] == [
                True
            ]
    finally:
        server.stop(0)
    assert source.at_once_max == 1
