"""Certificates of processes on loopback, and a server that has them."""

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trustme

from runtime.rpc import start_server
from runtime.tls_files import Tls
from tests.support.identities import issued

OLD = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def issue(
    authority: trustme.CA,
    folder: Path,
    host: str = "127.0.0.1",
    *,
    identity: str = "",
    not_before: datetime.datetime | None = None,
    not_after: datetime.datetime | None = None,
) -> Tls:
    """New files in a folder, over those that are there; `identity` is ROLE/NAME."""
    folder.mkdir(exist_ok=True)
    tls = Tls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    if identity:
        cert, key = issued(authority, host, identity, not_before=not_before, not_after=not_after)
    else:
        made = authority.issue_cert(host, not_before=not_before, not_after=not_after)
        key = made.private_key_pem.bytes()
        cert = b"".join(part.bytes() for part in made.cert_chain_pems)
    tls.key.write_bytes(key)
    tls.cert.write_bytes(cert)
    authority.cert_pem.write_to_path(tls.ca)
    return tls


@contextmanager
def serving(tls: Tls | None) -> Iterator[str]:
    """The address of a server with grpc's health service."""
    server = start_server("127.0.0.1:0", [], tls=tls)
    try:
        yield server.address
    finally:
        server.stop(0)
