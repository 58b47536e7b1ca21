"""A client of Ozone's datanode protocol (ozone.datanode), for reads.

A failed request makes a real datanode scan the container, so the client requests only
what it has reason to expect.
"""

import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from queue import SimpleQueue

import grpc
from google.protobuf.message import DecodeError

from merkle.check import check_chunk_names
from merkle.errors import RecordInvalidError
from merkle.record import BlockRecord, ChunkRecord
from merkle.tree import BlockId, ContainerId
from ozone.datanode import BODIES, ENVELOPE_BYTES, SERVICE, Request, Response
from ozone.ports import ByteRange
from ozone.site import SECURED_HINT
from protos.convert import has_too_many_parts, record_from_proto
from protos.ozone_datanode_pb2 import (
    ChecksumData,
    ChunkInfo,
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
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from runtime.rpc import Deadlines, StreamCall, named_errors, printable

# The client version of Ozone 2.2.
_CLIENT_VERSION = 3
# Requests in flight: four fill a real datanode's stream, sixteen are no faster.
_DEPTH = 4
# Of one ReadChunk: a usual chunk of 4 MiB then takes four requests in flight, which is
# half again as fast as one.
READ_BYTES_MAX = 1 << 20
# Of a block that is read as a whole: a stream that stalls is noticed by its deadline,
# which grows with what it has to carry.
_RANGES_PER_STREAM = 32
# Of one page of a listing, and of records requested on one stream.
_ROWS_PER_READ = 1000
# Of a range beyond the end of the file: how much of it there was, -1 for nothing.
_ACTUAL = re.compile(r"actual: (-1|\d{1,9})\b")

_Body = (
    GetContainerChecksumInfoRequestProto
    | GetBlockRequestProto
    | ListBlockRequestProto
    | ReadChunkRequestProto
    | EchoRequestProto
)


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
        self,
        channel: grpc.Channel,
        target: str,
        *,
        datanode_id: str = "",
        deadlines: Deadlines | None = None,
    ) -> None:
        """The client owns `channel`; errors name the datanode `target`. Erasure-coded
        containers are only read with `datanode_id`, the datanode's UUID.
        """
        self._channel = channel
        self._target = target
        self._datanode_id = datanode_id
        self._deadlines = deadlines or Deadlines()
        # Responses stay bytes until their size is checked.
        self._send: StreamCall = channel.stream_stream(
            f"/{SERVICE}/send", Request.SerializeToString, None
        )

    def tree_bytes(self, container_id: ContainerId) -> bytes:
        """The bytes of the tree file, unparsed; never empty.

        An empty tree file raises PeerRefusedError, as in Ozone's client (wire-I6).
        """
        for _, found in self.each_tree_bytes([container_id]):
            if not isinstance(found, bytes):
                raise found
            return found
        raise AssertionError("an exchange yields a response for each request or raises")

    def each_tree_bytes(
        self, container_ids: Sequence[ContainerId]
    ) -> Iterator[tuple[ContainerId, bytes | PeerRefusedError | RemoteProtocolError]]:
        """Each container with the bytes of its tree file, as `tree_bytes`, or with the
        error of this container alone; all on one stream, in order.
        """
        requests = (
            self._request(
                one, GetContainerChecksumInfo, GetContainerChecksumInfoRequestProto(containerID=one)
            )
            for one in container_ids
        )
        for request, reply in self._exchange(requests, self._deadlines.tree_s):
            container_id = ContainerId(request.containerID)
            try:
                self._check(reply)
                found = reply.getContainerChecksumInfo
                if found.containerID != container_id:
                    text = f"answered for container {found.containerID}"
                    raise self._protocol_error(text, container_id)
                if not found.containerChecksumInfo:
                    text = f"{self._target}: its tree file is empty"
                    raise PeerRefusedError(text, result="IO_EXCEPTION")
            except (PeerRefusedError, RemoteProtocolError) as error:
                yield container_id, error
            else:
                yield container_id, found.containerChecksumInfo

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
                    record = record_from_proto(reply.getBlock.blockData)
                    check_chunk_names(record)
                except RecordInvalidError:
                    # The peer's disk may be at fault: an invalid record counts as
                    # missing.
                    continue
                yield record

    def list_records(
        self, container_id: ContainerId, page: int = _ROWS_PER_READ
    ) -> Iterator[BlockRecord]:
        """All records of a container in the datanode's order, requested page by page.

        Raises:
            RecordInvalidError: a record contradicts itself, or names a chunk as what
                is not its own.
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
            for index, record in enumerate(map(record_from_proto, rows)):
                block_id = record.block_id
                # The first of a page may be the last of the page before.
                if index == 0 and seen and block_id == body.startLocalID:
                    continue
                # Otherwise a listing could go on for ever.
                if block_id in seen or block_id < 0 or record.container_id != container_id:
                    text = f"listed block {block_id} of container {record.container_id} out of turn"
                    raise self._protocol_error(text, container_id)
                seen.add(block_id)
                check_chunk_names(record)
                yield record
            if len(rows) < page:
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
        block = _id(container_id, block_id)
        for _, wanted, pieces in self._read_ranges(block, [(chunk, one) for one in ranges]):
            yield wanted, pieces

    def read_block(
        self, container_id: ContainerId, block_id: BlockId, chunks: Sequence[ChunkRecord]
    ) -> Iterator[tuple[ChunkRecord, ByteRange, Sequence[bytes]]]:
        """Yields chunks of one block in ranges with their bytes in pieces, in order and
        on one stream, without what is beyond the end of the file. A range that cannot
        be read has no pieces.

        The first request goes alone, and at the end of the file no more follow: each
        that fails costs a real datanode a scan.
        """
        wanted = [
            (chunk, one)
            for chunk in chunks
            for one in merge_ranges([ByteRange(chunk.offset, chunk.length_bytes)], READ_BYTES_MAX)
        ]
        for start in range(0, len(wanted), _RANGES_PER_STREAM):
            is_ended = yield from self._read_ranges(
                _id(container_id, block_id),
                wanted[start : start + _RANGES_PER_STREAM],
                stops_at_end=True,
                first_alone=start == 0,
            )
            if is_ended:
                return

    def _read_ranges(
        self,
        block: DatanodeBlockID,
        ranges: Sequence[tuple[ChunkRecord, ByteRange]],
        *,
        stops_at_end: bool = False,
        first_alone: bool = False,
    ) -> Generator[tuple[ChunkRecord, ByteRange, Sequence[bytes]], None, bool]:
        """The ranges in order; one that the file's end shortens comes after the others,
        of which there are none if it stops there. Returns whether the file ended.
        """
        waiting, is_ended = ranges, False
        deadline_s = self._deadlines.read(sum(one.length_bytes for _, one in ranges))
        while waiting:
            ended = list[ByteRange]()
            shortened: list[tuple[ChunkRecord, ByteRange]] = []
            requests = self._read_requests(block, waiting, ended if stops_at_end else ())
            answers = self._exchange(requests, deadline_s, first_alone=first_alone)
            for (_, reply), (chunk, wanted) in zip(answers, waiting, strict=False):
                if reply.result != Result.CONTAINER_INTERNAL_ERROR:
                    self._check(reply)
                    yield chunk, wanted, self._pieces(reply, wanted, block.containerID)
                    continue
                held = _bytes_before_end(reply)
                if held is not None:
                    ended.append(wanted)
                # Shortened once only, so that a datanode cannot cause endless requests.
                if waiting is ranges and held and held < wanted.length_bytes:
                    shortened.append((chunk, ByteRange(wanted.offset, held)))
                elif not (stops_at_end and ended):
                    yield chunk, wanted, ()
            waiting, is_ended = shortened, is_ended or bool(ended)
        return is_ended

    def _read_requests(
        self,
        block: DatanodeBlockID,
        ranges: Iterable[tuple[ChunkRecord, ByteRange]],
        ended: Sequence[object],
    ) -> Iterator[Request]:
        """The requests of these ranges, until something is in `ended`."""
        for chunk, wanted in ranges:
            if ended:
                return
            yield self._read_request(block, chunk, wanted)

    def _pieces(self, reply: Response, wanted: ByteRange, container_id: int) -> Sequence[bytes]:
        answer = reply.readChunk
        pieces = answer.dataBuffers.buffers if answer.HasField("dataBuffers") else [answer.data]
        if (size := sum(map(len, pieces))) != wanted.length_bytes:
            raise self._protocol_error(
                f"sent {size} bytes, requested were {wanted.length_bytes}", container_id
            )
        return pieces

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
            cmdType=kind,
            containerID=container_id,
            datanodeUuid=self._datanode_id,
            version=_CLIENT_VERSION,
        )
        getattr(request, BODIES[kind]).CopyFrom(body)
        return request

    def _read_request(
        self, block: DatanodeBlockID, chunk: ChunkRecord, wanted: ByteRange
    ) -> Request:
        # Without checksums, which the server would only send back.
        sums = ChecksumData(
            type=chunk.checksum_type.name, bytesPerChecksum=chunk.bytes_per_checksum
        )
        info = ChunkInfo(
            chunkName=chunk.name, offset=wanted.offset, len=wanted.length_bytes, checksumData=sums
        )
        body = ReadChunkRequestProto(
            blockID=block, chunkData=info, readChunkVersion=ReadChunkVersion.V1
        )
        return self._request(ContainerId(block.containerID), ReadChunk, body)

    def _one(self, request: Request, deadline_s: float) -> Response:
        for _, reply in self._exchange(iter([request]), deadline_s):
            self._check(reply)
            return reply
        raise AssertionError("an exchange yields a response for each request or raises")

    def _exchange(
        self, requests: Iterator[Request], deadline_s: float, *, first_alone: bool = False
    ) -> Iterator[tuple[Request, Response]]:
        outgoing: SimpleQueue[Request | None] = SimpleQueue()
        waiting: deque[Request] = deque()

        def send(depth: int) -> None:
            while len(waiting) < depth:
                request = next(requests, None)
                outgoing.put(request)
                if request is None:
                    return
                waiting.append(request)

        with named_errors(self._target, PeerUnavailableError):
            call = self._send(iter(outgoing.get, None), timeout=deadline_s)
            try:
                send(1 if first_alone else _DEPTH)
                while waiting:
                    raw = next(call, None)
                    if raw is None:
                        raise self._protocol_error(
                            "ended the stream before its last response", waiting[0].containerID
                        )
                    request = waiting.popleft()
                    reply = self._parse(raw, request)
                    if reply.result == Result.SUCCESS:
                        send(_DEPTH)
                    yield request, reply
                    # After a failure the caller may want no more.
                    send(_DEPTH)
            finally:
                # Ends the thread of gRPC that waits for the next request.
                outgoing.put(None)
                call.cancel()

    def _parse(self, raw: bytes, request: Request) -> Response:
        # A message within the size limit can have millions of empty pieces or chunks,
        # and each becomes an object when parsed.
        if (
            request.cmdType == ReadChunk
            and len(raw) > 2 * request.readChunk.chunkData.len + ENVELOPE_BYTES
        ):
            raise self._protocol_error(f"sent {len(raw)} bytes for a chunk", request.containerID)
        path = _RECORD_PATHS.get(request.cmdType)
        if path and has_too_many_parts(raw, *path):
            raise self._protocol_error("sent records of too many parts", request.containerID)
        try:
            reply = Response.FromString(raw)
        except DecodeError as error:
            raise self._protocol_error("sent an invalid response", request.containerID) from error
        if not reply.IsInitialized() or reply.cmdType != request.cmdType:
            raise self._protocol_error("sent a response of another type", request.containerID)
        if reply.result == Result.SUCCESS and not reply.HasField(BODIES[request.cmdType]):
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


# Where a response has records, as a path of field numbers.
_RECORD_PATHS = {
    GetBlock: (Response.GETBLOCK_FIELD_NUMBER, 1),
    ListBlock: (Response.LISTBLOCK_FIELD_NUMBER, 1),
}
# Results that concern one block, not the container or our request.
_NO_RECORD = frozenset({
    Result.NO_SUCH_BLOCK, Result.UNKNOWN_BCSID, Result.BCSID_MISMATCH, Result.IO_EXCEPTION,
    Result.UNABLE_TO_READ_METADATA_DB,
})  # fmt: skip


def _bytes_before_end(reply: Response) -> int | None:
    """How many bytes of the range that it is about lie before the end of the file; None
    if it is about something else.
    """
    actual = _ACTUAL.search(reply.message)
    return max(int(actual[1]), 0) if actual else None


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
