"""Controller, agents and commands with mutual TLS between all of them, by certificates
of our script: who has none of the cluster is out, and each does what its role may.
"""

import json
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from dnagent.client import AgentClient
from merkle.tree import ContainerId
from protos.agent_pb2 import GetStatusRequest
from protos.agent_pb2_grpc import AgentStub
from repair.peers import AgentPeer
from merkle.replica import PeerId
from merkle.tree import BlockId
from runtime.errors import AccessDeniedError
from runtime.rpc import Tls, open_channel
from tests.support.long_running import DEPLOY
from tests.support.processes import TreefoldProcess
from tests.support.volumes import copy_volume, unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
NODES = ("dn1", "dn2", "dn3")
SCRIPT = DEPLOY / "certificates.sh"


def issue(folder: Path, identity: str) -> Tls:
    """PEM files of our script, for one that is reached on loopback."""
    words = [str(folder), identity, "127.0.0.1"]
    done = subprocess.run(["sh", str(SCRIPT), *words], capture_output=True, text=True, check=True)
    cert = Path(done.stdout.strip())
    return Tls(cert, cert.with_suffix(".key"), folder / "ca.pem")


def datanode_id(volume: Path) -> str:
    """As docs/operations.md says where it is found."""
    version = (volume / "hdds" / "VERSION").read_text()
    lines = dict(line.split("=", 1) for line in version.splitlines() if "=" in line)
    return lines["datanodeUuid"]


def start(folder: Path, words: list[str], settings: str, pems: Path) -> TreefoldProcess:
    folder.mkdir()
    tls = "".join(f'{name} = "{pems / name}.pem"\n' for name in ("cert", "key", "ca"))
    (folder / "config.toml").write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "127.0.0.1:0"\n{settings}\n[tls]\n{tls}'
    )
    return TreefoldProcess(folder / "run", *words, "--config", str(folder / "config.toml"))


def test_a_container_is_healed_over_mutual_tls_and_a_stranger_is_kept_out(tmp_path: Path) -> None:
    authority, stranger = trustme.CA(), trustme.CA()
    moments = unpack("detected", tmp_path / "detected")
    with ExitStack() as stack:
        pems = certificate(authority, tmp_path / "pems", "controller")
        controller = stack.enter_context(start(tmp_path / "controller", ["scm", "run"], "", pems))
        address = controller.address()
        for node in NODES:
            volume = copy_volume(moments, node, tmp_path / "volumes" / node)
            settings = (
                f'controller = "{address}"\nheartbeat_interval_s = 0.1\n'
                f'volumes = [{{ path = "{volume}", hold = "owner" }}]\n'
                "[scan]\nenabled = false\nbytes_per_second = 0\n[repair]\nenabled = true\n"
            )
            pems = certificate(authority, tmp_path / "pems", node)
            stack.enter_context(start(tmp_path / node, ["agent", "run"], settings, pems)).address()

        def ask(pems: Path, *words: str) -> tuple[int, dict[str, object]]:
            tls = [f"--tls-{name}={pems / name}.pem" for name in ("cert", "key", "ca")]
            done = CliRunner().invoke(treefold, [*words, "--controller", address, *tls, "--json"])
            return done.exit_code, json.loads(done.stdout)

        operator = certificate(authority, tmp_path / "pems", "operator")

        def all_are_known() -> bool:
            _, answer = ask(operator, "container", "info", "1")
            data = answer["data"]
            return (
                isinstance(data, list) and len(data) == 1 and len(data[0]["replicas"]) == len(NODES)
            )

        wait_until(all_are_known, "all replicas to be reported")
        status, answer = ask(operator, "reconcile", "1", "3", "--yes", "--wait")
        assert status == 0, answer
        data = answer["data"]
        assert isinstance(data, dict)
        assert {job["state"] for job in data["jobs"]} == {"DONE"}
        assert all(job["bytesDone"] > 0 for job in data["jobs"])

        status, answer = ask(
            certificate(stranger, tmp_path / "pems", "stranger"), "container", "list"
        )
        assert (status, answer["errors"][0]["code"]) == (7, "controller_unavailable")
        done = CliRunner().invoke(
            treefold, ["container", "list", "--controller", address, "--json"]
        )
        assert done.exit_code == 7
