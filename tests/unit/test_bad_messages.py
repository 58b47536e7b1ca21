"""Messages that no honest client sends, over real sockets to all three services: each
gets its error by name.

Behind them are a real agent that reads a real volume, and a real controller. After
every message the volume and the controller's state are what they were, no thread has
died of it, and the next honest question is answered.
"""

import gzip
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf.message import Message

from dnagent.agent import Agent
from dnagent.config import AgentConfig, ScanSettings, VolumeSettings
from merkle.limits import MESSAGE_BYTES_MAX
from merkle.replica import PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone import datanode
from protos import agent_pb2 as ap
from protos import controller_pb2 as cp
from protos.ozone_datanode_pb2 import (
    ContainerCommandRequestProto,
    ContainerCommandResponseProto,
    DatanodeBlockID,
    EchoRequestProto,
    GetBlockRequestProto,
    GetContainerChecksumInfoRequestProto,
    ListBlockRequestProto,
    ReadChunkRequestProto,
    Result,
    Type,
)
from repair import wire
from repair.peers import AgentPeer
from runtime.rpc import Deadlines, StreamCall, UnaryStreamCall, open_channel, sent_error
from scm import server as controller
from scm.config import ControllerConfig
from scm.messages import PROGRESS_MAX
from scm.server import ControllerServer
from tests.support.bad_input import unchanged
from tests.support.handmade import VolumeMaker, chunk_record, some_bytes

AGENT, XCEIVER, CONTROLLER = wire.SERVICE, datanode.SERVICE, controller.SERVICE
MAX, MIN, UNSIGNED = (1 << 63) - 1, -(1 << 63), (1 << 64) - 1
DATA = some_bytes(3000)
CALL_S = 20.0


@dataclass(frozen=True)
class Services:
    """What is asked, and what must not change by it."""

    volume: Path
    state: Path
    agent: str
    controller: str

    def address(self, service: str) -> str:
        return self.controller if service == CONTROLLER else self.agent


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    folder = tmp_path_factory.mktemp("services")
    with VolumeMaker(folder / "volume") as made:
        made.container(1)
        made.block(1, 20, (chunk_record(DATA), DATA))
        made.container(2, state=ReplicaState.OPEN)
    config = AgentConfig(
        volumes=(VolumeSettings(path=folder / "volume"),),
        state_folder=folder / "agent",
        listen="127.0.0.1:0",
        scan=ScanSettings(enabled=False),
    )
    running = Agent(config)
    running.start()
    server = ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=folder / "scm"))
    yield Services(folder / "volume", folder / "scm", running.address, server.address)
    server.stop()
    running.stop()


def answer(address: str, path: str, raw: bytes) -> str:
    """How a call with these bytes ends: "OK", the code of the error that the service
    names, or gRPC's status.
    """
    # Not by our own channel: it would not send what is too large.
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call: UnaryStreamCall = channel.unary_stream(path, None, None)
        try:
            for _ in call(raw, timeout=CALL_S):
                pass
        except grpc.RpcError as error:
            named = sent_error(error)
            return named.code if named else error.code().name
    return "OK"


def sent(message: Message) -> bytes:
    return message.SerializePartialToString()


GARBAGE = b"\xff\xfe no message"
TOO_LARGE = b"\x7a" + b"\x80\x80\x80\x10" + bytes(MESSAGE_BYTES_MAX)


def hashes(number: int) -> bytes:
    return sent(ap.GetContainerHashesRequest(container_id=number))


def windows(*ranges: tuple[int, int], container_id: int = 1, block_id: int = 20) -> bytes:
    asked = [ap.ByteRange(offset=offset, length_bytes=length) for offset, length in ranges]
    return sent(ap.ReadWindowsRequest(container_id=container_id, block_id=block_id, ranges=asked))


def records(*block_ids: int, container_id: int = 1) -> bytes:
    return sent(ap.GetBlockRecordsRequest(container_id=container_id, block_ids=block_ids))


def heartbeat(
    *,
    node: str = "dn-1",
    address: str = "127.0.0.1:1",
    incarnation: str = "1",
    report: cp.ContainerReport | None = None,
    progress: Sequence[cp.ReconcileProgress] = (),
    acknowledged: Sequence[str] = (),
) -> bytes:
    return sent(
        cp.HeartbeatRequest(
            datanode=cp.Datanode(datanode_id=node, address=address),
            incarnation=incarnation,
            report=report,
            progress=progress,
            acknowledged_command_ids=acknowledged,
        )
    )


def reporting(
    container_id: int = 1, state: str = "CLOSED", replica_index: int = 0, fingerprint: bytes = b""
) -> bytes:
    one = cp.ReplicaReport(
        container_id=container_id, state=state, replica_index=replica_index, fingerprint=fingerprint
    )
    return heartbeat(report=cp.ContainerReport(full=True, replicas=[one]))


def progressing(job_id: str = "job", state: str = "running", verdict: str = "") -> bytes:
    return heartbeat(progress=[cp.ReconcileProgress(job_id=job_id, state=state, verdict=verdict)])


def reconciling(
    *container_ids: int, all_diverged: bool = False, reason: str = "", requested_by: str = ""
) -> bytes:
    return sent(
        cp.ReconcileRequest(
            container_ids=container_ids,
            all_diverged=all_diverged,
            reason=reason,
            requested_by=requested_by,
        )
    )


# Service, method, bytes, how the call ends.
CALLS: list[tuple[str, str, str, bytes, str]] = [
    ("a service nobody has", "treefold.Nothing", "Get", b"", "UNIMPLEMENTED"),
    ("a method nobody has", AGENT, "DeleteEverything", b"", "UNIMPLEMENTED"),
    ("a method of dots", AGENT, "../Heartbeat", b"", "UNIMPLEMENTED"),
    ("garbage for a tree", AGENT, "GetContainerHashes", GARBAGE, "usage"),
    ("half a number for a tree", AGENT, "GetContainerHashes", b"\x08\xff", "usage"),
    ("an endless number for a tree", AGENT, "GetContainerHashes", b"\x08" + b"\xff" * 11, "usage"),
    ("32 MiB and a byte for a tree", AGENT, "GetContainerHashes", TOO_LARGE, "RESOURCE_EXHAUSTED"),
    ("the tree of nothing", AGENT, "GetContainerHashes", b"", "container_not_found"),
    ("the tree of a text", AGENT, "GetContainerHashes", b"\x0a\x011", "container_not_found"),
    ("the tree of container 0", AGENT, "GetContainerHashes", hashes(0), "container_not_found"),
    ("the tree of container -1", AGENT, "GetContainerHashes", hashes(-1), "container_not_found"),
    ("the tree of container 2^63-1", AGENT, "GetContainerHashes", hashes(MAX),
    "container_not_found"),
    ("the tree of container -2^63", AGENT, "GetContainerHashes", hashes(MIN),
    "container_not_found"),
    ("the tree of an open container", AGENT, "GetContainerHashes", hashes(2), "container_state"),
    ("garbage for pages", AGENT, "GetContainerHashPages", GARBAGE, "usage"),
    ("pages of container -1", AGENT, "GetContainerHashPages", hashes(-1), "container_not_found"),
    ("pages of an open container", AGENT, "GetContainerHashPages", hashes(2), "container_state"),
    ("garbage for records", AGENT, "GetBlockRecords", GARBAGE, "usage"),
    ("1001 records", AGENT, "GetBlockRecords", records(*range(1001)), "usage"),
    ("records of container -1", AGENT, "GetBlockRecords", records(20, container_id=-1),
    "container_not_found"),
    ("records of blocks that cannot be", AGENT, "GetBlockRecords", records(-1, 0, MAX, MIN), "OK"),
    ("garbage for windows", AGENT, "ReadWindows", GARBAGE, "usage"),
    ("windows of 64 MiB and a byte", AGENT, "ReadWindows", windows((0, (64 << 20) + 1)), "usage"),
    ("windows that overflow a sum", AGENT, "ReadWindows", windows((0, UNSIGNED), (0, 2)), "usage"),
    ("32,769 windows", AGENT, "ReadWindows", windows(*[(0, 1)] * 32_769), "usage"),
    ("windows of block -1", AGENT, "ReadWindows", windows((0, 1), block_id=-1), "block_not_found"),
    ("windows of block -2^63", AGENT, "ReadWindows", windows((0, 1), block_id=MIN),
    "block_not_found"),
    ("windows of container 0", AGENT, "ReadWindows", windows((0, 1), container_id=0),
    "container_not_found"),
    ("windows at 2^64-1", AGENT, "ReadWindows", windows((UNSIGNED, 1), (1 << 63, 1)), "OK"),
    ("windows of no bytes", AGENT, "ReadWindows", windows((0, 0), (UNSIGNED, 0)), "OK"),
    ("garbage for a scan", AGENT, "ScanContainer", GARBAGE, "usage"),
    ("a scan of container 0", AGENT, "ScanContainer", hashes(0), "container_not_found"),
    ("a scan of container 2^63-1", AGENT, "ScanContainer", hashes(MAX), "container_not_found"),
    ("garbage for a status", AGENT, "GetStatus", GARBAGE, "usage"),
    ("a heartbeat of garbage", CONTROLLER, "Heartbeat", GARBAGE, "usage"),
    ("a heartbeat of nothing", CONTROLLER, "Heartbeat", b"", "usage"),
    ("a heartbeat of 32 MiB and a byte", CONTROLLER, "Heartbeat", TOO_LARGE, "RESOURCE_EXHAUSTED"),
    ("a datanode that is no text", CONTROLLER, "Heartbeat", b"\x0a\x03\x0a\x01\xff", "usage"),
    ("a datanode without a name", CONTROLLER, "Heartbeat", heartbeat(node=""), "usage"),
    ("a datanode of 301 letters", CONTROLLER, "Heartbeat", heartbeat(node="d" * 301), "usage"),
    ("a datanode of two lines", CONTROLLER, "Heartbeat", heartbeat(node="dn\n1"), "usage"),
    ("a datanode that rings", CONTROLLER, "Heartbeat", heartbeat(node="dn\x07"), "usage"),
    ("a datanode with a NUL", CONTROLLER, "Heartbeat", heartbeat(node="dn\0"), "usage"),
    ("a datanode without address", CONTROLLER, "Heartbeat", heartbeat(address=""), "usage"),
    ("a datanode without port", CONTROLLER, "Heartbeat", heartbeat(address="127.0.0.1"), "usage"),
    ("a datanode at port 99999", CONTROLLER, "Heartbeat", heartbeat(address="127.0.0.1:99999"),
    "usage"),
    ("no incarnation", CONTROLLER, "Heartbeat", heartbeat(incarnation=""), "usage"),
    ("a replica of container 0", CONTROLLER, "Heartbeat", reporting(0), "usage"),
    ("a replica of container -1", CONTROLLER, "Heartbeat", reporting(-1), "usage"),
    ("a fingerprint of 65 bytes", CONTROLLER, "Heartbeat", reporting(fingerprint=bytes(65)),
    "usage"),
    ("a replica of container -2^63", CONTROLLER, "Heartbeat", reporting(MIN), "usage"),
    ("a replica without a state", CONTROLLER, "Heartbeat", reporting(state=""), "usage"),
    ("a replica in state closed", CONTROLLER, "Heartbeat", reporting(state="closed"), "usage"),
    ("a replica of index -1", CONTROLLER, "Heartbeat", reporting(replica_index=-1), "usage"),
    (
        "container -1 removed",
        CONTROLLER,
        "Heartbeat",
        heartbeat(report=cp.ContainerReport(removed_container_ids=[-1])),
        "usage",
    ),
    ("progress of no job", CONTROLLER, "Heartbeat", progressing(job_id=""), "usage"),
    ("progress in no state", CONTROLLER, "Heartbeat", progressing(state="perfect"), "usage"),
    ("progress of no verdict", CONTROLLER, "Heartbeat", progressing(verdict="GUILTY"), "usage"),
    ("too much confirmed", CONTROLLER, "Heartbeat",
    heartbeat(acknowledged=["x"] * (PROGRESS_MAX + 1)), "usage"),
    ("garbage for a list", CONTROLLER, "ListContainers", GARBAGE, "usage"),
    ("a list of no state", CONTROLLER, "ListContainers",
    sent(cp.ListContainersRequest(state="open")), "usage"),
    ("a list of no result", CONTROLLER, "ListContainers",
    sent(cp.ListContainersRequest(comparison="same")), "usage"),
    ("a list after -2^63", CONTROLLER, "ListContainers",
    sent(cp.ListContainersRequest(after_container_id=MIN)), "OK"),
    ("garbage for containers", CONTROLLER, "GetContainers", GARBAGE, "usage"),
    ("container 0", CONTROLLER, "GetContainers", sent(cp.GetContainersRequest(container_ids=[0])),
    "usage"),
    ("container -1", CONTROLLER, "GetContainers",
    sent(cp.GetContainersRequest(container_ids=[1, -1])), "usage"),
    ("1001 containers", CONTROLLER, "GetContainers",
    sent(cp.GetContainersRequest(container_ids=range(1, 1002))),
     "usage"),
    ("garbage to reconcile", CONTROLLER, "Reconcile", GARBAGE, "usage"),
    ("some and all to reconcile", CONTROLLER, "Reconcile", reconciling(1, all_diverged=True),
    "usage"),
    ("container -1 to reconcile", CONTROLLER, "Reconcile", reconciling(1, -1), "usage"),
    ("10,001 to reconcile", CONTROLLER, "Reconcile", reconciling(*range(1, 10_002)), "usage"),
    ("a reason of two lines", CONTROLLER, "Reconcile", reconciling(1, reason="a\nb"), "usage"),
    ("a reason of 1001 letters", CONTROLLER, "Reconcile", reconciling(1, reason="x" * 1001),
    "usage"),
    ("a requester that clears the screen", CONTROLLER, "Reconcile", reconciling(1,
     requested_by="\x1b[2J"), "usage"),
    ("jobs in no state", CONTROLLER, "ListJobs", sent(cp.ListJobsRequest(state="BUSY")), "usage"),
    ("garbage for a job", CONTROLLER, "GetJob", GARBAGE, "usage"),
    ("no job", CONTROLLER, "GetJob", b"", "job_not_found"),
    ("a job that is a path", CONTROLLER, "GetJob", sent(cp.GetJobRequest(job_id="../jobs")),
    "job_not_found"),
    ("a job that is a statement", CONTROLLER, "GetJob",
    sent(cp.GetJobRequest(job_id="' OR 1=1 --")), "job_not_found"),
    ("a job of 100,000 letters", CONTROLLER, "GetJob", sent(cp.GetJobRequest(job_id="x" * 100_000)),
    "job_not_found"),
    ("a job with a NUL", CONTROLLER, "CancelJob", sent(cp.CancelJobRequest(job_id="x\0")),
    "job_not_found"),
    ("a scan of container -1", CONTROLLER, "Scan", sent(cp.ScanRequest(container_ids=[-1])),
    "usage"),
    ("10,001 scans", CONTROLLER, "Scan", sent(cp.ScanRequest(container_ids=range(1, 10_002))),
    "usage"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("service", "method", "raw", "ends"), [pytest.param(*rest, id=name) for name, *rest in CALLS]
)
def test_a_message_that_cannot_be_meant_gets_its_error(
    services: Services,
    caplog: pytest.LogCaptureFixture,
    service: str,
    method: str,
    raw: bytes,
    ends: str,
) -> None:
    with unchanged(services.volume), unchanged(services.state), caplog.at_level(logging.ERROR):
        assert answer(services.address(service), f"/{service}/{method}", raw) == ends
    # What a service did not foresee, gRPC logs with its traceback.
    assert caplog.records == []
    assert answer(services.agent, f"/{AGENT}/GetStatus", b"") == "OK"
    assert answer(services.controller, f"/{CONTROLLER}/ListJobs", b"") == "OK"


def test_a_message_in_a_foreign_encoding_is_refused(services: Services) -> None:
    """What is never inflated cannot be a bomb."""
    with grpc.insecure_channel(services.agent, compression=grpc.Compression.Gzip) as channel:
        call: UnaryStreamCall = channel.unary_stream(f"/{AGENT}/GetStatus", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(gzip.compress(bytes(1 << 20)) * 100, timeout=CALL_S))
    assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


Request = ContainerCommandRequestProto
BLOCK = DatanodeBlockID(containerID=1, localID=20)


def command(kind: Type, container_id: int = 1, **bodies: Message) -> bytes:
    request = Request(cmdType=kind, containerID=container_id, datanodeUuid="dn", **bodies)
    return request.SerializePartialToString()


def read(
    offset: int = 0, length: int = 10, *, window: int = 1024, block_id: int = 20, kind: int = 2
) -> bytes:
    body = ReadChunkRequestProto(blockID=DatanodeBlockID(containerID=1, localID=block_id))
    body.chunkData.chunkName, body.chunkData.offset, body.chunkData.len = "x", offset, length
    body.chunkData.checksumData.bytesPerChecksum = window
    setattr(body.chunkData.checksumData, "type", kind)  # noqa: B010 - the stub wants one of its constants
    return command(Type.ReadChunk, readChunk=body)


def get_block(block_id: int, *, commit: int = 0, container_id: int = 1) -> bytes:
    asked = DatanodeBlockID(containerID=1, localID=block_id, blockCommitSequenceId=commit)
    return command(Type.GetBlock, container_id, getBlock=GetBlockRequestProto(blockID=asked))


def tree_of(container_id: int) -> bytes:
    body = GetContainerChecksumInfoRequestProto(containerID=container_id)
    return command(Type.GetContainerChecksumInfo, container_id, getContainerChecksumInfo=body)


def echo(size: int) -> bytes:
    return command(Type.Echo, echo=EchoRequestProto(payloadSizeResp=size))


def list_block(count: int, start: int | None = None) -> bytes:
    return command(Type.ListBlock, listBlock=ListBlockRequestProto(count=count, startLocalID=start))


WRITES = (
    Type.CreateContainer, Type.UpdateContainer, Type.DeleteContainer, Type.PutBlock,
    Type.DeleteBlock,
    Type.DeleteChunk, Type.WriteChunk, Type.PutSmallFile, Type.CloseContainer, Type.FinalizeBlock,
)  # fmt: skip
REQUESTS: list[tuple[str, bytes, str]] = [
    ("garbage", GARBAGE, "UNKNOWN"),
    ("nothing", b"", "UNKNOWN"),
    ("no datanode", sent(Request(cmdType=Type.Echo, containerID=1)), "UNKNOWN"),
    ("a command that nobody knows", b"\x08\xe7\x07" + command(Type.Echo)[2:], "UNKNOWN"),
    ("a block without its ID", command(Type.GetBlock, getBlock=GetBlockRequestProto()), "UNKNOWN"),
    ("a chunk without its place", command(Type.ReadChunk,
     readChunk=ReadChunkRequestProto(blockID=BLOCK)), "UNKNOWN"),
    ("a chunk of a checksum that nobody knows", read().replace(b"\x08\x02\x10\x80\x08",
     b"\x08\x63\x10\x80\x08"),
     "UNKNOWN"),
    ("32 MiB and a byte", TOO_LARGE, "RESOURCE_EXHAUSTED"),
    ("a command without its body", command(Type.GetBlock), "MALFORMED_REQUEST"),
    ("a command with the body of another", command(Type.Echo,
     getBlock=GetBlockRequestProto(blockID=BLOCK)),
     "MALFORMED_REQUEST"),
    ("the tree of container 0", tree_of(0), "CONTAINER_NOT_FOUND"),
    ("the tree of container -1", tree_of(-1), "CONTAINER_NOT_FOUND"),
    ("the tree of container -2^63", tree_of(MIN), "CONTAINER_NOT_FOUND"),
    ("the tree of container 2^63-1", tree_of(MAX), "CONTAINER_NOT_FOUND"),
    ("the tree of an open container", tree_of(2), "UNCLOSED_CONTAINER_IO"),
    ("block -1", get_block(-1), "NO_SUCH_BLOCK"),
    ("block -2^63", get_block(MIN), "NO_SUCH_BLOCK"),
    ("block 2^63-1", get_block(MAX), "NO_SUCH_BLOCK"),
    ("a block of container -1", get_block(20, container_id=-1), "CONTAINER_NOT_FOUND"),
    ("a commit of 2^64-1", get_block(20, commit=UNSIGNED), "UNKNOWN_BCSID"),
    ("a list of no blocks", list_block(0), "CONTAINER_INTERNAL_ERROR"),
    ("a list of 2^32-1 blocks", list_block((1 << 32) - 1), "SUCCESS"),
    ("a list from -2^63", list_block(1, MIN), "SUCCESS"),
    ("a read at 2^63", read(1 << 63), "CONTAINER_INTERNAL_ERROR"),
    ("a read at 2^64-1", read(UNSIGNED), "CONTAINER_INTERNAL_ERROR"),
    ("a read of 2^64-1 bytes", read(0, UNSIGNED), "UNSUPPORTED_REQUEST"),
    ("a read of 32 MiB and a byte", read(0, MESSAGE_BYTES_MAX + 1), "UNSUPPORTED_REQUEST"),
    ("a read beyond the end", read(2999, 2), "CONTAINER_INTERNAL_ERROR"),
    ("a read of block -1", read(block_id=-1), "UNABLE_TO_FIND_CHUNK"),
    ("a read in windows of 0 bytes", read(window=0), "SUCCESS"),
    ("a read in windows of 2^32-1 bytes", read(window=(1 << 32) - 1), "SUCCESS"),
    ("a read of nothing", read(UNSIGNED, 0), "SUCCESS"),
    ("an echo of -1 bytes", echo(-1), "SUCCESS"),
    ("an echo of 2 GiB", echo((1 << 31) - 1), "UNSUPPORTED_REQUEST"),
    *((f"{Type.Name(kind)}, which writes", command(kind),
    "UNSUPPORTED_REQUEST") for kind in WRITES),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "ends"), [pytest.param(*rest, id=name) for name, *rest in REQUESTS]
)
def test_a_request_that_no_datanode_would_send_gets_its_result(
    services: Services, caplog: pytest.LogCaptureFixture, raw: bytes, ends: str
) -> None:
    with unchanged(services.volume), caplog.at_level(logging.ERROR):
        assert result_of(services.agent, raw) == ends
    assert caplog.records == []
    assert result_of(services.agent, get_block(20)) == "SUCCESS"


def result_of(address: str, raw: bytes) -> str:
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        call: StreamCall = channel.stream_stream(
            f"/{XCEIVER}/send", None, ContainerCommandResponseProto.FromString
        )
        try:
            (reply,) = call(iter([raw]), timeout=CALL_S)
        except grpc.RpcError as error:
            return error.code().name
    return Result.Name(reply.result)


def test_forty_clients_that_say_nothing_do_not_stop_an_agent(services: Services) -> None:
    """Each opens a stream of Ozone's service and sends nothing on it."""
    with ExitStack() as stack:
        for _ in range(40):
            channel = stack.enter_context(grpc.insecure_channel(services.agent))
            hold: StreamCall = channel.stream_stream(f"/{XCEIVER}/send")
            silence: SimpleQueue[bytes | None] = SimpleQueue()
            call = hold(iter(silence.get, None))
            stack.callback(call.cancel)
            stack.callback(silence.put, None)
        peer = AgentPeer(
            PeerId("dn-1"), open_channel(services.agent), "dn-1", deadlines=Deadlines(tree_s=CALL_S)
        )
        stack.callback(peer.close)
        assert [block.block_id for block in peer.tree(ContainerId(1)).blocks] == [20]
