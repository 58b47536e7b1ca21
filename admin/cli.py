"""The `treefold` command, with the command groups of all packages.

`treefold --help` must be fast, so this module has the groups' names and summaries. The
groups' own modules import RocksDB, gRPC and numpy, and are loaded on first use. A
ReconcileError ends the command with a message, its stable code and its exit status,
without a traceback.
"""

import io
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import click
from click.shell_completion import CompletionItem

from merkle.errors import ReconcileError
from runtime.errors import UsageError
from runtime.exit_codes import ExitCode

# Packages of the extra `sweep`, which may be missing.
_SWEEP_EXTRA = ("jinja2", "pyarrow")


@dataclass(frozen=True, slots=True)
class _LazyCommand:
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


COMMANDS: Mapping[str, _LazyCommand] = {
    "agent": _LazyCommand(
        "dnagent.cli:agent", "Run the agent of a datanode: scan, serve, report, repair."
    ),
    "bucket": _LazyCommand(
        "admin.bucket:bucket", "Copy a bucket between two stores, and show that it is equal."
    ),
    "completion": _LazyCommand(
        "admin.completion:completion", "Print what makes a shell complete commands and options."
    ),
    "container": _LazyCommand(
        "admin.containers:container", "Show containers, their replicas and how they differ."
    ),
    "demo": _LazyCommand(
        "admin.demo.repair_demo:demo", "Heal damaged replicas of real containers, on loopback."
    ),
    "doctor": _LazyCommand(
        "admin.doctor:doctor", "Check this machine and its volumes; changes nothing."
    ),
    "job": _LazyCommand("admin.jobs:job", "Show, follow and cancel the controller's jobs."),
    "reconcile": _LazyCommand(
        "admin.reconcile:reconcile", "Make the replicas of containers equal."
    ),
    "scan": _LazyCommand("admin.containers:scan", "Order agents to scan replicas for damage."),
    "scm": _LazyCommand(
        "scm.cli:scm", "Run the controller: receive reports, compare replicas, run jobs."
    ),
    "sweep": _LazyCommand(
        "admin.sweep:sweep", "Check every replica of a cluster in bulk, for example each night."
    ),
    "tree": _LazyCommand("admin.tree:tree", "Build, show, compare and check trees offline."),
    "verifier": _LazyCommand(
        "replicator.cli:verifier", "Run the verifier of a bucket: prove what it holds."
    ),
}


class Root(click.Group):
    """Lists lazy commands without importing them, and turns errors into exit
    statuses.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, imported now; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        try:
            return COMMANDS[cmd_name].load()
        except UsageError:
            # Who presses Tab has not asked for a command that needs an extra.
            if ctx.resilient_parsing:
                return None
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names that begin so, without importing any command, and our options."""
        names = [
            CompletionItem(name, help=command.summary)
            for name, command in sorted(COMMANDS.items())
            if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write names and summaries without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; a ReconcileError becomes a message and an exit status."""
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
    # Imported here, because it is slow and --help does not need it.
    from runtime.progress import ProgressStyle

    ctx.obj = ProgressStyle(bars=sys.stderr.isatty() and "CI" not in os.environ)


def main() -> None:
    """The console script."""
    _open_standard_streams()
    # gRPC logs errors to stderr that we report ourselves. It reads this variable when
    # it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    treefold.main(prog_name="treefold")


def _open_standard_streams() -> None:
    """Open the streams that the caller closed (`>&-`) on the null device.

    Otherwise Python has None in their place, and the next file that is opened gets the
    number of stdout. Stdout escapes what its encoding lacks, as stderr does.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    # The name of an object may have letters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
