"""A channel by mutual TLS that outlives its certificates.

gRPC reads the credentials of a channel once. So behind this channel is another one,
which is replaced when the files change. Calls under way end on the channel on which
they began: it is closed once it has none.
"""

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import grpc

from runtime.tls_files import TlsBytes
from runtime.tls_renewal import RenewableTls

_Bind = Callable[[grpc.Channel], Callable[..., Any]]


class RenewableChannel(grpc.Channel):
    """A channel whose new calls use the files as they are by now. Thread-safe."""

    def __init__(self, tls: RenewableTls, connect: Callable[[TlsBytes], grpc.Channel]) -> None:
        """`connect` opens a channel with what it gets."""
        self._tls = tls
        self._connect = connect
        self._lock = Lock()
        self._latest = _Connection(tls.current(), connect)
        self._replaced: list[_Connection] = []
        self._is_closed = False

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._method(
            lambda channel: channel.unary_unary(*method, **options), is_stream=False
        )

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._method(
            lambda channel: channel.unary_stream(*method, **options), is_stream=True
        )

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._method(
            lambda channel: channel.stream_unary(*method, **options), is_stream=False
        )

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._method(
            lambda channel: channel.stream_stream(*method, **options), is_stream=True
        )

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        """See grpc.Channel; only of the connection by the present files."""
        self._latest.channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """See grpc.Channel."""
        self._latest.channel.unsubscribe(callback)

    def close(self) -> None:
        """Close all connections, and cancel their calls."""
        with self._lock:
            self._is_closed = True
            connections = [self._latest, *self._replaced]
            self._replaced = []
        for connection in connections:
            connection.channel.close()

    def __enter__(self) -> "RenewableChannel":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _method(self, bind: _Bind, *, is_stream: bool) -> Callable[..., Any]:
        """What calls a method, whichever connection there is."""

        def call(request: Any, **how: Any) -> Any:
            connection = self._take()
            ended = partial(self._give_back, connection)
            try:
                answer = connection.method(bind)(request, **how)
            except BaseException:
                ended()
                raise
            # False if it has ended already.
            if not (is_stream and answer.add_callback(ended)):
                ended()
            return answer

        return call

    def _take(self) -> "_Connection":
        """The connection of the next call."""
        idle: list[_Connection] = []
        with self._lock:
            found = self._tls.current()
            if found is not self._latest.tls and not self._is_closed:
                self._replaced.append(self._latest)
                self._latest = _Connection(found, self._connect)
            # Not by the callback of their last call, which runs in their own thread.
            idle = [one for one in self._replaced if not one.calls]
            self._replaced = [one for one in self._replaced if one.calls]
            self._latest.calls += 1
            taken = self._latest
        for connection in idle:
            connection.channel.close()
        return taken

    def _give_back(self, connection: "_Connection") -> None:
        with self._lock:
            connection.calls -= 1


class _Connection:
    """A channel by the files of one time, and how many calls it has under way."""

    def __init__(self, tls: TlsBytes, connect: Callable[[TlsBytes], grpc.Channel]) -> None:
        self.tls = tls
        self.channel = connect(tls)
        self.calls = 0
        self._methods: dict[_Bind, Callable[..., Any]] = {}

    def method(self, bind: _Bind) -> Callable[..., Any]:
        """The method of this channel; each is bound once."""
        if bind not in self._methods:
            self._methods[bind] = bind(self.channel)
        return self._methods[bind]
