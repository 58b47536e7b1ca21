"""Counts of what crossed a connection."""

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests, and the bytes of requests and answers with their headers, before TLS
    and TCP.
    """

    requests: int = 0
    bytes: int = 0


class TrafficCounter:
    """Adds up traffic. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests = self._bytes = 0

    def add(self, length_bytes: int, *, requests: int = 0) -> None:
        """Count bytes of either direction, and requests."""
        with self._lock:
            self._requests += requests
            self._bytes += length_bytes

    def read(self) -> Traffic:
        """What was counted so far."""
        with self._lock:
            return Traffic(self._requests, self._bytes)
