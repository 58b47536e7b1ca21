"""What a process and all its descendants cost: CPU time and peaks of memory.

Spark's daemon ignores the end of its Python workers. The kernel then adds their time to
nobody's, so that neither a parent nor a walk over the living has it. A cgroup has the
time of everything that ever ran in it. Where none can be made, orphans become children
of this process, and the time of what its own parent ignored is missing. Polling detects
that, because it sees a part of all time: less than this part is an error, not a figure.
"""

import ctypes
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

# Between two polls, in seconds. The time of what ends in between is not polled.
_POLL_S, _MEMORY_POLL_S = 0.5, 0.1
# Clocks of processes and of a cgroup are rounded in different ways.
_ROUNDING, _ROUNDING_S = 0.01, 0.1
_MOUNTS, _OURS = Path("/proc/self/mounts"), Path("/proc/self/cgroup")
_PR_SET_CHILD_SUBREAPER = 36
# Processes that leave a cgroup while others start in it.
_MOVES_MAX, _LEAVING_MS = 100, 10

# CPU seconds of each thread that has polled: on a slow run they are a third of all. Its
# number is no key, since the next thread may get the same one.
_polling_s: dict[object, float] = {}


class LostTimeError(Exception):
    """Processes took more CPU time than was counted."""


class Clock(Protocol):
    """Counts the CPU time of this process and of those that it starts."""

    def read_s(self) -> float:
        """CPU seconds since it was made, and before it those of this process."""

    def close(self) -> None:
        """Undo what it changed."""


class CgroupClock:
    """Counts in a cgroup (version 2), which has the time of all that ran in it."""

    def __init__(self) -> None:
        """Put this process into a new cgroup below its own.

        Raises:
            OSError: there is no cgroup, or this user may not make one.
        """
        self._parent = _own_cgroup()
        self._folder = self._parent / f"treefold-bench-{os.getpid()}"
        self._before_s = time.process_time()
        self._folder.mkdir()
        try:
            self.read_s()
            _move(os.getpid(), self._folder)
        except OSError:
            self._folder.rmdir()
            raise

    def read_s(self) -> float:
        """See Clock."""
        counts = dict(line.split() for line in (self._folder / "cpu.stat").read_text().splitlines())
        return self._before_s + int(counts["usage_usec"]) / 1e6

    def close(self) -> None:
        """See Clock. A JVM outlives its session, and so leaves the cgroup here."""
        with (self._folder / "cgroup.events").open() as events:
            change = select.poll()
            change.register(events, select.POLLPRI)
            for _ in range(_MOVES_MAX):
                events.seek(0)
                events.read()
                for pid in (self._folder / "cgroup.procs").read_text().split():
                    # Some end meanwhile.
                    with suppress(ProcessLookupError):
                        _move(int(pid), self._parent)
                with suppress(OSError):
                    self._folder.rmdir()
                    return
                # The kernel tells when the last one has left.
                change.poll(_LEAVING_MS)
        raise TimeoutError(f"{self._folder} still has processes")


class AncestorClock:
    """Counts living processes and the ended ones that a parent waited for. Orphans are
    children of this process, also when they have ended.
    """

    def __init__(self) -> None:
        ended = psutil.Process().cpu_times()
        self._before_s = ended.children_user + ended.children_system
        self._before_s += sum(map(_with_children_s, _descendants()))
        _adopt_orphans(True)

    def read_s(self) -> float:
        """See Clock."""
        processes = (psutil.Process(), *_descendants())
        return sum(map(_with_children_s, processes)) - self._before_s

    def close(self) -> None:
        """See Clock."""
        _adopt_orphans(False)


class CpuTimer:
    """The CPU time of this process and its descendants, including ended ones, without
    that of the threads that poll them.
    """

    def __init__(self, clock: Clock) -> None:
        # The last figure of each process.
        self._clock, self._seen = clock, dict[psutil.Process, float]()
        self._before = frozenset(_descendants())
        self._before_s = time.process_time()
        self._lock = threading.Lock()

    def read_s(self) -> float:
        """CPU seconds so far.

        Raises:
            LostTimeError: more was seen than counted.
        """
        seen = self.poll()
        counted = self._clock.read_s()
        since_s = seen - self._before_s
        if counted - self._before_s < since_s * (1 - _ROUNDING) - _ROUNDING_S:
            raise LostTimeError(
                f"processes took at least {seen:.1f} s of CPU, of which {counted:.1f} s were"
                " counted: run it as root, or by systemd-run --user --scope -p Delegate=yes"
            )
        return counted - sum(_polling_s.values())

    def poll(self) -> float:
        """Look at all living processes; the CPU seconds seen so far, at the least."""
        with self._lock:
            for process in (psutil.Process(), *_descendants()):
                if process in self._before:
                    continue
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    self._seen[process] = times.user + times.system
            return sum(self._seen.values())


@contextmanager
def cpu_timer(make: Callable[[], Clock] | None = None) -> Iterator[CpuTimer]:
    """A timer of this process and of what it starts from now on."""
    clock = (make or _best_clock)()
    timer = CpuTimer(clock)
    try:
        with polled(timer.poll, _POLL_S):
            yield timer
    finally:
        clock.close()


@contextmanager
def memory_peaks() -> Iterator[dict[str, int]]:
    """The peaks of memory, in bytes: of this process, of its JVM, of any worker."""
    peaks = {"driver": 0, "JVM": 0, "worker": 0}

    def look() -> None:
        ours = psutil.Process()
        for process in (ours, *_descendants()):
            with suppress(psutil.Error):
                name = "JVM" if "java" in process.name() else "worker"
                name = "driver" if process == ours else name
                peaks[name] = max(peaks[name], process.memory_full_info().uss)

    with polled(look, _MEMORY_POLL_S):
        yield peaks


@contextmanager
def polled(look: Callable[[], object], interval_s: float) -> Iterator[None]:
    """Call `look` again and again in a thread, whose time is not counted."""
    done, ours = threading.Event(), object()

    def run() -> None:
        while not done.wait(interval_s):
            look()
            _polling_s[ours] = time.thread_time()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _best_clock() -> Clock:
    try:
        return CgroupClock()
    except OSError:
        return AncestorClock()


def _own_cgroup() -> Path:
    """The folder of this process's cgroup."""
    mounts = [line.split() for line in _MOUNTS.read_text().splitlines()]
    roots = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"]
    names = [
        line.removeprefix("0::/")
        for line in _OURS.read_text().splitlines()
        if line.startswith("0::/")
    ]
    if not roots or not names:
        raise FileNotFoundError("no cgroup of version 2")
    return roots[0] / names[0]


def _move(pid: int, folder: Path) -> None:
    (folder / "cgroup.procs").write_text(str(pid))


def _descendants() -> Sequence[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _with_children_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of its children that it waited for."""
    with suppress(psutil.Error):
        return sum(process.cpu_times()[:4])
    return 0.0


def _adopt_orphans(wanted: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)
