"""Ozone's datanode protocol, XceiverClientProtocolService: the reading half of it, as
server and as client.

One method, a stream of requests answered in order. An error is a normal answer with a
result other than SUCCESS; what is no request at all ends the stream with UNKNOWN, as a
datanode of Java does, and loses what was sent after it. Real datanodes believe what we
serve: pieces of exactly `bytesPerChecksum`, since other sizes hang their checksum loop,
and records as they are stored. A request that fails makes a real datanode scan the
container, so our client asks for nothing that it has no reason to expect.
"""

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
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
# What Ozone 2.2 sends as its client version.
_CLIENT_VERSION = 3
# Requests on their way at a time: four fill a real datanode's stream, sixteen are no
# faster.
_DEPTH = 4
# Of one ReadChunk: small enough that one usual chunk of 4 MiB keeps a stream's four
# places busy, half again as fast.
READ_BYTES_MAX = 1 << 20
# Pieces of an answer where there are no windows.
_PIECE_BYTES = 1 << 20
# More would be windows of less than 512 bytes, of which a request could have millions
# made.
_PIECES_MAX = 65_536
# Room in a message for everything that is not its payload.
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
    """Answers from a ReplicaSource; knows no container of its own."""

    def __init__(self, source: ReplicaSource) -> None:
        self._source = source

    def register(self, server: grpc.Server) -> None:
        """Serve on this server."""
        # Requests come as bytes: one that is no message must end its stream as Ozone
        # ends it.
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
        """The answer to one request; an error is an answer too."""
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
                Result.UNSUPPORTED_REQUEST, f"{name} is not served here: this peer can only be read"
            )
        container_id = ContainerId(request.containerID)
        head = self._source.head(container_id)
        if not request.HasField(body):
            raise _RefusalError(Result.MALFORMED_REQUEST, "Cmd type does not match the payload.")
        match request.cmdType:
            case Type.GetContainerChecksumInfo:
                self._tree(reply, container_id, head)
            case Type.GetBlock:
                self._block(reply, container_id, head, request.getBlock.blockID)
            case Type.ListBlock:
                self._list(reply, container_id, request.listBlock)
            case Type.ReadChunk:
                self._chunk(reply, container_id, head, request.readChunk)
            case _:
                _echo(reply, request.echo)

    def _tree(self, reply: Response, container_id: ContainerId, head: ReplicaHead) -> None:
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

    def _block(
        self, reply: Response, container_id: ContainerId, head: ReplicaHead, asked: DatanodeBlockID
    ) -> None:
        _check_commit(asked, head)
        if head.replica_index and asked.replicaIndex and asked.replicaIndex != head.replica_index:
            text = (
                f"ContainerID {container_id} has replica index {head.replica_index}, not"
                f" {asked.replicaIndex}"
            )
            raise _RefusalError(Result.CONTAINER_NOT_FOUND, text)
        record = self._source.record(container_id, BlockId(asked.localID))
        if record is None:
            raise _RefusalError(Result.NO_SUCH_BLOCK, f"Unable to find the block. {asked.localID}")
        if asked.blockCommitSequenceId > record.bcs_id:
            text = (
                f"block {asked.localID} has bcsId {record.bcs_id}, asked for"
                f" {asked.blockCommitSequenceId}"
            )
            raise _RefusalError(Result.BCSID_MISMATCH, text)
        reply.getBlock.blockData.CopyFrom(record_to_proto(record))

    def _list(
        self, reply: Response, container_id: ContainerId, asked: ListBlockRequestProto
    ) -> None:
        if asked.count == 0:
            raise _RefusalError(Result.CONTAINER_INTERNAL_ERROR, "Count must be a positive number.")
        start = BlockId(asked.startLocalID) if asked.HasField("startLocalID") else None
        size = 0
        for record in islice(listed(self._source, container_id, start), asked.count):
            row = record_to_proto(record)
            size += row.ByteSize()
            # An answer cut short would look like the end of the list.
            if size > _PAYLOAD_BYTES_MAX:
                raise _RefusalError(
                    Result.CONTAINER_INTERNAL_ERROR, f"{asked.count} blocks do not fit a message"
                )
            reply.listBlock.blockData.append(row)
        reply.listBlock.SetInParent()

    def _chunk(
        self,
        reply: Response,
        container_id: ContainerId,
        head: ReplicaHead,
        asked: ReadChunkRequestProto,
    ) -> None:
        _check_commit(asked.blockID, head)
        chunk = asked.chunkData
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
            # Beyond any block's end the file is not asked: such an offset may not even
            # be one.
            offset, block_id = min(chunk.offset, BLOCK_BYTES_MAX), BlockId(asked.blockID.localID)
            data = self._source.read(container_id, block_id, offset, chunk.len)
            if len(data) != chunk.len:
                text = f"Unexpected read size. expected: {chunk.len}, actual: {len(data) or -1}"
                raise _RefusalError(Result.CONTAINER_INTERNAL_ERROR, text)
        answer = reply.readChunk
        answer.blockID.CopyFrom(asked.blockID)
        answer.chunkData.CopyFrom(chunk)
        if asked.readChunkVersion == ReadChunkVersion.V1:
            step = _piece_bytes(chunk)
            answer.dataBuffers.buffers.extend(
                data[i : i + step] for i in range(0, len(data) or 1, step)
            )
        else:
            answer.data = data


def listed(
    source: ReplicaSource, container_id: ContainerId, start: BlockId | None
) -> Iterator[BlockRecord]:
    """All records from `start`, read a page at a time."""
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
    """Carries a result and its message from where it is found to where the answer is
    made.
    """

    def __init__(self, result: Result, message: str) -> None:
        super().__init__(message)
        self.result = result
        self.message = message


def _parse_request(raw: bytes) -> Request | None:
    try:
        request = Request.FromString(raw)
    except DecodeError:
        return None
    # The parser lets required fields be absent; answering such a request would fail
    # half way.
    return request if request.IsInitialized() else None


def _check_commit(asked: DatanodeBlockID, head: ReplicaHead) -> None:
    if asked.blockCommitSequenceId > head.bcs_id:
        text = (
            f"Unable to find the block with bcsID {asked.blockCommitSequenceId}. Container bcsId is"
            f" {head.bcs_id}."
        )
        raise _RefusalError(Result.UNKNOWN_BCSID, text)


def _echo(reply: Response, asked: EchoRequestProto) -> None:
    # The sleep that Ozone's echo offers is left out: it would let a stranger hold our
    # threads.
    if asked.payloadSizeResp > _PAYLOAD_BYTES_MAX:
        raise _RefusalError(Result.UNSUPPORTED_REQUEST, f"Oversize echo. max: {_PAYLOAD_BYTES_MAX}")
    reply.echo.payload = os.urandom(max(asked.payloadSizeResp, 0))


def _piece_bytes(chunk: ChunkInfo) -> int:
    """Bytes of each piece of an answer: a window, or one piece where there would be
    none or too many.
    """
    step = chunk.checksumData.bytesPerChecksum
    if chunk.checksumData.type == NONE:
        step = _PIECE_BYTES
    return step if step and chunk.len // step < _PIECES_MAX else max(chunk.len, 1)


class DatanodeClient:
    """Asks one datanode. Each call opens a stream of its own on the shared connection,
    keeps up to _DEPTH requests in flight on it and ends within its deadline: an answer
    that never comes, or a stream that an exception at the server has killed, costs this
    call and nothing else.

    All methods may raise PeerUnavailableError, RemoteProtocolError and
    PeerRefusedError, whose fact `result` is the name of Ozone's result or of the gRPC
    status.
    """

    def __init__(
        self, channel: grpc.Channel, target: str, *, deadlines: Deadlines | None = None
    ) -> None:
        """`channel` is ours from now on; `target` is how errors name the datanode."""
        self._channel = channel
        self._target = target
        self._deadlines = deadlines or Deadlines()
        # Answers stay bytes until their size has been judged.
        self._send: StreamCall = channel.stream_stream(
            f"/{SERVICE}/send", Request.SerializeToString, None
        )

    def tree_bytes(self, container_id: ContainerId) -> bytes:
        """The tree file's bytes, unparsed; never empty, since an empty tree file is
        refused as by Ozone (wire-I6).
        """
        body = GetContainerChecksumInfoRequestProto(containerID=container_id)
        request = self._request(container_id, GetContainerChecksumInfo, body)
        reply = self._one(request, self._deadlines.tree_s).getContainerChecksumInfo
        if reply.containerID != container_id:
            raise self._nonsense(f"answered for container {reply.containerID}", container_id)
        if not reply.containerChecksumInfo:
            raise PeerRefusedError(f"{self._target}: its tree file is empty", result="IO_EXCEPTION")
        return reply.containerChecksumInfo

    def records(
        self, container_id: ContainerId, block_ids: Iterable[BlockId]
    ) -> Iterator[BlockRecord]:
        """The records of these blocks in this order; without those that are not there,
        unreadable or invalid.
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
                asked, found = request.getBlock.blockID, reply.getBlock.blockData.blockID
                if (found.containerID, found.localID) != (asked.containerID, asked.localID):
                    text = (
                        f"sent block {found.localID} of container {found.containerID} instead of"
                        f" {asked.localID}"
                    )
                    raise self._nonsense(text, container_id)
                try:
                    yield record_from_proto(reply.getBlock.blockData)
                except RecordInvalidError:
                    # Its disk may be at fault; a record that cannot be used is as good
                    # as none.
                    continue

    def list_records(
        self, container_id: ContainerId, page: int = _ROWS_PER_READ
    ) -> Iterator[BlockRecord]:
        """All records of a container in the datanode's order, asked for in pages.

        Raises:
            RecordInvalidError: one of them contradicts itself.
        """
        assert page > 1
        seen: set[BlockId] = set()
        body = ListBlockRequestProto(count=page)
        while True:
            request = self._request(container_id, ListBlock, body)
            rows = self._one(request, self._deadlines.records_s).listBlock.blockData
            if len(rows) > page:
                raise self._nonsense(
                    f"listed {len(rows)} blocks when asked for {page}", container_id
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
        """Each range with its bytes in pieces, all of them or, where the file ends
        inside it, what there is.
        """
        waiting, deadline_s = ranges, self._deadlines.read(sum(r.length_bytes for r in ranges))
        while waiting:
            requests = (self._read_request(container_id, block_id, chunk, one) for one in waiting)
            shortened: list[ByteRange] = []
            for request, reply in self._exchange(requests, deadline_s):
                asked = ByteRange(
                    request.readChunk.chunkData.offset, request.readChunk.chunkData.len
                )
                if reply.result == Result.CONTAINER_INTERNAL_ERROR:
                    there = _ACTUAL.search(reply.message)
                    # Only ever less than before, so that a datanode cannot keep us
                    # asking.
                    if waiting is ranges and there and 0 < int(there[1]) < asked.length_bytes:
                        shortened.append(ByteRange(asked.offset, int(there[1])))
                    else:
                        yield asked, ()
                    continue
                self._check(reply)
                answer = reply.readChunk
                pieces = (
                    answer.dataBuffers.buffers if answer.HasField("dataBuffers") else [answer.data]
                )
                if (size := sum(map(len, pieces))) != asked.length_bytes:
                    raise self._nonsense(
                        f"sent {size} bytes when asked for {asked.length_bytes}", container_id
                    )
                yield asked, pieces
            waiting = shortened

    def echo(self, container_id: ContainerId, payload_bytes: int) -> int:
        """Have the datanode send that many bytes; how many came."""
        body = EchoRequestProto(payload=b"", payloadSizeResp=payload_bytes, readOnly=True)
        reply = self._one(
            self._request(container_id, Echo, body), self._deadlines.read(payload_bytes)
        )
        return len(reply.echo.payload)

    def close(self) -> None:
        """Close the connection; calls that are under way fail with
        PeerUnavailableError.
        """
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
        # Without checksums: the server would only send them back.
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
        raise AssertionError("an exchange yields an answer for each request or raises")

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
                        raise self._nonsense(
                            "ended the stream before its last answer", waiting[0].containerID
                        )
                    request = waiting.popleft()
                    send_next()
                    yield request, self._parse(raw, request)
            finally:
                # Ends gRPC's thread that waits for the next request.
                outgoing.put(None)
                call.cancel()

    def _parse(self, raw: bytes, request: Request) -> Response:
        # A message of the allowed size can hold millions of empty pieces, each an
        # object once it is parsed.
        if (
            request.cmdType == ReadChunk
            and len(raw) > 2 * request.readChunk.chunkData.len + _ENVELOPE_BYTES
        ):
            raise self._nonsense(f"sent {len(raw)} bytes for a chunk", request.containerID)
        try:
            reply = Response.FromString(raw)
        except DecodeError as error:
            raise self._nonsense("sent bytes that are no answer", request.containerID) from error
        if not reply.IsInitialized() or reply.cmdType != request.cmdType:
            raise self._nonsense("sent an answer to something else", request.containerID)
        if reply.result == Result.SUCCESS and not reply.HasField(_BODIES[request.cmdType]):
            raise self._nonsense("sent an answer without a body", request.containerID)
        return reply

    def _check(self, reply: Response) -> None:
        if reply.result != Result.SUCCESS:
            name = Result.Name(reply.result)
            raise PeerRefusedError(
                f"{self._target}: {name}: {printable(reply.message)}", result=name
            )

    def _nonsense(self, what: str, container_id: int) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._target} {what}", container_id=container_id)


# Results that speak of one block, not of the container or of us.
_NO_RECORD = frozenset({
    Result.NO_SUCH_BLOCK, Result.UNKNOWN_BCSID, Result.BCSID_MISMATCH, Result.IO_EXCEPTION,
    Result.UNABLE_TO_READ_METADATA_DB,
})  # fmt: skip


def merged(ranges: Sequence[ByteRange], length_bytes_max: int) -> list[ByteRange]:
    """The same bytes in as few ranges as possible of at most that length; `ranges`
    ascend and do not overlap.
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
