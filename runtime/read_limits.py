"""Limits on what a server reads for its callers: the rate of all of them together, and
how many bytes one of them may have under way.

Bytes are under way from before they are read until gRPC has taken the message that they
are in, and wants the next one. So a caller that requests much and takes little holds no
more memory than its share, and no caller waits behind more than the others' shares.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from runtime.call_limits import host_of
from runtime.errors import OperationInterruptedError
from runtime.rate_limit import RateLimiter

# How late an ended call is noticed that waits for its turn.
_SLICE_S = 0.2


class ReadLimits:
    """The limits of one server. Thread-safe."""

    def __init__(self, limiter: RateLimiter, client_bytes_max: int) -> None:
        """`limiter` has the rate; `client_bytes_max` are those of one host."""
        assert client_bytes_max > 0
        self._limiter = limiter
        self._client_bytes_max = client_bytes_max
        self._changed = threading.Condition()
        self._under_way = Counter[str]()

    @contextmanager
    def admitted(self, context: grpc.ServicerContext, length_bytes: int) -> Iterator[None]:
        """Wait until so many bytes may be read for the caller, and count them as under
        way inside. More than the limit are admitted alone.

        Raises:
            OperationInterruptedError: the call ended before its turn.
        """
        client = host_of(context)
        with self._changed:
            while self._under_way[client] + length_bytes > max(
                self._client_bytes_max, length_bytes
            ):
                if not context.is_active():
                    raise OperationInterruptedError("the call ended before its turn to read")
                self._changed.wait(_SLICE_S)
            self._under_way[client] += length_bytes
        try:
            self._limiter.take(length_bytes)
            yield
        finally:
            with self._changed:
                self._under_way[client] -= length_bytes
                if self._under_way[client] <= 0:
                    del self._under_way[client]
                self._changed.notify_all()
