"""What is wrong with a connection by TLS is said, whichever side has it."""

import datetime
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from runtime.errors import ConfigError
from runtime.rpc import Tls, start_server
from runtime.tls_faults import check_files, connection_fault
from tests.e2e.test_mutual_tls import certificate

OLD = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def files(folder: Path) -> Tls:
    return Tls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def issued(authority: trustme.CA, folder: Path, host: str = "127.0.0.1", **more: object) -> Tls:
    """The files of a process, by an authority."""
    folder.mkdir()
    made = authority.issue_cert(host, **more)  # type: ignore[arg-type]
    made.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "cert.pem").write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return files(folder)


class Authorities:
    """Ours, and one that nobody trusts; servers of processes that ours certified."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours, self.stranger = trustme.CA(), trustme.CA()
        self.client = files(certificate(self.ours, folder, "client"))


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


@pytest.fixture
def serve() -> Iterator[Callable[[Tls | None], str]]:
    """Starts a server with these files, and returns its address."""
    running = []

    def started(tls: Tls | None) -> str:
        running.append(start_server("127.0.0.1:0", [], tls=tls))
        return running[-1].address

    yield started
    for server in running:
        server.stop(0)


Serve = Callable[[Tls | None], str]


def test_nothing_is_said_of_a_connection_that_works(authorities: Authorities, serve: Serve) -> None:
    address = serve(issued(authorities.ours, authorities.folder / "server"))
    assert connection_fault(address, authorities.client) == ""
    assert connection_fault(serve(None), None) == ""


def test_nothing_is_said_where_nobody_listens(authorities: Authorities) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert connection_fault(address, None) == ""
        assert connection_fault(address, authorities.client) == ""


def test_one_side_without_tls_is_named(authorities: Authorities, serve: Serve) -> None:
    address = serve(issued(authorities.ours, authorities.folder / "server"))
    assert connection_fault(address, None) == "it wants TLS, and no certificate was given"
    assert connection_fault(serve(None), authorities.client) == "it does not speak TLS"


def test_a_server_of_another_authority_is_named(authorities: Authorities, serve: Serve) -> None:
    address = serve(issued(authorities.stranger, authorities.folder / "server"))
    fault = connection_fault(address, authorities.client)
    assert fault.startswith(f"its certificate does not hold by {authorities.client.ca}: ")
    assert "issuer certificate" in fault


def test_an_expired_server_and_one_of_another_name_are_named(
    authorities: Authorities, serve: Serve
) -> None:
    expired = issued(authorities.ours, authorities.folder / "expired", not_after=OLD)
    assert "certificate has expired" in connection_fault(serve(expired), authorities.client)
    other = issued(authorities.ours, authorities.folder / "other", "dn1.example.org")
    assert "mismatch" in connection_fault(serve(other), authorities.client)


def test_a_client_that_the_server_refuses_is_named(authorities: Authorities, serve: Serve) -> None:
    address = serve(issued(authorities.ours, authorities.folder / "server"))
    stranger = issued(authorities.stranger, authorities.folder / "stranger")
    fault = connection_fault(address, replace(stranger, ca=authorities.client.ca))
    assert fault == f"it refuses our certificate {stranger.cert}: unknown ca"
    expired = issued(authorities.ours, authorities.folder / "expired", not_after=OLD)
    assert "certificate expired" in connection_fault(address, expired)


def test_files_that_cannot_serve_are_named(authorities: Authorities) -> None:
    good = authorities.client
    check_files(good)
    other = issued(authorities.ours, authorities.folder / "other")
    garbage = authorities.folder / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    expired = issued(authorities.ours, authorities.folder / "expired", not_after=OLD)
    for bad, path, text in (
        (replace(good, key=other.key), other.key, f"is not the key of {good.cert}"),
        (replace(good, cert=good.key), good.key, "is not a certificate"),
        (replace(good, key=good.cert), good.cert, "is not a private key"),
        (replace(good, ca=garbage), garbage, "is not a certificate"),
        (replace(good, ca=authorities.folder), authorities.folder, "cannot be read: Is a dir"),
        (replace(good, cert=Path("/no")), Path("/no"), "cannot be read: No such file"),
        (expired, expired.cert, "has expired on 2020-01-01"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_files(bad)
        assert caught.value.message.startswith(f"{path}: {text}")
    with pytest.raises(ConfigError, match="is valid from "):
        check_files(good, now_s=0.0)
