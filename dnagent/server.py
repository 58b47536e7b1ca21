"""The agent's gRPC service: trees, records and bytes of its replicas, scans, status.

The service converts messages into calls of three ports, and results into messages.
runtime.rpc converts errors into statuses. Data is sent unverified; the caller compares
it with the recorded checksums.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

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
    Limit,
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
from runtime.read_limits import ReadLimits
from runtime.rpc import Handler

# Leaves room in a message for the fields beside the payload.
_PAYLOAD_BYTES_MAX = MESSAGE_BYTES_MAX - 1024
_PAGE_BLOCKS_DEFAULT = 10_000
# A page ends after the block that reaches this size. One block of 65,536 chunks has
# about 2 MiB.
_PAGE_BYTES = 4 << 20


class AgentService:
    """The Agent service of one datanode's replicas."""

    def __init__(
        self,
        source: ReplicaSource,
        scans: ScanService,
        status: StatusSource,
        *,
        limits: ReadLimits | None = None,
        payload_bytes_max: int = _PAYLOAD_BYTES_MAX,
        page_bytes: int = _PAGE_BYTES,
    ) -> None:
        """`limits` are those of reads; by default there are none. `payload_bytes_max`
        bounds one response. A page of a tree ends with the block that fills
        `page_bytes`.
        """
        self._limits = limits
        self._payload_bytes_max = payload_bytes_max
        self._page_bytes = page_bytes
        self._source = source
        self._scans = scans
        self._status = status

    def register(self, server: grpc.Server) -> None:
        """Add the service to this server."""
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
            # No serializer: its messages are already bytes.
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
        """Return the stored tree, unparsed.

        Raises:
            TreeRefusedError: "too_large"; the tree must be requested in pages.
            ContainerNotFoundError: the container is not on this datanode.
            ContainerStateError: the container is not closed.
            TreeMissingError: no tree is stored; a scan that builds it is scheduled.
        """
        raw = self._stored_tree(ContainerId(request.container_id))
        if len(raw) > self._payload_bytes_max:
            text = f"the tree of container {request.container_id} has {len(raw)} bytes"
            raise TreeRefusedError(TREE_TOO_LARGE, text, hint="request it in pages")
        return GetContainerHashesResponse(container_checksum_info=raw)

    def hash_pages(
        self, request: GetContainerHashPagesRequest, _: grpc.ServicerContext
    ) -> Iterator[ContainerHashPage]:
        """Yield the stored tree in one or more pages, with blocks in the stored order.

        Raises:
            TreeRefusedError: "unparsable"; the stored tree cannot be parsed.
            ContainerNotFoundError, ContainerStateError, TreeMissingError: as `hashes`.
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
        """Return the valid records among the requested ones, in the requested order, up
        to the size of a message.

        Raises:
            UsageError: more than `RECORDS_PER_CALL_MAX` blocks are requested.
            ContainerNotFoundError: the container is not on this datanode.
        """
        if len(request.block_ids) > RECORDS_PER_CALL_MAX:
            raise UsageError(
                f"{len(request.block_ids)} blocks requested, more than {RECORDS_PER_CALL_MAX}"
            )
        container_id = ContainerId(request.container_id)
        self._source.head(container_id)
        reply, size = GetBlockRecordsResponse(), 0
        for block_id in request.block_ids:
            try:
                record = self._source.record(container_id, BlockId(block_id))
            except RecordInvalidError:
                # An invalid record is useless to the caller; our scan reports it.
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
        """Yield serialised `WindowPiece`s with the bytes of each range; fewer bytes if
        the file ends.

        Raises:
            UsageError: more than `RANGES_MAX` ranges or `READ_BYTES_MAX` bytes are
                requested.
            ContainerNotFoundError: the container or the block is not on this datanode.
            DiskError: the file cannot be read.
        """
        requested = sum(one.length_bytes for one in request.ranges)
        if len(request.ranges) > RANGES_MAX or requested > READ_BYTES_MAX:
            raise UsageError(
                f"{requested} bytes in {len(request.ranges)} ranges exceed the limit of a call"
            )
        container_id, block_id = ContainerId(request.container_id), BlockId(request.block_id)
        self._source.head(container_id)
        for one in request.ranges:
            end = min(one.offset + one.length_bytes, BLOCK_BYTES_MAX)
            for offset in range(one.offset, end, PIECE_BYTES_MAX):
                wanted = min(PIECE_BYTES_MAX, end - offset)
                with self._limits.admitted(context, wanted) if self._limits else nullcontext():
                    data = self._source.read(container_id, block_id, offset, wanted)
                    if data:
                        yield encode_piece(offset, data)
                if len(data) < wanted:
                    break

    def scan(
        self, request: ScanContainerRequest, context: grpc.ServicerContext
    ) -> ScanContainerResponse:
        """Scan now (ScanService.scan). The end of the call cancels the scan."""
        ended = threading.Event()
        # False if the call has already ended.
        if not context.add_callback(ended.set):
            ended.set()
        report = self._scans.scan(ContainerId(request.container_id), ended.is_set)
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
        """Return the agent's status."""
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
                    scan_bytes_per_second=volume.scan_bytes_per_second,
                    full_scan_age_s=volume.full_scan_age_s,
                    never_scanned=volume.never_scanned,
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
            limits=[
                Limit(
                    name=limit.name,
                    value=limit.value,
                    set_by=limit.set_by,
                    set_at_s=limit.set_at_s,
                )
                for limit in found.limits
            ],
            repair_bytes_per_second=found.repair_bytes_per_second,
            fault=found.fault,
            roles_enforced=found.roles_enforced,
        )

    def _stored_tree(self, container_id: ContainerId) -> bytes:
        state = self._source.head(container_id).state
        if not state.is_closed:
            raise ContainerStateError(
                f"container {container_id} is {state.value}: only a closed container has a tree"
            )
        try:
            return self._source.tree_bytes(container_id, build_missing=False)
        except TreeMissingError:
            # The next request finds a tree.
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
