"""`treefold bucket demo`: real processes and files; what it shows is what it says, and
it leaves nothing.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.support.processes import ROOT
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
# Work goes to another syncer after a lease of 6 s, which was renewed in the quarter
# before. A busy machine takes longer.
LEASE_S, TAKEOVER_S = 6.0, 20.0


def demo(folder: Path, *options: str) -> subprocess.Popen[str]:
    """The command in a session of its own, whose temporary files are in `folder`."""
    command = [sys.executable, "-m", "admin.cli", "bucket", "demo", "--objects", "20", *options]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(session: int) -> list[str]:
    """All that still runs in a session."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "-s", str(session)], capture_output=True, text=True, check=False
    )
    return listed.stdout.splitlines()


def check_replication(found: Mapping[str, Any]) -> None:
    assert found["changes"] > 100
    assert sum(phase["changes"] for phase in found["lag"]) == found["changes"]
    quiet, dead, cut = found["lag"]
    assert quiet["p50Milliseconds"] < dead["maxMilliseconds"]
    assert quiet["p50Milliseconds"] < cut["maxMilliseconds"]
    for seconds in found["takeoverSeconds"].values():
        assert LEASE_S * 0.75 <= seconds < TAKEOVER_S
    assert found["stoppedItself"]
    assert found["damaged"] == ["archive/00007.jpg"]
    assert found["repaired"]
    assert found["equal"]
    assert found["bytesEqual"]
    assert found["receipts"] == 3


@pytest.mark.peers
def test_it_breaks_a_copy_and_a_replication_and_proves_both(tmp_path: Path) -> None:
    scratch, pictures = tmp_path / "scratch", tmp_path / "pictures"
    scratch.mkdir()
    pictures.mkdir()
    with demo(scratch, "--check", "--json", "--svg", str(pictures)) as process:
        printed, said = process.communicate()
    assert process.returncode == 0, said
    (line,) = printed.splitlines()
    answer = json.loads(line)
    assert answer["asExpected"]
    assert len(answer["steps"]) == 6
    check_replication(answer["replication"])
    assert sorted(path.name for path in pictures.iterdir()) == [
        "bucket-proof.svg",
        "replication.svg",
    ]
    for path in pictures.iterdir():
        ElementTree.parse(path)
    assert list(scratch.iterdir()) == []
    assert processes_of(process.pid) == []


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        folder = "treefold-demo-*/syncer-2/address"
        wait_until(lambda: bool(list(tmp_path.glob(folder))), "all processes to run")
        assert len(processes_of(process.pid)) >= 4
        os.killpg(process.pid, signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert processes_of(process.pid) == []
