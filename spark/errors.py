"""Errors of starting Spark and of its jobs."""

import re

from merkle.errors import ReconcileError

# Where Spark's error text names the cause: our own error first, then another one of
# Python, then the last failure of a task, then the innermost exception of Java, then
# any line.
_CAUSES = (
    re.compile(r"\b\w+\.errors\.(\w+: .*)"),
    re.compile(r"^(\w+Error: .*)", re.MULTILINE),
    re.compile(r"most recent failure: (.*)"),
    re.compile(r"(?s:.*)\nCaused by: (.*)"),
    re.compile(r"\n: (.*)"),
    re.compile(r"(.+)"),
)


# The last line of a traceback of Python, with the name of one of our classes.
_OURS = re.compile(r"^(?:\w+\.)+(\w+Error): (.+)$", re.MULTILINE)
_MISSING = re.compile(r"\bNo module named '?(\w+)")
_REASONS_MAX = 4
# What a message of a task cannot bring along.
_HINTS = {"FolderNotSharedError": "Give a --state that all executors have at the same path."}


class SparkMissingError(ReconcileError):
    """Spark cannot run here: pyspark or Java is missing, or Java is too old."""

    code = "spark_missing"


class SparkFailedError(ReconcileError):
    """A Spark job failed after all retries of its tasks."""

    code = "spark_failed"


class FolderNotSharedError(ReconcileError):
    """Executors do not see the folder that the driver writes a sweep to."""

    code = "folder_not_shared"


class PackagesMissingError(ReconcileError):
    """Executors cannot import Treefold, or a library that it needs."""

    code = "packages_missing"


def failure_of(description: str, text: str) -> ReconcileError:
    """The error of a job that failed with this text of Spark's."""
    if missing := _MISSING.search(text):
        return PackagesMissingError(
            f"{description} failed: executors cannot import {missing[1]}",
            hint="Give what `treefold sweep pack --out DIR` makes: --pack DIR",
        )
    return SparkFailedError(f"{description} failed on Spark: {cause_of(text)}")


def task_failure(description: str, text: str) -> ReconcileError:
    """The same of a job whose tasks raise errors of ours, which a command ends with as
    if it had met them itself: as the class that it has here.
    """
    kinds = {kind.__name__: kind for kind in ReconcileError.by_code().values()}
    # Of a chain of errors, the last one is what the task raised.
    for name, message in reversed(_OURS.findall(text)):
        if name in kinds:
            return kinds[name].received(message.strip(), hint=_HINTS.get(name, ""), reason="")
    return failure_of(description, text)


def cause_of(text: str) -> str:
    """What an error of Spark says of its cause, in a line."""
    return next((match[1].strip() for cause in _CAUSES if (match := cause.search(text))), "")


def reasons_of(text: str) -> str:
    """The lines of Spark's log that name errors, without stack frames."""
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("\t", " "))]
    errors = [line for line in lines if re.search(r"Exception\b|Error\b|\bERROR\b", line)]
    return "\n".join(list(dict.fromkeys(errors or lines))[:_REASONS_MAX])
