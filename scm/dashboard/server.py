"""The page's HTTP server, in a thread of the controller's process.

A browser sends a request at once and reads the answer at once. A connection that does
not is ended: by its time, or before that if all connections are taken and a new one
comes.
"""

import asyncio
import socket
import threading

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from runtime.errors import ConfigError

# More requests at once get 503. Each page takes milliseconds.
_CONNECTIONS_MAX = 32
# An idle connection ends so soon.
_KEEP_ALIVE_S = 5
# For the head of a request, from the connection or the answer before it.
_HEAD_S = 10.0
# For the answer, which may wait for agents' trees, and for reading it.
_ANSWER_S = 60.0
_STOP_S = 2
_BACKLOG = 64


class DashboardServer:
    """Serves the page until closed; `port` is the bound port, `thread` serves it."""

    def __init__(
        self,
        app: Starlette,
        host: str,
        port: int,
        *,
        head_s: float = _HEAD_S,
        answer_s: float = _ANSWER_S,
    ) -> None:
        """Start to serve; port 0 means any free port. A connection that takes longer
        than `head_s` to send the head of a request, or than `answer_s` after that to
        read the answer, is ended.

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

        class Connection(_BoundedConnection):
            head_limit_s, answer_limit_s = head_s, answer_s

        config = uvicorn.Config(
            app,
            http=Connection,
            loop="asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            # Of uvicorn, which refuses the request that reaches it.
            limit_concurrency=_CONNECTIONS_MAX + 1,
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


class _BoundedConnection(H11Protocol):
    """A connection of uvicorn that ends when it takes too long, and gives way to a new
    one while it waits for its client.
    """

    head_limit_s: float
    answer_limit_s: float
    _timer: asyncio.TimerHandle | None = None
    # When it was opened, or its last answer written.
    _since_s = 0.0
    _is_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of asyncio: the connection is open."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self._restart()
        others = [
            one
            for one in self.connections
            if isinstance(one, _BoundedConnection) and one is not self and not one._is_ended
        ]
        waiting = sorted(
            (one for one in others if not one._is_running),
            key=lambda one: (one._is_unread, one._since_s),
        )
        for one in waiting[: max(0, len(others) + 1 - _CONNECTIONS_MAX)]:
            one._end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio: the connection is closed."""
        super().connection_lost(exc)
        if self._timer:
            self._timer.cancel()

    def on_response_complete(self) -> None:
        """Of uvicorn: the answer was written; another request may follow."""
        self._restart()
        super().on_response_complete()

    @property
    def _is_running(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_unread(self) -> bool:
        """Whether the client has not yet read all of an answer."""
        return self.transport.get_write_buffer_size() > 0

    def _restart(self) -> None:
        self._since_s = self.loop.time()
        self._limit(self.head_limit_s)

    def _limit(self, limit_s: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_later(limit_s, self._expire)

    def _expire(self) -> None:
        left_s = self._since_s + self.head_limit_s + self.answer_limit_s - self.loop.time()
        if left_s > 0 and (self._is_running or self._is_unread):
            self._limit(left_s)
        else:
            self._end()

    def _end(self) -> None:
        self._is_ended = True
        # Not `close`, which waits until the client has read what was written.
        self.transport.abort()
