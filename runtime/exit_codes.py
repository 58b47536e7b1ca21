"""What every command of ours returns to its caller."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses. Found damage is told apart from a command that failed."""

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
