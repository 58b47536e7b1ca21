"""Options of a connection to a peer: its address, and the files of mutual TLS."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runtime.config import check_address
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.rpc import Tls


def tls_options(peer: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Options of a connection to a peer, for `tls_of`, and `insecure`."""

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


def tls_of(cert: str | None, key: str | None, ca: str | None) -> "Tls | None":
    """The files of `tls_options`; None without any.

    Raises:
        UsageError: only some are given.
    """
    given = [path for path in (cert, key, ca) if path]
    if not given:
        return None
    if cert is None or key is None or ca is None:
        raise UsageError("--tls-cert, --tls-key and --tls-ca go together")
    # Imported here, because gRPC is slow to import, and most commands name no peer.
    from runtime.rpc import Tls

    return Tls(Path(cert), Path(key), Path(ca))
