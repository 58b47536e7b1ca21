"""Signals that stop a process reach it whenever they come, and whichever thread the
kernel gives them to.
"""

import subprocess
import sys

import pytest

_PATIENCE_S = 60
_PROGRAM = """
import os, signal, sys, threading
from runtime.stop_signals import StopSignals

def wait_for(seconds):
    threading.Event().wait(seconds)

main = threading.main_thread().ident
with StopSignals() as stop:
    assert not stop.is_set()
    number = signal.{name}
    {given}
    assert stop.wait(3600)
    assert stop.is_set() and stop.wait(0)
# One more, while the process ends.
os.kill(os.getpid(), number)
print("stopped")
"""
_GIVEN = {
    # Only the kernel's handler runs there, and Python's in the main thread.
    "to another thread": (
        "threading.Thread(target=lambda:"
        " (wait_for(0.2), signal.pthread_kill(threading.get_ident(), number))).start()"
    ),
    "to the main thread": (
        "threading.Thread(target=lambda:"
        " (wait_for(0.2), signal.pthread_kill(main, number))).start()"
    ),
    "before the wait": "os.kill(os.getpid(), number)",
    "beside other signals": (
        "signal.signal(signal.SIGUSR1, lambda *_: None)\n"
        "    for _ in range(100_000): os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    assert not stop.wait(0.01)\n"
        "    os.kill(os.getpid(), number)"
    ),
}


@pytest.mark.parametrize("given", _GIVEN)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_wait(given: str, name: str) -> None:
    program = _PROGRAM.format(name=name, given=_GIVEN[given])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program],
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
    )
    assert (done.stdout, done.stderr) == ("stopped\n", "")
