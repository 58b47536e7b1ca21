"""Whether anything listens where Spark should be; Spark itself tries for minutes."""

import socket
from urllib.parse import urlsplit

from runtime.errors import ProcessFailedError, UsageError

# How long a machine may take to answer at all.
CONNECT_S = 5.0


def check_listening(master: str, scheme: str, what: str, *, port: int | None = None) -> None:
    """Raise unless one of the places of a `master` listens; several have commas between
    them. `port` is that of a place without one.

    Raises:
        UsageError: `master` is not a list of addresses.
        ProcessFailedError: none of them accepts a connection.
    """
    reason: OSError | None = None
    for place in master.removeprefix(scheme).split(","):
        try:
            address = urlsplit(f"//{place}")
            host, at = address.hostname or "", address.port or port
            # A lookup encodes the name this way too, but its error is less clear.
            host.encode("idna")
        except ValueError:
            host, at = "", None
        if not host or not at or address.path:
            raise UsageError(
                f"{master!r} is not the address of a {what}",
                hint=f"it looks like {scheme}HOST:PORT",
            )
        try:
            socket.create_connection((host, at), CONNECT_S).close()
        except OSError as error:
            reason = error
        else:
            return
    raise ProcessFailedError(f"no {what} answers at {master}: {reason}") from reason
