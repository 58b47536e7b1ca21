"""Who requests something of a controller, as far as this machine knows."""

import getpass
import socket


def requester() -> str:
    """The user and host that are stored with a job, a pause or a limit."""
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return f"nobody@{socket.gethostname()}"
