"""A watched channel is closed without an error in a thread of gRPC's."""

import threading
import time
from collections.abc import Callable

import grpc
import pytest

from runtime.connection_watch import ConnectionWatch
from runtime.rpc import open_channel, start_server

# Longer than a thread needs to begin, and than one is held up on an idle machine.
LOOK_S = 0.05


class SlowChannel:
    """Looks at its state as gRPC does, from a thread that takes its time."""

    def __init__(self) -> None:
        self.is_closed, self.failures = False, 0
        self.callbacks = list[Callable[[grpc.ChannelConnectivity], None]]()
        self.thread = threading.Thread(target=self._look)

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """See grpc.Channel."""
        self.callbacks.append(callback)
        self.thread.start()

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """See grpc.Channel."""
        self.callbacks.remove(callback)

    def _look(self) -> None:
        time.sleep(LOOK_S)
        self.failures += self.is_closed
        for callback in self.callbacks:
            callback(grpc.ChannelConnectivity.IDLE)
        while self.callbacks:
            time.sleep(LOOK_S)
            self.failures += self.is_closed


def test_a_channel_that_is_closed_at_once_was_looked_at_before() -> None:
    channel = SlowChannel()
    watch = ConnectionWatch(channel, lambda: None)  # type: ignore[arg-type]
    watch.end()
    channel.is_closed = True
    channel.thread.join()
    assert not channel.failures


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[threading.ExceptHookArgs]:
    found = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", found.append)
    return found


def nothing(_: grpc.ChannelConnectivity) -> None: ...


def test_each_connection_but_the_first_is_told(errors: list[threading.ExceptHookArgs]) -> None:
    made = threading.Semaphore(0)
    with open_channel("127.0.0.1:1") as nobody:
        ConnectionWatch(nobody, made.release).end()
    server = start_server("127.0.0.1:0", [], insecure=True)
    port = server.port
    with open_channel(f"127.0.0.1:{port}") as channel:
        watch = ConnectionWatch(channel, made.release)
        grpc.channel_ready_future(channel).result(10)
        server.stop(0)
        again = start_server(f"127.0.0.1:{port}", [], insecure=True)
        while True:
            # Whoever still watches at the close, has a thread of gRPC's that may fail.
            channel.subscribe(nothing, try_to_connect=True)
            is_made = made.acquire(timeout=0.2)
            channel.unsubscribe(nothing)
            if is_made:
                break
        watch.end()
    again.stop(0)
    assert not errors
