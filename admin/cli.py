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

import click

from admin.lazy_commands import LazyCommand, LazyGroup
from merkle.errors import ReconcileError
from runtime.exit_codes import ExitCode

COMMANDS: Mapping[str, LazyCommand] = {
    "agent": LazyCommand(
        "dnagent.cli:agent", "Run the agent of a datanode: scan, serve, report, repair."
    ),
    "bucket": LazyCommand(
        "admin.bucket:bucket", "Copy a bucket between two stores, and show that it is equal."
    ),
    "completion": LazyCommand(
        "admin.completion:completion", "Print what makes a shell complete commands and options."
    ),
    "container": LazyCommand(
        "admin.containers:container", "Show containers, their replicas and how they differ."
    ),
    "demo": LazyCommand(
        "admin.demo.repair_demo:demo", "Heal damaged replicas of real containers, on loopback."
    ),
    "doctor": LazyCommand(
        "admin.doctor:doctor", "Check this machine and its volumes; changes nothing."
    ),
    "job": LazyCommand("admin.jobs:job", "Show, follow and cancel the controller's jobs."),
    "reconcile": LazyCommand("admin.reconcile:reconcile", "Make the replicas of containers equal."),
    "scan": LazyCommand("admin.containers:scan", "Order agents to scan replicas for damage."),
    "scm": LazyCommand(
        "scm.cli:scm", "Run the controller: receive reports, compare replicas, run jobs."
    ),
    "sweep": LazyCommand(
        "admin.sweep:sweep", "Check every replica of a cluster in bulk, for example each night."
    ),
    "tree": LazyCommand("admin.tree:tree", "Build, show, compare and check trees offline."),
    "verifier": LazyCommand(
        "replicator.cli:verifier", "Run the verifier of a bucket: prove what it holds."
    ),
}


class Root(LazyGroup):
    """Turns errors into exit statuses."""

    lazy = COMMANDS

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
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as the others, never closed
    # The name of an object may have letters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
