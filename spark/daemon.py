"""What Spark forks Python workers from: a process that has imported what tasks need.

Spark's own daemon has imported nothing. Each of its workers spends a second of CPU on
imports, and a tenth of a second after each task on collecting garbage among what it
imported. Here both are spent once for an executor. Workers also keep what memory they
free (runtime.freed_memory).

A process may be forked only while nobody else holds a lock. The imports start a single
thread, that of Arrow's allocator, which sees to its locks when a process is forked.
"""

import gc
from contextlib import suppress
from importlib import import_module

from pyspark.daemon import manager

_USED = (
    "pyspark.worker",
    "spark.bucket_index",
    "spark.datasources",
    "spark.engine",
    "sweep.kernels",
)

# What an executor lacks, the worker names whose task needs it.
with suppress(ImportError):
    for name in _USED:
        import_module(name)
    from runtime.freed_memory import keep_freed_memory

    keep_freed_memory()

if __name__ == "__main__":
    gc.collect()
    # Nothing of this is looked at again, nor copied because it was.
    gc.freeze()
    manager()
