"""The two threads of a replication: one reads the log, the other does the work."""

import threading
from contextlib import AbstractContextManager

from replicator.syncer.engine import ReplicationEngine


class ReplicationThreads(AbstractContextManager["ReplicationThreads"]):
    """Drives one replication from its creation until it is closed, or is over."""

    def __init__(self, engine: ReplicationEngine, name: str) -> None:
        """Start the threads; the engine is theirs until `close` returns."""
        self._engine = engine
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=loop, name=f"{name}-{what}", daemon=True)
            for what, loop in (("receive", self._receive), ("work", self._work))
        ]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_error: object) -> None:
        self.close()

    def is_alive(self) -> bool:
        """Whether both threads run."""
        return all(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """End the threads, wait for requests that are on their way, and close the
        engine; idempotent.
        """
        self._stop.set()
        self._engine.interrupt()
        for thread in self._threads:
            thread.join()
        self._engine.close()

    def _receive(self) -> None:
        while not self._stop.is_set() and not self._engine.is_over:
            self._stop.wait(self._engine.receive())

    def _work(self) -> None:
        while not self._stop.is_set() and not self._engine.is_over:
            wait_s = self._engine.work()
            if wait_s:
                self._engine.wait(wait_s)
