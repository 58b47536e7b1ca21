"""Write a manual page for every command, from its own help (`make man`).

click-man is not used: it finds no command that is loaded lazily, and takes a line of
help that begins with a dot for a request to troff. The pages are committed, since a
wheel is built where none of our dependencies are installed.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path

import click

from admin.cli import treefold
from runtime.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[1]
PAGES_FOLDER = ROOT / "man"
# What troff would take for typography, and a reader could not copy.
_CHARACTERS = {"\\": r"\e", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}
_MEANINGS = {
    ExitCode.CLEAN: "Done, and nothing was found.",
    ExitCode.FAILED: "It failed.",
    ExitCode.USAGE: "The arguments or the settings are invalid.",
    ExitCode.FINDINGS: "Damage or differences were found.",
    ExitCode.UNRECOVERABLE: "Damage was found that no replica can repair, or a conflict.",
    ExitCode.PARTLY: "Only a part was done.",
    ExitCode.REFUSED: "It was refused.",
    ExitCode.UNREACHABLE: "Who was asked does not answer, or knows nothing.",
    ExitCode.BUSY: "Another process does the same, or holds what is needed.",
    ExitCode.INTERRUPTED: "It was interrupted.",
}
# Click's own depends on who asked first.
_HELP = ("-h, --help", "Show the help and exit.")
_OPTION = re.compile(r"(?<![\w-])-{1,2}[\w-]*")


def pages() -> dict[str, str]:
    """The text of every page, by the name of its file."""
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    context = click.Context(treefold, info_name="treefold")
    return {
        f"{_page_name(context)}.1": _page(context, version)
        for context in _contexts(treefold, context)
    }


def main() -> None:
    """Write all pages, and remove those of commands that are gone."""
    wanted = pages()
    PAGES_FOLDER.mkdir(exist_ok=True)
    for old in PAGES_FOLDER.glob("*.1"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (PAGES_FOLDER / name).write_text(text)
    sys.stderr.write(f"{len(wanted)} pages in {PAGES_FOLDER}\n")


def _contexts(command: click.Command, context: click.Context) -> Iterator[click.Context]:
    """The context of this command, and of all below it."""
    yield context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _contexts(below, click.Context(below, info_name=name, parent=context))


def _page(context: click.Context, version: str) -> str:
    command, name = context.command, _page_name(context)
    assert command.help, f"{name} has no help"
    paragraphs = _paragraphs(command.help)
    lines = [
        f'.TH {name.upper()} 1 "" "Treefold {version}" "Treefold Manual"',
        ".SH NAME",
        # apropos wants one line, and no markup.
        f"{name} \\- {_text(paragraphs[0].rstrip('.').replace(chr(10), ' '))}",
        ".SH SYNOPSIS",
        f"\\fB{_text(context.command_path)}\\fR "
        + _text(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION",
    ]
    for paragraph in paragraphs:
        # Click's mark of lines that are to be kept.
        is_table = paragraph.startswith("\b")
        text = _text(paragraph.strip("\b\n"))
        lines += [".PP", ".nf", text, ".fi"] if is_table else [".PP", text]
    lines += [".SH OPTIONS"]
    records = [parameter.get_help_record(context) for parameter in command.params]
    for names, meaning in (*filter(None, records), _HELP):
        lines += [".TP", _bold_options(names), _text(meaning)]
    if isinstance(command, click.Group):
        lines += [".SH COMMANDS", *_commands(command, context)]
    if "Exit status:\n" not in command.help:
        lines += [".SH EXIT STATUS"]
        for code in ExitCode:
            lines += [".TP", f"\\fB{code.value}\\fR", _MEANINGS[code]]
    above = [context.parent] if context.parent else []
    lines += [".SH SEE ALSO"]
    lines += [f"\\fB{_text(_page_name(parent))}\\fR(1)," for parent in above]
    lines += ["the documents in share/treefold/docs of the installation."]
    return "\n".join(lines) + "\n"


def _commands(group: click.Group, context: click.Context) -> Iterator[str]:
    for name in group.list_commands(context):
        below = group.get_command(context, name)
        assert below is not None
        yield ".TP"
        yield f"\\fB{_text(f'{_page_name(context)}-{name}')}\\fR(1)"
        yield _text(below.get_short_help_str(limit=200))


def _page_name(context: click.Context) -> str:
    return context.command_path.replace(" ", "-")


def _paragraphs(text: str) -> list[str]:
    text = cleandoc(text).split("\f")[0]
    return [paragraph for part in text.split("\n\n") if (paragraph := part.strip("\n"))]


def _bold_options(names: str) -> str:
    return re.sub(r"(?:\\-)[\w\\-]*", lambda match: f"\\fB{match[0]}\\fR", _text(names))


def _text(text: str) -> str:
    """Text as troff prints it, word for word."""
    escaped = "".join(_CHARACTERS.get(character, character) for character in text)
    escaped = _OPTION.sub(lambda match: match[0].replace("-", r"\-"), escaped)
    # A line that begins with a dot would be a request.
    return re.sub(r"^\.", r"\&.", escaped, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
