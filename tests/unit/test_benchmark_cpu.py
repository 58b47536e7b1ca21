"""Benchmarks count the CPU time of all processes that they start, also when nobody
waited for them.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.process_tree import (
    AncestorClock,
    CgroupClock,
    Clock,
    CpuTimer,
    LostTimeError,
    cpu_timer,
    polled,
)
from tests.support.waiting import wait_until

BURNT_S = 0.4
# Says which process it is, and ends when its input does.
WORKER = f"""\
import os, sys, time
print(os.getpid(), flush=True)
while time.process_time() < {BURNT_S}:
    pass
sys.stdin.read()
"""
# The kernel adds the time of children whose end is ignored to nobody's.
IGNORING_PARENT = f"""\
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", {WORKER!r}]).wait()
"""
LEAVING_PARENT = f"""\
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {WORKER!r}])
"""


def makes_cgroups() -> bool:
    """Whether this user may make one: then time is counted there."""
    try:
        CgroupClock().close()
    except OSError:
        return False
    return True


def burn(parent: str, timer: CpuTimer) -> int:
    """Run a parent whose child takes BURNT_S of CPU, until both have ended; the child's
    process ID.
    """
    before = timer.poll()
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        worker = psutil.Process(int(process.stdout.readline()))
        wait_until(lambda: timer.poll() - before > BURNT_S, "the worker's CPU time")
        process.stdin.close()
        wait_until(lambda: has_ended(worker), "the worker's end")
    return worker.pid


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("make", [None, AncestorClock])
def test_an_orphan_counts_after_its_end(make: Callable[[], Clock] | None) -> None:
    with cpu_timer(make) as timer:
        before = timer.read_s()
        orphan = burn(LEAVING_PARENT, timer)
        assert timer.read_s() - before > BURNT_S
    # Unless it had another reaper.
    with suppress(ChildProcessError):
        os.waitpid(orphan, 0)


def test_a_worker_whose_end_is_ignored_counts_in_a_cgroup_or_is_an_error() -> None:
    is_counted = makes_cgroups()
    with cpu_timer() as timer:
        before = timer.read_s()
        burn(IGNORING_PARENT, timer)
        if is_counted:
            assert timer.read_s() - before > BURNT_S
        else:
            with pytest.raises(LostTimeError, match="were counted"):
                timer.read_s()


def test_time_that_nobody_counted_is_an_error() -> None:
    with cpu_timer(AncestorClock) as timer:
        burn(IGNORING_PARENT, timer)
        with pytest.raises(LostTimeError, match="were counted"):
            timer.read_s()


def cgroup() -> str:
    return Path("/proc/self/cgroup").read_text()


def test_a_timer_leaves_no_cgroup() -> None:
    ours, makes = cgroup(), makes_cgroups()
    with cpu_timer():
        assert (cgroup() != ours) == makes
    assert cgroup() == ours


def test_looks_do_not_count_whichever_thread_makes_them() -> None:
    """The second thread may have the number of the first."""
    with cpu_timer() as timer:
        before = timer.read_s()
        for _ in range(2):
            looked = threading.Event()

            def look(looked: threading.Event = looked) -> None:
                while not looked.is_set() and time.thread_time() < BURNT_S:
                    pass
                looked.set()

            with polled(look, 0.01):
                assert looked.wait(60)
        assert timer.read_s() - before < BURNT_S
