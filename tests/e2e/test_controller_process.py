"""The controller as a real process, alone and with real agents on volumes that real
datanodes wrote.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold as root
from tests.support.processes import ROOT, TreefoldProcess, agent, controller
from tests.support.volumes import unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
COMMAND_S = 60
NODES = ("dn1", "dn2", "dn3")


def treefold(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "admin.cli", *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


@dataclass
class Cluster:
    folder: Path
    process: TreefoldProcess
    agents: list[TreefoldProcess]

    @property
    def address(self) -> str:
        return self.process.address()

    def run(self, *arguments: str) -> tuple[int, dict[str, object]]:
        # In this process: a start of Python for every question would be most of the
        # test.
        done = CliRunner().invoke(root, [*arguments, "--controller", self.address, "--json"])
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict)
        return done.exit_code, answer

    def containers(self) -> dict[int, dict[str, object]]:
        _, answer = self.run("container", "list")
        data = answer["data"]
        assert isinstance(data, dict)
        return {one["containerID"]: one for one in data["containers"]}


@contextmanager
def cluster(folder: Path, moment: str) -> Iterator[Cluster]:
    volumes = unpack(moment, folder / "volumes")
    with ExitStack() as stack:
        process = stack.enter_context(controller(folder / "controller"))
        agents = [
            stack.enter_context(agent(folder / node, volumes / node / "volume1", process.address()))
            for node in NODES
        ]
        made = Cluster(folder, process, agents)
        wait_until(lambda: len(made.containers()) == 6, "all containers to be reported")
        wait_until(
            lambda: all(len(_replicas(c)) == 3 for c in made.containers().values()), "all replicas"
        )
        yield made


def _replicas(container: dict[str, object]) -> list[dict[str, object]]:
    found = container["replicas"]
    assert isinstance(found, list)
    return found


def test_it_announces_its_address_and_ends_on_a_signal(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        address = process.address()
        answer = json.loads(treefold("job", "list", "--controller", address, "--json").stdout)
        assert answer["data"] == {"jobs": []}
        assert process.stop(signal.SIGTERM) == 0
        assert process.stdout == ""
        events = [json.loads(line)["event"] for line in process.stderr.splitlines()]
        assert events[0] == "server_started"


def test_a_second_controller_on_the_same_state_is_refused(tmp_path: Path) -> None:
    with controller(tmp_path) as process:
        process.address()
        second = treefold("scm", "run", "--config", str(tmp_path / "controller.toml"))
        assert second.returncode == 8
        assert "error [busy]" in second.stderr
        assert "Traceback" not in second.stderr


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("listen = 9896", "listen"),
        ("orders_per_datanod = 3", "did you mean 'orders_per_datanode'"),
        ("dead_after_s = 1", "dead_after_s"),
        ('listen = "0.0.0.0:0"', "insecure = true"),
        ("listen = [", "not TOML"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(
    tmp_path: Path, text: str, needle: str
) -> None:
    (tmp_path / "bad.toml").write_text(text + "\n")
    words = [
        "scm",
        "run",
        "--config",
        str(tmp_path / "bad.toml"),
        "--state-folder",
        str(tmp_path / "s"),
    ]
    refused = CliRunner().invoke(root, words)
    assert refused.exit_code == 2
    assert "error [config_invalid]" in refused.stderr
    assert needle in refused.stderr
    assert not (tmp_path / "s").exists()


def test_diverged_containers_of_real_volumes_are_listed_compared_and_healed(tmp_path: Path) -> None:
    with cluster(tmp_path, "detected") as made:
        diverged = [
            number for number, one in made.containers().items() if one["comparison"] == "diverged"
        ]
        assert diverged == [1, 2, 3, 4, 6]
        code, compared = made.run("container", "diff", "3")
        assert code == 3
        assert isinstance(compared["data"], dict)
        assert compared["data"]["verdict"] == "REPAIRABLE"
        code, answer = made.run(
            "reconcile", "--all-diverged", "--yes", "--wait", "--reason", "test"
        )
        assert code == 0, answer
        assert [one["comparison"] for one in made.containers().values()][:4] == ["match"] * 4
        status = treefold("reconcile", "--status", "3", "6", "--controller", made.address, "--json")
        assert status.returncode == 0
        assert [one["replicasMatch"] for one in json.loads(status.stdout)] == [True, True]


@pytest.mark.crashes
def test_a_controller_that_is_killed_goes_on_with_its_jobs(tmp_path: Path) -> None:
    with cluster(tmp_path, "detected") as made:
        address = made.address
        code, answer = made.run("reconcile", "1", "2", "3", "4", "6", "--yes")
        assert code == 0
        data = answer["data"]
        assert isinstance(data, dict)
        jobs = [one["jobID"] for one in data["jobs"]]
        made.process.stop(signal.SIGKILL)
        with controller(tmp_path / "controller", address) as again:
            made.process = again
            for job_id in jobs:
                code, watched = made.run("job", "watch", job_id)
                assert isinstance(watched["data"], dict)
                assert (code, watched["data"]["state"]) == (0, "DONE")
            assert all(
                made.containers()[number]["comparison"] == "match" for number in (1, 2, 3, 4, 6)
            )


def test_a_scan_is_carried_out_by_the_agents(tmp_path: Path) -> None:
    with cluster(tmp_path, "damaged") as made:
        code, answer = made.run("scan", "2")
        assert (code, answer["data"]["scansOrdered"]) == (0, 3)
        assert answer["data"]["unknownContainerIDs"] == []
        wait_until(
            lambda: made.containers()[2]["comparison"] == "diverged", "the damage to be found"
        )
