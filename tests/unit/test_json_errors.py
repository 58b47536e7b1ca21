"""Under --json every error is one JSON document on stdout, whatever ends a command."""

import errno
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from admin.cli import Root, treefold
from merkle.errors import ReconcileError
from runtime.errors import BusyError


def leaves(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command that has --json."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from leaves(below, (*words, name))
    elif any("--json" in option.opts for option in command.params):
        yield words


def error_of(result: Result, command: str) -> dict[str, str]:
    """The error in the document, which is all of stdout."""
    document = json.loads(result.stdout)
    assert (document["ok"], document["command"]) == (False, command)
    (error,) = document["errors"]
    assert set(error) == {"code", "message", "hint"}
    return error


COMMANDS = [" ".join(words) for words in leaves(treefold)]


def test_there_are_commands_of_every_group() -> None:
    assert {command.split()[0] for command in COMMANDS} >= {
        "agent", "bucket", "container", "demo", "doctor", "job", "reconcile", "sweep", "tree"
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_option_is_one_document(command: str) -> None:
    result = CliRunner().invoke(treefold, [*command.split(), "--json", "--no-such-option"])
    assert result.exit_code == 2
    error = error_of(result, command)
    assert (error["code"], "--no-such-option" in error["message"]) == ("usage", True)
    assert result.stderr == ""
    # After `--` it is an argument, so the error is for people.
    plain = CliRunner().invoke(treefold, [*command.split(), "--no-such-option", "--", "--json"])
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert "--no-such-option" in plain.stderr


@pytest.mark.parametrize(
    ("words", "command", "status", "code"),
    [
        (["--no-such-option", "--json"], "", 2, "usage"),
        (["no-such-command", "--json"], "", 2, "usage"),
        (["tree", "no-such-command", "--json"], "tree", 2, "usage"),
        (["tree", "check", "/no/such/file", "--json"], "tree check", 1, "volume_invalid"),
        (["bucket", "verify", "x:y", "local:/z", "--json"], "bucket verify", 2, "usage"),
        # A file that cannot be written, wherever nobody looked for it.
        (["demo", "--keep", "/proc/nowhere", "--json"], "demo", 1, "disk_failed"),
    ],
)
def test_what_ends_a_command_is_one_document(
    words: Sequence[str], command: str, status: int, code: str
) -> None:
    result = CliRunner().invoke(treefold, words)
    assert (result.exit_code, error_of(result, command)["code"]) == (status, code)
    assert result.stderr == ""


def failing(error: BaseException) -> Root:
    """A `treefold` whose only command fails."""
    root = Root()

    @root.command()
    @click.option("--json", "as_json", is_flag=True)
    def fails(*, as_json: bool) -> None:
        raise error

    return root


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (BusyError("two of them", hint="Wait."), 8, "busy", "two of them"),
        (ReconcileError("no"), 1, "failed", "no"),
        (OSError(errno.EIO, "Input/output error", "/v/1"), 1, "disk_failed", "/v/1: Input/output"),
        # No disk has to do with these.
        (OSError("odd"), 1, "internal", "OSError: odd"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), 1, "internal", "refused"),
        (KeyError("x"), 1, "internal", "KeyError: 'x'"),
        (RecursionError("deep"), 1, "internal", "RecursionError: deep"),
        (KeyboardInterrupt(), 130, "interrupted", "interrupted"),
        (click.FileError("f", "gone"), 1, "usage", "gone"),
    ],
)
def test_every_error_has_a_name(error: BaseException, status: int, code: str, message: str) -> None:
    runner = CliRunner(env={"TREEFOLD_TRACEBACK": None})
    result = runner.invoke(failing(error), ["fails", "--json"])
    assert result.exit_code == status
    found = error_of(result, "fails")
    assert found["code"] == code
    assert message in found["message"]
    assert result.stderr == ""
    plain = runner.invoke(failing(error), ["fails"])
    assert (plain.exit_code, plain.stdout, message in plain.stderr) == (status, "", True)
    assert "Traceback" not in plain.stderr


@pytest.mark.parametrize("error", [KeyError("x"), OSError(errno.EIO, "odd")])
def test_a_traceback_is_shown_to_who_asks_for_it(error: Exception) -> None:
    result = CliRunner(env={"TREEFOLD_TRACEBACK": "1"}).invoke(failing(error), ["fails", "--json"])
    assert result.exception is error


def test_a_pipe_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    """`treefold ... | head`: Click ends such a command without a word."""
    words = [sys.executable, "-m", "admin.cli", "tree", "check", "/no/such/file", "--json"]
    with (tmp_path / "stderr").open("wb") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 1
    assert "Traceback" not in (tmp_path / "stderr").read_text()
