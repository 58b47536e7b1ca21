"""Controller, agents and commands with mutual TLS between all of them, by certificates
of our script: who has none of the cluster is out, and each does what its role may.
"""

import hashlib
import json
import shutil
import ssl
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from protos.agent_pb2 import GetStatusRequest
from protos.agent_pb2_grpc import AgentStub
from repair.peers import AgentPeer
from runtime.errors import AccessDeniedError
from runtime.rpc import open_channel
from runtime.tls_files import Tls
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


def start(folder: Path, words: list[str], settings: str, tls: Tls) -> TreefoldProcess:
    folder.mkdir()
    table = f'cert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n'
    config = folder / "config.toml"
    config.write_text(
        f'state_folder = "{folder / "state"}"\nlisten = "127.0.0.1:0"\n{settings}\n[tls]\n{table}'
    )
    return TreefoldProcess(folder / "run", *words, "--config", str(config), "--log-format", "json")


def test_a_container_is_healed_over_mutual_tls_and_a_stranger_is_kept_out(tmp_path: Path) -> None:
    pki, moments = tmp_path / "pki", unpack("detected", tmp_path / "detected")
    auditor = issue(pki, "operator/auditor")
    der = ssl.PEM_cert_to_DER_cert(auditor.cert.read_text())
    listed = f'"{hashlib.sha256(der).hexdigest()}" = "datanode/{UUID(int=1)}"'
    identities: dict[str, str] = {}
    agents: dict[str, str] = {}
    with ExitStack() as stack:
        tls = issue(pki, "controller/main")
        controller = stack.enter_context(start(tmp_path / "controller", ["scm", "run"], "", tls))
        address = controller.address()
        for node in NODES:
            volume = copy_volume(moments, node, tmp_path / "volumes" / node)
            settings = (
                f'controller = "{address}"\nheartbeat_interval_s = 0.1\n'
                f'volumes = [{{ path = "{volume}", hold = "owner" }}]\n'
                "[scan]\nenabled = false\nbytes_per_second = 0\n[repair]\nenabled = true\n"
                f"[roles]\nfingerprints = {{ {listed} }}\n"
            )
            identities[node] = f"datanode/{datanode_id(volume)}"
            agent = stack.enter_context(
                start(tmp_path / node, ["agent", "run"], settings, issue(pki, identities[node]))
            )
            agents[node] = agent.address()

        def ask(tls: Tls, *words: str) -> tuple[int, dict[str, Any]]:
            options = [f"--tls-cert={tls.cert}", f"--tls-key={tls.key}", f"--tls-ca={tls.ca}"]
            done = CliRunner().invoke(
                treefold, [*words, "--controller", address, *options, "--json"]
            )
            return done.exit_code, json.loads(done.stdout)

        operator = issue(pki, "operator/alice")

        def all_are_known() -> bool:
            _, answer = ask(operator, "container", "info", "1")
            data = answer["data"]
            return (
                isinstance(data, list) and len(data) == 1 and len(data[0]["replicas"]) == len(NODES)
            )

        wait_until(all_are_known, "all replicas to be reported")
        status, answer = ask(operator, "container", "diff", "1")
        assert (status, answer["errors"]) == (3, []), answer
        status, answer = ask(operator, "reconcile", "1", "3", "--yes", "--wait")
        assert status == 0, answer
        jobs = answer["data"]["jobs"]
        assert {(job["state"], job["requestedBy"]) for job in jobs} == {("DONE", "operator/alice")}
        assert all(job["bytesDone"] > 0 for job in jobs)

        status, answer = ask(issue(pki, identities["dn1"]), "reconcile", "1", "--yes")
        assert (status, answer["errors"][0]["code"]) == (6, "permission_denied")
        assert "needs the role operator" in answer["errors"][0]["message"]
        assert "call_refused" in controller.stderr
        outsider = issue(tmp_path / "others", "operator/alice")
        status, answer = ask(outsider, "container", "list")
        assert (status, answer["errors"][0]["code"]) == (7, "controller_unavailable")
        assert "its certificate does not hold by " in answer["errors"][0]["message"]
        done = CliRunner().invoke(
            treefold, ["container", "list", "--controller", address, "--json"]
        )
        assert done.exit_code == 7
        assert "it wants TLS, and no certificate was given" in done.stdout
        _an_operator_reads_no_chunks_and_the_agent_records_it(
            operator, agents["dn1"], tmp_path / "dn1" / "state" / "audit.jsonl"
        )
        with closing(
            AgentPeer(PeerId("dn1"), open_channel(agents["dn1"], tls=auditor), "dn1")
        ) as peer:
            # By the agent's configuration, whatever the certificate says.
            assert list(peer.records(ContainerId(1), [BlockId(1)])) == []
        started = json.loads(controller.stderr.splitlines()[0])
        assert (started["event"], started["roles_enforced"]) == ("server_started", True)

        # The running controller takes certificate and authority of renewed files.
        renewed = issue(tmp_path / "others", "controller/main")
        for old, new in ((tls.cert, renewed.cert), (tls.key, renewed.key), (tls.ca, renewed.ca)):
            Path(shutil.copy(new, old.with_suffix(".new"))).replace(old)
        assert ask(outsider, "container", "list")[0] != 7
        assert ask(operator, "container", "list")[0] == 7


def _an_operator_reads_no_chunks_and_the_agent_records_it(
    operator: Tls, address: str, audit: Path
) -> None:
    channel = open_channel(address, tls=operator)
    with closing(AgentPeer(PeerId("dn1"), channel, address)) as peer:
        assert AgentStub(channel).GetStatus(GetStatusRequest(), timeout=20).roles_enforced
        with pytest.raises(AccessDeniedError, match="needs the role datanode"):
            list(peer.records(ContainerId(1), [BlockId(1)]))
    *_, line = map(json.loads, audit.read_text().splitlines())
    assert (line["kind"], line["who"]) == ("refused", "operator/alice")
    assert line["what"] == "treefold.agent.v1.Agent/GetBlockRecords"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["operator/"],
        ["operator/a/b"],
        ["operator/a b"],
        ["root/alice"],
        ["datanode/dn1"],
        ["operator/alice", "host,URI:treefold:operator/bob"],
    ],
)
def test_the_script_refuses_what_is_no_identity_or_host(tmp_path: Path, words: list[str]) -> None:
    done = subprocess.run(
        ["sh", str(SCRIPT), str(tmp_path / "pki"), *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, (tmp_path / "pki").exists()) == (2, "", False)
    assert done.stderr
