"""Who has a RocksDB open, found out without disturbing them.

Opening a database read-write would rename its live log even if it is locked, so the
lock is queried first, never tried.
"""

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from ozone.errors import VolumeLockedError
from runtime.errors import DatabaseError

# struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhqqi4x"
# The databases that this process has open as owner: to query their locks would drop
# them.
_owned: set[Path] = set()
_owned_lock = threading.Lock()


def lock_holder(lock: Path) -> int | None:
    """The process that holds RocksDB's lock, None if it is free; 0 for a process that
    is not visible to us.

    Not for a database that this process has open: closing any descriptor of a file
    drops all record locks of the process on it.

    Raises:
        DatabaseError: the lock cannot be queried.
    """
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DatabaseError(
            f"cannot query the lock {lock}: {error.strerror}", path=str(lock)
        ) from error
    try:
        query = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, query))
        return None if kind == fcntl.F_UNLCK else int(pid)
    finally:
        os.close(fd)


@contextlib.contextmanager
def claim(path: Path) -> Iterator[None]:
    """Mark the database as open in this process, unless the block raises."""
    with _owned_lock:
        if path.resolve() in _owned:
            raise lock_error(path, os.getpid())
        _owned.add(path.resolve())
    try:
        yield
    except BaseException:
        release(path)
        raise


def release(path: Path) -> None:
    """Mark the database as closed in this process."""
    with _owned_lock:
        _owned.discard(path.resolve())


def lock_error(path: Path, pid: int) -> VolumeLockedError:
    """The error for a database that this process holds; 0 if that is not visible."""
    holder = f"process {pid}" if pid > 0 else "a process that is not visible from here"
    return VolumeLockedError(
        f"the database {path} is held by {holder}",
        hint="Stop the datanode that owns this volume first, or open the volume read-only.",
        path=str(path),
        pid=pid,
    )
