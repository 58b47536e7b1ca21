"""A plan on disk while a run lasts: it takes the same memory for any number of steps.

The file has no name, and vanishes with the process. Nobody needs it afterwards: the
next run compares anew.
"""

import os
import pickle
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from replicator.proven_plan import ProvenStep
from runtime.disk import disk_error

_LENGTH_BYTES = 4
# Read and written at a time.
_BUFFER_BYTES = 1 << 18


class PlanSpool:
    """Steps in the order in which they were added. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Make an empty one on the disk of a folder.

        Raises:
            DiskError: the file cannot be made.
        """
        self._folder = folder
        self._lock = threading.Lock()
        self._length = 0
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=_BUFFER_BYTES)  # noqa: SIM115 - see `close`
        except OSError as error:
            raise disk_error("write a plan in", folder, error) from error

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ProvenStep]:
        """Steps, also those that are added meanwhile."""
        at, held = 0, b""
        while True:
            with self._lock:
                self._flush()
                held += os.pread(self._file.fileno(), _BUFFER_BYTES, at + len(held))
            if not held:
                return
            used = 0
            while len(held) - used >= _LENGTH_BYTES:
                end = used + _LENGTH_BYTES
                end += int.from_bytes(held[used:end], "big")
                if end > len(held):
                    break
                # This process alone has written it.
                step = pickle.loads(held[used + _LENGTH_BYTES : end])
                assert isinstance(step, ProvenStep)
                yield step
                used = end
            at, held = at + used, held[used:]

    def add(self, step: ProvenStep) -> None:
        """Add a step at the end.

        Raises:
            DiskError: the disk is full, or fails.
        """
        data = pickle.dumps(step, pickle.HIGHEST_PROTOCOL)
        with self._lock:
            try:
                self._file.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
            except OSError as error:
                raise disk_error("write a plan in", self._folder, error) from error
            self._length += 1

    def clear(self) -> None:
        """Begin anew.

        Raises:
            DiskError: the file cannot be cut.
        """
        with self._lock:
            self._flush()
            self._file.truncate(0)
            self._file.seek(0)
            self._length = 0

    def close(self) -> None:
        """Forget all; idempotent. What a full disk has not taken is forgotten, too."""
        with suppress(OSError):
            self._file.close()

    def _flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise disk_error("write a plan in", self._folder, error) from error
