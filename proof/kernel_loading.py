"""Loading of all compiled kernels of comparisons ahead of the first one."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from proof.symbols import KERNEL_IDS_MIN, kernels_for

_MODULES = ("proof.column_kernels", "proof.id_kernels", "proof.page_kernels")


def load_kernels(stopped: Callable[[], bool]) -> None:
    """Load the kernels, for a process that lives long: others load them once they have
    done work enough. It takes about a second of CPU, and a minute where numba's cache
    is empty; between two modules `stopped` ends it. Without the extra `fast` it does
    nothing.
    """
    with suppress(ImportError):
        for name in _MODULES:
            if stopped():
                return
            import_module(name)
        # With these, the others are used.
        kernels_for(KERNEL_IDS_MIN)
