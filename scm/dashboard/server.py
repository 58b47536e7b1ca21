"""The page's HTTP server, in a thread of the controller's process."""

import socket
import threading

import uvicorn
from starlette.applications import Starlette

from runtime.errors import ConfigError

# Requests at once; more get 503. Each page takes milliseconds.
_REQUESTS_MAX = 32
# An idle connection ends so soon.
_KEEP_ALIVE_S = 5
_STOP_S = 2
_BACKLOG = 64


class DashboardServer:
    """Serves the page until closed; `port` is the bound port, `thread` serves it."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        """Start to serve; port 0 means any free port.

        Raises:
            ConfigError: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"dashboard address {host}:{port} cannot be bound: {error.strerror}"
            ) from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            limit_concurrency=_REQUESTS_MAX,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_S,
        )
        self._server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self._serve, name="dashboard")
        self.thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.should_exit = True
        self.thread.join()
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])
