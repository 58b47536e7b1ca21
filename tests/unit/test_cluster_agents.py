"""Agents beside the datanodes of a running cluster are read first, and believed no more
than the datanodes.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner, Result

from admin.cli import treefold
from admin.client_config import ClientConfig
from admin.cluster_agents import ClusterAgents
from dnagent.ports import AgentStatus
from dnagent.server import AgentService
from live.agent_peer import AgentFirstPeer
from live.diagnosis import Diagnosis
from merkle.outcome import Verdict
from merkle.replica import ContainerState, PeerId
from merkle.tree import BlockId, ContainerId
from ozone.datanode_client import DatanodeClient
from ozone.ports import ByteRange
from ozone.scm_client import ClusterNode, NodeHealth, NodeOperation
from protos.convert import tree_from_bytes
from repair.peers import AgentPeer, DatanodePeer
from runtime.access import Access
from runtime.errors import UsageError
from runtime.roles import RoleTable
from runtime.rpc import RpcServer, open_channel, start_server
from tests.support.identities import certificate, tls_in
from tests.support.live_twin import PEERS, LiveTwin, agents_beside, live_twin
from tests.support.peers import CHUNK_BYTES, WINDOW_BYTES, MemoryScans, MemoryStatus

BLOCK = BlockId(20)


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin() as found:
        yield found


@pytest.fixture
def agents(cluster: LiveTwin) -> Iterator[list[RpcServer]]:
    with agents_beside(cluster) as servers:
        yield servers


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))


def addresses(agents: list[RpcServer]) -> str:
    return ",".join(server.address for server in agents)


def diagnose(cluster: LiveTwin, agents: str, *words: str) -> tuple[int, dict[str, object]]:
    result = run(cluster, "--agents", agents, "--json", *words)
    return result.exit_code, json.loads(result.stdout)


def run(cluster: LiveTwin, *words: str) -> Result:
    return CliRunner().invoke(treefold, ["diagnose", "--cluster", cluster.address, *words])


def with_agents(cluster: LiveTwin, agents: list[RpcServer], *, deep: bool) -> dict[int, Diagnosis]:
    found = ClusterAgents(addresses(agents), ClientConfig())
    return cluster.diagnose(deep=deep, find_agent=found.find)


def test_trees_come_from_agents_even_if_the_datanodes_are_silent(
    cluster: LiveTwin, agents: list[RpcServer]
) -> None:
    cluster.add(1)
    for datanode in (1, 2, 3):
        cluster.stop(datanode)
    status, document = diagnose(cluster, addresses(agents))
    assert (status, document["data"]["agents"]) == (0, PEERS)
    assert diagnose(cluster, "none")[0] == 7


def test_the_datanode_gives_what_its_agent_does_not(
    cluster: LiveTwin, agents: list[RpcServer]
) -> None:
    """One agent ends, and one names another datanode; the third lacks a tree."""
    cluster.add(1)
    found = ClusterAgents(addresses(agents), ClientConfig())
    agents[0].stop(0)
    swapped = {PEERS[1]: agents[2].address}
    found._named = {PEERS[0]: agents[0].address, PEERS[2]: agents[2].address} | swapped
    cluster.sources[2].replicas[ContainerId(1)].tree = None
    diagnosis = cluster.diagnose(find_agent=found.find)[1]
    assert diagnosis.verdict is Verdict.MATCH
    assert [one.by_agent for one in diagnosis.readings] == [False, False, False]
    assert found.found == [PEERS[2]]


def test_a_scan_by_agents_finds_what_reading_all_data_finds(
    cluster: LiveTwin, agents: list[RpcServer]
) -> None:
    """Bit flips, files that end early, and files that are gone, at random: the same
    tree, windows and chunks as over the network.
    """
    chance = random.Random(14)
    for number in range(1, 25):
        for replica in cluster.add(number, {20: 50_000, 21: 5_000, 22: 3 * CHUNK_BYTES}):
            for block_id, file in list(replica.files.items()):
                match chance.randrange(6):
                    case 0:
                        replica.flip(block_id, chance.randrange(len(file)))
                    case 1:
                        del file[chance.randrange(len(file)) :]
                    case 2:
                        del replica.files[block_id]
    bare = cluster.diagnose(deep=True)
    scanned = with_agents(cluster, agents, deep=True)
    assert {one.verdict for one in bare.values()} > {Verdict.REPAIRABLE}
    for number, diagnosis in bare.items():
        other = scanned[number]
        assert other.comparison == diagnosis.comparison
        for ours, theirs in zip(other.readings, diagnosis.readings, strict=True):
            assert ours.by_agent
            assert ours.deep
            assert theirs.deep
            assert ours.tree == theirs.tree
            assert ours.deep.bad_windows == theirs.deep.bad_windows
            assert ours.deep.lost == theirs.deep.lost


def test_only_damaged_chunks_cross_the_network(cluster: LiveTwin, agents: list[RpcServer]) -> None:
    first, second, third = cluster.add(1, {20: 40 * CHUNK_BYTES, 21: 5_000})
    first.flip(BLOCK, 3 * CHUNK_BYTES + WINDOW_BYTES)
    del second.files[BlockId(21)]
    del third.files[BLOCK][20 * CHUNK_BYTES :]
    diagnosis = with_agents(cluster, agents, deep=True)[1]
    read = [one.deep.bytes_read for one in diagnosis.readings if one.deep]
    assert read == [CHUNK_BYTES, 0, 0]
    # A read that must fail would make a datanode scan the container: a lost file is
    # asked for once, what is beyond the end of one never.
    assert [source.reads for source in cluster.sources] == [1, 1, 0]
    assert diagnosis.readings[0].deep
    assert diagnosis.readings[0].deep.bad_windows == {(BLOCK, 3 * CHUNK_BYTES): frozenset({1})}
    assert diagnosis.readings[1].deep
    assert diagnosis.readings[1].deep.lost == {(BlockId(21), 0)}


def test_a_tree_that_is_not_that_of_the_scan_proves_nothing(cluster: LiveTwin) -> None:
    """A datanode may write its own tree right after the scan: all is read again."""
    replica = cluster.add(1)[0]
    healthy = tree_from_bytes(replica.tree, ContainerId(1))
    replica.flip(BLOCK, 100)

    class Agent:
        def tree(self, _: ContainerId) -> object:
            return healthy

        def scan(self, _: ContainerId, __: int) -> int:
            return healthy.data_checksum ^ 1

        def close(self) -> None: ...

    diagnosis = cluster.diagnose(
        deep=True, find_agent=lambda node: Agent() if node.peer == PEERS[0] else None
    )[1]
    assert diagnosis.verdict is Verdict.REPAIRABLE
    assert not diagnosis.readings[0].by_agent


def test_stripes_of_erasure_coded_replicas_are_judged_by_scans_too(
    cluster: LiveTwin, agents: list[RpcServer]
) -> None:
    cluster.add_erasure_coded(1, {20: 5 * CHUNK_BYTES})[1].flip(BLOCK, 100)
    bare = cluster.diagnose(deep=True)[1]
    scanned = with_agents(cluster, agents, deep=True)[1]
    assert scanned.stripes == bare.stripes
    assert scanned.stripes
    assert len(scanned.stripes.damages) == 1


def test_an_open_container_is_not_scanned(cluster: LiveTwin, agents: list[RpcServer]) -> None:
    cluster.add(1)
    found = cluster.scm.containers[ContainerId(1)]
    cluster.scm.containers[ContainerId(1)] = type(found)(
        found.container_id, ContainerState.OPEN, found.replication, 3
    )
    assert with_agents(cluster, agents, deep=True)[1].readings == ()


def test_a_given_agent_that_does_not_answer_is_named(
    cluster: LiveTwin, agents: list[RpcServer]
) -> None:
    cluster.add(1)
    status, document = diagnose(cluster, f"{agents[0].address},127.0.0.1:1")
    assert (status, document["data"]["agents"]) == (0, [PEERS[0]])
    [warning] = document["warnings"]
    assert "agent 127.0.0.1:1 is not used: peer_unavailable" in str(warning)
    # Nobody was told that there is one at the usual port.
    assert diagnose(cluster, "1")[1]["warnings"] == []


def test_agents_are_shown_where_they_read(cluster: LiveTwin, agents: list[RpcServer]) -> None:
    cluster.add(1)[0].flip(BLOCK, 100)
    result = run(cluster, "--agents", agents[0].address, "--deep")
    assert result.exit_code == 3
    assert "data by its agent" in result.stdout
    _, document = diagnose(cluster, agents[0].address, "--deep")
    [finding] = document["data"]["findings"]
    assert [one["readBy"] for one in finding["replicas"]] == ["agent", "datanode", "datanode"]


@pytest.mark.parametrize("text", ["0", "65536", "host", "a:1,,b:2", "", "-1", "٣"])
def test_what_is_neither_a_port_nor_addresses_is_refused(cluster: LiveTwin, text: str) -> None:
    with pytest.raises(UsageError):
        ClusterAgents(text, ClientConfig())
    assert diagnose(cluster, text)[0] == 2


def test_without_tls_no_agent_beyond_loopback_is_looked_for() -> None:
    """TEST-NET-1: a probe would wait for its deadline."""
    node = ClusterNode(
        PeerId(PEERS[0]), "far", "192.0.2.1:9859", NodeHealth.HEALTHY, NodeOperation.IN_SERVICE
    )
    found = ClusterAgents("9893", ClientConfig())
    assert found._address_of(node) is None
    assert ClusterAgents("9893", ClientConfig(insecure=True))._address_of(node) == "192.0.2.1:9893"


@contextmanager
def secured_agent(
    cluster: LiveTwin, authority: trustme.CA, folder: Path, identity: str
) -> Iterator[str]:
    """The address of an agent beside the first datanode, whose certificate says so or
    something else.
    """
    tls = tls_in(certificate(authority, folder, "agent", identity))
    source, status = cluster.sources[0], MemoryStatus(AgentStatus(PEERS[0], False))
    server = start_server(
        "127.0.0.1:0",
        [AgentService(source, MemoryScans(source), status).register],
        tls=tls,
        access=Access(RoleTable(), is_enforced=True),
    )
    try:
        yield server.address
    finally:
        server.stop(0)


@pytest.mark.parametrize(("identity", "is_used"), [(PEERS[0], True), (PEERS[1], False)])
def test_with_tls_an_agent_proves_whose_it_is(
    cluster: LiveTwin, tmp_path: Path, identity: PeerId, *, is_used: bool
) -> None:
    """An operator reads its trees and orders its scans; no certificate, no agent."""
    cluster.add(1)
    authority = trustme.CA()
    place = certificate(authority, tmp_path, "alice", "operator/alice")
    lines = [f'{name} = "{place / name}.pem"' for name in ("cert", "key", "ca")]
    with secured_agent(cluster, authority, tmp_path, f"datanode/{identity}") as address:
        assert diagnose(cluster, address)[1]["data"]["agents"] == []
        (tmp_path / "client.toml").write_text("\n".join(("[tls]", *lines)))
        status, document = diagnose(cluster, address, "--deep")
    assert (status, document["data"]["verdicts"]["MATCH"]) == (0, 1)
    assert document["data"]["agents"] == ([PEERS[0]] if is_used else [])
    assert len(document["warnings"]) == (not is_used)


def test_bytes_that_an_agent_withholds_come_from_the_datanode(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    """An operator's certificate reads no bytes of users."""
    cluster.add(1)
    authority = trustme.CA()
    tls = tls_in(certificate(authority, tmp_path, "alice", "operator/alice"))
    content = bytes(cluster.sources[0].replicas[ContainerId(1)].files[BLOCK])
    with secured_agent(cluster, authority, tmp_path, f"datanode/{PEERS[0]}") as address:
        agent = AgentPeer(PEERS[0], open_channel(address, tls=tls), address)
        node = cluster.scm.nodes[0]
        datanode = DatanodePeer(PEERS[0], DatanodeClient(open_channel(node.address), node.host))
        peer = AgentFirstPeer(datanode, agent)
        [record] = peer.records(ContainerId(1), [BLOCK]).values()
        first = record.chunks[0]
        wanted = [ByteRange(0, WINDOW_BYTES), ByteRange(2 * WINDOW_BYTES, WINDOW_BYTES)]
        read = {
            piece.offset: bytes(piece.data)
            for piece in peer.read(ContainerId(1), BLOCK, first, wanted)
        }
        peer.close()
    assert read == {
        offset: content[offset : offset + WINDOW_BYTES] for offset in (0, 2 * WINDOW_BYTES)
    }
