"""A cluster with several SCMs whose leader changes or dies in the midst of a call, of a
reconcile, of a rescue: SCMs and datanodes in memory, on real sockets.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from merkle.columns import encode_tree
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from ozone.scm_client import ScmClient
from ozone.scm_membership import ReportedReplica, ScmMembership
from runtime.config import load
from runtime.errors import PeerUnavailableError
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.live_twin import LiveTwin, live_twin
from tests.support.peers import WINDOW_BYTES
from tests.support.rescue_twin import RescueTwin, rescue_twin
from tests.support.scm_group import ScmGroup
from tests.support.scm_twin import read_preamble, served
from tests.support.waiting import wait_until

ONE = ContainerId(1)
OWN = PeerId("9fffffff-0000-4000-8000-000000000000")


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin(3) as found:
        for number in (1, 2, 3):
            found.add(number)
        yield found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(treefold, [*words, "--json"])
    return result.exit_code, json.loads(result.stdout)


def at_call(group: ScmGroup, name: str, act: Callable[[], None], nth: int = 1) -> None:
    """Do something once, when the leader has carried out its nth call of that name and
    not answered it yet.
    """
    seen = 0

    def hook(called: str) -> None:
        nonlocal seen
        seen += called == name
        if called == name and seen == nth:
            act()

    assert group.leader is not None
    group.members[group.leader].before_answer = hook


def hang(connection: socket.socket) -> None:
    """An SCM that takes calls and never answers."""
    read_preamble(connection)
    while connection.recv(1 << 16):
        pass


CALLS: dict[str, Callable[[ScmClient], object]] = {
    "GetScmInfo": lambda client: client.identity().cluster_id == "CID-twin",
    "QueryNode": lambda client: len(client.nodes()) == 3,
    "ListContainer": lambda client: [one.container_id for one in client.containers()] == [1, 2, 3],
    "GetContainer": lambda client: set(client.get_containers([ONE])) == {ONE},
    "GetContainerReplicas": lambda client: len(client.replicas([ONE])[ONE]) == 3,
    "ReconcileContainer": lambda client: client.reconcile([ONE]) == {ONE: None},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_leader_that_dies_before_it_answers_is_followed_by_the_next(
    name: str, cluster: LiveTwin
) -> None:
    at_call(cluster.group, name, lambda: cluster.group.fail_over(2))
    with closing(ScmClient(cluster.group.addresses)) as client:
        assert CALLS[name](client)
        assert client.leader_address == cluster.group.addresses[2]


def test_a_list_goes_on_where_the_dead_leader_left_it(cluster: LiveTwin) -> None:
    for member in cluster.group.members:
        member.list_max = 1
    at_call(cluster.group, "ListContainer", lambda: cluster.group.fail_over(1), nth=2)
    with closing(ScmClient(cluster.group.addresses)) as client:
        assert [one.container_id for one in client.containers()] == [1, 2, 3]
    assert cluster.group.members[1].calls


def test_a_leader_that_a_follower_names_is_asked_before_the_others(cluster: LiveTwin) -> None:
    """Another one in between may hang for as long as a call may take."""
    cluster.group.elect(2)
    follower, _, leader = cluster.group.addresses
    hint = "Suggested leader is Server:localhost:9860."
    cluster.group.members[0].leader_hint = hint
    leader = leader.replace("127.0.0.1", "localhost")
    asked = list[socket.socket]()
    with (
        served(asked.append) as hung,
        closing(ScmClient([follower, hung, leader])) as client,
    ):
        assert len(client.nodes()) == 3
        assert client.leader_address == leader
    assert asked == []


def test_a_leader_that_is_not_in_the_list_is_named_without_a_wait(cluster: LiveTwin) -> None:
    cluster.group.elect(2)
    waits = list[float]()
    for member in cluster.group.members[:2]:
        member.leader_hint = "Suggested leader is Server:127.0.0.77:9860."
    client = ScmClient(cluster.group.addresses[:2], election_s=60, sleep=waits.append)
    with closing(client), pytest.raises(PeerUnavailableError) as caught:
        client.nodes()
    assert "127.0.0.77" in caught.value.hint
    assert waits == []


def test_an_election_is_waited_for_whatever_name_a_leader_has(cluster: LiveTwin) -> None:
    """SCMs name the last leader by the name that they know, here not by its address."""
    cluster.group.elect(None)
    waits = list[float]()
    for member in cluster.group.members:
        member.leader_hint = "Suggested leader is Server:localhost:9860."

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        cluster.group.elect(1)

    with closing(ScmClient(cluster.group.addresses, election_s=60, sleep=sleep)) as client:
        assert len(client.nodes()) == 3
    assert len(waits) == 1


@pytest.mark.usefixtures("home")
def test_the_doctor_names_an_scm_that_does_not_answer(cluster: LiveTwin) -> None:
    """While another one leads, nothing else would show it until the next failover."""
    status, document = run("doctor", "--cluster", cluster.address)
    assert (status, document["data"]["problems"]) == (0, [])
    cluster.group.kill(2)
    status, document = run("doctor", "--cluster", cluster.address)
    [problem] = document["data"]["problems"]
    assert status == 3
    assert problem.startswith(f"SCM {cluster.group.addresses[2]}: cannot connect")


def test_while_scms_elect_a_leader_a_call_waits_for_it(cluster: LiveTwin) -> None:
    cluster.group.elect(None)
    waits = list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            cluster.group.elect(1)

    with closing(
        ScmClient(cluster.group.addresses, election_s=60, clock=lambda: sum(waits), sleep=sleep)
    ) as client:
        assert len(client.nodes()) == 3
    assert len(waits) == 3


def test_an_election_without_end_is_waited_for_only_so_long(cluster: LiveTwin) -> None:
    cluster.group.elect(None)
    waits = list[float]()
    client = ScmClient(
        cluster.group.addresses, election_s=5, clock=lambda: sum(waits), sleep=waits.append
    )
    with closing(client), pytest.raises(PeerUnavailableError, match="Could not determine"):
        client.nodes()
    assert sum(waits) == 5


def test_where_no_scm_answers_nothing_is_waited_for(cluster: LiveTwin) -> None:
    waits = list[float]()
    cluster.group.close()
    client = ScmClient(cluster.group.addresses, election_s=60, sleep=waits.append)
    with closing(client), pytest.raises(PeerUnavailableError, match="cannot connect"):
        client.nodes()
    assert waits == []


def test_an_scm_that_hangs_delays_later_reports_to_the_others_by_little(
    cluster: LiveTwin,
) -> None:
    report = ReportedReplica(ONE, 1, 1)
    with served(hang) as hung:
        addresses = [hung, cluster.group.datanode_addresses[1]]
        with closing(ScmMembership(addresses, OWN, 1, deadline_s=4.0)) as member:
            member.register([report])
            assert member.silent == (hung,)
            started_s = time.monotonic()
            assert not member.heartbeat(())
            assert time.monotonic() - started_s < 3.0
    assert OWN not in {one.peer for one in cluster.group.members[1].replicas[ONE]}


def diverge(cluster: LiveTwin, *, lost: int) -> None:
    """Container 1 has a damaged replica, which Ozone heals when it is asked; SCM loses
    the first orders.
    """
    damaged = next(iter(cluster.sources)).replicas[ONE]
    good = damaged.tree
    damaged.flip(BlockId(20), 100)
    damaged.tree = encode_tree(damaged.scanned_tree())
    cluster.report(ONE)
    orders = 0

    def heal(container_id: ContainerId) -> None:
        nonlocal orders
        orders += 1
        if orders == lost + 1:
            damaged.flip(BlockId(20), 100)
            damaged.tree = good
            cluster.report(container_id)

    for member in cluster.group.members:
        member.on_reconcile = heal


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", ["GetContainerReplicas", "ReconcileContainer"])
def test_a_reconcile_goes_on_with_the_next_leader(name: str, cluster: LiveTwin) -> None:
    diverge(cluster, lost=1)
    at_call(cluster.group, name, lambda: cluster.group.fail_over(1))
    status, document = run(
        "reconcile", "1", "--cluster", cluster.address, "--settle", "1s", "--yes"
    )
    assert status == 0, document


def test_a_controller_goes_on_with_the_next_leader(cluster: LiveTwin, tmp_path: Path) -> None:
    """The order that died with the leader is given again, as a round of its own."""
    diverge(cluster, lost=1)
    at_call(cluster.group, "ReconcileContainer", lambda: cluster.group.fail_over(1))
    flags = {
        "listen": "127.0.0.1:0", "state_folder": tmp_path / "state", "automatic.enabled": True,
        "cluster.scms": cluster.group.addresses, "cluster.settle_s": 0.4, "cluster.poll_s": 0.05,
        "cluster.read_every_s": 0.2,
    }  # fmt: skip
    server = ControllerServer(load(None, ControllerConfig, flags))

    def states() -> list[object]:
        _, document = run("job", "list", "--controller", server.address)
        return [one["state"] for one in document["data"]["jobs"]]

    try:
        wait_until(lambda: states() == ["DONE"], "the job to end")
    finally:
        server.stop()
    assert cluster.group.members[1].reconciled


@pytest.fixture
def rescued() -> Iterator[RescueTwin]:
    """Container 1, which only a rescue can heal."""
    with rescue_twin(3) as found:
        found.live.add(1)
        for datanode in (1, 2, 3):
            found.damage(1, datanode, 20, datanode * WINDOW_BYTES + 7)
        yield found


def rescue(twin: RescueTwin) -> tuple[int, dict[str, Any]]:
    return run("rescue", "1", "--cluster", twin.live.address, "--listen", "127.0.0.1:0", "--yes")


def check_healed(twin: RescueTwin, status: int, document: dict[str, Any]) -> None:
    assert status == 0, document
    [container] = document["data"]["containers"]
    assert len(container["healed"]) == 3
    assert container["left"]
    real = {replica.peer for replica in twin.live.scm.replicas[ONE]}
    for member in twin.live.group.alive:
        assert {one.peer for one in member.replicas[ONE]} == real
        assert len(real) == 3


# Each call of a rescue, and which of them it is that the leader dies in.
MOMENTS = [
    ("Register", 1),
    # Until it lists our replica; the first ones are of the plan.
    ("GetContainerReplicas", 2),
    ("ReconcileContainer", 1),
    # In the wait for the datanodes, and to say that we hold nothing.
    ("SendHeartbeat", 1),
    ("SendHeartbeat", 2),
]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("name", "nth"), MOMENTS)
def test_a_rescue_survives_the_death_of_the_leader(
    name: str, nth: int, rescued: RescueTwin
) -> None:
    group = rescued.live.group
    at_call(group, name, lambda: group.fail_over(1), nth)
    status, document = rescue(rescued)
    assert len(group.alive) == 2
    check_healed(rescued, status, document)
    [container] = document["data"]["containers"]
    assert container["untoldSCMs"] == [group.datanode_addresses[0]]
    assert any("did not hear" in str(one) for one in document["warnings"])


@pytest.mark.usefixtures("home")
def test_a_rescue_waits_for_an_election_and_a_leader_that_knows_nothing_yet(
    rescued: RescueTwin,
) -> None:
    """The old leader is back as another process, without what datanodes told it."""
    group = rescued.live.group

    def restart() -> None:
        group.kill(0)
        old = group.members[0]
        real = {node.peer for node in old.nodes if node.host != "localhost"}
        old.nodes = [node for node in old.nodes if node.peer in real]
        for number, found in old.replicas.items():
            old.replicas[number] = [one for one in found if one.peer in real]
        group.elect(None)
        group.start(0)
        threading.Timer(1.5, group.elect, [0]).start()

    at_call(group, "ReconcileContainer", restart)
    status, document = rescue(rescued)
    check_healed(rescued, status, document)
    assert len(group.members[0].registrations) == 2
