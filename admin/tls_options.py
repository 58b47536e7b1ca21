"""Options of a connection to a peer: its address, and the files of mutual TLS."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtime.errors import UsageError
from runtime.setting_values import check_address

if TYPE_CHECKING:
    from admin.client_config import ClientConfig
    from runtime.tls_files import Tls


def tls_options(peer: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options of a connection to a peer, for `security_of`."""

    def added(command: Callable[..., None]) -> Callable[..., None]:
        path = click.Path(dir_okay=False)
        for option in (
            click.option(
                "--insecure",
                is_flag=True,
                help=f"Allow a connection without TLS to a {peer} that is not on loopback.",
            ),
            click.option(
                "--tls-ca",
                type=path,
                help=f"The certificate of the authority that signed the {peer}'s, PEM.",
            ),
            click.option("--tls-key", type=path, help="The private key of --tls-cert, PEM."),
            click.option(
                "--tls-cert",
                type=path,
                help="The client certificate, PEM. Give all three --tls options or none.",
            ),
        ):
            command = option(command)
        return command

    return added


def check_option_address(option: str, address: str) -> None:
    """Check the host and port that an option names.

    Raises:
        UsageError: they are not both there, or the port is invalid.
    """
    try:
        check_address(address)
    except ValueError as error:
        # gRPC would use another port for one above 65535, and would accept a name
        # without a port.
        raise UsageError(f"{option}: {error}") from error


@dataclass(frozen=True, slots=True)
class Security:
    """How a peer is reached: by mutual TLS, or without. `insecure` allows the latter
    beyond loopback.
    """

    tls: "Tls | None"
    insecure: bool


def security_of(
    cert: str | None, key: str | None, ca: str | None, config: "ClientConfig", *, insecure: bool
) -> Security:
    """What `tls_options` say; without any of them, what the client's settings say.

    Raises:
        UsageError: only some files are given.
    """
    given = [path for path in (cert, key, ca) if path]
    if not given and (insecure or config.tls is None):
        return Security(None, insecure or config.insecure)
    # Imported here, because gRPC is slow to import, and most commands name no peer.
    from runtime.tls_files import Tls

    if not given:
        assert config.tls is not None
        return Security(config.tls.files(config.roles), config.insecure)
    if cert is None or key is None or ca is None:
        raise UsageError("--tls-cert, --tls-key and --tls-ca go together")
    return Security(Tls(Path(cert), Path(key), Path(ca), config.roles.table), insecure)
