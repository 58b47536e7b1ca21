"""Writers of a bucket that is being replicated, and what they know it holds."""

import random
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from replicator.stores.port import ObjectProperties, Store, WriteCondition

# Large enough to have a data file of its own in a local bucket.
_ARCHIVED_BYTES = 20_000
_ANYTHING = WriteCondition()
_NOTHING = ObjectProperties()
_KEYS_PER_WRITER = 40
_SIZES = (10, 1_000, 20_000)
# One change in so many is a delete.
_DELETE_SHARE = 8
_PAUSE_S = 0.04


class BucketWriters:
    """Writes objects once, then overwrites and deletes others by several threads; a
    context manager that ends them. It remembers every body.
    """

    def __init__(self, store: Store, writers: int) -> None:
        """Prepare; the store stays the caller's."""
        self._writer = store.writer
        self._pool = ThreadPoolExecutor(writers, "writer")
        self._writers = writers
        self._stop = threading.Event()
        self._running: list[Future[None]] = []
        self._held = dict[str, bytes]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._pool.shutdown()

    def fill(self, objects: int) -> None:
        """Put so many objects, which are not written again."""

        def put(number: int) -> None:
            key = archived_key(number)
            body = archived_body(number)
            self._writer.put(key, body, _NOTHING, _ANYTHING)
            self._held[key] = body

        list(self._pool.map(put, range(objects)))

    def start(self) -> None:
        """Write until `end`."""
        self._running = [self._pool.submit(self._write, one) for one in range(self._writers)]

    def end(self) -> None:
        """Write no more; a write that failed is raised.

        Raises:
            StoreError: the bucket refused a write.
        """
        self._stop.set()
        for one in self._running:
            one.result()

    @property
    def held(self) -> Mapping[str, bytes]:
        """The body of each key, once the writers have ended."""
        return self._held

    def _write(self, number: int) -> None:
        chance = random.Random(number)
        while not self._stop.wait(_PAUSE_S):
            key = f"live/{number}/{chance.randrange(_KEYS_PER_WRITER):02}"
            if chance.randrange(_DELETE_SHARE) == 0:
                self._writer.delete([key])
                self._held.pop(key, None)
            else:
                body = chance.randbytes(chance.choice(_SIZES))
                self._writer.put(key, body, _NOTHING, _ANYTHING)
                self._held[key] = body


def archived_key(number: int) -> str:
    """The key of an object that is written once."""
    return f"archive/{number:05}.jpg"


def archived_body(number: int) -> bytes:
    """Its bytes."""
    return random.Random(number).randbytes(_ARCHIVED_BYTES)


def flip_bit(folder: Path, body: bytes) -> None:
    """Flip a bit of an object in its data file, of which its store knows nothing.
    `folder` is that of a local bucket, in which one file has these bytes.
    """
    files = (one for one in sorted((folder / "data").rglob("*")) if one.is_file())
    damaged = next(
        one for one in files if one.stat().st_size == len(body) and one.read_bytes() == body
    )
    with damaged.open("r+b") as file:
        file.seek(100)
        file.write(bytes([body[100] ^ 1]))
