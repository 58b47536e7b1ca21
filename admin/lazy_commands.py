"""Commands that are imported when they are used: names and summaries are known before.

A command that copies a bucket imports no RocksDB, and `--help` imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import click

from runtime.errors import UsageError

# Packages of the extra `sweep`, which may be missing.
_SWEEP_EXTRA = ("jinja2", "pyarrow")


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported from `module:attribute` on first use."""

    target: str
    summary: str

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            UsageError: the extra that the command needs is not installed.
        """
        module, _, attribute = self.target.partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing not in _SWEEP_EXTRA:
                raise
            raise UsageError(
                f"{missing} is not installed", hint="pip install 'treefold[sweep]'"
            ) from error
        assert isinstance(command, click.Command)
        return command


class LazyGroup(click.Group):
    """A group with lazy commands beside its own; a subclass names them."""

    lazy: ClassVar[Mapping[str, LazyCommand]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted({*self.lazy, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now; None if there is none."""
        if cmd_name in self.lazy:
            return self.lazy[cmd_name].load()
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and summaries without importing any command."""
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        summaries = {name: one.summary for name, one in self.lazy.items()} | {
            name: one.get_short_help_str(limit) for name, one in self.commands.items()
        }
        with formatter.section("Commands"):
            formatter.write_dl([(name, summaries[name]) for name in names])
