"""Commands that are imported when they are used: names and summaries are known before.

A command that copies a bucket imports no RocksDB, and `--help` imports nothing heavy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import click
from click.shell_completion import CompletionItem

from runtime.errors import UsageError

# The extras by their packages, which may be missing.
_EXTRAS = {
    "blake3": "bucket",
    "botocore": "bucket",
    "cryptography": "tls",
    "jinja2": "sweep",
    "psycopg": "postgres",
    "pyarrow": "sweep",
}


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """A command that is imported from `module:attribute` on first use."""

    target: str
    summary: str
    # The extra that it needs, if its packages are of several.
    extra: str = ""

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            UsageError: the extra that the command needs is not installed.
        """
        module, _, attribute = self.target.partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            named = missing_extra(error, self.extra)
            if named is None:
                raise
            raise named from error
        assert isinstance(command, click.Command)
        return command


def missing_extra(error: ModuleNotFoundError, extra: str = "") -> UsageError | None:
    """What to install, if the missing module is one of an extra: `extra`, or that of
    the module. Otherwise None.
    """
    missing = str(error.name).partition(".")[0]
    if missing not in _EXTRAS:
        return None
    return UsageError(
        f"{missing} is not installed", hint=f"pip install 'treefold[{extra or _EXTRAS[missing]}]'"
    )


class LazyGroup(click.Group):
    """A group with lazy commands beside its own; a subclass names them."""

    lazy: ClassVar[Mapping[str, LazyCommand]] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted({*self.lazy, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now; None if there is none."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        try:
            return self.lazy[cmd_name].load()
        except UsageError:
            # Who presses Tab has not asked for a command that needs an extra.
            if ctx.resilient_parsing:
                return None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names that begin so, without importing any command, and our options."""
        summaries = self._summaries(ctx, width=80)
        names = [
            CompletionItem(name, help=summary)
            for name, summary in summaries.items()
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and summaries without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries(ctx, width=formatter.width).items()))

    def _summaries(self, ctx: click.Context, *, width: int) -> dict[str, str]:
        names = self.list_commands(ctx)
        limit = width - 6 - max(map(len, names))
        summaries = {name: one.summary for name, one in self.lazy.items()} | {
            name: one.get_short_help_str(limit) for name, one in self.commands.items()
        }
        return {name: summaries[name] for name in names}
