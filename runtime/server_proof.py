"""Whose server we call: checked before the first call, since a certificate of the
cluster's authority is not enough. A datanode's must not answer as a controller.

gRPC shows a client no certificate of its server. So a handshake of our own comes first:
it checks authority, dates and host as gRPC does, and the role. The connection then
trusts that one certificate and no other, so nobody can step in between the two.
"""

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from merkle.errors import ReconcileError
from runtime.certificates import described
from runtime.roles import Identity, Role, bears, identity_of, role_fault
from runtime.setting_values import split_address
from runtime.tls_files import TlsBytes

# Of connecting, and of the handshake.
_STEP_S = 3.0


class ServerRoleError(ReconcileError):
    """The process at an address has not the role for which it is called."""

    code = "server_role"
    exit_status = 6


class ServerUnprovenError(grpc.RpcError):
    """No handshake came about, as if gRPC had said so."""

    def __init__(self, details: str) -> None:
        super().__init__(details)
        self._details = details

    def code(self) -> grpc.StatusCode:
        """That of a server which does not answer."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Why there is no connection."""
        return self._details

    def trailing_metadata(self) -> tuple[()]:
        """Nothing: no server has answered."""
        return ()


def prove_server(address: str, wanted: Role | Identity, found: TlsBytes) -> bytes:
    """The certificate, as PEM, of the server at `host:port`, which has the wanted role
    by the certificate or by the table of our settings.

    Raises:
        ServerRoleError: it has another role, or none.
        ServerUnprovenError: it does not answer, or not by mutual TLS that holds.
    """
    host, port = split_address(address)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=found.ca.decode("ascii", "ignore"))
        context.set_alpn_protocols(["h2"])
        # As they were read: the files may be in the midst of a renewal.
        with _in_memory(found.cert) as cert, _in_memory(found.key) as key:
            context.load_cert_chain(cert, key)
        with (
            socket.create_connection((host, port), _STEP_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as wrapped,
        ):
            der = wrapped.getpeercert(binary_form=True)
    # ValueError: what is no name of a host.
    except (OSError, ValueError) as error:
        raise ServerUnprovenError(f"no connection by TLS: {error}") from error
    assert der is not None
    pem = ssl.DER_cert_to_PEM_cert(der).encode()
    certificate = described(pem)
    bearer = identity_of(certificate, found.files.roles)
    if not bears(bearer, wanted):
        raise ServerRoleError(
            f"the process at {address} is not who is called: "
            + role_fault(certificate, bearer, wanted),
            hint="Is the address right? Otherwise somebody answers in its place. A certificate"
            " that was made elsewhere gets its role from [roles] of our own settings.",
        )
    return pem


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A path with these bytes, which are on no disk."""
    with os.fdopen(os.memfd_create("pem"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"
