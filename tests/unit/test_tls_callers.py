"""Whoever calls by mutual TLS says why it does not work: commands, syncers, agents, and
`--check-config` of every process before it opens anything.
"""

import hashlib
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
import trustme
from click.testing import CliRunner, Result

from admin.cli import treefold
from dnagent.agent import Agent
from dnagent.config import AgentConfig
from dnagent.heartbeat import HeartbeatSender, PeerAddress
from dnagent.messages import HeartbeatClient
from dnagent.metrics import AGENT_METRICS
from merkle.errors import ReconcileError
from merkle.replica import ContainerReplica, PeerId, ReplicaState
from merkle.tree import ContainerId
from ozone.volume import read_version
from replicator.verifier.client import VerifierClient
from runtime.disk import Disk
from runtime.errors import PeerRefusedError
from runtime.metrics import Metrics
from runtime.tls_files import Tls
from runtime.tls_renewal import RenewableTls
from scm.client import ControllerClient
from scm.datanodes import Datanode
from scm.eligibility import Eligibility, Ruling
from scm.policy import ComparisonResult, RootComparison
from scm.replica_trees import fetch_trees
from scm.views import ContainerStatus, ReplicaStatus
from tests.support.certificates import OLD, issue, serving
from tests.support.handmade import VolumeMaker, whole
from tests.support.logged_events import events, logged
from tests.support.long_running import LONG_RUNNING

Serve = Callable[[Tls | None], str]
PLAIN = "it does not speak TLS"


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with these files, and returns its address."""
    with ExitStack() as running:
        yield lambda tls: running.enter_context(serving(tls))


def named(capsys: pytest.CaptureFixture[str], name: str) -> list[dict[str, str]]:
    """The events of this name."""
    return [event for event in events(capsys) if event["event"] == name]


def heartbeats(address: str, tls: Tls) -> HeartbeatSender:
    """An agent's heartbeats without replicas, sent by the test."""
    client = HeartbeatClient(
        address,
        datanode_id="dn-1",
        advertised="127.0.0.1:1",
        incarnation=1,
        tls=RenewableTls(tls),
        insecure=False,
    )
    return HeartbeatSender(
        client,
        interval_s=1.0,
        replicas=list,
        running=list,
        on_command=lambda _: None,
        metrics=Metrics(AGENT_METRICS),
    )


def test_commands_and_syncers_say_what_is_wrong(
    authority: trustme.CA, serve: Serve, tmp_path: Path
) -> None:
    tls = issue(authority, tmp_path / "client")
    address = serve(None)
    controller, verifier = (kind(address, tls=tls) for kind in (ControllerClient, VerifierClient))
    for call in (controller.jobs, verifier.describe):
        with pytest.raises(ReconcileError, match=PLAIN) as caught:
            call()
        assert caught.value.code in ("controller_unavailable", "verifier_unavailable")
        assert caught.value.exit_status == 7
    controller.close()
    verifier.close()


def test_a_comparison_names_what_is_wrong_with_each_agent(
    authority: trustme.CA, serve: Serve, tmp_path: Path
) -> None:
    controller = ControllerClient("127.0.0.1:1", tls=issue(authority, tmp_path / "client"))
    replica = ContainerReplica(PeerId("dn-1"), ContainerId(1), ReplicaState.CLOSED, None, 1)
    status = ReplicaStatus(
        Datanode(PeerId("dn-1"), "127.0.0.1", serve(None)), replica, is_live=True, report_age_s=0
    )
    view = ContainerStatus(
        container_id=ContainerId(1),
        state=None,
        compared=ComparisonResult(RootComparison.UNKNOWN),
        ruling=Ruling(Eligibility.OK),
        last_verdict=None,
        last_job_id="",
        required_nodes=1,
        expected_replicas=1,
        replicas=(status,),
    )
    trees, errors = fetch_trees(view, tls=controller.tls, insecure=controller.insecure)
    assert trees == {}
    assert PLAIN in errors["dn-1"].message
    controller.close()


def test_heartbeats_log_what_is_wrong_once_and_go_on_after_a_renewal(
    authority: trustme.CA, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same connection of an agent, from one fault to the next to none."""
    address = serve(issue(authority, tmp_path / "server", identity="controller/main"))
    tls = issue(authority, tmp_path / "agent", not_after=OLD)
    sender = heartbeats(address, tls)
    with logged():
        sender.send()
        sender.send()
        issue(trustme.CA(), tmp_path / "agent")
        sender.send()
        issue(authority, tmp_path / "agent")
        # Now it speaks with somebody, who is no controller.
        sender.send()
    sender.stop()
    found = named(capsys, "heartbeat_failed")
    assert [event["tls_fault"].split(":")[0] for event in found] == [
        f"our certificate {tls.cert}",
        f"its certificate does not hold by {tls.ca}",
    ]
    assert found[0]["error"] == f"there is no connection with {address}: {found[0]['tls_fault']}"
    assert found[0]["error_code"] == "controller_unavailable"
    assert sender._metrics.value("dnagent_heartbeats_total", outcome="peer_refused") == 1


@pytest.fixture
def config(authority: trustme.CA, tmp_path: Path) -> AgentConfig:
    """An agent on loopback by mutual TLS, of one datanode."""
    with VolumeMaker(tmp_path / "volume") as volume:
        volume.container(1)
        volume.block(1, 1, whole(5000))
    tls = issue(authority, tmp_path / "agent")
    return AgentConfig.model_validate({
        "volumes": [{"path": str(tmp_path / "volume")}],
        "state_folder": str(tmp_path / "state"),
        "listen": "127.0.0.1:0",
        "tls": {"cert": str(tls.cert), "key": str(tls.key), "ca": str(tls.ca)},
    })  # fmt: skip


def test_an_agent_logs_what_is_wrong_with_a_peer_once_for_a_job(
    config: AgentConfig, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    address = serve(None)
    running = Agent(config)
    with logged():
        running.start()
        peer = running._connect(PeerAddress(PeerId("dn-2"), address))
        for _ in range(2):
            with pytest.raises(ReconcileError, match=PLAIN) as caught:
                peer.tree(ContainerId(1))
            assert caught.value.code == "peer_unavailable"
        peer.close()
        running.stop()
    (event,) = named(capsys, "peer_unreachable")
    assert (event["peer"], event["tls_fault"]) == ("dn-2", PLAIN)


def test_an_agent_connects_to_peers_in_the_midst_of_a_renewal(
    config: AgentConfig, authority: trustme.CA, tmp_path: Path, serve: Serve
) -> None:
    """A job that begins then must not fail for it."""
    peer_id = PeerId(str(UUID(int=2)))
    address = serve(issue(authority, tmp_path / "peer", identity=f"datanode/{peer_id}"))
    running = Agent(config)
    running.start()
    new = issue(authority, tmp_path / "new")
    (tmp_path / "agent" / "cert.pem").write_bytes(new.cert.read_bytes())
    peer = running._connect(PeerAddress(peer_id, address))
    # It speaks with somebody, who is no agent.
    with pytest.raises(PeerRefusedError, match="UNIMPLEMENTED"):
        peer.tree(ContainerId(1))
    peer.close()
    running.stop()


IDENTITIES = {
    "agent run": f"datanode/{UUID(int=1)}",
    "scm run": "controller/main",
    "verifier run": "verifier/photos",
    "replication-master run": "replication-master/m1",
    "syncer run": "syncer/s1",
}
# What each process needs beside TLS.
NEEDED = {
    "agent run": 'volumes = [{ path = "/no/such/volume" }]\n',
    "scm run": "",
    "verifier run": 'bucket = "local:/no/such/bucket"\n',
    "replication-master run": "",
    "syncer run": "",
}


def settings(folder: Path, command: str, tls: Tls | None, more: str = "") -> tuple[str, ...]:
    """The words of a command by a configuration in this folder."""
    path = folder / "config.toml"
    files = f'[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n' if tls else ""
    path.write_text(f'{NEEDED[command]}state_folder = "{folder / "state"}"\n{more}\n{files}')
    return *command.split(), "--config", str(path)


def refusal(*words: str) -> str:
    """The message with which a command ends for its settings."""
    done = CliRunner().invoke(treefold, words)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error [config_invalid]: ")
    return done.stderr.removeprefix("error [config_invalid]: ").partition("\n")[0]


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_a_check_names_what_is_wrong_with_the_files(
    command: str, authority: trustme.CA, tmp_path: Path
) -> None:
    good = issue(authority, tmp_path / "good", identity=IDENTITIES[command])
    expired = issue(authority, tmp_path / "expired", not_after=OLD)
    other = issue(trustme.CA(), tmp_path / "other")
    for tls, text in (
        (replace(good, key=other.key), f"{other.key}: is not the key of {good.cert}"),
        (expired, f"{expired.cert}: has expired on 2020-01-01 00:00 UTC"),
        (replace(good, ca=other.ca), f"{good.cert}: is not signed by {other.ca}"),
    ):
        assert refusal(*settings(tmp_path, command, tls), "--check-config").startswith(text)
    done = CliRunner().invoke(
        treefold, [*settings(tmp_path, command, good), "--check-config"], catch_exceptions=False
    )
    assert json.loads(done.stdout)["tls"]["cert"] == str(good.cert)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("command", LONG_RUNNING)
def test_files_that_do_not_fit_end_a_process_before_it_opens_anything(
    command: str, authority: trustme.CA, tmp_path: Path
) -> None:
    good, other = (issue(authority, tmp_path / name) for name in ("good", "other"))
    mixed = replace(good, key=other.key)
    assert "is not the key of" in refusal(*settings(tmp_path, command, mixed))
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("command", LONG_RUNNING)
@pytest.mark.parametrize("identity", ["", "operator/alice", *IDENTITIES.values()])
def test_a_process_with_the_certificate_of_another_ends_before_it_opens_anything(
    command: str, identity: str, authority: trustme.CA, tmp_path: Path
) -> None:
    """Others would refuse each of its calls, or trust it with what it is not."""
    tls = issue(authority, tmp_path / "tls", identity=identity)
    wanted = IDENTITIES[command].partition("/")[0]
    for words in (["--check-config"], []):
        given = settings(tmp_path, command, tls)
        if identity == IDENTITIES[command]:
            if words:
                done = CliRunner().invoke(treefold, [*given, *words])
                assert done.exit_code == 0, done.output
        else:
            message = refusal(*given, *words)
            assert message.startswith(f"{tls.cert}: is not ours: the role {wanted} is needed; ")
    assert not (tmp_path / "state").exists()


def test_an_agent_has_the_certificate_of_its_own_datanode(
    config: AgentConfig, authority: trustme.CA, tmp_path: Path
) -> None:
    """By its volumes, the first of which may be lost; or by its table of roles."""
    volume = str(config.volumes[0].path)
    own = read_version(Path(volume), Disk()).datanode_id
    paths = {"volumes": [{"path": "/no/such/volume"}, {"path": volume}]}
    path = tmp_path / "agent.toml"

    def check(tls: Tls, roles: str = "") -> Result:
        volumes = ", ".join(f'{{ path = "{one["path"]}" }}' for one in paths["volumes"])
        path.write_text(
            f'volumes = [{volumes}]\nstate_folder = "{tmp_path / "state"}"\n'
            f'[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n{roles}'
        )
        return CliRunner().invoke(
            treefold, ["agent", "run", "--config", str(path), "--check-config"]
        )

    ours = issue(authority, tmp_path / "ours", identity=f"datanode/{own}")
    theirs = issue(authority, tmp_path / "theirs", identity=f"datanode/{UUID(int=9)}")
    assert check(ours).exit_code == 0
    assert f"the role datanode/{own} is needed; " in check(theirs).stderr
    der = ssl.PEM_cert_to_DER_cert(theirs.cert.read_text())
    listed = f'"{hashlib.sha256(der).hexdigest()}" = "datanode/{own}"'
    assert check(theirs, f"[roles]\nfingerprints = {{ {listed} }}\n").exit_code == 0


def test_a_check_names_a_controller_that_is_none(
    authority: trustme.CA, serve: Serve, tmp_path: Path
) -> None:
    tls = issue(authority, tmp_path / "agent", identity=IDENTITIES["agent run"])
    address = serve(issue(authority, tmp_path / "other", identity=f"datanode/{UUID(int=9)}"))
    words = settings(tmp_path, "agent run", tls, f'controller = "{address}"')
    done = CliRunner().invoke(treefold, [*words, "--check-config"])
    assert done.exit_code == 6
    assert done.stderr.startswith(f"error [server_role]: the process at {address} is not who ")


def test_a_check_names_a_connection_with_the_controller_that_fails_by_tls(
    authority: trustme.CA, serve: Serve, tmp_path: Path
) -> None:
    tls = issue(authority, tmp_path / "agent", identity=IDENTITIES["agent run"])
    plain, of_another = serve(None), serve(issue(trustme.CA(), tmp_path / "another"))
    good = serve(issue(authority, tmp_path / "controller", identity="controller/main"))
    for address, ours, text in (
        (plain, tls, PLAIN),
        (of_another, tls, "its certificate does not hold by "),
        (good, None, "it wants TLS, and no certificate was given"),
    ):
        words = settings(tmp_path, "agent run", ours, f'controller = "{address}"')
        message = refusal(*words, "--check-config")
        assert message.startswith(f"controller: there is no connection with {address}: {text}")
    for address in (good, "127.0.0.1:1"):
        words = settings(tmp_path, "agent run", tls, f'controller = "{address}"')
        assert CliRunner().invoke(treefold, [*words, "--check-config"]).exit_code == 0


def test_a_check_names_a_certificate_that_peers_would_not_believe(
    authority: trustme.CA, tmp_path: Path
) -> None:
    identity = IDENTITIES["agent run"]
    tls = issue(authority, tmp_path / "agent", "dn1.example.org", identity=identity)
    words = settings(tmp_path, "agent run", tls, 'advertised = "dn2.example.org:9893"')
    text = f"{tls.cert}: is not for dn2.example.org, by which others reach us, but for dn1.example"
    assert refusal(*words, "--check-config").startswith(text)
    for fits in ('advertised = "dn1.example.org:9893"', 'listen = "0.0.0.0:9893"'):
        words = settings(tmp_path, "agent run", tls, fits)
        assert CliRunner().invoke(treefold, [*words, "--check-config"]).exit_code == 0
