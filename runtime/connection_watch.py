"""Sees when a gRPC channel is connected anew.

gRPC looks at a watched channel from a thread of its own, which fails aloud where it
looks at one that was closed a moment before. So a watch is ended before its channel is
closed.
"""

import threading
import time
from collections.abc import Callable

import grpc

# The thread's first look comes before it asks whether anybody still watches.
_FIRST_LOOK_S = 1.0
# From then on it asks, and waits 0.2 s for a change, in turn. It ends when it asks and
# nobody watches. A busy machine may hold it up for a little longer.
_LAST_LOOK_S = 0.3


class ConnectionWatch:
    """Watches one channel until `end`."""

    def __init__(self, channel: grpc.Channel, reconnected: Callable[[], None]) -> None:
        """`reconnected` is called in another thread for each connection but the
        first.
        """
        self._channel, self._reconnected = channel, reconnected
        self._was_ready = False
        self._has_looked = threading.Event()
        channel.subscribe(self._note)

    def end(self) -> None:
        """Watch no more; from then on the channel may be closed."""
        self._has_looked.wait(_FIRST_LOOK_S)
        self._channel.unsubscribe(self._note)
        # gRPC tells nobody when its thread has ended, and hands out none to join: all
        # that is known of it is how long it waits.
        time.sleep(_LAST_LOOK_S)

    def _note(self, state: grpc.ChannelConnectivity) -> None:
        self._has_looked.set()
        if state is grpc.ChannelConnectivity.READY:
            if self._was_ready:
                self._reconnected()
            self._was_ready = True
