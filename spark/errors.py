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


class SparkMissingError(ReconcileError):
    """Spark cannot run here: pyspark or Java is missing, or Java is too old."""

    code = "spark_missing"


class SparkFailedError(ReconcileError):
    """A Spark job failed after all retries of its tasks."""

    code = "spark_failed"


class FolderNotSharedError(ReconcileError):
    """Executors do not see the folder that the driver writes a sweep to."""

    code = "folder_not_shared"


def cause_of(text: str) -> str:
    """What an error of Spark says of its cause, in a line."""
    return next((match[1].strip() for cause in _CAUSES if (match := cause.search(text))), "")
