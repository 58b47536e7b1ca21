"""A controller of a cluster without agents, as its users see it: commands, status and
page, with SCM and datanodes in memory on real sockets.
"""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from admin.plan_files import ContainerEntry, PlanFile, save_plans
from merkle.columns import encode_tree
from merkle.replica import ReplicaState
from merkle.tree import BlockId, ContainerId
from runtime.config import load
from runtime.errors import ConfigError
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.live_twin import LiveTwin, live_twin
from tests.support.waiting import wait_until

ONE = ContainerId(1)


@pytest.fixture
def cluster() -> Iterator[LiveTwin]:
    with live_twin() as found:
        yield found


def settings(cluster: LiveTwin, folder: Path, **flags: object) -> ControllerConfig:
    return load(
        None,
        ControllerConfig,
        {
            "listen": "127.0.0.1:0",
            "state_folder": folder / "state",
            "dashboard.listen": "127.0.0.1:0",
            "automatic.enabled": True,
            "cluster.scms": [cluster.address],
            "cluster.settle_s": 0.4,
            "cluster.poll_s": 0.05,
            "cluster.read_every_s": 0.2,
            **{name.replace("__", "."): value for name, value in flags.items()},
        },
    )


def diverge(cluster: LiveTwin, *, heals: bool) -> None:
    """A container of which one replica is damaged; Ozone heals it when it is asked."""
    damaged = cluster.add(ONE)[0]
    good = damaged.tree
    damaged.flip(BlockId(20), 100)
    damaged.tree = encode_tree(damaged.scanned_tree())
    cluster.report(ONE)

    def heal(container_id: ContainerId) -> None:
        damaged.flip(BlockId(20), 100)
        damaged.tree = good
        cluster.report(container_id)

    if heals:
        cluster.scm.on_reconcile = heal


def command(server: ControllerServer, *words: str) -> tuple[int, dict[str, Any]]:
    given = [*words, "--controller", server.address, "--json"]
    done = CliRunner().invoke(treefold, given)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, json.loads(done.stdout)


def jobs(server: ControllerServer) -> list[dict[str, Any]]:
    _, document = command(server, "job", "list")
    found = document["data"]["jobs"]
    assert isinstance(found, list)
    return found


def page(server: ControllerServer, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.dashboard_port}{path}") as answer:
        return answer.read().decode()


def test_a_container_is_healed_and_everybody_is_told(cluster: LiveTwin, tmp_path: Path) -> None:
    diverge(cluster, heals=True)
    server = ControllerServer(settings(cluster, tmp_path))
    try:
        wait_until(lambda: [one["state"] for one in jobs(server)] == ["DONE"], "the job to end")
        status, document = command(server, "container", "list")
        assert status == 0
        [shown] = document["data"]["containers"]
        assert (shown["comparison"], shown["requiredNodes"]) == ("match", 3)
        assert cluster.scm.reconciled == [ONE]
        assert "None of 1 containers diverged" in page(server, "/")
    finally:
        server.stop()
    lines = (tmp_path / "state" / "audit.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert [kind for kind in kinds if kind in ("order", "end")] == ["order", "end"]


def test_what_never_converges_is_shown_with_the_trees_of_the_datanodes(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    diverge(cluster, heals=False)
    server = ControllerServer(settings(cluster, tmp_path))
    try:
        wait_until(lambda: [one["state"] for one in jobs(server)] == ["PARTIAL"], "the job to end")
        [job] = jobs(server)
        assert "treefold rescue 1 --cluster" in str(job["detail"])
        assert server._controller.gauges(0)["scm_containers_not_converging"] == 1
        shown = page(server, "/containers/1")
        assert "REPAIRABLE" in shown
    finally:
        server.stop()


def test_a_silent_scm_is_a_problem_of_the_status(cluster: LiveTwin, tmp_path: Path) -> None:
    cluster.add(ONE)
    cluster.scm.in_safe_mode = True
    server = ControllerServer(settings(cluster, tmp_path))
    try:
        wait_until(lambda: "safe mode" in str(command(server, "status")[1]), "the status to say so")
        assert "safe mode" in page(server, "/")
    finally:
        server.stop()


def test_a_datanode_without_a_port_for_reads_keeps_nothing_away(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    cluster.add(ONE)
    cluster.scm.nodes[0] = replace(cluster.scm.nodes[0], address="")
    server = ControllerServer(settings(cluster, tmp_path))
    try:
        wait_until(
            lambda: bool(command(server, "container", "list")[1]["data"]["containers"]),
            "the first report",
        )
        assert command(server, "container", "info", "1")[0] == 0
    finally:
        server.stop()


def test_what_has_no_effect_on_a_cluster_is_refused(cluster: LiveTwin, tmp_path: Path) -> None:
    for key in ("required_replicas", "roots_stale_after_s", "automatic__visit_every_s"):
        with pytest.raises(ConfigError, match="has no effect with"):
            settings(cluster, tmp_path, **{key: 2})
    with pytest.raises(ConfigError, match="quiet_hours"):
        settings(cluster, tmp_path, automatic__quiet_hours="9-5")


def test_jobs_of_a_cluster_are_not_for_a_controller_of_agents(
    cluster: LiveTwin, tmp_path: Path
) -> None:
    diverge(cluster, heals=False)
    config = settings(cluster, tmp_path, cluster__settle_s=60)
    server = ControllerServer(config)
    try:
        wait_until(lambda: [one["state"] for one in jobs(server)] == ["RUNNING"], "a job")
    finally:
        server.stop()
    agents = {"listen": "127.0.0.1:0", "state_folder": tmp_path / "state"}
    with pytest.raises(ConfigError, match="a controller with"):
        ControllerServer(load(None, ControllerConfig, agents))
    # The round that is under way is not requested again.
    server = ControllerServer(config)
    try:
        wait_until(lambda: [one["state"] for one in jobs(server)] == ["RUNNING"], "the job")
        assert cluster.scm.reconciled == [ONE]
    finally:
        server.stop()


def on_cluster(cluster: LiveTwin, *words: str) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(treefold, [*words, "--cluster", cluster.address, "--json"])
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture
def idle(
    cluster: LiveTwin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ControllerServer]:
    """A controller that starts nothing by itself, of a cluster with container 1, which
    diverged, and 2, which did not.
    """
    (tmp_path / "client.toml").touch()
    monkeypatch.setenv("TREEFOLD_CONFIG", str(tmp_path / "client.toml"))
    diverge(cluster, heals=False)
    cluster.add(2)
    server = ControllerServer(settings(cluster, tmp_path, automatic__enabled=False))
    wait_until(
        lambda: len(command(server, "container", "list")[1]["data"]["containers"]) == 2,
        "the first reading",
    )
    yield server
    server.stop()


@pytest.mark.parametrize("number", ["1", "2", "3"])
def test_a_controller_of_a_cluster_compares_trees_as_the_cluster_itself(
    number: str, cluster: LiveTwin, idle: ControllerServer
) -> None:
    """It has no agents to ask: before, each datanode's tree was an error."""
    if number == "2":
        cluster.stop(3)
    status, document = command(idle, "container", "diff", number)
    expected, other = on_cluster(cluster, "container", "diff", number)
    assert status == expected
    for key in ("data", "errors", "warnings"):
        assert document[key] == other[key]
    assert status == {"1": 3, "2": 7, "3": 1}[number]


def test_a_controller_of_a_cluster_plans_what_the_cluster_itself_would_do(
    cluster: LiveTwin, idle: ControllerServer
) -> None:
    words = "reconcile", "1", "2", "99", "--dry-run"
    (status, document), (expected, other) = command(idle, *words), on_cluster(cluster, *words)
    assert document["data"]["plan"] == other["data"]["plan"]
    assert status == expected == 5
    assert [one["code"] for one in document["errors"]] == [one["code"] for one in other["errors"]]
    # Nothing of what only agents do.
    assert not document["warnings"]
    assert cluster.scm.reconciled == []


@pytest.mark.parametrize("option", ["--plan", "--apply"])
def test_a_plan_of_writes_is_refused_with_what_to_do(
    option: str, idle: ControllerServer, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    ids = ["1"]
    if option == "--apply":
        # A good one: another controller, with agents, has made it.
        save_plans(PlanFile((ContainerEntry(1, (), {"dn-3": "silent"}),)), file)
        ids = []
    status, document = command(idle, "reconcile", *ids, option, str(file))
    [error] = document["errors"]
    assert status == 2
    assert "no agents" in error["message"]
    assert "treefold rescue" in error["hint"]


def test_replicas_that_ozone_leaves_unhealthy_are_not_said_to_wait_for_agents(
    cluster: LiveTwin, idle: ControllerServer
) -> None:
    cluster.sources[0].replicas[ONE].state = ReplicaState.UNHEALTHY
    cluster.report(ONE)
    _, document = command(idle, "reconcile", "1", "--yes", "--wait")
    [text] = [one for one in document["warnings"] if "UNHEALTHY" in str(one)]
    assert "Ozone's reconciliation does not change that" in str(text)
