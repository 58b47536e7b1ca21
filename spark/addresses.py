"""Whether a master can be meant, and whether anything listens there.

Spark itself tries for minutes, and refuses a malformed master only once Java runs.
"""

import re
import socket
from urllib.parse import urlsplit

from runtime.errors import ProcessFailedError, UsageError

# How long a machine may take to answer at all.
CONNECT_S = 5.0

# Threads: Spark reads a Java int.
_COUNT = "0*[1-9][0-9]{0,8}"
_MASTER = re.compile(rf"local|local\[({_COUNT}|\*)(\s*,\s*{_COUNT})?\]|yarn|(spark|k8s|sc)://.+")


def check_master(master: str) -> None:
    """Refuse a master of a form that Spark does not know.

    Raises:
        UsageError: it is one.
    """
    if not _MASTER.fullmatch(master):
        # What follows the address of a server may be secret.
        raise UsageError(
            f"{master.partition(';')[0]!r} is not a Spark master",
            hint=(
                "it looks like local[N], local[*], spark://HOST:PORT, yarn, k8s://https://HOST:PORT"
                " or sc://HOST:PORT"
            ),
        )


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
