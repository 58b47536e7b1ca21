"""Nearly valid requests to all services of a real agent, controller, verifier and
replication master, over sockets: each is answered or refused by name, no error is
logged, and nothing under the volume changes. The same of nearly valid answers to the
clients of a verifier and of a master.
"""

import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message

from dnagent.agent import Agent
from dnagent.config import AgentConfig, ScanSettings, VolumeSettings
from merkle.errors import ReconcileError
from ozone import datanode
from proof.index import WHOLE
from proof.item import HashAlgorithm, Profile
from proof.messages import QuestionMessage, RootQuestion
from proof.wire import encode_question
from protos import agent_pb2 as ap
from protos import controller_pb2 as cp
from protos import ozone_datanode_pb2 as op
from protos import replication_pb2 as rp
from protos import verifier_pb2 as vp
from repair import wire
from replicator.master import server as master
from replicator.master.client import MasterClient, SyncerClient
from replicator.master.config import MasterConfig
from replicator.master.messages import (
    assignment_to,
    capacity_to,
    held_to,
    options_to,
    policy_to,
)
from replicator.master.process import MasterProcess
from replicator.master.records import SyncerCapacity
from replicator.master.syncer_rules import Assignment, Caller, HeldReport
from replicator.master.view_messages import status_to, view_to
from replicator.replication import ReplicationFault, ReplicationOptions, SyncerId
from replicator.stores.local import LocalBucket
from replicator.verifier import server as verifier
from replicator.verifier.client import VerifierClient
from replicator.verifier.messages import (
    batch_result_to,
    description_to,
    facts_to,
    index_state_to,
    key_results_to,
    key_writes_to,
    patch_order_to,
    run_to,
    write_to,
)
from replicator.verifier.process import VerifierProcess
from replicator.verifier.values import RangePatch
from runtime.disk import Disk
from runtime.rpc import StreamCall, sent_error, start_server
from scm import server as controller
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.bad_input import unchanged
from tests.support.handmade import VolumeMaker, chunk_record, some_bytes
from tests.support.master_records import A_STATUS, A_VIEW, P1, policy, report
from tests.support.mutation import mutated_bytes, mutated_message
from tests.support.proof_messages import answers
from tests.support.stores import put
from tests.support.verifier_messages import (
    DESCRIPTION,
    FACTS,
    KEY_WRITES,
    ORDER,
    RESULT,
    RUN,
    WRITES,
)
from tests.support.verifiers import config_of

DATA = some_bytes(3000)
CALL_S = 20.0
SLICE, ALL = 15, 600
# How the valid requests end: of a job, and of an object to patch, that nobody has.
ENDS = {
    "OK", "job_not_found", "lease_lost", "policy_not_found", "policy_refused",
    "precondition_failed", "run_superseded",
}  # fmt: skip
PROFILE = Profile(b"s" * 32, HashAlgorithm.BLAKE3)
# What gRPC itself says of bytes that are no request, or not for this service.
OF_GRPC = {"UNIMPLEMENTED", "RESOURCE_EXHAUSTED"}


@dataclass(frozen=True)
class Ports:
    """Where to send requests, and what must not change by them."""

    volume: Path
    addresses: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("ports")
    with VolumeMaker(folder / "volume") as made:
        made.container(12)
        made.block(12, 20, (chunk_record(DATA), DATA))
    config = AgentConfig(
        volumes=(VolumeSettings(path=folder / "volume"),),
        state_folder=folder / "agent",
        listen="127.0.0.1:0",
        scan=ScanSettings(enabled=False),
    )
    agent = Agent(config)
    agent.start()
    with LocalBucket(folder / "bucket", Disk(), create=True) as bucket:
        put(bucket.store(), "k")
    address = f"local:{folder / 'bucket'}"
    (folder / "verifier").mkdir()
    (folder / "verifier" / "profile.json").write_text(
        json.dumps(
            {
                "bucket": address,
                "secret": PROFILE.secret.hex(),
                "algorithm": "blake3",
                "properties": PROFILE.properties,
            }
        )
    )
    beside = VerifierProcess(config_of(folder / "verifier", address))
    server = ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=folder / "scm"))
    tells = MasterProcess(MasterConfig(listen="127.0.0.1:0", state_folder=folder / "master"))
    yield Ports(
        folder / "volume",
        {
            wire.SERVICE: agent.address,
            datanode.SERVICE: agent.address,
            controller.SERVICE: server.address,
            verifier.SERVICE: beside.address,
            master.SERVICE: tells.address,
        },
    )
    tells.stop()
    beside.stop()
    server.stop()
    agent.stop()


def _datanode(kind: op.Type, name: str, body: Message) -> op.ContainerCommandRequestProto:
    """A request with this message in its field of this name."""
    request = op.ContainerCommandRequestProto(cmdType=kind, containerID=12, datanodeUuid="dn")
    getattr(request, name).CopyFrom(body)
    return request


def _to_verifier() -> Iterator[tuple[str, str, Message]]:
    digest = PROFILE.digest
    root = RootQuestion(WHOLE, None, b"d" * 16)
    question = encode_question(QuestionMessage(b"12345678", 0, digest, root))
    order = patch_order_to(ORDER, digest)
    batch = vp.WriteBatch(profile_digest=digest, writes=[write_to(one) for one in WRITES])
    for method, message in (
        ("Describe", vp.DescribeRequest()),
        ("Prove", vp.ProveRequest(question=question)),
        ("Refresh", vp.RefreshRequest(profile_digest=digest, prefix="k")),
        ("GetFacts", vp.GetFactsRequest(profile_digest=digest, keys=["k", "é"])),
        ("WriteBatches", batch),
        ("PatchObject", vp.PatchPiece(header=order)),
        ("BeginRun", vp.BeginRunRequest(profile_digest=digest, run=run_to(RUN))),
        ("WriteKeys", key_writes_to(KEY_WRITES, digest)),
    ):
        yield verifier.SERVICE, method, message


def _to_master() -> Iterator[tuple[str, str, Message]]:
    caller, capacity = rp.Caller(syncer_id="s1", session="a"), SyncerCapacity(3, 5, 7)
    held = held_to(HeldReport(P1, 1, 2, report(3, fault=ReplicationFault.TARGET_FULL)))
    known, options = rp.KnownAssignment(policy_id=P1, digest=7), ReplicationOptions()
    for method, message in (
        (
            "Register",
            rp.RegisterRequest(
                caller=caller, host="h", started_ms=1, capacity=capacity_to(capacity)
            ),
        ),
        (
            "Heartbeat",
            rp.HeartbeatRequest(
                caller=caller, capacity=capacity_to(capacity), reports=[held], known=[known]
            ),
        ),
        ("SaveReport", rp.SaveReportRequest(caller=caller, held=held)),
        (
            "Release",
            rp.ReleaseRequest(caller=caller, released=[rp.Released(policy_id=P1, epoch=1)]),
        ),
        ("AddPolicy", rp.AddPolicyRequest(policy=policy_to(policy()), reason="r")),
        ("SetDesiredState", rp.SetDesiredStateRequest(policy_id=P1, desired="PAUSED")),
        (
            "SetOptions",
            rp.SetOptionsRequest(policy_id=P1, options=options_to(options)),
        ),
        ("SetPrefixes", rp.SetPrefixesRequest(policy_id=P1, prefixes=["a", "b"], reason="r")),
        ("SetEnabled", rp.SetEnabledRequest(enabled=True, reason="r")),
        ("ListReplications", rp.ListReplicationsRequest(after_policy_id="a")),
        ("GetReplication", rp.GetReplicationRequest(policy_id=P1)),
        ("Failover", rp.FailoverRequest(policy_id=P1)),
        ("EndFailover", rp.EndFailoverRequest(policy_id=P1)),
        ("DeletePolicy", rp.DeletePolicyRequest(policy_id=P1, force=True)),
        ("GetStatus", rp.GetStatusRequest()),
    ):
        yield master.SERVICE, method, message


def _requests() -> Iterator[tuple[str, str, Message]]:
    """A valid request for each method: service, method, message."""
    wanted = ap.ByteRange(offset=0, length_bytes=100)
    heartbeat = cp.HeartbeatRequest(
        datanode=cp.Datanode(datanode_id="dn-1", address="127.0.0.1:1"), incarnation="1"
    )
    heartbeat.report.full = True
    heartbeat.report.replicas.append(cp.ReplicaReport(container_id=12, state="CLOSED"))
    for method, agent in (
        ("GetContainerHashes", ap.GetContainerHashesRequest(container_id=12)),
        ("GetContainerHashPages", ap.GetContainerHashPagesRequest(container_id=12)),
        ("GetBlockRecords", ap.GetBlockRecordsRequest(container_id=12, block_ids=[20])),
        ("ReadWindows", ap.ReadWindowsRequest(container_id=12, block_id=20, ranges=[wanted])),
        ("ScanContainer", ap.ScanContainerRequest(container_id=12)),
        ("GetStatus", ap.GetStatusRequest()),
    ):
        yield wire.SERVICE, method, agent
    for method, message in (
        ("Heartbeat", heartbeat),
        ("ListContainers", cp.ListContainersRequest(state="CLOSED", limit=3)),
        ("GetContainers", cp.GetContainersRequest(container_ids=[12])),
        ("Reconcile", cp.ReconcileRequest(container_ids=[12], dry_run=True, reason="r")),
        ("ListJobs", cp.ListJobsRequest(limit=3)),
        ("GetJob", cp.GetJobRequest(job_id="j")),
        ("CancelJob", cp.CancelJobRequest(job_id="j")),
        ("ListDatanodes", cp.ListDatanodesRequest()),
        ("Scan", cp.ScanRequest(container_ids=[12])),
    ):
        yield controller.SERVICE, method, message
    yield from _to_verifier()
    yield from _to_master()
    where = op.DatanodeBlockID(containerID=12, localID=20)
    read = op.ReadChunkRequestProto(blockID=where)
    read.chunkData.chunkName, read.chunkData.offset, read.chunkData.len = "c", 0, 100
    read.chunkData.checksumData.type, read.chunkData.checksumData.bytesPerChecksum = op.CRC32, 1024
    tree = op.GetContainerChecksumInfoRequestProto(containerID=12)
    for request in (
        _datanode(op.GetBlock, "getBlock", op.GetBlockRequestProto(blockID=where)),
        _datanode(op.ListBlock, "listBlock", op.ListBlockRequestProto(count=5)),
        _datanode(op.ReadChunk, "readChunk", read),
        _datanode(op.GetContainerChecksumInfo, "getContainerChecksumInfo", tree),
        _datanode(op.Echo, "echo", op.EchoRequestProto(payloadSizeResp=10)),
    ):
        yield datanode.SERVICE, "send", request


REQUESTS = [pytest.param(*one, id=f"{one[1]}-{number}") for number, one in enumerate(_requests())]


def _answer(channel: grpc.Channel, service: str, method: str, raw: bytes) -> str:
    """How a call with these bytes ends: "OK", the code of the named error, or gRPC's
    status. A stream of one is on the wire what a single message is.
    """
    call: StreamCall = channel.stream_stream(f"/{service}/{method}", None, None)
    try:
        for _ in call(iter([raw]), timeout=CALL_S):
            pass
    except grpc.RpcError as error:
        named = sent_error(error)
        return named.code if named else error.code().name
    return "OK"


def _fuzz(ports: Ports, service: str, method: str, seed: Message, numbers: range) -> None:
    raw_seed, ends = seed.SerializeToString(), dict[str, int]()
    with grpc.insecure_channel(ports.addresses[service]) as channel:
        for number in numbers:
            rng = random.Random(f"{method} {seed} {number}")
            if rng.random() < 0.6:
                raw = mutated_message(rng, seed)
            else:
                raw = mutated_bytes(rng, raw_seed, [raw_seed])
            end = _answer(channel, service, method, raw)
            # Ozone ends the stream of an invalid request without a name.
            is_ozones = service == datanode.SERVICE and end == "UNKNOWN"
            assert end.islower() or end in OF_GRPC | {"OK"} or is_ozones, (
                f"{method}, input {number}: {end} of {raw[:2000]!r}"
            )
            ends[end] = ends.get(end, 0) + 1
        assert _answer(channel, service, method, raw_seed) in ENDS, ends


@pytest.mark.parametrize(("service", "method", "seed"), REQUESTS)
def test_a_nearly_valid_request_is_answered_or_refused_by_name(
    ports: Ports, caplog: pytest.LogCaptureFixture, service: str, method: str, seed: Message
) -> None:
    with unchanged(ports.volume), caplog.at_level(logging.ERROR):
        _fuzz(ports, service, method, seed, range(SLICE))
    assert caplog.records == []


@pytest.mark.long
@pytest.mark.parametrize(("service", "method", "seed"), REQUESTS)
def test_a_great_many_of_them_are(
    ports: Ports, caplog: pytest.LogCaptureFixture, service: str, method: str, seed: Message
) -> None:
    with unchanged(ports.volume), caplog.at_level(logging.ERROR):
        _fuzz(ports, service, method, seed, range(SLICE, SLICE + ALL))
    assert caplog.records == []


class Answering(grpc.GenericRpcHandler):
    """Answers every call with the same messages."""

    def __init__(self) -> None:
        self.messages = list[bytes]()

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """See grpc.GenericRpcHandler."""
        return grpc.stream_stream_rpc_method_handler(self._answer)

    def _answer(self, requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for _request in requests:
            """What is asked does not matter."""
        yield from self.messages


ASKED = QuestionMessage(b"12345678", 0, PROFILE.digest, RootQuestion(WHOLE, None, b"d" * 16))
CALLS: dict[str, tuple[Message, Callable[[VerifierClient], object]]] = {
    "Describe": (description_to(DESCRIPTION), VerifierClient.describe),
    "Prove": (
        vp.ProveResponse(answer=answers()[0]),
        lambda client: client.prove(ASKED),
    ),
    "Refresh": (
        vp.RefreshProgress(objects=7, bytes_read=9, index=index_state_to(DESCRIPTION.index)),
        lambda client: client.refresh(PROFILE),
    ),
    "GetFacts": (
        vp.GetFactsResponse(facts=[facts_to(FACTS)]),
        lambda client: client.facts(PROFILE, ["k"]),
    ),
    "WriteBatches": (
        batch_result_to(replace(RESULT, number=0)),
        lambda client: list(client.write(PROFILE, [WRITES[:2]])),
    ),
    "PatchObject": (
        vp.PatchResult(facts=facts_to(FACTS), items=9, total=bytes(16)),
        lambda client: client.patch(
            PROFILE, replace(ORDER, result_size_bytes=FACTS.size_bytes), [RangePatch(5, 2, b"x")]
        ),
    ),
    "BeginRun": (vp.BeginRunResponse(), lambda client: client.begin(PROFILE, RUN)),
    "WriteKeys": (
        key_results_to(RESULT.results[:1] * len(KEY_WRITES)),
        lambda client: client.write_keys(PROFILE, KEY_WRITES),
    ),
}

STREAMS = {"Refresh", "WriteBatches", "PatchObject"}


MASTER_CALLS: dict[str, tuple[Message, Callable[[SyncerClient, MasterClient], object]]] = {
    "Register": (
        rp.RegisterResponse(lease_ms=6_000, heartbeat_ms=1_500),
        lambda syncer, _: syncer.register("h", 1, SyncerCapacity(3)),
    ),
    "Heartbeat": (
        rp.HeartbeatResponse(
            lease_ms=6_000,
            heartbeat_ms=1_500,
            assignments=[
                assignment_to(Assignment(policy(), 3, report(4).checkpoint), {}),
            ],
            refused_policy_ids=["p9"],
        ),
        lambda syncer, _: syncer.heartbeat(SyncerCapacity(3), ()),
    ),
    "GetReplication": (
        view_to(A_VIEW),
        lambda _, operator: operator.replication(P1),
    ),
    "GetStatus": (status_to(A_STATUS), lambda _, operator: operator.status()),
}


@pytest.mark.parametrize("method", MASTER_CALLS)
def test_a_nearly_valid_answer_of_a_master_is_taken_or_refused_by_name(method: str) -> None:
    answering = Answering()
    server = start_server("127.0.0.1:0", [lambda made: made.add_generic_rpc_handlers((answering,))])
    caller = Caller(SyncerId("s1"), "a")
    seed, call = MASTER_CALLS[method]
    with (
        closing(SyncerClient([server.address], caller)) as syncer,
        closing(MasterClient([server.address])) as operator,
    ):
        answering.messages = [seed.SerializeToString()]
        call(syncer, operator)
        refused = 0
        for number in range(10 * SLICE):
            rng = random.Random(f"{method} {number}")
            answering.messages = [
                mutated_message(rng, seed)
                if rng.random() < 0.6
                else mutated_bytes(rng, seed.SerializeToString(), [b""])
            ]
            try:
                call(syncer, operator)
            except ReconcileError:
                refused += 1
            except Exception as error:  # noqa: BLE001 - any is the defect that is looked for
                pytest.fail(f"{method}, input {number}: {error!r} of {answering.messages!r}")
    server.stop()
    assert refused


@pytest.fixture(scope="module")
def verifier_answers() -> Iterator[tuple[Answering, VerifierClient]]:
    """What a verifier is to answer, and a client of it."""
    answering = Answering()
    server = start_server("127.0.0.1:0", [lambda made: made.add_generic_rpc_handlers((answering,))])
    with closing(VerifierClient(server.address)) as client:
        yield answering, client
    server.stop()


def _fuzz_answers(
    verifier_answers: tuple[Answering, VerifierClient], method: str, numbers: range
) -> None:
    answering, client = verifier_answers
    seed, call = CALLS[method]
    answering.messages = [seed.SerializeToString()]
    call(client)
    refused = 0
    for number in numbers:
        rng = random.Random(f"{method} {number}")
        if rng.random() < 0.6:
            raw = mutated_message(rng, seed)
        else:
            raw = mutated_bytes(rng, seed.SerializeToString(), [b""])
        # A second answer to a call that has one waits, unread, until its deadline.
        most = 2 if method in STREAMS else 1
        answering.messages = [raw] * rng.choice((0, 1, 1, 1, 1, most))
        try:
            call(client)
        except ReconcileError:
            refused += 1
        except Exception as error:  # noqa: BLE001 - any is the defect that is looked for
            pytest.fail(f"{method}, input {number}: {error!r} of {raw[:2000]!r}")
    assert refused


@pytest.mark.parametrize("method", CALLS)
def test_a_nearly_valid_answer_of_a_verifier_is_taken_or_refused_by_name(
    verifier_answers: tuple[Answering, VerifierClient], method: str
) -> None:
    _fuzz_answers(verifier_answers, method, range(2 * SLICE))


@pytest.mark.long
@pytest.mark.parametrize("method", CALLS)
def test_a_great_many_answers_are(
    verifier_answers: tuple[Answering, VerifierClient], method: str
) -> None:
    _fuzz_answers(verifier_answers, method, range(2 * SLICE, 2 * SLICE + ALL))
