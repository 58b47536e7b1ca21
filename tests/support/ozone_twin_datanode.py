"""The datanode of a twin of Ozone: only the records of blocks are asked of it."""

import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import grpc

from ozone.datanode import SERVICE, Request, Response
from protos.ozone_datanode_pb2 import (
    BlockData,
    ChecksumData,
    ChunkInfo,
    GetBlock,
    GetBlockResponseProto,
    Result,
)
from tests.support.ozone_twin import OzoneTwin

_WINDOW_BYTES = 16 << 10
_CHUNK_BYTES = 4 << 20


class TwinDatanode:
    """Serves records on a free loopback port; a context manager."""

    def __init__(self, twin: OzoneTwin) -> None:
        self._twin = twin
        self._server = grpc.server(ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(
            self._serve, Request.FromString, Response.SerializeToString
        )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"send": handler}),)
        )
        twin.datanode = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> "TwinDatanode":
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(None).wait()

    def _serve(self, requests: Iterator[Request], _: grpc.ServicerContext) -> Iterator[Response]:
        for request in requests:
            assert request.cmdType == GetBlock
            local_id = request.getBlock.blockID.localID
            body = self._body(local_id)
            if body is None:
                yield Response(cmdType=GetBlock, result=Result.NO_SUCH_BLOCK)
                continue
            block = BlockData(blockID=request.getBlock.blockID, size=len(body))
            for first in range(0, len(body), _CHUNK_BYTES):
                block.chunks.append(_chunk(first, body[first : first + _CHUNK_BYTES]))
            answer = GetBlockResponseProto(blockData=block)
            yield Response(cmdType=GetBlock, result=Result.SUCCESS, getBlock=answer)

    def _body(self, local_id: int) -> bytes | None:
        """The bytes of a block, of a key that there is or was."""
        with self._twin.lock:
            held = [
                key
                for bucket in self._twin.buckets.values()
                for keys in (bucket.keys, *(one.keys for one in bucket.snapshots.values()))
                for key in keys.values()
            ]
        for key in held:
            first = 0
            for one in key.info.keyLocationList[-1].keyLocations:
                if one.blockID.containerBlockID.localID == local_id:
                    return key.body[first : first + one.length]
                first += one.length
        return None


def _chunk(first: int, body: bytes) -> ChunkInfo:
    """As an S3 gateway of Ozone records it."""
    checksums = [
        zlib.crc32(body[at : at + _WINDOW_BYTES]).to_bytes(4, "big")
        for at in range(0, len(body), _WINDOW_BYTES)
    ]
    data = ChecksumData(type="CRC32", bytesPerChecksum=_WINDOW_BYTES, checksums=checksums)
    return ChunkInfo(chunkName=f"{first}", offset=first, len=len(body), checksumData=data)
