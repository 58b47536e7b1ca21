"""Ozone's datanode protocol, XceiverClientProtocolService: a server and a client for
reads.

The protocol has one method, a stream of requests that are answered in order. An error
is a response with a result other than SUCCESS. As in Ozone, an invalid request ends the
stream with UNKNOWN; requests sent after it are lost.

Real datanodes trust what we serve. Data go out in pieces of exactly `bytesPerChecksum`,
since other sizes hang Ozone's checksum loop. A failed request makes a real datanode
scan the container, so our client requests only what it has reason to expect.
"""

import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from queue import SimpleQueue

import grpc
from google.protobuf.message import DecodeError

from merkle.errors import ReconcileError, RecordInvalidError
from merkle.limits import BLOCK_BYTES_MAX, MESSAGE_BYTES_MAX
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, ContainerId
from ozone.errors import BlockNotFoundError, ContainerNotFoundError, DescriptorError
from ozone.ports import ByteRange, ReplicaHead, ReplicaSource
from ozone.site import SECURED_HINT, carries_token
from protos.convert import record_from_proto, record_to_proto
from protos.ozone_datanode_pb2 import (
    NONE,
    ChecksumData,
    ChunkInfo,
    ContainerCommandRequestProto,
    ContainerCommandResponseProto,
    DatanodeBlockID,
    Echo,
    EchoRequestProto,
    GetBlock,
    GetBlockRequestProto,
    GetContainerChecksumInfo,
    GetContainerChecksumInfoRequestProto,
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
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from runtime.rpc import Deadlines, Handler, StreamCall, named_errors, printable

SERVICE = "hadoop.hdds.datanode.XceiverClientProtocolService"
# The client version of Ozone 2.2.
_CLIENT_VERSION = 3
# Requests in flight: four fill a real datanode's stream, sixteen are no faster.
_DEPTH = 4
# Of one ReadChunk: a usual chunk of 4 MiB then takes four requests in flight, which is
# half again as fast as one.
READ_BYTES_MAX = 1 << 20
# The size of the pieces of a response without windows.
_PIECE_BYTES = 1 << 20
# Bounds the pieces that a request with tiny windows can cause: windows are 512 bytes or
# more.
_PIECES_MAX = 65_536
# Space in a message for everything but its payload.
_ENVELOPE_BYTES = 64 << 10
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - _ENVELOPE_BYTES
_ROWS_PER_READ = 1000
_BODIES = {
    GetContainerChecksumInfo: "getContainerChecksumInfo",
    GetBlock: "getBlock",
    ListBlock: "listBlock",
    ReadChunk: "readChunk",
    Echo: "echo",
}
_ACTUAL = re.compile(r"actual: (\d{1,9})\b")

Request = ContainerCommandRequestProto
Response = ContainerCommandResponseProto
_Body = (
    GetContainerChecksumInfoRequestProto
    | GetBlockRequestProto
    | ListBlockRequestProto
    | ReadChunkRequestProto
    | EchoRequestProto
)


class XceiverService:
    """Serves the replicas of a ReplicaSource."""

    def __init__(self, source: ReplicaSource, on_token: Callable[[], None] = lambda: None) -> None:
        """`on_token` is called for each request with a token of a secured cluster."""
        self._source, self._on_token = source, on_token

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
        body = _BODIES.get(request.cmdType)
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


class DatanodeClient:
    """A client of one datanode.

    Each call opens its own stream on the shared connection, keeps up to _DEPTH requests
    in flight and ends within its deadline. A missing response, or a stream killed by an
    exception in the server, fails this call only.

    All methods may raise PeerUnavailableError, RemoteProtocolError and
    PeerRefusedError; the fact `result` of the last is the name of Ozone's result or of
    the gRPC status.
    """

    def __init__(
        self, channel: grpc.Channel, target: str, *, deadlines: Deadlines | None = None
    ) -> None:
        """The client owns `channel`; errors name the datanode `target`."""
        self._channel = channel
        self._target = target
        self._deadlines = deadlines or Deadlines()
        # Responses stay bytes until their size is checked.
        self._send: StreamCall = channel.stream_stream(
            f"/{SERVICE}/send", Request.SerializeToString, None
        )

    def tree_bytes(self, container_id: ContainerId) -> bytes:
        """The bytes of the tree file, unparsed; never empty.

        An empty tree file raises PeerRefusedError, as in Ozone's client (wire-I6).
        """
        body = GetContainerChecksumInfoRequestProto(containerID=container_id)
        request = self._request(container_id, GetContainerChecksumInfo, body)
        reply = self._one(request, self._deadlines.tree_s).getContainerChecksumInfo
        if reply.containerID != container_id:
            raise self._protocol_error(f"answered for container {reply.containerID}", container_id)
        if not reply.containerChecksumInfo:
            raise PeerRefusedError(f"{self._target}: its tree file is empty", result="IO_EXCEPTION")
        return reply.containerChecksumInfo

    def records(
        self, container_id: ContainerId, block_ids: Iterable[BlockId]
    ) -> Iterator[BlockRecord]:
        """The records of these blocks, in this order, without missing, unreadable and
        invalid ones.
        """
        wanted = list(block_ids)
        for start in range(0, len(wanted), _ROWS_PER_READ):
            requests = (
                self._request(
                    container_id, GetBlock, GetBlockRequestProto(blockID=_id(container_id, one))
                )
                for one in wanted[start : start + _ROWS_PER_READ]
            )
            for request, reply in self._exchange(requests, self._deadlines.records_s):
                if reply.result in _NO_RECORD:
                    continue
                self._check(reply)
                expected, found = request.getBlock.blockID, reply.getBlock.blockData.blockID
                if (found.containerID, found.localID) != (expected.containerID, expected.localID):
                    text = (
                        f"sent block {found.localID} of container {found.containerID} instead of"
                        f" {expected.localID}"
                    )
                    raise self._protocol_error(text, container_id)
                try:
                    yield record_from_proto(reply.getBlock.blockData)
                except RecordInvalidError:
                    # The peer's disk may be at fault: an invalid record counts as
                    # missing.
                    continue

    def list_records(
        self, container_id: ContainerId, page: int = _ROWS_PER_READ
    ) -> Iterator[BlockRecord]:
        """All records of a container in the datanode's order, requested page by page.

        Raises:
            RecordInvalidError: a record contradicts itself.
        """
        assert page > 1
        seen: set[BlockId] = set()
        body = ListBlockRequestProto(count=page)
        while True:
            request = self._request(container_id, ListBlock, body)
            rows = self._one(request, self._deadlines.records_s).listBlock.blockData
            if len(rows) > page:
                raise self._protocol_error(
                    f"sent {len(rows)} blocks, requested were {page}", container_id
                )
            fresh = [
                record for record in map(record_from_proto, rows) if record.block_id not in seen
            ]
            yield from fresh
            seen.update(record.block_id for record in fresh)
            if len(rows) < page or not fresh:
                return
            body = ListBlockRequestProto(count=page, startLocalID=rows[-1].blockID.localID)

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[tuple[ByteRange, Sequence[bytes]]]:
        """Yields each range with its bytes in pieces.

        If the file ends inside a range, the range is shortened; if the range cannot be
        read, there are no pieces.
        """
        waiting, deadline_s = ranges, self._deadlines.read(sum(r.length_bytes for r in ranges))
        while waiting:
            requests = (self._read_request(container_id, block_id, chunk, one) for one in waiting)
            shortened: list[ByteRange] = []
            for request, reply in self._exchange(requests, deadline_s):
                wanted = ByteRange(
                    request.readChunk.chunkData.offset, request.readChunk.chunkData.len
                )
                if reply.result == Result.CONTAINER_INTERNAL_ERROR:
                    actual = _ACTUAL.search(reply.message)
                    # Shortened once only, so that a datanode cannot cause endless
                    # requests.
                    if waiting is ranges and actual and 0 < int(actual[1]) < wanted.length_bytes:
                        shortened.append(ByteRange(wanted.offset, int(actual[1])))
                    else:
                        yield wanted, ()
                    continue
                self._check(reply)
                answer = reply.readChunk
                pieces = (
                    answer.dataBuffers.buffers if answer.HasField("dataBuffers") else [answer.data]
                )
                if (size := sum(map(len, pieces))) != wanted.length_bytes:
                    raise self._protocol_error(
                        f"sent {size} bytes, requested were {wanted.length_bytes}", container_id
                    )
                yield wanted, pieces
            waiting = shortened

    def echo(self, container_id: ContainerId, payload_bytes: int) -> int:
        """Request that many bytes of payload; returns how many arrived."""
        body = EchoRequestProto(payload=b"", payloadSizeResp=payload_bytes, readOnly=True)
        reply = self._one(
            self._request(container_id, Echo, body), self._deadlines.read(payload_bytes)
        )
        return len(reply.echo.payload)

    def close(self) -> None:
        """Close the connection; running calls fail with PeerUnavailableError."""
        self._channel.close()

    def _request(self, container_id: ContainerId, kind: Type, body: _Body) -> Request:
        request = Request(
            cmdType=kind, containerID=container_id, datanodeUuid="", version=_CLIENT_VERSION
        )
        getattr(request, _BODIES[kind]).CopyFrom(body)
        return request

    def _read_request(
        self, container_id: ContainerId, block_id: BlockId, chunk: ChunkRecord, wanted: ByteRange
    ) -> Request:
        # Without checksums, which the server would only send back.
        sums = ChecksumData(
            type=chunk.checksum_type.name, bytesPerChecksum=chunk.bytes_per_checksum
        )
        info = ChunkInfo(
            chunkName=chunk.name, offset=wanted.offset, len=wanted.length_bytes, checksumData=sums
        )
        body = ReadChunkRequestProto(
            blockID=_id(container_id, block_id),
            chunkData=info,
            readChunkVersion=ReadChunkVersion.V1,
        )
        return self._request(container_id, ReadChunk, body)

    def _one(self, request: Request, deadline_s: float) -> Response:
        for _, reply in self._exchange(iter([request]), deadline_s):
            self._check(reply)
            return reply
        raise AssertionError("an exchange yields a response for each request or raises")

    def _exchange(
        self, requests: Iterator[Request], deadline_s: float
    ) -> Iterator[tuple[Request, Response]]:
        outgoing: SimpleQueue[Request | None] = SimpleQueue()
        waiting: deque[Request] = deque()

        def send_next() -> None:
            request = next(requests, None)
            outgoing.put(request)
            if request is not None:
                waiting.append(request)

        with named_errors(self._target, PeerUnavailableError):
            call = self._send(iter(outgoing.get, None), timeout=deadline_s)
            try:
                for _ in range(_DEPTH):
                    send_next()
                while waiting:
                    raw = next(call, None)
                    if raw is None:
                        raise self._protocol_error(
                            "ended the stream before its last response", waiting[0].containerID
                        )
                    request = waiting.popleft()
                    send_next()
                    yield request, self._parse(raw, request)
            finally:
                # Ends the thread of gRPC that waits for the next request.
                outgoing.put(None)
                call.cancel()

    def _parse(self, raw: bytes, request: Request) -> Response:
        # A message within the size limit can have millions of empty pieces, and each
        # becomes an object when parsed.
        if (
            request.cmdType == ReadChunk
            and len(raw) > 2 * request.readChunk.chunkData.len + _ENVELOPE_BYTES
        ):
            raise self._protocol_error(f"sent {len(raw)} bytes for a chunk", request.containerID)
        try:
            reply = Response.FromString(raw)
        except DecodeError as error:
            raise self._protocol_error("sent an invalid response", request.containerID) from error
        if not reply.IsInitialized() or reply.cmdType != request.cmdType:
            raise self._protocol_error("sent a response of another type", request.containerID)
        if reply.result == Result.SUCCESS and not reply.HasField(_BODIES[request.cmdType]):
            raise self._protocol_error("sent a response without a body", request.containerID)
        return reply

    def _check(self, reply: Response) -> None:
        if reply.result != Result.SUCCESS:
            name = Result.Name(reply.result)
            text = f"{self._target}: {name}: {printable(reply.message)}"
            wants_token = reply.result == Result.BLOCK_TOKEN_VERIFICATION_FAILED
            raise PeerRefusedError(text, hint=SECURED_HINT if wants_token else "", result=name)

    def _protocol_error(self, what: str, container_id: int) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._target} {what}", container_id=container_id)


# Results that concern one block, not the container or our request.
_NO_RECORD = frozenset({
    Result.NO_SUCH_BLOCK, Result.UNKNOWN_BCSID, Result.BCSID_MISMATCH, Result.IO_EXCEPTION,
    Result.UNABLE_TO_READ_METADATA_DB,
})  # fmt: skip


def merge_ranges(ranges: Sequence[ByteRange], length_bytes_max: int) -> list[ByteRange]:
    """The same bytes in as few ranges as possible, each of at most `length_bytes_max`.

    `ranges` ascend and do not overlap.
    """
    found: list[ByteRange] = []
    for one in ranges:
        start = one.offset
        if found and found[-1].end == start:
            start = found.pop().offset
        assert not found or found[-1].end <= start
        found += (
            ByteRange(offset, min(length_bytes_max, one.end - offset))
            for offset in range(start, one.end, length_bytes_max)
        )
    return found


def _id(container_id: ContainerId, block_id: BlockId) -> DatanodeBlockID:
    return DatanodeBlockID(containerID=container_id, localID=block_id)
