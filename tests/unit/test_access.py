"""Who may call what, at real services behind real TLS: each role, each method."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.descriptor import MethodDescriptor
from structlog.testing import capture_logs

from dnagent.config import AgentRoleSettings
from dnagent.metrics import AGENT_METRICS, PROCESS
from dnagent.ports import AgentStatus
from dnagent.repair_server import RepairService
from dnagent.server import AgentService
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from ozone.datanode import XceiverService
from protos import agent_pb2, controller_pb2, verifier_pb2
from protos.agent_pb2_grpc import AgentStub
from protos.controller_pb2_grpc import ControllerStub
from protos.errors import ControllerUnavailableError
from protos.verifier_pb2_grpc import VerifierStub
from repair.peers import AgentPeer
from replicator.master.config import MasterConfig
from replicator.master.process import MasterProcess
from replicator.stores.local import LocalBucket
from replicator.verifier.process import VerifierProcess
from runtime.access import Access, RefusalCounts
from runtime.config import RoleSettings, TlsSettings
from runtime.disk import Disk
from runtime.errors import AccessDeniedError, DiskError, PeerRefusedError, UsageError
from runtime.metrics import Metrics
from runtime.roles import OPEN_METHODS, Role, RoleTable
from runtime.rpc import named_errors, open_channel, start_server
from runtime.tls_files import Tls
from scm.client import ControllerClient
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.identities import certificate, issued, tls_in
from tests.support.peers import MemoryScans, MemorySource, MemoryStatus, replica_of
from tests.support.verifiers import config_of
from tests.unit.test_roles import service_methods

CONTAINER = ContainerId(12)
OURS, THEIRS = (f"{number:08x}-0000-4000-8000-000000000000" for number in (1, 2))
CLUSTER = "CID-0a1b"
IDENTITIES: Mapping[str, tuple[str, ...]] = {
    "datanode": (f"datanode/{OURS}",),
    "another datanode": (f"datanode/{THEIRS}",),
    "operator": ("operator/alice",),
    "controller": ("controller/main",),
    "verifier": ("verifier/photos",),
    "syncer": ("syncer/s1",),
    "replication-master": ("replication-master/m1",),
    "ozone": (),
    "nobody": (),
    "listed": (),
    "two": ("operator/alice", "operator/bob"),
}
TREES = {"GetContainerHashes", "GetContainerHashPages"}
PROOFS = {"Describe", "Prove", "Refresh", "GetFacts"}
WRITES = {"WriteBatches", "DeleteItems", "PatchObject", "BeginRun", "WriteKeys"}
CONTROLLER_OPERATOR = {
    "ListContainers", "GetContainers", "Reconcile", "Scan", "ListJobs", "GetJob", "CancelJob",
    "PauseJob", "ResumeJob", "ThrottleJob", "ListDatanodes", "GetStatus",
}  # fmt: skip
AGENT_OPERATOR = {"ScanContainer", "GetStatus", "PlanRepair", "UndoJob"}
MASTER_OPERATOR = {
    "AddPolicy", "DeletePolicy", "SetDesiredState", "SetOptions", "SetPrefixes", "SetEnabled",
    "GetStatus", "ListReplications", "GetReplication", "Failover", "EndFailover",
}  # fmt: skip
SYNCER = {"Register", "Heartbeat", "SaveReport", "Release"}
HEALTH = {"Check", "List", "Watch"}
# Written out once more, so that a role that changes is looked at twice.
MAY_CALL: Mapping[str, set[str]] = {
    "datanode": TREES | {"GetBlockRecords", "ReadWindows", "send", "Heartbeat"},
    "another datanode": TREES | {"GetBlockRecords", "ReadWindows", "send"},
    "operator": TREES | AGENT_OPERATOR | CONTROLLER_OPERATOR | MASTER_OPERATOR | PROOFS | WRITES,
    "controller": TREES | {"ScanContainer", "GetStatus"},
    "verifier": PROOFS,
    "syncer": SYNCER | PROOFS | WRITES,
    "replication-master": set(),
    "ozone": {"send"},
    "nobody": set(),
    # By the configurations of controller, verifier and replication master.
    "listed": CONTROLLER_OPERATOR | MASTER_OPERATOR | PROOFS | WRITES,
    "two": set(),
}
NO_STATUS = MemoryStatus(AgentStatus(PeerId(OURS), False))
LISTED = RoleSettings(common_names={"listed": "operator/carol"})
HEARTBEAT = controller_pb2.HeartbeatRequest(
    datanode=controller_pb2.Datanode(datanode_id=OURS, hostname="dn1", address="10.0.0.1:9893"),
    incarnation="1",
    sequence=1,
)


@dataclass
class Cluster:
    """Every service of the product behind TLS, and a certificate for each role."""

    addresses: Mapping[str, str]
    tls: Mapping[str, Tls]
    channels: Mapping[tuple[str, str], grpc.Channel]
    refusals: list[dict[str, str]]

    def channel(self, who: str, service: str) -> grpc.Channel:
        return self.channels[who, self.addresses[service]]


class NoRepairs:
    """An agent that plans and undoes nothing."""

    def make(self, *_: object) -> None:
        """See RepairPlans."""
        raise UsageError("no plan is made")

    def undo(self, *_: object, **__: object) -> None:
        """See UndoJobs."""
        raise UsageError("nothing is undone")


def settings_of(tls: Tls) -> TlsSettings:
    return TlsSettings(cert=tls.cert, key=tls.key, ca=tls.ca)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder, authority = tmp_path_factory.mktemp("access"), trustme.CA()
    tls = {
        name: tls_in(
            certificate(
                authority,
                folder,
                name,
                *identities,
                organization=(CLUSTER, "the SCM") if name == "ozone" else ("", ""),
                dns_names=("localhost",),
            )
        )
        for name, identities in IDENTITIES.items()
    }
    refusals: list[dict[str, str]] = []
    source = MemorySource(replica_of(CONTAINER, {1: 4096}))
    access = Access(
        AgentRoleSettings(ozone_cluster=CLUSTER).table,
        is_enforced=True,
        on_refusal=lambda **refusal: refusals.append(refusal),
    )
    with ExitStack() as stack:
        agent = start_server(
            "127.0.0.1:0",
            [
                RepairService(NoRepairs(), NoRepairs(), access).register,
                AgentService(source, MemoryScans(source), NO_STATUS).register,
                XceiverService(source).register,
            ],
            tls=tls["datanode"],
            access=access,
        )
        stack.callback(agent.stop, 0)
        controller = ControllerServer(
            ControllerConfig(
                listen="127.0.0.1:0",
                state_folder=folder / "scm",
                tls=settings_of(tls["controller"]),
                roles=LISTED,
                required_replicas=2,
            )
        )
        stack.callback(controller.stop)
        with LocalBucket(folder / "bucket", Disk(), create=True):
            pass
        config = config_of(folder / "state", f"local:{folder / 'bucket'}", writes=False)
        secured = {"tls": settings_of(tls["verifier"]), "roles": LISTED}
        verifier = VerifierProcess(config.model_copy(update=secured))
        stack.callback(verifier.stop)
        master = MasterProcess(
            MasterConfig(
                listen="127.0.0.1:0",
                state_folder=folder / "master",
                tls=settings_of(tls["replication-master"]),
                roles=LISTED,
            )
        )
        stack.callback(master.stop)
        addresses = {
            "treefold.agent.v1.Agent": agent.address,
            "hadoop.hdds.datanode.XceiverClientProtocolService": agent.address,
            "treefold.controller.v1.Controller": controller.address,
            "treefold.verifier.v1.Verifier": verifier.address,
            "treefold.replication.v1.ReplicationMaster": master.address,
            "grpc.health.v1.Health": agent.address,
        }
        channels = {
            (name, address): stack.enter_context(open_channel(address, tls=files))
            for name, files in tls.items()
            for address in set(addresses.values())
        }
        yield Cluster(addresses, tls, channels, refusals)


def denied(channel: grpc.Channel, path: str, method: MethodDescriptor) -> str:
    """The sentence of the refusal; empty if the call was let in, whatever came of it:
    the requests are empty.
    """
    request = HEARTBEAT.SerializeToString() if method.name == "Heartbeat" else b""
    kinds = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }
    call: Any = kinds[method.client_streaming, method.server_streaming](path)
    status, details = grpc.StatusCode.OK, ""
    try:
        answer = call(iter([request]) if method.client_streaming else request, timeout=20)
        if method.server_streaming:
            next(answer, None)
            answer.cancel()
    except grpc.RpcError as error:
        status, details = error.code(), error.details() or ""
    assert status is not grpc.StatusCode.UNAVAILABLE
    # Of health, its library leaves one method out.
    assert status is not grpc.StatusCode.UNIMPLEMENTED or path in OPEN_METHODS
    return details if status is grpc.StatusCode.PERMISSION_DENIED else ""


@pytest.mark.parametrize("who", MAY_CALL)
def test_a_role_may_call_its_methods_and_no_other(cluster: Cluster, who: str) -> None:
    may = {
        method.name
        for path, method in service_methods()
        if not denied(cluster.channel(who, path.split("/")[1]), path, method)
    }
    assert may == MAY_CALL[who] | HEALTH


def test_a_refusal_says_which_role_is_needed_and_which_certificate_came(cluster: Cluster) -> None:
    stub = ControllerStub(cluster.channel("datanode", "treefold.controller.v1.Controller"))
    with pytest.raises(grpc.RpcError) as raw:
        stub.Reconcile(controller_pb2.ReconcileRequest(all_diverged=True), timeout=20)
    assert raw.value.code() is grpc.StatusCode.PERMISSION_DENIED
    address = cluster.addresses["treefold.controller.v1.Controller"]
    with (
        closing(ControllerClient(address, tls=cluster.tls["nobody"])) as client,
        pytest.raises(AccessDeniedError) as refused,
    ):
        client.jobs()
    assert (refused.value.code, refused.value.exit_status) == ("permission_denied", 6)
    assert refused.value.message.startswith(
        "ListJobs needs the role operator; the certificate CN=nobody (SHA-256 "
    )
    assert "has no role: it bears no URI of treefold:" in refused.value.message
    assert "treefold:ROLE/NAME" in refused.value.hint


def test_an_operator_does_not_read_chunks_at_an_agent(cluster: Cluster) -> None:
    """A peer's error keeps its name, and the agent records who wanted what."""
    service = "treefold.agent.v1.Agent"
    channel = open_channel(cluster.addresses[service], tls=cluster.tls["operator"])
    cluster.refusals.clear()
    with closing(AgentPeer(PeerId(OURS), channel, "dn1")) as peer:
        with pytest.raises(
            AccessDeniedError, match=r"GetBlockRecords needs the role datanode; .*alice"
        ):
            list(peer.records(CONTAINER, [BlockId(1)]))
        request = agent_pb2.ReadWindowsRequest(container_id=CONTAINER, block_id=1)
        with pytest.raises(grpc.RpcError):
            list(AgentStub(channel).ReadWindows(request, timeout=20))
    assert {(refusal["what"], refusal["who"]) for refusal in cluster.refusals} == {
        (f"{service}/GetBlockRecords", "operator/alice"),
        (f"{service}/ReadWindows", "operator/alice"),
    }


def test_an_agent_speaks_for_its_own_datanode_only(cluster: Cluster) -> None:
    """No report, result or address of another is taken, and no order of its given."""
    service = "treefold.controller.v1.Controller"
    ours = ControllerStub(cluster.channel("datanode", service))
    theirs = ControllerStub(cluster.channel("another datanode", service))
    operator = ControllerStub(cluster.channel("operator", service))
    ours.Heartbeat(HEARTBEAT, timeout=20)
    stolen = controller_pb2.HeartbeatRequest.FromString(HEARTBEAT.SerializeToString())
    stolen.datanode.address, stolen.incarnation = "10.6.6.6:9893", "9"
    with (
        pytest.raises(AccessDeniedError, match=f"needs the role datanode/{OURS}; .*/{THEIRS}"),
        named_errors("controller", ControllerUnavailableError),
    ):
        theirs.Heartbeat(stolen, timeout=20)
    answer = operator.ListDatanodes(controller_pb2.ListDatanodesRequest(), timeout=20)
    assert [view.datanode.address for view in answer.datanodes] == ["10.0.0.1:9893"]
    assert operator.GetStatus(controller_pb2.GetStatusRequest(), timeout=20).roles_enforced


def report(datanode_id: str, root: int) -> controller_pb2.HeartbeatRequest:
    replica = controller_pb2.ReplicaReport(
        container_id=1, state="CLOSED", data_checksum=root, bcs_id=1, used_bytes=1, block_count=1
    )
    return controller_pb2.HeartbeatRequest(
        datanode=controller_pb2.Datanode(datanode_id=datanode_id, address="127.0.0.1:1"),
        incarnation="2",
        sequence=1,
        report=controller_pb2.ContainerReport(full=True, replicas=[replica]),
    )


def test_a_job_names_the_operator_of_the_certificate(cluster: Cluster) -> None:
    service = "treefold.controller.v1.Controller"
    for who, datanode_id, root in (("datanode", OURS, 1), ("another datanode", THEIRS, 2)):
        stub = ControllerStub(cluster.channel(who, service))
        stub.Heartbeat(report(datanode_id, root), timeout=20)
    with closing(
        ControllerClient(cluster.addresses[service], tls=cluster.tls["operator"])
    ) as client:
        [outcome] = client.reconcile([1], dry_run=False, reason="why", requested_by="root@vm")
        assert outcome.job_id, outcome
        job = client.job(outcome.job_id)
    assert (job.requested_by, job.reason) == ("operator/alice", "why")


def test_without_tls_there_are_no_roles_and_a_job_says_so(tmp_path: Path) -> None:
    config = ControllerConfig(
        listen="127.0.0.1:0", state_folder=tmp_path / "scm", required_replicas=2
    )
    server = ControllerServer(config)
    try:
        with open_channel(server.address) as channel:
            stub = ControllerStub(channel)
            for datanode_id, root in ((OURS, 1), (THEIRS, 2)):
                stub.Heartbeat(report(datanode_id, root), timeout=20)
            answer = stub.ListDatanodes(controller_pb2.ListDatanodesRequest(), timeout=20)
            status = stub.GetStatus(controller_pb2.GetStatusRequest(), timeout=20)
        with closing(ControllerClient(server.address)) as client:
            [outcome] = client.reconcile([1], dry_run=False, requested_by="root@vm")
            assert outcome.job_id
            assert client.job(outcome.job_id).requested_by == "root@vm (unproven)"
    finally:
        server.stop()
    assert (len(answer.datanodes), status.roles_enforced) == (2, False)


def test_a_verifier_says_that_it_asks_for_roles(cluster: Cluster) -> None:
    stub = VerifierStub(cluster.channel("verifier", "treefold.verifier.v1.Verifier"))
    assert stub.Describe(verifier_pb2.DescribeRequest(), timeout=20).roles_enforced


def test_a_host_name_that_reads_like_an_identity_is_none(tmp_path: Path) -> None:
    """Whoever is given a name of its choice by an authority must not become more."""
    authority = trustme.CA()
    server = tls_in(certificate(authority, tmp_path, "server"))
    sly = tls_in(certificate(authority, tmp_path, "sly", dns_names=("treefold:operator/alice",)))
    source = MemorySource()
    status = MemoryStatus(AgentStatus(PeerId(OURS), False))
    running = start_server(
        "127.0.0.1:0", [AgentService(source, MemoryScans(source), status).register], tls=server
    )
    with (
        open_channel(running.address, tls=sly) as channel,
        pytest.raises(AccessDeniedError, match="has no role"),
        named_errors("agent", ControllerUnavailableError),
    ):
        AgentStub(channel).GetStatus(agent_pb2.GetStatusRequest(), timeout=20)
    running.stop(0)


def test_a_name_does_not_end_at_a_nul(tmp_path: Path) -> None:
    """An authority may check what a name ends with, and not that it has such a byte."""
    authority = trustme.CA()
    server = tls_in(certificate(authority, tmp_path, "server", f"datanode/{OURS}"))
    source = MemorySource()
    table = RoleSettings(common_names={"carol": "operator/carol"}).table
    running = start_server(
        "127.0.0.1:0",
        [AgentService(source, MemoryScans(source), NO_STATUS).register],
        tls=server,
        access=Access(table, is_enforced=True),
    )
    for number, (identities, name, is_let_in) in enumerate((
        (("operator/alice",), "", True),
        (("operator/alice\0.example.org",), "", False),
        ((), "carol", True),
        ((), "carol\0.example.org", False),
    )):  # fmt: skip
        cert, key = issued(authority, "127.0.0.1", *identities, subject=("", "", name))
        files = Tls(tmp_path / f"{number}.pem", tmp_path / f"{number}.key", server.ca)
        files.cert.write_bytes(cert)
        files.key.write_bytes(key)
        with open_channel(running.address, tls=files) as channel:
            methods = dict(service_methods())
            path = "/treefold.agent.v1.Agent/GetStatus"
            assert (not denied(channel, path, methods[path])) is is_let_in
    running.stop(0)


def test_refusals_are_reported_at_powers_of_two_within_a_minute() -> None:
    counts = RefusalCounts()
    assert [counts.note("f", "m", now_s) for now_s in range(9)] == [
        1, 2, None, 4, None, None, None, 8, None,
    ]  # fmt: skip
    assert counts.note("f", "another", 9.0) == 1
    assert counts.note("f", "m", 60.0) == 1
    for number in range(2_000):
        counts.note(str(number), "m", 61.0)
    # Forgotten, for the sake of memory: reported again.
    assert counts.note("0", "m", 62.0) == 1


def test_a_call_stays_refused_when_its_record_fails(tmp_path: Path) -> None:
    def fail(**_: str) -> None:
        raise DiskError("no space left")

    authority = trustme.CA()
    server = tls_in(certificate(authority, tmp_path, "server"))
    source = MemorySource()
    running = start_server(
        "127.0.0.1:0",
        [XceiverService(source).register],
        tls=server,
        access=Access(RoleTable(), is_enforced=True, on_refusal=fail),
    )
    methods = {path: method for path, method in service_methods() if path.endswith("/send")}
    with open_channel(running.address, tls=server) as channel, capture_logs() as lines:
        for path, method in methods.items():
            assert denied(channel, path, method)
    running.stop(0)
    assert {"call_refused", "refusal_unrecorded"} == {line["event"] for line in lines}


def test_what_a_peer_refuses_us_is_no_refusal_of_our_caller(tmp_path: Path) -> None:
    """An agent that plans reads from peers. The operator did nothing wrong."""

    class PlansOfNobody(NoRepairs):
        def make(self, *_: object) -> None:
            raise AccessDeniedError("dn2: GetBlockRecords needs the role datanode; \x1b[2J")

    authority = trustme.CA()
    server = tls_in(certificate(authority, tmp_path, "server", f"datanode/{OURS}"))
    operator = tls_in(certificate(authority, tmp_path, "operator", "operator/alice"))
    refusals = list[dict[str, str]]()
    metrics = Metrics(AGENT_METRICS)
    access = Access(
        RoleTable(),
        is_enforced=True,
        on_refusal=lambda **refusal: refusals.append(refusal),
        metrics=metrics,
        names=PROCESS,
    )
    services = [RepairService(PlansOfNobody(), NoRepairs(), access).register]
    running = start_server("127.0.0.1:0", services, tls=server, access=access)
    request = agent_pb2.PlanRepairRequest(container_id=CONTAINER)
    with (
        capture_logs() as lines,
        open_channel(running.address, tls=operator) as channel,
        pytest.raises(PeerRefusedError, match="another process refused this one: dn2: "),
        named_errors("agent", ControllerUnavailableError),
    ):
        AgentStub(channel).PlanRepair(request, timeout=20)
    running.stop(0)
    assert refusals == lines == []
    assert metrics.value(PROCESS.calls_refused, role="operator") == 0


def test_refused_calls_are_counted_by_the_role_of_the_caller(tmp_path: Path) -> None:
    authority = trustme.CA()
    places = {
        name: tls_in(certificate(authority, tmp_path, name, *identities))
        for name, identities in IDENTITIES.items()
    }
    metrics, source = Metrics(AGENT_METRICS), MemorySource()
    access = Access(RoleTable(), is_enforced=True, metrics=metrics, names=PROCESS)
    page = metrics.page().decode()
    # All from the start on, so that an increase begins at 0.
    assert [
        page.count(f'{PROCESS.calls_refused}{{role="{role}"}} 0.0') for role in ("none", *Role)
    ] == [1] * (len(Role) + 1)
    services = [AgentService(source, MemoryScans(source), NO_STATUS).register]
    running = start_server("127.0.0.1:0", services, tls=places["datanode"], access=access)
    for name in IDENTITIES:
        with open_channel(running.address, tls=places[name]) as channel:
            for path, method in service_methods():
                if path.endswith("/GetStatus") and "agent" in path:
                    denied(channel, path, method)
    running.stop(0)
    found = {role: metrics.value(PROCESS.calls_refused, role=role) for role in ("none", *Role)}
    assert found == {
        "none": 4, "datanode": 2, "controller": 0, "operator": 0, "verifier": 1, "syncer": 1,
        "replication-master": 1, "ozone": 0,
    }  # fmt: skip


def test_every_method_is_tried() -> None:
    tried = set().union(*MAY_CALL.values(), HEALTH)
    assert {method.name for _, method in service_methods()} == tried
    assert {path.rpartition("/")[2] for path in OPEN_METHODS} == HEALTH
    assert set(Role) == {Role(who) for who in MAY_CALL if who in set(Role)}
