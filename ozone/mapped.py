"""Window checksums of mapped files, computed in a worker process.

Mapping saves the copy out of the page cache, which limits plain reads. But a disk error
or a truncated file raises the signal SIGBUS, which kills the process. So a worker maps
the files. If it fails or dies, the caller gets a MappedReadError and uses plain reads,
which report each fault as an error. The next request starts a new worker.
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

# A block file of 256 MiB takes seconds even on a slow disk: a worker that takes longer
# hangs in the kernel.
_TIMEOUT_S = 120.0
# Bounds a request, so that it fits into the pipe while the worker is busy or blocked on
# sending its last answer.
RANGES_MAX = 256
# With each touched page, Linux maps this much if it is in the page cache
# (fault_around_bytes, mm/memory.c).
_FAULT_AROUND_BYTES = 64 << 10
# Requests sent ahead of the one in progress.
_AHEAD = 1
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class MappedRange:
    """A range of a file, and the windows that it is divided into."""

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
    """The ranges of one file to compute checksums of; at most `RANGES_MAX`."""

    path: Path
    ranges: tuple[MappedRange, ...]

    def __post_init__(self) -> None:
        assert len(self.ranges) <= RANGES_MAX

    @property
    def plain_ranges(self) -> list[tuple[int, int, int, int]]:
        """The ranges as plain tuples for the pipe.

        Unpickling objects would cost the worker a tenth of its time, since the data
        have evicted its processor caches.
        """
        return [
            (r.offset, r.length_bytes, r.checksum_type.value, r.bytes_per_checksum)
            for r in self.ranges
        ]

    def failed(self, reason: str) -> MappedReadError:
        """The error for a request that failed."""
        return MappedReadError(f"cannot check {self.path} mapped: {reason}", path=str(self.path))


class MappedReader:
    """Owns the worker processes: one per thread that reads, started on demand.
    Thread-safe.
    """

    def __init__(self, timeout_s: float = _TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._idle: list[_Worker] = []
        self._closed = False

    def checksums(self, path: Path, ranges: Sequence[MappedRange]) -> bytes:
        """The window checksums of all ranges, joined in order, in the format of
        `window_checksums`.

        Raises:
            MappedReadError: the file cannot be opened, is not a regular file or ends
                inside a range, or the worker died or timed out.
        """
        (answer,) = self.answers([MappedRequest(path, tuple(ranges))])
        if isinstance(answer, MappedReadError):
            raise answer
        return answer

    def answers(
        self, requests: Iterable[MappedRequest]
    ) -> Generator[bytes | MappedReadError, None, None]:
        """For each request, in order, what `checksums` would return or raise.

        The next request is taken and sent before the answer arrives: a worker that has
        to be woken for each request loses much of its time.
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
                        worker = self._acquire()
                        for request in waiting:
                            worker.send(request)
                    answer = worker.receive(self._timeout_s)
                except TimeoutError:
                    answer = f"no answer in {self._timeout_s:g} s"
                    _stop(worker)
                    worker = None
                except (EOFError, OSError) as error:
                    answer = (
                        f"the worker died ({worker.wait()})"
                        if worker
                        else f"cannot start a worker: {error}"
                    )
                    _stop(worker)
                    worker = None
                request = waiting.popleft()
                yield request.failed(answer) if isinstance(answer, str) else answer
            worker = self._release(worker)
        finally:
            # If the caller ended early, the worker's next answer would be to a request
            # of this caller, not of the next.
            _stop(worker)

    def close(self) -> None:
        """Stop the idle workers; a busy worker stops after its last request."""
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

    def _acquire(self) -> "_Worker":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _start()

    def _release(self, worker: "_Worker | None") -> "_Worker | None":
        """Keep the worker for the next caller; returns it if the reader is closed."""
        with self._lock:
            if worker is None or self._closed:
                return worker
            self._idle.append(worker)
            return None


def _stop(worker: "_Worker | None") -> None:
    if worker is not None:
        worker.stop()


@dataclass(frozen=True, slots=True)
class _Worker:
    process: Popen[bytes]
    connection: Connection

    def send(self, request: MappedRequest) -> None:
        """Send a request. A dead worker is detected by `receive`."""
        with contextlib.suppress(ConnectionError):
            self.connection.send_bytes(
                pickle.dumps((os.fspath(request.path), request.plain_ranges))
            )

    def receive(self, timeout_s: float) -> bytes | str:
        """The checksums, or the reason why there are none.

        Raises:
            TimeoutError: the worker did not answer in time.
            EOFError, OSError: the worker died.
        """
        if not self.connection.poll(timeout_s):
            raise TimeoutError
        answer: bytes | str = pickle.loads(self.connection.recv_bytes())
        return answer

    def stop(self) -> None:
        """End the worker, even in the middle of a file."""
        self.connection.close()
        # A worker in the middle of a file would not notice the closed pipe.
        self.process.kill()
        self.wait()

    def wait(self) -> str:
        """Wait for the worker's end; returns its cause."""
        try:
            status = self.process.wait(_STOP_TIMEOUT_S)
        except TimeoutExpired:
            return "hangs in the kernel"
        return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _start() -> _Worker:
    ours, theirs = Pipe()
    # A new interpreter: a fork would inherit locks that other threads hold, and
    # multiprocessing would load the main program besides this module.
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from ozone.mapped import serve;"
        f" serve({theirs.fileno()})"
    )
    try:
        # A separate process group: the parent handles interrupts from the terminal.
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
        # Otherwise the pipe would stay open when the worker dies, and `receive` would
        # wait until its timeout.
        theirs.close()
    return _Worker(process, ours)


def serve(fd: int) -> None:
    """The worker's main loop: answers each request with checksums or with a reason,
    until the pipe closes.
    """
    # A core file would contain the whole mapping.
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
                    # Map all pages first: mapping and computing in turns is up to a
                    # quarter slower. So is MADV_POPULATE_READ, which goes page by page,
                    # if the cache holds the file in small pieces.
                    data[::_FAULT_AROUND_BYTES].tobytes()
                    entries.append(
                        window_checksums(data, ChecksumType(checksum_type), bytes_per_checksum)
                    )
            return b"".join(entries)
    finally:
        os.close(fd)
