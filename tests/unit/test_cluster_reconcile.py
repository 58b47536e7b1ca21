"""`treefold reconcile --cluster`: exit status, documents, refusals, on SCM's twin."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from admin.cli import treefold
from merkle.replica import ContainerReplica, ContainerState, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.scm_client import ClusterContainer, ClusterNode, NodeHealth, NodeOperation
from tests.support.scm_twin import ScmTwin, served

PEERS = [PeerId(f"{number}fffffff-0000-4000-8000-000000000000") for number in (1, 2, 3)]
ONE = ContainerId(1)


class Cluster(ScmTwin):
    """A twin whose datanodes reconcile at once, each request by one step."""

    address = ""

    def set_roots(self, number: int, *roots: int) -> None:
        container_id = ContainerId(number)
        self.containers.setdefault(
            container_id,
            ClusterContainer(container_id, ContainerState.CLOSED, "RATIS/THREE", 3),
        )
        self.replicas[container_id] = [
            ContainerReplica(peer, container_id, ReplicaState.CLOSED, root, 5)
            for peer, root in zip(PEERS, roots, strict=False)
        ]

    def heal_in(self, rounds: dict[int, int]) -> None:
        """After that many requests the roots of a container are equal."""

        def reconcile(container_id: ContainerId) -> None:
            rounds[container_id] -= 1
            left = rounds[container_id]
            self.set_roots(container_id, 7, 7, 7 + max(0, left))

        self.on_reconcile = reconcile


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    file = tmp_path / "client.toml"
    file.touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(file))
    twin = Cluster([
        ClusterNode(
            peer, f"host{at}", f"127.0.0.1:{at}", NodeHealth.HEALTHY, NodeOperation.IN_SERVICE
        )
        for at, peer in enumerate(PEERS, 1)
    ])  # fmt: skip
    with served(twin.serve) as twin.address:
        yield twin


def run(cluster: Cluster, *words: str) -> Result:
    given = ("reconcile", "--cluster", cluster.address, *words)
    return CliRunner().invoke(treefold, given)


def result(cluster: Cluster, *words: str) -> tuple[int, dict[str, object]]:
    done = run(cluster, "--json", "--yes", "--settle", "0.05s", *words)
    return done.exit_code, json.loads(done.stdout)


def test_a_container_that_needs_a_second_round_gets_it(cluster: Cluster) -> None:
    cluster.set_roots(1, 7, 8, 9)
    cluster.heal_in({1: 2})
    status, document = result(cluster, "1")
    assert (status, document["ok"]) == (0, True)
    [one] = document["data"]["results"]
    assert (one["outcome"], one["rounds"]) == ("equal", 2)
    assert cluster.reconciled == [1, 1]


def test_what_ozone_never_makes_equal_is_said_after_two_rounds_without_a_change(
    cluster: Cluster,
) -> None:
    cluster.set_roots(1, 7, 8, 9)
    status, document = result(cluster, "1")
    assert status == 5
    assert document["data"]["results"][0]["outcome"] == "not_converging"
    assert document["errors"][0]["code"] == "not_converging"
    assert "treefold rescue ID" in document["errors"][0]["hint"]
    assert cluster.reconciled == [1, 1]


def test_an_erasure_coded_container_is_refused_with_the_reason(cluster: Cluster) -> None:
    cluster.set_roots(1, 7, 8, 9)
    cluster.containers[ONE] = replace(
        cluster.containers[ONE], replication="EC/RS-3-2-1024k", is_erasure_coded=True
    )
    cluster.replicas[ONE] = [
        replace(one, replica_index=at) for at, one in enumerate(cluster.replicas[ONE], 1)
    ]
    status, document = result(cluster, "1")
    assert status == 6
    assert document["errors"][0]["code"] == "ineligible_replication_type"
    assert "replication type EC" in document["errors"][0]["message"]
    assert not cluster.reconciled


def test_one_refusal_keeps_no_other_container_from_its_rounds(cluster: Cluster) -> None:
    cluster.set_roots(1, 7, 8, 9)
    cluster.set_roots(2, 7)
    cluster.heal_in({1: 1})
    status, document = result(cluster, "1", "2", "3")
    assert status != 0
    assert [one["containerID"] for one in document["data"]["results"]] == [1]
    assert {one["code"] for one in document["errors"]} == {
        "no_live_peers", "container_not_found",
    }  # fmt: skip
    assert cluster.reconciled == [1]


def test_a_plan_changes_nothing_until_it_is_confirmed(cluster: Cluster) -> None:
    cluster.set_roots(1, 7, 8, 9)
    assert run(cluster, "1", "--dry-run").exit_code == 0
    assert run(cluster, "1").exit_code == 6
    text = run(cluster, "--all-diverged", "--dry-run").stdout
    assert "diverged" in text
    assert not cluster.reconciled


def test_a_missing_replica_makes_equal_roots_no_proof(cluster: Cluster) -> None:
    cluster.set_roots(1, 7, 7)
    status, document = result(cluster, "1")
    assert status == 0
    assert "2 of 3 known" in document["data"]["results"][0]["detail"]


def test_a_silent_datanode_leaves_the_result_unknown(cluster: Cluster) -> None:
    cluster.set_roots(1, 7, 7, 7)
    cluster.nodes[2] = replace(cluster.nodes[2], health=NodeHealth.STALE)
    status, document = result(cluster, "1")
    assert status == 5
    assert document["data"]["results"][0]["outcome"] == "unknown"
    assert "silent" in document["data"]["results"][0]["detail"]


@pytest.mark.parametrize("option", [("--status",), ("--wait",), ("--reason", "x")])
def test_options_of_a_controller_are_usage_errors(
    cluster: Cluster, option: tuple[str, ...]
) -> None:
    status, document = result(cluster, "1", *option)
    assert status == 2
    assert "needs a controller" in document["errors"][0]["message"]


def test_limits_of_a_cluster_need_one() -> None:
    done = CliRunner().invoke(treefold, ("reconcile", "1", "--settle", "5s", "--json"))
    assert done.exit_code == 2
    assert "need --cluster" in json.loads(done.stdout)["errors"][0]["message"]
