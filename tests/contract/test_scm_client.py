"""The client of SCM, on its twin in memory and on a real SCM."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.hadoop_rpc import HadoopRpcClient
from ozone.scm_client import ClusterContainer, ClusterNode, NodeHealth, NodeOperation, ScmClient
from protos.ozone_scm_pb2 import ScmContainerLocationRequest
from runtime.errors import PeerRefusedError, PeerUnavailableError, RemoteProtocolError
from tests.support.ozone import OzoneCluster
from tests.support.ozone_containers import closed_with
from tests.support.s3_servers import S3Endpoint
from tests.support.scm_twin import ScmTwin, served

UNKNOWN = ContainerId(1_000_000_000)
PEERS = [PeerId(f"{number}fffffff-0000-4000-8000-000000000000") for number in (1, 2, 3)]


@dataclass
class Served:
    """A cluster of three datanodes with closed containers, all of three replicas."""

    address: str
    container_ids: list[ContainerId]


def twin_of(containers: int) -> ScmTwin:
    twin = ScmTwin([
        ClusterNode(
            peer, "localhost", f"127.0.0.1:{9859 + at}", NodeHealth.HEALTHY,
            NodeOperation.IN_SERVICE, 3,
        )
        for at, peer in enumerate(PEERS)
    ])  # fmt: skip
    for number in map(ContainerId, range(1, containers + 1)):
        twin.containers[number] = ClusterContainer(
            number, ContainerState.CLOSED, "RATIS/THREE", 3, used_bytes=10, block_count=1, bcs_id=5
        )
        twin.replicas[number] = [
            ContainerReplica(peer, number, ReplicaState.CLOSED, 0xBEEF, 5, 0, 10, 1)
            for peer in reversed(PEERS)
        ]
    return twin


@pytest.fixture
def twin() -> ScmTwin:
    return twin_of(3)


@pytest.fixture
def twin_address(twin: ScmTwin) -> Iterator[str]:
    with served(twin.serve) as address:
        yield address


@pytest.fixture(scope="module")
def real(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> Served:
    bucket = ozone_gateway.fresh_bucket()
    return Served(ozone_cluster.scm_address, closed_with(ozone_cluster, bucket, [300_000], count=2))


@pytest.fixture(
    params=[
        "twin",
        pytest.param(
            "real",
            marks=[
                pytest.mark.ozone,
                pytest.mark.datanodes,
                pytest.mark.timeout(900),
            ],
        ),
    ]
)
def cluster(request: pytest.FixtureRequest, twin: ScmTwin) -> Served:
    if request.param == "real":
        found: Served = request.getfixturevalue("real")
        return found
    return Served(request.getfixturevalue("twin_address"), sorted(twin.containers))


@pytest.fixture
def client(cluster: Served) -> Iterator[ScmClient]:
    found = ScmClient([cluster.address])
    yield found
    found.close()


def test_the_cluster_is_told_by_its_id(client: ScmClient) -> None:
    identity = client.identity()
    assert identity.cluster_id.startswith("CID-")
    assert identity.scm_id
    assert any("LEADER" in line for line in identity.scms)
    assert not identity.in_safe_mode
    assert identity.container_count == len(list(client.containers()))


def test_all_datanodes_are_listed_with_where_they_are_read(client: ScmClient) -> None:
    nodes = client.nodes()
    assert len(nodes) == 3
    assert [node.peer for node in nodes] == sorted(node.peer for node in nodes)
    for node in nodes:
        assert node.address.startswith("127.0.0.1:")
        assert node.health is NodeHealth.HEALTHY
        assert node.operation is NodeOperation.IN_SERVICE
        assert not node.is_dead
        assert node.version == 3


def test_containers_are_listed_in_order_after_any_id(client: ScmClient, cluster: Served) -> None:
    listed = [one.container_id for one in client.containers()]
    assert listed == sorted(listed)
    # A real cluster has those of other tests, too.
    found = [one for one in client.containers() if one.container_id in cluster.container_ids]
    assert [one.container_id for one in found] == cluster.container_ids
    for one in found:
        assert one.state is ContainerState.CLOSED
        assert (one.replication, one.required_replicas) == ("RATIS/THREE", 3)
        assert not one.is_erasure_coded
    for after in (listed[0], listed[-1] - 1, listed[-1]):
        found = list(client.containers(after))
        assert [one.container_id for one in found] == [one for one in listed if one > after]


def test_containers_are_found_by_id_and_unknown_ones_left_out(
    client: ScmClient, cluster: Served
) -> None:
    listed = {one.container_id: one for one in client.containers()}
    found = client.get_containers([*cluster.container_ids, UNKNOWN])
    assert found == {number: listed[number] for number in cluster.container_ids}


def test_replicas_have_states_roots_and_datanodes(client: ScmClient, cluster: Served) -> None:
    found = client.replicas([UNKNOWN, *cluster.container_ids])
    assert list(found) == cluster.container_ids
    peers = [node.peer for node in client.nodes()]
    for container_id, replicas in found.items():
        assert [replica.peer for replica in replicas] == peers
        assert len({replica.data_checksum for replica in replicas}) == 1
        for replica in replicas:
            assert replica.container_id == container_id
            assert replica.state is ReplicaState.CLOSED
            assert replica.data_checksum is not None
            assert replica.block_count >= 1
            assert replica.used_bytes > 0
            assert replica.bcs_id > 0
            assert not replica.is_erasure_coded


def test_thousands_of_calls_are_pipelined(client: ScmClient, cluster: Served) -> None:
    wanted = cluster.container_ids[0]
    assert set(client.replicas([wanted] * 2000)) == {wanted}


def test_another_protocols_name_says_which_port_to_name(cluster: Served) -> None:
    wrong = HadoopRpcClient(cluster.address, "org.apache.hadoop.ozone.om.protocol.Nothing")
    with pytest.raises(PeerRefusedError) as caught:
        wrong.call(ScmContainerLocationRequest(cmdType=14))
    wrong.close()
    assert caught.value.facts["result"] == "RpcNoSuchProtocolException"
    assert "9860" in caught.value.hint


def test_the_first_scm_that_leads_answers(cluster: Served) -> None:
    standby = ScmTwin(is_standby=True)
    with served(standby.serve) as second:
        client = ScmClient(["127.0.0.1:1", second, cluster.address])
        assert len(client.nodes()) == 3
        asked = standby.calls
        assert asked
        assert len(client.nodes()) == 3
        # The leader is remembered.
        assert standby.calls == asked
        client.close()


def test_without_a_leader_every_scm_is_named_with_its_reason() -> None:
    with served(ScmTwin(is_standby=True).serve) as standby:
        client = ScmClient(["127.0.0.1:1", standby])
        with pytest.raises(PeerUnavailableError) as caught:
            client.nodes()
        client.close()
    assert "127.0.0.1:1: cannot connect" in caught.value.message
    assert "NotLeaderException" in caught.value.message
    assert caught.value.retryable


def test_a_new_leader_is_found(twin: ScmTwin, twin_address: str) -> None:
    other = twin_of(3)
    other.is_standby = True
    with served(other.serve) as second:
        client = ScmClient([twin_address, second])
        assert len(client.nodes()) == 3
        twin.is_standby, other.is_standby = True, False
        assert len(list(client.containers())) == 3
        client.close()


def test_pages_shorter_than_requested_are_not_the_end(twin: ScmTwin, twin_address: str) -> None:
    twin.list_max = 2
    client = ScmClient([twin_address])
    assert [one.container_id for one in client.containers()] == [1, 2, 3]
    client.close()


def test_idle_connections_may_be_closed_at_any_time(twin: ScmTwin, twin_address: str) -> None:
    twin.calls_per_connection = 3
    client = ScmClient([twin_address])
    for _ in range(5):
        client.identity()
    client.close()
    assert twin.connections == 5


def test_a_root_of_zero_is_unknown(twin: ScmTwin, twin_address: str) -> None:
    number = ContainerId(1)
    twin.replicas[number] = [replace(one, data_checksum=None) for one in twin.replicas[number]]
    client = ScmClient([twin_address])
    assert {one.data_checksum for one in client.replicas([number])[number]} == {None}
    client.close()


def test_an_erasure_coded_container_says_so(twin: ScmTwin, twin_address: str) -> None:
    number = ContainerId(1)
    twin.containers[number] = replace(twin.containers[number], is_erasure_coded=True)
    twin.replicas[number] = [
        replace(one, replica_index=at) for at, one in enumerate(twin.replicas[number], 1)
    ]
    client = ScmClient([twin_address])
    found = client.get_containers([number])[number]
    assert (found.is_erasure_coded, found.replication, found.required_replicas) == (
        True, "EC/RS-3-2", 5,
    )  # fmt: skip
    assert sorted(one.replica_index for one in client.replicas([number])[number]) == [1, 2, 3]
    client.close()


@pytest.mark.parametrize("flaw", ["wrong container", "wide root", "no uuid", "many replicas"])
def test_what_scm_sends_is_checked(flaw: str, twin: ScmTwin, twin_address: str) -> None:
    number = ContainerId(1)
    one = twin.replicas[number][0]
    match flaw:
        case "wrong container":
            twin.replicas[number] = [replace(one, container_id=ContainerId(2))]
        case "wide root":
            twin.replicas[number] = [replace(one, data_checksum=1 << 32)]
        case "no uuid":
            peer = PeerId("x")
            twin.nodes.append(replace(twin.nodes[0], peer=peer))
            twin.replicas[number] = [replace(one, peer=peer)]
        case _:
            twin.replicas[number] = [one] * 100
    client = ScmClient([twin_address])
    with pytest.raises(RemoteProtocolError):
        client.replicas([number])
    client.close()


def test_a_listing_that_goes_back_is_refused(twin: ScmTwin, twin_address: str) -> None:
    twin.containers[ContainerId(3)] = replace(
        twin.containers[ContainerId(3)], container_id=ContainerId(1)
    )
    client = ScmClient([twin_address])
    with pytest.raises(RemoteProtocolError, match="listed container 1 after 2"):
        list(client.containers())
    client.close()


def test_a_reconciliation_is_accepted_or_refused_for_each_container(
    client: ScmClient, cluster: Served
) -> None:
    found = client.reconcile([cluster.container_ids[0], UNKNOWN])
    assert found[cluster.container_ids[0]] is None
    assert "not found for reconciliation" in str(found[UNKNOWN])
