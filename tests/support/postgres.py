"""A PostgreSQL server of Debian's packages, in a folder of its own, never as root."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, SIGKILL

from tests.support.waiting import wait_until

# The account that Debian's package makes.
_ACCOUNT = "postgres"
_DEBIAN = Path("/usr/lib/postgresql")


class PostgresServer:
    """A running server; `url` names its one database, by a socket in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._data = folder / "data"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"postgresql://{_ACCOUNT}@/postgres?host={folder}"
        if os.geteuid() == 0:
            account = pwd.getpwnam(_ACCOUNT)
            os.chown(folder, account.pw_uid, account.pw_gid)
        subprocess.run(
            [*_as_account(), str(_tool("initdb")), "-D", str(self._data), "-U", _ACCOUNT,
             "--auth=trust", "--no-sync"],
            check=True, capture_output=True, cwd="/",
        )  # fmt: skip

    def start(self) -> None:
        """Start, and wait until it answers."""
        words = [
            *_as_account(), str(_tool("postgres")), "-D", str(self._data), "-k", str(self.folder),
            "-c", "listen_addresses=", "-c", "shared_buffers=16MB", "-c", "max_connections=40",
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/"
            )
        ready = [str(_tool("pg_isready")), "-q", "-h", str(self.folder), "-U", _ACCOUNT]
        wait_until(
            lambda: subprocess.run(ready, check=False).returncode == 0, "PostgreSQL to answer"
        )

    def stop(self, signal: int = SIGINT) -> None:
        """End the server: SIGINT ends connections, SIGKILL everything at once."""
        if self._process is None:
            return
        # Not the one that changed the account: it may have become the server itself.
        pid_file = self._data / "postmaster.pid"
        if pid_file.exists():
            os.kill(int(pid_file.read_text().split()[0]), signal)
        self._process.wait(30)
        self._process = None


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """A server in a short path: the name of its socket has to fit 107 bytes."""
    server = PostgresServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop(SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _tool(name: str) -> Path:
    """The newest version of a tool that is installed."""
    found = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    assert found, "PostgreSQL is missing: run `make setup-peers`"
    return found[-1]


def _as_account() -> Sequence[str]:
    """PostgreSQL refuses to run as root."""
    return (
        ("setpriv", f"--reuid={_ACCOUNT}", f"--regid={_ACCOUNT}", "--clear-groups")
        if (os.geteuid() == 0)
        else ()
    )
