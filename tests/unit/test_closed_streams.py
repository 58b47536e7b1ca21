"""Commands whose caller closed a standard stream, as `>&-` does in a shell, or whose
disk is full: an answer that cannot be written is a failure, and says so. There is no
traceback.
"""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from admin.cli import treefold
from merkle.columns import encode_tree
from merkle.tree import ContainerId, ContainerTree
from runtime.output import answer_stream
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


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command and group."""
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*words, name))


def run_without_output(words: Sequence[object], number: int, *, is_closed: bool) -> tuple[int, str]:
    """The exit status of a command in this process, and its stderr. Its stdout is this
    file descriptor.
    """
    stdout, stderr = answer_stream(number, encoding="utf-8", is_closed=is_closed), io.StringIO()
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as ended,
    ):
        treefold.main(list(map(str, words)), prog_name="treefold")
    # As Python does when the process ends.
    stdout.flush()
    assert isinstance(ended.value.code, int)
    return ended.value.code, stderr.getvalue()


@pytest.fixture(params=["/dev/null", "/dev/full"])
def lost_output(request: pytest.FixtureRequest) -> Iterator[tuple[int, bool]]:
    """A file descriptor to which nothing can be written, and whether the caller closed
    it.
    """
    number = os.open(request.param, os.O_WRONLY)
    yield number, request.param == "/dev/null"
    os.close(number)


def test_no_command_loses_its_answer_in_silence(lost_output: tuple[int, bool]) -> None:
    """Every command writes to the one stream, where this is seen to."""
    number, is_closed = lost_output
    for words in commands(treefold):
        status, said = run_without_output([*words, "--help"], number, is_closed=is_closed)
        assert status == 1, words
        assert said.startswith("error [output_failed]: the answer cannot be written: "), words


@pytest.mark.parametrize("json", [(), ("--json",)])
@pytest.mark.parametrize("words", [("job", "list"), ("container", "list"), ("status",)])
def test_a_lost_answer_is_a_failure_and_a_failure_stays_what_it_is(
    controller: str, lost_output: tuple[int, bool], words: tuple[str, ...], json: tuple[str, ...]
) -> None:
    number, is_closed = lost_output
    for address in (controller, "127.0.0.1:1"):
        asked = [*words, *json, "--controller", address]
        spoken = CliRunner().invoke(treefold, asked)
        status, said = run_without_output(asked, number, is_closed=is_closed)
        is_lost = bool(spoken.stdout)
        assert ("[output_failed]: the answer cannot be written: " in said) == is_lost
        if spoken.exit_code and (json or not is_lost):
            assert status == spoken.exit_code
        else:
            assert status == 1


def test_a_usage_error_is_one_also_where_its_document_is_lost() -> None:
    number = os.open(os.devnull, os.O_WRONLY)
    status, said = run_without_output(["job", "list", "--json", "--nope"], number, is_closed=True)
    os.close(number)
    assert (status, "--nope" in said) == (2, True)


@pytest.mark.parametrize(("redirection", "status"), [(">&-", 1), (">&- 2>&-", 1), ("2>&-", 0)])
def test_a_closed_stream_of_a_process(controller: str, redirection: str, status: int) -> None:
    done = run(redirection, "job", "list", "--controller", controller)
    said = "stdout is closed" in done.stderr
    assert (done.returncode, said) == (status, redirection == ">&-")
    assert "Traceback" not in done.stderr


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
        assert run(">&-", "tree", command, path).returncode == 1
    assert path.read_bytes() == before
