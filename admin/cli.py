"""The `treefold` command: gathers the command groups of all packages, each loaded when
it is used.

`treefold --help` must answer at once, so the names and summaries of the groups stand
here and their modules, with RocksDB, gRPC and numpy behind them, are imported on first
use. Errors raised on purpose end here as one sentence with a stable code, never as a
traceback, and with the exit status that their class names.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import click

from merkle.errors import ReconcileError
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode

# Of the extra `sweep`, which is all that a group of commands may lack.
_OF_SWEEPS = ("jinja2", "pyarrow")


@dataclass(frozen=True, slots=True)
class _Lazy:
    """A command to be imported from `module:attribute` on use."""

    target: str
    summary: str

    def load(self) -> click.Command:
        """Import the command; a missing extra is a usage error that names it."""
        module, _, attribute = self.target.partition(":")
        try:
            command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing not in _OF_SWEEPS:
                raise
            raise UsageError(
                f"{missing} is not installed", hint="pip install 'treefold[sweep]'"
            ) from error
        assert isinstance(command, click.Command)
        return command


COMMANDS: Mapping[str, _Lazy] = {
    "agent": _Lazy("dnagent.cli:agent", "The agent of one datanode: scan, serve, report, repair."),
    "container": _Lazy(
        "admin.containers:container", "Show containers, their replicas, and how these differ."
    ),
    "demo": _Lazy(
        "admin.demo.repair_demo:demo", "Heal damaged replicas of real containers, on loopback."
    ),
    "doctor": _Lazy(
        "admin.doctor:doctor", "Look at this machine and its volumes, touching nothing."
    ),
    "job": _Lazy("admin.jobs:job", "Show, watch and cancel the controller's jobs."),
    "reconcile": _Lazy("admin.reconcile:reconcile", "Make the replicas of containers equal."),
    "scan": _Lazy("admin.containers:scan", "Have agents read replicas and look for damage."),
    "scm": _Lazy("scm.cli:scm", "The controller: take reports, compare replicas, run jobs."),
    "sweep": _Lazy(
        "admin.sweep:sweep", "Check every replica of a cluster in bulk, night by night."
    ),
    "tree": _Lazy("admin.tree:tree", "Build, show, compare and check trees offline."),
}


class Root(click.Group):
    """Lists lazy commands without importing them, and turns errors into exit
    statuses.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, ascending."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, imported now; None if there is none."""
        return COMMANDS[cmd_name].load() if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and summaries without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; an error of ours becomes a message and an exit status."""
        try:
            return super().invoke(ctx)
        except ReconcileError as error:
            click.echo(f"error [{error.code}]: {error.message}", err=True)
            if error.hint:
                click.echo(f"  {error.hint}", err=True)
            ctx.exit(error.exit_status)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            ctx.exit(ExitCode.INTERRUPTED)


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treefold", prog_name="treefold")
@click.pass_context
def treefold(ctx: click.Context) -> None:
    """Reconcile the containers of Apache Ozone datanodes with Merkle trees."""
    # Heavy, and of no use to --help.
    from runtime.progress import ProgressStyle

    ctx.obj = ProgressStyle(bars=sys.stderr.isatty() and "CI" not in os.environ)


def main() -> None:
    """The console script."""
    # gRPC writes to stderr by itself, before and beside the error that we raise and
    # name; read when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    treefold.main(prog_name="treefold")


if __name__ == "__main__":
    main()
