"""Controller, agents and commands with mutual TLS between all of them: who has no
certificate of the cluster is out.
"""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import trustme
from click.testing import CliRunner

from admin.cli import treefold
from tests.support.processes import TreefoldProcess
from tests.support.volumes import copy_volume, unpack
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e
NODES = ("dn1", "dn2", "dn3")


def certificate(authority: trustme.CA, folder: Path, name: str) -> Path:
    """cert.pem, key.pem and ca.pem for one process on loopback, in a folder of its
    own.
    """
    place = folder / name
    place.mkdir(parents=True)
    issued = authority.issue_cert("127.0.0.1", common_name=name)
    issued.private_key_pem.write_to_path(place / "key.pem")
    (place / "cert.pem").write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    authority.cert_pem.write_to_path(place / "ca.pem")
    return place


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

        outsider = certificate(stranger, tmp_path / "pems", "stranger")
        status, answer = ask(outsider, "container", "list")
        assert (status, answer["errors"][0]["code"]) == (7, "controller_unavailable")
        assert "its certificate does not hold by " in answer["errors"][0]["message"]
        done = CliRunner().invoke(
            treefold, ["container", "list", "--controller", address, "--json"]
        )
        assert done.exit_code == 7
        assert "it wants TLS, and no certificate was given" in done.stdout

        # The running controller takes certificate and authority of renewed files.
        for renewed in certificate(stranger, tmp_path / "renewed", "controller").iterdir():
            renewed.replace(tmp_path / "pems" / "controller" / renewed.name)
        assert ask(outsider, "container", "list")[0] != 7
        assert ask(operator, "container", "list")[0] == 7
