"""The question before a command changes data or roles."""

import sys

import click

from admin.command_result import CommandResult
from runtime.exit_codes import ExitCode


def is_confirmed(answer: CommandResult, question: str, *, yes: bool) -> bool:
    """Whether the command may go on: by `yes`, or since somebody at a terminal says so.
    Otherwise the command ends with REFUSED.
    """
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if yes or (is_terminal and click.confirm(question, default=False, err=True)):
        return True
    answer.fail(
        "refused",
        "Nothing was changed: not confirmed.",
        hint="add --yes to confirm, or --dry-run to see only the plan",
    )
    answer.exit_status = ExitCode.REFUSED
    return False
