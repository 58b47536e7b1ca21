"""A limit on what this process may grow by."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

# Over what the process had before; parsing a message of 32 MiB of the smallest parts
# takes the most (inv-I10).
MEMORY_BYTES_MAX = 256 << 20


@contextmanager
def bounded_memory(length_bytes_max: int = MEMORY_BYTES_MAX) -> Iterator[None]:
    """Fail if the process grows by more than the limit at any time inside."""
    process, done = psutil.Process(), threading.Event()
    before, peak = process.memory_info().rss, 0

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, process.memory_info().rss - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    assert peak <= length_bytes_max, f"grew by {peak >> 20} MiB"
