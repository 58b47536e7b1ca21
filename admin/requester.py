"""Who requests something of a controller, as far as this machine knows."""

import getpass
import socket

from merkle.limits import TEXT_CHARACTERS_MAX
from runtime.output import printable


def requester() -> str:
    """The user and host that are stored with a job, a pause or a limit: one line, since
    the environment may name any user.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "nobody"
    return printable(f"{user}@{socket.gethostname()}")[:TEXT_CHARACTERS_MAX]
