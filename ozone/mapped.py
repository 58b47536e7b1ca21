"""Window checksums of mapped files, computed in a worker process that may die.

A mapped file spares the copy out of the page cache, which bounds every plain read. Its price: a disk error, or a file
cut short underneath, is no error code but the signal SIGBUS, and that ends the process. So the mapping is done in a
worker; whatever becomes of it, the caller gets a MappedReadError, reads that file the plain way, where each fault has
a name, and its next call starts a new worker.
"""

import contextlib
import os
import resource
import signal
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import PROT_READ, mmap
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from threading import Lock
from types import TracebackType
from typing import Self

from merkle.checksum import ChecksumType, window_checksums
from merkle.errors import MappedReadError

# A block file is 256 MiB, seconds even on a slow disk; a worker that takes longer hangs in the kernel.
TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class MappedRange:
    """A part of a file, and the windows it is cut into."""

    offset: int
    length_bytes: int
    checksum_type: ChecksumType
    bytes_per_checksum: int

    def __post_init__(self) -> None:
        assert self.offset >= 0
        assert self.length_bytes >= 0
        assert self.bytes_per_checksum > 0 or self.checksum_type is ChecksumType.NONE


class MappedReader:
    """Owns the worker, which starts with the first call; callers on several threads take turns."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._turn = Lock()
        self._worker: _Worker | None = None

    def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
        """The window entries of all ranges, joined in order, as `window_checksums` gives them.

        Raises:
            MappedReadError: the file cannot be opened, is no regular file, ends before a range does, changed
                underneath, or the worker died or took too long.
        """
        with self._turn:
            try:
                worker = self._worker = self._worker or _start()
            except OSError as error:
                raise self._given_up(path, f"no worker can be started: {error.strerror or error}") from error
            try:
                worker.connection.send((os.fspath(path), tuple(ranges)))
                if not worker.connection.poll(self._timeout_s):
                    raise self._given_up(path, f"no answer in {self._timeout_s:g} s")
                answer: bytes | str = worker.connection.recv()
            except (EOFError, OSError) as error:
                raise self._given_up(path, f"the worker died ({worker.ended()})") from error
        if isinstance(answer, str):
            raise MappedReadError(f"cannot check {path} mapped: {answer}", path=str(path))
        return answer

    def close(self) -> None:
        """Stop the worker."""
        with self._turn:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _given_up(self, path: Path, reason: str) -> MappedReadError:
        self._stop()
        return MappedReadError(f"cannot check {path} mapped: {reason}", path=str(path))

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Popen[bytes]
    connection: Connection

    def stop(self) -> None:
        self.connection.close()
        # It ends by itself when its pipe closes, unless it is in the middle of a file.
        self.process.kill()
        self.ended()

    def ended(self) -> str:
        """Wait for its end, and say how it came."""
        try:
            status = self.process.wait(_STOP_TIMEOUT_S)
        except TimeoutExpired:
            return "it hangs in the kernel"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _start() -> _Worker:
    ours, theirs = Pipe()
    # An interpreter of its own: a fork would inherit locks that other threads hold. It loads this module alone and not,
    # as multiprocessing would have it, the program that it works for.
    code = f"import sys; sys.path[:] = {sys.path!r}; from ozone.mapped import serve; serve({theirs.fileno()})"
    try:
        # A process group of its own: an interrupt at the terminal is for the parent to handle.
        process = Popen(
            [sys.executable, "-c", code], stdin=DEVNULL, stdout=DEVNULL, pass_fds=[theirs.fileno()], process_group=0
        )
    except OSError:
        ours.close()
        raise
    finally:
        # Else the pipe would stay open when the worker dies, and the answer would be waited for in vain.
        theirs.close()
    return _Worker(process, ours)


def serve(fd: int) -> None:
    """The worker: answer with entries, or with the reason why there are none, until the pipe closes."""
    # A core file would hold the whole mapping.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(fd)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            path, ranges = connection.recv()
            try:
                answer: bytes | str = _checksums(path, ranges)
            except OSError as error:
                answer = error.strerror or str(error)
            connection.send(answer)


def _checksums(path: str, ranges: Sequence[MappedRange]) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if any(part.offset + part.length_bytes > status.st_size for part in ranges):
            raise OSError(f"the file ends at {status.st_size}, before a range does")
        if not status.st_size:
            return b""
        with mmap(fd, status.st_size, prot=PROT_READ) as mapped, memoryview(mapped) as view:
            entries = []
            for part in ranges:
                with view[part.offset : part.offset + part.length_bytes] as data:
                    entries.append(window_checksums(data, part.checksum_type, part.bytes_per_checksum))
            return b"".join(entries)
    finally:
        os.close(fd)
