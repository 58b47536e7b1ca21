"""A channel by mutual TLS that outlives its certificates.

gRPC reads the credentials of a channel once. So behind this channel is another one,
which is replaced when the files change, or when the server has another certificate.
Calls under way end on the channel on which they began: it is closed once it has none.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import Any

import grpc

from runtime.tls_files import TlsBytes
from runtime.tls_renewal import RenewableTls

# A server whose certificate was renewed is noticed within this time, or by a call that
# fails; its connections live for longer.
_PROVEN_FOR_S = 300.0
# After a proof that failed, the next begins after so many times what it took. A server
# that refuses is asked again at once, and one that hangs costs little of our time.
_PAUSE_TIMES = 10
_Bind = Callable[[grpc.Channel], Callable[..., Any]]


class RenewableChannel(grpc.Channel):
    """A channel whose new calls use the files as they are by now. Thread-safe. A first
    call may take as long as a proof, whatever its deadline.
    """

    def __init__(
        self,
        tls: RenewableTls,
        connect: Callable[[TlsBytes], grpc.Channel],
        prove: Callable[[TlsBytes], bytes] | None = None,
        *,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect` opens a channel with what it gets. `prove` returns the certificate
        of the right server, which is then trusted alone. It raises ReconcileError for
        another server and grpc.RpcError for none.
        """
        self._tls = tls
        self._connect = connect
        self._prove = prove
        self._monotonic_s = monotonic_s
        self._lock = Lock()
        # Held during a proof, which waits for the server; the other lock never waits.
        self._proving = Lock()
        self._failure: grpc.RpcError | None = None
        self._prove_from_s = -math.inf
        self._latest: _Connection | None = None
        self._replaced: list[_Connection] = []
        self._is_closed = False
        if prove is None:
            self._renew()

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
        self._present().channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """See grpc.Channel."""
        self._present().channel.unsubscribe(callback)

    def close(self) -> None:
        """Close all connections, and cancel their calls."""
        with self._lock:
            self._is_closed = True
            connections = [*([self._latest] if self._latest else []), *self._replaced]
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
            try:
                answer = connection.method(bind)(request, **how)
            except BaseException as error:
                self._give_back(connection, error)
                raise

            def ended() -> None:
                self._give_back(connection, answer if is_stream else None)

            # False if it has ended already.
            if not (is_stream and answer.add_callback(ended)):
                ended()
            return answer

        return call

    def _present(self) -> "_Connection":
        self._renew_if_due()
        assert self._latest is not None
        return self._latest

    def _take(self) -> "_Connection":
        """The connection of the next call."""
        self._renew_if_due()
        with self._lock:
            taken = self._latest
            if taken is None:
                raise ValueError("the channel is closed")
            # Not by the callback of their last call, which runs in their own thread.
            idle = [one for one in self._replaced if not one.calls]
            self._replaced = [one for one in self._replaced if one.calls]
            taken.calls += 1
        for connection in idle:
            connection.channel.close()
        return taken

    def _renew_if_due(self) -> None:
        """Renew the latest connection where that is due. Others go on with what was
        proven before, meanwhile and after a proof that failed.

        Raises:
            grpc.RpcError: no server was ever proven, and none is there.
        """
        if not self._is_due():
            return
        # The first proof is waited for: there is nothing to go on with.
        if self._proving.acquire(blocking=self._latest is None):
            try:
                if self._is_due():
                    self._renew()
            finally:
                self._proving.release()

    def _is_due(self) -> bool:
        with self._lock:
            latest, is_closed = self._latest, self._is_closed
            failure, has_pause = self._failure, self._monotonic_s() < self._prove_from_s
        if is_closed:
            return False
        if latest is None:
            if failure is not None and has_pause:
                raise failure
            return True
        if self._tls.current() is not latest.tls:
            return True
        return self._prove is not None and latest.is_doubtful(self._monotonic_s()) and not has_pause

    def _renew(self) -> None:
        """Replace the latest connection unless files and server are the same."""
        found, latest = self._tls.current(), self._latest
        began_s = self._monotonic_s()
        try:
            trusted = self._prove(found) if self._prove else found.ca
        except grpc.RpcError as error:
            with self._lock:
                now_s = self._monotonic_s()
                self._failure = error
                self._prove_from_s = now_s + _PAUSE_TIMES * (now_s - began_s)
            # What was proven before may be trusted on: nobody else gets the call.
            if latest is None:
                raise
            trusted = latest.trusted
        else:
            if latest is not None:
                latest.note_proof(began_s)
        if latest is not None and found is latest.tls and trusted == latest.trusted:
            return
        channel = self._connect(replace(found, ca=trusted))
        connection = _Connection(found, trusted, channel, began_s)
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._replaced += [latest] if latest is not None else []
                self._latest = connection
        if is_closed:
            connection.channel.close()

    def _give_back(self, connection: "_Connection", ended: object) -> None:
        """`ended` is the error or the call that tells how it ended."""
        is_lost = isinstance(ended, grpc.RpcError) and _is_unavailable(ended)
        with self._lock:
            connection.calls -= 1
            connection.is_lost |= is_lost


class _Connection:
    """A channel by the files of one time, and how many calls it has under way."""

    def __init__(
        self, tls: TlsBytes, trusted: bytes, channel: grpc.Channel, proven_s: float
    ) -> None:
        self.tls = tls
        self.trusted = trusted
        self.channel = channel
        self.calls = 0
        # A call found nobody, or somebody else.
        self.is_lost = False
        self._proven_s = proven_s
        self._methods: dict[_Bind, Callable[..., Any]] = {}

    def is_doubtful(self, now_s: float) -> bool:
        """Whether the server may have another certificate by now."""
        return self.is_lost or now_s - self._proven_s >= _PROVEN_FOR_S

    def note_proof(self, now_s: float) -> None:
        """The server is there, and proven."""
        self.is_lost, self._proven_s = False, now_s

    def method(self, bind: _Bind) -> Callable[..., Any]:
        """The method of this channel; each is bound once."""
        if bind not in self._methods:
            self._methods[bind] = bind(self.channel)
        return self._methods[bind]


def _is_unavailable(ended: grpc.RpcError) -> bool:
    return ended.code() is grpc.StatusCode.UNAVAILABLE
