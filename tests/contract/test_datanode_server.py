"""Ozone's datanode service, served by us, answers as a real datanode does: rows wire-I1
to wire-I7 and what was seen live. Requests go over a real socket, as a datanode sends
them.
"""

from collections.abc import Iterator, Sequence

import grpc
import pytest

from merkle.checksum import ChecksumType
from merkle.columns import encode_tree
from merkle.errors import RecordInvalidError
from merkle.record import BlockRecord
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from ozone.datanode import SERVICE, XceiverService
from ozone.datanode_client import DatanodeClient
from protos.convert import chunk_to_proto, record_to_proto
from protos.ozone_datanode_pb2 import (
    ChecksumData,
    ChunkInfo,
    ContainerCommandRequestProto,
    ContainerCommandResponseProto,
    DatanodeBlockID,
    EchoRequestProto,
    GetBlockRequestProto,
    GetContainerChecksumInfoRequestProto,
    ListBlockRequestProto,
    ReadChunkRequestProto,
    ReadChunkVersion,
    Result,
    Type,
)
from runtime.errors import DatabaseError, DiskError, PeerRefusedError
from runtime.rpc import RpcServer, StreamCall, open_channel, start_server
from tests.support.peers import MemoryReplica, MemorySource, replica_of

CONTAINER = ContainerId(100)
BLOCK = BlockId(20)
UUID = "7f541a06-6c26-476d-9994-c6e1947e11cb"

Request = ContainerCommandRequestProto
Response = ContainerCommandResponseProto


@pytest.fixture
def source() -> MemorySource:
    return MemorySource(replica_of(CONTAINER, {9: 5000, 20: 50_000, 100: 5000}))


@pytest.fixture
def replica(source: MemorySource) -> MemoryReplica:
    return source.replicas[CONTAINER]


@pytest.fixture
def server(source: MemorySource) -> Iterator[RpcServer]:
    running = start_server("127.0.0.1:0", [XceiverService(source).register])
    yield running
    running.stop(0)


@pytest.fixture
def channel(server: RpcServer) -> Iterator[grpc.Channel]:
    with open_channel(server.address) as opened:
        yield opened


def send(channel: grpc.Channel, *raws: bytes) -> list[Response]:
    """Send these on one stream, half-close, and take all answers."""
    call: StreamCall = channel.stream_stream(f"/{SERVICE}/send", None, Response.FromString)
    return list(call(iter(raws), timeout=20))


def ask(channel: grpc.Channel, request: Request) -> Response:
    (reply,) = send(channel, request.SerializeToString())
    assert reply.cmdType == request.cmdType
    assert reply.HasField("traceID")
    return reply


def envelope(kind: Type, container_id: int = CONTAINER, **body: object) -> Request:
    request = Request(
        cmdType=kind, containerID=container_id, datanodeUuid=UUID, traceID="", version=3
    )
    for name, value in body.items():
        getattr(request, name).CopyFrom(value)
    return request


def checksum_info(container_id: int = CONTAINER, inner_id: int = CONTAINER) -> Request:
    body = GetContainerChecksumInfoRequestProto(containerID=inner_id)
    return envelope(Type.GetContainerChecksumInfo, container_id, getContainerChecksumInfo=body)


def get_block(
    block_id: int = BLOCK, bcs_id: int = 0, inner_id: int = CONTAINER, replica_index: int = 0
) -> Request:
    asked = DatanodeBlockID(containerID=inner_id, localID=block_id, blockCommitSequenceId=bcs_id)
    if replica_index:
        asked.replicaIndex = replica_index
    return envelope(Type.GetBlock, getBlock=GetBlockRequestProto(blockID=asked))


def list_block(count: int, start: int | None = None) -> Request:
    return envelope(
        Type.ListBlock, listBlock=ListBlockRequestProto(count=count, startLocalID=start)
    )


def read_chunk(
    offset: int = 0,
    length: int = 16384,
    version: ReadChunkVersion | None = ReadChunkVersion.V1,
    block_id: int = BLOCK,
    bytes_per_checksum: int = 4096,
    kind: str = "CRC32C",
    bcs_id: int = 0,
) -> Request:
    sums = ChecksumData(type=kind, bytesPerChecksum=bytes_per_checksum, checksums=[b"echo"])
    body = ReadChunkRequestProto(
        blockID=DatanodeBlockID(
            containerID=CONTAINER, localID=block_id, blockCommitSequenceId=bcs_id
        ),
        chunkData=ChunkInfo(chunkName="any text", offset=offset, len=length, checksumData=sums),
    )
    if version is not None:
        body.readChunkVersion = version
    return envelope(Type.ReadChunk, readChunk=body)


def listed_ids(reply: Response) -> Sequence[int]:
    return [row.blockID.localID for row in reply.listBlock.blockData]


def refused(channel: grpc.Channel, request: Request, result: Result) -> str:
    """Assert that the request is answered with this result; return the message."""
    reply = ask(channel, request)
    assert Result.Name(reply.result) == Result.Name(result)
    return reply.message


@pytest.mark.parametrize(
    "state",
    [
        ReplicaState.OPEN,
        ReplicaState.CLOSING,
        ReplicaState.RECOVERING,
        ReplicaState.DELETED,
        ReplicaState.INVALID,
    ],
)
def test_no_tree_before_a_container_is_closed(
    channel: grpc.Channel, replica: MemoryReplica, state: ReplicaState
) -> None:
    """wire-I1."""
    replica.state = state
    message = refused(channel, checksum_info(), Result.UNCLOSED_CONTAINER_IO)
    assert message == f"Checksum information is not available for containers in state {state.value}"


@pytest.mark.parametrize(
    "state", [ReplicaState.CLOSED, ReplicaState.QUASI_CLOSED, ReplicaState.UNHEALTHY]
)
def test_closed_containers_serve_the_bytes_of_the_file(
    channel: grpc.Channel, replica: MemoryReplica, state: ReplicaState
) -> None:
    replica.state = state
    reply = ask(channel, checksum_info())
    assert reply.result == Result.SUCCESS
    assert reply.getContainerChecksumInfo.containerID == CONTAINER
    assert reply.getContainerChecksumInfo.containerChecksumInfo == replica.tree


@pytest.mark.parametrize(
    "request_",
    [checksum_info(404), envelope(Type.Echo, 0, echo=EchoRequestProto(payloadSizeResp=1))],
)
def test_an_unknown_container_is_not_found(channel: grpc.Channel, request_: Request) -> None:
    """wire-I2; Echo too needs a container that exists."""
    refused(channel, request_, Result.CONTAINER_NOT_FOUND)


def test_a_removed_tree_file_is_rebuilt_from_the_records(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    """wire-I3."""
    before, replica.tree = replica.tree, None
    assert ask(channel, checksum_info()).getContainerChecksumInfo.containerChecksumInfo == before


def test_an_unreadable_tree_file_is_an_error_and_not_rebuilt(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    """wire-I4."""
    replica.tree = DiskError("100.tree: permission denied")
    refused(channel, checksum_info(), Result.IO_EXCEPTION)


@pytest.mark.parametrize("raw", [b"\x01\x02\x03", b"", b"\xff" * 1000], ids=["I5", "I6", "garbage"])
def test_what_is_in_the_file_is_served_unparsed(
    channel: grpc.Channel, replica: MemoryReplica, raw: bytes
) -> None:
    """wire-I5, wire-I6: the server succeeds; what the client makes of it is in the
    contract of peers.
    """
    replica.tree = raw
    reply = ask(channel, checksum_info())
    assert reply.result == Result.SUCCESS
    assert reply.getContainerChecksumInfo.containerChecksumInfo == raw


def test_any_valid_tree_in_the_file_is_returned_unchanged(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    """wire-I7."""
    replica.tree = encode_tree(replica_of(CONTAINER, {1: 1, 2: 70_000}, seed=5).scanned_tree())
    assert (
        ask(channel, checksum_info()).getContainerChecksumInfo.containerChecksumInfo == replica.tree
    )


def test_the_container_of_the_envelope_counts(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    assert (
        ask(channel, checksum_info(inner_id=404)).getContainerChecksumInfo.containerID == CONTAINER
    )
    assert ask(channel, get_block(inner_id=404)).getBlock.blockData.blockID.containerID == CONTAINER


def test_a_tree_beyond_a_message_is_an_answer_and_not_a_broken_stream(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    replica.tree = bytes(33 << 20)
    refused(channel, checksum_info(), Result.CONTAINER_INTERNAL_ERROR)


def test_a_block_is_served_with_its_record_as_stored(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    """The size is always set: real datanodes refuse a record without."""
    found = ask(channel, get_block()).getBlock.blockData
    assert found == record_to_proto(replica.records[BLOCK])
    assert found.size == 50_000
    assert [(entry.key, entry.value) for entry in found.metadata] == [("TYPE", "KEY")]


def test_an_unknown_block_is_told(channel: grpc.Channel) -> None:
    refused(channel, get_block(1), Result.NO_SUCH_BLOCK)


def test_a_commit_beyond_the_containers_is_unknown(channel: grpc.Channel) -> None:
    refused(channel, get_block(bcs_id=99), Result.UNKNOWN_BCSID)
    refused(channel, read_chunk(bcs_id=99), Result.UNKNOWN_BCSID)


def test_a_commit_beyond_the_blocks_does_not_match(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    replica.bcs_id = 50
    refused(channel, get_block(bcs_id=40), Result.BCSID_MISMATCH)


def test_another_replica_index_is_another_container(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    replica.replica_index = 2
    refused(channel, get_block(replica_index=3), Result.CONTAINER_NOT_FOUND)
    assert ask(channel, get_block(replica_index=2)).result == Result.SUCCESS


def test_blocks_are_listed_in_the_order_of_their_keys(channel: grpc.Channel) -> None:
    """Keys are decimal text."""
    assert listed_ids(ask(channel, list_block(10))) == [100, 20, 9]
    assert listed_ids(ask(channel, list_block(2))) == [100, 20]


def test_a_listing_starts_at_a_block_that_exists(channel: grpc.Channel) -> None:
    assert listed_ids(ask(channel, list_block(10, start=20))) == [20, 9]
    reply = ask(channel, list_block(10, start=21))
    assert reply.result == Result.SUCCESS
    assert reply.HasField("listBlock")
    assert listed_ids(reply) == []


def test_a_count_of_nothing_is_refused(channel: grpc.Channel) -> None:
    message = refused(channel, list_block(0), Result.CONTAINER_INTERNAL_ERROR)
    assert message == "Count must be a positive number."


def test_a_long_list_is_read_in_pages_and_any_count_is_bounded(
    source: MemorySource, server: RpcServer
) -> None:
    source.replicas[CONTAINER] = replica_of(CONTAINER, dict.fromkeys(range(1, 2501), 1))
    client = DatanodeClient(open_channel(server.address), server.address)
    for page in (100, 1000, 4_000_000_000):
        ids = [record.block_id for record in client.list_records(CONTAINER, page)]
        assert sorted(ids) == list(range(1, 2501))
    client.close()


@pytest.mark.parametrize("version", [None, ReadChunkVersion.V0])
def test_without_a_version_data_come_in_one_piece(
    channel: grpc.Channel, replica: MemoryReplica, version: ReadChunkVersion | None
) -> None:
    answer = ask(channel, read_chunk(version=version)).readChunk
    assert answer.HasField("data")
    assert answer.data == replica.files[BLOCK][:16384]


@pytest.mark.parametrize(
    ("kind", "bytes_per_checksum", "length", "sizes"),
    [
        ("CRC32C", 4096, 16384, [4096] * 4),
        ("CRC32", 4096, 10_000, [4096, 4096, 1808]),
        ("CRC32C", 0, 10_000, [10_000]),
        ("CRC32C", 1 << 20, 10_000, [10_000]),
        ("NONE", 4096, 10_000, [10_000]),
        ("SHA256", 4096, 0, [0]),
    ],
)
def test_pieces_are_windows(
    channel: grpc.Channel,
    replica: MemoryReplica,
    kind: str,
    bytes_per_checksum: int,
    length: int,
    sizes: list[int],
) -> None:
    """Other sizes hang a real datanode that reads from us."""
    request = read_chunk(length=length, kind=kind, bytes_per_checksum=bytes_per_checksum)
    buffers = ask(channel, request).readChunk.dataBuffers.buffers
    assert [len(part) for part in buffers] == sizes
    assert b"".join(buffers) == replica.files[BLOCK][:length]


def test_without_checksums_pieces_are_of_one_mebibyte(
    source: MemorySource, channel: grpc.Channel
) -> None:
    source.replicas[CONTAINER] = replica_of(
        CONTAINER, {20: 2_500_000}, checksum_type=ChecksumType.NONE
    )
    buffers = ask(channel, read_chunk(length=2_500_000, kind="NONE")).readChunk.dataBuffers.buffers
    assert [len(part) for part in buffers] == [1 << 20, 1 << 20, 2_500_000 - (2 << 20)]


def test_tiny_windows_do_not_multiply_pieces(source: MemorySource, channel: grpc.Channel) -> None:
    source.replicas[CONTAINER] = replica_of(CONTAINER, {20: 500_000}, window_bytes=1 << 20)
    request = read_chunk(length=500_000, bytes_per_checksum=1)
    assert [len(part) for part in ask(channel, request).readChunk.dataBuffers.buffers] == [500_000]


def test_any_range_is_served_exactly(channel: grpc.Channel, replica: MemoryReplica) -> None:
    """Unaligned, and across chunks."""
    buffers = ask(channel, read_chunk(offset=16_001, length=20_003)).readChunk.dataBuffers.buffers
    assert b"".join(buffers) == replica.files[BLOCK][16_001:36_004]


def test_the_answer_bears_the_requests_chunk_and_block(
    channel: grpc.Channel, replica: MemoryReplica
) -> None:
    request = read_chunk()
    reply = ask(channel, request).readChunk
    assert reply.chunkData == request.readChunk.chunkData
    assert reply.blockID == request.readChunk.blockID
    assert reply.chunkData != chunk_to_proto(replica.records[BLOCK].chunks[0])


@pytest.mark.parametrize(
    ("offset", "length", "actual"),
    [(49_997, 100, 3), (50_000, 100, -1), (60_000, 1, -1), (2**63, 1, -1)],
)
def test_a_read_beyond_the_end_tells_how_much_there_is(
    channel: grpc.Channel, offset: int, length: int, actual: int
) -> None:
    message = refused(channel, read_chunk(offset, length), Result.CONTAINER_INTERNAL_ERROR)
    assert message == f"Unexpected read size. expected: {length}, actual: {actual}"


@pytest.mark.parametrize("length", [33 << 20, 2**63])
def test_an_oversize_read_is_refused(channel: grpc.Channel, length: int) -> None:
    message = refused(channel, read_chunk(length=length), Result.UNSUPPORTED_REQUEST)
    assert message == "Oversize read. max: 33554432"


def test_a_block_without_file_has_no_chunks(channel: grpc.Channel, replica: MemoryReplica) -> None:
    del replica.files[BLOCK]
    refused(channel, read_chunk(), Result.UNABLE_TO_FIND_CHUNK)
    refused(channel, read_chunk(block_id=404), Result.UNABLE_TO_FIND_CHUNK)


def test_a_corrupt_chunk_is_served_as_it_is(channel: grpc.Channel, replica: MemoryReplica) -> None:
    replica.flip(BLOCK, 0)
    assert (
        b"".join(ask(channel, read_chunk()).readChunk.dataBuffers.buffers)
        == replica.files[BLOCK][:16384]
    )


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_an_echo_has_the_size_asked_for(server: RpcServer, size: int) -> None:
    client = DatanodeClient(open_channel(server.address), server.address)
    assert client.echo(CONTAINER, size) == size
    client.close()


def test_an_echo_beyond_a_message_is_refused(channel: grpc.Channel) -> None:
    refused(
        channel,
        envelope(Type.Echo, echo=EchoRequestProto(payloadSizeResp=2**31 - 1)),
        Result.UNSUPPORTED_REQUEST,
    )


_SERVED = {Type.GetContainerChecksumInfo, Type.GetBlock, Type.ListBlock, Type.ReadChunk, Type.Echo}


@pytest.mark.parametrize(
    "kind", sorted(set(Type.values()) - _SERVED), ids=lambda kind: Type.Name(kind)
)
def test_every_other_command_is_unsupported(channel: grpc.Channel, kind: Type) -> None:
    refused(channel, envelope(kind), Result.UNSUPPORTED_REQUEST)


@pytest.mark.parametrize("kind", sorted(_SERVED), ids=lambda kind: Type.Name(kind))
def test_a_command_without_its_body_is_malformed(channel: grpc.Channel, kind: Type) -> None:
    message = refused(channel, envelope(kind), Result.MALFORMED_REQUEST)
    assert message == "Cmd type does not match the payload."


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("no bytes", b""),
        ("garbage", b"\xff" * 100),
        ("no container", b"\x08\x17\x22\x00"),
        ("no datanode", b"\x08\x17\x18\x64"),
        ("unknown command", b"\x08\x63\x18\x64\x22\x00"),
        ("no chunk in the body", b"\x08\x0a\x18\x64\x22\x00\x82\x01\x06\x0a\x04\x08\x64\x10\x14"),
        ("cut short", checksum_info().SerializeToString()[:-1]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_request_ends_its_stream_and_nothing_else(
    channel: grpc.Channel, name: str, raw: bytes
) -> None:
    good = checksum_info().SerializeToString()
    call: StreamCall = channel.stream_stream(f"/{SERVICE}/send", None, Response.FromString)
    replies = call(iter([good, raw, good]), timeout=20)
    assert next(replies).result == Result.SUCCESS
    with pytest.raises(grpc.RpcError) as caught:
        next(replies)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert caught.value.details() == "Application error processing RPC"
    assert ask(channel, checksum_info()).result == Result.SUCCESS


@pytest.mark.parametrize("uuid", ["", "not ours"])
def test_the_datanodes_uuid_is_not_compared(channel: grpc.Channel, uuid: str) -> None:
    request = checksum_info()
    request.datanodeUuid = uuid
    assert ask(channel, request).result == Result.SUCCESS


def test_the_golden_request_is_understood(channel: grpc.Channel, replica: MemoryReplica) -> None:
    """The bytes that a Java client sends."""
    raw = bytes.fromhex(
        "0817120018642224" + b"7f541a06-6c26-476d-9994-c6e1947e11cb".hex() + "da01020864"
    )
    assert Request.FromString(raw).SerializeToString() == raw
    (reply,) = send(channel, raw)
    assert reply.getContainerChecksumInfo.containerChecksumInfo == replica.tree


def test_two_hundred_requests_on_one_stream_are_answered_in_order(channel: grpc.Channel) -> None:
    requests = [get_block(20 if i % 3 else 404) for i in range(200)]
    for i, request in enumerate(requests):
        request.traceID = f"trace-{i}"
    replies = send(channel, *(request.SerializeToString() for request in requests))
    assert [reply.traceID for reply in replies] == [request.traceID for request in requests]
    assert [reply.result == Result.SUCCESS for reply in replies] == [
        bool(i % 3) for i in range(200)
    ]


class FailingSource(MemorySource):
    """Fails to read a record in a way of its own."""

    def __init__(self, error: Exception) -> None:
        super().__init__(replica_of(CONTAINER, {20: 5000}))
        self._error = error

    def record(self, container_id: ContainerId, block_id: BlockId) -> BlockRecord | None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (DatabaseError("block_data cannot be read"), Result.UNABLE_TO_READ_METADATA_DB),
        (RecordInvalidError("block 20 has a negative size"), Result.IO_EXCEPTION),
        (DiskError("100.container: input/output error"), Result.IO_EXCEPTION),
    ],
)
def test_a_fault_of_our_own_is_an_answer(error: Exception, result: Result) -> None:
    reply = XceiverService(FailingSource(error)).answer(get_block())
    assert reply.result == result
    assert reply.message == str(error)


def test_a_request_of_a_secured_cluster_is_refused_by_name(channel: grpc.Channel) -> None:
    """An empty token, as Hadoop writes it, is none."""
    request = checksum_info()
    request.encodedToken = "AAAAAA=="
    assert ask(channel, request).result == Result.SUCCESS
    request.encodedToken = "CgNvem9uZRIDaW5k"
    text = refused(channel, request, Result.BLOCK_TOKEN_VERIFICATION_FAILED)
    assert text.startswith("Treefold does not support Kerberos, tokens")


def test_our_client_says_that_a_secured_datanode_is_not_supported() -> None:
    """It sends no tokens, which a datanode that wants them answers with result 41."""

    def answer(raws: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for raw in raws:
            reply = Response(
                cmdType=Request.FromString(raw).cmdType,
                result=Result.BLOCK_TOKEN_VERIFICATION_FAILED,
                message="Fail to find any token",
            )
            yield reply.SerializeToString()

    handlers = {"send": grpc.stream_stream_rpc_method_handler(answer)}
    handler = grpc.method_handlers_generic_handler(SERVICE, handlers)
    running = start_server("127.0.0.1:0", [lambda s: s.add_generic_rpc_handlers((handler,))])
    client = DatanodeClient(open_channel(running.address), running.address)
    with pytest.raises(PeerRefusedError, match="Fail to find any token") as caught:
        client.tree_bytes(ContainerId(1))
    assert caught.value.facts["result"] == "BLOCK_TOKEN_VERIFICATION_FAILED"
    assert caught.value.hint.startswith("Treefold does not support Kerberos, tokens")
    client.close()
    running.stop(0)


def test_our_client_names_the_result_that_it_got(server: RpcServer) -> None:
    client = DatanodeClient(open_channel(server.address), server.address)
    with pytest.raises(PeerRefusedError) as caught:
        client.tree_bytes(ContainerId(404))
    assert caught.value.facts["result"] == "CONTAINER_NOT_FOUND"
    client.close()
