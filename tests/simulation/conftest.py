"""Where simulated crashes take place."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: what a power cut takes is played here, so that
    real syncs only cost time.
    """
    yield from _in_memory(tmp_path)


@pytest.fixture(scope="module")
def module_memory_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, for what the tests of a module only copy."""
    yield from _in_memory(tmp_path_factory.mktemp("module"))


def _in_memory(otherwise: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield otherwise
        return
    with tempfile.TemporaryDirectory(dir=memory) as name:
        yield Path(name)
