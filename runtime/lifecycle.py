"""How a long-running process ends and how it says where it listens."""

import os
import signal
import threading
from pathlib import Path
from types import FrameType

from runtime.errors import DiskError


def stop_on_signals() -> threading.Event:
    """An event that SIGTERM or SIGINT sets. Call it from the main thread."""
    stop = threading.Event()

    def stop_soon(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_soon)
    return stop


def announce(path: Path, address: str) -> None:
    """Write the address that a process listens on into a file, whole or not at all:
    somebody waits for it.

    Raises:
        DiskError: it cannot be written.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(address + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise DiskError(f"{path}: cannot be written: {error.strerror}", path=str(path)) from error
