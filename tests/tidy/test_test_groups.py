"""Tests of one group share a process: all of Spark's would start a Java in each."""

import subprocess
import sys
from pathlib import Path

_TESTS = """\
import os
import pathlib
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("number", range(8))
def test_it(number):
    pathlib.Path(f"ran-{os.getpid()}").touch()
"""


def test_tests_of_one_group_share_a_process(tmp_path: Path) -> None:
    """pytest-xdist 3.8 forgets groups under pytest 9.2, without a word."""
    (tmp_path / "test_it.py").write_text(_TESTS)
    run = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "."]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(list(tmp_path.glob("ran-*"))) == 1
