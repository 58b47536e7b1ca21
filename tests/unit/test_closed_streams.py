"""Commands whose caller closed a standard stream, as `>&-` does in a shell: they end as
they would otherwise, without a traceback.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from merkle.columns import encode_tree
from merkle.tree import ContainerId, ContainerTree
from scm.config import ControllerConfig
from scm.server import ControllerServer
from tests.support.processes import ROOT

WITHIN_S = 60


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("scm")
    server = ControllerServer(ControllerConfig(listen="127.0.0.1:0", state_folder=folder))
    yield server.address
    server.stop()


def run(redirection: str, *words: object) -> subprocess.CompletedProcess[str]:
    """The command, started by a shell with this redirection."""
    command = [sys.executable, "-m", "admin.cli", *map(str, words)]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )


@pytest.mark.parametrize("words", [("container", "list"), ("container", "list", "--json")])
def test_a_list_that_nobody_reads_ends_quietly(controller: str, words: tuple[str, ...]) -> None:
    spoken = run("", *words, "--controller", controller)
    for closed in (">&-", ">&- 2>&-", "<&- >&- 2>&-", "2>&-"):
        done = run(closed, *words, "--controller", controller)
        assert (done.returncode, done.stderr) == (
            spoken.returncode,
            "" if "2>&-" in closed else spoken.stderr,
        ), closed


def test_containers_from_a_closed_stdin_are_none(controller: str) -> None:
    words = ("reconcile", "-", "--dry-run", "--controller", controller)

    done = run("<&-", *words)

    assert done.returncode == run("</dev/null", *words).returncode
    assert "Traceback" not in done.stderr


def test_what_is_opened_next_does_not_become_stdout(tmp_path: Path) -> None:
    """Otherwise the number of stdout could be that of a file of a database."""
    path = tmp_path / "1.tree"
    path.write_bytes(encode_tree(ContainerTree.of(ContainerId(1), [])))
    before = path.read_bytes()

    for command in ("show", "check"):
        done = run(">&-", "tree", command, path)
        assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes() == before
