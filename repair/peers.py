"""Peers over gRPC: another agent, or an Ozone datanode, behind one port.

Nothing that a peer sends is trusted. A tree is parsed and checked. A record must be for
a requested block, and bytes must lie within a requested range. Whether the bytes are
good is decided later, when they are compared with the recorded checksums.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from merkle.check import check_tree
from merkle.errors import ReconcileError, RecordInvalidError, TreeRefusedError
from merkle.limits import (
    CHUNK_BYTES_MAX,
    RECORDS_BYTES_MAX,
    RECORDS_CHUNKS_MAX,
    TREE_BLOCKS_MAX,
    TREE_BYTES_MAX,
)
from merkle.record import BlockRecord, ChunkRecord
from merkle.replica import PeerId
from merkle.tree import BlockId, BlockTree, ContainerId, ContainerTree
from ozone.datanode_client import READ_BYTES_MAX, DatanodeClient, merge_ranges
from ozone.ports import ByteRange
from protos.agent_pb2 import ByteRange as ByteRangeMessage
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
from protos.convert import record_from_bytes, tree_from_bytes
from protos.ozone_datanode_pb2 import ContainerChecksumInfo, ContainerMerkleTree
from repair.ports import Piece
from repair.wire import (
    PIECE_BYTES_MAX,
    PIECE_HEAD_BYTES_MAX,
    RANGES_MAX,
    RECORDS_PER_CALL_MAX,
    SERVICE,
    TREE_TOO_LARGE,
    decode_piece,
)
from runtime.errors import (
    AccessDeniedError,
    BusyError,
    PeerRefusedError,
    PeerUnavailableError,
    RemoteProtocolError,
)
from runtime.rpc import Deadlines, UnaryCall, UnaryStreamCall, error_from, sent_error

_SHORT = "short_read"
# A parsed block or chunk takes some 60 bytes of memory, however short its encoding. One
# of less than 8 bytes, which Ozone never writes, would only serve to fill memory. Few
# bytes of an honest tree look like one by chance.
_SMALL_PARTS = tuple(bytes((tag, length)) for tag in (0x12, 0x1A) for length in range(8))
_M = TypeVar("_M", bound=Message)


class AgentPeer:
    """A peer that is another Treefold agent; the methods are those of
    repair.ports.Peer.
    """

    def __init__(
        self,
        peer_id: PeerId,
        channel: grpc.Channel,
        target: str,
        *,
        deadlines: Deadlines | None = None,
        explain: Callable[[ReconcileError], ReconcileError] = lambda error: error,
    ) -> None:
        """Takes ownership of `channel`; `target` names the agent in error messages.
        `explain` gets each PeerUnavailableError of the connection, and returns the one
        to raise.
        """
        self.peer_id = peer_id
        self._channel = channel
        self._target = target
        self._deadlines = deadlines or Deadlines()
        self._explain = explain
        # Responses stay bytes here, so that data can be sliced without a copy and an
        # invalid message is reported as such.
        self._hashes: UnaryCall = channel.unary_unary(
            f"/{SERVICE}/GetContainerHashes", GetContainerHashesRequest.SerializeToString, None
        )
        self._pages: UnaryStreamCall = channel.unary_stream(
            f"/{SERVICE}/GetContainerHashPages",
            GetContainerHashPagesRequest.SerializeToString,
            None,
        )
        self._records: UnaryCall = channel.unary_unary(
            f"/{SERVICE}/GetBlockRecords", GetBlockRecordsRequest.SerializeToString, None
        )
        self._windows: UnaryStreamCall = channel.unary_stream(
            f"/{SERVICE}/ReadWindows", ReadWindowsRequest.SerializeToString, None
        )

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """See Peer.tree. A tree larger than one message is fetched in pages."""
        request = GetContainerHashesRequest(container_id=container_id)
        try:
            raw: bytes = self._hashes(request, timeout=self._deadlines.tree_s)
        except grpc.RpcError as error:
            sent = sent_error(error)
            if sent is None or sent.facts.get("reason") != TREE_TOO_LARGE:
                raise self._failed(error) from error
            tree = self._paged_tree(container_id)
        else:
            tree = _parsed(
                self._message(GetContainerHashesResponse, raw).container_checksum_info, container_id
            )
        check_tree(tree)
        return tree

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """See Peer.records."""
        found: dict[BlockId, BlockRecord] = {}
        waiting, budget = list(block_ids), _RecordBudget(self._target, container_id)
        while waiting:
            asked = waiting[:RECORDS_PER_CALL_MAX]
            request = GetBlockRecordsRequest(container_id=container_id, block_ids=asked)
            try:
                raw = self._records(request, timeout=self._deadlines.records_s)
            except grpc.RpcError as error:
                raise self._failed(error) from error
            message = self._message(GetBlockRecordsResponse, raw)
            if not message.block_data:
                waiting = waiting[len(asked) :]
                continue
            turn = {block_id: i for i, block_id in enumerate(asked)}
            last = 0
            for one in message.block_data:
                try:
                    record = record_from_bytes(one)
                except RecordInvalidError as error:
                    raise self._nonsense("sent a record that is none", container_id) from error
                # Only the requested order is accepted, so that no response can make us
                # request the same block again.
                if record.container_id != container_id or turn.get(record.block_id, -1) < last:
                    text = (
                        f"sent block {record.block_id} of container {record.container_id} out of"
                        " turn"
                    )
                    raise self._nonsense(text, container_id)
                budget.spend(record, len(one))
                last = turn[record.block_id] + 1
                found[record.block_id] = record
            # The agent sends as many records as fit a message. The blocks after the
            # last one may have records too.
            waiting = waiting[last:]
        return found

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        """See Peer.read. The pieces arrive in one stream."""
        assert all(
            record_chunk.offset <= one.offset and one.end <= record_chunk.end for one in ranges
        )
        wanted = merge_ranges(ranges, CHUNK_BYTES_MAX)
        assert len(wanted) <= RANGES_MAX
        request = ReadWindowsRequest(
            container_id=container_id,
            block_id=block_id,
            ranges=[
                ByteRangeMessage(offset=one.offset, length_bytes=one.length_bytes) for one in wanted
            ],
        )
        expected, short = list(reversed(wanted)), False
        deadline_s = self._deadlines.read(sum(one.length_bytes for one in wanted))
        call = self._windows(request, timeout=deadline_s)
        try:
            for raw in call:
                piece = self._piece(raw, container_id)
                # After a range that ended early the next one follows.
                while expected and piece.offset != expected[-1].offset:
                    expected.pop()
                    short = True
                if not expected or not piece.data or piece.end > expected[-1].end:
                    raise self._nonsense(
                        f"sent bytes {piece.offset} to {piece.end} unasked", container_id
                    )
                rest = expected.pop()
                if piece.end < rest.end:
                    expected.append(ByteRange(piece.end, rest.end - piece.end))
                yield piece
        except grpc.RpcError as error:
            raise self._failed(error) from error
        finally:
            call.cancel()
        if short or expected:
            raise PeerRefusedError(
                f"{self._target}: its file of block {block_id} ends early", result=_SHORT
            )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _paged_tree(self, container_id: ContainerId) -> ContainerTree:
        """A tree too large for one message, assembled from pages."""
        blocks: list[BlockTree] = []
        size, first = 0, None
        request = GetContainerHashPagesRequest(container_id=container_id)
        call = self._pages(request, timeout=self._deadlines.tree_s)
        try:
            for raw in call:
                page = self._message(ContainerHashPage, raw)
                first = first or page
                size += len(raw)
                if page.container_id != container_id:
                    raise self._nonsense(
                        f"sent a page of container {page.container_id}", container_id
                    )
                if (page.fingerprint, page.data_checksum) != (
                    first.fingerprint,
                    first.data_checksum,
                ):
                    raise self._nonsense("sent pages of different trees", container_id)
                for block in self._page_blocks(page, container_id):
                    if blocks and blocks[-1].block_id >= block.block_id:
                        raise TreeRefusedError(
                            "blocks_unsorted", f"{self._target}: pages overlap or are out of order"
                        )
                    blocks.append(block)
                if size > TREE_BYTES_MAX or len(blocks) > TREE_BLOCKS_MAX:
                    raise TreeRefusedError(
                        "too_large", f"{self._target}: the tree does not end within its limits"
                    )
        except grpc.RpcError as error:
            raise self._failed(error) from error
        finally:
            call.cancel()
        if first is None:
            raise self._nonsense("sent no page of its tree", container_id)
        root = first.data_checksum if first.HasField("data_checksum") else None
        return ContainerTree(container_id, root, tuple(blocks))

    def _page_blocks(
        self, page: ContainerHashPage, container_id: ContainerId
    ) -> Sequence[BlockTree]:
        _check_parts(page.blocks, container_id)
        try:
            part = ContainerMerkleTree.FromString(page.blocks)
        except DecodeError as error:
            raise self._nonsense("sent a page that is none", container_id) from error
        info = ContainerChecksumInfo(containerID=container_id, containerMerkleTree=part)
        return tree_from_bytes(info.SerializeToString(), container_id).blocks

    def _piece(self, raw: bytes, container_id: ContainerId) -> Piece:
        if len(raw) > PIECE_BYTES_MAX + PIECE_HEAD_BYTES_MAX:
            raise self._nonsense(f"sent a piece of {len(raw)} bytes", container_id)
        if piece := decode_piece(raw):
            return piece
        message = self._message(WindowPiece, raw)
        return Piece(message.offset, message.data)

    def _message(self, kind: type[_M], raw: bytes) -> _M:
        try:
            return kind.FromString(raw)
        except DecodeError as error:
            raise RemoteProtocolError(
                f"{self._target} sent bytes that are no {kind.__name__}"
            ) from error

    def _failed(self, error: grpc.RpcError) -> ReconcileError:
        if sent := sent_error(error):
            if isinstance(sent, BusyError):
                # It has its hands full; a healthy peer is not given up for that.
                return PeerUnavailableError(f"{self._target}: {sent.message}")
            if isinstance(sent, AccessDeniedError):
                return AccessDeniedError(f"{self._target}: {sent.message}", hint=sent.hint)
            return PeerRefusedError(
                f"{self._target}: {sent.message}", hint=sent.hint, result=sent.code
            )
        named = error_from(error, target=self._target, unavailable=PeerUnavailableError)
        return self._explain(named) if isinstance(named, PeerUnavailableError) else named

    def _nonsense(self, what: str, container_id: ContainerId) -> RemoteProtocolError:
        return RemoteProtocolError(f"{self._target} {what}", container_id=container_id)


class DatanodePeer:
    """A peer that is an Ozone datanode, or an agent with its protocol; the methods are
    those of repair.ports.Peer.
    """

    def __init__(self, peer_id: PeerId, client: DatanodeClient) -> None:
        self.peer_id = peer_id
        self._client = client

    def tree(self, container_id: ContainerId) -> ContainerTree:
        """See Peer.tree."""
        return checked_tree(self._client.tree_bytes(container_id), container_id)

    def records(
        self, container_id: ContainerId, block_ids: Sequence[BlockId]
    ) -> dict[BlockId, BlockRecord]:
        """See Peer.records."""
        found: dict[BlockId, BlockRecord] = {}
        budget = _RecordBudget(f"datanode {self.peer_id}", container_id)
        for record in self._client.records(container_id, block_ids):
            budget.spend(record, sum(len(chunk.entries) for chunk in record.chunks))
            found[record.block_id] = record
        return found

    def read(
        self,
        container_id: ContainerId,
        block_id: BlockId,
        record_chunk: ChunkRecord,
        ranges: Sequence[ByteRange],
    ) -> Iterator[Piece]:
        """See Peer.read. Ozone reads whole checksum windows."""
        assert all(
            record_chunk.offset <= one.offset and one.end <= record_chunk.end for one in ranges
        )
        wanted, found = merge_ranges(ranges, READ_BYTES_MAX), 0
        for start, parts in self._client.read(container_id, block_id, record_chunk, wanted):
            offset = start.offset
            for part in parts:
                if part:
                    yield Piece(offset, part)
                offset += len(part)
            found += offset - start.offset
        if found < sum(one.length_bytes for one in wanted):
            raise PeerRefusedError(
                f"datanode {self.peer_id}: its file of block {block_id} ends early", result=_SHORT
            )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class _RecordBudget:
    """Bounds the memory that the records of one request can take."""

    def __init__(self, target: str, container_id: ContainerId) -> None:
        self._target = target
        self._container_id = container_id
        self._chunks, self._bytes = RECORDS_CHUNKS_MAX, RECORDS_BYTES_MAX

    def spend(self, record: BlockRecord, length_bytes: int) -> None:
        """Count one record; RemoteProtocolError if the request's are too many."""
        self._chunks -= len(record.chunks)
        self._bytes -= length_bytes
        if min(self._chunks, self._bytes) < 0:
            raise RemoteProtocolError(
                f"{self._target} sent records of more than {RECORDS_CHUNKS_MAX} chunks or"
                f" {RECORDS_BYTES_MAX} bytes for one request",
                container_id=self._container_id,
            )


def checked_tree(raw: bytes, container_id: ContainerId) -> ContainerTree:
    """The tree in a peer's bytes, parsed and checked.

    Raises:
        TreeRefusedError: the tree breaks a rule of merkle.check, or would take too much
            memory.
    """
    tree = _parsed(raw, container_id)
    check_tree(tree)
    return tree


def _parsed(raw: bytes, container_id: ContainerId) -> ContainerTree:
    _check_parts(raw, container_id)
    return tree_from_bytes(raw, container_id)


def _check_parts(raw: bytes, container_id: ContainerId) -> None:
    if len(raw) > 2 * TREE_BLOCKS_MAX and sum(map(raw.count, _SMALL_PARTS)) > TREE_BLOCKS_MAX:
        raise TreeRefusedError(
            "too_large", f"the tree of container {container_id} has millions of empty parts"
        )
