"""No call reaches a server that has not the role for which it is called, whoever signed
its certificate, and whenever somebody takes the place of another.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dnagent.heartbeat import OutgoingHeartbeat
from dnagent.messages import HeartbeatClient
from merkle.errors import ReconcileError
from merkle.replica import PeerId
from merkle.tree import BlockId, ContainerId
from repair.peers import AgentPeer
from replicator.verifier.client import VerifierClient
from runtime.config import RoleSettings
from runtime.errors import PeerRefusedError, PeerUnavailableError
from runtime.renewable_channel import RenewableChannel
from runtime.roles import Identity, Role
from runtime.rpc import named_errors, open_channel
from runtime.server_proof import ServerRoleError, ServerUnprovenError, prove_server
from runtime.tls_files import Tls, TlsBytes, read_files
from runtime.tls_renewal import RenewableTls
from scm.client import ControllerClient
from tests.support.certificates import issue, serving
from tests.support.identities import certificate, tls_in
from tests.support.waiting import wait_until
from tests.unit.test_access import CLUSTER, IDENTITIES, LISTED, OURS

# The certificates of tests/unit/test_access.py that may answer each call.
MAY_ANSWER: Mapping[str, set[str]] = {
    "heartbeat": {"controller"},
    "command": {"controller"},
    "repair": {"datanode"},
    "sync": {"verifier"},
}
ROLES = RoleSettings(common_names={"nobody": "controller/main", "datanode": "operator/alice"})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tls]:
    folder, authority = tmp_path_factory.mktemp("servers"), trustme.CA()
    return {
        name: tls_in(
            certificate(
                authority,
                folder,
                name,
                *identities,
                organization=(CLUSTER, "the SCM") if name == "ozone" else ("", ""),
            )
        )
        for name, identities in {**IDENTITIES, "client": ("operator/alice",)}.items()
    }


@pytest.fixture(scope="module")
def addresses(files: Mapping[str, Tls]) -> Iterator[Mapping[str, str]]:
    """A server for each certificate, which has nothing but health."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(serving(files[name])) for name in IDENTITIES}


def heartbeat(address: str, tls: Tls) -> None:
    client = HeartbeatClient(
        address,
        datanode_id=OURS,
        advertised="127.0.0.1:1",
        incarnation=1,
        tls=RenewableTls(tls),
        insecure=False,
    )
    with closing(client):
        client.heartbeat(OutgoingHeartbeat(1, True, (), (), (), ()))


def command(address: str, tls: Tls) -> None:
    with closing(ControllerClient(address, tls=tls)) as client:
        client.jobs()


def repair(address: str, tls: Tls) -> None:
    server = Identity(Role.DATANODE, OURS)
    channel = open_channel(address, tls=tls, server=server)
    with closing(AgentPeer(PeerId(OURS), channel, "dn1")) as peer:
        with pytest.raises(ReconcileError):
            list(peer.records(ContainerId(1), [BlockId(1)]))
        peer.tree(ContainerId(1))


def sync(address: str, tls: Tls) -> None:
    with closing(VerifierClient(address, tls=tls)) as client:
        client.describe()


CALLS: Mapping[str, Callable[[str, Tls], None]] = {
    "heartbeat": heartbeat,
    "command": command,
    "repair": repair,
    "sync": sync,
}


@pytest.mark.parametrize("who", CALLS)
def test_only_the_right_role_is_called(
    who: str, files: Mapping[str, Tls], addresses: Mapping[str, str]
) -> None:
    """Who is called has no such method: it says so, and others hear nothing."""
    reached = set()
    for name, address in addresses.items():
        with pytest.raises(ReconcileError) as caught:
            CALLS[who](address, files["client"])
        if isinstance(caught.value, PeerRefusedError):
            reached.add(name)
        else:
            assert isinstance(caught.value, ServerRoleError), caught.value
            assert (caught.value.code, caught.value.exit_status) == ("server_role", 6)
    assert reached == MAY_ANSWER[who]


def test_a_table_of_ours_has_the_roles_of_certificates_that_name_none(
    files: Mapping[str, Tls], addresses: Mapping[str, str]
) -> None:
    tls = replace(files["client"], roles=ROLES.table)
    with pytest.raises(PeerRefusedError):
        command(addresses["nobody"], tls)
    with pytest.raises(ServerRoleError, match="has the role operator/carol"):
        command(addresses["listed"], replace(tls, roles=LISTED.table))


def check(channel: grpc.Channel) -> None:
    with named_errors("server", PeerUnavailableError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


def test_who_steps_in_after_the_proof_is_not_called(
    files: Mapping[str, Tls], addresses: Mapping[str, str]
) -> None:
    """It has the same authority and host; only the certificate differs."""

    def connect(found: TlsBytes) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(found.ca, found.key, found.cert)
        return grpc.secure_channel(addresses["datanode"], credentials)

    prove = partial(prove_server, addresses["controller"], Role.CONTROLLER)
    with RenewableChannel(RenewableTls(files["client"]), connect, prove) as channel:
        for _ in range(2):
            with pytest.raises(PeerUnavailableError):
                check(channel)


def test_a_channel_proves_its_server_anew_after_a_call_that_found_nobody(tmp_path: Path) -> None:
    authority = trustme.CA()
    client = read_files(issue(authority, tmp_path / "client"))
    found: list[str] = []
    servers = ExitStack()

    def serve(identity: str) -> None:
        servers.close()
        tls = issue(authority, tmp_path / identity.partition("/")[0], identity=identity)
        found.append(servers.enter_context(serving(tls)))

    def connect(trusted: TlsBytes) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(trusted.ca, trusted.key, trusted.cert)
        return grpc.secure_channel(found[-1], credentials)

    def prove(files: TlsBytes) -> bytes:
        return prove_server(found[-1], Role.CONTROLLER, files)

    serve("controller/one")
    with servers, RenewableChannel(RenewableTls(client.files), connect, prove) as channel:
        check(channel)
        serve("controller/two")
        # One call fails, and the next goes there.
        with pytest.raises(PeerUnavailableError):
            check(channel)
        check(channel)
        serve("operator/alice")
        with pytest.raises(PeerUnavailableError):
            check(channel)
        for _ in range(2):
            with pytest.raises(ServerRoleError):
                check(channel)


@dataclass
class Hanging:
    """A server whose proofs take a while, and may fail."""

    proofs: int = 0
    now_s: float = 0.0
    takes_s: float = 3.0
    is_there: bool = True

    def prove(self, _files: TlsBytes) -> bytes:
        self.proofs += 1
        self.now_s += self.takes_s
        if not self.is_there:
            raise ServerUnprovenError("it hangs")
        return b"the server's own"


class _Silent:
    """What a channel connects to, where only the calls are counted."""

    def __init__(self) -> None:
        self.calls = 0

    def unary_unary(self, *_method: object, **_options: object) -> Callable[..., bytes]:
        def call(_request: object, **_how: object) -> bytes:
            self.calls += 1
            return b""

        return call

    def close(self) -> None:
        """See grpc.Channel."""


def proven_channel(
    server: Hanging, files: Tls
) -> tuple[RenewableChannel, list[tuple[bytes, _Silent]]]:
    """A channel to the server, and all connections it makes with what they trust."""
    connections: list[tuple[bytes, _Silent]] = []

    def connect(trusted: TlsBytes) -> grpc.Channel:
        connections.append((trusted.ca, _Silent()))
        return cast(grpc.Channel, connections[-1][1])

    return (
        RenewableChannel(
            RenewableTls(files), connect, server.prove, monotonic_s=lambda: server.now_s
        ),
        connections,
    )


def test_calls_go_on_to_who_was_proven_where_the_next_proof_fails(tmp_path: Path) -> None:
    server = Hanging()
    channel, connections = proven_channel(server, issue(trustme.CA(), tmp_path))
    call = channel.unary_unary("/a/b")
    for _ in range(3):
        call(b"")
    assert server.proofs == 1
    server.now_s, server.is_there = 400.0, False
    for _ in range(5):
        call(b"")
    # One that failed, and none again for ten times as long as it took.
    assert (server.proofs, [silent.calls for _, silent in connections]) == (2, [8])
    server.now_s += 10 * server.takes_s
    server.is_there = True
    for _ in range(2):
        call(b"")
    assert server.proofs == 3
    # Never the whole authority.
    assert {trusted for trusted, _ in connections} == {b"the server's own"}


def test_renewed_files_trust_who_was_proven_where_the_proof_fails(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = issue(authority, tmp_path)
    server = Hanging()
    tls = RenewableTls(files)
    trusted: list[bytes] = []

    def connect(found: TlsBytes) -> grpc.Channel:
        trusted.append(found.ca)
        return cast(grpc.Channel, _Silent())

    with RenewableChannel(tls, connect, server.prove, monotonic_s=lambda: server.now_s) as channel:
        call = channel.unary_unary("/a/b")
        call(b"")
        server.is_there = False
        issue(authority, tmp_path)
        wait_until(lambda: bool(call(b"") == b"" and len(trusted) > 1), "the files are read again")
    assert set(trusted) == {b"the server's own"}


def test_callers_of_a_server_that_hangs_wait_for_one_proof(tmp_path: Path) -> None:
    server = Hanging(is_there=False)
    channel, connections = proven_channel(server, issue(trustme.CA(), tmp_path))
    call = channel.unary_unary("/a/b")
    for _ in range(4):
        with pytest.raises(ServerUnprovenError):
            call(b"")
    assert (server.proofs, connections) == (1, [])
    server.now_s, server.is_there = server.now_s + 10 * server.takes_s, True
    call(b"")
    assert server.proofs == 2


def test_a_server_that_hangs_or_refuses_is_unavailable(
    files: Mapping[str, Tls], tmp_path: Path
) -> None:
    stranger = issue(trustme.CA(), tmp_path / "stranger", identity="controller/main")
    with serving(stranger) as address, serving(None) as plain:
        for where in (address, plain, "127.0.0.1:1"):
            with (
                open_channel(where, tls=files["client"], server=Role.CONTROLLER) as channel,
                pytest.raises(PeerUnavailableError, match="UNAVAILABLE: no connection by TLS"),
            ):
                check(channel)
