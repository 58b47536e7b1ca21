"""Window checksums of mapped files, computed in a worker process that may die.

A mapped file spares the copy out of the page cache, which bounds every plain read. Its
price: a disk error, or a file cut short underneath, is no error code but the signal
SIGBUS, and that ends the process. So the mapping is done in a worker; whatever becomes
of it, the caller gets a MappedReadError, reads that file the plain way, where each
fault has a name, and its next request starts a new worker.
"""

import contextlib
import os
import pickle
import resource
import signal
import stat
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
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
from ozone.errors import MappedReadError

# A block file is 256 MiB, seconds even on a slow disk; a worker that takes longer hangs
# in the kernel.
_TIMEOUT_S = 120.0
# So that a request fits into the pipe while the worker is busy with, or waits to send,
# the answer before.
RANGES_MAX = 256
# Linux maps so much with every page that is touched, where it is in the cache
# (fault_around_bytes, mm/memory.c).
_FAULT_AROUND_BYTES = 64 << 10
# Requests sent beside the one that is worked on.
_AHEAD = 1
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


@dataclass(frozen=True, slots=True)
class MappedRequest:
    """What to check of one file; at most `RANGES_MAX` ranges."""

    path: Path
    ranges: tuple[MappedRange, ...]

    def __post_init__(self) -> None:
        assert len(self.ranges) <= RANGES_MAX

    @property
    def plain_ranges(self) -> list[tuple[int, int, int, int]]:
        """For the wire: to read objects takes a worker, whose caches the data have
        emptied, a tenth of its time.
        """
        return [
            (r.offset, r.length_bytes, r.checksum_type.value, r.bytes_per_checksum)
            for r in self.ranges
        ]

    def failed(self, reason: str) -> MappedReadError:
        """The error of a request that was not answered."""
        return MappedReadError(f"cannot check {self.path} mapped: {reason}", path=str(self.path))


class MappedReader:
    """Owns the workers: one for each thread at work, started when there is need.
    Thread-safe.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._idle: list[_Worker] = []
        self._closed = False

    def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
        """The window entries of all ranges, joined in order, as `window_checksums`
        gives them.

        Raises:
            MappedReadError: the file cannot be opened, is no regular file, ends before
                a range does, changed underneath, or the worker died or took too long.
        """
        (answer,) = self.answers([MappedRequest(path, tuple(ranges))])
        if isinstance(answer, MappedReadError):
            raise answer
        return answer

    def answers(
        self, requests: Iterable[MappedRequest]
    ) -> Generator[bytes | MappedReadError, None, None]:
        """To each request, in turn, what `checksums` returns or raises.

        The next request is drawn and sent before an answer is waited for: a worker that
        has to be woken for each loses a good part of its time.
        """
        source, waiting = iter(requests), deque[MappedRequest]()
        worker: _Worker | None = None
        try:
            while True:
                while len(waiting) <= _AHEAD and (request := next(source, None)):
                    waiting.append(request)
                    if worker:
                        worker.send(request)
                if not waiting:
                    break
                answer: bytes | str = ""
                try:
                    if worker is None:
                        worker = self._taken()
                        for request in waiting:
                            worker.send(request)
                    answer = worker.receive(self._timeout_s)
                except TimeoutError:
                    answer = f"no answer in {self._timeout_s:g} s"
                    _stopped(worker)
                    worker = None
                except (EOFError, OSError) as error:
                    answer = (
                        f"the worker died ({worker.ended()})"
                        if worker
                        else f"no worker can be started: {error}"
                    )
                    _stopped(worker)
                    worker = None
                request = waiting.popleft()
                yield request.failed(answer) if isinstance(answer, str) else answer
            worker = self._given_back(worker)
        finally:
            # Cut short: its next answer would be to a question that nobody has asked.
            _stopped(worker)

    def close(self) -> None:
        """Stop the workers; one that is at work stops after it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _taken(self) -> "_Worker":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _start()

    def _given_back(self, worker: "_Worker | None") -> "_Worker | None":
        """Keep the worker for the next caller; returned where nobody will come."""
        with self._lock:
            if worker is None or self._closed:
                return worker
            self._idle.append(worker)
            return None


def _stopped(worker: "_Worker | None") -> None:
    if worker is not None:
        worker.stop()


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Popen[bytes]
    connection: Connection

    def send(self, request: MappedRequest) -> None:
        """Send a request; a dead worker shows when its answer is due."""
        # One that is dead says so when its answer is waited for.
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(
                pickle.dumps((os.fspath(request.path), request.plain_ranges))
            )

    def receive(self, timeout_s: float) -> bytes | str:
        """The checksums, or why there are none; TimeoutError, EOFError, OSError."""
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        answer: bytes | str = pickle.loads(self.connection.recv_bytes())
        return answer

    def stop(self) -> None:
        """End the worker, also in the middle of a file."""
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
    # An interpreter of its own: a fork would inherit locks that other threads hold. It
    # loads this module alone and not, as multiprocessing would have it, the program
    # that it works for.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from ozone.mapped import serve;"
        f" serve({theirs.fileno()})"
    )
    try:
        # A process group of its own: an interrupt at the terminal is for the parent to
        # handle.
        process = Popen(
            [sys.executable, "-c", code],
            stdin=DEVNULL,
            stdout=DEVNULL,
            pass_fds=[theirs.fileno()],
            process_group=0,
        )
    except OSError:
        ours.close()
        raise
    finally:
        # Else the pipe would stay open when the worker dies, and the answer would be
        # waited for in vain.
        theirs.close()
    return _Worker(process, ours)


def serve(fd: int) -> None:
    """The worker: answer with entries, or with the reason why there are none, until the
    pipe closes.
    """
    # A core file would hold the whole mapping.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection = Connection(fd)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            path, ranges = pickle.loads(connection.recv_bytes())
            try:
                answer: bytes | str = _checksums(path, ranges)
            except OSError as error:
                answer = error.strerror or str(error)
            connection.send_bytes(pickle.dumps(answer))


def _checksums(path: str, ranges: Sequence[tuple[int, int, int, int]]) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("not a regular file")
        if any(offset + length_bytes > status.st_size for offset, length_bytes, *_ in ranges):
            raise OSError(f"the file ends at {status.st_size}, before a range does")
        if not status.st_size:
            return b""
        with mmap(fd, status.st_size, prot=PROT_READ) as mapped, memoryview(mapped) as view:
            entries = []
            for offset, length_bytes, checksum_type, bytes_per_checksum in ranges:
                with view[offset : offset + length_bytes] as data:
                    # Mapped first, then read: in turns it is up to a quarter slower,
                    # and so is MADV_POPULATE_READ where the cache holds the file in
                    # small pieces, since it goes from page to page.
                    data[::_FAULT_AROUND_BYTES].tobytes()
                    entries.append(
                        window_checksums(data, ChecksumType(checksum_type), bytes_per_checksum)
                    )
            return b"".join(entries)
    finally:
        os.close(fd)
