"""What the documents tell a reader to run exists, and what they link to is there."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from admin.cli import treefold

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[str]:
    """Every line in a code block that runs treefold, without its comment."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            lines = (line.split("  #")[0].strip() for line in block.splitlines())
            found += [
                line.removeprefix(".venv/bin/")
                for line in lines
                if "treefold " in line.split("#")[0]
            ]
    return found


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_is_one_that_is_understood(line: str) -> None:
    words = [word for word in shlex.split(line)[1:] if word not in ("-", "...")]
    command: click.Command = treefold
    context = click.Context(treefold, info_name="treefold")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, f"no command {words[0]}"
        command, words = found, words[1:]
        context = click.Context(command, parent=context)
    options = {
        name
        for parameter in command.params
        for name in [*parameter.opts, *parameter.secondary_opts]
    }
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "line", re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE)
)
def test_a_documented_target_can_be_made(line: str) -> None:
    assert re.search(rf"^{line}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _groups(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Group, click.Context]]:
    if isinstance(command, click.Group):
        yield context.command_path, command, context
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _groups(below, click.Context(below, info_name=name, parent=context))


def _commands(
    command: click.Command, context: click.Context
) -> Iterator[tuple[str, click.Command]]:
    for path, group, inside in _groups(command, context):
        for name in group.list_commands(inside):
            below = group.get_command(inside, name)
            assert below is not None
            yield f"{path} {name}", below


def every_command() -> list[tuple[str, click.Command]]:
    """Every command with its path, groups among them."""
    return list(_commands(treefold, click.Context(treefold, info_name="treefold")))


def test_a_list_of_commands_says_of_each_all_that_it_begins_to_say() -> None:
    """On 80 columns no summary is cut short, and every option says what it does."""
    context = click.Context(treefold, info_name="treefold", max_content_width=80, terminal_width=80)
    for path, group, inside in _groups(treefold, context):
        assert "..." not in group.get_help(inside).split("Commands:")[-1], path
    for path, command in _commands(treefold, context):
        silent = [
            option.name
            for option in command.params
            if isinstance(option, click.Option) and not option.help
        ]
        assert silent == [], path


def test_help_imports_nothing_heavy() -> None:
    """`treefold --help` answers at once: no RocksDB, gRPC, numpy, numba or Rich behind
    it.
    """
    program = (
        "import sys\nfrom admin.cli import treefold\ntry:\n    treefold.main(['--help'])\nexcept"
        " SystemExit:\n    pass\nprint(sorted({'grpc', 'rocksdict', 'numpy', 'numba',"
        " 'pydantic', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"
