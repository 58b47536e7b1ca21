"""Ozone's datanode protocol, XceiverClientProtocolService: a server for reads.

The protocol has one method, a stream of requests that are answered in order. An error
is a response with a result other than SUCCESS. As in Ozone, an invalid request ends the
stream with UNKNOWN; requests sent after it are lost.

Real datanodes trust what we serve. Data go out in pieces of exactly `bytesPerChecksum`,
since other sizes hang Ozone's checksum loop.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import grpc
from google.protobuf.message import DecodeError

from merkle.errors import ReconcileError, RecordInvalidError
from merkle.limits import BLOCK_BYTES_MAX, MESSAGE_BYTES_MAX
from merkle.record import BlockRecord
from merkle.tree import BlockId, ContainerId
from ozone.errors import BlockNotFoundError, ContainerNotFoundError, DescriptorError
from ozone.ports import ReplicaHead, ReplicaSource
from ozone.site import SECURED_HINT, carries_token
from protos.convert import record_to_proto
from protos.ozone_datanode_pb2 import (
    NONE,
    ChunkInfo,
    ContainerCommandRequestProto,
    ContainerCommandResponseProto,
    DatanodeBlockID,
    Echo,
    EchoRequestProto,
    GetBlock,
    GetContainerChecksumInfo,
    ListBlock,
    ListBlockRequestProto,
    ReadChunk,
    ReadChunkRequestProto,
    ReadChunkVersion,
    Result,
    Type,
)
from runtime.errors import (
    DatabaseError,
    DiskError,
)
from runtime.read_limits import ReadLimits
from runtime.rpc import Handler

SERVICE = "hadoop.hdds.datanode.XceiverClientProtocolService"
# The size of the pieces of a response without windows.
_PIECE_BYTES = 1 << 20
# Bounds the pieces that a request with tiny windows can cause: windows are 512 bytes or
# more.
_PIECES_MAX = 65_536
# Space in a message for everything but its payload.
ENVELOPE_BYTES = 64 << 10
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - ENVELOPE_BYTES
_ROWS_PER_READ = 1000
# The field of a request, and of its response, by command.
BODIES = {
    GetContainerChecksumInfo: "getContainerChecksumInfo",
    GetBlock: "getBlock",
    ListBlock: "listBlock",
    ReadChunk: "readChunk",
    Echo: "echo",
}
Request = ContainerCommandRequestProto
Response = ContainerCommandResponseProto


class XceiverService:
    """Serves the replicas of a ReplicaSource."""

    def __init__(
        self,
        source: ReplicaSource,
        on_token: Callable[[], None] = lambda: None,
        *,
        limits: ReadLimits | None = None,
    ) -> None:
        """`on_token` is called for each request with a token of a secured cluster.
        `limits` are those of reads of chunks; by default there are none.
        """
        self._source, self._on_token, self._limits = source, on_token, limits

    def register(self, server: grpc.Server) -> None:
        """Add the service to a server."""
        # Requests arrive as bytes: an invalid one must end its stream as in Ozone.
        handler: Handler = grpc.stream_stream_rpc_method_handler(
            self._serve, None, Response.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"send": handler}),)
        )

    def _serve(
        self, requests: Iterable[bytes], context: grpc.ServicerContext
    ) -> Iterator[Response]:
        for raw in requests:
            request = _parse_request(raw)
            if request is None:
                context.abort(grpc.StatusCode.UNKNOWN, "Application error processing RPC")
            elif self._limits and request.cmdType == Type.ReadChunk:
                length = min(request.readChunk.chunkData.len, MESSAGE_BYTES_MAX)
                with self._limits.admitted(context, length):
                    yield self.answer(request)
            else:
                yield self.answer(request)

    def answer(self, request: Request) -> Response:
        """The response to one request; errors become responses too."""
        reply = Response(cmdType=request.cmdType, traceID=request.traceID, result=Result.SUCCESS)
        try:
            self._fill(reply, request)
        except _RefusalError as refusal:
            result, message = refusal.result, refusal.message
        except ContainerNotFoundError:
            result, message = (
                Result.CONTAINER_NOT_FOUND,
                f"ContainerID {request.containerID} does not exist",
            )
        except BlockNotFoundError as error:
            result, message = Result.UNABLE_TO_FIND_CHUNK, error.message
        except DatabaseError as error:
            result, message = Result.UNABLE_TO_READ_METADATA_DB, error.message
        except (DiskError, DescriptorError, RecordInvalidError) as error:
            result, message = Result.IO_EXCEPTION, error.message
        except ReconcileError as error:
            result, message = Result.CONTAINER_INTERNAL_ERROR, error.message
        else:
            return reply
        return Response(
            cmdType=request.cmdType, traceID=request.traceID, result=result, message=message
        )

    def _fill(self, reply: Response, request: Request) -> None:
        body = BODIES.get(request.cmdType)
        if body is None:
            name = Type.Name(request.cmdType)
            raise _RefusalError(
                Result.UNSUPPORTED_REQUEST, f"{name} is not supported: this peer is read-only"
            )
        if carries_token(request.encodedToken):
            self._on_token()
            raise _RefusalError(Result.BLOCK_TOKEN_VERIFICATION_FAILED, SECURED_HINT)
        container_id = ContainerId(request.containerID)
        head = self._source.head(container_id)
        if not request.HasField(body):
            raise _RefusalError(Result.MALFORMED_REQUEST, "Cmd type does not match the payload.")
        match request.cmdType:
            case Type.GetContainerChecksumInfo:
                self._fill_tree(reply, container_id, head)
            case Type.GetBlock:
                self._fill_block(reply, container_id, head, request.getBlock.blockID)
            case Type.ListBlock:
                self._fill_list(reply, container_id, request.listBlock)
            case Type.ReadChunk:
                self._fill_chunk(reply, container_id, head, request.readChunk)
            case _:
                _fill_echo(reply, request.echo)

    def _fill_tree(self, reply: Response, container_id: ContainerId, head: ReplicaHead) -> None:
        if not head.state.is_closed:
            text = (
                f"Checksum information is not available for containers in state {head.state.value}"
            )
            raise _RefusalError(Result.UNCLOSED_CONTAINER_IO, text)
        raw = self._source.tree_bytes(container_id, build_missing=True)
        if len(raw) > _PAYLOAD_BYTES_MAX:
            raise _RefusalError(
                Result.CONTAINER_INTERNAL_ERROR,
                f"the tree of {len(raw)} bytes does not fit a message",
            )
        reply.getContainerChecksumInfo.containerID = container_id
        reply.getContainerChecksumInfo.containerChecksumInfo = raw

    def _fill_block(
        self, reply: Response, container_id: ContainerId, head: ReplicaHead, query: DatanodeBlockID
    ) -> None:
        _check_commit(query, head)
        if head.replica_index and query.replicaIndex and query.replicaIndex != head.replica_index:
            text = (
                f"ContainerID {container_id} has replica index {head.replica_index}, not"
                f" {query.replicaIndex}"
            )
            raise _RefusalError(Result.CONTAINER_NOT_FOUND, text)
        record = self._source.record(container_id, BlockId(query.localID))
        if record is None:
            raise _RefusalError(Result.NO_SUCH_BLOCK, f"Unable to find the block. {query.localID}")
        if query.blockCommitSequenceId > record.bcs_id:
            text = (
                f"block {query.localID} has bcsId {record.bcs_id}, requested was"
                f" {query.blockCommitSequenceId}"
            )
            raise _RefusalError(Result.BCSID_MISMATCH, text)
        reply.getBlock.blockData.CopyFrom(record_to_proto(record))

    def _fill_list(
        self, reply: Response, container_id: ContainerId, query: ListBlockRequestProto
    ) -> None:
        if query.count == 0:
            raise _RefusalError(Result.CONTAINER_INTERNAL_ERROR, "Count must be a positive number.")
        start = BlockId(query.startLocalID) if query.HasField("startLocalID") else None
        size = 0
        for record in islice(_iterate_records(self._source, container_id, start), query.count):
            row = record_to_proto(record)
            size += row.ByteSize()
            # A shortened response would look like the end of the list.
            if size > _PAYLOAD_BYTES_MAX:
                raise _RefusalError(
                    Result.CONTAINER_INTERNAL_ERROR, f"{query.count} blocks do not fit a message"
                )
            reply.listBlock.blockData.append(row)
        reply.listBlock.SetInParent()

    def _fill_chunk(
        self,
        reply: Response,
        container_id: ContainerId,
        head: ReplicaHead,
        query: ReadChunkRequestProto,
    ) -> None:
        _check_commit(query.blockID, head)
        chunk = query.chunkData
        if chunk.len > MESSAGE_BYTES_MAX:
            raise _RefusalError(
                Result.UNSUPPORTED_REQUEST, f"Oversize read. max: {MESSAGE_BYTES_MAX}"
            )
        if chunk.len > _PAYLOAD_BYTES_MAX:
            raise _RefusalError(
                Result.UNSUPPORTED_REQUEST, f"Oversize read. {chunk.len} bytes do not fit a message"
            )
        data = b""
        if chunk.len:
            # Bounded, since an offset beyond any block may not even be a valid file
            # offset.
            offset, block_id = min(chunk.offset, BLOCK_BYTES_MAX), BlockId(query.blockID.localID)
            data = self._source.read(container_id, block_id, offset, chunk.len)
            if len(data) != chunk.len:
                text = f"Unexpected read size. expected: {chunk.len}, actual: {len(data) or -1}"
                raise _RefusalError(Result.CONTAINER_INTERNAL_ERROR, text)
        answer = reply.readChunk
        answer.blockID.CopyFrom(query.blockID)
        answer.chunkData.CopyFrom(chunk)
        if query.readChunkVersion == ReadChunkVersion.V1:
            step = _piece_bytes(chunk)
            answer.dataBuffers.buffers.extend(
                data[i : i + step] for i in range(0, len(data) or 1, step)
            )
        else:
            answer.data = data


def _iterate_records(
    source: ReplicaSource, container_id: ContainerId, start: BlockId | None
) -> Iterator[BlockRecord]:
    """All records from `start`, page by page; raises as `ReplicaSource.records`."""
    page = source.records(container_id, start, _ROWS_PER_READ)
    while page:
        yield from page
        if len(page) < 2:
            return
        last = page[-1].block_id
        page = [
            record
            for record in source.records(container_id, last, _ROWS_PER_READ)
            if record.block_id != last
        ]


class _RefusalError(Exception):
    """Ends a request with this result and message."""

    def __init__(self, result: Result, message: str) -> None:
        super().__init__(message)
        self.result = result
        self.message = message


def _parse_request(raw: bytes) -> Request | None:
    try:
        request = Request.FromString(raw)
    except DecodeError:
        return None
    # The parser accepts requests without their required fields; `answer` would fail on
    # them.
    return request if request.IsInitialized() else None


def _check_commit(query: DatanodeBlockID, head: ReplicaHead) -> None:
    if query.blockCommitSequenceId > head.bcs_id:
        text = (
            f"Unable to find the block with bcsID {query.blockCommitSequenceId}. Container bcsId is"
            f" {head.bcs_id}."
        )
        raise _RefusalError(Result.UNKNOWN_BCSID, text)


def _fill_echo(reply: Response, query: EchoRequestProto) -> None:
    # Without the sleep of Ozone's echo, which would let a client block our threads.
    if query.payloadSizeResp > _PAYLOAD_BYTES_MAX:
        raise _RefusalError(Result.UNSUPPORTED_REQUEST, f"Oversize echo. max: {_PAYLOAD_BYTES_MAX}")
    reply.echo.payload = os.urandom(max(query.payloadSizeResp, 0))


def _piece_bytes(chunk: ChunkInfo) -> int:
    """The size of the pieces of a response: a window, or all of the data if there would
    be too many pieces.
    """
    step = chunk.checksumData.bytesPerChecksum
    if chunk.checksumData.type == NONE:
        step = _PIECE_BYTES
    return step if step and chunk.len // step < _PIECES_MAX else max(chunk.len, 1)
