"""The result of a command as one JSON document, also if the command fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import click

from merkle.errors import ReconcileError
from runtime.errors import OutputError
from runtime.exit_codes import ExitCode
from runtime.output import JsonObject, print_json, print_text

_SCHEMA_VERSION = 1


@dataclass(slots=True)
class CommandResult:
    """Collects the result of a command, and prints it as text unless `as_json`."""

    command: str
    as_json: bool
    data: object = None
    exit_status: int = 0
    errors: list[JsonObject] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def fail(self, code: str, message: str, *, hint: str = "") -> None:
        """Add an error. The command continues; unless a status is set already, it will
        exit with FAILED.
        """
        assert code == code.lower()
        self.errors.append({"code": code, "message": message, "hint": hint})
        self.exit_status = self.exit_status or ExitCode.FAILED
        if not self.as_json:
            print_text(message, stderr=True)
            if hint:
                print_text(f"  {hint}", stderr=True)

    def warn(self, message: str) -> None:
        """Add a warning; without --json it is printed to stderr."""
        self.warnings.append(message)
        if not self.as_json:
            print_text(f"warning: {message}", stderr=True)

    def print(self, text: str) -> None:
        """Print lines to stdout; nothing with --json."""
        if not self.as_json:
            print_text(text)

    def document(self) -> JsonObject:
        """The command's JSON document."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "command": self.command,
            "as_of": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            "ok": not self.errors and self.exit_status in (0, ExitCode.FINDINGS),
            "data": self.data,
            "warnings": self.warnings,
            "errors": self.errors,
        }


def error_json(error: ReconcileError) -> JsonObject:
    """The JSON object for an error."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def print_error(error: ReconcileError) -> None:
    """Print an error that ends a command to stderr."""
    print_text(f"error [{error.code}]: {error.message}", stderr=True)
    if error.hint:
        print_text(f"  {error.hint}", stderr=True)


@contextmanager
def command_result(command: str, *, as_json: bool) -> Iterator[CommandResult]:
    """Run the body of a command, then exit with its status. With `as_json` the document
    is printed even if the body fails.

    Raises:
        OutputError: an answer cannot be written.
        ReconcileError: the body raised it, without `as_json`.
        KeyboardInterrupt: the command was interrupted, without `as_json`.
    """
    answer = CommandResult(command, as_json)
    try:
        yield answer
    except ReconcileError as error:
        if not as_json or isinstance(error, OutputError):
            raise
        answer.fail(error.code, error.message, hint=error.hint)
        answer.exit_status = error.exit_status
    except KeyboardInterrupt:
        if not as_json:
            raise
        answer.fail("interrupted", "interrupted")
        answer.exit_status = ExitCode.INTERRUPTED
    if as_json:
        _print_document(answer)
    if answer.exit_status:
        raise click.exceptions.Exit(answer.exit_status)


def _print_document(answer: CommandResult) -> None:
    try:
        print_json(answer.document())
    except OutputError as lost:
        if not answer.exit_status:
            raise
        # The status still says how the command ended, and stderr why.
        print_error(lost)
        for error in answer.errors:
            print_text(f"error [{error['code']}]: {error['message']}", stderr=True)
