"""The agent's service: what peers do not ask for, and what it refuses to be asked."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import grpc
import pytest

from dnagent.ports import AgentStatus, ReconciliationStatus, ScanFinding, ScanReport, VolumeStatus
from dnagent.server import AgentService
from merkle.checksum import fingerprint
from merkle.columns import encode_tree
from merkle.errors import TreeRefusedError
from merkle.replica import PeerId, ReplicaState
from merkle.tree import BlockId, ContainerId, ContainerTree
from ozone.errors import (
    BlockNotFoundError,
    ContainerNotFoundError,
    ContainerStateError,
    TreeMissingError,
)
from protos.agent_pb2 import (
    ByteRange,
    ContainerHashPage,
    GetBlockRecordsRequest,
    GetContainerHashesRequest,
    GetContainerHashPagesRequest,
    GetStatusRequest,
    ReadWindowsRequest,
    ScanContainerRequest,
    WindowPiece,
)
from protos.ozone_datanode_pb2 import ContainerMerkleTree
from repair.wire import (
    PIECE_BYTES_MAX,
    RANGES_MAX,
    READ_BYTES_MAX,
    RECORDS_PER_CALL_MAX,
    decode_piece,
    encode_piece,
)
from runtime.errors import UsageError
from tests.support.peers import MemoryReplica, MemoryScans, MemorySource, MemoryStatus, replica_of

CONTAINER = ContainerId(12)
STATUS = AgentStatus(
    PeerId("dn-1"),
    True,
    (VolumeStatus("/data/1", "DS-1", "owner", 3, 4096, 2, ""),),
    (ReconciliationStatus("job-1", CONTAINER, "fetching", 5, 20480),),
)


@dataclass
class Call:
    """The part of a call's context that the service uses."""

    callbacks: list[Callable[[], None]] = field(default_factory=list)
    alive: bool = True

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self.alive

    @property
    def context(self) -> grpc.ServicerContext:
        return cast(grpc.ServicerContext, self)


class WatchfulScans(MemoryScans):
    """Remembers whether it was told to stop, before and after the caller went."""

    def __init__(self, source: MemorySource, call: Call) -> None:
        super().__init__(source)
        self._call = call
        self.cancelled: list[bool] = []

    def scan(self, container_id: ContainerId, cancelled: Callable[[], bool]) -> ScanReport:
        self.cancelled.append(cancelled())
        for callback in self._call.callbacks:
            callback()
        self.cancelled.append(cancelled())
        return ScanReport(
            container_id,
            ReplicaState.UNHEALTHY,
            77,
            4096,
            (ScanFinding("CORRUPT_CHUNK", BlockId(20), 0),),
        )


@pytest.fixture
def call() -> Call:
    return Call()


@pytest.fixture
def replica() -> MemoryReplica:
    return replica_of(CONTAINER, dict.fromkeys(range(1, 26), 5) | {100: 3_000_000})


@pytest.fixture
def scans(replica: MemoryReplica, call: Call) -> WatchfulScans:
    return WatchfulScans(MemorySource(replica), call)


@pytest.fixture
def service(replica: MemoryReplica, scans: WatchfulScans) -> AgentService:
    return AgentService(MemorySource(replica), scans, MemoryStatus(STATUS))


def pages(
    service: AgentService, call: Call, request: GetContainerHashPagesRequest
) -> Iterator[ContainerHashPage]:
    """Each page as it was when it was sent."""
    for page in service.hash_pages(request, call.context):
        yield ContainerHashPage.FromString(page.SerializeToString())


def blocks_of(page: ContainerHashPage) -> list[int]:
    return [block.blockID for block in ContainerMerkleTree.FromString(page.blocks).blockMerkleTree]


def test_a_tree_is_served_as_stored(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    """CR-025; even where it is none."""
    replica.tree = b"\x01\x02\x03"
    reply = service.hashes(GetContainerHashesRequest(container_id=CONTAINER), call.context)
    assert reply.container_checksum_info == replica.tree


def test_no_tree_is_an_error_and_a_scan_is_scheduled(
    service: AgentService, replica: MemoryReplica, scans: WatchfulScans, call: Call
) -> None:
    """CR-032."""
    replica.tree = None
    with pytest.raises(TreeMissingError):
        service.hashes(GetContainerHashesRequest(container_id=CONTAINER), call.context)
    with pytest.raises(TreeMissingError):
        list(service.hash_pages(GetContainerHashPagesRequest(container_id=CONTAINER), call.context))
    assert scans.scheduled == [CONTAINER, CONTAINER]


@pytest.mark.parametrize("state", [state for state in ReplicaState if not state.is_closed])
def test_no_tree_before_a_container_is_closed(
    service: AgentService,
    replica: MemoryReplica,
    scans: WatchfulScans,
    call: Call,
    state: ReplicaState,
) -> None:
    """CR-032."""
    replica.state = state
    with pytest.raises(ContainerStateError):
        service.hashes(GetContainerHashesRequest(container_id=CONTAINER), call.context)
    assert scans.scheduled == []


@pytest.mark.parametrize("container_id", [0, -1, 404, 2**63 - 1])
def test_an_unknown_container_is_not_found(
    service: AgentService, call: Call, container_id: int
) -> None:
    """CR-032."""
    for ask in (
        lambda: service.hashes(GetContainerHashesRequest(container_id=container_id), call.context),
        lambda: list(
            service.hash_pages(
                GetContainerHashPagesRequest(container_id=container_id), call.context
            )
        ),
        lambda: service.records(GetBlockRecordsRequest(container_id=container_id), call.context),
        lambda: list(service.windows(ReadWindowsRequest(container_id=container_id), call.context)),
    ):
        with pytest.raises(ContainerNotFoundError):
            ask()


def test_a_tree_beyond_a_message_sends_the_caller_to_pages(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    replica.tree = bytes(33 << 20)
    with pytest.raises(TreeRefusedError) as caught:
        service.hashes(GetContainerHashesRequest(container_id=CONTAINER), call.context)
    assert caught.value.reason == "too_large"
    assert caught.value.hint


def test_pages_hold_all_blocks_once(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    found = list(
        pages(
            service, call, GetContainerHashPagesRequest(container_id=CONTAINER, page_blocks_max=10)
        )
    )
    assert [len(blocks_of(page)) for page in found] == [10, 10, 6]
    assert [block for page in found for block in blocks_of(page)] == [*range(1, 26), 100]
    assert isinstance(replica.tree, bytes)
    assert {page.fingerprint for page in found} == {fingerprint(replica.tree)}
    assert {page.data_checksum for page in found} == {replica.scanned_tree().data_checksum}


def test_pages_can_be_limited_to_a_range_of_blocks(service: AgentService, call: Call) -> None:
    request = GetContainerHashPagesRequest(
        container_id=CONTAINER, first_block_id=5, last_block_id=7
    )
    (page,) = pages(service, call, request)
    assert blocks_of(page) == [5, 6, 7]


def test_an_empty_tree_is_one_empty_page(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    replica.tree = encode_tree(ContainerTree(CONTAINER, None, ()))
    (page,) = pages(service, call, GetContainerHashPagesRequest(container_id=CONTAINER))
    assert blocks_of(page) == []
    assert not page.HasField("data_checksum")


def test_a_tree_that_cannot_be_parsed_has_no_pages(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    replica.tree = b"\x01\x02\x03"
    with pytest.raises(TreeRefusedError) as caught:
        list(service.hash_pages(GetContainerHashPagesRequest(container_id=CONTAINER), call.context))
    assert caught.value.reason == "unparsable"


def test_too_many_blocks_at_a_time_are_refused(service: AgentService, call: Call) -> None:
    ids = range(RECORDS_PER_CALL_MAX)
    assert service.records(
        GetBlockRecordsRequest(container_id=CONTAINER, block_ids=ids), call.context
    ).block_data
    with pytest.raises(UsageError):
        service.records(
            GetBlockRecordsRequest(container_id=CONTAINER, block_ids=[*ids, RECORDS_PER_CALL_MAX]),
            call.context,
        )


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, READ_BYTES_MAX + 1)],
        [(0, READ_BYTES_MAX // 2), (0, READ_BYTES_MAX // 2), (0, 1)],
        [(0, 1)] * (RANGES_MAX + 1),
        [(0, 2**64 - 1)],
    ],
    ids=["one byte too many", "in several ranges", "one range too many", "all there is"],
)
def test_too_much_at_a_time_is_refused(
    service: AgentService, call: Call, ranges: list[tuple[int, int]]
) -> None:
    request = ReadWindowsRequest(
        container_id=CONTAINER,
        block_id=100,
        ranges=[ByteRange(offset=o, length_bytes=n) for o, n in ranges],
    )
    with pytest.raises(UsageError):
        next(service.windows(request, call.context))


def test_a_range_comes_in_pieces_that_protobuf_can_read(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    request = ReadWindowsRequest(
        container_id=CONTAINER, block_id=100, ranges=[ByteRange(offset=5, length_bytes=2_500_000)]
    )
    messages = [WindowPiece.FromString(raw) for raw in service.windows(request, call.context)]
    assert [message.offset for message in messages] == [
        5,
        5 + PIECE_BYTES_MAX,
        5 + 2 * PIECE_BYTES_MAX,
    ]
    assert (
        b"".join(message.data for message in messages) == replica.files[BlockId(100)][5:2_500_005]
    )


@pytest.mark.parametrize("offset", [3_000_000, 2**40, 2**63, 2**64 - 1])
def test_beyond_the_end_there_is_nothing(service: AgentService, call: Call, offset: int) -> None:
    request = ReadWindowsRequest(
        container_id=CONTAINER, block_id=100, ranges=[ByteRange(offset=offset, length_bytes=100)]
    )
    assert list(service.windows(request, call.context)) == []


def test_a_block_without_file_is_not_found(
    service: AgentService, replica: MemoryReplica, call: Call
) -> None:
    del replica.files[BlockId(100)]
    request = ReadWindowsRequest(
        container_id=CONTAINER, block_id=100, ranges=[ByteRange(offset=0, length_bytes=1)]
    )
    with pytest.raises(BlockNotFoundError):
        list(service.windows(request, call.context))


@pytest.mark.parametrize("offset", [0, 1, 127, 128, 2**32, 2**63])
@pytest.mark.parametrize("data", [b"x", b"y" * 127, b"z" * 128, bytes(1 << 20)], ids=len)
def test_a_piece_is_an_ordinary_message(offset: int, data: bytes) -> None:
    raw = encode_piece(offset, data)
    assert WindowPiece.FromString(raw) == WindowPiece(offset=offset, data=data)
    for laid_out in (raw, WindowPiece(offset=offset, data=data).SerializeToString()):
        piece = decode_piece(laid_out)
        assert piece is not None
        assert (piece.offset, bytes(piece.data)) == (offset, data)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x08",
        b"\x08\x80",
        b"\x12",
        b"\x12\x05abc",
        b"\x12\x01ab",
        b"\x08" + b"\xff" * 30,
        b"\x1a\x01x",
    ],
)
def test_what_is_laid_out_in_another_way_is_left_to_protobuf(raw: bytes) -> None:
    assert decode_piece(raw) is None


def test_a_scan_answers_with_what_it_found(
    service: AgentService, scans: WatchfulScans, call: Call
) -> None:
    """Once the caller has gone it is told to stop."""
    reply = service.scan(ScanContainerRequest(container_id=CONTAINER), call.context)
    assert (reply.state, reply.data_checksum, reply.bytes_read) == ("UNHEALTHY", 77, 4096)
    assert [(f.type, f.block_id, f.offset) for f in reply.findings] == [("CORRUPT_CHUNK", 20, 0)]
    assert scans.cancelled == [False, True]


def test_a_scan_for_nobody_is_told_to_stop_at_once(
    service: AgentService, scans: WatchfulScans, call: Call
) -> None:
    call.alive = False
    service.scan(ScanContainerRequest(container_id=CONTAINER), call.context)
    assert scans.cancelled[0]


def test_status_tells_all(service: AgentService, call: Call) -> None:
    reply = service.status(GetStatusRequest(), call.context)
    assert (reply.datanode_id, reply.repair_enabled) == ("dn-1", True)
    (volume,), (job,) = reply.volumes, reply.reconciliations
    assert (volume.path, volume.storage_id, volume.hold, volume.containers) == (
        "/data/1",
        "DS-1",
        "owner",
        3,
    )
    assert (volume.bytes_scanned, volume.containers_scanned, volume.last_error) == (4096, 2, "")
    assert (job.job_id, job.container_id, job.phase) == ("job-1", 12, "fetching")
    assert (job.windows_written, job.bytes_fetched) == (5, 20480)
