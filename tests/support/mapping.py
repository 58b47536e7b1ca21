"""Wait for what a mapped read does in its worker process."""

import threading
from pathlib import Path

import psutil


def wait_until_mapped(path: Path, stop: threading.Event) -> None:
    """Return as soon as a child process has the file in its memory, or when told to
    stop.
    """
    while not stop.wait(0.005):
        for child in psutil.Process().children():
            try:
                if any(region.path == str(path) for region in child.memory_maps()):
                    return
            except psutil.Error:
                continue
