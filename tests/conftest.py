"""Settings that hold for all tests."""

import gc
import os
import signal
import tempfile
from collections.abc import Generator
from functools import cache
from types import FunctionType, ModuleType

import pytest
from hypothesis import HealthCheck, settings

from tests.support.java import spark_options

# Machines are shared and slow at times: an example's run time proves nothing. The seeds
# are fixed, so that a change fails for what it changed; `make test-long` draws others,
# and many more of them (--hypothesis-profile=long).
settings.register_profile(
    "shared",
    deadline=None,
    derandomize=True,
    max_examples=12,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long", settings.get_profile("shared"), derandomize=False, max_examples=500, database=None
)
settings.load_profile("shared")

# What collection makes is no garbage before it ends: to look took a sixth of its time.
gc.set_threshold(200_000)

# Of every Spark that a test starts, in whichever process.
os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_options())

# A shell starts what runs in the background with interrupts ignored, and every process
# that a test starts and interrupts would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What commands keep for their user is not kept for who runs the tests.
_STATE_HOME = tempfile.TemporaryDirectory(prefix="treefold-tests-")
os.environ["XDG_STATE_HOME"] = _STATE_HOME.name

# Fixtures of servers that tests of several folders share; who imports another comes
# after it, or that one's assertions would not be rewritten.
pytest_plugins = ["tests.support.s3_servers", "tests.support.ozone", "tests.support.rgw"]

# Characters of a value in the name of its test.
_NAMED_MAX = 100

# Tests whose modules import functions of these reach a compiled kernel: they run once
# more without numba (make test).
_KERNEL_CALLERS = frozenset(
    {
        "merkle.checksum",
        "merkle.columns",
        "merkle.kernels",
        "ozone.mapped",
        "ozone.scan",
        "proof.symbols",
        "sweep.files",
        "sweep.kernels",
        "sweep.runs",
        "sweep.trees",
    }
)
# What other tests only make their input with: it is too small for a kernel.
_MAKERS_OF_INPUT = frozenset({"encode_tree", "fingerprint", "state_fingerprint"})


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a long value by its beginning: a test's name crosses to other processes many
    times, and some values are a mebibyte.
    """
    if isinstance(val, str | bytes) and len(val) > _NAMED_MAX:
        return f"{val[:_NAMED_MAX]!a} of {len(val)}"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Take back the handlers of signals that a command has set in this process."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        return (yield)
    finally:
        for one, handler in before.items():
            if handler is not None and signal.getsignal(one) is not handler:
                signal.signal(one, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that reach a kernel."""
    for item in items:
        if _reaches_a_kernel(item.getparent(pytest.Module).obj):
            item.add_marker(pytest.mark.kernels)


@cache
def _reaches_a_kernel(module: ModuleType) -> bool:
    functions = (value for value in vars(module).values() if isinstance(value, FunctionType))
    return any(
        function.__module__ in _KERNEL_CALLERS and function.__name__ not in _MAKERS_OF_INPUT
        for function in functions
    )


def pytest_collection_finish() -> None:
    """Keep the collector from looking again and again at what lives to the end anyway:
    all modules and all tests. That was a fifth of the time of many small tests, and to
    look as often as is usual a twentieth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
