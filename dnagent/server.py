"""The agent's gRPC service: trees, records and bytes of its replicas, scans, status.

A shell: it turns messages into calls of three ports and values back into messages.
Errors are raised by name and become statuses in runtime.rpc. Nothing is verified on the
way out; whoever asks compares with the recorded checksums.
"""

import threading
from collections.abc import Iterable, Iterator

import grpc
from google.protobuf.message import DecodeError

from dnagent.ports import ScanService, StatusSource
from merkle.checksum import fingerprint
from merkle.errors import RecordInvalidError, TreeRefusedError
from merkle.limits import BLOCK_BYTES_MAX, MESSAGE_BYTES_MAX
from merkle.tree import BlockId, ContainerId
from ozone.errors import ContainerStateError, TreeMissingError
from ozone.ports import ReplicaSource
from protos.agent_pb2 import (
    ContainerHashPage,
    Finding,
    GetBlockRecordsRequest,
    GetBlockRecordsResponse,
    GetContainerHashesRequest,
    GetContainerHashesResponse,
    GetContainerHashPagesRequest,
    GetStatusRequest,
    GetStatusResponse,
    ReadWindowsRequest,
    ReconciliationStatus,
    ScanContainerRequest,
    ScanContainerResponse,
    VolumeStatus,
)
from protos.convert import record_to_bytes
from protos.ozone_datanode_pb2 import BlockMerkleTree, ContainerChecksumInfo, ContainerMerkleTree
from repair.wire import (
    PIECE_BYTES_MAX,
    RANGES_MAX,
    READ_BYTES_MAX,
    RECORDS_PER_CALL_MAX,
    SERVICE,
    TREE_TOO_LARGE,
    encode_piece,
)
from runtime.errors import UsageError
from runtime.rpc import Handler

# Room in a message for everything that is not its payload.
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - 1024
_PAGE_BLOCKS_DEFAULT = 10_000
# A page ends after the block that reaches this; one block of 65,536 chunks is some 2
# MiB.
_PAGE_BYTES = 4 << 20


class AgentService:
    """Serves one agent's replicas."""

    def __init__(
        self,
        source: ReplicaSource,
        scans: ScanService,
        status: StatusSource,
        *,
        payload_bytes_max: int = _PAYLOAD_BYTES_MAX,
        page_bytes: int = _PAGE_BYTES,
    ) -> None:
        """`payload_bytes_max` bounds one answer; a page of a tree ends with the block
        that fills `page_bytes`.
        """
        self._payload_bytes_max = payload_bytes_max
        self._page_bytes = page_bytes
        self._source = source
        self._scans = scans
        self._status = status

    def register(self, server: grpc.Server) -> None:
        """Serve on this server."""
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers: dict[str, Handler] = {
            "GetContainerHashes": unary(
                self.hashes,
                GetContainerHashesRequest.FromString,
                GetContainerHashesResponse.SerializeToString,
            ),
            "GetContainerHashPages": stream(
                self.hash_pages,
                GetContainerHashPagesRequest.FromString,
                ContainerHashPage.SerializeToString,
            ),
            "GetBlockRecords": unary(
                self.records,
                GetBlockRecordsRequest.FromString,
                GetBlockRecordsResponse.SerializeToString,
            ),
            # Its messages are bytes already.
            "ReadWindows": stream(self.windows, ReadWindowsRequest.FromString, None),
            "ScanContainer": unary(
                self.scan, ScanContainerRequest.FromString, ScanContainerResponse.SerializeToString
            ),
            "GetStatus": unary(
                self.status, GetStatusRequest.FromString, GetStatusResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def hashes(
        self, request: GetContainerHashesRequest, _: grpc.ServicerContext
    ) -> GetContainerHashesResponse:
        """The stored tree, unparsed; TreeRefusedError "too_large" where pages must be
        asked for.
        """
        raw = self._stored_tree(ContainerId(request.container_id))
        if len(raw) > self._payload_bytes_max:
            text = f"the tree of container {request.container_id} has {len(raw)} bytes"
            raise TreeRefusedError(TREE_TOO_LARGE, text, hint="ask for it in pages")
        return GetContainerHashesResponse(container_checksum_info=raw)

    def hash_pages(
        self, request: GetContainerHashPagesRequest, _: grpc.ServicerContext
    ) -> Iterator[ContainerHashPage]:
        """The stored tree in pages, at least one; blocks as they are stored, in the
        stored order.
        """
        raw = self._stored_tree(ContainerId(request.container_id))
        try:
            tree = ContainerChecksumInfo.FromString(raw).containerMerkleTree
        except DecodeError as error:
            text = f"the tree of container {request.container_id} cannot be parsed"
            raise TreeRefusedError("unparsable", text) from error
        page = ContainerHashPage(container_id=request.container_id, fingerprint=fingerprint(raw))
        if tree.HasField("dataChecksum"):
            page.data_checksum = tree.dataChecksum
        blocks_max = request.page_blocks_max or _PAGE_BLOCKS_DEFAULT
        for blocks in _pages(_between(tree.blockMerkleTree, request), blocks_max, self._page_bytes):
            page.blocks = ContainerMerkleTree(blockMerkleTree=blocks).SerializeToString()
            yield page

    def records(
        self, request: GetBlockRecordsRequest, _: grpc.ServicerContext
    ) -> GetBlockRecordsResponse:
        """The records that exist and are valid, in the order asked, as many as fit a
        message.
        """
        if len(request.block_ids) > RECORDS_PER_CALL_MAX:
            raise UsageError(
                f"{len(request.block_ids)} blocks asked for, more than {RECORDS_PER_CALL_MAX}"
            )
        container_id = ContainerId(request.container_id)
        self._source.head(container_id)
        reply, size = GetBlockRecordsResponse(), 0
        for block_id in request.block_ids:
            try:
                record = self._source.record(container_id, BlockId(block_id))
            except RecordInvalidError:
                # Of no use to anybody; our own scan reports it.
                continue
            if record is None:
                continue
            raw = record_to_bytes(record)
            size += len(raw) + 8
            if size > self._payload_bytes_max:
                break
            reply.block_data.append(raw)
        return reply

    def windows(
        self, request: ReadWindowsRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Serialised `WindowPiece`s with the bytes of each range, fewer where the file
        ends.
        """
        asked = sum(one.length_bytes for one in request.ranges)
        if len(request.ranges) > RANGES_MAX or asked > READ_BYTES_MAX:
            raise UsageError(
                f"{asked} bytes in {len(request.ranges)} ranges asked for: too much for one call"
            )
        container_id, block_id = ContainerId(request.container_id), BlockId(request.block_id)
        self._source.head(container_id)
        for one in request.ranges:
            end = min(one.offset + one.length_bytes, BLOCK_BYTES_MAX)
            for offset in range(one.offset, end, PIECE_BYTES_MAX):
                wanted = min(PIECE_BYTES_MAX, end - offset)
                data = self._source.read(container_id, block_id, offset, wanted)
                if data:
                    yield encode_piece(offset, data)
                if len(data) < wanted:
                    break

    def scan(
        self, request: ScanContainerRequest, context: grpc.ServicerContext
    ) -> ScanContainerResponse:
        """Scan now; a caller that goes away cancels it."""
        gone = threading.Event()
        # False where the call has ended already.
        if not context.add_callback(gone.set):
            gone.set()
        report = self._scans.scan(ContainerId(request.container_id), gone.is_set)
        return ScanContainerResponse(
            container_id=report.container_id,
            state=report.state.value,
            data_checksum=report.data_checksum,
            bytes_read=report.bytes_read,
            findings=[
                Finding(type=finding.type, block_id=finding.block_id, offset=finding.offset)
                for finding in report.findings
            ],
        )

    def status(self, _: GetStatusRequest, __: grpc.ServicerContext) -> GetStatusResponse:
        """How the agent is."""
        found = self._status.status()
        return GetStatusResponse(
            datanode_id=found.datanode_id,
            repair_enabled=found.repair_enabled,
            volumes=[
                VolumeStatus(
                    path=volume.path,
                    storage_id=volume.storage_id,
                    hold=volume.hold,
                    containers=volume.containers,
                    bytes_scanned=volume.bytes_scanned,
                    containers_scanned=volume.containers_scanned,
                    last_error=volume.last_error,
                )
                for volume in found.volumes
            ],
            reconciliations=[
                ReconciliationStatus(
                    job_id=one.job_id,
                    container_id=one.container_id,
                    phase=one.phase,
                    windows_written=one.windows_written,
                    bytes_fetched=one.bytes_fetched,
                )
                for one in found.reconciliations
            ],
        )

    def _stored_tree(self, container_id: ContainerId) -> bytes:
        state = self._source.head(container_id).state
        if not state.is_closed:
            raise ContainerStateError(
                f"container {container_id} is {state.value}: it has no tree before it is closed"
            )
        try:
            return self._source.tree_bytes(container_id, build_missing=False)
        except TreeMissingError:
            # The answer is an error, and the reason for it is about to go away.
            self._scans.schedule(container_id)
            raise


def _between(
    blocks: Iterable[BlockMerkleTree], request: GetContainerHashPagesRequest
) -> Iterator[BlockMerkleTree]:
    for block in blocks:
        if request.HasField("first_block_id") and block.blockID < request.first_block_id:
            continue
        if request.HasField("last_block_id") and block.blockID > request.last_block_id:
            continue
        yield block


def _pages(
    blocks: Iterable[BlockMerkleTree], blocks_max: int, page_bytes: int
) -> Iterator[list[BlockMerkleTree]]:
    page: list[BlockMerkleTree] = []
    size, pages = 0, 0
    for block in blocks:
        page.append(block)
        size += block.ByteSize()
        if len(page) >= blocks_max or size >= page_bytes:
            yield page
            page, size, pages = [], 0, pages + 1
    if page or not pages:
        yield page
