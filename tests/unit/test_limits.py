"""The bounds of merkle/limits.py that whole trees and lists of peers meet: exactly at
them taken, one above not.

Those of single blocks, chunks and messages are in test_check.py, test_convert.py and
test_rpc.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from dnagent.heartbeat import ReconcileCommand
from dnagent.messages import response_of
from merkle.columns import encode_tree
from merkle.errors import TreeRefusedError
from merkle.limits import MESSAGE_BYTES_MAX, PEERS_MAX, TREE_BYTES_MAX
from merkle.replica import PeerId
from merkle.tree import ContainerId
from protos import controller_pb2
from protos.agent_pb2 import ContainerHashPage
from protos.ozone_datanode_pb2 import ContainerChecksumInfo
from repair.peers import AgentPeer
from repair.reconciliation import Reconciliation
from repair.requests import FetchTree
from repair.wire import SERVICE, TREE_TOO_LARGE
from runtime.disk import Disk
from runtime.errors import DiskError
from runtime.rpc import Handler, open_channel, refuse, start_server
from scm.messages import heartbeat_from
from tests.support.peers import replica_of

SEVEN = ContainerId(7)
# Of a field that no page has, so that it is passed over: tag 15, of length-delimited
# kind.
_UNKNOWN = b"\x7a"


def _padded(page: ContainerHashPage, length: int) -> bytes:
    """The page as a message of exactly this length."""
    raw = page.SerializeToString()
    for width in range(1, 6):
        padding = length - len(raw) - 1 - width
        varint = _varint(padding)
        if len(varint) == width:
            return raw + _UNKNOWN + varint + bytes(padding)
    raise AssertionError(f"no padding makes it {length} bytes")


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


@pytest.mark.parametrize("excess", [0, 1])
def test_a_tree_in_pages_may_be_as_large_as_the_limit_and_not_a_byte_larger(excess: int) -> None:
    tree = replica_of(7, {20: 5000}).scanned_tree()
    stored = ContainerChecksumInfo.FromString(encode_tree(tree)).containerMerkleTree
    stored.ClearField("dataChecksum")
    head = ContainerHashPage(
        container_id=7, data_checksum=tree.data_checksum, fingerprint=bytes(16)
    )
    first = ContainerHashPage()
    first.CopyFrom(head)
    first.blocks = stored.SerializeToString()
    whole, rest = divmod(TREE_BYTES_MAX + excess, MESSAGE_BYTES_MAX // 2)
    lengths = [MESSAGE_BYTES_MAX // 2] * (whole - 1) + [MESSAGE_BYTES_MAX // 2 + rest]
    assert sum(lengths) == TREE_BYTES_MAX + excess

    def hashes(raw: bytes, context: grpc.ServicerContext) -> bytes:
        refuse(context, TreeRefusedError(TREE_TOO_LARGE, f"{len(raw)} bytes asked for too much"))

    def pages(raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        del raw, context
        for number, length in enumerate(lengths):
            yield _padded(head if number else first, length)

    handlers: dict[str, Handler] = {
        "GetContainerHashes": grpc.unary_unary_rpc_method_handler(hashes),
        "GetContainerHashPages": grpc.unary_stream_rpc_method_handler(pages),
    }
    service = grpc.method_handlers_generic_handler(SERVICE, handlers)
    server = start_server("127.0.0.1:0", [lambda added: added.add_generic_rpc_handlers((service,))])
    peer = AgentPeer(PeerId("dn-2"), open_channel(server.address), server.address)
    try:
        if excess:
            with pytest.raises(TreeRefusedError, match="does not end within its limits"):
                peer.tree(SEVEN)
        else:
            assert peer.tree(SEVEN) == tree
    finally:
        peer.close()
        server.stop(0)


@pytest.mark.parametrize("excess", [0, 1])
def test_a_file_is_read_whole_up_to_the_limit_of_a_tree(tmp_path: Path, excess: int) -> None:
    path = tmp_path / "7.tree"
    path.touch()
    os.truncate(path, TREE_BYTES_MAX + excess)
    if excess:
        with pytest.raises(DiskError) as caught:
            Disk().read(path)
        assert caught.value.facts["errno"] == "EFBIG"
    else:
        assert len(Disk().read(path)) == TREE_BYTES_MAX


def test_a_reconciliation_asks_as_many_peers_as_the_limit_and_none_is_begun_with_more() -> None:
    names = [PeerId(f"dn-{number}") for number in range(PEERS_MAX + 1)]
    asked = Reconciliation(SEVEN, PeerId("own"), names[1:]).start()
    assert len([request for request in asked if isinstance(request, FetchTree)]) == PEERS_MAX
    with pytest.raises(AssertionError):
        Reconciliation(SEVEN, PeerId("own"), names)


@pytest.mark.parametrize("excess", [0, 1])
def test_of_a_longer_list_of_peers_a_command_keeps_what_a_reconciliation_takes(excess: int) -> None:
    peers = [
        controller_pb2.Datanode(datanode_id=f"dn-{i}", address="127.0.0.1:1")
        for i in range(PEERS_MAX + excess)
    ]
    body = controller_pb2.ReconcileCommand(container_id=7, job_id="j", peers=peers)
    sent = controller_pb2.Command(command_id="1", term=1, reconcile=body)
    (envelope,) = response_of(controller_pb2.HeartbeatResponse(commands=[sent])).envelopes
    assert isinstance(envelope.command, ReconcileCommand)
    kept = [peer.peer for peer in envelope.command.peers]
    assert kept == [PeerId(f"dn-{i}") for i in range(PEERS_MAX)]
    assert Reconciliation(SEVEN, PeerId("own"), kept).start()


@pytest.mark.parametrize("excess", [0, 1])
def test_of_a_longer_list_of_outcomes_a_progress_report_keeps_the_limit(excess: int) -> None:
    told = [
        controller_pb2.PeerOutcome(datanode_id=f"dn-{i}", outcome="ok")
        for i in range(PEERS_MAX + excess)
    ]
    progress = controller_pb2.ReconcileProgress(job_id="j", state="running", peers=told)
    request = controller_pb2.HeartbeatRequest(
        datanode=controller_pb2.Datanode(datanode_id="dn-1", address="127.0.0.1:1"),
        incarnation="1",
        progress=[progress],
    )
    (report,) = heartbeat_from(request).progress
    assert [peer.peer for peer in report.progress.peers] == [
        PeerId(f"dn-{i}") for i in range(PEERS_MAX)
    ]
