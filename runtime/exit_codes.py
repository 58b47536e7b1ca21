"""Exit statuses of all commands."""

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit status of a command. Findings and failures have different statuses."""

    CLEAN = 0
    FAILED = 1
    USAGE = 2
    FINDINGS = 3
    UNRECOVERABLE = 4
    PARTLY = 5
    REFUSED = 6
    UNREACHABLE = 7
    BUSY = 8
    INTERRUPTED = 130
