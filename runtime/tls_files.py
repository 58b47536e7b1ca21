"""The files of mutual TLS."""

from dataclasses import dataclass, field
from pathlib import Path

from runtime.errors import ConfigError
from runtime.roles import RoleTable
from runtime.settings_files import read_settings_file

# The fact of an error that says why a connection by TLS failed.
FAULT = "tls_fault"


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of mutual TLS: our certificate and key, and the authority that must
    have signed the peer's certificate. `roles` has the identities of certificates that
    bear none.
    """

    cert: Path
    key: Path
    ca: Path
    roles: RoleTable = field(default_factory=RoleTable, compare=False)


@dataclass(frozen=True, slots=True)
class TlsBytes:
    """What the files of a `Tls` held when they were read."""

    files: Tls
    cert: bytes
    key: bytes
    ca: bytes


def read_files(tls: Tls) -> TlsBytes:
    """The bytes of the files, which are PEM by their first look.

    Raises:
        ConfigError: a file cannot be read, or is not PEM.
    """
    parts = []
    for path in (tls.cert, tls.key, tls.ca):
        pem = read_settings_file(path)
        # grpc accepts any bytes here, and the first call fails as if the peer were
        # unreachable.
        if b"-----BEGIN " not in pem:
            raise ConfigError(f"{path}: is not a PEM file", path=str(path))
        parts.append(pem)
    return TlsBytes(tls, *parts)
