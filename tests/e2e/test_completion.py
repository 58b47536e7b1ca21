"""Shells complete our commands by the scripts that we print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from admin.cli import treefold
from tests.support.long_running import LONG_RUNNING

pytestmark = pytest.mark.e2e
COMMAND_S = 60
# What bash does when somebody presses Tab behind these words.
PRESS_TAB = """
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_treefold_completion "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script_of(shell: str) -> str:
    done = CliRunner().invoke(treefold, ["completion", shell])
    assert done.exit_code == 0
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and with `treefold` as the one on the path."""
    made = tmp_path_factory.mktemp("shell")
    (made / "script").write_text(script_of("bash"))
    command = made / "treefold"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m admin.cli "$@"\n')
    command.chmod(0o755)
    return made


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    done = subprocess.run(
        ["bash", "--norc", "-c", f'. "$0"\n{PRESS_TAB}', str(folder / "script"), *words],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=True,
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["treefold", "re"], ["reconcile", "replication-master", "rescue"]),
        (["treefold", "agent", "r"], ["run"]),
        *((["treefold", *c.split(), "--check"], ["--check-config"]) for c in LONG_RUNNING),
        (["treefold", "completion", ""], ["bash", "fish", "zsh"]),
        (["treefold", "nothing-of-ours"], []),
    ],
    ids=" ".join,
)
def test_bash_completes(folder: Path, words: list[str], offered: list[str]) -> None:
    assert completed(folder, *words) == offered


def test_bash_takes_the_script_and_registers_it(folder: Path) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", '. "$0"; complete -p treefold', str(folder / "script")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-F _treefold_completion treefold" in done.stdout


@pytest.mark.parametrize(
    ("shell", "registered"),
    [("zsh", "#compdef treefold"), ("fish", "complete --no-files --command treefold")],
)
def test_other_shells_get_theirs(shell: str, registered: str) -> None:
    assert registered in script_of(shell)


def test_names_of_commands_are_completed_without_importing_any(folder: Path) -> None:
    program = (
        "import sys\nfrom admin.cli import treefold\nimport click\n"
        "context = click.Context(treefold, resilient_parsing=True)\n"
        "print([item.value for item in treefold.shell_complete(context, 'sw')])\n"
        "print(sorted({'grpc', 'rocksdict', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["['sweep']", "[]"]
