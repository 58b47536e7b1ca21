"""A server that misbehaves on a real socket, in every way of the table `CASES`.

Run as a process of its own (`python -m tests.support.evil_server`), so that what it
wastes does not count as our memory; it prints its port and ends when its stdin does.
The container ID that is asked for chooses the case. Nothing here uses our own server
code: it sends what ours would never send.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from itertools import count, repeat

import grpc

from merkle.columns import encode_tree
from merkle.tree import (
    BlockId,
    BlockTree,
    ContainerId,
    ContainerTree,
    block_checksum,
    container_checksum,
)
from ozone.datanode import SERVICE as DATANODE
from protos.agent_pb2 import (
    ContainerHashPage,
    GetBlockRecordsRequest,
    GetBlockRecordsResponse,
    GetContainerHashesRequest,
    GetContainerHashesResponse,
    GetContainerHashPagesRequest,
    ReadWindowsRequest,
    WindowPiece,
)
from protos.convert import record_to_bytes, record_to_proto
from protos.ozone_datanode_pb2 import (
    NONE,
    BlockMerkleTree,
    ChunkMerkleTree,
    ContainerChecksumInfo,
    ContainerCommandRequestProto,
    ContainerCommandResponseProto,
    ContainerMerkleTree,
    Result,
    Type,
)
from repair.wire import SERVICE as AGENT
from repair.wire import encode_piece
from runtime.rpc import Handler
from tests.support.evil_records import (
    BLOCK,
    CHUNK_BYTES,
    NOT_ONE_RECORD,
    RECORDS,
    length_field,
    many_chunks,
    raw_record,
    replica,
)

FIRST_CONTAINER = 1000
# Longer than any deadline of the test; a case that waits for it has hung.
_AGES_S = 60

Answers = Callable[[ContainerId, grpc.ServicerContext], Iterable[bytes]]


class Ask(Enum):
    """What the test asks the peer for."""

    TREE = "tree"
    RECORDS = "records"
    READ = "read"
    # All records of a container, of a datanode alone.
    LIST = "list"


@dataclass(frozen=True)
class Case:
    """One misbehaviour: how the server answers, and the codes of which one must come
    out; none if it is taken.
    """

    kind: str
    ask: Ask
    name: str
    answers: Answers
    codes: tuple[str, ...]
    # The page stream behind a tree that does not fit a message.
    pages: Answers | None = None

    def __str__(self) -> str:
        return f"{self.kind}-{self.ask.value}-{self.name}"


def _honest(container_id: ContainerId) -> ContainerTree:
    return replica(container_id).scanned_tree()


def _raw_tree(container_id: int, *blocks: BlockMerkleTree) -> bytes:
    """A tree whose root fits, of blocks that no value of ours would hold."""
    root = container_checksum([block.dataChecksum for block in blocks])
    tree = ContainerMerkleTree(dataChecksum=root, blockMerkleTree=blocks)
    return ContainerChecksumInfo(
        containerID=container_id, containerMerkleTree=tree
    ).SerializeToString()


def _raw_block(block_id: int, *chunks: ChunkMerkleTree, deleted: bool = False) -> BlockMerkleTree:
    checksum = block_checksum(block_id, [chunk.dataChecksum for chunk in chunks])
    return BlockMerkleTree(
        blockID=block_id, dataChecksum=checksum, deleted=deleted, chunkMerkleTree=chunks
    )


def _raw_chunk(offset: int, length: int = 4096, checksum: int = 7) -> ChunkMerkleTree:
    return ChunkMerkleTree(
        offset=offset, length=length, dataChecksum=checksum, checksumMatches=True
    )


def _one_block(*chunks: ChunkMerkleTree, deleted: bool = False) -> Callable[[ContainerId], bytes]:
    return lambda container_id: _raw_tree(container_id, _raw_block(1, *chunks, deleted=deleted))


@cache
def _too_many_chunks() -> BlockMerkleTree:
    """Not at import: every worker of the tests would make them."""
    return _raw_block(1, *(_raw_chunk(i, 1) for i in range(65_537)))


def _empty_blocks(number: int) -> Callable[[ContainerId], bytes]:
    """Blocks of two bytes each: the most objects for the fewest bytes."""

    def tree(container_id: ContainerId) -> bytes:
        info = ContainerChecksumInfo(containerID=container_id).SerializeToString()
        return info + length_field(2, b"\x12\x00" * number)

    return tree


TREES: dict[str, Callable[[ContainerId], bytes]] = {
    "wrong root": lambda c: encode_tree(replace(_honest(c), data_checksum=1)),
    "wrong block sum": lambda c: encode_tree(ContainerTree.of(c, [BlockTree(BLOCK, 1, False, ())])),
    "another container's tree": lambda c: encode_tree(_honest(ContainerId(c + 1))),
    "nobody's tree": lambda c: encode_tree(_honest(c))[3:],
    "unsorted blocks": lambda c: _raw_tree(c, _raw_block(2), _raw_block(1)),
    "a block twice": lambda c: _raw_tree(c, _raw_block(2), _raw_block(2)),
    "unsorted chunks": _one_block(_raw_chunk(4096), _raw_chunk(0)),
    "a chunk twice": _one_block(_raw_chunk(0), _raw_chunk(0)),
    "negative offset": _one_block(_raw_chunk(-4096)),
    "offset of 2^62": _one_block(_raw_chunk(1 << 62)),
    "negative length": _one_block(_raw_chunk(0, -1)),
    "length of 2^62": _one_block(_raw_chunk(0, 1 << 62)),
    "overlapping chunks": _one_block(_raw_chunk(0, 4096), _raw_chunk(4095, 4096)),
    "negative chunk checksum": _one_block(_raw_chunk(0, 4096, -1)),
    "empty chunk with checksum": _one_block(_raw_chunk(0, 0, 7)),
    "tombstone with chunks": _one_block(_raw_chunk(0), deleted=True),
    "negative block ID": lambda c: _raw_tree(c, _raw_block(-5)),
    "too many chunks": lambda c: _raw_tree(c, _too_many_chunks()),
    "too many blocks": _empty_blocks(1_000_001),
    "ten million empty blocks": _empty_blocks(10_000_000),
    "ten million empty chunks": lambda c: (
        ContainerChecksumInfo(containerID=c).SerializeToString()
        + length_field(2, length_field(2, b"\x1a\x00" * 10_000_000))
    ),
    "garbage tree": lambda _: b"\xff" * 1000,
    "tree cut short": lambda c: encode_tree(_honest(c))[:-1],
}


def _bytes(*messages: bytes) -> Answers:
    return lambda _c, _x: messages


def _agent_tree(make: Callable[[ContainerId], bytes]) -> Answers:
    return lambda c, _: [
        GetContainerHashesResponse(container_checksum_info=make(c)).SerializeToString()
    ]


def _records(*chosen: tuple[int, int]) -> Answers:
    """The records of these blocks (offset of the container ID, block ID)."""

    def answers(container_id: ContainerId, _: grpc.ServicerContext) -> Iterable[bytes]:
        found = [
            replica(ContainerId(container_id + other)).records[BlockId(block)]
            for other, block in chosen
        ]
        return [GetBlockRecordsResponse(block_data=map(record_to_bytes, found)).SerializeToString()]

    return answers


def _never(_: ContainerId, context: grpc.ServicerContext) -> Iterator[bytes]:
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(_AGES_S)
    yield b""


def _then(first: bytes, rest: Answers) -> Answers:
    def answers(container_id: ContainerId, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield first
        yield from rest(container_id, context)

    return answers


def _abort(status: grpc.StatusCode, details: str, *trailers: tuple[str, str | bytes]) -> Answers:
    def answers(_: ContainerId, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_trailing_metadata(trailers)
        context.abort(status, details)

    return answers


def _huge_metadata(_: ContainerId, context: grpc.ServicerContext) -> Iterator[bytes]:
    context.send_initial_metadata((("flood", "x" * (64 << 10)),))
    yield b""


def _gzip_bomb(_: ContainerId, context: grpc.ServicerContext) -> Iterator[bytes]:
    context.set_compression(grpc.Compression.Gzip)
    yield bytes(100 << 20)


def _page(container_id: ContainerId, blocks: bytes, mark: bytes = b"0123456789abcdef") -> bytes:
    page = ContainerHashPage(
        container_id=container_id, blocks=blocks, fingerprint=mark, data_checksum=1
    )
    return page.SerializeToString()


def _part(*block_ids: int) -> bytes:
    return ContainerMerkleTree(
        blockMerkleTree=[_raw_block(i) for i in block_ids]
    ).SerializeToString()


_AWAY = ("peer_unavailable",)
_HUGE = bytes(64 << 20)
_TOO_LARGE = _abort(
    grpc.StatusCode.INTERNAL,
    "ask for pages",
    ("treefold-code", "tree_refused"),
    ("treefold-reason-bin", b"too_large"),
)
# What every kind of answer can be instead of one.
_WRONG_TRANSPORT: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "never answers": (_never, _AWAY),
    "garbage message": (_bytes(b"\xff" * 100), ("remote_protocol",)),
    "message of 64 MiB": (_bytes(_HUGE), ("remote_protocol",)),
    "gzip bomb": (_gzip_bomb, ("remote_protocol", "peer_refused")),
    "metadata of 64 KiB": (_huge_metadata, ("remote_protocol", "peer_unavailable")),
    "unknown error": (_abort(grpc.StatusCode.UNKNOWN, ""), ("peer_refused",)),
    "no such method": (_abort(grpc.StatusCode.UNIMPLEMENTED, "no"), ("peer_refused",)),
    "internal error": (_abort(grpc.StatusCode.INTERNAL, "oops"), ("remote_protocol",)),
    "error with terminal codes": (
        _abort(grpc.StatusCode.NOT_FOUND, "\x1b[2J\x07"),
        ("peer_refused",),
    ),
}
_AGENT_TREE: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "an error's name that is ours": (
        _abort(grpc.StatusCode.ABORTED, "x", ("treefold-code", "interrupted")),
        ("peer_refused",),
    ),
    "an error's name that is nobody's": (
        _abort(grpc.StatusCode.NOT_FOUND, "x", ("treefold-code", "__class__")),
        ("peer_refused",),
    ),
}
_PAGES: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "no pages": (_bytes(), ("remote_protocol",)),
    "garbage page": (_bytes(b"\xff\xff"), ("remote_protocol",)),
    "garbage in a page": (lambda c, _: [_page(c, b"\xff\xff")], ("remote_protocol",)),
    "a page of another container": (
        lambda c, _: [_page(ContainerId(c + 1), _part(1))],
        ("remote_protocol",),
    ),
    "pages of different trees": (
        lambda c, _: [_page(c, _part(1)), _page(c, _part(2), b"z")],
        ("remote_protocol",),
    ),
    "pages out of order": (
        lambda c, _: [_page(c, _part(2)), _page(c, _part(1))],
        ("tree_refused",),
    ),
    "a page twice": (lambda c, _: repeat(_page(c, _part(1)), 2), ("tree_refused",)),
    "wrong root of all pages": (
        lambda c, _: [_page(c, _part(1)), _page(c, _part(2))],
        ("tree_refused",),
    ),
    "endless pages": (
        lambda c, _: (_page(c, _part(i)) + length_field(15, bytes(16 << 20)) for i in count()),
        ("tree_refused",),
    ),
    "pages that stop coming": (
        lambda c, x: _then(_page(c, _part(1)), _never)(c, x),
        _AWAY,
    ),
    "too large as well": (_TOO_LARGE, ("peer_refused",)),
}
_AGENT_RECORDS: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "another block": (_records((0, 21)), ("remote_protocol",)),
    "another container's block": (_records((1, 20)), ("remote_protocol",)),
    "a block twice": (_records((0, 20), (0, 20)), ("remote_protocol",)),
    "garbage record": (
        _bytes(GetBlockRecordsResponse(block_data=[b"\xff"]).SerializeToString()),
        ("remote_protocol",),
    ),
    "empty record": (
        _bytes(GetBlockRecordsResponse(block_data=[b""]).SerializeToString()),
        ("remote_protocol",),
    ),
}


def _agent_record(make: Callable[[ContainerId], bytes]) -> Answers:
    return lambda c, _: [GetBlockRecordsResponse(block_data=[make(c)]).SerializeToString()]


def _datanode_record(make: Callable[[ContainerId], bytes]) -> Answers:
    """A response with this record, which may be none."""

    def answers(container_id: ContainerId, _: grpc.ServicerContext) -> Iterable[bytes]:
        start = Reply(cmdType=Type.GetBlock, result=Result.SUCCESS).SerializeToString()
        return [start + length_field(12, length_field(1, make(container_id)))]

    return answers


def _good_piece(length: int = 64 << 10) -> bytes:
    return encode_piece(0, bytes(length))


_AGENT_READ: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "nothing": (_bytes(), ("peer_refused",)),
    "short data": (_bytes(_good_piece()), ("peer_refused",)),
    "long data": (_bytes(encode_piece(0, bytes(CHUNK_BYTES + 1))), ("remote_protocol",)),
    "one byte more": (
        _bytes(encode_piece(0, bytes(CHUNK_BYTES)), encode_piece(CHUNK_BYTES, b"x")),
        ("remote_protocol",),
    ),
    "endless data": (
        lambda _c, _x: (encode_piece(i * 65536, bytes(65536)) for i in count()),
        ("remote_protocol",),
    ),
    "the same piece for ever": (lambda _c, _x: repeat(_good_piece()), ("remote_protocol",)),
    "endless empty pieces": (lambda _c, _x: repeat(encode_piece(0, b"")), ("remote_protocol",)),
    "endless empty messages": (lambda _c, _x: repeat(b""), ("remote_protocol",)),
    "pieces in the wrong order": (
        _bytes(encode_piece(65536, bytes(65536)), encode_piece(0, bytes(65536))),
        ("remote_protocol",),
    ),
    "an offset of 2^64 - 1": (
        _bytes(WindowPiece(offset=2**64 - 1, data=b"x").SerializeToString()),
        ("remote_protocol",),
    ),
    "a number without end": (_bytes(b"\x08" + b"\xff" * 20 + b"\x12\x01x"), ("remote_protocol",)),
    "a length beyond the message": (_bytes(b"\x08\x00\x12\x7fabc"), ("remote_protocol",)),
    "a piece of two mebibytes": (_bytes(encode_piece(0, bytes(2 << 20))), ("remote_protocol",)),
    "stops half way": (_then(_good_piece(), _never), _AWAY),
    "fails half way": (
        _then(_good_piece(), _abort(grpc.StatusCode.UNKNOWN, "")),
        ("peer_refused",),
    ),
    "gone half way": (_then(_good_piece(), _abort(grpc.StatusCode.UNAVAILABLE, "")), _AWAY),
    "bad bytes": (_bytes(encode_piece(0, bytes(CHUNK_BYTES))), ()),
    "data before the offset": (
        lambda _c, _x: [WindowPiece(data=bytes(CHUNK_BYTES)).SerializeToString() + b"\x08\x00"],
        (),
    ),
}


Reply = ContainerCommandResponseProto


def _reply(
    kind: Type, fill: Callable[[Reply, ContainerId], None], result: Result = Result.SUCCESS
) -> Answers:
    def answers(container_id: ContainerId, _: grpc.ServicerContext) -> Iterable[bytes]:
        reply = Reply(cmdType=kind, traceID="", result=result)
        fill(reply, container_id)
        return [reply.SerializePartialToString()]

    return answers


def _info(
    raw: Callable[[ContainerId], bytes], other: int = 0
) -> Callable[[Reply, ContainerId], None]:
    def fill(reply: Reply, container_id: ContainerId) -> None:
        reply.getContainerChecksumInfo.containerID = container_id + other
        reply.getContainerChecksumInfo.containerChecksumInfo = raw(container_id)

    return fill


def _block(other: int, block_id: int, drop: str = "") -> Callable[[Reply, ContainerId], None]:
    def fill(reply: Reply, container_id: ContainerId) -> None:
        record = replica(ContainerId(container_id + other)).records[BlockId(block_id)]
        reply.getBlock.blockData.CopyFrom(record_to_proto(record))
        if drop:
            reply.getBlock.blockData.ClearField(drop)

    return fill


def _chunk(*buffers: bytes) -> Callable[[Reply, ContainerId], None]:
    def fill(reply: Reply, container_id: ContainerId) -> None:
        answer = reply.readChunk
        answer.blockID.containerID, answer.blockID.localID = container_id, BLOCK
        answer.chunkData.chunkName, answer.chunkData.offset, answer.chunkData.len = "", 0, 0
        answer.chunkData.checksumData.type, answer.chunkData.checksumData.bytesPerChecksum = NONE, 0
        answer.dataBuffers.buffers.extend(buffers)

    return fill


def _listing(*raw: Callable[[ContainerId], bytes], count: int = 1) -> Answers:
    """A page of these records, so many times."""

    def answers(container_id: ContainerId, _: grpc.ServicerContext) -> Iterable[bytes]:
        start = Reply(cmdType=Type.ListBlock, result=Result.SUCCESS).SerializeToString()
        rows = b"".join(length_field(1, make(container_id)) for make in raw)
        return [start + length_field(14, rows * count)]

    return answers


def _blocks(start: int, count: int, other: int = 0) -> Answers:
    """A page of that many blocks without chunks."""

    def answers(container_id: ContainerId, _: grpc.ServicerContext) -> Iterable[bytes]:
        reply = Reply(cmdType=Type.ListBlock, result=Result.SUCCESS)
        for block_id in range(start, start + count):
            row = reply.listBlock.blockData.add()
            row.blockID.containerID, row.blockID.localID = container_id + other, block_id
        return [reply.SerializePartialToString()]

    return answers


def _message(text: str) -> Callable[[Reply, ContainerId], None]:
    def fill(reply: Reply, _: ContainerId) -> None:
        reply.message = text

    return fill


def _nothing(_reply: Reply, _: ContainerId) -> None:
    pass


_TREE, _BLOCK, _READ = Type.GetContainerChecksumInfo, Type.GetBlock, Type.ReadChunk
_FAILED = Result.CONTAINER_INTERNAL_ERROR
_DATANODE_ANY: dict[str, tuple[Answers, tuple[str, ...]]] = {
    "ends without an answer": (_bytes(), ("remote_protocol",)),
    "an empty message": (_bytes(b""), ("remote_protocol",)),
    "the answer to something else": (_reply(Type.Echo, _nothing), ("remote_protocol",)),
}
_DATANODE: dict[Ask, dict[str, tuple[Answers, tuple[str, ...]]]] = {
    Ask.TREE: {
        "no body": (_reply(_TREE, _nothing), ("remote_protocol",)),
        "a body with nothing in it": (
            _reply(_TREE, lambda r, _: r.getContainerChecksumInfo.SetInParent()),
            ("remote_protocol",),
        ),
        "the envelope of another container": (
            _reply(_TREE, _info(lambda c: encode_tree(_honest(c)), other=1)),
            ("remote_protocol",),
        ),
        "an empty tree": (_reply(_TREE, _info(lambda _: b"")), ("peer_refused",)),
        "an error with terminal codes": (
            _reply(_TREE, _message("\x1b[31m"), Result.IO_EXCEPTION),
            ("peer_refused",),
        ),
        "a result that is none": (_bytes(b"\x08\x17\x12\x00\x18\x63"), ("remote_protocol",)),
    },
    Ask.RECORDS: {
        "no body": (_reply(_BLOCK, _nothing), ("remote_protocol",)),
        "another block": (_reply(_BLOCK, _block(0, 21)), ("remote_protocol",)),
        "another container's block": (_reply(_BLOCK, _block(1, 20)), ("remote_protocol",)),
        "a record of nothing": (
            _reply(_BLOCK, _block(0, 20, drop="blockID")),
            ("remote_protocol",),
        ),
        "a record that contradicts itself": (_reply(_BLOCK, _block(0, 20, drop="chunks")), ()),
    },
    Ask.READ: {
        "no body": (_reply(_READ, _nothing), ("remote_protocol",)),
        "short data": (_reply(_READ, _chunk(b"x" * 4096)), ("remote_protocol",)),
        "long data": (_reply(_READ, _chunk(bytes(CHUNK_BYTES), b"x")), ("remote_protocol",)),
        "no data": (_reply(_READ, _chunk()), ("remote_protocol",)),
        "millions of empty pieces": (
            _reply(_READ, lambda r, c: _chunk(*[b""] * 8_000_000)(r, c)),
            ("remote_protocol",),
        ),
        "less on disk each time": (
            _reply(_READ, _message("actual: 3"), _FAILED),
            ("peer_refused",),
        ),
        "more on disk than asked for": (
            _reply(_READ, _message("actual: 999999999"), _FAILED),
            ("peer_refused",),
        ),
        "no number of bytes": (_reply(_READ, _message("actual: -1"), _FAILED), ("peer_refused",)),
        "bad bytes": (_reply(_READ, _chunk(bytes(CHUNK_BYTES))), ()),
        "pieces of any size": (_reply(_READ, _chunk(*[bytes(CHUNK_BYTES // 8)] * 8)), ()),
        "answers without end": (
            lambda c, x: repeat(next(iter(_reply(_READ, _chunk(bytes(CHUNK_BYTES)))(c, x)))),
            (),
        ),
    },
    Ask.LIST: {
        "no body": (_reply(Type.ListBlock, _nothing), ("remote_protocol",)),
        "a page longer than requested": (_blocks(1, 1001), ("remote_protocol",)),
        "one page for ever": (_blocks(1, 1000), ("remote_protocol",)),
        "blocks of another container": (_blocks(1, 2, other=1), ("remote_protocol",)),
        "blocks below 0": (_blocks(-2, 2), ("remote_protocol",)),
        "a block twice in one page": (
            _listing(lambda c: raw_record(c, lambda _: None), count=2),
            ("remote_protocol",),
        ),
        "millions of empty blocks": (
            _listing(lambda _: b"", count=12_000_000),
            ("remote_protocol",),
        ),
        "millions of empty chunks in a list": (_listing(many_chunks), ("remote_protocol",)),
    },
}


def _cases() -> Iterator[Case]:
    for name, make in TREES.items():
        yield Case("agent", Ask.TREE, name, _agent_tree(make), ("tree_refused",))
        yield Case("datanode", Ask.TREE, name, _reply(_TREE, _info(make)), ("tree_refused",))
    agent = {Ask.TREE: _AGENT_TREE, Ask.RECORDS: _AGENT_RECORDS, Ask.READ: _AGENT_READ}
    for name, make in RECORDS.items():
        yield Case("agent", Ask.RECORDS, name, _agent_record(make), ("remote_protocol",))
        # What contradicts itself counts as missing: a disk may be at fault.
        codes = ("remote_protocol",) if name in NOT_ONE_RECORD else ()
        yield Case("datanode", Ask.RECORDS, name, _datanode_record(make), codes)
    for name, (answers, codes) in _DATANODE[Ask.LIST].items():
        yield Case("datanode", Ask.LIST, name, answers, codes)
    for ask in agent:
        for name, (answers, codes) in (agent[ask] | _WRONG_TRANSPORT).items():
            yield Case("agent", ask, name, answers, codes)
        for name, (answers, codes) in (_DATANODE[ask] | _DATANODE_ANY | _WRONG_TRANSPORT).items():
            yield Case("datanode", ask, name, answers, codes)
    for name, (answers, codes) in _PAGES.items():
        yield Case("agent", Ask.TREE, name, _TOO_LARGE, codes, pages=answers)


CASES: dict[ContainerId, Case] = {
    ContainerId(FIRST_CONTAINER + i): case for i, case in enumerate(_cases())
}


def _hashes(raw: bytes, context: grpc.ServicerContext) -> bytes:
    return _first(ContainerId(GetContainerHashesRequest.FromString(raw).container_id), context)


def _block_records(raw: bytes, context: grpc.ServicerContext) -> bytes:
    return _first(ContainerId(GetBlockRecordsRequest.FromString(raw).container_id), context)


def _first(container_id: ContainerId, context: grpc.ServicerContext) -> bytes:
    return next(iter(CASES[container_id].answers(container_id, context)), b"")


def _hash_pages(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    container_id = ContainerId(GetContainerHashPagesRequest.FromString(raw).container_id)
    pages = CASES[container_id].pages
    assert pages
    yield from pages(container_id, context)


def _windows(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
    container_id = ContainerId(ReadWindowsRequest.FromString(raw).container_id)
    yield from CASES[container_id].answers(container_id, context)


def _send(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    for raw in requests:
        container_id = ContainerId(ContainerCommandRequestProto.FromString(raw).containerID)
        answered = False
        for answer in CASES[container_id].answers(container_id, context):
            yield answer
            answered = True
        if not answered:
            return


def main() -> None:
    unlimited = (("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20))
    server = grpc.server(ThreadPoolExecutor(32), options=(*unlimited, ("grpc.so_reuseport", 0)))
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    agent: dict[str, Handler] = {
        "GetContainerHashes": unary(_hashes),
        "GetContainerHashPages": stream(_hash_pages),
        "GetBlockRecords": unary(_block_records),
        "ReadWindows": stream(_windows),
    }
    datanode: dict[str, Handler] = {"send": grpc.stream_stream_rpc_method_handler(_send)}
    server.add_generic_rpc_handlers((
        grpc.method_handlers_generic_handler(AGENT, agent),
        grpc.method_handlers_generic_handler(DATANODE, datanode),
    ))  # fmt: skip
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop(0).wait()


if __name__ == "__main__":
    main()
