"""What is wrong with a connection by TLS is said, whichever side has it."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from protos.errors import ControllerUnavailableError
from runtime.certificates import check_name, check_usable, is_signed
from runtime.errors import ConfigError, PeerUnavailableError
from runtime.tls_faults import connection_fault, named_fault
from runtime.tls_files import Tls, read_files
from tests.support.certificates import OLD, issue, serving

Serve = Callable[[Tls | None], str]


class Authorities:
    """Ours, and one that nobody trusts; a client that ours certified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours, self.stranger = trustme.CA(), trustme.CA()
        self.client = issue(self.ours, folder / "client")


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(tmp_path_factory.mktemp("pems"))


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with these files, and returns its address."""
    with ExitStack() as running:
        yield lambda tls: running.enter_context(serving(tls))


def test_nothing_is_said_of_a_connection_that_works(authorities: Authorities, serve: Serve) -> None:
    address = serve(issue(authorities.ours, authorities.folder / "server"))
    assert connection_fault(address, authorities.client) == ""
    assert connection_fault(serve(None), None) == ""


def test_nothing_is_said_where_nobody_listens(authorities: Authorities) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert connection_fault(address, None) == ""
        assert connection_fault(address, authorities.client) == ""


@pytest.mark.parametrize("address", ["unix:/run/treefold", f"{'a' * 64}.example:1", ".:1"])
def test_nothing_is_said_of_what_is_no_address(authorities: Authorities, address: str) -> None:
    assert connection_fault(address, None) == ""
    assert connection_fault(address, authorities.client) == ""


def test_an_authority_may_have_comments_in_any_language(
    authorities: Authorities, serve: Serve
) -> None:
    address = serve(issue(authorities.stranger, authorities.folder / "other server"))
    tls = issue(authorities.ours, authorities.folder / "commented")
    tls.ca.write_bytes("# größte Stelle\n".encode() + tls.ca.read_bytes())
    assert "issuer certificate" in connection_fault(address, tls)


def test_one_side_without_tls_is_named(authorities: Authorities, serve: Serve) -> None:
    address = serve(issue(authorities.ours, authorities.folder / "server"))
    assert connection_fault(address, None) == "it wants TLS, and no certificate was given"
    assert connection_fault(serve(None), authorities.client) == "it does not speak TLS"


def test_a_server_of_another_authority_is_named(authorities: Authorities, serve: Serve) -> None:
    address = serve(issue(authorities.stranger, authorities.folder / "other server"))
    fault = connection_fault(address, authorities.client)
    assert fault.startswith(f"its certificate does not hold by {authorities.client.ca}: ")
    assert "issuer certificate" in fault


def test_an_expired_server_and_one_of_another_name_are_named(
    authorities: Authorities, serve: Serve
) -> None:
    expired = issue(authorities.ours, authorities.folder / "expired server", not_after=OLD)
    assert "certificate has expired" in connection_fault(serve(expired), authorities.client)
    other = issue(authorities.ours, authorities.folder / "named server", "dn1.example.org")
    assert "mismatch" in connection_fault(serve(other), authorities.client)


def test_a_client_that_the_server_refuses_is_named(authorities: Authorities, serve: Serve) -> None:
    server = issue(authorities.ours, authorities.folder / "server")
    address = serve(server)
    stranger = issue(authorities.stranger, authorities.folder / "stranger")
    stranger = replace(stranger, ca=server.ca)
    text = f"it refuses our certificate {stranger.cert}"
    assert connection_fault(address, stranger) == f"{text}, which is not signed by {server.ca}"
    # Who trusts both authorities cannot know which one the server wants.
    both = authorities.folder / "both.pem"
    both.write_bytes(server.ca.read_bytes() + authorities.stranger.cert_pem.bytes())
    assert connection_fault(address, replace(stranger, ca=both)) == text


def test_our_own_files_are_named_before_the_peer(authorities: Authorities, serve: Serve) -> None:
    address = serve(issue(authorities.ours, authorities.folder / "server"))
    expired = issue(authorities.ours, authorities.folder / "expired", not_after=OLD)
    fault = connection_fault(address, expired)
    assert fault == f"our certificate {expired.cert}: has expired on 2020-01-01 00:00 UTC"
    mixed = replace(authorities.client, key=expired.key)
    fault = connection_fault(address, mixed)
    assert fault == f"{expired.key}: is not the key of {mixed.cert}"


@pytest.mark.parametrize("kind", [ControllerUnavailableError, PeerUnavailableError])
def test_an_error_keeps_its_kind_and_its_facts(
    authorities: Authorities,
    serve: Serve,
    kind: type[ControllerUnavailableError | PeerUnavailableError],
) -> None:
    address = serve(None)
    error = kind("UNAVAILABLE: Socket closed", status="UNAVAILABLE")
    named = named_fault(error, address, authorities.client)
    assert type(named) is kind
    assert named.message == f"there is no connection with {address}: it does not speak TLS"
    assert "client.toml" in named.hint
    assert named.facts == {
        "status": "UNAVAILABLE",
        "tls_fault": "it does not speak TLS",
        "detail": error.message,
    }
    # Nothing is asked where gRPC had a connection, and nothing added where TLS is well.
    late = kind("no answer", status="DEADLINE_EXCEEDED")
    assert named_fault(late, address, authorities.client) is late
    assert named_fault(error, address, None) is error


def test_files_that_cannot_serve_are_named(authorities: Authorities) -> None:
    good = authorities.client
    check_usable(read_files(good))
    other = issue(authorities.ours, authorities.folder / "other")
    garbage = authorities.folder / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    expired = issue(authorities.ours, authorities.folder / "expired", not_after=OLD)
    foreign = authorities.folder / "foreign.pem"
    authorities.stranger.cert_pem.write_to_path(foreign)
    for bad, path, text in (
        (replace(good, key=other.key), other.key, f"is not the key of {good.cert}"),
        (replace(good, cert=good.key), good.key, "is not a certificate"),
        (replace(good, key=good.cert), good.cert, "is not a private key"),
        (replace(good, ca=garbage), garbage, "is not a certificate"),
        (replace(good, ca=foreign), good.cert, f"is not signed by {foreign}"),
        (replace(good, ca=authorities.folder), authorities.folder, "is not a regular file"),
        (replace(good, cert=Path("/no")), Path("/no"), "cannot be read: No such file"),
        (expired, expired.cert, "has expired on 2020-01-01"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_usable(read_files(bad))
        assert caught.value.message.startswith(f"{path}: {text}")
    with pytest.raises(ConfigError, match="is valid from "):
        check_usable(read_files(good), now_s=0.0)


def test_a_certificate_may_be_signed_by_way_of_others(authorities: Authorities) -> None:
    between = authorities.ours.create_child_ca()
    tls = issue(between, authorities.folder / "between")
    authorities.ours.cert_pem.write_to_path(tls.ca)
    assert is_signed(read_files(tls))
    # Without the one between, nothing leads to the authority.
    first, *_ = tls.cert.read_bytes().partition(b"-----END CERTIFICATE-----")
    tls.cert.write_bytes(first + b"-----END CERTIFICATE-----\n")
    assert not is_signed(read_files(tls))


@pytest.mark.parametrize(
    ("issued", "host", "matches"),
    [
        ("dn1.example.org", "dn1.example.org", True),
        ("dn1.example.org", "DN1.example.org", True),
        ("dn1.example.org", "dn2.example.org", False),
        ("*.example.org", "dn1.example.org", True),
        ("*.example.org", "a.b.example.org", False),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "10.0.0.6", False),
        ("dn1.example.org", "10.0.0.5", False),
    ],
)
def test_a_certificate_is_for_the_hosts_that_it_names(
    authorities: Authorities, issued: str, host: str, *, matches: bool
) -> None:
    tls = issue(authorities.ours, authorities.folder / "named", issued)
    if matches:
        check_name(read_files(tls), host)
        return
    with pytest.raises(ConfigError, match=f"is not for {host}, .*but for .*{issued[2:]}"):
        check_name(read_files(tls), host)
