"""The `treefold` command, with the command groups of all packages.

`treefold --help` must be fast, so this module has the groups' names and summaries. The
groups' own modules import RocksDB, gRPC and numpy, and are loaded on first use. A
ReconcileError ends the command with a message, its stable code and its exit status,
without a traceback.
"""

import errno
import gc
import os
import sys
from collections.abc import Mapping

import click

from admin.command_result import CommandResult, error_json, print_error
from admin.lazy_commands import LazyCommand, LazyGroup, missing_extra
from merkle.errors import ReconcileError
from runtime.errors import (
    DiskError,
    InternalError,
    OperationInterruptedError,
    OutputError,
    UsageError,
)
from runtime.exit_codes import ExitCode
from runtime.output import answer_stream, print_json

# Python begins with 700. To look through all modules again and again would be a tenth
# of a start.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000
# Of a context: all words of the command line after `treefold`.
_WORDS = "treefold.words"
_TRACEBACK = "TREEFOLD_TRACEBACK"
COMMANDS: Mapping[str, LazyCommand] = {
    "audit": LazyCommand(
        "admin.audit:audit", "Check and show who did what: the audit files, offline."
    ),
    "agent": LazyCommand(
        "dnagent.cli:agent", "Run the agent of a datanode: scan, serve, report, repair."
    ),
    "bucket": LazyCommand(
        "admin.bucket:bucket",
        "Copy a bucket between two stores, and show that it is equal.",
        extra="bucket",
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
    "diagnose": LazyCommand(
        "admin.diagnose:diagnose", "Compare the replicas of a running cluster, without agents."
    ),
    "doctor": LazyCommand(
        "admin.doctor:doctor", "Check this machine and its volumes; changes nothing."
    ),
    "job": LazyCommand(
        "admin.jobs:job", "Show, follow, pause, limit, cancel and undo the controller's jobs."
    ),
    "reconcile": LazyCommand("admin.reconcile:reconcile", "Make the replicas of containers equal."),
    "replication-master": LazyCommand(
        "replicator.master.cli:replication_master",
        "Run a replication master: tell syncers which buckets to replicate.",
        extra="bucket",
    ),
    "rescue": LazyCommand(
        "admin.rescue:rescue", "Heal containers of a running cluster that Ozone cannot heal."
    ),
    "scan": LazyCommand("admin.scans:scan", "Order agents to scan replicas for damage."),
    "scm": LazyCommand(
        "admin.controller_command:scm",
        "Run the controller: receive reports, compare replicas, run jobs.",
    ),
    "status": LazyCommand(
        "admin.status:status", "Say what is wrong, how sure that is, and what to do next."
    ),
    "sweep": LazyCommand(
        "admin.sweep:sweep", "Check every replica of a cluster in bulk, for example each night."
    ),
    "syncer": LazyCommand(
        "replicator.syncer.cli:syncer",
        "Run a syncer: replicate buckets as a replication master says.",
        extra="bucket",
    ),
    "tree": LazyCommand("admin.tree:tree", "Build, show, compare and check trees offline."),
    "verifier": LazyCommand(
        "replicator.cli:verifier",
        "Run the verifier of a bucket: prove what it holds.",
        extra="bucket",
    ),
}


class Root(LazyGroup):
    """Turns whatever ends a command early into a message on stderr and an exit status;
    with --json, into a JSON document on stdout, and nothing on stderr.
    """

    lazy = COMMANDS

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: object,
    ) -> click.Context:
        """The context of this group; its `meta` has all words of the command."""
        words = list(args)
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except click.ClickException as error:
            raise self._ended_by_usage(words, error) from error
        except OutputError as error:
            # Of --help and --version.
            raise self._ended(words, error) from error
        context.meta[_WORDS] = words
        return context

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. An error that nobody foresaw is one by name, too:
        $TREEFOLD_TRACEBACK shows where it came from.
        """
        words: list[str] = ctx.meta[_WORDS]
        try:
            return super().invoke(ctx)
        except ReconcileError as error:
            failure = error
        except KeyboardInterrupt:
            if not self._print_document(words, OperationInterruptedError("interrupted")):
                click.echo("interrupted", err=True)
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
        except click.ClickException as error:
            raise self._ended_by_usage(words, error) from error
        except (click.exceptions.Exit, click.Abort):
            raise
        # Whatever else: here a traceback would reach an operator, and a script would
        # get no JSON. The command ends with it, and nothing is hidden: it is called a
        # defect, and it is said how to see where.
        except Exception as error:
            # Of a pipe that nobody reads Click sees to itself.
            is_pipe = isinstance(error, OSError) and error.errno == errno.EPIPE
            if is_pipe or _TRACEBACK in os.environ:
                raise
            failure = _named(error)
        raise self._ended(words, failure)

    def _ended(self, words: list[str], error: ReconcileError) -> click.exceptions.Exit:
        if not self._print_document(words, error):
            print_error(error)
        return click.exceptions.Exit(error.exit_status)

    def _ended_by_usage(self, words: list[str], error: click.ClickException) -> Exception:
        if self._print_document(words, UsageError(error.format_message())):
            return click.exceptions.Exit(error.exit_code)
        # Click prints how the command is called, too.
        return error

    def _print_document(self, words: list[str], error: ReconcileError) -> bool:
        """With --json, print the document of a command that failed; returns whether it
        did.
        """
        if not _is_json(words) or isinstance(error, OutputError):
            return False
        result = CommandResult(self._name(words), as_json=True)
        result.errors.append(error_json(error))
        try:
            print_json(result.document())
        except OutputError as lost:
            print_error(lost)
            return False
        return True

    def _name(self, words: list[str]) -> str:
        """The name of the command that some words call, as far as they name one."""
        command: click.Command | None = self
        names = list[str]()
        for word in words:
            if not isinstance(command, click.Group):
                break
            command = command.get_command(click.Context(command), word)
            if command is None:
                break
            names.append(word)
        return " ".join(names)


def _is_json(words: list[str]) -> bool:
    """Whether a command has the flag --json; after `--` there are no flags."""
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def _named(error: Exception) -> ReconcileError:
    """The name of an error that nobody foresaw. Only one with the path of a file is of
    files: connections fail with the same class.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return DiskError(f"{error.filename}: {error.strerror or error}")
    # A store in S3 is opened long after its command was imported.
    if isinstance(error, ModuleNotFoundError) and (named := missing_extra(error)):
        return named
    return InternalError(
        f"{type(error).__name__}: {error}",
        hint=f"This is a defect. Please report what {_TRACEBACK}=1 shows besides.",
    )


@click.group(cls=Root, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="treefold", prog_name="treefold")
@click.pass_context
def treefold(ctx: click.Context) -> None:
    """Reconcile the containers of Apache Ozone datanodes with Merkle trees."""
    # Imported here, because it is slow and --help does not need it.
    from runtime.progress import ProgressStyle

    ctx.obj = ProgressStyle.of(is_terminal=sys.stderr.isatty(), environment=os.environ)


def main() -> None:
    """The console script."""
    _open_standard_streams()
    # What is imported stays: looking for garbage in it was a tenth of a start.
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    # gRPC logs errors to stderr that we report ourselves. It reads this variable when
    # it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    treefold.main(prog_name="treefold")


def _open_standard_streams() -> None:
    """Open the streams that the caller closed (`>&-`) on the null device.

    Otherwise Python has None in their place, and the next file that is opened gets the
    number of stdout. A command that has an answer for a closed stdout fails.
    """
    closed = set[int]()
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            closed.add(number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - as the others, never closed
    sys.stdout = answer_stream(1, encoding=sys.stdout.encoding, is_closed=1 in closed)


if __name__ == "__main__":
    main()
