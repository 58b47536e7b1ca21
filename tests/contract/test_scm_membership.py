"""A membership of our own, at SCM's twin in memory and at a real SCM: join, stay,
report, leave.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest

from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer, ClusterNode, NodeHealth, NodeOperation, ScmClient
from ozone.scm_membership import ReportedReplica, ScmMembership
from runtime.errors import PeerRefusedError, PeerUnavailableError
from tests.support.ozone import OzoneCluster, eventually
from tests.support.ozone_containers import closed_with
from tests.support.s3_servers import S3Endpoint
from tests.support.scm_twin import ScmTwin, served

NOBODY = "127.0.0.1:1"
PORT = 24_999


@dataclass
class Served:
    """A cluster with a closed container: SCM's port for clients, that for datanodes."""

    address: str
    datanode_address: str
    container_id: ContainerId


@pytest.fixture
def twin() -> ScmTwin:
    real = PeerId("1fffffff-0000-4000-8000-000000000000")
    node = ClusterNode(
        real, "host1", "127.0.0.1:9859", NodeHealth.HEALTHY, NodeOperation.IN_SERVICE, 3
    )
    found, number = ScmTwin([node]), ContainerId(1)
    found.containers[number] = ClusterContainer(
        number, ContainerState.CLOSED, "RATIS/THREE", 3, used_bytes=10, block_count=1, bcs_id=5
    )
    found.replicas[number] = [ContainerReplica(real, number, ReplicaState.CLOSED, 0xBEEF, 5)]
    return found


@pytest.fixture(scope="module")
def real(ozone_cluster: OzoneCluster, ozone_gateway: S3Endpoint) -> Served:
    host, port = ozone_cluster.scm_address.split(":")
    [number] = closed_with(ozone_cluster, ozone_gateway.fresh_bucket(), [300_000], count=1)
    return Served(ozone_cluster.scm_address, f"{host}:{int(port) + 1}", number)


@pytest.fixture(
    params=[
        "twin",
        # SCM's list keeps the datanode, as DEAD.
        pytest.param(
            "real",
            marks=[
                pytest.mark.ozone(is_last=5),
                pytest.mark.datanodes,
                pytest.mark.timeout(900),
            ],
        ),
    ]
)
def cluster(request: pytest.FixtureRequest, twin: ScmTwin) -> Iterator[Served]:
    if request.param == "real":
        yield request.getfixturevalue("real")
        return
    with served(twin.serve) as address, served(twin.serve_datanodes) as datanodes:
        yield Served(address, datanodes, ContainerId(1))


@pytest.fixture(scope="module")
def own() -> PeerId:
    """One UUID for all tests, so that SCM's list grows by one."""
    return PeerId(str(uuid.uuid4()))


@pytest.fixture
def join(cluster: Served, own: PeerId) -> Iterator[Callable[..., ScmMembership]]:
    """Makes memberships at these addresses, SCM's by default; none has a replica at the
    end.
    """
    with ExitStack() as stack:

        def made(*addresses: str, node: PeerId = own) -> ScmMembership:
            member = ScmMembership(addresses or (cluster.datanode_address,), node, PORT)
            stack.callback(member.close)
            return member

        yield made
        last = made()
        if last.heartbeat(()):
            last.register(())


def report(cluster: Served) -> ReportedReplica:
    return ReportedReplica(cluster.container_id, 0xABCD, 1, 300_000, 1)


def our_replica(cluster: Served, own: PeerId) -> ContainerReplica | None:
    client = ScmClient([cluster.address])
    with closing(client):
        found = client.replicas([cluster.container_id])[cluster.container_id]
    return next((one for one in found if one.peer == own), None)


def test_who_joins_is_decommissioned_and_its_replica_unhealthy(
    cluster: Served, own: PeerId, join: Callable[..., ScmMembership]
) -> None:
    join().register([report(cluster)])
    eventually("SCM lists the replica", lambda: our_replica(cluster, own) is not None)
    replica = our_replica(cluster, own)
    assert replica is not None
    assert (replica.state, replica.data_checksum) == (ReplicaState.UNHEALTHY, 0xABCD)
    client = ScmClient([cluster.address])
    with closing(client):
        [node] = [one for one in client.nodes() if one.peer == own]
    assert node.operation is NodeOperation.DECOMMISSIONED
    assert node.health is NodeHealth.HEALTHY
    assert node.address.endswith(f":{PORT}")


def test_a_heartbeat_keeps_what_was_reported_and_an_empty_report_ends_it(
    cluster: Served, own: PeerId, join: Callable[..., ScmMembership]
) -> None:
    member = join()
    member.register([report(cluster)])
    eventually("SCM lists the replica", lambda: our_replica(cluster, own) is not None)
    assert not member.heartbeat()
    assert not member.heartbeat([report(cluster)])
    assert our_replica(cluster, own) is not None
    assert not member.heartbeat(())
    eventually("SCM forgets the replica", lambda: our_replica(cluster, own) is None)
    # The containers of others are as they were.
    client = ScmClient([cluster.address])
    with closing(client):
        assert client.replicas([cluster.container_id])[cluster.container_id]


def test_scm_says_if_it_does_not_know_who_sends_a_heartbeat(
    join: Callable[..., ScmMembership],
) -> None:
    stranger = PeerId(str(uuid.uuid4()))
    assert join(node=stranger).heartbeat()


def test_all_scms_are_told_and_one_that_answers_is_enough(
    cluster: Served, own: PeerId, join: Callable[..., ScmMembership]
) -> None:
    join(NOBODY, cluster.datanode_address).register([report(cluster)])
    eventually("SCM lists the replica", lambda: our_replica(cluster, own) is not None)
    assert not join(cluster.datanode_address, NOBODY).heartbeat(())
    eventually("SCM forgets the replica", lambda: our_replica(cluster, own) is None)
    with pytest.raises(PeerUnavailableError):
        join(NOBODY, NOBODY).heartbeat()


def test_a_port_of_another_service_is_named(
    cluster: Served, join: Callable[..., ScmMembership]
) -> None:
    """SCM's port for clients has no such protocol."""
    with pytest.raises(PeerRefusedError):
        join(cluster.address).register([])
