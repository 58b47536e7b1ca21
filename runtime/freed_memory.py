"""Memory that a process has freed, kept for its next arrays.

The C library and Arrow soon give large pieces back to the kernel, which clears each
page that is used again. A task that makes one large array after another spends a
seventh of its CPU on that. A process that does nothing else keeps them instead: then
its memory is always the most that it ever used.
"""

import ctypes
from contextlib import suppress

import pyarrow as pa

# Parameters of `mallopt` (mallopt(3)).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# Freed memory that is kept, and the largest piece of it: glibc takes no larger one.
_KEPT_BYTES, _PIECE_BYTES = 1 << 30, 32 << 20


def keep_freed_memory() -> None:
    """Keep what this process frees, in pieces of up to 32 MiB; elsewhere than with
    glibc only Arrow's arrays are made like all others.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _PIECE_BYTES)
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
